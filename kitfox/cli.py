"""The `kitfox` command. What a command needs is imported when it runs, so that `--help` answers at once."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitfox.errors import ConfigError, EngineDeadError, KitfoxError, RequestError

if TYPE_CHECKING:
    from kitfox.config import EngineConfig
    from kitfox.engine.async_llm import AsyncLLM
    from kitfox.executor.verify import CheckResult
    from kitfox.flags import Dialect
    from kitfox.outputs import RequestOutput
    from kitfox.server.options import ServerOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for a failure, 2 for a mistake on the command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else 2
    name = {"--version": "version", "-V": "version"}.get(words[0], words[0])
    if name not in COMMANDS:
        import difflib

        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "see kitfox --help"
        print(f"kitfox: there is no command {name!r}; {hint}", file=sys.stderr)
        return 2
    return _guarded(lambda: COMMANDS[name][0](words[1:]))


def main_launch_server(argv: Sequence[str] | None = None) -> int:
    """`serve` in SGLang's dialect; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    return _guarded(lambda: serve_dialect("sglang", words), dialect="sglang")


def _guarded(command: Callable[[], None], dialect: Dialect = "vllm") -> int:
    """Run a command; an error that kitfox raises on purpose becomes one line on stderr."""
    try:
        command()
    except KitfoxError as error:
        from kitfox.flags import in_dialect

        print(f"kitfox: {in_dialect(dialect, error.message)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | RequestError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _overview() -> str:
    lines = ["usage: kitfox COMMAND ...", "", "An LLM serving engine you can read.", ""]
    lines += [f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [*lines, "", "kitfox COMMAND --help says more; `python -m kitfox.launch_server` has SGLang's flags."]
    )


# ---- serving --------------------------------------------------------------------------------------------------------


def serve_dialect(dialect: Dialect, argv: Sequence[str]) -> None:
    """Resolve the model, print the plan, start the engine process, serve until a signal.

    Raises:
        EngineDeadError: the engine could not start.
    """
    from kitfox.flags import build_engine_config
    from kitfox.server.logs import start_logging

    started = time.monotonic()
    config, options = build_engine_config(dialect, argv)
    start_logging(options.log_level, options.log_format)
    _check_address(options)
    _print_plan(config)

    from kitfox.engine.launch import async_llm

    llm = async_llm(config)  # the engine loads while the web framework is imported
    from kitfox.server.app import serve

    scheme = "https" if options.ssl_certfile else "http"
    address = f"unix:{options.uds}" if options.uds else f"{scheme}://{options.host}:{options.port}{options.root_path}"
    threading.Thread(target=_announce, args=(llm, address, started), daemon=True).start()
    serve(llm, options)
    if llm.health == "dead":
        raise EngineDeadError(f"the engine {'failed' if llm.has_served else 'did not start'}: {llm.health_detail}")


def _check_address(options: ServerOptions) -> None:
    """Find out what keeps the server from listening before the model is loaded, not after."""
    host, port = options.host, options.port
    if not options.uds:
        try:
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}. Use another --port", param="port"
            ) from error
    if options.ssl_certfile:
        import ssl

        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, options.ssl_keyfile_password)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise ConfigError(f"--ssl-certfile and --ssl-keyfile: {error}", param="ssl_certfile") from error
    if options.otlp_traces_endpoint:
        from kitfox.server.spans import check_installed

        check_installed()


def _print_plan(config: EngineConfig, memory_bytes: int | None = None) -> None:
    """Fetch the model if need be, and print what it will take; memory_bytes as in `make_plan`."""
    from kitfox.plan import make_plan, render
    from kitfox.spec_decode.proposers import guesser_of
    from kitfox.weights.hub import resolve_model
    from kitfox.weights.model_config import read_model_config

    path = resolve_model(config.model.model, revision=config.model.revision).path
    print(render(make_plan(config, read_model_config(path), memory_bytes, guesser_of(config))), flush=True)


