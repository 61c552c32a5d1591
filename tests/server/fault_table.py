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


@dataclass(frozen=True)
class Fault:
    """One input.

    Attributes:
        row: section and number in the collection of reports the table was made from.
        body: sent as JSON; `raw` instead where it must be bytes.
        statuses: acceptable HTTP statuses.
        param: what error.param must be, where it must be anything.
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
    yield _bad_chat("top_logprobs negative", "B23", "top_logprobs", logprobs=True, top_logprobs=-1)
    yield _good("n=2", "B28", n=2, temperature=1, seed=1)
    yield _good("n=2, streamed", "B28", "stream", n=2, temperature=1, seed=1, stream=True)


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


def _number_rows() -> Iterator[Fault]:
    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in floats:
        for number in ("NaN", "Infinity", "-Infinity", "1e999"):
            raw = f'{{"prompt": "Hi", "{name}": {number}}}'.encode()
            yield Fault(f"{name} {number}", "C37", COMPLETIONS, raw=raw)
        for value in ("NaN", "1.0", [], {}, True):
            yield _bad(f"{name} {value!r}", "C37", name, **{name: value})
    for name, value in (
        ("top_k", -2), ("top_k", 1.5), ("top_p", 2.0), ("top_p", 0), ("top_p", -0.1), ("temperature", -1),
        ("temperature", -0.5), ("min_p", 1.5), ("min_p", -0.1), ("repetition_penalty", 0), ("presence_penalty", 3),
        ("frequency_penalty", -2.5), ("n", 0), ("n", -1), ("n", 512), ("n", 10**6), ("n", 10**30), ("n", "2"),
        ("n", True), ("max_tokens", 2**31), ("max_tokens", -1), ("max_tokens", 10**30), ("max_tokens", "4"),
        ("min_tokens", 5), ("min_tokens", -1), ("seed", 2**64), ("seed", "x"), ("priority", 2**40),
        ("cache_salt", ""), ("cache_salt", "x" * 2000), ("cache_salt", 5), ("stream", "true"), ("stream", 1),
        ("echo", "true"), ("ignore_eos", "no"), ("stop", 5), ("stop", [5]), ("stop", [""]), ("stop", ""),
        ("stop", ["x"] * 100_000), ("stop", "x" * 100_000), ("stream_options", {"include_usage": True}),
        ("stream_options", "usage"), ("model", 5),
    ):  # fmt: skip
        yield _bad(f"{name} {str(value)[:20]}", "C38-C43", name, **{name: value})
    yield _good("top_k -1 is off", "C38", top_k=-1)
    yield _good("temperature 1e6", "C41", temperature=1e6, seed=1)
    yield _good("null means not given", "C38", temperature=None, stop=None, n=None, logit_bias=None, stream=None)


def _text_rows() -> Iterator[Fault]:
    for escape in (rb"\ud83d", rb"\udcf0", rb"\ud83d\u0041", rb"\udc00\ud800"):
        yield Fault(f"prompt {escape!r}", "C46", COMPLETIONS, raw=b'{"prompt": "Hi ' + escape + b'"}')
        chat = b'{"messages": [{"role": "user", "content": "Hi ' + escape + b'"}], "stream": true}'
        yield Fault(f"content {escape!r}, streamed", "C46", CHAT, raw=chat)
        yield Fault(f"key {escape!r}", "C46", COMPLETIONS, raw=b'{"prompt": "Hi", "' + escape + b'": 1}')
    for depth in (100, 1000, 100_000):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        for path in (COMPLETIONS, CHAT, "/tokenize"):
            yield Fault(f"{path} nested {depth} deep", "C47", path, raw=nested)
        listed = b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"
        yield Fault(f"prompt nested {depth} deep", "C47", COMPLETIONS, raw=listed)
    tools = {"type": "function", "function": {"name": "f", "parameters": {}}}
    yield _bad_chat("17 tools", "C52", "tools", tools=[tools] * 17)
    many = list(range(100_000))
    yield _bad("10^5 bad_words", "C49", "bad_words", bad_words=["x"] * 100_000)
    yield _bad("10^5 logit_bias", "C49", "logit_bias", logit_bias={str(i): 1 for i in many})
    yield _bad("10^5 stop_token_ids", "C49", "stop_token_ids", stop_token_ids=[1] * 100_000)
    yield _bad("10^5 allowed_token_ids", "C49", "allowed_token_ids", allowed_token_ids=many)
    yield _bad("10^4 prompts", "C43", "prompt", prompt=["x"] * 10_000)
    yield _bad("100 prompts times n=100", "C43", "n", prompt=["x"] * 100, n=100)
    yield _bad("longer than any context", "C50", "prompt", prompt=[5] * 300_000)
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
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"text": "Hi"}, {"type": 5}, {}):
        yield _bad_chat(f"part {part}", "C53", messages=user([part]))
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
    for name in ("chat_template", "messages", "tokenize", "add_generation_prompt", "tools", "self"):
        yield _bad_chat(f"kwarg {name}", "D56", "chat_template_kwargs", chat_template_kwargs={name: loops})
    both = {"add_generation_prompt": True, "continue_final_message": True}
    yield _bad_chat("generation prompt and continue", "D58", "continue_final_message", **both)
    for name, value in (
        ("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "("}), ("guided_regex", "["),
        ("guided_json", {}), ("tool_choice", "required"), ("functions", [{"name": "f"}]), ("lora_path", "x"),
        ("use_beam_search", True), ("truncate_prompt_tokens", 5), ("suffix", "x"), ("echo", True),
    ):  # fmt: skip
        yield _bad_chat(f"unsupported {name}", "E", name, **{name: value})
    yield _bad("unsupported suffix", "E", "suffix", suffix="tail")
    yield _bad("unsupported best_of", "E", "best_of", best_of=5)
    yield _good_chat("response_format text", "E", response_format={"type": "text"}, tools=[], tool_choice="none")
    yield _good_chat("harmless unknown", "C52", user="me", metadata={"a": "b"}, store=False)


def _stream_rows() -> Iterator[Fault]:
    for options in ({}, {"include_usage": False}, {"include_usage": True}, None):
        yield _good(f"stream_options {options}", "G88/G89", "stream", stream=True, stream_options=options)
        yield _good_chat(f"chat stream_options {options}", "G88/G89", "stream", stream=True, stream_options=options)
    yield _good("stop strings", "A13", stop=["k=1 was", "1"])
    yield _good("stop strings, streamed", "A10", "stream", stop=["fox", "\nUser:"], stream=True)
    for path, body in ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": [{"role": "user", "content": "Hi"}]})):
        yield Fault("no model", "C", path, {"model": None} | body, param="model")
    yield Fault("unknown model", "C", COMPLETIONS, {"model": "no-such", "prompt": "Hi"}, None, (404,), "model")


FAULTS: list[Fault] = [
    *_logprobs_rows(), *_token_rows(), *_number_rows(), *_text_rows(), *_chat_rows(), *_stream_rows(),
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
        _check_stream(stream_chunks(text))
        return
    body = json.loads(text, parse_constant=_not_json)
    if fault.invariant == "error":
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert len(error["message"]) < 2000
        assert fault.param is None or error["param"] == fault.param, error
    elif fault.invariant == "entries":
        logprobs = body["choices"][0]["logprobs"]
        lengths = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert len(lengths) == 1
        assert lengths.pop() >= body["usage"]["prompt_tokens"]
        assert logprobs["token_logprobs"][0] is None
    else:
        assert all(choice["finish_reason"] in ("stop", "length") for choice in body["choices"])
        assert 0 <= body["usage"]["prompt_tokens_details"]["cached_tokens"] < body["usage"]["prompt_tokens"]


def _not_json(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _check_stream(chunks: list[dict[str, Any]]) -> None:
    finishes = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"] is not None]
    indices = {choice["index"] for chunk in chunks for choice in chunk["choices"]}
    assert sorted(finishes) == sorted(indices), "exactly one finish chunk an answer"
    with_usage = [position for position, chunk in enumerate(chunks) if chunk.get("usage") is not None]
    assert with_usage in ([], [len(chunks) - 1])
