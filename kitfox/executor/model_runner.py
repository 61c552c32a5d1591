"""SchedulerOutput -> ForwardBatch -> hidden states -> logits -> tokens. One step, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kitfox.attention.backend import ForwardBatch, make_attention_backend
from kitfox.executor.input_batch import InputBatch, RequestRow, StepInputs
from kitfox.executor.step_program import StepProgram
from kitfox.kernels.native import NativeKernels
from kitfox.models import Model
from kitfox.outputs import TokenLogprobs
from kitfox.request import ImageTile
from kitfox.sampling.native_sampler import NativeSampler
from kitfox.sampling.sampler import Sampler, SamplingRow, prompt_logprobs
from kitfox.step import BlockCopy, FilledBitmasks, ModelRunnerOutput, SchedulerOutput

NO_EMBEDDING = "no embedding could be made: the model's hidden states hold NaN or infinity"
NO_TOKEN = (
    "no token could be chosen: the model's logits hold NaN or infinity, or every token was ruled out "
    "(allowed_token_ids, bad_words, logit_bias, min_tokens)"
)


class ModelRunner:
    """Keeps each request's tokens and block table, and turns a step's differences into sampled tokens."""

    def __init__(
        self,
        model: Model,
        kv_caches: list[torch.Tensor],
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        seed: int,
        enforce_eager: bool = False,
    ):
        """kv_caches: one per layer, from the model's kernels; further ones are only copied within.

        Attributes:
            on_states: hears of each step's features [T, F], or hidden states [T, hidden] if the model keeps none.
        """
        self.model = model
        self.device = model.kernels.device
        self.attention = make_attention_backend(model.kernels)
        self.description = "eager steps"
        self._tokens_per_tile = 0 if model.config.vision is None else model.config.vision.tokens_per_tile
        self.on_states: Callable[[StepInputs, torch.Tensor], None] | None = None
        self._enforce_eager = enforce_eager
        self.use_kv_caches(kv_caches)
        native: NativeSampler | None = None
        if isinstance(model.kernels, NativeKernels):
            native = NativeSampler(model.kernels.library, model.kernels.context)
        self.native_sampler = native
        self.sampler = Sampler(native)
        self.input_batch = InputBatch(max_num_seqs, max_model_len, block_size, seed)

    def use_kv_caches(self, kv_caches: list[torch.Tensor]) -> None:
        """Compute with these from now on; with none, until there are some again, nothing can be computed."""
        self.kv_caches = kv_caches
        self.program: StepProgram | None = None  # it points into the old ones
        if kv_caches and isinstance(self.model.kernels, NativeKernels) and not self._enforce_eager:
            self._capture(self.model.kernels)

    def _capture(self, kernels: NativeKernels) -> None:
        try:
            self.program = StepProgram(self.model, kernels, self.kv_caches)
            self.description = "captured steps"
        except (AttributeError, TypeError) as error:
            self.description = f"eager steps ({type(self.model).__name__} cannot be captured: {error})"

    @torch.inference_mode()
    def execute(self, scheduled: SchedulerOutput, bitmasks: FilledBitmasks | None = None) -> ModelRunnerOutput:
        """Compute a step's tokens, writing their KV, and sample where a request's last token was computed.

        Args:
            bitmasks: asked for behind the forward pass, beside which they are filled.
        """
        self.input_batch.update(scheduled)
        self._copy_blocks(scheduled.block_copies)
        if not scheduled.num_scheduled_tokens:
            return ModelRunnerOutput()
        step = self.input_batch.gather(scheduled)
        batch = self._forward_batch(step)
        hidden = self.forward(batch, captured=not batch.adapter_rows and batch.image_rows is None)
        if self.on_states is not None:
            self.on_states(step, hidden if batch.features is None else batch.features)
        wanting = [index for index, row in enumerate(step.rows) if row.wants_more]
        prompt = self._prompt_logprobs(step, hidden, wanting)
        embeddings, bad_embeddings = self._pool(step, hidden, wanting)
        logprobs = self._given_logprobs(step, hidden, wanting)
        sampled, errors = self._sample(step, hidden, {} if bitmasks is None else bitmasks(), logprobs)
        return ModelRunnerOutput(
            sampled_token_ids=sampled,
            logprobs=logprobs,
            prompt_logprobs=prompt,
            embeddings=embeddings,
            errors=errors | bad_embeddings,
        )

    def forward(self, batch: ForwardBatch, *, captured: bool = True) -> torch.Tensor:
        """Hidden states [T, hidden] of a batch whose attention is ours: replayed, if the forward pass is captured."""
        if captured and self.program is not None:
            return self.program.replay(batch)
        self.attention.plan(batch)
        return self.model.forward(batch)

    def _copy_blocks(self, copies: list[BlockCopy]) -> None:
        if not copies:
            return
        src, dst, num_tokens = torch.tensor([(c.src, c.dst, c.num_tokens) for c in copies], device=self.device).unbind(
            1
        )
        for kv_cache in self.kv_caches:
            self.model.kernels.copy_blocks(kv_cache, src, dst, num_tokens)

    def _forward_batch(self, step: StepInputs) -> ForwardBatch:
        def to_device(array: npt.NDArray[Any]) -> torch.Tensor:
            tensor = torch.from_numpy(array)
            return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)

        return ForwardBatch(
            token_ids=to_device(step.token_ids),
            positions=to_device(step.positions),
            slot_mapping=to_device(step.slot_mapping),
            block_table=to_device(step.block_table),
            seq_lens=to_device(step.seq_lens),
            query_start_loc=to_device(step.query_start_loc),
            kv_caches=self.kv_caches,
            attention=self.attention,
            features=self._features(len(step.token_ids)),
            adapter_rows=_adapter_rows(step),
            image_rows=self._image_rows(step),
        )

    def _image_rows(self, step: StepInputs) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows of the step that are read of images, and what they are; a tile is encoded when its first row comes."""
        rows: list[int] = []
        embeddings: list[torch.Tensor] = []
        for index, row in enumerate(step.rows):
            if not row.tiles:
                continue
            begin, end = step.num_computed_tokens[index], int(step.seq_lens[index])
            first_row = int(step.query_start_loc[index]) - begin
            for tile in row.tiles:
                encoded = row.encoded_tiles.get(tile.start)
                if encoded is None and begin < tile.start + self._tokens_per_tile and tile.start < end:
                    encoded = row.encoded_tiles[tile.start] = self._encode(tile)
                if encoded is None:
                    continue
                start, stop = max(begin, tile.start), min(end, tile.start + len(encoded))
                rows += range(first_row + start, first_row + stop)
                embeddings.append(encoded[start - tile.start : stop - tile.start])
                if stop == tile.start + len(encoded):
                    del row.encoded_tiles[tile.start]
        if not rows:
            return None
        return torch.tensor(rows, device=self.device), torch.cat(embeddings)

    def _encode(self, tile: ImageTile) -> torch.Tensor:
        assert self.model.config.vision is not None
        size = self.model.config.vision.image_size
        pixels = torch.frombuffer(bytearray(tile.pixels), dtype=torch.uint8).view(size, size, 3)
        return self.model.embed_tile(pixels.to(self.device))

    def _features(self, num_tokens: int) -> torch.Tensor | None:
        size = len(self.model.feature_layers) * self.model.config.hidden_size
        dtype = self.model.kernels.activation_dtype
        return torch.empty(num_tokens, size, dtype=dtype, device=self.device) if size else None

    def _sample(
        self,
        step: StepInputs,
        hidden: torch.Tensor,
        bitmasks: dict[str, npt.NDArray[np.int32]],
        reported: dict[str, list[TokenLogprobs]],
    ) -> tuple[dict[str, list[int]], dict[str, str]]:
        """Sampled tokens, and what is wrong with requests that have none; log-probabilities are added to `reported`."""
        rows: list[RequestRow] = []
        # The places that tokens are sampled for: their rows, how many drafts are before them, their hidden states.
        owners: list[RequestRow] = []
        num_before: list[int] = []
        states: list[int] = []
        for row, samples, end in zip(step.rows, step.samples.tolist(), step.query_start_loc[1:].tolist(), strict=True):
            if samples and row.pooling is None:
                rows.append(row)
                for num_drafts in range(row.num_drafts + 1) if row.num_drafts else (0,):
                    owners.append(row)
                    num_before.append(num_drafts)
                    states.append(end - 1 - row.num_drafts + num_drafts)
        others = [place for place, row in enumerate(owners) if not row.is_plain_greedy]
        plain = [place for place, row in enumerate(owners) if row.is_plain_greedy] if others else range(len(owners))
        chosen: list[int | None] = [None] * len(owners)
        logprobs: dict[int, TokenLogprobs | None] = {}
        if plain:
            places = [(owners[place], num_before[place]) for place in plain] if bitmasks else []
            of_plain = hidden if len(plain) == len(hidden) else hidden[[states[place] for place in plain]]
            for place, found in zip(plain, self.model.greedy_tokens(of_plain, _allowed(places, bitmasks)), strict=True):
                chosen[place] = found if found >= 0 else None
        if others:
            logits = self.model.compute_logits(hidden[[states[place] for place in others]])  # [n, V] float32
            sampling_rows = [self._sampling_row(owners[place], num_before[place], bitmasks) for place in others]
            for place, token_id, logprob in zip(others, *self.sampler.sample(logits, sampling_rows), strict=True):
                chosen[place], logprobs[place] = token_id, logprob
        sampled: dict[str, list[int]] = {}
        errors: dict[str, str] = {}
        first = 0
        for row in rows:
            draft: list[int] = []
            if row.num_drafts:
                draft = self.input_batch.tokens(row, row.num_tokens, row.num_tokens + row.num_drafts).tolist()
            kept = _standing(chosen, first, draft)
            if kept:
                self.input_batch.append_sampled(row, kept)
                sampled[row.request_id] = kept
            else:  # behind drafts that stand it is no error: the answer has ended, or the next step will say so
                errors[row.request_id] = NO_TOKEN
            if row.wants_more:
                of_kept = [logprobs.get(place) for place in range(first, first + len(kept))]
                reported.setdefault(row.request_id, []).extend(logprob for logprob in of_kept if logprob is not None)
            first += row.num_drafts + 1
        return sampled, errors

    def _pool(
        self, step: StepInputs, hidden: torch.Tensor, wanting: list[int]
    ) -> tuple[dict[str, bytes], dict[str, str]]:
        """The vectors of pooling requests that end in this step, and what is wrong with those that have none."""
        embeddings: dict[str, bytes] = {}
        errors: dict[str, str] = {}
        for index in wanting:
            row = step.rows[index]
            if row.pooling is None:
                continue
            states = hidden[int(step.query_start_loc[index]) : int(step.query_start_loc[index + 1])]
            if row.pooling == "last":
                pooled = states[-1]
            else:
                # In float64 the order of summation, and so how a prompt was split, is far below what float32 shows.
                chunk_sum = states.sum(0, dtype=torch.float64)
                row.hidden_sum = chunk_sum if row.hidden_sum is None else row.hidden_sum + chunk_sum
                pooled = row.hidden_sum / row.num_tokens
            if not step.samples[index]:
                continue
            vector = pooled.to("cpu", torch.float32).numpy().astype("<f4")
            if np.isfinite(vector).all():
                embeddings[row.request_id] = vector.tobytes()
            else:
                errors[row.request_id] = NO_EMBEDDING
        return embeddings, errors

    def _sampling_row(
        self, row: RequestRow, num_drafts: int, bitmasks: dict[str, npt.NDArray[np.int32]]
    ) -> SamplingRow:
        """What is sampled behind the request's tokens and so many of its drafts."""
        num_tokens = row.num_tokens + num_drafts
        tokens = self.input_batch.tokens(row, 0, num_tokens)
        rows = bitmasks.get(row.request_id)
        return SamplingRow(
            sampling=row.sampling,
            prompt_token_ids=tokens[: row.num_prompt_tokens],
            output_token_ids=tokens[row.num_prompt_tokens :],
            stop_token_ids=row.stop_token_ids,
            position=num_tokens,
            seed_key=row.seed,
            allowed=None if rows is None else rows[num_drafts],
        )

    def _prompt_logprobs(
        self, step: StepInputs, hidden: torch.Tensor, wanting: list[int]
    ) -> dict[str, list[TokenLogprobs]]:
        """Log-probabilities of the prompt tokens that follow those computed in this step."""
        reported: dict[str, list[TokenLogprobs]] = {}
        for index in wanting:
            row = step.rows[index]
            num_top = row.sampling.prompt_logprobs
            if num_top is not None:
                first = step.num_computed_tokens[index] + 1
                end = min(int(step.seq_lens[index]) + 1, row.num_prompt_tokens)
                if first < end:
                    reported[row.request_id] = self._logprobs_of(step, index, hidden, first, end, num_top)
        return reported

    def _given_logprobs(
        self, step: StepInputs, hidden: torch.Tensor, wanting: list[int]
    ) -> dict[str, list[TokenLogprobs]]:
        """Log-probabilities of output tokens that nobody sampled and whose predecessors are computed in this step."""
        reported: dict[str, list[TokenLogprobs]] = {}
        for index in wanting:
            row = step.rows[index]
            num_top = row.sampling.logprobs
            if num_top is None or row.pooling is not None:
                continue
            first = max(step.num_computed_tokens[index] + 1, row.num_reported_tokens)
            end = min(int(step.seq_lens[index]) + 1, row.num_tokens)
            if first < end:
                reported[row.request_id] = self._logprobs_of(step, index, hidden, first, end, num_top)
                row.num_reported_tokens = end
        return reported

    def _logprobs_of(
        self, step: StepInputs, index: int, hidden: torch.Tensor, first: int, end: int, num_top: int
    ) -> list[TokenLogprobs]:
        """Log-probabilities of a request's tokens [first, end), whose predecessors are computed in this step."""
        row = step.rows[index]
        start = int(step.query_start_loc[index]) + first - 1 - step.num_computed_tokens[index]
        return prompt_logprobs(
            self.model.compute_logits,
            hidden[start : start + end - first],
            self.input_batch.tokens(row, first, end).tolist(),
            num_top,
            native=self.native_sampler,
            named=row.sampling.logprob_token_ids,
        )


