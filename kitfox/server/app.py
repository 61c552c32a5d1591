"""The HTTP application and its life: routes, error bodies, disconnects, metrics, draining. No torch here."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import logging
import signal
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kitfox.errors import KitfoxError, RequestError
from kitfox.garbage import keep_what_is_loaded
from kitfox.plan import resolve_precision
from kitfox.server import anthropic, responses
from kitfox.server.access import add_access, bounded_protocol, path_below_root
from kitfox.server.adapters import add_adapter_routes
from kitfox.server.batches import BatchRunner, add_batch_routes
from kitfox.server.chat_batch import ChatBatch, ChatBatchRequest, open_chats
from kitfox.server.control import add_control_routes
from kitfox.server.conversation import ChatDialect
from kitfox.server.embeddings import add_embedding_routes
from kitfox.server.files import FileStore, add_file_routes
from kitfox.server.generation import Answer, Generator, check_model, loaded_adapters, served_model_names
from kitfox.server.images import ImageReader
from kitfox.server.logs import RequestLog, RequestRecord, current_request
from kitfox.server.metrics import ServerMetrics
from kitfox.server.missing import why_missing
from kitfox.server.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    OpenAIService,
    TokenizeRequest,
    check_detokenize,
    tokenize,
)
from kitfox.server.openapi import add_openapi_routes
from kitfox.server.options import ServerOptions
from kitfox.server.parsing import add_parsing_routes
from kitfox.server.settings import add_setting_routes
from kitfox.server.sglang import add_native_routes
from kitfox.server.spans import RequestSpans, otlp_exporter
from kitfox.server.templates import TemplateRenderer
from kitfox.server.validation import (
    Turns,
    convert_body,
    error_body,
    error_headers,
    internal_error,
    read_json_object,
    with_ignored,
)
from kitfox.weights.hub import cache_dir

if TYPE_CHECKING:
    from kitfox.engine.async_llm import AsyncLLM

logger = logging.getLogger("kitfox.server")

LAST_BYTES_S = 5  # for answers that are complete but not yet sent when the engine has ended
KEEP_ALIVE_S = 65  # longer than the usual load balancer's 60, so that it never reuses a closing connection
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; the access log does
MAX_REQUEST_ID_HEADER_CHARS = 128
TOKENIZER_CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}  # what reads any model's tokenizer in transformers

T = TypeVar("T")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_response(error: KitfoxError) -> Response:
    return json_response(error_body(error), error.status, error_headers(error))


def make_app(llm: AsyncLLM, options: ServerOptions | None = None) -> FastAPI:
    """The API over one engine. Its lifespan starts listening to the engine, and ends the engine if nobody has."""
    options = options or ServerOptions()
    max_body_bytes = options.max_body_bytes
    metrics = ServerMetrics(llm)
    llm.on_step = metrics.observe_step
    request_log = RequestLog(options.log_requests)
    endpoint = options.otlp_traces_endpoint
    spans = RequestSpans(otlp_exporter(endpoint)) if endpoint else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        llm.start()
        async with batches.running():
            yield
        if renderer is not None:
            await asyncio.to_thread(renderer.stop)
        if llm.health not in ("draining", "dead"):
            await llm.shutdown()
        if spans is not None:
            await asyncio.to_thread(spans.close)

    app = FastAPI(
        title="kitfox", version=version(), lifespan=lifespan, redirect_slashes=False, docs_url=None, redoc_url=None,
        openapi_url=None,
    )  # fmt: skip
    add_access(app, options)
    app.add_middleware(  # the outermost: it sees refusals too
        _EveryRequest, metrics=metrics, log=request_log, spans=spans, root_path=options.root_path
    )
    _add_error_handlers(app)
    app.state.strict = options.strict
    app.state.large_bodies = Turns()
    dialect = ChatDialect.choose(llm.tokenizer, options.tool_call_parser, options.reasoning_parser)
    renderer = TemplateRenderer() if options.trust_request_chat_template else None
    vision = llm.model_config.vision
    images = None if vision is None else ImageReader(llm.tokenizer, vision, options.allowed_media_domains)
    generator = Generator(llm, metrics, dialect, strict=options.strict, renderer=renderer, images=images)
    _add_generation_routes(app, generator, max_body_bytes)
    anthropic.add_routes(app, generator, max_body_bytes, _respond)
    responses.add_routes(app, generator, max_body_bytes, _respond)
    add_native_routes(app, generator, max_body_bytes, _respond)
    add_control_routes(app, llm, max_body_bytes, options.profile_dir)
    add_adapter_routes(app, llm, max_body_bytes)
    add_embedding_routes(app, generator, max_body_bytes)
    files = FileStore(Path(options.storage_dir).expanduser() if options.storage_dir else cache_dir() / "storage")
    batches = BatchRunner(app, llm, files, options)
    add_file_routes(app, files, batches.check_unused)
    add_batch_routes(app, batches, max_body_bytes)
    _add_tokenizer_routes(app, generator, max_body_bytes)
    add_parsing_routes(app, generator, max_body_bytes)
    _add_model_routes(app, llm)
    _add_state_routes(app, llm, metrics)
    add_setting_routes(app, llm, request_log, spans, max_body_bytes)
    add_openapi_routes(
        app,
        served_model_names(llm),
        takes_adapters=llm.config.adapters.enabled,
        needs_key=bool(options.api_keys),
        root_path=options.root_path,
    )
    return app


def version() -> str:
    """The installed version of kitfox."""
    return importlib.metadata.version("kitfox")


# ---- what every request gets ----------------------------------------------------------------------------------------


class _EveryRequest:
    """Names the request, turns a fault of ours into a clean 500, and records what became of it."""

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, log: RequestLog, spans: RequestSpans | None, root_path: str
    ):
        self._app = app
        self._metrics = metrics
        self._log = log
        self._spans = spans
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = _printable_header(scope, b"x-request-id")
        scope["client_request_id"] = client_id
        scope["root_path"] = self._root_path  # routes match with it and without it: proxies do both
        record = RequestRecord(
            request_id=(client_id or uuid.uuid4().hex)[:MAX_REQUEST_ID_HEADER_CHARS],
            method=_method(scope),
            path=scope.get("raw_path", b"").partition(b"?")[0].decode("ascii", "backslashreplace"),
            client_id=client_id and client_id[:MAX_REQUEST_ID_HEADER_CHARS],
            traceparent=_printable_header(scope, b"traceparent"),
        )
        current_request.set(record)  # a task of its own for each request, so nothing to reset

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = message["headers"]
                record.is_stream = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
                message["headers"] = [*headers, (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            record.status = record.status or CLIENT_CLOSED_REQUEST
        except Exception:
            logger.exception("request %s to %s failed", record.request_id, record.path)
            if not record.status:
                await error_response(internal_error())(scope, receive, send_named)
        finally:
            record.end()
            record.route = getattr(scope.get("route"), "path", None)
            self._metrics.observe_http(record)
            self._log.write(record)
            if self._spans is not None:
                self._spans.write(record)


def _printable_header(scope: Scope, wanted: bytes) -> str | None:
    value = next((value for name, value in scope["headers"] if name == wanted), b"")
    return value.decode("ascii") if value and value.isascii() and value.decode("ascii").isprintable() else None


def _method(scope: Scope) -> str:
    """Clients may invent methods; a label may only have a few values."""
    known = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
    return scope["method"] if scope["method"] in known else "other"


def _add_error_handlers(app: FastAPI) -> None:
    async def on_kitfox_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, KitfoxError)
        if error.status >= 500:
            logger.warning("answered %d: %s", error.status, error.message)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        why = why_missing(path_below_root(request.scope))
        messages = {
            404: f"There is no {request.url.path[:200]}" + ("." if why is None else f" in kitfox: {why}."),
            405: f"{request.method[:20]} is not allowed on {request.url.path[:200]}.",
        }
        shown = RequestError(messages.get(error.status_code, str(error.detail)))
        not_found = "not_found" if why is None else "not_supported"
        shown.code = {404: not_found, 405: "method_not_allowed"}.get(error.status_code)
        return json_response(error_body(shown), error.status_code, dict(error.headers or {}))

    app.add_exception_handler(KitfoxError, on_kitfox_error)
    app.add_exception_handler(HTTPException, on_http_error)


# ---- disconnects ----------------------------------------------------------------------------------------------------


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T | None:
    """The result of work, or None once the client has gone; the work is cancelled then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for waiting in (task, watcher):
            waiting.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Server-sent events of a reply. Watches for the client to leave even while there is nothing to send."""

    def __init__(self, reply: Answer):
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream"
        self.body = b""
        self._reply = reply
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await until_disconnect(receive, self._write(send, self._reply.events()))
        finally:
            self._reply.close()

    @staticmethod
    async def _write(send: Send, events: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(events):
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _respond(request: Request, reply: Answer, *, stream: bool) -> Response:
    return await (_respond_with_events if stream else _respond_whole)(request, reply)


async def _respond_whole(request: Request, reply: Answer | ChatBatch) -> Response:
    try:
        body = await until_disconnect(request.receive, reply.whole())
    finally:
        reply.close()
    return Response(status_code=CLIENT_CLOSED_REQUEST) if body is None else json_response(body)


async def _respond_with_events(request: Request, reply: Answer) -> Response:
    async def accepted() -> bool:
        await reply.accepted()
        return True

    is_open = False
    try:
        is_open = await until_disconnect(request.receive, accepted()) or False
    finally:
        if not is_open:
            reply.close()
    return EventStream(reply) if is_open else Response(status_code=CLIENT_CLOSED_REQUEST)


# ---- routes ---------------------------------------------------------------------------------------------------------


def _add_generation_routes(app: FastAPI, generator: Generator, max_body_bytes: int) -> None:
    service = OpenAIService(generator)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), CompletionRequest)
        reply = await service.complete(fields, ignored, request.scope["client_request_id"])
        return await _respond(request, reply, stream=fields.stream)

    @app.post("/v1/chat/completions/batch")
    async def chat_batch(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), ChatBatchRequest)
        batch = await open_chats(service, fields, ignored, request.scope["client_request_id"])
        return await _respond_whole(request, batch)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), ChatRequest)
        reply = await service.chat(fields, ignored, request.scope["client_request_id"])
        return await _respond(request, reply, stream=fields.stream)


def _add_tokenizer_routes(app: FastAPI, generator: Generator, max_body_bytes: int) -> None:
    llm = generator.llm

    @app.post("/tokenize")
    @app.post("/v1/tokenize")
    async def tokenize_text(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), TokenizeRequest)
        return json_response(with_ignored(await tokenize(generator, fields), ignored))

    @app.post("/detokenize")
    @app.post("/v1/detokenize")
    async def detokenize(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), DetokenizeRequest)
        check_model(llm, fields.model)
        check_detokenize(fields.tokens, llm.model_config.vocab_size)
        text = llm.tokenizer.decode(fields.tokens, skip_special_tokens=fields.skip_special_tokens)
        return json_response(with_ignored({"prompt": text}, ignored))

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """What a client needs to make the same prompts: special tokens, the chat template."""
        return json_response(TOKENIZER_CLASS | llm.tokenizer.info)


def _add_model_routes(app: FastAPI, llm: AsyncLLM) -> None:
    def card(name: str) -> dict[str, Any]:
        adapter = check_model(llm, name).adapter
        return {
            "id": name,
            "object": "model",
            "created": int(llm.started_at),
            "owned_by": "kitfox",
            "root": llm.config.model.model if adapter is None else llm.adapters[adapter].path,
            "parent": None if adapter is None else llm.config.model.served_name,
            "max_model_len": llm.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        names = [*served_model_names(llm), *loaded_adapters(llm)]
        return json_response({"object": "list", "data": [card(name) for name in names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(card(name))


def _add_state_routes(app: FastAPI, llm: AsyncLLM, metrics: ServerMetrics) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Whether the server is worth keeping: one that takes no requests on purpose is."""
        is_worth_keeping = llm.health in ("ok", "draining", "paused", "asleep")
        return json_response(_state_body(llm), 200 if is_worth_keeping else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """Whether to send it requests."""
        return json_response(_state_body(llm), 200 if llm.health == "ok" else 503)

    @app.get("/version")
    async def get_version() -> Response:
        return json_response({"version": version()})

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        await llm.wait_until_ready()  # only then is everything decided
        return json_response(_server_info(llm))

    @app.get("/metrics")
    async def get_metrics() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/trace/{answer_id}")
    async def trace(answer_id: str) -> Response:
        events = await llm.trace(answer_id)
        prompt_index = 0
        while more := await llm.trace(f"{answer_id}~{prompt_index}"):
            events += more
            prompt_index += 1
        if not events:
            error = RequestError(f"nothing is known of {answer_id[:200]}; old requests are forgotten", param="id")
            error.status, error.code = 404, "not_found"
            raise error
        events.sort(key=lambda event: event.time_s)
        start_s = events[0].time_s
        shown = [
            {"time_s": event.time_s - start_s, "name": event.name, "request_id": event.request_id, "data": event.data}
            for event in events
        ]
        return json_response({"id": answer_id, "object": "trace", "events": shown})


def _server_info(llm: AsyncLLM) -> dict[str, Any]:
    """What is served and how, as it was resolved; `config` is what was asked for."""
    config, model_config = llm.config, llm.model_config
    precision = resolve_precision(config, model_config, llm.device.partition(":")[0])
    quantization = {"": "none", "stored": model_config.stored_quantization}
    return {
        "engine": "kitfox",
        "version": version(),
        "model_path": str(llm.path),
        "tokenizer_path": config.model.tokenizer or str(llm.path),
        "served_model_names": served_model_names(llm),
        "adapters": loaded_adapters(llm),
        "load_format": config.model.load_format,
        "dtype": precision.dtype,
        "quantization": quantization.get(precision.quantization, precision.quantization),
        "kv_cache_dtype": precision.kv_dtype,
        "kernels": llm.kernels,
        "device": llm.device,
        "num_threads": llm.num_threads,
        "cache": config.cache.organisation,
        "block_size": config.cache.block_size,
        "num_blocks": llm.stats.num_blocks,
        "max_model_len": llm.max_model_len,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "scheduling_policy": config.scheduler.policy,
        "default_sampling_params": llm.default_sampling_params,
        "config": dataclasses.asdict(config),
    }


def _state_body(llm: AsyncLLM) -> dict[str, Any]:
    return {"status": llm.health, "detail": llm.health_detail, "uptime_s": round(time.time() - llm.started_at, 3)}


# ---- the process ----------------------------------------------------------------------------------------------------


class _DrainingServer(uvicorn.Server):
    """uvicorn that keeps answering while the engine drains: new requests get 503, /ready too, running ones finish.

    A second signal ends at once, and so does the first while nothing can finish.
    """

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, drain_s: float):
        super().__init__(config)
        self._llm = llm
        self._drain_s = drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        keep_what_is_loaded()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the interpreter on SIGINT and SIGTERM."""
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._on_signal, sig)

    def _on_signal(self, sig: int) -> None:
        assert self._loop is not None
        name = signal.Signals(sig).name
        if self._drain is None and self._llm.is_paused:
            logger.warning("%s: stopping now, as requests are paused and cannot finish", name)
            self._drain = self._loop.create_task(self._drain_then_exit(0.0))
        elif self._drain is None:
            logger.warning("%s: finishing running requests for up to %g s; again to stop now", name, self._drain_s)
            self._drain = self._loop.create_task(self._drain_then_exit(self._drain_s))
        elif not self.should_exit:
            logger.warning("%s: stopping now", name)
            self._drain.cancel()
            self._drain = self._loop.create_task(self._drain_then_exit(0.0))
        else:
            self.force_exit = True

    async def _drain_then_exit(self, drain_s: float) -> None:
        try:
            await self._llm.shutdown(drain_s)
        finally:
            if asyncio.current_task() is self._drain:  # a second signal replaces the first's task
                self.should_exit = True


def serve(llm: AsyncLLM, options: ServerOptions) -> None:
    """Serve until a signal. Blocks; returns after the engine has ended."""
    config = uvicorn.Config(
        make_app(llm, options),
        host=options.host,
        port=options.port,
        uds=options.uds or None,
        http=bounded_protocol(options.max_header_bytes),
        ws="none",
        h11_max_incomplete_event_size=options.max_header_bytes,
        ssl_keyfile=options.ssl_keyfile or None,
        ssl_keyfile_password=options.ssl_keyfile_password or None,
        ssl_certfile=options.ssl_certfile or None,
        ssl_ca_certs=options.ssl_ca_certs or None,
        ssl_cert_reqs=options.ssl_cert_reqs,
        log_config=None,  # its lines go the way of all others
        access_log=False,  # ours says more
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_BYTES_S,
        server_header=False,
    )
    _DrainingServer(config, llm, options.shutdown_timeout_s).run()
