"""The door: what is refused there, and what a checked request looks like."""

from __future__ import annotations

import pytest

from kitfox.engine.input_processor import EngineLimits, InputProcessor
from kitfox.errors import ContextLengthError, InvalidParameterError
from kitfox.request import SamplingParams

LIMITS = EngineLimits(vocab_size=100, max_model_len=32, capacity_tokens=64, max_logprobs=5, eos_token_ids=(2, 3))


def process(prompt: list[int], **sampling: object):
    return InputProcessor(LIMITS).process(prompt, SamplingParams(**sampling), request_id="r")


def test_max_tokens_defaults_to_what_the_context_leaves():
    assert process([5] * 20, max_tokens=None)[0].sampling.max_tokens == 12


def test_an_exact_fit_is_accepted_and_one_more_token_is_not():
    assert process([5] * 20, max_tokens=12)[0].sampling.max_tokens == 12
    with pytest.raises(ContextLengthError, match=r"32 tokens.*20 prompt tokens plus max_tokens 13, together 33"):
        process([5] * 20, max_tokens=13)


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_that_leaves_no_room_is_refused(max_tokens: int | None):
    with pytest.raises(ContextLengthError) as refused:
        process([5] * 32, max_tokens=max_tokens)
    assert refused.value.status == 400
    assert refused.value.code == "context_length_exceeded"


def test_prompt_only_may_fill_the_context():
    assert process([5] * 32, max_tokens=0)[0].sampling.max_tokens == 0


def test_a_small_pool_is_named_as_the_limit():
    limits = EngineLimits(vocab_size=100, max_model_len=32, capacity_tokens=16, max_logprobs=5, eos_token_ids=())
    with pytest.raises(ContextLengthError, match="KV cache holds 16"):
        InputProcessor(limits).process([5] * 10, SamplingParams(max_tokens=10), request_id="r")


@pytest.mark.parametrize("wrong", [-1, 100, 10**18])
def test_token_ids_outside_the_vocabulary(wrong: int):
    with pytest.raises(InvalidParameterError, match=r"\[0, 99\]"):
        process([1, wrong])
    assert process([99])


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (101,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
    ],
)
def test_what_needs_the_model_to_be_checked(sampling: dict, param: str):
    with pytest.raises(InvalidParameterError) as refused:
        process([1], **sampling)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 2.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"logit_bias": {1: 1e9}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "logit_bias"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop_token_ids": (1,) * 2000}, "stop_token_ids"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_what_sampling_params_refuse_by_themselves(sampling: dict, param: str):
    with pytest.raises(InvalidParameterError) as refused:
        SamplingParams(**sampling)
    assert refused.value.param == param
    assert refused.value.status == 400


def test_several_answers_share_the_prompt_and_differ_in_seed():
    first, second, third = process([1, 2], n=3, seed=42, prompt_logprobs=1)
    assert [r.request_id for r in (first, second, third)] == ["r", "r#1", "r#2"]
    assert [r.leader_id for r in (first, second, third)] == [None, "r", "r"]
    assert [r.sampling.seed for r in (first, second, third)] == [42, 43, 44]
    assert [r.sampling.prompt_logprobs for r in (first, second, third)] == [1, None, None]
    assert first.sampling.n == 1


def test_eos_stops_unless_ignored_and_own_stop_tokens_always_do():
    assert process([1], stop_token_ids=(7, 2))[0].stop_token_ids == (2, 3, 7)
    assert process([1], stop_token_ids=(7,), ignore_eos=True)[0].stop_token_ids == (7,)


def test_the_largest_seed_has_a_next_one():
    assert process([1], n=2, seed=2**63 - 1)[1].sampling.seed == -(2**63)
