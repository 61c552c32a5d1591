"""Llama 2 and 3, Mistral, SmolLM2: pre-norm blocks of attention and a gated MLP. Qwen's families are variants of it."""

from __future__ import annotations

from torch import Tensor, nn

from kitfox.attention.backend import ForwardBatch
from kitfox.config import ModelConfig
from kitfox.kernels.interface import Kernels
from kitfox.layers.attention import SelfAttention
from kitfox.layers.mlp import GatedMLP
from kitfox.layers.norm import RMSNorm
from kitfox.models.decoder import Model


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels, *, qk_norm: bool):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, kernels=kernels)
        self.self_attn = SelfAttention(config, layer, qk_norm=qk_norm, kernels=kernels)
        self.post_attention_layernorm = RMSNorm(size, eps, kernels=kernels)
        self.mlp = GatedMLP(config, kernels)

    def forward(self, x: Tensor, batch: ForwardBatch, rotary_table: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), batch, rotary_table)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(Model):
    """Rope scaling, biases and Mistral's sliding window come from the config."""

    qk_norm = False

    def make_layer(self, layer: int) -> nn.Module:
        return DecoderLayer(self.config, layer, self.kernels, qk_norm=self.qk_norm)
