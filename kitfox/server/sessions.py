"""SGLang's sessions: conversations whose earlier turns the server puts before a prompt.

A session is token ids and nothing else. What a turn begins with is found in the prefix cache, as anybody's is, so an
open session holds no memory of the engine's, and a flush changes no answer.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from kitfox.errors import InvalidParameterError

MAX_SESSIONS = 4096
MAX_SESSION_TOKENS = 2**22  # of all turns of all sessions, each with what stood before it
MAX_SESSION_ID_CHARS = 128


class OpenSessionRequest(msgspec.Struct, kw_only=True):
    """POST /open_session.

    Attributes:
        capacity_of_str_len: not used; what limits a session is the context of its requests.
        timeout: seconds without a request after which it is closed; None is never.
        streaming: only false; every session may be gone on with from any of its turns.
    """

    capacity_of_str_len: int
    session_id: str | None = None
    timeout: float | None = None
    streaming: bool = False


class CloseSessionRequest(msgspec.Struct, kw_only=True):
    """POST /close_session."""

    session_id: str


class SessionParams(msgspec.Struct, kw_only=True):
    """Where in a session a request of /generate stands.

    Attributes:
        rid: the finished request that it goes on after; None begins anew.
        offset: how many tokens of what was before stay, a negative number how many do not; 0 keeps all.
        replace: forget what came after `rid`, or without one all turns.
        drop_previous_output: go on after that request's prompt, without its answer.
    """

    id: str
    rid: str | None = None
    offset: int = 0
    replace: bool = False
    drop_previous_output: bool = False


@dataclass(frozen=True)
class _Turn:
    parent: str | None
    prompt_ids: list[int]
    output_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass
class _Session:
    timeout_s: float | None
    last_used_s: float
    turns: dict[str, _Turn] = field(default_factory=dict)  # by the request's id, in the order of their ends

    @property
    def num_tokens(self) -> int:
        return sum(turn.num_tokens for turn in self.turns.values())

    def forget_after(self, rid: str | None) -> None:
        """Drop the turns that go on after one, and those after these; None drops all."""
        gone = {rid}
        for name, turn in list(self.turns.items()):
            if rid is None or turn.parent in gone:
                gone.add(name)
                del self.turns[name]


class Sessions:
    """Open sessions. Beyond the limits the least recently used are closed; the last one forgets its oldest turns."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, max_tokens: int = MAX_SESSION_TOKENS):
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._by_id: OrderedDict[str, _Session] = OrderedDict()
        self._num_tokens = 0

    def open(self, session_id: str | None = None, timeout_s: float | None = None) -> str:
        """Open a session and return its id.

        Raises:
            InvalidParameterError: the id is too long, or one of an open session.
        """
        self._close_idle()
        session_id = uuid.uuid4().hex if session_id is None else session_id
        if not 1 <= len(session_id) <= MAX_SESSION_ID_CHARS:
            raise InvalidParameterError("session_id", f"must have 1 to {MAX_SESSION_ID_CHARS} characters", session_id)
        if session_id in self._by_id:
            raise InvalidParameterError("session_id", "must not be an open session", session_id)
        self._by_id[session_id] = _Session(timeout_s, time.monotonic())
        self._close_oldest()
        return session_id

    def close(self, session_id: str) -> None:
        """Raises InvalidParameterError for one that is not open."""
        self._get(session_id, "session_id")
        self._drop(session_id)

    def context(self, params: SessionParams) -> list[int]:
        """The token ids that stand before a request's own; empty for one that begins anew.

        Raises:
            InvalidParameterError: the session is not open, or has no such finished request.
        """
        session = self._get(params.id, "session_params.id")
        if params.rid is not None and params.rid not in session.turns:
            limit = "must be a finished request of the session"
            raise InvalidParameterError("session_params.rid", limit, params.rid)
        if params.replace:
            num_before = session.num_tokens
            session.forget_after(params.rid)
            self._num_tokens -= num_before - session.num_tokens
        if params.rid is None:
            return []
        turn = session.turns[params.rid]
        token_ids = turn.prompt_ids + ([] if params.drop_previous_output else turn.output_ids)
        return token_ids[: params.offset] if params.offset else token_ids

    def add(self, params: SessionParams, rid: str, prompt_ids: list[int], output_ids: list[int]) -> None:
        """Keep a request that has finished; not where its session has been closed meanwhile."""
        session = self._by_id.get(params.id)
        if session is not None:
            before = session.turns.pop(rid, None)
            turn = session.turns[rid] = _Turn(params.rid, prompt_ids, output_ids)
            self._num_tokens += turn.num_tokens - (before.num_tokens if before is not None else 0)
            self._close_oldest()

    def _get(self, session_id: str, param: str) -> _Session:
        self._close_idle()
        session = self._by_id.get(session_id)
        if session is None:
            raise InvalidParameterError(param, "must be an open session", session_id)
        session.last_used_s = time.monotonic()
        self._by_id.move_to_end(session_id)
        return session

    def _close_idle(self) -> None:
        now_s = time.monotonic()
        for session_id, session in list(self._by_id.items()):
            if session.timeout_s is not None and now_s - session.last_used_s > session.timeout_s:
                self._drop(session_id)

    def _close_oldest(self) -> None:
        while len(self._by_id) > self._max_sessions or (self._num_tokens > self._max_tokens and len(self._by_id) > 1):
            self._drop(next(iter(self._by_id)))
        turns = next(iter(self._by_id.values())).turns
        while self._num_tokens > self._max_tokens and len(turns) > 1:
            self._num_tokens -= turns.pop(next(iter(turns))).num_tokens

    def _drop(self, session_id: str) -> None:
        self._num_tokens -= self._by_id.pop(session_id).num_tokens
