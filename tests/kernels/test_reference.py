"""Each op against an independent formulation, and the batch invariance of every one of them."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kitfox.config import ModelConfig, RopeScaling
from kitfox.errors import UnsupportedModelError
from kitfox.kernels import reference


def model_config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 10,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


def slices(num_rows: int, count: int, seed: int = 0) -> list[slice]:
    """Runs of rows of many lengths, single rows and the whole among them."""
    pick = random.Random(seed)
    result = [slice(0, num_rows), slice(0, 1), slice(num_rows - 1, num_rows)]
    for _ in range(count):
        start = pick.randrange(num_rows)
        length = pick.choice([1, 1, 2, 3, 8, 15, 16, 17, 33, 100])
        result.append(slice(start, min(num_rows, start + length)))
    return result


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 192), (1536, 576), (640, 2048), (48, 96), (33, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_row_has_the_same_bits_in_any_batch(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, inputs, generator=generator).to(dtype)
    weight = (torch.randn(outputs, inputs, generator=generator) * 0.05).to(dtype)
    whole = reference.linear(x, weight)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().t(), rtol=1e-2, atol=2e-2)
    for rows in slices(150, 12):
        assert torch.equal(reference.linear(x[rows], weight), whole[rows])
    order = torch.randperm(150, generator=generator)
    assert torch.equal(reference.linear(x[order], weight), whole[order])


def test_linear_of_a_misaligned_or_strided_input() -> None:
    weight = torch.randn(32, 33)
    padded = torch.randn(20, 40)
    view = padded[:, 3:36]
    assert torch.equal(reference.linear(view, weight), reference.linear(view.clone(), weight))
    flat = torch.randn(20 * 33 + 1)
    shifted = flat[1:].view(20, 33)
    assert torch.equal(reference.linear(shifted, weight), reference.linear(shifted.clone(), weight))


def test_linear_bias_and_no_rows() -> None:
    x, weight, bias = torch.randn(5, 8), torch.randn(3, 8), torch.randn(3)
    torch.testing.assert_close(reference.linear(x, weight, bias), F.linear(x, weight, bias))
    assert reference.linear(x[:0], weight, bias).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, offset: float) -> None:
    x, weight = torch.randn(70, 96).to(dtype), torch.randn(96).to(dtype)
    result = reference.rms_norm(x, weight, 1e-5, offset=offset)
    assert result.dtype == dtype
    expected = F.rms_norm(x.double(), (96,), weight.double() + offset, 1e-5)
    torch.testing.assert_close(result.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    for rows in slices(70, 10):
        assert torch.equal(reference.rms_norm(x[rows], weight, 1e-5, offset=offset), result[rows])


def test_rms_norm_of_heads() -> None:
    x, weight = torch.randn(5, 3, 8), torch.randn(8)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-6), F.rms_norm(x, (8,), weight, 1e-6))


def test_rotary_turns_pairs_by_position_times_frequency() -> None:
    config = model_config()
    table = reference.rotary_tables(config, local=False, device="cpu")
    assert table.shape == (64, 2, 4)
    x = torch.randn(6, 2, 8, dtype=torch.float32)
    positions = torch.tensor([0, 1, 5, 63, 5, 17])
    result = reference.apply_rotary(x, table, positions)
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(4).double() / 4)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(result.double(), torch.cat((turned.real, turned.imag), -1), rtol=1e-4, atol=1e-4)
    assert torch.equal(result[0], x[0])
    assert torch.equal(reference.apply_rotary(x[2:3], table, positions[2:3]), result[2:3])


def test_local_table_has_its_own_base_and_no_scaling() -> None:
    config = model_config(rope_theta=1e6, rope_local_theta=1e4, rope_scaling=RopeScaling(kind="linear", factor=8.0))
    local = reference.rotary_tables(config, local=True, device="cpu")
    assert torch.equal(local, reference.rotary_tables(model_config(), local=False, device="cpu"))
    without_own_base = reference.rotary_tables(model_config(rope_theta=500.0), local=True, device="cpu")
    assert torch.equal(
        without_own_base, reference.rotary_tables(model_config(rope_theta=500.0), local=False, device="cpu")
    )


def test_linear_scaling_divides_positions() -> None:
    scaled = reference.rotary_tables(
        model_config(rope_scaling=RopeScaling(kind="linear", factor=4.0)), local=False, device="cpu"
    )
    plain = reference.rotary_tables(model_config(), local=False, device="cpu")
    torch.testing.assert_close(scaled[::4], plain[:16])


def frequencies(scaling: RopeScaling | None, **changes: object) -> tuple[Tensor, float]:
    """The angles at position 1 and the factor on the table, recovered from it."""
    config = model_config(rope_scaling=scaling, **changes)
    cos, sin = reference.rotary_tables(config, local=False, device="cpu")[1].double()
    return torch.atan2(sin, cos), float(torch.hypot(cos, sin)[0])


def test_llama3_scaling_keeps_fast_and_divides_slow_frequencies() -> None:
    scaling = RopeScaling(
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain, _ = frequencies(None, head_dim=128, rope_theta=500000.0)
    scaled, magnitude = frequencies(scaling, head_dim=128, rope_theta=500000.0)
    assert magnitude == pytest.approx(1.0)
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            expected = before
        elif wavelength > 8192:
            expected = before / 8
        else:
            kept = (8192 / wavelength - 1) / 3
            expected = (1 - kept) * before / 8 + kept * before
        assert after == pytest.approx(expected, rel=1e-4)


def test_yarn_scaling_interpolates_slow_frequencies_and_sharpens() -> None:
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=4096)
    plain, _ = frequencies(None, head_dim=128)
    scaled, magnitude = frequencies(scaling, head_dim=128)
    assert magnitude == pytest.approx(0.1 * math.log(4.0) + 1.0)
    ratio = plain / scaled
    torch.testing.assert_close(ratio[:20], torch.ones(20, dtype=torch.float64), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(ratio[47:], torch.full((17,), 4.0, dtype=torch.float64), rtol=1e-4, atol=0.0)
    assert (ratio.diff() > -1e-4).all()


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "nonsense"])
def test_unknown_scaling_is_named(kind: str) -> None:
    config = model_config(rope_scaling=RopeScaling(kind=kind, factor=2.0))
    with pytest.raises(UnsupportedModelError, match=kind):
        reference.rotary_tables(config, local=False, device="cpu")


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_pytorch_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_act_and_mul(act: str, expected: object) -> None:
    gate, up = torch.randn(70, 41) * 4, torch.randn(70, 41)
    gate[0, :2] = torch.tensor([200.0, -200.0])
    result = reference.act_and_mul(gate, up, act)
    torch.testing.assert_close(result.double(), expected(gate.double()) * up.double(), rtol=1e-5, atol=1e-5)  # type: ignore[operator]
    for rows in slices(70, 20):
        assert torch.equal(reference.act_and_mul(gate[rows], up[rows], act), result[rows])
    assert reference.act_and_mul(gate.bfloat16(), up.bfloat16(), act).dtype == torch.bfloat16


def test_unknown_activation_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="relu6"):
        reference.act_and_mul(torch.zeros(1, 1), torch.zeros(1, 1), "relu6")


def test_embedding() -> None:
    weight = torch.randn(10, 4)
    assert torch.equal(reference.embedding(torch.tensor([3, 3, 9]), weight), weight[[3, 3, 9]])


def test_write_kv_fills_its_slots_and_no_other() -> None:
    kv_cache = torch.zeros(3, 2, 4, 2, 5)
    k, v = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    reference.write_kv(k, v, kv_cache, torch.tensor([4, 11, 7]))
    for token, (block, offset) in enumerate([(1, 0), (2, 3), (1, 3)]):
        assert torch.equal(kv_cache[block, 0, offset], k[token])
        assert torch.equal(kv_cache[block, 1, offset], v[token])
        kv_cache[block, :, offset] = 0
    assert not kv_cache.any()


def test_copy_blocks_copies_heads_of_blocks() -> None:
    kv_cache = torch.randn(5, 2, 4, 2, 3)
    before = kv_cache.clone()
    reference.copy_blocks(kv_cache, torch.tensor([0, 0]), torch.tensor([3, 4]), torch.tensor([1, 4]))
    expected = before.clone()
    expected[3, :, :1] = before[0, :, :1]
    expected[4] = before[0]
    assert torch.equal(kv_cache, expected)


class Paged:
    """Random requests in a paged cache whose unused slots are NaN."""

    def __init__(
        self,
        seq_lens: list[int],
        *,
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 8,
        dtype: torch.dtype = torch.float32,
    ):
        generator = torch.Generator().manual_seed(1)
        self.seq_lens = seq_lens
        blocks_each = [-(-length // block_size) for length in seq_lens]
        num_blocks = sum(blocks_each) + 2
        order = torch.randperm(num_blocks, generator=generator).tolist()
        # Entries past a request's length point at a block that is all NaN.
        self.block_table = torch.full((len(seq_lens), max(blocks_each) + 1), order.pop(), dtype=torch.int32)
        self.kv_cache = torch.full((num_blocks, 2, block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
        self.q, self.k, self.v = [], [], []
        for request, length in enumerate(seq_lens):
            for index in range(blocks_each[request]):
                self.block_table[request, index] = order.pop()
            self.q.append(torch.randn(length, heads, head_dim, generator=generator).to(dtype))
            self.k.append(torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype))
            self.v.append(torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype))
            positions = torch.arange(length)
            slots = self.block_table[request, positions // block_size].long() * block_size + positions % block_size
            reference.write_kv(self.k[-1], self.v[-1], self.kv_cache, slots)

    def attend(self, chunks: list[tuple[int, int, int]], scale: float = 0.25, **options: object) -> list[Tensor]:
        """Attention of (request, first position, end position) chunks, in one batch."""
        requests = [request for request, _, _ in chunks]
        lengths = [end - begin for _, begin, end in chunks]
        result = reference.paged_attention(
            torch.cat([self.q[request][begin:end] for request, begin, end in chunks]),
            self.kv_cache,
            self.block_table[requests],
            torch.tensor([end for _, _, end in chunks], dtype=torch.int32),
            torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            scale,
            **options,  # type: ignore[arg-type]
        )
        return list(result.split(lengths))

    def expected(
        self, request: int, scale: float = 0.25, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        q, k, v = (part[request].double() for part in (self.q, self.k, self.v))
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        age = torch.arange(len(q))[:, None] - torch.arange(len(q))
        visible = (age >= 0) & (age < (window or len(q)))
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(groups, 1))


OPTIONS: list[dict[str, object]] = [{}, {"window": 5}, {"window": 300}, {"softcap": 2.0}, {"window": 1, "softcap": 0.5}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1)])
def test_paged_attention_equals_dense_softmax(options: dict[str, object], heads: int, kv_heads: int) -> None:
    paged = Paged([1, 7, 256, 257, 600], heads=heads, kv_heads=kv_heads)
    results = paged.attend([(request, 0, length) for request, length in enumerate(paged.seq_lens)], **options)
    for request, result in enumerate(results):
        torch.testing.assert_close(result.double(), paged.expected(request, **options), rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]


def test_paged_attention_in_bfloat16_returns_bfloat16() -> None:
    paged = Paged([40], dtype=torch.bfloat16)
    (result,) = paged.attend([(0, 0, 40)])
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), paged.expected(0), rtol=2e-2, atol=2e-2)


def test_large_scores_do_not_overflow() -> None:
    paged = Paged([300])
    (result,) = paged.attend([(0, 0, 300)], scale=1e4)
    torch.testing.assert_close(result.double(), paged.expected(0, scale=1e4), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("block_size", [1, 5, 32, 512])
@pytest.mark.parametrize("options", OPTIONS[:4])
def test_attention_row_has_the_same_bits_in_any_batch_and_chunking(block_size: int, options: dict[str, object]) -> None:
    paged = Paged([300, 17, 1, 600, 64], heads=9, kv_heads=3, head_dim=64, block_size=block_size)
    whole = [paged.attend([(request, 0, length)], **options)[0] for request, length in enumerate(paged.seq_lens)]
    pick = random.Random(block_size)
    for _ in range(8):
        chunks = []
        for request in pick.sample(range(5), pick.randrange(1, 6)):
            end = pick.randrange(1, paged.seq_lens[request] + 1)
            length = min(end, pick.choice([1, 1, 1, 2, 5, 16, 100]))
            chunks.append((request, end - length, end))
        for (request, begin, end), result in zip(chunks, paged.attend(chunks, **options), strict=True):
            assert torch.equal(result, whole[request][begin:end])


def test_many_decodes_have_the_bits_of_each_alone() -> None:
    lengths = [1 + 37 * i % 520 for i in range(40)]
    paged = Paged(lengths, heads=9, kv_heads=3, head_dim=64)
    chunks = [(request, length - 1, length) for request, length in enumerate(lengths)]
    together = paged.attend(chunks)
    for chunk, result in zip(chunks, together, strict=True):
        assert torch.equal(paged.attend([chunk])[0], result)
