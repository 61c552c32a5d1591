from __future__ import annotations

import random

import pytest

from kitfox.kv_cache.block_pool import Block, BlockPool, FreeQueue


def order(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_queue]


def test_a_new_pool_is_all_free_in_id_order() -> None:
    pool = BlockPool(5)
    assert pool.num_free == 5
    assert order(pool) == [0, 1, 2, 3, 4]
    pool.check_integrity()


def test_take_is_oldest_first_and_too_many_changes_nothing() -> None:
    pool = BlockPool(5)
    assert [block.block_id for block in pool.take(2)] == [0, 1]
    with pytest.raises(IndexError, match="asked for 4 free blocks, there are 3"):
        pool.take(4)
    assert order(pool) == [2, 3, 4]
    assert pool.take(0) == []
    pool.check_integrity()


def test_a_block_in_the_middle_can_be_taken_out() -> None:
    pool = BlockPool(4)
    pool.hold(pool.blocks[2])
    assert order(pool) == [0, 1, 3]
    pool.hold(pool.blocks[0])
    pool.hold(pool.blocks[3])
    assert order(pool) == [1]
    pool.check_integrity()


def test_the_sentinels_survive_draining_and_refilling() -> None:
    pool = BlockPool(3)
    for _ in range(3):
        blocks = pool.take(3)
        assert order(pool) == []
        pool.check_integrity()
        pool.release(blocks)
        assert pool.num_free == 3
        pool.check_integrity()


def test_findable_blocks_go_to_the_back_and_worthless_ones_to_the_front() -> None:
    pool = BlockPool(6)
    a, b, c, d = pool.take(4)
    a.content = b.content = "findable"
    pool.release([d, c, b, a])
    assert order(pool) == [3, 2, 4, 5, 1, 0]


def test_findable_free_blocks_are_counted() -> None:
    pool = BlockPool(3)
    a, b = pool.take(2)
    a.content = b.content = "findable"
    assert pool.num_findable_free == 0
    pool.release([a, b])
    assert pool.num_findable_free == 2
    pool.hold(b)
    assert pool.num_findable_free == 1
    pool.take(2)
    assert pool.num_findable_free == 0
    a.content = None
    pool.release([a, b])
    pool.check_integrity()
    pool.forget_content()
    assert pool.num_findable_free == 0
    pool.check_integrity()


def test_a_block_is_free_only_when_nobody_holds_it() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.hold(block)
    pool.release([block])
    assert order(pool) == [1]
    pool.release([block])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release([block])


def test_append_and_prepend_keep_the_given_order() -> None:
    queue = FreeQueue()
    one, two, three, four = (Block(i) for i in range(4))
    queue.append_all([one, two])
    queue.prepend_all([three, four])
    assert list(queue) == [three, four, one, two]
    queue.remove(four)
    assert queue.pop_front(2) == [three, one]
    with pytest.raises(AssertionError, match="already"):
        queue.append_all([two])
    with pytest.raises(AssertionError, match="not in the free queue"):
        queue.remove(one)


def test_random_use_agrees_with_a_list() -> None:
    rng = random.Random(0)
    pool = BlockPool(12)
    model = list(range(12))
    held: list[Block] = []
    for _ in range(500):
        if rng.random() < 0.5 and model:
            count = rng.randint(0, len(model))
            taken = pool.take(count)
            assert [block.block_id for block in taken] == model[:count]
            model = model[count:]
            held += taken
        elif held:
            rng.shuffle(held)
            gone, held = held[:3], held[3:]
            for block in gone:
                block.content = rng.choice([None, "findable"])
            pool.release(gone)
            model = [b.block_id for b in gone if b.content is None] + model + [b.block_id for b in gone if b.content]
        assert order(pool) == model
        pool.check_integrity()
