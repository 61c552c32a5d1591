"""Structured answers and forced calls over HTTP, with the real model: whatever it would say, the form holds."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from benchmarks.grammar_masks import SUITES, load_suite
from benchmarks.paths import default_gguf
from benchmarks.structured_answers import ask, begins_json, bodies, what_is_wrong, write_tiny_model
from tests.e2e.test_server import MODEL, Server, known_good_text
from tests.server.fault_table import CHAT, COMPLETIONS, stream_chunks

pytestmark = pytest.mark.model
USER = [{"role": "user", "content": "What is the weather in Oslo?"}]
END_TOKEN = 2  # of the default model
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pet": {"$ref": "#/$defs/Pet"},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "pet", "colours"],
    "additionalProperties": False,
    "$defs": {"Pet": {"enum": ["cat", "dog"], "type": "string", "title": "Pet"}},
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
DATA = Path(os.environ.get("KITFOX_JSON_SCHEMA_DATA", Path(__file__).parents[3] / "shared/data/jsonschema"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the suites are not here (KITFOX_JSON_SCHEMA_DATA)")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("kitfox", "serve", "smollm2-135m", "--max-model-len", "1024", "--dtype", "float32")
    server.wait_until_ready()
    yield server
    assert server.stop() == 0


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    """The one choice of a completion."""
    body = {"model": MODEL, "prompt": "A quick brown fox", "max_tokens": 64, "temperature": 0} | fields
    response = server.http.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": USER, "max_tokens": 200, "temperature": 0} | fields
    response = server.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed_chat(server: Server, **fields: Any) -> tuple[str, list[dict[str, str]], str | None]:
    """Content, calls as name and arguments, and finish_reason of a stream, as a client puts them together."""
    body = {"model": MODEL, "messages": USER, "max_tokens": 200, "temperature": 0, "stream": True} | fields
    content, calls, finish = "", [], None
    for chunk in stream_chunks(server.http.post(CHAT, json=body).text):
        for choice in chunk["choices"]:
            content += choice["delta"].get("content", "")
            finish = choice["finish_reason"] or finish
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return content, calls, finish


# ---- what would hurt ------------------------------------------------------------------------------------------------


def nested_schema(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("row", "fields", "param"),
    [
        ("E59", {"guided_regex": "["}, "guided_regex"),
        ("E59", {"structured_outputs": {"regex": "(?<=a)b"}}, "structured_outputs"),
        ("E59", {"regex": "(" * 500}, "regex"),
        ("E59", {"regex": "(?<=x)*"}, "regex"),
        ("E61", {"json_schema": {"type": "string", "pattern": "("}}, "json_schema"),
        ("E61", {"json_schema": {"$ref": "#/nowhere"}}, "json_schema"),
        ("E61", {"json_schema": {"properties": {"a": {"type": "float"}}}}, "json_schema"),
        ("E61", {"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}, "json_schema"),
        ("E62", {"ebnf": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000}, "ebnf"),
        ("E62", {"grammar": 'root ::= nowhere "a"'}, "grammar"),
        ("E62", {"grammar": "start: nowhere"}, "grammar"),
        ("E62", {"json_schema": nested_schema(2000)}, "json_schema"),
    ],
)
def test_what_cannot_be_compiled_costs_its_own_request_only(
    server: Server, row: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    known_good = known_good_text(server)
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 8, "stream": stream} | fields
    response = server.http.post(COMPLETIONS, json=body)
    assert response.status_code == 400, (row, response.text)
    error = response.json()["error"]
    assert error["param"].partition(".")[0] == param
    assert error["type"] == "invalid_request_error"
    assert known_good_text(server) == known_good


# ---- the form holds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
        {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
        {"json_schema": PERSON, "temperature": 1, "seed": 3},
        {"json_schema": PERSON, "stop": ["name", '"', "\n"]},  # E67: nothing cuts a structure
        {"json_schema": PERSON, "logit_bias": {str(END_TOKEN): 100}},
        {"json_schema": PERSON, "stop_token_ids": list(range(20, 60))},
        {"json_schema": PERSON, "min_tokens": 100, "max_tokens": 300},  # E68: the form's end is the end
    ],
)
def test_a_schema_holds(server: Server, fields: dict[str, Any]) -> None:
    choice = chat(server, **{"max_tokens": 200} | fields)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    content, _, finish = streamed_chat(server, **{"max_tokens": 200} | fields)
    assert (content, finish) == (choice["message"]["content"], "stop")


def test_an_end_that_may_be_is_not_one_that_must_be(server: Server) -> None:
    digits = complete(server, regex="[0-9]+", logit_bias={str(END_TOKEN): -100}, max_tokens=12)  # E70
    assert (digits["finish_reason"], len(digits["text"]) > 1) == ("length", True)
    both = complete(server, grammar='root ::= "a" | "ab"', logit_bias={str(END_TOKEN): -100})
    assert (both["text"], both["finish_reason"]) == ("ab", "stop")


def test_a_boolean_ends_although_more_tokens_are_wanted(server: Server) -> None:
    choice = complete(server, json_schema={"type": "boolean"}, min_tokens=20)  # E68
    assert choice["text"] in ("true", "false")
    assert choice["finish_reason"] == "stop"


def test_max_tokens_cuts_and_says_so(server: Server) -> None:
    choice = complete(server, json_schema=PERSON, max_tokens=5)  # E71
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/E", "$defs": {"E": {"enum": ["x", "y"]}}},  # E64
        {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},  # E73
        {"type": "object", "properties": {"a": {"anyOf": [{"const": "x"}, {"type": "null"}]}}, "required": ["a"],
         "additionalProperties": False},
    ],
)  # fmt: skip
def test_values_of_a_list_hold_behind_references(server: Server, schema: dict[str, Any]) -> None:
    choice = complete(server, json_schema=schema)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"]), schema)


def test_pattern_properties_are_kept_to_or_refused(server: Server) -> None:
    schema = {"type": "object", "patternProperties": {"^a$": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 64, "temperature": 0, "json_schema": schema}
    response = server.http.post(COMPLETIONS, json=body)  # E65
    if response.status_code == 200:
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["text"]), schema)
    else:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "json_schema")


def test_eight_at_once_get_what_each_gets_alone(server: Server) -> None:
    requests: list[dict[str, Any]] = [
        {"json_schema": PERSON},
        {"regex": "[a-z]{3,9} [0-9]{2}"},
        {"structured_outputs": {"choice": ["yes", "no", "maybe"]}},
        {"grammar": 'root ::= item ("," item){2}\nitem ::= [a-c]+ "!"', "max_tokens": 12},
        {},
        {"response_format": {"type": "json_object"}, "max_tokens": 24},
        {"json_schema": PERSON, "temperature": 1, "seed": 1},
        {"regex": "[0-9]{20}"},
    ]
    alone = [complete(server, **fields) for fields in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda fields: complete(server, **fields), requests))
    assert together == alone


@pytest.mark.parametrize(
    ("path", "fields", "text_of"),
    [
        ("/generate", {"text": "Hi", "sampling_params": {"json_schema": json.dumps(PERSON)}}, lambda b: b["text"]),
        (
            "/v1/responses",
            {"model": MODEL, "input": "A person.", "text": {"format": {"type": "json_schema", "schema": PERSON}}},
            lambda b: b["output"][0]["content"][0]["text"],
        ),
        (
            "/v1/messages",
            {
                "model": MODEL,
                "messages": USER,
                "max_tokens": 200,
                "output_format": {"type": "json_schema", "schema": PERSON},
            },
            lambda b: b["content"][0]["text"],
        ),
    ],
)
def test_other_protocols(server: Server, path: str, fields: dict[str, Any], text_of: Any) -> None:
    response = server.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    jsonschema.validate(json.loads(text_of(response.json())), PERSON)


# ---- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tool_choice": {"type": "function", "function": {"name": "time"}}},
        {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "seed": 4},
    ],
)
def test_a_forced_call_is_one_and_fits(server: Server, fields: dict[str, Any]) -> None:
    choice = chat(server, tools=[WEATHER, TIME], **fields)
    [call] = choice["message"]["tool_calls"]
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    schema = WEATHER["function"]["parameters"] if name == "weather" else {"maxProperties": 0}  # type: ignore[index]
    jsonschema.validate(json.loads(arguments), schema)
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    content, calls, finish = streamed_chat(server, tools=[WEATHER, TIME], **fields)
    assert (content, calls, finish) == ("", [{"name": name, "arguments": arguments}], "tool_calls")


def test_a_forced_call_that_max_tokens_cuts_says_so(server: Server) -> None:
    choice = chat(server, tools=[WEATHER], tool_choice="required", max_tokens=12)  # F86
    assert choice["finish_reason"] == "length"


def test_a_call_or_the_schema_s_json(server: Server) -> None:
    """E74: neither makes the other impossible. What the model does is its own affair; it is one of the two."""
    choice = chat(server, tools=[WEATHER, TIME], json_schema=PERSON)
    if calls := choice["message"].get("tool_calls"):
        assert choice["finish_reason"] == "tool_calls"
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
    else:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)


def test_what_a_function_cannot_be_held_to_is_named(server: Server) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": {"pattern": "("}}}}
    body = {"model": MODEL, "messages": USER, "tools": [{"type": "function", "function": function}]}
    for stream in (False, True):
        response = server.http.post(CHAT, json=body | {"stream": stream})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools"), response.text


# ---- random weights: what the masks let pass is said sooner or later ------------------------------------------------


def start_tiny(directory: Path, *flags: str) -> Server:
    """A server whose model answers anything at all."""
    write_tiny_model(directory)
    flags = ("--load-format", "dummy", "--tokenizer", str(default_gguf()), "--max-model-len", "4096", *flags)
    server = Server("kitfox", "serve", str(directory), *flags)
    server.wait_until_ready()
    return server


@pytest.fixture(scope="module", params=["paged", "radix"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_tiny(tmp_path_factory.mktemp("tiny"), "--cache", request.param)
    yield server
    assert server.stop() == 0


MIXED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"json_schema": PERSON}),
    (COMPLETIONS, {"regex": "[a-z]{3,9} [0-9]{2}(\\.[A-F]+)?", "logprobs": 2}),
    (COMPLETIONS, {"structured_outputs": {"choice": ["yes", "no", "maybe not", "maybe"]}, "logprobs": 1}),
    (COMPLETIONS, {"ebnf": 'root ::= item ("," item){2,9}\nitem ::= [a-c]+ "!" | "\\u00e9\\u20ac" | "<" root ">"'}),
    (COMPLETIONS, {"grammar": 'start: (word " ")* word\nword: /[a-z]{1,5}/ | "[" start "]"', "max_tokens": 40}),
    (
        COMPLETIONS,
        {
            "structural_tag": {
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}],
                "triggers": ["<f"],
            },
            "max_tokens": 60,
        },
    ),
    (CHAT, {"tools": [WEATHER, TIME], "tool_choice": "required", "logprobs": True, "top_logprobs": 2}),
    (COMPLETIONS, {"max_tokens": 60, "logprobs": 2}),
]


def put_together(path: str, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What clients read of a stream: its choices as an answer that is no stream has them."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        made = choices.setdefault(choice["index"], {"text": "", "calls": [], "finish": None, "logprobs": []})
        made["finish"] = choice["finish_reason"] or made["finish"]
        delta = choice["delta"] if path == CHAT else {"content": choice["text"]}
        made["text"] += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                made["calls"].append([call["function"]["name"], ""])
            made["calls"][call["index"]][1] += call["function"]["arguments"]
        made["logprobs"] += flat_logprobs(choice)
    return [choices[index] for index in sorted(choices)]


def as_read(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The same of an answer that is no stream."""
    made = []
    for choice in sorted(body["choices"], key=lambda choice: choice["index"]):
        message = choice["message"] if path == CHAT else {"content": choice["text"]}
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
        text, finish = message["content"] or "", choice["finish_reason"]
        made.append({"text": text, "calls": calls, "finish": finish, "logprobs": flat_logprobs(choice)})
    return made


