"""Intervals hold what they promise on known distributions; verdicts say what the numbers allow."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kitfox.bench.metrics import METRICS
from kitfox.bench.statistics import (
    contrast,
    interval_of_mean,
    interval_of_share,
    interval_over_requests,
    verdict,
    worth,
)

GOODPUT, TTFT = METRICS["goodput_per_s"], METRICS["ttft_mean"]


def test_interval_of_a_mean_is_students():
    interval = interval_of_mean([2.0, 4.0, 6.0])
    assert interval.value == 4.0
    half = stats.t.ppf(0.975, 2) * 2.0 / math.sqrt(3)
    assert (interval.low, interval.high) == pytest.approx((4 - half, 4 + half))


def test_one_run_has_no_interval_and_equal_runs_a_point():
    single = interval_of_mean([3.0])
    assert single.value == 3.0
    assert math.isnan(single.low)
    assert math.isnan(single.high)
    equal = interval_of_mean([3.0, 3.0, 3.0])
    assert (equal.low, equal.value, equal.high) == (3.0, 3.0, 3.0)


def test_intervals_of_a_mean_cover_it_as_often_as_they_say():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(2000):
        interval = interval_of_mean(rng.normal(10.0, 2.0, 3).tolist())
        covered += interval.low <= 10.0 <= interval.high
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)


def test_bootstrap_covers_the_median_of_a_skewed_distribution():
    rng = np.random.default_rng(2)
    median = math.exp(1.0)
    covered = 0
    for trial in range(200):
        interval = interval_over_requests(rng.lognormal(1.0, 0.5, 120).tolist(), np.median, seed=trial)
        covered += interval.low <= median <= interval.high
    assert covered / 200 == pytest.approx(0.95, abs=0.05)


def test_bootstrap_is_the_same_for_equal_seeds():
    values = [1.0, 2.0, 5.0, 9.0]
    assert interval_over_requests(values, np.mean) == interval_over_requests(values, np.mean)


def test_interval_of_a_share_is_wilsons():
    interval = interval_of_share(8, 10)
    assert interval.value == 0.8
    assert (interval.low, interval.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert math.isnan(interval_of_share(0, 0).value)


def test_ratio_is_of_paired_repeats():
    """The machine got twice as slow each repeat; the ratio did not change."""
    pair = contrast("goodput_per_s", GOODPUT, "a", "b", [8.0, 4.0, 2.0], [4.0, 2.0, 1.0])
    assert pair.ratio.value == pytest.approx(2.0)
    assert (pair.ratio.low, pair.ratio.high) == pytest.approx((2.0, 2.0))
    assert pair.better == "a"


def test_lower_is_better_where_it_is():
    assert contrast("ttft_mean", TTFT, "a", "b", [1.0, 1.1, 1.05], [2.0, 2.1, 2.2]).better == "a"


def test_equal_sides_are_told_apart_as_rarely_as_promised():
    rng = np.random.default_rng(3)
    decided = 0
    for _ in range(1000):
        a, b = np.exp(rng.normal(0.0, 0.1, (2, 4)))
        decided += contrast("goodput_per_s", GOODPUT, "a", "b", a.tolist(), b.tolist()).better is not None
    assert decided / 1000 == pytest.approx(0.05, abs=0.02)


def test_a_side_with_zeros_is_decided_by_differences():
    pair = contrast("goodput_per_s", GOODPUT, "a", "b", [2.0, 2.1, 1.9], [0.0, 0.0, 0.0])
    assert pair.better == "a"
    assert math.isnan(pair.ratio.value)
    nothing = contrast("goodput_per_s", GOODPUT, "a", "b", [0.0, 0.0], [0.0, 0.0])
    assert nothing.better is None


def test_runs_must_pair():
    with pytest.raises(ValueError, match="2 runs of a cannot be paired with 1 of b"):
        contrast("goodput_per_s", GOODPUT, "a", "b", [1.0, 2.0], [1.0])


def test_verdict_names_the_winner_and_by_how_much():
    headline, sentences, pairs = verdict(
        "goodput_per_s", GOODPUT, {"paged": [1.85, 1.87, 1.89], "radix": [2.30, 2.31, 2.32]}
    )
    assert headline.startswith("radix: goodput 2.31 [2.29, 2.33] req/s, paged 1.87 [1.82, 1.92]: radix wins by 24 %")
    assert len(sentences) == len(pairs) == 1
    assert pairs[0].better == "radix"


def test_verdict_admits_that_it_cannot_tell():
    headline, sentences, _ = verdict("goodput_per_s", GOODPUT, {"a": [1.0, 2.0, 3.0], "b": [1.5, 1.5, 2.9]})
    assert headline.endswith("no difference that these runs can show")
    assert "no difference" in sentences[0]
    single, _, _ = verdict("goodput_per_s", GOODPUT, {"a": [1.0], "b": [9.0]})
    assert single.endswith("no difference that these runs can show")


def test_verdict_of_three_names_those_that_are_level():
    headline, sentences, _ = verdict(
        "goodput_per_s", GOODPUT, {"a": [4.0, 4.1, 3.9], "b": [3.9, 4.1, 4.0], "c": [1.0, 1.1, 0.9]}
    )
    assert "no difference between a and b that these runs can show" in headline
    assert len(sentences) == 3
    won, _, _ = verdict("goodput_per_s", GOODPUT, {"a": [8.0, 8.1, 7.9], "b": [3.9, 4.1, 4.0], "c": [1.0, 1.1, 0.9]})
    assert "a wins by 2.0 times over b, the next" in won


def test_verdict_over_a_side_that_has_nothing():
    headline, _, _ = verdict("goodput_per_s", GOODPUT, {"a": [2.0, 2.1, 1.9], "b": [0.0, 0.0, 0.0]})
    assert "a wins by everything: the other has none" in headline


def test_worth_is_against_the_baseline():
    headline, sentences, pairs = worth(
        "goodput_per_s",
        GOODPUT,
        {"on": [4.0, 4.1, 3.9], "no-cache": [2.0, 2.05, 1.95], "no-x": [4.0, 4.1, 3.9], "no-y": [5.0, 5.1, 4.9]},
        "on",
    )
    assert headline == (
        "on: goodput 4.00 [3.75, 4.25] req/s; better than no-cache by 2.0 times; worse than no-y by 25 %; "
        "no difference that these runs can show to no-x"
    )
    assert [pair.other for pair in pairs] == ["no-cache", "no-x", "no-y"]
    assert len(sentences) == 3
