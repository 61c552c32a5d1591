"""Captured steps: the same bits as eager ones, ops that fuse, memory that is bounded, and models that are refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kitfox.attention import ForwardBatch
from kitfox.config import ModelConfig
from kitfox.executor.model_runner import ModelRunner
from kitfox.executor.step_program import StepProgram
from kitfox.kernels.abi import OpCode
from kitfox.kernels.native import NativeKernels
from kitfox.kernels.recording import Call, Recording, StepTensor
from kitfox.layers.weights import empty_places
from kitfox.models import Model, make_model
from kitfox.models.llama import LlamaModel
from kitfox.plan import NATIVE_TILE_ROWS
from kitfox.request import SamplingParams
from kitfox.step import NewRequest, SchedulerOutput
from tests.models.tiny_models import PagedRun, random_prompt
from tests.native import native_kernels, needs_native

LLAMA = ModelConfig("LlamaForCausalLM", 101, 64, 96, 3, 4, 2, 16, 1024)
SLIDING = {"sliding_window": 40, "sliding_layers": (True, False, True)}
MODELS = {
    "llama": LLAMA,
    "llama-biases": dataclasses.replace(
        LLAMA, attention_bias=True, attention_output_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen2": dataclasses.replace(LLAMA, architecture="Qwen2ForCausalLM", attention_bias=True, **SLIDING),
    "qwen3": dataclasses.replace(LLAMA, architecture="Qwen3ForCausalLM", head_dim=32, hidden_size=72),
    "gemma3": dataclasses.replace(
        LLAMA,
        architecture="Gemma3ForCausalLM",
        rope_local_theta=100.0,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        query_scale=0.3,
        logit_softcap=5.0,
        attention_softcap=4.0,
        **SLIDING,
    ),
}
WEIGHTS = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16},
    "int8": {"int8": True, "kv_dtype": torch.int16},
}
LENGTHS = (300, 45, 290)
# Prefill of more rows than a tile has, decodes beside it, decodes alone, and a chunk that ends a prompt.
STEPS = [{0: 200, 1: 30}, {0: 99, 1: 1, 2: 257}, {0: 1, 1: 1, 2: 1}, {1: 1, 2: 1}, {2: 31, 1: 12}]


def random_model(name: str, kernels: NativeKernels, make: Callable[..., Model] = make_model) -> Model:
    """Every weight is random, norms and biases too, and activations are about 1."""
    model = make(MODELS[name], kernels)
    generator = torch.Generator().manual_seed(5)

    def random(shape: torch.Size) -> Tensor:
        spread = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
        return torch.randn(shape, generator=generator) * spread

    model.load_weights([(name, random(shape)) for name, (_, _, shape) in empty_places(model).items()])
    return model


def calls_of(model: Model) -> list[Call]:
    assert isinstance(model.kernels, NativeKernels)
    caches = [model.kernels.make_kv_cache(1, 16, 2, model.config.head_dim) for _ in model.layers]
    return StepProgram(model, model.kernels, caches)._recording.calls


@needs_native
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_replay_has_the_bits_of_eager_steps(name: str, weights: str) -> None:
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    eager = PagedRun(random_model(name, native_kernels(**WEIGHTS[weights])), prompts)
    expected = eager.run(STEPS)
    assert expected[0].std() > 0.1
    for num_threads in (1, 2, 3):
        model = random_model(name, native_kernels(num_threads=num_threads, **WEIGHTS[weights]))
        captured = PagedRun(model, prompts, captured=True)
        for logits, right in zip(captured.run(STEPS), expected, strict=True):
            assert torch.equal(logits, right)
        for cache, right in zip(captured.kv_caches, eager.kv_caches, strict=True):
            assert torch.equal(cache.view(torch.uint8), right.view(torch.uint8))  # slots without a number too


@needs_native
@pytest.mark.parametrize("name", MODELS)
def test_a_request_alone_has_the_bits_of_one_in_company(name: str) -> None:
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    model = random_model(name, native_kernels(int8=True, kv_dtype=torch.bfloat16))
    together = PagedRun(model, prompts, captured=True).run(STEPS)
    for prompt, right in zip(prompts, together, strict=True):
        alone = PagedRun(model, [prompt], captured=True).run([{0: len(right)}])[0]
        assert torch.equal(alone, right)


@needs_native
class TestFusing:
    def test_a_llama_of_int8_quantises_only_what_attention_gives(self) -> None:
        calls = calls_of(random_model("llama", native_kernels(int8=True)))
        assert Counter(call.code for call in calls) == {
            OpCode.EMBED: 1,
            OpCode.RMS_NORM: 2 * 3 + 1,
            OpCode.LINEAR: 5 * 3,
            OpCode.ROTATE_AND_WRITE: 3,
            OpCode.ATTENTION: 3,
            OpCode.QUANTIZE: 3,
            OpCode.GATED_LINEAR: 3,
        }
        for before, call in itertools.pairwise(calls):
            if call.code == OpCode.QUANTIZE:
                assert call.reads["x"] is before.writes["out"]
                assert before.code == OpCode.ATTENTION

    @pytest.mark.parametrize("weights", WEIGHTS)
    @pytest.mark.parametrize("name", MODELS)
    def test_no_sum_is_an_op_and_no_gate_is_one_unless_it_has_biases(self, name: str, weights: str) -> None:
        codes = Counter(call.code for call in calls_of(random_model(name, native_kernels(**WEIGHTS[weights]))))
        assert codes[OpCode.ADD] == 0
        assert codes[OpCode.QUANTIZE] == (3 if weights == "int8" else 0)
        assert codes[OpCode.ACT_AND_MUL] == (3 if MODELS[name].mlp_bias else 0)

    def test_codes_are_all_that_is_kept_where_only_products_read(self) -> None:
        *calls, last = calls_of(random_model("llama", native_kernels(int8=True)))
        written = {call.code: list(call.writes) for call in calls}
        assert written[OpCode.RMS_NORM] == ["codes"]
        assert written[OpCode.GATED_LINEAR] == ["out_codes"]
        assert list(last.writes) == []

    def test_products_of_the_same_rows_are_one_phase(self) -> None:
        kernels = native_kernels()
        model = random_model("llama-biases", kernels)
        caches = [kernels.make_kv_cache(1, 16, 2, 16) for _ in range(3)]
        sizes = Counter(StepProgram(model, kernels, caches)._recording.phases())
        # embedding, then norm, q k v, rotary, attention, o, norm, gate and up, activation, down, and the last norm
        assert [sizes[phase] for phase in sorted(sizes)] == [1, *[1, 3, 1, 1, 1, 1, 2, 1, 1] * 3, 1]


# ---- memory ---------------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", MODELS)
def test_activations_take_what_the_plan_says_at_most(name: str, weights: str) -> None:
    model = random_model(name, native_kernels(**WEIGHTS[weights]))
    assert isinstance(model.kernels, NativeKernels)
    caches = [model.kernels.make_kv_cache(1, 16, 2, model.config.head_dim) for _ in model.layers]
    config = model.config
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    widest_layer = 3 * config.hidden_size + max(attention, 3 * config.intermediate_size)
    program = StepProgram(model, model.kernels, caches)
    assert 0 < program.activation_bytes <= 4 * NATIVE_TILE_ROWS * widest_layer


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@needs_native
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="not Linux")
def test_memory_does_not_grow_with_steps() -> None:
    model = random_model("gemma3", native_kernels(int8=True, kv_dtype=torch.bfloat16))
    run = PagedRun(model, [random_prompt(1000, seed=seed) for seed in range(2)], captured=True)
    run.step({0: 200, 1: 400})
    for _ in range(50):
        run.step({0: 1, 1: 2})
    before = resident_bytes()
    for _ in range(200):
        run.step({0: 3, 1: 2})
    grown = resident_bytes() - before
    kv_written = 1000 * model.config.kv_bytes_per_token("bfloat16")  # pages of the cache are mapped when first written
    assert grown < kv_written + (1 << 20)


WIDTHS = (1, 3, 16, 100)


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Calls that read some earlier operands and write one to three new ones; caches shared by some of them."""
    recording = Recording()
    caches = [torch.zeros(1), torch.zeros(1)]
    known: list[StepTensor] = []
    for _ in range(draw(st.integers(1, 25))):
        reads = draw(st.lists(st.sampled_from(known), max_size=3, unique=True)) if known else []
        shapes = st.tuples(st.sampled_from(WIDTHS), st.sampled_from((torch.float32, torch.int8)))
        written = [recording.tensor(*shape) for shape in draw(st.lists(shapes, min_size=1, max_size=3))]
        recording.append(
            Call(
                OpCode.LINEAR,
                {str(index): tensor for index, tensor in enumerate(reads)},
                {str(index): tensor for index, tensor in enumerate(written)},
                cache=draw(st.sampled_from([None, None, *caches])),
            )
        )
        known += written
    return recording


