"""Anthropic's Messages: what becomes of a body, and of an answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
from hypothesis import given, settings

from kitfox.errors import EngineDeadError, QueueFullError, RequestError
from kitfox.server.anthropic import MessageReply, MessagesRequest, make_chat
from kitfox.server.openai import Piece
from kitfox.server.validation import convert_body
from tests.server.fake_llm import MODEL, REPLY, FakeAsyncLLM
from tests.server.http_client import send
from tests.server.scripted_reply import ScriptedReply, call_pieces, scripts, thoughtful_pieces

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
HELLO = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    events = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def accumulate(events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The message that a client puts together; checks that blocks begin and end one after the other."""
    names = [name for name, _ in events]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert all(name == data["type"] for name, data in events)
    message: dict[str, Any] = events[0][1]["message"]
    arguments: dict[int, str] = {}
    open_index: int | None = None
    for name, data in events[1:-2]:
        if name == "content_block_start":
            assert (open_index, data["index"]) == (None, len(message["content"]))
            open_index = data["index"]
            message["content"].append(data["content_block"])
            continue
        assert data["index"] == open_index
        block = message["content"][data["index"]]
        if name == "content_block_stop":
            open_index = None
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments.get(data["index"], "") or "{}")
            continue
        delta = data["delta"]
        if delta["type"] == "input_json_delta":
            arguments[data["index"]] = arguments.get(data["index"], "") + delta["partial_json"]
        else:
            field = {"text_delta": "text", "thinking_delta": "thinking"}[delta["type"]]
            block[field] += delta[field]
    assert open_index is None
    return message | events[-2][1]["delta"] | {"usage": message["usage"] | events[-2][1]["usage"]}


def render(pieces: list[Any], **kwargs: Any) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """A script's message, whole, and as events."""

    async def run() -> tuple[dict[str, Any], str]:
        whole = await MessageReply(ScriptedReply(pieces, answer_id="msg_1", **kwargs)).whole()  # type: ignore[arg-type]
        streamed = MessageReply(ScriptedReply(pieces, answer_id="msg_1", **kwargs)).events()  # type: ignore[arg-type]
        return whole, b"".join([event async for event in streamed]).decode()

    whole, text = asyncio.run(run())
    return whole, events_of(text)


def chat_of(**fields: Any) -> dict[str, Any]:
    """The chat that a message becomes, without what is as it always is."""
    request, _ = convert_body(HELLO | fields, MessagesRequest)
    chat = make_chat(request)
    encoded = json.loads(msgspec.json.encode(chat))
    return {name: value for name, value in encoded.items() if value not in (None, [], {}, False)}


def messages_of(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in message.items() if value is not None}
        for message in chat_of(messages=list(messages))["messages"]
    ]


DIRECT = {"type": "direct"}


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# ---- over HTTP ------------------------------------------------------------------------------------------------------


def test_a_message() -> None:
    llm = FakeAsyncLLM()
    llm.num_cached_tokens = 4
    body = send(llm, "POST", MESSAGES, HELLO).json()
    prompt = b"[user]Hi\n[assistant]"
    assert bytes(llm.seen[0][1]) == prompt
    assert body["id"].startswith("msg_")
    assert llm.seen[0][0] == body["id"]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", MODEL)
    assert body["content"] == [text_block(REPLY)]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"] == {
        "input_tokens": len(prompt) - 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": len(REPLY.encode()) + 1,
        "output_tokens_details": None,
        "server_tool_use": None,
        "cache_creation": None,
        "inference_geo": None,
        "service_tier": "standard",
    }
    assert "ignored_parameters" not in body


def test_a_streamed_message_is_the_whole_one() -> None:
    llm = FakeAsyncLLM()
    llm.num_cached_tokens = 4
    whole = send(llm, "POST", MESSAGES, HELLO).json()
    response = send(llm, "POST", MESSAGES, HELLO | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"] == whole["usage"] | {"output_tokens": 0}
    assert accumulate(events) | {"id": ""} == whole | {"id": ""}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({"stop_sequences": ["zzz", " fox"]}, "The quick brown", "stop_sequence", " fox"),
        ({"max_tokens": 9}, "The quick", "max_tokens", None),
        ({"temperature": 1, "top_k": 5, "top_p": 0.5}, REPLY, "end_turn", None),
    ],
)
def test_why_it_ended(fields: dict[str, Any], text: str, reason: str, sequence: str | None, stream: bool) -> None:
    response = send(FakeAsyncLLM(), "POST", MESSAGES, HELLO | fields | {"stream": stream})
    body = accumulate(events_of(response.text)) if stream else response.json()
    assert body["content"] == [text_block(text)]
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_the_assistant_s_last_message_is_gone_on_with() -> None:
    llm = FakeAsyncLLM()
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    assert send(llm, "POST", MESSAGES, HELLO | {"messages": turns}).status_code == 200
    assert bytes(llm.seen[0][1]) == b"[user]Hi\n[assistant]Well,"