def flat_logprobs(choice: dict[str, Any]) -> list[Any]:
    """A token and its log probability each."""
    logprobs = choice.get("logprobs")
    if not logprobs:
        return []
    if "content" in logprobs:
        return [(entry["token"], entry["logprob"]) for entry in logprobs["content"] or []]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


def test_eight_streams_of_all_kinds_say_what_is_said_without(tiny: Server) -> None:
    """Each twice over, with two answers, in company and alone."""

    def post(number: int, stream: bool) -> list[dict[str, Any]]:
        path, fields = MIXED[number]
        body = {"model": MODEL, "max_tokens": 200, "temperature": 1, "seed": number, "n": 2, "stream": stream} | fields
        body |= {"messages": USER} if path == CHAT else {"prompt": "A quick brown fox"}
        response = tiny.http.post(path, json=body)
        assert response.status_code == 200, response.text
        if stream:
            return put_together(path, stream_chunks(response.text))
        return as_read(path, response.json())

    numbers = list(range(len(MIXED)))
    with ThreadPoolExecutor(len(MIXED)) as pool:
        streamed = list(pool.map(post, numbers, [True] * len(MIXED)))
        whole = list(pool.map(post, numbers, [False] * len(MIXED)))
    for number, (_, fields) in enumerate(MIXED):
        assert len(whole[number]) == 2, fields
        assert streamed[number] == whole[number], fields
        assert post(number, True) == whole[number], fields
    for choice in whole[0]:
        assert (
            begins_json(choice["text"]) if choice["finish"] == "length" else not what_is_wrong(PERSON, choice["text"])
        )


ENDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "stop texts": {"stop": ['"', "a", "}", ","]},
    "min_tokens": {"min_tokens": 100},
    "ignore_eos": {"ignore_eos": True},
    "a pushed end token": {"logit_bias": {str(END_TOKEN): 100}},
    "stop tokens": {"stop_token_ids": list(range(20, 60)), "logit_bias": {str(index): 8 for index in range(20, 60)}},
    "all of them": {
        "stop": ['"', "\n"],
        "min_tokens": 40,
        "stop_token_ids": [30, 31, 32],
        "logit_bias": {str(END_TOKEN): 100, "30": 20, "31": 20},
    },
}


@needs_data
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("end", ENDS)
def test_an_answer_that_says_it_is_whole_is_valid(tiny: Server, suite: str, end: str) -> None:
    """A part of `benchmarks/structured_answers.py`, under whatever else could end an answer (E67, E68, E71)."""
    cases = [case for case in load_suite(DATA, suite) if len(str(case.schema)) <= 2000][list(ENDS).index(end) :: 25]
    body = bodies("tiny", 160)["random, closing"]
    fields = ENDS[end]
    body |= {"model": MODEL} | fields | {"logit_bias": body["logit_bias"] | fields.get("logit_bias", {})}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda case: ask(tiny.http, case, body | {"seed": len(case.name)}), cases))
    assert [(a.case.name, a.problem, a.text) for a in answers if a.problem and a.outcome != "refused"] == []
    assert sum(answer.outcome == "stop" for answer in answers) >= 3


