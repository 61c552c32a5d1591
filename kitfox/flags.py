"""The command lines of `kitfox serve` (vLLM's spellings) and `kitfox.launch_server` (SGLang's), as one table.

A row of `FLAGS` is one meaning: how each dialect spells it, the setting it fills and how its text is read. A row with
`unsupported` is known but cannot be honoured, and says so; `harmless` lists the values of such a flag that ask for what
kitfox does anyway. Nothing is ignored: an unknown flag is an error that names the nearest one.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from kitfox.config import (
    CACHE_ORGANISATIONS,
    DTYPES,
    EVICTION_POLICIES,
    KV_DTYPES,
    POOLINGS,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
    SPECULATION_METHODS,
    STRUCTURED_BACKENDS,
    AdapterOptions,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelOptions,
    SchedulerConfig,
    SpeculationConfig,
    StructuredOutputConfig,
)
from kitfox.errors import ConfigError
from kitfox.server.options import ServerOptions, api_key_of_environment
from kitfox.server.parsers import (
    REASONING_MARKS,
    REASONING_PARSER_ALIASES,
    TOOL_CALL_PARSER_ALIASES,
    TOOL_CALL_PARSERS,
)

Dialect = Literal["vllm", "sglang"]
ENGINE_OF = {"vllm": "vLLM", "sglang": "SGLang"}
PROGRAM_OF = {"vllm": "kitfox serve", "sglang": "python -m kitfox.launch_server"}
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
ADMIN_KEY_VARIABLE = "KITFOX_ADMIN_API_KEY"
PREFILL_TOKENS_UNCHUNKED = 16384  # SGLang's --max-prefill-tokens, the budget when prompts are not split


@dataclass(frozen=True)
class Flag:
    """One meaning in both dialects.

    Attributes:
        help: what it sets, for people.
        group: heading in `--help`.
        vllm, sglang: spellings separated by spaces, the usual one first; "" where a dialect has none.
        target: the setting, as "section.field"; "" when nothing is set, because kitfox always does what the flag asks.
        parse: text to value; raises argparse.ArgumentTypeError.
        switch: the value that the bare flag stands for; None when the flag takes a value.
        many: takes one or more values.
        defaults: per dialect, where it is not the setting's own default.
        unsupported: why the flag cannot be honoured; "" when it can.
        harmless: values (or "" for the bare switch) that an unsupported flag may have all the same.
    """

    help: str
    group: str
    vllm: str = ""
    sglang: str = ""
    target: str = ""
    parse: Callable[[str], Any] = str
    switch: object = None
    many: bool = False
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    unsupported: str = ""
    harmless: tuple[str, ...] = ()

    def spellings(self, dialect: Dialect) -> list[str]:
        return (self.vllm if dialect == "vllm" else self.sglang).split()


# ---- how texts become values ----------------------------------------------------------------------------------------


def size(text: str) -> int:
    """A count or a number of bytes: "4096", "4k" (4000), "4K" (4096), "1.5M", "2G"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a number such as 4096, 4k (4000) or 4K (4096). Given: {text!r}")
    number, suffix = match.groups()
    power = " kmg".index(suffix.lower() or " ")
    value = float(number) * (1000 if suffix.islower() else 1024) ** power
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"must be a whole number. Given: {text!r}")
    return int(value)


def size_or(**words: int) -> Callable[[str], int]:
    """A size, or one of some words that stand for a number; "minus_one" stands for the text -1."""

    def parse(text: str) -> int:
        name = "minus_one" if text == "-1" else text
        return words[name] if name in words else size(text)

    return parse


def number(minimum: float, maximum: float, kind: type[int] | type[float] = int) -> Callable[[str], Any]:
    """A number within limits, both included."""

    def parse(text: str) -> Any:
        limit = f"must be in [{minimum:g}, {maximum:g}]" if maximum < 2**31 else f"must be >= {minimum:g}"
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{limit}. Given: {text!r}") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{limit}. Given: {text!r}")
        return value

    return parse


def parse_quantization(text: str) -> str:
    """One of QUANTIZATIONS; a checkpoint's own method, as both engines name it, is "auto"."""
    if text in ("w8a8_int8", "compressed-tensors", "fp8", "awq", "gptq", "bitsandbytes"):
        raise argparse.ArgumentTypeError(f"{NO_QUANTISATION}. Given: {text!r}")
    return one_of(*QUANTIZATIONS, gguf="auto")(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object ({error}). Given: {text!r}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object. Given: {text!r}")
    return value


def adapter_module(text: str) -> tuple[str, str]:
    """Name and directory of an adapter: NAME=PATH, an object of either engine's, or a bare PATH, whose name is ""."""
    if not text.startswith("{"):
        name, equals, path = text.partition("=")
        name, path = (name, path) if equals else ("", text)
        if (equals and not name) or not path:
            raise argparse.ArgumentTypeError(f"must be NAME=PATH. Given: {text!r}")
        return name, path
    given = json_object(text)
    for keys in (("name", "path"), ("lora_name", "lora_path")):
        # There is one model, and no adapter is evicted, whatever an object says of that.
        if set(keys) <= set(given) <= {*keys, "base_model_name", "pinned"}:
            name, path = (given[key] for key in keys)
            if isinstance(name, str) and isinstance(path, str) and name and path:
                return name, path
    raise argparse.ArgumentTypeError(f'must be NAME=PATH or {{"name": NAME, "path": PATH}}. Given: {text!r}')


def one_of(*words: str, **aliases: str) -> Callable[[str], str]:
    """One of some words; an alias is another way to write one of them."""

    def parse(text: str) -> str:
        value = aliases.get(text, text)
        if value not in words:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(words)}. Given: {text!r}")
        return value

    return parse


def parse_device(text: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"must be auto, cpu, cuda or cuda:N. Given: {text!r}")
    return text


def words_or_json_list(text: str) -> list[str]:
    """One word, or the JSON list that vLLM's flags want; `_settle_access` joins them."""
    if not text.startswith("["):
        return [text]
    try:
        words = json.loads(text)
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise argparse.ArgumentTypeError(f"must be words, or one JSON list of texts. Given: {text!r}")
    return words


def parse_root_path(text: str) -> str:
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"must start with a slash. Given: {text!r}")
    return text.rstrip("/")


def parse_http_url(text: str) -> str:
    if re.fullmatch(r"https?://[^\s/]+\S*", text) is None:
        raise argparse.ArgumentTypeError(f"must be a URL that starts with http:// or https://. Given: {text!r}")
    return text


ANY = 2**63 - 1
_SHORT_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
parse_dtype = one_of(*DTYPES, **_SHORT_DTYPES)

# ---- the table ------------------------------------------------------------------------------------------------------

MODEL, SERVER, CACHE, SCHEDULING, DEVICE = "Model", "Server", "Cache and memory", "Scheduling", "Device"
ACCESS, OBSERVING, PARALLEL, FEATURES, SPEED = "Access", "Observing", "Parallelism", "Features", "Speed"

NOT_BUILT = "is not built yet"
NO_PARALLEL = "several devices are not supported yet"
NO_TREE = "trees of guesses are not built yet: an answer has one guess for each place"
NO_OFFLOAD = "offloading to other memory is not built yet"
NO_CAPTURE = "captured or compiled steps are not built yet; kitfox runs eagerly"
NO_OVERLAP = "overlapped scheduling is not built yet"
NO_QUANTISATION = "must be one of auto, none, int8: other methods are not built yet"

