"""Named tensors from safetensors and GGUF files, one at a time, under the names `transformers` gives them.

What GGUF converters change is undone here, so that a model sees one convention: the rotary order of Llama's q and k
rows, and Gemma's norm weights, which GGUF stores with 1 added.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress

from kitfox.config import ModelConfig
from kitfox.errors import UnsupportedModelError, WeightsError
from kitfox.gguf_metadata import GgufMetadata, GgufTensor

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
_GGUF_NOT_WEIGHTS = frozenset({"rope_freqs.weight"})  # read as rope scaling by model_config
_NOT_TEXT = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.|\.rotary_emb\.inv_freq$")
_MULTIMODAL_PREFIX = re.compile(r"^(language_model\.model\.|model\.language_model\.|language_model\.(?=lm_head\.))")


def iter_weights(
    path: Path, config: ModelConfig, progress: Progress | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) lazily; only the tensor just yielded is in memory.

    Args:
        path: a directory with safetensors files, or a `.gguf` file.
        progress: gets one more bar, in bytes on disk, that ends full.

    Yields:
        safetensors in the dtype they are stored in; GGUF as float32. The vision part of a multimodal checkpoint and
        old checkpoints' inv_freq buffers are left out.

    Raises:
        WeightsError: a file or shard is missing or damaged, or a GGUF tensor has a name that is not known.
        UnsupportedModelError: a GGUF tensor type that cannot be dequantised.
    """
    source = _iter_gguf(path, config) if path.is_file() else _iter_safetensors(path)
    task = progress.add_task("Loading weights", total=weights_total_bytes(path)) if progress else None
    done = 0
    for name, tensor, num_bytes in source:
        yield name, tensor
        done += num_bytes
        if progress is not None and task is not None:
            progress.update(task, completed=done)
    if progress is not None and task is not None:
        progress.update(task, completed=weights_total_bytes(path))


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
        except SafetensorError as error:
            raise WeightsError(f"{file} is damaged: {error}") from None


def _text_name(name: str) -> str:
    return _MULTIMODAL_PREFIX.sub(lambda m: "" if "lm_head" in name else "model.", name)


def _iter_gguf(path: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor, int]]:
    metadata = GgufMetadata(path)
    architecture = metadata["general.architecture"]
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for stored in metadata.tensors.values():
        if stored.name in _GGUF_NOT_WEIGHTS:
            continue
        name = _hf_name(stored.name, architecture)
        tensor, num_bytes = _dequantize(data, stored, path)
        if architecture == "llama":
            tensor = _undo_rotary_order(name, tensor, config)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor - 1
        yield name, tensor, num_bytes


def _hf_name(name: str, architecture: str) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    block = _GGUF_GEMMA_BLOCK if architecture == "gemma3" else _GGUF_BLOCK
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in block:
        raise WeightsError(f"unexpected tensor {name!r} for architecture {architecture}")
    return f"model.layers.{match[1]}.{block[match[2]]}.{match[3]}"


def _dequantize(data: np.ndarray, stored: GgufTensor, path: Path) -> tuple[torch.Tensor, int]:
    """The tensor as float32 in memory of its own, and its bytes on disk."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(stored.type_id)
    except ValueError:
        raise UnsupportedModelError(f"tensor {stored.name!r} has unknown GGML type {stored.type_id}") from None
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    *rows, width = stored.shape
    row_bytes = width // block_size * type_size
    num_bytes = row_bytes * int(np.prod(rows, dtype=np.int64))
    raw = data[stored.offset : stored.offset + num_bytes]
    if len(raw) < num_bytes:
        raise WeightsError(f"{path} ends inside tensor {stored.name!r}: {len(raw)} of {num_bytes} bytes")
    try:
        array = gguf.dequantize(np.asarray(raw).reshape(*rows, row_bytes), kind)
    except NotImplementedError:
        raise UnsupportedModelError(
            f"tensor {stored.name!r} has type {kind.name}, which cannot be dequantised"
        ) from None
    if kind is gguf.GGMLQuantizationType.F32:  # comes back as a view of the read-only file
        array = array.copy()
    return torch.from_numpy(array.astype(np.float32, copy=False).reshape(stored.shape)), num_bytes


def _undo_rotary_order(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """q and k rows from pairs side by side (GGUF's "llama") back to two halves per head."""
    if ".q_proj." in name:
        num_heads = config.num_heads
    elif ".k_proj." in name:
        num_heads = config.num_kv_heads
    else:
        return tensor
    pairs = tensor.view(num_heads, config.head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
