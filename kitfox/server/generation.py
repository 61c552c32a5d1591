"""What every protocol of the server shares: from a checked HTTP request to the engine's deltas for it.

A protocol makes a `Job`; `Generator.open` hands its prompts to the engine, `OpenStreams.outputs` yields what comes
back.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kitfox.config import Pooling
from kitfox.engine.input_processor import truncated_prompt
from kitfox.errors import (
    AsleepError,
    EngineDeadError,
    InvalidParameterError,
    ModelMismatchError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
    UnsupportedParameterError,
)
from kitfox.outputs import RequestOutput
from kitfox.request import MAX_N, FinishReason, ImageTile, SamplingParams
from kitfox.server.logs import current_request
from kitfox.server.metrics import RequestObserver, ServerMetrics

if TYPE_CHECKING:
    from fastapi import Request, Response

    from kitfox.engine.async_llm import AsyncLLM
    from kitfox.server.conversation import ChatDialect
    from kitfox.server.images import ImageReader
    from kitfox.server.templates import TemplateRenderer
    from kitfox.tokenizer import Tokenizer

MAX_PROMPTS = 2048
MAX_ANSWERS = 2048  # prompts times n of one HTTP request
MAX_REQUEST_ID_CHARS = 128
ENCODE_IN_THREAD_CHARS = 20_000  # longer texts would hold up everybody's streams


# ---- models ---------------------------------------------------------------------------------------------------------


def served_model_names(llm: AsyncLLM) -> tuple[str, ...]:
    """Every name the API answers to."""
    options = llm.config.model
    return options.served_model_names or (options.model,)


def loaded_adapters(llm: AsyncLLM) -> dict[str, str]:
    """The directories of LoRA adapters that requests may name, by their names."""
    return {name: adapter.path for name, adapter in llm.adapters.items() if adapter.is_loaded}


@dataclass(frozen=True)
class ChosenModel:
    """Who is to answer.

    Attributes:
        name: what the answer calls it, which is what the request called it.
        adapter: of the LoRA adapter; None is the model alone.
    """

    name: str
    adapter: str | None = None


def required_model(llm: AsyncLLM, name: str | None, lora_path: str | None = None) -> ChosenModel:
    """Who is to answer. As in the OpenAI API, a request that generates must say which model it means."""
    if name is None:
        served = ", ".join([*served_model_names(llm), *loaded_adapters(llm)])
        raise RequestError(f"model is required and must name a served model: {served}", param="model")
    return check_model(llm, name, lora_path)


def check_model(llm: AsyncLLM, name: str | None, lora_path: str | None = None) -> ChosenModel:
    """Who is to answer: the one asked for, or the first served one.

    Args:
        name: of a served model, of an adapter, or SGLang's "MODEL:ADAPTER".
        lora_path: the name of an adapter, as SGLang calls it.

    Raises:
        ModelMismatchError: there is none of that name. RequestError: there are no adapters, or two are named.
    """
    served = served_model_names(llm)
    if name is None:
        chosen = ChosenModel(served[0])
    elif name in served:
        chosen = ChosenModel(name)
    else:
        chosen = ChosenModel(name, _adapter_named(llm, name))
    if lora_path is None:
        return chosen
    check_takes_adapters(llm, "lora_path")
    if chosen.adapter not in (None, lora_path):
        raise InvalidParameterError("lora_path", "must not differ from the adapter that model names", lora_path)
    adapters = loaded_adapters(llm)
    if lora_path not in adapters:
        there = ", ".join(adapters) or "none"
        raise ModelMismatchError(
            f"The LoRA adapter `{lora_path[:200]}` is not loaded. Loaded: {there}", param="lora_path"
        )
    return ChosenModel(chosen.name, lora_path)


def _adapter_named(llm: AsyncLLM, model: str) -> str:
    served, adapters = served_model_names(llm), loaded_adapters(llm)
    for adapter in (model, *(model[len(name) + 1 :] for name in served if model.startswith(f"{name}:"))):
        if adapter in adapters:
            return adapter
    there = ", ".join([*served, *adapters])
    raise ModelMismatchError(f"The model `{model[:200]}` is not served. Served: {there}", param="model")


def check_takes_adapters(llm: AsyncLLM, param: str) -> None:
    """Raises UnsupportedParameterError for a parameter that is about LoRA adapters where there may be none."""
    if not llm.config.adapters.enabled:
        raise UnsupportedParameterError(param, "needs a server that was started with --enable-lora")


# ---- prompts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """Token ids for the engine, the text they came from (None when the client sent ids), and tiles of its images."""

    token_ids: list[int]
    text: str | None
    tiles: list[ImageTile] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One HTTP request, ready for the engine.

    Attributes:
        answer_id: the id clients see; engine requests are called it, or ID~0, ID~1, ... for several prompts.
        created: Unix time in seconds.
        model: as the answer calls it.
        adapter: the LoRA adapter that answers; None is the model alone.
        pooling: how to make one vector of each prompt; None generates.
    """

    answer_id: str
    created: int
    model: str
    prompts: list[Prompt]
    sampling: SamplingParams
    adapter: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    pooling: Pooling | None = None

    def engine_request_id(self, prompt_index: int) -> str:
        return self.answer_id if len(self.prompts) == 1 else f"{self.answer_id}~{prompt_index}"

    def sampling_of(self, prompt_index: int) -> SamplingParams:
        """The prompt's own parameters, where the protocol has such; n is `sampling.n` for all of them."""
        return self.sampling

    def cache_salt_of(self, prompt_index: int) -> str | None:
        return self.cache_salt

    def adapter_of(self, prompt_index: int) -> str | None:
        return self.adapter

    @property
    def adapters(self) -> list[str]:
        """Those that answer any of its prompts, each once."""
        of_prompts = {self.adapter_of(index) for index in range(len(self.prompts))}
        return sorted(name for name in of_prompts if name is not None)


