"""A model hub on this machine: what `huggingface_hub` asks one for, of repositories that live in a dict."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """repositories: name to {path: content}; gated: names that are refused. `requests` holds every path asked for."""

    def __init__(self, repositories: dict[str, dict[str, bytes]], gated: tuple[str, ...] = ()):
        self.repositories = repositories
        self.gated = gated
        self.requests: list[str] = []
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, headers, body = hub._answer(unquote(urlsplit(self.path).path))
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815 the base class calls it so

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def _answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.requests.append(path)
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_api else parts[:2])
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if name not in self.repositories:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        files = self.repositories[name]
        # /api/models/NAME/revision/REVISION, /api/models/NAME/tree/REVISION, /NAME/resolve/REVISION/FILE
        rest = parts[4:] if is_api else parts[2:]
        kind, revision = (rest or ["revision"])[0], (rest[1:] or ["main"])[0]
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if kind == "resolve":
            content = files.get("/".join(rest[2:]))
            if content is None:
                return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            return 200, {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}, content
        if kind == "tree":
            entries = [{"type": "file", "path": file, "size": len(files[file]), "oid": "0"} for file in files]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        siblings = [{"rfilename": file} for file in files]
        info = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
        return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
