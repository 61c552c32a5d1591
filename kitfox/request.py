"""A request and how it wants its tokens sampled. What is here is valid: it was checked at the door."""

from __future__ import annotations

import enum
import hashlib
import math
import time
from typing import Literal

import msgspec

from kitfox.config import Pooling
from kitfox.constraint import Constraint
from kitfox.errors import InvalidParameterError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_REGEXES = 32
MAX_STOP_REGEX_CHARS = 256
MAX_LIST_ENTRIES = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PATTERN_SIZE = 256
MAX_PATTERN_COUNT = 1024
MAX_STREAM_INTERVAL = 1024
MAX_N = 128
MAX_SEED = 2**63 - 1


def _require(condition: bool, param: str, limit: str, given: object) -> None:
    if not condition:
        raise InvalidParameterError(param, limit, given)


def _require_texts(texts: tuple[str, ...], param: str, max_texts: int, max_chars: int) -> None:
    _require(len(texts) <= max_texts, param, f"must have at most {max_texts} strings", len(texts))
    for text in texts:
        _require(text != "", param, "must not contain an empty string", text)
        _require(len(text) <= max_chars, param, f"strings must have at most {max_chars} characters", len(text))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True):
    """End an answer whose last tokens are one pattern again and again. Ranges are checked on construction.

    Attributes:
        min_pattern_size, max_pattern_size: tokens in the pattern.
        min_count: how many times in a row it must be there.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 3

    def __post_init__(self) -> None:
        name = "repetition_detection"
        limit = f"max_pattern_size must be in [1, {MAX_PATTERN_SIZE}]"
        _require(1 <= self.max_pattern_size <= MAX_PATTERN_SIZE, name, limit, self.max_pattern_size)
        limit = f"min_pattern_size must be in [1, max_pattern_size ({self.max_pattern_size})]"
        _require(1 <= self.min_pattern_size <= self.max_pattern_size, name, limit, self.min_pattern_size)
        limit = f"min_count must be in [2, {MAX_PATTERN_COUNT}]"
        _require(2 <= self.min_count <= MAX_PATTERN_COUNT, name, limit, self.min_count)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens and when to stop. Ranges are checked on construction.

    Order of application: logit_bias, then what may not be chosen (allowed_token_ids, bad_words, min_tokens), then
    penalties, then temperature, then top_k, top_p, min_p.

    Attributes:
        n: how many answers to one prompt.
        max_tokens: most tokens to generate; None means up to the context's end. 0 computes the prompt only.
        temperature: 0 is greedy.
        top_k: 0 or -1 means all.
        seed: noise comes from (seed, position), so a seeded request is the same in any company.
        kept_special_ids: special tokens that skip_special_tokens leaves in the text, for those who read it.
        stop: texts that end the answer; the earliest match wins and is cut off unless include_stop_str_in_output.
        stop_regex: patterns that end the answer where one first has a match (kitfox.engine.stop_regex says which
            syntax); what is matched is cut off as stop texts are, but for what of it is already shown.
        logprobs: how many top alternatives to report beside the sampled token; None reports nothing, 0 the token only,
            -1 the whole vocabulary.
        prompt_logprobs: the same for each prompt token.
        logprob_token_ids: tokens to report besides, at each position that reports anything.
        logit_bias: token id to bias in [-100, 100].
        allowed_token_ids: the only tokens that may be chosen; empty means all.
        bad_words: texts that the answer may not complete, with a space before them or without.
        bad_token_sequences: the same as token ids; those of bad_words are added at the door.
        truncate_prompt_tokens: keep so many prompt tokens, of the end that truncation_side does not name; -1 keeps what
            fits into the context beside max_tokens.
        stream_interval: tokens in a delta of a stream; the first token and the last ones do not wait.
        constraint: what the answer must be. It decides where the answer may end, and is complete unless max_tokens ends
            it; logit_bias, masks and penalties choose among what it allows.
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
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    kept_special_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    repetition_detection: RepetitionDetection | None = None
    stream_interval: int = 1
    constraint: Constraint | None = None

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
        _require_texts(self.stop, "stop", MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
        _require_texts(self.stop_regex, "stop_regex", MAX_STOP_REGEXES, MAX_STOP_REGEX_CHARS)
        _require_texts(self.bad_words, "bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        for name, most in (
            ("stop_token_ids", MAX_LIST_ENTRIES),
            ("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS),
            ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
        ):
            num_entries = len(getattr(self, name))
            _require(num_entries <= most, name, f"must have at most {most} entries", num_entries)
        _require(self.seed is None or -MAX_SEED - 1 <= self.seed <= MAX_SEED, "seed", "must fit in 64 bits", self.seed)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            limit = "must be >= 0, or -1 for the whole vocabulary"
            _require(value is None or value >= -1, name, limit, value)
        _require(
            self.reports_logprobs or not self.logprob_token_ids,
            "logprob_token_ids",
            "needs logprobs",
            list(self.logprob_token_ids),
        )
        kept = self.truncate_prompt_tokens
        limit = "must be positive, or -1 for what fits the context"
        _require(kept is None or kept == -1 or kept >= 1, "truncate_prompt_tokens", limit, kept)
        limit = "must be left or right"
        _require(self.truncation_side in ("left", "right"), "truncation_side", limit, self.truncation_side)
        limit = f"must be in [1, {MAX_STREAM_INTERVAL}]"
        _require(1 <= self.stream_interval <= MAX_STREAM_INTERVAL, "stream_interval", limit, self.stream_interval)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def reports_logprobs(self) -> bool:
        return self.logprobs is not None or self.prompt_logprobs is not None


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(enum.Enum):
    """Where a request is. Preempted requests wait again, in front of the queue."""

    WAITING_FOR_GRAMMAR = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class ImageTile(msgspec.Struct, frozen=True, gc=False):
    """A square of an image, and where in the prompt its tokens begin.

    Attributes:
        pixels: [S, S, 3] bytes: rows of red, green and blue.
        digest: of the pixels; what is cached of a tile is known by it.
    """

    start: int
    pixels: bytes
    digest: bytes


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What crosses from the front end to the engine core: one answer to one checked prompt.

    Attributes:
        request_id: unique in the engine. The n answers to one prompt are requests `ID`, `ID#1`, `ID#2`, ...
        sampling: with max_tokens resolved to a number and n = 1.
        stop_token_ids: the model's EOS tokens (unless ignore_eos) and the request's own, all in one.
        eos_token_ids: the part of them that min_tokens masks although nobody asked for it by name.
        leader_id: the first of the n answers; the others start once its prompt is computed.
        pooling: make one vector of the prompt's hidden states instead of sampling; max_tokens is 0 then.
        priority: lower runs first under the priority policy; also weighs radix eviction.
        cache_salt: requests with different salts never share KV.
        adapter_id: of the LoRA adapter that answers; 0 is the model alone.
        tiles: of the images in the prompt, by their places.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    arrival_time_s: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    leader_id: str | None = None
    pooling: Pooling | None = None
    adapter_id: int = 0
    tiles: list[ImageTile] = []


class Request:
    """One request inside the engine core: the tokens it has, how many are computed, and where it is.

    Invariant: num_computed_tokens <= num_tokens, and equality never holds while it runs: the last token's
    logits are what the next step computes.

    Attributes:
        unsent: tokens at the end that the executor did not sample, and has not been told of.
        unreported: tokens at the end that the caller has not been told of, because their log-probabilities are not
            computed or nothing is sampled yet; each with whether the answer might have ended before it.
        ends_as: how it ends once there is nothing left to report.
    """

    __slots__ = (
        "adapter_id",
        "all_token_ids",
        "arrival_time_s",
        "cache_salt",
        "ends_as",
        "finish_reason",
        "first_scheduled_time_s",
        "first_token_time_s",
        "leader_id",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "pooling",
        "priority",
        "request_id",
        "sampling",
        "saved_time_s",
        "status",
        "stop_reason",
        "stop_token_ids",
        "tiles",
        "unreported",
        "unsent",
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
        self.adapter_id = source.adapter_id
        self.cache_salt = source.cache_salt
        self.tiles = source.tiles
        if source.adapter_id or source.tiles:
            # What an adapter computed is nobody else's, nor what was read of other images: their tokens are the same.
            # No client's salt begins like this.
            images = hashlib.sha256(b"".join(tile.digest for tile in source.tiles)).hexdigest() if source.tiles else ""
            self.cache_salt = f"\0{source.adapter_id}\0{images}\0{source.cache_salt or ''}"
        self.leader_id = source.leader_id
        self.pooling = source.pooling
        self.arrival_time_s = source.arrival_time_s or time.monotonic()
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.first_scheduled_time_s: float | None = None
        self.first_token_time_s: float | None = None
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.saved_time_s = 0.0
        self.unsent: list[int] = []
        self.unreported: list[tuple[int, bool]] = []
        self.ends_as: FinishReason | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None

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

    def starts_of_tiles(self, start: int, end: int) -> list[int]:
        """Where tiles begin among the tokens [start, end)."""
        return [tile.start for tile in self.tiles if start <= tile.start < end]

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def skips_cache_lookup(self) -> bool:
        """Positions whose logits or states are to be reported must be computed: nothing may come from the cache."""
        sampling = self.sampling
        reports_tokens = sampling.logprobs is not None and bool(self.unreported)
        return reports_tokens or sampling.prompt_logprobs is not None or self.pooling == "mean"

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
