"""What each technique of kitfox is worth on a workload: kitfox as it is, against itself with one thing switched off."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kitfox.bench.servers import SideSpec, parse_side
from kitfox.errors import ConfigError

BASELINE = "everything-on"
_PRECISIONS = frozenset({"precision", "kv_precision"})


@dataclass(frozen=True)
class Technique:
    """One thing that can be switched off.

    Attributes:
        help: what is lost without it.
        off: flags of `kitfox serve` that switch it off.
        env: or variables that do.
        on: flags that the baseline needs for it, where it is not a default.
        changes: fields of the fairness check that differ without it, by its nature.
    """

    help: str
    off: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    on: tuple[str, ...] = ()
    changes: frozenset[str] = frozenset()


TECHNIQUES: dict[str, Technique] = {
    "prefix-cache": Technique("every prompt is computed whole", off=("--cache=none",)),
    "paged-cache": Technique("a radix tree instead of paged block hashes", off=("--cache=radix",)),
    "chunked-prefill": Technique(
        "a prompt is computed in one step, while others wait", off=("--no-enable-chunked-prefill",)
    ),
    "continuous-batching": Technique("one request at a time", off=("--max-num-seqs=1",)),
    "cache-aware-policy": Technique(
        "first come, first served, instead of longest cached prefix first",
        off=("--scheduling-policy=fcfs",),
        on=("--scheduling-policy=lpm",),
    ),
    "captured-steps": Technique("each op is called from the model's code", off=("--enforce-eager",)),
    "native-kernels": Technique(
        "PyTorch's operations instead of kitfox's kernels",
        env={"KITFOX_CPU_ISA": "none"},
        changes=_PRECISIONS,
    ),
    "quantization": Technique("weights as 16-bit or 32-bit numbers", off=("--quantization=none",), changes=_PRECISIONS),
    "speculation": Technique(
        "every token takes a step of its own", off=("--spec-method=none",), on=("--spec-method=suffix",)
    ),
    "jump-forward": Technique("tokens that a grammar forces are sampled like the others", off=("--no-jump-forward",)),
}


def ablation_sides(flags: str, names: Sequence[str]) -> tuple[list[SideSpec], frozenset[str]]:
    """The baseline and one side a technique, and the facts that differ by the techniques' nature.

    Args:
        flags: MODEL and flags of `kitfox serve` that all sides have.
        names: keys of TECHNIQUES.

    Raises:
        ConfigError: a name is unknown, or its flag is among `flags` already.
    """
    if unknown := [name for name in names if name not in TECHNIQUES]:
        raise ConfigError(f"techniques must be of {', '.join(TECHNIQUES)}. Given: {unknown[0]!r}", param="techniques")
    try:
        given = {word.partition("=")[0] for word in shlex.split(flags)}
    except ValueError as error:
        raise ConfigError(f"flags cannot be split into words: {error}. Given: {flags!r}", param="flags") from None
    for name in names:
        technique = TECHNIQUES[name]
        if taken := [word for word in (*technique.on, *technique.off) if word.partition("=")[0] in given]:
            flag = taken[0].partition("=")[0]
            raise ConfigError(
                f"flags has {flag}, which ablating {name} would change: leave one of them out", param="flags"
            )
    chosen = {name: TECHNIQUES[name] for name in names}
    on = {name: " ".join(technique.on) for name, technique in chosen.items()}
    sides = [_side(BASELINE, flags, *on.values())]
    for name, technique in chosen.items():
        others = [words for other, words in on.items() if other != name]
        sides.append(replace(_side(f"no-{name}", flags, *others, *technique.off), env=technique.env))
    return sides, frozenset().union(*(technique.changes for technique in chosen.values()))


def _side(name: str, *flags: str) -> SideSpec:
    return parse_side(f"{name}=kitfox:{' '.join(words for words in flags if words)}")
