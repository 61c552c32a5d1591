"""Gemma 3, text: sandwich norms, q/k norms, sliding and global layers with a rotary base each, scaled embeddings."""

from __future__ import annotations

from torch import Tensor, nn

from kitfox.attention.backend import ForwardBatch
from kitfox.config import ModelConfig
from kitfox.kernels import reference
from kitfox.kernels.interface import Kernels
from kitfox.layers.attention import SelfAttention
from kitfox.layers.mlp import GatedMLP
from kitfox.layers.norm import RMSNorm
from kitfox.models.decoder import Model

NORM_OFFSET = 1.0


class DecoderLayer(nn.Module):
    """Each half is normed on both sides: x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels):
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, offset=NORM_OFFSET, kernels=kernels)

        self.input_layernorm = norm()
        self.self_attn = SelfAttention(config, layer, qk_norm=True, norm_offset=NORM_OFFSET, kernels=kernels)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(config, kernels)
        self.post_feedforward_layernorm = norm()

    def forward(self, x: Tensor, batch: ForwardBatch, rotary_table: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), batch, rotary_table)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3Model(Model):
    """Sliding layers turn with the local rotary base, unscaled; global layers with the scaled one."""

    norm_offset = NORM_OFFSET

    def __init__(self, config: ModelConfig, kernels: Kernels):
        super().__init__(config, kernels)
        self.local_rotary_table = reference.rotary_tables(config, local=True, device=kernels.device)

    def make_layer(self, layer: int) -> nn.Module:
        return DecoderLayer(self.config, layer, self.kernels)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embed_tokens(token_ids, self.config.hidden_size**0.5)

    def table_of(self, layer: int) -> Tensor:
        slides = bool(self.config.sliding_layers) and self.config.sliding_layers[layer]
        return self.local_rotary_table if slides else self.rotary_table
