"""Talks to an app in this process, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from kitfox.server.app import make_app
from kitfox.server.options import ServerOptions
from tests.server.fake_llm import MODEL, FakeAsyncLLM
from tests.server.fault_table import CHAT, COMPLETIONS


def send(llm: FakeAsyncLLM, method: str, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
    """One request to a new app over llm; one that generates names the served model unless it says otherwise."""
    return send_all(llm, [(method, path, body)], **kwargs)[0]


def send_all(
    llm: FakeAsyncLLM, requests: list[tuple[str, str, Any]], options: ServerOptions | None = None, **kwargs: Any
) -> list[httpx.Response]:
    """Requests to one new app, one after the other."""

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=make_app(llm, options))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [
                await client.request(method, path, json=_with_model(path, body), **kwargs)
                for method, path, body in requests
            ]

    return asyncio.run(run())


def _with_model(path: str, body: Any) -> Any:
    return {"model": MODEL} | body if path in (COMPLETIONS, CHAT) and isinstance(body, dict) else body
