"""The dialects in which models write tool calls. Their forms are the models' own chat templates'."""

from __future__ import annotations

import ast
import re
import secrets
import string
from typing import Any

from kitfox.constraint import AnyText, Format, JsonSchema, Mark, Regex, Repeat, Text
from kitfox.errors import UnsupportedParameterError
from kitfox.server.parsers.reading import (
    JSON_WORD,
    MAX_ARGUMENTS_DEPTH,
    PYTHON_WORDS,
    CallBlock,
    Functions,
    MalformedCallError,
    Reading,
    Sink,
    ToolCallParser,
    arguments_format,
    call_and_more,
    is_json,
    repeated_call,
    to_json,
)
from kitfox.server.parsers.values import (
    Schema,
    as_json,
    branches,
    in_order,
    inexpressible,
    json_text,
    length_pattern,
    members_of,
    one_of,
    optional,
    require_only,
    resolved,
    sequence,
    text_without,
    type_of,
    type_of_json,
)

_PYTHON_NAME = re.compile(r"[\w.-]*")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_MAX_SCHEMA_DEPTH = 16  # of schemas that are taken apart


class HermesParser(ToolCallParser):
    """Hermes, Qwen and many others: <tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

    openers = ("<tool_call>",)
    marks = ("<tool_call>", "</tool_call>")
    form = '<tool_call>\n{"name": FUNCTION, "arguments": {PARAMETER: VALUE, ...}}\n</tool_call>'

    @classmethod
    def _blocks(cls, functions: Functions, max_calls: int | None) -> list[CallBlock]:
        call = sequence(
            Text(value="\n"), cls._json_call_format(functions), Text(value="\n"), Mark(value="</tool_call>")
        )
        return [CallBlock(opener="<tool_call>", rest=call_and_more("<tool_call>", call, "\n", max_calls))]

    def _calls(self, opener: str) -> Reading[None]:
        self._source.pos += len(opener)
        yield from self._json_call()
        while not (yield from self._source.skip("</tool_call>")):
            yield from self._json_call()
        self._account()


class QwenXmlParser(ToolCallParser):
    """Qwen3-Coder and 3.5: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>

    Values are bare text: what they are is said by the function's schema.
    """

    openers = ("<tool_call>", "<function=")
    marks = ("<tool_call>", "</tool_call>")
    form = "<tool_call>\n<function=FUNCTION>\n<parameter=PARAMETER>\nVALUE\n</parameter>\n</function>\n</tool_call>"

    @classmethod
    def _blocks(cls, functions: Functions, max_calls: int | None) -> list[CallBlock]:
        call = one_of([_xml_call_format(name, parameters) for name, parameters in functions.items()])
        opener, closer = Mark(value="<tool_call>"), sequence(Text(value="\n"), Mark(value="</tool_call>"))
        closed = sequence(Text(value="\n<function="), call, closer)
        # In free text the tag around a function is text as well: what is read as a call begins with the function.
        between = sequence(optional(closer), Text(value="\n"), optional(sequence(opener, Text(value="\n"))))
        more = Repeat(
            element=sequence(between, Text(value="<function="), call), max_count=0 if max_calls == 1 else None
        )
        return [
            CallBlock(opener="<tool_call>", rest=call_and_more("<tool_call>", closed, "\n", max_calls), in_text=False),
            CallBlock(opener="<function=", rest=sequence(call, more, optional(closer)), when_forced=False),
        ]

    def _calls(self, opener: str) -> Reading[None]:
        source = self._source
        if opener == "<tool_call>":
            source.pos += len(opener)
        yield from self._xml_call()
        while (yield from source.comes("<function=")):
            yield from self._xml_call()
        if opener == "<tool_call>":
            yield from source.expect("</tool_call>")
            self._account()

    def _xml_call(self) -> Reading[None]:
        source = self._source
        yield from source.expect("<function=")
        name = yield from source.take_until(">")
        arguments = []
        while (yield from source.skip("<parameter=")):
            parameter = yield from source.take_until(">")
            properties = self._schemas.get(name, {}).get("properties", {})
            known = _known_branches(properties.get(parameter, {}), self._schemas.get(name, {}))
            text = yield from self._xml_value(is_text=any(type_of(branch) == "string" for branch in known))
            value = _xml_to_json(text.removeprefix("\n").removesuffix("\n"), known)
            arguments.append(f"{to_json(parameter)}: {value}")
        yield from source.expect("</function>")
        self._begin_call(name)
        self._add_arguments("{" + ", ".join(arguments) + "}")
        self._end_call()

    def _xml_value(self, *, is_text: bool) -> Reading[str]:
        """The text before the closing tag. In JSON a string may have that tag inside of it."""
        source = self._source
        text = yield from source.take_until("</parameter>")
        end = source.pos
        whole = text
        while not is_text and _breaks_off_in_string(whole):
            try:
                whole += "</parameter>" + (yield from source.take_until("</parameter>"))
            except MalformedCallError:  # it was no JSON
                source.pos = end
                return text
        return whole


_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def _breaks_off_in_string(text: str) -> bool:
    return '"' in _JSON_STRING.sub("", text)


def _known_branches(schema: Any, root: Schema) -> list[Schema]:
    """What a value may be; a schema that nobody can take apart is one of texts."""
    try:
        return branches(schema, root)
    except UnsupportedParameterError:
        return [{"type": "string"}]


def _xml_to_json(text: str, known: list[Schema]) -> str:
    """The text as JSON: a string, unless the schema wants something else and the text is that."""
    for branch in known:
        if "const" in branch and text in (branch["const"], to_json(branch["const"])):
            return to_json(branch["const"])
    types = {type_of(branch) for branch in known}
    word = PYTHON_WORDS.get(text, text).strip()
    if types == {"string"} or not is_json(word):
        return to_json(text)
    if "string" in types:
        kind = type_of_json(word)
        if kind == "string" or not (kind in types or (kind == "integer" and "number" in types)):
            return to_json(text)
    return word


def _xml_call_format(name: str, parameters: Schema | None) -> Format:
    if parameters is None:
        return sequence(Text(value=f"{name}>"), AnyText(), Text(value="</function>"))
    members = members_of(parameters, parameters, re.compile(r"[^<>\n]+").fullmatch)
    written = []
    for member in members:
        value = _xml_value_format(branches(member.schema, parameters), member.schema, parameters)
        parameter = sequence(Text(value=f"<parameter={member.name}>\n"), value, Text(value="</parameter>\n"))
        written.append(parameter if member.is_required else optional(parameter))
    return sequence(Text(value=f"{name}>\n"), *written, Text(value="</function>"))


_ANY_BARE_TEXT = text_without("</parameter>")


def _xml_value_format(known: list[Schema], schema: Schema, root: Schema) -> Format:
    """A value up to its closing tag: texts are bare, everything else is JSON."""
    line_end = Text(value="\n")
    if all(type_of(branch) != "string" for branch in known):
        return sequence(as_json(schema, root), line_end)
    forms = [_bare_format(branch, root) for branch in known]
    return _ANY_BARE_TEXT if _ANY_BARE_TEXT in forms else one_of(forms)


def _bare_format(branch: Schema, root: Schema) -> Format:
    """One of several schemas of a value, of which some are of texts: what is written can be read as any of them."""
    line_end = Text(value="\n")
    if "const" in branch:
        value = branch["const"]
        text = Text(value=value) if isinstance(value, str) else json_text(value)
        if "</parameter>" in text.value:
            raise inexpressible("enum or const with a closing tag")
        return sequence(text, line_end)
    if type_of(branch) == "string":
        return length_pattern(branch, "[^<]", end="\\n") or _ANY_BARE_TEXT
    if type_of(branch) not in ("null", "boolean", "integer", "number"):
        raise inexpressible(f"strings beside a type {type_of(branch)!r}")
    require_only(branch, "type")
    return sequence(as_json(branch, root), line_end)


class Llama3JsonParser(ToolCallParser):
    """Llama 3: {"name": ..., "parameters": {...}} is the answer, or comes after <|python_tag|>; more after ";"."""

    openers = ("<|python_tag|>",)
    first_openers = ("{",)
    marks = ("<|python_tag|>",)
    form = '{"name": FUNCTION, "parameters": {PARAMETER: VALUE, ...}}'
    other_beginning = r"[ \t\r\n]*[^ \t\r\n{<]"

    @classmethod
    def _blocks(cls, functions: Functions, max_calls: int | None) -> list[CallBlock]:
        calls = repeated_call(cls._json_call_format(functions, "parameters"), "; ", max_calls)
        return [
            CallBlock(opener="", rest=calls),
            CallBlock(opener="<|python_tag|>", rest=calls, when_forced=False),
        ]

    def _calls(self, opener: str) -> Reading[None]:
        if opener != "{":
            self._source.pos += len(opener)
        yield from self._json_call()
        while (yield from self._source.skip(";")):
            yield from self._json_call()


class GenericJsonParser(ToolCallParser):
    """For models without a dialect: the answer is call objects, each by itself, in a list, in a fence or in a tag."""

    openers = ("<tool_call>",)
    first_openers = ("{", "[", "```json")
    marks = ("<tool_call>", "</tool_call>")
    other_beginning = r"[ \t\r\n]*([^ \t\r\n{\[`<]|`[^`]|```[^j])"

    @classmethod
    def _blocks(cls, functions: Functions, max_calls: int | None) -> list[CallBlock]:
        call = cls._json_call_format(functions)
        lines = repeated_call(call, "\n", max_calls)
        in_list = sequence(Text(value="["), repeated_call(call, ", ", max_calls), Text(value="]"))
        in_fence = sequence(Text(value="```json\n"), lines, Text(value="\n```"))
        in_tag = sequence(Text(value="\n"), lines, Text(value="\n"), Mark(value="</tool_call>"))
        return [
            CallBlock(opener="", rest=lines),
            CallBlock(opener="", rest=in_list, when_forced=False),
            CallBlock(opener="", rest=in_fence, when_forced=False),
            CallBlock(opener="<tool_call>", rest=in_tag, when_forced=False),
        ]

    def _calls(self, opener: str) -> Reading[None]:
        source = self._source
        closers = {"```json": ["```"], "<tool_call>": ["</tool_call>"]}.get(opener, [])
        if closers:
            source.pos += len(opener)
        if (yield from source.skip("[")):
            closers.insert(0, "]")
        yield from self._json_call()
        while (yield from source.skip(",")) or (yield from source.comes("{")):
            yield from self._json_call()
        for closer in closers:
            yield from source.expect(closer)
            self._account()


class MistralParser(ToolCallParser):
    """Mistral: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or newer [TOOL_CALLS]name[ARGS]{...}"""

    openers = ("[TOOL_CALLS]",)
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    form = '[TOOL_CALLS][{"name": FUNCTION, "arguments": {PARAMETER: VALUE, ...}}]'

    @classmethod
    def _blocks(cls, functions: Functions, max_calls: int | None) -> list[CallBlock]:
        listed = repeated_call(cls._json_call_format(functions), ", ", max_calls)
        named: list[Format] = [
            sequence(Text(value=name), Mark(value="[ARGS]"), arguments_format(parameters))
            for name, parameters in functions.items()
        ]
        rest = one_of([sequence(Text(value="["), listed, Text(value="]")), *named])
        return [CallBlock(opener="[TOOL_CALLS]", rest=call_and_more("[TOOL_CALLS]", rest, "", max_calls))]

    @staticmethod
    def _make_id() -> str:
        """What Mistral's templates accept: nine letters and digits."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _calls(self, opener: str) -> Reading[None]:
        source = self._source
        source.pos += len(opener)
        first = yield from source.peek_past_space()
        if first == "[":
            source.pos += 1
            yield from self._json_call()
            while (yield from source.skip(",")):
                yield from self._json_call()
            yield from source.expect("]")
            self._account()
        elif first == "{":
            yield from self._json_call()
        else:
            head = yield from source.take_until("[ARGS]", "{")
            if source.text[source.pos - 1] == "{":
                source.pos -= 1
            self._begin_call(head.partition("[CALL_ID]")[0].strip())
            yield from self._arguments()


