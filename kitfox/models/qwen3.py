"""Qwen3, dense: Llama's block with an RMSNorm on each head of q and k before the rotary embedding."""

from __future__ import annotations

import torch
from torch import nn

from kitfox.models.decoder import Model
from kitfox.models.llama import DecoderLayer


class Qwen3Model(Model):
    """head_dim is the config's own, not hidden_size / num_heads."""

    def make_layer(self, layer: int, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
        return DecoderLayer(self.config, layer, qk_norm=True, dtype=dtype, device=device)
