"""Conversations as clients send them: messages and tools, checked, and their way through the model's chat template."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from kitfox.constraint import Alternatives, AnyText, Constraint, Reasoning
from kitfox.errors import ConfigError, InvalidParameterError, RequestError, UnsupportedParameterError
from kitfox.request import ImageTile
from kitfox.server.generation import ENCODE_IN_THREAD_CHARS
from kitfox.server.images import ImageReader, ImageSource
from kitfox.server.parsers import (
    REASONING_MARKS,
    TOOL_CALL_PARSERS,
    AnswerParser,
    MistralParser,
    ReasoningParser,
    ToolCallParser,
    detect_reasoning_marks,
    detect_tool_call_parser,
)
from kitfox.server.templates import CallArguments, TemplateRenderer
from kitfox.server.validation import decode_json
from kitfox.structured_output.schema import TYPE_NAMES

if TYPE_CHECKING:
    from kitfox.tokenizer import Tokenizer

MAX_TOOLS = 128
MAX_THINKING_TOKENS = 2**31 - 1
RESERVED_TEMPLATE_KWARGS = {
    "add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "conversation", "documents",
    "eos_token", "messages", "render", "return_dict", "return_tensors", "self", "template", "tokenize", "tools",
}  # fmt: skip
ReasoningState = Literal["none", "ahead", "open", "over"]
_LAST_TOKENS = 16  # of a prompt: enough to hold the mark that opens or closes reasoning


# ---- what clients send ----------------------------------------------------------------------------------------------


class ImageUrl(msgspec.Struct, kw_only=True):
    """`detail` is read by nobody: the model decides how many tokens an image takes."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str | None = None
    text: str | None = None
    image_url: ImageUrl | str | None = None


class ForeignImage(ContentPart, kw_only=True):
    """An image of another protocol.

    Attributes:
        param: what the part is called there. kind: its type there.
    """

    param: str
    kind: str


class FunctionCall(msgspec.Struct, kw_only=True):
    """A call as the assistant made it. `arguments` is a JSON object or its text."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    """A message of any role. `prefix` on the last one is continue_final_message."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: bool = False


class FunctionSpec(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function the model may call. `parameters` is the JSON schema of its arguments object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    function: FunctionSpec
    type: str = "function"


class ConversationFields(Protocol):
    """What a request says about its conversation."""

    @property
    def messages(self) -> list[ChatMessage] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any]: ...


# ---- tools ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calling:
    """Which tools a request shows to the model, and how it wants them called.

    Attributes:
        forced: the function that must be called; "" for any; None leaves it to the model.
        max_calls: calls that may come out; None is no limit.
    """

    tools: tuple[Tool, ...] = ()
    forced: str | None = None
    max_calls: int | None = None

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Each function's parameters, by its name."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}


NO_CALLING = Calling()


def constrain_calls(
    requested: Constraint | None, calling: Calling, parser: type[ToolCallParser] | None
) -> Constraint | None:
    """What an answer must be that may call functions: a call, what the request asks for besides, or free text.

    Functions are held to their parameters where they are strict or must be called; the others' arguments are any
    object.

    Args:
        requested: what the request says of an answer that calls none.
        parser: the model's dialect; None knows no calls.

    Raises:
        UnsupportedParameterError: the dialect cannot be held to a function's parameters.
    """
    if parser is None or not calling.tools:
        return requested
    functions = {
        tool.function.name: tool.function.parameters or {}
        if tool.function.strict or calling.forced is not None
        else None
        for tool in calling.tools
        if calling.forced in (None, "", tool.function.name)
    }
    if calling.forced is not None:
        return Constraint(format=parser.calls_format(functions, calling.max_calls), param="tools")
    if requested is not None:
        assert not isinstance(requested.format, bytes), "the front end has trees"
        calls = parser.calls_format(functions, calling.max_calls)
        return Constraint(format=Alternatives(elements=[calls, requested.format]), param=requested.param)
    if all(parameters is None for parameters in functions.values()):
        return None
    return Constraint(format=parser.text_format(functions, calling.max_calls), param="tools")


