"""The real models' greedy tokens against transformers, which reads the same GGUF files with code of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kitfox import LLM, SamplingParams
from kitfox.weights.hub import list_models, resolve_model
from tests.e2e.prompts import CODE, EMOJI, PROMPTS

DOZEN = [*PROMPTS[::5], *CODE[1:3], *EMOJI[1:3]]
NUM_TOKENS = 10
pytestmark = [pytest.mark.model, pytest.mark.slow]


def greedy_by_transformers(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    answers = []
    with torch.inference_mode():
        for token_ids in prompts:
            output = model.generate(
                torch.tensor([token_ids]),
                attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                eos_token_id=-1,
            )
            answers.append(output[0, len(token_ids) :].tolist())
    return answers


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-3-270m"])
def test_a_dozen_prompts(name: str):
    if name != "smollm2-135m" and not any(model.name == name and model.is_cached for model in list_models()):
        pytest.skip(f"{name} is not in the cache: kitfox pull {name}")
    llm = LLM(name, dtype="float32", max_model_len=256, num_blocks=64, max_num_seqs=4)
    prompts = [llm.tokenizer.encode(text) for text in DOZEN]
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    ours = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling, use_tqdm=False)]
    assert len(ours) == 12
    assert ours == greedy_by_transformers(resolve_model(name).path, prompts)
