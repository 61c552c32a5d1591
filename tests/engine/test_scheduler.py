"""The scheduler step by step, with whole SchedulerOutputs, over a scripted executor."""

from __future__ import annotations

import random

import pytest

from kitfox.config import CACHE_ORGANISATIONS
from kitfox.outputs import EngineOutput
from kitfox.request import FinishReason, SamplingParams
from kitfox.step import BlockCopy, FilledBitmasks, ModelRunnerOutput, NewRequest, SchedulerOutput
from tests.engine.fakes import FakeExecutor, make_core, request, run


def steps_of(core) -> list[SchedulerOutput]:
    return core.executor.steps


def test_one_request_from_prompt_to_finish_exactly():
    core = make_core(num_blocks=8, block_size=4)
    core.add_request(request("a", [10, 11, 12, 13, 14], max_tokens=2))
    sampling = SamplingParams(max_tokens=2, temperature=0)
    first = core.step()
    assert steps_of(core)[0] == SchedulerOutput(
        step=1,
        new_requests=[
            NewRequest(
                request_id="a",
                token_ids=[10, 11, 12, 13, 14],
                num_prompt_tokens=5,
                num_reported_tokens=5,
                sampling=sampling,
                stop_token_ids=(),
                block_ids=[0, 1],
            )
        ],
        num_scheduled_tokens={"a": 5},
        num_computed_tokens={"a": 0},
    )
    assert [o.new_token_ids for o in first.outputs] == [[15]]
    last = core.step()
    assert steps_of(core)[1] == SchedulerOutput(
        step=2,
        num_scheduled_tokens={"a": 1},
        num_computed_tokens={"a": 5},
    )
    assert last.outputs[0].new_token_ids == [16]
    assert last.outputs[0].finish_reason is FinishReason.LENGTH
    core.step()  # nothing to run, but the executor hears that a is over
    assert steps_of(core)[2] == SchedulerOutput(step=3, finished_request_ids=["a"])
    assert core.scheduler.kv_cache.num_free_blocks == 8


def test_a_long_prompt_is_chunked_and_a_decode_rides_along():
    core = make_core(max_num_batched_tokens=8, num_blocks=64)
    core.add_request(request("short", [1, 2, 3], max_tokens=5))
    core.step()
    core.add_request(request("long", list(range(100, 120)), max_tokens=1))
    outputs = [core.step() for _ in range(3)]
    assert [s.num_scheduled_tokens for s in steps_of(core)[1:4]] == [
        {"short": 1, "long": 7},
        {"short": 1, "long": 7},
        {"short": 1, "long": 6},
    ]
    sampled_by = [[o.request_id for o in step.outputs] for step in outputs]
    assert sampled_by == [["short"], ["short"], ["short", "long"]]


def test_the_budget_and_the_number_of_sequences_are_never_exceeded():
    core = make_core(max_num_batched_tokens=10, max_num_seqs=3, num_blocks=256)
    for i in range(9):
        core.add_request(request(str(i), [i * 50 + j for j in range(7)], max_tokens=6))
    outputs = run(core)
    assert all(s.total_num_scheduled_tokens <= 10 for s in steps_of(core))
    assert all(len(s.num_scheduled_tokens) <= 3 for s in steps_of(core))
    assert outputs == {str(i): [i * 50 + 7 + j for j in range(6)] for i in range(9)}


def test_first_come_first_served():
    core = make_core(max_num_seqs=2)
    for name in "abcd":
        core.add_request(request(name, [ord(name), 1], max_tokens=2))
    run(core)
    admitted = [new.request_id for step in steps_of(core) for new in step.new_requests]
    assert admitted == ["a", "b", "c", "d"]


def test_priority_serves_lower_values_first_and_ties_by_arrival():
    core = make_core(policy="priority", max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 1), ("c", 1), ("d", -3)):
        core.add_request(request(name, [ord(name), 1], max_tokens=1, priority=priority))
    run(core)
    admitted = [new.request_id for step in steps_of(core) for new in step.new_requests]
    assert admitted == ["d", "b", "c", "a"]


