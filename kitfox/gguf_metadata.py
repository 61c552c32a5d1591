"""What a GGUF file says about itself: key-value metadata and the list of its tensors, without reading their data.

Arrays are decoded when asked for, because a tokenizer's hold hundreds of thousands of strings and most readers
want the shape of the model only. Tensor data belongs to `kitfox.weights.loader`.
Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitfox.errors import WeightsError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32
_NO_VALUE = object()
CONTROL_TOKEN = 3
# The block formats that kitfox can compute with as they are (kernels/quantized.py), by their GGML type.
GGML_QUANTIZATIONS = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
}
# Tokens that end a turn whatever the file's eos_token_id says, as the models' own generation configs list them.
_END_OF_TURN = frozenset({b"<end_of_turn>", b"<|eot_id|>", b"<|eom_id|>", b"<|im_end|>"})


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        shape: outermost dimension first, as PyTorch prints it (GGUF stores it the other way round).
        type_id: a `gguf.GGMLQuantizationType`.
        offset: bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class _ArrayAt:
    """An array still in the file: element type, number of elements, byte offset of the first."""

    type_id: int
    count: int
    offset: int


class GgufMetadata:
    """Reads the header of one file on construction; `metadata["general.architecture"]` is a Python value.

    Raises:
        WeightsError: the file is not GGUF of version 2 or 3, or ends too early.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise WeightsError(f"{path} is not a GGUF file: it does not start with 'GGUF'")
            self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._parse()
        except (struct.error, ValueError, KeyError) as error:
            raise WeightsError(f"{path} is truncated or damaged: {error}") from None

    def _parse(self) -> None:
        version, num_tensors, num_values = struct.unpack_from("<IQQ", self._buffer, 4)
        if version not in (2, 3):
            raise WeightsError(f"{self.path} is GGUF version {version}; versions 2 and 3 are supported")
        self._values: dict[str, Any] = {}
        offset = 24
        for _ in range(num_values):
            key, offset = self._string(offset)
            (type_id,) = struct.unpack_from("<I", self._buffer, offset)
            self._values[key], offset = self._value(type_id, offset + 4)
        tensors: list[GgufTensor] = []
        for _ in range(num_tensors):
            tensor, offset = self._tensor(offset)
            tensors.append(tensor)
        alignment = self.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-offset // alignment) * alignment
        self.tensors = {t.name: GgufTensor(t.name, t.shape, t.type_id, start + t.offset) for t in tensors}

    def _string(self, offset: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._buffer, offset)
        start, end = offset + 8, offset + 8 + length
        if end > len(self._buffer):
            raise ValueError(f"a string of {length} bytes runs past the end")
        return self._buffer[start:end].decode("utf-8", "replace"), end

    def _value(self, type_id: int, offset: int) -> tuple[Any, int]:
        if type_id == _STRING:
            return self._string(offset)
        if type_id == _ARRAY:
            element_type, count = struct.unpack_from("<IQ", self._buffer, offset)
            array = _ArrayAt(element_type, count, offset + 12)
            return array, self._end_of(array)
        form = "<" + _SCALARS[type_id]
        return struct.unpack_from(form, self._buffer, offset)[0], offset + struct.calcsize(form)

    def _end_of(self, array: _ArrayAt) -> int:
        offset = array.offset
        if array.type_id != _STRING:
            return offset + array.count * struct.calcsize(_SCALARS[array.type_id])
        unpack, buffer = struct.Struct("<Q").unpack_from, self._buffer
        for _ in range(array.count):
            offset += 8 + unpack(buffer, offset)[0]
        return offset

    def _tensor(self, offset: int) -> tuple[GgufTensor, int]:
        name, offset = self._string(offset)
        (num_dims,) = struct.unpack_from("<I", self._buffer, offset)
        dims = struct.unpack_from(f"<{num_dims}Q", self._buffer, offset + 4)
        offset += 4 + 8 * num_dims
        type_id, data_offset = struct.unpack_from("<IQ", self._buffer, offset)
        return GgufTensor(name, tuple(reversed(dims)), type_id, data_offset), offset + 12

    def _strings(self, array: _ArrayAt) -> Iterator[bytes]:
        offset, unpack, buffer = array.offset, struct.Struct("<Q").unpack_from, self._buffer
        for _ in range(array.count):
            end = offset + 8 + unpack(buffer, offset)[0]
            yield buffer[offset + 8 : end]
            offset = end

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, arrays as lists, or the default."""
        value = self._values.get(key, default)
        if not isinstance(value, _ArrayAt):
            return value
        if value.type_id == _STRING:
            return [text.decode("utf-8", "replace") for text in self._strings(value)]
        form = f"<{value.count}{_SCALARS[value.type_id]}"
        return list(struct.unpack_from(form, self._buffer, value.offset))

    def __getitem__(self, key: str) -> Any:
        value = self.get(key, _NO_VALUE)
        if value is _NO_VALUE:
            raise WeightsError(f"{self.path} has no metadata {key!r}")
        return value

    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: those the file names, then control tokens known to end a turn."""
        named = [self.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
        tokens, types = self._values.get("tokenizer.ggml.tokens"), self.get("tokenizer.ggml.token_type", [])
        texts = enumerate(self._strings(tokens)) if isinstance(tokens, _ArrayAt) else ()
        by_text = [i for i, text in texts if text in _END_OF_TURN and types[i : i + 1] == [CONTROL_TOKEN]]
        return tuple(dict.fromkeys(token_id for token_id in [*named, *by_text] if token_id is not None))