FLAGS: tuple[Flag, ...] = (
    # -- model
    Flag(
        "alias, directory, .gguf file or hub id",
        MODEL,
        "--model",
        "--model-path --model",
        "model.model",
    ),
    Flag(
        "names the API answers to; the first one is reported",
        MODEL,
        "--served-model-name",
        "--served-model-name",
        "model.served_model_names",
        many=True,
    ),
    Flag(
        "longest prompt plus answer, in tokens: 4096, 4k (4000), 4K (4096), or auto for the longest that fits",
        MODEL,
        "--max-model-len",
        "--context-length",
        "model.max_model_len",
        size_or(auto=-1, minus_one=-1),
    ),
    Flag("element type of weights and activations", MODEL, "--dtype", "--dtype", "model.dtype", parse_dtype),
    Flag("where the tokenizer is, if not with the model", MODEL, "--tokenizer", "--tokenizer-path", "model.tokenizer"),
    Flag("revision of a hub model", MODEL, "--revision", "--revision", "model.revision"),
    Flag(
        "auto, safetensors, gguf or dummy (random weights)",
        MODEL,
        "--load-format",
        "--load-format",
        "model.load_format",
        one_of("auto", "safetensors", "gguf", "dummy"),
    ),
    Flag(
        "chat template, as a file or as jinja2 text", MODEL, "--chat-template", "--chat-template", "model.chat_template"
    ),
    Flag(
        "how embeddings are made where a request does not say: the mean of all tokens' states, or the last",
        MODEL,
        "--pooling",
        "--pooling",
        "model.pooling",
        one_of(*POOLINGS),
    ),
    Flag(
        "seed of what is random without a seed of its own",
        MODEL,
        "--seed",
        "--random-seed",
        "model.seed",
        number(0, ANY),
    ),
    Flag(
        "accepted; kitfox never runs code that comes with a checkpoint",
        MODEL,
        "--trust-remote-code",
        "--trust-remote-code",
        switch=True,
    ),
    # -- server
    Flag(
        "address to listen on; 0.0.0.0 is every interface",
        SERVER,
        "--host",
        "--host",
        "server.host",
    ),
    Flag(
        "port to listen on",
        SERVER,
        "--port",
        "--port",
        "server.port",
        number(1, 65535),
        defaults={"vllm": 8000, "sglang": 30000},
    ),
    Flag(
        "seconds that running requests may take to finish after SIGTERM",
        SERVER,
        "--shutdown-timeout",
        "--shutdown-timeout",
        "server.shutdown_timeout_s",
        number(0, 86400, float),
    ),
    Flag(
        "folder of uploaded files and batches, for this server alone (default: in KITFOX_CACHE)",
        SERVER,
        "--storage-dir",
        "--storage-dir",
        "server.storage_dir",
    ),
    Flag("unix socket to listen on, instead of host and port", SERVER, "--uds", "--uds", "server.uds"),
    Flag(
        "prefix of every path, where a proxy in front adds one",
        SERVER,
        "--root-path",
        "--root-path --fastapi-root-path",
        "server.root_path",
        parse_root_path,
    ),
    Flag(
        "bytes that the body of a request may have, such as 16M; more is a 413",
        SERVER,
        "--max-body-bytes",
        "--max-body-bytes",
        "server.max_body_bytes",
        size,
    ),
    Flag(
        "bytes that the headers of a request may have; more is a 431",
        SERVER,
        "--max-header-bytes --h11-max-incomplete-event-size",
        "--max-header-bytes",
        "server.max_header_bytes",
        size,
    ),
    Flag(
        "headers that a request may have; more is a 431",
        SERVER,
        "--max-header-count --h11-max-header-count",
        "--max-header-count",
        "server.max_header_count",
        number(1, ANY),
    ),
    # -- access
    Flag(
        "keys that clients must send one of, but for /health and /ready (or in KITFOX_API_KEY, VLLM_API_KEY)",
        ACCESS,
        "--api-key",
        "--api-key",
        "server.api_keys",
        many=True,
    ),
    Flag(
        "a file of such keys, one a line: other users of the machine see a command line",
        ACCESS,
        "--api-key-file",
        "--api-key-file",
        "server.api_key_file",
    ),
    Flag(
        "key for what concerns everybody: flush, abort all, sleep, pause, profile, log level (or KITFOX_ADMIN_API_KEY)",
        ACCESS,
        "--admin-api-key",
        "--admin-api-key",
        "server.admin_api_key",
    ),
    Flag(
        "/metrics needs no key",
        ACCESS,
        "--metrics-without-key",
        "--metrics-without-key",
        "server.metrics_without_key",
        switch=True,
    ),
    Flag(
        'origins of web pages that may call the server, such as ["https://here.example"]; none may otherwise',
        ACCESS,
        "--allowed-origins",
        "--allowed-origins",
        "server.allowed_origins",
        words_or_json_list,
        many=True,
    ),
    Flag(
        "methods that such pages may use",
        ACCESS,
        "--allowed-methods",
        "--allowed-methods",
        "server.allowed_methods",
        words_or_json_list,
        many=True,
    ),
    Flag(
        "headers that such pages may send",
        ACCESS,
        "--allowed-headers",
        "--allowed-headers",
        "server.allowed_headers",
        words_or_json_list,
        many=True,
    ),
    Flag(
        "such pages may send cookies",
        ACCESS,
        "--allow-credentials",
        "--allow-credentials",
        "server.allow_credentials",
        switch=True,
    ),
    Flag("key file for TLS", ACCESS, "--ssl-keyfile", "--ssl-keyfile", "server.ssl_keyfile"),
    Flag(
        "password of the key file",
        ACCESS,
        "--ssl-keyfile-password",
        "--ssl-keyfile-password",
        "server.ssl_keyfile_password",
    ),
    Flag("certificate file for TLS", ACCESS, "--ssl-certfile", "--ssl-certfile", "server.ssl_certfile"),
    Flag(
        "certificates that sign those of clients",
        ACCESS,
        "--ssl-ca-certs",
        "--ssl-ca-certs",
        "server.ssl_ca_certs",
    ),
    Flag(
        "certificates of clients: 0 is not asked for, 1 is optional, 2 is required",
        ACCESS,
        "--ssl-cert-reqs",
        "--ssl-cert-reqs",
        "server.ssl_cert_reqs",
        number(0, 2),
    ),
    Flag(
        "most log probabilities a request may ask for; -1 is the whole vocabulary",
        SERVER,
        "--max-logprobs",
        "--max-logprobs",
        "max_logprobs",
        size_or(minus_one=-1),
    ),
    # -- cache and memory
    Flag(
        "how KV is shared: paged (hashes of blocks), radix (tree of tokens) or none",
        CACHE,
        "--cache",
        "--cache",
        "cache.organisation",
        one_of(*CACHE_ORGANISATIONS),
        defaults={"vllm": "paged", "sglang": "radix"},
    ),
    Flag(
        "share KV of equal prefixes (the default)",
        CACHE,
        "--enable-prefix-caching",
        "",
        "cache.prefix_caching",
        switch=True,
    ),
    Flag(
        "the same as --cache none",
        CACHE,
        "--no-enable-prefix-caching",
        "--disable-radix-cache",
        "cache.prefix_caching",
        switch=False,
    ),
    Flag("tokens in a KV block", CACHE, "--block-size", "--page-size", "cache.block_size", number(1, 1024)),
    Flag(
        "share of memory for weights, activations and KV together",
        CACHE,
        "--gpu-memory-utilization --memory-utilization",
        "--mem-fraction-static",
        "cache.memory_fraction",
        number(0, 1, float),
    ),
    Flag(
        "bytes for KV, such as 2G; overrides the share",
        CACHE,
        "--kv-cache-memory-bytes",
        "--kv-cache-memory-bytes",
        "cache.memory_bytes",
        size,
    ),
    Flag(
        "exact number of KV blocks; overrides the bytes",
        CACHE,
        "--num-gpu-blocks-override --num-blocks",
        "--num-blocks",
        "cache.num_blocks",
        size,
    ),
    Flag("exact number of KV tokens", CACHE, "", "--max-total-tokens", "cache.max_total_tokens", size),
    Flag(
        "element type of KV; int16 is fixed point with a scale for each token and head",
        CACHE,
        "--kv-cache-dtype",
        "--kv-cache-dtype",
        "cache.dtype",
        one_of(*KV_DTYPES, **_SHORT_DTYPES),
    ),
    Flag(
        "which leaves of the radix tree go first: lru, lfu, slru or priority",
        CACHE,
        "--radix-eviction-policy",
        "--radix-eviction-policy",
        "cache.eviction_policy",
        one_of(*EVICTION_POLICIES),
    ),
    Flag(
        "hash of paged blocks",
        CACHE,
        "--prefix-caching-hash-algo",
        unsupported="only sha256 is built",
        harmless=("sha256",),
    ),
    Flag(
        "unit of prefix matches",
        CACHE,
        "--prefix-match-unit",
        unsupported="paged matches whole blocks; --cache radix matches single tokens",
    ),
    # -- scheduling
    Flag(
        "most requests in one step",
        SCHEDULING,
        "--max-num-seqs --max-num-active-seqs",
        "--max-running-requests",
        "scheduler.max_num_seqs",
        size,
    ),
    Flag(
        "most tokens in one step (launch_server: -1 means that prompts are not split)",
        SCHEDULING,
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        "scheduler.max_num_batched_tokens",
        size_or(minus_one=-1),
    ),
    Flag(
        "most tokens in one step, with --chunked-prefill-size -1",
        SCHEDULING,
        "",
        "--max-prefill-tokens",
        "scheduler.max_prefill_tokens",
        size,
    ),
    Flag(
        "split long prompts over steps (the default)",
        SCHEDULING,
        "--enable-chunked-prefill",
        "",
        "scheduler.enable_chunked_prefill",
        switch=True,
    ),
    Flag(
        "a prompt must fit one step",
        SCHEDULING,
        "--no-enable-chunked-prefill",
        "",
        "scheduler.enable_chunked_prefill",
        switch=False,
    ),
    Flag("prompts and answers share a step, always", SCHEDULING, "", "--enable-mixed-chunk", switch=True),
    Flag(
        "most tokens of one prompt in a step while others wait; 0 is no limit",
        SCHEDULING,
        "--long-prefill-token-threshold",
        "--long-prefill-token-threshold",
        "scheduler.long_prefill_token_threshold",
        size,
    ),
    Flag(
        "who runs first: fcfs, priority (lower value first) or lpm (longest cached prefix)",
        SCHEDULING,
        "--scheduling-policy",
        "--schedule-policy",
        "scheduler.policy",
        one_of(*SCHEDULING_POLICIES),
    ),
    Flag(
        "the same as --schedule-policy priority; needs --schedule-low-priority-values-first",
        SCHEDULING,
        "",
        "--enable-priority-scheduling",
        "scheduler.by_priority",
        switch=True,
    ),
    Flag(
        "lower priority values run first, always",
        SCHEDULING,
        "",
        "--schedule-low-priority-values-first",
        "scheduler.low_values_first",
        switch=True,
    ),
    Flag(
        "waiting requests beyond this are refused with 429",
        SCHEDULING,
        "--max-num-queued-reqs",
        "--max-queued-requests",
        "scheduler.max_num_queued_requests",
        size,
    ),
    Flag("bound of the queue in tokens", SCHEDULING, "--max-num-queued-tokens", unsupported="count requests instead"),
    Flag("free blocks to keep", SCHEDULING, "--watermark", unsupported=NOT_BUILT, harmless=("0", "0.0")),
    Flag(
        "reserve blocks for the whole prompt",
        SCHEDULING,
        "--scheduler-reserve-full-isl",
        switch=True,
        unsupported=NOT_BUILT,
    ),
    Flag("optimism about answers", SCHEDULING, "", "--schedule-conservativeness", unsupported=NOT_BUILT),
    Flag("whom to preempt", SCHEDULING, "", "--retraction-policy", unsupported="follows the scheduling policy"),
    Flag(
        "priority gap that preempts",
        SCHEDULING,
        "",
        "--priority-scheduling-preemption-threshold",
        unsupported=NOT_BUILT,
    ),
    Flag("steps between prefills", SCHEDULING, "", "--prefill-decode-interval", unsupported="steps mix both"),
    Flag("delay prefills", SCHEDULING, "", "--enable-prefill-delayer", switch=True, unsupported="steps mix both"),
    Flag("schedule ahead", SCHEDULING, "--async-scheduling", switch=True, unsupported=NO_OVERLAP),
    Flag(
        "schedule after each step, always",
        SCHEDULING,
        "--no-async-scheduling",
        "--disable-overlap-schedule",
        switch=True,
    ),
    Flag(
        "tokens in a chunk of a stream, where its request does not say",
        SCHEDULING,
        "--stream-interval",
        "--stream-interval",
        "model.stream_interval",
        number(1, 1024),
    ),
    # -- device
    Flag("auto, cpu, cuda or cuda:N", DEVICE, "--device", "--device", "device.device", parse_device),
    Flag(
        "threads for arithmetic; 0 is every core",
        DEVICE,
        "--num-threads",
        "--num-threads",
        "device.num_threads",
        number(0, 4096),
    ),
    Flag(
        "give each thread a core of its own",
        DEVICE,
        "--pin-threads",
        "--pin-threads",
        "device.pin_threads",
        switch=True,
    ),
    Flag(
        "let the system place threads",
        DEVICE,
        "--no-pin-threads",
        "--no-pin-threads",
        "device.pin_threads",
        switch=False,
    ),
    # -- observing
    Flag(
        "debug, info, warning, error or critical",
        OBSERVING,
        "--log-level --uvicorn-log-level",
        "--log-level",
        "server.log_level",
        one_of(*LOG_LEVELS),
    ),
    Flag(
        "trace events kept for GET /v1/trace/{id}",
        OBSERVING,
        "--trace-capacity",
        "--trace-capacity",
        "trace_capacity",
        number(1, ANY),
    ),
    Flag("metrics are always on", OBSERVING, "--kv-cache-metrics", "--enable-metrics", switch=True),
    Flag(
        "cached tokens are always in the usage",
        OBSERVING,
        "--enable-prompt-tokens-details",
        "--enable-cache-report",
        switch=True,
    ),
    Flag("timings are always in answers", OBSERVING, "--enable-per-request-metrics", switch=True),
    Flag("no statistics", OBSERVING, "--disable-log-stats", switch=True, unsupported=NOT_BUILT),
    Flag(
        "lines of text, or of JSON for machines",
        OBSERVING,
        "--log-format",
        "--log-format --log-requests-format",
        "server.log_format",
        one_of("text", "json"),
    ),
    Flag(
        "one line a request at its end, with sizes and times, never with contents (the default)",
        OBSERVING,
        "--enable-log-requests",
        "--log-requests --enable-log-requests",
        "server.log_requests",
        switch=True,
    ),
    Flag(
        "no line a request",
        OBSERVING,
        "--disable-log-requests --no-enable-log-requests --disable-uvicorn-access-log",
        "--disable-log-requests",
        "server.log_requests",
        switch=False,
    ),
    Flag(
        "detail of logged requests",
        OBSERVING,
        "",
        "--log-requests-level",
        unsupported="contents are never logged",
        harmless=("0", "1"),
    ),
    Flag("steps between log lines", OBSERVING, "", "--decode-log-interval", unsupported=NOT_BUILT),
    Flag(
        "what logprobs are of",
        OBSERVING,
        "--logprobs-mode",
        unsupported="only raw_logprobs is built",
        harmless=("raw_logprobs",),
    ),
    Flag(
        "URL that gets an OpenTelemetry span of each request, such as http://localhost:4318/v1/traces",
        OBSERVING,
        "--otlp-traces-endpoint",
        "--otlp-traces-endpoint",
        "server.otlp_traces_endpoint",
        parse_http_url,
    ),
    Flag(
        "folder that POST /stop_profile writes into (a temporary one)",
        OBSERVING,
        "--profile-dir",
        "--profile-dir",
        "server.profile_dir",
    ),
    Flag("trace detail", OBSERVING, "--collect-detailed-traces", unsupported="use GET /v1/trace/{id}"),
    Flag(
        "tracing", OBSERVING, "", "--enable-trace", switch=True, unsupported="tracing is always on: GET /v1/trace/{id}"
    ),
    Flag("KV events", OBSERVING, "--kv-events-config", "--kv-events-config", unsupported=NOT_BUILT),
    # -- known, not built: model and server
    Flag("tokenizer kind", MODEL, "--tokenizer-mode", "--tokenizer-mode", unsupported="only auto", harmless=("auto",)),
    Flag("download folder", MODEL, "--download-dir", "--download-dir", unsupported="set KITFOX_CACHE instead"),
    Flag(
        "int8 quantises the weights to 8 bits; auto keeps those of a GGUF file as they are; none dequantises them",
        MODEL,
        "--quantization -q",
        "--quantization",
        "model.quantization",
        parse_quantization,
    ),
    Flag(
        "form of message contents",
        MODEL,
        "--chat-template-content-format",
        unsupported="only auto",
        harmless=("auto",),
    ),
    Flag(
        "template arguments",
        MODEL,
        "--default-chat-template-kwargs",
        "--default-chat-template-kwargs",
        unsupported=NOT_BUILT,
    ),
    Flag(
        "sampling parameters that requests leave out: auto is the model's own, vllm the API's, or a directory that has "
        "a generation_config.json",
        MODEL,
        "--generation-config",
        "",
        "model.generation_config",
    ),
    Flag(
        "sampling parameters that requests leave out: the model's own, or openai's",
        MODEL,
        "",
        "--sampling-defaults",
        "model.generation_config",
        one_of("auto", "vllm", model="auto", openai="vllm"),
    ),
    Flag(
        'some of them as JSON, such as {"temperature": 0.6}; they win',
        MODEL,
        "--override-generation-config",
        "--preferred-sampling-params",
        "model.override_generation_config",
        json_object,
    ),
    Flag(
        "refuse members of a request that kitfox does not know, instead of listing them in the answer",
        SERVER,
        "--strict",
        "--strict",
        "server.strict",
        switch=True,
    ),
    Flag(
        "take chat_template from requests, which are otherwise refused: each is a program that clients run here, in "
        "a sandbox and a process that is killed after 2 s",
        SERVER,
        "--trust-request-chat-template",
        "--trust-request-chat-template",
        "server.trust_request_chat_template",
        switch=True,
    ),
    Flag(
        "hosts that images in requests are fetched from; images come as data: URLs otherwise",
        SERVER,
        "--allowed-media-domains",
        "--allowed-media-domains",
        "server.allowed_media_domains",
        words_or_json_list,
        many=True,
    ),
    Flag("ASGI middleware", SERVER, "--middleware", unsupported=NOT_BUILT),
    Flag("no warm-up", SERVER, "", "--skip-server-warmup", switch=True, unsupported=NOT_BUILT),
    Flag("watchdog", SERVER, "", "--watchdog-timeout", unsupported="/health reports a stalled engine after 60 s"),
    Flag("API processes", SERVER, "--api-server-count", unsupported="one only", harmless=("1",)),
    Flag("tokenizer processes", SERVER, "", "--tokenizer-worker-num", unsupported="one only", harmless=("1",)),
    # -- known, not built: parallelism
    Flag(
        "tensor parallel",
        PARALLEL,
        "--tensor-parallel-size -tp",
        "--tp-size --tensor-parallel-size --tp",
        unsupported=NO_PARALLEL,
        harmless=("1",),
    ),
    Flag(
        "pipeline parallel",
        PARALLEL,
        "--pipeline-parallel-size -pp",
        "--pp-size --pipeline-parallel-size",
        unsupported=NO_PARALLEL,
        harmless=("1",),
    ),
    Flag(
        "data parallel",
        PARALLEL,
        "--data-parallel-size -dp",
        "--dp-size --data-parallel-size --dp",
        unsupported=NO_PARALLEL,
        harmless=("1",),
    ),
    Flag("expert parallel", PARALLEL, "--enable-expert-parallel -ep", switch=True, unsupported=NO_PARALLEL),
    Flag("expert parallel", PARALLEL, "", "--ep-size --ep", unsupported=NO_PARALLEL, harmless=("1",)),
    Flag(
        "context parallel decode",
        PARALLEL,
        "--decode-context-parallel-size -dcp",
        "--dcp-size",
        unsupported=NO_PARALLEL,
        harmless=("1",),
    ),
    Flag(
        "context parallel prefill",
        PARALLEL,
        "--prefill-context-parallel-size",
        "--attn-cp-size",
        unsupported=NO_PARALLEL,
        harmless=("1",),
    ),
    Flag("context parallel prefill", PARALLEL, "", "--enable-prefill-cp", switch=True, unsupported=NO_PARALLEL),
    Flag(
        "executor",
        PARALLEL,
        "--distributed-executor-backend",
        unsupported="one process on one device",
        harmless=("uni",),
    ),
    Flag("Ray", PARALLEL, "", "--use-ray", switch=True, unsupported=NO_PARALLEL),
    Flag("nodes", PARALLEL, "--nnodes", "--nnodes", unsupported=NO_PARALLEL, harmless=("1",)),
    Flag("node", PARALLEL, "--node-rank", "--node-rank", unsupported=NO_PARALLEL, harmless=("0",)),
    Flag("first node", PARALLEL, "--master-addr", unsupported=NO_PARALLEL),
    Flag("first node's port", PARALLEL, "--master-port", unsupported=NO_PARALLEL),
    Flag("first node", PARALLEL, "", "--dist-init-addr", unsupported=NO_PARALLEL),
    Flag("no API here", PARALLEL, "--headless", switch=True, unsupported=NO_PARALLEL),
    Flag("local ranks", PARALLEL, "--data-parallel-size-local", unsupported=NO_PARALLEL, harmless=("1",)),
    Flag("data parallel address", PARALLEL, "--data-parallel-address", unsupported=NO_PARALLEL),
    Flag("data parallel port", PARALLEL, "--data-parallel-rpc-port", unsupported=NO_PARALLEL),
    Flag("first rank", PARALLEL, "--data-parallel-start-rank", unsupported=NO_PARALLEL, harmless=("0",)),
    Flag("data parallel backend", PARALLEL, "--data-parallel-backend", unsupported=NO_PARALLEL),
    Flag("balancer", PARALLEL, "--data-parallel-hybrid-lb", switch=True, unsupported=NO_PARALLEL),
    Flag("balancer", PARALLEL, "--data-parallel-external-lb", switch=True, unsupported=NO_PARALLEL),
    Flag("balancer", PARALLEL, "", "--load-balance-method", unsupported=NO_PARALLEL, harmless=("auto",)),
    Flag("transfer of KV", PARALLEL, "--kv-transfer-config", unsupported="disaggregation is not built yet"),
    Flag(
        "disaggregation",
        PARALLEL,
        "",
        "--disaggregation-mode",
        unsupported="disaggregation is not built yet",
        harmless=("null",),
    ),
    Flag(
        "transfer of KV",
        PARALLEL,
        "",
        "--disaggregation-transfer-backend",
        unsupported="disaggregation is not built yet",
    ),
    # -- known, not built: features
    Flag(
        'guess several tokens ahead: a JSON object {"method": ..., "num_speculative_tokens": 8, ...}',
        SPEED,
        "--speculative-config -sc",
        "",
        "speculation.config",
        json_object,
    ),
    Flag(
        f"who guesses tokens ahead: {', '.join(SPECULATION_METHODS)}",
        SPEED,
        "--spec-method",
        "--speculative-algorithm",
        "speculation.method",
        lambda text: one_of(*SPECULATION_METHODS)(_speculation_method(text)),
    ),
    Flag(
        "the model that guesses: for draft best a smaller one of the same vocabulary; for eagle and eagle3 the head",
        SPEED,
        "--spec-model",
        "--speculative-draft-model-path --speculative-draft-model",
        "speculation.model",
    ),
    Flag(
        "most guesses for one answer in one step",
        SPEED,
        "--spec-tokens",
        "--speculative-num-draft-tokens",
        "speculation.num_draft_tokens",
        number(1, 64),
    ),
    Flag(
        "guess as far as there is something to say, whether it pays or not",
        SPEED,
        "--no-adaptive-speculation",
        "--no-adaptive-speculation",
        "speculation.adaptive",
        switch=False,
    ),
    Flag("adaptive guessing is what kitfox does", SPEED, "", "--speculative-adaptive", switch=True),
    Flag(
        "most steps of the model that guesses, one guess each",
        SPEED,
        "",
        "--speculative-num-steps",
        "speculation.num_steps",
        number(1, 64),
    ),
    Flag(
        "several guesses for one place", FEATURES, "", "--speculative-eagle-topk", unsupported=NO_TREE, harmless=("1",)
    ),
    Flag(
        "fewest tokens that must have occurred before, for n-grams",
        SPEED,
        "",
        "--speculative-ngram-min-match-window-size",
        "speculation.min_length",
        number(1, 64),
    ),
    Flag(
        "most tokens that are looked up, for n-grams",
        SPEED,
        "",
        "--speculative-ngram-max-match-window-size",
        "speculation.max_length",
        number(1, 64),
    ),
    Flag(
        f"who compiles grammars: {', '.join(STRUCTURED_BACKENDS)}; auto is llguidance, xgrammar for what it refuses",
        FEATURES,
        "--structured-backend",
        "--structured-backend --grammar-backend",
        "structured_output.backend",
        one_of(*STRUCTURED_BACKENDS, guidance="llguidance"),
    ),
    Flag(
        'vLLM\'s JSON object: {"backend": ..., "disable_any_whitespace": ...}',
        FEATURES,
        "--structured-outputs-config",
        "",
        "structured_outputs_config",
        json_object,
    ),
    Flag(
        "seconds that a grammar may take to compile (over 32 KiB: of processor time); one that takes longer is refused",
        FEATURES,
        "--grammar-timeout",
        "--grammar-timeout",
        "structured_output.compile_timeout_s",
        number(0.001, 3600, float),
    ),
    Flag(
        "memory that a grammar may take to compile: 2G",
        FEATURES,
        "--grammar-memory",
        "--grammar-memory",
        "structured_output.compile_memory_bytes",
        size,
    ),
    Flag(
        "most whitespace characters between two JSON tokens; 0 writes compact JSON",
        FEATURES,
        "--json-max-whitespace",
        "--json-max-whitespace --constrained-json-max-whitespace-cnt",
        "structured_output.max_whitespace",
        number(0, 1000),
    ),
    Flag(
        "the same as --json-max-whitespace 0",
        FEATURES,
        "",
        "--constrained-json-disable-any-whitespace",
        "structured_output.max_whitespace",
        switch=0,
    ),
    Flag(
        "sample the tokens too that a grammar forces",
        FEATURES,
        "--no-jump-forward",
        "--no-jump-forward --disable-jump-forward",
        "structured_output.jump_forward",
        switch=False,
    ),
    Flag("accepted; the model may always choose to call tools", FEATURES, "--enable-auto-tool-choice", switch=True),
    Flag(
        f"how tool calls are written: auto (as the chat template says), none, or {', '.join(TOOL_CALL_PARSERS)}",
        FEATURES,
        "--tool-call-parser",
        "--tool-call-parser",
        "server.tool_call_parser",
        one_of("auto", "none", *TOOL_CALL_PARSERS, **TOOL_CALL_PARSER_ALIASES),
    ),
    Flag(
        f"how reasoning is marked: auto (as the chat template says), none, or {', '.join(REASONING_MARKS)}",
        FEATURES,
        "--reasoning-parser",
        "--reasoning-parser",
        "server.reasoning_parser",
        one_of("auto", "none", *REASONING_MARKS, **REASONING_PARSER_ALIASES),
    ),
    Flag(
        "LoRA adapters may be loaded while the server runs",
        FEATURES,
        "--enable-lora",
        "--enable-lora",
        "adapters.enabled",
        switch=True,
    ),
    Flag(
        "LoRA adapters to load at the start, as NAME=DIRECTORY; they answer under their names",
        FEATURES,
        "--lora-modules",
        "--lora-paths",
        "adapters.modules",
        adapter_module,
        many=True,
    ),
    Flag(
        "most LoRA adapters whose requests run at a time; others wait",
        FEATURES,
        "--max-loras",
        "--max-loras-per-batch",
        "scheduler.max_running_adapters",
        number(1, ANY),
    ),
    Flag(
        "largest rank that a LoRA adapter may have",
        FEATURES,
        "--max-lora-rank",
        "--max-lora-rank",
        "adapters.max_rank",
        number(1, 1024),
    ),
    Flag(
        "most LoRA adapters that are loaded at a time",
        FEATURES,
        "--max-cpu-loras",
        "--max-loaded-loras",
        "adapters.max_loaded",
        number(1, ANY),
    ),
    Flag(
        "adapter eviction",
        FEATURES,
        "",
        "--lora-eviction-policy",
        unsupported="an adapter stays loaded until it is unloaded",
        harmless=("lru", "fifo"),
    ),
    Flag(
        "layers with adapters",
        FEATURES,
        "",
        "--lora-target-modules",
        unsupported="an adapter may change every linear layer",
        harmless=("all",),
    ),
    Flag("POST /sleep is always there", FEATURES, "--enable-sleep-mode", "--enable-memory-saver", switch=True),
    Flag(
        "determinism",
        FEATURES,
        "",
        "--enable-deterministic-inference",
        switch=True,
        unsupported="cannot be promised on every device yet",
    ),
    # -- known, not built: speed
    Flag(
        "compute each op as the model's code names it, instead of replaying a captured step",
        SPEED,
        "--enforce-eager",
        "--disable-cuda-graph",
        "device.enforce_eager",
        switch=True,
    ),
    Flag("compilation", SPEED, "--compilation-config -cc", unsupported=NO_CAPTURE),
    Flag("optimisation level", SPEED, "-O", unsupported=NO_CAPTURE, harmless=("0",)),
    Flag("captured sizes", SPEED, "--cudagraph-capture-sizes", many=True, unsupported=NO_CAPTURE),
    Flag("captured sizes", SPEED, "", "--cuda-graph-max-bs --cuda-graph-max-bs-decode", unsupported=NO_CAPTURE),
    Flag("compilation", SPEED, "", "--enable-torch-compile", switch=True, unsupported=NO_CAPTURE),
    Flag(
        "attention backend",
        SPEED,
        "--attention-backend",
        "--attention-backend",
        unsupported="the device decides",
        harmless=("auto",),
    ),
    Flag("attention backend", SPEED, "", "--prefill-attention-backend", unsupported="the device decides"),
    Flag("attention backend", SPEED, "", "--decode-attention-backend", unsupported="the device decides"),
    Flag(
        "offload weights", SPEED, "--cpu-offload-gb", "--cpu-offload-gb", unsupported=NO_OFFLOAD, harmless=("0", "0.0")
    ),
    Flag("offload KV", SPEED, "--kv-offloading-size", unsupported=NO_OFFLOAD),
    Flag("offload KV", SPEED, "", "--enable-hierarchical-cache", switch=True, unsupported=NO_OFFLOAD),
    Flag("offload KV", SPEED, "", "--hicache-ratio", unsupported=NO_OFFLOAD),
    Flag("offload KV", SPEED, "", "--hicache-size", unsupported=NO_OFFLOAD),
    Flag("offload KV", SPEED, "", "--hicache-write-policy", unsupported=NO_OFFLOAD),
    Flag("offload KV", SPEED, "", "--hicache-storage-backend", unsupported=NO_OFFLOAD),
)

