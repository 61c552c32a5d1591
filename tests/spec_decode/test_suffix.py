from __future__ import annotations

import random
import tracemalloc

import pytest

from kitfox.errors import ConfigError
from kitfox.spec_decode.proposer import NOTHING
from kitfox.spec_decode.suffix import SuffixProposer

VOCAB_SIZE = 50_000


def learn(proposer: SuffixProposer, tokens: list[int], *, num_prompt_tokens: int = 0, salt: str | None = None) -> None:
    proposer.start("learnt", tokens, num_prompt_tokens=num_prompt_tokens, salt=salt)
    proposer.finish("learnt", keep=True)


def draft(proposer: SuffixProposer, tokens: list[int], *, limit: int = 4, salt: str | None = None) -> list[int]:
    proposer.start("asked", tokens, num_prompt_tokens=len(tokens), salt=salt)
    proposal = proposer.propose({"asked": limit}).get("asked", NOTHING)
    proposer.finish("asked", keep=False)
    return proposal.token_ids


def answer_of(number: int, length: int = 40) -> list[int]:
    """Different for each number, all tokens below the vocabulary."""
    noise = random.Random(number)
    return [noise.randrange(VOCAB_SIZE) for _ in range(length)]


def knows(proposer: SuffixProposer, answer: list[int], salt: str | None = None) -> bool:
    return draft(proposer, answer[:10], salt=salt) == answer[10:14]


def test_what_followed_most_often_is_drafted() -> None:
    proposer = SuffixProposer()
    learn(proposer, [1, 2, 3, 80, 81])
    for _ in range(3):
        learn(proposer, [1, 2, 3, 70, 71])
    learn(proposer, [1, 2, 3, 90, 91])
    assert draft(proposer, [1, 2, 3]) == [70, 71]


def test_the_longest_agreement_outvotes_the_most_frequent() -> None:
    proposer = SuffixProposer()
    context = list(range(200, 212))
    learn(proposer, [*context, 1, 2, 80, 81])
    for _ in range(5):
        learn(proposer, [1, 2, 70, 71])
    assert draft(proposer, [*context, 1, 2]) == [80, 81]
    assert draft(proposer, [1, 2]) == [70, 71]


def test_own_text_and_past_answers_are_one_vote() -> None:
    proposer = SuffixProposer()
    for _ in range(3):
        learn(proposer, [1, 2, 70, 71])
    assert draft(proposer, [1, 2, 80, 81, 1, 2]) == [70, 71]
    assert draft(proposer, [1, 2, 80, 81] * 6 + [1, 2], limit=2) == [80, 81]


def test_where_opinions_part_the_draft_ends() -> None:
    proposer = SuffixProposer(min_probability=0.3)
    start = list(range(200, 220))
    for last in range(10):
        learn(proposer, [*start, 30, 31, 40 + last, 50 + last])
    assert draft(proposer, start, limit=8) == [30, 31]


def test_the_product_of_probabilities_stays_above_the_floor() -> None:
    proposer = SuffixProposer(min_probability=0.5)
    learn(proposer, answer_of(1))
    proposer.start("a", answer_of(1)[:4], num_prompt_tokens=4)
    proposal = proposer.propose({"a": 16})["a"]
    product = 1.0
    for probability in proposal.probabilities:
        product *= probability
    assert product >= 0.5
    assert 0 < len(proposal.token_ids) < 16


def test_the_beginning_of_an_answer_is_found_by_the_end_of_its_prompt() -> None:
    proposer = SuffixProposer()
    question = answer_of(1)
    for _ in range(3):
        learn(proposer, [*question, 7, 8, 9, 10], num_prompt_tokens=len(question))
    assert draft(proposer, [*answer_of(2), *question[-2:]]) == [7, 8, 9, 10]


def test_prompts_are_not_learnt() -> None:
    proposer = SuffixProposer()
    learn(proposer, answer_of(1, 60), num_prompt_tokens=60)
    assert draft(proposer, answer_of(1, 60)[:10]) == []


