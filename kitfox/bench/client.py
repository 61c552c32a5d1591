"""Sends a workload's requests over HTTP and times what comes back, at the socket.

`drive` decides when sessions start and runs their turns. Each request is an `_Exchange`: one connection, closed again
after it. What comes over it goes into an `Answer` together with the time of the read, taken before a byte of it is
looked at; if one read brings several events, all of them have its time.

Servers are held to what they were asked: an answer of the wrong length is a failure. Where a server counts no tokens,
its answers have None for a count, and nothing is made up in its place.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import math
import random
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

import httptools
import msgspec

from kitfox.bench.records import Arrivals, BenchRequest, Failure, FailureKind, Record, Session, Workload
from kitfox.errors import ConfigError

Clock = Callable[[], float]

_OWN_FIELDS = ("model", "prompt", "messages", "max_tokens", "stream")
_LONGEST_DETAIL = 300
_KEPT_BODY_BYTES = 1 << 16  # of a body that is no stream: enough for any error message
_FAREWELL_S = 1.0  # for a server to end its response after [DONE]: closing sooner would look like an abort to it


@dataclass(frozen=True)
class Target:
    """A server, and what each request to it carries besides its prompt and length.

    Attributes:
        base_url: `http://host:port`, or https; a path goes before /v1, and a /v1 at the end is understood.
        extra: merged into each body; None takes a field out again, for servers that refuse those they do not know.
        ignore_eos: ask for exactly max_tokens tokens and hold the server to it.
        timeout_s: for a whole request.
        prompts: whether the server takes token ids in /v1/completions. Text it takes always.
        count_chunk_tokens: ask for each chunk's token ids (`return_token_ids`), to know how many it has. Other ways to
            count are understood when `extra` asks for them: logprobs, `continuous_usage_stats`, `timings_per_token`.
    """

    base_url: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict)
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout_s: float = 600.0
    api_key: str | None = field(default=None, repr=False)
    prompts: Literal["ids", "text"] = "ids"
    count_chunk_tokens: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for an address or a field of `extra` that cannot be."""
        try:
            is_address = self._url.scheme in ("http", "https") and self._url.hostname and self.port
        except ValueError:  # of a port
            is_address = False
        if not is_address or self._url.username or self._url.query or self._url.fragment:
            raise ConfigError(f"base_url must look like http://host:port. Given: {self.base_url!r}", param="base_url")
        if own := [name for name in _OWN_FIELDS if name in self.extra]:
            raise ConfigError(f"extra may not set {', '.join(own)}: the workload does", param="extra")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be above 0. Given: {self.timeout_s}", param="timeout_s")

    @functools.cached_property
    def _url(self) -> SplitResult:
        return urlsplit(self.base_url)

    @property
    def host(self) -> str:
        return self._url.hostname or ""

    @property
    def port(self) -> int:
        return self._url.port or (443 if self._url.scheme == "https" else 80)

    @functools.cached_property
    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self._url.scheme == "https" else None

    def encode(self, request: BenchRequest) -> bytes:
        """The HTTP request as it goes over the wire."""
        endpoint = "completions" if request.messages is None else "chat/completions"
        body = msgspec.json.encode(self._body(request))
        head = (
            f"POST {self._url.path.rstrip('/').removesuffix('/v1')}/v1/{endpoint} HTTP/1.1\r\n"
            f"Host: {self._url.netloc}\r\nConnection: close\r\nAccept: text/event-stream\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        if self.api_key is not None:
            head += f"Authorization: Bearer {self.api_key}\r\n"
        return f"{head}\r\n".encode() + body

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model}
        if request.messages is not None:
            body["messages"] = request.messages
            if request.tools is not None:
                body["tools"] = request.tools
        else:
            body["prompt"] = request.token_ids if request.text is None else request.text
        body |= {
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.count_chunk_tokens:
            body["return_token_ids"] = True
        return {name: value for name, value in (body | self.extra).items() if value is not None}


# ---- when -----------------------------------------------------------------------------------------------------------


def start_times(arrivals: Arrivals, sessions: Sequence[Session], seed: int) -> list[float] | None:
    """When each session starts, in seconds from the first possible moment; None for a closed loop.

    With a rate, the first session starts at 0 and the gaps after it are drawn; equal seeds draw equal gaps.

    Raises:
        ConfigError: a concurrency below 1; a rate, burstiness or speed that is missing or not above 0; a session of a
            trace without a time.
    """
    if arrivals.kind == "closed":
        if arrivals.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1. Given: {arrivals.concurrency}", param="concurrency")
        return None
    if arrivals.kind == "trace":
        speed = _positive("speed", arrivals.speed)
        times = [session.at_s / speed for session in sessions if session.at_s is not None]
        if len(times) < len(sessions):
            missing = next(index for index, session in enumerate(sessions) if session.at_s is None)
            raise ConfigError(f"trace arrivals need a time for each session; session {missing} has none")
        return times
    rate = _positive("rate", arrivals.rate)
    shape = 1.0 if arrivals.kind == "poisson" else _positive("burstiness", arrivals.burstiness)
    rng = random.Random(f"arrivals {seed}")  # not the numbers that a workload of this seed draws
    gaps = [rng.gammavariate(shape, 1 / (rate * shape)) for _ in sessions[1:]]
    return list(itertools.accumulate(gaps, initial=0.0))


def _positive(name: str, value: float | None) -> float:
    if value is None or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be above 0. Given: {value}", param=name)
    return value


# ---- sending --------------------------------------------------------------------------------------------------------


async def send(
    target: Target,
    request: BenchRequest,
    *,
    session: int = 0,
    turn: int = 0,
    planned_s: float | None = None,
    clock: Clock = time.perf_counter,
) -> Record:
    """One request. What goes wrong on the way or at the server is the record's failure, never an exception."""
    _check_prompt(target, request)
    return await _Exchange(target, request, session, turn, planned_s, clock).run()


async def drive(
    target: Target,
    workload: Workload,
    arrivals: Arrivals,
    seed: int,
    *,
    on_record: Callable[[Record], None] | None = None,
    on_start: Callable[[BenchRequest], None] | None = None,
    stop: asyncio.Event | None = None,
    clock: Clock | None = None,
) -> list[Record]:
    """Send a whole workload; records come in the order in which requests end.

    The turns of a session follow one another. Where a turn fails, those after it cannot be sent as planned: they are
    recorded as failures of the same kind.

    Args:
        on_start, on_record: called when a request begins and when it has ended, once each, and in this order.
        stop: once set, running requests end as interrupted, and what was not sent yet is left out.
        clock: seconds since the run began; None starts one now. Planned times count from now in any case.

    Raises:
        ConfigError: arrivals or a request that cannot be sent; nothing was sent then.
    """
    if not workload.num_requests:
        raise ConfigError(f"workload {workload.name} has no requests")
    for index, session in enumerate(workload.sessions):
        _check_session(target, index, session)
    starts = start_times(arrivals, workload.sessions, seed)
    if stop is not None and stop.is_set():
        return []
    run = _Run(target, clock or _stopwatch(), on_record, on_start)
    if starts is None:
        waiting = iter(enumerate(workload.sessions))
        jobs = [run.sessions(waiting) for _ in range(min(arrivals.concurrency, len(workload.sessions)))]
    else:
        begun = run.clock()
        jobs = [
            run.session_at(begun + start, index, session)
            for start, (index, session) in zip(starts, enumerate(workload.sessions), strict=True)
        ]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job) for job in jobs]
        stopping = group.create_task(_cancel_when(stop, tasks)) if stop is not None else None
        await asyncio.wait(tasks)
        if stopping is not None:
            stopping.cancel()
    return run.records


