"""A JSON schema in the few words that xgrammar enforces exactly.

xgrammar drops what it does not know; of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and `type` it takes the
first and ignores the others; it lets raw control characters into strings of bounded length, and an escape in a key
(`\\u0061`) evade the schema of that key. So it is never given a caller's schema, but one written here that says the
same without those: every schema in it has one type with its own keywords, or is an `enum`, `anyOf` or `$ref`. What
cannot be said like that is refused. Where xgrammar can only say less (no escapes in a key or behind `pattern`, no
exponents in a number with bounds, properties in one order), an answer has less freedom but is never wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from kitfox.constraint import GrammarError
from kitfox.structured_output.grammar import NotEnforcedError
from kitfox.structured_output.pattern import Pattern, read_pattern, text_of_length, text_without
from kitfox.structured_output.schema import (
    TYPE_NAMES,
    ExactSupport,
    Schema,
    Subschema,
    asserting_keywords,
    ignores_beside_ref,
    resolve,
    unenforced_keyword,
)

_MAX_DEPTH = 60  # of schemas that are needed to write one, each some Python frames
_MAX_RULES = 5000
_MAX_COMBINATIONS = 64  # of the alternatives of one schema
_MAX_MULTIPLE = 1024  # xgrammar ignores larger ones, and any with one bound or a range of more than 10,000
_MAX_MULTIPLE_RANGE = 10_000
_MAX_INTEGER = 2**63 - 2
_MAX_REAL = 1e15  # beyond, and below the sixth decimal, xgrammar's bounds of numbers are not exact
_DECIMALS = 6

_HEX = "[0-9A-Fa-f]"
_DATE = (
    r"(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+\-]{_CLOCK})"
_HOSTNAME = r"(?:[A-Za-z0-9](?:-?[A-Za-z0-9]){0,14}\.){0,7}[A-Za-z](?:-?[A-Za-z0-9]){0,14}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_QUAD = f"{_HEX}{{1,4}}"
_PATH_CHARACTER = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|%{_HEX}{{2}})"
_SEGMENTS = f"(?:/{_PATH_CHARACTER}*)*"
_QUERY = rf"(?:\?(?:{_PATH_CHARACTER}|[/?])*)?(?:#(?:{_PATH_CHARACTER}|[/?])*)?"
_URI = rf"[A-Za-z][A-Za-z0-9+\-.]*:(?://{_HOSTNAME}(?::[0-9]{{1,4}})?{_SEGMENTS}|{_PATH_CHARACTER}+{_SEGMENTS}){_QUERY}"
_RELATIVE = (
    rf"(?:(?:[A-Za-z0-9\-._~!$&'()*+,;=@]|%{_HEX}{{2}})+{_SEGMENTS}|/(?:{_PATH_CHARACTER}+{_SEGMENTS})?)?{_QUERY}"
)
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_TIME_SPAN = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": (
        f"P(?:[0-9]+W|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:{_TIME_SPAN})?|{_TIME_SPAN})"
    ),
    "email": rf"[A-Za-z0-9_+]+(?:[.\-][A-Za-z0-9_+]+)*@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": (
        f"(?:(?:{_QUAD}:){{7}}{_QUAD}|::(?:{_QUAD}(?::{_QUAD}){{0,6}})?|{_QUAD}::(?:{_QUAD}(?::{_QUAD}){{0,5}})?"
        f"|{_QUAD}(?::{_QUAD}){{1,6}}::)"
    ),
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": _URI,
    "uri-reference": f"(?:{_URI}|{_RELATIVE})",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9]+0?)(?:#|{_POINTER})",
}
"""A pattern for each format, none of whose texts any reading of the format's standard refuses."""
for _narrow, _wide in (("email", "idn-email"), ("hostname", "idn-hostname"), ("uri", "iri")):
    FORMATS[_wide] = FORMATS[_narrow]
FORMATS["iri-reference"] = FORMATS["uri-reference"]

EXACT = ExactSupport(
    keywords=frozenset(
        {
            *("type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf"),
            *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
            *("minLength", "maxLength", "pattern", "format"),
            *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
            *("properties", "patternProperties", "additionalProperties", "propertyNames", "required"),
            *("minProperties", "maxProperties"),
        }
    ),
    formats=frozenset(FORMATS),
)
"""What `exact_schema` may be able to say; it refuses some combinations."""

