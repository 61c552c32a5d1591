"""One answer's way through its constraint: reasoning first, then the grammar, with the tokens that it forces."""

from __future__ import annotations

import copy

from kitfox.constraint import Reasoning
from kitfox.structured_output.grammar import BitmaskRow, Grammar
from kitfox.structured_output.retokenizing import Retokenizer
from kitfox.structured_output.vocabulary import Vocabulary

_MAX_FORCED_BYTES = 4096  # at a time; more come a step later


class AnswerGrammar:
    """What one answer may still become. Depends on its tokens and nothing else, so that it is the same in any company.

    Before the grammar begins there may be reasoning, in which any token may come but one that ends the answer.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary, retokenizer: Retokenizer, reasoning: Reasoning | None):
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._retokenizer = retokenizer
        self._closer = b"" if reasoning is None else reasoning.closer.encode()
        self._tail = b""  # of the reasoning: what could be the closer's beginning
        self._is_reasoning = reasoning is not None and reasoning.is_open
        self._num_reasoning_tokens = 0
        # A model that thinks only if it wants to says so with its first token.
        self._opener_id = None
        if reasoning is not None and not reasoning.is_open:
            opening_ids = self._mark_ids(reasoning.opener)
            self._opener_id = opening_ids[0] if len(opening_ids) == 1 else None
        self._max_reasoning_tokens = None if reasoning is None else reasoning.max_tokens
        self._closing_ids: list[int] = []
        if reasoning is not None and reasoning.max_tokens is not None:
            self._closing_ids = self._mark_ids(reasoning.closer)
            assert self._closing_ids, f"no token says {reasoning.closer}"

    def _mark_ids(self, mark: str) -> list[int]:
        """A mark may be a special token, a token that is not called special, or a few."""
        special_id = self._vocabulary.special_id_of(mark)
        if special_id is not None:
            return [special_id]
        return self._retokenizer.encode(mark) if self._vocabulary.tokenizer_json else []

    @property
    def may_end(self) -> bool:
        """Whether an end token may come next."""
        return not self._is_reasoning and self._grammar.may_end

    @property
    def must_end(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        return not self._is_reasoning and self._grammar.must_end

    def fill_bitmask(self, row: BitmaskRow, end_token_ids: frozenset[int]) -> bool:
        """Write which tokens may come next, and return whether any may not.

        Args:
            end_token_ids: what ends this answer, where it may end.

        Raises:
            GrammarError: the backend's limits were reached.
        """
        closing_id = self._closing_id
        if closing_id is not None:
            allow_only(row, closing_id)
        elif self._is_reasoning:
            row.fill(-1)
            for token_id in end_token_ids:
                row[token_id >> 5] &= ~_BITS[token_id & 31]
        else:
            self._grammar.fill_bitmask(row)
            if self._opener_id is not None:
                _set_bit(row, self._opener_id)
            if self._grammar.may_end:
                for token_id in end_token_ids:
                    _set_bit(row, token_id)
        return bool((row != -1).any())

    def accept(self, token_id: int) -> bool:
        """Go on by one token that does not end the answer; False if it is not allowed."""
        opener_id, self._opener_id = self._opener_id, None
        if self._is_reasoning:
            if self._closing_id not in (None, token_id):
                return False
            self._num_reasoning_tokens += 1
            return self._read_reasoning(self._vocabulary.token_bytes[token_id])
        if token_id == opener_id:
            self._is_reasoning = True
            return True
        return self._grammar.accept(token_id)

    @property
    def _closing_id(self) -> int | None:
        """The token that must come because there was enough reasoning."""
        if not self._is_reasoning or self._max_reasoning_tokens is None:
            return None
        num_late = self._num_reasoning_tokens - self._max_reasoning_tokens
        return self._closing_ids[num_late % len(self._closing_ids)] if num_late >= 0 else None

    def fork(self) -> AnswerGrammar:
        """Another answer that stands at the same place."""
        other = copy.copy(self)
        other._grammar = self._grammar.fork()
        return other

    def _read_reasoning(self, data: bytes) -> bool:
        text = self._tail + data
        start = text.find(self._closer)
        if start < 0:
            self._tail = text[max(len(text) - len(self._closer) + 1, 0) :]
            return True
        self._is_reasoning = False
        # What the closing token says beyond the mark is the answer's beginning, but for the space between them.
        rest = text[start + len(self._closer) :].lstrip()
        return all(
            self._grammar.accept(token_id) for token_id in self._retokenizer.encode(rest.decode("utf-8", "replace"))
        )

    def forced_token_ids(self, last_token_id: int | None, limit: int) -> list[int]:
        """Accept the tokens that must come next, at most `limit` of them, and return them.

        Args:
            last_token_id: the answer's last token, behind which they come.
        """
        if self._is_reasoning or self._opener_id is not None:
            return []
        data = self._grammar.forced_bytes()[:_MAX_FORCED_BYTES]
        if not data:
            return []
        token_ids, num_certain = self._retokenizer.continue_with(last_token_id, data)
        accepted = 0
        for token_id in token_ids[:limit]:
            if not self._grammar.accept(token_id):
                break
            accepted += 1
        if accepted > num_certain and not self._grammar.must_end:
            self._grammar.rollback(accepted - num_certain)  # what follows may change how these are cut
            accepted = num_certain
        return token_ids[:accepted]


_BITS = [1 << bit if bit < 31 else -(1 << 31) for bit in range(32)]  # as int32


def allow_only(row: BitmaskRow, token_id: int) -> None:
    """Write a mask that leaves no choice."""
    row.fill(0)
    _set_bit(row, token_id)


def _set_bit(row: BitmaskRow, token_id: int) -> None:
    row[token_id >> 5] |= _BITS[token_id & 31]