class DeepSeekParser(ToolCallParser):
    """DeepSeek: V3 and R1 name the function before a fence of JSON, V3.1 before the bare arguments."""

    openers = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    marks = (*openers, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    form = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>FUNCTION<｜tool▁sep｜>{PARAMETER: VALUE, ...}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )

    @classmethod
    def _blocks(cls, functions: Functions, max_calls: int | None) -> list[CallBlock]:
        outer, opener = cls.openers
        between, end = Mark(value="<｜tool▁sep｜>"), Mark(value="<｜tool▁call▁end｜>")
        calls = []
        for separator in ("", "\n"):
            fenced = separator == "\n"
            written = [
                sequence(*_deepseek_call_format(name, parameters, between, fenced=fenced), end)
                for name, parameters in functions.items()
            ]
            calls.append(call_and_more(opener, one_of(written), separator, max_calls))
        bare_or_fenced = one_of(calls)
        in_block = sequence(Mark(value=opener), bare_or_fenced, Mark(value="<｜tool▁calls▁end｜>"))
        return [
            CallBlock(opener=outer, rest=in_block),
            CallBlock(opener=opener, rest=bare_or_fenced, when_forced=False),
        ]

    def _calls(self, opener: str) -> Reading[None]:
        source = self._source
        if opener == self.openers[0]:
            source.pos += len(opener)
        yield from source.expect("<｜tool▁call▁begin｜>")
        yield from self._deepseek_call()
        while (yield from source.skip("<｜tool▁call▁begin｜>")):
            yield from self._deepseek_call()
        if opener == self.openers[0]:
            yield from source.expect("<｜tool▁calls▁end｜>")
            self._account()

    def _deepseek_call(self) -> Reading[None]:
        source = self._source
        name = yield from source.take_until("<｜tool▁sep｜>")
        if (yield from source.peek_past_space()) != "{":  # it was the type, which is always "function"
            name = yield from source.take_until("\n")
            yield from source.expect("```json")
        self._begin_call(name.strip())
        yield from self._arguments()
        yield from source.skip("```")
        yield from source.expect("<｜tool▁call▁end｜>")
        self._account()


