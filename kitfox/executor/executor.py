"""The data plane of one process and one device: load the model, size its KV cache, serve steps."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kitfox.config import EngineConfig, ModelConfig
from kitfox.errors import ConfigError
from kitfox.executor.model_runner import ModelRunner
from kitfox.models import make_model
from kitfox.plan import resolve_dtypes, resolve_max_model_len
from kitfox.step import ModelRunnerOutput, SchedulerOutput

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Executor:
    """One model on one device."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        path: Path,
        num_blocks: int,
        on_phase: Callable[[str, float], None] = lambda name, seconds: None,
    ):
        self.device = _choose_device(config.device.device)
        if self.device.type == "cpu":
            torch.set_num_threads(config.device.num_threads or _available_cores())
        dtype, kv_dtype = resolve_dtypes(config, model_config, self.device.type)
        started = time.monotonic()
        self.model = make_model(model_config, TORCH_DTYPES[dtype], self.device)
        if config.model.load_format == "dummy":
            self.model.init_random_weights(config.model.seed)
        else:
            from kitfox.weights.loader import iter_weights

            self.model.load_weights(iter_weights(path, model_config))
        on_phase("load weights", time.monotonic() - started)
        started = time.monotonic()
        kv_shape = (num_blocks, 2, config.cache.block_size, model_config.num_kv_heads, model_config.head_dim)
        kv_caches = [_zeros(kv_shape, TORCH_DTYPES[kv_dtype], self.device) for _ in range(model_config.num_layers)]
        self.runner = ModelRunner(
            self.model,
            kv_caches,
            self.device,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=resolve_max_model_len(config, model_config),
            block_size=config.cache.block_size,
            seed=config.model.seed,
        )
        on_phase("allocate KV cache", time.monotonic() - started)

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; blocks until its tokens are known."""
        return self.runner.execute(scheduled)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on CPU in memory that the system maps only when a block is first written, so a large pool is free."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu or cuda[:N]. Given: {name!r}", param="device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch sees no CUDA device here", param="device")
    return device
