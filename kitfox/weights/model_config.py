"""Reads the shape of a model from `config.json` or GGUF metadata into a `ModelConfig`. No torch, no tensor data."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kitfox.config import HeadConfig, ModelConfig, ModelOptions, RopeScaling, VisionConfig
from kitfox.errors import ConfigError, InvalidParameterError, UnsupportedModelError, WeightsError
from kitfox.gguf_metadata import GGML_QUANTIZATIONS, GgufMetadata, GgufTensor
from kitfox.request import SamplingParams

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
)
_IDEFICS3 = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
_GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_GGML_FLOATS = {0: "float32", 1: "float16", 30: "bfloat16"}
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_THETA = 10000.0
_GEMMA3_27B_LAYERS = 62
# Names in generation_config.json -> fields of SamplingParams.
_GENERATION_DEFAULTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_tokens",
}
# GGUF keys behind "general.sampling." -> names in generation_config.json.
_GGUF_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read_model_config(path: Path) -> ModelConfig:
    """Read the shape of the model in a directory (its `config.json`) or in a `.gguf` file.

    Raises:
        UnsupportedModelError: the architecture is not one of `SUPPORTED_ARCHITECTURES`.
        WeightsError: there is no configuration, or a key that the shape needs is missing.
    """
    if path.is_file():
        return _from_gguf(GgufMetadata(path))
    config = _read_json(path / "config.json")
    if not config:
        raise WeightsError(f"{path} has no config.json, so nothing says what model it is")
    generation = _read_json(path / "generation_config.json")
    if config.get("architectures", [])[:1] in [[name] for name in _IDEFICS3]:
        return _from_idefics3(config, generation, path)
    return _from_json(_text_config(config), generation, _stored_bytes(path))


def read_head_config(path: Path) -> HeadConfig:
    """Read the shape of the head in a directory.

    Raises:
        UnsupportedModelError: it has more than one layer, or is not of Llama's kind.
        WeightsError: there is no configuration, or a key that the shape needs is missing.
    """
    outer = _read_json(path / "config.json")
    if not outer:
        raise WeightsError(f"{path} has no config.json, so nothing says what head it is")
    config = {**outer, **outer.get("transformer_layer_config", {}), "architectures": ["LlamaForCausalLM"]}
    if config.get("num_hidden_layers", 1) != 1:
        raise UnsupportedModelError(f"a head must have one layer. Given: {config['num_hidden_layers']}")
    eagle = config.get("eagle_config") or {}
    layers = eagle.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids") or ()
    return HeadConfig(
        model=_from_json({**config, "num_hidden_layers": 1}, {}, _stored_bytes(path)),
        num_words=config.get("draft_vocab_size") or 0,
        feature_layers=tuple(layers),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
    )


def read_generation_defaults(path: Path, options: ModelOptions) -> dict[str, Any]:
    """Fields of `SamplingParams` for requests that leave them out; empty where neither model nor options have any.

    Raises:
        ConfigError: one of them is unknown, of the wrong type or out of range.
        WeightsError: the file is no JSON object.
    """
    source = options.generation_config
    found: dict[str, Any] = {}
    if source not in ("auto", "vllm"):
        file = Path(source).expanduser() / "generation_config.json"
        if not file.is_file():
            raise ConfigError(f"--generation-config: there is no {file}", param="generation_config")
        found = _read_json(file)
    elif source == "auto" and path.is_dir():
        found = _read_json(path / "generation_config.json")
    elif source == "auto":
        metadata = GgufMetadata(path)
        found = {name: metadata.get(f"general.sampling.{key}") for key, name in _GGUF_SAMPLING.items()}
    known = _GENERATION_DEFAULTS
    defaults = {known[name]: found[name] for name in known if found.get(name) is not None}
    if options.stream_interval != 1:
        defaults["stream_interval"] = options.stream_interval
    for name, value in options.override_generation_config.items():
        if name not in known:
            names = ", ".join(known)
            raise ConfigError(f"--override-generation-config: {name[:64]} is not one of {names}", param=name[:64])
        defaults[known[name]] = value
    try:
        msgspec.convert(defaults, SamplingParams)
    except (msgspec.ValidationError, InvalidParameterError) as error:
        raise ConfigError(f"the default sampling parameters (--generation-config) are wrong: {error}") from None
    return defaults


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} must hold a JSON object")
    return value


def _stored_bytes(path: Path) -> int:
    files = list(path.glob("*.safetensors")) or list(path.glob("pytorch_model.bin"))  # the latter of heads only
    return sum(file.stat().st_size for file in files)


def _unsupported(architecture: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model architecture {architecture} is not supported. Supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal config, under its text-only name."""
    architectures = config.get("architectures") or []
    if architectures != ["Gemma3ForConditionalGeneration"]:
        return config
    outer = {key: config[key] for key in ("eos_token_id", "bos_token_id", "torch_dtype", "dtype") if key in config}
    return {**config.get("text_config", {}), **outer, "architectures": ["Gemma3ForCausalLM"]}


