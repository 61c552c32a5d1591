"""A forward pass noted down instead of computed: which ops, on which buffers, and which of them may run together."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kitfox.kernels.abi import ARGUMENTS, CodesStruct, OpCode, OpStruct

_ALIGNMENT = 64


class StepTensor:
    """Stands for [T, width] while recording, T being however many rows a step has. It has no numbers.

    Attributes:
        address: where it will be; set by `Recording.allocate`.
        producer: the call that writes it.
        num_readers: how many calls read it.
    """

    def __init__(self, recording: Recording, width: int, dtype: torch.dtype):
        self.recording = recording
        self.width = width
        self.dtype = dtype
        self.address = 0
        self.producer: Call | None = None
        self.num_readers = 0

    @property
    def shape(self) -> tuple[int, int]:
        return 0, self.width

    def read(self) -> None:
        """Count one more reader; raises TypeError where nothing writes this any more: it went into another op whole."""
        if self.producer is None:
            raise TypeError("it reads a tensor again that a sum or a gate was made of")
        self.num_readers += 1

    def __add__(self, other: StepTensor) -> StepTensor:
        return self.recording.add(self, other)


Operand = Tensor | StepTensor | None


@dataclass(frozen=True, eq=False)
class Codes:
    """Activations as codes in groups; a member is [T, ...], see csrc/program.h."""

    group: int
    codes: Tensor | StepTensor
    scale: Tensor | StepTensor
    scaled_sum: Tensor | StepTensor
    sum: Tensor | StepTensor

    @property
    def members(self) -> tuple[Tensor | StepTensor, ...]:
        return self.codes, self.scale, self.scaled_sum, self.sum


@dataclass(eq=False)
class Call:
    """One op and its operands, by the names of its struct's fields.

    Attributes:
        constants: numbers, and structs that are filled in already.
        cache: the KV cache that the op reads or writes, if any.
    """

    code: OpCode
    reads: dict[str, Operand | Codes]
    writes: dict[str, Operand | Codes]
    constants: dict[str, Any] = field(default_factory=dict)
    cache: Tensor | None = None

    @property
    def is_plain_product(self) -> bool:
        """Whether a LINEAR adds nothing to the product and does nothing to it."""
        return self.reads["bias"] is None and "residual" not in self.reads and not self.constants["softcap"]

    def to_struct(self, starts_phase: bool = False) -> OpStruct:
        """The struct, with the addresses that its operands have now."""
        op = OpStruct(code=self.code, starts_phase=starts_phase)
        name, _ = ARGUMENTS[self.code]
        arguments = getattr(op, name)
        for key, operand in (*self.reads.items(), *self.writes.items()):
            if isinstance(operand, Codes):
                addresses = [address_of(member) for member in operand.members]
                setattr(arguments, key, CodesStruct(*addresses, operand.group))
            else:
                setattr(arguments, key, address_of(operand))
        for key, value in self.constants.items():
            setattr(arguments, key, value)
        return op


def address_of(operand: Operand) -> int | None:
    if operand is None:
        return None
    return operand.address if isinstance(operand, StepTensor) else operand.data_ptr()


# The ops that can make codes of their result, and where they write them.
_CODES_OF = {OpCode.RMS_NORM: "codes", OpCode.ACT_AND_MUL: "codes", OpCode.GATED_LINEAR: "out_codes"}


class Recording:
    """The calls of one forward pass, in order.

    Ops that cost a pass over memory of their own disappear where the op before can do their work while its result is
    at hand: a sum into the product or norm that made one of its terms, a gate into the two products that it is of, the
    quantisation of activations into the norm or gate that made them. None of this changes a bit of any result.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._codes: dict[tuple[StepTensor, int], Codes] = {}

    def tensor(self, width: int, dtype: torch.dtype = torch.float32) -> StepTensor:
        """A new operand, [T, width]."""
        return StepTensor(self, width, dtype)

    def append(self, call: Call) -> None:
        for tensor in _tensors(call.reads):
            tensor.read()
        for tensor in _tensors(call.writes):
            tensor.producer = call
        self.calls.append(call)

    def add(self, a: StepTensor, b: StepTensor) -> StepTensor:
        """a + b, where b's maker can add a."""
        out = self.tensor(a.width)
        maker = b.producer
        fuses = maker is not None and maker.code in (OpCode.LINEAR, OpCode.RMS_NORM) and "residual" not in maker.reads
        if fuses and maker is self.calls[-1] and b.num_readers == 0 and maker.writes == {"out": b} and a is not b:
            a.read()
            maker.reads["residual"] = a
            maker.writes["out"] = out
            b.producer, out.producer = None, maker
        else:
            self.append(Call(OpCode.ADD, {"a": a, "b": b}, {"out": out}, {"size": a.width}))
        return out

    def gate(self, gate: StepTensor, up: StepTensor, activation: int) -> StepTensor | None:
        """act(gate) * up in one op with the two products that it is of; None where they are anything else."""
        makers = self.calls[-2:]
        if [gate.producer, up.producer] != makers or gate.width != up.width:
            return None
        first, second = makers
        unread = gate.num_readers == up.num_readers == 0
        plain = all(m.code == OpCode.LINEAR and m.is_plain_product for m in makers)
        if not (unread and plain and first.reads == second.reads):
            return None
        for maker in makers:
            self.calls.remove(maker)
            for tensor in _tensors(maker.reads):
                tensor.num_readers -= 1
        gate.producer = up.producer = None
        out = self.tensor(gate.width)
        reads = {key: value for key, value in first.reads.items() if key != "bias"}
        constants = {
            "gate": first.constants["weight"],
            "up": second.constants["weight"],
            "activation": activation,
        }
        self.append(Call(OpCode.GATED_LINEAR, reads, {"out": out}, constants))
        return out

    def codes(self, x: StepTensor, group: int, make: Callable[[], Codes], call: Callable[[Codes], Call]) -> Codes:
        """x as codes: made once, by x's maker where it can."""
        if (x, group) not in self._codes:
            codes = self._codes[x, group] = make()
            maker = x.producer
            place = _CODES_OF.get(maker.code) if maker is not None else None
            if maker is not None and place is not None and place not in maker.writes:
                maker.writes[place] = codes
                for member in codes.members:
                    assert isinstance(member, StepTensor)
                    member.producer = maker
            else:
                self.append(call(codes))
        return self._codes[x, group]

    def finish(self, result: StepTensor) -> None:
        """Say what the step's result is: its maker writes it to `Step::hidden`. Results that only codes are read of go.

        Raises TypeError where the forward pass has a form that a program cannot have.
        """
        maker = result.producer
        if maker is None or maker.code != OpCode.RMS_NORM or "codes" in maker.writes:
            raise TypeError("it does not end with a norm")
        if result.num_readers:
            raise TypeError("it reads its own result")
        for call in self.calls:
            out = call.writes.get("out")
            if isinstance(out, StepTensor) and out.num_readers == 0:
                if len(call.writes) == 1 and call is not maker:
                    raise TypeError(f"nobody reads what {call.code.name} computes")
                del call.writes["out"]

    def phases(self) -> list[int]:
        """For each call the number of its phase: calls of one phase touch nothing that another of them writes."""
        phases: list[int] = []
        phase, read, written = 0, set[int](), set[int]()
        for call in self.calls:
            reads = {id(operand) for operand in _tensors(call.reads)}
            writes = {id(operand) for operand in _tensors(call.writes)}
            if call.cache is not None:
                writes.add(id(call.cache))
            if reads & written or writes & (read | written):
                phase, read, written = phase + 1, set(), set()
            read |= reads
            written |= writes
            phases.append(phase)
        return phases

    def allocate(self, base: int, num_rows: int) -> int:
        """Give every operand an address from `base` on, sharing memory among those not alive together.

        An operand lives from the phase that writes it to the last phase that reads it, both included, so that no two
        calls of a phase meet in memory by accident.

        Returns:
            How many bytes that takes.
        """
        phases = self.phases()
        first: dict[StepTensor, int] = {}
        last: dict[StepTensor, int] = {}
        for phase, call in zip(phases, self.calls, strict=True):
            for tensor in (*_tensors(call.reads), *_tensors(call.writes)):
                first.setdefault(tensor, phase)
                last[tensor] = phase
        placed: list[tuple[int, int, StepTensor]] = []  # (start, end, operand) of those alive
        total = 0
        for tensor in first:
            size = -(-num_rows * tensor.width * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            placed = [place for place in placed if last[place[2]] >= first[tensor]]
            start = 0
            for begin, end, _ in placed:
                if begin >= start + size:
                    break
                start = max(start, end)
            bisect.insort(placed, (start, start + size, tensor), key=lambda place: place[0])
            tensor.address = base + start
            total = max(total, start + size)
        return total


def _tensors(operands: dict[str, Any]) -> list[StepTensor]:
    """The recorded tensors among a call's operands; codes count as their members."""
    found = []
    for operand in operands.values():
        members = operand.members if hasattr(operand, "members") else (operand,)
        found += [member for member in members if isinstance(member, StepTensor)]
    return found
