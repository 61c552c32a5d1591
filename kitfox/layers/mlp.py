"""The gated MLP that all families share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kitfox.config import ModelConfig
from kitfox.kernels import reference
from kitfox.kernels.interface import Kernels
from kitfox.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, kernels: Kernels):
        """Raises UnsupportedModelError for an activation that `kernels` does not have."""
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.kernels = kernels
        self.gate_proj = Linear(hidden, inner, bias=bias, kernels=kernels)
        self.up_proj = Linear(hidden, inner, bias=bias, kernels=kernels)
        self.down_proj = Linear(inner, hidden, bias=bias, kernels=kernels)
        self.act = config.hidden_act
        reference.act_and_mul(torch.zeros(1, 1), torch.zeros(1, 1), self.act)  # refused now, not at the first step

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        return self.down_proj(self.kernels.act_and_mul(self.gate_proj(x), self.up_proj(x), self.act))
