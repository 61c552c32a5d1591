"""What the server writes: lines as text or JSON, one at the end of each request, at a level that may change meanwhile.

Prompts, answers and keys are never written. Imports nothing heavy: the command line sets logging up before it starts.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from kitfox.outputs import RequestTimings
    from kitfox.server.generation import Job

PROBES = {"/health", "/ready", "/metrics"}  # asked every few seconds by machines: written at level debug
MAX_PATH_CHARS = 200

logger = logging.getLogger("kitfox.request")


# ---- lines ----------------------------------------------------------------------------------------------------------


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what a record carries as `fields` are members of it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """The level, the logger, the message, and `fields` as NAME=VALUE."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s%(shown_fields)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        record.shown_fields = "".join(f" {name}={value}" for name, value in fields.items() if value is not None)
        return super().format(record)


def start_logging(level: str, line_format: str) -> None:
    """Everything that this process logs goes to stderr, in "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if line_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    """From now on. Level debug is for kitfox alone: nobody here answers for what libraries write there."""
    number = getattr(logging, level.upper())
    logging.getLogger("kitfox").setLevel(number)
    logging.getLogger().setLevel(max(number, logging.INFO))


def current_level() -> str:
    return logging.getLevelName(logging.getLogger("kitfox").getEffectiveLevel()).lower()


class LoggingRequest(msgspec.Struct, kw_only=True):
    """POST /configure_logging: what is absent stays as it is."""

    level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    log_requests: bool | None = None


# ---- requests -------------------------------------------------------------------------------------------------------


@dataclass
class RequestRecord:
    """What one HTTP request was and what became of it; filled as it passes through the server.

    Attributes:
        request_id: what the header X-Request-Id of the answer says.
        client_id: the same header of the request.
        path: as sent, still percent-encoded, so that it cannot break a line.
        route: the path's pattern ("/v1/models/{name}"); None where there is none.
        status: 0 until the response starts.
        job: the first one handed to the engine for it.
        queue_s, prefill_s, decode_s, ttft_s: of its slowest prompt.
    """

    request_id: str
    method: str
    path: str
    client_id: str | None = None
    traceparent: str | None = None
    route: str | None = None
    status: int = 0
    is_stream: bool = False
    job: Job | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    ttft_s: float | None = None
    start_s: float = field(default_factory=time.monotonic)
    start_unix_ns: int = field(default_factory=time.time_ns)
    duration_s: float = 0.0

    @property
    def is_probe(self) -> bool:
        """Whether it is what machines ask every few seconds; refused ones have no route."""
        return (self.route or self.path) in PROBES

    def book_timings(self, timings: RequestTimings) -> None:
        self.queue_s = max(self.queue_s or 0.0, timings.queue_s)
        self.prefill_s = max(self.prefill_s or 0.0, timings.prefill_s)
        self.decode_s = max(self.decode_s or 0.0, timings.decode_s)
        if timings.ttft_s is not None:
            self.ttft_s = max(self.ttft_s or 0.0, timings.ttft_s)

    def end(self) -> None:
        self.duration_s = time.monotonic() - self.start_s

    def fields(self) -> dict[str, Any]:
        """What the line at its end says; counts and times of the engine only where it was asked."""
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "client_id": self.client_id,
            "method": self.method,
            "path": self.path[:MAX_PATH_CHARS],
            "status": self.status,
            "e2e_ms": _milliseconds(self.duration_s),
        }
        if self.job is not None:
            fields |= {
                "answer_id": self.job.answer_id,
                "model": self.job.model,
                "adapter": ",".join(self.job.adapters) or None,
                "stream": self.is_stream,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "output_tokens": self.output_tokens,
                "finish_reason": ",".join(self.finish_reasons),
                "queue_ms": _milliseconds(self.queue_s),
                "prefill_ms": _milliseconds(self.prefill_s),
                "decode_ms": _milliseconds(self.decode_s),
                "ttft_ms": _milliseconds(self.ttft_s),
            }
        return fields


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


current_request: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)


@dataclass
class RequestLog:
    """Writes a line when a request has ended, unless switched off."""

    enabled: bool

    def write(self, record: RequestRecord) -> None:
        if self.enabled:
            level = logging.DEBUG if record.is_probe else logging.INFO
            logger.log(level, "request", extra={"fields": record.fields()})
