"""Persistent arrays of every request the executor knows, updated by difference; each step is gathered from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kitfox.config import Pooling
from kitfox.request import ImageTile, SamplingParams
from kitfox.sampling.sampler import is_plain_greedy
from kitfox.step import CachedRequest, NewRequest, SchedulerOutput


@dataclass(slots=True)
class RequestRow:
    """One request's place in the arrays, and what sampling needs to know about it."""

    row: int
    request_id: str
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_reported_tokens: int  # those before it need no log-probabilities any more
    num_tokens: int
    num_blocks: int
    seed: int
    is_plain_greedy: bool
    wants_more: bool  # than tokens: log-probabilities, or a vector
    num_drafts: int = 0  # guesses behind its tokens, in this step
    pooling: Pooling | None = None
    adapter_id: int = 0
    tiles: Sequence[ImageTile] = ()
    encoded_tiles: dict[int, torch.Tensor] = field(default_factory=dict)  # by their starts, as long as they are needed
    hidden_sum: torch.Tensor | None = None  # of the tokens computed so far, for mean pooling


@dataclass(frozen=True)
class StepInputs:
    """What a step feeds the model, ragged and without padding.

    Attributes:
        rows: the requests of the step, in the order of the batch.
        num_computed_tokens: [R]: tokens before those of the step.
        token_ids, positions, slot_mapping: [T] int64.
        query_start_loc: [R + 1] int32. seq_lens: [R] int32, this step included.
        block_table: [R, most blocks of any of them] int32; entries past a request's length are 0.
        samples: [R] bool: whether a request samples: its last token, and its drafts, are computed in this step.
    """

    rows: list[RequestRow]
    num_computed_tokens: Sequence[int]
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    samples: npt.NDArray[np.bool_]


class InputBatch:
    """Rows of token ids and block tables, one a request.

    Memory: max_num_seqs * (max_model_len * 8 + max_blocks * 4) bytes, touched only as far as it is used.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, seed: int = 0):
        self._seed = seed
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        # One more than a request may have: its last sampled token, which is not computed.
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self._cells = self._token_ids.reshape(-1).data  # for single tokens: numpy takes three times as long
        self._block_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._rows: dict[str, RequestRow] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._rows)

    def update(self, scheduled: SchedulerOutput) -> None:
        """Take over a step's differences: forget, extend, add."""
        for request_id in (*scheduled.finished_request_ids, *scheduled.preempted_request_ids):
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._free_rows.append(row.row)
        for cached in scheduled.cached_requests:
            self._extend(cached)
        for new in scheduled.new_requests:
            self._add(new)
        for request_id in scheduled.num_scheduled_tokens:
            self._rows[request_id].num_drafts = 0
        for request_id, draft in scheduled.draft_token_ids.items():
            row = self._rows[request_id]
            row.num_drafts = len(draft)
            self._token_ids[row.row, row.num_tokens : row.num_tokens + len(draft)] = draft

    def _add(self, new: NewRequest) -> None:
        assert new.request_id not in self._rows, f"{new.request_id} was sent in full twice"
        index = self._free_rows.pop()
        num_tokens, num_blocks = len(new.token_ids), len(new.block_ids)
        self._token_ids[index, :num_tokens] = new.token_ids
        self._block_table[index, :num_blocks] = new.block_ids
        seed = new.sampling.seed
        self._rows[new.request_id] = RequestRow(
            row=index,
            request_id=new.request_id,
            sampling=new.sampling,
            stop_token_ids=new.stop_token_ids,
            num_prompt_tokens=new.num_prompt_tokens,
            num_reported_tokens=new.num_reported_tokens,
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            seed=self._seed_of(new.request_id) if seed is None else seed,
            is_plain_greedy=is_plain_greedy(new.sampling, new.stop_token_ids),
            wants_more=new.sampling.reports_logprobs or new.pooling is not None,
            pooling=new.pooling,
            adapter_id=new.adapter_id,
            tiles=new.tiles,
        )

    def _seed_of(self, request_id: str) -> int:
        """The noise of a request that brought no seed: its id decides, so that a resume goes on with the same noise."""
        digest = hashlib.blake2b(f"{self._seed}:{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def _extend(self, cached: CachedRequest) -> None:
        row = self._rows[cached.request_id]
        if cached.new_block_ids:
            end = row.num_blocks + len(cached.new_block_ids)
            self._block_table[row.row, row.num_blocks : end] = cached.new_block_ids
            row.num_blocks = end
        if cached.new_token_ids:
            self._append(row, cached.new_token_ids)

    def append_sampled(self, row: RequestRow, token_ids: list[int]) -> None:
        """Note sampled tokens, which have their log-probabilities; the next step computes them."""
        self._append(row, token_ids)
        row.num_reported_tokens = row.num_tokens

    def _append(self, row: RequestRow, token_ids: list[int]) -> None:
        start = row.row * self._token_ids.shape[1] + row.num_tokens
        for cell, token_id in enumerate(token_ids, start):
            self._cells[cell] = token_id
        row.num_tokens += len(token_ids)

    def tokens(self, row: RequestRow, start: int, end: int) -> npt.NDArray[np.int64]:
        return self._token_ids[row.row, start:end]

    def gather(self, scheduled: SchedulerOutput) -> StepInputs:
        """The step's inputs, requests in the order of the batch."""
        rows = [self._rows[request_id] for request_id in scheduled.num_scheduled_tokens]
        num_computed_tokens = list(scheduled.num_computed_tokens.values())
        counts = np.array(list(scheduled.num_scheduled_tokens.values()), dtype=np.int32)
        computed = np.array(num_computed_tokens, dtype=np.int32)
        indices = np.array([row.row for row in rows], dtype=np.int64)
        totals = np.array([row.num_tokens + row.num_drafts for row in rows], dtype=np.int32)
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        row_of_token = np.repeat(indices, counts)
        offsets = np.arange(query_start_loc[-1], dtype=np.int64) - np.repeat(query_start_loc[:-1], counts)
        positions = np.repeat(computed, counts) + offsets
        blocks = self._block_table[row_of_token, positions // self.block_size].astype(np.int64)
        seq_lens = computed + counts
        num_blocks = -(-int(seq_lens.max()) // self.block_size)
        return StepInputs(
            rows=rows,
            num_computed_tokens=num_computed_tokens,
            token_ids=self._token_ids[row_of_token, positions],
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=self._block_table[indices, :num_blocks],
            samples=seq_lens == totals,
        )
