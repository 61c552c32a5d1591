"""The real server with the real model, as clients see it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.fault_table import FAULTS, check_fault, stream_chunks

pytestmark = pytest.mark.model
MODEL = "fox-model"
KNOWN_GOOD = {"model": MODEL, "prompt": "A quick brown fox", "temperature": 0, "max_tokens": 8}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """A server process of this test run."""

    def __init__(self, *command: str):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by stop
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command, "--served-model-name", MODEL, "--port", str(self.port)],
            stdout=self.log,  # a file: a pipe that nobody reads would fill up and stop the server
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def wait_until_ready(self, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.read_log()
            try:
                if self.http.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError("the server did not become ready")

    def read_log(self) -> str:
        """What the server has printed so far; its place in the file, which it shares with ours, stays where it is."""
        descriptor = self.log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.http.close()
            self.log.close()

    def gauge(self, name: str) -> float:
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith((name + "{", name + " ")):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")

    def wait_idle(self) -> None:
        for _ in range(200):
            if self.gauge("vllm:num_requests_running") + self.gauge("vllm:num_requests_waiting") == 0:
                return
            time.sleep(0.05)
        raise AssertionError("requests are still running")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("kitfox", "serve", "smollm2-135m", "--max-model-len", "1024", "--dtype", "float32")
    server.wait_until_ready()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none")


def known_good_text(server: Server) -> str:
    answer = server.http.post("/v1/completions", json=KNOWN_GOOD)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_the_start_says_what_computes(server: Server) -> None:
    for _ in range(100):
        if "ready after" in server.read_log():
            break
        time.sleep(0.05)
    assert re.search(r"computing with (native|PyTorch reference) kernels \(", server.read_log())


def test_completion_and_its_stream_agree(client: openai.OpenAI):
    whole = client.completions.create(model=MODEL, prompt="A quick brown fox", max_tokens=16, temperature=0)
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="A quick brown fox", max_tokens=16, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].text
    assert len(text) > 10
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None


def test_chat_answers_a_question(client: openai.OpenAI):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    deltas = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=20, stream=True)
    text, reasons, roles = "", [], []
    for chunk in deltas:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            roles += [choice.delta.role] if choice.delta.role else []
    assert text == "The capital of France is Paris."
    assert reasons == ["stop"]
    assert roles == ["assistant"]


def test_several_answers_stop_strings_and_logprobs(client: openai.OpenAI):
    answer = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4,", n=3, seed=7, temperature=0.8, max_tokens=8, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs or [])
    again = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4,", n=3, seed=7, temperature=0.8, max_tokens=8, logprobs=2
    )
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]
    whole = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=16).choices[0].text
    stop = whole[5:8]
    cut = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=16, stop=stop)
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_echo_with_logprobs_scores_a_prompt(server: Server):
    body = {"model": MODEL, "prompt": "The cat sat", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert answer["text"] == "The cat sat"
    logprobs = answer["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == "The cat sat"


def test_the_second_time_a_prompt_comes_from_the_cache(server: Server):
    body = {"model": MODEL, "prompt": "word " * 100, "temperature": 0, "max_tokens": 4}
    cold = server.http.post("/v1/completions", json=body).json()
    warm = server.http.post("/v1/completions", json=body).json()
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < cached < warm["usage"]["prompt_tokens"]
    assert cached % 32 == 0
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = stream_chunks(server.http.post("/v1/completions", json=body | streaming).text)
    assert streamed[-1]["usage"] == warm["usage"]
    salted = server.http.post("/v1/completions", json={**body, "cache_salt": "tenant"}).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_steps_and_blocks_are_measured(server: Server):
    server.wait_idle()
    before = [server.gauge(f"vllm:iteration_tokens_total_{kind}") for kind in ("count", "sum")]
    body = {"model": MODEL, "prompt": "word " * 100, "max_tokens": 4, "ignore_eos": True, "cache_salt": "measured"}
    usage = server.http.post("/v1/completions", json=body).json()["usage"]
    server.wait_idle()
    after = [server.gauge(f"vllm:iteration_tokens_total_{kind}") for kind in ("count", "sum")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [4, usage["prompt_tokens"] + 3]
    evictable, available, total = (
        server.gauge(f"sglang:{name}")
        for name in ("kv_evictable_tokens", "kv_available_tokens", "max_total_num_tokens")
    )
    assert evictable >= usage["prompt_tokens"] // 32 * 32 > 0
    assert evictable + available == total


def test_faults_are_answered_and_hurt_nobody(server: Server):
    probe = {**KNOWN_GOOD, "max_tokens": 2}
    expected = server.http.post("/v1/completions", json=probe).json()["choices"][0]["text"]
    for fault in FAULTS:
        headers = {"Content-Type": "application/json"}
        answer = server.http.post(fault.path, content=fault.content(MODEL), headers=headers)
        check_fault(fault, answer.status_code, answer.text)
        after = server.http.post("/v1/completions", json=probe)
        assert after.status_code == 200, fault.name
        assert after.json()["choices"][0]["text"] == expected, fault.name


def byte_tokens(server: Server) -> list[int]:
    """Tokens that are parts of characters."""
    texts = {"prompt": "é日本🦊ñ ☃ 漢字 🌍", "return_token_strs": True}
    answer = server.http.post("/tokenize", json=texts).json()
    shown = zip(answer["tokens"], answer["token_strs"], strict=True)
    return sorted({token_id for token_id, text in shown if "\ufffd" in text})


def answer_of(http: httpx.Client, body: dict[str, Any], *, stream: bool) -> list[dict[str, Any]]:
    """Text, finish reason, tokens and cached tokens of each answer; of a stream, joined."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = http.post("/v1/completions", json={"model": MODEL, "temperature": 0, "logprobs": 1} | body | options)
    assert response.status_code == 200, response.text
    chunks = stream_chunks(response.text) if stream else [response.json()]
    answers = []
    for index in range(body.get("n", 1)):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
        logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        columns = {name: [entry for part in logprobs for entry in part[name]] for name in ("tokens", "text_offset")}
        answers.append({"text": "".join(choice["text"] for choice in choices), "reasons": reasons} | columns)
    usage = chunks[-1]["usage"]
    return [*answers, {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}]


