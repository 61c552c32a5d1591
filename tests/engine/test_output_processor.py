"""What ends an answer in the front end, what a delta carries, and the times it reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitfox.engine.output_processor import OutputProcessor, RepetitionDetector
from kitfox.outputs import CompletionOutput, EngineOutput, TokenLogprobs
from kitfox.request import FinishReason, RepetitionDetection, SamplingParams
from tests.engine.fakes import make_core, request
from tests.test_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def feed(
    text: str, *, tokens_per_step: int = 1, ends: FinishReason | None = None, **sampling: object
) -> tuple[list[CompletionOutput], list[str]]:
    """Deltas of one answer that the engine generates as text, and the engine requests to abort; stops at the end."""
    params = SamplingParams(max_tokens=1000, **sampling)  # type: ignore[arg-type]
    processor = OutputProcessor(TOKENIZER)
    processor.add_request([request("r", [1, 2, 3])], params, None)
    tokens = ids(text)
    deltas: list[CompletionOutput] = []
    for start in range(0, len(tokens), tokens_per_step):
        new = tokens[start : start + tokens_per_step]
        last = start + tokens_per_step >= len(tokens)
        logprobs = [TokenLogprobs(token_id, -1.0, 1, [], []) for token_id in new]
        output = EngineOutput(
            request_id="r", new_token_ids=new, logprobs=logprobs, finish_reason=ends if last else None,
            prefill_time_s=0.5, num_cached_tokens=1,
        )  # fmt: skip
        news, to_abort = processor.process([output])
        deltas += [answer for request_output in news for answer in request_output.outputs]
        if to_abort or (news and news[-1].finished):
            return deltas, to_abort
    return deltas, []


def text_of(deltas: list[CompletionOutput]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
def test_a_pattern_ends_the_answer(tokens_per_step: int) -> None:
    deltas, to_abort = feed("count 7, 8, 42 and on", tokens_per_step=tokens_per_step, stop_regex=(r"\d\d",))
    assert text_of(deltas) == "count 7, 8, "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, r"\d\d")
    assert to_abort == ["r"]
    assert sum(len(delta.token_ids) for delta in deltas) == len("count 7, 8, 42")


def test_a_pattern_without_a_match_gives_everything_back() -> None:
    deltas, _ = feed("almost 4", ends=FinishReason.LENGTH, stop_regex=(r"\d\d",))
    assert text_of(deltas) == "almost 4"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_repetition_ends_the_answer(tokens_per_step: int) -> None:
    detection = RepetitionDetection(max_pattern_size=4, min_count=3)
    deltas, to_abort = feed("so: abababab", tokens_per_step=tokens_per_step, repetition_detection=detection)
    assert text_of(deltas) == "so: ababab"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.REPETITION, "repetition_detected")
    assert to_abort == ["r"]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 50])
@pytest.mark.parametrize(
    ("text", "stop", "shown", "matched"),
    [
        ("alpha beta gamma delta", ("beta gamma",), "alpha ", "beta gamma"),
        ("Hello\nUser: hi", ("\nUser:",), "Hello", "\nUser:"),
        ("Thought: x\nObservation: y", ("Observation",), "Thought: x\n", "Observation"),
        ("Observe the Obs", ("Observation",), "Observe the Obs", None),
        ("It is Paris.", ("Pari",), "It is ", "Pari"),
        ("so k=1 was", ("k=1 was", "1"), "so k=", "1"),
        ("so k=1 was", ("1", "k=1 was"), "so k=", "1"),
        ("a 🦊 b", ("🦊 b",), "a ", "🦊 b"),
        ("日本語🦊", ("本語",), "日", "本語"),
    ],
)
def test_stop_texts_end_an_answer_wherever_tokens_do(
    text: str, stop: tuple[str, ...], shown: str, matched: str | None, tokens_per_step: int
) -> None:
    deltas, _ = feed(text, tokens_per_step=tokens_per_step, ends=FinishReason.LENGTH, stop=stop)
    assert text_of(deltas) == shown
    assert deltas[-1].stop_reason == matched
    assert deltas[-1].finish_reason is (FinishReason.LENGTH if matched is None else FinishReason.STOP)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    if matched is not None:
        assert sum(len(delta.token_ids) for delta in deltas) == len(ids(text[: text.index(matched) + len(matched)]))


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_character_that_the_end_cuts_is_shown_once(stop: tuple[str, ...], tokens_per_step: int) -> None:
    whole = "né 日本 🦊🦊"
    for length in range(1, len(whole.encode()) + 1):
        processor = OutputProcessor(TOKENIZER)
        params = SamplingParams(max_tokens=length, stop=stop)
        processor.add_request([request("r", [1, 2, 3])], params, None)
        tokens = ids(whole)[:length]
        text = ""
        for start in range(0, length, tokens_per_step):
            new = tokens[start : start + tokens_per_step]
            reason = FinishReason.LENGTH if start + tokens_per_step >= length else None
            news, _ = processor.process([EngineOutput(request_id="r", new_token_ids=new, finish_reason=reason)])
            text += text_of(news[0].outputs)
        assert text == whole.encode()[:length].decode("utf-8", "replace")


def test_special_tokens_that_a_parser_reads_stay_in_the_text() -> None:
    tokenizer = byte_tokenizer("<call>", "<end>")
    processor = OutputProcessor(tokenizer)
    call_id = tokenizer.special_token_id("<call>")
    assert call_id is not None
    params = SamplingParams(max_tokens=1000, kept_special_ids=(call_id,))
    processor.add_request([request("r", [1, 2, 3])], params, None)
    ids_of_answer = tokenizer.encode("a<call>b<end>c", add_special_tokens=False)
    news, _ = processor.process([EngineOutput(request_id="r", new_token_ids=ids_of_answer)])
    assert text_of(news[0].outputs) == "a<call>bc"


def test_no_repetition_before_min_tokens() -> None:
    detection = RepetitionDetection(max_pattern_size=1, min_count=3)
    deltas, _ = feed("aaaaaaaa", repetition_detection=detection, min_tokens=5)
    assert text_of(deltas) == "aaaaaa"


@given(
    tokens=st.lists(st.integers(0, 2), max_size=60),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    min_count=st.integers(2, 4),
)
def test_repetition_is_what_its_definition_says(tokens: list[int], sizes: list[int], min_count: int) -> None:
    wanted = RepetitionDetection(min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=min_count)
    detector = RepetitionDetector(wanted)
    for end, token_id in enumerate(tokens, 1):
        seen = tokens[:end]
        repeats = any(
            end >= size * min_count and seen[-size * min_count :] == seen[-size:] * min_count
            for size in range(sizes[0], sizes[1] + 1)
        )
        assert detector.add(token_id) == repeats


def test_a_stream_interval_joins_deltas_but_delays_neither_the_first_nor_the_last() -> None:
    deltas, _ = feed("abcdefgh", ends=FinishReason.LENGTH, stream_interval=3, logprobs=0)
    assert [delta.text for delta in deltas] == ["a", "bcd", "efg", "h"]
    assert [len(delta.logprobs or []) for delta in deltas] == [1, 3, 3, 1]
    assert [len(delta.token_ids) for delta in deltas] == [1, 3, 3, 1]
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_timings_have_rates() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add_request([request("r", [1, 2, 3])], SamplingParams(max_tokens=4), None)
    output = EngineOutput(
        request_id="r", new_token_ids=ids("abc"), finish_reason=FinishReason.LENGTH, num_cached_tokens=1,
        prefill_time_s=-1e9,
    )  # fmt: skip
    timings = processor.process([output])[0][0].timings
    assert timings is not None
    assert timings.prefill_tokens_per_s is None
    assert timings.decode_tokens_per_s == pytest.approx(2 / timings.decode_s)
    assert timings.decode_s == pytest.approx(1e9, rel=1e-3)
    processor.add_request([request("r", [1, 2, 3])], SamplingParams(max_tokens=1), None)
    output = EngineOutput(
        request_id="r", new_token_ids=ids("a"), finish_reason=FinishReason.LENGTH, num_cached_tokens=1,
        prefill_time_s=0.5,
    )  # fmt: skip
    timings = processor.process([output])[0][0].timings
    assert timings is not None
    assert timings.prefill_tokens_per_s == 4.0
    assert timings.decode_tokens_per_s is None


def test_what_ends_an_answer_survives_preemption() -> None:
    """The pool is too small for all: some are preempted, and every answer still ends where it would alone."""
    detection = RepetitionDetection(max_pattern_size=3, min_count=3)
    params = SamplingParams(max_tokens=30, repetition_detection=detection)

    def counts_then_repeats(_: str, tokens: list[int]) -> int:
        return len(tokens) if len(tokens) < 18 else 7

    def run(names: list[str], num_blocks: int) -> tuple[dict[str, list[int]], int]:
        core = make_core(cache="none", num_blocks=num_blocks, next_token=counts_then_repeats)
        processor = OutputProcessor(TOKENIZER)
        answers: dict[str, list[int]] = {name: [] for name in names}
        for name in names:
            made = request(name, [5, 6, 7, 8], max_tokens=30)
            processor.add_request([made], params, None)
            core.add_request(made)
        for _ in range(500):
            if not core.has_work:
                break
            news, to_abort = processor.process(core.step().outputs)
            core.abort(to_abort)
            for output in news:
                answers[output.request_id] += output.outputs[0].token_ids
        assert not core.has_work
        return answers, core.scheduler.num_preemptions

    names = ["a", "b", "c", "d"]
    crowded, num_preemptions = run(names, num_blocks=9)
    assert num_preemptions > 0
    alone, _ = run(["a"], num_blocks=50)
    assert crowded == dict.fromkeys(names, alone["a"])
    assert alone["a"][-3:] == [7, 7, 7]
