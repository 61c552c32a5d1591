"""The loop: schedule, execute, update. One step at a time, one message of outputs a step."""

from __future__ import annotations

import time
from typing import Protocol

from kitfox.engine.scheduler import Scheduler
from kitfox.outputs import EngineOutput, EngineOutputs
from kitfox.request import EngineRequest, FinishReason, Request
from kitfox.step import ModelRunnerOutput, SchedulerOutput
from kitfox.tracing import Tracer


class StepExecutor(Protocol):
    """What the core needs of an executor: `executor/executor.py` has the real one, tests have a scripted one."""

    @property
    def description(self) -> str:
        """How steps are computed, for the user."""

    @property
    def device_name(self) -> str:
        """Where they are computed: "cpu", "cuda:0"."""

    @property
    def num_threads(self) -> int:
        """How many threads compute on a CPU; 0 on another device."""

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput: ...


class EngineCore:
    """Owns the scheduler and drives the executor. Knows tokens, not text."""

    def __init__(self, scheduler: Scheduler, executor: StepExecutor, tracer: Tracer):
        self.scheduler = scheduler
        self.executor = executor
        self.tracer = tracer
        self._refused: list[EngineOutput] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._refused)

    def add_request(self, source: EngineRequest) -> None:
        """Queue a request; one that no pool state could ever serve, or whose id is taken, is answered with an error."""
        request = Request(source)
        problem = None
        if source.request_id in self.scheduler.requests:
            problem = f"request id {source.request_id} is already in use"
        elif not self.scheduler.can_ever_fit(request):
            kv_cache = self.scheduler.kv_cache
            problem = (
                f"prompt plus max_tokens is {request.max_total_tokens} tokens; "
                f"the KV cache holds {kv_cache.num_blocks * kv_cache.block_size}"
            )
        if problem is not None:
            self._refused.append(
                EngineOutput(request_id=source.request_id, finish_reason=FinishReason.ERROR, error=problem)
            )
            return
        self.scheduler.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.scheduler.abort(request_id)

    def step(self) -> EngineOutputs:
        """One turn. With nothing to run it only tells the executor what to forget."""
        started = time.monotonic()
        refused, self._refused = self._refused, []
        scheduled = self.scheduler.schedule()
        num_tokens = scheduled.total_num_scheduled_tokens
        result = self.executor.execute(scheduled)
        if num_tokens:
            self.tracer.emit(
                "step", step=scheduled.step, tokens=num_tokens, requests=len(scheduled.num_scheduled_tokens)
            )
        for request_id, num_scheduled in scheduled.num_scheduled_tokens.items():
            self.tracer.emit("scheduled", request_id, step=scheduled.step, tokens=num_scheduled)
        news = self.scheduler.update_from_output(scheduled, result)
        stats = self.scheduler.stats()
        stats.num_step_tokens = num_tokens
        stats.step_time_s = time.monotonic() - started
        return EngineOutputs(outputs=refused + news, stats=stats)
