"""Where a run of tokens occurred before: the index under the proposers that copy.

Integers in arrays, no object for a token or a place: a text of n tokens takes 4 n bytes, and 8 to 12 n for each order
that is indexed. Places with the same n-gram are chained, the latest first. A chain is found by a hash, so that
strangers may be in it: what `Text.matches` returns was compared token by token.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

# Before the first token and after the last one of each of several texts in one: equal to no token, nor to each other.
_MARGIN, _GAP = -1, -2
_TOKEN_BYTES = 4
_TOKEN_BITS = 32
# Below 2 ** 31, so that (key << 32 | token) fits 64 bits, and far from a power of two, so that tokens mix.
_MODULUS = 1_610_612_741
_SMALLEST_TABLE = 64
# From so many tokens on, numpy's start-up pays.
_BULK = 64
# Places looked at for each match that is wanted; strangers are among them.
_PLACES_A_MATCH = 4
# Most that a text with two orders takes: for each token of margin or text, with the sixteenth by which arrays grow
# ahead, and once. Of the latter, what are objects and no arrays.
BYTES_PER_TOKEN = 30
BYTES_PER_TEXT = 2560
_OBJECT_BYTES = 700


class Text:
    """Tokens that only grow, and the places of their n-grams.

    Attributes:
        tokens: `max_length` of margin, then the text; several texts have a gap between them.
        max_length: tokens over which places are compared.
    """

    __slots__ = ("_chains", "max_length", "tokens")

    def __init__(self, orders: Sequence[int], max_length: int) -> None:
        """`orders` are the lengths of n-grams to index, the longest first; none above `max_length`."""
        self.max_length = max_length
        self.tokens = array("i", [_MARGIN]) * max_length
        self._chains = [_Chains(order, max_length) for order in orders]

    @property
    def memory_bytes(self) -> int:
        return _OBJECT_BYTES + sys.getsizeof(self.tokens) + sum(chains.memory_bytes for chains in self._chains)

    def append(self, token_ids: Sequence[int]) -> None:
        self.tokens.extend(token_ids)
        for chains in self._chains:
            chains.grow(self.tokens)

    def append_text(self, token_ids: Sequence[int]) -> int:
        """Add a text that is complete and unconnected with those before; the position of its first token."""
        if len(self.tokens) == self.max_length:
            self.tokens.append(_GAP)  # or this margin would agree with that of another text
        start = len(self.tokens)
        self.tokens.extend(token_ids)
        self.append((_GAP,))
        return start

    def take(self, start: int, stop: int) -> array[int]:
        """The tokens there, which are never found again; the memory stays."""
        taken = self.tokens[start:stop]
        self.tokens[start:stop] = array("i", [_GAP]) * len(taken)
        return taken

    def suffix(self) -> bytes:
        """The last `max_length` tokens, margin included: what `matches` looks for."""
        return self.tokens[-self.max_length :].tobytes()

    def matches(self, suffix: bytes, most_places: int) -> list[tuple[int, int]]:
        """Where the end of `suffix` occurred and something followed.

        Args:
            suffix: this text's own, or another's with the same `max_length` if all here came by `append_text`.
            most_places: that are returned, the latest first. Four times as many are looked at for each order.

        Returns:
            Of the longest order that occurred: how many tokens agree, and the position of the token that followed.
        """
        tokens, max_length = self.tokens, self.max_length
        wanted = int.from_bytes(suffix, "little")
        from_bytes = int.from_bytes
        for chains in self._chains:
            found = []
            for position in chains.places(suffix, _PLACES_A_MATCH * most_places):
                # The last token is the highest digit of either number, so agreement shows as leading zeros.
                difference = from_bytes(tokens[position - max_length : position].tobytes(), "little") ^ wanted
                length = max_length - -(-difference.bit_length() // _TOKEN_BITS)
                if length >= chains.order and tokens[position] != _GAP:
                    found.append((length, position))
                    if len(found) == most_places:
                        break
            if found:
                return found
        return []

    def continuation(self, position: int, num_tokens: int) -> array[int]:
        """What followed from a place on: fewer tokens where a text was complete.

        One that is not goes on with what was just copied, as a repetition does.
        """
        copied = self.tokens[position : position + num_tokens]
        if _GAP in copied:
            return copied[: copied.index(_GAP)]
        if len(copied) < num_tokens:
            copied *= -(-num_tokens // len(copied))
        return copied[:num_tokens]


class _Chains:
    """For n-grams of one order: the place after the latest one in each hash bucket, and from place to place before.

    Position 0 is in the margin and means none. The table doubles when the next position is its size, and both halves
    begin with the old chains: so a text has the same chains however its tokens came.
    """

    __slots__ = ("_before", "_latest", "order")

    def __init__(self, order: int, margin: int) -> None:
        self.order = order
        self._latest = array("i", bytes(_TOKEN_BYTES * _SMALLEST_TABLE))
        self._before = array("i", bytes(_TOKEN_BYTES * (margin + order)))

    @property
    def memory_bytes(self) -> int:
        return sys.getsizeof(self._latest) + sys.getsizeof(self._before)

    def grow(self, tokens: array[int]) -> None:
        """Note every place that has a token by now."""
        start = len(self._before)
        while start < len(tokens):
            while start >= len(self._latest):
                self._latest.extend(self._latest)
            stop = min(len(tokens), len(self._latest))
            if stop - start >= _BULK:
                self._add_many(tokens, start, stop)
            else:
                self._add_few(tokens, start, stop)
            start = stop

    def places(self, suffix: bytes, most: int) -> Iterator[int]:
        """Where the last n-gram of a suffix, or one of the same bucket, was followed by something; the latest first."""
        before = self._before
        key = int.from_bytes(suffix[-_TOKEN_BYTES * self.order :], "little") % _MODULUS & (len(self._latest) - 1)
        position = self._latest[key]
        while position and most:
            yield position
            position = before[position]
            most -= 1

    def _add_few(self, tokens: array[int], start: int, stop: int) -> None:
        latest, before, order = self._latest, self._before, self.order
        mask = len(latest) - 1
        for position in range(start, stop):
            key = int.from_bytes(tokens[position - order : position].tobytes(), "little") % _MODULUS & mask
            before.append(latest[key])
            latest[key] = position

    def _add_many(self, tokens: array[int], start: int, stop: int) -> None:
        """As `_add_few` does, one by one."""
        window = np.frombuffer(tokens, np.uint32)[start - self.order : stop].astype(np.uint64)
        keys = np.zeros(stop - start, np.uint64)
        for offset in reversed(range(self.order)):
            keys = (keys << np.uint64(32) | window[offset : offset + stop - start]) % np.uint64(_MODULUS)
        buckets = keys & np.uint64(len(self._latest) - 1)
        ordered = buckets << np.uint64(32) | np.arange(start, stop, dtype=np.uint64)
        ordered.sort()
        buckets = (ordered >> np.uint64(32)).astype(np.int32)
        positions = ordered.astype(np.uint32).astype(np.int32)
        first = np.ones(stop - start, bool)  # of their bucket
        first[1:] = buckets[1:] != buckets[:-1]
        last = np.append(first[1:], True)
        latest = np.frombuffer(self._latest, np.int32)
        earlier = np.empty(stop - start, np.int32)
        earlier[1:] = positions[:-1]
        earlier[first] = latest[buckets[first]]
        latest[buckets[last]] = positions[last]
        before = np.empty(stop - start, np.int32)
        before[positions - start] = earlier
        self._before.frombytes(before.tobytes())
