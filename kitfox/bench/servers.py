"""The sides of a comparison: what the user wrote, a server started for it, and which model it serves."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from kitfox.errors import ConfigError, EngineDeadError

START_TIMEOUT_S = 600.0  # a large model from a slow disk
STOP_TIMEOUT_S = 20.0
PORT = "{port}"
_POLL_S = 0.02
_PROBE_TIMEOUT_S = 5.0
_LOG_LINES_SHOWN = 20
_LONGEST_NAME = 48
_SIDE = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]+)=)?(?P<kind>kitfox|cmd|url)(?::(?P<rest>.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_FORMS = "kitfox[:flags], cmd:COMMAND or url:URL, with NAME= in front if you like"
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # load goes straight to the server, so do we


# ---- what the user wrote --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SideSpec:
    """One side as the user wrote it.

    Attributes:
        name: letters, digits, dots, dashes and underscores: the user's, or made from the rest.
        text: what the user wrote.
        words: the command, with "{port}" where its port belongs; empty for a server that runs already.
        env: additions to the environment.
        port: the one that the command names itself; None leaves it to us.
        url: of a server that runs already, without /v1.
    """

    name: str
    text: str
    kind: Literal["kitfox", "cmd", "url"]
    words: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    port: int | None = None
    url: str | None = None

    @property
    def is_named(self) -> bool:
        """Whether the name is the user's."""
        return self.text.lstrip().startswith(f"{self.name}=")

    def start(self, log: Path, *, timeout_s: float = START_TIMEOUT_S) -> StartedServer:
        """A server for this side, started by entering it. Its output goes to `log`."""
        assert self.words, "a server at a URL runs already"
        port = self.port or free_port()
        env = {name: value.replace(PORT, str(port)) for name, value in self.env.items()}
        return StartedServer([w.replace(PORT, str(port)) for w in self.words], port, log, env=env, timeout_s=timeout_s)


def parse_sides(texts: Sequence[str]) -> list[SideSpec]:
    """All sides of a comparison. Of names that the user did not give, equal ones get numbers.

    Raises:
        ConfigError: as `parse_side`; or two sides have the same name.
    """
    sides = [parse_side(text) for text in texts]
    taken: set[str] = set()
    for side in sides:
        if side.is_named:
            if side.name in taken:
                raise ConfigError(f"two sides are named {side.name}. Given: {side.text!r}", param="sides")
            taken.add(side.name)
    for index, side in enumerate(sides):
        if not side.is_named:
            numbered = (f"{side.name}-{number}" for number in range(2, len(sides) + 2))
            name = next(name for name in (side.name, *numbered) if name not in taken)
            sides[index] = dataclasses.replace(side, name=name)
            taken.add(name)
    return sides


def parse_side(text: str) -> SideSpec:
    """One side: `kitfox[:flags]`, `cmd:COMMAND` or `url:URL`, after an optional `NAME=`.

    Raises:
        ConfigError: it is none of these, or cannot be started or reached so.
    """
    match = _SIDE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"a side must be {_FORMS}. Given: {text!r}", param="sides")
    name, kind, rest = match["name"], match["kind"], (match["rest"] or "").strip()
    if kind == "url":
        url = _base_url(rest, text)
        return SideSpec(name or _label([urllib.parse.urlsplit(url).netloc]), text, "url", url=url)
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise ConfigError(f"a side cannot be split into words: {error}. Given: {text!r}", param="sides") from None
    if kind == "kitfox":
        for flag in ("--port", "--host"):
            if any(word == flag or word.startswith(f"{flag}=") for word in words):
                raise ConfigError(f"kitfox sides get {flag} from us: leave it out. Given: {text!r}", param="sides")
        command = (sys.executable, "-m", "kitfox", "serve", *words, "--port", PORT)
        return SideSpec(name or _label(words or ["kitfox"]), text, "kitfox", command)
    env: dict[str, str] = {}
    while words and _ASSIGNMENT.fullmatch(words[0]):
        variable, _, value = words.pop(0).partition("=")
        env[variable] = value
    if not words:
        raise ConfigError(f"cmd: must be followed by a command. Given: {text!r}", param="sides")
    port = None if any(PORT in word for word in (*words, *env.values())) else _named_port(words, text)
    return SideSpec(name or _label([program_name(words)]), text, "cmd", tuple(words), env, port)


