"""Inputs that broke other servers, with what a correct one does. Usable against any server: nothing here needs kitfox.

Each row is sent as it is; afterwards a known-good request must still get the text it got before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TOO_LONG = "context_length_exceeded"
FINISH_REASONS = ("stop", "length", "tool_calls", "repetition")


@dataclass(frozen=True)
class Fault:
    """One input.

    Attributes:
        row: section and number in the collection of reports the table was made from.
        body: sent as JSON; `raw` instead where it must be bytes.
        statuses: acceptable HTTP statuses.
        param, code: what error.param and error.code must be, where they must be anything.
        invariant: what must hold beyond the status: "" or one of "error" (an OpenAI error body), "completion",
            "chat", "stream", "entries" (one logprobs entry a prompt token).
    """

    name: str
    row: str
    path: str
    body: dict[str, Any] | None = None
    raw: bytes | None = None
    statuses: tuple[int, ...] = (400,)
    param: str | None = None
    invariant: str = "error"
    code: str | None = None

    def content(self, model: str) -> bytes:
        """The bytes to send; model is the served name, which a body that names none gets."""
        return self.raw if self.raw is not None else json.dumps({"model": model} | (self.body or {})).encode()


def _bad(name: str, row: str, param: str | None = None, **fields: Any) -> Fault:
    return Fault(name, row, COMPLETIONS, {"prompt": "Hi", "max_tokens": 4} | fields, param=param)


def _bad_chat(name: str, row: str, param: str | None = None, **fields: Any) -> Fault:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4} | fields
    return Fault(name, row, CHAT, body, param=param)


def _good(name: str, row: str, invariant: str = "completion", **fields: Any) -> Fault:
    body = {"prompt": "Hi", "max_tokens": 4, "temperature": 0} | fields
    return Fault(name, row, COMPLETIONS, body, statuses=(200,), invariant=invariant)


def _good_chat(name: str, row: str, invariant: str = "chat", **fields: Any) -> Fault:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0} | fields
    return Fault(name, row, CHAT, body, statuses=(200,), invariant=invariant)


def _logprobs_rows() -> Iterator[Fault]:
    yield _good("echo, logprobs, max_tokens 0", "B16", "entries", echo=True, logprobs=1, max_tokens=0)
    yield _good("echo, logprobs, seed, max_tokens 1", "B19", "entries", echo=True, logprobs=1, max_tokens=1, seed=1234)
    yield _good("echo of token ids", "B17", prompt=[72, 105], echo=True)
    yield _good("echo of token ids with logprobs", "B17", "entries", prompt=[72, 105], echo=True, logprobs=1)
    yield _good("echo, logprobs, streamed", "B20", "stream", echo=True, logprobs=1, stream=True)
    yield _good_chat("chat logprobs with a stop string", "B22", logprobs=True, stop=["e"])
    yield _good_chat("chat top_logprobs, streamed", "B22", "stream", logprobs=True, top_logprobs=2, stream=True)
    yield _good("prompt_logprobs alone", "B25", prompt_logprobs=1)
    yield _bad("prompt_logprobs -1", "B26", "prompt_logprobs", prompt_logprobs=-1)
    yield _bad("prompt_logprobs huge", "B26", "prompt_logprobs", prompt_logprobs=10**6)
    yield _bad("logprobs huge", "B26", "logprobs", logprobs=10**6)
    yield _bad("logprobs as a boolean", "B23", "logprobs", logprobs=True)
    yield _bad_chat("top_logprobs without logprobs", "B23", "top_logprobs", top_logprobs=2)
    yield _bad_chat("top_logprobs negative", "B23", "top_logprobs", logprobs=True, top_logprobs=-2)
    yield _bad_chat("top_logprobs of the whole vocabulary", "B26", "logprobs", logprobs=True, top_logprobs=-1)
    yield _bad("logprobs of the whole vocabulary", "B26", "logprobs", logprobs=-1)
    yield _bad("prompt_logprobs -2", "B26", "prompt_logprobs", prompt_logprobs=-2)
    yield _good("logprob_token_ids", "B25", "entries", echo=True, logprobs=1, logprob_token_ids=[65, 66])
    yield _good("logprob_token_ids, streamed", "B20", "stream", logprob_token_ids=[65], stream=True)
    yield _good("tokens as ids", "B23", "entries", echo=True, logprobs=1, return_tokens_as_token_ids=True)
    yield _good("n=2", "B28", n=2, temperature=1, seed=1)
    yield _good("n=2, streamed", "B28", "stream", n=2, temperature=1, seed=1, stream=True)
    yield _good_chat("n=2 of a chat, streamed", "B28", "stream", n=2, temperature=1, seed=1, stream=True)


def _token_rows() -> Iterator[Fault]:
    for prompt in ([-1], [[-1]], [10**18], [10**9], [[72], [10**30]]):
        yield _bad(f"prompt {prompt}", "C31/C32", "prompt", prompt=prompt)
    for prompt in ("", [], [[]], [""], 7, {}, True, [True], [72, "Hi"], ["Hi", [72]], [1.5], [None], [[[72]]]):
        yield _bad(f"prompt {prompt!r}", "C31", "prompt", prompt=prompt)
    yield Fault("no prompt", "C31", COMPLETIONS, {"max_tokens": 4}, param="prompt")
    yield Fault("prompt null", "C31", COMPLETIONS, {"prompt": None}, param="prompt")
    for bias in ({"999999999": -100}, {"abc": 1}, {"-1": 1}, {"5": 1e9}, {"5": "x"}, {"5": True}, {" 5": 1}, [5]):
        yield _bad(f"logit_bias {bias}", "C34", "logit_bias", logit_bias=bias)
    for ids in ([10**9], [-1], [10**30], ["x"], [True]):
        yield _bad(f"stop_token_ids {ids}", "C35", "stop_token_ids", stop_token_ids=ids, min_tokens=1)
        yield _bad(f"allowed_token_ids {ids}", "C35", "allowed_token_ids", allowed_token_ids=ids)
        yield _bad(f"logprob_token_ids {ids}", "C35", "logprob_token_ids", logprob_token_ids=ids)


def _number_rows() -> Iterator[Fault]:
    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in floats:
        for number in ("NaN", "Infinity", "-Infinity", "1e999"):
            raw = f'{{"prompt": "Hi", "{name}": {number}}}'.encode()
            yield Fault(f"{name} {number}", "C37", COMPLETIONS, raw=raw)
        for value in ("NaN", "1.0", [], {}, True):
            yield _bad(f"{name} {value!r}", "C37", name, **{name: value})
        yield _bad_chat(f"{name} of a chat NaN", "C37", name, **{name: "NaN"})
    yield Fault("logit_bias NaN", "C37", COMPLETIONS, raw=b'{"prompt": "Hi", "logit_bias": {"5": NaN}}')
    tools = b'[{"type": "function", "function": {"name": "f", "parameters": {"minimum": -Infinity}}}]'
    chat = b'{"messages": [{"role": "user", "content": "Hi"}], "tools": ' + tools + b"}"
    yield Fault("-Infinity in a tool", "C37", CHAT, raw=chat)
    for name, value in (
        ("top_k", -2), ("top_k", 1.5), ("top_p", 2.0), ("top_p", 0), ("top_p", -0.1), ("temperature", -1),
        ("temperature", -0.5), ("min_p", 1.5), ("min_p", -0.1), ("repetition_penalty", 0), ("presence_penalty", 3),
        ("frequency_penalty", -2.5), ("n", 0), ("n", -1), ("n", 512), ("n", 10**6), ("n", 10**30), ("n", "2"),
        ("n", True), ("max_tokens", 2**31), ("max_tokens", -1), ("max_tokens", 10**30), ("max_tokens", "4"),
        ("min_tokens", 5), ("min_tokens", -1), ("seed", 2**64), ("seed", "x"), ("priority", 2**40),
        ("cache_salt", ""), ("cache_salt", "x" * 2000), ("cache_salt", 5), ("stream", "true"), ("stream", 1),
        ("echo", "true"), ("ignore_eos", "no"), ("stop", 5), ("stop", [5]), ("stop", [""]), ("stop", ""),
        ("stop", ["x"] * 100_000), ("stop", "x" * 100_000), ("stream_options", {"include_usage": True}),
        ("stream_options", "usage"), ("model", 5), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", "x"), ("truncation_side", "middle"), ("truncation_side", 1),
        ("stream_interval", 0), ("stream_interval", 10**9), ("extra_key", ""), ("extra_key", "x" * 2000),
        ("repetition_detection", {}), ("repetition_detection", {"max_pattern_size": 10**9}),
        ("repetition_detection", {"max_pattern_size": 4, "min_count": 1}), ("repetition_detection", 3),
        ("bad_words", "x"), ("bad_words", [""]), ("bad_words", ["x" * 10_000]), ("bad_words", [5]),
        ("no_stop_trim", "yes"), ("rid", 5), ("return_prompt_text", 1),
    ):  # fmt: skip
        yield _bad(f"{name} {str(value)[:20]}", "C38-C43", name, **{name: value})
    yield _bad("rid too long", "C44", "request_id", rid="x" * 1000)
    yield _bad("rid and another request_id", "C44", "rid", rid="x", request_id="y")
    yield _good("top_k -1 is off", "C38", top_k=-1)
    yield _good("temperature 1e6", "C41", temperature=1e6, seed=1)
    yield _good("null means not given", "C38", temperature=None, stop=None, n=None, logit_bias=None, stream=None)


def _stop_regex_rows() -> Iterator[Fault]:
    for pattern in (
        "(", "[", "(?<=a)b", "(?=a)b", r"(a)\1", "(?m)x$^", r"\bx", "a*", "", "(" * 500, "(?:a{1000}){1000}", "a" * 300,
        "a{99999999999}", "(?P<n>a)(?(n)b|c)", 5, ["x", 5], ["x"] * 40, ["x" * 40] * 30,
    ):  # fmt: skip
        yield _bad(f"stop_regex {str(pattern)[:20]}", "E59/D49", "stop_regex", stop_regex=pattern)
    for pattern in ("x$", "(a+)+b", "(a|a)*b", "(.*)*(.*)*b", r"\s*\s*\s*\s*b"):
        yield _good(f"stop_regex {pattern}", "D49", stop_regex=pattern, prompt="a" * 100)
        yield _good_chat(f"stop_regex {pattern}, streamed", "D49", "stream", stop_regex=[pattern], stream=True)


def _text_rows() -> Iterator[Fault]:
    for escape in (rb"\ud83d", rb"\udcf0", rb"\ud83d\u0041", rb"\udc00\ud800"):
        yield Fault(f"prompt {escape!r}", "C46", COMPLETIONS, raw=b'{"prompt": "Hi ' + escape + b'"}')
        chat = b'{"messages": [{"role": "user", "content": "Hi ' + escape + b'"}], "stream": true}'
        yield Fault(f"content {escape!r}, streamed", "C46", CHAT, raw=chat)
        yield Fault(f"key {escape!r}", "C46", COMPLETIONS, raw=b'{"prompt": "Hi", "' + escape + b'": 1}')
        function = b'{"name": "f", "description": "' + escape + b'"}'
        tools = b'"tools": [{"type": "function", "function": ' + function + b"}]}"
        user = b'{"messages": [{"role": "user", "content": "Hi"}'
        yield Fault(f"tool {escape!r}", "C46", CHAT, raw=user + b"], " + tools)
        user += b', {"role": "assistant", "tool_calls": ['
        call = b'{"id": "c", "function": {"name": "f", "arguments": "' + escape + b'"}}'
        yield Fault(f"call {escape!r}", "C46", CHAT, raw=user + call + b"]}]}")
    for depth in (100, 1000, 100_000):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        for path in (COMPLETIONS, CHAT, "/tokenize"):
            yield Fault(f"{path} nested {depth} deep", "C47", path, raw=nested)
        listed = b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"
        yield Fault(f"prompt nested {depth} deep", "C47", COMPLETIONS, raw=listed)
        tools = b'[{"type": "function", "function": {"name": "f", "parameters": ' + nested + b"}}]"
        chat = b'{"messages": [{"role": "user", "content": "Hi"}], "tools": ' + tools + b"}"
        yield Fault(f"parameters nested {depth} deep", "C47", CHAT, raw=chat)
    many = list(range(100_000))
    yield _bad("10^5 bad_words", "C49", "bad_words", bad_words=["x"] * 100_000)
    yield _bad("10^5 logit_bias", "C49", "logit_bias", logit_bias={str(i): 1 for i in many})
    yield _bad("10^5 stop_token_ids", "C49", "stop_token_ids", stop_token_ids=[1] * 100_000)
    yield _bad("10^5 allowed_token_ids", "C49", "allowed_token_ids", allowed_token_ids=many)
    yield _bad("10^5 logprob_token_ids", "C49", "logprob_token_ids", logprobs=1, logprob_token_ids=[1] * 100_000)
    yield _bad("10^5 stop_regex", "C49", "stop_regex", stop_regex=["x"] * 100_000)
    yield _good("truncated to fit", "C50", prompt=[5] * 300_000, truncate_prompt_tokens=-1)
    yield _good("truncated", "C50", prompt="x" * 5000, truncate_prompt_tokens=3, truncation_side="right")
    yield _bad("10^4 prompts", "C43", "prompt", prompt=["x"] * 10_000)
    yield _bad("100 prompts times n=100", "C43", "n", prompt=["x"] * 100, n=100)
    for prompt, param in (([5] * 300_000, "prompt"), ([5], "max_tokens")):
        body = {"prompt": prompt, "max_tokens": 300_000}
        yield Fault(f"longer than any context: {param}", "C50", COMPLETIONS, body, param=param, code=TOO_LONG)
    body = {"messages": [{"role": "user", "content": "a " * 300_000}]}
    yield Fault("a chat longer than any context", "C50", CHAT, body, param="prompt", code=TOO_LONG)
    for raw in (b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"prompt": "Hi",}', b'{"prompt": "\xed\xa0\x80"}'):
        yield Fault(f"body {raw!r}", "C37", COMPLETIONS, raw=raw)


def _chat_rows() -> Iterator[Fault]:
    def user(content: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": content}]

    text = {"type": "text", "text": "Hi"}
    yield _good_chat("one text part", "C53", messages=user([text]))
    yield _good_chat("two text parts", "C53", messages=user([text, text]))
    yield _good_chat("no parts", "C53", messages=user([]))
    yield _good_chat("developer", "C53", messages=[{"role": "developer", "content": "Be brief."}, *user("Hi")])
    mixed = [{"role": "system", "content": [text]}, *user("Hi"), {"role": "assistant", "content": [text, text]}]
    yield _good_chat("parts and texts in turns", "C53", messages=[*mixed, *user([text])])
    yield _good_chat("parts of the assistant", "C53", messages=[*mixed[1:], *user("Hi")])
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    yield _bad_chat("part image_url", "C53", "messages[0].content[1].type", messages=user([text, picture]))
    for kind in ("input_audio", "video_url", "file", "refusal", "wizard"):
        part = {"type": kind, kind: {"url": "x"}}
        yield _bad_chat(f"part {kind}", "C53", "messages[0].content.type", messages=user([text, part]))
    for part, param in (
        ({"type": "text"}, "messages[0].content.text"), ({"text": "Hi"}, "messages[0].content.type"),
        ({"type": 5}, "messages"), ({}, "messages[0].content.type"), ("Hi", "messages"),
    ):  # fmt: skip
        yield _bad_chat(f"part {part}", "C53", param, messages=user([part]))
    for messages in (
        [],
        "Hi",
        [5],
        [{}],
        [{"role": "user"}],
        [{"role": "wizard", "content": "Hi"}],
        user(5),
        user([5]),
    ):
        yield _bad_chat(f"messages {messages}", "C53", messages=messages)
    yield Fault("no messages", "C53", CHAT, {"max_tokens": 4}, param="messages")
    loops = "{% for a in range(10**9) %}{% for b in range(10**9) %}{% endfor %}{% endfor %}"
    yield _bad_chat("chat_template", "D56", "chat_template", chat_template=loops)
    yield _bad("chat_template of a completion", "D56", "chat_template", chat_template=loops)
    hello = {"messages": user("Hi")}
    yield Fault("/tokenize chat_template", "D56", "/tokenize", hello | {"chat_template": loops}, param="chat_template")
    for name in ("chat_template", "messages", "tokenize", "add_generation_prompt", "tools", "self"):
        kwargs = {"chat_template_kwargs": {name: loops}}
        yield _bad_chat(f"kwarg {name}", "D56", "chat_template_kwargs", **kwargs)
        yield Fault(f"/tokenize kwarg {name}", "D56", "/tokenize", hello | kwargs, param="chat_template_kwargs")
    both = {"add_generation_prompt": True, "continue_final_message": True}
    yield _bad_chat("generation prompt and continue", "D58", "continue_final_message", **both)
    asked = {"messages": [*user("Hi"), {"role": "assistant", "content": "So"}]}
    yield _bad_chat("generation prompt and an answer to continue", "D58", "continue_final_message", **asked, **both)
    body = asked | both
    yield Fault("/tokenize generation prompt and continue", "D58", "/tokenize", body, param="continue_final_message")
    yield _bad_chat("continue the user", "D58", "continue_final_message", continue_final_message=True)
    yield from _tool_rows()
    for name, value in (
        ("tool_choice", "required"), ("functions", [{"name": "f"}]), ("lora_path", "x"),
        ("use_beam_search", True), ("beam_width", 4), ("thinking_token_budget", 5), ("suffix", "x"), ("echo", True),
    ):  # fmt: skip
        yield _bad_chat(f"unsupported {name}", "E", name, **{name: value})
    yield _bad("unsupported suffix", "E", "suffix", suffix="tail")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    any_json = {"type": "json_object"}
    yield _good("stop beside JSON mode", "A8", stop="\nUser:", response_format=any_json)
    yield _good_chat("stop beside a schema", "A8", stop="\nUser:", response_format=schema)
    yield _bad("unsupported best_of", "E", "best_of", best_of=5)
    yield _good_chat("response_format text", "E", response_format={"type": "text"}, tools=[], tool_choice="none")
    yield _good_chat("harmless unknown", "C52", user="me", metadata={"a": "b"}, store=False)


def _tool_rows() -> Iterator[Fault]:
    def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, **function}}

    named = {"type": "function", "function": {"name": "f"}}
    yield _good_chat("17 tools", "C52", tools=[tool(f"f{i}", parameters={}) for i in range(17)])
    large = [tool(f"f{i}", description="word " * 2000, parameters={"type": "object"}) for i in range(40)]
    yield _good_chat("40 tools in a large body", "C52", tools=large, tool_choice="none")
    yield _bad_chat("10^3 tools", "C49", "tools", tools=[tool(f"f{i}") for i in range(1000)])
    yield _bad_chat("two tools of one name", "F85", "tools[1].function.name", tools=[tool(), tool()])
    for name in ("", "a b", "x" * 65, "f\n", "<|im_end|>"):
        yield _bad_chat(f"tool name {name!r}", "F85", "tools[0].function.name", tools=[tool(name)])
    for bad in (5, [], {}, {"type": "function"}, tool(5), tool(parameters=[]), tool(parameters="x")):
        yield _bad_chat(f"tool {bad}", "F85", "tools", tools=[bad])
    yield _bad_chat("a tool of another type", "F85", "tools[0].type", tools=[tool() | {"type": "custom"}])
    place = "tools[0].function.parameters"
    float_type = {"type": "object", "properties": {"x": {"type": "float"}}}
    yield _bad_chat("type float", "F85", f"{place}.properties.x.type", tools=[tool(parameters=float_type)])
    yield _bad_chat("parameters of an array", "F85", f"{place}.type", tools=[tool(parameters={"type": "array"})])
    for choice in ("any", 5, [], {}, {"type": "function"}, {"type": "function", "function": {"name": "g"}}):
        yield _bad_chat(f"tool_choice {choice}", "F83", "tool_choice", tools=[tool()], tool_choice=choice)
    yield _bad_chat("tool_choice of no tools", "F83", "tool_choice", tool_choice=named)
    yield _good_chat("tool_choice auto", "F83", tools=[tool()], tool_choice="auto")
    yield _good_chat("tools that are not to be used", "F83", tools=[tool()], tool_choice="none")
    yield _good_chat("tools, streamed", "F83", "stream", tools=[tool()], stream=True)
    user = {"role": "user", "content": "Hi"}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked = [user, {"role": "assistant", "content": None, "tool_calls": [call]}]
    yield _good_chat("a tool loop", "F", messages=[*asked, {"role": "tool", "tool_call_id": "c1", "content": "2"}])
    old = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    result = {"role": "function", "name": "f", "content": "2"}
    yield _good_chat("a loop in the deprecated form", "F", messages=[user, old, result])
    yield _bad_chat("calls of a user", "F", "messages[0].tool_calls", messages=[user | {"tool_calls": [call]}])
    for bad_call in (5, {}, {"function": {}}, {"function": {"name": "f", "arguments": 5}}):
        message = {"role": "assistant", "tool_calls": [bad_call]}
        yield _bad_chat(f"call {bad_call}", "F", "messages", messages=[user, message])
    yield _bad_chat("a tool's message without content", "F", "messages[0].content", messages=[{"role": "tool"}])


def _stream_rows() -> Iterator[Fault]:
    for options in ({}, {"include_usage": False}, {"include_usage": True}, None):
        yield _good(f"stream_options {options}", "G88/G89", "stream", stream=True, stream_options=options)
        yield _good_chat(f"chat stream_options {options}", "G88/G89", "stream", stream=True, stream_options=options)
    for fields in ({"stop_regex": r"qu[a-z]+"}, {"repetition_detection": {"max_pattern_size": 3}}):
        yield _good(f"{fields}", "A8", **fields)
        yield _good(f"{fields}, streamed", "A8", "stream", stream=True, **fields)
    for interval in (1, 3, 1000):
        yield _good(f"stream_interval {interval}", "G88", "stream", stream=True, stream_interval=interval)
    stops: tuple[str | list[str], ...] = ("beta gamma", "\nUser:", ["Observation", "e"], "Pari", ["k=1 was", "1"])
    for stop in stops:
        for make in (_good, _good_chat):
            yield make(f"stop {stop!r}", "A7-A14", stop=stop)
            yield make(f"stop {stop!r}, streamed", "A7-A14", "stream", stop=stop, stream=True)
    for path, body in ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": [{"role": "user", "content": "Hi"}]})):
        yield Fault("no model", "C", path, {"model": None} | body, param="model")
    yield Fault("unknown model", "C", COMPLETIONS, {"model": "no-such", "prompt": "Hi"}, None, (404,), "model")


FAULTS: list[Fault] = [
    *_logprobs_rows(), *_token_rows(), *_number_rows(), *_stop_regex_rows(), *_text_rows(), *_chat_rows(),
    *_stream_rows(),
]  # fmt: skip


def stream_chunks(text: str) -> list[dict[str, Any]]:
    """The JSON of a server-sent stream; its last event must be [DONE] and come once."""
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    return [json.loads(event) for event in events[:-1]]


def check_fault(fault: Fault, status: int, text: str) -> None:
    """Assert that an answer to a fault is a correct one."""
    assert status in fault.statuses, f"{fault.row} {fault.name}: {status} {text[:300]}"
    assert "Traceback" not in text
    if fault.invariant == "stream":
        options = (fault.body or {}).get("stream_options") or {}
        _check_stream(stream_chunks(text), wants_usage=bool(options.get("include_usage")))
        return
    body = json.loads(text, parse_constant=_not_json)
    if fault.invariant == "error":
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert len(error["message"]) < 2000
        assert fault.param is None or error["param"] == fault.param, error
        assert fault.code is None or error["code"] == fault.code, error
        assert error["param"] != "model" or fault.param == "model", error
    elif fault.invariant == "entries":
        logprobs = body["choices"][0]["logprobs"]
        lengths = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert len(lengths) == 1
        assert lengths.pop() >= body["usage"]["prompt_tokens"]
        assert logprobs["token_logprobs"][0] is None
    else:
        assert all(choice["finish_reason"] in FINISH_REASONS for choice in body["choices"])
        _check_usage(body["usage"])


def _check_usage(usage: dict[str, Any]) -> None:
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def _not_json(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _check_stream(chunks: list[dict[str, Any]], *, wants_usage: bool) -> None:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    finishes = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
    assert sorted(finishes) == sorted({choice["index"] for choice in choices}), "exactly one finish chunk an answer"
    assert {choice["finish_reason"] for choice in choices} <= {None, *FINISH_REASONS}
    with_usage = [position for position, chunk in enumerate(chunks) if chunk.get("usage") is not None]
    assert with_usage == ([len(chunks) - 1] if wants_usage else [])
    if wants_usage:
        assert chunks[-1]["choices"] == []
        _check_usage(chunks[-1]["usage"])
