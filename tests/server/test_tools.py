"""Tool calls and reasoning over HTTP: streams joined are wholes, and finish_reason is the same in both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kitfox.server.options import ServerOptions
from tests.server.fake_llm import FakeAsyncLLM
from tests.server.fault_table import CHAT, stream_chunks
from tests.server.http_client import send, send_all

USER = [{"role": "user", "content": "Weather?"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TIME = {"type": "function", "function": {"name": "time"}}
HERMES = "tools tool_calls <tool_call>"
THINKING = HERMES + " <think></think> enable_thinking"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo {1}"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}
TWO_CALLS = f'On it.\n{CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'


def call_of(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


def speaking(template: str, reply: str, tokens_per_delta: int = 1) -> FakeAsyncLLM:
    llm = FakeAsyncLLM(reply=reply, tokens_per_delta=tokens_per_delta, max_model_len=2048)
    llm.tokenizer.chat_template = template
    return llm


def ask(llm: FakeAsyncLLM, **fields: Any) -> dict[str, Any]:
    response = send(llm, "POST", CHAT, {"messages": USER, "tools": [WEATHER, TIME], "max_tokens": 200} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def ask_streamed(llm: FakeAsyncLLM, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": USER, "tools": [WEATHER, TIME], "max_tokens": 200, "stream": True} | fields
    return stream_chunks(send(llm, "POST", CHAT, body).text)


def joined(chunks: list[dict[str, Any]], index: int = 0) -> tuple[dict[str, Any], str | None]:
    """The message of a stream, as a client puts it together, and its finish_reason."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    finishes = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        for name in ("role", "content", "reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                assert set(call) == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        finishes += [choice["finish_reason"]] if choice["finish_reason"] is not None else []
    assert len(finishes) == 1
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return message, finishes[0]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{name: value for name, value in call.items() if name != "id"} for call in message.get("tool_calls", [])]
    kept = {name: value for name, value in message.items() if name not in ("refusal", "annotations", "tool_calls")}
    return kept | {"tool_calls": calls}


def test_tool_calls() -> None:
    llm = speaking(HERMES, TWO_CALLS)
    choice = ask(llm)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "On it."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "time"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo {1}"}
    assert message["tool_calls"][1]["function"]["arguments"] == "{}"
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message["tool_calls"])
    assert bytes(llm.seen[0][1]) == b"[tool weather]\n[tool time]\n[user]Weather?\n[assistant]"


