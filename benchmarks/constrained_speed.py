"""What constraints cost: tokens a second with a schema beside free text, and another client's gaps while they compile.

    .venv/bin/python -m benchmarks.constrained_speed --heavy ../shared/data/jsonschema/heavy_schemas.jsonl

Starts `kitfox serve`, with further flags of it if given, and measures with `kitfox bench`. The two kinds of answers
take turns and have the same length: the schema's is longer than what is generated. Heavy schemas are sent all at once
while a stream of another client is measured: new ones, and the same requests when the server knows them already.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).with_name("order_schema.json")
MODEL = "smollm2-135m"
PORT = 8950
URL = f"http://127.0.0.1:{PORT}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heavy", type=Path)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=8)
    args, flags = parser.parse_known_args()
    with server(flags):
        compare_with_free_text(args.repeats, args.concurrency)
    if args.heavy is not None:
        schemas = [json.loads(line)["schema"] for line in args.heavy.read_text().splitlines()]
        with server(flags):
            compare_gaps(schemas, args.repeats)


@contextlib.contextmanager
def server(flags: list[str]) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "kitfox", "serve", MODEL, "--port", str(PORT), "--no-enable-prefix-caching", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            with contextlib.suppress(OSError):
                if json.load(urllib.request.urlopen(f"{URL}/health", timeout=2)) is not None:
                    break
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(20)


def bench(*flags: str) -> dict[str, Any]:
    """The summary of one run of `kitfox bench`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kitfox", "bench", "--base-url", URL, "--output", folder, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return dict(json.loads((Path(folder) / "summary.json").read_text()))


def metric(summary: dict[str, Any], name: str) -> float:
    [side] = summary["metrics"][name].values()
    return float(side["value"])


def compare_with_free_text(repeats: int, concurrency: int) -> None:
    ways = {"free text": [], "schema": ["--extra-body", json.dumps(json.loads(SCHEMA.read_text()))]}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats):
        for way in list(ways) if repeat % 2 == 0 else list(ways)[::-1]:
            summary = bench(
                *("--workload", "random", "--input-len", "120", "--output-len", "160", "--num-requests", "48"),
                *("--concurrency", str(concurrency), "--endpoint", "completions", "--seed", str(repeat), *ways[way]),
            )
            rates[way].append(metric(summary, "output_tokens_per_s"))
            print(f"{way}: {rates[way][-1]:.0f} tok/s, failed {metric(summary, 'failed'):.0f}", flush=True)
    shown = {
        way: f"{statistics.mean(values):.0f} ({min(values):.0f}-{max(values):.0f})" for way, values in rates.items()
    }
    ratio = spread(rates["schema"], rates["free text"])
    print(f"at concurrency {concurrency}: {shown} tok/s; schema over free text {ratio}")


def compare_gaps(schemas: list[Any], repeats: int) -> None:
    metrics = {name: f"itl_{name}" for name in ("max", "p99", "mean")}
    gaps: dict[str, dict[str, list[float]]] = {
        way: {name: [] for name in metrics} for way in ("alone", "schemas known", "schemas new")
    }
    for schema in schemas:
        send(body_of(schema), [])
    for repeat in range(repeats):
        for way in list(gaps) if repeat % 2 == 0 else list(gaps)[::-1]:
            outcomes: list[str] = []
            threads = []
            if way != "alone":
                comment = {"$comment": f"repeat {repeat}"} if way == "schemas new" else {}
                for schema in schemas:
                    threads.append(
                        threading.Thread(target=send, args=(body_of({**schema, **comment}), outcomes), daemon=True)
                    )
            starter = threading.Thread(target=start_in_midstream, args=(threads,), daemon=True)
            starter.start()
            summary = bench(
                *("--workload", "random", "--input-len", "100", "--output-len", "400", "--num-requests", "4"),
                *("--concurrency", "1", "--endpoint", "completions", "--seed", str(repeat), "--warm-up", "0"),
            )
            starter.join()
            for thread in threads:
                thread.join(60)
            for name, full_name in metrics.items():
                gaps[way][name].append(1000 * metric(summary, full_name))
            shown = ", ".join(f"{name} {values[-1]:.1f}" for name, values in gaps[way].items())
            print(f"{way}: ITL in ms: {shown}; {outcomes}", flush=True)
    for name in metrics:
        shown = {way: [round(value, 1) for value in gaps[way][name]] for way in gaps}
        print(f"ITL {name} in ms: {shown}")
        for way in ("alone", "schemas known"):
            print(
                f"  {len(schemas)} heavy schemas new, over {way}: {spread(gaps['schemas new'][name], gaps[way][name])}"
            )


def start_in_midstream(threads: list[threading.Thread]) -> None:
    """Start them when the server has been busy for half a second: what comes before the stream is shorter."""
    num_busy = 0
    while num_busy < 10:
        time.sleep(0.05)
        is_busy = json.load(urllib.request.urlopen(f"{URL}/load"))["server_load"] > 0
        num_busy = num_busy + 1 if is_busy else 0
    for thread in threads:
        thread.start()


def body_of(schema: Any) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": MODEL, "prompt": "JSON:", "max_tokens": 1, "response_format": form}
    return json.dumps(body).encode()


def send(body: bytes, outcomes: list[str]) -> None:
    request = urllib.request.Request(f"{URL}/v1/completions", body, {"Content-Type": "application/json"})
    started = time.monotonic()
    try:
        status = urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        status = error.code
    outcomes.append(f"{status} after {time.monotonic() - started:.1f} s")


def spread(numerators: list[float], denominators: list[float]) -> str:
    """The geometric mean of the repeats' ratios, and the extremes."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    return f"{mean:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


if __name__ == "__main__":
    main()
