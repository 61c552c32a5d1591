"""Which processes belong to a server, and what they use."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kitfox.bench import processes
from kitfox.bench.processes import ProcessMonitor, family, find_pid, wait_until_idle
from kitfox.bench.servers import free_port

MIB = 1 << 20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other processes do; far longer than it needs."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


@contextmanager
def python(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `code` in a session of its own and has printed its first line."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            process.first_line = process.stdout.readline().strip()  # type: ignore[attr-defined]
            yield process
        finally:
            for member in family(process.pid):
                member.kill()


WORKERS = """
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
for _ in range(2):
    if os.fork() == 0:
        time.sleep(100)
print("ready", flush=True)
time.sleep(100)
"""


class TestFindPid:
    def test_nobody(self) -> None:
        assert find_pid(free_port()) is None

    @pytest.mark.parametrize(("kind", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
    def test_this_process(self, kind: socket.AddressFamily, host: str) -> None:
        try:
            server = socket.create_server((host, 0), family=kind)
        except OSError:
            pytest.skip(f"no {host} here")
        with server:
            assert find_pid(server.getsockname()[1]) == os.getpid()

    def test_workers_that_share_a_socket(self) -> None:
        port = free_port()
        with python(WORKERS, str(port)) as process:
            assert find_pid(port) == process.pid

    def test_two_that_are_not_related(self) -> None:
        code = (
            "import socket, sys, time; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1);"
            "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); print('ready', flush=True); time.sleep(100)"
        )
        port = str(free_port())
        with python(code, port), python(code, port):
            assert find_pid(int(port)) is None


MEMORY_AND_A_CHILD = """
import os, sys
child = os.fork()
if child == 0:
    held = [bytearray(b"x") * (64 << 20)]
    print("ready", flush=True)
    while sys.stdin.readline():
        held.append(bytearray(b"x") * (64 << 20))
    os._exit(0)
os.wait()
"""


class TestMonitor:
    @linux_only
    def test_memory_of_children_is_counted_and_grows_with_them(self) -> None:
        with python(MEMORY_AND_A_CHILD) as process, ProcessMonitor(process.pid, interval_s=100) as monitor:
            assert monitor.memory_kind == "pss"
            before = monitor.samples(0.0)[-1].memory_bytes
            assert 64 * MIB < before < 128 * MIB
            assert process.stdin is not None
            process.stdin.write("more\n")
            process.stdin.flush()
            until(lambda: monitor.samples(0.0)[-1].memory_bytes > before + 60 * MIB)
            assert monitor.samples(0.0)[-1].memory_bytes < before + 72 * MIB

    @linux_only
    def test_shared_pages_count_once(self) -> None:
        """A parent and two children with the same 96 MiB."""
        code = (
            "import os, time\nheld = bytearray(b'x') * (96 << 20)\n"
            "for _ in range(2):\n    if os.fork() == 0: time.sleep(100)\n"
            "print('ready', flush=True); time.sleep(100)"
        )
        with python(code) as process, ProcessMonitor(process.pid) as monitor:
            assert 96 * MIB < monitor.samples(0.0)[-1].memory_bytes < 160 * MIB

    def test_resident_size_where_nobody_tells_what_is_shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processes, "_pss_bytes", lambda pid: None)
        with ProcessMonitor(os.getpid(), interval_s=100) as monitor:
            assert monitor.memory_kind == "rss"
            resident = psutil.Process().memory_info().rss
            assert monitor.samples(0.0)[-1].memory_bytes >= resident // 2

    @linux_only
    def test_processor_time_of_children_alive_and_ended(self) -> None:
        code = (
            "import os, sys, time\n"
            "def burn(seconds):\n"
            "    while time.process_time() < seconds: pass\n"
            "print('ready', flush=True); sys.stdin.readline()\n"
            "if os.fork() == 0: burn(0.2); os._exit(0)\n"
            "os.wait()\n"
            "if os.fork() == 0: burn(0.2); print('burnt', flush=True); time.sleep(100)\n"
            "time.sleep(100)"
        )
        with python(code) as process, ProcessMonitor(process.pid, interval_s=0.01) as monitor:
            started = time.perf_counter()
            assert monitor.samples(started)[0].cpu_s == 0
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            process.stdout.readline()
            until(lambda: monitor.samples(started)[-1].cpu_s >= 0.35)
            samples = monitor.samples(started)
            assert samples[-1].cpu_s < 1.5
            assert [s.cpu_s for s in samples] == sorted(s.cpu_s for s in samples)
            assert [s.at_s for s in samples] == sorted(s.at_s for s in samples)
            assert samples[0].at_s == 0

    @linux_only
    def test_time_of_an_orphan_that_ended_stays_counted(self) -> None:
        code = (
            "import os, sys, time\n"
            "if os.fork() == 0:\n"
            "    if os.fork() == 0:\n"
            "        while time.process_time() < 0.3: pass\n"
            "        print('burnt', flush=True); sys.stdin.readline(); os._exit(0)\n"
            "    os._exit(0)\n"
            "os.wait(); time.sleep(100)"
        )
        with python(code) as process, ProcessMonitor(process.pid, interval_s=100) as monitor:
            assert len(family(process.pid)) == 2
            before = monitor._samples[0].cpu_s
            assert before >= 0.2
            assert process.stdin is not None
            process.stdin.write("end\n")
            process.stdin.flush()
            until(lambda: len(family(process.pid)) == 1)
            assert monitor.samples(0.0)[-1].cpu_s >= 0

    def test_the_last_sample_before_a_moment_stands_for_it(self) -> None:
        with ProcessMonitor(os.getpid(), interval_s=100) as monitor:
            for _ in range(3):
                monitor.samples(0.0)
            since = time.perf_counter()
            assert monitor.samples(since)[0].at_s == 0
            assert len(monitor.samples(since)) == 3

    def test_a_process_that_is_gone(self) -> None:
        with python("print('ready', flush=True)") as process:
            process.wait()
        with ProcessMonitor(process.pid) as monitor:
            assert monitor.samples(0.0)[-1].memory_bytes == 0


class TestIdle:
    def test_returns_as_soon_as_it_is_idle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loads = iter([0.9, 0.4, 0.05, 0.9])
        monkeypatch.setattr(processes, "machine_load", lambda: next(loads))
        assert wait_until_idle(0.1, 1000) == 0.05

    def test_gives_up_and_says_how_busy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processes, "machine_load", lambda: 0.9)
        assert wait_until_idle(0.1, 0) == 0.9


def test_this_module_needs_no_engine(tmp_path: Path) -> None:
    code = "import sys, kitfox.bench.processes, kitfox.bench.servers; print([m for m in sys.modules if 'torch' in m])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
