"""Attention over the paged cache: plan once per step, run once per layer."""

from kitfox.attention.backend import AttentionBackend, ForwardBatch, HeadNorm, make_attention_backend

__all__ = ["AttentionBackend", "ForwardBatch", "HeadNorm", "make_attention_backend"]
