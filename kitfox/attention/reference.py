"""Attention by `kernels.reference`: the specification, for CPU and CUDA tensors."""

from __future__ import annotations

from torch import Tensor

from kitfox.attention.backend import AttentionBackend, ForwardBatch
from kitfox.kernels import reference


class ReferenceAttention(AttentionBackend):
    """Plain PyTorch over gathered key tiles."""

    def __init__(self) -> None:
        self._plan: reference.AttentionPlan | None = None

    def plan(self, batch: ForwardBatch) -> None:
        block_size = batch.kv_caches[0].shape[2]
        self._plan = reference.AttentionPlan(batch.block_table, batch.seq_lens, batch.query_start_loc, block_size)

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        assert self._plan is not None, "plan(batch) comes before run"
        kv_cache = batch.kv_caches[layer]
        reference.write_kv(k, v, kv_cache, batch.slot_mapping)
        return reference.paged_attention(
            q,
            kv_cache,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            scale,
            window=window,
            softcap=softcap,
            plan=self._plan,
        )
