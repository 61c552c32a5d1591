"""What a caller receives, and what the engine core sends to make it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kitfox.request import FinishReason

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position, of the model's own distribution (before temperature and penalties).

    Attributes:
        token_id, logprob, rank: the token that is there; rank 1 is the most likely.
        top_ids, top_logprobs: the most likely tokens, best first; as many as were asked for.
        named_logprobs: of the request's logprob_token_ids, in their order.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]
    named_logprobs: list[float] = []


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One request's news after one step.

    Attributes:
        may_stop: for an answer held to a grammar that stop texts may end: whether it might have ended before each of
            the new tokens. Empty where it may end anywhere.
        stop_reason: the last new token, where that ended it.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        queue_time_s: from arrival to first being scheduled.
        prefill_time_s: from there to the first token.
        num_draft_tokens, num_accepted_tokens: guesses that were verified so far, and those that were right.
        saved_time_s: how much sooner it came for that.
        embedding: the pooled vector of a request that asked for one, as little-endian float32; not normalised.
        error: what went wrong, with finish_reason "error".
        param: the parameter to blame for it; empty where it is not the caller's mistake.
    """

    request_id: str
    new_token_ids: list[int] = []
    may_stop: list[bool] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_time_s: float = 0.0
    prefill_time_s: float = 0.0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    saved_time_s: float = 0.0
    embedding: bytes | None = None
    error: str | None = None
    param: str = ""


class GrammarStats(msgspec.Struct, kw_only=True):
    """What grammars came to since the start.

    Attributes:
        num_compiled, num_refused, num_cache_hits: of the requests that wanted one.
        compile_time_s, mask_time_s: seconds, neither of them on the steps' own thread.
        num_masks: one a constrained token that was sampled.
        num_forced_tokens: appended without sampling.
    """

    num_compiled: int = 0
    num_refused: int = 0
    num_cache_hits: int = 0
    compile_time_s: float = 0.0
    num_masks: int = 0
    mask_time_s: float = 0.0
    num_forced_tokens: int = 0


class SpeculationStats(msgspec.Struct, kw_only=True):
    """What guesses came to since the start.

    Attributes:
        num_drafts: runs of guesses, one an answer and a step.
        saved_time_s: how much sooner answers went on than without guesses, by what steps of their sizes take; added up
            over answers.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    saved_time_s: float = 0.0


class EngineStats(msgspec.Struct, kw_only=True):
    """The engine core after a step: gauges as they are, counters since the start.

    Attributes:
        prefix_queries, prefix_hits: in tokens, of first admissions; preempted requests are counted apart.
    """

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_evictable_blocks: int = 0
    block_size: int = 0
    num_preemptions: int = 0
    num_evicted_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_step_tokens: int = 0
    step_time_s: float = 0.0
    num_waiting_for_grammar: int = 0
    grammars: GrammarStats = msgspec.field(default_factory=GrammarStats)
    speculation: SpeculationStats = msgspec.field(default_factory=SpeculationStats)


class EngineOutputs(msgspec.Struct, kw_only=True):
    """Everything one step has to say: one message a step, never one a token."""

    outputs: list[EngineOutput] = []
    stats: EngineStats | None = None


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One answer. In a stream, text and token_ids are what is new; offline they are the whole.

    Attributes:
        stop_reason: the stop text, pattern or token of the request that ended it; None at the model's own end token.
        end_token_id: the token that ended it, the last of token_ids; None where none did.
        num_preemptions: how often it lost its blocks to others so far.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    end_token_id: int | None = None
    num_preemptions: int = 0


class RequestTimings(msgspec.Struct, kw_only=True):
    """Seconds a request spent: waiting, until its first token, and after it.

    Attributes:
        prefill_tokens_per_s: prompt tokens computed, so not those that came from the cache, over prefill_s.
        decode_tokens_per_s: tokens of the first answer but its first one, over decode_s; None when there are none.
        draft_tokens, accepted_tokens: guesses at the first answer that were verified, and those that were right.
        saved_s: how much sooner it came for that.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    saved_s: float = 0.0


class RequestOutput(msgspec.Struct, kw_only=True):
    """What a request has to show: of n answers, those with news.

    Attributes:
        embedding: as in `EngineOutput`, for a request that was pooled.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    embedding: bytes | None = None
    timings: RequestTimings | None = None
    metadata: dict[str, Any] = {}

    def vector(self, *, normalize: bool = True, dimensions: int | None = None) -> npt.NDArray[np.float32]:
        """The embedding or its first `dimensions` numbers, of length 1 unless told otherwise (a zero vector stays)."""
        import numpy as np

        assert self.embedding is not None, f"{self.request_id} was not pooled, or is not finished"
        values = np.frombuffer(self.embedding, "<f4")[:dimensions]
        length = float(np.linalg.norm(values.astype(np.float64)))
        return (values / length).astype(np.float32) if normalize and length > 0 else values
