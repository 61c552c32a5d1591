"""Grammars of the schemas that JSON-Schema-Test-Suite and MaskBench bring: nothing invalid passes.

A part of `benchmarks/grammar_masks.py`, which does the whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.grammar_masks import SUITES, load_suite, tally_suite
from kitfox.structured_output.backends import make_grammar_compiler
from tests.structured_output.vocabularies import VOCABULARY

DATA = Path(os.environ.get("KITFOX_JSON_SCHEMA_DATA", Path(__file__).parents[3] / "shared/data/jsonschema"))
MAX_SCHEMA_CHARACTERS = 3_000


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("suite", SUITES)
def test_no_invalid_instance_passes(backend: str, suite: str) -> None:
    if not DATA.is_dir():
        pytest.skip("the suites are not here (KITFOX_JSON_SCHEMA_DATA)")
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    cases = [case for case in load_suite(DATA, suite) if len(str(case.schema)) <= MAX_SCHEMA_CHARACTERS][::2]
    compiler = make_grammar_compiler(backend, VOCABULARY, max_whitespace=8)
    tally = tally_suite(cases, compiler, lambda text: list(text.encode("utf-8", "surrogatepass")), VOCABULARY)
    assert tally.accepted_invalid == []
    assert tally.instances["valid, accepted"] > 100
    if suite == "MaskBench":
        assert tally.instances["valid, not accepted"] == 0
