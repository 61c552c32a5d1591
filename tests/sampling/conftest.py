"""Samplers of both kinds, the compiled one with as many threads as a test likes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kitfox.kernels import library
from kitfox.kernels.native import NativeKernels
from kitfox.sampling import NativeSampler, Sampler


@pytest.fixture(scope="session")
def make_native() -> Callable[[int], NativeSampler]:
    """A sampler with a number of threads, which live as long as the process."""
    loaded = library.load()
    if loaded is None:
        pytest.skip("no compiled kernels")

    def make(threads: int) -> NativeSampler:
        kernels = NativeKernels(loaded, "", dtype=torch.float32, kv_dtype=torch.float32, num_threads=threads)
        return NativeSampler(loaded, kernels.context)

    return make


@pytest.fixture(scope="session")
def native(make_native: Callable[[int], NativeSampler]) -> NativeSampler:
    return make_native(1)


@pytest.fixture(params=["numpy", "native"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return Sampler(request.getfixturevalue("native") if request.param == "native" else None)
