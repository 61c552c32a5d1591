"""How tool calls are found in a text that comes in pieces.

A dialect's parser is written as if the whole answer were there: generators that read the text from left to right and
`yield` where more is needed. What they decide depends on the text alone, never on how it was cut into pieces, so a
stream joined and a whole answer are the same.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from kitfox.constraint import (
    ANY_JSON,
    Alternatives,
    Format,
    JsonSchema,
    Mark,
    Regex,
    Repeat,
    Tag,
    Text,
    TriggeredTags,
)
from kitfox.server.parsers.values import one_of, sequence

MAX_ARGUMENTS_DEPTH = 64  # as for request bodies

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD_RUN = re.compile(r"[\w.+-]*")
_SPACE_RUN = re.compile(r"\s*")
JSON_WORD = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
_NAME = re.compile(r"[\w.:/-]{1,128}")  # what a function may be called, and a little more; a sentence is no name
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_CALL_MEMBERS = {"name", "arguments", "parameters", "type", "id"}

T = TypeVar("T")
Reading = Generator[None, None, T]  # ends with a T; yields whenever it needs more text
Sink = Callable[[str], None]
Functions = Mapping[str, Mapping[str, Any] | None]  # parameters by name; None leaves the arguments object free


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What one tool call gained. The first delta of a call has its id and name; the arguments joined are JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What a piece of text turned out to be."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CallBlock:
    """A form of calls as a dialect writes them.

    Attributes:
        opener: what it begins with, a special token or text; "" where calls are the whole answer.
        rest: what follows the opener, to the end of the last call.
        when_forced: a model that has to call is held to this form, or one of these.
        in_text: a model may begin it by itself, and what the opener begins is then this form.
    """

    opener: str
    rest: Format
    when_forced: bool = True
    in_text: bool = True


def repeated_call(call: Format, separator: str, max_calls: int | None) -> Format:
    """Calls one after the other."""
    return call if max_calls == 1 else Repeat(element=call, separator=separator, min_count=1, max_count=max_calls)


def call_and_more(opener: str, call: Format, separator: str, max_calls: int | None) -> Format:
    """What follows the first opener where each call has one."""
    if max_calls == 1:
        return call
    return sequence(call, Repeat(element=sequence(Text(value=separator), Mark(value=opener), call)))


def arguments_format(parameters: Mapping[str, Any] | None) -> JsonSchema:
    """The arguments object as JSON, with named members only. A function that names no parameters has none."""
    if parameters is None:
        return ANY_JSON
    if not parameters:
        return JsonSchema(schema={"type": "object", "properties": {}, "additionalProperties": False})
    return JsonSchema(schema={"type": "object", **parameters}, closes_objects=True)


class MalformedCallError(Exception):
    """The text is no call after all, or no longer one."""


class NoMoreCallsError(Exception):
    """The last call that was wanted is complete."""


class Source:
    """Text that grows at its end, and how far it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False

    def take(self, length: int) -> str:
        taken = self.text[self.pos : self.pos + length]
        self.pos += len(taken)
        return taken

    def peek(self) -> Reading[str]:
        """The next character, or "" at the end of the answer."""
        while self.pos == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.pos]

    def peek_past_space(self, sink: Sink | None = None) -> Reading[str]:
        """Read white space, into the sink if there is one; then the next character, or ""."""
        while (character := (yield from self.peek())) and character.isspace():
            space = self.take_run(_SPACE_RUN)
            if sink is not None:
                sink(space)
        return character

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """What is there already of a run of characters."""
        match = pattern.match(self.text, self.pos)
        assert match is not None, "a run may be empty"
        self.pos = match.end()
        return match[0]

    def at(self, *options: str) -> Reading[str]:
        """Which of some texts comes next, not read yet; "" when none does. None may be the beginning of another."""
        while True:
            for option in options:
                if self.text.startswith(option, self.pos):
                    return option
            rest = self.text[self.pos : self.pos + max(map(len, options))]
            if self.ended or not any(option.startswith(rest) for option in options):
                return ""
            yield

    def skip(self, *options: str) -> Reading[bool]:
        """Read white space and one of some texts; reads nothing, and says False, when none comes."""
        start = self.pos
        yield from self.peek_past_space()
        found = yield from self.at(*options)
        if found:
            self.pos += len(found)
        else:
            self.pos = start
        return bool(found)

    def comes(self, text: str) -> Reading[bool]:
        """Whether a text comes next, after white space; reads nothing."""
        start = self.pos
        found = yield from self.skip(text)
        self.pos = start
        return found

    def take_until(self, *ends: str) -> Reading[str]:
        """The text before the first of some ends, which is read too."""
        start = self.pos
        while True:
            found = [(place, end) for end in ends if (place := self.text.find(end, self.pos)) >= 0]
            if found:
                place, end = min(found)
                self.pos = place + len(end)
                return self.text[start:place]
            if self.ended:
                raise MalformedCallError
            # What has been searched is not searched again, but for a beginning of an end.
            self.pos = max(start, len(self.text) - max(map(len, ends)) + 1)
            yield

    def expect(self, text: str) -> Reading[None]:
        """Read a text that must come next, after white space."""
        if not (yield from self.skip(text)):
            raise MalformedCallError


