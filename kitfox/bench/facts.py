"""What a comparison must hold constant: found out of each running server, compared, and refused where it differs.

In a value, text in parentheses is for people and takes no part in comparing. None means that it could not be found out:
that is a warning, not a refusal, because most servers say little of themselves.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import json
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kitfox.bench.processes import family
from kitfox.bench.records import Fact, FactStatus
from kitfox.bench.servers import ServedModel, get_json, program_name, served_model
from kitfox.bench.vocabulary import Encoder
from kitfox.errors import ConfigError

FIELDS = {
    "model": "sha256 of the weights",
    "precision": "number format of the weights",
    "kv_precision": "number format of the KV cache",
    "context_length": "longest prompt plus answer, in tokens",
    "device": "what computes",
    "cores": "cores that the system lets it run on",
    "threads": "threads that compute on them",
    "tokenizer": "ids, or at least numbers of tokens, of the same texts",
    "engine": "informational",
    "version": "informational",
}
INFORMATIONAL = frozenset({"engine", "version"})  # to differ in these is what comparisons are for

_PROBES = {
    "digits": "In 1987, 3.14159 and 1234567890.",
    "spaces": "a  b   c      d\te",
    "newlines": "one\ntwo\n\nthree\r\n\n\n four",
    "words": "Unhappily, they'd've over-engineered the naïve façade.",
    "cjk": "今日は天気がいいですね。你好，世界！안녕하세요",
    "emoji": "👩‍👩‍👧‍👦 🦊🇩🇪 ✓",
    "code": "def f(x):\n    return {k: v**2 for k, v in x.items()}  # done\n",
    "lookalikes": "<s> </s> <|im_end|> <|endoftext|> <bos> [INST]",
}
_ENGINES = {"llamacpp": "llama.cpp", "vllm": "vLLM", "sglang": "SGLang", "kitfox": "kitfox"}
_DTYPES = {
    "half": "float16", "f16": "float16", "fp16": "float16", "float": "float32", "f32": "float32", "fp32": "float32",
    "all f32": "float32", "bf16": "bfloat16",
}  # fmt: skip
_SHELLS = ("sh", "bash", "dash", "zsh")
_GPU_FILES = {"/dev/nvidia": "cuda", "/dev/kfd": "rocm"}


def gather(
    base_url: str,
    model: str,
    pid: int | None,
    command: Sequence[str],
    encoder: Encoder,
    *,
    api_key: str | None = None,
) -> dict[str, str | None]:
    """Everything that can be found out of one running server, by field.

    Args:
        model: the served name that requests will have.
        pid: its first process, where it runs on this machine.
        command: what was started; empty takes the process's own.
        encoder: reads texts as this server does.
    """
    witness = _Witness.of(base_url, model, pid, command, api_key)
    return {
        "model": witness.weights(),
        "precision": witness.precision(),
        "kv_precision": witness.kv_precision(),
        "context_length": witness.context_length(),
        "device": witness.device(),
        "cores": witness.cores(),
        "threads": witness.threads(),
        "tokenizer": _fingerprint(encoder),
        "engine": witness.engine(),
        "version": witness.version(),
    }


def check(found: Mapping[str, Mapping[str, str | None]], allowed: Collection[str] = ()) -> list[Fact]:
    """Compare what was gathered, by side and then field.

    Args:
        allowed: fields that may differ.

    Raises:
        ConfigError: others do. The message names each of them, what every side has, and how to accept it. Or one of
            `allowed` is no field.
    """
    fields = list(dict.fromkeys(field for facts in found.values() for field in facts))
    for name in allowed:
        if name not in fields:
            raise ConfigError(
                f"allow_difference must be one of {', '.join(fields)}. Given: {name!r}", param="allow_difference"
            )
    facts = []
    for name in fields:
        values = {side: facts_of_side.get(name) for side, facts_of_side in found.items()}
        status = _compare(name, values)
        facts.append(Fact(name, values, status, allowed=status == "differs" and name in allowed))
    refused = [f for f in facts if f.status == "differs" and not f.allowed and f.field not in INFORMATIONAL]
    if refused:
        accept = " ".join(f"--allow-difference {fact.field}" for fact in refused)
        raise ConfigError(
            "the sides differ in what a fair comparison holds constant:\n"
            + "\n".join(f"  {fact.field}: {_shown(fact)}" for fact in refused)
            + f"\nMake them equal, or accept it with {accept}",
            param="allow_difference",
        )
    return facts


# ---- comparing ------------------------------------------------------------------------------------------------------


def _compare(name: str, values: Mapping[str, str | None]) -> FactStatus:
    known = [_without_remarks(value) for value in values.values() if value is not None]
    if name == "tokenizer":
        differs = bool(_differing_probes(known))
    else:
        differs = len(set(known)) > 1
    if differs:
        return "differs"
    return "same" if len(known) == len(values) else "unknown"


def _without_remarks(value: str) -> str:
    return re.sub(r"\s*\([^()]*\)", "", value).strip()


def _shown(fact: Fact) -> str:
    values = {side: "unknown" if value is None else value for side, value in fact.values.items()}
    if fact.field == "tokenizer":
        probes = _differing_probes([value for value in fact.values.values() if value is not None])
        for side, value in fact.values.items():
            parts = (value or "").split()
            values[side] = " ".join(part for part in parts if part.partition(":")[0] in probes) or values[side]
    return ", ".join(f"{side} {value}" for side, value in values.items())


def _fingerprint(encoder: Encoder) -> str | None:
    """Of each probe "name:tokens:hash of the ids", without the last where a server only counts."""
    parts = []
    try:
        for name, text in _PROBES.items():
            encoded = encoder.encode(text)
            if isinstance(encoded, int):
                parts.append(f"{name}:{encoded}")
            else:
                digest = hashlib.sha256(" ".join(map(str, encoded)).encode()).hexdigest()
                parts.append(f"{name}:{len(encoded)}:{digest[:8]}")
    except ConfigError:  # it does not take such texts
        return None
    return " ".join(parts)


def _differing_probes(fingerprints: Sequence[str]) -> set[str]:
    """Probes of which two fingerprints have different ids, or different counts where one has no ids."""
    counts: dict[str, set[str]] = {}
    hashes: dict[str, set[str]] = {}
    for fingerprint in fingerprints:
        for part in fingerprint.split():
            name, count, *digest = part.split(":")
            counts.setdefault(name, set()).add(count)
            hashes.setdefault(name, set()).update(digest)
    return {name for name in counts if len(counts[name]) > 1 or len(hashes[name]) > 1}


# ---- finding out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Witness:
    """What one server and its system say, and how to read it.

    Attributes:
        info: /server_info, of kitfox and SGLang. props: /props, of llama.cpp. told_version: /version.
        words, env: its command line and environment, as far as they can be seen.
    """

    model: ServedModel
    pid: int | None
    words: tuple[str, ...]
    env: Mapping[str, str]
    info: Mapping[str, Any]
    props: Mapping[str, Any]
    told_version: Mapping[str, Any]

    @classmethod
    def of(cls, base_url: str, model: str, pid: int | None, command: Sequence[str], api_key: str | None) -> _Witness:
        words, env = list(command), {}
        if pid is not None:
            with contextlib.suppress(psutil.Error):
                words = words or psutil.Process(pid).cmdline()
            with contextlib.suppress(psutil.Error):
                env = psutil.Process(pid).environ()
        if words and Path(words[0]).name in _SHELLS and "-c" in words[:-1]:
            words = shlex.split(words[words.index("-c") + 1])
        info, props, version = (
            get_json(base_url, path, api_key=api_key) for path in ("/server_info", "/props", "/version")
        )
        return cls(
            served_model(base_url, model, api_key=api_key),
            pid,
            tuple(words),
            env,
            info if isinstance(info, dict) else {},
            props if isinstance(props, dict) else {},
            version if isinstance(version, dict) else {},
        )

    @property
    def is_kitfox(self) -> bool:
        return self.info.get("engine") == "kitfox"

    def engine(self) -> str | None:
        known = _ENGINES.get((self.model.owned_by or "").lower())
        if known is None and "build_info" in self.props:
            known = "llama.cpp"
        return known or (program_name(self.words) if self.words else None)

    def version(self) -> str | None:
        return _text(self.told_version.get("version") or self.info.get("version") or self.props.get("build_info"))

    # -- the model --

    def weights(self) -> str | None:
        """ "sha256:... (name)", or None where the files are not on this machine."""
        name = self._model_name()
        if name is None:
            return None
        if self.info.get("load_format") == "dummy" or self._flag("--load-format") == "dummy":
            return f"random weights of {Path(name).name}"
        path = self._model_path()
        files = _weight_files(path) if path is not None else []
        if path is None or not files:
            return None
        digests = [_sha256(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        remark = path.name if len(files) == 1 else f"{len(files)} files of {path.name}"
        return f"sha256:{digest[:16]} ({remark})"

    def _model_name(self) -> str | None:
        """A path or hub id, as the server or its command line has it."""
        told: object = self.info.get("model_path") or self.props.get("model_path") or self.model.root
        if not told and self.words:
            told = self._flag("--model", "-m", "--model-path") or self._positional("serve")
        return _text(told or self.model.id)

    def _model_path(self) -> Path | None:
        name = self._model_name()
        if self.pid is None or name is None:  # a path on another machine says nothing about this one
            return None
        path = Path(name).expanduser()
        with contextlib.suppress(psutil.Error):
            path = Path(psutil.Process(self.pid).cwd()) / path
        return path if path.exists() else _hub_snapshot(name, self.env)

    def context_length(self) -> str | None:
        return _text(self.model.max_model_len or self.info.get("context_length"))

    # -- precision --

    def precision(self) -> str | None:
        if self.is_kitfox:
            form = str(self.info.get("quantization"))
            if form == "none":
                return self._dtype()
            return form if form == "int8" else f"as stored ({form})"
        stored = self.props.get("model_ftype")
        if stored is not None:
            dtype = _dtype_name(stored)
            return dtype if dtype in _DTYPES.values() else f"as stored ({stored})"
        quantization = self._told_or_flag("quantization", "--quantization", "-q") or self._config_quantization()
        return quantization or self._dtype()

    def kv_precision(self) -> str | None:
        if self.engine() == "llama.cpp":
            if not self.words:
                return None
            keys = self._flag("--cache-type-k", "-ctk") or self.env.get("LLAMA_ARG_CACHE_TYPE_K", "f16")
            values = self._flag("--cache-type-v", "-ctv") or self.env.get("LLAMA_ARG_CACHE_TYPE_V", "f16")
            kinds = dict.fromkeys(map(_dtype_name, (keys, values)))
            return " and ".join(kinds)
        told = self._told_or_flag("kv_cache_dtype", "--kv-cache-dtype")
        return _dtype_name(told) if told else self._dtype()

    def _dtype(self) -> str | None:
        """Of floats, where the server was told one or takes the checkpoint's."""
        told = self._told_or_flag("dtype", "--dtype")
        if told:
            return _dtype_name(told)
        if self.engine() not in ("vLLM", "SGLang"):
            return None
        config = self._config()
        stored = config.get("dtype") or config.get("torch_dtype")
        # Of a float32 checkpoint it depends on version and device what they make of it.
        return _text(stored) if stored in ("bfloat16", "float16") else None

    def _config_quantization(self) -> str | None:
        quantization = self._config().get("quantization_config")
        return _text(quantization.get("quant_method")) if isinstance(quantization, dict) else None

    def _config(self) -> dict[str, Any]:
        """config.json of the served model, of its text part; empty where there is none to read."""
        path = self._model_path()
        try:
            config = json.loads(((path or Path()) / "config.json").read_text()) if path is not None else {}
        except (OSError, ValueError):
            return {}
        text_config = config.get("text_config")
        return {**config, **text_config} if isinstance(text_config, dict) else config

    # -- the machine --

    def device(self) -> str | None:
        """ "cpu", "cuda" or "rocm": as the server says, or by the device files that its processes hold open."""
        told = self._told_or_flag("device", "--device")
        if told:
            return told.partition(":")[0]
        if self.pid is None or not Path("/proc/self/fd").exists():
            return None
        for process in family(self.pid):
            try:
                opened = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")]
            except OSError:
                return None
            for prefix, device in _GPU_FILES.items():
                if any(path.startswith(prefix) for path in opened):
                    return device
        return "cpu"

    def cores(self) -> str | None:
        if self.pid is None:
            return None
        try:
            return _ranges(psutil.Process(self.pid).cpu_affinity())
        except (psutil.Error, AttributeError):  # macOS has no affinity
            return None

    def threads(self) -> str | None:
        if self.is_kitfox:
            return _text(self.info.get("num_threads") or None)
        if self.engine() == "llama.cpp":
            return self._flag("--threads", "-t") or self.env.get("LLAMA_ARG_THREADS")
        bound = self.env.get("VLLM_CPU_OMP_THREADS_BIND", "")
        if self.engine() == "vLLM" and re.fullmatch(r"[\d,-]+", bound):
            return str(_count_cores(bound))
        return self.env.get("OMP_NUM_THREADS")

    # -- reading --

    def _told_or_flag(self, key: str, *flags: str) -> str | None:
        """What /server_info says, or a command line whose flags are known; "auto" is no answer."""
        flag = self._flag(*flags) if self.engine() in ("kitfox", "vLLM", "SGLang") else None
        for value in (self.info.get(key), flag):
            if isinstance(value, str) and value not in ("", "auto"):
                return value
        return None

    def _flag(self, *names: str) -> str | None:
        """The value of the last of these flags; dashes and underscores are the same."""
        found = None
        for index, word in enumerate(self.words):
            flag, equals, value = word.partition("=")
            if flag.replace("_", "-") in names:
                found = value if equals else next(iter(self.words[index + 1 : index + 2]), None)
        return found

    def _positional(self, subcommand: str) -> str | None:
        following = self.words[self.words.index(subcommand) + 1 :] if subcommand in self.words else ()
        first = next(iter(following), None)
        return first if first is not None and not first.startswith("-") else None


