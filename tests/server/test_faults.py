"""Every input of the fault table, each followed by a request that must still be answered as before."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from kitfox.server.app import make_app
from kitfox.server.openapi import OPERATIONS
from tests.server.fake_llm import MODEL, REPLY, VOCAB_SIZE, FakeAsyncLLM
from tests.server.fault_table import CHAT, COMPLETIONS, FAULTS, check_fault
from tests.server.http_client import send

JSON_ROUTES = sorted({(row.methods[0], path) for row in OPERATIONS if row.bodies for path in row.paths})
USER = [{"role": "user", "content": "Hi"}]


def test_faults_are_answered_and_hurt_nobody() -> None:
    llm = FakeAsyncLLM()
    failures: list[str] = []

    async def run() -> None:
        transport = httpx.ASGITransport(app=make_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for fault in FAULTS:
                headers = {"content-type": "application/json"}
                response = await client.post(fault.path, content=fault.content(MODEL), headers=headers)
                try:
                    check_fault(fault, response.status_code, response.text)
                except AssertionError as error:
                    failures.append(f"{fault.row} {fault.name}: {str(error)[:300]}")
                good = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": "Hello", "max_tokens": 100})
                assert good.json()["choices"][0]["text"] == REPLY, fault.name

    asyncio.run(run())
    assert not failures, "\n".join(failures)
    assert not llm.in_flight


def test_the_table_is_unambiguous() -> None:
    assert len({fault.content(MODEL) for fault in FAULTS}) > 200
    assert {fault.path for fault in FAULTS} == {COMPLETIONS, CHAT, "/tokenize"}


@pytest.mark.parametrize(("method", "path"), JSON_ROUTES)
def test_no_route_takes_what_is_no_json_object(method: str, path: str) -> None:
    raws = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": NaN}', b'{"a": -Infinity}', rb'{"a": "\ud83d"}']
    raws += [b'{"a":' * depth + b"1" + b"}" * depth for depth in (100, 1000, 100_000)]
    raws += [b'{"a":' + b"[" * depth + b"]" * depth + b"}" for depth in (100, 1000, 100_000)]

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=make_app(FakeAsyncLLM()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"content-type": "application/json"}
            answers = [await client.request(method, path, content=raw, headers=headers) for raw in raws]
            good = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": "Hello", "max_tokens": 100})
            assert good.json()["choices"][0]["text"] == REPLY
            return answers

    for raw, response in zip(raws, asyncio.run(run()), strict=True):
        assert response.status_code == 400, raw[:40]
        assert "JSON" in response.text or "deeper" in response.text, raw[:40]
        error = json.loads(response.text)["error"]
        assert len(error["message"]) < 2000


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (COMPLETIONS, {}, "prompt"),
        ("/generate", {}, "input_ids"),
        ("/v1/embeddings", {"model": MODEL}, "input"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_token_ids_end_with_the_vocabulary(path: str, body: dict[str, object], name: str) -> None:
    for token_id, status in ((-1, 400), (0, 200), (VOCAB_SIZE - 1, 200), (VOCAB_SIZE, 400), (2**31, 400), (2**63, 400)):
        response = send(FakeAsyncLLM(), "POST", path, body | {name: [token_id]})
        assert response.status_code == status, (token_id, response.text)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_named_tokens_end_with_the_vocabulary(path: str, name: str) -> None:
    start = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": USER}
    for token_id, status in ((VOCAB_SIZE - 1, 200), (VOCAB_SIZE, 400), (VOCAB_SIZE + 1, 400)):
        value = {str(token_id): 1} if name == "logit_bias" else [token_id]
        response = send(FakeAsyncLLM(), "POST", path, start | {name: value, "min_tokens": 1, "max_tokens": 4})
        assert response.status_code == status, response.text
        assert status == 200 or response.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER}),
        ("/v1/messages", {"model": MODEL, "messages": USER, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": USER}),
        ("/v1/responses", {"model": MODEL, "input": "Hi"}),
        ("/tokenize", {"messages": USER}),
    ],
)
def test_templates_are_the_servers(path: str, body: dict[str, object]) -> None:
    loops = "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}"
    for name in ("chat_template", "messages", "tokenize", "add_generation_prompt", "tools"):
        response = send(FakeAsyncLLM(), "POST", path, body | {"chat_template_kwargs": {name: loops}})
        assert response.status_code == 400
        assert "chat_template_kwargs" in response.json()["error"]["message"]
    response = send(FakeAsyncLLM(), "POST", path, body | {"chat_template": loops})
    assert response.status_code == 400
    assert "chat_template is not supported" in response.json()["error"]["message"]


def test_neighbours_change_nothing() -> None:
    """Every good row alone, and beside three others."""
    good = [fault for fault in FAULTS if fault.statuses == (200,) and fault.body is not None]
    assert len(good) > 60

    def shown(response: httpx.Response) -> str:
        changing = ("id", "created", "timings")
        if not response.headers["content-type"].startswith("text/event-stream"):
            return json.dumps({name: value for name, value in response.json().items() if name not in changing})
        events = [json.loads(event[6:]) for event in response.text.strip().split("\n\n")[:-1]]
        return json.dumps([{name: event[name] for name in event if name not in changing} for event in events])

    async def run() -> None:
        transport = httpx.ASGITransport(app=make_app(FakeAsyncLLM()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"content-type": "application/json"}
            alone = [await client.post(row.path, content=row.content(MODEL), headers=headers) for row in good]
            for start in range(0, len(good), 4):
                rows = good[start : start + 4]
                posts = [client.post(row.path, content=row.content(MODEL), headers=headers) for row in rows]
                for row, before, answer in zip(rows, alone[start:], await asyncio.gather(*posts), strict=False):
                    assert shown(answer) == shown(before), row.name

    asyncio.run(run())