@pytest.mark.parametrize("tokens_per_delta", [1, 7, 500])
@pytest.mark.parametrize(
    ("template", "reply", "fields", "finish_reason"),
    [
        (HERMES, TWO_CALLS, {}, "tool_calls"),
        (HERMES, CALL, {}, "tool_calls"),
        (HERMES, TWO_CALLS, {"n": 2}, "tool_calls"),
        (HERMES, TWO_CALLS, {"max_tokens": 60}, "length"),
        (HERMES, TWO_CALLS, {"max_tokens": 100}, "length"),
        (HERMES, TWO_CALLS, {"parallel_tool_calls": False}, "tool_calls"),
        (HERMES, TWO_CALLS, {"tool_choice": "none"}, "stop"),
        (HERMES, "No need.", {}, "stop"),
        (HERMES, "<tool_call> no", {}, "stop"),
        (HERMES, CALL[:60], {}, "stop"),
        (HERMES, "I cannot.", {"tool_choice": "required"}, "stop"),
        (HERMES, TWO_CALLS, {"tool_choice": "required"}, "tool_calls"),
        ("", '{"name": "time", "arguments": {}}', {}, "tool_calls"),
        ("", '{"hour": 5}', {}, "stop"),
        (HERMES, CALL, {"tool_choice": NAMED}, "tool_calls"),
        (HERMES, CALL, {"tool_choice": NAMED, "max_tokens": 50}, "length"),
        (THINKING, f"<think>\nHm.\n</think>\n\n{CALL}", {"tool_choice": NAMED}, "tool_calls"),
        (HERMES, call_of("{}"), {}, "tool_calls"),
        (HERMES, call_of('{"city": "mkdir -p test/{test1,test2"}'), {}, "tool_calls"),
        (HERMES, call_of(r'{"city": "{\"a\": [\"}\"]"}'), {}, "tool_calls"),
        (HERMES, call_of('{"city": "1+1"}'), {}, "tool_calls"),
        (HERMES, call_of("1+1"), {}, "stop"),
        (THINKING, f"<think>\nHm.\n</think>\n\nSo.\n{CALL}", {}, "tool_calls"),
        (THINKING, "<think>\nHm.\n</think>\n\nSo.", {}, "stop"),
        (THINKING, "<think>\nHm, and on", {"max_tokens": 15}, "length"),
    ],
)
def test_stream_joined_is_the_whole(
    template: str, reply: str, fields: dict[str, Any], finish_reason: str, tokens_per_delta: int
) -> None:
    llm = speaking(template, reply, tokens_per_delta)
    whole = ask(llm, **fields)
    chunks = ask_streamed(llm, **fields)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    for choice in whole["choices"]:
        message, streamed_finish = joined(chunks, choice["index"])
        assert without_ids(message) == without_ids(choice["message"])
        assert streamed_finish == choice["finish_reason"]
        if finish_reason == "tool_calls":
            calls = choice["message"]["tool_calls"]
            assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
    assert whole["choices"][0]["finish_reason"] == finish_reason
    assert not llm.in_flight


def test_arguments_stream_while_they_come() -> None:
    chunks = ask_streamed(speaking(HERMES, CALL))
    deltas = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", [])]
    assert len(deltas) > 10
    assert deltas[0]["function"]["name"] == "weather"
    assert all("id" not in delta for delta in deltas[1:])
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_one_call_at_a_time_ends_the_answer_in_the_engine() -> None:
    llm = speaking(HERMES, CALL * 5)
    body = ask(llm, parallel_tool_calls=False)
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert len(llm.aborted) == 1
    assert body["usage"]["completion_tokens"] < len(CALL) + 2


def test_tools_that_are_not_to_be_used_are_not_shown() -> None:
    llm = speaking(HERMES, CALL)
    choice = ask(llm, tool_choice="none")["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert b"[tool" not in bytes(llm.seen[0][1])


def test_a_template_without_tools_gets_them_as_text() -> None:
    llm = speaking("", '{"name": "time", "arguments": {}}')
    call = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        {"role": "user", "content": "And now?"},
    ]
    assert ask(llm, messages=messages, tools=[TIME])["choices"][0]["finish_reason"] == "tool_calls"
    prompt = bytes(llm.seen[0][1]).decode()
    assert prompt.startswith("[user]You can call functions.")
    assert '{"name": "time", "description": "", "parameters": {"type": "object", "properties": {}}}' in prompt
    loop = '[assistant]{"name": "time", "arguments": {}}\n[user]Result of time:\n12:00\nAnd now?\n[assistant]'
    assert prompt.endswith(f"Time?\n{loop}")


def test_parsers_can_be_named_or_left_out() -> None:
    body = {"messages": USER, "tools": [WEATHER], "max_tokens": 200}
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {}}]'
    for parser, finish_reason in (("mistral", "tool_calls"), ("hermes", "stop"), ("none", "stop")):
        options = ServerOptions(tool_call_parser=parser)
        choice = send_all(speaking(HERMES, text), [("POST", CHAT, body)], options)[0].json()["choices"][0]
        assert choice["finish_reason"] == finish_reason
        assert choice["message"]["content"] == (None if finish_reason == "tool_calls" else text)
    options = ServerOptions(tool_call_parser="none")
    response = send_all(speaking(HERMES, ""), [("POST", CHAT, body | {"tool_choice": "required"})], options)[0]
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


