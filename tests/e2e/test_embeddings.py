"""Vectors of the real model: they tell likeness, and neither chunks nor company change them."""

from __future__ import annotations

import numpy as np
import pytest

from kitfox import LLM
from kitfox.errors import InvalidParameterError

pytestmark = pytest.mark.model
PAIRS = [
    ("The cat sat on the mat.", "A kitten is lying on the rug."),
    ("How do I install Python packages?", "What is the command to add a Python library?"),
    ("The stock market fell sharply today.", "Shares dropped a lot in today's trading."),
]
TEXTS = [text for pair in PAIRS for text in pair]
OPTIONS = {"max_model_len": 256, "num_blocks": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2-135m", **OPTIONS)


def test_texts_that_mean_the_same_are_nearest(llm: LLM) -> None:
    vectors = np.array(llm.embed(TEXTS, use_tqdm=False))
    assert vectors.shape == (6, llm.model_config.hidden_size)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -1)
    assert likeness.argmax(axis=1).tolist() == [1, 0, 3, 2, 5, 4]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_chunks_and_company_change_nothing(pooling: str, llm: LLM) -> None:
    long = " ".join(TEXTS)
    alone = [llm.embed(text, pooling=pooling, use_tqdm=False)[0] for text in (*TEXTS, long)]
    assert llm.embed([*TEXTS, long], pooling=pooling, use_tqdm=False) == alone
    in_chunks = LLM("smollm2-135m", **OPTIONS, max_num_batched_tokens=16, pooling=pooling)
    assert in_chunks.embed([*TEXTS, long], use_tqdm=False) == alone


def test_a_wrong_pooling_is_named(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="pooling must be one of mean, last"):
        llm.embed("text", pooling="cls", use_tqdm=False)  # type: ignore[arg-type]
