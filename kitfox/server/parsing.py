"""SGLang's endpoints that parse a finished text: the same parsers as for answers, on a text of the client's."""

from __future__ import annotations

from typing import Any

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
from kitfox.server.validation import convert_body, read_json_object


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
    parser = dialect.tool_parser
    if fields.tool_call_parser is not None:
        name = TOOL_CALL_PARSER_ALIASES.get(fields.tool_call_parser, fields.tool_call_parser)
        parser = TOOL_CALL_PARSERS.get(name)
        if parser is None:
            raise InvalidParameterError("tool_call_parser", f"must be one of {', '.join(TOOL_CALL_PARSERS)}", name)
    if parser is None:
        raise UnsupportedParameterError("tool_call_parser", "must be given: this server runs without one")
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
    marks = dialect.reasoning_marks
    if fields.reasoning_parser is not None:
        name = REASONING_PARSER_ALIASES.get(fields.reasoning_parser, fields.reasoning_parser)
        marks = REASONING_MARKS.get(name)
        if marks is None:
            raise InvalidParameterError("reasoning_parser", f"must be one of {', '.join(REASONING_MARKS)}", name)
    if marks is None:
        raise UnsupportedParameterError("reasoning_parser", "must be given: this server runs without one")
    opener, closer = marks
    starts_inside = closer in fields.text and opener not in fields.text.partition(closer)[0]
    parser = AnswerParser(ReasoningParser(opener, closer, starts_inside=starts_inside), None)
    part = parser.feed(fields.text, is_last=True)
    return {"reasoning_text": part.reasoning, "text": part.content}


def add_parsing_routes(app: FastAPI, generator: Generator, max_body_bytes: int) -> None:
    from kitfox.server.app import json_response

    @app.post("/parse_function_call")
    async def parse_calls(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), ParseFunctionCallRequest)
        body = parse_function_call(fields, generator.dialect)
        return json_response(body | {"ignored_parameters": ignored} if ignored else body)

    @app.post("/separate_reasoning")
    async def separate(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), SeparateReasoningRequest)
        body = separate_reasoning(fields, generator.dialect)
        return json_response(body | {"ignored_parameters": ignored} if ignored else body)