def _deepseek_call_format(name: str, parameters: Schema | None, between: Mark, *, fenced: bool) -> list[Format]:
    arguments = arguments_format(parameters)
    if fenced:
        return [Text(value="function"), between, Text(value=f"{name}\n```json\n"), arguments, Text(value="\n```")]
    return [Text(value=name), between, arguments]


class PythonicParser(ToolCallParser):
    """Llama 3.2 and 4: [f(a=1, b="x"), g()] is the answer, or stands between marks, as LFM2 has it too."""

    openers = ("<|python_start|>", "<|python_tag|>", "<|tool_call_start|>")
    first_openers = ("[",)
    marks = (*openers, "<|python_end|>", "<|tool_call_end|>")
    form = "[FUNCTION(PARAMETER=VALUE, ...)]"
    other_beginning = r"[ \t\r\n]*[^ \t\r\n\[<]"

    @classmethod
    def _blocks(cls, functions: Functions, max_calls: int | None) -> list[CallBlock]:
        call = one_of([_python_call_format(name, parameters) for name, parameters in functions.items()])
        listed = sequence(Text(value="["), repeated_call(call, ", ", max_calls), Text(value="]"))
        return [
            CallBlock(opener="", rest=listed),
            CallBlock(opener="<|python_start|>", rest=sequence(listed, Mark(value="<|python_end|>"))),
            CallBlock(opener="<|tool_call_start|>", rest=sequence(listed, Mark(value="<|tool_call_end|>"))),
            CallBlock(opener="<|python_tag|>", rest=listed, when_forced=False),
        ]

    def _calls(self, opener: str) -> Reading[None]:
        source = self._source
        if opener != "[":
            source.pos += len(opener)
        yield from source.expect("[")
        yield from self._python_call()
        while (yield from source.skip(",")):
            yield from self._python_call()
        yield from source.expect("]")
        if opener != "[":
            yield from source.skip("<|python_end|>", "<|tool_call_end|>")
        self._account()

    def _python_call(self) -> Reading[None]:
        source = self._source
        name = yield from self._python_name()
        yield from source.expect("(")
        arguments = []
        while not (yield from source.skip(")")):
            parameter = yield from self._python_name()
            yield from source.expect("=")
            value = yield from self._python_literal()
            arguments.append(f"{to_json(parameter)}: {value}")
            yield from source.skip(",")
        self._begin_call(name)
        self._add_arguments("{" + ", ".join(arguments) + "}")
        self._end_call()

    def _python_name(self) -> Reading[str]:
        source = self._source
        yield from source.peek_past_space()
        name = ""
        while (yield from source.peek()) and (run := source.take_run(_PYTHON_NAME)):
            name += run
        if not name:
            raise MalformedCallError
        return name

    def _python_literal(self) -> Reading[str]:
        """A literal up to the comma or parenthesis behind it, as JSON."""
        source = self._source
        start = source.pos
        num_open = 0
        while character := (yield from source.peek()):
            if character in "\"'":
                yield from self._python_string(character)
                continue
            if num_open == 0 and character in ",)":
                return _python_to_json(source.text[start : source.pos].strip())
            num_open += (character in "[{(") - (character in "]})")
            source.pos += 1
        raise MalformedCallError

    def _python_string(self, quote: str) -> Reading[None]:
        source = self._source
        source.pos += 1
        while character := (yield from source.peek()):
            source.pos += 1
            if character == quote:
                return
            if character == "\\":
                yield from source.peek()
                source.take(1)
        raise MalformedCallError


