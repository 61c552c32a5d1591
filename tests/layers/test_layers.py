"""What a layer decides for itself: which tokens it sees, what a weight is before it is loaded, where a cap applies."""

from __future__ import annotations

import torch

from kitfox.config import ModelConfig
from kitfox.layers.attention import SelfAttention
from kitfox.layers.embedding import Embedding
from kitfox.layers.linear import Linear
from kitfox.layers.norm import RMSNorm
from kitfox.layers.weights import empty_places
from tests.native import torch_kernels

KERNELS = torch_kernels()
CONFIG = ModelConfig(
    architecture="Gemma3ForCausalLM",
    vocab_size=11,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position_embeddings=32,
    attention_bias=True,
    sliding_window=4,
    sliding_layers=(True, False),
    query_scale=0.25,
    attention_softcap=30.0,
)


def attention(layer: int) -> SelfAttention:
    return SelfAttention(CONFIG, layer, qk_norm=True, norm_offset=1.0, kernels=KERNELS)


def test_only_sliding_layers_have_the_window() -> None:
    assert [attention(layer).window for layer in range(2)] == [4, None]


def test_attention_takes_scale_cap_and_biases_from_the_config() -> None:
    layer = attention(0)
    assert (layer.scale, layer.softcap) == (0.25, 30.0)
    assert {name: list(shape) for name, (_, _, shape) in empty_places(layer).items()} == {
        "q_proj.weight": [24, 8],
        "q_proj.bias": [24],
        "k_proj.weight": [12, 8],
        "k_proj.bias": [12],
        "v_proj.weight": [12, 8],
        "v_proj.bias": [12],
        "o_proj.weight": [8, 24],
        "q_norm.weight": [6],
        "k_norm.weight": [6],
    }


def test_a_place_is_filled_with_what_the_kernels_make() -> None:
    linear = Linear(3, 2, bias=True, kernels=KERNELS)
    places = empty_places(linear)
    assert {name: (owner is linear, attribute) for name, (owner, attribute, _) in places.items()} == {
        "weight": (True, "weight"),
        "bias": (True, "bias"),
    }
    linear.weight = KERNELS.matrix(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]]))
    assert list(empty_places(linear)) == ["bias"]
    linear.bias = KERNELS.vector(torch.tensor([0.5, 0.25]))
    assert not empty_places(linear)
    assert linear(torch.tensor([[1.0, 1.0, 1.0]])).tolist() == [[6.5, 1.25]]
    assert Linear(3, 2, bias=False, kernels=KERNELS).bias is None


def test_logits_are_float32_and_capped() -> None:
    kernels = torch_kernels(torch.bfloat16)
    head = Embedding(2, 2, kernels=kernels)
    head.weight = kernels.matrix(torch.tensor([[100.0, 0.0], [0.0, 1.0]]))
    hidden = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    assert head.logits(hidden, None).tolist() == [[100.0, 1.0]]
    capped = head.logits(hidden, 5.0)
    assert capped.dtype == torch.float32
    torch.testing.assert_close(capped, torch.tensor([[5.0, 5.0 * torch.tanh(torch.tensor(0.2))]]))


def test_norm_offset_is_added_to_the_weight() -> None:
    norm = RMSNorm(2, 0.0, offset=1.0, kernels=KERNELS)
    norm.weight = KERNELS.vector(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(norm(torch.tensor([[3.0, 3.0]])), torch.tensor([[1.0, 2.0]]))