async def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    if len(text) > ENCODE_IN_THREAD_CHARS:
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


async def make_prompts(
    tokenizer: Tokenizer, prompt: Any, *, add_special_tokens: bool, param: str = "prompt"
) -> list[Prompt]:
    """The four shapes of `prompt` (or what the protocol calls it). The engine checks token ids for their range."""
    if isinstance(prompt, str):
        sources: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        sources = [prompt]
    elif isinstance(prompt, list) and prompt:
        sources = prompt
    else:
        raise InvalidParameterError(param, "must be text, token ids, or a non-empty list of them", prompt)
    if len(sources) > MAX_PROMPTS:
        raise InvalidParameterError(param, f"must be at most {MAX_PROMPTS} prompts", len(sources))
    if isinstance(sources[0], str) != all(isinstance(source, str) for source in sources):
        raise InvalidParameterError(param, "must not mix texts and token ids", prompt)
    prompts = []
    for source in sources:
        if isinstance(source, str):
            ids = await encode_text(tokenizer, source, add_special_tokens=add_special_tokens)
            prompts.append(Prompt(ids, source))
        elif isinstance(source, list) and all(type(item) is int for item in source):
            prompts.append(Prompt(source, None))
        else:
            raise InvalidParameterError(param, "must be text, token ids, or lists of only one of them", source)
    return prompts


class _HasTruncation(Protocol):
    truncate_prompt_tokens: int | None
    truncation_side: str


def truncated(prompt: Prompt, fields: _HasTruncation, *, max_tokens: int | None, max_model_len: int) -> Prompt:
    """What truncate_prompt_tokens leaves of a prompt. Its text is then that of the token ids."""
    kept = fields.truncate_prompt_tokens
    if kept is None:
        return prompt
    token_ids = truncated_prompt(
        prompt.token_ids, kept, fields.truncation_side, max_tokens=max_tokens, max_model_len=max_model_len
    )
    return Prompt(token_ids, None, prompt.tiles)


