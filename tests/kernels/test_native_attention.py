"""Compiled attention, cache writes and block copies against `reference`, on each instruction set of this machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kitfox.kernels import library, reference
from kitfox.kernels.abi import StepStruct
from kitfox.kernels.native import NativeKernels
from tests.native import as_kept, cache_from_reference, cache_to_reference, kept_for_good

ISAS = library.usable_instruction_sets()
pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels for this machine")

KV_DTYPES = [torch.bfloat16, torch.float32, torch.int16]
# In fixed point queries and weights are rounded to 12 bits, which the reference does not do.
TOLERANCES = {torch.bfloat16: 1e-5, torch.float32: 1e-5, torch.int16: 3e-3}

Make = Callable[..., NativeKernels]


def step_struct(**arrays: Tensor) -> StepStruct:
    """A step by the names of its arrays, which must outlive it."""
    return StepStruct(
        num_rows=arrays["token_ids"].shape[0],
        num_requests=arrays["seq_lens"].shape[0],
        block_table_stride=arrays["block_table"].stride(0),
        **{name: array.data_ptr() for name, array in arrays.items()},
    )


@pytest.fixture(autouse=True)
def outputs_start_as_nan() -> Iterator[None]:
    """Deterministic mode makes torch.empty fill what it returns."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=ISAS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("KITFOX_CPU_ISA", request.param)
    made: list[NativeKernels] = []

    def make_kernels(kv_dtype: torch.dtype = torch.bfloat16, num_threads: int = 2) -> NativeKernels:
        loaded = library.load()
        assert loaded is not None
        made.append(
            NativeKernels(loaded, request.param, dtype=torch.float32, kv_dtype=kv_dtype, num_threads=num_threads)
        )
        return made[-1]

    yield make_kernels
    for kernels in made:
        kernels.close()


@dataclass
class Batch:
    """Queries of some requests and a cache whose unused slots are NaN."""

    q: Tensor  # [T, H, D]
    kv_cache: Tensor  # [N, 2, S, K, D] float32; the last block is NaN
    block_table: Tensor
    seq_lens: Tensor
    query_lens: list[int]

    @classmethod
    def random(
        cls,
        requests: list[tuple[int, int]],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        kv_dtype: torch.dtype,
        query_scale: float = 1.0,
    ) -> Batch:
        """requests: (context length, number of queries at its end)."""
        generator = torch.Generator().manual_seed(0)
        sizes = [-(-context // block_size) for context, _ in requests]
        num_blocks = sum(sizes) + 1
        order = torch.randperm(num_blocks - 1, generator=generator).split(sizes)
        block_table = torch.full((len(requests), max(sizes) + 1), num_blocks - 1, dtype=torch.int32)
        kv_cache = torch.full((num_blocks, 2, block_size, num_kv_heads, head_dim), torch.nan)
        for request, (context, _) in enumerate(requests):
            block_table[request, : sizes[request]] = order[request]
            positions = torch.arange(context)
            kv = kept_for_good(torch.randn(context, 2, num_kv_heads, head_dim, generator=generator), kv_dtype)
            kv_cache[order[request][positions // block_size], :, positions % block_size] = kv
        query_lens = [queries for _, queries in requests]
        q = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator) * query_scale
        return cls(q, kv_cache, block_table, torch.tensor([context for context, _ in requests]).int(), query_lens)

    @property
    def query_start_loc(self) -> Tensor:
        return torch.tensor([0, *self.query_lens]).cumsum(0).int()

    def expected(self, window: int | None, softcap: float | None) -> Tensor:
        scale = self.q.shape[2] ** -0.5
        kv_cache = self.kv_cache.nan_to_num()
        arguments = (self.q, kv_cache, self.block_table, self.seq_lens, self.query_start_loc, scale)
        return reference.paged_attention(*arguments, window=window, softcap=softcap)

    def attend(
        self, kernels: NativeKernels, native: Tensor, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        unread = torch.zeros(len(self.q), dtype=torch.int64)
        query_start_loc = self.query_start_loc
        step = step_struct(
            token_ids=unread,
            positions=unread,
            slot_mapping=unread,
            query_start_loc=query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
        )
        scale = self.q.shape[2] ** -0.5
        out = kernels.attention(self.q.flatten(1), native, scale=scale, window=window, softcap=softcap, step=step)
        return out.view_as(self.q)

    def part(self, slices: list[tuple[int, int, int]]) -> tuple[Batch, Tensor]:
        """The queries [begin, end) of requests, as a step of their own; and which rows of this batch they are."""
        starts = self.query_start_loc.tolist()
        requests = [request for request, _, _ in slices]
        rows = torch.cat([starts[request] + torch.arange(begin, end) for request, begin, end in slices])
        seq_lens = [int(self.seq_lens[request]) - self.query_lens[request] + end for request, _, end in slices]
        query_lens = [end - begin for _, begin, end in slices]
        block_table = self.block_table[requests]
        return Batch(self.q[rows], self.kv_cache, block_table, torch.tensor(seq_lens).int(), query_lens), rows


MIX = [(1, 1), (700, 1), (33, 33), (40, 0), (530, 90), (1025, 2), (129, 5), (513, 1)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64, 48])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (4, 1, 256)])
def test_attention(
    make: Make, kv_dtype: torch.dtype, block_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    kernels = make(kv_dtype)
    batch = Batch.random(
        MIX,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        kv_dtype=kv_dtype,
    )
    native = cache_from_reference(batch.kv_cache, kernels)
    for window, softcap in [(None, None), (1, None), (100, None), (600, 5.0)]:
        result = batch.attend(kernels, native, window, softcap)
        tolerance = TOLERANCES[kv_dtype]
        torch.testing.assert_close(result, batch.expected(window, softcap), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int16])
@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 7, 8, 13, 16, 60])
@pytest.mark.parametrize("head_dim", [48, 80, 128])
def test_attention_of_any_number_of_heads_to_a_kv_head(
    make: Make, kv_dtype: torch.dtype, num_heads: int, head_dim: int
) -> None:
    kernels = make(kv_dtype)
    batch = Batch.random(
        [(200, 3), (600, 1), (7, 7)],
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=head_dim,
        block_size=32,
        kv_dtype=kv_dtype,
    )
    result = batch.attend(kernels, cache_from_reference(batch.kv_cache, kernels))
    tolerance = TOLERANCES[kv_dtype]
    torch.testing.assert_close(result, batch.expected(None, None), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(torch.bfloat16, 1e-3), (torch.int16, 0.1)])
