"""JSON schemas of arguments for dialects that do not write them as JSON: what they allow, member by member.

A schema that cannot be taken apart exactly is refused by the name of the keyword that is in the way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kitfox.constraint import Alternatives, Format, JsonSchema, Regex, Repeat, Sequence, Text
from kitfox.errors import UnsupportedParameterError
from kitfox.structured_output.schema import ASSERTIONS

Schema = Mapping[str, Any]

_DEFINITIONS = ("$defs", "definitions")
_STRING_KEYWORDS = {"maxLength", "minLength", "pattern", "format"}
_MAX_DEPTH = 32  # of schemas that refer to others


def inexpressible(keyword: str) -> UnsupportedParameterError:
    """The refusal of a schema that the model's dialect of tool calls cannot hold to."""
    return UnsupportedParameterError(
        "tools", f"must not use {keyword} in parameters: this model's form of tool calls cannot be held to it"
    )


def require_only(schema: Schema, *keywords: str) -> None:
    """Refuse a schema that asserts more than some keywords do."""
    for keyword in schema:
        if keyword in ASSERTIONS and keyword not in keywords:
            raise inexpressible(keyword)


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema that references lead to."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            raise inexpressible("a schema that is true or false")
        if "allOf" in schema and len(schema["allOf"]) == 1:
            require_only(schema, "allOf")
            schema = schema["allOf"][0]
        elif "$ref" in schema:
            require_only(schema, "$ref")
            schema = _referred(schema["$ref"], root)
        else:
            return schema
    raise inexpressible("$ref in a circle")


def _referred(reference: Any, root: Schema) -> Any:
    found: Any = root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        raise inexpressible("$ref to anything but definitions")
    for name in reference[2:].split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    if found is None:
        raise inexpressible(f"$ref to {reference[:80]!r}, which is not there")
    return found


def as_json(schema: Schema, root: Schema) -> JsonSchema:
    """A part of a schema as one of its own, with the definitions that it may refer to."""
    _check_references(schema)
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    for members in definitions.values():
        _check_references(members)
    return JsonSchema(schema={**definitions, **schema})


def _check_references(part: Any) -> None:
    if isinstance(part, list):
        for member in part:
            _check_references(member)
    elif isinstance(part, Mapping):
        reference = part.get("$ref")
        if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
            raise inexpressible("$ref to anything but definitions")
        for member in part.values():
            _check_references(member)


def branches(schema: Any, root: Schema, depth: int = 0) -> list[Schema]:
    """The schemas of which a value fits one: without references, `anyOf`, lists of types, and lists of values."""
    schema = resolved(schema, root)
    if depth > _MAX_DEPTH:
        raise inexpressible("$ref in a circle")
    if "anyOf" in schema:
        require_only(schema, "anyOf")
        return [branch for part in schema["anyOf"] for branch in branches(part, root, depth + 1)]
    if "enum" in schema or "const" in schema:
        require_only(schema, "enum", "const", "type")
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return [{"const": value} for value in values]
    types = schema.get("type", "string")
    if not isinstance(types, list):
        return [schema]
    return [
        {
            key: value
            for key, value in schema.items()
            if key != "type" and (name == "string" or key not in _STRING_KEYWORDS)
        }
        | {"type": name}
        for name in types
    ]


def type_of(branch: Schema) -> str:
    """The type of a branch's values; a schema that says nothing is one of strings, as models see it."""
    if "const" in branch:
        return type_of_json(json.dumps(branch["const"]))
    guess = next((name for key, name in (("properties", "object"), ("items", "array")) if key in branch), "string")
    return str(branch.get("type", guess))


def type_of_json(text: str) -> str:
    """The narrowest type of a JSON value."""
    types = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    return types.get(text[0]) or ("integer" if float(text).is_integer() else "number")


def text_without(mark: str) -> Regex:
    """Any text that a mark does not occur in. The mark begins with "<" and has no other."""
    assert mark.rfind("<") == 0, "another < in a mark would begin it anew"
    beginnings = "|".join(
        f"{re.escape(mark[:length])}([^<{_in_class(mark[length])}][^<]*)?" for length in range(1, len(mark))
    )
    return Regex(pattern=f"[^<]*({beginnings})*")


def _in_class(character: str) -> str:
    return f"\\{character}" if character in "\\]^-" else character


def length_pattern(branch: Schema, characters: str, end: str = "") -> Regex | None:
    """A text of some characters with the length that a string's schema wants, and an end; None where it wants none."""
    require_only(branch, "type", "minLength", "maxLength")
    if "minLength" not in branch and "maxLength" not in branch:
        return None
    low, high = branch.get("minLength", 0), branch.get("maxLength", "")
    return Regex(pattern=f"{characters}{{{low},{high}}}{end}")


@dataclass(frozen=True)
class Member:
    """A member of an object, in the order of its schema."""

    name: str
    schema: Any
    is_required: bool


def members_of(schema: Any, root: Schema, is_name: Callable[[str], object]) -> list[Member]:
    """The members that an object may have; those that its schema does not name are never written.

    Args:
        is_name: whether the dialect can write a member of this name.
    """
    schema = resolved(schema, root)
    require_only(schema, "type", "properties", "required", "additionalProperties")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for name in required:
        if name not in properties:
            raise inexpressible(f"required for {name[:40]!r}, which is not among the properties")
    for name in properties:
        if not is_name(name):
            raise inexpressible(f"the property {name[:40]!r}")
    return [Member(name, part, name in required) for name, part in properties.items()]


def in_order(formats: list[tuple[Format, bool]], separator: str) -> Format:
    """Members one after the other, with a separator between two. A member is a format and whether it is required."""
    first_required = next((place for place, (_, required) in enumerate(formats) if required), None)
    if first_required is not None:
        before = [optional(sequence(member, Text(value=separator))) for member, _ in formats[:first_required]]
        return sequence(*before, formats[first_required][0], *_followers(formats[first_required + 1 :], separator))
    starts: list[Format] = [
        sequence(member, *_followers(formats[place + 1 :], separator)) for place, (member, _) in enumerate(formats)
    ]
    return optional(one_of(starts)) if starts else Text(value="")


def _followers(formats: Iterable[tuple[Format, bool]], separator: str) -> list[Format]:
    made = []
    for member, required in formats:
        follower = sequence(Text(value=separator), member)
        made.append(follower if required else optional(follower))
    return made


def optional(format: Format) -> Format:
    return Repeat(element=format, max_count=1)


def sequence(*parts: Format) -> Format:
    """Parts one after the other; neighbouring texts are one."""
    elements: list[Format] = []
    for part in parts:
        for element in part.elements if isinstance(part, Sequence) else [part]:
            last = elements[-1] if elements else None
            if isinstance(element, Text) and isinstance(last, Text):
                elements[-1] = Text(value=last.value + element.value)
            elif element != Text(value=""):
                elements.append(element)
    if not elements:
        return Text(value="")
    return elements[0] if len(elements) == 1 else Sequence(elements=elements)


def one_of(formats: list[Format]) -> Format:
    return formats[0] if len(formats) == 1 else Alternatives(elements=formats)


def json_text(value: Any) -> Text:
    return Text(value=json.dumps(value, ensure_ascii=False))
