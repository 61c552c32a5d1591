"""Heads that guess: one decoder layer that reads the hidden states of the model it was trained for.

An EAGLE head reads the states behind the final norm, an EAGLE-3 head those that three layers read. Position i of a head
has the model's states at i and the embedding of token i + 1, and says what token i + 2 may be; behind that guess it
goes on from what it computed itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kitfox.attention.backend import ForwardBatch
from kitfox.config import HeadConfig, ModelConfig
from kitfox.errors import WeightsError
from kitfox.kernels import reference
from kitfox.kernels.interface import Kernels
from kitfox.layers.attention import SelfAttention
from kitfox.layers.embedding import Embedding
from kitfox.layers.linear import Linear
from kitfox.layers.mlp import GatedMLP
from kitfox.layers.norm import RMSNorm
from kitfox.layers.weights import empty_places
from kitfox.models.decoder import Model


class Head(nn.Module, ABC):
    """What both kinds have in common. Module names are those of checkpoints."""

    def __init__(self, config: HeadConfig, target: Model, kernels: Kernels):
        """
        Args:
            target: the model that is guessed for; its embedding, and for EAGLE its head, are used.
        """
        super().__init__()
        self.config = config
        self.kernels = kernels
        self._target = [target]  # in a list, so that its weights are not taken for this module's
        self.rotary_table = reference.rotary_tables(config.model, local=False, device=kernels.device)

    @property
    def target(self) -> Model:
        return self._target[0]

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers whose input it reads; none: it reads what is behind the final norm."""

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """The target's features [T, F] to what `forward` takes, [T, H]."""

    @abstractmethod
    def forward(self, token_ids: Tensor, states: Tensor, batch: ForwardBatch) -> Tensor:
        """What stands for the hidden states of the next position.

        Args:
            token_ids: [T] int64, each one place behind its position in `batch`.
            states: [T, H], from `project`, or of an earlier call.

        Returns:
            [T, H].
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """states [n, H] to [n, W] float32, W being the head's own words."""

    def token_ids(self, words: Tensor) -> Tensor:
        """The target's tokens for words [n] int64 of the head."""
        return words

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a checkpoint's tensors in their places; those that the target has are left out.

        Raises:
            WeightsError: one is missing or of the wrong shape; the message names it.
        """
        for name, (layer, attribute, shape) in empty_places(self).items():
            tensor = tensors.get(name)
            if tensor is None:
                raise WeightsError(f"the head's checkpoint has no tensor {name}")
            if tensor.shape != shape:
                raise WeightsError(f"tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
            made = self.kernels.vector(tensor) if tensor.dim() == 1 else self.kernels.matrix(tensor)
            setattr(layer, attribute, made)


class _EagleLayer(nn.Module):
    """A decoder layer without its first norm."""

    def __init__(self, config: ModelConfig, cache_layer: int, kernels: Kernels):
        super().__init__()
        self.self_attn = SelfAttention(config, cache_layer, qk_norm=False, kernels=kernels)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels=kernels)
        self.mlp = GatedMLP(config, kernels)

    def forward(self, x: Tensor, batch: ForwardBatch, rotary_table: Tensor) -> Tensor:
        x = x + self.self_attn(x, batch, rotary_table)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(Head):
    """EAGLE and EAGLE-2."""

    def __init__(self, config: HeadConfig, target: Model, kernels: Kernels, *, cache_layer: int, has_bias: bool):
        """
        Args:
            cache_layer: which of the batch's KV caches is the head's.
            has_bias: whether the checkpoint has `fc.bias`.
        """
        super().__init__(config, target, kernels)
        size = config.model.hidden_size
        if size != target.config.hidden_size:
            raise WeightsError(
                f"an EAGLE head of hidden size {size} does not fit a model of {target.config.hidden_size}"
            )
        self.fc = Linear(2 * size, size, bias=has_bias, kernels=kernels)
        self.layers = nn.ModuleList([_EagleLayer(config.model, cache_layer, kernels)])

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    def project(self, features: Tensor) -> Tensor:
        return features

    def forward(self, token_ids: Tensor, states: Tensor, batch: ForwardBatch) -> Tensor:
        x = self.fc(torch.cat((self.target.embed(token_ids), states), dim=-1))
        return self.layers[0](x, batch, self.rotary_table)

    def logits(self, states: Tensor) -> Tensor:
        return self.target.compute_logits(states)


class _Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads an embedding beside the hidden states, each behind a norm of its own."""

    def __init__(self, config: HeadConfig, cache_layer: int, kernels: Kernels):
        super().__init__()
        size, eps = config.model.hidden_size, config.model.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps, kernels=kernels)
        self.hidden_norm = RMSNorm(size, eps, kernels=kernels)
        self.self_attn = SelfAttention(config.model, cache_layer, qk_norm=False, in_size=2 * size, kernels=kernels)
        self.post_attention_layernorm = RMSNorm(size, eps, kernels=kernels)
        self.mlp = GatedMLP(config.model, kernels)

    def forward(self, embedded: Tensor, states: Tensor, batch: ForwardBatch, rotary_table: Tensor) -> Tensor:
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        x = residual + self.self_attn(torch.cat((self.input_layernorm(embedded), normed), dim=-1), batch, rotary_table)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(Head):
    """EAGLE-3, which has a head of its own, of fewer words than the model has tokens.

    Attributes:
        token_of_word: [W] int64.
    """

    token_of_word: Tensor | None = None

    def __init__(self, config: HeadConfig, target: Model, kernels: Kernels, *, cache_layer: int, has_bias: bool):
        """As `EagleHead`."""
        super().__init__(config, target, kernels)
        size, wide = config.model.hidden_size, target.config.hidden_size
        self.fc = Linear(len(self.feature_layers) * wide, size, bias=has_bias, kernels=kernels)
        self.embed_tokens: Embedding | None = None
        if size != wide:
            self.embed_tokens = Embedding(target.config.vocab_size, size, kernels=kernels)
        self.midlayer = _Eagle3Layer(config, cache_layer, kernels)
        self.norm = RMSNorm(size, config.model.rms_norm_eps, kernels=kernels)
        self.lm_head = Embedding(config.num_words or target.config.vocab_size, size, kernels=kernels)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        num_layers = self.target.config.num_layers
        return self.config.feature_layers or (2, num_layers // 2, num_layers - 3)

    def project(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def forward(self, token_ids: Tensor, states: Tensor, batch: ForwardBatch) -> Tensor:
        embedded = self.target.embed(token_ids) if self.embed_tokens is None else self.embed_tokens(token_ids)
        return self.midlayer(embedded, states, batch, self.rotary_table)

    def logits(self, states: Tensor) -> Tensor:
        return self.lm_head.logits(self.norm(states), None)

    def token_ids(self, words: Tensor) -> Tensor:
        return words if self.token_of_word is None else self.token_of_word[words]

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        renamed = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
        super().load_weights(renamed)
        offsets = renamed.get("d2t")
        if offsets is not None:
            if offsets.shape != (self.config.num_words,):
                raise WeightsError(f"tensor d2t has shape {list(offsets.shape)}, expected [{self.config.num_words}]")
            tokens = torch.arange(len(offsets)) + offsets.long()
            if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.target.config.vocab_size:
                raise WeightsError("tensor d2t names tokens that the model does not have")
            self.token_of_word = tokens.to(self.kernels.device)
        elif self.config.num_words not in (0, self.target.config.vocab_size):
            raise WeightsError("the head's checkpoint has no tensor d2t, which says what its words are")
