"""A draft model whose cache shows every mistake, and what it should have said."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence

from kitfox.kv_cache.paged import PagedKVCacheManager
from kitfox.spec_decode.model_proposers import Chunk, DraftModel, DraftProposer, SelfProposer
from kitfox.spec_decode.translation import TranslatingProposer

BLOCK_SIZE = 4


class FakeDraftModel(DraftModel):
    """Says what a hash of the text says that it finds in its cache.

    Attributes:
        num_tokens: how many were computed in each call.
        broken: every probability is not a number.
    """

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.slots: dict[tuple[int, int], int] = {}
        self.num_tokens: list[int] = []
        self.broken = False

    def compute(self, chunks: Sequence[Chunk]) -> list[tuple[int, float]]:
        self.num_tokens.append(sum(len(chunk.token_ids) for chunk in chunks))
        written = [set(chunk.block_ids[chunk.start // BLOCK_SIZE : -(-chunk.end // BLOCK_SIZE)]) for chunk in chunks]
        assert len(set().union(*written)) == sum(map(len, written)), "two texts write to one block"
        for chunk in chunks:
            assert chunk.token_ids, "a chunk of nothing"
            self.write(chunk.token_ids, chunk.start, chunk.block_ids)
        return [self.answer(self.read(chunk)) for chunk in chunks]

    def write(self, token_ids: Sequence[int], start: int, block_ids: list[int]) -> None:
        for place, token_id in enumerate(token_ids, start):
            self.slots[block_ids[place // BLOCK_SIZE], place % BLOCK_SIZE] = token_id

    def read(self, chunk: Chunk) -> list[int]:
        return [self.slots[chunk.block_ids[place // BLOCK_SIZE], place % BLOCK_SIZE] for place in range(chunk.end)]

    def answer(self, text: list[int]) -> tuple[int, float]:
        noise = random.Random(repr(text))
        return noise.randrange(self.vocab_size), math.nan if self.broken else noise.uniform(0.5, 1.0)

    def continuation(self, text: Sequence[int], limit: int, min_probability: float) -> tuple[list[int], list[float]]:
        """What a proposer should make of a text."""
        token_ids: list[int] = []
        probabilities: list[float] = []
        while len(token_ids) < limit and math.prod(probabilities) >= min_probability:
            token_id, probability = self.answer([*text, *token_ids])
            token_ids.append(token_id)
            probabilities.append(probability)
        return token_ids, probabilities


def draft_proposer(
    model: FakeDraftModel, num_blocks: int = 1024, *, chunk_tokens: int = 1 << 20, max_model_len: int = 4096
) -> tuple[DraftProposer, PagedKVCacheManager]:
    kv_cache = PagedKVCacheManager(num_blocks, BLOCK_SIZE, enable_caching=True)
    proposer = DraftProposer(
        model,
        kv_cache,
        kv_bytes=1000,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        chunk_tokens=chunk_tokens,
    )
    return proposer, kv_cache


class SelfInEngine(SelfProposer):
    """With an engine around it that computes all but the last token of each request, as the real one has."""

    def __init__(self, model: FakeDraftModel, num_spare_blocks: int = 8, chunk_tokens: int = 8):
        super().__init__(
            model, self.computed_tokens, block_size=BLOCK_SIZE, vocab_size=model.vocab_size, chunk_tokens=chunk_tokens
        )
        self.model = model
        self.num_spare_blocks = num_spare_blocks
        self.num_lost = 0  # computed tokens that a request lacks beside its last
        self.blocks: dict[str, list[int]] = {}
        self.num_blocks = 0

    def computed_tokens(self, request_id: str) -> tuple[int, list[int]]:
        """The step before has written the KV of all that stands."""
        text = self._texts[request_id]
        blocks = self.blocks.setdefault(request_id, [])
        while len(blocks) * BLOCK_SIZE < len(text) + self.num_spare_blocks * BLOCK_SIZE:
            blocks.append(self.num_blocks)
            self.num_blocks += 1
        num_computed = max(len(text) - 1 - self.num_lost, 0)
        self.model.write(text[:num_computed], 0, blocks)
        return num_computed, blocks


class Letters:
    """A tokenizer of single letters, the space among them; ids beyond them begin anew."""

    special_ids: frozenset[int] = frozenset()
    alphabet = "abcdefghijklmnopqrstuvwxyz "

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return [self.alphabet.index(letter) for letter in text]

    def token_bytes(self, token_id: int) -> bytes:
        return self.alphabet[token_id % len(self.alphabet)].encode()


class Pairs:
    """A tokenizer of pairs of letters within words, which begin with their spaces; 0 begins a text, 1 ends it."""

    special_ids = frozenset({0, 1})
    pieces = ("<begin>", "<end>", *Letters.alphabet, *(a + b for a in Letters.alphabet for b in Letters.alphabet))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        words = re.findall(r" *[^ ]+| +", text)
        pairs = [word[start : start + 2] for word in words for start in range(0, len(word), 2)]
        return [0] * add_special_tokens + [self.pieces.index(pair) for pair in pairs]

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id].encode()


def translating_proposer(model: FakeDraftModel, num_blocks: int = 1024) -> TranslatingProposer:
    assert model.vocab_size <= len(Pairs.pieces)
    return TranslatingProposer(draft_proposer(model, num_blocks)[0], Letters(), Pairs())