def _base_url(url: str, text: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number, or an address in brackets no address
        is_good = False
    if is_good and not (parts.query or parts.fragment):
        return url.rstrip("/").removesuffix("/v1")
    raise ConfigError(f"url: must be followed by http://HOST[:PORT] or https://... Given: {text!r}", param="sides")


def _named_port(words: Sequence[str], text: str) -> int:
    for index, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag in ("--port", "-p"):
            value = value or (words[index + 1] if index + 1 < len(words) else "")
            if value.isdecimal() and 1 <= int(value) <= 65535:
                return int(value)
            raise ConfigError(f"{flag} must be in [1, 65535]. Given: {value!r} in {text!r}", param="sides")
    raise ConfigError(
        f"a command must have {PORT} where its port belongs, or name its own with --port. Given: {text!r}",
        param="sides",
    )


def program_name(words: Sequence[str]) -> str:
    """What to call a command: its program, or the module or script that Python runs."""
    name = Path(words[0]).name
    if not name.startswith("python"):
        return name
    if "-m" in words[1:-1]:
        return words[words.index("-m") + 1]
    return next((Path(word).name for word in words[1:] if not word.startswith("-")), name)


def _label(words: Sequence[str]) -> str:
    """A name from words: of paths the last part, of flags what is behind the dashes."""
    shown = "-".join(word.rstrip("/").rpartition("/")[2].lstrip("-") for word in words)
    return re.sub(r"[^A-Za-z0-9._]+", "-", shown).strip("-")[:_LONGEST_NAME].strip("-") or "server"


# ---- a server that is started here ----------------------------------------------------------------------------------


class StartedServer:
    """A server as a context manager: started and ready inside, gone with all its processes outside.

    Nothing of it is left behind either when this process ends in another way, even by SIGKILL: see `keeper`.

    Attributes:
        base_url: where it answers.
        command: what was started.
        pid: its first process, the leader of a session of its own.
        start_s: seconds from launch until it was ready.
    """

    pid: int
    start_s: float

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = START_TIMEOUT_S,
        stop_s: float = STOP_TIMEOUT_S,
    ):
        """Nothing is started yet.

        Args:
            log: where its output goes; overwritten.
            env: additions to this process's environment.
            timeout_s: how long it may take to be ready. stop_s: and to end after SIGTERM, before SIGKILL.
        """
        self.command = tuple(command)
        self.base_url = f"http://127.0.0.1:{port}"
        self._port = port
        self._log = log
        self._env = {**os.environ, **(env or {})}
        self._timeout_s = timeout_s
        self._stop_s = stop_s

    def __enter__(self) -> StartedServer:
        """Start it and wait until it is ready.

        Raises:
            ConfigError: its port is taken, or there is no such command.
            EngineDeadError: it ended, or was not ready in time; the message has the end of its log.
        """
        _check_port_is_free(self._port)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with self._log.open("wb") as output:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", Path(__file__).with_name("keeper.py"), str(self._stop_s), *self.command],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # Ctrl-C in this terminal is ours to handle
            )
        try:
            self.pid = self._first_pid()
            self._wait_until_ready(started + self._timeout_s)
        except BaseException:
            self._stop()
            raise
        self.start_s = time.monotonic() - started
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def is_running(self) -> bool:
        """Whether its first process still runs."""
        return self._keeper.poll() is None

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        return "\n".join(lines) if lines else "(it wrote nothing)"

    def _first_pid(self) -> int:
        assert self._keeper.stdout is not None
        word, _, rest = self._keeper.stdout.readline().decode().strip().partition(" ")
        if word != "pid":
            raise ConfigError(f"cannot start {self.command[0]}: {rest or self.log_tail()}", param="sides")
        return int(rest)

    def _wait_until_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            ready = _is_ready(self._port)
            if not self.is_running():  # asked last: what is ready may be someone else's server at the same port
                assert self._keeper.stdout is not None
                status = self._keeper.stdout.read().decode().strip().removeprefix("exit ")
                raise EngineDeadError(f"{self._shown()} ended with {status} before it was ready:\n{self.log_tail()}")
            if ready:
                return
            time.sleep(_POLL_S)
        raise EngineDeadError(f"{self._shown()} was not ready within {self._timeout_s:g} s:\n{self.log_tail()}")

    def _shown(self) -> str:
        return shlex.join(self.command)

    def _stop(self) -> None:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.wait()
        self._keeper.stdout.close()


