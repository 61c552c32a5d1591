"""Attention by `kernels.reference`: the specification, for CPU and CUDA tensors."""

from __future__ import annotations

from torch import Tensor

from kitfox.attention.backend import AttentionBackend, ForwardBatch, HeadNorm
from kitfox.kernels import reference


class ReferenceAttention(AttentionBackend):
    """Plain PyTorch over gathered key tiles; a layer's cache is [N, 2, S, K, D]."""

    def __init__(self) -> None:
        self._plan: reference.AttentionPlan | None = None

    def plan(self, batch: ForwardBatch) -> None:
        block_size = batch.kv_caches[0].shape[2]
        self._plan = reference.AttentionPlan(batch.block_table, batch.seq_lens, batch.query_start_loc, block_size)

    def rotate_and_write(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        rotary_table: Tensor,
        *,
        q_norm: HeadNorm | None,
        k_norm: HeadNorm | None,
    ) -> Tensor:
        kv_cache = batch.kv_caches[layer]
        q, k, v = (x.unflatten(1, (-1, kv_cache.shape[4])) for x in (q, k, v))  # [T, heads, D]
        if q_norm is not None:
            q = reference.rms_norm(q, q_norm.weight, q_norm.eps, offset=q_norm.offset)
        if k_norm is not None:
            k = reference.rms_norm(k, k_norm.weight, k_norm.eps, offset=k_norm.offset)
        k = reference.apply_rotary(k, rotary_table, batch.positions)
        reference.write_kv(k, v, kv_cache, batch.slot_mapping)
        return reference.apply_rotary(q, rotary_table, batch.positions).flatten(1)

    def run(
        self,
        layer: int,
        q: Tensor,
        batch: ForwardBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        assert self._plan is not None, "plan(batch) comes before run"
        kv_cache = batch.kv_caches[layer]
        return reference.paged_attention(
            q.unflatten(1, (-1, kv_cache.shape[4])),
            kv_cache,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            scale,
            window=window,
            softcap=softcap,
            plan=self._plan,
        ).flatten(1)
