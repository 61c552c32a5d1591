"""Bytes of a request body become a checked protocol struct; every failure becomes an OpenAI error body.

Types are strict: "true" is no boolean and "1" is no number. What a parameter may be is said by the structs of
openai.py; ranges are checked by `SamplingParams` and by the engine's input processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from kitfox.errors import KitfoxError, QueueFullError, RequestError, TooLargeError, UnsupportedParameterError

MAX_JSON_DEPTH = 64
LARGE_BODY_BYTES = 32 * 1024  # takes a good part of a millisecond to read
MAX_IGNORED_NAMES = 32
MAX_NAME_CHARS = 64

# Parameters of OpenAI and peers that kitfox has not, or not everywhere, with the values that ask for nothing.
UNSUPPORTED_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "audio_data": (),
    "beam_width": (1,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "chat_template": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "data_parallel_rank": (0,),
    "disagg_prefill_dp_rank": (),
    "documents": ([],),
    "early_stopping": (False,),
    "ec_transfer_params": (),
    "function_call": ("none",),
    "functions": ([],),
    "image_data": (),
    "input_embeds": (),
    "input_ids": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "lora_request": (),
    "max_thinking_tokens": (-1,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "multi_item_delimiter_indices": (),
    "ngram_corpus_id": (),
    "positional_embed_overrides": (),
    "prediction": (),
    "prompt_embeds": (),
    "require_reasoning": (False,),
    "return_cached_tokens_details": (False,),
    "return_entropy": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_hidden_states": (False,),
    "return_indexer_topk": (False,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "routed_dp_rank": (0,),
    "session_params": (),
    "spaces_between_special_tokens": (True, False),  # no kind of tokenizer that kitfox has puts any there
    "stream_reasoning": (True,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "video_data": (),
    "vllm_xargs": ({},),
    "watermark": (),
    "watermarking": (False,),
    "web_search_options": (),
}
_CLIENT_CODE = "is not supported: it is for code of the client's. Thinking is limited by a thinking budget"
UNSUPPORTED_REASONS = {
    "custom_logit_processor": _CLIENT_CODE,
    "custom_params": _CLIENT_CODE,
    "max_thinking_tokens": "is not a parameter of this endpoint; thinking_token_budget may be",
    "thinking_token_budget": "is not a parameter of this endpoint; max_thinking_tokens may be",
    "session_params": "is not supported here: sessions are for /generate",
}

T = TypeVar("T", bound=msgspec.Struct)


class JsonObject(dict[str, Any]):
    """A request's body; `strict` (--strict) refuses members that nobody reads."""

    strict = False

    def part(self, member: dict[str, Any]) -> JsonObject:
        """An object inside of it, as strict and also without its null members."""
        made = JsonObject((name, value) for name, value in member.items() if value is not None)
        made.strict = self.strict
        return made


