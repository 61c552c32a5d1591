"""Linear layers: where a weight lives and how it multiplies. Quantisation and tensor parallelism belong here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kitfox.kernels import reference


class Linear(nn.Module):
    """y = x @ weight.T + bias. weight is [O, I]; its memory is not initialised before weights are loaded."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype, device=device), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, I] to [T, O]."""
        return reference.linear(x, self.weight, self.bias)
