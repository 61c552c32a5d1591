"""What the server needs beside the engine's configuration. Made by flags.py; imports nothing heavy."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

API_KEY_VARIABLES = ("KITFOX_API_KEY", "VLLM_API_KEY")


def api_key_of_environment() -> str | None:
    """What the first of `API_KEY_VARIABLES` gives: a server's key where no flag names one, and `kitfox chat`'s."""
    return next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), None)


@dataclass(frozen=True)
class ServerOptions:
    """How to listen, whom to let in, what to log. Secrets are not part of its repr.

    Attributes:
        uds: path of a unix socket to listen on, instead of host and port.
        root_path: prefix that a proxy in front strips from every path.
        shutdown_timeout_s: how long running requests may take to finish after SIGTERM.
        max_body_bytes, max_header_bytes, max_header_count: larger requests get 413 and 431.
        api_keys: one of them is needed for all but /health and /ready; empty lets everybody in.
        admin_api_key: needed for what concerns everybody; "" means that an API key suffices.
        metrics_without_key: /metrics needs no key.
        allowed_origins: web pages of these origins may call the server; empty sends no CORS headers.
        ssl_cert_reqs: 0 asks clients for no certificate, 1 takes one, 2 demands one.
        strict: refuse members of a request that nobody reads, instead of listing them as ignored_parameters.
        log_requests: one line a request at its end.
        profile_dir: folder that /stop_profile writes into; "" is a fresh temporary one each time.
        storage_dir: folder of files and batches, for this server alone; "" is `storage` in the cache folder.
        trust_request_chat_template: take chat templates from requests.
        allowed_media_domains: hosts that images of requests are fetched from; others must come as data URLs.
        tool_call_parser, reasoning_parser: how answers to chats are read: a parser's name, "auto" (as the model's chat
            template says) or "none".
        otlp_traces_endpoint: URL that gets a span of each request; "" is none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str = ""
    root_path: str = ""
    shutdown_timeout_s: float = 30.0
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 64 * 2**10
    max_header_count: int = 256
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    admin_api_key: str = dataclasses.field(default="", repr=False)
    metrics_without_key: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    ssl_keyfile: str = ""
    ssl_keyfile_password: str = dataclasses.field(default="", repr=False)
    ssl_certfile: str = ""
    ssl_ca_certs: str = ""
    ssl_cert_reqs: int = 0
    log_level: str = "info"
    log_format: str = "text"
    storage_dir: str = ""
    log_requests: bool = True
    profile_dir: str = ""
    strict: bool = False
    trust_request_chat_template: bool = False
    allowed_media_domains: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    otlp_traces_endpoint: str = ""
