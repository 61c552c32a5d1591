"""Regular expressions that end an answer, matched a character at a time in time that no pattern can blow up.

The syntax is Python's, without what looks at later or earlier text: lookaround, `\\b`, `\\B`, back references, atomic
groups and possessive repeats are refused, and so is a pattern that matches the empty text. `$` and `\\Z` are the end of
the text so far, where every match is complete: `a$` is `a`, and `a$b` nothing. The patterns of a request become one
nondeterministic automaton: a character costs at most a visit of each of its MAX_STATES states, and no text before is
read again, so what is found does not depend on how the text was split.
Source of the method: Ken Thompson, https://doi.org/10.1145/363347.363387.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from re import _constants as syntax  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Literal

from kitfox.errors import InvalidParameterError

MAX_STATES = 1024
MAX_HELD_CHARS = 256

_Test = Callable[[str], bool]
_EndKind = Literal["line", "last line", "text"]  # (?m)$, $ and \Z

_CATEGORIES: dict[Any, _Test] = {
    syntax.CATEGORY_DIGIT: str.isdecimal,
    syntax.CATEGORY_SPACE: str.isspace,
    syntax.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
}
_NEGATED_CATEGORIES = {
    syntax.CATEGORY_NOT_DIGIT: syntax.CATEGORY_DIGIT,
    syntax.CATEGORY_NOT_SPACE: syntax.CATEGORY_SPACE,
    syntax.CATEGORY_NOT_WORD: syntax.CATEGORY_WORD,
}


class StopRegexes:
    """Finds the first match of any of some patterns in a growing text and holds back what could become one.

    The match that is complete first wins, of those complete at the same character the one that starts first. What may
    become part of a match waits, but never more than MAX_HELD_CHARS characters; what is shown stays.
    """

    def __init__(self, automaton: StopAutomaton, *, include_in_output: bool):
        self._automaton = automaton
        self._include = include_in_output
        self._starts: dict[int, int] = {}  # active state -> where its match would start; in the order of the starts
        self._held = ""
        self._position = 0  # characters seen
        self._settled = 0  # characters that no match takes back
        self._previous = ""
        self.matched: str | None = None

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """Take new text, return what may be shown. After a match `matched` is set and nothing more comes out."""
        if not may_stop:
            self._starts.clear()
            self._position += len(text)
            self._settled = self._position
            self._previous = text[-1:] or self._previous
            return self.flush() + text
        start_of_held = self._position - len(self._held)
        self._held += text
        for char in text:
            found = self._advance(char)
            if found is not None:
                match_start, self.matched = found
                end = self._position if self._include else max(match_start, self._settled)
                return self.flush()[: end - start_of_held]
            earliest = next(iter(self._starts.values()), self._position)
            self._settled = max(self._settled, earliest, self._position - MAX_HELD_CHARS)
        num_shown = self._settled - start_of_held
        shown, self._held = self._held[:num_shown], self._held[num_shown:]
        return shown

    def flush(self) -> str:
        """The held-back text, when nothing more will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> tuple[int, str] | None:
        """Take one character; returns where a match that it completes starts, and the match's pattern."""
        automaton = self._automaton
        automaton.enter(automaton.entry, self._position, self._previous, self._starts)
        reached: dict[int, int] = {}
        for state, start in self._starts.items():
            test = automaton.tests[state]
            if test is not None and test(char):
                automaton.enter(automaton.targets[state][0], start, char, reached)
        self._starts = reached
        self._position += 1
        self._previous = char
        ends = [(reached[state], state) for state in automaton.patterns if state in reached]
        if not ends:
            return None
        match_start, state = min(ends)
        return match_start, automaton.patterns[state]


