"""A small vocabulary: every byte, some longer tokens and three special ones."""

from __future__ import annotations

import numpy as np

from kitfox.structured_output.grammar import Grammar
from kitfox.structured_output.vocabulary import Vocabulary

_MERGES = ["ab", "abc", "bc", '{"', '":', '": ', '", "', ",", "true", "12", "</", "  ", " }", "\u00e9", '"}', "},"]
_SPECIAL_TEXTS = ["<|end|>", "<|tool|>", "<|other|>"]
_TEXTS = [bytes([byte]) for byte in range(256)] + [text.encode() for text in _MERGES]

END_ID, TOOL_ID, OTHER_ID = range(len(_TEXTS), len(_TEXTS) + 3)
NO_TEXT_ID = OTHER_ID + 1

VOCABULARY = Vocabulary(
    token_bytes=[*_TEXTS, *(text.encode() for text in _SPECIAL_TEXTS), b""],
    special_ids=[END_ID, TOOL_ID, OTHER_ID],
    special_texts=_SPECIAL_TEXTS,
    eos_token_ids=[END_ID],
)


def tokens_of(text: str) -> list[int]:
    """A byte at a time, special tokens by their texts."""
    ids: list[int] = []
    data = text.encode()
    while data:
        for token_id, special in zip(VOCABULARY.special_ids, _SPECIAL_TEXTS, strict=True):
            if data.startswith(special.encode()):
                ids.append(token_id)
                data = data[len(special) :]
                break
        else:
            ids.append(data[0])
            data = data[1:]
    return ids


def allowed_by(grammar: Grammar, vocabulary: Vocabulary = VOCABULARY) -> list[int]:
    """The tokens that the mask lets pass."""
    row = np.full(vocabulary.num_mask_words, -1, np.int32)
    grammar.fill_bitmask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[vocabulary.size :].any()
    return np.flatnonzero(bits[: vocabulary.size]).tolist()
