"""Keys, origins, sizes of headers: who gets in, what the others hear, and that no key is ever shown."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from kitfox.server.access import ADMIN_PATHS, bounded_protocol
from kitfox.server.app import make_app
from kitfox.server.options import ServerOptions
from tests.server.fake_llm import MODEL, FakeAsyncLLM
from tests.server.fault_table import COMPLETIONS
from tests.server.test_app import until

KEYS = ("first-key", "zweiter-Schlüssel")
KEYED = ServerOptions(api_keys=KEYS)
ADMIN = ServerOptions(api_keys=KEYS, admin_api_key="admin-key")
BODY = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}


def ask(options: ServerOptions, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=make_app(FakeAsyncLLM(), options))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(run())


def bearer(key: str) -> dict[str, Any]:
    return {"headers": [(b"authorization", b"Bearer " + key.encode())]}


# ---- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("header", [b"Authorization", b"x-api-key"])
def test_every_key_opens_in_both_headers(key: str, header: bytes) -> None:
    value = (b"bearer " if header == b"Authorization" else b"") + key.encode()
    assert ask(KEYED, "POST", COMPLETIONS, json=BODY, headers=[(header, value)]).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "first-key"},
        {"authorization": "Basic first-key"},
        {"authorization": "Bearer first-key2"},
        {"authorization": "Bearer first-ke"},
        {"x-api-key": "FIRST-KEY"},
        {"x-api-key": ""},
        {"api-key": "first-key"},
    ],
)
def test_anything_else_is_a_401_that_repeats_no_key(headers: dict[str, str]) -> None:
    response = ask(KEYED, "POST", COMPLETIONS, json=BODY, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    given = [words[-1] for value in headers.values() if (words := value.removeprefix("Bearer").split())]
    assert not any(word in response.text for word in (*KEYS, *given))


def test_every_route_but_the_probes_needs_a_key() -> None:
    app = make_app(FakeAsyncLLM(), KEYED)  # type: ignore[arg-type]
    pairs = [(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ()]
    assert len(pairs) > 10

    async def statuses() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            paths = [(method, path.replace("{", "").replace("}", "")) for method, path in pairs]
            return [(await client.request(method, path)).status_code for method, path in paths]

    for (method, path), status in zip(pairs, asyncio.run(statuses()), strict=True):
        assert status == (200 if path in ("/health", "/ready") else 401), (method, path)


@pytest.mark.parametrize(
    "path", ["/nothing", "//health", "/health/", "/ready/x", "/Health", "/health%2f", "/v1/models?x=/health", "/docs"]
)
def test_paths_that_only_look_open_need_a_key(path: str) -> None:
    assert ask(KEYED, "GET", path).status_code == 401


def test_metrics_may_be_open() -> None:
    assert ask(KEYED, "GET", "/metrics").status_code == 401
    options = ServerOptions(api_keys=KEYS, metrics_without_key=True)
    assert ask(options, "GET", "/metrics").status_code == 200
    assert ask(options, "GET", "/version").status_code == 401


@pytest.mark.parametrize("path", ["/p/health", "/health"])
def test_a_prefix_is_no_way_around(path: str) -> None:
    options = ServerOptions(api_keys=KEYS, root_path="/p")
    assert ask(options, "GET", path).status_code == 200
    assert ask(options, "GET", path.replace("health", "version")).status_code == 401
    assert ask(options, "GET", path.replace("health", "version"), **bearer("first-key")).status_code == 200
    assert ask(options, "GET", "/p/p/health").status_code == 401


def test_what_concerns_everybody_needs_the_admin_key() -> None:
    path = "/configure_logging"
    assert path in ADMIN_PATHS
    assert ask(ADMIN, "GET", path, **bearer("admin-key")).status_code == 200
    refused = ask(ADMIN, "GET", path, **bearer("first-key"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
    assert ask(ADMIN, "GET", path).status_code == 401
    assert ask(KEYED, "GET", path, **bearer("first-key")).status_code == 200
    assert ask(KEYED, "GET", path).status_code == 401


def test_the_admin_key_opens_the_rest_too() -> None:
    assert ask(ADMIN, "GET", "/version", **bearer("admin-key")).status_code == 200
    only_admin = ServerOptions(admin_api_key="admin-key")
    assert ask(only_admin, "GET", "/version").status_code == 200
    assert ask(only_admin, "GET", "/configure_logging").status_code == 401


def test_every_admin_path_is_a_route() -> None:
    routes = {getattr(route, "path", "") for route in make_app(FakeAsyncLLM()).routes}  # type: ignore[arg-type]
    assert sorted(ADMIN_PATHS - routes) == []


def test_no_key_is_ever_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for path in ("/server_info", "/get_server_info", "/metrics", "/openapi.json", "/configure_logging", "/nothing"):
        text = ask(ADMIN, "GET", path, **bearer("admin-key")).text
        assert not any(key in text for key in (*KEYS, "admin-key")), path
    ask(ADMIN, "POST", "/tokenize", json={"prompt": 3}, **bearer("first-key"))
    assert not any(key in caplog.text for key in (*KEYS, "admin-key"))
    assert not any(key in repr(ADMIN) for key in (*KEYS, "admin-key"))


def test_without_keys_whatever_a_client_sends_is_fine() -> None:
    assert ask(ServerOptions(), "GET", "/version", **bearer("none")).status_code == 200


# ---- other origins --------------------------------------------------------------------------------------------------

PAGE = "https://page.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def test_no_page_may_call_unless_allowed() -> None:
    response = ask(ServerOptions(), "GET", "/version", headers={"origin": PAGE})
    assert "access-control-allow-origin" not in response.headers
    assert ask(ServerOptions(), "OPTIONS", COMPLETIONS, headers=PREFLIGHT).status_code == 405


def test_a_preflight_needs_no_key_and_its_request_does() -> None:
    options = ServerOptions(api_keys=KEYS, allowed_origins=(PAGE,), allow_credentials=True)
    preflight = ask(options, "OPTIONS", COMPLETIONS, headers=PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert preflight.headers["access-control-allow-credentials"] == "true"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    refused = ask(options, "POST", COMPLETIONS, json=BODY, headers={"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    answered = ask(options, "POST", COMPLETIONS, json=BODY, headers={"origin": PAGE, "x-api-key": KEYS[0]})
    assert (answered.status_code, answered.headers["access-control-allow-origin"]) == (200, PAGE)
    elsewhere = ask(options, "OPTIONS", COMPLETIONS, headers=PREFLIGHT | {"origin": "https://other.example"})
    assert elsewhere.status_code == 400
    assert ask(options, "OPTIONS", COMPLETIONS).status_code == 401


def test_all_origins_with_fewer_methods() -> None:
    options = ServerOptions(allowed_origins=("*",), allowed_methods=("GET",))
    assert ask(options, "OPTIONS", COMPLETIONS, headers=PREFLIGHT).status_code == 400
    response = ask(options, "GET", "/version", headers={"origin": PAGE})
    assert response.headers["access-control-allow-origin"] == "*"


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_headers_are_limited_in_number_and_size() -> None:
    options = ServerOptions(max_header_bytes=1000, max_header_count=20)
    assert ask(options, "GET", "/version", headers={"x-long": "a" * 700}).status_code == 200
    for kwargs in (
        {"headers": {"x-long": "a" * 1000}},
        {"headers": {f"x-{number}": "a" for number in range(21)}},
        {"params": {"long": "a" * 1000}},
    ):
        response = ask(options, "GET", "/version", **kwargs)
        assert (response.status_code, response.json()["error"]["code"]) == (431, "headers_too_large")


class Listening:
    """A server on a free port of the loopback, as `serve` makes it."""

    def __init__(self, options: ServerOptions, **uvicorn_options: Any):
        app = make_app(FakeAsyncLLM(), options)  # type: ignore[arg-type]
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off", **uvicorn_options))

    async def __aenter__(self) -> int:
        self._task = asyncio.ensure_future(self._server._serve())
        await until(lambda: self._server.started)
        port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._task


@pytest.mark.parametrize("protocol", ["h11", "httptools"])
def test_headers_that_never_end_close_the_connection(protocol: str) -> None:
    pytest.importorskip(protocol)
    options = ServerOptions(max_header_bytes=5000)
    http = bounded_protocol(5000) if protocol == "httptools" else protocol

    async def run() -> bytes:
        async with Listening(options, http=http, h11_max_incomplete_event_size=5000) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for request in range(2):  # the count starts again with every request
                writer.write(b"GET /version HTTP/1.1\r\nhost: a\r\nx-long: " + b"b" * 3000 + b"\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                assert b" 200 " in head, request
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
            body = b'{"prompt": "' + b"a" * 20_000 + b'"}'
            length = str(len(body)).encode()
            writer.write(b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: " + length + b"\r\n\r\n" + body)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
            writer.write(b"GET /version HTTP/1.1\r\n")
            for number in range(100):
                writer.write(b"x-%d: %b\r\n" % (number, b"a" * 100))
            try:
                return await reader.read()
            except ConnectionResetError:  # what we still sent met a closed socket, before we read the answer
                return b"HTTP/1.1 431 "
            finally:
                writer.close()

    answer = asyncio.run(run())
    assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))


def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subject = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(["openssl", *command.split(), *subject], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl command")

    async def run() -> httpx.Response:
        async with Listening(KEYED, ssl_keyfile=str(key), ssl_certfile=str(certificate)) as port:
            context = ssl.create_default_context(cafile=str(certificate))
            async with httpx.AsyncClient(verify=context, trust_env=False) as client:
                return await client.get(f"https://127.0.0.1:{port}/version", headers={"x-api-key": KEYS[0]})

    assert asyncio.run(run()).status_code == 200


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    async def run() -> httpx.Response:
        app = make_app(FakeAsyncLLM(), KEYED)  # type: ignore[arg-type]
        server = uvicorn.Server(uvicorn.Config(app, uds=path, log_config=None, lifespan="off"))
        task = asyncio.ensure_future(server._serve())
        await until(lambda: server.started)
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path)) as client:
            response = await client.get("http://kitfox/health")
        server.should_exit = True
        await task
        return response

    if not hasattr(socket, "AF_UNIX"):
        pytest.skip("no unix sockets")
    assert asyncio.run(run()).status_code == 200
