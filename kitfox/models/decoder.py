"""What every decoder-only model here has: an embedding, a list of layers, a final norm, a head, and checked weights."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from kitfox.attention.backend import ForwardBatch
from kitfox.config import ModelConfig
from kitfox.errors import WeightsError
from kitfox.kernels import reference
from kitfox.kernels.interface import Kernels
from kitfox.kernels.quantized import QuantizedWeight
from kitfox.layers.embedding import Embedding
from kitfox.layers.linear import Linear
from kitfox.layers.norm import LayerNorm, RMSNorm
from kitfox.layers.weights import empty_places

SHOWN_NAMES = 5


class Model(nn.Module, ABC):
    """A decoder-only transformer. A family's file gives the layers and whatever else is its own.

    The names of the modules are those of checkpoints, so that loading is a matter of names and shapes alone.
    """

    norm_offset = 0.0  # Gemma stores norm weights minus one

    def __init__(self, config: ModelConfig, kernels: Kernels):
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, kernels=kernels)
        self.layers = nn.ModuleList(self.make_layer(layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=self.norm_offset, kernels=kernels)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, kernels=kernels)
        self.feature_layers: tuple[int, ...] = ()  # whoever guesses by hidden states wants what these read
        self.rotary_table = reference.rotary_tables(config, local=False, device=kernels.device)

    @abstractmethod
    def make_layer(self, layer: int) -> nn.Module:
        """The decoder layer with index `layer`; called as layer(x, batch, rotary_table)."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 to [T, hidden]."""
        return self.embed_tokens(token_ids)

    def embed_tile(self, pixels: Tensor) -> Tensor:
        """A square of an image, [S, S, 3] uint8, as the model reads it in place of tokens' embeddings: [n, hidden]."""
        raise NotImplementedError(f"{type(self).__name__} reads no images: the front end lets none in")

    def table_of(self, layer: int) -> Tensor:
        """The rotary table of a layer."""
        return self.rotary_table

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The hidden states after the final norm, [T, hidden]."""
        self.kernels.adapter_rows = batch.adapter_rows
        x = self.embed(batch.token_ids)
        if batch.image_rows is not None:
            rows, embeddings = batch.image_rows
            x = x.index_copy(0, rows, embeddings.to(x.dtype))
        for index, layer in enumerate(self.layers):
            if index in self.feature_layers:
                assert batch.features is not None
                column = self.feature_layers.index(index) * self.config.hidden_size
                self.kernels.keep(x, batch.features, column)
            x = layer(x, batch, self.table_of(index))
        self.kernels.adapter_rows = ()
        return self.norm(x)

    def first_layers(self, count: int) -> Self:
        """A model of the first `count` layers, with the norm and the head of all: the same weights, not copies."""
        early = copy.copy(self)
        early._modules = {**self._modules, "layers": self.layers[:count]}
        return early

    def add_adapter(self, adapter_id: int, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Have an adapter's matrices beside those of the layers that they are for.

        Raises:
            WeightsError: there is no such linear layer, or it has another shape. Nothing is kept then.
        """
        linears = {name: layer for name, layer in self.named_modules() if isinstance(layer, Linear)}
        for name, (down, up) in matrices.items():
            layer = linears.get(name)
            if layer is None:
                raise WeightsError(f"the adapter changes {name[:120]}, which is no linear layer of this model")
            given = (up.shape[0], down.shape[1])
            if given != layer.shape:
                raise WeightsError(f"the adapter's {name} is {list(given)}, the model's {list(layer.shape)}")
        for name, (down, up) in matrices.items():
            made = self.kernels.float_matrix(down), self.kernels.float_matrix(up)
            linears[name].adapters[adapter_id] = made

    def remove_adapter(self, adapter_id: int) -> None:
        """Forget an adapter."""
        for layer in self.modules():
            if isinstance(layer, Linear):
                layer.adapters.pop(adapter_id, None)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] to [n, V] float32."""
        return self.lm_head.logits(hidden, self.config.logit_softcap)

    def greedy_tokens(self, hidden: Tensor, allowed: Tensor | None = None) -> list[int]:
        """The index of the largest logit for each of hidden [n, hidden]; -1 where there is none.

        Args:
            allowed: [n, ceil(V / 32)] int32, a bit a token: the others do not count.
        """
        return self.lm_head.greedy_tokens(hidden, self.config.logit_softcap, allowed)

    # ---- weights ------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor | QuantizedWeight]]) -> None:
        """Put a checkpoint's tensors in their places, in the form that the kernels want.

        Raises:
            WeightsError: a tensor is missing, unexpected, repeated, of integers or of the wrong shape; the message
                names it.
        """
        places = empty_places(self)
        missing = set(places)
        for stored_name, tensor in weights:
            name = stored_name.removeprefix("model.")
            if self.is_derivable(name):
                continue
            if name not in places:
                raise WeightsError(f"unexpected tensor {stored_name} of shape {list(tensor.shape)}")
            layer, attribute, shape = places[name]
            if shape != tensor.shape:
                expected = list(shape)
                raise WeightsError(f"tensor {stored_name} has shape {list(tensor.shape)}, expected {expected}")
            if isinstance(tensor, Tensor) and not tensor.is_floating_point():  # codes would pass for numbers
                raise WeightsError(f"tensor {stored_name} has dtype {tensor.dtype}, expected floating point")
            if name not in missing:
                raise WeightsError(f"tensor {stored_name} is in the checkpoint more than once")
            self._fill(layer, attribute, tensor)
            missing.remove(name)
            del tensor  # or two of them would be in memory while the next is read
        if missing:
            names = sorted(name if name.startswith("lm_head.") else f"model.{name}" for name in missing)
            more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
            raise WeightsError(f"missing tensors: {', '.join(names[:SHOWN_NAMES])}{more}")

    def _fill(self, layer: nn.Module, attribute: str, tensor: Tensor | QuantizedWeight) -> None:
        if isinstance(tensor, Tensor) and tensor.dim() == 1:
            setattr(layer, attribute, self.kernels.vector(tensor))
        elif isinstance(tensor, Tensor) and isinstance(layer, Linear) and layer.in_floats:
            setattr(layer, attribute, self.kernels.float_matrix(tensor.flatten(1)))
        else:
            setattr(layer, attribute, self.kernels.matrix(tensor, is_head=layer is self.lm_head))

    def is_derivable(self, name: str) -> bool:
        """Stored tensors that hold nothing new: rotary frequencies, and the head where it is the embedding."""
        if name.endswith((".rotary_emb.inv_freq", "rope_freqs.weight")):
            return True
        return name == "lm_head.weight" and self.lm_head is self.embed_tokens

    def init_random_weights(self, seed: int) -> None:
        """Fill every weight from N(0, 0.02) and make every norm the identity: for tests and sizing."""
        generator = torch.Generator().manual_seed(seed)
        for layer, attribute, shape in empty_places(self).values():
            if isinstance(layer, RMSNorm):
                self._fill(layer, attribute, torch.full(shape, 1.0 - layer.offset))
            elif isinstance(layer, LayerNorm):
                self._fill(layer, attribute, torch.full(shape, 1.0 if attribute == "weight" else 0.0))
            else:
                self._fill(layer, attribute, torch.empty(shape).normal_(0, 0.02, generator=generator))
