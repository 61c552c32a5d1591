"""Models that guess: a second one, the first layers of the one that is served, or a head on it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kitfox.attention.backend import AttentionBackend, ForwardBatch, make_attention_backend
from kitfox.config import CacheConfig, EngineConfig
from kitfox.errors import ConfigError
from kitfox.executor.executor import Executor
from kitfox.executor.input_batch import StepInputs
from kitfox.executor.model_runner import ModelRunner
from kitfox.kernels.native import NativeKernels
from kitfox.kv_cache.manager import make_kv_cache_manager
from kitfox.models.eagle import Eagle3Head, EagleHead, Head
from kitfox.plan import plan_draft, resolve_max_model_len
from kitfox.spec_decode.model_proposers import (
    Chunk,
    ComputedTokens,
    DraftModel,
    DraftOptions,
    DraftProposer,
    HeadModel,
    HeadOptions,
    HeadProposer,
    SelfOptions,
    SelfProposer,
)
from kitfox.spec_decode.proposer import Proposer
from kitfox.spec_decode.translation import TranslatingProposer
from kitfox.tokenizer import Tokenizer, load_tokenizer
from kitfox.weights.hub import HEAD_PATTERNS, resolve_model
from kitfox.weights.loader import read_head_weights
from kitfox.weights.model_config import read_head_config, read_model_config

logger = logging.getLogger("kitfox.executor")

# Models of one family differ in a few tokens that were added at the end: what they say is the same.
MOST_OWN_TOKENS = 128


class RunnerDrafts(DraftModel):
    """A model runner that guesses greedily over its own KV cache."""

    def __init__(self, runner: ModelRunner, block_size: int):
        self._runner = runner
        self._block_size = block_size

    @torch.inference_mode()
    def compute(self, chunks: Sequence[Chunk]) -> list[tuple[int, float]]:
        batch = _batch_of(chunks, self._runner, self._block_size, self._runner.attention)
        hidden = self._runner.forward(batch)
        token_ids, probabilities = _likeliest(self._runner.model.compute_logits(hidden[_last_rows(batch)]))
        return list(zip(token_ids.tolist(), probabilities.tolist(), strict=True))


class HeadDrafts(HeadModel):
    """A head that guesses greedily over its layer of the model's KV cache."""

    def __init__(self, head: Head, runner: ModelRunner, block_size: int):
        self._head = head
        self._runner = runner
        self._block_size = block_size
        self._attention = make_attention_backend(head.kernels)
        self._unread: dict[str, tuple[int, torch.Tensor]] = {}  # position of the first, and [n, F]
        self._own: dict[str, torch.Tensor] = {}  # [1, H]: behind each chunk computed last

    def keep(self, step: StepInputs, states: torch.Tensor) -> None:
        """The states [T, F] of a step; those of earlier ones are forgotten."""
        ends = step.query_start_loc[1:].tolist()
        chunks = zip(step.rows, step.num_computed_tokens, step.query_start_loc.tolist(), ends, strict=False)
        for row, position, start, end in chunks:
            self._unread[row.request_id] = (position, states[start:end])

    def unread(self, request_id: str) -> tuple[int, int]:
        start, states = self._unread.get(request_id, (0, ()))
        return start, len(states)

    def forget(self, request_id: str) -> None:
        self._unread.pop(request_id, None)
        self._own.pop(request_id, None)

    @torch.inference_mode()
    def compute(self, chunks: Sequence[Chunk]) -> list[tuple[int, float]]:
        states = self._forward(chunks)
        words, probabilities = _likeliest(self._head.logits(states))
        self._own = {chunk.request_id: states[row : row + 1] for row, chunk in enumerate(chunks)}
        return list(zip(self._head.token_ids(words).tolist(), probabilities.tolist(), strict=True))

    @torch.inference_mode()
    def write(self, chunks: Sequence[Chunk]) -> None:
        self._forward(chunks)

    def _forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """What the head makes of the last token of each chunk, [R, H]."""
        batch = _batch_of(chunks, self._runner, self._block_size, self._attention)
        unread = [self._unread.pop(chunk.request_id, None) for chunk in chunks]
        of_model = [
            states[: len(chunk.token_ids)] for chunk, (_, states) in zip(chunks, filter(None, unread), strict=False)
        ]
        if of_model:  # then all of them are: guesses behind guesses come together
            states = self._head.project(torch.cat(of_model))
        else:
            states = torch.cat([self._own[chunk.request_id] for chunk in chunks])
        self._attention.plan(batch)
        return self._head(batch.token_ids, states, batch)[_last_rows(batch)]


