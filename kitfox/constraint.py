"""What an answer may be: the one form that every spelling of structured output is turned into.

A `Format` is a tree. Its leaves are JSON schemas, regexes, grammars and texts; its nodes put them together, for tool
calls and structural tags. Backends in `kitfox/structured_output/` compile the tree; nobody else looks inside.
"""

from __future__ import annotations

from typing import Any

import msgspec


class GrammarError(Exception):
    """A format that cannot be had, or not exactly; the message names the keyword and why. The caller's mistake."""


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, tag="json_schema", omit_defaults=True):
    """One JSON value that the schema accepts.

    Attributes:
        schema: draft 7 or 2020-12; properties are written in its order.
        closes_objects: objects that name properties and do not say whether there may be others have no others.
        max_whitespace: most whitespace characters between two JSON tokens; None is the server's.
        whitespace_pattern: a regex for it instead.
    """

    schema: dict[str, Any] | bool
    closes_objects: bool = False
    max_whitespace: int | None = None
    whitespace_pattern: str | None = None


class Regex(msgspec.Struct, frozen=True, kw_only=True, tag="regex"):
    """A text that the pattern matches as a whole."""

    pattern: str


class Ebnf(msgspec.Struct, frozen=True, kw_only=True, tag="ebnf"):
    """A grammar as llama.cpp (GBNF) and XGrammar write it; it starts at `root`."""

    grammar: str


class Lark(msgspec.Struct, frozen=True, kw_only=True, tag="lark"):
    """A grammar as Lark and llguidance write it; it starts at `start`."""

    grammar: str


class Text(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """Exactly this text."""

    value: str


class Mark(msgspec.Struct, frozen=True, kw_only=True, tag="mark"):
    """The special token of this text where the vocabulary has it, else the text."""

    value: str


class AnyText(msgspec.Struct, frozen=True, tag="any_text"):
    """Any text, of any length. In a `Sequence` it ends where what follows it first begins."""


class Sequence(msgspec.Struct, frozen=True, kw_only=True, tag="sequence"):
    """One after the other."""

    elements: list[Format]


class Alternatives(msgspec.Struct, frozen=True, kw_only=True, tag="or"):
    """One of them."""

    elements: list[Format]


class Repeat(msgspec.Struct, frozen=True, kw_only=True, tag="repeat"):
    """min_count to max_count times (None is no limit), with a separator between two."""

    element: Format
    separator: str = ""
    min_count: int = 0
    max_count: int | None = None


class Tag(msgspec.Struct, frozen=True, kw_only=True, tag="tag"):
    """`content` between two texts, of which `begin` may start with a mark."""

    begin: str
    content: Format
    end: str


class TriggeredTags(msgspec.Struct, frozen=True, kw_only=True, tag="triggered_tags"):
    """Free text in which a trigger starts one of the tags that begin with it.

    Attributes:
        triggers: a trigger that is a special token is that token. Each tag's `begin` starts with one of them.
        at_least_one: nothing but a tag may come first.
        stop_after_first: the answer ends behind the first tag.
    """

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    JsonSchema | Regex | Ebnf | Lark | Text | Mark | AnyText | Sequence | Alternatives | Repeat | Tag | TriggeredTags
)


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """The free text that may come before what is constrained.

    Attributes:
        opener, closer: the marks around it.
        is_open: the prompt has the opener already.
        max_tokens: behind so many of its tokens comes the closer; None is no limit.
    """

    opener: str
    closer: str
    is_open: bool = False
    max_tokens: int | None = None


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer must be: all of it, or all behind its reasoning.

    Attributes:
        format: as a tree or, behind the front end, as MessagePack: on its way to the compiler nobody unpacks it, for
            that takes as long as a step where a schema is large.
        param: the request's parameter that asks for it, for the error if it cannot be had.
        reasoning: None constrains from the first token on.
    """

    format: Format | bytes
    param: str = "response_format"
    reasoning: Reasoning | None = None

    @property
    def packed_format(self) -> bytes:
        return self.format if isinstance(self.format, bytes) else msgspec.msgpack.encode(self.format)


ANY_JSON = JsonSchema(schema={"type": "object"})
"""What `{"type": "json_object"}` asks for."""


def choice(texts: list[str]) -> Alternatives:
    """One of some texts."""
    return Alternatives(elements=[Text(value=text) for text in texts])
