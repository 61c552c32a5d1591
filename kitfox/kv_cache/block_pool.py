"""Physical blocks: their ids, who holds them, and the order in which free ones are handed out.

Knows nothing about tokens or requests; what a block's content means is the organisation's business.
Source: the free queue of vLLM's block pool (least recently used first, O(1) removal from the middle).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Block:
    """One physical block. Free exactly while ref_count is 0, and then linked into the pool's free queue.

    Attributes:
        ref_count: how many holders it has.
        content: what makes the block findable, owned by the organisation; None when nobody could find it.
    """

    __slots__ = ("block_id", "content", "next", "prev", "ref_count")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.content: object = None
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, findable={self.content is not None})"


class FreeQueue:
    """Doubly linked queue of blocks between two sentinels. The front is handed out first."""

    def __init__(self, blocks: Sequence[Block] = ()):
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next = self._tail
        self._tail.prev = self._head
        self._len = 0
        self.append_all(blocks)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def pop_front(self, count: int) -> list[Block]:
        """Take the first `count` blocks. Raises IndexError, with nothing changed, when there are fewer."""
        if count > self._len:
            raise IndexError(f"asked for {count} free blocks, there are {self._len}")
        blocks = []
        block = self._head.next
        for _ in range(count):
            assert block is not None
            blocks.append(block)
            block = block.next
        for taken in blocks:
            taken.prev = taken.next = None
        assert block is not None
        self._head.next = block
        block.prev = self._head
        self._len -= count
        return blocks

    def remove(self, block: Block) -> None:
        """Take one block out, wherever it is."""
        assert block.prev is not None, f"{block} is not in the free queue"
        assert block.next is not None, f"{block} is not in the free queue"
        block.prev.next = block.next
        block.next.prev = block.prev
        block.prev = block.next = None
        self._len -= 1

    def append_all(self, blocks: Sequence[Block]) -> None:
        """Put blocks at the back; the first of them leaves first."""
        assert self._tail.prev is not None
        self._insert_after(self._tail.prev, blocks)

    def prepend_all(self, blocks: Sequence[Block]) -> None:
        """Put blocks at the front; the first of them leaves first."""
        self._insert_after(self._head, blocks)

    def _insert_after(self, at: Block, blocks: Sequence[Block]) -> None:
        end = at.next
        assert end is not None
        for block in blocks:
            assert block.prev is None, f"{block} is in the free queue already"
            assert block.next is None, f"{block} is in the free queue already"
            at.next = block
            block.prev = at
            at = block
        at.next = end
        end.prev = at
        self._len += len(blocks)


class BlockPool:
    """All blocks, with reference counts. Free plus held blocks are all blocks, exactly once each.

    Attributes:
        num_findable_free: free blocks that still have content.
    """

    def __init__(self, num_blocks: int):
        assert num_blocks > 0, f"a pool needs at least one block, got {num_blocks}"
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeQueue(self.blocks)
        self.num_findable_free = 0

    @property
    def num_free(self) -> int:
        return len(self.free_queue)

    def take(self, count: int) -> list[Block]:
        """Hand out the `count` least recently used free blocks with one holder each; their content is left as it was.

        Raises IndexError, with nothing changed, when there are fewer.
        """
        blocks = self.free_queue.pop_front(count)
        for block in blocks:
            block.ref_count = 1
            self.num_findable_free -= block.content is not None
        return blocks

    def hold(self, block: Block) -> None:
        """Add a holder; a free block leaves the queue."""
        if block.ref_count == 0:
            self.free_queue.remove(block)
            self.num_findable_free -= block.content is not None
        block.ref_count += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Drop one holder of each. Blocks that become free queue up in the given order: findable ones behind all
        other free blocks, worthless ones in front of them."""
        findable: list[Block] = []
        worthless: list[Block] = []
        for block in blocks:
            assert block.ref_count > 0, f"{block} was released more often than held"
            block.ref_count -= 1
            if block.ref_count == 0:
                (worthless if block.content is None else findable).append(block)
        self.num_findable_free += len(findable)
        self.free_queue.append_all(findable)
        self.free_queue.prepend_all(worthless)

    def forget_content(self) -> None:
        """Make every free block worthless; the order of the queue stays."""
        for block in self.free_queue:
            block.content = None
        self.num_findable_free = 0

    def check_integrity(self) -> None:
        """Assert that the queue's links are sound and that it holds exactly the blocks nobody holds."""
        queued = list(self.free_queue)
        assert len(queued) == len(self.free_queue), "the free queue's length is wrong"
        for block in queued:
            assert block.prev is not None, f"{block} has broken links"
            assert block.next is not None, f"{block} has broken links"
            assert block.prev.next is block, f"{block} has broken links"
            assert block.next.prev is block, f"{block} has broken links"
        num_findable = sum(block.content is not None for block in queued)
        assert num_findable == self.num_findable_free, "the number of findable free blocks is wrong"
        ids = [block.block_id for block in queued]
        free = [block.block_id for block in self.blocks if block.ref_count == 0]
        assert sorted(ids) == free, f"queue {sorted(ids)} differs from blocks without a holder {free}"