def _announce(llm: AsyncLLM, address: str, started: float) -> None:
    """Print the phases of the engine's start and their seconds; end the server when there is no engine."""
    while llm.health == "starting":
        time.sleep(0.02)
    for name, seconds in llm.phases:
        print(f"  {name:<20} {seconds:6.2f} s", flush=True)
    if llm.kernels:
        print(f"  computing with {llm.kernels}", flush=True)
    if llm.health == "dead":
        os.kill(os.getpid(), signal.SIGTERM)
    elif llm.phases:
        print(
            f"ready after {time.monotonic() - started:.2f} s: {llm.config.model.served_name} on {address}", flush=True
        )


def _serve(argv: Sequence[str]) -> None:
    serve_dialect("vllm", argv)


def _plan(argv: Sequence[str]) -> None:
    from kitfox.flags import build_parser, read_flags, size

    parser = build_parser("vllm", "kitfox plan", description="Print what `kitfox serve` would allocate.")
    parser.add_argument(
        "--memory", dest="command.memory", type=size, help="plan for a device of this many bytes, such as 16G"
    )
    config, _, own = read_flags("vllm", argv, parser)
    _print_plan(config, own["memory"])


def _verify(argv: Sequence[str]) -> None:
    """Check that logits do not depend on company, one line a check.

    Raises:
        KitfoxError: they do.
    """
    from kitfox.flags import build_parser, read_flags

    parser = build_parser(
        "vllm",
        "kitfox verify",
        description="Prove, with this model on this machine, that a token's logits do not depend on company.",
    )
    parser.add_argument("--json", dest="command.json", action="store_true", help="print JSON instead of text")
    config, _, own = read_flags("vllm", argv, parser)

    import dataclasses

    from rich.console import Console

    from kitfox.executor.verify import Verification, built_in_prompts
    from kitfox.tokenizer import load_tokenizer
    from kitfox.weights.hub import resolve_model
    from kitfox.weights.model_config import read_model_config

    path = resolve_model(config.model.model, revision=config.model.revision).path
    model_config = read_model_config(path)
    prompts = built_in_prompts(load_tokenizer(Path(config.model.tokenizer or path)), config, model_config)
    verification = Verification(config, model_config, path, prompts)
    console = Console(soft_wrap=True, highlight=False, quiet=own["json"])
    precision = verification.precision
    weights = {"": precision.dtype, "int8": "int8", "stored": "as stored"}[precision.quantization]
    console.print(f"{config.model.model}: {verification.description}; weights {weights}, KV {precision.kv_dtype}")
    lengths = [len(prompt) for prompt in prompts]
    console.print(
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens. Each check computes them in one way, and "
        "compares hidden states and logits of all tokens bit for bit with those of each prompt alone in one chunk."
    )
    if not verification.is_promised:
        console.print(f"On {verification.device_type} equality is not promised: this is what holds here, and what not.")
    results = []
    for result in verification.checks():
        results.append(result)
        console.print(_verdict(result))
    num_failed = sum(result.difference is not None for result in results)
    if own["json"]:
        report = {
            "model": config.model.model,
            "kernels": verification.description,
            "device": verification.device_type,
            "precision": dataclasses.asdict(precision),
            "prompt_tokens": lengths,
            "promised": verification.is_promised,
            "equal": num_failed == 0,
            "checks": [dataclasses.asdict(result) for result in results],
        }
        print(json.dumps(report, indent=1))
    if num_failed:
        raise KitfoxError(f"logits depend on company: {num_failed} of {len(results)} checks found a difference")
    console.print(f"All {len(results)} checks found the same bits: logits do not depend on company.")


