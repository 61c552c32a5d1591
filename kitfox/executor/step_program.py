"""Capture once, replay: a model's forward pass, recorded into one program for the compiled kernels.

The model runs once on operands without numbers, and each op notes down what it would do; from then on a step is one
call that walks the notes. The model's file knows nothing of it.
"""

from __future__ import annotations

import ctypes
from typing import cast

import torch
from torch import Tensor

from kitfox.attention.backend import ForwardBatch
from kitfox.attention.native import NativeAttention, step_of
from kitfox.kernels.abi import OpStruct
from kitfox.kernels.memory import aligned_bytes
from kitfox.kernels.native import NativeKernels
from kitfox.kernels.recording import Recording, StepTensor
from kitfox.models import Model
from kitfox.plan import NATIVE_TILE_ROWS


class StepProgram:
    """One model's forward pass over its KV caches."""

    def __init__(self, model: Model, kernels: NativeKernels, kv_caches: list[Tensor]):
        """Record the forward pass.

        Raises:
            TypeError, AttributeError: the model does something with a tensor that cannot be recorded.
        """
        self._kernels = kernels
        self._hidden_size = model.config.hidden_size
        recording = Recording()
        # Ids, positions and slots are read from each step's own arrays; the model passes this on and looks at none.
        nothing = cast("Tensor", recording.tensor(1, torch.int64))
        batch = ForwardBatch(
            token_ids=nothing,
            positions=nothing,
            slot_mapping=nothing,
            block_table=nothing,
            seq_lens=nothing,
            query_start_loc=nothing,
            kv_caches=kv_caches,
            attention=NativeAttention(kernels),
            features=nothing,
        )
        result: object = model.forward(batch)
        if not isinstance(result, StepTensor):
            raise TypeError("the model returned something that was not recorded")
        recording.finish(result)
        self._memory: Tensor = aligned_bytes(recording.allocate(0, NATIVE_TILE_ROWS))
        recording.allocate(self._memory.data_ptr(), NATIVE_TILE_ROWS)
        phases = recording.phases()
        starts = [index == 0 or phases[index - 1] != phase for index, phase in enumerate(phases)]
        calls = zip(recording.calls, starts, strict=True)
        self._ops: ctypes.Array[OpStruct] = (OpStruct * len(phases))(
            *(call.to_struct(starts_phase) for call, starts_phase in calls)
        )
        self._recording = recording  # keeps alive what the program points at

    @property
    def activation_bytes(self) -> int:
        return self._memory.nbytes

    def replay(self, batch: ForwardBatch) -> Tensor:
        """What `model.forward(batch)` returns: [T, hidden]."""
        hidden = torch.empty(batch.token_ids.shape[0], self._hidden_size)
        step = step_of(batch)
        step.hidden = hidden.data_ptr()
        if batch.features is not None:
            step.features, step.features_stride = batch.features.data_ptr(), batch.features.stride(0)
        self._kernels.run(self._ops, step, NATIVE_TILE_ROWS)
        return hidden
