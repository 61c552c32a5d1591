"""What 8 bits cost: divergence from float32 and agreement with it, on a text that does not change."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import TEXTS, measure
from tests.native import needs_native

MOST_DIVERGENCE = 0.01  # nats
LEAST_AGREEMENT = 0.94


@pytest.mark.model
@pytest.mark.slow
@needs_native
def test_int8_is_close_to_float32() -> None:
    int8 = measure("smollm2-135m", ["int8"], TEXTS, 6000)["int8"]
    assert int8.kl <= MOST_DIVERGENCE
    assert int8.top_1 >= LEAST_AGREEMENT
