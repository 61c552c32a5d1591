"""The walls that imports must not cross, seen at run time; `.importlinter` holds them in the source."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What the server process and the command line import before a model is loaded.
TORCH_FREE_MODULES = (
    "kitfox",
    "kitfox.cli",
    "kitfox.flags",
    "kitfox.plan",
    "kitfox.chat",
    "kitfox.bench.command",
    "kitfox.tokenizer",
    "kitfox.weights.hub",
    "kitfox.weights.model_config",
    "kitfox.kv_cache.manager",
    "kitfox.kv_cache.paged",
    "kitfox.kv_cache.radix",
    "kitfox.engine.scheduler",
    "kitfox.engine.core",
    "kitfox.engine.client",
    "kitfox.engine.async_llm",
    "kitfox.engine.llm",
    "kitfox.engine.launch",
    "kitfox.server.app",
)
HEAVY = ("torch", "transformers")


def run_python(code: str) -> str:
    """What a fresh interpreter prints; its errors become ours."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_control_plane_loads_no_torch() -> None:
    """One process imports the modules one after the other and names the first that brought something heavy in."""
    report = run_python(
        "import importlib, sys\n"
        f"for name in {TORCH_FREE_MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
        "    if loaded:\n"
        "        print(name, 'loads', *loaded)\n"
        "        break\n"
    )
    assert report == ""


@pytest.mark.parametrize("arguments", [["version"], ["serve", "--help"], ["models"]])
def test_short_commands_load_no_torch(arguments: list[str]) -> None:
    report = run_python(
        "import contextlib, io, sys\n"
        "from kitfox.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main({arguments!r})\n"
        f"print(*[heavy for heavy in {HEAVY!r} if heavy in sys.modules])\n"
    )
    assert report == ""


def modules_in(package: str) -> set[str]:
    folder = ROOT / "kitfox" / package
    return {f"kitfox.{package}.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"}


def test_the_torch_contract_names_every_engine_module_but_launch() -> None:
    """The contract lists modules one by one, because `launch` is excepted; a new one must not slip through."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    listed = set(contracts["importlinter:contract:no-torch"]["source_modules"].split())
    assert modules_in("engine") - listed == {"kitfox.engine.launch"}
    assert {name for name in listed if name.startswith("kitfox.engine.")} <= modules_in("engine")


def test_there_is_no_module_without_a_subject() -> None:
    """A helper lives beside its first caller, or gets a noun."""
    nameless = {"utils", "util", "helpers", "common", "misc", "base", "types"}
    found = [path for path in (ROOT / "kitfox").rglob("*") if path.stem in nameless]
    assert found == []
