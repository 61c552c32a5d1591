"""Structured output over HTTP: is every answer that says it is whole what its schema asks for?

Starts a server, asks for an answer to each schema, eight at a time, and has `jsonschema` read what comes:

    python -m benchmarks.structured_answers --data DIR [--model tiny|smollm2-135m] [--server-flags "..."]

The tiny model has random weights: whatever the masks let pass, it says sooner or later. Texts would go on for ever, so
each schema is asked for again with a bias towards what closes texts, lists and objects, and again with one towards
digits and marks. With `--calls` schemas are those of a function's parameters, and every call is streamed too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any, NoReturn

import httpx
import jsonschema  # type: ignore[import-untyped]

from benchmarks.grammar_masks import SUITES, Case, load_suite
from benchmarks.paths import default_gguf
from kitfox.tokenizer import load_tokenizer

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
CONCURRENCY = 8
CLOSERS = ['"', '",', '"}', '"]', '":', "}", "]", "}}", "]}", ","]
CLOSING_BIAS = 9.0  # e^9 is a sixth of the vocabulary's size
ASCII_MARKS = "".join(chr(code) for code in range(0x20, 0x7F) if not chr(code).isalpha())
MARKS_BIAS = 6.0
TIMEOUT_S = 300.0
MODEL = "answers"
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER  # has all of them, whatever draft a schema is


@dataclass
class Answer:
    """What came of one request.

    Attributes:
        outcome: "stop", "length", "refused" or "failed".
        problem: why an outcome is not as it should be; of a refusal, its message.
    """

    case: Case
    outcome: str
    problem: str = ""
    text: str = ""


# ---- the server ------------------------------------------------------------------------------------------------------


def write_tiny_model(directory: Path) -> None:
    """A model directory without weights, for `--load-format dummy`."""
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA))


@contextmanager
def serving(model: str, flags: list[str]) -> Iterator[str]:
    """A server of its own, of the tiny model or another; its URL."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as log:
        if model == "tiny":
            write_tiny_model(Path(directory))
            flags = [*flags, "--load-format", "dummy", "--tokenizer", str(default_gguf())]
            model = directory
        command = [sys.executable, "-m", "kitfox", "serve", model, "--served-model-name", MODEL, "--port", str(port)]
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=subprocess.STDOUT)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_until_ready(url, process)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            end = os.fstat(log.fileno()).st_size
            for line in os.pread(log.fileno(), end, 0).decode(errors="replace").splitlines():
                if re.search(r"Traceback|ERROR|Error:", line):
                    print("the server's log:", line, file=sys.stderr)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        if process.poll() is not None:
            sys.exit(f"the server ended with {process.returncode}")
        try:
            if httpx.get(url + "/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    sys.exit("the server did not become ready")


# ---- what answers must be -------------------------------------------------------------------------------------------


_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_STRING_BEGUN = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![0-9.eE+-])")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|(?:0|[1-9][0-9]*)(?:\.[0-9]+)?[eE][+-]?[0-9]*)?\Z")
_WORDS = ("true", "false", "null")


def begins_json(text: str) -> bool:
    """Whether something can be appended to a text, or nothing, so that it is JSON."""
    closers: list[str] = []
    wanted = "value"  # or "name", "colon", "next"; "first" is a value or the end of the list
    position = 0
    while True:
        position += len(_SPACE.match(text, position).group())  # type: ignore[union-attr]
        if position == len(text):
            return True
        character = text[position]
        if character in "]}" and closers and closers[-1] == character and wanted in ("next", "first", "first name"):
            closers.pop()
            position, wanted = position + 1, "next"
        elif wanted == "colon":
            if character != ":":
                return False
            position, wanted = position + 1, "value"
        elif wanted == "next":
            if character != "," or not closers:
                return False
            position, wanted = position + 1, "name" if closers[-1] == "}" else "value"
        elif wanted in ("value", "first") and character in "[{":
            closers.append("]" if character == "[" else "}")
            position, wanted = position + 1, "first" if character == "[" else "first name"
        else:
            is_name = wanted in ("name", "first name")
            end = _end_of_scalar(text, position, only_strings=is_name)
            if end is None:
                return False
            position, wanted = end, "colon" if is_name else "next"


