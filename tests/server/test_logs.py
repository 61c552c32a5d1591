"""One line a request, in both forms; the level while it runs; spans."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kitfox.errors import ConfigError
from kitfox.server import app as app_module
from kitfox.server import spans
from kitfox.server.app import make_app
from kitfox.server.logs import JsonFormatter, TextFormatter, set_level
from kitfox.server.options import ServerOptions
from tests.server.fake_llm import MODEL, REPLY, FakeAsyncLLM
from tests.server.fault_table import CHAT, COMPLETIONS
from tests.server.test_app import RawClient, until

REPLY_TOKENS = len(REPLY.encode()) + 1
SECRET = "the prompt that nobody may read"


@pytest.fixture(autouse=True)
def _levels_as_before() -> Iterator[None]:
    names = ("", "kitfox")
    before = [logging.getLogger(name).level for name in names]
    logging.getLogger("kitfox").setLevel(logging.NOTSET)  # whatever other tests left
    yield
    for name, level in zip(names, before, strict=True):
        logging.getLogger(name).setLevel(level)


def send_to(llm: FakeAsyncLLM, options: ServerOptions, *requests: tuple[str, str, Any]) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        app = make_app(llm, options)  # type: ignore[arg-type]
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                headers = {"x-request-id": "from-client"}
                return [await client.request(m, path, json=body, headers=headers) for m, path, body in requests]

    return asyncio.run(run())


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == "kitfox.request"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_says_what_a_request_was_and_took(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    caplog.set_level(logging.INFO)
    llm = FakeAsyncLLM()
    llm.num_cached_tokens = 3
    body = {"model": MODEL, "prompt": [SECRET, "Hi"], "n": 2, "max_tokens": 7, "stream": stream}
    (response,) = send_to(llm, ServerOptions(), ("POST", COMPLETIONS, body))
    assert response.status_code == 200
    (line,) = lines_of(caplog)
    assert line["request_id"] == line["client_id"] == "from-client"
    assert (line["method"], line["path"], line["status"], line["stream"]) == ("POST", COMPLETIONS, 200, stream)
    assert (line["answer_id"], line["model"]) == ("cmpl-from-client", MODEL)
    assert (line["prompt_tokens"], line["cached_tokens"]) == (len(SECRET) + 2, 6)
    assert (line["output_tokens"], line["finish_reason"]) == (28, "length,length,length,length")
    assert (line["queue_ms"], line["prefill_ms"], line["decode_ms"], line["ttft_ms"]) == (100, 200, 300, 300)
    assert 0 <= line["e2e_ms"] < 60_000
    assert SECRET not in caplog.text
    assert "quick" not in caplog.text


def test_refusals_and_state_are_lines_without_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    requests = [("POST", CHAT, {"messages": SECRET}), ("GET", "/version", None), ("GET", "/a%0Ab?key=secret", None)]
    send_to(FakeAsyncLLM(), ServerOptions(), *requests)
    lines = lines_of(caplog)
    assert [(line["path"], line["status"]) for line in lines] == [(CHAT, 400), ("/version", 200), ("/a%0Ab", 404)]
    assert not any("model" in line for line in lines)
    assert SECRET not in caplog.text


def test_probes_are_written_at_level_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    probes = [("GET", path, None) for path in ("/health", "/ready", "/metrics")]
    caplog.set_level(logging.INFO)
    send_to(FakeAsyncLLM(), ServerOptions(), *probes)
    assert lines_of(caplog) == []
    caplog.set_level(logging.DEBUG)
    send_to(FakeAsyncLLM(), ServerOptions(), *probes)
    assert len(lines_of(caplog)) == 3


def test_failures_in_the_engine_and_clients_that_leave(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    llm = FakeAsyncLLM()
    llm.fail_after = 2
    send_to(llm, ServerOptions(), ("POST", COMPLETIONS, {"model": MODEL, "prompt": "Hi", "max_tokens": 9}))
    assert [(line["status"], line["finish_reason"]) for line in lines_of(caplog)] == [(503, "error")]
    caplog.clear()

    async def leave() -> None:
        llm = FakeAsyncLLM()
        llm.hold = asyncio.Event()
        app = make_app(llm)  # type: ignore[arg-type]
        client = RawClient(app, COMPLETIONS, {"model": MODEL, "prompt": "Hi", "stream": True})
        await until(lambda: len(client.sent) > 1)
        client.leave.set()
        await client.task

    asyncio.run(leave())
    (line,) = lines_of(caplog)
    assert (line["finish_reason"], line["output_tokens"], line["prompt_tokens"]) == ("abort", 1, 2)


def test_lines_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    options = ServerOptions(log_requests=False)
    changed, *_ = send_to(
        FakeAsyncLLM(), options, ("GET", "/version", None), ("POST", "/configure_logging", {"log_requests": True})
    )
    assert changed.status_code == 200
    assert [line["path"] for line in lines_of(caplog)] == ["/configure_logging"]


def test_the_level_changes_while_it_runs() -> None:
    set_level("warning")
    path = "/configure_logging"
    responses = send_to(
        FakeAsyncLLM(), ServerOptions(),
        ("GET", path, None), ("POST", path, {"level": "debug", "log_requests": False}), ("GET", path, None),
        ("POST", path, {}), ("POST", path, {"level": "loud"}), ("POST", path, {"dump_requests_folder": "/tmp"}),
    )  # fmt: skip
    quiet, set_to_debug, debug, unchanged, loud, unknown = responses
    assert quiet.json() == {"level": "warning", "log_requests": True}
    assert set_to_debug.json() == debug.json() == unchanged.json() == {"level": "debug", "log_requests": False}
    assert logging.getLogger("kitfox.server").isEnabledFor(logging.DEBUG)
    assert not logging.getLogger("another.library").isEnabledFor(logging.DEBUG)
    assert (loud.status_code, loud.json()["error"]["param"]) == (400, "level")
    assert unknown.json()["ignored_parameters"] == ["dump_requests_folder"]


# ---- forms ----------------------------------------------------------------------------------------------------------


def record_of(message: str, **fields: Any) -> logging.LogRecord:
    record = logging.LogRecord("kitfox.request", logging.INFO, __file__, 1, message, None, None)
    record.fields = fields
    return record


def test_json_is_one_object_a_line() -> None:
    text = JsonFormatter().format(record_of('says "hi"\nand more', status=200, ttft_ms=None, path="\ud800"))
    assert "\n" not in text
    line = json.loads(text)
    assert (line["level"], line["logger"], line["message"]) == ("info", "kitfox.request", 'says "hi"\nand more')
    assert (line["status"], line["ttft_ms"], line["path"]) == (200, None, "\ud800")
    assert line["time"].endswith("+00:00")
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("kitfox", logging.ERROR, __file__, 1, "failed", None, sys.exc_info())
    assert "ValueError: broken" in json.loads(JsonFormatter().format(record))["exception"]


def test_text_names_what_there_is() -> None:
    text = TextFormatter().format(record_of("request", status=200, ttft_ms=None))
    assert text == "INFO kitfox.request: request status=200"


# ---- spans ----------------------------------------------------------------------------------------------------------

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def spans_of(monkeypatch: pytest.MonkeyPatch, llm: FakeAsyncLLM, *requests: Any, traceparent: str = "") -> list[Any]:
    exporters = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = exporters.InMemorySpanExporter()
    endpoints = []
    monkeypatch.setattr(app_module, "otlp_exporter", lambda endpoint: endpoints.append(endpoint) or exporter)

    async def run() -> None:
        app = make_app(llm, ServerOptions(otlp_traces_endpoint="http://collector/v1/traces"))  # type: ignore[arg-type]
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                for method, path, body in requests:
                    await client.request(method, path, json=body, headers={"traceparent": traceparent})

    asyncio.run(run())
    assert endpoints == ["http://collector/v1/traces"]
    return list(exporter.get_finished_spans())


def test_a_span_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": SECRET}], "temperature": 0.5, "max_tokens": 100,
        "stream": True,
    }  # fmt: skip
    llm = FakeAsyncLLM()
    llm.num_cached_tokens = 5
    parent = f"00-{TRACE_ID}-{PARENT_ID}-01"
    (span,) = spans_of(monkeypatch, llm, ("POST", CHAT, body), ("GET", "/health", None), traceparent=parent)
    assert span.name == f"chat {MODEL}"
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    seen = dict(span.attributes)
    assert seen["gen_ai.operation.name"] == "chat"
    assert seen["gen_ai.request.model"] == seen["gen_ai.response.model"] == MODEL
    assert (seen["gen_ai.request.temperature"], seen["gen_ai.request.max_tokens"]) == (0.5, 100)
    assert seen["gen_ai.usage.output_tokens"] == REPLY_TOKENS
    assert seen["gen_ai.usage.cache_read.input_tokens"] == 5
    assert seen["gen_ai.response.finish_reasons"] == ("stop",)
    assert (seen["gen_ai.latency.time_in_queue"], seen["gen_ai.latency.time_to_first_token"]) == (0.1, 0.3)
    assert (seen["http.route"], seen["http.response.status_code"]) == (CHAT, 200)
    assert span.end_time - span.start_time == round(seen["gen_ai.latency.e2e"] * 1e9)
    assert span.resource.attributes["service.name"] == "kitfox"
    assert span.status.is_ok or span.status.is_unset
    assert SECRET not in span.to_json()


def test_spans_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeAsyncLLM()
    llm.fail_after = 1
    failed, refused = spans_of(
        monkeypatch, llm,
        ("POST", COMPLETIONS, {"model": MODEL, "prompt": "Hi"}), ("POST", COMPLETIONS, {"model": MODEL, "n": "x"}),
    )  # fmt: skip
    assert failed.parent is None
    assert not failed.status.is_ok
    assert not failed.status.is_unset
    assert refused.status.is_unset  # the client's mistake, not the server's
    assert refused.name == f"POST {COMPLETIONS}"


def test_spans_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    (span,) = spans_of(
        monkeypatch, FakeAsyncLLM(),
        ("POST", "/set_trace_level?level=0", None), ("POST", COMPLETIONS, {"model": MODEL, "prompt": "Hi"}),
        ("GET", "/set_trace_level?level=-1", None), ("POST", "/set_trace_level", {"level": 2}),
    )  # fmt: skip
    assert span.name == "POST /set_trace_level"


def test_a_client_that_does_not_sample_gets_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = f"00-{TRACE_ID}-{PARENT_ID}-00"
    assert spans_of(monkeypatch, FakeAsyncLLM(), ("GET", "/version", None), traceparent=parent) == []


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"kitfox\[otel\]"):
        spans.check_installed()
