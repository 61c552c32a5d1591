"""The memory plan: what weights, activations and KV cache will take, and how many blocks that leaves.

Arithmetic on the configuration only: no torch, nothing is loaded. The engine allocates exactly `MemoryPlan.num_blocks`,
so what `kitfox plan` prints is what `kitfox serve` does.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kitfox.config import DTYPE_BYTES, EngineConfig, ModelConfig
from kitfox.errors import ConfigError
from kitfox.kernels import library

# Nobody asked for a particular size: on a CPU the KV cache then leaves the machine's memory to its other users.
AUTOMATIC_KV_BYTES_ON_CPU = 4 << 30
LARGEST_ADVISED_FRACTION = 0.9
SMALLEST_ADVISED_MODEL_LEN = 256
GIB = 1 << 30
# Tokens of one step where the user named no number. While a step lasts every other request waits, and on a CPU one of
# 128 tokens takes as long as one of 2048 on a GPU.
TOKEN_BUDGET = {"cpu": 128, "cuda": 2048}
# What the compiled kernels need: vectors of this many lanes along a head and along a block.
NATIVE_LANES = 16
NATIVE_LARGEST_HEAD_DIM = 256
# A step of more rows passes through the compiled kernels in tiles of this many: their activations then stay in the
# second cache level, and the memory for activations hardly grows with the token budget.
NATIVE_TILE_ROWS = 264


@dataclass(frozen=True)
class Guesser:
    """What speculative decoding takes where a model guesses: a second, smaller one, or a head.

    Attributes:
        model: as it was named.
        weights_bytes: activations included.
        kv_bytes_per_token: in the model's KV cache, or in one of its own.
        own_kv_bytes: most that its own KV cache may take; None where it has a layer in the model's.
    """

    model: str
    weights_bytes: int
    kv_bytes_per_token: int
    own_kv_bytes: int | None


@dataclass(frozen=True)
class MemoryPlan:
    """What will be allocated on the device.

    Attributes:
        model: the model as it was named.
        device: "cpu" or "cuda".
        precision: the form of weights and KV.
        num_parameters: elements of the weights, a tied output embedding counted once.
        activation_bytes: at the step's token budget, logits of max_num_seqs requests included.
        max_model_len: resolved, in tokens.
        num_blocks: KV blocks the engine allocates.
        memory_bytes: memory of the device, or the container's limit where that is lower.
        budget_bytes: the share of it that weights, activations and KV may take together.
        kv_limit: what decided num_blocks.
        guesser: None where none takes memory.
    """

    model: str
    device: str
    precision: Precision
    num_parameters: int
    weights_bytes: int
    activation_bytes: int
    max_num_batched_tokens: int
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    memory_bytes: int
    budget_bytes: int
    kv_limit: str
    guesser: Guesser | None = None

    @property
    def dtype(self) -> str:
        return self.precision.dtype

    @property
    def kv_dtype(self) -> str:
        return self.precision.kv_dtype

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def fixed_bytes(self) -> int:
        """What there is room for KV beside."""
        return self.weights_bytes + self.activation_bytes + (self.guesser.weights_bytes if self.guesser else 0)

    @property
    def guesser_kv_bytes(self) -> int:
        """What a guesser's own KV cache takes: it has no more blocks than the model's."""
        if self.guesser is None or self.guesser.own_kv_bytes is None:
            return 0
        block_bytes = self.block_size * self.guesser.kv_bytes_per_token
        return min(self.num_blocks, self.guesser.own_kv_bytes // block_bytes) * block_bytes

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.kv_bytes + self.guesser_kv_bytes

    @property
    def num_full_context_requests(self) -> int:
        """How many requests of max_model_len tokens have room at the same time."""
        return min(self.max_num_seqs, self.num_blocks // _ceil_div(self.max_model_len, self.block_size))


def make_plan(
    config: EngineConfig,
    model_config: ModelConfig,
    memory_bytes: int | None = None,
    guesser: Guesser | None = None,
) -> MemoryPlan:
    """Divide the device's memory.

    Args:
        memory_bytes: memory of the device; None means ask the machine.
        guesser: see `spec_decode.proposers.guesser_of`.

    Raises:
        ConfigError: not even one request of max_model_len fits; the message ends with the one change that helps.
    """
    device = planned_device(config)
    if memory_bytes is None:
        memory_bytes = (_cuda_memory_bytes() if device == "cuda" else None) or machine_memory_bytes()
    plan = _divide(config, model_config, device, memory_bytes, guesser)
    problem = _problem(plan, config)
    if problem is None:
        _check_unsplit_prompts(config, plan)
        return plan
    for flag, changed in _changes(config, model_config, plan):
        if _problem(_divide(changed, model_config, device, memory_bytes, guesser), changed) is None:
            raise ConfigError(f"{problem}. This would fit: {flag}", param=flag.split()[0].lstrip("-").replace("-", "_"))
    raise ConfigError(f"{problem}. No single setting makes it fit: choose a smaller model or a larger machine")


def plan_draft(config: EngineConfig, model_config: ModelConfig, *, own_kv_bytes: int, num_tokens: int) -> Guesser:
    """What a draft model takes.

    Args:
        config, model_config: of the draft model.
        own_kv_bytes: most that its KV cache may take.
        num_tokens: most that it computes at a time.
    """
    precision = resolve_precision(config, model_config, planned_device(config))
    weights_bytes = _weights_bytes(precision, model_config, count_parameters(model_config))
    return Guesser(
        config.model.model,
        weights_bytes + count_activation_bytes(config, model_config, precision, num_tokens),
        model_config.kv_bytes_per_token(precision.kv_dtype),
        own_kv_bytes,
    )


def settle(config: EngineConfig, plan: MemoryPlan) -> EngineConfig:
    """The configuration with what the plan has decided in place of what the user left open."""
    return config.replace(scheduler={"max_num_batched_tokens": plan.max_num_batched_tokens})


def _check_unsplit_prompts(config: EngineConfig, plan: MemoryPlan) -> None:
    budget = plan.max_num_batched_tokens
    if not config.scheduler.enable_chunked_prefill and budget < plan.max_model_len:
        raise ConfigError(
            f"Prompts are not split, so a step must hold a whole one: max_num_batched_tokens ({budget}) must be >= "
            f"max_model_len ({plan.max_model_len}). This would fit: --max-model-len {budget}",
            param="max_num_batched_tokens",
        )


@dataclass(frozen=True)
class Precision:
    """In what form weights and KV are held.

    Attributes:
        dtype: of weights that are not quantised: "float32", "bfloat16" or "float16".
        kv_dtype: likewise, of the cache.
        quantization: "" for none, "int8", or "stored": the checkpoint's own.
        why_not_native: what keeps the compiled kernels from being used; "" when they are, None on another device.
    """

    dtype: str
    kv_dtype: str
    quantization: Literal["", "int8", "stored"]
    why_not_native: str | None

    @property
    def is_native(self) -> bool:
        return self.why_not_native == ""


def resolve_precision(config: EngineConfig, model: ModelConfig, device_type: str) -> Precision:
    """What "auto" means for this checkpoint and device.

    The weights' dtype is the checkpoint's; one that is quantised and not kept so becomes float32 on a CPU and bfloat16
    on CUDA. The cache has the weights' dtype, but fixed point (int16) instead of 16 bits where there are kernels for
    that: as large, more precise, and multiplied twice as fast.

    Raises:
        ConfigError: a cache in fixed point was asked for where there are no kernels for it.
    """
    why_not = _why_not_native(config, model) if device_type == "cpu" else None
    keeps = model.stored_quantization and config.model.quantization == "auto" and config.model.dtype == "auto"
    quantization: Literal["", "int8", "stored"] = ""
    if config.model.quantization == "int8":
        quantization = "int8"
    elif keeps and why_not == "":
        quantization = "stored"
    dtype: str = config.model.dtype
    if dtype == "auto":
        fallback = "bfloat16" if device_type == "cuda" else "float32"
        is_float = model.dtype in DTYPE_BYTES and not model.stored_quantization
        dtype = model.dtype if is_float else fallback
    kv_dtype: str = config.cache.dtype
    if kv_dtype == "auto":
        has_kernels = why_not == ""
        kv_dtype = "int16" if has_kernels and (quantization or dtype != "float32") else dtype
    elif kv_dtype == "int16" and why_not != "":
        raise ConfigError(
            f"kv_cache_dtype int16 needs the compiled kernels of a CPU. Here: {why_not or 'another device'}. "
            "Use --kv-cache-dtype auto",
            param="kv_cache_dtype",
        )
    return Precision(dtype, kv_dtype, quantization, why_not)


def _why_not_native(config: EngineConfig, model: ModelConfig) -> str:
    if library.instruction_set() is None:
        return library.describe().removeprefix("none: ")
    if config.cache.block_size % NATIVE_LANES:
        return f"block size {config.cache.block_size} is not a multiple of {NATIVE_LANES}"
    if model.head_dim % NATIVE_LANES or model.head_dim > NATIVE_LARGEST_HEAD_DIM:
        return f"head size {model.head_dim} is not a multiple of {NATIVE_LANES} up to {NATIVE_LARGEST_HEAD_DIM}"
    if config.cache.dtype == "float16":
        return "a KV cache of float16 has no kernels"
    return ""


def resolve_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    """The longest context asked for: the checkpoint's own when the user named none, or asked for the longest that fits.

    Raises:
        ConfigError: more was asked for than the checkpoint has positions.
    """
    wanted = config.model.max_model_len
    longest = model_config.max_position_embeddings
    if wanted is None or wanted == -1:
        return longest
    if wanted > longest:
        raise ConfigError(
            f"max_model_len must be <= {longest}, the positions this checkpoint was made for. Given: {wanted}. "
            f"Use --max-model-len {longest}",
            param="max_model_len",
        )
    return wanted


def token_budget(config: EngineConfig, model: ModelConfig, device_type: str) -> int:
    """Tokens of one step: as asked for, else what suits the device; at least a whole prompt where none is split."""
    asked = config.scheduler.max_num_batched_tokens
    if asked is not None:
        return asked
    budget = TOKEN_BUDGET[device_type]
    return budget if config.scheduler.enable_chunked_prefill else max(budget, resolve_max_model_len(config, model))


def count_parameters(model: ModelConfig) -> int:
    """Elements of all weights of a decoder of the Llama, Qwen or Gemma 3 kind, with its eyes if it has any."""
    hidden, query, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    gemma = model.architecture.startswith("Gemma3")
    attention = hidden * (query + 2 * kv) + query * hidden
    attention += (query + 2 * kv) * model.attention_bias + hidden * model.attention_output_bias
    if gemma or model.architecture.startswith("Qwen3"):
        attention += 2 * model.head_dim  # norms of q and k
    mlp = 3 * hidden * model.intermediate_size + (2 * model.intermediate_size + hidden) * model.mlp_bias
    norms = (4 if gemma else 2) * hidden
    embeddings = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    return embeddings + model.num_layers * (attention + mlp + norms) + hidden + _count_vision(model)


def _count_vision(model: ModelConfig) -> int:
    vision = model.vision
    if vision is None:
        return 0
    size, inner = vision.hidden_size, vision.intermediate_size
    embeddings = size * (3 * vision.patch_size**2 + 1) + size * vision.patches_per_side**2
    layer = 4 * size * (size + 1) + 2 * size * inner + inner + size + 4 * size
    return embeddings + vision.num_layers * layer + 2 * size + model.hidden_size * size * vision.scale_factor**2


def _weights_bytes(precision: Precision, model: ModelConfig, num_parameters: int) -> int:
    if precision.quantization == "stored":
        return model.stored_bytes
    return num_parameters * (1 if precision.quantization == "int8" else DTYPE_BYTES[precision.dtype])


def count_activation_bytes(config: EngineConfig, model: ModelConfig, precision: Precision, num_tokens: int) -> int:
    """Bytes alive at the widest point of a step of num_tokens, the whole token budget.

    That point is a layer's attention or MLP beside residual, normed input and output; the compiled kernels keep only a
    tile of rows of it, in float32, and the result for all rows. Then float32 logits, one row for each request that
    samples (and their probabilities, without the compiled sampler).
    """
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    widest_layer = 3 * model.hidden_size + max(attention, 3 * model.intermediate_size)
    logits = min(config.scheduler.max_num_seqs, num_tokens) * model.vocab_size * 4
    if precision.is_native:
        return 4 * (min(num_tokens, NATIVE_TILE_ROWS) * widest_layer + num_tokens * model.hidden_size) + logits
    return num_tokens * widest_layer * DTYPE_BYTES[precision.dtype] + 2 * logits


def render(plan: MemoryPlan) -> str:
    """The plan as a table of plain text, one row a line."""
    total_tokens = plan.num_blocks * plan.block_size
    forms = {"": f"in {plan.dtype}", "int8": "in int8", "stored": "as stored"}
    form = forms[plan.precision.quantization]
    rows = [
        ("weights", _size(plan.weights_bytes), f"{plan.num_parameters / 1e6:,.1f} M parameters {form}"),
        ("activations", _size(plan.activation_bytes), f"at {plan.max_num_batched_tokens:,} tokens a step"),
        (
            "KV cache",
            _size(plan.kv_bytes),
            f"{plan.num_blocks:,} blocks of {plan.block_size} = {total_tokens:,} tokens in {plan.kv_dtype}, "
            f"{_size(plan.kv_bytes_per_token)} a token",
        ),
        *_guesser_rows(plan),
        ("total", _size(plan.total_bytes), f"of {_size(plan.memory_bytes)} on {plan.device}"),
        (
            "room for",
            f"{plan.num_full_context_requests:,}",
            f"requests of {plan.max_model_len:,} tokens at once (at most {plan.max_num_seqs:,} run)",
        ),
    ]
    lines = [f"memory plan of {plan.model}"]
    lines += [f"  {name:<12} {amount:>10}  {remark}" for name, amount, remark in rows]
    return "\n".join([*lines, f"  KV cache size decided by {plan.kv_limit}"])


def _guesser_rows(plan: MemoryPlan) -> list[tuple[str, str, str]]:
    guesser = plan.guesser
    if guesser is None:
        return []
    token = f"{_size(guesser.kv_bytes_per_token)} a token"
    remark = f"weights and activations of {guesser.model}"
    if guesser.own_kv_bytes is None:
        return [("guesses", _size(guesser.weights_bytes), f"{remark}; {token} of the KV cache above are its")]
    return [
        ("guesses", _size(guesser.weights_bytes), remark),
        ("their KV", _size(plan.guesser_kv_bytes), f"{token}, at most {_size(guesser.own_kv_bytes)}"),
    ]


def planned_device(config: EngineConfig) -> str:
    """ "cpu" or "cuda"."""
    if config.device.device == "auto":
        return "cuda" if _cuda_memory_bytes() else "cpu"
    return config.device.device.partition(":")[0]


def machine_memory_bytes() -> int:
    """Physical memory, or the limit of the container or control group where that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _cgroup_limits(memberships: Path, root: Path) -> Iterator[int]:
    """Memory limits in bytes of this process's control group and all above it, of cgroup v2 or v1."""
    try:
        lines = memberships.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        path = base / group.lstrip("/")
        for directory in (path, *path.parents):
            try:
                text = (directory / name).read_text().strip()
            except OSError:
                text = "max"  # seen from inside a container, the host's part of the path does not exist
            if text.isdigit():
                yield int(text)
            if directory == base:
                break


