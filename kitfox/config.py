"""One frozen tree of settings: `EngineConfig` is what a user chose, `ModelConfig` is what a checkpoint says.

No torch and no I/O here: `kitfox plan` and the server process read these without either.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from kitfox.errors import ConfigError

CacheOrganisation = Literal["paged", "radix", "none"]
CACHE_ORGANISATIONS: tuple[CacheOrganisation, ...] = ("paged", "radix", "none")
EvictionPolicy = Literal["lru", "lfu", "slru", "priority"]
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = ("lru", "lfu", "slru", "priority")
SchedulingPolicy = Literal["fcfs", "priority", "lpm"]
SCHEDULING_POLICIES: tuple[SchedulingPolicy, ...] = ("fcfs", "priority", "lpm")
DType = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: tuple[DType, ...] = ("auto", "float32", "bfloat16", "float16")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KVDType = Literal["auto", "float32", "bfloat16", "float16", "int16"]
KV_DTYPES: tuple[KVDType, ...] = (*DTYPES, "int16")
Quantization = Literal["auto", "none", "int8"]
QUANTIZATIONS: tuple[Quantization, ...] = ("auto", "none", "int8")
Pooling = Literal["mean", "last"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last")
StructuredBackend = Literal["auto", "llguidance", "xgrammar"]
STRUCTURED_BACKENDS: tuple[StructuredBackend, ...] = ("auto", "llguidance", "xgrammar")
SpeculationMethod = Literal["none", "ngram", "suffix", "draft", "self", "eagle", "eagle3"]
SPECULATION_METHODS: tuple[SpeculationMethod, ...] = ("none", "ngram", "suffix", "draft", "self", "eagle", "eagle3")


def _check(condition: bool, name: str, limit: str, given: object) -> None:
    if not condition:
        raise ConfigError(f"{name} {limit}. Given: {given!r}", param=name)


@dataclass(frozen=True)
class ModelOptions:
    """Which model to serve and how to load it.

    Attributes:
        model: alias (`smollm2-135m`), directory, `.gguf` file or hub id.
        tokenizer: where the tokenizer is, when not beside the model.
        served_model_names: names the API answers to; empty means the name given as `model`.
        max_model_len: longest prompt plus output, in tokens; None means what the checkpoint says, -1 the longest
            that fits in memory.
        dtype: of the weights; "auto" is the checkpoint's.
        quantization: "int8" quantises the weights to 8 bits; "auto" keeps a GGUF file's own quantisation where `dtype`
            is "auto" too and there are kernels for it; "none" never keeps it.
        load_format: "auto", "safetensors", "gguf" or "dummy" (random weights, for tests and sizing).
        chat_template: jinja2 text or a path to it; None means the model's own.
        pooling: how a prompt's hidden states become an embedding where a request does not say: their mean, or the last.
        generation_config: where the sampling parameters come from that requests leave out: "auto" is the checkpoint's
            own generation_config.json, "vllm" the API's defaults, anything else a directory that has such a file.
        override_generation_config: single ones of them, by their names there; they win.
        stream_interval: tokens in a chunk of a stream, where its request does not say.
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    revision: str | None = None
    served_model_names: tuple[str, ...] = ()
    dtype: DType = "auto"
    quantization: Quantization = "auto"
    max_model_len: int | None = None
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    chat_template: str | None = None
    pooling: Pooling = "mean"
    seed: int = 0
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    stream_interval: int = 1

    def __post_init__(self) -> None:
        _check(self.dtype in DTYPES, "dtype", f"must be one of {', '.join(DTYPES)}", self.dtype)
        names = ", ".join(QUANTIZATIONS)
        _check(self.quantization in QUANTIZATIONS, "quantization", f"must be one of {names}", self.quantization)
        _check(self.pooling in POOLINGS, "pooling", f"must be one of {', '.join(POOLINGS)}", self.pooling)
        length = self.max_model_len
        _check(length is None or length >= 1 or length == -1, "max_model_len", "must be >= 1, or -1 for auto", length)

    @property
    def served_name(self) -> str:
        return self.served_model_names[0] if self.served_model_names else self.model


