"""Token ids become text: detokenising, stop strings, logprobs, and the n answers of one prompt brought together."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kitfox.engine.stop_regex import StopAutomaton, StopRegexes
from kitfox.errors import InvalidGrammarError, KitfoxError
from kitfox.outputs import (
    CompletionOutput,
    EngineOutput,
    RequestOutput,
    RequestTimings,
    TokenLogprobs,
)
from kitfox.request import EngineRequest, FinishReason, RepetitionDetection, SamplingParams
from kitfox.tokenizer import IncrementalDetokenizer, Tokenizer


class StopStrings:
    """Finds stop strings in a growing text and holds back what could still become one.

    The match that is complete first wins (of those complete at the same character, the longest), so the cut depends on
    the text alone: not on the order of the list, nor on how the text was split into chunks.
    """

    def __init__(self, stops: tuple[str, ...], *, include_in_output: bool):
        self._stops = stops
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """Take new text, return what may be shown. After a match `matched` is set and nothing more comes out."""
        if not self._stops:
            return text
        text = self._held + text
        if may_stop:
            matches = [(text.find(stop), stop) for stop in self._stops]
            found = [(start + len(stop), start, stop) for start, stop in matches if start >= 0]
            if found:
                end, start, self.matched = min(found)
                self._held = ""
                return text[: end if self._include else start]
        num_held = 0 if not may_stop else max(self._overlap(text, stop) for stop in self._stops)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The held-back text, when nothing more will come."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of text that is a proper beginning of stop."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0


class StopTexts:
    """Stop strings, and patterns in what they let through."""

    def __init__(self, strings: StopStrings, regexes: StopRegexes):
        self._strings = strings
        self._regexes = regexes

    @property
    def matched(self) -> str | None:
        return self._strings.matched if self._regexes.matched is None else self._regexes.matched

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """As `StopStrings.add`."""
        shown = self._regexes.add(self._strings.add(text, may_stop=may_stop), may_stop=may_stop)
        return shown if self._strings.matched is None else shown + self._regexes.flush()

    def flush(self) -> str:
        """The held-back text, when nothing more will come; it may still hold a match of a pattern."""
        return self._regexes.add(self._strings.flush()) + self._regexes.flush()


class RepetitionDetector:
    """Whether an answer's last tokens repeat one pattern. A token costs a comparison for each size of a pattern."""

    def __init__(self, wanted: RepetitionDetection):
        self._first_size = wanted.min_pattern_size
        self._min_count = wanted.min_count
        self._max_size = wanted.max_pattern_size
        self._recent: list[int] = []
        # For each size: how many of the last tokens in a row equal the one that far before them.
        self._runs = [0] * (wanted.max_pattern_size - wanted.min_pattern_size + 1)

    def add(self, token_id: int) -> bool:
        """Take the next token; returns whether the pattern is complete."""
        recent = self._recent
        found = False
        for position, run in enumerate(self._runs):
            size = self._first_size + position
            run = run + 1 if size <= len(recent) and recent[-size] == token_id else 0
            self._runs[position] = run
            found = found or run >= size * (self._min_count - 1)
        recent.append(token_id)
        if len(recent) > 2 * self._max_size:
            del recent[: -self._max_size]
        return found


@dataclass
class _Answer:
    """One of the n answers while it grows.

    Attributes:
        waiting: what stream_interval keeps back; None before anything was sent.
    """

    index: int
    detokenizer: IncrementalDetokenizer
    stops: StopStrings | StopTexts
    repetition: RepetitionDetector | None
    num_tokens: int = 0
    finished: bool = False
    waiting: CompletionOutput | None = None


@dataclass
class _RequestState:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling: SamplingParams
    answers: dict[str, _Answer]
    arrival_time_s: float
    num_cached_tokens: int | None = None
    num_unfinished: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    timings: RequestTimings = field(default_factory=RequestTimings)
    error: str | None = None
    param: str = ""


