"""How sure the numbers are, and what they say about two servers: scipy's intervals, in words.

Runs are the unit: requests of one run share a machine's mood, so more requests do not make a comparison surer, more
repeats do. Sides send the same prompts in the same repeat, so their ratio is taken repeat by repeat.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import stats

from kitfox.bench.metrics import Metric
from kitfox.bench.records import Contrast, Interval, Record

CONFIDENCE = 0.95
_RESAMPLES = 2000


def interval_of_mean(values: Sequence[float]) -> Interval:
    """Mean of one value a run, with Student's t limits; nan limits for a single run."""
    mean = float(np.mean(values))
    low, high = _limits_of_mean(values)
    return Interval(mean, low, high)


def interval_over_requests(values: Sequence[float], statistic: Callable[..., np.ndarray], *, seed: int = 0) -> Interval:
    """A statistic of one value a request, with bootstrap percentile limits: what one run can say of itself.

    statistic: takes an array and an `axis`, as numpy's functions do.
    """
    array = np.asarray(values, dtype=float)
    value = float(statistic(array, axis=0))
    if len(array) < 2 or np.ptp(array) == 0:
        return Interval(value, math.nan, math.nan) if len(array) < 2 else Interval(value, value, value)
    limits = stats.bootstrap(
        (array,),
        statistic,
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        batch=max(1, 2_000_000 // len(array)),
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value, float(limits.low), float(limits.high))


def interval_of_share(successes: int, total: int) -> Interval:
    """Wilson's limits of a share of requests; nan for none."""
    if total == 0:
        return Interval(math.nan, math.nan, math.nan)
    limits = stats.binomtest(successes, total).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(successes / total, float(limits.low), float(limits.high))


def latency_intervals(records: Sequence[Record]) -> dict[str, Interval]:
    """Of one run's answered requests, by key of METRICS. ITL is left out: gaps of one request depend on each other."""
    answered = [record for record in records if record.failure is None]
    intervals = {}
    for name in ("ttft", "tpot", "e2el"):
        samples = [value for record in answered if (value := getattr(record, f"{name}_s")) is not None]
        if not samples:
            continue
        intervals[f"{name}_mean"] = interval_over_requests(samples, np.mean)
        for percent in (50, 90, 99):
            intervals[f"{name}_p{percent}"] = interval_over_requests(samples, _percentile(percent))
    return intervals


def contrast(
    name: str, metric: Metric, side: str, other: str, values: Sequence[float], others: Sequence[float]
) -> Contrast:
    """Two sides over the same repeats, by a metric and its name.

    The ratio is the geometric mean of the repeats' ratios with t limits over their logarithms. A side that was zero in
    some repeat has no logarithm: then the ratio is that of the means, without limits, and the differences decide.
    """
    if len(values) != len(others):
        raise ValueError(f"{len(values)} runs of {side} cannot be paired with {len(others)} of {other}")
    if min(*values, *others) > 0:
        logs = [math.log(mine / theirs) for mine, theirs in zip(values, others, strict=True)]
        low, high = _limits_of_mean(logs)
        ratio = Interval(math.exp(float(np.mean(logs))), _exp(low), _exp(high))
    else:
        low, high = _limits_of_mean([mine - theirs for mine, theirs in zip(values, others, strict=True)])
        mean = float(np.mean(others))
        ratio = Interval(float(np.mean(values)) / mean if mean else math.nan, math.nan, math.nan)
    better = None
    if low > 0 or high < 0:
        better = side if (low > 0) == metric.higher_is_better else other
    return Contrast(name, side, other, ratio, better)


def verdict(
    name: str, metric: Metric, values: Mapping[str, Sequence[float]]
) -> tuple[str, tuple[str, ...], tuple[Contrast, ...]]:
    """A headline, one sentence a pair of sides, and the contrasts, decided by one metric.

    Args:
        values: by side, one value a repeat, in the same order.
    """
    means = {side: interval_of_mean(runs) for side, runs in values.items()}
    order = sorted(means, key=lambda side: means[side].value, reverse=metric.higher_is_better)
    contrasts = tuple(
        contrast(name, metric, side, other, values[side], values[other])
        for side, other in itertools.combinations(order, 2)
    )
    sentences = tuple(_sentence(metric, means, pair) for pair in contrasts)
    first, *rest = order
    shown = ", ".join(
        [f"{first}: {metric.label.lower()} {_shown(metric, means[first])} {metric.unit}".rstrip()]
        + [f"{side} {_shown(metric, means[side])}" for side in rest]
    )
    if not rest:
        return shown, (), ()
    beaten = [pair.other for pair in contrasts if pair.side == first and pair.better == first]
    if len(beaten) == len(rest):
        by = _advantage(metric, next(pair for pair in contrasts if pair.side == first and pair.other == rest[0]))
        over = "" if len(rest) == 1 else f" over {rest[0]}, the next"
        return f"{shown}: {first} wins by {by}{over} on this workload", sentences, contrasts
    if len(rest) == 1:
        return f"{shown}: no difference that these runs can show", sentences, contrasts
    level = [first, *(side for side in rest if side not in beaten)]
    behind = f"; {_listed(beaten)} {'is' if len(beaten) == 1 else 'are'} behind" if beaten else ""
    headline = f"{shown}: no difference between {_listed(level)} that these runs can show{behind}"
    return headline, sentences, contrasts


def worth(
    name: str, metric: Metric, values: Mapping[str, Sequence[float]], baseline: str
) -> tuple[str, tuple[str, ...], tuple[Contrast, ...]]:
    """As `verdict`, for sides that each lack one thing that the baseline has: what each thing is worth."""
    means = {side: interval_of_mean(runs) for side, runs in values.items()}
    contrasts = tuple(
        contrast(name, metric, baseline, other, values[baseline], values[other])
        for other in values
        if other != baseline
    )
    order = sorted(contrasts, key=lambda pair: pair.ratio.value, reverse=metric.higher_is_better)
    gains = [f"than {pair.other} by {_advantage(metric, pair)}" for pair in order if pair.better == baseline]
    losses = [
        f"than {pair.other} by {_advantage(metric, pair)}" for pair in reversed(order) if pair.better == pair.other
    ]
    level = [pair.other for pair in order if pair.better is None]
    parts = [f"{baseline}: {metric.label.lower()} {_shown(metric, means[baseline])} {metric.unit}".rstrip()]
    parts += [f"better {', '.join(gains)}"] if gains else []
    parts += [f"worse {', '.join(losses)}"] if losses else []
    parts += [f"no difference that these runs can show to {_listed(level)}"] if level else []
    return "; ".join(parts), tuple(_sentence(metric, means, pair) for pair in order), tuple(order)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _sentence(metric: Metric, means: Mapping[str, Interval], pair: Contrast) -> str:
    start = f"{pair.side} against {pair.other}: {metric.label.lower()} "
    start += f"{_shown(metric, means[pair.side])} and {_shown(metric, means[pair.other])} {metric.unit}".rstrip()
    if pair.better is None:
        return f"{start}: no difference that these runs can show{_ratio_text(pair.ratio)}"
    return f"{start}: {pair.better} is better by {_advantage(metric, pair)}{_ratio_text(pair.ratio)}"


def _advantage(metric: Metric, pair: Contrast) -> str:
    """How much the better side has on the other, as words: "24 %", "3.1 times"."""
    ratio = pair.ratio.value if pair.better == pair.side else 1 / pair.ratio.value if pair.ratio.value else math.inf
    ratio = ratio if metric.higher_is_better else 1 / ratio if ratio else math.inf
    if not math.isfinite(ratio):
        return "everything: the other has none"
    return f"{100 * (ratio - 1):.0f} %" if ratio < 2 else f"{ratio:.1f} times"


def _ratio_text(ratio: Interval) -> str:
    if not math.isfinite(ratio.value):
        return ""
    limits = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if math.isfinite(ratio.low) else ""
    return f" (ratio {ratio.value:.2f}{limits})"


def _shown(metric: Metric, interval: Interval) -> str:
    if not math.isfinite(interval.low):
        return metric.format(interval.value)
    low = max(interval.low, 0.0)  # as every metric is, though Student's limits do not know it
    return f"{metric.format(interval.value)} [{metric.format(low)}, {metric.format(interval.high)}]"


def _percentile(percent: float) -> Callable[..., np.ndarray]:
    def statistic(array: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.asarray(np.percentile(array, percent, axis=axis))

    return statistic


def _limits_of_mean(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return math.nan, math.nan
    if np.ptp(values) == 0:  # scipy would divide by the spread
        return float(values[0]), float(values[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nearly equal values: the limits are as close as they are
        limits = stats.ttest_1samp(values, 0.0).confidence_interval(CONFIDENCE)
    return float(limits.low), float(limits.high)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0)) if not math.isnan(value) else math.nan