class StopAutomaton:
    """The states of all patterns.

    Attributes:
        tests: of each state, what the next character must be; None where the state passes without one.
        targets: of each state, where it leads.
        patterns: accepting state -> its pattern.
    """

    def __init__(self, patterns: Iterable[str]):
        """Raises InvalidParameterError for a pattern that is wrong, not supported or too large."""
        self.tests: list[_Test | None] = []
        self.targets: list[tuple[int, ...]] = []
        self.patterns: dict[int, str] = {}
        self._line_starts: dict[int, bool] = {}  # state that only passes at a start -> whether of any line
        self._ends: dict[int, tuple[int, _EndKind]] = {}  # unsettled state that only passes at an end -> what follows
        entries = [self._compile(pattern) for pattern in patterns]
        self.entry = self._state(None, *entries)

    def enter(self, state: int, start: int, previous: str, active: dict[int, int]) -> None:
        """Activate a state and those it leads to without a character; an earlier start that is there stays.

        Args:
            previous: the character before this place; empty at the start of the text.
        """
        pending = [state]
        while pending:
            state = pending.pop()
            if state in active:
                continue
            any_line = self._line_starts.get(state)
            if any_line is not None and not (previous == "" or (any_line and previous == "\n")):
                continue
            active[state] = start
            if self.tests[state] is None:
                pending += self.targets[state]

    # ---- from a pattern to states -------------------------------------------------------------------------------

    def _compile(self, pattern: str) -> int:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of syntax that may change its meaning some day
                parsed = parser.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidParameterError("stop_regex", f"must be regular expressions ({error})", pattern) from None
        accepting = self._state(None)
        try:
            entry = self._sequence(parsed, parsed.state.flags, accepting)
            self._settle_ends(accepting)
        except NotImplementedError as error:
            raise InvalidParameterError("stop_regex", f"must not use {error}", pattern) from None
        reached: dict[int, int] = {}
        self.enter(entry, 0, "", reached)
        if accepting in reached:
            raise InvalidParameterError("stop_regex", "must not match the empty text", pattern)
        self.patterns[accepting] = pattern
        return entry

    def _state(self, test: _Test | None, *targets: int) -> int:
        if len(self.tests) >= MAX_STATES:
            limit = f"must need at most {MAX_STATES} states in all patterns together; shorten them or their repeats"
            raise InvalidParameterError("stop_regex", limit, f"more than {MAX_STATES}")
        self.tests.append(test)
        self.targets.append(targets)
        return len(self.tests) - 1

    def _sequence(self, items: Any, flags: int, following: int) -> int:
        """States for one item after the other, built from the last; returns the first."""
        for operation, argument in reversed(list(items)):
            following = self._item(operation, argument, flags, following)
        return following

    def _item(self, operation: Any, argument: Any, flags: int, following: int) -> int:
        if operation is syntax.SUBPATTERN:
            _, added, removed, items = argument
            return self._sequence(items, (flags | added) & ~removed, following)
        if operation is syntax.BRANCH:
            return self._state(None, *[self._sequence(items, flags, following) for items in argument[1]])
        if operation in (syntax.MAX_REPEAT, syntax.MIN_REPEAT):
            least, most, repeated = argument
            return self._repeat(least, most, repeated, flags, following)
        if operation is syntax.AT and argument in (syntax.AT_BEGINNING, syntax.AT_BEGINNING_STRING):
            state = self._state(None, following)
            self._line_starts[state] = argument is syntax.AT_BEGINNING and bool(flags & re.MULTILINE)
            return state
        if operation is syntax.AT and argument in (syntax.AT_END, syntax.AT_END_STRING):
            last: _EndKind = "line" if flags & re.MULTILINE else "last line"
            return self._end(following, "text" if argument is syntax.AT_END_STRING else last)
        if operation is syntax.ANY:
            any_char = (lambda _: True) if flags & re.DOTALL else (lambda char: char != "\n")
            return self._state(any_char, following)
        members = {
            syntax.LITERAL: [(syntax.LITERAL, argument)],
            syntax.NOT_LITERAL: [(syntax.NEGATE, None), (syntax.LITERAL, argument)],
            syntax.IN: argument,
        }.get(operation)
        if members is None:
            name = argument if operation is syntax.AT else operation
            raise NotImplementedError(str(name).lower())
        return self._state(_member_of(members, flags), following)

    def _repeat(self, least: int, most: Any, items: Any, flags: int, following: int) -> int:
        if most is syntax.MAXREPEAT:
            loop = self._state(None)
            self.targets[loop] = (self._sequence(items, flags, loop), following)
            following = loop
        else:
            end = following
            for _ in range(most - least):
                following = self._state(None, self._sequence(items, flags, following), end)
        for _ in range(least):
            before = self._sequence(items, flags, following)
            if before == following:  # nothing is repeated
                break
            following = before
        return following

    def _end(self, following: int, kind: _EndKind) -> int:
        state = self._state(None)
        self._ends[state] = (following, kind)
        return state

    def _settle_ends(self, accepting: int) -> None:
        """Lead each end of the pattern on, now that all of what follows is there.

        At the end of the text so far only a complete match can follow; at that of a line also the newline.
        """
        unsettled = list(self._ends)
        while unsettled:
            end = unsettled.pop()
            led_to: list[int] = []
            pending = [(end, True, True)]  # state, whether a newline may be next, whether more may come behind that
            seen: set[tuple[int, bool, bool]] = set()
            while pending:
                place = pending.pop()
                if place in seen:
                    continue
                seen.add(place)
                state, newline, more = place
                test = self.tests[state]
                if state in self._line_starts:
                    raise NotImplementedError("^ right behind $")
                if state == accepting:
                    led_to.append(accepting)
                elif state in self._ends:
                    following, kind = self._ends[state]
                    pending.append((following, newline and kind != "text", more and kind == "line"))
                elif test is None:
                    pending += [(target, newline, more) for target in self.targets[state]]
                elif newline and test("\n"):
                    (behind,) = self.targets[state]
                    if not more:
                        behind = self._end(behind, "text")
                        unsettled.append(behind)
                    led_to.append(self._state("\n".__eq__, behind))
            self.targets[end] = tuple(led_to)
        self._ends.clear()


def _member_of(members: list[tuple[Any, Any]], flags: int) -> _Test:
    """Whether a character is in a set, as the parser spells it."""
    negated = members[0][0] is syntax.NEGATE
    tests = [_member_test(kind, argument, flags) for kind, argument in members[negated:]]
    if flags & re.IGNORECASE:
        return lambda char: negated != any(test(c) for c in {char, char.lower(), char.upper()} for test in tests)
    if len(tests) == 1 and not negated:
        return tests[0]
    return lambda char: negated != any(test(char) for test in tests)


def _member_test(kind: Any, argument: Any, flags: int) -> _Test:
    if kind is syntax.LITERAL:
        return chr(argument).__eq__
    if kind is syntax.RANGE:
        low, high = map(chr, argument)
        return lambda char: low <= char <= high
    negated = argument in _NEGATED_CATEGORIES
    test = _CATEGORIES[_NEGATED_CATEGORIES.get(argument, argument)]
    ascii_only = bool(flags & re.ASCII)
    return lambda char: negated != (test(char) and (char.isascii() or not ascii_only))