def stop_on_signals() -> None:
    """From now on SIGTERM and SIGHUP end this process by SystemExit, so that started servers are stopped on the way.

    The second signal ends it at once. To be called from the main thread.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        sys.exit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    for number in numbers:
        signal.signal(number, leave)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check_port_is_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closing connections of an earlier server are fine
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} is not free ({error.strerror}), and what answers there must not be measured as if it had "
                "been started here: stop it, or use another port",
                param="sides",
            ) from None


def _is_ready(port: int) -> bool:
    """Whether /health answers 200; for servers without it, whether /v1/models does."""
    status = _status(port, "/health")
    return status == 200 or (status in (404, 405, 501) and _status(port, "/v1/models") == 200)


def _status(port: int, path: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


# ---- what a server says ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServedModel:
    """One model of a server, from /v1/models; None where the server does not say.

    Attributes:
        id: the name to put into requests.
        root: where the server has it from.
        max_model_len: longest prompt plus answer, in tokens.
        owned_by: usually the engine.
    """

    id: str
    root: str | None = None
    max_model_len: int | None = None
    owned_by: str | None = None


def served_model(base_url: str, name: str | None = None, *, api_key: str | None = None) -> ServedModel:
    """The model that a server serves, or of several the one named.

    Raises:
        ConfigError: it serves none, several and none was named, or not this one.
        EngineDeadError: it cannot be reached, or what it says is not a list of models.
    """
    answer = get_json(base_url, "/v1/models", api_key=api_key)
    cards = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(cards, list) or not all(isinstance(c, dict) and isinstance(c.get("id"), str) for c in cards):
        raise EngineDeadError(f"{base_url}/v1/models does not answer with a list of models")
    models = [
        ServedModel(
            id=card["id"],
            root=card.get("root"),
            # llama.cpp has it among other things, and calls it differently
            max_model_len=card.get("max_model_len") or (card.get("meta") or {}).get("n_ctx"),
            owned_by=card.get("owned_by"),
        )
        for card in cards
    ]
    names = ", ".join(model.id for model in models) or "no model"
    if name is not None:
        for model in models:
            if model.id == name:
                return model
        raise ConfigError(f"{base_url} serves {names}, not {name}", param="model")
    roots = {model.root or model.id for model in models}
    if len(roots) != 1:  # several names of one model are no choice
        raise ConfigError(f"{base_url} serves {names}: say which with --model", param="model")
    return models[0]


def get_json(base_url: str, path: str, *, api_key: str | None = None, timeout_s: float = 10.0) -> Any:
    """What a server answers to GET; None where it has no such path, or does not let us in.

    Raises:
        EngineDeadError: it cannot be reached.
    """
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        with _NO_PROXY.open(
            urllib.request.Request(f"{base_url}{path}", headers=headers), timeout=timeout_s
        ) as response:
            return json.load(response)
    except (urllib.error.HTTPError, ValueError):
        return None
    except (OSError, http.client.HTTPException) as error:
        raise EngineDeadError(f"no server answers at {base_url}: {error}") from error
