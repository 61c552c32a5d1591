"""What every grammar backend must do."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from kitfox.structured_output.backends import make_grammar_compiler
from kitfox.structured_output.grammar import CompiledGrammar, Grammar, GrammarCompiler
from kitfox.structured_output.vocabulary import Vocabulary
from kitfox.tokenizer import load_tokenizer
from kitfox.weights.hub import resolve_model
from tests.structured_output.vocabularies import END_ID, NO_TEXT_ID, OTHER_ID, VOCABULARY, allowed_by, tokens_of

BACKENDS = ["llguidance", "xgrammar"]
COMPILERS: dict[str, GrammarCompiler] = {}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "xgrammar":
        pytest.importorskip("xgrammar")
    return request.param


def compiler_of(backend: str) -> GrammarCompiler:
    if backend not in COMPILERS:
        COMPILERS[backend] = make_grammar_compiler(backend, VOCABULARY, max_whitespace=8)
    return COMPILERS[backend]


def compiled(backend: str, format: Format) -> CompiledGrammar:
    if (backend, format) in REFUSED:
        with pytest.raises(GrammarError):
            compiler_of(backend).compile(format)
        pytest.skip("refused")
    return compiler_of(backend).compile(format)


def verdict(grammar: CompiledGrammar, text: str) -> str:
    """What becomes of a text: "no" where a token is refused, else whether it is "unfinished", "may end", "must end"."""
    walk = grammar.start()
    for token_id in tokens_of(text):
        if token_id not in allowed_by(walk):
            assert not walk.accept(token_id)
            return "no"
        assert walk.accept(token_id)
    if walk.must_end:
        assert walk.may_end
        assert not allowed_by(walk)
        return "must end"
    return "may end" if walk.may_end else "unfinished"


OBJECT = JsonSchema(schema={"type": "object"})
PERSON = JsonSchema(
    schema={
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
)
CALLS = [
    Tag(begin="<f=a>", content=OBJECT, end="</f>"),
    Tag(begin="<f=b>", content=Regex(pattern="[0-9]+"), end="</f>"),
]
NESTED_EBNF = 'root ::= "(" root ")" | [a-z]+'

# Each: format, {text: what becomes of it}.
FORMATS: dict[str, tuple[Format, dict[str, str]]] = {
    "text": (Text(value='a"\\\n\u00e9'), {'a"\\\n\u00e9': "must end", 'a"': "unfinished", "b": "no"}),
    "choice": (
        choice(["yes", "no", "nope"]),
        {"yes": "must end", "no": "may end", "nope": "must end", "n": "unfinished"},
    ),
    "regex": (
        Regex(pattern=r"[0-9]+(\.[0-9]{2})?"),
        {"1": "may end", "1.": "unfinished", "1.25": "must end", "a": "no"},
    ),
    "regex of a slash": (Regex(pattern='a/b|"<c>"'), {"a/b": "must end", '"<c>"': "must end", "ab": "no"}),
    "json": (
        PERSON,
        {'{"name": "Bo", "age": 7}': "must end", '{"age"': "no", '{"name":"Bobo"': "no", '{"name":': "unfinished"},
    ),
    "json in any order of arrays": (
        JsonSchema(schema={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}),
        {"[true]": "must end", "[]": "no", "[true, false]": "must end", "[true,true,": "no"},
    ),
    "any json": (JsonSchema(schema=True), {'{"a":[1,null]}': "must end", "1": "may end", '"x"': "must end", "]": "no"}),
    "ebnf": (
        Ebnf(grammar='root ::= "a" digits{1,2} # a comment\ndigits ::= [0-9] | "\\x2d" | "\\u00e9"'),
        {"a1": "may end", "a12": "must end", "a-\u00e9": "must end", "ab": "no", "a": "unfinished"},
    ),
    "recursive ebnf": (Ebnf(grammar=NESTED_EBNF), {"((x))": "must end", "(x": "unfinished", "()": "no"}),
    "left recursion": (Ebnf(grammar='root ::= root "b" | "a"'), {"a": "may end", "abb": "may end", "b": "no"}),
    "mark": (
        Sequence(elements=[Mark(value="<|tool|>"), Text(value="x")]),
        {"<|tool|>x": "must end", "<|other|>": "no", "x": "no"},
    ),
    "mark that is no token": (Mark(value="<tool>"), {"<tool>": "must end", "<|tool|>": "no"}),
    "any text": (AnyText(), {"": "may end", "free \u00e9": "may end", "<|end|>": "no"}),
    "text up to a mark": (
        Sequence(elements=[AnyText(), Mark(value="</think>"), choice(["a", "b"])]),
        {"so <</think>a": "must end", "</think>": "unfinished", "</think>c": "no", "so": "unfinished"},
    ),
    "text up to a token": (
        Sequence(elements=[AnyText(), Mark(value="<|tool|>"), choice(["a", "b"])]),
        {"so<|tool|>a": "must end", "<|tool|>c": "no", "so<|other|>": "no"},
    ),
    "sequence": (
        Sequence(elements=[Text(value="x="), OBJECT, Text(value=";")]),
        {'x={"a":1};': "must end", "x={}": "unfinished", "x=;": "no"},
    ),
    "regular sequence": (
        Sequence(elements=[Regex(pattern="[a-z]*"), Text(value="b")]),
        {"b": "may end", "ab": "may end", "abb": "may end", "ba": "unfinished"},
    ),
    "alternatives": (
        Alternatives(elements=[OBJECT, Text(value="none")]),
        {"{}": "must end", "none": "must end", "[": "no"},
    ),
    "repeat": (
        Repeat(element=OBJECT, separator=",", min_count=1, max_count=2),
        {"{}": "may end", "{},{}": "must end", "": "unfinished"},
    ),
    "repeat without end": (
        Repeat(element=Text(value="ab")),
        {"": "may end", "abab": "may end", "aba": "unfinished", "b": "no"},
    ),
    "tag": (CALLS[0], {"<f=a>{}</f>": "must end", "<f=a>x": "no", "<f=a>{}": "unfinished"}),
    "tag of a token": (Tag(begin="<|tool|>a", content=AnyText(), end="."), {"<|tool|>ax.": "must end", "a": "no"}),
    "triggered tags": (
        TriggeredTags(triggers=["<f="], tags=CALLS),
        {
            "": "may end",
            "hi": "may end",
            "hi <f=a>{}</f> and <f=b>1</f>": "may end",
            "<f=c": "no",
            "<f=b>x": "no",
            "<f": "may end",
        },
    ),
    "at least one": (
        TriggeredTags(triggers=["<f="], tags=CALLS, at_least_one=True),
        {"": "unfinished", "hi": "no", "<f=b>1</f>": "may end", "<f=b>1</f> hi": "may end"},
    ),
    "exactly one": (
        TriggeredTags(triggers=["<f="], tags=CALLS, at_least_one=True, stop_after_first=True),
        {"": "unfinished", "hi": "no", "<f=b>1</f>": "must end"},
    ),
    "at most one": (
        TriggeredTags(triggers=["<f="], tags=CALLS, stop_after_first=True),
        {"": "may end", "hi": "may end", "hi<f=b>1</f>": "must end"},
    ),
    "triggered by a token": (
        TriggeredTags(triggers=["<|tool|>"], tags=[Tag(begin="<|tool|>a", content=OBJECT, end="")]),
        {"hi": "may end", "hi<|tool|>a{}": "may end", "<|tool|>b": "no", "<|other|>": "no"},
    ),
}
REFUSED = [("xgrammar", FORMATS["tag of a token"][0])]
"""What a backend says that it cannot do."""

LARK = Lark(grammar='start: "(" start ")" | WORD\nWORD: /[a-z]+/\n')


@pytest.mark.parametrize("name", FORMATS)
def test_formats_mean_what_they_say(backend: str, name: str) -> None:
    format, texts = FORMATS[name]
    grammar = compiled(backend, format)
    assert {text: verdict(grammar, text) for text in texts} == texts


def test_lark(backend: str) -> None:
    grammar = compiled(backend, LARK)
    assert verdict(grammar, "((ab))") == "must end"
    assert verdict(grammar, "()") == "no"


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (Regex(pattern="[0-9]+"), "1"),
        (Ebnf(grammar='root ::= "a" | "ab"'), "a"),
        (JsonSchema(schema={"type": "integer"}), "1"),
    ],
)
def test_it_need_not_end_where_it_may(backend: str, format: Format, text: str) -> None:
    assert verdict(compiled(backend, format), text) == "may end"


def test_it_must_end_where_nothing_can_follow(backend: str) -> None:
    assert verdict(compiled(backend, JsonSchema(schema={"type": "boolean"})), "true") == "must end"
    assert verdict(compiled(backend, Text(value="ab")), "ab") == "must end"


@pytest.mark.parametrize("name", FORMATS)
def test_no_mask_holds_tokens_that_are_no_text(backend: str, name: str) -> None:
    format, texts = FORMATS[name]
    named = {token_id for token_id in VOCABULARY.special_ids if "<|tool|>" in str(format)} - {END_ID, OTHER_ID}
    for text in texts:
        walk = compiled(backend, format).start()
        for token_id in tokens_of(text):
            assert not set(allowed_by(walk)) & {END_ID, OTHER_ID, NO_TEXT_ID} - named
            if not walk.accept(token_id):
                break
        assert not walk.accept(VOCABULARY.size)
        assert not walk.accept(-1)
        assert not walk.accept(END_ID)


@pytest.mark.parametrize("limit", [0, 1, 8])
def test_whitespace_is_bounded(backend: str, limit: int) -> None:
    grammar = compiled(backend, JsonSchema(schema={"type": "object"}, max_whitespace=limit))
    space = (" \n\t\r" * 3)[:limit]
    assert verdict(grammar, f'{{{space}"a"{space}:{space}[{space}1{space},{space}2{space}]{space}}}') == "must end"
    assert verdict(grammar, "{" + space + " ") == "no"
    assert verdict(grammar, '{"a":' + space + " ") == "no"
    assert verdict(grammar, '{"a"' + space + " ") == "no"
    assert verdict(grammar, " ") == "no"


def test_whitespace_of_the_server_and_of_a_pattern(backend: str) -> None:
    assert verdict(compiled(backend, OBJECT), "{" + " " * 8) == "unfinished"
    assert verdict(compiled(backend, OBJECT), "{" + " " * 9) == "no"
    try:
        grammar = compiled(backend, JsonSchema(schema={"type": "object"}, whitespace_pattern="[ ]?"))
    except GrammarError:
        return
    assert verdict(grammar, '{ "a" : 1 }') == "must end"
    assert verdict(grammar, "{  ") == "no"
    assert verdict(grammar, "{\n") == "no"


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_walks_are_exact(backend: str, name: str, data: st.DataObject) -> None:
    grammar = compiled(backend, FORMATS[name][0])
    walk = grammar.start()
    path: list[int] = []
    states = [state_of(walk)]
    for _ in range(data.draw(st.integers(0, 15))):
        if path and data.draw(st.integers(0, 3)) == 0:
            count = data.draw(st.integers(1, len(path)))
            walk.rollback(count)
            del path[-count:], states[-count:]
        elif states[-1]["allowed"]:
            if data.draw(st.booleans()):
                walk.forced_bytes()
            token_id = data.draw(st.sampled_from(states[-1]["allowed"]))
            assert walk.accept(token_id)
            path.append(token_id)
            states.append(state_of(walk))
        refused = data.draw(st.integers(0, VOCABULARY.size - 1))
        if refused not in states[-1]["allowed"]:
            assert not walk.accept(refused)
        assert state_of(walk) == states[-1]
        fork = walk.fork()
        if states[-1]["allowed"]:
            assert fork.accept(data.draw(st.sampled_from(states[-1]["allowed"])))
        assert state_of(walk) == states[-1]
    again = grammar.start()
    for token_id in path:
        assert again.accept(token_id)
    assert state_of(again) == states[-1]


def state_of(grammar: Grammar) -> dict[str, Any]:
    state = {"allowed": allowed_by(grammar), "may_end": grammar.may_end, "must_end": grammar.must_end}
    assert state["may_end"] or not state["must_end"]
    assert not (state["must_end"] and state["allowed"])
    assert state["allowed"] or state["may_end"]  # never at a dead end
    return state


@pytest.mark.parametrize("name", FORMATS)
def test_a_mask_is_what_accept_takes(backend: str, name: str) -> None:
    format, texts = FORMATS[name]
    grammar = compiled(backend, format)
    for text in texts:
        walk = grammar.start()
        for token_id in tokens_of(text)[:4]:
            taken = []
            for candidate in range(VOCABULARY.size):
                fork = walk.fork()
                if fork.accept(candidate):
                    taken.append(candidate)
            assert allowed_by(walk) == taken
            if not walk.accept(token_id):
                break


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_forced_bytes_are_in_every_completion(backend: str, name: str, data: st.DataObject) -> None:
    walk = compiled(backend, FORMATS[name][0]).start()
    text = b""
    for _ in range(data.draw(st.integers(0, 6))):
        if not (allowed := allowed_by(walk)):
            break
        token_id = data.draw(st.sampled_from(allowed))
        assert walk.accept(token_id)
        text += VOCABULARY.token_bytes[token_id]
    forced = walk.forced_bytes()
    if forced:
        assert not walk.may_end
        for token_id in allowed_by(walk):
            token = VOCABULARY.token_bytes[token_id]
            assert token.startswith(forced) or forced.startswith(token)
        for byte in forced:
            assert walk.accept(byte)
    else:
        first_bytes = {VOCABULARY.token_bytes[token_id][:1] for token_id in allowed_by(walk)}
        is_special = bool(set(allowed_by(walk)) & set(VOCABULARY.special_ids))
        is_in_character = "\ufffd" in text.decode(errors="replace")
        assert walk.may_end or is_special or is_in_character or len(first_bytes) != 1


def test_forced_bytes_stop_before_a_choice(backend: str) -> None:
    grammar = compiled(backend, choice(["abcd", "abce"]))
    assert grammar.start().forced_bytes() == b"abc"
    optional = compiled(backend, Regex(pattern="ab(cd)?")).start()
    assert optional.forced_bytes() == b"ab"
    for byte in b"ab":
        assert optional.accept(byte)
    assert optional.forced_bytes() == b""
    keys = compiled(backend, JsonSchema(schema=PERSON.schema, max_whitespace=0)).start()
    assert keys.forced_bytes() == b'{"name":"'


def test_rollback_goes_back_over_the_end(backend: str) -> None:
    walk = compiled(backend, Text(value="ab")).start()
    for byte in b"ab":
        assert walk.accept(byte)
    assert walk.must_end
    assert not walk.accept(ord("c"))
    walk.rollback(1)
    assert not walk.may_end
    assert walk.accept(ord("b"))
    walk.rollback(2)
    assert walk.forced_bytes() == b"ab"


def test_an_answer_that_is_over_before_it_begins(backend: str) -> None:
    walk = compiled(backend, Text(value="")).start()
    assert walk.may_end
    assert walk.must_end
    assert allowed_by(walk) == []


def test_grammars_of_one_compiled_grammar_do_not_meet(backend: str) -> None:
    grammar = compiled(backend, PERSON)
    text = '{"name": "Bo", "age": 12}'
    failures: list[str] = []

    def walk_often() -> None:
        failures.extend(result for _ in range(20) if (result := verdict(grammar, text)) != "must end")

    threads = [threading.Thread(target=walk_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- schemas that others got wrong ---


def json_verdict(grammar: CompiledGrammar, value: Any) -> str:
    return verdict(grammar, json.dumps(value, ensure_ascii=False))


SCHEMAS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "enum behind $ref": ({"$ref": "#/$defs/c", "$defs": {"c": {"enum": ["red", "green"]}}}, ["red"], ["blue", {}, 1]),
    "list of enum": (
        {"type": "array", "items": {"$ref": "#/$defs/c"}, "$defs": {"c": {"enum": ["x", "y"], "type": "string"}}},
        [[], ["x"], ["x", "y"]],
        [["z"], "x"],
    ),
    "patternProperties, required, no others": (
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "integer"}},
            "required": ["x1"],
            "additionalProperties": False,
        },
        [{"x1": 1}],
        [{}, {"y": 1}, {"x1": "a"}],
    ),
    "an escaped name is the name": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        [{"a": 1}],
        [{"a": "x"}],
    ),
    "29 February": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "1900-02-29"]),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_honoured_or_refused(backend: str, name: str) -> None:
    schema, valid, invalid = SCHEMAS[name]
    try:
        grammar = compiled(backend, JsonSchema(schema=schema))
    except GrammarError:
        return
    assert {json_verdict(grammar, value) for value in valid} <= {"must end", "may end"}
    assert not {json_verdict(grammar, value) for value in invalid} & {"must end", "may end"}


def test_a_name_in_escapes_is_no_other_name(backend: str) -> None:
    schema, _, _ = SCHEMAS["an escaped name is the name"]
    assert verdict(compiled(backend, JsonSchema(schema=schema)), '{"\\u0061": "x"}') == "no"


# --- hostile formats: honoured or refused, and the process lives ---

HOSTILE: dict[str, Format] = {
    "regex [": Regex(pattern="["),
    "lookbehind": Regex(pattern="(?<=a)b"),
    "lookbehind repeated": Regex(pattern="(?<=x)*"),
    "500 open groups": Regex(pattern="(" * 500),
    "repeats of repeats": Regex(pattern="((a{0,1000}){0,1000}){0,1000}"),
    "grammar of 60000 groups": Ebnf(grammar="root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "lark of 60000 groups": Lark(grammar="start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "empty grammar": Ebnf(grammar=""),
    "empty lark": Lark(grammar=""),
    "endless recursion": Ebnf(grammar="root ::= root"),
    "no such rule": Ebnf(grammar="root ::= other"),
    "a special token in lark": Lark(grammar="start: <|tool|>"),
    "a token id in lark": Lark(grammar=f"start: <[{END_ID}]>"),
    "another grammar in lark": Lark(grammar="start: @answer"),
    "unsatisfiable": JsonSchema(schema={"allOf": [{"type": "string"}, {"type": "integer"}]}),
    "false": JsonSchema(schema=False),
    "remote reference": JsonSchema(schema={"$ref": "https://example.com/schema.json"}),
    "not": JsonSchema(schema={"not": {"type": "string"}, "x-guidance": {"lenient": True}}),
    "whitespace of letters": JsonSchema(schema=True, whitespace_pattern="[a ]?"),
    "lone surrogate": Text(value="\ud800"),
}


def deep_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE["a schema nested 2000 deep"] = JsonSchema(schema=deep_schema(2000))
HONOURED = {"repeats of repeats"}
CHILD = """
import sys
from kitfox.constraint import GrammarError
from kitfox.structured_output.schema import check_format
from tests.contract.test_grammar import HOSTILE, allowed_by, compiled
for name, format in HOSTILE.items():
    try:
        check_format(format)
        allowed_by(compiled(sys.argv[1], format).start())
        print(name, "compiles", sep=": ", flush=True)
    except GrammarError as error:
        print(name, str(error).replace(chr(10), " / "), sep=": ", flush=True)
