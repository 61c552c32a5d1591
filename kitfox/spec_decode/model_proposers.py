"""Guesses of a model: a smaller one with a KV cache of its own, the first layers of the model itself, or a head on it.

All write a few tokens greedily, all answers in one batch, each as far as the model thinks them likely. They differ in
where the KV of an answer's tokens comes from. `DraftProposer` computes all of it, prompts in chunks, in a pool that has
its own prefix cache; what became of a guess shows when the answer goes on: KV stands as far as its tokens do.
`SelfProposer` finds it where the model has left it, and writes that of its guesses behind, where the step that verifies
them writes the same numbers again, or others, before anything reads them. `HeadProposer` has a layer of its own in the
same cache, and computes it for all that the model has computed, from the hidden states that the model left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kitfox.config import EngineConfig
from kitfox.errors import ConfigError
from kitfox.kv_cache.manager import KVCacheManager
from kitfox.request import EngineRequest, Request, SamplingParams
from kitfox.spec_decode.proposer import Proposal, Proposer

MIN_PROBABILITY = 0.3
CHUNK_TOKENS = 128
DRAFT_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Chunk:
    """Tokens of one text that a model computes in one go.

    Attributes:
        request_id: whose text it is.
        start: position of the first; the KV of all before it is in the blocks already.
        block_ids: with room for the chunk.
    """

    request_id: str
    token_ids: list[int]
    start: int
    block_ids: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class DraftModel(ABC):
    """A model that guesses, and the memory of its KV cache."""

    @abstractmethod
    def compute(self, chunks: Sequence[Chunk]) -> list[tuple[int, float]]:
        """Write the chunks' KV; the likeliest token behind each, and how likely it is (not a number: it is broken).

        No two chunks share a block that either writes to.
        """


class ModelProposer(Proposer):
    """What guesses of models have in common: tokens one after another, all answers together."""

    def __init__(self, model: DraftModel, *, vocab_size: int, min_probability: float):
        """
        Args:
            vocab_size: tokens from here on are no guesses: whoever asks does not have them.
            min_probability: of all guesses for an answer together; less likely ones are not continued.
        """
        self._model = model
        self._vocab_size = vocab_size
        self._min_probability = min_probability

    def _draft(self, chunks: dict[str, Chunk], limits: Mapping[str, int]) -> dict[str, Proposal]:
        """Compute chunks, and write on behind those of the requests that have a limit.

        A request's blocks have room for its chunk and all but the last of its guesses.
        """
        guesses: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in chunks}
        chances = dict.fromkeys(chunks, 1.0)
        while chunks:
            following = {}
            for (name, chunk), (token_id, probability) in zip(
                chunks.items(), self._model.compute(list(chunks.values())), strict=True
            ):
                if name not in limits or token_id >= self._vocab_size or not probability >= 0:
                    continue
                token_ids, probabilities = guesses[name]
                token_ids.append(token_id)
                probabilities.append(min(probability, 1.0))
                chances[name] *= probability
                if len(token_ids) < limits[name] and chances[name] >= self._min_probability:
                    following[name] = Chunk(name, [token_id], chunk.end, chunk.block_ids)
            chunks = following
        return {name: Proposal(*guess) for name, guess in guesses.items() if guess[0]}


@dataclass
class _Text:
    """A request's tokens as the draft model has them.

    Attributes:
        request: what the draft's KV cache knows it as; its num_computed_tokens are right, and less than its tokens.
        written: tokens whose KV lies behind those: right as far as the request goes on with them.
    """

    request: Request
    written: list[int] = field(default_factory=list)


class DraftProposer(ModelProposer):
    """A second model with its own KV cache. An answer gets guesses once its prompt is computed, if there is room."""

    def __init__(
        self,
        model: DraftModel,
        kv_cache: KVCacheManager,
        *,
        kv_bytes: int,
        max_model_len: int,
        vocab_size: int,
        min_probability: float = MIN_PROBABILITY,
        chunk_tokens: int = CHUNK_TOKENS,
    ):
        """
        Args:
            kv_cache: of whole blocks: it never copies part of one.
            kv_bytes: what the pool takes.
            max_model_len: most tokens of a text, in the draft model.
            chunk_tokens: most tokens that are computed before the first guess, of all texts together.
        """
        super().__init__(model, vocab_size=vocab_size, min_probability=min_probability)
        self._kv_cache = kv_cache
        self._kv_bytes = kv_bytes
        self._max_model_len = max_model_len
        self._chunk_tokens = chunk_tokens
        self._texts: dict[str, _Text] = {}

    def start(
        self, request_id: str, token_ids: Sequence[int], *, num_prompt_tokens: int, salt: str | None = None
    ) -> None:
        if not token_ids:
            return
        sampling = SamplingParams(max_tokens=0)
        source = EngineRequest(
            request_id=request_id, prompt_token_ids=list(token_ids), sampling=sampling, cache_salt=salt
        )
        self._texts[request_id] = _Text(Request(source))

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        if request_id in self._texts:
            self._texts[request_id].request.all_token_ids += token_ids
        else:
            self.start(request_id, token_ids, num_prompt_tokens=0)

    def propose(self, limits: Mapping[str, int], tails: Mapping[str, list[int]] | None = None) -> dict[str, Proposal]:
        """tails: tokens that follow a request's in this question only; the guesses are behind them."""
        texts = {name: self._texts[name] for name in limits if name in self._texts}
        for text in texts.values():
            self._settle(text)
        chunks: dict[str, Chunk] = {}
        ready: dict[str, int] = {}
        budget = self._chunk_tokens
        # Those that lack least come first: a long prompt takes what they leave.
        for name, text in sorted(texts.items(), key=lambda item: _num_missing(item[1].request)):
            request = text.request
            tail = (tails or {}).get(name, [])
            num_tokens = request.num_tokens + len(tail)
            limit = min(limits[name], self._max_model_len - num_tokens + 1)
            if budget == 0:
                break
            if limit < 1 or not self._reserve(request, len(tail) + limit - 1):
                continue
            start = request.num_computed_tokens
            token_ids = (request.all_token_ids[start:] + tail)[:budget]
            budget -= len(token_ids)
            chunks[name] = Chunk(name, token_ids, start, self._kv_cache.block_ids(name))
            if chunks[name].end == num_tokens:
                ready[name] = limit
        proposals = self._draft(chunks, ready)
        for name, chunk in chunks.items():
            guessed = proposals[name].token_ids[:-1] if name in proposals else []
            texts[name].written = chunk.token_ids + guessed
        return proposals

    def _settle(self, text: _Text) -> None:
        """Count as computed what was written and stands; never the last token, behind which the next guess is."""
        request = text.request
        actual = request.all_token_ids[request.num_computed_tokens : request.num_tokens - 1]
        for written, token_id in zip(text.written, actual, strict=False):
            if written != token_id:
                break
            request.num_computed_tokens += 1
        text.written = []
        self._kv_cache.cache_computed(request)

    def _reserve(self, request: Request, num_behind: int) -> bool:
        """Blocks for all tokens that a request lacks and some behind them, or none."""
        if self._kv_cache.block_ids(request.request_id):
            return self._kv_cache.allocate_slots(request, _num_missing(request) + num_behind) is not None
        prefix = self._kv_cache.match_prefix(request)
        num_tokens = request.num_tokens - prefix.num_tokens + num_behind
        allocation = self._kv_cache.allocate_slots(request, num_tokens, prefix=prefix)
        if allocation is None:
            return False
        assert not allocation.block_copies, "the cache shares part of a block"
        request.num_computed_tokens = prefix.num_tokens
        return True

    def finish(self, request_id: str, *, keep: bool) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._settle(text)
            self._kv_cache.free(text.request)

    def flush_cache(self) -> None:
        self._kv_cache.reset()

    @property
    def memory_bytes(self) -> int:
        return self._kv_bytes + sum(8 * text.request.num_tokens for text in self._texts.values())


