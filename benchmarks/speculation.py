"""What guesses are worth: kitfox without, with n-grams, with suffixes, and with as many of those as pay, in one run.

    .venv/bin/python -m benchmarks.speculation --out DIR [--concurrency 1,4,16] [--workloads copy,chat,agent]
    .venv/bin/python -m benchmarks.speculation --out DIR --concurrency 1 --peer llama.cpp-q4_1

A workload at a concurrency is one `kitfox compare`: sides take turns, each with caches of its own. `copy` is
benchmarks/copy_heavy.jsonl. With --peer six requests are sent, and the sides are kitfox and that server, each without
guesses and with its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.compare_peers import DIFFERENCES
from benchmarks.make_models import made
from benchmarks.peers import peer

SIDES = {
    "off": "",
    "ngram": "--spec-method ngram --no-adaptive-speculation",
    "suffix": "--spec-method suffix --no-adaptive-speculation",
    "auto": "--spec-method suffix",
}
# Peers by the first part of their names: the flags for n-grams, of the lengths that do best here.
PEERS_NGRAMS = {
    "vllm": """--speculative-config '{"method":"ngram","num_speculative_tokens":8,"prompt_lookup_max":4}'""",
    "llama.cpp": "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8",
}
PEERS_MODELS = {"vllm-bf16": "smollm2-135m-bf16", "llama.cpp-bf16": "smollm2-135m-bf16"}
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
    parser.add_argument("--peer", help="a server of benchmarks.peers")
    parser.add_argument("--tokenizer", type=Path, help="its tokenizer, where servers need not be asked")
    args = parser.parse_args()
    names, model, extra = args.sides.split(","), args.model, []
    if args.peer:
        peer(args.peer, "135m").install()
        names, model = ["off", "auto"], str(made(PEERS_MODELS[args.peer])) if args.peer in PEERS_MODELS else model
        extra = [word for field in DIFFERENCES for word in ("--allow-difference", field)]
        extra += ["--num-requests", "6"]  # half of `copy`: some take minutes for that
    for workload in args.workloads.split(","):
        for concurrency in args.concurrency.split(","):
            folder = args.out / f"{workload}-{concurrency}"
            sides = [f"{name}=kitfox:{model} {SIDES[name]}".strip() for name in names]
            if args.peer:
                plain = peer(args.peer, "135m").side(int(concurrency))
                sides += [f"peer={plain}", f"peer-ngram={plain} {PEERS_NGRAMS[args.peer.partition('-')[0]]}"]
            command = [sys.executable, "-m", "kitfox", "compare", *sides, *WORKLOADS[workload], *extra]
            command += ["--concurrency", concurrency, "--temperature", "0", "--repeats", str(args.repeats)]
            command += ["--metric", "output_tokens_per_s", "--output", str(folder)]
            if args.tokenizer is not None:
                command += ["--tokenizer", str(args.tokenizer)]
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
            print(f"{workload} at {concurrency}: {shown(folder)}", flush=True)


def shown(folder: Path) -> str:
    """The first side's rate, and the ratios of the others to it, and of a peer to itself, with their intervals."""
    summary = json.loads((folder / "summary.json").read_text())
    rates = summary["metrics"]["output_tokens_per_s"]
    first, *others = rates
    texts = [
        f"{first} {rates[first]['value']:.0f} tok/s",
        *(f"{name} {ratio(summary, name, first)}" for name in others),
    ]
    if "peer" in others:
        texts.append(f"peer-ngram to peer {ratio(summary, 'peer-ngram', 'peer')}")
    return ", ".join(texts)


def ratio(summary: dict[str, Any], side: str, other: str) -> str:
    """ "1.50 [1.40, 1.60]": how many times as many tokens a second."""
    for contrast in summary["contrasts"]:
        if contrast["metric"] == "output_tokens_per_s" and {contrast["side"], contrast["other"]} == {side, other}:
            value, low, high = (contrast["ratio"][name] for name in ("value", "low", "high"))
            if contrast["side"] != side:
                value, low, high = 1 / value, 1 / high, 1 / low
            return f"{value:.2f} [{low:.2f}, {high:.2f}]"
    return "unknown"


if __name__ == "__main__":
    main()