def constrain_reasoning(
    constraint: Constraint | None,
    prompt: ChatPrompt,
    dialect: ChatDialect,
    *,
    budget: int | None,
    budget_param: str,
    calling: Calling = NO_CALLING,
) -> Constraint | None:
    """What an answer must be, behind the reasoning that may come before it.

    Args:
        budget: the most tokens of reasoning; None and -1 are no limit.
        budget_param: the request's parameter that says so.

    Raises:
        RequestError: the budget is a number that cannot be, or the model's reasoning cannot be told.
    """
    reasoning = prompt.reasoning_before(dialect)
    if budget is not None and budget != -1:
        _check_thinking_budget(budget, prompt, dialect, budget_param)
        if reasoning is not None:
            reasoning = msgspec.structs.replace(reasoning, max_tokens=budget)
            constraint = constraint or _free_answer(calling, dialect.tool_parser, param=budget_param)
    return None if constraint is None else msgspec.structs.replace(constraint, reasoning=reasoning)


def _free_answer(calling: Calling, parser: type[ToolCallParser] | None, *, param: str) -> Constraint:
    """What is no constraint on an answer itself: any text, and calls where there are tools."""
    if parser is None or not calling.tools:
        return Constraint(format=AnyText(), param=param)
    functions = {tool.function.name: None for tool in calling.tools}
    return Constraint(format=parser.text_format(functions, calling.max_calls), param=param)


def _check_thinking_budget(budget: int, prompt: ChatPrompt, dialect: ChatDialect, param: str) -> None:
    if not 0 <= budget <= MAX_THINKING_TOKENS:
        raise InvalidParameterError(param, f"must be in [0, {MAX_THINKING_TOKENS}], or -1 for no limit", budget)
    check_reasons(dialect, param)
    if prompt.reasoning == "ahead" and not dialect.opens_by_token:
        raise UnsupportedParameterError(param, "needs a model whose reasoning begins with one token")


def check_reasons(dialect: ChatDialect, param: str) -> None:
    """Raises UnsupportedParameterError for a parameter that asks something of the reasoning of a model without."""
    if dialect.reasoning_marks is None:
        raise UnsupportedParameterError(param, "needs a model that reasons, or --reasoning-parser")


