from __future__ import annotations

import hashlib

import pytest

from kitfox.kv_cache.manager import NO_PREFIX, AllCleared, BlocksRemoved, BlocksStored, PrefixCacheStats
from kitfox.kv_cache.paged import PagedKVCacheManager, hash_block


def make(num_blocks: int = 10, block_size: int = 4) -> PagedKVCacheManager:
    return PagedKVCacheManager(num_blocks, block_size, enable_caching=True)


def order(manager: PagedKVCacheManager) -> list[int]:
    return [block.block_id for block in manager.pool.free_queue]


class TestHash:
    def test_depends_on_parent_tokens_and_extra_keys(self) -> None:
        parent = hash_block(None, [1, 2])
        different = {
            parent,
            hash_block(None, [2, 1]),
            hash_block(None, [1, 2, 0]),
            hash_block(parent, [1, 2]),
            hash_block(None, [1, 2], [("cache_salt", "x")]),
            hash_block(None, [1, 2], [("cache_salt", "")]),
        }
        assert len(different) == 6
        assert parent == hash_block(None, [1, 2])
        assert all(len(value) == hashlib.sha256().digest_size for value in different)

    def test_kinds_of_extra_keys_cannot_collide(self) -> None:
        salt = hash_block(None, [1], [("cache_salt", "x")])
        assert salt != hash_block(None, [1], [("adapter", "x")])
        assert hash_block(None, [1], [("a", "bc")]) != hash_block(None, [1], [("ab", "c")])
        assert hash_block(None, [1], [("a", "b"), ("c", "d")]) != hash_block(None, [1], [("a", "bcd")])

    def test_is_the_same_in_every_process(self) -> None:
        assert hash_block(None, [1, 2]).hex().startswith("013e6fccbf23dc2a")


def test_a_second_identical_prompt_hits_all_but_the_last_token(make_request, run, start) -> None:
    manager = make()
    assert run(manager, make_request("a", list(range(8)))).block_ids == [0, 1]
    second = make_request("b", list(range(8)))
    prefix = manager.match_prefix(second)
    assert (prefix.num_tokens, prefix.block_ids, prefix.tail_block_id) == (4, (0,), None)
    # The last token is computed, so its block is computed again, into a duplicate.
    assert start(manager, second).block_ids == [0, 2]
    assert manager.num_cached_blocks == 3


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_prompts_around_a_multiple_of_the_block_size(block_size: int, extra: int, make_request, run) -> None:
    num_tokens = 3 * block_size + extra
    manager = make(20, block_size)
    run(manager, make_request("a", list(range(num_tokens))))
    assert manager.num_cached_blocks == num_tokens // block_size
    expected = (num_tokens - 1) // block_size * block_size
    assert manager.match_prefix(make_request("b", list(range(num_tokens)))).num_tokens == expected


def test_diverging_in_block_k_hits_exactly_k_blocks(make_request, run) -> None:
    manager = make()
    run(manager, make_request("a", list(range(16))))
    for k in range(3):
        tokens = list(range(16))
        tokens[4 * k + 3] = 99
        assert manager.match_prefix(make_request("b", tokens)).block_ids == tuple(range(k))


def test_equal_blocks_at_different_positions_do_not_alias(make_request, run) -> None:
    manager = make()
    run(manager, make_request("a", [1, 2, 3, 4] * 2 + [5]))
    assert manager.num_cached_blocks == 2
    prefix = manager.match_prefix(make_request("b", [1, 2, 3, 4] * 3 + [5]))
    assert prefix.block_ids == (0, 1)


def test_a_partial_block_is_private(make_request, start) -> None:
    manager = make()
    start(manager, make_request("a", list(range(6))))
    assert manager.num_cached_blocks == 1
    assert manager.match_prefix(make_request("b", list(range(7)))).num_tokens == 4


