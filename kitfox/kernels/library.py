"""Finds and loads the compiled kernels: the library of the best instruction set that this processor has.

CMakeLists.txt compiles `csrc/` once for each instruction set. Where there is no library, kitfox runs on `reference`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from pathlib import Path

from kitfox import kernels
from kitfox.errors import ConfigError

# What CMakeLists.txt lets the compiler use for each, in the words of /proc/cpuinfo; from best to worst.
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
_NEON = frozenset({"asimd", "asimddp", "asimdhp", "fphp", "asimdrdm", "atomics", "crc32"})
_AMX = _AVX512 | {"amx_tile", "amx_int8", "amx_bf16"}
_REQUIRED_FEATURES = {"amx": _AMX, "avx512": _AVX512, "avx2": _AVX2, "neon": _NEON}
CHOICES = (*_REQUIRED_FEATURES, "none")


def load() -> ctypes.CDLL | None:
    """The library of `instruction_set()`, the same object at every call; None where that is None.

    Raises ConfigError as that does.
    """
    isa = instruction_set()
    return None if isa is None else _open(_compiled()[isa])


def describe() -> str:
    """For start-up: the instruction set whose kernels run, or `none` and the reason.

    Raises ConfigError as `instruction_set` does.
    """
    isa = instruction_set()
    if isa is not None:
        return isa
    if usable_instruction_sets():
        return "none: KITFOX_CPU_ISA is none"
    if _compiled():
        return f"none: this processor cannot run the kernels that were compiled ({', '.join(_compiled())})"
    return "none: no compiled kernels (was there a C++ compiler at install?)"


def instruction_set() -> str | None:
    """The instruction set that KITFOX_CPU_ISA names, else the best usable one; None for no compiled kernels.

    Raises ConfigError where KITFOX_CPU_ISA is not one of CHOICES, or one that cannot run here.
    """
    usable = usable_instruction_sets()
    chosen = os.environ.get("KITFOX_CPU_ISA")
    if not chosen:
        return usable[0] if usable else None
    if chosen not in CHOICES:
        raise ConfigError(f"KITFOX_CPU_ISA must be one of {', '.join(CHOICES)}. Given: {chosen!r}")
    if chosen == "none":
        return None
    if chosen not in usable:
        reason = "this processor lacks it" if chosen in _compiled() else "its kernels were not compiled"
        raise ConfigError(f"KITFOX_CPU_ISA cannot be {chosen}: {reason}. Possible here: {', '.join((*usable, 'none'))}")
    return chosen


def usable_instruction_sets() -> list[str]:
    """Those that were compiled and that this processor has, from best to worst."""
    usable = [isa for isa, path in _compiled().items() if _REQUIRED_FEATURES[isa] <= _processor_features()]
    # The system has to grant tile registers to each process.
    return [isa for isa in usable if isa != "amx" or _open(_compiled()[isa]).kf_use_tiles()]


@functools.cache
def _compiled() -> dict[str, Path]:
    """The library of each instruction set, from best to worst.

    An editable install has them in a second folder of the package, apart from the sources.
    """
    paths = {isa: [Path(folder) / f"libkitfox_{isa}.so" for folder in kernels.__path__] for isa in _REQUIRED_FEATURES}
    found = {isa: next((path for path in places if path.exists()), None) for isa, places in paths.items()}
    return {isa: path for isa, path in found.items() if path is not None}


@functools.cache
def _open(path: Path) -> ctypes.CDLL:
    opened = ctypes.CDLL(str(path))
    opened.kf_use_tiles.restype = ctypes.c_bool
    return opened


@functools.cache
def _processor_features() -> frozenset[str]:
    """What this processor can do, in the words of /proc/cpuinfo; nothing where kitfox cannot tell."""
    if sys.platform == "darwin":
        asked = ["sysctl", "-n", "hw.optional.arm.FEAT_DotProd", "hw.optional.arm.FEAT_FP16"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
        return _NEON if answer.split() == ["1", "1"] else frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    # "flags : fpu vme ..." on x86-64, "Features : fp asimd ..." on Arm
    listed = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(listed.partition(":")[2].split())
