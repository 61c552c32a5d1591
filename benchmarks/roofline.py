"""How close the compiled kernels come to what the machine can do: shares of its measured peaks.

    .venv/bin/python -m benchmarks.roofline [--threads N]

Peaks are measured in the same run (benchmarks/peaks.cpp; AVX-512 with VNNI, which tile registers may exceed). Products
are all linears of one step of the default model's shape, 30 layers in one program, so that weights come from memory as
they do when serving; attention is one layer of it. A share is of the arithmetic peak or of the read bandwidth,
whichever limits.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kitfox.attention.backend import ForwardBatch
from kitfox.attention.native import NativeAttention
from kitfox.kernels import library
from kitfox.kernels.abi import OpCode, OpStruct, StepStruct
from kitfox.kernels.native import NativeKernels
from kitfox.kernels.recording import Call

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 576, 1536, 9, 3, 64, 30
BLOCK = 32
SHAPES = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
ROWS = (1, 8, 32, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    torch.set_num_threads(1)
    peaks = measure_peaks(args.threads)
    print(
        f"{args.threads} threads: {peaks['float'] / 1e9:.0f} GFLOP/s float32, {peaks['int16'] / 1e9:.0f} GOP/s int16, "
        f"{peaks['int8'] / 1e9:.0f} GOP/s int8, {peaks['read'] / 1e9:.1f} GB/s read"
    )
    with torch.inference_mode():
        for name, dtype, int8 in (("int8", torch.float32, True), ("bfloat16", torch.bfloat16, False)):
            products(name, make_kernels(args.threads, dtype, int8=int8), peaks)
        for kv_dtype, peak in ((torch.bfloat16, "float"), (torch.int16, "int16")):
            attention(make_kernels(args.threads, torch.float32, kv_dtype=kv_dtype), peaks, peak)


def make_kernels(
    threads: int, dtype: torch.dtype, *, kv_dtype: torch.dtype = torch.bfloat16, int8: bool = False
) -> NativeKernels:
    loaded = library.load()
    assert loaded is not None, library.describe()
    return NativeKernels(loaded, library.describe(), dtype=dtype, kv_dtype=kv_dtype, num_threads=threads, int8=int8)


def measure_peaks(threads: int) -> dict[str, float]:
    """Operations per second of float32, int16 and int8, and bytes read per second."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peaks"
        source = Path(__file__).with_name("peaks.cpp")
        flags = ["-O2", "-std=c++17", "-pthread", "-mavx512f", "-mavx512vnni"]
        subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True)
        answer = subprocess.run([str(program), str(threads)], check=True, capture_output=True, text=True)
    return json.loads(answer.stdout)


def products(name: str, kernels: NativeKernels, peaks: dict[str, float]) -> None:
    layers = [[kernels.matrix(torch.randn(shape) * 0.02) for shape in SHAPES] for _ in range(LAYERS)]
    num_bytes = sum(matrix.nbytes for layer in layers for matrix in layer)
    weights = LAYERS * sum(rows * columns for rows, columns in SHAPES)
    for num_rows in ROWS:
        calls: list[Call] = []
        sources: dict[int, dict[str, Any]] = {}
        # As in a program, layers write where those before them did: what is written stays in the caches.
        outs = {rows: torch.empty(num_rows, rows) for rows, _ in SHAPES}
        for width in (HIDDEN, INNER):
            x = torch.randn(num_rows, width)
            sources[width] = {"x": x}
            if name == "int8":
                codes = kernels.empty_codes(x, layers[0][0].group)
                calls.append(Call(OpCode.QUANTIZE, {"x": x}, {"codes": codes}, {"size": width}))
                sources[width] = {"codes": codes}
        for matrix in (matrix for layer in layers for matrix in layer):
            constants = {"weight": matrix.address, "softcap": 0.0}
            operands = {**sources[matrix.shape[1]], "bias": None}
            calls.append(Call(OpCode.LINEAR, operands, {"out": outs[matrix.shape[0]]}, constants))
        ops = (OpStruct * len(calls))(*(call.to_struct(starts_phase=True) for call in calls))

        def step(ops: ctypes.Array[OpStruct] = ops, num_rows: int = num_rows) -> None:
            kernels.run(ops, StepStruct(num_rows=num_rows), num_rows)

        seconds = best_of(step)
        by_arithmetic = 2 * weights * num_rows / peaks["int8" if name == "int8" else "float"]
        report(f"{name} products, {num_rows} rows", seconds, by_arithmetic, num_bytes / peaks["read"])


