"""Quantised weights against the numbers they stand for, and their products against the definition written out."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from kitfox.errors import UnsupportedModelError
from kitfox.kernels import quantized
from kitfox.kernels.quantized import (
    GGUF_FORMATS,
    QuantizedWeight,
    dequantize,
    linear_quantized,
    quantize_groups,
    quantize_head,
    quantize_int8,
)

TYPES = [gguf.GGMLQuantizationType(type_id) for type_id in GGUF_FORMATS]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gguf_rows(kind: gguf.GGMLQuantizationType, num_rows: int, num_columns: int) -> np.ndarray:
    """Every code and integer scale at random, and float16 scales that are numbers."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(num_rows)
    raw = random.integers(0, 256, (num_rows, num_columns // block_size * block_bytes), dtype=np.uint8)
    blocks = raw.view(GGUF_FORMATS[kind].layout)
    for field in {"scale", "minimum"} & set(blocks.dtype.names or ()):
        blocks[field] = random.standard_normal(blocks.shape)
    return raw


def random_weight(
    num_rows: int, num_columns: int, *, bits: int, group: int, minimum: bool, per_channel: bool
) -> QuantizedWeight:
    source = generator(num_rows)
    num_groups = -(-num_columns // group)
    scale_shape = (num_rows,) if per_channel else (num_rows, num_groups)
    return QuantizedWeight(
        codes=torch.randint(0, 1 << bits, (num_rows, num_columns), dtype=torch.uint8, generator=source),
        scale=torch.randn(scale_shape, generator=source),
        minimum=torch.randn(num_rows, num_groups, generator=source) if minimum else None,
        zero=1 << (bits - 1),
        group=group,
        bits=bits,
        scale_is_half=False,
    )


WEIGHTS = {
    "int8": random_weight(33, 150, bits=8, group=64, minimum=False, per_channel=True),
    "q4_1": random_weight(33, 160, bits=4, group=32, minimum=True, per_channel=False),
    "q6_k": random_weight(33, 256, bits=8, group=16, minimum=False, per_channel=False),
}


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_rows", [1, 7, 1100])  # the last is unpacked in several runs of rows
def test_gguf_blocks_have_the_numbers_that_gguf_gives(kind: gguf.GGMLQuantizationType, num_rows: int) -> None:
    raw = gguf_rows(kind, num_rows, 512)
    before = raw.copy()
    weight = quantized.from_gguf(kind, raw, 512)
    assert np.array_equal(raw, before)
    assert GGUF_FORMATS[kind].name == kind.name
    assert weight.shape == (num_rows, 512)
    assert int(weight.codes.max()) < 1 << weight.bits
    assert weight.scale.shape == (num_rows, 512 // weight.group)
    assert np.array_equal(quantized.dequantize(weight).numpy(), gguf.dequantize(raw, kind))
    if weight.scale_is_half:
        for numbers in (weight.scale, weight.minimum):
            assert numbers is None or torch.equal(numbers.half().float(), numbers)


def test_a_type_that_is_not_in_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Q4_0.*Q6_K.*Given: type 1"):
        quantized.from_gguf(1, np.zeros((1, 64), np.uint8), 32)


def test_rows_are_selected_with_their_scales() -> None:
    ids = torch.tensor([3, 0, 3, 32])
    for weight in WEIGHTS.values():
        assert torch.equal(quantized.take_rows(ids, weight), quantized.dequantize(weight)[ids])
        assert torch.equal(quantized.dequantize(weight.select_rows(ids)), quantized.dequantize(weight)[ids])


def test_nbytes_is_that_of_padded_panels() -> None:
    assert WEIGHTS["int8"].nbytes == 3 * (192 * 16) + 48 * 4
    assert WEIGHTS["q4_1"].nbytes == 3 * (160 * 16 // 2 + 2 * 5 * 16 * 4)
    assert WEIGHTS["q6_k"].nbytes == 3 * (256 * 16 + 16 * 16 * 4)
    raw = gguf_rows(gguf.GGMLQuantizationType.Q4_1, 16, 32)
    assert quantized.from_gguf(gguf.GGMLQuantizationType.Q4_1, raw, 32).nbytes == 320  # 256 + 2 * 32, whole lines


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_symmetric_per_channel_and_within_half_a_step(dtype: torch.dtype) -> None:
    weight = (torch.randn(1500, 300, generator=generator()) * 0.05).to(dtype)
    weight[5] = 0
    result = quantize_int8(weight)
    assert torch.equal(result.scale, weight.float().abs().amax(1) / 127)
    assert torch.all(result.codes[5] == 128)
    error = (quantized.dequantize(result) - weight.float()).abs()
    assert torch.all(error <= result.scale[:, None] * (0.5 + 1e-4))
    largest = weight.float().abs().argmax(1)
    assert set(result.codes.gather(1, largest[:, None]).flatten().tolist()) == {1, 128, 255}


def test_int8_rounds_ties_to_even_and_survives_denormals_and_nan() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, -2.5], [2.1e-43, 1e-45, 0, 0], [1e-45, 0, 0, 0], [math.nan, 1, 2, 3]])
    result = quantize_int8(weight)
    assert result.codes[0].tolist() == [255, 128, 130, 126]
    numbers = quantized.dequantize(result)
    torch.testing.assert_close(numbers[1], weight[1], rtol=0, atol=2e-43)  # its scale is a denormal of one bit
    assert numbers[2].tolist() == [0.0] * 4  # and here none
    assert numbers[3].isnan().all()


@pytest.mark.parametrize("group", [16, 32, 64])
def test_groups_of_activations(group: int) -> None:
    x = torch.randn(9, 100, generator=generator()) * 10
    x[2, :group] = 0
    codes, scale, scaled_sum, sums = quantize_groups(x, group)
    num_groups = -(-100 // group)
    assert codes.shape == (9, num_groups * group)
    assert codes.dtype == torch.int8
    assert torch.all(codes[:, 100:] == 0)
    grouped = codes.view(9, num_groups, group)
    assert torch.equal(grouped.sum(-1, dtype=torch.int32), sums)
    assert torch.equal(scale * sums.float(), scaled_sum)
    restored = (grouped * scale[:, :, None]).flatten(1)[:, :100]
    assert torch.all((restored - x).abs() <= scale.repeat_interleave(group, 1)[:, :100] * (0.5 + 1e-4))
    assert scale[2, 0] == 0
    # One number's arithmetic, operation by operation.
    amax = np.abs(x[3, :group].numpy()).max()
    inverse = np.float32(127) / amax
    assert codes[3, 7] == np.rint(x[3, 7].numpy() * inverse)
    assert scale[3, 0] == amax / np.float32(127)


def test_groups_too_small_for_a_scale_count_as_zero() -> None:
    x = torch.zeros(2, 32)
    x[0, 3], x[1, 3] = 1e-44, 2.0**-120
    codes = quantize_groups(x, 32).codes
    assert codes[0].abs().max() == 0
    assert codes[1].tolist() == [0, 0, 0, 127] + [0] * 28


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_row_that_is_not_finite_gives_nan_and_harms_no_other(bad: float, name: str) -> None:
    weight = WEIGHTS[name]
    x = torch.randn(3, weight.shape[1], generator=generator())
    expected = linear_quantized(x, weight)
    x[1, 17] = bad
    activations = quantize_groups(x, weight.group)
    assert activations.scale.isnan().sum() == 1
    assert activations.scaled_sum.isnan().sum() == 1
    result = linear_quantized(x, weight)
    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2]], expected[[0, 2]])


