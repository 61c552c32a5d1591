"""A load generator for any server with OpenAI's streaming `/v1/completions`.

    .venv/bin/python -m benchmarks.load --port 8000 --model m --tokenizer DIR --workloads W1,W3

One process, asyncio on bare sockets with HTTP and SSE read by hand: it shares its cores with the server it measures.
Prompts are arrays of token ids, each drawn from the tokens that are a space and ASCII letters. So their length is
exact, their text reads back as the same tokens, and what the model adds is mostly whole characters: servers hold back
chunks that end inside one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import statistics
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_WORD = re.compile(r"[\u0120\u2581][A-Za-z]+")
_TIMEOUT_S = 900.0
_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 4, 8


@dataclass(frozen=True)
class Workload:
    """A closed loop: `concurrency` clients, each sending its next request when the last has ended.

    Attributes:
        ratio: lengths are uniform within this share of the mean, both ways.
        num_prefixes: that many shared beginnings of `prefix_len` tokens, in random order.
    """

    name: str
    input_len: int
    output_len: int
    requests: int
    concurrency: int
    ratio: float = 0.0
    num_prefixes: int = 0
    prefix_len: int = 0


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", input_len=220, output_len=128, requests=24, concurrency=8, ratio=0.5),
        Workload("W2", input_len=64, output_len=32, requests=16, concurrency=4, num_prefixes=4, prefix_len=1024),
        Workload("W3", input_len=128, output_len=128, requests=3, concurrency=1),
        Workload("W4", input_len=2048, output_len=8, requests=3, concurrency=1),
        Workload("W5", input_len=64, output_len=128, requests=32, concurrency=32),
    )
}
WORKLOADS_1B = {
    w.name: w
    for w in (
        Workload("W1", input_len=220, output_len=64, requests=8, concurrency=8, ratio=0.5),
        Workload("W3", input_len=128, output_len=64, requests=2, concurrency=1),
        Workload("W4", input_len=2048, output_len=8, requests=2, concurrency=1),
    )
}


@dataclass(frozen=True)
class Target:
    """Where requests go and what each carries besides prompt, length and temperature.

    Attributes:
        words: ids that prompts are drawn from, with their texts.
        text_prompts: send the prompt's text; the server takes no token ids.
    """

    port: int
    model: str
    words: dict[int, str]
    extra: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    text_prompts: bool = False


@dataclass
class Record:
    """One request. Times are seconds on one clock; `chunks` holds the arrival of every chunk with text or ids."""

    prompt_tokens: int
    asked_tokens: int
    sent: float
    chunks: list[float] = field(default_factory=list)
    output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Result:
    """One run. ITL is the gap between chunks, which is a token's time where every token has its chunk."""

    workload: str
    failures: int
    duration_s: float
    output_tok_s: float
    total_tok_s: float
    mean_ttft_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    mean_itl_ms: float
    p99_itl_ms: float
    tokens_per_chunk: float
    client_cpu_s: float
    errors: list[str]


def read_words(tokenizer: Path) -> dict[int, str]:
    """Ids and texts of the whole words in a directory's `tokenizer.json`."""
    vocab = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return {token_id: " " + text[1:] for text, token_id in vocab.items() if _WORD.fullmatch(text)}


def run(target: Target, workload: Workload, seed: int) -> Result:
    """Warm the server up with other prompts, then measure one run of the workload."""
    records, cpu_s = asyncio.run(_run(target, workload, seed))
    return _summarise(workload.name, records, cpu_s)


async def _run(target: Target, workload: Workload, seed: int) -> tuple[list[Record], float]:
    rng = random.Random(f"warm-up {workload.name} {seed}")
    warm_up = _requests(target, workload, rng)[: min(workload.concurrency, _WARM_UP_REQUESTS)]
    await _closed_loop(target, [(ids, _WARM_UP_TOKENS) for ids, _ in warm_up], workload.concurrency)
    requests = _requests(target, workload, random.Random(f"{workload.name} {seed}"))
    before = resource.getrusage(resource.RUSAGE_SELF)
    records = await _closed_loop(target, requests, workload.concurrency)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return records, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _requests(target: Target, workload: Workload, rng: random.Random) -> list[tuple[list[int], int]]:
    ids = sorted(target.words)

    def length(mean: int) -> int:
        return rng.randint(round(mean * (1 - workload.ratio)), round(mean * (1 + workload.ratio)))

    prefixes = [rng.choices(ids, k=workload.prefix_len) for _ in range(workload.num_prefixes)] or [[]]
    order = [prefixes[i % len(prefixes)] for i in range(workload.requests)]
    rng.shuffle(order)
    return [(prefix + rng.choices(ids, k=length(workload.input_len)), length(workload.output_len)) for prefix in order]


