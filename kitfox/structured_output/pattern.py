"""Regular expressions in one plain dialect.

Schemas are written in ECMA-262's dialect, checked in Python's or another, and compiled by a backend with its own ideas.
Where dialects differ (which characters `\\w` is, say), what is read here means what all of them agree on: it may match
less than one of them would, and never more.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import NamedTuple

from kitfox.constraint import GrammarError
from kitfox.structured_output.schema import MAX_COUNT

Ranges = tuple[tuple[int, int], ...]
"""Code points, as (first, last) in order and apart from each other."""

_LAST = 0x10FFFF
_ASCII: Ranges = ((0, 0x7F),)
_BEYOND_ASCII: Ranges = ((0x80, _LAST),)
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
)
_SPACE_TO_SOME: Ranges = (*_SPACE, (0x1C, 0x1F), (0x85, 0x85), (0x180E, 0x180E), (0xFEFF, 0xFEFF))
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_SURROGATES: Ranges = ((0xD800, 0xDFFF),)
_ESCAPED_IN_JSON: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}


def _union(*sets: Ranges) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pair for ranges in sets for pair in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def _complement(ranges: Ranges) -> Ranges:
    gaps: list[tuple[int, int]] = []
    start = 0
    for first, last in ranges:
        if first > start:
            gaps.append((start, first - 1))
        start = last + 1
    if start <= _LAST:
        gaps.append((start, _LAST))
    return tuple(gaps)


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    return _complement(_union(_complement(ranges), others))


_ANY_BUT_LINE_ENDS = _without(_complement(_LINE_ENDS), _SURROGATES)

# What every dialect takes an escape to match, and what any of them does.
_CLASSES: dict[str, tuple[Ranges, Ranges]] = {
    "d": (_DIGITS, _union(_DIGITS, _BEYOND_ASCII)),
    "w": (_WORD, _union(_WORD, _BEYOND_ASCII)),
    "s": (_SPACE, _union(_SPACE_TO_SOME)),
    "D": (_without(_ASCII, _DIGITS), _complement(_DIGITS)),
    "W": (_without(_ASCII, _WORD), _complement(_WORD)),
    "S": (_complement(_union(_SPACE_TO_SOME)), _complement(_SPACE)),
}


# One character or class, as this module writes it.
_UNIT = r"[^\\^$.|?*+()\[\]{}]|\[(?:[^\\\]]|\\.)*\]|\\[^u]|\\u...."


class _Part(NamedTuple):
    """A piece of a pattern in the plain dialect. text: None where it cannot match. Lengths are in characters."""

    text: str | None
    min_length: int
    max_length: int | None  # None is no limit


_NOTHING = _Part("", 0, 0)
_IMPOSSIBLE = _Part(None, 0, 0)


class Pattern:
    """What a pattern matches as a whole, once read.

    Attributes:
        text: the plain dialect: literals, classes, groups, alternatives and counts; no anchors.
        min_length: in characters.
        max_length: None is no limit.
    """

    def __init__(self, part: _Part):
        assert part.text is not None
        self.text: str = part.text
        self.min_length = part.min_length
        self.max_length = part.max_length

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.text)

    def matches(self, text: str) -> bool:
        return self._compiled.fullmatch(text) is not None

    def of_length(self, min_length: int, max_length: int | None) -> Pattern | None:
        """The same for texts of some length; None where that is not known how to say. May match nothing any more."""
        if self.min_length >= min_length and (
            max_length is None or (self.max_length is not None and self.max_length <= max_length)
        ):
            return self
        unit = re.fullmatch(rf"({_UNIT})(?:[*+?]|\{{[0-9,]+\}})", self.text)
        if unit is None:
            return None
        least = max(min_length, self.min_length)
        most = min((most for most in (max_length, self.max_length) if most is not None), default=None)
        if most is not None and most < least:
            raise GrammarError("matches nothing of the length asked for")
        return Pattern(_repeated(_Part(unit[1], 1, 1), least, most))

    @property
    def matches_all(self) -> bool:
        """Whether it is evident that every text matches, but for line ends."""
        return self.text in _ANY_TEXT


def read_pattern(pattern: str, *, anywhere: bool = False, in_json: bool = False) -> Pattern:
    """Read a pattern.

    Args:
        anywhere: it may match anywhere in the text, as a schema's `pattern`, but where `^` and `$` say otherwise.
        in_json: match only texts that need no escape in a JSON string.

    Raises:
        GrammarError: it is none, or says something that no regular language can, or cannot match.
    """
    part = _Reader(pattern, in_json).read(anywhere)
    if part.text is None:
        raise GrammarError("matches nothing" + (" that needs no escape in JSON" if in_json else ""))
    return Pattern(part)


def text_without(names: list[str]) -> Pattern:
    """What matches each text that needs no escape in JSON and is none of some names."""
    tree: dict[str, dict] = {}
    ends: set[int] = set()
    for name in names:
        node = tree
        for character in name:
            node = node.setdefault(character, {})
        ends.add(id(node))
    rest = _class_text(_without(_complement(_SURROGATES), _ESCAPED_IN_JSON))

    def other_than(node: dict[str, dict]) -> str:
        branches = []
        taken: list[tuple[int, int]] = []
        for character, child in node.items():
            here: Ranges = ((ord(character), ord(character)),)
            if not _without(here, _union(_ESCAPED_IN_JSON, _SURROGATES)):
                continue  # it is always escaped, and so never taken for the name
            taken += here
            branches.append(_class_text(here) + other_than(child))
        others = _without(_complement(_SURROGATES), _union(_ESCAPED_IN_JSON, tuple(taken)))
        branches.append(_class_text(others) + rest + "*")
        text = "(?:" + "|".join(branches) + ")"
        return text if id(node) in ends else text + "?"

    return Pattern(_Part(other_than(tree), 0, None))


def text_of_length(min_length: int, max_length: int | None) -> Pattern:
    """What matches each text of some length, in characters, that needs no escape in JSON."""
    character = _class_text(_without(_complement(_SURROGATES), _ESCAPED_IN_JSON))
    return Pattern(_repeated(_Part(character, 1, 1), min_length, max_length))


def _class_text(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _character_text(ranges[0][0])
    is_negated = ranges[-1][1] == _LAST
    shown = _complement(_union(ranges, _SURROGATES)) if is_negated else ranges
    inner = "".join(
        _character_text(first) if first == last else f"{_character_text(first)}-{_character_text(last)}"
        # xgrammar reads a hexadecimal digit behind an escape as a part of it, so those come first.
        for first, last in sorted(shown, key=lambda pair: (chr(pair[0]) not in "0123456789ABCDEFabcdef", pair))
    )
    return f"[{'^' if is_negated else ''}{inner}]"


def _character_text(code: int) -> str:
    character = chr(code)
    if 0x20 <= code < 0x7F:
        return "\\" + character if character in "\\^$.|?*+()[]{}-" else character
    return f"\\u{code:04x}" if code <= 0xFFFF else character


_ANY_TEXT = frozenset(_class_text(_without(_ANY_BUT_LINE_ENDS, excluded)) + "*" for excluded in ((), _ESCAPED_IN_JSON))


def _repeated(part: _Part, least: int, most: int | None) -> _Part:
    if part.text is None or most == 0:
        return _NOTHING if least == 0 else _IMPOSSIBLE
    if not part.text:
        return _NOTHING
    counts = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((least, most))
    if counts is None:
        counts = f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
    return _Part(
        _grouped(part.text) + counts if counts else part.text,
        part.min_length * least,
        None if most is None or part.max_length is None else part.max_length * most,
    )


def _grouped(text: str) -> str:
    return text if re.fullmatch(_UNIT, text) else f"(?:{text})"


def _either(parts: list[_Part]) -> _Part:
    possible = [part for part in parts if part.text is not None]
    if not possible:
        return _IMPOSSIBLE
    longest = [part.max_length for part in possible]
    texts = list(dict.fromkeys(part.text for part in possible if part.text))
    text = texts[0] if len(texts) == 1 else "(?:" + "|".join(texts) + ")" if texts else ""
    if text and any(not part.text for part in possible):
        text = _grouped(text) + "?"
    return _Part(
        text,
        min(part.min_length for part in possible),
        None if None in longest else max(length for length in longest if length is not None),
    )


def _joined(parts: list[_Part]) -> _Part:
    if any(part.text is None for part in parts):
        return _IMPOSSIBLE
    longest = [part.max_length for part in parts]
    texts = [part.text or "" for part in parts]
    return _Part(
        "".join(text for text, last in zip(texts, ["", *texts], strict=False) if text != last or text[-2:] != "]*"),
        sum(part.min_length for part in parts),
        None if None in longest else sum(length or 0 for length in longest),
    )


class _Reader:
    """Recursive descent; `check_format` bounds how deep."""

    def __init__(self, pattern: str, in_json: bool):
        self._pattern = pattern
        self._position = 0
        self._excluded = _union(_SURROGATES, _ESCAPED_IN_JSON) if in_json else _SURROGATES

    def read(self, anywhere: bool) -> _Part:
        around = _repeated(self._one_of(_ANY_BUT_LINE_ENDS), 0, None) if anywhere else _NOTHING
        alternatives = []
        while True:
            before = _NOTHING if self._take("^") else around
            body = self._sequence()
            after = around
            if self._take("$"):
                after = _NOTHING
            if self._next not in ("", "|"):
                raise self._error(f"{self._next!r} is where only an end can be")
            alternatives.append(_joined([before, body, after]))
            if not self._take("|"):
                return _either(alternatives)

    @property
    def _next(self) -> str:
        return self._pattern[self._position : self._position + 1]

    def _take(self, text: str) -> bool:
        if self._pattern.startswith(text, self._position):
            self._position += len(text)
            return True
        return False

    def _error(self, problem: str) -> GrammarError:
        return GrammarError(f"is no pattern that can be enforced: at character {self._position + 1}, {problem}")

    def _one_of(self, ranges: Ranges) -> _Part:
        allowed = _without(ranges, self._excluded)
        return _Part(_class_text(allowed), 1, 1) if allowed else _IMPOSSIBLE

    def _sequence(self) -> _Part:
        parts = []
        while self._next not in ("", "|", ")", "$"):
            parts.append(self._quantified(self._atom()))
        return _joined(parts)

    def _atom(self) -> _Part:
        if self._take("("):
            return self._group()
        if self._take("["):
            return self._class()
        if self._take("."):
            return self._one_of(_ANY_BUT_LINE_ENDS)
        if self._take("\\"):
            return self._one_of(self._escape(in_class=False)[0])
        character = self._next
        if character in ("*", "+", "?"):
            raise self._error(f"{character!r} has nothing to repeat")
        if character == "^":
            raise self._error("'^' is not at the start")
        self._position += 1
        return self._one_of(((ord(character), ord(character)),))

    def _group(self) -> _Part:
        if self._take("?"):
            name = re.compile(r":|P?<[A-Za-z_]\w*>", re.ASCII).match(self._pattern, self._position)
            if name is None:
                raise self._error("look-around and flags are not supported")
            self._position = name.end()
        alternatives = [self._sequence()]
        while self._take("|"):
            alternatives.append(self._sequence())
        if self._next == "$":
            raise self._error("'$' is not at the end")
        if not self._take(")"):
            raise self._error("a group is not closed")
        return _either(alternatives)

    def _quantified(self, part: _Part) -> _Part:
        counts = re.compile(r"[*+?]|\{(\d+)(,?)(\d*)\}", re.ASCII).match(self._pattern, self._position)
        if counts is None:
            return part
        self._position = counts.end()
        self._take("?")  # a lazy match matches the same texts
        if self._next in ("*", "+") or self._next == "?":
            raise self._error("a repetition is repeated")
        least: int
        most: int | None
        if counts[0] in "*+?":
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[counts[0]]
        else:
            least = int(counts[1])
            most = int(counts[3]) if counts[3] else None if counts[2] else least
        if most is not None and most < least:
            raise self._error(f"{counts[0]} is from more to less")
        if max(least, most or 0) > MAX_COUNT:
            raise self._error(f"{counts[0]} is above the limit, {MAX_COUNT}")
        return _repeated(part, least, most)

    def _class(self) -> _Part:
        is_negated = self._take("^")
        members: list[Ranges] = []
        if self._next == "]":
            raise self._error("a class is empty")
        while not self._take("]"):
            first = self._class_member(is_negated)
            single = len(first) == 1 and first[0][0] == first[0][1]
            if single and self._next == "-" and self._pattern[self._position + 1 : self._position + 2] not in ("]", ""):
                self._position += 1
                last = self._class_member(is_negated)
                if len(last) != 1 or last[0][0] != last[0][1] or last[0][0] < first[0][0]:
                    raise self._error("a range has no end, or one before its start")
                first = ((first[0][0], last[0][0]),)
            members.append(first)
        ranges = _union(*members)
        return self._one_of(_complement(ranges) if is_negated else ranges)

    def _class_member(self, is_negated: bool) -> Ranges:
        if self._take("\\"):
            return self._escape(in_class=True)[1 if is_negated else 0]
        character = self._next
        if not character:
            raise self._error("a class is not closed")
        if character == "[" and self._pattern.startswith("[:", self._position):
            raise self._error("POSIX classes are not supported")
        self._position += 1
        return ((ord(character), ord(character)),)

    def _escape(self, in_class: bool) -> tuple[Ranges, Ranges]:
        """Behind a backslash: what every dialect takes it to match, and what any does."""
        character = self._next
        if character in _CLASSES and character:
            self._position += 1
            return _CLASSES[character]
        code: int | None = None
        hexadecimal = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})").match(self._pattern, self._position)
        if hexadecimal is not None:
            self._position = hexadecimal.end()
            code = int(hexadecimal[1] or hexadecimal[2], 16)
        elif character == "b" and in_class:
            code = 0x08
        elif character in _CONTROLS and character:
            code = _CONTROLS[character]
            if character == "0" and self._pattern[self._position + 1 : self._position + 2].isdigit():
                code = None
        elif character and not character.isalnum():
            code = ord(character)
        if code is None:
            raise self._error(f"'\\{character}' is not supported")
        if hexadecimal is None:
            self._position += 1
        return ((code, code),), ((code, code),)
