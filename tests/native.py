"""The compiled kernels, for tests: each instruction set that runs here, with as many threads as a test likes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from kitfox.kernels import library, reference
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


def as_kept(x: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """Heads [..., D] as float32 numbers that a cache of kv_dtype holds exactly; what is not a number stays so."""
    if kv_dtype != torch.int16:
        return x.to(kv_dtype).float()
    codes, scale_log = reference.to_fixed_point(x)
    return codes.float() * torch.exp2(scale_log)


def kept_for_good(x: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """`as_kept`, of numbers that stay the same when they are read and kept again: a largest code that was rounded up to
    2048 takes the next scale then.
    """
    return as_kept(as_kept(x, kv_dtype), kv_dtype)


def cache_from_reference(kv_cache: Tensor, kernels: NativeKernels) -> Tensor:
    """A cache [N, 2, S, K, D] of float32 in the layout of csrc/program.h."""
    num_blocks, _, block_size, num_kv_heads, head_dim = kv_cache.shape
    native = kernels.make_kv_cache(num_blocks, block_size, num_kv_heads, head_dim)
    heads = kv_cache.permute(0, 3, 1, 2, 4)  # [N, K, 2, S, D]
    if kernels.kv_dtype == torch.int16:
        codes, scale_log = reference.to_fixed_point(heads)
        scales = torch.stack((torch.exp2(scale_log[:, :, 0]), scale_log[:, :, 1]), dim=2)
        values = codes[:, :, 1].unflatten(2, (-1, 2)).transpose(-1, -2)  # [N, K, S / 2, D, 2]
        native.flatten(3)[:, :, :, block_size * head_dim :] = scales.flatten(3).view(torch.int16)
    else:
        codes = heads.to(kernels.kv_dtype)
        values = codes[:, :, 1]
    # [N, K, D / 2, S, 2], or in float [N, K, D, S, 1]
    keys = codes[:, :, 0].unflatten(3, (-1, 4 // codes.itemsize)).transpose(2, 3)
    contents = torch.stack((keys.flatten(2), values.flatten(2)), dim=2)
    native.flatten(3)[:, :, :, : block_size * head_dim] = contents
    return native


def cache_to_reference(native: Tensor) -> Tensor:
    """The other way round: [N, 2, S, K, D] float32."""
    num_blocks, num_kv_heads, _, block_size, row = native.shape
    head_dim = row - 2 if native.dtype == torch.int16 else row
    contents = native.flatten(3)[:, :, :, : block_size * head_dim]
    keys = contents[:, :, 0].reshape(num_blocks, num_kv_heads, -1, block_size, 4 // native.itemsize)
    keys = keys.transpose(2, 3).reshape(num_blocks, num_kv_heads, block_size, head_dim).float()
    values = contents[:, :, 1]
    if native.dtype == torch.int16:
        scales = native.flatten(3)[:, :, :, block_size * head_dim :].contiguous().view(torch.float32)
        values = values.unflatten(2, (-1, head_dim, 2)).transpose(-1, -2)
        values = values.reshape(keys.shape) * scales[:, :, 1, :, None].exp2()
        keys = keys * scales[:, :, 0, :, None]
    values = values.reshape(keys.shape).float()
    return torch.stack((keys, values), dim=1).transpose(2, 3)


def poison(cache: Tensor) -> Tensor:
    """Fill a cache with bytes that are NaN in all floating types."""
    cache.view(torch.uint8).fill_(0xFF)
    return cache
