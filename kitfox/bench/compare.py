"""Several servers, one experiment: check that it is fair, let them take turns, and say who wins.

Turns go forwards and then backwards (A B, B A, A B), one server up at a time, so that a machine that gets slower for a
while slows all of them. Each turn starts its server afresh, so that its cache is cold. Repeats have prompts of their
own, the same for every side.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from rich.console import Console

from kitfox.bench.client import Target, send
from kitfox.bench.facts import check, gather
from kitfox.bench.metrics import METRICS
from kitfox.bench.processes import find_pid, wait_until_idle
from kitfox.bench.records import BenchRequest, Fact, Run, Side
from kitfox.bench.run import Plan, measure, run_sweep
from kitfox.bench.servers import START_TIMEOUT_S, SideSpec, served_model
from kitfox.bench.vocabulary import MIN_WORDS, Encoder, Vocabulary, find_vocabulary
from kitfox.errors import ConfigError, EngineDeadError, KitfoxError

LOAD = "load"  # may be allowed as a difference, though it is of the machine and not of a side
BUSY_LIMIT = 0.15  # of all cores, before a turn
_BUSY_TIMEOUT_S = 60.0
_PROBE_TOKENS = 4


@dataclass(frozen=True)
class LiveSide:
    """A server that answers now.

    Attributes:
        pid: of its first process, where it runs on this machine.
        start_s: from launch to readiness, if it was started here.
    """

    base_url: str
    model: str
    max_model_len: int | None
    pid: int | None
    command: tuple[str, ...]
    start_s: float | None


@dataclass(frozen=True)
class Rules:
    """How sides are started and what may differ.

    Attributes:
        allowed: fields of facts whose difference the user accepts.
        declared: by side, then field: what the user says where nothing can be found out.
        model: the name to ask url sides for; None takes the one they serve.
        pid: the first process of a url side; None finds it by its port.
        api_key: what every side is asked with.
    """

    repeats: int = 3
    allowed: frozenset[str] = frozenset()
    declared: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ready_timeout_s: float = START_TIMEOUT_S
    model: str | None = None
    pid: int | None = None
    api_key: str | None = None


class Comparison:
    """Sides, and what has been found out and measured of them so far; `experiment` sums up at any moment."""

    def __init__(
        self,
        sides: Sequence[SideSpec],
        rules: Rules,
        make_target: Callable[[str, str], Target],
        make_encoder: Callable[[str, str], Encoder],
        logs: Path,
        console: Console,
        on_run: Callable[[Run], None],
    ):
        """make_target, make_encoder: from an address and a model's name. logs: a folder for what started servers print.
        on_run: told of every run when it is over.
        """
        self._sides, self._rules, self._console, self._logs = sides, rules, console, logs
        self._make_target, self._make_encoder = make_target, make_encoder
        self.on_run = on_run
        self.facts: tuple[Fact, ...] = ()
        self.described: tuple[Side, ...] = ()
        self._counts_chunks: dict[str, bool] = {}
        self.runs: list[Run] = []
        self.notes: list[str] = []
        self.interrupted = False

    def check(self, make_plan: Callable[[Vocabulary, int | None], Plan]) -> Plan:
        """Start each side once, find out what it is, refuse an unfair comparison, and make the first repeat's workload.

        Args:
            make_plan: of words that are one token each for every side, and the shortest context of any. It is called
                while the last side is up, for workloads of texts ask a server how many tokens they are.

        Raises:
            ConfigError: a fact differs and the difference is not allowed; it names the field and each side's value.
        """
        if busy := self._wait_for_idle_machine("Before the start"):
            if LOAD not in self._rules.allowed:
                raise ConfigError(f"{LOAD}: {busy} Stop it, or --allow-difference {LOAD}", param="allow_difference")
            self.notes.append(busy)
        found: dict[str, dict[str, str | None]] = {}
        vocabularies: dict[str, Vocabulary] = {}
        contexts, described = [], []
        plan: Plan | None = None
        for side in self._sides:
            with self._live(side, f"{side.name}-check") as live:
                self._console.print(f"{side.name}: {live.model}" + _started(live), highlight=False, soft_wrap=True)
                encoder = self._make_encoder(live.base_url, live.model)
                facts = gather(live.base_url, live.model, live.pid, live.command, encoder, api_key=self._rules.api_key)
                facts["cache"] = "as the running server has it" if side.url else "cold: started afresh for every turn"
                found[side.name] = facts | self._declared(side.name, facts)
                vocabulary = find_vocabulary(encoder)
                vocabularies[side.name] = self._probe(side, live, vocabulary)
                contexts.append(live.max_model_len)
                described.append(Side(side.name, side.text, shlex.join(live.command)))
                if len(described) == len(self._sides):
                    self.facts = tuple(check(found, self._rules.allowed - {LOAD}))
                    shared = replace(_shared_vocabulary(vocabularies), encoder=encoder)
                    plan = make_plan(shared, min((n for n in contexts if n is not None), default=None))
                    plan.workload(0)  # it is kept
        self.described = tuple(described)
        assert plan is not None, "nothing to compare"
        return plan

    def _declared(self, side: str, found: Mapping[str, str | None]) -> dict[str, str | None]:
        """What the user says of a side, where nothing else was found out."""
        declared = self._rules.declared.get(side, {})
        for name, value in declared.items():
            if found[name] not in (None, value):
                raise ConfigError(f"declare {side}.{name}={value}: it is {found[name]}", param="declare")
        return {name: f"{value} (declared)" for name, value in declared.items()}

    def _probe(self, side: SideSpec, live: LiveSide, vocabulary: Vocabulary) -> Vocabulary:
        """Find out whether the server takes token ids and says how many tokens a chunk has; without ids if it does not.

        Raises:
            EngineDeadError: it answers no request at all.
        """
        target = self._make_target(live.base_url, live.model)
        text = vocabulary.text(range(_PROBE_TOKENS))
        attempts = [(True, True), (True, False), (False, True), (False, False)]  # ids, counts
        for ids, counts in attempts:
            if ids and vocabulary.ids is None:
                continue
            request = BenchRequest("probe", _PROBE_TOKENS, token_ids=vocabulary.token_ids(range(_PROBE_TOKENS)))
            if not ids:
                request = BenchRequest("probe", _PROBE_TOKENS, text=text)
            record = asyncio.run(send(replace(target, count_chunk_tokens=counts), request))
            if record.failure is None or record.failure.kind == "wrong_token_count":  # the run will say so
                self._counts_chunks[side.name] = counts and bool(record.chunk_tokens)
                return vocabulary if ids else replace(vocabulary, ids=None)
            refusal = f"{record.failure.kind}: {record.failure.detail}"
        raise EngineDeadError(f"{side.name} answers no request: {refusal}")

    def run(self, plan: Plan) -> None:
        """All repeats of all sides, until done or interrupted. A side that fails to start ends it too, with a note."""
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # what is measured is kept
            self._take_turns(plan)
            return
        self.interrupted = True

    def _take_turns(self, plan: Plan) -> None:
        for repeat in range(self._rules.repeats):
            for side in self._sides if repeat % 2 == 0 else reversed(self._sides):
                try:
                    self._take_turn(side, plan, repeat)
                except KitfoxError as error:
                    self.notes.append(f"{side.name} could not be measured in repeat {repeat + 1}: {error.message}")
                    self.interrupted = True
                self.interrupted |= bool(self.runs) and self.runs[-1].partial
                if self.interrupted:
                    return

    def _take_turn(self, side: SideSpec, plan: Plan, repeat: int) -> None:
        with self._live(side, f"{side.name}-{repeat}") as live:
            target = replace(
                self._make_target(live.base_url, live.model), count_chunk_tokens=self._counts_chunks[side.name]
            )
            if busy := self._wait_for_idle_machine(f"Before repeat {repeat + 1} of {side.name}"):
                self.notes.append(busy)

            if plan.vocabulary.encoder.asks_server:  # another one by now
                encoder = self._make_encoder(live.base_url, live.model)
                plan = replace(plan, vocabulary=replace(plan.vocabulary, encoder=encoder))

            def run_once(plan: Plan) -> Run:
                run = measure(
                    target,
                    plan,
                    side=side.name,
                    repeat=repeat,
                    pid=live.pid,
                    console=self._console,
                    start_s=live.start_s,
                )
                self.runs.append(run)
                self._console.print(_one_line(run), highlight=False, soft_wrap=True)
                self.on_run(run)
                return run

            if plan.sweep is None:
                run_once(plan)
            else:
                run_sweep(lambda rate, number: run_once(plan.at_rate(rate, number)), plan.sweep)

    def _wait_for_idle_machine(self, when: str) -> str | None:
        """None once little else runs here; what to say of it if that does not come."""
        with self._console.status("waiting until the machine has nothing else to do"):
            busy = wait_until_idle(BUSY_LIMIT, _BUSY_TIMEOUT_S)
        if busy <= BUSY_LIMIT:
            return None
        return f"{when}, {100 * busy:.0f} % of this machine's cores were busy with something else."

    @contextlib.contextmanager
    def _live(self, side: SideSpec, title: str) -> Iterator[LiveSide]:
        with contextlib.ExitStack() as started:
            if side.url is not None:
                url, pid, start_s = side.url, self._rules.pid or find_local_pid(side.url), None
                command: tuple[str, ...] = ()
            else:
                server = side.start(self._logs / f"{title}.log", timeout_s=self._rules.ready_timeout_s)
                with self._console.status(f"starting {side.name}"):
                    started.enter_context(server)
                url, pid, command, start_s = server.base_url, server.pid, server.command, server.start_s
            served = served_model(url, self._rules.model if side.url else None, api_key=self._rules.api_key)
            yield LiveSide(url, served.id, served.max_model_len, pid, command, start_s)


def find_local_pid(url: str) -> int | None:
    """The first process of the server at an address; None where that is not on this machine, or hidden."""
    parts = urlsplit(url)
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(parts.hostname, None)}
    except OSError:
        return None
    own = {address.address for interface in psutil.net_if_addrs().values() for address in interface}
    if not addresses & (own | {"0.0.0.0", "::"}):
        return None
    return find_pid(parts.port or (443 if parts.scheme == "https" else 80))


def _shared_vocabulary(vocabularies: Mapping[str, Vocabulary]) -> Vocabulary:
    """Words that are one token each for all sides, with their ids where all agree on them."""
    first, *others = vocabularies.values()
    if not others:
        return first
    shared = set(first.words).intersection(*(other.words for other in others))
    words = [word for word in first.words if word in shared]
    if len(words) < MIN_WORDS:
        found = ", ".join(f"{name}: {len(vocabulary.words)}" for name, vocabulary in vocabularies.items())
        raise ConfigError(
            f"the sides' tokenizers share {len(words)} words of one token each; at least {MIN_WORDS} are needed. "
            f"Found: {found}"
        )
    overheads = {vocabulary.overhead for vocabulary in vocabularies.values()}
    ids = [_ids_of(vocabulary, words) for vocabulary in vocabularies.values()]
    agreed = ids[0] if all(each == ids[0] for each in ids) else None
    if agreed is None and len(overheads) > 1:
        raise ConfigError(
            "the sides put different numbers of tokens before a text prompt, and cannot all be sent token ids: no "
            "prompt has one length for all of them"
        )
    return Vocabulary(tuple(words), agreed, first.overhead, first.encoder)


def _ids_of(vocabulary: Vocabulary, words: Sequence[str]) -> tuple[int, ...] | None:
    if vocabulary.ids is None:
        return None
    known = dict(zip(vocabulary.words, vocabulary.ids, strict=True))
    return tuple(known[word] for word in words)


def _started(live: LiveSide) -> str:
    return f" at {live.base_url}" + (f", ready in {live.start_s:.1f} s" if live.start_s is not None else "")


def _one_line(run: Run) -> str:
    keys = ("goodput_per_s", "goodput_share", "output_tokens_per_s", "ttft_p50", "itl_p50")
    shown = ", ".join(
        f"{metric.label} {metric.format(metric.get(run.summary))} {metric.unit}"
        for metric in (METRICS[key] for key in keys)
    )
    failed = f", {run.summary.failed} failed" if run.summary.failed else ""
    rate = f" at {run.rate:.3g} req/s" if run.rate is not None else ""
    return f"{run.side}{rate}, repeat {run.repeat + 1}: {shown}{failed}" + (" (interrupted)" if run.partial else "")
