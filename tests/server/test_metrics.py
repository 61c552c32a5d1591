"""Exact counts after a scripted run, under both families of names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kitfox.outputs import CompletionOutput, EngineStats, RequestOutput, RequestTimings
from kitfox.request import FinishReason, SamplingParams
from kitfox.server import metrics as metrics_module
from kitfox.server.metrics import Histogram, RequestObserver, ServerMetrics, token_buckets
from tests.server.fake_llm import MODEL, REPLY, FakeAsyncLLM
from tests.server.fault_table import COMPLETIONS
from tests.server.http_client import send_all

REPLY_TOKENS = len(REPLY.encode()) + 1


def scrape(response: httpx.Response) -> dict[tuple[str, str], float]:
    """(sample name, its labels beside model and engine) to value."""
    return scrape_text(response.text)


def scrape_text(text: str) -> dict[tuple[str, str], float]:
    samples: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
            samples[sample.name, ",".join(labels)] = sample.value
    return samples


@pytest.fixture(scope="module")
def samples() -> dict[tuple[str, str], float]:
    llm = FakeAsyncLLM(tokens_per_delta=4)
    llm.num_cached_tokens = 1
    llm.stats = EngineStats(
        num_blocks=10, num_free_blocks=7, num_running=2, num_waiting=1, block_size=32, num_preemptions=3,
        prefix_queries=40, prefix_hits=10, num_evicted_tokens=64, num_evictable_blocks=5,
    )  # fmt: skip
    responses = send_all(
        llm,
        [
            ("POST", COMPLETIONS, {"prompt": "Hi", "max_tokens": 100}),
            ("POST", COMPLETIONS, {"prompt": "Hello", "max_tokens": 4, "stream": True}),
            ("POST", COMPLETIONS, {"prompt": "Hi", "n": 2, "max_tokens": 8}),
            ("POST", COMPLETIONS, {"prompt": "Hi", "top_p": 7}),
            ("GET", "/made/up/1", None),
            ("GET", "/made/up/2", None),
            ("GET", "/metrics", None),
        ],
    )
    assert responses[-1].status_code == 200
    assert responses[-1].headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert f'model_name="{MODEL}"' in responses[-1].text
    return scrape(responses[-1])


@pytest.mark.parametrize(
    ("name", "label", "value"),
    [
        ("vllm:prompt_tokens_total", "", 9),
        ("sglang:prompt_tokens_total", "", 9),
        ("vllm:generation_tokens_total", "", REPLY_TOKENS + 4 + 16),
        ("sglang:generation_tokens_total", "", REPLY_TOKENS + 4 + 16),
        ("vllm:prompt_tokens_cached_total", "", 3),
        ("sglang:cached_tokens_total", "device", 3),
        ("vllm:prompt_tokens_by_source_total", "local_compute", 6),
        ("vllm:request_success_total", "stop", 1),
        ("vllm:request_success_total", "length", 3),
        ("vllm:request_success_total", "abort", 0),
        ("sglang:num_requests_total", "", 3),
        ("vllm:num_requests_running", "", 2),
        ("sglang:num_queue_reqs", "", 1),
        ("vllm:kv_cache_usage_perc", "", 0.3),
        ("sglang:token_usage", "", 0.3),
        ("sglang:max_total_num_tokens", "", 320),
        ("sglang:kv_used_tokens", "", 96),
        ("sglang:kv_evictable_tokens", "", 160),
        ("sglang:kv_available_tokens", "", 64),
        ("sglang:cache_hit_rate", "", 0.25),
        ("vllm:prefix_cache_queries_total", "", 40),
        ("vllm:prefix_cache_hits_total", "", 10),
        ("vllm:num_preemptions_total", "", 3),
        ("sglang:evicted_tokens_total", "", 64),
        ("vllm:time_to_first_token_seconds_count", "", 3),
        ("vllm:inter_token_latency_seconds_count", "", (REPLY_TOKENS - 4) + 0 + 8),
        ("vllm:request_time_per_output_token_seconds_count", "", 4),
        ("sglang:e2e_request_latency_seconds_count", "", 3),
        ("vllm:request_queue_time_seconds_sum", "", pytest.approx(0.3)),
        ("vllm:request_prefill_time_seconds_sum", "", pytest.approx(0.6)),
        ("vllm:request_prompt_tokens_sum", "", 9),
        ("vllm:request_prompt_tokens_bucket", "2.0", 2),
        ("vllm:request_generation_tokens_count", "", 4),
        ("vllm:iteration_tokens_total_sum", "", 9 + REPLY_TOKENS + 4 + 16),
        ("vllm:iteration_tokens_total_count", "", -(-REPLY_TOKENS // 4) + 1 + 2),
        ("vllm:iteration_tokens_total_bucket", "1.0", 0),
        ("vllm:iteration_tokens_total_bucket", "8.0", -(-REPLY_TOKENS // 4) + 1),
        ("vllm:iteration_tokens_total_bucket", "16.0", -(-REPLY_TOKENS // 4) + 1 + 2),
        ("vllm:iteration_tokens_total_bucket", "+Inf", -(-REPLY_TOKENS // 4) + 1 + 2),
        ("vllm:request_params_n_sum", "", 4),
        ("http_requests_total", "/v1/completions,POST,2xx", 3),
        ("http_requests_total", "/v1/completions,POST,4xx", 1),
        ("http_requests_total", "none,GET,4xx", 2),
        ("sglang:http_requests_total", "/v1/completions,POST", 4),
        ("sglang:http_responses_total", "/v1/completions,POST,200", 3),
        ("sglang:http_responses_total", "none,GET,404", 2),
        ("http_request_duration_seconds_count", "/v1/completions,POST", 4),
        ("http_request_duration_seconds_bucket", "/v1/completions,+Inf,POST", 4),
        ("vllm:num_requests_swapped", "", 0),
        ("vllm:engine_sleep_state", "awake", 1),
        ("vllm:engine_sleep_state", "weights_offloaded", 0),
        ("sglang:num_paused_reqs", "", 0),
        ("vllm:num_requests_waiting_by_reason", "capacity", 1),
        ("vllm:num_requests_waiting_by_reason", "deferred", 0),
        ("vllm:gpu_cache_usage_perc", "", 0.3),
        ("vllm:gpu_prefix_cache_hit_rate", "", 0.25),
        ("vllm:gpu_prefix_cache_queries_total", "", 40),
        ("vllm:gpu_prefix_cache_hits_total", "", 10),
        ("vllm:prompt_tokens_cached_by_source_total", "device", 3),
        ("sglang:realtime_tokens_total", "prefill_compute", 6),
        ("sglang:realtime_tokens_total", "prefill_cache", 3),
        ("sglang:realtime_tokens_total", "decode", REPLY_TOKENS + 4 + 16),
        ("sglang:startup_time_seconds", "load weights", 0.5),
        ("sglang:weight_load_duration_seconds", "", 0.5),
        ("sglang:time_per_output_token_seconds_count", "", 4),
    ],
)
def test_exact_values(samples: dict[tuple[str, str], float], name: str, label: str, value: float) -> None:
    assert samples[name, label] == value


def test_the_server_process_is_measured_too(samples: dict[tuple[str, str], float]) -> None:
    assert samples["process_resident_memory_bytes", ""] > 2**20
    assert samples["process_open_fds", ""] > 0
    names = {name for name, _ in samples}
    assert {"process_cpu_seconds_total", "python_info", "python_gc_collections_total"} <= names


def test_a_step_that_computed_nothing_is_not_counted() -> None:
    llm = FakeAsyncLLM()
    metrics = ServerMetrics(llm)  # type: ignore[arg-type]
    for num_tokens in (0, 5, 20000):
        metrics.observe_step(EngineStats(num_step_tokens=num_tokens))
    assert metrics.step_tokens.sum == 20005
    assert metrics.step_tokens.cumulative()[-2:] == [("16384.0", 1.0), ("+Inf", 2.0)]


def test_aborts_and_refusals_are_counted() -> None:
    llm = FakeAsyncLLM()
    llm.fail_after = 1
    *_, answer = send_all(llm, [("POST", COMPLETIONS, {"prompt": "Hi", "n": 2}), ("GET", "/metrics", None)])
    assert scrape(answer)["vllm:request_success_total", "error"] == 2
    llm.health = "draining"
    *_, answer = send_all(llm, [("POST", COMPLETIONS, {"prompt": "Hi"}), ("GET", "/metrics", None)])
    assert scrape(answer)["vllm:admission_rejections_total", "shutting_down"] == 1


def test_histogram_buckets_are_cumulative_and_closed_above() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 6.0), ("+Inf", 7.0)]
    assert histogram.sum == 18.0


def test_token_buckets() -> None:
    assert token_buckets(30) == (1, 2, 5, 10, 20)


# ---- histograms, by bucket ------------------------------------------------------------------------------------------


class Clock:
    """What `time.monotonic` says in metrics.py, as set by the script."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def delta(*token_counts: int, finish: str | None = None, cached: int = 0, **timings: float) -> RequestOutput:
    """One delta; answer i got so many tokens, and with `finish` every answer ends."""
    reason = None if finish is None else FinishReason(finish)
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[],
        outputs=[
            CompletionOutput(index=i, token_ids=[0] * n, finish_reason=reason) for i, n in enumerate(token_counts)
        ],
        finished=finish is not None,
        num_cached_tokens=cached,
        timings=RequestTimings(**timings) if timings else None,
    )


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], float]:
    """Two requests whose every delta comes at a known time."""
    clock = Clock()
    monkeypatch.setattr(metrics_module, "time", clock)
    llm = FakeAsyncLLM()
    metrics = ServerMetrics(llm)  # type: ignore[arg-type]
    first = RequestObserver(metrics, SamplingParams(max_tokens=10), 40)
    second = RequestObserver(metrics, SamplingParams(n=2, max_tokens=3), 7)
    script: list[tuple[float, RequestObserver, RequestOutput]] = [
        (0.030, first, delta(1, cached=32)),  # TTFT 30 ms
        (0.050, second, delta(1, 1)),  # TTFT 50 ms
        (0.090, first, delta(1)),  # 60 ms between tokens
        (0.130, second, delta(2, 1, finish="length", queue_s=0.7, prefill_s=0.4, decode_s=1.2)),  # 40, 40 and 80 ms
        (0.490, first, delta(4, finish="stop", queue_s=0.1, prefill_s=2.0, decode_s=12.0)),  # four times 100 ms
    ]
    for at, observer, output in script:
        clock.now = 1000.0 + at
        observer.observe(output)
    return scrape_text(metrics.render().decode())


