"""The report without a browser: what it says, in which order, and that no text of a server gets out of its place."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitfox.bench.metrics import METRICS
from kitfox.bench.records import (
    Contrast,
    Distribution,
    Experiment,
    Fact,
    Failure,
    Interval,
    Record,
    Run,
    ServerSample,
    Side,
    Slo,
    Summary,
    SweepPoint,
)
from kitfox.bench.report import write_report

HOSTILE = "</script><script>alert(1)</script><!-- <b>\"'&"
SLO = Slo(ttft=0.5, itl=0.05)
NAN = math.nan


def example_records(
    count: int, seed: int, speed: float = 1.0, failing: float = 0.0, tokens: int = 40
) -> tuple[Record, ...]:
    """Requests of an open loop, 4 a second, with latencies that grow a little; times are divided by `speed`."""
    random_of = random.Random(seed)
    records = []
    sent = 0.0
    for index in range(count):
        sent += random_of.expovariate(4.0)
        first = sent + random_of.lognormvariate(-2.0, 0.6) / speed
        gaps = [random_of.lognormvariate(-3.6, 0.35) / speed for _ in range(random_of.randint(tokens // 2, tokens))]
        chunks = tuple(first + sum(gaps[:position]) for position in range(len(gaps)))
        common: dict[str, Any] = {
            "request_id": f"request-{index}",
            "session": index,
            "turn": 0,
            "asked_tokens": len(chunks),
            "expected_prompt_tokens": 100,
            "planned_s": sent,
            "sent_s": sent,
        }
        if random_of.random() < failing:
            failure = random_of.choice(
                [
                    Failure("http_status", '{"error": "queue is full"}', 429),
                    Failure("broken_stream", f"the stream ended {HOSTILE}"),
                    Failure("timeout", "no answer within 60 s " + "x" * 400),
                ]
            )
            records.append(Record(**common, end_s=sent + random_of.uniform(0.1, 3.0), failure=failure))
        else:
            answer = {"chunk_s": chunks, "chunk_tokens": (1,) * len(chunks), "output_tokens": len(chunks)}
            records.append(Record(**common, **answer, end_s=chunks[-1], prompt_tokens=100, cached_tokens=60))
    return tuple(records)


def distribution(samples: list[float]) -> Distribution | None:
    if not samples:
        return None
    return Distribution(len(samples), float(np.mean(samples)), *np.percentile(samples, (50, 90, 99, 100)).tolist())


def example_run(
    side: str, repeat: int, records: tuple[Record, ...], memory_mib: float | None = 900, **more: Any
) -> Run:
    answered = [record for record in records if record.failure is None]
    duration = max((record.end_s for record in records), default=0.0) - min((r.sent_s for r in records), default=0.0)
    failures = Counter(
        f"http {r.failure.status}" if r.failure.status else r.failure.kind for r in records if r.failure is not None
    )
    good = [r for r in answered if (r.ttft_s or 0) <= 0.5]
    output = sum(record.output_tokens or 0 for record in answered)
    per_s = 1 / duration if duration else 0.0
    summary = Summary(
        requests=len(records),
        failed=len(records) - len(answered),
        failures=dict(failures),
        duration_s=duration,
        requests_per_s=len(answered) * per_s,
        goodput_per_s=len(good) * per_s,
        goodput_share=len(good) / len(records) if records else 0.0,
        output_tokens_per_s=output * per_s,
        total_tokens_per_s=(output + 100 * len(answered)) * per_s,
        ttft=distribution([r.ttft_s for r in answered if r.ttft_s is not None]),
        tpot=distribution([r.tpot_s for r in answered if r.tpot_s is not None]),
        itl=distribution([gap for r in answered for gap in r.itl_s]),
        e2el=distribution([r.e2el_s for r in answered if r.e2el_s is not None]),
        missed={"ttft": len(answered) - len(good), "itl": 0},
        prompt_tokens=100 * len(answered),
        output_tokens=output,
        cached_tokens=60 * len(answered) if answered else None,
        tokens_per_chunk=1.0,
        itl_is_per_chunk=False,
        peak_memory_bytes=None if memory_mib is None else int(memory_mib * 1.2 * 2**20),
        mean_memory_bytes=None if memory_mib is None else int(memory_mib * 1.1 * 2**20),
        server_cpu_s=duration * 1.7,
        client_cpu_share=0.031,
        max_lag_s=0.0013,
    )
    samples = (
        ()
        if memory_mib is None
        else tuple(
            ServerSample(at_s, int(memory_mib * (1 + 0.2 * min(1.0, at_s / 20)) * 2**20), at_s * 1.7)
            for at_s in np.arange(0.0, duration, 0.5).tolist()
        )
    )
    return Run(side, repeat, records, summary, samples, start_s=4.2, **more)


def example_experiment(
    sides: tuple[str, ...] = ("radix", "paged"),
    repeats: int = 3,
    requests: int = 60,
    failing: float = 0.0,
    rates: tuple[float, ...] = (),
    tokens: int = 40,
    **changes: Any,
) -> Experiment:
    """A comparison whose later sides are slower; with `rates`, a sweep."""
    runs, sweep = [], []
    for index, side in enumerate(sides):
        speed = 1.0 / (1 + 0.35 * index)
        for rate in rates or (None,):
            for repeat in range(repeats):
                pace = speed if rate is None else speed / max(1.0, rate / 2) ** 1.5
                records = example_records(requests, repeat, pace, failing, tokens)
                runs.append(example_run(side, repeat, records, 900 + 120 * index, rate=rate))
            if rate is not None:
                here = [run.summary for run in runs if (run.side, run.rate) == (side, rate)]
                share = float(np.mean([summary.goodput_share for summary in here]))
                sweep.append(SweepPoint(side, rate, rate * share, share))
    interval = Interval if repeats > 1 else lambda value, low, high: Interval(value, NAN, NAN)
    metrics = {
        key: {
            side: interval(v := 2.4 / METRICS[key].scale / (1 + 0.25 * index), v * 0.95, v * 1.06)
            for index, side in enumerate(sides)
        }
        for key in METRICS
    }
    contrasts = [
        Contrast(key, first, second, interval(1.25, 1.08, 1.41), first if number % 3 else None)
        for number, key in enumerate(METRICS)
        for index, first in enumerate(sides)
        for second in sides[index + 1 :]
    ]
    if len(sides) > 4:  # an ablation compares with its first side only
        contrasts = [contrast for contrast in contrasts if contrast.side == sides[0]]
    facts = (
        Fact("model", dict.fromkeys(sides, "SmolLM2-135M-Instruct"), "same"),
        Fact("model files", dict.fromkeys(sides, "sha256 5af571cbf074e6d21a03528d2330792e532ca608"), "same"),
        Fact("precision", dict.fromkeys(sides, "bfloat16"), "same"),
        Fact("tokenizer", dict.fromkeys(sides, "8 probes give the same ids"), "same"),
        Fact("arrival times", dict.fromkeys(sides, "drawn from seed 0"), "same"),
        Fact("load of the machine", dict.fromkeys(sides), "unknown"),
    )
    if len(sides) > 1:
        facts += (
            Fact("threads", {side: str(2 + index % 2) for index, side in enumerate(sides)}, "differs", allowed=True),
        )
    words = {
        "title": f"kitfox compare: {', '.join(sides)}",
        "headline": f"{sides[0]} wins by 24 % on this workload"
        if len(sides) > 1
        else f"{sides[0]}: goodput 2.31 req/s",
        "verdicts": tuple(
            f"{sides[0]}: goodput 2.31 [2.20, 2.44] req/s, {other} 1.87 [1.79, 1.95]: {sides[0]} wins by 24 %"
            for other in sides[1:]
        ),
    }
    experiment = Experiment(
        **words,
        created="2026-11-30 11:40 UTC",
        command="kitfox compare kitfox:--cache=radix kitfox:--cache=paged --workload prefix --slo ttft=500ms,itl=50ms",
        workload="prefix: 60 requests behind 4 shared prefixes of 512 tokens, 64 own tokens, 20 to 40 answered",
        workload_digest="9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        arrivals="Poisson, 4 sessions/s",
        slo=SLO,
        sides=tuple(Side(name, f"kitfox:--cache={name}", f"kitfox serve --cache={name} --port 8001") for name in sides),
        facts=facts,
        runs=tuple(runs),
        metrics=metrics,
        contrasts=tuple(contrasts),
        sweep=tuple(sweep),
        best_rates={side: rates[0] if index == 0 else None for index, side in enumerate(sides)} if rates else {},
    )
    return replace(experiment, **changes)


class Page(HTMLParser):
    """What a browser would find: sections in order, headings, tables, scripts and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.headings: list[tuple[int, str]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.header_cells: list[dict[str, str | None]] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.text = ""
        self.elements: Counter[str] = Counter()
        self._inside = ""
        self.feed(html)

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    def values(self, attribute: str) -> list[str]:
        return [value for _, name, value in self.attributes if name == attribute]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside = tag if tag in ("script", "style") else ""
        if tag == "section":
            self.sections.append(dict(attrs)["id"] or "")
        elif tag in ("h1", "h2", "h3"):
            self.headings.append((int(tag[1]), ""))
        elif tag == "tr":
            self.tables.setdefault(self.sections[-1], []).append([])
        elif tag in ("th", "td"):
            self.tables[self.sections[-1]][-1].append("")
            self.header_cells += [dict(attrs)] if tag == "th" else []
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""
        if tag in ("h1", "h2", "h3"):
            self.headings.append((0, ""))
        elif tag == "table":
            self.tables[self.sections[-1]].append([])

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "style":
            self.styles.append(data)
        else:
            self.text += data
            if self.headings and self.headings[-1][0]:
                level, text = self.headings[-1]
                self.headings[-1] = (level, text + data)
            rows = self.tables.get(self.sections[-1] if self.sections else "", [[]])
            if rows and rows[-1]:
                rows[-1][-1] = " ".join(f"{rows[-1][-1]} {data}".split())

    def row(self, section: str, *first: str) -> list[str]:
        """The cells after those that name the row."""
        (found,) = [row for row in self.tables[section] if tuple(row[: len(first)]) == first]
        return found[len(first) :]


@pytest.fixture
def page(tmp_path: Path) -> Callable[[Experiment], Page]:
    def written(experiment: Experiment) -> Page:
        write_report(tmp_path / "report.html", experiment)
        return Page((tmp_path / "report.html").read_text(encoding="utf-8"))

    return written


Written = Callable[[Experiment], Page]
NINE = tuple(f"without {technique}" for technique in "abcdefghi")
SECTIONS = [
    "verdict",
    "held-constant",
    "numbers",
    "latency",
    "time",
    "timeline",
    "percentiles",
    "failures",
    "runs",
    "reproduce",
    "reading",
]


def without_runs() -> Experiment:
    return example_experiment(("server",), runs=(), metrics={}, contrasts=(), facts=(), slo=Slo(), partial=True)


def all_failed() -> Experiment:
    return example_experiment(failing=1.0, metrics={}, contrasts=())


EVERY_KIND = {
    "a single run": lambda: example_experiment(("server",), repeats=1),
    "a comparison": lambda: example_experiment(failing=0.05),
    "four sides": lambda: example_experiment(("radix", "paged", "llama.cpp", "vllm"), requests=20),
    "an ablation": lambda: example_experiment(NINE, repeats=2, requests=20),
    "a sweep": lambda: example_experiment(rates=(1.0, 2.5, 6.0), repeats=1, requests=20),
    "no request": lambda: example_experiment(requests=0),
    "all failed": all_failed,
    "no run": without_runs,
}
every_kind = pytest.mark.parametrize("make", EVERY_KIND.values(), ids=EVERY_KIND)


class TestEveryKind:
    @every_kind
    def test_sections_come_in_order(self, page: Written, make: Callable[[], Experiment]) -> None:
        experiment = make()
        expected = [*SECTIONS[:4], *(["sweep"] if experiment.sweep else []), *SECTIONS[4:]]
        assert page(experiment).sections == expected

    @every_kind
    def test_headings_skip_no_level(self, page: Written, make: Callable[[], Experiment]) -> None:
        experiment = make()
        headings = [(level, text) for level, text in page(experiment).headings if level]
        assert headings[:2] == [(1, experiment.title), (2, experiment.headline)]
        levels = [level for level, _ in headings]
        assert all(after <= before + 1 for before, after in pairwise(levels))
        assert levels.count(1) == 1

    @every_kind
    def test_nothing_is_loaded(self, page: Written, make: Callable[[], Experiment]) -> None:
        result = page(make())
        assert not {"src", "href", "srcset", "action", "poster"} & {name for _, name, _ in result.attributes}
        style = "".join(result.styles) + "".join(result.values("style"))
        assert "url(" not in style
        assert "@import" not in style
        assert not {"link", "img", "iframe", "object", "base"} & set(result.elements)
        assert result.values("content")[-1].startswith("default-src 'none'")

    @every_kind
    def test_no_nan_is_seen(self, page: Written, make: Callable[[], Experiment]) -> None:
        result = page(make())
        words = result.text.replace("Objectives: none", "") + " ".join(result.values("aria-label"))
        assert not re.search(r"\b(nan|inf|None|null)\b", words)
        assert result.data["sides"]

    @every_kind
    def test_tables_and_charts_speak(self, page: Written, make: Callable[[], Experiment]) -> None:
        result = page(make())
        assert all(cell.get("scope") for cell in result.header_cells)
        charts = [value for tag, name, value in result.attributes if (tag, name) == ("div", "aria-label")]
        assert sum(value.startswith("Time to first token") for value in charts) == 1
        assert result.values("role").count("img") >= 6


class TestVerdict:
    def test_comes_first_with_allowed_differences_and_notes(self, page: Written) -> None:
        experiment = example_experiment(notes=("the machine was busy",))
        text = page(experiment).text
        order = [
            experiment.headline,
            experiment.verdicts[0],
            "Differs, allowed: threads (radix: 2; paged: 3)",
            "the machine was busy",
            "What was held constant",
        ]
        assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)

    def test_a_verdict_that_is_the_headline_is_not_repeated(self, page: Written) -> None:
        experiment = example_experiment(headline="radix wins", verdicts=("radix wins",))
        assert page(experiment).text.count("radix wins") == 1

    def test_partial_results_are_named_at_the_top(self, page: Written) -> None:
        experiment = example_experiment()
        cut = replace(experiment.runs[4], partial=True)
        result = page(replace(experiment, runs=(*experiment.runs[:4], cut), partial=True))
        assert result.text.index("Partial results.") < result.text.index(experiment.title, len(experiment.title) + 5)
        assert "Cut short: paged, repeat 2." in result.text
        assert result.row("runs", "paged", "repeat 2 partial")
        assert "Partial results" not in page(experiment).text

    def test_says_what_was_held_constant(self, page: Written) -> None:
        result = page(example_experiment())
        assert result.row("held-constant", "precision") == ["same", "bfloat16"]
        assert result.row("held-constant", "load of the machine") == ["could not be checked", "–"]
        assert result.row("held-constant", "threads") == ["differs, allowed", "2", "3"]

    def test_a_fact_known_of_one_side_only_shows_both(self, page: Written) -> None:
        fact = Fact("precision", {"radix": "bfloat16", "paged": None}, "unknown")
        result = page(example_experiment(facts=(fact,)))
        assert result.row("held-constant", "precision") == ["could not be checked", "bfloat16", "–"]


