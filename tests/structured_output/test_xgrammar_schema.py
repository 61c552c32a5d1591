"""Which schemas xgrammar is trusted with, and that it then accepts nothing that they do not."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xgrammar")

import jsonschema

from kitfox.constraint import GrammarError, JsonSchema
from kitfox.structured_output.grammar import CompiledGrammar
from kitfox.structured_output.vocabulary import Vocabulary
from kitfox.structured_output.xgrammar_backend import XgrammarCompiler
from kitfox.structured_output.xgrammar_schema import FORMATS, exact_schema

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "jsonschema"
END = 256
COMPILER = XgrammarCompiler(
    Vocabulary(
        token_bytes=[*(bytes([byte]) for byte in range(256)), b""],
        special_ids=[END],
        special_texts=["<end>"],
        eos_token_ids=[END],
    ),
    max_whitespace=2,
)


def compiled(schema: Any) -> CompiledGrammar:
    return COMPILER.compile(JsonSchema(schema=schema))


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    state = grammar.start()
    return all(state.accept(byte) for byte in text.encode("utf-8", "surrogatepass")) and state.may_end


LATE = {"$schema": "http://json-schema.org/draft-07/schema#"}


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        ({"type": "string", "maxLength": 2}, ['"ab"', '""', '"éé"'], ['"abc"', '"\t"', '"\\n"', "1"]),
        ({"type": "string", "pattern": "b"}, ['"abc"', '"b"'], ['"ac"', '"\\u0062"']),
        ({"type": "string", "pattern": "^(b{2,})?$"}, ['""', '"bb"', '"bbb"'], ['"b"']),
        ({"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xa"', '"bx"']),
        ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 2}, ['"a"', '"ab"'], ['"abc"', '""']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-13-01"', '"24-01-01"']),
        ({"type": "string", "format": "int32"}, ['"anything"'], ["1"]),
        ({"type": "integer", "minimum": -3, "exclusiveMaximum": 2}, ["-3", "0", "1"], ["-4", "2", "1.5"]),
        ({"type": "integer", "multipleOf": 7}, ["0", "14", "-21"], ["15"]),
        ({"type": "number", "minimum": 0.5, "maximum": 1.5}, ["0.5", "1", "1.25"], ["0.49", "1.51", "2", "1e9"]),
        ({"type": "number", "multipleOf": 5}, ["5", "-10"], ["2.5", "6"]),
        ({"minimum": 3}, ["3", '"a"', "[]", "null"], ["2"]),
        ({"enum": [1, "a", None, {"b": [1]}]}, ["1", '"a"', "null", '{"b":[1]}'], ["2", "true", "{}"]),
        ({"enum": [1, "a", "bcd"], "type": "string", "maxLength": 2}, ['"a"'], ["1", '"bcd"']),
        ({"const": 1}, ["1"], ["true", "2"]),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
            ["[1]", "[1,2]"],
            ["[]", "[1,2,3]"],
        ),
        ({"prefixItems": [{"type": "null"}], "items": False}, ["[]", "[null]", "{}"], ["[1]", "[null,1]"]),
        ({"items": [{"type": "null"}], "additionalItems": {"const": 1}}, ["[null,1,1]", "[]"], ["[1]", "[null,2]"]),
        (
            {"properties": {"a": {"type": "integer"}, "ab": {"type": "null"}}},
            ["{}", '{"a":1,"ab":null,"b":[]}', '{"aa":"x"}', "3"],
            ['{"a":"x"}', '{"a":1,"\\u0061":"x"}', '{"\\u0061":"x"}', '{"ab":1}'],
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b", "c"], "additionalProperties": False},
            [],
            ['{"b":1}', '{"b":1,"c":2}', "{}"],
        ),
        ({"type": "object", "required": ["c"]}, ['{"c":1}', '{"c":1,"d":2}'], ["{}", '{"d":1}']),
        ({"properties": {"a": False}, "type": "object"}, ["{}", '{"b":1}'], ['{"a":1}', '{"\\u0061":1}']),
        (
            {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
            ["{}", '{"x_a":1}'],
            ['{"x_a":"1"}', '{"y":1}'],
        ),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, ['{"a":1,"b":2}', "{}"], ['{"c":1}']),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, ['{"a":1}'], ['{"ab":1}', '{"\\u0061":1}']),
        ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
        ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
        ({"allOf": [{"minimum": 1}, {"maximum": 2}], "type": "integer"}, ["1", "2"], ["0", "3", "1.5"]),
        (
            {
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
                "properties": {"a": {"type": "null"}},
                "type": "object",
            },
            ['{"a":null}', '{"b":1}'],
            ["{}", '{"a":1}', '{"c":1}'],
        ),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ['"a"', "1"], ["1.5", "null"]),
        (
            {
                "oneOf": [
                    {"properties": {"t": {"const": "a"}, "x": {"type": "null"}}, "required": ["t"], "type": "object"},
                    {"properties": {"t": {"const": "b"}}, "required": ["t"], "type": "object"},
                ]
            },
            ['{"t":"a"}', '{"t":"b","x":1}'],
            ['{"t":"c"}', '{"t":"a","x":1}', "{}"],
        ),
        ({"$defs": {"e": {"enum": ["x", "y"]}}, "items": {"$ref": "#/$defs/e"}, "type": "array"}, ['["x"]'], ['["z"]']),
        (
            {
                "type": "object",
                "properties": {"n": {"$ref": "#"}, "v": {"type": "null"}},
                "additionalProperties": False,
            },
            ['{"n":{"n":{},"v":null}}'],
            ['{"n":1}', '{"n":{"v":1}}'],
        ),
        ({"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a", "maxLength": 1}, ['"a"'], ['"ab"', "1"]),
        ({**LATE, "definitions": {"a": {"type": "string"}}, "$ref": "#/definitions/a", "not": {}}, ['"ab"'], ["1"]),
        (True, ["1", "[]"], ["", "01"]),
        ({"title": "t", "x": {"not": {}}}, ["1", "null"], []),
    ],
)
def test_a_keyword_is_enforced(schema: Any, accepted: list[str], rejected: list[str]) -> None:
    try:
        grammar = compiled(schema)
    except GrammarError:
        assert not accepted
        return
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, "does not enforce properties.a.uniqueItems"),
        ({"not": {"type": "null"}}, "does not enforce not"),
        ({"if": {}, "then": {"type": "null"}}, "does not enforce if"),
        ({"contains": {"type": "null"}}, "does not enforce contains"),
        ({"dependentRequired": {"a": ["b"]}}, "does not enforce dependentRequired"),
        ({"unevaluatedProperties": False}, "does not enforce unevaluatedProperties"),
        ({"type": "string", "format": "regex"}, "does not enforce format 'regex'"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf: it is not a whole number"),
        ({"type": "integer", "multipleOf": 3, "minimum": 1}, "multipleOf: it stands beside one bound"),
        ({"type": "integer", "multipleOf": 5000}, "multipleOf: it is above 1024"),
        ({"properties": {"a": {"pattern": "a+b", "maxLength": 3}}}, "properties.a.maxLength: it stands beside"),
        ({"pattern": "a", "format": "date"}, "format: it stands beside"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern: '\\(\\?=a\\)' .* look-around"),
        ({"type": "string", "pattern": "^\\n$"}, "needs no escape in JSON"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf: it cannot tell"),
        ({"patternProperties": {"^a": {"type": "null"}}}, "patternProperties: properties that match none"),
        (
            {
                "patternProperties": {"^a": {"type": "null"}, "b$": {"type": "string"}},
                "additionalProperties": False,
                "type": "object",
            },
            "two patterns may match",
        ),
        ({"type": "object", "minProperties": 2}, "minProperties: keys may repeat"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "no value satisfies"),
        (False, "no value satisfies"),
        ({"type": "number", "minimum": 1e-7}, "minimum: it has more than 6 decimals"),
        ({"type": "integer", "minimum": 10**30}, "minimum: it does not fit in 64 bits"),
    ],
)
def test_what_is_not_enforced_exactly_is_refused_by_name(schema: Any, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        compiled(schema)


def test_a_long_chain_of_required_objects_is_refused_and_overflows_nothing() -> None:
    chain: dict[str, Any] = {f"d{n}": {"properties": {"n": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(3000)}
    with pytest.raises(GrammarError, match="nested more than"):
        compiled({"$defs": {**chain, "d3000": {}}, "$ref": "#/$defs/d0"})


def test_a_schema_that_many_refer_to_is_written_once() -> None:
    node = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    schema = {"$defs": {"n": node}, "properties": {f"p{n}": {"$ref": "#/$defs/n"} for n in range(50)}, "type": "object"}
    assert len(exact_schema(schema)["$defs"]) <= 3


def test_patterns_are_matched_as_a_regex_library_does() -> None:
    rng = random.Random(0)

    def pattern(depth: int) -> str:
        kind = rng.random()
        if depth == 0 or kind < 0.25:
            return rng.choice(["a", "b", "c", "[ab]", "[^a]", "."])
        if kind < 0.5:
            return "".join(pattern(depth - 1) for _ in range(rng.randint(2, 3)))
        if kind < 0.75:
            return "(?:" + "|".join(pattern(depth - 1) for _ in range(rng.randint(2, 3))) + ")"
        return f"(?:{pattern(depth - 1)})" + rng.choice(["*", "+", "?", "{2}", "{1,2}", "{0,2}", "{2,}"])

    texts = ["".join(letters) for length in range(5) for letters in itertools.product("abc", repeat=length)]
    for _ in range(60):
        written = pattern(3)
        grammar = compiled({"type": "string", "pattern": f"^(?:{written})$"})
        matched = [text for text in texts if accepts(grammar, f'"{text}"')]
        assert matched == [text for text in texts if re.fullmatch(written, text)], written


def test_bounds_of_numbers_are_those_of_arithmetic() -> None:
    rng = random.Random(0)
    bounds = [-1000, -17, -1.5, -0.25, 0, 0.000001, 0.3, 1, 9, 10, 99.5, 12345, 999999]
    for _ in range(60):
        schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
        low, high = sorted(rng.sample(bounds, 2))
        for keyword, bound in (("inimum", low), ("aximum", high)):
            if rng.random() < 0.8:
                name = rng.choice(["m", "exclusiveM"]) + keyword
                schema[name] = bound
        try:
            grammar = compiled(schema)
        except GrammarError:
            continue
        near = [bound + step for bound in (low, high, 0) for step in (-1, -0.5, -0.000001, 0, 0.000001, 0.25, 1, 10)]
        for value in near:
            text = repr(round(value, 6)) if rng.random() < 0.5 or value % 1 else str(int(value))
            if "e" not in text and accepts(grammar, text):
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_lets_nothing_through_that_its_checker_refuses(name: str) -> None:
    """Walks at random through the grammar of a format; each text that it reaches must be one."""
    grammar = compiled({"type": "string", "format": name})
    checker = jsonschema.Draft202012Validator(
        {"format": name}, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    rng = random.Random(name)
    likely = b"0123456789:-.Z/TPabz@%~"
    for _ in range(15):
        state = grammar.start()
        text = bytearray()
        while len(text) < 120 and not state.may_end:
            allowed = [byte for byte in range(256) if byte < 127 and state.accept(byte) and not state.rollback(1)]
            preferred = [byte for byte in allowed if byte in likely or byte == ord('"')]
            byte = rng.choice(preferred or allowed)
            assert state.accept(byte)
            text.append(byte)
        if state.may_end:
            checker.validate(json.loads(bytes(text)))


def cases(file: str, draft: str | None) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    path = SHARED_DATA / file
    if not path.exists():
        pytest.skip("the schemas of MaskBench and of JSON-Schema-Test-Suite are not here")
    for line in filter(None, path.read_text().split("\n")):  # texts have other line ends in them
        case = json.loads(line)
        schema = case["schema"]
        if draft and isinstance(schema, dict):
            schema = {"$schema": draft, **schema}
        yield case.get("id") or f"{case['file']}: {case['desc']}", schema, case["tests"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "draft", "least_supported"),
    [
        ("maskbench_sample.jsonl", None, 380),
        ("json_schema_test_suite_draft7.jsonl", None, 200),
        ("json_schema_test_suite_draft7.jsonl", LATE["$schema"], 200),
        ("json_schema_test_suite_draft2020-12.jsonl", None, 210),
    ],
)
def test_no_invalid_instance_is_accepted(file: str, draft: str | None, least_supported: int) -> None:
    wrong = []
    num_supported = 0
    for name, schema, instances in cases(file, draft):
        try:
            grammar = compiled(schema)
        except GrammarError:
            continue
        num_supported += 1
        for instance in instances:
            if not instance["valid"]:
                texts = {json.dumps(instance["data"]), json.dumps(instance["data"], ensure_ascii=False, indent=1)}
                wrong += [(name, text) for text in texts if accepts(grammar, text)]
    assert wrong == []
    assert num_supported >= least_supported
