"""The OpenAI protocol: request structs, their way to prompts and `SamplingParams`, and the answers, whole or streamed.

A whole answer is the concatenation of the pieces that a stream would have sent, so the two cannot differ.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import re
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from kitfox.errors import (
    InvalidParameterError,
    KitfoxError,
    RequestError,
    UnsupportedParameterError,
)
from kitfox.outputs import CompletionOutput, RequestOutput, RequestTimings, TokenLogprobs
from kitfox.request import FinishReason, SamplingParams
from kitfox.server.generation import (
    ENCODE_IN_THREAD_CHARS,
    Generator,
    Job,
    OpenStreams,
    Prompt,
    Usage,
    check_model,
    encode_text,
    make_prompts,
    required_model,
)
from kitfox.server.validation import error_body, internal_error

if TYPE_CHECKING:
    from kitfox.engine.async_llm import AsyncLLM
    from kitfox.tokenizer import Tokenizer

logger = logging.getLogger("kitfox.server")

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity
RESERVED_TEMPLATE_KWARGS = {
    "add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "conversation", "documents",
    "eos_token", "messages", "return_dict", "return_tensors", "self", "template", "tokenize", "tools",
}  # fmt: skip
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


# ---- what clients send ----------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """Parameters that both endpoints have. Absent and null mean the same."""

    model: str | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: str | list[str] = []
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    return_token_ids: bool = False
    request_id: str | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions. `prompt` is text, texts, token ids or lists of token ids."""

    prompt: Any
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


class ContentPart(msgspec.Struct, kw_only=True):
    type: str | None = None
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize, with one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
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
        echo_logprobs: the prompt's logprobs belong into the echoed answer, not into a field of their own.
    """

    is_chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    echo: bool
    echo_logprobs: bool
    ignored_parameters: list[str]


def make_sampling(
    fields: GenerationFields, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """`SamplingParams` of a request; their own checks raise InvalidParameterError."""
    return SamplingParams(
        n=fields.n,
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        temperature=fields.temperature,
        top_k=fields.top_k,
        top_p=fields.top_p,
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=_parse_logit_bias(fields.logit_bias),
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        include_stop_str_in_output=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
        seed=fields.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _parse_logit_bias(by_name: dict[str, float]) -> dict[int, float]:
    parsed: dict[int, float] = {}
    for name, bias in by_name.items():
        if not re.fullmatch(r"-?[0-9]{1,18}", name):
            raise InvalidParameterError("logit_bias", "keys must be token ids", name)
        parsed[int(name)] = bias
    return parsed


def make_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages for a chat template: text parts joined by newlines, "developer" called "system"."""
    if not messages:
        raise InvalidParameterError("messages", "must have at least one message", [])
    made = []
    for position, message in enumerate(messages):
        place = f"messages[{position}]"
        if message.role in ("tool", "function"):
            raise UnsupportedParameterError(f"{place}.role", f"{message.role!r} is not supported yet")
        if message.role not in ("system", "developer", "user", "assistant"):
            raise InvalidParameterError(f"{place}.role", "must be system, developer, user or assistant", message.role)
        if message.tool_calls or message.function_call:
            raise UnsupportedParameterError(f"{place}.tool_calls")
        if message.content is None:
            raise InvalidParameterError(f"{place}.content", "must be text or a list of text parts", None)
        role = "system" if message.role == "developer" else message.role
        entry = {"role": role, "content": _join_parts(message.content, f"{place}.content")}
        if message.name is not None:
            entry["name"] = message.name
        made.append(entry)
    return made


def _join_parts(content: str | list[ContentPart], place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.type != "text":
            raise InvalidParameterError(f"{place}.type", 'must be "text"', part.type)
        if part.text is None:
            raise InvalidParameterError(f"{place}.text", "must be a string", None)
        texts.append(part.text)
    return "\n".join(texts)


async def encode_messages(tokenizer: Tokenizer, source: ChatRequest | TokenizeRequest) -> list[int]:
    """Token ids of a conversation through the model's chat template.

    Raises:
        RequestError: a message is not acceptable, flags contradict each other, or the template refuses.
    """
    messages = make_messages(source.messages or [])
    add_generation_prompt = source.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not source.continue_final_message
    if add_generation_prompt and source.continue_final_message:
        raise InvalidParameterError("continue_final_message", "must not be true with add_generation_prompt", True)
    if source.continue_final_message and messages[-1]["role"] != "assistant":
        raise InvalidParameterError(
            "continue_final_message", "needs a last message of the assistant", messages[-1]["role"]
        )
    for name in source.chat_template_kwargs:
        if name in RESERVED_TEMPLATE_KWARGS or not name.isidentifier():
            raise InvalidParameterError("chat_template_kwargs", "must not use reserved names", name)

    def encode() -> list[int]:
        return tokenizer.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=source.continue_final_message,
            **source.chat_template_kwargs,
        )

    if sum(len(message["content"]) for message in messages) > ENCODE_IN_THREAD_CHARS:
        return await asyncio.to_thread(encode)
    return encode()


