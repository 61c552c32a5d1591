"""The engine's steps on a device that is not the host: emulated, so that it is tested where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kitfox.executor.model_runner import ModelRunner
from kitfox.kernels.torch_kernels import TorchKernels
from kitfox.request import SamplingParams
from kitfox.step import BlockCopy, ModelRunnerOutput, NewRequest, SchedulerOutput
from tests.executor.test_step_program import MODELS, random_model

DEVICE = torch.device("meta")  # the one device beside the CPU that every build of torch knows
aten = torch.ops.aten


class DeviceTensor(Tensor):
    """A tensor that says it is on DEVICE; its numbers are on the host, where only `_dispatch` looks."""

    data_on_host: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> DeviceTensor:
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=DEVICE,
        )
        wrapper.data_on_host = data
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


@contextmanager
def emulated_device() -> Iterator[None]:
    """Every op on tensors of two devices is an error, as it is with CUDA; more strictly so, since CUDA takes an index
    from the host and waits for it.
    """
    with _Dispatch(), _Lists():
        yield


class _Lists(TorchFunctionMode):
    """torch makes a tensor of a list, and the reverse, without dispatching."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == DEVICE:
            return func(*args, **kwargs | {"device": None}).to(DEVICE)
        if func is Tensor.__getitem__ and isinstance(args[0], DeviceTensor) and isinstance(args[1], (list, range)):
            args = (args[0], torch.tensor(args[1]).to(DEVICE))
        if func is Tensor.tolist:
            args = (args[0].cpu(),)
        elif func is Tensor.numpy and isinstance(args[0], DeviceTensor):
            raise TypeError("a tensor of a device has no numpy array")
        return func(*args, **kwargs)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    moves = func in (aten._to_copy.default, aten.copy_.default)
    on_device = {isinstance(tensor, DeviceTensor) for tensor in tensors if tensor.dim() or len(tensors) == 1}
    if len(on_device) == 2 and not moves:
        places = [("device" if isinstance(t, DeviceTensor) else "host", tuple(t.shape)) for t in tensors]
        raise RuntimeError(f"{func} on tensors of two devices: {places}")
    to_device = True in on_device
    if kwargs.get("device") is not None:
        to_device = torch.device(kwargs["device"]) == DEVICE
        kwargs = kwargs | {"device": torch.device("cpu")}
    elif func is aten._local_scalar_dense.default:
        to_device = False
    host_args, host_kwargs = tree_map(
        lambda leaf: leaf.data_on_host if isinstance(leaf, DeviceTensor) else leaf, (args, kwargs)
    )
    out = func(*host_args, **host_kwargs)
    if func._schema.name.endswith("_") or "out" in kwargs:  # in place: the argument itself
        return kwargs.get("out", args[0])
    if not to_device:
        return out
    return tree_map(lambda leaf: DeviceTensor(leaf) if isinstance(leaf, Tensor) else leaf, out)


def _steps() -> list[SchedulerOutput]:
    """Chunks, decodes beside them, a copied block, greedy, pooled and sampled requests with everything reported."""
    greedy = SamplingParams(temperature=0)
    sampled = SamplingParams(
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        seed=3,
        logprobs=2,
        prompt_logprobs=2,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={5: 2.0},
        min_tokens=2,
    )
    prompts = {"a": list(range(1, 41)), "b": list(range(50, 71)), "c": list(range(1, 21))}
    prompts |= {"mean": list(range(9, 25)), "last": list(range(30, 40))}

    def new(name: str, sampling: SamplingParams, blocks: list[int]) -> NewRequest:
        return NewRequest(
            request_id=name,
            token_ids=prompts[name],
            num_prompt_tokens=len(prompts[name]),
            num_reported_tokens=len(prompts[name]),
            sampling=sampling,
            stop_token_ids=(7,),
            block_ids=blocks,
            pooling=name if name in ("mean", "last") else None,
        )

    return [
        SchedulerOutput(
            step=1,
            new_requests=[new("a", greedy, [0, 1, 2]), new("mean", greedy, [6])],
            num_scheduled_tokens={"a": 25, "mean": 7},
            num_computed_tokens={"a": 0, "mean": 0},
        ),
        SchedulerOutput(
            step=2,
            new_requests=[new("b", sampled, [3, 4]), new("last", greedy, [7])],
            num_scheduled_tokens={"a": 15, "mean": 9, "b": 21, "last": 10},
            num_computed_tokens={"a": 25, "mean": 7, "b": 0, "last": 0},
        ),
        SchedulerOutput(
            step=3,
            new_requests=[new("c", greedy, [0, 5])],
            block_copies=[BlockCopy(src=1, dst=5, num_tokens=3)],
            num_scheduled_tokens={"a": 1, "b": 1, "c": 1},
            num_computed_tokens={"a": 40, "b": 21, "c": 19},
        ),
    ]


def _run(name: str, device: torch.device, dtype: torch.dtype, **options: Any) -> list[ModelRunnerOutput]:
    kernels = TorchKernels(device, dtype, dtype, **options)
    model = random_model(name, kernels)
    caches = [kernels.make_kv_cache(8, 16, 2, model.config.head_dim) for _ in model.layers]
    runner = ModelRunner(model, caches, max_num_seqs=5, max_model_len=64, block_size=16, seed=0)
    with torch.no_grad():  # in inference mode a subclass of Tensor cannot be written to
        return [ModelRunner.execute.__wrapped__(runner, step) for step in _steps()]


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_steps_on_a_device_hold_no_tensor_of_the_host_and_give_the_same_tokens(name, dtype):
    expected = _run(name, torch.device("cpu"), dtype)
    with emulated_device():
        outputs = _run(name, DEVICE, dtype)
    assert [output.sampled_token_ids for output in outputs] == [output.sampled_token_ids for output in expected]
    assert [sorted(output.sampled_token_ids) for output in outputs] == [[], ["a", "b"], ["a", "b", "c"]]
    assert outputs[1].prompt_logprobs.keys() == {"b"}
    assert outputs[2].logprobs.keys() == {"b"}
    assert outputs[1].embeddings.keys() == {"mean", "last"}
    for request_id, vector in outputs[1].embeddings.items():
        right = np.frombuffer(expected[1].embeddings[request_id], "<f4")
        np.testing.assert_allclose(np.frombuffer(vector, "<f4"), right, atol=0.05 if dtype.itemsize == 2 else 1e-5)


def test_the_emulated_device_refuses_a_mixture():
    with emulated_device():
        there = torch.ones(3).to(DEVICE)
        assert there.device == DEVICE
        assert (there + 1).tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="two devices"):
            there + torch.ones(3)
        with pytest.raises(RuntimeError, match="two devices"):
            there[torch.tensor([0, 2])]
