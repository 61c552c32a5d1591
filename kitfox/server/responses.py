"""OpenAI's Responses protocol: translated to a chat and back into items; answers are kept for the next turn.

The answer's object is the one state: a stream shows how it grows, a poll shows how far it is.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.convertors import StringConvertor, register_url_convertor

from kitfox.errors import InvalidParameterError, KitfoxError, RequestError, UnsupportedParameterError
from kitfox.server.conversation import (
    ChatMessage,
    ContentPart,
    ForeignImage,
    FunctionCall,
    FunctionSpec,
    Tool,
    ToolCall,
)
from kitfox.server.generation import Generator, Respond
from kitfox.server.openai import ChatRequest, GenerationFields, OpenAIService, Reply, encode_messages
from kitfox.server.structured import ResponseFormat
from kitfox.server.translation import (
    Part,
    PartChange,
    PartDelta,
    PartEnd,
    PartReader,
    PartStart,
    generation_fields,
    server_sent_event,
)
from kitfox.server.validation import convert_body, internal_error, read_json_object

logger = logging.getLogger("kitfox.server")

MAX_STORED_RESPONSES = 4096
MAX_STORED_BYTES = 64 * 2**20
MAX_LISTED_ITEMS = 100
MAX_METADATA_ENTRIES = 16
USUAL_ANSWER_SHARE = 8  # of the context, the part that is kept for an answer without max_output_tokens
FOREIGN_PARAMETERS = ("max_tokens", "request_id", "response_format", "rid")
LOGPROBS = "message.output_text.logprobs"
# Of what belongs to tools on OpenAI's side there is never any; and reasoning is shown in the clear.
NEEDLESS_INCLUDES = {
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources",
    "web_search_call.results",
}  # fmt: skip


# ---- what clients send ----------------------------------------------------------------------------------------------


class ItemPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of an item's content. `annotations` and `logprobs` come back with our own texts and say nothing."""

    type: str
    text: str | None = None
    image_url: str | None = None
    detail: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Item(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item of any type of the input; which fields it needs depends on `type`. `status` and `phase` are not read."""

    type: str = ""
    id: str | None = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: ResponseFormat | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None


class ResponsesRequest(GenerationFields, kw_only=True):
    """POST /v1/responses. What `user`, `safety_identifier` and the like say is shown in the answer, and that is all."""

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    store: bool = True
    background: bool = False
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    tools: list[FunctionTool] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] = msgspec.field(default_factory=list)
    top_logprobs: int | None = None
    truncation: str = "disabled"
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


# ---- from a response's input to a chat ------------------------------------------------------------------------------


def check_request(fields: ResponsesRequest) -> None:
    """Raises RequestError for what no chat can give, or what contradicts itself."""
    for name in ("conversation", "prompt"):
        if getattr(fields, name) is not None:
            raise UnsupportedParameterError(name)
    if fields.truncation not in ("auto", "disabled"):
        raise InvalidParameterError("truncation", "must be auto or disabled", fields.truncation)
    for name in fields.include:
        if name != LOGPROBS and name not in NEEDLESS_INCLUDES:
            raise InvalidParameterError("include", "must name parts of a response", name)
    if fields.top_logprobs is not None and fields.top_logprobs < 0:
        raise InvalidParameterError("top_logprobs", "must be >= 0", fields.top_logprobs)
    if len(fields.metadata) > MAX_METADATA_ENTRIES:
        raise InvalidParameterError("metadata", f"must have at most {MAX_METADATA_ENTRIES} keys", len(fields.metadata))
    if fields.background and (fields.stream or not fields.store):
        name = "stream" if fields.stream else "store"
        limit = "must be false with background" if fields.stream else "must be true with background"
        raise InvalidParameterError(name, limit, getattr(fields, name))


def make_items(given: str | list[Item]) -> list[Item]:
    """The input as items, each with an id and parts for content, as they are listed later.

    Raises:
        RequestError: an item is of a type that kitfox has not, or incomplete.
    """
    if isinstance(given, str):
        given = [Item(type="message", role="user", content=given)]
    if not given:
        raise InvalidParameterError("input", "must be text or have at least one item", [])
    return [_checked_item(item, f"input[{position}]") for position, item in enumerate(given)]


def _checked_item(item: Item, place: str) -> Item:
    needed = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "reasoning": (),
    }
    kind = item.type or "message"
    if kind not in needed:
        raise UnsupportedParameterError(f"{place}.type", f"{kind[:40]!r} is not supported")
    for name in needed[kind]:
        if getattr(item, name) is None:
            raise InvalidParameterError(f"{place}.{name}", f"is required in an item of type {kind!r}", None)
    if kind == "message" and item.role not in ("user", "system", "developer", "assistant"):
        raise InvalidParameterError(f"{place}.role", "must be user, system, developer or assistant", item.role)
    content = item.content
    if isinstance(content, str):
        content = [ItemPart(type="output_text" if item.role == "assistant" else "input_text", text=content)]
    for name, parts in (("content", content), ("output", item.output), ("summary", item.summary)):
        for position, part in enumerate(parts if isinstance(parts, list) else []):
            _check_part(part, f"{place}.{name}[{position}]")
    prefix = {"message": "msg_", "reasoning": "rs_"}.get(kind, "fc_")
    return msgspec.structs.replace(item, type=kind, content=content, id=item.id or prefix + uuid.uuid4().hex)


def _check_part(part: ItemPart, place: str) -> None:
    if part.type == "input_image" and part.image_url is not None:
        return
    if part.type not in ("input_text", "output_text", "text", "reasoning_text", "summary_text"):
        raise UnsupportedParameterError(
            f"{place}.type", f"{part.type[:40]!r} is not supported; only text and input_image with an image_url are"
        )
    if part.text is None:
        raise InvalidParameterError(f"{place}.text", "must be a string", None)


def make_messages(items: list[Item]) -> list[ChatMessage]:
    """Messages of a chat: what the assistant thought, said and called between two others' items is one of them."""
    messages: list[ChatMessage] = []
    for item in items:
        if item.type == "function_call_output":
            messages.append(ChatMessage(role="tool", content=_chat_content(item.output), tool_call_id=item.call_id))
        elif item.type == "message" and item.role != "assistant":
            messages.append(ChatMessage(role=item.role or "", content=_chat_content(item.content)))
        else:
            if not messages or messages[-1].role != "assistant":
                messages.append(ChatMessage(role="assistant", content=[]))
            _add_to_turn(messages[-1], item)
    return messages


def _add_to_turn(message: ChatMessage, item: Item) -> None:
    if item.type == "reasoning":
        parts = item.content if isinstance(item.content, list) and item.content else item.summary
        thoughts = [message.reasoning_content or "", *(part.text or "" for part in parts or [])]
        message.reasoning_content = "\n".join(text for text in thoughts if text) or None
    elif item.type == "function_call":
        call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name or "", arguments=item.arguments or ""))
        message.tool_calls = [*(message.tool_calls or []), call]
        message.content = message.content or None
    else:
        parts_before = message.content if isinstance(message.content, list) else []
        message.content = [*parts_before, *_text_parts(item.content)]


