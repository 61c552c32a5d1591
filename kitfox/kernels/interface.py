"""What models are written in: the ops of a forward pass, and the forms in which an implementation keeps weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kitfox.kernels.quantized import QuantizedWeight

# A matrix in the implementation's own form; only `Kernels` looks inside.
Matrix = Any


class Kernels(ABC):
    """One implementation of the ops of `kernels.reference`, for one device and one form of weights.

    Attributes:
        device: where tensors live.
        activation_dtype: of everything that flows between ops.
        kv_dtype: of the cache.
        keeps_quantized: whether a checkpoint's quantised matrices are wanted as they are stored.
        description: for the user, at start.
        num_threads: that compute on a CPU; 0 on another device.
        adapter_rows: adapters by id, and the rows of the step at hand that go through them.
    """

    device: torch.device
    activation_dtype: torch.dtype
    kv_dtype: torch.dtype
    keeps_quantized: bool
    description: str
    num_threads: int
    adapter_rows: Sequence[tuple[int, slice]] = ()

    @abstractmethod
    def matrix(self, weight: Tensor | QuantizedWeight, *, is_head: bool = False) -> Matrix:
        """A checkpoint's matrix [O, I] in the form that `linear` and `embedding` take; the argument is not kept.

        is_head: it makes logits, which 8 bits must treat with more care.
        """

    @abstractmethod
    def float_matrix(self, weight: Tensor) -> Matrix:
        """As `matrix`, but in floats whatever form the model's own have: of an adapter, or of an image encoder."""

    @abstractmethod
    def vector(self, weight: Tensor) -> Tensor:
        """A norm's weight or a bias [I], likewise."""

    @abstractmethod
    def embedding(self, ids: Tensor, weight: Matrix, *, scale: float = 1.0) -> Tensor:
        """Rows of weight [V, I] for ids [T] int64, times scale: [T, I]."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None, *, softcap: float | None = None) -> Tensor:
        """`x @ weight.T + bias` for x [T, I]: [T, O]; with softcap c, c * tanh of that / c."""

    @abstractmethod
    def linear_argmax(self, x: Tensor, weight: Matrix, allowed: Tensor | None = None) -> list[int]:
        """Where each row of `linear(x, weight)` is largest, the first of equals; -1 where that is no finite number.

        Args:
            allowed: [T, ceil(O / 32)] int32, a bit a column, least significant first: the others do not count.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
        """See `kernels.reference.rms_norm`, for x [T, I]."""

    @abstractmethod
    def act_and_mul(self, gate: Tensor, up: Tensor, act: str) -> Tensor:
        """See `kernels.reference.act_and_mul`."""

    def keep(self, x: Tensor, features: Tensor, column: int) -> None:
        """Write x [T, I] to columns [column, column + I) of features [T, F]."""
        features[:, column : column + x.shape[1]] = x

    @abstractmethod
    def make_kv_cache(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> Tensor:
        """One layer's cache, all zeros, in the implementation's own layout."""

    @abstractmethod
    def copy_blocks(self, kv_cache: Tensor, src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
        """See `kernels.reference.copy_blocks`."""
