"""Proposers by name."""

from __future__ import annotations

from typing import Any

from kitfox.errors import ConfigError
from kitfox.spec_decode.ngram import NgramProposer
from kitfox.spec_decode.proposer import Proposer
from kitfox.spec_decode.suffix import SuffixProposer


def make_proposer(name: str, **options: Any) -> Proposer:
    """A proposer with its own options.

    Raises:
        ConfigError: no proposer has this name, or an option is out of range.
    """
    if name == "ngram":
        return NgramProposer(**options)
    if name == "suffix":
        return SuffixProposer(**options)
    raise ConfigError(f"speculative decoding by {name!r} is none of ngram, suffix")
