"""Guesses as the scheduler sees them: whatever is guessed, what comes out is what the model says."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitfox.config import SpeculationConfig
from kitfox.engine.core import EngineCore
from kitfox.request import FinishReason, SamplingParams
from kitfox.spec_decode.proposer import Proposal, Proposer
from kitfox.spec_decode.speculator import Speculator
from tests.engine.fakes import make_core, request, run


class Script(Proposer):
    """Guesses that count on from a request's last token (the model does, too), but for some that are wrong."""

    memory_bytes = 0

    def __init__(self, wrong: Sequence[int] = (), length: int = 8):
        self.wrong = wrong  # offsets
        self.length = length
        self.texts: dict[str, list[int]] = {}
        self.finished: list[tuple[str, bool]] = []

    def start(
        self, request_id: str, token_ids: Sequence[int], *, num_prompt_tokens: int, salt: str | None = None
    ) -> None:
        assert request_id not in self.texts
        self.texts[request_id] = list(token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.texts[request_id] += token_ids

    def finish(self, request_id: str, *, keep: bool) -> None:
        if self.texts.pop(request_id, None) is not None:
            self.finished.append((request_id, keep))

    def propose(self, limits: Mapping[str, int]) -> dict[str, Proposal]:
        proposals = {}
        for name, limit in limits.items():
            last = self.texts[name][-1]
            guesses = [0 if offset in self.wrong else last + 1 + offset for offset in range(min(limit, self.length))]
            proposals[name] = Proposal(guesses, [0.9] * len(guesses))
        return proposals


def speculating(script: Script, **options: object) -> EngineCore:
    core = make_core(**options)  # type: ignore[arg-type]
    core.scheduler.speculator = Speculator(SpeculationConfig(method="ngram", adaptive=False), script)
    return core


def test_right_guesses_are_several_tokens_a_step():
    script = Script(length=3)
    core = speculating(script)
    core.add_request(request("a", [1, 2], max_tokens=10))
    assert [output.new_token_ids for _ in range(4) for output in core.step().outputs] == [
        [3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12],
    ]
    assert not core.scheduler.requests
    assert script.finished == [("a", True)]
    stats = core.scheduler.stats().speculation
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 6, 6)


def test_a_wrong_guess_and_those_behind_it_are_computed_again():
    core = speculating(Script(wrong=[1], length=3))
    core.add_request(request("a", [1, 2], max_tokens=8))
    assert [output.new_token_ids for _ in range(4) for output in core.step().outputs] == [[3], [4, 5], [6, 7], [8, 9]]
    request_a = core.scheduler.requests["a"]
    assert request_a.num_computed_tokens == request_a.num_tokens - 1
    verified = [event.data for event in core.tracer.of_request("a") if event.name == "verified"]
    assert verified == [{"drafts": number, "accepted": 1} for number in (3, 3, 2)]
    assert (request_a.num_draft_tokens, request_a.num_accepted_tokens) == (8, 3)  # the last had room for two


def test_a_stop_token_in_the_middle_of_right_guesses():
    core = speculating(Script())
    core.add_request(request("a", [1, 2], max_tokens=20, stop_token_ids=(6,)))
    core.step()
    last = core.step().outputs[0]
    assert (last.new_token_ids, last.finish_reason, last.stop_reason) == ([4, 5, 6], FinishReason.STOP, 6)
    assert core.scheduler.stats().num_free_blocks == 64


def test_guesses_never_pass_max_tokens_nor_the_budget():
    core = speculating(Script(), max_num_batched_tokens=4)
    core.add_request(request("a", [1, 2], max_tokens=3))
    core.add_request(request("b", [50], max_tokens=6))
    assert run(core) == {"a": [3, 4, 5], "b": [51, 52, 53, 54, 55, 56]}
    for scheduled in core.executor.steps:  # type: ignore[attr-defined]
        assert scheduled.total_num_scheduled_tokens <= 4


def test_a_guess_preempts_nobody():
    script = Script()
    core = speculating(script, num_blocks=4)
    core.add_request(request("a", [1, 2], max_tokens=6))
    core.add_request(request("b", [50, 51], max_tokens=6))
    assert run(core) == {"a": list(range(3, 9)), "b": list(range(52, 58))}
    assert core.scheduler.num_preemptions == 0


def test_a_preempted_request_is_told_to_the_proposer_anew():
    script = Script(length=2)
    core = speculating(script, num_blocks=5)
    core.add_request(request("a", [1, 2], max_tokens=14))
    core.add_request(request("b", [50, 51], max_tokens=14))
    assert run(core) == {"a": list(range(3, 17)), "b": list(range(52, 66))}
    assert core.scheduler.num_preemptions > 0
    assert ("b", False) in script.finished
    assert not script.texts


@pytest.mark.parametrize("cache", ["paged", "radix", "none"])
@given(
    wrong=st.lists(st.integers(0, 7), max_size=8),
    length=st.integers(0, 8),
    budget=st.integers(1, 20),
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=4),
    num_blocks=st.integers(8, 20),
)
def test_whatever_is_guessed_the_tokens_are_the_models(cache, wrong, length, budget, lengths, num_blocks):
    core = speculating(
        Script(wrong=wrong, length=length), cache=cache, num_blocks=num_blocks, max_num_batched_tokens=budget
    )
    expected = {}
    for index, (num_prompt, max_tokens) in enumerate(lengths):
        first = 100 * (index + 1)
        core.add_request(request(str(index), list(range(first, first + num_prompt)), max_tokens=max_tokens))
        expected[str(index)] = list(range(first + num_prompt, first + num_prompt + max_tokens))
    assert run(core, max_steps=3000) == expected
    core.scheduler.kv_cache.check_integrity()
    assert core.scheduler.stats().num_free_blocks == num_blocks


