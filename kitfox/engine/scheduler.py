"""Who runs this step, and with how many tokens. Start reading kitfox here.

There are no phases: every request has `num_computed_tokens` chasing `num_tokens`, and a step gives each of them some
of one token budget. Prefill, chunked prefill, decode, a prefix hit and a resume after preemption are the same line.
Running requests are served first, then waiting ones; nothing is admitted in a step that had to preempt.

A waiting request reserves the blocks of its whole prompt when it is admitted, so that prompts do not thrash each
other; blocks for output come one step at a time, and when they run out the last running request is preempted: its
blocks go back, its tokens stay, and it recomputes (or finds in the cache) what it lost. The first running request is
never preempted while another runs, so there is always progress.
"""

from __future__ import annotations

import time
from bisect import insort

from kitfox.config import SchedulerConfig
from kitfox.kv_cache.manager import NO_PREFIX, Allocation, KVCacheManager, PrefixMatch
from kitfox.outputs import EngineOutput, EngineStats, TokenLogprobs
from kitfox.request import FinishReason, Request, RequestStatus
from kitfox.step import BlockCopy, CachedRequest, ModelRunnerOutput, NewRequest, SchedulerOutput
from kitfox.tracing import Tracer

LPM_WINDOW = 128  # beyond this many waiting requests, matching each of them every step costs more than it saves
MIN_SHARED_TOKENS = 32  # a shared new prefix shorter than this is not worth waiting a step for


