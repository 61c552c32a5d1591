"""Reasoning before the answer: <think>...</think> and its like."""

from __future__ import annotations


class ReasoningParser:
    """Cuts an answer into reasoning and the rest. The white space around the marks belongs to neither.

    Attributes:
        is_inside: whether what comes next is reasoning.
        opener, closer: the marks.
    """

    def __init__(self, opener: str, closer: str, *, starts_inside: bool, closer_id: int | None = None):
        """`starts_inside`: the prompt has opened the reasoning already. `closer_id`: the closer as one token."""
        self.opener, self.closer = opener, closer
        self._closer_id = closer_id
        self.is_inside = starts_inside
        self._may_open = True  # an opener comes first or never; one is also allowed where the prompt has it already
        self._is_over = False
        self._strips = True
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next text; returns the reasoning and the rest that became certain."""
        text = self._held + text
        self._held = ""
        if self._may_open:
            stripped = text.lstrip()
            if len(stripped) < len(self.opener) and self.opener.startswith(stripped):
                self._held = text
                return "", ""
            self._may_open = False
            if stripped.startswith(self.opener):
                self.is_inside = True
                text = stripped[len(self.opener) :]
        reasoning = ""
        if self.is_inside:
            reasoning, text = self._read_reasoning(text)
        if self._is_over and self._strips and text:
            text = text.lstrip()
            self._strips = not text
        return reasoning, text

    def _read_reasoning(self, text: str) -> tuple[str, str]:
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        place = text.find(self.closer)
        if place >= 0:
            self.is_inside, self._is_over, self._strips = False, True, True
            return text[:place].rstrip(), text[place + len(self.closer) :]
        lengths = range(min(len(self.closer) - 1, len(text)), 0, -1)
        held = next((n for n in lengths if self.closer.startswith(text[-n:])), 0)
        shown = len(text[: len(text) - held].rstrip())
        self._held = text[shown:]
        return text[:shown], ""

    def count_tokens(self, token_ids: list[int]) -> int:
        """How many of the tokens just fed are reasoning, its closer included, if any is."""
        if not self.is_inside and self._closer_id in token_ids:
            return token_ids.index(self._closer_id) + 1
        return len(token_ids)

    def finish(self) -> tuple[str, str]:
        """The rest, when no more text will come."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self.is_inside else ("", held)
