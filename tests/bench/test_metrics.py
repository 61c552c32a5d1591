"""Numbers from records with known times, and what a scripted server's answers come to."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from kitfox.bench.client import Target, drive
from kitfox.bench.metrics import METRICS, missed_objectives, parse_slo, summarise
from kitfox.bench.records import (
    Arrivals,
    BenchRequest,
    Failure,
    FailureKind,
    Record,
    ServerSample,
    Session,
    Slo,
    Summary,
    Workload,
)
from kitfox.errors import ConfigError
from tests.bench.fake_server import MODEL, Body, FakeServer, Script, failure, stream

NO_SLO = Slo()


def answered(sent_s: float, *chunk_s: float, **fields: Any) -> Record:
    """A token a chunk, unless the fields say otherwise."""
    known = {"output_tokens": len(chunk_s), "prompt_tokens": 10, "expected_prompt_tokens": 10, "planned_s": None}
    known |= {"end_s": chunk_s[-1] if chunk_s else sent_s, "chunk_s": chunk_s}
    return Record("r", session=0, turn=0, asked_tokens=8, sent_s=sent_s, **known | fields)


def failed(kind: FailureKind, sent_s: float = 0.0, status: int | None = None, **fields: Any) -> Record:
    return answered(sent_s, failure=Failure(kind, "why", status), **fields)


def summary_of(*records: Record, slo: Slo = NO_SLO, **fields: Any) -> Summary:
    return summarise(records, slo, client_cpu_s=fields.pop("client_cpu_s", 0.0), **fields)


# ---- known times ----------------------------------------------------------------------------------------------------


def test_latencies_of_one_answer() -> None:
    summary = summary_of(answered(1.0, 1.080, 1.100, 1.130, 1.140))
    assert summary.ttft is not None
    assert summary.tpot is not None
    assert summary.itl is not None
    assert summary.e2el is not None
    assert summary.ttft.mean == pytest.approx(0.080)
    assert summary.e2el.mean == pytest.approx(0.140)
    assert summary.tpot.mean == pytest.approx(0.020)
    assert summary.itl.count == 3
    assert (summary.itl.mean, summary.itl.p50) == (pytest.approx(0.020), pytest.approx(0.020))
    assert summary.itl.p90 == pytest.approx(0.028)
    assert summary.duration_s == pytest.approx(0.140)
    assert not summary.itl_is_per_chunk
    assert summary.tokens_per_chunk == 1.0


def test_percentiles_are_of_raw_samples() -> None:
    records = [answered(0.0, index / 1000) for index in range(101)]
    ttft = summary_of(*records).ttft
    assert ttft is not None
    assert [ttft.count, ttft.mean, ttft.p50, ttft.p90, ttft.p99] == pytest.approx([101, 0.050, 0.050, 0.090, 0.099])
    gaps = np.random.default_rng(0).exponential(size=999)
    itl = summary_of(answered(0.0, *np.cumsum(gaps))).itl
    assert itl is not None
    assert [itl.p50, itl.p99] == pytest.approx(np.percentile(gaps[1:], [50, 99]))


def test_rates_are_of_answered_requests_over_the_whole_run() -> None:
    records = (
        answered(1.0, 1.5, 2.0),
        answered(2.0, 3.0, 4.0, 4.5, prompt_tokens=20),
        failed("refused", 0.0, end_s=0.1),
        failed("timeout", 1.0, end_s=8.0),
    )
    summary = summary_of(*records, client_cpu_s=0.4)
    assert (summary.requests, summary.failed) == (4, 2)
    assert summary.duration_s == 8.0
    assert summary.requests_per_s == 2 / 8
    assert (summary.output_tokens, summary.prompt_tokens) == (5, 30)
    assert summary.output_tokens_per_s == 5 / 8
    assert summary.total_tokens_per_s == 35 / 8
    assert summary.client_cpu_share == pytest.approx(0.05)
    assert summary_of(*records, duration_s=16.0).requests_per_s == 2 / 16


def test_failures_by_kind() -> None:
    kinds: tuple[FailureKind, ...] = ("timeout", "refused", "timeout", "broken_stream")
    records = [*map(failed, kinds), *(failed("http_status", status=status) for status in (429, 500, 429, 429))]
    assert summary_of(*records).failures == {
        "http 429": 3,
        "timeout": 2,
        "refused": 1,
        "broken_stream": 1,
        "http 500": 1,
    }


def test_a_failed_request_has_no_latency_and_lowers_goodput() -> None:
    whole = answered(0.0, 0.1, 0.2)
    cut = answered(0.0, 0.1, 5.0, failure=Failure("broken_stream", "cut"), end_s=5.0)
    summary = summary_of(whole, cut, slo=Slo(ttft=1.0))
    assert summary.ttft is not None
    assert summary.ttft.count == 1
    assert summary.goodput_share == 0.5
    assert summary.goodput_per_s == 1 / 5
    assert summary.missed == {"ttft": 0}
    assert summary.output_tokens == 2


def test_goodput_is_of_requests_that_meet_every_objective() -> None:
    records = (
        answered(0.0, 0.4, 0.5, 0.6),
        answered(0.0, 0.6, 0.7, 0.8),  # late
        answered(0.0, 0.4, 0.5, 1.0),  # slow
        answered(0.0, 0.6, 0.9, 2.0),  # both
        failed("timeout"),
    )
    slo = Slo(ttft=0.5, itl=0.2)
    summary = summary_of(*records, slo=slo, duration_s=10.0)
    assert summary.missed == {"ttft": 2, "itl": 2}
    assert summary.goodput_per_s == pytest.approx(0.1)
    assert summary.goodput_share == pytest.approx(0.2)
    free = summary_of(*records, duration_s=10.0)
    assert (free.goodput_per_s, free.goodput_share, free.missed) == (pytest.approx(0.4), pytest.approx(0.8), {})


@pytest.mark.parametrize(
    ("record", "missed"),
    [
        (answered(0.0, 0.5, 0.75, 1.0), ()),
        (answered(0.0, 0.501, 0.75, 1.0), ("ttft",)),
        (answered(0.0, 0.5, 1.0, 1.5), ("itl", "tpot", "e2el")),
        (answered(0.0, 0.5), ()),
        (answered(0.0, 0.5, 0.6, output_tokens=None), ("tpot",)),
        (answered(0.0, 0.5, 0.9, 1.0, chunk_tokens=(1, 4, 1), output_tokens=6), ("itl",)),
        (answered(0.0, 0.5, 0.6, chunk_tokens=(4, 0), output_tokens=4), ()),
        (answered(0.0), ("ttft", "e2el")),
    ],
    ids=["at the limits", "late", "slow", "one chunk", "not counted", "four at once", "all at first", "nothing"],
)
def test_objectives_of_one_request(record: Record, missed: tuple[str, ...]) -> None:
    assert missed_objectives(record, Slo(ttft=0.5, itl=0.25, tpot=0.25, e2el=1.0)) == missed
    assert missed_objectives(record, NO_SLO) == ()


def test_itl_objective_bounds_the_99th_percentile_of_the_gaps() -> None:
    gaps = [0.01] * 200 + [1.0]
    assert missed_objectives(answered(0.0, *np.cumsum(gaps)), Slo(itl=0.02)) == ()
    assert missed_objectives(answered(0.0, *np.cumsum([*gaps, 1.0, 1.0])), Slo(itl=0.02)) == ("itl",)


def test_chunks_of_several_tokens() -> None:
    apart = answered(0.0, 1.0, 2.0, 3.0, output_tokens=6, chunk_tokens=(1, 3, 2))
    whole = answered(0.0, 1.0, 2.0, 3.0, output_tokens=6)
    summary = summary_of(apart)
    assert apart.itl_s == (1.0, 0.0, 0.0, 1.0, 0.0)
    assert summary.itl is not None
    assert (summary.itl.count, summary.itl.mean) == (5, pytest.approx(0.4))
    assert (summary.tokens_per_chunk, summary.itl_is_per_chunk) == (2.0, False)
    summary = summary_of(whole)
    assert summary.itl is not None
    assert (summary.itl.count, summary.itl.mean) == (2, pytest.approx(1.0))
    assert (summary.tokens_per_chunk, summary.itl_is_per_chunk) == (2.0, True)


def test_tokens_that_a_server_does_not_count_are_not_made_up() -> None:
    summary = summary_of(answered(0.0, 1.0, 2.0, output_tokens=None, prompt_tokens=None), duration_s=2.0)
    assert (summary.output_tokens, summary.output_tokens_per_s, summary.tokens_per_chunk) == (0, 0.0, 0.0)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.tpot) == (10, None, None)
    assert summary.itl_is_per_chunk
    for name in ("output_tokens_per_s", "total_tokens_per_s", "tpot_mean", "cached_share"):
        assert METRICS[name].get(summary) is None
    assert METRICS["output_tokens_per_s"].get(summary_of(failed("timeout"), duration_s=1.0)) == 0.0


def test_cached_tokens() -> None:
    records = (answered(0.0, 1.0, cached_tokens=6), answered(0.0, 1.0), failed("timeout", cached_tokens=9))
    summary = summary_of(*records)
    assert summary.cached_tokens == 6
    assert METRICS["cached_share"].get(summary) == pytest.approx(0.3)


def test_the_server_and_the_clients_lag() -> None:
    samples = (ServerSample(0.0, 100, 0.0), ServerSample(1.0, 400, 1.5), ServerSample(2.0, 100, 2.0))
    records = (answered(1.0, 2.0, planned_s=0.9), answered(3.0, 4.0, planned_s=2.75), answered(9.0, 10.0))
    summary = summary_of(*records, samples=samples)
    assert (summary.peak_memory_bytes, summary.mean_memory_bytes, summary.server_cpu_s) == (400, 200, 2.0)
    assert summary.max_lag_s == 0.25
    assert METRICS["server_cpu_s_per_1000_tokens"].get(summary) == pytest.approx(2000 / 3)
    alone = summary_of(records[2])
    assert (alone.peak_memory_bytes, alone.mean_memory_bytes, alone.server_cpu_s) == (None, None, None)
    assert alone.max_lag_s == 0.0


def test_a_run_without_records() -> None:
    summary = summary_of()
    assert (summary.requests, summary.duration_s, summary.goodput_per_s, summary.goodput_share) == (0, 0.0, 0.0, 0.0)
    assert summary.ttft is None


# ---- the table ------------------------------------------------------------------------------------------------------


def test_every_metric_can_be_read_and_shown() -> None:
    samples = (ServerSample(0.0, 3 << 29, 1.0),)
    summary = summary_of(answered(0.0, 0.0801, 0.1, cached_tokens=5), samples=samples)
    shown = {name: f"{metric.format(metric.get(summary))} {metric.unit}" for name, metric in METRICS.items()}
    assert len(shown) == 30
    assert shown["goodput_per_s"] == "10.00 req/s"
    assert shown["goodput_share"] == "100.0 %"
    assert shown["ttft_mean"] == shown["ttft_p99"] == "80.1 ms"
    assert shown["itl_p50"] == shown["tpot_mean"] == "19.9 ms"
    assert shown["e2el_p90"] == "100.0 ms"
    assert shown["output_tokens_per_s"] == "20.0 tok/s"
    assert shown["peak_memory_bytes"] == shown["mean_memory_bytes"] == "1.50 GiB"
    assert shown["cached_share"] == "50.0 %"
    assert shown["server_cpu_s_per_1000_tokens"] == "500.00 s"
    assert shown["failed"] == "0 "
    nothing = summary_of(failed("timeout"))
    assert METRICS["ttft_p50"].format(METRICS["ttft_p50"].get(nothing)) == "–"
    assert METRICS["ttft_p50"].format(math.nan) == "–"


def test_more_is_better_for_rates_and_worse_for_costs() -> None:
    better_when_higher = {name for name, metric in METRICS.items() if metric.higher_is_better}
    assert better_when_higher == {
        "goodput_per_s",
        "goodput_share",
        "requests_per_s",
        "output_tokens_per_s",
        "total_tokens_per_s",
        "cached_share",
    }


# ---- objectives as text ---------------------------------------------------------------------------------------------


def test_slo_as_text() -> None:
    assert parse_slo("ttft=500ms,itl=50ms,tpot=0.05s,e2el=5s") == Slo(0.5, 0.05, 0.05, 5.0)
    assert parse_slo(" itl = 900us ").itl == pytest.approx(0.0009)
    assert not NO_SLO


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpot=0.05", "tpot: give a unit: 500ms or 0.5s. Given: '0.05'"),
        ("latency=5s", "'latency' is none of ttft, itl, tpot, e2el"),
        ("ttft=1s,", "'' is none of"),
        ("", "'' is none of"),
        ("ttft=fastms", "ttft must be a time such as 500ms or 0.5s. Given: 'fastms'"),
        ("ttft", "ttft must be a time"),
        ("ttft=1h", "ttft must be a time"),
        ("ttft=0ms", "ttft must be above 0"),
        ("ttft=-5ms", "ttft must be above 0"),
        ("ttft=infs", "ttft must be above 0"),
        ("ttft=nans", "ttft must be above 0"),
        ("ttft=1s,ttft=2s", "ttft is given twice"),
    ],
)
def test_slo_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_slo(text)
    assert message in raised.value.message


# ---- from the socket to the summary ---------------------------------------------------------------------------------


def test_a_scripted_server_from_end_to_end() -> None:
    """Pauses are exact from below; what a busy machine adds stays far from the objectives."""

    def respond(body: Body) -> Script:
        match body["prompt"][0]:
            case 0:
                return Script(stream(body, ttft_s=0.08, itl_s=0.02, cached_tokens=1))
            case 1:
                return Script(stream(body, ttft_s=3.0))
            case 2:
                return failure(429, "full")
            case _:
                return Script(stream(body, tokens=3))

    requests = [BenchRequest(str(kind), 4, token_ids=(kind, 7), prompt_tokens=2) for kind in (0, 1, 2, 3, 0)]
    workload = Workload("test", "", tuple(Session((request,)) for request in requests), "")
    with FakeServer(respond) as server:
        target = Target(server.url, MODEL, count_chunk_tokens=True)
        records = asyncio.run(drive(target, workload, Arrivals("closed", concurrency=5), 0))
    summary = summary_of(*records, slo=Slo(ttft=2.0))
    assert (summary.requests, summary.failed) == (5, 2)
    assert summary.failures == {"http 429": 1, "wrong_token_count": 1}
    assert summary.missed == {"ttft": 1}
    assert summary.goodput_share == pytest.approx(2 / 5)
    assert summary.goodput_per_s == pytest.approx(2 / summary.duration_s)
    assert summary.duration_s >= 3.0
    assert (summary.output_tokens, summary.prompt_tokens, summary.cached_tokens) == (12, 6, 2)
    assert summary.ttft is not None
    assert summary.e2el is not None
    assert 0.08 <= summary.ttft.p50 < 2.0
    assert 0.14 <= summary.e2el.p50 < 2.5
    assert max(record.ttft_s or 0.0 for record in records) >= 3.0
    assert (summary.tokens_per_chunk, summary.itl_is_per_chunk) == (1.0, False)
