"""The process that tries a grammar out before the engine has anything to do with it.

A native compiler cannot be interrupted, may take all memory, and may crash: here that costs a process and no request
but its own. What was compiled here, within its deadline, is safe to build again beside running steps: the engine gets
it in the backend's notation, for the Python that writes that would hold up its steps.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from kitfox.constraint import Format, GrammarError
from kitfox.structured_output.schema import check_format
from kitfox.structured_output.vocabulary import Vocabulary

logger = logging.getLogger("kitfox.engine")

NICENESS = 10  # a tenth of a core that steps want too: at 19 it would get a hundredth, and miss its deadline
START_TIMEOUT_S = 60.0  # to import a backend and read the vocabulary; no request's fault, so no part of its deadline
LARGE_FORMAT_BYTES = 32 * 1024  # as MessagePack; takes tens of milliseconds to compile
LARGE_PATIENCE = 10  # how many times the deadline may pass for what is computed only where nothing else would be


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker compiles with.

    Attributes:
        memory_bytes: what it may take beyond what it needs for itself.
        timeout_s: for a format, of processor time: the worker ends itself. Of all time that is the other end's to say,
            and a worker whose other end is gone ends itself soon after.
        is_for_large: whether what it compiles is over `LARGE_FORMAT_BYTES`.
    """

    backend: str
    vocabulary: Vocabulary
    max_whitespace: int
    memory_bytes: int
    timeout_s: float
    is_for_large: bool

    @property
    def patience(self) -> int:
        """How many times its timeouts may pass on the clock."""
        return LARGE_PATIENCE if self.is_for_large else 1


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a format: how to build it, or the problem with it; or that a backend has to be loaded first."""

    notation: str = ""
    problem: str = ""
    is_loading: bool = False


def run_worker(pipe: Connection) -> None:
    """Compile one format after another, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front end's to handle
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    gc.disable()  # until all is loaded: there is no garbage before
    import numpy as np

    from kitfox.structured_output.backends import make_grammar_compiler

    options = msgspec.msgpack.decode(pipe.recv_bytes(), type=WorkerOptions)
    give_way(is_large=options.is_for_large)

    def send(verdict: Verdict) -> None:
        pipe.send_bytes(msgspec.msgpack.encode(verdict))

    def set_alarm(timeout_s: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        signal.setitimer(signal.ITIMER_REAL, timeout_s * options.patience + 1.0 if timeout_s else 0.0)

    def keep_what_is_loaded() -> None:
        gc.enable()
        gc.freeze()  # later collections need not look at it
        _limit_memory(options.memory_bytes)

    @contextlib.contextmanager
    def loading() -> Iterator[None]:
        set_alarm(START_TIMEOUT_S)
        _limit_memory(None)
        gc.disable()
        send(Verdict(is_loading=True))
        yield
        keep_what_is_loaded()
        send(Verdict(is_loading=True))
        set_alarm(options.timeout_s)

    compiler = make_grammar_compiler(
        options.backend, options.vocabulary, max_whitespace=options.max_whitespace, on_loading=loading
    )
    keep_what_is_loaded()
    row = np.empty(options.vocabulary.num_mask_words, np.int32)
    decoder = msgspec.msgpack.Decoder(Format)
    verdict = Verdict()
    with contextlib.suppress(EOFError, OSError):  # the other end is gone
        while True:
            send(verdict)
            format = decoder.decode(pipe.recv_bytes())
            set_alarm(options.timeout_s)
            try:
                check_format(format)
                compiled = compiler.compile(format)
                compiled.start().fill_bitmask(row)
                verdict = Verdict(notation=compiled.notation)
            except GrammarError as error:
                verdict = Verdict(problem=str(error))
            except MemoryError:
                verdict = Verdict(problem="it takes too much memory to compile")
            set_alarm(0.0)


def give_way(*, is_large: bool) -> None:
    """Have the calling thread, and what it starts, give way to the threads that compute steps.

    A core is given and taken in pieces of some milliseconds, whatever the share, and a step waits for the slowest of
    its threads. What is small takes few of them, and gets them at once. What is large has those that nobody else wants,
    and only half of the cores, for the kernel is not that exact: the other cores take over a step's work meanwhile.
    """
    if sys.platform != "linux":
        return  # there threads have no priorities of their own
    try:
        if is_large:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, cores[len(cores) // 2 :])
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    except OSError:
        logger.debug("priorities are not to be had here")


def _limit_memory(memory_bytes: int | None) -> None:
    """To so much more than what is in use."""
    try:
        import resource

        with open("/proc/self/statm") as statm:
            in_use = int(statm.read().split()[0]) * resource.getpagesize()
        most = resource.RLIM_INFINITY if memory_bytes is None else in_use + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    except (ImportError, OSError, ValueError):
        pass  # the deadline is the only limit then


class CompileLimitError(GrammarError):
    """A format that may compile on a better day."""


class Worker:
    """A worker process from the outside. One thread compiles with it; another may end it."""

    def __init__(self, options: WorkerOptions):
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._is_ended = False

    def compile(self, format: bytes) -> str:
        """Have a format, as MessagePack, compiled; in a new process if there is none or the last one is gone.

        Returns:
            The notation to build it of here.

        Raises:
            GrammarError: what is wrong with it. CompileLimitError: it took too long, too much memory or the process
                with it.
        """
        self.start()
        assert self._process is not None
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(format)
            verdict = self._verdict(self._options.timeout_s)
            if verdict.is_loading:
                self._verdict(START_TIMEOUT_S)
                verdict = self._verdict(self._options.timeout_s)
        except (EOFError, OSError) as error:
            process = self._process
            self._stop()
            if isinstance(error, TimeoutError) or process.returncode == -signal.SIGPROF:
                limit = f"it takes longer than {self._options.timeout_s:g} s to compile (--grammar-timeout)"
                raise CompileLimitError(limit) from None
            raise CompileLimitError("it takes too much memory to compile, or crashes the compiler") from None
        if verdict.problem:
            raise GrammarError(verdict.problem)
        return verdict.notation

    def start(self) -> None:
        """Start the process unless it runs.

        Raises:
            CompileLimitError: it does not start.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        self._pipe, theirs = Pipe()
        with theirs:
            # Not a multiprocessing child: those run the caller's own program again, which may have no guard for that.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kitfox.structured_output.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        try:
            if self._is_ended:
                raise EOFError
            self._pipe.send_bytes(msgspec.msgpack.encode(self._options))
            self._verdict(START_TIMEOUT_S)
        except (EOFError, OSError):
            self._stop()
            problem = "the process that compiles grammars does not start; the server's log says why"
            raise CompileLimitError(problem) from None

    def _verdict(self, timeout_s: float) -> Verdict:
        """The next one; a TimeoutError if none comes in time."""
        assert self._pipe is not None
        if not self._pipe.poll(timeout_s * self._options.patience):
            raise TimeoutError
        return msgspec.msgpack.decode(self._pipe.recv_bytes(), type=Verdict)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def end(self) -> None:
        """End the process at once, and start no other; what is being compiled fails."""
        self._is_ended = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()


if __name__ == "__main__":
    run_worker(Connection(int(sys.argv[1])))
