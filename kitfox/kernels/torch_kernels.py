"""The ops of `kernels.reference` on any device of torch: slow on a CPU, and the definition of every other kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kitfox.kernels import reference
from kitfox.kernels.interface import Kernels, Matrix
from kitfox.kernels.memory import lazy_zeros
from kitfox.kernels.quantized import QuantizedWeight, linear_quantized, quantize_head, quantize_int8, take_rows


class TorchKernels(Kernels):
    """Weights as tensors of one dtype, activations in the same; or, with int8, as a `QuantizedWeight`."""

    keeps_quantized = False

    def __init__(
        self, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, *, int8: bool = False, why: str = ""
    ):
        """why: what keeps native kernels from being used, for the description."""
        self.device = device
        self.activation_dtype = dtype
        self.kv_dtype = kv_dtype
        self._int8 = int8
        self.num_threads = torch.get_num_threads() if device.type == "cpu" else 0
        self.description = "PyTorch reference kernels" + (f" ({why}; slow)" if why else "")

    def matrix(self, weight: Tensor | QuantizedWeight, *, is_head: bool = False) -> Matrix:
        assert isinstance(weight, Tensor), "quantised matrices were not asked for"
        if self._int8:
            quantize = quantize_head if is_head else quantize_int8
            return quantize(weight.to(self.device))
        return weight.to(self.device, self.activation_dtype, copy=True)

    def float_matrix(self, weight: Tensor) -> Matrix:
        return weight.to(self.device, self.activation_dtype, copy=True)

    def vector(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, self.activation_dtype, copy=True)

    def embedding(self, ids: Tensor, weight: Matrix, *, scale: float = 1.0) -> Tensor:
        if isinstance(weight, QuantizedWeight):
            rows = take_rows(ids, weight).to(self.activation_dtype)
        else:
            rows = reference.embedding(ids, weight)
        # The factor is rounded to the model's dtype: that is what checkpoints with one were trained with.
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype, device=rows.device)

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None, *, softcap: float | None = None) -> Tensor:
        if isinstance(weight, QuantizedWeight):
            out = linear_quantized(x, weight, bias).to(x.dtype)
        else:
            out = reference.linear(x, weight, bias)
        return out if softcap is None else torch.tanh(out.float() / softcap) * softcap

    def linear_argmax(self, x: Tensor, weight: Matrix, allowed: Tensor | None = None) -> list[int]:
        product = reference.forbid(self.linear(x, weight), allowed)
        largest, ids = product.max(dim=-1)  # NaN wins every comparison
        return torch.where(largest.isfinite(), ids, -1).tolist()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
        return reference.rms_norm(x, weight, eps, offset=offset)

    def act_and_mul(self, gate: Tensor, up: Tensor, act: str) -> Tensor:
        return reference.act_and_mul(gate, up, act)

    def make_kv_cache(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> Tensor:
        shape = (num_blocks, 2, block_size, num_kv_heads, head_dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.kv_dtype, device=self.device)
        num_bytes = math.prod(shape) * self.kv_dtype.itemsize
        return lazy_zeros(num_bytes, huge_pages=False).view(self.kv_dtype).view(shape)

    def copy_blocks(self, kv_cache: Tensor, src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
        reference.copy_blocks(kv_cache, src, dst, num_tokens)
