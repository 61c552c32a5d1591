"""The law, with grammars: a constrained answer has the same tokens in any company, chunking, cache and preemption.

On the default model. Jumping forward is part of it: which tokens are forced depends on the answer alone.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from kitfox import LLM, SamplingParams
from kitfox.constraint import Constraint, Format, JsonSchema, Reasoning, Regex, choice
from kitfox.errors import RequestError
from kitfox.outputs import RequestOutput

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "full_legal_name": {"type": "string", "maxLength": 12},
        "years_since_birth": {"type": "integer", "minimum": 0, "maximum": 150},
        "favourite_colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
        "is_currently_employed": {"type": "boolean"},
    },
    "required": ["full_legal_name", "years_since_birth", "favourite_colours", "is_currently_employed"],
    "additionalProperties": False,
}
FORMATS: dict[str, Format] = {
    "schema": JsonSchema(schema=PERSON),
    "compact": JsonSchema(schema=PERSON, max_whitespace=0),
    "regex": Regex(pattern=r"The fox is (red|grey) and [0-9]{2,4} years old\."),
    "choice": choice(["quick brown fox", "quick brown dog", "quiet"]),
    "digits": Regex(pattern="[0-9]+"),
}
LONG = "The quick brown fox jumps over the lazy dog. " * 12
CASES = [("Describe Alice as JSON:", name) for name in FORMATS] + [(LONG, "schema"), ("A", "regex"), ("A", "digits")]


def make_llm(**options: Any) -> LLM:
    return LLM("smollm2-135m", **{"max_model_len": 512, "num_blocks": 256, **options})


def sampling_of(name: str, **fields: Any) -> SamplingParams:
    values = {"temperature": 0.0, "max_tokens": 64, **fields}
    return SamplingParams(constraint=Constraint(format=FORMATS[name]), **values)


def answers(llm: LLM, cases: list[tuple[str, str]], **fields: Any) -> list[RequestOutput]:
    prompts = [prompt for prompt, _ in cases]
    return llm.generate(prompts, [sampling_of(name, **fields) for _, name in cases], use_tqdm=False)


def tokens(llm: LLM, **fields: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in answers(llm, CASES, **fields)]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return tokens(make_llm(cache="none", max_num_seqs=1))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(max_num_seqs=8)


@pytest.mark.parametrize("cache", ["paged", "radix"])
@pytest.mark.parametrize("budget", [16, 2048])
def test_any_cache_and_chunking_cold_then_warm(cache: str, budget: int, plain: list[list[int]]):
    llm = make_llm(cache=cache, max_num_seqs=8, max_num_batched_tokens=budget)
    assert tokens(llm) == plain
    assert tokens(llm) == plain
    assert llm.stats.grammars.num_forced_tokens > 0
    assert llm.stats.prefix_hits > 0


@pytest.mark.parametrize("cache", ["paged", "radix"])
def test_preemption(cache: str, plain: list[list[int]]):
    llm = make_llm(cache=cache, max_num_seqs=8, block_size=16, num_blocks=14, max_model_len=200)
    assert tokens(llm) == plain
    assert tokens(llm) == plain  # all at once, for no grammar has to be compiled first
    assert llm.stats.num_preemptions > 0
    llm._client.core.scheduler.kv_cache.check_integrity()


@pytest.mark.parametrize("budget", [16, 2048])
def test_log_probabilities_of_every_token_and_the_same_tokens(budget: int, plain: list[list[int]]):
    llm = make_llm(max_num_seqs=8, max_num_batched_tokens=budget)
    outputs = answers(llm, CASES, logprobs=1)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert llm.stats.grammars.num_forced_tokens > 0
    for output in outputs:
        answer = output.outputs[0]
        assert [entry.token_id for entry in answer.logprobs or []] == answer.token_ids
    # Those of a prompt that holds the answer are the same numbers.
    prompt, answer = outputs[0].prompt_token_ids, outputs[0].outputs[0]
    whole = llm.generate(
        [[*prompt, *answer.token_ids]], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False
    )[0]
    assert (whole.prompt_logprobs or [])[len(prompt) :] == answer.logprobs


def test_log_probabilities_survive_preemption(plain: list[list[int]]):
    llm = make_llm(cache="radix", max_num_seqs=8, block_size=16, num_blocks=14, max_model_len=200)
    tokens(llm)  # compiles the grammars, so that all begin at once
    outputs = answers(llm, CASES, logprobs=0)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert llm.stats.num_preemptions > 0
    for output in outputs:
        assert [entry.token_id for entry in output.outputs[0].logprobs or []] == output.outputs[0].token_ids


def test_seeded_answers_are_what_each_would_be_alone(llm: LLM):
    together = answers(llm, CASES[:4], temperature=1.0, seed=5, n=3)
    for (prompt, name), output in zip(CASES[:4], together, strict=True):
        assert len(output.outputs) == 3
        for index, answer in enumerate(output.outputs):
            sampling = sampling_of(name, temperature=1.0, seed=5 + index)
            alone = llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0]
            assert (alone.token_ids, alone.text) == (answer.token_ids, answer.text)


def test_what_ends_with_stop_is_valid_and_the_rest_says_length(llm: LLM):
    for (_, name), output in zip(CASES, answers(llm, CASES, temperature=1.0, seed=3), strict=True):
        answer = output.outputs[0]
        if name in ("schema", "compact") and answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), PERSON)
            assert name == "schema" or answer.text == json.dumps(json.loads(answer.text), separators=(",", ":"))
        if name == "choice":
            assert answer.text in ("quick brown fox", "quick brown dog", "quiet")
            assert answer.finish_reason == "stop"
    short = answers(llm, CASES[:1], max_tokens=5)[0].outputs[0]
    assert (short.finish_reason, len(short.token_ids)) == ("length", 5)


def test_without_jumping_forward_every_token_is_sampled():
    llm = make_llm(jump_forward=False)
    output = answers(llm, CASES[:1], max_tokens=128)[0].outputs[0]
    jsonschema.validate(json.loads(output.text), PERSON)
    assert llm.stats.grammars.num_forced_tokens == 0
    assert llm.stats.grammars.num_masks == len(output.token_ids)


def test_forced_text_costs_no_steps(llm: LLM):
    text = "The quick brown fox jumps over the lazy dog and back again."
    sampling = SamplingParams(constraint=Constraint(format=choice([text])), max_tokens=64)
    first = llm.stats.step
    output = llm.generate("Say it:", sampling, use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason) == (text, "stop")
    assert output.token_ids == llm.tokenizer.encode(text)
    assert llm.stats.step - first <= 2


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 20},
        {"stop": ('":',)},
        {"stop": ("e",)},
        {"stop_token_ids": tuple(range(30, 60))},
        {"logit_bias": {2: 100.0, 0: 100.0}},
        {"ignore_eos": True},
        {"stop_regex": ("[a-z]+",)},
    ],
    ids=str,
)
def test_nothing_cuts_a_structure_in_the_middle(llm: LLM, fields: dict[str, Any]):
    sampling = SamplingParams(
        constraint=Constraint(
            format=JsonSchema(
                schema={
                    "type": "object",
                    "properties": {"ok": {"type": "boolean"}},
                    "required": ["ok"],
                    "additionalProperties": False,
                }
            )
        ),
        temperature=0,
        max_tokens=64,
        **fields,
    )
    output = llm.generate("Is it?", sampling, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "stop"
    assert json.loads(output.text)["ok"] in (True, False)


def test_it_ends_when_it_must_and_not_when_it_may(llm: LLM):
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    eos = dict.fromkeys(llm.tokenizer.eos_token_ids, -100.0)
    digits = SamplingParams(constraint=Constraint(format=Regex(pattern="[0-9]+")), logit_bias=eos, **fields)
    output = llm.generate("Count: 1", digits, use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 12)
    pattern = SamplingParams(constraint=Constraint(format=choice(["a", "ab"])), logit_bias=eos, **fields)
    output = llm.generate("abc", pattern, use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, output.text) == ("stop", "ab")


def test_reasoning_comes_first(llm: LLM):
    reasoning = Reasoning(opener="<think>", closer="</think>", is_open=True)
    constraint = Constraint(format=choice(["yes", "no"]), reasoning=reasoning)
    # A prompt that makes the model repeat the closer is a matter of luck; a bias is not.
    closer = llm.tokenizer.encode("</think>")
    sampling = SamplingParams(constraint=constraint, temperature=0, max_tokens=40)
    output = llm.generate("<think> Say </think> at once: </think> </think> </think>", sampling, use_tqdm=False)[0]
    text = output.outputs[0].text
    if "</think>" in text:
        assert text.partition("</think>")[2].strip() in ("yes", "no")
        assert output.outputs[0].finish_reason == "stop"
    else:
        assert output.outputs[0].finish_reason == "length"
    assert closer


def test_a_grammar_that_cannot_be_compiled_ends_its_own_request_only(llm: LLM):
    bad = SamplingParams(constraint=Constraint(format=Regex(pattern="(?<=a)b"), param="structured_outputs.regex"))
    with pytest.raises(RequestError, match=r"structured_outputs\.regex") as refusal:
        llm.generate(["a", "b"], [bad, sampling_of("choice")], use_tqdm=False)
    assert refusal.value.param == "structured_outputs.regex"
    assert llm.generate("b", sampling_of("choice"), use_tqdm=False)[0].outputs[0].finish_reason == "stop"
