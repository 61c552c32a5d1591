"""An experiment as one HTML file: verdict first, then what was held constant, then the numbers and charts behind it.

The file asks nothing of the network: styles, scripts and data are inside, and its content security policy admits no
other script, whatever a server under test wrote into its answers.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from kitfox.bench.metrics import METRICS
from kitfox.bench.records import OBJECTIVES, Experiment, Fact, Interval, Record, Run, Slo

ASSETS = Path(__file__).with_name("report")
LATENCIES = {
    "ttft": "Time to first token (TTFT)",
    "itl": "Inter-token latency (ITL)",
    "tpot": "Time per output token (TPOT)",
    "e2el": "End-to-end latency (E2EL)",
}
# Nine of each: a colour (in report.css) and a dash pattern, so that no two sides differ by colour alone.
DASHES: tuple[list[int], ...] = (
    [],
    [8, 4],
    [2, 3],
    [10, 3, 2, 3],
    [14, 4],
    [5, 5],
    [2, 6],
    [12, 3, 2, 3, 2, 3],
    [4, 2],
)

# What bounds the size of the file.
CURVE_POINTS = 400
TIME_BINS = 150
TIMELINE_ROWS = 240  # two dots each in the tallest chart
ALL_TIMELINE_ROWS = 24_000
EXAMPLES = 3
EXAMPLE_CHARACTERS = 300
NO_VALUE = "–"


def write_report(path: Path, experiment: Experiment) -> None:
    """Write `experiment` to `path`, as UTF-8.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(_Report(experiment).html(), encoding="utf-8")


RunKey = tuple[float | None, int]  # rate and repeat: the runs of all sides that are drawn together


