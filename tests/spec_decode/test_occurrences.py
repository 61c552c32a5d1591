"""The index against a search through the whole text."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitfox.spec_decode.occurrences import BYTES_PER_TEXT, BYTES_PER_TOKEN, Text

ORDERS = (5, 2)
MAX_LENGTH = 8
ALL = 10**9


def matches_by_search(tokens: list[int], wanted: list[int]) -> list[tuple[int, int]]:
    """Agreement of what is before each place but the end with the end of `wanted`; of the longest order found."""
    agreements = []
    for place in range(1, len(tokens)):
        length = 0
        while length < min(MAX_LENGTH, place, len(wanted)) and tokens[place - 1 - length] == wanted[-1 - length]:
            length += 1
        agreements.append((length, place + MAX_LENGTH))
    for order in ORDERS:
        found = [match for match in reversed(agreements) if match[0] >= order]
        if found:
            return found
    return []


tokens_that_repeat = st.lists(st.integers(0, 3), max_size=200)


@given(tokens=tokens_that_repeat, pieces=st.lists(st.integers(1, 90), min_size=1))
def test_finds_what_a_search_finds(tokens: list[int], pieces: list[int]) -> None:
    text = Text(ORDERS, MAX_LENGTH)
    start = 0
    while start < len(tokens):
        for piece in pieces:  # short ones are indexed one by one, long ones at once
            text.append(tokens[start : start + piece])
            start += piece
    assert text.matches(text.suffix(), ALL) == matches_by_search(tokens, tokens)


@given(tokens=tokens_that_repeat, wanted=st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_finds_what_another_text_ends_with(tokens: list[int], wanted: list[int]) -> None:
    text, other = Text(ORDERS, MAX_LENGTH), Text(ORDERS, MAX_LENGTH)
    first = text.append_text(tokens)
    other.append(wanted)
    expected = [(length, place - MAX_LENGTH + first) for length, place in matches_by_search(tokens, wanted)]
    assert text.matches(other.suffix(), ALL) == expected


def test_how_tokens_came_makes_no_difference() -> None:
    """Not even to which strangers share a chain, which a search that looks at few places would show."""
    noise = random.Random(2)
    tokens = [noise.randrange(50_000) for _ in range(5000)]
    at_once, one_by_one = Text(ORDERS, MAX_LENGTH), Text(ORDERS, MAX_LENGTH)
    at_once.append(tokens)
    for token_id in tokens:
        one_by_one.append([token_id])
    for start in range(300):
        other = Text(ORDERS, MAX_LENGTH)
        other.append(tokens[start : start + 3])
        assert at_once.matches(other.suffix(), 1) == one_by_one.matches(other.suffix(), 1)


@pytest.mark.parametrize("max_length", [5, 60, 64, 500])
def test_however_far_back_places_are_compared(max_length: int) -> None:
    tokens = [*range(100), *range(50)]
    at_once, in_pieces = Text(ORDERS, max_length), Text(ORDERS, max_length)
    at_once.append(tokens)
    for start in range(0, len(tokens), 7):
        in_pieces.append(tokens[start : start + 7])
    for text in (at_once, in_pieces):
        assert text.matches(text.suffix(), 1) == [(min(50, max_length), max_length + 50)]


def test_the_latest_places_come_first_and_no_more_than_asked() -> None:
    text = Text((2,), MAX_LENGTH)
    text.append([1, 2, 3] * 10 + [1, 2])
    first, second = text.matches(text.suffix(), 2)
    assert (first[1], second[1]) == (MAX_LENGTH + 29, MAX_LENGTH + 26)


def test_a_match_does_not_cross_from_one_text_to_the_next() -> None:
    text = Text((2,), MAX_LENGTH)
    first = text.append_text([1, 2])
    second = text.append_text([3, 4, 5])
    for wanted, places in (([1, 2], []), ([2, 3], []), ([3, 4], [second + 2])):
        other = Text((2,), MAX_LENGTH)
        other.append(wanted)
        assert [position for _, position in text.matches(other.suffix(), ALL)] == places
    assert text.continuation(first, 8).tolist() == [1, 2]
    assert text.continuation(second, 8).tolist() == [3, 4, 5]
    assert text.continuation(second + 1, 1).tolist() == [4]


def test_a_text_that_reached_its_end_goes_on_as_it_repeats() -> None:
    text = Text((2,), MAX_LENGTH)
    text.append([9, 1, 2, 3])
    assert text.continuation(MAX_LENGTH + 1, 8).tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


def test_what_was_taken_is_not_found_again() -> None:
    text = Text((2,), MAX_LENGTH)
    text.append_text([1, 2, 3])
    start = text.append_text([1, 2, 4])
    assert text.take(start, start + 3).tolist() == [1, 2, 4]
    other = Text((2,), MAX_LENGTH)
    other.append([1, 2])
    assert [text.tokens[position] for _, position in text.matches(other.suffix(), ALL)] == [3]


@pytest.mark.parametrize("piece", [1, 1000])
@pytest.mark.parametrize("count", [0, 50, 1025, 6000])
def test_memory_is_what_it_says(piece: int, count: int) -> None:
    noise = random.Random(count)
    tokens = [noise.randrange(50_000) for _ in range(count)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        text = Text(ORDERS, MAX_LENGTH)
        for start in range(0, count, piece):
            text.append(tokens[start : start + piece])
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held / 2 <= text.memory_bytes <= held * 2
    assert text.memory_bytes <= BYTES_PER_TOKEN * (count + MAX_LENGTH) + BYTES_PER_TEXT
