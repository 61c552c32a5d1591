"""Who may call the server: API keys, pages of other origins, the size of headers. ASGI middleware and nothing else."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

import msgspec
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kitfox.errors import AdminKeyError, ApiKeyError, HeadersTooLargeError, KitfoxError
from kitfox.server import anthropic
from kitfox.server.control import ADMIN_PATHS
from kitfox.server.options import ServerOptions
from kitfox.server.validation import error_body

OPEN_PATHS = {"/health", "/ready"}  # what asks them has no key: load balancers, orchestrators


def add_access(app: FastAPI, options: ServerOptions) -> None:
    """Put the checks that the options ask for in front of every route, those added later included."""
    if options.api_keys or options.admin_api_key:
        app.add_middleware(_Keys, options=options)
    app.add_middleware(_HeaderLimits, max_bytes=options.max_header_bytes, max_count=options.max_header_count)
    if options.allowed_origins:  # outside the keys: a browser's preflight has none, and must be able to read a 401
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=("x-request-id", "retry-after"),
        )


class _Keys:
    """Lets a request through whose key is good enough for its path."""

    def __init__(self, app: ASGIApp, options: ServerOptions):
        self._app = app
        self._open_paths = OPEN_PATHS | ({"/metrics"} if options.metrics_without_key else set())
        self._api_digests = [_digest(key.encode()) for key in options.api_keys]
        self._admin_digests = [_digest(options.admin_api_key.encode())] if options.admin_api_key else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            challenge = [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
            await _refuse(scope, send, error, challenge)

    def _refusal(self, scope: Scope) -> KitfoxError | None:
        path = path_below_root(scope)
        if path in self._open_paths:
            return None
        given = [_digest(key) for key in _given_keys(scope["headers"])]
        is_admin = _any_equal(given, self._admin_digests)
        is_known = is_admin | _any_equal(given, self._api_digests)
        if self._admin_digests and path in ADMIN_PATHS:
            if is_admin:
                return None
            return AdminKeyError(f"{path} needs the admin key") if is_known else ApiKeyError(_how_to_authorise(given))
        return None if is_known or not self._api_digests else ApiKeyError(_how_to_authorise(given))


def _digest(key: bytes) -> bytes:
    """Of one length for every key, so that a comparison takes the same time whatever was given."""
    return sha256(key).digest()


def _any_equal(given: list[bytes], wanted: list[bytes]) -> bool:
    """Whether any pair is equal; compares all of them, so that the time says nothing of which."""
    found = False
    for digest in given:
        for good in wanted:
            found |= hmac.compare_digest(digest, good)
    return found


def _given_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Keys where OpenAI's clients put them, and where Anthropic's do."""
    keys = []
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            keys.append(value[7:].strip())
        elif name == b"x-api-key":
            keys.append(value.strip())
    return keys


def _how_to_authorise(given: list[bytes]) -> str:
    """Never repeats a key: answers end up in logs."""
    problem = "the API key is not one of this server's" if given else "an API key is needed"
    return f"{problem}: send `Authorization: Bearer KEY` or `x-api-key: KEY`"


def path_below_root(scope: Scope) -> str:
    """The path that routes are matched with: a proxy may or may not have stripped the prefix."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


class _HeaderLimits:
    """Refuses headers that are too large or too many; what never ends is cut off by `bounded_protocol`."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_count: int):
        self._app = app
        self._max_bytes = max_bytes
        self._max_count = max_count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        size = sum(len(name) + len(value) for name, value in headers)
        size += len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
        if len(headers) > self._max_count:
            limit = f"there must be at most {self._max_count} headers. Given: {len(headers)}"
            await _refuse(scope, send, HeadersTooLargeError(limit))
        elif size > self._max_bytes:
            limit = f"path, query and headers must have at most {self._max_bytes} bytes. Given: {size}"
            await _refuse(scope, send, HeadersTooLargeError(limit))
        else:
            await self._app(scope, receive, send)


async def _refuse(
    scope: Scope, send: Send, error: KitfoxError, more_headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    is_anthropic = path_below_root(scope).startswith("/v1/messages")
    body = msgspec.json.encode(anthropic.error_body(error) if is_anthropic else error_body(error))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more_headers]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def bounded_protocol(max_header_bytes: int) -> type | str:
    """uvicorn's HTTP protocol with a bound on headers that never end; h11 has one of its own."""
    try:
        from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedProtocol(HttpToolsProtocol):
        """Closes a connection whose headers have outgrown the limit before they ended."""

        header_bytes: int | None = 0  # of the request being read; None while its body is

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.header_bytes = 0

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            self.header_bytes = None

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.header_bytes is None or self.transport.is_closing():
                return
            self.header_bytes += len(data)
            if self.header_bytes > max_header_bytes:
                self.transport.write(STATUS_LINE[431] + b"content-length: 0\r\nconnection: close\r\n\r\n")
                self.transport.close()

    return BoundedProtocol
