"""What a run sends: requests of a named workload, all of it fixed by one seed.

Prompts are rows of the vocabulary's words, so their lengths are exact, or recorded texts. The seed draws the words, and
a line that recorded texts begin with, so two seeds share no more than the name of a role: no run finds its prompts in
another's cache.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from kitfox.bench.records import Arrivals, BenchRequest, Session, Workload
from kitfox.bench.traces import Trace, numbered_lines, read_trace
from kitfox.bench.vocabulary import Vocabulary
from kitfox.errors import ConfigError

WORKLOADS: dict[str, str] = {
    "chat": "single questions with the lengths of ShareGPT: most short, some long",
    "prefix": "a few long shared prefixes in random order, each request with an end of its own",
    "multiturn": "conversations that grow: every turn sends the server's own answers back",
    "agent": "tool loops replayed: every turn sends the recorded history, which all begins alike",
    "long": "long prompts, short answers",
    "batch": "everything at once",
    "random": "lengths as given, nothing shared",
    "trace:FILE": "a recorded trace: Mooncake, Azure, ServeGen or LMCache; trace:sample is a small one that ships",
    "jsonl:FILE": 'a line a request or conversation: {"messages": [...], "tools", "max_tokens"} or {"prompt": "..."}',
}

# What each workload can be told, and what it does untold: half a minute or less for a model of 135M parameters on two
# cores. None leaves it to the file.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "chat": {"num_requests": 64, "input_len": 215, "output_len": 175},
    "prefix": {
        "num_requests": 64, "num_prefixes": 4, "prefix_len": 512, "input_len": 64, "output_len": 32, "length_ratio": 0.0
    },
    "multiturn": {
        "num_requests": 16, "turns": 4, "input_len": 64, "output_len": 48, "length_ratio": 0.5, "think_s": 0.0
    },
    "agent": {"num_requests": 5, "think_s": 0.0},
    "long": {"num_requests": 12, "input_len": 1536, "output_len": 16, "length_ratio": 0.0},
    "batch": {"num_requests": 32, "input_len": 128, "output_len": 64, "length_ratio": 0.0},
    "random": {"num_requests": 48, "input_len": 256, "output_len": 64, "length_ratio": 0.0},
    "trace": {"num_requests": None, "block_size": None},
    "jsonl": {"num_requests": None, "output_len": 128, "think_s": 0.0},
}  # fmt: skip

# Log-normal mixtures: share, median and sigma of each part, and the limits of what is drawn. They have the means that
# _DEFAULTS gives, medians of about 134 and 116 tokens, and the long tails that chats have.
_CHAT_PROMPTS = (((0.45, 30, 0.8), (0.55, 330, 0.7)), 4, 1024)
_CHAT_ANSWERS = (((0.5, 45, 0.9), (0.5, 380, 0.5)), 4, 512)

_SEED_WORDS = 6
_SEEDED_TEXTS = f"recorded texts after {_SEED_WORDS} words that differ by seed"
# A guess, on the high side, at what a chat template adds to a message; used only to refuse what cannot fit.
_TEMPLATE_TOKENS = 16


@dataclass(frozen=True)
class WorkloadSpec:
    """What to send, in the user's words. None is the workload's own default; what it has no use for is refused.

    Attributes:
        name: a key of WORKLOADS, with a path for FILE.
        num_requests: requests; sessions for multiturn, agent and agent traces; rows or lines of a file, from its start.
        input_len, output_len: tokens, on average: of a whole prompt, of one question in multiturn, of what follows the
            prefix in prefix. For jsonl, output_len is of lines that do not say.
        length_ratio: lengths are uniform within this share of the mean, both ways.
        turns: questions of a conversation.
        think_s: pause between an answer and the session's next request.
        block_size: of a Mooncake trace, in tokens.
        prompts: send token ids or text; auto sends ids where the vocabulary has them. Recorded texts are sent as text
            unless ids are asked for.
        endpoint: auto is chat for multiturn and for messages of a jsonl file, and completions otherwise. Messages sent
            to completions, as those of agent are, become a plain transcript: no server's chat template has a say then.
        max_total_tokens: the server's context; what does not fit is refused, or left out of a file and said to be.
    """

    name: str
    num_requests: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    length_ratio: float | None = None
    num_prefixes: int | None = None
    prefix_len: int | None = None
    turns: int | None = None
    think_s: float | None = None
    block_size: int | None = None
    prompts: Literal["auto", "ids", "text"] = "auto"
    endpoint: Literal["auto", "completions", "chat"] = "auto"
    max_total_tokens: int | None = None

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def file(self) -> str:
        return self.name.partition(":")[2]


def default_arrivals(name: str) -> Arrivals:
    """How a workload's sessions start unless the user says otherwise.

    A batch's requests all have the time 0, so it arrives like a trace.
    """
    kind = WorkloadSpec(name).kind
    if kind in ("batch", "trace"):
        return Arrivals("trace")
    return Arrivals("closed", concurrency={"agent": 4, "long": 2}.get(kind, 8))


def make_workload(spec: WorkloadSpec, vocabulary: Vocabulary, seed: int) -> Workload:
    """The same for equal arguments; different seeds give different prompts of the same kind.

    Raises:
        ConfigError: no such workload or file, an option that it has no use for or out of range, or a request beyond
            `max_total_tokens`.
    """
    spec = _with_defaults(spec)
    draft = _Draft(spec, vocabulary, seed)
    sessions, what = _MAKERS[spec.kind](draft)
    sessions = tuple(session for session in sessions if session.requests)
    if not sessions:
        raise ConfigError(f"workload {spec.name} has nothing to send: {'; '.join([what, *draft.notes()])}")
    return Workload(
        name=spec.name,
        description="; ".join([f"{spec.name}: {_counts(sessions)}", what, *draft.notes()]),
        sessions=sessions,
        digest=_digest(sessions),
        ideal_cached_tokens=draft.ideal_cached_tokens(),
    )


def _with_defaults(spec: WorkloadSpec) -> WorkloadSpec:
    defaults = _DEFAULTS.get(spec.kind)
    takes_file = spec.kind in ("trace", "jsonl")
    if defaults is None or takes_file != bool(spec.file) or (":" in spec.name and not takes_file):
        raise ConfigError(f"workload must be one of {', '.join(WORKLOADS)}. Given: {spec.name}")
    for option in fields(spec):
        value = getattr(spec, option.name)
        if value is None or option.name in ("name", "prompts", "endpoint"):
            continue
        if option.name not in (*defaults, "max_total_tokens"):
            raise ConfigError(
                f"{option.name} means nothing to workload {spec.kind}, which takes {', '.join(defaults)}. "
                f"Given: {value}"
            )
        if option.name == "length_ratio":
            if not 0 <= value < 1:
                raise ConfigError(f"length_ratio must be at least 0 and less than 1. Given: {value}")
        elif option.name == "think_s":
            if not 0 <= value < math.inf:
                raise ConfigError(f"think_s must be at least 0 seconds. Given: {value}")
        elif value < 1:
            raise ConfigError(f"{option.name} must be at least 1. Given: {value}")
    return replace(spec, **{name: value for name, value in defaults.items() if getattr(spec, name) is None})


class _Draft:
    """A workload in the making: turns words, texts and messages into requests, and keeps account of their tokens."""

    def __init__(self, spec: WorkloadSpec, vocabulary: Vocabulary, seed: int):
        self.spec = spec
        self.vocabulary = vocabulary
        self._seed = seed
        self._prompts: list[tuple[int, ...]] | None = []  # as tokens, for what a cache could share; None once unknown
        self._answer_tokens: dict[str, int] = {}
        self._left_out = {_TOO_LONG: 0, _EMPTY: 0, _NO_ANSWER: 0}
        self._unchecked = False
        if spec.endpoint == "chat" and spec.prompts == "ids":
            raise ConfigError("prompts ids cannot be sent to the chat endpoint, which takes text only")
        if spec.prompts == "ids" and vocabulary.ids is None:
            raise ConfigError(f"prompts ids need token ids, and there are none: {vocabulary.source}")
        self._word_ids = spec.prompts == "ids" or (spec.prompts == "auto" and vocabulary.ids is not None)

    def rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self.spec.kind} {purpose} {self._seed}")

    def sends_chat(self, *, by_default: bool) -> bool:
        return by_default if self.spec.endpoint == "auto" else self.spec.endpoint == "chat"

    def seed_line(self, purpose: str) -> str:
        """A line of words that no other seed and no other purpose has."""
        return self.vocabulary.text(self.vocabulary.sample(self.rng(purpose), _SEED_WORDS)).lstrip() + "\n\n"

    def notes(self) -> list[str]:
        """What a reader of the description must know."""
        notes = [f"{count} {what}" for what, count in self._left_out.items() if count]
        if self._unchecked:
            notes.append(f"prompts not counted, so not checked against {self.spec.max_total_tokens} tokens")
        return notes

    def forget_prompts(self) -> None:
        """The tokens of a prompt are not known, so neither is what a cache could share."""
        self._prompts = None

    def ideal_cached_tokens(self) -> int | None:
        return None if self._prompts is None else sum(shared_prefixes(self._prompts))

    # ---- requests ---------------------------------------------------------------------------------------------------

    def of_words(self, name: str, indices: Sequence[int], max_tokens: int) -> BenchRequest:
        """A prompt of generated words.

        Raises:
            ConfigError: it does not fit.
        """
        self.require_fit(self.tokens_of_words(len(indices)), max_tokens)
        if self.sends_chat(by_default=False):
            self.forget_prompts()
            message = {"role": "user", "content": self.vocabulary.text(indices)}
            return BenchRequest(name, max_tokens, messages=(message,))
        overhead = 0 if self._word_ids else self.vocabulary.overhead
        if self._prompts is not None:
            self._prompts.append((0,) * overhead + tuple(index + 1 for index in indices))
        count = overhead + len(indices)
        if self._word_ids:
            return BenchRequest(name, max_tokens, token_ids=self.vocabulary.token_ids(indices), prompt_tokens=count)
        return BenchRequest(name, max_tokens, text=self.vocabulary.text(indices), prompt_tokens=count)

    def tokens_of_words(self, num_words: int) -> int:
        """Of a prompt; in a chat, with a guess at the template."""
        if self.sends_chat(by_default=False):
            return num_words + _TEMPLATE_TOKENS
        return num_words if self._word_ids else num_words + self.vocabulary.overhead

    def of_text(self, name: str, text: str, max_tokens: int, think_s: float = 0.0) -> BenchRequest | None:
        """A recorded prompt; None, and noted, if it does not fit."""
        if self.sends_chat(by_default=False):
            message = {"role": "user", "content": text}
            return self.of_messages(name, [message], (), max_tokens, think_s, chat_by_default=True)
        ids = self.vocabulary.encode_text(text)
        if not self._fits_noted(None if ids is None else len(ids), max_tokens):
            return None
        if ids is None:
            self.forget_prompts()
            return BenchRequest(name, max_tokens, text=text, think_s=think_s)
        if self._prompts is not None:
            self._prompts.append(ids)
        if self.spec.prompts == "ids":
            return BenchRequest(name, max_tokens, token_ids=ids, prompt_tokens=len(ids), think_s=think_s)
        return BenchRequest(name, max_tokens, text=text, prompt_tokens=len(ids), think_s=think_s)

    def of_messages(
        self,
        name: str,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        max_tokens: int,
        think_s: float,
        *,
        chat_by_default: bool,
    ) -> BenchRequest | None:
        """Recorded messages; None, and noted, if they do not fit."""
        if not self.sends_chat(by_default=chat_by_default):
            return self.of_text(name, _transcript(messages, tools), max_tokens, think_s)
        if self.spec.prompts == "ids":
            raise ConfigError("prompts ids cannot be sent to the chat endpoint, where messages go. Use completions")
        self.forget_prompts()
        if self.spec.max_total_tokens is not None:
            ids = self.vocabulary.encode_text(_transcript(messages, tools))  # about what a template makes of them
            if not self._fits_noted(None if ids is None else len(ids), max_tokens):
                return None
        return BenchRequest(name, max_tokens, messages=tuple(messages), tools=tuple(tools) or None, think_s=think_s)

    def answer_tokens(self, answer: str) -> int:
        """Length of a recorded answer; 1, and noted, for an empty one: a server cannot be asked for less."""
        if answer not in self._answer_tokens:
            self._answer_tokens[answer] = self.vocabulary.count_text(answer) if answer else 0
        tokens = self._answer_tokens[answer]
        if tokens == 0:
            self._left_out[_NO_ANSWER] += 1
        return max(tokens, 1)

    # ---- limits -----------------------------------------------------------------------------------------------------

    def require_fit(self, prompt_tokens: int, max_tokens: int) -> None:
        limit = self.spec.max_total_tokens
        if limit is not None and prompt_tokens + max_tokens > limit:
            raise ConfigError(
                f"workload {self.spec.name} needs a context of more than max_total_tokens {limit}: a prompt of "
                f"{prompt_tokens} tokens and an answer of {max_tokens}. Ask for shorter ones"
            )

    def leave_out_empty(self) -> None:
        self._left_out[_EMPTY] += 1

    def _fits_noted(self, prompt_tokens: int | None, max_tokens: int) -> bool:
        limit = self.spec.max_total_tokens
        if limit is None:
            return True
        if prompt_tokens is None:
            self._unchecked = True
            return True
        fits = prompt_tokens + max_tokens <= limit
        self._left_out[_TOO_LONG] += not fits
        return fits

    def row_fits(self, input_tokens: int, output_tokens: int) -> bool:
        """Whether a row of a trace can be sent; noted if not."""
        return self._fits_noted(self.tokens_of_words(input_tokens), output_tokens)


_TOO_LONG = "requests left out, beyond the server's context"
_EMPTY = "requests left out, without prompt or answer"
_NO_ANSWER = "answers recorded as empty, asked for with 1 token"


# ---- generated prompts ----------------------------------------------------------------------------------------------

Made = tuple[tuple[Session, ...], str]


def _chat(draft: _Draft) -> Made:
    spec, rng = draft.spec, draft.rng("lengths")
    means = _DEFAULTS["chat"]
    words = draft.rng("words")
    sessions = []
    for number in range(_given(spec.num_requests)):
        prompt = _skewed(rng, _CHAT_PROMPTS, _given(spec.input_len) / means["input_len"])
        answer = _skewed(rng, _CHAT_ANSWERS, _given(spec.output_len) / means["output_len"])
        sessions.append(Session((draft.of_words(f"{number}", draft.vocabulary.sample(words, prompt), answer),)))
    return tuple(sessions), "lengths shaped like ShareGPT's, nothing shared"


def _skewed(rng: random.Random, shape: tuple[tuple[tuple[float, float, float], ...], int, int], scale: float) -> int:
    parts, low, high = shape
    while True:
        _, median, sigma = rng.choices(parts, [share for share, _, _ in parts])[0]
        length = median * math.exp(rng.gauss(0.0, sigma))
        if low <= length <= high:
            return max(1, round(length * scale))


def _prefix(draft: _Draft) -> Made:
    spec = draft.spec
    count, num_prefixes, prefix_len = _given(spec.num_requests), _given(spec.num_prefixes), _given(spec.prefix_len)
    words = draft.rng("prefixes")
    prefixes = [draft.vocabulary.sample(words, prefix_len) for _ in range(num_prefixes)]
    order = [number % num_prefixes for number in range(count)]
    draft.rng("order").shuffle(order)
    sessions = _singles(draft, [prefixes[which] for which in order])
    return sessions, f"{num_prefixes} shared prefixes of {prefix_len} tokens in random order"


def _multiturn(draft: _Draft) -> Made:
    spec = draft.spec
    if not draft.sends_chat(by_default=True):
        raise ConfigError("workload multiturn needs the chat endpoint: it sends the server's answers back as messages")
    if spec.prompts == "ids":
        raise ConfigError("prompts ids cannot be sent to the chat endpoint, which workload multiturn needs")
    draft.forget_prompts()
    lengths, words = draft.rng("lengths"), draft.rng("words")
    sessions = []
    for number in range(_given(spec.num_requests)):
        messages: list[dict[str, Any]] = []
        requests: list[BenchRequest] = []
        tokens = _TEMPLATE_TOKENS
        for turn in range(_given(spec.turns)):
            question, answer = _uniform(lengths, spec.input_len, spec), _uniform(lengths, spec.output_len, spec)
            content = draft.vocabulary.text(draft.vocabulary.sample(words, question))
            messages.append({"role": "user", "content": content})
            tokens += question + _TEMPLATE_TOKENS
            draft.require_fit(tokens, answer)
            think_s = (spec.think_s or 0.0) if turn else 0.0
            requests.append(BenchRequest(f"{number}.{turn}", answer, messages=tuple(messages), think_s=think_s))
            messages.append({"role": "assistant", "content": None})
            tokens += answer + _TEMPLATE_TOKENS
        sessions.append(Session(tuple(requests)))
    return tuple(sessions), f"{spec.turns} turns each, questions of {_length_text(spec.input_len, spec)} tokens"


def _plain(draft: _Draft) -> Made:
    return _singles(draft, [[]] * _given(draft.spec.num_requests)), "nothing shared"


def _batch(draft: _Draft) -> Made:
    sessions, _ = _plain(draft)
    return tuple(replace(session, at_s=0.0) for session in sessions), "all at once, nothing shared"


def _singles(draft: _Draft, prefixes: Sequence[list[int]]) -> tuple[Session, ...]:
    spec, lengths, words = draft.spec, draft.rng("lengths"), draft.rng("words")
    sessions = []
    for number, prefix in enumerate(prefixes):
        own = draft.vocabulary.sample(words, _uniform(lengths, spec.input_len, spec))
        answer = _uniform(lengths, spec.output_len, spec)
        sessions.append(Session((draft.of_words(f"{number}", prefix + own, answer),)))
    return tuple(sessions)


def _uniform(rng: random.Random, mean: int | None, spec: WorkloadSpec) -> int:
    ratio = spec.length_ratio or 0.0
    return max(1, rng.randint(round(_given(mean) * (1 - ratio)), round(_given(mean) * (1 + ratio))))


def _length_text(mean: int | None, spec: WorkloadSpec) -> str:
    return f"{mean} ± {spec.length_ratio:.0%}" if spec.length_ratio else f"{mean}"


def _given(value: int | None) -> int:
    assert value is not None, "defaults are filled in"
    return value


# ---- recorded load --------------------------------------------------------------------------------------------------


def _trace(draft: _Draft) -> Made:
    spec = draft.spec
    with _sample("mooncake_sample.jsonl") if spec.file == "sample" else nullcontext(Path(spec.file)) as path:
        trace = read_trace(path, block_size=spec.block_size, limit=spec.num_requests)
    return _recorded_texts(draft, trace) if trace.sessions else _recorded_lengths(draft, trace)


def _sample(name: str) -> AbstractContextManager[Path]:
    return importlib.resources.as_file(importlib.resources.files("kitfox.bench") / "samples" / name)


def _recorded_texts(draft: _Draft, trace: Trace) -> Made:
    line = draft.seed_line("texts")
    sessions = []
    for number, recorded in enumerate(trace.sessions):
        requests = []
        for turn, call in enumerate(recorded.calls):
            if not call.prompt:
                draft.leave_out_empty()
                continue
            request = draft.of_text(f"{number}.{turn}", line + call.prompt, draft.answer_tokens(call.answer))
            if request is not None:
                requests.append(request)
        sessions.append(Session(tuple(requests), at_s=recorded.at_s))
    return tuple(sessions), (
        f"{trace.form} trace, {_SEEDED_TEXTS}; a session's calls follow one another at once: the recorded times "
        "between them contain the recorded server's own"
    )


def _recorded_lengths(draft: _Draft, trace: Trace) -> Made:
    sessions = []
    blocks = _Blocks(draft, trace.block_size or 1)
    words = draft.rng("words")
    for number, row in enumerate(trace.rows):
        if not row.input_tokens or not row.output_tokens:
            draft.leave_out_empty()
        elif draft.row_fits(row.input_tokens, row.output_tokens):
            if row.blocks:
                indices = blocks.words(row.blocks)[: row.input_tokens]
            else:
                indices = draft.vocabulary.sample(words, row.input_tokens)
            request = draft.of_words(f"{number}", indices, row.output_tokens)
            sessions.append(Session((request,), at_s=row.at_s))
    shared = f"shared blocks of {trace.block_size} tokens" if trace.block_size else "nothing shared"
    return tuple(sessions), f"{trace.form} trace, {shared}"


class _Blocks:
    """The words that a block's hash stands for: always the same in one workload."""

    def __init__(self, draft: _Draft, block_size: int):
        self._draft, self._block_size = draft, block_size
        self._words: dict[int, list[int]] = {}

    def words(self, blocks: Sequence[int]) -> list[int]:
        indices: list[int] = []
        for block in blocks:
            if block not in self._words:
                rng = self._draft.rng(f"block {block}")
                self._words[block] = self._draft.vocabulary.sample(rng, self._block_size)
            indices += self._words[block]
        return indices