def _python_call_format(name: str, parameters: Schema | None) -> Format:
    if parameters is None:
        argument = sequence(Regex(pattern=r"[A-Za-z_][A-Za-z0-9_]*="), JsonSchema(schema=True))
        return sequence(Text(value=f"{name}("), Repeat(element=argument, separator=", "), Text(value=")"))
    members = members_of(parameters, parameters, _PLAIN_NAME.fullmatch)
    written = [
        (sequence(Text(value=f"{member.name}="), _python_value_format(member.schema, parameters)), member.is_required)
        for member in members
    ]
    return sequence(Text(value=f"{name}("), in_order(written, ", "), Text(value=")"))


def _python_value_format(schema: Any, root: Schema) -> Format:
    """JSON is read as well as Python; only words that stand alone are Python's own."""
    resolved_schema = resolved(schema, root)
    if resolved_schema.get("type") == "boolean":
        require_only(resolved_schema, "type")
        return one_of([Text(value="True"), Text(value="False")])
    return as_json(schema, root)


def _python_to_json(literal: str) -> str:
    if is_json(literal):
        return literal
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise MalformedCallError from None
    return to_json(value)


# The quote and the closer that belong to each opener.
_GEMMA_MARKS = {
    "<start_function_call>": ("<escape>", "<end_function_call>"),
    "<|tool_call>": ('<|"|>', "<tool_call|>"),
}


