"""Programs that users of other servers would write, run as they are against the default model.

Not part of `make test`: `make clients` installs the clients in an environment of their own, and runs them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kitfox.bench.servers import StartedServer, free_port

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENT = Path(os.environ.get("KITFOX_CLIENTS", "build/clients")).absolute()
MODEL = "smollm2-135m"

pytestmark = [pytest.mark.clients, pytest.mark.model]


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "kitfox", "serve", MODEL, "--port", str(port)]
    with StartedServer(command, port, tmp_path_factory.mktemp("server") / "log") as server:
        yield server.base_url


def run(command: list[str], cwd: Path) -> None:
    environment = {**os.environ, "OTEL_SDK_DISABLED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.strip().endswith("ok")


@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
def test_python_client(program: Path, base_url: str, tmp_path: Path) -> None:
    run([str(ENVIRONMENT / "bin/python"), str(program), base_url, MODEL], tmp_path)


@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("*.mjs")), ids=lambda path: path.stem)
def test_node_client(program: Path, base_url: str) -> None:
    placed = ENVIRONMENT / "node" / program.name  # node looks for packages beside the program
    shutil.copy(program, placed)
    run(["node", str(placed), base_url, MODEL], placed.parent)