@dataclass(frozen=True)
class _Line:
    """One line of a jsonl file. `answers` are the positions of the messages that are replayed as answers; without any,
    the whole is one request.
    """

    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str = ""
    max_tokens: int | None = None
    answers: tuple[int, ...] = ()
    unused: tuple[str, ...] = ()


def _jsonl(draft: _Draft) -> Made:
    lines = _read_lines(Path(draft.spec.file))
    count = len(lines) if draft.spec.num_requests is None else draft.spec.num_requests
    if count > len(lines):
        raise ConfigError(f"num_requests must be at most the {len(lines)} lines of {draft.spec.file}. Given: {count}")
    lines = lines[:count]
    seed_line = draft.seed_line("texts")
    sessions = tuple(_replay(draft, f"{n}", line, seed_line, "", chat=True) for n, line in enumerate(lines))
    unused = sorted({key for line in lines for key in line.unused})
    return sessions, _SEEDED_TEXTS + (f"; not used of its lines: {', '.join(unused)}" if unused else "")


def _agent(draft: _Draft) -> Made:
    with _sample("agent_sessions.jsonl") as path:
        lines = _read_lines(path)
    seed_line = draft.seed_line("texts")
    sessions = tuple(
        _replay(draft, f"{n}", lines[n % len(lines)], seed_line, draft.seed_line(f"session {n}"), chat=False)
        for n in range(_given(draft.spec.num_requests))
    )
    return sessions, "recorded tool loops, one system prompt and set of tools for all"


