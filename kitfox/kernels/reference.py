"""The definition of every op, in plain PyTorch, for CPU and CUDA tensors.

Batch invariance: on CPU a row of a result has the same bits whatever else is in the batch, for a given thread count.
Three rules keep it so. Matrix products have one shape: BLAS picks its kernel, and so its order of summation, by the
number of rows, hence `linear` works in tiles of `ROW_TILE` rows and pads the last one. Attention works in tiles that
are aligned to absolute positions, `QUERY_TILE` queries by `KEY_TILE` keys, merged in ascending order. And a
transcendental is always `exp`, `tanh` or `erf` on its own: composed ops (silu, gelu, sigmoid) compute the last elements
of a vector loop with another formula than the rest, so that an element's bits would depend on where it lies.

On CUDA `linear` is one cuBLAS call and its bits may depend on the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kitfox.config import ModelConfig, RopeScaling
from kitfox.errors import UnsupportedModelError

# Rows are padded to this many: a decode pays for the padding, a prefill for reading the weight once a tile.
ROW_TILE = 16
QUERY_TILE = 4
KEY_TILE = 256
_CACHE_LINE_BYTES = 64
# Finite, so that a tile in which a row sees nothing leaves that row's running maximum and sums as they were.
_LOWEST_SCORE = -1e30


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply each row by a matrix: `x @ weight.T + bias`.

    Args:
        x: [T, I].
        weight: [O, I], dtype of x.
        bias: [O] or None.

    Returns:
        [T, O], dtype of x.
    """
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    num_rows = x.shape[0]
    x = x.contiguous()
    if x.data_ptr() % _CACHE_LINE_BYTES:  # BLAS may sum in another order when its operand is not aligned
        x = x.clone()
    out = x.new_empty(num_rows, weight.shape[0])
    columns = weight.t()
    full = num_rows - num_rows % ROW_TILE
    for start in range(0, full, ROW_TILE):
        torch.mm(x[start : start + ROW_TILE], columns, out=out[start : start + ROW_TILE])
    if full < num_rows:
        tail = x.new_zeros(ROW_TILE, x.shape[1])
        tail[: num_rows - full] = x[full:]
        out[full:] = torch.mm(tail, columns)[: num_rows - full]
    return out if bias is None else out.add_(bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Scale the last dimension to unit root mean square, then by `offset + weight`.

    Args:
        x: [..., I]; computed in float32.
        weight: [I].
        offset: 1.0 for families that store the weight minus one (Gemma).

    Returns:
        Shape and dtype of x.

    Source: https://arxiv.org/abs/1910.07467.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (offset + weight.float())).to(x.dtype)


def rotary_tables(config: ModelConfig, *, local: bool, device: torch.device | str) -> Tensor:
    """Compute the cosine and sine of every position's rotary angles.

    Args:
        local: for sliding layers: `rope_local_theta` where the model has one, and never scaled.

    Returns:
        [max_position_embeddings, 2, D / 2] float32: cosines at [:, 0], sines at [:, 1].

    Raises:
        UnsupportedModelError: the scaling is of a kind kitfox does not have.

    Source: https://arxiv.org/abs/2104.09864.
    """
    theta = config.rope_local_theta if local and config.rope_local_theta is not None else config.rope_theta
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse_frequencies = 1.0 / (theta**exponents)
    magnitude = 1.0
    if config.rope_scaling is not None and not local:
        inverse_frequencies, magnitude = _scale_frequencies(inverse_frequencies, config.rope_scaling, theta)
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float32)[:, None] * inverse_frequencies
    return (torch.stack((angles.cos(), angles.sin()), dim=1) * magnitude).to(device)


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling, theta: float) -> tuple[Tensor, float]:
    """Stretch [D / 2] rotary frequencies; returns them and the factor on cosines and sines."""
    if scaling.kind == "default":
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _scale_llama3(frequencies, scaling), 1.0
    if scaling.kind == "yarn":
        return _scale_yarn(frequencies, scaling, theta), 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0
    raise UnsupportedModelError(
        f"rope scaling must be one of linear, llama3, yarn. Given: {scaling.kind!r}", param="rope_scaling"
    )


