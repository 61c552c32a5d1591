"""Reasoning and tool calls out of text: what is found, and that it does not depend on how the text was cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitfox.server.parsers import (
    TOOL_CALL_PARSERS,
    AnswerParser,
    ReasoningParser,
    detect_reasoning_marks,
    detect_tool_call_parser,
    join_calls,
)

Call = tuple[str, dict[str, Any]]
SCHEMAS = {name: {"properties": {"n": {"type": "number"}, "o": {"type": "object"}}} for name in ("f", "get_x")}


def parse(dialect: str, pieces: Iterable[str], max_calls: int | None = None) -> tuple[str, list[tuple[str, str]], int]:
    """Content, calls (name and arguments), and how many calls are complete."""
    parser = TOOL_CALL_PARSERS[dialect](SCHEMAS, max_calls)
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    deltas = [delta for part in parts for delta in part.calls]
    calls = join_calls(deltas)
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    named = [(call.name or "", call.arguments) for call in calls]
    return "".join(part.content for part in parts), named, parser.num_complete


# ---- how each dialect writes calls ----------------------------------------------------------------------------------


def _objects(calls: list[Call], word: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, word: arguments}, ensure_ascii=False) for name, arguments in calls]


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(item, quote) for item in value) + "]"
    return json.dumps(value)


def _qwen(calls: list[Call]) -> str:
    written = []
    for name, arguments in calls:
        call = f"<tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            call += f"<parameter={key}>\n{text}\n</parameter>\n"
        written.append(call + "</function>\n</tool_call>")
    return "\n".join(written)


def _pythonic(calls: list[Call]) -> str:
    return ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls)


def _deepseek_fenced(calls: list[Call]) -> str:
    bodies = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(bodies) + "<｜tool▁calls▁end｜>"


def _deepseek_bare(calls: list[Call]) -> str:
    bodies = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(bodies) + "<｜tool▁calls▁end｜>"


# Name, dialect, how it writes calls, whether text may stand before them.
FORMS: list[tuple[str, str, Callable[[list[Call]], str], bool]] = [
    ("hermes", "hermes", lambda c: "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in _objects(c)), True),
    ("qwen", "qwen3_coder", _qwen, True),
    ("llama", "llama3_json", lambda c: "; ".join(_objects(c, "parameters")), False),
    ("llama tag", "llama3_json", lambda c: "<|python_tag|>" + ";".join(_objects(c, "parameters")), True),
    ("pythonic", "pythonic", lambda c: f"[{_pythonic(c)}]", False),
    ("llama 4", "pythonic", lambda c: f"<|python_start|>[{_pythonic(c)}]<|python_end|>", True),
    ("mistral list", "mistral", lambda c: f"[TOOL_CALLS] [{', '.join(_objects(c))}]", True),
    ("mistral args", "mistral", lambda c: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in c), True),
    ("deepseek r1", "deepseek", _deepseek_fenced, True),
    ("deepseek v3.1", "deepseek", _deepseek_bare, True),
    (
        "functiongemma",
        "gemma",
        lambda c: "".join(f"<start_function_call>call:{n}{_gemma(a, '<escape>')}<end_function_call>" for n, a in c),
        True,
    ),
    (
        "gemma 4",
        "gemma",
        lambda c: "".join(f"<|tool_call>call:{n}{_gemma(a, '<|' + chr(34) + '|>')}<tool_call|>" for n, a in c),
        True,
    ),
    ("json", "json", lambda c: "\n".join(_objects(c)), False),
    ("json list", "json", lambda c: f"[{', '.join(_objects(c))}]", False),
    ("json fence", "json", lambda c: "```json\n" + "\n".join(_objects(c)) + "\n```", False),
]

TEXTS = st.text(st.sampled_from("ab {}[]()\"'\\,:;=/<|>`\n\té🦊"), max_size=12)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    TEXTS | NUMBERS | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("k", "key_2")), inner, max_size=2),
    max_leaves=5,
)
# "n" and "o" are what SCHEMAS calls a number and an object; all others are texts to those who need a schema.
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "a": TEXTS.filter(lambda text: text == text.strip()),
        "n": NUMBERS,
        "o": st.dictionaries(st.just("k"), VALUES),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(("f", "get_x")), ARGUMENTS), min_size=1, max_size=3)
WORDS = st.text(st.sampled_from("ab c.\n<[{é"), max_size=8).map(str.strip)


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(
    ("dialect", "write", "has_text"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS]
)
@settings(max_examples=30, deadline=None)
@given(calls=CALLS, before=WORDS, after=WORDS, data=st.data())
def test_calls_are_found_however_the_text_is_cut(
    dialect: str,
    write: Callable[[list[Call]], str],
    has_text: bool,
    calls: list[Call],
    before: str,
    after: str,
    data: st.DataObject,
) -> None:
    before = before if has_text and not before.startswith(("{", "[")) else ""
    after = after if has_text and not after.startswith(("{", "[")) else ""
    text = before + write(calls) + after
    content, found, num_complete = parse(dialect, cut(text, data))
    assert content == before + after
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert num_complete == len(calls)


@pytest.mark.parametrize(("dialect", "write"), [form[1:3] for form in FORMS], ids=[form[0] for form in FORMS])
@settings(max_examples=30, deadline=None)
@given(calls=CALLS, data=st.data())
def test_broken_text_is_the_same_however_it_is_cut(
    dialect: str, write: Callable[[list[Call]], str], calls: list[Call], data: st.DataObject
) -> None:
    text = write(calls)
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
    broken = text[:start] + data.draw(TEXTS) + text[end:]
    whole = parse(dialect, [broken])
    assert parse(dialect, cut(broken, data)) == whole
    assert parse(dialect, broken) == whole
    complete = [arguments for _, arguments in whole[1] if _is_object(arguments)]
    assert len(complete) >= whole[2]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("dialect", TOOL_CALL_PARSERS)
@given(text=st.text(st.sampled_from('ab <>{}[]|"\n_tolcal'), max_size=60), data=st.data())
def test_text_without_calls_is_content_to_the_last_character(dialect: str, text: str, data: st.DataObject) -> None:
    assert parse(dialect, cut(text, data)) == (text, [], 0)


@pytest.mark.parametrize(
    ("dialect", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": True}}</tool_call>', "", [("f", '{"a": true}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny\\d"}}', "", [("f", '{"a": "x\\ny\\\\d"}')]),
        ("hermes", "<tool_call> no </tool_call>", "<tool_call> no </tool_call>", []),
        ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": x}}', "x}}", [("f", '{"a": ')]),
        ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
        ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>', []),
        ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ("mistral", '[TOOL_CALLS] is a mark {"a": 1}', '[TOOL_CALLS] is a mark {"a": 1}', []),
        ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama3_json", '{"answer": 2}', '{"answer": 2}', []),
        ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("pythonic", "[f(a=open())]", "[f(a=open())]", []),
        ("pythonic", "[f(a=(1, 'x'), b={'k': None}),]", ",]", [("f", '{"a": [1, "x"], "b": {"k": null}}')]),
        ("pythonic", "[f(a='\\ud800')]", "[f(a='\\ud800')]", []),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
        ("json", '{"name": "g", "arguments": {}}', '{"name": "g", "arguments": {}}', []),
        ("json", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', "", [("g", "{}")]),
        ("qwen3_coder", "<function=f><parameter=n>many</parameter></function>", "", [("f", '{"n": "many"}')]),
    ],
)
def test_what_models_really_write(dialect: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(dialect, [text])[:2] == (content, calls)
    assert parse(dialect, text)[:2] == (content, calls)


def test_a_call_streams_as_it_comes() -> None:
    parser = TOOL_CALL_PARSERS["hermes"](SCHEMAS)
    assert parser.feed('Hm.\n<tool_call>{"name": "f", "arguments": ').content == "Hm."
    (first,) = parser.feed('{"path": "/tm').calls
    assert (first.index, first.name, first.arguments) == (0, "f", '{"path": "/tm')
    assert (first.id or "").startswith("call_")
    (second,) = parser.feed('p"').calls
    assert (second.index, second.id, second.name, second.arguments) == (0, None, None, 'p"')
    assert parser.num_complete == 0
    parser.feed("}")
    assert parser.num_complete == 1


def test_two_calls_in_one_piece() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "get_x", "arguments": {"n": 1}}]'
    calls = TOOL_CALL_PARSERS["mistral"](SCHEMAS).feed(text).calls
    assert [(c.index, c.name, c.arguments) for c in calls] == [(0, "f", "{}"), (1, "get_x", '{"n": 1}')]
    assert all(c.id is not None and len(c.id) == 9 and c.id.isalnum() for c in calls)


@pytest.mark.parametrize(("dialect", "write"), [form[1:3] for form in FORMS], ids=[form[0] for form in FORMS])
def test_no_more_calls_than_wanted(dialect: str, write: Callable[[list[Call]], str]) -> None:
    text = write([("f", {"a": "1"}), ("get_x", {})]) + " and more"
    for pieces in ([text], list(text)):
        content, calls, num_complete = parse(dialect, pieces, max_calls=1)
        assert (content, len(calls), num_complete) == ("", 1, 1)


def test_deep_and_long_arguments_are_bounded() -> None:
    deep = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000
    content, calls, num_complete = parse("hermes", [deep])
    assert (len(calls), num_complete) == (1, 0)
    assert calls[0][1] + content == deep[len('<tool_call>{"name": "f", "arguments": ') :]
    number = '<tool_call>{"name": ' + "1" * 5000 + "}"
    assert parse("hermes", [number]) == (number, [], 0)
    assert parse("pythonic", ["[f(a=" + "(" * 100_000 + ")" * 100_000 + ")]"])[1] == []


# ---- reasoning ------------------------------------------------------------------------------------------------------


def separate(pieces: Iterable[str], *, starts_inside: bool) -> tuple[str, str]:
    parser = AnswerParser(ReasoningParser("<think>", "</think>", starts_inside=starts_inside), None)
    parts = [parser.feed(piece) for piece in pieces] + [parser.feed("", is_last=True)]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("text", "starts_inside", "reasoning", "content"),
    [
        ("<think>\nSo.\n</think>\n\nYes.", False, "So.", "Yes."),
        ("So.\n</think>\n\nYes.", True, "So.", "Yes."),
        ("<think>So.</think>Yes.", True, "So.", "Yes."),
        ("Yes, <think> is a tag.", False, "", "Yes, <think> is a tag."),
        ("\n <think>open", False, "open", ""),
        ("never closed", True, "never closed", ""),
        ("a </think", True, "a </think", ""),
        ("<think></think>\n", False, "", ""),
        ("a</think>b</think>c", True, "a", "b</think>c"),
        ("  plain ", False, "", "  plain "),
        ("", True, "", ""),
    ],
)
def test_reasoning(text: str, starts_inside: bool, reasoning: str, content: str) -> None:
    assert separate([text], starts_inside=starts_inside) == (reasoning, content)
    assert separate(text, starts_inside=starts_inside) == (reasoning, content)


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</", " ", "\n", "a"])).map("".join), data=st.data()
)
def test_reasoning_is_the_same_however_the_text_is_cut(text: str, data: st.DataObject) -> None:
    for starts_inside in (False, True):
        assert separate(cut(text, data), starts_inside=starts_inside) == separate([text], starts_inside=starts_inside)


def test_calls_come_after_reasoning() -> None:
    text = '<think><tool_call>{"name": "f"}</tool_call>?</think>\n<tool_call>{"name": "get_x"}</tool_call>'
    for pieces in ([text], list(text)):
        reasoning = ReasoningParser("<think>", "</think>", starts_inside=False)
        parser = AnswerParser(reasoning, TOOL_CALL_PARSERS["hermes"](SCHEMAS))
        parts = [parser.feed(piece) for piece in pieces] + [parser.feed("", is_last=True)]
        assert "".join(part.reasoning for part in parts) == '<tool_call>{"name": "f"}</tool_call>?'
        assert [call.name for part in parts for call in part.tool_calls] == ["get_x"]
        assert "".join(part.content for part in parts) == ""


def test_reasoning_tokens_end_with_the_closer() -> None:
    parser = ReasoningParser("<think>", "</think>", starts_inside=True, closer_id=9)
    parser.feed("a b")
    assert parser.count_tokens([1, 2]) == 2
    parser.feed("c</think>d e")
    assert parser.count_tokens([3, 9, 4, 5]) == 2


# ---- dialects -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ('{{- \'<tool_call>\\n{"name": "\' }}', "hermes"),
        ("within <tool_call></tool_call> XML tags", "hermes"),
        ("<tool_call>\\n<function=' + tool_call.name", "qwen3_coder"),
        ('{{- "<|python_tag|>" + tool_call.name }}', "llama3_json"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("in the format of [func_name1(params_name1=params_value1)]", "pythonic"),
        ('{{- "[TOOL_CALLS][" }}', "mistral"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'", "deepseek"),
        ("<start_function_call>call:", "gemma"),
        ("{{- '<|tool_call>call:' }}", "gemma"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "json"),
        ("", "json"),
    ],
)
def test_the_template_gives_the_dialect_away(template: str, dialect: str) -> None:
    assert detect_tool_call_parser(template) == dialect


def test_the_template_gives_reasoning_away() -> None:
    assert detect_reasoning_marks("content.split('</think>')") == "think"
    assert detect_reasoning_marks("[THINK]{{ thinking }}[/THINK]") == "mistral"
    assert detect_reasoning_marks("{{ message.content }}") is None
