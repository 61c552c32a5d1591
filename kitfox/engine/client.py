"""How a front end reaches an engine core: the same calls in this process, or to an engine process.

Between processes there are two ZeroMQ PUSH/PULL pairs and msgspec messages; the engine sends one message a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from kitfox.config import EngineConfig, SchedulerConfig
from kitfox.engine.core import EngineCore
from kitfox.errors import EngineDeadError
from kitfox.outputs import EngineOutputs, EngineStats
from kitfox.request import EngineRequest
from kitfox.structured_output.vocabulary import Vocabulary
from kitfox.tracing import TraceEvent

logger = logging.getLogger("kitfox.engine")


class AddRequests(msgspec.Struct, tag="add", frozen=True):
    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, tag="abort", frozen=True):
    request_ids: list[str]


class UseVocabulary(msgspec.Struct, tag="vocabulary", frozen=True):
    """Comes before the first request: what grammars need to know of the tokenizer."""

    vocabulary: Vocabulary


Command = Literal[
    "trace",
    "flush_cache",
    "pause",
    "resume",
    "sleep",
    "wake_up",
    "start_profile",
    "stop_profile",
    "load_adapter",
    "unload_adapter",
    "set_scheduling",
    "slow_down",
    "freeze_gc",
]


class ControlEngine(msgspec.Struct, tag="control", frozen=True):
    """Do something between two steps; a `ControlAnswer` of the same number follows.

    Attributes:
        request_id: for "trace".
        adapter_id: for "load_adapter", which has a path too, and "unload_adapter".
        scheduling: for "set_scheduling".
        step_sleep_s: for "slow_down".
    """

    number: int
    command: Command
    request_id: str = ""
    adapter_id: int = 0
    path: str = ""
    scheduling: SchedulerConfig | None = None
    step_sleep_s: float = 0.0


class StopEngine(msgspec.Struct, tag="stop", frozen=True):
    pass


EngineMessage = AddRequests | AbortRequests | UseVocabulary | ControlEngine | StopEngine


class EngineReady(msgspec.Struct, tag="ready", frozen=True):
    """The engine can serve: what it really allocated, what it computes on, how long each phase of its start took."""

    num_blocks: int
    block_size: int
    phases: list[tuple[str, float]]
    kernels: str = ""
    device: str = ""
    num_threads: int = 0


class StepDone(msgspec.Struct, tag="step", frozen=True):
    outputs: EngineOutputs


class ControlAnswer(msgspec.Struct, tag="control", frozen=True):
    """What a command came to: whether it was done in full, or why not; the engine afterwards; what was asked for."""

    number: int
    done: bool
    stats: EngineStats
    events: list[TraceEvent] = []
    problem: str = ""


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """The engine is about to exit; `cause` is one line, `detail` the traceback for the log."""

    cause: str
    detail: str


EngineReply = EngineReady | StepDone | ControlAnswer | EngineFailed

encoder = msgspec.msgpack.Encoder()
message_decoder = msgspec.msgpack.Decoder(EngineMessage)
reply_decoder = msgspec.msgpack.Decoder(EngineReply)


class EngineClient(ABC):
    """Hand requests to an engine core and take their news back."""

    @abstractmethod
    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue checked requests in the core."""

    @abstractmethod
    def abort(self, request_ids: list[str]) -> None:
        """End requests in whatever state they are; unknown ids are harmless."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the core and give back what it holds. May be called twice."""


