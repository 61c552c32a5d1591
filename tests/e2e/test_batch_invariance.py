"""The law in bits: a token's log-probability is the same number in any company, chunking, cache state, thread count.

On the default model with compiled kernels, for each form of its weights. `test_same_tokens` has the tokens of more
prompts; a log-probability shows a rounding that no argmax does.
"""

from __future__ import annotations

from typing import Any

import pytest

from kitfox import LLM, SamplingParams
from kitfox.executor.executor import Executor
from kitfox.plan import NATIVE_TILE_ROWS
from tests.e2e.prompts import CHAT, CJK, CODE, DIGITS, EMOJI, PROMPTS
from tests.native import needs_native

pytestmark = [pytest.mark.model, pytest.mark.slow, needs_native]
# The last is longer than a tile of rows, and with the others several chunks in any case.
TEXTS = [CHAT[0], CODE[7], DIGITS[4], CJK[3], EMOJI[1], "\n".join(PROMPTS[22:0:-1])]
FORMS: dict[str, dict[str, Any]] = {
    "stored": {},
    "int8": {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
}
WAYS: dict[str, dict[str, Any]] = {
    "small chunks on one thread": {"max_num_batched_tokens": 16, "num_threads": 1, "cache": "radix"},
    "large chunks on two threads": {"max_num_batched_tokens": 2048, "num_threads": 2, "cache": "paged"},
    "eager steps on two threads": {"enforce_eager": True, "num_threads": 2, "cache": "radix"},
}
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
PLAIN = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)  # takes the largest logit and keeps none
WHOLE_PROMPT = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)


def make_llm(**options: Any) -> LLM:
    return LLM("smollm2-135m", max_model_len=512, num_blocks=64, **options)


def executor_of(llm: LLM) -> Executor:
    return llm._client.core.executor


def answers(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> list[tuple]:
    """Tokens and log-probabilities, of outputs and of prompts where they were asked for, as exact numbers."""
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


@pytest.mark.parametrize("form", FORMS)
def test_log_probabilities_have_the_same_bits_in_every_way_to_compute_them(form: str) -> None:
    options = FORMS[form]
    alone = make_llm(cache="none", max_num_seqs=1, num_threads=1, **options)
    assert executor_of(alone).runner.description == "captured steps"
    prompts = [alone.tokenizer.encode(text) for text in TEXTS]
    assert NATIVE_TILE_ROWS < len(prompts[-1]) < 500
    expected = [answers(alone, [prompt], GREEDY)[0] for prompt in prompts]
    expected_prompt = answers(alone, prompts[-2:], WHOLE_PROMPT)
    assert all(len(logprobs) == 5 for _, logprobs, _ in expected)
    for way, changes in WAYS.items():
        together = make_llm(max_num_seqs=6, **{**options, **changes})
        captured = "eager" if "eager" in way else "captured"
        assert executor_of(together).runner.description == f"{captured} steps"
        assert answers(together, prompts, GREEDY) == expected, f"{way}, cold"
        assert together.stats.prefix_hits == 0
        assert answers(together, prompts, GREEDY) == expected, f"{way}, warm"
        assert together.stats.prefix_hits > 256
        plain = [token_ids for token_ids, _, _ in answers(together, prompts, PLAIN)]
        assert plain == [token_ids for token_ids, _, _ in expected], f"{way}, tokens only"
        assert answers(together, prompts[-2:], WHOLE_PROMPT) == expected_prompt, f"{way}, prompts"