class TestNumbers:
    def test_metrics_are_shown_in_their_own_unit(self, page: Written) -> None:
        metrics = {
            "ttft_p50": {"radix": Interval(0.12, 0.1, 0.15), "paged": Interval(0.5, NAN, NAN)},
            "goodput_per_s": {"radix": Interval(2.31, 2.2, 2.44)},
        }
        result = page(example_experiment(metrics=metrics, contrasts=()))
        assert result.row("numbers", "TTFT p50") == ["ms", "lower", "120.0 [100.0, 150.0]", "500.0 [–]"]
        assert result.row("numbers", "Goodput") == ["req/s", "higher", "2.31 [2.20, 2.44]", "–"]

    def test_contrasts_say_who_is_better(self, page: Written) -> None:
        contrasts = (
            Contrast("goodput_per_s", "radix", "paged", Interval(1.24, 1.1, 1.4), "radix"),
            Contrast("ttft_p50", "radix", "paged", Interval(0.97, 0.8, 1.1), None),
        )
        result = page(example_experiment(metrics={}, contrasts=contrasts))
        assert result.row("numbers", "Goodput") == ["1.24 [1.10, 1.40]", "radix better"]
        assert result.row("numbers", "TTFT p50") == ["0.970 [0.800, 1.10]", "no difference shown"]

    def test_percentiles_are_of_all_repeats_together(self, page: Written) -> None:
        experiment = example_experiment(failing=0.1)
        records = [r for run in experiment.runs if run.side == "paged" for r in run.records if r.failure is None]
        samples = np.array([record.e2el_s for record in records], dtype=float)
        values = [samples.mean(), *np.percentile(samples, (50, 90, 99))]
        row = page(experiment).tables["percentiles"][-2]
        assert row[:2] == ["paged", str(len(records))]
        for cell, value in zip(row[2:6], values, strict=True):
            number, unit = cell.split()
            assert float(number) * {"s": 1, "ms": 1e-3}[unit] == pytest.approx(value, rel=5e-3)
        assert row[6:] == ["–", "–"]

    def test_missed_objectives_are_of_answered_requests(self, page: Written) -> None:
        experiment = example_experiment(("server",), repeats=2, failing=0.1)
        answered = sum(run.summary.requests - run.summary.failed for run in experiment.runs)
        missed = sum(run.summary.missed["ttft"] for run in experiment.runs)
        row = page(experiment).row("percentiles", "Time to first token (TTFT)", "server")
        assert row[-2:] == ["500 ms", f"{missed} of {answered}"]

    def test_chunks_of_several_tokens_are_stated(self, page: Written) -> None:
        experiment = example_experiment(("radix", "llama.cpp"), repeats=1)
        other = experiment.runs[1]
        summary = replace(other.summary, tokens_per_chunk=3.2, itl_is_per_chunk=True)
        result = page(replace(experiment, runs=(experiment.runs[0], replace(other, summary=summary))))
        assert "llama.cpp sends 3.20 tokens a chunk, not taken apart." in result.text
        assert "radix sends" not in result.text


