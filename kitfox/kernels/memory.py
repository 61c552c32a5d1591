"""Memory on the host for what every step reads: weights and the KV cache."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch import Tensor

_CACHE_LINE = 64


def lazy_zeros(num_bytes: int, *, huge_pages: bool) -> Tensor:
    """num_bytes zeros, uint8, that take memory only where they are touched.

    Args:
        huge_pages: where the system has them. What is written once, before there are steps, should: with small pages
            every 4 KiB that a step reads cost a lookup. What steps write first should not: they would wait for two
            megabytes to be cleared where they need a few kilobytes. (Prompts took a tenth longer.)
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Private: what processes could share counts as a file, for which most systems have no huge pages.
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    else:
        memory = mmap.mmap(-1, max(num_bytes, 1))
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))[:num_bytes]


def aligned_bytes(num_bytes: int) -> Tensor:
    """Uninitialised memory that starts at a cache line; no thread's loads then cross one for nothing."""
    memory = np.empty(num_bytes + _CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[start : start + num_bytes])
