"""Grammars beside the steps: the worker process, its limits, the cache, masks and forced tokens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from kitfox.config import StructuredOutputConfig
from kitfox.constraint import Constraint, Format, JsonSchema, Reasoning, Regex, choice
from kitfox.structured_output import manager as module
from kitfox.structured_output.answer import AnswerGrammar
from kitfox.structured_output.manager import GrammarManager, ToFill
from kitfox.structured_output.worker import LARGE_FORMAT_BYTES
from tests.structured_output.vocabularies import OTHER_ID, TOOL_ID, VOCABULARY

SLOW = Regex(pattern="((a{0,300}){0,300}b){0,300}")  # small to write, large to compile
LARGE = JsonSchema(schema={"const": "a" * LARGE_FORMAT_BYTES})
NOTHING: frozenset[int] = frozenset()


@pytest.fixture
def manager() -> Iterator[GrammarManager]:
    made = GrammarManager(StructuredOutputConfig(), VOCABULARY, max_num_seqs=4)
    yield made
    made.shutdown()


def decide(manager: GrammarManager, *formats: Format, reasoning: Reasoning | None = None) -> list[str]:
    """What came of some requests, named by their numbers: "" or the problem."""
    for index, format in enumerate(formats):
        manager.request(str(index), Constraint(format=format, reasoning=reasoning))
    decisions: dict[str, str] = {}
    while len(decisions) < len(formats):
        manager.wait()
        decisions |= dict(manager.decided())
    return [decisions[str(index)] for index in range(len(formats))]


def answer_of(manager: GrammarManager, request_id: str = "0") -> AnswerGrammar:
    answer = manager.answer(request_id)
    assert answer is not None
    return answer


def ids(text: str) -> list[int]:
    return list(text.encode())


def allowed(manager: GrammarManager, draft: str = "", *, ends: frozenset[int] = NOTHING) -> list[str] | None:
    """The characters that the masks of request "0" allow at each place; None where there are no masks."""
    answer = answer_of(manager)
    rows = manager.fill([ToFill("0", answer, ends, ids(draft), jumps=False)]).rows().get("0")
    if rows is None:
        return None
    bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
    return ["".join(chr(token) for token in np.flatnonzero(row) if token < 128) for row in bits]


class TestCompiling:
    def test_one_grammar_for_all_that_ask_for_the_same(self, manager: GrammarManager) -> None:
        assert decide(manager, choice(["a"]), choice(["a"]), choice(["b"])) == ["", "", ""]
        assert (manager.stats.num_compiled, manager.stats.num_cache_hits) == (2, 1)

    def test_each_answer_goes_its_own_way(self, manager: GrammarManager) -> None:
        decide(manager, choice(["ab", "cd"]), choice(["ab", "cd"]))
        first, second = answer_of(manager, "0"), answer_of(manager, "1")
        assert first.accept(ord("a"))
        assert second.accept(ord("c"))
        assert not second.accept(ord("b"))

    def test_a_refusal_says_why_and_is_remembered(self, manager: GrammarManager) -> None:
        first, second = decide(manager, Regex(pattern="(?<=a)b"), Regex(pattern="(?<=a)b"))
        assert first == second != ""
        assert (manager.stats.num_refused, manager.stats.num_cache_hits) == (1, 1)

    def test_a_deadline_costs_one_request_and_no_other(self) -> None:
        manager = GrammarManager(StructuredOutputConfig(compile_timeout_s=0.5), VOCABULARY, max_num_seqs=4)
        try:
            slow, quick = decide(manager, SLOW, choice(["a"]))
            assert slow == "" or "longer than 0.5 s" in slow or "takes too much" in slow or "too " in slow
            assert quick == ""
            assert decide(manager, choice(["b"])) == [""]
        finally:
            manager.shutdown()

    @pytest.mark.skipif(sys.platform != "linux", reason="priorities and cores are Linux's")
    def test_large_formats_have_workers_of_their_own_that_give_way_more(self, manager: GrammarManager) -> None:
        assert decide(manager, choice(["a"]), LARGE) == ["", ""]
        [small, *_], [large] = manager._compilers.workers, manager._large_compilers.workers
        assert small._process is not None
        assert large._process is not None
        all_cores = os.sched_getaffinity(0)
        assert os.sched_getaffinity(small._process.pid) == all_cores
        assert len(os.sched_getaffinity(large._process.pid)) == (len(all_cores) + 1) // 2
        assert os.sched_getscheduler(small._process.pid) == os.SCHED_OTHER
        assert os.sched_getscheduler(large._process.pid) == os.SCHED_IDLE
        assert os.sched_getaffinity(0) == all_cores, "who asks keeps all"

    def test_a_large_format_has_a_deadline_of_processor_time(self) -> None:
        large = Regex(pattern=f"{SLOW.pattern}{'a' * LARGE_FORMAT_BYTES}")
        manager = GrammarManager(StructuredOutputConfig(compile_timeout_s=0.002), VOCABULARY, max_num_seqs=4)
        try:
            [problem] = decide(manager, large)
            assert "longer than 0.002 s to compile (--grammar-timeout)" in problem
        finally:
            manager.shutdown()

    def test_a_worker_that_dies_is_replaced(self, manager: GrammarManager) -> None:
        assert decide(manager, choice(["a"])) == [""]
        for child in psutil.Process(os.getpid()).children():
            if any("kitfox.structured_output.worker" in word for word in child.cmdline()):
                child.kill()
                child.wait(5)
        assert decide(manager, choice(["b"]), choice(["c"])) == ["", ""]

    def test_what_took_too_long_is_tried_again_some_time_later(
        self, manager: GrammarManager, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = b"key"
        manager._limit_reached_at_s[key] = time.monotonic()
        assert not manager._is_worth_another_try(key)
        monkeypatch.setattr(module, "RETRY_AFTER_S", 0.0)
        time.sleep(0.001)
        assert manager._is_worth_another_try(key)

    def test_a_shutdown_leaves_no_process(self) -> None:
        manager = GrammarManager(StructuredOutputConfig(), VOCABULARY, max_num_seqs=4)
        decide(manager, choice(["a"]), LARGE)
        workers = [*manager._compilers.workers, *manager._large_compilers.workers]
        processes = [worker._process for worker in workers]
        assert len(processes) >= 2
        manager.shutdown()
        assert all(process is None or process.poll() is not None for process in processes)

    def test_a_forgotten_request_is_never_decided(self, manager: GrammarManager) -> None:
        manager.request("gone", Constraint(format=choice(["a"])))
        manager.forget("gone")
        assert decide(manager, choice(["b"])) == [""]
        assert manager.answer("gone") is None


class TestMasks:
    def test_what_may_come_and_where_it_may_end(self, manager: GrammarManager) -> None:
        decide(manager, Regex(pattern="ab?"))
        answer = answer_of(manager)
        end = frozenset({ord("!")})
        assert allowed(manager, ends=end) == ["a"]
        assert answer.accept(ord("a"))
        assert allowed(manager, ends=end) == ["!b"]
        assert (answer.may_end, answer.must_end) == (True, False)
        assert answer.accept(ord("b"))
        assert answer.must_end

    def test_a_mask_behind_each_draft_as_far_as_it_is_allowed(self, manager: GrammarManager) -> None:
        decide(manager, Regex(pattern="[ab][cd][ef]"))
        assert allowed(manager, "ac") == ["ab", "cd", "ef"]
        assert allowed(manager, "ax") == ["ab", "cd", ""]
        assert allowed(manager) == ["ab"], "the answer has not moved"

    def test_no_mask_where_all_is_allowed(self, manager: GrammarManager) -> None:
        decide(manager, choice(["a"]), reasoning=Reasoning(opener="<t>", closer="</t>", is_open=True))
        assert allowed(manager) is None
        masks = allowed(manager, ends=frozenset({ord("!")}))
        assert masks is not None
        assert "!" not in masks[0], "reasoning may not end the answer"


class TestReasoning:
    @pytest.mark.parametrize("pieces", [["</t>"], ["<", "/", "t", ">"], ["a < b </t", ">"]])
    def test_the_grammar_begins_behind_the_closer(self, manager: GrammarManager, pieces: list[str]) -> None:
        decide(manager, choice(["no"]), reasoning=Reasoning(opener="<t>", closer="</t>", is_open=True))
        answer = answer_of(manager)
        for piece in pieces:
            assert not answer.may_end
            for token in ids(piece):
                assert answer.accept(token)
        assert allowed(manager) == ["n"]
        assert not answer.may_end

    def test_enough_reasoning_is_closed(self, manager: GrammarManager) -> None:
        reasoning = Reasoning(opener="<|tool|>", closer="<|other|>", max_tokens=2)
        decide(manager, choice(["no"]), reasoning=reasoning)
        answer = answer_of(manager)
        assert answer.accept(TOOL_ID), "it may think, or not"
        assert allowed(manager, "ab", ends=frozenset({ord("!")})) is not None
        assert answer.accept(ord("a"))
        fork = answer.fork()
        assert answer.accept(ord("b"))
        assert allowed(manager) == [""], "only a special token may come"
        assert not answer.may_end
        assert not answer.fork().accept(ord("c"))
        assert answer.accept(OTHER_ID)
        assert allowed(manager) == ["n"]
        assert fork.accept(OTHER_ID), "it may close sooner"
        assert fork.accept(ord("n"))

    def test_forks_go_their_own_way(self, manager: GrammarManager) -> None:
        decide(manager, choice(["no"]), reasoning=Reasoning(opener="<t>", closer="</t>", is_open=True))
        answer = answer_of(manager)
        fork = answer.fork()
        assert all(fork.accept(token) for token in ids("</t>n"))
        assert answer.accept(ord("x")), "still reasoning"
        assert not fork.accept(ord("x"))


def test_without_a_tokenizer_nobody_knows_how_forced_text_is_cut(manager: GrammarManager) -> None:
    decide(manager, JsonSchema(schema={"const": {"key": 1}}, max_whitespace=0))
    assert manager.forced_token_ids(answer_of(manager), 0, 10) == []
