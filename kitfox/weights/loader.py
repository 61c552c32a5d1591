"""Named tensors from safetensors and GGUF files, one at a time, under the names `transformers` gives them.

Matrices that a GGUF file stores in blocks of 4 to 8 bits stay in that form where the caller can compute with it.
What GGUF converters change is undone here, so that a model sees one convention: the rotary order of Llama's q and k
rows, and Gemma's norm weights, which GGUF stores with 1 added.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, overload

import numpy as np
import torch
from rich.progress import Progress

from kitfox.config import ModelConfig
from kitfox.errors import UnsupportedModelError, WeightsError
from kitfox.gguf_metadata import GgufMetadata, GgufTensor
from kitfox.kernels.quantized import GGUF_FORMATS, QuantizedWeight, dequantize, from_gguf

_INDEX = "model.safetensors.index.json"
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_GEMMA_BLOCK = {
    **_GGUF_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGML_F32 = 0
_GGUF_NOT_WEIGHTS = frozenset({"rope_freqs.weight"})  # read as rope scaling by model_config
_NOT_TEXT = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.|\.rotary_emb\.inv_freq$")
_MULTIMODAL_PREFIX = re.compile(
    r"^(language_model\.model\.|model\.language_model\.|model\.text_model\.|language_model\.(?=lm_head\.))"
)


@overload
def iter_weights(
    path: Path, config: ModelConfig, progress: Progress | None = None, *, keep_quantized: Literal[False] = False
) -> Iterator[tuple[str, torch.Tensor]]: ...


@overload
def iter_weights(
    path: Path, config: ModelConfig, progress: Progress | None = None, *, keep_quantized: bool
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]: ...


def iter_weights(
    path: Path, config: ModelConfig, progress: Progress | None = None, *, keep_quantized: bool = False
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    """Yield (name, tensor) lazily; only the tensor just yielded is in memory.

    Args:
        path: a directory with safetensors files, or a `.gguf` file.
        progress: gets one more bar, in bytes on disk, that ends full.
        keep_quantized: yield matrices of the block formats in `GGUF_FORMATS` as `QuantizedWeight`.

    Yields:
        safetensors in the dtype they are stored in; GGUF as float32, unless `keep_quantized` says otherwise. Gemma's
        vision part and old checkpoints' inv_freq buffers are left out.

    Raises:
        WeightsError: a file or shard is missing or damaged, or a GGUF tensor has a name that is not known.
        UnsupportedModelError: a GGUF tensor type that cannot be dequantised.
    """
    source = _iter_gguf(path, config, keep_quantized) if path.is_file() else _iter_safetensors(path)
    task = progress.add_task("Loading weights", total=weights_total_bytes(path)) if progress else None
    done = 0
    for name, tensor, num_bytes in source:
        yield name, tensor
        del tensor  # or it would stay beside the next one while that is made
        done += num_bytes
        if progress is not None and task is not None:
            progress.update(task, completed=done)
    if progress is not None and task is not None:
        progress.update(task, completed=weights_total_bytes(path))


def read_head_weights(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a head that guesses, by name; it is small. Many are stored as `pytorch_model.bin`.

    Raises:
        WeightsError: there are none, or a file is damaged.
    """
    pickled = path / "pytorch_model.bin"
    if any(path.glob("*.safetensors")) or not pickled.is_file():
        stored = {name: tensor for name, tensor, _ in _iter_safetensors(path)}
    else:
        try:
            stored = torch.load(pickled, map_location="cpu", weights_only=True)
        except Exception as error:  # it raises whatever its unpickler does
            raise WeightsError(f"{pickled} is damaged, or more than tensors: {error}") from None
    return {name.removeprefix("model."): tensor for name, tensor in stored.items()}


def weights_total_bytes(path: Path) -> int:
    """Size on disk of the files that `iter_weights` reads."""
    files = [path] if path.is_file() else _safetensors_files(path)
    return sum(file.stat().st_size for file in files)


def _safetensors_files(path: Path) -> list[Path]:
    index = path / _INDEX
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{path} has no *.safetensors files")
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise WeightsError(f"{index} is not a safetensors index: {error!r}") from None
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise WeightsError(f"{path} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing)}")
    return [path / name for name in names]


def _iter_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor, int]]:
    from safetensors import SafetensorError, safe_open

    for file in _safetensors_files(path):
        try:
            with safe_open(file, framework="pt") as shard:
                for stored_name in shard.keys():  # noqa: SIM118 (not a dict)
                    if _NOT_TEXT.search(stored_name):
                        continue
                    tensor = shard.get_tensor(stored_name)
                    yield _text_name(stored_name), tensor, tensor.nbytes
                    del tensor
        except SafetensorError as error:
            raise WeightsError(f"{file} is damaged: {error}") from None


