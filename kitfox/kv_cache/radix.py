"""Radix KV cache: a tree over token sequences, exact to the token, on top of physical blocks.

A node covers the positions [start, end) of every sequence that passes through it, with the blocks for the block
indexes start // S to ceil(end / S) - 1. Where a node starts inside a block, its first block also holds the path's
earlier tokens of that block: it is the parent's last block (after a split) or another block with the same head (after
a copy). So on the way down a node's blocks replace its parent's at the index they share.

A request locks its path while it runs. Its table is never rewritten; when it computed what another request published
first, it keeps its duplicates to the end. Only when blocks run short, the tree's references on its path are moved onto
the request's own blocks (`_move_path_to`), so that a lone request never pins more than its table.
Source: SGLang's RadixAttention, https://arxiv.org/abs/2312.07104, section 3.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kitfox.config import EvictionPolicy
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
from kitfox.step import BlockCopy

MAX_EVICTED_REMEMBERED = 4096
SLRU_PROTECTED_HITS = 2


class Node:
    """A run of tokens below its parent. A root has no tokens, no parent and stands for one cache_salt.

    Attributes:
        lock_ref: running requests whose path goes through this node; never less than any child's.
        last_access: tick of the manager's clock.
        priority: the most important (lowest) of the requests that used it.
    """

    __slots__ = (
        "blocks",
        "children",
        "hit_count",
        "last_access",
        "lock_ref",
        "node_id",
        "parent",
        "priority",
        "salt",
        "start",
        "tokens",
    )

    def __init__(
        self, node_id: int, parent: Node | None, salt: str | None, start: int, tokens: list[int], blocks: list[Block]
    ):
        self.node_id = node_id
        self.parent = parent
        self.salt = salt
        self.start = start
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[int, Node] = {}
        self.lock_ref = 0
        self.hit_count = 0
        self.last_access = 0
        self.priority = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class _Match:
    """Where a walk ended: `offset` tokens into `node`, in the tree as it was at `version`."""

    node: Node
    offset: int
    version: int


@dataclass(slots=True)
class _Table:
    """What a running request holds.

    Attributes:
        node: the locked end of its published path; node.end tokens are published.
        copy_source: held until the step that copies from it is done.
    """

    blocks: list[Block]
    node: Node
    copy_source: Block | None


def common_prefix_length(ours: list[int], theirs: list[int], start: int, limit: int) -> int:
    """How many leading tokens of `ours` equal theirs[start:limit]; compares slices, never token by token."""
    low, high = 0, min(len(ours), limit - start)
    # Gallop, then bisect: the slices compared add up to a small multiple of the answer.
    step = 64
    while low < high:
        stop = min(low + step, high)
        if ours[low:stop] == theirs[start + low : start + stop]:
            low = stop
            step *= 2
        else:
            high = stop - 1
            step = max(1, (high - low + 1) // 2)
    return low


class RadixKVCacheManager(KVCacheManager):
    """Blocks found by walking tokens.

    Invariant: a block's holders in the pool are the nodes that refer to it plus the requests that hold it (in a table
    or as the source of a copy). It is cached while a node refers to it, and evictable while neither a locked node nor a
    request does.
    `_recount` is the only place that changes any of these, so both totals are always exact.
    """

    def __init__(self, num_blocks: int, block_size: int, *, eviction_policy: EvictionPolicy = "lru"):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.stats = PrefixCacheStats()
        self.eviction_policy = eviction_policy
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, _Table] = {}
        self._roots: dict[str | None, Node] = {}
        self._node_refs = [0] * num_blocks
        self._locked_refs = [0] * num_blocks
        self._num_cached_blocks = 0
        self._num_evictable_blocks = 0
        self._num_nodes = 0
        self._version = 0
        self._clock = 0
        self._ids = itertools.count(1)
        # Unlocked leaves by eviction key; entries whose key is no longer the node's are skipped when met.
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._tie_breaker = itertools.count()
        # Nobody may ever ask for events, so recording starts with the first call of take_events.
        self._events: list[KVCacheEvent] | None = None
        # (salt, node id, position, token there) of runs evicted below a node that may still be there.
        self._evicted: OrderedDict[tuple[str | None, int, int, int], None] = OrderedDict()

    # --- lookup ---------------------------------------------------------------------------------------------------

    def match_prefix(self, request: Request) -> PrefixMatch:
        """As in the interface. A request that can fill the whole pool gets whole blocks only: it could not hold the
        source of a copy beside its own blocks.
        """
        if request.skips_cache_lookup:
            return NO_PREFIX
        limit = request.num_tokens - 1
        match = self._match(request, limit)
        if match.num_tokens % self.block_size and self._fills_the_pool(request):
            match = self._match(request, match.num_tokens // self.block_size * self.block_size)
        return match

    def _fills_the_pool(self, request: Request) -> bool:
        return self.blocks_needed(max(request.max_total_tokens, request.num_tokens)) >= self.num_blocks

    def _match(self, request: Request, limit: int) -> PrefixMatch:
        root = self._roots.get(request.cache_salt)
        if root is None:
            return NO_PREFIX
        node, offset, blocks = self._walk(root, request.all_token_ids, limit)
        num_tokens = node.start + offset
        if num_tokens == 0:
            return NO_PREFIX
        num_whole, rest = divmod(num_tokens, self.block_size)
        return PrefixMatch(
            num_tokens,
            tuple(block.block_id for block in blocks[:num_whole]),
            blocks[num_whole].block_id if rest else None,
            _Match(node, offset, self._version),
        )

    def _walk(self, root: Node, tokens: list[int], limit: int) -> tuple[Node, int, list[Block]]:
        """Follow tokens[:limit] down: the last node entered, how many of its tokens match, the blocks of the way."""
        node, offset, position = root, 0, 0
        blocks: list[Block] = []
        while position < limit and offset == len(node.tokens):
            child = node.children.get(tokens[position])
            if child is None:
                break
            offset = common_prefix_length(child.tokens, tokens, position, limit)
            position += offset
            del blocks[child.start // self.block_size :]
            blocks += child.blocks[: self.blocks_needed(position) - child.start // self.block_size]
            node = child
        return node, offset, blocks

    # --- allocation -----------------------------------------------------------------------------------------------

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *, prefix: PrefixMatch = NO_PREFIX, num_lookahead_tokens: int = 0
    ) -> Allocation | None:
        assert num_new_tokens >= 1, f"{request} asked for {num_new_tokens} tokens"
        table = self._tables.get(request.request_id)
        if table is None:
            return self._allocate_first(request, prefix, prefix.num_tokens + num_new_tokens + num_lookahead_tokens)
        assert prefix is NO_PREFIX, f"{request} came with a prefix although it holds blocks"
        num_tokens = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        if num_tokens <= len(table.blocks) * self.block_size:
            return NOTHING_NEW
        num_fresh = self.blocks_needed(num_tokens) - len(table.blocks)
        if num_fresh > self.num_free_blocks:
            self._release_copy_source(table, request)
            self._move_path_to(table.node, table.blocks)
            if num_fresh > self.num_free_blocks:
                return None
        fresh = self._take(num_fresh)
        table.blocks += fresh
        return Allocation([block.block_id for block in fresh])

    def _allocate_first(self, request: Request, prefix: PrefixMatch, num_tokens: int) -> Allocation | None:
        if prefix.num_tokens:
            prefix = self._refreshed(request, prefix)
            if prefix is NO_PREFIX:
                return None
        hit = [self.pool.blocks[block_id] for block_id in prefix.block_ids]
        source = None if prefix.tail_block_id is None else self.pool.blocks[prefix.tail_block_id]
        matched = hit if source is None else [*hit, source]
        num_fresh = self.blocks_needed(num_tokens) - len(hit)
        if num_fresh > self.num_free_blocks - sum(self._is_evictable(block) for block in matched):
            return None
        node = self._lock_prefix(request, prefix, matched)
        fresh = self._take(num_fresh)
        table = self._tables[request.request_id] = _Table(hit + fresh, node, source)
        if not request.skips_cache_lookup:
            self.stats.count(request, prefix)
        copies = []
        if source is not None:
            copies = [BlockCopy(source.block_id, fresh[0].block_id, prefix.num_tokens % self.block_size)]
        return Allocation([block.block_id for block in table.blocks], copies)

    def _refreshed(self, request: Request, prefix: PrefixMatch) -> PrefixMatch:
        """The same tokens in the tree as it is now; NO_PREFIX when they are not all there any more."""
        assert isinstance(prefix.node, _Match), "the prefix is not from this organisation"
        if prefix.node.version == self._version:
            return prefix
        now = self._match(request, prefix.num_tokens)
        return now if now.num_tokens == prefix.num_tokens else NO_PREFIX

    def _lock_prefix(self, request: Request, prefix: PrefixMatch, matched: list[Block]) -> Node:
        """Split the tree at the end of `prefix`, lock the path to it, now on `matched` only, and mark it as used."""
        if isinstance(prefix.node, _Match):
            node = prefix.node.node
            if prefix.node.offset < len(node.tokens):
                node = self._split(node, prefix.node.offset)
        else:
            node = self._root_for(request.cache_salt)
        self._move_path_to(node, matched)
        self._clock += 1
        for each in node.path():
            self._lock(each)
            self._touch(each, request)
            each.hit_count += 1
        for block in matched:
            self._hold(block)
        return node

    def _root_for(self, salt: str | None) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(0, None, salt, 0, [], [])
        return root

    def _take(self, count: int) -> list[Block]:
        self._evict_until_free(count)
        return self.pool.take(count)

    def _release_copy_source(self, table: _Table, request: Request) -> None:
        """Let go of the source of this request's copy; its step is over once tokens of the request are computed."""
        if table.copy_source is not None and request.num_computed_tokens > 0:
            self._drop(table.copy_source)
            table.copy_source = None

    def _move_path_to(self, end: Node, blocks: list[Block]) -> None:
        """Make the path down to `end` refer to `blocks` and nothing else, so that locking it pins nothing else.

        What can be found stays the same: those blocks hold the path's tokens. Others may still refer to the old ones.
        """
        for node in end.path():
            first = node.start // self.block_size
            own = blocks[first : first + len(node.blocks)]
            if own == node.blocks:
                continue
            locked = int(node.lock_ref > 0)
            for old, new in zip(node.blocks, own, strict=True):
                self._recount(new, nodes=1, locked=locked)
                self._recount(old, nodes=-1, locked=-locked)
            node.blocks = own
            self._version += 1
            self._record_stored(node)

    # --- publishing and giving up ---------------------------------------------------------------------------------

    def cache_computed(self, request: Request) -> None:
        """As in the interface: all progress while the prompt is computed, then whenever a block is full."""
        table = self._tables.get(request.request_id)
        if table is None:
            return
        self._release_copy_source(table, request)
        published = table.node.end
        target = request.num_computed_tokens
        if published >= request.num_prompt_tokens:
            target -= target % self.block_size
        if target > published:
            self._publish(table, request, target)

    def _publish(self, table: _Table, request: Request, target: int) -> None:
        """Extend the request's published and locked path to its first `target` tokens."""
        assert self.blocks_needed(target) <= len(table.blocks), f"{request} computed tokens beyond its blocks"
        self._clock += 1
        tokens, node = request.all_token_ids, table.node
        while node.end < target:
            position = node.end
            child = node.children.get(tokens[position])
            if child is None:
                run = tokens[position:target]
                blocks = table.blocks[position // self.block_size : self.blocks_needed(target)]
                child = self._add_leaf(node, run, blocks, request.priority)
            else:
                length = common_prefix_length(child.tokens, tokens, position, target)
                if length < len(child.tokens):
                    child = self._split(child, length)
            self._lock(child)
            self._touch(child, request)
            node = child
        table.node = node

    def free(self, request: Request) -> None:
        table = self._tables.get(request.request_id)
        if table is None:
            return
        if request.num_computed_tokens > table.node.end:
            self._publish(table, request, request.num_computed_tokens)
        del self._tables[request.request_id]
        if table.copy_source is not None:
            self._drop(table.copy_source)
        self._clock += 1
        for node in table.node.path():
            self._touch(node, request)
            self._unlock(node)
        for block in reversed(table.blocks):
            self._drop(block)
        self._offer(table.node)

    def reset(self) -> bool:
        unlocked = [node for root in self._roots.values() for node in self._subtree(root) if not node.lock_ref]
        for node in reversed(unlocked):  # children before their parents
            if node.parent is None:
                del self._roots[node.salt]
                continue
            del node.parent.children[node.tokens[0]]
            node.parent = None
            self._num_nodes -= 1
            for block in node.blocks:
                self._recount(block, nodes=-1)
        self._heap.clear()
        self._version += 1
        if self._num_nodes:
            if unlocked and self._events is not None:
                self._events.append(BlocksRemoved([str(node.node_id) for node in unlocked if node.tokens]))
            return False
        self._evicted.clear()
        if self._events is not None:
            self._events.append(AllCleared())
        return True

    # --- the tree -------------------------------------------------------------------------------------------------

    def _add_leaf(self, parent: Node, tokens: list[int], blocks: list[Block], priority: int) -> Node:
        node = Node(next(self._ids), parent, parent.salt, parent.end, tokens, blocks)
        node.priority = priority
        parent.children[tokens[0]] = node
        for block in blocks:
            self._recount(block, nodes=1)
        self._evicted.pop((parent.salt, parent.node_id, parent.end, tokens[0]), None)
        self._num_nodes += 1
        self._version += 1
        self._record_stored(node)
        return node

    def _split(self, node: Node, length: int) -> Node:
        """Put a new node with the first `length` tokens between `node` and its parent; `node` keeps the rest.

        Whoever refers to `node` means its end, so it stays valid. When the cut is inside a block, both refer to it.
        """
        parent = node.parent
        assert parent is not None, "a root has no tokens to split"
        assert 0 < length < len(node.tokens), f"cannot split {len(node.tokens)} tokens after {length}"
        first = node.start // self.block_size
        cut = node.start + length
        front_blocks = node.blocks[: self.blocks_needed(cut) - first]
        front = Node(next(self._ids), parent, node.salt, node.start, node.tokens[:length], front_blocks)
        front.lock_ref, front.hit_count = node.lock_ref, node.hit_count
        front.last_access, front.priority = node.last_access, node.priority
        node.parent, node.start = front, cut
        node.tokens = node.tokens[length:]
        node.blocks = node.blocks[cut // self.block_size - first :]
        if cut % self.block_size:
            self._recount(node.blocks[0], nodes=1, locked=int(node.lock_ref > 0))
        parent.children[front.tokens[0]] = front
        front.children[node.tokens[0]] = node
        self._num_nodes += 1
        self._version += 1
        self._record_stored(front)
        self._record_stored(node)
        return front

    def _lock(self, node: Node) -> None:
        node.lock_ref += 1
        if node.lock_ref == 1:
            for block in node.blocks:
                self._recount(block, locked=1)

    def _unlock(self, node: Node) -> None:
        assert node.lock_ref > 0, "a node was unlocked more often than locked"
        node.lock_ref -= 1
        if node.lock_ref == 0:
            for block in node.blocks:
                self._recount(block, locked=-1)

    def _touch(self, node: Node, request: Request) -> None:
        node.last_access = self._clock
        node.priority = min(node.priority, request.priority)

    def _subtree(self, node: Node) -> Iterator[Node]:
        """The node and all below it, parents first."""
        stack = [node]
        while stack:
            top = stack.pop()
            yield top
            stack.extend(top.children.values())

    # --- counting -------------------------------------------------------------------------------------------------

    def _is_evictable(self, block: Block) -> bool:
        refs = self._node_refs[block.block_id]
        return 0 < refs == block.ref_count and self._locked_refs[block.block_id] == 0

    def _recount(self, block: Block, *, nodes: int = 0, locked: int = 0, requests: int = 0) -> None:
        """Change by how many nodes, locked nodes and requests a block is referred to."""
        index = block.block_id
        was_evictable, was_cached = self._is_evictable(block), self._node_refs[index] > 0
        self._node_refs[index] += nodes
        self._locked_refs[index] += locked
        if nodes + requests > 0:
            self.pool.hold(block)
        elif nodes + requests < 0:
            self.pool.release([block])
        self._num_evictable_blocks += self._is_evictable(block) - was_evictable
        self._num_cached_blocks += (self._node_refs[index] > 0) - was_cached

    def _hold(self, block: Block) -> None:
        self._recount(block, requests=1)

    def _drop(self, block: Block) -> None:
        self._recount(block, requests=-1)

    # --- eviction -------------------------------------------------------------------------------------------------

    def _eviction_key(self, node: Node) -> tuple[int, ...]:
        """Leaves with the smallest key go first."""
        if self.eviction_policy == "lfu":
            return (node.hit_count, node.last_access)
        if self.eviction_policy == "slru":
            return (int(node.hit_count >= SLRU_PROTECTED_HITS), node.last_access)
        if self.eviction_policy == "priority":
            return (-node.priority, node.last_access)
        return (node.last_access,)

    def _offer(self, node: Node) -> None:
        """Make a node that may have become an unlocked leaf known to eviction; an unused root disappears."""
        if node.lock_ref or node.children:
            return
        if node.parent is None:
            del self._roots[node.salt]
            return
        if len(self._heap) > 2 * self._num_nodes + 64:
            current = {entry[2].node_id: entry for entry in self._heap if self._is_current(entry)}
            self._heap = list(current.values())
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self._eviction_key(node), next(self._tie_breaker), node))

    def _is_current(self, entry: tuple[tuple[int, ...], int, Node]) -> bool:
        key, _, node = entry
        alive = node.parent is not None and node.parent.children.get(node.tokens[0]) is node
        return alive and not node.lock_ref and not node.children and key == self._eviction_key(node)

    def _evict_until_free(self, num_free: int) -> None:
        """Evict unlocked leaves until that many blocks are free; the caller knows there are enough."""
        while self.pool.num_free < num_free:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                self._evict_leaf(entry[2], num_free - self.pool.num_free)

    def _evict_leaf(self, node: Node, num_wanted: int) -> None:
        """Drop blocks from a leaf's tail until `num_wanted` became free, or the whole leaf."""
        keep = len(node.blocks)
        freed = 0
        while keep and freed < num_wanted:
            keep -= 1
            freed += node.blocks[keep].ref_count == 1
        gone = node.blocks[keep:][::-1]
        new_length = (node.start // self.block_size + keep) * self.block_size - node.start if keep else 0
        self.stats.evicted_tokens += len(node.tokens) - new_length
        self._version += 1
        if keep:
            next_token = node.tokens[new_length]
            node.tokens, node.blocks = node.tokens[:new_length], node.blocks[:keep]
            self._remember_evicted(node, next_token)
            self._record_stored(node)
            self._offer(node)
        else:
            self._remove_leaf(node)
        for block in gone:
            self._recount(block, nodes=-1)

    def _remove_leaf(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "a root is not a leaf"
        del parent.children[node.tokens[0]]
        node.parent = None
        self._num_nodes -= 1
        self._remember_evicted(parent, node.tokens[0])
        if self._events is not None:
            self._events.append(BlocksRemoved([str(node.node_id)]))
        self._offer(parent)

    def _remember_evicted(self, node: Node, next_token: int) -> None:
        self._evicted[node.salt, node.node_id, node.end, next_token] = None
        if len(self._evicted) > MAX_EVICTED_REMEMBERED:
            self._evicted.popitem(last=False)

    # --- looking in -----------------------------------------------------------------------------------------------

    def block_ids(self, request_id: str) -> list[int]:
        table = self._tables.get(request_id)
        return [] if table is None else [block.block_id for block in table.blocks]

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free + self._num_evictable_blocks

    @property
    def num_cached_blocks(self) -> int:
        return self._num_cached_blocks

    @property
    def num_evictable_blocks(self) -> int:
        return self._num_evictable_blocks

    def take_events(self) -> list[KVCacheEvent]:
        if self._events is None:
            self._events = []
            for root in self._roots.values():
                for node in self._subtree(root):
                    if node is not root:
                        self._record_stored(node)
        events, self._events = self._events, []
        return events

    def _record_stored(self, node: Node) -> None:
        if self._events is not None:
            assert node.parent is not None, "a root is not an event"
            parent = None if node.parent.parent is None else str(node.parent.node_id)
            ids = [block.block_id for block in node.blocks]
            self._events.append(BlocksStored(str(node.node_id), parent, node.start, list(node.tokens), ids))

    def explain(self, request: Request) -> str:
        total = request.num_tokens
        if request.skips_cache_lookup:
            return f"0 of {total} tokens would be reused: prompt_logprobs needs every prompt position computed."
        reused = self.match_prefix(request).num_tokens
        return f"{reused} of {total} tokens would be reused: {self._why_not_more(request, reused)}."

    def _why_not_more(self, request: Request, reused: int) -> str:
        tokens, limit = request.all_token_ids, request.num_tokens - 1
        if reused == limit:
            return "everything before the last token is cached, and the last one is always computed"
        root = self._roots.get(request.cache_salt) or Node(0, None, request.cache_salt, 0, [], [])
        node, offset, _ = self._walk(root, tokens, limit)
        found = node.start + offset
        if found > reused:
            return (
                f"{found} are cached, but a request that can fill all {self.num_blocks} blocks gets whole blocks only"
            )
        if offset < len(node.tokens):
            return f"it diverges from the nearest cached sequence at token {found}"
        if (node.salt, node.node_id, found, tokens[found]) in self._evicted:
            return f"what follows from token {found} was cached and has been evicted since"
        if found == 0 and any(tokens[0] in other.children for other in self._roots.values() if other is not root):
            return "the same beginning is cached, but under another cache_salt"
        if node.children:
            return f"it diverges from the nearest cached sequence at token {found}"
        return f"nothing that continues from token {found} has been cached"

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        node_refs: Counter[int] = Counter()
        locked_refs: Counter[int] = Counter()
        locks: Counter[int] = Counter()
        for table in self._tables.values():
            locks.update(id(node) for node in table.node.path())
        nodes = [node for root in self._roots.values() for node in self._subtree(root)]
        for node in nodes:
            assert node.lock_ref == locks.pop(id(node), 0), f"node {node.node_id} has a wrong lock count"
            self._check_node(node)
            node_refs.update(block.block_id for block in node.blocks)
            locked_refs.update(block.block_id for block in node.blocks if node.lock_ref)
        assert not locks, "a request's path is not in the tree"
        assert self._num_nodes == len(nodes) - len(self._roots), "the number of nodes is wrong"
        holders = Counter(block.block_id for table in self._tables.values() for block in table.blocks)
        holders.update(t.copy_source.block_id for t in self._tables.values() if t.copy_source is not None)
        for block in self.pool.blocks:
            index = block.block_id
            assert self._node_refs[index] == node_refs[index], f"{block} has {node_refs[index]} nodes"
            assert self._locked_refs[index] == locked_refs[index], f"{block} has {locked_refs[index]} locked nodes"
            assert block.ref_count == node_refs[index] + holders[index], f"{block} has {holders[index]} requests"
        free = [block.block_id for block in self.pool.free_queue]
        private = set(holders) - set(node_refs)
        assert sorted([*free, *node_refs, *private]) == list(range(self.num_blocks)), (
            "blocks were lost or counted twice"
        )
        assert self._num_cached_blocks == len(node_refs), "the number of cached blocks is wrong"
        num_evictable = sum(self._is_evictable(block) for block in self.pool.blocks)
        assert self._num_evictable_blocks == num_evictable, "the number of evictable blocks is wrong"
        leaves = {id(node) for node in nodes if node.parent and not node.lock_ref and not node.children}
        known = {id(entry[2]) for entry in self._heap if self._is_current(entry)}
        assert leaves <= known, "an unlocked leaf is unknown to eviction"

    def _check_node(self, node: Node) -> None:
        first = node.start // self.block_size
        assert len(node.blocks) == self.blocks_needed(node.end) - first * bool(node.tokens), (
            "a node's blocks do not fit"
        )
        if node.parent is None:
            assert not node.tokens, "a root has tokens"
            assert self._roots[node.salt] is node, "a root is under the wrong salt"
            assert node.lock_ref or node.children, "an empty namespace stayed"
            return
        assert node.tokens, "a node is empty"
        assert node.parent.end == node.start, "a node does not continue its parent"
        assert node.parent.lock_ref >= node.lock_ref, "a locked node has an unlocked parent"
        assert node.parent.children[node.tokens[0]] is node, "a parent does not know its child"
