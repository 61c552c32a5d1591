"""From logits to tokens and their log-probabilities, one independent row a request.

Order: logit_bias, the mask of min_tokens, penalties, temperature, top_k, top_p, min_p. Then one uniform number, a hash
of (seed key, position), is looked up in the cumulative distribution of what is left. There is no generator with state,
so a seeded request draws the same tokens in any company and after any preemption.

The arithmetic of a row is its own: it is done in float64 on the host, row by row, except for the largest logit and
the log-softmax, which torch computes row-locally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kitfox.outputs import TokenLogprobs
from kitfox.request import SamplingParams

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

# Sorting the whole vocabulary is the exception: these many best tokens nearly always hold all of top_p.
_NUM_CANDIDATES = 1024
# Rows of float32 logits held at once while computing log-probabilities.
_LOGPROB_CHUNK_BYTES = 64 * 2**20
_MASK_64 = 2**64 - 1


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler needs to know about one request.

    Attributes:
        prompt_token_ids, output_token_ids: what penalties count; output_token_ids also tells whether min_tokens is met.
        stop_token_ids: masked until there are min_tokens of output.
        position: of the token to be sampled, counted from the start of the prompt.
        seed_key: the request's seed, or a random number that the runner keeps for the request's life.
    """

    sampling: SamplingParams
    prompt_token_ids: Sequence[int] | Ids
    output_token_ids: Sequence[int] | Ids
    stop_token_ids: tuple[int, ...]
    position: int
    seed_key: int

    @property
    def masks_stop_tokens(self) -> bool:
        return len(self.output_token_ids) < self.sampling.min_tokens and bool(self.stop_token_ids)

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything but temperature and filters changes the logits."""
        sampling = self.sampling
        return (
            bool(sampling.logit_bias)
            or self.masks_stop_tokens
            or sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )


def uniform(seed_key: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) that depends on nothing but its arguments; `stream` separates several draws at a position.

    Source: the SplitMix64 finaliser, https://doi.org/10.1145/2660193.2660195, chained over the three numbers.
    """
    state = 0
    for word in (seed_key, position, stream):
        state = (state + (word & _MASK_64) + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return (state >> 12) * 2.0**-52


class Sampler:
    """Chooses one token a row. It has no state."""

    def sample(
        self, logits: Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """Choose a token for each row, greedily where its temperature is 0.

        Args:
            logits: [n, V] float32; not changed.
            rows: n.

        Returns:
            The tokens, and log-probabilities for the rows that ask. A row without a distribution (a NaN or +inf among
            its logits, or no token left that may be chosen) has None for both; the others are unaffected.
        """
        assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} requests"
        if not rows:
            return [], []
        largest, best = logits.max(dim=-1)  # NaN wins every comparison
        is_distribution = largest.isfinite().tolist()
        tokens: list[int | None] = [
            token if valid else None for token, valid in zip(best.tolist(), is_distribution, strict=True)
        ]
        chosen = [i for i, row in enumerate(rows) if is_distribution[i] and not _is_plain_greedy(row)]
        if chosen:
            host_rows = logits[chosen].cpu().numpy()
            for i, host_row in zip(chosen, host_rows, strict=True):
                tokens[i] = _choose(host_row.astype(np.float64), rows[i])
        return tokens, _sampled_logprobs(logits, rows, tokens)


def _is_plain_greedy(row: SamplingRow) -> bool:
    return row.sampling.is_greedy and not row.adjusts_logits


def _choose(logits: Floats, row: SamplingRow) -> int | None:
    """Choose one token from one row's logits [V], which it may change; None when no token may be chosen."""
    if row.adjusts_logits:
        _adjust(logits, row)
    best = int(logits.argmax())
    if not math.isfinite(logits[best]):
        return None
    if row.sampling.is_greedy:
        return best
    # Subtract first: a tiny temperature must not turn large logits into infinities.
    logits -= logits[best]
    with np.errstate(over="ignore"):
        logits /= row.sampling.temperature
    weights, ids = _filter(logits, row.sampling)
    cumulative = weights.cumsum()
    index = int(cumulative.searchsorted(uniform(row.seed_key, row.position) * cumulative[-1], side="right"))
    return index if ids is None else int(ids[index])


def _adjust(logits: Floats, row: SamplingRow) -> None:
    """Apply logit_bias, the mask of min_tokens and penalties to one row; changes logits."""
    sampling = row.sampling
    if sampling.logit_bias:
        logits[list(sampling.logit_bias)] += list(sampling.logit_bias.values())
    if row.masks_stop_tokens:
        logits[list(row.stop_token_ids)] = -np.inf
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate((_as_ids(row.prompt_token_ids), _as_ids(row.output_token_ids))))
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        used, counts = np.unique(_as_ids(row.output_token_ids), return_counts=True)
        logits[used] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _as_ids(token_ids: Sequence[int] | Ids) -> Ids:
    return np.asarray(token_ids, dtype=np.int64)


