"""Idefics3 and SmolVLM: a Llama that reads images, which an encoder of SigLIP's kind turns into a few states a tile."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kitfox.config import ModelConfig, VisionConfig
from kitfox.kernels import reference
from kitfox.kernels.interface import Kernels
from kitfox.kernels.quantized import QuantizedWeight
from kitfox.layers.linear import Linear
from kitfox.layers.norm import LayerNorm
from kitfox.layers.weights import place
from kitfox.models.llama import LlamaModel


class PatchEmbedding(Linear):
    """A convolution whose stride is its size: a product with each patch's pixels, [3 * P * P]."""

    def __init__(self, vision: VisionConfig, kernels: Kernels):
        size = vision.patch_size
        super().__init__(3 * size * size, vision.hidden_size, bias=True, in_floats=True, kernels=kernels)
        self.weight = place(vision.hidden_size, 3, size, size)


class PositionEmbedding(nn.Module):
    """weight is [patches, hidden]."""

    weight: Tensor

    def __init__(self, vision: VisionConfig):
        super().__init__()
        self.weight = place(vision.patches_per_side**2, vision.hidden_size)


class Embeddings(nn.Module):
    """Pixels of a tile to one state a patch."""

    def __init__(self, vision: VisionConfig, kernels: Kernels):
        super().__init__()
        self.patch_embedding = PatchEmbedding(vision, kernels)
        self.position_embedding = PositionEmbedding(vision)
        self._per_side, self._patch_size = vision.patches_per_side, vision.patch_size

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [S, S, 3], normalised, to [patches, hidden]."""
        side, size = self._per_side, self._patch_size
        patches = pixels.view(side, size, side, size, 3).permute(0, 2, 4, 1, 3).reshape(side * side, 3 * size * size)
        return self.patch_embedding(patches) + self.position_embedding.weight


class EncoderAttention(nn.Module):
    """Every patch attends to every patch of its tile."""

    def __init__(self, vision: VisionConfig, kernels: Kernels):
        super().__init__()
        size = vision.hidden_size
        self.q_proj = Linear(size, size, bias=True, in_floats=True, kernels=kernels)
        self.k_proj = Linear(size, size, bias=True, in_floats=True, kernels=kernels)
        self.v_proj = Linear(size, size, bias=True, in_floats=True, kernels=kernels)
        self.out_proj = Linear(size, size, bias=True, in_floats=True, kernels=kernels)
        self._num_heads = vision.num_heads

    def forward(self, x: Tensor) -> Tensor:
        """x [patches, hidden] to the same."""
        q, k, v = (
            each.view(len(x), self._num_heads, -1).transpose(0, 1)
            for each in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        attended = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]  # [H, patches, D]
        return self.out_proj(attended.transpose(0, 1).reshape(len(x), -1))


class EncoderMLP(nn.Module):
    """fc2(act(fc1(x)))."""

    def __init__(self, vision: VisionConfig, kernels: Kernels):
        super().__init__()
        hidden, inner = vision.hidden_size, vision.intermediate_size
        self.fc1 = Linear(hidden, inner, bias=True, in_floats=True, kernels=kernels)
        self.fc2 = Linear(inner, hidden, bias=True, in_floats=True, kernels=kernels)
        self._activate = reference.activation(vision.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """x [patches, hidden] to the same."""
        return self.fc2(self._activate(self.fc1(x)))


class EncoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, vision: VisionConfig, kernels: Kernels):
        super().__init__()
        self.layer_norm1 = LayerNorm(vision.hidden_size, vision.layer_norm_eps)
        self.self_attn = EncoderAttention(vision, kernels)
        self.layer_norm2 = LayerNorm(vision.hidden_size, vision.layer_norm_eps)
        self.mlp = EncoderMLP(vision, kernels)

    def forward(self, x: Tensor) -> Tensor:
        """x [patches, hidden] to the same."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Encoder(nn.Module):
    """The layers, under the name that checkpoints have for them."""

    def __init__(self, vision: VisionConfig, kernels: Kernels):
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(vision, kernels) for _ in range(vision.num_layers))


class VisionModel(nn.Module):
    """Pixels of a tile to one state a patch, in the encoder's own space."""

    def __init__(self, vision: VisionConfig, kernels: Kernels):
        super().__init__()
        self.embeddings = Embeddings(vision, kernels)
        self.encoder = Encoder(vision, kernels)
        self.post_layernorm = LayerNorm(vision.hidden_size, vision.layer_norm_eps)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [S, S, 3], normalised, to [patches, hidden]."""
        x = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)


class ModalityProjection(nn.Module):
    """Several patches' states to one of the text model's."""

    def __init__(self, config: ModelConfig, vision: VisionConfig, kernels: Kernels):
        super().__init__()
        in_size = vision.hidden_size * vision.scale_factor**2
        self.proj = Linear(in_size, config.hidden_size, bias=False, in_floats=True, kernels=kernels)


class Connector(nn.Module):
    """Squares of patches, their states side by side, through one product."""

    def __init__(self, config: ModelConfig, vision: VisionConfig, kernels: Kernels):
        super().__init__()
        self.modality_projection = ModalityProjection(config, vision, kernels)
        self._per_side, self._scale = vision.patches_per_side, vision.scale_factor

    def forward(self, x: Tensor) -> Tensor:
        """x [patches, hidden] to [tokens, hidden of the text model]."""
        side, scale = self._per_side // self._scale, self._scale
        squares = x.view(side, scale, side, scale, -1).transpose(1, 2).reshape(side * side, -1)
        return self.modality_projection.proj(squares)


class Idefics3Model(LlamaModel):
    """The encoder stays in floats whatever form the text model's weights have, and runs before the step's program."""

    def __init__(self, config: ModelConfig, kernels: Kernels):
        super().__init__(config, kernels)
        assert config.vision is not None, f"{config.architecture} without a vision_config"
        self.vision_model = VisionModel(config.vision, kernels)
        self.connector = Connector(config, config.vision, kernels)
        self._mean, self._std = (
            torch.tensor(values, device=kernels.device) for values in (config.vision.mean, config.vision.std)
        )

    def embed_tile(self, pixels: Tensor) -> Tensor:
        normalised = (pixels.float() / 255 - self._mean) / self._std
        return self.connector(self.vision_model(normalised.to(self.kernels.activation_dtype)))

    def _fill(self, layer: nn.Module, attribute: str, tensor: Tensor | QuantizedWeight) -> None:
        if isinstance(layer, PositionEmbedding) and isinstance(tensor, Tensor):
            layer.weight = self.kernels.vector(tensor)
        else:
            super()._fill(layer, attribute, tensor)
