"""Requests and whole lives of requests for tests of the cache managers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kitfox.kv_cache.manager import Allocation, KVCacheManager
from kitfox.request import EngineRequest, Request, SamplingParams


def _make_request(
    request_id: str,
    tokens: list[int],
    *,
    salt: str | None = None,
    priority: int = 0,
    prompt_logprobs: int | None = None,
    max_tokens: int = 8,
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    source = EngineRequest(
        request_id=request_id, prompt_token_ids=tokens, sampling=sampling, priority=priority, cache_salt=salt
    )
    return Request(source)


def _start(manager: KVCacheManager, request: Request) -> Allocation:
    prefix = manager.match_prefix(request)
    allocation = manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix=prefix)
    assert allocation is not None
    request.num_computed_tokens = request.num_tokens
    manager.cache_computed(request)
    return allocation


def _run(manager: KVCacheManager, request: Request) -> Allocation:
    allocation = _start(manager, request)
    manager.free(request)
    return allocation


@pytest.fixture
def make_request() -> Callable[..., Request]:
    return _make_request


@pytest.fixture
def start() -> Callable[[KVCacheManager, Request], Allocation]:
    """Admits a request, computes its whole prompt in one step and publishes it."""
    return _start


@pytest.fixture
def run() -> Callable[[KVCacheManager, Request], Allocation]:
    """As `start`, and then ends the request."""
    return _run
