"""xgrammar behind the interface of `kitfox/structured_output/grammar.py`.

Importing this imports torch, through xgrammar.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import xgrammar

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
from kitfox.structured_output.grammar import BitmaskRow, CannotReadError, CompiledGrammar, Grammar, GrammarCompiler
from kitfox.structured_output.pattern import read_pattern
from kitfox.structured_output.schema import schema_of
from kitfox.structured_output.vocabulary import Vocabulary
from kitfox.structured_output.xgrammar_schema import exact_schema

# Parts of xgrammar's grammars that are more than a grammar: tokens, budgets, temperatures, schemas as it reads them.
_LARK_EXTENSIONS = re.compile(r"%json\b|%lark\b|<[^>]*>|@\w+|\b(?:max_tokens|max_chars|temperature)\s*=")
_EBNF_EXTENSIONS = re.compile(r"\b[A-Z]\w*\(")
_LARK_TEXTS = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//.*')
_EBNF_TEXTS = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|#.*')

Start = str | int
"""What something begins with: a text, or the id of a special token."""


class XgrammarCompiler(GrammarCompiler):
    """Compiles with xgrammar, in the caller's thread.

    xgrammar releases the GIL: beside a schema of 135 kB that compiles for 1.6 s, and masks that are filled for up to
    143 ms, another Python thread is kept waiting for 0.2 s and 20 ms at most, on two busy cores. Only what is said in
    Python before, `exact_schema` above all (0.5 s for that schema), is in its way.
    """

    def __init__(self, vocabulary: Vocabulary, *, max_whitespace: int):
        """max_whitespace: most whitespace characters between two JSON tokens, where a format does not say."""
        self._vocabulary = vocabulary
        self._max_whitespace = max_whitespace
        token_bytes = list(vocabulary.token_bytes)
        for token_id in vocabulary.special_ids:
            # xgrammar refuses a token without bytes even where a grammar names it; no UTF-8 text has these bytes.
            token_bytes[token_id] = b"\xff<%d>" % token_id
        # It needs an end token to know where an answer is complete; whether it is in masks is of no account, see below.
        ends = [token_id for token_id in vocabulary.eos_token_ids if token_id < vocabulary.size]
        stand_ins = [token_id for token_id, text in enumerate(token_bytes) if not text][:1]
        if not ends + stand_ins:
            raise ValueError("xgrammar needs a vocabulary with an end token")
        tokenizer_info = xgrammar.TokenizerInfo(
            token_bytes,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=ends or stand_ins,
            add_prefix_space=False,
        )
        # Masks are made when a state is first reached. Making all before takes 50 to 170 s for schemas that take 1 s
        # so, as each key of an open object has a state a character. There is nothing to gain from compiling in another
        # process then: a grammar with all its masks is read back (23 MB in 1.2 s) slower than this compiles.
        self._compiler = xgrammar.GrammarCompiler(
            tokenizer_info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=True
        )
        allowed = np.zeros(vocabulary.num_mask_words * 32, np.bool_)
        allowed[: vocabulary.size] = [bool(text) for text in token_bytes]
        allowed[[*ends, *vocabulary.special_ids]] = False
        self._text_tokens = allowed

    def compile(self, format: Format) -> CompiledGrammar:
        translation = _Translation(self._vocabulary, self._max_whitespace)
        structure = translation.structure(format)
        return self.build("xgrammar:" + json.dumps({"format": structure, "marks": sorted(translation.marks)}))

    def build(self, notation: str) -> CompiledGrammar:
        written = json.loads(notation.removeprefix("xgrammar:"))
        allowed = self._text_tokens.copy()
        allowed[written["marks"]] = True
        compiled = XgrammarCompiledGrammar(_compile(self._compiler, written["format"]), allowed, notation)
        start = compiled.start()
        row = np.empty(self._vocabulary.num_mask_words, np.int32)
        start.fill_bitmask(row)
        if not row.any() and not start.may_end:
            raise GrammarError("nothing that the vocabulary can write satisfies it")
        return compiled


def _compile(compiler: xgrammar.GrammarCompiler, structure: dict[str, Any]) -> xgrammar.CompiledGrammar:
    try:
        return compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": structure}))
    except (RuntimeError, ValueError) as error:
        raise CannotReadError(f"xgrammar cannot compile it: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """xgrammar's message without where in its sources it comes from."""
    text = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error).strip())
    line = re.sub(r"^Check failed: .*? is false: ", "", text).strip().partition("\n")[0]
    return line.rstrip(".") or type(error).__name__