# ---- the engine's side ----------------------------------------------------------------------------------------------


class Answer(Protocol):
    """What a protocol makes of a job: one object or server-sent events. `close` aborts what still runs.

    `accepted` waits until the engine can no longer refuse the job, and raises if it does; whoever reads the answer
    finds out as well, but a stream has sent its status by then.
    """

    async def accepted(self) -> None: ...

    async def whole(self) -> Any: ...

    def events(self) -> AsyncGenerator[bytes, None]: ...

    def close(self) -> None: ...


class Respond(Protocol):
    """Sends an answer, whole or streamed, until the client leaves."""

    async def __call__(self, request: Request, reply: Answer, *, stream: bool) -> Response: ...


class Generator:
    """Opens jobs on one engine; knows which answer ids are in use, and the model's dialect in chats."""

    def __init__(
        self,
        llm: AsyncLLM,
        metrics: ServerMetrics,
        dialect: ChatDialect,
        *,
        strict: bool = False,
        renderer: TemplateRenderer | None = None,
        images: ImageReader | None = None,
    ):
        """`strict` refuses what would be listed as ignored; `renderer` takes templates from requests, None refuses.

        `images` reads those of chats; None where the model reads none.
        """
        self.llm = llm
        self.images = images
        self._renderer = renderer
        self.strict = strict
        self.dialect = dialect
        self._metrics = metrics
        self._ids_in_use: set[str] = set()

    def renderer_of(self, chat_template: str | None) -> TemplateRenderer | None:
        """What renders a request's own template; None where it has none.

        Raises:
            UnsupportedParameterError: this server takes none.
        """
        if chat_template is not None and self._renderer is None:
            reason = "is not supported: this server runs without --trust-request-chat-template"
            raise UnsupportedParameterError("chat_template", reason)
        return None if chat_template is None else self._renderer

    def claim_id(self, prefix: str, client_id: str | None) -> str:
        """An id "PREFIX..." that no open request has; a client's own id is part of it. To be given to `open`.

        Raises:
            InvalidParameterError: the client's id is too long.
        """
        if client_id is not None and not 1 <= len(client_id) <= MAX_REQUEST_ID_CHARS:
            raise InvalidParameterError("request_id", f"must have 1 to {MAX_REQUEST_ID_CHARS} characters", client_id)
        own = uuid.uuid4().hex
        name = own if client_id is None else re.sub(r"[^A-Za-z0-9._:-]", "_", client_id)
        answer_id = f"{prefix}{name}"
        if answer_id in self._ids_in_use:
            answer_id = f"{answer_id}-{own}"
        self._ids_in_use.add(answer_id)
        return answer_id

    async def open(self, job: Job) -> OpenStreams:
        """Hand every prompt of a job to the engine, or none.

        Raises:
            KitfoxError: it was refused; its answer id is free again.
        """
        streams = OpenStreams(self.llm, self._metrics, job, self._ids_in_use)
        if len(job.prompts) * job.sampling.n > MAX_ANSWERS:
            streams.close()
            limit = (
                f"times the number of prompts ({len(job.prompts)}) must be at most {MAX_ANSWERS}; n is at most {MAX_N}"
            )
            raise InvalidParameterError("n", limit, job.sampling.n)
        await streams.open()
        return streams