def _replay(draft: _Draft, name: str, line: _Line, seed_line: str, session_line: str, *, chat: bool) -> Session:
    """A line's requests. Of a conversation that does not fit to its end, the turns that do."""
    spec = draft.spec
    if line.prompt:
        only = draft.of_text(name, seed_line + line.prompt, line.max_tokens or _given(spec.output_len))
        return Session((only,) if only is not None else ())
    messages = list(line.messages)
    messages[0] = _begin_with(messages[0], seed_line)
    if session_line:
        first = next(position for position, message in enumerate(messages) if message["role"] == "user")
        messages[first] = _begin_with(messages[first], session_line)
    requests: list[BenchRequest] = []
    for turn, position in enumerate(line.answers or (len(messages),)):
        if line.max_tokens is not None:
            max_tokens = line.max_tokens
        elif line.answers:
            max_tokens = draft.answer_tokens(_body(messages[position]))
        else:
            max_tokens = _given(spec.output_len)
        think_s = (spec.think_s or 0.0) if requests else 0.0
        request = draft.of_messages(
            f"{name}.{turn}", messages[:position], line.tools, max_tokens, think_s, chat_by_default=chat
        )
        if request is not None:
            requests.append(request)
    return Session(tuple(requests))


def _read_lines(path: Path) -> list[_Line]:
    """A line of only "system" and "tools" is what all lines after it begin with."""
    lines: list[_Line] = []
    system: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    for number, text in numbered_lines(path):
        try:
            row = json.loads(text)
            if isinstance(row, dict) and row and row.keys() <= {"system", "tools"}:
                if "system" in row:
                    system = ({"role": "system", "content": str(row["system"])},)
                tools = tuple(row.get("tools", tools))
            else:
                lines.append(_read_line(row, system, tools))
        except ValueError as error:
            raise ConfigError(f"{path} line {number}: {error}. Given: {text[:200]}") from error
    if not lines:
        raise ConfigError(f"{path} has no requests")
    return lines


