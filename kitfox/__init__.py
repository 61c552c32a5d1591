"""kitfox: an LLM serving engine you can read. `LLM` offline, `AsyncLLM` for servers; both are imported when used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitfox.config import EngineConfig
from kitfox.outputs import RequestOutput
from kitfox.request import SamplingParams

if TYPE_CHECKING:
    from kitfox.engine.async_llm import AsyncLLM
    from kitfox.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from kitfox.engine.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from kitfox.engine.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'kitfox' has no attribute {name!r}")