def operands(call: Call) -> tuple[set[StepTensor], set[StepTensor]]:
    reads = {tensor for tensor in call.reads.values() if isinstance(tensor, StepTensor)}
    return reads, {tensor for tensor in call.writes.values() if isinstance(tensor, StepTensor)}


@given(recordings())
def test_calls_of_a_phase_do_not_depend_on_each_other(recording: Recording) -> None:
    phases = recording.phases()
    assert phases == sorted(phases)
    assert phases[0] == 0
    calls = list(zip(phases, recording.calls, strict=True))
    for (phase, call), (other_phase, other) in itertools.combinations(calls, 2):
        if phase == other_phase:
            assert call.cache is None or call.cache is not other.cache
            reads, writes = operands(call)
            other_reads, other_writes = operands(other)
            assert not writes & (other_reads | other_writes)
            assert not other_writes & reads


@given(recordings(), st.sampled_from([1, 7, NATIVE_TILE_ROWS]))
def test_operands_that_live_together_do_not_overlap(recording: Recording, num_rows: int) -> None:
    base = 1 << 20
    total = recording.allocate(base, num_rows)
    lives: dict[StepTensor, list[int]] = {}
    for phase, call in zip(recording.phases(), recording.calls, strict=True):
        for tensor in set.union(*operands(call)):
            lives.setdefault(tensor, []).append(phase)

    def place(tensor: StepTensor) -> tuple[int, int]:
        return tensor.address, tensor.address + num_rows * tensor.width * tensor.dtype.itemsize

    for tensor in lives:
        start, end = place(tensor)
        assert start % 64 == 0
        assert base <= start < end <= base + total
    for one, other in itertools.combinations(lives, 2):
        if max(min(lives[one]), min(lives[other])) <= min(max(lives[one]), max(lives[other])):
            (start, end), (other_start, other_end) = place(one), place(other)
            assert end <= other_start or other_end <= start
    at_once = sum(-(-num_rows * tensor.width * tensor.dtype.itemsize // 64) * 64 for tensor in lives)
    assert total <= at_once


# ---- forward passes at random ---------------------------------------------------------------------------------------

SIZE = 40


class AnyModel:
    """Ops in any order: each reads the latest result, and where it takes two operands an earlier one too."""

    def __init__(self, kernels: NativeKernels, program: list[tuple[str, int]]):
        self.config = dataclasses.replace(LLAMA, hidden_size=SIZE)
        self.kernels = kernels
        self.program = program
        generator = torch.Generator().manual_seed(3)
        self.table = kernels.matrix(torch.randn(101, SIZE, generator=generator))
        self.matrices = [kernels.matrix(torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.5) for _ in range(2)]
        self.weight = kernels.vector(torch.randn(SIZE, generator=generator))

    def forward(self, batch: ForwardBatch) -> Tensor:
        kernels = self.kernels
        known = [kernels.embedding(batch.token_ids, self.table)]
        for op, back in self.program:
            latest, earlier = known[-1], known[max(-back, -len(known))]
            if op == "linear":
                known.append(kernels.linear(latest, self.matrices[0], self.weight))
            elif op == "norm":
                known.append(kernels.rms_norm(latest, self.weight, 1e-5))
            elif op == "gate":
                known.append(kernels.act_and_mul(earlier, latest, "silu"))
            elif op == "gated products":
                gate, up = (kernels.linear(latest, matrix) for matrix in self.matrices)
                known.append(kernels.act_and_mul(gate, up, "silu"))
            else:
                known.append(earlier + latest)
        return kernels.rms_norm(known[-1], self.weight, 1e-5)


def batch_of(token_ids: Tensor) -> ForwardBatch:
    nothing = torch.zeros(1, dtype=torch.int32)
    return ForwardBatch(
        token_ids=token_ids,
        positions=token_ids,
        slot_mapping=token_ids,
        block_table=nothing[None],
        seq_lens=nothing,
        query_start_loc=nothing,
        kv_caches=[],
        attention=None,  # type: ignore[arg-type]
    )


@needs_native
@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["linear", "norm", "gate", "gated products", "add", "add"]), st.integers(1, 4)),
        max_size=12,
    ),
    st.booleans(),
)
def test_any_forward_pass_is_replayed_exactly_or_refused(program: list[tuple[str, int]], int8: bool) -> None:
    kernels = native_kernels(int8=int8, num_threads=2)
    model = AnyModel(kernels, program)
    batch = batch_of(random_prompt(NATIVE_TILE_ROWS + 14))
    expected = model.forward(batch)
    try:
        captured = StepProgram(model, kernels, [])  # type: ignore[arg-type]
    except TypeError as error:
        if "reads a tensor again" not in str(error):
            raise
        return
    torch.testing.assert_close(captured.replay(batch), expected, atol=0, rtol=0, equal_nan=True)


