"""Qwen2 and Qwen2.5: Llama's block with biases on q, k and v (`ModelConfig.attention_bias`)."""

from __future__ import annotations

import torch
from torch import nn

from kitfox.models.decoder import Model
from kitfox.models.llama import DecoderLayer


class Qwen2Model(Model):
    """Only some sizes slide their upper layers; the config says which."""

    def make_layer(self, layer: int, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
        return DecoderLayer(self.config, layer, dtype=dtype, device=device)