class InProcessClient(EngineClient):
    """The core in this process; the caller turns the crank."""

    def __init__(self, core: EngineCore):
        self.core = core

    def add_requests(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            self.core.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        self.core.abort(request_ids)

    def step(self) -> EngineOutputs:
        if not self.core.has_work and self.core.waits_for_grammars:
            self.core.wait_for_grammars()
        return self.core.step()

    @property
    def has_work(self) -> bool:
        return self.core.has_work or self.core.waits_for_grammars

    def shutdown(self) -> None:
        self.core.shutdown()


class ProcessClient(EngineClient):
    """The core in a process of its own, so that this one needs no torch and never waits for a step."""

    def __init__(self, config: EngineConfig, num_blocks: int, run_engine: Callable[..., None]):
        """Start the process.

        Args:
            run_engine: a module-level function `(config, num_blocks, requests_address, replies_address)`; it is the
                target of the new process.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="kitfox-")
        requests_address = f"ipc://{self._folder.name}/requests"
        replies_address = f"ipc://{self._folder.name}/replies"
        context = zmq.asyncio.Context.instance()
        self._requests = context.socket(zmq.PUSH)
        self._requests.set_hwm(0)
        self._requests.bind(requests_address)
        self._replies = context.socket(zmq.PULL)
        self._replies.set_hwm(0)
        self._replies.bind(replies_address)
        # zmq.asyncio sends return futures; a plain shadow of the same socket sends at once, and the queue is unbounded.
        self._send_socket: zmq.Socket[bytes] = zmq.Socket.shadow(self._requests)
        self._backlog: deque[bytes] = deque()  # a socket takes nothing before the process has connected to it
        self._has_connected = False
        self.process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=(config, num_blocks, requests_address, replies_address), name="kitfox-engine"
        )
        self.process.start()

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def _send(self, message: EngineMessage) -> None:
        self._backlog.append(encoder.encode(message))
        self._send_backlog()

    def _send_backlog(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._backlog:
                self._send_socket.send(self._backlog[0], zmq.NOBLOCK)
                self._backlog.popleft()

    def add_requests(self, requests: list[EngineRequest]) -> None:
        self._send(AddRequests(requests))

    def abort(self, request_ids: list[str]) -> None:
        self._send(AbortRequests(request_ids))

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        """To be called before the first request."""
        self._send(UseVocabulary(vocabulary))

    def control(self, message: ControlEngine) -> None:
        """Send a command; its ControlAnswer follows."""
        self._send(message)

    async def receive(self) -> EngineReply:
        """The next reply.

        Raises:
            EngineDeadError: the process ended, with its exit code.
        """
        loop = asyncio.get_running_loop()
        died = asyncio.Event()
        sentinel = self.process.sentinel
        loop.add_reader(sentinel, died.set)
        reply = asyncio.ensure_future(self._receive_bytes())
        death = asyncio.ensure_future(died.wait())
        try:
            await asyncio.wait((reply, death), return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():  # its last words may still be on the way
                await asyncio.wait((reply,), timeout=0.2)
            if not reply.done():
                raise EngineDeadError(f"the engine process ended with exit code {self.process.exitcode}")
            if not self._has_connected:
                await self._send_what_has_waited()
            return reply_decoder.decode(reply.result())
        finally:
            loop.remove_reader(sentinel)
            reply.cancel()
            death.cancel()

    async def _send_what_has_waited(self) -> None:
        """The process speaks; that its other socket is connected too may take a moment more."""
        poller = zmq.asyncio.Poller()
        poller.register(self._requests, zmq.POLLOUT)
        while self.process.is_alive() and not await poller.poll(1000):
            pass
        self._send_backlog()
        self._has_connected = True

    async def _receive_bytes(self) -> bytes:
        return await self._replies.recv()

    def shutdown(self) -> None:
        if self._requests.closed:
            return
        if self.process.is_alive():
            self._send(StopEngine())
            self.process.join(timeout=2.0)
        if self.process.is_alive():
            logger.warning("the engine process %s did not stop in 2 s; it is killed", self.process.pid)
            self.process.kill()
            self.process.join()
        for socket in (self._requests, self._replies):
            socket.close(linger=0)
        self._folder.cleanup()


def exit_with_parent() -> None:
    """End this process when the one that started it ends, however it ended."""
    import threading

    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait_for_parent() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=wait_for_parent, daemon=True, name="parent-watch").start()
