"""Recorded load: who asked for how much, when, and what prompts had in common.

A file's first line tells which of four public forms it has. Three have lengths only, and in one of these, Mooncake's,
equal block hashes stand for equal beginnings. LMCache's agent deltas have the real text. Nothing is left out here.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kitfox.errors import ConfigError

KNOWN_FORMS = {
    "Mooncake": '{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]} a line',
    "Azure": "CSV with the columns TIMESTAMP,ContextTokens,GeneratedTokens or t_s,input_tokens,output_tokens",
    "ServeGen": "CSV with the columns t_s,client,input_tokens,output_tokens and maybe reason_ratio",
    "LMCache": '{"session": s, "n": n, "t_s": s, "base": n, "keep": characters, "add": text, "output": text} a line',
}
_BLOCK_SIZES = (512, 16)  # those that published traces have
_CSV_COLUMNS = {
    "TIMESTAMP,ContextTokens,GeneratedTokens": "Azure",
    "t_s,input_tokens,output_tokens": "Azure",
    "t_s,client,input_tokens,output_tokens": "ServeGen",
    "t_s,client,input_tokens,output_tokens,reason_ratio": "ServeGen",
}


@dataclass(frozen=True)
class Row:
    """A request of which lengths are known.

    Attributes:
        at_s: seconds since the trace's first request.
        blocks: hashes of the prompt's blocks, the last of which may be cut; each stands for its block and all before.
            Empty where the trace says nothing about contents.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """A request of which the text is known, and what was answered."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Calls:
    """A session's calls, and when its first was made."""

    at_s: float
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Trace:
    """One file; either `rows` or `sessions`.

    Attributes:
        form: a key of KNOWN_FORMS.
        block_size: tokens a hash stands for; None in forms without.
    """

    form: str
    rows: tuple[Row, ...] = ()
    sessions: tuple[Calls, ...] = ()
    block_size: int | None = None


def read_trace(path: Path, *, block_size: int | None = None, limit: int | None = None) -> Trace:
    """The first `limit` rows, or sessions, of a trace; all of them by default.

    Args:
        block_size: of a Mooncake trace; found out from its lengths by default.

    Raises:
        ConfigError: no such file, none of the known forms, a line that is not like the first, times that go back, or
            no block size that fits.
    """
    lines = numbered_lines(path)
    if not lines:
        raise ConfigError(f"{path} is empty")
    first = lines[0][1]
    form = _CSV_COLUMNS.get(first.strip()) or _json_form(first)
    if form is None:
        known = "\n".join(f"  {name}: {looks}" for name, looks in KNOWN_FORMS.items())
        raise ConfigError(f"{path} is no trace of a known form. Known are\n{known}\nIts first line: {first[:200]}")
    if block_size is not None and form != "Mooncake":
        raise ConfigError(f"block_size is for Mooncake traces; {path} has the form {form}. Given: {block_size}")
    if form == "LMCache":
        return Trace(form, sessions=_read_sessions(path, lines, limit))
    if form != "Mooncake":
        return Trace(form, rows=_read_rows(path, lines[1:][:limit], _csv_reader(first.strip())))
    lines = lines[:limit]
    rows = _read_rows(path, lines, _mooncake_row)
    return Trace(form, rows=rows, block_size=_check_blocks(path, lines, rows, block_size))


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a text file that are not blank, with their 1-based numbers; "\\n" alone ends a line.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _json_form(line: str) -> str | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    if row.keys() >= {"timestamp", "input_length", "output_length", "hash_ids"}:
        return "Mooncake"
    return "LMCache" if row.keys() >= {"session", "n", "t_s", "base", "keep", "add", "output"} else None


# ---- lengths --------------------------------------------------------------------------------------------------------


def _read_rows(path: Path, lines: list[tuple[int, str]], read: Callable[[str], Row]) -> tuple[Row, ...]:
    rows: list[Row] = []
    start = 0.0
    for number, line in lines:
        try:
            row = read(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} line {number}: {_reason(error)}. Given: {line[:200]}") from error
        start = row.at_s if not rows else start
        row = Row(row.at_s - start, row.input_tokens, row.output_tokens, row.blocks)
        if rows and row.at_s < rows[-1].at_s:
            raise ConfigError(f"{path} line {number}: its time is before that of the row above. Given: {line[:200]}")
        rows.append(row)
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return tuple(rows)


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