def test_scores_far_apart(make: Make, kv_dtype: torch.dtype, tolerance: float) -> None:
    kernels = make(kv_dtype)
    batch = Batch.random(
        MIX, num_heads=6, num_kv_heads=2, head_dim=64, block_size=32, kv_dtype=kv_dtype, query_scale=100.0
    )
    result = batch.attend(kernels, cache_from_reference(batch.kv_cache, kernels))
    torch.testing.assert_close(result, batch.expected(None, None), rtol=tolerance, atol=tolerance)


def test_fixed_point_of_values_far_apart(make: Make) -> None:
    """A token that most of the weight goes to, with values of almost nothing, as the first of a text often has."""
    kernels = make(torch.int16)
    batch = Batch.random([(300, 200)], num_heads=6, num_kv_heads=2, head_dim=64, block_size=32, kv_dtype=torch.float32)
    first = batch.block_table[0, 0]
    batch.kv_cache[first, 0, 0] *= 3
    for size in (0.0, 1e-20, 1e-3):
        batch.kv_cache[first, 1, 0] = as_kept(size * torch.randn(2, 64), torch.int16)
        batch.kv_cache = as_kept(batch.kv_cache, torch.int16)
        result = batch.attend(kernels, cache_from_reference(batch.kv_cache, kernels))
        torch.testing.assert_close(result, batch.expected(None, None), rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("half", [0, 1])
def test_what_is_not_finite_reaches_those_that_see_it(make: Make, half: int) -> None:
    kernels = make(torch.int16)
    batch = Batch.random([(300, 200)], num_heads=6, num_kv_heads=2, head_dim=64, block_size=32, kv_dtype=torch.int16)
    expected = batch.attend(kernels, cache_from_reference(batch.kv_cache, kernels))
    seen_from = 250
    batch.kv_cache[batch.block_table[0, seen_from // 32], half, seen_from % 32, 0, 5] = torch.inf
    result = batch.attend(kernels, cache_from_reference(batch.kv_cache, kernels))
    first_row = seen_from - 100
    assert torch.equal(result[:first_row], expected[:first_row])
    assert result[first_row:, :3].isnan().all()
    assert torch.equal(result[first_row:, 3:], expected[first_row:, 3:])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (8, 2, 48), (3, 3, 128)])
@pytest.mark.parametrize("window", [None, 90, 700])
def test_a_row_has_the_same_bits_however_it_is_computed(
    make: Make, kv_dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None
) -> None:
    requests = [*MIX, (2100, 100), (1600, 1)]
    batch = Batch.random(
        requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=32,
        kv_dtype=kv_dtype,
    )
    threads = [make(kv_dtype, num_threads) for num_threads in (1, 2, 3)]
    native = cache_from_reference(batch.kv_cache, threads[0])
    whole = batch.attend(threads[0], native, window)
    for kernels in threads[1:]:
        for _ in range(3):
            assert torch.equal(batch.attend(kernels, native, window), whole)
    pick = random.Random(0)
    for _ in range(12):
        slices = []
        for request, (_, queries) in enumerate(requests):
            if queries and pick.random() < 0.4:
                begin = pick.randrange(queries)
                slices.append((request, begin, min(queries, begin + pick.choice([1, 1, 2, 3, 16, 17, 50, 100]))))
        if slices:
            part, rows = batch.part(slices)
            assert torch.equal(part.attend(pick.choice(threads), native, window), whole[rows]), slices


def test_blocks_that_left_the_window_are_not_looked_at(make: Make) -> None:
    kernels = make()
    batch = Batch.random(
        [(700, 1), (700, 40)], num_heads=9, num_kv_heads=3, head_dim=64, block_size=16, kv_dtype=torch.bfloat16
    )
    native = cache_from_reference(batch.kv_cache, kernels)
    result = batch.attend(kernels, native, 100)
    batch.block_table[0, : (700 - 100) // 16] = 2**30
    batch.block_table[1, : (700 - 39 - 100) // 16] = 2**30
    assert torch.equal(batch.attend(kernels, native, 100), result)


def test_queries_need_not_be_aligned(make: Make) -> None:
    kernels = make()
    batch = Batch.random(
        [(60, 40), (50, 1)], num_heads=6, num_kv_heads=2, head_dim=64, block_size=32, kv_dtype=torch.bfloat16
    )
    native = cache_from_reference(batch.kv_cache, kernels)
    result = batch.attend(kernels, native)
    memory = torch.empty(batch.q.numel() + 1)
    shifted = memory[1:].view_as(batch.q)
    shifted.copy_(batch.q)
    batch.q = shifted
    assert torch.equal(batch.attend(kernels, native), result)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 16), (3, 1, 80), (4, 1, 256)])
