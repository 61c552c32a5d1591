"""Reading LoRA adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kitfox.errors import WeightsError
from kitfox.weights.adapters import read_adapter_config, read_adapter_weights
from tests.weights.lora import ALPHA, RANK, random_matrices, write_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (6, 5), "model.layers.1.mlp.down_proj": (5, 7)}


def test_matrices_by_layer_and_scaled(tmp_path: Path) -> None:
    tensors = random_matrices(SHAPES, seed=1)
    path = write_adapter(tmp_path, tensors)
    config = read_adapter_config(path)
    assert (config.rank, config.scale) == (RANK, ALPHA / RANK)
    matrices = read_adapter_weights(path, config)
    assert sorted(matrices) == ["layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"]
    down, up = matrices["layers.0.self_attn.q_proj"]
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    assert torch.equal(down, tensors[f"{prefix}.lora_A.weight"])
    assert torch.equal(up, tensors[f"{prefix}.lora_B.weight"] * (ALPHA / RANK))


def test_names_with_an_adapter_s_own_name(tmp_path: Path) -> None:
    """Older PEFT has `lora_A.default.weight`, other trainers leave the prefix out."""
    tensors = {
        name.removeprefix("base_model.model.").replace(".weight", ".default.weight"): tensor
        for name, tensor in random_matrices(SHAPES, seed=1).items()
    }
    path = write_adapter(tmp_path, tensors)
    assert len(read_adapter_weights(path, read_adapter_config(path))) == 2


def test_rank_stabilised_scale(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, random_matrices(SHAPES, seed=1), use_rslora=True)
    assert read_adapter_config(path).scale == ALPHA / 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA. Given: 'IA3'"),
        ({"use_dora": True}, "use_dora is not supported in an adapter. Given: True"),
        ({"bias": "all"}, "bias is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is not supported"),
        ({"r": 0}, "r must be >= 1. Given: 0"),
        ({"r": "many"}, "is not an adapter's configuration"),
        ({"r": float("inf")}, "is not an adapter's configuration"),
        ({"lora_alpha": float("inf")}, "is not an adapter's configuration"),
        ({"rank_pattern": ["q_proj"]}, "is not an adapter's configuration"),
    ],
)
def test_what_is_no_plain_adapter(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    path = write_adapter(tmp_path, random_matrices(SHAPES, seed=1), **config)
    with pytest.raises(WeightsError, match=message):
        read_adapter_config(path)


def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be read"):
        read_adapter_config(Path("/" + 6000 * "x"))
    (tmp_path / "adapter_config.json").write_bytes(b"\xff")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_adapter_config(tmp_path)


def test_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no adapter_config\.json"):
        read_adapter_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(WeightsError, match="is not an adapter's configuration"):
        read_adapter_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.popitem(), "has not both matrices of rank 4"),
        (lambda tensors: tensors.clear(), "has no tensors"),
        (lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.zeros(2, 2)}), "is not of a linear"),
        (lambda tensors: tensors.update({"x.lora_embedding_A": torch.zeros(2, 2)}), "is not of a linear"),
        (lambda tensors: tensors.update(random_wide()), "has not both matrices of rank 4"),
    ],
)
def test_tensors_that_are_wrong(tmp_path: Path, change: Any, message: str) -> None:
    tensors = random_matrices(SHAPES, seed=1)
    change(tensors)
    path = write_adapter(tmp_path, tensors)
    with pytest.raises(WeightsError, match=message):
        read_adapter_weights(path, read_adapter_config(path))


def random_wide() -> dict[str, torch.Tensor]:
    return {"a.lora_A.weight": torch.zeros(8, 3), "a.lora_B.weight": torch.zeros(3, 8)}


def test_files_that_are_damaged_or_not_there(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, random_matrices(SHAPES, seed=1))
    config = read_adapter_config(path)
    (path / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="is damaged"):
        read_adapter_weights(path, config)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no adapter_model\.safetensors"):
        read_adapter_weights(path, config)
