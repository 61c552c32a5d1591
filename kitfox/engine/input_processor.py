"""The door: a prompt and sampling parameters become checked engine requests. Only here are they refused."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kitfox.config import EngineConfig, ModelConfig, Pooling
from kitfox.engine.stop_regex import StopAutomaton
from kitfox.errors import ContextLengthError, InvalidParameterError
from kitfox.request import MAX_SEED, EngineRequest, ImageTile, SamplingParams

if TYPE_CHECKING:
    from kitfox.tokenizer import Tokenizer

MAX_CACHE_SALT_CHARS = 1024
MAX_LOGPROBS_VALUES = 4_000_000  # tokens times alternatives: what an answer may carry
USUAL_LOGPROBS = 20  # OpenAI's limit: so many are never too many for the length of an answer


@dataclass(frozen=True)
class EngineLimits:
    """What the door checks against.

    Attributes:
        capacity_tokens: tokens that the whole KV pool holds.
        max_logprobs: most alternatives a request may ask for; -1 is the whole vocabulary.
        default_max_tokens: most tokens to generate where a request does not say; None is what the context leaves.
    """

    vocab_size: int
    max_model_len: int
    capacity_tokens: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...]
    default_max_tokens: int | None = None

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        *,
        max_model_len: int,
        num_blocks: int,
        eos_token_ids: tuple[int, ...],
        default_max_tokens: int | None = None,
    ) -> EngineLimits:
        """The limits of an engine; eos_token_ids are the tokenizer's, to which the checkpoint's are added."""
        return cls(
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            capacity_tokens=num_blocks * config.cache.block_size,
            max_logprobs=config.max_logprobs,
            eos_token_ids=tuple(sorted({*model_config.eos_token_ids, *eos_token_ids})),
            default_max_tokens=default_max_tokens,
        )


class InputProcessor:
    """Checks everything that needs the model's limits; what only needs itself is checked by `SamplingParams`."""

    def __init__(self, limits: EngineLimits, tokenizer: Tokenizer):
        """The tokenizer is asked for the tokens of bad_words."""
        self.limits = limits
        self._tokenizer = tokenizer

    def process(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        pooling: Pooling | None = None,
        adapter_id: int = 0,
        tiles: list[ImageTile] | None = None,
    ) -> list[EngineRequest]:
        """One engine request for each of the n answers.

        Args:
            tiles: of the images in the prompt.

        Raises:
            ContextLengthError: prompt plus max_tokens exceeds the context or the whole KV cache.
            InvalidParameterError: a token id outside the vocabulary, too many logprobs, an over-long salt.
        """
        if tiles and sampling.truncate_prompt_tokens is not None:
            given = sampling.truncate_prompt_tokens
            raise InvalidParameterError("truncate_prompt_tokens", "must not be given with images", given)
        prompt_token_ids = truncated_prompt(
            prompt_token_ids,
            sampling.truncate_prompt_tokens,
            sampling.truncation_side,
            max_tokens=sampling.max_tokens,
            max_model_len=self.limits.max_model_len,
        )
        self._check_prompt(prompt_token_ids)
        self._check_token_ids(sampling)
        StopAutomaton(sampling.stop_regex)  # refuses what it cannot match
        if cache_salt is not None and not 1 <= len(cache_salt) <= MAX_CACHE_SALT_CHARS:
            raise InvalidParameterError("cache_salt", f"must have 1 to {MAX_CACHE_SALT_CHARS} characters", cache_salt)
        if cache_salt is not None and cache_salt.startswith("\0"):
            raise InvalidParameterError("cache_salt", "must not begin with NUL", cache_salt)
        if not -(2**31) <= priority < 2**31:
            raise InvalidParameterError("priority", "must fit in 32 bits", priority)
        max_tokens = self._resolve_max_tokens(len(prompt_token_ids), sampling)
        logprobs = self._resolve_logprobs("logprobs", sampling, max_tokens * sampling.n)
        prompt_logprobs = self._resolve_logprobs("prompt_logprobs", sampling, len(prompt_token_ids))
        eos_token_ids = () if sampling.ignore_eos else self.limits.eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*eos_token_ids, *sampling.stop_token_ids)))
        bad_sequences = self._bad_sequences(sampling)
        constraint = sampling.constraint
        if constraint is not None:
            constraint = msgspec.structs.replace(constraint, format=constraint.packed_format)
        now = time.monotonic()
        return [
            EngineRequest(
                request_id=request_id if index == 0 else f"{request_id}#{index}",
                prompt_token_ids=prompt_token_ids,
                sampling=msgspec.structs.replace(
                    sampling,
                    n=1,
                    max_tokens=max_tokens,
                    seed=None if sampling.seed is None else _seed_of_answer(sampling.seed, index),
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs if index == 0 else None,
                    logprob_token_ids=() if logprobs is None and index > 0 else sampling.logprob_token_ids,
                    bad_token_sequences=bad_sequences,
                    constraint=constraint,
                ),
                stop_token_ids=stop_token_ids,
                arrival_time_s=now,
                priority=priority,
                cache_salt=cache_salt,
                leader_id=None if index == 0 else request_id,
                pooling=pooling,
                adapter_id=adapter_id,
                tiles=tiles or [],
            )
            for index in range(sampling.n)
        ]

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidParameterError("prompt", "must have at least one token", "")
        vocab_size = self.limits.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
            raise InvalidParameterError("prompt", f"token ids must be in [0, {vocab_size - 1}]", wrong)

    def _check_token_ids(self, sampling: SamplingParams) -> None:
        vocab_size = self.limits.vocab_size
        for name in ("stop_token_ids", "logit_bias", "logprob_token_ids", "allowed_token_ids"):
            for token_id in getattr(sampling, name):
                if not 0 <= token_id < vocab_size:
                    raise InvalidParameterError(name, f"token ids must be in [0, {vocab_size - 1}]", token_id)

    def _bad_sequences(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The token sequences that bad_words forbid: each text's own, and that of the text after a space."""
        texts = [text for word in sampling.bad_words for text in (word, " " + word.lstrip())]
        found = [tuple(self._encode_inside(text)) for text in texts]
        return tuple(ids for ids in dict.fromkeys([*sampling.bad_token_sequences, *found]) if ids)

    def _encode_inside(self, text: str) -> list[int]:
        """Token ids of a text within a longer one: some tokenizers put a space before what comes first."""
        before = self._tokenizer.encode("\n", add_special_tokens=False)
        ids = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        if ids[: len(before)] == before:
            return ids[len(before) :]
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _resolve_logprobs(self, name: str, sampling: SamplingParams, num_tokens: int) -> int | None:
        """How many alternatives to report, where -1 is the whole vocabulary, for at most num_tokens tokens."""
        asked = getattr(sampling, name)
        if asked is None:
            return None
        limits = self.limits
        count = limits.vocab_size if asked == -1 else asked
        if limits.max_logprobs != -1 and count > limits.max_logprobs:
            whole = f"; -1 is the vocabulary of {count} tokens" if asked == -1 else ""
            raise InvalidParameterError(name, f"must be <= {limits.max_logprobs} (--max-logprobs){whole}", asked)
        values = num_tokens * (count + 1 + len(sampling.logprob_token_ids))
        if values > MAX_LOGPROBS_VALUES and (count > USUAL_LOGPROBS or name == "prompt_logprobs"):
            limit = f"times the {num_tokens} tokens that report them must be <= {MAX_LOGPROBS_VALUES}"
            raise InvalidParameterError(name, limit, asked)
        return count

    def _resolve_max_tokens(self, num_prompt_tokens: int, sampling: SamplingParams) -> int:
        limits = self.limits
        limit = min(limits.max_model_len, limits.capacity_tokens)
        what = "context" if limits.max_model_len <= limits.capacity_tokens else "KV cache"
        room = limit - num_prompt_tokens
        if sampling.max_tokens is None and room >= 1:
            room = min(room, limits.default_max_tokens or room)
            if sampling.min_tokens > room:
                raise InvalidParameterError(
                    "min_tokens", f"must be <= {room}, what the {what} or the default leaves", sampling.min_tokens
                )
            return room
        wanted = 1 if sampling.max_tokens is None else sampling.max_tokens
        if wanted > room:
            raise ContextLengthError(
                f"This model's maximum context length is {limits.max_model_len} tokens"
                + (f" and its KV cache holds {limits.capacity_tokens}" if what == "KV cache" else "")
                + f". Given: {num_prompt_tokens} prompt tokens plus max_tokens {wanted}, together "
                f"{num_prompt_tokens + wanted}. Shorten the prompt or lower max_tokens.",
                param="max_tokens" if num_prompt_tokens < limit else "prompt",
            )
        return wanted


def truncated_prompt(
    token_ids: list[int], kept: int | None, side: str, *, max_tokens: int | None, max_model_len: int
) -> list[int]:
    """What truncate_prompt_tokens (`kept`) and truncation_side leave of a prompt."""
    if kept is None:
        return token_ids
    if kept == -1:
        kept = max(max_model_len - (1 if max_tokens is None else max_tokens), 1)
    return token_ids[-kept:] if side == "left" else token_ids[:kept]


def _seed_of_answer(seed: int, index: int) -> int:
    """The further answers to one prompt differ, and the first is what it would be alone."""
    return (seed + index + MAX_SEED + 1) % (2 * MAX_SEED + 2) - MAX_SEED - 1
