"""Guesses leave the law of what is sampled as it is: chi-square of drawn tokens against the model's own distribution.

A guess stands if it is what the draw at its place gives anyway. So the first token drawn has its distribution whatever
was guessed, and where that was the guess, the second has the one that follows it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from kitfox.attention.backend import ForwardBatch
from kitfox.executor.model_runner import ModelRunner
from kitfox.models import Model
from kitfox.request import SamplingParams
from kitfox.step import NewRequest, SchedulerOutput
from tests.models.tiny_models import llama, load_ours, random_prompt, save_checkpoint
from tests.native import native_kernels, needs_native

pytestmark = needs_native

BLOCK_SIZE = 16
PROMPT = random_prompt(12, 3).tolist()
NUM_DRAWS = 3000
BATCH = 60
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {3: 3.0, 5: -4.0}},
    "allowed": {"allowed_token_ids": (1, 2, 3, 5, 8, 13)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("model")
    save_checkpoint(llama(head_dim=16), path)  # what compiled attention can do
    return load_ours(path, native_kernels(torch.float32))


def make_runner(model: Model) -> ModelRunner:
    config = model.config
    shape = (BATCH * 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv_caches = [model.kernels.make_kv_cache(*shape) for _ in range(config.num_layers)]
    return ModelRunner(model, kv_caches, max_num_seqs=BATCH, max_model_len=32, block_size=BLOCK_SIZE, seed=0)


def drawn(runner: ModelRunner, sampling: SamplingParams, draft: list[int]) -> list[list[int]]:
    """What many requests sample behind the same prompt, each with the same guesses."""
    answers: list[list[int]] = []
    finished: list[str] = []
    for first in range(0, NUM_DRAWS, BATCH):
        names = [f"{sampling}{first + index}" for index in range(BATCH)]
        new = [
            NewRequest(
                request_id=name,
                token_ids=PROMPT,
                num_prompt_tokens=len(PROMPT),
                num_reported_tokens=len(PROMPT),
                sampling=sampling,
                stop_token_ids=(),
                block_ids=[2 * index, 2 * index + 1],
            )
            for index, name in enumerate(names)
        ]
        output = runner.execute(
            SchedulerOutput(
                step=first,
                new_requests=new,
                num_scheduled_tokens=dict.fromkeys(names, len(PROMPT) + len(draft)),
                num_computed_tokens=dict.fromkeys(names, 0),
                draft_token_ids={name: draft for name in names if draft},
                finished_request_ids=finished,
            )
        )
        finished = names
        answers += [output.sampled_token_ids[name] for name in names]
    runner.execute(SchedulerOutput(step=0, finished_request_ids=finished))
    return answers


def distribution(runner: ModelRunner, sampling: SamplingParams, output: list[int]) -> npt.NDArray[np.float64]:
    """The law of the next token, written down once more in plain numpy."""
    tokens = PROMPT + output
    batch = ForwardBatch(
        token_ids=torch.tensor(tokens),
        positions=torch.arange(len(tokens)),
        slot_mapping=torch.arange(len(tokens)),
        block_table=torch.tensor([[0, 1]], dtype=torch.int32),
        seq_lens=torch.tensor([len(tokens)], dtype=torch.int32),
        query_start_loc=torch.tensor([0, len(tokens)], dtype=torch.int32),
        kv_caches=runner.kv_caches,
        attention=runner.attention,
    )
    with torch.inference_mode():
        hidden = runner.forward(batch, captured=False)
        logits = runner.model.compute_logits(hidden[-1:])[0].double().numpy().copy()
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if sampling.allowed_token_ids:
        mask = np.full(logits.shape, -np.inf)
        mask[list(sampling.allowed_token_ids)] = 0
        logits += mask
    for token in set(tokens):
        logits[token] *= 1 / sampling.repetition_penalty if logits[token] > 0 else sampling.repetition_penalty
    for token, count in Counter(output).items():
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    order = np.argsort(-weights, kind="stable")
    keep = np.zeros(weights.shape, bool)
    num_kept = sampling.top_k or len(order)
    share = weights[order[:num_kept]].cumsum() / weights[order[:num_kept]].sum()
    num_kept = min(num_kept, int((share < sampling.top_p).sum()) + 1)
    keep[order[:num_kept]] = True
    keep &= weights >= sampling.min_p * weights.max()
    weights = np.where(keep, weights, 0.0)
    return weights / weights.sum()


def p_value(tokens: list[int], law: npt.NDArray[np.float64]) -> float:
    """Of a chi-square test; tokens expected less than ten times count as one. 0.0: one came that cannot."""
    counts = np.bincount(tokens, minlength=len(law))
    if counts[law == 0].any():
        return 0.0
    expected = law * len(tokens)
    common = expected >= 10
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) < 2:
        return 1.0
    return float(stats.chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue)


@pytest.mark.parametrize("setting", SETTINGS)
def test_drawn_tokens_keep_their_distribution(model: Model, setting: str):
    runner = make_runner(model)
    sampling = SamplingParams(**{"max_tokens": 4, "temperature": 1.0, **SETTINGS[setting]})
    first = distribution(runner, sampling, [])
    likely = int(first.argmax())
    second = distribution(runner, sampling, [likely])
    answers = drawn(runner, sampling, [likely, int(second.argmax())])
    assert p_value([tokens[0] for tokens in answers], first) > 1e-5
    went_on = [tokens[1] for tokens in answers if len(tokens) > 1]
    assert len(went_on) == sum(tokens[0] == likely for tokens in answers)
    assert p_value(went_on, second) > 1e-5
    assert drawn(runner, sampling, []) == [tokens[:1] for tokens in answers], "the same draws as without guesses"


def test_the_test_would_see_another_distribution(model: Model):
    runner = make_runner(model)
    sampling = SamplingParams(max_tokens=4, temperature=1.0)
    other = SamplingParams(max_tokens=4, temperature=0.8)
    tokens = [answer[0] for answer in drawn(runner, sampling, [])]
    assert p_value(tokens, distribution(runner, other, [])) < 1e-5
