"""llguidance as a grammar backend: a format becomes one llguidance grammar, which its lexer and Earley parser follow.

llguidance reads lexemes greedily: one that could go on does, even where what follows could begin. That would change
what a format means, so whatever is regular becomes one lexeme, in which nothing is decided too early; where two
lexemes meet and the first could swallow the start of the second, the format is refused.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import llguidance
import numpy as np

from kitfox.constraint import (
    Alternatives,
    AnyText,
    Ebnf,
    Format,
    GrammarError,
    JsonSchema,
    Lark,
    Mark,
    Regex,
    Repeat,
    Sequence,
    Tag,
    Text,
    TriggeredTags,
)
from kitfox.structured_output.gbnf import (
    Characters,
    Choice,
    Concatenation,
    Expression,
    Literal,
    Repetition,
    RuleName,
    names_in,
    parse_gbnf,
)
from kitfox.structured_output.grammar import BitmaskRow, CompiledGrammar, Grammar, GrammarCompiler, NotEnforcedError
from kitfox.structured_output.pattern import Pattern, read_pattern
from kitfox.structured_output.schema import (
    ASSERTIONS,
    ExactSupport,
    Schema,
    asserting_keywords,
    check_schema,
    draft_of,
    schema_of,
    subschemas,
    unenforced_keyword,
)
from kitfox.structured_output.vocabulary import Vocabulary

# Measured on 561 schemas of MaskBench: half of the first or the third changes nothing; 20,000 of the second stops two.
MAX_STEP_ITEMS = 20_000  # Earley items for one mask, about 1 ms
MAX_STEP_LEXER_FUEL = 50_000  # regex derivatives for one mask, about 4 ms
MAX_ITEMS_IN_ROW = 2_000  # places in the grammar that one byte leads to: more is an explosion of ambiguity
MAX_COMPILE_LEXER_FUEL = 1_000_000  # about 20 ms
MAX_LEXER_STATES = 20_000  # of one grammar, all its answers together: 1 to 2 kB each, so some 40 MB
MAX_GRAMMAR_SYMBOLS = 500_000

_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=MAX_ITEMS_IN_ROW,
    initial_lexer_fuel=MAX_COMPILE_LEXER_FUEL,
    step_lexer_fuel=MAX_STEP_LEXER_FUEL,
    step_max_items=MAX_STEP_ITEMS,
    max_lexer_states=MAX_LEXER_STATES,
    max_grammar_size=MAX_GRAMMAR_SYMBOLS,
    verbose_errors=False,
)
_NO_TOKEN_CAN_FOLLOW = "NoExtensionBias"
_JSON_WHITESPACE = r"[ \t\r\n]"
_JSON_ESCAPES = 'nrbtf\\"'
"""Without \\u: llguidance takes a name that is spelled with it for another name. So each text has one spelling."""
_NUMBER = (r"-?[0-9][0-9.eE+\-]*", "0-9\\-")
_JSON_LEXEMES = {
    "null": ("null", "n"),
    "boolean": ("true|false", "tf"),
    "string": (r'"([^"\\]|\\.)*"', '"'),
    "array": (r"\[", r"\["),
    "object": (r"\{", "{"),
    "number": _NUMBER,
    "integer": _NUMBER,
}
"""Type: what its first lexeme is at most, as a regex, and what it begins with."""
FIXED_BYTES, BYTES_PER_CHARACTER = 100_000, 100  # what a compiled grammar takes, about

_SPECIAL_TOKEN_OPENER = "<["
_SPECIAL_TOKEN_MARK = b"\xff"  # begins what llguidance writes for a special token; no text holds it


class LlguidanceCompiler(GrammarCompiler):
    def __init__(self, vocabulary: Vocabulary, *, max_whitespace: int):
        """max_whitespace: most whitespace characters between two JSON tokens, where a request does not say."""
        self._vocabulary = vocabulary
        self._max_whitespace = max_whitespace
        self._tokenizer = llguidance.LLTokenizer(TokenTable(vocabulary))

    def compile(self, format: Format) -> CompiledGrammar:
        try:
            grammars = _Writer(self._vocabulary, self._max_whitespace, joins_in_rules=True).write(format)
        except _AmbiguityError:
            grammars = _Writer(self._vocabulary, self._max_whitespace, joins_in_rules=False).write(format)
        return self.build("llguidance:" + json.dumps({"grammars": grammars}))

    def build(self, notation: str) -> CompiledGrammar:
        return _CompiledLlguidance(self._tokenizer, notation, self._vocabulary.size)


class _AmbiguityError(GrammarError):
    """Reading lexemes greedily would change what the format means."""


def _matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarError(_plain(matcher.get_error()))
    return matcher


@cache
def _bytes_alone() -> llguidance.LLTokenizer:
    """A vocabulary that is large enough to ask what a grammar matches."""
    return llguidance.LLTokenizer("byte")


def _matches_nothing_at_all(lark: str) -> bool:
    """Whether the empty text is an answer."""
    return _matcher(_bytes_alone(), lark).is_accepting()


def _has_match(terminal: str, definitions: str = "") -> bool:
    """Whether a Lark terminal matches anything; True where it takes too long to say."""
    matcher = _matcher(_bytes_alone(), f"start: T\nT: {terminal}\n{definitions}")
    if matcher.is_accepting():
        return True
    matcher.compute_bitmask()
    return not matcher.get_error().startswith(_NO_TOKEN_CAN_FOLLOW)


class TokenTable(llguidance.TokenizerWrapper):
    """The vocabulary as llguidance reads it. Special and end tokens have no bytes, so that no text can mean them.

    There is one token more, its end token: so no token of the model ever counts as one.
    """

    is_tokenizer_wrapper = True
    eos_token_id: Any = None
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, vocabulary: Vocabulary):
        hidden = {*vocabulary.special_ids, *vocabulary.eos_token_ids}
        self.tokens = [b"" if index in hidden else data for index, data in enumerate(vocabulary.token_bytes)]

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError("forced tokens are not asked for")


class _CompiledLlguidance(CompiledGrammar):
    """A matcher that nobody moves, and copies of it.

    Copies share the lexer, behind a lock, and the states that it has made. When it reaches a limit, the next answer
    begins with a new one.

    Attributes:
        names_special_tokens: special tokens are part of it.
        is_empty: the answer is over before its first token.
        has_reached_limit: the lexer may be of no more use.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, notation: str, vocabulary_size: int):
        self.notation = notation
        self._tokenizer = tokenizer
        self._grammar = grammar = notation.removeprefix("llguidance:")
        self._prototype = _matcher(tokenizer, grammar)
        self._lock = threading.Lock()
        self.vocabulary_size = vocabulary_size
        self.names_special_tokens = _SPECIAL_TOKEN_OPENER in grammar
        self.is_empty = False
        self.has_reached_limit = False
        row = np.empty((vocabulary_size + 31) // 32, np.int32)
        self.start().fill_bitmask(row)
        self.is_empty = not row.any()

    def start(self) -> Grammar:
        with self._lock:
            if self.has_reached_limit:
                self._prototype = _matcher(self._tokenizer, self._grammar)
                self.has_reached_limit = False
            return _LlguidanceGrammar(self._prototype.deep_copy(), self)

    @property
    def memory_bytes(self) -> int:
        return FIXED_BYTES + BYTES_PER_CHARACTER * len(self._grammar)


class _LlguidanceGrammar(Grammar):
    def __init__(self, matcher: llguidance.LLMatcher, compiled: _CompiledLlguidance, num_accepted: int = 0):
        self._matcher = matcher
        self._compiled = compiled
        self._vocabulary_size = compiled.vocabulary_size
        self._num_accepted = num_accepted

    def accept(self, token_id: int) -> bool:
        if not 0 <= token_id < self._vocabulary_size:
            return False
        num_accepted = self._matcher.try_consume_tokens([token_id])
        self._raise_error()
        self._num_accepted += num_accepted
        return num_accepted == 1

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= self._num_accepted, "more tokens are taken back than were accepted"
        self._matcher.rollback(num_tokens)
        self._raise_error()
        self._num_accepted -= num_tokens

    def fill_bitmask(self, row: BitmaskRow) -> None:
        if self._matcher.is_stopped():
            self._raise_error()
            row.fill(0)
            return
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        self._raise_error()
        row[:] = words[: len(row)]
        if self._vocabulary_size % 32:
            row[-1] &= (1 << self._vocabulary_size % 32) - 1  # without llguidance's end token, the one behind the last

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def must_end(self) -> bool:
        is_over = self._matcher.is_stopped() and not self._matcher.is_error()
        return is_over or (self._compiled.is_empty and self._num_accepted == 0)

    def forced_bytes(self) -> bytes:
        # llguidance steps ahead to them, and does not find back over a special token.
        matcher = self._matcher.deep_copy() if self._compiled.names_special_tokens else self._matcher
        forced = bytes(matcher.compute_ff_bytes())
        self._raise_error()
        return forced.partition(_SPECIAL_TOKEN_MARK)[0]

    def fork(self) -> Grammar:
        return _LlguidanceGrammar(self._matcher.deep_copy(), self._compiled, self._num_accepted)

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            self._compiled.has_reached_limit = True
            raise GrammarError(_plain(self._matcher.get_error()))


# --- from formats to llguidance's grammars ---


@dataclass(frozen=True, slots=True)
class _Terminal:
    """One lexeme: a regular language.

    Attributes:
        expression: as Lark writes it, atomic.
        first: what a nonempty match can begin with, as the inside of a character class.
        can_be_empty: whether it matches the empty text.
        literal: the one text that it matches, where it is one.
        is_lazy: ends at the first place where it can, instead of the last.
    """

    expression: str
    first: str
    can_be_empty: bool = False
    literal: str | None = None
    is_lazy: bool = False


@dataclass(frozen=True, slots=True)
class _Embedded:
    """A grammar of its own. lexeme: stands for those of it that may meet others, at its beginning and at its end."""

    reference: str
    can_be_empty: bool
    lexeme: _Terminal


@dataclass(frozen=True, slots=True)
class _Special:
    token_id: int


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str


@dataclass(frozen=True, slots=True)
class _Concatenation:
    elements: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    elements: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repetition:
    element: _Node
    min_count: int
    max_count: int | None


_Node = _Terminal | _Embedded | _Special | _Rule | _Concatenation | _Choice | _Repetition

_ANY_CHARACTER = r"\s\S"
_ANY_TEXT = _Terminal("/(?s:.*)/", _ANY_CHARACTER, can_be_empty=True)


def _literal(text: str) -> _Terminal:
    quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
    return _Terminal(quoted, _code_point(ord(text[0])) if text else "", not text, text)


def _code_point(code: int) -> str:
    return rf"\x{{{code:x}}}"


def _concatenate(nodes: Iterable[_Node]) -> _Node:
    """One after the other, neighbours that are regular as one lexeme."""
    merged: list[_Node] = []
    for node in nodes:
        for part in node.elements if isinstance(node, _Concatenation) else (node,):
            if isinstance(part, _Terminal) and part.literal == "":
                continue
            last = merged[-1] if merged else None
            if isinstance(part, _Terminal) and isinstance(last, _Terminal) and not (part.is_lazy or last.is_lazy):
                merged[-1] = _join(last, part)
            else:
                merged.append(part)
    if not merged:
        return _literal("")
    return merged[0] if len(merged) == 1 else _Concatenation(tuple(merged))


def _join(left: _Terminal, right: _Terminal) -> _Terminal:
    if left.literal is not None and right.literal is not None:
        return _literal(left.literal + right.literal)
    first = left.first + (right.first if left.can_be_empty else "")
    return _Terminal(f"({left.expression} {right.expression})", first, left.can_be_empty and right.can_be_empty)


def _choose(nodes: Iterable[_Node]) -> _Node:
    """One of them, all that are regular as one lexeme."""
    regular: list[_Terminal] = []
    others: list[_Node] = []
    for node in nodes:
        if isinstance(node, _Terminal) and not node.is_lazy:
            regular.append(node)
        else:
            others.append(node)
    if regular:
        others.append(regular[0] if len(regular) == 1 else _either(regular))
    return others[0] if len(others) == 1 else _Choice(tuple(others))


def _either(terminals: list[_Terminal]) -> _Terminal:
    expression = "(" + " | ".join(dict.fromkeys(terminal.expression for terminal in terminals)) + ")"
    first = "".join(dict.fromkeys(terminal.first for terminal in terminals))
    return _Terminal(expression, first, any(terminal.can_be_empty for terminal in terminals))


def _repeat(node: _Node, min_count: int, max_count: int | None) -> _Node:
    if max_count == 0:
        return _literal("")
    if isinstance(node, _Terminal) and not node.is_lazy:
        expression = f"({node.expression}{_counts(min_count, max_count)})"
        return _Terminal(expression, node.first, node.can_be_empty or min_count == 0)
    return _Repetition(node, min_count, max_count)


def _counts(min_count: int, max_count: int | None) -> str:
    return f"{{{min_count},{'' if max_count is None else max_count}}}"


class _Writer:
    """Turns one format into a Lark grammar, and the grammars that it refers to by name."""

    def __init__(self, vocabulary: Vocabulary, max_whitespace: int, *, joins_in_rules: bool):
        """joins_in_rules: make neighbours in recursive rules one lexeme."""
        self._vocabulary = vocabulary
        self._max_whitespace = max_whitespace
        self._joins_in_rules = joins_in_rules
        self._named: list[dict[str, Any]] = []
        self._definitions: dict[str, str] = {}  # of terminals that are used by name
        self._rules: dict[str, _Node] = {}

    def write(self, format: Format) -> list[dict[str, Any]]:
        """The grammars, of which the first is the format's.

        Raises:
            GrammarError: llguidance cannot honour it exactly.
        """
        start = self._node(format)
        lexemes = _Lexemes(start, self._rules)
        lexemes.check(self._definitions)
        lines = [
            '%llguidance {"no_forcing": true}',  # every tokenization of a forced text is allowed, not one alone
            f"start: {lexemes.show(start)}",
            *(f"{name}: {lexemes.show(node)}" for name, node in self._rules.items()),
            *(f"{name}: {expression}" for name, expression in self._definitions.items()),
            *lexemes.definitions(),
        ]
        return [{"name": "answer", "lark_grammar": "\n".join(lines)}, *self._named]

    def _node(self, format: Format) -> _Node:
        match format:
            case JsonSchema():
                return self._json(format)
            case Regex(pattern=pattern):
                return self._regex(pattern)
            case Ebnf(grammar=grammar):
                return self._ebnf(grammar)
            case Lark(grammar=grammar):
                return self._lark(grammar)
            case Alternatives(elements=elements):
                return _choose([self._node(element) for element in elements])
            case Repeat(element=element, separator=separator, min_count=min_count, max_count=max_count):
                return self._repeated(self._node(element), _literal(separator), min_count, max_count)
            case TriggeredTags():
                return self._triggered_tags(format)
            case _:
                return self._sequence(list(self._pieces(format)))

    def _pieces(self, format: Format) -> Iterable[Format | _Special]:
        """What a format is a sequence of, texts and special tokens apart."""
        match format:
            case Sequence(elements=elements):
                for element in elements:
                    yield from self._pieces(element)
            case Tag(begin=begin, content=content, end=end):
                yield from self._beginning(begin)
                yield from self._pieces(content)
                yield Text(value=end)
            case Mark(value=value):
                token_id = self._vocabulary.special_id_of(value)
                yield Text(value=value) if token_id is None else _Special(token_id)
            case _:
                yield format

    def _beginning(self, text: str) -> Iterable[Format | _Special]:
        marks = [mark for mark in self._vocabulary.special_texts if mark and text.startswith(mark)]
        if marks:
            mark = max(marks, key=len)
            yield from self._pieces(Mark(value=mark))
            text = text.removeprefix(mark)
        yield Text(value=text)

    def _sequence(self, pieces: list[Format | _Special]) -> _Node:
        nodes: list[_Node] = []
        is_free = False
        for piece in _with_joined_texts(pieces):
            if isinstance(piece, AnyText):
                is_free = True
            elif isinstance(piece, _Special):
                nodes += [_ANY_TEXT, piece] if is_free else [piece]
                is_free = False
            elif isinstance(piece, Text):
                nodes.append(_up_to(_ANY_TEXT, piece.value) if is_free else _literal(piece.value))
                is_free = False
            elif is_free:
                raise GrammarError("any text can only end the answer, or be followed by a text or a special token")
            else:
                nodes.append(self._node(piece))
        if is_free:
            nodes.append(_ANY_TEXT)
        return _concatenate(nodes)

    def _repeated(self, node: _Node, separator: _Node, min_count: int, max_count: int | None) -> _Node:
        if separator == _literal("") or max_count == 0:
            return _repeat(node, min_count, max_count)
        more = _repeat(
            _concatenate([separator, node]), max(min_count - 1, 0), None if max_count is None else max_count - 1
        )
        some = _concatenate([node, more])
        return some if min_count else _repeat(some, 0, 1)

    def _triggered_tags(self, format: TriggeredTags) -> _Node:
        specials = {trigger for trigger in format.triggers if self._vocabulary.special_id_of(trigger) is not None}
        texts = [trigger for trigger in dict.fromkeys(format.triggers) if trigger not in specials]
        free = _without(texts)
        later = []
        for trigger in dict.fromkeys(format.triggers):
            tags = [tag for tag in format.tags if tag.begin.startswith(trigger)]
            if not tags:
                continue
            if trigger in specials:
                later.append(_concatenate([free, _choose([self._node(tag) for tag in tags])]))
            else:
                rests = [
                    self._node(Tag(begin="", content=Sequence(elements=[Text(value=rest), tag.content]), end=tag.end))
                    for tag in tags
                    for rest in (tag.begin.removeprefix(trigger),)
                ]
                later.append(_concatenate([_up_to(_ANY_TEXT, trigger), _choose(rests)]))
        a_tag = _choose([self._node(tag) for tag in format.tags])
        if format.stop_after_first:
            return a_tag if format.at_least_one else _choose([*later, free])
        rest = _concatenate([_repeat(_choose(later), 0, None), free])
        return _concatenate([a_tag, rest]) if format.at_least_one else rest

    def _regex(self, pattern: str) -> _Terminal:
        read = read_pattern(pattern)
        if not read.text:
            return _literal("")
        return _Terminal(f"/{llguidance.regex_to_lark(_rust_regex(read))}/", _ANY_CHARACTER, read.min_length == 0)

    def _lark(self, grammar: str) -> _Node:
        grammar = _checked_lark(grammar, self._json_options(JsonSchema(schema=True)))
        name = f"lark_{len(self._named)}"
        self._named.append({"name": name, "lark_grammar": grammar})
        can_be_empty = _matches_nothing_at_all(grammar)
        return _Embedded(f"@{name}", can_be_empty, _Terminal("/[^\\s\\S]/", _ANY_CHARACTER))

    def _json(self, format: JsonSchema) -> _Node:
        schema = _exact_schema(schema_of(format))
        name = f"json_{len(self._named)}"
        self._named.append({"name": name, "json_schema": {**schema, "x-guidance": self._json_options(format)}})
        types = schema.get("type", list(_JSON_LEXEMES))
        shapes = [_JSON_LEXEMES[type_name] for type_name in ([types] if isinstance(types, str) else types)]
        first = "".join(first for _, first in shapes)
        expression = "/" + "|".join(dict.fromkeys(shape for shape, _ in shapes)) + "/"
        return _Embedded(f"@{name}", can_be_empty=False, lexeme=_Terminal(expression, first))

    def _json_options(self, format: JsonSchema) -> dict[str, Any]:
        return {"json_allowed_escapes": _JSON_ESCAPES, **self._whitespace(format)}

    def _whitespace(self, format: JsonSchema) -> dict[str, Any]:
        if format.whitespace_pattern is not None:
            terminal = self._regex(format.whitespace_pattern)
            if _has_match(f"{terminal.expression} & ~/{_JSON_WHITESPACE}*/"):
                raise GrammarError("whitespace_pattern matches more than whitespace")
            return {"whitespace_pattern": _rust_regex(read_pattern(format.whitespace_pattern))}
        limit = self._max_whitespace if format.max_whitespace is None else format.max_whitespace
        if limit == 0:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": f"{_JSON_WHITESPACE}{{1,{limit}}}"}

    def _ebnf(self, grammar: str) -> _Node:
        rules = parse_gbnf(grammar)
        prefix = f"g{len(self._rules)}_{len(self._definitions)}_"
        names = {name: f"{prefix}{index}_{re.sub('[^a-z0-9]', '_', name.lower())}" for index, name in enumerate(rules)}
        nodes: dict[str, _Node] = {}
        for name in _dependencies_first(rules):
            node = self._expression(rules[name], nodes)
            if isinstance(node, _Terminal) and node.literal is None:
                self._definitions[names[name].upper()] = node.expression
                node = _Terminal(names[name].upper(), node.first, node.can_be_empty)
            nodes[name] = node
        recursive = [name for name in rules if name not in nodes]
        for name in recursive:
            nodes[name] = _Rule(names[name])
        for name in recursive:
            self._rules[names[name]] = self._expression(rules[name], nodes)
        return nodes["root"]

    def _expression(self, expression: Expression, nodes: Mapping[str, _Node]) -> _Node:
        match expression:
            case Literal(text=text):
                return _literal(text)
            case Characters(ranges=ranges, negated=negated):
                inside = "".join(f"{_code_point(first)}-{_code_point(last)}" for first, last in ranges)
                if negated:
                    return _Terminal(
                        f"/[^{inside}]/" if inside else "/(?s:.)/", f"[^{inside}]" if inside else _ANY_CHARACTER
                    )
                return _Terminal(f"/[{inside}]/", inside)
            case RuleName(name=name):
                return nodes[name]
            case Concatenation(elements=elements):
                parts = [self._expression(element, nodes) for element in elements]
                is_regular = all(isinstance(part, _Terminal) for part in parts)
                return _concatenate(parts) if is_regular or self._joins_in_rules else _Concatenation(tuple(parts))
            case Choice(elements=elements):
                return _choose([self._expression(element, nodes) for element in elements])
            case Repetition(element=element, min_count=min_count, max_count=max_count):
                return _repeat(self._expression(element, nodes), min_count, max_count)


def _with_joined_texts(pieces: Iterable[Format | _Special]) -> list[Format | _Special]:
    """The same pieces without empty texts, and neighbouring texts as one."""
    joined: list[Format | _Special] = []
    for piece in pieces:
        if isinstance(piece, Text) and joined and isinstance(joined[-1], Text):
            joined[-1] = Text(value=joined[-1].value + piece.value)
        elif not isinstance(piece, Text) or piece.value:
            joined.append(piece)
    return joined


def _rust_regex(pattern: Pattern) -> str:
    """The pattern in the dialect of Rust, in which an escaped < or > is the edge of a word."""
    return re.sub(r"\\(.)", lambda match: match[1] if match[1] in "<>" else match[0], pattern.text)


def _up_to(free: _Terminal, end: str) -> _Terminal:
    """Free text and the first `end` in it."""
    return _Terminal(f"({free.expression} {_literal(end).expression})", _ANY_CHARACTER, is_lazy=True)


def _without(texts: list[str]) -> _Terminal:
    """Free text that none of some texts is in."""
    if not texts:
        return _ANY_TEXT
    banned = " | ".join(_literal(text).expression for text in texts)
    expression = f"(/(?s:.*)/ & ~(/(?s:.*)/ ({banned}) /(?s:.*)/))"
    return _Terminal(expression, _ANY_CHARACTER, can_be_empty=True)


def _dependencies_first(rules: Mapping[str, Expression]) -> list[str]:
    """The rules that do not come back to themselves, nor use one that does, each behind those that it uses."""
    uses = {name: names_in(expression) for name, expression in rules.items()}
    used_by: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in uses.items():
        for other in used:
            used_by[other].append(name)
    ready = [name for name, used in uses.items() if not used]
    for name in ready:
        for user in used_by[name]:
            uses[user].discard(name)
            if not uses[user]:
                ready.append(user)
    return ready


class _Lexemes:
    """The lexemes of a grammar, and whether reading them greedily leaves its meaning as it is."""

    def __init__(self, start: _Node, rules: Mapping[str, _Node]):
        self._start = start
        self._rules = rules
        self._names: dict[_Terminal, str] = {}
        self._empty_rules: set[str] = set()
        self._find_empty_rules()
        self._starts: dict[str, set[_Terminal]] = {name: set() for name in rules}
        self._followers: dict[_Terminal, set[_Terminal]] = {}
        self._rule_followers: dict[str, set[_Terminal]] = {name: set() for name in rules}
        self._changed = True
        while self._changed:
            self._changed = False
            for name, node in rules.items():
                self._grow(self._starts[name], self._first(node))
            self._follow(start, set())
            for name, node in rules.items():
                self._follow(node, self._rule_followers[name])

    def show(self, node: _Node) -> str:
        """The node as the right side of a Lark rule."""
        match node:
            case _Terminal():
                if node.literal == "":
                    return '""'
                return self._names.setdefault(
                    node, f"lexeme_{len(self._names)}" if node.is_lazy else f"T{len(self._names)}"
                )
            case _Embedded(reference=reference):
                return reference
            case _Special(token_id=token_id):
                return f"{_SPECIAL_TOKEN_OPENER}{token_id}]>"
            case _Rule(name=name):
                return name
            case _Concatenation(elements=elements):
                return "(" + " ".join(map(self.show, elements)) + ")"
            case _Choice(elements=elements):
                return "(" + " | ".join(map(self.show, elements)) + ")"
            case _Repetition(element=element, min_count=min_count, max_count=max_count):
                return f"({self.show(element)}){_counts(min_count, max_count)}"

    def definitions(self) -> list[str]:
        """Of the lexemes that were shown."""
        return [
            f"{name}{'[lazy]' if terminal.is_lazy else ''}: {terminal.expression}"
            for terminal, name in self._names.items()
        ]

    def check(self, definitions: Mapping[str, str]) -> None:
        """Refuse a grammar in which a lexeme that could end goes on into what belongs to the next.

        Raises:
            GrammarError: there is one.
        """
        written = "\n".join(f"{name}: {expression}" for name, expression in definitions.items())
        rivals: dict[_Terminal, set[_Terminal]] = {}
        for group in self._groups(written):
            for terminal in group:
                rivals.setdefault(terminal, set()).update(group)
        for terminal, others in rivals.items():
            followers = self._followers.get(terminal, set())
            if terminal.is_lazy:
                others = {other for other in others if not other.is_lazy}
                longer = f"({terminal.expression} /(?s:.*)/)"
            else:
                first = "".join(sorted({follower.first for follower in followers}))
                longer = f"(({terminal.expression} & /(?s:.+)/) /[{first}]/ /(?s:.*)/)" if first else ""
            others = {other for other in others if _can_go_on(terminal, other)}
            if longer and others:
                overlap = f"{longer} & ({' | '.join(other.expression for other in others)})"
                if _has_match(overlap, written):
                    raise _AmbiguityError(
                        f"llguidance cannot tell where {_shown(terminal)} ends and what follows it begins"
                    )

    def _groups(self, definitions: str) -> Iterable[frozenset[_Terminal]]:
        """Sets of lexemes that may be possible at one place."""
        done: set[frozenset[_Terminal]] = set()
        open_groups = [frozenset(self._first(self._start))]
        while open_groups:
            group = open_groups.pop()
            if group in done:
                continue
            done.add(group)
            yield group
            open_groups += [
                frozenset().union(*(self._followers.get(terminal, ()) for terminal in together))
                for together in self._matching_together(group, definitions)
            ]

    @staticmethod
    def _matching_together(group: Iterable[_Terminal], definitions: str) -> list[list[_Terminal]]:
        """The lexemes of a group in parts, so that two that match a common text are in one part."""
        parts: list[list[_Terminal]] = []
        for terminal in group:
            apart = []
            together = [terminal]
            for part in parts:
                if any(_can_match_together(terminal, other, definitions) for other in part):
                    together += part
                else:
                    apart.append(part)
            parts = [*apart, together]
        return parts

    def _find_empty_rules(self) -> None:
        found = True
        while found:
            found = False
            for name, node in self._rules.items():
                if name not in self._empty_rules and self._can_be_empty(node):
                    self._empty_rules.add(name)
                    found = True

    def _can_be_empty(self, node: _Node) -> bool:
        match node:
            case _Terminal(can_be_empty=can_be_empty) | _Embedded(can_be_empty=can_be_empty):
                return can_be_empty
            case _Special():
                return False
            case _Rule(name=name):
                return name in self._empty_rules
            case _Concatenation(elements=elements):
                return all(map(self._can_be_empty, elements))
            case _Choice(elements=elements):
                return any(map(self._can_be_empty, elements))
            case _Repetition(element=element, min_count=min_count):
                return min_count == 0 or self._can_be_empty(element)

    def _first(self, node: _Node) -> set[_Terminal]:
        """Lexemes that may come first."""
        match node:
            case _Terminal():
                return {node} if node.first else set()
            case _Embedded(lexeme=lexeme):
                return {lexeme}
            case _Special():
                return set()
            case _Rule(name=name):
                return self._starts[name]
            case _Concatenation(elements=elements):
                first: set[_Terminal] = set()
                for element in elements:
                    first |= self._first(element)
                    if not self._can_be_empty(element):
                        break
                return first
            case _Choice(elements=elements):
                return set().union(*map(self._first, elements))
            case _Repetition(element=element):
                return self._first(element)

    def _follow(self, node: _Node, followers: set[_Terminal]) -> None:
        """Note what may come behind each lexeme of a node that has these behind it."""
        match node:
            case _Terminal():
                self._grow(self._followers.setdefault(node, set()), followers)
            case _Embedded(lexeme=lexeme):
                self._grow(self._followers.setdefault(lexeme, set()), followers)
            case _Rule(name=name):
                self._grow(self._rule_followers[name], followers)
            case _Concatenation(elements=elements):
                for element in reversed(elements):
                    self._follow(element, followers)
                    first = self._first(element)
                    followers = followers | first if self._can_be_empty(element) else first
            case _Choice(elements=elements):
                for element in elements:
                    self._follow(element, followers)
            case _Repetition(element=element, max_count=max_count):
                self._follow(element, followers if max_count == 1 else followers | self._first(element))

    def _grow(self, known: set[_Terminal], more: set[_Terminal]) -> None:
        if not more <= known:
            known |= more
            self._changed = True


def _can_go_on(terminal: _Terminal, other: _Terminal) -> bool:
    """Whether the other may match a longer text that begins with one of the terminal's."""
    if terminal.literal is None or other.literal is None:
        return True
    return terminal != other and other.literal.startswith(terminal.literal)


def _can_match_together(terminal: _Terminal, other: _Terminal, definitions: str) -> bool:
    """Whether some text is a match of both."""
    if terminal.literal is not None and other.literal is not None:
        return terminal.literal == other.literal
    return _has_match(f"{terminal.expression} & {other.expression}", definitions)


def _shown(terminal: _Terminal) -> str:
    text = terminal.expression if terminal.literal is None else repr(terminal.literal)
    return text if len(text) <= 60 else text[:57] + "..."


# --- JSON schemas ---

_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})