def _last_rows(batch: ForwardBatch) -> torch.Tensor:
    """[R] int64: the row of each request's last token."""
    return (batch.query_start_loc[1:] - 1).long()


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of logits [R, V] float32: where they are largest, [R] int64, and how likely that is, [R]."""
    largest, places = logits.max(dim=-1)
    return places, (largest - logits.logsumexp(dim=-1)).exp()


def _batch_of(
    chunks: Sequence[Chunk], runner: ModelRunner, block_size: int, attention: AttentionBackend
) -> ForwardBatch:
    """Chunks as a batch over the runner's KV caches."""
    lengths = [len(chunk.token_ids) for chunk in chunks]
    num_blocks = -(-max(chunk.end for chunk in chunks) // block_size)
    block_table = np.zeros((len(chunks), num_blocks), np.int32)
    for row, chunk in enumerate(chunks):
        used = chunk.block_ids[:num_blocks]
        block_table[row, : len(used)] = used
    positions = np.concatenate([np.arange(chunk.start, chunk.end, dtype=np.int64) for chunk in chunks])
    rows = np.repeat(np.arange(len(chunks)), lengths)
    blocks = block_table[rows, positions // block_size].astype(np.int64)

    def to_device(array: object) -> torch.Tensor:
        return torch.as_tensor(array).to(runner.device)

    return ForwardBatch(
        token_ids=to_device(np.concatenate([np.asarray(chunk.token_ids, np.int64) for chunk in chunks])),
        positions=to_device(positions),
        slot_mapping=to_device(blocks * block_size + positions % block_size),
        block_table=to_device(block_table),
        seq_lens=to_device(np.asarray([chunk.end for chunk in chunks], np.int32)),
        query_start_loc=to_device(np.cumsum([0, *lengths], dtype=np.int32)),
        kv_caches=runner.kv_caches,
        attention=attention,
    )


def make_draft_proposer(config: EngineConfig, model: Executor, path: Path, num_blocks: int) -> Proposer:
    """Load the draft model that the configuration names; guesses of one with another vocabulary are translated.

    Args:
        model, path: what is guessed for.
        num_blocks: of its KV cache; the draft's has no more.

    Raises:
        ConfigError: its memory is too small for a block.
    """
    options = DraftOptions(**config.speculation.options)
    draft_path = resolve_model(options.model, revision=options.revision).path
    draft_config = read_model_config(draft_path)
    target_tokens = load_tokenizer(Path(config.model.tokenizer) if config.model.tokenizer else path)
    draft_tokens = load_tokenizer(draft_path)
    difference = vocabulary_difference(target_tokens, draft_tokens)
    max_model_len = min(
        resolve_max_model_len(config, model.model.config),
        draft_config.max_position_embeddings,
        options.max_model_len or draft_config.max_position_embeddings,
    )
    draft = options.config_of_draft(config).replace(model={"max_model_len": max_model_len})
    plan = plan_draft(draft, draft_config, own_kv_bytes=options.memory_bytes, num_tokens=options.chunk_tokens)
    block_bytes = config.cache.block_size * plan.kv_bytes_per_token
    num_blocks = min(num_blocks, options.memory_bytes // block_bytes)
    if num_blocks < 1:
        raise ConfigError(
            f"memory_bytes of the draft model must be >= {block_bytes}, for one block. Given: {options.memory_bytes}"
        )
    executor = Executor(draft, draft_config, draft_path, num_blocks)
    model.add_companion(executor)
    proposer = DraftProposer(
        RunnerDrafts(executor.runner, config.cache.block_size),
        make_kv_cache_manager(CacheConfig(organisation="paged", block_size=config.cache.block_size), num_blocks),
        kv_bytes=num_blocks * block_bytes,
        max_model_len=max_model_len,
        vocab_size=model.model.config.vocab_size if difference is None else draft_config.vocab_size,
        min_probability=options.min_probability,
        chunk_tokens=options.chunk_tokens,
    )
    if difference is None:
        return proposer
    logger.warning("draft model %s has another vocabulary (%s): its guesses are translated", options.model, difference)
    return TranslatingProposer(proposer, target_tokens, draft_tokens)


def vocabulary_difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """Where two tokenizers do not have the same tokens, in words; None if they do but for a few at the end."""
    num_common = min(target.vocab_size, draft.vocab_size)
    if max(target.vocab_size, draft.vocab_size) - num_common > MOST_OWN_TOKENS:
        return f"{draft.vocab_size} tokens, not {target.vocab_size}"
    for token_id in range(num_common):
        own, other = target.token_bytes(token_id), draft.token_bytes(token_id)
        if own != other:
            return f"token {token_id} is {other!r}, not {own!r}"
    return None


def make_self_proposer(config: EngineConfig, executor: Executor, computed: ComputedTokens) -> SelfProposer:
    """Guesses of the first layers of a loaded model.

    Raises:
        ConfigError: it has fewer layers.
    """
    options = SelfOptions(**config.speculation.options)
    model_config = executor.model.config
    num_layers = options.num_layers or max(model_config.num_layers // 2, 1)
    if num_layers > model_config.num_layers:
        raise ConfigError(f"num_layers that guess must be <= {model_config.num_layers}. Given: {num_layers}")
    return SelfProposer(
        RunnerDrafts(executor.first_layers(num_layers), config.cache.block_size),
        computed,
        block_size=config.cache.block_size,
        vocab_size=model_config.vocab_size,
        min_probability=options.min_probability,
    )


def make_head_proposer(config: EngineConfig, executor: Executor, computed: ComputedTokens) -> HeadProposer:
    """Load the head that the configuration names, and have the model leave its hidden states for it.

    Raises:
        ConfigError, WeightsError: it does not fit the model.
    """
    options = HeadOptions(**config.speculation.options)
    path = resolve_model(options.model, revision=options.revision, patterns=HEAD_PATTERNS).path
    head_config, tensors = read_head_config(path), read_head_weights(path)
    shape = head_config.model
    if isinstance(executor.kernels, NativeKernels) and shape.head_dim % 16:
        raise ConfigError(f"a head's head_dim must be a multiple of 16 here. Given: {shape.head_dim}")
    make_head = EagleHead if config.speculation.method == "eagle" else Eagle3Head
    has_bias = "fc.bias" in tensors
    head = make_head(
        head_config, executor.model, executor.kernels, cache_layer=executor.num_kv_layers, has_bias=has_bias
    )
    head.load_weights(tensors)
    executor.add_layer(shape.num_kv_heads, shape.head_dim, head.feature_layers)
    drafts = HeadDrafts(head, executor.runner, config.cache.block_size)
    proposer = HeadProposer(
        drafts,
        computed,
        block_size=config.cache.block_size,
        vocab_size=executor.model.config.vocab_size,
        min_probability=options.min_probability,
    )

    def on_states(step: StepInputs, states: torch.Tensor) -> None:
        proposer.catch_up([row.request_id for row in step.rows])
        drafts.keep(step, states)

    executor.runner.on_states = on_states
    return proposer
