"""What happened to a request, as timestamped events in a ring buffer.

Every hand-over of docs/request-path.md emits one event. Recording is an append to a bounded deque: no I/O, no lock.
A profile is what both processes recorded between a start and a stop, in a form that trace viewers read.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

MAX_PROFILE_EVENTS = 1_000_000


class TraceEvent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
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
        self._profile: list[TraceEvent] | None = None
        self.process = os.getpid()

    def emit(self, name: str, request_id: str = "", **data: Any) -> None:
        self.emit_each(name, {request_id: data})

    def emit_each(self, name: str, data: dict[str, dict[str, Any]]) -> None:
        """The same to several requests at once, each with its own data, by request id."""
        now = time.monotonic()
        events = [TraceEvent(now, request_id, name, about) for request_id, about in data.items()]
        self._events += events
        if self._profile is not None:
            self._profile += events[: MAX_PROFILE_EVENTS - len(self._profile)]

    def start_profile(self) -> None:
        """Keep every event from now on, up to MAX_PROFILE_EVENTS of them."""
        self._profile = []

    def stop_profile(self) -> list[TraceEvent]:
        """What happened since `start_profile`; nothing if that was never called."""
        events, self._profile = self._profile or [], None
        return events

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


_STEPS, _REQUESTS = 1, 2  # "processes" of the trace viewer
# A slice of a request's life is named by what begins it and ends with the next of these events.
_SLICES = {
    "received": "to the engine",
    "queued": "waiting",
    "admitted": "prefill",
    "first_token": "decode",
    "preempted": "waiting",
}
_SLICE_ENDS = {*_SLICES, "finished", "aborted"}


def to_trace_events(events: list[TraceEvent]) -> list[dict[str, Any]]:
    """Events as the trace-event format that Perfetto and chrome://tracing read: times in microseconds.

    Steps are slices on one track, with counters of their tokens and requests; each request is a track of its own.
    """
    events = sorted(events, key=lambda event: event.time_s)
    start_s = min((event.time_s - event.data.get("seconds", 0.0) for event in events), default=0.0)
    made: list[dict[str, Any]] = [_name(_STEPS, "engine steps"), _name(_REQUESTS, "requests")]
    tracks: dict[str, int] = {}
    open_slices: dict[str, tuple[str, float]] = {}  # request id -> name and start
    for event in events:
        at_us = (event.time_s - start_s) * 1e6
        if event.name == "step":
            duration_us = event.data["seconds"] * 1e6
            place = {"pid": _STEPS, "tid": 0, "ts": at_us - duration_us}
            made.append(
                {"ph": "X", "name": f"step {event.data['step']}", "dur": duration_us, "args": event.data} | place
            )
            counts = {"tokens": event.data["tokens"], "requests": event.data["requests"]}
            made.append({"ph": "C", "name": "batch", "args": counts} | place)
            continue
        if event.request_id not in tracks:
            tracks[event.request_id] = len(tracks) + 1
            made.append(_name(_REQUESTS, event.request_id, tracks[event.request_id]))
        place = {"pid": _REQUESTS, "tid": tracks[event.request_id]}
        if event.name in _SLICE_ENDS and event.request_id in open_slices:
            name, began_us = open_slices.pop(event.request_id)
            made.append({"ph": "X", "name": name, "ts": began_us, "dur": at_us - began_us, "args": {}} | place)
        if event.name in _SLICES:
            open_slices[event.request_id] = (_SLICES[event.name], at_us)
        if event.name not in ("scheduled", "verified"):  # once a token: the steps show it
            made.append({"ph": "i", "s": "t", "name": event.name, "ts": at_us, "args": event.data} | place)
    return made


def _name(pid: int, name: str, tid: int | None = None) -> dict[str, Any]:
    named = {"ph": "M", "name": "process_name" if tid is None else "thread_name", "pid": pid, "args": {"name": name}}
    return named if tid is None else named | {"tid": tid}
