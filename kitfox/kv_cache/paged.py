"""Paged KV cache: full blocks are found by a chained hash of everything up to and including them.

Duplicates are possible, because a running request's table is never rewritten: two requests that compute the same block
side by side both keep theirs, and either can be found until it is evicted.
Source: vLLM's automatic prefix caching; PagedAttention, https://arxiv.org/abs/2309.06180.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kitfox.kv_cache.block_pool import Block, BlockPool
from kitfox.kv_cache.manager import (
    NO_PREFIX,
    NOTHING_NEW,
    AllCleared,
    Allocation,
    BlocksRemoved,
    BlocksStored,
    KVCacheEvent,
    KVCacheManager,
    PrefixCacheStats,
    PrefixMatch,
)
from kitfox.request import Request

_DOMAIN = b"kitfox kv block 1"
_SALT_KIND = "cache_salt"
MAX_WAITING_HASHES = 1024
MAX_EVICTED_REMEMBERED = 4096
MAX_SALTS_REMEMBERED = 64


def hash_block(parent: bytes | None, token_ids: Sequence[int], extra_keys: Sequence[tuple[str, str]] = ()) -> bytes:
    """Identity of a full block: sha256 over its parent's identity, its tokens and whatever else shaped its KV.

    Every field carries its length and every extra key its kind, so no two different inputs are encoded alike.

    Args:
        parent: identity of the block before; None for the first block of a sequence.
        extra_keys: (kind, value) pairs, such as ("cache_salt", "tenant-1").
    """
    count = len(token_ids)
    parts = [
        _DOMAIN,
        b"\x01" + parent if parent is not None else b"\x00",
        struct.pack(f"<q{count}q", count, *token_ids),
    ]
    for pair in extra_keys:
        for text in pair:
            data = text.encode("utf-8", "surrogatepass")
            parts += (struct.pack("<q", len(data)), data)
    return hashlib.sha256(b"".join(parts)).digest()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """Why a block can be found: kept as the block's content."""

    block_hash: bytes
    parent: bytes | None
    start: int
    token_ids: list[int]


@dataclass(slots=True)
class _BlockHashes:
    """Hashes of a request's full blocks, extended as its tokens grow. The request guards against a reused id."""

    request: Request
    hashes: list[bytes]

    def extend(self, num_blocks: int, block_size: int) -> list[bytes]:
        """The hashes, at least num_blocks of them; those blocks must be full of tokens."""
        tokens = self.request.all_token_ids
        for index in range(len(self.hashes), num_blocks):
            parent = self.hashes[-1] if self.hashes else None
            run = tokens[index * block_size : (index + 1) * block_size]
            self.hashes.append(hash_block(parent, run, _extra_keys(self.request.cache_salt) if index == 0 else ()))
        return self.hashes


@dataclass(slots=True)
class _Table:
    """What a running request holds. The first num_published blocks have been made findable, or were found."""

    blocks: list[Block]
    hashes: _BlockHashes
    num_published: int


def _extra_keys(salt: str | None) -> list[tuple[str, str]]:
    return [] if salt is None else [(_SALT_KIND, salt)]