def _read_line(row: Any, system: tuple[dict[str, Any], ...], tools: tuple[dict[str, Any], ...]) -> _Line:
    if not isinstance(row, dict) or ("messages" in row) == ("prompt" in row):
        raise ValueError("a line must be an object with either messages or prompt")
    max_tokens = row.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError(f"max_tokens must be a whole number, at least 1: {max_tokens!r}")
    unused = tuple(sorted(row.keys() - {"messages", "prompt", "tools", "max_tokens"}))
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError("prompt must be text, and not empty")
        if "tools" in row:
            raise ValueError("tools go with messages only")
        return _Line(prompt=row["prompt"], max_tokens=max_tokens, unused=unused)
    messages, tools = row["messages"], row.get("tools", tools)
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list, and not empty")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise ValueError("each message must be an object with a role")
    if not isinstance(tools, list | tuple):
        raise ValueError("tools must be a list")
    # A recorded message of tool calls alone has no content; None would ask the client to put the server's answer there.
    messages = tuple(message | {"content": message.get("content") or ""} for message in (*system, *messages))
    answers: tuple[int, ...] = ()
    if messages[-1]["role"] == "assistant":
        answers = tuple(i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0)
        if not answers:
            raise ValueError("a conversation must not be a lone answer")
    return _Line(messages, tuple(tools), max_tokens=max_tokens, answers=answers, unused=unused)


