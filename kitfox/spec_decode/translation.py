"""Guesses of a draft model that has another vocabulary: tokens become text, and text becomes the other's tokens.

A text is handed on for good up to its last whole word, so that it need not be taken back when more of it comes; what is
behind that goes along with each question only. Of an answer the text is taken that is there whole. A wrong translation
costs time and nothing else, like every guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from kitfox.spec_decode.model_proposers import DraftProposer
from kitfox.spec_decode.proposer import Proposal, Proposer

# A text without spaces is cut after so many bytes, or what goes along with each question would grow with it.
LONGEST_WORD_BYTES = 64
_WHITESPACE = b" \t\n\r"


class Translator(Protocol):
    """What is needed of a tokenizer."""

    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class TranslatingProposer(Proposer):
    """Around a draft model's proposer: requests and guesses in the target's tokens, the draft's in its own."""

    def __init__(self, proposer: DraftProposer, target: Translator, draft: Translator):
        self._proposer = proposer
        self._target = target
        self._draft = draft
        self._tails: dict[str, bytearray] = {}  # what has not been handed on

    def start(
        self, request_id: str, token_ids: Sequence[int], *, num_prompt_tokens: int, salt: str | None = None
    ) -> None:
        tail = self._tails[request_id] = bytearray()
        first = self._draft.encode("", parse_special=False)  # what it wants at the beginning of every text
        whole = first + self._take_whole(tail, token_ids)
        self._proposer.start(request_id, whole, num_prompt_tokens=len(whole), salt=salt)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        whole = self._take_whole(self._tails[request_id], token_ids)
        if whole:
            self._proposer.extend(request_id, whole)

    def propose(self, limits: Mapping[str, int]) -> dict[str, Proposal]:
        tails = {name: self._encode(bytes(self._tails[name])) for name in limits}
        guesses = self._proposer.propose(limits, tails)
        proposals = {name: self._translate(guess, limits[name]) for name, guess in guesses.items()}
        return {name: proposal for name, proposal in proposals.items() if proposal.token_ids}

    def finish(self, request_id: str, *, keep: bool) -> None:
        self._tails.pop(request_id, None)
        self._proposer.finish(request_id, keep=keep)

    def flush_cache(self) -> None:
        self._proposer.flush_cache()

    @property
    def memory_bytes(self) -> int:
        return self._proposer.memory_bytes + sum(map(len, self._tails.values()))

    def _take_whole(self, tail: bytearray, token_ids: Sequence[int]) -> list[int]:
        """Append a request's new text to its tail and take the whole words off: the draft's tokens.

        Where words end depends on the text alone, not on how it came.
        """
        tail += _bytes_of(self._target, token_ids)
        whole: list[int] = []
        start = end = 0
        for position in range(1, len(tail)):
            if tail[position] in _WHITESPACE and tail[position - 1] not in _WHITESPACE:
                end = position
            elif position - end >= LONGEST_WORD_BYTES and tail[position] & 0xC0 != 0x80:  # a character begins
                whole += self._encode(bytes(tail[start:end])) + self._encode(bytes(tail[end:position]))
                start = end = position
        whole += self._encode(bytes(tail[start:end]))
        del tail[:end]
        return whole

    def _encode(self, text: bytes) -> list[int]:
        if not text:
            return []
        return self._draft.encode(text.decode("utf-8", "replace"), add_special_tokens=False, parse_special=False)

    def _translate(self, guess: Proposal, limit: int) -> Proposal:
        """A guess of the draft in the target's tokens, each with the chance that its last byte has."""
        text = b""
        chance = 1.0
        chances: list[float] = []  # a byte
        for token_id, probability in zip(guess.token_ids, guess.probabilities, strict=True):
            if token_id in self._draft.special_ids:
                break
            chance *= probability
            piece = self._draft.token_bytes(token_id)
            text += piece
            chances += [chance] * len(piece)
        whole = text.decode("utf-8", "ignore")
        if not text.startswith(whole.encode()):  # it goes on in the middle of a character
            return Proposal()
        token_ids = self._target.encode(whole, add_special_tokens=False, parse_special=False)[:limit]
        probabilities = []
        before, end = 1.0, 0
        for token_id in token_ids:
            end = min(end + len(self._target.token_bytes(token_id)), len(chances))
            after = chances[end - 1] if end else 1.0
            probabilities.append(after / before if before > 0 else 0.0)
            before = after
        return Proposal(token_ids, probabilities)


def _bytes_of(tokens: Translator, token_ids: Iterable[int]) -> bytes:
    return b"".join(map(tokens.token_bytes, token_ids))