def check_calling(tools: Sequence[Tool], tool_choice: str | dict[str, Any] | None, *, parallel: bool) -> Calling:
    """The tools of a request, checked.

    Raises:
        InvalidParameterError: a tool is not one, or tool_choice does not fit the tools.
    """
    check_tools(tools)
    forced: str | None = None
    if isinstance(tool_choice, dict):
        function = tool_choice.get("function")
        forced = function.get("name") if isinstance(function, dict) else None
        if tool_choice.get("type") != "function" or not isinstance(forced, str):
            form = '{"type": "function", "function": {"name": ...}}'
            raise InvalidParameterError("tool_choice", f"must be none, auto, required or {form}", tool_choice)
        if forced not in {tool.function.name for tool in tools}:
            raise InvalidParameterError("tool_choice", "must name one of tools", forced)
    elif tool_choice == "required":
        forced = ""
        if not tools:
            raise InvalidParameterError("tool_choice", "needs tools", tool_choice)
    elif tool_choice not in (None, "auto", "none"):
        raise InvalidParameterError("tool_choice", "must be none, auto, required or an object", tool_choice)
    if tool_choice == "none" or not tools:
        return NO_CALLING
    return Calling(tuple(tools), forced, max_calls=None if parallel and not forced else 1)


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises InvalidParameterError for the first that is no usable function, or for too many."""
    if len(tools) > MAX_TOOLS:
        raise InvalidParameterError("tools", f"must be at most {MAX_TOOLS}", len(tools))
    seen: set[str] = set()
    for position, tool in enumerate(tools):
        place = f"tools[{position}]"
        name = tool.function.name
        if tool.type != "function":
            raise InvalidParameterError(f"{place}.type", 'must be "function"', tool.type)
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
            raise InvalidParameterError(f"{place}.function.name", "must be 1 to 64 of A-Z a-z 0-9 _ . -", name)
        if name in seen:
            raise InvalidParameterError(f"{place}.function.name", "must not be used twice", name)
        seen.add(name)
        schema = tool.function.parameters
        if schema:
            place = f"{place}.function.parameters"
            if schema.get("type", "object") != "object":
                raise InvalidParameterError(f"{place}.type", 'must be "object"', schema["type"])
            _check_types(schema, place)


def _check_types(schema: Any, place: str) -> None:
    """Refuse types that JSON schema does not have, such as "float", wherever a schema can stand."""
    if not isinstance(schema, dict):
        return
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in TYPE_NAMES:
            raise InvalidParameterError(f"{place}.type", f"must be of {', '.join(sorted(TYPE_NAMES))}", name)
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        members = schema.get(key, {})
        if not isinstance(members, dict):
            raise InvalidParameterError(f"{place}.{key}", "must be an object", members)
        for name, member in members.items():
            _check_types(member, f"{place}.{key}.{name}")
    for key in ("items", "additionalProperties", "not", "anyOf", "oneOf", "allOf", "prefixItems"):
        members = schema.get(key)
        for member in members if isinstance(members, list) else [members]:
            _check_types(member, f"{place}.{key}")


# ---- the model's dialect --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatDialect:
    """What a model's chat template can show, and how the model's answers are read.

    Attributes:
        tool_parser: None leaves calls in the text.
        reasoning_marks: opener and closer; None leaves reasoning in the text.
        tool_mark_ids, reasoning_mark_ids: special tokens that must stay in an answer's text for it to be read.
        reasoning_end_id: the closer, where it is one token.
        opens_by_token: the opener is one token.
        shows_tools, shows_calls: whether the template prints tools, and calls of earlier turns; we print them if not.
        null_content: the template tells calls by a message without content.
        variables: of those that decide on reasoning, what the template reads.
    """

    tool_parser: type[ToolCallParser] | None = None
    reasoning_marks: tuple[str, str] | None = None
    tool_mark_ids: tuple[int, ...] = ()
    reasoning_mark_ids: tuple[int, ...] = ()
    reasoning_end_id: int | None = None
    opens_by_token: bool = False
    shows_tools: bool = False
    shows_calls: bool = False
    null_content: bool = False
    variables: frozenset[str] = frozenset()

    @classmethod
    def choose(cls, tokenizer: Tokenizer, tool_call_parser: str, reasoning_parser: str) -> ChatDialect:
        """The dialect that a model's chat template gives away.

        Args:
            tool_call_parser, reasoning_parser: names that overrule the template, "auto" or "none".

        Raises:
            ConfigError: there is no parser of that name.
        """
        template = tokenizer.chat_template or ""
        if tool_call_parser == "auto":
            tool_call_parser = detect_tool_call_parser(template)
        if reasoning_parser == "auto":
            reasoning_parser = detect_reasoning_marks(template) or "none"
        for kind, name, known in (
            ("tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS.keys()),
            ("reasoning_parser", reasoning_parser, REASONING_MARKS.keys()),
        ):
            if name != "none" and name not in known:
                raise ConfigError(f"{kind} must be one of auto, none, {', '.join(known)}. Given: {name}", param=kind)
        parser = TOOL_CALL_PARSERS.get(tool_call_parser)
        reasoning_marks = REASONING_MARKS.get(reasoning_parser)

        def ids_of(texts: Iterable[str]) -> tuple[int, ...]:
            return tuple(i for text in texts if (i := tokenizer.special_token_id(text)) is not None)

        opening, closing = [tokenizer.encode(mark, add_special_tokens=False) for mark in reasoning_marks or ()] or [
            [],
            [],
        ]
        return cls(
            parser,
            reasoning_marks,
            tool_mark_ids=ids_of(parser.marks if parser else ()),
            reasoning_mark_ids=ids_of(reasoning_marks or ()),
            reasoning_end_id=closing[0] if len(closing) == 1 else None,
            opens_by_token=len(opening) == 1,
        ).showing(template)

    def showing(self, template: str | None) -> ChatDialect:
        """The same model through a template of a request's own; None leaves it as it is."""
        if template is None:
            return self
        return dataclasses.replace(
            self,
            shows_tools=re.search(r"\btools\b", template) is not None,
            shows_calls="tool_calls" in template,
            null_content=re.search(r"== 'assistant' and message\['content'\] is none", template) is not None,
            variables=frozenset(name for name in ("enable_thinking", "reasoning_effort") if name in template),
        )

    def effort_kwargs(self, effort: str | None) -> dict[str, Any] | None:
        """Template variables for a reasoning_effort; None when the template has no use for it."""
        if effort is None:
            return {}
        if "reasoning_effort" in self.variables:
            return {"reasoning_effort": effort}
        if "enable_thinking" in self.variables:
            return {"enable_thinking": effort != "none"}
        return None


