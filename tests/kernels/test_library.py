"""Which kernels are picked: by what was compiled, what the processor has, and KITFOX_CPU_ISA."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kitfox.errors import ConfigError
from kitfox.kernels import library

HASWELL = frozenset({"sse2", "fma", "movbe", "f16c", "abm", "avx", "bmi1", "avx2", "bmi2"})
SKYLAKE_SERVER = HASWELL | {"avx512f", "avx512dq", "avx512bw", "avx512vl"}
CASCADE_LAKE = SKYLAKE_SERVER | {"avx512_vnni"}
GRAVITON_2 = frozenset({"fp", "asimd", "crc32", "atomics", "fphp", "asimdhp", "asimdrdm", "asimddp"})
RASPBERRY_PI_4 = frozenset({"fp", "asimd", "evtstrm", "crc32", "cpuid"})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Sets what was compiled, what the processor has, and the environment variable."""

    def set_up(features: frozenset[str], compiled: tuple[str, ...], chosen: str | None = None) -> None:
        monkeypatch.setattr(library, "_processor_features", lambda: features)
        monkeypatch.setattr(library, "_compiled", lambda: {isa: Path(f"/nowhere/{isa}.so") for isa in compiled})
        if chosen is None:
            monkeypatch.delenv("KITFOX_CPU_ISA", raising=False)
        else:
            monkeypatch.setenv("KITFOX_CPU_ISA", chosen)

    return set_up


@pytest.mark.parametrize(
    ("features", "compiled", "picked"),
    [
        (CASCADE_LAKE, ("avx512", "avx2"), "avx512"),
        (CASCADE_LAKE, ("avx2",), "avx2"),
        (SKYLAKE_SERVER, ("avx512", "avx2"), "avx2"),
        (HASWELL, ("avx512", "avx2"), "avx2"),
        (GRAVITON_2, ("neon",), "neon"),
    ],
)
def test_the_best_that_is_compiled_and_that_the_processor_has(machine, features, compiled, picked) -> None:
    machine(features, compiled)
    assert library.instruction_set() == library.describe() == picked


@pytest.mark.parametrize(
    ("features", "compiled", "reason"),
    [
        (CASCADE_LAKE, (), "no compiled kernels"),
        (frozenset(), ("avx512", "avx2"), r"cannot run the kernels that were compiled \(avx512, avx2\)"),
        (RASPBERRY_PI_4, ("neon",), "cannot run"),
    ],
)
def test_without_kernels_it_says_why(machine, features, compiled, reason) -> None:
    machine(features, compiled)
    assert library.load() is None
    assert re.match(f"none: .*{reason}", library.describe())


def test_the_environment_forces_one(machine) -> None:
    machine(CASCADE_LAKE, ("avx512", "avx2"), "avx2")
    assert library.instruction_set() == "avx2"
    machine(CASCADE_LAKE, ("avx512", "avx2"), "none")
    assert library.load() is None
    assert library.describe() == "none: KITFOX_CPU_ISA is none"
    machine(CASCADE_LAKE, ("avx512", "avx2"), "")
    assert library.instruction_set() == "avx512"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("sse", "must be one of amx, avx512, avx2, neon, none. Given: 'sse'"),
        ("neon", "cannot be neon: its kernels were not compiled. Possible here: avx2, none"),
        ("avx512", "cannot be avx512: this processor lacks it. Possible here: avx2, none"),
    ],
)
def test_an_impossible_choice_is_refused(machine, chosen: str, message: str) -> None:
    machine(HASWELL, ("avx512", "avx2"), chosen)
    for ask in (library.load, library.describe):
        with pytest.raises(ConfigError) as refused:
            ask()
        assert refused.value.message == f"KITFOX_CPU_ISA {message}"


def test_each_usable_library_loads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    if not library.usable_instruction_sets():
        pytest.skip("no compiled kernels for this machine")
    for isa in library.usable_instruction_sets():
        monkeypatch.setenv("KITFOX_CPU_ISA", isa)
        loaded = library.load()
        assert isinstance(loaded, ctypes.CDLL)
        assert loaded is library.load()
        assert Path(loaded._name).name == f"libkitfox_{isa}.so"


def test_it_loads_no_torch() -> None:
    code = "import sys; from kitfox.kernels import library; library.describe(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