# ---- models that cannot be captured ---------------------------------------------------------------------------------


class Scaled(LlamaModel):
    def embed(self, token_ids: Tensor) -> Tensor:
        return super().embed(token_ids) * 2.0


class Detached(LlamaModel):
    def embed(self, token_ids: Tensor) -> Tensor:
        return super().embed(token_ids).clone()


class Rectified(LlamaModel):
    def embed(self, token_ids: Tensor) -> Tensor:
        return torch.relu(super().embed(token_ids))


class EndsWithoutNorm(LlamaModel):
    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed(batch.token_ids)
        return x + self.layers[0].mlp(x)


class ComputesForNobody(LlamaModel):
    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed(batch.token_ids)
        self.layers[0].mlp(x)
        return self.norm(x)


class ReadsItsResult(LlamaModel):
    def forward(self, batch: ForwardBatch) -> Tensor:
        result = self.norm(self.embed(batch.token_ids))
        self.layers[0].input_layernorm(result)
        return result


class ReadsATermAfterTheSum(LlamaModel):
    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed(batch.token_ids)
        term = self.layers[0].mlp(x)
        total = x + term
        return self.norm(total + self.layers[1].mlp(term))


class ReadsAProductAfterTheGate(LlamaModel):
    def forward(self, batch: ForwardBatch) -> Tensor:
        x, mlp = self.embed(batch.token_ids), self.layers[0].mlp
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        gated = self.kernels.act_and_mul(gate, up, "silu")
        return self.norm(mlp.down_proj(gated) + mlp.down_proj(up))


