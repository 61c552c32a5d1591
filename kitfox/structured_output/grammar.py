"""The interface of a grammar backend: compile once, then one `Grammar` for each answer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from kitfox.constraint import Format, GrammarError

BitmaskRow = npt.NDArray[np.int32]
"""One bit a token, [ceil(V / 32)] int32, least significant first; 1 is allowed."""


class NotEnforcedError(GrammarError):
    """A backend does not enforce a keyword. keyword: with its place."""

    def __init__(self, backend: str, keyword: str):
        super().__init__(f"{backend} does not enforce {keyword}")
        self.keyword = keyword


class CannotReadError(GrammarError):
    """A backend's parser does not get on with it."""


class Grammar(ABC):
    """Where one answer stands in its format. All that it says depends on the tokens accepted so far and nothing else.

    End tokens are not its business: `may_end` and `must_end` say where they belong.
    """

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, with nothing changed, if the format does not allow it here."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back, exactly."""

    @abstractmethod
    def fill_bitmask(self, row: BitmaskRow) -> None:
        """Write which tokens may come next, without end tokens. All zero where the answer must end.

        Raises:
            GrammarError: the backend's limits on time or memory were reached.
        """

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """Whether what there is is complete."""

    @property
    @abstractmethod
    def must_end(self) -> bool:
        """Whether it is complete and nothing can follow."""

    @abstractmethod
    def forced_bytes(self) -> bytes:
        """The bytes that must come next, as many as are certain; empty where there is a choice, or an end."""

    @abstractmethod
    def fork(self) -> Grammar:
        """Another answer that stands at the same place."""


class CompiledGrammar(ABC):
    """A format compiled for one vocabulary; shared between requests and safe to use from several threads.

    Attributes:
        notation: what `GrammarCompiler.build` makes it of again, in another process too: the backend's name, a colon,
            and the format as that writes it.
    """

    notation: str

    @abstractmethod
    def start(self) -> Grammar:
        """A grammar at its beginning."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """About how much it holds."""


class GrammarCompiler(ABC):
    """A backend for one vocabulary. Making it costs time in proportion to the vocabulary."""

    @abstractmethod
    def compile(self, format: Format) -> CompiledGrammar:
        """Compile a format whose limits on size were checked. Part of that is Python, and slow for large schemas.

        Raises:
            GrammarError: it is not one, or this backend does not honour every part of it exactly.
        """

    @abstractmethod
    def build(self, notation: str) -> CompiledGrammar:
        """Compile again what was compiled before: the native part of it, which lets other threads run.

        Raises:
            GrammarError: as `compile`.
        """
