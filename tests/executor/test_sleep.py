"""The KV cache's memory is given back, and what is computed afterwards is what was computed before."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from kitfox.config import EngineConfig, ModelOptions
from kitfox.engine.core import EngineCore
from kitfox.engine.launch import load_core
from kitfox.plan import make_plan, settle
from kitfox.request import EngineRequest, SamplingParams
from kitfox.weights.model_config import read_model_config
from tests.models.tiny_models import llama, random_prompt, save_checkpoint


def tiny_core(folder: Path, *, enforce_eager: bool) -> EngineCore:
    save_checkpoint(llama(), folder)
    config = EngineConfig(model=ModelOptions(model=str(folder), max_model_len=128)).replace(
        device={"enforce_eager": enforce_eager, "num_threads": 1, "device": "cpu"}, cache={"num_blocks": 16}
    )
    model_config = read_model_config(folder)
    plan = make_plan(config, model_config)
    return load_core(settle(config, plan), model_config, folder, plan.num_blocks, lambda name, seconds: None)


def answer(core: EngineCore, request_id: str) -> list[int]:
    sampling = SamplingParams(max_tokens=6, temperature=0)
    core.add_request(
        EngineRequest(request_id=request_id, prompt_token_ids=random_prompt(40, 1).tolist(), sampling=sampling)
    )
    tokens: list[int] = []
    while core.has_work:
        for output in core.step().outputs:
            assert output.num_cached_tokens == 0
            tokens += output.new_token_ids
    return tokens


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_memory_is_given_back_and_the_answers_stay(enforce_eager: bool, tmp_path: Path) -> None:
    core = tiny_core(tmp_path, enforce_eager=enforce_eager)
    gc.collect()
    gc.freeze()  # as the engine process does
    try:
        before = answer(core, "before")
        memory = [weakref.ref(kv_cache.untyped_storage()) for kv_cache in core.executor.runner.kv_caches]
        description = core.executor.description
        assert core.sleep()
        assert [reference() for reference in memory] == [None] * len(memory)
        core.step()  # tells the executor whom to forget
        core.wake_up()
        assert answer(core, "after") == before
        assert core.executor.description == description
    finally:
        gc.unfreeze()
