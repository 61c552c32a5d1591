"""Prompt lookup: an answer goes on as its own text did after the same words.

Among the latest places where the longest known n-gram occurred, the one with the longest agreement wins, and of equals
the latest. How likely a draft is to be accepted follows that length: measured over agent sessions, code and chat with
benchmarks/proposers.py, the next token of a match of L tokens is wrong about 1.6 times in L + 0.7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kitfox.errors import ConfigError
from kitfox.spec_decode.occurrences import Text
from kitfox.spec_decode.proposer import Proposal, Proposer

_COMPARED_LENGTH = 64
_MOST_PLACES = 16
_WRONG, _OFFSET = 1.6, 0.7


class NgramProposer(Proposer):
    """Learns nothing from one request for another: `salt` and `keep` make no difference."""

    def __init__(self, *, min_length: int = 2, max_length: int = 4, num_draft_tokens: int = 16) -> None:
        """
        Args:
            min_length: of the n-gram that must have occurred, in tokens, >= 1.
            max_length: of the n-grams that are looked for, <= 64.
            num_draft_tokens: at most, in one proposal.

        Raises:
            ConfigError: the lengths are out of range.
        """
        if not 1 <= min_length <= max_length <= _COMPARED_LENGTH:
            limit = f"1 <= min_length <= max_length <= {_COMPARED_LENGTH}"
            raise ConfigError(f"n-grams need {limit}. Given: {min_length} and {max_length}")
        self._orders = range(max_length, min_length - 1, -1)
        self._num_draft_tokens = num_draft_tokens
        self._texts: dict[str, Text] = {}

    def start(
        self, request_id: str, token_ids: Sequence[int], *, num_prompt_tokens: int, salt: str | None = None
    ) -> None:
        text = self._texts[request_id] = Text(self._orders, _COMPARED_LENGTH)
        text.append(token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._texts[request_id].append(token_ids)

    def propose(self, limits: Mapping[str, int]) -> dict[str, Proposal]:
        proposals = {}
        for request_id, limit in limits.items():
            text = self._texts[request_id]
            matches = text.matches(text.suffix(), _MOST_PLACES)
            if matches:
                length, position = max(matches)
                token_ids = text.continuation(position, min(limit, self._num_draft_tokens)).tolist()
                probabilities = [1 - _WRONG / (length + step + _OFFSET) for step in range(len(token_ids))]
                proposals[request_id] = Proposal(token_ids, probabilities)
        return proposals

    def finish(self, request_id: str, *, keep: bool) -> None:
        self._texts.pop(request_id, None)

    @property
    def memory_bytes(self) -> int:
        return sum(text.memory_bytes for text in self._texts.values())
