from __future__ import annotations

import pytest

from kitfox.errors import ConfigError
from kitfox.spec_decode.ngram import NgramProposer
from kitfox.spec_decode.proposers import make_proposer
from kitfox.spec_decode.suffix import SuffixProposer


def test_by_name() -> None:
    assert type(make_proposer("ngram", max_length=3)) is NgramProposer
    assert type(make_proposer("suffix", max_depth=32)) is SuffixProposer


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="'crystal ball' is none of ngram, suffix"):
        make_proposer("crystal ball")
