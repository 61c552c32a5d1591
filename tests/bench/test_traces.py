"""Traces are read whole and exactly, told apart by their first line, and refused with the line that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kitfox.bench.traces import KNOWN_FORMS, Call, Calls, Row, Trace, read_trace
from kitfox.errors import ConfigError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def mooncake(timestamp: int, length: int, answer: int, blocks: list[int]) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": length, "output_length": answer, "hash_ids": blocks})


def delta(session: str, n: int, t_s: float, base: int, keep: int, add: str, output: str) -> str:
    row = {"session": session, "n": n, "t_s": t_s, "base": base, "keep": keep, "add": add, "output": output}
    return json.dumps(row, ensure_ascii=False)


class TestMooncake:
    def test_rows(self, file: Path) -> None:
        write(file, mooncake(1500, 20, 5, [7, 8]), mooncake(1750, 16, 1, [7]), "", mooncake(4000, 33, 2, [7, 8, 9]))
        assert read_trace(file) == Trace(
            "Mooncake", (Row(0.0, 20, 5, (7, 8)), Row(0.25, 16, 1, (7,)), Row(2.5, 33, 2, (7, 8, 9))), block_size=16
        )
        assert read_trace(file, limit=2).rows == (Row(0.0, 20, 5, (7, 8)), Row(0.25, 16, 1, (7,)))

    def test_block_size_is_the_one_that_fits(self, file: Path) -> None:
        assert read_trace(write(file, mooncake(0, 1024, 1, [1, 2]), mooncake(0, 1025, 1, [1, 2, 3]))).block_size == 512
        assert read_trace(write(file, mooncake(0, 32, 1, [1, 2]), mooncake(0, 10, 1, [1]))).block_size == 16
        write(file, mooncake(0, 64, 1, [1]), mooncake(0, 65, 1, [1, 2]))
        assert read_trace(file, block_size=64).block_size == 64
        with pytest.raises(ConfigError, match="Tried 512: line 2 has 2 blocks for 65 tokens; 16: line 1 has 1 blocks"):
            read_trace(file)
        with pytest.raises(ConfigError, match="Tried 32: line 1 has 1 blocks for 64 tokens"):
            read_trace(file, block_size=32)

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("{", "line 2: Expecting"),
            ('{"timestamp": 1, "input_length": 5, "hash_ids": [1]}', "line 2: output_length is missing"),
            (mooncake(1, -5, 1, [1]), "line 2: a length must be a whole number, at least 0: -5"),
            (mooncake(1, 5, 1, ["x"]), "line 2: hash_ids must be a list of whole numbers"),  # type: ignore[list-item]
            (mooncake(-1, 5, 1, [1]), "line 2: its time is before that of the row above"),
        ],
    )
    def test_a_bad_line_is_named(self, file: Path, line: str, reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            read_trace(write(file, mooncake(0, 5, 1, [1]), line))


class TestLengthsOnly:
    def test_azures_own_columns(self, file: Path) -> None:
        write(
            file,
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:17:03.9799600,4808,10",
            "2023-11-16 18:17:04.2299600,3180,8",
            "2023-11-17T00:00:03.9799600Z,110,27",
        )
        trace = read_trace(file)
        assert (trace.form, trace.block_size) == ("Azure", None)
        assert [(row.input_tokens, row.output_tokens) for row in trace.rows] == [(4808, 10), (3180, 8), (110, 27)]
        assert [row.at_s for row in trace.rows] == pytest.approx([0, 0.25, 20580], abs=1e-5)

    def test_azures_extract(self, file: Path) -> None:
        write(file, "t_s,input_tokens,output_tokens\r", "0.500,374,44\r", "1.750,396,109\r")
        assert read_trace(file) == Trace("Azure", (Row(0, 374, 44), Row(1.25, 396, 109)))

    def test_servegen(self, file: Path) -> None:
        write(file, "t_s,client,input_tokens,output_tokens,reason_ratio", "0.0,29,930,286,0.844", "0.5,3,12,7,0.1")
        assert read_trace(file) == Trace("ServeGen", (Row(0, 930, 286), Row(0.5, 12, 7)))
        write(file, "t_s,client,input_tokens,output_tokens", "3,20,912,77")
        assert read_trace(file) == Trace("ServeGen", (Row(0, 912, 77),))

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("1,2", "2 values for 3 columns"),
            ("x,1,2", "could not convert"),
            ("1,2.5,2", "invalid literal"),
        ],
    )
    def test_a_bad_line_is_named(self, file: Path, line: str, reason: str) -> None:
        with pytest.raises(ConfigError, match=rf"line 3: {reason}.*Given: {line}"):
            read_trace(write(file, "t_s,input_tokens,output_tokens", "0,1,1", line))

    def test_a_header_alone(self, file: Path) -> None:
        with pytest.raises(ConfigError, match="has no rows"):
            read_trace(write(file, "t_s,input_tokens,output_tokens"))

    def test_block_size_is_refused(self, file: Path) -> None:
        with pytest.raises(ConfigError, match="block_size is for Mooncake traces"):
            read_trace(write(file, "t_s,input_tokens,output_tokens", "0,1,1"), block_size=16)


class TestAgentDeltas:
    def test_prompts_are_put_together(self, file: Path) -> None:
        write(
            file,
            delta("b", 0, 7.0, -1, 0, "Hello\u2028there", "hi"),
            delta("a", 0, 5.0, -1, 0, "Do it", "done"),
            delta("b", 1, 8.0, 0, 5, " you", ""),
            delta("b", 2, 9.0, 0, 11, ", again", "yes"),
        )
        a = Calls(0.0, (Call("Do it", "done"),))
        b = Calls(2.0, (Call("Hello\u2028there", "hi"), Call("Hello you", ""), Call("Hello\u2028there, again", "yes")))
        assert read_trace(file) == Trace("LMCache", sessions=(a, b))
        assert len(read_trace(file, limit=1).sessions) == 1

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (delta("a", 2, 1.0, 0, 0, "", ""), "n must count a session's calls from 0: 2 after 1 calls"),
            (delta("a", 1, 1.0, 1, 0, "", ""), "base must be -1 or the n of an earlier call of the session: 1"),
            (delta("a", 1, 1.0, 0, 6, "", ""), "keep must be at most the 5 characters of call 0: 6"),
            ('{"session": "a", "n": 1}', "base is missing"),
        ],
    )
    def test_a_bad_line_is_named(self, file: Path, line: str, reason: str) -> None:
        with pytest.raises(ConfigError, match=f"line 2: {reason}"):
            read_trace(write(file, delta("a", 0, 0.0, -1, 0, "Do it", "done"), line))


@pytest.mark.parametrize("line", ["a,b,c", "[]", "{}", '{"prompt": "x"}', "input_tokens,output_tokens"])
def test_an_unknown_form_is_refused_with_the_known_ones(file: Path, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(write(file, line))
    assert all(f"{name}: {looks}" in str(caught.value) for name, looks in KNOWN_FORMS.items())
    assert str(caught.value).endswith(f"Its first line: {line}")


def test_files_that_cannot_be_read(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(file)
    with pytest.raises(ConfigError, match="is empty"):
        read_trace(write(file, ""))
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(file)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here")
@pytest.mark.parametrize(
    ("name", "form", "count", "block_size"),
    [
        ("traces/mooncake_conversation.jsonl", "Mooncake", 4500, 512),
        ("traces/mooncake_synthetic_b16.jsonl", "Mooncake", 2000, 16),
        ("traces/azure2023_code.csv", "Azure", 8819, None),
        ("traces/servegen_deepseek_r1.csv", "ServeGen", 2503, None),
        ("traces/servegen_m_small.csv", "ServeGen", 2500, None),
        ("agents/lmcache_miniswe_delta.jsonl", "LMCache", 20, None),
        ("agents/lmcache_taubench_delta.jsonl", "LMCache", 24, None),
    ],
)
def test_published_traces(name: str, form: str, count: int, block_size: int | None) -> None:
    trace = read_trace(SHARED / name)
    assert (trace.form, len(trace.rows) + len(trace.sessions), trace.block_size) == (form, count, block_size)
