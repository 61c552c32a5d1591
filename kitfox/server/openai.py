"""The OpenAI protocol: request structs, their way to prompts and `SamplingParams`, and the answers, whole or streamed.

A whole answer is the concatenation of the pieces that a stream would have sent, so the two cannot differ.
"""

from __future__ import annotations

import codecs
import hashlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from kitfox.constraint import Constraint
from kitfox.engine.input_processor import MAX_CACHE_SALT_CHARS
from kitfox.errors import (
    InvalidParameterError,
    KitfoxError,
    RequestError,
    UnsupportedParameterError,
)
from kitfox.outputs import CompletionOutput, RequestOutput, RequestTimings, TokenLogprobs
from kitfox.request import FinishReason, RepetitionDetection, SamplingParams
from kitfox.server.conversation import (
    Calling,
    ChatMessage,
    ChatPrompt,
    Tool,
    check_calling,
    constrain_calls,
    constrain_reasoning,
    encode_conversation,
    read_prompt,
)
from kitfox.server.generation import (
    ChosenModel,
    Generator,
    Job,
    OpenStreams,
    Prompt,
    Usage,
    check_model,
    encode_text,
    make_prompts,
    required_model,
    truncated,
)
from kitfox.server.parsers import AnswerParser, ToolCallDelta, join_calls
from kitfox.server.structured import FormatFields, requested_constraint
from kitfox.server.validation import error_body, internal_error, refuse_ignored

if TYPE_CHECKING:
    from kitfox.tokenizer import Tokenizer

logger = logging.getLogger("kitfox.server")

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity
DEFAULT_COMPLETION_TOKENS = 16
DEFAULTED_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stream_interval")
DONE = b"data: [DONE]\n\n"
UNASKED_OF_PROMPT = {"prompt_token_ids": None, "prompt_logprobs": None}  # vLLM's clients expect the names to be there

_encode = msgspec.json.Encoder().encode