def _from_json(config: Mapping[str, Any], generation: Mapping[str, Any], stored_bytes: int) -> ModelConfig:
    architecture = (config.get("architectures") or [str(config.get("model_type"))])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise _unsupported(architecture)
    _refuse_variants(config)
    gemma = architecture == "Gemma3ForCausalLM"
    qwen2 = architecture == "Qwen2ForCausalLM"

    def need(key: str) -> Any:
        if config.get(key) is None:
            raise WeightsError(f"config.json of {architecture} has no {key!r}")
        return config[key]

    num_heads = need("num_attention_heads")
    window, sliding_layers = _sliding(architecture, config)
    theta, local_theta, scaling = _rope(config, gemma)
    bias = bool(config.get("attention_bias", False))
    scalar = config.get("query_pre_attn_scalar", 256) if gemma else None
    bos_token_id = config.get("bos_token_id", generation.get("bos_token_id"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or (256 if gemma else need("hidden_size") // num_heads),
        max_position_embeddings=need("max_position_embeddings"),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_local_theta=local_theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", gemma)),
        attention_bias=bias or qwen2,
        attention_output_bias=bias and not qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)),
        hidden_act=_hidden_act(config, gemma),
        sliding_window=window,
        sliding_layers=sliding_layers,
        query_scale=None if scalar is None else float(scalar) ** -0.5,
        logit_softcap=config.get("final_logit_softcapping"),
        attention_softcap=config.get("attn_logit_softcapping"),
        bos_token_id=bos_token_id[0] if isinstance(bos_token_id, list) else bos_token_id,
        eos_token_ids=_merge_ids(config.get("eos_token_id"), generation.get("eos_token_id")),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        stored_bytes=stored_bytes,
    )


def _from_idefics3(config: Mapping[str, Any], generation: Mapping[str, Any], path: Path) -> ModelConfig:
    """A Llama that reads images through an encoder of SigLIP's kind."""
    architecture = config["architectures"][0]
    text, vision = config.get("text_config") or {}, config.get("vision_config") or {}
    if text.get("model_type", "llama") != "llama":
        raise UnsupportedModelError(
            f"{architecture} must have a text model of Llama's kind. Given: {text['model_type']}"
        )
    outer = ("eos_token_id", "bos_token_id", "torch_dtype", "dtype", "tie_word_embeddings", "quantization_config")
    given = {key: config[key] for key in outer if config.get(key) is not None}
    defaults = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    model = _from_json(
        {**defaults, **text, **given, "architectures": ["LlamaForCausalLM"]}, generation, _stored_bytes(path)
    )
    preprocessing = _read_json(path / "preprocessor_config.json") or _read_json(path / "processor_config.json").get(
        "image_processor", {}
    )

    def need(source: Mapping[str, Any], key: str, where: str) -> Any:
        if source.get(key) is None:
            raise WeightsError(f"{where} of {architecture} has no {key!r}")
        return source[key]

    image_size = need(vision, "image_size", "vision_config")
    tile_size = (preprocessing.get("max_image_size") or {}).get("longest_edge", image_size)
    if tile_size != image_size:
        raise UnsupportedModelError(
            f"max_image_size of preprocessor_config.json must be the vision_config's {image_size}. Given: {tile_size}"
        )
    for key in ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize"):
        if not preprocessing.get(key, True):
            raise UnsupportedModelError(f"{key} of preprocessor_config.json must be true. Given: false")
    found = VisionConfig(
        hidden_size=vision.get("hidden_size", 1152),
        intermediate_size=vision.get("intermediate_size", 3072),
        num_layers=vision.get("num_hidden_layers", 12),
        num_heads=vision.get("num_attention_heads", 16),
        image_size=image_size,
        patch_size=need(vision, "patch_size", "vision_config"),
        scale_factor=config.get("scale_factor", 2),
        image_token_id=need(config, "image_token_id", "config.json"),
        longest_edge=(preprocessing.get("size") or {}).get("longest_edge", 4 * image_size),
        splits=preprocessing.get("do_image_splitting", True),
        mean=tuple(preprocessing.get("image_mean", (0.5, 0.5, 0.5))),
        std=tuple(preprocessing.get("image_std", (0.5, 0.5, 0.5))),
        layer_norm_eps=vision.get("layer_norm_eps", 1e-6),
        hidden_act=vision.get("hidden_act", "gelu_pytorch_tanh"),
    )
    sides = (found.patch_size, found.patch_size * found.scale_factor)
    if any(found.image_size % side for side in sides) or found.hidden_size % found.num_heads:
        raise UnsupportedModelError(
            f"{architecture}: tiles of {found.image_size} pixels are not whole patches of {sides}"
        )
    return dataclasses.replace(model, architecture=architecture, vision=found)


