"""`kitfox verify`: it passes where a token's bits do not depend on company, and fails where they do."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from kitfox import cli
from kitfox.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, ModelOptions
from kitfox.executor.verify import WAYS, CheckResult, Verification
from kitfox.kernels.torch_kernels import TorchKernels
from kitfox.plan import NATIVE_TILE_ROWS
from tests.models.tiny_models import random_prompt
from tests.native import needs_native

LLAMA = ModelConfig("LlamaForCausalLM", 256, 64, 96, 2, 4, 2, 16, 512)
PROMPTS = [random_prompt(length, seed=length).tolist() for length in (1, 45, 270)]
NATIVE_ONLY = {"eager", "loaded again, 1 thread", "loaded again, 2 threads"}


def verification(prompts: list[list[int]] = PROMPTS, quantization: str = "auto") -> Verification:
    config = EngineConfig(
        model=ModelOptions(load_format="dummy", quantization=quantization),
        cache=CacheConfig(block_size=16),
        device=DeviceConfig(device="cpu", num_threads=1),
    )
    return Verification(config, LLAMA, Path(), prompts)


def names_that_differ(results: list[CheckResult]) -> set[str]:
    return {result.name for result in results if result.difference is not None}


def depend_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch, by: float = 1e-7) -> None:
    """Compiled kernels are out of a test's reach, PyTorch's are not."""
    linear = TorchKernels.linear

    def variant(self: TorchKernels, x: Tensor, *arguments: object, **options: object) -> Tensor:
        return linear(self, x, *arguments, **options) + by * x.shape[0]  # type: ignore[arg-type]

    monkeypatch.setenv("KITFOX_CPU_ISA", "none")
    monkeypatch.setattr(TorchKernels, "linear", variant)


@needs_native
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_compiled_kernels_pass(quantization: str) -> None:
    checked = verification(quantization=quantization)
    assert checked.is_promised
    assert checked.description.startswith("native kernels")
    assert checked.description.endswith("captured steps")
    results = list(checked.checks())
    assert names_that_differ(results) == set()
    assert {result.name for result in results} == {*WAYS, *NATIVE_ONLY}
    num_rows = {result.name: result.num_rows for result in results}
    assert num_rows["all in one batch"] == checked.num_rows == 1 + 45 + 270
    assert num_rows["after preemption"] == checked.num_rows + 22 + 135
    assert num_rows["after a prefix in shared blocks"] == checked.num_rows - 1  # which has no block to share
    fillers = [NATIVE_TILE_ROWS - max(1, min(length, NATIVE_TILE_ROWS) // 2) for length in (1, 45, 270)]
    assert num_rows["across tiles of rows"] == checked.num_rows + sum(fillers)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_reference_passes(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITFOX_CPU_ISA", "none")
    results = list(verification(quantization=quantization).checks())
    assert names_that_differ(results) == set()
    assert {result.name for result in results} == set(WAYS)


def test_prompts_of_one_token_have_nothing_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITFOX_CPU_ISA", "none")
    assert names_that_differ(list(verification([[5], [7]]).checks())) == set()


def test_what_depends_on_the_number_of_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    depend_on_the_number_of_rows(monkeypatch)
    results = {result.name: result for result in verification().checks()}
    assert names_that_differ(list(results.values())) == {*WAYS} - {"alone, once more"}
    found = results["in chunks of 256"].difference
    assert found is not None
    assert (found.prompt, found.position, found.num_rows) == (2, 0, 270)
    assert 0 < (found.hidden or 0) < 0.1
    assert 0 < (found.logits or 0) < 0.1


def test_logits_alone_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITFOX_CPU_ISA", "none")
    linear = TorchKernels.linear

    def variant(self: TorchKernels, x: Tensor, *arguments: object, **options: object) -> Tensor:
        out = linear(self, x, *arguments, **options)  # type: ignore[arg-type]
        return out + 1e-7 * x.shape[0] if out.shape[1] == LLAMA.vocab_size else out

    monkeypatch.setattr(TorchKernels, "linear", variant)
    results = {result.name: result.difference for result in verification().checks()}
    found = results["one by one, the first 24"]
    assert found is not None
    assert found.hidden == 0
    assert (found.logits or 0) > 0


def test_numbers_that_are_not_finite_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    depend_on_the_number_of_rows(monkeypatch, by=math.inf)
    results = list(verification().checks())
    assert names_that_differ(results) == set(WAYS)
    difference = results[0].difference
    assert difference is not None
    assert difference.logits is None


def save_tiny_model(path: Path) -> None:
    settings = {
        "architectures": [LLAMA.architecture],
        "model_type": "llama",
        "vocab_size": LLAMA.vocab_size,
        "hidden_size": LLAMA.hidden_size,
        "intermediate_size": LLAMA.intermediate_size,
        "num_hidden_layers": LLAMA.num_layers,
        "num_attention_heads": LLAMA.num_heads,
        "num_key_value_heads": LLAMA.num_kv_heads,
        "head_dim": LLAMA.head_dim,
        "max_position_embeddings": 100,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(settings))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(path / "tokenizer.json"))


class TestCommand:
    WORDS = ("--load-format", "dummy", "--device", "cpu", "--num-threads", "1")

    def test_passes_with_status_0(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save_tiny_model(tmp_path)
        assert cli.main(["verify", str(tmp_path), *self.WORDS, "--quantization", "int8"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "kernels" in lines[0]
        assert "weights int8" in lines[0]
        assert "6 prompts of 11 to 100 tokens" in lines[1]
        assert all(line.endswith("rows  equal") for line in lines[2:-1])
        assert lines[-1].startswith("All ")

    def test_fails_with_status_1(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_tiny_model(tmp_path)
        depend_on_the_number_of_rows(monkeypatch)
        assert cli.main(["verify", str(tmp_path), *self.WORDS]) == 1
        captured = capsys.readouterr()
        assert "differ, first token 0 of prompt 0; hidden states by up to " in captured.out
        assert captured.err.startswith("kitfox: logits depend on company: 8 of 10 checks")

    def test_json(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        save_tiny_model(tmp_path)
        depend_on_the_number_of_rows(monkeypatch, by=math.inf)
        assert cli.main(["verify", str(tmp_path), *self.WORDS, "--json"]) == 1
        report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        assert report["equal"] is False
        assert report["promised"] is True
        assert report["precision"]["dtype"] == "float32"
        assert [check["name"] for check in report["checks"]] == list(WAYS)
        assert report["checks"][0]["difference"]["logits"] is None