@needs_data
def test_others_go_on_while_heavy_schemas_compile(tmp_path: Path) -> None:
    """Cold, all at once: each is answered or refused in the end, and a stream beside them keeps getting tokens."""
    with (DATA / "heavy_schemas.jsonl").open(encoding="utf-8") as lines:
        schemas = [json.loads(line)["schema"] for line in lines]
    server = start_tiny(tmp_path)
    num_chunks = 0
    has_begun, is_enough = threading.Event(), threading.Event()

    def stream_on() -> None:
        nonlocal num_chunks
        body = {"model": MODEL, "prompt": "Hi", "stream": True, "ignore_eos": True, "max_tokens": 4000, "seed": 1}
        while not is_enough.is_set():
            with server.http.stream("POST", COMPLETIONS, json=body) as response:
                for line in response.iter_lines():
                    num_chunks += line.startswith("data: {")
                    has_begun.set()
                    if is_enough.is_set():
                        break

    def ask_for(schema: Any) -> tuple[int, int]:
        """The status, and how many chunks of the stream came before it."""
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 8, "json_schema": schema}
        before = num_chunks
        status = server.http.post(COMPLETIONS, json=body).status_code
        return status, num_chunks - before

    with ThreadPoolExecutor(1 + len(schemas)) as pool:
        streaming = pool.submit(stream_on)
        assert has_begun.wait(60)
        outcomes = list(pool.map(ask_for, schemas))
        is_enough.set()
        streaming.result()
    assert all(status in (200, 400) for status, _ in outcomes), outcomes
    assert all(chunks > 10 for _, chunks in outcomes), outcomes
    assert server.stop() == 0


# ---- what is left behind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_behind(tmp_path: Path, how: signal.Signals) -> None:
    server = start_tiny(tmp_path, "--shutdown-timeout", "1")
    complete(server, json_schema={"type": "boolean"}, max_tokens=8)
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert any("structured_output" in " ".join(process.cmdline()) for process in processes)
    server.process.send_signal(how)
    try:
        _, left = psutil.wait_procs(processes, timeout=30)
        assert left == []
    finally:
        server.stop()