class _Translation:
    """From a format to xgrammar's structural tags.

    Attributes:
        marks: ids of the special tokens that the format names.
    """

    def __init__(self, vocabulary: Vocabulary, max_whitespace: int):
        self._vocabulary = vocabulary
        self._max_whitespace = max_whitespace
        self._has_open_text = False
        self.marks: set[int] = set()

    def structure(self, format: Format) -> dict[str, Any]:
        structure = self._of(format, ())
        if self._has_open_text and self.marks:
            # xgrammar's free text is of any bytes where it ends at a text, and so of any tokens.
            raise GrammarError("xgrammar cannot keep special tokens out of free text that a text ends")
        return structure

    def _of(self, format: Format, follow: tuple[Start, ...] | None) -> dict[str, Any]:
        """follow: what may come behind it; () is the end of the answer, None is not known."""
        match format:
            case JsonSchema():
                return self._json(format)
            case Regex(pattern=pattern):
                return {"type": "regex", "pattern": _plain_regex(pattern)}
            case Ebnf(grammar=grammar):
                _check_extensions(grammar, _EBNF_TEXTS, _EBNF_EXTENSIONS)
                return {"type": "grammar", "grammar": _checked_ebnf(grammar), "syntax": "ebnf"}
            case Lark(grammar=grammar):
                _check_extensions(grammar, _LARK_TEXTS, _LARK_EXTENSIONS)
                return {"type": "grammar", "grammar": grammar, "syntax": "lark"}
            case Text(value=value):
                return _text(value)
            case Mark(value=value):
                return self._start(self._starts_with(value))
            case AnyText():
                return self._any_text(follow)
            case Sequence(elements=elements):
                return self._sequence(elements, follow)
            case Alternatives(elements=elements):
                if not elements:
                    raise GrammarError("there are no alternatives to choose from")
                return {"type": "or", "elements": [self._of(element, follow) for element in elements]}
            case Repeat():
                return self._repeat(format, follow)
            case Tag():
                return self._sequence(self._parts(format), follow)
            case TriggeredTags():
                return self._triggered_tags(format, follow)

    def _json(self, format: JsonSchema) -> dict[str, Any]:
        max_whitespace = self._max_whitespace if format.max_whitespace is None else format.max_whitespace
        if format.whitespace_pattern is not None:
            if format.whitespace_pattern:
                raise GrammarError("xgrammar does not enforce whitespace_pattern")
            max_whitespace = 0
        schema = exact_schema(schema_of(format))
        if max_whitespace > 0:
            return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": max_whitespace}
        try:
            grammar = xgrammar.Grammar.from_json_schema(
                schema, any_whitespace=False, separators=(",", ":"), strict_mode=False
            )
        except RuntimeError as error:
            raise CannotReadError(f"xgrammar cannot compile it: {_reason(error)}") from None
        return {"type": "grammar", "grammar": str(grammar), "syntax": "ebnf"}

    def _sequence(self, elements: list[Format], follow: tuple[Start, ...] | None) -> dict[str, Any]:
        written = []
        for element in reversed([element for element in elements if element != Text(value="")]):
            written.append(self._of(element, follow))
            follow = self._beginnings(element)
        written.reverse()
        if len(written) > 1:
            return {"type": "sequence", "elements": written}
        return written[0] if written else _text("")

    def _repeat(self, format: Repeat, follow: tuple[Start, ...] | None) -> dict[str, Any]:
        again = (format.separator,) if format.separator else self._beginnings(format.element)
        behind = None if follow is None or again is None else again + follow
        if behind is not None and not follow:
            behind = None  # free text cannot both go on to the answer's end and stop at what repeats
        element = self._of(format.element, follow if format.max_count == 1 else behind)
        most = -1 if format.max_count is None else format.max_count
        if most == 0:
            return _text("")
        if not format.separator:
            return {"type": "repeat", "min": format.min_count, "max": most, "content": element}
        rest = {
            "type": "repeat",
            "min": max(0, format.min_count - 1),
            "max": -1 if most < 0 else most - 1,
            "content": {"type": "sequence", "elements": [_text(format.separator), element]},
        }
        several = {"type": "sequence", "elements": [element, rest]} if most != 1 else element
        return several if format.min_count else {"type": "or", "elements": [_text(""), several]}

    def _any_text(self, follow: tuple[Start, ...] | None) -> dict[str, Any]:
        return {"type": "any_text", "excludes": self._ends(follow)}

    def _ends(self, follow: tuple[Start, ...] | None) -> list[str]:
        """Texts that end free text, given what follows it."""
        if follow is None:
            raise GrammarError("xgrammar needs to know the text that free text ends at")
        texts = [start for start in follow if isinstance(start, str)]
        for text in texts:
            if any(text.startswith(text[index:]) for index in range(1, len(text))):
                raise GrammarError(f"xgrammar cannot end free text exactly at {text!r}, which begins as it ends")
        self._has_open_text |= bool(texts)
        return texts

    def _triggered_tags(self, format: TriggeredTags, follow: tuple[Start, ...] | None) -> dict[str, Any]:
        tags: dict[Start, list[dict[str, Any]]] = {}
        behind = follow if format.stop_after_first else None  # of a tag without an end
        for tag in format.tags:
            triggers = [trigger for trigger in format.triggers if tag.begin.startswith(trigger)]
            if len(triggers) > 1:
                raise GrammarError(f"more than one trigger starts the tag {tag.begin!r}")
            trigger, *_ = self._starts_with(triggers[0])
            rest = tag.begin[len(self._text_of(trigger)) :]
            parts = [Text(value=rest), tag.content, Text(value=tag.end)]
            tags.setdefault(trigger, []).append(self._sequence(parts, behind))
        marks = [trigger for trigger in tags if isinstance(trigger, int)]
        if marks and len(marks) < len(tags):
            raise GrammarError("xgrammar cannot watch for texts and special tokens at once")
        whole = {
            "type": "or",
            "elements": [
                {"type": "sequence", "elements": [self._start((trigger,)), rest]}
                for trigger, rests in tags.items()
                for rest in rests
            ],
        }
        if format.at_least_one and format.stop_after_first:
            return whole
        free: dict[str, Any] = {
            "rules": [[trigger, {"type": "or", "elements": rests}] for trigger, rests in tags.items()],
            "loop": not format.stop_after_first,
        }
        if marks:
            if self._ends(follow):
                raise GrammarError("xgrammar cannot watch for special tokens and end at a text")
            self.marks.update(marks)
            others = sorted(set(self._vocabulary.special_ids) - set(marks))
            free |= {"type": "token_dispatch", "exclude_tokens": others}
        else:
            free |= {"type": "dispatch", "excludes": self._ends(follow)}
            self._has_open_text = True
        return {"type": "sequence", "elements": [whole, free]} if format.at_least_one else free

    def _parts(self, tag: Tag) -> list[Format]:
        start, *_ = self._starts_with(tag.begin)
        begin = self._text_of(start)
        return [Mark(value=begin), Text(value=tag.begin[len(begin) :]), tag.content, Text(value=tag.end)]

    def _beginnings(self, format: Format) -> tuple[Start, ...] | None:
        """What a format begins with; None where that is not known."""
        match format:
            case Text(value=value):
                return (value,) if value else None
            case Mark(value=value) | Tag(begin=value):
                return self._starts_with(value) if value else None
            case Sequence(elements=elements):
                elements = [element for element in elements if element != Text(value="")]
                return self._beginnings(elements[0]) if elements else None
            case Alternatives(elements=elements):
                starts: tuple[Start, ...] = ()
                for element in elements:
                    beginnings = self._beginnings(element)
                    if beginnings is None:
                        return None
                    starts += beginnings
                return starts
            case Repeat(element=element, min_count=min_count):
                return self._beginnings(element) if min_count else None
            case _:
                return None

    def _starts_with(self, text: str) -> tuple[Start, ...]:
        """The special token that a text starts with, else the text."""
        marks = [mark for mark in self._vocabulary.special_texts if mark and text.startswith(mark)]
        token_id = self._vocabulary.special_id_of(max(marks, key=len)) if marks else None
        return (text if token_id is None else token_id,)

    def _text_of(self, start: Start) -> str:
        if isinstance(start, str):
            return start
        return self._vocabulary.special_texts[self._vocabulary.special_ids.index(start)]

    def _start(self, starts: tuple[Start, ...]) -> dict[str, Any]:
        (start,) = starts
        if isinstance(start, str):
            return _text(start)
        if start in self._vocabulary.eos_token_ids:
            raise GrammarError(f"{self._text_of(start)!r} ends an answer, and so cannot be in one")
        self.marks.add(start)
        return {"type": "token", "token": start}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _plain_regex(pattern: str) -> str:
    try:
        return read_pattern(pattern).text
    except GrammarError as error:
        raise GrammarError(f"the regex {error}") from None


