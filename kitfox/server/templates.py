"""Chat templates that clients send (--trust-request-chat-template), rendered in a process that can be killed.

A template is a program. The sandbox that the model's own runs in keeps it from Python's insides, but not from looping
for ever or filling the memory: here that costs a process and the request, and holds up nobody's stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from kitfox.errors import InvalidParameterError, KitfoxError, RequestError

MAX_TEMPLATE_CHARS = 2**16
MAX_RENDERED_CHARS = 2**22
RENDER_TIMEOUT_S = 2.0
START_TIMEOUT_S = 60.0  # to import what renders; no template's fault
MEMORY_BYTES = 2 * 2**30

T = TypeVar("T")


class CallArguments(dict[str, Any]):
    """Arguments of a call for a template: most want the object, some join texts; this is its own JSON text there."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class TemplateRenderer:
    """Renders one template after the other. Its process starts with the first, and anew when it had to be killed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "templates")
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Do work that calls `render`, beside the event loop and after what came before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """The text of a template (jinja2); called in `run` only.

        Raises:
            RequestError: it fails, or takes too long, too much memory or too much text.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            limit = f"must have at most {MAX_TEMPLATE_CHARS} characters"
            raise InvalidParameterError("chat_template", limit, len(source))
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(pickle.dumps((source, variables)))
            if not self._pipe.poll(RENDER_TIMEOUT_S):
                self._end()
                raise _template_error(f"it takes longer than {RENDER_TIMEOUT_S:g} s to render")
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError):
            self._end()
            raise _template_error("it takes too much memory to render, or crashes") from None
        text = answer[1:].decode()
        if answer[:1] == b"-":
            raise _template_error(text)
        return text

    def _start(self) -> None:
        self._end()
        self._pipe, theirs = Pipe()
        with theirs:
            # Not a multiprocessing child: those run the caller's own program again, which may have no guard for that.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kitfox.server.templates", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        try:
            is_ready = self._pipe.poll(START_TIMEOUT_S) and self._pipe.recv_bytes() == b"+"
        except (EOFError, OSError):
            is_ready = False
        if not is_ready:
            self._end()
            raise KitfoxError("the process that renders chat templates does not start; the server's log says why")

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def stop(self) -> None:
        """End the process at once. What is being rendered fails."""
        process = self._process
        if process is not None:
            process.kill()
        self._thread.shutdown(cancel_futures=True)
        self._end()


def _template_error(problem: str) -> RequestError:
    return RequestError(f"chat_template: {problem}", param="chat_template")


def run_renderer(pipe: Connection) -> None:
    """Render one template after another, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    os.nice(10)
    from kitfox.tokenizer import template_environment

    environment = template_environment()
    with contextlib.suppress(ImportError, OSError, ValueError):  # the deadline is the only limit then
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.RLIM_INFINITY))
    answer = b"+"
    while True:
        pipe.send_bytes(answer)
        try:
            source, variables = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            text = environment.from_string(source).render(**variables)
            if len(text) > MAX_RENDERED_CHARS:
                raise ValueError(f"it renders to more than {MAX_RENDERED_CHARS} characters")
            answer = b"+" + text.encode()
        except Exception as error:  # a template may raise anything; its text is the caller's answer
            answer = b"-" + (str(error) or type(error).__name__).encode("utf-8", "replace")


if __name__ == "__main__":
    run_renderer(Connection(int(sys.argv[1])))
