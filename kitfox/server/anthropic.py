"""Anthropic's Messages protocol: translated to a chat, and back into content blocks and events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

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
from kitfox.server.generation import Generator, Respond, required_model
from kitfox.server.logs import current_request
from kitfox.server.openai import ChatRequest, GenerationFields, OpenAIService, Reply, encode_messages
from kitfox.server.structured import ResponseFormat
from kitfox.server.translation import (
    Part,
    PartDelta,
    PartEnd,
    PartReader,
    PartStart,
    generation_fields,
    server_sent_event,
)
from kitfox.server.validation import (
    convert_body,
    error_headers,
    internal_error,
    read_json_object,
    refuse_ignored,
    with_ignored,
)

logger = logging.getLogger("kitfox.server")

FOREIGN_PARAMETERS = ("logprob_token_ids", "response_format", "stop", "stream_options", "thinking_token_budget")
BUDGET_PARAM = "thinking.budget_tokens"
OVERLOADED = 529  # what this protocol's clients know as "come back later"
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "overloaded_error",
    503: "overloaded_error",
}
# What the protocol wants in every message, and no engine of one machine has.
UNUSED_USAGE = {"cache_creation": None, "inference_geo": None, "service_tier": "standard"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


# ---- what clients send ----------------------------------------------------------------------------------------------


class MediaSource(msgspec.Struct, kw_only=True):
    """What an image block shows: `data` in base64, or what is at a URL."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(msgspec.Struct, kw_only=True):
    """A content block of any type; which fields it needs depends on `type`. Prefixes are cached without being asked."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    source: MediaSource | None = None
    cache_control: dict[str, Any] | None = None


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[Block]


class MessagesTool(msgspec.Struct, kw_only=True):
    name: str
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: ResponseFormat | None = None


class MessagesRequest(GenerationFields, kw_only=True):
    """POST /v1/messages, and without max_tokens POST /v1/messages/count_tokens. `metadata` concerns nobody here."""

    messages: list[Message]
    system: str | list[Block] = ""
    stop_sequences: list[str] = msgspec.field(default_factory=list)
    tools: list[MessagesTool] = msgspec.field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    mcp_servers: list[Any] = msgspec.field(default_factory=list)
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


# ---- from a message to a chat ---------------------------------------------------------------------------------------


def make_chat(fields: MessagesRequest) -> ChatRequest:
    """The chat that a message asks for.

    Raises:
        RequestError: a parameter is wrong, or asks for what no chat has.
    """
    shared = generation_fields(fields, foreign=FOREIGN_PARAMETERS)
    if fields.temperature is not None and not 0 <= fields.temperature <= 1:
        raise InvalidParameterError("temperature", "must be in [0, 1]", fields.temperature)
    if fields.mcp_servers:
        raise UnsupportedParameterError("mcp_servers")
    output = fields.output_config or OutputConfig()
    format_param, wanted = _output_format(fields)
    if wanted is not None and wanted.type != "json_schema":
        raise InvalidParameterError(f"{format_param}.type", 'must be "json_schema"', wanted.type)
    messages = _system_message(fields.system)
    for position, message in enumerate(fields.messages):
        messages += _chat_messages(message, f"messages[{position}]")
    messages = _join_turns(messages)
    is_prefilled = bool(messages) and messages[-1].role == "assistant"
    if is_prefilled and messages[-1].tool_calls:
        last = len(fields.messages) - 1
        raise InvalidParameterError(f"messages[{last}]", "must not be a tool_use without its tool_result", "tool_use")
    choice = fields.tool_choice or ToolChoice(type="auto")
    return ChatRequest(
        **shared
        | {
            "messages": messages,
            "response_format": wanted,
            "stop": fields.stop_sequences,
            "tools": [_chat_tool(tool, f"tools[{position}]") for position, tool in enumerate(fields.tools)],
            "tool_choice": _chat_tool_choice(choice) if fields.tool_choice is not None else None,
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "reasoning_effort": output.effort,
            "thinking_token_budget": _thinking_budget(fields.thinking),
            "continue_final_message": is_prefilled,
            "chat_template_kwargs": _thinking_kwargs(fields.thinking) | fields.chat_template_kwargs,
        }
    )


def _output_format(fields: MessagesRequest) -> tuple[str, ResponseFormat | None]:
    """The form that the answer is to have, and the name of the parameter that says so: there are two."""
    in_config = fields.output_config.format if fields.output_config is not None else None
    if in_config is not None and fields.output_format is not None:
        raise RequestError("output_config.format and output_format must not both be given", param="output_format")
    return (
        ("output_config.format", in_config) if fields.output_format is None else ("output_format", fields.output_format)
    )


def _thinking_kwargs(thinking: Thinking | None) -> dict[str, Any]:
    """Templates of models that can do both have a switch; without a wish, theirs is the default."""
    if thinking is None:
        return {}
    if thinking.type not in ("enabled", "disabled", "adaptive"):
        raise InvalidParameterError("thinking.type", 'must be "enabled", "adaptive" or "disabled"', thinking.type)
    return {"enable_thinking": thinking.type != "disabled"}


def _thinking_budget(thinking: Thinking | None) -> int | None:
    if thinking is None or thinking.budget_tokens is None:
        return None
    if thinking.type == "disabled":
        raise InvalidParameterError(
            BUDGET_PARAM, 'must not be given where thinking is "disabled"', thinking.budget_tokens
        )
    return thinking.budget_tokens


def _system_message(system: str | list[Block]) -> list[ChatMessage]:
    if not system:
        return []
    content = system if isinstance(system, str) else [_text_part(block, "system") for block in system]
    return [ChatMessage(role="system", content=content)]


def _chat_messages(message: Message, place: str) -> list[ChatMessage]:
    """A user's tool results are messages of their own in a chat, in the order they have among the texts."""
    if message.role not in ("user", "assistant"):
        raise InvalidParameterError(f"{place}.role", 'must be "user" or "assistant"', message.role)
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=[ContentPart(type="text", text=message.content)])]
    make = _assistant_message if message.role == "assistant" else _user_message
    return [make(block, f"{place}.content[{position}]") for position, block in enumerate(message.content)]