def test_tokens_are_counted_as_they_are_used() -> None:
    body = HELLO | {"system": [text_part("Be brief.")]}
    usage = send(FakeAsyncLLM(), "POST", MESSAGES, body).json()["usage"]
    del body["max_tokens"]
    assert send(FakeAsyncLLM(), "POST", COUNT_TOKENS, body).json() == {"input_tokens": usage["input_tokens"]}


def test_what_nobody_reads_is_listed() -> None:
    block = text_part("Hi") | {"citations": [], "cache_control": {"type": "ephemeral"}}
    fields = {
        "messages": [{"role": "user", "content": [block]}],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "container": "c",
    }
    ignored = ["messages[].content[].citations", "container", "thinking.budget_tokens"]
    response = send(FakeAsyncLLM(), "POST", MESSAGES, HELLO | fields)
    assert response.json()["ignored_parameters"] == ignored
    response = send(FakeAsyncLLM(), "POST", MESSAGES, HELLO | fields | {"stream": True})
    assert events_of(response.text)[0][1]["message"]["ignored_parameters"] == ignored


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "kind", "needle"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is required"),
        ({"messages": None}, 400, "invalid_request_error", "messages is required"),
        ({"messages": []}, 400, "invalid_request_error", "messages must have at least one"),
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"model": None}, 400, "invalid_request_error", "model is required"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature must be in [0, 1]. Given: 1.5"),
        ({"n": 2}, 400, "invalid_request_error", "n is not a parameter of this endpoint"),
        ({"stop": "x"}, 400, "invalid_request_error", "stop is not a parameter of this endpoint"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers is not supported"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "invalid_request_error", "output_config.format"),
        ({"output_config": {"format": {"type": "text"}}}, 400, "invalid_request_error", "output_config.format.type"),
        ({"output_format": {"type": "json_schema", "schema": 1}}, 400, "invalid_request_error", "output_format.schema"),
        ({"thinking": {"type": "on"}}, 400, "invalid_request_error", "thinking.type"),
        ({"thinking_token_budget": 9}, 400, "invalid_request_error", "thinking_token_budget is not a parameter"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools[0].type"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools[0].input_schema"),
        ({"tool_choice": {"type": "must"}}, 400, "invalid_request_error", "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
        ({"system": [{"type": "image"}]}, 400, "invalid_request_error", "system.type 'image'"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], status: int, kind: str, needle: str) -> None:
    response = send(FakeAsyncLLM(), "POST", MESSAGES, HELLO | fields)
    assert response.status_code == status
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert needle in body["error"]["message"]


@pytest.mark.parametrize(
    ("role", "block", "place"),
    [
        ("user", {"type": "image", "source": {"type": "file"}}, "messages[0].content[0].source.type"),
        ("user", {"type": "document"}, "messages[0].content[0].type"),
        ("user", {"type": "text"}, "messages[0].content[0].text"),
        ("user", {"type": "tool_result", "content": "x"}, "messages[0].content[0].tool_use_id"),
        (
            "user",
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]},
            "messages[0].content[0].content[0].type 'image'",
        ),
        ("assistant", {"type": "tool_use", "name": "f", "input": {}}, "messages[0].content[0].id"),
        ("assistant", {"type": "tool_use", "id": "1", "input": {}}, "messages[0].content[0].name"),
        ("assistant", {"type": "tool_use", "id": "1", "name": "f", "input": {}}, "messages[0] must not be a tool_use"),
        ("assistant", {"type": "redacted_thinking", "data": "x"}, "messages[0].content[0].type 'redacted_thinking'"),
        ("system", text_part("x"), "messages[0].role"),
    ],
)
def test_blocks_that_are_refused(role: str, block: dict[str, Any], place: str) -> None:
    request, _ = convert_body(HELLO | {"messages": [{"role": role, "content": [block]}]}, MessagesRequest)
    with pytest.raises(RequestError) as caught:
        make_chat(request)
    assert caught.value.message.startswith(place)


def test_images_are_refused_where_the_model_reads_none() -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    response = send(FakeAsyncLLM(), "POST", MESSAGES, HELLO | {"messages": [{"role": "user", "content": [block]}]})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("messages[0].content[0].type 'image' is not supported")


def test_a_full_queue_is_overloaded() -> None:
    llm = FakeAsyncLLM()
    llm.refusal = QueueFullError("the queue is full", retry_after_s=7)
    response = send(llm, "POST", MESSAGES, HELLO)
    assert (response.status_code, response.headers["retry-after"]) == (529, "7")
    assert response.json()["error"] == {"type": "overloaded_error", "message": "the queue is full"}


def test_a_dead_engine() -> None:
    llm = FakeAsyncLLM()
    llm.fail_after = 2
    response = send(llm, "POST", MESSAGES, HELLO)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")
    assert llm.in_flight == set()


def test_a_failure_inside_a_stream_is_one_error_event() -> None:
    llm = FakeAsyncLLM()
    llm.fail_after, llm.failure = 3, EngineDeadError("the engine failed")
    events = events_of(send(llm, "POST", MESSAGES, HELLO | {"stream": True}).text)
    assert [name for name, _ in events[:2]] == ["message_start", "content_block_start"]
    assert events[-1] == (
        "error",
        {"type": "error", "error": {"type": "overloaded_error", "message": "the engine failed"}, "request_id": ANY},
    )
    assert [name for name, _ in events].count("error") == 1