_UNWRITTEN = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:[01]|7f)")  # in JSON

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-]{_HOUR})"
_HOST_LABEL = (
    "[a-zA-Z0-9](?:[a-zA-Z0-9]|[a-zA-Z0-9-][a-zA-Z0-9]|[a-zA-Z0-9-][a-zA-Z0-9][a-zA-Z0-9-]{0,59}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-]-[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?)?"
)
_HOST_NAME = rf"{_HOST_LABEL}(?:\.{_HOST_LABEL})*"
_FORMAT_PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}[tT]{_TIME}", "hostname": _HOST_NAME}
"""Formats of which llguidance's own patterns let more pass: 29 February in any year, a leap second at any time, host
names that are too long or in punycode that stands for nothing. These let no leap second and no punycode pass."""


def _uncounted_keyword(node: Mapping[str, Any]) -> str | None:
    """minProperties where the same name could be counted twice: only names in `properties` are written once."""
    has_free_names = node.get("additionalProperties", True) is not False or node.get("patternProperties")
    if has_free_names and node.get("minProperties", 0) > len(set(node.get("required", ()))) + 1:
        return "minProperties"
    return None


# fmt: off
_EXACT = ExactSupport(
    keywords=frozenset(
        [
            "type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", "minimum", "maximum", "exclusiveMinimum",
            "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "format", "items",
            "additionalItems", "prefixItems", "minItems", "maxItems", "properties", "additionalProperties",
            "patternProperties", "required", "minProperties", "maxProperties",
        ]
    ),
    formats=frozenset(
        [
            "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
        ]
    ),
    beside=_uncounted_keyword,
)
# fmt: on


