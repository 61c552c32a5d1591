"""The loop: schedule, execute, update. One step at a time, one message of outputs a step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from kitfox.engine.scheduler import Scheduler
from kitfox.outputs import EngineOutput, EngineOutputs
from kitfox.request import EngineRequest, FinishReason, Request
from kitfox.step import FilledBitmasks, ModelRunnerOutput, SchedulerOutput
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

    def execute(self, scheduled: SchedulerOutput, bitmasks: FilledBitmasks | None = None) -> ModelRunnerOutput:
        """Run one step.

        Args:
            bitmasks: asked for once the logits are there.
        """

    def load_adapter(self, adapter_id: int, path: Path) -> None:
        """Read a LoRA adapter; a WeightsError says why it cannot be had."""

    def remove_adapter(self, adapter_id: int) -> None:
        """Forget one that no request uses."""

    def release_kv_cache(self) -> None:
        """Give the KV cache's memory back, with what is in it; no tokens until `restore_kv_cache`."""

    def restore_kv_cache(self) -> None:
        """Take as much memory again, empty."""


class EngineCore:
    """Owns the scheduler and drives the executor. Knows tokens, not text."""

    def __init__(self, scheduler: Scheduler, executor: StepExecutor, tracer: Tracer):
        self.scheduler = scheduler
        self.executor = executor
        self.tracer = tracer
        self.is_paused = False
        self.is_sleeping = False
        self.step_sleep_s = 0.0
        self._refused: list[EngineOutput] = []
        self._leaving_adapters: set[int] = set()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: a paused core only says no to what it can never do."""
        return bool(self._refused) or (self.scheduler.has_work and not self.is_paused)

    @property
    def waits_for_grammars(self) -> bool:
        """Whether there may be work soon although there is none: a grammar is being compiled."""
        return bool(self.scheduler.waiting_for_grammar)

    @property
    def has_news_for_executor(self) -> bool:
        return self.scheduler.has_news_for_executor and not self.is_paused

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

    def wait_for_grammars(self) -> None:
        """Until one of those that are being compiled is decided."""
        assert self.scheduler.grammars is not None
        self.scheduler.grammars.wait()

    def shutdown(self) -> None:
        """End every request, and the processes that compile grammars."""
        self.abort(list(self.scheduler.requests))
        if self.scheduler.grammars is not None:
            self.scheduler.grammars.shutdown()

    def step(self) -> EngineOutputs:
        """One turn. With nothing to run it only tells the executor what to forget."""
        started = time.monotonic()
        refused, self._refused = self._refused, []
        if self.is_paused:
            return EngineOutputs(outputs=refused, stats=self.scheduler.stats())
        refused += self.scheduler.admit_compiled()
        scheduled = self.scheduler.schedule()
        num_tokens = scheduled.total_num_scheduled_tokens
        bitmasks = self.scheduler.fill_bitmasks(scheduled)
        result = self.executor.execute(scheduled, None if bitmasks is None else bitmasks.rows)
        if num_tokens:
            self.tracer.emit(
                "step",
                step=scheduled.step,
                tokens=num_tokens,
                requests=len(scheduled.num_scheduled_tokens),
                seconds=time.monotonic() - started,
            )
            self._trace_scheduled(scheduled)
        news = self.scheduler.update_from_output(scheduled, result, None if bitmasks is None else bitmasks.errors())
        stats = self.scheduler.stats()
        stats.num_step_tokens = num_tokens
        stats.step_time_s = time.monotonic() - started
        if self.scheduler.speculator is not None:
            self.scheduler.speculator.observe_step(num_tokens, stats.step_time_s)
        if self._leaving_adapters:
            self._remove_adapters()
        if self.step_sleep_s and num_tokens:
            time.sleep(self.step_sleep_s)
        return EngineOutputs(outputs=refused + news, stats=stats)

    def _trace_scheduled(self, scheduled: SchedulerOutput) -> None:
        decode = {"step": scheduled.step, "tokens": 1, "drafts": 0}  # one object for all of them
        events = dict.fromkeys(scheduled.num_scheduled_tokens, decode)
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            if num_tokens > 1:
                drafts = len(scheduled.draft_token_ids.get(request_id, ()))
                events[request_id] = {"step": scheduled.step, "tokens": num_tokens, "drafts": drafts}
        self.tracer.emit_each("scheduled", events)

    # ---- control: between steps ---------------------------------------------------------------------------------

    def pause(self) -> None:
        """Take no step until `resume`. Requests stay as they are, and new ones queue."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def flush_cache(self) -> bool:
        """Forget cached prefixes that no request uses; whether none are left."""
        if self.scheduler.speculator is not None:
            self.scheduler.speculator.flush_cache()
        return self.scheduler.kv_cache.reset()

    def unload_adapter(self, adapter_id: int) -> None:
        """Forget an adapter once the requests that use it have ended."""
        self._leaving_adapters.add(adapter_id)
        self._remove_adapters()

    def _remove_adapters(self) -> None:
        used = {request.adapter_id for request in self.scheduler.requests.values()}
        for adapter_id in self._leaving_adapters - used:
            self.executor.remove_adapter(adapter_id)
        self._leaving_adapters &= used

    def sleep(self) -> bool:
        """Give the KV cache's memory back until `wake_up`. False, with nothing changed, while there are requests."""
        if self.scheduler.requests or self._refused:
            return False
        if not self.is_sleeping:
            is_empty = self.flush_cache()
            assert is_empty, "there are no requests, yet something holds blocks"
            self.executor.release_kv_cache()
            self.is_sleeping = True
        return True

    def wake_up(self) -> None:
        if self.is_sleeping:
            self.executor.restore_kv_cache()
            self.is_sleeping = False