async def _cancel_when(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    await stop.wait()
    for task in tasks:
        task.cancel()


def _stopwatch() -> Clock:
    begun = time.perf_counter()
    return lambda: time.perf_counter() - begun


def _check_session(target: Target, index: int, session: Session) -> None:
    for turn, request in enumerate(session.requests):
        _check_prompt(target, request)
        wanted = sum(map(_stands_for_answer, request.messages or ()))
        if wanted > turn:
            raise ConfigError(f"request {request.id}, turn {turn} of session {index}, quotes {wanted} answers")


def _check_prompt(target: Target, request: BenchRequest) -> None:
    given = [name for name in ("token_ids", "text", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        raise ConfigError(f"request {request.id} must have one of token_ids, text and messages. Given: {given}")
    if given == ["token_ids"] and target.prompts == "text":
        raise ConfigError(f"request {request.id} has token ids, and {target.base_url} takes text only")


def _stands_for_answer(message: dict[str, Any]) -> bool:
    """An assistant message that calls tools has no content either, but is whole."""
    return message.get("role") == "assistant" and message.get("content") is None and not message.get("tool_calls")


def _with_answers(request: BenchRequest, answers: list[str]) -> BenchRequest:
    if request.messages is None:
        return request
    texts = iter(answers)
    messages = (
        message | {"content": next(texts)} if _stands_for_answer(message) else message for message in request.messages
    )
    return dataclasses.replace(request, messages=tuple(messages))


class _Run:
    """The records of one `drive` and how sessions add to them."""

    def __init__(
        self,
        target: Target,
        clock: Clock,
        on_record: Callable[[Record], None] | None,
        on_start: Callable[[BenchRequest], None] | None,
    ):
        self.clock = clock
        self.records: list[Record] = []
        self._target, self._on_record, self._on_start = target, on_record, on_start

    async def sessions(self, waiting: Iterator[tuple[int, Session]]) -> None:
        for index, session in waiting:
            await self._session(index, session, None)

    async def session_at(self, planned_s: float, index: int, session: Session) -> None:
        await asyncio.sleep(planned_s - self.clock())
        await self._session(index, session, planned_s)

    async def _session(self, index: int, session: Session, planned_s: float | None) -> None:
        answers: list[str] = []
        for turn, request in enumerate(session.requests):
            if turn:
                planned_s = None
                await asyncio.sleep(request.think_s)
            self._begin(request)
            filled = _with_answers(request, answers)
            exchange = _Exchange(self._target, filled, index, turn, planned_s, self.clock)
            try:
                record = await exchange.run()
            except asyncio.CancelledError:
                self._end(exchange.cut_short(Failure("interrupted", "the run was stopped")))
                raise
            self._end(record)
            if record.failure is not None:
                self._fail_later_turns(index, session, turn, record.failure)
                return
            answers.append(record.text)

    def _fail_later_turns(self, index: int, session: Session, failed: int, failure: Failure) -> None:
        failure = dataclasses.replace(failure, detail=f"not sent: turn {failed} of its session failed")
        for turn, request in enumerate(session.requests[failed + 1 :], failed + 1):
            self._begin(request)
            self._end(_Exchange(self._target, request, index, turn, None, self.clock).cut_short(failure))

    def _begin(self, request: BenchRequest) -> None:
        if self._on_start is not None:
            self._on_start(request)

    def _end(self, record: Record) -> None:
        self.records.append(record)
        if self._on_record is not None:
            self._on_record(record)


class _Exchange(asyncio.BufferedProtocol):
    """One request on a connection of its own."""

    # All connections read into one buffer, as each read is taken out at once; asyncio would allocate 256 KiB for each.
    _buffer = memoryview(bytearray(1 << 16))

    def __init__(
        self, target: Target, request: BenchRequest, session: int, turn: int, planned_s: float | None, clock: Clock
    ):
        self._target, self._request, self._clock = target, request, clock
        self._session, self._turn, self._planned_s = session, turn, planned_s
        self._answer = Answer()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._farewell: asyncio.TimerHandle | None = None
        self._sent_s = clock()

    async def run(self) -> Record:
        """Cancelled, it closes the connection; `cut_short` then tells how far it came."""
        target, loop = self._target, asyncio.get_running_loop()
        payload = target.encode(self._request)
        transport: asyncio.Transport | None = None
        self._sent_s = self._clock()
        try:
            async with asyncio.timeout(target.timeout_s):
                try:
                    transport, _ = await loop.create_connection(lambda: self, target.host, target.port, ssl=target.tls)
                except OSError as error:
                    return self.cut_short(Failure("refused", _shortened(str(error))))
                transport.write(payload)
                await self._over
        except TimeoutError:
            return self.cut_short(Failure("timeout", f"no complete answer within {target.timeout_s:g} s"))
        finally:
            if self._farewell is not None:
                self._farewell.cancel()
            if transport is not None:
                transport.abort()
        return self._record(self._verdict())

    def cut_short(self, failure: Failure) -> Record:
        """What there is at this moment: failed, unless the answer was complete before."""
        return self._record(failure if self._answer.end_s is None else self._verdict())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        at_s = self._clock()
        answer = self._answer
        answer.receive(bytes(self._buffer[:nbytes]), at_s)
        if answer.is_over:
            self._finish()
        elif answer.is_done and self._farewell is None:
            self._farewell = asyncio.get_running_loop().call_later(_FAREWELL_S, self._finish)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not isinstance(exc, OSError) and not self._over.done():
            self._over.set_exception(exc)  # not the server's doing
            return
        self._answer.close(self._clock(), str(exc) if exc is not None else None)
        self._finish()

    def _finish(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _verdict(self) -> Failure | None:
        """What is wrong with a complete answer. Its length is judged as far as the server's counts tell."""
        if self._answer.failure is not None:
            return self._answer.failure
        asked, counted = self._request.max_tokens, self._answer.output_tokens
        if counted is not None and (counted > asked or (counted < asked and self._target.ignore_eos)):
            return Failure("wrong_token_count", f"{counted} tokens in the answer; {asked} were asked for")
        expected, counted = self._request.prompt_tokens, self._answer.prompt_tokens
        if expected is not None and counted is not None and counted != expected:
            return Failure("wrong_token_count", f"the server counts {counted} tokens in the prompt; it has {expected}")
        return None

    def _record(self, failure: Failure | None) -> Record:
        answer, request = self._answer, self._request
        return Record(
            request_id=request.id,
            session=self._session,
            turn=self._turn,
            asked_tokens=request.max_tokens,
            expected_prompt_tokens=request.prompt_tokens,
            planned_s=self._planned_s,
            sent_s=self._sent_s,
            chunk_s=tuple(answer.chunk_s),
            chunk_tokens=answer.chunk_tokens,
            end_s=self._clock() if answer.end_s is None else answer.end_s,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            cached_tokens=answer.cached_tokens,
            finish_reason=answer.finish_reason,
            text=answer.text,
            failure=failure,
        )


# ---- reading --------------------------------------------------------------------------------------------------------


class Answer:
    """What a server has sent in answer to one request. Bytes and times go in; it knows nothing of sockets.

    Text is what an answer says: reasoning and tool calls count as tokens that arrive and are not kept.

    Attributes:
        chunk_s: when each event with text or tokens arrived.
        is_done: [DONE] was there. is_over: nothing more is expected.
        end_s: when either came first; None until then.
        failure: what was wrong with the response itself, once it is over.
    """

    def __init__(self) -> None:
        self.chunk_s: list[float] = []
        self.finish_reason: str | None = None
        self.is_done = self.is_over = False
        self.end_s: float | None = None
        self.failure: Failure | None = None
        self._at_s = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._status: int | None = None
        self._content_type = ""
        self._has_length = False  # the response tells where it ends, by its length or in chunks
        self._events = EventSplitter()
        self._body = bytearray()  # of a response that is no stream
        self._texts: list[str] = []
        self._counts: list[int] = []  # tokens of a chunk, one each as long as all chunks have a count
        self._counted = 0
        self._usage: _Usage | None = None
        self._timings: _Timings | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def chunk_tokens(self) -> tuple[int, ...]:
        """Empty unless all chunks have a count and the counts add up to the server's sum."""
        counted = len(self._counts) == len(self.chunk_s) and self._counted == self.output_tokens
        return tuple(self._counts) if counted else ()

    @property
    def output_tokens(self) -> int | None:
        """The server's sum; where it gives none, that of its chunks, if each of them has a count."""
        if self._usage is not None and self._usage.completion_tokens is not None:
            return self._usage.completion_tokens
        if self._timings is not None and self._timings.predicted_n is not None:
            return self._timings.predicted_n
        return self._counted if self._counts and len(self._counts) == len(self.chunk_s) else None

    @property
    def prompt_tokens(self) -> int | None:
        if self._usage is not None and self._usage.prompt_tokens is not None:
            return self._usage.prompt_tokens
        timings = self._timings
        if timings is None or timings.prompt_n is None or timings.cache_n is None:
            return None
        return timings.prompt_n + timings.cache_n

    @property
    def cached_tokens(self) -> int | None:
        details = self._usage.prompt_tokens_details if self._usage is not None else None
        if details is not None and details.cached_tokens is not None:
            return details.cached_tokens
        return self._timings.cache_n if self._timings is not None else None

    def receive(self, data: bytes, at_s: float) -> None:
        """The next bytes, and when they were read."""
        if self.is_over:
            return
        self._at_s = at_s
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail("broken_stream", f"not HTTP: {error}")

    def close(self, at_s: float, error: str | None = None) -> None:
        """The connection has ended, with an error or without."""
        self._at_s = at_s
        if self.is_over:
            return
        if self._status is not None and (self._status != 200 or (error is None and not self._has_length)):
            self._end_body()
        elif not self.is_done:
            how = f" ({error})" if error else ""
            self._fail("broken_stream", f"the connection ended in the middle of the response{how}")
        self._end()

    # ---- called by the parser -------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.decode("latin-1").split(";")[0].strip().lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._status = status if status >= 200 else None  # another head follows a 100

    def on_body(self, body: bytes) -> None:
        if not self._is_stream:
            self._body += body[: _KEPT_BODY_BYTES - len(self._body)]
            return
        for data in self._events.feed(body):
            self._take(data)

    def on_message_complete(self) -> None:
        if self._status is not None:
            self._end_body()

    # ---- events -----------------------------------------------------------------------------------------------------

    @property
    def _is_stream(self) -> bool:
        return self._status == 200 and self._content_type == "text/event-stream"

    def _end_body(self) -> None:
        if self._status != 200:
            self._fail("http_status", _message(bytes(self._body)) or "no message", self._status)
        elif not self._is_stream:
            kind = self._content_type or "no content type"
            self._fail("broken_stream", f"{kind} instead of a stream: {self._body.decode(errors='replace')}")
        else:
            for data in self._events.end():
                self._take(data)
            if not self.is_done and not (self.finish_reason and self._has_length):
                self._fail("broken_stream", "the stream ended without [DONE]")
        self._end()

    def _take(self, data: bytes) -> None:
        if self.is_over:
            return
        if self.is_done:
            self._fail("broken_stream", f"after [DONE] came {_shown(data)}")
        elif data == b"[DONE]":
            self.is_done, self.end_s = True, self._at_s
            if not self.chunk_s and self.finish_reason is None:
                self._fail("broken_stream", "the stream had nothing in it but [DONE]")
        else:
            try:
                event = _decode_event(data)
            except msgspec.MsgspecError as error:
                self._fail("broken_stream", f"an event is not what OpenAI's API sends, {error}: {_shown(data)}")
            else:
                self._take_event(event, data)

    def _take_event(self, event: _Event, data: bytes) -> None:
        if event.error is not None or event.object == "error":
            self._fail("broken_stream", f"the server reports an error: {_message(data)}")
            return
        if event.choices is None:
            self._fail("broken_stream", f"an event without choices: {_shown(data)}")
            return
        has_arrived, count = False, None
        for choice in event.choices:
            delta = choice.delta
            text = choice.text if delta is None else delta.content
            if text:
                self._texts.append(text)
            tokens = choice.num_tokens
            if tokens is not None:
                count = tokens + (count or 0)
            has_arrived |= bool(text or tokens or (delta is not None and delta.has_more))
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
        if event.usage is not None:
            self._usage = event.usage
        if event.timings is not None:
            self._timings = event.timings
        if has_arrived:
            if count is None and event.total_tokens is not None:
                count = event.total_tokens - self._counted
            if count is not None:
                self._counts.append(count)
                self._counted += count
            self.chunk_s.append(self._at_s)

    def _fail(self, kind: FailureKind, detail: str, status: int | None = None) -> None:
        if not self.is_over:
            self.failure = Failure(kind, _shortened(detail), status)
            self.end_s = self._at_s
            self._end()

    def _end(self) -> None:
        self.is_over = True
        if self.end_s is None:
            self.end_s = self._at_s


class EventSplitter:
    """Takes the data of server-sent events out of bytes, however these are cut."""

    def __init__(self) -> None:
        self._rest = b""  # a line that has not ended
        self._data: list[bytes] = []  # lines of an event that has not ended
        self._after_return = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ends in this piece."""
        if self._after_return and piece.startswith(b"\n"):
            piece = piece[1:]  # the second half of a line's end that was cut in two
        self._after_return = piece.endswith(b"\r")
        lines = (self._rest + piece).splitlines(keepends=True)
        self._rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        events = []
        for line in lines:
            if line[0] in b"\r\n":
                if self._data:
                    events += self._event()
            else:
                self._take_line(line)
        return events

    def end(self) -> list[bytes]:
        """The data of an event that was not closed by an empty line before everything ended."""
        self._take_line(self._rest)
        self._rest = b""
        return self._event() if self._data else []

    def _take_line(self, line: bytes) -> None:
        if line.startswith(b"data:"):  # other fields and comments say nothing about an answer
            self._data.append(line[5:].rstrip(b"\r\n").removeprefix(b" "))

    def _event(self) -> list[bytes]:
        data, self._data = b"\n".join(self._data), []
        return [data]


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_more(self) -> bool:
        return bool(self.reasoning or self.reasoning_content or self.tool_calls)


class _Skipped(msgspec.Struct, gc=False):
    pass


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Skipped] | None = None
    tokens: list[Any] | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None

    @property
    def num_tokens(self) -> int | None:
        if self.token_ids is not None:
            return len(self.token_ids)
        if self.logprobs is None:
            return None
        entries = self.logprobs.content if self.logprobs.tokens is None else self.logprobs.tokens
        return len(entries) if entries is not None else None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Timings(msgspec.Struct, gc=False):
    """llama.cpp's: prompt_n leaves out the cache_n tokens that were not computed."""

    prompt_n: int | None = None
    cache_n: int | None = None
    predicted_n: int | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None
    object: str | None = None

    @property
    def total_tokens(self) -> int | None:
        """Tokens of the answer up to this event, for servers that say so in each."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return self.usage.completion_tokens
        return self.timings.predicted_n if self.timings is not None else None


_decode_event = msgspec.json.Decoder(_Event).decode


def _message(body: bytes) -> str:
    """What an error body says; all of it, where it is not one of the usual kinds."""
    try:
        content = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        content = None
    if isinstance(content, dict):
        error = content.get("error", content)
        message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
        if isinstance(message, str):
            return message
    return body.decode(errors="replace")


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_DETAIL else f"{text[: _LONGEST_DETAIL - 3]}..."


def _shown(data: bytes) -> str:
    return data[:_LONGEST_DETAIL].decode(errors="replace")