def test_a_fault_of_ours_says_nothing_of_its_cause() -> None:
    _, events = render_stream_only([Piece(0, text="Hi"), ZeroDivisionError("secret")])
    assert events[-1][1]["error"]["type"] == "api_error"
    assert "secret" not in json.dumps(events)


def render_stream_only(pieces: list[Any]) -> tuple[ScriptedReply, list[tuple[str, dict[str, Any]]]]:
    reply = ScriptedReply(pieces, answer_id="msg_1")

    async def run() -> str:
        return b"".join([event async for event in MessageReply(reply).events()]).decode()  # type: ignore[arg-type]

    return reply, events_of(asyncio.run(run()))


def test_an_answer_that_an_operator_aborts_is_an_error() -> None:
    _, events = render_stream_only([Piece(0, text="Hi"), Piece(0, finish_reason="abort")])
    assert events[-1][0] == "error"
    assert "aborted" in events[-1][1]["error"]["message"]


# ---- from a message to a chat ---------------------------------------------------------------------------------------


def test_parameters_become_the_chat_s() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    chat = chat_of(
        system="Be brief.",
        stop_sequences=["END"],
        temperature=0.5,
        top_k=7,
        seed=3,
        tools=[{"name": "weather", "description": "tells", "input_schema": schema, "cache_control": {"type": "x"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "high"},
    )
    assert chat["messages"][0] | {"role": "system", "content": "Be brief."} == chat["messages"][0]
    assert (chat["stop"], chat["temperature"], chat["top_k"], chat["seed"]) == (["END"], 0.5, 7, 3)
    assert (
        chat["tools"][0]["function"] | {"name": "weather", "description": "tells", "parameters": schema}
        == (chat["tools"][0]["function"])
    )
    assert chat["tool_choice"] == "required"
    assert "parallel_tool_calls" not in chat  # false
    assert (chat["chat_template_kwargs"], chat["reasoning_effort"]) == ({"enable_thinking": True}, "high")
    assert chat["thinking_token_budget"] == 1024


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tool_choices(choice: dict[str, Any], chosen: Any) -> None:
    assert chat_of(tool_choice=choice)["tool_choice"] == chosen


@pytest.mark.parametrize(("kind", "enabled"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_the_template_s_switch(kind: str, enabled: bool) -> None:
    assert chat_of(thinking={"type": kind})["chat_template_kwargs"] == {"enable_thinking": enabled}
    assert "chat_template_kwargs" not in chat_of()


def test_tool_use_and_its_results_become_messages_of_their_own() -> None:
    made = messages_of(
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                text_part("One moment."),
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Köln"}},
                {"type": "tool_use", "id": "c2", "name": "time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "c2", "content": [text_part("noon")]},
                text_part("And?"),
            ],
        },
    )
    assert [message["role"] for message in made] == ["user", "assistant", "tool", "tool", "user"]
    assistant = made[1]
    assert (assistant["reasoning_content"], assistant["content"][0]["text"]) == ("Hm.", "One moment.")
    assert [(call["id"], call["function"]["name"]) for call in assistant["tool_calls"]] == [
        ("c1", "weather"),
        ("c2", "time"),
    ]
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Köln"}
    assert [(message["tool_call_id"], message["content"]) for message in made[2:4]] == [
        ("c1", "rain"),
        ("c2", [text_part("noon")]),
    ]


def test_neighbours_of_one_role_are_one_turn() -> None:
    made = messages_of({"role": "user", "content": "One."}, {"role": "user", "content": [text_part("Two.")]})
    assert [part["text"] for part in made[0]["content"]] == ["One.", "Two."]
    assert len(made) == 1


# ---- from an answer to a message ------------------------------------------------------------------------------------


def test_blocks_of_an_answer_with_thoughts_and_calls() -> None:
    whole, events = render(thoughtful_pieces(), cached_tokens=6)
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        text_block("I'll look."),
        {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Bonn"}, "caller": DIRECT},
        {"type": "tool_use", "id": "call_1", "name": "time", "input": {}, "caller": DIRECT},
    ]
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == 10
    assert accumulate(events) == whole


def test_a_forced_call_that_ends_as_any_answer_is_tool_use() -> None:
    whole, _ = render([*call_pieces(0, "f", "{}"), Piece(0, finish_reason="stop")])
    assert whole["stop_reason"] == "tool_use"


def test_a_call_that_max_tokens_cut() -> None:
    whole, events = render([*call_pieces(0, "f", '{"a": '), Piece(0, finish_reason="length")])
    assert (whole["content"][0]["input"], whole["stop_reason"]) == ({}, "max_tokens")
    assert [name for name, _ in events][-3:] == ["content_block_stop", "message_delta", "message_stop"]


@settings(max_examples=50, deadline=None)
@given(scripts())
def test_a_stream_adds_up_to_the_whole(pieces: list[Any]) -> None:
    whole, events = render(pieces)
    assert accumulate(events) == whole