def _user_message(block: Block, place: str) -> ChatMessage:
    if block.type == "image":
        return ChatMessage(role="user", content=[_image_part(block, place)])
    if block.type != "tool_result":
        return ChatMessage(role="user", content=[_text_part(block, place)])
    if block.tool_use_id is None:
        raise InvalidParameterError(f"{place}.tool_use_id", "must be the id of a tool_use", None)
    result = block.content or ""
    if isinstance(result, str):
        return ChatMessage(role="tool", content=result, tool_call_id=block.tool_use_id)
    parts = [_text_part(part, f"{place}.content[{position}]") for position, part in enumerate(result)]
    return ChatMessage(role="tool", content=parts, tool_call_id=block.tool_use_id)


def _assistant_message(block: Block, place: str) -> ChatMessage:
    if block.type == "thinking":
        return ChatMessage(role="assistant", content=[], reasoning_content=block.thinking or "")
    if block.type != "tool_use":
        return ChatMessage(role="assistant", content=[_text_part(block, place)])
    for name in ("id", "name"):
        if not getattr(block, name):
            raise InvalidParameterError(f"{place}.{name}", "must be a string", getattr(block, name))
    assert block.name is not None
    call = ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=block.input or {}))
    return ChatMessage(role="assistant", tool_calls=[call])


def _image_part(block: Block, place: str) -> ContentPart:
    source = block.source or MediaSource(type="base64")
    if source.type not in ("base64", "url"):
        raise InvalidParameterError(f"{place}.source.type", 'must be "base64" or "url"', source.type)
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data or ''}"
    return ForeignImage(type="image_url", image_url=url, param=place, kind="image")