# ---- parsing --------------------------------------------------------------------------------------------------------


class FlagParser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser(
    dialect: Dialect,
    program: str | None = None,
    *,
    description: str = "Serve a model behind an OpenAI-compatible API.",
    serving: bool = True,
) -> FlagParser:
    """The parser of one dialect; unsupported flags parse too, so that `read_flags` can say why they fail.

    Args:
        serving: False leaves out what only a server has, MODEL as the first argument included; a command that has
            arguments of its own adds them to the parser, with a dest of "command.NAME".
    """
    parser = FlagParser(
        prog=program or PROGRAM_OF[dialect],
        usage="%(prog)s [MODEL] [flags]" if serving and dialect == "vllm" else "%(prog)s [flags]",
        description=description,
        epilog="Sizes: 4096, 4k = 4000, 4K = 4096. Dashes may be underscores. Flags of "
        f"{ENGINE_OF[dialect]} that kitfox knows but does not support yet are refused with the reason.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
    )
    if dialect == "vllm" and serving:
        parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML of flag names and values; the command line wins")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for index, flag in enumerate(FLAGS):
        spellings = flag.spellings(dialect)
        if not spellings or (flag.target.startswith("server.") and not serving):
            continue
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        groups[flag.group].add_argument(*spellings, **_argument_options(flag, index, dialect))
    return parser