def test_only_what_is_to_be_kept_is_learnt() -> None:
    proposer = SuffixProposer()
    proposer.start("a", answer_of(1), num_prompt_tokens=0)
    proposer.finish("a", keep=False)
    assert not knows(proposer, answer_of(1))
    learn(proposer, answer_of(1))
    assert knows(proposer, answer_of(1))


def test_salts_share_nothing() -> None:
    proposer = SuffixProposer()
    learn(proposer, answer_of(1), salt="alice")
    learn(proposer, answer_of(2))
    assert knows(proposer, answer_of(1), salt="alice")
    assert knows(proposer, answer_of(2))
    for salt, number in (("bob", 1), (None, 1), ("alice", 2), ("", 2)):
        assert draft(proposer, answer_of(number)[:10], salt=salt) == []


def test_salts_share_nothing_after_answers_moved() -> None:
    proposer = SuffixProposer(max_cached_requests=4)
    for number in range(12):
        learn(proposer, answer_of(number), salt=f"tenant {number % 3}")
        for other in range(number + 1):
            for tenant in range(3):
                found = draft(proposer, answer_of(other)[:10], salt=f"tenant {tenant}")
                assert not found or tenant == other % 3


@pytest.mark.parametrize("count", range(1, 25))
def test_the_oldest_answers_are_forgotten(count: int) -> None:
    proposer = SuffixProposer(max_cached_requests=10)
    for number in range(count):
        learn(proposer, answer_of(number))
    for number in range(count):
        proposer.start(str(number), answer_of(number)[:10], num_prompt_tokens=10)
    proposals = proposer.propose({str(number): 4 for number in range(count)})
    assert min(count, 5) <= len(proposals) <= 10
    assert list(proposals) == [str(number) for number in range(count)][-len(proposals) :]


def test_an_answer_in_use_is_kept() -> None:
    proposer = SuffixProposer(max_cached_requests=10)
    learn(proposer, answer_of(0))
    for number in range(1, 60):
        learn(proposer, answer_of(number))
        assert knows(proposer, answer_of(0))
    assert not knows(proposer, answer_of(1))


def test_so_many_in_use_that_they_do_not_fit() -> None:
    proposer = SuffixProposer(max_cached_requests=10)
    for number in range(100):
        learn(proposer, answer_of(number))
        for past in range(max(0, number - 20), number):
            knows(proposer, answer_of(past))
        assert knows(proposer, answer_of(number))


@pytest.mark.parametrize("max_cached_requests", [0, 1])
def test_nothing_to_be_kept(max_cached_requests: int) -> None:
    proposer = SuffixProposer(max_cached_requests=max_cached_requests)
    at_first = proposer.memory_bytes
    learn(proposer, answer_of(1))
    assert not knows(proposer, answer_of(1))
    assert proposer.memory_bytes == at_first


@pytest.mark.parametrize("num_salts", [1, 50])
@pytest.mark.parametrize("length", [5, 300, 9000])
def test_memory_is_bounded_and_what_it_says(num_salts: int, length: int) -> None:
    most = 1 << 18
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        proposer = SuffixProposer(max_memory_bytes=most)
        for number in range(20 + 12_000 // length):
            learn(proposer, answer_of(number, length), salt=f"tenant {number % num_salts}")
            assert number % 20 or proposer.memory_bytes <= most
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held / 2 <= proposer.memory_bytes <= held * 2
    assert held <= most * 1.1


def test_of_an_answer_too_long_to_keep_the_end_is_kept() -> None:
    proposer = SuffixProposer(max_memory_bytes=64 << 10)
    answer = answer_of(1, 5000)
    learn(proposer, answer)
    assert proposer.memory_bytes <= 64 << 10
    assert draft(proposer, answer[-20:-10]) == answer[-10:-6]
    assert draft(proposer, answer[:10]) == []


def test_running_requests_come_on_top() -> None:
    proposer = SuffixProposer()
    at_first = proposer.memory_bytes
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(20):
            proposer.start(str(number), answer_of(number, 3000), num_prompt_tokens=100)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held / 2 <= proposer.memory_bytes - at_first <= held * 2


@pytest.mark.parametrize("options", [{"max_depth": 7}, {"min_probability": 1.5}, {"min_probability": -0.1}])
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SuffixProposer(**options)  # type: ignore[arg-type]
