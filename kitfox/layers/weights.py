"""The places in a model where a checkpoint's tensors go."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _Place:
    def __init__(self, shape: torch.Size):
        self.shape = shape


def place(*shape: int) -> Any:
    """A place for a weight of this shape. Typed as anything: what kernels make of the weight will stand there."""
    return _Place(torch.Size(shape))


def empty_places(model: nn.Module) -> dict[str, tuple[nn.Module, str, torch.Size]]:
    """The places that have no weight yet: name -> (layer, attribute, shape)."""
    return {
        f"{prefix}.{attribute}" if prefix else attribute: (layer, attribute, value.shape)
        for prefix, layer in model.named_modules()
        for attribute, value in vars(layer).items()
        if isinstance(value, _Place)
    }