class OutputProcessor:
    """State of every request that has not been answered in full. The one place that loops over a step's outputs."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._states: dict[str, _RequestState] = {}  # by request id
        self._owner: dict[str, str] = {}  # engine request id (ID, ID#1, ...) -> request id

    @property
    def num_unfinished(self) -> int:
        """Answers still being generated or waiting for it."""
        return len(self._owner)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def add_request(self, requests: list[EngineRequest], sampling: SamplingParams, prompt: str | None) -> None:
        """Open the state for the n engine requests of one prompt."""
        first = requests[0]
        automaton = StopAutomaton(sampling.stop_regex) if sampling.stop_regex else None
        detection = sampling.repetition_detection
        answers = {
            request.request_id: _Answer(
                index,
                IncrementalDetokenizer(
                    self._tokenizer,
                    request.prompt_token_ids,
                    skip_special_tokens=sampling.skip_special_tokens,
                    kept_special_ids=sampling.kept_special_ids,
                ),
                _make_stops(sampling, automaton),
                None if detection is None else RepetitionDetector(detection),
            )
            for index, request in enumerate(requests)
        }
        state = _RequestState(first.request_id, prompt, first.prompt_token_ids, sampling, answers, first.arrival_time_s)
        state.num_unfinished = len(requests)
        if sampling.prompt_logprobs is not None:
            state.prompt_logprobs.append(None)  # nothing precedes the first token
        self._states[first.request_id] = state
        self._owner.update(dict.fromkeys(answers, first.request_id))

    def abort(self, request_id: str) -> list[str]:
        """Forget a request; returns the engine request ids that are still running."""
        state = self._states.pop(request_id, None)
        if state is None:
            return []
        unfinished = [engine_id for engine_id, answer in state.answers.items() if not answer.finished]
        for engine_id in unfinished:
            del self._owner[engine_id]
        return unfinished

    def engine_request_ids(self, request_id: str) -> list[str]:
        """Of its n answers, those that are not finished; empty for an unknown id."""
        state = self._states.get(request_id)
        answers = {} if state is None else state.answers
        return [engine_id for engine_id, answer in answers.items() if not answer.finished]

    def unfinished_request_ids(self) -> list[str]:
        return list(self._states)

    def process(self, outputs: list[EngineOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Turn a step's news into text.

        Returns:
            Deltas, one a request with news; and the engine request ids that ended here, by a stop string and the like,
            for the core to abort.
        """
        news: dict[str, RequestOutput] = {}
        to_abort: list[str] = []
        for output in outputs:
            request_id = self._owner.get(output.request_id)
            if request_id is None:  # aborted, its news was under way
                continue
            state = self._states[request_id]
            answer = state.answers[output.request_id]
            delta = self._advance(state, answer, output)
            if answer.finished and output.finish_reason is None:
                to_abort.append(output.request_id)
            if state.sampling.stream_interval > 1 and not self._is_due(state.sampling, answer, delta):
                continue
            if request_id not in news:
                news[request_id] = RequestOutput(
                    request_id=request_id, prompt=state.prompt, prompt_token_ids=state.prompt_token_ids, outputs=[]
                )
            news[request_id].outputs.append(delta)
            news[request_id].embedding = output.embedding
            if answer.finished:
                self._close(state, answer, output)
        for request_id, request_output in news.items():
            self._complete(self._states[request_id], request_output)
        return list(news.values()), to_abort

    def _advance(self, state: _RequestState, answer: _Answer, output: EngineOutput) -> CompletionOutput:
        """Take one answer's new tokens one by one: the token that completes a stop string is the last."""
        if state.num_cached_tokens is None:
            state.num_cached_tokens = output.num_cached_tokens
        state.prompt_logprobs.extend(output.prompt_logprobs)
        sampling = state.sampling
        delta = CompletionOutput(index=answer.index, num_preemptions=output.num_preemptions)
        end_token_id = output.stop_reason if output.finish_reason is FinishReason.STOP else None
        repeats = False
        text = ""
        for position, token_id in enumerate(output.new_token_ids):
            delta.token_ids.append(token_id)
            answer.num_tokens += 1
            is_stop_token = end_token_id is not None and position == len(output.new_token_ids) - 1
            if is_stop_token and not (sampling.include_stop_str_in_output and not sampling.skip_special_tokens):
                break
            new_text = answer.detokenizer.add([token_id])
            may_stop = answer.num_tokens > sampling.min_tokens and (not output.may_stop or output.may_stop[position])
            text += answer.stops.add(new_text, may_stop=may_stop)
            if answer.stops.matched is not None:
                break
            if answer.repetition is not None and answer.repetition.add(token_id) and may_stop:
                repeats = True
                break
        if answer.stops.matched is None and (repeats or output.finish_reason is not None):
            text += answer.stops.add(answer.detokenizer.flush()) + answer.stops.flush()
            delta.finish_reason = FinishReason.REPETITION if repeats else output.finish_reason
            if repeats:
                delta.stop_reason = "repetition_detected"
            else:
                delta.end_token_id = end_token_id
                delta.stop_reason = end_token_id if end_token_id in sampling.stop_token_ids else None
        if answer.stops.matched is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, answer.stops.matched
        if output.error is not None:
            state.error, state.param = output.error, output.param
        if sampling.logprobs is not None:
            delta.logprobs = output.logprobs[: len(delta.token_ids)]
        delta.text = text
        answer.finished = delta.finish_reason is not None
        return delta

    @staticmethod
    def _is_due(sampling: SamplingParams, answer: _Answer, delta: CompletionOutput) -> bool:
        """Whether to send a delta, which then holds what waited; else it waits itself."""
        waited = answer.waiting
        if waited is not None:
            delta.text = waited.text + delta.text
            delta.token_ids = waited.token_ids + delta.token_ids
            if delta.logprobs is not None:
                delta.logprobs = (waited.logprobs or []) + delta.logprobs
        due = waited is None or answer.finished or len(delta.token_ids) >= sampling.stream_interval
        if not due:
            answer.waiting = delta
        elif delta.token_ids:
            answer.waiting = CompletionOutput(index=answer.index)
        return due

    def _close(self, state: _RequestState, answer: _Answer, output: EngineOutput) -> None:
        state.num_unfinished -= 1
        del self._owner[output.request_id]
        if output.request_id == state.request_id and output.finish_reason is not FinishReason.ABORT:
            queue_s, prefill_s = output.queue_time_s, output.prefill_time_s
            decode_s = time.monotonic() - state.arrival_time_s - queue_s - prefill_s
            num_computed = len(state.prompt_token_ids) - (state.num_cached_tokens or 0)
            num_decoded = answer.num_tokens - 1
            state.timings = RequestTimings(
                queue_s=queue_s,
                prefill_s=prefill_s,
                decode_s=max(decode_s, 0.0),
                ttft_s=queue_s + prefill_s,
                prefill_tokens_per_s=num_computed / prefill_s if prefill_s > 0 else None,
                decode_tokens_per_s=num_decoded / decode_s if num_decoded > 0 and decode_s > 0 else None,
                draft_tokens=output.num_draft_tokens,
                accepted_tokens=output.num_accepted_tokens,
                saved_s=output.saved_time_s,
            )

    def _complete(self, state: _RequestState, request_output: RequestOutput) -> None:
        request_output.num_cached_tokens = state.num_cached_tokens or 0
        if state.sampling.prompt_logprobs is not None and len(state.prompt_logprobs) == len(state.prompt_token_ids):
            request_output.prompt_logprobs, state.prompt_logprobs = state.prompt_logprobs, []
        if state.error is not None:
            request_output.metadata["error"] = state.error
            request_output.metadata["param"] = state.param
        if state.num_unfinished == 0:
            request_output.finished = True
            request_output.timings = state.timings
            del self._states[state.request_id]


def error_of(output: RequestOutput) -> KitfoxError | None:
    """What went wrong with a request, if anything did."""
    message = output.metadata.get("error")
    if message is None:
        return None
    param = output.metadata["param"]
    return InvalidGrammarError(param, message) if param else KitfoxError(message)


def _make_stops(sampling: SamplingParams, automaton: StopAutomaton | None) -> StopStrings | StopTexts:
    include = sampling.include_stop_str_in_output
    strings = StopStrings(sampling.stop, include_in_output=include)
    return strings if automaton is None else StopTexts(strings, StopRegexes(automaton, include_in_output=include))
