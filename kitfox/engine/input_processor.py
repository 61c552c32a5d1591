"""The door: a prompt and sampling parameters become checked engine requests. Only here are they refused."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from kitfox.config import EngineConfig, ModelConfig
from kitfox.errors import ContextLengthError, InvalidParameterError
from kitfox.request import MAX_SEED, EngineRequest, SamplingParams

MAX_CACHE_SALT_CHARS = 1024
MAX_PROMPT_LOGPROBS_VALUES = 4_000_000  # prompt tokens times alternatives: what an answer may carry


@dataclass(frozen=True)
class EngineLimits:
    """What the door checks against.

    Attributes:
        capacity_tokens: tokens that the whole KV pool holds.
        max_logprobs: most alternatives a request may ask for.
    """

    vocab_size: int
    max_model_len: int
    capacity_tokens: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        *,
        max_model_len: int,
        num_blocks: int,
        eos_token_ids: tuple[int, ...],
    ) -> EngineLimits:
        """The limits of an engine; eos_token_ids are the tokenizer's, to which the checkpoint's are added."""
        return cls(
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            capacity_tokens=num_blocks * config.cache.block_size,
            max_logprobs=config.max_logprobs,
            eos_token_ids=tuple(sorted({*model_config.eos_token_ids, *eos_token_ids})),
        )


class InputProcessor:
    """Checks everything that needs the model's limits; what only needs itself is checked by `SamplingParams`."""

    def __init__(self, limits: EngineLimits):
        self.limits = limits

    def process(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[EngineRequest]:
        """One engine request for each of the n answers.

        Raises:
            ContextLengthError: prompt plus max_tokens exceeds the context or the whole KV cache.
            InvalidParameterError: a token id outside the vocabulary, too many logprobs, an over-long salt.
        """
        self._check_prompt(prompt_token_ids)
        self._check_sampling(prompt_token_ids, sampling)
        if cache_salt is not None and not 1 <= len(cache_salt) <= MAX_CACHE_SALT_CHARS:
            raise InvalidParameterError("cache_salt", f"must have 1 to {MAX_CACHE_SALT_CHARS} characters", cache_salt)
        if not -(2**31) <= priority < 2**31:
            raise InvalidParameterError("priority", "must fit in 32 bits", priority)
        max_tokens = self._resolve_max_tokens(len(prompt_token_ids), sampling)
        eos_token_ids = () if sampling.ignore_eos else self.limits.eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*eos_token_ids, *sampling.stop_token_ids)))
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
                    prompt_logprobs=sampling.prompt_logprobs if index == 0 else None,
                ),
                stop_token_ids=stop_token_ids,
                arrival_time_s=now,
                priority=priority,
                cache_salt=cache_salt,
                leader_id=None if index == 0 else request_id,
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

    def _check_sampling(self, prompt_token_ids: list[int], sampling: SamplingParams) -> None:
        vocab_size = self.limits.vocab_size
        for name, token_ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidParameterError(name, f"token ids must be in [0, {vocab_size - 1}]", token_id)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(sampling, name)
            if value is not None and value > self.limits.max_logprobs:
                raise InvalidParameterError(name, f"must be <= {self.limits.max_logprobs} (--max-logprobs)", value)
        if sampling.prompt_logprobs is not None:
            values = len(prompt_token_ids) * (sampling.prompt_logprobs + 1)
            if values > MAX_PROMPT_LOGPROBS_VALUES:
                limit = f"times the {len(prompt_token_ids)} prompt tokens must be <= {MAX_PROMPT_LOGPROBS_VALUES}"
                raise InvalidParameterError("prompt_logprobs", limit, sampling.prompt_logprobs)

    def _resolve_max_tokens(self, num_prompt_tokens: int, sampling: SamplingParams) -> int:
        limits = self.limits
        limit = min(limits.max_model_len, limits.capacity_tokens)
        what = "context" if limits.max_model_len <= limits.capacity_tokens else "KV cache"
        room = limit - num_prompt_tokens
        if sampling.max_tokens is None and room >= 1:
            if sampling.min_tokens > room:
                raise InvalidParameterError(
                    "min_tokens", f"must be <= {room}, what the {what} leaves", sampling.min_tokens
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


def _seed_of_answer(seed: int, index: int) -> int:
    """The further answers to one prompt differ, and the first is what it would be alone."""
    return (seed + index + MAX_SEED + 1) % (2 * MAX_SEED + 2) - MAX_SEED - 1
