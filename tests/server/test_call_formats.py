"""What a grammar of calls allows is what the parser reads: random walks through each dialect's grammar are calls."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from kitfox.constraint import Format
from kitfox.errors import UnsupportedParameterError
from kitfox.server.parsers import TOOL_CALL_PARSERS, ToolCallParser, join_calls
from kitfox.structured_output.backends import make_grammar_compiler
from kitfox.structured_output.grammar import Grammar
from kitfox.structured_output.vocabulary import Vocabulary

EOS = 256
FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "exact": {"type": "boolean"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "place": {"$ref": "#/$defs/Place"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["days", "unit"],
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    "time": {},
    "say": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 2, "maxLength": 8}},
        "required": ["text"],
        "additionalProperties": False,
    },
    "maybe": {
        "type": "object",
        "properties": {"a": {"type": ["integer", "null"]}, "b": {"type": "string"}, "c": {"const": 5}},
    },
}
CLOSERS = set("\"}]),<>\n/='")
# With special tokens for its marks, and with a vocabulary that writes them out. Gemma's quotes are never written out:
# what is a string would not be told from what follows it.
VOCABULARIES = [
    (dialect, has_marks)
    for dialect in TOOL_CALL_PARSERS
    for has_marks in (False, True)
    if has_marks or dialect != "gemma"
]


def vocabulary_of(parser: type[ToolCallParser], *, has_marks: bool) -> Vocabulary:
    marks = list(parser.marks) if has_marks else []
    return Vocabulary(
        token_bytes=[bytes([byte]) for byte in range(256)] + [b""] * (1 + len(marks)),
        special_ids=[EOS + 1 + index for index in range(len(marks))],
        special_texts=marks,
        eos_token_ids=[EOS],
    )


def walk(
    grammar: Grammar, vocabulary: Vocabulary, words: list[str], rng: random.Random, max_tokens: int = 1500
) -> str | None:
    """A random text of the grammar, in ASCII where it can be; None for one that does not come to an end.

    Now and then it tries to write a word, which no chance would make of letters.
    """
    written = bytearray()
    word = b""
    row = np.zeros(vocabulary.num_mask_words, np.int32)
    for length in range(max_tokens):
        if grammar.must_end or (grammar.may_end and rng.random() < (0.02 if length < 200 else 0.9)):
            return written.decode("utf-8", "replace")
        grammar.fill_bitmask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary.size]).tolist()
        assert allowed or grammar.may_end, f"nothing can follow {bytes(written)!r}"
        if not allowed:
            return written.decode("utf-8", "replace")
        if not word and rng.random() < 0.1:
            word = rng.choice(words).encode()
        plain = [token for token in allowed if token > EOS or 32 <= token < 127 or token == 10] or allowed
        closing = [token for token in plain if token > EOS or chr(token) in CLOSERS]
        if word and word[0] in allowed:
            token, word = word[0], word[1:]
        else:
            token = rng.choice(closing if closing and (length > 300 or rng.random() < 0.5) else plain)
            word = b""
        assert grammar.accept(token)
        written += vocabulary.token_bytes[token] or vocabulary.special_texts[token - EOS - 1].encode()
    return None


def read(parser: type[ToolCallParser], text: str, max_calls: int | None) -> tuple[str, list[tuple[str, Any]], int]:
    """Content, calls with their arguments, and how many are complete; and the arguments fit the schemas."""
    reader = parser(FUNCTIONS, max_calls)
    parts = [reader.feed(text), reader.finish()]
    calls = [(call.name or "", json.loads(call.arguments)) for call in join_calls(c for p in parts for c in p.calls)]
    for name, arguments in calls:
        jsonschema.Draft202012Validator(FUNCTIONS[name] or {"maxProperties": 0}).validate(arguments)
    return "".join(part.content for part in parts), calls, reader.num_complete


def walks_of(parser: type[ToolCallParser], format: Format, *, has_marks: bool, count: int) -> list[str]:
    vocabulary = vocabulary_of(parser, has_marks=has_marks)
    compiled = make_grammar_compiler("auto", vocabulary, max_whitespace=2).compile(format)
    words = [*parser.marks, *parser.openers, "</parameter>", "</function>"]
    walks = [walk(compiled.start(), vocabulary, words, random.Random(seed)) for seed in range(count)]
    texts = [text for text in walks if text is not None]
    assert len(texts) > count // 3
    return texts


@pytest.mark.parametrize("max_calls", [None, 1])
@pytest.mark.parametrize(("dialect", "has_marks"), VOCABULARIES)
def test_a_forced_call_is_always_read_and_valid(dialect: str, has_marks: bool, max_calls: int | None) -> None:
    parser = TOOL_CALL_PARSERS[dialect]
    seen = set()
    most = 0
    for text in walks_of(parser, parser.calls_format(FUNCTIONS, max_calls), has_marks=has_marks, count=60):
        content, calls, num_complete = read(parser, text, max_calls)
        assert content == "", text
        assert calls, text
        assert num_complete == len(calls), text
        seen |= {name for name, _ in calls}
        most = max(most, len(calls))
    assert seen == set(FUNCTIONS)
    assert most > 1 if max_calls is None else most == 1


@pytest.mark.parametrize(("dialect", "has_marks"), VOCABULARIES)
def test_a_call_in_free_text_is_always_valid(dialect: str, has_marks: bool) -> None:
    parser = TOOL_CALL_PARSERS[dialect]
    num_calls = 0
    for text in walks_of(parser, parser.text_format(FUNCTIONS, None), has_marks=has_marks, count=60):
        _, calls, num_complete = read(parser, text, None)
        assert num_complete == len(calls), text
        num_calls += len(calls)
    assert num_calls


@pytest.mark.parametrize("dialect", TOOL_CALL_PARSERS)
def test_arguments_of_a_function_that_is_not_held_to_them(dialect: str) -> None:
    parser = TOOL_CALL_PARSERS[dialect]
    format = parser.calls_format({"say": None}, 1)
    texts = walks_of(parser, format, has_marks=True, count=20)
    assert len(set(texts)) > 1
    assert all("say" in text for text in texts)


@pytest.mark.parametrize("dialect", ["qwen3_coder", "pythonic", "gemma"])
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"patternProperties": {}}, "patternProperties"),
        ({"properties": {"a": {"$ref": "#"}}, "anyOf": []}, "anyOf"),
        ({"properties": {"a": {"$ref": "http://x"}}}, "$ref"),
        ({"properties": {"a b>": {"type": "string"}}}, "property"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "$ref"),
        ({"required": ["a"]}, "required"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused_by_name(dialect: str, schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        TOOL_CALL_PARSERS[dialect].calls_format({"f": {"type": "object", **schema}}, None)
    assert keyword in caught.value.message


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        ("5", {"type": ["string", "integer"]}, 5),
        ("5.5", {"type": ["string", "integer"]}, "5.5"),
        ("5", {"enum": ["5", 7]}, "5"),
        ("7", {"enum": ["5", 7]}, 7),
        ('["a</parameter>b"]', {"type": "array"}, ["a</parameter>b"]),
        ('["a', {"type": "array"}, '["a'),
        ("True", {"type": "boolean"}, True),
    ],
)
def test_bare_values_are_read_as_their_schema_says(value: str, schema: dict[str, Any], expected: Any) -> None:
    parser = TOOL_CALL_PARSERS["qwen3_coder"]({"f": {"properties": {"a": schema}}})
    parts = [parser.feed(f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>"), parser.finish()]
    [call] = join_calls(call for part in parts for call in part.calls)
    assert json.loads(call.arguments) == {"a": expected}