def _argument_options(flag: Flag, index: int, dialect: Dialect) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dest": flag.target or f"row {index}",
        "default": argparse.SUPPRESS,
        "help": argparse.SUPPRESS if flag.unsupported else _help_text(flag, dialect),
    }
    if flag.switch is not None:
        return options | {"action": "store_const", "const": flag.switch}
    metavar = flag.spellings(dialect)[0].lstrip("-").rsplit("-", 1)[-1].upper()
    many = {"nargs": "+", "action": "extend"} if flag.many else {}  # `--api-key A --api-key B` are two keys
    return options | {"type": flag.parse, "metavar": metavar} | many


def _help_text(flag: Flag, dialect: Dialect) -> str:
    default = default_of(flag, dialect)
    shown = "" if flag.switch is not None or default in (None, (), "") else f" (default {default})"
    return (flag.help + shown).replace("%", "%%")


def default_of(flag: Flag, dialect: Dialect) -> Any:
    """The value a setting has when its flag is absent; None when the row has no setting of its own."""
    if dialect in flag.defaults:
        return flag.defaults[dialect]
    section, _, name = flag.target.rpartition(".")
    config = EngineConfig()
    owner: Any = ServerOptions() if section == "server" else getattr(config, section, None) if section else config
    return getattr(owner, name, None)


