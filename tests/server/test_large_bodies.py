"""Large bodies do not hold up others' tokens."""

from __future__ import annotations

import asyncio

import pytest

from kitfox.server import validation
from kitfox.server.validation import LARGE_BODY_BYTES, Turns
from tests.server.fake_llm import MODEL, FakeAsyncLLM
from tests.server.fault_table import COMPLETIONS
from tests.server.http_client import send_all


def test_what_took_long_is_followed_by_as_long_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    slept: list[float] = []
    order: list[str] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += max(seconds, 0)

    async def work(turns: Turns, name: str, seconds: float) -> None:
        nonlocal now
        async with turns.turn():
            order.append(name)
            now += seconds

    async def run() -> None:
        nonlocal now
        turns = Turns()
        await asyncio.gather(work(turns, "a", 3.0), work(turns, "b", 2.0), work(turns, "c", 1.0))
        now += 0.25
        await work(turns, "d", 1.0)

    monkeypatch.setattr(validation.time, "monotonic", lambda: now)
    monkeypatch.setattr(validation.asyncio, "sleep", sleep)
    asyncio.run(run())
    assert order == ["a", "b", "c", "d"]
    assert [max(seconds, 0) for seconds in slept] == [0, 3.0, 2.0, 0.75]


def test_a_bad_one_lets_the_next_one_in() -> None:
    large = "x" * LARGE_BODY_BYTES
    bodies = [{"model": MODEL, "prompt": large}, {"model": MODEL, "prompt": "Hi", "user": large}]
    refused, answered = send_all(FakeAsyncLLM(), [("POST", COMPLETIONS, body) for body in bodies])
    assert (refused.status_code, answered.status_code) == (400, 200)