# ---- pieces of answers ----------------------------------------------------------------------------------------------


@dataclass
class Piece:
    """What one answer gained: the unit of a stream, and of a whole answer when joined."""

    index: int
    text: str = ""
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None

    def join(self, later: Piece) -> None:
        """Append what came later to the same answer."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            for name, values in later.logprobs.items():
                if values is not None:
                    self.logprobs[name] += values
        if later.finish_reason is not None:
            self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class _AnswerState:
    """How far one answer's pieces have come."""

    __slots__ = ("offset", "started", "utf8")

    def __init__(self) -> None:
        self.offset = 0  # characters, of the next token in the answer's text
        self.started = False
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")


class PieceMaker:
    """Turns engine deltas into pieces, in the shape of the job's endpoint."""

    def __init__(self, job: OpenAIJob, tokenizer: Tokenizer):
        self._job = job
        self._tokenizer = tokenizer
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
        state = self._states.setdefault(index, _AnswerState())
        piece = Piece(index)
        if not state.started:
            self._start(prompt_index, state, piece)
        piece.text += answer.text
        if answer.logprobs is not None and job.sampling.logprobs is not None:
            self._add_logprobs(state, piece, _shown_logprobs(answer, job.sampling))
        if job.return_token_ids:
            piece.token_ids = answer.token_ids
        if answer.finish_reason is not None:
            piece.finish_reason, piece.stop_reason = answer.finish_reason.value, answer.stop_reason
        if not (piece.text or piece.logprobs or piece.token_ids or piece.finish_reason):
            return None
        state.started = True
        return piece

    def _start(self, prompt_index: int, state: _AnswerState, piece: Piece) -> None:
        job = self._job
        prompt = job.prompts[prompt_index]
        if job.return_token_ids:
            piece.prompt_token_ids = prompt.token_ids
        logprobs = self._prompt_logprobs.get(prompt_index)
        if logprobs is not None and not job.echo_logprobs:
            piece.prompt_logprobs = [None if entry is None else self._vendor_entry(entry) for entry in logprobs]
        if not job.echo:
            return
        text = prompt.text
        if text is None:
            text = self._tokenizer.decode(prompt.token_ids, skip_special_tokens=job.sampling.skip_special_tokens)
        piece.text = text
        if job.echo_logprobs and logprobs is not None:
            piece.logprobs = self._echoed_logprobs(prompt.token_ids, text, logprobs)
        state.offset = len(text)

    # ---- logprobs -----------------------------------------------------------------------------------------------

    def _add_logprobs(self, state: _AnswerState, piece: Piece, entries: list[TokenLogprobs]) -> None:
        if self._job.is_chat:
            piece.logprobs = {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}
            return
        if piece.logprobs is None:
            piece.logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            text = state.utf8.decode(self._tokenizer.token_bytes(entry.token_id))
            self._append_completion_entry(piece.logprobs, text, entry, state.offset)
            state.offset += len(text)

    def _echoed_logprobs(
        self, token_ids: list[int], prompt_text: str, entries: list[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """One entry a prompt token; a token that is not part of the text (a BOS that was added) takes no room in it."""
        logprobs: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        offset = 0
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = utf8.decode(self._tokenizer.token_bytes(token_id))
            self._append_completion_entry(logprobs, text, entry, offset)
            if prompt_text.startswith(text, offset):
                offset += len(text)
        return logprobs

    def _append_completion_entry(
        self, logprobs: dict[str, Any], text: str, entry: TokenLogprobs | None, offset: int
    ) -> None:
        logprobs["tokens"].append(text)
        logprobs["text_offset"].append(offset)
        logprobs["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
        if entry is None:
            logprobs["top_logprobs"].append(None)
            return
        top = {text: _finite(entry.logprob)}
        for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            if token_id != entry.token_id:
                top.setdefault(self._tokenizer.token_text(token_id), _finite(logprob))
        logprobs["top_logprobs"].append(top)

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        tops = zip(entry.top_ids, entry.top_logprobs, strict=True)
        made = self._chat_token(entry.token_id, entry.logprob)
        made["top_logprobs"] = [self._chat_token(token_id, logprob) for token_id, logprob in tops]
        return made

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        token_bytes = self._tokenizer.token_bytes(token_id)
        text = token_bytes.decode("utf-8", "replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(token_bytes)}

    def _vendor_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        """vLLM's shape of a prompt position: token id to logprob, rank and text."""
        made = {}
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
            text = self._tokenizer.token_text(token_id)
            made[str(token_id)] = {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}
        text = self._tokenizer.token_text(entry.token_id)
        made[str(entry.token_id)] = {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": text}
        return made


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # also catches a NaN


def _shown_logprobs(answer: CompletionOutput, sampling: SamplingParams) -> list[TokenLogprobs]:
    """Without the token that ended the answer, which is not part of the text: tokens joined are the text."""
    entries = answer.logprobs or []
    ended_by_token = answer.finish_reason is FinishReason.STOP and not isinstance(answer.stop_reason, str)
    stop_token_is_text = sampling.include_stop_str_in_output and not sampling.skip_special_tokens
    if ended_by_token and not stop_token_is_text and len(entries) == len(answer.token_ids):
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
        self._usage = Usage(sum(len(prompt.token_ids) for prompt in job.prompts))
        self._timings: RequestTimings | None = None  # of the prompt that finished last

    def _take(self, prompt_index: int, output: RequestOutput) -> list[Piece]:
        self._usage.add(prompt_index, output)
        if output.finished:
            self._timings = output.timings
        return self._maker.pieces(prompt_index, output)

    def _head(self, object_name: str) -> dict[str, Any]:
        job = self._job
        return {"id": job.answer_id, "object": object_name, "created": job.created, "model": job.model}

    # ---- whole --------------------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """The answer as one object.

        Raises:
            KitfoxError: the engine failed on it.
        """
        try:
            return await self._join_pieces()
        except Exception:
            self._streams.close(FinishReason.ERROR)
            raise

    async def _join_pieces(self) -> dict[str, Any]:
        job = self._job
        answers: dict[int, Piece] = {}
        async for prompt_index, output in self._streams.outputs():
            for piece in self._take(prompt_index, output):
                if piece.index in answers:
                    answers[piece.index].join(piece)
                else:
                    # The engine's own list must not grow with ours.
                    piece.token_ids = list(piece.token_ids)
                    answers[piece.index] = piece
        in_order = [answers[index] for index in sorted(answers)]
        assert len(in_order) == len(job.prompts) * job.sampling.n, "an answer is missing although all streams ended"
        body = self._head("chat.completion" if job.is_chat else "text_completion")
        body["choices"] = [self._chat_choice(p) if job.is_chat else self._completion_choice(p) for p in in_order]
        body["usage"] = self._usage.as_dict()
        if job.is_chat:
            body |= _prompt_fields(in_order[0])
        if self._timings is not None:
            body["timings"] = _timings_dict(self._timings)
        if job.ignored_parameters:
            body["ignored_parameters"] = job.ignored_parameters
        return body

    def _chat_choice(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None, "annotations": []},
            "logprobs": piece.logprobs,
        }
        return choice | self._choice_end(piece)

    def _completion_choice(self, piece: Piece) -> dict[str, Any]:
        choice = {"index": piece.index, "text": piece.text, "logprobs": piece.logprobs} | self._choice_end(piece)
        return choice | _prompt_fields(piece)

    def _choice_end(self, piece: Piece) -> dict[str, Any]:
        end: dict[str, Any] = {"finish_reason": piece.finish_reason}
        if piece.finish_reason is not None:
            end["stop_reason"] = piece.stop_reason
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
            self._streams.close(FinishReason.ERROR)
            yield b"data: " + _encode(error_body(error)) + b"\n\n"
        except Exception:
            logger.exception("stream %s failed", self._job.answer_id)
            self._streams.close(FinishReason.ERROR)
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
        async for prompt_index, output in self._streams.outputs():
            events = []
            for piece in self._take(prompt_index, output):
                extra, first_extra = first_extra, {}
                num_unfinished -= piece.finish_reason is not None
                if num_unfinished == 0 and self._timings is not None:
                    extra["timings"] = _timings_dict(self._timings)
                if job.is_chat:
                    choice = self._chat_delta(piece, is_first=piece.index not in roles_sent)
                    if piece.index not in roles_sent:
                        extra |= _prompt_fields(piece)
                    roles_sent.add(piece.index)
                else:
                    choice = self._completion_choice(piece)
                if job.continuous_usage:
                    tail = b'],"usage":' + _encode(self._usage.as_dict())
                else:
                    tail = end
                rest = b"," + _encode(extra)[1:] if extra else b"}"
                events.append(start + _encode(choice) + tail + rest + b"\n\n")
            if events:
                yield b"".join(events)
        if job.include_usage:
            yield start + b'],"usage":' + _encode(self._usage.as_dict()) + b"}\n\n"

    def _chat_delta(self, piece: Piece, *, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if is_first:
            delta["role"] = "assistant"
        if is_first or piece.text:
            delta["content"] = piece.text
        choice = {"index": piece.index, "delta": delta, "logprobs": piece.logprobs}
        return choice | self._choice_end(piece)

    def close(self) -> None:
        self._streams.close()


def _prompt_fields(piece: Piece) -> dict[str, Any]:
    fields = {"prompt_token_ids": piece.prompt_token_ids, "prompt_logprobs": piece.prompt_logprobs}
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
        model = required_model(self._llm, fields.model)
        if fields.best_of is not None and fields.best_of != fields.n:
            raise UnsupportedParameterError("best_of", f"is supported only when equal to n ({fields.n})")
        prompt_logprobs = fields.prompt_logprobs
        echo_logprobs = fields.echo and fields.logprobs is not None
        if echo_logprobs:
            if prompt_logprobs is not None and prompt_logprobs != fields.logprobs:
                raise InvalidParameterError("prompt_logprobs", "must equal logprobs when echo is true", prompt_logprobs)
            prompt_logprobs = fields.logprobs
        max_tokens = 16 if fields.max_tokens is None else fields.max_tokens
        sampling = make_sampling(
            fields, max_tokens=max_tokens, logprobs=fields.logprobs, prompt_logprobs=prompt_logprobs
        )
        tokenizer = self._llm.tokenizer
        prompts = await make_prompts(tokenizer, fields.prompt, add_special_tokens=fields.add_special_tokens)
        return await self._open(
            fields, "cmpl", client_id, ignored, model, prompts, sampling, echo=fields.echo, echo_logprobs=echo_logprobs
        )

    async def chat(self, fields: ChatRequest, ignored: list[str], client_id: str | None) -> Reply:
        """Start a chat completion.

        Raises:
            KitfoxError: nothing was started.
        """
        model = required_model(self._llm, fields.model)
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
        if fields.top_logprobs is not None and fields.top_logprobs < 0:
            raise InvalidParameterError("top_logprobs", "must be >= 0", fields.top_logprobs)
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        sampling = make_sampling(
            fields, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=fields.prompt_logprobs
        )
        token_ids = await encode_messages(self._llm.tokenizer, fields)
        return await self._open(fields, "chatcmpl", client_id, ignored, model, [Prompt(token_ids, None)], sampling)

    async def _open(
        self,
        fields: GenerationFields,
        kind: str,
        client_id: str | None,
        ignored: list[str],
        model: str,
        prompts: list[Prompt],
        sampling: SamplingParams,
        *,
        echo: bool = False,
        echo_logprobs: bool = False,
    ) -> Reply:
        options = fields.stream_options
        if options is not None and not fields.stream:
            raise InvalidParameterError("stream_options", "needs stream to be true", msgspec.to_builtins(options))
        job = OpenAIJob(
            answer_id=self._generator.claim_id(kind, fields.request_id or client_id),
            created=int(time.time()),
            model=model,
            is_chat=kind == "chatcmpl",
            prompts=prompts,
            sampling=sampling,
            priority=fields.priority,
            cache_salt=fields.cache_salt,
            stream=fields.stream,
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.include_usage and options.continuous_usage_stats),
            return_token_ids=fields.return_token_ids,
            echo=echo,
            echo_logprobs=echo_logprobs,
            ignored_parameters=ignored,
        )
        return Reply(job, await self._generator.open(job), self._llm.tokenizer)


def check_detokenize(tokens: list[int], vocab_size: int) -> None:
    """Raises InvalidParameterError for a token id outside the vocabulary."""
    for token_id in tokens:
        if not 0 <= token_id < vocab_size:
            raise InvalidParameterError("tokens", f"must be in [0, {vocab_size - 1}]", token_id)


async def tokenize(llm: AsyncLLM, fields: TokenizeRequest) -> dict[str, Any]:
    """The answer of /tokenize."""
    check_model(llm, fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("exactly one of prompt and messages is required", param="prompt")
    if fields.prompt is not None:
        tokens = await encode_text(llm.tokenizer, fields.prompt, add_special_tokens=fields.add_special_tokens)
    else:
        tokens = await encode_messages(llm.tokenizer, fields)
    strings = [llm.tokenizer.token_text(token_id) for token_id in tokens] if fields.return_token_strs else None
    return {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens, "token_strs": strings}
