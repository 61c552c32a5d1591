"""What can be said of a format before a backend sees it: that it is not too large, that its JSON schemas are well
formed, and which of their keywords a backend would not enforce.

Nothing here recurses, so that no nesting can overflow the stack.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from kitfox.constraint import (
    Alternatives,
    Ebnf,
    Format,
    GrammarError,
    JsonSchema,
    Lark,
    Mark,
    Regex,
    Repeat,
    Sequence,
    Tag,
    Text,
    TriggeredTags,
)

MAX_TEXT_BYTES = 1 << 20  # of all texts, patterns, grammars and schemas of a format together
MAX_NESTING = 100  # containers in a schema, groups in a pattern or grammar, formats in a format
MAX_NODES = 100_000  # formats, and values in schemas
MAX_CHOICES = 10_000  # alternatives, tags, and values of an `enum`
MAX_COUNT = 100_000  # a repetition's bounds

Schema = dict[str, Any] | bool


def check_format(format: Format) -> None:
    """Refuse what is too large to compile, and schemas that are none; in linear time.

    Raises:
        GrammarError: names the limit and what was given, or the place in the schema and what is wrong there.
    """
    num_nodes = num_bytes = 0
    open_formats: list[tuple[Format, int]] = [(format, 1)]
    while open_formats:
        node, depth = open_formats.pop()
        num_nodes += 1
        if depth > MAX_NESTING:
            raise GrammarError(f"formats are nested more than {MAX_NESTING} deep")
        match node:
            case JsonSchema(schema=schema, whitespace_pattern=whitespace_pattern):
                schema_nodes, schema_bytes = _measure(schema)
                num_nodes += schema_nodes
                num_bytes += schema_bytes
                if whitespace_pattern is not None:
                    num_bytes += _size(whitespace_pattern)
                    _check_groups("whitespace_pattern", whitespace_pattern, _REGEX)
                if num_nodes <= MAX_NODES and num_bytes <= MAX_TEXT_BYTES:
                    check_schema(schema)
            case Regex(pattern=pattern):
                num_bytes += _size(pattern)
                _check_groups("a regex", pattern, _REGEX)
            case Ebnf(grammar=grammar):
                num_bytes += _size(grammar)
                _check_groups("a grammar", grammar, _EBNF)
            case Lark(grammar=grammar):
                num_bytes += _size(grammar)
                _check_groups("a grammar", grammar, _LARK)
            case Text(value=value) | Mark(value=value):
                num_bytes += _size(value)
            case Sequence(elements=elements) | Alternatives(elements=elements):
                if isinstance(node, Alternatives):
                    _check_choices("alternatives", len(elements))
                open_formats += [(element, depth + 1) for element in elements]
            case Repeat(element=element, separator=separator, min_count=min_count, max_count=max_count):
                num_bytes += _size(separator)
                _check_counts(min_count, max_count)
                open_formats.append((element, depth + 1))
            case Tag(begin=begin, content=content, end=end):
                num_bytes += _size(begin) + _size(end)
                open_formats.append((content, depth + 1))
            case TriggeredTags(triggers=triggers, tags=tags):
                _check_choices("tags", len(tags))
                _check_choices("triggers", len(triggers))
                num_bytes += sum(map(_size, triggers))
                _check_triggers(triggers, tags)
                open_formats += [(tag, depth + 1) for tag in tags]
        if num_nodes > MAX_NODES:
            raise GrammarError(f"it has more than {MAX_NODES} parts")
        if num_bytes > MAX_TEXT_BYTES:
            raise GrammarError(f"it has {num_bytes} bytes of text; {MAX_TEXT_BYTES} is the most")


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _check_choices(what: str, count: int) -> None:
    if count > MAX_CHOICES:
        raise GrammarError(f"it has {count} {what}; {MAX_CHOICES} is the most")


def _check_counts(min_count: int, max_count: int | None) -> None:
    if min_count < 0 or (max_count is not None and max_count < min_count):
        raise GrammarError(f"nothing can be repeated from {min_count} to {max_count} times")
    if max(min_count, max_count or 0) > MAX_COUNT:
        raise GrammarError(f"it repeats {max(min_count, max_count or 0)} times; {MAX_COUNT} is the most")


def _check_triggers(triggers: list[str], tags: list[Tag]) -> None:
    if not triggers or not tags or not all(triggers):
        raise GrammarError("triggers and tags must not be empty")
    for tag in tags:
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise GrammarError(f"no trigger starts the tag {tag.begin!r}")


def _measure(schema: Any) -> tuple[int, int]:
    """Values in a schema, and about how many bytes it is as text."""
    num_nodes = num_bytes = 0
    open_values: list[tuple[Any, int]] = [(schema, 1)]
    while open_values:
        value, depth = open_values.pop()
        num_nodes += 1
        num_bytes += 2
        if isinstance(value, str):
            num_bytes += _size(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            num_bytes += 8 if isinstance(value, float) else value.bit_length() // 3
        elif isinstance(value, dict | list):
            if depth > MAX_NESTING:
                raise GrammarError(f"the schema is nested more than {MAX_NESTING} deep")
            if isinstance(value, dict):
                num_bytes += sum(_size(key) + 2 for key in value)
                open_values += [(child, depth + 1) for child in value.values()]
            else:
                open_values += [(child, depth + 1) for child in value]
        if num_nodes > MAX_NODES or num_bytes > MAX_TEXT_BYTES:
            break  # the caller says which
    return num_nodes, num_bytes


class _Syntax(NamedTuple):
    """How texts are kept apart from groups. quotes: (opener, closer); a backslash escapes within and without."""

    quotes: tuple[tuple[str, str], ...]
    comment: str
    openers: str
    closers: str


_REGEX = _Syntax(quotes=(("[", "]"),), comment="", openers="(", closers=")")
_EBNF = _Syntax(quotes=(('"', '"'), ("'", "'"), ("[", "]")), comment="#", openers="({", closers=")}")
_LARK = _Syntax(quotes=(('"', '"'), ("/", "/")), comment="//", openers="([{", closers=")]}")


def _check_groups(what: str, text: str, syntax: _Syntax) -> None:
    depth = 0
    closer = ""
    position = 0
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif closer:
            if character == closer:
                closer = ""
        elif syntax.comment and text.startswith(syntax.comment, position):
            position = text.find("\n", position)
            if position < 0:
                return
        elif quote := next((end for start, end in syntax.quotes if start == character), ""):
            closer = quote
        elif character in syntax.openers:
            depth += 1
            if depth > MAX_NESTING:
                raise GrammarError(f"{what} has groups nested more than {MAX_NESTING} deep")
        elif character in syntax.closers:
            depth = max(0, depth - 1)
        position += 1


# --- JSON schemas ---

TYPE_NAMES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})

KNOWN_FORMATS = frozenset(
    [
        "date-time",
        "date",
        "time",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "iri",
        "iri-reference",
        "uuid",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    ]
)
"""Values of `format` that draft 7 and 2020-12 define. Any other asserts nothing, as both leave it open."""

_ONE = "a schema"
_MANY = "a list of schemas"
_NAMED = "schemas by name"

_SUBSCHEMAS = {
    **dict.fromkeys(
        [
            "additionalProperties",
            "unevaluatedProperties",
            "propertyNames",
            "not",
            "if",
            "then",
            "else",
            "contains",
            "additionalItems",
            "unevaluatedItems",
        ],
        _ONE,
    ),
    **dict.fromkeys(["allOf", "anyOf", "oneOf", "prefixItems"], _MANY),
    **dict.fromkeys(["properties", "patternProperties", "dependentSchemas"], _NAMED),
}
_IN_PLACE = frozenset(["allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"])
_COUNTS = frozenset(
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"]
)
_NUMBERS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_STRINGS = frozenset(["pattern", "format", "$ref", "$dynamicRef", "$recursiveRef", "$schema"])

_APPLIES_TO = {
    **dict.fromkeys(_NUMBERS, frozenset({"number", "integer"})),
    **dict.fromkeys(
        ["minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"], frozenset({"string"})
    ),
    **dict.fromkeys(
        [
            "items",
            "prefixItems",
            "additionalItems",
            "unevaluatedItems",
            "minItems",
            "maxItems",
            "uniqueItems",
            "contains",
            "minContains",
            "maxContains",
        ],
        frozenset({"array"}),
    ),
    **dict.fromkeys(
        [
            "properties",
            "patternProperties",
            "additionalProperties",
            "unevaluatedProperties",
            "propertyNames",
            "required",
            "minProperties",
            "maxProperties",
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
        ],
        frozenset({"object"}),
    ),
}
ASSERTIONS = frozenset(_APPLIES_TO) | frozenset(
    ["type", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if"]
)
"""Keywords that say what a value must be. Any other is an annotation or unknown, and asserts nothing."""


class Subschema(NamedTuple):
    """A schema within a schema. place: as messages say it, such as `properties.a.items`; "" is the whole."""

    place: str
    schema: Schema


class ExactSupport(NamedTuple):
    """What a backend enforces exactly.

    Attributes:
        keywords: of `ASSERTIONS`, each wherever it stands.
        formats: of `KNOWN_FORMATS`.
        beside: the keyword of this one schema that its others keep from being enforced, or None.
    """

    keywords: frozenset[str]
    formats: frozenset[str]
    beside: Callable[[Mapping[str, Any]], str | None] = lambda schema: None


def unenforced_keyword(schema: Schema, exact: ExactSupport) -> str | None:
    """The first keyword, with its place, that a backend would not enforce; None where it enforces all of them.

    `format` is an assertion, as both drafts allow. A keyword that holds of everything that it applies to is enforced
    by doing nothing.

    Args:
        schema: one that `check_schema` lets pass.
    """
    for place, node in subschemas(schema):
        if isinstance(node, bool):
            continue
        for keyword in asserting_keywords(schema, node):
            if keyword == "format":
                if node[keyword] not in exact.formats:
                    return f"{_at(place, keyword)} {node[keyword]!r}"
            elif keyword not in exact.keywords:
                return _at(place, keyword)
        if (keyword_beside := exact.beside(node)) is not None:
            return _at(place, keyword_beside)
    return None


def asserting_keywords(root: Schema, node: Mapping[str, Any]) -> list[str]:
    """Keywords of one schema that some value does not satisfy, as far as can be told from it alone.

    Args:
        root: the whole that it is part of.
    """
    if "$ref" in node and ignores_beside_ref(root):
        return ["$ref"]
    types = node.get("type")
    of_types = frozenset([types] if isinstance(types, str) else types or TYPE_NAMES)
    return [
        keyword
        for keyword, value in node.items()
        if keyword in ASSERTIONS
        and not of_types.isdisjoint(_APPLIES_TO.get(keyword, of_types))
        and not _asserts_nothing(root, keyword, value, node)
    ]


def _asserts_nothing(root: Schema, keyword: str, value: Any, node: Mapping[str, Any]) -> bool:
    match keyword:
        case "format":
            return value not in KNOWN_FORMATS
        case "contentEncoding" | "contentMediaType":
            return draft_of(root) in ("4", "6", "2019-09", "2020-12")  # draft 7 lets them assert, and so may no draft
        case "if":
            return node.get("then", True) is True and node.get("else", True) is True
        case "not":
            return value is False
        case "minContains" | "maxContains":
            return "contains" not in node
        case "additionalItems":
            return not isinstance(node.get("items"), list) or value in (True, {})
        case "minLength" | "minItems" | "minProperties":
            return value == 0
        case "uniqueItems" | "exclusiveMinimum" | "exclusiveMaximum":
            return value is False
        case "items" | "additionalProperties" | "unevaluatedProperties" | "unevaluatedItems" | "propertyNames":
            return value is True or value == {}
        case "required" | "properties" | "patternProperties" | "dependencies" | "dependentRequired":
            return not value
        case "dependentSchemas" | "prefixItems":
            return not value
        case _:
            return False


def draft_of(root: Schema) -> str | None:
    """The draft that `$schema` names: "3", "4", "6", "7", "2019-09", "2020-12"; None where it names none of them."""
    uri = root.get("$schema") if isinstance(root, dict) else None
    if not isinstance(uri, str):
        return None
    name = uri.rstrip("#").removeprefix("https://").removeprefix("http://")
    return {
        "json-schema.org/draft-03/schema": "3",
        "json-schema.org/draft-04/schema": "4",
        "json-schema.org/draft-06/schema": "6",
        "json-schema.org/draft-07/schema": "7",
        "json-schema.org/draft/2019-09/schema": "2019-09",
        "json-schema.org/draft/2020-12/schema": "2020-12",
    }.get(name)


def ignores_beside_ref(root: Schema) -> bool:
    """Whether keywords beside a `$ref` say nothing: up to draft 7. A schema that names no draft is read as 2020-12,
    which accepts less; what only draft 7 has keeps its meaning there.
    """
    return draft_of(root) in ("4", "6", "7")


def resolve(root: Schema, ref: str) -> Subschema:
    """What a `$ref` of a schema refers to.

    Raises:
        GrammarError: it is not in this schema, or not by a JSON pointer.
    """
    base, _, fragment = ref.partition("#")
    if base and (not isinstance(root, dict) or base not in _identifiers(root)):
        raise GrammarError(f"'$ref' to {ref!r} is remote; only references within the schema are followed")
    pointer = unquote(fragment)
    if pointer and not pointer.startswith("/"):
        raise GrammarError(f"'$ref' to {ref!r} is not a JSON pointer; anchors are not followed")
    target: Any = root
    place = ""
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and name in target:
            target = target[name]
            place = _at(place, name)
        elif isinstance(target, list) and name.isascii() and name.isdigit() and int(name) < len(target):
            target = target[int(name)]
            place += f"[{name}]"
        else:
            raise GrammarError(f"'$ref' to {ref!r} leads nowhere")
    if not isinstance(target, dict | bool):
        raise GrammarError(f"'$ref' to {ref!r} leads to something that is not a schema")
    return Subschema(place, target)


def _identifiers(root: Mapping[str, Any]) -> list[str]:
    return [root[keyword].partition("#")[0] for keyword in ("$id", "id") if isinstance(root.get(keyword), str)]


def subschemas(root: Schema) -> Iterator[Subschema]:
    """A schema and all within it that have a say, each once; targets of references among them."""
    seen: set[int] = set()
    open_schemas = [Subschema("", root)]
    while open_schemas:
        subschema = open_schemas.pop()
        if isinstance(subschema.schema, dict):
            if id(subschema.schema) in seen:
                continue
            seen.add(id(subschema.schema))
        yield subschema
        open_schemas += [child for _, child in reversed(_children(root, subschema))]


def _children(root: Schema, subschema: Subschema) -> list[tuple[str, Subschema]]:
    """(keyword, subschema) for each that one schema has a use for."""
    place, node = subschema
    if isinstance(node, bool):
        return []
    children: list[tuple[str, Subschema]] = []
    if "$ref" in node:
        children.append(("$ref", resolve(root, node["$ref"])))
        if ignores_beside_ref(root):
            return children
    for keyword, value in node.items():
        here = _at(place, keyword)
        shape = _SUBSCHEMAS.get(keyword)
        if keyword == "items":
            shape = _MANY if isinstance(value, list) else _ONE
        if shape is _ONE:
            children.append((keyword, Subschema(here, value)))
        elif shape is _MANY:
            children += [(keyword, Subschema(f"{here}[{index}]", child)) for index, child in enumerate(value)]
        elif shape is _NAMED or keyword == "dependencies":
            children += [
                (keyword, Subschema(_at(here, name), child))
                for name, child in value.items()
                if not isinstance(child, list)
            ]
    return children


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


# Where one of these stands somewhere, whether an object is open decides about more than its own members.
_DEPEND_ON_OPEN_OBJECTS = (
    "allOf", "oneOf", "not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
    "contains", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_SAY_WHICH_MEMBERS = ("patternProperties", "propertyNames", "additionalProperties")


def schema_of(format: JsonSchema) -> Schema:
    """What the format's value has to keep to."""
    return closed(format.schema) if format.closes_objects else format.schema


