"""Self-attention over the paged cache: projections, optional q/k norms, rotary, attention, output projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kitfox.attention.backend import ForwardBatch
from kitfox.config import ModelConfig
from kitfox.kernels import reference
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
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = Linear(hidden, query_size, bias=bias, dtype=dtype, device=device)
        self.k_proj = Linear(hidden, kv_size, bias=bias, dtype=dtype, device=device)
        self.v_proj = Linear(hidden, kv_size, bias=bias, dtype=dtype, device=device)
        self.o_proj = Linear(query_size, hidden, bias=config.attention_output_bias, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm:
            eps = config.rms_norm_eps
            self.q_norm = RMSNorm(self.head_dim, eps, offset=norm_offset, dtype=dtype, device=device)
            self.k_norm = RMSNorm(self.head_dim, eps, offset=norm_offset, dtype=dtype, device=device)
        self.scale = config.softmax_scale
        self.softcap = config.attention_softcap
        slides = bool(config.sliding_layers) and config.sliding_layers[layer]
        self.window = config.sliding_window if slides else None

    def forward(self, x: Tensor, batch: ForwardBatch, rotary_table: Tensor) -> Tensor:
        """x [T, hidden] to [T, hidden]; writes this step's keys and values into the layer's cache."""
        q = self.q_proj(x).view(-1, self.num_heads, self.head_dim)  # [T, H, D]
        k = self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim)  # [T, K, D]
        v = self.v_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = reference.apply_rotary(q, rotary_table, batch.positions)
        k = reference.apply_rotary(k, rotary_table, batch.positions)
        attended = batch.attention.run(
            self.layer, q, k, v, batch, scale=self.scale, window=self.window, softcap=self.softcap
        )
        return self.o_proj(attended.reshape(x.shape[0], -1))
