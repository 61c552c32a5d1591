"""The compiled kernels, for tests: each instruction set that runs here, with as many threads as a test likes."""

from __future__ import annotations

import functools

import pytest
import torch

from kitfox.kernels import library
from kitfox.kernels.native import NativeKernels
from kitfox.kernels.torch_kernels import TorchKernels

INSTRUCTION_SETS = library.usable_instruction_sets()
needs_native = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiled kernels that run here")


@functools.cache
def native_kernels(
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
    *,
    isa: str = "",
    num_threads: int = 1,
    int8: bool = False,
    keeps_quantized: bool = False,
) -> NativeKernels:
    """The best instruction set unless one is named; the threads live as long as the process."""
    isa = isa or INSTRUCTION_SETS[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KITFOX_CPU_ISA", isa)
        loaded = library.load()
    assert loaded is not None
    return NativeKernels(
        loaded,
        isa,
        dtype=dtype,
        kv_dtype=kv_dtype,
        num_threads=num_threads,
        int8=int8,
        keeps_quantized=keeps_quantized,
    )


def torch_kernels(dtype: torch.dtype = torch.float32, *, int8: bool = False) -> TorchKernels:
    return TorchKernels(torch.device("cpu"), dtype, dtype, int8=int8)