def build_engine_config(dialect: Dialect, argv: Sequence[str]) -> tuple[EngineConfig, ServerOptions]:
    """Read the command line of a server, and the file its --config names; raises what `read_flags` does."""
    config, options, _ = read_flags(dialect, argv, build_parser(dialect))
    return config, options


def read_flags(
    dialect: Dialect, argv: Sequence[str], parser: FlagParser
) -> tuple[EngineConfig, ServerOptions, dict[str, Any]]:
    """Read a command line with a parser from `build_parser`; the last part are the arguments of a command's own.

    Raises:
        ConfigError: a flag is unknown, unsupported, out of range or contradicts another one.
        SystemExit: `--help` was asked for and printed.
    """
    words = [_with_dashes(word) for word in argv]
    settings = _parse_words(dialect, parser, words)
    path = settings.pop("config", None)
    if path is not None:
        from_file = _parse_words(dialect, parser, _read_config_file(dialect, Path(path)))
        if settings.get("positional_model") is not None:
            from_file.pop("model.model", None)
        settings = {**from_file, **settings}
    settings.pop("config", None)
    own = {name: settings.pop(name) for name in list(settings) if name.startswith("command.")}
    _refuse_unsupported(dialect, settings)
    config, options = _assemble(dialect, settings)
    return config, options, {name.removeprefix("command."): value for name, value in own.items()}


