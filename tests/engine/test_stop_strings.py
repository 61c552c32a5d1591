"""Stop strings: text decides, not chunks, tokens or the order of the list."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kitfox.engine.output_processor import StopStrings


def cut(stops: tuple[str, ...], chunks: list[str], *, include: bool = False) -> tuple[str, str | None]:
    finder = StopStrings(stops, include_in_output=include)
    shown = ""
    for chunk in chunks:
        shown += finder.add(chunk)
        if finder.matched is not None:
            return shown, finder.matched
    return shown + finder.flush(), None


def test_a_stop_across_chunks_never_leaks():
    finder = StopStrings(("\nUser:",), include_in_output=False)
    assert finder.add("Hello\nUs") == "Hello"
    assert finder.add("er") == ""
    assert finder.add(":") == ""
    assert finder.matched == "\nUser:"


def test_a_false_start_is_shown_later():
    finder = StopStrings(("Observation",), include_in_output=False)
    assert finder.add("Obser") == ""
    assert finder.add("ver ") == "Observer "


def test_a_stop_inside_a_chunk():
    assert cut(("Pari",), ["It is Paris, of course"]) == ("It is ", "Pari")
    assert cut(("Pari",), ["It is Paris"], include=True) == ("It is Pari", "Pari")


def test_the_match_that_is_complete_first_wins_whatever_the_order():
    text = "so k=1 was"
    for stops in (("k=1 was", "1"), ("1", "k=1 was")):
        assert cut(stops, [text]) == ("so k=", "1")
        assert cut(stops, list(text)) == ("so k=", "1")
    assert cut(("b", "ab"), ["xab"]) == ("x", "ab")


def test_no_stop_before_min_tokens():
    finder = StopStrings(("a",), include_in_output=False)
    assert finder.add("aaa", may_stop=False) == "aaa"
    assert finder.add("ba") == "b"


@given(
    text=st.text("ab\n", max_size=30),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_every_split_gives_what_the_whole_gives(text: str, stops: list[str], cuts: list[int]):
    borders = sorted({0, len(text), *(c for c in cuts if c <= len(text))})
    chunks = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert cut(tuple(stops), chunks) == cut(tuple(reversed(stops)), [text])
