"""Qwen3, dense: Llama's block with an RMSNorm on each head of q and k before the rotary embedding."""

from kitfox.models.llama import LlamaModel


class Qwen3Model(LlamaModel):
    """head_dim is the config's own, not hidden_size / num_heads."""

    qk_norm = True
