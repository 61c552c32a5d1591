"""A tiny random model that reads images, written by `transformers`, with a tokenizer of bytes; and images."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

SPECIALS = [
    "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]  # fmt: skip
# What SmolVLM's own does: it knows content as parts only.
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
TILE = 32  # pixels a side
TOKENS_PER_TILE = 4


def make_tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return backend


def write_vision_model(
    path: Path, *, splits: bool = True, architecture: str = "Idefics3ForConditionalGeneration", **text: Any
) -> transformers.PreTrainedModel:
    """Random weights, every one of them, with all the files that a hub's repository has."""
    backend = make_tokenizer()
    shape = {
        "vocab_size": backend.get_vocab_size(),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "model_type": "llama",
    } | text
    family = "Idefics3" if architecture.startswith("Idefics3") else "SmolVLM"
    config = getattr(transformers, f"{family}Config")(
        text_config=shape,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": 8,
        },
        scale_factor=2,
        image_token_id=backend.token_to_id("<image>"),
        tie_word_embeddings=False,
        eos_token_id=backend.token_to_id("<end_of_utterance>"),
    )
    config._attn_implementation = "eager"
    theirs = getattr(transformers, architecture)(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in theirs.parameters():
            spread = 0.3 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            centre = parameter.mean() if parameter.dim() == 1 else 0.0
            parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(path)
    backend.save(str(path / "tokenizer.json"))
    specials = {"eos_token": "<end_of_utterance>", "bos_token": "<|im_start|>", "pad_token": "<|im_start|>"}
    files = {
        "tokenizer_config.json": specials | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE},
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": splits,
            "max_image_size": {"longest_edge": TILE},
            "size": {"longest_edge": 3 * TILE},
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.5, 0.6, 0.7],
        },
    }
    for name, value in files.items():
        (path / name).write_text(json.dumps(value))
    return theirs


def picture(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    """Smooth random colours."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return PIL.Image.fromarray(coarse).resize((width, height))


def data_url(image: PIL.Image.Image, kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