class ToolCallParser:
    """Content and calls of one answer. A subclass is a dialect: which texts open calls, and how they are read.

    Text that is no call comes out as content, to the last character. A call comes out as soon as it is certain, which
    is where its arguments begin; should the text break off later, the call stays incomplete and the rest is content.

    Attributes:
        openers: texts that open calls anywhere.
        first_openers: texts that open calls at the beginning of an answer. They could begin other answers too, so
            there only a function of the request counts as a call.
        marks: texts that may be special tokens, which must stay in the text.
        form: what a call looks like, to tell a model whose template does not.
        other_beginning: a regex for how an answer begins that is no call, where there are `first_openers`.
        num_complete: calls whose arguments have come to their end.
    """

    openers: ClassVar[tuple[str, ...]] = ()
    first_openers: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[tuple[str, ...]] = ()
    form: ClassVar[str] = '{"name": FUNCTION, "arguments": {PARAMETER: VALUE, ...}}'
    other_beginning: ClassVar[str] = ""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], max_calls: int | None = None) -> None:
        """`schemas` has the parameters of the request's functions; text after call number `max_calls` is dropped."""
        self.num_complete = 0
        self._schemas = schemas
        self._max_calls = max_calls
        self._source = Source()
        self._accounted = 0  # text before this has come out, or was a call
        self._num_calls = 0
        self._follows_call = False
        self._needs_known_name = False
        self._parsed = Parsed()
        self._reading = self._answer()

    # ---- what may be written ------------------------------------------------------------------------------------

    @classmethod
    def calls_format(cls, functions: Functions, max_calls: int | None) -> Format:
        """An answer that is calls of some functions and nothing else, at least one.

        Raises:
            UnsupportedParameterError: the dialect cannot be held to a function's parameters.
        """
        blocks = [block for block in cls._blocks(functions, max_calls) if block.when_forced]
        return one_of(
            [sequence(Mark(value=block.opener), block.rest) if block.opener else block.rest for block in blocks]
        )

    @classmethod
    def text_format(cls, functions: Functions, max_calls: int | None) -> Format:
        """A free answer in which what begins as a call is one, of some functions; behind it only more calls may come.

        Raises:
            UnsupportedParameterError: as for `calls_format`.
        """
        blocks = [block for block in cls._blocks(functions, max_calls) if block.in_text]
        tags = [Tag(begin=block.opener, content=block.rest, end="") for block in blocks if block.opener]
        triggers = [tag.begin for tag in tags]
        text = TriggeredTags(triggers=triggers, tags=tags, stop_after_first=True)
        first = [block.rest for block in blocks if not block.opener]
        if not first:
            return text
        calls = TriggeredTags(triggers=triggers, tags=tags, at_least_one=True, stop_after_first=True)
        return Alternatives(elements=[*first, calls, sequence(Regex(pattern=cls.other_beginning), text)])

    @classmethod
    def _blocks(cls, functions: Functions, max_calls: int | None) -> list[CallBlock]:
        """The forms in which calls come, one at least for each opener."""
        raise NotImplementedError

    @classmethod
    def _json_call_format(cls, functions: Functions, word: str = "arguments") -> Format:
        """What `_json_call` reads: an object of a function's name and arguments."""
        return one_of(
            [
                sequence(Text(value=f'{{"name": "{name}", "{word}": '), arguments_format(parameters), Text(value="}"))
                for name, parameters in functions.items()
            ]
        )

    # ---- the answer as it comes ---------------------------------------------------------------------------------

    def feed(self, text: str) -> Parsed:
        """Take the next text; returns what became certain."""
        if not self.is_done:
            self._source.text += text
            next(self._reading, None)
        parsed, self._parsed = self._parsed, Parsed()
        return parsed

    def finish(self) -> Parsed:
        """The rest, when no more text will come."""
        self._source.ended = True
        return self.feed("")

    @property
    def is_done(self) -> bool:
        """The last call that was wanted is complete; what follows is dropped."""
        return self.num_complete == self._max_calls

    # ---- the answer as a whole ----------------------------------------------------------------------------------

    def _answer(self) -> Reading[None]:
        try:
            if self.first_openers:
                yield from self._source.peek_past_space()
                if opener := (yield from self._source.at(*self.first_openers)):
                    self._needs_known_name = True
                    yield from self._try_calls(opener)
                    self._needs_known_name = False
            while opener := (yield from self._content_until_opener()):
                yield from self._try_calls(opener)
        except NoMoreCallsError:
            pass

    def _content_until_opener(self) -> Reading[str]:
        """Let content out up to an opener, which stays unread; returns it, or "" at the end of the answer."""
        source = self._source
        longest = max(map(len, self.openers), default=1)
        while True:
            found = [(place, text) for text in self.openers if (place := source.text.find(text, source.pos)) >= 0]
            if found:
                source.pos, opener = min(found)
                self._let_content_out(keep_space=True)
                return opener
            if source.ended:
                source.pos = len(source.text)
                self._let_content_out(keep_space=True)
                if not self._follows_call:
                    self._let_content_out()
                return ""
            first = max(source.pos, len(source.text) - longest + 1)
            places = (place for place in range(first, len(source.text)) if self._may_open(source.text[place:]))
            source.pos = next(places, len(source.text))
            self._let_content_out(keep_space=True)
            source.text, source.pos = source.text[self._accounted :], source.pos - self._accounted
            self._accounted = 0
            yield

    def _may_open(self, text: str) -> bool:
        return any(opener.startswith(text) for opener in self.openers)

    def _let_content_out(self, *, keep_space: bool = False) -> None:
        """What was read and not accounted for is content. White space at its end may belong to a call: it can wait."""
        text = self._source.text[self._accounted : self._source.pos]
        shown = len(text.rstrip()) if keep_space else len(text)
        self._parsed.content += text[:shown]
        self._accounted += shown
        self._follows_call = self._follows_call and not shown

    def _try_calls(self, opener: str) -> Reading[None]:
        try:
            yield from self._calls(opener)
        except MalformedCallError:
            self._let_content_out(keep_space=True)

    def _calls(self, opener: str) -> Reading[None]:
        """Read calls from their opener on, as far as they follow each other."""
        raise NotImplementedError

    # ---- a call -------------------------------------------------------------------------------------------------

    def _begin_call(self, name: str) -> None:
        self._check_name(name)
        self._parsed.calls.append(ToolCallDelta(self._num_calls, self._make_id(), name))
        self._num_calls += 1
        self._account()

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name) or (self._needs_known_name and name not in self._schemas):
            raise MalformedCallError

    @staticmethod
    def _make_id() -> str:
        return f"call_{secrets.token_hex(12)}"

    def _add_arguments(self, text: str) -> None:
        """Goes into the last delta where it can, so that a piece of text makes few deltas."""
        index = self._num_calls - 1
        calls = self._parsed.calls
        if calls and calls[-1].index == index:
            last = calls[-1]
            calls[-1] = ToolCallDelta(index, last.id, last.name, last.arguments + text)
        else:
            calls.append(ToolCallDelta(index, arguments=text))
        self._account()

    def _end_call(self) -> None:
        """The arguments are complete. Ends the reading when no more calls are wanted."""
        self.num_complete += 1
        self._account()
        if self.is_done:
            raise NoMoreCallsError

    def _account(self) -> None:
        """All that was read belongs to calls."""
        self._accounted = self._source.pos
        self._follows_call = True

    # ---- JSON ---------------------------------------------------------------------------------------------------

    def _json_call(self) -> Reading[None]:
        """{"name": NAME, "arguments": {...}}, in any order; "parameters" is another word for "arguments"."""
        source = self._source
        name: str | None = None
        arguments: str | None = None
        yield from source.expect("{")
        is_complete = False
        while True:
            member = yield from self._json_text()
            yield from source.expect(":")
            if self._needs_known_name and member not in _CALL_MEMBERS:
                raise MalformedCallError
            if member not in ("arguments", "parameters"):
                value = yield from self._json_buffered()
                if member == "name":
                    name = _as_string(value)
                    self._check_name(name)
            elif name is not None and not is_complete and (yield from source.peek_past_space()) == "{":
                self._begin_call(name)
                yield from self._arguments()
                is_complete = True
            else:
                arguments = yield from self._json_buffered()
            if not (yield from source.skip(",")):
                break
        yield from source.expect("}")
        if not is_complete:
            arguments = _arguments_object(arguments)
            self._begin_call(name or "")
            self._add_arguments(arguments)
            self._end_call()
        self._account()

    def _arguments(self) -> Reading[None]:
        """An object that comes next: the arguments of the call that has begun."""
        if (yield from self._source.peek_past_space()) != "{":
            raise MalformedCallError
        yield from self._json_value(self._add_arguments)
        self._end_call()

    def _json_text(self) -> Reading[str]:
        """A string that must come next, decoded."""
        if (yield from self._source.peek_past_space()) != '"':
            raise MalformedCallError
        return _as_string((yield from self._json_buffered()))

    def _json_buffered(self) -> Reading[str]:
        parts: list[str] = []
        yield from self._json_value(parts.append)
        return "".join(parts)

    def _json_value(self, sink: Sink) -> Reading[None]:
        """Any value that comes next, as valid JSON into the sink: what models get wrong inside strings is mended."""
        source = self._source
        closers = ""
        while True:
            character = yield from source.peek_past_space(sink)
            if character and character in "{[":
                closers += "}" if character == "{" else "]"
                if len(closers) > MAX_ARGUMENTS_DEPTH:
                    raise MalformedCallError
                sink(source.take(1))
                following = yield from source.peek_past_space(sink)
                if following != closers[-1]:
                    if character == "{":
                        yield from self._json_member(sink)
                    continue
            elif character == '"':
                yield from self._json_string(sink)
            else:
                yield from self._json_word(sink)
            while closers:
                character = yield from source.peek_past_space(sink)
                if character == ",":
                    sink(source.take(1))
                    if closers[-1] == "}":
                        yield from self._json_member(sink)
                    break
                if character != closers[-1]:
                    raise MalformedCallError
                sink(source.take(1))
                closers = closers[:-1]
            else:
                return

    def _json_member(self, sink: Sink) -> Reading[None]:
        source = self._source
        if (yield from source.peek_past_space(sink)) != '"':
            raise MalformedCallError
        yield from self._json_string(sink)
        if (yield from source.peek_past_space(sink)) != ":":
            raise MalformedCallError
        sink(source.take(1))

    def _json_string(self, sink: Sink) -> Reading[None]:
        source = self._source
        sink(source.take(1))
        while character := (yield from source.peek()):
            if character == '"':
                sink(source.take(1))
                return
            if character == "\\":
                sink((yield from self._json_escape()))
            elif character < " ":
                sink(json.dumps(source.take(1))[1:-1])
            else:
                sink(source.take_run(_STRING_RUN))
        raise MalformedCallError

    def _json_escape(self) -> Reading[str]:
        """A backslash and what it escapes; one that escapes nothing was meant as itself."""
        source = self._source
        start = source.pos
        source.pos += 1
        character = yield from source.peek()
        length = 6 if character == "u" else 2
        while len(source.text) < start + length and not source.ended:
            yield
        escape = source.text[start : start + length]
        if re.fullmatch(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})', escape):
            source.pos = start + length
            return escape
        return "\\\\"

    def _json_word(self, sink: Sink) -> Reading[None]:
        source = self._source
        word = ""
        while (yield from source.peek()) and (run := source.take_run(_WORD_RUN)):
            word += run
        word = PYTHON_WORDS.get(word, word)
        if not JSON_WORD.fullmatch(word):
            raise MalformedCallError
        sink(word)


