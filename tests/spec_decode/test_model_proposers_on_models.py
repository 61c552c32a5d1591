"""Guesses of real models, on the default one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from kitfox import LLM, SamplingParams
from kitfox.errors import ConfigError
from kitfox.executor.draft_model import RunnerDrafts, vocabulary_difference
from kitfox.spec_decode.model_proposers import Chunk, DraftProposer
from kitfox.spec_decode.translation import TranslatingProposer
from kitfox.tokenizer import Tokenizer, load_tokenizer
from kitfox.weights.hub import resolve_model

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
PROMPTS = ["A quick brown fox", "Once upon a time there was a", "1 2 3 4 5 6 7"]


def make_llm(**options: Any) -> LLM:
    return LLM(MODEL, **{"max_model_len": 512, "num_blocks": 64, "adaptive": False, "num_draft_tokens": 3, **options})


def greedy(llm: LLM, max_tokens: int = 24) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]


def proposer_of(llm: LLM) -> DraftProposer:
    speculator = llm._client.core.scheduler.speculator
    assert speculator is not None
    assert isinstance(speculator._proposer, DraftProposer)
    return speculator._proposer


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return make_llm(speculation="draft", options={"model": MODEL, "min_probability": 0.0})


def test_the_model_itself_is_always_right(drafting: LLM) -> None:
    first = drafting.stats.step
    answers = greedy(drafting)
    stats = drafting.stats.speculation
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens  # an answer may end before some of them
    assert drafting.stats.step - first <= 2 + 24 // 4
    assert answers == greedy(make_llm(num_draft_tokens=1))


def test_all_layers_are_the_model() -> None:
    llm = make_llm(speculation="self", options={"num_layers": 30, "min_probability": 0.0})
    answers = greedy(llm)
    stats = llm.stats.speculation
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens > 0
    assert answers == greedy(make_llm(num_draft_tokens=1))


def test_sleep_leaves_nothing_behind() -> None:
    llm = make_llm(speculation="self", options={"num_layers": 30})
    answers = greedy(llm)
    core = llm._client.core
    assert core.sleep()
    assert core.executor._partial_runners[0].kv_caches == []
    core.wake_up()
    assert greedy(llm) == answers


def test_a_draft_models_cache_sleeps_too(drafting: LLM) -> None:
    answers = greedy(drafting, 48)
    kv_cache = proposer_of(drafting)._kv_cache
    assert kv_cache.num_cached_blocks > 0
    core = drafting._client.core
    assert core.sleep()
    assert core.executor._companions[0].runner.kv_caches == []
    assert kv_cache.num_cached_blocks == 0
    core.wake_up()
    assert greedy(drafting, 48) == answers
    assert kv_cache.num_cached_blocks > 0
    assert core.flush_cache()
    assert kv_cache.num_cached_blocks == 0


def test_an_aborted_request_leaves_no_blocks_behind(drafting: LLM) -> None:
    kv_cache = proposer_of(drafting)._kv_cache
    core = drafting._client.core
    requests = drafting._input_processor.process([1, 2, 3], SamplingParams(max_tokens=50), request_id="gone")
    core.add_request(requests[0])
    for _ in range(4):
        core.step()
    assert kv_cache.num_free_blocks < kv_cache.num_blocks
    core.abort(["gone"])
    core.step()
    assert kv_cache.num_free_blocks == kv_cache.num_blocks
    kv_cache.check_integrity()


def test_a_guess_does_not_depend_on_company(drafting: LLM) -> None:
    model = proposer_of(drafting)._model
    assert isinstance(model, RunnerDrafts)
    chunks = [
        Chunk(str(seed), [7 + seed] * (5 + 40 * seed), 0, list(range(8 * seed, 8 * seed + 8))) for seed in range(3)
    ]
    together = model.compute(chunks)
    assert [model.compute([chunk])[0] for chunk in chunks] == together
    assert all(0 < probability <= 1 and math.isfinite(probability) for _, probability in together)


def test_a_pool_without_room_for_a_block() -> None:
    with pytest.raises(ConfigError, match=r"for one block. Given: 100$"):
        make_llm(speculation="draft", options={"model": MODEL, "memory_bytes": 100})


def test_more_layers_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"must be <= 30\. Given: 31"):
        make_llm(speculation="self", options={"num_layers": 31})


class TestVocabulary:
    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(resolve_model(MODEL).path)

    def other(self, tokenizer: Tokenizer, folder: Path, tokens: dict[str, int]) -> Tokenizer:
        """With more tokens, or other ids for some."""
        content = json.loads(tokenizer.json)
        content["model"]["vocab"] |= tokens
        (folder / "tokenizer.json").write_text(json.dumps(content))
        return load_tokenizer(folder)

    def test_the_same(self, tokenizer: Tokenizer) -> None:
        assert vocabulary_difference(tokenizer, tokenizer) is None

    def test_a_few_more(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        more = {f"fox{number}": tokenizer.vocab_size + number for number in range(128)}
        assert vocabulary_difference(tokenizer, self.other(tokenizer, tmp_path, more)) is None

    def test_many_more(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        more = {f"fox{number}": tokenizer.vocab_size + number for number in range(129)}
        other = self.other(tokenizer, tmp_path, more)
        assert vocabulary_difference(tokenizer, other) == "49281 tokens, not 49152"
        assert vocabulary_difference(other, tokenizer) == "49152 tokens, not 49281"

    def test_others(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        [a], [b] = tokenizer.encode("a"), tokenizer.encode("b")
        difference = vocabulary_difference(tokenizer, self.other(tokenizer, tmp_path, {"a": b, "b": a}))
        assert difference == f"token {min(a, b)} is b'b', not b'a'"


def test_a_model_of_another_vocabulary_is_translated(tokenizer_of_letters: Path) -> None:
    """It says random things; what counts is that the answers stay what they are, and that nothing is left behind."""
    options = {"model": str(tokenizer_of_letters), "load_format": "dummy", "min_probability": 0.0}
    llm = make_llm(speculation="draft", options=options)
    assert greedy(llm) == greedy(make_llm())
    assert llm.stats.speculation.num_draft_tokens > 0
    speculator = llm._client.core.scheduler.speculator
    assert speculator is not None
    assert isinstance(speculator._proposer, TranslatingProposer)
    kv_cache = speculator._proposer._proposer._kv_cache
    assert kv_cache.num_free_blocks == kv_cache.num_blocks


@pytest.fixture
def tokenizer_of_letters(tmp_path: Path) -> Path:
    """A tiny random model whose tokens are bytes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({a: i for i, a in enumerate(alphabet())}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def alphabet() -> list[str]:
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