@dataclass(frozen=True)
class CacheConfig:
    """How KV is organised and how much of it there is.

    Attributes:
        organisation: "paged" (chained block hashes), "radix" (token-exact tree) or "none".
        block_size: tokens in a block, for every organisation.
        dtype: KV element type; "auto" is what suits the kernels (`plan.resolve_precision`), "int16" fixed point of 12
            bits with a scale for each token and head.
        num_blocks: exact pool size; overrides memory_bytes and memory_fraction.
        memory_bytes: bytes for KV; overrides memory_fraction.
        memory_fraction: share of the device's memory for weights, activations and KV together.
        eviction_policy: which radix leaves go first; paged is always LRU.
    """

    organisation: CacheOrganisation = "paged"
    block_size: int = 32
    dtype: KVDType = "auto"
    num_blocks: int | None = None
    memory_bytes: int | None = None
    memory_fraction: float = 0.5
    eviction_policy: EvictionPolicy = "lru"

    def __post_init__(self) -> None:
        names = ", ".join(CACHE_ORGANISATIONS)
        _check(self.organisation in CACHE_ORGANISATIONS, "cache", f"must be one of {names}", self.organisation)
        _check(1 <= self.block_size <= 1024, "block_size", "must be in [1, 1024]", self.block_size)
        _check(self.dtype in KV_DTYPES, "kv_cache_dtype", f"must be one of {', '.join(KV_DTYPES)}", self.dtype)
        _check(self.num_blocks is None or self.num_blocks >= 1, "num_blocks", "must be >= 1", self.num_blocks)
        _check(self.memory_bytes is None or self.memory_bytes >= 1, "memory_bytes", "must be >= 1", self.memory_bytes)
        _check(0 < self.memory_fraction <= 1, "memory_fraction", "must be in (0, 1]", self.memory_fraction)
        _check(
            self.eviction_policy in EVICTION_POLICIES,
            "eviction_policy",
            f"must be one of {', '.join(EVICTION_POLICIES)}",
            self.eviction_policy,
        )


@dataclass(frozen=True)
class SchedulerConfig:
    """Who runs, how many, and with how many tokens a step.

    Attributes:
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: the token budget of one step; None means what suits the device (`plan.token_budget`).
        enable_chunked_prefill: a prompt may be split over steps; off, it must fit the budget whole.
        long_prefill_token_threshold: cap on one prompt's share of a step while others wait; 0 means none.
        max_num_queued_requests: waiting requests beyond this are refused with 429.
        max_running_adapters: most LoRA adapters among the running requests; None is no limit.
    """

    policy: SchedulingPolicy = "fcfs"
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_queued_requests: int = 4096
    max_running_adapters: int | None = None

    def __post_init__(self) -> None:
        _check(
            self.policy in SCHEDULING_POLICIES,
            "scheduling_policy",
            f"must be one of {', '.join(SCHEDULING_POLICIES)}",
            self.policy,
        )
        _check(self.max_num_seqs >= 1, "max_num_seqs", "must be >= 1", self.max_num_seqs)
        budget = self.max_num_batched_tokens
        _check(budget is None or budget >= 1, "max_num_batched_tokens", "must be >= 1", budget)
        threshold = self.long_prefill_token_threshold
        _check(threshold >= 0, "long_prefill_token_threshold", "must be >= 0", threshold)
        queued = self.max_num_queued_requests
        _check(queued >= 1, "max_num_queued_requests", "must be >= 1", queued)
        adapters = self.max_running_adapters
        _check(adapters is None or adapters >= 1, "max_loras", "must be >= 1", adapters)


@dataclass(frozen=True)
class DeviceConfig:
    """Where the arithmetic happens.

    Attributes:
        device: "auto" is CUDA where torch sees it, else CPU.
        num_threads: for arithmetic on a CPU; 0 means one a core, of one NUMA node where there are several.
        pin_threads: give each of these threads a core of its own; None means where there are at least 8 of them.
        enforce_eager: compute each op as the model's code names it instead of replaying a recorded forward pass.
    """

    device: str = "auto"
    num_threads: int = 0
    pin_threads: bool | None = None
    enforce_eager: bool = False


@dataclass(frozen=True)
class StructuredOutputConfig:
    """How answers are held to a schema or a grammar.

    Attributes:
        backend: who compiles grammars; "auto" is llguidance, and xgrammar for what llguidance refuses.
        compile_timeout_s: a grammar that takes longer to compile is refused; of processor time for large ones, which
            have only the time that nobody else wants.
        compile_memory_bytes: likewise, for memory beyond what the compiler needs for itself.
        max_whitespace: most whitespace characters between two JSON tokens, where a request does not say; 0 is compact.
        jump_forward: append the tokens that a grammar forces without sampling them.
    """

    backend: StructuredBackend = "auto"
    compile_timeout_s: float = 5.0
    compile_memory_bytes: int = 2 * 2**30
    max_whitespace: int = 8
    jump_forward: bool = True

    def __post_init__(self) -> None:
        names = ", ".join(STRUCTURED_BACKENDS)
        _check(self.backend in STRUCTURED_BACKENDS, "structured_backend", f"must be one of {names}", self.backend)
        _check(self.compile_timeout_s > 0, "grammar_timeout", "must be > 0", self.compile_timeout_s)
        _check(self.compile_memory_bytes > 0, "grammar_memory", "must be > 0", self.compile_memory_bytes)
        _check(0 <= self.max_whitespace <= 1000, "json_max_whitespace", "must be in [0, 1000]", self.max_whitespace)


