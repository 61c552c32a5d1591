"""xgrammar behind the grammar interface: states, formats other than schemas, and hostile ones."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("xgrammar")

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
    choice,
)
from kitfox.structured_output.grammar import Grammar
from kitfox.structured_output.vocabulary import Vocabulary
from kitfox.structured_output.xgrammar_backend import XgrammarCompiler

END, CALL, THINK = 256, 257, 258
WORDS = [b'{"', b'":', b'"}', b"ab", b"abc", "é".encode(), "é".encode()[:1] + b"", b"12", b"<t"]
VOCABULARY = Vocabulary(
    token_bytes=[*(bytes([byte]) for byte in range(256)), b"", b"", b"", *WORDS],
    special_ids=[END, CALL, THINK],
    special_texts=["<end>", "<call>", "<think>"],
    eos_token_ids=[END],
)
COMPILER = XgrammarCompiler(VOCABULARY, max_whitespace=2)
A_SCHEMA = JsonSchema(
    schema={
        "type": "object",
        "properties": {"ab": {"type": "string", "maxLength": 3}, "n": {"type": "integer"}},
        "required": ["ab", "n"],
        "additionalProperties": False,
    }
)


def tokens_of(*parts: str | int) -> list[int]:
    """A token for each byte of a text; an int is a token."""
    return [token for part in parts for token in ([part] if isinstance(part, int) else list(part.encode()))]


def state_after(format: Format, *parts: str | int) -> Grammar | None:
    """None where a token was not accepted."""
    state = COMPILER.compile(format).start()
    return state if all(state.accept(token) for token in tokens_of(*parts)) else None


def accepts(format: Format, *parts: str | int) -> bool:
    state = state_after(format, *parts)
    return state is not None and state.may_end


def allowed(state: Grammar) -> list[int]:
    row = np.full(VOCABULARY.num_mask_words, -1, np.int32)
    state.fill_bitmask(row)
    return np.nonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0].tolist()


TAG = Tag(begin="<f=a>", content=JsonSchema(schema={"type": "integer"}), end="</f>")
CALL_TAG = Tag(begin="<call>go(", content=Regex(pattern="[0-9]+"), end=")")


@pytest.mark.parametrize(
    ("format", "accepted", "rejected"),
    [
        (Text(value="héé"), [("héé",)], [("h",), ("",)]),
        (choice(["a", "ab"]), [("a",), ("ab",)], [("b",), ("abc",)]),
        (Regex(pattern=r"\d{2,3}-?[^a\n]"), [("12-b",), ("123é",)], [("1b",), ("12a",), ("12\n",)]),
        (
            Regex(pattern=r"[é0-9a\n][^é\n0b]"),
            [("éa",), ("a1",), ("\na",), ("9ª",)],
            [("aé",), ("ab",), ("a\n",), ("b1",)],
        ),
        (Regex(pattern="^ab?$"), [("a",), ("ab",)], [("",)]),
        (Regex(pattern="(?:b{2,})?"), [("",), ("bb",)], [("b",)]),
        (Ebnf(grammar='root ::= "a" root "b" | "("'), [("(",), ("a(b",), ("aa(bb",)], [("a(",), ("a(bb",)]),
        (Ebnf(grammar='root ::= root "a" | "b"'), [("b",), ("baa",)], [("a",)]),
        (Lark(grammar='start: "a" WORD\nWORD: /[b-d]+/'), [("abcd",)], [("a",), ("ae",)]),
        (Lark(grammar='start: "<a>@b %json" /<c>@/ // @d'), [("<a>@b %json<c>@",)], [("",)]),
        (Ebnf(grammar='root ::= "Token(" [A-Z(] # Token(1)'), [("Token((",)], [("",)]),
        (JsonSchema(schema={"type": "array"}), [("[1,  [ ]]",)], [("[1,   2]",), ("{}",)]),
        (JsonSchema(schema={"type": "array"}, max_whitespace=0), [("[1,[2]]",)], [("[1, 2]",), ("[ ]",)]),
        (JsonSchema(schema={"type": "array"}, whitespace_pattern=""), [("[1,[2]]",)], [("[1, 2]",)]),
        (JsonSchema(schema={"type": "array"}, max_whitespace=5), [("[1,     2]",)], [("[1,      2]",)]),
        (Sequence(elements=[]), [("",)], [("a",)]),
        (Sequence(elements=[Text(value=""), Text(value="a"), Regex(pattern="b+")]), [("abb",)], [("a",), ("bb",)]),
        (
            Repeat(element=Text(value="a"), separator=",", min_count=1, max_count=3),
            [("a",), ("a,a,a",)],
            [("",), ("a,a,a,a",), ("a,",)],
        ),
        (Repeat(element=Text(value="a"), separator=","), [("",), ("a",), ("a,a,a,a",)], [("aa",)]),
        (Repeat(element=Text(value="a"), min_count=2), [("aa",), ("aaaa",)], [("a",)]),
        (Repeat(element=Text(value="a"), max_count=0), [("",)], [("a",)]),
        (AnyText(), [("",), ("anything <f=a> é",)], [("a", CALL), ("a", END)]),
        (
            Sequence(elements=[AnyText(), Text(value="</x>"), Text(value="!")]),
            [("a</</x>!",), ("</x>!",)],
            [("a",), ("a</x></x>!",)],
        ),
        (
            Sequence(elements=[AnyText(), Mark(value="<think>"), Text(value="!")]),
            [("a<think>", THINK, "!")],
            [("a", CALL), ("a!",)],
        ),
        (Mark(value="<no such>"), [("<no such>",)], []),
        (Mark(value="<call>"), [(CALL,)], [("<call>",), (THINK,)]),
        (TAG, [("<f=a>12</f>",)], [("<f=a>x</f>",), ("<f=a>12",)]),
        (CALL_TAG, [(CALL, "go(12)")], [("<call>go(12)",), (CALL, "go()")]),
        (Tag(begin="<x>", content=AnyText(), end="</x>"), [("<x>a<b</x>",)], [("<x></x></x>",)]),
        (
            TriggeredTags(triggers=["<f="], tags=[TAG]),
            [("",), ("hi",), ("hi<f=a>1</f>x<f=a>2</f>",)],
            [("<f=",), ("<f=b",)],
        ),
        (TriggeredTags(triggers=["<f="], tags=[TAG], at_least_one=True), [("<f=a>1</f> and",)], [("",), ("hi",)]),
        (
            TriggeredTags(triggers=["<f="], tags=[TAG], stop_after_first=True),
            [("hi",), ("hi<f=a>1</f>",)],
            [("<f=a>1</f>x",)],
        ),
        (
            TriggeredTags(triggers=["<f="], tags=[TAG], stop_after_first=True, at_least_one=True),
            [("<f=a>1</f>",)],
            [("",), ("x",), ("<f=a>1</f>x",)],
        ),
        (
            TriggeredTags(triggers=["<call>"], tags=[CALL_TAG]),
            [("hi",), ("hi", CALL, "go(1)x"), ("<call>",)],
            [(CALL,), (CALL, "x"), ("hi", THINK)],
        ),
        (
            Sequence(elements=[TriggeredTags(triggers=["<f="], tags=[TAG]), Text(value="DONE")]),
            [("hiDONE",), ("<f=a>1</f>DONE",)],
            [("hi",), ("DONEx",)],
        ),
    ],
)
def test_a_format_accepts_what_it_says(
    format: Format, accepted: list[tuple[str | int, ...]], rejected: list[tuple[str | int, ...]]
) -> None:
    assert [parts for parts in accepted if not accepts(format, *parts)] == []
    assert [parts for parts in rejected if accepts(format, *parts)] == []


@pytest.mark.parametrize(
    ("format", "named"),
    [
        (Regex(pattern="["), "a class is not closed"),
        (Regex(pattern="(?<=a)b"), "look-around"),
        (Regex(pattern="(?<=x)*"), "look-around"),
        (Regex(pattern="(" * 50), "a group is not closed"),
        (Regex(pattern="a{3,2}"), "from more to less"),
        (Regex(pattern=r"(a)\1"), r"'\\1' is not supported"),
        (Ebnf(grammar='root ::= "a'), "the grammar is not one"),
        (Ebnf(grammar="root ::= missing"), "the grammar is not one"),
        (Ebnf(grammar=""), "the grammar is not one"),
        (Lark(grammar="start: missing"), "cannot compile"),
        (Lark(grammar='start[max_tokens=3]: "a"'), "does not honour 'max_tokens'"),
        (Lark(grammar="start: %json {}"), "does not honour '%json'"),
        (Lark(grammar="start: <[257]>"), r"does not honour '<\[257\]>'"),
        (Lark(grammar="start: @other"), "does not honour '@other'"),
        (Ebnf(grammar="root ::= Token(257)"), "does not honour 'Token'"),
        (Ebnf(grammar="root ::= root"), "nothing that the vocabulary can write"),
        (Mark(value="<end>"), "ends an answer"),
        (Alternatives(elements=[]), "no alternatives"),
        (JsonSchema(schema={}, whitespace_pattern="[ ]?"), "whitespace_pattern"),
        (Sequence(elements=[AnyText(), Regex(pattern="a")]), "free text ends at"),
        (Sequence(elements=[AnyText(), Text(value="\n\n")]), "begins as it ends"),
        (TriggeredTags(triggers=["<f=", "<f=a"], tags=[TAG]), "more than one trigger"),
        (TriggeredTags(triggers=["<f=", "<call>"], tags=[TAG, CALL_TAG]), "texts and special tokens"),
        (Sequence(elements=[AnyText(), Text(value="x"), Mark(value="<call>")]), "keep special tokens out"),
    ],
)
def test_what_cannot_be_had_is_said(format: Format, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        COMPILER.compile(format)


@pytest.mark.parametrize(
    "format", [A_SCHEMA, TriggeredTags(triggers=["<call>"], tags=[CALL_TAG]), Regex(pattern="(ab|abc|é)+12")]
)
def test_the_mask_is_what_is_accepted_and_rollback_is_exact(format: Format) -> None:
    rng = random.Random(0)
    state = COMPILER.compile(format).start()
    fork = state.fork()
    masks = [allowed(state)]
    path: list[int] = []
    for _ in range(30):
        if rng.random() < 0.3 and path:
            count = rng.randint(1, len(path))
            state.rollback(count)
            del path[-count:], masks[-count:]
        assert allowed(state) == masks[-1]
        for token in range(VOCABULARY.size):
            is_accepted = state.accept(token)
            assert is_accepted == (token in masks[-1])
            if is_accepted:
                state.rollback(1)
        assert state.must_end == (state.may_end and not masks[-1])
        if not masks[-1]:
            break
        path.append(rng.choice(masks[-1]))
        assert state.accept(path[-1])
        masks.append(allowed(state))
    assert allowed(fork) == masks[0]
    assert all(fork.accept(token) for token in path)
    assert allowed(fork) == allowed(state)


def test_end_tokens_and_tokens_outside_the_vocabulary_are_never_accepted() -> None:
    state = state_after(Regex(pattern="a+"), "a")
    assert state is not None
    assert state.may_end
    assert not state.must_end
    assert END not in allowed(state)
    assert not any(state.accept(token) for token in (END, CALL, -1, VOCABULARY.size, 10**6))
    assert allowed(state) == tokens_of("a")


def test_the_mask_is_written_into_the_row_it_is_given() -> None:
    rows = np.full((3, VOCABULARY.num_mask_words), 7, np.int32)
    COMPILER.compile(Text(value="a")).start().fill_bitmask(rows[1])
    assert (rows[[0, 2]] == 7).all()
    assert np.nonzero(np.unpackbits(rows[1].view(np.uint8), bitorder="little"))[0].tolist() == tokens_of("a")


@pytest.mark.parametrize(
    ("format", "parts", "forced"),
    [
        (A_SCHEMA, (), b"{"),
        (JsonSchema(schema=A_SCHEMA.schema, max_whitespace=0), (), b'{"ab":"'),
        (JsonSchema(schema=A_SCHEMA.schema, max_whitespace=0), ('{"ab":"abc',), b'","n":'),
        (JsonSchema(schema=A_SCHEMA.schema, max_whitespace=0), ('{"ab":"abc","n":1',), b""),
        (Regex(pattern="ab?"), (), b"a"),
        (Regex(pattern="ab?"), ("a",), b""),
        (choice(["ab", "abcd"]), (), b"ab"),
        (choice(["ab", "abcd"]), ("ab",), b""),
        (Text(value="xé!"), ("x",), "é!".encode()),
        (CALL_TAG, (), b""),
        (CALL_TAG, (CALL,), b"go("),
        (Text(value="a"), ("a",), b""),
    ],
)
def test_only_certain_bytes_are_forced(format: Format, parts: tuple[str | int, ...], forced: bytes) -> None:
    state = state_after(format, *parts)
    assert state is not None
    before = allowed(state)
    assert state.forced_bytes() == forced
    assert allowed(state) == before


def test_one_compiled_grammar_serves_several_threads() -> None:
    compiled = COMPILER.compile(A_SCHEMA)
    assert compiled.memory_bytes > 0
    complete = []

    def answer() -> None:
        for _ in range(20):
            state = compiled.start()
            for token in tokens_of('{"ab": "x", "n": 12}'):
                assert token in allowed(state)
                assert state.accept(token)
            complete.append(state.may_end)

    threads = [threading.Thread(target=answer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert complete == [True] * 80


HOSTILE = """
from kitfox.constraint import *
from kitfox.structured_output.schema import check_format
from tests.structured_output.test_xgrammar_backend import COMPILER, GrammarError
def chain(length):
    return "".join(f"r{n} ::= r{n + 1}\\n" for n in range(length))
