"""Every family's logits against `transformers`, whole prompts and in chunks through a shuffled paged cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kitfox.models import Model
from tests.models.tiny_models import FAMILIES, PagedRun, gemma3, load_ours, random_prompt, save_checkpoint, their_logits
from tests.native import native_kernels, needs_native, torch_kernels

# Longer than every window (6), than Llama 3's original context (32) and than several blocks.
LENGTH = 45
# Prefill in uneven chunks mixed with another request's, then token by token, then mixed with a late chunk.
STEPS = [{0: 7}, {0: 13, 1: 5}, {0: 18}, {0: 1, 1: 1}, {1: 1, 0: 1}, {0: 1}, {0: 1, 1: 20}, {0: 3, 1: 17}, {1: 1}]
PROMPTS = [random_prompt(LENGTH, seed=1), random_prompt(LENGTH, seed=2)]


def assert_equal_to_theirs(ours: Model, expected: list[Tensor], block_size: int) -> list[Tensor]:
    """Whole prompts within rounding of theirs, and the same bits whatever the company and the chunks."""
    assert expected[0].std() > 0.1  # a comparison of zeros would prove nothing
    whole = [PagedRun(ours, [prompt], block_size).run([{0: LENGTH}])[0] for prompt in PROMPTS]
    for logits, right in zip(whole, expected, strict=True):
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, right, atol=1e-4, rtol=0)
    for logits, right in zip(PagedRun(ours, PROMPTS, block_size).run(STEPS), whole, strict=True):
        assert torch.equal(logits, right)
    return whole


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    theirs = save_checkpoint(FAMILIES[family](), tmp_path)
    assert_equal_to_theirs(load_ours(tmp_path), [their_logits(theirs, prompt) for prompt in PROMPTS], block_size=4)


@needs_native
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_compiled_kernels_equal_transformers(family: str, tmp_path: Path) -> None:
    theirs = save_checkpoint(FAMILIES[family](head_dim=16), tmp_path)
    expected = [their_logits(theirs, prompt) for prompt in PROMPTS]
    whole = assert_equal_to_theirs(load_ours(tmp_path, native_kernels()), expected, block_size=16)
    on_two = load_ours(tmp_path, native_kernels(num_threads=2))
    for logits, right in zip(PagedRun(on_two, PROMPTS).run(STEPS), whole, strict=True):
        assert torch.equal(logits, right)


def test_gemma_embedding_scale_is_rounded_to_the_models_dtype(tmp_path: Path) -> None:
    theirs = save_checkpoint(gemma3(), tmp_path)
    ours = load_ours(tmp_path, torch_kernels(torch.bfloat16))
    ids = random_prompt(9)
    exact = theirs.get_input_embeddings().weight.detach().bfloat16()[ids]
    seen: list[torch.Tensor] = []
    ours.layers[0].register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].clone()))
    PagedRun(ours, [ids]).run([{0: 9}])
    assert torch.equal(seen[0], exact * torch.tensor(48**0.5).bfloat16())
    assert not torch.equal(seen[0], (exact.float() * 48**0.5).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_half_precision_stays_near_full_precision(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = save_checkpoint(FAMILIES[family](), tmp_path)
    ours = load_ours(tmp_path, torch_kernels(dtype))
    assert {layer.weight.dtype for layer in ours.modules() if hasattr(layer, "weight")} == {dtype}
    prompt = random_prompt(LENGTH)
    logits = PagedRun(ours, [prompt]).run([{0: LENGTH}])[0]
    right = their_logits(theirs, prompt)
    assert logits.dtype == torch.float32
    assert (logits - right).std() < 0.05 * right.std()


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_half_precision_of_compiled_kernels_stays_near_full_precision(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs = save_checkpoint(FAMILIES[family](head_dim=16), tmp_path)
    prompt = random_prompt(LENGTH)
    logits = PagedRun(load_ours(tmp_path, native_kernels(dtype, torch.bfloat16)), [prompt]).run([{0: LENGTH}])[0]
    right = their_logits(theirs, prompt)
    assert 0 < (logits - right).std() < 0.05 * right.std()


@needs_native
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_int8_of_compiled_kernels_follows_the_definition(family: str, tmp_path: Path) -> None:
    theirs = save_checkpoint(FAMILIES[family](head_dim=16), tmp_path)
    prompt = random_prompt(LENGTH)
    native, defined = (
        PagedRun(load_ours(tmp_path, kernels), [prompt]).run([{0: LENGTH}])[0]
        for kernels in (native_kernels(int8=True), torch_kernels(int8=True))
    )
    right = their_logits(theirs, prompt)
    assert 0 < (native - right).std() < 0.1 * right.std()
    # Attention and norms are not the definition's bit for bit, so that now and then an activation's code is another.
    assert (native - defined).std() < 0.02 * right.std()
