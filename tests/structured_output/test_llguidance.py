"""What is llguidance's own: its limits, its errors in plain words, where its lexer would change a meaning."""

from __future__ import annotations

import llguidance
import pytest

from kitfox.constraint import (
    Alternatives,
    AnyText,
    Ebnf,
    Format,
    GrammarError,
    JsonSchema,
    Lark,
    Regex,
    Repeat,
    Sequence,
    Text,
)
from kitfox.structured_output import llguidance_backend
from kitfox.structured_output.grammar import CompiledGrammar
from kitfox.structured_output.llguidance_backend import LlguidanceCompiler
from tests.contract.test_grammar import verdict
from tests.structured_output.vocabularies import VOCABULARY, allowed_by

OBJECT = JsonSchema(schema={"type": "object"})
JSON_EBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def compiler() -> LlguidanceCompiler:
    return LlguidanceCompiler(VOCABULARY, max_whitespace=8)


@pytest.mark.parametrize(
    "format",
    [
        Sequence(elements=[JsonSchema(schema={"type": "integer"}), Text(value=".")]),
        Sequence(elements=[JsonSchema(schema=True), JsonSchema(schema=True)]),
        Sequence(elements=[Regex(pattern="[a-z{]*"), OBJECT]),
        Alternatives(elements=[Text(value="a{x"), Sequence(elements=[Text(value="a"), OBJECT])]),
        Sequence(elements=[Repeat(element=AnyText(), separator=","), OBJECT]),
        Ebnf(grammar='root ::= a "x"\na ::= "(" a ")" | [a-z]+'),
    ],
)
def test_a_lexeme_that_could_swallow_the_next_is_refused(compiler: LlguidanceCompiler, format: Format) -> None:
    with pytest.raises(GrammarError, match=r"llguidance cannot tell where .* ends"):
        compiler.compile(format)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (Sequence(elements=[JsonSchema(schema={"type": "integer"}), Text(value="!")]), "12!"),
        (Sequence(elements=[Regex(pattern="[a-z]*"), OBJECT]), "ab{}"),
        (Sequence(elements=[Regex(pattern="[a-z]*"), OBJECT]), "{}"),
        (Ebnf(grammar=JSON_EBNF), '{"a": [1, -2.5, "x\\n", true, {}]}'),
        (Ebnf(grammar='root ::= ("a" | "ab") "bc"'), "abc"),
        (Ebnf(grammar='root ::= [a-z]+ "b"'), "aab"),
        (Lark(grammar='start: "x" %json {"type": "object"} // <|tool|>\n'), 'x{"<|a|>":1}'),
        (Lark(grammar='start: /[<@]+/ "max_tokens=1"'), "<@max_tokens=1"),
    ],
)
def test_what_no_lexeme_can_confuse_is_exact(compiler: LlguidanceCompiler, format: Format, text: str) -> None:
    assert verdict(compiler.compile(format), text) in ("may end", "must end")


@pytest.mark.parametrize(
    "grammar",
    [
        "start: <|tool|>",
        "start: <[260]>",
        "start: @other",
        'start: a\na[max_tokens=3]: "x"',
        'start: a\na[stop="x"]: /.*/',
        '%llguidance {"no_forcing": true}\nstart: "x"',
        'start: %json {"not": {}}',
        'start: %json {"type": 5}',
        "start: %json nothing",
    ],
)
def test_a_lark_grammar_stays_among_texts(compiler: LlguidanceCompiler, grammar: str) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(Lark(grammar=grammar))


def test_whitespace_within_a_lark_grammars_json_is_bounded(compiler: LlguidanceCompiler) -> None:
    grammar = compiler.compile(Lark(grammar='start: %json {"type": "object"}'))
    assert verdict(grammar, "{" + " " * 8 + "}") == "must end"
    assert verdict(grammar, "{" + " " * 9) == "no"


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "array", "uniqueItems": True}, "llguidance does not enforce uniqueItems"),
        ({"properties": {"a": {"contains": {}}}}, "properties.a.contains"),
        ({"oneOf": [{"type": "object"}, {"type": "object", "required": ["a"]}]}, "oneOf"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no value satisfies"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"const": "a\x00b"}, "control characters in const"),
        ({"properties": {"a\x7f": {}}}, "control characters in properties"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "contentEncoding": "base64"}, "contentEncoding"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern"),
    ],
)
def test_errors_name_the_keyword_in_a_line(compiler: LlguidanceCompiler, schema: dict, problem: str) -> None:
    with pytest.raises(GrammarError, match=problem) as error:
        compiler.compile(JsonSchema(schema=schema))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "format": "date"}, '"2000-02-29"', '"1900-02-29"'),
        ({"type": "string", "format": "time"}, '"12:00:00Z"', '"23:59:60Z"'),
        ({"type": "string", "format": "hostname"}, '"a-b.example"', '"xn--x.example"'),
        ({"type": "string", "format": "hostname"}, f'"{"a" * 63}"', f'"{"a" * 64}"'),
        ({"type": "string", "format": "no such format"}, '"anything"', "1"),
        ({"type": "string", "maxLength": 2.0}, '"ab"', '"abc"'),
        ({"type": "string", "pattern": r"^\S<\d$"}, '"a<1"', '"\ufeff<1"'),
        ({"type": "object", "required": ["a"], "minProperties": 2}, '{"a":1,"b":2}', '{"a":1}'),
    ],
)
def test_what_llguidance_is_lax_about_is_exact(
    compiler: LlguidanceCompiler, schema: dict, valid: str, invalid: str
) -> None:
    grammar = compiler.compile(JsonSchema(schema=schema))
    assert verdict(grammar, valid) == "must end"
    assert verdict(grammar, invalid) == "no"


def test_the_request_does_not_reach_llguidances_options(compiler: LlguidanceCompiler) -> None:
    schema = {"type": "array", "items": {}, "x-guidance": {"whitespace_flexible": True, "item_separator": ";"}}
    grammar = compiler.compile(JsonSchema(schema=schema, max_whitespace=0))
    assert verdict(grammar, "[1,2]") == "must end"


def test_a_step_that_takes_too_long_fails_alone(compiler: LlguidanceCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = llguidance.LLParserLimits(max_lexer_states=30, verbose_errors=False)
    monkeypatch.setattr(llguidance_backend, "_LIMITS", tight)
    grammar = compiler.compile(Regex(pattern="(ab|cd|ef){0,100}x"))
    with pytest.raises(GrammarError, match="too complex"):
        walk_through(grammar, b"abcdef" * 15)
    assert ord("a") in allowed_by(grammar.start())


def walk_through(grammar: CompiledGrammar, text: bytes) -> None:
    walk = grammar.start()
    for byte in text:
        allowed_by(walk)
        walk.accept(byte)
