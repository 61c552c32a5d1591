"""Flush, abort, pause, sleep, profile and load over HTTP, under both engines' names."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kitfox.outputs import EngineStats
from kitfox.server.app import make_app
from kitfox.server.control import ADMIN_PATHS
from kitfox.server.options import ServerOptions
from tests.server.fake_llm import MODEL, FakeAsyncLLM
from tests.server.fault_table import COMPLETIONS
from tests.server.http_client import send, send_all
from tests.server.test_app import until


def client_of(llm: FakeAsyncLLM, options: ServerOptions | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=make_app(llm, options)), base_url="http://test")  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_flush(path: str, method: str) -> None:
    llm = FakeAsyncLLM()
    response = send(llm, method, path)
    assert (response.status_code, response.json()["success"], llm.controls) == (200, True, ["flush_cache"])


def test_a_flush_that_could_not_drop_everything_says_so() -> None:
    llm = FakeAsyncLLM()
    llm.in_flight.add("running")
    llm.stats = EngineStats(num_cached_blocks=3)
    response = send(llm, "POST", "/flush_cache?timeout=0.03")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "engine_busy")
    assert "3 blocks stay" in response.json()["error"]["message"]
    for bad in ("-1", "601", "true", "soon"):
        assert send(llm, "POST", f"/flush_cache?timeout={bad}").json()["error"]["param"] == "timeout"


def test_a_flush_waits_for_requests_to_end() -> None:
    async def run() -> None:
        llm = FakeAsyncLLM()
        llm.in_flight.add("running")
        async with client_of(llm) as client:
            flush = asyncio.ensure_future(client.post("/flush_cache", params={"timeout": 20}))
            await asyncio.sleep(0.05)
            assert not flush.done()
            llm.in_flight.clear()
            assert (await flush).status_code == 200

    asyncio.run(run())


def open_requests(llm: FakeAsyncLLM, client: httpx.AsyncClient, bodies: list[tuple[str, Any]]) -> list[Any]:
    llm.hold = asyncio.Event()
    return [asyncio.ensure_future(client.post(path, json=body)) for path, body in bodies]


@pytest.mark.parametrize(
    ("path", "body", "num_ended"),
    [
        ("/abort_request", {"rid": "mine"}, 1),
        ("/abort_request", {"rid": ["many_1", "mine"]}, 2),
        ("/abort_request", {"rid": "many"}, 2),
        ("/abort_requests", {"request_ids": ["cmpl-theirs"]}, 1),
        ("/abort_requests", {"rid": "min"}, 0),
        ("/abort_request", {"abort_all": True}, 4),
    ],
)
def test_aborted_requests_are_answered_with_what_they_have(path: str, body: dict[str, Any], num_ended: int) -> None:
    async def run() -> None:
        llm = FakeAsyncLLM()
        async with client_of(llm) as client:
            opened = open_requests(
                llm,
                client,
                [
                    ("/generate", {"text": "Hi", "rid": "mine"}),
                    ("/generate", {"text": ["Hi", "Ho"], "rid": "many"}),
                    (COMPLETIONS, {"model": MODEL, "prompt": "Hi", "request_id": "theirs", "max_tokens": 100}),
                ],
            )
            await until(lambda: len(llm.in_flight) == 4)
            aborted = (await client.post(path, json=body)).json()["aborted"]
            assert len(aborted) == num_ended
            assert llm.hold is not None
            llm.hold.set()
            mine, many, theirs = [(await answer).json() for answer in opened]
            reasons = {
                answer["meta_info"]["id"]: answer["meta_info"]["finish_reason"]["type"] for answer in [mine, *many]
            }
            reasons["cmpl-theirs"] = theirs["choices"][0]["finish_reason"]
            assert {name for name, reason in reasons.items() if reason == "abort"} == set(aborted)
            if "mine" in aborted:
                assert mine["text"] == "T"  # what came before

    asyncio.run(run())


def test_an_aborted_vector_is_an_error() -> None:
    async def run() -> None:
        llm = FakeAsyncLLM()
        async with client_of(llm) as client:
            [opened] = open_requests(llm, client, [("/v1/embeddings", {"model": MODEL, "input": "Hi"})])
            await until(lambda: bool(llm.in_flight))
            assert len((await client.post("/abort_request", json={"abort_all": True})).json()["aborted"]) == 1
            assert llm.hold is not None
            llm.hold.set()
            response = await opened
            assert (response.status_code, response.json()["error"]["code"]) == (503, "aborted")

    asyncio.run(run())


def test_an_abort_must_say_whom() -> None:
    for body in ({}, {"rid": 3}, {"abort_all": "yes"}):
        assert send(FakeAsyncLLM(), "POST", "/abort_request", body).status_code == 400


@pytest.mark.parametrize(("stop", "go"), [("/pause", "/resume"), ("/pause_generation", "/continue_generation")])
def test_pause_and_go_on(stop: str, go: str) -> None:
    llm = FakeAsyncLLM()
    answers = send_all(
        llm,
        [("POST", stop, {"mode": "in_place"}), ("GET", "/is_paused", None), ("POST", go, {"torch_empty_cache": True})],
    )
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert answers[1].json() == {"is_paused": True}
    assert not llm.is_paused


def test_a_pause_ends_requests_unless_they_are_kept() -> None:
    llm = FakeAsyncLLM()
    llm.in_flight.add("running")
    send(llm, "POST", "/pause?mode=keep")
    assert llm.cut == set()
    send(llm, "POST", "/pause")
    assert llm.cut == {"running"}
    assert send(llm, "POST", "/pause?mode=retract").json()["error"]["param"] == "mode"
    response = send(llm, "POST", "/pause?mode=keep&clear_cache=true")
    assert (response.status_code, llm.controls) == (400, ["flush_cache"])


@pytest.mark.parametrize(
    ("sleep", "wake"),
    [
        ("/sleep?level=1", "/wake_up"),
        ("/release_kv_cache_memory", "/wake_up"),
        ("/release_memory_occupation", "/resume_memory_occupation?tags=kv_cache"),
    ],
)
def test_sleep_and_wake(sleep: str, wake: str) -> None:
    llm = FakeAsyncLLM()
    assert send(llm, "POST", sleep).json() == {"is_sleeping": True, "released": ["kv_cache"]}
    assert send(llm, "GET", "/is_sleeping").json() == {"is_sleeping": True}
    assert send(llm, "POST", wake).json() == {"is_sleeping": False}
    assert not llm.is_sleeping


def test_sleep_refuses_what_it_cannot_do() -> None:
    llm = FakeAsyncLLM()
    assert send(llm, "POST", "/sleep?level=2").json()["error"]["param"] == "level"
    response = send(llm, "POST", "/release_memory_occupation", {"tags": ["weights", "kv_cache"]})
    assert response.json()["error"]["param"] == "tags"
    llm.in_flight.add("running")
    assert send(llm, "POST", "/sleep").json()["error"]["code"] == "engine_busy"
    assert not llm.is_sleeping
    assert send(llm, "POST", "/sleep?mode=abort").status_code == 200


@pytest.mark.parametrize(("state", "health"), [("paused", 200), ("asleep", 200)])
def test_a_server_that_rests_is_kept_but_not_ready(state: str, health: int) -> None:
    llm = FakeAsyncLLM()
    llm.health = state
    assert send(llm, "GET", "/health").status_code == health
    assert send(llm, "GET", "/ready").status_code == 503


def test_a_profile_is_a_file_that_viewers_read(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_of(FakeAsyncLLM(), ServerOptions(profile_dir=str(tmp_path))) as client:
            assert (await client.post("/stop_profile")).status_code == 400
            started = await client.post("/start_profile", json={"output_dir": "mine", "activities": ["CPU"]})
            assert started.json() == {"is_profiling": True, "ignored_parameters": ["activities"]}
            assert (await client.get("/start_profile")).status_code == 400
            await client.post(COMPLETIONS, json={"model": MODEL, "prompt": "Hi"})
            stopped = (await client.get("/stop_profile")).json()
            assert (stopped["is_profiling"], stopped["num_events"]) == (False, 2)
            path = Path(stopped["path"])
            assert path.parent == tmp_path / "mine"
            events = json.loads(path.read_text())["traceEvents"]
            assert {"received", "answered"} <= {event["name"] for event in events}

    asyncio.run(run())


@pytest.mark.parametrize("folder", ["..", "/etc", "a/../../b"])
def test_a_profile_stays_in_its_folder(folder: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with client_of(FakeAsyncLLM(), ServerOptions(profile_dir=str(tmp_path / "p"))) as client:
            refused = await client.post("/start_profile", json={"output_dir": folder})
            assert refused.json()["error"]["param"] == "output_dir"

    asyncio.run(run())


def test_profiles_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    llm = FakeAsyncLLM()
    refused = send(llm, "POST", "/start_profile", {"output_dir": "x"})
    assert refused.json()["error"]["param"] == "output_dir"
    assert send(llm, "POST", "/start_profile", {"num_steps": 3}).json()["error"]["param"] == "num_steps"
    _, stopped = send_all(llm, [("POST", "/start_profile", None), ("POST", "/stop_profile", None)])
    assert Path(stopped.json()["path"]).is_relative_to(tmp_path)


def test_loads() -> None:
    llm = FakeAsyncLLM()
    llm.in_flight |= {"a", "b"}
    llm.stats = EngineStats(
        num_running=2, num_waiting=1, num_blocks=10, num_free_blocks=7, num_cached_blocks=4, block_size=32,
        prefix_queries=200, prefix_hits=50,
    )  # fmt: skip
    assert send(llm, "GET", "/load").json() == {"server_load": 2}
    [load] = send(llm, "GET", "/v1/loads").json()["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) == (2, 1, 96)
    assert (load["token_usage"], load["cache_hit_rate"], load["max_total_num_tokens"]) == (0.3, 0.25, 320)
    assert load["memory"] == {"token_capacity": 320, "cached_tokens": 128}
    [load] = send(llm, "GET", "/v1/loads?include=core").json()["loads"]
    assert "memory" not in load
    text = send(llm, "GET", "/v1/loads?format=prometheus&include=core,queues").text
    assert "sglang_num_running_reqs 2\n" in text
    assert "sglang_queues_waiting 1\n" in text
    for bad in ("include=everything", "format=xml", "dp_rank=1"):
        assert send(llm, "GET", f"/v1/loads?{bad}").json()["error"]["param"] == bad.partition("=")[0]


def test_every_path_that_concerns_everybody_is_the_admins() -> None:
    routes = {getattr(route, "path", "") for route in make_app(FakeAsyncLLM()).routes}  # type: ignore[arg-type]
    assert routes >= ADMIN_PATHS
    for path in sorted(ADMIN_PATHS):
        app = make_app(FakeAsyncLLM(), ServerOptions(admin_api_key="boss"))  # type: ignore[arg-type]

        async def post(app: Any = app, path: str = path) -> int:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
                return (await client.post(path)).status_code

        assert asyncio.run(post()) in (401, 403), path


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"mode": NaN}'])
def test_bad_bodies(body: bytes) -> None:
    async def run() -> int:
        async with client_of(FakeAsyncLLM()) as client:
            return (await client.post("/pause", content=body)).status_code

    assert asyncio.run(run()) == 400
