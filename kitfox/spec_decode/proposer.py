"""The interface of those who guess what comes next in an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import msgspec


class Proposal(msgspec.Struct, frozen=True):
    """Draft tokens for one answer, and how likely each is to be accepted if those before it are.

    Attributes:
        token_ids: may be empty; all in the vocabulary.
        probabilities: as many, in [0, 1]: the proposer's own estimate, which the controller corrects by what it sees.
    """

    token_ids: list[int] = []
    probabilities: list[float] = []


NOTHING = Proposal()


class Proposer(ABC):
    """Guesses for every running answer at once. What is proposed for one depends on its own tokens and on what the
    proposer learnt from finished ones, never on who else is in the batch. A wrong guess costs time and nothing else.
    """

    @abstractmethod
    def start(
        self, request_id: str, token_ids: Sequence[int], *, num_prompt_tokens: int, salt: str | None = None
    ) -> None:
        """A request begins, or goes on after it was preempted: all its tokens so far.

        Args:
            salt: what others taught is only shared among requests with the same one.
        """

    @abstractmethod
    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Tokens were appended to it for good, whoever chose them."""

    @abstractmethod
    def propose(self, limits: Mapping[str, int]) -> dict[str, Proposal]:
        """Drafts that follow the last token of each request named.

        Args:
            limits: request id to the most tokens that are wanted, >= 1.

        Returns:
            A proposal for each of them with something to say.
        """

    @abstractmethod
    def finish(self, request_id: str, *, keep: bool) -> None:
        """A request ended (keep: its tokens may teach future ones) or was preempted. Unknown ids are harmless."""

    def flush_cache(self) -> None:  # noqa: B027 (most have none)
        """Forget KV of texts that are gone."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """About how much it holds."""