class TestFailures:
    def test_are_counted_by_kind_with_examples(self, page: Written) -> None:
        records = list(example_records(10, seed=1))
        for index, failure in enumerate(
            [Failure("http_status", "queue is full", 429)] * 3 + [Failure("broken_stream", "x" * 1000)]
        ):
            records[index] = replace(records[index], failure=failure)
        result = page(example_experiment(("server",), runs=(example_run("server", 0, tuple(records)),)))
        assert result.row("failures", "server", "http 429") == ["3", "30.0 %", "queue is full (× 3)"]
        (count, share, example) = result.row("failures", "server", "broken stream")
        assert (count, share) == ("1", "10.0 %")
        assert example == "x" * 300 + "… (1,000 characters in all) (× 1)"

    def test_more_messages_than_are_shown_are_counted(self, page: Written) -> None:
        failures = (Failure("refused", f"port {port}") for port in range(5))
        records = tuple(
            replace(record, failure=failure)
            for record, failure in zip(example_records(5, seed=1), failures, strict=True)
        )
        result = page(example_experiment(("server",), runs=(example_run("server", 0, records),)))
        assert result.row("failures", "server", "refused")[-1].endswith("and 2 other messages, in the raw records")

    def test_none_is_said(self, page: Written) -> None:
        result = page(example_experiment(("server",), repeats=1))
        assert "No request failed: 60 sent, 60 answered." in result.text