# ---- what clients send ----------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(FormatFields, kw_only=True):
    """Parameters that both endpoints have. Absent and null mean the same.

    What is None by default comes from the model's own defaults, and without those from `SamplingParams`.
    """

    model: str | None = None
    lora_path: str | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    stop: str | list[str] = msgspec.field(default_factory=list)
    stop_regex: str | list[str] = msgspec.field(default_factory=list)
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_detection: RepetitionDetection | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    allowed_token_ids: list[int] = msgspec.field(default_factory=list)
    bad_words: list[str] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] = msgspec.field(default_factory=list)
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    thinking_token_budget: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    extra_key: str | None = None
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_prompt_text: bool = False
    request_id: str | None = None
    rid: str | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions. `prompt` is text, texts, token ids or lists of token ids."""

    prompt: Any
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


class ChatFields(GenerationFields, kw_only=True):
    """What a chat has beside its messages."""

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: list[Tool] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True


class ChatRequest(ChatFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize, with one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: list[Tool] = msgspec.field(default_factory=list)
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


# ---- from fields to prompts and sampling ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OpenAIJob(Job):
    """A job of one of OpenAI's two endpoints, with how its answer is wanted.

    Attributes:
        echo_logprobs: the prompt's logprobs belong into the echoed answer.
        shows_prompt_logprobs: they belong into a field of their own.
        make_parser: what reads reasoning and tool calls out of one answer's text; None leaves the text alone.
        include_reasoning: reasoning that was found is part of the answer.
    """

    is_chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    return_prompt_token_ids: bool
    return_tokens_as_token_ids: bool
    return_prompt_text: bool
    echo: bool
    echo_logprobs: bool
    shows_prompt_logprobs: bool
    ignored_parameters: list[str]
    make_parser: Callable[[], AnswerParser] | None = None
    include_reasoning: bool = True


def make_sampling(
    fields: GenerationFields,
    defaults: dict[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    constraint: Constraint | None,
) -> SamplingParams:
    """`SamplingParams` of a request, with `defaults` for what it leaves out; they raise InvalidParameterError."""
    wanted = {name: getattr(fields, name) for name in DEFAULTED_FIELDS}
    return SamplingParams(
        **{
            name: defaults[name] if value is None else value
            for name, value in wanted.items()
            if value is not None or name in defaults
        },
        n=fields.n,
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=_parse_logit_bias(fields.logit_bias),
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop),
        stop_regex=(fields.stop_regex,) if isinstance(fields.stop_regex, str) else tuple(fields.stop_regex),
        stop_token_ids=tuple(fields.stop_token_ids),
        allowed_token_ids=tuple(fields.allowed_token_ids),
        bad_words=tuple(fields.bad_words),
        ignore_eos=fields.ignore_eos,
        include_stop_str_in_output=fields.include_stop_str_in_output or fields.no_stop_trim,
        skip_special_tokens=fields.skip_special_tokens,
        seed=fields.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=tuple(fields.logprob_token_ids),
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        truncation_side=fields.truncation_side,  # type: ignore[arg-type]  # it is checked there
        repetition_detection=fields.repetition_detection,
        constraint=constraint,
    )


def _num_top_logprobs(fields: GenerationFields, asked: int | None) -> int | None:
    """How many of the likeliest tokens to report with an answer: logprob_token_ids are reported instead of them."""
    return 0 if fields.logprob_token_ids and (asked is None or asked >= -1) else asked


def _parse_logit_bias(by_name: dict[str, float]) -> dict[int, float]:
    parsed: dict[int, float] = {}
    for name, bias in by_name.items():
        if not re.fullmatch(r"-?[0-9]{1,18}", name):
            raise InvalidParameterError("logit_bias", "keys must be token ids", name)
        parsed[int(name)] = bias
    return parsed


def join_salts(cache_salt: str | None, extra_key: str | None) -> str | None:
    """One salt of both: who has the same two shares KV."""
    if extra_key is None:
        return cache_salt
    for name, value in (("cache_salt", cache_salt), ("extra_key", extra_key)):
        if value is not None and not 1 <= len(value) <= MAX_CACHE_SALT_CHARS:
            raise InvalidParameterError(name, f"must have 1 to {MAX_CACHE_SALT_CHARS} characters", value)
    return hashlib.sha256(_encode((cache_salt, extra_key))).hexdigest()


async def encode_messages(generator: Generator, source: ChatRequest | TokenizeRequest) -> list[int]:
    """Token ids of a conversation, as a request that generates would have them.

    Raises:
        RequestError: as for such a request.
    """
    if isinstance(source, ChatRequest):
        prompt, _, _ = await _encode_chat(generator, source)
    else:
        calling = check_calling(source.tools, None, parallel=True)
        dialect = generator.dialect.showing(source.chat_template)
        renderer = generator.renderer_of(source.chat_template)
        tokenizer = generator.llm.tokenizer
        prompt = await encode_conversation(
            tokenizer, dialect, source, calling, renderer=renderer, images=generator.images
        )
    return prompt.token_ids


async def _encode_chat(generator: Generator, fields: ChatRequest) -> tuple[ChatPrompt, Calling, list[str]]:
    """The prompt, which calls are wanted, and the names of parameters that cannot be honoured for this model."""
    renderer = generator.renderer_of(fields.chat_template)
    dialect = generator.dialect.showing(fields.chat_template)
    calling = check_calling(fields.tools, fields.tool_choice, parallel=fields.parallel_tool_calls)
    kwargs = dialect.effort_kwargs(fields.reasoning_effort)
    unused = [] if kwargs is not None else ["reasoning_effort"]
    if dialect.tool_parser is None and any(tool.function.strict for tool in calling.tools):
        unused.append("tools[].function.strict")
    if generator.strict:
        refuse_ignored(unused)
    tokenizer = generator.llm.tokenizer
    prompt = await encode_conversation(tokenizer, dialect, fields, calling, kwargs, renderer, generator.images)
    return prompt, calling, unused


# ---- pieces of answers ----------------------------------------------------------------------------------------------


@dataclass
class Piece:
    """What one answer gained: the unit of a stream, and of a whole answer when joined."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    end_token_id: int | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    prompt_logprobs: list[Any] | None = None

    def join(self, later: Piece) -> None:
        """Append what came later to the same answer."""
        self.text += later.text
        self.reasoning += later.reasoning
        self.tool_calls += later.tool_calls
        self.token_ids += later.token_ids
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            for name, values in later.logprobs.items():
                if values is not None:
                    self.logprobs[name] += values
        if later.finish_reason is not None:
            self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
            self.end_token_id = later.end_token_id