def _exact_schema(schema: Schema) -> dict[str, Any]:
    """The same schema in the words that llguidance takes literally.

    Raises:
        GrammarError: llguidance would not enforce all of it.
    """
    if schema is False:
        raise GrammarError("the schema accepts nothing")
    if schema is True:
        return {}
    if (keyword := unenforced_keyword(schema, _EXACT)) is not None:
        raise NotEnforcedError("llguidance", keyword)
    schema = copy.deepcopy(schema)
    draft = draft_of(schema)
    if draft is None:
        schema.pop("$schema", None)
    for place, node in list(subschemas(schema)):
        if isinstance(node, dict):
            if draft == "7" and (content := node.keys() & {"contentMediaType", "contentEncoding"}):
                raise NotEnforcedError("llguidance", min(content))
            for keyword in (node.keys() & {*ASSERTIONS, "then", "else"}) - set(asserting_keywords(schema, node)):
                del node[keyword]
            _check_names_and_values(place, node)
            _make_plain(place, node)
    return schema


def _check_names_and_values(place: str, node: Mapping[str, Any]) -> None:
    """Refuse control characters without a short escape, which llguidance would leave out."""
    for keyword, texts in [(k, node.get(k)) for k in ("const", "enum", "required")] + [
        ("properties", list(node.get("properties", ())))
    ]:
        if _UNWRITTEN.search(json.dumps(texts)):
            where = f"{place}.{keyword}".removeprefix(".")
            raise GrammarError(f"llguidance does not support control characters in {where}")


