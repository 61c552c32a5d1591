"""Linear layers: where a weight lives and how it multiplies. Tensor parallelism belongs here."""

from __future__ import annotations

from torch import Tensor, nn

from kitfox.kernels.interface import Kernels, Matrix
from kitfox.layers.weights import place


class Linear(nn.Module):
    """y = x @ weight.T + bias, with weight [O, I]."""

    weight: Matrix
    bias: Tensor | None

    def __init__(self, in_size: int, out_size: int, *, bias: bool, kernels: Kernels):
        super().__init__()
        self.kernels = kernels
        self.weight = place(out_size, in_size)
        self.bias = place(out_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, I] to [T, O]."""
        return self.kernels.linear(x, self.weight, self.bias)
