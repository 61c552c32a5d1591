"""What every decoder-only model here has: an embedding, a list of layers, a final norm, a head, and checked weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kitfox.attention.backend import ForwardBatch
from kitfox.config import ModelConfig
from kitfox.errors import WeightsError
from kitfox.kernels import reference
from kitfox.layers.embedding import Embedding
from kitfox.layers.norm import RMSNorm

SHOWN_NAMES = 5


class Model(nn.Module, ABC):
    """A decoder-only transformer. A family's file gives the layers and whatever else is its own.

    The names of the modules are those of checkpoints, so that loading is a matter of names and shapes alone.
    """

    norm_offset = 0.0  # Gemma stores norm weights minus one

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            self.make_layer(layer, dtype=dtype, device=device) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, offset=self.norm_offset, dtype=dtype, device=device
        )
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rotary_table = reference.rotary_tables(config, local=False, device=device)

    @abstractmethod
    def make_layer(self, layer: int, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """The decoder layer with index `layer`; called as layer(x, batch, rotary_table)."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 to [T, hidden]."""
        return self.embed_tokens(token_ids)

    def table_of(self, layer: int) -> Tensor:
        """The rotary table of a layer."""
        return self.rotary_table

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The hidden states after the final norm, [T, hidden]."""
        x = self.embed(batch.token_ids)
        for index, layer in enumerate(self.layers):
            x = layer(x, batch, self.table_of(index))
        return self.norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] to [n, V] float32."""
        return self.lm_head.logits(hidden, self.config.logit_softcap)

    # ---- weights ------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors into place, converted to the model's dtype.

        Raises:
            WeightsError: a tensor is missing, unexpected, repeated, quantised or of the wrong shape; the message names
                it.
        """
        parameters = {name: p for name, p in self.named_parameters() if not name.startswith("lm_head.")}
        if self.lm_head is not self.embed_tokens:
            parameters["lm_head.weight"] = self.lm_head.weight
        missing = set(parameters)
        for stored_name, tensor in weights:
            name = stored_name.removeprefix("model.")
            if self.is_derivable(name):
                continue
            parameter = parameters.get(name)
            if parameter is None:
                raise WeightsError(f"unexpected tensor {stored_name} of shape {list(tensor.shape)}")
            if parameter.shape != tensor.shape:
                expected = list(parameter.shape)
                raise WeightsError(f"tensor {stored_name} has shape {list(tensor.shape)}, expected {expected}")
            if not tensor.is_floating_point():  # a quantised weight: converted, its codes would pass for numbers
                raise WeightsError(f"tensor {stored_name} has dtype {tensor.dtype}, expected floating point")
            if name not in missing:
                raise WeightsError(f"tensor {stored_name} is in the checkpoint more than once")
            parameter.data.copy_(tensor)
            missing.remove(name)
        if missing:
            names = sorted(name if name.startswith("lm_head.") else f"model.{name}" for name in missing)
            more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
            raise WeightsError(f"missing tensors: {', '.join(names[:SHOWN_NAMES])}{more}")

    def is_derivable(self, name: str) -> bool:
        """Stored tensors that hold nothing new: rotary frequencies, and the head where it is the embedding."""
        if name.endswith((".rotary_emb.inv_freq", "rope_freqs.weight")):
            return True
        return name == "lm_head.weight" and self.lm_head is self.embed_tokens

    def init_random_weights(self, seed: int) -> None:
        """Fill every weight from N(0, 0.02) and make every norm the identity: for tests and sizing."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.data.fill_(1.0 - module.offset)
            else:
                for parameter in module.parameters(recurse=False):
                    noise = torch.empty(parameter.shape, dtype=torch.float32).normal_(0, 0.02, generator=generator)
                    parameter.data.copy_(noise)
