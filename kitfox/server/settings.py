"""What operators change of a server while it runs: what is logged and traced, how much a step takes in."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request, Response

from kitfox.errors import InvalidParameterError, RequestError, UnsupportedParameterError
from kitfox.garbage import keep_what_is_loaded
from kitfox.server.logs import LoggingRequest, RequestLog, current_level, set_level
from kitfox.server.spans import RequestSpans
from kitfox.server.validation import convert_body, read_arguments, read_json_object, with_ignored

if TYPE_CHECKING:
    from kitfox.engine.async_llm import AsyncLLM

MAX_STEP_SLEEP_S = 60.0


class StateRequest(msgspec.Struct, kw_only=True):
    """POST /set_internal_state, as SGLang has it."""

    server_args: dict[str, Any]


class SchedulingChanges(msgspec.Struct, kw_only=True):
    """Members of `server_args`: both engines' names. What is absent stays as it is."""

    max_running_requests: int | None = None
    max_num_seqs: int | None = None
    chunked_prefill_size: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None


class SlowDownRequest(msgspec.Struct, kw_only=True):
    """How long the engine sleeps after each step, in seconds; null or 0 for not at all."""

    forward_sleep_time: float | None = None


class TraceLevelRequest(msgspec.Struct, kw_only=True):
    """0 for no spans, 1 or more for one a request."""

    level: int


def add_setting_routes(
    app: FastAPI, llm: AsyncLLM, request_log: RequestLog, spans: RequestSpans | None, max_body_bytes: int
) -> None:
    from kitfox.server.app import json_response

    def logging_state() -> dict[str, Any]:
        return {"level": current_level(), "log_requests": request_log.enabled}

    @app.get("/configure_logging")
    async def get_logging() -> Response:
        return json_response(logging_state())

    @app.post("/configure_logging")
    async def configure_logging(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), LoggingRequest)
        if fields.level is not None:
            set_level(fields.level)
        if fields.log_requests is not None:
            request_log.enabled = fields.log_requests
        return json_response(with_ignored(logging_state(), ignored))

    @app.api_route("/set_trace_level", methods=["GET", "POST"])
    async def set_trace_level(request: Request) -> Response:
        """Have spans sent or not."""
        fields, ignored = convert_body(await read_arguments(request, max_body_bytes), TraceLevelRequest)
        if fields.level < 0:
            raise InvalidParameterError("level", "must be >= 0", fields.level)
        if spans is None:
            raise UnsupportedParameterError("level", "needs a server that was started with --otlp-traces-endpoint")
        spans.enabled = fields.level > 0
        return json_response(with_ignored({"success": True, "level": fields.level}, ignored))

    @app.post("/set_internal_state")
    async def set_internal_state(request: Request) -> Response:
        """Change how much a step takes in, from the next one on."""
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), StateRequest)
        await llm.set_scheduling(_scheduling_changes(fields.server_args))
        scheduler = llm.config.scheduler
        now = {
            "max_running_requests": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
        }
        return json_response(with_ignored({"success": True, "updated": True, "server_args": now}, ignored))

    @app.post("/slow_down")
    async def slow_down(request: Request) -> Response:
        """Have the engine sleep after each step: what a slower machine would be like."""
        fields, ignored = convert_body(await read_arguments(request, max_body_bytes), SlowDownRequest)
        seconds = fields.forward_sleep_time or 0.0
        if not 0 <= seconds <= MAX_STEP_SLEEP_S:
            raise InvalidParameterError("forward_sleep_time", f"must be in [0, {MAX_STEP_SLEEP_S:g}]", seconds)
        await llm.slow_down(seconds)
        return json_response(with_ignored({"success": True, "forward_sleep_time": seconds}, ignored))

    @app.api_route("/freeze_gc", methods=["GET", "POST"])
    async def freeze_gc() -> Response:
        """Have both processes look at no object again that is there now, as they do when they have started."""
        keep_what_is_loaded()
        await llm.freeze_gc()
        return json_response({"success": True, "frozen_objects": gc.get_freeze_count()})


def _scheduling_changes(server_args: dict[str, Any]) -> dict[str, int]:
    """By the names of SchedulerConfig's fields."""
    fields, unknown = convert_body(server_args, SchedulingChanges)
    if unknown:
        known = ", ".join(field.name for field in msgspec.structs.fields(SchedulingChanges))
        raise UnsupportedParameterError(
            f"server_args.{unknown[0][:100]}", f"stays what it was at the start; these can be changed: {known}"
        )
    pairs = (
        ("max_num_seqs", "max_running_requests", fields.max_running_requests),
        ("max_num_seqs", "max_num_seqs", fields.max_num_seqs),
        ("max_num_batched_tokens", "chunked_prefill_size", fields.chunked_prefill_size),
        ("max_num_batched_tokens", "max_num_batched_tokens", fields.max_num_batched_tokens),
        ("long_prefill_token_threshold", "long_prefill_token_threshold", fields.long_prefill_token_threshold),
    )
    changes: dict[str, int] = {}
    for field, name, value in pairs:
        if value is None:
            continue
        if changes.setdefault(field, value) != value:
            raise RequestError(f"server_args.{name} contradicts its other name", param=f"server_args.{name}")
    if not changes:
        raise RequestError("server_args must name what to change", param="server_args")
    return changes
