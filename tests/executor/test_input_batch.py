"""The persistent arrays: differences in, ragged inputs out."""

from __future__ import annotations

from kitfox.executor.input_batch import InputBatch
from kitfox.request import SamplingParams
from kitfox.step import CachedRequest, NewRequest, SchedulerOutput


def new(request_id: str, tokens: list[int], blocks: list[int], seed: int | None = None) -> NewRequest:
    return NewRequest(
        request_id=request_id,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        num_reported_tokens=len(tokens),
        sampling=SamplingParams(seed=seed),
        stop_token_ids=(),
        block_ids=blocks,
    )


def test_a_ragged_step_is_gathered_exactly():
    batch = InputBatch(max_num_seqs=4, max_model_len=16, block_size=4)
    first = SchedulerOutput(
        step=1,
        new_requests=[new("a", [10, 11, 12, 13, 14, 15], [7, 2]), new("b", [20, 21, 22], [5])],
        num_scheduled_tokens={"a": 5, "b": 1},
        num_computed_tokens={"a": 0, "b": 2},
    )
    batch.update(first)
    step = batch.gather(first)
    assert step.token_ids.tolist() == [10, 11, 12, 13, 14, 22]
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 2]
    assert step.slot_mapping.tolist() == [28, 29, 30, 31, 8, 22]
    assert step.query_start_loc.tolist() == [0, 5, 6]
    assert step.seq_lens.tolist() == [5, 3]
    assert step.block_table.tolist() == [[7, 2], [5, 0]]
    assert step.samples.tolist() == [False, True]
    assert step.rows[0].seed != step.rows[1].seed

    batch.append_sampled(step.rows[1], [23])
    second = SchedulerOutput(
        step=2,
        cached_requests=[CachedRequest(request_id="a", new_block_ids=[9])],
        num_scheduled_tokens={"b": 1, "a": 1},
        num_computed_tokens={"b": 3, "a": 5},
    )
    batch.update(second)
    step = batch.gather(second)
    assert step.token_ids.tolist() == [23, 15]
    assert step.slot_mapping.tolist() == [23, 9]
    assert step.samples.tolist() == [True, True]


def test_rows_are_reused_and_a_preempted_request_comes_back_in_full():
    batch = InputBatch(max_num_seqs=1, max_model_len=8, block_size=4)
    batch.update(SchedulerOutput(step=1, new_requests=[new("a", [1, 2], [3], seed=7)]))
    batch.update(SchedulerOutput(step=2, preempted_request_ids=["a"]))
    assert len(batch) == 0
    batch.update(SchedulerOutput(step=3, new_requests=[new("b", [9], [1])]))
    last = SchedulerOutput(
        step=4,
        finished_request_ids=["b"],
        new_requests=[new("a", [1, 2, 5], [2], seed=7)],
        num_scheduled_tokens={"a": 3},
        num_computed_tokens={"a": 0},
    )
    batch.update(last)
    step = batch.gather(last)
    assert step.token_ids.tolist() == [1, 2, 5]
    assert step.slot_mapping.tolist() == [8, 9, 10]
    assert step.rows[0].seed == 7
