"""A checkpoint that does not fit the model is refused by the name of the tensor; random weights are repeatable."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kitfox.errors import UnsupportedModelError, WeightsError
from kitfox.layers.weights import empty_places
from kitfox.models import Model, make_model
from kitfox.weights.loader import iter_weights
from kitfox.weights.model_config import read_model_config
from tests.models.tiny_models import FAMILIES, PagedRun, random_prompt, save_checkpoint
from tests.native import native_kernels, needs_native, torch_kernels

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
)


def checkpoint(path: Path, family: str = "llama") -> tuple[Model, dict[str, torch.Tensor]]:
    save_checkpoint(FAMILIES[family](), path)
    config = read_model_config(path)
    return make_model(config, torch_kernels()), dict(iter_weights(path, config))


def assert_refused(model: Model, weights: dict[str, torch.Tensor], *said: str) -> None:
    with pytest.raises(WeightsError) as caught:
        model.load_weights(weights.items())
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_checkpoint_is_needed(family: str, tmp_path: Path) -> None:
    model, weights = checkpoint(tmp_path, family)
    for name in weights:
        without = {other: tensor for other, tensor in weights.items() if other != name}
        assert_refused(make_model(model.config, model.kernels), without, "missing", name)
    model.load_weights(weights.items())
    assert not empty_places(model)


def test_many_missing_tensors_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    model, weights = checkpoint(tmp_path)
    kept = {name: tensor for name, tensor in weights.items() if ".layers.2." not in name}
    with pytest.raises(WeightsError) as caught:
        model.load_weights(kept.items())
    message = str(caught.value)
    named = re.findall(r"model\.layers\.2\.[a-z_.]+", message)
    assert named
    assert f"and {len(weights) - len(kept) - len(named)} more" in message


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.q_proj.weight",  # one layer too many
        "model.layers.0.self_attn.q_proj.bias",  # the config says no biases
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.qweight",
        "layers.0.self_attn.q_proj.weight.extra",
    ],
)
def test_unexpected_tensor_is_named(name: str, tmp_path: Path) -> None:
    model, weights = checkpoint(tmp_path)
    assert_refused(model, {**weights, name: torch.zeros(48, 48)}, "unexpected", name)


def test_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    model, weights = checkpoint(tmp_path)
    assert_refused(model, {**weights, Q_PROJ: torch.zeros(48, 47)}, Q_PROJ, "[48, 47]", "[48, 48]")


def test_shapes_that_would_broadcast_are_refused(tmp_path: Path) -> None:
    model, weights = checkpoint(tmp_path)
    assert_refused(model, {**weights, Q_PROJ: torch.zeros(1, 48)}, Q_PROJ, "[1, 48]")


def test_quantised_tensor_is_not_taken_for_a_weight(tmp_path: Path) -> None:
    model, weights = checkpoint(tmp_path)
    assert_refused(model, {**weights, Q_PROJ: torch.zeros(48, 48, dtype=torch.int8)}, Q_PROJ, "int8")


def test_repeated_tensor_is_refused(tmp_path: Path) -> None:
    model, weights = checkpoint(tmp_path)

    def twice() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights.items()
        yield Q_PROJ, weights[Q_PROJ]

    with pytest.raises(WeightsError, match=re.escape(Q_PROJ)):
        model.load_weights(twice())


def test_what_the_config_gives_may_be_stored_too(tmp_path: Path) -> None:
    model, weights = checkpoint(tmp_path, "llama-tied")
    assert "lm_head.weight" not in weights
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
        "lm_head.weight": weights["model.embed_tokens.weight"],
    }
    model.load_weights({**extra, **weights}.items())


def test_an_untied_head_is_needed(tmp_path: Path) -> None:
    model, weights = checkpoint(tmp_path, "llama")
    del weights["lm_head.weight"]
    assert_refused(model, weights, "missing", "lm_head.weight")


def test_weights_are_converted_to_the_kernels_dtype(tmp_path: Path) -> None:
    _, weights = checkpoint(tmp_path)
    model = make_model(read_model_config(tmp_path), torch_kernels(torch.bfloat16))
    model.load_weights(weights.items())
    stored = weights["model.embed_tokens.weight"]
    assert torch.equal(model.embed_tokens.weight, stored.bfloat16())


@needs_native
def test_a_model_does_not_share_memory_with_the_checkpoint(tmp_path: Path) -> None:
    prompt = random_prompt(5)
    for kernels in (torch_kernels(), native_kernels()):
        save_checkpoint(FAMILIES["llama"](head_dim=16), tmp_path)
        config = read_model_config(tmp_path)
        model, weights = make_model(config, kernels), dict(iter_weights(tmp_path, config))
        model.load_weights(weights.items())
        before = PagedRun(model, [prompt]).run([{0: 5}])[0]
        for tensor in weights.values():
            tensor.fill_(torch.nan)
        assert torch.equal(PagedRun(model, [prompt]).run([{0: 5}])[0], before)


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3", "gemma3"])
def test_random_weights_are_repeatable_and_usable(family: str, tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path, family)
    prompt = random_prompt(5)

    def random(seed: int) -> Model:
        made = make_model(model.config, model.kernels)
        made.init_random_weights(seed)
        return made

    def logits(seed: int) -> torch.Tensor:
        return PagedRun(random(seed), [prompt]).run([{0: 5}])[0]

    first = logits(1)
    assert torch.equal(first, logits(1))
    assert not torch.equal(first, logits(2))
    assert torch.isfinite(first).all()
    model = random(1)
    assert 0.015 < model.embed_tokens.weight.std() < 0.025
    expected_norm = 0.0 if family == "gemma3" else 1.0
    assert torch.equal(model.norm.weight, torch.full_like(model.norm.weight, expected_norm))


def test_unsupported_architecture_is_named_with_the_supported(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    config = dataclasses.replace(model.config, architecture="MambaForCausalLM")
    with pytest.raises(UnsupportedModelError) as caught:
        make_model(config, torch_kernels())
    for name in ("MambaForCausalLM", *ARCHITECTURES):
        assert name in str(caught.value)


def test_unknown_activation_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    config = dataclasses.replace(model.config, hidden_act="relu6")
    with pytest.raises(UnsupportedModelError, match="relu6"):
        make_model(config, torch_kernels())


def test_unknown_rope_scaling_is_refused_before_the_first_step(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["llama-linear-rope"](), tmp_path)
    config = read_model_config(tmp_path)
    assert config.rope_scaling is not None
    scaling = dataclasses.replace(config.rope_scaling, kind="dynamic")
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        make_model(dataclasses.replace(config, rope_scaling=scaling), torch_kernels())