class OpenStreams:
    """The engine's streams for all prompts of a job, read as one. Leaving early aborts what still runs."""

    def __init__(self, llm: AsyncLLM, metrics: ServerMetrics, job: Job, ids_in_use: set[str]):
        self._llm = llm
        self._metrics = metrics
        self._job = job
        self._ids_in_use = ids_in_use
        self._streams: list[AsyncIterator[RequestOutput]] = []
        self._observers: list[RequestObserver] = []
        self._record = current_request.get()
        if self._record is not None:
            self._record.job = self._record.job or job
        self._pumps: list[asyncio.Task[None]] = []  # of several prompts, into the queue
        self._queue: asyncio.Queue[tuple[int, RequestOutput] | Exception] = asyncio.Queue()
        self._unfinished: set[int] = set()
        self._first_news: list[tuple[int, RequestOutput]] = []  # that came while `accepted` waited
        self._closed = False

    async def open(self) -> None:
        """Hand every prompt to the engine, or none.

        Raises:
            KitfoxError: the engine refused one; the others are aborted.
        """
        job = self._job
        try:
            for index, prompt in enumerate(job.prompts):
                stream = await self._llm.add_request(
                    prompt.token_ids,
                    job.sampling_of(index),
                    request_id=job.engine_request_id(index),
                    prompt=prompt.text,
                    priority=job.priority,
                    cache_salt=job.cache_salt_of(index),
                    pooling=job.pooling,
                    adapter=job.adapter_of(index),
                    tiles=prompt.tiles,
                )
                self._streams.append(stream)
                self._unfinished.add(index)
                self._observers.append(
                    RequestObserver(
                        self._metrics,
                        job.sampling_of(index),
                        len(prompt.token_ids),
                        self._record,
                        adapter=job.adapter_of(index),
                    )
                )
        except BaseException as error:
            if isinstance(error, QueueFullError | ShuttingDownError | AsleepError | EngineDeadError):
                self._metrics.rejections[error.code or ""] += 1
            self.close()
            raise

    async def accepted(self) -> None:
        """Wait until the engine cannot refuse a prompt any more: it compiles constraints after it has taken a job.

        Raises:
            KitfoxError: a constraint cannot be had; everything is aborted.
        """
        awaited: dict[bytes, int] = {}  # one prompt for each constraint
        for index in range(len(self._streams)):
            constraint = self._job.sampling_of(index).constraint
            if constraint is not None:
                awaited.setdefault(msgspec.msgpack.encode(constraint), index)
        waiting = set(awaited.values())
        try:
            while waiting:
                index, output = await self._next_news()
                self._first_news.append((index, output))
                waiting.discard(index)
        except Exception:
            self.close(FinishReason.ERROR)
            raise

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, its next delta) as they come.

        Raises:
            KitfoxError: a request failed in the engine.
        """
        num_open = len(self._streams)
        while num_open:
            index, output = self._first_news.pop(0) if self._first_news else await self._next_news()
            num_open -= output.finished
            yield index, self._observed(index, output)
        if len(self._streams) == 1:
            await anext(self._streams[0], None)  # lets it end now: its end takes the request's id out of use

    async def _next_news(self) -> tuple[int, RequestOutput]:
        if len(self._streams) == 1:
            return 0, await anext(self._streams[0])
        if not self._pumps:
            self._pumps = [asyncio.create_task(self._pump(index)) for index in range(len(self._streams))]
        news = await self._queue.get()
        if isinstance(news, Exception):
            raise news
        return news

    async def _pump(self, index: int) -> None:
        try:
            async for output in self._streams[index]:
                self._queue.put_nowait((index, output))
        except Exception as error:
            self._queue.put_nowait(error)

    def _observed(self, index: int, output: RequestOutput) -> RequestOutput:
        self._observers[index].observe(output)
        if output.finished:
            self._unfinished.discard(index)
        return output

    def close(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort what still runs and give the answer's id back; harmless when all has finished, or when repeated."""
        if self._closed:
            return
        self._closed = True
        self._ids_in_use.discard(self._job.answer_id)
        for pump in self._pumps:
            pump.cancel()
        for index in self._unfinished:
            self._llm.abort(self._job.engine_request_id(index))
            self._observers[index].close(reason)
        self._unfinished.clear()


@dataclass
class Usage:
    """Token counts of a job so far; cached tokens are known from each prompt's first delta."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)  # by prompt index
    reasoning_tokens: int | None = None  # of the completion's; None where answers are plain text

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        self.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        self.cached_tokens[prompt_index] = output.num_cached_tokens

    def as_dict(self) -> dict[str, Any]:
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return counts
