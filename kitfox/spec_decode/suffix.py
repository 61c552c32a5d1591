"""Suffix lookup: an answer goes on as this text and finished answers most often did after the same words.

The places where the last tokens occurred before vote for what followed them, each with the square of the length over
which it agrees. The draft follows the votes token by token, as one would walk down a trie of all suffixes: the votes
that went along, over the votes that were there, is the share of a token. The draft is as long as its probabilities
allow.

Finished answers are kept in two generations. The younger one takes in what ends; when it has half of what may be kept,
it becomes the older one, and what was the older one is forgotten. An answer of the older generation that a draft was
taken from moves to the younger one. So those are forgotten that were not of use for longest, in constant time a token.
Requests with different salts share no text: what one wrote is in no draft of the other.

Source: suffix decoding (https://arxiv.org/abs/2411.04975) has the idea of a frequency-weighted suffix tree over past
outputs. The structure here is another one: chains of places, in arrays.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kitfox.errors import ConfigError
from kitfox.spec_decode.occurrences import BYTES_PER_TEXT, BYTES_PER_TOKEN, Text
from kitfox.spec_decode.proposer import Proposal, Proposer

# Lengths of the n-grams that are indexed. Two tokens find something nearly always; eight find the right places among
# the thousands where a long text has the same two.
_ORDERS = (8, 2)
# This request's text and each generation are asked for so many places.
_MOST_PLACES = 16
# A place that agrees over L tokens is wrong about 1.4 times in L + 0.7, beyond what the votes against it say, and what
# was not seen yet has a vote of one. Measured with benchmarks/proposers.py over agent sessions, code and chat.
_WRONG, _OFFSET = 1.4, 0.7
_UNSEEN_VOTES = 1
# Tokens before an answer that are kept with it, so that its beginning can be found.
_NUM_CONTEXT_TOKENS = 16


class SuffixProposer(Proposer):
    """Learns the answers, not the prompts, of requests that finish with `keep`: learning prompts made drafts worse."""

    def __init__(
        self,
        *,
        max_depth: int = 64,
        max_cached_requests: int = 10_000,
        max_memory_bytes: int = 64 << 20,
        num_draft_tokens: int = 16,
        min_probability: float = 0.1,
    ) -> None:
        """
        Args:
            max_depth: tokens over which places are compared, >= 8.
            max_cached_requests: finished ones that are kept, at least half of them the latest; below 2: none.
            max_memory_bytes: of finished requests. Running ones come on top, about 30 bytes a token.
            num_draft_tokens: at most, in one proposal.
            min_probability: a draft ends before the product of its probabilities falls below.

        Raises:
            ConfigError: one of them is out of range.
        """
        if max_depth < _ORDERS[0]:
            raise ConfigError(f"max_depth must be at least {_ORDERS[0]}, not {max_depth}")
        if not 0 <= min_probability <= 1:
            raise ConfigError(f"min_probability must be in [0, 1], not {min_probability}")
        self._max_depth = max_depth
        self._half_requests = max_cached_requests // 2
        self._half_bytes = max_memory_bytes // 2
        self._num_draft_tokens = num_draft_tokens
        self._min_probability = min_probability
        self._running: dict[str, _Running] = {}
        self._younger, self._older = _Generation(), _Generation()
        # Which answers of the older generation drafts were taken from: salt and number. A dict for its order.
        self._useful: dict[tuple[str | None, int], None] = {}

    def start(
        self, request_id: str, token_ids: Sequence[int], *, num_prompt_tokens: int, salt: str | None = None
    ) -> None:
        text = Text(_ORDERS, self._max_depth)
        text.append(token_ids)
        self._running[request_id] = _Running(text, num_prompt_tokens, salt)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._running[request_id].text.append(token_ids)

    def propose(self, limits: Mapping[str, int]) -> dict[str, Proposal]:
        proposals = {}
        for request_id, limit in limits.items():
            branches = self._branches(self._running[request_id], min(limit, self._num_draft_tokens))
            proposal = self._most_likely_path(branches)
            if proposal.token_ids:
                proposals[request_id] = proposal
        return proposals

    def finish(self, request_id: str, *, keep: bool) -> None:
        running = self._running.pop(request_id, None)
        if running is not None and keep:
            self._keep_useful()
            first = self._max_depth + max(0, running.num_prompt_tokens - _NUM_CONTEXT_TOKENS)
            self._learn(running.salt, running.text.tokens[first:])

    @property
    def memory_bytes(self) -> int:
        own = sum(running.text.memory_bytes for running in self._running.values())
        return own + self._younger.memory_bytes + self._older.memory_bytes

    def _branches(self, running: _Running, limit: int) -> list[_Branch]:
        """What followed the places that agree, at most `limit` tokens each; those of this request come first."""
        suffix = running.text.suffix()
        branches: dict[bytes, _Branch] = {}
        texts = [running.text]
        younger, older = self._younger.answers.get(running.salt), self._older.answers.get(running.salt)
        if younger is not None:
            texts.append(younger.text)
        if older is not None:
            texts.append(older.text)
        for text in texts:
            matches = text.matches(suffix, _MOST_PLACES)
            for length, position in matches:
                token_ids = text.continuation(position, limit)
                key = token_ids.tobytes()
                branch = branches.get(key)
                if branch is None:
                    branches[key] = _Branch(token_ids, length * length, length)
                    continue
                branch.votes += length * length
                if length > branch.length:
                    branch.length = length
            if matches and older is not None and text is older.text:
                length, position = max(matches)
                if length >= _ORDERS[0]:  # a shorter one may be any text's
                    self._useful[running.salt, older.number_at(position)] = None
        return list(branches.values())

    def _most_likely_path(self, branches: list[_Branch]) -> Proposal:
        token_ids: list[int] = []
        probabilities: list[float] = []
        votes = sum(branch.votes for branch in branches)
        longest = max((branch.length for branch in branches), default=0)
        product = 1.0
        while True:
            step = len(token_ids)
            votes_for: dict[int, int] = {}
            for branch in branches:
                if step < len(branch.token_ids):
                    token_id = branch.token_ids[step]
                    votes_for[token_id] = votes_for.get(token_id, 0) + branch.votes
            if not votes_for:
                break
            chosen = max(votes_for, key=votes_for.__getitem__)
            if votes_for[chosen] < votes:
                branches = [branch for branch in branches if branch.token_at(step) == chosen]
                longest = max(branch.length for branch in branches)
            share = votes_for[chosen] / (votes + _UNSEEN_VOTES)
            probability = share * (1 - _WRONG / (longest + step + _OFFSET))
            product *= probability
            if product < self._min_probability:
                break
            token_ids.append(chosen)
            probabilities.append(probability)
            votes = votes_for[chosen]
        return Proposal(token_ids, probabilities)

    def _keep_useful(self) -> None:
        """Move answers of the older generation that were of use to the younger one."""
        older, useful = self._older, list(self._useful)
        self._useful.clear()
        for salt, number in useful:
            self._learn(salt, older.answers[salt].take(number))

    def _learn(self, salt: str | None, answer: array[int]) -> None:
        longest = self._half_bytes // (2 * BYTES_PER_TOKEN)
        answer = answer[max(0, len(answer) - longest) :]
        if not self._has_room(salt, len(answer)):
            self._younger, self._older = _Generation(), self._younger
        if self._has_room(salt, len(answer)):
            self._younger.add(salt, answer, self._max_depth)

    def _has_room(self, salt: str | None, num_tokens: int) -> bool:
        generation = self._younger
        most_bytes = generation.most_bytes_with(salt, num_tokens, self._max_depth)
        return generation.num_answers < self._half_requests and most_bytes <= self._half_bytes


class _Generation:
    """Finished answers, by salt."""

    def __init__(self) -> None:
        self.answers: dict[str | None, _Answers] = {}
        self.num_answers = 0
        self._num_tokens = 0

    @property
    def memory_bytes(self) -> int:
        return sum(answers.memory_bytes for answers in self.answers.values())

    def most_bytes_with(self, salt: str | None, num_tokens: int, max_depth: int) -> int:
        """What it holds at most with one more answer of so many tokens."""
        num_salts = len(self.answers) + (salt not in self.answers)
        # A gap and a start for each answer are less than two tokens.
        num_tokens += self._num_tokens + 2 * (self.num_answers + 1)
        return BYTES_PER_TOKEN * (num_tokens + num_salts * max_depth) + BYTES_PER_TEXT * num_salts

    def add(self, salt: str | None, answer: array[int], max_depth: int) -> None:
        answers = self.answers.get(salt)
        if answers is None:
            answers = self.answers[salt] = _Answers(Text(_ORDERS, max_depth), array("i"))
        answers.starts.append(answers.text.append_text(answer))
        self.num_answers += 1
        self._num_tokens += len(answer)


@dataclass(slots=True)
class _Running:
    text: Text
    num_prompt_tokens: int
    salt: str | None


@dataclass(slots=True)
class _Branch:
    """What followed some places. Length is that of the longest agreement among them."""

    token_ids: array[int]
    votes: int
    length: int

    def token_at(self, step: int) -> int | None:
        return self.token_ids[step] if step < len(self.token_ids) else None


@dataclass(slots=True)
class _Answers:
    """Answers one after the other in a text, and the position of the first token of each."""

    text: Text
    starts: array[int]

    @property
    def memory_bytes(self) -> int:
        return self.text.memory_bytes + sys.getsizeof(self.starts)

    def number_at(self, position: int) -> int:
        return bisect_right(self.starts, position) - 1

    def take(self, number: int) -> array[int]:
        """An answer, which is not found here any more."""
        starts = [*self.starts[number : number + 2], len(self.text.tokens)]
        return self.text.take(starts[0], starts[1] - 1)
