"""The law, with guesses: whoever guesses, and however badly, the tokens are those of plain decoding.

On the default model. A seeded draw is compared with the guess, so drawn answers are the same too, not only alike.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kitfox import LLM, SamplingParams
from kitfox.config import SpeculationConfig
from kitfox.constraint import Constraint, JsonSchema
from kitfox.outputs import RequestOutput
from kitfox.spec_decode.proposer import Proposal, Proposer
from kitfox.spec_decode.speculator import Speculator

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {"foxes": {"type": "array", "items": {"enum": ["red", "grey"]}, "minItems": 2, "maxItems": 6}},
    "required": ["foxes"],
    "additionalProperties": False,
}
REPEATING = "fox, dog, fox, dog, fox, dog, fox, dog, fox,"
PROMPTS = [REPEATING, "A quick brown fox", "1 2 3 4 1 2 3 4 1 2 3", "The capital of France is"]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "penalised": {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "biased": {"temperature": 0.7, "top_k": 20, "min_p": 0.05, "seed": 3, "logit_bias": {28: 2.0, 216: -5.0}},
    "reported": {"temperature": 0, "logprobs": 2},
    "constrained": {"temperature": 0, "constraint": Constraint(format=JsonSchema(schema=SCHEMA))},
    "stopped": {"temperature": 0, "stop": ("dog, fox", "Paris"), "min_tokens": 5},
    "forbidden": {"temperature": 0, "bad_words": ("fox",), "seed": 1},
}


class Oracle(Proposer):
    """Guesses what a script says, right or wrong."""

    memory_bytes = 0

    def __init__(self, kind: str, answers: Mapping[tuple[int, ...], list[int]], vocab_size: int):
        self.kind = kind
        self.answers = answers  # by the first tokens of a prompt
        self.vocab_size = vocab_size
        self.texts: dict[str, tuple[int, list[int]]] = {}
        self.random = random.Random(0)

    def start(
        self, request_id: str, token_ids: Sequence[int], *, num_prompt_tokens: int, salt: str | None = None
    ) -> None:
        self.texts[request_id] = (num_prompt_tokens, list(token_ids))

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.texts[request_id][1].extend(token_ids)

    def finish(self, request_id: str, *, keep: bool) -> None:
        self.texts.pop(request_id, None)

    def propose(self, limits: Mapping[str, int]) -> dict[str, Proposal]:
        return {name: self._guess(name, limit) for name, limit in limits.items()}

    def _guess(self, name: str, limit: int) -> Proposal:
        num_prompt, tokens = self.texts[name]
        truth = self.answers[tuple(tokens[:num_prompt])][len(tokens) - num_prompt :][:limit]
        if self.kind == "wrong":
            truth = [(token + 1) % self.vocab_size for token in truth]
        elif self.kind == "sometimes":
            truth = [token if self.random.random() < 0.7 else 17 for token in truth]
        elif self.kind == "any length":
            truth = truth[: self.random.randrange(limit + 1)]
        return Proposal(truth, [0.9] * len(truth))


def make_llm(**options: Any) -> LLM:
    return LLM("smollm2-135m", **{"max_model_len": 512, "num_blocks": 64, **options})


def answers(llm: LLM, fields: dict[str, Any], **more: Any) -> list[RequestOutput]:
    return llm.generate(PROMPTS, SamplingParams(**{"max_tokens": 32, **fields, **more}), use_tqdm=False)


def shown(outputs: list[RequestOutput]) -> list[list[tuple]]:
    return [[(a.token_ids, a.text, a.finish_reason, a.logprobs) for a in o.outputs] for o in outputs]


@pytest.fixture(scope="module")
def plain_llm() -> LLM:
    return make_llm(cache="none", max_num_seqs=1)


@pytest.fixture(scope="module")
def plain(plain_llm: LLM) -> dict[str, list[RequestOutput]]:
    return {name: answers(plain_llm, fields, n=2 if "seed" in fields else 1) for name, fields in SETTINGS.items()}


SAME_MODEL = {"model": "smollm2-135m", "min_probability": 0.5}
MODELS_THAT_GUESS: dict[str, dict[str, Any]] = {
    "the model itself": {"speculation": "draft", "options": SAME_MODEL},
    "random numbers": {"speculation": "draft", "options": {**SAME_MODEL, "load_format": "dummy"}},
    "its first layers": {"speculation": "self", "options": {"num_layers": 26}, "num_draft_tokens": 1},
}


@pytest.mark.parametrize(
    ("method", "cache", "adaptive"),
    [
        ("ngram", "paged", False),
        ("suffix", "radix", False),
        ("suffix", "paged", True),
        ("the model itself", "paged", False),
        ("the model itself", "radix", True),
        ("its first layers", "radix", False),
    ],
)
def test_every_setting_in_company_cold_and_warm(method: str, cache: str, adaptive: bool, plain: dict):
    guessing = MODELS_THAT_GUESS.get(method, {"speculation": method})
    llm = make_llm(**guessing, cache=cache, adaptive=adaptive, max_num_seqs=6, max_num_batched_tokens=32)
    for name, fields in SETTINGS.items():
        for _ in range(2):
            assert shown(answers(llm, fields, n=2 if "seed" in fields else 1)) == shown(plain[name]), name
    assert adaptive or llm.stats.speculation.num_accepted_tokens > 0
    llm._client.core.scheduler.kv_cache.check_integrity()


@pytest.mark.parametrize("kind", ["right", "wrong", "sometimes", "any length"])
@pytest.mark.parametrize("setting", ["greedy", "seeded", "reported", "constrained", "stopped"])
def test_adversaries_change_nothing_but_speed(kind: str, setting: str, plain: dict, plain_llm: LLM):
    fields = SETTINGS[setting]
    expected = [[answers[0]] for answers in shown(plain[setting])]
    truth = {tuple(o.prompt_token_ids): o.outputs[0].token_ids for o in plain[setting]}
    llm = make_llm(max_num_seqs=4, cache="radix")
    oracle = Oracle(kind, truth, llm.model_config.vocab_size)
    llm._client.core.scheduler.speculator = Speculator(SpeculationConfig(method="ngram", adaptive=False), oracle)
    first = llm.stats.step
    assert shown(answers(llm, fields)) == expected
    stats = llm.stats.speculation
    if kind == "wrong":
        assert stats.num_accepted_tokens == 0
    if kind == "right":
        assert stats.num_accepted_tokens >= stats.num_draft_tokens - 4 * len(PROMPTS)  # an answer may end before them
        assert llm.stats.step - first <= 12


@pytest.mark.parametrize(
    ("method", "cache"),
    [("suffix", "paged"), ("suffix", "radix"), *((method, "paged") for method in MODELS_THAT_GUESS)],
)
def test_preemption_and_a_small_pool(method: str, cache: str, plain: dict):
    llm = make_llm(
        **MODELS_THAT_GUESS.get(method, {"speculation": method}),
        adaptive=False,
        cache=cache,
        max_num_seqs=4,
        block_size=16,
        num_blocks=7,
        max_model_len=112,
    )
    assert shown(answers(llm, SETTINGS["greedy"])) == shown(plain["greedy"])
    assert llm.stats.num_preemptions > 0
    assert llm.stats.num_free_blocks == 7


def test_an_answer_says_what_guesses_were_worth(plain: dict):
    llm = make_llm(speculation="ngram", adaptive=False)
    output = answers(llm, SETTINGS["greedy"])[0]
    assert output.timings is not None
    assert output.timings.draft_tokens >= output.timings.accepted_tokens > 0
    assert llm.stats.speculation.num_draft_tokens >= output.timings.draft_tokens
    assert shown([output]) == shown(plain["greedy"][:1])
