"""What grammars need to know of a tokenizer, in a form that can be sent to another process."""

from __future__ import annotations

from functools import cached_property

import msgspec
import tokenizers

from kitfox.tokenizer import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Every token as bytes.

    Attributes:
        token_bytes: [V], of the model's vocabulary; empty where a token has no text.
        special_ids: tokens that are no text: no grammar allows them but where it names one by a `Mark`.
        special_texts: the text of each of them.
        eos_token_ids: the model's; a request may have others.
        tokenizer_json: the tokenizer as the `tokenizers` library writes it; "" encodes a byte at a time.
    """

    token_bytes: list[bytes]
    special_ids: list[int]
    special_texts: list[str]
    eos_token_ids: list[int]
    tokenizer_json: str = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
        """A model's vocabulary.

        Args:
            vocab_size: rows of the model's output, which may be more, or fewer, than its tokenizer has tokens.
        """
        special_ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        return cls(
            token_bytes=[tokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
            special_ids=special_ids,
            special_texts=[tokenizer.token_text(token_id) for token_id in special_ids],
            eos_token_ids=[token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size],
            tokenizer_json=tokenizer.json,
        )

    @property
    def size(self) -> int:
        return len(self.token_bytes)

    @property
    def num_mask_words(self) -> int:
        """int32 words in a bitmask over the vocabulary."""
        return (self.size + 31) // 32

    def special_id_of(self, text: str) -> int | None:
        """Id of the special token with this text."""
        return self._special_id_of.get(text)

    @cached_property
    def _special_id_of(self) -> dict[str, int]:
        return dict(zip(self.special_texts, self.special_ids, strict=True))

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self.tokenizer_json)
