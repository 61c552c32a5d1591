"""Compiles grammars away from the steps, shares them between requests, and fills masks beside the forward pass."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec
import numpy as np

from kitfox.config import StructuredOutputConfig
from kitfox.constraint import Constraint, GrammarError
from kitfox.outputs import GrammarStats
from kitfox.request import Request
from kitfox.structured_output.answer import AnswerGrammar, allow_only
from kitfox.structured_output.backends import make_grammar_compiler
from kitfox.structured_output.grammar import BitmaskRow, CompiledGrammar, GrammarCompiler
from kitfox.structured_output.retokenizing import Retokenizer
from kitfox.structured_output.vocabulary import Vocabulary
from kitfox.structured_output.worker import (
    LARGE_FORMAT_BYTES,
    CompileLimitError,
    Worker,
    WorkerOptions,
    give_way,
)

logger = logging.getLogger("kitfox.engine")

P = ParamSpec("P")
T = TypeVar("T")

# A heavy grammar keeps a worker for up to the deadline: the next ones need another. More of them than there are cores
# would only take those from the steps more often. Large formats have workers of their own: small ones need not wait.
MAX_PARALLEL_COMPILES = max(2, min(4, os.cpu_count() or 1))
MAX_PARALLEL_LARGE_COMPILES = MAX_PARALLEL_COMPILES // 2
MAX_CACHED_BYTES = 512 * 2**20
MAX_CACHED_REFUSALS = 1024
RETRY_AFTER_S = 60.0  # a machine that was too busy once need not be so always; a hostile client gets no more than this


class ToFill(NamedTuple):
    """A request whose masks a step needs.

    Attributes:
        end_token_ids: what ends it where it may end.
        draft: tokens that may turn out to follow: each needs a mask of its own.
        jumps: whether the tokens that the grammar forces are appended without sampling.
    """

    request_id: str
    answer: AnswerGrammar
    end_token_ids: frozenset[int]
    draft: list[int]
    jumps: bool

    def fill(self, rows: BitmaskRow) -> bool:
        """Write the masks [1 + drafts, W], those behind a draft that is not allowed left as they are; whether any token
        is forbidden.

        Raises:
            GrammarError: the backend's limits were reached.
        """
        restricts = self.answer.fill_bitmask(rows[0], self.end_token_ids)
        if not self.draft:
            return restricts
        answer = self.answer.fork()
        forced: list[int] = []
        for position, token_id in enumerate(self.draft):
            if forced:
                if token_id != forced.pop(0):
                    return True
            elif (token_id in self.end_token_ids and answer.may_end) or not answer.accept(token_id):
                return True
            elif self.jumps:
                forced = answer.forced_token_ids(token_id, len(self.draft) - position)
            if forced:  # without drafts these would be appended, whatever else the mask allows
                allow_only(rows[position + 1], forced[0])
                restricts = True
            elif answer.must_end:
                return True
            else:
                restricts |= answer.fill_bitmask(rows[position + 1], self.end_token_ids)
        return restricts


class Bitmasks:
    """The masks of one step, being filled on another thread. Who asks for them waits until all are."""

    def __init__(self, filling: Future[tuple[dict[str, BitmaskRow], dict[str, str]]]):
        self._filling = filling

    def rows(self) -> dict[str, BitmaskRow]:
        """By request id; a request without a row may choose any token."""
        return self._filling.result()[0]

    def errors(self) -> dict[str, str]:
        """Requests whose mask could not be made, with why; theirs allow nothing."""
        return self._filling.result()[1]


class _Compilers:
    """Threads that compile formats of one kind, each with a worker process where it needs one."""

    def __init__(self, num_threads: int, options: WorkerOptions):
        self._options = options
        self._threads = ThreadPoolExecutor(
            num_threads, "kitfox-grammar", lambda: give_way(is_large=options.is_for_large)
        )
        self._lock = threading.Lock()
        self.workers: list[Worker] = []
        self._idle_workers: list[Worker] = []

    def submit(self, task: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have something done on one of the threads."""
        return self._threads.submit(task, *args, **kwargs)

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        """One that nobody else uses: the one used last, for it runs already."""
        with self._lock:
            if not self._idle_workers:
                self._idle_workers.append(Worker(self._options))
                self.workers.append(self._idle_workers[-1])
            worker = self._idle_workers.pop()
        try:
            yield worker
        finally:
            with self._lock:
                self._idle_workers.append(worker)

    def start_worker(self) -> None:
        with self.worker() as worker, contextlib.suppress(GrammarError):  # whoever needs it will hear of it
            worker.start()

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for worker in self.workers:
                worker.end()


