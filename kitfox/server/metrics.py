"""What /metrics shows: one set of measurements under the names that dashboards of vLLM and of SGLang ask for.

Counters and histograms are filled by the server as steps and deltas pass through it; gauges of the engine are read from
its latest `EngineStats` when somebody looks. `process_*` and `python_*` are about the server process, not the engine's.
One `ServerMetrics` belongs to one app, so tests and apps never share counts.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kitfox.outputs import CompletionOutput, EngineStats, GrammarStats, RequestOutput, SpeculationStats
from kitfox.request import FinishReason, SamplingParams
from kitfox.server.logs import RequestRecord

if TYPE_CHECKING:
    from kitfox.engine.async_llm import AsyncLLM

_TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_HTTP_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_STEP_TOKENS_BUCKETS = (1.0, *(float(2**power) for power in range(3, 15)))
LOAD_PHASE = "load weights"  # as the executor calls it
_PREEMPTION_BUCKETS = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the context length."""
    buckets: list[float] = []
    scale = 1
    while scale <= max_model_len:
        buckets += [float(digit * scale) for digit in (1, 2, 5) if digit * scale <= max_model_len]
        scale *= 10
    return tuple(buckets)


class Histogram:
    """Counts per bucket and a sum; a tenth of the cost of a labelled prometheus_client one on the token path."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound as text, observations at or below it); ends with +Inf."""
        total = 0
        buckets = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class RequestObserver:
    """Watches one engine request's deltas and books them; `close` books what never finished as aborted.

    What it adds up goes into the record of the HTTP request too, where there is one.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        sampling: SamplingParams,
        num_prompt_tokens: int,
        record: RequestRecord | None = None,
        *,
        adapter: str | None = None,
    ):
        self._metrics = metrics
        self._record = record
        self._n = sampling.n
        self._start_s = time.monotonic()
        self._first_s: dict[int, float] = {}  # by answer index
        self._last_s: dict[int, float] = {}
        self._num_tokens: Counter[int] = Counter()
        self._finished: set[int] = set()
        self._prompt_booked = False
        self._num_prompt_tokens = num_prompt_tokens
        self._complete = False
        self._adapter = adapter
        if adapter is not None:
            metrics.adapters_waiting[adapter] += 1
        metrics.num_requests += 1
        metrics.params_n.observe(sampling.n)
        if sampling.max_tokens is not None:
            metrics.params_max_tokens.observe(sampling.max_tokens)

    def observe(self, output: RequestOutput) -> None:
        now = time.monotonic()
        metrics = self._metrics
        if not self._prompt_booked:
            self._prompt_booked = True
            if self._adapter is not None:
                metrics.adapters_waiting[self._adapter] -= 1
                metrics.adapters_running[self._adapter] += 1
            metrics.prompt_tokens += self._num_prompt_tokens
            metrics.cached_tokens += output.num_cached_tokens
            metrics.request_prompt_tokens.observe(self._num_prompt_tokens)
            metrics.request_uncached_tokens.observe(self._num_prompt_tokens - output.num_cached_tokens)
            if self._record is not None:
                self._record.prompt_tokens += self._num_prompt_tokens
                self._record.cached_tokens += output.num_cached_tokens
        for answer in output.outputs:
            if answer.token_ids:
                self._observe_tokens(answer.index, len(answer.token_ids), now)
            if answer.finish_reason is not None:
                self._finish_answer(answer, answer.finish_reason)
        if output.finished:
            self._complete = True
            self._leave_adapter()
            self._finish_request(output, now)

    def _observe_tokens(self, index: int, num_new: int, now: float) -> None:
        metrics = self._metrics
        metrics.generation_tokens += num_new
        self._num_tokens[index] += num_new
        if index not in self._first_s:
            if not self._first_s:
                metrics.ttft.observe(now - self._start_s)
            self._first_s[index] = now
        else:
            metrics.itl.observe((now - self._last_s[index]) / num_new, num_new)
        self._last_s[index] = now

    def _finish_answer(self, answer: CompletionOutput, reason: FinishReason) -> None:
        metrics = self._metrics
        index = answer.index
        self._finished.add(index)
        metrics.request_preemptions.observe(answer.num_preemptions)
        metrics.finished[reason.value] += 1
        num_tokens = self._num_tokens[index]
        if self._record is not None:
            self._record.finish_reasons.append(reason.value)
            self._record.output_tokens += num_tokens
        metrics.request_generation_tokens.observe(num_tokens)
        if num_tokens > 1:
            metrics.tpot.observe((self._last_s[index] - self._first_s[index]) / (num_tokens - 1))

    def _finish_request(self, output: RequestOutput, now: float) -> None:
        metrics = self._metrics
        metrics.e2e.observe(now - self._start_s)
        metrics.max_generation_tokens.observe(max(self._num_tokens.values(), default=0))
        if output.timings is not None:
            metrics.queue.observe(output.timings.queue_s)
            metrics.prefill.observe(output.timings.prefill_s)
            metrics.decode.observe(output.timings.decode_s)
            metrics.inference.observe(output.timings.prefill_s + output.timings.decode_s)
            if self._record is not None:
                self._record.book_timings(output.timings)

    def _leave_adapter(self) -> None:
        if self._adapter is not None:
            used = self._metrics.adapters_running if self._prompt_booked else self._metrics.adapters_waiting
            used[self._adapter] -= 1

    def close(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Book the answers that have not finished; nothing when all have, or when called again."""
        if self._complete:
            return
        self._complete = True
        self._leave_adapter()
        num_unfinished = self._n - len(self._finished)
        self._metrics.finished[reason.value] += num_unfinished
        if self._record is not None:
            self._record.finish_reasons += [reason.value] * num_unfinished
            self._record.output_tokens += sum(n for i, n in self._num_tokens.items() if i not in self._finished)


