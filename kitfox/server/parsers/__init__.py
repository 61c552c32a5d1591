"""What models write beside plain text: reasoning and tool calls, found as the text comes.

A model's chat template says which dialect it speaks; a name given to the server overrides that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kitfox.server.parsers.dialects import (
    DeepSeekParser,
    GemmaParser,
    GenericJsonParser,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    PythonicParser,
    QwenXmlParser,
)
from kitfox.server.parsers.reading import ToolCallDelta, ToolCallParser, join_calls
from kitfox.server.parsers.reasoning import ReasoningParser

__all__ = [
    "REASONING_MARKS",
    "REASONING_PARSER_ALIASES",
    "TOOL_CALL_PARSERS",
    "TOOL_CALL_PARSER_ALIASES",
    "AnswerParser",
    "AnswerPart",
    "MistralParser",
    "ReasoningParser",
    "ToolCallDelta",
    "ToolCallParser",
    "detect_reasoning_marks",
    "detect_tool_call_parser",
    "join_calls",
]

TOOL_CALL_PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": QwenXmlParser,
    "llama3_json": Llama3JsonParser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
    "gemma": GemmaParser,
    "deepseek": DeepSeekParser,
    "json": GenericJsonParser,
}
REASONING_MARKS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}

# The peers' names for the same.
TOOL_CALL_PARSER_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4": "pythonic",
    "llama4_pythonic": "pythonic",
    "functiongemma": "gemma",
    "gemma4": "gemma",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "deepseekv3": "deepseek",
    "deepseekv31": "deepseek",
}
REASONING_PARSER_ALIASES = {
    "deepseek_r1": "think",
    "deepseek-r1": "think",
    "deepseek_v3": "think",
    "deepseek-v3": "think",
    "glm45": "think",
    "qwen3": "think",
    "qwen3-thinking": "think",
}

# Texts in chat templates that give a dialect away, the surest first.
_DIALECT_SIGNS = (
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<｜tool▁calls?▁begin｜>", "deepseek"),
    (r"<start_function_call>|<\|tool_call>", "gemma"),
    (r"<function=", "qwen3_coder"),
    (r"<\|python_start\|>|<\|tool_(call|list)_start\|>|\[func_name1\(", "pythonic"),
    (r'<\|python_tag\|>|\{"name": function name, "parameters"', "llama3_json"),
    (r"<arg_key>", "json"),
    (r"<tool_call>", "hermes"),
)


def detect_tool_call_parser(chat_template: str) -> str:
    """Name of the dialect in which a model calls tools; "json" when its template shows none that we know."""
    return next((name for sign, name in _DIALECT_SIGNS if re.search(sign, chat_template)), "json")


def detect_reasoning_marks(chat_template: str) -> str | None:
    """Name of the marks around a model's reasoning, if its template knows any."""
    return next((name for name, (_, closer) in REASONING_MARKS.items() if closer in chat_template), None)


@dataclass(slots=True)
class AnswerPart:
    """What a piece of an answer's text turned out to be."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class AnswerParser:
    """Reasoning first, then content and calls. Either parser may be missing."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None):
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_inside

    def count_reasoning_tokens(self, token_ids: list[int]) -> int:
        """How many of the tokens just fed are reasoning, if any is."""
        return 0 if self._reasoning is None else self._reasoning.count_tokens(token_ids)

    @property
    def num_complete_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_complete

    @property
    def is_done(self) -> bool:
        """No more of the answer is wanted."""
        return self._tools is not None and self._tools.is_done

    def feed(self, text: str, *, is_last: bool = False) -> AnswerPart:
        """Take the next text; returns what became certain, and with `is_last` the rest."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text)
            if is_last:
                more, rest = self._reasoning.finish()
                reasoning, text = reasoning + more, text + rest
        if self._tools is None:
            return AnswerPart(text, reasoning)
        parsed = self._tools.feed(text)
        content, calls = parsed.content, parsed.calls
        if is_last:
            parsed = self._tools.finish()
            content, calls = content + parsed.content, calls + parsed.calls
        return AnswerPart(content, reasoning, calls)
