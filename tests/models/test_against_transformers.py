"""Every family's logits against `transformers`, whole prompts and in chunks through a shuffled paged cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.tiny_models import FAMILIES, PagedRun, gemma3, load_ours, random_prompt, save_checkpoint, their_logits

# Longer than every window (6), than Llama 3's original context (32) and than several blocks (4).
LENGTH = 45


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    theirs = save_checkpoint(FAMILIES[family](), tmp_path)
    ours = load_ours(tmp_path)
    prompts = [random_prompt(LENGTH, seed=1), random_prompt(LENGTH, seed=2)]
    expected = [their_logits(theirs, prompt) for prompt in prompts]
    assert expected[0].std() > 0.1  # a comparison of zeros would prove nothing

    whole = [PagedRun(ours, [prompt]).run([{0: LENGTH}])[0] for prompt in prompts]
    for logits, right in zip(whole, expected, strict=True):
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, right, atol=1e-4, rtol=0)

    # Prefill in uneven chunks mixed with another request's, then token by token, then mixed with a late chunk.
    steps = [{0: 7}, {0: 13, 1: 5}, {0: 18}, {0: 1, 1: 1}, {1: 1, 0: 1}, {0: 1}, {0: 1, 1: 20}, {0: 3, 1: 17}, {1: 1}]
    chunked = PagedRun(ours, prompts).run(steps)
    for logits, right in zip(chunked, whole, strict=True):
        assert torch.equal(logits, right)  # the same bits, whatever the company and the chunks


def test_gemma_embedding_scale_is_rounded_to_the_models_dtype(tmp_path: Path) -> None:
    theirs = save_checkpoint(gemma3(), tmp_path)
    ours = load_ours(tmp_path, torch.bfloat16)
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
    ours = load_ours(tmp_path, dtype)
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype}
    prompt = random_prompt(LENGTH)
    logits = PagedRun(ours, [prompt]).run([{0: LENGTH}])[0]
    right = their_logits(theirs, prompt)
    assert logits.dtype == torch.float32
    assert (logits - right).std() < 0.05 * right.std()
