"""The client against a scripted server: what it sends, when, what it makes of the answer, and how it fails."""

from __future__ import annotations

import asyncio
import itertools
import socket
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitfox.bench.client import Answer, EventSplitter, Target, drive, send, start_times
from kitfox.bench.records import Arrivals, BenchRequest, Record, Session, Workload
from kitfox.errors import ConfigError
from tests.bench.fake_server import MODEL, Body, FakeServer, Script, event, failure, stream

GENEROUS_S = 2.0  # what a busy machine may add to a pause


def ask(max_tokens: int = 4, request_id: str = "r", **fields: Any) -> BenchRequest:
    if not fields.keys() & {"text", "messages"}:
        fields.setdefault("token_ids", (1, 2, 3))
    return BenchRequest(request_id, max_tokens, **fields)


def workload(*sessions: Session) -> Workload:
    return Workload("test", "", sessions, "")


def singles(count: int, **fields: Any) -> Workload:
    return workload(*(Session((ask(request_id=str(index), **fields),)) for index in range(count)))


def target(server: FakeServer, **fields: Any) -> Target:
    return Target(server.url, MODEL, **{"timeout_s": 30.0} | fields)


def sent(script: Script | Callable[[Body], Script], request: BenchRequest | None = None, **fields: Any) -> Record:
    """One request to a server that answers by the script."""
    respond = script if callable(script) else lambda body: script
    with FakeServer(respond) as server:
        return asyncio.run(send(target(server, **fields), request or ask()))


def driven(server: FakeServer, work: Workload, arrivals: Arrivals, **fields: Any) -> list[Record]:
    return asyncio.run(drive(target(server, **fields), work, arrivals, seed=0))


def chunk(text: str = " a", finish_reason: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason} | fields]})


def usage(completion_tokens: int, **fields: Any) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": completion_tokens} | fields})


DONE = event("[DONE]")


def script_of(*events: bytes, **fields: Any) -> Script:
    return Script(tuple((0.0, piece) for piece in events), **fields)


# ---- what is sent ---------------------------------------------------------------------------------------------------


def test_bodies() -> None:
    messages = ({"role": "user", "content": "hi"},)
    tools = ({"type": "function", "function": {"name": "f"}},)
    common = {"model": MODEL, "max_tokens": 4, "temperature": 0.0, "stream": True}
    common["stream_options"] = {"include_usage": True}
    with FakeServer() as server:
        plain = target(server)
        asyncio.run(send(plain, ask()))
        asyncio.run(send(plain, ask(text="hello")))
        asyncio.run(send(plain, ask(messages=messages, tools=tools)))
        picky = target(server, ignore_eos=False, count_chunk_tokens=True, extra={"stream_options": None, "top_k": 1})
        asyncio.run(send(picky, ask()))
        ids, text, chat, changed = server.requests
    assert ids == common | {"prompt": [1, 2, 3], "ignore_eos": True}
    assert text == common | {"prompt": "hello", "ignore_eos": True}
    assert chat == common | {"messages": list(messages), "tools": list(tools), "ignore_eos": True}
    del common["stream_options"]
    assert changed == common | {"prompt": [1, 2, 3], "return_token_ids": True, "top_k": 1}


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_base_urls_with_and_without_v1(suffix: str) -> None:
    with FakeServer() as server:
        record = asyncio.run(send(Target(server.url + suffix, MODEL), ask()))
    assert record.failure is None


