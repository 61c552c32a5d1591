"""Linear layers: where a weight lives and how it multiplies. Tensor parallelism belongs here."""

from __future__ import annotations

from torch import Tensor, nn

from kitfox.kernels.interface import Kernels, Matrix
from kitfox.layers.weights import place


class Linear(nn.Module):
    """y = x @ weight.T + bias, with weight [O, I], and for the rows of an adapter also (x @ down.T) @ up.T.

    Attributes:
        adapters: down [r, I] and up [O, r] of each, by its id.
        in_floats: its weight is kept in floats whatever form the model's own have.
    """

    weight: Matrix
    bias: Tensor | None

    def __init__(self, in_size: int, out_size: int, *, bias: bool, in_floats: bool = False, kernels: Kernels):
        super().__init__()
        self.kernels = kernels
        self.weight = place(out_size, in_size)
        self.bias = place(out_size) if bias else None
        self.in_floats = in_floats
        self.adapters: dict[int, tuple[Matrix, Matrix]] = {}
        self.shape = out_size, in_size

    def forward(self, x: Tensor) -> Tensor:
        """x [T, I] to [T, O]."""
        out = self.kernels.linear(x, self.weight, self.bias)
        for adapter_id, rows in self.kernels.adapter_rows:
            if adapter_id in self.adapters:
                down, up = self.adapters[adapter_id]
                out[rows] += self.kernels.linear(self.kernels.linear(x[rows], down), up)
        return out
