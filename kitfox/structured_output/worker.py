"""The process that tries a grammar out before the engine has anything to do with it.

A native compiler cannot be interrupted, may take all memory, and may crash: here that costs a process and no request
but its own. A format that was compiled here, within its deadline, is safe to compile again beside running steps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from kitfox.constraint import Format, GrammarError
from kitfox.structured_output.vocabulary import Vocabulary

START_TIMEOUT_S = 60.0  # to import a backend and read the vocabulary; no request's fault, so no part of its deadline


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker compiles with. memory_bytes: what it may take beyond what it needs for itself."""

    backend: str
    vocabulary: Vocabulary
    max_whitespace: int
    memory_bytes: int


class Verdict(msgspec.Struct, frozen=True):
    """What came of a format; `problem` is empty where it compiles."""

    problem: str = ""


def run_worker(pipe: Connection) -> None:
    """Compile one format after another, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front end's to handle
    os.nice(19)
    import numpy as np

    from kitfox.structured_output.backends import make_grammar_compiler

    options = msgspec.msgpack.decode(pipe.recv_bytes(), type=WorkerOptions)
    compiler = make_grammar_compiler(options.backend, options.vocabulary, max_whitespace=options.max_whitespace)
    _limit_memory(options.memory_bytes)
    row = np.empty(options.vocabulary.num_mask_words, np.int32)
    decoder = msgspec.msgpack.Decoder(Format)
    verdict = Verdict()
    while True:
        pipe.send_bytes(msgspec.msgpack.encode(verdict))
        try:
            format = decoder.decode(pipe.recv_bytes())
        except EOFError:
            return
        verdict = Verdict()
        try:
            compiler.compile(format).start().fill_bitmask(row)
        except GrammarError as error:
            verdict = Verdict(str(error))
        except MemoryError:
            verdict = Verdict("it takes too much memory to compile")


def _limit_memory(memory_bytes: int) -> None:
    try:
        import resource

        with open("/proc/self/statm") as statm:
            in_use = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + memory_bytes, resource.RLIM_INFINITY))
    except (ImportError, OSError, ValueError):
        pass  # the deadline is the only limit then


class Worker:
    """A worker process from the outside. Not to be shared between threads."""

    def __init__(self, options: WorkerOptions):
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def check(self, format: Format, timeout_s: float) -> None:
        """Have a format compiled, in a new process if there is none or the last one is gone.

        Raises:
            GrammarError: it cannot be compiled: what is wrong with it, or that it took too long, too much memory or the
                process with it.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(format))
            if not self._pipe.poll(timeout_s):
                self.stop()
                raise GrammarError(f"it takes longer than {timeout_s:g} s to compile (--grammar-timeout)")
            verdict = self._receive()
        except (EOFError, OSError):
            self.stop()
            raise GrammarError("it takes too much memory to compile, or crashes the compiler") from None
        if verdict.problem:
            raise GrammarError(verdict.problem)

    def _start(self) -> None:
        self.stop()
        self._pipe, theirs = Pipe()
        with theirs:
            # Not a multiprocessing child: those run the caller's own program again, which may have no guard for that.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kitfox.structured_output.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(self._options))
            is_ready = self._pipe.poll(START_TIMEOUT_S)
            if is_ready:
                self._receive()
        except (EOFError, OSError):
            is_ready = False
        if not is_ready:
            self.stop()
            raise GrammarError("the process that compiles grammars does not start; the server's log says why")

    def _receive(self) -> Verdict:
        assert self._pipe is not None
        return msgspec.msgpack.decode(self._pipe.recv_bytes(), type=Verdict)

    def stop(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


if __name__ == "__main__":
    run_worker(Connection(int(sys.argv[1])))
