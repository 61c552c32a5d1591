"""Batches: files of requests that are answered beside live traffic, when it leaves room, and across restarts.

Each line goes through the application like a request from outside, so that every endpoint, check and limit is the same.
Only what moves a batch to another status is saved at once; which lines are answered is read from the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.types import Message, Scope

from kitfox.errors import ConflictError, InvalidParameterError, KitfoxError, NotFoundError, QueueFullError, RequestError
from kitfox.server.files import FileStore, page_of, write_whole
from kitfox.server.options import ServerOptions
from kitfox.server.validation import convert_body, decode_json, read_json_object, with_ignored

if TYPE_CHECKING:
    from kitfox.engine.async_llm import AsyncLLM

logger = logging.getLogger("kitfox.server")

BATCH_ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/score",
    "/v1/rerank",
)  # fmt: skip
NOT_IN_BATCHES = ("stream", "stream_options", "background")  # left out of lines: an answer is one whole object
COMPLETION_WINDOW = "24h"
COMPLETION_WINDOW_S = 24 * 3600
MAX_LINES = 50_000
MAX_UNFINISHED_BATCHES = 100
MAX_REPORTED_ERRORS = 100  # of a file that cannot be used
MAX_CUSTOM_ID_CHARS = 512
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_LISTED_BATCHES = 100
MAX_ATTEMPTS = 3  # at a line with which the engine fails: it may not be the line's fault
LOWEST_PRIORITY = 2**31 - 1
ROOM_POLL_S = 0.005
TAKE_OVER_POLL_S = 5.0

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip
FINAL = ("failed", "completed", "expired", "cancelled")


# ---- what clients send and see --------------------------------------------------------------------------------------


class BatchRequest(msgspec.Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] = {}


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, kw_only=True):
    """A batch as it is saved. Times are Unix seconds, and None until they come."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    metadata: dict[str, str] = {}
    errors: list[Problem] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    def move(self, status: Status) -> None:
        """Change the status and note when."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's object."""
        shown: dict[str, Any] = msgspec.to_builtins(self) | {"object": "batch"}
        counts = {name: shown.pop(name) for name in ("total", "completed", "failed")}
        shown["request_counts"] = counts
        shown["errors"] = {"object": "list", "data": shown["errors"]} if self.errors else None
        return shown


class Line(msgspec.Struct, kw_only=True):
    """One request of a batch, checked."""

    number: int
    custom_id: str
    body: dict[str, Any]


# ---- the input file -------------------------------------------------------------------------------------------------


def iter_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of all lines that are not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def check_input(path: Path, endpoint: str, max_line_bytes: int) -> tuple[int, list[Problem]]:
    """How many requests a file holds, and what is wrong with it; it may be used if there is nothing."""
    problems: list[Problem] = []
    custom_ids: dict[str, int] = {}
    total = 0
    for number, raw in iter_lines(path):
        total += 1
        if total > MAX_LINES:
            problems.append(Problem(code="too_many_tasks", message=f"there must be at most {MAX_LINES} requests"))
            break
        if len(problems) > MAX_REPORTED_ERRORS:
            more = f"there may be more: only the first {MAX_REPORTED_ERRORS} errors are listed"
            problems[-1] = Problem(code="too_many_errors", message=more)
            break
        try:
            line = read_line(number, raw, endpoint, max_line_bytes)
        except LineError as error:
            problems.append(error.problem)
            continue
        first = custom_ids.setdefault(line.custom_id, number)
        if first != number:
            message = f"custom_id must be unique, and line {first} has the same"
            problems.append(Problem(code="duplicate_custom_id", message=message, line=number, param="custom_id"))
    if total == 0:
        problems.append(Problem(code="empty_file", message="the file has no requests"))
    return total, problems


class LineError(Exception):
    """A line of an input file is wrong."""

    def __init__(self, problem: Problem):
        super().__init__(problem.message)
        self.problem = problem


