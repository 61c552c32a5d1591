"""Who runs this step, and with how many tokens. Start reading kitfox here.

There are no phases: every request has `num_computed_tokens` chasing `num_tokens`, and a step gives each of them some
of one token budget. Prefill, chunked prefill, decode, a prefix hit and a resume after preemption are the same line.
Running requests are served first, then waiting ones; nothing is admitted in a step that had to preempt.

A waiting request reserves the blocks of its whole prompt when it is admitted, so that prompts do not thrash each
other; blocks for output come one step at a time, and when they run out the last running request is preempted: its
blocks go back, its tokens stay, and it recomputes (or finds in the cache) what it lost. The first running request is
never preempted while another runs, so there is always progress.

A request that is held to a grammar waits for it apart from the others. Tokens that the grammar forces are appended
without sampling and computed like a chunk of a prompt.
"""

from __future__ import annotations

import time
from bisect import insort

from kitfox.config import SchedulerConfig
from kitfox.kv_cache.manager import NO_PREFIX, Allocation, KVCacheManager, PrefixMatch
from kitfox.outputs import EngineOutput, EngineStats, GrammarStats, SpeculationStats, TokenLogprobs
from kitfox.request import FinishReason, Request, RequestStatus
from kitfox.spec_decode.speculator import Speculator
from kitfox.step import BlockCopy, CachedRequest, ModelRunnerOutput, NewRequest, SchedulerOutput
from kitfox.structured_output.answer import AnswerGrammar
from kitfox.structured_output.manager import Bitmasks, GrammarManager, ToFill
from kitfox.tracing import Tracer

LPM_WINDOW = 128  # beyond this many waiting requests, matching each of them every step costs more than it saves
MIN_SHARED_TOKENS = 32  # a shared new prefix shorter than this is not worth waiting a step for


