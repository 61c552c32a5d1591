"""Compare the working tree with another commit of kitfox in one run: did a change make anything slower?

    .venv/bin/python -m benchmarks.compare_commits COMMIT "MODEL --quantization int8" --workloads W1,W3,W5

The commit is checked out and set up in the cache, compiled kernels included. Sides take turns as in compare_peers; a
ratio of output tokens per second below --least on any workload is reported and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.compare_peers import WORKLOADS, compare
from benchmarks.paths import CACHE

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("arguments", help="MODEL and flags of `kitfox serve`, the same for both")
    parser.add_argument("--workloads", default="W1,W3,W5")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--least", type=float, default=0.95, help="smallest ratio that is no regression")
    parser.add_argument("--out", type=Path, default=CACHE / "results" / time.strftime("%Y-%m-%d-%H%M%S"))
    args = parser.parse_args()
    before = f"{checked_out(args.commit) / '.venv/bin/kitfox'} serve {args.arguments} --port {{port}}"
    sides = [f"now=kitfox:{args.arguments}", f"before=cmd:{before}"]
    ratios = {}
    for workload in args.workloads.split(","):
        words, concurrency = WORKLOADS[workload]
        flags = [*words.split(), "--concurrency", str(concurrency), "--repeats", str(args.repeats)]
        estimates = compare(sides, flags, args.out / workload)["metrics"]["output_tokens_per_s"]
        ratios[workload] = estimates["now"]["value"] / estimates["before"]["value"]
        print(f"{workload}: {ratios[workload]:.2f} of {args.commit} ({args.out / workload}/report.html)", flush=True)
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