# ---- messages -------------------------------------------------------------------------------------------------------


def make_messages(
    messages: Sequence[ChatMessage], dialect: ChatDialect, sources: list[ImageSource] | None = None
) -> list[dict[str, Any]]:
    """Messages for a chat template: text parts joined by newlines, "developer" called "system".

    The deprecated `function_call` and role "function" become what replaced them. Content with images stays a list.

    Args:
        sources: where to put the images, in order; None refuses them.
    """
    if not messages:
        raise InvalidParameterError("messages", "must have at least one message", [])
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of functions, by call id
    for position, message in enumerate(messages):
        place = f"messages[{position}]"
        if message.role not in ("system", "developer", "user", "assistant", "tool", "function"):
            limit = "must be system, developer, user, assistant or tool"
            raise InvalidParameterError(f"{place}.role", limit, message.role)
        calls = _calls_of(message, place, dialect)
        if message.prefix and position < len(messages) - 1:
            raise InvalidParameterError(f"{place}.prefix", "must only be true of the last message", True)
        if message.content is None and not calls:
            raise InvalidParameterError(f"{place}.content", "must be text or a list of text parts", None)
        content: str | list[dict[str, Any]] | None = message.content if isinstance(message.content, str) else None
        if isinstance(message.content, list):
            takes_images = sources if message.role == "user" else None
            content = _join_parts(message.content, f"{place}.content", message.role, takes_images)
        role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
        entry: dict[str, Any] = {"role": role, "content": content}
        if content is None and not dialect.null_content:
            entry["content"] = ""
        if message.name is not None:
            entry["name"] = message.name
        if calls:
            entry["tool_calls"] = calls
            names |= {call["id"]: call["function"]["name"] for call in calls}
        if role == "assistant" and (reasoning := message.reasoning_content or message.reasoning):
            entry["reasoning_content"] = reasoning
        if role == "tool":
            call_id = _call_id(message.tool_call_id or _function_id(message.name or ""), dialect)
            entry["tool_call_id"] = call_id
            if call_id in names:
                entry.setdefault("name", names[call_id])
        made.append(entry)
    return made


def _calls_of(message: ChatMessage, place: str, dialect: ChatDialect) -> list[dict[str, Any]]:
    calls = message.tool_calls or []
    if message.function_call is not None:
        calls = [*calls, ToolCall(function=message.function_call, id=_function_id(message.function_call.name))]
    if calls and message.role != "assistant":
        raise InvalidParameterError(f"{place}.tool_calls", "must be the assistant's", message.role)
    return [
        {
            "type": "function",
            "id": _call_id(call.id or _function_id(call.function.name), dialect),
            "function": {"name": call.function.name, "arguments": _arguments_of(call.function)},
        }
        for call in calls
    ]


def _function_id(name: str) -> str:
    """Id of a call that has none, as those of the deprecated form: there is one of a function at a time."""
    return f"call_{name}"


def _call_id(call_id: str, dialect: ChatDialect) -> str:
    """Mistral's templates refuse ids of another length than 9."""
    if dialect.tool_parser is not MistralParser or re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _arguments_of(call: FunctionCall) -> CallArguments | str:
    if isinstance(call.arguments, dict):
        return CallArguments(call.arguments)
    try:
        value = decode_json((call.arguments or "{}").encode())
    except RequestError:  # what a model wrote, and its client sends back, may be no JSON, or too deep for a template
        return call.arguments
    return CallArguments(value) if isinstance(value, dict) else call.arguments


