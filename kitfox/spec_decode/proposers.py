"""Proposers by name."""

from __future__ import annotations

from typing import Any

from kitfox.config import EngineConfig
from kitfox.errors import ConfigError
from kitfox.plan import Guesser, plan_draft, planned_device, resolve_precision
from kitfox.spec_decode.model_proposers import DraftOptions, HeadOptions, SelfOptions
from kitfox.spec_decode.ngram import NgramProposer
from kitfox.spec_decode.proposer import Proposer
from kitfox.spec_decode.suffix import SuffixProposer
from kitfox.weights.hub import HEAD_PATTERNS, resolve_model
from kitfox.weights.model_config import read_head_config, read_model_config

# Who makes these must load a model.
MODEL_METHODS = {"draft": DraftOptions, "self": SelfOptions, "eagle": HeadOptions, "eagle3": HeadOptions}


def make_proposer(name: str, **options: Any) -> Proposer:
    """A proposer that needs no model, with its own options.

    Raises:
        ConfigError: no such proposer has this name, or an option is out of range.
    """
    if name == "ngram":
        return NgramProposer(**options)
    if name == "suffix":
        return SuffixProposer(**options)
    raise ConfigError(f"speculative decoding by {name!r} is none of ngram, suffix")


def guesser_of(config: EngineConfig) -> Guesser | None:
    """What the model that guesses will take; it is fetched if need be. None where none does, or not beside the model.

    Raises:
        ConfigError, ModelNotFoundError, UnsupportedModelError, WeightsError: it cannot be had.
    """
    method = config.speculation.method
    if method not in ("draft", "eagle", "eagle3"):
        return None
    options = MODEL_METHODS[method](**config.speculation.options)
    if isinstance(options, DraftOptions):
        path = resolve_model(options.model, revision=options.revision).path
        return plan_draft(
            options.config_of_draft(config),
            read_model_config(path),
            own_kv_bytes=options.memory_bytes,
            num_tokens=options.chunk_tokens,
        )
    assert isinstance(options, HeadOptions)
    path = resolve_model(options.model, revision=options.revision, patterns=HEAD_PATTERNS).path
    layer = read_head_config(path).model
    kv_dtype = resolve_precision(config, layer, planned_device(config)).kv_dtype
    return Guesser(options.model, layer.stored_bytes, layer.kv_bytes_per_token(kv_dtype), None)


def check_options(name: str, options: dict[str, Any]) -> None:
    """Whether a method would take its options.

    Raises:
        ConfigError: one is out of range, or missing.
        TypeError: it has no such option.
    """
    if name in MODEL_METHODS:
        MODEL_METHODS[name](**options)
    elif name != "none":
        make_proposer(name, **options)