@pytest.mark.parametrize(
    ("name", "total", "by_bound"),
    [
        ("time_to_first_token_seconds", 0.08, {"0.02": 0, "0.04": 1, "0.06": 2, "+Inf": 2}),
        ("inter_token_latency_seconds", 0.62, {"0.025": 0, "0.05": 2, "0.075": 3, "0.1": 8, "+Inf": 8}),
        ("request_time_per_output_token_seconds", 0.04 + 0.08 + 0.092, {"0.025": 0, "0.05": 1, "0.075": 1, "0.1": 3}),
        ("e2e_request_latency_seconds", 0.62, {"0.3": 1, "0.5": 2}),
        ("request_queue_time_seconds", 0.8, {"0.3": 1, "0.5": 1, "0.8": 2}),
        ("request_prefill_time_seconds", 2.4, {"0.3": 0, "0.5": 1, "1.5": 1, "2.0": 2}),
        ("request_decode_time_seconds", 13.2, {"1.0": 0, "1.5": 1, "10.0": 1, "15.0": 2}),
        ("request_inference_time_seconds", 15.6, {"1.5": 0, "2.0": 1, "10.0": 1, "15.0": 2}),
        ("request_prompt_tokens", 47, {"5.0": 0, "10.0": 1, "20.0": 1, "50.0": 2}),
        ("request_prefill_kv_computed_tokens", 15, {"5.0": 0, "10.0": 2}),
        ("request_generation_tokens", 11, {"1.0": 0, "2.0": 1, "5.0": 2, "10.0": 3}),
        ("request_max_num_generation_tokens", 9, {"2.0": 0, "5.0": 1, "10.0": 2}),
        ("request_params_n", 3, {"1.0": 1, "2.0": 2}),
        ("request_params_max_tokens", 13, {"2.0": 0, "5.0": 1, "10.0": 2}),
    ],
)
def test_every_bucket(
    scripted: dict[tuple[str, str], float], name: str, total: float, by_bound: dict[str, float]
) -> None:
    assert scripted[f"vllm:{name}_sum", ""] == pytest.approx(total)
    assert {bound: scripted[f"vllm:{name}_bucket", bound] for bound in by_bound} == by_bound
    assert scripted[f"vllm:{name}_bucket", "+Inf"] == scripted[f"vllm:{name}_count", ""]


