"""What a request says about the form of its answer, in every spelling that clients know, as one `Format`.

OpenAI's `response_format`, vLLM's `structured_outputs` and its earlier `guided_*`, SGLang's `json_schema`, `regex`,
`ebnf` and `structural_tag`, and llama.cpp's `grammar` and `json_schema` say the same things. Whether a backend can
honour a schema is found out where it is compiled; here only the form of the request is checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from kitfox.constraint import (
    ANY_JSON,
    Alternatives,
    AnyText,
    Constraint,
    Ebnf,
    Format,
    JsonSchema,
    Lark,
    Mark,
    Regex,
    Repeat,
    Sequence,
    Tag,
    Text,
    TriggeredTags,
    choice,
)
from kitfox.errors import InvalidParameterError, RequestError, UnsupportedParameterError
from kitfox.server.validation import decode_json

_EBNF_START = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_LARK_START = re.compile(r"^[ \t]*\??start[ \t]*(\.-?\d+[ \t]*)?:|\A\s*%llguidance\b", re.MULTILINE)


# ---- what clients send ----------------------------------------------------------------------------------------------


class NamedSchema(msgspec.Struct, kw_only=True, omit_defaults=True):
    """OpenAI's wrapping of a schema. Its name and description show nowhere, and every schema is kept to strictly."""

    name: str | None = None
    schema: Any = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(NamedSchema, kw_only=True, omit_defaults=True):
    """`response_format`, and what other protocols have in its place. A schema may stand in `json_schema` or bare."""

    type: str
    json_schema: NamedSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's `structured_outputs`: exactly one kind, and how to write JSON."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class FormatFields(msgspec.Struct, kw_only=True):
    """Parameters of which at most one may say what the answer has to be."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None


# ---- from spellings to one constraint -------------------------------------------------------------------------------


def requested_constraint(fields: FormatFields, *, format_param: str = "response_format") -> Constraint | None:
    """What the answer must be; None where the request leaves it free.

    Args:
        format_param: what the protocol calls its `response_format`, for errors.

    Raises:
        RequestError: a spelling is wrong, or there is more than one; it names them.
    """
    space = fields.guided_whitespace_pattern
    readers: dict[str, Callable[[Any, str], Format | None]] = {
        "response_format": _read_response_format,
        "structured_outputs": _read_structured_outputs,
        "guided_json": lambda given, param: replace(read_schema(given, param), whitespace_pattern=space),
        "guided_regex": lambda given, _: Regex(pattern=given),
        "guided_choice": _read_choice,
        "guided_grammar": read_grammar,
        "json_schema": read_schema,
        "regex": lambda given, _: Regex(pattern=given),
        "ebnf": lambda given, _: Ebnf(grammar=given),
        "grammar": read_grammar,
        "structural_tag": read_structural_tag,
    }
    found: dict[str, Format] = {}
    for name, read in readers.items():
        given = getattr(fields, name)
        param = format_param if name == "response_format" else name
        made = None if given is None else read(given, param)
        if made is not None:
            found[param] = made
    if len(found) > 1:
        first, second, *_ = found
        raise RequestError(f"{first} and {second} must not both say what the answer is", param=second)
    if space is not None and fields.guided_json is None:
        raise InvalidParameterError("guided_whitespace_pattern", "needs guided_json", space)
    return next((Constraint(format=made, param=param) for param, made in found.items()), None)


def _read_response_format(given: ResponseFormat, param: str) -> Format | None:
    if given.type == "text":
        return None
    if given.type == "structural_tag":
        return read_structural_tag(msgspec.to_builtins(given), param)
    if given.type not in ("json_object", "json_schema"):
        limit = "must be text, json_object, json_schema or structural_tag"
        raise InvalidParameterError(f"{param}.type", limit, given.type)
    place, schema = f"{param}.schema", given.schema
    if given.json_schema is not None:
        place, schema = f"{param}.json_schema.schema", given.json_schema.schema
    if schema is None and given.type == "json_object":
        return ANY_JSON
    return read_schema(schema, place)


def _read_structured_outputs(given: StructuredOutputs, param: str) -> Format:
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    wanted = [kind for kind in kinds if getattr(given, kind) is not None]
    if given.json_object is False:
        wanted.remove("json_object")
    if len(wanted) != 1:
        limit = f"must have exactly one of {', '.join(kinds)}"
        raise InvalidParameterError(param, limit, ", ".join(wanted) or "none of them")
    kind = wanted[0]
    place = f"{param}.{kind}"
    if kind in ("json", "json_object"):
        if given.disable_any_whitespace and given.whitespace_pattern is not None:
            limit = "must not be given with disable_any_whitespace"
            raise InvalidParameterError(f"{param}.whitespace_pattern", limit, given.whitespace_pattern)
        made = read_schema(given.json, place) if kind == "json" else ANY_JSON
        if given.disable_additional_properties:
            made = replace(made, schema=_without_additional_properties(made.schema))
        spaces = 0 if given.disable_any_whitespace else None
        return replace(made, max_whitespace=spaces, whitespace_pattern=given.whitespace_pattern)
    for name in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        if getattr(given, name):
            raise InvalidParameterError(f"{param}.{name}", "needs json or json_object", getattr(given, name))
    readers: dict[str, Callable[[Any, str], Format]] = {
        "regex": lambda pattern, _: Regex(pattern=pattern),
        "choice": _read_choice,
        "grammar": read_grammar,
        "structural_tag": read_structural_tag,
    }
    return readers[kind](getattr(given, kind), place)


def _read_choice(texts: list[str], param: str) -> Format:
    if not texts:
        raise InvalidParameterError(param, "must have at least one text", texts)
    return choice(texts)


def read_grammar(text: str, param: str) -> Format:
    """A grammar in either of the two notations, told apart by the rule that it starts at."""
    if _EBNF_START.search(text):
        return Ebnf(grammar=text)
    if _LARK_START.search(text):
        return Lark(grammar=text)
    raise InvalidParameterError(param, "needs a rule `root ::= ...` (GBNF, EBNF) or `start: ...` (Lark)", text)


def read_schema(given: Any, param: str) -> JsonSchema:
    """A JSON schema, given as an object, as true or false, or as the JSON text of one.

    What stands inside is looked at where it is compiled: for large schemas that would hold up everybody's streams here.

    Raises:
        InvalidParameterError: it is none.
    """
    if isinstance(given, str):
        given = _decode(given, param)
    if not isinstance(given, dict | bool):
        raise InvalidParameterError(param, "must be a JSON schema", given)
    return JsonSchema(schema=given, closes_objects=True)


def _decode(text: str, param: str) -> Any:
    try:
        return decode_json(text.encode())
    except RequestError as error:
        reason = error.message.removeprefix("the request body ")
        raise InvalidParameterError(param, f"as a text {reason}", text) from None


def _without_additional_properties(schema: Any) -> Any:
    """The schema with no members beside the named ones, wherever it names some and does not say."""
    if isinstance(schema, list):
        return [_without_additional_properties(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, part in schema.items():
        if key in ("enum", "const", "default", "examples"):
            made[key] = part
        elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(part, dict):
            made[key] = {name: _without_additional_properties(member) for name, member in part.items()}
        else:
            made[key] = _without_additional_properties(part)
    if isinstance(schema.get("properties"), dict):
        made.setdefault("additionalProperties", False)
    return made


# ---- structural tags ------------------------------------------------------------------------------------------------


def read_structural_tag(given: str | dict[str, Any], param: str) -> Format:
    """Both forms that there are: `structures` with `triggers`, and XGrammar's tree in `format`.

    Raises:
        RequestError: a part is wrong, or says what no `Format` can say; it names the part.
    """
    if isinstance(given, str):
        given = _decode(given, param)
    if not isinstance(given, dict):
        raise InvalidParameterError(param, "must be a structural tag", given)
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("type", "structural_tag") != "structural_tag":
        raise InvalidParameterError(f"{param}.type", "must be structural_tag", given["type"])
    if ("format" in given) == ("structures" in given):
        raise InvalidParameterError(param, "must have one of format and structures", sorted(given))
    if "format" in given:
        return _read_node(given["format"], f"{param}.format")
    tags = []
    for position, structure in enumerate(_list(given, "structures", param)):
        place = f"{param}.structures[{position}]"
        if not isinstance(structure, dict):
            raise InvalidParameterError(place, "must be an object", structure)
        content = read_schema(structure.get("schema"), f"{place}.schema")
        tags.append(Tag(begin=_text(structure, "begin", place), content=content, end=_text(structure, "end", place)))
    return _triggered(_texts(given, "triggers", param), tags, param)


def _triggered(triggers: list[str], tags: list[Tag], place: str, **options: bool) -> TriggeredTags:
    if not triggers or not tags:
        raise InvalidParameterError(place, "must have triggers and tags", [triggers, len(tags)])
    for tag in tags:
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise InvalidParameterError(place, "must have a trigger at the beginning of each tag", tag.begin)
    return TriggeredTags(triggers=triggers, tags=tags, **options)


# What XGrammar's nodes may say beside their content, with the values that ask for nothing.
_UNSUPPORTED_MEMBERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "const_string": {},
    "json_schema": {"style": ("json",), "any_order": (False,), "excludes": ([],)},
    "any_text": {"excludes": ([],), "max_tokens": (), "max_chars": ()},
    "token": {},
    "grammar": {},
    "regex": {"excludes": ([],)},
    "sequence": {},
    "or": {},
    "tag": {},
    "triggered_tags": {"excludes": ([],)},
    "token_triggered_tags": {"exclude_tokens": ([],)},
    "tags_with_separator": {},
    "optional": {},
    "plus": {},
    "star": {},
    "repeat": {},
}


def _read_node(node: Any, place: str) -> Format:
    if not isinstance(node, dict) or not isinstance(node.get("type"), str):
        raise InvalidParameterError(place, "must be an object with a type", node)
    kind = node["type"]
    if kind not in _UNSUPPORTED_MEMBERS:
        raise UnsupportedParameterError(f"{place}.type", f"{kind[:40]!r} is not supported")
    for member, neutral in _UNSUPPORTED_MEMBERS[kind].items():
        if node.get(member) is not None and node[member] not in neutral:
            raise UnsupportedParameterError(f"{place}.{member}", f"is not supported in a {kind}")
    match kind:
        case "const_string":
            return Text(value=_text(node, "value", place))
        case "json_schema":
            spaces = node.get("max_whitespace_cnt")
            if spaces is not None and (type(spaces) is not int or spaces < 0):
                raise InvalidParameterError(f"{place}.max_whitespace_cnt", "must be >= 0", spaces)
            return replace(read_schema(node.get("json_schema"), f"{place}.json_schema"), max_whitespace=spaces)
        case "any_text":
            return AnyText()
        case "token":
            return Mark(value=_token(node, place))
        case "regex":
            return Regex(pattern=_text(node, "pattern", place))
        case "grammar":
            grammar, syntax = _text(node, "grammar", place), node.get("syntax", "ebnf")
            if syntax not in ("ebnf", "lark"):
                raise InvalidParameterError(f"{place}.syntax", "must be ebnf or lark", syntax)
            return Ebnf(grammar=grammar) if syntax == "ebnf" else Lark(grammar=grammar)
        case "sequence":
            return Sequence(elements=_read_nodes(node, "elements", place))
        case "or":
            return Alternatives(elements=_read_nodes(node, "elements", place))
        case "tag":
            return _read_tag(node, place)
        case "triggered_tags" | "token_triggered_tags":
            triggers = _texts(node, "triggers" if kind == "triggered_tags" else "trigger_tokens", place)
            return _triggered(triggers, _read_tags(node, place), place, **_tag_options(node, place))
        case "tags_with_separator":
            options = _tag_options(node, place)
            return Repeat(
                element=Alternatives(elements=list(_read_tags(node, place))),
                separator=_text(node, "separator", place),
                min_count=int(options["at_least_one"]),
                max_count=1 if options["stop_after_first"] else None,
            )
        case _:
            return _read_repeat(node, kind, place)


def _read_repeat(node: dict[str, Any], kind: str, place: str) -> Repeat:
    low, high = {"optional": (0, 1), "plus": (1, -1), "star": (0, -1)}.get(kind, (node.get("min"), node.get("max")))
    if type(low) is not int or type(high) is not int or low < 0 or (high < low and high != -1):
        raise InvalidParameterError(place, "must have numbers 0 <= min <= max, or max -1 for no limit", [low, high])
    content = _read_node(node.get("content"), f"{place}.content")
    return Repeat(element=content, min_count=low, max_count=None if high == -1 else high)


def _read_tag(node: dict[str, Any], place: str) -> Tag:
    content = _read_node(node.get("content"), f"{place}.content")
    begin, end = node.get("begin"), node.get("end")
    begin = _token(begin, f"{place}.begin") if isinstance(begin, dict) else _text(node, "begin", place)
    if isinstance(end, str):
        return Tag(begin=begin, content=content, end=end)
    closing: Format
    if isinstance(end, dict):
        closing = Mark(value=_token(end, f"{place}.end"))
    else:
        closing = _read_choice(_texts(node, "end", place), f"{place}.end")
    return Tag(begin=begin, content=Sequence(elements=[content, closing]), end="")


def _read_tags(node: dict[str, Any], place: str) -> list[Tag]:
    tags = []
    for position, tag in enumerate(_list(node, "tags", place)):
        if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
            raise InvalidParameterError(f"{place}.tags[{position}]", "must be a tag", tag)
        tags.append(_read_tag(tag, f"{place}.tags[{position}]"))
    if not tags:
        raise InvalidParameterError(f"{place}.tags", "must have at least one tag", tags)
    return tags


def _read_nodes(node: dict[str, Any], name: str, place: str) -> list[Format]:
    parts = _list(node, name, place)
    if not parts:
        raise InvalidParameterError(f"{place}.{name}", "must not be empty", parts)
    return [_read_node(part, f"{place}.{name}[{position}]") for position, part in enumerate(parts)]


def _tag_options(node: dict[str, Any], place: str) -> dict[str, bool]:
    options = {name: node.get(name, False) for name in ("at_least_one", "stop_after_first")}
    for name, value in options.items():
        if not isinstance(value, bool):
            raise InvalidParameterError(f"{place}.{name}", "must be true or false", value)
    return options


def _token(node: dict[str, Any], place: str) -> str:
    token = node.get("token")
    if node.get("type", "token") != "token" or not isinstance(token, str) or not token:
        raise UnsupportedParameterError(f"{place}.token", "is only supported as the text of a token")
    return token


def _text(node: dict[str, Any], name: str, place: str) -> str:
    value = node.get(name)
    if not isinstance(value, str):
        raise InvalidParameterError(f"{place}.{name}", "must be a string", value)
    return value


def _list(node: dict[str, Any], name: str, place: str) -> list[Any]:
    value = node.get(name)
    if not isinstance(value, list):
        raise InvalidParameterError(f"{place}.{name}", "must be a list", value)
    return value


def _texts(node: dict[str, Any], name: str, place: str) -> list[str]:
    value = _list(node, name, place)
    if any(not isinstance(text, str) or not text for text in value):
        raise InvalidParameterError(f"{place}.{name}", "must be texts", value)
    return value