def closed(root: Schema) -> Schema:
    """The schema with objects closed that name their properties and do not say whether there may be others.

    What it accepts the given one accepts too. A model that may invent members seldom comes to an end, and who writes
    such schemas does not expect it; `additionalProperties: true` keeps an object open. A schema in which an open object
    may matter elsewhere stays as it is.
    """
    made = copy.deepcopy(root)
    try:
        check_schema(made)
        objects = [node for _, node in subschemas(made) if isinstance(node, dict)]
    except GrammarError:
        return root  # whoever checks it later says what is wrong
    if any(keyword in node for node in objects for keyword in _DEPEND_ON_OPEN_OBJECTS):
        return root
    if any("properties" in node and ("$ref" in node or "anyOf" in node) for node in objects):
        return root
    for node in objects:
        if "properties" not in node or any(keyword in node for keyword in _SAY_WHICH_MEMBERS):
            continue
        names = set(node["properties"])
        if set(node.get("required", [])) <= names and node.get("minProperties", 0) <= len(names):
            node["additionalProperties"] = False
    return made


def check_schema(root: Schema) -> None:
    """Refuse a schema that is not one.

    Raises:
        GrammarError: the place and what is wrong there: a keyword's value, or a reference.
    """
    if draft_of(root) == "3":
        raise GrammarError("$schema: draft 3 is not supported; 4, 6, 7, 2019-09 and 2020-12 are")
    in_place: dict[int, list[int]] = {}
    resources: set[int] = set()
    for place, node in subschemas(_checked("", root)):
        if isinstance(node, bool):
            continue
        _check_keywords(place, node)
        try:
            children = _children(root, Subschema(place, node))
        except GrammarError as error:
            raise GrammarError(f"{place or 'the schema'}: {error}") from None
        if node is not root and isinstance(node.get("$id"), str) and not node["$id"].startswith("#"):
            resources.add(id(node))
        if id(node) in resources and "$ref" in node:
            raise GrammarError(f"{_at(place, '$ref')}: references within a nested '$id' are not followed")
        for keyword, child in children:
            _checked(child.place, child.schema)
            if id(node) in resources and keyword != "$ref":
                resources.add(id(child.schema))
        in_place[id(node)] = [
            id(child.schema)
            for keyword, child in children
            if isinstance(child.schema, dict) and (keyword in _IN_PLACE or keyword == "$ref")
        ]
    if _has_cycle(in_place):
        raise GrammarError("'$ref' leads back to itself without reading anything")


