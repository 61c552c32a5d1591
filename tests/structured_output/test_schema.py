"""What is refused before a backend sees it, and which keywords a backend would leave out."""

from __future__ import annotations

from typing import Any

import pytest

from kitfox.constraint import (
    Ebnf,
    Format,
    GrammarError,
    JsonSchema,
    Lark,
    Regex,
    Repeat,
    Sequence,
    Tag,
    Text,
    TriggeredTags,
    choice,
)
from kitfox.structured_output import schema as limits
from kitfox.structured_output.schema import (
    ExactSupport,
    check_format,
    check_schema,
    closed,
    resolve,
    unenforced_keyword,
)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def nested_format(depth: int) -> Format:
    format: Format = Text(value="a")
    for _ in range(depth):
        format = Sequence(elements=[format])
    return format


@pytest.mark.parametrize(
    ("format", "named"),
    [
        (JsonSchema(schema=nested(2000)), "nested more than 100"),
        (JsonSchema(schema=nested(200_000)), "nested more than 100"),
        (nested_format(100_000), "nested more than 100"),
        (Regex(pattern="(" * 500), "nested more than 100"),
        (Ebnf(grammar="root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000), "nested more than 100"),
        (Lark(grammar="start: " + "[" * 60_000 + '"a"' + "]" * 60_000), "nested more than 100"),
        (Text(value="a" * (limits.MAX_TEXT_BYTES + 1)), f"{limits.MAX_TEXT_BYTES} is the most"),
        (JsonSchema(schema={"const": "é" * (limits.MAX_TEXT_BYTES // 2 + 1)}), f"{limits.MAX_TEXT_BYTES} is the most"),
        (JsonSchema(schema={"enum": list(range(limits.MAX_CHOICES + 1))}), "10001 values in enum; 10000 is the most"),
        (choice(["a"] * (limits.MAX_CHOICES + 1)), "10001 alternatives; 10000 is the most"),
        (JsonSchema(schema={"const": [0] * limits.MAX_NODES}), "more than 100000 parts"),
        (Repeat(element=Text(value="a"), max_count=10**9), "repeats 1000000000 times; 100000 is the most"),
        (Repeat(element=Text(value="a"), min_count=3, max_count=2), "from 3 to 2 times"),
        (
            TriggeredTags(triggers=["<a"], tags=[Tag(begin="<b>", content=Text(value="x"), end="")]),
            "no trigger starts the tag '<b>'",
        ),
    ],
)
def test_a_limit_is_named(format: Format, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        check_format(format)


@pytest.mark.parametrize(
    "format",
    [
        Regex(pattern=r"[(]{200}\(" + r"\(" * 200),
        Ebnf(grammar='root ::= "' + "(" * 200 + '" [(({{] # ' + "(" * 200),
        Lark(grammar='start: "' + "(" * 200 + '" /[(]\\(/ // ' + "(" * 200),
        JsonSchema(schema=nested(45)),
        choice([str(number) for number in range(10_000)]),
    ],
)
def test_what_is_within_the_limits_passes(format: Format) -> None:
    check_format(format)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"type": "float"}}}, "properties.a.type must be one or more of .*, not 'float'"),
        ({"type": []}, "type must be"),
        ({"type": ["string", 1]}, "type must be"),
        ({"properties": []}, "properties must be schemas by name, not a list"),
        ({"properties": {"a": 1}}, "properties.a must be a schema, not 1"),
        ({"items": "string"}, "items must be a schema or a list of them, not 'string'"),
        ({"anyOf": []}, "anyOf must be a list of schemas"),
        ({"anyOf": [{}, None]}, r"anyOf\[1\] must be a schema, not None"),
        ({"required": "a"}, "required must be a list of names"),
        ({"properties": {"a": {"required": True}}}, "properties.a.required must be a list of names, not True"),
        ({"enum": []}, "enum must be a list of values"),
        ({"minLength": -1}, "minLength must be a whole number"),
        ({"maxItems": 1.5}, "maxItems must be a whole number"),
        ({"minLength": True}, "minLength must be a whole number"),
        ({"minimum": "1"}, "minimum must be a number"),
        ({"minimum": float("nan")}, "minimum must be a number"),
        ({"multipleOf": 0}, "multipleOf must be a number above 0"),
        ({"pattern": 1}, "pattern must be a string"),
        ({"$ref": "#/$defs/missing"}, r"'\$ref' to '#/\$defs/missing' leads nowhere"),
        ({"$ref": "https://example.com/a.json"}, "is remote"),
        ({"properties": {"a": {"$ref": "other.json#/a"}}}, r"properties.a: '\$ref' to 'other.json#/a' is remote"),
        ({"$ref": "#name"}, "anchors are not followed"),
        ({"$ref": "#/required", "required": ["a"]}, "leads to something that is not a schema"),
        ({"$ref": "#"}, "leads back to itself"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "back"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft 3"),
        ({"properties": {"a": {"$id": "http://a/b", "$ref": "#/properties"}}}, r"within a nested '\$id'"),
        ([], "the schema must be a schema"),
    ],
)
def test_a_malformed_schema_is_refused_with_the_place(schema: Any, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        False,
        {},
        {"title": 5, "x-order": [], "default": {"type": "float"}, "examples": [{"$ref": "nowhere"}]},
        {"properties": {"type": {"type": "string"}, "$ref": {"type": "integer"}, "required": {}}},
        {"enum": [{"$ref": "nowhere"}], "const": {"type": "float"}},
        {"properties": {"next": {"$ref": "#"}}},
        {"$id": "http://a/b.json", "$ref": "http://a/b.json#/$defs/c", "$defs": {"c": {"type": "null"}}},
        {"$defs": {"a/b": {}, "c~d": {}, "e f": {}}, "anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/e%20f"}]},
        {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True},
        {"items": [{"type": "null"}], "additionalItems": False},
        {"minLength": 2.0},
    ],
)
def test_a_schema_passes(schema: Any) -> None:
    check_schema(schema)


