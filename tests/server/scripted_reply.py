"""A chat's answer from a script, for protocols that render one; and random scripts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from kitfox.outputs import RequestTimings
from kitfox.request import SamplingParams
from kitfox.server.generation import Usage
from kitfox.server.openai import Piece
from kitfox.server.parsers import ToolCallDelta


class ScriptedReply:
    """Yields its pieces. A piece that is an exception is raised."""

    def __init__(self, pieces: list[Piece | Exception], *, answer_id: str, cached_tokens: int = 0):
        self.job: Any = SimpleNamespace(
            answer_id=answer_id, created=1_700_000_000, model="fox", ignored_parameters=[], sampling=SamplingParams()
        )
        self.usage = Usage(prompt_tokens=10, completion_tokens=7, cached_tokens={0: cached_tokens})
        self.timings = RequestTimings(queue_s=0.1, prefill_s=0.2, decode_s=0.3, ttft_s=0.3)
        self.closed = False
        self._pieces = pieces

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def close(self) -> None:
        self.closed = True


def call_pieces(index: int, name: str, *arguments: str) -> list[Piece]:
    """A tool call that comes in so many pieces, after one with its name."""
    head = Piece(0, tool_calls=[ToolCallDelta(index, f"call_{index}", name)])
    return [head, *(Piece(0, tool_calls=[ToolCallDelta(index, arguments=part)]) for part in arguments)]


def thoughtful_pieces() -> list[Piece | Exception]:
    """Thinks, speaks, and calls two tools."""
    return [
        Piece(0, reasoning="Let me "),
        Piece(0, reasoning="see.", text="I'll "),
        Piece(0, text="look."),
        *call_pieces(0, "weather", '{"city": ', '"Bonn"}'),
        *call_pieces(1, "time", "{}"),
        Piece(0, finish_reason="tool_calls"),
    ]


@st.composite
def scripts(draw: st.DrawFn) -> list[Piece | Exception]:
    """Answers of any number of parts, cut anywhere, with pieces that hold several kinds at once."""
    short = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=4)
    pieces: list[Piece | Exception] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "text", "call", "both"]), max_size=6)):
        if kind == "call":
            pieces += call_pieces(num_calls, f"tool_{num_calls}", *draw(st.sampled_from([("{}",), ('{"a":', "1}")])))
            num_calls += 1
        elif kind == "both":
            pieces.append(Piece(0, reasoning=draw(short), text=draw(short)))
        else:
            pieces.append(Piece(0, **{kind: draw(short)}))
    pieces.append(Piece(0, text=draw(short), finish_reason=draw(st.sampled_from(["stop", "length"]))))
    return pieces
