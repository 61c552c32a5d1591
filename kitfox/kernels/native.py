"""The compiled kernels (csrc/) from Python: packed weights, and each op either run at once or recorded.

Every op is a `Call`. With torch tensors as operands it runs immediately; with operands of a `Recording` it is noted
there, and `executor.step_program` replays all of a forward pass in one call. Both are the same C++ code on the same
structs, so that a replay equals eager execution bit for bit.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from kitfox.errors import UnsupportedModelError
from kitfox.kernels.abi import CodesStruct, KvCacheStruct, OpCode, OpStruct, StepStruct, WeightStruct
from kitfox.kernels.interface import Kernels
from kitfox.kernels.memory import lazy_zeros
from kitfox.kernels.quantized import INT8_GROUP, INT8_ZERO, QuantizedWeight, quantize_head
from kitfox.kernels.recording import Call, Codes, Operand, StepTensor, address_of

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CACHE_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int16: 2}
_SCALE_ELEMENTS = {torch.int16: 2}  # what a scale takes of a row of the cache
_GROUPED = 3
_SCALE_PER_CHANNEL, _SCALE_FLOAT16, _SCALE_FLOAT32 = range(3)
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
_ALIGNMENT = 64
_SLAB_BYTES = 64 << 20
_LANES = 16
_CHANNELS_A_PIECE = 32  # TASK_CHANNELS in csrc/tiles.h


class PackedMatrix:
    """A matrix [O, I] in panels of 16 output channels (csrc/pack.h)."""

    def __init__(self, struct: WeightStruct, panels: Tensor, channel_scale: Tensor | None):
        self._panels = panels  # kept alive: the struct has their addresses
        self._channel_scale = channel_scale
        self.struct = struct
        self.address = ctypes.addressof(struct)
        self.shape = (struct.num_rows, struct.num_columns)
        self.group: int = struct.group

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes


class NativeKernels(Kernels):
    """The compiled kernels and the threads they run on. Activations are float32 whatever the weights are."""

    activation_dtype = torch.float32

    def __init__(
        self,
        library: ctypes.CDLL,
        isa: str,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        num_threads: int,
        cores: Sequence[int] = (),
        spin_us: int = 100,
        int8: bool = False,
        keeps_quantized: bool = False,
    ):
        """Start the threads.

        Args:
            dtype: of matrices that are not quantised.
            kv_dtype: float32, bfloat16, or int16 for fixed point.
            cores: one a thread, to pin them; none are pinned when empty.
            spin_us: how long a thread that waits stays awake.
            int8: quantise matrices to 8 bits.
            keeps_quantized: take a checkpoint's own quantised matrices as they are.
        """
        assert kv_dtype in _CACHE_FORMATS, f"no kernels for a cache of {kv_dtype}"
        self.device = torch.device("cpu")
        self.dtype, self.kv_dtype = dtype, kv_dtype
        self.keeps_quantized = keeps_quantized
        self.num_threads = num_threads
        self._int8 = int8
        self.library = _declare(library)
        self._panels = _PanelMemory()
        self._argmax_programs: dict[PackedMatrix, _ArgmaxProgram] = {}
        pinned = (c_int32 * len(cores))(*cores) if cores else None
        self.context = library.kf_new(num_threads, pinned, spin_us)
        plural = "s" if num_threads != 1 else ""
        self.description = f"native kernels ({isa}, {num_threads} thread{plural})"

    def close(self) -> None:
        """End the threads. Nothing may be run afterwards."""
        if self.context:
            self.library.kf_free(self.context)
            self.context = None

    # ---- weights ------------------------------------------------------------------------------------------------

    def matrix(self, weight: Tensor | QuantizedWeight, *, is_head: bool = False) -> PackedMatrix:
        if self._int8 and is_head and isinstance(weight, Tensor):
            weight = quantize_head(weight)
        if isinstance(weight, QuantizedWeight):
            return self._pack_codes(weight)
        if weight.dtype not in _FORMATS:
            weight = weight.float()
        weight = weight.contiguous()
        return self._pack_int8(weight) if self._int8 else self._pack_floats(weight)

    def float_matrix(self, weight: Tensor) -> PackedMatrix:
        return self._pack_floats(weight.float().contiguous())

    def _pack_floats(self, weight: Tensor) -> PackedMatrix:
        struct = WeightStruct(format=_FORMATS[self.dtype], num_rows=weight.shape[0], num_columns=weight.shape[1])
        panels = self._allocate_panels(struct)
        source = (weight.data_ptr(), _FORMATS[weight.dtype])
        self.library.kf_pack_float(self.context, ctypes.byref(struct), *source, panels.data_ptr())
        return PackedMatrix(struct, panels, None)

    def _pack_int8(self, weight: Tensor) -> PackedMatrix:
        """What `_pack_codes` makes of `quantize_int8(weight)`, without its copies."""
        struct = WeightStruct(
            format=_GROUPED,
            bits=8,
            group=INT8_GROUP,
            zero=INT8_ZERO,
            scale_type=_SCALE_PER_CHANNEL,
            num_rows=weight.shape[0],
            num_columns=weight.shape[1],
        )
        channel_scale = self._allocate_channel_scale(struct)
        panels = self._allocate_panels(struct)
        source = (weight.data_ptr(), _FORMATS[weight.dtype])
        destination = (channel_scale.data_ptr(), panels.data_ptr())
        self.library.kf_pack_int8(self.context, ctypes.byref(struct), *source, *destination)
        return PackedMatrix(struct, panels, channel_scale)

    def _pack_codes(self, weight: QuantizedWeight) -> PackedMatrix:
        struct = WeightStruct(
            format=_GROUPED,
            bits=weight.bits,
            group=weight.group,
            zero=weight.zero,
            scale_type=_SCALE_FLOAT16 if weight.scale_is_half else _SCALE_FLOAT32,
            has_minimum=weight.minimum is not None,
            num_rows=weight.shape[0],
            num_columns=weight.shape[1],
        )
        channel_scale = None
        if weight.is_per_channel:
            struct.scale_type = _SCALE_PER_CHANNEL
            channel_scale = self._allocate_channel_scale(struct)
            channel_scale[: weight.shape[0]] = weight.scale
        panels = self._allocate_panels(struct)
        operands = (weight.codes.contiguous(), weight.scale.contiguous(), weight.minimum)
        addresses = [address_of(operand) for operand in operands]
        self.library.kf_pack_codes(self.context, ctypes.byref(struct), *addresses, panels.data_ptr())
        return PackedMatrix(struct, panels, channel_scale)

    def _allocate_channel_scale(self, struct: WeightStruct) -> Tensor:
        scale = torch.zeros(-(-struct.num_rows // _LANES) * _LANES)
        struct.channel_scale = scale.data_ptr()
        return scale

    def _allocate_panels(self, struct: WeightStruct) -> Tensor:
        panels = self._panels.allocate(self.library.kf_measure(ctypes.byref(struct)))
        struct.panels = panels.data_ptr()
        return panels

    def vector(self, weight: Tensor) -> Tensor:
        return weight.to(torch.float32, copy=True)

    # ---- ops ----------------------------------------------------------------------------------------------------

    def embedding(self, ids: Tensor, weight: PackedMatrix, *, scale: float = 1.0) -> Tensor:
        out = _empty(ids, weight.shape[1])
        rounded = torch.tensor(scale, dtype=self.dtype).item()  # as checkpoints with a factor were trained
        call = Call(OpCode.EMBED, {}, {"out": out}, {"weight": weight.address, "scale": rounded})
        self.issue(ids, call, StepStruct(token_ids=address_of(ids) if isinstance(ids, Tensor) else None))
        return out

    def linear(
        self, x: Tensor, weight: PackedMatrix, bias: Tensor | None = None, *, softcap: float | None = None
    ) -> Tensor:
        out = _empty(x, weight.shape[0])
        source: dict[str, Operand | Codes] = (
            {"codes": self._quantize(x, weight.group)} if weight.group else {"x": _contiguous(x)}
        )
        constants = {"weight": weight.address, "softcap": softcap or 0.0}
        self.issue(x, Call(OpCode.LINEAR, {**source, "bias": bias}, {"out": out}, constants))
        return out

    def linear_argmax(self, x: Tensor, weight: PackedMatrix, allowed: Tensor | None = None) -> list[int]:
        """Where each row of `linear(x, weight)` is largest; the product itself never is in memory."""
        program = self._argmax_programs.get(weight)
        if program is None or program.max_rows < x.shape[0]:
            program = self._argmax_programs[weight] = _ArgmaxProgram(self, weight, x.shape[0])
        return program.run(_contiguous(x), allowed)

    def _quantize(self, x: Tensor, group: int) -> Codes:
        def make() -> Codes:
            return self.empty_codes(x, group)

        def call(codes: Codes) -> Call:
            return Call(OpCode.QUANTIZE, {"x": _contiguous(x)}, {"codes": codes}, {"size": x.shape[1]})

        if isinstance(x, StepTensor):
            return x.recording.codes(x, group, make, call)
        codes = make()
        self.issue(x, call(codes))
        return codes

    def empty_codes(self, like: Tensor, group: int) -> Codes:
        """Memory for the codes of operands of a shape."""
        num_groups = -(-like.shape[1] // group)
        scale, scaled_sum = (_empty(like, num_groups) for _ in range(2))
        codes = _empty(like, num_groups * group, torch.int8)
        return Codes(group, codes, scale, scaled_sum, _empty(like, num_groups, torch.int32))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
        out = _empty(x, x.shape[1])
        constants = {"size": x.shape[1], "per_row": 1, "eps": eps, "offset": offset}
        self.issue(x, Call(OpCode.RMS_NORM, {"x": _contiguous(x), "weight": weight}, {"out": out}, constants))
        return out

    def act_and_mul(self, gate: Tensor, up: Tensor, act: str) -> Tensor:
        if act not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"hidden_act must be one of {', '.join(_ACTIVATIONS)}. Given: {act!r}", param="hidden_act"
            )
        if isinstance(gate, StepTensor) and isinstance(up, StepTensor):
            fused = gate.recording.gate(gate, up, _ACTIVATIONS[act])
            if fused is not None:
                return fused
        out = _empty(gate, gate.shape[1])
        reads: dict[str, Operand | Codes] = {"gate": _contiguous(gate), "up": _contiguous(up)}
        constants = {"size": gate.shape[1], "activation": _ACTIVATIONS[act]}
        self.issue(gate, Call(OpCode.ACT_AND_MUL, reads, {"out": out}, constants))
        return out

    def keep(self, x: Tensor, features: Tensor, column: int) -> None:
        if isinstance(x, StepTensor):
            x.recording.append(Call(OpCode.KEEP, {"x": x}, {}, {"size": x.shape[1], "column": column}))
        else:
            super().keep(x, features, column)

    def rotate_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        kv_cache: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        offset: float,
        step: StepStruct | None,
    ) -> Tensor:
        """Norm (where norms are given) and rotate heads of q and k, write k and v to their slots; returns q.

        Args:
            q: [T, H * D]. k, v: [T, K * D].
            table: from `reference.rotary_tables`.
            kv_cache: from `make_kv_cache`; changes.
            step: positions and slots; None while recording.
        """
        out = _empty(q, q.shape[1])
        reads: dict[str, Operand | Codes] = {
            "q": _contiguous(q),
            "k": _contiguous(k),
            "v": _contiguous(v),
            "q_norm": q_norm,
            "k_norm": k_norm,
            "table": table,
        }
        head_dim = _head_dim(kv_cache)
        constants = {
            "cache": _cache_struct(kv_cache),
            "num_heads": q.shape[1] // head_dim,
            "eps": eps,
            "offset": offset,
        }
        self.issue(q, Call(OpCode.ROTATE_AND_WRITE, reads, {"q_out": out}, constants, kv_cache), step)
        return out

    def attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        step: StepStruct | None,
    ) -> Tensor:
        """See `reference.paged_attention`, for q [T, H * D]; step as in `rotate_and_write`."""
        out = _empty(q, q.shape[1])
        constants = {
            "cache": _cache_struct(kv_cache),
            "num_heads": q.shape[1] // _head_dim(kv_cache),
            "window": window or 0,
            "scale": scale,
            "softcap": softcap or 0.0,
        }
        self.issue(q, Call(OpCode.ATTENTION, {"q": _contiguous(q)}, {"out": out}, constants, kv_cache), step)
        return out

    def issue(self, operand: Tensor, call: Call, step: StepStruct | None = None) -> None:
        """Note a call in the recording that `operand` is of, or run it over all rows of `operand`."""
        if isinstance(operand, StepTensor):
            operand.recording.append(call)
            return
        assert step is not None or call.cache is None, "plan(batch) comes before run"
        step = step or StepStruct()
        step.num_rows = operand.shape[0]
        self.run((OpStruct * 1)(call.to_struct()), step, max(operand.shape[0], 1))

    def run(self, ops: ctypes.Array[OpStruct], step: StepStruct, tile_rows: int) -> None:
        """Run a program over a step, at most tile_rows rows at a time. Other Python threads go on meanwhile."""
        self.library.kf_run(self.context, ops, len(ops), ctypes.byref(step), tile_rows)

    # ---- KV cache -----------------------------------------------------------------------------------------------

    def make_kv_cache(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> Tensor:
        """[N, K, 2, S, D], or D + 2 in fixed point; how they lie in a block's K and V says csrc/program.h."""
        shape = (num_blocks, num_kv_heads, 2, block_size, head_dim + _SCALE_ELEMENTS.get(self.kv_dtype, 0))
        num_bytes = math.prod(shape) * self.kv_dtype.itemsize
        return lazy_zeros(num_bytes, huge_pages=False).view(self.kv_dtype).view(shape)

    def copy_blocks(self, kv_cache: Tensor, src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
        operands = [operand.contiguous() for operand in (src, dst, num_tokens)]
        addresses = (operand.data_ptr() for operand in operands)
        self.library.kf_copy_blocks(ctypes.byref(_cache_struct(kv_cache)), *addresses, src.shape[0])


class _ArgmaxProgram:
    """A head's product and its largest numbers for up to max_rows rows, with memory of its own: it runs every step."""

    def __init__(self, kernels: NativeKernels, weight: PackedMatrix, max_rows: int):
        self.max_rows = max_rows
        self._kernels = kernels
        num_pieces = -(-weight.shape[0] // _CHANNELS_A_PIECE)
        rows = torch.empty(max_rows, weight.shape[1])
        self._out = torch.empty(max_rows, dtype=torch.int64)
        pieces: dict[str, Operand | Codes] = {
            "largest": torch.empty(num_pieces, max_rows),
            "ids": torch.empty(num_pieces, max_rows, dtype=torch.int32),
        }
        self._calls: list[Call] = []
        source: dict[str, Operand | Codes] = {"x": rows}
        if weight.group:
            codes = kernels.empty_codes(rows, weight.group)
            self._calls.append(Call(OpCode.QUANTIZE, {"x": rows}, {"codes": codes}, {"size": weight.shape[1]}))
            source = {"codes": codes}
        self._calls.append(Call(OpCode.LINEAR_ARGMAX, source, pieces, {"weight": weight.address}))
        self._calls.append(Call(OpCode.ARGMAX, pieces, {"out": self._out}, {"num_pieces": num_pieces}))
        self._ops = (OpStruct * len(self._calls))(*(call.to_struct(starts_phase=True) for call in self._calls))
        self._product = self._ops[-2].linear_argmax
        self._input = self._ops[0].quantize if weight.group else self._product

    def run(self, x: Tensor, allowed: Tensor | None) -> list[int]:
        num_rows = x.shape[0]
        if num_rows == 0:
            return []
        self._input.x = x.data_ptr()
        self._product.allowed = None if allowed is None else allowed.data_ptr()
        self._product.allowed_stride = 0 if allowed is None else allowed.stride(0)
        self._kernels.run(self._ops, StepStruct(num_rows=num_rows), num_rows)
        return self._out[:num_rows].tolist()


class _PanelMemory:
    """Memory for panels, in slabs: many a matrix is smaller than a huge page."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """num_bytes from a slab, at a cache line; pages that are never written take no memory."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._slab):
            self._slab = lazy_zeros(max(size, _SLAB_BYTES), huge_pages=True)
        panels, self._slab = self._slab[:num_bytes], self._slab[size:]
        return panels


def _cache_struct(kv_cache: Tensor) -> KvCacheStruct:
    _, num_kv_heads, _, block_size, _ = kv_cache.shape
    cache_format = _CACHE_FORMATS[kv_cache.dtype]
    return KvCacheStruct(kv_cache.data_ptr(), num_kv_heads, _head_dim(kv_cache), block_size, cache_format)


def _head_dim(kv_cache: Tensor) -> int:
    return kv_cache.shape[4] - _SCALE_ELEMENTS.get(kv_cache.dtype, 0)


def _empty(like: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Any:
    if isinstance(like, StepTensor):
        return like.recording.tensor(width, dtype)
    return torch.empty(like.shape[0], width, dtype=dtype)


def _contiguous(x: Any) -> Any:
    return x if isinstance(x, StepTensor) else x.contiguous()


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Set the functions' types; the structs of both sides must have the same sizes."""
    pointer = c_void_p
    signatures = {
        "kf_abi": (None, [pointer]),
        "kf_new": (pointer, [c_int32, pointer, c_int32]),
        "kf_free": (None, [pointer]),
        "kf_run": (None, [pointer, pointer, c_int64, pointer, c_int64]),
        "kf_measure": (c_int64, [pointer]),
        "kf_pack_float": (None, [pointer, pointer, pointer, c_int32, pointer]),
        "kf_pack_codes": (None, [pointer] * 6),
        "kf_pack_int8": (None, [pointer, pointer, pointer, c_int32, pointer, pointer]),
        "kf_copy_blocks": (None, [pointer] * 4 + [c_int64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    structs = (WeightStruct, CodesStruct, StepStruct, KvCacheStruct, OpStruct)
    expected = [ctypes.sizeof(struct) for struct in structs]
    sizes = (c_int64 * len(expected))()
    library.kf_abi(sizes)
    assert list(sizes) == expected, f"csrc and kernels/native.py disagree: {list(sizes)} and {expected} bytes"
    return library