def test_the_victim_is_the_latest_running_request_and_its_answer_does_not_change():
    # Two requests of 8 prompt tokens grow to 16 each: 8 blocks wanted, 6 there.
    core = make_core(num_blocks=6, block_size=4, cache="none")
    core.add_request(request("old", list(range(100, 108)), max_tokens=8))
    core.add_request(request("new", list(range(200, 208)), max_tokens=8))
    outputs = run(core)
    preempted = [rid for step in steps_of(core) for rid in step.preempted_request_ids]
    assert preempted == ["new"]
    assert outputs == {"old": list(range(108, 116)), "new": list(range(208, 216))}
    resumed = [new for step in steps_of(core) for new in step.new_requests if new.request_id == "new"][1]
    assert resumed.token_ids[:8] == list(range(200, 208))
    assert resumed.num_prompt_tokens == 8
    assert len(resumed.token_ids) > 8, "the tokens generated so far come along"


def test_priority_mode_preempts_the_least_important_although_it_came_first():
    core = make_core(num_blocks=6, block_size=4, cache="none", policy="priority")
    core.add_request(request("batch", list(range(200, 208)), max_tokens=8, priority=9))
    core.step()
    core.add_request(request("live", list(range(100, 108)), max_tokens=8, priority=0))
    outputs = run(core)
    assert {rid for step in steps_of(core) for rid in step.preempted_request_ids} == {"batch"}
    assert outputs["live"] == list(range(108, 116))


def test_nothing_is_admitted_in_a_step_that_preempted():
    core = make_core(num_blocks=6, block_size=4, cache="none")
    core.add_request(request("a", list(range(100, 108)), max_tokens=8))
    core.add_request(request("b", list(range(200, 208)), max_tokens=8))
    core.add_request(request("c", [1], max_tokens=1))
    run(core)
    for step in steps_of(core):
        assert not (step.preempted_request_ids and step.new_requests)


def test_a_prompt_that_does_not_fit_beside_the_running_ones_waits():
    core = make_core(num_blocks=6, block_size=4, cache="none")
    core.add_request(request("a", list(range(100, 112)), max_tokens=4))
    core.add_request(request("b", list(range(200, 216)), max_tokens=1))
    core.step()
    assert list(steps_of(core)[0].num_scheduled_tokens) == ["a"]
    outputs = run(core)
    assert core.scheduler.num_preemptions == 0
    assert outputs["b"] == [216]


def test_what_can_never_fit_is_answered_at_once_and_does_not_block_the_queue():
    core = make_core(num_blocks=4, block_size=4)
    core.add_request(request("huge", list(range(14)), max_tokens=3))
    core.add_request(request("exact", list(range(50, 62)), max_tokens=4))
    first = core.step()
    assert first.outputs[0].request_id == "huge"
    assert first.outputs[0].finish_reason is FinishReason.ERROR
    assert "17 tokens" in (first.outputs[0].error or "")
    assert "16" in (first.outputs[0].error or "")
    assert run(core)["exact"][-1] == 65


@pytest.mark.parametrize("cache", CACHE_ORGANISATIONS)
def test_one_request_that_needs_the_whole_pool_finishes_with_and_without_a_warm_cache(cache: str):
    core = make_core(num_blocks=4, block_size=4, cache=cache)
    for name in ("cold", "warm", "again"):
        core.add_request(request(name, list(range(10, 19)), max_tokens=7))
        assert run(core)[name] == list(range(19, 26))
    core.scheduler.kv_cache.check_integrity()


def test_long_prefill_threshold_applies_only_in_company():
    core = make_core(long_prefill_token_threshold=4, max_num_batched_tokens=32)
    core.add_request(request("alone", list(range(20)), max_tokens=1))
    core.step()
    assert steps_of(core)[0].num_scheduled_tokens == {"alone": 20}
    core = make_core(long_prefill_token_threshold=4, max_num_batched_tokens=32)
    core.add_request(request("a", list(range(20)), max_tokens=1))
    core.add_request(request("b", list(range(50, 53)), max_tokens=1))
    core.step()
    assert steps_of(core)[0].num_scheduled_tokens == {"a": 4, "b": 3}


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it_whole():
    core = make_core(enable_chunked_prefill=False, max_num_batched_tokens=10)
    core.add_request(request("a", list(range(6)), max_tokens=2))
    core.add_request(request("b", list(range(50, 56)), max_tokens=1))
    run(core)
    assert [s.num_scheduled_tokens for s in steps_of(core)[:2]] == [{"a": 6}, {"a": 1, "b": 6}]