def _verdict(result: CheckResult) -> str:
    """A check's line, in rich's markup."""
    line = f"  {result.name:<32} {result.num_rows:6,} rows  "
    found = result.difference
    if found is None:
        return f"{line}[green]equal[/]"
    hidden, logits = (
        "not finite" if largest is None else f"by up to {largest:.3g}" for largest in (found.hidden, found.logits)
    )
    return (
        f"{line}[red]{found.num_rows:,} differ[/], first token {found.position} of prompt {found.prompt}; "
        f"hidden states {hidden}, logits {logits}"
    )


# ---- models ---------------------------------------------------------------------------------------------------------


def _pull(argv: Sequence[str]) -> None:
    from kitfox.flags import FlagParser

    parser = FlagParser("kitfox pull", description="Fetch a model and show its licence.", allow_abbrev=False)
    parser.add_argument("name", metavar="NAME", help="alias (see kitfox models) or hub id")
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    arguments = parser.parse_args(argv)

    from kitfox.weights.hub import pull_model

    pull_model(arguments.name, revision=arguments.revision)


def _models(argv: Sequence[str]) -> None:
    from kitfox.flags import FlagParser

    FlagParser("kitfox models", description="List the models that have an alias.").parse_args(argv)

    from kitfox.weights.hub import list_models

    for model in list_models():
        where = str(model.path) if model.path is not None else "not here yet: kitfox pull " + model.name
        print(f"{model.name:<16} {model.size_bytes / 1e6:7.1f} MB  {model.licence:<48} {where}")
    print("Any other model: a directory, a .gguf file or a hub id.")


# ---- answering ------------------------------------------------------------------------------------------------------


def _generate(argv: Sequence[str]) -> None:
    from kitfox.flags import build_parser, number, read_flags

    parser = build_parser("vllm", "kitfox generate", description="Answer prompts without a server.", serving=False)
    group = parser.add_argument_group("Prompts and answers")

    def add(name: str, help_text: str, **options: Any) -> None:
        group.add_argument(f"--{name}", dest=f"command.{name.replace('-', '_')}", help=help_text, **options)

    group.add_argument(
        "command.prompts", nargs="*", metavar="PROMPT", help="prompts; with none, --file or stdin is read"
    )
    add("file", "one prompt a line, or JSON lines with a `prompt` where the name ends in .jsonl", type=Path)
    add("output", "write JSON lines here instead of text to stdout", type=Path)
    add("chat", "each prompt is a user's message to the chat template", action="store_true")
    add("max-tokens", "most tokens of an answer (default 128)", type=number(0, 2**63 - 1), default=128)
    add("temperature", "0 is greedy (default 0)", type=number(0, 100, float), default=0.0)
    add("top-p", "(default 1)", type=number(0, 1, float), default=1.0)
    add("top-k", "0 is all (default 0)", type=number(-1, 2**31 - 1), default=0)
    add("stop", "a text that ends the answer; may be given several times", action="append", default=[])
    add("sampling-seed", "makes sampling reproducible", type=number(0, 2**63 - 1))
    config, _, own = read_flags("vllm", argv, parser)

    from kitfox.request import SamplingParams

    sampling = SamplingParams(
        max_tokens=own["max_tokens"],
        temperature=own["temperature"],
        top_p=own["top_p"],
        top_k=own["top_k"],
        stop=tuple(own["stop"]),
        seed=own["sampling_seed"],
    )
    prompts = _read_prompts(own["prompts"], own["file"])
    if own["output"] is not None and not own["output"].parent.is_dir():
        raise ConfigError(f"--output: there is no directory {own['output'].parent}", param="output")

    from kitfox.engine.llm import LLM

    llm = LLM(config=config)
    if own["chat"]:
        outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], sampling)
    else:
        outputs = llm.generate(prompts, sampling)
    _write_answers(prompts, outputs, own["output"])


