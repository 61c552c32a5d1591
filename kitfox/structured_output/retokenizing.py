"""Text that a grammar forces becomes the tokens that the model itself would have written."""

from __future__ import annotations

from bisect import bisect_right

import tokenizers

from kitfox.structured_output.vocabulary import Vocabulary

_MAX_OVERLAP_BYTES = 32  # longer tokens are runs of spaces and the like


class Retokenizer:
    """Cuts forced bytes into tokens, and says how many of them stay the same whatever comes next."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._backend: tokenizers.Tokenizer | None = None
        special = set(vocabulary.special_ids)
        self._special_ids = special
        self._sorted_bytes = sorted(
            {data for i, data in enumerate(vocabulary.token_bytes) if data and i not in special}
        )
        if vocabulary.tokenizer_json:
            self._backend = tokenizers.Tokenizer.from_str(vocabulary.tokenizer_json)
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = True  # forced text is text, even where it looks like a special token

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that stands inside a longer one."""
        if not text:
            return []
        # Some tokenizers put a space before what comes first.
        before, both = self._encode("\n"), self._encode("\n" + text)
        return both[len(before) :] if both[: len(before)] == before else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        assert self._backend is not None, "a vocabulary without a tokenizer forces no tokens"
        return self._backend.encode(text, add_special_tokens=False).ids

    def continue_with(self, last_token_id: int | None, data: bytes) -> tuple[list[int], int]:
        """The tokens of `data`, and how many of them, from the first on, no text that may follow would change.

        Args:
            last_token_id: the token before; where the tokenizer would keep it in the longer text, it keeps its place.
        """
        if self._backend is None:
            return [], 0
        text = _whole_characters(data)
        token_ids = self._tokens_behind(last_token_id, text)
        uncertain_from = len(text.encode()) - self._overlap(text.encode())
        end, num_certain = 0, 0
        for token_id in token_ids:
            end += len(self._vocabulary.token_bytes[token_id])
            num_certain += end <= uncertain_from
        return token_ids, num_certain

    def _tokens_behind(self, last_token_id: int | None, text: str) -> list[int]:
        if last_token_id is not None and last_token_id not in self._special_ids:
            try:
                before = self._vocabulary.token_bytes[last_token_id].decode()
            except UnicodeDecodeError:
                before = ""
            if before:
                both = self.encode(before + text)
                if both and both[0] == last_token_id:
                    return both[1:]
        return self.encode(text)

    def _overlap(self, data: bytes) -> int:
        """Length of the longest end of `data` with which a longer token begins."""
        for length in range(min(len(data), _MAX_OVERLAP_BYTES), 0, -1):
            end = data[-length:]
            place = bisect_right(self._sorted_bytes, end)
            if place < len(self._sorted_bytes) and self._sorted_bytes[place].startswith(end):
                return length
        return 0


def _whole_characters(data: bytes) -> str:
    """The text of UTF-8 that may stop inside a character, up to there."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()
