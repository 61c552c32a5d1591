"""The one interface of both KV cache organisations. Bookkeeping only: no tensors, no device memory.

Three decisions let one scheduler and one set of kernels serve both: blocks are physical and of one size; a request's
block table only grows while it runs; a match that ends inside a block is served by copying the matched head of that
block into a fresh one (`BlockCopy`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import msgspec

from kitfox.config import CacheConfig
from kitfox.request import Request
from kitfox.step import BlockCopy


@dataclass(frozen=True)
class PrefixMatch:
    """The longest reusable prefix of a request: `match_prefix` finds it, `allocate_slots` pins it in the same step.

    Attributes:
        num_tokens: how many leading tokens are in the cache; always less than the request's number of tokens.
        block_ids: the whole blocks of that prefix, in order.
        tail_block_id: the block that holds the last num_tokens % block_size tokens of the match, to be copied; None
            when the match ends on a block border.
        node: the organisation's own handle; opaque to everyone else.
    """

    num_tokens: int = 0
    block_ids: tuple[int, ...] = ()
    tail_block_id: int | None = None
    node: object = None


NO_PREFIX = PrefixMatch()


@dataclass(frozen=True)
class Allocation:
    """What `allocate_slots` gave a request.

    Attributes:
        block_ids: blocks appended to the table: on the first call the prefix's own, then the fresh ones.
        block_copies: heads of partly matching blocks, to be copied before the forward pass.
    """

    block_ids: list[int]
    block_copies: list[BlockCopy] = field(default_factory=list)


NOTHING_NEW = Allocation([])  # nearly every decode's


class KVCacheEvent(msgspec.Struct, frozen=True, tag=True):
    """Base of what `take_events` reports; the three kinds together describe the cache's content exactly."""


class BlocksStored(KVCacheEvent, frozen=True, tag="stored"):
    """A run of tokens became findable.

    A known identity stored again replaces what it stood for: a radix node was split, trimmed or moved to other blocks.

    Attributes:
        block_ids: the blocks that hold it.
        start: position of the first token in its sequence.
        parent: identity of what precedes it: the parent's hash in hex (paged) or node id (radix); None at the root.
        identity: identity of the run itself, in the same form.
    """

    identity: str
    parent: str | None
    start: int
    token_ids: list[int]
    block_ids: list[int]


class BlocksRemoved(KVCacheEvent, frozen=True, tag="removed"):
    """Runs are no longer findable."""

    identities: list[str]


class AllCleared(KVCacheEvent, frozen=True, tag="cleared"):
    """Nothing is findable any more: the whole cache was reset."""


@dataclass
class PrefixCacheStats:
    """Counted in tokens, once a request; those of preempted requests, which ask again, are kept apart."""

    queries: int = 0
    hits: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0
    evicted_tokens: int = 0

    def count(self, request: Request, prefix: PrefixMatch) -> None:
        """Count one admitted lookup."""
        if request.num_preemptions > 0:
            self.resumed_queries += request.num_tokens
            self.resumed_hits += prefix.num_tokens
        else:
            self.queries += request.num_tokens
            self.hits += prefix.num_tokens


class KVCacheManager(ABC):
    """Which blocks hold which request's KV, and which finished KV can be found again.

    Invariant: free + cached + private blocks are all blocks, exactly once each. Free blocks hold nothing anyone could
    find; cached blocks can be found by their tokens; private blocks belong to running requests and cannot be found.
    """

    block_size: int
    num_blocks: int
    stats: PrefixCacheStats

    @abstractmethod
    def match_prefix(self, request: Request) -> PrefixMatch:
        """Find the longest cached prefix of `request.all_token_ids`.

        At most num_tokens - 1 tokens (the last one's logits must be computed), in whole blocks for the paged
        organisation. NO_PREFIX when the request `skips_cache_lookup`. Changes nothing, statistics included.
        """

    @abstractmethod
    def allocate_slots(
        self, request: Request, num_new_tokens: int, *, prefix: PrefixMatch = NO_PREFIX, num_lookahead_tokens: int = 0
    ) -> Allocation | None:
        """Reserve blocks for a request's next tokens. Atomic: pins `prefix`, evicts if it must, or changes nothing.

        The request's computed length is `prefix.num_tokens` on its first call and `request.num_computed_tokens`
        on later ones.

        Args:
            num_new_tokens: tokens computed this step beyond that; >= 1.
            prefix: from `match_prefix` in the same step; only on the first call for a request (or after `free`).
            num_lookahead_tokens: slots for drafts written before they are verified.

        Returns:
            The blocks newly appended to the request's table (possibly none), or None when there is no room. None too
            when `prefix` went stale, because another allocation evicted it since the match: match again next step.
        """

    @abstractmethod
    def cache_computed(self, request: Request) -> None:
        """Make the first `request.num_computed_tokens` tokens findable, as far as the organisation can.

        Called after a step's results are in. Never changes the request's own table.
        """

    @abstractmethod
    def free(self, request: Request) -> None:
        """Give up a request's blocks: findable ones stay cached until evicted, duplicates and tails become free.

        Harmless for a request that holds nothing. The radix organisation publishes the rest of its computed tokens
        first, so a request that is preempted keeps its num_computed_tokens until after this call.
        """

    @abstractmethod
    def block_ids(self, request_id: str) -> list[int]:
        """The request's block table so far; empty when it holds nothing."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that `allocate_slots` could hand out now: free ones and evictable cached ones."""

    @property
    @abstractmethod
    def num_cached_blocks(self) -> int:
        """Blocks whose content can be found, in use or not."""

    @property
    @abstractmethod
    def num_evictable_blocks(self) -> int:
        """Cached blocks that nobody uses: those of `num_free_blocks` that cost content when they are handed out."""

    @abstractmethod
    def reset(self) -> bool:
        """Forget what is cached and not in use; requests that run notice nothing.

        Returns:
            Whether nothing is cached any more: always so while no request holds blocks.
        """

    @abstractmethod
    def take_events(self) -> list[KVCacheEvent]:
        """Changes of the cache's content since the last call; the first call reports all content so far as stored.

        Nothing is recorded before that first call, so a cache nobody listens to holds no events.
        """

    @abstractmethod
    def explain(self, request: Request) -> str:
        """One sentence: how much of this request's prompt would be reused now, and why not more."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert every invariant; slow, for tests and debugging."""

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)


def make_kv_cache_manager(config: CacheConfig, num_blocks: int) -> KVCacheManager:
    """The manager that `config.organisation` names."""
    from kitfox.kv_cache.paged import PagedKVCacheManager
    from kitfox.kv_cache.radix import RadixKVCacheManager

    if config.organisation == "radix":
        return RadixKVCacheManager(num_blocks, config.block_size, eviction_policy=config.eviction_policy)
    return PagedKVCacheManager(num_blocks, config.block_size, enable_caching=config.organisation == "paged")
