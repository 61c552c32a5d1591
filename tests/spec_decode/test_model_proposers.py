from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kitfox.errors import ConfigError
from kitfox.spec_decode.model_proposers import MIN_PROBABILITY
from kitfox.spec_decode.proposer import Proposal
from kitfox.spec_decode.proposers import check_options
from tests.spec_decode.fakes import BLOCK_SIZE, FakeDraftModel, SelfInEngine, draft_proposer

VOCAB = 50


@pytest.fixture
def model() -> FakeDraftModel:
    return FakeDraftModel(VOCAB)


def expected(model: FakeDraftModel, text: list[int], limit: int) -> Proposal:
    return Proposal(*model.continuation(text, limit, MIN_PROBABILITY))


def text_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


class TestDraft:
    def test_guesses_are_what_the_model_says(self, model: FakeDraftModel) -> None:
        proposer, _ = draft_proposer(model)
        texts = {str(seed): text_of(seed, 5 + 7 * seed) for seed in range(9)}
        for name, text in texts.items():
            proposer.start(name, text, num_prompt_tokens=len(text))
        limits = {name: 1 + int(name) for name in texts}
        assert proposer.propose(limits) == {name: expected(model, texts[name], limits[name]) for name in texts}

    def test_accepted_guesses_are_not_computed_again(self, model: FakeDraftModel) -> None:
        proposer, _ = draft_proposer(model)
        text = text_of(1, 20)
        proposer.start("a", text, num_prompt_tokens=20)
        guess = proposer.propose({"a": 3})["a"].token_ids
        assert len(guess) == 3
        proposer.extend("a", [*guess, 7])
        model.num_tokens.clear()
        assert proposer.propose({"a": 3})["a"] == expected(model, [*text, *guess, 7], 3)
        assert model.num_tokens[0] == 2  # the last guess, which nobody fed to the model, and the token behind it

    def test_rejected_guesses_are_computed_anew_from_the_first(self, model: FakeDraftModel) -> None:
        proposer, _ = draft_proposer(model)
        text = text_of(1, 20)
        proposer.start("a", text, num_prompt_tokens=20)
        guess = proposer.propose({"a": 3})["a"].token_ids
        other = (guess[1] + 1) % VOCAB
        proposer.extend("a", [guess[0], other])
        model.num_tokens.clear()
        assert proposer.propose({"a": 3})["a"] == expected(model, [*text, guess[0], other], 3)
        assert model.num_tokens[0] == 1

    def test_a_prompt_is_computed_in_chunks_beside_the_others(self, model: FakeDraftModel) -> None:
        proposer, _ = draft_proposer(model, chunk_tokens=16)
        short, long = text_of(1, 10), text_of(2, 50)
        proposer.start("short", short, num_prompt_tokens=10)
        proposer.propose({"short": 2})
        proposer.start("long", long, num_prompt_tokens=50)
        for _ in range(3):
            model.num_tokens.clear()
            assert proposer.propose({"short": 2, "long": 2}) == {"short": expected(model, short, 2)}
            assert model.num_tokens[0] == 16
        assert proposer.propose({"short": 2, "long": 2}) == {
            "short": expected(model, short, 2),
            "long": expected(model, long, 2),
        }

    def test_a_full_pool_means_no_guesses_and_no_blocks(self, model: FakeDraftModel) -> None:
        proposer, kv_cache = draft_proposer(model, num_blocks=8)
        first, second = text_of(1, 20), text_of(2, 20)
        proposer.start("first", first, num_prompt_tokens=20)
        proposer.start("second", second, num_prompt_tokens=20)
        assert proposer.propose({"first": 4, "second": 4}) == {"first": expected(model, first, 4)}
        assert kv_cache.block_ids("second") == []
        proposer.finish("first", keep=True)
        assert proposer.propose({"second": 4}) == {"second": expected(model, second, 4)}
        proposer.finish("second", keep=False)
        assert kv_cache.num_free_blocks == 8

    def test_a_known_prompt_is_found_under_the_same_salt_only(self, model: FakeDraftModel) -> None:
        proposer, _ = draft_proposer(model)
        text = text_of(1, 41)
        for name, salt, num_computed in (("a", "one", 41), ("b", "one", 1), ("c", "two", 41)):
            proposer.start(name, text, num_prompt_tokens=41, salt=salt)
            model.num_tokens.clear()
            assert proposer.propose({name: 3}) == {name: expected(model, text, 3)}
            assert model.num_tokens[0] == num_computed
            proposer.finish(name, keep=True)

    def test_nothing_beyond_the_models_context(self, model: FakeDraftModel) -> None:
        proposer, _ = draft_proposer(model, max_model_len=20)
        text = text_of(1, 19)
        proposer.start("a", text, num_prompt_tokens=19)
        assert proposer.propose({"a": 9}) == {"a": expected(model, text, 2)}
        proposer.extend("a", [1, 2])
        assert proposer.propose({"a": 9}) == {}

    def test_tokens_that_the_other_model_lacks_are_no_guesses(self, model: FakeDraftModel) -> None:
        proposer, _ = draft_proposer(model)
        proposer._vocab_size = 0
        proposer.start("a", [1, 2, 3], num_prompt_tokens=3)
        assert proposer.propose({"a": 4}) == {}

    def test_a_broken_model_says_nothing(self, model: FakeDraftModel) -> None:
        model.broken = True
        proposer, _ = draft_proposer(model)
        proposer.start("a", [1, 2, 3], num_prompt_tokens=3)
        assert proposer.propose({"a": 4}) == {}

    def test_any_order_of_events_in_a_small_pool(self) -> None:
        class Events(RuleBasedStateMachine):
            """Every guess is that of the model for the request's own tokens, and no block is lost."""

            def __init__(self) -> None:
                super().__init__()
                self.model = FakeDraftModel(VOCAB)
                self.proposer, self.kv_cache = draft_proposer(self.model, num_blocks=20, chunk_tokens=9)
                self.texts: dict[str, list[int]] = {}
                self.guesses: dict[str, list[int]] = {}
                self.num_started = 0

            @rule(seed=st.integers(0, 2), length=st.integers(1, 40), salt=st.sampled_from([None, "one"]))
            def start(self, seed: int, length: int, salt: str | None) -> None:
                name = str(self.num_started)
                self.num_started += 1
                self.texts[name] = text_of(seed, length)
                self.proposer.start(name, self.texts[name], num_prompt_tokens=length, salt=salt)

            @precondition(lambda self: self.texts)
            @rule(data=st.data(), limit=st.integers(1, 6))
            def propose(self, data: st.DataObject, limit: int) -> None:
                names = data.draw(st.sets(st.sampled_from(list(self.texts)), min_size=1))
                proposals = self.proposer.propose(dict.fromkeys(sorted(names), limit))
                for name, proposal in proposals.items():
                    assert proposal == expected(self.model, self.texts[name], limit)
                    self.guesses[name] = proposal.token_ids

            @precondition(lambda self: self.guesses)
            @rule(data=st.data(), wrong=st.booleans())
            def go_on(self, data: st.DataObject, wrong: bool) -> None:
                name = data.draw(st.sampled_from(list(self.guesses)))
                guess = self.guesses.pop(name)
                kept = guess[: data.draw(st.integers(0, len(guess)))]
                tokens = [*kept, 3] if wrong else kept
                self.texts[name] = [*self.texts[name], *tokens]
                self.proposer.extend(name, tokens)

            @precondition(lambda self: self.texts)
            @rule(data=st.data(), keep=st.booleans(), comes_back=st.booleans())
            def stop(self, data: st.DataObject, keep: bool, comes_back: bool) -> None:
                name = data.draw(st.sampled_from(list(self.texts)))
                text = self.texts.pop(name)
                self.guesses.pop(name, None)
                self.proposer.finish(name, keep=keep)
                if comes_back:
                    self.texts[name] = text
                    self.proposer.start(name, text, num_prompt_tokens=1)

            @invariant()
            def no_block_is_lost(self) -> None:
                self.kv_cache.check_integrity()

            def teardown(self) -> None:
                for name in self.texts:
                    self.proposer.finish(name, keep=False)
                assert self.kv_cache.num_free_blocks == 20

        run_state_machine_as_test(Events, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


class TestSelf:
    def test_guesses_are_what_the_layers_say(self, model: FakeDraftModel) -> None:
        proposer = SelfInEngine(model)
        texts = {str(seed): text_of(seed, 5 + 7 * seed) for seed in range(4)}
        for name, text in texts.items():
            proposer.start(name, text, num_prompt_tokens=len(text))
        for _ in range(3):
            proposals = proposer.propose(dict.fromkeys(texts, 5))
            assert proposals == {name: expected(model, text, 5) for name, text in texts.items()}
            for name, text in texts.items():
                tokens = [*proposals[name].token_ids[:2], 3]
                proposer.extend(name, tokens)
                text += tokens

    def test_no_further_than_the_blocks_at_hand(self, model: FakeDraftModel) -> None:
        proposer = SelfInEngine(model, num_spare_blocks=0)
        for length in range(BLOCK_SIZE, 3 * BLOCK_SIZE):
            text = text_of(length, length)
            proposer.start("a", text, num_prompt_tokens=length)
            room = -length % BLOCK_SIZE
            assert proposer.propose({"a": 9})["a"] == expected(model, text, room + 1)

    def test_a_request_without_a_slot_for_its_last_token_has_none(self, model: FakeDraftModel) -> None:
        proposer = SelfInEngine(model)
        proposer.start("a", text_of(1, 2 * BLOCK_SIZE + 1), num_prompt_tokens=3)
        proposer.computed_tokens = lambda name: (2 * BLOCK_SIZE, [0, 1])
        proposer._computed = proposer.computed_tokens
        assert proposer.propose({"a": 4}) == {}

    def test_one_that_lost_its_kv_waits_until_it_has_it_again(self, model: FakeDraftModel) -> None:
        proposer = SelfInEngine(model, chunk_tokens=8)
        text = text_of(1, 30)
        proposer.start("a", text, num_prompt_tokens=3)
        proposer.num_lost = 8
        assert proposer.propose({"a": 4}) == {}
        proposer.num_lost = 7
        assert proposer.propose({"a": 4}) == {"a": expected(model, text, 4)}


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("draft", {}, "needs its name"),
        ("draft", {"model": "m", "memory_bytes": 0}, "memory_bytes of a draft model must be >= 1. Given: 0"),
        ("draft", {"model": "m", "max_model_len": 0}, "must be >= 1. Given: 0"),
        ("draft", {"model": "m", "chunk_tokens": 0}, "chunk_tokens of a draft model must be >= 1"),
        ("draft", {"model": "m", "min_probability": 1.5}, r"must be in \[0, 1\]. Given: 1.5"),
        ("self", {"num_layers": 0}, "must be >= 1. Given: 0"),
        ("self", {"min_probability": -0.1}, r"must be in \[0, 1\]. Given: -0.1"),
    ],
)
def test_options_out_of_range(method: str, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_options(method, options)


def test_options_of_another_method() -> None:
    with pytest.raises(TypeError):
        check_options("self", {"model": "m"})
