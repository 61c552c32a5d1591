"""AsyncLLM: one asyncio stream per request over an engine process, which it watches and restarts. No torch here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kitfox.config import EngineConfig, ModelConfig, Pooling
from kitfox.engine.client import (
    Command,
    ControlAnswer,
    ControlEngine,
    EngineFailed,
    EngineReady,
    ProcessClient,
    StepDone,
)
from kitfox.engine.input_processor import EngineLimits, InputProcessor
from kitfox.engine.output_processor import OutputProcessor, error_of
from kitfox.errors import (
    AsleepError,
    EngineBusyError,
    EngineDeadError,
    InvalidParameterError,
    KitfoxError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
)
from kitfox.outputs import EngineOutput, EngineOutputs, EngineStats, RequestOutput
from kitfox.request import FinishReason, ImageTile, SamplingParams
from kitfox.structured_output.vocabulary import Vocabulary
from kitfox.tokenizer import load_tokenizer
from kitfox.tracing import TraceEvent, Tracer

logger = logging.getLogger("kitfox.engine")

STALLED_AFTER_S = 60.0  # requests in flight and no step for this long: /health says so
MAX_RESTARTS = 3  # in a row, without a finished step between them

MAX_ADAPTER_NAME_CHARS = 256

StartEngine = Callable[[], ProcessClient]


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter.

    Attributes:
        adapter_id: never used again, so that one of the same name is another one.
        path: its directory.
        is_loaded: whether requests may name it.
    """

    adapter_id: int
    name: str
    path: str
    is_loaded: bool = False


