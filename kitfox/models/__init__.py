"""One file per family; `make_model` chooses."""

from __future__ import annotations

from kitfox.config import ModelConfig
from kitfox.errors import UnsupportedModelError
from kitfox.kernels.interface import Kernels
from kitfox.models.decoder import Model
from kitfox.models.gemma3 import Gemma3Model
from kitfox.models.idefics3 import Idefics3Model
from kitfox.models.llama import LlamaModel
from kitfox.models.qwen2 import Qwen2Model
from kitfox.models.qwen3 import Qwen3Model

__all__ = ["ARCHITECTURES", "Model", "make_model"]

ARCHITECTURES: dict[str, type[Model]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": Qwen2Model,
    "Qwen3ForCausalLM": Qwen3Model,
    "Gemma3ForCausalLM": Gemma3Model,
    "Idefics3ForConditionalGeneration": Idefics3Model,
    "SmolVLMForConditionalGeneration": Idefics3Model,
}


def make_model(config: ModelConfig, kernels: Kernels) -> Model:
    """The model of `config.architecture` with weights not yet filled in.

    Raises:
        UnsupportedModelError: with the list of those supported.
    """
    family = ARCHITECTURES.get(config.architecture)
    if family is None:
        raise UnsupportedModelError(
            f"architecture {config.architecture} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return family(config, kernels)
