"""A scripted executor: it checks what the scheduler sends and answers with tokens from a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kitfox.config import CacheConfig, SchedulerConfig
from kitfox.engine.core import EngineCore
from kitfox.engine.scheduler import Scheduler
from kitfox.errors import WeightsError
from kitfox.kv_cache.manager import make_kv_cache_manager
from kitfox.request import EngineRequest, SamplingParams
from kitfox.step import FilledBitmasks, ModelRunnerOutput, SchedulerOutput
from kitfox.tracing import Tracer

NextToken = Callable[[str, list[int]], int]


def successor(request_id: str, token_ids: list[int]) -> int:
    """The token after (last token + 1): a model whose answer anyone can compute."""
    return token_ids[-1] + 1


class FakeExecutor:
    """Keeps each request's tokens as a real executor would, from the differences alone."""

    description = "fake"

    def __init__(self, next_token: NextToken = successor, block_size: int = 4):
        self.next_token = next_token
        self.block_size = block_size
        self.token_ids: dict[str, list[int]] = {}
        self.block_ids: dict[str, list[int]] = {}
        self.steps: list[SchedulerOutput] = []
        self.has_kv_cache = True
        self.adapters: dict[int, Path] = {}

    def load_adapter(self, adapter_id: int, path: Path) -> None:
        if path.name == "broken":
            raise WeightsError("it is broken")
        if path.name == "poison":
            raise ZeroDivisionError
        self.adapters[adapter_id] = path

    def remove_adapter(self, adapter_id: int) -> None:
        self.adapters.pop(adapter_id, None)

    def release_kv_cache(self) -> None:
        assert self.has_kv_cache
        self.has_kv_cache = False

    def restore_kv_cache(self) -> None:
        assert not self.has_kv_cache
        self.has_kv_cache = True

    def execute(self, scheduled: SchedulerOutput, bitmasks: FilledBitmasks | None = None) -> ModelRunnerOutput:
        assert self.has_kv_cache or not scheduled.num_scheduled_tokens, "tokens were scheduled without a KV cache"
        self.steps.append(scheduled)
        for request_id in (*scheduled.finished_request_ids, *scheduled.preempted_request_ids):
            del self.token_ids[request_id], self.block_ids[request_id]
        for cached in scheduled.cached_requests:
            self.block_ids[cached.request_id] += cached.new_block_ids
            self.token_ids[cached.request_id] += cached.new_token_ids
        for new in scheduled.new_requests:
            assert new.request_id not in self.token_ids
            self.token_ids[new.request_id] = list(new.token_ids)
            self.block_ids[new.request_id] = list(new.block_ids)
        computed = scheduled.num_computed_tokens
        assert list(computed) == list(scheduled.num_scheduled_tokens)
        sampled: dict[str, list[int]] = {}
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            tokens = self.token_ids[request_id]
            draft = scheduled.draft_token_ids.get(request_id, [])
            end = computed[request_id] + num_tokens - len(draft)
            assert end <= len(tokens), "more tokens scheduled than there are"
            assert end == len(tokens) or not draft, "guesses without the tokens before them"
            assert len(self.block_ids[request_id]) * self.block_size >= end + len(draft), "no room for them"
            if end == len(tokens):
                for expected in (*draft, None):
                    token = self.next_token(request_id, tokens)
                    tokens.append(token)
                    sampled.setdefault(request_id, []).append(token)
                    if token != expected:
                        break
        return ModelRunnerOutput(sampled_token_ids=sampled)


def make_core(
    *,
    cache: str = "paged",
    num_blocks: int = 64,
    block_size: int = 4,
    next_token: NextToken = successor,
    **scheduler: object,
) -> EngineCore:
    tracer = Tracer()
    kv_cache = make_kv_cache_manager(CacheConfig(organisation=cache, block_size=block_size), num_blocks)  # type: ignore[arg-type]
    config = SchedulerConfig(**{"max_num_batched_tokens": 2048, **scheduler})  # type: ignore[arg-type]
    return EngineCore(
        Scheduler(config, kv_cache, tracer, shares_prefixes=cache != "none"),
        FakeExecutor(next_token, block_size),
        tracer,
    )


def request(request_id: str, prompt: list[int], *, max_tokens: int = 4, **fields: object) -> EngineRequest:
    """A request that nothing but max_tokens ends, unless told otherwise."""
    sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens, temperature=0)
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]


def run(core: EngineCore, *, max_steps: int = 1000) -> dict[str, list[int]]:
    """Turn the crank until nothing is left; request id to its output tokens."""
    outputs: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not core.has_work:
            return outputs
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
    raise AssertionError(f"work left after {max_steps} steps")
