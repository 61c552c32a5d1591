"""What `auto` says where both backends refuse."""

from __future__ import annotations

import pytest

from kitfox.constraint import Ebnf, Format, GrammarError, JsonSchema, Lark, Regex
from kitfox.structured_output.backends import make_grammar_compiler
from tests.structured_output.vocabularies import VOCABULARY


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (JsonSchema(schema={"items": {"not": {"type": "null"}}}), "no backend enforces items.not"),
        (
            JsonSchema(schema={"propertyNames": {"not": {}}, "unevaluatedProperties": False}),
            "llguidance does not enforce propertyNames; xgrammar does not enforce unevaluatedProperties",
        ),
        (
            JsonSchema(schema={"pattern": "("}),
            "pattern: '(' is no pattern that can be enforced: at character 2, a group is not closed",
        ),
        (
            Regex(pattern="(?<=a)b"),
            "the regex is no pattern that can be enforced: at character 3, look-around and flags are not supported",
        ),
        (Ebnf(grammar="root ::= nowhere"), "rule root uses nowhere, which the grammar does not define"),
        (Lark(grammar="start: nowhere"), 'unknown name: "nowhere"'),
    ],
)
def test_one_message_says_what_both_say_once(format: Format, message: str) -> None:
    pytest.importorskip("xgrammar")
    with pytest.raises(GrammarError) as refused:
        make_grammar_compiler("auto", VOCABULARY, max_whitespace=8).compile(format)
    assert str(refused.value) == message


def test_the_longer_of_two_reasons_is_given() -> None:
    pytest.importorskip("xgrammar")
    schema = {"allOf": [{"type": "string"}, {"type": "integer"}]}
    with pytest.raises(GrammarError, match=r"^no value satisfies the schema: ") as refused:
        make_grammar_compiler("auto", VOCABULARY, max_whitespace=8).compile(JsonSchema(schema=schema))
    assert str(refused.value).count("no value") == 1