class GemmaParser(ToolCallParser):
    """FunctionGemma and Gemma 4: call:name{key:value}, where strings have quotes of their own and keys have none."""

    openers = ("<start_function_call>", "<|tool_call>")
    marks = (*openers, "<end_function_call>", "<escape>", "<tool_call|>", '<|"|>')
    form = "<start_function_call>call:FUNCTION{PARAMETER:VALUE, ...}<end_function_call>"

    @classmethod
    def _blocks(cls, functions: Functions, max_calls: int | None) -> list[CallBlock]:
        blocks = []
        for opener, (quote, closer) in _GEMMA_MARKS.items():
            written = [_gemma_call_format(name, parameters, quote) for name, parameters in functions.items()]
            call = sequence(Text(value="call:"), one_of(written), Mark(value=closer))
            blocks.append(CallBlock(opener=opener, rest=call_and_more(opener, call, "", max_calls)))
        return blocks

    def _calls(self, opener: str) -> Reading[None]:
        source = self._source
        quote, closer = _GEMMA_MARKS[opener]
        source.pos += len(opener)
        yield from source.expect("call:")
        name = yield from source.take_until("{")
        source.pos -= 1
        self._begin_call(name.strip())
        yield from self._gemma_value(quote, self._add_arguments)
        self._end_call()
        yield from source.expect(closer)
        self._account()

    def _gemma_value(self, quote: str, sink: Sink, depth: int = 0) -> Reading[None]:
        source = self._source
        first = yield from source.peek_past_space()
        if depth > MAX_ARGUMENTS_DEPTH:
            raise MalformedCallError
        if first and first in "{[":
            source.pos += 1
            closer = "}" if first == "{" else "]"
            before = first
            while not (yield from source.skip(closer)):
                if first == "{":
                    key = yield from self._gemma_word(quote, ":")
                    yield from source.expect(":")
                    sink(f"{before}{to_json(_unquoted(key, quote))}: ")
                else:
                    sink(before)
                yield from self._gemma_value(quote, sink, depth + 1)
                before = ", "
                yield from source.skip(",")
            sink(first + closer if before == first else closer)
            return
        word = yield from self._gemma_word(quote, ",}]")
        sink(_gemma_to_json(word, quote))

    def _gemma_word(self, quote: str, ends: str) -> Reading[str]:
        """Text up to one of some characters outside of quotes, the quotes included."""
        source = self._source
        yield from source.peek_past_space()
        parts: list[str] = []
        while character := (yield from source.peek()):
            if (yield from source.at(quote)):
                source.pos += len(quote)
                parts.append(quote + (yield from source.take_until(quote)) + quote)
            elif character in ends:
                return "".join(parts).strip()
            else:
                parts.append(source.take(1))
        raise MalformedCallError


