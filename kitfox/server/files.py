"""Files that clients upload and batches write: content and description side by side in a folder that outlives us."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.datastructures import QueryParams, UploadFile
from starlette.responses import FileResponse
from starlette.types import Message, Receive

from kitfox.errors import (
    InvalidParameterError,
    NotFoundError,
    RequestError,
    StorageError,
    TooLargeError,
    UnsupportedParameterError,
)

MAX_FILE_BYTES = 200 * 2**20
MAX_STORED_BYTES = 20 * 2**30  # of all files together
MAX_FORM_BYTES = 64 * 2**10  # of an upload beside its file
MAX_FILENAME_CHARS = 255
MAX_LISTED_FILES = 10_000
UPLOAD_PURPOSES = ("batch",)

T = TypeVar("T")


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file as the API shows it. `created_at` is Unix time in seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str

    def as_dict(self) -> dict[str, Any]:
        more = {"object": "file", "status": "processed", "expires_at": None, "status_details": None}
        return msgspec.structs.asdict(self) | more


class FileStore:
    """The files below one folder, which belongs to one server at a time.

    It is opened by what first needs it, so that a server without files leaves no trace on disk.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._content = folder / "files"
        self._files: dict[str, StoredFile] = {}  # oldest first
        self._lock: IO[str] | None = None

    # ---- the folder ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the folder and read what is there; harmless when repeated.

        Raises:
            StorageError: it cannot be written, or another server has it.
        """
        if self._lock is not None:
            return
        try:
            self._content.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("a+")
        except OSError as error:
            raise StorageError(f"the storage folder cannot be used: {error}. Choose one with --storage-dir") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            owner = lock.read(20).strip() or "unknown"
            lock.close()
            raise StorageError(
                f"the storage folder {self.folder} belongs to another server (process {owner}) until that ends: "
                "give each its own with --storage-dir"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock
        described = [
            msgspec.json.decode(path.read_bytes(), type=StoredFile) for path in self._content.glob("file-*.json")
        ]
        self._files = {file.id: file for file in sorted(described, key=lambda file: (file.created_at, file.id))}
        for path in self._content.iterdir():  # what a crash left half-written
            if path.name.removesuffix(".json") not in self._files:
                path.unlink()

    def close(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ---- files --------------------------------------------------------------------------------------------------

    def all(self) -> list[StoredFile]:
        """All files, oldest first."""
        self.open()
        return list(self._files.values())

    def get(self, file_id: str) -> StoredFile:
        """Raises NotFoundError for an id that no file has."""
        self.open()
        if file_id not in self._files:
            raise NotFoundError(f"there is no file {file_id[:100]}", param="file_id")
        return self._files[file_id]

    def __contains__(self, file_id: str) -> bool:
        self.open()
        return file_id in self._files

    def path(self, file_id: str) -> Path:
        """Where the content of a file is."""
        return self._content / self.get(file_id).id

    def adopt(self, source: Path, *, filename: str, purpose: str, file_id: str | None = None) -> StoredFile:
        """Make a file of one that lies below our folder; it is moved, and then described: never seen by halves."""
        self.open()
        file_id = file_id or f"file-{uuid.uuid4().hex}"
        size = source.stat().st_size
        file = StoredFile(id=file_id, bytes=size, created_at=int(time.time()), filename=filename, purpose=purpose)
        source.replace(self._content / file_id)
        write_whole(self._content / f"{file_id}.json", msgspec.json.encode(file))
        self._files[file_id] = file
        return file

    def delete(self, file_id: str) -> None:
        """Raises NotFoundError for an id that no file has."""
        path = self.path(file_id)
        del self._files[file_id]
        path.with_name(f"{file_id}.json").unlink()
        path.unlink()

    async def upload(self, upload: UploadFile, purpose: str) -> StoredFile:
        """Keep an uploaded file.

        Raises:
            TooLargeError: it has more than MAX_FILE_BYTES, or all files together have more than MAX_STORED_BYTES.
        """
        self.open()
        size = upload.size or 0
        if size > MAX_FILE_BYTES:
            raise TooLargeError(f"file must have at most {MAX_FILE_BYTES} bytes. Given: {size}", param="file")
        stored = sum(file.bytes for file in self._files.values())
        if stored + size > MAX_STORED_BYTES:
            limit = f"all files together may have {MAX_STORED_BYTES} bytes, and have {stored}: delete some"
            raise TooLargeError(f"{limit}. Given: {size} more", param="file")
        arriving = self.folder / f"upload-{uuid.uuid4().hex}"

        def copy() -> None:
            with arriving.open("wb") as target:
                shutil.copyfileobj(upload.file, target)

        try:
            await asyncio.to_thread(copy)
            filename = (upload.filename or "file")[:MAX_FILENAME_CHARS]
            return self.adopt(arriving, filename=filename, purpose=purpose)
        finally:
            arriving.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file so that a crash leaves the old or the new one."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


# ---- lists ----------------------------------------------------------------------------------------------------------


def page_of(
    items: Sequence[T], query: QueryParams, show: Callable[[T], dict[str, Any]], *, default_limit: int, max_limit: int
) -> dict[str, Any]:
    """OpenAI's list object of the items that `limit`, `order` and `after` choose. Items come oldest first.

    Raises:
        InvalidParameterError: one of the three cannot be.
    """
    raw_limit = query.get("limit", str(default_limit))
    if not (raw_limit.isascii() and raw_limit.isdecimal() and 1 <= int(raw_limit[:9]) <= max_limit):
        raise InvalidParameterError("limit", f"must be in [1, {max_limit}]", raw_limit)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidParameterError("order", "must be asc or desc", order)
    shown = [show(item) for item in (items if order == "asc" else reversed(items))]
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in shown]
        if after not in ids:
            raise InvalidParameterError("after", "must be the id of something in the list", after)
        shown = shown[ids.index(after) + 1 :]
    page = shown[: int(raw_limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(shown),
    }


# ---- routes ---------------------------------------------------------------------------------------------------------


def add_file_routes(app: FastAPI, store: FileStore, check_unused: Callable[[str], None]) -> None:
    """check_unused: raises ConflictError for a file that something still needs."""
    from kitfox.server.app import json_response

    @app.post("/v1/files")
    async def upload_file(request: Request) -> Response:
        store.open()  # before anything is received
        return json_response((await _receive_upload(request, store)).as_dict())

    @app.get("/v1/files")
    async def list_files(request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        files = [file for file in store.all() if purpose in (None, file.purpose)]
        limits = {"default_limit": MAX_LISTED_FILES, "max_limit": MAX_LISTED_FILES}
        return json_response(page_of(files, request.query_params, StoredFile.as_dict, **limits))

    @app.get("/v1/files/{file_id}")
    async def get_file(file_id: str) -> Response:
        return json_response(store.get(file_id).as_dict())

    @app.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str) -> Response:
        check_unused(store.get(file_id).id)
        store.delete(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    @app.get("/v1/files/{file_id}/content")
    async def file_content(file_id: str) -> Response:
        file = store.get(file_id)
        return FileResponse(store.path(file_id), media_type="application/octet-stream", filename=file.filename)


async def _receive_upload(request: Request, store: FileStore) -> StoredFile:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "multipart/form-data":
        raise RequestError(f"the Content-Type must be multipart/form-data. Given: {content_type[:64] or 'none'}")
    bounded = Request(request.scope, _bounded(request.receive, request.headers.get("content-length", "")))
    async with bounded.form(max_files=1, max_fields=16, max_part_size=MAX_FORM_BYTES) as form:
        for name in form:
            if name.startswith("expires_after"):
                raise UnsupportedParameterError("expires_after", "is not supported: delete files that are done with")
            if name not in ("file", "purpose"):
                raise InvalidParameterError("the form", "must have no fields but file and purpose", name)
        purpose, file = form.get("purpose"), form.get("file")
        if purpose not in UPLOAD_PURPOSES:
            raise InvalidParameterError("purpose", f"must be {' or '.join(UPLOAD_PURPOSES)}", purpose)
        if not isinstance(file, UploadFile):
            raise InvalidParameterError("file", "must be a file of a multipart form", file)
        return await store.upload(file, str(purpose))


def _bounded(receive: Receive, announced: str) -> Receive:
    """`receive` that raises TooLargeError instead of bringing more than a file can have."""
    limit = MAX_FILE_BYTES + MAX_FORM_BYTES
    too_large = TooLargeError(f"file must have at most {MAX_FILE_BYTES} bytes", param="file")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise too_large
    size = 0

    async def bounded_receive() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise too_large
        return message

    return bounded_receive