# ---- names ----------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
BOARD = json.loads((Path(__file__).resolve().parents[2] / "dashboards" / "kitfox.json").read_text(encoding="utf-8"))


def families() -> dict[str, str]:
    """Name to type of all that /metrics shows of kitfox."""
    *_, answer = send_all(FakeAsyncLLM(), [("POST", COMPLETIONS, {"prompt": "Hi"}), ("GET", "/metrics", None)])
    parsed = text_string_to_metric_families(answer.text)
    return {family.name: family.type for family in parsed if not family.name.startswith(("process_", "python_"))}


def test_the_page_names_exactly_what_there_is() -> None:
    rows = re.findall(r"(?m)^\| (`[^|]+`) \| (gauge|counter|histogram) \|", PAGE)
    named = {name: kind for names, kind in rows for name in re.findall(r"`([\w:]+)`", names)}
    assert named == families()


def test_names_of_both_families_measure_the_same(samples: dict[tuple[str, str], float]) -> None:
    for ours, theirs in (
        ("vllm:num_requests_running", "sglang:num_running_reqs"),
        ("vllm:e2e_request_latency_seconds_count", "sglang:e2e_request_latency_seconds_count"),
        ("vllm:request_prompt_tokens_sum", "sglang:prompt_tokens_histogram_sum"),
        ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    ):
        assert samples[ours, ""] == samples[theirs, ""]


def queries() -> list[str]:
    panels = BOARD["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_the_dashboard_asks_only_for_what_there_is() -> None:
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    there = {name + suffix for name, kind in families().items() for suffix in suffixes[kind]}
    asked = {name for query in queries() for name in re.findall(r"\b(?:vllm|sglang):\w+|\bhttp_\w+", query)}
    assert len(asked) > 15
    assert sorted(asked - there) == []


def test_the_dashboard_can_be_imported_anywhere() -> None:
    assert BOARD["uid"] == "kitfox"
    assert (BOARD["id"], BOARD["schemaVersion"] >= 36) == (None, True)
    variables = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert all(v["datasource"] == source for name, v in variables.items() if name != "datasource")
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"] == source
            assert [target["refId"] for target in panel["targets"]] == list("ABCDEF"[: len(panel["targets"])])
            assert all(target["datasource"] == source for target in panel["targets"])
    taken = [
        (column, row)
        for place in (panel["gridPos"] for panel in panels)
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken)), "panels overlap"
