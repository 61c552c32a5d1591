"""What happened to a request, as timestamped events in a ring buffer.

Every hand-over of docs/request-path.md emits one event. Recording is an append to a bounded deque: no I/O, no lock.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec


class TraceEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that happened.

    Attributes:
        time_s: monotonic clock of the machine, comparable between the processes of one server.
        request_id: empty for what concerns a whole step.
        name: the hand-over, one of those in docs/request-path.md ("scheduled", "first_token", ...).
        data: numbers and short strings about it.
    """

    time_s: float
    request_id: str
    name: str
    data: dict[str, Any] = {}


class Tracer:
    """A bounded record of events; the oldest go first."""

    def __init__(self, capacity: int = 65536):
        self._events: deque[TraceEvent] = deque(maxlen=capacity)
        self.process = os.getpid()

    def emit(self, name: str, request_id: str = "", **data: Any) -> None:
        self._events.append(TraceEvent(time.monotonic(), request_id, name, data))

    def extend(self, events: Iterable[TraceEvent]) -> None:
        """Take over events of another process."""
        self._events.extend(events)

    def drain(self) -> list[TraceEvent]:
        """All events so far; the record is empty afterwards."""
        events = list(self._events)
        self._events.clear()
        return events

    def of_request(self, request_id: str) -> list[TraceEvent]:
        """Events of a request and of the further answers to the same prompt (`ID#1`, ...), in order of time."""
        prefix = request_id + "#"
        mine = [e for e in list(self._events) if e.request_id == request_id or e.request_id.startswith(prefix)]
        return sorted(mine, key=lambda event: event.time_s)
