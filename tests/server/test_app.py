"""Endpoints beside generation, error bodies, disconnects, request ids, draining."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import uvicorn

from kitfox.server.app import _DrainingServer, make_app
from kitfox.server.options import ServerOptions
from tests.server.fake_llm import MAX_MODEL_LEN, MODEL, REPLY, FakeAsyncLLM
from tests.server.fault_table import CHAT, COMPLETIONS
from tests.server.http_client import send, send_all


def test_models() -> None:
    body = send(FakeAsyncLLM(), "GET", "/v1/models").json()
    assert [card["id"] for card in body["data"]] == [MODEL, "alias"]
    assert body["data"][0]["max_model_len"] == MAX_MODEL_LEN
    assert send(FakeAsyncLLM(), "GET", "/v1/models/alias").json()["id"] == "alias"
    missing = send(FakeAsyncLLM(), "GET", "/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_tokenize_and_detokenize() -> None:
    llm = FakeAsyncLLM()
    body = send(llm, "POST", "/tokenize", {"prompt": "Hé", "return_token_strs": True}).json()
    assert body["tokens"] == [72, 195, 169]
    assert (body["count"], body["max_model_len"], body["token_strs"][0]) == (3, MAX_MODEL_LEN, "H")
    body = send(llm, "POST", "/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert bytes(body["tokens"]) == b"[user]Hi\n[assistant]"
    assert send(llm, "POST", "/detokenize", {"tokens": [72, 195, 169, 257]}).json() == {"prompt": "Hé</s>"}
    for bad in ({"tokens": [260]}, {"tokens": [-1]}, {"tokens": ["a"]}, {}):
        assert send(llm, "POST", "/detokenize", bad).json()["error"]["param"] == "tokens"
    assert send(llm, "POST", "/tokenize", {}).status_code == 400


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [("ok", 200, 200), ("starting", 503, 503), ("stalled", 503, 503), ("dead", 503, 503), ("draining", 200, 503)],
)
def test_health_and_ready(state: str, health: int, ready: int) -> None:
    llm = FakeAsyncLLM()
    llm.health, llm.health_detail = state, "because"
    answer = send(llm, "GET", "/health")
    assert answer.status_code == health
    assert answer.json()["status"] == state
    assert answer.json()["detail"] == "because"
    assert send(llm, "GET", "/ready").status_code == ready


def test_version() -> None:
    assert send(FakeAsyncLLM(), "GET", "/version").json()["version"]


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info(path: str) -> None:
    llm = FakeAsyncLLM()
    llm.config = llm.config.replace(cache={"organisation": "radix"}, scheduler={"max_num_batched_tokens": 64})
    body = send(llm, "GET", path).json()
    assert (body["engine"], body["model_path"], body["tokenizer_path"]) == ("kitfox", *["/models/fox.gguf"] * 2)
    assert body["served_model_names"] == [MODEL, "alias"]
    assert (body["dtype"], body["kv_cache_dtype"], body["quantization"]) == ("float32", "float32", "none")
    assert (body["kernels"], body["device"], body["num_threads"]) == ("fake kernels", "cpu", 2)
    assert (body["cache"], body["block_size"], body["num_blocks"]) == ("radix", 32, 10)
    assert (body["max_model_len"], body["max_num_batched_tokens"]) == (MAX_MODEL_LEN, 64)
    assert body["config"]["model"]["model"] == "fox"
    assert body["config"]["cache"]["dtype"] == "auto"


def test_server_info_names_the_quantisation_that_is_kept() -> None:
    llm = FakeAsyncLLM()
    llm.config = llm.config.replace(model={"quantization": "int8"})
    assert send(llm, "GET", "/server_info").json()["quantization"] == "int8"


def test_server_info_of_a_dead_engine() -> None:
    llm = FakeAsyncLLM()
    llm.health, llm.health_detail = "dead", "no memory"
    response = send(llm, "GET", "/server_info")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")


def test_trace_by_the_answer_s_id() -> None:
    llm = FakeAsyncLLM()
    answer_id = send(llm, "POST", COMPLETIONS, {"prompt": "Hi"}).json()["id"]
    body = send(llm, "GET", f"/v1/trace/{answer_id}").json()
    assert [event["name"] for event in body["events"]] == ["received", "answered"]
    assert body["events"][0]["time_s"] == 0
    assert body["events"][0]["data"] == {"prompt": 2}
    answer_id = send(llm, "POST", COMPLETIONS, {"prompt": ["Hi", "Ho"]}).json()["id"]
    assert len(send(llm, "GET", f"/v1/trace/{answer_id}").json()["events"]) == 4
    assert send(llm, "GET", "/v1/trace/nothing").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", COMPLETIONS, 405), ("POST", "/v1/models", 405), ("GET", "/v1/models/", 404)],
)
def test_wrong_paths_get_openai_errors(method: str, path: str, status: int) -> None:
    response = send(FakeAsyncLLM(), method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_large_body_and_wrong_content_type() -> None:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=make_app(FakeAsyncLLM(), ServerOptions(max_body_bytes=100)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def chunks() -> Any:
                for _ in range(3):
                    yield b" " * 50

            fits = json.dumps({"model": MODEL, "prompt": "Hi"}).encode()
            large = json.dumps({"prompt": "x" * 100}).encode()
            return [
                await client.post(COMPLETIONS, content=fits),
                await client.post(COMPLETIONS, content=large),
                await client.post(COMPLETIONS, content=chunks()),
                await client.post(COMPLETIONS, content=fits, headers={"content-type": "text/plain"}),
            ]

    fits, announced, chunked, text = asyncio.run(run())
    assert fits.status_code == 200
    assert (announced.status_code, chunked.status_code) == (413, 413)
    assert announced.json()["error"]["code"] == "request_too_large"
    assert text.status_code == 400


def test_a_fault_of_ours_is_a_clean_500() -> None:
    llm = FakeAsyncLLM()
    llm.tokenizer.encode = None  # type: ignore[method-assign, assignment]
    response = send(llm, "POST", COMPLETIONS, {"prompt": "Hi"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "internal_error"
    assert "NoneType" not in response.text


# ---- request ids -----------------------------------------------------------------------------------------------------


def test_request_id_is_echoed_and_part_of_the_answer_s() -> None:
    response = send(FakeAsyncLLM(), "POST", COMPLETIONS, {"prompt": "Hi"}, headers={"x-request-id": "abc/1"})
    assert response.headers["x-request-id"] == "abc/1"
    assert response.json()["id"] == "cmpl-abc_1"
    assert send(FakeAsyncLLM(), "GET", "/version").headers["x-request-id"]
    response = send(FakeAsyncLLM(), "POST", COMPLETIONS, {"prompt": "Hi", "request_id": "mine"})
    assert response.json()["id"] == "cmpl-mine"


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (COMPLETIONS, {"prompt": "Hi"}, "request_id"),
        (COMPLETIONS, {"prompt": "Hi"}, "rid"),
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}, "request_id"),
        ("/generate", {"text": "Hi"}, "rid"),
        ("/v1/embeddings", {"input": "Hi"}, "request_id"),
    ],
)
def test_the_same_name_twice_at_once(path: str, body: dict[str, Any], name: str) -> None:
    """Each is answered or refused, and the name is free again afterwards."""
    llm = FakeAsyncLLM()

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=make_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            named = {"model": MODEL, name: "same"} | body
            posts = [client.post(path, json=named) for _ in range(3)]
            return [*await asyncio.gather(*posts), await client.post(path, json=named)]

    responses = asyncio.run(run())
    assert {response.status_code for response in responses} <= {200, 400}
    assert [responses[0].status_code, responses[-1].status_code] == [200, 200]
    for response in responses:
        if response.status_code == 400:
            assert response.json()["error"]["param"] in (name, "request_id")
    assert not llm.in_flight
    assert llm.aborted == []


def test_the_same_request_id_twice_at_once() -> None:
    llm = FakeAsyncLLM()

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=make_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"model": MODEL, "prompt": ["Hi", "Ho"], "max_tokens": 100}
            post = [client.post(COMPLETIONS, json=body, headers={"x-request-id": "same"}) for _ in range(3)]
            return list(await asyncio.gather(*post))

    responses = asyncio.run(run())
    assert len({response.json()["id"] for response in responses}) == 3
    assert all(choice["text"] == REPLY for response in responses for choice in response.json()["choices"])


# ---- disconnects -----------------------------------------------------------------------------------------------------


class RawClient:
    """An ASGI client that can leave."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]):
        self.sent: list[dict[str, Any]] = []
        self.leave = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": [(b"content-type", b"application/json")], "http_version": "1.1", "root_path": ""}
        self.task = asyncio.ensure_future(
            app(scope | {"scheme": "http", "server": ("t", 80)}, self._receive, self._send)
        )

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; far more turns of the loop than it needs, on any machine."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_client_that_leaves_aborts_its_requests(path: str, stream: bool, num_prompts: int) -> None:
    async def run() -> None:
        llm = FakeAsyncLLM()
        llm.hold = asyncio.Event()
        app = make_app(llm)
        prompts = {"prompt": ["Hi"] * num_prompts, "messages": [{"role": "user", "content": "Hi"}]}
        body = {"model": MODEL, "stream": stream} | {
            name: prompts[name] for name in ("prompt", "messages") if (path == CHAT) == (name == "messages")
        }
        client = RawClient(app, path, body)
        expected = 1 if path == CHAT else num_prompts
        await until(lambda: len(llm.in_flight) == expected and (not stream or len(client.sent) > expected))
        client.leave.set()
        await client.task
        assert len(llm.aborted) == expected
        assert not llm.in_flight
        assert not any(b"[DONE]" in message.get("body", b"") for message in client.sent)

    asyncio.run(run())


