"""Attention by the compiled kernels (csrc/attention.h), computed at once or recorded with the rest of a pass."""

from __future__ import annotations

from torch import Tensor

from kitfox.attention.backend import AttentionBackend, ForwardBatch, HeadNorm
from kitfox.kernels.abi import StepStruct
from kitfox.kernels.native import NativeKernels


class NativeAttention(AttentionBackend):
    """The kernels plan for themselves, tile by tile; `plan` only says where a step's arrays are."""

    def __init__(self, kernels: NativeKernels):
        self._kernels = kernels
        self._step: StepStruct | None = None

    def plan(self, batch: ForwardBatch) -> None:
        self._step = step_of(batch)

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


def step_of(batch: ForwardBatch) -> StepStruct:
    """Where a batch's arrays are, as the kernels want to know it. They must outlive the struct."""
    return StepStruct(
        num_rows=batch.token_ids.shape[0],
        num_requests=batch.seq_lens.shape[0],
        token_ids=batch.token_ids.data_ptr(),
        positions=batch.positions.data_ptr(),
        slot_mapping=batch.slot_mapping.data_ptr(),
        query_start_loc=batch.query_start_loc.data_ptr(),
        seq_lens=batch.seq_lens.data_ptr(),
        block_table=batch.block_table.data_ptr(),
        block_table_stride=batch.block_table.stride(0),
    )