def in_dialect(dialect: Dialect, text: str) -> str:
    """A message that names flags in vLLM's spelling, with those of the dialect instead."""

    def respell(match: re.Match[str]) -> str:
        for flag in FLAGS:
            if match[0] in flag.spellings("vllm") and flag.spellings(dialect):
                return match[0] if match[0] in flag.spellings(dialect) else flag.spellings(dialect)[0]
        return match[0]

    return re.sub(r"--[a-z][a-z-]*[a-z]", respell, text)


def _with_dashes(word: str) -> str:
    """`--max_model_len=4k` as `--max-model-len=4k`; values stay as they are."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _parse_words(dialect: Dialect, parser: FlagParser, words: Sequence[str]) -> dict[str, Any]:
    """Settings that the words name, by target; absent flags are absent."""
    values, unknown = parser.parse_known_args(words)
    for word in unknown:
        raise ConfigError(_explain_unknown(dialect, word), param=word)
    return vars(values)


def _read_config_file(dialect: Dialect, path: Path) -> list[str]:
    """The YAML mapping of a file as words of a command line."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}", param="config") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must be a mapping of flag names to values", param="config")
    switches = {word: flag.switch is not None for flag in FLAGS for word in flag.spellings(dialect)}
    words: list[str] = []
    for key, value in content.items():
        name = "--" + str(key).lstrip("-").replace("_", "-")
        if name not in switches:
            raise ConfigError(f"--config {path}: {_explain_unknown(dialect, name)}", param=str(key))
        if switches[name]:
            words += _switch_words(path, name, value, switches)
        elif isinstance(value, list):
            words += [name, *(_value_word(entry) for entry in value)] if value else []
        elif value is not None:
            words.append(f"{name}={_value_word(value)}")
    return words


