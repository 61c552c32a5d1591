"""LoRA adapters over HTTP: loaded and unloaded under both engines' names, and named by requests of every protocol."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kitfox.server.app import make_app
from tests.server.fake_llm import MODEL, FakeAsyncLLM
from tests.server.fault_table import CHAT, COMPLETIONS
from tests.server.http_client import send, send_all

HI = [{"role": "user", "content": "Hi"}]
SQL = {"sql": "/good/sql"}
# Every endpoint that asks the engine, but for the model's name.
ASKING: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Hi"}),
    (CHAT, {"messages": HI}),
    ("/v1/chat/completions/batch", {"messages": [HI]}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 4}),
    ("/v1/embeddings", {"input": "Hi"}),
    ("/score", {"text_1": "Hi", "text_2": "Ho"}),
    ("/v1/score", {"query": "Hi", "items": ["Ho"], "label_token_ids": [1]}),
    ("/rerank", {"query": "Hi", "documents": ["Ho"]}),
    ("/generate", {"text": "Hi"}),
]


def with_adapters(**paths: str) -> FakeAsyncLLM:
    llm = FakeAsyncLLM()
    llm.take_adapters(**paths)
    return llm


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


# ---- loading and unloading ------------------------------------------------------------------------------------------


def test_as_vllm_answers() -> None:
    llm = with_adapters()
    body = {"lora_name": "sql", "lora_path": "/good/sql"}
    loaded, unloaded = send_all(
        llm, [("POST", "/v1/load_lora_adapter", body), ("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"})]
    )
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert loaded.headers["content-type"].startswith("text/plain")
    assert llm.adapters == {}


def test_as_sglang_answers() -> None:
    llm = with_adapters(**SQL)
    body = {"lora_name": "poet", "lora_path": "/good/poet", "pinned": True}
    loaded, unloaded = send_all(
        llm, [("POST", "/load_lora_adapter", body), ("POST", "/unload_lora_adapter", {"lora_name": "sql"})]
    )
    both = SQL | {"poet": "/good/poet"}
    assert loaded.json() == {"success": True, "error_message": "", "loaded_adapters": both}
    assert unloaded.json() == {"success": True, "error_message": "", "loaded_adapters": {"poet": "/good/poet"}}


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "sql", "lora_path": "/good/other"}, "lora_name"),
        ({"lora_name": MODEL, "lora_path": "/good"}, "lora_name"),
        ({"lora_name": "alias", "lora_path": "/good"}, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "/good"}, "lora_name"),
        ({"lora_name": "new", "lora_path": "/bad"}, "lora_path"),
        ({"lora_name": "new"}, "lora_path"),
        ({"lora_path": "/good"}, "lora_name"),
        ({"lora_name": "new", "lora_path": 3}, "lora_path"),
    ],
)
def test_what_is_not_loaded(prefix: str, body: dict[str, Any], param: str) -> None:
    llm = with_adapters(**SQL)
    response = send(llm, "POST", f"{prefix}/load_lora_adapter", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert list(llm.adapters) == ["sql"]


@pytest.mark.parametrize("path", ["/unload_lora_adapter", "/v1/unload_lora_adapter"])
def test_one_that_is_not_there_is_not_unloaded(path: str) -> None:
    response = send(with_adapters(**SQL), "POST", path, {"lora_name": "other"})
    assert error_of(response) == (404, "not_found", "lora_name")
    assert response.json()["error"]["message"].endswith("Loaded: sql")


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/v1/load_lora_adapter"])
def test_one_is_replaced_or_stays(path: str) -> None:
    llm = with_adapters(**SQL)
    body = {"lora_name": "sql", "load_inplace": True}
    assert send(llm, "POST", path, body | {"lora_path": "/good/new"}).status_code == 200
    assert llm.adapters["sql"].path == "/good/new"
    assert send(llm, "POST", path, body | {"lora_path": "/bad"}).status_code == 400
    assert llm.adapters["sql"].path == "/good/new"
    new = {"lora_name": "first", "lora_path": "/good/1", "load_inplace": True}
    assert send(llm, "POST", path, new).status_code == 200


@pytest.mark.parametrize("action", ["load", "unload"])
@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_without_the_flag(prefix: str, action: str) -> None:
    body = {"lora_name": "sql"} | ({"lora_path": "/good"} if action == "load" else {})
    response = send(FakeAsyncLLM(), "POST", f"{prefix}/{action}_lora_adapter", body)
    assert error_of(response) == (400, "unsupported_parameter", "lora_name")
    assert "--enable-lora" in response.json()["error"]["message"]


def test_a_sentence_has_no_room_for_what_nobody_reads() -> None:
    body = {"lora_name": "new", "lora_path": "/good", "colour": 1}
    llm = with_adapters()
    assert error_of(send(llm, "POST", "/v1/load_lora_adapter", body)) == (400, "unsupported_parameter", "colour")
    assert llm.adapters == {}
    assert send(llm, "POST", "/load_lora_adapter", body).json()["ignored_parameters"] == ["colour"]


# ---- naming one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), ASKING)
@pytest.mark.parametrize(
    ("named", "adapter"),
    [
        ({"model": "sql"}, "sql"),
        ({"model": f"{MODEL}:sql"}, "sql"),
        ({"model": "alias:sql"}, "sql"),
        ({"model": MODEL, "lora_path": "sql"}, "sql"),
        ({"model": "sql", "lora_path": "sql"}, "sql"),
        ({"model": MODEL}, None),
    ],
)
def test_every_protocol(path: str, body: dict[str, Any], named: dict[str, str], adapter: str | None) -> None:
    llm = with_adapters(**SQL)
    response = send(llm, "POST", path, body | named)
    assert response.status_code == 200, response.text
    assert set(llm.used_adapters) == {adapter}
    if path != "/generate":
        assert response.json()["model"] == named["model"]


@pytest.mark.parametrize(("path", "body"), ASKING)
@pytest.mark.parametrize(
    ("named", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"model": f"{MODEL}:other"}, 404, "model"),
        ({"model": "other:sql"}, 404, "model"),
        ({"model": MODEL, "lora_path": "other"}, 404, "lora_path"),
        ({"model": "sql", "lora_path": "poet"}, 400, "lora_path"),
        ({"model": MODEL, "lora_path": 3}, 400, "lora_path"),
    ],
)
def test_names_of_nothing(path: str, body: dict[str, Any], named: dict[str, Any], status: int, param: str) -> None:
    llm = with_adapters(**SQL, poet="/good/poet")
    response = send(llm, "POST", path, body | named)
    assert response.status_code == status
    error = response.json()["error"]
    if path != "/v1/messages":
        assert error["param"] == param
    if status == 404:
        assert "sql, poet" in error["message"]
    assert llm.seen == []


def test_each_prompt_of_generate_has_its_own() -> None:
    llm = with_adapters(**SQL, poet="/good/poet")
    body = {"text": ["a", "b", "c"], "lora_path": ["poet", None, "sql"]}
    assert send(llm, "POST", "/generate", body).status_code == 200
    assert llm.used_adapters == ["poet", None, "sql"]
    refused = send(llm, "POST", "/generate", body | {"lora_path": ["sql"]})
    assert refused.json()["error"]["param"] == "lora_path"


def test_tokens_are_the_model_s() -> None:
    llm = with_adapters(**SQL)
    assert send(llm, "POST", "/tokenize", {"prompt": "Hi", "model": "sql"}).json()["tokens"] == [72, 105]
    assert send(llm, "POST", "/detokenize", {"tokens": [72], "model": "sql"}).json() == {"prompt": "H"}


def test_a_stream_says_its_name() -> None:
    response = send(with_adapters(**SQL), "POST", CHAT, {"model": "sql", "messages": HI, "stream": True})
    chunk = json.loads(response.text.split("\n\n")[0].removeprefix("data: "))
    assert chunk["model"] == "sql"


# ---- what is known of them ------------------------------------------------------------------------------------------


def test_they_are_listed_as_models() -> None:
    llm = with_adapters(**SQL)
    cards = {card["id"]: card for card in send(llm, "GET", "/v1/models").json()["data"]}
    assert list(cards) == [MODEL, "alias", "sql"]
    assert (cards["sql"]["parent"], cards["sql"]["root"]) == (MODEL, "/good/sql")
    assert (cards[MODEL]["parent"], cards[MODEL]["root"]) == (None, "fox")
    assert send(llm, "GET", "/v1/models/sql").json() == cards["sql"]
    assert send(llm, "GET", "/v1/models/other").status_code == 404
    assert send(llm, "GET", "/server_info").json()["adapters"] == SQL
    assert [load["dp_rank"] for load in send(llm, "GET", "/v1/loads?include=lora").json()["loads"]] == [0]


def test_one_that_is_still_being_loaded_is_not_there_yet() -> None:
    llm = with_adapters(**SQL)
    llm.adapters["sql"] = msgspec.structs.replace(llm.adapters["sql"], is_loaded=False)
    assert send(llm, "POST", COMPLETIONS, {"model": "sql", "prompt": "Hi"}).status_code == 404
    assert len(send(llm, "GET", "/v1/models").json()["data"]) == 2


def test_the_log_names_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    send(with_adapters(**SQL), "POST", "/generate", {"text": ["a", "b", "c"], "lora_path": ["sql", "sql", None]})
    send(FakeAsyncLLM(), "POST", COMPLETIONS, {"prompt": "Hi"})
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert [line["adapter"] for line in fields] == ["sql", None]


def requests_info(text: str) -> list[tuple[str, str, str]]:
    [family] = [each for each in text_string_to_metric_families(text) if each.name == "vllm:lora_requests_info"]
    names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
    return [tuple(sample.labels[name] for name in names) for sample in family.samples]  # type: ignore[misc]


def test_metrics_say_which_are_used() -> None:
    async def run() -> None:
        llm = with_adapters(**SQL, poet="/good/poet")
        llm.hold = asyncio.Event()
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=make_app(llm)),  # type: ignore[arg-type]
            base_url="http://test",
        ) as client:

            async def info() -> list[tuple[str, str, str]]:
                return requests_info((await client.get("/metrics")).text)

            assert await info() == [("3", "", "")]
            # A vector's first delta is its last, which is held back; an answer's first one is not.
            waiting = asyncio.ensure_future(client.post("/v1/embeddings", json={"model": "poet", "input": "Hi"}))
            running = asyncio.ensure_future(client.post(COMPLETIONS, json={"model": "sql", "prompt": "Hi"}))
            left = asyncio.ensure_future(client.post(COMPLETIONS, json={"model": "sql", "prompt": "Hi"}))
            async with asyncio.timeout(20):
                while await info() != [("3", "poet", "sql")]:
                    await asyncio.sleep(0)
            left.cancel()
            llm.hold.set()
            await asyncio.gather(waiting, running, left, return_exceptions=True)
            assert await info() == [("3", "", "")]

    asyncio.run(run())
    assert requests_info(send(FakeAsyncLLM(), "GET", "/metrics").text) == []
