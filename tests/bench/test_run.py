"""One run over a scripted server, and the search for the highest rate that holds."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from kitfox.bench.client import Target
from kitfox.bench.metrics import summarise
from kitfox.bench.records import Arrivals, Failure, Record, Run, Slo
from kitfox.bench.run import Plan, Sweep, best_rate, measure, run_sweep, sweep_points
from kitfox.bench.vocabulary import find_vocabulary, server_encoder
from kitfox.bench.workloads import WorkloadSpec
from tests.bench.fake_server import MODEL, FakeServer, Script, stream

QUIET = Console(quiet=True)


@pytest.fixture
def server():
    with FakeServer() as running:
        yield running


def plan_for(server: FakeServer, **changes) -> Plan:
    spec = WorkloadSpec("random", num_requests=6, input_len=20, output_len=5)
    vocabulary = find_vocabulary(server_encoder(server.url, MODEL))
    plan = Plan(spec, Arrivals("closed", concurrency=2), Slo(ttft=5.0), vocabulary, warm_up=2)
    return replace(plan, **changes)


def run(server: FakeServer, plan: Plan, **options) -> Run:
    return measure(Target(server.url, MODEL), plan, side="s", repeat=0, pid=os.getpid(), console=QUIET, **options)


def prompts(server: FakeServer) -> list[tuple[int, ...]]:
    return [tuple(body["prompt"]) for body in server.requests if body.get("max_tokens") in (5, 8)]


def test_a_run_sends_all_and_counts_all(server):
    plan = plan_for(server)
    server.requests.clear()
    result = run(server, plan)
    summary = result.summary
    assert (summary.requests, summary.failed, summary.output_tokens, summary.prompt_tokens) == (6, 0, 30, 120)
    assert summary.goodput_share == 1.0
    assert summary.peak_memory_bytes is not None
    assert not result.partial
    sent = prompts(server)
    assert len(sent) == len(set(sent)) == 8  # two warmed it up, with prompts that no run has


def test_a_warm_cache_has_seen_the_same_prompts(server):
    plan = plan_for(server, warm_cache=True, warm_up=0)
    server.requests.clear()
    run(server, plan)
    sent = prompts(server)
    assert len(sent) == 12
    assert sorted(sent[:6]) == sorted(sent[6:])


def test_repeats_differ_and_equal_repeats_do_not(server):
    plan = plan_for(server)
    assert plan.workload(0).digest == plan.workload(0).digest != plan.workload(1).digest


def test_an_interrupt_keeps_what_there_is():
    def slow(body):
        return Script(stream(body, ttft_s=30.0 if len(server.requests) > 5 else 0.0))

    before = signal.getsignal(signal.SIGINT)
    with FakeServer(slow) as server:
        plan = plan_for(server, warm_up=0)
        server.requests.clear()

        def interrupt_when_stuck() -> None:
            while len(server.requests) < 7:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt_when_stuck, daemon=True).start()
        result = run(server, replace(plan, spec=replace(plan.spec, num_requests=20)))
    assert result.partial
    kinds = [record.failure.kind if record.failure else "ok" for record in result.records]
    assert kinds.count("ok") == 5
    assert set(kinds) == {"ok", "interrupted"}
    assert signal.getsignal(signal.SIGINT) is before


# ---- sweep ----------------------------------------------------------------------------------------------------------


def fake_run(rate: float, good: bool, *, partial: bool = False) -> Run:
    """Ten requests, one after the other; nine of them good, or eight."""
    bad = Failure("timeout", "")
    records = tuple(
        Record(str(i), i, 0, 1, None, float(i), float(i), (i + 0.5,), end_s=i + 0.5, failure=None if i else bad)
        for i in range(10)
    )
    if not good:
        records = (*records[:1], replace(records[1], failure=bad), *records[2:])
    return Run("s", 0, records, summarise(records, Slo(), client_cpu_s=0.0), rate=rate, partial=partial)


def test_sweep_doubles_then_narrows_down():
    limit = 3.0
    rates = []

    def measure_at(rate: float, number: int) -> Run:
        assert number == len(rates)
        rates.append(rate)
        return fake_run(rate, rate <= limit)

    runs = run_sweep(measure_at, Sweep(start=0.5))
    assert rates[:4] == [0.5, 1.0, 2.0, 4.0]
    best = best_rate(runs, 0.9)
    assert best == max(rate for rate in rates if rate <= limit)
    assert limit / best < 2 ** (1 / 8) + 1e-9
    points = sweep_points(runs)
    assert [point.rate for point in points] == sorted(rates)
    assert {point.goodput_share for point in points} == {0.9, 0.8}


def test_sweep_goes_down_where_the_first_rate_is_too_high():
    runs = run_sweep(lambda rate, _: fake_run(rate, rate <= 0.1), Sweep(start=1.0))
    best = best_rate(runs, 0.9)
    assert best is not None
    assert 0.1 / 2 ** (1 / 8) - 1e-9 <= best <= 0.1


def test_sweep_gives_up_where_no_rate_holds():
    runs = run_sweep(lambda rate, _: fake_run(rate, False), Sweep(start=1.0))
    assert best_rate(runs, 0.9) is None
    assert len(runs) < 20


def test_an_interrupted_sweep_ends():
    runs = run_sweep(lambda rate, number: fake_run(rate, True, partial=number == 1), Sweep(start=1.0))
    assert len(runs) == 2
    assert best_rate(runs, 0.9) == 1.0


def test_rates_of_a_sweep_have_prompts_of_their_own(server):
    plan = plan_for(server, sweep=Sweep(seconds=10.0))
    low, high = plan.at_rate(0.5, 0), plan.at_rate(4.0, 1)
    assert (low.workload(0).num_requests, high.workload(0).num_requests) == (16, 40)
    assert (low.arrivals.kind, low.arrivals.rate) == ("poisson", 0.5)
    own = {request.token_ids for session in low.workload(0).sessions for request in session.requests}
    other = {request.token_ids for session in high.workload(0).sessions for request in session.requests}
    assert not own & other
