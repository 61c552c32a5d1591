"""What protocols share that are translated to a chat: parameters on the way in, parts of the answer on the way out.

A chat has one text, one reasoning and a list of calls; these protocols show an answer as parts one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kitfox.errors import AbortedError, UnsupportedParameterError
from kitfox.server.openai import GenerationFields, Piece

NOTHING_ASKED = GenerationFields()
# They shape what only OpenAI's older endpoints show.
FOREIGN_PARAMETERS = (
    "n", "prompt_logprobs", "repetition_detection", "return_prompt_text", "return_prompt_token_ids", "return_token_ids",
    "return_tokens_as_token_ids",
)  # fmt: skip


def generation_fields(fields: GenerationFields, *, foreign: tuple[str, ...]) -> dict[str, Any]:
    """The parameters that a chat has under the same names, to make a `ChatRequest` with.

    Args:
        foreign: those that mean nothing in the protocol, beside FOREIGN_PARAMETERS.

    Raises:
        UnsupportedParameterError: a foreign one asks for something.
    """
    for name in (*FOREIGN_PARAMETERS, *foreign):
        if getattr(fields, name) != getattr(NOTHING_ASKED, name):
            raise UnsupportedParameterError(name, "is not a parameter of this endpoint")
    return {name: getattr(fields, name) for name in GenerationFields.__struct_fields__}


# ---- parts of an answer ---------------------------------------------------------------------------------------------


@dataclass
class Part:
    """Reasoning, text or one tool call. `text` is what it has so far; of a call, the text of its arguments."""

    kind: Literal["reasoning", "text", "tool_call"]
    index: int
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    call_index: int | None = None


@dataclass(frozen=True)
class PartStart:
    part: Part


@dataclass(frozen=True)
class PartDelta:
    part: Part
    text: str
    logprobs: list[dict[str, Any]]


@dataclass(frozen=True)
class PartEnd:
    part: Part


PartChange = PartStart | PartDelta | PartEnd


class PartReader:
    """Cuts one answer's pieces into parts. A part ends where another begins, or with the answer."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.has_calls = False
        self._current: Part | None = None
        self._num_parts = 0

    def read(self, piece: Piece) -> Iterator[PartChange]:
        """What a piece changes.

        Raises:
            AbortedError: somebody else than the client ended the answer.
        """
        if piece.finish_reason == "abort":
            raise AbortedError("the request was aborted on the server")
        logprobs = [] if piece.logprobs is None else piece.logprobs["content"]
        if piece.reasoning:
            yield from self._grow("reasoning", piece.reasoning)
        # Tokens whose text is held back belong to the text that comes.
        if piece.text or (logprobs and not piece.reasoning and not piece.tool_calls):
            yield from self._grow("text", piece.text, logprobs)
        for call in piece.tool_calls:
            if self._current is None or self._current.call_index != call.index:
                assert call.id is not None, "a call goes on although another part has begun"
                self.has_calls = True
                yield from self._start(Part("tool_call", self._num_parts, "", [], call.id, call.name or "", call.index))
            if call.arguments:
                yield from self._grow("tool_call", call.arguments)
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
            yield from self._end()

    def _grow(
        self, kind: Literal["reasoning", "text", "tool_call"], text: str, logprobs: list[dict[str, Any]] | None = None
    ) -> Iterator[PartChange]:
        if self._current is None or self._current.kind != kind:
            yield from self._start(Part(kind, self._num_parts))
        assert self._current is not None
        self._current.text += text
        self._current.logprobs += logprobs or []
        yield PartDelta(self._current, text, logprobs or [])

    def _start(self, part: Part) -> Iterator[PartChange]:
        yield from self._end()
        self._current = part
        self._num_parts += 1
        yield PartStart(part)

    def _end(self) -> Iterator[PartChange]:
        if self._current is not None:
            yield PartEnd(self._current)
        self._current = None


def server_sent_event(name: str, data: dict[str, Any]) -> bytes:
    """An event with a name, as both Anthropic and OpenAI's responses have them."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
