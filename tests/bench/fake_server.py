"""A server that speaks OpenAI's streaming API from scripts, on a socket, in a thread of its own.

    python -m tests.bench.fake_server --port 8000 --ttft-ms 80 --itl-ms 20

Its tokenizer is a toy: a space with one to five small letters is one token, any other byte is one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

MODEL = "fake"
MAX_MODEL_LEN = 1 << 20

Body = dict[str, Any]


@dataclass(frozen=True)
class Script:
    """How one request is answered.

    Attributes:
        pieces: what the body consists of, each part after a pause in seconds.
        head_delay_s: pause before the head, which comes with the first piece if that has no pause.
        framing: how the end of the body is known.
        split: at most so many bytes are written at a time, chunks' own sizes included; None writes whole pieces.
        end: after the last piece: the end of the response, the connection cut before it, or nothing more.
        raw: this and no HTTP response, before `end`.
    """

    pieces: tuple[tuple[float, bytes], ...] = ()
    status: int = 200
    content_type: str = "text/event-stream"
    head_delay_s: float = 0.0
    framing: Literal["chunked", "length", "close"] = "chunked"
    split: int | None = None
    end: Literal["whole", "cut", "hang"] = "whole"
    raw: bytes | None = None


def event(content: Any) -> bytes:
    """One server-sent event."""
    data = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return f"data: {data}\n\n".encode()


def stream(
    body: Body,
    *,
    tokens: int | None = None,
    per_chunk: int = 1,
    ttft_s: float = 0.0,
    itl_s: float = 0.0,
    with_usage: bool = True,
    prompt_tokens: int | None = None,
    cached_tokens: int | None = None,
) -> tuple[tuple[float, bytes], ...]:
    """Pieces of an answer to a completion or a chat: chunks, the usage, [DONE].

    Args:
        tokens: in the answer; None makes as many as were asked for.
        per_chunk: tokens of each chunk; the last may have fewer.
        ttft_s, itl_s: pause before the first chunk and before each later one.
        prompt_tokens: None counts those of the prompt.
    """
    count = body["max_tokens"] if tokens is None else tokens
    ids = tokenize(" token" * count)
    pieces = []
    for start in range(0, count, per_chunk):
        part = ids[start : start + per_chunk]
        ends = start + per_chunk >= count
        choice: Body = {"index": 0, "finish_reason": "length" if ends else None}
        text = detokenize(part)
        choice |= {"delta": {"content": text}} if "messages" in body else {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = part
        chunk = {"id": "answer-1", "object": "text_completion", "model": MODEL, "choices": [choice], "usage": None}
        pieces.append((itl_s if start else ttft_s, event(chunk)))
    if with_usage:
        usage: Body = {"completion_tokens": count}
        usage["prompt_tokens"] = count_prompt_tokens(body) if prompt_tokens is None else prompt_tokens
        if cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        pieces.append((0.0, event({"id": "answer-1", "choices": [], "usage": usage})))
    pieces.append((0.0, event("[DONE]")))
    return tuple(pieces)


def answer_at_once(body: Body) -> Script:
    return Script(stream(body))


class FakeServer:
    """Runs from `with` to its end. `respond` says how a completion is answered; other endpoints answer as one expects.

    Attributes:
        requests: bodies of the completions asked for, in the order of their arrival.
    """

    def __init__(self, respond: Callable[[Body], Script] = answer_at_once, port: int = 0):
        self.requests: list[Body] = []
        self.port = port
        self._respond = respond
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        connections = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = re.search(r"content-length: *(\d+)", head, re.IGNORECASE)
            content = await reader.readexactly(int(length[1])) if length else b""
            await self._play(self._script(head.split()[1], json.loads(content or b"{}")), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, or the server does
        finally:
            writer.close()

    def _script(self, path: str, body: Body) -> Script:
        match path:
            case "/v1/completions" | "/v1/chat/completions":
                self.requests.append(body)
                return self._respond(body)
            case "/health":
                return _json({})
            case "/v1/models":
                model = {"id": MODEL, "object": "model", "max_model_len": MAX_MODEL_LEN}
                return _json({"object": "list", "data": [model]})
            case "/tokenize":
                ids = tokenize(body["prompt"] if "prompt" in body else body["content"])
                return _json({"tokens": ids, "count": len(ids), "max_model_len": MAX_MODEL_LEN})
            case "/detokenize":
                text = detokenize(body["tokens"])
                return _json({"prompt": text, "content": text})
        return _json({"error": {"message": f"no such path: {path}"}}, status=404)

    async def _play(self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(script.head_delay_s)
        waiting = _head(script) if script.raw is None else script.raw
        for delay_s, piece in script.pieces:
            if delay_s:
                await _write(writer, waiting, script.split)
                waiting = b""
                await asyncio.sleep(delay_s)
            waiting += b"%x\r\n%b\r\n" % (len(piece), piece) if script.framing == "chunked" else piece
        if script.end == "whole" and script.framing == "chunked" and script.raw is None:
            waiting += b"0\r\n\r\n"
        await _write(writer, waiting, script.split)
        if script.end == "hang":
            await reader.read()


def _json(content: Any, status: int = 200) -> Script:
    return Script(((0.0, json.dumps(content).encode()),), status, "application/json", framing="length")


def failure(status: int, message: str) -> Script:
    """An answer of the kind of OpenAI's errors."""
    return _json({"error": {"message": message, "type": "an_error", "code": None}}, status)