def from_json(encoded: str) -> Any:
    """A value of a model's; raises MalformedCallError for what Python or UTF-8 cannot hold."""
    try:
        value = json.loads(encoded)
    except (ValueError, RecursionError):  # also for numbers of thousands of digits
        raise MalformedCallError from None
    if isinstance(value, str):
        _require_unicode(value)
    return value


def is_json(text: str) -> bool:
    """Whether the text is one JSON value, with numbers of any length."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def to_json(value: Any) -> str:
    """A value of a model's as JSON; raises MalformedCallError for what JSON or UTF-8 cannot hold."""
    try:
        encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise MalformedCallError from None
    _require_unicode(encoded)
    return encoded


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character
        raise MalformedCallError from None


def _as_string(encoded: str) -> str:
    value = from_json(encoded)
    if not isinstance(value, str):
        raise MalformedCallError
    return value


def _arguments_object(encoded: str | None) -> str:
    """The arguments as an object's text: also none at all, and an object as the text of a string."""
    if encoded is None:
        return "{}"
    value = from_json(encoded)
    if value is None:
        return "{}"
    if isinstance(value, str):
        value, encoded = from_json(value), value
    if not isinstance(value, dict):
        raise MalformedCallError
    return encoded.strip()


def join_calls(deltas: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """One delta a call, with all of its arguments."""
    calls: list[ToolCallDelta] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append(delta)
        else:
            first = calls[delta.index]
            calls[delta.index] = ToolCallDelta(first.index, first.id, first.name, first.arguments + delta.arguments)
    return calls
