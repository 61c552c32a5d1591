"""Proposers by name."""

from __future__ import annotations

from typing import Any

from kitfox.errors import ConfigError
from kitfox.spec_decode.model_proposers import DraftOptions, HeadOptions, SelfOptions
from kitfox.spec_decode.ngram import NgramProposer
from kitfox.spec_decode.proposer import Proposer
from kitfox.spec_decode.suffix import SuffixProposer

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