def _join_parts(
    content: list[ContentPart], place: str, role: str, sources: list[ImageSource] | None
) -> str | list[dict[str, Any]]:
    """Text, or a list of parts where there are images, which are added to `sources`; None refuses them."""
    parts: list[dict[str, Any]] = []
    for position, part in enumerate(content):
        if part.type == "image_url":
            named, kind = f"{place}[{position}]", part.type
            if isinstance(part, ForeignImage):
                named, kind = part.param, part.kind
            if sources is None:
                why = "this model reads no images" if role == "user" else f"images of the {role} are not read"
                raise UnsupportedParameterError(f"{named}.type", f"{kind!r} is not supported: {why}")
            url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
            if not url:
                raise InvalidParameterError(f"{named}.image_url", "must have a url", url)
            sources.append(ImageSource(url, named))
            parts.append({"type": "image"})
            continue
        if part.type != "text":
            known = '"text"' if sources is None else '"text" or "image_url"'
            raise InvalidParameterError(f"{place}.type", f"must be {known}", part.type)
        if part.text is None:
            raise InvalidParameterError(f"{place}.text", "must be a string", None)
        parts.append({"type": "text", "text": part.text})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _text_of(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


def _joined(before: str | list[dict[str, Any]], after: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]]:
    if isinstance(before, str) and not isinstance(after, list):
        return before + (after or "")
    parts = [
        content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        for content in (before, after)
    ]
    return [*parts[0], *parts[1]]


# ---- what templates without tools are given -------------------------------------------------------------------------


