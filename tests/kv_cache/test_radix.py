from __future__ import annotations

import random

import pytest

from kitfox.kv_cache.manager import NO_PREFIX, AllCleared, BlocksRemoved, BlocksStored, PrefixCacheStats
from kitfox.kv_cache.radix import RadixKVCacheManager, common_prefix_length
from kitfox.step import BlockCopy


def make(num_blocks: int = 12, block_size: int = 4, policy: str = "lru") -> RadixKVCacheManager:
    return RadixKVCacheManager(num_blocks, block_size, eviction_policy=policy)  # type: ignore[arg-type]


def tree(manager: RadixKVCacheManager, salt: str | None = None) -> list[tuple[int, int, list[int]]]:
    """(start, end, block ids) of every node, parents first."""
    root = manager._roots.get(salt)
    nodes = [] if root is None else [node for node in manager._subtree(root) if node is not root]
    return [(node.start, node.end, [block.block_id for block in node.blocks]) for node in nodes]


def decode(manager: RadixKVCacheManager, request, tokens: list[int]) -> None:
    """Compute `tokens` one a step; the request ends with all its tokens computed."""
    for token in tokens:
        request.all_token_ids.append(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        manager.cache_computed(request)
        manager.check_integrity()


def test_common_prefix_length_agrees_with_the_obvious_loop() -> None:
    rng = random.Random(0)
    for _ in range(300):
        length = rng.randint(0, 400)
        ours = [rng.randint(0, 1) for _ in range(length)]
        theirs = [9] * 3 + ours
        if length:
            theirs[3 + rng.randrange(length)] = 7
        limit = 3 + rng.randint(0, length)
        expected = 0
        while expected < limit - 3 and ours[expected] == theirs[3 + expected]:
            expected += 1
        assert common_prefix_length(ours, theirs, 3, limit) == expected


def test_a_second_identical_prompt_hits_all_but_the_last_token(make_request, run, start) -> None:
    manager = make()
    assert run(manager, make_request("a", list(range(8)))).block_ids == [0, 1]
    second = make_request("b", list(range(8)))
    prefix = manager.match_prefix(second)
    assert (prefix.num_tokens, prefix.block_ids, prefix.tail_block_id) == (7, (0,), 1)
    allocation = start(manager, second)
    assert allocation.block_ids == [0, 2]
    assert allocation.block_copies == [BlockCopy(1, 2, 3)]
    manager.check_integrity()


def test_matching_changes_nothing(make_request, run) -> None:
    manager = make()
    run(manager, make_request("a", list(range(8))))
    manager.take_events()
    before = tree(manager)
    for length in range(1, 9):
        assert manager.match_prefix(make_request("b", [*range(length), 99])).num_tokens == length
    assert tree(manager) == before
    assert manager.take_events() == []
    assert manager.stats == PrefixCacheStats(queries=8)


def test_a_hit_inside_a_node_splits_it_without_changing_what_is_stored(make_request, run, start) -> None:
    manager = make()
    run(manager, make_request("a", list(range(10))))
    assert tree(manager) == [(0, 10, [0, 1, 2])]
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (3, 12)
    fork = make_request("b", [0, 1, 2, 3, 4, 5, 50, 51])
    allocation = start(manager, fork)
    assert allocation.block_ids == [0, 3]
    assert allocation.block_copies == [BlockCopy(1, 3, 2)]
    # Block 1 is in both halves of the cut at 6; the fork's own node starts with its copy.
    assert sorted(tree(manager)) == [(0, 6, [0, 1]), (6, 8, [3]), (6, 10, [1, 2])]
    assert manager.num_cached_blocks == 4
    # The fork's path and table pin 0, 1 and 3; block 2 can be evicted.
    assert manager.num_free_blocks == 12 - 3
    manager.check_integrity()
    manager.free(fork)
    assert manager.num_free_blocks == 12
    assert manager.match_prefix(make_request("c", list(range(11)))).block_ids == (0, 1)
    prefix = manager.match_prefix(make_request("d", [0, 1, 2, 3, 4, 5, 50, 51, 1]))
    assert (prefix.num_tokens, prefix.block_ids) == (8, (0, 3))


def test_chunks_publish_all_progress_and_decode_whole_blocks(make_request) -> None:
    manager = make()
    request = make_request("a", list(range(7)))
    assert manager.allocate_slots(request, 5).block_ids == [0, 1]
    request.num_computed_tokens = 5
    manager.cache_computed(request)
    assert manager.match_prefix(make_request("b", list(range(20)))).num_tokens == 5
    assert manager.allocate_slots(request, 2).block_ids == []
    request.num_computed_tokens = 7
    manager.cache_computed(request)
    assert tree(manager) == [(0, 5, [0, 1]), (5, 7, [1])]
    decode(manager, request, [7, 8, 9, 10])
    assert manager.match_prefix(make_request("b", list(range(20)))).num_tokens == 8
    manager.free(request)
    assert manager.match_prefix(make_request("b", list(range(20)))).num_tokens == 11
    assert tree(manager) == [(0, 5, [0, 1]), (5, 7, [1]), (7, 8, [1]), (8, 11, [2])]


def test_twins_keep_their_tables_and_duplicates_are_dropped_at_the_end(make_request) -> None:
    manager = make()
    twins = [make_request("a", list(range(6))), make_request("b", list(range(6)))]
    for request in twins:
        assert manager.match_prefix(request) == NO_PREFIX
        manager.allocate_slots(request, 6)
    for request in twins:
        request.num_computed_tokens = 6
        manager.cache_computed(request)
    assert (manager.block_ids("a"), manager.block_ids("b")) == ([0, 1], [2, 3])
    assert tree(manager) == [(0, 6, [0, 1])]
    assert manager.num_cached_blocks == 2
    manager.free(twins[1])
    assert manager.pool.num_free == 10
    assert manager.num_free_blocks == 10
    manager.free(twins[0])
    assert manager.num_free_blocks == 12
    manager.check_integrity()


def test_short_of_blocks_a_request_pins_only_its_own(make_request) -> None:
    manager = make(num_blocks=4)
    twins = [make_request("a", list(range(8))), make_request("b", list(range(8)))]
    for request in twins:
        manager.allocate_slots(request, 8)
    for request in twins:
        request.num_computed_tokens = 8
        manager.cache_computed(request)
    manager.free(twins[0])
    # The tree still refers to a's blocks 0 and 1, locked by b, which holds 2 and 3.
    assert manager.num_free_blocks == 0
    decode(manager, twins[1], [8])
    assert tree(manager) == [(0, 8, [2, 3])]
    assert manager.num_free_blocks == 1


def test_a_request_that_can_fill_the_pool_gets_whole_blocks_only(make_request, run, start) -> None:
    manager = make(num_blocks=3)
    run(manager, make_request("a", list(range(7)), max_tokens=0))
    big = make_request("b", list(range(8)), max_tokens=4)
    prefix = manager.match_prefix(big)
    assert (prefix.num_tokens, prefix.tail_block_id) == (4, None)
    assert manager.explain(big) == (
        "4 of 8 tokens would be reused: 7 are cached, but a request that can fill all 3 blocks gets whole blocks only."
    )
    start(manager, big)
    decode(manager, big, [8, 9, 10, 11])
    assert len(manager.block_ids("b")) == 3


def test_the_source_of_a_copy_is_not_evicted_for_it(make_request, run) -> None:
    manager = make(num_blocks=4)
    run(manager, make_request("a", list(range(7)), max_tokens=0))
    request = make_request("b", [*range(6), 50, 51, 52], max_tokens=0)
    prefix = manager.match_prefix(request)
    assert (prefix.block_ids, prefix.tail_block_id) == ((0,), 1)
    allocation = manager.allocate_slots(request, 3, prefix=prefix)
    assert allocation.block_copies == [BlockCopy(1, allocation.block_ids[1], 2)]
    assert 1 not in allocation.block_ids
    assert manager.num_free_blocks == 0
    request.num_computed_tokens = 9
    manager.cache_computed(request)
    manager.check_integrity()
    # Once copied, nothing keeps it: the request grows into it.
    decode(manager, request, [53, 54, 55, 56])
    assert manager.block_ids("b")[3] == 1


def test_a_failed_allocation_changes_nothing(make_request, run, start) -> None:
    manager = make(num_blocks=6)
    run(manager, make_request("a", list(range(8)), max_tokens=0))
    start(manager, make_request("busy", [70] * 8))
    manager.take_events()
    before = tree(manager)
    request = make_request("b", [*range(6), *range(50, 64)], max_tokens=0)
    prefix = manager.match_prefix(request)
    assert (manager.num_free_blocks, prefix.num_tokens) == (4, 6)
    # 4 blocks could be handed out, but the hit takes 2 of them out of reach.
    assert manager.allocate_slots(request, 8, prefix=prefix) is None
    assert tree(manager) == before
    assert manager.take_events() == []
    assert manager.stats == PrefixCacheStats(queries=16)
    assert manager.num_free_blocks == 4
    manager.check_integrity()
    assert manager.allocate_slots(request, 6, prefix=prefix) is not None


def test_a_stale_prefix_is_found_again_or_refused(make_request, run) -> None:
    manager = make(num_blocks=4)
    run(manager, make_request("a", list(range(8)), max_tokens=0))
    request = make_request("b", [*range(6), 50], max_tokens=0)
    prefix = manager.match_prefix(request)
    split = make_request("c", [0, 1, 60], max_tokens=0)
    run(manager, split)  # the tree changed, the prefix is still there
    assert manager.allocate_slots(request, 1, prefix=prefix).block_copies[0].num_tokens == 2
    manager.free(request)
    prefix = manager.match_prefix(request)
    run(manager, make_request("d", [70] * 16, max_tokens=0))
    assert manager.allocate_slots(request, 1, prefix=prefix) is None
    manager.check_integrity()


def test_locked_paths_survive_eviction(make_request, run, start) -> None:
    manager = make(num_blocks=4)
    run(manager, make_request("a", list(range(8)), max_tokens=0))
    holder = make_request("b", [0, 1, 2, 3, 90], max_tokens=0)
    start(manager, holder)
    assert manager.num_free_blocks == 2
    run(manager, make_request("c", [70] * 8, max_tokens=0))
    assert manager.match_prefix(make_request("d", list(range(9)), max_tokens=0)).num_tokens == 4
    assert manager.allocate_slots(make_request("e", [80] * 12, max_tokens=0), 12) is None
    manager.free(holder)
    assert manager.num_free_blocks == 4
    manager.check_integrity()


def test_eviction_trims_a_leaf_from_its_tail_then_takes_its_parent(make_request, run) -> None:
    manager = make(num_blocks=4)
    run(manager, make_request("a", list(range(16)), max_tokens=0))
    manager.take_events()
    blocker = make_request("b", [70] * 4, max_tokens=0)
    assert manager.allocate_slots(blocker, 4).block_ids == [3]
    assert tree(manager) == [(0, 12, [0, 1, 2])]
    assert manager.stats.evicted_tokens == 4
    assert manager.take_events() == [BlocksStored("1", None, 0, list(range(12)), [0, 1, 2])]
    assert manager.allocate_slots(make_request("c", [80] * 12, max_tokens=0), 12).block_ids == [0, 1, 2]
    assert manager.stats.evicted_tokens == 16
    assert manager.take_events() == [BlocksRemoved(["1"])]
    assert tree(manager) == []


def test_parents_become_leaves(make_request, run) -> None:
    manager = make(num_blocks=4)
    run(manager, make_request("a", list(range(8)), max_tokens=0))
    run(manager, make_request("b", [0, 1, 2, 3, 50, 51, 52, 53], max_tokens=0))
    assert sorted(tree(manager)) == [(0, 4, [0]), (4, 8, [1]), (4, 8, [2])]
    filler = make_request("c", [70] * 16, max_tokens=0)
    assert sorted(manager.allocate_slots(filler, 16).block_ids) == [0, 1, 2, 3]
    assert tree(manager) == []
    manager.check_integrity()


def test_a_hit_keeps_a_branch_alive(make_request, run) -> None:
    manager = make(num_blocks=3)
    for name, token in (("a", 1), ("b", 2)):
        run(manager, make_request(name, [token] * 4, max_tokens=0))
    run(manager, make_request("c", [1] * 4 + [9], max_tokens=0))
    run(manager, make_request("d", [3] * 8, max_tokens=0))
    assert manager.match_prefix(make_request("e", [2] * 5, max_tokens=0)) == NO_PREFIX
    assert manager.match_prefix(make_request("f", [1] * 5, max_tokens=0)).num_tokens == 4


def survivors(manager: RadixKVCacheManager, make_request, tokens: list[int]) -> list[int]:
    found = [t for t in tokens if manager.match_prefix(make_request("probe", [t] * 5, max_tokens=0)).num_tokens == 4]
    manager.check_integrity()
    return found


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", [3, 4]),  # 1 and 2 were used longest ago
        ("lfu", [1, 2]),  # 3 and 4 were never hit
        ("slru", [1, 4]),  # 1 was hit twice and is protected; of the others the latest stays
        ("priority", [2, 4]),  # 1 and 3 matter least
    ],
)
def test_policies_choose_their_victims(policy: str, expected: list[int], make_request, run) -> None:
    manager = make(num_blocks=6, policy=policy)
    priorities = {1: 5, 2: 0, 3: 5, 4: 0}
    for token in (1, 2):
        run(manager, make_request(f"{token}", [token] * 4, max_tokens=0, priority=priorities[token]))
    for token in (1, 1, 2):
        hit = make_request("hit", [token] * 4 + [0], max_tokens=0, priority=priorities[token])
        prefix = manager.match_prefix(hit)
        assert prefix.num_tokens == 4
        manager.allocate_slots(hit, 1, prefix=prefix)
        hit.num_computed_tokens = 4
        manager.free(hit)
    for token in (3, 4):
        run(manager, make_request(f"{token}", [token] * 4, max_tokens=0, priority=priorities[token]))
    assert survivors(manager, make_request, [1, 2, 3, 4]) == [1, 2, 3, 4]
    blocker = make_request("blocker", [9] * 16, max_tokens=0)
    manager.allocate_slots(blocker, 16)
    assert survivors(manager, make_request, [1, 2, 3, 4]) == expected


