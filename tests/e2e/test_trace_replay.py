"""A recorded conversation trace through the whole engine: what the caches find, and that it changes no answer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from kitfox import LLM, SamplingParams
from kitfox.weights.hub import resolve_model

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
TRACE = DATA / "traces" / "mooncake_conversation_b16.jsonl"
BLOCK_SIZE = 16
NUM_ROWS = 200
VOCAB_SIZE = 49152
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
pytestmark = [
    pytest.mark.model,  # for its tokenizer
    pytest.mark.slow,
    pytest.mark.skipif(not TRACE.exists(), reason="the recorded traces are not here"),
]


def expander() -> ModuleType:
    spec = importlib.util.spec_from_file_location("expand_trace", DATA / "expand_trace.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prompts() -> list[tuple[list[int], int]]:
    """Token ids and output length of each row, in order of arrival."""
    trace = expander()
    rows = list(trace.rows(TRACE))[:NUM_ROWS]
    return [(trace.token_ids(row, block=BLOCK_SIZE, vocab=32000), min(row["output_length"], 2)) for row in rows]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def ideal_cached_tokens(prompts: list[tuple[list[int], int]]) -> list[int]:
    """Whole blocks of each prompt that an earlier prompt began with too, its last token excepted (it is computed)."""
    seen: set[tuple[int, ...]] = set()
    ideal = []
    for token_ids, _ in prompts:
        starts = [tuple(token_ids[:end]) for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE)]
        findable = [start in seen for start in starts if len(start) < len(token_ids)]
        num_blocks = findable.index(False) if False in findable else len(findable)
        ideal.append(num_blocks * BLOCK_SIZE)
        seen.update(starts)
    return ideal


def replay(model: Path, prompts: list[tuple[list[int], int]], cache: str, num_blocks: int) -> tuple[list, list[int]]:
    """Each row's answer and cached tokens, one after the other as they arrived."""
    llm = LLM(
        str(model),
        tokenizer=str(resolve_model("smollm2-135m").path),
        load_format="dummy",
        cache=cache,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=4096,
    )
    answers, cached = [], []
    for token_ids, max_tokens in prompts:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        output = llm.generate([token_ids], sampling, use_tqdm=False)[0]
        answers.append(output.outputs[0].token_ids)
        cached.append(output.num_cached_tokens)
    llm._client.core.scheduler.kv_cache.check_integrity()
    return answers, cached


@pytest.fixture(scope="module")
def uncached_answers(tiny_model: Path, prompts: list[tuple[list[int], int]]) -> list[list[int]]:
    answers, cached = replay(tiny_model, prompts, "none", 512)
    assert not any(cached)
    return answers


@pytest.mark.parametrize("cache", ["paged", "radix"])
def test_an_ample_pool_finds_everything(
    cache: str, tiny_model: Path, prompts: list[tuple[list[int], int]], uncached_answers: list[list[int]]
):
    answers, cached = replay(tiny_model, prompts, cache, 8192)
    ideal = ideal_cached_tokens(prompts)
    assert answers == uncached_answers
    if cache == "paged":
        assert cached == ideal
    else:
        assert all(found >= least for found, least in zip(cached, ideal, strict=True))


@pytest.mark.parametrize("cache", ["paged", "radix"])
@pytest.mark.parametrize("percent", [10, 25, 50])
def test_a_small_pool_finds_no_more_than_there_is(
    cache: str,
    percent: int,
    tiny_model: Path,
    prompts: list[tuple[list[int], int]],
    uncached_answers: list[list[int]],
):
    distinct = {tuple(t[:end]) for t, _ in prompts for end in range(BLOCK_SIZE, len(t) + 1, BLOCK_SIZE)}
    num_blocks = max(len(distinct) * percent // 100, 4096 // BLOCK_SIZE)
    answers, cached = replay(tiny_model, prompts, cache, num_blocks)
    assert answers == uncached_answers
    ideal = ideal_cached_tokens(prompts)
    whole_blocks = [found - found % BLOCK_SIZE for found in cached]  # radix also matches inside a block
    assert all(found <= most for found, most in zip(whole_blocks, ideal, strict=True))
