"""LoRA adapters as PEFT writes them, with random numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

RANK, ALPHA = 4, 6.0


def random_matrices(shapes: Mapping[str, tuple[int, int]], seed: int, size: float = 1.0) -> dict[str, Tensor]:
    """Tensors for layers by their names in a checkpoint ("model.layers.0.mlp.up_proj"), of shapes (out, in)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (out_size, in_size) in shapes.items():
        down = torch.randn(RANK, in_size, generator=generator) * in_size**-0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = size * torch.randn(out_size, RANK, generator=generator)
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    known = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "modules_to_save": None}
    (folder / "adapter_config.json").write_text(json.dumps(known | config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def merged(
    weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], scale: float = ALPHA / RANK
) -> dict[str, Tensor]:
    """A checkpoint's weights with an adapter's product added."""
    made = dict(weights)
    for name, tensor in tensors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")]
            made[f"{layer}.weight"] = made[f"{layer}.weight"] + scale * up @ tensor
    return made
