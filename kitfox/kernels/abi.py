"""The structs and op codes of csrc/program.h, field by field; `kf_abi` says whether both sides agree."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import ClassVar


class OpCode(IntEnum):
    EMBED = 1
    RMS_NORM = 2
    QUANTIZE = 3
    LINEAR = 4
    ACT_AND_MUL = 5
    ADD = 6
    ROTATE_AND_WRITE = 7
    ATTENTION = 8
    GATED_LINEAR = 9
    LINEAR_ARGMAX = 10
    ARGMAX = 11
    KEEP = 12


class WeightStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("format", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
        ("zero", c_int32),
        ("scale_type", c_int32),
        ("has_minimum", c_int32),
        ("num_rows", c_int64),
        ("num_columns", c_int64),
        ("panel_bytes", c_int64),
        ("panels", c_void_p),
        ("channel_scale", c_void_p),
    ]


class CodesStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("codes", c_void_p),
        ("scale", c_void_p),
        ("scaled_sum", c_void_p),
        ("sum", c_void_p),
        ("group", c_int64),
    ]


class StepStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("num_rows", c_int64),
        ("num_requests", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("hidden", c_void_p),
        ("features", c_void_p),
        ("features_stride", c_int64),
    ]


class KvCacheStruct(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", c_void_p),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("format", c_int32),
        ("unused", c_int32),
    ]


class _Embed(ctypes.Structure):
    _fields_: ClassVar = [("weight", c_void_p), ("out", c_void_p), ("scale", c_double)]


class _RmsNorm(ctypes.Structure):
    _fields_: ClassVar = [
        ("x", c_void_p),
        ("weight", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("codes", CodesStruct),
        ("size", c_int64),
        ("per_row", c_int64),
        ("eps", c_double),
        ("offset", c_double),
    ]


class _Quantize(ctypes.Structure):
    _fields_: ClassVar = [("x", c_void_p), ("codes", CodesStruct), ("size", c_int64)]


class _Linear(ctypes.Structure):
    _fields_: ClassVar = [
        ("weight", c_void_p),
        ("x", c_void_p),
        ("codes", CodesStruct),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("softcap", c_double),
    ]


class _ActAndMul(ctypes.Structure):
    _fields_: ClassVar = [
        ("gate", c_void_p),
        ("up", c_void_p),
        ("out", c_void_p),
        ("codes", CodesStruct),
        ("size", c_int64),
        ("activation", c_int64),
    ]


class _Add(ctypes.Structure):
    _fields_: ClassVar = [("a", c_void_p), ("b", c_void_p), ("out", c_void_p), ("size", c_int64)]


class _Keep(ctypes.Structure):
    _fields_: ClassVar = [("x", c_void_p), ("size", c_int64), ("column", c_int64)]


class _RotateAndWrite(ctypes.Structure):
    _fields_: ClassVar = [
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("table", c_void_p),
        ("q_out", c_void_p),
        ("cache", KvCacheStruct),
        ("num_heads", c_int64),
        ("eps", c_double),
        ("offset", c_double),
    ]


class _Attention(ctypes.Structure):
    _fields_: ClassVar = [
        ("q", c_void_p),
        ("out", c_void_p),
        ("cache", KvCacheStruct),
        ("num_heads", c_int64),
        ("window", c_int64),
        ("scale", c_double),
        ("softcap", c_double),
    ]


class _GatedLinear(ctypes.Structure):
    _fields_: ClassVar = [
        ("gate", c_void_p),
        ("up", c_void_p),
        ("x", c_void_p),
        ("codes", CodesStruct),
        ("out", c_void_p),
        ("out_codes", CodesStruct),
        ("activation", c_int64),
    ]


class _LinearArgmax(ctypes.Structure):
    _fields_: ClassVar = [
        ("weight", c_void_p),
        ("x", c_void_p),
        ("codes", CodesStruct),
        ("largest", c_void_p),
        ("ids", c_void_p),
        ("allowed", c_void_p),
        ("allowed_stride", c_int64),
    ]


class _Argmax(ctypes.Structure):
    _fields_: ClassVar = [("largest", c_void_p), ("ids", c_void_p), ("num_pieces", c_int64), ("out", c_void_p)]


ARGUMENTS = {
    OpCode.EMBED: ("embed", _Embed),
    OpCode.RMS_NORM: ("rms_norm", _RmsNorm),
    OpCode.QUANTIZE: ("quantize", _Quantize),
    OpCode.LINEAR: ("linear", _Linear),
    OpCode.ACT_AND_MUL: ("act_and_mul", _ActAndMul),
    OpCode.ADD: ("add", _Add),
    OpCode.KEEP: ("keep", _Keep),
    OpCode.ROTATE_AND_WRITE: ("rotate_and_write", _RotateAndWrite),
    OpCode.ATTENTION: ("attention", _Attention),
    OpCode.GATED_LINEAR: ("gated_linear", _GatedLinear),
    OpCode.LINEAR_ARGMAX: ("linear_argmax", _LinearArgmax),
    OpCode.ARGMAX: ("argmax", _Argmax),
}


class _Arguments(ctypes.Union):
    _fields_: ClassVar = list(ARGUMENTS.values())


class OpStruct(ctypes.Structure):
    _anonymous_: ClassVar = ["arguments"]
    _fields_: ClassVar = [("code", c_int32), ("starts_phase", c_int32), ("arguments", _Arguments)]