class AsyncLLM:
    """Serves requests concurrently; every stream ends with an answer or an error, whatever happens to the engine."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        path: Path,
        *,
        max_model_len: int,
        num_blocks: int,
        start_engine: StartEngine,
        default_sampling_params: dict[str, Any],
    ):
        """default_sampling_params: of `SamplingParams`, for what requests leave out; see `read_generation_defaults`."""
        self.config = config
        self._first_scheduling = config.scheduler
        self.model_config = model_config
        self.path = path
        self.max_model_len = max_model_len
        self.default_sampling_params = default_sampling_params
        if default_sampling_params:
            shown = ", ".join(f"{name} {value}" for name, value in default_sampling_params.items())
            logger.info("what requests leave out (--generation-config): %s", shown)
        self.stats = EngineStats(num_blocks=num_blocks, num_free_blocks=num_blocks, block_size=config.cache.block_size)
        self.on_step: Callable[[EngineStats], None] = lambda _: None  # hears of every step; `stats` is only the latest
        self.tracer = Tracer(config.trace_capacity)
        self.started_at = time.time()
        self.phases: list[tuple[str, float]] = []
        self.kernels = ""
        self.device = ""
        self.num_threads = 0
        self._start_engine = start_engine
        self._client = start_engine()  # first, so that the engine loads while the tokenizer does
        template = config.model.chat_template
        tokenizer_path = Path(config.model.tokenizer) if config.model.tokenizer else path
        self.tokenizer = load_tokenizer(tokenizer_path, template)
        self._vocabulary = Vocabulary.of(self.tokenizer, model_config.vocab_size)
        self._client.use_vocabulary(self._vocabulary)
        self._answers: dict[int, asyncio.Future[ControlAnswer]] = {}  # awaited ones, by their commands' numbers
        self._num_commands = 0
        self.has_served = False
        self.adapters: dict[str, Adapter] = {}
        self._first_loads: dict[int, str] = {}  # adapters that an engine loads as it starts, by commands' numbers
        self._num_adapters = 0
        for name, directory in config.adapters.modules:
            self._note_adapter(name, directory)
        self._send_adapters()
        self._input_processor = InputProcessor(
            EngineLimits.of(
                config,
                model_config,
                max_model_len=max_model_len,
                num_blocks=num_blocks,
                eos_token_ids=self.tokenizer.eos_token_ids,
                default_max_tokens=self.default_sampling_params.get("max_tokens"),
            ),
            self.tokenizer,
        )
        self._output_processor = OutputProcessor(self.tokenizer)
        self._streams: dict[str, asyncio.Queue[RequestOutput | KitfoxError]] = {}
        self.is_paused = False
        self.is_sleeping = False
        self._state = "starting"
        self._detail = "the engine is loading the model"
        self._ready = asyncio.Event()
        self._last_news_time_s = time.monotonic()
        self._num_restarts = 0
        self._receiver: asyncio.Task[None] | None = None

    # ---- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen to the engine; needs a running event loop. Requests may be added at once, they wait."""
        if self._receiver is None:
            self._receiver = asyncio.get_running_loop().create_task(self._receive_forever())

    async def wait_until_ready(self) -> None:
        """Return once the engine serves.

        Raises:
            EngineDeadError: it could not start.
        """
        self.start()
        await self._ready.wait()
        if self._state == "dead":
            raise EngineDeadError(self._detail)

    @property
    def health(self) -> str:
        """ "starting", "ok", "paused", "asleep", "stalled", "draining" or "dead"."""
        if self._state != "ok":
            return self._state
        if self.is_sleeping or self.is_paused:
            return "asleep" if self.is_sleeping else "paused"
        is_stalled = self._streams and time.monotonic() - self._last_news_time_s > STALLED_AFTER_S
        return "stalled" if is_stalled else "ok"

    @property
    def health_detail(self) -> str:
        if self.health == "stalled":
            return f"no step finished for {time.monotonic() - self._last_news_time_s:.0f} s with requests running"
        return self._detail

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let the running ones finish for up to drain_s seconds, end the engine."""
        if self._state != "dead":
            self._state, self._detail = "draining", "the server is shutting down"
        deadline = time.monotonic() + drain_s
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._receiver is not None:
            self._receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._receiver
        self._fail_everything(ShuttingDownError("the server shut down before the answer was complete"))
        await asyncio.to_thread(self._client.shutdown)

    # ---- requests -----------------------------------------------------------------------------------------------

    async def add_request(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        pooling: Pooling | None = None,
        adapter: str | None = None,
        tiles: list[ImageTile] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Check a request, hand it to the engine, and return the stream of its deltas.

        With `pooling` the one delta is an embedding, and sampling.max_tokens is 0. `adapter` is the name of one that is
        loaded, `tiles` are of the images in the prompt.

        Leaving the stream early (or cancelling the task that reads it) aborts the request.

        Raises:
            RequestError: it is wrong. QueueFullError: no room to wait. ShuttingDownError, EngineDeadError: as they say.
        """
        self._check_open()
        if request_id in self._output_processor:
            raise InvalidParameterError("request_id", "must not be one that is being served", request_id)
        requests = self._input_processor.process(
            prompt_token_ids,
            sampling,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            pooling=pooling,
            adapter_id=0 if adapter is None else self._adapter(adapter).adapter_id,
            tiles=tiles,
        )
        scheduler = self.config.scheduler
        room = scheduler.max_num_seqs + scheduler.max_num_queued_requests - self._output_processor.num_unfinished
        if room < len(requests):
            raise QueueFullError(
                f"the queue is full: {self._output_processor.num_unfinished} requests are running or waiting, "
                f"at most {scheduler.max_num_seqs} run and {scheduler.max_num_queued_requests} wait"
            )
        self.tracer.emit("received", request_id, prompt=len(prompt_token_ids), n=sampling.n)
        self._output_processor.add_request(requests, sampling, prompt)
        queue: asyncio.Queue[RequestOutput | KitfoxError] = asyncio.Queue()
        self._streams[request_id] = queue
        if len(self._streams) == 1:
            self._last_news_time_s = time.monotonic()
        self._client.add_requests(requests)
        return self._stream(request_id, queue)

    def _check_open(self) -> None:
        if self._state == "draining":
            raise ShuttingDownError("the server is shutting down and takes no new requests")
        if self._state == "dead":
            raise EngineDeadError(f"the engine is not running: {self._detail}")
        if self.is_sleeping:
            raise AsleepError("the server is asleep; POST /wake_up wakes it")

    async def _stream(
        self, request_id: str, queue: asyncio.Queue[RequestOutput | KitfoxError]
    ) -> AsyncIterator[RequestOutput]:
        try:
            while True:
                output = await queue.get()
                if isinstance(output, KitfoxError):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free before the engine's next step. Unknown ids are harmless."""
        self._streams.pop(request_id, None)
        unfinished = self._output_processor.abort(request_id)
        if unfinished:
            self.tracer.emit("aborted", request_id)
            self._client.abort(unfinished)

    @property
    def open_request_ids(self) -> list[str]:
        """Requests that have not been answered in full, in order of arrival."""
        return list(self._streams)

    def cut_short(self, request_id: str) -> bool:
        """End a request for its reader: it gets what there is, with finish reason "abort". False for an unknown id."""
        unfinished = self._output_processor.engine_request_ids(request_id)
        if not unfinished:
            return False
        self.tracer.emit("aborted", request_id)
        self._client.abort(unfinished)
        ends = [EngineOutput(request_id=engine_id, finish_reason=FinishReason.ABORT) for engine_id in unfinished]
        self._deliver(EngineOutputs(outputs=ends))
        return True

    async def trace(self, request_id: str) -> list[TraceEvent]:
        """Events of a request from both processes, in order of time; empty for an unknown id."""
        mine = self.tracer.of_request(request_id)
        if self._state in ("ok", "draining"):
            with contextlib.suppress(EngineDeadError):
                mine += (await self._control("trace", request_id=request_id)).events
        return sorted(mine, key=lambda event: event.time_s)

    # ---- control ------------------------------------------------------------------------------------------------

    async def _control(self, command: Command, **operands: Any) -> ControlAnswer:
        """Have the engine do something between two steps; `operands` are fields of ControlEngine.

        Raises:
            EngineDeadError: it is not there, or died before it answered.
        """
        await self.wait_until_ready()
        number = self._send(command, **operands)
        answer: asyncio.Future[ControlAnswer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            answered = await answer
        finally:
            self._answers.pop(number, None)
        self.stats = answered.stats
        return answered

    def _send(self, command: Command, **operands: Any) -> int:
        """Send a command; its number, which the answer has too."""
        self._num_commands += 1
        self._client.control(ControlEngine(self._num_commands, command, **operands))
        return self._num_commands

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Load a LoRA adapter from a directory. Requests may name it from then on.

        Raises:
            RequestError: the name is taken, there are as many as there may be, or the directory has none that fits the
                model.
        """
        most = self.config.adapters.max_loaded
        if len(self.adapters) >= most:
            raise InvalidParameterError("lora_name", f"must be one of at most {most} adapters (--max-cpu-loras)", name)
        adapter = self._note_adapter(name, path)
        try:
            loaded = await self._control("load_adapter", adapter_id=adapter.adapter_id, path=adapter.path)
            problem = loaded.problem
        except BaseException:
            del self.adapters[name]
            raise
        if problem:
            del self.adapters[name]
            raise RequestError(f"lora_path {path[:MAX_ADAPTER_NAME_CHARS]}: {problem}", param="lora_path")
        self.adapters[name] = msgspec.structs.replace(adapter, is_loaded=True)
        return self.adapters[name]

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that run with it go on to their end.

        Raises:
            InvalidParameterError: none has this name.
        """
        adapter = self._adapter(name)
        del self.adapters[name]
        await self._control("unload_adapter", adapter_id=adapter.adapter_id)

    def _adapter(self, name: str) -> Adapter:
        adapter = self.adapters.get(name)
        if adapter is None or not adapter.is_loaded:
            raise InvalidParameterError("lora_name", "must be an adapter that is loaded", name)
        return adapter

    def _note_adapter(self, name: str, path: str) -> Adapter:
        if not 1 <= len(name) <= MAX_ADAPTER_NAME_CHARS:
            raise InvalidParameterError("lora_name", f"must have 1 to {MAX_ADAPTER_NAME_CHARS} characters", name)
        if name in self.adapters:
            raise InvalidParameterError("lora_name", "must not be that of another adapter", name)
        self._num_adapters += 1
        self.adapters[name] = Adapter(adapter_id=self._num_adapters, name=name, path=path)
        return self.adapters[name]

    def _send_adapters(self) -> None:
        """Have an engine that starts load what there is, before any request."""
        self._first_loads.clear()
        for name, adapter in list(self.adapters.items()):
            if self.has_served and not adapter.is_loaded:  # it may be what the engine died of
                continue
            number = self._send("load_adapter", adapter_id=adapter.adapter_id, path=adapter.path)
            self._first_loads[number] = name
            self.adapters[name] = msgspec.structs.replace(adapter, is_loaded=True)

    async def flush_cache(self) -> bool:
        """Forget cached prefixes that no running request uses; whether none are left."""
        return (await self._control("flush_cache")).done

    async def pause(self) -> None:
        """Take no step until `resume`. Requests stay as they are, and new ones queue."""
        await self._control("pause")
        self.is_paused = True

    async def resume(self) -> None:
        await self._control("resume")
        self.is_paused = False
        self._last_news_time_s = time.monotonic()

    async def sleep(self) -> None:
        """Give the KV cache's memory back until `wake_up`; requests are refused until then.

        Raises:
            EngineBusyError: requests are open.
        """
        if self._streams:
            raise EngineBusyError(f"{len(self._streams)} requests are open; the server can sleep when there are none")
        was_sleeping, self.is_sleeping = self.is_sleeping, True  # at once: no request may come between
        try:
            done = (await self._control("sleep")).done
        except BaseException:
            self.is_sleeping = was_sleeping
            raise
        if not done:
            self.is_sleeping = was_sleeping
            raise EngineBusyError("the engine is still ending requests; try again")

    async def wake_up(self) -> None:
        """Have a KV cache again, an empty one."""
        await self._control("wake_up")
        self.is_sleeping = False

    async def start_profile(self) -> None:
        """Record every event of both processes from now on."""
        await self._control("start_profile")
        self.tracer.start_profile()

    async def stop_profile(self) -> list[TraceEvent]:
        """What both processes recorded since `start_profile`."""
        events = self.tracer.stop_profile()
        return events + (await self._control("stop_profile")).events

    async def set_scheduling(self, changes: Mapping[str, int]) -> None:
        """Change fields of the scheduler's configuration from the next step on, for as long as this server runs.

        Raises:
            InvalidParameterError: one of them is beyond what memory was made for at the start, or below what works.
        """
        first = self._first_scheduling
        least = 1 if first.enable_chunked_prefill else self.max_model_len  # a step must hold a whole prompt then
        most = first.max_num_batched_tokens
        assert most is not None, "the plan has decided"
        limits = {
            "max_num_seqs": (1, first.max_num_seqs),
            "max_num_batched_tokens": (least, most),
            "long_prefill_token_threshold": (0, self.max_model_len),
        }
        for name, value in changes.items():
            lowest, highest = limits[name]
            if not lowest <= value <= highest:
                raise InvalidParameterError(name, f"must be in [{lowest}, {highest}] as the server was started", value)
        config = self.config.replace(scheduler=dict(changes))
        await self._control("set_scheduling", scheduling=config.scheduler)
        self.config = config

    async def slow_down(self, seconds: float) -> None:
        """Sleep after each step; 0 ends it."""
        await self._control("slow_down", step_sleep_s=seconds)

    async def freeze_gc(self) -> None:
        """Have the engine look at no object again that is there now."""
        await self._control("freeze_gc")

    # ---- the engine's side --------------------------------------------------------------------------------------

    async def _receive_forever(self) -> None:
        while True:
            try:
                await self._receive_until_it_fails()
            except EngineDeadError as error:
                if not self._restart(error):
                    return

    async def _receive_until_it_fails(self) -> None:
        while True:
            reply = await self._client.receive()
            self._last_news_time_s = time.monotonic()
            match reply:
                case StepDone():
                    self._num_restarts = 0
                    self._deliver(reply.outputs)
                case EngineReady():
                    self.phases = reply.phases
                    self.kernels = reply.kernels
                    self.device = reply.device
                    self.num_threads = reply.num_threads
                    self._begin_to_serve()
                case ControlAnswer():
                    name = self._first_loads.pop(reply.number, None)
                    if name is not None:
                        if reply.problem:
                            self._give_up_adapter(name, reply.problem)
                        self._begin_to_serve()
                    answer = self._answers.get(reply.number)
                    if answer is not None and not answer.done():
                        answer.set_result(reply)
                case EngineFailed():
                    logger.error("the engine failed: %s\n%s", reply.cause, reply.detail)
                    raise EngineDeadError(reply.cause)

    def _begin_to_serve(self) -> None:
        """Once the engine is there, with all adapters."""
        if self._first_loads:
            return
        if self._state == "starting":
            self._state, self._detail = "ok", ""
        self.has_served = True
        self._ready.set()

    def _give_up_adapter(self, name: str, problem: str) -> None:
        """One that an engine could not load as it started; only the first engine does not start without it.

        Raises:
            EngineDeadError: it is the first.
        """
        if not self.has_served:
            raise EngineDeadError(f"the LoRA adapter {name} cannot be loaded: {problem}")
        logger.error("the LoRA adapter %s cannot be loaded any more: %s", name, problem)
        self.adapters.pop(name, None)

    def _deliver(self, step: EngineOutputs) -> None:
        if step.stats is not None:
            self.stats = step.stats
            self.on_step(self.stats)
        news, to_abort = self._output_processor.process(step.outputs)
        if to_abort:
            self._client.abort(to_abort)
        for output in news:
            queue = self._streams.get(output.request_id)
            if queue is None:
                continue
            error = error_of(output)
            if error is not None:
                queue.put_nowait(error)
                continue
            queue.put_nowait(output)
            if output.finished:
                self.tracer.emit("answered", output.request_id)
                del self._streams[output.request_id]

    def _restart(self, error: EngineDeadError) -> bool:
        """Answer every open request with the error and start a new engine, unless it keeps dying."""
        self._fail_everything(EngineDeadError(f"the engine failed while this request was open: {error.message}"))
        draining = self._state == "draining"
        self._client.shutdown()
        if draining or not self.has_served or self._num_restarts >= MAX_RESTARTS:
            self._state, self._detail = "dead", error.message
            self._ready.set()
            logger.error("the engine is not restarted: %s", error.message)
            return False
        self._num_restarts += 1
        self._state, self._detail = "starting", f"the engine is being restarted: {error.message}"
        logger.error("restarting the engine (%d of %d): %s", self._num_restarts, MAX_RESTARTS, error.message)
        self._client = self._start_engine()
        self._client.use_vocabulary(self._vocabulary)
        self._send_adapters()
        if self.config.scheduler != self._first_scheduling:
            self._send("set_scheduling", scheduling=self.config.scheduler)
        self.is_paused = self.is_sleeping = False
        return True

    def _fail_everything(self, error: KitfoxError) -> None:
        for request_id in self._output_processor.unfinished_request_ids():
            self._output_processor.abort(request_id)
        for queue in self._streams.values():
            queue.put_nowait(error)
        self._streams.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError("the engine ended before it answered"))
