"""What guesses are worth: kitfox without, with n-grams, with suffixes, and with as many of those as pay, in one run.

    .venv/bin/python -m benchmarks.speculation --out DIR [--concurrency 1,4,16] [--workloads copy,chat,agent]

A workload at a concurrency is one `kitfox compare`: sides take turns, each with caches of its own. `copy` is
benchmarks/copy_heavy.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

SIDES = {
    "off": "",
    "ngram": "--spec-method ngram --no-adaptive-speculation",
    "suffix": "--spec-method suffix --no-adaptive-speculation",
    "auto": "--spec-method suffix",
}
COPY = Path(__file__).with_name("copy_heavy.jsonl")
WORKLOADS = {
    "copy": ["--workload", f"jsonl:{COPY}", "--output-len", "400", "--no-ignore-eos"],
    "chat": ["--workload", "chat", "--num-requests", "16"],
    "agent": ["--workload", "agent", "--num-requests", "4"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokenizer", type=Path, help="its tokenizer, where servers need not be asked")
    args = parser.parse_args()
    sides = [f"{name}=kitfox:{args.model} {SIDES[name]}".strip() for name in args.sides.split(",")]
    for workload in args.workloads.split(","):
        for concurrency in args.concurrency.split(","):
            folder = args.out / f"{workload}-{concurrency}"
            command = [sys.executable, "-m", "kitfox", "compare", *sides, *WORKLOADS[workload]]
            command += ["--concurrency", concurrency, "--temperature", "0", "--repeats", str(args.repeats)]
            command += ["--metric", "output_tokens_per_s", "--output", str(folder)]
            if args.tokenizer is not None:
                command += ["--tokenizer", str(args.tokenizer)]
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
            print(f"{workload} at {concurrency}: {shown(folder)}", flush=True)


def shown(folder: Path) -> str:
    """Each side's rate, and its ratio to the first side's with the interval."""
    summary = json.loads((folder / "summary.json").read_text())
    rates = summary["metrics"]["output_tokens_per_s"]
    first = next(iter(rates))
    texts = [f"{first} {rates[first]['value']:.0f} tok/s"]
    for contrast in summary["contrasts"]:
        if contrast["metric"] == "output_tokens_per_s" and first in (contrast["side"], contrast["other"]):
            value, low, high = (contrast["ratio"][name] for name in ("value", "low", "high"))
            name = contrast["other"]
            if name == first:
                name = contrast["side"]
            else:
                value, low, high = 1 / value, 1 / high, 1 / low
            texts.append(f"{name} {value:.2f} [{low:.2f}, {high:.2f}]")
    return ", ".join(texts)


if __name__ == "__main__":
    main()
