"""SGLang's native protocol: /generate, what its clients ask about the model, and a health check that generates.

A chunk of a stream is the whole answer so far, text and token ids and log-probabilities, as SGLang's clients expect.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request, Response

from kitfox.errors import (
    InvalidParameterError,
    KitfoxError,
    QueueFullError,
    RequestError,
    UnsupportedParameterError,
)
from kitfox.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from kitfox.request import FinishReason, RepetitionDetection, SamplingParams
from kitfox.server.conversation import check_reasons, constrain_reasoning, read_prompt
from kitfox.server.generation import (
    MAX_REQUEST_ID_CHARS,
    Generator,
    Job,
    OpenStreams,
    Prompt,
    Respond,
    check_model,
    make_prompts,
    served_model_names,
    truncated,
)
from kitfox.server.openai import DONE, LOWEST_LOGPROB, GenerationFields, join_salts, make_sampling
from kitfox.server.sessions import CloseSessionRequest, OpenSessionRequest, SessionParams, Sessions
from kitfox.server.structured import FormatFields, requested_constraint
from kitfox.server.validation import (
    JsonObject,
    convert_body,
    error_body,
    internal_error,
    read_json_object,
    with_ignored,
)

if TYPE_CHECKING:
    from kitfox.engine.async_llm import AsyncLLM
    from kitfox.tokenizer import Tokenizer

logger = logging.getLogger("kitfox.server")

HEALTH_TIMEOUT_S = 20.0

_encode = msgspec.json.Encoder().encode


# ---- what clients send ----------------------------------------------------------------------------------------------


class NativeSampling(FormatFields, kw_only=True):
    """`sampling_params` of /generate. Absent and null mean the same; None is the model's default.

    Attributes:
        no_stop_trim: keep the stop text in the answer.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] = msgspec.field(default_factory=dict)
    stop: str | list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    stop_regex: str | list[str] = msgspec.field(default_factory=list)
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    sampling_seed: int | None = None
    stream_interval: int | None = None
    allowed_token_ids: list[int] = msgspec.field(default_factory=list)
    bad_words: list[str] = msgspec.field(default_factory=list)
    repetition_detection: RepetitionDetection | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"


class GenerateRequest(msgspec.Struct, kw_only=True):
    """POST /generate, with one of `text` and `input_ids`. What may be a list has one entry for each prompt.

    Attributes:
        rid: the request's id; with several prompts they are called RID_0, RID_1, ...
        logprob_start_len: first prompt position whose log-probability is wanted; -1 is none of them.
        token_ids_logprob: tokens whose log-probability is wanted at every position.
        cache_salt, extra_key: only requests with the same ones share cached KV.
        require_reasoning: what the answer has to be, it has to be behind its reasoning.
        max_thinking_tokens: behind so many tokens of reasoning its closing mark is forced; -1 is no limit.
        lora_path: the name of a LoRA adapter.
    """

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = msgspec.field(default_factory=dict)
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[Any] = msgspec.field(default_factory=list)
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    priority: int = 0
    cache_salt: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    require_reasoning: bool = False
    max_thinking_tokens: int | None = None
    session_params: SessionParams | None = None
    model: str | None = None
    lora_path: str | list[str | None] | None = None


class JoinRequest(msgspec.Struct, kw_only=True):
    """POST /concate_and_append_request."""

    src_rids: list[str]
    dst_rid: str


