"""The seam between engine and executor: one object down (`SchedulerOutput`), one object up (`ModelRunnerOutput`)."""

from __future__ import annotations

import msgspec

from kitfox.config import Pooling
from kitfox.outputs import TokenLogprobs
from kitfox.request import SamplingParams


class BlockCopy(msgspec.Struct, frozen=True):
    """Copy the first num_tokens slots of block src into block dst, before the forward pass."""

    src: int
    dst: int
    num_tokens: int


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request the executor does not know yet, or has forgotten since it was preempted: sent in full.

    Attributes:
        token_ids: prompt, and the output so far when it was preempted.
        num_prompt_tokens: how many of them are prompt; penalties and prompt logprobs need to know.
        block_ids: its whole block table.
        num_computed_tokens: tokens whose KV is already in those blocks.
        stop_token_ids: what min_tokens masks.
        pooling: how to make a vector of the prompt's hidden states; None samples tokens.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    block_ids: list[int]
    num_computed_tokens: int
    pooling: Pooling | None = None


class CachedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request the executor knows: only what changed. It appended the tokens it sampled itself."""

    request_id: str
    new_block_ids: list[int]
    num_computed_tokens: int


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step's work.

    Attributes:
        num_scheduled_tokens: request id to tokens computed this step, in the order of the batch.
        block_copies: done before anything is written.
        finished_request_ids: ended since the last step, reported once so that the executor drops their state.
        preempted_request_ids: likewise; they come back as new requests.
    """

    step: int
    new_requests: list[NewRequest] = []
    cached_requests: list[CachedRequest] = []
    num_scheduled_tokens: dict[str, int] = {}
    block_copies: list[BlockCopy] = []
    finished_request_ids: list[str] = []
    preempted_request_ids: list[str] = []

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a step produced.

    Attributes:
        sampled_token_ids: request id to its new tokens; a request still in its prompt is absent.
        logprobs: for requests that asked, one entry a sampled token.
        prompt_logprobs: for requests that asked, one entry for each prompt token computed this step that has a
            predecessor (so the first prompt token never has one).
        embeddings: the vectors of pooling requests whose last token was computed, as little-endian float32.
        errors: requests whose logits were not numbers, with what was wrong; they end, the others go on.
    """

    sampled_token_ids: dict[str, list[int]] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    embeddings: dict[str, bytes] = {}
    errors: dict[str, str] = {}
