"""SGLang's endpoints that parse a finished text: the same parsers as for answers, on a text of the client's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from kitfox.errors import InvalidParameterError, UnsupportedParameterError
from kitfox.server.conversation import ChatDialect, Tool, check_tools
from kitfox.server.generation import Generator
from kitfox.server.parsers import (
    REASONING_MARKS,
    REASONING_PARSER_ALIASES,
    TOOL_CALL_PARSER_ALIASES,
    TOOL_CALL_PARSERS,
    AnswerParser,
    ReasoningParser,
    join_calls,
)
from kitfox.server.validation import convert_body, read_json_object, with_ignored

T = TypeVar("T")


class ParseFunctionCallRequest(msgspec.Struct, kw_only=True):
    """POST /parse_function_call. `tool_call_parser` is the server's own unless named."""

    text: str
    tools: list[Tool] = []
    tool_call_parser: str | None = None


class SeparateReasoningRequest(msgspec.Struct, kw_only=True):
    """POST /separate_reasoning. `reasoning_parser` is the server's own unless named."""

    text: str
    reasoning_parser: str | None = None


def parse_function_call(fields: ParseFunctionCallRequest, dialect: ChatDialect) -> dict[str, Any]:
    """The answer of /parse_function_call; raises InvalidParameterError for an unknown parser or a bad tool."""
    check_tools(fields.tools)
    named = fields.tool_call_parser
    parser = _chosen("tool_call_parser", named, dialect.tool_parser, TOOL_CALL_PARSERS, TOOL_CALL_PARSER_ALIASES)
    schemas = {tool.function.name: tool.function.parameters or {} for tool in fields.tools}
    names = list(schemas)
    part = AnswerParser(None, parser(schemas)).feed(fields.text, is_last=True)
    calls = [
        {"tool_index": names.index(c.name) if c.name in names else -1, "name": c.name, "parameters": c.arguments}
        for c in join_calls(part.tool_calls)
    ]
    return {"normal_text": part.content, "calls": calls}


def separate_reasoning(fields: SeparateReasoningRequest, dialect: ChatDialect) -> dict[str, Any]:
    """The answer of /separate_reasoning; raises InvalidParameterError for an unknown parser.

    A text that only closes its reasoning began inside: its prompt had opened it.
    """
    named = fields.reasoning_parser
    opener, closer = _chosen(
        "reasoning_parser", named, dialect.reasoning_marks, REASONING_MARKS, REASONING_PARSER_ALIASES
    )
    starts_inside = closer in fields.text and opener not in fields.text.partition(closer)[0]
    parser = AnswerParser(ReasoningParser(opener, closer, starts_inside=starts_inside), None)
    part = parser.feed(fields.text, is_last=True)
    return {"reasoning_text": part.reasoning, "text": part.content}


def _chosen(param: str, named: str | None, own: T | None, known: Mapping[str, T], aliases: Mapping[str, str]) -> T:
    """The parser that a request names, or the server's own."""
    chosen = own
    if named is not None:
        name = aliases.get(named, named)
        chosen = known.get(name)
        if chosen is None:
            raise InvalidParameterError(param, f"must be one of {', '.join(known)}", name)
    if chosen is None:
        raise UnsupportedParameterError(param, "must be given: this server runs without one")
    return chosen


def add_parsing_routes(app: FastAPI, generator: Generator, max_body_bytes: int) -> None:
    from kitfox.server.app import json_response

    @app.post("/parse_function_call")
    async def parse_calls(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), ParseFunctionCallRequest)
        return json_response(with_ignored(parse_function_call(fields, generator.dialect), ignored))

    @app.post("/separate_reasoning")
    async def separate(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), SeparateReasoningRequest)
        return json_response(with_ignored(separate_reasoning(fields, generator.dialect), ignored))
