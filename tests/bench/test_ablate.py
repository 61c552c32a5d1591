"""Each technique can be switched off, and only it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kitfox.bench.ablate import BASELINE, TECHNIQUES, ablation_sides
from kitfox.bench.servers import SideSpec
from kitfox.config import EngineConfig
from kitfox.errors import ConfigError
from kitfox.flags import build_engine_config


def engine_config(side: SideSpec) -> EngineConfig:
    """Of a side's command: python -m kitfox serve ..."""
    words = [word.replace("{port}", "1") for word in side.words]
    return build_engine_config("vllm", words[words.index("serve") + 1 :])[0]


def differences(one: EngineConfig, other: EngineConfig) -> dict[str, tuple[object, object]]:
    mine, theirs = (_flat(dataclasses.asdict(config)) for config in (one, other))
    return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def test_every_technique_is_a_side_that_lacks_just_it() -> None:
    sides, changes = ablation_sides("smollm2-135m --max-model-len 2048", list(TECHNIQUES))
    baseline = engine_config(sides[0])
    assert [side.name for side in sides] == [BASELINE, *(f"no-{name}" for name in TECHNIQUES)]
    assert baseline.model.max_model_len == 2048
    changed = {side.name: differences(baseline, engine_config(side)) for side in sides[1:]}
    assert changed.pop("no-native-kernels") == {}
    assert sides[1 + list(TECHNIQUES).index("native-kernels")].env == {"KITFOX_CPU_ISA": "none"}
    assert changed == {
        "no-prefix-cache": {"cache.organisation": ("paged", "none")},
        "no-paged-cache": {"cache.organisation": ("paged", "radix")},
        "no-chunked-prefill": {"scheduler.enable_chunked_prefill": (True, False)},
        "no-continuous-batching": {"scheduler.max_num_seqs": (128, 1)},
        "no-cache-aware-policy": {"scheduler.policy": ("lpm", "fcfs")},
        "no-captured-steps": {"device.enforce_eager": (False, True)},
        "no-quantization": {"model.quantization": ("auto", "none")},
        "no-speculation": {"speculation.method": ("suffix", "none")},
        "no-jump-forward": {"structured_output.jump_forward": (True, False)},
    }
    assert changes == {"precision", "kv_precision"}


def test_a_baseline_has_what_only_chosen_techniques_need() -> None:
    sides, changes = ablation_sides("", ["prefix-cache"])
    assert engine_config(sides[0]).scheduler.policy == "fcfs"
    assert changes == frozenset()


@pytest.mark.parametrize("flags", ["--cache radix", "--cache=radix"])
def test_a_flag_that_a_technique_changes_may_not_be_given(flags: str) -> None:
    with pytest.raises(ConfigError, match="flags has --cache, which ablating prefix-cache would change"):
        ablation_sides(flags, ["prefix-cache"])
    sides, _ = ablation_sides(flags, ["chunked-prefill"])
    assert all(engine_config(side).cache.organisation == "radix" for side in sides)
