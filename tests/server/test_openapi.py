"""The description of the API is complete and true: its paths are the routes, its schemas what answers look like."""

from __future__ import annotations

import html
import json
import re
from functools import cache
from typing import Any

import msgspec
import pytest

from kitfox.server import openapi
from kitfox.server.app import make_app
from kitfox.server.openapi import OPERATIONS, make_document, render_page
from kitfox.server.options import ServerOptions
from tests.server.fake_llm import MODEL, FakeAsyncLLM
from tests.server.fault_table import CHAT, COMPLETIONS
from tests.server.http_client import send

DOCUMENT = make_document("1.0", models=(MODEL, "alias"))


@cache
def registered_routes() -> frozenset[tuple[str, str]]:
    app = make_app(FakeAsyncLLM())  # type: ignore[arg-type]
    return frozenset(
        (method, re.sub(r":\w+}", "}", route.path)) for route in app.routes for method in getattr(route, "methods", ())
    )


def test_every_route_is_described_and_nothing_else() -> None:
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == registered_routes()


def test_no_route_is_described_twice() -> None:
    routes = [(method, path) for row in OPERATIONS for method in row.methods for path in row.paths]
    assert len(routes) == len(set(routes))
    names = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        mine = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return mine + [name for item in value.values() for name in references(item)]
    return [name for item in value for name in references(item)] if isinstance(value, list) else []


def test_every_reference_leads_somewhere() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    wanted = {name.removeprefix("#/components/schemas/") for name in references(DOCUMENT)}
    assert sorted(wanted - set(schemas)) == []
    assert sorted(set(schemas) - wanted) == []


@pytest.mark.parametrize("row", [row for row in OPERATIONS if row.bodies], ids=lambda row: row.route)
def test_every_parameter_is_described(row: openapi.Operation) -> None:
    described = DOCUMENT["paths"][row.paths[0]][row.methods[0].lower()]
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    parts = schema.get("anyOf", [schema])
    for kind, part in zip(row.bodies, parts, strict=True):
        shown = DOCUMENT["components"]["schemas"][part["$ref"].rpartition("/")[2]]
        assert list(shown["properties"]) == [field.encode_name for field in msgspec.structs.fields(kind)]


MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", COMPLETIONS, {"prompt": ["Hi", "Ho"], "logprobs": 1, "n": 2, "made_up": 1}),
        ("POST", CHAT, MESSAGES | {"logprobs": True}),
        ("POST", "/tokenize", {"prompt": "Hi", "return_token_strs": True}),
        ("POST", "/detokenize", {"tokens": [72]}),
        ("GET", "/v1/models", None),
        ("GET", f"/v1/models/{MODEL}", None),
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/version", None),
        ("GET", "/configure_logging", None),
        ("POST", "/configure_logging", {}),
    ],
)
def test_answers_are_what_is_described(method: str, path: str, body: Any) -> None:
    response = send(FakeAsyncLLM(), method, path, body)
    assert response.status_code == 200
    row = next(row for row in OPERATIONS if method in row.methods and path.replace(MODEL, "{name}") in row.paths)
    assert isinstance(row.answer, type)
    msgspec.convert(response.json(), row.answer, strict=True)


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": 3}), ("/v1/messages", {"max_tokens": 1}), ("/nothing", {})]
)
def test_errors_are_what_is_described(path: str, body: Any) -> None:
    response = send(FakeAsyncLLM(), "POST", path, body)
    kind = openapi.MessagesErrorBody if path == "/v1/messages" else openapi.ErrorBody
    assert response.status_code >= 400
    msgspec.convert(response.json(), kind, strict=True)


def test_it_is_served_as_json_and_as_a_page_of_its_own() -> None:
    document = send(FakeAsyncLLM(), "GET", "/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    assert document["paths"] == json.loads(json.dumps(DOCUMENT["paths"]))
    assert document["components"] == json.loads(json.dumps(DOCUMENT["components"]))
    assert document["security"] == []
    page = send(FakeAsyncLLM(), "GET", "/docs").text
    for methods in document["paths"].values():
        for operation in methods.values():
            assert html.escape(operation["summary"]) in page
    assert "repetition_penalty" in page
    assert not re.search(r"<script|https?://|src=", page), "the page loads nothing"


def test_adapters_come_and_go_so_that_names_are_examples() -> None:
    llm = FakeAsyncLLM()
    llm.take_adapters()
    schemas = send(llm, "GET", "/openapi.json").json()["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["model"] == {"type": "string", "examples": [MODEL, "alias"]}
    assert DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]["model"] == {"enum": [MODEL, "alias"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/load_lora_adapter", {"lora_name": "new", "lora_path": "/good"}),
        ("/unload_lora_adapter", {"lora_name": "sql"}),
    ],
)
def test_answers_about_adapters_are_what_is_described(path: str, body: Any) -> None:
    llm = FakeAsyncLLM()
    llm.take_adapters(sql="/good")
    answer = send(llm, "POST", path, body | {"made_up": 1})
    assert msgspec.convert(answer.json(), openapi.AdaptersAnswer, strict=True).ignored_parameters == ["made_up"]


def test_it_says_where_keys_are_needed() -> None:
    document = make_document("1.0", models=(MODEL,), needs_key=True, root_path="/prefix")
    assert document["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert document["servers"] == [{"url": "/prefix"}]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert ServerOptions().api_keys == ()


def test_the_page_escapes_what_it_shows() -> None:
    document = make_document("<script>", models=("<script>",))
    assert "<script>" not in render_page(document)
