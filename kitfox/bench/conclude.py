"""Runs become an experiment: estimates with their intervals, a verdict in words, what a reader must know beside it."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from kitfox.bench.metrics import METRICS, Metric
from kitfox.bench.records import Contrast, Experiment, Fact, Interval, Run, Side, Workload
from kitfox.bench.run import Plan, best_rate, sweep_points
from kitfox.bench.statistics import contrast, interval_of_mean, interval_of_share, latency_intervals, verdict, worth

SWEEP = "best_rate"
_BEST_RATE = Metric("Highest rate that meets the objectives", "req/s", lambda summary: None, higher_is_better=True)
_LATE_S = 0.02
_BUSY_CLIENT = 0.25


def conclude(
    sides: Sequence[Side],
    runs: Sequence[Run],
    plan: Plan,
    workload: Workload,
    *,
    title: str,
    command: str,
    metric: str | None = None,
    baseline: str | None = None,
    facts: Sequence[Fact] = (),
    notes: Sequence[str] = (),
    interrupted: bool = False,
) -> Experiment:
    """Sum up what was measured.

    Args:
        workload: of the first repeat. It is not made again: that may take a server, and none runs any more.
        metric: the key of METRICS that decides; None takes the sweep's highest rate if there was one, goodput if there
            are objectives, and else output tokens per second.
        baseline: the side that all others are compared with; None compares all pairs.
        notes: go before those that the runs themselves give reason for.
    """
    whole = [run for run in runs if not run.partial]
    names = [side.name for side in sides]
    rates = {name: best_rates(whole, name, plan) for name in names} if plan.sweep is not None else {}
    decided_by = metric or (SWEEP if rates else "goodput_per_s" if plan.slo else "output_tokens_per_s")
    unit = _BEST_RATE if decided_by == SWEEP else METRICS[decided_by]
    values = rates if decided_by == SWEEP else {name: _values(whole, name, decided_by) for name in names}
    paired = min((len(each) for each in values.values()), default=0)
    if paired:
        whole_repeats = {name: each[:paired] for name, each in values.items()}
        if baseline is None:
            headline, verdicts, deciding = verdict(decided_by, unit, whole_repeats)
        else:
            headline, verdicts, deciding = worth(decided_by, unit, whole_repeats, baseline)
    else:
        headline, verdicts, deciding = _nothing_to_say(whole, names, unit), (), ()
    return Experiment(
        title=title,
        created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        command=command,
        headline=headline,
        verdicts=verdicts,
        workload=workload.description,
        workload_digest=workload.digest,
        arrivals=plan.arrivals_text(),
        slo=plan.slo,
        sides=tuple(sides),
        facts=(*facts, *_work_facts(names, plan, workload)),
        runs=tuple(runs),
        metrics={} if rates else _estimates(whole, names),
        contrasts=deciding if rates else _contrasts(whole, names, deciding, decided_by),
        sweep=sweep_points(whole) if plan.sweep is not None else (),
        target_share=plan.sweep.target_share if plan.sweep is not None else 0.9,
        best_rates={name: statistics.fmean(each) if any(each) else None for name, each in rates.items()},
        notes=(*notes, *_notes(whole, names, plan)),
        partial=interrupted or len(whole) < len(runs),
    )


def _work_facts(names: Sequence[str], plan: Plan, workload: Workload) -> list[Fact]:
    """What is the same for all sides because it was made once: for the reader, who cannot know."""
    answers = sum(request.max_tokens for session in workload.sessions for request in session.requests)
    held = {
        "prompts": f"sha256:{workload.digest[:16]} (first repeat; each has its own)",
        "arrivals": plan.arrivals_text(),
        "answer_tokens": f"{answers} asked for in a repeat",
        "warm_up": f"{plan.warm_up} requests" + (", then the run's own prompts" if plan.warm_cache else ""),
    }
    return [Fact(name, dict.fromkeys(names, value), "same") for name, value in held.items()]


def best_rates(runs: Sequence[Run], side: str, plan: Plan) -> list[float]:
    """One a repeat: the highest rate of its sweep that held, 0 where none did."""
    assert plan.sweep is not None
    mine = [run for run in runs if run.side == side]
    repeats = sorted({run.repeat for run in mine})
    share = plan.sweep.target_share
    return [best_rate([run for run in mine if run.repeat == repeat], share) or 0.0 for repeat in repeats]


def _values(runs: Sequence[Run], side: str, key: str) -> list[float]:
    """One a repeat, in order; empty where any is unknown."""
    mine = sorted((run for run in runs if run.side == side), key=lambda run: run.repeat)
    values = [METRICS[key].get(run.summary) for run in mine]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _estimates(runs: Sequence[Run], names: Sequence[str]) -> dict[str, dict[str, Interval]]:
    estimates: dict[str, dict[str, Interval]] = {}
    for key in METRICS:
        known = {name: each for name in names if (each := _values(runs, name, key))}
        if known:
            most = 1.0 if key.endswith("_share") else math.inf
            estimates[key] = {name: _within(interval_of_mean(each), most) for name, each in known.items()}
    for name in names:
        mine = [run for run in runs if run.side == name]
        if len(mine) == 1:  # one run says of itself how much its requests vary
            for key, interval in _intervals_of_run(mine[0]).items():
                estimates[key][name] = interval
    return estimates


def _within(interval: Interval, most: float) -> Interval:
    """Student's limits do not know that no metric is below 0, and no share above 1."""
    return replace(interval, low=max(interval.low, 0.0), high=min(interval.high, most))


