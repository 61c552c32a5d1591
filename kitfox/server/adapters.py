"""LoRA adapters of a running server: loaded and unloaded over HTTP, under both engines' names.

Paths are those of the server's machine: who may load an adapter has the server read a directory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request, Response

from kitfox.errors import InvalidParameterError, NotFoundError, RequestError, UnsupportedParameterError
from kitfox.server.generation import check_takes_adapters, loaded_adapters, served_model_names
from kitfox.server.validation import convert_body, read_json_object, with_ignored

if TYPE_CHECKING:
    from kitfox.engine.async_llm import AsyncLLM


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter (vLLM) and /load_lora_adapter (SGLang).

    Attributes:
        lora_path: directory of the adapter.
        load_inplace: an adapter that has the name is replaced.
        pinned: stay loaded, as every adapter does.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    pinned: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter (vLLM) and /unload_lora_adapter (SGLang)."""

    lora_name: str


def add_adapter_routes(app: FastAPI, llm: AsyncLLM, max_body_bytes: int) -> None:
    from kitfox.server.app import json_response

    def answer(request: Request, done: str, ignored: list[str]) -> Response:
        """A sentence in vLLM's protocol, and what is loaded now in SGLang's."""
        if _is_of_vllm(request):
            return Response(f"Success: LoRA adapter {done} successfully.", media_type="text/plain")
        body: dict[str, Any] = {"success": True, "error_message": "", "loaded_adapters": loaded_adapters(llm)}
        return json_response(with_ignored(body, ignored))

    @app.post("/v1/load_lora_adapter")
    @app.post("/load_lora_adapter")
    async def load(request: Request) -> Response:
        """Answer under a new name from now on."""
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), LoadAdapterRequest)
        _check_can_be_shown(request, ignored)
        check_takes_adapters(llm, "lora_name")
        _check_name(llm, fields.lora_name)
        await _load(llm, fields)
        return answer(request, f"'{fields.lora_name}' added", ignored)

    @app.post("/v1/unload_lora_adapter")
    @app.post("/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        """Take no more requests under a name. Those that run are answered."""
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), UnloadAdapterRequest)
        _check_can_be_shown(request, ignored)
        check_takes_adapters(llm, "lora_name")
        if fields.lora_name not in loaded_adapters(llm):
            there = ", ".join(loaded_adapters(llm)) or "none"
            raise NotFoundError(
                f"The LoRA adapter `{fields.lora_name[:200]}` is not loaded. Loaded: {there}", param="lora_name"
            )
        await llm.unload_adapter(fields.lora_name)
        return answer(request, f"'{fields.lora_name}' removed", ignored)


def _is_of_vllm(request: Request) -> bool:
    return request.scope["route"].path.startswith("/v1/")


def _check_can_be_shown(request: Request, ignored: list[str]) -> None:
    """Raises UnsupportedParameterError where nobody reads a parameter and the answer has no room to list it."""
    if ignored and _is_of_vllm(request):
        raise UnsupportedParameterError(ignored[0], "is not a parameter of this endpoint")


def _check_name(llm: AsyncLLM, name: str) -> None:
    if not name.isprintable():
        raise InvalidParameterError("lora_name", "must have printable characters only", name)
    if name in served_model_names(llm):
        raise InvalidParameterError("lora_name", "must not be a served model's", name)


async def _load(llm: AsyncLLM, fields: LoadAdapterRequest) -> None:
    """Load an adapter; where that fails, one that it was to replace is there as before.

    Raises:
        InvalidParameterError: the name is taken, or the directory has no adapter that fits.
    """
    name = fields.lora_name
    replaced = loaded_adapters(llm).get(name) if fields.load_inplace else None
    if replaced is not None:
        await llm.unload_adapter(name)
    try:
        await llm.load_adapter(name, fields.lora_path)
    except RequestError:
        if replaced is not None:
            await llm.load_adapter(name, replaced)
        raise