def _chat_content(content: str | list[ItemPart] | None) -> str | list[ContentPart]:
    return content if isinstance(content, str) else _text_parts(content)


def _text_parts(content: str | list[ItemPart] | None) -> list[ContentPart]:
    assert not isinstance(content, str), "items have been checked, and have parts"
    return [
        ContentPart(type="text", text=part.text)
        if part.type != "input_image"
        else ForeignImage(type="image_url", image_url=part.image_url, param="input.content", kind=part.type)
        for part in content or []
    ]


def make_chat(fields: ResponsesRequest, context: list[Item]) -> ChatRequest:
    """The chat that a request asks for.

    Args:
        context: earlier turns and the request's own input.

    Raises:
        RequestError: a parameter is wrong, or asks for what no chat has.
    """
    shared = generation_fields(fields, foreign=FOREIGN_PARAMETERS)
    messages = make_messages(context)
    if fields.instructions is not None:
        messages.insert(0, ChatMessage(role="system", content=fields.instructions))
    tools, tool_choice = _chosen_tools(fields)
    wants_logprobs = LOGPROBS in fields.include or bool(fields.top_logprobs)
    return ChatRequest(
        **shared
        | {
            "messages": messages,
            "max_tokens": fields.max_output_tokens,
            "stream_options": None,
            "response_format": fields.text.format if fields.text is not None else None,
            "tools": tools,
            "tool_choice": tool_choice if tools else None,
            "parallel_tool_calls": fields.parallel_tool_calls,
            "logprobs": wants_logprobs,
            "top_logprobs": fields.top_logprobs if wants_logprobs else None,
            "reasoning_effort": fields.reasoning.effort if fields.reasoning is not None else None,
            "chat_template_kwargs": fields.chat_template_kwargs,
        }
    )


