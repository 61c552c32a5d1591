"""Endpoints of the peers that there are none of: callers and readers are told why."""

from __future__ import annotations

from pathlib import Path

import pytest

from kitfox.server.app import make_app
from kitfox.server.missing import REASONS
from kitfox.server.options import ServerOptions
from tests.server.fake_llm import FakeAsyncLLM
from tests.server.http_client import send, send_all

COMPATIBILITY = Path(__file__).parents[2] / "docs" / "compatibility.md"


@pytest.mark.parametrize(("path", "why"), REASONS.items())
def test_a_call_says_why(path: str, why: str) -> None:
    response = send(FakeAsyncLLM(), "POST", path, {})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "not_supported")
    assert error["message"] == f"There is no {path} in kitfox: {why}."


def test_a_proxy_s_prefix_changes_nothing() -> None:
    options = ServerOptions(root_path="/prefix")
    [response] = send_all(FakeAsyncLLM(), [("POST", "/prefix/load_lora_adapter_from_tensors/", {})], options)
    assert response.json()["error"]["code"] == "not_supported"


def test_a_path_that_nobody_has_is_not_found() -> None:
    assert send(FakeAsyncLLM(), "GET", "/v1/nothing").json()["error"]["code"] == "not_found"


def test_what_is_missing_is_no_route() -> None:
    app = make_app(FakeAsyncLLM())  # type: ignore[arg-type]
    assert not {getattr(route, "path", "") for route in app.routes} & set(REASONS)


def test_what_is_missing_is_documented() -> None:
    text = COMPATIBILITY.read_text()
    assert [path for path, why in REASONS.items() if f"`{path}`" not in text or why not in text] == []