class _Report:
    """One experiment, counted and worded for the template and the charts."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.names = [side.name for side in experiment.sides]
        self.swept = any(run.rate is not None for run in experiment.runs)
        self.rates = sorted({run.rate for run in experiment.runs}, key=lambda rate: -1.0 if rate is None else rate)
        self.groups: dict[RunKey, list[Run]] = defaultdict(list)
        for run in experiment.runs:
            self.groups[run.rate, run.repeat].append(run)

    def html(self) -> str:
        scripts = [
            (ASSETS / "sharp.js").read_text(encoding="utf-8"),
            f"/*\n{(ASSETS / 'vendor/uPlot.LICENSE').read_text(encoding='utf-8')}*/\n"
            + (ASSETS / "vendor/uPlot.iife.min.js").read_text(encoding="utf-8"),
            (ASSETS / "report.js").read_text(encoding="utf-8"),
        ]
        style = "".join((ASSETS / file).read_text(encoding="utf-8") for file in ("vendor/uPlot.min.css", "report.css"))
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
        )
        return environment.get_template("report.html").render(
            self._words(),
            style=Markup(style),
            scripts=[Markup(script) for script in scripts],
            script_hashes=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
            data=_embed(self._chart_data()),
        )

    # ---- words and tables ----

    def _words(self) -> dict[str, Any]:
        experiment = self.experiment
        labels = list(dict.fromkeys(f"{contrast.side} / {contrast.other}" for contrast in experiment.contrasts))
        requests = sum(run.summary.requests for run in experiment.runs)
        return {
            "experiment": experiment,
            "partial": self._partial(),
            "verdicts": [verdict for verdict in experiment.verdicts if verdict != experiment.headline],
            "sides": [
                {"name": s.name, "spec": s.spec, "command": s.command, **self._look(s.name)} for s in experiment.sides
            ],
            "objectives": _objectives(experiment.slo),
            "facts": [self._fact(fact) for fact in experiment.facts],
            "numbers": [self._number_row(metric) for metric in experiment.metrics],
            "numbers_caption": self._numbers_caption(),
            "pairs": labels,
            "contrasts": self._contrast_rows(labels),
            "latencies": [self._latency_words(name) for name in LATENCIES],
            "latency_labels": [_rate(rate) for rate in self.rates],
            "swept": self.swept,
            "sweep_table": self._sweep_rows(),
            "sweep_verdict": self._sweep_verdict(),
            "sweep_description": self._sweep_description(),
            "time_labels": [self._group_label(key) for key in self.groups],
            "throughput_description": self._throughput_description(),
            "memory_description": self._memory_description(),
            "timeline_labels": [self._run_label(run) for run in experiment.runs],
            "timeline_description": "Requests by time of sending, one row each. "
            + "; ".join(
                f"{self._run_label(run)}: {run.summary.requests} requests, {run.summary.failed} failed, "
                f"in {_seconds(run.summary.duration_s)}"
                for run in experiment.runs
            ),
            "percentiles": [self._percentile_block(name) for name in LATENCIES],
            "failures": self._failure_rows(),
            "requests": requests,
            "runs": [self._run_row(run) for run in experiment.runs],
            "run_columns": RUN_COLUMNS,
        }

    def _look(self, side: str) -> dict[str, Any]:
        index = self.names.index(side)
        # The tenth side has the first one's colour, but the second one's dashes.
        return {"color": index % len(DASHES), "dash": DASHES[(index + index // len(DASHES)) % len(DASHES)]}

    def _side(self, name: str) -> dict[str, Any]:
        return {"name": name, **self._look(name)}

    def _partial(self) -> str:
        cut = [self._run_label(run) for run in self.experiment.runs if run.partial]
        if not self.experiment.partial and not cut:
            return ""
        text = "The experiment ended before everything was measured; what follows is what there was by then."
        return f"{text} Cut short: {', '.join(cut)}." if cut else text

    def _group_label(self, key: RunKey) -> str:
        rate, repeat = key
        return f"repeat {repeat + 1}" if rate is None else f"{_rate(rate)}, repeat {repeat + 1}"

    def _run_label(self, run: Run) -> str:
        return f"{run.side}, {self._group_label((run.rate, run.repeat))}"

    def _fact(self, fact: Fact) -> dict[str, Any]:
        words = {
            "same": ("same", "good"),
            "differs": ("differs, allowed" if fact.allowed else "differs", "bad"),
            "unknown": ("could not be checked", "warn"),
        }
        word, tone = words[fact.status]
        by_side = [_or_dash(fact.values.get(name)) for name in self.names]
        return {
            "field": fact.field,
            "status": fact.status,
            "word": word if len(self.names) > 1 or fact.status != "same" else "known",
            "tone": tone,
            "common": by_side[0] if len(set(by_side)) == 1 else None,
            "by_side": by_side,
            "listed": "; ".join(f"{name}: {value}" for name, value in zip(self.names, by_side, strict=True)),
        }

    @property
    def _repeats(self) -> int:
        return len({run.repeat for run in self.experiment.runs})

    def _numbers_caption(self) -> str:
        if self._repeats < 2:
            return "Of one run a side, so without intervals."
        return f"Estimates over {self._repeats} repeats, with their 95 % intervals."

    def _number_row(self, key: str) -> dict[str, Any]:
        metric = METRICS[key]
        by_side = self.experiment.metrics[key]
        return {
            "label": metric.label,
            "unit": metric.unit,
            "direction": "higher" if metric.higher_is_better else "lower",
            "cells": [_interval(by_side.get(name), metric.format, self._repeats > 1) for name in self.names],
        }

    def _contrast_rows(self, labels: Sequence[str]) -> list[dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for contrast in self.experiment.contrasts:
            outcome = f"{contrast.better} better" if contrast.better else "no difference shown"
            cell = _interval(contrast.ratio, _number, self._repeats > 1) | {
                "outcome": outcome,
                "won": contrast.better is not None,
            }
            rows.setdefault(contrast.metric, {})[f"{contrast.side} / {contrast.other}"] = cell
        return [
            {"label": METRICS[metric].label, "cells": [cells.get(label) for label in labels]}
            for metric, cells in rows.items()
        ]

    def _latency_words(self, name: str) -> dict[str, str]:
        objective = getattr(self.experiment.slo, name)
        parts = []
        for (side, rate), samples in self._samples[name].items():
            where = f"{side} at {_rate(rate)}" if rate is not None else side
            if samples.size:
                p50, p99 = np.percentile(samples, (50, 99))
                parts.append(f"{where}: median {_seconds(p50)}, 99th percentile {_seconds(p99)}")
            else:
                parts.append(f"{where}: no samples")
        description = f"{LATENCIES[name]}, share of samples at or below each time. {'; '.join(parts) or 'No runs'}."
        caption = [f"Objective: {_limit(objective)}."] if objective is not None else []
        if name == "itl":
            if objective is not None:
                caption.append("It bounds the 99th percentile of each request's own gaps.")
            for side in self.names:
                runs = [run.summary for run in self.experiment.runs if run.side == side and run.summary.output_tokens]
                if any(summary.tokens_per_chunk > 1.005 for summary in runs):
                    mean = np.mean([summary.tokens_per_chunk for summary in runs])
                    how = "not taken apart" if any(summary.itl_is_per_chunk for summary in runs) else "taken apart"
                    caption.append(f"{side} sends {_number(float(mean))} tokens a chunk, {how}.")
        return {
            "key": name,
            "label": LATENCIES[name],
            "description": description,
            "caption": " ".join(caption) or "No objective was set.",
        }

    def _sweep_means(self) -> dict[tuple[str, float], tuple[float, float]]:
        """By side and rate: goodput per second and its share, the mean of what was measured there."""
        points: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
        for point in self.experiment.sweep:
            points[point.side, point.rate].append((point.goodput_per_s, point.goodput_share))
        means = {key: np.mean(values, axis=0) for key, values in points.items()}
        return {key: (float(goodput), float(share)) for key, (goodput, share) in means.items()}

    def _sweep_rows(self) -> list[dict[str, Any]]:
        means = self._sweep_means()
        rows = []
        for rate in sorted({rate for _, rate in means}):
            points = [means.get((name, rate), (math.nan, math.nan)) for name in self.names]
            cells = [{"value": _number(goodput), "range": _percent(share)} for goodput, share in points]
            rows.append({"rate": _rate(rate), "cells": cells})
        return rows

    def _sweep_verdict(self) -> str:
        target = f"{self.experiment.target_share * 100:g} %"
        found = [
            f"{side}: {_rate(rate)}" if rate is not None else f"{side}: at no rate that was tried"
            for side, rate in self.experiment.best_rates.items()
        ]
        return f"Highest rate at which {target} of requests meet every objective. {'; '.join(found)}." if found else ""

    def _sweep_description(self) -> str:
        points = [
            f"{side} at {_rate(rate)}: {_number(goodput)} requests/s, {_percent(share)}"
            for (side, rate), (goodput, share) in self._sweep_means().items()
        ]
        return f"Goodput against rate, target {self.experiment.target_share * 100:g} %. {'; '.join(points)}."

    def _throughput_description(self) -> str:
        means = [f"{self._run_label(r)}: mean {_number(r.summary.output_tokens_per_s)}" for r in self.experiment.runs]
        return f"Output tokens per second over time. {'; '.join(means) or 'No runs'}."

    def _memory_description(self) -> str:
        peaks = [f"{self._run_label(r)}: peak {_bytes(r.summary.peak_memory_bytes)}" for r in self.experiment.runs]
        return f"Server memory over time. {'; '.join(peaks) or 'No runs'}."

    def _percentile_block(self, name: str) -> dict[str, Any]:
        objective = getattr(self.experiment.slo, name)
        rows = []
        for (side, rate), samples in self._samples[name].items():
            runs = [run.summary for run in self.experiment.runs if (run.side, run.rate) == (side, rate)]
            answered = sum(summary.requests - summary.failed for summary in runs)
            missed = sum(summary.missed.get(name, 0) for summary in runs)
            values = [samples.mean(), *np.percentile(samples, (50, 90, 99))] if samples.size else [None] * 4
            cells = [f"{samples.size:,}", *map(_seconds, values), _limit(objective)]
            cells.append(f"{missed:,} of {answered:,}" if objective is not None else NO_VALUE)
            rows.append({"side": self._side(side), "rate": _rate(rate), "cells": cells})
        return {"label": LATENCIES[name], "rows": rows}

    def _failure_rows(self) -> list[dict[str, Any]]:
        rows = []
        for side in self.names:
            records = [record for run in self.experiment.runs if run.side == side for record in run.records]
            details: dict[str, Counter[str]] = defaultdict(Counter)
            for record in records:
                if record.failure is not None:
                    details[_kind(record)][record.failure.detail] += 1
            for kind, counts in sorted(details.items(), key=lambda item: -item[1].total()):
                examples = [f"{_shortened(detail)} (× {count:,})" for detail, count in counts.most_common(EXAMPLES)]
                if len(counts) > EXAMPLES:
                    examples.append(f"and {len(counts) - EXAMPLES:,} other messages, in the raw records")
                rows.append(
                    {
                        "side": self._side(side),
                        "kind": kind,
                        "count": f"{counts.total():,}",
                        "share": _percent(counts.total() / len(records)),
                        "examples": examples,
                    }
                )
        return rows

    def _run_row(self, run: Run) -> dict[str, Any]:
        s = run.summary
        cells = [
            _seconds(run.start_s),
            f"{s.requests:,}",
            f"{s.failed:,}",
            _seconds(s.duration_s),
            _number(s.goodput_per_s),
            _percent(s.goodput_share),
            _number(s.output_tokens_per_s),
            NO_VALUE if s.cached_tokens is None else f"{s.cached_tokens:,}",
            _bytes(s.peak_memory_bytes),
            _seconds(s.server_cpu_s),
            _number(s.tokens_per_chunk),
            _percent(s.client_cpu_share),
            _seconds(s.max_lag_s),
        ]
        label = self._group_label((run.rate, run.repeat))
        return {"side": self._side(run.side), "label": label, "partial": run.partial, "cells": cells}

    # ---- what the charts draw ----

    @functools.cached_property
    def _samples(self) -> dict[str, dict[tuple[str, float | None], NDArray[np.float64]]]:
        """Raw samples of answered requests in ascending order: by latency, then side and rate."""
        gathered: dict[str, dict[tuple[str, float | None], list[float]]] = {name: {} for name in LATENCIES}
        for side in self.names:
            for run in sorted((r for r in self.experiment.runs if r.side == side), key=lambda r: r.rate or 0.0):
                lists = {name: gathered[name].setdefault((side, run.rate), []) for name in LATENCIES}
                for record in run.records:
                    if record.failure is None:
                        lists["itl"].extend(record.itl_s)
                        for name in ("ttft", "tpot", "e2el"):
                            value = getattr(record, f"{name}_s")
                            lists[name].extend([] if value is None else [value])
        return {
            name: {key: np.sort(np.array(values, dtype=np.float64)) for key, values in by_key.items()}
            for name, by_key in gathered.items()
        }

    def _chart_data(self) -> dict[str, Any]:
        slo = self.experiment.slo
        return {
            "sides": [self._side(name) for name in self.names],
            "slo": {name: getattr(slo, name) for name in OBJECTIVES},
            "latency": [{name: self._curves(name, rate) for name in LATENCIES} for rate in self.rates],
            "sweep": self._sweep_data(),
            "times": [self._time_data(runs) for runs in self.groups.values()],
            "timelines": [self._timeline_data(run) for run in self.experiment.runs],
        }

    def _curves(self, name: str, rate: float | None) -> dict[str, Any] | None:
        """The exact share of each side's samples at or below times that follow all the sides' quantiles."""
        samples = {
            self.names.index(side): values
            for (side, its_rate), values in self._samples[name].items()
            if its_rate == rate and values.size
        }
        if not samples:
            return None
        objective = getattr(self.experiment.slo, name)
        tail = (0.99, 0.995, 0.999)
        budget = CURVE_POINTS - (objective is not None)
        levels = np.union1d(np.linspace(0, 1, max(2, budget // len(samples) - len(tail))), tail)
        grid = np.concatenate([np.quantile(values, levels, method="inverted_cdf") for values in samples.values()])
        grid = np.unique(grid if objective is None else np.append(grid, objective))
        return {
            "x": _rounded(grid, 6),
            "lines": [
                {"side": side, "y": _rounded(np.searchsorted(values, grid, side="right") / values.size, 4)}
                for side, values in samples.items()
            ],
        }

    def _sweep_data(self) -> dict[str, Any]:
        means = self._sweep_means()
        rates = sorted({rate for _, rate in means})
        lines = []
        for index, name in enumerate(self.names):
            points = [means.get((name, rate), (math.nan, math.nan)) for rate in rates]
            goodput, share = (_rounded([point[part] for point in points], 4) for part in (0, 1))
            lines.append({"side": index, "goodput": goodput, "share": share})
        return {"rates": rates, "target": self.experiment.target_share, "lines": lines}

    def _time_data(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Runs of several sides in the same bins of time."""
        last = max(
            (
                max([*(record.end_s for record in run.records), *(sample.at_s for sample in run.samples)], default=0.0)
                for run in runs
            ),
            default=0.0,
        )
        bin_s = _round_step(max(last / TIME_BINS, 0.1))
        bins = int(last / bin_s) + 1
        throughput, memory = [], []
        for run in runs:
            side = self.names.index(run.side)
            tokens = _token_arrivals(run.records)
            if tokens.size:
                counts = np.bincount((tokens[0] / bin_s).astype(int).clip(0), weights=tokens[1], minlength=bins)
                throughput.append({"side": side, "y": _rounded(counts / bin_s, 2)})
            if run.samples:
                highest: list[int | None] = [None] * bins
                for sample in run.samples:
                    at = max(0, int(sample.at_s / bin_s))
                    highest[at] = max(highest[at] or 0, sample.memory_bytes)
                memory.append({"side": side, "y": highest})
        return {"bin_s": bin_s, "throughput": throughput, "memory": memory}

    def _timeline_data(self, run: Run) -> dict[str, Any]:
        """The requests of a run in the order of sending; of too many an even choice, failures before others."""
        rows = max(20, min(TIMELINE_ROWS, ALL_TIMELINE_ROWS // len(self.experiment.runs)))
        records = sorted(run.records, key=lambda record: record.sent_s)
        failed = [index for index, record in enumerate(records) if record.failure is not None]
        answered = [index for index, record in enumerate(records) if record.failure is None]
        shown_failed = _evenly(failed, max(rows // 2, rows - len(answered)))
        shown = sorted([*shown_failed, *_evenly(answered, rows - len(shown_failed))])
        if len(shown) < len(records):
            note = (
                f"Thinned: {len(shown):,} of {len(records):,} requests are drawn, spread evenly, "
                f"{len(shown_failed):,} of {len(failed):,} failed ones among them."
            )
        else:
            note = f"All {len(records):,} requests, in the order of sending."
        chosen = [records[index] for index in shown]
        return {
            "note": note,
            "id": [record.request_id for record in chosen],
            "sent": [round(record.sent_s, 3) for record in chosen],
            "first": [round(record.chunk_s[0], 3) if record.chunk_s else None for record in chosen],
            "end": [round(max(record.end_s, record.sent_s), 3) for record in chosen],
            "failed": [_kind(record) if record.failure is not None else None for record in chosen],
        }


RUN_COLUMNS = (
    "Start-up",
    "Requests",
    "Failed",
    "Duration",
    "Goodput/s",
    "Goodput share",
    "Output tokens/s",
    "Cached tokens",
    "Peak memory",
    "Server CPU",
    "Tokens a chunk",
    "Client CPU",
    "Latest sending",
)


def _token_arrivals(records: Iterable[Record]) -> NDArray[np.float64]:
    """Two rows: when chunks of answered requests came, and how many tokens each brought.

    Where the server does not say how many, the answer's tokens are spread evenly over its chunks.
    """
    times: list[float] = []
    tokens: list[float] = []
    for record in records:
        if record.failure is None and record.chunk_s:
            count = len(record.chunk_s)
            times.extend(record.chunk_s)
            tokens.extend(record.chunk_tokens or [(record.output_tokens or count) / count] * count)
    return np.array([times, tokens], dtype=np.float64)


def _kind(record: Record) -> str:
    assert record.failure is not None
    if record.failure.kind == "http_status":
        return f"http {record.failure.status}"
    return record.failure.kind.replace("_", " ")


def _evenly(indices: Sequence[int], most: int) -> list[int]:
    if len(indices) <= most:
        return list(indices)
    return [indices[position] for position in np.linspace(0, len(indices) - 1, most).astype(int)]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    factor = next(factor for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    return float(f"{factor * power:.1g}")


def _rounded(values: Iterable[float], decimals: int) -> list[float | None]:
    return [round(float(value), decimals) if math.isfinite(value) else None for value in values]


# ---- values as text ----


def _or_dash(value: str | None) -> str:
    return NO_VALUE if value is None else value


def _number(value: float | None) -> str:
    """Three digits, or all of those before the point."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def _seconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NO_VALUE
    return f"{_number(value * 1000)} ms" if 0 < abs(value) < 1 else f"{_number(value)} s"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %" if math.isfinite(share) else NO_VALUE


def _bytes(value: float | None) -> str:
    if value is None:
        return NO_VALUE
    return f"{_number(value / 2**30)} GiB" if value >= 2**30 else f"{_number(value / 2**20)} MiB"


def _rate(rate: float | None) -> str:
    return NO_VALUE if rate is None else f"{rate:g}/s"


def _interval(interval: Interval | None, written: Callable[[float], str], with_limits: bool) -> dict[str, str]:
    if interval is None or not math.isfinite(interval.value):
        return {"value": NO_VALUE, "range": ""}
    if not with_limits:
        return {"value": written(interval.value), "range": ""}
    low, high = (written(limit) if math.isfinite(limit) else NO_VALUE for limit in (interval.low, interval.high))
    return {"value": written(interval.value), "range": "[–]" if low == high == NO_VALUE else f"[{low}, {high}]"}


def _limit(seconds: float | None) -> str:
    """An objective, as it was written."""
    if seconds is None:
        return NO_VALUE
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"


def _objectives(slo: Slo) -> str:
    limits = {name: getattr(slo, name) for name in OBJECTIVES}
    return ", ".join(f"{name.upper()} ≤ {_limit(limit)}" for name, limit in limits.items() if limit is not None)


def _shortened(text: str) -> str:
    if len(text) <= EXAMPLE_CHARACTERS:
        return text
    return f"{text[:EXAMPLE_CHARACTERS]}… ({len(text):,} characters in all)"


# ---- embedding ----


def _embed(data: dict[str, Any]) -> Markup:
    """JSON that no text in it can end: an HTML parser looks for `<` only."""
    return Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