def test_streams_and_neighbours_change_no_answer(server: Server):
    parts = byte_tokens(server)
    assert len(parts) > 4
    counting = {"prompt": "1, 2, 3, 4,", "max_tokens": 12}
    text = answer_of(server.http, counting, stream=False)[0]["text"]
    bodies: list[dict[str, Any]] = [
        counting | {"stop": text[5:9]},
        counting | {"stop": [text[9:11], text[5:8]]},
        counting | {"stop": "\nUser:", "echo": True},
        counting | {"n": 2, "temperature": 1, "seed": 5},
        {"prompt": [504, 2365, 260], "echo": True, "max_tokens": 4},
        *({"prompt": "Hi", "max_tokens": size, "allowed_token_ids": parts, "temperature": 1, "seed": size}
          for size in (6, 11)),
    ]  # fmt: skip
    alone = [answer_of(server.http, body, stream=False) for body in bodies]
    assert alone[0][0]["text"] == text[: text.index(text[5:9])]
    assert [answer["reasons"] for answers in alone for answer in answers[:-1]].count(["stop"]) >= 2
    for answers in alone:
        for answer in answers[:-1]:
            assert "".join(answer["tokens"]).startswith(answer["text"])
    with ThreadPoolExecutor(4) as threads:
        for stream in (False, True):
            together = threads.map(lambda body, stream=stream: answer_of(server.http, body, stream=stream), bodies)
            assert list(together) == alone
    assert [answer_of(server.http, body, stream=True) for body in bodies] == alone


def test_token_ids_end_with_the_vocabulary_and_wrong_ones_hurt_no_neighbour(server: Server):
    vocab_size = server.http.get("/tokenizer_info").json()["vocab_size"]
    body = KNOWN_GOOD | {"max_tokens": 40, "ignore_eos": True}
    whole = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    text = ""
    with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        lines = (line for line in stream.iter_lines() if line)
        text += json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
        with httpx.Client(base_url=server.url, timeout=60) as other:
            for token_id, status in ((vocab_size - 1, 200), (vocab_size, 400), (vocab_size + 1, 400), (-1, 400)):
                for fields in (
                    {"prompt": [token_id]},
                    {"stop_token_ids": [token_id], "min_tokens": 2},
                    {"logit_bias": {str(token_id): -100}},
                ):
                    answer = other.post("/v1/completions", json=KNOWN_GOOD | {"max_tokens": 2} | fields)
                    assert answer.status_code == status, answer.text
        for line in lines:
            if line != "data: [DONE]":
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    assert text == whole