class TestHostileText:
    @pytest.fixture
    def result(self, page: Written) -> Page:
        words = dict.fromkeys(
            ("title", "headline", "command", "workload", "arrivals", "created", "workload_digest"), HOSTILE
        )
        experiment = example_experiment(
            (HOSTILE, "paged"), failing=0.3, notes=(HOSTILE,), verdicts=(HOSTILE + "!",), **words
        )
        records = tuple(replace(record, request_id=HOSTILE) for record in experiment.runs[0].records)
        return page(replace(experiment, runs=(replace(experiment.runs[0], records=records), *experiment.runs[1:])))

    def test_stays_text(self, result: Page) -> None:
        assert result.elements["script"] == 4
        assert "b" not in result.elements
        assert result.text.count(HOSTILE) > 20
        assert result.headings[0] == (1, HOSTILE)

    def test_survives_in_the_data(self, result: Page) -> None:
        assert "<" not in result.scripts[0]
        assert result.data["sides"][0]["name"] == HOSTILE
        assert set(result.data["timelines"][0]["id"]) == {HOSTILE}

    def test_only_our_own_scripts_are_admitted(self, result: Page) -> None:
        digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in result.scripts[1:]]
        policy = result.values("content")[-1]
        assert policy.split("script-src ")[1] == " ".join(f"'sha256-{digest}'" for digest in digests)