def _refuse_variants(config: Mapping[str, Any]) -> None:
    """A known architecture with a switch that would change its arithmetic is not the model that kitfox has."""
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModelError(f"quantization_config {method!r} is not supported; use unquantised weights or GGUF")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention is not supported")
    rotary = (config.get("rope_parameters") or {}).get(
        "partial_rotary_factor", config.get("partial_rotary_factor", 1.0)
    )
    if rotary != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor must be 1. Given: {rotary}")


def _hidden_act(config: Mapping[str, Any], gemma: bool) -> str:
    if gemma:
        return config.get("hidden_activation") or "gelu_pytorch_tanh"
    return config.get("hidden_act") or "silu"


def _merge_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    merged: dict[int, None] = {}
    for value in values:
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                merged[token_id] = None
    return tuple(merged)


def _sliding(architecture: str, config: Mapping[str, Any]) -> tuple[int | None, tuple[bool, ...]]:
    """The window and which layers have it; (None, ()) when all are global."""
    window, num_layers = config.get("sliding_window"), config["num_hidden_layers"]
    gemma, qwen = architecture == "Gemma3ForCausalLM", architecture.startswith("Qwen")
    if window is None and gemma:
        window = 4096
    if window is None or architecture == "LlamaForCausalLM" or (qwen and not config.get("use_sliding_window", False)):
        return None, ()
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if len(layer_types) != num_layers:
            raise WeightsError(f"config.json lists {len(layer_types)} layer_types for {num_layers} layers")
        layers = tuple(kind == "sliding_attention" for kind in layer_types)
    elif gemma:
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _GEMMA3_PATTERN
        layers = tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    elif qwen:
        first = config.get("max_window_layers", 28)
        layers = tuple(layer >= first for layer in range(num_layers))
    else:
        layers = (True,) * num_layers
    return (window, layers) if any(layers) else (None, ())


def _rope(config: Mapping[str, Any], gemma: bool) -> tuple[float, float | None, RopeScaling | None]:
    """Base, base of the sliding layers (None when the same), scaling of the global layers.

    Two spellings exist: `rope_theta` with `rope_scaling`, and `rope_parameters` (transformers 5) that holds both,
    for Gemma 3 once for each kind of layer.
    """
    default = 1_000_000.0 if gemma else 10_000.0
    parameters = config.get("rope_parameters") or {}
    local: Mapping[str, Any] = {}
    if "full_attention" in parameters or "sliding_attention" in parameters:
        local = parameters.get("sliding_attention") or {}
        parameters = parameters.get("full_attention") or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or default)
    local_theta = local.get("rope_theta") or config.get("rope_local_base_freq") or _GEMMA3_LOCAL_THETA
    scaling = _rope_scaling(config.get("rope_scaling") or parameters, config)
    return theta, float(local_theta) if gemma else None, scaling


