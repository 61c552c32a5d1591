"""Every way to say what an answer must be reaches the same constraint, and what says nothing sensible is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kitfox.constraint import (
    ANY_JSON,
    Alternatives,
    AnyText,
    Constraint,
    Ebnf,
    Format,
    JsonSchema,
    Lark,
    Mark,
    Reasoning,
    Regex,
    Repeat,
    Sequence,
    Tag,
    Text,
    TriggeredTags,
    choice,
)
from kitfox.errors import InvalidParameterError, UnsupportedParameterError
from kitfox.server.conversation import Tool, check_calling, constrain_calls
from kitfox.server.options import ServerOptions
from kitfox.server.parsers import TOOL_CALL_PARSERS
from tests.server.fake_llm import MODEL, FakeAsyncLLM
from tests.server.fault_table import CHAT, COMPLETIONS
from tests.server.http_client import send, send_all

SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"type": "string"}},
    "required": ["b"],
    "additionalProperties": False,
}
SCHEMA_TEXT = json.dumps(SCHEMA)
GBNF = 'root ::= "a" | "b"'
LARK = 'start: "a" | "b"'
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
PATHS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": MODEL, "prompt": "Hi", "max_tokens": 4},
    CHAT: {"model": MODEL} | HELLO,
    "/generate": {"text": "Hi"},
    "/v1/responses": {"model": MODEL, "input": "Hi"},
    "/v1/messages": {"model": MODEL} | HELLO,
}


def constraint_of(path: str, fields: dict[str, Any], llm: FakeAsyncLLM | None = None) -> Constraint | None:
    """What the engine is told of the answer."""
    llm = llm or FakeAsyncLLM()
    response = send(llm, "POST", path, PATHS[path] | fields)
    assert response.status_code == 200, response.text
    assert "ignored_parameters" not in response.json()
    return llm.seen[0][2].constraint


def refused_param(path: str, fields: dict[str, Any]) -> tuple[str, str]:
    """The parameter that a request is refused for, and the message."""
    llm = FakeAsyncLLM()
    response = send(llm, "POST", path, PATHS[path] | fields)
    assert (response.status_code, llm.seen, llm.in_flight) == (400, [], set()), response.text
    error = response.json()["error"]
    return error["param"], error["message"]


# ---- spellings ------------------------------------------------------------------------------------------------------

BY_SCHEMA = JsonSchema(closes_objects=True, schema=SCHEMA)
TAGS = TriggeredTags(triggers=["<f"], tags=[Tag(begin="<f=a>", content=BY_SCHEMA, end="</f>")])
LEGACY_TAGS = {"structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
TYPED_LEGACY_TAGS = {"type": "structural_tag"} | LEGACY_TAGS
TAG_NODE = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
TAG_TREE = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG_NODE]}}

SPELLINGS: list[tuple[dict[str, Any], Format, str]] = [
    # JSON schemas
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        BY_SCHEMA,
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA_TEXT}}},
        BY_SCHEMA,
        "response_format",
    ),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, BY_SCHEMA, "response_format"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, BY_SCHEMA, "response_format"),
    ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA, "structured_outputs"),
    ({"structured_outputs": {"json": SCHEMA_TEXT}}, BY_SCHEMA, "structured_outputs"),
    ({"guided_json": SCHEMA}, BY_SCHEMA, "guided_json"),
    ({"guided_json": SCHEMA_TEXT}, BY_SCHEMA, "guided_json"),
    ({"json_schema": SCHEMA_TEXT}, BY_SCHEMA, "json_schema"),
    ({"json_schema": SCHEMA}, BY_SCHEMA, "json_schema"),
    ({"json_schema": True}, JsonSchema(closes_objects=True, schema=True), "json_schema"),
    ({"structured_outputs": {"json": False}}, JsonSchema(closes_objects=True, schema=False), "structured_outputs"),
    # any JSON
    ({"response_format": {"type": "json_object"}}, ANY_JSON, "response_format"),
    ({"structured_outputs": {"json_object": True}}, ANY_JSON, "structured_outputs"),
    # patterns and choices
    ({"structured_outputs": {"regex": "[0-9]+"}}, Regex(pattern="[0-9]+"), "structured_outputs"),
    ({"guided_regex": "[0-9]+"}, Regex(pattern="[0-9]+"), "guided_regex"),
    ({"regex": "[0-9]+"}, Regex(pattern="[0-9]+"), "regex"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, choice(["yes", "no"]), "structured_outputs"),
    ({"guided_choice": ["yes", "no"]}, choice(["yes", "no"]), "guided_choice"),
    # grammars
    ({"structured_outputs": {"grammar": GBNF}}, Ebnf(grammar=GBNF), "structured_outputs"),
    ({"guided_grammar": GBNF}, Ebnf(grammar=GBNF), "guided_grammar"),
    ({"ebnf": GBNF}, Ebnf(grammar=GBNF), "ebnf"),
    ({"grammar": GBNF}, Ebnf(grammar=GBNF), "grammar"),
    (
        {"grammar": f"# start: here\na ::= start:\n{GBNF}"},
        Ebnf(grammar=f"# start: here\na ::= start:\n{GBNF}"),
        "grammar",
    ),
    ({"structured_outputs": {"grammar": LARK}}, Lark(grammar=LARK), "structured_outputs"),
    ({"guided_grammar": f"%llguidance {{}}\n{LARK}"}, Lark(grammar=f"%llguidance {{}}\n{LARK}"), "guided_grammar"),
    ({"grammar": '?start: "a"'}, Lark(grammar='?start: "a"'), "grammar"),
    # whitespace and additional properties
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        JsonSchema(closes_objects=True, schema=SCHEMA, max_whitespace=0),
        "structured_outputs",
    ),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
        replace(ANY_JSON, whitespace_pattern=" ?"),
        "structured_outputs",
    ),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
        JsonSchema(closes_objects=True, schema=SCHEMA, whitespace_pattern=" ?"),
        "guided_json",
    ),
    (
        {
            "structured_outputs": {
                "json": {"anyOf": [SCHEMA, {"properties": {"properties": SCHEMA}, "additionalProperties": {}}]},
                "disable_additional_properties": True,
            }
        },
        JsonSchema(
            closes_objects=True,
            schema={
                "anyOf": [
                    SCHEMA | {"additionalProperties": False},
                    {
                        "properties": {"properties": SCHEMA | {"additionalProperties": False}},
                        "additionalProperties": {},
                    },
                ]
            },
        ),
        "structured_outputs",
    ),
    # structural tags
    ({"response_format": TYPED_LEGACY_TAGS}, TAGS, "response_format"),
    ({"response_format": TAG_TREE}, TAGS, "response_format"),
    ({"structured_outputs": {"structural_tag": json.dumps(LEGACY_TAGS)}}, TAGS, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": TAG_TREE}}, TAGS, "structured_outputs"),
    ({"structural_tag": json.dumps(TAG_TREE)}, TAGS, "structural_tag"),
    ({"structural_tag": TYPED_LEGACY_TAGS}, TAGS, "structural_tag"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "format", "param"), SPELLINGS)
def test_spellings(path: str, fields: dict[str, Any], format: Format, param: str) -> None:
    assert constraint_of(path, fields) == Constraint(format=format, param=param)


@pytest.mark.parametrize(("fields", "format", "param"), SPELLINGS)
def test_spellings_in_sglang_s_sampling_params(fields: dict[str, Any], format: Format, param: str) -> None:
    assert constraint_of("/generate", {"sampling_params": fields}) == Constraint(format=format, param=param)


def test_prompts_of_a_list_have_constraints_of_their_own() -> None:
    llm = FakeAsyncLLM()
    body = {"text": ["a", "b", "c"], "sampling_params": [{"regex": "a+"}, {}, {"json_schema": SCHEMA}]}
    assert send(llm, "POST", "/generate", body).status_code == 200
    made = [seen[2].constraint for seen in llm.seen]
    assert [None if constraint is None else constraint.format for constraint in made] == [
        Regex(pattern="a+"), None, BY_SCHEMA,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, "text.format"),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_format"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "output_config.format",
        ),
        ("/v1/messages", {"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
        ("/v1/responses", {"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
    ],
)
def test_other_protocols(path: str, fields: dict[str, Any], param: str) -> None:
    assert constraint_of(path, fields) == Constraint(format=BY_SCHEMA, param=param)


def test_a_response_shows_its_format() -> None:
    for text_format in (
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True},
    ):
        body = PATHS["/v1/responses"] | {"text": {"format": text_format}}
        assert send(FakeAsyncLLM(), "POST", "/v1/responses", body).json()["text"]["format"] == text_format


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None, "regex": None, "guided_choice": None}],
)
def test_free_answers(fields: dict[str, Any]) -> None:
    assert constraint_of(CHAT, fields) is None
    assert constraint_of(COMPLETIONS, fields) is None


def test_the_backend_s_name_is_not_the_request_s_to_choose() -> None:
    body = PATHS[CHAT] | {"guided_regex": "a", "guided_decoding_backend": "outlines"}
    assert send(FakeAsyncLLM(), "POST", CHAT, body).json()["ignored_parameters"] == ["guided_decoding_backend"]


# ---- structural tags ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "format"),
    [
        ({"type": "const_string", "value": "x"}, Text(value="x")),
        ({"type": "any_text"}, AnyText()),
        ({"type": "any_text", "excludes": []}, AnyText()),
        ({"type": "regex", "pattern": "a"}, Regex(pattern="a")),
        ({"type": "grammar", "grammar": GBNF}, Ebnf(grammar=GBNF)),
        ({"type": "grammar", "grammar": LARK, "syntax": "lark"}, Lark(grammar=LARK)),
        ({"type": "token", "token": "<t>"}, Mark(value="<t>")),
        (
            {"type": "json_schema", "json_schema": True, "style": "json", "max_whitespace_cnt": 2},
            JsonSchema(closes_objects=True, schema=True, max_whitespace=2),
        ),
        (
            {"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, {"type": "any_text"}]},
            Sequence(elements=[Text(value="x"), AnyText()]),
        ),
        ({"type": "or", "elements": [{"type": "any_text"}]}, Alternatives(elements=[AnyText()])),
        ({"type": "optional", "content": {"type": "any_text"}}, Repeat(element=AnyText(), max_count=1)),
        ({"type": "star", "content": {"type": "any_text"}}, Repeat(element=AnyText())),
        ({"type": "plus", "content": {"type": "any_text"}}, Repeat(element=AnyText(), min_count=1)),
        (
            {"type": "repeat", "min": 2, "max": 3, "content": {"type": "any_text"}},
            Repeat(element=AnyText(), min_count=2, max_count=3),
        ),
        (TAG_NODE, TAGS.tags[0]),
        (
            TAG_NODE | {"end": ["x", "y"]},
            Tag(begin="<f=a>", content=Sequence(elements=[BY_SCHEMA, choice(["x", "y"])]), end=""),
        ),
        (
            TAG_NODE | {"begin": {"type": "token", "token": "<t>"}, "end": {"type": "token", "token": "</t>"}},
            Tag(begin="<t>", content=Sequence(elements=[BY_SCHEMA, Mark(value="</t>")]), end=""),
        ),
        (
            {"type": "tags_with_separator", "tags": [TAG_NODE], "separator": ",", "at_least_one": True},
            Repeat(element=Alternatives(elements=[TAGS.tags[0]]), separator=",", min_count=1),
        ),
        (
            {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG_NODE], "stop_after_first": True},
            msgspec.structs.replace(TAGS, stop_after_first=True),
        ),
        (
            {
                "type": "token_triggered_tags",
                "trigger_tokens": ["<t>"],
                "tags": [{"begin": {"type": "token", "token": "<t>"}, "content": {"type": "any_text"}, "end": ""}],
                "at_least_one": True,
            },
            TriggeredTags(triggers=["<t>"], tags=[Tag(begin="<t>", content=AnyText(), end="")], at_least_one=True),
        ),
    ],
)
def test_structural_tags(node: dict[str, Any], format: Format) -> None:
    assert constraint_of(CHAT, {"structural_tag": {"format": node}}) == Constraint(
        format=format, param="structural_tag"
    )


@pytest.mark.parametrize(
    ("tag", "param"),
    [
        ({}, ""),
        ([], ""),
        ("{", ""),
        ({"type": "tags", "format": {}}, ".type"),
        (LEGACY_TAGS | {"format": {}}, ""),
        (LEGACY_TAGS | {"triggers": ["<g"]}, ""),
        (LEGACY_TAGS | {"triggers": []}, ""),
        (LEGACY_TAGS | {"triggers": "<f"}, ".triggers"),
        ({"structures": [{"begin": "<f=a>", "end": ""}], "triggers": ["<f"]}, ".structures[0].schema"),
        ({"structures": [{"begin": 1, "schema": {}, "end": ""}], "triggers": ["<f"]}, ".structures[0].begin"),
        ({"format": 1}, ".format"),
        ({"format": {"type": "dispatch"}}, ".format.type"),
        ({"format": {"type": "const_string"}}, ".format.value"),
        ({"format": {"type": "any_text", "max_tokens": 0}}, ".format.max_tokens"),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, ".format.style"),
        ({"format": {"type": "sequence", "elements": []}}, ".format.elements"),
        ({"format": {"type": "sequence", "elements": [{"type": "wish"}]}}, ".format.elements[0].type"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": {"type": "any_text"}}}, ".format"),
        ({"format": {"type": "token", "token": 5}}, ".format.token"),
    ],
)
def test_structural_tags_that_are_refused(tag: Any, param: str) -> None:
    given = tag if isinstance(tag, dict | str) else json.dumps(tag)
    assert refused_param(CHAT, {"structural_tag": given})[0] == f"structural_tag{param}"


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"grammar": "a b c"}}, "structured_outputs.grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 100}, "guided_json"),
        ({"guided_json": []}, "guided_json"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"json_schema": "no"}, "json_schema"),
        ({"json_schema": 3}, "json_schema"),
        ({"regex": ["a"]}, "regex"),
        ({"ebnf": {}}, "ebnf"),
    ],
)
def test_what_is_refused(path: str, fields: dict[str, Any], param: str) -> None:
    assert refused_param(path, fields)[0] == param


@pytest.mark.parametrize(
    ("path", "fields", "first", "second"),
    [
        (CHAT, {"regex": "a", "guided_regex": "a"}, "guided_regex", "regex"),
        (CHAT, {"regex": "a", "response_format": {"type": "json_object"}}, "response_format", "regex"),
        (COMPLETIONS, {"ebnf": GBNF, "grammar": GBNF}, "ebnf", "grammar"),
        (COMPLETIONS, {"structured_outputs": {"regex": "a"}, "json_schema": {}}, "structured_outputs", "json_schema"),
        ("/generate", {"sampling_params": {"regex": "a", "ebnf": GBNF}}, "regex", "ebnf"),
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format", "regex"),
    ],
)
def test_two_spellings_at_once(path: str, fields: dict[str, Any], first: str, second: str) -> None:
    param, message = refused_param(path, fields)
    assert param == second
    assert f"{first} and {second} " in message


def test_two_kinds_at_once_are_both_named() -> None:
    _, message = refused_param(CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}})
    assert "regex, choice" in message


# ---- reasoning ------------------------------------------------------------------------------------------------------

THINKING = "tools tool_calls <tool_call> <think></think> enable_thinking"


def test_reasoning_comes_before_what_is_constrained() -> None:
    llm = FakeAsyncLLM()
    llm.tokenizer.chat_template = THINKING
    reasoning = Reasoning(opener="<think>", closer="</think>")
    assert constraint_of(CHAT, {"regex": "a"}, llm) == Constraint(
        format=Regex(pattern="a"), param="regex", reasoning=reasoning
    )
    opened = [*HELLO["messages"], {"role": "assistant", "content": "<think>\n"}]
    llm.seen.clear()
    made = constraint_of(CHAT, {"regex": "a", "messages": opened, "continue_final_message": True}, llm)
    assert made is not None
    assert made.reasoning == Reasoning(opener="<think>", closer="</think>", is_open=True)
    llm.seen.clear()
    body = PATHS[CHAT] | {"regex": "a"}
    assert send_all(llm, [("POST", CHAT, body)], ServerOptions(reasoning_parser="none"))[0].status_code == 200
    made = llm.seen[0][2].constraint
    assert made is not None
    assert made.reasoning is None
    llm.seen.clear()
    made = constraint_of(COMPLETIONS, {"regex": "a"}, llm)
    assert made is not None
    assert made.reasoning is None


# ---- tool calls -----------------------------------------------------------------------------------------------------


def tool(name: str, *, strict: bool | None = None, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


STRICT = tool("f", strict=True, type="object", properties={"a": {"type": "integer"}}, required=["a"])
LOOSE = tool("g", type="object", properties={"b": {"type": "string"}})
HERMES = TOOL_CALL_PARSERS["hermes"]
FREE_AND_HELD = {"f": STRICT["function"]["parameters"], "g": None}
BOTH_HELD = {"f": STRICT["function"]["parameters"], "g": LOOSE["function"]["parameters"]}


@pytest.mark.parametrize(
    ("fields", "format"),
    [
        ({"tools": [LOOSE]}, None),
        ({"tools": [STRICT, LOOSE], "tool_choice": "none"}, None),
        ({"tools": [STRICT, LOOSE]}, HERMES.text_format(FREE_AND_HELD, None)),
        ({"tools": [STRICT, LOOSE], "parallel_tool_calls": False}, HERMES.text_format(FREE_AND_HELD, 1)),
        ({"tools": [STRICT, LOOSE], "tool_choice": "required"}, HERMES.calls_format(BOTH_HELD, None)),
        (
            {"tools": [STRICT, LOOSE], "tool_choice": "required", "parallel_tool_calls": False},
            HERMES.calls_format(BOTH_HELD, 1),
        ),
        (
            {"tools": [STRICT, LOOSE], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            HERMES.calls_format({"g": LOOSE["function"]["parameters"]}, 1),
        ),
    ],
)
def test_tool_calls(fields: dict[str, Any], format: Format | None) -> None:
    llm = FakeAsyncLLM()
    llm.tokenizer.chat_template = "tools tool_calls <tool_call>"
    made = constraint_of(CHAT, fields, llm)
    assert made == (None if format is None else Constraint(format=format, param="tools"))


def test_a_call_or_the_schema_s_json() -> None:
    llm = FakeAsyncLLM()
    llm.tokenizer.chat_template = "tools tool_calls <tool_call>"
    fields = {"tools": [STRICT, LOOSE], "json_schema": SCHEMA}
    calls = HERMES.calls_format(FREE_AND_HELD, None)
    assert constraint_of(CHAT, fields, llm) == Constraint(
        format=Alternatives(elements=[calls, BY_SCHEMA]), param="json_schema"
    )
    llm.seen.clear()
    assert constraint_of(CHAT, fields | {"tool_choice": "none"}, llm) == Constraint(
        format=BY_SCHEMA, param="json_schema"
    )


def test_reasoning_comes_before_a_forced_call() -> None:
    llm = FakeAsyncLLM()
    llm.tokenizer.chat_template = THINKING
    made = constraint_of(CHAT, {"tools": [LOOSE], "tool_choice": "required"}, llm)
    assert made is not None
    assert made.reasoning == Reasoning(opener="<think>", closer="</think>")
    assert bytes(llm.seen[0][1]).endswith(b"[assistant]")


@pytest.mark.parametrize("dialect", ["qwen3_coder", "gemma"])
@pytest.mark.parametrize(
    ("parameter", "keyword"),
    [
        ({"type": "string", "pattern": "a+"}, "pattern"),
        ({"type": "string", "format": "date"}, "format"),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "oneOf"),
        ({"$ref": "#/$defs/Missing"}, "$ref"),
    ],
)
def test_what_a_dialect_cannot_be_held_to_is_named(dialect: str, parameter: dict[str, Any], keyword: str) -> None:
    held = msgspec.convert(tool("f", strict=True, type="object", properties={"a": parameter}), Tool)
    for tool_choice in ("auto", "required"):
        calling = check_calling([held], tool_choice, parallel=True)
        with pytest.raises(UnsupportedParameterError, match=re.escape(keyword)) as caught:
            constrain_calls(None, calling, TOOL_CALL_PARSERS[dialect])
        assert caught.value.param == "tools"


# ---- what the engine finds out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_grammar_that_cannot_be_compiled_is_a_400(path: str, stream: bool) -> None:
    llm = FakeAsyncLLM()
    llm.fail_after, llm.failure = 0, InvalidParameterError("regex", "must be a regex that can be compiled", "(")
    fields: dict[str, Any] = {"sampling_params": {"regex": "("}} if path == "/generate" else {"regex": "("}
    response = send(llm, "POST", path, PATHS[path] | fields | {"stream": stream})
    assert response.status_code == 400, response.text
    body = response.json()
    if path == "/v1/messages":
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert body["error"]["message"].startswith("regex must be")
    else:
        assert (body["error"]["param"], body["error"]["type"]) == ("regex", "invalid_request_error")
    assert not llm.in_flight


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_waited_for_its_grammar_is_whole(path: str) -> None:
    fields: dict[str, Any] = {"sampling_params": {"regex": "a"}} if path == "/generate" else {"regex": "a"}
    streamed = [
        send(FakeAsyncLLM(), "POST", path, PATHS[path] | extra | {"stream": True}).text.count("data: ")
        for extra in ({}, fields)
    ]
    assert streamed[0] == streamed[1]


def test_a_list_of_streams_waits_for_every_grammar() -> None:
    llm = FakeAsyncLLM()
    llm.fail_after, llm.failure = 0, InvalidParameterError("regex", "must be a regex that can be compiled", "(")
    body = {"text": ["a", "b"], "sampling_params": [{}, {"regex": "("}], "stream": True}
    assert send(llm, "POST", "/generate", body).status_code == 400
    assert not llm.in_flight
