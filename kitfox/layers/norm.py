"""The norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kitfox.kernels.interface import Kernels
from kitfox.layers.weights import place


class RMSNorm(nn.Module):
    """Normalises the last dimension; offset 1 is Gemma's convention of storing weight - 1."""

    weight: Tensor

    def __init__(self, size: int, eps: float, *, offset: float = 0.0, kernels: Kernels):
        super().__init__()
        self.kernels = kernels
        self.weight = place(size)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps, offset=self.offset)


class LayerNorm(nn.Module):
    """Makes the last dimension's mean 0 and its variance 1, in float32."""

    weight: Tensor
    bias: Tensor

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = place(size)
        self.bias = place(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        return torch.layer_norm(x.float(), shape, self.weight.float(), self.bias.float(), self.eps).to(x.dtype)
