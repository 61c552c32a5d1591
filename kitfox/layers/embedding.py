"""Token embedding, and the head that turns hidden states into logits; the two may share one weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kitfox.kernels import reference
from kitfox.kernels.interface import Kernels, Matrix
from kitfox.layers.weights import place


class Embedding(nn.Module):
    """weight is [V, hidden]."""

    weight: Matrix

    def __init__(self, vocab_size: int, hidden_size: int, *, kernels: Kernels):
        super().__init__()
        self.kernels = kernels
        self.weight = place(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor, scale: float = 1.0) -> Tensor:
        """[T] int64 to [T, hidden], times scale."""
        return self.kernels.embedding(token_ids, self.weight, scale=scale)

    def logits(self, hidden: Tensor, softcap: float | None) -> Tensor:
        """hidden [n, hidden] to [n, V] float32."""
        return self.kernels.linear(hidden, self.weight, softcap=softcap).float()

    def greedy_tokens(self, hidden: Tensor, softcap: float | None, allowed: Tensor | None) -> list[int]:
        """Where the logits of each row of hidden [n, hidden] are largest; allowed, and -1, as of `linear_argmax`."""
        if softcap is None:
            return self.kernels.linear_argmax(hidden, self.weight, allowed)
        logits = reference.forbid(self.logits(hidden, softcap), allowed)
        largest, ids = logits.max(dim=-1)  # the cap may make equals of different numbers
        return torch.where(largest.isfinite(), ids, -1).tolist()
