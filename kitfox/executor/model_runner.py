"""SchedulerOutput -> ForwardBatch -> hidden states -> logits -> tokens. One step, top to bottom."""

from __future__ import annotations

import numpy as np
import torch

from kitfox.attention.backend import ForwardBatch, make_attention_backend
from kitfox.executor.input_batch import InputBatch, RequestRow, StepInputs
from kitfox.executor.step_program import StepProgram
from kitfox.kernels.native import NativeKernels
from kitfox.models import Model
from kitfox.outputs import TokenLogprobs
from kitfox.sampling.native_sampler import NativeSampler
from kitfox.sampling.sampler import Sampler, SamplingRow, prompt_logprobs
from kitfox.step import BlockCopy, ModelRunnerOutput, SchedulerOutput

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
        """kv_caches: one per layer, from the model's kernels."""
        self.model = model
        self.device = model.kernels.device
        self.attention = make_attention_backend(model.kernels)
        self.description = "eager steps"
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
    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step's tokens, writing their KV, and sample where a request's last token was computed."""
        self.input_batch.update(scheduled)
        self._copy_blocks(scheduled.block_copies)
        if not scheduled.num_scheduled_tokens:
            return ModelRunnerOutput()
        step = self.input_batch.gather(scheduled.num_scheduled_tokens)
        hidden = self.forward(self._forward_batch(step))
        prompt = self._prompt_logprobs(step, hidden)
        embeddings, bad_embeddings = self._pool(step, hidden)
        sampled, logprobs, errors = self._sample(step, hidden)
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
        def to_device(array: object) -> torch.Tensor:
            return torch.as_tensor(array).to(self.device, non_blocking=True)

        return ForwardBatch(
            token_ids=to_device(step.token_ids),
            positions=to_device(step.positions),
            slot_mapping=to_device(step.slot_mapping),
            block_table=to_device(step.block_table),
            seq_lens=to_device(step.seq_lens),
            query_start_loc=to_device(step.query_start_loc),
            kv_caches=self.kv_caches,
            attention=self.attention,
        )

    def _sample(
        self, step: StepInputs, hidden: torch.Tensor
    ) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]], dict[str, str]]:
        last_tokens = step.query_start_loc[1:] - 1
        rows, indices = [], []
        for row, samples, index in zip(step.rows, step.samples.tolist(), last_tokens.tolist(), strict=True):
            if samples and row.pooling is None:
                rows.append(row)
                indices.append(index)
        plain = [i for i, row in enumerate(rows) if row.is_plain_greedy]
        others = [i for i, row in enumerate(rows) if not row.is_plain_greedy]
        token_ids: list[int | None] = [None] * len(rows)
        reported: dict[str, list[TokenLogprobs]] = {}
        if plain:
            for i, largest in zip(plain, self.model.greedy_tokens(hidden[[indices[i] for i in plain]]), strict=True):
                token_ids[i] = largest if largest >= 0 else None
        if others:
            logits = self.model.compute_logits(hidden[[indices[i] for i in others]])  # [n, V] float32
            chosen, logprobs = self.sampler.sample(logits, [self._sampling_row(rows[i]) for i in others])
            for i, token_id, logprob in zip(others, chosen, logprobs, strict=True):
                token_ids[i] = token_id
                if logprob is not None:
                    reported[rows[i].request_id] = [logprob]
        sampled: dict[str, list[int]] = {}
        errors: dict[str, str] = {}
        for row, token_id in zip(rows, token_ids, strict=True):
            if token_id is None:
                errors[row.request_id] = NO_TOKEN
            else:
                self.input_batch.append_sampled(row, token_id)
                sampled[row.request_id] = [token_id]
        return sampled, reported, errors

    def _pool(self, step: StepInputs, hidden: torch.Tensor) -> tuple[dict[str, bytes], dict[str, str]]:
        """The vectors of pooling requests that end in this step, and what is wrong with those that have none."""
        embeddings: dict[str, bytes] = {}
        errors: dict[str, str] = {}
        for index, row in enumerate(step.rows):
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

    def _sampling_row(self, row: RequestRow) -> SamplingRow:
        tokens = self.input_batch.tokens(row, 0, row.num_tokens)
        return SamplingRow(
            sampling=row.sampling,
            prompt_token_ids=tokens[: row.num_prompt_tokens],
            output_token_ids=tokens[row.num_prompt_tokens :],
            stop_token_ids=row.stop_token_ids,
            position=row.num_tokens,
            seed_key=row.seed,
        )

    def _prompt_logprobs(self, step: StepInputs, hidden: torch.Tensor) -> dict[str, list[TokenLogprobs]]:
        """Log-probabilities of the prompt tokens that follow those computed in this step."""
        reported: dict[str, list[TokenLogprobs]] = {}
        for index, row in enumerate(step.rows):
            num_top = row.sampling.prompt_logprobs
            if num_top is None:
                continue
            first = row.num_computed_tokens
            end = min(int(step.seq_lens[index]), row.num_prompt_tokens - 1)
            if first >= end:
                continue
            start = int(step.query_start_loc[index])
            targets = self.input_batch.tokens(row, first + 1, end + 1).tolist()
            reported[row.request_id] = prompt_logprobs(
                self.model.compute_logits,
                hidden[start : start + end - first],
                targets,
                num_top,
                native=self.native_sampler,
                named=row.sampling.logprob_token_ids,
            )
        return reported