def _begin_with(message: dict[str, Any], line: str) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": line + content}
    return message | {"content": [{"type": "text", "text": line}, *content]}


def _transcript(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
    """Messages as plain text. What one message longer begins with is always what it was before."""
    parts = [f"{message['role']}:\n{_body(message)}\n\n" for message in messages]
    if tools:
        parts.insert(1, f"tools:\n{json.dumps(tools, ensure_ascii=False)}\n\n")
    return "".join(parts) + "assistant:\n"


def _body(message: dict[str, Any]) -> str:
    content = message["content"]
    parts = [content if isinstance(content, str) else "\n".join(_part_text(part) for part in content)]
    for call in message.get("tool_calls") or ():
        parts.append(json.dumps(call.get("function", call), ensure_ascii=False))
    return "\n".join(part for part in parts if part)


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else json.dumps(part, ensure_ascii=False)


_MAKERS: dict[str, Callable[[_Draft], Made]] = {
    "chat": _chat,
    "prefix": _prefix,
    "multiturn": _multiturn,
    "agent": _agent,
    "long": _plain,
    "batch": _batch,
    "random": _plain,
    "trace": _trace,
    "jsonl": _jsonl,
}


# ---- what is known of a workload ------------------------------------------------------------------------------------


def shared_prefixes(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """How many tokens each prompt shares with the start of any before it, its last token never: that one is always
    computed.

    In sorted order a prompt's best match is one of its neighbours. So the prompts are sorted once and taken away from
    last to first: the neighbours that are left are those that came before.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    before = {later: sooner for sooner, later in pairwise(order)}
    after = dict(pairwise(order))
    common = {second: _common_prefix(prompts[first], prompts[second]) for second, first in before.items()}
    shared = [0] * len(prompts)
    for number in reversed(range(len(prompts))):
        left, right = before.pop(number, None), after.pop(number, None)
        to_left = common.pop(number, 0)
        to_right = 0 if right is None else common[right]
        shared[number] = max(min(max(to_left, to_right), len(prompts[number]) - 1), 0)
        if left is not None and right is not None:
            before[right], after[left], common[right] = left, right, min(to_left, to_right)
        elif right is not None:
            del before[right], common[right]
        elif left is not None:
            del after[left]
    return shared


def _common_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _requests(sessions: Sequence[Session]) -> Iterator[BenchRequest]:
    for session in sessions:
        yield from session.requests


def _counts(sessions: Sequence[Session]) -> str:
    requests = list(_requests(sessions))
    count = f"{len(requests)} requests"
    if len(requests) != len(sessions):
        count += f" in {len(sessions)} sessions"
    prompts = [request.prompt_tokens for request in requests if request.prompt_tokens is not None]
    known = f"prompts of {_spread(prompts)} tokens, " if len(prompts) == len(requests) else ""
    return f"{count}, {known}answers of {_spread([request.max_tokens for request in requests])} tokens"


def _spread(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low}" if low == high else f"{low} to {high} (mean {sum(lengths) / len(lengths):.0f})"


def _digest(sessions: Sequence[Session]) -> str:
    digest = hashlib.sha256()
    for session in sessions:
        digest.update(f"session {session.at_s}\n".encode())
        for request in session.requests:
            what = [
                request.token_ids, request.text, request.messages, request.tools, request.max_tokens, request.think_s
            ]  # fmt: skip
            digest.update(json.dumps(what).encode() + b"\n")
    return digest.hexdigest()