def describe_tools(tools: Collection[Tool], form: str) -> str:
    """Text for a model whose template does not show tools. `form` is what a call looks like."""
    functions = "\n".join(json.dumps(_tool_dict(tool)["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. These are the functions, with JSON schemas of their parameters:\n"
        f"{functions}\n"
        f"To call one, answer with the call alone, in this form, once for each call:\n{form}\n"
        "The results come in the next message. Where no function helps, answer in words."
    )


def _tool_dict(tool: Tool) -> dict[str, Any]:
    described: dict[str, Any] = msgspec.to_builtins(tool)
    described["function"].setdefault("description", "")
    described["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": described["function"]}


def _add_description(messages: list[dict[str, Any]], description: str) -> None:
    """Put it behind the system's text, or, as some templates refuse a system message, before the user's first."""
    first = messages[0]
    if first["role"] == "system":
        messages[0] = first | {"content": f"{first['content']}\n\n{description}"}
        return
    place = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
    if place is None:
        messages.insert(0, {"role": "system", "content": description})
    else:
        messages[place] = messages[place] | {"content": _joined(f"{description}\n\n", messages[place]["content"])}


def _without_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as the assistant's text, and results as the user's, together with what the user says next."""
    made: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        text = _text_of(message["content"])
        if message["role"] == "tool":
            text = f"Result of {message.get('name', 'the function')}:\n{text}"
            message = {"role": "user", "content": text}
        elif "tool_calls" in message:
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
            message = {"role": "assistant", "content": "\n".join([text, *calls] if text else calls)}
        if follows_result and message["role"] == "user":
            made[-1]["content"] = _joined(_joined(made[-1]["content"], "\n"), message["content"])
        else:
            made.append(message)
            follows_result = text.startswith("Result of ") and message["role"] == "user" and message["content"] == text
    return made


# ---- prompts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as token ids, or a prompt that was given as it is.

    Attributes:
        reasoning: whether it may come ("ahead"), the prompt ends inside of it, or it is over; "none" in a dialect
            without.
        tiles: of the images in it.
    """

    token_ids: list[int]
    reasoning: ReasoningState = "none"
    tiles: list[ImageTile] = dataclasses.field(default_factory=list)

    def reasoning_before(self, dialect: ChatDialect) -> Reasoning | None:
        """The reasoning that may come before an answer that has to have a form."""
        if dialect.reasoning_marks is None or self.reasoning == "over":
            return None
        opener, closer = dialect.reasoning_marks
        return Reasoning(opener=opener, closer=closer, is_open=self.reasoning == "open")

    def parser_maker(
        self, dialect: ChatDialect, calling: Calling, *, separate_reasoning: bool
    ) -> Callable[[], AnswerParser] | None:
        """Makes a parser for each answer to the prompt; None when there is nothing to find in one."""
        tool_parser = dialect.tool_parser if calling.tools else None
        marks = dialect.reasoning_marks if separate_reasoning else None
        if tool_parser is None and marks is None:
            return None

        def make() -> AnswerParser:
            reasoning = None
            if marks is not None:
                reasoning = ReasoningParser(
                    *marks, starts_inside=self.reasoning == "open", closer_id=dialect.reasoning_end_id
                )
            tools = None if tool_parser is None else tool_parser(calling.schemas, calling.max_calls)
            return AnswerParser(reasoning, tools)

        return make


async def encode_conversation(
    tokenizer: Tokenizer,
    dialect: ChatDialect,
    source: ConversationFields,
    calling: Calling = NO_CALLING,
    template_kwargs: dict[str, Any] | None = None,
    renderer: TemplateRenderer | None = None,
    images: ImageReader | None = None,
) -> ChatPrompt:
    """Token ids of a conversation through the model's chat template, or the request's own.

    Args:
        dialect: as the template that is used shows it.
        template_kwargs: variables for the template that the request does not set itself.
        renderer: of templates from requests.
        images: reads those of the conversation; None where the model reads none.

    Raises:
        RequestError: a message is not acceptable, flags contradict each other, or the template refuses.
    """
    given = source.messages or []
    sources: list[ImageSource] = []
    messages = make_messages(given, dialect, None if images is None else sources)
    continues = source.continue_final_message or given[-1].prefix
    add_generation_prompt = source.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not continues
    if add_generation_prompt and continues:
        raise InvalidParameterError("continue_final_message", "must not be true with add_generation_prompt", True)
    if continues and messages[-1]["role"] != "assistant":
        raise InvalidParameterError(
            "continue_final_message", "needs a last message of the assistant", messages[-1]["role"]
        )
    if calling.forced is not None and not (add_generation_prompt or continues):
        raise InvalidParameterError("add_generation_prompt", "must be true with this tool_choice", False)
    if calling.forced is not None and dialect.tool_parser is None:
        raise UnsupportedParameterError("tool_choice", "needs a parser; this server runs without --tool-call-parser")
    for name in source.chat_template_kwargs:
        if name in RESERVED_TEMPLATE_KWARGS or not name.isidentifier():
            raise InvalidParameterError("chat_template_kwargs", "must not use reserved names", name)
    kwargs = (template_kwargs or {}) | source.chat_template_kwargs
    if not dialect.shows_calls:
        messages = _without_calls(messages)
    tools = [_tool_dict(tool) for tool in calling.tools]
    if tools and dialect.shows_tools:
        kwargs["tools"] = tools
    elif tools:
        form = (dialect.tool_parser or ToolCallParser).form
        _add_description(messages, describe_tools(calling.tools, form))

    own = source.chat_template
    if own is not None:
        assert renderer is not None, "who takes a template from a request brings what renders it"
        kwargs |= {"template": own, "render": renderer.render}

    def encode() -> list[int]:
        return tokenizer.encode_chat(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continues, **kwargs
        )

    cut = await images.read(sources) if images is not None else []
    size = sum(len(_text_of(message["content"])) for message in messages) + len(msgspec.json.encode(calling.tools))
    if own is not None and renderer is not None:
        token_ids = await renderer.run(encode)
    elif size > ENCODE_IN_THREAD_CHARS:
        token_ids = await asyncio.to_thread(encode)
    else:
        token_ids = encode()
    tiles: list[ImageTile] = []
    if images is not None:
        token_ids, tiles = images.place(token_ids, cut)
    state = _reasoning_state(tokenizer, dialect, token_ids, messages[-1] if continues else None)
    return ChatPrompt(token_ids, state, tiles)


def _reasoning_state(
    tokenizer: Tokenizer, dialect: ChatDialect, token_ids: list[int], continued: dict[str, Any] | None
) -> ReasoningState:
    """Where a prompt leaves the reasoning; `continued` is the message that the answer goes on with."""
    if dialect.reasoning_marks is None:
        return "none"
    opener, closer = dialect.reasoning_marks
    end = tokenizer.decode(token_ids[-_LAST_TOKENS:], skip_special_tokens=False).rstrip()
    text = (continued or {}).get("content") or ""
    if end.endswith(opener) or text.rfind(opener) > text.rfind(closer):
        return "open"
    return "over" if end.endswith(closer) or text.strip() else "ahead"


def read_prompt(tokenizer: Tokenizer, dialect: ChatDialect, token_ids: list[int]) -> ChatPrompt:
    """A prompt that no template of ours made, with where its last marks leave the reasoning."""
    if dialect.reasoning_marks is None:
        return ChatPrompt(token_ids)
    opener, closer = dialect.reasoning_marks
    text = tokenizer.decode(token_ids, skip_special_tokens=False).rstrip()
    if text.rfind(opener) > text.rfind(closer):
        return ChatPrompt(token_ids, "open")
    return ChatPrompt(token_ids, "over" if text.endswith(closer) else "ahead")