def _head(script: Script) -> bytes:
    lines = [f"HTTP/1.1 {script.status} Whatever", f"Content-Type: {script.content_type}", "Connection: close"]
    if script.framing == "chunked":
        lines.append("Transfer-Encoding: chunked")
    if script.framing == "length":
        lines.append(f"Content-Length: {sum(len(piece) for _, piece in script.pieces)}")
    return "\r\n".join([*lines, "", ""]).encode()


async def _write(writer: asyncio.StreamWriter, data: bytes, split: int | None) -> None:
    size = split or max(len(data), 1)
    for start in range(0, len(data), size):
        writer.write(data[start : start + size])
        await writer.drain()
        if split:
            await asyncio.sleep(0)


# ---- the toy tokenizer ----------------------------------------------------------------------------------------------

_NUM_BYTES = 256
_TOKEN = re.compile(r" [a-z]{1,5}|.", re.DOTALL)


def tokenize(text: str) -> list[int]:
    ids: list[int] = []
    for token in _TOKEN.findall(text):
        if len(token) > 1:
            number = 0
            for letter in token[1:]:
                number = number * 26 + ord(letter) - ord("a") + 1
            ids.append(_NUM_BYTES - 1 + number)
        else:
            ids += token.encode()
    return ids


def detokenize(ids: list[int]) -> str:
    return b"".join(map(_bytes_of, ids)).decode(errors="replace")


def _bytes_of(token_id: int) -> bytes:
    if token_id < _NUM_BYTES:
        return bytes([token_id])
    word, number = "", token_id - _NUM_BYTES + 1
    while number:
        number, letter = divmod(number - 1, 26)
        word = chr(ord("a") + letter) + word
    return f" {word}".encode()


def count_prompt_tokens(body: Body) -> int:
    prompt = body.get("prompt")
    if prompt is None:
        prompt = "".join(message["content"] or "" for message in body["messages"])
    return len(tokenize(prompt)) if isinstance(prompt, str) else len(prompt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ttft-ms", type=float, default=0.0, help="pause before each answer's first chunk")
    parser.add_argument("--itl-ms", type=float, default=0.0, help="pause before each later chunk")
    parser.add_argument("--per-chunk", type=int, default=1, help="tokens of a chunk")
    args = parser.parse_args()

    def respond(body: Body) -> Script:
        pieces = stream(body, per_chunk=args.per_chunk, ttft_s=args.ttft_ms / 1e3, itl_s=args.itl_ms / 1e3)
        return Script(pieces)

    with FakeServer(respond, args.port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
