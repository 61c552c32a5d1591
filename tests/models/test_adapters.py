"""LoRA adapters: what a merged checkpoint computes, each request its own, in whatever company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kitfox.errors import WeightsError
from kitfox.kernels.interface import Kernels
from kitfox.layers.linear import Linear
from kitfox.models import Model
from kitfox.weights.adapters import read_adapter_config, read_adapter_weights
from tests.models.tiny_models import FAMILIES, PagedRun, load_ours, random_prompt, save_checkpoint
from tests.native import native_kernels, needs_native, torch_kernels
from tests.weights.lora import merged, random_matrices, write_adapter


def linear_shapes(model: Model) -> dict[str, tuple[int, int]]:
    return {f"model.{name}": layer.shape for name, layer in model.named_modules() if isinstance(layer, Linear)}


def load_adapter(model: Model, adapter_id: int, path: Path) -> None:
    model.add_adapter(adapter_id, read_adapter_weights(path, read_adapter_config(path)))


def kernels_named(name: str) -> Kernels:
    return torch_kernels() if name == "torch" else native_kernels()


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("family", ["llama-biases", "qwen3", "gemma3"])
def test_an_adapter_is_what_its_merged_checkpoint_is(tmp_path: Path, family: str, kernels: str) -> None:
    if kernels == "native" and family == "llama-biases":
        pytest.skip("its heads are no multiple of 16 wide")
    save_checkpoint(FAMILIES[family](), tmp_path / "base")
    model = load_ours(tmp_path / "base", kernels_named(kernels))
    tensors = random_matrices(linear_shapes(model), seed=1, size=0.2)
    load_adapter(model, 1, write_adapter(tmp_path / "adapter", tensors))
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_bytes((tmp_path / "base" / "config.json").read_bytes())
    save_file(
        merged(load_file(tmp_path / "base" / "model.safetensors"), tensors), tmp_path / "merged" / "model.safetensors"
    )
    prompt = random_prompt(40)
    [with_adapter] = PagedRun(model, [prompt], adapters={0: 1}).run([{0: 17}, {0: 23}])
    [of_merged] = PagedRun(load_ours(tmp_path / "merged", kernels_named(kernels)), [prompt]).run([{0: 40}])
    [plain] = PagedRun(model, [prompt]).run([{0: 40}])
    torch.testing.assert_close(with_adapter, of_merged, atol=2e-4, rtol=1e-4)
    assert (with_adapter - plain).abs().max() > 0.1


@needs_native
def test_rows_do_not_depend_on_others_adapters(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["qwen3"](), tmp_path / "base")
    model = load_ours(tmp_path / "base", native_kernels())
    for adapter_id in (1, 2):
        tensors = random_matrices(linear_shapes(model), seed=adapter_id)
        load_adapter(model, adapter_id, write_adapter(tmp_path / str(adapter_id), tensors))
    prompts = [random_prompt(20 + 3 * seed, seed) for seed in range(4)]
    adapters = {0: 1, 2: 2, 3: 1}
    chunks = [dict.fromkeys(range(4), 5), {index: len(prompt) - 5 for index, prompt in enumerate(prompts)}]
    together = PagedRun(model, prompts, adapters=adapters).run(chunks)
    for index, prompt in enumerate(prompts):
        own = {0: adapters[index]} if index in adapters else {}
        [alone] = PagedRun(model, [prompt], adapters=own).run([{0: len(prompt)}])
        assert torch.equal(alone, together[index]), index
    [plain] = PagedRun(model, [prompts[1]], captured=True).run([{0: len(prompts[1])}])
    assert torch.equal(plain, together[1])
    model.remove_adapter(1)
    [removed] = PagedRun(model, [prompts[0]], adapters={0: 1}).run([{0: len(prompts[0])}])
    assert torch.equal(removed, PagedRun(model, [prompts[0]]).run([{0: len(prompts[0])}])[0])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"model.layers.0.mlp.gate": (80, 48)}, "changes layers.0.mlp.gate, which is no linear layer"),
        ({"model.lm_head": (101, 48)}, "changes lm_head, which is no linear layer"),
        ({"model.layers.0.mlp.up_proj": (80, 40)}, r"layers.0.mlp.up_proj is \[80, 40\], the model's \[80, 48\]"),
    ],
)
def test_adapters_of_another_model(tmp_path: Path, shapes: dict[str, tuple[int, int]], message: str) -> None:
    save_checkpoint(FAMILIES["llama"](), tmp_path / "base")
    model = load_ours(tmp_path / "base")
    fitting = {"model.layers.0.self_attn.q_proj": (48, 48)}
    path = write_adapter(tmp_path / "adapter", random_matrices(fitting | shapes, seed=1))
    with pytest.raises(WeightsError, match=message):
        load_adapter(model, 1, path)
    assert not any(layer.adapters for layer in model.modules() if isinstance(layer, Linear))