def test_a_client_that_stays_aborts_nothing() -> None:
    llm = FakeAsyncLLM()
    send_all(llm, [("POST", path, {"prompt": "Hi", "stream": s}) for path in (COMPLETIONS,) for s in (False, True)])
    assert llm.aborted == []


# ---- draining --------------------------------------------------------------------------------------------------------


class RunningServer:
    """A real server on a free port of the loopback, in this event loop."""

    def __init__(self, llm: FakeAsyncLLM, drain_s: float):
        config = uvicorn.Config(make_app(llm), port=0, log_level="warning", timeout_graceful_shutdown=5)
        self.server = _DrainingServer(config, llm, drain_s)

    async def __aenter__(self) -> RunningServer:
        self._task = asyncio.ensure_future(self.server._serve())
        await until(lambda: self.server.started)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        self.server.should_exit = True
        await self._task


def test_a_signal_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async def run() -> None:
        llm = FakeAsyncLLM()
        llm.hold = asyncio.Event()
        async with RunningServer(llm, drain_s=20) as running:
            body = {"model": MODEL, "prompt": "Hi", "max_tokens": 100}
            first = asyncio.ensure_future(running.client.post(COMPLETIONS, json=body))
            await until(lambda: bool(llm.in_flight))
            running.server.handle_exit(signal.SIGTERM, None)
            await until(lambda: llm.health == "draining")
            refused = await running.client.post(COMPLETIONS, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert (await running.client.get("/ready")).status_code == 503
            assert not running.server.should_exit
            llm.hold.set()
            assert (await first).json()["choices"][0]["text"] == REPLY
            await until(lambda: running.server.should_exit)

    asyncio.run(run())


def test_a_signal_while_paused_does_not_wait_for_what_cannot_finish() -> None:
    async def run() -> None:
        llm = FakeAsyncLLM()
        llm.hold = asyncio.Event()
        async with RunningServer(llm, drain_s=1000) as running:
            body = {"model": MODEL, "prompt": "Hi", "stream": True}
            kept = asyncio.ensure_future(running.client.post(COMPLETIONS, json=body))
            await until(lambda: bool(llm.in_flight))
            await llm.pause()
            running.server.handle_exit(signal.SIGTERM, None)
            await until(lambda: running.server.should_exit)
            assert '"code":"shutting_down"' in (await kept).text

    asyncio.run(run())


def test_a_second_signal_forces() -> None:
    async def run() -> None:
        llm = FakeAsyncLLM()
        llm.hold = asyncio.Event()
        async with RunningServer(llm, drain_s=1000) as running:
            body = {"model": MODEL, "prompt": "Hi", "stream": True}
            first = asyncio.ensure_future(running.client.post(COMPLETIONS, json=body))
            await until(lambda: bool(llm.in_flight))
            running.server.handle_exit(signal.SIGINT, None)
            await until(lambda: llm.health == "draining")
            running.server.handle_exit(signal.SIGINT, None)
            await until(lambda: running.server.should_exit)
            text = (await first).text
            assert '"code":"shutting_down"' in text
            assert text.endswith("data: [DONE]\n\n")

    asyncio.run(run())
