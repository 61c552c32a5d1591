"""Files and batches: OpenAI's objects, what is refused, restarts, cancelling, and live traffic first."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from kitfox.outputs import EngineStats
from kitfox.server import batches, files
from kitfox.server.app import make_app
from kitfox.server.options import ServerOptions
from tests.server.fake_llm import MODEL, REPLY, FakeAsyncLLM
from tests.server.fault_table import CHAT, COMPLETIONS

EMBEDDINGS = "/v1/embeddings"
FINAL = ("completed", "failed", "expired", "cancelled")


def idle_llm() -> FakeAsyncLLM:
    llm = FakeAsyncLLM()
    llm.stats = EngineStats()
    return llm


@asynccontextmanager
async def server(llm: FakeAsyncLLM, folder: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app that lives as long as the block, as in a process of its own."""
    app = make_app(llm, ServerOptions(storage_dir=str(folder), **options))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        steps = asyncio.create_task(_step(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
        steps.cancel()


async def _step(llm: FakeAsyncLLM) -> None:
    while True:
        await asyncio.sleep(0.001)
        llm.stats = msgspec.structs.replace(llm.stats, step=llm.stats.step + 1)


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 30))


def chat_line(number: int, **body: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Hi {number}"}], "max_tokens": 9} | body
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def upload(client: httpx.AsyncClient, content: bytes, **form: str) -> httpx.Response:
    parts = {"file": ("lines.jsonl", content)}
    return await client.post("/v1/files", files=parts, data={"purpose": "batch"} | form)


async def start(
    client: httpx.AsyncClient, lines: list[dict[str, Any]] | bytes, endpoint: str = CHAT, **fields: Any
) -> dict[str, Any]:
    file = (await upload(client, lines if isinstance(lines, bytes) else jsonl(lines))).json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"} | fields
    response = await client.post("/v1/batches", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def until(client: httpx.AsyncClient, batch_id: str, is_right: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    while True:
        batch = (await client.get(f"/v1/batches/{batch_id}")).json()
        if is_right(batch):
            return batch
        await asyncio.sleep(0.002)


async def finished(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    return await until(client, batch_id, lambda batch: batch["status"] in FINAL)


async def entries(client: httpx.AsyncClient, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Custom id to the entry of a result file."""
    if file_id is None:
        return {}
    content = (await client.get(f"/v1/files/{file_id}/content")).text
    found = [json.loads(line) for line in content.splitlines()]
    assert len({entry["custom_id"] for entry in found}) == len(found)
    return {entry["custom_id"]: entry for entry in found}


# ---- files ----------------------------------------------------------------------------------------------------------


def test_the_life_of_a_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(idle_llm(), tmp_path) as client:
            file = (await upload(client, b"content\n")).json()
            assert (file["object"], file["bytes"], file["filename"]) == ("file", 8, "lines.jsonl")
            assert (file["purpose"], file["status"]) == ("batch", "processed")
            assert (await client.get(f"/v1/files/{file['id']}")).json() == file
            assert (await client.get(f"/v1/files/{file['id']}/content")).content == b"content\n"
            assert (await client.get("/v1/files")).json()["data"] == [file]
            deleted = await client.delete(f"/v1/files/{file['id']}")
            assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
            for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content", "/v1/files/..%2Flock"):
                assert (await client.get(path)).status_code == 404
            assert (await client.delete(f"/v1/files/{file['id']}")).status_code == 404
            assert list((tmp_path / "files").iterdir()) == []

    run(scenario())


def test_files_survive_a_restart_and_crashes_leave_no_halves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(idle_llm(), tmp_path) as client:
            file = (await upload(client, b"content")).json()
        (tmp_path / "files" / "file-undescribed").write_bytes(b"half")
        (tmp_path / "files" / "file-x.json.new").write_bytes(b"{")
        async with server(idle_llm(), tmp_path) as client:
            assert (await client.get("/v1/files")).json()["data"] == [file]
            assert (await client.get(f"/v1/files/{file['id']}/content")).content == b"content"
        assert len(list((tmp_path / "files").iterdir())) == 2

    run(scenario())


def test_pages_of_files(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(idle_llm(), tmp_path) as client:
            ids = [(await upload(client, b"x")).json()["id"] for _ in range(5)]

            async def page(**query: Any) -> tuple[list[str], bool]:
                body = (await client.get("/v1/files", params=query)).json()
                found = [file["id"] for file in body["data"]]
                assert (body["first_id"], body["last_id"]) == ((found[0], found[-1]) if found else (None, None))
                return found, body["has_more"]

            assert await page() == (ids[::-1], False)
            assert await page(order="asc", limit=2) == (ids[:2], True)
            assert await page(order="asc", limit=2, after=ids[2]) == (ids[3:], False)
            assert await page(purpose="batch_output") == ([], False)
            for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after")):
                response = await client.get("/v1/files", params=query)
                assert (response.status_code, response.json()["error"]["param"]) == (400, param)

    run(scenario())


def test_uploads_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1000)

    async def scenario() -> None:
        async with server(idle_llm(), tmp_path) as client:
            for form, param in (
                ({"purpose": "fine-tune"}, "purpose"),
                ({"expires_after[anchor]": "created_at"}, "expires_after"),
                ({"colour": "red"}, "the form"),
            ):
                response = await upload(client, b"x", **form)
                assert (response.status_code, response.json()["error"]["param"]) == (400, param)
            no_file = await client.post("/v1/files", data={"purpose": "batch"}, files={"other": b""})
            assert no_file.status_code == 400
            assert (await client.post("/v1/files", json={"purpose": "batch"})).status_code == 400
            broken = await client.post(
                "/v1/files", content=b"--x", headers={"content-type": "multipart/form-data; boundary=y"}
            )
            assert broken.status_code == 400
            assert (await upload(client, b"x" * 1001)).status_code == 413
            assert (await upload(client, b"x" * 100_000)).status_code == 413  # said before it is received

            async def endless() -> AsyncIterator[bytes]:
                yield b'--y\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
                for _ in range(200):
                    yield b"x" * 1000

            response = await client.post(
                "/v1/files", content=endless(), headers={"content-type": "multipart/form-data; boundary=y"}
            )
            assert response.status_code == 413
            assert (await upload(client, b"x" * 1000)).status_code == 200
            assert len((await client.get("/v1/files")).json()["data"]) == 1

    run(scenario())


def test_all_files_together_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_STORED_BYTES", 10)

    async def scenario() -> None:
        async with server(idle_llm(), tmp_path) as client:
            assert (await upload(client, b"123456")).status_code == 200
            refused = await upload(client, b"12345")
            assert refused.status_code == 413
            assert "delete some" in refused.json()["error"]["message"]

    run(scenario())


def test_a_folder_belongs_to_one_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(idle_llm(), tmp_path) as first, server(idle_llm(), tmp_path) as second:
            assert (await upload(first, b"x")).status_code == 200
            refused = await second.get("/v1/files")
            assert refused.status_code == 503
            assert "--storage-dir" in refused.json()["error"]["message"]
            assert (await second.post("/v1/batches", json={})).status_code == 400
            assert (await second.get("/health")).status_code == 200
        async with server(idle_llm(), tmp_path) as third:
            assert len((await third.get("/v1/files")).json()["data"]) == 1

    run(scenario())


def test_a_server_takes_a_folder_over_when_its_owner_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being asked: it goes on with the batches that the other left unfinished."""
    monkeypatch.setattr(batches, "TAKE_OVER_POLL_S", 0.01)

    async def scenario() -> None:
        stuck, free = idle_llm(), idle_llm()
        stuck.hold = asyncio.Event()
        async with AsyncExitStack() as lasting:
            async with server(stuck, tmp_path) as first:
                batch = await start(first, [chat_line(1)])
                await until(first, batch["id"], lambda batch: batch["status"] == "in_progress")
                second = await lasting.enter_async_context(server(free, tmp_path))
                refused = await second.get("/v1/batches")
                assert refused.status_code == 503
                assert str(os.getpid()) in refused.json()["error"]["message"]
            while not free.seen:
                await asyncio.sleep(0.002)
            done = await finished(second, batch["id"])
            assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}

    run(scenario())


def test_a_server_without_files_leaves_no_trace(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(idle_llm(), tmp_path / "storage") as client:
            await client.get("/v1/models")

    run(scenario())
    assert list(tmp_path.iterdir()) == []


# ---- batches --------------------------------------------------------------------------------------------------------


def test_a_batch_is_answered_line_by_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        llm = idle_llm()
        async with server(llm, tmp_path) as client:
            lines = [chat_line(n) for n in range(7)]
            lines[3]["body"]["temperature"] = -1
            lines[4]["body"] |= {"stream": True, "stream_options": {"include_usage": True}}
            batch = await start(client, lines, metadata={"team": "red"})
            assert (batch["object"], batch["status"], batch["endpoint"]) == ("batch", "validating", CHAT)
            assert batch["expires_at"] == batch["created_at"] + 24 * 3600
            batch = await finished(client, batch["id"])
            assert (batch["status"], batch["errors"]) == ("completed", None)
            assert batch["request_counts"] == {"total": 7, "completed": 6, "failed": 1}
            assert batch["metadata"] == {"team": "red"}
            moments = [batch[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
            assert moments == sorted(moments)
            assert [batch[f"{name}_at"] for name in ("failed", "expired", "cancelling", "cancelled")] == [None] * 4
            answers = await entries(client, batch["output_file_id"])
            assert set(answers) == {f"line-{n}" for n in range(7)} - {"line-3"}
            for entry in answers.values():
                assert entry["error"] is None
                assert entry["id"].startswith("batch_req_")
                response = entry["response"]
                assert response["status_code"] == 200
                assert response["body"]["id"] == f"chatcmpl-{response['request_id']}"
                assert response["body"]["choices"][0]["message"]["content"] == REPLY[:9]
            failed = (await entries(client, batch["error_file_id"]))["line-3"]
            assert failed["response"]["status_code"] == 400
            assert failed["response"]["body"]["error"]["param"] == "temperature"
            described = (await client.get(f"/v1/files/{batch['output_file_id']}")).json()
            assert (described["purpose"], described["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")
            assert sorted(path.name for path in (tmp_path / "batches").iterdir()) == [f"{batch['id']}.json"]
        assert llm.in_flight == set()

    run(scenario())


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 3}),
        (EMBEDDINGS, {"input": "Hi"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 20}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_every_endpoint_of_batches(policy: str, endpoint: str, body: dict[str, Any], tmp_path: Path) -> None:
    """Through keys and --strict too: lines are requests like others."""

    async def scenario() -> None:
        llm = idle_llm()
        llm.config = llm.config.replace(scheduler={"policy": policy})
        key = {"authorization": "Bearer secret"}
        async with server(llm, tmp_path, api_keys=("secret",), strict=True) as client:
            client.headers.update(key)
            line = {"custom_id": "one", "method": "POST", "url": endpoint, "body": body | {"model": MODEL}}
            batch = await finished(client, (await start(client, [line], endpoint))["id"])
            assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}, await entries(
                client, batch["error_file_id"]
            )
            assert (await entries(client, batch["output_file_id"]))["one"]["response"]["status_code"] == 200

    run(scenario())


def test_lines_may_structure_their_output_and_call_tools(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    structured = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
    refused = {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}
    lines = [
        chat_line(1, tools=[tool], max_tokens=100),
        chat_line(2, tools=[tool], tool_choice="required", max_tokens=100),
        chat_line(3, **structured),
        chat_line(4, **refused),
    ]

    async def scenario() -> None:
        llm = idle_llm()
        llm.reply = call
        async with server(llm, tmp_path, tool_call_parser="hermes") as client:
            done = await finished(client, (await start(client, lines))["id"])
            answers = await entries(client, done["output_file_id"])
            failures = await entries(client, done["error_file_id"])
        for name in ("line-1", "line-2"):
            (choice,) = answers[name]["response"]["body"]["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
        constrained = {bytes(prompt).decode().count("Hi 3"): params.constraint for _, prompt, params in llm.seen}
        assert constrained[1] is not None
        assert "line-3" in answers
        error = failures["line-4"]["response"]["body"]["error"]
        assert (failures["line-4"]["response"]["status_code"], error["param"].split(".")[0]) == (400, "response_format")

    run(scenario())


def test_what_is_wrong_with_a_file_is_said_line_by_line(tmp_path: Path) -> None:
    good = chat_line(1)
    wrong: list[tuple[bytes, str]] = [
        (b"{", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (json.dumps(chat_line(1)).encode(), "duplicate_custom_id"),
        (json.dumps(chat_line(2) | {"url": COMPLETIONS}).encode(), "mismatched_endpoint"),
        (json.dumps(chat_line(3) | {"method": "GET"}).encode(), "invalid_method"),
        (json.dumps(chat_line(4) | {"custom_id": 5}).encode(), "invalid_type"),
        (json.dumps(chat_line(5) | {"custom_id": ""}).encode(), "invalid_parameter"),
        (json.dumps(chat_line(6) | {"priority": 1}).encode(), "unknown_parameter"),
        (b'{"custom_id": "x"}', "missing_required_parameter"),
        (json.dumps(chat_line(7, user="x" * 5000)).encode(), "line_too_long"),
    ]

    async def scenario() -> None:
        llm = idle_llm()
        async with server(llm, tmp_path, max_body_bytes=4000) as client:
            content = b"\n".join([json.dumps(good).encode(), b"", *(line for line, _ in wrong)])
            batch = await finished(client, (await start(client, content))["id"])
            assert (batch["status"], batch["output_file_id"]) == ("failed", None)
            assert batch["failed_at"] >= batch["created_at"]
            assert batch["errors"]["object"] == "list"
            found = [(problem["line"], problem["code"]) for problem in batch["errors"]["data"]]
            assert found == [(number, code) for number, (_, code) in enumerate(wrong, 3)]
            empty = await finished(client, (await start(client, b"\n \n"))["id"])
            assert [problem["code"] for problem in empty["errors"]["data"]] == ["empty_file"]
            many = await finished(client, (await start(client, b"{\n" * 500))["id"])
            assert len(many["errors"]["data"]) == batches.MAX_REPORTED_ERRORS + 1
            assert many["errors"]["data"][-1]["code"] == "too_many_errors"
        assert llm.seen == []

    run(scenario())


def test_a_file_has_a_limit_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_LINES", 3)

    async def scenario() -> None:
        async with server(idle_llm(), tmp_path) as client:
            batch = await finished(client, (await start(client, [chat_line(n) for n in range(4)]))["id"])
            assert [problem["code"] for problem in batch["errors"]["data"]] == ["too_many_tasks"]

    run(scenario())


def test_requests_for_batches_that_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(idle_llm(), tmp_path) as client:
            file_id = (await upload(client, jsonl([chat_line(1)]))).json()["id"]
            right = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
            batch = await finished(client, (await client.post("/v1/batches", json=right)).json()["id"])
            for fields, status, param in (
                ({"endpoint": "/v1/nothing"}, 400, "endpoint"),
                ({"completion_window": "1h"}, 400, "completion_window"),
                ({"input_file_id": "file-x"}, 404, "file_id"),
                ({"input_file_id": batch["output_file_id"]}, 400, "input_file_id"),
                ({"metadata": {"a": 1}}, 400, "metadata"),
                ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
                ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata"),
            ):
                response = await client.post("/v1/batches", json=right | fields)
                assert (response.status_code, response.json()["error"]["param"]) == (status, param), fields
            assert (await client.get("/v1/batches/batch_x")).status_code == 404
            assert (await client.post("/v1/batches/batch_x/cancel")).status_code == 404
            assert (await client.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 409
            listed = (await client.get("/v1/batches", params={"limit": 1})).json()
            assert (listed["data"], listed["has_more"]) == ([batch], False)

    run(scenario())


def test_cancelling_keeps_what_is_answered_and_says_what_is_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        llm = idle_llm()
        llm.config = llm.config.replace(scheduler={"max_num_seqs": 8})  # two lines at once
        async with server(llm, tmp_path) as client:
            batch = await start(client, [chat_line(n) for n in range(40)])
            await until(client, batch["id"], lambda batch: batch["request_counts"]["completed"] >= 3)
            llm.hold = asyncio.Event()
            while len(llm.in_flight) < 2:
                await asyncio.sleep(0.001)
            busy = await client.delete(f"/v1/files/{batch['input_file_id']}")
            assert busy.status_code == 409
            cancelling = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
            assert cancelling["status"] == "cancelling"
            batch = await finished(client, batch["id"])
            assert batch["status"] == "cancelled"
            assert batch["cancelled_at"] >= batch["cancelling_at"]
            assert llm.in_flight == set()  # those that ran were aborted
            good = await entries(client, batch["output_file_id"])
            rest = await entries(client, batch["error_file_id"])
            assert len(good) + len(rest) == 40
            assert batch["request_counts"] == {"total": 40, "completed": len(good), "failed": len(rest)}
            assert {entry["error"]["code"] for entry in rest.values()} == {"batch_cancelled"}
            assert (await client.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200

    run(scenario())


def test_a_window_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "COMPLETION_WINDOW_S", 1)

    async def scenario() -> None:
        llm = idle_llm()
        llm.hold = asyncio.Event()
        async with server(llm, tmp_path) as client:
            batch = await finished(client, (await start(client, [chat_line(n) for n in range(3)]))["id"])
            assert (batch["status"], batch["output_file_id"]) == ("expired", None)
            assert batch["expired_at"] >= batch["expires_at"]
            errors = await entries(client, batch["error_file_id"])
            assert {entry["error"]["code"] for entry in errors.values()} == {"batch_expired"}
            assert len(errors) == 3

    run(scenario())


def test_a_restart_goes_on_and_answers_no_line_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = idle_llm()
        first.config = first.config.replace(scheduler={"max_num_seqs": 8})
        async with server(first, tmp_path) as client:
            batch = await start(client, [chat_line(n) for n in range(30)])
            await until(client, batch["id"], lambda batch: batch["request_counts"]["completed"] >= 5)
            first.hold = asyncio.Event()
            while len(first.in_flight) < 2:
                await asyncio.sleep(0.001)
        partial = tmp_path / "batches" / f"{batch['id']}.output"
        num_answered = len(partial.read_bytes().splitlines())
        assert 5 <= num_answered < 30
        with partial.open("ab") as file:
            file.write(b'{"custom_id": "line-29", "resp')  # the crash came while this was written
        second = idle_llm()
        async with server(second, tmp_path) as client:
            batch = await finished(client, batch["id"])
            assert batch["status"] == "completed"
            assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
            assert len(await entries(client, batch["output_file_id"])) == 30
        assert len(second.seen) == 30 - num_answered

    run(scenario())


@pytest.mark.parametrize("status", ["validating", "cancelling", "finalizing"])
def test_a_restart_in_any_status_comes_to_the_end(status: str, tmp_path: Path) -> None:
    """The saved batch is set back to how a crash can have left it."""

    async def scenario() -> None:
        async with server(idle_llm(), tmp_path) as client:
            batch = await finished(client, (await start(client, [chat_line(n) for n in range(4)]))["id"])
        path = tmp_path / "batches" / f"{batch['id']}.json"
        saved = msgspec.json.decode(path.read_bytes())
        undone: dict[str, Any] = {"completed_at": None, "output_file_id": None}
        if status == "cancelling":
            undone |= {"cancelling_at": int(time.time())}
        path.write_bytes(msgspec.json.encode(saved | undone | {"status": status}))
        llm = idle_llm()
        async with server(llm, tmp_path) as client:
            again = await finished(client, batch["id"])
            assert again["status"] == ("cancelled" if status == "cancelling" else "completed")
            assert again["output_file_id"] == batch["output_file_id"]
            assert len(await entries(client, again["output_file_id"])) == 4
        assert llm.seen == []

    run(scenario())


def test_live_traffic_goes_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        llm = idle_llm()
        llm.config = llm.config.replace(scheduler={"max_num_seqs": 16})
        llm.in_flight.add("somebody")
        llm.stats = EngineStats(num_running=1, num_waiting=1)  # somebody waits: nothing of the batch may start
        async with server(llm, tmp_path) as client:
            batch = await start(client, [chat_line(n) for n in range(12)])
            await until(client, batch["id"], lambda batch: batch["status"] == "in_progress")
            await asyncio.sleep(5 * batches.ROOM_POLL_S)
            assert llm.seen == []
            llm.hold = asyncio.Event()
            llm.stats = EngineStats(num_running=1)
            while len(llm.in_flight) < 5:
                await asyncio.sleep(0.005)
            await asyncio.sleep(5 * batches.ROOM_POLL_S)
            assert len(llm.seen) == 4  # a quarter of the 16 places
            llm.hold.set()
            llm.hold = None
            assert (await finished(client, batch["id"]))["request_counts"]["completed"] == 12

    run(scenario())


def test_one_line_starts_in_a_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        llm = idle_llm()
        llm.hold = asyncio.Event()
        app = make_app(llm, ServerOptions(storage_dir=str(tmp_path)))
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                await start(client, [chat_line(n) for n in range(12)])
                for step in range(1, 4):
                    while len(llm.seen) < step:
                        await asyncio.sleep(batches.ROOM_POLL_S)
                    await asyncio.sleep(10 * batches.ROOM_POLL_S)
                    assert len(llm.seen) == step
                    llm.stats = EngineStats(step=step, num_running=step)

    run(scenario())


def test_under_the_priority_policy_lines_have_the_lowest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        llm = idle_llm()
        llm.config = llm.config.replace(scheduler={"policy": "priority"})
        given: list[int] = []
        process = llm._input_processor.process

        def spy(*args: Any, **kwargs: Any) -> Any:
            given.append(kwargs["priority"])
            return process(*args, **kwargs)

        monkeypatch.setattr(llm._input_processor, "process", spy)
        async with server(llm, tmp_path) as client:
            await finished(client, (await start(client, [chat_line(1, priority=-5)]))["id"])
        assert given == [batches.LOWEST_PRIORITY]

    run(scenario())


def test_a_full_queue_and_a_failing_engine_are_tried_again(tmp_path: Path) -> None:
    from kitfox.errors import QueueFullError

    async def scenario() -> None:
        llm = idle_llm()
        llm.refusal = QueueFullError("the queue is full")
        async with server(llm, tmp_path) as client:
            batch = await start(client, [chat_line(1)])
            await asyncio.sleep(5 * batches.ROOM_POLL_S)
            assert (await client.get(f"/v1/batches/{batch['id']}")).json()["status"] == "in_progress"
            llm.refusal = None
            assert (await finished(client, batch["id"]))["request_counts"]["completed"] == 1
            llm.fail_after = 0
            batch = await finished(client, (await start(client, [chat_line(2)]))["id"])
            entry = (await entries(client, batch["error_file_id"]))["line-2"]
            assert entry["response"]["status_code"] == 503
        assert len(llm.seen) == 1 + batches.MAX_ATTEMPTS

    run(scenario())


def test_with_openais_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(idle_llm(), tmp_path) as http:
            client = openai.AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=http)
            content = jsonl([chat_line(n) for n in range(3)])
            file = await client.files.create(file=("lines.jsonl", content), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            while batch.status not in FINAL:
                await asyncio.sleep(0.005)
                batch = await client.batches.retrieve(batch.id)
            assert batch.request_counts is not None
            assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 0)
            assert batch.output_file_id is not None
            lines = (await client.files.content(batch.output_file_id)).text.splitlines()
            assert {json.loads(line)["custom_id"] for line in lines} == {"line-0", "line-1", "line-2"}
            assert [listed.id async for listed in client.batches.list(limit=1)] == [batch.id]
            assert {listed.id async for listed in client.files.list()} == {file.id, batch.output_file_id}
            assert (await client.files.delete(file.id)).deleted
            vectors = (await client.embeddings.create(model=MODEL, input=["Hi", "Ho"])).data
            assert [len(vector.embedding) for vector in vectors] == [8, 8]

    run(scenario())
