"""Tiny random checkpoints of every family, written by `transformers`, and a run of ours over a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from kitfox.attention import ForwardBatch, make_attention_backend
from kitfox.executor.step_program import StepProgram
from kitfox.kernels.interface import Kernels
from kitfox.kernels.native import NativeKernels
from kitfox.models import Model, make_model
from kitfox.weights.loader import iter_weights
from kitfox.weights.model_config import read_model_config
from tests.native import poison, torch_kernels

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
}


def llama(**keys: Any) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**{**SHAPE, **keys})


def mistral(**keys: Any) -> transformers.PretrainedConfig:
    return transformers.MistralConfig(**{**SHAPE, "head_dim": 16, "sliding_window": 6, **keys})


def qwen2(**keys: Any) -> transformers.PretrainedConfig:
    return transformers.Qwen2Config(**{**SHAPE, **keys})


def qwen3(**keys: Any) -> transformers.PretrainedConfig:
    return transformers.Qwen3Config(**{**SHAPE, "head_dim": 16, **keys})


def gemma3(**keys: Any) -> transformers.PretrainedConfig:
    own = {
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
        "rope_parameters": GEMMA_ROPE,
    }
    return transformers.Gemma3TextConfig(**{**SHAPE, **own, **keys})


FAMILIES: dict[str, Callable[..., transformers.PretrainedConfig]] = {
    "llama": llama,
    "llama-tied": partial(llama, tie_word_embeddings=True),
    "llama-biases": partial(llama, attention_bias=True, mlp_bias=True),
    "llama-llama3-rope": partial(llama, rope_parameters=LLAMA3),
    "llama-linear-rope": partial(llama, rope_parameters=LINEAR),
    "mistral-sliding": mistral,
    "mistral-global": partial(mistral, sliding_window=None),
    "qwen2": qwen2,
    "qwen2-upper-layers-slide": partial(qwen2, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": qwen3,
    "gemma3": gemma3,
    "gemma3-logit-softcap": partial(gemma3, final_logit_softcapping=3.0),
}


def save_checkpoint(config: transformers.PretrainedConfig, path: Path) -> transformers.PreTrainedModel:
    """Write a model whose every parameter is random, norms and biases too, so that a forgotten one shows."""
    config._attn_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in theirs.parameters():
            spread = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            centre = parameter.mean() if parameter.dim() == 1 else 0.0
            parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(path)
    return theirs


def load_ours(path: Path, kernels: Kernels | None = None) -> Model:
    """On the reference kernels in float32 unless others are given."""
    config = read_model_config(path)
    model = make_model(config, kernels or torch_kernels())
    model.load_weights(iter_weights(path, config))
    return model


@torch.inference_mode()
def their_logits(theirs: transformers.PreTrainedModel, prompt: Tensor) -> Tensor:
    return theirs(prompt[None]).logits[0]


@dataclass
class PagedRun:
    """Requests that share one cache, in blocks whose ids are in random order; unwritten slots are not numbers.

    Attributes:
        captured: replay a recorded forward pass instead of calling the model's.
        adapters: the adapter of a request, by its index.
    """

    model: Model
    prompts: list[Tensor]
    block_size: int = 16
    captured: bool = False
    adapters: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, length = self.model.config, max(len(prompt) for prompt in self.prompts)
        kernels = self.model.kernels
        per_request = -(-length // self.block_size)
        num_blocks = len(self.prompts) * per_request + 2
        shape = (num_blocks, self.block_size, config.num_kv_heads, config.head_dim)
        self.kv_caches = [poison(kernels.make_kv_cache(*shape)) for _ in range(config.num_layers)]
        shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3))
        self.block_table = shuffled[: len(self.prompts) * per_request].view(len(self.prompts), -1).int()
        self.attention = make_attention_backend(kernels)
        self.forward: Callable[[ForwardBatch], Tensor] = self.model.forward
        if self.captured:
            assert isinstance(kernels, NativeKernels)
            self.forward = StepProgram(self.model, kernels, self.kv_caches).replay
        self.num_computed = [0] * len(self.prompts)

    @torch.inference_mode()
    def step(self, chunks: dict[int, int]) -> dict[int, Tensor]:
        """Compute the next chunks[i] tokens of request i; returns their logits [n, V]."""
        ids, positions, slots, ends = [], [], [], []
        for request, count in chunks.items():
            position = torch.arange(self.num_computed[request], self.num_computed[request] + count)
            ids.append(self.prompts[request][position])
            positions.append(position)
            blocks = self.block_table[request].long()[position // self.block_size]
            slots.append(blocks * self.block_size + position % self.block_size)
            self.num_computed[request] += count
            ends.append(self.num_computed[request])
        counts = list(chunks.values())
        query_start_loc = torch.tensor([0, *counts]).cumsum(0).int()
        starts = query_start_loc.tolist()
        rows = {request: slice(*starts[index : index + 2]) for index, request in enumerate(chunks)}
        batch = ForwardBatch(
            token_ids=torch.cat(ids),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            block_table=self.block_table[list(chunks)],
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            query_start_loc=query_start_loc,
            kv_caches=self.kv_caches,
            attention=self.attention,
            adapter_rows=[(self.adapters[request], rows[request]) for request in chunks if request in self.adapters],
        )
        self.attention.plan(batch)
        logits = self.model.compute_logits(self.forward(batch))
        return dict(zip(chunks, logits.split(counts), strict=True))

    def run(self, steps: Iterable[dict[int, int]]) -> list[Tensor]:
        """All steps, then the logits of each request's prompt [length, V]."""
        collected: dict[int, list[Tensor]] = {request: [] for request in range(len(self.prompts))}
        for chunks in steps:
            for request, logits in self.step(chunks).items():
                collected[request].append(logits)
        return [torch.cat(parts) for parts in collected.values()]


def random_prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed))