def _value_word(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _switch_words(path: Path, name: str, value: object, known: dict[str, bool]) -> list[str]:
    """A switch set to true or false in a file; false is its --no- form where there is one, else its absence."""
    if not isinstance(value, bool):
        raise ConfigError(f"--config {path}: {name.lstrip('-')} must be true or false. Given: {value!r}", param=name)
    if value:
        return [name]
    opposite = "--no-" + name[2:]
    return [opposite] if opposite in known else []


def _explain_unknown(dialect: Dialect, word: str) -> str:
    """What is wrong with a word no flag takes, and what was probably meant."""
    if not word.startswith("-"):
        return f"unexpected argument {word!r}"
    name = _with_dashes(word.split("=", 1)[0])
    parent = name.split(".", 1)[0]  # vLLM's way into nested JSON: --speculative-config.method
    other: Dialect = "sglang" if dialect == "vllm" else "vllm"
    for flag in FLAGS:
        if parent in flag.spellings(dialect):
            reason = "has no parts" if parent != name else "this command has no use for it"
            return f"{name}: {flag.unsupported or reason}"
        if name in flag.spellings(other):
            return f"{name} is {ENGINE_OF[other]}'s spelling; {_equivalent(flag, dialect)}"
    ours = [word for flag in FLAGS for word in flag.spellings(dialect)] + ["--config", "--help"]
    nearest = difflib.get_close_matches(name, ours, n=1, cutoff=0.5)
    hint = f"; the nearest is {nearest[0]}" if nearest else f"; see {PROGRAM_OF[dialect]} --help"
    return f"unknown flag {name}{hint}"


def _equivalent(flag: Flag, dialect: Dialect) -> str:
    same_setting = [row for row in FLAGS if flag.target and row.target == flag.target and row.switch == flag.switch]
    spellings = [word for row in [flag, *same_setting] for word in row.spellings(dialect)]
    if spellings:
        return f"here it is {spellings[0]}"
    return (
        flag.unsupported or f"it has no counterpart here, use {PROGRAM_OF['sglang' if dialect == 'vllm' else 'vllm']}"
    )


def _refuse_unsupported(dialect: Dialect, settings: dict[str, Any]) -> None:
    for index, flag in enumerate(FLAGS):
        value = settings.pop(f"row {index}", None)
        if value is not None and flag.unsupported and str(value) not in flag.harmless:
            name = flag.spellings(dialect)[0]
            allowed = f"; only {' or '.join(flag.harmless)} is accepted" if flag.harmless else ""
            raise ConfigError(f"{name} is not supported: {flag.unsupported}{allowed}", param=name)


def _assemble(dialect: Dialect, settings: dict[str, Any]) -> tuple[EngineConfig, ServerOptions]:
    """Settings by target name -> the configuration; settles those that stand for others."""
    if len(settings.get("server.api_keys", ())) > 1 and not {"positional_model", "model.model"} & {
        name for name, value in settings.items() if value is not None
    }:  # or the model would be a key that everybody knows
        raise ConfigError("several keys and no model: write MODEL before --api-key, or --model MODEL", param="api_key")
    _settle_model(dialect, settings)
    _settle_cache(settings)
    _settle_scheduling(settings)
    _settle_structured_output(settings)
    _settle_speculation(settings)
    _settle_adapters(dialect, settings)
    _settle_access(settings)
    for flag in FLAGS:
        if dialect in flag.defaults:
            settings.setdefault(flag.target, flag.defaults[dialect])
    names = ("model", "cache", "scheduler", "device", "structured_output", "speculation", "adapters", "server", "")
    sections: dict[str, dict[str, Any]] = {name: {} for name in names}
    for target, value in settings.items():
        section, _, name = target.rpartition(".")
        sections[section][name] = value
    config = EngineConfig(
        model=ModelOptions(**sections["model"]),
        cache=CacheConfig(**sections["cache"]),
        scheduler=SchedulerConfig(**sections["scheduler"]),
        device=DeviceConfig(**sections["device"]),
        structured_output=StructuredOutputConfig(**sections["structured_output"]),
        speculation=SpeculationConfig(**sections["speculation"]),
        adapters=AdapterOptions(**sections["adapters"]),
        **sections[""],
    )
    return config, ServerOptions(**sections["server"])


def _settle_model(dialect: Dialect, settings: dict[str, Any]) -> None:
    positional = settings.pop("positional_model", None)
    named = settings.get("model.model")
    names = tuple(settings.get("model.served_model_names", ()))
    if positional is not None and named is not None and positional != named:
        raise ConfigError(f"MODEL is given twice: {positional!r} and --model {named!r}", param="model")
    model = positional if positional is not None else named
    if model is None and dialect == "sglang":
        raise ConfigError("--model-path is missing", param="model")
    if model is None and len(names) > 1:
        raise ConfigError(f"no MODEL: is it {names[-1]!r}? Write it before --served-model-name", param="model")
    if model is not None:
        settings["model.model"] = model
    settings["model.served_model_names"] = names


def _settle_cache(settings: dict[str, Any]) -> None:
    wanted = settings.pop("cache.prefix_caching", None)
    chosen = settings.get("cache.organisation")
    if chosen is not None and wanted is not None and wanted == (chosen == "none"):
        raise ConfigError(f"--cache {chosen} contradicts the flag that turns prefix caching on or off", param="cache")
    if wanted is False:
        settings["cache.organisation"] = "none"
    num_tokens = settings.pop("cache.max_total_tokens", None)
    if num_tokens is not None:
        if "cache.num_blocks" in settings:
            raise ConfigError("give --max-total-tokens or --num-blocks, not both", param="max_total_tokens")
        block_size = settings.get("cache.block_size", CacheConfig.block_size)
        if num_tokens < block_size:
            raise ConfigError(f"--max-total-tokens must be >= one block of {block_size}. Given: {num_tokens}")
        settings["cache.num_blocks"] = num_tokens // block_size


def _settle_scheduling(settings: dict[str, Any]) -> None:
    low_values_first = settings.pop("scheduler.low_values_first", False)
    if settings.pop("scheduler.by_priority", False):
        if not low_values_first:  # the other engine's default is the opposite order: do not serve it upside down
            raise ConfigError(
                "--enable-priority-scheduling: kitfox runs lower priority values first; say that you mean it with "
                "--schedule-low-priority-values-first",
                param="enable_priority_scheduling",
            )
        if settings.setdefault("scheduler.policy", "priority") != "priority":
            raise ConfigError("--enable-priority-scheduling contradicts --schedule-policy", param="schedule_policy")
    budget = settings.get("scheduler.max_num_batched_tokens")
    unchunked_budget = settings.pop("scheduler.max_prefill_tokens", None)
    if budget == -1:
        settings["scheduler.max_num_batched_tokens"] = unchunked_budget or PREFILL_TOKENS_UNCHUNKED
        settings["scheduler.enable_chunked_prefill"] = False
    elif unchunked_budget is not None:
        raise ConfigError(
            "--max-prefill-tokens needs --chunked-prefill-size -1: with chunks, --chunked-prefill-size is the budget",
            param="max_prefill_tokens",
        )


def _settle_structured_output(settings: dict[str, Any]) -> None:
    given = settings.pop("structured_outputs_config", None) or {}
    flag = "--structured-outputs-config"
    for name, value in given.items():
        if name == "backend":
            parse = one_of(*STRUCTURED_BACKENDS, guidance="llguidance")
            try:
                settings.setdefault("structured_output.backend", parse(str(value)))
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"{flag}: backend {error}", param=flag) from None
        elif name == "disable_any_whitespace" and isinstance(value, bool):
            if value:
                settings.setdefault("structured_output.max_whitespace", 0)
        else:
            limit = "knows backend and disable_any_whitespace (true or false)"
            raise ConfigError(f"{flag} {limit}. Given: {name}: {value!r}", param=flag)
    backend = settings.get("structured_output.backend")
    if backend == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
        raise ConfigError(
            "--structured-backend xgrammar needs a package: pip install 'kitfox[xgrammar]'", param="structured_backend"
        )