def _checked(place: str, node: Any) -> Any:
    if not isinstance(node, dict | bool):
        raise GrammarError(f"{place or 'the schema'} must be a schema, not {_shown(node)}")
    return node


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, dict | list) else f"a {'list' if isinstance(value, list) else 'map'}"
    return text if len(text) <= 40 else text[:37] + "..."


def _check_keywords(place: str, node: dict[str, Any]) -> None:
    for keyword, value in node.items():
        wanted = _wanted_instead(keyword, value)
        if wanted:
            raise GrammarError(f"{_at(place, keyword)} must be {wanted}, not {_shown(value)}")
    if isinstance(node.get("enum"), list):
        _check_choices(f"values in {_at(place, 'enum')}", len(node["enum"]))


def _wanted_instead(keyword: str, value: Any) -> str:
    """What the keyword's value should have been; "" where it is right."""
    if keyword == "type":
        names = [value] if isinstance(value, str) else value
        is_right = isinstance(names, list) and names and all(isinstance(n, str) and n in TYPE_NAMES for n in names)
        return "" if is_right else "one or more of " + ", ".join(sorted(TYPE_NAMES))
    if keyword in _COUNTS:
        is_right = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value % 1 == 0
        return "" if is_right else "a whole number that is not negative"
    if keyword in _NUMBERS:
        if isinstance(value, bool) and keyword.startswith("exclusive"):
            return ""  # draft 4
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return "a number"
        return "" if keyword != "multipleOf" or value > 0 else "a number above 0"
    if keyword in _STRINGS:
        return "" if isinstance(value, str) else "a string"
    if keyword == "required":
        return "" if _is_names(value) else "a list of names"
    if keyword == "enum":
        return "" if isinstance(value, list) and value else "a list of values"
    if keyword == "uniqueItems":
        return "" if isinstance(value, bool) else "true or false"
    if keyword == "dependentRequired":
        is_right = isinstance(value, dict) and all(map(_is_names, value.values()))
        return "" if is_right else "lists of names by name"
    if keyword == "dependencies":
        is_right = isinstance(value, dict) and all(
            _is_names(child) or isinstance(child, dict | bool) for child in value.values()
        )
        return "" if is_right else "schemas or lists of names by name"
    if keyword == "items":
        return "" if isinstance(value, dict | bool | list) else "a schema or a list of them"
    shape = _SUBSCHEMAS.get(keyword)
    if shape is _MANY:
        return "" if isinstance(value, list) and value else _MANY
    if shape is _NAMED:
        return "" if isinstance(value, dict) else _NAMED
    return ""  # `_checked` sees to single schemas


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _has_cycle(edges: Mapping[int, list[int]]) -> bool:
    """Whether a directed graph has a cycle."""
    done: set[int] = set()
    for start in edges:
        path: list[tuple[int, Iterator[int]]] = []
        on_path: set[int] = set()
        if start not in done:
            path.append((start, iter(edges[start])))
            on_path.add(start)
        while path:
            node, successors = path[-1]
            successor = next(successors, None)
            if successor is None:
                path.pop()
                on_path.discard(node)
                done.add(node)
            elif successor in on_path:
                return True
            elif successor not in done and successor in edges:
                path.append((successor, iter(edges[successor])))
                on_path.add(successor)
    return False