class ServerMetrics(Collector):
    """Everything counted since the app was made, and the engine's gauges at the moment of a scrape."""

    def __init__(self, llm: AsyncLLM):
        self._llm = llm
        self._model_name = llm.config.model.served_name
        tokens = token_buckets(llm.max_model_len)
        self.num_requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self.rejections: Counter[str] = Counter({"queue_full": 0, "shutting_down": 0, "engine_unavailable": 0})
        self.adapters_waiting: Counter[str] = Counter()  # open requests without a token yet, by their LoRA adapters
        self.adapters_running: Counter[str] = Counter()
        self.http_responses: Counter[tuple[str, str, int]] = Counter()  # (route, method, status)
        self.http_seconds: dict[tuple[str, str], Histogram] = {}  # by route and method
        self.ttft = Histogram(_TTFT_BUCKETS_S)
        self.itl = Histogram(_ITL_BUCKETS_S)
        self.tpot = Histogram(_ITL_BUCKETS_S)
        self.e2e = Histogram(_REQUEST_BUCKETS_S)
        self.queue = Histogram(_REQUEST_BUCKETS_S)
        self.prefill = Histogram(_REQUEST_BUCKETS_S)
        self.decode = Histogram(_REQUEST_BUCKETS_S)
        self.inference = Histogram(_REQUEST_BUCKETS_S)
        self.request_prompt_tokens = Histogram(tokens)
        self.request_uncached_tokens = Histogram(tokens)
        self.request_generation_tokens = Histogram(tokens)
        self.max_generation_tokens = Histogram(tokens)
        self.step_tokens = Histogram(_STEP_TOKENS_BUCKETS)
        self.request_preemptions = Histogram(_PREEMPTION_BUCKETS)
        self.params_n = Histogram(_N_BUCKETS)
        self.params_max_tokens = Histogram(tokens)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        for of_process in (ProcessCollector, PlatformCollector, GCCollector):
            of_process(registry=self._registry)

    def observe_step(self, stats: EngineStats) -> None:
        """Book one engine step; one that computed nothing is none."""
        if stats.num_step_tokens:
            self.step_tokens.observe(stats.num_step_tokens)

    def observe_http(self, record: RequestRecord) -> None:
        """Book an HTTP request that has ended; all that lead nowhere are one route, for clients may invent paths."""
        route = record.route or "none"
        self.http_responses[route, record.method, record.status] += 1
        histogram = self.http_seconds.get((route, record.method))
        if histogram is None:
            histogram = self.http_seconds[route, record.method] = Histogram(_HTTP_BUCKETS_S)
        histogram.observe(record.duration_s)

    def render(self) -> bytes:
        """Prometheus text format, version 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        stats = self._llm.stats
        yield from self._gauges(stats)
        yield from self._start_up()
        yield from self._counters(stats)
        yield from self._http()
        yield from self._histograms()

    def _gauges(self, stats: EngineStats) -> Iterable[GaugeMetricFamily]:
        used_blocks = stats.num_blocks - stats.num_free_blocks
        usage = used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        hit_rate = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
        size = stats.block_size
        yield from self._gauge(
            "Requests in the current step", stats.num_running, "vllm:num_requests_running", "sglang:num_running_reqs"
        )
        yield from self._gauge(
            "Requests waiting", stats.num_waiting, "vllm:num_requests_waiting", "sglang:num_queue_reqs"
        )
        yield from self._gauge(
            "Requests that wait in other memory: none, what was preempted is computed again", 0,
            "vllm:num_requests_swapped",
        )  # fmt: skip
        yield from self._gauge(
            "Requests whose grammar is being compiled", stats.num_waiting_for_grammar, "sglang:num_grammar_queue_reqs"
        )
        waiting = {"capacity": stats.num_waiting, "deferred": stats.num_waiting_for_grammar}
        yield self._labelled_gauge("vllm:num_requests_waiting_by_reason", "Why requests wait", "reason", waiting)
        paused = len(self._llm.open_request_ids) if self._llm.is_paused else 0
        yield from self._gauge("Requests held up by a pause", paused, "sglang:num_paused_reqs")
        states = {"awake": not self._llm.is_sleeping, "weights_offloaded": 0, "discard_all": 0}
        yield self._labelled_gauge(
            "vllm:engine_sleep_state", "Whether the engine is awake; asleep it keeps the weights", "sleep_state", states
        )
        yield from self._gauge(
            "Share of KV blocks that running requests hold, 0 to 1", usage,
            "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "sglang:full_token_usage",
        )  # fmt: skip
        yield from self._gauge(
            "Prompt tokens found in the prefix cache, share of all since the start",
            hit_rate,
            "sglang:cache_hit_rate",
            "vllm:gpu_prefix_cache_hit_rate",
        )
        yield from self._gauge(
            "Tokens of KV that running requests hold, in whole blocks",
            used_blocks * size,
            "sglang:num_used_tokens",
            "sglang:kv_used_tokens",
        )
        yield from self._gauge(
            "Tokens of KV in blocks that hold nothing",
            (stats.num_free_blocks - stats.num_evictable_blocks) * size,
            "sglang:kv_available_tokens",
        )
        yield from self._gauge(
            "Tokens of KV in cached blocks that no running request uses",
            stats.num_evictable_blocks * size,
            "sglang:kv_evictable_tokens",
        )
        yield from self._gauge("Tokens that the KV pool holds", stats.num_blocks * size, "sglang:max_total_num_tokens")
        yield from self._gauge("Tokens in a KV block", size, "sglang:page_size")
        yield from self._gauge("KV blocks", stats.num_blocks, "sglang:num_pages")
        yield from self._gauge("Longest prompt plus output, in tokens", self._llm.max_model_len, "sglang:context_len")
        throughput = stats.num_step_tokens / stats.step_time_s if stats.step_time_s > 0 and stats.num_running else 0.0
        yield from self._gauge(
            "Tokens a second in the latest step, prompt tokens included", throughput, "sglang:gen_throughput"
        )
        yield from self._speculation_gauges(stats.speculation)
        yield self._cache_config_info(stats)
        yield self._lora_requests_info()

    def _speculation_gauges(self, speculation: SpeculationStats) -> Iterable[GaugeMetricFamily]:
        accepted = speculation.num_accepted_tokens
        yield from self._gauge(
            "Tokens a step of answers that had guesses, since the start",
            1 + accepted / speculation.num_drafts if speculation.num_drafts else 1.0,
            "sglang:spec_accept_length",
        )
        yield from self._gauge(
            "Share of guessed tokens that were right, since the start",
            accepted / speculation.num_draft_tokens if speculation.num_draft_tokens else 0.0,
            "sglang:spec_accept_rate",
        )
        yield from self._gauge(
            "Seconds by which answers went on sooner for guesses, since the start, by what steps of their sizes take",
            speculation.saved_time_s,
            "kitfox:speculation_saved_seconds",
        )

    def _cache_config_info(self, stats: EngineStats) -> GaugeMetricFamily:
        cache = self._llm.config.cache
        labels = {
            "block_size": str(stats.block_size),
            "num_gpu_blocks": str(stats.num_blocks),
            "enable_prefix_caching": str(cache.organisation != "none"),
            "organisation": cache.organisation,
            "cache_dtype": cache.dtype,
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's settings, as labels", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def _lora_requests_info(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "When it was asked which LoRA adapters open requests use, as Unix time",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )  # fmt: skip
        config = self._llm.config
        if config.adapters.enabled:
            most = config.scheduler.max_running_adapters or config.adapters.max_loaded
            names = [",".join(sorted(+used)) for used in (self.adapters_waiting, self.adapters_running)]
            family.add_metric([str(most), *names], time.time())
        return family

    def _start_up(self) -> Iterable[GaugeMetricFamily]:
        """What the engine reported when it had started."""
        seconds = dict(self._llm.phases)
        yield self._labelled_gauge("sglang:startup_time_seconds", "Seconds of the engine's start", "phase", seconds)
        if LOAD_PHASE in seconds:
            yield from self._gauge(
                "Seconds that loading the weights took", seconds[LOAD_PHASE], "sglang:weight_load_duration_seconds"
            )

    def _counters(self, stats: EngineStats) -> Iterable[CounterMetricFamily]:
        yield from self._counter(
            "Prompt tokens of requests that were started",
            self.prompt_tokens,
            "vllm:prompt_tokens",
            "sglang:prompt_tokens",
        )
        yield from self._counter(
            "Generated tokens", self.generation_tokens, "vllm:generation_tokens", "sglang:generation_tokens"
        )
        yield from self._counter(
            "Prompt tokens that came from the prefix cache", self.cached_tokens, "vllm:prompt_tokens_cached"
        )
        yield self._labelled(
            "sglang:cached_tokens",
            "Prompt tokens that came from the prefix cache",
            "cache_source",
            {"device": self.cached_tokens},
        )
        yield self._labelled(
            "vllm:prompt_tokens_cached_by_source",
            "Prompt tokens that came from the prefix cache",
            "source",
            {"device": self.cached_tokens},
        )
        by_mode = {
            "prefill_compute": self.prompt_tokens - self.cached_tokens,
            "prefill_cache": self.cached_tokens,
            "decode": self.generation_tokens,
        }
        yield self._labelled("sglang:realtime_tokens", "Tokens by how they came to be", "mode", by_mode)
        by_source = {"local_compute": self.prompt_tokens - self.cached_tokens, "local_cache_hit": self.cached_tokens}
        yield self._labelled("vllm:prompt_tokens_by_source", "Where prompt tokens came from", "source", by_source)
        yield from self._counter(
            "Tokens looked up in the prefix cache",
            stats.prefix_queries,
            "vllm:prefix_cache_queries",
            "vllm:gpu_prefix_cache_queries",
        )
        yield from self._counter(
            "Tokens found in the prefix cache",
            stats.prefix_hits,
            "vllm:prefix_cache_hits",
            "vllm:gpu_prefix_cache_hits",
        )
        yield from self._counter(
            "Preemptions", stats.num_preemptions, "vllm:num_preemptions", "sglang:num_retracted_requests"
        )
        yield from self._counter("Cached tokens that were evicted", stats.num_evicted_tokens, "sglang:evicted_tokens")
        yield from self._counter("Requests handed to the engine", self.num_requests, "sglang:num_requests")
        yield from self._grammar_counters(stats.grammars)
        yield from self._speculation_counters(stats.speculation)
        yield from self._counter("Answers aborted", self.finished["abort"], "sglang:num_aborted_requests")
        yield self._labelled("vllm:request_success", "Answers that ended, by reason", "finished_reason", self.finished)
        yield self._labelled(
            "vllm:admission_rejections", "Requests refused without being queued", "reason", self.rejections
        )

    def _grammar_counters(self, grammars: GrammarStats) -> Iterable[CounterMetricFamily]:
        num_asked = grammars.num_compiled + grammars.num_refused + grammars.num_cache_hits
        yield from self._counter("Answers that are held to a grammar", num_asked, "sglang:num_so_requests")
        yield from self._counter("Grammars asked for", num_asked, "sglang:num_grammar")
        yield from self._counter(
            "Grammars that were compiled before", grammars.num_cache_hits, "sglang:num_grammar_cache_hit"
        )
        yield from self._counter("Grammars refused", grammars.num_refused, "sglang:num_grammar_aborted")
        yield from self._counter(
            "Seconds spent compiling grammars, beside the steps", grammars.compile_time_s,
            "kitfox:grammar_compile_seconds",
        )  # fmt: skip
        yield from self._counter("Tokens for which a mask was made", grammars.num_masks, "kitfox:grammar_masks")
        yield from self._counter(
            "Seconds spent filling masks, beside the forward pass", grammars.mask_time_s, "kitfox:grammar_mask_seconds"
        )
        yield from self._counter(
            "Tokens that a grammar forced, so that none was sampled",
            grammars.num_forced_tokens,
            "kitfox:grammar_forced_tokens",
        )

    def _speculation_counters(self, speculation: SpeculationStats) -> Iterable[CounterMetricFamily]:
        yield from self._counter(
            "Runs of guessed tokens, one an answer and a step", speculation.num_drafts, "vllm:spec_decode_num_drafts"
        )
        yield from self._counter(
            "Guessed tokens that were verified", speculation.num_draft_tokens, "vllm:spec_decode_num_draft_tokens"
        )
        yield from self._counter(
            "Guessed tokens that were right", speculation.num_accepted_tokens, "vllm:spec_decode_num_accepted_tokens"
        )

    def _http(self) -> Iterable[CounterMetricFamily | HistogramMetricFamily]:
        """Of the server, not of a model; vLLM's boards group statuses ("2xx"), SGLang's have them exact."""
        by_class: Counter[tuple[str, str, str]] = Counter()
        by_route: Counter[tuple[str, str]] = Counter()
        responses = CounterMetricFamily(
            "sglang:http_responses", "HTTP requests by their outcome", labels=["endpoint", "method", "status_code"]
        )
        for (route, method, status), count in sorted(self.http_responses.items()):
            by_class[route, method, f"{status // 100}xx"] += count
            by_route[route, method] += count
            responses.add_metric([route, method, str(status)], count)
        grouped = CounterMetricFamily("http_requests", "HTTP requests", labels=["handler", "method", "status"])
        for group, count in by_class.items():
            grouped.add_metric(group, count)
        requests = CounterMetricFamily("sglang:http_requests", "HTTP requests", labels=["endpoint", "method"])
        for labels, count in by_route.items():
            requests.add_metric(labels, count)
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "Seconds from the headers to the end of the answer",
            labels=["handler", "method"],
        )  # fmt: skip
        for labels, histogram in sorted(self.http_seconds.items()):
            seconds.add_metric(labels, buckets=histogram.cumulative(), sum_value=histogram.sum)
        yield from (grouped, requests, responses, seconds)

    def _histograms(self) -> Iterable[HistogramMetricFamily]:
        both = [
            (self.ttft, "Seconds from arrival to the first token", "time_to_first_token_seconds"),
            (self.itl, "Seconds between tokens of one answer", "inter_token_latency_seconds"),
            (
                self.tpot,
                "Seconds a token after the first, one value an answer",
                "request_time_per_output_token_seconds",
            ),
            (self.e2e, "Seconds from arrival to the end", "e2e_request_latency_seconds"),
        ]
        for histogram, help_text, name in both:
            yield from self._histogram(histogram, help_text, f"vllm:{name}", f"sglang:{name}")
        yield from self._histogram(
            self.tpot,
            "The former name of request_time_per_output_token_seconds",
            "vllm:time_per_output_token_seconds",
            "sglang:time_per_output_token_seconds",
        )
        yield from self._histogram(
            self.queue,
            "Seconds waiting to be scheduled first",
            "vllm:request_queue_time_seconds",
            "sglang:queue_time_seconds",
        )
        yield from self._histogram(
            self.inference, "Seconds from being scheduled to the end", "vllm:request_inference_time_seconds"
        )
        yield from self._histogram(
            self.prefill, "Seconds from being scheduled to the first token", "vllm:request_prefill_time_seconds"
        )
        yield from self._histogram(
            self.decode, "Seconds from the first token to the end", "vllm:request_decode_time_seconds"
        )
        yield from self._histogram(
            self.request_prompt_tokens,
            "Prompt tokens of a request",
            "vllm:request_prompt_tokens",
            "sglang:prompt_tokens_histogram",
        )
        yield from self._histogram(
            self.request_uncached_tokens, "Prompt tokens of a request that had to be computed",
            "vllm:request_prefill_kv_computed_tokens", "sglang:uncached_prompt_tokens_histogram",
        )  # fmt: skip
        yield from self._histogram(
            self.request_generation_tokens,
            "Tokens of an answer",
            "vllm:request_generation_tokens",
            "sglang:generation_tokens_histogram",
        )
        yield from self._histogram(
            self.max_generation_tokens,
            "Tokens of the longest answer of a request",
            "vllm:request_max_num_generation_tokens",
        )
        yield from self._histogram(
            self.step_tokens, "Tokens computed in an engine step, prompt tokens included", "vllm:iteration_tokens_total"
        )
        yield from self._histogram(self.request_preemptions, "Preemptions of an answer", "vllm:request_num_preemptions")
        yield from self._histogram(self.params_n, "The n parameter", "vllm:request_params_n")
        yield from self._histogram(
            self.params_max_tokens, "The max_tokens parameter, where given", "vllm:request_params_max_tokens"
        )

    # ---- one measurement, all of its names ------------------------------------------------------------------------

    def _labels(self, name: str) -> tuple[list[str], list[str]]:
        if name.startswith("sglang:"):
            return ["model_name"], [self._model_name]
        return ["model_name", "engine"], [self._model_name, "0"]

    def _gauge(self, help_text: str, value: float, *names: str) -> Iterable[GaugeMetricFamily]:
        for name in names:
            labels, values = self._labels(name)
            family = GaugeMetricFamily(name, help_text, labels=labels)
            family.add_metric(values, value)
            yield family

    def _counter(self, help_text: str, value: float, *names: str) -> Iterable[CounterMetricFamily]:
        for name in names:
            labels, values = self._labels(name)
            family = CounterMetricFamily(name, help_text, labels=labels)
            family.add_metric(values, value)
            yield family

    def _labelled_gauge(
        self, name: str, help_text: str, label: str, values_by_label: Mapping[str, float]
    ) -> GaugeMetricFamily:
        labels, values = self._labels(name)
        family = GaugeMetricFamily(name, help_text, labels=[*labels, label])
        for key, value in values_by_label.items():
            family.add_metric([*values, key], value)
        return family

    def _labelled(self, name: str, help_text: str, label: str, counts: dict[str, int]) -> CounterMetricFamily:
        labels, values = self._labels(name)
        family = CounterMetricFamily(name, help_text, labels=[*labels, label])
        for key, count in counts.items():
            family.add_metric([*values, key], count)
        return family

    def _histogram(self, histogram: Histogram, help_text: str, *names: str) -> Iterable[HistogramMetricFamily]:
        for name in names:
            labels, values = self._labels(name)
            family = HistogramMetricFamily(name, help_text, labels=labels)
            family.add_metric(values, buckets=histogram.cumulative(), sum_value=histogram.sum)
            yield family
