"""Llama 2 and 3, Mistral, SmolLM2: pre-norm blocks of attention and a gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kitfox.attention.backend import ForwardBatch
from kitfox.config import ModelConfig
from kitfox.layers.attention import SelfAttention
from kitfox.layers.mlp import GatedMLP
from kitfox.layers.norm import RMSNorm
from kitfox.models.decoder import Model


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Qwen's layers are the same with other attention settings."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        qk_norm: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.self_attn = SelfAttention(config, layer, qk_norm=qk_norm, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(config, dtype=dtype, device=device)

    def forward(self, x: Tensor, batch: ForwardBatch, rotary_table: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), batch, rotary_table)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(Model):
    """Rope scaling, biases and Mistral's sliding window come from the config."""

    def make_layer(self, layer: int, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
        return DecoderLayer(self.config, layer, dtype=dtype, device=device)
