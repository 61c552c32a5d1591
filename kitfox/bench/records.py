"""What is sent, what came back and what is concluded: the data of a benchmark, all of it plain and frozen.

Times are seconds on one monotonic clock that starts with the run, unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# ---- what is sent ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchRequest:
    """One request. Exactly one of `token_ids`, `text` and `messages` is set.

    Attributes:
        id: unique in its workload.
        max_tokens: the answer's length; exact where the client may ask the server to ignore end tokens.
        token_ids: the prompt for /v1/completions, token by token.
        text: the prompt for /v1/completions.
        messages: the prompt for /v1/chat/completions. An assistant message without content and
            tool calls stands for what the server answered to that turn of the same session, in order.
        tools: passed on with `messages`.
        prompt_tokens: how many tokens the server should count in the prompt; None where nobody can know before.
        think_s: pause between the end of the session's previous request and this one.
    """

    id: str
    max_tokens: int
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    prompt_tokens: int | None = None
    think_s: float = 0.0


@dataclass(frozen=True)
class Session:
    """Requests that follow one another: each is sent when the one before has been answered.

    Attributes:
        at_s: when the first is sent, for workloads that bring their own times; None leaves it to the arrivals.
    """

    requests: tuple[BenchRequest, ...]
    at_s: float | None = None


@dataclass(frozen=True)
class Workload:
    """Everything one run sends, fixed by a seed.

    Attributes:
        description: for people, one line: lengths, numbers, what is shared.
        digest: sha256 in hex over all prompts, answer lengths and times; equal digests are equal workloads.
        ideal_cached_tokens: prompt tokens that a prefix cache of endless size would not compute, the last token
            of a prompt never among them; None where unknown.
    """

    name: str
    description: str
    sessions: tuple[Session, ...]
    digest: str
    ideal_cached_tokens: int | None = None

    @property
    def num_requests(self) -> int:
        return sum(len(session.requests) for session in self.sessions)


ArrivalKind = Literal["closed", "poisson", "gamma", "trace"]


@dataclass(frozen=True)
class Arrivals:
    """When sessions start.

    Attributes:
        kind: closed keeps `concurrency` sessions running; poisson and gamma draw gaps at `rate`; trace uses each
            session's own time.
        rate: sessions per second.
        burstiness: shape of the gamma distribution of gaps: 1 is Poisson, less is burstier.
        speed: a trace's times are divided by it.
    """

    kind: ArrivalKind = "closed"
    concurrency: int = 8
    rate: float | None = None
    burstiness: float = 1.0
    speed: float = 1.0


# ---- what came back -------------------------------------------------------------------------------------------------

FailureKind = Literal["refused", "timeout", "http_status", "broken_stream", "wrong_token_count", "interrupted"]


@dataclass(frozen=True)
class Failure:
    """Why a request does not count as answered.

    Attributes:
        kind: refused: no connection. http_status: any but 200. broken_stream: the connection ended early, or what came
            is not the protocol, an error event included. wrong_token_count: not the number of tokens that was asked
            for. interrupted: the run ended first.
        detail: for people.
        status: the HTTP status of an http_status.
    """

    kind: FailureKind
    detail: str
    status: int | None = None


@dataclass(frozen=True)
class Record:
    """One request's fate.

    Attributes:
        planned_s: when an open loop wanted it sent; None in a closed loop and for later turns.
        sent_s: when the client began to connect.
        chunk_s: arrival of every chunk that carries text or tokens.
        chunk_tokens: tokens of each chunk, where the server says; otherwise empty.
        end_s: when the response was complete or had failed.
        prompt_tokens, output_tokens, cached_tokens: as the server counts them; None where it does not.
        failure: None for a request that was answered whole.
    """

    request_id: str
    session: int
    turn: int
    asked_tokens: int
    expected_prompt_tokens: int | None
    planned_s: float | None
    sent_s: float
    chunk_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    end_s: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    failure: Failure | None = None

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first chunk with text or tokens."""
        return self.chunk_s[0] - self.sent_s if self.chunk_s else None

    @property
    def e2el_s(self) -> float | None:
        """From sending to the last chunk with text or tokens."""
        return self.chunk_s[-1] - self.sent_s if self.chunk_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of the tokens after those of the first chunk; None for answers of a single chunk."""
        if len(self.chunk_s) < 2 or self.output_tokens is None:
            return None
        first = self.chunk_tokens[0] if self.chunk_tokens else 1
        later = self.output_tokens - first
        return (self.chunk_s[-1] - self.chunk_s[0]) / later if later > 0 else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between tokens as they were received. A chunk of k tokens is one gap followed by k - 1 of zero, where
        the server says how many tokens a chunk has; elsewhere a chunk counts as one.
        """
        gaps: list[float] = []
        for index in range(1, len(self.chunk_s)):
            gaps.append(self.chunk_s[index] - self.chunk_s[index - 1])
            if self.chunk_tokens:
                gaps.extend([0.0] * (self.chunk_tokens[index] - 1))
        return tuple(gaps)