def _make_plain(place: str, node: dict[str, Any]) -> None:
    for keyword in node.keys() & _COUNTS:
        node[keyword] = int(node[keyword])
    if "pattern" in node:
        node["pattern"] = _plain_pattern(f"{place}.pattern", node["pattern"])
    if "patternProperties" in node:
        node["patternProperties"] = {
            _plain_pattern(f"{place}.patternProperties", pattern): child
            for pattern, child in node["patternProperties"].items()
        }
    if (pattern := _FORMAT_PATTERNS.get(node.get("format", ""))) is not None:
        del node["format"]
        node["allOf"] = [*node.get("allOf", []), {"pattern": f"^(?:{pattern})$"}]
        if pattern is _HOST_NAME:
            node["allOf"].append({"maxLength": 253})


def _plain_pattern(place: str, pattern: str) -> str:
    """A schema's pattern as all dialects of regexes understand it."""
    try:
        return f"^(?:{_rust_regex(read_pattern(pattern, anywhere=True))})$"
    except GrammarError as error:
        raise GrammarError(f"{place.removeprefix('.')}: {pattern!r} {error}") from None


# --- Lark grammars of requests ---

_LARK_TOKEN = re.compile(
    r"""
    (?P<skipped> "(?:\\.|[^"\\])*"i? | /(?:\\.|[^/\\\n])+/[imslux]* | (?:\#|//)[^\n]* )
    | %(?P<with_json>json|regex|llguidance)\b\s*
    | (?P<special> <[^<>\s]+> )
    | (?P<reference> @[a-zA-Z0-9_\-]+ )
    | (?P<option> \b(?:max_tokens|temperature|stop)\b ) \s* =
    """,
    re.VERBOSE,
)


