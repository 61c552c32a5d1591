"""OpenAI's Responses: items in, items out, the store, background work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings

from kitfox.errors import EngineDeadError, QueueFullError, RequestError
from kitfox.server.app import make_app
from kitfox.server.openai import Piece
from kitfox.server.responses import (
    Item,
    ResponseReply,
    ResponsesRequest,
    ResponseStore,
    StoredResponse,
    _cuts,
    make_chat,
    make_items,
)
from kitfox.server.validation import convert_body
from tests.server.fake_llm import MODEL, REPLY, FakeAsyncLLM
from tests.server.http_client import send
from tests.server.scripted_reply import ScriptedReply, call_pieces, scripts, thoughtful_pieces

RESPONSES = "/v1/responses"
HELLO = {"model": MODEL, "input": "Hi"}
# What OpenAI's and the Open Responses schema say every response has.
REQUIRED = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage", "max_output_tokens",
    "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key",
}  # fmt: skip


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; checks their names and numbers."""
    events = []
    for number, event in enumerate(text.strip().split("\n\n")):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
        assert events[-1]["sequence_number"] == number
    return events


def accumulate(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that a client puts together of deltas; checks what the done events repeat."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    response: dict[str, Any] = events[0]["response"]
    assert (response["status"], response["output"]) == ("in_progress", [])
    items: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            continue
        item = items[-1]
        assert event["output_index"] == len(items) - 1
        if kind == "output_item.done":
            assert item | {"status": event["item"]["status"]} == event["item"]
            items[-1] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind == "content_part.done":
            assert event["part"] == item["content"][0]
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][0]["text"] += event["delta"]
            if "logprobs" in event:
                item["content"][0]["logprobs"] += event["logprobs"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == item["content"][0]["text"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        else:
            assert kind == "function_call_arguments.done"
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert items == last["response"]["output"]
    return last["response"]


def request_of(**fields: Any) -> ResponsesRequest:
    return convert_body(HELLO | fields, ResponsesRequest)[0]


def render(pieces: list[Any], **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A script's response, whole, and as events."""

    def reply() -> ResponseReply:
        script: Any = ScriptedReply(pieces, answer_id="resp_1")
        return ResponseReply(script, request_of(**fields), [])

    async def run() -> tuple[dict[str, Any], str]:
        return await reply().whole(), b"".join([event async for event in reply().events()]).decode()

    whole, text = asyncio.run(run())
    return json.loads(msgspec.json.encode(whole)), events_of(text)


def stream_of(pieces: list[Any]) -> list[dict[str, Any]]:
    async def run() -> str:
        script: Any = ScriptedReply(pieces, answer_id="resp_1")
        return b"".join([event async for event in ResponseReply(script, request_of(), []).events()]).decode()

    return events_of(asyncio.run(run()))


def with_client(llm: FakeAsyncLLM, work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Several requests to one app."""

    async def run() -> None:
        transport = httpx.ASGITransport(app=make_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await work(client)

    asyncio.run(run())


def chat_of(**fields: Any) -> dict[str, Any]:
    """The chat that a request becomes, without what is as it always is."""
    request = request_of(**fields)
    encoded = json.loads(msgspec.json.encode(make_chat(request, make_items(request.input))))
    return {name: value for name, value in encoded.items() if value not in (None, [], {}, False)}


def messages_of(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in message.items() if value is not None}
        for message in chat_of(input=list(items))["messages"]
    ]


# ---- over HTTP ------------------------------------------------------------------------------------------------------


def test_a_response() -> None:
    llm = FakeAsyncLLM()
    llm.num_cached_tokens = 4
    fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "user": "me"}
    body = send(llm, "POST", RESPONSES, HELLO | fields).json()
    prompt = b"[system]Be brief.\n[user]Hi\n[assistant]"
    assert bytes(llm.seen[0][1]) == prompt
    assert set(body) >= REQUIRED
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
    assert (body["temperature"], body["instructions"], body["metadata"]) == (0.5, "Be brief.", {"a": "b"})
    assert (body["user"], body["store"], body["completed_at"] >= body["created_at"]) == ("me", True, True)
    message = body["output"][0]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": REPLY, "annotations": [], "logprobs": []}]
    num_output = len(REPLY.encode()) + 1
    assert body["usage"] == {
        "input_tokens": len(prompt),
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prompt) + num_output,
    }
    assert "ignored_parameters" not in body


def test_a_streamed_response_is_the_whole_one() -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = send(FakeAsyncLLM(), "POST", RESPONSES, HELLO | fields).json()
    response = send(FakeAsyncLLM(), "POST", RESPONSES, HELLO | fields | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    streamed = accumulate(events_of(response.text))
    text = whole["output"][0]["content"][0]
    assert streamed["output"][0]["content"] == [text]
    assert b"".join(bytes(entry["bytes"]) for entry in text["logprobs"]).decode() == text["text"]
    assert len(text["logprobs"][0]["top_logprobs"]) == 2
    assert streamed["usage"] == whole["usage"]
    own = ("id", "output", "created_at", "completed_at")
    assert {k: v for k, v in streamed.items() if k not in own} == {k: v for k, v in whole.items() if k not in own}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_max_output_tokens_cut(stream: bool) -> None:
    response = send(FakeAsyncLLM(), "POST", RESPONSES, HELLO | {"max_output_tokens": 9, "stream": stream})
    body = accumulate(events_of(response.text)) if stream else response.json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (body["output"][0]["status"], body["output"][0]["content"][0]["text"]) == ("incomplete", "The quick")
    assert body["completed_at"] is None


def test_what_nobody_reads_is_listed() -> None:
    fields = {
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "moderation": {},
    }
    body = send(FakeAsyncLLM(), "POST", RESPONSES, HELLO | fields).json()
    assert sorted(body["ignored_parameters"]) == [
        "moderation",
        "reasoning.summary",
        "text.verbosity",
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": "f"}]}}, "tool_choice.tools"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"truncation": "middle"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["everything"]}, "include"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"background": True, "stream": True}, "stream"),
        ({"background": True, "store": False}, "store"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    response = send(FakeAsyncLLM(), "POST", RESPONSES, HELLO | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def called(call_id: str, size: int = 1) -> list[dict[str, Any]]:
    """A call and its result, which is so many characters long."""
    call = {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}
    return [call, {"type": "function_call_output", "call_id": call_id, "output": call_id * size}]


def turns(*questions: str) -> list[dict[str, Any]]:
    """Questions with an answer between each two."""
    return [item for question in questions for item in (said("user", question), said("assistant", "."))][:-1]


@pytest.mark.parametrize(
    ("items", "left"),
    [
        (turns("a" * 90, "b" * 90), "a.b"),  # it fits
        (turns("a" * 200, "b" * 90), "b"),
        ([said("developer", "s"), *turns("a" * 200, "b" * 90)], "sb"),
        (turns(*(f"{n}" * 80 for n in range(9))), "6.7.8"),
        ([said("user", "u"), *called("a", 200), *called("b", 150)], "ub"),
        ([said("user", "u"), *called("a", 400), said("assistant", "x")], "ux"),
    ],
)
def test_truncation_leaves_the_end_of_a_conversation(items: list[dict[str, Any]], left: str) -> None:
    """Of 320 tokens, a byte each. What stays is told by the first letter of every message."""
    llm = FakeAsyncLLM(reply="ok")
    fields = {"model": MODEL, "input": items, "max_output_tokens": 20}
    response = send(llm, "POST", RESPONSES, fields | {"truncation": "auto"})
    assert response.status_code == 200, response.text
    assert (response.json()["status"], response.json()["truncation"]) == ("completed", "auto")
    prompt = bytes(llm.seen[0][1]).decode()
    assert len(prompt) <= 300
    shown = [line.partition("]")[2][:1] for line in prompt.splitlines()[:-1]]
    assert "".join(shown).replace("{", "") == left


def test_truncation_keeps_calls_and_results_together() -> None:
    (a, result_of_a), (b, result_of_b) = called("a"), called("b")
    given = [said("user", "u"), a, b, result_of_a, result_of_b, *called("c"), said("assistant", "x")]
    cuts = _cuts(make_items(msgspec.convert(given, list[Item])))
    assert [start for start, _ in cuts] == [5, 7]
    assert {kept for _, kept in cuts} == {0}


def test_truncation_leaves_room_for_an_answer() -> None:
    llm = FakeAsyncLLM(reply="ok")
    send(llm, "POST", RESPONSES, {"model": MODEL, "input": turns("a" * 40, "b" * 240), "truncation": "auto"})
    send(llm, "POST", RESPONSES, {"model": MODEL, "input": turns("a" * 60, "b" * 240), "truncation": "auto"})
    whole, cut = (bytes(prompt).decode() for _, prompt, _ in llm.seen)
    assert "aaa" in whole
    assert "aaa" not in cut
    assert len(cut) + 320 // 8 <= 320


def test_what_truncation_cannot_help_is_refused() -> None:
    fields = {"model": MODEL, "input": turns("a", "b" * 600), "truncation": "auto"}
    response = send(FakeAsyncLLM(), "POST", RESPONSES, fields)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_the_next_turn_still_knows_what_truncation_left_out() -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        given = {"model": MODEL, "input": turns("a" * 400, "b"), "truncation": "auto"}
        response = (await client.post(RESPONSES, json=given)).json()
        listed = (await client.get(f"{RESPONSES}/{response['id']}/input_items")).json()
        assert len(listed["data"]) == 3

    with_client(FakeAsyncLLM(), scenario)


def test_a_full_queue_is_429() -> None:
    llm = FakeAsyncLLM()
    llm.refusal = QueueFullError("the queue is full")
    response = send(llm, "POST", RESPONSES, HELLO)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


def test_a_failure_inside_a_stream() -> None:
    llm = FakeAsyncLLM()
    llm.fail_after, llm.failure = 3, EngineDeadError("the engine failed")
    events = events_of(send(llm, "POST", RESPONSES, HELLO | {"stream": True}).text)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert (events[-2]["code"], events[-2]["message"]) == ("engine_unavailable", "the engine failed")
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["message"]) == ("failed", "the engine failed")
    assert (failed["output"][0]["status"], failed["output"][0]["content"][0]["text"]) == ("incomplete", "The")
    assert llm.in_flight == set()


def test_a_failure_of_a_whole_response() -> None:
    llm = FakeAsyncLLM()
    llm.fail_after = 2
    assert send(llm, "POST", RESPONSES, HELLO).status_code == 503
    assert llm.in_flight == set()


# ---- from a request to a chat ---------------------------------------------------------------------------------------


def test_parameters_become_the_chat_s() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    chat = chat_of(
        max_output_tokens=5,
        top_k=7,
        stop=["END"],
        tools=[{"type": "function", "name": "weather", "description": "tells", "parameters": schema}],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        chat_template_kwargs={"a": 1},
    )
    assert (chat["max_tokens"], chat["top_k"], chat["stop"]) == (5, 7, ["END"])
    function = chat["tools"][0]["function"]
    assert (function["name"], function["description"], function["parameters"]) == ("weather", "tells", schema)
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert "parallel_tool_calls" not in chat  # false
    assert (chat["reasoning_effort"], chat["chat_template_kwargs"]) == ("low", {"a": 1})


def test_allowed_tools_are_those_the_model_sees() -> None:
    tools = [{"type": "function", "name": name} for name in ("a", "b")]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
    chat = chat_of(tools=tools, tool_choice=allowed)
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["b"]
    assert chat["tool_choice"] == "required"


def test_what_the_assistant_did_between_others_is_one_message() -> None:
    made = messages_of(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One moment."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bonn"}'},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Easy."}]},
        {"role": "assistant", "content": "Rain at noon."},
        {"role": "user", "content": "Thanks."},
    )
    assert [m["role"] for m in made] == ["developer", "user", "assistant", "tool", "tool", "assistant", "user"]
    turn = made[2]
    assert (turn["reasoning_content"], turn["content"][0]["text"]) == ("Hm.", "One moment.")
    assert [(call["id"], call["function"]["name"]) for call in turn["tool_calls"]] == [
        ("c1", "weather"),
        ("c2", "time"),
    ]
    assert turn["tool_calls"][0]["function"]["arguments"] == '{"city": "Bonn"}'
    assert [(m["tool_call_id"], m["content"]) for m in made[3:5]] == [
        ("c1", "rain"),
        ("c2", [{"type": "text", "text": "noon"}]),
    ]
    assert (made[5]["reasoning_content"], made[5]["content"][0]["text"]) == ("Easy.", "Rain at noon.")


# ---- from an answer to a response -----------------------------------------------------------------------------------


def test_items_of_an_answer_with_thoughts_and_calls() -> None:
    whole, events = render(thoughtful_pieces())
    thought, message, weather, clock = whole["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"] == "I'll look."
    assert (weather["type"], weather["call_id"], weather["name"]) == ("function_call", "call_0", "weather")
    assert (weather["arguments"], clock["arguments"]) == ('{"city": "Bonn"}', "{}")
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert len({item["id"] for item in whole["output"]}) == 4
    assert accumulate(events)["output"] == whole["output"]


def test_a_call_that_max_output_tokens_cut() -> None:
    whole, events = render([*call_pieces(0, "f", '{"a": '), Piece(0, finish_reason="length")])
    assert (whole["output"][0]["status"], whole["output"][0]["arguments"]) == ("incomplete", '{"a": ')
    assert accumulate(events)["output"] == whole["output"]


def test_a_fault_of_ours_says_nothing_of_its_cause() -> None:
    events = stream_of([Piece(0, text="Hi"), ZeroDivisionError("secret")])
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(events)


def test_an_answer_that_an_operator_aborts_has_failed() -> None:
    events = stream_of([Piece(0, text="Hi"), Piece(0, finish_reason="abort")])
    assert (events[-2]["code"], events[-1]["type"]) == ("aborted", "response.failed")


@settings(max_examples=50, deadline=None)
@given(scripts())
def test_a_stream_adds_up_to_the_whole(pieces: list[Any]) -> None:
    whole, events = render(pieces)
    assert accumulate(events)["output"] == whole["output"]


# ---- the store ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_knows_the_last(stream: bool) -> None:
    llm = FakeAsyncLLM(reply="Fine.")

    async def work(client: httpx.AsyncClient) -> None:
        async def ask(text: str, previous: str | None) -> str:
            body = HELLO | {"input": text, "previous_response_id": previous, "stream": stream}
            response = await client.post(RESPONSES, json=body)
            return (events_of(response.text)[-1]["response"] if stream else response.json())["id"]

        first = await ask("How?", None)
        second = await ask("Why?", first)
        third = await ask("So?", second)
        assert bytes(llm.seen[-1][1]).decode() == (
            "[user]How?\n[assistant]Fine.\n[user]Why?\n[assistant]Fine.\n[user]So?\n[assistant]"
        )
        body = (await client.get(f"{RESPONSES}/{third}")).json()
        assert (body["previous_response_id"], body["output"][0]["content"][0]["text"]) == (second, "Fine.")
        items = (await client.get(f"{RESPONSES}/{second}/input_items", params={"order": "asc"})).json()
        assert [item["content"][0]["text"] for item in items["data"]] == ["How?", "Fine.", "Why?"]

    with_client(llm, work)


def test_deleted_and_unstored_responses_are_gone() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        kept = (await client.post(RESPONSES, json=HELLO)).json()["id"]
        unkept = (await client.post(RESPONSES, json=HELLO | {"store": False})).json()["id"]
        deleted = await client.delete(f"{RESPONSES}/{kept}")
        assert deleted.json() == {"id": kept, "object": "response", "deleted": True}
        for gone in (kept, unkept):
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                response = await client.request(method, f"{RESPONSES}/{gone}{path}")
                assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
            response = await client.post(RESPONSES, json=HELLO | {"previous_response_id": gone})
            assert (response.status_code, response.json()["error"]["code"]) == (400, "previous_response_not_found")

    with_client(FakeAsyncLLM(), work)


def test_a_stored_response_is_not_streamed_again() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        kept = (await client.post(RESPONSES, json=HELLO)).json()
        assert (await client.get(f"{RESPONSES}/{kept['id']}", params={"stream": "false"})).json() == kept
        response = await client.get(f"{RESPONSES}/{kept['id']}", params={"stream": "true"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")
        response = await client.post(f"{RESPONSES}/{kept['id']}/cancel")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "id")

    with_client(FakeAsyncLLM(), work)


def test_pages_of_input_items() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        roles = ("user", "assistant")
        items = [{"role": roles[n % 2], "content": str(n), "id": f"msg_{n}"} for n in range(5)]
        kept = (await client.post(RESPONSES, json=HELLO | {"input": items})).json()["id"]

        async def page(**query: Any) -> httpx.Response:
            return await client.get(f"{RESPONSES}/{kept}/input_items", params=query)

        first = (await page(limit=2)).json()
        assert (first["object"], first["first_id"], first["last_id"]) == ("list", "msg_4", "msg_3")
        assert first["has_more"]
        assert first["data"][0]["content"] == [{"type": "input_text", "text": "4"}]
        rest = (await page(after="msg_3")).json()
        assert [item["id"] for item in rest["data"]] == ["msg_2", "msg_1", "msg_0"]
        assert not rest["has_more"]
        assert [item["id"] for item in (await page(order="asc", limit=2)).json()["data"]] == ["msg_0", "msg_1"]
        assert (await page(after="msg_0")).json()["first_id"] is None
        for bad in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "msg_9"}):
            response = await page(**bad)
            assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(bad)))

    with_client(FakeAsyncLLM(), work)


def stored(name: str, text: str = "", status: str = "completed") -> StoredResponse:
    return StoredResponse({"id": name, "status": status, "output": []}, [Item(type="message", content=text)])


def is_stored(store: ResponseStore, name: str) -> bool:
    try:
        store.get(name)
    except RequestError:
        return False
    return True


def test_the_store_forgets_what_was_used_least_recently() -> None:
    store = ResponseStore(max_responses=2)
    store.put(stored("a"))
    store.put(stored("b"))
    store.get("a")
    store.put(stored("c"))
    assert [is_stored(store, name) for name in "abc"] == [True, False, True]


def test_the_store_counts_bytes_and_keeps_what_runs() -> None:
    store = ResponseStore(max_bytes=1000)
    store.put(stored("running", "x" * 300, "in_progress"))
    store.put(stored("b", "x" * 300))
    store.put(stored("c", "x" * 300))
    assert [is_stored(store, name) for name in ("running", "b", "c")] == [True, False, True]
    store.delete("c")
    store.put(stored("d", "x" * 300))
    store.put(stored("d", "x" * 300))  # the same again counts once
    assert is_stored(store, "d")
    store.put(stored("huge", "x" * 2000))
    assert [is_stored(store, name) for name in ("d", "huge")] == [False, False]


# ---- in the background ----------------------------------------------------------------------------------------------


async def wait_for_end(client: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    while True:
        body = (await client.get(f"{RESPONSES}/{response_id}")).json()
        if body["status"] not in ("queued", "in_progress"):
            return body
        await asyncio.sleep(0.001)


def test_background_work_can_be_polled() -> None:
    llm = FakeAsyncLLM()

    async def work(client: httpx.AsyncClient) -> None:
        llm.hold = asyncio.Event()
        started = (await client.post(RESPONSES, json=HELLO | {"background": True})).json()
        assert (started["status"], started["background"], set(started) >= REQUIRED) == ("queued", True, True)
        while not (body := (await client.get(f"{RESPONSES}/{started['id']}")).json())["output"]:
            await asyncio.sleep(0.001)
        assert (body["status"], body["output"][0]["content"][0]["text"]) == ("in_progress", "T")
        response = await client.post(RESPONSES, json=HELLO | {"previous_response_id": started["id"]})
        assert response.json()["error"]["param"] == "previous_response_id"
        llm.hold.set()
        done = await wait_for_end(client, started["id"])
        assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", REPLY)
        assert done["usage"]["output_tokens"] == len(REPLY.encode()) + 1
        assert (await client.post(f"{RESPONSES}/{started['id']}/cancel")).json() == done  # too late

    with_client(llm, work)
    assert llm.in_flight == set()


@pytest.mark.parametrize("at_once", [True, False])
def test_background_work_can_be_cancelled(at_once: bool) -> None:
    llm = FakeAsyncLLM()

    async def work(client: httpx.AsyncClient) -> None:
        llm.hold = asyncio.Event()
        started = (await client.post(RESPONSES, json=HELLO | {"background": True})).json()
        while not at_once and not (await client.get(f"{RESPONSES}/{started['id']}")).json()["output"]:
            await asyncio.sleep(0.001)
        body = (await client.post(f"{RESPONSES}/{started['id']}/cancel")).json()
        assert body["status"] == "cancelled"
        assert all(item["status"] == "incomplete" for item in body["output"])
        assert (await client.get(f"{RESPONSES}/{started['id']}")).json() == body
        assert llm.aborted == [started["id"]]
        assert (await client.post(f"{RESPONSES}/{started['id']}/cancel")).json() == body

    with_client(llm, work)


def test_deleting_background_work_ends_it() -> None:
    llm = FakeAsyncLLM()

    async def work(client: httpx.AsyncClient) -> None:
        llm.hold = asyncio.Event()
        started = (await client.post(RESPONSES, json=HELLO | {"background": True})).json()
        assert (await client.delete(f"{RESPONSES}/{started['id']}")).json()["deleted"]
        assert (await client.get(f"{RESPONSES}/{started['id']}")).status_code == 404

    with_client(llm, work)
    assert llm.in_flight == set()


def test_background_work_that_fails() -> None:
    llm = FakeAsyncLLM()
    llm.fail_after, llm.failure = 3, EngineDeadError("the engine failed")

    async def work(client: httpx.AsyncClient) -> None:
        started = (await client.post(RESPONSES, json=HELLO | {"background": True})).json()
        body = await wait_for_end(client, started["id"])
        assert (body["status"], body["error"]["message"]) == ("failed", "the engine failed")

    with_client(llm, work)