def _filter(logits: Floats, sampling: SamplingParams) -> tuple[Floats, Ids | None]:
    """Apply top_k, top_p and min_p to one row whose largest logit is 0.

    Returns:
        Weights (not normalised) of the tokens that are left, and their ids; ids None means all of the vocabulary.
    """
    vocab_size = logits.shape[0]
    vocab_size = logits.shape[0]
    top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
    if not top_k and sampling.top_p >= 1.0:
        weights = np.exp(logits)
        if sampling.min_p == 0.0:
            return weights, None
        ids = np.flatnonzero(weights >= sampling.min_p)
        return weights[ids], ids
    largest = _largest(logits, top_k or _NUM_CANDIDATES)
    num_kept = len(largest)
    if sampling.top_p < 1.0:
        mass = sampling.top_p * np.exp(largest if top_k else logits).sum()
        num_kept = _num_reaching(mass, largest)
        if num_kept > len(largest) and not top_k:
            largest = _largest(logits, vocab_size)
            num_kept = _num_reaching(mass, largest)
        num_kept = min(num_kept, len(largest))  # rounding may leave the sum of all just below the mass
    if sampling.min_p > 0.0:
        num_kept = min(num_kept, int(np.count_nonzero(np.exp(largest) >= sampling.min_p)))
    ids = _ids_of_largest(logits, num_kept, largest[num_kept - 1])
    return np.exp(logits[ids]), ids


def _largest(logits: Floats, count: int) -> Floats:
    """The `count` largest logits, in descending order."""
    if count < logits.shape[0]:
        logits = np.partition(logits, -count)[-count:]
    return np.sort(logits)[::-1]


def _num_reaching(mass: float, largest: Floats) -> int:
    """How many of the largest logits it takes to have a weight of at least `mass`; one more than all if they do not."""
    return int(np.exp(largest).cumsum().searchsorted(mass)) + 1


def _ids_of_largest(logits: Floats, count: int, smallest: float) -> Ids:
    """Ascending ids of the `count` largest logits, down to the value `smallest`; of equal ones the lowest ids."""
    ids = np.flatnonzero(logits >= smallest)
    surplus = len(ids) - count
    if surplus:
        ids = np.delete(ids, np.flatnonzero(logits[ids] == smallest)[-surplus:])
    return ids


def _sampled_logprobs(
    logits: Tensor, rows: Sequence[SamplingRow], tokens: list[int | None]
) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(rows)
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None and tokens[i] is not None]
    chunk = _rows_per_chunk(logits.shape[1])
    for start in range(0, len(wanted), chunk):
        part = wanted[start : start + chunk]
        token_ids = torch.tensor([tokens[i] for i in part], device=logits.device)
        num_top = [rows[i].sampling.logprobs or 0 for i in part]
        for i, logprobs in zip(part, _token_logprobs(logits[part], token_ids, num_top), strict=True):
            result[i] = logprobs
    return result


def _rows_per_chunk(vocab_size: int) -> int:
    return max(1, _LOGPROB_CHUNK_BYTES // (4 * vocab_size))


def _token_logprobs(logits: Tensor, token_ids: Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """Log-probabilities of one token and the num_top[i] best of each row of logits [n, V] float32.

    A token's rank is one more than the number of tokens that are more likely.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, token_ids[:, None])  # [n, 1]
    ranks = (logprobs > own).sum(-1) + 1
    best = logprobs.topk(min(max(num_top), logprobs.shape[1]), dim=-1)
    columns = (token_ids.tolist(), own[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist())
    return [
        TokenLogprobs(token_id, logprob, rank, top_ids[:count], top_logprobs[:count])
        for count, token_id, logprob, rank, top_ids, top_logprobs in zip(num_top, *columns, strict=True)
    ]


def prompt_logprobs(
    logits_fn: Callable[[Tensor], Tensor], hidden: Tensor, target_ids: Sequence[int] | Tensor, num_top: int
) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens, in chunks of rows so that all logits never exist at once.

    Args:
        logits_fn: hidden states [m, I] to logits [m, V].
        hidden: [n, I]; row i predicts target_ids[i].
        target_ids: n.
        num_top: how many of the best tokens to report at each position; 0 means none.

    Returns:
        One entry a target. Where logits are NaN, so are the log-probabilities.
    """
    targets = torch.as_tensor(target_ids, dtype=torch.int64, device=hidden.device)
    assert targets.shape[0] == hidden.shape[0], f"{targets.shape[0]} targets for {hidden.shape[0]} hidden states"
    result: list[TokenLogprobs] = []
    start, chunk = 0, 16  # the first chunk shows how large a row is
    while start < targets.shape[0]:
        logits = logits_fn(hidden[start : start + chunk]).float()
        part = targets[start : start + chunk]
        result += _token_logprobs(logits, part, [num_top] * part.shape[0])
        start += chunk
        chunk = _rows_per_chunk(logits.shape[1])
    return result