def test_generated_tokens_are_found_by_the_next_turn(make_request, start) -> None:
    manager = make()
    request = make_request("a", list(range(6)))
    start(manager, request)
    for token in (6, 7, 8):
        request.all_token_ids.append(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        manager.cache_computed(request)
    assert manager.block_ids("a") == [0, 1, 2]
    manager.free(request)
    assert manager.match_prefix(make_request("b", list(range(12)))).block_ids == (0, 1)


def test_incremental_hashes_equal_those_of_one_go(make_request, start, run) -> None:
    manager = make(20)
    request = make_request("a", [0])
    start(manager, request)
    for token in range(1, 12):
        request.all_token_ids.append(token)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        manager.cache_computed(request)
    manager.free(request)
    other = make(20)
    run(other, make_request("a", list(range(12))))
    assert set(manager._by_hash) == set(other._by_hash)


def test_only_computed_tokens_count(make_request) -> None:
    manager = make()
    request = make_request("a", list(range(12)))
    assert manager.allocate_slots(request, 12, num_lookahead_tokens=4).block_ids == [0, 1, 2, 3]
    request.num_computed_tokens = 7
    manager.cache_computed(request)
    assert manager.num_cached_blocks == 1


def test_freed_tail_first_with_worthless_blocks_in_front(make_request, start) -> None:
    manager = make(6)
    request = make_request("a", list(range(10)))
    start(manager, request)
    assert order(manager) == [3, 4, 5]
    manager.free(request)
    assert order(manager) == [2, 3, 4, 5, 1, 0]


def test_eviction_is_least_recently_used_and_forgets_the_hash(make_request, run) -> None:
    manager = make(4)
    run(manager, make_request("a", [1] * 9))
    assert order(manager) == [2, 3, 1, 0]
    run(manager, make_request("b", [2] * 5))
    assert order(manager) == [3, 1, 0, 2]
    run(manager, make_request("c", [1] * 9))  # hits 0 and 1, which outlive 2 from now on
    assert order(manager) == [3, 2, 1, 0]
    assert manager.stats.evicted_tokens == 0
    run(manager, make_request("d", [3] * 5))
    assert manager.stats.evicted_tokens == 4
    assert manager.match_prefix(make_request("e", [2] * 5)) == NO_PREFIX
    assert manager.match_prefix(make_request("f", [1] * 9)).block_ids == (0, 1)
    manager.check_integrity()


def test_a_free_hit_block_is_pinned_before_others_are_taken(make_request, run) -> None:
    manager = make(3)
    run(manager, make_request("a", [1] * 4))
    assert order(manager) == [1, 2, 0]
    request = make_request("b", [1] * 4 + [2] * 8)
    prefix = manager.match_prefix(request)
    assert manager.allocate_slots(request, 8, prefix=prefix).block_ids == [0, 1, 2]
    assert order(manager) == []


def test_a_failed_allocation_changes_nothing(make_request, run, start) -> None:
    manager = make(4)
    run(manager, make_request("a", [1] * 8))
    start(manager, make_request("busy", [7] * 4))
    before = order(manager)
    request = make_request("b", [1] * 8 + [2] * 8)
    prefix = manager.match_prefix(request)
    assert prefix.num_tokens == 8
    # 3 blocks are free, and 2 of them are the hit itself: they must not be counted twice.
    assert manager.num_free_blocks == 3
    assert manager.allocate_slots(request, 8, prefix=prefix) is None
    assert order(manager) == before
    assert manager.stats == PrefixCacheStats(queries=12)
    assert manager.block_ids("b") == []
    assert manager.allocate_slots(request, 4, prefix=prefix).block_ids[:2] == [0, 1]


def test_a_stale_prefix_is_refused(make_request, run) -> None:
    manager = make(3)
    run(manager, make_request("a", [1] * 4))
    request = make_request("b", [1] * 5)
    prefix = manager.match_prefix(request)
    run(manager, make_request("c", [2] * 12))
    assert manager.allocate_slots(request, 1, prefix=prefix) is None
    assert manager.match_prefix(request) == NO_PREFIX
    assert manager.allocate_slots(request, 5) is not None


def test_evicting_one_duplicate_leaves_the_other_findable(make_request) -> None:
    manager = make(4)
    twins = [make_request("a", [1] * 5), make_request("b", [1] * 5)]
    for request in twins:
        assert manager.match_prefix(request) == NO_PREFIX
        manager.allocate_slots(request, 5)
    for request in twins:
        request.num_computed_tokens = 5
        manager.cache_computed(request)
    assert (manager.block_ids("a"), manager.block_ids("b")) == ([0, 1], [2, 3])
    assert manager.num_cached_blocks == 2
    manager.free(twins[0])
    manager.allocate_slots(make_request("c", [9] * 8), 8)
    assert manager.num_cached_blocks == 1
    assert manager.match_prefix(make_request("d", [1] * 5)).block_ids == (2,)
    manager.check_integrity()


def test_salts_are_isolated(make_request, run) -> None:
    manager = make()
    run(manager, make_request("a", [1] * 9, salt="x"))
    assert manager.match_prefix(make_request("b", [1] * 9, salt="x")).num_tokens == 8
    assert manager.match_prefix(make_request("c", [1] * 9, salt="y")) == NO_PREFIX
    assert manager.match_prefix(make_request("d", [1] * 9)) == NO_PREFIX


def test_prompt_logprobs_skip_the_lookup_but_fill_the_cache(make_request, run) -> None:
    manager = make()
    run(manager, make_request("a", [1] * 9))
    request = make_request("b", [1] * 9, prompt_logprobs=0)
    assert manager.match_prefix(request) == NO_PREFIX
    run(manager, request)
    assert manager.stats == PrefixCacheStats(queries=9)
    run(manager, make_request("c", [2] * 9, prompt_logprobs=0))
    assert manager.match_prefix(make_request("d", [2] * 9)).num_tokens == 8


def test_statistics_count_once_and_preempted_requests_apart(make_request, run, start) -> None:
    manager = make()
    run(manager, make_request("a", [1] * 9))
    request = make_request("b", [1] * 9)
    for _ in range(3):
        manager.match_prefix(request)
    start(manager, request)
    assert manager.stats == PrefixCacheStats(queries=18, hits=8)
    manager.free(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    start(manager, request)
    assert manager.stats == PrefixCacheStats(queries=18, hits=8, resumed_queries=9, resumed_hits=8)


def test_without_caching_nothing_is_looked_up_hashed_or_counted(make_request, run) -> None:
    manager = PagedKVCacheManager(4, 4, enable_caching=False)
    run(manager, make_request("a", [1] * 9))
    run(manager, make_request("b", [1] * 9))
    assert manager.match_prefix(make_request("c", [1] * 9)) == NO_PREFIX
    assert manager.num_cached_blocks == 0
    assert not manager._waiting_hashes
    assert manager.stats == PrefixCacheStats()
    assert manager.take_events() == []
    assert "disabled" in manager.explain(make_request("d", [1] * 9))


def test_a_reused_request_id_gets_its_own_hashes(make_request, run) -> None:
    manager = make()
    run(manager, make_request("seed", [1] * 9))
    assert manager.match_prefix(make_request("same-id", [1] * 9)).num_tokens == 8
    assert manager.match_prefix(make_request("same-id", [2] * 9)) == NO_PREFIX


def test_events_tell_what_is_stored_removed_and_cleared(make_request, run) -> None:
    manager = make(2)
    assert manager.take_events() == []
    run(manager, make_request("a", list(range(8))))
    first, second = hash_block(None, [0, 1, 2, 3]), hash_block(hash_block(None, [0, 1, 2, 3]), [4, 5, 6, 7])
    assert manager.take_events() == [
        BlocksStored(first.hex(), None, 0, [0, 1, 2, 3], [0]),
        BlocksStored(second.hex(), first.hex(), 4, [4, 5, 6, 7], [1]),
    ]
    request = make_request("b", [9, 9])
    manager.allocate_slots(request, 2)
    assert manager.take_events() == [BlocksRemoved([second.hex()])]
    manager.free(request)
    manager.reset()
    assert manager.take_events() == [AllCleared()]


def test_explain_gives_the_reason(make_request, run, start) -> None:
    manager = make(4)
    run(manager, make_request("a", list(range(8)), salt="x"))

    def explain(tokens: list[int], **options) -> str:
        return manager.explain(make_request("q", tokens, **options))

    assert explain([0, 1, 2], salt="x") == (
        "0 of 3 tokens would be reused: only full blocks of 4 tokens before the last token can be reused, "
        "and the prompt has 3."
    )
    assert explain(list(range(8)), salt="x") == (
        "4 of 8 tokens would be reused: all full blocks of 4 tokens before the last token are cached."
    )
    assert explain([0, 1, 2, 3, 4, 5, 9, 9, 9], salt="x").endswith(
        "it diverges from the nearest cached sequence at token 6."
    )
    assert explain(list(range(8))).endswith("the same tokens are cached, but under another cache_salt.")
    assert explain([5] * 9, prompt_logprobs=1).startswith("0 of 9 tokens would be reused: prompt_logprobs")
    assert explain(list(range(13)), salt="x").endswith("nothing that continues from token 8 has been cached.")
    run(manager, make_request("b", [7] * 12))
    assert explain(list(range(9)), salt="x") == (
        "4 of 9 tokens would be reused: the block of tokens 4 to 7 was cached and has been evicted since."
    )