def _text(value: object) -> str | None:
    return None if value in (None, "") else str(value)


def _dtype_name(name: str) -> str:
    return _DTYPES.get(name.lower(), name)


def _ranges(cores: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _count_cores(text: str) -> int:
    """Of "0-2,5" four."""
    parts = [part.split("-") for part in text.split(",") if part]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in parts)


def _weight_files(path: Path) -> list[Path]:
    """The files that hold a model's weights; of a split GGUF file all parts."""
    if path.is_file():
        part = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
        return sorted(path.parent.glob(f"{glob.escape(part[1])}-*-of-{part[2]}.gguf")) if part else [path]
    for pattern in ("*.safetensors", "*.gguf", "*.bin"):
        if files := sorted(path.glob(pattern)):
            return files
    return []


def _hub_snapshot(name: str, env: Mapping[str, str]) -> Path | None:
    """Where Hugging Face's cache has a hub id's main branch, seen with a server's environment."""
    home = Path(env.get("HF_HOME") or Path.home() / ".cache/huggingface")
    folder = Path(env.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs/main").read_text().strip()
    except OSError:
        return None
    return snapshot if snapshot.is_dir() else None


@functools.cache
def _sha256(path: str, size: int, mtime_ns: int) -> str:
    """Of a file; size and time of change are there so that a file that was replaced is read again."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
