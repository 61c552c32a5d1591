"""Token ids become text: detokenising, stop strings, logprobs, and the n answers of one prompt brought together."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kitfox.outputs import (
    CompletionOutput,
    EngineOutput,
    RequestOutput,
    RequestTimings,
    TokenLogprobs,
)
from kitfox.request import EngineRequest, FinishReason, SamplingParams
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


@dataclass
class _Answer:
    """One of the n answers while it grows."""

    index: int
    detokenizer: IncrementalDetokenizer
    stops: StopStrings
    num_tokens: int = 0
    finished: bool = False


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
        answers = {
            request.request_id: _Answer(
                index,
                IncrementalDetokenizer(
                    self._tokenizer, request.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
                ),
                StopStrings(sampling.stop, include_in_output=sampling.include_stop_str_in_output),
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

    def unfinished_request_ids(self) -> list[str]:
        return list(self._states)

    def process(self, outputs: list[EngineOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Turn a step's news into text.

        Returns:
            Deltas, one a request with news; and the engine request ids that a stop string ended, for the core to abort.
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
            if request_id not in news:
                news[request_id] = RequestOutput(
                    request_id=request_id, prompt=state.prompt, prompt_token_ids=state.prompt_token_ids, outputs=[]
                )
            news[request_id].outputs.append(delta)
            if answer.finished:
                self._close(state, output)
        for request_id, request_output in news.items():
            self._complete(self._states[request_id], request_output)
        return list(news.values()), to_abort

    def _advance(self, state: _RequestState, answer: _Answer, output: EngineOutput) -> CompletionOutput:
        """Take one answer's new tokens one by one: the token that completes a stop string is the last."""
        if state.num_cached_tokens is None:
            state.num_cached_tokens = output.num_cached_tokens
        state.prompt_logprobs.extend(output.prompt_logprobs)
        sampling = state.sampling
        delta = CompletionOutput(index=answer.index)
        ended_by_token = output.finish_reason is FinishReason.STOP
        text = ""
        for position, token_id in enumerate(output.new_token_ids):
            delta.token_ids.append(token_id)
            answer.num_tokens += 1
            is_stop_token = ended_by_token and position == len(output.new_token_ids) - 1
            if is_stop_token and not (sampling.include_stop_str_in_output and not sampling.skip_special_tokens):
                break
            new_text = answer.detokenizer.add([token_id])
            text += answer.stops.add(new_text, may_stop=answer.num_tokens > sampling.min_tokens)
            if answer.stops.matched is not None:
                break
        if answer.stops.matched is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, answer.stops.matched
        elif output.finish_reason is not None:
            text += answer.stops.add(answer.detokenizer.flush()) + answer.stops.flush()
            delta.finish_reason = output.finish_reason
            if output.stop_reason in sampling.stop_token_ids:
                delta.stop_reason = output.stop_reason
        if output.error is not None:
            state.error = output.error
        if sampling.logprobs is not None:
            delta.logprobs = output.logprobs[: len(delta.token_ids)]
        delta.text = text
        answer.finished = delta.finish_reason is not None
        return delta

    def _close(self, state: _RequestState, output: EngineOutput) -> None:
        state.num_unfinished -= 1
        del self._owner[output.request_id]
        if output.request_id == state.request_id:
            queue_s, prefill_s = output.queue_time_s, output.prefill_time_s
            decode_s = time.monotonic() - state.arrival_time_s - queue_s - prefill_s
            state.timings = RequestTimings(
                queue_s=queue_s, prefill_s=prefill_s, decode_s=max(decode_s, 0.0), ttft_s=queue_s + prefill_s
            )

    def _complete(self, state: _RequestState, request_output: RequestOutput) -> None:
        request_output.num_cached_tokens = state.num_cached_tokens or 0
        if state.sampling.prompt_logprobs is not None and len(state.prompt_logprobs) == len(state.prompt_token_ids):
            request_output.prompt_logprobs, state.prompt_logprobs = state.prompt_logprobs, []
        if state.error is not None:
            request_output.metadata["error"] = state.error
        if state.num_unfinished == 0:
            request_output.finished = True
            request_output.timings = state.timings
            del self._states[state.request_id]
