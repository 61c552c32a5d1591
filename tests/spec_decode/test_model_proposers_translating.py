from __future__ import annotations

import itertools
import random

import pytest

from kitfox.spec_decode.model_proposers import MIN_PROBABILITY
from kitfox.spec_decode.proposer import Proposal
from kitfox.spec_decode.translation import TranslatingProposer
from tests.spec_decode.fakes import FakeDraftModel, Letters, Pairs, draft_proposer

LETTERS, PAIRS = Letters(), Pairs()


class Scripted(FakeDraftModel):
    """Writes on in a text that it knows, and is sure of it."""

    def __init__(self, text: str):
        super().__init__(len(Pairs.pieces))
        self.tokens = PAIRS.encode(text)

    def answer(self, text: list[int]) -> tuple[int, float]:
        is_known = text == self.tokens[: len(text)] and len(text) < len(self.tokens)
        return (self.tokens[len(text)], 0.9) if is_known else (1, 0.9)


def propose(model: FakeDraftModel, text: str, limit: int) -> Proposal | None:
    proposer = TranslatingProposer(draft_proposer(model)[0], LETTERS, PAIRS)
    proposer.start("a", LETTERS.encode(text), num_prompt_tokens=len(text))
    return proposer.propose({"a": limit}).get("a")


def test_a_guess_in_the_others_tokens() -> None:
    model = Scripted("the fox and the dog")
    proposal = propose(model, "the fox", 4)
    assert proposal is not None
    assert proposal.token_ids == LETTERS.encode(" and")
    # " a" and "nd" are one guess each: the second letter of a pair comes with the first.
    assert proposal.probabilities == pytest.approx([0.9, 1.0, 0.9, 1.0])


def test_in_the_middle_of_a_word_and_of_a_pair() -> None:
    model = Scripted("the foxes")
    assert propose(model, "the f", 2) == Proposal(LETTERS.encode("ox"), [0.9, 1.0])
    assert propose(model, "the f", 1) == Proposal(LETTERS.encode("o"), [0.9])
    assert propose(model, "the fo", 1) is None  # the model reads "o" behind " f", and knows "ox" only


def test_nothing_behind_the_end_of_a_text() -> None:
    assert propose(Scripted("the fox"), "the fox", 9) is None


def test_the_model_reads_the_text_in_its_own_tokens_however_it_came() -> None:
    noise = random.Random(1)
    for number in range(20):
        text = "".join(noise.choices("ab ", k=300))
        model = FakeDraftModel(len(Pairs.pieces))
        proposer = TranslatingProposer(draft_proposer(model)[0], LETTERS, PAIRS)
        proposer.start("a", LETTERS.encode(text[:5]), num_prompt_tokens=5)
        for start, end in itertools.pairwise([5, *sorted(noise.sample(range(6, 300), 9)), 300]):
            proposer.extend("a", LETTERS.encode(text[start:end]))
            guess = proposer.propose({"a": 1 + number})
            expected, _ = model.continuation(PAIRS.encode(text[:end]), 1 + number, MIN_PROBABILITY)
            said = b"".join(map(PAIRS.token_bytes, itertools.takewhile(lambda token: token > 1, expected))).decode()
            assert guess.get("a", Proposal()).token_ids == LETTERS.encode(said)[: 1 + number]


def test_only_what_is_new_is_computed() -> None:
    model = Scripted("the fox and the dog and the fox")
    proposer = TranslatingProposer(draft_proposer(model)[0], LETTERS, PAIRS)
    proposer.start("a", LETTERS.encode("the fox and the dog"), num_prompt_tokens=19)
    proposer.propose({"a": 4})
    proposer.extend("a", LETTERS.encode(" and"))
    model.num_tokens.clear()
    proposal = proposer.propose({"a": 4})["a"]
    assert proposal.token_ids == LETTERS.encode(" the")
    assert model.num_tokens[0] <= len(PAIRS.encode(" dog and", add_special_tokens=False))


def test_a_long_word_is_handed_on_in_pieces() -> None:
    model = FakeDraftModel(len(Pairs.pieces))
    proposer = TranslatingProposer(draft_proposer(model)[0], LETTERS, PAIRS)
    proposer.start("a", [0] * 1000, num_prompt_tokens=1000)
    proposer.propose({"a": 1})
    model.num_tokens.clear()
    proposer.propose({"a": 1})
    assert model.num_tokens[0] <= 64 // 2 + 1


def test_half_a_character_is_no_guess() -> None:
    class Bytes(Letters):
        special_ids: frozenset[int] = frozenset()

        def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
            return list(text.encode())

        def token_bytes(self, token_id: int) -> bytes:
            return bytes([token_id])

    class Foxes(FakeDraftModel):
        def answer(self, text: list[int]) -> tuple[int, float]:
            return "🦊".encode()[len(text) % 4], 0.9

    proposer = TranslatingProposer(draft_proposer(Foxes(256))[0], Bytes(), Bytes())
    proposer.start("a", list(b"abc abcd"), num_prompt_tokens=8)
    assert proposer.propose({"a": 3}) == {}
    assert proposer.propose({"a": 5})["a"].token_ids == list("🦊".encode())