def _length(value: Any) -> int:
    if isinstance(value, str):
        value = int(value)
    if type(value) is not int or value < 0:
        raise ValueError(f"a length must be a whole number, at least 0: {value!r}")
    return value


def _mooncake_row(line: str) -> Row:
    row = json.loads(line)
    blocks = row["hash_ids"]
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ValueError("hash_ids must be a list of whole numbers")
    return Row(row["timestamp"] / 1000, _length(row["input_length"]), _length(row["output_length"]), tuple(blocks))


def _csv_reader(header: str) -> Callable[[str], Row]:
    columns = header.split(",")
    time_column = columns[0]
    input_column, output_column = (c for c in columns if c.endswith(("Tokens", "_tokens")))

    def read(line: str) -> Row:
        values = next(csv.reader([line.rstrip("\r")]))
        if len(values) != len(columns):
            raise ValueError(f"{len(values)} values for {len(columns)} columns")
        row = dict(zip(columns, values, strict=True))
        time = row[time_column]
        at_s = _timestamp(time) if time_column == "TIMESTAMP" else float(time)
        return Row(at_s, _length(row[input_column]), _length(row[output_column]))

    return read


def _timestamp(text: str) -> float:
    time = datetime.fromisoformat(text)
    # A time without a zone is taken as UTC, so that no clock change of this machine falls into the trace.
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def _check_blocks(path: Path, lines: list[tuple[int, str]], rows: tuple[Row, ...], block_size: int | None) -> int:
    """The given block size, or the first of the published ones, if no row has a block more or less than it needs."""
    sizes = _BLOCK_SIZES if block_size is None else (block_size,)
    misfits = []
    for size in sizes:
        misfit = next((i for i, row in enumerate(rows) if -(-row.input_tokens // size) != len(row.blocks)), None)
        if misfit is None:
            return size
        row = rows[misfit]
        misfits.append(f"{size}: line {lines[misfit][0]} has {len(row.blocks)} blocks for {row.input_tokens} tokens")
    raise ConfigError(f"{path}: no block_size fits. Tried {'; '.join(misfits)}")


# ---- texts ----------------------------------------------------------------------------------------------------------


def _read_sessions(path: Path, lines: list[tuple[int, str]], limit: int | None) -> tuple[Calls, ...]:
    starts: dict[str, float] = {}
    calls: dict[str, list[Call]] = {}
    for number, line in lines:
        try:
            row = json.loads(line)
            session = str(row["session"])
            earlier = calls.setdefault(session, [])
            earlier.append(_call(row, earlier))
            starts.setdefault(session, float(row["t_s"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} line {number}: {_reason(error)}. Given: {line[:200]}") from error
    start = min(starts.values())
    sessions = [Calls(starts[session] - start, tuple(made)) for session, made in calls.items()]
    return tuple(sorted(sessions[:limit], key=lambda session: session.at_s))


def _call(row: dict[str, Any], earlier: list[Call]) -> Call:
    """The delta applied: the beginning of an earlier prompt, and what was added."""
    base, keep, add, answer = row["base"], row["keep"], row["add"], row["output"]
    if row["n"] != len(earlier):
        raise ValueError(f"n must count a session's calls from 0: {row['n']!r} after {len(earlier)} calls")
    if type(base) is not int or not -1 <= base < len(earlier):
        raise ValueError(f"base must be -1 or the n of an earlier call of the session: {base!r}")
    if not isinstance(add, str) or not isinstance(answer, str):
        raise ValueError("add and output must be text")
    before = earlier[base].prompt if base >= 0 else ""
    if type(keep) is not int or not 0 <= keep <= len(before):
        raise ValueError(f"keep must be at most the {len(before)} characters of call {base}: {keep!r}")
    return Call(before[:keep] + add, answer)
