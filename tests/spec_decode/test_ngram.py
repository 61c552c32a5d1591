from __future__ import annotations

import pytest

from kitfox.errors import ConfigError
from kitfox.spec_decode.ngram import NgramProposer
from kitfox.spec_decode.proposer import Proposal


def propose(proposer: NgramProposer, tokens: list[int], limit: int = 3) -> Proposal | None:
    proposer.start("a", tokens, num_prompt_tokens=len(tokens))
    return proposer.propose({"a": limit}).get("a")


def test_the_longest_agreement_wins() -> None:
    proposal = propose(NgramProposer(), [5, 1, 2, 3, 70, 71, 72, 6, 2, 3, 80, 81, 82, 1, 2, 3])
    assert proposal is not None
    assert proposal.token_ids == [70, 71, 72]


def test_longer_than_the_longest_ngram_counts() -> None:
    same = [1, 2, 3, 4]
    proposal = propose(NgramProposer(max_length=4), [9, *same, 70, 8, *same, 80, 9, *same], limit=1)
    assert proposal is not None
    assert proposal.token_ids == [70]


def test_of_equals_the_latest_wins() -> None:
    proposal = propose(NgramProposer(), [1, 2, 70, 71, 72, 1, 2, 80, 81, 82, 1, 2])
    assert proposal is not None
    assert proposal.token_ids == [80, 81, 82]


@pytest.mark.parametrize(("min_length", "found"), [(1, True), (2, True), (3, False)])
def test_shorter_than_the_shortest_ngram_is_nothing(min_length: int, found: bool) -> None:
    proposal = propose(NgramProposer(min_length=min_length, max_length=5), [1, 2, 70, 71, 1, 2])
    assert (proposal is not None) == found


def test_a_repetition_goes_on() -> None:
    proposal = propose(NgramProposer(num_draft_tokens=7), [9, 1, 2, 3, 1, 2, 3, 1, 2, 3], limit=20)
    assert proposal is not None
    assert proposal.token_ids == [1, 2, 3, 1, 2, 3, 1]


def test_a_longer_agreement_is_more_likely_right() -> None:
    tokens = list(range(100, 160))
    short, long = (propose(NgramProposer(), [*tokens, *tokens[:length]]) for length in (2, 20))
    assert short is not None
    assert long is not None
    assert short.probabilities[0] < long.probabilities[0]
    assert short.probabilities == sorted(short.probabilities)


@pytest.mark.parametrize(("min_length", "max_length"), [(0, 3), (4, 3), (2, 65)])
def test_lengths_out_of_range(min_length: int, max_length: int) -> None:
    with pytest.raises(ConfigError, match=f"{min_length} and {max_length}"):
        NgramProposer(min_length=min_length, max_length=max_length)