async def _closed_loop(target: Target, requests: list[tuple[list[int], int]], concurrency: int) -> list[Record]:
    waiting = iter(requests)
    records: list[Record] = []

    async def client() -> None:
        for ids, output_len in waiting:
            records.append(await _send(target, ids, output_len))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return records


async def _send(target: Target, ids: list[int], output_len: int) -> Record:
    prompt = "".join(target.words[i] for i in ids) if target.text_prompts else ids
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    record = Record(len(ids), output_len, time.perf_counter())
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async for data in _post(target.port, json.dumps(body).encode()):
                _take(record, json.loads(data))
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"[:300]
    if record.error is None and record.output_tokens != output_len:
        record.error = f"{record.output_tokens} tokens instead of {output_len}"
    return record


def _take(record: Record, event: dict[str, Any]) -> None:
    if any(choice.get("text") or choice.get("token_ids") for choice in event.get("choices", ())):
        record.chunks.append(time.perf_counter())
    if usage := event.get("usage"):
        record.output_tokens = usage["completion_tokens"]


async def _post(port: int, body: bytes) -> AsyncIterator[bytes]:
    """Send one request and yield the data of each server-sent event, up to [DONE] or the response's end.

    Raises:
        OSError: no connection, or it broke.
        EOFError: the response was cut off.
        ValueError: a status other than 200.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        status = head.splitlines()[0].decode()
        if " 200 " not in status:
            raise ValueError(f"{status}: {(await reader.read(500)).decode(errors='replace')}")
        buffer = b""
        async for piece in _chunks(reader, b"transfer-encoding: chunked" in head.lower()):
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield data
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        while piece := await reader.read(65536):
            yield piece
        return
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


def _summarise(name: str, records: list[Record], cpu_s: float) -> Result:
    good = [r for r in records if r.error is None and r.chunks]
    if not good:
        raise RuntimeError(f"{name}: every request failed: {records[0].error}")
    duration = max(r.chunks[-1] for r in good) - min(r.sent for r in records)
    output_tokens = sum(r.output_tokens for r in good)
    ttfts = [r.chunks[0] - r.sent for r in good]
    gaps = [later - sooner for r in good for sooner, later in zip(r.chunks, r.chunks[1:], strict=False)]
    return Result(
        workload=name,
        failures=len(records) - len(good),
        duration_s=duration,
        output_tok_s=output_tokens / duration,
        total_tok_s=(output_tokens + sum(r.prompt_tokens for r in good)) / duration,
        mean_ttft_ms=1e3 * statistics.fmean(ttfts),
        median_ttft_ms=1e3 * statistics.median(ttfts),
        p99_ttft_ms=1e3 * _percentile(ttfts, 0.99),
        mean_itl_ms=1e3 * statistics.fmean(gaps) if gaps else 0.0,
        p99_itl_ms=1e3 * _percentile(gaps, 0.99) if gaps else 0.0,
        tokens_per_chunk=output_tokens / sum(len(r.chunks) for r in good),
        client_cpu_s=cpu_s,
        errors=sorted({r.error for r in records if r.error})[:5],
    )


def _percentile(values: Iterable[float], share: float) -> float:
    """Linear between the two nearest, as numpy does."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True, help="name the server answers to")
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory with the model's tokenizer.json")
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    target = Target(args.port, args.model, read_words(args.tokenizer))
    for name in args.workloads.split(","):
        print(json.dumps(asdict(run(target, WORKLOADS[name], args.seed))), flush=True)


if __name__ == "__main__":
    main()
