"""The attention backend: plan once, run per layer, keys and values written before they are read."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kitfox.attention import ForwardBatch, make_attention_backend
from kitfox.kernels import reference
from kitfox.kernels.interface import Kernels
from tests.native import native_kernels, needs_native, poison, torch_kernels

BLOCK_SIZE = 16
KV_HEADS, HEADS, HEAD_DIM = 2, 4, 16
EITHER = pytest.mark.parametrize("kind", ["torch", pytest.param("native", marks=needs_native)])
# Rotates by nothing, so that what is written is what was given.
UNTURNED = torch.stack((torch.ones(64, HEAD_DIM // 2), torch.zeros(64, HEAD_DIM // 2)), dim=1)


def make_kernels(kind: str) -> Kernels:
    return native_kernels() if kind == "native" else torch_kernels()


def make_caches(kernels: Kernels, num_layers: int, num_blocks: int) -> list[Tensor]:
    """Slots that nothing was written to are not numbers."""
    return [poison(kernels.make_kv_cache(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)) for _ in range(num_layers)]


def make_batch(
    kernels: Kernels, block_table: list[list[int]], chunks: list[tuple[int, int]], caches: list[Tensor]
) -> ForwardBatch:
    """A step that computes positions [begin, end) of each request."""
    positions = torch.cat([torch.arange(begin, end) for begin, end in chunks])
    table = torch.tensor(block_table, dtype=torch.int32)
    slots = torch.cat(
        [
            table[request].long()[torch.arange(begin, end) // BLOCK_SIZE] * BLOCK_SIZE
            + torch.arange(begin, end) % BLOCK_SIZE
            for request, (begin, end) in enumerate(chunks)
        ]
    )
    return ForwardBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=slots,
        block_table=table,
        seq_lens=torch.tensor([end for _, end in chunks], dtype=torch.int32),
        query_start_loc=torch.tensor([0, *(end - begin for begin, end in chunks)]).cumsum(0).int(),
        kv_caches=caches,
        attention=make_attention_backend(kernels),
    )


def random_qkv(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(num_tokens, HEADS * HEAD_DIM)
    k, v = torch.randn(2, num_tokens, KV_HEADS * HEAD_DIM)
    return q, k, v


def write_and_run(
    layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, *, window: int | None = None
) -> Tensor:
    q = batch.attention.rotate_and_write(layer, q, k, v, batch, UNTURNED, q_norm=None, k_norm=None)
    return batch.attention.run(layer, q, batch, scale=0.5, window=window, softcap=None)


def test_layers_share_a_plan_and_keep_their_own_cache_and_window() -> None:
    kernels = torch_kernels()
    caches = make_caches(kernels, 3, 6)
    batch = make_batch(kernels, [[5, 0], [2, 4]], [(0, 18), (0, 3)], caches)
    batch.attention.plan(batch)
    for layer, window in enumerate([None, 2, None]):
        q, k, v = random_qkv(21)
        result = write_and_run(layer, q, k, v, batch, window=window)
        heads_of_k, heads_of_v = (x.view(21, KV_HEADS, HEAD_DIM) for x in (k, v))
        assert torch.equal(caches[layer][5, 0], heads_of_k[:16])
        assert torch.equal(caches[layer][0, 1, :2], heads_of_v[16:18])
        expected = reference.paged_attention(
            q.view(21, HEADS, HEAD_DIM),
            caches[layer],
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            0.5,
            window=window,
        )
        assert torch.equal(result, expected.flatten(1))
        # The first token of each request sees only itself.
        alone = heads_of_v[18].repeat_interleave(HEADS // KV_HEADS, 0)
        torch.testing.assert_close(result[18].view(HEADS, HEAD_DIM), alone)


@EITHER
def test_prefill_in_steps_equals_prefill_at_once(kind: str) -> None:
    kernels = make_kernels(kind)
    q, k, v = random_qkv(41)

    def run(splits: list[int]) -> Tensor:
        caches = make_caches(kernels, 1, 4)
        parts = []
        for begin, end in itertools.pairwise(splits):
            batch = make_batch(kernels, [[3, 1, 0]], [(begin, end)], caches)
            batch.attention.plan(batch)
            rows = slice(begin, end)
            parts.append(write_and_run(0, q[rows], k[rows], v[rows], batch))
        return torch.cat(parts)

    whole = run([0, 41])
    assert torch.isfinite(whole).all()
    assert torch.equal(run([0, 5, 6, 17, 41]), whole)
    assert torch.equal(run(list(range(42))), whole)


@EITHER
def test_run_without_plan_is_a_bug(kind: str) -> None:
    kernels = make_kernels(kind)
    batch = make_batch(kernels, [[0]], [(0, 1)], make_caches(kernels, 1, 1))
    q, _, _ = random_qkv(1)
    with pytest.raises(AssertionError, match="plan"):
        batch.attention.run(0, q, batch, scale=1.0, window=None, softcap=None)