def _scale_llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, blend between.

    Source: the Llama 3.1 release, https://arxiv.org/abs/2407.21783 and its published configuration.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _scale_yarn(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Interpolate the dimensions that turn less than once in the original context, keep those that turn 32 times.

    Source: https://arxiv.org/abs/2309.00071, section 3.2, with alpha 1 and beta 32.
    """
    half = frequencies.shape[0]

    def dimension(turns: float) -> float:
        return half * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(dimension(32.0)), 0)
    high = min(math.ceil(dimension(1.0)), 2 * half - 1)
    interpolated = ((torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return interpolated * frequencies / scaling.factor + (1 - interpolated) * frequencies


def apply_rotary(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rotate each head's halves by its token's angles (element i pairs with i + D / 2), in float32.

    Args:
        x: [T, H, D].
        table: from `rotary_tables`.
        positions: [T] int64.

    Returns:
        [T, H, D], dtype of x.
    """
    cos, sin = table[positions].unsqueeze(2).unbind(1)  # each [T, 1, D / 2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
}


def act_and_mul(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """Compute `act(gate) * up`, in float32.

    Args:
        gate, up: [T, I].
        act: "silu", "gelu" or "gelu_pytorch_tanh".

    Returns:
        [T, I], dtype of gate.

    Raises:
        UnsupportedModelError: act is none of them.
    """
    return (activation(act)(gate.float()) * up.float()).to(gate.dtype)


def activation(act: str) -> Callable[[Tensor], Tensor]:
    """The function "silu", "gelu" or "gelu_pytorch_tanh".

    Raises:
        UnsupportedModelError: act is none of them.
    """
    if act not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act must be one of {', '.join(_ACTIVATIONS)}. Given: {act!r}", param="hidden_act"
        )
    return _ACTIVATIONS[act]


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Look up rows of weight [V, I] for ids [T] int64; returns [T, I]."""
    return weight[ids]


def to_fixed_point(x: Tensor) -> tuple[Tensor, Tensor]:
    """How a cache of int16 keeps the numbers of a head: codes times a scale that is a power of two.

    Args:
        x: [..., D] float32.

    Returns:
        Codes [..., D] int16, at most 2048, and log2 of their scale [..., 1] float32, NaN where a number is not finite.
    """
    largest = x.abs().amax(-1, keepdim=True)
    scale_log = (torch.frexp(largest).exponent - 11).clamp(min=-40).float()
    codes = torch.round(torch.ldexp(x, -scale_log)).nan_to_num(0.0, 0.0, 0.0).to(torch.int16)
    return codes, torch.where(x.isfinite().all(-1, keepdim=True), scale_log, torch.nan)


def write_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store this step's keys and values in their slots; changes kv_cache.

    Args:
        k, v: [T, K, D].
        kv_cache: [N, 2, S, K, D].
        slot_mapping: [T] int64, block_id * S + offset.
    """
    block_size = kv_cache.shape[2]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    kv_cache[block_ids, 0, offsets] = k.to(kv_cache.dtype)
    kv_cache[block_ids, 1, offsets] = v.to(kv_cache.dtype)