deep = {}
for _ in range(2000):
    deep = {"items": deep}
formats = [
    JsonSchema(schema=deep),
    Regex(pattern="(" * 500),
    Regex(pattern="(" * 90 + "a" + ")+" * 90),
    Regex(pattern="(?<=x)*"),
    Ebnf(grammar="root ::= " + "(" * 60000 + '"a"' + ")" * 60000),
    Ebnf(grammar="root ::= root | root root"),
    Ebnf(grammar='root ::= a\\na ::= b\\nb ::= a'),
    Lark(grammar='start: start'),
    Ebnf(grammar="root ::= " + " | ".join(f"r{n}" for n in range(3000)) + "\\n" + chain(3000)),
    Ebnf(grammar=chain(20000) + 'r20000 ::= "a"\\nroot ::= r0'),
    JsonSchema(schema={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    JsonSchema(schema={"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}),
    JsonSchema(schema={
        "$defs": {"a": {"properties": {"x": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#"}]}}}},
        "properties": {"x": {"$ref": "#/$defs/a"}},
    }),
    JsonSchema(schema={"const": "\\ud800"}),
    JsonSchema(schema={"properties": {"\\x00\\ud800": {"type": "null"}}, "type": "object"}),
    Text(value="\\x00\\ud800"),
]
for number, format in enumerate(formats):
    try:
        check_format(format)
        state = COMPILER.compile(format).start()
        state.may_end, state.forced_bytes()
        verdict = "compiled"
    except GrammarError as error:
        verdict = str(error)
    print(number, verdict[:100], flush=True)
print("alive", len(formats))
"""


def test_no_hostile_format_crashes_the_process() -> None:
    result = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert result.stdout.endswith("alive 16\n")
