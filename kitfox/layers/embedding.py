"""Token embedding, and the head that turns hidden states into logits; the two may share one weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kitfox.kernels import reference


class Embedding(nn.Module):
    """weight is [V, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] int64 to [T, hidden]."""
        return reference.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor, softcap: float | None) -> Tensor:
        """hidden [n, hidden] to [n, V] float32."""
        logits = reference.linear(hidden, self.weight).float()
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap
