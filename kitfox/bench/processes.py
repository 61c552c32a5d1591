"""A server's processes seen from outside: which they are, their memory and processor time. And the machine's load."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from types import TracebackType
from typing import Any, Literal

import psutil

from kitfox.bench.records import ServerSample

INTERVAL_S = 0.5
# Share of one core that may be spent on what is expensive to find out: the server needs the same cores.
_THOROUGH_SHARE = 0.002
_LOAD_WINDOW_S = 1.0


# ---- which processes ------------------------------------------------------------------------------------------------


def find_pid(port: int) -> int | None:
    """The process on this machine that listens on a TCP port: of several that share it, the ancestor of the others.

    None where nobody listens, the system does not show who does, or several do that are not related.
    """
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS shows other users' connections to root only, and then refuses to show any
        found = {process.pid for process in psutil.process_iter() if _listens(process, port)}
    else:
        found = {c.pid for c in connections if c.pid is not None and _is_listener(c, port)}
    oldest = {_oldest_listener(pid, port) for pid in found}  # the system names any one of those that share a socket
    return oldest.pop() if len(oldest) == 1 else None


def _oldest_listener(pid: int, port: int) -> int:
    try:
        ancestors = psutil.Process(pid).parents()
    except psutil.Error:
        return pid
    return next((ancestor.pid for ancestor in reversed(ancestors) if _listens(ancestor, port)), pid)


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        return any(_is_listener(connection, port) for connection in process.net_connections("tcp"))
    except psutil.Error:
        return False


def _is_listener(connection: Any, port: int) -> bool:
    return bool(connection.status == psutil.CONN_LISTEN and connection.laddr.port == port)


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it; where it leads a session, as servers started here do, also that session's orphans."""
    roots = [pid]
    if hasattr(os, "getsid"):
        for other in psutil.pids():
            with contextlib.suppress(OSError):
                if os.getsid(other) == pid != other:
                    roots.append(other)
    members: dict[int, psutil.Process] = {}
    for root in roots:
        if root not in members:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(root)
                members |= {member.pid: member for member in (process, *process.children(recursive=True))}
    return list(members.values())


# ---- what they use --------------------------------------------------------------------------------------------------


class ProcessMonitor:
    """Samples a server's processes from a thread while it is entered.

    What every sample reads costs microseconds: resident size and processor time of the known processes. Which ones
    there are, and how much of their resident memory they share (the proportional set size, PSS, for which the kernel
    walks page tables: 3 to 4 ms a GiB of small pages here), is looked up at the start and then as often as takes
    0.2 % of a core. In between a process's PSS is its resident size less what was shared at the last look.

    Attributes:
        memory_kind: "pss", or "rss" where the system does not tell every process's: then shared pages count as often
            as they are shared.
    """

    def __init__(self, pid: int, interval_s: float = INTERVAL_S):
        """Nothing is sampled yet.

        Args:
            pid: the server's first process; `family` says which others belong to it.
        """
        self.memory_kind: Literal["pss", "rss"] = "pss"
        self._pid = pid
        self._interval_s = interval_s
        self._members: list[psutil.Process] = []
        self._shared_bytes: dict[int, int] = {}
        self._next_look_s = 0.0
        self._cpu_s = self._ended_cpu_s = 0.0
        self._samples: list[ServerSample] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="process-monitor", daemon=True)

    def __enter__(self) -> ProcessMonitor:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()

    def samples(self, since: float) -> tuple[ServerSample, ...]:
        """What was sampled, the present moment included, with times and processor time counted from `since`.

        The last sample before `since` stands for that moment.

        Args:
            since: on the clock of `time.perf_counter`.
        """
        self._sample()
        with self._lock:
            taken = list(self._samples)
        before = [sample for sample in taken if sample.at_s <= since]
        first = before[-1] if before else taken[0]
        kept = [first, *(sample for sample in taken if sample.at_s > since and sample is not first)]
        return tuple(
            ServerSample(max(0.0, sample.at_s - since), sample.memory_bytes, sample.cpu_s - first.cpu_s)
            for sample in kept
        )

    def _sample_until_stopped(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            now = time.perf_counter()
            if now >= self._next_look_s:
                self._look(now)
            memory_bytes, cpu_s = 0, 0.0
            for process in self._members:
                try:
                    resident = process.memory_info().rss
                    times = process.cpu_times()
                except psutil.Error:
                    self._next_look_s = 0.0  # it ended, and there may be others instead
                    continue
                memory_bytes += max(0, resident - self._shared_bytes.get(process.pid, 0))
                # Of the children that ended, their parent knows the time once it has collected them.
                reaped = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
                cpu_s += times.user + times.system + reaped
            # Time of a process whose parent did not collect it goes missing from the sum, but it was spent.
            self._ended_cpu_s += max(0.0, self._cpu_s - cpu_s)
            self._cpu_s = cpu_s
            self._samples.append(ServerSample(now, memory_bytes, cpu_s + self._ended_cpu_s))

    def _look(self, now: float) -> None:
        began = time.thread_time()
        self._members = family(self._pid)
        self._shared_bytes = {}
        for process in self._members:
            if self.memory_kind == "rss":
                break
            with contextlib.suppress(psutil.Error):
                resident = process.memory_info().rss
                proportional = _pss_bytes(process.pid)
                if proportional is not None:
                    self._shared_bytes[process.pid] = resident - proportional
                elif process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    self.memory_kind, self._shared_bytes = "rss", {}
        spent = time.thread_time() - began
        self._next_look_s = now + spent / _THOROUGH_SHARE


def _pss_bytes(pid: int) -> int | None:
    """Resident bytes of a process, each page divided by the number of processes that have it; None if not told."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


# ---- the machine ----------------------------------------------------------------------------------------------------


def machine_load() -> float:
    """The busy share of all cores, in [0, 1], over the coming second."""
    return psutil.cpu_percent(_LOAD_WINDOW_S) / 100


def wait_until_idle(limit: float, timeout_s: float) -> float:
    """Wait until the machine's load is at most `limit`, or for `timeout_s` seconds. The last load that was seen."""
    deadline = time.monotonic() + timeout_s
    while (load := machine_load()) > limit and time.monotonic() < deadline:
        pass  # measuring takes a second
    return load
