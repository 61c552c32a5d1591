"""The law: the same prompt gives the same tokens, whatever the cache, the company, the chunking or the pool.

In fp32 on the default model, greedy. What is compared are token ids, so one different rounding anywhere that flips an
argmax fails the test.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kitfox import LLM, SamplingParams
from tests.e2e.prompts import CHAT, PROMPTS

pytestmark = pytest.mark.model
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
GREEDY_REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "peers" / "greedy_reference.json"


def make_llm(**options: object) -> LLM:
    return LLM("smollm2-135m", **{"dtype": "float32", "max_model_len": 512, "num_blocks": 256, **options})


def tokens(llm: LLM, prompts: list, sampling: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, sampling, use_tqdm=False)]


@pytest.fixture(scope="module")
def encoded() -> list[list[int]]:
    llm = make_llm(num_blocks=32, max_num_seqs=1)
    chat = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in CHAT]
    return chat + [llm.tokenizer.encode(text) for text in PROMPTS[len(CHAT) :]]


@pytest.fixture(scope="module")
def alone_and_cold(encoded: list[list[int]]) -> list[list[int]]:
    return tokens(make_llm(cache="none", max_num_seqs=1), encoded)


@pytest.mark.parametrize("cache", ["paged", "radix", "none"])
def test_eight_at_a_time_cold_then_warm(cache: str, encoded: list[list[int]], alone_and_cold: list[list[int]]):
    llm = make_llm(cache=cache, max_num_seqs=8)
    assert tokens(llm, encoded) == alone_and_cold
    assert tokens(llm, encoded) == alone_and_cold
    llm._client.core.scheduler.kv_cache.check_integrity()


@pytest.mark.parametrize("budget", [16, 2048])
def test_any_chunk_budget(budget: int, encoded: list[list[int]], alone_and_cold: list[list[int]]):
    llm = make_llm(cache="radix", max_num_seqs=8, max_num_batched_tokens=budget)
    assert tokens(llm, encoded) == alone_and_cold


@pytest.mark.parametrize("cache", ["paged", "radix"])
def test_a_pool_so_small_that_requests_are_preempted(
    cache: str, encoded: list[list[int]], alone_and_cold: list[list[int]]
):
    llm = make_llm(cache=cache, max_num_seqs=8, block_size=16, num_blocks=16, max_model_len=256)
    assert tokens(llm, encoded) == alone_and_cold
    assert llm.stats.num_preemptions > 0
    assert llm.stats.num_free_blocks == 16


def test_a_seeded_request_is_the_same_in_any_company(encoded: list[list[int]]):
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=1234, max_tokens=12, ignore_eos=True)
    alone = tokens(make_llm(max_num_seqs=1), encoded[:4], sampling)
    unseeded = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    llm = make_llm(max_num_seqs=8, cache="radix")
    mixed = llm.generate(encoded[:8], [sampling] * 4 + [unseeded] * 4, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in mixed[:4]] == alone
    assert tokens(make_llm(max_num_seqs=8, max_num_batched_tokens=16), encoded[:4], sampling) == alone


@pytest.mark.skipif(not GREEDY_REFERENCE.exists(), reason="the reference answers are not here")
def test_the_answers_are_those_of_transformers():
    references = [r for r in json.loads(GREEDY_REFERENCE.read_text()) if r["dtype"] == "torch.float32"]
    llm = make_llm(max_num_seqs=4)
    sampling = SamplingParams(temperature=0, max_tokens=max(len(r["out_ids"]) for r in references))
    got = tokens(llm, [r["prompt_ids"] for r in references], sampling)
    assert got == [r["out_ids"] for r in references]