def read_line(number: int, raw: bytes, endpoint: str, max_line_bytes: int) -> Line:
    """The request on a line. Raises LineError."""

    def refuse(code: str, message: str, param: str | None = None) -> NoReturn:
        raise LineError(Problem(code=code, message=message, line=number, param=param))

    if len(raw) > max_line_bytes:
        refuse("line_too_long", f"a line must have at most {max_line_bytes} bytes. Given: {len(raw)}")
    try:
        made = decode_json(raw)
    except RequestError as error:
        refuse("invalid_json_line", error.message.replace("the request body", "the line"))
    if not isinstance(made, dict):
        refuse("invalid_json_line", "the line must be a JSON object")
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if name not in made:
            refuse("missing_required_parameter", f"{name} is required", name)
        if not isinstance(made[name], kind):
            wanted = "an object" if kind is dict else "a string"
            refuse("invalid_type", f"{name} must be {wanted}", name)
    for name in made:
        if name not in ("custom_id", "method", "url", "body"):
            refuse("unknown_parameter", "must have custom_id, method, url and body only", name[:64])
    if not 1 <= len(made["custom_id"]) <= MAX_CUSTOM_ID_CHARS:
        refuse("invalid_parameter", f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters", "custom_id")
    if made["method"] != "POST":
        refuse("invalid_method", f"method must be POST. Given: {made['method'][:64]}", "method")
    if made["url"] != endpoint:
        refuse("mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}. Given: {made['url'][:64]}", "url")
    return Line(number=number, custom_id=made["custom_id"], body=made["body"])


# ---- answers --------------------------------------------------------------------------------------------------------


class Results:
    """The answers of a batch so far, good ones and others, in two files that only grow."""

    def __init__(self, output: Path, errors: Path):
        self._paths = {True: output, False: errors}
        self._files: dict[bool, IO[bytes]] = {}

    def answered(self) -> dict[bool, set[str]]:
        """The custom ids in both; a line that a crash cut off is cut away."""
        found: dict[bool, set[str]] = {True: set(), False: set()}
        for is_good, path in self._paths.items():
            if not path.exists():
                continue
            whole = 0
            with path.open("rb+") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        file.truncate(whole)
                        break
                    whole += len(line)
                    found[is_good].add(msgspec.json.decode(line)["custom_id"])
        return found

    def add(self, is_good: bool, custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        """Append one answer."""
        if is_good not in self._files:
            self._files[is_good] = self._paths[is_good].open("ab")
        entry = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
        self._files[is_good].write(msgspec.json.encode(entry) + b"\n")
        self._files[is_good].flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


# ---- the runner -----------------------------------------------------------------------------------------------------


class BatchRunner:
    """Keeps all batches of a store and answers the unfinished ones.

    A quarter of the engine's places at most are given to batches. A line starts only while nobody waits for the engine,
    and one line a step, so that live requests never wait for the prompts of many. Under the priority policy lines have
    the lowest priority besides.
    """

    def __init__(self, app: FastAPI, llm: AsyncLLM, files: FileStore, options: ServerOptions):
        self._app = app
        self._llm = llm
        self._files = files
        self._max_line_bytes = options.max_body_bytes
        self._api_key = options.api_keys[0] if options.api_keys else ""
        self._folder = files.folder / "batches"
        self._batches: dict[str, Batch] | None = None  # oldest first
        self._max_lines_at_once = max(1, llm.config.scheduler.max_num_seqs // 4)
        self._slots = asyncio.Semaphore(self._max_lines_at_once)
        self._door = asyncio.Lock()  # who holds it is the next to start
        self._last_start_step = -1
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}

    # ---- life ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While it lasts, batches are answered; those of the last server first."""
        take_over = asyncio.create_task(self._take_over())
        try:
            yield
        finally:
            take_over.cancel()
            await asyncio.gather(take_over, return_exceptions=True)
            await self.stop()

    async def _take_over(self) -> None:
        """Go on with what is unfinished, once the folder is ours: the last server may still be ending, or go on."""
        is_told = False
        while self._folder.exists():
            try:
                self._known()
                return
            except KitfoxError as error:
                if not is_told:
                    logger.warning("files and batches are not served yet: %s", error.message)
                is_told = True
            except Exception:
                logger.exception("the batches in %s cannot be read", self._folder)
                return
            await asyncio.sleep(TAKE_OVER_POLL_S)

    async def stop(self) -> None:
        """Leave what is unfinished for the next server."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._files.close()

    def _known(self) -> dict[str, Batch]:
        """All batches; the first call reads them, and goes on with the unfinished ones."""
        self._files.open()
        if self._batches is None:
            self._folder.mkdir(exist_ok=True)
            saved = [msgspec.json.decode(path.read_bytes(), type=Batch) for path in self._folder.glob("batch_*.json")]
            self._batches = {batch.id: batch for batch in sorted(saved, key=lambda batch: (batch.created_at, batch.id))}
            for batch in saved:
                if batch.status not in FINAL:
                    self._start(batch)
        return self._batches

    def _save(self, batch: Batch) -> None:
        write_whole(self._folder / f"{batch.id}.json", msgspec.json.encode(batch))

    # ---- what routes call ---------------------------------------------------------------------------------------

    def all(self) -> list[Batch]:
        """Oldest first."""
        return list(self._known().values())

    def get(self, batch_id: str) -> Batch:
        """Raises NotFoundError for an id that no batch has."""
        batch = self._known().get(batch_id)
        if batch is None:
            raise NotFoundError(f"there is no batch {batch_id[:100]}", param="batch_id")
        return batch

    def create(self, fields: BatchRequest) -> Batch:
        """Start a batch over an uploaded file; what is wrong inside the file makes it fail soon.

        Raises:
            RequestError: a parameter is wrong. QueueFullError: too many batches are unfinished.
        """
        if fields.endpoint not in BATCH_ENDPOINTS:
            raise InvalidParameterError("endpoint", f"must be one of {', '.join(BATCH_ENDPOINTS)}", fields.endpoint)
        if fields.completion_window != COMPLETION_WINDOW:
            given = fields.completion_window
            raise InvalidParameterError("completion_window", f"must be {COMPLETION_WINDOW}", given)
        _check_metadata(fields.metadata)
        known = self._known()
        file = self._files.get(fields.input_file_id)
        if file.purpose != "batch":
            raise InvalidParameterError("input_file_id", "must be of a file with the purpose batch", file.purpose)
        unfinished = sum(batch.status not in FINAL for batch in known.values())
        if unfinished >= MAX_UNFINISHED_BATCHES:
            limit = f"at most {MAX_UNFINISHED_BATCHES} batches may be unfinished, and {unfinished} are"
            raise QueueFullError(limit, retry_after_s=60)
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=fields.endpoint,
            input_file_id=file.id,
            completion_window=fields.completion_window,
            created_at=now,
            expires_at=now + COMPLETION_WINDOW_S,
            metadata=fields.metadata,
        )
        self._save(batch)
        known[batch.id] = batch
        self._start(batch)
        return batch

    def cancel(self, batch_id: str) -> Batch:
        """End a batch; lines that are being answered are abandoned, answers that are there stay.

        Raises:
            ConflictError: it has ended already.
        """
        batch = self.get(batch_id)
        if batch.status in (*FINAL, "finalizing"):
            raise ConflictError(f"a batch that is {batch.status} cannot be cancelled", param="batch_id")
        if batch.status != "cancelling":
            batch.move("cancelling")
            self._save(batch)
        if batch.id in self._answering:
            self._answering[batch.id].cancel()
        return batch

    def check_unused(self, file_id: str) -> None:
        """Raises ConflictError for a file whose lines are still to be answered."""
        for batch in self._known().values():
            if batch.input_file_id == file_id and batch.status not in FINAL:
                raise ConflictError(f"file {file_id} is the input of {batch.id}, which is {batch.status}")

    # ---- one batch, from validating to its end ------------------------------------------------------------------

    def _start(self, batch: Batch) -> None:
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _run(self, batch: Batch) -> None:
        try:
            if batch.status == "validating":
                await self._validate(batch)
            if batch.status == "in_progress" and not await self._answer_until_end(batch):
                return  # the server is going down: the next one goes on
            if batch.status not in FINAL:
                await self._finish(batch)
        except Exception:
            logger.exception("%s failed", batch.id)
            message = "the server failed on this batch; its log says why"
            self._fail(batch, [Problem(code="internal_error", message=message)])

    async def _validate(self, batch: Batch) -> None:
        path = self._files.path(batch.input_file_id)
        total, problems = await asyncio.to_thread(check_input, path, batch.endpoint, self._max_line_bytes)
        batch.total = total
        if problems:
            self._fail(batch, problems)
        elif batch.status == "validating":  # and not cancelled in the meantime
            batch.move("in_progress")
            self._save(batch)

    def _fail(self, batch: Batch, problems: list[Problem]) -> None:
        batch.errors = problems
        batch.move("failed")
        self._save(batch)

    async def _answer_until_end(self, batch: Batch) -> bool:
        """Answer lines until there are no more, the window closes or the batch is cancelled; False: not yet the end."""
        work = asyncio.create_task(self._answer_lines(batch))
        self._answering[batch.id] = work
        try:
            await asyncio.wait({work}, timeout=max(batch.expires_at - time.time(), 0))
        finally:
            del self._answering[batch.id]
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
        is_over = batch.status == "cancelling" or time.time() >= batch.expires_at
        return is_over or batch.completed + batch.failed == batch.total

    async def _answer_lines(self, batch: Batch) -> None:
        with contextlib.closing(self._results(batch)) as results:
            answered = await asyncio.to_thread(results.answered)
            batch.completed, batch.failed = len(answered[True]), len(answered[False])
            with contextlib.closing(self._unanswered(batch, answered[True] | answered[False])) as lines:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._max_lines_at_once):
                        group.create_task(self._answer_some(batch, lines, results))

    def _unanswered(self, batch: Batch, answered: set[str]) -> Generator[Line, None, None]:
        for number, raw in iter_lines(self._files.path(batch.input_file_id)):
            line = read_line(number, raw, batch.endpoint, self._max_line_bytes)
            if line.custom_id not in answered:
                yield line

    async def _answer_some(self, batch: Batch, lines: Iterator[Line], results: Results) -> None:
        for line in lines:
            async with self._slots:
                response = await self._answer(batch, line)
            if response is None:
                return
            is_good = 200 <= response["status_code"] < 300
            results.add(is_good, line.custom_id, response, None)
            if is_good:
                batch.completed += 1
            else:
                batch.failed += 1

    def _results(self, batch: Batch) -> Results:
        """Where the answers are: below our folder until the batch is finished, then among the files."""
        output, errors = (
            self._files.path(file_id) if file_id in self._files else self._folder / f"{batch.id}.{kind}"
            for file_id, kind in ((_output_id(batch), "output"), (_errors_id(batch), "errors"))
        )
        return Results(output, errors)

    async def _finish(self, batch: Batch) -> None:
        """Make files of the answers; may be repeated after a crash."""
        end: Status = "completed"
        if batch.cancelling_at is not None:
            end = "cancelled"
        elif batch.completed + batch.failed < batch.total:
            end = "expired"
        if batch.status != "finalizing":
            if end != "cancelled":
                batch.move("finalizing")
            self._save(batch)
        await asyncio.to_thread(self._report_unanswered, batch, end)
        for file_id, kind in ((_output_id(batch), "output"), (_errors_id(batch), "errors")):
            path = self._folder / f"{batch.id}.{kind}"
            if path.exists():
                self._files.adopt(path, filename=f"{batch.id}_{kind}.jsonl", purpose="batch_output", file_id=file_id)
        batch.output_file_id = _output_id(batch) if _output_id(batch) in self._files else None
        batch.error_file_id = _errors_id(batch) if _errors_id(batch) in self._files else None
        batch.move(end)
        self._save(batch)
        logger.info("%s %s: %d of %d answered, %d failed", batch.id, end, batch.completed, batch.total, batch.failed)

    def _report_unanswered(self, batch: Batch, end: Status) -> None:
        """Every line gets an entry, those that nobody came to one that says so."""
        errors = {
            "expired": {"code": "batch_expired", "message": "the completion window ended before this request ran"},
            "cancelled": {"code": "batch_cancelled", "message": "the batch was cancelled before this request ran"},
        }
        with contextlib.closing(self._results(batch)) as results:
            answered = results.answered()
            batch.completed, batch.failed = len(answered[True]), len(answered[False])
            if end not in errors or batch.total == 0:
                return
            for line in self._unanswered(batch, answered[True] | answered[False]):
                results.add(False, line.custom_id, None, errors[end])
                batch.failed += 1

    # ---- one line -----------------------------------------------------------------------------------------------

    async def _answer(self, batch: Batch, line: Line) -> dict[str, Any] | None:
        """The `response` of a line; None when the server goes down before there is one."""
        body = {name: value for name, value in line.body.items() if name not in NOT_IN_BATCHES}
        if self._llm.config.scheduler.policy == "priority":
            body["priority"] = LOWEST_PRIORITY
        content = msgspec.json.encode(body)
        request_id = f"{batch.id}-{line.number}"
        attempts = 0
        while await self._wait_for_room():
            status, answer = await self._call(batch.endpoint, content, request_id)
            attempts += status == 503
            gives_up = attempts >= MAX_ATTEMPTS and self._llm.health not in ("draining", "dead")
            if status not in (429, 503) or gives_up:
                return {"status_code": status, "request_id": request_id, "body": msgspec.Raw(answer)}
            await asyncio.sleep(ROOM_POLL_S)
        return None

    async def _wait_for_room(self) -> bool:
        """Wait until nobody waits for the engine; False when it will serve no more."""
        async with self._door:
            while self._llm.health not in ("draining", "dead"):
                if self._llm.health == "ok" and self._has_room():
                    self._last_start_step = self._llm.stats.step
                    return True
                await asyncio.sleep(ROOM_POLL_S)
        return False

    def _has_room(self) -> bool:
        unfinished = len(self._llm.open_request_ids)
        if unfinished == 0:  # and no step will come that could correct the statistics
            return True
        stats = self._llm.stats
        is_free = unfinished < self._llm.config.scheduler.max_num_seqs and stats.num_waiting == 0
        return is_free and stats.step != self._last_start_step

    async def _call(self, path: str, content: bytes, request_id: str) -> tuple[int, bytes]:
        """POST to our own application: (status, body)."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"x-request-id", request_id.encode()),
        ]
        if self._api_key:
            headers.append((b"authorization", b"Bearer " + self._api_key.encode()))
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": None,
            "server": None,
        }
        request = {"type": "http.request", "body": content, "more_body": False}
        unsent: list[Message] = [request]
        status, parts = 500, []

        async def receive() -> Message:
            if unsent:
                return unsent.pop()
            await asyncio.Event().wait()  # we never leave before the answer
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, b"".join(parts)


