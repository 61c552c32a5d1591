"""From logits to tokens and their log-probabilities, one independent row a request.

Order: logit_bias, the masks (of a grammar, allowed_token_ids, bad_words and min_tokens; a token needs the consent of
all), penalties, temperature, top_k, top_p, min_p. Then one uniform number, a hash of (seed key, position), is looked up
in the cumulative distribution of what is left. There is no generator with state, so a seeded request draws the same
tokens in any company and after any preemption. Log-probabilities are of the logits as they came.

The arithmetic of a row is its own. On the host csrc/sample.h does it; without that library, or for logits on another
device, numpy does, in float64 and row by row, but for the largest logit and the log-softmax, which torch computes
row-locally. Both adjust the same float32 logits, few of them, here first. Which tokens are allowed is one bit each:
csrc/sample.h applies them as it reads, torch to all rows at once and first, as neither bias nor penalty moves -inf.
They draw the same token from the same number, unless that number is within rounding of the boundary between two tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kitfox.outputs import TokenLogprobs
from kitfox.request import SamplingParams
from kitfox.sampling.native_sampler import SAMPLE_ROW, NativeSampler, row_addresses

Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]

# Sorting the whole vocabulary is the exception: these many best tokens nearly always hold all of top_p.
_NUM_CANDIDATES = 1024
# Rows of float32 logits held at once while computing log-probabilities.
_LOGPROB_CHUNK_BYTES = 64 * 2**20
_MASK_64 = 2**64 - 1


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler needs to know about one request.

    Attributes:
        prompt_token_ids, output_token_ids: what penalties count; output_token_ids also tells whether min_tokens is met
            and which token would complete a bad sequence.
        stop_token_ids: masked until there are min_tokens of output.
        position: of the token to be sampled, counted from the start of the prompt.
        seed_key: the request's seed, or a random number that the runner keeps for the request's life.
        allowed: the tokens a grammar allows, [ceil(V / 32)] contiguous, V as the logits have it: one bit a token, least
            significant first, and bits past V count for nothing. None is all of them.
    """

    sampling: SamplingParams
    prompt_token_ids: Sequence[int] | Ids
    output_token_ids: Sequence[int] | Ids
    stop_token_ids: tuple[int, ...]
    position: int
    seed_key: int
    allowed: Words | None = None

    @cached_property
    def masks_stop_tokens(self) -> bool:
        return len(self.output_token_ids) < self.sampling.min_tokens and bool(self.stop_token_ids)

    @cached_property
    def masked_token_ids(self) -> list[int]:
        """Tokens that min_tokens forbids, or that would complete a bad sequence."""
        masked = list(self.stop_token_ids) if self.masks_stop_tokens else []
        sequences = self.sampling.bad_token_sequences
        if sequences:
            longest = max(map(len, sequences))
            tail = tuple(_as_ids(self.output_token_ids)[-longest:].tolist())
            masked += [ids[-1] for ids in sequences if tail[max(len(tail) - len(ids) + 1, 0) :] == ids[:-1]]
        return masked

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether the logits of single tokens change."""
        return self.masks_stop_tokens or _adjusts_logits(self.sampling)

    @cached_property
    def is_plain_greedy(self) -> bool:
        """Whether all that is wanted is the index of the largest logit."""
        return self.allowed is None and not self.masks_stop_tokens and _is_plain_greedy(self.sampling)

    def allowed_words(self, vocab_size: int) -> Words | None:
        """What `allowed` and allowed_token_ids both allow, in the form of `allowed`; None for everything."""
        num_words = -(-vocab_size // 32)
        assert self.allowed is None or _is_bitmask(self.allowed, num_words), f"no bitmask of {vocab_size} tokens"
        if not self.sampling.allowed_token_ids:
            return self.allowed
        bits = np.zeros(num_words * 32, np.bool_)
        bits[list(self.sampling.allowed_token_ids)] = True
        words = np.packbits(bits, bitorder="little").view(np.int32)
        return words if self.allowed is None else words & self.allowed


def _is_bitmask(words: Words, num_words: int) -> bool:
    return words.shape == (num_words,) and words.dtype == np.int32 and words.flags.c_contiguous


# The row of every request of which `is_plain_greedy` holds: making 256 of them takes longer than choosing the tokens.
PLAIN_GREEDY = SamplingRow(SamplingParams(temperature=0.0), (), (), (), position=0, seed_key=0)


def is_plain_greedy(sampling: SamplingParams, stop_token_ids: tuple[int, ...]) -> bool:
    """Whether a request's row is plain and greedy at every position."""
    masks_stop_tokens = sampling.min_tokens > 0 and bool(stop_token_ids)
    return not masks_stop_tokens and _is_plain_greedy(sampling)


def _is_plain_greedy(sampling: SamplingParams) -> bool:
    asks_for_more = sampling.logprobs is not None or bool(sampling.allowed_token_ids) or _adjusts_logits(sampling)
    return sampling.is_greedy and not asks_for_more