def _cuda_memory_bytes() -> int | None:
    """Memory of the smallest visible CUDA device, None when there is none; asked without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or shutil.which("nvidia-smi") is None:
        return None
    if importlib.metadata.version("torch").endswith("+cpu"):
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    sizes = [int(line) << 20 for line in answer.stdout.split() if line.isdigit()]
    return min(sizes, default=None) if answer.returncode == 0 else None


def _divide(
    config: EngineConfig, model_config: ModelConfig, device: str, memory_bytes: int, guesser: Guesser | None
) -> MemoryPlan:
    """The plan, whether it fits or not."""
    precision = resolve_precision(config, model_config, device)
    kv_bytes_per_token = model_config.kv_bytes_per_token(precision.kv_dtype)
    if guesser is not None and guesser.own_kv_bytes is None:
        kv_bytes_per_token += guesser.kv_bytes_per_token
    num_parameters = count_parameters(model_config)
    num_tokens = token_budget(config, model_config, device)
    plan = MemoryPlan(
        model=config.model.model,
        device=device,
        precision=precision,
        num_parameters=num_parameters,
        weights_bytes=_weights_bytes(precision, model_config, num_parameters),
        activation_bytes=count_activation_bytes(config, model_config, precision, num_tokens),
        max_num_batched_tokens=num_tokens,
        kv_bytes_per_token=kv_bytes_per_token,
        block_size=config.cache.block_size,
        num_blocks=0,
        max_model_len=resolve_max_model_len(config, model_config),
        max_num_seqs=config.scheduler.max_num_seqs,
        memory_bytes=memory_bytes,
        budget_bytes=int(memory_bytes * config.cache.memory_fraction),
        kv_limit="",
        guesser=guesser,
    )
    num_blocks, kv_limit = _size_pool(plan, config)
    max_model_len = plan.max_model_len
    if config.model.max_model_len == -1:
        max_model_len = min(max_model_len, max(num_blocks, 1) * plan.block_size)
    return dataclasses.replace(plan, num_blocks=num_blocks, max_model_len=max_model_len, kv_limit=kv_limit)


def _size_pool(plan: MemoryPlan, config: EngineConfig) -> tuple[int, str]:
    """How many blocks, and why not more. Fewer than one request needs when there is no room for more."""
    block_bytes = plan.block_size * plan.kv_bytes_per_token
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks, "the number of blocks given"
    if config.cache.memory_bytes is not None:
        return config.cache.memory_bytes // block_bytes, "the KV cache bytes given"
    blocks_per_request = _ceil_div(plan.max_model_len, plan.block_size)
    limits = [
        (
            _blocks_in(plan, plan.budget_bytes - plan.fixed_bytes),
            f"the memory share of {config.cache.memory_fraction:g} (--gpu-memory-utilization)",
        ),
        (plan.max_num_seqs * blocks_per_request, "what max_num_seqs requests of max_model_len can use"),
    ]
    if plan.device == "cpu":
        modest = max(AUTOMATIC_KV_BYTES_ON_CPU // block_bytes, blocks_per_request)
        limits.append((modest, "the automatic limit on CPU (--kv-cache-memory-bytes raises it)"))
    return min(limits, key=lambda limit: limit[0])


def _blocks_in(plan: MemoryPlan, num_bytes: int) -> int:
    """How many blocks fit, beside as many of a guesser's own KV cache as that may have."""
    block_bytes = plan.block_size * plan.kv_bytes_per_token
    num_bytes = max(num_bytes, 0)
    if plan.guesser is None or plan.guesser.own_kv_bytes is None:
        return num_bytes // block_bytes
    guesser_block_bytes = plan.block_size * plan.guesser.kv_bytes_per_token
    most_own = plan.guesser.own_kv_bytes // guesser_block_bytes * guesser_block_bytes
    return max(num_bytes // (block_bytes + guesser_block_bytes), max(num_bytes - most_own, 0) // block_bytes)


def _problem(plan: MemoryPlan, config: EngineConfig) -> str | None:
    """Why a plan cannot run, None when it can."""
    needed = _ceil_div(plan.max_model_len, plan.block_size)
    others = f"weights take {_size(plan.weights_bytes)}, activations {_size(plan.activation_bytes)}"
    if plan.guesser is not None:
        others += f", {plan.guesser.model} {_size(plan.guesser.weights_bytes + plan.guesser_kv_bytes)}"
    if plan.num_blocks < needed:
        needed_bytes = needed * plan.block_size * plan.kv_bytes_per_token
        request = f"One request of {plan.max_model_len:,} tokens needs {needed:,} KV blocks ({_size(needed_bytes)})"
        if config.cache.num_blocks is not None or config.cache.memory_bytes is not None:
            return f"{request}, and {plan.kv_limit} allows {plan.num_blocks:,} ({_size(plan.kv_bytes)})"
        room = max(plan.budget_bytes - plan.fixed_bytes, 0)
        share = f"{config.cache.memory_fraction:g} of {_size(plan.memory_bytes)}"
        return f"{request}, and there is room for {_size(room)}: {others}, of {_size(plan.budget_bytes)} ({share})"
    if plan.total_bytes > plan.memory_bytes:
        asked = f"The KV cache asked for takes {_size(plan.kv_bytes)}, {others}"
        return f"{asked}: more than the {_size(plan.memory_bytes)} of this {plan.device} device"
    return None


def _changes(config: EngineConfig, model: ModelConfig, plan: MemoryPlan) -> Iterator[tuple[str, EngineConfig]]:
    """Single changes that might make a plan fit, the least painful first; the caller tries each."""
    cache = config.cache
    block_bytes = plan.block_size * plan.kv_bytes_per_token
    needed_bytes = _ceil_div(plan.max_model_len, plan.block_size) * block_bytes
    if cache.num_blocks is not None and plan.num_blocks * block_bytes > needed_bytes:
        fitting = _blocks_in(plan, plan.memory_bytes - plan.fixed_bytes)
        if fitting:
            yield f"--num-gpu-blocks-override {fitting}", config.replace(cache={"num_blocks": fitting})
    if cache.num_blocks is None and cache.memory_bytes is not None and plan.kv_bytes > needed_bytes:
        fitting = _blocks_in(plan, plan.memory_bytes - plan.fixed_bytes) * block_bytes
        if fitting > 0:
            yield f"--kv-cache-memory-bytes {fitting}", config.replace(cache={"memory_bytes": fitting})
    room_tokens = plan.num_blocks * plan.block_size
    shorter = max((size for size in _round_lengths() if size <= room_tokens), default=room_tokens)
    if min(SMALLEST_ADVISED_MODEL_LEN, plan.max_model_len) <= shorter < plan.max_model_len or (
        shorter > 0 and (cache.num_blocks is not None or cache.memory_bytes is not None)
    ):
        yield f"--max-model-len {shorter}", config.replace(model={"max_model_len": shorter})
    if cache.num_blocks is None and cache.memory_bytes is not None:
        yield f"--kv-cache-memory-bytes {needed_bytes}", config.replace(cache={"memory_bytes": needed_bytes})
    if cache.num_blocks is None and cache.memory_bytes is None:
        total = dataclasses.replace(plan, num_blocks=needed_bytes // block_bytes).total_bytes
        fraction = math.ceil(100 * total / plan.memory_bytes) / 100
        if cache.memory_fraction < fraction <= LARGEST_ADVISED_FRACTION:
            changed = config.replace(cache={"memory_fraction": fraction})
            yield f"--gpu-memory-utilization {fraction:g}", changed
    if plan.dtype == "float32" and not plan.precision.quantization:
        yield "--dtype bfloat16", config.replace(model={"dtype": "bfloat16"})
    if plan.max_num_batched_tokens > 256:
        changed = config.replace(scheduler={"max_num_batched_tokens": 256})
        yield "--max-num-batched-tokens 256", changed


def _round_lengths() -> list[int]:
    """Context lengths people would type: 1, 1.5 and so on times powers of two."""
    return sorted({(1 << power) + quarter * (1 << power) // 4 for power in range(8, 24) for quarter in range(4)})


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _size(num_bytes: int) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or more."""
    for unit, bytes_of_unit in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= bytes_of_unit:
            return f"{num_bytes / bytes_of_unit:,.2f} {unit}"
    return f"{num_bytes} B"