def _standing(chosen: list[int | None], first: int, draft: list[int]) -> list[int]:
    """Of what was chosen from place `first` on, what stands: a draft does where it is what was chosen anyway."""
    token_id = chosen[first]
    if token_id is None:
        return []
    kept = [token_id]
    for place, expected in enumerate(draft, first):
        token_id = chosen[place + 1]
        if chosen[place] != expected or token_id is None:
            break
        kept.append(token_id)
    return kept


def _adapter_rows(step: StepInputs) -> list[tuple[int, slice]]:
    """The rows of each request with an adapter."""
    starts = step.query_start_loc.tolist()
    places = zip(step.rows, starts, starts[1:], strict=False)
    return [(row.adapter_id, slice(start, end)) for row, start, end in places if row.adapter_id]


def _allowed(
    places: Sequence[tuple[RequestRow, int]], bitmasks: dict[str, npt.NDArray[np.int32]]
) -> torch.Tensor | None:
    """The masks of requests' draft tokens, or of the ones behind, [n, W] int32; None where no request has one."""
    masks = [bitmasks.get(row.request_id) for row, _ in places]
    known = next((mask for mask in masks if mask is not None), None)
    if known is None:
        return None
    rows = np.full((len(places), known.shape[1]), -1, np.int32)
    for index, ((_, position), mask) in enumerate(zip(places, masks, strict=True)):
        if mask is not None:
            rows[index] = mask[position]
    return torch.from_numpy(rows)
