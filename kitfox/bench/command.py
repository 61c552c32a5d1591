"""The command lines of `kitfox bench`, `kitfox compare` and `kitfox ablate`: flags, files, what the terminal shows."""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kitfox.bench.ablate import BASELINE, TECHNIQUES, ablation_sides
from kitfox.bench.client import Target
from kitfox.bench.compare import LOAD, Comparison, Rules
from kitfox.bench.conclude import conclude
from kitfox.bench.facts import FIELDS
from kitfox.bench.metrics import METRICS, Metric, parse_slo
from kitfox.bench.records import Arrivals, Experiment, Interval, Run, Slo
from kitfox.bench.report import write_report
from kitfox.bench.run import Plan, Sweep
from kitfox.bench.servers import START_TIMEOUT_S, SideSpec, parse_side, parse_sides, stop_on_signals
from kitfox.bench.vocabulary import Encoder, file_encoder, server_encoder
from kitfox.bench.workloads import WORKLOADS, WorkloadSpec, default_arrivals
from kitfox.errors import ConfigError

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
_SPEC_FLAGS = (
    "num_requests", "input_len", "output_len", "length_ratio", "num_prefixes", "prefix_len", "turns", "think_s",
    "block_size", "prompts", "endpoint",
)  # fmt: skip
_MOST_COLUMNS = 3  # with more sides, sides are rows, and only these metrics are shown; the report has all
_FEW_METRICS = (
    "goodput_per_s",
    "output_tokens_per_s",
    "ttft_p50",
    "ttft_p99",
    "itl_p50",
    "itl_p99",
    "peak_memory_bytes",
)
_SWEEP_FLAGS = ("sweep_start", "sweep_seconds", "target_share")


