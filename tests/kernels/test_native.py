"""Each compiled op against its definition, on every instruction set that runs here and with several threads.

Memory that the ops write to is full of NaN before and lies at odd places, and nothing around it may change. Attention
has a file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from kitfox.errors import UnsupportedModelError
from kitfox.kernels import reference
from kitfox.kernels.abi import OpCode, StepStruct
from kitfox.kernels.native import _ACTIVATIONS, NativeKernels
from kitfox.kernels.quantized import (
    GGUF_FORMATS,
    QuantizedWeight,
    from_gguf,
    linear_quantized,
    quantize_groups,
    quantize_head,
    quantize_int8,
    take_rows,
)
from kitfox.kernels.recording import Call, Codes
from tests.kernels.test_quantized import gguf_rows
from tests.native import (
    INSTRUCTION_SETS,
    as_kept,
    cache_from_reference,
    cache_to_reference,
    kept_for_good,
    native_kernels,
    needs_native,
    torch_kernels,
)

pytestmark = needs_native
THREADS = (1, 2, 3)
GUARD = 65  # numbers before and after an array; odd, so that it starts at no vector's boundary
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
GGUF = [gguf.GGMLQuantizationType(type_id) for type_id in GGUF_FORMATS]
QUANTIZED = pytest.mark.parametrize("form", ["int8", *(kind.name for kind in GGUF)])


@dataclass
class Memory:
    """Stands for torch.empty: arrays between guards, every byte 0xFF, which is NaN in all floating types."""

    allocate: Callable[..., Tensor]
    made: list[tuple[Tensor, int]] = field(default_factory=list)

    def empty(self, *shape: int, dtype: torch.dtype = FLOAT32, device: object = None) -> Tensor:
        size = math.prod(shape)
        whole = self.allocate(size + 2 * GUARD, dtype=dtype)
        whole.view(torch.uint8).fill_(0xFF)
        self.made.append((whole, size))
        return whole[GUARD : GUARD + size].view(shape)

    def assert_guards_are_whole(self) -> None:
        for whole, size in self.made:
            for guard in (whole[:GUARD], whole[GUARD + size :]):
                assert torch.all(guard.view(torch.uint8) == 0xFF)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    memory = Memory(torch.empty)
    monkeypatch.setattr(torch, "empty", memory.empty)
    monkeypatch.setattr(np, "empty", lambda shape, dtype: np.full(shape, 0xFF, dtype))  # for a matrix's panels
    yield memory
    memory.assert_guards_are_whole()


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    """Normal numbers at an odd place, between NaNs."""
    out = torch.empty(*shape)
    return out.copy_(torch.randn(*shape, generator=generator(seed)) * spread)


def quantized_weight(form: str, num_rows: int, num_columns: int) -> QuantizedWeight:
    if form == "int8":
        return quantize_int8(torch.randn(num_rows, num_columns, generator=generator(num_rows)))
    kind = gguf.GGMLQuantizationType[form]
    return from_gguf(kind, gguf_rows(kind, num_rows, num_columns), num_columns)


def new_codes(num_rows: int, size: int, group: int) -> Codes:
    num_groups = -(-size // group)
    return Codes(
        group,
        torch.empty(num_rows, num_groups * group, dtype=torch.int8),
        torch.empty(num_rows, num_groups),
        torch.empty(num_rows, num_groups),
        torch.empty(num_rows, num_groups, dtype=torch.int32),
    )


def column_sizes(form: str) -> list[int]:
    if form == "int8":
        return [1, 63, 64, 130, 577]
    block_size = GGUF_FORMATS[gguf.GGMLQuantizationType[form]].block_size
    return [block_size, 3 * block_size]


def assert_rows_stand_alone(
    isa: str, op: Callable[[NativeKernels, Tensor], Tensor], x: Tensor, expected: Tensor
) -> None:
    """A row's result has the same bits in any batch and with any number of threads."""
    num_rows = len(x)
    for num_threads in THREADS:
        kernels = native_kernels(isa=isa, num_threads=num_threads)
        for rows in (slice(0, num_rows), slice(0, 1), slice(num_rows - 1, num_rows), slice(3, 20), slice(1, 34)):
            assert torch.equal(op(kernels, x[rows]), expected[rows])
    assert torch.equal(torch.cat([op(kernels, row[None]) for row in x]), expected)