class TestCurves:
    def test_are_exact_where_samples_are_few(self, page: Written) -> None:
        run = example_run("server", 0, example_records(9, seed=3))
        curve = page(example_experiment(("server",), runs=(run,))).data["latency"][0]["ttft"]
        samples = sorted(record.ttft_s or 0 for record in run.records)
        assert curve["x"] == pytest.approx(sorted([*samples, 0.5]), abs=1e-6)
        assert curve["lines"][0]["y"][:3] == pytest.approx([1 / 9, 2 / 9, 3 / 9], abs=1e-4)
        assert curve["lines"][0]["y"][-1] == 1.0

    def test_are_exact_at_the_objective_and_short_where_samples_are_many(self, page: Written) -> None:
        experiment = example_experiment(NINE, repeats=2, requests=200)
        for name, curve in page(experiment).data["latency"][0].items():
            assert len(curve["x"]) <= 400
            assert len(curve["lines"]) == 9
            assert all(np.all(np.diff(line["y"]) >= 0) for line in curve["lines"])
            objective = getattr(SLO, name)
            if objective is not None:
                runs = [run for run in experiment.runs if run.side == NINE[8]]
                samples = [s for run in runs for r in run.records for s in (r.itl_s if name == "itl" else [r.ttft_s])]
                share = np.mean([sample <= objective for sample in samples])
                assert curve["lines"][8]["y"][curve["x"].index(objective)] == pytest.approx(share, abs=1e-4)

    def test_failed_requests_have_no_latency(self, page: Written) -> None:
        result = page(all_failed())
        assert result.data["latency"][0] == {"ttft": None, "itl": None, "tpot": None, "e2el": None}

    def test_rates_are_not_mixed(self, page: Written) -> None:
        experiment = example_experiment(rates=(1.0, 6.0), repeats=2, requests=20)
        result = page(experiment)
        slow, fast = (rate["e2el"]["x"][-1] for rate in result.data["latency"])
        assert slow < fast
        assert "1/s, repeat 2" in result.text
        assert result.data["sweep"]["rates"] == [1.0, 6.0]
        point = experiment.sweep[0]
        assert result.row("sweep", "1/s")[0] == f"{point.goodput_per_s:#.3g} {point.goodput_share * 100:.1f} %"
        assert "radix: 1/s; paged: at no rate that was tried" in result.text

    def test_a_rate_without_a_share_is_a_gap(self, page: Written) -> None:
        points = (
            SweepPoint("radix", 1.0, 0.9, 0.9),
            SweepPoint("radix", 2.0, NAN, NAN),
            SweepPoint("paged", 1.0, 1.0, 1.0),
        )
        result = page(example_experiment(sweep=points))
        assert result.data["sweep"]["lines"][0] == {"side": 0, "goodput": [0.9, None], "share": [0.9, None]}
        assert result.row("sweep", "2/s") == ["– –", "– –"]


