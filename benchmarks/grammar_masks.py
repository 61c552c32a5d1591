"""Structured output at the level of masks, without a model: is what a grammar lets pass valid, and what does it cost?

Reads JSON-Schema-Test-Suite groups and MaskBench schemas with their instances, and walks each instance, token by
token, through the grammar of its schema:

    python -m benchmarks.grammar_masks --data DIR --model smollm2-135m
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kitfox.constraint import GrammarError, JsonSchema
from kitfox.structured_output.backends import make_grammar_compiler
from kitfox.structured_output.grammar import BitmaskRow, CompiledGrammar, GrammarCompiler
from kitfox.structured_output.schema import check_format
from kitfox.structured_output.vocabulary import Vocabulary
from kitfox.tokenizer import load_tokenizer
from kitfox.weights.hub import resolve_model

SUITES = {
    "MaskBench": ("maskbench_sample.jsonl", None),
    "Test-Suite draft 7": ("json_schema_test_suite_draft7.jsonl", "http://json-schema.org/draft-07/schema#"),
    "Test-Suite 2020-12": ("json_schema_test_suite_draft2020-12.jsonl", None),
}
SPACINGS = [(",", ":"), (", ", ": ")]
REFUSAL_LENGTH = 90


@dataclass
class Instance:
    """A value, whether it is valid, and what a peer's run of llguidance said of it.

    Attributes:
        spellings: as JSON, in each of `SPACINGS`, then with escapes that are not needed.
    """

    spellings: list[str]
    is_valid: bool
    peer: str | None


@dataclass
class Case:
    """One schema and its instances."""

    name: str
    schema: dict[str, Any] | bool
    instances: list[Instance]
    peer: str | None = None


def spellings_of(value: Any) -> list[str]:
    """The JSON texts of a value that are tried."""
    plain = [json.dumps(value, separators=spacing, ensure_ascii=False) for spacing in SPACINGS]
    escaped = json.dumps(value)
    return plain if escaped in plain else [*plain, escaped]


def load_suite(directory: Path, suite: str) -> list[Case]:
    """The cases of one of `SUITES`."""
    file, dialect = SUITES[suite]
    cases = []
    with (directory / file).open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            schema = row["schema"]
            if dialect is not None and isinstance(schema, dict):
                schema = {"$schema": dialect, **schema}
            instances = [
                Instance(spellings_of(test["data"]), test["valid"], test.get("llguidance")) for test in row["tests"]
            ]
            name = row.get("id") or f"{row['file']}: {row['desc']}"
            cases.append(Case(name, schema, instances, row.get("llguidance")))
    return cases


@dataclass
class Tally:
    """What came of the cases of one suite."""

    schemas: Counter[str] = field(default_factory=Counter)
    instances: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    accepted_invalid: list[str] = field(default_factory=list)
    compile_ms: list[float] = field(default_factory=list)
    mask_ms: list[float] = field(default_factory=list)


Encode = Callable[[str], list[int]]


def tally_suite(cases: list[Case], compiler: GrammarCompiler, encode: Encode, vocabulary: Vocabulary) -> Tally:
    """Compile each schema and walk its instances, filling a mask before each token."""
    tally = Tally()
    row = np.empty(vocabulary.num_mask_words, np.int32)
    for case in cases:
        format = JsonSchema(schema=case.schema)
        start = time.perf_counter()
        try:
            check_format(format)
            grammar = compiler.compile(format)
        except GrammarError as error:
            tally.schemas["refused"] += 1
            tally.refusals[str(error)[:REFUSAL_LENGTH]] += 1
            for instance in case.instances:
                tally.instances["valid, refused" if instance.is_valid else "invalid, refused"] += 1
            continue
        tally.compile_ms.append(1e3 * (time.perf_counter() - start))
        tally.schemas["compiled"] += 1
        for instance in case.instances:
            accepted = [passes(grammar, encode(text), row, tally.mask_ms) for text in instance.spellings]
            count(tally, case, instance, accepted)
    return tally


def passes(grammar: CompiledGrammar, tokens: list[int], row: BitmaskRow, mask_ms: list[float]) -> bool:
    """Whether the tokens are a whole answer."""
    walk = grammar.start()
    for token_id in tokens:
        start = time.perf_counter()
        walk.fill_bitmask(row)
        mask_ms.append(1e3 * (time.perf_counter() - start))
        is_allowed = bool(row[token_id // 32] >> (token_id % 32) & 1)
        assert walk.accept(token_id) == is_allowed, "mask and accept disagree"
        if not is_allowed:
            return False
    return walk.may_end


def bare_llguidance(cases: list[Case], encode: Encode, vocabulary: Vocabulary) -> Tally:
    """The same schemas through llguidance as its manual has it, without kitfox."""
    import llguidance
    import llguidance.numpy

    from kitfox.structured_output.llguidance_backend import TokenTable

    tally = Tally()

    class Tokens(TokenTable):
        def __call__(self, text: bytes | str) -> list[int]:
            return encode(text.decode() if isinstance(text, bytes) else text)

    tokenizer = llguidance.LLTokenizer(Tokens(vocabulary))
    mask = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
    for case in cases:
        start = time.perf_counter()
        grammar = json.dumps({"grammars": [{"json_schema": case.schema}]})
        prototype = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if prototype.is_error():
            tally.schemas["refused"] += 1
            continue
        tally.compile_ms.append(1e3 * (time.perf_counter() - start))
        tally.schemas["compiled"] += 1
        for instance in case.instances:
            verdicts = []
            for text in instance.spellings:
                matcher = prototype.deep_copy()
                is_whole = True
                for token_id in encode(text):
                    start = time.perf_counter()
                    llguidance.numpy.fill_next_token_bitmask(matcher, mask)
                    tally.mask_ms.append(1e3 * (time.perf_counter() - start))
                    if not matcher.try_consume_tokens([token_id]):
                        is_whole = False
                        break
                verdicts.append(is_whole and matcher.is_accepting())
            count(tally, case, instance, verdicts)
    return tally


def bare_xgrammar(cases: list[Case], encode: Encode, vocabulary: Vocabulary) -> Tally:
    """The same schemas through XGrammar as its manual has it, without kitfox."""
    import xgrammar

    tally = Tally()
    hidden = {*vocabulary.special_ids, *vocabulary.eos_token_ids}
    texts = [b"" if index in hidden else text for index, text in enumerate(vocabulary.token_bytes)]
    info = xgrammar.TokenizerInfo(texts, stop_token_ids=vocabulary.eos_token_ids)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    mask = xgrammar.allocate_token_bitmask(1, vocabulary.size)
    for case in cases:
        start = time.perf_counter()
        try:
            grammar = compiler.compile_json_schema(json.dumps(case.schema), strict_mode=False)
        except RuntimeError:
            tally.schemas["refused"] += 1
            continue
        tally.compile_ms.append(1e3 * (time.perf_counter() - start))
        tally.schemas["compiled"] += 1
        for instance in case.instances:
            verdicts = []
            for text in instance.spellings:
                matcher = xgrammar.GrammarMatcher(grammar)
                is_whole = True
                for token_id in encode(text):
                    start = time.perf_counter()
                    matcher.fill_next_token_bitmask(mask)
                    tally.mask_ms.append(1e3 * (time.perf_counter() - start))
                    if not matcher.accept_token(token_id):
                        is_whole = False
                        break
                verdicts.append(is_whole and matcher.accept_token(vocabulary.eos_token_ids[0]))
            count(tally, case, instance, verdicts)
    return tally


def count(tally: Tally, case: Case, instance: Instance, accepted: list[bool]) -> None:
    """Note which spellings of an instance a grammar accepted."""
    if instance.is_valid:
        # Escapes that JSON does not need are a spelling that no backend writes.
        tally.instances["valid, accepted" if all(accepted[: len(SPACINGS)]) else "valid, not accepted"] += 1
    else:
        tally.instances["INVALID, ACCEPTED" if any(accepted) else "invalid, not accepted"] += 1
        if any(accepted):
            tally.accepted_invalid.append(f"{case.name}: {instance.spellings[0][:REFUSAL_LENGTH]}")


def peer_verdicts(cases: list[Case]) -> Counter[str]:
    """What the data says of llguidance as others ran it: by schema in MaskBench, by instance in the test suites."""
    by_schema = [case.peer for case in cases if case.peer is not None]
    if by_schema:
        return Counter("compiled" if peer == "ok" else "refused" for peer in by_schema)
    return Counter(instance.peer for case in cases for instance in case.instances if instance.peer is not None)


COLUMNS = [
    "valid, accepted",
    "valid, not accepted",
    "valid, refused",
    "invalid, not accepted",
    "invalid, refused",
    "INVALID, ACCEPTED",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the suites' .jsonl files")
    parser.add_argument("--model", default="smollm2-135m", help="whose vocabulary")
    parser.add_argument("--backends", nargs="+", default=["llguidance", "xgrammar", "auto"])
    parser.add_argument("--suites", nargs="+", default=list(SUITES), choices=list(SUITES))
    parser.add_argument("--bare", action="store_true", help="also the libraries without kitfox")
    parser.add_argument("--refusals", action="store_true", help="also why schemas are refused")
    args = parser.parse_args()

    tokenizer = load_tokenizer(resolve_model(args.model).path)
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, parse_special=False)

    runs: dict[str, Callable[[list[Case]], Tally]] = {}
    for name in args.backends:
        compiler = make_grammar_compiler(name, vocabulary, max_whitespace=8)
        runs[name] = partial(tally_suite, compiler=compiler, encode=encode, vocabulary=vocabulary)
        bare = {"llguidance": bare_llguidance, "xgrammar": bare_xgrammar}.get(name)
        if args.bare and bare is not None:
            runs[f"{name}, bare"] = partial(bare, encode=encode, vocabulary=vocabulary)
    for suite in args.suites:
        cases = load_suite(args.data, suite)
        print(f"\n### {suite}: {len(cases)} schemas, {sum(len(case.instances) for case in cases)} instances\n")
        if peer := peer_verdicts(cases):
            print("llguidance in the data:", ", ".join(f"{count} {name}" for name, count in peer.most_common()), "\n")
        titles = ["backend", "compiled", "refused", *COLUMNS, "compile ms p50", "p99", "mask ms p50", "p99", "max"]
        print("| " + " | ".join(titles) + " |\n|" + " --- |" * len(titles))
        for name, run in runs.items():
            tally = run(cases)
            numbers = [*np.percentile(tally.compile_ms, [50, 99]), *np.percentile(tally.mask_ms, [50, 99, 100])]
            counts = [tally.schemas["compiled"], tally.schemas["refused"], *(tally.instances[c] for c in COLUMNS)]
            print(
                "| " + " | ".join([name, *map(str, counts), *(f"{number:.3g}" for number in numbers)]) + " |",
                flush=True,
            )
            for line in tally.accepted_invalid if "bare" not in name else ():
                print("    accepted though invalid:", line)
            if args.refusals:
                for reason, number in tally.refusals.most_common():
                    print(f"    {number} {reason}")


if __name__ == "__main__":
    main()