def _text_name(name: str) -> str:
    return _MULTIMODAL_PREFIX.sub(lambda m: "" if "lm_head" in name else "model.", name)


def _iter_gguf(
    path: Path, config: ModelConfig, keep_quantized: bool
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight, int]]:
    metadata = GgufMetadata(path)
    architecture = metadata["general.architecture"]
    with path.open("rb") as file:
        for stored in metadata.tensors.values():
            if stored.name in _GGUF_NOT_WEIGHTS:
                continue
            name = _hf_name(stored.name, architecture)
            raw = _read(file, stored)
            num_bytes = raw.nbytes
            tensor = _unpack(raw, stored, keep_quantized)
            del raw
            if architecture == "llama":
                tensor = _undo_rotary_order(name, tensor, config)
            if architecture == "gemma3" and name.endswith("norm.weight") and isinstance(tensor, torch.Tensor):
                tensor -= 1
            yield name, tensor, num_bytes
            del tensor


def _hf_name(name: str, architecture: str) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    block = _GGUF_GEMMA_BLOCK if architecture == "gemma3" else _GGUF_BLOCK
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in block:
        raise WeightsError(f"unexpected tensor {name!r} for architecture {architecture}")
    return f"model.layers.{match[1]}.{block[match[2]]}.{match[3]}"


def _block_of(stored: GgufTensor) -> tuple[int, int]:
    """How many numbers the blocks of a tensor's type hold, and their bytes.

    `gguf` is asked only about types not known here: importing it takes longer than unpacking a small model.
    """
    if stored.type_id == _GGML_F32:
        return 1, 4
    if stored.type_id in GGUF_FORMATS:
        form = GGUF_FORMATS[stored.type_id]
        return form.block_size, form.layout.itemsize
    import gguf

    try:
        return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(stored.type_id)]
    except ValueError:
        raise UnsupportedModelError(f"tensor {stored.name!r} has unknown GGML type {stored.type_id}") from None


def _read(file: BinaryIO, stored: GgufTensor) -> np.ndarray:
    """A tensor's bytes, [product of the outer dimensions, bytes of a row].

    Read rather than mapped: pages of a mapping would stay in memory beside what was made of them.
    """
    *outer, width = stored.shape
    block_size, block_bytes = _block_of(stored)
    if width % block_size:
        raise WeightsError(
            f"{file.name} is damaged: {stored.name!r} has rows of {width} numbers, not whole blocks of {block_size}"
        )
    num_rows, row_bytes = math.prod(outer), width // block_size * block_bytes
    file.seek(stored.offset)
    raw = np.fromfile(file, dtype=np.uint8, count=num_rows * row_bytes)
    if len(raw) < num_rows * row_bytes:
        raise WeightsError(
            f"{file.name} ends inside tensor {stored.name!r}: {len(raw)} of {num_rows * row_bytes} bytes"
        )
    return raw.reshape(num_rows, row_bytes)


def _unpack(raw: np.ndarray, stored: GgufTensor, keep_quantized: bool) -> torch.Tensor | QuantizedWeight:
    if stored.type_id == _GGML_F32:
        return torch.from_numpy(raw.view(np.float32)).view(stored.shape)
    if stored.type_id in GGUF_FORMATS:
        weight = from_gguf(stored.type_id, raw, stored.shape[-1])
        return weight if keep_quantized and len(stored.shape) == 2 else dequantize(weight).view(stored.shape)
    import gguf

    kind = gguf.GGMLQuantizationType(stored.type_id)
    try:
        numbers = gguf.dequantize(raw, kind)
    except NotImplementedError:
        raise UnsupportedModelError(
            f"tensor {stored.name!r} has type {kind.name}, which cannot be dequantised"
        ) from None
    return torch.from_numpy(numbers.astype(np.float32, copy=False)).view(stored.shape)


def _undo_rotary_order(
    name: str, tensor: torch.Tensor | QuantizedWeight, config: ModelConfig
) -> torch.Tensor | QuantizedWeight:
    """q and k rows from pairs side by side (GGUF's "llama") back to two halves per head."""
    if ".q_proj." in name:
        num_heads = config.num_heads
    elif ".k_proj." in name:
        num_heads = config.num_kv_heads
    else:
        return tensor
    order = torch.arange(tensor.shape[0]).view(num_heads, config.head_dim // 2, 2).transpose(1, 2).flatten()
    return tensor.select_rows(order) if isinstance(tensor, QuantizedWeight) else tensor.index_select(0, order)
