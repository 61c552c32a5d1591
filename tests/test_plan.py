"""The memory plan, with numbers worked out by hand. Whether there are compiled kernels is for each test to say."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kitfox.config import CacheConfig, EngineConfig, ModelConfig, ModelOptions, SchedulerConfig
from kitfox.errors import ConfigError
from kitfox.kernels import library
from kitfox.plan import (
    AUTOMATIC_KV_BYTES_ON_CPU,
    NATIVE_TILE_ROWS,
    Guesser,
    MemoryPlan,
    Precision,
    _cgroup_limits,
    count_activation_bytes,
    count_parameters,
    machine_memory_bytes,
    make_plan,
    render,
    resolve_max_model_len,
    resolve_precision,
    token_budget,
)
from kitfox.spec_decode.proposers import guesser_of

GIB = 1 << 30
SMOLLM2 = ModelConfig("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64, 8192, tie_word_embeddings=True)
# KV of one token: 2 * 2 layers * 1 head * 4 * 4 bytes = 64 bytes; one block of 32: 2048 bytes.
TINY = ModelConfig("LlamaForCausalLM", 100, 8, 16, 2, 2, 1, 4, 1024)
# 2 * 100 * 8 embeddings + 2 * (8 * 16 + 8 * 8 attention + 3 * 8 * 16 MLP + 16 norms) + 8
TINY_PARAMETERS = 1600 + 2 * (128 + 64 + 384 + 16) + 8
REFERENCE = Precision("float32", "float32", "", why_not_native="because")


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITFOX_CPU_ISA", "none")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, no_kernels: None) -> None:
    """As on a machine where the compiled kernels run."""
    monkeypatch.setattr(library, "instruction_set", lambda: "avx512")


def config(**sections: dict[str, object]) -> EngineConfig:
    return EngineConfig().replace(device={"device": "cpu"}, **sections)


def tiny_memory(num_blocks: int, settings: EngineConfig) -> int:
    """Memory that leaves room for exactly so many blocks of TINY at a share of one half."""
    return 2 * (
        TINY_PARAMETERS * 4
        + count_activation_bytes(settings, TINY, REFERENCE, token_budget(settings, TINY, "cpu"))
        + num_blocks * 2048
    )


def advice(error: ConfigError) -> list[str]:
    match = re.search(r"This would fit: (--[a-z-]+) (\S+)$", error.message)
    assert match is not None, error.message
    return [match[1], match[2]]


class TestParameters:
    def test_smollm2_has_134515008(self) -> None:
        assert count_parameters(SMOLLM2) == 134_515_008

    def test_biases_and_untied_embeddings(self) -> None:
        assert count_parameters(TINY) == TINY_PARAMETERS
        qwen2 = ModelConfig("Qwen2ForCausalLM", 100, 8, 16, 2, 2, 1, 4, 1024, attention_bias=True)
        assert count_parameters(qwen2) == TINY_PARAMETERS + 2 * (8 + 4 + 4)

    def test_query_and_key_norms(self) -> None:
        qwen3 = ModelConfig("Qwen3ForCausalLM", 100, 8, 16, 2, 2, 1, 4, 1024)
        assert count_parameters(qwen3) == TINY_PARAMETERS + 2 * 2 * 4
        gemma3 = ModelConfig("Gemma3ForCausalLM", 100, 8, 16, 2, 2, 1, 4, 1024)
        assert count_parameters(gemma3) == TINY_PARAMETERS + 2 * (2 * 4 + 2 * 8)


def test_activations_are_the_widest_layer_and_the_logits() -> None:
    settings = config(scheduler={"max_num_batched_tokens": 10, "max_num_seqs": 4})
    # 10 tokens * (3 * 8 + max(2 * 3 * 4, 3 * 16)) * 4 bytes + 2 * 4 rows * 100 * 4 bytes
    assert count_activation_bytes(settings, TINY, REFERENCE, 10) == 10 * 72 * 4 + 3200
    half = dataclasses.replace(REFERENCE, dtype="bfloat16")
    assert count_activation_bytes(settings, TINY, half, 10) == 10 * 72 * 2 + 3200


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_of_compiled_kernels_are_a_tile_in_float32(dtype: str) -> None:
    """Beside it the hidden states of all tokens, and the logits once: their sampler needs no copy of them."""
    native = Precision(dtype, "bfloat16", "", why_not_native="")
    settings = config(scheduler={"max_num_seqs": 4})
    assert count_activation_bytes(settings, TINY, native, 10) == 10 * 72 * 4 + 10 * 8 * 4 + 1600
    assert count_activation_bytes(settings, TINY, native, 1000) == NATIVE_TILE_ROWS * 72 * 4 + 1000 * 8 * 4 + 1600


class TestPool:
    def test_default_model_on_24_gib_is_modest(self) -> None:
        plan = make_plan(config(), SMOLLM2, 24 * GIB)
        assert plan.weights_bytes == 134_515_008 * 4
        assert plan.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
        assert plan.num_blocks == AUTOMATIC_KV_BYTES_ON_CPU // (32 * 46080) == 2912
        assert plan.max_model_len == 8192
        assert plan.num_full_context_requests == 11
        assert "--kv-cache-memory-bytes" in plan.kv_limit

    def test_share_of_memory_decides(self) -> None:
        plan = make_plan(config(), TINY, tiny_memory(40, config()))
        assert plan.num_blocks == 40
        assert plan.total_bytes == plan.budget_bytes
        assert plan.num_full_context_requests == 1

    def test_never_more_than_the_requests_can_use(self) -> None:
        settings = config(scheduler={"max_num_seqs": 3}, model={"max_model_len": 100})
        plan = make_plan(settings, TINY, GIB)
        assert plan.num_blocks == 3 * 4  # 100 tokens are 4 blocks of 32
        assert plan.num_full_context_requests == 3

    def test_exact_blocks_win_over_bytes_and_share(self) -> None:
        exact = config(cache={"num_blocks": 77, "memory_bytes": 1 << 20, "memory_fraction": 0.1})
        assert make_plan(exact, TINY, GIB).num_blocks == 77
        exact = config(cache={"memory_bytes": 2048 * 50 + 2047, "memory_fraction": 0.1})
        assert make_plan(exact, TINY, GIB).num_blocks == 50

    def test_one_request_longer_than_the_automatic_limit_still_fits(self) -> None:
        long = ModelConfig("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64, 131072, tie_word_embeddings=True)
        plan = make_plan(config(), long, 24 * GIB)
        assert plan.num_blocks == 131072 // 32
        assert plan.num_full_context_requests == 1

    def test_longest_that_fits(self) -> None:
        settings = config(model={"max_model_len": -1})
        plan = make_plan(settings, TINY, tiny_memory(10, settings))
        assert (plan.num_blocks, plan.max_model_len) == (10, 320)
        assert make_plan(settings, TINY, GIB).max_model_len == 1024

    @pytest.mark.usefixtures("kernels")
    def test_weights_in_the_form_that_they_are_held_in(self) -> None:
        stored = dataclasses.replace(SMOLLM2, stored_quantization="Q4_1", stored_bytes=98_765_432)
        plan = make_plan(config(), stored, 24 * GIB)
        assert plan.weights_bytes == 98_765_432
        assert plan.kv_bytes_per_token == 2 * 30 * 3 * (64 * 2 + 4)  # in fixed point: two bytes a number, and a scale
        assert "134.5 M parameters as stored" in render(plan)
        plan = make_plan(config(model={"quantization": "int8"}), stored, 24 * GIB)
        assert plan.weights_bytes == 134_515_008
        assert "134.5 M parameters in int8" in render(plan)
        plan = make_plan(config(model={"quantization": "none"}), stored, 24 * GIB)
        assert plan.weights_bytes == 4 * 134_515_008

    def test_kv_dtype_of_its_own(self) -> None:
        assert make_plan(config(cache={"dtype": "bfloat16"}), TINY, GIB).kv_bytes_per_token == 32


class TestDoesNotFit:
    def refused(self, settings: EngineConfig, model: ModelConfig, memory: int) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            make_plan(settings, model, memory)
        return advice(caught.value)

    def test_shorter_context(self) -> None:
        memory = tiny_memory(20, config())
        assert self.refused(config(), TINY, memory) == ["--max-model-len", "640"]
        assert make_plan(config(model={"max_model_len": 640}), TINY, memory).num_blocks == 20

    def test_larger_share(self) -> None:
        memory = tiny_memory(2, config())
        flag, value = self.refused(config(), TINY, memory)
        assert flag == "--gpu-memory-utilization"
        assert make_plan(config(cache={"memory_fraction": float(value)}), TINY, memory).num_blocks >= 32

    def test_smaller_dtype(self) -> None:
        assert self.refused(config(), SMOLLM2, GIB) == ["--dtype", "bfloat16"]
        assert make_plan(config(model={"dtype": "bfloat16"}), SMOLLM2, GIB).num_full_context_requests == 1

    @pytest.mark.usefixtures("kernels")
    def test_a_smaller_dtype_is_no_advice_where_weights_are_quantised(self) -> None:
        with pytest.raises(ConfigError) as caught:
            make_plan(config(model={"quantization": "int8"}), SMOLLM2, 200 << 20)
        assert "--dtype" not in caught.value.message

    def test_too_few_blocks_given(self) -> None:
        assert self.refused(config(cache={"num_blocks": 5}), TINY, GIB) == ["--max-model-len", "160"]

    def test_too_few_bytes_given(self) -> None:
        assert self.refused(config(cache={"memory_bytes": 100}), TINY, GIB) == ["--kv-cache-memory-bytes", "65536"]

    def test_more_given_than_the_machine_has(self) -> None:
        flag, value = self.refused(config(cache={"memory_bytes": 2 * GIB}), TINY, GIB)
        assert flag == "--kv-cache-memory-bytes"
        assert make_plan(config(cache={"memory_bytes": int(value)}), TINY, GIB).total_bytes <= GIB

    def test_nothing_helps(self) -> None:
        with pytest.raises(ConfigError, match="No single setting"):
            make_plan(config(), SMOLLM2, 64 << 20)

    def test_more_positions_than_the_checkpoint_has(self) -> None:
        with pytest.raises(ConfigError, match=r"max_model_len must be <= 1024.*Given: 2048"):
            make_plan(config(model={"max_model_len": 2048}), TINY, GIB)

    def test_unsplit_prompts_need_the_budget(self) -> None:
        whole = config(scheduler={"enable_chunked_prefill": False, "max_num_batched_tokens": 512})
        assert self.refused(whole, TINY, GIB) == ["--max-model-len", "512"]


class TestPrecision:
    """Weights, KV, quantisation."""

    def resolved(
        self, checkpoint: ModelConfig, device: str = "cpu", **sections: dict[str, object]
    ) -> tuple[str, str, str]:
        precision = resolve_precision(config(**sections), checkpoint, device)
        return precision.dtype, precision.kv_dtype, precision.quantization

    def test_the_checkpoints_dtype_unless_another_is_asked_for(self) -> None:
        half = dataclasses.replace(TINY, dtype="bfloat16")
        odd = dataclasses.replace(TINY, dtype="float8_e4m3fn")
        assert self.resolved(TINY) == ("float32", "float32", "")
        assert self.resolved(half) == ("bfloat16", "bfloat16", "")
        assert self.resolved(odd) == ("float32", "float32", "")
        assert self.resolved(odd, "cuda") == ("bfloat16", "bfloat16", "")
        assert self.resolved(half, model={"dtype": "float16"}) == ("float16", "float16", "")
        assert self.resolved(half, cache={"dtype": "float32"}) == ("bfloat16", "float32", "")
        assert self.resolved(half, model={"quantization": "int8"}) == ("bfloat16", "bfloat16", "int8")

    @pytest.mark.usefixtures("kernels")
    def test_compiled_kernels_keep_what_is_quantised(self) -> None:
        stored = dataclasses.replace(SMOLLM2, stored_quantization="Q4_1")
        assert self.resolved(stored) == ("float32", "int16", "stored")
        assert self.resolved(stored, cache={"dtype": "float32"}) == ("float32", "float32", "stored")
        assert self.resolved(stored, model={"quantization": "none"}) == ("float32", "float32", "")
        assert self.resolved(stored, model={"dtype": "bfloat16"}) == ("bfloat16", "int16", "")
        assert self.resolved(stored, model={"quantization": "int8"}) == ("float32", "int16", "int8")
        assert self.resolved(SMOLLM2) == ("float32", "float32", "")
        assert self.resolved(SMOLLM2, model={"quantization": "int8"}) == ("float32", "int16", "int8")

    @pytest.mark.usefixtures("kernels")
    def test_compiled_kernels_have_no_cache_of_float16(self) -> None:
        half = dataclasses.replace(SMOLLM2, dtype="float16")
        assert self.resolved(half) == ("float16", "int16", "")
        assert self.resolved(half, cache={"dtype": "float16"}) == ("float16", "float16", "")

    def test_without_kernels_nothing_is_kept(self) -> None:
        stored = dataclasses.replace(SMOLLM2, stored_quantization="Q4_1")
        assert self.resolved(stored) == ("float32", "float32", "")

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_fixed_point_without_kernels_is_refused(self, device: str) -> None:
        with pytest.raises(ConfigError, match="kv_cache_dtype int16 needs the compiled kernels of a CPU") as raised:
            resolve_precision(config(cache={"dtype": "int16"}), SMOLLM2, device)
        assert raised.value.param == "kv_cache_dtype"

    @pytest.mark.parametrize(
        ("model", "cache", "why"),
        [
            ({}, {}, ""),
            ({"head_dim": 256}, {"block_size": 16}, ""),
            ({}, {"block_size": 24}, "block size 24 is not a multiple of 16"),
            ({"head_dim": 72}, {}, "head size 72 is not a multiple of 16 up to 256"),
            ({"head_dim": 320}, {}, "head size 320 is not a multiple of 16 up to 256"),
            ({}, {"dtype": "float16"}, "a KV cache of float16 has no kernels"),
        ],
    )
    @pytest.mark.usefixtures("kernels")
    def test_what_compiled_kernels_need(self, model: dict, cache: dict, why: str) -> None:
        precision = resolve_precision(config(cache=cache), dataclasses.replace(SMOLLM2, **model), "cpu")
        assert precision.why_not_native == why
        assert precision.is_native == (not why)

    def test_where_there_are_none_the_reason_is_the_librarys(self) -> None:
        precision = resolve_precision(config(), SMOLLM2, "cpu")
        assert precision.why_not_native == library.describe().removeprefix("none: ")
        assert not precision.is_native

    @pytest.mark.usefixtures("kernels")
    def test_another_device_has_no_use_for_them(self) -> None:
        precision = resolve_precision(config(), SMOLLM2, "cuda")
        assert precision.why_not_native is None
        assert not precision.is_native


def test_resolved_context() -> None:
    assert resolve_max_model_len(EngineConfig(), TINY) == 1024
    assert resolve_max_model_len(EngineConfig(model=ModelOptions(max_model_len=-1)), TINY) == 1024
    assert resolve_max_model_len(EngineConfig(model=ModelOptions(max_model_len=7)), TINY) == 7


def test_container_limit_counts(tmp_path: Path) -> None:
    memberships = tmp_path / "cgroup"
    memberships.write_text("0::/pod/container\n")
    root = tmp_path / "fs"
    (root / "pod" / "container").mkdir(parents=True)
    (root / "pod" / "container" / "memory.max").write_text("max\n")
    (root / "pod" / "memory.max").write_text("3000\n")
    assert list(_cgroup_limits(memberships, root)) == [3000]
    memberships.write_text("5:cpu:/x\n4:memory:/docker/1\n")
    (root / "memory").mkdir()
    (root / "memory" / "memory.limit_in_bytes").write_text("5000\n")  # a container sees its own limit at the root
    assert list(_cgroup_limits(memberships, root)) == [5000]
    assert list(_cgroup_limits(tmp_path / "absent", root)) == []
    assert machine_memory_bytes() > 1 << 20


def test_render_says_the_numbers() -> None:
    settings = EngineConfig(
        ModelOptions("tiny", max_model_len=64), CacheConfig(num_blocks=10), SchedulerConfig(max_num_seqs=4)
    )
    plan = make_plan(settings.replace(device={"device": "cpu"}), TINY, GIB)
    assert isinstance(plan, MemoryPlan)
    text = render(plan)
    assert text.startswith("memory plan of tiny\n")
    assert "10 blocks of 32 = 320 tokens in float32, 64 B a token" in text
    assert "requests of 64 tokens at once (at most 4 run)" in text
    assert "KV cache size decided by the number of blocks given" in text


def test_token_budget_suits_the_device() -> None:
    assert token_budget(config(), TINY, "cpu") == 128
    assert token_budget(config(), TINY, "cuda") == 2048
    assert token_budget(config(scheduler={"max_num_batched_tokens": 77}), TINY, "cpu") == 77
    unsplit = config(scheduler={"enable_chunked_prefill": False})
    assert token_budget(unsplit, dataclasses.replace(TINY, max_position_embeddings=5000), "cpu") == 5000


def test_a_quantised_checkpoint_that_is_not_kept_so_has_the_devices_float() -> None:
    quantised = dataclasses.replace(TINY, stored_quantization="Q4_1")
    unkept = config(model={"quantization": "none"})
    assert resolve_precision(unkept, quantised, "cpu").dtype == "float32"
    assert resolve_precision(unkept, quantised, "cuda").dtype == "bfloat16"


class TestGuesser:
    """A second model, or a head, beside the model."""

    # A head with half of TINY's KV in the same blocks, and a draft model with as much KV of its own.
    HEAD = Guesser("head", 5000, 32, None)

    @staticmethod
    def draft(own_blocks: int) -> Guesser:
        return Guesser("draft", 5000, 64, own_blocks * 2048 + 100)

    def test_a_head_makes_every_block_larger(self) -> None:
        settings = config(model={"max_model_len": 320})
        plan = make_plan(settings, TINY, tiny_memory(30, settings) + 2 * 5000, self.HEAD)
        assert (plan.kv_bytes_per_token, plan.num_blocks) == (96, 20)
        assert plan.total_bytes == plan.budget_bytes
        assert "guesses" in render(plan)

    @pytest.mark.parametrize(("own_blocks", "num_blocks"), [(100, 15), (12, 18), (0, 30)])
    def test_a_draft_model_has_a_cache_of_its_own(self, own_blocks: int, num_blocks: int) -> None:
        """It has no more blocks than the model's: 15 and 15, or 18 and 12, of 30."""
        settings = config(model={"max_model_len": 320})
        plan = make_plan(settings, TINY, tiny_memory(30, settings) + 2 * 5000, self.draft(own_blocks))
        assert (plan.kv_bytes_per_token, plan.num_blocks) == (64, num_blocks)
        assert plan.guesser_kv_bytes == min(own_blocks, num_blocks) * 2048
        assert plan.total_bytes == plan.budget_bytes

    def test_what_does_not_fit_beside_it_is_refused_with_what_would(self) -> None:
        memory = tiny_memory(40, config())
        assert make_plan(config(), TINY, memory).num_blocks == 40
        with pytest.raises(ConfigError, match=r"activations .*, draft ") as caught:
            make_plan(config(), TINY, memory, self.draft(100))
        flag, value = advice(caught.value)
        assert flag == "--max-model-len"
        changed = config(model={"max_model_len": int(value)})
        assert make_plan(changed, TINY, memory, self.draft(100)).num_full_context_requests == 1

    def test_of_a_draft_model(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(
            '{"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, '
            '"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, '
            '"max_position_embeddings": 1024, "tie_word_embeddings": false, "torch_dtype": "float32"}'
        )
        options = {"model": str(tmp_path), "memory_bytes": 5000, "chunk_tokens": 10}
        settings = config(speculation={"method": "draft", "options": options}, scheduler={"max_num_seqs": 4})
        activations = count_activation_bytes(settings, TINY, REFERENCE, 10)
        assert guesser_of(settings) == Guesser(str(tmp_path), TINY_PARAMETERS * 4 + activations, 64, 5000)
        assert guesser_of(config(speculation={"method": "suffix"})) is None
