"""vLLM's POST /v1/chat/completions/batch: several conversations, answered as one chat with the choices of all."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from kitfox.errors import InvalidParameterError, UnsupportedParameterError
from kitfox.server.conversation import ChatMessage
from kitfox.server.generation import MAX_ANSWERS, MAX_PROMPTS, Usage
from kitfox.server.openai import ChatFields, ChatRequest, OpenAIService, Reply

PROMPT_FIELDS = ("prompt_token_ids", "prompt_text", "prompt_logprobs")  # of a whole chat; here each choice has its own


class ChatBatchRequest(ChatFields, kw_only=True):
    """POST /v1/chat/completions/batch. All conversations share the other parameters."""

    messages: list[list[ChatMessage]]


class ChatBatch:
    """The open chats of one request."""

    def __init__(self, replies: list[Reply]):
        self._replies = replies

    async def whole(self) -> dict[str, Any]:
        """One chat's answer with the choices of all, in the order of the conversations.

        Raises:
            KitfoxError: the engine failed on one of them.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(reply.whole()) for reply in self._replies]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        bodies = [task.result() for task in tasks]
        choices: list[dict[str, Any]] = []
        for body in bodies:
            of_prompt = {name: body[name] for name in PROMPT_FIELDS if body.get(name) is not None}
            start = len(choices)
            choices += [choice | of_prompt | {"index": start + choice["index"]} for choice in body["choices"]]
        # The time of the whole is that of the conversation that was answered last.
        ended = [reply.timings for reply in self._replies if reply.timings is not None]
        slowest = max(ended, key=lambda timings: (timings.ttft_s or 0.0) + timings.decode_s, default=None)
        timings = {} if slowest is None else {"timings": msgspec.structs.asdict(slowest)}
        shared = {name: value for name, value in bodies[0].items() if name not in (*PROMPT_FIELDS, "timings")}
        return shared | {"choices": choices, "usage": self._usage().as_dict()} | timings

    def _usage(self) -> Usage:
        usages = [reply.usage for reply in self._replies]
        reasoning = [usage.reasoning_tokens for usage in usages if usage.reasoning_tokens is not None]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens={index: sum(usage.cached_tokens.values()) for index, usage in enumerate(usages)},
            reasoning_tokens=sum(reasoning) if reasoning else None,
        )

    def close(self) -> None:
        """Abort what still runs."""
        for reply in self._replies:
            reply.close()


async def open_chats(
    service: OpenAIService, fields: ChatBatchRequest, ignored: list[str], client_id: str | None
) -> ChatBatch:
    """Start all conversations, or none.

    Raises:
        KitfoxError: one was refused.
    """
    conversations = fields.messages
    if not 1 <= len(conversations) <= MAX_PROMPTS:
        raise InvalidParameterError("messages", f"must be 1 to {MAX_PROMPTS} conversations", len(conversations))
    if len(conversations) * fields.n > MAX_ANSWERS:
        limit = f"times the number of conversations ({len(conversations)}) must be at most {MAX_ANSWERS}"
        raise InvalidParameterError("n", limit, fields.n)
    if fields.stream:
        raise UnsupportedParameterError("stream", "is not supported for several conversations")
    shared = {name: getattr(fields, name) for name in ChatFields.__struct_fields__}
    replies: list[Reply] = []
    try:
        for messages in conversations:
            replies.append(await service.chat(ChatRequest(messages=messages, **shared), ignored, client_id))
    except BaseException:
        ChatBatch(replies).close()
        raise
    return ChatBatch(replies)
