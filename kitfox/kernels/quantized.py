"""Weights of 4 and 8 bits, and the definition of the products that native kernels compute with them.

A weight is `scale * (code - zero) + minimum`, its scale shared by an output channel or by a group along the input
dimension. Activations are quantised as they come, in groups of the same size, so that a group's dot product is one of
small integers: exact, whatever the order of its sum. What is left is float32 arithmetic per element in a fixed order,
spelled out here operation by operation. Hence a row's result has the same bits in every batch and in every kernel that
follows this definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kitfox.errors import UnsupportedModelError

PANEL_CHANNELS = 16
_PANEL_ALIGNMENT = 64
INT8_GROUP, INT8_ZERO = 64, 128
HEAD_GROUP = 32
# A group whose largest number is smaller counts as 0: 127 / amax must not overflow. Far below any activation.
_SMALLEST_AMAX = 2.0**-120
# Tensors are worked on in runs of rows of about this many numbers, so that temporaries stay in the cache.
_NUMBERS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [N, K] as codes: `scale * (code - zero) + minimum`.

    Attributes:
        codes: [N, K] uint8.
        scale: float32, [N] per output channel or [N, K / group] per group (K is a multiple of the group then).
        minimum: [N, K / group] float32, only beside scales per group; None means 0.
        zero: the code that stands for 0.
        group: 16, 32 or 64: numbers along K that share a scale, those of the activations too.
        bits: 4 or 8 that a code needs.
        scale_is_half: every number in scale and minimum is exactly a float16.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    zero: int
    group: int
    bits: int
    scale_is_half: bool

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def is_per_channel(self) -> bool:
        return self.scale.dim() == 1

    @property
    def nbytes(self) -> int:
        """Bytes that the native kernels' packed form takes (csrc/pack.h)."""
        num_panels = -(-self.shape[0] // PANEL_CHANNELS)
        num_groups = -(-self.shape[1] // self.group)
        panel_bytes = num_groups * self.group * PANEL_CHANNELS * self.bits // 8
        if self.is_per_channel:
            channel_scale_bytes = num_panels * PANEL_CHANNELS * 4
        else:
            channel_scale_bytes = 0
            arrays = 1 if self.minimum is None else 2
            panel_bytes += arrays * num_groups * PANEL_CHANNELS * (2 if self.scale_is_half else 4)
        return num_panels * (-(-panel_bytes // _PANEL_ALIGNMENT) * _PANEL_ALIGNMENT) + channel_scale_bytes

    def select_rows(self, rows: Tensor) -> QuantizedWeight:
        """The output channels whose indices [n] int64 are given, in that order."""
        return QuantizedWeight(
            codes=self.codes.index_select(0, rows),  # 20 times as fast as self.codes[rows]
            scale=self.scale.index_select(0, rows),
            minimum=None if self.minimum is None else self.minimum.index_select(0, rows),
            zero=self.zero,
            group=self.group,
            bits=self.bits,
            scale_is_half=self.scale_is_half,
        )


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Quantise to 8 bits, symmetric per output channel: scale = amax / 127, codes rounded to nearest, ties to even.

    Args:
        weight: [N, K] of any floating dtype. A channel with a number that is not finite gets a scale that is not.
    """
    num_rows, num_columns = weight.shape
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=weight.device)
    for rows in _row_runs(num_rows, num_columns):
        wide = weight[rows].float()
        scale[rows] = wide.abs().amax(-1) / 127
        # 0 / 0 is NaN, and becomes 0. A denormal scale is coarse enough for a quotient above 127.
        quotient = (wide / scale[rows, None]).round_().nan_to_num_(0.0).clamp_(-127, 127)
        codes[rows] = quotient.add_(INT8_ZERO).to(torch.uint8)
    return QuantizedWeight(codes, scale, None, zero=INT8_ZERO, group=INT8_GROUP, bits=8, scale_is_half=False)


def quantize_head(weight: Tensor) -> QuantizedWeight:
    """Quantise to 8 bits in groups of 32 with float16 scales, where a head's small errors decide between close tokens.

    For each group scale = amax / 127 rounded to float16, codes rounded to nearest, ties to even. Where the input
    dimension is not whole groups, or a scale is too large for a float16, this is `quantize_int8`.

    Args:
        weight: [N, K] of any floating dtype.
    """
    num_rows, num_columns = weight.shape
    if num_columns % HEAD_GROUP:
        return quantize_int8(weight)
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(num_rows, num_columns // HEAD_GROUP, dtype=torch.float32, device=weight.device)
    for rows in _row_runs(num_rows, num_columns):
        groups = weight[rows].float().unflatten(1, (-1, HEAD_GROUP))
        scale[rows] = (groups.abs().amax(-1) / 127).half().float()
        quotient = (groups / scale[rows][:, :, None]).round_().nan_to_num_(0.0).clamp_(-127, 127)
        codes[rows] = quotient.add_(INT8_ZERO).to(torch.uint8).flatten(1)
    if not scale.isfinite().all():
        return quantize_int8(weight)
    return QuantizedWeight(codes, scale, None, zero=INT8_ZERO, group=HEAD_GROUP, bits=8, scale_is_half=True)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Compute the matrix: [N, K] float32, with product and sum rounded each."""
    numbers = weight.codes.float()
    numbers -= weight.zero
    if weight.is_per_channel:
        return numbers.mul_(weight.scale[:, None])
    groups = numbers.unflatten(1, (-1, weight.group))
    groups *= weight.scale[:, :, None]
    if weight.minimum is not None:
        groups += weight.minimum[:, :, None]
    return numbers


def take_rows(ids: Tensor, weight: QuantizedWeight) -> Tensor:
    """Look up rows of weight [V, I] for ids [T] int64; returns [T, I] float32."""
    return dequantize(weight.select_rows(ids))


class GroupedCodes(NamedTuple):
    """Activations [T, K] as `scale * code`, in G groups along K; the last one is padded with zeros.

    Attributes:
        codes: [T, G * group] int8.
        scale: [T, G] float32.
        scaled_sum: [T, G] float32, scale * sum.
        sum: [T, G] int32, of the group's codes.
    """

    codes: Tensor
    scale: Tensor
    scaled_sum: Tensor
    sum: Tensor


def quantize_groups(x: Tensor, group: int) -> GroupedCodes:
    """Quantise activations to 8 bits, in float32 operations that are each rounded to nearest, ties to even.

    For each group of a row: amax = max |x|; scale = amax / 127; inverse = 127 / amax, or 0 where amax < 2^-120;
    code = round(x * inverse), which is within +-127. Where a number of the group is NaN or infinite, scale and
    scaled_sum are NaN, and so is every product with that row; codes and sum mean nothing then (0 here).

    Args:
        x: [T, K] of any floating dtype.
        group: 16, 32 or 64.
    """
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    amax = groups.abs().amax(-1)
    finite = amax.isfinite()  # amax is NaN where any number is
    scale = torch.where(finite, amax / 127, torch.nan)
    inverse = torch.where(finite & (amax >= _SMALLEST_AMAX), 127 / amax, 0.0)
    codes = torch.where(finite[:, :, None], (groups * inverse[:, :, None]).round(), 0.0)
    sums = codes.sum(-1)  # of integers: exact
    return GroupedCodes(codes.to(torch.int8).flatten(1), scale, scale * sums, sums.to(torch.int32))


def linear_quantized(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply each row, quantised in groups, by a quantised matrix.

    Per row t and output channel n, in float32 and for groups g in ascending order, with `dot` the exact sum of
    activation code * (weight code - zero) over a group, and fma rounding once:

        per channel:  acc = fma(dot, scale_x[t, g], acc)
                      out = acc * scale_w[n]
        per group:    acc = fma(dot * scale_x[t, g], scale_w[n, g], acc)
                      acc = fma(minimum[n, g], scaled_sum_x[t, g], acc), where there is a minimum
                      out = acc

    and then out + bias[n].

    Args:
        x: [T, K] of any floating dtype; a row with a number that is not finite gives NaN.
        bias: [N] or None.

    Returns:
        [T, N] float32.
    """
    activations = quantize_groups(x, weight.group)
    acc = x.new_zeros(x.shape[0], weight.shape[0], dtype=torch.float32)
    for group in range(activations.scale.shape[1]):
        columns = slice(group * weight.group, (group + 1) * weight.group)
        weight_codes = weight.codes[:, columns].float() - weight.zero
        # The codes of a last group that is not whole are 0 past the end of K. Sums stay below 2^24: exact in float32.
        codes = activations.codes[:, columns][:, : weight_codes.shape[1]].float()
        dot = codes @ weight_codes.t()
        scale = activations.scale[:, group, None]
        if weight.is_per_channel:
            acc = _fma(dot, scale, acc)
            continue
        acc = _fma(dot * scale, weight.scale[None, :, group], acc)
        if weight.minimum is not None:
            acc = _fma(weight.minimum[None, :, group], activations.scaled_sum[:, group, None], acc)
    out = acc * weight.scale if weight.is_per_channel else acc
    return out if bias is None else out + bias.float()


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 numbers, rounded once.

    float64 holds the product exactly. Its sum is rounded twice, which differs from once only if it falls on a tie of
    float32 by rounding: about once in 2^29 times.
    """
    return (a.double() * b.double() + c.double()).float()


class GgufFormat(NamedTuple):
    """How a GGUF type stores the blocks of a row, and what their numbers are once unpacked.

    Attributes:
        name: as GGML spells it.
        block_size: numbers in a block.
        layout: of the bytes of a block. Items of type V are bytes that stay together.
        bits, group, zero: see `QuantizedWeight`.
        codes: from blocks [n, b] to codes [n, K] uint8.
        scales: from blocks [n, b] to scale and minimum [n, K / group] float32.
        scale_is_half: see `QuantizedWeight`.
    """

    name: str
    block_size: int
    layout: np.dtype
    bits: int
    group: int
    zero: int
    codes: Callable[[np.ndarray], np.ndarray]
    scales: Callable[[np.ndarray], tuple[Tensor, Tensor | None]]
    scale_is_half: bool


def from_gguf(type_id: int, raw: np.ndarray, num_columns: int) -> QuantizedWeight:
    """Unpack a matrix of a block format; its numbers are those that `gguf.dequantize` gives.

    Args:
        type_id: a `gguf.GGMLQuantizationType` among `GGUF_FORMATS`.
        raw: [N, bytes of a row] uint8, contiguous.
        num_columns: K, whole blocks.

    Raises:
        UnsupportedModelError: any other type.
    """
    if type_id not in GGUF_FORMATS:
        names = ", ".join(form.name for form in GGUF_FORMATS.values())
        raise UnsupportedModelError(f"GGML type must be one of {names}. Given: type {type_id}")
    form = GGUF_FORMATS[type_id]
    blocks = raw.view(form.layout)
    codes = np.empty((len(raw), num_columns), dtype=np.uint8)
    for rows in _row_runs(*codes.shape):
        codes[rows] = form.codes(blocks[rows])
    scale, minimum = form.scales(blocks)
    return QuantizedWeight(
        torch.from_numpy(codes),
        scale,
        minimum,
        zero=form.zero,
        group=form.group,
        bits=form.bits,
        scale_is_half=form.scale_is_half,
    )


def _row_runs(num_rows: int, num_columns: int) -> list[slice]:
    step = max(1, _NUMBERS_AT_ONCE // num_columns)
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def _planes(items: np.ndarray, bits: int) -> np.ndarray:
    """Split items [n, ...] of type V into numbers of `bits` bits: [n, numbers of a row].

    Of each item come the lowest bits of all its bytes first, then the next lowest of all, and so on. Whole items are
    copied between strided and contiguous memory, because NumPy is slow on strided rows as short as these.
    """
    planes = np.empty((*items.shape, 8 // bits), dtype=items.dtype)
    rest = items.copy().view(np.uint8)
    for plane in range(8 // bits):
        planes[..., plane] = (rest & np.uint8((1 << bits) - 1)).view(items.dtype)
        rest >>= np.uint8(bits)
    return planes.view(np.uint8).reshape(len(items), -1)


def _whole_bytes(blocks: np.ndarray) -> np.ndarray:
    codes = blocks["codes"].copy().view(np.uint8)
    codes ^= np.uint8(0x80)  # two's complement to offset 128
    return codes


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    return _planes(blocks["low"], 4)


def _nibbles_and_bit_string(blocks: np.ndarray) -> np.ndarray:
    fifth = np.unpackbits(blocks["high"].copy().view(np.uint8).ravel(), bitorder="little").reshape(len(blocks), -1)
    fifth <<= np.uint8(4)
    fifth |= _nibbles(blocks)
    return fifth


def _nibbles_and_planes(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    def unpack(blocks: np.ndarray) -> np.ndarray:
        high = _planes(blocks["high"], bits)
        high <<= np.uint8(4)
        high |= _nibbles(blocks)
        return high

    return unpack


def _float32(halves: np.ndarray) -> Tensor:
    return torch.from_numpy(halves.copy()).float()


def _stored_scales(blocks: np.ndarray) -> tuple[Tensor, Tensor | None]:
    minimum = _float32(blocks["minimum"]) if "minimum" in (blocks.dtype.names or ()) else None
    return _float32(blocks["scale"]), minimum


def _scales_of_6_bits(blocks: np.ndarray) -> tuple[Tensor, Tensor | None]:
    """Eight scales and eight minima of a block, in two levels: float16 times an integer of 6 bits.

    Bytes 0 to 3 and 4 to 7 hold the first four scales and minima in their low 6 bits, and the top 2 bits of the last
    four in their high ones; bytes 8 to 11 hold the low nibbles of those, scale below minimum.
    """
    first, second, third = np.split(blocks["scales"], 3, axis=-1)
    scales = np.concatenate((first & 0x3F, (third & 0x0F) | (first >> 2 & 0x30)), axis=-1)
    minima = np.concatenate((second & 0x3F, (third >> 4) | (second >> 2 & 0x30)), axis=-1)
    scale = _float32(blocks["scale"])[:, :, None] * torch.from_numpy(scales)
    minimum = -_float32(blocks["minimum"])[:, :, None] * torch.from_numpy(minima)
    return scale.flatten(1), minimum.flatten(1)


def _scales_of_8_bits(blocks: np.ndarray) -> tuple[Tensor, Tensor | None]:
    scale = _float32(blocks["scale"])[:, :, None] * torch.from_numpy(blocks["scales"].copy())
    return scale.flatten(1), None


_SCALE, _MINIMUM = ("scale", "<f2"), ("minimum", "<f2")
_TWO_LEVELS = [_SCALE, _MINIMUM, ("scales", "u1", 12)]
_SIX_BITS = [("low", "V64", 2), ("high", "V32", 2)]


def _format_of_32(name: str, layout: list[tuple], bits: int, zero: int, codes: Callable) -> GgufFormat:
    return GgufFormat(name, 32, np.dtype(layout), bits, 32, zero, codes, _stored_scales, scale_is_half=True)


def _format_of_256(
    name: str, layout: list[tuple], bits: int, group: int, zero: int, codes: Callable, scales: Callable
) -> GgufFormat:
    return GgufFormat(name, 256, np.dtype(layout), bits, group, zero, codes, scales, scale_is_half=False)


# By GGML type. Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
GGUF_FORMATS = {
    2: _format_of_32("Q4_0", [_SCALE, ("low", "V16")], 4, 8, _nibbles),
    3: _format_of_32("Q4_1", [_SCALE, _MINIMUM, ("low", "V16")], 4, 0, _nibbles),
    6: _format_of_32("Q5_0", [_SCALE, ("high", "V4"), ("low", "V16")], 8, 16, _nibbles_and_bit_string),
    7: _format_of_32("Q5_1", [_SCALE, _MINIMUM, ("high", "V4"), ("low", "V16")], 8, 0, _nibbles_and_bit_string),
    8: _format_of_32("Q8_0", [_SCALE, ("codes", "V32")], 8, 128, _whole_bytes),
    12: _format_of_256("Q4_K", [*_TWO_LEVELS, ("low", "V32", 4)], 4, 32, 0, _nibbles, _scales_of_6_bits),
    13: _format_of_256(
        "Q5_K", [*_TWO_LEVELS, ("high", "V32"), ("low", "V32", 4)], 8, 32, 0, _nibbles_and_planes(1), _scales_of_6_bits
    ),
    14: _format_of_256(
        "Q6_K", [*_SIX_BITS, ("scales", "i1", 16), _SCALE], 8, 16, 32, _nibbles_and_planes(2), _scales_of_8_bits
    ),
}