class TestTime:
    @pytest.mark.parametrize("told", [True, False], ids=["the server counts chunks", "it does not"])
    def test_throughput_adds_up_to_the_answered_tokens(self, page: Written, told: bool) -> None:
        records = example_records(50, seed=2, failing=0.2)
        if not told:
            records = tuple(replace(r, chunk_tokens=(), output_tokens=3 * len(r.chunk_s)) for r in records)
        run = example_run("server", 0, records)
        group = page(example_experiment(("server",), runs=(run,))).data["times"][0]
        assert sum(group["throughput"][0]["y"]) * group["bin_s"] == pytest.approx(run.summary.output_tokens, abs=1)
        assert group["bin_s"] == 0.1

    def test_memory_keeps_its_peak(self, page: Written) -> None:
        samples = tuple(ServerSample(second / 10, 7000 if second == 4321 else 1000, 0.0) for second in range(10_000))
        run = replace(example_run("server", 0, example_records(5, seed=2)), samples=samples)
        group = page(example_experiment(("server",), runs=(run,))).data["times"][0]
        assert group["bin_s"] == 10.0
        assert max(group["memory"][0]["y"]) == group["memory"][0]["y"][43] == 7000
        assert len(group["memory"][0]["y"]) == 100

    def test_sides_without_memory_have_no_line(self, page: Written) -> None:
        runs = (example_run("radix", 0, example_records(5, 1)), example_run("paged", 0, example_records(5, 1), None))
        group = page(example_experiment(runs=runs)).data["times"][0]
        assert [line["side"] for line in group["memory"]] == [0]
        assert [line["side"] for line in group["throughput"]] == [0, 1]