# What vLLM calls the settings of its own methods, and what the proposer's arguments are called here.
_VLLM_SPECULATION_OPTIONS = {
    "prompt_lookup_min": "min_length",
    "prompt_lookup_max": "max_length",
    "suffix_decoding_max_tree_depth": "max_depth",
    "suffix_decoding_max_cached_requests": "max_cached_requests",
    "suffix_decoding_min_token_prob": "min_probability",
}


# What the settings of models that guess are called everywhere.
_DRAFT_OPTIONS = ("model", "revision", "quantization", "max_model_len", "num_layers", "min_probability")
_METHOD_NAMES = {"draft_model": "draft", "standalone": "draft"}


def _speculation_method(name: str) -> str:
    """As it is called here; vLLM and SGLang have names of their own."""
    return _METHOD_NAMES.get(name.lower(), name.lower())


def _settle_speculation(settings: dict[str, Any]) -> None:
    flag = "--speculative-config"
    options: dict[str, Any] = {}
    for name, value in (settings.pop("speculation.config", None) or {}).items():
        if name == "method":
            method = _speculation_method(value) if isinstance(value, str) else value
            if method not in SPECULATION_METHODS:
                raise ConfigError(f"{flag}: method must be one of {', '.join(SPECULATION_METHODS)}. Given: {value!r}")
            settings.setdefault("speculation.method", method)
        elif name == "num_speculative_tokens":
            if type(value) is not int or not 1 <= value <= 64:
                raise ConfigError(f"{flag}: num_speculative_tokens must be in [1, 64]. Given: {value!r}")
            settings.setdefault("speculation.num_draft_tokens", value)
        elif name in _DRAFT_OPTIONS:
            options[name] = value
        elif name in _VLLM_SPECULATION_OPTIONS:
            options[_VLLM_SPECULATION_OPTIONS[name]] = value
        else:
            known = ", ".join(("method", "num_speculative_tokens", *_DRAFT_OPTIONS, *_VLLM_SPECULATION_OPTIONS))
            raise ConfigError(f"{flag}: knows {known}. Given: {name}", param="speculative_config")
    for name in ("min_length", "max_length", "model"):
        if f"speculation.{name}" in settings:
            options[name] = settings.pop(f"speculation.{name}")
    if "speculation.num_steps" in settings:  # SGLang counts the token that is known among those it verifies: this wins
        settings["speculation.num_draft_tokens"] = settings.pop("speculation.num_steps")
    if "model" in options:  # as in vLLM, where who names a draft model need not name a method
        settings.setdefault("speculation.method", "draft")
    method = settings.get("speculation.method", "none")
    if not options and method == "none":
        return
    from kitfox.spec_decode.proposers import check_options

    try:
        check_options(method, options)
    except TypeError:
        raise ConfigError(
            f"{flag}: {method} has no setting {' and no '.join(options)}", param="speculative_config"
        ) from None
    settings["speculation.options"] = options


def _settle_adapters(dialect: Dialect, settings: dict[str, Any]) -> None:
    given = settings.get("adapters.modules")
    if not given:
        return
    flag = "--lora-modules" if dialect == "vllm" else "--lora-paths"
    modules: dict[str, str] = {}
    for name, path in given:
        if not name and dialect == "vllm":  # where a word without "=" is rather MODEL, behind a flag that takes several
            raise ConfigError(f"{flag} must be NAME=PATH. Is {path!r} the MODEL? Write it before {flag}", param=flag)
        name = name or path
        if name in modules:
            raise ConfigError(f"{flag}: two adapters have the name {name!r}", param=flag)
        if name in (settings["model.served_model_names"] or (settings.get("model.model", ModelOptions.model),)):
            raise ConfigError(f"{flag}: {name!r} is the model's own name", param=flag)
        modules[name] = path
    settings["adapters.modules"] = tuple(modules.items())
    settings.setdefault("adapters.enabled", True)


def _settle_access(settings: dict[str, Any]) -> None:
    for name in ("allowed_origins", "allowed_methods", "allowed_headers", "allowed_media_domains"):
        if f"server.{name}" in settings:
            settings[f"server.{name}"] = tuple(word for words in settings[f"server.{name}"] for word in words)
    keys = list(settings.get("server.api_keys", ()))
    file = settings.pop("server.api_key_file", None)
    if file is not None:
        try:
            keys += [line.strip() for line in Path(file).read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file} cannot be read: {error}", param="api_key_file") from error
    if file is not None and not keys:  # not a server that anybody may use, because a file was empty
        raise ConfigError(f"--api-key-file {file} has no key", param="api_key_file")
    if not keys and (key := api_key_of_environment()) is not None:
        keys = [key]
    if "" in keys or settings.get("server.admin_api_key") == "":
        raise ConfigError("--api-key and --admin-api-key must not be empty", param="api_key")
    if keys:
        settings["server.api_keys"] = tuple(keys)
    if admin_key := os.environ.get(ADMIN_KEY_VARIABLE):
        settings.setdefault("server.admin_api_key", admin_key)
    if bool(settings.get("server.ssl_keyfile")) != bool(settings.get("server.ssl_certfile")):
        raise ConfigError("TLS needs both --ssl-keyfile and --ssl-certfile", param="ssl_keyfile")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = settings.get(f"server.{name}")
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"--{name.replace('_', '-')} {path} is not a file", param=name)
