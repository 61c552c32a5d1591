"""The attention backend: plan once, run per layer, keys and values written before they are read."""

from __future__ import annotations

import itertools

import pytest
import torch

from kitfox.attention import ForwardBatch, make_attention_backend
from kitfox.kernels import reference

BLOCK_SIZE = 4
KV_HEADS, HEADS, HEAD_DIM = 2, 4, 8


def make_batch(block_table: list[list[int]], chunks: list[tuple[int, int]], caches: list[torch.Tensor]) -> ForwardBatch:
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
        attention=make_attention_backend("cpu"),
    )


def test_layers_share_a_plan_and_keep_their_own_cache_and_window() -> None:
    caches = [torch.full((6, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), torch.nan) for _ in range(3)]
    batch = make_batch([[5, 0], [2, 4]], [(0, 6), (0, 3)], caches)
    batch.attention.plan(batch)
    for layer, window in enumerate([None, 2, None]):
        q, k, v = (
            torch.randn(9, HEADS, HEAD_DIM),
            torch.randn(9, KV_HEADS, HEAD_DIM),
            torch.randn(9, KV_HEADS, HEAD_DIM),
        )
        result = batch.attention.run(layer, q, k, v, batch, scale=0.5, window=window, softcap=None)
        assert torch.equal(caches[layer][5, 0], k[:4])
        assert torch.equal(caches[layer][0, 1, :2], v[4:6])
        expected = reference.paged_attention(
            q, caches[layer], batch.block_table, batch.seq_lens, batch.query_start_loc, 0.5, window=window
        )
        assert torch.equal(result, expected)
        # The first token of each request sees only itself.
        torch.testing.assert_close(result[6], v[6].repeat_interleave(HEADS // KV_HEADS, 0))


def test_prefill_in_steps_equals_prefill_at_once() -> None:
    q, k, v = torch.randn(11, HEADS, HEAD_DIM), torch.randn(11, KV_HEADS, HEAD_DIM), torch.randn(11, KV_HEADS, HEAD_DIM)

    def run(splits: list[int]) -> torch.Tensor:
        caches = [torch.full((4, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), torch.nan)]
        parts = []
        for begin, end in itertools.pairwise(splits):
            batch = make_batch([[3, 1, 0]], [(begin, end)], caches)
            batch.attention.plan(batch)
            rows = slice(begin, end)
            parts.append(batch.attention.run(0, q[rows], k[rows], v[rows], batch, scale=0.3, window=None, softcap=None))
        return torch.cat(parts)

    whole = run([0, 11])
    assert torch.equal(run([0, 5, 6, 11]), whole)
    assert torch.equal(run(list(range(12))), whole)


def test_run_without_plan_is_a_bug() -> None:
    caches = [torch.zeros(1, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)]
    batch = make_batch([[0]], [(0, 1)], caches)
    q, k = torch.zeros(1, HEADS, HEAD_DIM), torch.zeros(1, KV_HEADS, HEAD_DIM)
    with pytest.raises(AssertionError, match="plan"):
        batch.attention.run(0, q, k, k, batch, scale=1.0, window=None, softcap=None)
