"""LoRA adapters on the default model: caches, company, guesses, and coming and going."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kitfox import LLM, SamplingParams
from kitfox.errors import InvalidParameterError, WeightsError
from tests.weights.lora import random_matrices, write_adapter

pytestmark = pytest.mark.model

PROMPT = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep in its den until the night. " * 3
LAYERS = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(30)
    for name, shape in (
        ("self_attn.q_proj", (576, 576)),
        ("self_attn.v_proj", (192, 576)),
        ("mlp.up_proj", (1536, 576)),
    )
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(seed), random_matrices(LAYERS, seed, size=0.3)) for seed in range(2)]


def make_llm(adapters: list[Path], **options: Any) -> LLM:
    llm = LLM("smollm2-135m", **{"max_model_len": 512, "num_blocks": 64, **options})
    for index, path in enumerate(adapters):
        llm.load_adapter(f"fox-{index}", path)
    return llm


def greedy(llm: LLM, adapter: str | None, prompt: str = PROMPT) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    [output] = llm.generate([prompt], sampling, use_tqdm=False, adapter=adapter)
    return output.outputs[0].token_ids


@pytest.mark.parametrize("cache", ["paged", "radix"])
def test_each_name_has_its_own_answers_and_its_own_cache(adapters: list[Path], cache: str) -> None:
    llm = make_llm(adapters, cache=cache)
    names = [None, "fox-0", "fox-1"]
    answers = [greedy(llm, name) for name in names]
    assert len(set(map(tuple, answers))) == 3
    assert answers == [greedy(llm, name) for name in names]  # from the cache, each from its own part
    sampling = SamplingParams(temperature=0, max_tokens=1)
    for name in names:
        [known] = llm.generate([PROMPT], sampling, use_tqdm=False, adapter=name)
        assert known.num_cached_tokens is not None
        assert known.num_cached_tokens > 32
    fresh = LLM("smollm2-135m", max_model_len=512, num_blocks=64, cache=cache)
    assert greedy(fresh, None) == answers[0]


def test_answers_are_the_same_in_company_with_guesses_and_after_preemption(adapters: list[Path]) -> None:
    llm = make_llm(adapters)
    names = [None, "fox-0", "fox-1"]
    alone = {name: greedy(llm, name) for name in names}
    for options in ({}, {"speculation": "ngram", "adaptive": False}, {"block_size": 16, "num_blocks": 34}):
        crowd = make_llm(adapters, **options)
        core = crowd._client.core
        sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        tokens = crowd.tokenizer.encode(PROMPT)
        for index, name in enumerate(names * 2):
            adapter_id = 0 if name is None else crowd._adapters[name]
            [request] = crowd._input_processor.process(
                tokens, sampling, request_id=str(index), adapter_id=adapter_id, cache_salt=f"salt {index}"
            )
            core.add_request(request)
        answers: dict[str, list[int]] = {}
        while core.has_work:
            for output in core.step().outputs:
                answers.setdefault(output.request_id, []).extend(output.new_token_ids)
        assert [answers[str(index)] for index in range(6)] == [alone[name] for name in names * 2], options
        assert (core.scheduler.num_preemptions > 0) == ("num_blocks" in options)


def test_a_salt_is_never_that_of_an_adapter(adapters: list[Path]) -> None:
    llm = make_llm(adapters)
    greedy(llm, "fox-0")
    with pytest.raises(InvalidParameterError, match="must not begin with NUL"):
        llm.generate([PROMPT], SamplingParams(max_tokens=1), use_tqdm=False, cache_salt="\0" + "1\0")


def test_one_of_the_same_name_is_another_one(adapters: list[Path]) -> None:
    llm = make_llm(adapters)
    first, second = greedy(llm, "fox-0"), greedy(llm, "fox-1")
    llm.unload_adapter("fox-0")
    with pytest.raises(InvalidParameterError, match="must be one that is loaded"):
        greedy(llm, "fox-0")
    llm.load_adapter("fox-0", adapters[1])
    assert greedy(llm, "fox-0") == second != first
    with pytest.raises(InvalidParameterError, match="must not be that of another adapter"):
        llm.load_adapter("fox-0", adapters[0])


def test_an_adapter_stays_while_it_is_used(adapters: list[Path]) -> None:
    llm = make_llm(adapters)
    wanted = greedy(llm, "fox-0")
    core = llm._client.core
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    [request] = llm._input_processor.process(
        llm.tokenizer.encode(PROMPT), sampling, request_id="runs", adapter_id=llm._adapters["fox-0"], cache_salt="own"
    )
    core.add_request(request)
    outputs = core.step().outputs
    llm.unload_adapter("fox-0")
    while core.has_work:
        outputs += core.step().outputs
    tokens = [token for output in outputs for token in output.new_token_ids]
    assert tokens == wanted
    linear = core.executor.model.layers[0].mlp.up_proj  # type: ignore[attr-defined]
    assert sorted(linear.adapters) == [2]


def test_no_more_adapters_in_a_step_than_there_may_be(adapters: list[Path]) -> None:
    llm = make_llm(adapters, max_running_adapters=1)
    core = llm._client.core
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for index, adapter_id in enumerate((1, 2, 0, 1)):
        [request] = llm._input_processor.process([5, 6, 7], sampling, request_id=str(index), adapter_id=adapter_id)
        core.add_request(request)
    core.step()
    core.step()
    assert [request.request_id for request in core.scheduler.running] == ["0", "2", "3"]
    while core.has_work:
        core.step()
    assert not core.scheduler.requests


def test_ranks_above_the_limit(adapters: list[Path]) -> None:
    llm = make_llm([], max_rank=2)
    with pytest.raises(WeightsError, match=r"rank must be <= 2 \(--max-lora-rank\). Given: 4"):
        llm.load_adapter("fox", adapters[0])
