"""A small process between us and a server that is started here: however we end, it leaves none of the server behind.

It holds the read end of a pipe. When the pipe closes, because we stop the server or because we were killed, it sends
SIGTERM, waits, and then kills what is left of the server's whole tree. On Linux it is the tree's subreaper, so that
even processes that left their session and lost their parents stay below it. Run as a script, without site packages, so
that it costs a server's start 20 ms; `servers.StartedServer` is its only user.

    python -I -S keeper.py STOP_S COMMAND...

On standard output it says "pid N" or "failed WHY", later "exit STATUS"; the server writes to its standard error.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02
_ORPHANS_STOP_S = 2.0


class _Tree:
    """The server's first process and everything below it."""

    def __init__(self, command: list[str]):
        self.status: int | None = None
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, 2, 1),
        ]
        defaults = (signal.SIGPIPE, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        self.pid = os.posix_spawnp(
            command[0], command, os.environ, file_actions=actions, setsid=True, setsigdef=defaults, setsigmask=()
        )

    def reap(self) -> bool:
        """Collect whoever has ended; False when nobody is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return False

    def send(self, number: signal.Signals) -> None:
        """Signal all of them."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self, stop_s: float) -> None:
        """SIGTERM to the first process, which knows how to end the others; then to orphans; then SIGKILL to all."""
        deadline = time.monotonic() + stop_s
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
        while self.status is None and self.reap() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self.status is not None and self.reap():
            self.send(signal.SIGTERM)
            deadline = time.monotonic() + min(stop_s, _ORPHANS_STOP_S)
            while self.reap() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        while self.reap():  # again and again: a process may have started another one meanwhile
            self.send(signal.SIGKILL)
            time.sleep(_POLL_S)


def _descendants() -> list[int]:
    """Ids of all processes below this one, where /proc tells; zombies too."""
    parents: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found: list[int] = []
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found += frontier
    return found


def _become_subreaper() -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody is left to hear it
        os.write(1, f"{line}\n".encode())


def main() -> None:
    stop_s, command = float(sys.argv[1]), sys.argv[2:]
    _become_subreaper()
    numbers, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # its number arrives in the pipe
    try:
        tree = _Tree(command)
    except OSError as error:
        _say(f"failed {error.strerror}")
        return
    _say(f"pid {tree.pid}")
    while tree.status is None:
        ready, _, _ = select.select([0, numbers], [], [])
        signals = os.read(numbers, 4096) if numbers in ready else b""
        tree.reap()
        if 0 in ready or set(signals) - {signal.SIGCHLD}:
            break
    tree.stop(stop_s)
    _say(f"exit {tree.status}")


if __name__ == "__main__":
    main()
