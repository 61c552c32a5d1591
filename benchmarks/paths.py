"""Where the benchmarks keep what is costly to make: environments of peers and checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

from kitfox.weights.hub import resolve_model

CACHE = Path(os.environ.get("KITFOX_BENCH_CACHE", "~/.cache/kitfox-bench")).expanduser()
MODELS = CACHE / "models"


def default_gguf() -> Path:
    """The default model's file, fetched if it is not there."""
    return resolve_model("smollm2-135m").path