class TestTimeline:
    def test_holds_every_request_of_a_short_run(self, page: Written) -> None:
        experiment = example_experiment(("server",), repeats=1)
        timeline = page(experiment).data["timelines"][0]
        first = experiment.runs[0].records[0]
        assert len(timeline["sent"]) == 60
        assert timeline["note"] == "All 60 requests, in the order of sending."
        drawn = (timeline["sent"][0], timeline["first"][0], timeline["end"][0])
        assert drawn == pytest.approx((first.sent_s, first.chunk_s[0], first.end_s), abs=1e-3)

    def test_a_long_run_is_thinned_and_says_so(self, page: Written) -> None:
        records = list(example_records(1000, seed=4))
        for index in (100, 500, 900):
            records[index] = replace(records[index], failure=Failure("timeout", ""), chunk_s=())
        run = example_run("server", 0, tuple(records))
        timeline = page(example_experiment(("server",), runs=(run,))).data["timelines"][0]
        assert timeline["note"].startswith("Thinned: 240 of 1,000 requests")
        assert "3 of 3 failed ones" in timeline["note"]
        assert timeline["failed"].count("timeout") == 3
        assert timeline["sent"] == sorted(timeline["sent"])

    def test_ten_thousand_requests_stay_below_three_megabytes(self, tmp_path: Path) -> None:
        experiment = example_experiment(("server",), repeats=1, requests=10_000, failing=0.02, tokens=20)
        write_report(tmp_path / "report.html", experiment)
        assert (tmp_path / "report.html").stat().st_size < 3_000_000

    def test_many_runs_stay_below_three_megabytes(self, tmp_path: Path) -> None:
        rates = tuple(0.5 * step for step in range(1, 13))
        experiment = example_experiment(("a", "b", "c", "d"), repeats=2, rates=rates, requests=300, tokens=4)
        write_report(tmp_path / "report.html", experiment)
        assert (tmp_path / "report.html").stat().st_size < 3_000_000


def test_no_two_sides_look_the_same(page: Written) -> None:
    looks = [
        (side["color"], tuple(side["dash"]))
        for side in page(example_experiment((*NINE, "tenth", "eleventh"), repeats=1, requests=5)).data["sides"]
    ]
    assert len(set(looks)) == 11
    assert len({color for color, _ in looks}) == len({dash for _, dash in looks}) == 9