@dataclass(frozen=True)
class SpeculationConfig:
    """Who guesses what answers go on with, several tokens ahead.

    Attributes:
        method: "none", "ngram" (what followed the same words before, in the same request), "suffix" (that, and past
            traffic), "draft" (a second, smaller model), "self" (the first layers of the model), "eagle" or "eagle3" (a
            head that was trained for the model).
        num_draft_tokens: most guesses for one answer in one step.
        adaptive: guess only as far as it makes answers come sooner, by what steps cost and guesses were worth so far;
            off, always as far as the proposer has something to say.
        options: of the method itself, by the names of its arguments.
    """

    method: SpeculationMethod = "none"
    num_draft_tokens: int = 8
    adaptive: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = ", ".join(SPECULATION_METHODS)
        _check(self.method in SPECULATION_METHODS, "speculation", f"must be one of {names}", self.method)
        _check(1 <= self.num_draft_tokens <= 64, "num_draft_tokens", "must be in [1, 64]", self.num_draft_tokens)


@dataclass(frozen=True)
class AdapterOptions:
    """LoRA adapters, which answer under names of their own.

    Attributes:
        enabled: whether there may be any.
        modules: name and directory of those that are loaded at the start.
        max_rank: of one.
        max_loaded: how many there may be at a time.
    """

    enabled: bool = False
    modules: tuple[tuple[str, str], ...] = ()
    max_rank: int = 64
    max_loaded: int = 32

    def __post_init__(self) -> None:
        _check(1 <= self.max_rank <= 1024, "max_lora_rank", "must be in [1, 1024]", self.max_rank)
        _check(self.max_loaded >= 1, "max_cpu_loras", "must be >= 1", self.max_loaded)
        fits = len(self.modules) <= self.max_loaded
        _check(fits, "lora_modules", f"must be at most {self.max_loaded} (--max-cpu-loras)", len(self.modules))


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine needs to know, built once from flags, a file or keyword arguments."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    structured_output: StructuredOutputConfig = field(default_factory=StructuredOutputConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    adapters: AdapterOptions = field(default_factory=AdapterOptions)
    max_logprobs: int = 20
    trace_capacity: int = 65536

    def replace(self, **sections: dict[str, Any]) -> EngineConfig:
        """A copy with fields of its sections replaced: `config.replace(cache={"block_size": 16})`."""
        changed = {name: dataclasses.replace(getattr(self, name), **values) for name, values in sections.items()}
        return dataclasses.replace(self, **changed)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    Attributes:
        kind: "linear", "llama3", "yarn" or "dynamic" as checkpoints spell it.
        factor: the stretch.
        low_freq_factor, high_freq_factor, original_max_position_embeddings: Llama 3's band limits.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class VisionConfig:
    """How a model of Idefics3's kind reads images: cut into square tiles, each of which becomes a run of tokens.

    Attributes:
        image_size: of a tile, in pixels a side. patch_size: of what becomes one state inside the encoder.
        scale_factor: that many states squared become one token.
        image_token_id: stands in a prompt wherever an image does.
        longest_edge: an image's longer side is made so many pixels first.
        splits: large images are cut into tiles, with a small one of the whole behind them; otherwise there is one.
        mean, std: of the three colours, by which pixels in [0, 1] are normalised.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    scale_factor: int
    image_token_id: int
    longest_edge: int
    splits: bool = True
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    layer_norm_eps: float = 1e-6
    hidden_act: str = "gelu_pytorch_tanh"

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def tokens_per_tile(self) -> int:
        return (self.patches_per_side // self.scale_factor) ** 2


@dataclass(frozen=True)
class ModelConfig:
    """What a checkpoint says about its shape, read from `config.json` or GGUF metadata.

    Attributes:
        architecture: the class name of `config.json` ("LlamaForCausalLM"); GGUF names are mapped to it.
        sliding_window: window in tokens of the sliding layers, None when every layer is global.
        sliding_layers: one flag a layer; empty when no layer slides.
        rope_local_theta: rope base of sliding layers where it differs (Gemma 3).
        query_scale: softmax scale; None means head_dim ** -0.5.
        logit_softcap, attention_softcap: c in c * tanh(x / c), None when absent.
        eos_token_ids: every token that ends a generation.
        stored_bytes: size of the weights as stored on disk.
        stored_quantization: GGML type of most matrices ("Q4_1"); "" where they are floats.
        vision: how the model reads images; None where it reads none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_local_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    query_scale: float | None = None
    logit_softcap: float | None = None
    attention_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    stored_bytes: int = 0
    stored_quantization: str = ""
    vision: VisionConfig | None = None

    @property
    def softmax_scale(self) -> float:
        return self.query_scale if self.query_scale is not None else float(self.head_dim) ** -0.5

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of K and V that one token keeps over all layers."""
        head_bytes = 2 * self.head_dim + 4 if kv_dtype == "int16" else DTYPE_BYTES[kv_dtype] * self.head_dim
        return 2 * self.num_layers * self.num_kv_heads * head_bytes


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a head that guesses for another model (EAGLE).

    Attributes:
        model: of its one layer, as that of a model.
        num_words: size of its own vocabulary; 0 is the model's.
        feature_layers: the model's layers whose input it reads; empty is the usual three.
        norm_before_residual: what is added behind its attention is normed.
    """

    model: ModelConfig
    num_words: int
    feature_layers: tuple[int, ...]
    norm_before_residual: bool
