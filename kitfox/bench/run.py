"""One workload against one server: warm up, send, watch the server's processes, sum up. And the sweep over rates."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kitfox.bench.client import Target, drive
from kitfox.bench.metrics import summarise
from kitfox.bench.processes import ProcessMonitor
from kitfox.bench.records import Arrivals, BenchRequest, Record, Run, ServerSample, Slo, SweepPoint, Workload
from kitfox.bench.vocabulary import Vocabulary
from kitfox.bench.workloads import WorkloadSpec, make_workload

_WARM_UP_INPUT, _WARM_UP_OUTPUT = 128, 8
# Warm-up prompts are drawn from seeds that no run uses, so that they leave nothing in a prefix cache that a run needs.
_WARM_UP_SEED = 1 << 40
_SWEEP_SEEDS = 1 << 20  # more than anyone repeats
_FEWEST_SESSIONS = 16  # at a rate of a sweep: with fewer, a share says little
_BISECTIONS = 4
_LOWEST_RATE = 1e-3


# All sides of a repeat are sent the same workload, and making one of a long trace takes seconds.
_made_workload = functools.lru_cache(maxsize=2)(make_workload)


@dataclass(frozen=True)
class Sweep:
    """How rates are searched.

    Attributes:
        start: the first rate, in sessions per second.
        seconds: how long sessions arrive at each rate.
        target_share: of all requests sent, how many must meet every objective for a rate to hold.
    """

    start: float = 0.5
    seconds: float = 20.0
    target_share: float = 0.9


@dataclass(frozen=True)
class Plan:
    """What all runs of an experiment have in common.

    Attributes:
        seed: of the first repeat; each repeat adds one.
        warm_up: requests sent before a run, with prompts of their own.
        warm_cache: send the run's own prompts once before, so that a prefix cache holds what it can.
        sweep: each run becomes several, at different rates.
    """

    spec: WorkloadSpec
    arrivals: Arrivals
    slo: Slo
    vocabulary: Vocabulary
    seed: int = 0
    warm_up: int = 4
    warm_cache: bool = False
    sweep: Sweep | None = None

    def workload(self, repeat: int) -> Workload:
        """What one repeat sends, to every side."""
        return _made_workload(self.spec, self.vocabulary, self.seed + repeat)

    def at_rate(self, rate: float, number: int) -> Plan:
        """What a sweep runs at one rate; number: of the run in its sweep. Prompts are new each time."""
        assert self.sweep is not None
        spec = replace(self.spec, num_requests=max(_FEWEST_SESSIONS, round(rate * self.sweep.seconds)))
        kind = self.arrivals.kind if self.arrivals.kind == "gamma" else "poisson"
        arrivals = replace(self.arrivals, kind=kind, rate=rate)
        return replace(self, spec=spec, arrivals=arrivals, seed=self.seed + _SWEEP_SEEDS * (number + 1), sweep=None)

    def arrivals_text(self) -> str:
        """For people."""
        arrivals = self.arrivals
        if self.sweep is not None:
            how = "Poisson" if arrivals.kind != "gamma" else f"gamma, burstiness {arrivals.burstiness:g}"
            return f"{how}, at rates found by a sweep from {self.sweep.start:g} req/s, {self.sweep.seconds:g} s each"
        match arrivals.kind:
            case "closed":
                return f"closed loop, {arrivals.concurrency} at a time"
            case "poisson":
                return f"Poisson, {arrivals.rate:g} a second"
            case "gamma":
                return f"gamma, {arrivals.rate:g} a second, burstiness {arrivals.burstiness:g}"
            case "trace":
                return "the workload's own times" + (
                    f", {arrivals.speed:g} times as fast" if arrivals.speed != 1 else ""
                )


def measure(
    target: Target,
    plan: Plan,
    *,
    side: str,
    repeat: int,
    pid: int | None,
    console: Console,
    start_s: float | None = None,
) -> Run:
    """Send one repeat's workload and sum up. Ctrl-C ends it early, with what there is: the run is partial then.

    Args:
        pid: the server's first process; None where its memory and processor time cannot be known.
        start_s: handed on to the run.
    """
    workload = plan.workload(repeat)
    rate = None if plan.arrivals.kind in ("closed", "trace") else plan.arrivals.rate
    title = side if rate is None else f"{side} at {rate:.3g} req/s"
    progress = _Progress(console, title, workload.num_requests)
    records, samples, duration_s, client_cpu_s, partial = asyncio.run(
        _send_all(target, plan, workload, plan.seed + repeat, pid, progress)
    )
    summary = summarise(records, plan.slo, samples, client_cpu_s=client_cpu_s, duration_s=duration_s)
    return Run(side, repeat, tuple(records), summary, samples, start_s=start_s, rate=rate, partial=partial)


async def _send_all(
    target: Target, plan: Plan, workload: Workload, seed: int, pid: int | None, progress: _Progress
) -> tuple[list[Record], tuple[ServerSample, ...], float, float, bool]:
    """Records, samples of the server, seconds, this client's processor seconds, and whether it was stopped."""
    with _stopped_by_signals() as stop:
        await _warm_up(target, plan, workload, seed, stop)
        with contextlib.ExitStack() as watching:
            monitor = watching.enter_context(ProcessMonitor(pid)) if pid is not None else None
            watching.enter_context(progress)
            started, cpu_started = time.perf_counter(), time.process_time()
            records = await drive(
                target, workload, plan.arrivals, seed, on_start=progress.begin, on_record=progress.end, stop=stop
            )
            duration_s, client_cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
            samples = monitor.samples(started) if monitor is not None else ()
        return records, samples, duration_s, client_cpu_s, stop.is_set()


