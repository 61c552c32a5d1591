"""What is found out of servers of each kind, and which differences are refused."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kitfox.bench.facts import FIELDS, INFORMATIONAL, check, gather
from kitfox.bench.vocabulary import Encoder
from kitfox.errors import ConfigError

BYTES = Encoder(lambda text: list(text.encode()), "bytes")
COUNTS = Encoder(lambda text: len(text.encode()), "counts")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@contextmanager
def answering(pages: dict[str, Any]) -> Iterator[str]:
    """A server with these answers to GET, all else 404."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(page).encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def process(env: dict[str, str] | None = None) -> Iterator[int]:
    """A process that could be a server's; its id."""
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **(env or {})}) as sleeping:
        while sys.platform == "linux" and not Path(f"/proc/{sleeping.pid}/environ").read_bytes():  # not yet set up
            time.sleep(0.001)
        yield sleeping.pid
        sleeping.kill()


def facts_of(
    pages: dict[str, Any],
    command: Sequence[str] = (),
    *,
    card: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    is_local: bool = True,
    encoder: Encoder = BYTES,
) -> dict[str, str | None]:
    models = {"data": [{"id": "m", **(card or {})}]}
    with answering({"/v1/models": models, **pages}) as url, process(env) as pid:
        return gather(url, "m", pid if is_local else None, command, encoder)


def sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()[:16]}"


# ---- finding out ----------------------------------------------------------------------------------------------------


@linux_only
def test_kitfox_tells_everything(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"weights")
    info = {
        "engine": "kitfox",
        "version": "0.1.0",
        "model_path": str(tmp_path / "a.gguf"),
        "load_format": "auto",
        "dtype": "float32",
        "quantization": "Q4_1",
        "kv_cache_dtype": "bfloat16",
        "device": "cuda:0",
        "num_threads": 2,
    }
    card = {"owned_by": "kitfox", "max_model_len": 2048, "root": "smollm2"}
    facts = facts_of({"/server_info": info, "/version": {"version": "0.1.0"}}, card=card)
    assert list(facts) == list(FIELDS)
    assert facts["model"] == f"{sha(b'weights')} (a.gguf)"
    assert facts["precision"] == "as stored (Q4_1)"
    assert facts["kv_precision"] == "bfloat16"
    assert (facts["context_length"], facts["device"], facts["threads"]) == ("2048", "cuda", "2")
    assert (facts["engine"], facts["version"]) == ("kitfox", "0.1.0")
    assert facts["cores"] == _affinity()
    for quantization, expected in (("none", "float32"), ("int8", "int8")):
        facts = facts_of({"/server_info": info | {"quantization": quantization}}, card=card)
        assert facts["precision"] == expected
    facts = facts_of({"/server_info": info | {"load_format": "dummy"}}, card=card)
    assert facts["model"] == "random weights of a.gguf"


def _affinity() -> str:
    cores = psutil.Process().cpu_affinity()
    return f"{cores[0]}-{cores[-1]}" if len(cores) > 1 else str(cores[0])


@linux_only
def test_llama_cpp(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"weights")
    props = {"model_path": str(tmp_path / "a.gguf"), "model_ftype": "Q4_1", "build_info": "b1-abc"}
    card = {"owned_by": "llamacpp", "meta": {"n_ctx": 1024}}
    command = ["llama-server", "-m", "a.gguf", "-t", "2", "-ctk", "bf16", "--cache-type-v=bf16", "--port", "1"]
    facts = facts_of({"/props": props}, command, card=card)
    assert facts["model"] == f"{sha(b'weights')} (a.gguf)"
    assert (facts["precision"], facts["kv_precision"]) == ("as stored (Q4_1)", "bfloat16")
    assert (facts["context_length"], facts["threads"], facts["device"]) == ("1024", "2", "cpu")
    assert (facts["engine"], facts["version"]) == ("llama.cpp", "b1-abc")
    facts = facts_of({"/props": props | {"model_ftype": "BF16"}}, ["llama-server"], card=card)
    assert (facts["precision"], facts["kv_precision"], facts["threads"]) == ("bfloat16", "float16", None)
    facts = facts_of({"/props": props}, ["sh", "-c", "llama-server -ctk q8_0 -t 3"], card=card)
    assert (facts["kv_precision"], facts["threads"]) == ("q8_0 and float16", "3")


@linux_only
def test_vllm_by_its_command_and_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    (tmp_path / "b.safetensors").write_bytes(b"second")
    (tmp_path / "a.safetensors").write_bytes(b"first")
    card = {"owned_by": "vllm", "root": str(tmp_path), "max_model_len": 4096}
    serve = ["vllm", "serve", str(tmp_path), "--dtype", "auto"]
    facts = facts_of({"/version": {"version": "0.9"}}, serve, card=card, env={"VLLM_CPU_OMP_THREADS_BIND": "0-2,5"})
    both = "".join(hashlib.sha256(data).hexdigest() for data in (b"first", b"second"))
    assert facts["model"] == f"{sha(both.encode())} (2 files of {tmp_path.name})"
    assert (facts["precision"], facts["kv_precision"]) == ("bfloat16", "bfloat16")
    assert (facts["threads"], facts["engine"], facts["version"]) == ("4", "vLLM", "0.9")
    facts = facts_of({}, [*serve, "--dtype=half", "--kv_cache_dtype", "fp8", "--quantization", "awq"], card=card)
    assert (facts["precision"], facts["kv_precision"]) == ("awq", "fp8")
    assert facts_of({}, [*serve, "--dtype=half"], card=card)["precision"] == "float16"
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    assert facts_of({}, serve, card=card)["precision"] is None
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    assert facts_of({}, serve, card=card)["precision"] == "gptq"


