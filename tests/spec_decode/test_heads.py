"""Heads on the default model: EAGLE and EAGLE-3, beside what their papers' code computes, written down plainly."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from kitfox import LLM, SamplingParams
from kitfox.errors import ConfigError, WeightsError
from kitfox.executor.draft_model import HeadDrafts
from kitfox.executor.executor import Executor
from kitfox.spec_decode.model_proposers import HeadProposer
from tests.spec_decode.heads import (
    LAYERS,
    SIZE,
    WORDS,
    Tensors,
    eagle3_states,
    eagle3_tensors,
    eagle_states,
    eagle_tensors,
    norm,
    repeating_tensors,
    write_head,
)

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
PROMPTS = ["A quick brown fox", "Once upon a time there was a", "ha ha ha ha ha ha ha ha ha ha ha ha ha"]


def make_llm(method: str, head: str, **options: Any) -> LLM:
    """With float32 throughout: what the plain code computes is compared with it."""
    settings = {"dtype": "float32", "max_model_len": 256, "num_blocks": 64, "adaptive": False, "num_draft_tokens": 3}
    return LLM(MODEL, speculation=method, options={"model": head, "min_probability": 0.0}, **{**settings, **options})


def plain_llm(**options: Any) -> LLM:
    return LLM(MODEL, **{"dtype": "float32", "max_model_len": 256, "num_blocks": 64, **options})


def greedy(llm: LLM, num_tokens: int = 24) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]


def proposer_of(llm: LLM) -> HeadProposer:
    speculator = llm._client.core.scheduler.speculator
    assert speculator is not None
    assert isinstance(speculator._proposer, HeadProposer)
    return speculator._proposer


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("heads")
    return {
        "eagle": write_head(folder / "eagle", eagle_tensors(), pickled=True),
        "eagle3": write_head(
            folder / "eagle3", eagle3_tensors(), draft_vocab_size=WORDS, architectures=["LlamaForCausalLMEagle3"]
        ),
    }


@pytest.mark.parametrize("cache", ["paged", "radix"])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_answers_are_those_of_plain_decoding(heads: dict[str, str], method: str, cache: str) -> None:
    llm = make_llm(method, heads[method], cache=cache, max_num_batched_tokens=16)
    answers = greedy(llm)
    assert llm.stats.speculation.num_draft_tokens > 0
    assert answers == greedy(plain_llm())
    assert answers == greedy(llm)  # from cached prefixes
    assert not proposer_of(llm)._texts
    assert not drafts_of(llm)._unread


def drafts_of(llm: LLM) -> HeadDrafts:
    drafts = proposer_of(llm)._head
    assert isinstance(drafts, HeadDrafts)
    return drafts


def test_answers_survive_preemption(heads: dict[str, str]) -> None:
    llm = make_llm("eagle3", heads["eagle3"], block_size=16, num_blocks=16, max_model_len=200)
    answers = greedy(llm, 150)
    assert llm._client.core.scheduler.num_preemptions > 0
    assert answers == greedy(plain_llm(), 150)


class Watched:
    """What the model and the head see of one request, and what the head proposes."""

    def __init__(self, llm: LLM):
        executor = llm._client.core.executor
        assert isinstance(executor, Executor)
        self.model = executor.model
        self.states: dict[int, Tensor] = {}  # by position
        self.proposals: list[tuple[list[int], list[int]]] = []  # tokens so far, and what was proposed
        listen, proposer = executor.runner.on_states, proposer_of(llm)
        propose = proposer.propose
        assert listen is not None

        def on_states(step: Any, states: Tensor) -> None:
            self.states |= dict(zip(step.positions.tolist(), states.clone(), strict=True))
            listen(step, states)

        def watched(limits: Any) -> Any:
            texts = {name: list(proposer._texts[name]) for name in limits}
            found = propose(limits)
            self.proposals += [(texts[name], proposal.token_ids) for name, proposal in found.items()]
            return found

        executor.runner.on_states = on_states
        proposer.propose = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("budget", [2048, 16])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_proposals_are_what_the_plain_code_guesses(heads: dict[str, str], method: str, budget: int) -> None:
    llm = make_llm(method, heads[method], max_num_batched_tokens=budget)
    watched = Watched(llm)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm.generate([PROMPTS[1] * 6], sampling, use_tqdm=False)
    model = watched.model
    assert len(watched.proposals) >= 2
    for text, proposed in watched.proposals:
        states = torch.stack([watched.states[position] for position in range(len(text) - 1)])
        assert proposed == guessed(model, method, text, states, len(proposed))


def guessed(model: Any, method: str, text: list[int], features: Tensor, count: int) -> list[int]:
    """The whole text anew for each guess."""
    tensors: Tensors = eagle_tensors() if method == "eagle" else eagle3_tensors()
    states = features if method == "eagle" else linear(features, tensors["fc.weight"])
    text = list(text)
    guesses: list[int] = []
    for _ in range(count):
        embedded = model.embed(torch.tensor(text[1:]))
        if method == "eagle":
            last = eagle_states(tensors, embedded, states)[-1:]
            guesses.append(int(model.compute_logits(last).argmax()))
        else:
            last = eagle3_states(tensors, embedded, states)[-1:]
            word = int(linear(norm(last, tensors["norm.weight"]), tensors["lm_head.weight"]).argmax())
            guesses.append(word + int(tensors["d2t"][word]))
        text.append(guesses[-1])
        states = torch.cat((states, last))
    return guesses


def test_a_head_that_is_right_saves_steps(tmp_path: Path) -> None:
    llm = make_llm("eagle", write_head(tmp_path, repeating_tensors()))
    watched = Watched(llm)
    answers = greedy(llm)
    assert answers == greedy(plain_llm())
    assert all(proposed == [text[-1]] * len(proposed) for text, proposed in watched.proposals)
    assert llm.stats.speculation.num_accepted_tokens >= 10  # the third prompt goes on as it began


@pytest.mark.parametrize("layers", [(0, 1, 29), (2, 15, 27)])
def test_features_are_what_layers_read_captured_or_not(tmp_path: Path, layers: tuple[int, ...]) -> None:
    head = write_head(
        tmp_path,
        eagle3_tensors(),
        draft_vocab_size=WORDS,
        eagle_config={"eagle_aux_hidden_state_layer_ids": list(layers)},
    )
    kept = []
    for eager in (False, True):
        llm = make_llm("eagle3", head, enforce_eager=eager)
        watched = Watched(llm)
        inputs: list[Tensor] = []
        if eager:
            for layer in layers:
                watched.model.layers[layer].register_forward_pre_hook(partial(note_input, inputs))
        llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        kept.append(torch.stack([watched.states[position] for position in sorted(watched.states)]))
        if eager:
            assert torch.equal(kept[-1], torch.cat(inputs, -1))
    assert torch.equal(*kept)
    assert kept[0].shape[1] == 3 * SIZE


def test_a_finished_request_leaves_the_head_s_part_of_its_prefix(heads: dict[str, str]) -> None:
    """The same prompt again, from the cache: the same proposals."""
    llm = make_llm("eagle", heads["eagle"])
    watched = Watched(llm)
    rounds = []
    for _ in range(2):
        sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        [output] = llm.generate([PROMPTS[1] * 12], sampling, use_tqdm=False)
        rounds.append(watched.proposals)
        watched.proposals = []
    assert output.num_cached_tokens is not None
    assert output.num_cached_tokens >= 48
    assert rounds[0] == rounds[1]


def test_sleep_takes_and_returns_the_head_s_layer(heads: dict[str, str]) -> None:
    llm = make_llm("eagle3", heads["eagle3"])
    answers = greedy(llm)
    core = llm._client.core
    assert core.sleep()
    core.wake_up()
    assert isinstance(core.executor, Executor)
    assert len(core.executor.runner.kv_caches) == LAYERS + 1
    assert greedy(llm) == answers


def note_input(inputs: list[Tensor], _layer: Any, arguments: tuple[Any, ...]) -> None:
    inputs.append(arguments[0].clone())


def without(name: str) -> Tensors:
    return {key: tensor for key, tensor in eagle3_tensors().items() if key != name}


@pytest.mark.parametrize(
    ("method", "tensors", "config", "message"),
    [
        ("eagle3", without("midlayer.hidden_norm.weight"), {}, "no tensor midlayer.hidden_norm.weight"),
        ("eagle3", without("d2t"), {}, "no tensor d2t"),
        ("eagle3", eagle3_tensors() | {"d2t": torch.full((WORDS,), 10**6)}, {}, "tokens that the model does not have"),
        ("eagle3", eagle3_tensors(), {"draft_vocab_size": 999}, r"lm_head.weight has shape \[1000, 576\]"),
        ("eagle", eagle3_tensors(), {}, r"fc.weight has shape \[576, 1728\], expected \[576, 1152\]"),
        ("eagle", eagle_tensors(), {"hidden_size": 512, "head_dim": 64}, "does not fit a model of 576"),
    ],
)
def test_heads_that_do_not_fit(
    tmp_path: Path, method: str, tensors: Tensors, config: dict[str, Any], message: str
) -> None:
    head = write_head(tmp_path, tensors, **{"draft_vocab_size": WORDS, **config})
    with pytest.raises(WeightsError, match=message):
        make_llm(method, head)


def test_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    layers = {"eagle_aux_hidden_state_layer_ids": [2, 15, 30]}
    head = write_head(tmp_path, eagle3_tensors(), draft_vocab_size=WORDS, eagle_config=layers)
    with pytest.raises(ConfigError, match=r"reads layers \(2, 15, 30\) of a model that has 30"):
        make_llm("eagle3", head)


def test_a_head_without_a_name() -> None:
    with pytest.raises(ConfigError, match="needs its name"):
        LLM(MODEL, speculation="eagle")


def test_a_damaged_file(tmp_path: Path) -> None:
    head = write_head(tmp_path, {}, pickled=True)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(WeightsError, match="damaged"):
        make_llm("eagle", head)
