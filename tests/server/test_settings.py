"""What can be changed of a server that runs."""

from __future__ import annotations

import gc

import pytest

from tests.server.fake_llm import FakeAsyncLLM
from tests.server.http_client import send

STATE = "/set_internal_state"


def test_how_much_a_step_takes_in() -> None:
    llm = FakeAsyncLLM()
    changes = {"max_running_requests": 3, "chunked_prefill_size": 64}
    changed = send(llm, "POST", STATE, {"server_args": changes, "model_path": "x"}).json()
    assert changed["server_args"] == {
        "max_running_requests": 3, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 0,
    }  # fmt: skip
    assert (changed["success"], changed["updated"], changed["ignored_parameters"]) == (True, True, ["model_path"])
    assert llm.config.scheduler.max_num_seqs == 3
    # The other names, and what is not named stays.
    changed = send(llm, "POST", STATE, {"server_args": {"max_num_seqs": 4, "long_prefill_token_threshold": 8}}).json()
    assert changed["server_args"] == {
        "max_running_requests": 4, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 8,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("server_args", "param"),
    [
        ({"speculative_accept_threshold_acc": 0.5}, "server_args.speculative_accept_threshold_acc"),
        ({"max_num_seqs": 3, "max_running_requests": 4}, "server_args.max_num_seqs"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({}, "server_args"),
        ("fast", "server_args"),
        (None, "server_args"),
    ],
)
def test_what_cannot_be_changed_is_said(server_args: object, param: str) -> None:
    llm = FakeAsyncLLM()
    before = llm.config
    refused = send(llm, "POST", STATE, {"server_args": server_args})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert llm.config == before


def test_slowing_down() -> None:
    llm = FakeAsyncLLM()
    for body in ({"forward_sleep_time": 0.25}, {"forward_sleep_time": None}, None):
        assert send(llm, "POST", "/slow_down", body).json()["success"]
    assert llm.controls == ["slow_down 0.25", "slow_down 0", "slow_down 0"]
    for seconds in (-1, 61, "long"):
        refused = send(llm, "POST", "/slow_down", {"forward_sleep_time": seconds})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "forward_sleep_time")


def test_both_processes_freeze_what_is_there() -> None:
    llm = FakeAsyncLLM()
    try:
        answer = send(llm, "POST", "/freeze_gc").json()
        assert answer["frozen_objects"] >= gc.get_freeze_count() > 0
        assert llm.controls == ["freeze_gc"]
    finally:
        gc.unfreeze()


def test_a_trace_level_needs_spans() -> None:
    for method, path in (("POST", "/set_trace_level?level=1"), ("GET", "/set_trace_level")):
        refused = send(FakeAsyncLLM(), method, path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "level")