@needs_native
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (Scaled, "unsupported operand"),
        (Detached, "no attribute 'clone'"),
        (Rectified, "relu"),
        (EndsWithoutNorm, "does not end with a norm"),
        (ComputesForNobody, "nobody reads what LINEAR computes"),
        (ReadsItsResult, "reads its own result"),
        (ReadsATermAfterTheSum, "reads a tensor again that a sum or a gate was made of"),
        (ReadsAProductAfterTheGate, "reads a tensor again that a sum or a gate was made of"),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(family: type[Model], reason: str) -> None:
    model = random_model("llama", native_kernels(), make=family)
    runner = make_runner(model)
    assert runner.program is None
    assert runner.description.startswith(f"eager steps ({family.__name__} cannot be captured: ")
    assert reason in runner.description
    assert len(first_tokens(runner)["a"]) == 1


@needs_native
def test_a_captured_runner_says_so_and_samples_what_an_eager_one_does() -> None:
    model = random_model("llama", native_kernels())
    captured, eager = make_runner(model), make_runner(model, enforce_eager=True)
    assert (captured.description, eager.description) == ("captured steps", "eager steps")
    assert eager.program is None
    assert first_tokens(captured) == first_tokens(eager)


def make_runner(model: Model, *, enforce_eager: bool = False) -> ModelRunner:
    caches = [model.kernels.make_kv_cache(4, 16, 2, 16) for _ in model.layers]
    return ModelRunner(
        model, caches, max_num_seqs=2, max_model_len=64, block_size=16, seed=0, enforce_eager=enforce_eager
    )


def first_tokens(runner: ModelRunner) -> dict[str, list[int]]:
    request = NewRequest(
        request_id="a",
        token_ids=random_prompt(20).tolist(),
        num_prompt_tokens=20,
        num_reported_tokens=20,
        sampling=SamplingParams(temperature=0),
        stop_token_ids=(),
        block_ids=[3, 1],
    )
    scheduled = SchedulerOutput(
        step=1, new_requests=[request], num_scheduled_tokens={"a": 20}, num_computed_tokens={"a": 0}
    )
    return runner.execute(scheduled).sampled_token_ids
