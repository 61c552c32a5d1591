"""What a model asks of attention: a step's batch, and a backend that plans once and runs once per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kitfox.kernels.interface import Kernels


@dataclass(frozen=True)
class ForwardBatch:
    """One step's tokens of all requests, back to back and without padding; passed to every layer.

    Attributes:
        token_ids, positions: [T] int64.
        slot_mapping: [T] int64; where each token's k and v go: block_id * S + offset.
        block_table: [R, max_blocks] int32; entries past a request's length are ignored.
        seq_lens: [R] int32, in tokens, this step included.
        query_start_loc: [R + 1] int32, exclusive prefix sum of query lengths.
        kv_caches: one per layer, from `Kernels.make_kv_cache`.
        adapter_rows: adapters by id, and the rows that go through them.
        image_rows: rows that are read of images, [n] int64, with what they are in place of their tokens' embeddings,
            [n, hidden]; None where there are none.
        features: [T, F], where the model keeps what its `feature_layers` read; None if it has none.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    kv_caches: list[Tensor]
    attention: AttentionBackend
    features: Tensor | None = None
    adapter_rows: Sequence[tuple[int, slice]] = ()
    image_rows: tuple[Tensor, Tensor] | None = None


class HeadNorm(Protocol):
    """An RMSNorm over each head: `layers.norm.RMSNorm`."""

    weight: Tensor
    eps: float
    offset: float


class AttentionBackend(ABC):
    """Attention over the paged cache. `plan` comes before the first layer of a step."""

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Build what every layer of this step shares; replaces the previous step's plan."""

    @abstractmethod
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
        """Norm the heads of q and k where norms are given, rotate them, and write k and v into the layer's cache.

        Args:
            layer: index into batch.kv_caches, which changes.
            q: [T, H * D].
            k, v: [T, K * D].
            rotary_table: from `kernels.reference.rotary_tables`.

        Returns:
            q, [T, H * D].
        """

    @abstractmethod
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
        """Attend q [T, H * D] to the layer's cache; scale, window, softcap as in `kernels.reference.paged_attention`.

        Returns:
            [T, H * D], dtype of q.
        """


def make_attention_backend(kernels: Kernels) -> AttentionBackend:
    """The backend that reads the caches of these kernels."""
    from kitfox.attention.native import NativeAttention
    from kitfox.attention.reference import ReferenceAttention
    from kitfox.kernels.native import NativeKernels

    return NativeAttention(kernels) if isinstance(kernels, NativeKernels) else ReferenceAttention()