def product_by_definition(x: Tensor, weight: QuantizedWeight, row: int, channel: int) -> np.float32:
    """One element, a number at a time."""

    def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
        return np.float32(float(a) * float(b) + float(c))

    activations = quantize_groups(x, weight.group)
    acc = np.float32(0)
    for group in range(activations.scale.shape[1]):
        begin, end = group * weight.group, min((group + 1) * weight.group, weight.shape[1])
        weight_codes = weight.codes[channel, begin:end].long() - weight.zero
        dot = np.float32(int((activations.codes[row, begin:end].long() * weight_codes).sum()))
        x_scale = activations.scale[row, group].numpy()
        if weight.is_per_channel:
            acc = fma(dot, x_scale, acc)
            continue
        acc = fma(dot * x_scale, weight.scale[channel, group].numpy(), acc)
        if weight.minimum is not None:
            acc = fma(weight.minimum[channel, group].numpy(), activations.scaled_sum[row, group].numpy(), acc)
    return acc * weight.scale[channel].numpy() if weight.is_per_channel else acc


@pytest.mark.parametrize("name", WEIGHTS)
def test_product_follows_the_definition(name: str) -> None:
    weight = WEIGHTS[name]
    x = torch.randn(3, weight.shape[1], generator=generator(1))
    bias = torch.randn(33, generator=generator(2))
    result = linear_quantized(x, weight)
    for row in range(3):
        expected = [product_by_definition(x, weight, row, channel) for channel in range(33)]
        assert np.array_equal(result[row].numpy(), np.array(expected))
    assert torch.equal(linear_quantized(x, weight, bias), result + bias)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_is_close_to_that_of_the_numbers(name: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name]
    x = torch.randn(20, weight.shape[1], generator=generator()).to(dtype)
    result = linear_quantized(x, weight)
    exact = x.double() @ quantized.dequantize(weight).double().t()
    assert result.dtype == torch.float32
    assert (result - exact).norm() / exact.norm() < 0.01


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    weight = WEIGHTS[name]
    x = torch.randn(70, weight.shape[1], generator=generator())
    whole = linear_quantized(x, weight)
    for rows in (slice(0, 1), slice(3, 20), slice(69, 70), slice(17, 66)):
        assert torch.equal(linear_quantized(x[rows], weight), whole[rows])
    assert linear_quantized(x[:0], weight).shape == (0, 33)


def test_a_head_has_float16_scales_in_groups_of_32() -> None:
    weight = torch.randn(5, 96) * torch.logspace(-3, 1, 5)[:, None]
    head = quantize_head(weight)
    assert (head.group, head.bits, head.zero, head.scale_is_half) == (32, 8, 128, True)
    assert torch.equal(head.scale, head.scale.half().float())
    groups = weight.unflatten(1, (-1, 32))
    error = (dequantize(head).unflatten(1, (-1, 32)) - groups).abs().amax(-1)
    assert (error <= groups.abs().amax(-1) / 127 * 0.51).all()  # half a step, and the rounding of the scale


@pytest.mark.parametrize("weight", [torch.randn(3, 40), torch.full((3, 64), 1e8)], ids=["width", "too large"])
def test_a_head_that_has_no_such_groups_is_int8(weight: torch.Tensor) -> None:
    assert quantize_head(weight).is_per_channel
