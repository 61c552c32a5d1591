"""Whole experiments over fake servers: turns, fairness, verdicts, files, interruptions."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kitfox.bench import compare as compare_module
from kitfox.cli import main
from tests.bench.fake_server import FakeServer, Script, failure, stream

FAKE = f"{shlex.quote(sys.executable)} -m tests.bench.fake_server --port {{port}}"
SHORT = ["--workload", "random", "--num-requests", "4", "--input-len", "20", "--output-len", "4", "--concurrency", "2"]


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "wait_until_idle", lambda limit, timeout_s: 0.0)
    monkeypatch.setenv("COLUMNS", "200")


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def run_main(*arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as error:
        return error.code


def test_bench_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        status = run_main(
            "bench", "--base-url", server.url, *SHORT, "--slo", "ttft=10s,itl=10s", "--output", str(tmp_path / "out")
        )
    assert status == 0
    assert len(rows(tmp_path / "out")) == 4
    assert all(row["output_tokens"] == 4 and row["failure"] is None for row in rows(tmp_path / "out"))
    written = summary(tmp_path / "out")
    assert written["metrics"]["goodput_share"]["server"]["value"] == 1.0
    assert not written["partial"]
    assert written["workload"].startswith("random: 4 requests, ")
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000
    shown = capsys.readouterr().out
    assert "Goodput, req/s" in shown
    assert "report.html" in shown


def test_the_seed_fixes_what_is_sent(tmp_path: Path) -> None:
    sent = []
    for _ in range(2):
        with FakeServer() as server:
            assert run_main("bench", "--base-url", server.url, *SHORT, "--seed", "7") == 0
            sent.append([body["prompt"] for body in server.requests if "max_tokens" in body])
    assert sent[0] == sent[1]


def test_a_key_is_used_and_not_written_down(tmp_path: Path) -> None:
    with FakeServer() as server:
        arguments = ["bench", "--base-url", server.url, *SHORT, "--output"]
        assert run_main(*arguments, str(tmp_path / "a"), "--api-key", "s3cret") == 0
        assert run_main(*arguments, str(tmp_path / "b"), "--api-key=s3cret") == 0
    assert "--api-key KEY" in summary(tmp_path / "a")["command"]
    assert "--api-key=KEY" in summary(tmp_path / "b")["command"]
    assert not any("s3cret" in file.read_text() for file in tmp_path.rglob("*.*"))


def test_failures_are_counted_by_kind_and_a_run_of_failures_exits_1(tmp_path: Path) -> None:
    def respond(body: dict) -> Script:
        return failure(503, "busy") if len(body["prompt"]) == 20 else Script(stream(body))

    with FakeServer(respond) as server:
        status = run_main("bench", "--base-url", server.url, *SHORT, "--output", str(tmp_path / "out"))
    assert status == 1
    (run,) = summary(tmp_path / "out")["runs"]
    assert run["summary"]["failures"] == {"http 503": 4}
    assert run["summary"]["goodput_per_s"] == 0


def test_sides_take_turns_with_the_same_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as quick, FakeServer(lambda body: Script(stream(body, ttft_s=0.1))) as slow:
        status = run_main(
            "compare", f"quick=url:{quick.url}", f"slow=url:{slow.url}", *SHORT, "--repeats", "4",
            "--metric", "ttft_mean", "--output", str(tmp_path / "out"),
        )  # fmt: skip
    assert status == 0
    written = summary(tmp_path / "out")
    turns = [(run["side"], run["repeat"]) for run in written["runs"]]
    assert turns == [
        ("quick", 0), ("slow", 0), ("slow", 1), ("quick", 1), ("quick", 2), ("slow", 2), ("slow", 3), ("quick", 3)
    ]  # fmt: skip
    prompts = [[body["prompt"] for body in side.requests if body.get("max_tokens") == 4] for side in (quick, slow)]
    assert sorted(prompts[0]) == sorted(prompts[1])
    assert "quick wins by" in written["headline"]
    assert {fact["field"]: fact["status"] for fact in written["facts"]}["prompts"] == "same"
    assert "quick wins by" in capsys.readouterr().out


def test_texts_are_counted_by_the_server_that_is_up(tmp_path: Path) -> None:
    """Each turn has a server of its own, and the one that was asked first is gone; in the end all are."""
    file = tmp_path / "conversations.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "How old is the fox?"}]}\n' * 2)
    status = run_main(
        "compare", f"a=cmd:{FAKE}", f"b=cmd:{FAKE}", "--workload", f"jsonl:{file}", "--output-len", "4",
        "--concurrency", "1", "--warm-up", "0", "--repeats", "3", "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert status == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len(summary["runs"]) == 6
    assert not summary["partial"]


def test_servers_are_started_for_their_turns_and_stopped(tmp_path: Path) -> None:
    status = run_main("compare", f"a=cmd:{FAKE}", f"b=cmd:{FAKE}", *SHORT, "--repeats", "2", "--output", str(tmp_path))
    assert status == 0
    written = summary(tmp_path)
    assert all(run["start_s"] > 0 and run["summary"]["peak_memory_bytes"] for run in written["runs"])
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        f"{side}-{turn}.log" for side in "ab" for turn in ("0", "1", "check")
    ]
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "tests.bench.fake_server" not in listed


def test_an_unfair_comparison_is_refused_by_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as one, FakeServer() as other:
        sides = [f"one=url:{one.url}", f"other=url:{other.url}"]
        declared = ["--declare", "one.precision=bfloat16", "--declare", "other.precision=int8"]
        assert run_main("compare", *sides, *declared, *SHORT) == 2
        message = capsys.readouterr().err
        assert "precision: one bfloat16 (declared), other int8 (declared)" in message
        assert "--allow-difference precision" in message
        status = run_main(
            "compare", *sides, *declared, *SHORT, "--repeats", "1", "--allow-difference", "precision",
            "--output", str(tmp_path / "out"),
        )  # fmt: skip
    assert status == 0
    facts = {fact["field"]: fact for fact in summary(tmp_path / "out")["facts"]}
    assert facts["precision"]["allowed"]
    assert facts["precision"]["values"] == {"one": "bfloat16 (declared)", "other": "int8 (declared)"}


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compare_module, "wait_until_idle", lambda limit, timeout_s: 0.8)
    with FakeServer() as one, FakeServer() as other:
        sides = [f"one=url:{one.url}", f"other=url:{other.url}"]
        assert run_main("compare", *sides, *SHORT, "--repeats", "1") == 2
        assert "load: Before the start, 80 % of this machine's cores were busy" in capsys.readouterr().err
        assert run_main("compare", *sides, *SHORT, "--repeats", "1", "--allow-difference", "load") == 0
        assert "Before repeat 1 of one, 80 %" in capsys.readouterr().out


def test_a_server_that_dies_leaves_partial_results(tmp_path: Path) -> None:
    script = tmp_path / "dies.sh"
    # The second start fails: the check sees a server, the first turn none.
    script.write_text(
        f'if [ -e {tmp_path}/seen ]; then echo no more >&2; exit 3; fi\ntouch {tmp_path}/seen\nexec "$@"\n'
    )
    status = run_main(
        "compare", f"a=cmd:{FAKE}", f"b=cmd:sh {script} {FAKE}", *SHORT, "--repeats", "2",
        "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert status == 130
    written = summary(tmp_path / "out")
    assert written["partial"]
    assert [run["side"] for run in written["runs"]] == ["a"]
    assert "b could not be measured in repeat 1" in written["notes"][0]
    assert "no more" in written["notes"][0]
    assert "No verdict: b finished no run" in written["headline"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_writes_what_there_is_and_stops_servers(tmp_path: Path, number: signal.Signals) -> None:
    command = [
        sys.executable, "-m", "kitfox", "compare", f"a=cmd:{FAKE} --ttft-ms 50", f"b=cmd:{FAKE} --ttft-ms 50",
        *SHORT, "--num-requests", "3000", "--allow-difference", "load", "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    # The first turn waits for an idle machine, which a machine that runs tests may never be.
    code = (
        "import kitfox.bench.compare as c; c.wait_until_idle = lambda *_: 0.0; from kitfox.cli import main; import sys;"
        "sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *command[3:]], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("random:"):  # the next thing is the first turn
            break
    deadline = time.monotonic() + 60
    while not (tmp_path / "out/logs/a-0.log").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.5)  # into the run; sooner it would end without one, which is fine too
    os.kill(process.pid, number)
    process.stdout.read()
    assert process.wait(timeout=60) == 130
    written = summary(tmp_path / "out")
    assert written["partial"]
    assert (tmp_path / "out/report.html").exists()
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "tests.bench.fake_server" not in listed


def test_a_sweep_finds_the_rate_that_holds(tmp_path: Path) -> None:
    """Each answer takes 20 ms, one after the other: fifty a second are too many for the objective."""
    free_at = 0.0

    def respond(body: dict) -> Script:
        nonlocal free_at
        free_at = max(free_at, time.monotonic()) + 0.02
        return Script(stream(body, ttft_s=free_at - time.monotonic()))

    with FakeServer(respond) as server:
        status = run_main(
            "bench", "--base-url", server.url, "--workload", "random", "--input-len", "20", "--output-len", "2",
            "--slo", "ttft=80ms", "--goodput-sweep", "--sweep-start", "10", "--sweep-seconds", "0.5",
            "--output", str(tmp_path / "out"),
        )  # fmt: skip
    assert status == 0
    written = summary(tmp_path / "out")
    assert 1 <= written["best_rates"]["server"] < 200
    assert "Every rate has numbers of its own" in (tmp_path / "out" / "report.html").read_text()
    rates = [point["rate"] for point in written["sweep"]]
    assert rates == sorted(rates)
    assert len(rates) >= 3
    assert written["sweep"][-1]["goodput_share"] < 0.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "url:http://127.0.0.1:1"], "sides must be two or more"),
        (["compare", "nonsense", "url:http://127.0.0.1:1"], "a side must be kitfox[:flags]"),
        (["bench", "--base-url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["bench", "--base-url", "http://127.0.0.1:1", "--rate", "2", "--concurrency", "3"], "exclude each other"),
        (["bench", "--base-url", "http://127.0.0.1:1", "--rate", "0"], "--rate must be above 0"),
        (["bench", "--base-url", "http://127.0.0.1:1", "--slo", "ttft=5"], "give a unit"),
        (["bench", "--base-url", "http://127.0.0.1:1", "--goodput-sweep"], "needs objectives"),
        (["bench", "--base-url", "http://127.0.0.1:1", "--sweep-start", "2"], "is of --goodput-sweep"),
        (["bench", "--base-url", "http://127.0.0.1:1", "--burstiness", "2"], "--burstiness is of --rate"),
        (["bench", "--base-url", "http://127.0.0.1:1", "--speed", "2"], "--speed is of a trace's own times"),
        (["bench", "--base-url", "http://127.0.0.1:1", "--extra-body", "[]"], "must be a JSON object"),
        (["bench", "--base-url", "http://127.0.0.1:1", "--num-requests", "0"], "at least 1. Given: '0'"),
        (["ablate", "--techniques", "magic"], "techniques must be of prefix-cache"),
        (["ablate", "--flags", "--cache none"], "flags has --cache, which ablating prefix-cache would change"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(*arguments) in (1, 2)
    assert message in capsys.readouterr().err


def test_an_old_experiment_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        arguments = ["bench", "--base-url", server.url, *SHORT, "--output", str(tmp_path / "out")]
        assert run_main(*arguments) == 0
        assert run_main(*arguments) == 2
    assert "output must be a new folder" in capsys.readouterr().err
