"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kitfox.kernels import reference


class RMSNorm(nn.Module):
    """Normalises the last dimension; offset 1 is Gemma's convention of storing weight - 1."""

    def __init__(self, size: int, eps: float, *, offset: float = 0.0, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return reference.rms_norm(x, self.weight, self.eps, offset=self.offset)