def test_marks_that_are_special_tokens_stay_in_the_text() -> None:
    llm = speaking("tools </s> tool_calls [TOOL_CALLS]", "x")
    llm.tokenizer.specials = {256: "<s>", 257: "</s>", 258: "[TOOL_CALLS]"}
    ask(llm)
    ask(llm, tools=[])
    assert [seen[2].kept_special_ids for seen in llm.seen] == [(258,), ()]


# ---- reasoning ------------------------------------------------------------------------------------------------------

THOUGHT = "<think>\nHm.\n</think>\n\nYes."


def test_reasoning_has_fields_of_its_own() -> None:
    body = ask(speaking(THINKING, THOUGHT), tools=[])
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("Yes.", "Hm.", "Hm.")
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == THOUGHT.index("\n\nYes") - len("<think")
    chunks = ask_streamed(speaking(THINKING, THOUGHT), tools=[], stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == body["usage"]


def test_reasoning_that_the_prompt_opens() -> None:
    llm = speaking(THINKING, "Hm.</think>Yes.")
    messages = [*USER, {"role": "assistant", "content": "<think>"}]
    message = ask(llm, messages=messages, continue_final_message=True)["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Yes.", "Hm.")


def test_reasoning_on_request() -> None:
    message = ask(speaking(THINKING, THOUGHT), separate_reasoning=False)["choices"][0]["message"]
    assert message["content"] == THOUGHT
    assert "reasoning" not in message
    message = ask(speaking(THINKING, THOUGHT), include_reasoning=False)["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert "reasoning" not in message
    plain = ask(speaking("no marks", THOUGHT), tools=[])
    assert plain["choices"][0]["message"]["content"] == THOUGHT
    assert "completion_tokens_details" not in plain["usage"]


def test_effort_goes_to_the_template_or_is_named_as_ignored() -> None:
    assert "ignored_parameters" not in ask(speaking(THINKING, "x"), reasoning_effort="none")
    assert ask(speaking(HERMES, "x"), reasoning_effort="low")["ignored_parameters"] == ["reasoning_effort"]
    body = {"messages": USER, "tools": [{"type": "function", "function": {"name": "time", "strict": True}}]}
    answer = send_all(speaking(HERMES, "x"), [("POST", CHAT, body)], ServerOptions(tool_call_parser="none"))[0].json()
    assert answer["ignored_parameters"] == ["tools[].function.strict"]
    body = {"messages": USER, "reasoning_effort": "low"}
    refusal = send_all(speaking(HERMES, "x"), [("POST", CHAT, body)], ServerOptions(strict=True))[0]
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "reasoning_effort")


# ---- parsing by itself ----------------------------------------------------------------------------------------------


def test_parse_function_call() -> None:
    llm = speaking(HERMES, "")
    body = {"text": TWO_CALLS, "tools": [WEATHER, TIME]}
    calls = [
        {"tool_index": 0, "name": "weather", "parameters": '{"city": "Oslo {1}"}'},
        {"tool_index": 1, "name": "time", "parameters": "{}"},
    ]
    for named in ({}, {"tool_call_parser": "qwen25"}):
        answer = send(llm, "POST", "/parse_function_call", body | named).json()
        assert answer == {"normal_text": "On it.", "calls": calls}
    answer = send(llm, "POST", "/parse_function_call", body | {"tool_call_parser": "wizard"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_call_parser")


def test_separate_reasoning() -> None:
    llm = speaking(THINKING, "")
    for text in (THOUGHT, "Hm.\n</think>\n\nYes."):
        answer = send(llm, "POST", "/separate_reasoning", {"text": text, "reasoning_parser": "deepseek-r1"}).json()
        assert answer == {"reasoning_text": "Hm.", "text": "Yes."}
    assert send(llm, "POST", "/separate_reasoning", {"text": "Yes."}).json() == {"reasoning_text": "", "text": "Yes."}
    answer = send(speaking(HERMES, ""), "POST", "/separate_reasoning", {"text": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_parser")
