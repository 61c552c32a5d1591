"""One suite over every KV cache organisation.

The device is a dict from slot to the token history that slot's KV was computed from, so a read of a wrong, stale or
foreign block cannot go unnoticed.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

from kitfox.config import CacheConfig
from kitfox.kv_cache.manager import (
    NO_PREFIX,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    KVCacheManager,
    PrefixCacheStats,
    make_kv_cache_manager,
)
from kitfox.kv_cache.paged import PagedKVCacheManager
from kitfox.kv_cache.radix import RadixKVCacheManager
from kitfox.request import EngineRequest, Request, RequestStatus, SamplingParams

ORGANISATIONS = ["paged", "none", "radix-lru", "radix-lfu", "radix-slru", "radix-priority"]
SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def make(organisation: str, num_blocks: int, block_size: int) -> KVCacheManager:
    if organisation.startswith("radix"):
        policy = organisation.partition("-")[2] or "lru"
        return RadixKVCacheManager(num_blocks, block_size, eviction_policy=policy)  # type: ignore[arg-type]
    return PagedKVCacheManager(num_blocks, block_size, enable_caching=organisation == "paged")


def make_request(
    request_id: str,
    tokens: list[int],
    max_tokens: int = 16,
    *,
    salt: str | None = None,
    priority: int = 0,
    prompt_logprobs: int | None = None,
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    return Request(
        EngineRequest(
            request_id=request_id, prompt_token_ids=tokens, sampling=sampling, priority=priority, cache_salt=salt
        )
    )


class EventReplay:
    """The cache's content as its events tell it."""

    def __init__(self) -> None:
        self.runs: dict[str, BlocksStored] = {}

    def apply(self, manager: KVCacheManager) -> None:
        for event in manager.take_events():
            if isinstance(event, BlocksStored):
                self.runs[event.identity] = event
            elif isinstance(event, BlocksRemoved):
                for identity in event.identities:
                    del self.runs[identity]
            else:
                assert isinstance(event, AllCleared)
                self.runs.clear()

    def longest_match(self, tokens: list[int], *, whole_runs: bool) -> int:
        children: dict[str | None, list[BlocksStored]] = {}
        for run in self.runs.values():
            children.setdefault(run.parent, []).append(run)
        parent, position = None, 0
        limit = len(tokens) - 1
        while position < limit:
            for run in children.get(parent, []):
                assert run.start == position
                pairs = zip(run.token_ids, tokens[position:limit], strict=False)
                common = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
                if common is None:
                    common = min(len(run.token_ids), limit - position)
                if common == len(run.token_ids) or (common and not whole_runs):
                    break
            else:
                return position
            position += common
            if common < len(run.token_ids):
                return position
            parent = run.identity
        return position