def _num_missing(request: Request) -> int:
    return request.num_tokens - request.num_computed_tokens


class ComputedTokens(Protocol):
    """Where the KV of running requests is, and of how many of their tokens."""

    def __call__(self, request_id: str) -> tuple[int, list[int]]:
        """Its number of computed tokens, and its block table."""


class ProposerOnModel(ModelProposer):
    """What guesses with the model's own KV have in common: the tokens of each request, and where its blocks are."""

    def __init__(
        self,
        model: DraftModel,
        computed: ComputedTokens,
        *,
        block_size: int,
        vocab_size: int,
        min_probability: float = MIN_PROBABILITY,
    ):
        super().__init__(model, vocab_size=vocab_size, min_probability=min_probability)
        self._computed = computed
        self._block_size = block_size
        self._texts: dict[str, list[int]] = {}

    def start(
        self, request_id: str, token_ids: Sequence[int], *, num_prompt_tokens: int, salt: str | None = None
    ) -> None:
        self._texts[request_id] = list(token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._texts[request_id] += token_ids

    def finish(self, request_id: str, *, keep: bool) -> None:
        self._texts.pop(request_id, None)

    @property
    def memory_bytes(self) -> int:
        return sum(8 * len(text) for text in self._texts.values())


class SelfProposer(ProposerOnModel):
    """The first layers of the model itself. Guesses go no further than the blocks that a request holds anyway."""

    def __init__(
        self,
        model: DraftModel,
        computed: ComputedTokens,
        *,
        block_size: int,
        vocab_size: int,
        min_probability: float = MIN_PROBABILITY,
        chunk_tokens: int = CHUNK_TOKENS,
    ):
        """chunk_tokens: a request that lacks the KV of more tokens, because it was preempted, has no guesses yet."""
        super().__init__(model, computed, block_size=block_size, vocab_size=vocab_size, min_probability=min_probability)
        self._chunk_tokens = chunk_tokens

    def propose(self, limits: Mapping[str, int]) -> dict[str, Proposal]:
        chunks: dict[str, Chunk] = {}
        ready: dict[str, int] = {}
        for name, limit in limits.items():
            num_computed, block_ids = self._computed(name)
            text = self._texts[name]
            room = len(block_ids) * self._block_size - len(text)
            if room >= 0 and 1 <= len(text) - num_computed <= self._chunk_tokens:
                chunks[name] = Chunk(name, text[num_computed:], num_computed, block_ids)
                ready[name] = min(limit, room + 1)
        return self._draft(chunks, ready)


class HeadModel(DraftModel):
    """A head, and the hidden states that it has not read yet: those of the tokens that the last step computed."""

    @abstractmethod
    def unread(self, request_id: str) -> tuple[int, int]:
        """The position of the first of a request's states, and how many there are."""

    @abstractmethod
    def write(self, chunks: Sequence[Chunk]) -> None:
        """As `compute`, without a guess. Both read the states of a request's chunk and forget the others."""

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Its states are of no use any more."""


class HeadProposer(ProposerOnModel):
    """A head: position i of it has the model's states at i, and token i + 1.

    What becomes of a guess the model finds out, and with it come the states from which the head writes the same places
    again. KV of a prefix that another request left is used as it is: behind the last token of a block another one may
    have followed there, which makes a guess worse and nothing else.
    """

    def __init__(
        self,
        model: HeadModel,
        computed: ComputedTokens,
        *,
        block_size: int,
        vocab_size: int,
        min_probability: float = MIN_PROBABILITY,
    ):
        super().__init__(model, computed, block_size=block_size, vocab_size=vocab_size, min_probability=min_probability)
        self._head = model

    def propose(self, limits: Mapping[str, int]) -> dict[str, Proposal]:
        chunks = self._chunks(limits)
        ready: dict[str, int] = {}
        for name, chunk in chunks.items():
            room = len(chunk.block_ids) * self._block_size - chunk.end
            if chunk.end == len(self._texts[name]) - 1:
                ready[name] = min(limits[name], room + 1)
        return self._draft(chunks, ready)

    def catch_up(self, request_ids: Iterable[str]) -> None:
        """Read the states of requests before the next step's take their place, where no guess was asked for."""
        if chunks := self._chunks(request_ids):
            self._head.write(list(chunks.values()))

    def _chunks(self, request_ids: Iterable[str]) -> dict[str, Chunk]:
        chunks = {}
        for name in request_ids:
            start, count = self._head.unread(name)
            text = self._texts.get(name)
            if count == 0 or text is None:
                continue
            num_computed, block_ids = self._computed(name)  # without the guesses that were wrong
            end = min(start + count, num_computed, len(text) - 1)
            if start < end:
                chunks[name] = Chunk(name, text[start + 1 : end + 1], start, block_ids)
        return chunks

    def finish(self, request_id: str, *, keep: bool) -> None:
        if keep:  # who finds its prefix finds the head's part of it too
            self.catch_up([request_id])
        super().finish(request_id, keep=keep)
        self._head.forget(request_id)


@dataclass(frozen=True)
class DraftOptions:
    """Options of the method "draft".

    Attributes:
        model: the draft model: alias, directory, `.gguf` file or hub id; best of the same vocabulary.
        revision, dtype, quantization, load_format: of it, as in `ModelOptions`.
        max_model_len: longest text it guesses for; None is as far as both models go.
        memory_bytes: most bytes of its KV cache.
        min_probability, chunk_tokens: see `DraftProposer`.
    """

    model: str = ""
    revision: str | None = None
    dtype: str = "auto"
    quantization: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    memory_bytes: int = DRAFT_MEMORY_BYTES
    min_probability: float = MIN_PROBABILITY
    chunk_tokens: int = CHUNK_TOKENS

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("speculative decoding by a draft model needs its name: model", param="speculation")
        if self.memory_bytes < 1:
            raise ConfigError(f"memory_bytes of a draft model must be >= 1. Given: {self.memory_bytes!r}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"max_model_len of a draft model must be >= 1. Given: {self.max_model_len!r}")
        _check_drafting(self.min_probability, self.chunk_tokens)

    def config_of_draft(self, config: EngineConfig) -> EngineConfig:
        """That of an engine, for the draft model in it."""
        names = ("model", "revision", "dtype", "quantization", "load_format", "max_model_len")
        return config.replace(model={"tokenizer": None} | {name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class SelfOptions:
    """Options of the method "self".

    Attributes:
        num_layers: how many layers guess; None is half of them.
        min_probability: see `ModelProposer`.
    """

    num_layers: int | None = None
    min_probability: float = MIN_PROBABILITY

    def __post_init__(self) -> None:
        if self.num_layers is not None and self.num_layers < 1:
            raise ConfigError(f"num_layers that guess must be >= 1. Given: {self.num_layers!r}")
        _check_drafting(self.min_probability, CHUNK_TOKENS)


@dataclass(frozen=True)
class HeadOptions:
    """Options of the methods "eagle" and "eagle3".

    Attributes:
        model: the head: directory or hub id. revision: of it.
        min_probability: see `ModelProposer`.
    """

    model: str = ""
    revision: str | None = None
    min_probability: float = MIN_PROBABILITY

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("speculative decoding by a head needs its name: model", param="speculation")
        _check_drafting(self.min_probability, CHUNK_TOKENS)


def _check_drafting(min_probability: float, chunk_tokens: int) -> None:
    if not 0 <= min_probability <= 1:
        raise ConfigError(f"min_probability of guesses must be in [0, 1]. Given: {min_probability!r}")
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens of a draft model must be >= 1. Given: {chunk_tokens!r}")