def _text_part(block: Block, place: str) -> ContentPart:
    if block.type != "text":
        raise UnsupportedParameterError(f"{place}.type", f"{block.type[:40]!r} is not supported here")
    if block.text is None:
        raise InvalidParameterError(f"{place}.text", "must be a string", None)
    return ContentPart(type="text", text=block.text)


def _join_turns(messages: list[ChatMessage]) -> list[ChatMessage]:
    """One message a turn, as the protocol wants it: neighbours of one role are one; tool results stay apart."""
    joined: list[ChatMessage] = []
    for message in messages:
        before = joined[-1] if joined else None
        if before is None or before.role != message.role or message.role not in ("user", "assistant"):
            joined.append(message)
            continue
        before.tool_calls = [*(before.tool_calls or []), *(message.tool_calls or [])] or None
        parts = _parts(before) + _parts(message)
        before.content = None if before.tool_calls and not parts else parts
        thoughts = [text for text in (before.reasoning_content, message.reasoning_content) if text]
        before.reasoning_content = "\n".join(thoughts) or None
    return joined


def _parts(message: ChatMessage) -> list[ContentPart]:
    return message.content if isinstance(message.content, list) else []


def _chat_tool(tool: MessagesTool, place: str) -> Tool:
    if tool.type != "custom":
        raise UnsupportedParameterError(
            f"{place}.type", f"{tool.type[:40]!r} is not supported; only the client's tools"
        )
    if tool.input_schema is None:
        raise InvalidParameterError(f"{place}.input_schema", "must be a JSON schema", None)
    return Tool(
        function=FunctionSpec(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
    )


def _chat_tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidParameterError("tool_choice.name", "must be the name of a tool", None)
        return {"type": "function", "function": {"name": choice.name}}
    names = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type not in names:
        raise InvalidParameterError("tool_choice.type", 'must be "auto", "any", "tool" or "none"', choice.type)
    return names[choice.type]


# ---- from a chat's answer to a message ------------------------------------------------------------------------------


class MessageReply:
    """A chat's answer as a message: the blocks of a whole one are those that a stream would have sent."""

    def __init__(self, reply: Reply):
        self._reply = reply
        self._reader = PartReader()

    def close(self) -> None:
        self._reply.close()

    async def accepted(self) -> None:
        await self._reply.accepted()

    async def whole(self) -> dict[str, Any]:
        """The message as one object.

        Raises:
            KitfoxError: the engine failed on it.
        """
        content = []
        async for piece in self._reply.pieces():
            content += [_whole_block(change.part) for change in self._reader.read(piece) if isinstance(change, PartEnd)]
        return self._message(content) | self._ending() | {"usage": self._usage() | UNUSED_USAGE}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The protocol's events; a failure becomes one error event."""
        try:
            async for name, data in self._events():
                yield server_sent_event(name, {"type": name} | data)
        except KitfoxError as error:
            yield server_sent_event("error", error_body(error))
        except Exception:
            logger.exception("stream %s failed", self._reply.job.answer_id)
            yield server_sent_event("error", error_body(internal_error()))

    async def _events(self) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        has_started = False
        async for piece in self._reply.pieces():
            if not has_started:  # not before, because only now is it known what came from the cache
                usage = self._usage() | UNUSED_USAGE | {"output_tokens": 0, "output_tokens_details": None}
                yield "message_start", {"message": self._message([]) | _ending(None, None) | {"usage": usage}}
                has_started = True
            for change in self._reader.read(piece):
                index = change.part.index
                if isinstance(change, PartStart):
                    yield "content_block_start", {"index": index, "content_block": _empty_block(change.part)}
                elif isinstance(change, PartEnd):
                    yield "content_block_stop", {"index": index}
                elif change.text:
                    yield "content_block_delta", {"index": index, "delta": _block_delta(change)}
        yield "message_delta", {"delta": self._ending(), "usage": self._usage()}
        yield "message_stop", {}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        job = self._reply.job
        message = {"id": job.answer_id, "type": "message", "role": "assistant", "model": job.model, "content": content}
        return message | ({"ignored_parameters": job.ignored_parameters} if job.ignored_parameters else {})

    def _ending(self) -> dict[str, Any]:
        """A stop text of the request's is told apart from the model's own end."""
        reason, stop = self._reader.finish_reason, self._reader.stop_reason
        if reason == "stop" and isinstance(stop, str):
            return _ending("stop_sequence", stop)
        if reason == "stop" and self._reader.has_calls:
            return _ending("tool_use", None)
        return _ending(STOP_REASONS.get(reason or "", reason), None)

    def _usage(self) -> dict[str, Any]:
        """In this protocol the input tokens are those that did not come from the cache."""
        usage = self._reply.usage
        num_cached = sum(usage.cached_tokens.values())
        thinking = usage.reasoning_tokens
        return {
            "input_tokens": usage.prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": None if thinking is None else {"thinking_tokens": thinking},
            "server_tool_use": None,
        }


def _ending(reason: str | None, stop_sequence: str | None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": stop_sequence, "stop_details": None, "container": None}


def _empty_block(part: Part) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": "", "citations": None}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}, "caller": {"type": "direct"}}


def _block_delta(change: PartDelta) -> dict[str, Any]:
    if change.part.kind == "text":
        return {"type": "text_delta", "text": change.text}
    if change.part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": change.text}
    return {"type": "input_json_delta", "partial_json": change.text}


def _whole_block(part: Part) -> dict[str, Any]:
    if part.kind == "tool_call":
        return _empty_block(part) | {"input": _arguments(part.text)}
    return _empty_block(part) | {"text" if part.kind == "text" else "thinking": part.text}


def _arguments(text: str) -> dict[str, Any]:
    """The object that a call's arguments are; one that max_tokens cut is not readable and shows nothing."""
    try:
        arguments = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


# ---- errors and routes ----------------------------------------------------------------------------------------------


def error_body(error: KitfoxError) -> dict[str, Any]:
    """The protocol's shape of an error."""
    message = error.message.encode("utf-8", "replace").decode("utf-8")
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    record = current_request.get()
    request_id = None if record is None else record.request_id
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def add_routes(
    app: FastAPI,
    generator: Generator,
    max_body_bytes: int,
    respond: Respond,
) -> None:
    """POST /v1/messages and /v1/messages/count_tokens."""
    service = OpenAIService(generator)

    def json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
        return Response(msgspec.json.encode(body), status, headers, media_type="application/json")

    async def answered(request: Request, work: Callable[[Request], Awaitable[Response]]) -> Response:
        try:
            return await work(request)
        except KitfoxError as error:
            status = OVERLOADED if error.status == 429 else error.status
            return json(error_body(error), status, error_headers(error))

    async def create(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), MessagesRequest)
        if fields.max_tokens is None:
            raise RequestError("max_tokens is required", param="max_tokens")
        chat = make_chat(fields)
        if chat.thinking_token_budget is not None and generator.dialect.reasoning_marks is None:
            # Agents send a budget to every model. One that does not reason needs none.
            chat.thinking_token_budget, unread = None, [BUDGET_PARAM]
            if generator.strict:
                refuse_ignored(unread)
            ignored = ignored + unread
        reply = await service.chat(
            chat,
            ignored,
            request.scope["client_request_id"],
            id_prefix="msg_",
            format_param=_output_format(fields)[0],
            budget_param=BUDGET_PARAM,
        )
        return await respond(request, MessageReply(reply), stream=fields.stream)

    async def count(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), MessagesRequest)
        required_model(generator.llm, fields.model, fields.lora_path)
        token_ids = await encode_messages(generator, make_chat(fields))
        body: dict[str, Any] = {"input_tokens": len(token_ids)}
        return json(with_ignored(body, ignored))

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        return await answered(request, create)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        return await answered(request, count)
