"""Make the checkpoints the peers are measured on, all from the default model's GGUF.

    .venv/bin/python -m benchmarks.make_models [NAME ...]

Into ~/.cache/kitfox-bench/models, each made once: the directories smollm2-135m-bf16 and llama1b-random-bf16 (random
weights in the shape of Llama-3.2-1B with this vocabulary), and of both the directories -w8a8 and -bf16-endless and the
files -f16.gguf, -bf16.gguf and -q8_0.gguf. All hold the same numbers: the Q4_1 file's, rounded to bf16, then to theirs.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.paths import MODELS, default_gguf
from kitfox.gguf_metadata import GgufMetadata
from kitfox.tokenizer import load_tokenizer
from kitfox.weights.model_config import read_model_config

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_EXPECTED_ANSWER = "The capital of France is Paris."
_LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_theta": 500000.0,
}
_GGUF_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_STORED_AS = {
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


def make_bf16(out: Path) -> None:
    """The default model as transformers would save it in bf16, with its tokenizer and chat template."""
    source = default_gguf()
    shape = read_model_config(source)
    tensors: dict[str, torch.Tensor] = {}
    for stored in gguf.GGUFReader(source).tensors:
        name = _hf_name(stored.name)
        array = gguf.dequantize(stored.data, stored.tensor_type).astype("float32")
        tensor = _rotary_halves(name, torch.from_numpy(array), shape.num_heads, shape.num_kv_heads)
        tensors[name] = tensor.to(torch.bfloat16).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rope_theta": shape.rope_theta,
    }
    _write_json(out / "config.json", _llama_config(settings))
    _write_tokenizer(source, out)


def make_w8a8(base: Path, out: Path) -> None:
    """vLLM's compressed-tensors int8: weights per output channel, activations per token when it runs, head in bf16."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in _stored(base):
        if "proj.weight" not in name:
            tensors[name] = weight
            continue
        scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        tensors[name] = torch.round(weight.float() / scale).clamp(-127, 127).to(torch.int8)
        tensors[name.replace(".weight", ".weight_scale")] = scale.to(torch.bfloat16)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    number = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None}
    settings = json.loads((base / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "strategy": "channel", "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
            }
        },
    }
    _write_json(out / "config.json", settings)
    _copy_tokenizer(base, out)


def make_endless(base: Path, out: Path) -> None:
    """The bf16 checkpoint without an end token, for a server that has no ignore_eos."""
    (out / "model.safetensors").hardlink_to(base / "model.safetensors")
    _copy_tokenizer(base, out)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((base / name).read_text())
        _write_json(out / name, {**settings, "eos_token_id": None})


def make_random_1b(out: Path) -> None:
    """A shape whose time goes into its matrices; random text comes out, so use it with ignore_eos."""
    settings = _llama_config(_LLAMA_1B)
    generator = torch.Generator().manual_seed(0)
    hidden, inner = settings["hidden_size"], settings["intermediate_size"]
    kv = settings["num_key_value_heads"] * settings["head_dim"]

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": normal(settings["vocab_size"], hidden)}
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = normal(rows, hidden)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    _write_json(out / "config.json", settings)
    _copy_tokenizer(made("smollm2-135m-bf16"), out)


