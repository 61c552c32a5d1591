"""The door: what is refused there, and what a checked request looks like."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kitfox.constraint import Constraint, Regex
from kitfox.engine.input_processor import EngineLimits, InputProcessor
from kitfox.errors import ContextLengthError, InvalidParameterError
from kitfox.request import RepetitionDetection, SamplingParams
from tests.test_tokenizer import sentencepiece_gguf


class WordTokenizer:
    """A token is a number, a space before it adds fifty."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        words = text.split(" ")
        return [int(word) + 50 * (i > 0) for i, word in enumerate(words) if word.strip()]


LIMITS = EngineLimits(vocab_size=100, max_model_len=32, capacity_tokens=64, max_logprobs=5, eos_token_ids=(2, 3))


def process(prompt: list[int], **sampling: object):
    return InputProcessor(LIMITS, WordTokenizer()).process(prompt, SamplingParams(**sampling), request_id="r")


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
        InputProcessor(limits, WordTokenizer()).process([5] * 10, SamplingParams(max_tokens=10), request_id="r")


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
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprob_token_ids": (100,), "logprobs": 0}, "logprob_token_ids"),
        ({"allowed_token_ids": (1, 100)}, "allowed_token_ids"),
        ({"stop_regex": ("(",)}, "stop_regex"),
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
        ({"logprobs": -2}, "logprobs"),
        ({"stop_regex": ("x",) * 33}, "stop_regex"),
        ({"stop_regex": ("x" * 257,)}, "stop_regex"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words": ("x",) * 257}, "bad_words"),
        ({"bad_words": ("x" * 129,)}, "bad_words"),
        ({"allowed_token_ids": (1,) * 16385}, "allowed_token_ids"),
        ({"logprob_token_ids": (1,) * 129, "logprobs": 0}, "logprob_token_ids"),
        ({"logprob_token_ids": (1,)}, "logprob_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"stream_interval": 0}, "stream_interval"),
    ],
)
def test_what_sampling_params_refuse_by_themselves(sampling: dict, param: str):
    with pytest.raises(InvalidParameterError) as refused:
        SamplingParams(**sampling)
    assert refused.value.param == param
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_pattern_size": 0},
        {"max_pattern_size": 257},
        {"max_pattern_size": 2, "min_pattern_size": 3},
        {"max_pattern_size": 2, "min_pattern_size": 0},
        {"max_pattern_size": 2, "min_count": 1},
    ],
)
def test_repetition_detection_refuses_by_itself(sizes: dict):
    with pytest.raises(InvalidParameterError) as refused:
        RepetitionDetection(**sizes)
    assert refused.value.param == "repetition_detection"


def test_minus_one_logprobs_are_the_whole_vocabulary_where_that_is_allowed():
    limits = EngineLimits(vocab_size=100, max_model_len=10**6, capacity_tokens=10**6, max_logprobs=-1, eos_token_ids=())
    door = InputProcessor(limits, WordTokenizer())
    asked = SamplingParams(logprobs=-1, prompt_logprobs=-1, max_tokens=10)
    (request,) = door.process([5] * 10, asked, request_id="r")
    assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (100, 100)
    for prompt, sampling in (
        ([5] * 40_000, SamplingParams(prompt_logprobs=-1)),
        ([5], SamplingParams(logprobs=-1, max_tokens=40_000)),
        ([5], SamplingParams(logprobs=-1, max_tokens=1000, n=40)),
    ):
        with pytest.raises(InvalidParameterError, match="must be <= 4000000"):
            door.process(prompt, sampling, request_id="r")
    assert door.process([5], SamplingParams(logprobs=20, max_tokens=500_000, n=8), request_id="r")


def test_a_bad_word_is_forbidden_with_a_space_before_it_and_without():
    (request,) = process([1], bad_words=("7 8", "9"), bad_token_sequences=((4, 5), (9,)))
    assert request.sampling.bad_token_sequences == ((4, 5), (9,), (7, 58), (57, 58), (59,))


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_a_bad_word_inside_an_answer_has_no_space_that_only_a_first_word_has(tmp_path: Path, add_space_prefix: bool):
    tokenizer = sentencepiece_gguf(tmp_path / "t.gguf", add_space_prefix=add_space_prefix)
    limits = EngineLimits(tokenizer.vocab_size, 32, 64, 5, ())
    (request,) = InputProcessor(limits, tokenizer).process([1], SamplingParams(bad_words=("fox",)), request_id="r")
    spelled = [[tokenizer.token_text(i) for i in ids] for ids in request.sampling.bad_token_sequences]
    assert spelled == [["fox"], [" fox"]]


def test_truncation():
    prompt = list(range(40))
    assert process(prompt, truncate_prompt_tokens=3, max_tokens=1)[0].prompt_token_ids == [37, 38, 39]
    right = process(prompt, truncate_prompt_tokens=3, truncation_side="right", max_tokens=1)
    assert right[0].prompt_token_ids == [0, 1, 2]
    assert process(prompt, truncate_prompt_tokens=-1, max_tokens=10)[0].prompt_token_ids == prompt[-22:]
    assert process(prompt, truncate_prompt_tokens=-1, max_tokens=None)[0].prompt_token_ids == prompt[-31:]
    assert process([1], truncate_prompt_tokens=3, max_tokens=1)[0].prompt_token_ids == [1]
    with pytest.raises(ContextLengthError):
        process(prompt, truncate_prompt_tokens=35, max_tokens=1)


def test_the_default_of_max_tokens_is_a_cap_not_a_demand():
    limits = EngineLimits(100, 32, 64, 5, (2, 3), default_max_tokens=20)
    door = InputProcessor(limits, WordTokenizer())
    lengths = [door.process([5] * n, SamplingParams(max_tokens=None), request_id="r") for n in (1, 20)]
    assert [made[0].sampling.max_tokens for made in lengths] == [20, 12]
    assert door.process([5], SamplingParams(max_tokens=30), request_id="r")[0].sampling.max_tokens == 30


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


def test_a_format_is_packed_once_for_all_answers():
    """The engine hands it on to the compiler unread: a large schema would hold up its steps."""
    regex = Regex(pattern="[0-9]+")
    requests = process([1], n=2, constraint=Constraint(format=regex, param="regex"))
    formats = [request.sampling.constraint.format for request in requests]
    assert formats[0] is formats[1]
    assert formats[0] == msgspec.msgpack.encode(regex) == requests[0].sampling.constraint.packed_format
    assert requests[0].sampling.constraint.param == "regex"