class PagedKVCacheManager(KVCacheManager):
    """Blocks found by hash; with enable_caching False nothing is looked up, hashed or counted (`--cache none`).

    Invariant: `_by_hash` maps a hash to the blocks whose content has that hash, oldest first, and to no others.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_caching: bool):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.stats = PrefixCacheStats()
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, _Table] = {}
        self._waiting_hashes: OrderedDict[str, _BlockHashes] = OrderedDict()
        self._by_hash: dict[bytes, list[Block]] = {}
        self._num_cached_blocks = 0
        # Nobody may ever ask for events, so recording starts with the first call of take_events.
        self._events: list[KVCacheEvent] | None = None
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._salts: OrderedDict[str | None, None] = OrderedDict()

    # --- lookup ---------------------------------------------------------------------------------------------------

    def match_prefix(self, request: Request) -> PrefixMatch:
        if not self.enable_caching or request.skips_cache_lookup:
            return NO_PREFIX
        found = self._find(self._hashes_of(request), request.num_tokens)
        if not found:
            return NO_PREFIX
        ids = tuple(block.block_id for block, _ in found)
        return PrefixMatch(len(found) * self.block_size, ids, node=tuple(block_hash for _, block_hash in found))

    def _find(self, hashes: _BlockHashes, num_tokens: int) -> list[tuple[Block, bytes]]:
        """Cached blocks of the longest prefix, each with its hash; hashes no further than the first miss."""
        found: list[tuple[Block, bytes]] = []
        for index in range((num_tokens - 1) // self.block_size):
            block_hash = hashes.extend(index + 1, self.block_size)[index]
            blocks = self._by_hash.get(block_hash)
            if not blocks:
                break
            found.append((blocks[0], block_hash))
        return found

    def _hashes_of(self, request: Request) -> _BlockHashes:
        table = self._tables.get(request.request_id)
        if table is not None:
            return table.hashes
        hashes = self._waiting_hashes.get(request.request_id)
        if hashes is None or hashes.request is not request:
            hashes = self._waiting_hashes[request.request_id] = _BlockHashes(request, [])
            if len(self._waiting_hashes) > MAX_WAITING_HASHES:
                self._waiting_hashes.popitem(last=False)
        return hashes

    # --- allocation -----------------------------------------------------------------------------------------------

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *, prefix: PrefixMatch = NO_PREFIX, num_lookahead_tokens: int = 0
    ) -> Allocation | None:
        assert num_new_tokens >= 1, f"{request} asked for {num_new_tokens} tokens"
        table = self._tables.get(request.request_id)
        assert table is None or prefix is NO_PREFIX, f"{request} came with a prefix although it holds blocks"
        num_held = len(table.blocks) if table is not None else 0
        num_computed = prefix.num_tokens if table is None else request.num_computed_tokens
        num_tokens = num_computed + num_new_tokens + num_lookahead_tokens
        if table is not None and num_tokens <= num_held * self.block_size:
            return NOTHING_NEW
        num_fresh = self.blocks_needed(num_tokens) - num_held - len(prefix.block_ids)
        hit = [self.pool.blocks[block_id] for block_id in prefix.block_ids]
        num_free_hit = sum(block.ref_count == 0 for block in hit)
        if self._is_stale(prefix, hit) or num_fresh > self.pool.num_free - num_free_hit:
            return None
        for block in hit:
            self.pool.hold(block)
        fresh = self.pool.take(num_fresh)
        self._forget(fresh)
        if table is None:
            table = self._start_table(request, prefix)
        table.blocks += hit
        table.blocks += fresh
        return Allocation([block.block_id for block in hit] + [block.block_id for block in fresh])

    def _is_stale(self, prefix: PrefixMatch, hit: list[Block]) -> bool:
        if not hit:
            return False
        assert isinstance(prefix.node, tuple), "the prefix is not from this organisation"
        return any(
            not isinstance(block.content, CachedBlock) or block.content.block_hash != block_hash
            for block, block_hash in zip(hit, prefix.node, strict=True)
        )

    def _start_table(self, request: Request, prefix: PrefixMatch) -> _Table:
        hashes = self._hashes_of(request)
        self._waiting_hashes.pop(request.request_id, None)
        table = self._tables[request.request_id] = _Table([], hashes, num_published=len(prefix.block_ids))
        if self.enable_caching and not request.skips_cache_lookup:
            self.stats.count(request, prefix)
        return table

    def _forget(self, blocks: list[Block]) -> None:
        """Evict the content of blocks that are about to be reused."""
        cached = [block for block in blocks if block.content is not None]
        if not cached:
            return
        gone = self._unpublish(cached)
        self.stats.evicted_tokens += self.block_size * len(cached)
        for block_hash in gone:
            self._evicted[block_hash] = None
            if len(self._evicted) > MAX_EVICTED_REMEMBERED:
                self._evicted.popitem(last=False)
        self._record_removed(gone)

    def _unpublish(self, blocks: list[Block]) -> list[bytes]:
        """Make cached blocks worthless; returns the hashes that no block has any more."""
        gone: list[bytes] = []
        for block in blocks:
            content = block.content
            assert isinstance(content, CachedBlock)
            copies = self._by_hash[content.block_hash]
            copies.remove(block)
            block.content = None
            self._num_cached_blocks -= 1
            if not copies:
                del self._by_hash[content.block_hash]
                gone.append(content.block_hash)
        return gone

    def _record_removed(self, hashes: list[bytes]) -> None:
        if hashes and self._events is not None:
            self._events.append(BlocksRemoved([block_hash.hex() for block_hash in hashes]))

    # --- publishing and giving up ---------------------------------------------------------------------------------

    def cache_computed(self, request: Request) -> None:
        table = self._tables.get(request.request_id)
        if table is None or not self.enable_caching:
            return
        num_full = request.num_computed_tokens // self.block_size
        if num_full <= table.num_published:
            return
        assert num_full <= len(table.blocks), f"{request} computed tokens beyond its {len(table.blocks)} blocks"
        hashes = table.hashes.extend(num_full, self.block_size)
        if table.num_published == 0:
            self._salts[request.cache_salt] = None
            self._salts.move_to_end(request.cache_salt)
            if len(self._salts) > MAX_SALTS_REMEMBERED:
                self._salts.popitem(last=False)
        for index in range(table.num_published, num_full):
            start = index * self.block_size
            run = request.all_token_ids[start : start + self.block_size]
            parent = hashes[index - 1] if index else None
            self._store(table.blocks[index], CachedBlock(hashes[index], parent, start, run))
        table.num_published = num_full

    def _store(self, block: Block, content: CachedBlock) -> None:
        assert block.content is None, f"{block} is published already"
        block.content = content
        self._num_cached_blocks += 1
        copies = self._by_hash.setdefault(content.block_hash, [])
        copies.append(block)
        self._evicted.pop(content.block_hash, None)
        if len(copies) == 1 and self._events is not None:
            self._events.append(self._stored_event(content, block))

    def free(self, request: Request) -> None:
        self._waiting_hashes.pop(request.request_id, None)
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            # Tail first: a prefix is of use to more requests than what follows it, so it is evicted later.
            self.pool.release(table.blocks[::-1])

    def reset(self) -> bool:
        gone = self._unpublish([block for block in self.pool.free_queue if block.content is not None])
        self.pool.forget_content()
        if self._num_cached_blocks:
            self._record_removed(gone)
            return False
        self._evicted.clear()
        self._salts.clear()
        if self._events is not None:
            self._events.append(AllCleared())
        return True

    # --- looking in -----------------------------------------------------------------------------------------------

    def block_ids(self, request_id: str) -> list[int]:
        table = self._tables.get(request_id)
        return [] if table is None else [block.block_id for block in table.blocks]

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        return self._num_cached_blocks

    @property
    def num_evictable_blocks(self) -> int:
        return self.pool.num_findable_free

    def take_events(self) -> list[KVCacheEvent]:
        if self._events is not None:
            events, self._events = self._events, []
            return events
        self._events = []
        stored = [(block.content, block) for block in (copies[0] for copies in self._by_hash.values())]
        events = [self._stored_event(content, block) for content, block in stored if isinstance(content, CachedBlock)]
        return sorted(events, key=lambda event: event.start if isinstance(event, BlocksStored) else 0)

    def _stored_event(self, content: CachedBlock, block: Block) -> KVCacheEvent:
        parent = None if content.parent is None else content.parent.hex()
        return BlocksStored(content.block_hash.hex(), parent, content.start, list(content.token_ids), [block.block_id])

    def explain(self, request: Request) -> str:
        total = request.num_tokens
        if not self.enable_caching:
            return f"0 of {total} tokens would be reused: the prefix cache is disabled."
        if request.skips_cache_lookup:
            return f"0 of {total} tokens would be reused: prompt_logprobs needs every prompt position computed."
        hashes = _BlockHashes(request, [])
        reused = len(self._find(hashes, total)) * self.block_size
        return f"{reused} of {total} tokens would be reused: {self._why_not_more(request, hashes, reused)}."

    def _why_not_more(self, request: Request, hashes: _BlockHashes, reused: int) -> str:
        size, total = self.block_size, request.num_tokens
        if total <= size:
            return f"only full blocks of {size} tokens before the last token can be reused, and the prompt has {total}"
        if reused == (total - 1) // size * size:
            return f"all full blocks of {size} tokens before the last token are cached"
        index = reused // size
        wanted = hashes.extend(index + 1, size)[index]
        if wanted in self._evicted:
            return f"the block of tokens {reused} to {reused + size - 1} was cached and has been evicted since"
        if index == 0 and self._cached_under_another_salt(request):
            return "the same tokens are cached, but under another cache_salt"
        run = request.all_token_ids[reused : reused + size]
        common = self._longest_sibling_match(hashes.hashes[index - 1] if index else None, run)
        if common is None:
            return f"nothing that continues from token {reused} has been cached"
        return f"it diverges from the nearest cached sequence at token {reused + common}"

    def _cached_under_another_salt(self, request: Request) -> bool:
        first = request.all_token_ids[: self.block_size]
        others = [salt for salt in self._salts if salt != request.cache_salt]
        return any(hash_block(None, first, _extra_keys(salt)) in self._by_hash for salt in others)

    def _longest_sibling_match(self, parent: bytes | None, run: list[int]) -> int | None:
        """How many tokens of `run` the most similar cached block after `parent` shares; None when there is none."""
        best: int | None = None
        for copies in self._by_hash.values():
            content = copies[0].content
            assert isinstance(content, CachedBlock)
            if content.parent == parent:
                pairs = enumerate(zip(content.token_ids, run, strict=True))
                common = next((i for i, (ours, theirs) in pairs if ours != theirs), len(run))
                best = common if best is None else max(best, common)
        return best

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        holders = Counter(block.block_id for table in self._tables.values() for block in table.blocks)
        for block in self.pool.blocks:
            assert block.ref_count == holders[block.block_id], f"{block} has {holders[block.block_id]} holders"
            assert block.content is not None or block.ref_count <= 1, f"{block} is private yet shared"
            if isinstance(block.content, CachedBlock):
                assert self._by_hash[block.content.block_hash].count(block) == 1, f"{block} cannot be found"
        num_mapped = sum(len(copies) for copies in self._by_hash.values())
        num_findable = sum(block.content is not None for block in self.pool.blocks)
        assert num_mapped == num_findable == self._num_cached_blocks, "the number of cached blocks is wrong"
        assert all(self._by_hash.values()), "a hash is mapped to no block"
        cached = {block.block_id for copies in self._by_hash.values() for block in copies}
        free = [block.block_id for block in self.pool.free_queue if block.block_id not in cached]
        private = set(holders) - cached
        assert sorted([*free, *cached, *private]) == list(range(self.num_blocks)), "blocks were lost or counted twice"
        for table in self._tables.values():
            assert len({block.block_id for block in table.blocks}) == len(table.blocks), "a table repeats a block"
