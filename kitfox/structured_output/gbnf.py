"""Grammars in llama.cpp's notation (GBNF), which XGrammar reads too: from text to rules."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kitfox.constraint import GrammarError

_MAX_CODE_POINT = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*|[0-9][A-Za-z0-9_.-]*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n\r]*)*")
_COUNTS = re.compile(r"\{\s*(\d*)\s*(?:(,)\s*(\d*)\s*)?\}")
_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]", "-": "-", "^": "^"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text, which may be empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Characters:
    """One character in, or outside of, ranges of code points, both ends included."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class RuleName:
    name: str


@dataclass(frozen=True, slots=True)
class Concatenation:
    elements: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    elements: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """max_count None is no limit."""

    element: Expression
    min_count: int
    max_count: int | None


Expression = Literal | Characters | RuleName | Concatenation | Choice | Repetition


def parse_gbnf(text: str) -> dict[str, Expression]:
    """The rules by name, of which `root` is one; every name that a rule uses is there.

    Raises:
        GrammarError: the text is no such grammar.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise GrammarError("the grammar has no rule named root")
    for name, expression in rules.items():
        for used in names_in(expression):
            if used not in rules:
                raise GrammarError(f"rule {name} uses {used}, which the grammar does not define")
    return rules


def names_in(expression: Expression) -> set[str]:
    """The rules that an expression uses."""
    match expression:
        case RuleName(name=name):
            return {name}
        case Concatenation(elements=elements) | Choice(elements=elements):
            return set().union(*map(names_in, elements))
        case Repetition(element=element):
            return names_in(element)
        case _:
            return set()


class _Parser:
    def __init__(self, text: str):
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, Expression]:
        rules: dict[str, Expression] = {}
        self._skip_space()
        while self._at < len(self._text):
            name = self._rule_start()
            if name is None:
                raise self._error("a rule (name ::= ...) is expected")
            if name in rules:
                raise self._error(f"rule {name} is defined twice")
            rules[name] = self._choice()
        return rules

    def _rule_start(self) -> str | None:
        """The name of the rule that begins here, which is then read; None if none does."""
        start = self._at
        name = self._match(_NAME)
        if name is not None:
            self._skip_space()
            if self._text.startswith("::=", self._at):
                self._at += 3
                self._skip_space()
                return name
        self._at = start
        return None

    def _choice(self) -> Expression:
        alternatives = [self._concatenation()]
        while self._peek() == "|":
            self._at += 1
            self._skip_space()
            alternatives.append(self._concatenation())
        return alternatives[0] if len(alternatives) == 1 else Choice(tuple(alternatives))

    def _concatenation(self) -> Expression:
        elements: list[Expression] = []
        while self._peek() not in ("", "|", ")"):
            if self._begins_rule():
                break
            element = self._element()
            while (repeated := self._repetition(element)) is not None:
                element = repeated
            elements.append(element)
        if not elements:
            return Literal("")
        return elements[0] if len(elements) == 1 else Concatenation(tuple(elements))

    def _begins_rule(self) -> bool:
        start = self._at
        found = self._rule_start() is not None
        self._at = start
        return found

    def _element(self) -> Expression:
        character = self._peek()
        element: Expression
        if character == '"':
            element = self._literal()
        elif character == "[":
            element = self._characters()
        elif character == ".":
            self._at += 1
            element = Characters((), negated=True)
        elif character == "(":
            self._at += 1
            self._skip_space()
            if self._peek() in ("=", "?"):
                raise self._error("lookahead is not part of this notation")
            element = self._choice()
            self._expect(")")
        else:
            name = self._match(_NAME)
            if name is None:
                raise self._error(f"{character!r} is not expected")
            if self._peek() == "(":
                raise self._error(f"{name}(...) is not part of llama.cpp's notation")
            element = RuleName(name)
        self._skip_space()
        return element

    def _repetition(self, element: Expression) -> Expression | None:
        character = self._peek()
        if character in ("*", "+", "?"):
            self._at += 1
            self._skip_space()
            return Repetition(element, int(character == "+"), 1 if character == "?" else None)
        if character != "{":
            return None
        match = _COUNTS.match(self._text, self._at)
        if match is None or not (match[1] or match[3]):
            raise self._error("{m}, {m,} or {m,n} is expected")
        self._at = match.end()
        self._skip_space()
        min_count = int(match[1] or 0)
        max_count = min_count if match[2] is None else int(match[3]) if match[3] else None
        if max_count is not None and max_count < min_count:
            raise self._error(f"{{{min_count},{max_count}}} has its bounds the wrong way round")
        return Repetition(element, min_count, max_count)

    def _literal(self) -> Literal:
        self._at += 1
        characters = []
        while (character := self._peek()) != '"':
            if character in ("", "\n"):
                raise self._error('a text lacks its closing "')
            characters.append(chr(self._code_point()))
        self._at += 1
        return Literal("".join(characters))

    def _characters(self) -> Characters:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges = []
        while self._peek() != "]":
            first = last = self._code_point()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._code_point()
            if last < first:
                raise self._error("a range of characters runs backwards")
            ranges.append((first, last))
        self._at += 1
        if not ranges and not negated:
            raise self._error("[] matches no character")
        return Characters(tuple(ranges), negated)

    def _code_point(self) -> int:
        character = self._peek()
        if character == "":
            raise self._error("the grammar ends too early")
        self._at += 1
        if character != "\\":
            return ord(character)
        escape = self._peek()
        self._at += 1
        if escape in _PLAIN_ESCAPES and escape != "":
            return ord(_PLAIN_ESCAPES[escape])
        length = _HEX_ESCAPES.get(escape)
        digits = self._text[self._at : self._at + (length or 0)]
        if length is None or not re.fullmatch(rf"[0-9A-Fa-f]{{{length}}}", digits):
            raise self._error(f"\\{escape} is no escape of this notation")
        self._at += length
        code = int(digits, 16)
        if code > _MAX_CODE_POINT or code in _SURROGATES:
            raise self._error(f"\\{escape}{digits} is no character")
        return code

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        return match[0]

    def _skip_space(self) -> None:
        self._match(_SPACE)

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise self._error(f"{character} is expected")
        self._at += 1

    def _error(self, problem: str) -> GrammarError:
        line = self._text.count("\n", 0, self._at) + 1
        return GrammarError(f"line {line} of the grammar: {problem}")
