"""The seam between engine and executor: one object down (`SchedulerOutput`), one object up (`ModelRunnerOutput`)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from kitfox.config import Pooling
from kitfox.outputs import TokenLogprobs
from kitfox.request import ImageTile, SamplingParams

FilledBitmasks = Callable[[], dict[str, npt.NDArray[np.int32]]]
"""Waits for the bitmasks of a step: request id to the tokens it may choose, [1 + drafts, ceil(V / 32)], one bit each. A
request that is not there may choose any."""


class BlockCopy(msgspec.Struct, frozen=True):
    """Copy the first num_tokens slots of block src into block dst, before the forward pass."""

    src: int
    dst: int
    num_tokens: int


class NewRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request the executor does not know yet, or has forgotten since it was preempted: sent in full.

    Attributes:
        token_ids: prompt, and the output so far when it was preempted.
        num_prompt_tokens: how many of them are prompt; penalties and prompt logprobs need to know.
        num_reported_tokens: how many of them need no log-probabilities any more: the prompt, and what came of them.
        block_ids: its whole block table.
        stop_token_ids: what min_tokens masks.
        pooling: how to make a vector of the prompt's hidden states; None samples tokens.
        adapter_id: of the LoRA adapter that computes it; 0 is none.
        tiles: of the images in it.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_reported_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    block_ids: list[int]
    pooling: Pooling | None = None
    adapter_id: int = 0
    tiles: list[ImageTile] = []


class CachedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request the executor knows, and what is new about it: blocks, or tokens.

    Attributes:
        new_token_ids: tokens behind the last one it sampled and appended itself: those that a grammar forces.
    """

    request_id: str
    new_block_ids: list[int] = []
    new_token_ids: list[int] = []


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step's work.

    Attributes:
        cached_requests: of those that the executor knows, the ones that it must hear news of.
        num_scheduled_tokens: request id to tokens computed this step, drafts included, in the order of the batch.
        num_computed_tokens: of the same requests in the same order, the tokens before those: their KV is in the cache.
        draft_token_ids: guesses that follow a request's last token: computed with it, and kept as far as they are what
            would have been sampled.
        block_copies: done before anything is written.
        finished_request_ids: ended since the last step, reported once so that the executor drops their state.
        preempted_request_ids: likewise; they come back as new requests.
    """

    step: int
    new_requests: list[NewRequest] = []
    cached_requests: list[CachedRequest] = []
    num_scheduled_tokens: dict[str, int] = {}
    num_computed_tokens: dict[str, int] = {}
    draft_token_ids: dict[str, list[int]] = {}
    block_copies: list[BlockCopy] = []
    finished_request_ids: list[str] = []
    preempted_request_ids: list[str] = []

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a step produced.

    Attributes:
        sampled_token_ids: request id to its new tokens, the accepted drafts and one more; a request still in its prompt
            is absent.
        logprobs: for requests that asked, one entry for each token behind those that were reported: first those that
            came with the request or a difference, as far as they were computed, then the sampled one.
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
