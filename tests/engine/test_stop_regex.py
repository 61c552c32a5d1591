"""Stop patterns: what Python's own engine finds first, in any split of the text, and at a bounded cost."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitfox.engine.output_processor import StopStrings, StopTexts
from kitfox.engine.stop_regex import MAX_HELD_CHARS, MAX_STATES, StopAutomaton, StopRegexes
from kitfox.errors import InvalidParameterError


def cut(patterns: tuple[str, ...], chunks: list[str], *, include: bool = False) -> tuple[str, str | None]:
    finder = StopRegexes(StopAutomaton(patterns), include_in_output=include)
    shown = ""
    for chunk in chunks:
        shown += finder.add(chunk)
        if finder.matched is not None:
            return shown, finder.matched
    return shown + finder.flush(), None


def expected_cut(patterns: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """By definition: of all matches those that end first, of these those that start first, then the pattern's turn."""
    matches = [
        (end, start, pattern)
        for end in range(1, len(text) + 1)
        for start in range(end)
        for pattern in patterns
        if re.compile(pattern).fullmatch(text[:end], start)
    ]
    if not matches:
        return text, None
    _, start, pattern = min(matches, key=lambda match: match[:2])
    return text[:start], pattern


@pytest.mark.parametrize(
    ("pattern", "text", "shown"),
    [
        (r"\n\s*User:", "Hello\n  User: you", "Hello"),
        (r"(?i)e[nm]d\d{2,3}", "the END123", "the "),
        (r"[^a-y ]", "so lazy", "so la"),
        (r"(?i)[^a]", "aAaB", "aAa"),
        (r"(?a:\d)\D", "\u0663x 3x", "\u0663x "),
        (r"\w\.", "a+. é. b.", "a+. "),
        (r"a.b", "a\nb acb", "a\nb "),
        (r"(?s)a.b", "a\nb", ""),
        (r"^foo", "xfoo\nfoo", "xfoo\nfoo"),
        (r"(?m)^foo", "xfoo\nfoo", "xfoo\n"),
        (r"^foo|b+?c", "foo", ""),
        (r"(?:ab){2}|(?P<x>c|d)e", "abxababde", "abx"),
        (r"(?:){1000000000}x", "yx", "y"),
        (r"\S+@\S+\.\w", "write to me@here.org", "write to "),
        (r"a$", "xab", "x"),
        (r"a\Z|c", "xab", "x"),
        (r"[!?]+$", "no. yes!!", "no. yes"),
        (r"a$b", "ab", "ab"),
        (r"a\Z\n", "a\n", "a\n"),
        (r"^b$", "ab", "ab"),
        (r"x$\n", "x\ny", ""),
        (r"x$\ny", "x\ny", "x\ny"),
        (r"(?m)x$\ny", "x\ny", ""),
        (r"(?m)x$\s+^y", "x\ny", ""),
        (r"(?:x$){2}", "xx", "xx"),
    ],
)
def test_what_is_cut(pattern: str, text: str, shown: str) -> None:
    for chunks in ([text], list(text)):
        assert cut((pattern,), chunks) == (shown, None if shown == text else pattern)


PATTERNS = ["a+b", "ab|ba", "b.a", "[^ab]", "a{2,3}", "(?:ab)+c", "(a|b)*cc", "^b", r"(?m)^a\n", "a?bc??"]
PATTERNS += ["a$", r"b\Z", r"b$\n", r"(?m)(?:a$\n?)+b", r"[^a]+?$\s*c", r"(?m)a$\n^b", r"(?m:b$)\n+$", r"a\Z.?$|cb$"]


@given(
    text=st.text("abc\n", max_size=20),
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True),
    cuts=st.lists(st.integers(0, 20), max_size=8),
)
def test_every_split_gives_what_the_definition_gives(text: str, patterns: list[str], cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(c for c in cuts if c <= len(text))})
    chunks = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert cut(tuple(patterns), chunks) == expected_cut(tuple(patterns), text)


def test_the_match_can_be_kept() -> None:
    assert cut(("b+c",), ["abbcd"], include=True) == ("abbc", "b+c")


def test_what_may_become_a_match_waits_but_not_for_ever() -> None:
    finder = StopRegexes(StopAutomaton((r"<[^>]*>",)), include_in_output=False)
    assert finder.add("x<y") == "x"
    assert finder.add("z") == ""
    assert len(finder.add("z" * 1000)) == 1000 + 3 - MAX_HELD_CHARS
    assert finder.add("end>") == "zzz"
    assert finder.matched == r"<[^>]*>"
    text = "<" + "a" * 400 + ">"
    assert cut((r"<[^>]*>",), [text]) == cut((r"<[^>]*>",), list(text))


def test_no_match_before_min_tokens() -> None:
    finder = StopRegexes(StopAutomaton(("a+b",)), include_in_output=False)
    assert finder.add("aabaa", may_stop=False) == "aabaa"
    assert finder.add("b") == "b"
    assert finder.add("cab") == "c"


def test_stop_strings_and_patterns_together() -> None:
    def ended(text: str) -> tuple[str, str | None]:
        regexes = StopRegexes(StopAutomaton((r"[0-9]{2}",)), include_in_output=False)
        both = StopTexts(StopStrings(("END",), include_in_output=False), regexes)
        shown = ""
        for char in text:
            shown += both.add(char)
            if both.matched is not None:
                return shown, both.matched
        return shown + both.flush(), both.matched

    assert ended("a1END22") == ("a1", "END")
    assert ended("a12END") == ("a", "[0-9]{2}")
    assert ended("a1 EN2") == ("a1 EN2", None)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "must be regular expressions"),
        ("a{99999999999}", "must be regular expressions"),
        ("(?m)a$^", "must not use \\^ right behind \\$"),
        ("a*$", "empty"),
        ("$", "empty"),
        (r"\bx", "at_boundary"),
        ("(?=a)b", "assert"),
        ("(?<!a)b", "assert_not"),
        (r"(a)\1", "groupref"),
        ("(?>a)b", "atomic_group"),
        ("a++b", "possessive_repeat"),
        ("a*", "empty"),
        ("^", "empty"),
        ("(?:a{1000}){1000}", f"{MAX_STATES} states"),
        ("a{2000}", f"{MAX_STATES} states"),
    ],
)
def test_what_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(InvalidParameterError, match=reason) as refused:
        StopAutomaton((pattern,))
    assert refused.value.param == "stop_regex"


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a?){300}b", "(.*)*(.*)*(.*)*b", "([ab]{1,20}){1,20}c"])
def test_no_pattern_blows_up(pattern: str) -> None:
    finder = StopRegexes(StopAutomaton((pattern,)), include_in_output=False)
    start = time.process_time()
    finder.add("a" * 200)
    assert time.process_time() - start < 2  # one that tries every way needs longer than there is time
