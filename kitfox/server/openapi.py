"""GET /openapi.json and the page GET /docs: made of the very structs that requests are converted to.

`OPERATIONS` has a row for every route; a test holds it against the routes of the app. The structs here are what answers
look like; tests convert real answers to them.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec
from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

from kitfox.server.adapters import LoadAdapterRequest, UnloadAdapterRequest
from kitfox.server.anthropic import MessagesRequest
from kitfox.server.batches import BatchRequest
from kitfox.server.chat_batch import ChatBatchRequest
from kitfox.server.control import (
    AbortRequest,
    FlushRequest,
    LoadsRequest,
    PauseRequest,
    ProfileRequest,
    SleepRequest,
    WakeRequest,
)
from kitfox.server.embeddings import EmbeddingRequest, LabelScoreRequest, RerankRequest, ScoreRequest
from kitfox.server.logs import LoggingRequest
from kitfox.server.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kitfox.server.parsing import ParseFunctionCallRequest, SeparateReasoningRequest
from kitfox.server.responses import ResponsesRequest
from kitfox.server.sessions import CloseSessionRequest, OpenSessionRequest
from kitfox.server.settings import SlowDownRequest, StateRequest, TraceLevelRequest
from kitfox.server.sglang import GenerateRequest, JoinRequest

# ---- what answers look like -----------------------------------------------------------------------------------------


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Every answer with a status of 400 or more."""

    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct):
    type: str
    message: str


class MessagesErrorBody(msgspec.Struct):
    """The same in Anthropic's protocol."""

    type: Literal["error"]
    error: MessagesErrorDetail


class ServerState(msgspec.Struct):
    status: Literal["ok", "starting", "stalled", "paused", "asleep", "draining", "dead"]
    detail: str
    uptime_s: float