# ---- linear ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 32), (31, 65), (47, 130), (100, 577), (193, 64)])
@FLOATS
def test_linear_of_floats(isa: str, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight = random(outputs, inputs, seed=outputs)
    x, bias = random(40, inputs, seed=1), random(outputs, seed=2)
    kernels = native_kernels(dtype, isa=isa)
    matrix = kernels.matrix(weight)
    assert matrix.shape == (outputs, inputs)
    rounded = weight.to(dtype).double()
    exact = x.double() @ rounded.t() + bias
    result = kernels.linear(x, matrix, bias)
    # What a sum of so many products may be off, each of them rounded to nearest in float32. Tile registers multiply
    # bfloat16 only, so that an activation becomes the sum of two.
    split = 2.0**-18 if isa == "amx" and dtype is BFLOAT16 else 0.0
    bound = ((inputs + 2) * 2.0**-24 + split) * (x.abs().double() @ rounded.abs().t() + bias.abs())
    assert torch.all((result - exact).abs() <= bound)
    for num_rows in range(1, 41):
        assert torch.equal(kernels.linear(x[:num_rows], matrix, bias), result[:num_rows])
    assert_rows_stand_alone(isa, lambda kernels, rows: kernels.linear(rows, matrix, bias), x, result)
    assert torch.equal(kernels.linear(x, matrix) + bias, result)


@FLOATS
def test_a_matrix_is_taken_in_any_dtype_and_not_kept(isa: str, dtype: torch.dtype) -> None:
    x = random(3, 50)
    for source in (FLOAT32, BFLOAT16, FLOAT16, torch.float64):
        weight = torch.randn(20, 50, generator=generator()).to(source)
        kernels = native_kernels(dtype, isa=isa)
        expected = kernels.linear(x, kernels.matrix(weight.to(dtype).float()))
        matrix = kernels.matrix(weight)
        transposed = kernels.matrix(weight.t().contiguous().t())
        weight.fill_(math.nan)
        assert torch.equal(kernels.linear(x, matrix), expected)
        assert torch.equal(kernels.linear(x, transposed), expected)


@QUANTIZED
def test_linear_of_codes_follows_the_definition_bit_for_bit(isa: str, form: str) -> None:
    for outputs in (1, 16, 31, 100):
        for inputs in column_sizes(form):
            weight = quantized_weight(form, outputs, inputs)
            x, bias = random(40, inputs, seed=1), random(outputs, seed=2)
            kernels = native_kernels(isa=isa)
            matrix = kernels.matrix(weight)
            assert matrix.nbytes + (0 if matrix._channel_scale is None else matrix._channel_scale.nbytes) == (
                weight.nbytes
            )
            result = kernels.linear(x, matrix, bias)
            assert torch.equal(result, linear_quantized(x, weight, bias))
            assert torch.equal(kernels.linear(x, matrix), linear_quantized(x, weight))
            for num_rows in range(1, 41):
                assert torch.equal(kernels.linear(x[:num_rows], matrix, bias), result[:num_rows])
    assert_rows_stand_alone(isa, lambda kernels, rows: kernels.linear(rows, matrix, bias), x, result)


def test_kernels_of_int8_quantise_what_they_are_given(isa: str) -> None:
    weight, x = random(33, 150, seed=1), random(5, 150)
    kernels = native_kernels(isa=isa, int8=True)
    assert torch.equal(kernels.linear(x, kernels.matrix(weight)), linear_quantized(x, quantize_int8(weight)))
    half = weight.bfloat16()
    assert torch.equal(kernels.linear(x, kernels.matrix(half)), linear_quantized(x, quantize_int8(half)))


@pytest.mark.parametrize("form", ["float", "int8", "Q4_1"])
def test_linear_with_a_soft_cap(isa: str, form: str) -> None:
    kernels = native_kernels(isa=isa)
    matrix = kernels.matrix(random(33, 64, seed=1) if form == "float" else quantized_weight(form, 33, 64))
    x, bias = random(9, 64, spread=10.0), random(33)
    plain = kernels.linear(x, matrix, bias)
    capped = kernels.linear(x, matrix, bias, softcap=30.0)
    torch.testing.assert_close(capped, torch.tanh(plain / 30.0) * 30.0, atol=1e-5, rtol=1e-6)
    assert capped.abs().max() > 20  # the cap was felt


@pytest.mark.parametrize("form", ["float", "int8", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_harms_no_other(isa: str, form: str, bad: float) -> None:
    kernels = native_kernels(isa=isa)
    matrix = kernels.matrix(random(33, 256, seed=1) if form == "float" else quantized_weight(form, 33, 256))
    x = random(14, 256)
    expected = kernels.linear(x, matrix)
    x[5, 17] = bad
    result = kernels.linear(x, matrix)
    assert not result[5].isfinite().any()
    others = [row for row in range(14) if row != 5]
    assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize("group", [16, 32, 64])
def test_activations_become_the_codes_of_the_definition(isa: str, group: int) -> None:
    for size in (1, 63, 64, 577, 1500):
        x = random(7, size, seed=size)
        x[2, :group] = 0
        x[3] *= 1e-44
        x[4] *= 1e30
        x[5, size // 2] = math.nan
        x[6, size // 2] = -math.inf
        expected = quantize_groups(x, group)
        for num_threads in THREADS:
            codes = new_codes(7, size, group)
            call = Call(OpCode.QUANTIZE, {"x": x}, {"codes": codes}, {"size": size})
            native_kernels(isa=isa, num_threads=num_threads).issue(x, call)
            for member, right in zip(codes.members, expected, strict=True):
                assert isinstance(member, Tensor)
                torch.testing.assert_close(member, right, atol=0, rtol=0, equal_nan=True)


def test_no_rows_are_no_work(isa: str) -> None:
    kernels = native_kernels(isa=isa)
    x = torch.zeros(0, 32)
    assert kernels.linear(x, kernels.matrix(random(5, 32))).shape == (0, 5)
    assert kernels.linear(x, kernels.matrix(quantized_weight("Q4_0", 5, 32))).shape == (0, 5)
    assert kernels.rms_norm(x, random(32), 1e-5).shape == (0, 32)
    assert kernels.act_and_mul(x, x, "silu").shape == (0, 32)


# ---- the largest logit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "Q4_1", "Q6_K"])
def test_the_largest_of_a_product(isa: str, form: str) -> None:
    dtype = BFLOAT16 if form == "bfloat16" else FLOAT32
    for outputs in (1, 15, 16, 33, 257, 1000):
        is_float = form in ("float32", "bfloat16")
        source = random(outputs, 256, seed=1) if is_float else quantized_weight(form, outputs, 256)
        x = random(40, 256)
        matrix = native_kernels(dtype, isa=isa).matrix(source)
        expected = native_kernels(dtype, isa=isa).linear(x, matrix).argmax(-1).tolist()
        for num_threads in THREADS:
            kernels = native_kernels(dtype, isa=isa, num_threads=num_threads)
            assert kernels.linear_argmax(x, matrix) == expected
            assert [kernels.linear_argmax(row[None], matrix)[0] for row in x] == expected
            assert kernels.linear_argmax(x[:0], matrix) == []


def test_the_first_of_equals_is_the_largest(isa: str) -> None:
    weight = random(1000, 32)
    x = random(5, 32, seed=1)
    for first, second in ((3, 7), (15, 16), (0, 999), (500, 501), (40, 900)):
        weight[first] = weight[second] = x[2] * 100
        for num_threads in THREADS:
            kernels = native_kernels(isa=isa, num_threads=num_threads)
            assert kernels.linear_argmax(x, kernels.matrix(weight))[2] == first
        weight[first] = weight[second] = 0


def test_what_pads_a_matrix_is_never_the_largest(isa: str) -> None:
    kernels = native_kernels(isa=isa)
    x = torch.ones(3, 64)
    for outputs in (1, 17, 63):
        weight = -1 - torch.rand(outputs, 64, generator=generator())
        expected = (x @ weight.t()).argmax(-1).tolist()
        assert kernels.linear_argmax(x, kernels.matrix(weight)) == expected
        assert kernels.linear_argmax(x, kernels.matrix(quantize_int8(weight))) == (
            kernels.linear(x, kernels.matrix(quantize_int8(weight))).argmax(-1).tolist()
        )


def bits(columns: list[list[int]], width: int) -> Tensor:
    """A mask [rows, ceil(width / 32)] that allows some columns of each row."""
    mask = torch.zeros(len(columns), -(-width // 32), dtype=torch.int64)
    for row, allowed in enumerate(columns):
        for column in allowed:
            mask[row, column // 32] |= 1 << column % 32
    return torch.where(mask >= 1 << 31, mask - (1 << 32), mask).to(torch.int32)


@pytest.mark.parametrize("form", ["float32", "Q4_1"])
def test_the_largest_of_what_is_allowed(isa: str, form: str) -> None:
    for outputs in (1, 31, 33, 257, 1000):
        source = random(outputs, 256, seed=1) if form == "float32" else quantized_weight(form, outputs, 256)
        x = random(7, 256)
        every, third, half = range(outputs), range(0, outputs, 3), range(outputs // 2, outputs)
        columns = list(map(list, (every, [0], [outputs - 1], third, half, [], range(0, outputs, 40))))
        for num_threads in THREADS:
            kernels = native_kernels(isa=isa, num_threads=num_threads)
            matrix = kernels.matrix(source)
            product = kernels.linear(x, matrix)
            expected = [
                max(allowed, key=row.tolist().__getitem__, default=-1)
                for row, allowed in zip(product, columns, strict=True)
            ]
            mask = bits(columns, outputs)
            assert kernels.linear_argmax(x, matrix, mask) == expected
            alone = [kernels.linear_argmax(x[i : i + 1], matrix, mask[i : i + 1])[0] for i in range(7)]
            assert alone == expected  # where whole pieces are left out
            assert kernels.linear_argmax(x, matrix) == product.argmax(-1).tolist()
            if isinstance(source, Tensor):
                assert torch_kernels().linear_argmax(x, torch_kernels().matrix(source), mask) == expected


def test_what_is_forbidden_may_be_anything(isa: str) -> None:
    kernels = native_kernels(isa=isa)
    weight = random(100, 64)
    x = random(3, 64)
    expected = kernels.linear_argmax(x, kernels.matrix(weight), bits([list(range(40))] * 3, 100))
    weight[77], weight[44] = math.nan, math.inf
    assert kernels.linear_argmax(x, kernels.matrix(weight), bits([list(range(40))] * 3, 100)) == expected
    assert kernels.linear_argmax(x, kernels.matrix(weight), bits([[1, 77]] * 3, 100)) == [-1] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", ["float", "int8"])
def test_where_a_logit_is_no_number_none_is_the_largest(isa: str, form: str, bad: float) -> None:
    kernels = native_kernels(isa=isa)
    source = random(100, 64) if form == "float" else quantized_weight(form, 100, 64)
    x = random(6, 64)
    expected = kernels.linear_argmax(x, kernels.matrix(source))
    x[4, 9] = bad
    result = kernels.linear_argmax(x, kernels.matrix(source))
    assert result[4] == -1
    assert result[:4] + result[5:] == expected[:4] + expected[5:]
    if isinstance(source, Tensor):
        source[77, 3] = math.nan
        assert kernels.linear_argmax(random(6, 64), kernels.matrix(source)) == [-1] * 6


# ---- gated products -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("forms", ["float float", "int8 int8", "Q4_1 Q4_1", "Q4_0 Q5_1", "Q6_K Q6_K"])
def test_gated_products_have_the_bits_of_products_and_gate(isa: str, forms: str, act: str) -> None:
    """Recorded forward passes fuse them; the result, and its codes, are those of the ops one by one."""
    plain = native_kernels(isa=isa)
    for outputs in (1, 63, 65, 130):
        gate, up = (
            plain.matrix(random(outputs, 256, seed=seed) if form == "float" else quantized_weight(form, outputs, 256))
            for seed, form in enumerate(forms.split())
        )
        x = random(40, 256)
        expected = plain.act_and_mul(plain.linear(x, gate), plain.linear(x, up), act)
        for num_threads in THREADS:
            kernels = native_kernels(isa=isa, num_threads=num_threads)
            for num_rows in (1, 13, 40):
                rows = x[:num_rows]
                reads = {"codes": kernels._quantize(rows, gate.group)} if gate.group else {"x": rows}
                for group in (16, 32, 64):
                    out, codes = torch.empty(num_rows, outputs), new_codes(num_rows, outputs, group)
                    constants = {"gate": gate.address, "up": up.address, "activation": _ACTIVATIONS[act]}
                    call = Call(OpCode.GATED_LINEAR, reads, {"out": out, "out_codes": codes}, constants)
                    kernels.issue(rows, call)
                    assert torch.equal(out, expected[:num_rows])
                    for member, right in zip(codes.members, quantize_groups(out, group), strict=True):
                        assert isinstance(member, Tensor)
                        assert torch.equal(member, right)


# ---- embedding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 640**0.5])
@FLOATS
def test_embedding_of_floats(isa: str, dtype: torch.dtype, scale: float) -> None:
    """The factor is rounded to the model's dtype, as checkpoints with one were trained; the product is not."""
    for vocab_size, size in ((1, 1), (37, 65), (50, 130)):
        weight = random(vocab_size, size, seed=size)
        kernels = native_kernels(dtype, isa=isa)
        matrix = kernels.matrix(weight)
        ids = torch.randint(0, vocab_size, (23,), generator=generator())
        expected = weight.to(dtype).float()[ids] * torch.tensor(scale, dtype=dtype).float()
        for num_threads in THREADS:
            kernels = native_kernels(dtype, isa=isa, num_threads=num_threads)
            assert torch.equal(kernels.embedding(ids, matrix, scale=scale), expected)
            assert torch.equal(kernels.embedding(ids[5:6], matrix, scale=scale), expected[5:6])


@QUANTIZED
def test_embedding_of_codes(isa: str, form: str) -> None:
    for size in column_sizes(form):
        weight = quantized_weight(form, 37, size)
        kernels = native_kernels(isa=isa)
        matrix = kernels.matrix(weight)
        ids = torch.arange(37).flip(0)
        assert torch.equal(kernels.embedding(ids, matrix), take_rows(ids, weight))
        assert torch.equal(kernels.embedding(ids, matrix, scale=3.0), take_rows(ids, weight) * 3.0)


# ---- norms, gates, sums ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 48, 577, 2048])
def test_rms_norm(isa: str, size: int, offset: float) -> None:
    x, weight = random(40, size, spread=3.0), random(size, seed=1)
    x[1] = 0
    x[2] *= 1e-6
    x[3] *= 1e15
    kernels = native_kernels(isa=isa)
    result = kernels.rms_norm(x, weight, 1e-5, offset=offset)
    torch.testing.assert_close(result, reference.rms_norm(x, weight, 1e-5, offset=offset), atol=1e-7, rtol=2e-6)
    assert_rows_stand_alone(isa, lambda kernels, rows: kernels.rms_norm(rows, weight, 1e-5, offset=offset), x, result)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [1, 17, 80, 1536])
def test_act_and_mul(isa: str, act: str, size: int) -> None:
    gate, up = random(40, size, spread=4.0), random(40, size, seed=1)
    result = native_kernels(isa=isa).act_and_mul(gate, up, act)
    torch.testing.assert_close(result, reference.act_and_mul(gate, up, act), atol=2e-6, rtol=2e-6)
    both = torch.cat((gate, up), 1)

    def op(kernels: NativeKernels, rows: Tensor) -> Tensor:
        return kernels.act_and_mul(rows[:, :size], rows[:, size:], act)

    assert_rows_stand_alone(isa, op, both, result)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gates_far_from_zero(isa: str, act: str) -> None:
    far = torch.tensor([0.0, 1e-30, 20.0, 87.0, 89.0, 1e4, 1e30, 3e38])
    gate = torch.cat((far, -far, torch.tensor([math.nan])))[None]
    up = torch.full_like(gate, 2.0)
    result = native_kernels(isa=isa).act_and_mul(gate, up / 4, act)
    torch.testing.assert_close(result, reference.act_and_mul(gate, up / 4, act), atol=1e-6, rtol=2e-6, equal_nan=True)
    assert result[0, :-1].isfinite().all()


def test_unknown_activation_is_refused(isa: str) -> None:
    with pytest.raises(UnsupportedModelError, match="relu6"):
        native_kernels(isa=isa).act_and_mul(random(1, 4), random(1, 4), "relu6")


@pytest.mark.parametrize("size", [1, 16, 33, 576])
def test_add(isa: str, size: int) -> None:
    a, b = random(40, size), random(40, size, seed=1)
    for num_threads in THREADS:
        for num_rows in (1, 7, 40):
            out = torch.empty(num_rows, size)
            call = Call(OpCode.ADD, {"a": a, "b": b}, {"out": out}, {"size": size})
            native_kernels(isa=isa, num_threads=num_threads).issue(a[:num_rows], call)
            assert torch.equal(out, (a + b)[:num_rows])


# ---- KV cache -------------------------------------------------------------------------------------------------------

BLOCK_SIZE, KV_HEADS, HEADS = 16, 2, 6
NUM_BLOCKS = 5
CACHES = pytest.mark.parametrize("kv_dtype", [FLOAT32, BFLOAT16, torch.int16], ids=str)


def random_cache(kernels: NativeKernels, head_dim: int, block_size: int = BLOCK_SIZE) -> Tensor:
    assert not kernels.make_kv_cache(NUM_BLOCKS, block_size, KV_HEADS, head_dim).any()
    numbers = torch.randn(NUM_BLOCKS, 2, block_size, KV_HEADS, head_dim, generator=generator(9))
    return cache_from_reference(kept_for_good(numbers, kernels.kv_dtype), kernels)


@pytest.mark.parametrize("head_dim", [16, 48, 64, 256])
@pytest.mark.parametrize("normed", ["", "q", "k", "qk"])
@CACHES
def test_rotate_and_write(isa: str, head_dim: int, normed: str, kv_dtype: torch.dtype) -> None:
    num_tokens = 40
    q, k, v = (random(num_tokens, heads * head_dim, seed=heads) for heads in (HEADS, KV_HEADS, 2 * KV_HEADS))
    v = v[:, : KV_HEADS * head_dim]
    angles = torch.rand(100, head_dim // 2, generator=generator()) * 6
    table = torch.stack((angles.cos(), angles.sin()), 1)
    positions = torch.randint(0, 100, (num_tokens,), generator=generator())
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator())[:num_tokens]
    q_norm = random(head_dim, seed=5) if "q" in normed else None
    k_norm = random(head_dim, seed=6) if "k" in normed else None

    def run(num_threads: int, parts: list[slice]) -> tuple[Tensor, Tensor]:
        kernels = native_kernels(kv_dtype=kv_dtype, isa=isa, num_threads=num_threads)
        cache = random_cache(kernels, head_dim)
        turned = []
        for rows in parts:
            here, there = positions[rows], slots[rows]
            step = StepStruct(positions=here.data_ptr(), slot_mapping=there.data_ptr())
            turned.append(
                kernels.rotate_and_write(
                    q[rows],
                    k[rows],
                    v[rows],
                    table,
                    cache,
                    q_norm=q_norm,
                    k_norm=k_norm,
                    eps=1e-6,
                    offset=1.0,
                    step=step,
                )
            )
        return torch.cat(turned), cache_to_reference(cache)

    result, cache = run(1, [slice(0, num_tokens)])
    expected_cache = cache_to_reference(random_cache(native_kernels(kv_dtype=kv_dtype, isa=isa), head_dim)).contiguous()
    q, k, v = (x.unflatten(1, (-1, head_dim)) for x in (q, k, v))
    normed_q = q if q_norm is None else reference.rms_norm(q, q_norm, 1e-6, offset=1.0)
    normed_k = k if k_norm is None else reference.rms_norm(k, k_norm, 1e-6, offset=1.0)
    keys = as_kept(reference.apply_rotary(normed_k, table, positions), kv_dtype)
    reference.write_kv(keys, as_kept(v, kv_dtype), expected_cache, slots)
    expected = reference.apply_rotary(normed_q, table, positions).flatten(1)
    torch.testing.assert_close(result, expected, atol=2e-6, rtol=2e-6)
    assert torch.equal(cache[:, 1], expected_cache[:, 1])
    # A tie may be rounded the other way.
    relative, absolute = {FLOAT32: (2e-6, 2e-6), BFLOAT16: (2.0**-7, 2e-6), torch.int16: (0.0, 2.0**-8)}[kv_dtype]
    torch.testing.assert_close(cache[:, 0], expected_cache[:, 0], atol=absolute, rtol=relative)
    unwritten = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    unwritten[slots] = False
    kept, before = (x.transpose(1, 2).flatten(0, 1)[unwritten] for x in (cache, expected_cache))
    assert torch.equal(kept, before)

    q, k, v = (x.flatten(1) for x in (q, k, v))
    for num_threads in THREADS:
        for parts in ([slice(0, 40)], [slice(0, 1), slice(1, 18), slice(18, 40)], [slice(i, i + 1) for i in range(40)]):
            again, cache_again = run(num_threads, parts)
            assert torch.equal(again, result)
            assert torch.equal(cache_again, cache)


@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 16), (16, 64), (32, 48)])
@CACHES
def test_copy_blocks(isa: str, block_size: int, head_dim: int, kv_dtype: torch.dtype) -> None:
    """All copies read before any writes: block 1 is read as it was, though it is written too."""
    kernels = native_kernels(kv_dtype=kv_dtype, isa=isa)
    src, dst, num_tokens = torch.tensor([[0, 1, 4, 3], [1, 2, 3, 0], [5, block_size, 0, 1]])
    cache = random_cache(kernels, head_dim, block_size)
    expected = cache_to_reference(cache).contiguous()
    reference.copy_blocks(expected, src, dst, num_tokens)
    kernels.copy_blocks(cache, src, dst, num_tokens)
    assert torch.equal(cache_to_reference(cache), expected)


def test_8_bits_are_packed_as_they_are_defined(isa: str) -> None:
    kernels = native_kernels(isa=isa, int8=True)
    for outputs, inputs in ((1, 64), (37, 100), (100, 33), (16, 576)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            weight, x = random(outputs, inputs).to(dtype), random(7, inputs, seed=1)
            weight[outputs // 2] = 0.0
            for is_head, quantize in ((False, quantize_int8), (True, quantize_head)):
                result = kernels.linear(x, kernels.matrix(weight, is_head=is_head))
                assert torch.equal(result, linear_quantized(x, quantize(weight)))