_ALL_TYPES = TYPE_NAMES - {"integer"}

Conjunction = tuple[Subschema, ...]
"""Schemas that all hold; none is anything."""


def exact_schema(schema: Schema) -> dict[str, Any]:
    """A schema for xgrammar that accepts nothing that `schema` does not.

    Args:
        schema: one that `check_schema` lets pass.

    Raises:
        GrammarError: xgrammar cannot enforce a keyword, alone or beside others, or nothing satisfies the schema.
    """
    keyword = unenforced_keyword(schema, EXACT)
    if keyword is not None:
        raise NotEnforcedError("xgrammar", keyword)
    writer = _Writer(schema)
    written = writer.write((Subschema("", schema),), 0)
    if written is None:
        raise GrammarError("no value satisfies the schema")
    return writer.whole(written)


@dataclass(frozen=True)
class _Flat:
    """What one schema says without its applicators: one alternative. Fields are as the keywords of those names."""

    place: str
    types: frozenset[str] = _ALL_TYPES  # "number" includes "integer"
    values: tuple[Any, ...] | None = None
    minimum: tuple[float, bool] | None = None  # bool: it is exclusive
    maximum: tuple[float, bool] | None = None
    multiples: tuple[float, ...] = ()
    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction = ()
    min_items: int = 0
    max_items: int | None = None
    properties: dict[str, Conjunction] = field(default_factory=dict)
    by_pattern: dict[str, Conjunction] = field(default_factory=dict)
    additional: Conjunction = ()
    names: Conjunction = ()
    required: tuple[str, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None

    def of_property(self, name: str) -> Conjunction:
        """What the value of a property must be."""
        found = self.properties.get(name)
        schemas = list(found or ())
        is_known = found is not None
        for pattern, conjunction in self.by_pattern.items():
            if _certain_match(self.place, pattern, name):
                is_known = True
                schemas += conjunction
        return _all_of(schemas if is_known else self.additional)

    def item(self, index: int) -> Conjunction:
        return self.prefix[index] if index < len(self.prefix) else self.rest


def _all_of(subschemas: Iterable[Subschema]) -> Conjunction:
    """The same without repetitions and without what is always true."""
    return tuple({_key(s.schema): s for s in subschemas if s.schema is not True and s.schema != {}}.values())


def _key(schema: Schema) -> int | bool:
    return schema if isinstance(schema, bool) else id(schema)


def _refusal(place: str, keyword: str, why: str) -> GrammarError:
    return GrammarError(f"xgrammar does not enforce {place + '.' if place else ''}{keyword}: {why}")


def _read(place: str, keyword: str, pattern: str, *, anywhere: bool = True, in_json: bool = True) -> Pattern:
    try:
        return read_pattern(pattern, anywhere=anywhere, in_json=in_json)
    except GrammarError as error:
        raise GrammarError(f"{place + '.' if place else ''}{keyword}: {pattern!r} {error}") from None


def _certain_match(place: str, pattern: str, text: str) -> bool:
    matches = _read(place, "patternProperties", pattern, in_json=False).matches(text)
    if not matches and not text.isascii() and "\\" in pattern:
        raise _refusal(place, "patternProperties", f"whether {pattern!r} matches {text!r} differs between dialects")
    return matches


def _tighter(a: Any, b: Any, choose: Any) -> Any:
    return b if a is None else a if b is None else choose(a, b)


def _both(a: _Flat, b: _Flat) -> _Flat | None:
    """What holds of both; None where nothing can."""
    types = a.types & b.types
    for one, other in ((a, b), (b, a)):
        if "integer" in one.types and "number" in other.types:
            types |= {"integer"}
    types -= {"integer"} if "number" in types else set()
    values = a.values
    if values is None:
        values = b.values
    elif b.values is not None:
        values = tuple(value for value in values if any(_equal(value, other) for other in b.values))
    if not types or values == ():
        return None
    if (a.by_pattern and b.additional) or (b.by_pattern and a.additional):
        raise _refusal(a.place, "patternProperties", "what it leaves over is restricted by another schema")
    names = dict.fromkeys([*a.properties, *b.properties])
    return replace(
        a,
        types=types,
        values=values,
        minimum=_tighter(a.minimum, b.minimum, max),
        maximum=_tighter(a.maximum, b.maximum, lambda x, y: min(x, y, key=lambda bound: (bound[0], not bound[1]))),
        multiples=tuple(dict.fromkeys(a.multiples + b.multiples)),
        min_length=max(a.min_length, b.min_length),
        max_length=_tighter(a.max_length, b.max_length, min),
        patterns=tuple(dict.fromkeys(a.patterns + b.patterns)),
        formats=tuple(dict.fromkeys(a.formats + b.formats)),
        prefix=tuple(_all_of(a.item(i) + b.item(i)) for i in range(max(len(a.prefix), len(b.prefix)))),
        rest=_all_of(a.rest + b.rest),
        min_items=max(a.min_items, b.min_items),
        max_items=_tighter(a.max_items, b.max_items, min),
        properties={name: _all_of(_declared(a, name) + _declared(b, name)) for name in names},
        by_pattern={
            pattern: _all_of(a.by_pattern.get(pattern, ()) + b.by_pattern.get(pattern, ()))
            for pattern in dict.fromkeys([*a.by_pattern, *b.by_pattern])
        },
        additional=_all_of(a.additional + b.additional),
        names=_all_of(a.names + b.names),
        required=tuple(dict.fromkeys(a.required + b.required)),
        min_properties=max(a.min_properties, b.min_properties),
        max_properties=_tighter(a.max_properties, b.max_properties, min),
    )


def _declared(flat: _Flat, name: str) -> Conjunction:
    """What `properties` says of a name, else what is left for it; `by_pattern` is kept apart."""
    if name in flat.properties:
        return flat.properties[name]
    if any(_certain_match(flat.place, pattern, name) for pattern in flat.by_pattern):
        return ()
    return flat.additional


def _equal(a: Any, b: Any) -> bool:
    """Equality of JSON values, in which true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


class _Writer:
    """Writes the rules for one schema."""

    def __init__(self, root: Schema):
        self._root = root
        self._ignores_beside_ref = ignores_beside_ref(root)
        self._flats: dict[Any, list[_Flat]] = {}
        self._names: dict[Any, str] = {}
        self._numbers = itertools.count()
        self._rules: dict[str, dict[str, Any] | None] = {}
        self._promised: set[str] = set()  # referred to before it was known whether anything satisfies them

    def whole(self, written: dict[str, Any]) -> dict[str, Any]:
        return {**written, "$defs": {name: rule for name, rule in self._rules.items() if rule is not None}}

    def write(self, conjunction: Conjunction, depth: int) -> dict[str, Any] | None:
        """A schema for xgrammar, by a reference if it is a long one; None where nothing satisfies it."""
        if depth > _MAX_DEPTH:
            raise GrammarError(f"its references are nested more than {_MAX_DEPTH} deep")
        conjunction = self._without_detours(_all_of(conjunction))
        if not conjunction:
            return {}
        key = frozenset(_key(subschema.schema) for subschema in conjunction)
        if key in self._names:
            name = self._names[key]
            if name in self._rules and self._rules[name] is None:
                return None
            if name not in self._rules:
                self._promised.add(name)
            return {"$ref": f"#/$defs/{name}"}
        name = self._names[key] = f"r{next(self._numbers)}"
        if len(self._names) > _MAX_RULES:
            raise GrammarError(f"it needs more than {_MAX_RULES} rules")
        rule = self._rule(conjunction, depth)
        if rule is None and name in self._promised:
            raise GrammarError(f"{conjunction[0].place or 'the schema'} refers to itself, and no value satisfies it")
        self._rules[name] = rule
        if rule is None:
            return None
        if name not in self._promised and not rule.keys() & {"properties", "patternProperties", "anyOf", "items"}:
            del self._names[key], self._rules[name]
            return rule
        return {"$ref": f"#/$defs/{name}"}

    def _without_detours(self, conjunction: Conjunction) -> Conjunction:
        """Go through schemas that only refer to another one, so that what they refer to is written once."""
        for _ in range(_MAX_DEPTH):
            if len(conjunction) != 1 or isinstance(conjunction[0].schema, bool):
                return conjunction
            node = conjunction[0].schema
            keywords = asserting_keywords(self._root, node)
            if not keywords:
                return ()
            if keywords == ["$ref"]:
                conjunction = _all_of([resolve(self._root, node["$ref"])])
            elif keywords == ["allOf"]:
                place = conjunction[0].place
                conjunction = _all_of(
                    Subschema(f"{place}.allOf[{index}]".lstrip("."), child) for index, child in enumerate(node["allOf"])
                )
            else:
                return conjunction
        return conjunction

    def _rule(self, conjunction: Conjunction, depth: int) -> dict[str, Any] | None:
        (place, node) = conjunction[0]
        if len(conjunction) == 1 and isinstance(node, dict):
            keywords = asserting_keywords(self._root, node)
            if keywords in (["anyOf"], ["oneOf"]):
                if keywords == ["oneOf"]:
                    self._flatten(conjunction[0], depth)  # sees to it that only one can hold
                return _any_of(
                    [
                        self.write((Subschema(f"{place}.{keywords[0]}[{index}]".lstrip("."), child),), depth + 1)
                        for index, child in enumerate(node[keywords[0]])
                    ]
                )
        written = []
        for flat in self._combined([self._flatten(subschema, depth) for subschema in conjunction], place):
            written += self._write_flat(flat, depth)
        return _any_of(written)

    # --- From schemas to alternatives without applicators ---

    def _combined(self, factors: Sequence[list[_Flat]], place: str) -> list[_Flat]:
        product = factors[0]
        for factor in factors[1:]:
            if len(product) * len(factor) > _MAX_COMBINATIONS:
                raise GrammarError(f"{place or 'the schema'} combines more than {_MAX_COMBINATIONS} alternatives")
            product = [both for a in product for b in factor if (both := _both(a, b)) is not None]
        return product

    def _flatten(self, subschema: Subschema, depth: int) -> list[_Flat]:
        place, node = subschema
        if depth > _MAX_DEPTH:
            raise GrammarError(f"its references are nested more than {_MAX_DEPTH} deep")
        if isinstance(node, bool):
            return [_Flat(place)] if node else []
        if id(node) not in self._flats:
            self._flats[id(node)] = self._flattened(place, node, depth)
        return self._flats[id(node)]

    def _flattened(self, place: str, node: dict[str, Any], depth: int) -> list[_Flat]:
        factors: list[list[_Flat]] = []
        if "$ref" in node:
            factors.append(self._flatten(resolve(self._root, node["$ref"]), depth + 1))
            if self._ignores_beside_ref:
                return factors[0]
        own = _own(place, node)
        if own is None:
            return []
        factors.append([own])
        for keyword in ("allOf", "anyOf", "oneOf"):
            branches = [
                self._flatten(Subschema(f"{place}.{keyword}[{index}]".lstrip("."), child), depth + 1)
                for index, child in enumerate(node.get(keyword, ()))
            ]
            if keyword == "allOf":
                factors += branches
            elif branches:
                if keyword == "oneOf":
                    self._check_exclusive(place, branches, depth)
                factors.append([flat for branch in branches for flat in branch])
        return self._combined(factors, place)

    def _check_exclusive(self, place: str, branches: list[list[_Flat]], depth: int) -> None:
        for index, branch in enumerate(branches):
            for other in branches[:index]:
                if not all(self._are_exclusive(a, b, depth) for a in branch for b in other):
                    raise _refusal(place, "oneOf", "it cannot tell that no value satisfies two of them")

    def _are_exclusive(self, a: _Flat, b: _Flat, depth: int) -> bool:
        """Whether it is evident that nothing satisfies both."""
        both = _both(a, b)
        if both is None:
            return True
        if both.values is not None:
            return not any(self._has_type(value, both) for value in both.values)
        return all(self._is_empty(kind, both, depth) for kind in both.types)

    def _is_empty(self, kind: str, flat: _Flat, depth: int) -> bool:
        if kind in ("integer", "number") and flat.minimum and flat.maximum:
            low, high = flat.minimum, flat.maximum
            return low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))
        if kind == "string":
            return flat.max_length is not None and flat.min_length > flat.max_length
        if kind == "array":
            return flat.max_items is not None and flat.min_items > flat.max_items
        if kind == "object":
            return depth < _MAX_DEPTH and any(
                self._excludes_all(flat.of_property(name), depth + 1) for name in flat.required
            )
        return False

    def _excludes_all(self, conjunction: Conjunction, depth: int) -> bool:
        if not conjunction:
            return False
        flats = self._combined([self._flatten(subschema, depth) for subschema in conjunction], conjunction[0].place)
        return all(
            not any(self._has_type(value, flat) for value in flat.values)
            if flat.values is not None
            else all(self._is_empty(kind, flat, depth) for kind in flat.types)
            for flat in flats
        )

    @staticmethod
    def _has_type(value: Any, flat: _Flat) -> bool:
        kind = _type_of(value)
        return kind in flat.types or (kind == "integer" and "number" in flat.types)

    # --- From an alternative to what xgrammar is told ---

    def _write_flat(self, flat: _Flat, depth: int) -> list[dict[str, Any] | None]:
        if flat.values is not None:
            values = [value for value in flat.values if self._satisfies(value, flat)]
            return [{"enum": values}] if values else []
        written: list[dict[str, Any] | None] = []
        for kind in sorted(flat.types):
            if kind == "array":
                written.append(self._array(flat, depth))
            elif kind == "object":
                written.append(self._object(flat, depth))
            elif kind == "string":
                written.append(_string(flat))
            elif kind in ("integer", "number"):
                written.append(_number(flat, kind))
            else:
                written.append({"type": kind})
        return written

    def _satisfies(self, value: Any, flat: _Flat) -> bool:
        if not self._has_type(value, flat):
            return False
        if isinstance(value, bool) or value is None:
            return True
        if isinstance(value, int | float):
            if abs(value) > _MAX_INTEGER and value == int(value):
                raise _refusal(flat.place, "enum", f"{value} does not fit in 64 bits")
            low, high = flat.minimum, flat.maximum
            return (
                (low is None or value > low[0] or (value == low[0] and not low[1]))
                and (high is None or value < high[0] or (value == high[0] and not high[1]))
                and all(Fraction(value) % Fraction(str(multiple)) == 0 for multiple in flat.multiples)
            )
        if isinstance(value, str):
            if flat.formats:
                raise _refusal(flat.place, "format", "it stands beside 'enum' or 'const'")
            return (
                flat.min_length <= len(value)
                and (flat.max_length is None or len(value) <= flat.max_length)
                and all(_read(flat.place, "pattern", p, in_json=False).matches(value) for p in flat.patterns)
            )
        if isinstance(value, list) and flat.min_items == 0 and flat.max_items is None and not flat.prefix + flat.rest:
            return True
        is_free = not (flat.properties or flat.by_pattern or flat.additional or flat.names or flat.max_properties)
        if isinstance(value, dict) and is_free and flat.min_properties == 0:
            return all(name in value for name in flat.required)
        raise _refusal(flat.place, "enum", "it has lists or maps that other keywords restrict")

    def _array(self, flat: _Flat, depth: int) -> dict[str, Any] | None:
        most = flat.max_items
        prefix: list[dict[str, Any]] = []
        for item in flat.prefix[:most]:
            written = self.write(item, depth + 1)
            if written is None:
                most = len(prefix)
                break
            prefix.append(written)
        rest = None
        if most is None or most > len(prefix):
            rest = self.write(flat.rest, depth + 1)
            if rest is None:
                most = len(prefix)
        if most is not None and flat.min_items > most:
            return None
        if most == 0:
            return {"type": "array", "maxItems": 0}
        array: dict[str, Any] = {"type": "array", "items": False if rest is None else rest}
        if prefix:
            array["prefixItems"] = prefix
        if flat.min_items:
            array["minItems"] = flat.min_items
        if most is not None and rest is not None:
            array["maxItems"] = most
        return array

    def _object(self, flat: _Flat, depth: int) -> dict[str, Any] | None:
        place = flat.place
        declared = list(dict.fromkeys([*flat.properties, *flat.required]))
        allowed_names = self._allowed_names(flat, depth)
        additional = flat.additional
        by_pattern = {}
        for pattern, conjunction in flat.by_pattern.items():
            if _read(place, "patternProperties", pattern).matches_all:
                if len(flat.by_pattern) > 1:
                    raise _refusal(place, "patternProperties", f"{pattern!r} and another match the same names")
                additional = conjunction
            elif conjunction or additional:
                by_pattern[pattern] = conjunction
        if isinstance(allowed_names, list):
            declared += [name for name in allowed_names if name not in declared]
        properties: dict[str, Any] = {}
        for name in declared:
            is_allowed = allowed_names is None or (
                name in allowed_names if isinstance(allowed_names, list) else allowed_names.matches(name)
            )
            written = self.write(flat.of_property(name), depth + 1) if is_allowed else None
            if written is not None:
                properties[name] = written
            elif name in flat.required:
                return None
        is_closed = isinstance(allowed_names, list)
        others = None if is_closed else self.write(additional, depth + 1)
        others_by_name: dict[str, Any] = {}
        if by_pattern and not is_closed:
            if others is not None or isinstance(allowed_names, Pattern):
                raise _refusal(place, "patternProperties", "properties that match none of it are allowed or named too")
            others_by_name = self._by_pattern(flat, by_pattern, declared, depth)
        elif others is not None:
            # Where every key has the same schema, it does not matter how one is spelled.
            is_uniform = all(schema == others for schema in properties.values()) and len(properties) == len(declared)
            if isinstance(allowed_names, Pattern):
                if any(allowed_names.matches(name) for name in declared) and not is_uniform:
                    raise _refusal(place, "propertyNames", "it matches properties that have a schema of their own")
                others_by_name, others = {_whole(allowed_names): others}, None
            elif declared and not is_uniform:
                others_by_name, others = {_whole(text_without(declared)): others}, None
        return self._counted(flat, properties, others_by_name, others)

    @staticmethod
    def _counted(
        flat: _Flat, properties: dict[str, Any], others_by_name: dict[str, Any], others: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        is_open = bool(others_by_name) or others is not None
        least = max(flat.min_properties, len(flat.required))
        if flat.max_properties is not None and least > flat.max_properties:
            return None
        if not is_open and least > len(properties):
            return None
        if flat.min_properties > max(1, len(flat.required)) and is_open:
            # A key that comes twice is one property, but two to xgrammar.
            raise _refusal(flat.place, "minProperties", "keys may repeat where other properties are allowed")
        written: dict[str, Any] = {"type": "object", "additionalProperties": False if others is None else others}
        if properties:
            written["properties"] = properties
        if others_by_name:
            written["patternProperties"] = others_by_name
        if flat.required:
            written["required"] = [name for name in properties if name in flat.required]
        if flat.min_properties:
            written["minProperties"] = flat.min_properties
        if flat.max_properties is not None:
            written["maxProperties"] = flat.max_properties
        return written

    def _by_pattern(
        self, flat: _Flat, by_pattern: dict[str, Conjunction], declared: list[str], depth: int
    ) -> dict[str, Any]:
        written: dict[str, Any] = {}
        for pattern, conjunction in by_pattern.items():
            plain = _read(flat.place, "patternProperties", pattern)
            schema = self.write(conjunction, depth + 1)
            if schema is not None:
                written[_whole(plain)] = schema
        for name in declared:
            if any(_certain_match(flat.place, pattern, name) for pattern in by_pattern):
                raise _refusal(flat.place, "patternProperties", f"it matches {name!r}, which has a schema of its own")
        if len({str(schema) for schema in written.values()}) > 1 or len(written) < len(by_pattern) > 1:
            heads = [pattern[: _literal_length(pattern)] for pattern in by_pattern]
            if any(
                a is not b and (a.startswith(b) or b.startswith(a)) for i, a in enumerate(heads) for b in heads[:i]
            ) or len(set(heads)) < len(heads):
                raise _refusal(flat.place, "patternProperties", "two patterns may match the same name")
        return written

    def _allowed_names(self, flat: _Flat, depth: int) -> Pattern | list[str] | None:
        """Names that `propertyNames` allows; None is all."""
        if not flat.names:
            return None
        text = _Flat(flat.place, types=frozenset({"string"}))
        flats = self._combined([[text], *(self._flatten(names, depth) for names in flat.names)], flat.place)
        if all(names.values is not None for names in flats):
            values = [v for names in flats for v in names.values or () if self._satisfies(v, names)]
            return list(dict.fromkeys(values))
        if len(flats) > 1:
            raise _refusal(flat.place, "propertyNames", "it has alternatives")
        return _text(flats[0])


def _literal_length(pattern: str) -> int:
    """Characters of a pattern that are its anchor and text that each match starts with."""
    if not pattern.startswith("^") or "|" in pattern:
        return 0
    length = 1
    while length < len(pattern) and (pattern[length].isalnum() or pattern[length] in "_-/ :@"):
        length += 1
    # What is repeated may be missing.
    return length - 1 if pattern[length : length + 1] in ("*", "?", "{", "+") and length > 1 else length


def _own(place: str, node: dict[str, Any]) -> _Flat | None:
    """What a schema says itself, without its applicators."""
    types = node.get("type", _ALL_TYPES)
    names = frozenset([types] if isinstance(types, str) else types)
    flat = _Flat(place, types=names - {"integer"} if "number" in names else names)
    values = None
    if "enum" in node:
        values = tuple(node["enum"])
    if "const" in node:
        values = tuple(v for v in values if _equal(v, node["const"])) if values is not None else (node["const"],)
    if values == ():
        return None

    def under(keyword: str, schema: Schema) -> Conjunction:
        return _all_of([Subschema(f"{place}.{keyword}".lstrip("."), schema)])

    items = node.get("items", True)
    prefix = node.get("prefixItems", [])
    if isinstance(items, list):  # draft 7
        prefix, items = items, node.get("additionalItems", True)
    return replace(
        flat,
        values=values,
        minimum=_bound(node, "minimum", "exclusiveMinimum", max),
        maximum=_bound(node, "maximum", "exclusiveMaximum", min),
        multiples=(node["multipleOf"],) if "multipleOf" in node else (),
        min_length=int(node.get("minLength", 0)),
        max_length=int(node["maxLength"]) if "maxLength" in node else None,
        patterns=(node["pattern"],) if "pattern" in node else (),
        formats=(node["format"],) if node.get("format") in FORMATS else (),
        prefix=tuple(under(f"prefixItems[{index}]", child) for index, child in enumerate(prefix)),
        rest=under("items", items),
        min_items=int(node.get("minItems", 0)),
        max_items=int(node["maxItems"]) if "maxItems" in node else None,
        properties={name: under(f"properties.{name}", child) for name, child in node.get("properties", {}).items()},
        by_pattern={
            pattern: under(f"patternProperties.{pattern}", child)
            for pattern, child in node.get("patternProperties", {}).items()
        },
        additional=under("additionalProperties", node.get("additionalProperties", True)),
        names=under("propertyNames", node.get("propertyNames", True)),
        required=tuple(dict.fromkeys(node.get("required", ()))),
        min_properties=int(node.get("minProperties", 0)),
        max_properties=int(node["maxProperties"]) if "maxProperties" in node else None,
    )


def _bound(node: dict[str, Any], keyword: str, exclusive_keyword: str, tighter: Any) -> tuple[float, bool] | None:
    exclusive = node.get(exclusive_keyword)
    bounds = []
    if keyword in node:
        bounds.append((node[keyword], exclusive is True))
    if exclusive is not None and not isinstance(exclusive, bool):
        bounds.append((exclusive, True))
    if not bounds:
        return None
    value = tighter(bound[0] for bound in bounds)
    return value, any(is_exclusive for bound, is_exclusive in bounds if bound == value)


def _any_of(written: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    possible = [schema for schema in written if schema is not None]
    if {} in possible:
        return {}
    if len(possible) > 1:
        return {"anyOf": possible}
    return possible[0] if possible else None


def _whole(pattern: Pattern) -> str:
    """A pattern for xgrammar, which adds nothing to its ends.

    Plain patterns go through automata in which a repetition's end leaks into what is around it: `(?:b{2,})?` also
    matches "b". One with a character beyond ASCII is turned into rules instead, which are exact and, with large counts,
    a hundred times faster to compile. So each gets one, which it repeats no times.
    """
    return f"^{pattern.text}[\U0010fffe]{{0}}$"


def _string(flat: _Flat) -> dict[str, Any] | None:
    text = _text(flat)
    if isinstance(text, list):
        return None
    return {"type": "string"} if text is None else {"type": "string", "pattern": _whole(text)}


def _text(flat: _Flat) -> Pattern | list[str] | None:
    """What a string must match; None is nothing, and an empty list what no string does."""
    if flat.max_length is not None and flat.max_length < flat.min_length:
        return []
    plain = [_read(flat.place, "pattern", pattern) for pattern in flat.patterns]
    plain += [read_pattern(FORMATS[name], in_json=True) for name in flat.formats]
    restricting = list({pattern.text: pattern for pattern in plain if not pattern.matches_all}.values())
    if len(restricting) > 1:
        raise _refusal(flat.place, "format" if flat.formats else "pattern", "it stands beside another pattern")
    if restricting:
        sized = restricting[0].of_length(flat.min_length, flat.max_length)
        if sized is None:
            keyword = "minLength" if restricting[0].min_length < flat.min_length else "maxLength"
            raise _refusal(flat.place, keyword, "it stands beside a pattern or format")
        return sized
    if flat.min_length or flat.max_length is not None:
        return text_of_length(flat.min_length, flat.max_length)
    return plain[0] if plain else None


def _number(flat: _Flat, kind: str) -> dict[str, Any] | None:
    place = flat.place
    multiples = [Fraction(str(multiple)) for multiple in flat.multiples]
    if kind == "number":
        if not multiples:
            return _real(flat)
        if any(multiple.denominator != 1 for multiple in multiples):
            raise _refusal(place, "multipleOf", "it is not a whole number")
    multiple = math.lcm(*(m.numerator for m in multiples))
    if any(m.denominator & (m.denominator - 1) for m in multiples):
        raise _refusal(place, "multipleOf", "validators differ on whether a value is a multiple of it")
    written: dict[str, Any] = {"type": "integer"}
    least = most = None
    if flat.minimum is not None:
        bound, is_exclusive = flat.minimum
        least = written["minimum"] = math.floor(bound) + 1 if is_exclusive else math.ceil(bound)
    if flat.maximum is not None:
        bound, is_exclusive = flat.maximum
        most = written["maximum"] = math.ceil(bound) - 1 if is_exclusive else math.floor(bound)
    for keyword, value in (("minimum", least), ("maximum", most)):
        if value is not None and abs(value) > _MAX_INTEGER:
            raise _refusal(place, keyword, "it does not fit in 64 bits")
    if least is not None and most is not None and least > most:
        return None
    if multiple > 1:
        if multiple > _MAX_MULTIPLE:
            raise _refusal(place, "multipleOf", f"it is above {_MAX_MULTIPLE}")
        if (least is None) != (most is None):
            raise _refusal(place, "multipleOf", "it stands beside one bound without the other")
        if least is not None and most is not None:
            if most - least >= _MAX_MULTIPLE_RANGE:
                raise _refusal(place, "multipleOf", f"its bounds are more than {_MAX_MULTIPLE_RANGE} apart")
            if most // multiple * multiple < least:
                return None
        written["multipleOf"] = multiple
    return written


def _real(flat: _Flat) -> dict[str, Any] | None:
    written: dict[str, Any] = {"type": "number"}
    for keyword, exclusive_keyword, bound in (
        ("minimum", "exclusiveMinimum", flat.minimum),
        ("maximum", "exclusiveMaximum", flat.maximum),
    ):
        if bound is not None:
            value, is_exclusive = bound
            if abs(value) > _MAX_REAL or (Fraction(str(value)) * 10**_DECIMALS).denominator != 1:
                raise _refusal(flat.place, keyword, f"it has more than {_DECIMALS} decimals or is above {_MAX_REAL:g}")
            written[exclusive_keyword if is_exclusive else keyword] = value
    if flat.minimum is not None and flat.maximum is not None:
        (low, low_exclusive), (high, high_exclusive) = flat.minimum, flat.maximum
        if low > high or (low == high and (low_exclusive or high_exclusive)):
            return None
        if low != high and Fraction(str(high)) - Fraction(str(low)) < Fraction(10, 10**_DECIMALS):
            raise _refusal(flat.place, "minimum", "it is too close to the maximum")
    return written