class VersionAnswer(msgspec.Struct):
    version: str


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class AdaptersAnswer(msgspec.Struct):
    """`loaded_adapters` is the directory of each, by its name."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]
    ignored_parameters: list[str] = []


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, Any]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class CompletionAnswer(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None
    timings: dict[str, Any] | None = None
    ignored_parameters: list[str] = []


class AnswerMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class ChatAnswer(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody | None = None
    timings: dict[str, Any] | None = None
    ignored_parameters: list[str] = []


class TokensAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TextAnswer(msgspec.Struct):
    prompt: str


class TraceEventBody(msgspec.Struct):
    time_s: float
    name: str
    request_id: str
    data: dict[str, Any]


class TraceAnswer(msgspec.Struct):
    id: str
    object: Literal["trace"]
    events: list[TraceEventBody]


class LoggingState(msgspec.Struct):
    level: str
    log_requests: bool


# ---- the table ------------------------------------------------------------------------------------------------------

EVENTS = "text/event-stream"
IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
TEXT_OR_IDS = {"oneOf": [{"type": "string"}, TEXTS, IDS, {"type": "array", "items": IDS, "minItems": 1}]}
ANY_SHAPE_MEMBERS = {  # what a struct can only call Any
    ("CompletionRequest", "prompt"): TEXT_OR_IDS,
    ("EmbeddingRequest", "input"): TEXT_OR_IDS,
}
UPLOAD = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
            "required": ["file", "purpose"],
        }
    }
}
PAGING = (
    ("limit", "how many to list"),
    ("order", "asc or desc, by age; desc is the default"),
    ("after", "the id behind which to start"),
)


@dataclass(frozen=True)
class Operation:
    """One handler: "METHOD[,METHOD] PATH PATH ...".

    Attributes:
        body: struct of the JSON body, or several of which one; a dict is the `content` of a body that is not JSON.
        arguments: struct of what comes in the query, or in a JSON body that may be missing.
        answer: struct of the JSON answer; a text is the media type of one that is not JSON.
        also: the media type that the answer has where it is asked for in another form.
        more_statuses: beside 200, with the same answer.
        query: names of query parameters and what they are for.
        error: what an answer with a status of 400 or more looks like.
    """

    route: str
    summary: str
    body: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | dict[str, Any] = ()
    answer: type[msgspec.Struct] | str | None = None
    arguments: type[msgspec.Struct] | None = None
    also: str = ""
    more_statuses: tuple[int, ...] = ()
    query: tuple[tuple[str, str], ...] = ()
    error: type[msgspec.Struct] = ErrorBody

    @property
    def methods(self) -> list[str]:
        return self.route.split()[0].split(",")

    @property
    def paths(self) -> list[str]:
        return self.route.split()[1:]

    @property
    def bodies(self) -> tuple[type[msgspec.Struct], ...]:
        """The structs of the JSON body."""
        if isinstance(self.body, dict):
            return ()
        return self.body if isinstance(self.body, tuple) else (self.body,)


OPERATIONS: tuple[Operation, ...] = (
    Operation("POST /v1/completions", "Continue a prompt", CompletionRequest, CompletionAnswer, also=EVENTS),
    Operation("POST /v1/chat/completions", "Answer messages", ChatRequest, ChatAnswer, also=EVENTS),
    Operation("POST /v1/chat/completions/batch", "Answer several conversations", ChatBatchRequest, ChatAnswer),
    Operation("POST /v1/messages", "Answer messages, in Anthropic's protocol", MessagesRequest, also=EVENTS,
              error=MessagesErrorBody),
    Operation("POST /v1/messages/count_tokens", "Tokens of such a request", MessagesRequest, error=MessagesErrorBody),
    Operation("POST /v1/responses", "Answer items, and keep the answer", ResponsesRequest, also=EVENTS),
    Operation("GET /v1/responses/{response_id}", "A kept answer", query=(("stream", "only false"),)),
    Operation("DELETE /v1/responses/{response_id}", "Forget it"),
    Operation("POST /v1/responses/{response_id}/cancel", "End one that is made in the background"),
    Operation("GET /v1/responses/{response_id}/input_items", "What it was an answer to", query=PAGING),
    Operation("POST,PUT /generate", "Continue a prompt, in SGLang's protocol", GenerateRequest, also=EVENTS),
    Operation("POST /open_session", "Begin a session of /generate, in SGLang's protocol", OpenSessionRequest),
    Operation("POST /close_session", "Forget it", CloseSessionRequest),
    Operation("POST /concate_and_append_request", "What SGLang's frontend calls when forks join", JoinRequest),
    Operation("POST /v1/embeddings", "One vector a text", EmbeddingRequest),
    Operation("POST /score /v1/score", "How well texts fit", (ScoreRequest, LabelScoreRequest)),
    Operation("POST /rerank /v1/rerank /v2/rerank", "Order documents by how well they fit", RerankRequest),
    Operation("POST /v1/files", "Upload a file", UPLOAD),
    Operation("GET /v1/files", "Files", query=(("purpose", "only those of one"), *PAGING)),
    Operation("GET /v1/files/{file_id}", "What is known of a file"),
    Operation("DELETE /v1/files/{file_id}", "Delete it"),
    Operation("GET /v1/files/{file_id}/content", "What is in it", answer="application/octet-stream"),
    Operation("POST /v1/batches", "Run a file of requests beside live traffic", BatchRequest),
    Operation("GET /v1/batches", "Batches", query=PAGING),
    Operation("GET /v1/batches/{batch_id}", "How far one is"),
    Operation("POST /v1/batches/{batch_id}/cancel", "End it"),
    Operation("POST /tokenize /v1/tokenize", "Text or messages to token ids", TokenizeRequest, TokensAnswer),
    Operation("POST /detokenize /v1/detokenize", "Token ids to text", DetokenizeRequest, TextAnswer),
    Operation("GET /tokenizer_info", "Special tokens and the chat template"),
    Operation("POST /parse_function_call", "Tool calls in a text", ParseFunctionCallRequest),
    Operation("POST /separate_reasoning", "Reasoning and answer in a text", SeparateReasoningRequest),
    Operation("GET /v1/models", "Served models and LoRA adapters", answer=ModelList),
    Operation("GET /v1/models/{name}", "One of them", answer=ModelCard),
    Operation("POST /v1/load_lora_adapter", "Load a LoRA adapter", LoadAdapterRequest, "text/plain"),
    Operation("POST /load_lora_adapter", "The same, in SGLang's protocol", LoadAdapterRequest, AdaptersAnswer),
    Operation("POST /v1/unload_lora_adapter", "Forget one", UnloadAdapterRequest, "text/plain"),
    Operation("POST /unload_lora_adapter", "The same, in SGLang's protocol", UnloadAdapterRequest, AdaptersAnswer),
    Operation("GET /model_info /get_model_info", "What is served, as SGLang's clients ask"),
    Operation("GET /health", "Whether the server is worth keeping", answer=ServerState, more_statuses=(503,)),
    Operation("GET /ready", "Whether to send it requests", answer=ServerState, more_statuses=(503,)),
    Operation("GET /health_generate", "Whether the engine makes tokens", more_statuses=(503,)),
    Operation("GET /version", "kitfox's version", answer=VersionAnswer),
    Operation("GET /server_info /get_server_info", "What is served and how, as resolved"),
    Operation("GET /metrics", "Prometheus text", answer="text/plain"),
    Operation("GET /load", "How many requests the server has"),
    Operation("GET /v1/loads", "What a load balancer weighs servers by", arguments=LoadsRequest, also="text/plain"),
    Operation("GET /v1/trace/{answer_id}", "What happened to a request", answer=TraceAnswer),
    Operation("GET,POST /flush_cache /reset_prefix_cache", "Forget cached prefixes", arguments=FlushRequest),
    Operation("POST /abort_request /abort_requests", "End requests", arguments=AbortRequest),
    Operation("POST /pause /pause_generation", "Compute nothing until resumed", arguments=PauseRequest),
    Operation("POST /resume /continue_generation", "Go on"),
    Operation("GET /is_paused", "Whether it is paused"),
    Operation("POST /sleep /release_kv_cache_memory", "Give the KV cache's memory back", arguments=SleepRequest),
    Operation("GET,POST /release_memory_occupation", "The same, under SGLang's name", arguments=SleepRequest),
    Operation("POST /wake_up", "Have a KV cache again", arguments=WakeRequest),
    Operation("GET,POST /resume_memory_occupation", "The same, under SGLang's name", arguments=WakeRequest),
    Operation("GET /is_sleeping", "Whether it sleeps"),
    Operation("GET,POST /start_profile", "Record steps and requests", arguments=ProfileRequest),
    Operation("GET,POST /stop_profile", "Write what was recorded"),
    Operation("GET /configure_logging", "The log level, and whether requests are logged", answer=LoggingState),
    Operation("POST /configure_logging", "Change them", LoggingRequest, LoggingState),
    Operation("GET,POST /set_trace_level", "Whether spans are sent", arguments=TraceLevelRequest),
    Operation("POST /set_internal_state", "Change how much a step takes in", StateRequest),
    Operation("POST /slow_down", "Sleep after each step", arguments=SlowDownRequest),
    Operation("GET,POST /freeze_gc", "Collect no object that is there now"),
    Operation("GET /openapi.json", "This description"),
    Operation("GET /docs", "The same for people", answer="text/html"),
)  # fmt: skip

# ---- the document ---------------------------------------------------------------------------------------------------


def make_document(
    version: str,
    *,
    models: Sequence[str],
    takes_adapters: bool = False,
    needs_key: bool = False,
    root_path: str = "",
) -> dict[str, Any]:
    """The OpenAPI 3.1 description of everything in `OPERATIONS`.

    Args:
        models: the served names, which are all that a request may name.
        takes_adapters: it may name adapters too, and those come and go.
    """
    structs: dict[type[msgspec.Struct], None] = {}
    for operation in OPERATIONS:
        in_body = operation.arguments if operation.methods != ["GET"] else None
        kinds = (*operation.bodies, in_body, operation.answer, operation.error)
        structs |= {kind: None for kind in kinds if isinstance(kind, type)}
    references, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    for (kind, name), schema in ANY_SHAPE_MEMBERS.items():
        schemas[kind]["properties"][name] |= schema
    for body in {body.__name__ for operation in OPERATIONS for body in operation.bodies}:
        if "model" in schemas[body]["properties"]:
            named = {"type": "string", "examples": [*models]} if takes_adapters else {"enum": [*models]}
            schemas[body]["properties"]["model"] = named
    by_struct = dict(zip(structs, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        for path in operation.paths:
            for method in operation.methods:
                described = _describe(operation, method, path, by_struct)
                paths.setdefault(path, {})[method.lower()] = described
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}} | {
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"}
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "kitfox", "version": version},
        "servers": [{"url": root_path or "/"}],
        "security": [{name: []} for name in schemes] if needs_key else [],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": schemes},
    }


def _describe(
    operation: Operation, method: str, path: str, by_struct: dict[type[msgspec.Struct], Any]
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{method.lower()}{re.sub('[^A-Za-z0-9]+', '_', path)}".rstrip("_"),
    }
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    in_query = [
        {"name": name, "in": "query", "description": what, "schema": {"type": "string"}}
        for name, what in operation.query
    ]
    if operation.arguments is not None and method == "GET":
        members = _members_of(operation.arguments)
        in_query += [{"name": name, "in": "query", "schema": schema} for name, schema in members.items()]
    if in_path or in_query:
        described["parameters"] = in_path + in_query
    if isinstance(operation.body, dict):
        described["requestBody"] = {"required": True, "content": operation.body}
    elif operation.bodies:
        choices = [by_struct[kind] for kind in operation.bodies]
        schema = choices[0] if len(choices) == 1 else {"anyOf": choices}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    elif operation.arguments is not None and method != "GET":
        content = {"application/json": {"schema": by_struct[operation.arguments]}}
        described["requestBody"] = {"required": False, "content": content}
    if isinstance(operation.answer, str):
        content = {operation.answer: {"schema": {"type": "string"}}}
    else:
        schema = {"type": "object"} if operation.answer is None else by_struct[operation.answer]
        content = {"application/json": {"schema": schema}}
    if operation.also:
        content[operation.also] = {"schema": {"type": "string"}}
    error = {"description": "an error", "content": {"application/json": {"schema": by_struct[operation.error]}}}
    described["responses"] = {
        **{
            str(status): {"description": "the answer", "content": content} for status in (200, *operation.more_statuses)
        },
        "4XX": error,
        "5XX": error,
    }
    if path in ("/health", "/ready"):
        described["security"] = []
    return described


def _members_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components((kind,))
    return dict(schemas[kind.__name__]["properties"])


# ---- the page -------------------------------------------------------------------------------------------------------


def render_page(document: dict[str, Any]) -> str:
    """HTML without scripts: nothing is loaded from anywhere."""
    schemas = document["components"]["schemas"]
    sections = [
        _render_operation(method.upper(), path, operation, schemas)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>kitfox API</title><style>'
        "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "summary{cursor:pointer}code,pre{font-family:monospace}td{padding:0 1em 0 0;vertical-align:top}"
        f"</style><h1>kitfox {html.escape(document['info']['version'])}</h1>"
        '<p>The same for machines: <a href="openapi.json">openapi.json</a></p>' + "".join(sections) + "</html>"
    )


def _render_operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    rows = [
        (parameter["name"], f"in the {parameter['in']}", parameter.get("description", ""))
        for parameter in operation.get("parameters", [])
    ]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        rows += _rows_of(content["schema"], schemas)
    table = "".join(f"<tr>{''.join(f'<td><code>{html.escape(cell)}</code></td>' for cell in row)}</tr>" for row in rows)
    summary = f"<code>{method} {html.escape(path)}</code> {html.escape(operation['summary'])}"
    return f"<details><summary>{summary}</summary><table>{table}</table></details>"


def _rows_of(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterable[tuple[str, str, str]]:
    """(name, type, default) of the members of a body."""
    for choice in schema.get("anyOf", ()):
        yield from _rows_of(choice, schemas)
    schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    for name, member in schema.get("properties", {}).items():
        required = name in schema.get("required", ())
        yield name, _type_text(member), "required" if required else json.dumps(member.get("default"))


def _type_text(member: dict[str, Any]) -> str:
    if "$ref" in member:
        return str(member["$ref"].rpartition("/")[2])
    choices = member.get("anyOf", member.get("oneOf"))
    if choices is not None:
        return " or ".join(dict.fromkeys(_type_text(choice) for choice in choices))
    if "enum" in member:
        return " or ".join(json.dumps(value) for value in member["enum"])
    if member.get("type") == "array" and "items" in member:
        return f"list of {_type_text(member['items'])}"
    return str(member.get("type", "anything"))


def add_openapi_routes(
    app: FastAPI, models: Sequence[str], *, takes_adapters: bool, needs_key: bool, root_path: str
) -> None:
    @cache
    def document() -> dict[str, Any]:
        return make_document(
            app.version, models=models, takes_adapters=takes_adapters, needs_key=needs_key, root_path=root_path
        )

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(msgspec.json.encode(document()), media_type="application/json")

    @app.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(render_page(document()))