@dataclass(frozen=True)
class ServerSample:
    """A server's processes at one moment.

    Attributes:
        memory_bytes: of the process and its children: proportional set size where the system tells, else resident.
        cpu_s: processor time spent since the run began, all of them together.
    """

    at_s: float
    memory_bytes: int
    cpu_s: float


# ---- what is asked of a server --------------------------------------------------------------------------------------

OBJECTIVES = ("ttft", "itl", "tpot", "e2el")


@dataclass(frozen=True)
class Slo:
    """Objectives of one request, in seconds; None asks nothing. `itl` bounds the 99th percentile of its gaps."""

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not None for name in OBJECTIVES)


# ---- what is concluded ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distribution:
    """Of raw samples; seconds. Percentiles are interpolated linearly between the two nearest samples."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Summary:
    """One run in numbers.

    Attributes:
        requests, failed: sent, and of those failed. failures: failed by kind, http_status as "http 429".
        duration_s: from the first request's sending to the last one's end.
        requests_per_s: answered requests; goodput_per_s: those that also meet every objective; goodput_share: of all
            requests sent. Without objectives both goodputs are of answered requests.
        output_tokens_per_s, total_tokens_per_s: of answered requests.
        ttft, tpot, itl, e2el: of answered requests; None without samples.
        missed: how many answered requests missed each objective.
        prompt_tokens, output_tokens: of answered requests; cached_tokens: None where the server does not say.
        tokens_per_chunk: 1 where every token has a chunk of its own, 0 where the server counts no tokens.
        itl_is_per_chunk: larger chunks could not be taken apart.
        peak_memory_bytes, mean_memory_bytes, server_cpu_s: None where the server's processes are not known.
        client_cpu_share: of one core, spent by this client while the run lasted.
        max_lag_s: how late an open loop sent its latest request.
    """

    requests: int
    failed: int
    failures: dict[str, int]
    duration_s: float
    requests_per_s: float
    goodput_per_s: float
    goodput_share: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2el: Distribution | None
    missed: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    tokens_per_chunk: float
    itl_is_per_chunk: bool
    peak_memory_bytes: int | None
    mean_memory_bytes: int | None
    server_cpu_s: float | None
    client_cpu_share: float
    max_lag_s: float


@dataclass(frozen=True)
class Run:
    """One workload sent once to one server.

    Attributes:
        side: the server's name in its experiment.
        repeat: 0-based; equal repeats of all sides send equal prompts at equal times.
        start_s: from launch to readiness, for servers started here.
        rate: sessions per second, for a run of a sweep.
        partial: it was interrupted.
    """

    side: str
    repeat: int
    records: tuple[Record, ...]
    summary: Summary
    samples: tuple[ServerSample, ...] = ()
    start_s: float | None = None
    rate: float | None = None
    partial: bool = False


FactStatus = Literal["same", "differs", "unknown"]


@dataclass(frozen=True)
class Fact:
    """Something a comparison holds constant, or should.

    Attributes:
        values: by side; None where it could not be found out.
        allowed: the user accepted the difference.
    """

    field: str
    values: dict[str, str | None]
    status: FactStatus
    allowed: bool = False


@dataclass(frozen=True)
class Interval:
    """An estimate with the limits of its 95 % confidence interval; nan limits where runs are too few to tell."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Contrast:
    """One metric of two sides over the same repeats.

    Attributes:
        metric: a key of `metrics.METRICS`.
        ratio: side over other, from paired repeats.
        better: the name of the better side, or None where these runs show no difference.
    """

    metric: str
    side: str
    other: str
    ratio: Interval
    better: str | None


@dataclass(frozen=True)
class Side:
    """One server in an experiment, as the user wrote it."""

    name: str
    spec: str
    command: str = ""


@dataclass(frozen=True)
class SweepPoint:
    """Rate asked for, and what it gave."""

    side: str
    rate: float
    goodput_per_s: float
    goodput_share: float


@dataclass(frozen=True)
class Experiment:
    """Everything a report shows.

    Attributes:
        headline: the verdict in one sentence; verdicts: one a pair of sides.
        metrics: by metric, then side: the estimate over repeats.
        target_share: the share of requests that must meet the objectives, for a sweep.
        best_rates: by side, the highest rate of a sweep at which they do; None where no rate did.
        notes: what a reader must know: warnings, what could not be checked.
        command: reproduces it.
    """

    title: str
    created: str
    command: str
    headline: str
    verdicts: tuple[str, ...]
    workload: str
    workload_digest: str
    arrivals: str
    slo: Slo
    sides: tuple[Side, ...]
    facts: tuple[Fact, ...]
    runs: tuple[Run, ...]
    metrics: dict[str, dict[str, Interval]]
    contrasts: tuple[Contrast, ...]
    sweep: tuple[SweepPoint, ...] = ()
    target_share: float = 0.9
    best_rates: dict[str, float | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    partial: bool = False