async def fitted(generator: Generator, fields: ResponsesRequest, context: list[Item]) -> list[Item]:
    """What truncation "auto" leaves of a conversation: all of it if it fits, else its end with room for an answer.

    System messages stay; the rest goes from the oldest on, up to a message of a user if that helps, else from behind
    the last one. No result stays whose call is gone. What does not fit even so is left to be refused.
    """
    if fields.truncation != "auto":
        return context
    stats, num_answer_tokens = generator.llm.stats, fields.max_output_tokens
    room = min(generator.llm.max_model_len, stats.num_blocks * stats.block_size)

    async def fits(items: list[Item], num_spared_tokens: int) -> bool:
        token_ids = await encode_messages(generator, make_chat(fields, items))
        return len(token_ids) + num_spared_tokens <= room

    if await fits(context, num_answer_tokens or 1):
        return context
    num_spared_tokens = num_answer_tokens or room // USUAL_ANSWER_SHARE
    cuts = _cuts(context)
    first, behind = 0, len(cuts) - 1
    while first < behind:  # the longest one that fits: each is shorter than the one before
        middle = (first + behind) // 2
        if await fits(_cut_at(context, *cuts[middle]), num_spared_tokens):
            behind = middle
        else:
            first = middle + 1
    return _cut_at(context, *cuts[first]) if cuts else context


def _cuts(context: list[Item]) -> list[tuple[int, int]]:
    """What truncation may leave of a conversation, each shorter than the one before.

    Returns:
        Where the end begins that stays, and a message that stays before it.
    """
    users = [place for place, item in enumerate(context) if item.type == "message" and item.role == "user"]
    last = users[-1] if users else -1
    calls = {item.call_id: place for place, item in enumerate(context) if item.type == "function_call"}
    num_torn = [0] * (len(context) + 1)  # first the changes from place to place: results whose calls would be gone
    for place, item in enumerate(context):
        call = calls.get(item.call_id) if item.type == "function_call_output" else None
        if call is not None and call < place:
            num_torn[call + 1] += 1
            num_torn[place + 1] -= 1
    num_torn = list(itertools.accumulate(num_torn))
    starts = [*users[1:], *range(last + 2, len(context))]
    return [(start, last) for start in starts if num_torn[start] == 0]


def _cut_at(context: list[Item], start: int, kept: int) -> list[Item]:
    return [
        item
        for place, item in enumerate(context)
        if place >= start or place == kept or (item.type == "message" and item.role in ("system", "developer"))
    ]


def _chosen_tools(fields: ResponsesRequest) -> tuple[list[Tool], str | dict[str, Any]]:
    tools = [_chat_tool(tool, f"tools[{position}]") for position, tool in enumerate(fields.tools)]
    choice = fields.tool_choice
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise InvalidParameterError("tool_choice", "must be none, auto, required or a function", choice)
        return tools, choice
    if choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return tools, {"type": "function", "function": {"name": choice["name"]}}
    allowed = choice.get("tools")
    if choice.get("type") != "allowed_tools" or not isinstance(allowed, list):
        raise UnsupportedParameterError("tool_choice", "is only supported for functions")
    names = [tool.get("name") for tool in allowed if isinstance(tool, dict)]
    if unknown := [name for name in names if name not in {tool.function.name for tool in tools}]:
        raise InvalidParameterError("tool_choice.tools", "must be among the tools", unknown[0])
    return [tool for tool in tools if tool.function.name in names], choice.get("mode") or "auto"


