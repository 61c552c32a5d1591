"""Attention by the compiled kernels (csrc/attention.h), computed at once or recorded with the rest of a pass."""

from __future__ import annotations

from torch import Tensor

from kitfox.attention.backend import AttentionBackend, ForwardBatch, HeadNorm
from kitfox.kernels.abi import StepStruct
from kitfox.kernels.native import NativeKernels, step_struct


class NativeAttention(AttentionBackend):
    """The kernels plan for themselves, tile by tile; `plan` only says where a step's arrays are."""

    def __init__(self, kernels: NativeKernels):
        self._kernels = kernels
        self._step: StepStruct | None = None

    def plan(self, batch: ForwardBatch) -> None:
        self._step = step_struct(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
        )

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
        norm = q_norm or k_norm
        return self._kernels.rotate_and_write(
            q,
            k,
            v,
            rotary_table,
            batch.kv_caches[layer],
            q_norm=q_norm.weight if q_norm else None,
            k_norm=k_norm.weight if k_norm else None,
            eps=norm.eps if norm else 0.0,
            offset=norm.offset if norm else 0.0,
            step=self._step,
        )

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
        return self._kernels.attention(
            q, batch.kv_caches[layer], scale=scale, window=window, softcap=softcap, step=self._step
        )
