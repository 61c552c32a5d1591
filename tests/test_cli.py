"""The `kitfox` command: exit statuses, messages, and what it must not import. No model is loaded here."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kitfox import chat, cli
from kitfox.chat import ChatOptions, run_chat, stream_answer
from kitfox.errors import ConfigError, EngineDeadError, KitfoxError, ModelNotFoundError
from kitfox.outputs import CompletionOutput, RequestOutput
from kitfox.request import FinishReason

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return str(tmp_path)


class TestTopLevel:
    @pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["generate", "--help"], ["version"]])
    def test_help_imports_nothing_heavy(self, words: list[str]) -> None:
        script = (
            "import sys\nfrom kitfox.cli import main\n"
            f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
            "heavy = {'torch', 'numpy', 'fastapi', 'uvicorn', 'tokenizers', 'zmq', 'rich'} & set(sys.modules)\n"
            "assert not heavy, heavy"
        )
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)

    def test_overview_names_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["--help"]) == 0
        text = capsys.readouterr().out
        assert all(f"  {name}" in text for name in cli.COMMANDS)
        assert cli.main([]) == 2

    @pytest.mark.parametrize("name", sorted(cli.COMMANDS))
    def test_every_command_has_help(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            cli.main([name, "--help"])
        assert caught.value.code == 0
        assert f"kitfox {name}" in capsys.readouterr().out

    def test_unknown_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["sevre"]) == 2
        assert capsys.readouterr().err == "kitfox: there is no command 'sevre'; did you mean serve?\n"

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["--version"]) == 0
        assert capsys.readouterr().out[0].isdigit()


class TestErrors:
    def test_a_mistake_is_one_line_and_status_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["serve", "--max-modl-len", "4"]) == 2
        assert capsys.readouterr().err == "kitfox: unknown flag --max-modl-len; the nearest is --max-model-len\n"

    def test_a_model_that_is_not_there_is_status_1(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "empty").mkdir()
        assert cli.main(["serve", str(tmp_path / "empty")]) == 1
        error = capsys.readouterr().err
        assert error.startswith("kitfox: ")
        assert error.count("\n") == 1

    def test_launch_server_speaks_its_own_dialect(self, tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main_launch_server(["--model-path", tiny_model, "--context-length", "4096"]) == 2
        assert "Use --context-length 1024" in capsys.readouterr().err
        assert cli.main_launch_server([]) == 2
        assert capsys.readouterr().err == "kitfox: --model-path is missing\n"

    def test_a_port_that_is_taken(self, fake_url: str, capsys: pytest.CaptureFixture[str]) -> None:
        port = fake_url.rsplit(":", 1)[1]
        assert cli.main(["serve", "--port", port]) == 2
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err

    def test_an_output_that_cannot_be_written(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["generate", "hello", "--output", str(tmp_path / "absent" / "out.jsonl")]) == 2
        assert "--output: there is no directory" in capsys.readouterr().err


class TestPlan:
    def test_prints_the_plan(self, tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
        line = ["plan", tiny_model, "--max-model-len", "64", "--max-num-seqs", "4", "--device", "cpu", "--memory", "1G"]
        assert cli.main(line) == 0
        text = capsys.readouterr().out
        assert "8 blocks of 32 = 256 tokens" in text
        assert "of 1.00 GiB on cpu" in text

    def test_says_what_would_fit(self, tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["plan", tiny_model, "--num-gpu-blocks-override", "2", "--device", "cpu"]) == 2
        assert "This would fit: --max-model-len 64" in capsys.readouterr().err


class TestPrompts:
    def test_from_the_command_line_or_a_file(self, tmp_path: Path) -> None:
        lines, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
        lines.write_text("one\n\ntwo\n")
        rows.write_text('{"prompt": "one\\nmore"}\n{"prompt": "two"}\n')
        assert cli._read_prompts(["a", "b"], None) == ["a", "b"]
        assert cli._read_prompts([], lines) == ["one", "two"]
        assert cli._read_prompts([], rows) == ["one\nmore", "two"]

    def test_from_stdin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo"))
        assert cli._read_prompts([], None) == ["one", "two"]

    def test_mistakes(self, tmp_path: Path) -> None:
        file = tmp_path / "p.jsonl"
        file.write_text('{"text": "x"}\n')
        with pytest.raises(ConfigError, match="row 1 must be a JSON object with a text `prompt`"):
            cli._read_prompts([], file)
        with pytest.raises(ConfigError, match="not both"):
            cli._read_prompts(["a"], file)
        with pytest.raises(ConfigError, match="cannot be read"):
            cli._read_prompts([], tmp_path / "absent")
        file.write_text("\n")
        with pytest.raises(ConfigError, match="no prompt in the input"):
            cli._read_prompts([], file)

    def test_answers_as_json_lines(self, tmp_path: Path) -> None:
        answer = CompletionOutput(index=0, text="füchse", token_ids=[4, 5], finish_reason=FinishReason.LENGTH)
        output = RequestOutput(
            request_id="1", prompt="p", prompt_token_ids=[1, 2, 3], outputs=[answer], num_cached_tokens=2
        )
        cli._write_answers(["p"], [output], tmp_path / "out.jsonl")
        assert json.loads((tmp_path / "out.jsonl").read_text()) == {
            "prompt": "p",
            "text": "füchse",
            "finish_reason": "length",
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 2,
        }

    def test_generate_has_no_use_for_a_port(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["generate", "hello", "--port", "80"]) == 2
        assert "--port: this command has no use for it" in capsys.readouterr().err

    def test_generate_checks_sampling_before_loading(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["generate", "hello", "--top-p", "0"]) == 2
        assert "top_p must be in (0, 1]" in capsys.readouterr().err


class _FakeServer(http.server.BaseHTTPRequestHandler):
    """Serves one model, `fox`; answers every question with two pieces, or with an error to "bad"."""

    bodies: list[dict[str, object]]
    keys: list[str | None]

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.keys.append(self.headers["Authorization"])
        self._send(200, json.dumps({"data": [{"id": "fox"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.keys.append(self.headers["Authorization"])
        if body["messages"][-1]["content"] == "bad":
            return self._send(400, json.dumps({"error": {"message": "too bad"}}))
        deltas: list[dict[str, object]] = [
            {"role": "assistant", "content": ""},
            {"content": "[b]quick"},
            {"content": " fox"},
        ]
        events = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
        usage = json.dumps({"choices": [], "usage": {}})
        return self._send(200, "".join(f"data: {event}\n\n" for event in [*events, usage, "[DONE]"]))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def fake_url() -> Iterator[str]:
    _FakeServer.bodies, _FakeServer.keys = [], []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _FakeServer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class TestChat:
    def talk(self, monkeypatch: pytest.MonkeyPatch, lines: list[str], options: ChatOptions) -> None:
        answers = iter(lines)
        monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
        run_chat(options)

    def test_keeps_the_conversation(
        self, fake_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ChatOptions(base_url=fake_url + "/v1/", system="be a fox", max_tokens=5, temperature=0.0)
        self.talk(monkeypatch, ["hi", "bad", "", "again", "/exit"], options)
        out = capsys.readouterr().out
        assert out.count("[b]quick fox\n") == 2
        assert "too bad" in out
        first, _, last = _FakeServer.bodies
        assert (first["model"], first["max_tokens"], first["temperature"], first["stream"]) == ("fox", 5, 0.0, True)
        assert last["messages"] == [
            {"role": "system", "content": "be a fox"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "[b]quick fox"},
            {"role": "user", "content": "again"},
        ]

    def test_interrupt_keeps_what_has_come(self, fake_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(base_url: str, body: dict[str, object]) -> Iterator[str]:
            yield "quick"
            if len(body["messages"]) == 1:  # type: ignore[arg-type]
                raise KeyboardInterrupt
            assert body["messages"][1] == {"role": "assistant", "content": "quick"}  # type: ignore[index]

        monkeypatch.setattr(chat, "stream_answer", interrupted)
        self.talk(monkeypatch, ["hi", "again", "/exit"], ChatOptions(base_url=fake_url))

    def test_sends_the_key_of_the_environment(self, fake_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.talk(monkeypatch, ["hi", "/exit"], ChatOptions(base_url=fake_url))
        assert set(_FakeServer.keys) == {None}
        monkeypatch.setenv("KITFOX_API_KEY", "secret")
        _FakeServer.keys.clear()
        self.talk(monkeypatch, ["hi", "/exit"], ChatOptions(base_url=fake_url))
        assert _FakeServer.keys == ["Bearer secret"] * 2

    def test_a_model_that_is_not_served(self, fake_url: str) -> None:
        with pytest.raises(ModelNotFoundError, match="serves fox, not wolf"):
            run_chat(ChatOptions(base_url=fake_url, model="wolf"))

    def test_nobody_there(self) -> None:
        with pytest.raises(EngineDeadError, match="no kitfox server answers"):
            run_chat(ChatOptions(base_url="http://127.0.0.1:9"))
        with pytest.raises(KitfoxError, match="broke"):
            list(stream_answer("http://127.0.0.1:9", {}))

    def test_starts_a_server_and_stops_it(self, fake_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stand-in for it, at the address of the fake server."""
        events: list[str] = []

        class StandIn(contextlib.AbstractContextManager["StandIn"]):
            base_url = fake_url

            def __init__(self, command: list[str], port: int, log: Path):
                assert command[1:7] == ["-m", "kitfox", "serve", "fox-file.gguf", "--port", str(port)]

            def __enter__(self) -> StandIn:
                events.append("started")
                return self

            def __exit__(self, *_: object) -> None:
                events.append("stopped")

        monkeypatch.setattr(chat, "USUAL_URL", "http://127.0.0.1:9")
        monkeypatch.setattr(chat, "StartedServer", StandIn)
        monkeypatch.setattr(chat, "stop_on_signals", lambda: None)
        monkeypatch.setattr(chat, "resolve_model", lambda model: None)
        monkeypatch.setattr(chat, "_served_models", lambda url: [] if url.endswith(":9") else ["fox-file.gguf"])
        self.talk(monkeypatch, ["/exit"], ChatOptions(model="fox-file.gguf"))
        assert events == ["started", "stopped"]

    def test_a_word_with_a_slash_is_not_sent(
        self, fake_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(chat, "stream_answer", lambda url, body: iter([body["messages"][-1]["content"]]))
        self.talk(monkeypatch, ["/help", "/foo bar", " /tmp?", "/quit"], ChatOptions(base_url=fake_url))
        printed = capsys.readouterr().out
        assert printed.count(chat.HELP) == 2
        assert "/foo" not in printed
        assert "/tmp?" in printed
