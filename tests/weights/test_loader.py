"""Tensors come back under HF's names with the values the original model had."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from rich.progress import Progress
from safetensors.torch import save_file

from kitfox.config import ModelConfig
from kitfox.errors import UnsupportedModelError, WeightsError
from kitfox.kernels.quantized import QuantizedWeight, dequantize
from kitfox.weights.loader import iter_weights, weights_total_bytes
from tests.weights.gguf_files import write_gguf

CONFIG = ModelConfig(
    "LlamaForCausalLM", 8, 64, 64, 1, num_heads=4, num_kv_heads=2, head_dim=16, max_position_embeddings=8
)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def as_llama_cpp_stores(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Each head's rows interleaved from its two halves."""
    head_dim = weight.shape[0] // num_heads
    order = [h * head_dim + i // 2 + (i % 2) * head_dim // 2 for h in range(num_heads) for i in range(head_dim)]
    return weight[order]


def test_gguf_llama_rows_are_put_back(tmp_path: Path) -> None:
    q, k, v, bias = random(64, 64), random(32, 64), random(32, 63), random(64)
    tensors = {
        "blk.0.attn_q.weight": as_llama_cpp_stores(q, 4),
        "blk.0.attn_q.bias": as_llama_cpp_stores(bias, 4),
        "blk.0.attn_k.weight": as_llama_cpp_stores(k, 2),
        "blk.0.attn_v.weight": v,
        "blk.0.ffn_norm.weight": random(64),
        "output.weight": random(8, 64),
        "rope_freqs.weight": random(8),
    }
    path = write_gguf(tmp_path / "m.gguf", "llama", shape={}, tensors=tensors)
    weights = dict(iter_weights(path, CONFIG))
    assert set(weights) == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "lm_head.weight",
    }
    assert np.array_equal(weights["model.layers.0.self_attn.q_proj.weight"].numpy(), q)
    assert np.array_equal(weights["model.layers.0.self_attn.q_proj.bias"].numpy(), bias)
    assert np.array_equal(weights["model.layers.0.self_attn.k_proj.weight"].numpy(), k)
    assert np.array_equal(weights["model.layers.0.self_attn.v_proj.weight"].numpy(), v)


def test_gguf_qwen_rows_stay(tmp_path: Path) -> None:
    q = random(64, 64)
    path = write_gguf(tmp_path / "m.gguf", "qwen3", shape={}, tensors={"blk.0.attn_q.weight": q})
    assert np.array_equal(dict(iter_weights(path, CONFIG))["model.layers.0.self_attn.q_proj.weight"].numpy(), q)


def test_gguf_gemma_norms_lose_their_one(tmp_path: Path) -> None:
    norm = random(64)
    names = {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    }
    tensors = {f"blk.3.{name}.weight": norm + 1 for name in names} | {"output_norm.weight": norm + 1}
    path = write_gguf(tmp_path / "m.gguf", "gemma3", shape={}, tensors=tensors)
    weights = dict(iter_weights(path, CONFIG))
    assert set(weights) == {f"model.layers.3.{name}.weight" for name in names.values()} | {"model.norm.weight"}
    for weight in weights.values():
        torch.testing.assert_close(weight, torch.from_numpy(norm), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_types_come_back_as_float32(tmp_path: Path, kind: str) -> None:
    stored, original = gguf.GGMLQuantizationType[kind], random(8, 64)
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        shape={},
        tensors={"token_embd.weight": original},
        quantized={"token_embd.weight": stored},
    )
    weight = dict(iter_weights(path, CONFIG))["model.embed_tokens.weight"]
    assert weight.dtype == torch.float32
    assert np.array_equal(weight.numpy(), gguf.dequantize(gguf.quantize(original, stored), stored))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_gguf_k_quants(tmp_path: Path, kind: str) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    raw = np.random.default_rng(0).integers(0, 16, (8, gguf.GGML_QUANT_SIZES[stored][1]), dtype=np.uint8)
    path = write_raw_gguf(tmp_path / "m.gguf", "token_embd.weight", raw, stored)
    weight = dict(iter_weights(path, CONFIG))["model.embed_tokens.weight"]
    assert np.array_equal(weight.numpy(), gguf.dequantize(raw, stored))


