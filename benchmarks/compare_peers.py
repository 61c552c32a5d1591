"""Compare kitfox end to end with other servers, in one run on one machine.

    .venv/bin/python -m benchmarks.compare_peers --kitfox "DIR --quantization int8" --peers vllm-w8a8,openvino-q8_0

Sides take turns, the order reversed each time (A B, B A, A B), one server at a time, so that a machine that gets slower
for a while slows all of them. Every repeat has prompts of its own, the same for all sides. Printed are medians over
repeats with their extremes, and kitfox's median over each peer's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.load import WORKLOADS, WORKLOADS_1B, Result, Target, Workload, read_words, run
from benchmarks.make_models import made
from benchmarks.paths import CACHE
from benchmarks.peers import PEERS, SHAPES, CannotInstallError, Side, kitfox_side, peer
from benchmarks.servers import Server, free_port

_LOGS = CACHE / "logs"
_COLUMNS = {
    "out tok/s": ("output_tok_s", ".0f"),
    "total tok/s": ("total_tok_s", ".0f"),
    "mean TTFT ms": ("mean_ttft_ms", ".0f"),
    "median TTFT ms": ("median_ttft_ms", ".0f"),
    "p99 TTFT ms": ("p99_ttft_ms", ".0f"),
    "mean ITL ms": ("mean_itl_ms", ".1f"),
    "p99 ITL ms": ("p99_itl_ms", ".0f"),
    "tok/chunk": ("tokens_per_chunk", ".2f"),
}


@dataclass(frozen=True)
class Row:
    """One side's run of one workload in one repeat, with what is known of its server."""

    side: str
    repeat: int
    start_s: float
    peak_rss_bytes: int
    result: Result


def main() -> None:
    args = _parser().parse_args()
    signal.signal(signal.SIGTERM, _exit)  # unwinds, so that the running server is stopped
    known = WORKLOADS if args.shape == "135m" else WORKLOADS_1B
    workloads = [known[name] for name in (args.workloads.split(",") if args.workloads else known)]
    sides = [kitfox_side(name, args.program, arguments) for name, arguments in map(_named, args.kitfox)]
    sides += [peer(name, args.shape) for name in args.peers.split(",") if name]
    for side in sides:
        try:
            side.install()
        except CannotInstallError as error:
            sys.exit(f"{side.name}: {error}")
        for workload in workloads:
            side.command(0, workload)  # makes the checkpoint it serves
    words = read_words(made(f"{SHAPES[args.shape]}-bf16"))
    rows: list[Row] = []
    for repeat in range(args.repeats):
        for side in sides if repeat % 2 == 0 else reversed(sides):
            for row in measure(side, workloads, words, repeat):
                rows.append(row)
                _report_progress(row)
                _write(args.out, sys.argv[1:], rows)
    _print_tables(rows, workloads, [side.name for side in sides])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kitfox",
        action="append",
        required=True,
        metavar="[NAME=]ARGUMENTS",
        help="MODEL and flags of one `kitfox serve`; several may be given, the first is the one ratios are of",
    )
    parser.add_argument("--program", default=".venv/bin/kitfox", help="the kitfox to run (default %(default)s)")
    parser.add_argument("--peers", default="", help=f"comma-separated, of {', '.join(PEERS)}")
    parser.add_argument("--shape", choices=SHAPES, default="135m", help="which model the peers serve")
    parser.add_argument("--workloads", default="", help="comma-separated (default all)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=CACHE / "results.json")
    return parser


def _named(text: str) -> tuple[str, list[str]]:
    name, equals, arguments = text.partition("=")
    if not equals or not name.replace("-", "").isalnum():
        name, arguments = "kitfox", text
    return name, [os.path.expanduser(argument) for argument in shlex.split(arguments)]


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def measure(side: Side, workloads: Sequence[Workload], words: dict[int, str], repeat: int) -> Iterator[Row]:
    """One turn of a side: start it, run the workloads, stop it; more often where workloads need other settings."""
    waiting = list(workloads)
    while waiting:
        port = free_port()
        command = side.command(port, waiting[0])
        log = _LOGS / f"{side.name}-{repeat}-{waiting[0].name}.log"
        with Server(command, port, log, side.env) as server:
            target = Target(port, side.model_name, words, side.extra, side.text_prompts)
            while waiting and side.command(port, waiting[0]) == command:
                result = run(target, waiting.pop(0), repeat)
                yield Row(side.name, repeat, server.start_s, server.peak_rss_bytes(), result)


def _report_progress(row: Row) -> None:
    r = row.result
    print(
        f"{time.strftime('%H:%M:%S')} {row.side} {r.workload} #{row.repeat}: {r.output_tok_s:.1f} tok/s, TTFT"
        f" {r.mean_ttft_ms:.0f} ms, ITL {r.mean_itl_ms:.1f} ms, {r.failures} failed {r.errors or ''}",
        file=sys.stderr,
        flush=True,
    )


def _write(path: Path, arguments: list[str], rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"arguments": arguments, "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _print_tables(rows: list[Row], workloads: Sequence[Workload], names: Sequence[str]) -> None:
    for workload in workloads:
        print(f"\n### {workload.name}\n")
        print("| side |", " | ".join(_COLUMNS), "| failed |\n|" + "---|" * (len(_COLUMNS) + 2))
        results = {n: [r.result for r in rows if r.side == n and r.result.workload == workload.name] for n in names}
        for name in names:
            cells = [_spread([getattr(r, key) for r in results[name]], form) for key, form in _COLUMNS.values()]
            print(f"| {name} |", " | ".join(cells), f"| {sum(r.failures for r in results[name])} |")
        for name in names[1:]:
            cells = [_ratio(results[names[0]], results[name], key) for key, _ in _COLUMNS.values()]
            print(f"| {names[0]} / {name} |", " | ".join(cells), "| |")
    print("\n| side | start s | peak RSS GiB |\n|---|---|---|")
    for name in names:
        mine = [row for row in rows if row.side == name]
        rss = [row.peak_rss_bytes / 2**30 for row in mine]
        print(f"| {name} | {_spread([row.start_s for row in mine], '.1f')} | {_spread(rss, '.2f')} |")


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def _ratio(mine: list[Result], theirs: list[Result], key: str) -> str:
    other = statistics.median(getattr(r, key) for r in theirs)
    return f"{statistics.median(getattr(r, key) for r in mine) / other:.2f}x" if other else "-"


if __name__ == "__main__":
    main()