@linux_only
def test_a_hub_id_in_the_server_s_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--org--m/snapshots/abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub/models--org--m/refs").mkdir()
    (tmp_path / "hub/models--org--m/refs/main").write_text("abc\n")
    (snapshot / "model.safetensors").write_bytes(b"hub")
    facts = facts_of({}, card={"owned_by": "sglang", "root": "org/m"}, env={"HF_HOME": str(tmp_path)})
    assert facts["model"] == f"{sha(b'hub')} (abc)"


def test_all_parts_of_a_split_file_and_a_file_that_was_replaced(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{index}-of-00002.gguf" for index in (1, 2)]
    for part in parts:
        part.write_bytes(part.name.encode())
    pages = {"/props": {"model_path": str(parts[0])}}
    before = facts_of(pages)["model"]
    assert before is not None
    assert "2 files" in before
    parts[1].write_bytes(b"other")
    assert facts_of(pages)["model"] != before


def test_of_a_server_elsewhere_only_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"not what it serves")
    facts = facts_of({"/props": {"model_path": str(tmp_path / "a.gguf")}}, is_local=False, card={"max_model_len": 8})
    assert facts["context_length"] == "8"
    assert [facts[name] for name in ("model", "device", "cores", "threads")] == [None] * 4


# ---- comparing ------------------------------------------------------------------------------------------------------


def status(name: str, a: str | None, b: str | None) -> str:
    (fact,) = check({"a": {name: a}, "b": {name: b}}, {name})
    return fact.status


class TestCheck:
    def test_same_differs_unknown(self) -> None:
        assert status("precision", "float32", "float32") == "same"
        assert status("precision", "float32", "float16") == "differs"
        assert status("precision", "float32", None) == "unknown"
        assert status("precision", None, None) == "unknown"
        assert status("model", "sha256:1 (a)", "sha256:1 (b)") == "same"
        assert status("model", "sha256:1 (a)", "sha256:2 (a)") == "differs"

    def test_a_third_side_that_says_nothing_hides_no_difference(self) -> None:
        sides = {"a": {"precision": "x"}, "b": {"precision": None}, "c": {"precision": "y"}}
        with pytest.raises(ConfigError, match="a x, b unknown, c y"):
            check(sides)

    def test_a_refusal_names_fields_values_and_the_way_out(self) -> None:
        sides = {
            "paged": {"model": "sha256:1", "precision": "float32", "context_length": "8", "engine": "kitfox"},
            "llama": {"model": "sha256:1", "precision": "float16", "context_length": "9", "engine": "llama.cpp"},
        }
        with pytest.raises(ConfigError) as caught:
            check(sides, {"context_length"})
        message = caught.value.message
        assert "precision: paged float32, llama float16" in message
        assert "--allow-difference precision" in message
        assert "context_length" not in message
        assert "engine" not in message
        facts = {fact.field: fact for fact in check(sides, {"precision", "context_length"})}
        assert {name: (fact.status, fact.allowed) for name, fact in facts.items()} == {
            "model": ("same", False),
            "precision": ("differs", True),
            "context_length": ("differs", True),
            "engine": ("differs", False),
        }
        assert facts["precision"].values == {"paged": "float32", "llama": "float16"}

    def test_only_fields_can_be_allowed(self) -> None:
        with pytest.raises(ConfigError, match=r"must be one of precision\. Given: 'speed'"):
            check({"a": {"precision": "x"}}, {"speed"})

    def test_informational_fields_are_fields(self) -> None:
        assert not INFORMATIONAL - set(FIELDS)


class TestTokenizer:
    def fingerprint(self, encoder: Encoder) -> str | None:
        return facts_of({}, encoder=encoder)["tokenizer"]

    def test_ids_and_counts(self) -> None:
        ids, counts = self.fingerprint(BYTES), self.fingerprint(COUNTS)
        shifted = self.fingerprint(Encoder(lambda text: [byte + 1 for byte in text.encode()], "shifted"))
        assert status("tokenizer", ids, ids) == "same"
        assert status("tokenizer", ids, counts) == "same"
        assert status("tokenizer", ids, shifted) == "differs"
        assert status("tokenizer", shifted, counts) == "same"

    def test_two_with_ids_are_compared_by_them_beside_one_that_counts(self) -> None:
        shifted = Encoder(lambda text: [byte + 1 for byte in text.encode()], "shifted")
        values = {"a": BYTES, "b": COUNTS, "c": shifted}
        with pytest.raises(ConfigError, match="tokenizer"):
            check({side: {"tokenizer": self.fingerprint(encoder)} for side, encoder in values.items()})

    def test_a_refusal_shows_the_texts_that_differ(self) -> None:
        splits = Encoder(lambda text: list(text.replace("  ", " ").encode()), "joins spaces")
        with pytest.raises(ConfigError) as caught:
            check({"a": {"tokenizer": self.fingerprint(BYTES)}, "b": {"tokenizer": self.fingerprint(splits)}})
        assert "spaces:" in caught.value.message
        assert "emoji:" not in caught.value.message

    def test_a_server_that_takes_no_such_text(self) -> None:
        def refuse(text: str) -> int:
            raise ConfigError("no")

        assert self.fingerprint(Encoder(refuse, "refuses")) is None