def write_raw_gguf(path: Path, name: str, raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_matrices_stay_quantized_where_asked_with_rows_put_back(tmp_path: Path, kind: str) -> None:
    tensors = {
        "blk.0.attn_q.weight": as_llama_cpp_stores(random(64, 64), 4),
        "blk.0.attn_k.weight": as_llama_cpp_stores(random(32, 64), 2),
        "blk.0.attn_v.weight": random(32, 64),
        "blk.0.attn_norm.weight": random(64),
        "output.weight": random(8, 64),
    }
    quantized = {f"blk.0.attn_{name}.weight": gguf.GGMLQuantizationType[kind] for name in "qkv"}
    quantized |= {"output.weight": gguf.GGMLQuantizationType.F16}
    path = write_gguf(tmp_path / "m.gguf", "llama", shape={}, tensors=tensors, quantized=quantized)
    dense = dict(iter_weights(path, CONFIG))
    kept = dict(iter_weights(path, CONFIG, keep_quantized=True))
    assert list(kept) == list(dense)
    in_blocks = {name for name, weight in kept.items() if isinstance(weight, QuantizedWeight)}
    assert in_blocks == {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"}
    for name, weight in kept.items():
        numbers = dequantize(weight) if isinstance(weight, QuantizedWeight) else weight
        assert torch.equal(numbers, dense[name])


def test_gguf_vector_in_blocks_is_dequantized(tmp_path: Path) -> None:
    bias, kind = random(64), gguf.GGMLQuantizationType.Q8_0
    tensors = {"blk.0.attn_q.bias": as_llama_cpp_stores(bias, 4)}
    quantized = {"blk.0.attn_q.bias": kind}
    path = write_gguf(tmp_path / "m.gguf", "llama", shape={}, tensors=tensors, quantized=quantized)
    weight = dict(iter_weights(path, CONFIG, keep_quantized=True))["model.layers.0.self_attn.q_proj.bias"]
    assert isinstance(weight, torch.Tensor)
    np.testing.assert_allclose(weight.numpy(), bias, atol=0.02)


def test_gguf_unexpected_tensor_and_type_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", "llama", shape={}, tensors={"blk.0.ssm_a.weight": random(4)})
    with pytest.raises(WeightsError, match=r"blk\.0\.ssm_a\.weight"):
        list(iter_weights(path, CONFIG))
    path = write_gguf(tmp_path / "b.gguf", "llama", shape={}, tensors={"output.weight": np.zeros((2, 32), np.int32)})
    with pytest.raises(UnsupportedModelError, match=r"output\.weight.*I32"):
        list(iter_weights(path, CONFIG))


def test_gguf_rows_of_a_part_of_a_block_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", shape={}, tensors={"output.weight": random(3, 40)})
    data = bytearray(path.read_bytes())
    at = data.index(b"output.weight") + len(b"output.weight") + 4 + 2 * 8  # past the number of dimensions and both
    data[at : at + 4] = int(gguf.GGMLQuantizationType.Q4_1).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"'output\.weight' has rows of 40 numbers, not whole blocks of 32"):
        list(iter_weights(path, CONFIG))


def test_gguf_cut_short_names_the_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", shape={}, tensors={"output.weight": random(64, 64)})
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(WeightsError, match=r"ends inside tensor 'output\.weight'"):
        list(iter_weights(path, CONFIG))


def test_single_safetensors_keep_their_dtype(tmp_path: Path) -> None:
    stored = {
        "model.norm.weight": torch.randn(4).bfloat16(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    save_file(stored, tmp_path / "model.safetensors")
    weights = dict(iter_weights(tmp_path, CONFIG))
    assert list(weights) == ["model.norm.weight"]
    assert torch.equal(weights["model.norm.weight"], stored["model.norm.weight"])


def test_indexed_shards_and_a_missing_one(tmp_path: Path) -> None:
    index = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"unrelated": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(WeightsError, match=r"lacks 1 of 2 weight files: model-2\.safetensors"):
        list(iter_weights(tmp_path, CONFIG))
    save_file({"b": torch.zeros(2)}, tmp_path / "model-2.safetensors")
    weights = dict(iter_weights(tmp_path, CONFIG))
    assert sorted(weights) == ["a", "b"]


def test_no_weights_and_damaged_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no \*\.safetensors"):
        list(iter_weights(tmp_path, CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(WeightsError, match="damaged"):
        list(iter_weights(tmp_path, CONFIG))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_multimodal_checkpoint(tmp_path: Path, prefix: str) -> None:
    stored = {
        prefix + "norm.weight": torch.ones(2),
        "model.vision_tower.x": torch.ones(1),
        "vision_tower.y": torch.ones(1),
    }
    save_file(stored, tmp_path / "model.safetensors")
    assert [name for name, _ in iter_weights(tmp_path, CONFIG)] == ["model.norm.weight"]


def test_progress_ends_full(tmp_path: Path) -> None:
    save_file({"a": torch.ones(20), "b": torch.ones(5)}, tmp_path / "model.safetensors")
    progress = Progress(disable=True)
    list(iter_weights(tmp_path, CONFIG, progress))
    (task,) = progress.tasks
    assert task.completed == task.total == weights_total_bytes(tmp_path)