def _unquoted(word: str, quote: str) -> str:
    return word.removeprefix(quote).removesuffix(quote)


def _gemma_to_json(word: str, quote: str) -> str:
    """A quoted word is text; a bare one is what JSON takes it for, or else text as well."""
    if not word:
        raise MalformedCallError
    if not word.startswith(quote):
        word_in_json = PYTHON_WORDS.get(word, word)
        if JSON_WORD.fullmatch(word_in_json):
            return word_in_json
    return to_json(_unquoted(word, quote))


def _gemma_call_format(name: str, parameters: Schema | None, quote: str) -> Format:
    if parameters is None:
        return sequence(Text(value=f"{name}{{"), AnyText())
    return sequence(Text(value=name), _gemma_object_format(parameters, parameters, quote, 0))


def _gemma_object_format(schema: Schema, root: Schema, quote: str, depth: int) -> Format:
    written = [
        (
            sequence(Text(value=f"{member.name}:"), _gemma_value_format(member.schema, root, quote, depth + 1)),
            member.is_required,
        )
        for member in members_of(schema, root, _PLAIN_NAME.fullmatch)
    ]
    return sequence(Text(value="{"), in_order(written, ","), Text(value="}"))


def _gemma_value_format(schema: Any, root: Schema, quote: str, depth: int) -> Format:
    if depth > _MAX_SCHEMA_DEPTH:
        raise inexpressible("$ref in a circle")
    return one_of([_gemma_branch_format(branch, root, quote, depth) for branch in branches(schema, root)])


def _gemma_branch_format(branch: Schema, root: Schema, quote: str, depth: int) -> Format:
    mark = Mark(value=quote)
    if "const" in branch:
        value = branch["const"]
        if isinstance(value, dict | list):
            raise inexpressible("enum or const of objects or lists")
        return sequence(mark, Text(value=value), mark) if isinstance(value, str) else json_text(value)
    kind = type_of(branch)
    if kind == "string":
        return sequence(mark, length_pattern(branch, "[^<]") or text_without(quote), mark)
    if kind == "object":
        if not branch.get("properties"):
            raise inexpressible("objects without properties")
        return _gemma_object_format(branch, root, quote, depth)
    if kind == "array":
        require_only(branch, "type", "items", "minItems", "maxItems")
        if "items" not in branch:
            raise inexpressible("arrays without items")
        item = _gemma_value_format(branch["items"], root, quote, depth + 1)
        low, high = branch.get("minItems", 0), branch.get("maxItems")
        items = Repeat(element=item, separator=",", min_count=low, max_count=high)
        return sequence(Text(value="["), items, Text(value="]"))
    return as_json(branch, root)