class TestTheController:
    """`adaptive`: as many guesses as make tokens come sooner, none if they do not."""

    def make(self, probabilities: list[float], *, seconds: Mapping[int, float]) -> Speculator:
        class Fixed(Script):
            def propose(self, limits: Mapping[str, int]) -> dict[str, Proposal]:
                return {name: Proposal(list(range(len(probabilities))), probabilities) for name in limits}

        speculator = Speculator(SpeculationConfig(method="ngram"), Fixed())
        for num_tokens, each in seconds.items():
            for _ in range(50):
                speculator.observe_step(num_tokens, each)
        for name in "ab":
            speculator.start(name, [1], num_prompt_tokens=1, salt=None)
        return speculator

    def test_free_rows_take_every_likely_guess(self):
        speculator = self.make([0.9] * 6, seconds={1: 0.01, 8: 0.01})
        assert len(speculator.propose({"a": 8}, 1)["a"]) == 6

    def test_dear_rows_take_none(self):
        speculator = self.make([0.5] * 6, seconds={1: 0.01, 2: 0.02, 8: 0.08})
        assert speculator.propose({"a": 8}, 1) == {}

    def test_it_stops_where_the_next_guess_costs_more_than_it_brings(self):
        speculator = self.make([0.95, 0.95, 0.2, 0.2], seconds={1: 0.01, 2: 0.0115, 3: 0.013, 4: 0.0145, 5: 0.016})
        assert len(speculator.propose({"a": 8}, 1)["a"]) == 2

    def test_the_likelier_request_comes_first(self):
        class Two(Script):
            def propose(self, limits: Mapping[str, int]) -> dict[str, Proposal]:
                return {"a": Proposal([1, 2], [0.95, 0.95]), "b": Proposal([1, 2], [0.3, 0.3])}

        speculator = Speculator(SpeculationConfig(method="ngram"), Two())
        for num_tokens, seconds in ((2, 0.01), (3, 0.012), (4, 0.014), (6, 0.018)):
            speculator.observe_step(num_tokens, seconds)
        for name in "ab":
            speculator.start(name, [1], num_prompt_tokens=1, salt=None)
        assert {name: len(draft) for name, draft in speculator.propose({"a": 8, "b": 8}, 2).items()} == {"a": 2}

    def test_a_request_whose_guesses_fail_gets_none_and_is_asked_again_later(self):
        speculator = self.make([0.8] * 4, seconds={1: 0.01, 5: 0.016})
        for _ in range(20):
            draft = speculator.propose({"a": 8}, 1).get("a")
            if draft is None:
                break
            speculator.learn("a", len(draft), 0)
        assert speculator.propose({"a": 8}, 1) == {}
        waits = 0
        while not speculator.propose({"a": 8}, 1):
            waits += 1
            assert waits < 1000
        assert waits > 5

    def test_a_proposer_that_takes_its_time_rests_while_it_brings_nothing(self):
        asked = []

        class Slow(Script):
            def propose(self, limits: Mapping[str, int]) -> dict[str, Proposal]:
                asked.append(list(limits))
                time.sleep(0.002)
                return {name: Proposal([1, 2], [0.9, 0.9]) for name in limits}

        speculator = Speculator(SpeculationConfig(method="ngram"), Slow())
        speculator.start("a", [1], num_prompt_tokens=1, salt=None)
        for _ in range(20):
            speculator.observe_step(1, 0.004)
            speculator.observe_step(3, 0.005)
        for _ in range(200):
            draft = speculator.propose({"a": 8}, 1).get("a", [])
            if draft:
                speculator.learn("a", len(draft), 0)
            speculator.observe_step(1 + len(draft), 0.005)
        assert len(asked) < 20
        assert speculator.stats.saved_time_s < 0
        for _ in range(200):
            draft = speculator.propose({"a": 8}, 1).get("a", [])
            if draft:
                speculator.learn("a", len(draft), len(draft))
            speculator.observe_step(1 + len(draft), 0.005)
        assert len(asked) > 60, "it is asked again, and again more often"

    def test_saved_time_is_what_plain_steps_would_have_taken(self):
        speculator = self.make([0.9] * 4, seconds={1: 0.01, 5: 0.012})
        draft = speculator.propose({"a": 8}, 1)["a"]
        assert len(draft) == 4
        assert speculator.learn("a", 4, 3) == pytest.approx(3 * 0.01 - 0.002, abs=1e-3)
        assert speculator.stats.saved_time_s == pytest.approx(3 * 0.01 - 0.002, abs=1e-3)


def test_sampling_params_that_forbid_a_guess_are_the_models_business():
    core = speculating(Script(), next_token=lambda _, tokens: tokens[-1] + 2)
    sampling = SamplingParams(max_tokens=4, temperature=0, bad_words=("x",))
    core.add_request(request("a", [1], sampling=sampling))
    assert run(core) == {"a": [3, 5, 7, 9]}
    assert core.scheduler.stats().speculation.num_accepted_tokens == 0
