"""`kitfox chat`: a conversation in the terminal over HTTP, with a server that runs already or one started for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kitfox.bench.servers import StartedServer, free_port, stop_on_signals
from kitfox.errors import EngineDeadError, KitfoxError, ModelNotFoundError
from kitfox.server.options import api_key_of_environment
from kitfox.weights.hub import DEFAULT_MODEL, resolve_model

USUAL_URL = "http://127.0.0.1:8000"
HELP = "/exit leaves, Ctrl-C stops an answer; a message that begins with / needs a space before it"


@dataclass(frozen=True)
class ChatOptions:
    """What `kitfox chat` was told; None leaves a choice to the server."""

    model: str | None = None
    base_url: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


def run_chat(options: ChatOptions) -> None:
    """Converse until /exit or the end of the input.

    Raises:
        EngineDeadError: the server cannot be reached or does not start.
    """
    console = Console()
    with _server(options, console) as base_url:
        served = _served_models(base_url)
        if not served:
            raise EngineDeadError(f"no kitfox server answers at {base_url}")
        if options.model not in (None, *served):
            raise ModelNotFoundError(f"{base_url} serves {', '.join(served)}, not {options.model}", param="model")
        model = options.model or served[0]
        console.print(f"[dim]{model} at {base_url}. /exit leaves, Ctrl-C stops an answer.[/dim]")
        messages = [{"role": "system", "content": options.system}] if options.system else []
        while (text := _ask()) is not None:
            messages.append({"role": "user", "content": text})
            answer = _answer(base_url, model, messages, options, console)
            if answer:
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()  # a question without an answer would confuse the next turn


def stream_answer(base_url: str, body: dict[str, Any]) -> Iterator[str]:
    """Pieces of the text of one chat completion, as they arrive.

    Raises:
        KitfoxError: the server refused the request or broke off; the message is the server's.
    """
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"} | _authorization(),
    )
    try:
        with urllib.request.urlopen(request) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data:").strip()
                if not line.startswith(b"data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise KitfoxError(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""
    except urllib.error.HTTPError as error:
        raise KitfoxError(_error_message(error)) from error
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
        raise KitfoxError(f"the connection to {base_url} broke: {error}") from error


def _answer(
    base_url: str, model: str, messages: list[dict[str, Any]], options: ChatOptions, console: Console
) -> str | None:
    """Print one answer as it comes; None when there is none. Ctrl-C keeps what has come so far."""
    body: dict[str, Any] = {"model": model, "messages": messages}
    body |= {"max_tokens": options.max_tokens} if options.max_tokens is not None else {}
    body |= {"temperature": options.temperature} if options.temperature is not None else {}
    pieces: list[str] = []
    stream = stream_answer(base_url, body)
    try:
        for piece in stream:
            pieces.append(piece)
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        stream.close()  # type: ignore[attr-defined]  # closes the connection, so the server frees the blocks
        console.print(" [dim](stopped)[/dim]", end="")
    except KitfoxError as error:
        console.print(f"[red]{type(error).__name__}[/red]: ", end="")
        console.print(error.message, markup=False, end="")
    console.print()
    return "".join(pieces) or None


def _ask() -> str | None:
    """The next message; None to leave."""
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return None
        text = line.strip()
        if text in ("/exit", "/quit"):
            return None
        if line.startswith("/"):
            print(HELP)
        elif text:
            return text


@contextlib.contextmanager
def _server(options: ChatOptions, console: Console) -> Iterator[str]:
    """The address of a server; one that is started here is stopped at the end."""
    if options.base_url is not None:
        yield options.base_url.rstrip("/").removesuffix("/v1")
        return
    served = _served_models(USUAL_URL)
    if served and options.model in (None, *served):
        yield USUAL_URL
        return
    model = options.model or DEFAULT_MODEL
    resolve_model(model)  # fetched here if need be, where its progress is seen
    port = free_port()
    command = [sys.executable, "-m", "kitfox", "serve", model, "--port", str(port), "--log-level", "warning"]
    stop_on_signals()  # SIGHUP: the terminal was closed
    with tempfile.TemporaryDirectory(prefix="kitfox-chat-") as folder:
        server = StartedServer(command, port, Path(folder) / "server.log")
        with contextlib.ExitStack() as started:
            with console.status("starting a server"):
                started.enter_context(server)
            yield server.base_url


def _served_models(base_url: str) -> list[str]:
    """Names a server answers to; empty when no server is there."""
    try:
        request = urllib.request.Request(f"{base_url}/v1/models", headers=_authorization())
        with urllib.request.urlopen(request, timeout=2) as response:
            return [card["id"] for card in json.load(response)["data"]]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return []


def _authorization() -> dict[str, str]:
    """A server that is started here reads its key from the same environment."""
    key = api_key_of_environment()
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _error_message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code} {error.reason}"
