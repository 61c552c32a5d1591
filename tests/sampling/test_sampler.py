"""Sampling against hand-computed values and exact distributions; every row independent of the batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kitfox.request import SamplingParams
from kitfox.sampling import Sampler, SamplingRow, prompt_logprobs
from kitfox.sampling.sampler import Words, uniform


def make_row(
    *,
    prompt: Sequence[int] | np.ndarray = (),
    output: Sequence[int] | np.ndarray = (),
    stop: tuple[int, ...] = (),
    position: int = 0,
    seed_key: int = 0,
    allowed: Words | None = None,
    **sampling: Any,
) -> SamplingRow:
    return SamplingRow(
        sampling=SamplingParams(**({"temperature": 0.0, "max_tokens": 100} | sampling)),
        prompt_token_ids=prompt,
        output_token_ids=output,
        stop_token_ids=stop,
        position=position,
        seed_key=seed_key,
        allowed=allowed,
    )


def sample_one(sampler: Sampler, logits: list[float] | Tensor, row: SamplingRow) -> int | None:
    tokens, _ = sampler.sample(torch.as_tensor(logits, dtype=torch.float32)[None], [row])
    return tokens[0]


def draw(sampler: Sampler, logits: Tensor, count: int, **sampling: Any) -> Counter[int | None]:
    """Tokens drawn at `count` positions."""
    rows = [make_row(position=i, seed_key=7, **sampling) for i in range(count)]
    tokens, _ = sampler.sample(logits.expand(count, -1), rows)
    return Counter(tokens)


def assert_follows(drawn: Counter[int | None], expected: Tensor) -> None:
    """Chi-square at about one in a million; tokens of probability 0 must not occur."""
    count = sum(drawn.values())
    possible = expected.nonzero()[:, 0].tolist()
    assert set(drawn) <= set(possible)
    statistic = sum((drawn[i] - count * float(expected[i])) ** 2 / (count * float(expected[i])) for i in possible)
    freedom = max(len(possible) - 1, 1)
    # Wilson and Hilferty's approximation of the quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, f"{statistic:.1f} >= {limit:.1f}"


LOGITS = torch.tensor([1.0, 3.0, 0.5, 2.0, 2.5, -1.0, 0.0, 1.5])


def test_greedy_takes_the_largest_and_of_equal_ones_the_first(sampler: Sampler) -> None:
    assert sample_one(sampler, [0.0, 2.0, 1.0], make_row()) == 1
    assert sample_one(sampler, [0.0, 2.0, 2.0], make_row()) == 1
    assert sample_one(sampler, [0.0, 2.0, 2.0], make_row(logit_bias={0: 0.5})) == 1


def test_no_rows(sampler: Sampler) -> None:
    assert sampler.sample(torch.zeros(0, 5), []) == ([], [])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature_distribution(sampler: Sampler, temperature: float) -> None:
    drawn = draw(sampler, LOGITS, 4000, temperature=temperature)
    assert_follows(drawn, (LOGITS.double() / temperature).softmax(-1))


def test_extreme_temperatures(sampler: Sampler) -> None:
    assert_follows(draw(sampler, LOGITS, 4000, temperature=1e6), torch.full((8,), 1 / 8))
    assert draw(sampler, LOGITS, 50, temperature=1e-300) == {1: 50}


def filtered(kept: list[int], temperature: float = 1.0) -> Tensor:
    mask = torch.full_like(LOGITS, -torch.inf)
    mask[kept] = 0
    return ((LOGITS + mask).double() / temperature).softmax(-1)


def test_top_k_distribution(sampler: Sampler) -> None:
    assert_follows(draw(sampler, LOGITS, 4000, temperature=1.0, top_k=3), filtered([1, 4, 3]))
    assert_follows(draw(sampler, LOGITS, 4000, temperature=1.0, top_k=-1), filtered(list(range(8))))
    assert_follows(draw(sampler, LOGITS, 4000, temperature=1.0, top_k=100), filtered(list(range(8))))
    assert draw(sampler, LOGITS, 50, temperature=2.0, top_k=1) == {1: 50}


def test_top_k_with_ties_keeps_exactly_k(sampler: Sampler) -> None:
    assert set(draw(sampler, torch.zeros(10), 300, temperature=1.0, top_k=4)) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it(sampler: Sampler) -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    for top_p, kept in [(0.39, [1]), (0.69, [1, 3]), (0.71, [1, 3, 4]), (0.99, [0, 1, 2, 3, 4])]:
        expected = torch.zeros(5).index_put((torch.tensor(kept),), probabilities[kept])
        drawn = draw(sampler, probabilities.log(), 3000, temperature=1.0, top_p=top_p)
        assert_follows(drawn, expected.double() / expected.sum())
    assert draw(sampler, probabilities.log(), 50, temperature=1.0, top_p=1e-9) == {1: 50}


def test_top_p_is_of_what_top_k_left(sampler: Sampler) -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    # Of the best two, 0.4 / 0.7 = 0.57 reaches 0.55; of all, it does not.
    assert set(draw(sampler, probabilities.log(), 200, temperature=1.0, top_k=2, top_p=0.55)) == {0}
    assert set(draw(sampler, probabilities.log(), 200, temperature=1.0, top_p=0.55)) == {0, 1}


def test_min_p_is_relative_to_the_most_likely(sampler: Sampler) -> None:
    probabilities = torch.tensor([0.5, 0.26, 0.2, 0.04])
    for options in ({}, {"top_p": 0.9999}, {"top_k": 4}):
        drawn = draw(sampler, probabilities.log(), 3000, temperature=1.0, min_p=0.5, **options)
        assert_follows(drawn, torch.tensor([0.5, 0.26, 0.0, 0.0]).double() / 0.76)
    assert set(draw(sampler, probabilities.log(), 50, temperature=1.0, min_p=1.0)) == {0}


def test_filters_follow_temperature(sampler: Sampler) -> None:
    # At temperature 1 the best token alone has 0.73; at 4 it has 0.56, so 0.7 needs both.
    logits = torch.tensor([1.0, 0.0])
    assert set(draw(sampler, logits, 200, temperature=1.0, top_p=0.7)) == {0}
    assert set(draw(sampler, logits, 200, temperature=4.0, top_p=0.7)) == {0, 1}


def test_top_p_beyond_the_candidates_is_exact(sampler: Sampler) -> None:
    vocab_size = 5000
    logits = torch.linspace(0.0, 0.5, vocab_size)
    probabilities = logits.double().softmax(-1)
    num_kept = int((probabilities.flip(0).cumsum(0) < 0.9).sum()) + 1
    assert num_kept > 1024
    drawn = draw(sampler, logits, 6000, temperature=1.0, top_p=0.9)
    assert min(token for token in drawn if token is not None) >= vocab_size - num_kept
    buckets = Counter(int((token - (vocab_size - num_kept)) * 10 // num_kept) for token in drawn.elements() if token)
    kept = probabilities[-num_kept:]
    edges = torch.arange(num_kept) * 10 // num_kept
    assert_follows(buckets, torch.zeros(10).double().index_add(0, edges, kept) / kept.sum())  # type: ignore[arg-type]


def test_repetition_penalty_counts_prompt_and_output_once(sampler: Sampler) -> None:
    # 2.0 / 1.5 = 1.33 < 1.4; twice would be no different.
    row = {"prompt": [0, 0], "output": [], "repetition_penalty": 1.5}
    assert sample_one(sampler, [2.0, 1.4, 1.3], make_row(**row)) == 1
    assert sample_one(sampler, [2.0, 1.3, 1.2], make_row(**row)) == 0
    assert sample_one(sampler, [2.0, 1.4, 1.3], make_row(output=[0, 1], repetition_penalty=1.5)) == 0
    # Negative logits are multiplied: -1.0 * 1.5 = -1.5 < -1.4.
    assert sample_one(sampler, [-1.0, -1.4], make_row(output=[0], repetition_penalty=1.5)) == 1
    assert sample_one(sampler, [-1.0, -1.6], make_row(output=[0], repetition_penalty=1.5)) == 0


def test_presence_and_frequency_penalties_count_output_only(sampler: Sampler) -> None:
    assert sample_one(sampler, [2.0, 1.6], make_row(prompt=[0], presence_penalty=0.5)) == 0
    assert sample_one(sampler, [2.0, 1.6], make_row(output=[0], presence_penalty=0.5)) == 1
    assert sample_one(sampler, [2.0, 1.4], make_row(output=[0, 0, 0], presence_penalty=0.5)) == 0
    assert sample_one(sampler, [2.0, 1.0], make_row(output=[0, 0], frequency_penalty=0.5)) == 0  # 1.0 each: the first
    assert sample_one(sampler, [2.0, 0.9], make_row(output=[0, 0, 0], frequency_penalty=0.5)) == 1
    assert sample_one(sampler, [1.0, 1.2], make_row(output=[0], presence_penalty=-0.5)) == 0


def test_logit_bias_comes_before_penalties(sampler: Sampler) -> None:
    assert sample_one(sampler, [1.0, 2.0], make_row(logit_bias={0: 1.5})) == 0
    assert sample_one(sampler, [1.0, 2.0], make_row(logit_bias={1: -100.0})) == 0
    # (1 + 3) / 2 = 2.0 < 2.2; penalising first would give 1 / 2 + 3 = 3.5.
    assert sample_one(sampler, [1.0, 2.2], make_row(output=[0], logit_bias={0: 3.0}, repetition_penalty=2.0)) == 1


def test_min_tokens_masks_stop_tokens_until_met(sampler: Sampler) -> None:
    row = {"stop": (1, 2), "min_tokens": 2}
    assert sample_one(sampler, [0.0, 5.0, 4.0], make_row(output=[0], **row)) == 0
    assert sample_one(sampler, [0.0, 5.0, 4.0], make_row(output=[0, 0], **row)) == 1
    assert sample_one(sampler, [0.0, 5.0, 4.0], make_row(output=[0], logit_bias={1: 100.0}, **row)) == 0
    assert set(draw(sampler, torch.tensor([0.0, 5.0, 4.0]), 50, temperature=1.0, stop=(1, 2), min_tokens=1)) == {0}


def test_masked_tokens_never_return_through_a_filter(sampler: Sampler) -> None:
    row = {"stop": (1, 2), "min_tokens": 1, "temperature": 5.0}
    for options in ({"top_k": 3}, {"top_p": 0.999999}, {"min_p": 1e-9}, {"top_k": 3, "top_p": 0.9999, "min_p": 1e-9}):
        assert set(draw(sampler, torch.tensor([0.0, 5.0, 4.0, 0.0]), 100, **row, **options)) == {0, 3}


def test_histories_may_be_arrays(sampler: Sampler) -> None:
    history = {"prompt": np.array([0]), "output": np.array([1, 1]), "repetition_penalty": 2.0, "frequency_penalty": 1.0}
    assert sample_one(sampler, [4.0, 9.0, 2.1], make_row(**history)) == 1  # 2.0, 2.5, 2.1
    assert sample_one(sampler, [4.4, 8.0, 2.1], make_row(**history)) == 0  # 2.2, 2.0, 2.1


def test_rows_without_a_distribution_are_marked_and_leave_the_others_alone(sampler: Sampler) -> None:
    logits = LOGITS.repeat(7, 1)
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 0] = torch.inf
    logits[4, 5] = torch.nan
    logits[5, 0] = -torch.inf  # a banned token is no fault
    options = {"logprobs": 1}
    rows = [make_row(**options) for _ in range(7)]
    rows[4] = make_row(temperature=1.0, **options)
    rows[6] = make_row(stop=tuple(range(8)), min_tokens=1, **options)
    tokens, logprobs = sampler.sample(logits, rows)
    assert tokens == [1, None, None, None, None, 1, None]
    assert [entry is not None for entry in logprobs] == [True, False, False, False, False, True, False]


def mixed_rows(vocab_size: int) -> list[SamplingRow]:
    history = {"prompt": [1, 2, 3], "output": [5, 5, 9]}
    return [
        make_row(),
        make_row(temperature=1.0, seed_key=11, position=3, logprobs=2),
        make_row(temperature=0.7, top_p=0.9, seed_key=-5, position=3),
        make_row(temperature=1.5, top_k=50, seed_key=2**63 - 1, position=90, logprobs=0),
        make_row(temperature=1.0, min_p=0.02, seed_key=11, position=4),
        make_row(temperature=1.0, repetition_penalty=1.3, seed_key=3, **history),
        make_row(frequency_penalty=1.0, presence_penalty=0.5, logprobs=5, **history),
        make_row(temperature=2.0, top_p=0.999, top_k=0, logit_bias={vocab_size - 1: 3.0}, seed_key=8),
    ]


def test_a_row_is_the_same_alone_batched_and_reordered(sampler: Sampler) -> None:
    vocab_size = 3001
    rows = mixed_rows(vocab_size) * 4
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    before = logits.clone()
    tokens, logprobs = sampler.sample(logits, rows)
    assert torch.equal(logits, before)
    for i, row in enumerate(rows):
        assert sampler.sample(logits[i : i + 1], [row]) == ([tokens[i]], [logprobs[i]])
    order = list(reversed(range(len(rows))))
    again, again_logprobs = sampler.sample(logits[order], [rows[i] for i in order])
    assert again == [tokens[i] for i in order]
    assert again_logprobs == [logprobs[i] for i in order]


def test_seeds_and_positions_give_different_draws(sampler: Sampler) -> None:
    flat = torch.zeros(1000)
    drawn = {(seed, position): sample_one(sampler, flat, make_row(temperature=1.0, seed_key=seed, position=position))
             for seed in (-1, 0, 1, 2**40) for position in range(5)}  # fmt: skip
    assert len(set(drawn.values())) > 15
    assert sample_one(sampler, flat, make_row(temperature=1.0, seed_key=1, position=2)) == drawn[1, 2]


def test_uniform_is_uniform_over_seeds_and_over_positions() -> None:
    for numbers in (
        [uniform(seed, 0) for seed in range(20000)],
        [uniform(0, position) for position in range(20000)],
        [uniform(5, 5, stream) for stream in range(20000)],
    ):
        assert all(0 <= number < 1 for number in numbers)
        histogram = np.histogram(numbers, bins=50, range=(0, 1))[0]
        assert_follows(Counter(dict(enumerate(histogram.tolist()))), torch.full((50,), 0.02))
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03


def test_logprobs_are_of_the_untouched_distribution(sampler: Sampler) -> None:
    row = make_row(temperature=3.0, top_k=2, logit_bias={6: 50.0}, repetition_penalty=1.7, output=[1], logprobs=3)
    tokens, (logprobs,) = sampler.sample(LOGITS[None], [row])
    expected = LOGITS.double().log_softmax(-1)
    assert logprobs is not None
    assert logprobs.token_id == tokens[0] == 6
    assert logprobs.logprob == pytest.approx(float(expected[6]), abs=1e-5)
    assert logprobs.rank == 7
    assert logprobs.top_ids == [1, 4, 3]
    assert logprobs.top_logprobs == pytest.approx(expected[[1, 4, 3]].tolist(), abs=1e-5)


def test_logprobs_zero_reports_the_token_only_and_none_nothing(sampler: Sampler) -> None:
    _, (zero, nothing, many) = sampler.sample(
        LOGITS.repeat(3, 1), [make_row(logprobs=0), make_row(), make_row(logprobs=20)]
    )
    assert zero is not None
    assert (zero.token_id, zero.rank, zero.top_ids, zero.top_logprobs) == (1, 1, [], [])
    assert nothing is None
    assert many is not None
    assert len(many.top_ids) == 8  # the vocabulary has no more


@pytest.mark.parametrize("backend", ["numpy", "native"])
def test_prompt_logprobs_in_chunks(
    backend: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = request.getfixturevalue("native") if backend == "native" else None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(53, 8, generator=generator)
    weight = torch.randn(100, 8, generator=generator)
    targets = torch.randint(0, 100, (53,), generator=generator).tolist()
    monkeypatch.setattr("kitfox.sampling.sampler._LOGPROB_CHUNK_BYTES", 4 * 100 * 10)
    largest = 0

    def logits_fn(rows: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, rows.shape[0])
        return rows @ weight.t()

    result = prompt_logprobs(logits_fn, hidden, targets, 2, native)
    assert largest <= 16
    expected = (hidden.double() @ weight.double().t()).log_softmax(-1)
    assert [entry.token_id for entry in result] == targets
    for i, entry in enumerate(result):
        assert entry.logprob == pytest.approx(float(expected[i, targets[i]]), abs=1e-5)
        assert entry.rank == 1 + int((expected[i] > expected[i, targets[i]]).sum())
        assert entry.top_ids == expected[i].topk(2).indices.tolist()
    assert prompt_logprobs(logits_fn, hidden[:0], [], 2, native) == []


def test_only_allowed_tokens_are_chosen(sampler: Sampler) -> None:
    assert sample_one(sampler, LOGITS, make_row(allowed_token_ids=(2, 5, 7))) == 7
    assert sample_one(sampler, LOGITS, make_row(allowed_token_ids=(2, 5), logit_bias={1: 100.0})) == 2
    allowed = draw(sampler, LOGITS, 4000, temperature=1.0, allowed_token_ids=(0, 3, 4))
    assert_follows(allowed, filtered([0, 3, 4]))
    assert_follows(draw(sampler, LOGITS, 2000, temperature=1.0, allowed_token_ids=(0, 3, 4), top_k=2), filtered([3, 4]))


def test_a_bad_sequence_is_never_completed(sampler: Sampler) -> None:
    bad = {"bad_token_sequences": ((1,), (6, 4), (7, 7, 3))}
    assert sample_one(sampler, LOGITS, make_row(**bad)) == 4
    assert sample_one(sampler, LOGITS, make_row(output=[6], **bad)) == 3
    assert sample_one(sampler, LOGITS, make_row(output=[7, 6], **bad)) == 3
    assert sample_one(sampler, LOGITS, make_row(output=[7, 7], logit_bias={3: 50.0}, **bad)) == 4
    assert sample_one(sampler, LOGITS, make_row(output=[7], logit_bias={3: 50.0}, **bad)) == 3
    assert sample_one(sampler, LOGITS, make_row(prompt=[6], **bad)) == 4  # the answer counts, not the prompt
    everything = tuple((i,) for i in range(8))
    assert sample_one(sampler, LOGITS, make_row(bad_token_sequences=everything)) is None


def test_masks_hurt_no_neighbour_and_hide_no_fault(sampler: Sampler) -> None:
    logits = torch.stack([LOGITS, LOGITS, LOGITS])
    logits[1, 0] = torch.nan
    before = logits.clone()
    rows = [
        make_row(allowed_token_ids=(5,), repetition_penalty=1.5, prompt=[5]),
        make_row(allowed_token_ids=(5,)),
        make_row(bad_token_sequences=((1,),), min_tokens=1, stop=(4,)),
    ]
    assert sampler.sample(logits, rows)[0] == [5, None, 3]
    assert torch.equal(logits.nan_to_num(0.0), before.nan_to_num(0.0))


def test_named_tokens_are_reported_beside_the_likely_ones(sampler: Sampler) -> None:
    exact = LOGITS.double().log_softmax(-1)
    rows = [make_row(logprobs=1, logprob_token_ids=(5, 1)), make_row(logprobs=0)]
    _, (entry, plain) = sampler.sample(torch.stack([LOGITS, LOGITS]), rows)
    assert entry is not None
    assert plain is not None
    assert entry.top_ids == [1]
    assert entry.named_logprobs == pytest.approx([float(exact[5]), float(exact[1])], abs=1e-6)
    assert plain.named_logprobs == []


def test_named_tokens_of_a_prompt() -> None:
    exact = LOGITS.double().log_softmax(-1)
    entries = prompt_logprobs(lambda rows: rows, LOGITS.expand(20, -1), [2] * 20, 0, named=(6,))
    assert [entry.named_logprobs for entry in entries] == [[pytest.approx(float(exact[6]), abs=1e-6)]] * 20
