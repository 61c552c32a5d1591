"""Compare the working tree with another commit of kitfox in one run: did a change make anything slower?

    .venv/bin/python -m benchmarks.compare_commits COMMIT "MODEL --quantization int8" --workloads W1,W3,W5

The commit is checked out and set up in the cache, compiled kernels included. Sides take turns as in compare_peers; a
ratio of output tokens per second below --least on any workload is reported and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.compare_peers import measure
from benchmarks.load import WORKLOADS, read_words
from benchmarks.make_models import made
from benchmarks.paths import CACHE
from benchmarks.peers import SHAPES, kitfox_side

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("arguments", help="MODEL and flags of `kitfox serve`, the same for both")
    parser.add_argument("--workloads", default="W1,W3,W5")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--least", type=float, default=0.95, help="smallest ratio that is no regression")
    args = parser.parse_args()
    arguments = shlex.split(args.arguments)
    sides = [
        kitfox_side("now", str(ROOT / ".venv/bin/kitfox"), arguments),
        kitfox_side("before", str(checked_out(args.commit) / ".venv/bin/kitfox"), arguments),
    ]
    workloads = [WORKLOADS[name] for name in args.workloads.split(",")]
    words = read_words(made(f"{SHAPES['135m']}-bf16"))
    speeds: dict[tuple[str, str], list[float]] = {}
    for repeat in range(args.repeats):
        for side in sides if repeat % 2 == 0 else reversed(sides):
            for row in measure(side, workloads, words, repeat):
                speeds.setdefault((row.result.workload, side.name), []).append(row.result.output_tok_s)
    ratios = {}
    for workload in workloads:
        now, before = speeds[workload.name, "now"], speeds[workload.name, "before"]
        ratios[workload.name] = statistics.median(now) / statistics.median(before)
        spread = " and ".join(f"{min(values):.0f}-{max(values):.0f}" for values in (now, before))
        print(f"{workload.name}: {ratios[workload.name]:.2f} of {args.commit} (output tok/s {spread})")
    sys.exit(any(ratio < args.least for ratio in ratios.values()))


def checked_out(commit: str) -> Path:
    """A work tree of a commit, set up; made once."""
    sha = subprocess.run(
        ["git", "rev-parse", "--short=12", commit], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    tree = CACHE / "commits" / sha
    if not tree.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), sha], cwd=ROOT, check=True)
    subprocess.run(["make", "setup"], cwd=tree, check=True)
    return tree


if __name__ == "__main__":
    main()
