"""Pooled vectors through scheduler and model: equal to transformers', whatever the chunks, the company and the pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kitfox.config import CacheConfig, Pooling, SchedulerConfig
from kitfox.engine.core import EngineCore
from kitfox.engine.scheduler import Scheduler
from kitfox.executor.model_runner import NO_EMBEDDING, ModelRunner
from kitfox.kernels.interface import Kernels
from kitfox.kv_cache.manager import make_kv_cache_manager
from kitfox.models import Model
from kitfox.outputs import EngineOutput
from kitfox.request import EngineRequest, FinishReason, SamplingParams
from kitfox.step import FilledBitmasks, ModelRunnerOutput, SchedulerOutput
from kitfox.tracing import Tracer
from tests.models.tiny_models import gemma3, llama, load_ours, random_prompt, save_checkpoint
from tests.native import native_kernels, needs_native, torch_kernels

BLOCK_SIZE = 16
LENGTHS = (100, 37, 1, 64)
PROMPTS = [random_prompt(length, seed).tolist() for seed, length in enumerate(LENGTHS)]


class RunnerAsExecutor:
    """The real runner behind the core, without loading or planning."""

    description, device_name, num_threads = "test", "cpu", 1

    def __init__(self, model: Model, num_blocks: int):
        config = model.config
        shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        kv_caches = [model.kernels.make_kv_cache(*shape) for _ in range(config.num_layers)]
        self.runner = ModelRunner(model, kv_caches, max_num_seqs=8, max_model_len=128, block_size=BLOCK_SIZE, seed=0)

    def execute(self, scheduled: SchedulerOutput, bitmasks: FilledBitmasks | None = None) -> ModelRunnerOutput:
        return self.runner.execute(scheduled, bitmasks)


def make_core(model: Model, *, budget: int = 2048, num_blocks: int = 64, cache: str = "paged") -> EngineCore:
    kv_cache = make_kv_cache_manager(CacheConfig(organisation=cache, block_size=BLOCK_SIZE), num_blocks)  # type: ignore[arg-type]
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget)
    return EngineCore(Scheduler(config, kv_cache, Tracer()), RunnerAsExecutor(model, num_blocks), Tracer())


def pooling_request(name: str, prompt: list[int], pooling: Pooling) -> EngineRequest:
    sampling = SamplingParams(max_tokens=0)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, pooling=pooling)


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, EngineOutput]:
    """The last news of each request."""
    for request in requests:
        core.add_request(request)
    last: dict[str, EngineOutput] = {}
    while core.has_work:
        for output in core.step().outputs:
            last[output.request_id] = output
    return last


def vectors(core: EngineCore, prompts: list[list[int]], pooling: Pooling) -> list[np.ndarray]:
    requests = [pooling_request(str(index), prompt, pooling) for index, prompt in enumerate(prompts)]
    outputs = run(core, requests)
    made = []
    for request in requests:
        output = outputs[request.request_id]
        assert output.finish_reason is FinishReason.STOP
        assert output.new_token_ids == []
        assert output.embedding is not None
        made.append(np.frombuffer(output.embedding, "<f4"))
    return made


@pytest.fixture(params=["reference", pytest.param("native", marks=needs_native)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return torch_kernels() if request.param == "reference" else native_kernels()


@pytest.mark.parametrize("family", [llama, gemma3])
@torch.inference_mode()
def test_vectors_equal_transformers(family: object, kernels: Kernels, tmp_path: Path) -> None:
    theirs = save_checkpoint(family(head_dim=16), tmp_path)  # type: ignore[operator]
    ours = load_ours(tmp_path, kernels)
    for prompt, mean, last in zip(
        PROMPTS, vectors(make_core(ours), PROMPTS, "mean"), vectors(make_core(ours), PROMPTS, "last"), strict=True
    ):
        states = theirs.model(torch.tensor([prompt])).last_hidden_state[0]
        assert states.std() > 0.1
        np.testing.assert_allclose(mean, states.mean(0).numpy(), atol=1e-4)
        np.testing.assert_allclose(last, states[-1].numpy(), atol=1e-4)


@pytest.fixture
def model(kernels: Kernels, tmp_path: Path) -> Model:
    save_checkpoint(llama(head_dim=16), tmp_path)
    return load_ours(tmp_path, kernels)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_chunks_and_company_change_nothing(pooling: Pooling, model: Model) -> None:
    alone = [vectors(make_core(model), [prompt], pooling)[0] for prompt in PROMPTS]
    for budget in (16, 33, 2048):
        for vector, expected in zip(vectors(make_core(model, budget=budget), PROMPTS, pooling), alone, strict=True):
            assert np.array_equal(vector, expected)


@pytest.mark.parametrize("cache", ["paged", "radix"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_cached_prompt_has_the_same_vector(pooling: Pooling, cache: str, model: Model) -> None:
    core = make_core(model, cache=cache)
    cold = run(core, [pooling_request("cold", PROMPTS[0], pooling)])["cold"]
    warm = run(core, [pooling_request("warm", PROMPTS[0], pooling)])["warm"]
    assert warm.embedding == cold.embedding
    assert cold.num_cached_tokens == 0
    assert (warm.num_cached_tokens > 0) == (pooling == "last")  # a mean needs every hidden state


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_beside_requests_that_generate_and_after_preemption(pooling: Pooling, model: Model) -> None:
    """A pool of 10 blocks: what generates grows until it takes the blocks of the prompt that is being pooled."""
    expected = vectors(make_core(model), [PROMPTS[0]], pooling)[0].tobytes()
    core = make_core(model, budget=5, num_blocks=10)
    sampling = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    generating = [
        EngineRequest(request_id=f"g{index}", prompt_token_ids=PROMPTS[3][:14], sampling=sampling) for index in range(2)
    ]
    outputs = run(core, [*generating, pooling_request("pooled", PROMPTS[0], pooling)])
    assert outputs["pooled"].embedding == expected
    assert outputs["pooled"].num_preemptions > 0
    assert all(outputs[f"g{index}"].finish_reason is FinishReason.LENGTH for index in range(2))


def test_a_vector_that_is_no_number_is_an_error_of_its_request_alone(model: Model) -> None:
    core = make_core(model)
    executor = core.executor
    assert isinstance(executor, RunnerAsExecutor)
    forward = executor.runner.forward

    def poisoned(batch: object, **kwargs: object) -> torch.Tensor:
        hidden = forward(batch, **kwargs).clone()  # type: ignore[arg-type]
        hidden[0, 0] = torch.nan
        return hidden

    executor.runner.forward = poisoned  # type: ignore[method-assign, assignment]
    outputs = run(core, [pooling_request("bad", PROMPTS[1], "mean"), pooling_request("good", PROMPTS[3], "mean")])
    assert (outputs["bad"].finish_reason, outputs["bad"].error) == (FinishReason.ERROR, NO_EMBEDDING)
    assert outputs["bad"].embedding is None
    assert outputs["good"].embedding is not None