class _AnswerState:
    """How far one answer's pieces have come."""

    __slots__ = ("ended", "offset", "parser", "started", "utf8")

    def __init__(self, parser: AnswerParser | None) -> None:
        self.parser = parser
        self.ended = False
        self.offset = 0  # characters, of the next token in the answer's text
        self.started = False
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")


class PieceMaker:
    """Turns engine deltas into pieces, in the shape of the job's endpoint.

    Attributes:
        num_reasoning_tokens: of all answers so far.
        num_unfinished: answers without a finish_reason.
    """

    def __init__(self, job: OpenAIJob, tokenizer: Tokenizer):
        self._job = job
        self._tokenizer = tokenizer
        self.num_reasoning_tokens = 0
        self.num_unfinished = len(job.prompts) * job.sampling.n
        self._states: dict[int, _AnswerState] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}  # by prompt index

    def pieces(self, prompt_index: int, output: RequestOutput) -> list[Piece]:
        """Pieces with something to show; none for a delta that only holds text back."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        made = (self._piece(prompt_index, answer) for answer in output.outputs)
        return [piece for piece in made if piece is not None]

    def _piece(self, prompt_index: int, answer: CompletionOutput) -> Piece | None:
        job = self._job
        if not answer.token_ids and not answer.text and answer.finish_reason is None:
            return None
        index = prompt_index * job.sampling.n + answer.index
        state = self._states.get(index)
        if state is None:
            state = self._states[index] = _AnswerState(None if job.make_parser is None else job.make_parser())
        if state.ended:
            return None
        piece = Piece(index)
        if not state.started:
            self._start(prompt_index, state, piece)
        if state.parser is None:
            piece.text += answer.text
        else:
            self._parse(state.parser, answer, piece)
        if answer.logprobs is not None and job.sampling.logprobs is not None:
            is_last = answer.finish_reason is not None
            self._add_logprobs(state, piece, _shown_logprobs(answer, job), is_last=is_last)
        if job.return_token_ids:
            piece.token_ids = answer.token_ids
        if answer.finish_reason is not None:
            piece.finish_reason, piece.stop_reason = answer.finish_reason.value, answer.stop_reason
            piece.end_token_id = answer.end_token_id
        parser = state.parser
        may_call = answer.finish_reason is FinishReason.STOP or (parser is not None and parser.is_done)
        if parser is not None and may_call and parser.num_complete_calls:
            piece.finish_reason = "tool_calls"
        if piece.finish_reason is not None:
            state.ended = True
            self.num_unfinished -= 1
        elif not (piece.text or piece.reasoning or piece.tool_calls or piece.logprobs or piece.token_ids):
            return None
        state.started = True
        return piece

    def _parse(self, parser: AnswerParser, answer: CompletionOutput, piece: Piece) -> None:
        was_reasoning = parser.is_reasoning
        part = parser.feed(answer.text, is_last=answer.finish_reason is not None)
        piece.text += part.content
        piece.tool_calls = part.tool_calls
        if self._job.include_reasoning:
            piece.reasoning = part.reasoning
        if was_reasoning or parser.is_reasoning or part.reasoning:
            self.num_reasoning_tokens += parser.count_reasoning_tokens(answer.token_ids)

    def _start(self, prompt_index: int, state: _AnswerState, piece: Piece) -> None:
        job = self._job
        prompt = job.prompts[prompt_index]
        if job.return_prompt_token_ids:
            piece.prompt_token_ids = prompt.token_ids
        logprobs = self._prompt_logprobs.get(prompt_index)
        if logprobs is not None and job.shows_prompt_logprobs:
            piece.prompt_logprobs = [None if entry is None else self._vendor_entry(entry) for entry in logprobs]
        if not job.echo and not job.return_prompt_text:
            return
        text = prompt.text
        if text is None:
            skip_special_tokens = job.sampling.skip_special_tokens and not job.is_chat
            text = self._tokenizer.decode(prompt.token_ids, skip_special_tokens=skip_special_tokens)
        if job.return_prompt_text:
            piece.prompt_text = text
        if not job.echo:
            return
        piece.text = text
        if job.echo_logprobs and logprobs is not None:
            piece.logprobs = self._echoed_logprobs(prompt.token_ids, text, logprobs)
        state.offset = len(text)

    # ---- logprobs -----------------------------------------------------------------------------------------------

    def _add_logprobs(self, state: _AnswerState, piece: Piece, entries: list[TokenLogprobs], *, is_last: bool) -> None:
        if self._job.is_chat:
            piece.logprobs = {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}
            return
        if piece.logprobs is None:
            piece.logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for position, entry in enumerate(entries, 1):
            is_end = is_last and position == len(entries)  # what is left of a character that was cut is text too
            text = state.utf8.decode(self._tokenizer.token_bytes(entry.token_id), final=is_end)
            self._append_completion_entry(piece.logprobs, entry.token_id, text, entry, state.offset)
            state.offset += len(text)

    def _echoed_logprobs(
        self, token_ids: list[int], prompt_text: str, entries: list[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """One entry a prompt token; a token that is not part of the text (a BOS that was added) takes no room in it."""
        logprobs: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        offset = 0
        for position, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True), 1):
            text = utf8.decode(self._tokenizer.token_bytes(token_id), final=position == len(token_ids))
            self._append_completion_entry(logprobs, token_id, text, entry, offset)
            if prompt_text.startswith(text, offset):
                offset += len(text)
        return logprobs

    def _append_completion_entry(
        self, logprobs: dict[str, Any], token_id: int, text: str, entry: TokenLogprobs | None, offset: int
    ) -> None:
        if self._job.return_tokens_as_token_ids:
            text = self._token_name(token_id)
        logprobs["tokens"].append(text)
        logprobs["text_offset"].append(offset)
        logprobs["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
        if entry is None:
            logprobs["top_logprobs"].append(None)
            return
        top = {text: _finite(entry.logprob)}
        for other_id, logprob in self._alternatives(entry).items():
            if other_id != token_id:
                top.setdefault(self._token_name(other_id), _finite(logprob))
        logprobs["top_logprobs"].append(top)

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        tops = self._alternatives(entry)
        if self._job.sampling.logprob_token_ids:
            tops = {entry.token_id: entry.logprob} | tops
        made = self._chat_token(entry.token_id, entry.logprob)
        made["top_logprobs"] = [self._chat_token(token_id, logprob) for token_id, logprob in tops.items()]
        return made

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        token_bytes = self._tokenizer.token_bytes(token_id)
        return {"token": self._token_name(token_id), "logprob": _finite(logprob), "bytes": list(token_bytes)}

    def _alternatives(self, entry: TokenLogprobs) -> dict[int, float]:
        """The most likely tokens that were asked for, best first, then those that the request named."""
        named = zip(self._job.sampling.logprob_token_ids, entry.named_logprobs, strict=True)
        return dict(zip(entry.top_ids, entry.top_logprobs, strict=True)) | dict(named)

    def _token_name(self, token_id: int) -> str:
        if self._job.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def _vendor_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        """vLLM's shape of a prompt position: token id to logprob, rank and text."""
        made = {}
        for position, (token_id, logprob) in enumerate(self._alternatives(entry).items()):
            text = self._tokenizer.token_text(token_id)
            rank = position + 1 if position < len(entry.top_ids) else None
            made[str(token_id)] = {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}
        text = self._tokenizer.token_text(entry.token_id)
        made[str(entry.token_id)] = {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": text}
        return made


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # also catches a NaN


def _shown_logprobs(answer: CompletionOutput, job: OpenAIJob) -> list[TokenLogprobs]:
    """Without the token that ended the answer, which is not part of the text: tokens joined are the text.

    Behind an echoed prompt it stays: who scores a prompt has one token generated, and drops the last entry for it.
    """
    entries = answer.logprobs or []
    if job.echo_logprobs:
        return entries
    sampling = job.sampling
    stop_token_is_text = sampling.include_stop_str_in_output and not sampling.skip_special_tokens
    if answer.end_token_id is not None and not stop_token_is_text and len(entries) == len(answer.token_ids):
        return entries[:-1]
    return entries


def _timings_dict(timings: RequestTimings) -> dict[str, float | None]:
    return msgspec.structs.asdict(timings)


class Reply:
    """One job's answer, from the deltas of its open streams."""

    def __init__(self, job: OpenAIJob, streams: OpenStreams, tokenizer: Tokenizer):
        self._job = job
        self._streams = streams
        self._maker = PieceMaker(job, tokenizer)
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in job.prompts))
        if job.make_parser is not None:
            self.usage.reasoning_tokens = 0
        self.timings: RequestTimings | None = None  # of the prompt that finished last

    @property
    def job(self) -> OpenAIJob:
        return self._job

    async def accepted(self) -> None:
        await self._streams.accepted()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The answers' pieces as they come, for a protocol to render; `usage` and `timings` grow with them.

        Leaving early aborts what still runs.

        Raises:
            KitfoxError: the engine failed on a request; the others are aborted.
        """
        async with aclosing(self._deltas()) as deltas:
            async for pieces in deltas:
                for piece in pieces:
                    yield piece

    async def _deltas(self) -> AsyncGenerator[list[Piece], None]:
        """The pieces of one engine delta after the other."""
        try:
            async with aclosing(self._streams.outputs()) as outputs:
                async for prompt_index, output in outputs:
                    self.usage.add(prompt_index, output)
                    if output.finished:
                        self.timings = output.timings
                    pieces = self._maker.pieces(prompt_index, output)
                    if self._job.make_parser is not None:
                        self.usage.reasoning_tokens = self._maker.num_reasoning_tokens
                    if pieces:
                        yield pieces
                    if self._maker.num_unfinished == 0 and not output.finished:  # calls that were wanted are there
                        self._streams.close(FinishReason.STOP)
                        break
        except Exception:
            self._streams.close(FinishReason.ERROR)
            raise
        finally:
            self._streams.close()

    def _head(self, object_name: str) -> dict[str, Any]:
        job = self._job
        return {"id": job.answer_id, "object": object_name, "created": job.created, "model": job.model}

    # ---- whole --------------------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """The answer as one object.

        Raises:
            KitfoxError: the engine failed on it.
        """
        job = self._job
        answers: dict[int, Piece] = {}
        async for pieces in self._deltas():
            for piece in pieces:
                if piece.index in answers:
                    answers[piece.index].join(piece)
                else:
                    # The engine's own list must not grow with ours.
                    piece.token_ids = list(piece.token_ids)
                    answers[piece.index] = piece
        in_order = [answers[index] for index in sorted(answers)]
        assert len(in_order) == len(job.prompts) * job.sampling.n, "an answer is missing although all streams ended"
        body = self._head("chat.completion" if job.is_chat else "text_completion")
        unasked = {"token_ids": None} if job.is_chat else {"token_ids": None} | UNASKED_OF_PROMPT
        choice_of = self._chat_choice if job.is_chat else self._completion_choice
        body["choices"] = [unasked | choice_of(piece) for piece in in_order]
        body["usage"] = self.usage.as_dict()
        if job.is_chat:
            body |= UNASKED_OF_PROMPT | _prompt_fields(in_order[0])
        if self.timings is not None:
            body["timings"] = _timings_dict(self.timings)
        if job.ignored_parameters:
            body["ignored_parameters"] = job.ignored_parameters
        return body

    def _chat_choice(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None, "annotations": []},
            "logprobs": piece.logprobs,
        }
        message = choice["message"]
        if piece.reasoning:
            message |= _reasoning_fields(piece.reasoning)
        if piece.tool_calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in join_calls(piece.tool_calls)
            ]
        return choice | self._choice_end(piece)

    def _completion_choice(self, piece: Piece) -> dict[str, Any]:
        choice = {"index": piece.index, "text": piece.text, "logprobs": piece.logprobs} | self._choice_end(piece)
        return choice | _prompt_fields(piece)

    def _choice_end(self, piece: Piece) -> dict[str, Any]:
        end: dict[str, Any] = {"finish_reason": piece.finish_reason}
        if piece.finish_reason is not None:
            # vLLM's name, and SGLang's, which tells of the model's own end token too.
            end["stop_reason"] = piece.stop_reason
            end["matched_stop"] = piece.stop_reason if piece.end_token_id is None else piece.end_token_id
        if self._job.return_token_ids:
            end["token_ids"] = piece.token_ids
        return end

    # ---- streamed -----------------------------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; a failure becomes one error event. Always ends with [DONE]."""
        try:
            async for events in self._chunks():
                yield events
        except KitfoxError as error:
            yield b"data: " + _encode(error_body(error)) + b"\n\n"
        except Exception:
            logger.exception("stream %s failed", self._job.answer_id)
            yield b"data: " + _encode(error_body(internal_error())) + b"\n\n"
        yield DONE

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        job = self._job
        head = self._head("chat.completion.chunk" if job.is_chat else "text_completion")
        start = b"data: " + _encode(head)[:-1] + b',"choices":['
        end = b'],"usage":null' if job.include_usage else b"]"
        roles_sent: set[int] = set()
        first_extra: dict[str, Any] = {}
        if job.ignored_parameters:
            first_extra["ignored_parameters"] = job.ignored_parameters
        num_unfinished = len(job.prompts) * job.sampling.n
        async for pieces in self._deltas():
            events = []
            for piece in pieces:
                extra, first_extra = first_extra, {}
                num_unfinished -= piece.finish_reason is not None
                if num_unfinished == 0 and self.timings is not None:
                    extra["timings"] = _timings_dict(self.timings)
                if job.is_chat:
                    choice = self._chat_delta(piece, is_first=piece.index not in roles_sent)
                    if piece.index not in roles_sent:
                        extra |= _prompt_fields(piece)
                    roles_sent.add(piece.index)
                else:
                    choice = self._completion_choice(piece)
                if job.continuous_usage:
                    tail = b'],"usage":' + _encode(self.usage.as_dict())
                else:
                    tail = end
                rest = b"," + _encode(extra)[1:] if extra else b"}"
                events.append(start + _encode(choice) + tail + rest + b"\n\n")
            yield b"".join(events)
        if job.include_usage:
            yield start + b'],"usage":' + _encode(self.usage.as_dict()) + b"}\n\n"

    def _chat_delta(self, piece: Piece, *, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if is_first:
            delta["role"] = "assistant"
        if is_first or piece.text:
            delta["content"] = piece.text
        if piece.reasoning:
            delta |= _reasoning_fields(piece.reasoning)
        if piece.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.tool_calls]
        choice = {"index": piece.index, "delta": delta, "logprobs": piece.logprobs}
        return choice | self._choice_end(piece)

    def close(self) -> None:
        self._streams.close()