def _rope_scaling(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn", "dynamic"):
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported. Supported: linear, llama3, yarn, dynamic")
    original = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return RopeScaling(
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        original_max_position_embeddings=int(original),
    )


def _from_gguf(metadata: GgufMetadata) -> ModelConfig:
    name = metadata["general.architecture"]
    if name not in _GGUF_ARCHITECTURES:
        raise _unsupported(f"{name} (GGUF)")
    architecture, gemma, tensors = _GGUF_ARCHITECTURES[name], name == "gemma3", metadata.tensors

    def need(key: str) -> Any:
        return metadata[f"{name}.{key}"]

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    for required in ("token_embd.weight", "blk.0.attn_q.weight"):
        if required not in tensors:
            raise WeightsError(f"{metadata.path} has no tensor {required!r}")
    num_layers, num_heads, hidden_size = need("block_count"), need("attention.head_count"), need("embedding_length")
    head_dim = get("attention.key_length") or hidden_size // num_heads
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"rope.dimension_count must be {head_dim}. Given: {get('rope.dimension_count')}")
    window = get("attention.sliding_window")
    sliding = tuple((layer + 1) % _GEMMA3_PATTERN != 0 for layer in range(num_layers)) if gemma else ()
    scale_dim = hidden_size // num_heads if gemma and num_layers == _GEMMA3_27B_LAYERS else head_dim
    return ModelConfig(
        architecture=architecture,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=need("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=need("context_length"),
        rms_norm_eps=_short_float(need("attention.layer_norm_rms_epsilon")),
        rope_theta=get("rope.freq_base", 1_000_000.0 if gemma else 10_000.0),
        rope_local_theta=get("rope.freq_base_swa", _GEMMA3_LOCAL_THETA) if gemma else None,
        rope_scaling=_gguf_rope_scaling(metadata, name, head_dim),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        hidden_act="gelu_pytorch_tanh" if gemma else "silu",
        sliding_window=window if gemma else None,
        sliding_layers=sliding if window else (),
        query_scale=float(scale_dim) ** -0.5 if gemma else None,
        logit_softcap=get("final_logit_softcapping"),
        attention_softcap=get("attn_logit_softcapping"),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=metadata.eos_token_ids(),
        dtype=_GGML_FLOATS.get(tensors["blk.0.attn_q.weight"].type_id, "float32"),
        stored_bytes=metadata.path.stat().st_size,
        stored_quantization=_stored_quantization(tensors),
    )


def _stored_quantization(tensors: Mapping[str, GgufTensor]) -> str:
    types = collections.Counter(tensor.type_id for tensor in tensors.values() if len(tensor.shape) == 2)
    most = types.most_common(1)[0][0]
    return "" if most in _GGML_FLOATS else GGML_QUANTIZATIONS.get(most, f"GGML type {most}")


def _short_float(value: float) -> float:
    """The shortest decimal that is the same float32, so that 1e-5 does not come back as 9.999999747e-06."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


def _gguf_rope_scaling(metadata: GgufMetadata, name: str, head_dim: int) -> RopeScaling | None:
    if "rope_freqs.weight" in metadata.tensors:
        return _llama3_scaling(metadata, head_dim)
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    original = metadata.get(f"{name}.rope.scaling.original_context_length", metadata[f"{name}.context_length"])
    factor = float(metadata.get(f"{name}.rope.scaling.factor", 1.0))
    return _rope_scaling({"type": kind, "factor": factor, "original_max_position_embeddings": original}, {})


def _llama3_scaling(metadata: GgufMetadata, head_dim: int) -> RopeScaling:
    """Llama 3's scaling from the table of divisors that a GGUF file keeps in its place.

    The lowest frequencies are divided by the whole factor; the band limits are the same in all released models.
    """
    tensor = metadata.tensors["rope_freqs.weight"]
    with metadata.path.open("rb") as file:
        file.seek(tensor.offset)
        factor = max(struct.unpack(f"<{head_dim // 2}f", file.read(4 * (head_dim // 2))))
    if not math.isfinite(factor) or factor < 1:
        raise UnsupportedModelError(f"{metadata.path}: rope_freqs.weight is not a Llama 3 rope scaling")
    return RopeScaling(kind="llama3", factor=factor)
