"""Shapes read from config.json, in its old and new spellings, and from GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kitfox.config import ModelOptions, RopeScaling
from kitfox.errors import ConfigError, UnsupportedModelError, WeightsError
from kitfox.weights.hub import resolve_model
from kitfox.weights.model_config import read_generation_defaults, read_model_config
from tests.weights.gguf_files import write_gguf

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def read(tmp_path: Path, architecture: str, generation: dict[str, Any] | None = None, **keys: Any):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "architectures": [architecture], **keys}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(tmp_path)


def test_llama_with_old_rope_spelling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = read(tmp_path, "LlamaForCausalLM", rope_theta=500000.0, rope_scaling=scaling, torch_dtype="bfloat16")
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert config.head_dim == 16
    assert config.dtype == "bfloat16"
    assert not config.tie_word_embeddings
    assert (config.sliding_window, config.sliding_layers) == (None, ())


def test_llama_with_rope_parameters(tmp_path: Path) -> None:
    parameters = {"rope_theta": 123.0, "rope_type": "linear", "factor": 4.0}
    config = read(tmp_path, "LlamaForCausalLM", rope_parameters=parameters, attention_bias=True)
    assert config.rope_theta == 123.0
    assert config.rope_scaling == RopeScaling("linear", 4.0, original_max_position_embeddings=512)
    assert config.attention_bias
    assert config.attention_output_bias
    assert config.rope_local_theta is None


def test_eos_ids_of_both_files_are_merged(tmp_path: Path) -> None:
    config = read(tmp_path, "LlamaForCausalLM", {"eos_token_id": [5, 6], "temperature": 0.6}, eos_token_id=6)
    assert config.eos_token_ids == (6, 5)
    assert read_generation_defaults(tmp_path, ModelOptions()) == {"temperature": 0.6}


def test_generation_defaults(tmp_path: Path) -> None:
    recommended = {"temperature": 0.6, "top_k": 20, "min_p": None, "max_new_tokens": 300, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    found = {"temperature": 0.6, "top_k": 20, "max_tokens": 300}
    assert read_generation_defaults(tmp_path, ModelOptions()) == found
    assert read_generation_defaults(tmp_path, ModelOptions(generation_config="vllm")) == {}
    elsewhere = ModelOptions(generation_config=str(tmp_path))
    assert read_generation_defaults(tmp_path / "other", elsewhere) == found
    overridden = ModelOptions(override_generation_config={"top_k": 5, "min_p": 0.1}, stream_interval=4)
    wanted = found | {"top_k": 5, "min_p": 0.1, "stream_interval": 4}
    assert read_generation_defaults(tmp_path, overridden) == wanted
    for wrong in ({"temperature": -1}, {"top_k": "x"}, {"wizardry": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            read_generation_defaults(tmp_path, ModelOptions(override_generation_config=wrong))
    with pytest.raises(ConfigError, match="there is no"):
        read_generation_defaults(tmp_path, ModelOptions(generation_config=str(tmp_path / "none")))


def test_generation_defaults_of_a_gguf_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 30)
    writer.add_float32("general.sampling.penalty_repeat", 1.25)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = {"temperature": 0.5, "top_k": 30, "repetition_penalty": 1.25}
    assert read_generation_defaults(tmp_path / "m.gguf", ModelOptions()) == found


def test_mistral_slides_on_every_layer_or_none(tmp_path: Path) -> None:
    config = read(tmp_path, "MistralForCausalLM", sliding_window=64)
    assert (config.sliding_window, config.sliding_layers) == (64, (True,) * 7)
    config = read(tmp_path, "MistralForCausalLM", sliding_window=None)
    assert (config.sliding_window, config.sliding_layers) == (None, ())


def test_qwen_slides_only_when_told(tmp_path: Path) -> None:
    config = read(tmp_path, "Qwen2ForCausalLM", sliding_window=64, max_window_layers=5)
    assert (config.sliding_window, config.sliding_layers) == (None, ())
    assert config.attention_bias
    assert not config.attention_output_bias
    config = read(tmp_path, "Qwen2ForCausalLM", sliding_window=64, use_sliding_window=True, max_window_layers=5)
    assert config.sliding_layers == (False,) * 5 + (True, True)


def test_qwen3_head_dim_is_its_own(tmp_path: Path) -> None:
    config = read(tmp_path, "Qwen3ForCausalLM", head_dim=128)
    assert config.head_dim == 128
    assert not config.attention_bias


@pytest.mark.parametrize(
    "keys",
    [
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 3,
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        },
    ],
    ids=["old", "transformers 5"],
)
def test_gemma3_has_two_ropes_and_a_pattern(tmp_path: Path, keys: dict[str, Any]) -> None:
    extra = {"sliding_window": 32, "query_pre_attn_scalar": 64, "head_dim": 32, "final_logit_softcapping": 30.0}
    config = read(tmp_path, "Gemma3ForCausalLM", **extra, **keys)
    assert (config.rope_theta, config.rope_local_theta) == (1e6, 10000.0)
    assert config.rope_scaling == RopeScaling("linear", 8.0, original_max_position_embeddings=512)
    assert config.sliding_window == 32
    assert config.sliding_layers == (True, True, False, True, True, False, True)
    assert config.softmax_scale == 0.125
    assert config.logit_softcap == 30.0
    assert config.tie_word_embeddings
    assert config.hidden_act == "gelu_pytorch_tanh"


def test_text_part_of_multimodal_gemma3(tmp_path: Path) -> None:
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": SHAPE, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    config = read_model_config(tmp_path)
    assert config.architecture == "Gemma3ForCausalLM"
    assert config.num_layers == 7
    assert config.head_dim == 256
    assert config.eos_token_ids == (1, 106)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3Text"])
def test_what_transformers_saves_today(tmp_path: Path, name: str) -> None:
    import transformers

    saved = getattr(transformers, f"{name}Config")(**{**SHAPE, "head_dim": 16})
    saved.architectures = [f"{name.removesuffix('Text')}ForCausalLM"]
    saved.save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (7, 2, 16)
    assert config.tie_word_embeddings == saved.tie_word_embeddings
    assert config.rms_norm_eps == saved.rms_norm_eps
    rope = saved.rope_parameters
    assert config.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    if name == "Gemma3Text":
        assert config.rope_local_theta == rope["sliding_attention"]["rope_theta"]
    layer_types = getattr(saved, "layer_types", None) or ["full_attention"] * 7
    if name != "Mistral":
        flags = config.sliding_layers or (False,) * 7
        assert flags == tuple(kind == "sliding_attention" for kind in layer_types)


def test_unsupported_architecture_is_named_with_those_supported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"FalconForCausalLM .*LlamaForCausalLM, .*Gemma3ForCausalLM"):
        read(tmp_path, "FalconForCausalLM")


def test_missing_key_and_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"config\.json"):
        read_model_config(tmp_path)
    with pytest.raises(WeightsError, match="'hidden_size'"):
        read(tmp_path, "LlamaForCausalLM", hidden_size=None)


@pytest.mark.parametrize(
    "keys",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"use_bidirectional_attention": True},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
)
def test_switches_that_change_the_arithmetic_are_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(keys)) + "|partial_rotary_factor"):
        read(tmp_path, "LlamaForCausalLM", **keys)


def test_unknown_rope_scaling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="longrope"):
        read(tmp_path, "LlamaForCausalLM", rope_scaling={"type": "longrope", "factor": 2.0})


GGUF_SHAPE = {
    "block_count": 7,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}
GGUF_TENSORS = {
    "token_embd.weight": np.zeros((100, 64), np.float16),
    "blk.0.attn_q.weight": np.zeros((64, 64), np.float16),
}


def test_gguf_llama3_scaling_comes_from_its_divisors(tmp_path: Path) -> None:
    tensors = {**GGUF_TENSORS, "rope_freqs.weight": np.array([1, 1, 1, 1.5, 8, 32, 32, 32], np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", shape=GGUF_SHAPE, tensors=tensors)
    config = read_model_config(path)
    assert config.architecture == "LlamaForCausalLM"
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert (config.vocab_size, config.head_dim, config.rms_norm_eps) == (100, 16, 1e-5)
    assert config.tie_word_embeddings
    assert config.dtype == "float16"
    assert config.stored_bytes == path.stat().st_size


def test_gguf_gemma3_slides_five_of_six_and_ends_turns(tmp_path: Path) -> None:
    shape = {**GGUF_SHAPE, "attention.key_length": 32, "attention.sliding_window": 16}
    tokenizer = {
        "ggml.tokens": ["<eos>", "<bos>", "a", "<end_of_turn>"],
        "ggml.token_type": [3, 3, 1, 3],
        "ggml.eos_token_id": 0,
        "ggml.bos_token_id": 1,
    }
    path = write_gguf(tmp_path / "m.gguf", "gemma3", shape=shape, tensors=GGUF_TENSORS, tokenizer=tokenizer)
    config = read_model_config(path)
    assert config.sliding_layers == (True,) * 5 + (False, True)
    assert config.eos_token_ids == (0, 3)
    assert (config.head_dim, config.rope_local_theta) == (32, 10000.0)
    assert config.softmax_scale == 32**-0.5


def test_gguf_that_is_none_or_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"nope" * 10)
    with pytest.raises(WeightsError, match="does not start with 'GGUF'"):
        read_model_config(path)
    whole = write_gguf(tmp_path / "w.gguf", "llama", shape=GGUF_SHAPE, tensors=GGUF_TENSORS).read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(WeightsError, match="truncated or damaged"):
        read_model_config(path)


def test_gguf_unsupported_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "mamba", shape={}, tensors=GGUF_TENSORS)
    with pytest.raises(UnsupportedModelError, match="mamba"):
        read_model_config(path)


@pytest.mark.model
def test_default_model() -> None:
    config = read_model_config(resolve_model("smollm2-135m").path)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.rope_theta, config.rms_norm_eps) == (49152, 100000.0, 1e-5)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
