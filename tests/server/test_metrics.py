"""Exact counts after a scripted run, under both families of names."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kitfox.outputs import EngineStats
from kitfox.server.metrics import Histogram, ServerMetrics, token_buckets
from tests.server.fake_llm import MODEL, REPLY, FakeAsyncLLM
from tests.server.fault_table import COMPLETIONS
from tests.server.http_client import send_all

REPLY_TOKENS = len(REPLY.encode()) + 1


def scrape(response: httpx.Response) -> dict[tuple[str, str], float]:
    """(sample name, its one label beside model and engine) to value."""
    samples: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(response.text):
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
        ("http_requests_total", "POST,200", 3),
        ("http_requests_total", "POST,400", 1),
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
    metrics = ServerMetrics(llm.config, llm.max_model_len, lambda: llm.stats)
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