def _adjusts_logits(sampling: SamplingParams) -> bool:
    return (
        bool(sampling.logit_bias)
        or bool(sampling.bad_token_sequences)
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

    def __init__(self, native: NativeSampler | None = None):
        """native: what to use for logits on the host."""
        self._native = native

    def sample(
        self, logits: Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """Choose a token for each row, greedily where its temperature is 0.

        Args:
            logits: [n, V] float32; not changed.
            rows: n.

        Returns:
            The tokens, and log-probabilities for the rows that ask. A row without a distribution (a NaN or +inf among
            its logits, masked or not, or no token left that may be chosen) has None for both; the others are
            unaffected.
        """
        assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} requests"
        if not rows:
            return [], []
        native = self._native if logits.device.type == "cpu" else None
        others = [i for i, row in enumerate(rows) if not row.is_plain_greedy]
        if native is None:
            tokens = _choose_all(logits, rows, others)
        else:
            logits = logits.contiguous()
            tokens = _choose_all_natively(native, logits, rows, others)
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        wanted = [i for i in others if rows[i].sampling.logprobs is not None and tokens[i] is not None]
        chosen = [token for token in (tokens[i] for i in wanted) if token is not None]
        num_top = [rows[i].sampling.logprobs or 0 for i in wanted]
        named = [rows[i].sampling.logprob_token_ids for i in wanted]
        for i, entry in zip(wanted, _token_logprobs(native, logits, wanted, chosen, num_top, named), strict=True):
            logprobs[i] = entry
        return tokens, logprobs


def _choose_all_natively(
    native: NativeSampler, logits: Tensor, rows: Sequence[SamplingRow], others: list[int]
) -> list[int | None]:
    """`others` are the rows that are not plain and greedy."""
    table = np.zeros(len(rows), SAMPLE_ROW)  # a temperature of 0 is greedy, no address of words allows everything
    table["logits"] = row_addresses(logits)
    allowed = _allowed_words(rows, others, logits.shape[1])
    table["allowed"][list(allowed)] = [words.ctypes.data for words in allowed.values()]
    drawing = [i for i in others if not rows[i].sampling.is_greedy]
    for name in ("temperature", "top_p", "min_p", "top_k"):
        table[name][drawing] = [getattr(rows[i].sampling, name) for i in drawing]
    table["uniform"][drawing] = [uniform(rows[i].seed_key, rows[i].position) for i in drawing]
    # Adjusted in place and put back afterwards: memory for a copy of a row takes longer to get than all the rest.
    adjusting = [i for i in others if rows[i].adjusts_logits]
    host_logits: Logits = logits.numpy()
    concerned = [_adjusted_ids(rows[i]) for i in adjusting]
    untouched = [host_logits[i, ids].copy() for i, ids in zip(adjusting, concerned, strict=True)]
    try:
        for i in adjusting:
            _adjust(host_logits[i], rows[i])
        return native.sample(table, logits.shape[1])
    finally:
        for i, ids, values in zip(adjusting, concerned, untouched, strict=True):
            host_logits[i, ids] = values


def _choose_all(logits: Tensor, rows: Sequence[SamplingRow], others: list[int]) -> list[int | None]:
    """`others` are the rows that are not plain and greedy."""
    allowed = _allowed_words(rows, others, logits.shape[1])
    if allowed:
        logits = _masked(logits, list(allowed), np.stack(list(allowed.values())))
    largest, best = logits.max(dim=-1)  # NaN wins every comparison
    tokens: list[int | None] = [
        token if valid else None for token, valid in zip(best.tolist(), largest.isfinite().tolist(), strict=True)
    ]
    on_host = [i for i in others if rows[i].adjusts_logits or not rows[i].sampling.is_greedy]
    if on_host:
        host_rows = logits[on_host].cpu().numpy()  # indexing copies
        for i, host_row in zip(on_host, host_rows, strict=True):
            _adjust(host_row, rows[i])
            tokens[i] = _choose(host_row.astype(np.float64), rows[i])
    return tokens


def _allowed_words(rows: Sequence[SamplingRow], others: list[int], vocab_size: int) -> dict[int, Words]:
    """Of the rows that forbid tokens with a mask, by their indices."""
    words = {i: rows[i].allowed_words(vocab_size) for i in others}
    return {i: allowed for i, allowed in words.items() if allowed is not None}


def _masked(logits: Tensor, indices: list[int], allowed: Words) -> Tensor:
    """Logits [n, V] with -inf for all that allowed [m, ceil(V / 32)] forbids in the m rows `indices`.

    A logit that is NaN or +inf stays what it is, as in `_adjust`.
    """
    packed = torch.from_numpy(allowed.view(np.uint8)).to(logits.device)  # [m, 4 * ceil(V / 32)]
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    is_forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    rows = logits[indices]
    return logits.index_copy(
        0, torch.tensor(indices, device=logits.device), rows.masked_fill(is_forbidden & (rows < torch.inf), -torch.inf)
    )


def _choose(logits: Floats, row: SamplingRow) -> int | None:
    """Choose one token from one row's adjusted logits [V], which it may change; None when no token may be chosen."""
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


def _adjust(logits: Logits, row: SamplingRow) -> None:
    """Apply logit_bias, the masks that name tokens and penalties to one row [V]; touches what `_adjusted_ids` says.

    A logit that is NaN or +inf stays one of the two, so that the row is still seen to have no distribution.
    """
    sampling = row.sampling
    if sampling.logit_bias:
        logits[list(sampling.logit_bias)] += np.array(list(sampling.logit_bias.values()))
    if row.masked_token_ids:
        with np.errstate(invalid="ignore"):
            logits[row.masked_token_ids] -= np.inf
    if sampling.repetition_penalty != 1.0:
        seen = np.concatenate((_as_ids(row.prompt_token_ids), _as_ids(row.output_token_ids)))
        values = logits[seen]  # a token that occurs twice is written twice, not penalised twice
        penalty = sampling.repetition_penalty
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        used, counts = np.unique(_as_ids(row.output_token_ids), return_counts=True)
        logits[used] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _adjusted_ids(row: SamplingRow) -> Ids:
    """All ids, some of them more than once, whose logits `_adjust` may change."""
    sampling = row.sampling
    concerned = [_as_ids(list(sampling.logit_bias)), _as_ids(row.output_token_ids), _as_ids(row.masked_token_ids)]
    if sampling.repetition_penalty != 1.0:
        concerned.append(_as_ids(row.prompt_token_ids))
    return np.concatenate(concerned)


def _as_ids(token_ids: Sequence[int] | Ids) -> Ids:
    return np.asarray(token_ids, dtype=np.int64)


def _filter(logits: Floats, sampling: SamplingParams) -> tuple[Floats, Ids | None]:
    """Apply top_k, top_p and min_p to one row whose largest logit is 0.

    Returns:
        Weights (not normalised) of the tokens that are left, and their ids; ids None means all of the vocabulary.
    """
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


def _rows_per_chunk(vocab_size: int) -> int:
    return max(1, _LOGPROB_CHUNK_BYTES // (4 * vocab_size))


def _token_logprobs(
    native: NativeSampler | None,
    logits: Tensor,
    indices: Sequence[int],
    token_ids: Sequence[int],
    num_top: Sequence[int],
    named: Sequence[tuple[int, ...]],
) -> list[TokenLogprobs]:
    """Log-probabilities of one token, the num_top[i] best and the tokens named[i] of the rows `indices` of logits.

    A token's rank is one more than the number of tokens that are more likely. logits is [n, V] float32.
    """
    if not indices:
        return []
    if native is not None:
        result = native.logprobs(logits, indices, token_ids, num_top)
    else:
        result = _torch_logprobs(logits, indices, token_ids, num_top)
    for position, ids in enumerate(named):
        if ids:
            values = torch.log_softmax(logits[indices[position]], dim=-1)[list(ids)].tolist()
            result[position] = msgspec.structs.replace(result[position], named_logprobs=values)
    return result


def _torch_logprobs(
    logits: Tensor, indices: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    result: list[TokenLogprobs] = []
    chunk = _rows_per_chunk(logits.shape[1])
    for start in range(0, len(indices), chunk):
        part = slice(start, start + chunk)
        logprobs = torch.log_softmax(logits[indices[part]], dim=-1)
        own = logprobs.gather(1, torch.tensor(token_ids[part], device=logits.device)[:, None])  # [m, 1]
        ranks = (logprobs > own).sum(-1) + 1
        best = logprobs.topk(min(max(num_top[part]), logprobs.shape[1]), dim=-1)
        columns = (own[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist())
        result += [
            TokenLogprobs(token_id, logprob, rank, top_ids[:count], top_logprobs[:count])
            for count, token_id, logprob, rank, top_ids, top_logprobs in zip(
                num_top[part], token_ids[part], *columns, strict=True
            )
        ]
    return result


def prompt_logprobs(
    logits_fn: Callable[[Tensor], Tensor],
    hidden: Tensor,
    target_ids: Sequence[int],
    num_top: int,
    native: NativeSampler | None = None,
    named: tuple[int, ...] = (),
) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens, in chunks of rows so that all logits never exist at once.

    Args:
        logits_fn: hidden states [m, I] to logits [m, V].
        hidden: [n, I]; row i predicts target_ids[i].
        target_ids: n.
        num_top: how many of the best tokens to report at each position; 0 means none.
        native: what to use for logits on the host.
        named: further tokens to report at each position.

    Returns:
        One entry a target. Where logits are NaN, so are the log-probabilities.
    """
    assert len(target_ids) == hidden.shape[0], f"{len(target_ids)} targets for {hidden.shape[0]} hidden states"
    result: list[TokenLogprobs] = []
    chunk = 16  # the first chunk shows how large a row is
    while len(result) < len(target_ids):
        part = slice(len(result), len(result) + chunk)
        logits = logits_fn(hidden[part]).float().contiguous()
        num_rows = logits.shape[0]
        on_host = native if logits.device.type == "cpu" else None
        counts, ids = [num_top] * num_rows, [named] * num_rows
        result += _token_logprobs(on_host, logits, range(num_rows), target_ids[part], counts, ids)
        chunk = _rows_per_chunk(logits.shape[1])
    return result
