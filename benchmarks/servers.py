"""Start a server, wait until it answers, measure its processes, stop all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_POLL_S, _STOP_S = 0.05, 20.0


class Server:
    """One server and every process it started, as a context manager that leaves none behind.

    Attributes:
        start_s: seconds from launch to the first 200 from /health.
    """

    def __init__(
        self, command: Sequence[str], port: int, log: Path, env: Mapping[str, str] | None = None, timeout_s: float = 600
    ):
        self._port, self._log, self._timeout_s = port, log, timeout_s
        log.parent.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - started

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def peak_rss_bytes(self) -> int:
        """Sum of the peaks of the processes alive now."""
        return sum(_peak_rss(pid) for pid in self._tree())

    def stop(self) -> None:
        """SIGTERM to the first process, then SIGKILL to what is left of its tree, until it is gone."""
        tree = {pid: _birth(pid) for pid in self._tree()}
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        while alive := [pid for pid, birth in tree.items() if birth is not None and _birth(pid) == birth]:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        self._process.wait()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server exited with {self._process.returncode}: {self._log_tail()}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(_POLL_S)
        raise TimeoutError(f"no 200 from /health in {self._timeout_s:.0f} s: {self._log_tail()}")

    def _log_tail(self) -> str:
        return f"{self._log} ends with\n{self._log.read_text(errors='replace')[-2000:]}"

    def _tree(self) -> list[int]:
        """The first process and all below it, found by parents and, for orphans, by session."""
        pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        stats = {pid: stat for pid in pids if (stat := _stat(pid))}
        first = self._process.pid
        tree, found = set[int](), {pid for pid, stat in stats.items() if pid == first or int(stat[3]) == first}
        while found:
            tree |= found
            found = {pid for pid, stat in stats.items() if int(stat[1]) in found} - tree
        return sorted(tree)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the name: state, parent, process group, session, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _birth(pid: int) -> str | None:
    """Start time of a running process: with it a reused id is not taken for the old process."""
    stat = _stat(pid)
    return None if stat is None or stat[0] == "Z" else stat[19]


def _peak_rss(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