@pytest.mark.parametrize(("has_norms", "offset"), [(False, 0.0), (True, 0.0), (True, 1.0)])
def test_rotate_and_write(
    make: Make,
    kv_dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norms: bool,
    offset: float,
) -> None:
    kernels, alone = make(kv_dtype, 3), make(kv_dtype, 1)
    generator = torch.Generator().manual_seed(0)
    num_rows, num_blocks, block_size = 37, 7, 32
    q = torch.randn(num_rows, num_heads * head_dim, generator=generator)
    k, v = torch.randn(2, num_rows, num_kv_heads * head_dim, generator=generator)
    table = torch.randn(50, 2, head_dim // 2, generator=generator)
    norms = list(torch.randn(2, head_dim, generator=generator)) if has_norms else [None, None]
    positions = torch.randint(50, (num_rows,), generator=generator)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_rows]
    kv_cache = torch.full((num_blocks, 2, block_size, num_kv_heads, head_dim), torch.nan)

    def run(kernels: NativeKernels, native: Tensor, rows: slice) -> Tensor:
        arrays = {
            "token_ids": positions[rows],
            "positions": positions[rows],
            "slot_mapping": slots[rows],
            "query_start_loc": torch.zeros(2).int(),
            "seq_lens": torch.zeros(1).int(),
            "block_table": torch.zeros(1, 1).int(),
        }
        step = step_struct(**arrays)
        return kernels.rotate_and_write(
            q[rows],
            k[rows],
            v[rows],
            table,
            native,
            q_norm=norms[0],
            k_norm=norms[1],
            eps=1e-5,
            offset=offset,
            step=step,
        )

    def rotate(x: Tensor, norm: Tensor | None) -> Tensor:
        heads = x.unflatten(1, (-1, head_dim))
        if norm is not None:
            heads = reference.rms_norm(heads, norm, 1e-5, offset=offset)
        return reference.apply_rotary(heads, table, positions)

    native = cache_from_reference(kv_cache, kernels)
    result = run(kernels, native, slice(None))
    torch.testing.assert_close(result, rotate(q, norms[0]).flatten(1), rtol=1e-5, atol=1e-5)
    values = as_kept(v.view(num_rows, -1, head_dim), kv_dtype)
    reference.write_kv(as_kept(rotate(k, norms[1]), kv_dtype), values, kv_cache, slots)
    written = cache_to_reference(native)
    assert torch.equal(written.isnan(), kv_cache.isnan())
    # One rounding to the cache's precision away, where float32 came out a bit different.
    relative = 1e-2 if kv_dtype == torch.bfloat16 else 1e-5
    absolute = 2.0**-7 if kv_dtype == torch.int16 else 1e-5
    torch.testing.assert_close(written, kv_cache, rtol=relative, atol=absolute, equal_nan=True)
    assert torch.equal(written[:, 1].nan_to_num(), kv_cache[:, 1].nan_to_num())

    apart = cache_from_reference(torch.full_like(kv_cache, torch.nan), kernels)
    for row in range(num_rows):
        assert torch.equal(run(alone, apart, slice(row, row + 1))[0], result[row])
    assert torch.equal(cache_to_reference(apart).nan_to_num(), written.nan_to_num())


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_copy_blocks(make: Make, kv_dtype: torch.dtype) -> None:
    kernels = make(kv_dtype)
    kv_cache = kept_for_good(torch.randn(8, 2, 32, 3, 48), kv_dtype)
    native = cache_from_reference(kv_cache, kernels)
    src, dst, num_tokens = torch.tensor([0, 1, 2, 0]), torch.tensor([1, 2, 5, 6]), torch.tensor([32, 7, 1, 0])
    reference.copy_blocks(kv_cache, src, dst, num_tokens)
    kernels.copy_blocks(native, src, dst, num_tokens)
    assert torch.equal(cache_to_reference(native), kv_cache)
