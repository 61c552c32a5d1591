"""Masks of a grammar: what they leave is all that the rest of sampling sees, with the library and without it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kitfox.request import SamplingParams
from kitfox.sampling import NativeSampler, Sampler, SamplingRow
from kitfox.sampling.native_sampler import SAMPLE_ROW, row_addresses
from kitfox.sampling.sampler import Words, _adjust
from tests.native import INSTRUCTION_SETS, native_kernels
from tests.sampling.test_native_sampler import FILTERS, TEMPERATURES, VOCAB_SIZES, explains, make_logits
from tests.sampling.test_sampler import LOGITS, assert_follows, draw, filtered, make_row, sample_one


def as_words(is_allowed: npt.NDArray[np.bool_], padding: int = 0) -> Words:
    """[..., V] to [..., ceil(V / 32)]; `padding` is 1 where the bits past V shall be set."""
    widths = [(0, 0)] * (is_allowed.ndim - 1) + [(0, -is_allowed.shape[-1] % 32)]
    bits = np.pad(is_allowed, widths, constant_values=bool(padding))
    return np.packbits(bits, axis=-1, bitorder="little").view(np.int32)


def only(ids: Iterable[int], vocab_size: int = len(LOGITS), padding: int = 0) -> Words:
    is_allowed = np.zeros(vocab_size, np.bool_)
    is_allowed[list(ids)] = True
    return as_words(is_allowed, padding)


def masked(logits: Tensor, is_allowed: npt.NDArray[np.bool_]) -> Tensor:
    return logits.masked_fill(~torch.from_numpy(is_allowed), -torch.inf)


def test_the_first_bit_is_the_lowest() -> None:
    assert only([0, 33, 63], 64).tolist() == [1, 2 - 2**31]


def test_greedy_takes_the_largest_that_is_allowed_and_of_equal_ones_the_first(sampler: Sampler) -> None:
    assert sample_one(sampler, LOGITS, make_row(allowed=only([0, 3, 5]))) == 3
    assert sample_one(sampler, [7.0, 7.0, 3.0, 3.0, 1.0], make_row(allowed=only([2, 3, 4], 5))) == 2
    assert sample_one(sampler, LOGITS, make_row(allowed=only(range(8)))) == 1


@pytest.mark.parametrize("options", [{"temperature": 0.0}, *({"temperature": 1.5} | options for options in FILTERS)])
def test_one_token_is_chosen_whatever_its_logit_and_an_empty_mask_leaves_none(
    sampler: Sampler, options: dict[str, Any]
) -> None:
    vocab_size = 700
    logits = make_logits("plain", 6, vocab_size)
    logits[:, [0, 31, 300, 699]] = -40.0
    rows = [make_row(position=i, allowed=only([i], vocab_size), **options) for i in (0, 31, 300, 699)]
    rows.insert(2, make_row(allowed=only([], vocab_size), **options))
    rows.append(make_row(allowed=only([], vocab_size, padding=1), **options))
    assert sampler.sample(logits, rows)[0] == [0, 31, None, 300, 699, None]


def test_an_allowed_token_that_the_model_rules_out_is_none(sampler: Sampler) -> None:
    logits = LOGITS.index_fill(0, torch.tensor([2, 3]), -torch.inf)
    for options in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}):
        assert sample_one(sampler, logits, make_row(allowed=only([2, 3]), **options)) is None
        assert sample_one(sampler, logits, make_row(allowed=only([2, 5]), **options)) == 5


@pytest.mark.parametrize("vocab_size", [1, 8, 31, 33, 500])
def test_bits_past_the_vocabulary_count_for_nothing(sampler: Sampler, vocab_size: int) -> None:
    logits = make_logits("plain", 1, vocab_size)
    is_allowed = np.arange(vocab_size) % 3 == 0
    for options in ({"temperature": 0.0}, *({"temperature": 2.0} | options for options in FILTERS)):
        rows = [make_row(allowed=as_words(is_allowed, padding), seed_key=4, **options) for padding in (0, 1)]
        tokens, _ = sampler.sample(logits.expand(2, -1), rows)
        assert tokens[0] == tokens[1]
        assert tokens[0] is not None
        assert is_allowed[tokens[0]]


def test_a_token_needs_the_consent_of_all(sampler: Sampler) -> None:
    # In the order of their logits: 1, 4, 3, 7, 0, 2, 6, 5.
    allowed = {"allowed": only([1, 4, 3, 0])}
    assert sample_one(sampler, LOGITS, make_row(logit_bias={5: 100.0}, **allowed)) == 1
    assert sample_one(sampler, LOGITS, make_row(logit_bias={0: 100.0}, **allowed)) == 0
    assert sample_one(sampler, LOGITS, make_row(allowed_token_ids=(7, 0, 3), **allowed)) == 3
    assert sample_one(sampler, LOGITS, make_row(bad_token_sequences=((1,), (4,)), **allowed)) == 3
    assert sample_one(sampler, LOGITS, make_row(stop=(1, 4), min_tokens=1, **allowed)) == 3
    assert sample_one(sampler, LOGITS, make_row(allowed_token_ids=(7, 2), **allowed)) is None
    assert sample_one(sampler, LOGITS, make_row(stop=(1, 4, 3, 0), min_tokens=1, **allowed)) is None
    both = {"allowed_token_ids": (0, 4, 7), "bad_token_sequences": ((4,),), **allowed}
    assert draw(sampler, LOGITS, 50, temperature=3.0, **both) == {0: 50}


def test_temperature_and_filters_see_what_is_left(sampler: Sampler) -> None:
    allowed = only([3, 7, 0, 5])
    for options, kept in [
        ({}, [3, 7, 0, 5]),
        ({"top_k": 2}, [3, 7]),
        ({"top_k": 6}, [3, 7, 0, 5]),
        # Of what is left, the best has 0.49, the best two 0.79.
        ({"top_p": 0.45}, [3]),
        ({"top_p": 0.7}, [3, 7]),
        # A third of the best that is left, not of the best.
        ({"min_p": 0.33}, [3, 7, 0]),
    ]:
        assert_follows(draw(sampler, LOGITS, 3000, temperature=1.0, allowed=allowed, **options), filtered(kept))
    assert_follows(draw(sampler, LOGITS, 3000, temperature=2.0, allowed=allowed), filtered([3, 7, 0, 5], 2.0))


def test_penalties_see_what_is_left(sampler: Sampler) -> None:
    row = {"output": [1, 3], "presence_penalty": 1.0, "repetition_penalty": 1.1}
    assert sample_one(sampler, LOGITS, make_row(allowed=only([3, 7]), **row)) == 7
    assert sample_one(sampler, LOGITS, make_row(allowed=only([3, 6]), **row)) == 3
    assert sample_one(sampler, LOGITS, make_row(allowed=only([2, 5]), **row)) == 2


def test_log_probabilities_are_of_all_tokens(sampler: Sampler) -> None:
    options = {"logprobs": 3, "logprob_token_ids": (6,)}
    rows = [make_row(allowed=only([6, 5]), **options), make_row(**options)]
    tokens, (entry, plain) = sampler.sample(LOGITS.repeat(2, 1), rows)
    exact = LOGITS.double().log_softmax(-1)
    assert entry is not None
    assert plain is not None
    assert (tokens[0], entry.token_id, entry.rank) == (6, 6, 7)
    assert entry.logprob == pytest.approx(float(exact[6]), abs=1e-6)
    assert (entry.top_ids, entry.top_logprobs) == (plain.top_ids, plain.top_logprobs)
    assert entry.named_logprobs == plain.named_logprobs


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("vocab_size", [5, 300])
def test_no_mask_hides_a_fault_or_hurts_a_neighbour(sampler: Sampler, vocab_size: int, bad: float) -> None:
    logits = make_logits("plain", 6, vocab_size)
    logits[1, 0] = logits[2, vocab_size - 1] = logits[4, 0] = bad
    before = logits.clone()
    allowed = only([1, 2], vocab_size)
    rows = [
        make_row(allowed=allowed, logprobs=0),
        make_row(allowed=allowed, logprobs=0),
        make_row(allowed=allowed, logprobs=0, temperature=1.0),
        make_row(allowed=allowed, logprobs=0, temperature=1.0, top_p=0.5, logit_bias={0: 9.0}),
        make_row(allowed=allowed, logprobs=0, temperature=1.0, top_k=1, stop=(0,), min_tokens=1),
        make_row(logprobs=0),
    ]
    tokens, entries = sampler.sample(logits, rows)
    assert [token is None for token in tokens] == [False, True, True, False, True, False]
    assert [entry is None for entry in entries] == [False, True, True, False, True, False]
    assert logits.numpy().tobytes() == before.numpy().tobytes()


def mixed_rows(vocab_size: int) -> list[SamplingRow]:
    """Each with one of several masks or none."""
    generator = np.random.default_rng(5)
    masks = [None, *(as_words(generator.random(vocab_size) < density, 1) for density in (0.001, 0.2, 0.9))]
    history = {"prompt": [1, 2, 3], "output": [5, 5, 9]}
    options: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"temperature": 1.0, "logprobs": 2},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 50},
        {"temperature": 1.0, "min_p": 0.02},
        {"temperature": 1.0, "repetition_penalty": 1.3, **history},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5, "logprobs": 1, **history},
        {"temperature": 2.0, "top_p": 0.99, "allowed_token_ids": tuple(range(0, vocab_size, 3))},
    ]
    return [
        make_row(seed_key=i, position=i, allowed=allowed, **row)
        for i, (row, allowed) in enumerate(itertools.product(options, masks))
    ]


def test_a_row_is_the_same_alone_batched_and_reordered(sampler: Sampler) -> None:
    vocab_size = 3001
    rows = mixed_rows(vocab_size)
    logits = make_logits("plain", len(rows), vocab_size)
    tokens, logprobs = sampler.sample(logits, rows)
    assert None not in tokens
    for i, row in enumerate(rows):
        assert sampler.sample(logits[i : i + 1], [row]) == ([tokens[i]], [logprobs[i]])
    order = list(reversed(range(len(rows))))
    again, again_logprobs = sampler.sample(logits[order], [rows[i] for i in order])
    assert again == [tokens[i] for i in order]
    assert again_logprobs == [logprobs[i] for i in order]


def test_a_mask_makes_a_row_more_than_plain_and_greedy() -> None:
    assert not make_row(allowed=only([1])).is_plain_greedy
    assert make_row(allowed=None).is_plain_greedy


@pytest.mark.parametrize("words", [only([1], 64), only([1])[None], only([1]).astype(np.int64)])
def test_words_that_do_not_fit_the_logits_are_never_read(sampler: Sampler, words: Words) -> None:
    with pytest.raises(AssertionError, match="no bitmask of 8 tokens"):
        sample_one(sampler, LOGITS, make_row(allowed=words))


@st.composite
def sampling_options(draw: st.DrawFn) -> dict[str, Any]:
    # A penalty that only tells 0 from its neighbours makes equals of tokens in one precision and not in the other.
    penalty = st.floats(-2.0, 2.0).filter(lambda value: value == 0 or abs(value) > 1e-6)
    return {
        "temperature": draw(st.sampled_from([0.0, *TEMPERATURES])),
        "presence_penalty": draw(st.just(0.0) | penalty),
        "frequency_penalty": draw(st.just(0.0) | penalty),
        "repetition_penalty": draw(st.just(1.0) | st.floats(0.5, 2.0)),
        **draw(st.sampled_from(FILTERS)),
    }


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    options=sampling_options(),
    kind=st.sampled_from(["plain", "ties", "masked"]),
    vocab_size=st.integers(1, 1200),
    density=st.sampled_from([0.0, 0.002, 0.03, 0.5, 0.98, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_the_definition(
    native: NativeSampler, options: dict[str, Any], kind: str, vocab_size: int, density: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    logits = make_logits(kind, 8, vocab_size, seed)
    is_allowed = generator.random((8, vocab_size)) < density
    words = as_words(is_allowed, padding=int(generator.integers(2)))
    history = generator.integers(0, vocab_size, (8, 12))
    rows = [
        make_row(prompt=history[i, :6], output=history[i, 6:], seed_key=seed, position=i, allowed=words[i], **options)
        for i in range(8)
    ]
    before = logits.clone()
    expected, _ = Sampler().sample(logits, rows)
    tokens, _ = Sampler(native).sample(logits, rows)
    assert torch.equal(logits, before)
    for i, (token, defined) in enumerate(zip(tokens, expected, strict=True)):
        assert token is None or is_allowed[i, token]
        if token != defined:
            left = masked(logits[i], is_allowed[i])
            _adjust(left.numpy(), rows[i])
            assert options["temperature"] > 0
            assert explains(token, left, rows[i]), f"{token} instead of {defined}"


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_a_mask_is_the_same_as_logits_of_minus_infinity(isa: str, vocab_size: int) -> None:
    """Bit for bit, so for numbers on the boundary between two tokens too; no word past the last is read."""
    kernels = native_kernels(isa=isa)
    native = NativeSampler(kernels.library, kernels.context)
    generator = np.random.default_rng(vocab_size)
    options = [SamplingParams(**row) for row in FILTERS]
    all_settings = list(itertools.product([0.0, *TEMPERATURES], options, [0.01, 0.5, 0.97], ["plain", "ties"]))
    num_rows = len(all_settings)
    by_kind = {kind: make_logits(kind, num_rows, vocab_size, vocab_size).numpy() for kind in ("plain", "ties")}
    logits = np.stack([by_kind[kind][i] for i, (*_, kind) in enumerate(all_settings)])
    is_allowed = generator.random(logits.shape) < np.array([[density] for _, _, density, _ in all_settings])
    words = as_words(is_allowed, padding=1)

    table = np.zeros(num_rows, SAMPLE_ROW)
    table["temperature"] = [temperature for temperature, *_ in all_settings]
    for name in ("top_p", "min_p", "top_k"):
        table[name] = [getattr(sampling, name) for _, sampling, *_ in all_settings]
    table["uniform"] = generator.random(num_rows)
    hidden = np.where(is_allowed, logits, np.float32(-np.inf))
    table["logits"] = row_addresses(hidden)
    expected = native.sample(table, vocab_size)
    table["logits"] = row_addresses(logits)
    table["allowed"] = row_addresses(words)
    assert native.sample(table, vocab_size) == expected
    assert (np.array([token is None for token in expected]) == ~is_allowed.any(-1)).all()


def test_a_large_vocabulary(native: NativeSampler) -> None:
    vocab_size = 262_144
    logits = make_logits("plain", 6, vocab_size)
    generator = np.random.default_rng(1)
    words = as_words(generator.random((6, vocab_size)) < 0.4)
    settings: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.95}] * 2
    rows = [make_row(seed_key=9, allowed=words[i], **options) for i, options in enumerate(settings)]
    assert Sampler(native).sample(logits, rows)[0] == Sampler().sample(logits, rows)[0]