class Scheduler:
    """Queues, the token budget, and the life of each request from waiting to finished.

    Invariant: a request is in exactly one of `waiting_for_grammar` and `waiting` (holding no blocks) and `running`
    (holding blocks), or finished.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache: KVCacheManager, tracer: Tracer, *, shares_prefixes: bool = True
    ):
        self.config = config
        self.kv_cache = kv_cache
        self.tracer = tracer
        self.shares_prefixes = shares_prefixes
        self.grammars: GrammarManager | None = None  # until it is told the vocabulary
        self.speculator: Speculator | None = None
        self.requests: dict[str, Request] = {}
        self.waiting_for_grammar: dict[str, Request] = {}
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
        return bool(self.waiting or self.running) or (self.grammars is not None and self.grammars.has_decided)

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
        self.tracer.emit("queued", request.request_id, waiting=len(self.waiting), running=len(self.running))
        if request.sampling.constraint is None:
            insort(self.waiting, request, key=self._key)
            return
        assert self.grammars is not None, "a constrained request came before the vocabulary"
        self.grammars.request(request.request_id, request.sampling.constraint)
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
        self.waiting_for_grammar[request.request_id] = request

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

    def admit_compiled(self) -> list[EngineOutput]:
        """Queue the requests whose grammars are ready; returns the news of those whose grammars are refused."""
        news: list[EngineOutput] = []
        for request_id, problem in self.grammars.decided() if self.grammars is not None else ():
            request = self.waiting_for_grammar[request_id]
            if problem:
                news.append(self._news(request, time.monotonic(), [], [], [], None, problem))
                news[-1].finish_reason = FinishReason.ERROR
                self._finish(request, FinishReason.ERROR)
                continue
            del self.waiting_for_grammar[request_id]
            request.status = RequestStatus.WAITING
            insort(self.waiting, request, key=self._key)
            self.tracer.emit("grammar_ready", request_id)
            self._append_forced(request, [])
        return news

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
            num_computed_tokens=step.num_computed_tokens,
            draft_token_ids=step.draft_token_ids,
            block_copies=step.block_copies,
            finished_request_ids=finished,
            preempted_request_ids=preempted,
        )

    def _schedule_running(self, step: _StepInProgress) -> None:
        drafts = self._propose_drafts()
        position = 0
        while position < len(self.running) and step.token_budget > 0:
            request = self.running[position]
            num_tokens = self._num_tokens_this_step(request, request.num_computed_tokens, step)
            draft: list[int] = []
            if drafts and request.num_computed_tokens + num_tokens == request.num_tokens:
                draft = drafts.get(request.request_id, [])[: step.token_budget - num_tokens]
            allocation = self.kv_cache.allocate_slots(request, num_tokens + len(draft))
            if allocation is None and draft:  # a guess is not worth preempting anybody
                draft = []
                allocation = self.kv_cache.allocate_slots(request, num_tokens)
            if allocation is None:
                self._preempt(self.running[-1])  # the request itself when it is the last, which ends the loop
                continue
            step.add(request, num_tokens + len(draft), allocation)
            if draft:
                step.draft_token_ids[request.request_id] = draft
            if allocation.block_ids or request.unsent:
                step.cached_requests.append(
                    CachedRequest(
                        request_id=request.request_id,
                        new_block_ids=allocation.block_ids,
                        new_token_ids=request.unsent,
                    )
                )
                request.unsent = []
            position += 1

    def _propose_drafts(self) -> dict[str, list[int]]:
        """Guesses for the running requests of which this step computes the last token."""
        if self.speculator is None:
            return {}
        room = {
            request.request_id: request.max_total_tokens - request.num_tokens - 1
            for request in self.running
            if request.num_computed_tokens >= request.num_prompt_tokens and request.ends_as is None
        }
        num_tokens = sum(request.num_tokens - request.num_computed_tokens for request in self.running)
        budget = self.config.max_num_batched_tokens
        assert budget is not None
        return self.speculator.propose(
            {request_id: limit for request_id, limit in room.items() if limit >= 1},
            budget if self.waiting else min(num_tokens, budget),
        )

    def _schedule_waiting(self, step: _StepInProgress) -> None:
        for request in self._admission_order():
            if step.token_budget == 0 or len(self.running) >= self.config.max_num_seqs:
                return
            if self._waits_for_adapter(request):
                continue
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
                    num_reported_tokens=request.num_tokens - len(request.unreported),
                    sampling=request.sampling,
                    stop_token_ids=tuple(request.stop_token_ids),
                    block_ids=allocation.block_ids,
                    pooling=request.pooling,
                    adapter_id=request.adapter_id,
                    tiles=request.tiles,
                )
            )
            request.unsent = []

    def fill_bitmasks(self, scheduled: SchedulerOutput) -> Bitmasks | None:
        """Begin to fill the masks of the requests that sample in this step; None where no grammar holds any of them."""
        if self.grammars is None:
            return None
        answers = []
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            answer = self.grammars.answer(request_id)
            request = self.requests[request_id]
            draft = scheduled.draft_token_ids.get(request_id, [])
            num_after = request.num_computed_tokens + num_tokens - len(draft)
            if answer is not None and num_after == request.num_tokens and request.ends_as is None:
                answers.append(ToFill(request_id, answer, request.stop_token_ids, draft, self.grammars.jumps(request)))
        return self.grammars.fill(answers) if answers else None

    def _num_tokens_this_step(self, request: Request, num_computed: int, step: _StepInProgress) -> int:
        num_tokens = request.num_tokens - num_computed
        threshold = self.config.long_prefill_token_threshold
        if threshold and len(self.running) + len(self.waiting) > 1:
            num_tokens = min(num_tokens, threshold)
        num_tokens = min(num_tokens, step.token_budget)
        if request.tiles and self.config.enable_chunked_prefill:
            # Encoding a tile takes longer than computing its tokens: a step takes on one, or others would wait for all.
            later = request.starts_of_tiles(num_computed, num_computed + num_tokens)[1:]
            num_tokens = min([num_tokens, *(start - num_computed for start in later)])
        return num_tokens

    def _admission_order(self) -> list[Request]:
        if self.config.policy != "lpm" or len(self.waiting) > LPM_WINDOW:
            return list(self.waiting)

        def longest_match_first(request: Request) -> tuple[bool, int]:
            # A preempted request goes first whatever it matches, or a stream of good matches could starve it.
            return request.status is not RequestStatus.PREEMPTED, -self.kv_cache.match_prefix(request).num_tokens

        return sorted(self.waiting, key=longest_match_first)

    def _waits_for_adapter(self, request: Request) -> bool:
        """Whether those that run have as many adapters as there may be, and not this one's."""
        if self.config.max_running_adapters is None or not request.adapter_id:
            return False
        running = {other.adapter_id for other in self.running} - {0}
        return request.adapter_id not in running and len(running) >= self.config.max_running_adapters

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
            request.num_cached_tokens = min(prefix.num_tokens, request.num_prompt_tokens)
            request.first_scheduled_time_s = time.monotonic()
        self._known_to_executor.add(request.request_id)
        if self.speculator is not None and request.pooling is None:
            self.speculator.start(
                request.request_id,
                request.all_token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                salt=request.cache_salt,
            )
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
        if self.speculator is not None:
            self.speculator.finish(request.request_id, keep=False)
        self.tracer.emit("preempted", request.request_id, tokens=request.num_tokens)

    # ---- one step up --------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, mask_errors: dict[str, str] | None = None
    ) -> list[EngineOutput]:
        """Append what was sampled, publish what was computed, finish what is done; returns the news of each request.

        Args:
            mask_errors: requests whose bitmask could not be filled, with why.
        """
        news: list[EngineOutput] = []
        errors = {**output.errors, **(mask_errors or {})}
        now = time.monotonic()
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:  # aborted while the step was in flight
                continue
            error = errors.get(request_id)
            reported: list[tuple[int, bool]] = []
            logprobs = output.logprobs.get(request_id) or []
            if error is None:
                sampled = output.sampled_token_ids.get(request_id, [])
                num_drafts = len(scheduled.draft_token_ids.get(request_id, ()))
                request.num_computed_tokens += num_tokens - num_drafts
                num_before = request.num_tokens
                if request.ends_as is None:
                    self._append(request, sampled, now)
                if self.speculator is not None and request.num_tokens > num_before:
                    self.speculator.extend(request.request_id, request.all_token_ids[num_before:])
                if num_drafts:
                    self._keep_accepted(request, num_drafts, len(sampled) - 1)
                self.kv_cache.cache_computed(request)
                if request.sampling.logprobs is not None:
                    reported = request.unreported[: len(logprobs)]
                elif sampled:
                    reported = request.unreported
                request.unreported = request.unreported[len(reported) :]
                if request.ends_as is not None and not request.unreported:
                    request.finish_reason = request.ends_as
            else:  # what it computed is not to be trusted, so nothing of this step is published
                request.finish_reason = FinishReason.ERROR
            embedding = output.embeddings.get(request_id)
            if embedding is not None:
                request.finish_reason = FinishReason.STOP
            prompt_logprobs = output.prompt_logprobs.get(request_id) or []
            if reported or prompt_logprobs or request.finish_reason is not None:
                if len(logprobs) > len(reported):
                    logprobs = logprobs[: len(reported)]
                news.append(self._news(request, now, reported, logprobs, prompt_logprobs, embedding, error))
            if request.finish_reason is not None:
                self._finish(request, request.finish_reason)
        return news

    def _keep_accepted(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Of a step's drafts, those that were accepted are computed; unless the answer ended before them."""
        assert self.speculator is not None
        request.num_computed_tokens = min(request.num_computed_tokens + num_accepted, request.num_tokens - 1)
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        request.saved_time_s += self.speculator.learn(request.request_id, num_drafts, num_accepted)
        self.tracer.emit("verified", request.request_id, drafts=num_drafts, accepted=num_accepted)

    def _append(self, request: Request, token_ids: list[int], now: float) -> None:
        """Append sampled tokens, and what a grammar forces behind them, until one of them ends the request."""
        if token_ids and request.first_token_time_s is None:
            request.first_token_time_s = now
            self.tracer.emit("first_token", request.request_id)
        if token_ids and request.sampling.max_tokens == 0:
            request.ends_as = FinishReason.LENGTH
            return
        grammar = self.grammars.answer(request.request_id) if self.grammars is not None else None
        num_forced = 0  # of the tokens to come: the masks left no other choice
        for position, token_id in enumerate(token_ids):
            if num_forced:
                num_forced -= 1
                continue
            may_end = grammar is None or grammar.may_end
            request.all_token_ids.append(token_id)
            request.unreported.append((token_id, may_end))
            if token_id in request.stop_token_ids and may_end:
                if request.num_output_tokens >= request.sampling.min_tokens:
                    request.ends_as, request.stop_reason = FinishReason.STOP, token_id
            elif grammar is not None:
                is_allowed = grammar.accept(token_id)
                assert is_allowed, f"{request} sampled token {token_id}, which its grammar's mask forbids"
            self._end_if_done(request, grammar)
            if request.ends_as is None and grammar is not None:
                num_forced = self._append_forced(request, token_ids[position + 1 :])
            if request.ends_as is not None:
                return

    def _append_forced(self, request: Request, sampled: list[int]) -> int:
        """Append the tokens that must come next, if a grammar leaves no choice.

        Args:
            sampled: what the executor has behind the request's last token already; it begins as the forced tokens do.

        Returns:
            How many of those are appended now.
        """
        assert self.grammars is not None
        assert request.sampling.max_tokens is not None
        answer = self.grammars.answer(request.request_id)
        assert answer is not None
        if not self.grammars.jumps(request):
            return 0
        room = request.sampling.max_tokens - request.num_output_tokens
        forced = self.grammars.forced_token_ids(answer, request.all_token_ids[-1], room)
        if not forced:
            return 0
        num_sampled = min(len(forced), len(sampled))
        assert forced[:num_sampled] == sampled[:num_sampled], f"{request} sampled {sampled} where {forced} was forced"
        request.all_token_ids += forced
        request.unsent += forced[num_sampled:]
        request.unreported += [(token_id, False) for token_id in forced]
        self.tracer.emit("forced", request.request_id, tokens=len(forced))
        self._end_if_done(request, answer)
        return num_sampled

    def _end_if_done(self, request: Request, grammar: AnswerGrammar | None) -> None:
        """A grammar ends an answer where nothing can follow, whatever min_tokens says; max_tokens ends it anywhere."""
        if request.ends_as is not None:
            return
        assert request.sampling.max_tokens is not None
        if grammar is not None and grammar.must_end:
            request.ends_as = FinishReason.STOP
        elif request.num_output_tokens >= request.sampling.max_tokens:
            request.ends_as = FinishReason.LENGTH

    def _news(
        self,
        request: Request,
        now: float,
        reported: list[tuple[int, bool]],
        logprobs: list[TokenLogprobs],
        prompt_logprobs: list[TokenLogprobs],
        embedding: bytes | None,
        error: str | None,
    ) -> EngineOutput:
        started = request.first_scheduled_time_s or now
        constraint, sampling = request.sampling.constraint, request.sampling
        stops_anywhere = constraint is None or not (sampling.stop or sampling.stop_regex)
        blamed = "" if constraint is None or error is None else constraint.param
        return EngineOutput(
            request_id=request.request_id,
            new_token_ids=[token_id for token_id, _ in reported],
            may_stop=[] if stops_anywhere else [may_stop for _, may_stop in reported],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_preemptions=request.num_preemptions,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            queue_time_s=started - request.arrival_time_s,
            prefill_time_s=(request.first_token_time_s or now) - started,
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
            saved_time_s=request.saved_time_s,
            embedding=embedding,
            error=error,
            param=blamed,
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            del self.waiting_for_grammar[request.request_id]
        else:
            self.waiting.remove(request)
        if self.grammars is not None and request.sampling.constraint is not None:
            self.grammars.forget(request.request_id)
        if self.speculator is not None:
            self.speculator.finish(request.request_id, keep=reason in (FinishReason.STOP, FinishReason.LENGTH))
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
            num_waiting_for_grammar=len(self.waiting_for_grammar),
            num_blocks=kv_cache.num_blocks,
            num_free_blocks=kv_cache.num_free_blocks,
            num_cached_blocks=kv_cache.num_cached_blocks,
            num_evictable_blocks=kv_cache.num_evictable_blocks,
            block_size=kv_cache.block_size,
            num_preemptions=self.num_preemptions,
            num_evicted_tokens=kv_cache.stats.evicted_tokens,
            prefix_queries=kv_cache.stats.queries,
            prefix_hits=kv_cache.stats.hits,
            grammars=GrammarStats() if self.grammars is None else self.grammars.stats,
            speculation=SpeculationStats() if self.speculator is None else self.speculator.stats,
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
        self.num_computed_tokens: dict[str, int] = {}
        self.draft_token_ids: dict[str, list[int]] = {}
        self.block_copies: list[BlockCopy] = []

    def add(self, request: Request, num_tokens: int, allocation: Allocation) -> None:
        assert num_tokens >= 1, f"{request} was scheduled with nothing to compute"
        self.token_budget -= num_tokens
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.num_computed_tokens[request.request_id] = request.num_computed_tokens
        self.block_copies.extend(allocation.block_copies)


def _share_prefix(request: Request, other: Request, num_tokens: int) -> bool:
    """Whether both prompts begin with the same num_tokens tokens (and the other really computes that many)."""
    if min(request.num_tokens - 1, other.num_prompt_tokens) < num_tokens:
        return False
    return request.all_token_ids[:num_tokens] == other.all_token_ids[:num_tokens]