def test_salts_are_namespaces_and_empty_ones_disappear(make_request, run, start) -> None:
    manager = make(num_blocks=3)
    run(manager, make_request("a", [1] * 5, salt="x", max_tokens=0))
    assert manager.match_prefix(make_request("b", [1] * 6, salt="x", max_tokens=0)).num_tokens == 5
    assert manager.match_prefix(make_request("c", [1] * 6, max_tokens=0)) == NO_PREFIX
    assert set(manager._roots) == {"x"}
    other = make_request("d", [2] * 12, salt="y", max_tokens=0)
    manager.allocate_slots(other, 12)
    assert set(manager._roots) == {"y"}
    manager.free(other)
    assert manager._roots == {}
    manager.check_integrity()


def test_repeated_patterns_do_not_alias(make_request, run) -> None:
    manager = make()
    run(manager, make_request("a", [1, 2] * 4))
    for length in range(1, 8):
        tokens = [*([1, 2] * 4)[:length], 9]
        assert manager.match_prefix(make_request("b", tokens)).num_tokens == length
    assert manager.match_prefix(make_request("c", [2, 1, 2, 1])) == NO_PREFIX


def test_prompt_logprobs_and_preemption_statistics(make_request, run, start) -> None:
    manager = make()
    run(manager, make_request("a", [1] * 9, prompt_logprobs=0))
    assert manager.stats == PrefixCacheStats()
    request = make_request("b", [1] * 9)
    start(manager, request)
    manager.free(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    start(manager, request)
    assert manager.stats == PrefixCacheStats(queries=9, hits=8, resumed_queries=9, resumed_hits=8)


def test_reset_forgets_everything(make_request, run, start) -> None:
    manager = make()
    run(manager, make_request("a", list(range(10))))
    holder = make_request("b", list(range(6)))
    start(manager, holder)
    assert not manager.reset()
    manager.free(holder)
    manager.take_events()
    assert manager.reset()
    assert manager.take_events() == [AllCleared()]
    assert (manager.num_cached_blocks, manager.num_free_blocks, manager.pool.num_free) == (0, 12, 12)
    assert manager.match_prefix(make_request("c", list(range(10)))) == NO_PREFIX
    manager.check_integrity()


def test_a_split_stores_both_halves_again(make_request, run) -> None:
    manager = make()
    assert manager.take_events() == []
    run(manager, make_request("a", list(range(6))))
    assert manager.take_events() == [BlocksStored("1", None, 0, list(range(6)), [0, 1])]
    run(manager, make_request("b", [0, 1, 2, 3, 9]))
    assert manager.take_events() == [
        BlocksStored("2", None, 0, [0, 1, 2, 3], [0]),
        BlocksStored("1", "2", 4, [4, 5], [1]),
        BlocksStored("3", "2", 4, [9], [2]),
    ]


def test_the_eviction_heap_stays_bounded_without_eviction(make_request, run) -> None:
    manager = make()
    for i in range(500):
        run(manager, make_request(f"{i}", [1, 2, 3, 4, 5]))
    assert len(manager._heap) < 100
    manager.check_integrity()


def test_explain_gives_the_reason(make_request, run) -> None:
    manager = make(num_blocks=4)
    run(manager, make_request("a", list(range(8)), salt="x", max_tokens=0))

    def explain(tokens: list[int], **options) -> str:
        return manager.explain(make_request("q", tokens, max_tokens=0, **options))

    assert explain(list(range(8)), salt="x") == (
        "7 of 8 tokens would be reused: everything before the last token is cached, "
        "and the last one is always computed."
    )
    assert explain([0, 1, 2, 50, 51], salt="x") == (
        "3 of 5 tokens would be reused: it diverges from the nearest cached sequence at token 3."
    )
    assert explain(list(range(10)), salt="x").endswith("nothing that continues from token 8 has been cached.")
    assert explain(list(range(8))).endswith("the same beginning is cached, but under another cache_salt.")
    assert explain([5] * 9, prompt_logprobs=1).startswith("0 of 9 tokens would be reused: prompt_logprobs")
    run(manager, make_request("b", [7] * 12, max_tokens=0))
    assert explain(list(range(8)), salt="x") == (
        "4 of 8 tokens would be reused: what follows from token 4 was cached and has been evicted since."
    )
