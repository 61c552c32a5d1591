"""What a model asks of attention: a step's batch, and a backend that plans once and runs once per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """One step's tokens of all requests, back to back and without padding; passed to every layer.

    Attributes:
        token_ids, positions: [T] int64.
        slot_mapping: [T] int64; where each token's k and v go: block_id * S + offset.
        block_table: [R, max_blocks] int32; entries past a request's length are ignored.
        seq_lens: [R] int32, in tokens, this step included.
        query_start_loc: [R + 1] int32, exclusive prefix sum of query lengths.
        kv_caches: one [N, 2, S, K, D] per layer.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    kv_caches: list[Tensor]
    attention: AttentionBackend


class AttentionBackend(ABC):
    """Attention over the paged cache. `plan` comes before the first `run` of a step."""

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Build what every layer of this step shares; replaces the previous step's plan."""

    @abstractmethod
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
        """Write k and v into the layer's cache, then attend.

        Args:
            layer: index into batch.kv_caches, which changes.
            q: [T, H, D].
            k, v: [T, K, D].
            scale, window, softcap: as in `kernels.reference.paged_attention`.

        Returns:
            [T, H, D], dtype of q.
        """


def make_attention_backend(device: torch.device | str) -> AttentionBackend:
    """The best backend there is for tensors on a device."""
    from kitfox.attention.reference import ReferenceAttention

    assert torch.device(device).type in ("cpu", "cuda"), f"no attention backend runs on {device}"
    return ReferenceAttention()