def _checked_lark(grammar: str, json_options: dict[str, Any]) -> str:
    """The grammar with its JSON schemas as ours are compiled.

    Raises:
        GrammarError: it reaches for what only llguidance's other users have.
    """
    parts = []
    position = 0
    while match := _LARK_TOKEN.search(grammar, position):
        parts.append(grammar[position : match.end()])
        position = match.end()
        if directive := match["with_json"]:
            value, end = _json_at(grammar, position, directive)
            parts.append(json.dumps(_checked_directive(directive, value, json_options)))
            position = end
        elif found := match["special"] or match["reference"] or match["option"]:
            raise GrammarError(f"{found} is not supported in a Lark grammar")
    return "".join([*parts, grammar[position:]])


def _json_at(text: str, position: int, directive: str) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, position)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"%{directive} is not followed by JSON: {error}") from None


def _checked_directive(directive: str, value: Any, json_options: dict[str, Any]) -> Any:
    if directive == "json":
        check_schema(value)
        return {**_exact_schema(value), "x-guidance": json_options}
    if directive == "llguidance" and (not isinstance(value, dict) or value.keys() - {"ignore_once"}):
        raise GrammarError("%llguidance is supported with ignore_once only")
    return value


# --- llguidance's errors in plain words ---

_PLAIN_ERRORS = [
    (r"Unimplemented keys: \[(.*?)\]", r"llguidance does not support \1"),
    (r"oneOf constraints are not supported", "llguidance does not support oneOf whose alternatives may overlap"),
    (r"patternProperty regexes .* not disjoint", "llguidance needs patternProperties that share no name"),
    (r"if regex is empty", "a pattern with other limits on the same text is too complex for llguidance"),
    (r"Resource '(.*?)' is not present", r"$ref to '\1' is not in the schema"),
    (r"panic", "llguidance failed on it"),
    (r"Unknown format: (.*)", r"llguidance does not support format '\1'"),
    (r"Unsatisfiable schema: (.*)", r"no value satisfies the schema: \1"),
    (r"look-?arounds?,? ?.* not supported", "a regex uses lookaround, which llguidance does not support"),
    (r"(?s)regex parse error:.*error: (.*)", r"a regex is wrong: \1"),
    (_NO_TOKEN_CAN_FOLLOW, "no token of the vocabulary can follow"),
    (r"ParserTooComplex|LexerTooComplex|.*(?:too (?:complex|large|many)|row has|fuel|limit|exceeded).*", None),
]


def _plain(error: str) -> str:
    """What llguidance says is wrong, without where it was in its own work."""
    lines = [line for line in error.splitlines() if not re.match(r"\s*\d+ \||\s*\^|<|\s+while processing", line)]
    text = re.sub(r"^at \d+\(\d+\): ", "", "\n".join(lines)).strip()
    for pattern, plain in _PLAIN_ERRORS:
        if match := re.search(pattern, text):
            if plain is None:
                return f"it is too complex for llguidance: {_first_line(text)}"
            return _first_line(match.expand(plain))
    return _first_line(text)


def _first_line(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= 200 else line[:197] + "..."