class Scheduler:
    """Queues, the token budget, and the life of each request from waiting to finished.

    Invariant: a request is in exactly one of `waiting` (holding no blocks) and `running` (holding blocks), or finished.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache: KVCacheManager, tracer: Tracer, *, shares_prefixes: bool = True
    ):
        self.config = config
        self.kv_cache = kv_cache
        self.tracer = tracer
        self.shares_prefixes = shares_prefixes
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # sorted by _key
        self.running: list[Request] = []  # sorted by _key; the last one is the first to be preempted
        self.num_preemptions = 0
        self._arrivals: dict[str, int] = {}
        self._num_arrivals = 0
        self._step = 0
        self._known_to_executor: set[str] = set()
        self._finished_ids: list[str] = []
        self._preempted_ids: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_news_for_executor(self) -> bool:
        """Finished requests whose state the executor still holds."""
        return bool(self._finished_ids)

    def add_request(self, request: Request) -> None:
        """Queue a request, by arrival or by (priority, arrival)."""
        assert request.request_id not in self.requests, f"request {request.request_id} exists already"
        assert self.can_ever_fit(request), f"{request} can never fit the cache and got past the door"
        self._num_arrivals += 1
        self._arrivals[request.request_id] = self._num_arrivals
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=self._key)
        self.tracer.emit("queued", request.request_id, waiting=len(self.waiting), running=len(self.running))

    def can_ever_fit(self, request: Request) -> bool:
        return self.kv_cache.blocks_needed(request.max_total_tokens) <= self.kv_cache.num_blocks

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; its blocks are free at once. Unknown ids are harmless (False)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT)
        return True

    # ---- one step down ------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Give this step's token budget out: running requests first, then waiting ones."""
        self._step += 1
        budget = self.config.max_num_batched_tokens
        assert budget is not None, "the plan has settled the token budget"
        step = _StepInProgress(budget)
        self._schedule_running(step)
        if not self._preempted_ids:
            self._schedule_waiting(step)
        finished, self._finished_ids = self._finished_ids, []
        preempted, self._preempted_ids = self._preempted_ids, []
        return SchedulerOutput(
            step=self._step,
            new_requests=step.new_requests,
            cached_requests=step.cached_requests,
            num_scheduled_tokens=step.num_scheduled_tokens,
            block_copies=step.block_copies,
            finished_request_ids=finished,
            preempted_request_ids=preempted,
        )

    def _schedule_running(self, step: _StepInProgress) -> None:
        position = 0
        while position < len(self.running) and step.token_budget > 0:
            request = self.running[position]
            num_tokens = self._num_tokens_this_step(request, request.num_computed_tokens, step)
            allocation = self.kv_cache.allocate_slots(request, num_tokens)
            if allocation is None:
                self._preempt(self.running[-1])  # the request itself when it is the last, which ends the loop
                continue
            step.add(request, num_tokens, allocation)
            step.cached_requests.append(
                CachedRequest(
                    request_id=request.request_id,
                    new_block_ids=allocation.block_ids,
                    num_computed_tokens=request.num_computed_tokens,
                )
            )
            position += 1

    def _schedule_waiting(self, step: _StepInProgress) -> None:
        for request in self._admission_order():
            if step.token_budget == 0 or len(self.running) >= self.config.max_num_seqs:
                return
            # Matched only now: what an earlier admission of this step evicted must not be found.
            prefix = self.kv_cache.match_prefix(request)
            if self._waits_for_shared_prefix(request, prefix):
                continue
            num_tokens = self._num_tokens_this_step(request, prefix.num_tokens, step)
            if not self.config.enable_chunked_prefill and num_tokens < request.num_tokens - prefix.num_tokens:
                return
            allocation, prefix = self._reserve_prompt(request, prefix)
            if allocation is None:
                return
            self._admit(request, prefix)
            step.add(request, num_tokens, allocation)
            step.new_requests.append(
                NewRequest(
                    request_id=request.request_id,
                    token_ids=list(request.all_token_ids),
                    num_prompt_tokens=request.num_prompt_tokens,
                    sampling=request.sampling,
                    stop_token_ids=tuple(request.stop_token_ids),
                    block_ids=allocation.block_ids,
                    num_computed_tokens=request.num_computed_tokens,
                    pooling=request.pooling,
                )
            )

    def _num_tokens_this_step(self, request: Request, num_computed: int, step: _StepInProgress) -> int:
        num_tokens = request.num_tokens - num_computed
        threshold = self.config.long_prefill_token_threshold
        if threshold and len(self.running) + len(self.waiting) > 1:
            num_tokens = min(num_tokens, threshold)
        return min(num_tokens, step.token_budget)

    def _admission_order(self) -> list[Request]:
        if self.config.policy != "lpm" or len(self.waiting) > LPM_WINDOW:
            return list(self.waiting)

        def longest_match_first(request: Request) -> tuple[bool, int]:
            # A preempted request goes first whatever it matches, or a stream of good matches could starve it.
            return request.status is not RequestStatus.PREEMPTED, -self.kv_cache.match_prefix(request).num_tokens

        return sorted(self.waiting, key=longest_match_first)

    def _waits_for_shared_prefix(self, request: Request, prefix: PrefixMatch) -> bool:
        """Whether another request is just computing a prefix that this one can take from the cache a step later."""
        if not self.shares_prefixes or request.skips_cache_lookup:
            return False
        leader = self.requests.get(request.leader_id) if request.leader_id else None
        if leader is not None and leader.num_computed_tokens < leader.num_prompt_tokens:
            return True
        if self.config.policy != "lpm":
            return False
        least = prefix.num_tokens + max(MIN_SHARED_TOKENS, self.kv_cache.block_size)
        return any(
            _share_prefix(request, other, least)
            for other in self.running
            if other.num_computed_tokens < other.num_prompt_tokens and other.cache_salt == request.cache_salt
        )

    def _reserve_prompt(self, request: Request, prefix: PrefixMatch) -> tuple[Allocation | None, PrefixMatch]:
        allocation = self.kv_cache.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix=prefix)
        if allocation is None and not self.running and prefix is not NO_PREFIX:
            # Pinning a match can cost one block more than computing afresh; alone in the pool, afresh always fits.
            prefix = NO_PREFIX
            allocation = self.kv_cache.allocate_slots(request, request.num_tokens)
        return allocation, prefix

    def _admit(self, request: Request, prefix: PrefixMatch) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=self._key)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = prefix.num_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = prefix.num_tokens
            request.first_scheduled_time_s = time.monotonic()
        self._known_to_executor.add(request.request_id)
        self.tracer.emit("admitted", request.request_id, cached=prefix.num_tokens, prompt=request.num_prompt_tokens)

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it waits again, in its old place by arrival."""
        self.running.remove(request)
        self.kv_cache.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=self._key)
        self._preempted_ids.append(request.request_id)
        self._known_to_executor.discard(request.request_id)
        self.tracer.emit("preempted", request.request_id, tokens=request.num_tokens)

    # ---- one step up --------------------------------------------------------------------------------------------

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineOutput]:
        """Append what was sampled, publish what was computed, finish what is done; returns the news of each request."""
        news: list[EngineOutput] = []
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:  # aborted while the step was in flight
                continue
            error = output.errors.get(request_id)
            if error is None:
                request.num_computed_tokens += num_tokens
                accepted = self._append(request, output.sampled_token_ids.get(request_id, []))
                self.kv_cache.cache_computed(request)
            else:  # what it computed is not to be trusted, so nothing of this step is published
                accepted = []
                request.finish_reason = FinishReason.ERROR
            embedding = output.embeddings.get(request_id)
            if embedding is not None:
                request.finish_reason = FinishReason.STOP
            prompt_logprobs = output.prompt_logprobs.get(request_id, [])
            if accepted or prompt_logprobs or request.finish_reason is not None:
                logprobs = output.logprobs.get(request_id, [])[: len(accepted)]
                news.append(self._news(request, accepted, logprobs, prompt_logprobs, embedding, error))
            if request.finish_reason is not None:
                self._finish(request, request.finish_reason)
        return news

    def _append(self, request: Request, token_ids: list[int]) -> list[int]:
        """Append sampled tokens until one of them ends the request; returns those appended."""
        if token_ids and request.first_token_time_s is None:
            request.first_token_time_s = time.monotonic()
            self.tracer.emit("first_token", request.request_id)
        sampling = request.sampling
        assert sampling.max_tokens is not None
        accepted: list[int] = []
        if token_ids and sampling.max_tokens == 0:
            request.finish_reason = FinishReason.LENGTH
            return accepted
        for token_id in token_ids:
            request.all_token_ids.append(token_id)
            accepted.append(token_id)
            if token_id in request.stop_token_ids and request.num_output_tokens >= sampling.min_tokens:
                request.finish_reason, request.stop_reason = FinishReason.STOP, token_id
            elif request.num_output_tokens >= sampling.max_tokens:
                request.finish_reason = FinishReason.LENGTH
            if request.finish_reason is not None:
                break
        return accepted

    def _news(
        self,
        request: Request,
        accepted: list[int],
        logprobs: list[TokenLogprobs],
        prompt_logprobs: list[TokenLogprobs],
        embedding: bytes | None,
        error: str | None,
    ) -> EngineOutput:
        now = time.monotonic()
        started = request.first_scheduled_time_s or now
        return EngineOutput(
            request_id=request.request_id,
            new_token_ids=accepted,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_preemptions=request.num_preemptions,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            queue_time_s=started - request.arrival_time_s,
            prefill_time_s=(request.first_token_time_s or now) - started,
            embedding=embedding,
            error=error,
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.kv_cache.free(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
        del self._arrivals[request.request_id]
        if request.request_id in self._known_to_executor:
            self._known_to_executor.discard(request.request_id)
            self._finished_ids.append(request.request_id)
        self.tracer.emit("finished", request.request_id, reason=str(reason), output=request.num_output_tokens)

    def stats(self) -> EngineStats:
        kv_cache = self.kv_cache
        return EngineStats(
            step=self._step,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_blocks=kv_cache.num_blocks,
            num_free_blocks=kv_cache.num_free_blocks,
            num_cached_blocks=kv_cache.num_cached_blocks,
            num_evictable_blocks=kv_cache.num_evictable_blocks,
            block_size=kv_cache.block_size,
            num_preemptions=self.num_preemptions,
            num_evicted_tokens=kv_cache.stats.evicted_tokens,
            prefix_queries=kv_cache.stats.queries,
            prefix_hits=kv_cache.stats.hits,
        )

    def _key(self, request: Request) -> tuple[int, int]:
        priority = request.priority if self.config.policy == "priority" else 0
        return priority, self._arrivals[request.request_id]


class _StepInProgress:
    """What one call of `schedule` has given out so far."""

    def __init__(self, token_budget: int):
        self.token_budget = token_budget
        self.new_requests: list[NewRequest] = []
        self.cached_requests: list[CachedRequest] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.block_copies: list[BlockCopy] = []

    def add(self, request: Request, num_tokens: int, allocation: Allocation) -> None:
        assert num_tokens >= 1, f"{request} was scheduled with nothing to compute"
        self.token_budget -= num_tokens
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.block_copies.extend(allocation.block_copies)


def _share_prefix(request: Request, other: Request, num_tokens: int) -> bool:
    """Whether both prompts begin with the same num_tokens tokens (and the other really computes that many)."""
    if min(request.num_tokens - 1, other.num_prompt_tokens) < num_tokens:
        return False
    return request.all_token_ids[:num_tokens] == other.all_token_ids[:num_tokens]
