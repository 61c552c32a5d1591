"""A request that waits for its grammar, and tokens that nobody sampled, as the scheduler sees them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from kitfox.constraint import Constraint, GrammarError, Regex
from kitfox.engine.core import EngineCore
from kitfox.request import FinishReason, RequestStatus, SamplingParams
from kitfox.structured_output.grammar import BitmaskRow, CompiledGrammar, Grammar
from kitfox.structured_output.manager import GrammarManager
from tests.engine.fakes import FakeExecutor, make_core, request, run


class Counting(Grammar):
    """Allows the successor of each token up to a last one, as `fakes.successor` samples it; forces some of them."""

    def __init__(self, last: int, forced: dict[int, list[int]]):
        self.last = last
        self.forced = forced
        self.tokens: list[int] = []

    def accept(self, token_id: int) -> bool:
        self.tokens.append(token_id)
        return token_id <= self.last

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def fill_bitmask(self, row: BitmaskRow) -> None:
        row.fill(-1)

    may_end = False

    @property
    def must_end(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] == self.last

    def forced_bytes(self) -> bytes:
        return bytes(self.forced.get(self.tokens[-1] if self.tokens else -1, []))

    def fork(self) -> Grammar:
        made = Counting(self.last, self.forced)
        made.tokens = list(self.tokens)
        return made


class Compiled(CompiledGrammar):
    memory_bytes = 0

    def __init__(self, last: int, forced: dict[int, list[int]]):
        self.last, self.forced = last, forced

    def start(self) -> Grammar:
        return Counting(self.last, self.forced)


class Bytes:
    """Token n is byte n."""

    def continue_with(self, last_token_id: int | None, data: bytes) -> tuple[list[int], int]:
        return list(data), len(data)


class Manager(GrammarManager):
    """Grammars that are ready when a test says so."""

    def __init__(self, core: EngineCore):
        from kitfox.config import StructuredOutputConfig
        from tests.structured_output.vocabularies import VOCABULARY

        super().__init__(StructuredOutputConfig(), VOCABULARY, max_num_seqs=16)
        self._retokenizer.result()
        ready: Future[Any] = Future()
        ready.set_result(Bytes())
        self._retokenizer = ready
        self.futures: list[Future[CompiledGrammar]] = []
        core.scheduler.grammars = self

    def _compiled(self, format: Any) -> Future[CompiledGrammar]:
        self.futures.append(Future())
        return self.futures[-1]


CONSTRAINT = Constraint(format=Regex(pattern="unused"), param="structured_outputs.regex")


def constrained(request_id: str, prompt: list[int], **fields: Any) -> Any:
    sampling = SamplingParams(**{"max_tokens": 16, "temperature": 0, "constraint": CONSTRAINT, **fields})
    return request(request_id, prompt, sampling=sampling)


def executor_of(core: EngineCore) -> FakeExecutor:
    assert isinstance(core.executor, FakeExecutor)
    return core.executor


@pytest.fixture
def core() -> EngineCore:
    return make_core()


@pytest.fixture
def manager(core: EngineCore):
    made = Manager(core)
    yield made
    made.shutdown()


def test_it_waits_in_its_own_state_while_others_run(core: EngineCore, manager: Manager) -> None:
    core.add_request(constrained("waits", [1, 2]))
    core.add_request(request("runs", [10, 11], max_tokens=3))
    assert core.scheduler.requests["waits"].status is RequestStatus.WAITING_FOR_GRAMMAR
    assert run(core) == {"runs": [12, 13, 14]}
    assert (core.has_work, core.waits_for_grammars) == (False, True)
    assert core.scheduler.stats().num_waiting_for_grammar == 1
    manager.futures[0].set_result(Compiled(5, {}))
    assert core.has_work
    assert run(core) == {"waits": [3, 4, 5]}
    assert core.scheduler.stats().num_waiting_for_grammar == 0


def test_an_engine_does_not_sleep_while_one_waits(core: EngineCore, manager: Manager) -> None:
    core.add_request(constrained("waits", [1, 2]))
    assert not core.sleep()
    core.abort(["waits"])
    assert core.sleep()


def test_it_keeps_its_place_by_arrival() -> None:
    core = make_core(max_num_seqs=1)
    manager = Manager(core)
    core.add_request(constrained("first", [1]))
    core.add_request(request("second", [50], max_tokens=1))
    manager.futures[0].set_result(Compiled(2, {}))
    assert [output.request_id for output in core.step().outputs] == ["first"]
    manager.shutdown()


def test_a_refusal_ends_it_alone_and_names_the_parameter(core: EngineCore, manager: Manager) -> None:
    core.add_request(constrained("bad", [1, 2]))
    core.add_request(request("good", [10, 11], max_tokens=2))
    manager.futures[0].set_exception(GrammarError("no such keyword"))
    news = {output.request_id: output for output in core.step().outputs}
    assert news["bad"].finish_reason is FinishReason.ERROR
    assert (news["bad"].error, news["bad"].param) == (
        "no such keyword",
        "structured_outputs.regex",
    )
    assert run(core) == {"good": [13]}
    assert core.scheduler.requests == {}


def test_abort_while_it_waits(core: EngineCore, manager: Manager) -> None:
    core.add_request(constrained("gone", [1, 2]))
    assert core.scheduler.abort("gone")
    assert not core.scheduler.abort("gone")
    manager.futures[0].set_result(Compiled(5, {}))
    assert (core.has_work, core.waits_for_grammars) == (False, False)
    assert core.scheduler.stats().num_free_blocks == 64


def test_forced_tokens_are_computed_like_a_prompt_and_told_at_once(core: EngineCore, manager: Manager) -> None:
    core.add_request(constrained("a", [1, 2]))
    manager.futures[0].set_result(Compiled(12, {4: [5, 6, 7], 9: [10, 11, 12]}))
    assert [output.new_token_ids for _ in range(3) for output in core.step().outputs] == [[3], [4, 5, 6, 7], [8]]
    steps = executor_of(core).steps
    assert steps[2].num_scheduled_tokens == {"a": 4}
    assert steps[2].cached_requests[0].new_token_ids == [5, 6, 7]
    last = core.step().outputs[0]
    assert (last.new_token_ids, last.finish_reason, last.stop_reason) == ([9, 10, 11, 12], FinishReason.STOP, None)
    assert manager.stats.num_forced_tokens == 6


def test_what_is_forced_at_the_start_is_computed_with_the_prompt(core: EngineCore, manager: Manager) -> None:
    core.add_request(constrained("a", [1, 2]))
    manager.futures[0].set_result(Compiled(9, {-1: [3, 4, 5]}))
    assert core.step().outputs[0].new_token_ids == [3, 4, 5, 6]
    assert executor_of(core).steps[0].new_requests[0].token_ids == [1, 2, 3, 4, 5]
    assert run(core) == {"a": [7, 8, 9]}


def test_max_tokens_cuts_forced_tokens_too(core: EngineCore, manager: Manager) -> None:
    core.add_request(constrained("a", [1, 2], max_tokens=4))
    manager.futures[0].set_result(Compiled(50, {4: [5, 6, 7]}))
    core.step()
    last = core.step().outputs[0]
    assert (last.new_token_ids, last.finish_reason) == ([4, 5, 6], FinishReason.LENGTH)


@pytest.mark.parametrize("budget", [2, 64])
def test_chunks_and_preemption_change_nothing(budget: int) -> None:
    core = make_core(num_blocks=7, max_num_batched_tokens=budget)
    manager = Manager(core)
    for index in range(3):
        core.add_request(constrained(f"r{index}", [1, 2], max_tokens=18))
        manager.futures[index].set_result(Compiled(20, {4: [5, 6, 7, 8], 10: [11, 12]}))
    assert run(core) == {f"r{index}": list(range(3, 21)) for index in range(3)}
    if budget == 64:
        assert core.scheduler.num_preemptions > 0
    assert core.scheduler.stats().num_free_blocks == 7
    manager.shutdown()


def test_nothing_jumps_where_something_else_may_forbid_it(core: EngineCore, manager: Manager) -> None:
    core.add_request(constrained("a", [1, 2], allowed_token_ids=tuple(range(20))))
    manager.futures[0].set_result(Compiled(6, {3: [4, 5]}))
    assert [output.new_token_ids for _ in range(4) for output in core.step().outputs] == [[3], [4], [5], [6]]


def test_a_mask_that_cannot_be_made_ends_its_request(core: EngineCore, manager: Manager) -> None:
    class TooComplex(Counting):
        def fill_bitmask(self, row: BitmaskRow) -> None:
            raise GrammarError("too complex to go on")

    compiled = Compiled(9, {})
    compiled.start = lambda: TooComplex(9, {})  # type: ignore[method-assign]
    core.add_request(constrained("bad", [1, 2]))
    core.add_request(request("good", [10, 11], max_tokens=1))
    manager.futures[0].set_result(compiled)
    news = {output.request_id: output for output in core.step().outputs}
    assert news["bad"].error == "too complex to go on"
    assert news["good"].new_token_ids == [12]
    assert not np.any(core.scheduler.requests)
