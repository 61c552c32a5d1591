"""Flush, pause, sleep, abort and profile: in the core, and through AsyncLLM with an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kitfox.config import AdapterOptions, EngineConfig, ModelConfig, SchedulerConfig
from kitfox.engine.async_llm import AsyncLLM
from kitfox.engine.client import ControlEngine, EngineReady, EngineReply, StepDone
from kitfox.engine.core import EngineCore
from kitfox.engine.launch import obey
from kitfox.errors import AsleepError, EngineBusyError, EngineDeadError, InvalidParameterError, RequestError
from kitfox.outputs import RequestOutput
from kitfox.request import EngineRequest, FinishReason, SamplingParams
from kitfox.structured_output.vocabulary import Vocabulary
from tests.engine.fakes import FakeExecutor, make_core, request, run
from tests.test_tokenizer import byte_tokenizer

# ---- the core --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["paged", "radix", "none"])
def test_a_flush_beside_a_running_request_changes_nothing_for_it(cache: str) -> None:
    prompt = list(range(9))
    expected = run_alone(cache, prompt)
    core = make_core(cache=cache)
    core.add_request(request("old", [50, 51, 52, 53, 54, 55, 56, 57, 58]))
    run(core)
    core.add_request(request("r", prompt, max_tokens=12))
    core.step()
    assert core.flush_cache() is (cache == "none")
    core.scheduler.kv_cache.check_integrity()
    outputs = [prompt[-1] + 1, *run(core)["r"]]
    assert outputs == expected
    assert core.flush_cache()
    assert core.scheduler.kv_cache.num_cached_blocks == 0
    assert core.scheduler.kv_cache.num_free_blocks == 64


def run_alone(cache: str, prompt: list[int]) -> list[int]:
    core = make_core(cache=cache)
    core.add_request(request("r", prompt, max_tokens=12))
    return run(core)["r"]


def test_a_paused_core_keeps_its_requests_and_takes_no_step() -> None:
    core = make_core()
    core.add_request(request("r", [1, 2, 3], max_tokens=3))
    core.step()
    core.pause()
    assert not core.has_work
    core.add_request(request("later", [5], max_tokens=1))
    core.add_request(request("r", [1]))  # refused, and said although nothing runs
    assert core.has_work
    [refusal] = core.step().outputs
    assert refusal.finish_reason is FinishReason.ERROR
    assert not core.has_work
    core.resume()
    assert run(core) == {"r": [5, 6], "later": [6]}


def test_what_is_aborted_in_a_pause_gives_its_blocks_back_at_once() -> None:
    core = make_core()
    core.add_request(request("r", [1, 2, 3], max_tokens=9))
    core.step()
    core.pause()
    core.abort(["r"])
    assert core.scheduler.kv_cache.num_free_blocks == 64
    assert not core.has_news_for_executor
    core.resume()
    assert core.has_news_for_executor
    core.step()
    assert core.executor.token_ids == {}


@pytest.mark.parametrize("cache", ["paged", "radix", "none"])
def test_sleep_waits_for_nobody_and_wakes_empty(cache: str) -> None:
    core = make_core(cache=cache)
    core.add_request(request("a", list(range(10))))
    assert not core.sleep()
    assert core.executor.has_kv_cache
    expected = run(core)["a"]
    assert core.sleep()
    assert core.sleep()  # twice is once
    assert not core.executor.has_kv_cache
    core.step()  # tells the executor whom to forget
    core.wake_up()
    core.wake_up()
    core.add_request(request("b", list(range(10))))
    [output] = core.step().outputs
    assert output.num_cached_tokens == 0
    assert [*output.new_token_ids, *run(core)["b"]] == expected


# ---- AsyncLLM --------------------------------------------------------------------------------------------------------


class LocalClient:
    """An engine in this process, for the calls that AsyncLLM makes of a ProcessClient."""

    def __init__(self, core: EngineCore):
        self.core = core
        self.replies: list[EngineReply] = [EngineReady(num_blocks=64, block_size=4, phases=[])]
        self.dies = False

    def add_requests(self, requests: list[EngineRequest]) -> None:
        for each in requests:
            self.core.add_request(each)

    def abort(self, request_ids: list[str]) -> None:
        self.core.abort(request_ids)

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def control(self, message: ControlEngine) -> None:
        if message.command == "stop_profile" and self.dies:
            return
        self.replies.append(obey(self.core, message))

    async def receive(self) -> EngineReply:
        while True:
            await asyncio.sleep(0)
            if self.dies:
                raise EngineDeadError("it died")
            if self.replies:
                return self.replies.pop(0)
            if self.core.has_work or self.core.has_news_for_executor:
                return StepDone(self.core.step())

    def shutdown(self) -> None:
        pass


def with_llm(
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[AsyncLLM, LocalClient], Awaitable[None]],
    config: EngineConfig = EngineConfig(),  # noqa: B008 (it is frozen)
) -> None:
    """Run work with an engine that counts: the token after T is T + 1."""
    monkeypatch.setattr("kitfox.engine.async_llm.load_tokenizer", lambda *_: byte_tokenizer())
    model_config = ModelConfig("LlamaForCausalLM", 256, 8, 8, 1, 1, 1, 8, 512)

    async def main() -> None:
        clients: list[LocalClient] = []

        def start() -> LocalClient:
            clients.append(LocalClient(make_core()))
            return clients[-1]

        llm = AsyncLLM(
            config, model_config, Path("none"), max_model_len=200, num_blocks=64,
            start_engine=start, default_sampling_params={},  # type: ignore[arg-type]
        )  # fmt: skip
        await llm.wait_until_ready()
        await work(llm, clients[-1])
        await llm.shutdown()

    asyncio.run(main())


async def read(llm: AsyncLLM, request_id: str, *, max_tokens: int = 100, n: int = 1) -> list[RequestOutput]:
    sampling = SamplingParams(max_tokens=max_tokens, n=n, temperature=0)
    return [output async for output in await llm.add_request([65, 66], sampling, request_id=request_id)]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


def tokens_of(outputs: list[RequestOutput], index: int = 0) -> list[int]:
    return [
        token for output in outputs for answer in output.outputs if answer.index == index for token in answer.token_ids
    ]


def test_a_request_that_is_cut_short_ends_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM, client: LocalClient) -> None:
        reader = asyncio.create_task(read(llm, "r", n=2))
        await until(lambda: llm.stats.step >= 6)
        assert llm.open_request_ids == ["r"]
        assert llm.cut_short("r")
        assert not llm.cut_short("r")
        assert not llm.cut_short("nobody")
        outputs = await reader
        assert outputs[-1].finished
        reasons = [answer.finish_reason for answer in outputs[-1].outputs]
        assert reasons == [FinishReason.ABORT] * 2
        for index in range(2):
            got = tokens_of(outputs, index)
            assert got == list(range(67, 67 + len(got)))
        assert outputs[-1].timings is not None
        assert outputs[-1].timings.ttft_s is None
        assert llm.open_request_ids == []
        assert client.core.scheduler.kv_cache.num_free_blocks == 64
        assert tokens_of(await read(llm, "r", max_tokens=2)) == [67, 68]

    with_llm(monkeypatch, work)


def test_a_pause_holds_streams_and_lets_them_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM, client: LocalClient) -> None:
        reader = asyncio.create_task(read(llm, "r", max_tokens=30))
        await until(lambda: llm.stats.step >= 3)
        await llm.pause()
        assert (llm.is_paused, llm.health) == (True, "paused")
        step = llm.stats.step
        later = asyncio.create_task(read(llm, "later", max_tokens=1))
        for _ in range(50):
            await asyncio.sleep(0)
        assert llm.stats.step == step
        assert not reader.done()
        await llm.resume()
        assert llm.health == "ok"
        assert tokens_of(await reader) == list(range(67, 97))
        assert tokens_of(await later) == [67]

    with_llm(monkeypatch, work)


def test_nobody_is_served_in_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM, client: LocalClient) -> None:
        reader = asyncio.create_task(read(llm, "r"))
        await until(lambda: llm.stats.step >= 2)
        with pytest.raises(EngineBusyError):
            await llm.sleep()
        assert not llm.is_sleeping
        await reader
        await llm.sleep()
        assert (llm.is_sleeping, llm.health, llm.stats.num_cached_blocks) == (True, "asleep", 0)
        with pytest.raises(AsleepError):
            await read(llm, "r")
        await llm.wake_up()
        assert tokens_of(await read(llm, "r", max_tokens=2)) == [67, 68]

    with_llm(monkeypatch, work)


def test_a_flush_says_whether_all_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM, client: LocalClient) -> None:
        reader = asyncio.create_task(read(llm, "r", max_tokens=50))
        await until(lambda: llm.stats.step >= 9)
        assert not await llm.flush_cache()
        await reader
        assert await llm.flush_cache()
        assert llm.stats.num_cached_blocks == 0

    with_llm(monkeypatch, work)


def test_a_profile_has_both_sides_and_only_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM, client: LocalClient) -> None:
        await read(llm, "before", max_tokens=1)
        await llm.start_profile()
        await read(llm, "r", max_tokens=3)
        events = await llm.stop_profile()
        await read(llm, "after", max_tokens=1)
        assert {event.request_id for event in events} == {"", "r"}
        names = [event.name for event in events]
        assert names.count("step") == 3
        assert {"received", "queued", "admitted", "first_token", "finished", "answered"} <= set(names)
        assert await llm.stop_profile() == []

    with_llm(monkeypatch, work)


def test_a_command_to_an_engine_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM, client: LocalClient) -> None:
        await llm.pause()
        client.dies = True
        with pytest.raises(EngineDeadError):
            await llm.stop_profile()
        assert not llm.is_paused  # the new engine runs
        assert tokens_of(await read(llm, "r", max_tokens=2)) == [67, 68]

    with_llm(monkeypatch, work)


# ---- adapters --------------------------------------------------------------------------------------------------------

ADAPTERS = EngineConfig(adapters=AdapterOptions(enabled=True, modules=(("a", "/adapters/a"),), max_loaded=2))


def test_adapters_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM, client: LocalClient) -> None:
        executor = client.core.executor
        assert isinstance(executor, FakeExecutor)
        assert executor.adapters == {1: Path("/adapters/a")}
        added = await llm.load_adapter("b", "/adapters/b")
        assert (added.adapter_id, added.is_loaded, list(llm.adapters)) == (2, True, ["a", "b"])
        sampling = SamplingParams(max_tokens=3, temperature=0)
        stream = await llm.add_request([65, 66], sampling, request_id="r", adapter="b")
        assert client.core.scheduler.requests["r"].adapter_id == 2
        await llm.unload_adapter("b")
        assert sorted(executor.adapters) == [1, 2]  # in use
        assert tokens_of([output async for output in stream]) == [67, 68, 69]
        assert sorted(executor.adapters) == [1]
        with pytest.raises(InvalidParameterError, match="must be an adapter that is loaded"):
            await llm.add_request([65], sampling, request_id="s", adapter="b")
        assert (await llm.load_adapter("b", "/adapters/b")).adapter_id == 3

    with_llm(monkeypatch, work, ADAPTERS)


def test_adapters_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM, client: LocalClient) -> None:
        with pytest.raises(RequestError, match="lora_path /adapters/broken: it is broken"):
            await llm.load_adapter("b", "/adapters/broken")
        with pytest.raises(RequestError, match="the server failed to load it; its log says why"):
            await llm.load_adapter("b", "/adapters/poison")
        for name in ("a", "", "x" * 257):
            with pytest.raises(InvalidParameterError):
                await llm.load_adapter(name, "/adapters/b")
        with pytest.raises(InvalidParameterError):
            await llm.unload_adapter("b")
        await llm.load_adapter("b", "/adapters/b")
        with pytest.raises(InvalidParameterError, match="at most 2"):
            await llm.load_adapter("c", "/adapters/c")
        assert list(llm.adapters) == ["a", "b"]

    with_llm(monkeypatch, work, ADAPTERS)


def test_a_new_engine_gets_the_adapters_of_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM, client: LocalClient) -> None:
        await llm.load_adapter("b", "/adapters/b")
        client.dies = True
        await until(lambda: llm.health == "starting")
        await until(lambda: llm.health == "ok")
        executor = llm._client.core.executor  # type: ignore[attr-defined]
        assert executor.adapters == {1: Path("/adapters/a"), 2: Path("/adapters/b")}
        sampling = SamplingParams(max_tokens=2, temperature=0)
        stream = await llm.add_request([65, 66], sampling, request_id="r", adapter="b")
        assert tokens_of([output async for output in stream]) == [67, 68]

    with_llm(monkeypatch, work, ADAPTERS)


def test_an_engine_does_not_start_without_its_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM, client: LocalClient) -> None:
        raise AssertionError("it started")

    with pytest.raises(EngineDeadError, match="the LoRA adapter a cannot be loaded: it is broken"):
        with_llm(
            monkeypatch, work, EngineConfig(adapters=AdapterOptions(enabled=True, modules=(("a", "/adapters/broken"),)))
        )


def test_a_step_takes_in_no_more_than_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM, client: LocalClient) -> None:
        first = llm.config.scheduler
        await llm.set_scheduling({"max_num_seqs": 1})
        readers = [asyncio.create_task(read(llm, name, max_tokens=5)) for name in "abc"]
        most = 0
        while not all(reader.done() for reader in readers):
            await asyncio.sleep(0)
            most = max(most, llm.stats.num_running)
        assert most == 1
        assert [tokens_of(reader.result()) for reader in readers] == [[67, 68, 69, 70, 71]] * 3
        for changes in ({"max_num_seqs": first.max_num_seqs + 1}, {"max_num_batched_tokens": 0}):
            with pytest.raises(InvalidParameterError):
                await llm.set_scheduling(changes)
        assert (llm.config.scheduler.max_num_seqs, llm.config.scheduler.max_num_batched_tokens) == (1, 64)

    with_llm(monkeypatch, work, EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=64)))


def test_an_engine_that_is_started_again_has_the_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM, client: LocalClient) -> None:
        await llm.set_scheduling({"max_num_seqs": 2})
        client.dies = True
        with pytest.raises(EngineDeadError):
            await llm.stop_profile()
        await llm.wait_until_ready()
        await llm.flush_cache()
        assert llm._client is not client
        assert llm._client.core.scheduler.config.max_num_seqs == 2  # type: ignore[attr-defined]

    with_llm(monkeypatch, work, EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=64)))


def test_a_slow_engine_sleeps_after_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("kitfox.engine.core.time.sleep", slept.append)

    async def work(llm: AsyncLLM, client: LocalClient) -> None:
        await llm.slow_down(0.25)
        await read(llm, "r", max_tokens=3)
        assert slept == [0.25] * 3
        await llm.slow_down(0)
        await read(llm, "s", max_tokens=3)
        assert len(slept) == 3

    with_llm(monkeypatch, work)