@pytest.mark.parametrize("cache", ["paged", "radix"])
def test_a_second_identical_prompt_computes_only_what_it_must(cache: str):
    core = make_core(cache=cache, block_size=4)
    prompt = list(range(10, 22))
    core.add_request(request("a", prompt, max_tokens=1))
    run(core)
    core.add_request(request("b", prompt, max_tokens=1))
    core.step()
    expected = {"paged": 8, "radix": 11}[cache]  # whole blocks; token-exact; never the last token
    step = steps_of(core)[-1]
    assert step.num_computed_tokens == {"b": expected}
    assert step.num_scheduled_tokens == {"b": 12 - expected}
    copied = [copy.num_tokens for copy in step.block_copies]
    assert copied == {"paged": [], "radix": [3]}[cache]
    assert all(isinstance(copy, BlockCopy) for copy in step.block_copies)


@pytest.mark.parametrize("cache", ["paged", "radix"])
def test_generated_tokens_are_found_by_the_next_turn(cache: str):
    core = make_core(cache=cache, block_size=4)
    core.add_request(request("turn1", [1, 2, 3, 4, 5, 6], max_tokens=6))
    answer = run(core)["turn1"]
    core.add_request(request("turn2", [1, 2, 3, 4, 5, 6, *answer, 90, 91], max_tokens=1))
    core.step()
    cached = steps_of(core)[-1].num_computed_tokens["turn2"]
    # The last sampled token was never computed, so 11 tokens can be known: two whole blocks, or all of them.
    assert cached == {"paged": 8, "radix": 11}[cache]


@pytest.mark.parametrize("cache", ["paged", "radix"])
def test_answers_to_one_prompt_share_it(cache: str):
    core = make_core(cache=cache, block_size=4)
    prompt = list(range(100, 112))
    core.add_request(request("p", prompt, max_tokens=2))
    core.add_request(request("p#1", prompt, max_tokens=2, leader_id="p"))
    core.add_request(request("p#2", prompt, max_tokens=2, leader_id="p"))
    outputs = run(core)
    assert outputs == {name: [112, 113] for name in ("p", "p#1", "p#2")}
    computed = {}
    for step in steps_of(core):
        for name, count in step.num_scheduled_tokens.items():
            computed[name] = computed.get(name, 0) + count
    again = {"paged": 4, "radix": 1}[cache]
    assert computed == {"p": 13, "p#1": again + 1, "p#2": again + 1}
    core.scheduler.kv_cache.check_integrity()


def test_answers_still_start_when_the_first_one_is_aborted_early():
    core = make_core(max_num_batched_tokens=4)
    prompt = list(range(100, 112))
    core.add_request(request("p", prompt, max_tokens=2))
    core.add_request(request("p#1", prompt, max_tokens=2, leader_id="p"))
    core.step()
    core.abort(["p"])
    assert run(core) == {"p#1": [112, 113]}


def test_lpm_admits_the_longest_match_first_and_computes_a_common_new_prefix_once():
    core = make_core(policy="lpm", cache="radix", block_size=4, num_blocks=256, max_num_seqs=1)
    known = list(range(300, 340))
    core.add_request(request("seed", known, max_tokens=1))
    run(core)
    core.add_request(request("stranger", list(range(500, 540)), max_tokens=1))
    core.add_request(request("friend", [*known, 7, 8], max_tokens=1))
    run(core)
    admitted = [new.request_id for step in steps_of(core) for new in step.new_requests]
    assert admitted == ["seed", "friend", "stranger"]

    core = make_core(policy="lpm", cache="radix", block_size=4, num_blocks=256)
    prefix = list(range(700, 780))
    for i in range(4):
        core.add_request(request(f"r{i}", [*prefix, i], max_tokens=1))
    core.add_request(request("other", list(range(100)), max_tokens=1))
    run(core)
    total = sum(step.total_num_scheduled_tokens for step in steps_of(core))
    assert total == 81 + 3 * 1 + 100
    assert list(steps_of(core)[0].num_scheduled_tokens) == ["r0", "other"]


def test_stop_token_eos_min_tokens_and_zero_max_tokens():
    core = make_core()
    core.add_request(request("stops", [5], max_tokens=9, stop_token_ids=(8,)))
    patient = SamplingParams(max_tokens=9, min_tokens=5, temperature=0)
    core.add_request(request("patient", [5], sampling=patient, stop_token_ids=(8,)))
    core.add_request(request("prompt only", [5, 6], max_tokens=0))
    ends: dict[str, EngineOutput] = {}
    outputs: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason:
                ends[output.request_id] = output
    assert outputs == {"stops": [6, 7, 8], "patient": list(range(6, 15)), "prompt only": []}
    assert (ends["stops"].finish_reason, ends["stops"].stop_reason) == (FinishReason.STOP, 8)
    assert ends["patient"].finish_reason is FinishReason.LENGTH
    assert ends["prompt only"].finish_reason is FinishReason.LENGTH