def _intervals_of_run(run: Run) -> dict[str, Interval]:
    intervals = latency_intervals(run.records)
    summary = run.summary
    if summary.requests:
        share = interval_of_share(round(summary.goodput_share * summary.requests), summary.requests)
        sent_per_s = summary.requests / summary.duration_s
        intervals["goodput_share"] = share
        intervals["goodput_per_s"] = Interval(share.value * sent_per_s, share.low * sent_per_s, share.high * sent_per_s)
    return intervals


def _contrasts(
    runs: Sequence[Run], names: Sequence[str], deciding: Sequence[Contrast], decided_by: str
) -> tuple[Contrast, ...]:
    """Of every metric: the pairs of sides that the verdict is about, in its order."""
    found = list(deciding)
    for key, metric in METRICS.items():
        for pair in deciding if key != decided_by else ():
            mine, theirs = _values(runs, pair.side, key), _values(runs, pair.other, key)
            if mine and len(mine) == len(theirs):
                found.append(contrast(key, metric, pair.side, pair.other, mine, theirs))
    return tuple(found)


def _nothing_to_say(runs: Sequence[Run], names: Sequence[str], metric: Metric) -> str:
    without = [name for name in names if not any(run.side == name for run in runs)]
    if without:
        return f"No verdict: {', '.join(without)} finished no run."
    return f"No verdict: {metric.label.lower()} is not known of every side."


def _notes(runs: Sequence[Run], names: Sequence[str], plan: Plan) -> list[str]:
    """What the numbers do not say by themselves."""
    notes = []
    if not plan.slo:
        notes.append("No objectives were given (--slo): goodput counts every answered request.")
    for name in names:
        mine = [run for run in runs if run.side == name]
        if failed := sum(run.summary.failed for run in mine):
            total = sum(run.summary.requests for run in mine)
            notes.append(f"{name}: {failed} of {total} requests failed. They count in every rate and share.")
        if any(run.summary.itl_is_per_chunk for run in mine):
            size = statistics.fmean(run.summary.tokens_per_chunk for run in mine)
            notes.append(
                f"{name} sent {size:.2f} tokens a chunk without saying which: its ITL is the gap between chunks."
            )
        if (lag := max((run.summary.max_lag_s for run in mine), default=0.0)) > _LATE_S:
            notes.append(
                f"{name}: the client was up to {1e3 * lag:.0f} ms late in sending; latencies count from there."
            )
        if (share := max((run.summary.client_cpu_share for run in mine), default=0.0)) > _BUSY_CLIENT:
            notes.append(f"{name}: the client used {100 * share:.0f} % of a core.")
    tokens = {name: sum(run.summary.output_tokens for run in runs if run.side == name) for name in names}
    if len(set(tokens.values())) > 1 and not any(run.summary.failed for run in runs) and plan.sweep is None:
        shown = ", ".join(f"{name} {count}" for name, count in tokens.items())
        notes.append(f"Sides answered with different numbers of tokens: {shown}.")
    if len({run.repeat for run in runs}) == 1 and len(names) == 1 and plan.sweep is None:
        notes.append("One run: its intervals say how much requests vary, not how much runs do. --repeats tells.")
    return notes