def bench(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """`kitfox bench`: one server that runs already. Returns the exit status."""
    parser.add_argument("--base-url", required=True, metavar="URL", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--server-pid", type=_whole(1), metavar="PID", help="its first process (default: by its port)")
    _add_flags(parser, repeats=1)
    arguments = parser.parse_args(argv)
    side = parse_side(f"server=url:{arguments.base_url}")
    title = f"{arguments.workload} on {arguments.base_url}"
    return _measure([side], arguments, title, _as_typed("bench", argv))


def compare(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """`kitfox compare`: two sides or more. Returns the exit status."""
    parser.add_argument(
        "sides",
        nargs="+",
        metavar="SIDE",
        help="kitfox[:MODEL and flags], cmd:COMMAND with {port}, or url:URL; NAME= in front names it",
    )
    _add_flags(parser, repeats=3)
    _add_comparison_flags(parser)
    arguments = parser.parse_args(argv)
    if len(arguments.sides) < 2:
        raise ConfigError(f"sides must be two or more. Given: {arguments.sides[0]!r}", param="sides")
    sides = parse_sides(arguments.sides)
    title = f"{' against '.join(side.name for side in sides)}, {arguments.workload}"
    return _measure(sides, arguments, title, _as_typed("compare", argv))


def ablate(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """`kitfox ablate`: kitfox with each technique switched off in turn. Returns the exit status."""
    parser.add_argument("--flags", default="", help="MODEL and flags of `kitfox serve` that all sides have")
    parser.add_argument(
        "--techniques",
        type=lambda text: text.split(","),
        default=list(TECHNIQUES),
        help=f"comma-separated, of {', '.join(TECHNIQUES)} (default all)",
    )
    _add_flags(parser, repeats=3)
    _add_comparison_flags(parser)
    arguments = parser.parse_args(argv)
    sides, changes = ablation_sides(arguments.flags, arguments.techniques)
    arguments.allow_difference += sorted(changes)
    title = f"kitfox without one technique at a time, {arguments.workload}"
    return _measure(sides, arguments, title, _as_typed("ablate", argv), baseline=BASELINE)


def _measure(
    sides: Sequence[SideSpec], arguments: argparse.Namespace, title: str, command: str, baseline: str | None = None
) -> int:
    """Check, run, conclude, show and write; what there is when it is interrupted, too."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # into a pipe or a file, too, lines come when they are true
    console = Console()
    arrivals, slo, sweep = _arrivals(arguments), parse_slo(arguments.slo) if arguments.slo else Slo(), _sweep(arguments)
    stop_on_signals()
    with TemporaryDirectory(prefix="kitfox-bench-") as scratch:
        output = _Output(arguments.output)
        comparison = Comparison(
            sides,
            _rules(arguments, sides),
            make_target=lambda url, model: _target(arguments, url, model),
            make_encoder=lambda url, model: _encoder(arguments, url, model),
            logs=(output.folder or Path(scratch)) / "logs",
            console=console,
            on_run=output.add,
        )
        plan = comparison.check(
            lambda vocabulary, context: Plan(
                spec=_spec(arguments, context),
                arrivals=arrivals,
                slo=slo,
                vocabulary=vocabulary,
                seed=arguments.seed,
                warm_up=arguments.warm_up,
                warm_cache=getattr(arguments, "warm_cache", False),
                sweep=sweep,
            )
        )
        workload = plan.workload(0)
        console.print(f"{workload.description}; {plan.arrivals_text()}", highlight=False, soft_wrap=True)
        comparison.run(plan)
        experiment = conclude(
            comparison.described,
            comparison.runs,
            plan,
            workload,
            title=title,
            command=command,
            metric=arguments.metric,
            baseline=baseline,
            facts=comparison.facts,
            notes=comparison.notes,
            interrupted=comparison.interrupted,
        )
        _show(experiment, console)
        output.finish(experiment, console)
    if experiment.partial:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if any(run.summary.failed == run.summary.requests for run in comparison.runs) else 0


def _as_typed(name: str, argv: Sequence[str]) -> str:
    """The command that makes the experiment again, without the key that it was made with."""
    words = [re.sub(r"^--api-key=.*", "--api-key=KEY", word, flags=re.DOTALL) for word in argv]
    words = ["KEY" if before == "--api-key" else word for before, word in zip(["", *words], words, strict=False)]
    return shlex.join(["kitfox", name, *words])


# ---- flags ----------------------------------------------------------------------------------------------------------


def _add_flags(parser: argparse.ArgumentParser, *, repeats: int) -> None:
    """What all three commands have."""
    parser.add_argument(
        "--repeats",
        type=_whole(1),
        default=repeats,
        metavar="N",
        help=f"runs of each side, each with prompts of its own (default {repeats})",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for report.html, summary.json, requests.jsonl"
    )
    parser.add_argument(
        "--slo",
        metavar="LIST",
        help="objectives of a request: ttft=500ms,itl=50ms,tpot=40ms,e2el=5s; itl: of its p99",
    )
    parser.add_argument(
        "--metric",
        choices=sorted(METRICS),
        metavar="NAME",
        help=f"what decides, of {', '.join(METRICS)}",
    )
    work = parser.add_argument_group("Workload")
    work.add_argument(
        "--workload",
        default="chat",
        metavar="NAME",
        help="; ".join(f"{name}: {what}" for name, what in WORKLOADS.items()) + " (default chat)",
    )
    for flag, kind, what in (
        ("--num-requests", _whole(1), "requests; conversations for multiturn and agent; rows of a file"),
        ("--input-len", _whole(1), "prompt tokens, on average"),
        ("--output-len", _whole(1), "answer tokens, on average"),
        ("--length-ratio", _number(0, 1), "lengths are uniform within this share of the mean"),
        ("--num-prefixes", _whole(1), "shared prefixes"),
        ("--prefix-len", _whole(1), "tokens of each"),
        ("--turns", _whole(1), "questions of a conversation"),
        ("--think-s", _number(0), "seconds between an answer and the next turn"),
        ("--block-size", _whole(1), "tokens in a block of a Mooncake trace"),
    ):
        work.add_argument(flag, type=kind, metavar="N", help=what)
    work.add_argument("--prompts", choices=("auto", "ids", "text"), default="auto", help="send token ids or text")
    work.add_argument("--endpoint", choices=("auto", "completions", "chat"), default="auto", help="where to")
    work.add_argument("--tokenizer", type=Path, metavar="PATH", help="tokenizer.json, where the server cannot tokenize")
    work.add_argument("--seed", type=_whole(0), default=0, metavar="N", help="fixes all that is drawn (default 0)")
    when = parser.add_argument_group("Arrivals")
    when.add_argument("--concurrency", type=_whole(1), metavar="N", help="requests at a time, the next when one ends")
    when.add_argument("--rate", type=_number(0), metavar="R", help="requests a second, answered or not")
    when.add_argument(
        "--burstiness", type=_number(0), metavar="B", help="of --rate: 1 is Poisson, less is burstier (default 1)"
    )
    when.add_argument("--speed", type=_number(0), metavar="X", help="play a trace's times so many times as fast")
    find = parser.add_argument_group("Sweep")
    find.add_argument(
        "--goodput-sweep",
        action="store_true",
        help="raise the rate until goodput falls, and report the highest rate that meets the objectives",
    )
    find.add_argument("--sweep-start", type=_number(0), metavar="R", help=f"first rate (default {Sweep.start:g})")
    find.add_argument(
        "--sweep-seconds", type=_number(0), metavar="S", help=f"of arrivals at each rate (default {Sweep.seconds:g})"
    )
    find.add_argument(
        "--target-share",
        type=_number(0, 1),
        metavar="SHARE",
        help=f"of requests that must meet every objective (default {Sweep.target_share:g})",
    )
    ask = parser.add_argument_group("Requests")
    ask.add_argument("--model", help="the name to ask a running server for (default: the one it serves)")
    ask.add_argument("--temperature", type=_number(0), default=0.0, metavar="T", help="default 0")
    ask.add_argument("--timeout", type=_number(0), default=600.0, metavar="S", help="of a request (default 600 s)")
    ask.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    ask.add_argument(
        "--extra-body",
        type=_json_object,
        default={},
        metavar="JSON",
        help="merged into requests; null removes a field",
    )
    ask.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="let answers end where the model ends them; lengths then differ between sides",
    )
    ask.add_argument(
        "--warm-up",
        type=_whole(0),
        default=4,
        metavar="N",
        help="requests before each run (default 4)",
    )


def _add_comparison_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Fairness")
    fields = [*FIELDS, "cache", LOAD]
    group.add_argument(
        "--allow-difference",
        action="append",
        default=[],
        choices=fields,
        metavar="FIELD",
        help=f"accept, and record, a difference in {', '.join(fields)}",
    )
    group.add_argument(
        "--declare",
        action="append",
        default=[],
        metavar="SIDE.FIELD=VALUE",
        help="what cannot be found out of a server: vllm.precision=bfloat16",
    )
    group.add_argument(
        "--warm-cache", action="store_true", help="send each run's prompts once before it is measured (default: cold)"
    )
    group.add_argument(
        "--ready-timeout",
        type=_number(0),
        default=START_TIMEOUT_S,
        metavar="S",
        help=f"for a server to start (default {START_TIMEOUT_S:g})",
    )


def _whole(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}. Given: {text!r}")
        return int(text)

    return parse


def _number(minimum: float, maximum: float = math.inf) -> Callable[[str], float]:
    def parse(text: str) -> float:
        limits = f"at least {minimum:g}" if maximum == math.inf else f"in [{minimum:g}, {maximum:g}]"
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not minimum <= value <= maximum or value == math.inf:
            raise argparse.ArgumentTypeError(f"must be a number, {limits}. Given: {text!r}")
        return value

    return parse


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object. Given: {text!r}")
    return value


def _arrivals(arguments: argparse.Namespace) -> Arrivals:
    """Raises ConfigError for flags that exclude each other."""
    arrivals = default_arrivals(arguments.workload)
    given = {name: getattr(arguments, name) for name in ("concurrency", "rate", "burstiness", "speed")}
    given = {name: value for name, value in given.items() if value is not None}
    if "concurrency" in given and "rate" in given:
        raise ConfigError("--concurrency and --rate exclude each other: one waits for answers, the other does not")
    if zero := [name for name, value in given.items() if value == 0]:
        raise ConfigError(f"--{zero[0]} must be above 0. Given: 0", param=zero[0])
    if "burstiness" in given and "rate" not in given and not arguments.goodput_sweep:
        raise ConfigError("--burstiness is of --rate or --goodput-sweep, and neither is given", param="burstiness")
    if "speed" in given and ("rate" in given or "concurrency" in given or arrivals.kind != "trace"):
        raise ConfigError("--speed is of a trace's own times: leave --rate and --concurrency out", param="speed")
    if arguments.goodput_sweep and ("rate" in given or "concurrency" in given):
        raise ConfigError("--goodput-sweep finds the rate: leave --rate and --concurrency out", param="goodput_sweep")
    if "concurrency" in given:
        return replace(arrivals, kind="closed", **given)
    if "rate" in given or "burstiness" in given:
        return replace(arrivals, kind="gamma" if given.get("burstiness", 1) != 1 else "poisson", **given)
    return replace(arrivals, **given)


def _sweep(arguments: argparse.Namespace) -> Sweep | None:
    given = {name: value for name in _SWEEP_FLAGS if (value := getattr(arguments, name)) is not None}
    if not arguments.goodput_sweep:
        if given:
            raise ConfigError(f"--{next(iter(given)).replace('_', '-')} is of --goodput-sweep, which is not given")
        return None
    if not arguments.slo:
        raise ConfigError("--goodput-sweep needs objectives: --slo ttft=500ms,itl=50ms", param="slo")
    if zero := [name for name, value in given.items() if value == 0]:
        raise ConfigError(f"--{zero[0].replace('_', '-')} must be above 0. Given: 0", param=zero[0])
    return Sweep(**{name.removeprefix("sweep_"): value for name, value in given.items()})


def _spec(arguments: argparse.Namespace, context: int | None) -> WorkloadSpec:
    return WorkloadSpec(
        name=arguments.workload,
        max_total_tokens=context,
        **{name: getattr(arguments, name) for name in _SPEC_FLAGS},
    )


def _rules(arguments: argparse.Namespace, sides: Sequence[SideSpec]) -> Rules:
    declared: dict[str, dict[str, str]] = {}
    names = [side.name for side in sides]
    for text in getattr(arguments, "declare", []):
        target, equals, value = text.partition("=")
        side, _, field = target.rpartition(".")
        if not equals or side not in names or field not in FIELDS:
            raise ConfigError(
                f"declare must be SIDE.FIELD=VALUE with SIDE of {', '.join(names)} and FIELD of {', '.join(FIELDS)}. "
                f"Given: {text!r}",
                param="declare",
            )
        declared.setdefault(side, {})[field] = value
    return Rules(
        repeats=arguments.repeats,
        allowed=frozenset(getattr(arguments, "allow_difference", (LOAD,))),
        declared=declared,
        ready_timeout_s=getattr(arguments, "ready_timeout", START_TIMEOUT_S),
        model=arguments.model,
        pid=getattr(arguments, "server_pid", None),
        api_key=arguments.api_key,
    )


def _target(arguments: argparse.Namespace, url: str, model: str) -> Target:
    return Target(
        url,
        model,
        extra=arguments.extra_body,
        ignore_eos=arguments.ignore_eos,
        temperature=arguments.temperature,
        timeout_s=arguments.timeout,
        api_key=arguments.api_key,
    )


def _encoder(arguments: argparse.Namespace, url: str, model: str) -> Encoder:
    if arguments.tokenizer is not None:
        return file_encoder(arguments.tokenizer)
    return server_encoder(url, model, api_key=arguments.api_key)


# ---- what is shown and written --------------------------------------------------------------------------------------


def _show(experiment: Experiment, console: Console) -> None:
    names = [side.name for side in experiment.sides]
    estimates = experiment.metrics
    table = Table(title=experiment.title, title_justify="left", title_style="bold")
    table.add_column("")
    if len(names) <= _MOST_COLUMNS:
        for name in names:
            table.add_column(name, justify="right")
        for key in estimates:
            table.add_row(_heading(key), *(_cell(METRICS[key], estimates[key].get(name)) for name in names))
    else:
        keys = [key for key in _FEW_METRICS if key in estimates]
        for key in keys:
            table.add_column(_heading(key), justify="right")
        for name in names:
            table.add_row(name, *(_cell(METRICS[key], estimates[key].get(name)) for key in keys))
    if experiment.metrics:
        console.print(table)
    for point in experiment.sweep:
        console.print(
            f"{point.side} at {point.rate:.3g} req/s: {100 * point.goodput_share:.0f} % meet the objectives, "
            f"goodput {point.goodput_per_s:.2f} req/s",
            highlight=False,
        )
    for note in experiment.notes:
        console.print(f"Note: {note}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    for verdict in experiment.verdicts if len(names) > 2 else ():
        console.print(verdict, highlight=False, markup=False, soft_wrap=True)
    if experiment.partial:
        console.print("Partial: it was ended before it was done.", style="bold red")
    console.print(experiment.headline, style="bold", highlight=False, markup=False, soft_wrap=True)


def _heading(key: str) -> str:
    metric = METRICS[key]
    return f"{metric.label}, {metric.unit}" if metric.unit else metric.label


def _cell(metric: Metric, interval: Interval | None) -> str:
    """An estimate with half the width of its interval; the report has the limits."""
    if interval is None:
        return "–"
    half = (interval.high - interval.low) / 2
    return metric.format(interval.value) + ("" if math.isnan(half) or half == 0 else f" ±{metric.format(half)}")


class _Output:
    """The folder of an experiment: requests are written as runs end, the rest at the end. None writes nothing."""

    def __init__(self, folder: Path | None):
        """Raises ConfigError if the folder holds an experiment already, or cannot be written."""
        self.folder = folder
        if folder is None:
            return
        if any((folder / name).exists() for name in ("requests.jsonl", "summary.json", "report.html")):
            raise ConfigError(f"output must be a new folder. Given: {folder}, which has an experiment", param="output")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output cannot be written: {error}", param="output") from None

    def add(self, run: Run) -> None:
        """Append a run's records, one line each."""
        if self.folder is None:
            return
        of_run = {"side": run.side, "repeat": run.repeat, "rate": run.rate, "partial": run.partial}
        with (self.folder / "requests.jsonl").open("ab") as file:
            for record in run.records:
                file.write(msgspec.json.encode(of_run | msgspec.to_builtins(record)) + b"\n")

    def finish(self, experiment: Experiment, console: Console) -> None:
        if self.folder is None:
            return
        shown = msgspec.to_builtins(replace(experiment, runs=()))
        shown["runs"] = [
            {key: value for key, value in msgspec.to_builtins(replace(run, records=())).items() if key != "records"}
            for run in experiment.runs
        ]
        (self.folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(shown), indent=1) + b"\n")
        write_report(self.folder / "report.html", experiment)
        console.print(f"Report: {self.folder / 'report.html'}", highlight=False, soft_wrap=True)