"""


def test_hostile_formats_are_refused_and_nothing_crashes(backend: str) -> None:
    child = subprocess.run([sys.executable, "-c", CHILD, backend], capture_output=True, text=True, timeout=300)
    answers = dict(line.split(": ", 1) for line in child.stdout.splitlines())
    assert child.returncode == 0, (list(answers.items())[-1:], child.stderr[-1000:])
    assert list(answers) == list(HOSTILE)
    assert {name for name, answer in answers.items() if answer == "compiles"} <= HONOURED
    for name, answer in answers.items():
        assert 0 < len(answer) < 300, name


def test_the_error_names_the_keyword(backend: str) -> None:
    with pytest.raises(GrammarError, match="not"):
        compiled(backend, JsonSchema(schema={"type": "object", "properties": {"a": {"not": {"type": "string"}}}}))


def test_auto_takes_the_backend_that_can() -> None:
    auto = make_grammar_compiler("auto", VOCABULARY, max_whitespace=8)
    assert verdict(auto.compile(LARK), "(a)") == "must end"
    overlapping = Ebnf(grammar='root ::= a "x"\na ::= "(" a ")" | [a-z]+')
    with pytest.raises(GrammarError):
        compiled("llguidance", overlapping)
    pytest.importorskip("xgrammar")
    assert verdict(auto.compile(overlapping), "abx") == "may end"
    with pytest.raises(GrammarError, match=r"llguidance.*;.*xgrammar"):
        auto.compile(
            JsonSchema(schema={"type": "object", "propertyNames": {"pattern": "^a"}, "not": {"required": ["b"]}})
        )


def test_a_missing_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.delitem(sys.modules, "kitfox.structured_output.xgrammar_backend", raising=False)
    with pytest.raises(GrammarError, match="xgrammar is not installed"):
        make_grammar_compiler("xgrammar", VOCABULARY, max_whitespace=8)
    auto = make_grammar_compiler("auto", VOCABULARY, max_whitespace=8)
    with pytest.raises(GrammarError, match=r"not.*; xgrammar is not installed"):
        auto.compile(JsonSchema(schema={"not": {"type": "string"}}))


# --- a real vocabulary ---


@pytest.mark.model
def test_the_default_models_vocabulary(backend: str) -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2-135m").path)
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size + 3)
    assert vocabulary.token_bytes[-3:] == [b""] * 3
    assert set(tokenizer.eos_token_ids) == set(vocabulary.eos_token_ids)
    grammar = make_grammar_compiler(backend, vocabulary, max_whitespace=8).compile(PERSON)
    for text in (
        '{"name":"Bo","age":7}',
        '{"name": "\u65e5\u672c", "age": -12}',
        '{\n  "name": "\U0001f98a",\n  "age": 0\n}',
    ):
        walk = grammar.start()
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            allowed = allowed_by(walk, vocabulary)
            assert token_id in allowed
            assert not set(allowed) & {*vocabulary.special_ids, *vocabulary.eos_token_ids}
            assert walk.accept(token_id)
        assert walk.must_end
