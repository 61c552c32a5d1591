"""Reading grammars in llama.cpp's notation."""

from __future__ import annotations

import pytest

from kitfox.constraint import GrammarError
from kitfox.structured_output.gbnf import (
    Characters,
    Choice,
    Concatenation,
    Expression,
    Literal,
    Repetition,
    RuleName,
    parse_gbnf,
)


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ('"a\\"\\\\\\n\\x41\\u00e9\\U0001F98A"', Literal('a"\\\nA\u00e9\U0001f98a')),
        ('""', Literal("")),
        ("[a-z\\]0-]", Characters(((97, 122), (93, 93), (48, 48), (45, 45)), negated=False)),
        ("[^\\n]", Characters(((10, 10),), negated=True)),
        (".", Characters((), negated=True)),
        ('"a" | | "b"', Choice((Literal("a"), Literal(""), Literal("b")))),
        ('("a" "b")*', Repetition(Concatenation((Literal("a"), Literal("b"))), 0, None)),
        ('"a"+', Repetition(Literal("a"), 1, None)),
        ('"a"?', Repetition(Literal("a"), 0, 1)),
        ('"a"{3}', Repetition(Literal("a"), 3, 3)),
        ('"a"{3,}', Repetition(Literal("a"), 3, None)),
        ('"a"{,3}', Repetition(Literal("a"), 0, 3)),
        ('"a"{ 1 , 3 }', Repetition(Literal("a"), 1, 3)),
        ("root", RuleName("root")),
        ('"a" # a comment with "quotes"\n  | "b"', Choice((Literal("a"), Literal("b")))),
    ],
)
def test_expressions(text: str, expression: Expression) -> None:
    assert parse_gbnf(f"root ::= {text}")["root"] == expression


def test_rules_end_where_the_next_begins() -> None:
    rules = parse_gbnf('# first\nroot ::= a-1\n  b_2\r\na-1 ::=\n "x"\n\nb_2 ::= "y"')
    assert rules == {
        "root": Concatenation((RuleName("a-1"), RuleName("b_2"))),
        "a-1": Literal("x"),
        "b_2": Literal("y"),
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no rule named root"),
        ('start ::= "a"', "no rule named root"),
        ("root ::= other", "other"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ('root ::= "a', "lacks its closing"),
        ("root ::= [a", "too early"),
        ("root ::= []", "no character"),
        ("root ::= [z-a]", "backwards"),
        ('root ::= "\\q"', "escape"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= ("a"', r"\) is expected"),
        ('root ::= "a")', "expected"),
        ('root ::= "a"{3,1}', "wrong way round"),
        ('root ::= "a"{}', "is expected"),
        ('root ::= (= "a")', "lookahead"),
        ('root ::= TagDispatch("a")', "TagDispatch"),
        ("root ::= 'a'", "not expected"),
        ("root = a", "a rule"),
    ],
)
def test_what_is_none_is_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(GrammarError, match=problem):
        parse_gbnf(text)
