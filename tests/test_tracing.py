"""A profile in the form that trace viewers read."""

from __future__ import annotations

import pytest

from kitfox import tracing
from kitfox.tracing import TraceEvent, Tracer, to_trace_events


def test_steps_and_the_stages_of_a_request_are_slices() -> None:
    events = [
        TraceEvent(10.0, "r", "received", {"prompt": 3}),
        TraceEvent(10.1, "r", "queued", {}),
        TraceEvent(10.2, "r", "admitted", {"cached": 0}),
        TraceEvent(10.5, "r", "first_token", {}),
        TraceEvent(10.5, "", "step", {"step": 1, "tokens": 3, "requests": 1, "seconds": 0.3}),
        TraceEvent(10.6, "r", "scheduled", {"step": 2, "tokens": 1}),
        TraceEvent(10.9, "r", "finished", {"reason": "stop"}),
        TraceEvent(11.0, "r", "answered", {}),
    ]
    made = to_trace_events(events[::-1])
    slices = {event["name"]: (event["ts"], event["dur"]) for event in made if event["ph"] == "X"}
    assert slices == {
        "to the engine": pytest.approx((0, 1e5)),
        "waiting": pytest.approx((1e5, 1e5)),
        "prefill": pytest.approx((2e5, 3e5)),
        "decode": pytest.approx((5e5, 4e5)),
        "step 1": pytest.approx((2e5, 3e5)),
    }
    assert [event["name"] for event in made if event["ph"] == "i"] == [
        "received", "queued", "admitted", "first_token", "finished", "answered",
    ]  # fmt: skip
    assert [event["args"] for event in made if event["ph"] == "C"] == [{"tokens": 3, "requests": 1}]
    assert {event["args"]["name"] for event in made if event["ph"] == "M"} == {"engine steps", "requests", "r"}


def test_a_preempted_request_waits_again() -> None:
    names = ["queued", "admitted", "preempted", "admitted", "aborted"]
    made = to_trace_events([TraceEvent(float(at), "r", name, {}) for at, name in enumerate(names)])
    assert [(event["name"], event["dur"]) for event in made if event["ph"] == "X"] == [
        ("waiting", 1e6), ("prefill", 1e6), ("waiting", 1e6), ("prefill", 1e6),
    ]  # fmt: skip


def test_nothing_recorded_is_a_valid_profile() -> None:
    assert [event["ph"] for event in to_trace_events([])] == ["M", "M"]


def test_a_profile_is_bounded_and_apart_from_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_PROFILE_EVENTS", 3)
    tracer = Tracer(capacity=2)
    tracer.emit("before")
    tracer.start_profile()
    for number in range(5):
        tracer.emit("event", number=number)
    assert [event.data["number"] for event in tracer.stop_profile()] == [0, 1, 2]
    assert [event.data["number"] for event in tracer.drain()] == [3, 4]
    assert tracer.stop_profile() == []