def attention(kernels: NativeKernels, peaks: dict[str, float], peak: str) -> None:
    """One layer: a prompt, a few tokens that are verified, and decodes."""
    name = str(kernels.kv_dtype).removeprefix("torch.")
    for num_requests, num_new, context in ((1, 2048, 2048), (1, 5, 512), (1, 5, 2048), (8, 1, 2048)):
        num_blocks = context // BLOCK
        cache = kernels.make_kv_cache(num_requests * num_blocks, BLOCK, KV_HEADS, HEAD_DIM)
        positions = torch.arange(context - num_new, context).repeat(num_requests)
        table = torch.randperm(num_requests * num_blocks).view(num_requests, num_blocks).int()
        batch = ForwardBatch(
            token_ids=torch.zeros(num_requests * num_new, dtype=torch.int64),
            positions=positions,
            slot_mapping=torch.zeros(num_requests * num_new, dtype=torch.int64),
            block_table=table,
            seq_lens=torch.full((num_requests,), context, dtype=torch.int32),
            query_start_loc=torch.arange(num_requests + 1, dtype=torch.int32) * num_new,
            kv_caches=[cache],
            attention=NativeAttention(kernels),
        )
        batch.attention.plan(batch)
        write_random(kernels, cache)
        q = torch.randn(num_requests * num_new, HEADS * HEAD_DIM)

        def step(batch: ForwardBatch = batch, q: torch.Tensor = q) -> None:
            batch.attention.run(0, q, batch, scale=HEAD_DIM**-0.5, window=None, softcap=None)

        pairs = num_requests * sum(range(context - num_new + 1, context + 1))
        by_arithmetic = 4 * pairs * HEADS * HEAD_DIM / peaks[peak]
        by_memory = cache.nbytes / peaks["read"]
        what = f"{name} attention, {num_requests} x {num_new} at {context}"
        report(what, best_of(step), by_arithmetic, by_memory)


def write_random(kernels: NativeKernels, cache: torch.Tensor) -> None:
    """Keys and values to every slot."""
    slots = torch.arange(cache.shape[0] * BLOCK)
    k, v = torch.randn(2, len(slots), KV_HEADS * HEAD_DIM)
    unturned = torch.stack((torch.ones(1, HEAD_DIM // 2), torch.zeros(1, HEAD_DIM // 2)), dim=1)
    positions = torch.zeros_like(slots)
    step = StepStruct(positions=positions.data_ptr(), slot_mapping=slots.data_ptr())
    q = torch.zeros(len(slots), HEADS * HEAD_DIM)
    kernels.rotate_and_write(q, k, v, unturned, cache, q_norm=None, k_norm=None, eps=0.0, offset=0.0, step=step)


def best_of(step: Callable[[], None], seconds: float = 2.0) -> float:
    """The shortest time of a step, among those of so many seconds."""
    step()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times)


def report(name: str, seconds: float, by_arithmetic: float, by_memory: float) -> None:
    limit = "arithmetic" if by_arithmetic > by_memory else "memory"
    share = max(by_arithmetic, by_memory) / seconds
    print(f"{name:<36} {seconds * 1e3:9.3f} ms  {share:4.0%} of {limit}")


if __name__ == "__main__":
    main()
