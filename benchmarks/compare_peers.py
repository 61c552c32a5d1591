"""Compare kitfox end to end with other servers: `kitfox compare` over five workloads, and a table of ratios.

    .venv/bin/python -m benchmarks.compare_peers --kitfox "DIR --quantization int8" --peers vllm-w8a8,openvino-q8_0

Every workload becomes a folder with the whole report; the tables have kitfox's estimates, and their ratios to each
peer's with the 95 % interval over repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.paths import CACHE
from benchmarks.peers import PEERS, SHAPES, CannotInstallError, peer

# Of `kitfox compare`, by workload; the last is how many requests come at once.
WORKLOADS = {
    "W1": ("--workload random --input-len 220 --output-len 128 --length-ratio 0.5 --num-requests 24", 8),
    "W2": ("--workload prefix --num-prefixes 4 --prefix-len 1024 --input-len 64 --output-len 32 --num-requests 16", 4),
    "W3": ("--workload random --input-len 128 --output-len 128 --num-requests 3", 1),
    "W4": ("--workload random --input-len 2048 --output-len 8 --num-requests 3", 1),
    "W5": ("--workload random --input-len 64 --output-len 128 --num-requests 32", 32),
}
WORKLOADS_1B = {
    "W1": ("--workload random --input-len 220 --output-len 64 --length-ratio 0.5 --num-requests 8", 8),
    "W3": ("--workload random --input-len 128 --output-len 64 --num-requests 2", 1),
    "W4": ("--workload random --input-len 2048 --output-len 8 --num-requests 2", 1),
}
# The same weights in another file, and what else engines cannot have alike.
DIFFERENCES = ("model", "precision", "kv_precision", "context_length", "threads")
METRICS = ("output_tokens_per_s", "ttft_mean", "ttft_p99", "itl_mean", "itl_p99", "peak_memory_bytes")


def main() -> None:
    args = _parser().parse_args()
    known = WORKLOADS if args.shape == "135m" else WORKLOADS_1B
    peers = {name: peer(name, args.shape) for name in args.peers.split(",") if name}
    for name, each in peers.items():
        try:
            each.install()
        except CannotInstallError as error:
            sys.exit(f"{name}: {error}")
    own = [_own_side(text) for text in args.kitfox]
    flags = ["--repeats", str(args.repeats), *(word for each in peers.values() for word in each.flags)]
    for workload in args.workloads.split(",") if args.workloads else known:
        words, concurrency = known[workload]
        sides = [*own, *(f"{name}={each.side(concurrency)}" for name, each in peers.items())]
        print_ratios(
            workload, compare(sides, [*words.split(), "--concurrency", str(concurrency), *flags], args.out / workload)
        )


def compare(sides: list[str], flags: list[str], out: Path) -> dict[str, Any]:
    """One `kitfox compare`; its summary."""
    allowed = [word for field in DIFFERENCES for word in ("--allow-difference", field)]
    program = Path(sys.executable).with_name("kitfox")
    subprocess.run([program, "compare", *sides, *flags, *allowed, "--output", out], check=True, stdout=sys.stderr)
    return json.loads((out / "summary.json").read_text())


def print_ratios(workload: str, summary: dict[str, Any]) -> None:
    """A table of the first side's estimates, and of its ratios to the others."""
    first, *others = (side["name"] for side in summary["sides"])
    print(f"\n### {workload}\n\n| |", " | ".join(METRICS), "|\n|" + "---|" * (len(METRICS) + 1))
    estimates = [summary["metrics"].get(metric, {}).get(first) for metric in METRICS]
    print(f"| {first} |", " | ".join("-" if each is None else f"{each['value']:.4g}" for each in estimates), "|")
    for other in others:
        print(
            f"| to {other} |", " | ".join(_ratio(summary, metric, first, other) for metric in METRICS), "|", flush=True
        )


def _ratio(summary: dict[str, Any], metric: str, first: str, other: str) -> str:
    """ "2.10x [2.05, 2.16]"; the summary may have the pair the other way round."""
    for contrast in summary["contrasts"]:
        ratio = contrast["ratio"]
        if (
            contrast["metric"] != metric
            or {contrast["side"], contrast["other"]} != {first, other}
            or not ratio["value"]
        ):
            continue
        values = [ratio["value"], ratio["low"], ratio["high"]]
        if contrast["side"] == other:
            values = [1 / ratio["value"]] + [1 / limit if limit else None for limit in (ratio["high"], ratio["low"])]
        limits = f" [{values[1]:.2f}, {values[2]:.2f}]" if None not in values else ""
        return f"{values[0]:.2f}x{limits}"
    return "-"


def _own_side(text: str) -> str:
    name, equals, arguments = text.partition("=")
    if not equals or not name.replace("-", "").isalnum():
        name, arguments = "kitfox", text
    return f"{name}=kitfox:{' '.join(map(os.path.expanduser, arguments.split()))}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kitfox",
        action="append",
        required=True,
        metavar="[NAME=]ARGUMENTS",
        help="MODEL and flags of one `kitfox serve`; several may be given, the first is the one ratios are of",
    )
    parser.add_argument("--peers", default="", help=f"comma-separated, of {', '.join(PEERS)}")
    parser.add_argument("--shape", choices=SHAPES, default="135m", help="which model the peers serve")
    parser.add_argument("--workloads", default="", help="comma-separated (default all)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=CACHE / "results" / time.strftime("%Y-%m-%d-%H%M%S"))
    return parser


if __name__ == "__main__":
    main()