_ERROR_PLACE = re.compile(r"^(?P<what>.*?) - at `\$\.?(?P<place>[^`]*)`$", re.DOTALL)


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """The whole body, never more than the limit in memory.

    Raises:
        TooLargeError: it is longer; said from Content-Length before a byte is read, where there is one.
    """
    too_large = TooLargeError(f"the request body must be at most {max_body_bytes} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > max_body_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_body_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


async def read_json_object(request: Request, max_body_bytes: int) -> JsonObject:
    """The body as a JSON object without its null members: null means "not given" everywhere in the API.

    Raises:
        RequestError: no JSON content type, no JSON, no object, nested too deep, NaN or lone surrogates in it.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise RequestError(f"the Content-Type must be application/json. Given: {content_type[:MAX_NAME_CHARS]}")
    raw = await read_body(request, max_body_bytes)
    if len(raw) <= LARGE_BODY_BYTES:
        body = decode_json(raw)
    else:
        async with request.app.state.large_bodies.turn():
            body = decode_json(raw)
    if not isinstance(body, dict):
        raise RequestError("the request body must be a JSON object")
    given = JsonObject((name, value) for name, value in body.items() if value is not None)
    given.strict = request.app.state.strict
    return given


class Turns:
    """Pieces of work that keep the event loop for milliseconds: one at a time, and as long a pause before the next, in
    which others' tokens pass.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._next_start_s = 0.0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with self._lock:
            await asyncio.sleep(self._next_start_s - time.monotonic())
            started = time.monotonic()
            try:
                yield
            finally:
                now = time.monotonic()
                self._next_start_s = now + (now - started)


def decode_json(raw: bytes) -> Any:
    """Strict JSON: no NaN or Infinity, valid UTF-8, no lone surrogates, at most MAX_JSON_DEPTH levels."""
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        containers = [v for v in level if isinstance(v, dict | list)]
        if not containers:
            return value
        level = [x for v in containers for x in (v.values() if isinstance(v, dict) else v)]
    raise _too_deep()


def _too_deep() -> RequestError:
    return RequestError(f"the request body must not nest deeper than {MAX_JSON_DEPTH} levels")


async def read_arguments(request: Request, max_body_bytes: int) -> dict[str, Any]:
    """The query's parameters and the members of a JSON body, if there is one."""
    arguments: dict[str, Any] = {}
    for name in request.query_params:
        values = [_query_value(value) for value in request.query_params.getlist(name)]
        arguments[name] = values[0] if len(values) == 1 else values
    raw = await read_body(request, max_body_bytes)
    body = decode_json(raw) if raw.strip() else {}
    if not isinstance(body, dict):
        raise RequestError("the request body must be a JSON object, or empty")
    return arguments | {name: value for name, value in body.items() if value is not None}


def _query_value(text: str) -> Any:
    """A number or a boolean where the text is one."""
    return decode_json(text.encode()) if re.fullmatch(r"true|false|-?\d{1,15}(\.\d{1,15})?", text) else text


def convert_body(body: dict[str, Any], kind: type[T]) -> tuple[T, list[str]]:
    """Make a protocol struct of a body.

    Returns:
        The struct, and the names of the members that nobody reads, at any depth, for the answer to list.

    Raises:
        UnsupportedParameterError: a known parameter asks for something that kitfox cannot do.
        RequestError: a member is missing or has the wrong type, or nobody reads it and the body is strict.
    """
    known = kind.__struct_fields__
    for name, wanted in body.items():
        if name not in known and name in UNSUPPORTED_PARAMETERS and wanted not in UNSUPPORTED_PARAMETERS[name]:
            raise UnsupportedParameterError(name, UNSUPPORTED_REASONS.get(name, "is not supported yet"))
    try:
        value = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None
    unread = dict.fromkeys(_unread_members(body, value))
    ignored = [name for name in unread if name not in UNSUPPORTED_PARAMETERS][:MAX_IGNORED_NAMES]
    if isinstance(body, JsonObject) and body.strict:
        refuse_ignored(ignored)
    return value, ignored


def refuse_ignored(names: list[str]) -> None:
    """What `--strict` makes of parameters that nobody reads: a RequestError, if there are any."""
    if names:
        refusal = RequestError(f"unknown parameters are refused (--strict): {', '.join(names)}", param=names[0])
        refusal.code = "unknown_parameter"
        raise refusal


def with_ignored(body: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """An answer that names the members which nobody read, if there were any."""
    return body | {"ignored_parameters": ignored} if ignored else body


def _unread_members(given: dict[str, Any], made: msgspec.Struct, place: str = "") -> Iterator[str]:
    """Where `given` has more than the struct made of it: "NAME", "stream_options.NAME", "messages[].content[].NAME"."""
    for name, value in given.items():
        if name not in made.__struct_fields__:
            if value is not None:
                yield place + name[:MAX_NAME_CHARS]
            continue
        yield from _unread_inside(value, getattr(made, name), place + name)


def _unread_inside(given: Any, made: Any, place: str) -> Iterator[str]:
    if isinstance(made, msgspec.Struct):
        yield from _unread_members(given, made, f"{place}.")
    elif isinstance(made, list) and made and isinstance(made[0], msgspec.Struct | list):
        for item, part in zip(given, made, strict=True):
            yield from _unread_inside(item, part, f"{place}[]")


def _validation_error(message: str) -> RequestError:
    """msgspec says "Expected `int`, got `str` - at `$.n`"; we say "n: expected `int`, got `str`"."""
    match = _ERROR_PLACE.match(message)
    if match is not None:
        place = match["place"]
        return _typed(f"{place}: {match['what'][:1].lower()}{match['what'][1:]}", re.split(r"[.\[]", place)[0])
    missing = re.fullmatch(r"Object missing required field `(\w+)`", message)
    if missing is not None:
        return _typed(f"{missing[1]} is required", missing[1])
    return _typed(message, None)


def _typed(message: str, param: str | None) -> RequestError:
    error = RequestError(message, param=param or None)
    error.code = "invalid_type"
    return error


def error_body(error: KitfoxError) -> dict[str, Any]:
    """The OpenAI shape of an error; always encodes to valid JSON."""
    message = error.message.encode("utf-8", "replace").decode("utf-8")
    return {"error": {"message": message, "type": error.error_type, "param": error.param, "code": error.code}}


def error_headers(error: KitfoxError) -> dict[str, str]:
    """When to come back, where the error knows it."""
    return {"Retry-After": str(error.retry_after_s)} if isinstance(error, QueueFullError) else {}


def internal_error() -> KitfoxError:
    """What a client hears about a fault of ours: the details are in the server's log only."""
    return KitfoxError("the server failed to answer this request; its log says why")