def _end_of_scalar(text: str, start: int, *, only_strings: bool) -> int | None:
    """Where a string, number or word ends, the text's end if it is cut; None if there is none."""
    patterns = [_STRING, _STRING_BEGUN] if only_strings else [_STRING, _STRING_BEGUN, _NUMBER, _NUMBER_BEGUN]
    for pattern in patterns:
        if (found := pattern.match(text, start)) and found.end() > start:
            return found.end()
    if not only_strings:
        for word in _WORDS:
            part = text[start : start + len(word)]
            if word.startswith(part) and (part == word or start + len(part) == len(text)):
                return start + len(part)
    return None


def what_is_wrong(schema: Any, text: str) -> str:
    """Why a whole answer is not valid; "" if it is. Numbers are what they say: as floats, 0.3 is no multiple of 0.1."""
    try:
        value = json.loads(text, parse_float=_number, parse_constant=_refuse)
    except ValueError as error:
        return f"not JSON: {error}"
    schema = json.loads(json.dumps(schema), parse_float=_number)
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        with localcontext() as context:
            context.prec = 2000
            found = next(validator(schema, format_checker=FORMATS).iter_errors(value), None)
    except Exception as error:  # such as a number too large for the library
        return f"jsonschema cannot read it: {error!r}"
    return "" if found is None else f"{found.json_path}: {found.message[:200]} ({list(found.schema_path)})"


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # its exponent has more than 18 digits
        return float(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# ---- asking ----------------------------------------------------------------------------------------------------------


def ask(http: httpx.Client, case: Case, body: dict[str, Any]) -> Answer:
    """Send one request for an answer in a schema's form, and judge what comes."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": case.schema}}
    response = _post(http, "/v1/completions", {**body, "response_format": form})
    if response.status_code != 200:
        return _without_answer(case, response)
    choice = response.json()["choices"][0]
    text, finish = choice["text"], choice["finish_reason"]
    if finish == "stop":
        return Answer(case, "stop", what_is_wrong(case.schema, text), text)
    if finish == "length":
        begun = text.rstrip("\ufffd")  # a character that was cut
        return Answer(case, "length", "" if begins_json(begun) else "not the beginning of JSON", text)
    return Answer(case, "failed", f"finish_reason {finish}", text)


def ask_for_call(http: httpx.Client, case: Case, body: dict[str, Any]) -> Answer:
    """Send one request for calls whose arguments have a schema's form, as a stream too, and judge what comes."""
    function = {"name": "answer", "strict": True, "parameters": case.schema}
    body = {name: value for name, value in body.items() if name != "prompt"} | {
        "messages": [{"role": "user", "content": body["prompt"]}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    response = _post(http, "/v1/chat/completions", body)
    if response.status_code != 200:
        return _without_answer(case, response)
    choice = response.json()["choices"][0]
    calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls") or []]
    finish, text = choice["finish_reason"], "\n".join(calls)
    streamed = _post(http, "/v1/chat/completions", {**body, "stream": True})
    if (problem := _other_in_stream(streamed.text, calls, finish)) != "":
        return Answer(case, "failed", problem, text)
    if finish == "tool_calls":
        problems = [what_is_wrong(case.schema, call) for call in calls] or ["no call"]
        return Answer(case, "stop", "; ".join(filter(None, problems)), text)
    return Answer(case, "length" if finish == "length" else "failed", "" if finish == "length" else str(finish), text)


def _other_in_stream(stream: str, calls: list[str], finish: str) -> str:
    """What a stream says other than the answer that is none; "" if nothing."""
    events = [event.removeprefix("data: ") for event in stream.strip().split("\n\n")]
    streamed: list[str] = []
    finish_streamed = None
    for event in events[:-1]:
        for choice in json.loads(event).get("choices", []):
            finish_streamed = choice["finish_reason"] or finish_streamed
            for call in choice["delta"].get("tool_calls", []):
                streamed += [""] * (call["index"] + 1 - len(streamed))
                streamed[call["index"]] += call["function"]["arguments"]
    if (streamed, finish_streamed) != (calls, finish):
        return f"a stream with {finish_streamed}: {streamed}, other than {finish}: {calls}"[:2000]
    return ""


def _post(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    try:
        return http.post(path, json=body)
    except httpx.HTTPError as error:
        return httpx.Response(599, text=repr(error))


def _without_answer(case: Case, response: httpx.Response) -> Answer:
    if response.status_code == 400:
        return Answer(case, "refused", response.json()["error"]["message"])
    return Answer(case, "failed", f"{response.status_code}: {response.text[:300]}")


def bodies(model: str, max_tokens: int) -> dict[str, dict[str, Any]]:
    """The ways in which each schema is asked for, by name."""
    plain = {"model": MODEL, "prompt": "Some JSON:\n", "max_tokens": max_tokens, "temperature": 1.0}
    if model != "tiny":
        return {"temperature 1": plain}
    tokenizer = load_tokenizer(default_gguf())

    def bias_of(texts: list[str], bias: float) -> dict[str, float]:
        encoded = [tokenizer.encode(text, add_special_tokens=False, parse_special=False) for text in texts]
        return {str(ids[0]): bias for ids in encoded if len(ids) == 1}

    closing = bias_of(CLOSERS, CLOSING_BIAS)
    marks = bias_of([a + b for a in ASCII_MARKS for b in ["", *ASCII_MARKS]], MARKS_BIAS)
    return {
        "random": plain,
        "random, closing": {**plain, "logit_bias": closing},
        "random, marks": {**plain, "logit_bias": marks | closing},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the suites' .jsonl files")
    parser.add_argument("--model", default="tiny", help="tiny (random weights) or what `kitfox serve` takes")
    parser.add_argument("--server-flags", default="", help='more of `kitfox serve`, such as "--cache radix"')
    parser.add_argument("--suites", nargs="+", default=list(SUITES), choices=list(SUITES))
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="only every n-th schema")
    parser.add_argument("--calls", action="store_true", help="ask for calls of a function with the schema's parameters")
    parser.add_argument("--refusals", action="store_true", help="also why schemas are refused")
    parser.add_argument("--violations", type=Path, help="file for what is wrong, a JSON object a line")
    args = parser.parse_args()

    asking = ask_for_call if args.calls else ask
    wrong: list[dict[str, Any]] = []
    with (
        serving(args.model, ["--max-model-len", "4096", *shlex.split(args.server_flags)]) as url,
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as http,
        ThreadPoolExecutor(CONCURRENCY) as pool,
    ):
        titles = ["suite", "asked", "requests", "stop", "length", "refused", "failed", "WRONG", "seconds"]
        print("| " + " | ".join(titles) + " |\n|" + " --- |" * len(titles), flush=True)
        for suite in args.suites:
            cases = load_suite(args.data, suite)[:: args.every]
            for name, body in bodies(args.model, args.max_tokens).items():
                started = time.monotonic()
                seeds = range(args.seed, args.seed + len(cases))
                answers = list(
                    pool.map(lambda case, seed, body=body: asking(http, case, {**body, "seed": seed}), cases, seeds)
                )
                outcomes = Counter(answer.outcome for answer in answers)
                bad = [answer for answer in answers if answer.problem and answer.outcome != "refused"]
                num_wrong = sum(answer.outcome != "failed" for answer in bad)
                counts = [outcomes[outcome] for outcome in ("stop", "length", "refused", "failed")]
                row = [suite, name, len(answers), *counts, num_wrong, round(time.monotonic() - started)]
                print("| " + " | ".join(map(str, row)) + " |", flush=True)
                wrong += [
                    {"case": a.case.name, "outcome": a.outcome, "problem": a.problem, "text": a.text,
                     "schema": a.case.schema}
                    for a in bad
                ]  # fmt: skip
                if args.refusals:
                    for reason, count in Counter(a.problem[:160] for a in answers if a.outcome == "refused").items():
                        print(f"    {count} {reason}")
    for found in wrong:
        print(f"{found['outcome']}: {found['case']}: {found['problem']}: {found['text'][:200]!r}")
    if args.violations is not None:
        args.violations.write_text("".join(json.dumps(found) + "\n" for found in wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
