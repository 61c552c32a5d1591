"""Checkpoints of heads in the forms that real ones have, and what they compute, written down plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu

SIZE, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, VOCAB = 576, 9, 3, 64, 640, 30, 49152  # the default model's, but INNER
WORDS = 1000
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
}
Tensors = dict[str, Tensor]


def random_layer(prefix: str, *, wide: int, generator: torch.Generator) -> Tensors:
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, wide),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, wide),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, wide),
        "self_attn.o_proj": (SIZE, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, SIZE),
        "mlp.up_proj": (INNER, SIZE),
        "mlp.down_proj": (SIZE, INNER),
        "post_attention_layernorm": (SIZE,),
    }
    return {f"{prefix}.{name}.weight": random(shape, generator) for name, shape in shapes.items()}


def random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return 1 + 0.1 * torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator) / shape[1] ** 0.5


def eagle_tensors(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    fc = {"fc.weight": random((SIZE, 2 * SIZE), generator), "fc.bias": torch.randn(SIZE, generator=generator)}
    return fc | random_layer("layers.0", wide=SIZE, generator=generator)


def eagle3_tensors(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(VOCAB, generator=generator)[:WORDS].sort().values
    return {
        "fc.weight": random((SIZE, 3 * SIZE), generator),
        "midlayer.input_layernorm.weight": random((SIZE,), generator),
        "midlayer.hidden_norm.weight": random((SIZE,), generator),
        **random_layer("midlayer", wide=2 * SIZE, generator=generator),
        "norm.weight": random((SIZE,), generator),
        "lm_head.weight": random((WORDS, SIZE), generator),
        "d2t": tokens - torch.arange(WORDS),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, tokens, True),
    }


def repeating_tensors() -> Tensors:
    """An EAGLE head that guesses that the last token comes again: it says what the model said one place before."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in eagle_tensors().items()}
    tensors["fc.weight"][:, SIZE:] = torch.eye(SIZE)
    return tensors


def write_head(folder: Path, tensors: Tensors, *, pickled: bool = False, **config: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return str(folder)


# ---- what they compute ----------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight


def rotate(x: Tensor) -> Tensor:
    """x [T, heads, D], at positions 0 to T - 1."""
    half = HEAD_DIM // 2
    frequencies = CONFIG["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).float()


def attend(tensors: Tensors, prefix: str, x: Tensor) -> Tensor:
    def heads(name: str, count: int) -> Tensor:
        return linear(x, tensors[f"{prefix}.self_attn.{name}_proj.weight"]).view(len(x), count, HEAD_DIM)

    q, k, v = rotate(heads("q", HEADS)), rotate(heads("k", KV_HEADS)), heads("v", KV_HEADS)
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / HEAD_DIM**0.5
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    mixed = torch.einsum("hts,shd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
    return linear(mixed.reshape(len(x), -1), tensors[f"{prefix}.self_attn.o_proj.weight"])


def feed(tensors: Tensors, prefix: str, x: Tensor) -> Tensor:
    gate, up = (linear(x, tensors[f"{prefix}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return linear(silu(gate) * up, tensors[f"{prefix}.mlp.down_proj.weight"])


def eagle_states(tensors: Tensors, embedded: Tensor, states: Tensor) -> Tensor:
    x = linear(torch.cat((embedded, states), -1), tensors["fc.weight"], tensors["fc.bias"])
    x = x + attend(tensors, "layers.0", x)
    return x + feed(tensors, "layers.0", norm(x, tensors["layers.0.post_attention_layernorm.weight"]))


def eagle3_states(tensors: Tensors, embedded: Tensor, states: Tensor) -> Tensor:
    """states: projected."""
    layer = "midlayer"
    wide = torch.cat(
        (
            norm(embedded, tensors[f"{layer}.input_layernorm.weight"]),
            norm(states, tensors[f"{layer}.hidden_norm.weight"]),
        ),
        -1,
    )
    x = states + attend(tensors, layer, wide)
    return x + feed(tensors, layer, norm(x, tensors[f"{layer}.post_attention_layernorm.weight"]))
