"""The data plane of one process and one device: load the model, size its KV cache, serve steps."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from kitfox.config import EngineConfig, ModelConfig
from kitfox.errors import ConfigError, WeightsError
from kitfox.executor.model_runner import ModelRunner
from kitfox.garbage import keep_what_is_loaded
from kitfox.kernels import library
from kitfox.kernels.interface import Kernels
from kitfox.kernels.native import NativeKernels
from kitfox.kernels.torch_kernels import TorchKernels
from kitfox.models import make_model
from kitfox.plan import Precision, resolve_max_model_len, resolve_precision
from kitfox.step import FilledBitmasks, ModelRunnerOutput, SchedulerOutput
from kitfox.weights.adapters import read_adapter_config, read_adapter_weights

logger = logging.getLogger("kitfox.executor")

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int16": torch.int16,  # of the cache only
}
# From here on a thread that the system moves costs more than it gains: the others wait for it.
FEWEST_PINNED_THREADS = 8


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
        precision = resolve_precision(config, model_config, self.device.type)
        started = time.monotonic()
        self.kernels = make_kernels(config, precision, self.device)
        self.model = make_model(model_config, self.kernels)
        if config.model.load_format == "dummy":
            self.model.init_random_weights(config.model.seed)
        else:
            from kitfox.weights.loader import iter_weights

            self.model.load_weights(iter_weights(path, model_config, keep_quantized=self.kernels.keeps_quantized))
        on_phase("load weights", time.monotonic() - started)
        started = time.monotonic()
        self._max_rank = config.adapters.max_rank
        self._num_blocks, self._block_size = num_blocks, config.cache.block_size
        self._kv_shapes = [(model_config.num_kv_heads, model_config.head_dim)] * model_config.num_layers
        self._make_runner = partial(
            ModelRunner,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=resolve_max_model_len(config, model_config),
            block_size=config.cache.block_size,
            seed=config.model.seed,
            enforce_eager=config.device.enforce_eager,
        )
        self.runner = self._make_runner(self.model, self._make_kv_caches())
        self._partial_runners: list[ModelRunner] = []
        self._companions: list[Executor] = []
        on_phase("allocate and capture", time.monotonic() - started)
        logger.info(self.description)

    @property
    def description(self) -> str:
        """How steps are computed, for the user: "native kernels (avx512, 2 threads), captured steps"."""
        return f"{self.kernels.description}, {self.runner.description}"

    @property
    def device_name(self) -> str:
        return str(self.device)

    @property
    def num_threads(self) -> int:
        return self.kernels.num_threads

    @property
    def num_kv_layers(self) -> int:
        return len(self._kv_shapes)

    def execute(self, scheduled: SchedulerOutput, bitmasks: FilledBitmasks | None = None) -> ModelRunnerOutput:
        """Run one step; blocks until its tokens are known."""
        return self.runner.execute(scheduled, bitmasks)

    def first_layers(self, count: int) -> ModelRunner:
        """A runner of the model's first `count` layers, over their part of the same KV cache."""
        runner = self._make_runner(self.model.first_layers(count), self.runner.kv_caches)
        self._partial_runners.append(runner)
        return runner

    def load_adapter(self, adapter_id: int, path: Path) -> None:
        """Read a LoRA adapter.

        Raises:
            WeightsError: it is none, or does not fit the model.
        """
        config = read_adapter_config(path)
        if config.rank > self._max_rank:
            limit = f"must be <= {self._max_rank} (--max-lora-rank)"
            raise WeightsError(f"the adapter's rank {limit}. Given: {config.rank}")
        self.model.add_adapter(adapter_id, read_adapter_weights(path, config))

    def remove_adapter(self, adapter_id: int) -> None:
        self.model.remove_adapter(adapter_id)

    def add_layer(self, num_kv_heads: int, head_dim: int, feature_layers: tuple[int, ...]) -> None:
        """Have a head's layer in the KV cache, which is emptied, and the model keep what some of its layers read.

        Raises:
            ConfigError: it has no such layers.
        """
        num_layers = self.model.config.num_layers
        if not all(0 <= layer < num_layers for layer in feature_layers):
            raise ConfigError(f"the head reads layers {feature_layers} of a model that has {num_layers}")
        self._kv_shapes.append((num_kv_heads, head_dim))
        self.model.feature_layers = feature_layers
        self._use_kv_caches(self._make_kv_caches())

    def add_companion(self, executor: Executor) -> None:
        """Have another model's KV cache come and go with this one's."""
        self._companions.append(executor)

    def release_kv_cache(self) -> None:
        """Give the KV cache's memory back, with what is in it; no tokens until `restore_kv_cache`."""
        for companion in self._companions:
            companion.release_kv_cache()
        self._use_kv_caches([])
        gc.unfreeze()  # a recorded forward pass is full of cycles, and was frozen with all that was loaded
        keep_what_is_loaded()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore_kv_cache(self) -> None:
        """Take as much memory again, empty."""
        for companion in self._companions:
            companion.restore_kv_cache()
        self._use_kv_caches(self._make_kv_caches())

    def _use_kv_caches(self, kv_caches: list[torch.Tensor]) -> None:
        for runner in (self.runner, *self._partial_runners):
            runner.use_kv_caches(kv_caches)

    def _make_kv_caches(self) -> list[torch.Tensor]:
        return [self.kernels.make_kv_cache(self._num_blocks, self._block_size, *shape) for shape in self._kv_shapes]