def _read_prompts(given: list[str], file: Path | None) -> list[str]:
    """The prompts of the command line, of a file, or of stdin.

    Raises:
        ConfigError: there are none, or too many places to look for them.
    """
    if given and file is not None:
        raise ConfigError("give prompts or --file, not both", param="file")
    if given:
        return given
    if file is None and sys.stdin.isatty():
        raise ConfigError("no prompts: give some, or --file, or text on stdin", param="prompts")
    try:
        lines = (file.read_text() if file is not None else sys.stdin.read()).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts cannot be read: {error}", param="file") from error
    lines = [line for line in lines if line.strip()]
    if file is not None and file.suffix == ".jsonl":
        lines = [_prompt_of_row(row, line) for row, line in enumerate(lines, start=1)]
    if not lines:
        raise ConfigError("there is no prompt in the input", param="prompts")
    return lines


def _prompt_of_row(row: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise ConfigError(f"row {row} must be a JSON object with a text `prompt`. Given: {line[:80]!r}", param="file")
    return prompt


def _write_answers(prompts: list[str], outputs: list[RequestOutput], path: Path | None) -> None:
    if path is None:
        for prompt, output in zip(prompts, outputs, strict=True):
            if len(prompts) > 1:
                print(f"--- {prompt}")
            print(output.outputs[0].text)
        return
    with path.open("w") as file:
        for prompt, output in zip(prompts, outputs, strict=True):
            answer = output.outputs[0]
            row = {
                "prompt": prompt,
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": len(answer.token_ids),
                "cached_tokens": output.num_cached_tokens,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _chat(argv: Sequence[str]) -> None:
    from kitfox.flags import FlagParser, number

    parser = FlagParser(
        "kitfox chat",
        description="Talk to a running server, or to one started for it. /exit leaves, Ctrl-C stops an answer. "
        "KITFOX_API_KEY is the key where the server wants one.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="model to start, or to ask for (default: what is served)"
    )
    parser.add_argument("--base-url", help="a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=number(1, 2**63 - 1), help="most tokens of an answer")
    parser.add_argument("--temperature", type=number(0, 100, float), help="0 is greedy")
    arguments = parser.parse_args(argv)

    from kitfox.chat import ChatOptions, run_chat

    run_chat(ChatOptions(**vars(arguments)))


def _bench(argv: Sequence[str]) -> None:
    _measure("bench", argv, "Measure a server that speaks OpenAI's API: latencies, throughput, goodput, memory.")


def _compare(argv: Sequence[str]) -> None:
    _measure("compare", argv, "Let servers take turns at the same work, and say which is better, how surely.")


def _ablate(argv: Sequence[str]) -> None:
    _measure("ablate", argv, "Say what each of kitfox's techniques is worth on a workload.")


def _measure(name: str, argv: Sequence[str], description: str) -> None:
    from kitfox.flags import FlagParser

    try:
        from kitfox.bench import command
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "kitfox":
            raise
        raise ConfigError(f"kitfox {name} needs {error.name}: pip install 'kitfox[bench]'") from error
    parser = FlagParser(f"kitfox {name}", description=description, allow_abbrev=False)
    if status := getattr(command, name)(parser, argv):
        raise SystemExit(status)


def _version(argv: Sequence[str]) -> None:
    from kitfox.flags import FlagParser

    FlagParser("kitfox version", description="Print the version of kitfox.").parse_args(argv)
    print(importlib.metadata.version("kitfox"))


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "serve": (_serve, "serve a model behind an OpenAI-compatible API"),
    "plan": (_plan, "print what serve would allocate, without starting"),
    "verify": (_verify, "prove that a token's logits do not depend on company"),
    "chat": (_chat, "talk to a model"),
    "generate": (_generate, "answer prompts without a server"),
    "bench": (_bench, "measure any OpenAI-compatible server"),
    "compare": (_compare, "let servers take turns at the same work, and decide"),
    "ablate": (_ablate, "say what each technique of kitfox is worth"),
    "pull": (_pull, "fetch a model and show its licence"),
    "models": (_models, "list the models that have an alias"),
    "version": (_version, "print the version"),
}