def _check_extensions(grammar: str, texts: re.Pattern[str], extensions: re.Pattern[str]) -> None:
    if extension := extensions.search(texts.sub('""', grammar)):
        raise GrammarError(f"xgrammar does not honour {extension[0].strip(' =(')!r} in a grammar")


def _checked_ebnf(grammar: str) -> str:
    """The grammar; alone, its errors are said better than as a part of another."""
    try:
        xgrammar.Grammar.from_ebnf(grammar)
    except RuntimeError as error:
        raise CannotReadError(f"the grammar is not one: {_reason(error)}") from None
    return grammar


class XgrammarCompiledGrammar(CompiledGrammar):
    """A compiled grammar, and which tokens it may allow at all."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, allowed: np.ndarray, notation: str):
        """allowed: [32 * words] bool, a token each."""
        self.notation = notation
        self._compiled = compiled
        self._allowed = allowed
        self._allowed_bits = np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32, copy=False)

    def start(self) -> Grammar:
        return XgrammarGrammar(xgrammar.GrammarMatcher(self._compiled), self._allowed, self._allowed_bits)

    @property
    def memory_bytes(self) -> int:
        return int(self._compiled.memory_size_bytes) + self._allowed.nbytes + self._allowed_bits.nbytes


class XgrammarGrammar(Grammar):
    """A matcher that never sees an end token."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, allowed: np.ndarray, allowed_bits: BitmaskRow):
        self._matcher = matcher
        self._allowed = allowed
        self._allowed_bits = allowed_bits

    def accept(self, token_id: int) -> bool:
        # What may not come at all is not shown to the matcher, which would log each.
        if not 0 <= token_id < len(self._allowed) or not self._allowed[token_id]:
            return False
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fill_bitmask(self, row: BitmaskRow) -> None:
        # DLPack lends the row's memory, so this writes into it.
        try:
            self._matcher.fill_next_token_bitmask(row.reshape(1, -1))
        except RuntimeError as error:
            raise GrammarError(f"xgrammar cannot go on: {_reason(error)}") from None
        np.bitwise_and(row, self._allowed_bits, out=row)

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_completed())

    @property
    def must_end(self) -> bool:
        if not self.may_end:
            return False
        row = np.empty_like(self._allowed_bits)
        self.fill_bitmask(row)
        return not row.any()

    def forced_bytes(self) -> bytes:
        return b"" if self.may_end else self._matcher.find_jump_forward_string().encode()

    def fork(self) -> Grammar:
        return XgrammarGrammar(self._matcher.fork(), self._allowed, self._allowed_bits)