# ---- from fields to a job -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogprobsWanted:
    """What to report of one prompt and its answers; `start` is the first prompt position."""

    start: int
    num_top: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NativeJob(Job):
    """Every prompt has its own parameters; `sampling` is the first one's, whose n all share.

    Attributes:
        logprobs: None where a prompt wants none.
        is_list: the client sent a list, or wants several answers, and gets a list.
        keep_turn: what a session does with the answer's token ids when it has ended.
    """

    stream: bool
    request_ids: list[str]
    samplings: list[SamplingParams]
    salts: list[str | None]
    chosen_adapters: list[str | None]
    logprobs: list[LogprobsWanted | None]
    with_texts: bool
    with_prompt_ids: bool
    is_list: bool
    ignored_parameters: list[str]
    keep_turn: Callable[[list[int]], None] | None = None

    def engine_request_id(self, prompt_index: int) -> str:
        return self.request_ids[prompt_index]

    def sampling_of(self, prompt_index: int) -> SamplingParams:
        return self.samplings[prompt_index]

    def cache_salt_of(self, prompt_index: int) -> str | None:
        return self.salts[prompt_index]

    def adapter_of(self, prompt_index: int) -> str | None:
        return self.chosen_adapters[prompt_index]


async def make_job(generator: Generator, sessions: Sessions, body: JsonObject, client_id: str | None) -> NativeJob:
    """Check a request.

    Raises:
        RequestError: something in it is wrong.
    """
    fields, ignored = convert_body(body, GenerateRequest)
    llm = generator.llm
    if (fields.text is None) == (fields.input_ids is None):
        raise RequestError("exactly one of text and input_ids is required", param="text")
    source: str | list[Any] = fields.text if fields.text is not None else fields.input_ids or []
    if fields.input_ids is not None and any(isinstance(item, str) for item in fields.input_ids):
        raise InvalidParameterError("input_ids", "must be token ids or lists of them", fields.input_ids)
    param = "text" if fields.text is not None else "input_ids"
    is_list = isinstance(source, list) and not all(type(item) is int for item in source)
    prompts = await make_prompts(llm.tokenizer, source, add_special_tokens=True, param=param)
    num_prompts = len(prompts)
    names = _one_for_each(fields.lora_path, num_prompts, "lora_path")
    models = [check_model(llm, fields.model, name) for name in names]
    session = fields.session_params
    if session is not None:
        if is_list:
            raise InvalidParameterError("session_params", "needs one prompt, not a list", num_prompts)
        prompts = [_with_context(sessions.context(session), prompts[0], llm.tokenizer)]
    logprobs = _logprobs_wanted(fields, num_prompts)
    samplings = []
    for index, given in enumerate(_one_for_each(fields.sampling_params, num_prompts, "sampling_params")):
        sampling, unread = convert_body(body.part(given), NativeSampling)
        ignored += [f"sampling_params.{key}" for key in unread if f"sampling_params.{key}" not in ignored]
        max_tokens, max_model_len = sampling.max_new_tokens, llm.max_model_len
        prompts[index] = truncated(prompts[index], sampling, max_tokens=max_tokens, max_model_len=max_model_len)
        num_tokens = len(prompts[index].token_ids)
        wanted = logprobs[index]
        if wanted is not None:
            wanted = logprobs[index] = _settle_start(wanted, fields, sampling, num_tokens)
        made = _make_sampling(sampling, llm.default_sampling_params, wanted, num_tokens)
        samplings.append(_behind_reasoning(made, fields, prompts[index], generator))
    if len({sampling.n for sampling in samplings}) > 1:
        raise InvalidParameterError("n", "must be the same for all prompts", [sampling.n for sampling in samplings])
    if session is not None and samplings[0].n > 1:
        raise InvalidParameterError("n", "must be 1 with session_params", samplings[0].n)
    request_ids = _request_ids(fields.rid, num_prompts, is_list=is_list)
    answer_id = request_ids[0] if request_ids else generator.claim_id("gen-", client_id)
    if not request_ids:
        request_ids = [f"{answer_id}_{index}" for index in range(num_prompts)] if is_list else [answer_id]
    keep_turn = None
    if session is not None:
        keep_turn = partial(sessions.add, session, answer_id, prompts[0].token_ids)
    return NativeJob(
        answer_id=answer_id,
        created=int(time.time()),
        model=models[0].name,
        prompts=prompts,
        sampling=samplings[0],
        priority=fields.priority,
        request_ids=request_ids,
        samplings=samplings,
        stream=fields.stream,
        salts=_salts(fields, num_prompts),
        chosen_adapters=[model.adapter for model in models],
        logprobs=logprobs,
        with_texts=fields.return_text_in_logprobs,
        with_prompt_ids=fields.return_prompt_token_ids,
        is_list=is_list or samplings[0].n > 1,
        ignored_parameters=ignored,
        keep_turn=keep_turn,
    )


