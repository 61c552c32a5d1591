"""LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitfox.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

# What changes an adapter's arithmetic in a way that is not built, with the values that ask for nothing.
_VARIANTS: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "alpha_pattern": ({},),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
}
_NAME = re.compile(r"^(?:base_model\.model\.)?(?:model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.[^.]+)?\.weight$")


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter says of itself.

    Attributes:
        rank: of its matrices, the most of any.
        scale: what their product is multiplied by.
    """

    rank: int
    scale: float


def read_adapter_config(path: Path) -> AdapterConfig:
    """Read `adapter_config.json` in a directory.

    Raises:
        WeightsError: there is none, or it describes something other than a plain LoRA adapter; the message says what.
    """
    file = path / "adapter_config.json"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise WeightsError(f"{path} has no adapter_config.json, so it is no LoRA adapter") from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"adapter_config.json cannot be read: {error}") from None
    try:
        config = json.loads(text)
        kind, rank, alpha = config.get("peft_type", "LORA"), config["r"], float(config["lora_alpha"])
        ranks = [rank, *(config.get("rank_pattern") or {}).values()]
        if not all(type(each) is int for each in ranks) or not math.isfinite(alpha):
            raise ValueError("r and lora_alpha must be numbers")
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise WeightsError(f"{file} is not an adapter's configuration: {error!r}") from None
    if kind != "LORA":
        raise WeightsError(f"peft_type must be LORA. Given: {kind!r}")
    for name, neutral in _VARIANTS.items():
        if config.get(name) is not None and config[name] not in neutral:
            raise WeightsError(f"{name} is not supported in an adapter. Given: {config[name]!r}")
    if min(ranks) < 1:
        raise WeightsError(f"r must be >= 1. Given: {min(ranks)!r}")
    if len(set(ranks)) > 1:
        raise WeightsError(f"rank_pattern is not supported in an adapter. Given: {config['rank_pattern']!r}")
    return AdapterConfig(rank=rank, scale=alpha / (rank**0.5 if config.get("use_rslora") else rank))


def read_adapter_weights(path: Path, config: AdapterConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """An adapter's matrices by the name of the layer that they change: down [r, in], and up [out, r], which is scaled.

    Raises:
        WeightsError: there are none, a file is damaged, or a tensor is not of a linear layer's adapter.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = path / "adapter_model.safetensors"
    try:
        tensors = load_file(file)
    except FileNotFoundError:
        raise WeightsError(f"{path} has no adapter_model.safetensors") from None
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is damaged: {error}") from None
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.match(name)
        if match is None or tensor.dim() != 2:
            raise WeightsError(f"tensor {name[:120]} is not of a linear layer's LoRA adapter")
        parts.setdefault(match["module"], {})[match["part"]] = tensor.float()
    made = {}
    for module, both in parts.items():
        if len(both) != 2 or both["A"].shape[0] != config.rank or both["B"].shape[1] != config.rank:
            raise WeightsError(f"{module[:120]} has not both matrices of rank {config.rank}")
        made[module] = both["A"], both["B"] * config.scale
    if not made:
        raise WeightsError(f"{file} has no tensors")
    return made