def copy_blocks(kv_cache: Tensor, src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
    """Copy the first num_tokens[i] slots of block src[i] into block dst[i]; changes kv_cache.

    All copies read before any writes. Each block is at most once a destination.

    Args:
        kv_cache: [N, 2, S, K, D].
        src, dst, num_tokens: [n] int64.
    """
    offsets = torch.arange(kv_cache.shape[2], device=kv_cache.device)
    copied = (offsets < num_tokens[:, None])[:, None, :, None, None]
    kv_cache[dst] = torch.where(copied, kv_cache[src], kv_cache[dst])


class AttentionPlan:
    """Which query tiles there are in a step and which cache rows their key tiles read; the same for every layer.

    A query tile is `QUERY_TILE` consecutive positions of one request starting at a multiple of `QUERY_TILE`; rows that
    the step does not compute are padding. Requests with one query tile (decodes) share batched products; a request with
    several shares its keys among them.
    """

    def __init__(self, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, block_size: int):
        """See `paged_attention` for the arguments. Reads lengths back to the host once when they live on a device."""
        begins, ends = query_start_loc.long().cpu().unfold(0, 2, 1).unbind(1)
        lengths = seq_lens.long().cpu()
        first_tiles = (lengths - (ends - begins)) // QUERY_TILE
        num_tiles = (lengths - 1) // QUERY_TILE - first_tiles + 1

        def group(requests: Tensor, tiles: Tensor) -> QueryGroup:
            bases = tiles * QUERY_TILE
            positions = bases[:, None] + torch.arange(QUERY_TILE)  # [n, QUERY_TILE]
            rows = positions + (ends - lengths)[requests][:, None]
            computed = (rows >= begins[requests][:, None]) & (rows < ends[requests][:, None])
            return QueryGroup(
                bases=bases,
                scatter=computed.flatten().nonzero()[:, 0].to(block_table.device),
                rows=rows[computed].to(block_table.device),
                last_positions=lengths[requests] - 1,
                block_table=block_table[requests.to(block_table.device)],
                block_size=block_size,
            )

        computes = ends > begins
        singles = (computes & (num_tiles == 1)).nonzero()[:, 0]
        self.groups = [group(singles, first_tiles[singles])] if len(singles) else []
        for request in (computes & (num_tiles > 1)).nonzero()[:, 0]:
            self.groups.append(group(request[None], first_tiles[request] + torch.arange(int(num_tiles[request]))))


class QueryGroup:
    """Query tiles whose products are batched together: n tiles of n requests, or n tiles of one.

    Attributes:
        bases: [n] the first position of each tile, on the host.
        scatter, rows: where each computed row lies among the n * QUERY_TILE of the group, and in q.
    """

    def __init__(
        self,
        *,
        bases: Tensor,
        scatter: Tensor,
        rows: Tensor,
        last_positions: Tensor,
        block_table: Tensor,
        block_size: int,
    ):
        """last_positions [n or 1], on the host, and block_table [n or 1, max_blocks] have one row a request."""
        self.bases = bases
        self.scatter = scatter
        self.rows = rows
        self._last_positions = last_positions
        self._block_table = block_table
        self._block_size = block_size
        self._steps: dict[int | None, list[KeyStep]] = {}

    def key_steps(self, window: int | None) -> list[KeyStep]:
        """The key tiles to visit in ascending order, made on first use for each window."""
        if window not in self._steps:
            last = self.bases // KEY_TILE
            # Chosen by the tile's first position, computed or not, so that a row always visits the same key tiles.
            first = torch.zeros_like(last) if window is None else (self.bases - window + 1).clamp(min=0) // KEY_TILE
            active = {tile: (first <= tile) & (tile <= last) for tile in range(int(first.min()), int(last.max()) + 1)}
            self._steps[window] = [
                self._key_step(tile, is_active.nonzero()[:, 0], window)
                for tile, is_active in active.items()
                if is_active.any()
            ]
        return self._steps[window]

    def _key_step(self, key_tile: int, active: Tensor, window: int | None) -> KeyStep:
        device = self._block_table.device
        keys = torch.arange(key_tile * KEY_TILE, (key_tile + 1) * KEY_TILE)
        queries = (self.bases[active][:, None] + torch.arange(QUERY_TILE))[:, :, None]
        hidden = keys > queries  # [n, QUERY_TILE, KEY_TILE]
        if window is not None:
            hidden |= keys <= queries - window
        requests = active if len(self._last_positions) > 1 else torch.zeros(1, dtype=torch.int64)
        # Positions a request does not have are read at its last one: finite numbers, which `hidden` discards.
        positions = torch.minimum(keys, self._last_positions[requests][:, None]).to(device)
        blocks = self._block_table[requests.to(device)].long().gather(1, positions // self._block_size)
        return KeyStep(
            active=None if len(active) == len(self.bases) else active.to(device),
            cache_rows=blocks * (2 * self._block_size) + positions % self._block_size,
            hidden=hidden.to(device) if hidden.any() else None,
        )


class KeyStep:
    """One key tile of a group.

    Attributes:
        active: the query tiles that see it; None means all.
        cache_rows: [n or 1, KEY_TILE] where the keys are among rows of the cache seen as [N * 2 * S, K * D]; the values
            are S rows later.
        hidden: [n, QUERY_TILE, KEY_TILE] True where a query must not look; None means nowhere.
    """

    def __init__(self, *, active: Tensor | None, cache_rows: Tensor, hidden: Tensor | None):
        self.active = active
        self.cache_rows = cache_rows
        self.hidden = hidden


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Attend each query token to all cached tokens at or before it.

    Args:
        q: [T, H, D]; a request's tokens are consecutive and end at its seq_len.
        kv_cache: [N, 2, S, K, D]; k and v of this step already written.
        block_table: [R, max_blocks] int32; entries past a request's length are ignored.
        seq_lens: [R] int32, in tokens, this step included.
        query_start_loc: [R + 1] int32, exclusive prefix sum of query lengths.
        scale: softmax scale, usually D ** -0.5.
        window: a token sees itself and the window - 1 before it; None means all before it.
        softcap: c in c * tanh(score / c); None means none.
        plan: of the same batch, when several layers share it.

    Returns:
        [T, H, D], dtype of q. Products and softmax in float32.

    Source: PagedAttention, https://arxiv.org/abs/2309.06180; running softmax, https://arxiv.org/abs/1805.02867.
    """
    plan = plan or AttentionPlan(block_table, seq_lens, query_start_loc, kv_cache.shape[2])
    num_kv_heads, head_dim = kv_cache.shape[3:]
    num_groups = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    for group in plan.groups:
        num_tiles = len(group.bases)
        tiles = torch.zeros(num_tiles * QUERY_TILE, *q.shape[1:], dtype=torch.float32, device=q.device)
        tiles[group.scatter] = q[group.rows].float()
        tiles = tiles.view(num_tiles, QUERY_TILE, num_kv_heads, num_groups, head_dim)
        tiles = tiles.permute(2, 0, 1, 3, 4).reshape(num_kv_heads, num_tiles, QUERY_TILE * num_groups, head_dim)
        attended = _attend(tiles, kv_cache, group.key_steps(window), scale, softcap)
        attended = attended.view(num_kv_heads, num_tiles, QUERY_TILE, num_groups, head_dim).permute(1, 2, 0, 3, 4)
        out[group.rows] = attended.reshape(num_tiles * QUERY_TILE, *q.shape[1:])[group.scatter].to(q.dtype)
    return out


def _attend(q: Tensor, kv_cache: Tensor, steps: list[KeyStep], scale: float, softcap: float | None) -> Tensor:
    """Running softmax over key tiles: q is [K, n, M, D] float32 with M = QUERY_TILE * H / K, and so is the result."""
    num_kv_heads, num_tiles, num_rows, head_dim = q.shape
    flat_cache = kv_cache.view(-1, num_kv_heads * head_dim)
    block_size = kv_cache.shape[2]
    highest = q.new_full((num_kv_heads, num_tiles, num_rows, 1), _LOWEST_SCORE)
    total = q.new_zeros(num_kv_heads, num_tiles, num_rows, 1)
    weighted = torch.zeros_like(q)
    for step in steps:
        k = flat_cache[step.cache_rows].float()  # [n or 1, KEY_TILE, K * D]
        v = flat_cache[step.cache_rows + block_size].float()
        everyone = slice(None)
        active = everyone if step.active is None else step.active
        queries = q[:, active]
        scores = _per_head(queries, k, transpose=True) * scale  # [K, n, M, KEY_TILE]
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if step.hidden is not None:
            hidden = step.hidden.repeat_interleave(num_rows // QUERY_TILE, dim=1)
            scores.masked_fill_(hidden, -torch.inf)
        before = highest[:, active]
        now = torch.maximum(before, scores.amax(-1, keepdim=True))
        shrink = torch.exp(before - now)
        weights = scores.sub_(now).exp_()
        highest[:, active] = now
        total[:, active] = total[:, active] * shrink + weights.sum(-1, keepdim=True)
        weighted[:, active] = weighted[:, active] * shrink + _per_head(weights, v, transpose=False)
    return weighted / total


def _per_head(rows: Tensor, tile: Tensor, *, transpose: bool) -> Tensor:
    """Multiply rows [K, n, M, x] by each head's part of a key or value tile [n or 1, KEY_TILE, K * D].

    One product a query tile and head, always of the same shape; heads in a loop because their parts need no copy so.
    """
    num_kv_heads, num_tiles = rows.shape[:2]
    parts = tile.unflatten(-1, (num_kv_heads, -1)).unbind(2)  # each [n or 1, KEY_TILE, D]
    parts = tuple(part.expand(num_tiles, -1, -1) for part in parts)
    return torch.stack(
        [torch.bmm(rows[head], part.transpose(1, 2) if transpose else part) for head, part in enumerate(parts)]
    )


def forbid(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """logits [n, V] with -inf where a bit of allowed [n, ceil(V / 32)] int32 is 0; None allows all."""
    if allowed is None:
        return logits
    bits = allowed.to(logits.device)[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