def make_kernels(config: EngineConfig, precision: Precision, device: torch.device) -> Kernels:
    """The best kernels for a device, with their threads started."""
    dtype, kv_dtype = TORCH_DTYPES[precision.dtype], TORCH_DTYPES[precision.kv_dtype]
    int8 = precision.quantization == "int8"
    cores = _cores_to_use(config.device.num_threads) if device.type == "cpu" else []
    if not precision.is_native:
        if cores:
            torch.set_num_threads(len(cores))
        return TorchKernels(device, dtype, kv_dtype, int8=int8, why=precision.why_not_native or "")
    loaded = library.load()
    assert loaded is not None, "the precision says that there are native kernels"
    torch.set_num_threads(1)  # what little torch still computes is not worth waking a second pool for
    pins = config.device.pin_threads
    pin = len(cores) >= FEWEST_PINNED_THREADS if pins is None else pins
    return NativeKernels(
        loaded,
        library.describe(),
        dtype=dtype,
        kv_dtype=kv_dtype,
        num_threads=len(cores),
        cores=cores if pin else (),
        int8=int8,
        keeps_quantized=precision.quantization == "stored",
    )


def _cores_to_use(num_threads: int) -> list[int]:
    """One core a thread. By default those of one NUMA node: a barrier across nodes costs more than the other cores add
    to a small model, and weights are read from the node that packed them.
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if num_threads:
        return [allowed[index % len(allowed)] for index in range(num_threads)]
    nodes = [sorted(set(node) & set(allowed)) for node in _numa_nodes()]
    return max(nodes, key=len, default=[]) or allowed


def _numa_nodes() -> list[list[int]]:
    """The cores of each NUMA node, one of each pair that shares its arithmetic units; empty where unknown."""
    nodes = []
    for path in sorted(Path("/sys/devices/system/node").glob("node*/cpulist")):
        cores = _parse_cores(path.read_text())
        siblings = Path("/sys/devices/system/cpu")
        firsts = []
        for core in cores:
            listed = siblings / f"cpu{core}" / "topology" / "thread_siblings_list"
            shared = _parse_cores(listed.read_text()) if listed.exists() else [core]
            if core == min(shared):
                firsts.append(core)
        nodes.append(firsts)
    return nodes


def _parse_cores(text: str) -> list[int]:
    """ "0-3,8" to [0, 1, 2, 3, 8]."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return [core for first, *last in ranges for core in range(int(first), int(last[0] if last else first) + 1)]


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
