"""A request and how it wants its tokens sampled. What is here is valid: it was checked at the door."""

from __future__ import annotations

import enum
import math
import time

import msgspec

from kitfox.errors import InvalidParameterError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_LIST_ENTRIES = 1024
MAX_N = 128
MAX_SEED = 2**63 - 1


def _require(condition: bool, param: str, limit: str, given: object) -> None:
    if not condition:
        raise InvalidParameterError(param, limit, given)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens and when to stop. Ranges are checked on construction.

    Order of application: logit_bias, then min_tokens' mask, then penalties, then temperature, then top_k, top_p, min_p.

    Attributes:
        n: how many answers to one prompt.
        max_tokens: most tokens to generate; None means up to the context's end. 0 computes the prompt only.
        temperature: 0 is greedy.
        top_k: 0 or -1 means all.
        seed: noise comes from (seed, position), so a seeded request is the same in any company.
        stop: texts that end the answer; the earliest match wins and is cut off unless include_stop_str_in_output.
        logprobs: how many top alternatives to report beside the sampled token; None reports nothing, 0 the token only.
        prompt_logprobs: the same for each prompt token.
        logit_bias: token id to bias in [-100, 100].
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.n <= MAX_N, "n", f"must be in [1, {MAX_N}]", self.n)
        limit = "must be >= 0"
        _require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", limit, self.max_tokens)
        _require(self.min_tokens >= 0, "min_tokens", limit, self.min_tokens)
        if self.max_tokens is not None:
            limit = f"must be <= max_tokens ({self.max_tokens})"
            _require(self.min_tokens <= self.max_tokens, "min_tokens", limit, self.min_tokens)
        value = self.temperature
        _require(_is_finite(value) and value >= 0, "temperature", "must be >= 0", value)
        _require(self.top_k >= -1, "top_k", "must be -1, 0 (both mean all) or positive", self.top_k)
        _require(_is_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", "must be in (0, 1]", self.top_p)
        _require(_is_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", "must be in [0, 1]", self.min_p)
        value = self.repetition_penalty
        _require(_is_finite(value) and 0 < value <= 100, "repetition_penalty", "must be in (0, 100]", value)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_finite(value) and -2 <= value <= 2, name, "must be in [-2, 2]", value)
        limit = f"must have at most {MAX_LIST_ENTRIES} entries"
        _require(len(self.logit_bias) <= MAX_LIST_ENTRIES, "logit_bias", limit, len(self.logit_bias))
        for value in self.logit_bias.values():
            _require(_is_finite(value) and -100 <= value <= 100, "logit_bias", "values must be in [-100, 100]", value)
        limit = f"must have at most {MAX_STOP_STRINGS} strings"
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", limit, len(self.stop))
        for text in self.stop:
            _require(text != "", "stop", "must not contain an empty string", text)
            limit = f"strings must have at most {MAX_STOP_STRING_CHARS} characters"
            _require(len(text) <= MAX_STOP_STRING_CHARS, "stop", limit, len(text))
        limit = f"must have at most {MAX_LIST_ENTRIES} entries"
        _require(len(self.stop_token_ids) <= MAX_LIST_ENTRIES, "stop_token_ids", limit, len(self.stop_token_ids))
        _require(self.seed is None or -MAX_SEED - 1 <= self.seed <= MAX_SEED, "seed", "must fit in 64 bits", self.seed)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value >= 0, name, "must be >= 0", value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(enum.Enum):
    """Where a request is. Preempted requests wait again, in front of the queue."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What crosses from the front end to the engine core: one answer to one checked prompt.

    Attributes:
        request_id: unique in the engine. The n answers to one prompt are requests `ID`, `ID#1`, `ID#2`, ...
        sampling: with max_tokens resolved to a number and n = 1.
        stop_token_ids: the model's EOS tokens (unless ignore_eos) and the request's own, all in one.
        eos_token_ids: the part of them that min_tokens masks although nobody asked for it by name.
        leader_id: the first of the n answers; the others start once its prompt is computed.
        priority: lower runs first under the priority policy; also weighs radix eviction.
        cache_salt: requests with different salts never share KV.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    arrival_time_s: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    leader_id: str | None = None


class Request:
    """One request inside the engine core: the tokens it has, how many are computed, and where it is.

    Invariant: num_computed_tokens <= num_tokens, and equality never holds while it runs: the last token's
    logits are what the next step computes.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_time_s",
        "cache_salt",
        "finish_reason",
        "first_scheduled_time_s",
        "first_token_time_s",
        "leader_id",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "sampling",
        "status",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(self, source: EngineRequest):
        assert source.prompt_token_ids, "a request without a prompt got past the door"
        assert source.sampling.max_tokens is not None, "max_tokens was not resolved at the door"
        self.request_id = source.request_id
        self.all_token_ids = list(source.prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.sampling = source.sampling
        self.stop_token_ids = frozenset(source.stop_token_ids)
        self.priority = source.priority
        self.cache_salt = source.cache_salt
        self.leader_id = source.leader_id
        self.arrival_time_s = source.arrival_time_s or time.monotonic()
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.first_scheduled_time_s: float | None = None
        self.first_token_time_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def max_total_tokens(self) -> int:
        """Most tokens this request can come to hold."""
        assert self.sampling.max_tokens is not None
        return self.num_prompt_tokens + self.sampling.max_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def skips_cache_lookup(self) -> bool:
        """Prompt logprobs need every prompt position computed, so nothing may come from the cache."""
        return self.sampling.prompt_logprobs is not None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