def _output_id(batch: Batch) -> str:
    """Known beforehand, so that a crash while files are made loses none."""
    return f"file-{batch.id.removeprefix('batch_')}-output"


def _errors_id(batch: Batch) -> str:
    return f"file-{batch.id.removeprefix('batch_')}-errors"


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA_PAIRS:
        raise InvalidParameterError("metadata", f"must have at most {MAX_METADATA_PAIRS} pairs", len(metadata))
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS:
            raise InvalidParameterError("metadata", f"keys must have at most {MAX_METADATA_KEY_CHARS} characters", key)
        if len(value) > MAX_METADATA_VALUE_CHARS:
            limit = f"values must have at most {MAX_METADATA_VALUE_CHARS} characters"
            raise InvalidParameterError("metadata", limit, value)


# ---- routes ---------------------------------------------------------------------------------------------------------


def add_batch_routes(app: FastAPI, runner: BatchRunner, max_body_bytes: int) -> None:
    from kitfox.server.app import json_response

    @app.post("/v1/batches")
    async def create_batch(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), BatchRequest)
        shown = runner.create(fields).as_dict()
        return json_response(with_ignored(shown, ignored))

    @app.get("/v1/batches")
    async def list_batches(request: Request) -> Response:
        limits = {"default_limit": 20, "max_limit": MAX_LISTED_BATCHES}
        return json_response(page_of(runner.all(), request.query_params, Batch.as_dict, **limits))

    @app.get("/v1/batches/{batch_id}")
    async def get_batch(batch_id: str) -> Response:
        return json_response(runner.get(batch_id).as_dict())

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str) -> Response:
        return json_response(runner.cancel(batch_id).as_dict())
