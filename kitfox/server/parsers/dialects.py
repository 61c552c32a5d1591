"""The dialects in which models write tool calls. Their forms are the models' own chat templates'."""

from __future__ import annotations

import ast
import re
import secrets
import string

from kitfox.server.parsers.reading import (
    JSON_WORD,
    MAX_ARGUMENTS_DEPTH,
    PYTHON_WORDS,
    MalformedCallError,
    Reading,
    Sink,
    ToolCallParser,
    from_json,
    to_json,
)

_PYTHON_NAME = re.compile(r"[\w.-]*")


class HermesParser(ToolCallParser):
    """Hermes, Qwen and many others: <tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

    openers = ("<tool_call>",)
    marks = ("<tool_call>", "</tool_call>")
    form = '<tool_call>\n{"name": FUNCTION, "arguments": {PARAMETER: VALUE, ...}}\n</tool_call>'
    prefill = ('<tool_call>\n{"name": "', '", "arguments":')

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
    prefill = ("<tool_call>\n<function=", ">")

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
            text = yield from source.take_until("</parameter>")
            value = self._value(name, parameter, text.removeprefix("\n").removesuffix("\n"))
            arguments.append(f"{to_json(parameter)}: {value}")
        yield from source.expect("</function>")
        self._begin_call(name)
        self._add_arguments("{" + ", ".join(arguments) + "}")
        self._end_call()

    def _value(self, name: str, parameter: str, text: str) -> str:
        """The text as JSON: a string, unless the schema wants something else and the text is that."""
        properties = self._schemas.get(name, {}).get("properties", {})
        schema = properties.get(parameter, {})
        if isinstance(schema, dict) and schema.get("type", "string") != "string":
            try:
                return to_json(from_json(PYTHON_WORDS.get(text, text)))
            except MalformedCallError:
                pass
        return to_json(text)


class Llama3JsonParser(ToolCallParser):
    """Llama 3: {"name": ..., "parameters": {...}} is the answer, or comes after <|python_tag|>; more after ";"."""

    openers = ("<|python_tag|>",)
    first_openers = ("{",)
    marks = ("<|python_tag|>",)
    form = '{"name": FUNCTION, "parameters": {PARAMETER: VALUE, ...}}'
    prefill = ('{"name": "', '", "parameters":')

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
    prefill = ('{"name": "', '", "arguments":')

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
    prefill = ('[TOOL_CALLS][{"name": "', '", "arguments":')

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
    prefill = ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>")

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


class PythonicParser(ToolCallParser):
    """Llama 3.2 and 4: [f(a=1, b="x"), g()] is the answer, or stands between marks, as LFM2 has it too."""

    openers = ("<|python_start|>", "<|python_tag|>", "<|tool_call_start|>")
    first_openers = ("[",)
    marks = (*openers, "<|python_end|>", "<|tool_call_end|>")
    form = "[FUNCTION(PARAMETER=VALUE, ...)]"
    prefill = ("[", "(")

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


def _python_to_json(literal: str) -> str:
    if literal in ("true", "false", "null"):
        return literal
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise MalformedCallError from None
    return to_json(value)


class GemmaParser(ToolCallParser):
    """FunctionGemma and Gemma 4: call:name{key:value}, where strings have quotes of their own and keys have none."""

    openers = ("<start_function_call>", "<|tool_call>")
    marks = (*openers, "<end_function_call>", "<escape>", "<tool_call|>", '<|"|>')
    form = "<start_function_call>call:FUNCTION{PARAMETER:VALUE, ...}<end_function_call>"
    prefill = ("<start_function_call>call:", "{")

    def _calls(self, opener: str) -> Reading[None]:
        source = self._source
        quote, closer = {
            "<start_function_call>": ("<escape>", "<end_function_call>"),
            "<|tool_call>": ('<|"|>', "<tool_call|>"),
        }[opener]
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