def test_a_reference_is_resolved_through_its_escapes() -> None:
    schema = {"$defs": {"a/b": {"anyOf": [{}, {"type": "null"}]}}}
    assert resolve(schema, "#/$defs/a~1b/anyOf/1") == ("$defs.a/b.anyOf[1]", {"type": "null"})


def test_a_long_chain_of_references_is_followed_without_recursion() -> None:
    chain: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(5000)}
    check_schema({"$defs": {**chain, "d5000": {"type": "null"}}, "$ref": "#/$defs/d0"})


SOME = ExactSupport(
    keywords=frozenset({"type", "properties", "required", "items", "$ref", "anyOf"}), formats=frozenset({"date"})
)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "title": "A"}}, "required": ["a"]}, None),
        ({"properties": {"a": {"uniqueItems": True}}}, "properties.a.uniqueItems"),
        ({"properties": {"a": {"uniqueItems": False}}}, None),
        ({"type": "string", "uniqueItems": True}, None),
        ({"items": {"anyOf": [{}, {"not": {}}]}}, "items.anyOf[1].not"),
        ({"not": False}, None),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 2}, "b": {"multipleOf": 3}}}, "$defs.a.multipleOf"),
        ({"$defs": {"b": {"multipleOf": 3}}}, None),
        ({"format": "date"}, None),
        ({"format": "email"}, "format 'email'"),
        ({"type": "integer", "format": "email"}, None),
        ({"format": "int32"}, None),  # no draft defines it, so it asserts nothing
        ({"minLength": 0, "minItems": 0, "additionalProperties": True}, None),
        ({"additionalProperties": False}, "additionalProperties"),
        ({"if": {"type": "string"}}, None),
        ({"if": {"type": "string"}, "then": {"type": "null"}}, "if"),
        ({"then": False, "else": False, "minContains": 3}, None),
        ({"uniqueitems": True, "x-unique": True, "readOnly": True, "$comment": "c"}, None),
        ({"contentEncoding": "base64"}, "contentEncoding"),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema", "contentEncoding": "base64"}, None),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "$ref": "#/definitions/a",
                "not": {},
                "definitions": {"a": {}},
            },
            None,
        ),
        ({"$ref": "#/definitions/a", "not": {}, "definitions": {"a": {}}}, "not"),
    ],
)
def test_the_first_keyword_that_is_not_enforced_is_named(schema: Any, expected: str | None) -> None:
    check_schema(schema)
    assert unenforced_keyword(schema, SOME) == expected


def test_a_keyword_may_be_enforced_but_not_beside_another() -> None:
    def beside(schema: Any) -> str | None:
        return "required" if "properties" in schema and "required" in schema else None

    support = SOME._replace(beside=beside)
    assert unenforced_keyword({"required": ["a"]}, support) is None
    assert unenforced_keyword({"items": {"properties": {}, "required": ["a"]}}, support) == "items.required"


class TestClosed:
    """What `closed` accepts is what the schema accepts, minus members that nobody named."""

    def test_objects_that_name_their_properties(self) -> None:
        inner = {"type": "object", "properties": {"b": {}}}
        schema = {"$defs": {"T": inner}, "properties": {"a": {"$ref": "#/$defs/T"}, "l": {"items": inner}}}
        made = closed(schema)
        assert made["additionalProperties"] is False
        assert made["$defs"]["T"]["additionalProperties"] is False
        assert made["properties"]["l"]["items"]["additionalProperties"] is False
        assert "additionalProperties" not in schema

    @pytest.mark.parametrize(
        "schema",
        [
            {"type": "object"},
            {"properties": {"a": {}}, "additionalProperties": True},
            {"properties": {"a": {}}, "additionalProperties": {"type": "string"}},
            {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
            {"properties": {"a": {}}, "required": ["a", "b"]},
            {"properties": {"a": {}}, "minProperties": 2},
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
            {"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
            {"not": {"properties": {"a": {"const": 1}}}},
            {"$defs": {"T": {"properties": {"a": {}}}}, "$ref": "#/$defs/T", "properties": {"b": {}}},
            {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
            {"properties": {"a": {"$ref": "#/nowhere"}}},
            {"properties": 3},
            True,
        ],
        ids=str,
    )
    def test_what_stays_as_it_is(self, schema: Any) -> None:
        assert closed(schema) == schema
