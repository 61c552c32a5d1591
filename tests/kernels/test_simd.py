"""Every word of csrc/simd.h makes the same bits on every instruction set: simd_words.cpp prints what each word makes.

Compiled here for whatever this machine can run, Arm under qemu where Debian's cross compiler and qemu-user are there.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from kitfox.kernels import library

SOURCE = Path(__file__).with_name("simd_words.cpp")
CSRC = Path(__file__).resolve().parents[2] / "csrc"
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", f"-I{CSRC}", "-w"]
QEMU = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
# instruction set: compiler, its flags, what runs the program
TARGETS: dict[str, tuple[str, list[str], list[str]]] = {
    "avx2": ("g++", ["-march=x86-64-v3"], []),
    "avx512": ("g++", ["-march=x86-64-v3", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"], []),
    "neon": ("aarch64-linux-gnu-g++", ["-march=armv8.2-a+dotprod+fp16"], QEMU),
}


def can_run(isa: str) -> bool:
    compiler, _, runner = TARGETS[isa]
    present = all(shutil.which(program) for program in (compiler, *runner[:1]))
    emulated = isa == "neon" and platform.machine() == "x86_64"
    return present and (emulated or isa in library.usable_instruction_sets())


@pytest.mark.slow
def test_every_instruction_set_makes_the_same_bits(tmp_path: Path) -> None:
    runnable = [isa for isa in TARGETS if can_run(isa)]
    if len(runnable) < 2:
        pytest.skip(f"nothing to compare: only {runnable} can be compiled and run here")
    printed = {}
    for isa in runnable:
        compiler, flags, runner = TARGETS[isa]
        program = tmp_path / isa
        subprocess.run([compiler, *FLAGS, *flags, str(SOURCE), "-o", str(program)], check=True, timeout=120)
        done = subprocess.run([*runner, str(program)], check=True, capture_output=True, text=True, timeout=120)
        printed[isa] = done.stdout.splitlines()
    first, *others = runnable
    assert len(printed[first]) > 20
    for isa in others:
        assert printed[isa] == printed[first]