def _chat_tool(tool: FunctionTool, place: str) -> Tool:
    if tool.type != "function":
        raise UnsupportedParameterError(f"{place}.type", f"{tool.type[:40]!r} is not supported; only functions are")
    if not tool.name:
        raise InvalidParameterError(f"{place}.name", "must be a string", tool.name)
    return Tool(
        function=FunctionSpec(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
    )


# ---- the store ------------------------------------------------------------------------------------------------------


@dataclass
class StoredResponse:
    """A response with all that a next turn has to know.

    Attributes:
        body: the response's object; of one that runs in the background, as far as it is.
        context: earlier turns and the request's own input.
        task: what runs it in the background, until it has ended.
        num_bytes: of body and context as JSON, when it was last counted.
    """

    body: dict[str, Any]
    context: list[Item]
    task: asyncio.Task[None] | None = None
    num_bytes: int = 0

    @property
    def is_running(self) -> bool:
        return self.body["status"] in ("queued", "in_progress")


class ResponseStore:
    """The last responses, in memory. The least recently used are forgotten first, running ones never."""

    def __init__(self, max_responses: int = MAX_STORED_RESPONSES, max_bytes: int = MAX_STORED_BYTES):
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._by_id: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, or count it anew after it has grown."""
        response_id = stored.body["id"]
        self._num_bytes -= self._by_id[response_id].num_bytes if response_id in self._by_id else 0
        stored.num_bytes = len(msgspec.json.encode([stored.body, stored.context]))
        self._num_bytes += stored.num_bytes
        self._by_id[response_id] = stored
        self._by_id.move_to_end(response_id)
        for oldest_id in list(self._by_id):
            if len(self._by_id) <= self._max_responses and self._num_bytes <= self._max_bytes:
                break
            if not self._by_id[oldest_id].is_running:
                self._num_bytes -= self._by_id.pop(oldest_id).num_bytes

    def get(self, response_id: str) -> StoredResponse:
        """Raises RequestError with status 404 if it was never stored, was deleted, or is forgotten."""
        if response_id not in self._by_id:
            error = RequestError(
                f"There is no stored response {response_id[:200]}; old ones are forgotten.", param="id"
            )
            error.status, error.code = 404, "not_found"
            raise error
        self._by_id.move_to_end(response_id)
        return self._by_id[response_id]

    def delete(self, response_id: str) -> None:
        self._num_bytes -= self._by_id.pop(response_id).num_bytes

    def context_after(self, response_id: str) -> list[Item]:
        """All items of a conversation up to a response's answer.

        Raises:
            RequestError: it is not stored, or has not ended.
        """
        try:
            stored = self.get(response_id)
        except RequestError as error:
            missing = RequestError(error.message, param="previous_response_id")
            missing.code = "previous_response_not_found"
            raise missing from None
        if stored.is_running:
            raise InvalidParameterError("previous_response_id", "must be of a response that has ended", response_id)
        return stored.context + msgspec.convert(stored.body["output"], list[Item])


# ---- from a chat's answer to a response -----------------------------------------------------------------------------


class ResponseReply:
    """A chat's answer as a response. Reading it, whole or as events, makes `stored.body` grow to the end."""

    def __init__(self, reply: Reply, fields: ResponsesRequest, context: list[Item]):
        self._reply = reply
        self._reader = PartReader()
        self._name = reply.job.answer_id.removeprefix("resp_")
        self.stored = StoredResponse(_opening_body(reply, fields), context)
        self._store: ResponseStore | None = None

    def keep_in(self, store: ResponseStore) -> None:
        """Store the response once it has ended."""
        self._store = store

    def close(self) -> None:
        self._reply.close()

    async def accepted(self) -> None:
        await self._reply.accepted()

    async def whole(self) -> dict[str, Any]:
        """The response as one object.

        Raises:
            KitfoxError: the engine failed on it.
        """
        async for _ in self._changes():
            pass
        self._end()
        return self.stored.body

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The protocol's events, numbered; a failure becomes an error event and a failed response."""
        number = 0
        async for name, data in self._events():
            yield server_sent_event(name, {"type": name, "sequence_number": number} | data)
            number += 1

    async def _events(self) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        body = self.stored.body
        yield "response.created", {"response": body}
        yield "response.in_progress", {"response": body}
        try:
            async for change in self._changes():
                for event in self._part_events(change):
                    yield event
            self._end()
        except Exception as error:
            shown = self.fail(error)
            yield "error", {"code": shown.code, "message": shown.message, "param": shown.param}
        yield f"response.{body['status']}", {"response": body}

    def start(self) -> None:
        """Read it to its end in a task of its own, `stored.task`, which may be cancelled at any time."""

        async def run() -> None:
            try:
                await self.whole()
            except Exception as error:
                self.fail(error)

        def on_end(_: asyncio.Task[None]) -> None:
            self.stored.task = None
            if self.stored.is_running:
                self._close_items()
                self.stored.body["status"] = "cancelled"
                self._keep()
                self.close()

        self.stored.task = asyncio.create_task(run())
        self.stored.task.add_done_callback(on_end)

    def fail(self, error: Exception) -> KitfoxError:
        """End the response as failed.

        Returns:
            What a client may hear.
        """
        if not isinstance(error, KitfoxError):
            logger.error("response %s failed", self._reply.job.answer_id, exc_info=error)
        shown = error if isinstance(error, KitfoxError) else internal_error()
        self._close_items()
        self.stored.body |= {"status": "failed", "error": {"code": "server_error", "message": shown.message}}
        self._keep()
        return shown

    def _keep(self) -> None:
        if self._store is not None:
            self._store.put(self.stored)

    def _close_items(self) -> None:
        for item in self.stored.body["output"]:
            if item["status"] == "in_progress":
                item["status"] = "incomplete"

    def _end(self) -> None:
        body, reply = self.stored.body, self._reply
        was_cut = self._reader.finish_reason == "length"
        body["status"] = "incomplete" if was_cut else "completed"
        body["incomplete_details"] = {"reason": "max_output_tokens"} if was_cut else None
        body["completed_at"] = None if was_cut else int(time.time())
        body["usage"] = _usage(reply)
        if reply.timings is not None:
            body["timings"] = msgspec.structs.asdict(reply.timings)
        self._keep()

    # ---- items --------------------------------------------------------------------------------------------------

    async def _changes(self) -> AsyncGenerator[PartChange, None]:
        """What the answer's pieces change, after the body has them."""
        output = self.stored.body["output"]
        async for piece in self._reply.pieces():
            self.stored.body["status"] = "in_progress"
            for change in self._reader.read(piece):
                item = self._item(change.part)
                if isinstance(change, PartEnd):
                    item["status"] = "incomplete" if self._reader.finish_reason == "length" else "completed"
                output[change.part.index :] = [item]
                yield change

    def _item(self, part: Part) -> dict[str, Any]:
        prefix = {"text": "msg", "reasoning": "rs", "tool_call": "fc"}[part.kind]
        item: dict[str, Any] = {"id": f"{prefix}_{self._name}_{part.index}", "status": "in_progress"}
        if part.kind == "text":
            content = [_content_part(part)] if part.text or part.logprobs else []
            return item | {"type": "message", "role": "assistant", "content": content}
        if part.kind == "reasoning":
            content = [_content_part(part)] if part.text else []
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "function_call", "call_id": part.call_id, "name": part.name, "arguments": part.text}

    def _part_events(self, change: PartChange) -> Iterator[tuple[str, dict[str, Any]]]:
        part = change.part
        item = self.stored.body["output"][part.index]
        place = {"item_id": item["id"], "output_index": part.index}
        whole = {"output_index": part.index, "item": item}
        in_content = place | {"content_index": 0}
        if isinstance(change, PartStart):
            yield "response.output_item.added", whole
            if part.kind != "tool_call":
                yield "response.content_part.added", in_content | {"part": _content_part(part)}
        elif isinstance(change, PartDelta):
            if part.kind == "tool_call":
                yield "response.function_call_arguments.delta", place | {"delta": change.text}
            elif part.kind == "reasoning":
                yield "response.reasoning_text.delta", in_content | {"delta": change.text}
            else:
                delta = {"delta": change.text, "logprobs": change.logprobs}
                yield "response.output_text.delta", in_content | delta
        else:
            if part.kind == "tool_call":
                done = {"name": part.name, "arguments": part.text}
                yield "response.function_call_arguments.done", place | done
            elif part.kind == "reasoning":
                yield "response.reasoning_text.done", in_content | {"text": part.text}
            else:
                yield "response.output_text.done", in_content | {"text": part.text, "logprobs": part.logprobs}
            if part.kind != "tool_call":
                yield "response.content_part.done", in_content | {"part": _content_part(part)}
            yield "response.output_item.done", whole


