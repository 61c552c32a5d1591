"""SGLang's sessions: what stands before a turn, and what becomes of turns."""

from __future__ import annotations

from typing import Any

import pytest

from kitfox.errors import InvalidParameterError
from kitfox.server.sessions import SessionParams, Sessions
from tests.server.fake_llm import BOS, EOS, REPLY, FakeAsyncLLM
from tests.server.http_client import send_all

OPEN = ("POST", "/open_session", {"capacity_of_str_len": 1000, "session_id": "s"})
CLOSE = ("POST", "/close_session", {"session_id": "s"})


def turn(text: str, rid: str, after: str | None = None, **fields: Any) -> tuple[str, str, dict[str, Any]]:
    """A request of the session."""
    place = {"id": "s", "rid": after} | fields
    body = {"text": text, "rid": rid, "sampling_params": {"max_new_tokens": 3}, "session_params": place}
    return "POST", "/generate", body


def prompts_of(*requests: tuple[str, str, Any]) -> list[bytes]:
    """What the engine is asked, where all goes well."""
    llm = FakeAsyncLLM()
    responses = send_all(llm, list(requests))
    assert [response.status_code for response in responses] == [200] * len(requests), responses[-1].text
    return [bytes(prompt) for _, prompt, _ in llm.seen]


def refused_by(*requests: tuple[str, str, Any]) -> str:
    """The parameter that the last request is refused for."""
    response = send_all(FakeAsyncLLM(), list(requests))[-1]
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"]


def test_a_turn_begins_with_what_went_before() -> None:
    said = REPLY[:3].encode()
    prompts = prompts_of(
        OPEN, turn("Hi", "a"), turn("Ho", "b", "a"), turn("He", "c", "b"), turn("Or", "d", "a"), turn("New", "e")
    )
    first = b"Hi" + said
    assert prompts == [b"Hi", first + b"Ho", first + b"Ho" + said + b"He", first + b"Or", b"New"]


@pytest.mark.parametrize("stream", [False, True])
def test_turns_of_streams_are_kept_too(stream: bool) -> None:
    method, path, body = turn("Hi", "a")
    assert prompts_of(OPEN, (method, path, body | {"stream": stream}), turn("Ho", "b", "a"))[1] == b"HiTheHo"


def test_what_may_stay_of_what_went_before() -> None:
    fields: list[dict[str, Any]] = [{"drop_previous_output": True}, {"offset": 1}, {"offset": -1}, {"offset": 0}]
    turns = [turn("!", str(index), "a", **each) for index, each in enumerate(fields)]
    assert prompts_of(OPEN, turn("Hi", "a"), *turns)[1:] == [b"Hi!", b"H!", b"HiTh!", b"HiThe!"]


def test_a_turn_that_goes_on_does_not_begin_a_text() -> None:
    llm = FakeAsyncLLM()
    method, path, body = turn("", "b", "a")
    del body["text"]
    send_all(llm, [OPEN, turn("Hi", "a"), (method, path, body | {"input_ids": [BOS, 72]})])
    assert llm.seen[1][1] == [*b"HiTheH"]


def test_replaced_turns_are_gone() -> None:
    begun = (OPEN, turn("Hi", "a"), turn("Ho", "b", "a"), turn("He", "c", "b"))
    assert prompts_of(*begun, turn("!", "d", "a", replace=True))[-1] == b"HiThe!"
    for gone in ("b", "c"):
        assert refused_by(*begun, turn("!", "d", "a", replace=True), turn("?", "e", gone)) == "session_params.rid"
    for gone in ("a", "b", "c"):
        assert refused_by(*begun, turn("!", "d", replace=True), turn("?", "e", gone)) == "session_params.rid"


def test_the_answer_of_a_turn_is_any_other_s() -> None:
    responses = send_all(FakeAsyncLLM(), [OPEN, turn("Hi", "a")])
    assert responses[0].json() == "s"
    assert (responses[1].json()["text"], responses[1].json()["meta_info"]["id"]) == ("The", "a")


def test_what_is_refused() -> None:
    method, path, body = turn("Hi", "a")
    assert refused_by((method, path, body)) == "session_params.id"
    assert refused_by(OPEN, CLOSE, (method, path, body)) == "session_params.id"
    assert refused_by(OPEN, turn("Hi", "a", "nobody")) == "session_params.rid"
    assert refused_by(OPEN, (method, path, body | {"text": ["Hi"]})) == "session_params"
    assert refused_by(OPEN, (method, path, body | {"sampling_params": {"n": 2}})) == "n"
    assert refused_by(OPEN, OPEN) == "session_id"
    assert refused_by(CLOSE) == "session_id"
    for name, value in (("streaming", True), ("colour", "red"), ("session_id", "")):
        assert refused_by((OPEN[0], OPEN[1], OPEN[2] | {name: value})) == name


def test_a_session_whose_turn_still_runs_may_be_closed() -> None:
    sessions = Sessions()
    params = SessionParams(id=sessions.open())
    sessions.close(params.id)
    sessions.add(params, "a", [1], [EOS])
    with pytest.raises(InvalidParameterError):
        sessions.context(params)


def is_open(sessions: Sessions, session_id: str) -> bool:
    try:
        sessions.context(SessionParams(id=session_id))
    except InvalidParameterError:
        return False
    return True


def test_the_least_recently_used_are_closed() -> None:
    sessions = Sessions(max_sessions=2, max_tokens=6)
    sessions.open("a")
    sessions.open("b")
    assert is_open(sessions, "a")
    sessions.open("c")
    assert [is_open(sessions, name) for name in "abc"] == [True, False, True]
    sessions.add(SessionParams(id="c"), "1", [1] * 5, [2])
    assert [is_open(sessions, name) for name in "ac"] == [True, True]
    sessions.add(SessionParams(id="c"), "2", [1], [])
    assert [is_open(sessions, name) for name in "ac"] == [False, True]
    with pytest.raises(InvalidParameterError):
        sessions.context(SessionParams(id="c", rid="1"))
    assert sessions.context(SessionParams(id="c", rid="2")) == [1]


def test_only_what_is_kept_counts() -> None:
    sessions = Sessions(max_tokens=6)
    for name in "ab":
        sessions.open(name)
    for _ in range(3):
        sessions.add(SessionParams(id="b"), "same", [1], [2])
        sessions.add(SessionParams(id="b"), "replaced", [1], [2])
        sessions.context(SessionParams(id="b", replace=True))
        sessions.add(SessionParams(id=sessions.open("c")), "closed", [1] * 3, [2])
        sessions.close("c")
    assert [is_open(sessions, name) for name in "ab"] == [True, True]


def test_idle_sessions_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("kitfox.server.sessions.time.monotonic", lambda: now_s)
    sessions = Sessions()
    sessions.open("brief", timeout_s=10)
    sessions.open("long")
    now_s = 109.0
    assert is_open(sessions, "brief")
    now_s = 118.0
    assert is_open(sessions, "brief"), "it was used in between"
    now_s = 129.0
    assert [is_open(sessions, name) for name in ("brief", "long")] == [False, True]
