"""What a user can write for a side, and a server's life, however it ends."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kitfox.bench.servers import ServedModel, StartedServer, free_port, get_json, parse_side, parse_sides, served_model
from kitfox.errors import ConfigError, EngineDeadError

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and subreapers")


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other processes do; far longer than it needs."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- what the user writes -------------------------------------------------------------------------------------------


class TestParse:
    def test_kitfox(self) -> None:
        side = parse_side("kitfox:--cache=paged --block-size 16 --chat-template 'a b'")
        assert (side.kind, side.url, side.port) == ("kitfox", None, None)
        flags = ("--cache=paged", "--block-size", "16", "--chat-template", "a b")
        assert side.words == (sys.executable, "-m", "kitfox", "serve", *flags, "--port", "{port}")
        assert side.name == "cache-paged-block-size-16-chat-template-a-b"
        assert parse_side("kitfox").name == "kitfox"
        assert parse_side("kitfox:/models/Smol.gguf").name == "Smol.gguf"

    def test_a_command_with_a_place_for_its_port(self) -> None:
        side = parse_side("cmd:OMP_NUM_THREADS=2 LD_PRELOAD=/lib/a.so /opt/llama-server -m x.gguf --port {port}")
        assert side.env == {"OMP_NUM_THREADS": "2", "LD_PRELOAD": "/lib/a.so"}
        assert side.words == ("/opt/llama-server", "-m", "x.gguf", "--port", "{port}")
        assert (side.name, side.port) == ("llama-server", None)
        assert parse_side("cmd:PORT={port} server").env == {"PORT": "{port}"}
        assert parse_side("cmd:python3 -m sglang.launch_server --port {port}").name == "sglang.launch_server"

    @pytest.mark.parametrize("flag", ["--port 8123", "--port=8123", "-p 8123"])
    def test_a_command_that_names_its_port(self, flag: str) -> None:
        assert parse_side(f"cmd:vllm serve model {flag}").port == 8123

    def test_a_server_that_runs(self) -> None:
        side = parse_side("url:http://10.0.0.1:8000/v1/")
        assert (side.url, side.name, side.words) == ("http://10.0.0.1:8000", "10.0.0.1-8000", ())

    def test_names(self) -> None:
        assert parse_side("my.side_1=kitfox:--cache=none").name == "my.side_1"
        assert parse_side("a=cmd:A=1 b --port={port}").env == {"A": "1"}
        names = [side.name for side in parse_sides(["kitfox", "kitfox", "kitfox-2=kitfox", "kitfox"])]
        assert names == ["kitfox", "kitfox-3", "kitfox-2", "kitfox-4"]
        with pytest.raises(ConfigError, match="two sides are named a"):
            parse_sides(["a=kitfox", "a=url:http://x"])

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("paged", "must be kitfox"),
            ("my side=kitfox", "must be kitfox"),
            ("kitfox:'", "No closing quotation"),
            ("kitfox:--port 1", "--port"),
            ("kitfox:--host=::1", "--host"),
            ("cmd:", "followed by a command"),
            ("cmd:A=1", "followed by a command"),
            ("cmd:server", "name its own with --port"),
            ("cmd:server --port many", "'many'"),
            ("cmd:server --port", "1, 65535"),
            ("url:10.0.0.1:8000", "http://HOST"),
            ("url:http://", "http://HOST"),
            ("url:http://x:y", "http://HOST"),
            ("url:http://x?a=b", "http://HOST"),
        ],
    )
    def test_errors_say_what_was_given(self, text: str, match: str) -> None:
        with pytest.raises(ConfigError, match=match) as caught:
            parse_side(text)
        assert text in str(caught.value) or repr(text) in str(caught.value)


# ---- a server's life ------------------------------------------------------------------------------------------------

FAKE_SERVER = """
import http.server, os, signal, subprocess, sys, time

STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
ORPHAN = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True,"
    "stdout=subprocess.PIPE); p.stdout.readline(); print(p.pid)"
)
port, style = int(sys.argv[1]), sys.argv[2]
started = time.monotonic()
print("loading", style, os.environ.get("FAKE", ""), flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += 1
        known = {"no-health": ["/v1/models"], "unready": []}.get(style, ["/health"])
        loading = style == "loading" and Handler.asked < 4
        self.send_response(503 if loading else 200 if self.path in known else 404)
        self.end_headers()

    def log_message(self, *args):
        pass

if style == "exits":
    print("no such model", flush=True)
    sys.exit(3)
if style in ("stubborn", "grandchildren"):
    command = [sys.executable, "-c", STUBBORN]
    if style == "grandchildren":  # in a session of its own, and its parent is gone
        command = [sys.executable, "-c", ORPHAN, STUBBORN]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    line = child.stdout.readline()
    print("child", line.strip() if style == "grandchildren" else child.pid, flush=True)
if style == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "server.py"
    path.write_text(FAKE_SERVER)
    return path


def started(script: Path, style: str, **options: Any) -> StartedServer:
    port = free_port()
    return StartedServer([sys.executable, str(script), str(port), style], port, script.with_name("log"), **options)


def child_pid(script: Path) -> int:
    return int(script.with_name("log").read_text().split("child ")[1].split()[0])


class TestStartedServer:
    @pytest.mark.parametrize("style", ["plain", "no-health", "loading"])
    def test_is_ready_inside_and_gone_outside(self, script: Path, style: str) -> None:
        with started(script, style, env={"FAKE": "env"}) as server:
            assert is_alive(server.pid) or sys.platform != "linux"
            assert server.is_running()
            assert server.start_s > 0
            assert server.log_tail() == f"loading {style} env"
            socket.create_connection(("127.0.0.1", int(server.base_url.rpartition(":")[2]))).close()
        assert not is_alive(server.pid)
        assert not server.is_running()

    def test_it_ends_during_start(self, script: Path) -> None:
        with pytest.raises(EngineDeadError, match=r"ended with 3 before it was ready:\nloading exits \nno such model"):
            started(script, "exits").__enter__()

    def test_it_is_not_ready_in_time(self, script: Path) -> None:
        server = started(script, "unready", timeout_s=0.5)
        with pytest.raises(EngineDeadError, match=r"not ready within 0\.5 s:\nloading unready"):
            server.__enter__()
        assert not is_alive(server.pid)

    def test_no_such_command(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot start no-such-server: No such file"):
            StartedServer(["no-such-server"], free_port(), tmp_path / "log").__enter__()

    @pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
    def test_its_port_is_taken(self, script: Path, host: str) -> None:
        with socket.create_server((host, 0)) as other:
            port = other.getsockname()[1]
            server = StartedServer([sys.executable, str(script), str(port), "plain"], port, script.with_name("log"))
            with pytest.raises(ConfigError, match=f"port {port} is not free"):
                server.__enter__()
        assert not script.with_name("log").exists()

    @linux_only
    @pytest.mark.parametrize("style", ["stubborn", "grandchildren"])
    def test_processes_that_ignore_sigterm_are_killed(self, script: Path, style: str) -> None:
        with started(script, style, stop_s=0.5) as server:
            child = child_pid(script)
            assert is_alive(child)
        assert not is_alive(server.pid)
        assert not is_alive(child)

    def test_it_ends_by_itself(self, script: Path) -> None:
        with started(script, "plain") as server:
            os.kill(server.pid, signal.SIGKILL)
            until(lambda: not server.is_running())

    @linux_only
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
    def test_a_parent_that_is_killed_leaves_nothing(self, script: Path, number: int) -> None:
        code = f"""
            import sys, time
            from pathlib import Path
            from kitfox.bench.servers import StartedServer, free_port, stop_on_signals
            stop_on_signals()
            port = free_port()
            command = [sys.executable, {str(script)!r}, str(port), "grandchildren"]
            with StartedServer(command, port, Path({str(script)!r}).with_name("log"), stop_s=0.5) as server:
                print(server.pid, flush=True)
                time.sleep(600)
        """
        command = [sys.executable, "-c", textwrap.dedent(code)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pid, child = int(parent.stdout.readline()), child_pid(script)
            assert is_alive(pid)
            assert is_alive(child)
            parent.send_signal(number)
            status = parent.wait()
        assert status == (-number if number == signal.SIGKILL else 128 + number)
        until(lambda: not is_alive(pid) and not is_alive(child))

    def test_a_side_gets_its_port(self, script: Path) -> None:
        side = parse_side(f"cmd:FAKE=on-{{port}} {sys.executable} {script} {{port}} plain")
        with side.start(script.with_name("log")) as server:
            port = server.base_url.rpartition(":")[2]
            assert server.command[-2:] == (port, "plain")
            assert server.log_tail() == f"loading plain on-{port}"


# ---- what a server says ---------------------------------------------------------------------------------------------


@contextmanager
def answering(path: str, body: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == path else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def model_list(*cards: dict[str, Any]) -> bytes:
    return json.dumps({"object": "list", "data": list(cards)}).encode()


class TestServedModel:
    def test_the_only_one(self) -> None:
        card = {"id": "m", "root": "/models/m", "max_model_len": 4096, "owned_by": "vllm"}
        with answering("/v1/models", model_list(card)) as url:
            assert served_model(url) == ServedModel("m", "/models/m", 4096, "vllm")

    def test_two_names_of_one_are_no_choice_and_two_models_are(self) -> None:
        with answering("/v1/models", model_list({"id": "a", "root": "r"}, {"id": "b", "root": "r"})) as url:
            assert served_model(url).id == "a"
            assert served_model(url, "b").id == "b"
        with answering("/v1/models", model_list({"id": "a"}, {"id": "b"})) as url:
            with pytest.raises(ConfigError, match="serves a, b: say which with --model"):
                served_model(url)
            with pytest.raises(ConfigError, match="serves a, b, not c"):
                served_model(url, "c")

    @pytest.mark.parametrize("body", [b"hello", b"[]", b'{"data": [1]}', b'{"data": [{"id": 1}]}'])
    def test_nonsense(self, body: bytes) -> None:
        with answering("/v1/models", body) as url, pytest.raises(EngineDeadError, match="list of models"):
            served_model(url)

    def test_none_and_nobody(self) -> None:
        with answering("/v1/models", model_list()) as url, pytest.raises(ConfigError, match="serves no model"):
            served_model(url)
        with pytest.raises(EngineDeadError, match="no server answers"):
            served_model(f"http://127.0.0.1:{free_port()}")

    def test_a_proxy_is_not_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        with answering("/version", b'{"version": "1"}') as url:
            assert get_json(url, "/version") == {"version": "1"}
            assert get_json(url, "/nothing") is None