def _content_part(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": part.logprobs}


def _opening_body(reply: Reply, fields: ResponsesRequest) -> dict[str, Any]:
    """A response's object before its first token. Sampling parameters are shown as they are used."""
    job, sampling = reply.job, reply.job.sampling
    text_format = fields.text.format if fields.text is not None else None
    body = {
        "id": job.answer_id,
        "object": "response",
        "created_at": job.created,
        "completed_at": None,
        "status": "queued" if fields.background else "in_progress",
        "background": fields.background,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "model": job.model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": fields.reasoning.effort if fields.reasoning is not None else None, "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.store,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"} if text_format is None else text_format},
        "tool_choice": fields.tool_choice,
        "tools": msgspec.to_builtins(fields.tools),
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "truncation": fields.truncation,
        "usage": None,
        "metadata": fields.metadata,
    }
    if fields.user is not None:
        body["user"] = fields.user
    if job.ignored_parameters:
        body["ignored_parameters"] = job.ignored_parameters
    return body


def _usage(reply: Reply) -> dict[str, Any]:
    usage = reply.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": sum(usage.cached_tokens.values()), "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


# ---- routes ---------------------------------------------------------------------------------------------------------


class _ResponseIdConvertor(StringConvertor):
    """So that a path such as /v1/responses/compact is unknown, and no response's."""

    regex = "resp_[^/]+"


register_url_convertor("response", _ResponseIdConvertor())


def add_routes(app: FastAPI, generator: Generator, max_body_bytes: int, respond: Respond) -> None:
    """POST /v1/responses and what can be done with a stored one."""
    service = OpenAIService(generator)
    store = ResponseStore()

    def json(body: Any) -> Response:
        return Response(msgspec.json.encode(body), media_type="application/json")

    @app.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), ResponsesRequest)
        check_request(fields)
        context = make_items(fields.input)
        if fields.previous_response_id is not None:
            context = store.context_after(fields.previous_response_id) + context
        chat = make_chat(fields, await fitted(generator, fields, context))
        reply = await service.chat(chat, ignored, None, id_prefix="resp_", format_param="text.format")
        response = ResponseReply(reply, fields, context)
        if fields.store:
            response.keep_in(store)
        if not fields.background:
            return await respond(request, response, stream=fields.stream)
        store.put(response.stored)
        response.start()
        return json(response.stored.body)

    @app.get("/v1/responses/{response_id:response}")
    async def get_response(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise UnsupportedParameterError("stream", "of a response that exists is not supported")
        return json(store.get(response_id).body)

    @app.delete("/v1/responses/{response_id:response}")
    async def delete_response(response_id: str) -> Response:
        await stop(store.get(response_id))
        store.delete(response_id)
        return json({"id": response_id, "object": "response", "deleted": True})

    @app.post("/v1/responses/{response_id:response}/cancel")
    async def cancel_response(response_id: str) -> Response:
        stored = store.get(response_id)
        if not stored.body["background"]:
            raise RequestError("Only a response that was made with background can be cancelled.", param="id")
        await stop(stored)
        return json(stored.body)

    @app.get("/v1/responses/{response_id:response}/input_items")
    async def list_input_items(request: Request, response_id: str) -> Response:
        return json(_page(store.get(response_id).context, dict(request.query_params)))

    async def stop(stored: StoredResponse) -> None:
        if stored.task is not None:
            stored.task.cancel()
            await asyncio.wait({stored.task})


def _page(items: list[Item], query: dict[str, str]) -> dict[str, Any]:
    """A page of items; newest first unless asked otherwise.

    Raises:
        InvalidParameterError: limit, order or after is not possible.
    """
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LISTED_ITEMS:
        raise InvalidParameterError("limit", f"must be in [1, {MAX_LISTED_ITEMS}]", limit)
    if order not in ("asc", "desc"):
        raise InvalidParameterError("order", "must be asc or desc", order)
    in_order = items if order == "asc" else items[::-1]
    if "after" in query:
        ids = [item.id for item in in_order]
        if query["after"] not in ids:
            raise InvalidParameterError("after", "must be the id of an item of this response", query["after"])
        in_order = in_order[ids.index(query["after"]) + 1 :]
    page = in_order[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(in_order) > len(page),
    }
