"""Tiny GGUF files, written the way converters write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_gguf(
    path: Path,
    architecture: str,
    *,
    shape: dict[str, Any],
    tensors: dict[str, np.ndarray],
    quantized: dict[str, gguf.GGMLQuantizationType] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """`shape` holds keys below the architecture's name; `quantized` names tensors to store in another type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in shape.items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in (tokenizer or {}).items():
        _add(writer, f"tokenizer.{key}", value)
    for name, array in tensors.items():
        kind = (quantized or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
