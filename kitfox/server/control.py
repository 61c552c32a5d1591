"""What operators ask of a running server: flush, abort, pause, sleep, profile, load. Both engines' names, one handler.

Parameters come in the query or in a JSON body; nothing is one too.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response

from kitfox.errors import EngineBusyError, InvalidParameterError, RequestError, UnsupportedParameterError
from kitfox.server.validation import convert_body, read_arguments, with_ignored
from kitfox.tracing import TraceEvent, to_trace_events

if TYPE_CHECKING:
    from kitfox.engine.async_llm import AsyncLLM

# Paths that concern everybody's requests.
ADMIN_PATHS = frozenset(
    {
        "/flush_cache", "/reset_prefix_cache", "/abort_request", "/abort_requests", "/pause", "/pause_generation",
        "/resume", "/continue_generation", "/sleep", "/release_memory_occupation", "/release_kv_cache_memory",
        "/wake_up", "/resume_memory_occupation", "/start_profile", "/stop_profile", "/configure_logging",
        "/set_trace_level", "/set_internal_state", "/slow_down", "/freeze_gc",
        "/v1/load_lora_adapter", "/load_lora_adapter", "/v1/unload_lora_adapter", "/unload_lora_adapter",
    }
)  # fmt: skip
EITHER = ["GET", "POST"]
MAX_FLUSH_TIMEOUT_S = 600.0
LOAD_SECTIONS = {"core", "memory", "queues", "spec", "lora", "disagg", "all"}  # SGLang's; the last three are empty here

_GAUGE_LINE = "# TYPE sglang_{name} gauge\nsglang_{name} {value}\n"


class FlushRequest(msgspec.Struct, kw_only=True):
    """`timeout` is how many seconds to wait for requests to end before."""

    timeout: float = 0.0


class AbortRequest(msgspec.Struct, kw_only=True):
    """Whom to end: `rid` as SGLang says it, `request_ids` as vLLM does, or everybody."""

    rid: str | list[str] = []
    request_ids: list[str] = []
    abort_all: bool = False


class PauseRequest(msgspec.Struct, kw_only=True):
    """`mode` ends open requests (both engines' default) or keeps them (vLLM's keep, SGLang's in_place)."""

    mode: Literal["abort", "keep", "in_place"] = "abort"
    clear_cache: bool = False


class SleepRequest(msgspec.Struct, kw_only=True):
    """What to give back, by vLLM's level or SGLang's tags, and what to do with open requests."""

    level: int = 1
    tags: str | list[str] = "kv_cache"
    mode: Literal["abort", "refuse"] = "refuse"


class WakeRequest(msgspec.Struct, kw_only=True):
    tags: str | list[str] = "kv_cache"


class ProfileRequest(msgspec.Struct, kw_only=True):
    """`output_dir` is a folder below the server's --profile-dir; "" is that itself."""

    output_dir: str = ""
    num_steps: int | None = None


class LoadsRequest(msgspec.Struct, kw_only=True):
    include: str = "all"
    format: Literal["json", "prometheus"] = "json"
    dp_rank: int = 0


def add_control_routes(app: FastAPI, llm: AsyncLLM, max_body_bytes: int, profile_dir: str) -> None:
    """Register the handlers. Profiles are written below profile_dir, or where it is "" into a temporary folder."""
    from kitfox.server.app import json_response

    profiler = Profiler(llm, profile_dir)

    @app.api_route("/flush_cache", methods=EITHER)
    @app.api_route("/reset_prefix_cache", methods=EITHER)
    async def flush_cache(request: Request) -> Response:
        """Forget cached prefixes. What running requests use stays, and is then said with a 400."""
        fields, ignored = convert_body(await read_arguments(request, max_body_bytes), FlushRequest)
        await _wait_until_idle(llm, fields.timeout)
        if not await llm.flush_cache():
            raise EngineBusyError(
                f"flushed what no request uses; {llm.stats.num_cached_blocks} blocks stay until their requests end"
            )
        return json_response(with_ignored({"success": True, "message": "Cache flushed."}, ignored))

    @app.post("/abort_request")
    @app.post("/abort_requests")
    async def abort(request: Request) -> Response:
        """End requests: their clients get what there is, with finish reason "abort"."""
        fields, ignored = convert_body(await read_arguments(request, max_body_bytes), AbortRequest)
        names = [*([fields.rid] if isinstance(fields.rid, str) else fields.rid), *fields.request_ids]
        if not names and not fields.abort_all:
            raise RequestError("one of rid, request_ids and abort_all is required", param="rid")
        wanted = llm.open_request_ids if fields.abort_all else _requests_named(llm, names)
        return json_response(with_ignored({"aborted": [name for name in wanted if llm.cut_short(name)]}, ignored))

    @app.post("/pause")
    @app.post("/pause_generation")
    async def pause(request: Request) -> Response:
        """Compute nothing until resumed. Open requests stay where they are, or are ended first; new ones wait."""
        fields, ignored = convert_body(await read_arguments(request, max_body_bytes), PauseRequest)
        await llm.pause()
        if fields.mode == "abort":
            _cut_all_short(llm)
        if fields.clear_cache and not await llm.flush_cache():
            raise EngineBusyError("paused, but the cache cannot be cleared while requests are kept")
        return json_response(with_ignored({"status": "ok", "message": "Generation paused."}, ignored))

    @app.post("/resume")
    @app.post("/continue_generation")
    async def resume() -> Response:
        await llm.resume()
        return json_response({"status": "ok", "message": "Generation continues."})

    @app.get("/is_paused")
    async def is_paused() -> Response:
        return json_response({"is_paused": llm.is_paused})

    @app.api_route("/sleep", methods=["POST"])
    @app.api_route("/release_kv_cache_memory", methods=["POST"])
    @app.api_route("/release_memory_occupation", methods=EITHER)
    async def sleep(request: Request) -> Response:
        """Give the KV cache's memory back. The weights stay."""
        fields, ignored = convert_body(await read_arguments(request, max_body_bytes), SleepRequest)
        if fields.level != 1:
            raise UnsupportedParameterError("level", "must be 1: only the KV cache can be given back, not the weights")
        _check_tags(fields.tags)
        if fields.mode == "abort":
            _cut_all_short(llm)
        await llm.sleep()
        return json_response(with_ignored({"is_sleeping": True, "released": ["kv_cache"]}, ignored))

    @app.api_route("/wake_up", methods=["POST"])
    @app.api_route("/resume_memory_occupation", methods=EITHER)
    async def wake_up(request: Request) -> Response:
        """Have a KV cache again, an empty one."""
        fields, ignored = convert_body(await read_arguments(request, max_body_bytes), WakeRequest)
        _check_tags(fields.tags)
        await llm.wake_up()
        return json_response(with_ignored({"is_sleeping": False}, ignored))

    @app.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": llm.is_sleeping})

    @app.api_route("/start_profile", methods=EITHER)
    async def start_profile(request: Request) -> Response:
        """Record what happens to steps and requests until /stop_profile."""
        fields, ignored = convert_body(await read_arguments(request, max_body_bytes), ProfileRequest)
        await profiler.start(fields)
        return json_response(with_ignored({"is_profiling": True}, ignored))

    @app.api_route("/stop_profile", methods=EITHER)
    async def stop_profile() -> Response:
        """Write what was recorded, as a file that Perfetto and chrome://tracing open."""
        path, num_events = await profiler.stop()
        return json_response({"is_profiling": False, "path": str(path), "num_events": num_events})

    @app.get("/load")
    async def load() -> Response:
        """How many requests the server is working on or has waiting."""
        return json_response({"server_load": len(llm.open_request_ids)})

    @app.get("/v1/loads")
    async def loads(request: Request) -> Response:
        """What a load balancer weighs servers by."""
        fields, ignored = convert_body(await read_arguments(request, max_body_bytes), LoadsRequest)
        wanted = set(fields.include.split(","))
        if not wanted <= LOAD_SECTIONS:
            raise InvalidParameterError("include", f"must be of {', '.join(sorted(LOAD_SECTIONS))}", fields.include)
        if fields.dp_rank:
            raise InvalidParameterError("dp_rank", "must be 0, there is one engine", fields.dp_rank)
        shown = _load(llm, wanted)
        if fields.format == "prometheus":
            return Response(_as_gauges(shown), media_type="text/plain; version=0.0.4; charset=utf-8")
        body = {"timestamp": datetime.now(UTC).isoformat(), "version": app.version, "loads": [shown]}
        return json_response(with_ignored(body, ignored))


# ---- parameters -----------------------------------------------------------------------------------------------------


def _check_tags(tags: str | list[str]) -> None:
    if set([tags] if isinstance(tags, str) else tags) != {"kv_cache"}:
        raise UnsupportedParameterError("tags", "must be kv_cache: weights cannot be given back")


# ---- requests -------------------------------------------------------------------------------------------------------


def _requests_named(llm: AsyncLLM, names: list[str]) -> list[str]:
    """Open requests called so, and those of several prompts that were sent under one such id."""
    found = []
    for request_id in llm.open_request_ids:
        first = re.sub(r"[~_]\d+$", "", request_id)
        if request_id in names or first in names:
            found.append(request_id)
    return found


def _cut_all_short(llm: AsyncLLM) -> None:
    for request_id in llm.open_request_ids:
        llm.cut_short(request_id)


async def _wait_until_idle(llm: AsyncLLM, timeout_s: float) -> None:
    if not 0 <= timeout_s <= MAX_FLUSH_TIMEOUT_S:
        raise InvalidParameterError("timeout", f"must be in [0, {MAX_FLUSH_TIMEOUT_S:g}] seconds", timeout_s)
    deadline = time.monotonic() + timeout_s
    while llm.open_request_ids and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


# ---- profiles -------------------------------------------------------------------------------------------------------


class Profiler:
    """At most one profile at a time, from start to file."""

    def __init__(self, llm: AsyncLLM, folder: str):
        self._llm = llm
        self._root = Path(folder).resolve() if folder else None
        self._target: Path | None = None  # where the profile being recorded will lie

    async def start(self, fields: ProfileRequest) -> None:
        """Record from now on.

        Raises:
            RequestError: it is recording already, or the folder is not one below --profile-dir.
        """
        if fields.num_steps is not None:
            raise UnsupportedParameterError("num_steps", "is not supported: a profile ends with /stop_profile")
        if self._target is not None:
            raise RequestError("a profile is being recorded; /stop_profile ends it")
        target = self._folder(fields.output_dir)
        self._target = target
        try:
            await self._llm.start_profile()
        except BaseException:
            self._target = None
            raise

    def _folder(self, below: str) -> Path:
        if self._root is None:
            if below:
                raise UnsupportedParameterError("output_dir", "needs a server that was started with --profile-dir")
            return Path(tempfile.mkdtemp(prefix="kitfox-profile-"))
        folder = (self._root / below).resolve()
        if not folder.is_relative_to(self._root):
            raise InvalidParameterError("output_dir", "must lie below the server's --profile-dir", below)
        return folder

    async def stop(self) -> tuple[Path, int]:
        """Write the file.

        Returns:
            Its path, and how many events it is made of.

        Raises:
            RequestError: nothing is being recorded.
        """
        if self._target is None:
            raise RequestError("no profile is being recorded; /start_profile starts one")
        folder, self._target = self._target, None
        events = await self._llm.stop_profile()
        name = f"kitfox-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}.trace.json"
        return await asyncio.to_thread(_write_profile, events, folder / name), len(events)


def _write_profile(events: list[TraceEvent], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode({"traceEvents": to_trace_events(events), "displayTimeUnit": "ms"}))
    return path


# ---- load -----------------------------------------------------------------------------------------------------------


def _load(llm: AsyncLLM, sections: set[str]) -> dict[str, Any]:
    stats = llm.stats
    num_total = stats.num_blocks * stats.block_size
    num_used = (stats.num_blocks - stats.num_free_blocks) * stats.block_size
    load: dict[str, Any] = {
        "dp_rank": 0,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_used_tokens": num_used,
        "max_total_num_tokens": num_total,
        "max_running_requests": llm.config.scheduler.max_num_seqs,
        "token_usage": num_used / max(num_total, 1),
        "cache_hit_rate": stats.prefix_hits / max(stats.prefix_queries, 1),
    }
    if sections & {"memory", "all"}:
        load["memory"] = {"token_capacity": num_total, "cached_tokens": stats.num_cached_blocks * stats.block_size}
    if sections & {"queues", "all"}:
        load["queues"] = {"waiting": stats.num_waiting, "paused": len(llm.open_request_ids) if llm.is_paused else 0}
    return load


def _as_gauges(load: dict[str, Any]) -> str:
    flat = {name: value for name, value in load.items() if name != "dp_rank" and not isinstance(value, dict)}
    for section in ("memory", "queues"):
        flat |= {f"{section}_{name}": value for name, value in load.get(section, {}).items()}
    return "".join(_GAUGE_LINE.format(name=name, value=value) for name, value in flat.items())
