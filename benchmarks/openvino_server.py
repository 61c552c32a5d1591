"""A small `/v1/completions` over OpenVINO GenAI's continuous batching. Runs in that peer's environment, not kitfox's.

    python openvino_server.py MODEL.gguf PORT

OpenVINO's own server is not on PyPI. This one takes token ids, answers by streaming only, and knows what the benchmark
sends. After each step it sleeps 0.3 ms: without that the event loop hardly gets the interpreter lock, which was
measured to cost 20 % of throughput and most of the time to first token.
"""

import asyncio
import json
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

_CACHE_GB, _MAX_BATCHED_TOKENS, _MAX_SEQS = 2, 2048, 32
_YIELD_S, _IDLE_S = 0.0003, 0.001


class Engine:
    """A thread that steps the pipeline and hands each request's new tokens to its queue; None ends a request."""

    def __init__(self, model: str):
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GB
        scheduler.max_num_batched_tokens = _MAX_BATCHED_TOKENS
        scheduler.max_num_seqs = _MAX_SEQS
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
        self.tokenizer = self._pipeline.get_tokenizer()
        self._arrivals: queue.SimpleQueue = queue.SimpleQueue()
        self._running: dict[int, tuple] = {}
        self._next_id = 0
        threading.Thread(target=self._loop, daemon=True).start()

    def submit(self, ids: list[int], max_tokens: int, ignore_eos: bool) -> asyncio.Queue:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = ignore_eos
        config.do_sample = False
        if not ignore_eos:
            config.set_eos_token_id(self.tokenizer.get_eos_token_id())
        tokens: asyncio.Queue = asyncio.Queue()
        self._arrivals.put((np.array([ids], dtype=np.int64), config, tokens, asyncio.get_running_loop()))
        return tokens

    def _loop(self) -> None:
        while True:
            while not self._arrivals.empty():
                ids, config, tokens, loop = self._arrivals.get()
                handle = self._pipeline.add_request(self._next_id, openvino.Tensor(ids), config)
                self._running[self._next_id] = (handle, tokens, loop)
                self._next_id += 1
            if not self._pipeline.has_non_finished_requests():
                time.sleep(_IDLE_S)
                continue
            self._pipeline.step()
            time.sleep(_YIELD_S)
            self._deliver()

    def _deliver(self) -> None:
        for request_id, (handle, tokens, loop) in list(self._running.items()):
            while handle.can_read():
                for output in handle.read().values():
                    loop.call_soon_threadsafe(tokens.put_nowait, list(output.generated_ids))
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                loop.call_soon_threadsafe(tokens.put_nowait, None)
                del self._running[request_id]


def build_app(engine: Engine, model: str) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> dict:
        return {}

    @app.get("/v1/models")
    def models() -> dict:
        return {"object": "list", "data": [{"id": Path(model).name, "object": "model", "root": model}]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict:
        text = (await request.json())["prompt"]
        ids = engine.tokenizer.encode(text, add_special_tokens=False).input_ids.data[0]
        return {"tokens": [int(token_id) for token_id in ids]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        return StreamingResponse(_stream(engine, body), media_type="text/event-stream")

    return app


async def _stream(engine: Engine, body: dict) -> AsyncIterator[str]:
    tokens = engine.submit(body["prompt"], body["max_tokens"], body.get("ignore_eos", False))
    count = 0
    while (ids := await tokens.get()) is not None:
        count += len(ids)
        yield _event(choices=[{"index": 0, "text": engine.tokenizer.decode(ids), "token_ids": ids}])
    prompt = len(body["prompt"])
    usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    yield _event(choices=[], usage=usage)
    yield "data: [DONE]\n\n"


def _event(**fields: object) -> str:
    return f"data: {json.dumps({'object': 'text_completion', **fields})}\n\n"


if __name__ == "__main__":
    uvicorn.run(
        build_app(Engine(sys.argv[1]), sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning"
    )
