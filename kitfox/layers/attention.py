"""Self-attention over the paged cache: projections, optional q/k norms, rotary, attention, output projection."""

from __future__ import annotations

from torch import Tensor, nn

from kitfox.attention.backend import ForwardBatch
from kitfox.config import ModelConfig
from kitfox.kernels.interface import Kernels
from kitfox.layers.linear import Linear
from kitfox.layers.norm import RMSNorm


class SelfAttention(nn.Module):
    """One layer's attention.

    A family says what is its own: biases through the config, q/k norms through `qk_norm`, the layer's rotary table and
    window through the arguments.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        qk_norm: bool,
        norm_offset: float = 0.0,
        in_size: int | None = None,
        kernels: Kernels,
    ):
        """in_size: width of what it reads; None is the hidden size."""
        super().__init__()
        self.layer = layer
        hidden, bias, head_dim = config.hidden_size, config.attention_bias, config.head_dim
        query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        in_size = in_size or hidden
        self.q_proj = Linear(in_size, query_size, bias=bias, kernels=kernels)
        self.k_proj = Linear(in_size, kv_size, bias=bias, kernels=kernels)
        self.v_proj = Linear(in_size, kv_size, bias=bias, kernels=kernels)
        self.o_proj = Linear(query_size, hidden, bias=config.attention_output_bias, kernels=kernels)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, offset=norm_offset, kernels=kernels)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, offset=norm_offset, kernels=kernels)
        self.scale = config.softmax_scale
        self.softcap = config.attention_softcap
        slides = bool(config.sliding_layers) and config.sliding_layers[layer]
        self.window = config.sliding_window if slides else None

    def forward(self, x: Tensor, batch: ForwardBatch, rotary_table: Tensor) -> Tensor:
        """x [T, in_size] to [T, hidden]; writes this step's keys and values into the layer's cache."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)  # [T, H * D], [T, K * D] twice
        q = batch.attention.rotate_and_write(
            self.layer, q, k, v, batch, rotary_table, q_norm=self.q_norm, k_norm=self.k_norm
        )
        attended = batch.attention.run(self.layer, q, batch, scale=self.scale, window=self.window, softcap=self.softcap)
        return self.o_proj(attended)