def test_a_closed_connection_frees_its_blocks(server: Server):
    server.wait_idle()
    body = {**KNOWN_GOOD, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    server.wait_idle()
    assert known_good_text(server)


def test_a_trace_tells_a_requests_story(server: Server):
    answer = server.http.post("/v1/completions", json=KNOWN_GOOD).json()
    trace = server.http.get(f"/v1/trace/{answer['id']}").json()
    names = [event["name"] for event in trace["events"]]
    for name in ("received", "queued", "admitted", "scheduled", "first_token", "finished", "answered"):
        assert name in names, names
    assert names.index("received") < names.index("queued") < names.index("admitted") < names.index("first_token")
    assert server.http.get("/v1/trace/nobody").status_code == 404


def test_a_thousand_mixed_requests_with_random_aborts_leave_nothing_behind(server: Server):
    server.wait_idle()
    rng = random.Random(0)
    peak: list[int] = []

    async def one(http: httpx.AsyncClient, gate: asyncio.Semaphore, number: int) -> None:
        body = {
            "model": MODEL,
            "prompt": [rng.randrange(100, 40000) for _ in range(rng.randint(1, 24))],
            "max_tokens": rng.randint(1, 4),
            "temperature": rng.choice([0, 1.0]),
            "n": rng.choice([1, 1, 1, 2]),
            "stream": number % 2 == 0,
            "ignore_eos": True,
        }
        async with gate:
            try:
                timeout = 0.3 if rng.random() < 0.1 else 120
                answer = await http.post("/v1/completions", json=body, timeout=timeout)
                assert answer.status_code == 200, answer.text
            except httpx.TimeoutException:
                pass
            if number % 250 == 249:
                peak.append(resident_bytes(server.process.pid))

    async def everything() -> None:
        gate = asyncio.Semaphore(64)
        async with httpx.AsyncClient(base_url=server.url, limits=httpx.Limits(max_connections=64)) as http:
            await asyncio.gather(*(one(http, gate, number) for number in range(1000)))

    known_good_text(server)
    asyncio.run(everything())
    server.wait_idle()
    assert server.gauge("vllm:kv_cache_usage_perc") == 0
    assert max(peak) < min(peak) * 1.2, "the server's memory grew"


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its children."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    total = 0
    for one in [pid, *map(int, children.stdout.split())]:
        try:
            with open(f"/proc/{one}/statm") as statm:
                total += int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except FileNotFoundError:
            continue
    return total


def test_the_engine_dying_is_reported_and_healed():
    server = Server("kitfox", "serve", "smollm2-135m", "--max-model-len", "512")
    try:
        server.wait_until_ready()
        expected = known_good_text(server)
        children = subprocess.run(
            ["pgrep", "-P", str(server.process.pid), "-f", "spawn_main"], capture_output=True, text=True, check=True
        ).stdout.split()
        os.kill(int(children[0]), signal.SIGKILL)
        seen = set()
        for _ in range(600):
            seen.add(server.http.get("/health").status_code)
            if seen >= {503, 200} and server.http.get("/ready").status_code == 200:
                break
            time.sleep(0.05)
        assert 503 in seen
        server.wait_until_ready()
        assert known_good_text(server) == expected
    finally:
        assert server.stop() == 0


def test_sglangs_command_line_serves_with_the_radix_cache_and_drains_on_sigterm():
    server = Server("kitfox.launch_server", "--model-path", "smollm2-135m", "--context-length", "512")
    try:
        server.wait_until_ready()
        body = {"model": MODEL, "prompt": "word " * 50, "temperature": 0, "max_tokens": 4}
        server.http.post("/v1/completions", json=body)
        warm = server.http.post("/v1/completions", json=body).json()["usage"]
        assert warm["prompt_tokens_details"]["cached_tokens"] == warm["prompt_tokens"] - 1
        with server.http.stream("POST", "/v1/completions", json={**body, "max_tokens": 40, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert any('"finish_reason":"length"' in line for line in rest)
    finally:
        assert server.stop() == 0


def test_operators_can_flush_pause_abort_sleep_and_profile(server: Server):
    http = server.http
    prompt = {"text": "A quick brown fox " * 40, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    cold = http.post("/generate", json=prompt).json()
    warm = http.post("/generate", json=prompt).json()
    assert (warm["text"], warm["meta_info"]["cached_tokens"] > 0) == (cold["text"], True)
    assert http.post("/flush_cache").status_code == 200
    flushed = http.post("/generate", json=prompt).json()
    assert (flushed["text"], flushed["meta_info"]["cached_tokens"]) == (cold["text"], 0)

    assert http.post("/start_profile").status_code == 200
    long = {
        "text": "Once",
        "rid": "long",
        "stream": True,
        "sampling_params": {"max_new_tokens": 900, "ignore_eos": True},
    }
    with http.stream("POST", "/generate", json=long) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        with httpx.Client(base_url=server.url, timeout=60) as other:
            assert other.post("/pause?mode=keep").status_code == 200
            assert other.get("/health").json()["status"] == "paused"
            assert other.post("/sleep").json()["error"]["code"] == "engine_busy"
            assert other.post("/resume").status_code == 200
            assert other.post("/abort_request", json={"rid": "long"}).json() == {"aborted": ["long"]}
        *_, last, done = lines
    assert done == "data: [DONE]"
    assert '"type":"abort"' in last
    profile = http.post("/stop_profile").json()
    events = json.loads(Path(profile["path"]).read_text())["traceEvents"]
    assert {"decode", "prefill", "aborted"} <= {event["name"] for event in events}
    shutil.rmtree(Path(profile["path"]).parent)

    server.wait_idle()
    assert http.post("/sleep").json()["is_sleeping"]
    assert http.post("/generate", json=prompt).json()["error"]["code"] == "asleep"
    assert http.post("/wake_up").json() == {"is_sleeping": False}
    assert http.get("/health_generate").status_code == 200
    assert http.post("/generate", json=prompt).json()["text"] == cold["text"]