def test_abort_in_every_state_is_idempotent_and_unknown_ids_are_harmless():
    core = make_core(max_num_seqs=1, max_num_batched_tokens=4)
    core.add_request(request("prefilling", list(range(10))))
    core.add_request(request("waiting", [1]))
    core.step()
    core.abort(["waiting", "prefilling", "prefilling", "nobody"])
    assert not core.scheduler.has_work
    assert core.scheduler.kv_cache.num_free_blocks == 64
    core.step()
    assert steps_of(core)[-1].finished_request_ids == ["prefilling"]
    core.add_request(request("decoding", [1, 2]))
    core.step()
    core.step()
    core.abort(["decoding"])
    core.step()
    assert isinstance(core.executor, FakeExecutor)
    assert core.executor.token_ids == {}


def test_a_request_without_numbers_ends_alone_and_publishes_nothing():
    core = make_core(cache="radix")
    core.add_request(request("bad", list(range(10)), max_tokens=3))
    core.add_request(request("good", list(range(50, 60)), max_tokens=3))
    execute = core.executor.execute

    def spoil(scheduled: SchedulerOutput, bitmasks: FilledBitmasks | None = None) -> ModelRunnerOutput:
        output = execute(scheduled)
        sampled = {name: tokens for name, tokens in output.sampled_token_ids.items() if name != "bad"}
        return ModelRunnerOutput(sampled_token_ids=sampled, errors={"bad": "not numbers"})

    core.executor.execute = spoil
    first = core.step()
    ended = next(o for o in first.outputs if o.request_id == "bad")
    assert (ended.finish_reason, ended.error) == (FinishReason.ERROR, "not numbers")
    core.executor.execute = execute
    assert run(core)["good"] == [61, 62]
    core.add_request(request("again", list(range(10)), max_tokens=1))
    core.step()
    assert steps_of(core)[-1].num_computed_tokens == {"again": 0}


def test_a_duplicate_id_is_answered_with_an_error_and_the_first_goes_on():
    core = make_core()
    core.add_request(request("a", [1], max_tokens=3))
    core.add_request(request("a", [9], max_tokens=3))
    errors = [o for o in core.step().outputs if o.error]
    assert len(errors) == 1
    assert "already in use" in (errors[0].error or "")


@pytest.mark.parametrize("cache", CACHE_ORGANISATIONS)
@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_random_blasts_end_with_an_empty_scheduler_and_a_full_pool(cache: str, policy: str):
    for seed in range(3):
        rng = random.Random(f"{cache} {policy} {seed}")
        core = make_core(
            cache=cache, policy=policy, num_blocks=rng.randint(12, 40), max_num_seqs=6, max_num_batched_tokens=16
        )
        expected: dict[str, list[int]] = {}
        outputs: dict[str, list[int]] = {}
        aborted: set[str] = set()
        for turn in range(400):
            if turn < 250 and rng.random() < 0.4:
                start, length = rng.choice([100, 100, 200, rng.randint(300, 900)]), rng.randint(1, 24)
                name, max_tokens = f"r{turn}", rng.randint(0, 16)
                prompt = list(range(start, start + length))
                core.add_request(request(name, prompt, max_tokens=max_tokens, priority=rng.randint(0, 3)))
                expected[name] = list(range(start + length, start + length + max_tokens))
            if expected and rng.random() < 0.05:
                victim = rng.choice(list(expected))
                aborted.add(victim)
                core.abort([victim])
            if core.has_work:
                for output in core.step().outputs:
                    outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
                if turn % 10 == 0:
                    core.scheduler.kv_cache.check_integrity()
        for name, tokens in run(core, max_steps=5000).items():
            outputs.setdefault(name, []).extend(tokens)
        for name, tokens in expected.items():
            if name not in aborted:
                assert outputs.get(name, []) == tokens
        core.step()
        scheduler = core.scheduler
        assert not scheduler.requests
        assert not scheduler.waiting
        assert not scheduler.running
        assert scheduler.kv_cache.num_free_blocks == scheduler.kv_cache.num_blocks
        assert isinstance(core.executor, FakeExecutor)
        assert core.executor.token_ids == {}
        scheduler.kv_cache.check_integrity()