def _with_context(context: list[int], prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
    """A session's turn: what went before, then the prompt, which then does not begin a text."""
    own = prompt.token_ids
    if context and own and own[0] == tokenizer.bos_token_id:
        own = own[1:]
    return Prompt(context + own, None) if context else prompt


def _one_for_each(given: Any, count: int, param: str) -> list[Any]:
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise InvalidParameterError(param, f"must have one entry for each of the {count} prompts", len(given))
    return given


def _request_ids(rid: str | list[str] | None, count: int, *, is_list: bool) -> list[str]:
    """The ids that a client chose; empty where it chose none."""
    if rid is None:
        return []
    if isinstance(rid, str):
        ids = [f"{rid}_{index}" for index in range(count)] if is_list else [rid]
    else:
        ids = _one_for_each(rid, count, "rid")
    for each in ids:
        if not re.fullmatch(rf"[^\x00-\x20#~]{{1,{MAX_REQUEST_ID_CHARS}}}", each) or not each.isprintable():
            limit = f"must have 1 to {MAX_REQUEST_ID_CHARS} printable characters and no space, # or ~"
            raise InvalidParameterError("rid", limit, each)
    if len(set(ids)) < len(ids):
        raise InvalidParameterError("rid", "must not name two prompts alike", rid)
    return ids


def _salts(fields: GenerateRequest, count: int) -> list[str | None]:
    salts = _one_for_each(fields.cache_salt, count, "cache_salt")
    keys = _one_for_each(fields.extra_key, count, "extra_key")
    return [join_salts(salt, key) for salt, key in zip(salts, keys, strict=True)]


def _logprobs_wanted(fields: GenerateRequest, count: int) -> list[LogprobsWanted | None]:
    token_ids = fields.token_ids_logprob
    of_each = token_ids if token_ids and isinstance(token_ids[0], list) else [token_ids] * count
    wanted: list[LogprobsWanted | None] = []
    for returns, start, num_top, ids in zip(
        _one_for_each(fields.return_logprob, count, "return_logprob"),
        _one_for_each(fields.logprob_start_len, count, "logprob_start_len"),
        _one_for_each(fields.top_logprobs_num, count, "top_logprobs_num"),
        _one_for_each(of_each, count, "token_ids_logprob"),
        strict=True,
    ):
        if not isinstance(ids, list) or any(type(token_id) is not int for token_id in ids):
            raise InvalidParameterError("token_ids_logprob", "must be token ids or a list of them a prompt", ids)
        if num_top < 0:
            raise InvalidParameterError("top_logprobs_num", "must be >= 0", num_top)
        wanted.append(LogprobsWanted(-1 if start is None else start, num_top, tuple(ids)) if returns else None)
    return wanted


def _settle_start(
    wanted: LogprobsWanted, fields: GenerateRequest, sampling: NativeSampling, num_prompt_tokens: int
) -> LogprobsWanted:
    """Without an answer the prompt's are the only log-probabilities there are, so they are what is meant."""
    start = 0 if fields.logprob_start_len is None and sampling.max_new_tokens == 0 else wanted.start
    if start > num_prompt_tokens or start < -1:
        limit = f"must be -1 or at most the prompt's number of tokens ({num_prompt_tokens})"
        raise InvalidParameterError("logprob_start_len", limit, start)
    return LogprobsWanted(num_prompt_tokens if start < 0 else start, wanted.num_top, wanted.token_ids)


def _make_sampling(
    fields: NativeSampling, defaults: dict[str, Any], wanted: LogprobsWanted | None, num_prompt_tokens: int
) -> SamplingParams:
    own = ("max_new_tokens", "min_new_tokens", "sampling_seed")
    shared = {name: getattr(fields, name) for name in fields.__struct_fields__ if name not in own}
    token_ids = [] if wanted is None else list(wanted.token_ids)
    num_top = None if wanted is None else wanted.num_top
    return make_sampling(
        GenerationFields(
            min_tokens=fields.min_new_tokens, seed=fields.sampling_seed, logprob_token_ids=token_ids, **shared
        ),
        defaults,
        max_tokens=fields.max_new_tokens,
        logprobs=num_top,
        prompt_logprobs=num_top if wanted is not None and wanted.start < num_prompt_tokens else None,
        constraint=requested_constraint(fields),
    )


def _behind_reasoning(
    sampling: SamplingParams, fields: GenerateRequest, prompt: Prompt, generator: Generator
) -> SamplingParams:
    """The answer's constraint as it holds where the prompt lets the model reason; nothing is said of that by default.

    Raises:
        RequestError: the model does not reason, or a budget cannot be kept.
    """
    budget, dialect = fields.max_thinking_tokens, generator.dialect
    if budget in (None, -1) and not fields.require_reasoning:
        return sampling
    if fields.require_reasoning:
        check_reasons(dialect, "require_reasoning")
    read = read_prompt(generator.llm.tokenizer, dialect, prompt.token_ids)
    constraint = constrain_reasoning(
        sampling.constraint, read, dialect, budget=budget, budget_param="max_thinking_tokens"
    )
    return msgspec.structs.replace(sampling, constraint=constraint)


# ---- answers --------------------------------------------------------------------------------------------------------


class _Growing:
    """One answer so far, in SGLang's shape."""

    def __init__(self, job: NativeJob, prompt_index: int, index: int, tokenizer: Tokenizer):
        self._job = job
        self._prompt_index = prompt_index
        self._index = index
        self._wanted = job.logprobs[prompt_index]
        self._tokenizer = tokenizer
        self._text = ""
        self._token_ids: list[int] = []
        self._start_s = time.monotonic()
        name = job.request_ids[prompt_index]
        self._meta: dict[str, Any] = {
            "id": f"{name}#{index}" if index else name,
            "finish_reason": None,
            "prompt_tokens": 0,
            "weight_version": "default",
            "num_retractions": 0,
            "completion_tokens": 0,
            "cached_tokens": 0,
        }
        if self._wanted is not None:
            self._meta |= {"input_token_logprobs": [], "output_token_logprobs": []}
            if self._wanted.num_top:
                self._meta |= {"input_top_logprobs": [], "output_top_logprobs": []}
            if self._wanted.token_ids:
                self._meta |= {"input_token_ids_logprobs": [], "output_token_ids_logprobs": []}

    def take(self, output: RequestOutput, delta: CompletionOutput) -> None:
        """Append a delta."""
        meta = self._meta
        self._text += delta.text
        self._token_ids += delta.token_ids
        meta["prompt_tokens"] = len(output.prompt_token_ids)
        meta["completion_tokens"] = len(self._token_ids)
        meta["cached_tokens"] = output.num_cached_tokens
        meta["num_retractions"] = max(delta.num_preemptions, meta["num_retractions"])
        if self._wanted is not None:
            for entry in delta.logprobs or []:
                self._add_entry("output", entry, entry.token_id)
        if delta.finish_reason is not None:
            if self._job.keep_turn is not None:
                self._job.keep_turn(self._token_ids)
            meta["finish_reason"] = self._finish(delta)
            meta["e2e_latency"] = time.monotonic() - self._start_s

    def take_prompt(self, output: RequestOutput) -> None:
        """Append the prompt's log-probabilities from the wanted position on; the first token of all has none."""
        assert self._wanted is not None
        entries = list(zip(output.prompt_logprobs or [], output.prompt_token_ids, strict=True))
        for entry, token_id in entries[self._wanted.start :]:
            self._add_entry("input", entry, token_id)

    def _add_entry(self, side: str, entry: TokenLogprobs | None, token_id: int) -> None:
        meta, wanted = self._meta, self._wanted
        assert wanted is not None
        meta[f"{side}_token_logprobs"].append(self._shown(None if entry is None else entry.logprob, token_id))
        if wanted.num_top:
            tops = None if entry is None else self._all_shown(entry.top_logprobs, entry.top_ids)
            meta[f"{side}_top_logprobs"].append(tops)
        if wanted.token_ids:
            named = None if entry is None else self._all_shown(entry.named_logprobs, wanted.token_ids)
            meta[f"{side}_token_ids_logprobs"].append(named)

    def _all_shown(self, logprobs: Sequence[float], token_ids: Sequence[int]) -> list[list[Any]]:
        return [self._shown(logprob, token_id) for logprob, token_id in zip(logprobs, token_ids, strict=True)]

    def _shown(self, logprob: float | None, token_id: int) -> list[Any]:
        text = self._tokenizer.token_text(token_id) if self._job.with_texts else None
        return [None if logprob is None else max(LOWEST_LOGPROB, logprob), token_id, text]  # max in this order: no NaN

    def _finish(self, delta: CompletionOutput) -> dict[str, Any]:
        reason = delta.finish_reason
        if reason is FinishReason.STOP:
            return {"type": "stop", "matched": delta.stop_reason if delta.end_token_id is None else delta.end_token_id}
        if reason is FinishReason.LENGTH:
            return {"type": "length", "length": len(self._token_ids)}
        if reason is FinishReason.ABORT:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        assert reason is not None
        return {"type": reason.value}

    @property
    def is_finished(self) -> bool:
        return self._meta["finish_reason"] is not None

    def shown(self) -> dict[str, Any]:
        body: dict[str, Any] = {"text": self._text, "output_ids": self._token_ids, "meta_info": self._meta}
        job = self._job
        if job.with_prompt_ids:
            body["prompt_token_ids"] = job.prompts[self._prompt_index].token_ids
        if job.ignored_parameters:
            body["ignored_parameters"] = job.ignored_parameters
        if job.is_list:
            body["index"] = self._prompt_index * job.sampling.n + self._index
        return body


class NativeAnswer:
    """The answers of one request to /generate, from the deltas of its open streams."""

    def __init__(self, job: NativeJob, streams: OpenStreams, tokenizer: Tokenizer):
        self._job = job
        self._streams = streams
        self._answers = [
            [_Growing(job, prompt_index, index, tokenizer) for index in range(job.sampling.n)]
            for prompt_index in range(len(job.prompts))
        ]

    async def accepted(self) -> None:
        await self._streams.accepted()

    async def _news(self) -> AsyncGenerator[list[_Growing], None]:
        """Answers with something new, as it comes."""
        async for prompt_index, output in self._streams.outputs():
            answers = self._answers[prompt_index]
            if output.prompt_logprobs is not None:
                for answer in answers:
                    answer.take_prompt(output)
            grown = []
            for delta in output.outputs:
                answers[delta.index].take(output, delta)
                if delta.token_ids or delta.text or delta.finish_reason is not None:
                    grown.append(answers[delta.index])
            yield grown

    async def whole(self) -> Any:
        """The answer as one object, or a list of them.

        Raises:
            KitfoxError: the engine failed on it.
        """
        try:
            async for _ in self._news():
                pass
        except Exception:
            self._streams.close(FinishReason.ERROR)
            raise
        shown = [answer.shown() for answers in self._answers for answer in answers]
        return shown if self._job.is_list else shown[0]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, each an answer so far; a failure becomes one error event. Always ends with [DONE]."""
        try:
            async for grown in self._news():
                for answer in grown:
                    yield b"data: " + _encode(answer.shown()) + b"\n\n"
        except KitfoxError as error:
            self._streams.close(FinishReason.ERROR)
            yield b"data: " + _encode(error_body(error)) + b"\n\n"
        except Exception:
            logger.exception("stream %s failed", self._job.answer_id)
            self._streams.close(FinishReason.ERROR)
            yield b"data: " + _encode(error_body(internal_error())) + b"\n\n"
        yield DONE

    def close(self) -> None:
        self._streams.close()


# ---- routes ---------------------------------------------------------------------------------------------------------


def add_native_routes(app: FastAPI, generator: Generator, max_body_bytes: int, respond: Respond) -> None:
    from kitfox.server.app import json_response

    llm = generator.llm
    sessions = Sessions()

    @app.api_route("/generate", methods=["POST", "PUT"])
    async def generate(request: Request) -> Response:
        """Continue a prompt, or several."""
        body = await read_json_object(request, max_body_bytes)
        job = await make_job(generator, sessions, body, request.scope["client_request_id"])
        answer = NativeAnswer(job, await generator.open(job), llm.tokenizer)
        return await respond(request, answer, stream=job.stream)

    @app.post("/open_session")
    async def open_session(request: Request) -> Response:
        """The id of a new session, as a JSON string."""
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), OpenSessionRequest)
        if ignored:  # the answer has no room to list them
            raise UnsupportedParameterError(ignored[0])
        if fields.streaming:
            raise UnsupportedParameterError("streaming", "is not supported: every session goes on from any turn")
        return json_response(sessions.open(fields.session_id, fields.timeout))

    @app.post("/close_session")
    async def close_session(request: Request) -> Response:
        """Forget a session. Its requests that still run are answered."""
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), CloseSessionRequest)
        sessions.close(fields.session_id)
        return json_response(with_ignored({"success": True}, ignored))

    @app.post("/concate_and_append_request")
    async def join(request: Request) -> Response:
        """What SGLang's frontend calls when forks are joined.

        Every request brings its whole text, so there is nothing to append: the joined text is computed by the request
        that continues it, and what it begins with comes from the cache.
        """
        convert_body(await read_json_object(request, max_body_bytes), JoinRequest)
        return json_response({"success": True})

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        """What is served, as SGLang's clients ask for it."""
        return json_response(_model_info(llm))

    @app.get("/health_generate")
    async def health_generate() -> Response:
        """Whether the engine makes tokens: one is generated, or others' are seen to be."""
        if await _makes_tokens(generator, HEALTH_TIMEOUT_S):
            return json_response({"status": "ok"})
        return json_response({"status": llm.health, "detail": f"no token in {HEALTH_TIMEOUT_S:g} s"}, 503)


def _model_info(llm: AsyncLLM) -> dict[str, Any]:
    config = llm.config.model
    return {
        "model_path": str(llm.path),
        "served_model_name": served_model_names(llm)[0],
        "tokenizer_path": config.tokenizer or str(llm.path),
        "is_generation": True,
        "preferred_sampling_params": llm.default_sampling_params or None,
        "weight_version": "default",
        "load_format": config.load_format,
        "architectures": [llm.model_config.architecture],
        "max_model_len": llm.max_model_len,
        "has_image_understanding": llm.model_config.vision is not None,
        "has_audio_understanding": False,
    }


async def _makes_tokens(generator: Generator, timeout_s: float) -> bool:
    """Whether a token comes within the time: ours, or under load anybody's.

    Raises:
        KitfoxError: requests are refused for another reason than a full queue.
    """
    llm = generator.llm
    if llm.is_paused:
        return False
    step, deadline = llm.stats.step, time.monotonic() + timeout_s
    ours = asyncio.ensure_future(_one_token(generator))
    try:
        while time.monotonic() < deadline:
            await asyncio.wait({ours}, timeout=0.1)
            if llm.stats.step > step:
                return True
            if ours.done() and not isinstance(ours.exception(), QueueFullError):
                return ours.result()
            if ours.done():
                await asyncio.sleep(0.1)
        return False
    finally:
        ours.cancel()
        await asyncio.gather(ours, return_exceptions=True)


async def _one_token(generator: Generator) -> bool:
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    stream = await generator.llm.add_request([0], sampling, request_id=f"health-{uuid.uuid4().hex}")
    return any([output.outputs[0].token_ids async for output in stream])
