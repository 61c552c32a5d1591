"""One suite over every proposer.

Requests of different salts speak in different tokens here, so a draft that tells one of another's text shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kitfox.spec_decode.proposer import Proposal, Proposer
from kitfox.spec_decode.proposers import make_proposer
from tests.spec_decode.fakes import FakeDraftModel, Pairs, SelfInEngine, draft_proposer, translating_proposer

PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "ngram": lambda: make_proposer("ngram"),
    "ngram-1": lambda: make_proposer("ngram", min_length=1, max_length=6),
    "suffix": lambda: make_proposer("suffix"),
    "suffix-small": lambda: make_proposer("suffix", max_cached_requests=4, min_probability=0.0),
    "draft": lambda: draft_proposer(FakeDraftModel(NUM_TOKENS * len(SALTS)))[0],
    "translating": lambda: translating_proposer(FakeDraftModel(len(Pairs.pieces))),
    "self": lambda: SelfInEngine(FakeDraftModel(NUM_TOKENS * len(SALTS))),
}
# Those that draft nothing but tokens they have seen under the same salt.
COPYING = {"ngram", "ngram-1", "suffix", "suffix-small"}
SALTS = (None, "one", "two")
NUM_TOKENS = 6  # so few that everything repeats


@pytest.fixture(params=PROPOSERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def tokens_of(noise: random.Random, count: int, salt: str | None = None) -> list[int]:
    return [NUM_TOKENS * SALTS.index(salt) + noise.randrange(NUM_TOKENS) for _ in range(count)]


def taught(name: str) -> Proposer:
    """One that learnt a few answers."""
    proposer, noise = PROPOSERS[name](), random.Random(3)
    for number in range(8):
        proposer.start(f"past {number}", tokens_of(noise, 30), num_prompt_tokens=10)
        proposer.finish(f"past {number}", keep=True)
    return proposer


def check(proposals: Mapping[str, Proposal], limits: Mapping[str, int]) -> None:
    assert set(proposals) <= set(limits)
    for request_id, proposal in proposals.items():
        assert 1 <= len(proposal.token_ids) <= limits[request_id]
        assert len(proposal.probabilities) == len(proposal.token_ids)
        assert all(0 <= probability <= 1 for probability in proposal.probabilities)
        assert all(type(token_id) is int for token_id in proposal.token_ids)


def test_nothing_is_known_of_tokens_that_never_occurred(name: str) -> None:
    proposer = PROPOSERS[name]()
    proposer.start("a", [1, 2, 3], num_prompt_tokens=3)
    proposer.start("empty", [], num_prompt_tokens=0)
    if name in COPYING:
        assert proposer.propose({"a": 4, "empty": 4}) == {}


def test_a_text_that_repeats_itself_is_continued(name: str) -> None:
    proposer = PROPOSERS[name]()
    proposer.start("a", [*range(100, 140), *range(100, 112)], num_prompt_tokens=52)
    if name in COPYING:
        assert proposer.propose({"a": 5})["a"].token_ids == [112, 113, 114, 115, 116]


@pytest.mark.parametrize("limit", [1, 2, 7, 1000])
def test_no_more_than_the_limit(name: str, limit: int) -> None:
    proposer = taught(name)
    noise = random.Random(limit)
    for number in range(20):
        proposer.start(str(number), tokens_of(noise, 60), num_prompt_tokens=20)
    limits = {str(number): limit for number in range(20)}
    proposals = proposer.propose(limits)
    check(proposals, limits)
    assert proposals or name not in COPYING


def test_the_same_history_gives_the_same_drafts(name: str) -> None:
    noise = random.Random(5)
    texts = [tokens_of(noise, 40) for _ in range(4)]
    answers = []
    for _ in range(2):
        proposer = taught(name)
        for number, text in enumerate(texts):
            proposer.start(str(number), text, num_prompt_tokens=20)
        answers.append(proposer.propose({str(number): 8 for number in range(4)}))
    assert answers[0] == answers[1]


def test_a_draft_does_not_know_its_company(name: str) -> None:
    noise = random.Random(6)
    texts = {str(number): tokens_of(noise, 30 + number) for number in range(12)}
    crowded = taught(name)
    for request_id, text in texts.items():
        crowded.start(request_id, text, num_prompt_tokens=20)
    together = crowded.propose(dict.fromkeys(texts, 8))
    for request_id, text in texts.items():
        alone = taught(name)
        alone.start(request_id, text, num_prompt_tokens=20)
        assert alone.propose({request_id: 8}).get(request_id) == together.get(request_id)


def test_proposing_twice_gives_the_same(name: str) -> None:
    proposer = taught(name)
    proposer.start("a", tokens_of(random.Random(7), 50), num_prompt_tokens=20)
    assert proposer.propose({"a": 8}) == proposer.propose({"a": 8})


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_how_tokens_arrive_makes_no_difference(name: str, piece: int) -> None:
    text = tokens_of(random.Random(8), 400)
    proposer = taught(name)
    proposer.start("at once", text, num_prompt_tokens=10)
    proposer.start("in pieces", text[:10], num_prompt_tokens=10)
    for start in range(10, len(text), piece):
        proposer.extend("in pieces", text[start : start + piece])
    proposals = proposer.propose({"at once": 8, "in pieces": 8})
    assert proposals.get("at once") == proposals.get("in pieces")


def test_a_preempted_request_goes_on_as_if_it_had_not_been(name: str) -> None:
    noise = random.Random(9)
    text, more = tokens_of(noise, 80), tokens_of(noise, 10)
    through, preempted = taught(name), taught(name)
    through.start("a", text[:60], num_prompt_tokens=40)
    preempted.start("a", text[:60], num_prompt_tokens=40)
    for proposer in (through, preempted):
        proposer.propose({"a": 8})
        proposer.extend("a", text[60:])
    preempted.finish("a", keep=False)
    preempted.start("a", text, num_prompt_tokens=40)
    for proposer in (through, preempted):
        proposer.extend("a", more)
    assert through.propose({"a": 8}) == preempted.propose({"a": 8})


def test_ending_what_never_began_is_harmless(name: str) -> None:
    proposer = taught(name)
    proposer.start("a", tokens_of(random.Random(10), 60), num_prompt_tokens=20)
    before = proposer.propose({"a": 8})
    for keep in (True, False):
        proposer.finish("nobody", keep=keep)
    assert proposer.propose({"a": 8}) == before
    proposer.finish("a", keep=False)
    proposer.finish("a", keep=True)


def test_memory_returns_when_nothing_is_kept(name: str) -> None:
    proposer, noise = PROPOSERS[name](), random.Random(11)
    at_first = proposer.memory_bytes
    for number in range(20):
        proposer.start(str(number), tokens_of(noise, 500), num_prompt_tokens=100)
    assert proposer.memory_bytes > at_first
    proposer.propose({str(number): 4 for number in range(20)})
    for number in range(20):
        proposer.finish(str(number), keep=False)
    assert proposer.memory_bytes == at_first


def test_any_order_of_events(name: str) -> None:
    class Events(RuleBasedStateMachine):
        """Against a plain record of who has which tokens, and which were seen under each salt."""

        def __init__(self) -> None:
            super().__init__()
            self.proposer = PROPOSERS[name]()
            self.texts: dict[str, list[int]] = {}
            self.preempted: dict[str, list[int]] = {}
            self.salts: dict[str, str | None] = {}
            self.seen: dict[str | None, set[int]] = {salt: set() for salt in SALTS}

        @rule(salt=st.sampled_from(SALTS), seed=st.integers(0, 99), length=st.integers(1, 90))
        def start(self, salt: str | None, seed: int, length: int) -> None:
            request_id = str(len(self.salts))
            text = tokens_of(random.Random(seed), length, salt)
            self.salts[request_id] = salt
            self.begin(request_id, text)

        def begin(self, request_id: str, text: list[int]) -> None:
            self.texts[request_id] = text
            salt = self.salts[request_id]
            self.seen[salt].update(text)
            self.proposer.start(request_id, text, num_prompt_tokens=len(text) // 2, salt=salt)

        @precondition(lambda self: self.texts)
        @rule(data=st.data(), seed=st.integers(0, 99), length=st.integers(0, 9))
        def extend(self, data: st.DataObject, seed: int, length: int) -> None:
            request_id = data.draw(st.sampled_from(list(self.texts)))
            tokens = tokens_of(random.Random(seed), length, self.salts[request_id])
            self.seen[self.salts[request_id]].update(tokens)
            self.texts[request_id] += tokens
            self.proposer.extend(request_id, tokens)

        @precondition(lambda self: self.texts)
        @rule(data=st.data(), limit=st.integers(1, 20))
        def propose_for_some(self, data: st.DataObject, limit: int) -> None:
            asked = data.draw(st.sets(st.sampled_from(list(self.texts)), min_size=1))
            self.check(dict.fromkeys(sorted(asked), limit))

        @precondition(lambda self: self.texts)
        @rule(data=st.data(), keep=st.booleans())
        def finish(self, data: st.DataObject, keep: bool) -> None:
            request_id = data.draw(st.sampled_from(list(self.texts)))
            del self.texts[request_id]
            self.proposer.finish(request_id, keep=keep)

        @precondition(lambda self: self.texts)
        @rule(data=st.data())
        def preempt(self, data: st.DataObject) -> None:
            request_id = data.draw(st.sampled_from(list(self.texts)))
            self.preempted[request_id] = self.texts.pop(request_id)
            self.proposer.finish(request_id, keep=False)

        @precondition(lambda self: self.preempted)
        @rule(data=st.data())
        def resume(self, data: st.DataObject) -> None:
            request_id = data.draw(st.sampled_from(list(self.preempted)))
            self.begin(request_id, self.preempted.pop(request_id))

        @invariant()
        def drafts_are_in_order(self) -> None:
            self.check(dict.fromkeys(self.texts, 6))

        def check(self, limits: dict[str, int]) -> None:
            proposals = self.proposer.propose(limits)
            check(proposals, limits)
            if name in COPYING:
                for request_id, proposal in proposals.items():
                    assert set(proposal.token_ids) <= self.seen[self.salts[request_id]]

        def teardown(self) -> None:
            for request_id in list(self.texts):
                self.proposer.finish(request_id, keep=False)

    run_state_machine_as_test(Events, settings=settings(max_examples=25, stateful_step_count=30, deadline=None))
