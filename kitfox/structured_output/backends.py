"""Which backend compiles a format."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from kitfox.constraint import Format, GrammarError
from kitfox.structured_output.grammar import CannotReadError, CompiledGrammar, GrammarCompiler, NotEnforcedError
from kitfox.structured_output.vocabulary import Vocabulary

BACKEND_NAMES = ("auto", "llguidance", "xgrammar")
OnLoading = Callable[[], AbstractContextManager[object]]


def make_grammar_compiler(
    name: str, vocabulary: Vocabulary, *, max_whitespace: int, on_loading: OnLoading = nullcontext
) -> GrammarCompiler:
    """The backend of that name.

    Args:
        name: of `BACKEND_NAMES`; "auto" is llguidance, and xgrammar for what llguidance refuses.
        max_whitespace: most whitespace characters between two JSON tokens, where a request does not say.
        on_loading: what "auto" loads xgrammar in, in the middle of a compile: that takes seconds.

    Raises:
        GrammarError: the backend is not installed.
    """
    if name == "xgrammar":
        return _make_xgrammar(vocabulary, max_whitespace)
    from kitfox.structured_output.llguidance_backend import LlguidanceCompiler

    llguidance = LlguidanceCompiler(vocabulary, max_whitespace=max_whitespace)
    if name == "llguidance":
        return llguidance
    assert name == "auto", f"no such backend: {name}"
    return _AutoCompiler(llguidance, vocabulary, max_whitespace, on_loading)


class _AutoCompiler(GrammarCompiler):
    """llguidance, and xgrammar for what it refuses; xgrammar is imported when that first happens."""

    def __init__(self, first: GrammarCompiler, vocabulary: Vocabulary, max_whitespace: int, on_loading: OnLoading):
        self._first = first
        self._on_loading = on_loading
        self._second: GrammarCompiler | None = None
        self._vocabulary = vocabulary
        self._max_whitespace = max_whitespace
        self._lock = threading.Lock()

    def compile(self, format: Format) -> CompiledGrammar:
        try:
            return self._first.compile(format)
        except GrammarError as error:
            refusal = error
        try:
            return self._xgrammar().compile(format)
        except GrammarError as error:
            raise GrammarError(_joined(refusal, error)) from None

    def build(self, notation: str) -> CompiledGrammar:
        backend = self._xgrammar() if notation.startswith("xgrammar:") else self._first
        return backend.build(notation)

    def _xgrammar(self) -> GrammarCompiler:
        with self._lock:
            if self._second is None:
                with self._on_loading():
                    self._second = _make_xgrammar(self._vocabulary, self._max_whitespace)
            return self._second


def _joined(first: GrammarError, second: GrammarError) -> str:
    """What both say, once; not the other's way of putting it that a grammar is none."""
    if isinstance(second, CannotReadError):
        return str(first)
    if isinstance(first, NotEnforcedError) and isinstance(second, NotEnforcedError) and first.keyword == second.keyword:
        return f"no backend enforces {first.keyword}"
    messages = sorted((str(first), str(second)), key=len)
    return messages[1] if messages[0] in messages[1] else f"{first}; {second}"


def _make_xgrammar(vocabulary: Vocabulary, max_whitespace: int) -> GrammarCompiler:
    try:
        from kitfox.structured_output.xgrammar_backend import XgrammarCompiler
    except ImportError:
        raise GrammarError("xgrammar is not installed (pip install 'kitfox[xgrammar]')") from None
    return XgrammarCompiler(vocabulary, max_whitespace=max_whitespace)
