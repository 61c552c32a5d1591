"""csrc/sample.h against the numpy definition, from which only rounding may part it, and at every edge of its input."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from kitfox.request import SamplingParams
from kitfox.sampling import PLAIN_GREEDY, NativeSampler, Sampler, SamplingRow, is_plain_greedy, prompt_logprobs
from kitfox.sampling.native_sampler import SAMPLE_ROW, row_addresses
from kitfox.sampling.sampler import _filter, uniform
from tests.sampling.test_sampler import assert_follows, make_row

# Not multiples of 16 lanes or of the 256 numbers of a block, but for some.
VOCAB_SIZES = [1, 2, 15, 16, 17, 255, 256, 257, 1000, 4099, 20011]
TEMPERATURES = [1e-5, 0.1, 0.7, 1.0, 3.0, 100.0]
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300},
    {"top_k": 10**6},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 1 - 1e-6},
    {"min_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.95},
    {"top_k": 50, "min_p": 0.01},
    {"top_p": 0.9, "min_p": 0.01},
    {"top_k": 1000, "top_p": 0.999, "min_p": 1e-3},
]


def make_logits(kind: str, num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3 + 5
    if kind == "ties":
        return logits.div(2).round()
    if kind == "masked":
        hidden = torch.rand(num_rows, vocab_size, generator=generator) < 0.7
        hidden[:, vocab_size // 2] = False
        return logits.masked_fill(hidden, -torch.inf)
    return logits


def explains(token: int | None, logits: Tensor, row: SamplingRow) -> bool:
    """Whether the definition gives this token to a number, or a top_p, that is off by no more than rounding."""
    sampling = row.sampling
    scaled = logits.double().sub(logits.max()).div(sampling.temperature).numpy()
    number = uniform(row.seed_key, row.position)
    for change in (0.0, -1e-6, 1e-6):
        top_p = min(sampling.top_p * (1 + change), 1.0) if sampling.top_p < 1 else 1.0
        weights, ids = _filter(scaled.copy(), SamplingParams(top_k=sampling.top_k, top_p=top_p, min_p=sampling.min_p))
        cumulative = np.concatenate(([0.0], weights.cumsum() / weights.sum()))
        found = np.flatnonzero((np.arange(len(weights)) if ids is None else ids) == token)
        if len(found) and cumulative[found[0]] < number + 1e-5 and cumulative[found[0] + 1] > number - 1e-5:
            return True
    return False


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
def test_equals_the_definition(native: NativeSampler, kind: str, vocab_size: int) -> None:
    settings = list(itertools.product(TEMPERATURES, FILTERS))
    logits = make_logits(kind, len(settings), vocab_size, seed=vocab_size)
    rows = [
        make_row(temperature=temperature, seed_key=vocab_size, position=i, **options)
        for i, (temperature, options) in enumerate(settings)
    ]
    expected, _ = Sampler().sample(logits, rows)
    tokens, _ = Sampler(native).sample(logits, rows)
    different = [i for i in range(len(rows)) if tokens[i] != expected[i]]
    assert len(different) <= 3
    for i in different:
        assert explains(tokens[i], logits[i], rows[i]), f"{settings[i]}: {tokens[i]} instead of {expected[i]}"


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
def test_greedy_and_adjusted_rows_equal_the_definition(native: NativeSampler, kind: str) -> None:
    generator = np.random.default_rng(0)
    for vocab_size in VOCAB_SIZES:
        logits = make_logits(kind, 8, vocab_size)
        history = generator.integers(0, vocab_size, 50).tolist()
        ids = {int(i): float(generator.normal() * 5) for i in generator.integers(0, vocab_size, 20)}
        rows = [
            PLAIN_GREEDY,
            make_row(logit_bias=ids),
            make_row(repetition_penalty=1.7, prompt=history[:20], output=history[20:]),
            make_row(presence_penalty=0.5, frequency_penalty=0.7, prompt=history, output=history),
            make_row(stop=tuple(history[:5]), min_tokens=1),
            make_row(allowed_token_ids=tuple(history[:9]), presence_penalty=0.5, output=history[:3]),
            make_row(bad_token_sequences=((history[0],), tuple(history[1:4])), output=history[1:3]),
            make_row(temperature=0.01, frequency_penalty=2.0, logit_bias=ids, output=history, seed_key=3),
        ]
        before = logits.clone()
        assert Sampler(native).sample(logits, rows)[0] == Sampler().sample(logits, rows)[0]
        assert torch.equal(logits, before)


@pytest.mark.parametrize("options", FILTERS)
def test_distribution(native: NativeSampler, options: dict[str, Any]) -> None:
    count, temperature = 4000, 1.3
    logits = torch.linspace(-2.0, 2.0, 37)[torch.randperm(37, generator=torch.Generator().manual_seed(1))]
    weights, ids = _filter(logits.double().sub(logits.max()).div(temperature).numpy(), SamplingParams(**options))
    expected = torch.zeros(37).double()
    expected[torch.arange(37) if ids is None else torch.from_numpy(ids)] = torch.from_numpy(weights / weights.sum())
    rows = [make_row(temperature=temperature, position=i, seed_key=5, **options) for i in range(count)]
    tokens, _ = Sampler(native).sample(logits.expand(count, -1), rows)
    assert_follows(Counter(tokens), expected)


def test_equal_logits_keep_the_lowest_ids(native: NativeSampler) -> None:
    flat = torch.full((2000, 700), -3.25)
    for options, num_kept in [({"top_k": 300}, 300), ({"top_p": 0.0999}, 70), ({"top_k": 10, "top_p": 0.55}, 6)]:
        rows = [make_row(temperature=0.5, position=i, **options) for i in range(2000)]
        tokens, _ = Sampler(native).sample(flat, rows)
        assert max(token for token in tokens if token is not None) == num_kept - 1
    assert Sampler(native).sample(flat[:1], [PLAIN_GREEDY])[0] == [0]


def test_signed_zeros_are_equal(native: NativeSampler) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0, -2.0]])
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 0.1}):
        assert Sampler(native).sample(logits, [make_row(**options)])[0] == [1]
    assert Sampler(native).sample(logits, [make_row(logprobs=4)])[1][0].top_ids == [1, 2, 3, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize("vocab_size", [1, 17, 300])
def test_rows_without_a_distribution(native: NativeSampler, vocab_size: int) -> None:
    settings = [{"temperature": 0.0}] + [{"temperature": 1.0} | options for options in FILTERS]
    for bad in (math.nan, math.inf, -math.nan):
        for index in {0, vocab_size // 2, vocab_size - 1}:
            logits = make_logits("plain", len(settings), vocab_size)
            logits[:, index] = bad
            tokens, _ = Sampler(native).sample(logits, [make_row(**options) for options in settings])
            assert tokens == [None] * len(settings)
    masked = torch.full((len(settings), vocab_size), -torch.inf)
    assert Sampler(native).sample(masked, [make_row(**options) for options in settings])[0] == [None] * len(settings)
    everything = {"stop": tuple(range(vocab_size)), "min_tokens": 1}
    logits = make_logits("plain", len(settings), vocab_size)
    tokens, _ = Sampler(native).sample(logits, [make_row(**everything, **options) for options in settings])
    assert tokens == [None] * len(settings)
    logits[:, 0] = math.nan  # a fault of the model's is not masked away
    tokens, _ = Sampler(native).sample(logits, [make_row(stop=(0,), min_tokens=1, **options) for options in settings])
    assert tokens == [None] * len(settings)


def test_extreme_logits_and_temperatures(native: NativeSampler) -> None:
    logits = torch.tensor([[-3e38, 1e30, 3e38, -torch.inf, 1e-40, 0.0]])
    for temperature in (1e-300, 1e-5, 1.0, 1e5, 1e30):
        for options in FILTERS:
            row = make_row(temperature=temperature, **options)
            assert Sampler(native).sample(logits, [row])[0] == [2]
    row = make_row(temperature=1e300, seed_key=1)
    drawn = Counter(
        Sampler(native).sample(torch.tensor([[1.0, -torch.inf, 3.0]]).expand(2000, -1),
                               [make_row(temperature=1e300, position=i) for i in range(2000)])[0]
    )  # fmt: skip
    assert_follows(drawn, torch.tensor([0.5, 0.0, 0.5]).double())


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-52, 1.0])
def test_the_ends_of_the_uniform_numbers(native: NativeSampler, number: float) -> None:
    """Even 1, to which rounding may come, finds a token that has weight."""
    logits = np.full((1, 1000), -np.inf, np.float32)
    logits[0, [300, 600]] = 1.0, 2.0
    for options in ((0.0, 1.0), (0.0, 0.9999), (0.5, 1.0)):
        table = np.zeros(1, SAMPLE_ROW)
        table["logits"] = row_addresses(logits)
        table["temperature"], table["uniform"] = 1.0, number
        table["min_p"], table["top_p"] = options
        (token,) = native.sample(table, 1000)
        assert token == (300 if number == 0.0 and options[0] == 0.0 else 600)


def all_settings() -> list[SamplingRow]:
    settings = itertools.product([0.0, 0.8, 3.0], FILTERS)
    return [
        make_row(temperature=temperature, logprobs=i % 7, position=i, **options)
        for i, (temperature, options) in enumerate(settings)
    ]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_is_the_same_alone_and_on_any_thread(
    make_native: Callable[[int], NativeSampler], native: NativeSampler, threads: int
) -> None:
    rows = all_settings()
    logits = make_logits("plain", len(rows), 3001)
    alone = [Sampler(native).sample(logits[i : i + 1], rows[i : i + 1]) for i in range(len(rows))]
    sampler = Sampler(make_native(threads))
    for _ in range(5):
        tokens, logprobs = sampler.sample(logits, rows)
        assert [([token], [entry]) for token, entry in zip(tokens, logprobs, strict=True)] == alone
        # Rows of another size between them leave no trace.
        sampler.sample(make_logits("plain", 4, 77), rows[:4])


@pytest.mark.parametrize("vocab_size", [1, 16, 33, 1023])
def test_reads_nothing_around_a_row_and_needs_no_alignment(native: NativeSampler, vocab_size: int) -> None:
    rows = all_settings()
    logits = make_logits("plain", len(rows), vocab_size)
    expected = Sampler(native).sample(logits, rows)
    for offset in (1, 3):
        buffer: npt.NDArray[np.float32] = np.full((len(rows), vocab_size + 40), np.nan, np.float32)
        buffer[:, offset : offset + vocab_size] = logits.numpy()
        inside = torch.from_numpy(buffer)[:, offset : offset + vocab_size]
        table = np.zeros(len(rows), SAMPLE_ROW)
        table["logits"] = row_addresses(inside)
        for name in ("temperature", "top_p", "min_p", "top_k"):
            table[name] = [getattr(row.sampling, name) for row in rows]
        table["uniform"] = [uniform(row.seed_key, row.position) for row in rows]
        tokens = native.sample(table, vocab_size)
        assert tokens == expected[0]
        chosen = [token or 0 for token in tokens]
        num_top = [row.sampling.logprobs or 0 for row in rows]
        assert native.logprobs(inside, range(len(rows)), chosen, num_top) == expected[1]


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_logprobs(native: NativeSampler, kind: str, vocab_size: int) -> None:
    num_rows = 8
    logits = make_logits(kind, num_rows, vocab_size)
    logits[5] = 0.25
    num_top = [0, 1, 5, 20, 50, 7, 300, 2 * vocab_size]
    token_ids = [(i * 7919) % vocab_size for i in range(num_rows)]
    result = native.logprobs(logits, range(num_rows), token_ids, num_top)
    exact = logits.double().log_softmax(-1)
    for i, entry in enumerate(result):
        count = min(num_top[i], vocab_size)
        order = np.argsort(-logits[i].numpy(), kind="stable")[:count].tolist()
        assert entry.token_id == token_ids[i]
        assert entry.logprob == pytest.approx(float(exact[i, token_ids[i]]), abs=2e-6)
        assert entry.rank == 1 + int((logits[i] > logits[i, token_ids[i]]).sum())
        assert entry.top_ids == order
        assert entry.top_logprobs == pytest.approx(exact[i, order].tolist(), abs=2e-6)


def test_logprobs_of_rows_without_a_distribution_are_nan(native: NativeSampler) -> None:
    logits = make_logits("plain", 3, 40)
    logits[0, 17], logits[1, 39], logits[2] = math.nan, math.inf, -math.inf
    for entry in prompt_logprobs(lambda rows: rows, logits, [1, 2, 3], 2, native):
        assert all(math.isnan(value) for value in (entry.logprob, *entry.top_logprobs))
        assert entry.top_ids == [0, 1]


def test_a_large_vocabulary(native: NativeSampler) -> None:
    logits = make_logits("plain", 4, 151_936)
    rows = [
        make_row(temperature=1.0, seed_key=9, logprobs=5),
        make_row(temperature=1.0, top_p=0.95, seed_key=9),
        make_row(temperature=1.0, top_k=5000, seed_key=9),
        PLAIN_GREEDY,
    ]
    assert Sampler(native).sample(logits, rows)[0] == Sampler().sample(logits, rows)[0]


def test_plain_greedy_requests() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=9)
    assert PLAIN_GREEDY.is_plain_greedy
    assert is_plain_greedy(greedy, (1,))
    for options in (
        {"temperature": 1.0},
        {"logprobs": 0},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": (1,)},
        {"bad_token_sequences": ((1, 2),)},
        {"min_tokens": 1},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.1},
    ):
        row = make_row(stop=(1,), **options)
        assert not row.is_plain_greedy
        assert not is_plain_greedy(row.sampling, (1,))
    assert is_plain_greedy(SamplingParams(temperature=0.0, min_tokens=1), ())
