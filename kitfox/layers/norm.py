"""RMSNorm."""

from __future__ import annotations

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