async def _warm_up(target: Target, plan: Plan, workload: Workload, seed: int, stop: asyncio.Event) -> None:
    if plan.warm_up:
        spec = WorkloadSpec(
            name="random",
            num_requests=plan.warm_up,
            input_len=_WARM_UP_INPUT,
            output_len=_WARM_UP_OUTPUT,
            prompts=plan.spec.prompts,
            endpoint=plan.spec.endpoint,
        )
        warm_up = make_workload(spec, plan.vocabulary, _WARM_UP_SEED + seed)
        await drive(target, warm_up, Arrivals("closed", concurrency=plan.warm_up), seed, stop=stop)
    if plan.warm_cache:
        await drive(target, workload, Arrivals("closed", concurrency=plan.arrivals.concurrency), seed, stop=stop)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; a second one ends the process as usual."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in signals}

    def on_signal() -> None:
        stop.set()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        restore()


class _Progress:
    """A line that lives while a run does: how far it is, how fast, what failed. Nothing where there is no terminal."""

    def __init__(self, console: Console, title: str, num_requests: int):
        self._title, self._num_requests = title, num_requests
        self._begun = self._done = self._failed = self._tokens = 0
        self._started = time.perf_counter()
        self._live = Live(get_renderable=self._line, console=console, refresh_per_second=4, transient=True)
        self._shown = console.is_terminal

    def __enter__(self) -> _Progress:
        if self._shown:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._live.stop()

    def begin(self, request: BenchRequest) -> None:
        self._begun += 1

    def end(self, record: Record) -> None:
        self._done += 1
        self._failed += record.failure is not None
        self._tokens += record.output_tokens or 0

    def _line(self) -> Text:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        failed = f", {self._failed} failed" if self._failed else ""
        return Text(
            f"{self._title}: {self._done}/{self._num_requests} requests{failed}, {self._begun - self._done} running, "
            f"{self._tokens / seconds:.0f} output tok/s, {seconds:.0f} s",
            no_wrap=True,
        )


# ---- the highest rate at which enough requests meet the objectives --------------------------------------------------


def run_sweep(measure_at: Callable[[float, int], Run], sweep: Sweep) -> list[Run]:
    """Raise the rate until too few requests meet the objectives, then narrow the limit down.

    The rate is doubled while it holds, or halved until it does; then the gap is halved, in logarithms, a few times. An
    interrupted run is the last one.

    Args:
        measure_at: runs at a rate; the second argument is the run's number, from 0.
    """
    runs: list[Run] = []
    held = broke = None
    rate = sweep.start
    bisections = 0
    while bisections < _BISECTIONS:
        run = measure_at(rate, len(runs))
        runs.append(run)
        if run.partial:
            break
        if _holds(run, sweep.target_share):
            held = rate
            if broke is None and _is_saturated(run):
                break
        else:
            broke = rate
        if held is None:
            rate /= 2
        elif broke is None:
            rate *= 2
        else:
            rate = (held * broke) ** 0.5
            bisections += 1
        if rate < _LOWEST_RATE:
            break
    return runs


def best_rate(runs: Sequence[Run], target_share: float) -> float | None:
    """The highest rate of a sweep at which enough requests met the objectives; None if there is none."""
    return max((run.rate for run in runs if run.rate is not None and _holds(run, target_share)), default=None)


def sweep_points(runs: Sequence[Run]) -> tuple[SweepPoint, ...]:
    """The curves of sweeps, by side and rate."""
    points = [
        SweepPoint(run.side, run.rate, run.summary.goodput_per_s, run.summary.goodput_share)
        for run in runs
        if run.rate is not None and not run.partial
    ]
    return tuple(sorted(points, key=lambda point: (point.side, point.rate)))


def _holds(run: Run, target_share: float) -> bool:
    return not run.partial and run.summary.goodput_share >= target_share


def _is_saturated(run: Run) -> bool:
    """All requests were sent before the first was answered: a higher rate would be the same experiment."""
    sent = [record.sent_s for record in run.records]
    return len(sent) > 0 and max(sent) < min(record.end_s for record in run.records)
