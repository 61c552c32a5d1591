"""Several conversations in one request."""

from __future__ import annotations

from typing import Any

import pytest

from kitfox.errors import EngineDeadError, QueueFullError
from tests.server.fake_llm import MODEL, REPLY, FakeAsyncLLM
from tests.server.fault_table import CHAT
from tests.server.http_client import send

BATCH = f"{CHAT}/batch"
HI = [{"role": "user", "content": "Hi"}]
HO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ho, ho!"}]


def answer(llm: FakeAsyncLLM, **fields: Any) -> dict[str, Any]:
    response = send(llm, "POST", BATCH, {"model": MODEL, "messages": [HI, HO]} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_choices_are_those_of_single_chats_in_their_order() -> None:
    llm = FakeAsyncLLM()
    llm.num_cached_tokens = 2
    fields = {"n": 2, "max_tokens": 5, "logprobs": True}
    singles = [send(llm, "POST", CHAT, {"messages": messages} | fields).json() for messages in (HI, HO)]
    body = answer(llm, **fields)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    expected = [choice for single in singles for choice in single["choices"]]
    for choice, wanted in zip(body["choices"], expected, strict=True):
        assert choice | {"index": 0} == wanted | {"index": 0}
    assert [bytes(prompt) for _, prompt, _ in llm.seen[:2]] == [bytes(prompt) for _, prompt, _ in llm.seen[2:]]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert body["usage"][name] == sum(single["usage"][name] for single in singles)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    assert body["timings"]["ttft_s"] == 0.3
    assert not llm.in_flight


def test_each_choice_has_its_prompt() -> None:
    llm = FakeAsyncLLM()
    body = answer(llm, return_prompt_token_ids=True, request_id="mine")
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [prompt for _, prompt, _ in llm.seen]
    assert body["id"] == "chatcmpl-mine"
    assert "prompt_token_ids" not in body
    assert len({request_id for request_id, _, _ in llm.seen}) == 2


def test_what_nobody_reads_is_listed() -> None:
    body = answer(FakeAsyncLLM(), messages=[HI, [HO[1] | {"mood": "good"}]], colour=1)
    assert body["ignored_parameters"] == ["messages[][].mood", "colour"]
    assert [choice["message"]["content"] for choice in body["choices"]] == [REPLY, REPLY]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HI}, "messages"),
        ({"messages": [HI] * 2049}, "messages"),
        ({"messages": [HI] * 20, "n": 128}, "n"),
        ({"messages": [HI, []]}, "messages"),
        ({"stream": True}, "stream"),
        ({"temperature": -1}, "temperature"),
        ({"lora_path": "x"}, "lora_path"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    llm = FakeAsyncLLM()
    response = send(llm, "POST", BATCH, {"model": MODEL, "messages": [HI, HO]} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not llm.in_flight


def test_one_that_is_refused_ends_all() -> None:
    llm = FakeAsyncLLM()
    add_request = llm.add_request

    async def full_at_the_second(*args: Any, **kwargs: Any) -> Any:
        if llm.seen:
            raise QueueFullError("full")
        return await add_request(*args, **kwargs)

    llm.add_request = full_at_the_second  # type: ignore[method-assign]
    assert send(llm, "POST", BATCH, {"model": MODEL, "messages": [HI, HO]}).status_code == 429
    assert not llm.in_flight


def test_an_engine_that_fails() -> None:
    llm = FakeAsyncLLM()
    llm.fail_after, llm.failure = 3, EngineDeadError("the engine failed")
    response = send(llm, "POST", BATCH, {"model": MODEL, "messages": [HI, HO]})
    assert (response.status_code, response.json()["error"]["message"]) == (503, "the engine failed")
    assert not llm.in_flight
