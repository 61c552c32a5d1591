"""What a layer decides for itself: which tokens it sees, what a weight is before it is loaded, where a cap applies."""

from __future__ import annotations

import torch

from kitfox.config import ModelConfig
from kitfox.layers.attention import SelfAttention
from kitfox.layers.embedding import Embedding
from kitfox.layers.linear import Linear
from kitfox.layers.norm import RMSNorm

CPU = torch.device("cpu")
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
    return SelfAttention(CONFIG, layer, qk_norm=True, norm_offset=1.0, dtype=torch.float32, device=CPU)


def test_only_sliding_layers_have_the_window() -> None:
    assert [attention(layer).window for layer in range(2)] == [4, None]


def test_attention_takes_scale_cap_and_biases_from_the_config() -> None:
    layer = attention(0)
    assert (layer.scale, layer.softcap) == (0.25, 30.0)
    assert {name: list(parameter.shape) for name, parameter in layer.named_parameters()} == {
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


def test_parameters_have_the_chosen_dtype_and_no_gradient() -> None:
    linear = Linear(3, 2, bias=True, dtype=torch.bfloat16, device=CPU)
    for parameter in linear.parameters():
        assert parameter.dtype == torch.bfloat16
        assert not parameter.requires_grad


def test_logits_are_float32_and_capped() -> None:
    head = Embedding(2, 2, dtype=torch.bfloat16, device=CPU)
    head.weight.copy_(torch.tensor([[100.0, 0.0], [0.0, 1.0]]))
    hidden = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    assert head.logits(hidden, None).tolist() == [[100.0, 1.0]]
    capped = head.logits(hidden, 5.0)
    assert capped.dtype == torch.float32
    torch.testing.assert_close(capped, torch.tensor([[5.0, 5.0 * torch.tanh(torch.tensor(0.2))]]))


def test_norm_offset_is_added_to_the_weight() -> None:
    norm = RMSNorm(2, 0.0, offset=1.0, dtype=torch.float32, device=CPU)
    norm.weight.copy_(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(norm(torch.tensor([[3.0, 3.0]])), torch.tensor([[1.0, 2.0]]))