def make_gguf(form: str, base: Path, out: Path) -> None:
    """The bf16 checkpoint as a GGUF file with its matrices in one of `_STORED_AS`; norms stay in fp32."""
    settings = json.loads((base / "config.json").read_text())
    stored_type, file_type = _STORED_AS[form]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(base.name)
    writer.add_file_type(file_type)
    _add_shape(writer, settings)
    _add_tokenizer(writer, default_gguf())
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    for name, tensor in _stored(base):
        array = _rotary_pairs(name, tensor.float(), heads, kv_heads).numpy()
        kind = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else stored_type
        writer.add_tensor(_gguf_name(name), gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, settings: dict[str, Any]) -> None:
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_rope_freq_base(settings["rope_theta"])
    writer.add_rope_dimension_count(settings["head_dim"])
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_vocab_size(settings["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    stored = GgufMetadata(source)
    writer.add_tokenizer_model(stored["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(stored["tokenizer.ggml.pre"])
    writer.add_token_list(stored["tokenizer.ggml.tokens"])
    writer.add_token_types(stored["tokenizer.ggml.token_type"])
    writer.add_token_merges(stored["tokenizer.ggml.merges"])
    writer.add_bos_token_id(stored["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(stored["tokenizer.ggml.eos_token_id"])
    writer.add_unk_token_id(stored["tokenizer.ggml.unknown_token_id"])
    writer.add_pad_token_id(stored["tokenizer.ggml.padding_token_id"])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(stored["tokenizer.chat_template"])


def _gguf_name(name: str) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.weight"


def _hf_name(name: str) -> str:
    for hf, stored in _GGUF_TOP.items():
        if name == stored:
            return hf
    _, layer, part = name.removesuffix(".weight").split(".")
    (hf,) = (hf for hf, stored in _GGUF_NAMES.items() if stored == part)
    return f"model.layers.{layer}.{hf}.weight"


def _rotary_pairs(name: str, tensor: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """q and k rows from two halves per head to pairs side by side, as GGUF's "llama" wants them."""
    heads = num_heads if ".q_proj." in name else num_kv_heads if ".k_proj." in name else 0
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) if heads else tensor


def _rotary_halves(name: str, tensor: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Undo `_rotary_pairs`."""
    heads = num_heads if ".q_proj." in name else num_kv_heads if ".k_proj." in name else 0
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) if heads else tensor


def _llama_config(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "rope_parameters": {"rope_theta": shape["rope_theta"], "rope_type": "default"},
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(source: Path, out: Path) -> None:
    tokenizer = load_tokenizer(source)
    tokenizer._backend.save(str(out / "tokenizer.json"))  # incl. the digit splitting that transformers' reader drops
    stored = GgufMetadata(source)
    tokens = stored["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 8192,
            "clean_up_tokenization_spaces": False,
            **{role: tokens[stored[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()},
        },
    )
    (out / "chat_template.jinja").write_text(stored["tokenizer.chat_template"])
    _write_json(out / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})


def _copy_tokenizer(base: Path, out: Path) -> None:
    for name in _TOKENIZER_FILES:
        shutil.copy(base / name, out)


def _stored(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            yield name, file.get_tensor(name)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _made_from_bf16(name: str, make: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    return lambda out: make(made(name), out)


_FORMS: dict[str, Callable[[Path, Path], None]] = {
    "-w8a8": make_w8a8,
    "-bf16-endless": make_endless,
    **{f"-{form}.gguf": functools.partial(make_gguf, form) for form in _STORED_AS},
}
_MAKERS: dict[str, Callable[[Path], None]] = {"smollm2-135m-bf16": make_bf16, "llama1b-random-bf16": make_random_1b}
_MAKERS |= {
    name.removesuffix("-bf16") + form: _made_from_bf16(name, make) for name in _MAKERS for form, make in _FORMS.items()
}


def made(name: str) -> Path:
    """Path of a checkpoint, made first if it is not there. An interrupted one is not mistaken for a whole one."""
    path = MODELS / name
    if path.exists():
        return path
    MODELS.mkdir(parents=True, exist_ok=True)
    part = MODELS / f"{name}.part"
    if part.is_dir():
        shutil.rmtree(part)
    if not name.endswith(".gguf"):
        part.mkdir()
    _MAKERS[name](part)
    part.rename(path)
    return path


def check(directory: Path) -> None:
    """Raise unless transformers loads the directory and the model knows the capital of France."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(ask, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    digits = tokenizer("  2024")["input_ids"]
    if answer != _EXPECTED_ANSWER or digits != load_tokenizer(default_gguf()).encode("  2024"):
        raise SystemExit(f"{directory} is wrong: it answers {answer!r}, and '  2024' is {digits}")


def main() -> None:
    default = [name for name in _MAKERS if name.startswith("smollm2")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", default=default, help="default: all of smollm2-135m")
    for name in parser.parse_args().names:
        path = made(name)
        files = path.iterdir() if path.is_dir() else [path]
        print(f"{path}  {sum(file.stat().st_size for file in files) / 2**20:.0f} MiB", flush=True)
        if name == "smollm2-135m-bf16":
            check(path)


if __name__ == "__main__":
    main()