class Engine:
    """The smallest scheduler and executor that exercise every call of the interface."""

    def __init__(self, manager: KVCacheManager, rng: random.Random, *, listen: bool = False):
        self.manager = manager
        self.rng = rng
        self.device: dict[int, tuple[int, ...]] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.tables: dict[str, list[int]] = {}
        self.replay = EventReplay() if listen else None
        self.next_id = 0
        self.num_steps_without_progress = 0

    def add(self, tokens: list[int], max_tokens: int, **options: object) -> Request:
        request = make_request(f"r{self.next_id}", tokens, max_tokens, **options)  # type: ignore[arg-type]
        self.next_id += 1
        self.waiting.append(request)
        return request

    def step(self) -> None:
        copies: list = []
        scheduled: dict[str, tuple[Request, int, int]] = {}
        for request in list(self.running):
            if request in self.running:
                self._serve(request, scheduled)
        self._admit(scheduled, copies)
        self.manager.check_integrity()
        self._execute(scheduled, copies)
        self._update(scheduled)
        self.manager.check_integrity()
        self._check_blocks_are_partitioned()
        if self.replay is not None:
            self.replay.apply(self.manager)
        idle = not (self.waiting or self.running)
        self.num_steps_without_progress = 0 if scheduled or idle else self.num_steps_without_progress + 1
        assert self.num_steps_without_progress < 3, "the engine is stuck"

    def _chunk(self, request: Request, num_computed: int) -> int:
        left = request.num_tokens - num_computed
        return left if left == 1 or self.rng.random() < 0.3 else self.rng.randint(1, left)

    def _serve(self, request: Request, scheduled: dict) -> None:
        count = self._chunk(request, request.num_computed_tokens)
        lookahead = self.rng.choice([0, 0, 0, 2])
        while True:
            free_before = self.manager.num_free_blocks
            allocation = self.manager.allocate_slots(request, count, num_lookahead_tokens=lookahead)
            if allocation is not None:
                break
            self.manager.check_integrity()
            assert self.manager.num_free_blocks >= free_before
            if len(self.running) == 1:
                assert lookahead, "a lone request that fits the pool found no room"
                lookahead = 0
                continue
            victim = self.running[-1]
            self._preempt(victim)
            scheduled.pop(victim.request_id, None)
            if victim is request:
                return
        assert not allocation.block_copies
        self._append(request, allocation.block_ids)
        scheduled[request.request_id] = (request, count, lookahead)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.free(request)
        del self.tables[request.request_id]
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.waiting.insert(0, request)

    def _admit(self, scheduled: dict, copies: list) -> None:
        # A cache-aware policy matches the whole queue first; then earlier admissions may split or evict later matches.
        early = self.rng.random() < 0.4
        matches = {request.request_id: self.manager.match_prefix(request) for request in self.waiting if early}
        while self.waiting and len(self.running) < 6:
            request = self.waiting[0]
            prefix = matches.pop(request.request_id, None)
            is_early = prefix is not None
            if prefix is None:
                prefix = self.manager.match_prefix(request)
                assert prefix == self.manager.match_prefix(request)
            assert prefix.num_tokens < request.num_tokens
            assert len(prefix.block_ids) == prefix.num_tokens // self.manager.block_size
            assert (prefix.tail_block_id is None) == (prefix.num_tokens % self.manager.block_size == 0)
            count = self._chunk(request, prefix.num_tokens)
            before = self._state()
            allocation = self.manager.allocate_slots(request, count, prefix=prefix)
            if allocation is None:
                assert self._state() == before, "a failed allocation changed something"
                if is_early:
                    continue  # it may have gone stale: match again
                assert self.running, "a lone request that fits the pool was not admitted"
                return
            self.waiting.pop(0)
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = prefix.num_tokens
            self.tables[request.request_id] = []
            self._append(request, allocation.block_ids)
            assert is_early or allocation.block_ids[: len(prefix.block_ids)] == list(prefix.block_ids)
            copies += allocation.block_copies
            scheduled[request.request_id] = (request, count, 0)

    def _state(self) -> tuple:
        manager = self.manager
        stats = manager.stats
        counts = (stats.queries, stats.hits, stats.resumed_queries, stats.resumed_hits, stats.evicted_tokens)
        tables = {request.request_id: manager.block_ids(request.request_id) for request in self.running}
        order = [block.block_id for block in manager.pool.free_queue]  # type: ignore[attr-defined]
        num_blocks = (manager.num_free_blocks, manager.num_cached_blocks, manager.num_evictable_blocks)
        return num_blocks, counts, tables, order

    def _append(self, request: Request, block_ids: list[int]) -> None:
        table = self.tables[request.request_id]
        table += block_ids
        assert self.manager.block_ids(request.request_id) == table, "a table did not just grow"

    def _slot(self, request: Request, position: int) -> int:
        size = self.manager.block_size
        return self.tables[request.request_id][position // size] * size + position % size

    def _execute(self, scheduled: dict, copies: list) -> None:
        size = self.manager.block_size
        assert not {copy.src for copy in copies} & {copy.dst for copy in copies}, "a copy's source is another's target"
        for copy in copies:
            for offset in range(copy.num_tokens):
                self.device[copy.dst * size + offset] = self.device[copy.src * size + offset]
        for request, count, lookahead in scheduled.values():
            start = request.num_computed_tokens
            for position in range(start, start + count):
                self.device[self._slot(request, position)] = tuple(request.all_token_ids[: position + 1])
            for position in range(start + count, start + count + lookahead):
                self.device[self._slot(request, position)] = (-1,)
        for request, count, _ in scheduled.values():
            for position in range(request.num_computed_tokens + count):
                read = self.device.get(self._slot(request, position))
                wanted = tuple(request.all_token_ids[: position + 1])
                assert read == wanted, f"{request} reads {read} at position {position} instead of {wanted}"

    def _update(self, scheduled: dict) -> None:
        for request, count, _ in scheduled.values():
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(self.rng.randint(0, 2))
            self.manager.cache_computed(request)
            assert self.manager.block_ids(request.request_id) == self.tables[request.request_id]
            if request.num_output_tokens >= request.sampling.max_tokens or self.rng.random() < 0.02:
                self.abort(request)

    def abort(self, request: Request) -> None:
        """Ends a request in whatever state it is; twice, because that must be harmless."""
        if request in self.running:
            self.running.remove(request)
            del self.tables[request.request_id]
        else:
            self.waiting.remove(request)
        for _ in range(2):
            self.manager.free(request)
        request.status = RequestStatus.FINISHED
        self.finished.append(request)
        assert self.manager.block_ids(request.request_id) == []

    def flush(self) -> None:
        """Between two steps; the steps that follow read what the running requests computed before."""
        tables = {request.request_id: self.manager.block_ids(request.request_id) for request in self.running}
        is_empty = self.manager.reset()
        self.manager.check_integrity()
        assert tables == {request.request_id: self.manager.block_ids(request.request_id) for request in self.running}
        assert is_empty == (self.manager.num_cached_blocks == 0)
        assert is_empty or self.running
        assert self.manager.num_evictable_blocks == 0
        self._check_blocks_are_partitioned()

    def _check_blocks_are_partitioned(self) -> None:
        in_use = {block_id for table in self.tables.values() for block_id in table}
        assert self.manager.num_free_blocks + len(in_use) <= self.manager.num_blocks
        assert self.manager.num_evictable_blocks <= min(self.manager.num_free_blocks, self.manager.num_cached_blocks)
        if not self.running:
            assert self.manager.num_free_blocks == self.manager.num_blocks
            assert self.manager.num_evictable_blocks == self.manager.num_cached_blocks

    def run_dry(self) -> None:
        while self.waiting or self.running:
            self.step()


def random_prompts(rng: random.Random, max_len: int) -> list[list[int]]:
    """A few prompts with shared beginnings, some equal, some forks of an earlier one."""
    prompts: list[list[int]] = []
    for _ in range(rng.randint(1, 3)):
        if prompts and rng.random() < 0.6:
            base = rng.choice(prompts)
            prompt = base[: rng.randint(1, len(base))] + [rng.randint(0, 2) for _ in range(rng.randint(0, 9))]
        else:
            prompt = [rng.randint(0, 2) for _ in range(rng.randint(1, max_len))]
        prompts += [prompt[:max_len]] * rng.choice([1, 1, 2])
    return prompts


@pytest.mark.parametrize("organisation", ORGANISATIONS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("tightness", ["tiny", "tight", "ample"])
def test_every_request_reads_its_own_history(organisation: str, block_size: int, tightness: str) -> None:
    for seed in range(8):
        rng = random.Random(f"{block_size} {tightness} {seed}")
        max_len, max_new = 3 * block_size + 12, 12
        fits_one = -(-(max_len + max_new) // block_size)
        num_blocks = {"tiny": fits_one, "tight": 2 * fits_one + 1, "ample": 40 * fits_one}[tightness]
        listens = seed % 2 == 0
        engine = Engine(make(organisation, num_blocks, block_size), rng, listen=listens)
        history: list[list[int]] = [[0] * block_size]
        for _ in range(30):
            if rng.random() < 0.4:
                for prompt in random_prompts(rng, max_len):
                    if rng.random() < 0.4:  # the next turn of a chat, or the same again
                        prompt = (rng.choice(history) + prompt[:5])[:max_len]
                    options = {} if listens else {"salt": rng.choice([None, None, "a", "b"])}
                    if rng.random() < 0.1:
                        options["prompt_logprobs"] = 0
                    engine.add(prompt, rng.randint(0, max_new), priority=rng.randint(0, 2), **options)
            engine.step()
            live = engine.waiting + engine.running
            if live and rng.random() < 0.1:
                engine.abort(rng.choice(live))
            if rng.random() < 0.05:
                engine.flush()
            history += [request.all_token_ids for request in engine.finished[-2:]]
            probe = make_request("probe", (rng.choice(history) + [rng.randint(0, 2) for _ in range(6)])[:max_len], 0)
            engine.manager.explain(probe)
            if engine.replay is not None and organisation != "none":
                engine.replay.apply(engine.manager)
                expected = engine.replay.longest_match(probe.all_token_ids, whole_runs=organisation == "paged")
                if organisation != "paged" and expected // block_size + 1 >= num_blocks:
                    continue
                assert engine.manager.match_prefix(probe).num_tokens == expected
        engine.run_dry()
        engine.manager.check_integrity()
        assert engine.manager.num_free_blocks == num_blocks
        assert engine.manager.reset()
        assert engine.manager.num_cached_blocks == 0
        engine.manager.check_integrity()
        if organisation == "none":
            assert engine.manager.stats == PrefixCacheStats()
        if engine.replay is not None:
            engine.replay.apply(engine.manager)
            assert engine.replay.runs == {}


def test_the_late_listener_is_told_everything() -> None:
    for organisation in ("paged", "radix-lru"):
        rng = random.Random(7)
        engine = Engine(make(organisation, 60, 4), rng)
        for _ in range(6):
            for prompt in random_prompts(rng, 20):
                engine.add(prompt, 6)
        engine.run_dry()
        replay = EventReplay()
        replay.apply(engine.manager)
        for request in engine.finished:
            expected = replay.longest_match(request.all_token_ids, whole_runs=organisation == "paged")
            assert engine.manager.match_prefix(request).num_tokens == expected


def test_the_configuration_chooses_the_organisation() -> None:
    for organisation, kind in (
        ("paged", PagedKVCacheManager),
        ("none", PagedKVCacheManager),
        ("radix", RadixKVCacheManager),
    ):
        manager = make_kv_cache_manager(CacheConfig(organisation=organisation, block_size=8), 5)  # type: ignore[arg-type]
        assert type(manager) is kind
        assert (manager.num_blocks, manager.block_size, manager.num_free_blocks) == (5, 8, 5)
        compute(manager, make_request("a", [1] * 17))
        expected = {"paged": 16, "none": 0, "radix": 17}[organisation]
        assert manager.match_prefix(make_request("b", [1] * 18, 1)).num_tokens == expected


@pytest.mark.parametrize("organisation", ORGANISATIONS)
def test_reset_keeps_what_is_in_use(organisation: str) -> None:
    manager = make(organisation, 8, 4)
    compute(manager, make_request("old", [2] * 9))
    request = make_request("a", [1] * 9)
    assert manager.allocate_slots(request, 9) is not None
    request.num_computed_tokens = 9
    manager.cache_computed(request)
    caches = organisation != "none"
    assert manager.reset() is not caches
    assert len(manager.block_ids("a")) == 3
    assert manager.match_prefix(make_request("b", [2] * 9)) == NO_PREFIX
    assert (manager.match_prefix(make_request("b", [1] * 9)).num_tokens == 8) is caches
    manager.free(request)
    assert manager.reset()
    assert manager.match_prefix(make_request("b", [1] * 9)) == NO_PREFIX
    assert manager.num_free_blocks == 8


@pytest.mark.parametrize("organisation", ORGANISATIONS)
def test_unknown_requests_are_harmless(organisation: str) -> None:
    manager = make(organisation, 4, 4)
    manager.free(make_request("never", [1]))
    manager.cache_computed(make_request("never", [1]))
    assert manager.block_ids("never") == []
    manager.check_integrity()


def compute(manager: KVCacheManager, request: Request) -> int | None:
    """Run a whole prompt through the cache in one step; the number of tokens that came from it, None without room."""
    prefix = manager.match_prefix(request)
    if manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix=prefix) is None:
        return None
    request.num_computed_tokens = request.num_tokens
    manager.cache_computed(request)
    manager.free(request)
    return prefix.num_tokens


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The first 200 prompts of the trace, in blocks of 16 tokens."""
    trace = SHARED_DATA / "traces" / "mooncake_conversation_b16.jsonl"
    if not trace.exists():
        pytest.skip("the trace is not beside this checkout")
    spec = importlib.util.spec_from_file_location("expand_trace", SHARED_DATA / "expand_trace.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = [row for row, _ in zip(module.rows(trace), range(200), strict=False)]
    return [module.token_ids(row, block=16) for row in rows]


class TestTrace:
    """Hits on a real trace against the ideal: what an unbounded cache of whole blocks would give in this order.

    The last token of a prompt is always computed, so the ideal of one prompt counts the blocks that lie entirely before
    its last token: (input_length - 1) // block_size at most.
    """

    block_size = 16

    def ideal(self, prompts: list[list[int]]) -> list[int]:
        seen: set[tuple[int, ...]] = set()
        hits = []
        for tokens in prompts:
            ends = range(self.block_size, len(tokens) + 1, self.block_size)
            keys = [hash(tuple(tokens[:end])) for end in ends]
            num_hit = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
            hits.append(min(num_hit, (len(tokens) - 1) // self.block_size) * self.block_size)
            seen.update(keys)
        return hits

    def test_an_ample_pool_reaches_the_ideal(self, prompts: list[list[int]]) -> None:
        ideal = self.ideal(prompts)
        num_blocks = sum(-(-len(tokens) // self.block_size) for tokens in prompts)
        assert sum(ideal) > 0
        for organisation in ("paged", "radix-lru"):
            manager = make(organisation, num_blocks, self.block_size)
            hits = [compute(manager, make_request(str(i), tokens, 0)) for i, tokens in enumerate(prompts)]
            if organisation == "paged":
                assert hits == ideal
            else:
                assert all(hit is not None and hit >= best for hit, best in zip(hits, ideal, strict=True))
            assert manager.stats.hits == sum(hit or 0 for hit in hits)
            assert manager.stats.queries == sum(map(len, prompts))
            manager.check_integrity()

    @pytest.mark.parametrize("organisation", ["paged", "radix-lru", "radix-lfu", "radix-slru"])
    @pytest.mark.parametrize("percent", [10, 25, 50])
    def test_a_small_pool_never_exceeds_it(self, prompts: list[list[int]], organisation: str, percent: int) -> None:
        num_blocks = sum(-(-len(tokens) // self.block_size) for tokens in prompts) * percent // 100
        manager = make(organisation, num_blocks, self.block_size)
        total = 0
        for i, (tokens, best) in enumerate(zip(prompts, self.ideal(prompts), strict=True)):
            hit = compute(manager, make_request(str(i), tokens, 0))
            if hit is not None:
                assert hit // self.block_size * self.block_size <= best
                total += hit
        assert total > 0
        assert manager.num_free_blocks == num_blocks
        manager.check_integrity()