class GrammarManager:
    """The grammars of one engine. Nothing native runs on the thread that calls, but for what takes microseconds."""

    def __init__(self, config: StructuredOutputConfig, vocabulary: Vocabulary, max_num_seqs: int):
        self._config = config
        self._vocabulary = vocabulary
        self.stats = GrammarStats()
        options = WorkerOptions(
            backend=config.backend,
            vocabulary=vocabulary,
            max_whitespace=config.max_whitespace,
            memory_bytes=config.compile_memory_bytes,
            timeout_s=config.compile_timeout_s,
            is_for_large=False,
        )
        self._rows = np.zeros((max_num_seqs, vocabulary.num_mask_words), np.int32)
        self._compilers = _Compilers(MAX_PARALLEL_COMPILES, options)
        self._large_compilers = _Compilers(
            MAX_PARALLEL_LARGE_COMPILES, msgspec.structs.replace(options, is_for_large=True)
        )
        self._filling = ThreadPoolExecutor(1, "kitfox-masks")
        self._pending: dict[str, tuple[Constraint, Future[CompiledGrammar]]] = {}
        self._answers: dict[str, AnswerGrammar] = {}
        self._lock = threading.Lock()
        self._limit_reached_at_s: dict[bytes, float] = {}  # when formats last took too long or too much memory
        self._cache: OrderedDict[bytes, Future[CompiledGrammar]] = OrderedDict()
        # All that takes its time begins now; the first request should not have to wait for it.
        self._compiler: Future[GrammarCompiler] = self._compilers.submit(
            make_grammar_compiler, config.backend, vocabulary, max_whitespace=config.max_whitespace
        )
        self._retokenizer: Future[Retokenizer] = self._compilers.submit(Retokenizer, vocabulary)
        self._compilers.submit(self._compilers.start_worker)

    # ---- one request --------------------------------------------------------------------------------------------

    def request(self, request_id: str, constraint: Constraint) -> None:
        """Have a grammar ready for a request; `decided` says when."""
        self._pending[request_id] = (constraint, self._compiled(constraint.packed_format))

    @property
    def has_decided(self) -> bool:
        return any(compiled.done() for _, compiled in self._pending.values())

    def wait(self) -> None:
        """Until a pending request is decided."""
        wait([compiled for _, compiled in self._pending.values()], return_when=FIRST_COMPLETED)

    def decided(self) -> list[tuple[str, str]]:
        """Requests whose grammar is there now, or is refused: what is wrong with it, or ""."""
        decisions = []
        for request_id, (constraint, compiled) in list(self._pending.items()):
            if not compiled.done():
                continue
            del self._pending[request_id]
            problem = ""
            try:
                grammar = compiled.result()
            except GrammarError as error:
                problem = str(error)
            else:
                self._answers[request_id] = AnswerGrammar(
                    grammar.start(), self._vocabulary, self._retokenizer.result(), constraint.reasoning
                )
            decisions.append((request_id, problem))
        return decisions

    def answer(self, request_id: str) -> AnswerGrammar | None:
        """Where a request's answer stands; None for a request without a constraint."""
        return self._answers.get(request_id)

    def jumps(self, request: Request) -> bool:
        """Whether tokens that the grammar forces are appended without sampling. They are not where something else may
        forbid them: that is found out when they are sampled.
        """
        sampling = request.sampling
        return self._config.jump_forward and not (sampling.allowed_token_ids or sampling.bad_token_sequences)

    def forced_token_ids(self, answer: AnswerGrammar, last_token_id: int, limit: int) -> list[int]:
        """As `AnswerGrammar.forced_token_ids`, and counted."""
        if limit <= 0:
            return []
        forced = answer.forced_token_ids(last_token_id, limit)
        self.stats.num_forced_tokens += len(forced)
        return forced

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._pending.pop(request_id, None)
        self._answers.pop(request_id, None)

    # ---- compiling ----------------------------------------------------------------------------------------------

    def _compiled(self, format: bytes) -> Future[CompiledGrammar]:
        with self._lock:
            known = self._cache.get(format)
            if known is not None and not self._is_worth_another_try(format):
                self._cache.move_to_end(format)
                self.stats.num_cache_hits += 1
                return known
            self._limit_reached_at_s.pop(format, None)
            compilers = self._large_compilers if len(format) > LARGE_FORMAT_BYTES else self._compilers
            compiled = self._cache[format] = compilers.submit(self._compile, format, compilers)
        compiled.add_done_callback(lambda _: self._forget_oldest())
        return compiled

    def _is_worth_another_try(self, format: bytes) -> bool:
        failed_at_s = self._limit_reached_at_s.get(format)
        return failed_at_s is not None and time.monotonic() - failed_at_s > RETRY_AFTER_S

    def _compile(self, format: bytes, compilers: _Compilers) -> CompiledGrammar:
        """On a thread of those."""
        started = time.monotonic()
        try:
            with compilers.worker() as worker:
                notation = worker.compile(format)
            grammar = self._compiler.result().build(notation)
            self._retokenizer.result()
        except Exception as error:
            self.stats.num_refused += 1
            if isinstance(error, CompileLimitError):
                self._limit_reached_at_s[format] = time.monotonic()
            if isinstance(error, GrammarError):
                raise
            logger.exception("a grammar could not be compiled")
            raise GrammarError("the server failed to compile it; its log says why") from None
        self.stats.num_compiled += 1
        self.stats.compile_time_s += time.monotonic() - started
        return grammar

    def _forget_oldest(self) -> None:
        with self._lock:
            done = [(key, future) for key, future in self._cache.items() if future.done()]
            compiled = [(key, future.result().memory_bytes) for key, future in done if future.exception() is None]
            refused = [key for key, future in done if future.exception() is not None]
            total = sum(size for _, size in compiled)
            for key, size in compiled[:-1]:
                if total <= MAX_CACHED_BYTES:
                    break
                total -= size
                del self._cache[key]
            for key in refused[: max(len(refused) - MAX_CACHED_REFUSALS, 0)]:
                del self._cache[key]
                self._limit_reached_at_s.pop(key, None)

    # ---- masks --------------------------------------------------------------------------------------------------

    def fill(self, answers: list[ToFill]) -> Bitmasks:
        """Begin to fill the masks of a step."""
        return Bitmasks(self._filling.submit(self._fill, answers))

    def _fill(self, answers: list[ToFill]) -> tuple[dict[str, BitmaskRow], dict[str, str]]:
        started = time.monotonic()
        num_rows = sum(1 + len(wanted.draft) for wanted in answers)
        if num_rows > len(self._rows):
            self._rows = np.zeros((num_rows, self._vocabulary.num_mask_words), np.int32)
        masks, errors = {}, {}
        start = 0
        for wanted in answers:
            rows = self._rows[start : start + 1 + len(wanted.draft)]
            start += len(rows)
            rows.fill(0)
            try:
                if wanted.fill(rows):
                    masks[wanted.request_id] = rows
            except GrammarError as error:
                masks[wanted.request_id] = rows
                errors[wanted.request_id] = str(error)
        self.stats.num_masks += num_rows
        self.stats.mask_time_s += time.monotonic() - started
        return masks, errors

    def shutdown(self) -> None:
        """End every process and thread; what is being compiled is given up."""
        self._compilers.shutdown()
        self._large_compilers.shutdown()
        self._filling.shutdown(wait=False, cancel_futures=True)