def test_a_path_before_v1_and_a_key_go_into_the_head() -> None:
    head = Target("https://host/some/v1", "m", api_key="secret").encode(ask()).decode().split("\r\n")
    assert head[0] == "POST /some/v1/completions HTTP/1.1"
    assert {"Host: host", "Authorization: Bearer secret", "Connection: close"} <= set(head)
    assert Target("https://host", "m").port == 443
    assert Target("https://host", "m").tls is not None
    assert Target("http://[::1]:80", "m").host == "::1"


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", "http://host:x", "http://host?a=b"])
def test_an_address_that_cannot_be(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url must look like"):
        Target(url, "m")


def test_requests_that_cannot_be_sent_are_refused_before_anything_is() -> None:
    quoting = ({"role": "assistant", "content": None}, {"role": "user", "content": "and?"})
    wrong = {
        "one of token_ids, text and messages": BenchRequest("x", 4),
        "takes text only": ask(),
        "quotes 1 answers": ask(messages=quoting),
    }
    with FakeServer() as server:
        for message, request in wrong.items():
            work = workload(Session((ask(text="fine"),)), Session((request,)))
            with pytest.raises(ConfigError, match=message):
                driven(server, work, Arrivals(), prompts="text")
        assert not server.requests
    with pytest.raises(ConfigError, match="extra may not set prompt"):
        Target("http://host", "m", extra={"prompt": "x"})


# ---- what comes back ------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_script() -> None:
    record = sent(lambda body: Script(stream(body, ttft_s=0.08, itl_s=0.02), head_delay_s=0.01))
    assert record.failure is None
    assert len(record.chunk_s) == 4
    assert record.ttft_s is not None
    assert record.e2el_s is not None
    assert 0.09 <= record.ttft_s <= 0.09 + GENEROUS_S
    assert 0.15 <= record.e2el_s <= 0.15 + GENEROUS_S
    assert record.end_s >= record.chunk_s[-1]


def test_times_are_those_of_the_reads() -> None:
    """An event has the time of the read that ends it, and all events of one read have the same."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"
    answer = Answer()
    half = len(chunk()) // 2
    answer.receive(head, 1.0)
    answer.receive(chunk() + chunk() + chunk()[:half], 2.0)
    answer.receive(chunk()[half:], 3.0)
    answer.receive(chunk("", "length") + usage(3), 4.0)
    assert not answer.is_done
    answer.receive(DONE, 5.0)
    answer.close(6.0)
    assert answer.chunk_s == [2.0, 2.0, 3.0]
    assert answer.end_s == 5.0
    assert answer.failure is None


def test_a_whole_answer() -> None:
    record = sent(lambda body: Script(stream(body, cached_tokens=2)), ask(3, prompt_tokens=3))
    assert record.failure is None
    assert record.text == " token token token"
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 3, 2)
    assert (record.request_id, record.asked_tokens, record.expected_prompt_tokens) == ("r", 3, 3)
    assert record.finish_reason == "length"
    assert record.chunk_tokens == ()


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("split", [None, 7])
def test_framings(framing: Any, split: int | None) -> None:
    record = sent(lambda body: Script(stream(body), framing=framing, split=split))
    assert record.failure is None
    assert record.text == " token" * 4


def test_chats_count_everything_a_model_says_and_keep_its_text() -> None:
    deltas: list[Any] = [{"role": "assistant", "content": ""}, {"reasoning": "a"}, {"reasoning_content": "b"}]
    deltas += [{"content": "yes"}, {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, {}]
    events = [event({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    record = sent(script_of(*events, usage(4), DONE), ask(4, messages=({"role": "user", "content": "?"},)))
    assert record.failure is None
    assert len(record.chunk_s) == 4
    assert record.text == "yes"


def test_tokens_of_chunks() -> None:
    record = sent(lambda body: Script(stream(body, per_chunk=3)), ask(8), count_chunk_tokens=True)
    assert record.chunk_tokens == (3, 3, 2)
    assert sent(lambda body: Script(stream(body, per_chunk=3)), ask(8)).chunk_tokens == ()


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [
        ([chunk(token_ids=[1, 2]), chunk("", token_ids=[3])], (2, 1)),
        ([chunk(logprobs={"tokens": ["a", "b"]}), chunk(logprobs={"tokens": ["c"]})], (2, 1)),
        ([chunk(logprobs={"content": [{"token": "a"}] * 2}), chunk("", logprobs={"content": [{}]})], (2, 1)),
        ([chunk(token_ids=[1, 2]), chunk()], ()),
        ([chunk(token_ids=[1, 2]), chunk(token_ids=[3, 4])], ()),
        ([chunk(), chunk(token_ids=[1, 2, 3])], ()),
    ],
    ids=["ids", "logprobs", "chat logprobs", "one without", "sum differs", "first without"],
)
def test_how_servers_count_a_chunk(chunks: list[bytes], tokens: tuple[int, ...]) -> None:
    record = sent(script_of(*chunks, chunk("", "length"), usage(3), DONE), ask(3))
    assert record.failure is None
    assert record.chunk_tokens == tokens
    assert len(record.chunk_s) == 2


def test_running_totals_count_chunks_too() -> None:
    choices = [{"index": 0, "text": " a"}]
    for field, name in (("usage", "completion_tokens"), ("timings", "predicted_n")):
        events = [event({"choices": choices, field: {name: total}}) for total in (1, 4, 6)]
        record = sent(script_of(*events, chunk("", "length"), usage(6), DONE), ask(6))
        assert record.chunk_tokens == (1, 3, 2)


def test_llama_cpp_timings_stand_in_for_a_usage() -> None:
    last = event({"choices": [], "timings": {"prompt_n": 5, "cache_n": 7, "predicted_n": 2, "predicted_ms": 1.5}})
    record = sent(script_of(chunk(), chunk(), chunk("", "length"), last, DONE), ask(2, prompt_tokens=12))
    assert record.failure is None
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (12, 2, 7)


def test_nothing_is_made_up_where_a_server_does_not_count() -> None:
    record = sent(lambda body: Script(stream(body, tokens=2, with_usage=False)), ask(5))
    assert record.failure is None
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (None, None, None)
    record = sent(lambda body: Script(stream(body, tokens=2, with_usage=False)), ask(5), count_chunk_tokens=True)
    assert record.output_tokens == 2
    assert record.failure is not None
    assert record.failure.kind == "wrong_token_count"


def test_an_end_without_done_is_an_end_where_the_response_tells_its_length() -> None:
    events = [chunk(), chunk(finish_reason="length"), usage(2)]
    assert sent(script_of(*events), ask(2)).failure is None
    assert sent(script_of(*events, framing="length"), ask(2)).failure is None
    cut = sent(script_of(*events, framing="close"), ask(2)).failure
    assert cut is not None
    assert cut.kind == "broken_stream"


def test_done_is_the_end_though_the_connection_stays_open() -> None:
    record = sent(lambda body: Script(stream(body), end="hang"))
    assert record.failure is None
    assert record.end_s - record.chunk_s[-1] < 1.0  # the client waits longer than this for the response's end


def test_an_interim_response_is_no_answer() -> None:
    answer = Answer()
    answer.receive(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", 0.0)
    answer.receive(chunk() + chunk("", "stop") + DONE, 1.0)
    answer.close(2.0)
    assert answer.failure is None
    assert answer.chunk_s == [1.0]


# ---- failures -------------------------------------------------------------------------------------------------------


def failed(record: Record) -> tuple[str, str]:
    assert record.failure is not None
    assert record.end_s >= record.sent_s
    return record.failure.kind, record.failure.detail


def test_no_server() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kind, _ = failed(asyncio.run(send(Target(f"http://127.0.0.1:{port}", "m"), ask())))
    assert kind == "refused"


@pytest.mark.parametrize(
    "script",
    [
        Script(raw=b"", end="hang"),
        Script(((0.0, chunk()), (0.0, chunk())), end="hang"),
    ],
    ids=["nothing", "half"],
)
def test_a_server_that_hangs(script: Script) -> None:
    record = sent(script, timeout_s=0.2)
    assert failed(record) == ("timeout", "no complete answer within 0.2 s")
    assert record.end_s - record.sent_s >= 0.2
    assert len(record.chunk_s) == len(script.pieces)


def test_statuses() -> None:
    record = sent(failure(429, "queue is full, " + "wait " * 200))
    kind, detail = failed(record)
    assert kind == "http_status"
    assert record.failure is not None
    assert record.failure.status == 429
    assert detail.startswith("queue is full")
    assert len(detail) == 300
    for body, message in (
        (b'{"detail":"no"}', "no"),
        (b'{"error":"bad"}', "bad"),
        (b"oops", "oops"),
        (b"", "no message"),
    ):
        for framing in ("length", "close", "chunked"):
            script = Script(((0.0, body),) if body else (), 500, "text/plain", framing=framing)  # type: ignore[arg-type]
            assert failed(sent(script)) == ("http_status", message)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(raw=b""), "the connection ended in the middle"),
        (Script(raw=b"SSH-2.0-server\r\n"), "not HTTP"),
        (Script(raw=b"HTTP/1.1 200 OK\r\nContent-Le"), "the connection ended in the middle"),
        (script_of(chunk(), end="cut"), "the connection ended in the middle"),
        (script_of(chunk(), chunk("", "length"), usage(1), end="cut"), "the connection ended in the middle"),
        (script_of(chunk()), "ended without [DONE]"),
        (script_of(chunk(), event("{nonsense"), DONE), "an event is not what OpenAI's API sends"),
        (script_of(chunk(), event("[1, 2]"), DONE), "an event is not what OpenAI's API sends"),
        (script_of(chunk(), b"data: \xff\n\n", DONE), "an event is not what OpenAI's API sends"),
        (script_of(chunk(), event({"hello": 1}), DONE), 'an event without choices: {"hello":1}'),
        (script_of(chunk(), event({"error": {"message": "out of memory"}}), DONE), "an error: out of memory"),
        (script_of(chunk(), event({"object": "error", "message": "boom"}), DONE), "an error: boom"),
        (script_of(DONE), "nothing in it"),
        (script_of(chunk(), usage(1), DONE, chunk()), "after [DONE]"),
        (script_of(b'{"choices": []}', content_type="application/json"), "application/json instead of a stream"),
    ],
)
def test_broken_streams(script: Script, message: str) -> None:
    kind, detail = failed(sent(script, ask(1)))
    assert kind == "broken_stream"
    assert message in detail


def test_wrong_counts() -> None:
    def counts(tokens: int, *, ignore_eos: bool, **fields: Any) -> Record:
        answer = lambda body: Script(stream(body, tokens=tokens, prompt_tokens=3))  # noqa: E731
        return sent(answer, ask(4, **fields), ignore_eos=ignore_eos)

    assert failed(counts(3, ignore_eos=True)) == ("wrong_token_count", "3 tokens in the answer; 4 were asked for")
    assert failed(counts(5, ignore_eos=True)) == ("wrong_token_count", "5 tokens in the answer; 4 were asked for")
    assert counts(3, ignore_eos=False).failure is None
    assert failed(counts(5, ignore_eos=False))[0] == "wrong_token_count"
    assert failed(counts(4, ignore_eos=True, prompt_tokens=5)) == (
        "wrong_token_count",
        "the server counts 3 tokens in the prompt; it has 5",
    )


# ---- cutting the stream ---------------------------------------------------------------------------------------------

STREAM = b"".join(
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n",
        *(
            b"%x\r\n%b\r\n" % (len(part), part)
            for part in (
                b": a comment\n\nevent: message\nid: 7\n",
                chunk(" caf\u00e9", token_ids=[1, 2]),
                chunk(" \u6771", token_ids=[3]).replace(b"\n", b"\r\n"),
                b'data: {"choices":[\ndata:{"text":" x","token_ids":[4]}]}\n\n',
                chunk("", "length", token_ids=[]) + usage(4) + b"data:[DONE]\r\n\r\n",
            )
        ),
        b"0\r\n\r\n",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=60))
def test_any_cut_of_the_bytes_gives_the_same_answer(cuts: list[int]) -> None:
    answer = Answer()
    edges = [0, *sorted(cuts), len(STREAM)]
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        if start < end:
            answer.receive(STREAM[start:end], float(number))
    assert answer.is_over
    assert answer.failure is None
    assert answer.text == " caf\u00e9 \u6771 x"
    assert answer.chunk_tokens == (2, 1, 1)
    assert answer.finish_reason == "length"
    assert (answer.prompt_tokens, answer.output_tokens) == (3, 4)
    assert answer.chunk_s == sorted(answer.chunk_s)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("ab :é", max_size=5), min_size=1, max_size=4),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 60), max_size=10),
)
def test_events_are_told_apart_with_any_line_end(data: list[str], line_end: bytes, cuts: list[int]) -> None:
    content = b"".join(b"data: " + text.encode() + line_end * 2 for text in data)
    edges = [0, *sorted(cuts), max(len(content), 60)]
    splitter = EventSplitter()
    events = [found for start, end in itertools.pairwise(edges) for found in splitter.feed(content[start:end])]
    assert events == [text.encode() for text in data]
    assert splitter.end() == []


# ---- sessions and arrivals ------------------------------------------------------------------------------------------


def test_a_closed_loop_keeps_its_concurrency_and_its_order() -> None:
    running, most = 0, 0

    def begin(_: BenchRequest) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)

    def end(_: Record) -> None:
        nonlocal running
        running -= 1

    with FakeServer(lambda body: Script(stream(body, ttft_s=0.01))) as server:
        work = singles(10)
        arrivals = Arrivals("closed", concurrency=3)
        records = asyncio.run(drive(target(server), work, arrivals, 0, on_record=end, on_start=begin))
    assert most == 3
    assert running == 0
    assert sorted(record.session for record in records) == list(range(10))
    assert [record.session for record in sorted(records, key=lambda record: record.sent_s)] == list(range(10))
    assert all(record.failure is None and record.planned_s is None for record in records)


def test_turns_follow_one_another_and_quote_the_answers() -> None:
    calls_a_tool = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    question, quoted = {"role": "user", "content": "hi"}, {"role": "assistant", "content": None}
    turns = (
        ask(1, "a", messages=(question,)),
        ask(2, "b", messages=(question, quoted, question), think_s=0.05),
        ask(1, "c", messages=(question, quoted, question, quoted, calls_a_tool, question)),
    )
    with FakeServer() as server:
        records = driven(server, workload(Session(turns)), Arrivals())
        _, second, third = (body["messages"] for body in server.requests)
    assert [(record.request_id, record.turn) for record in records] == [("a", 0), ("b", 1), ("c", 2)]
    first_answer, second_answer = ({"role": "assistant", "content": " token" * count} for count in (1, 2))
    assert second == [question, first_answer, question]
    assert third == [question, first_answer, question, second_answer, calls_a_tool, question]
    assert records[1].sent_s - records[0].end_s >= 0.05


def test_later_turns_of_a_failed_one_fail_with_it() -> None:
    session = Session((ask(1, "a"), ask(2, "b"), ask(3, "c"), ask(4, "d")))
    begun = []
    with FakeServer(lambda b: failure(503, "no") if b["max_tokens"] == 2 else Script(stream(b))) as server:
        records = asyncio.run(
            drive(target(server), workload(session), Arrivals(), 0, on_start=lambda request: begun.append(request.id))
        )
        assert len(server.requests) == 2
    assert begun == [record.request_id for record in records] == ["a", "b", "c", "d"]
    assert records[0].failure is None
    assert failed(records[1]) == ("http_status", "no")
    for record in records[2:]:
        assert failed(record) == ("http_status", "not sent: turn 1 of its session failed")
        assert record.failure is not None
        assert record.failure.status == 503


def test_an_open_loop_sends_when_it_planned_to() -> None:
    sessions = (
        Session((ask(request_id="b"), ask(request_id="c")), at_s=0.3),
        Session((ask(request_id="a"),), at_s=0.1),
    )
    with FakeServer() as server:
        records = driven(server, workload(*sessions), Arrivals("trace", speed=2.0))
    assert [record.request_id for record in records] == ["a", "b", "c"]
    assert records[0].planned_s == pytest.approx(0.05, abs=0.01)
    assert records[1].planned_s == pytest.approx(0.15, abs=0.01)
    assert records[2].planned_s is None
    for record in records[:2]:
        assert record.planned_s is not None
        assert 0 <= record.sent_s - record.planned_s < GENEROUS_S


def test_stopping_interrupts_what_runs_and_leaves_out_the_rest() -> None:
    ended: list[Record] = []

    async def run(server: FakeServer, arrivals: Arrivals) -> list[Record]:
        stop = asyncio.Event()

        def end(record: Record) -> None:
            ended.append(record)
            if len(ended) == 3:
                stop.set()

        return await drive(target(server), singles(20), arrivals, 0, on_record=end, stop=stop)

    def respond(body: Body) -> Script:
        hangs = len(server.requests) > 3
        return script_of(chunk(), end="hang") if hangs else Script(stream(body))

    for arrivals in (Arrivals("closed", concurrency=4), Arrivals("poisson", rate=10.0)):
        ended.clear()
        with FakeServer(respond) as server:
            records = asyncio.run(run(server, arrivals))
        assert records == ended
        assert [record.failure for record in records[:3]] == [None] * 3
        assert all(failed(record)[0] == "interrupted" for record in records[3:])
        assert len(records) < 20
        assert len(records) > 3 or arrivals.kind == "poisson"


def test_a_cancelled_run_still_hands_its_records_on() -> None:
    ended: list[Record] = []

    async def run(server: FakeServer) -> None:
        task = asyncio.create_task(drive(target(server), singles(4), Arrivals(), 0, on_record=ended.append))
        while len(server.requests) < 4:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with FakeServer(lambda body: script_of(chunk(), end="hang")) as server:
        asyncio.run(run(server))
    assert [failed(record)[0] for record in ended] == ["interrupted"] * 4


def test_nothing_is_sent_once_stopped() -> None:
    async def run(server: FakeServer) -> list[Record]:
        stop = asyncio.Event()
        stop.set()
        return await drive(target(server), singles(2), Arrivals(), 0, stop=stop)

    with FakeServer() as server:
        assert asyncio.run(run(server)) == []
        assert not server.requests


def test_start_times() -> None:
    sessions = [Session((ask(),))] * 20_000
    assert start_times(Arrivals("closed"), sessions, 0) is None

    def gaps(arrivals: Arrivals, seed: int = 0) -> list[float]:
        times = start_times(arrivals, sessions, seed)
        assert times is not None
        assert times[0] == 0.0
        assert len(times) == len(sessions)
        return [later - sooner for sooner, later in itertools.pairwise(times)]

    for kind, burstiness, variation in (("poisson", 9.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)):
        found = gaps(Arrivals(kind, rate=5.0, burstiness=burstiness))  # type: ignore[arg-type]
        assert statistics.fmean(found) == pytest.approx(0.2, rel=0.05)
        assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(variation, rel=0.05)
    poisson = Arrivals("poisson", rate=5.0)
    assert gaps(poisson, 1) == gaps(poisson, 1)
    assert gaps(poisson, 1) != gaps(poisson, 2)


def test_arrivals_that_cannot_be() -> None:
    sessions = [Session((ask(),), at_s=1.0), Session((ask(),))]
    wrong = {
        "rate must be above 0. Given: None": Arrivals("poisson"),
        "rate must be above 0. Given: -1": Arrivals("gamma", rate=-1),
        "burstiness must be above 0": Arrivals("gamma", rate=1.0, burstiness=0.0),
        "speed must be above 0": Arrivals("trace", speed=0.0),
        "session 1 has none": Arrivals("trace"),
        "concurrency must be at least 1. Given: 0": Arrivals("closed", concurrency=0),
    }
    for message, arrivals in wrong.items():
        with pytest.raises(ConfigError, match=message):
            start_times(arrivals, sessions, 0)


def test_the_scripted_server_reads_its_own_tokens() -> None:
    with FakeServer() as server:
        record = asyncio.run(send(target(server), ask(text=" some words of prose\u00e9", prompt_tokens=6)))
        assert server.requests[0]["prompt"] == " some words of prose\u00e9"
    assert record.failure is None