def _reasoning_fields(reasoning: str) -> dict[str, str]:
    """Under vLLM's name and under SGLang's."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _prompt_fields(piece: Piece) -> dict[str, Any]:
    fields = {
        "prompt_token_ids": piece.prompt_token_ids,
        "prompt_text": piece.prompt_text,
        "prompt_logprobs": piece.prompt_logprobs,
    }
    return {name: value for name, value in fields.items() if value is not None}


# ---- the endpoints' work --------------------------------------------------------------------------------------------


class OpenAIService:
    """Makes jobs of requests and opens them."""

    def __init__(self, generator: Generator):
        self._generator = generator
        self._llm = generator.llm

    async def complete(self, fields: CompletionRequest, ignored: list[str], client_id: str | None) -> Reply:
        """Start a completion.

        Raises:
            KitfoxError: nothing was started.
        """
        model = required_model(self._llm, fields.model, fields.lora_path)
        if fields.best_of is not None and fields.best_of != fields.n:
            raise UnsupportedParameterError("best_of", f"is supported only when equal to n ({fields.n})")
        prompt_logprobs = fields.prompt_logprobs
        echo_logprobs = fields.echo and fields.logprobs is not None
        if echo_logprobs:
            if prompt_logprobs is not None and prompt_logprobs != fields.logprobs:
                raise InvalidParameterError("prompt_logprobs", "must equal logprobs when echo is true", prompt_logprobs)
            prompt_logprobs = fields.logprobs
        defaults = self._llm.default_sampling_params
        max_tokens = fields.max_tokens
        if max_tokens is None and "max_tokens" not in defaults:
            max_tokens = DEFAULT_COMPLETION_TOKENS
        sampling = make_sampling(
            fields,
            defaults,
            max_tokens=max_tokens,
            logprobs=_num_top_logprobs(fields, fields.logprobs),
            prompt_logprobs=prompt_logprobs,
            constraint=requested_constraint(fields),
        )
        tokenizer = self._llm.tokenizer
        prompts = await make_prompts(tokenizer, fields.prompt, add_special_tokens=fields.add_special_tokens)
        prompts = self._truncated(prompts, fields, sampling)
        budget = fields.thinking_token_budget
        if budget is not None and budget != -1:
            constraint = self._behind_reasoning(sampling.constraint, prompts, budget)
            sampling = msgspec.structs.replace(sampling, constraint=constraint)
        return await self._open(
            fields, "cmpl-", client_id, ignored, model, prompts, sampling, echo=fields.echo, echo_logprobs=echo_logprobs
        )

    async def chat(
        self,
        fields: ChatRequest,
        ignored: list[str],
        client_id: str | None,
        *,
        id_prefix: str = "chatcmpl-",
        format_param: str = "response_format",
        budget_param: str = "thinking_token_budget",
    ) -> Reply:
        """Start a chat completion; other protocols have names of their own for ids and for some parameters.

        Raises:
            KitfoxError: nothing was started.
        """
        model = required_model(self._llm, fields.model, fields.lora_path)
        if fields.echo or fields.add_special_tokens:
            raise UnsupportedParameterError(
                "echo" if fields.echo else "add_special_tokens", "is not supported in chats"
            )
        max_tokens = fields.max_completion_tokens
        if max_tokens is None:
            max_tokens = fields.max_tokens
        elif fields.max_tokens not in (None, max_tokens):
            raise InvalidParameterError("max_tokens", "must not differ from max_completion_tokens", fields.max_tokens)
        if fields.top_logprobs is not None and not fields.logprobs:
            raise InvalidParameterError("top_logprobs", "needs logprobs to be true", fields.top_logprobs)
        if fields.top_logprobs is not None and fields.top_logprobs < -1:
            raise InvalidParameterError("top_logprobs", "must be >= 0, or -1 for the vocabulary", fields.top_logprobs)
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        sampling = make_sampling(
            fields,
            self._llm.default_sampling_params,
            max_tokens=max_tokens,
            logprobs=_num_top_logprobs(fields, logprobs),
            prompt_logprobs=fields.prompt_logprobs,
            constraint=requested_constraint(fields, format_param=format_param),
        )
        prompt, calling, unused = await _encode_chat(self._generator, fields)
        dialect = self._generator.dialect
        constraint = constrain_calls(sampling.constraint, calling, dialect.tool_parser)
        constraint = constrain_reasoning(
            constraint,
            prompt,
            dialect,
            budget=fields.thinking_token_budget,
            budget_param=budget_param,
            calling=calling,
        )
        sampling = msgspec.structs.replace(sampling, constraint=constraint)
        make_parser = prompt.parser_maker(dialect, calling, separate_reasoning=fields.separate_reasoning)
        if make_parser is not None:
            kept = dialect.reasoning_mark_ids + (dialect.tool_mark_ids if calling.tools else ())
            sampling = msgspec.structs.replace(sampling, kept_special_ids=kept)
        return await self._open(
            fields,
            id_prefix,
            client_id,
            ignored + unused,
            model,
            self._truncated([Prompt(prompt.token_ids, None, prompt.tiles)], fields, sampling),
            sampling,
            make_parser=make_parser,
            include_reasoning=fields.include_reasoning,
        )

    def _truncated(self, prompts: list[Prompt], fields: GenerationFields, sampling: SamplingParams) -> list[Prompt]:
        max_tokens, max_model_len = sampling.max_tokens, self._llm.max_model_len
        return [truncated(prompt, fields, max_tokens=max_tokens, max_model_len=max_model_len) for prompt in prompts]

    def _behind_reasoning(self, constraint: Constraint | None, prompts: list[Prompt], budget: int) -> Constraint | None:
        """What the answers to a completion's prompts must be; those have one constraint together."""
        dialect = self._generator.dialect
        made = [
            constrain_reasoning(
                constraint,
                read_prompt(self._llm.tokenizer, dialect, prompt.token_ids),
                dialect,
                budget=budget,
                budget_param="thinking_token_budget",
            )
            for prompt in prompts
        ]
        if any(other != made[0] for other in made):
            reason = "needs prompts that all end inside of reasoning, or all before it, or all behind it"
            raise UnsupportedParameterError("thinking_token_budget", reason)
        return made[0]

    async def _open(
        self,
        fields: GenerationFields,
        id_prefix: str,
        client_id: str | None,
        ignored: list[str],
        model: ChosenModel,
        prompts: list[Prompt],
        sampling: SamplingParams,
        *,
        echo: bool = False,
        echo_logprobs: bool = False,
        make_parser: Callable[[], AnswerParser] | None = None,
        include_reasoning: bool = True,
    ) -> Reply:
        options = fields.stream_options
        if options is not None and not fields.stream:
            raise InvalidParameterError("stream_options", "needs stream to be true", msgspec.to_builtins(options))
        if fields.rid is not None and fields.request_id not in (None, fields.rid):
            raise InvalidParameterError("rid", "must not differ from request_id", fields.rid)
        job = OpenAIJob(
            answer_id=self._generator.claim_id(id_prefix, fields.request_id or fields.rid or client_id),
            created=int(time.time()),
            model=model.name,
            adapter=model.adapter,
            is_chat=isinstance(fields, ChatRequest),
            prompts=prompts,
            sampling=sampling,
            priority=fields.priority,
            cache_salt=join_salts(fields.cache_salt, fields.extra_key),
            stream=fields.stream,
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.include_usage and options.continuous_usage_stats),
            return_token_ids=fields.return_token_ids,
            return_prompt_token_ids=fields.return_token_ids or fields.return_prompt_token_ids,
            return_tokens_as_token_ids=fields.return_tokens_as_token_ids,
            return_prompt_text=fields.return_prompt_text,
            echo=echo,
            echo_logprobs=echo_logprobs,
            shows_prompt_logprobs=fields.prompt_logprobs is not None,
            ignored_parameters=ignored,
            make_parser=make_parser,
            include_reasoning=include_reasoning,
        )
        return Reply(job, await self._generator.open(job), self._llm.tokenizer)


def check_detokenize(tokens: list[int], vocab_size: int) -> None:
    """Raises InvalidParameterError for a token id outside the vocabulary."""
    for token_id in tokens:
        if not 0 <= token_id < vocab_size:
            raise InvalidParameterError("tokens", f"must be in [0, {vocab_size - 1}]", token_id)


async def tokenize(generator: Generator, fields: TokenizeRequest) -> dict[str, Any]:
    """The answer of /tokenize."""
    llm = generator.llm
    check_model(llm, fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("exactly one of prompt and messages is required", param="prompt")
    generator.renderer_of(fields.chat_template)  # refused where it is, whether it would be used or not
    if fields.prompt is not None:
        tokens = await encode_text(llm.tokenizer, fields.prompt, add_special_tokens=fields.add_special_tokens)
    else:
        tokens = await encode_messages(generator, fields)
    strings = [llm.tokenizer.token_text(token_id) for token_id in tokens] if fields.return_token_strs else None
    return {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens, "token_strs": strings}
