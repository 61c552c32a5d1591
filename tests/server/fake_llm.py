"""A scripted AsyncLLM: the real checks at the door, a byte tokenizer, and answers that are known beforehand."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kitfox.config import EngineConfig, ModelConfig, Pooling
from kitfox.engine.async_llm import Adapter
from kitfox.engine.input_processor import EngineLimits, InputProcessor
from kitfox.errors import (
    EngineBusyError,
    EngineDeadError,
    InvalidParameterError,
    KitfoxError,
    RequestError,
    ShuttingDownError,
)
from kitfox.outputs import CompletionOutput, EngineStats, RequestOutput, RequestTimings, TokenLogprobs
from kitfox.request import FinishReason, ImageTile, SamplingParams
from kitfox.tracing import TraceEvent, Tracer

VOCAB_SIZE = 260
BOS, EOS = 256, 257
REPLY = "The quick brown fox 🦊 jumps."
MAX_MODEL_LEN = 512
MODEL = "fox-model"
MODEL_CONFIG = ModelConfig("LlamaForCausalLM", VOCAB_SIZE, 8, 8, 1, 1, 1, 8, MAX_MODEL_LEN, eos_token_ids=(EOS,))


class ByteTokenizer:
    """Token ids 0 to 255 are bytes; 256 and 257 are <s> and </s>."""

    vocab_size = VOCAB_SIZE
    bos_token_id = BOS
    specials: ClassVar[dict[int, str]] = {BOS: "<s>", EOS: "</s>"}

    def __init__(self) -> None:
        self.chat_template: str | None = "tools, tool_calls"  # says which dialect the model speaks; it is not rendered

    @property
    def info(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size, "bos_token": "<s>", "chat_template": self.chat_template}

    def special_token_id(self, text: str) -> int | None:
        return next((token_id for token_id, special in self.specials.items() if special == text), None)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self.specials.get(token_id, "").encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if i < 256 or not skip_special_tokens]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        previous = None
        for message in messages:
            if message["role"] == previous:
                raise RequestError("the chat template refused the messages: roles must alternate", param="messages")
            previous = message["role"]
        text = "".join(f"[tool {tool['function']['name']}]\n" for tool in kwargs.get("tools", ()))
        text += "".join(f"[{m['role']}]{m['content']}\n" for m in messages)
        return text[:-1] if kwargs["continue_final_message"] else text + "[assistant]" * kwargs["add_generation_prompt"]

    def encode_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        return self.encode(self.apply_chat_template(messages, **kwargs))


class FakeAsyncLLM:
    """Answers every prompt with `reply` (answer i of n starts with the digit i, from 1 on), then EOS.

    Attributes:
        tokens_per_delta: how many tokens a step brings.
        hold: while set to an Event that is not set, streams wait after their first delta.
        fail_after: raise `failure` in the stream after so many deltas.
        ends_by_token: an answer's last token is EOS; without it nothing says why it ends there.
        used_adapters: of each request that was let in.
    """

    def __init__(self, *, reply: str = REPLY, tokens_per_delta: int = 1, max_model_len: int = MAX_MODEL_LEN):
        self.config = EngineConfig().replace(model={"model": "fox", "served_model_names": (MODEL, "alias")})
        self.model_config = MODEL_CONFIG
        self.path = Path("/models/fox.gguf")
        self.phases = [("load weights", 0.5), ("allocate and capture", 0.25)]
        self.kernels, self.device, self.num_threads = "fake kernels", "cpu", 2
        self.max_model_len = max_model_len
        self.default_sampling_params: dict[str, Any] = {}
        self.tokenizer = ByteTokenizer()
        self.stats = EngineStats(num_blocks=10, num_free_blocks=7, num_running=2, num_waiting=1, block_size=32)
        self.on_step: Callable[[EngineStats], None] = lambda _: None
        self.tracer = Tracer()
        self.health = "ok"
        self.health_detail = ""
        self.started_at = time.time()
        self.reply = reply
        self.tokens_per_delta = tokens_per_delta
        self.hold: asyncio.Event | None = None
        self.fail_after: int | None = None
        self.ends_by_token = True
        self.failure: Exception = EngineDeadError("the engine failed")
        self.refusal: KitfoxError | None = None
        self.num_cached_tokens = 0
        self.in_flight: set[str] = set()
        self.cut: set[str] = set()
        self.is_paused = self.is_sleeping = False
        self.controls: list[str] = []
        self.aborted: list[str] = []
        self.seen: list[tuple[str, list[int], SamplingParams]] = []
        self.adapters: dict[str, Adapter] = {}
        self.used_adapters: list[str | None] = []
        limits = EngineLimits(VOCAB_SIZE, max_model_len, 10 * max_model_len, 20, (EOS,))
        self._input_processor = InputProcessor(limits, self.tokenizer)  # type: ignore[arg-type]

    def start(self) -> None:
        pass

    async def wait_until_ready(self) -> None:
        if self.health == "dead":
            raise EngineDeadError(self.health_detail)

    async def shutdown(self, drain_s: float = 0.0) -> None:
        self.health = "draining"
        deadline = time.monotonic() + drain_s
        while self.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        self.failure, self.fail_after = ShuttingDownError("the server shut down"), 0
        if self.hold is not None:
            self.hold.set()

    def abort(self, request_id: str) -> None:
        if request_id in self.in_flight:
            self.in_flight.discard(request_id)
            self.aborted.append(request_id)

    @property
    def open_request_ids(self) -> list[str]:
        return sorted(self.in_flight)

    def cut_short(self, request_id: str) -> bool:
        """The answer ends with the next delta."""
        self.cut.add(request_id)
        return request_id in self.in_flight

    def take_adapters(self, **paths: str) -> None:
        """As a server with --enable-lora does that has loaded these."""
        self.config = self.config.replace(adapters={"enabled": True, "max_loaded": 3})
        for name, path in paths.items():
            self.adapters[name] = Adapter(adapter_id=len(self.adapters) + 1, name=name, path=path, is_loaded=True)

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Directories that begin with /good have an adapter."""
        if name in self.adapters:
            raise InvalidParameterError("lora_name", "must not be that of another adapter", name)
        if not path.startswith("/good"):
            raise InvalidParameterError("lora_path", "cannot be loaded: no adapter", path)
        self.take_adapters(**{name: path})
        return self.adapters[name]

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    async def flush_cache(self) -> bool:
        self.controls.append("flush_cache")
        return not self.in_flight

    async def pause(self) -> None:
        self.is_paused = True

    async def resume(self) -> None:
        self.is_paused = False

    async def sleep(self) -> None:
        if self.in_flight - self.cut:
            raise EngineBusyError("requests are open")
        self.is_sleeping = True

    async def wake_up(self) -> None:
        self.is_sleeping = False

    async def set_scheduling(self, changes: Mapping[str, int]) -> None:
        self.config = self.config.replace(scheduler=dict(changes))

    async def slow_down(self, seconds: float) -> None:
        self.controls.append(f"slow_down {seconds:g}")

    async def freeze_gc(self) -> None:
        self.controls.append("freeze_gc")

    async def start_profile(self) -> None:
        self.tracer.start_profile()

    async def stop_profile(self) -> list[TraceEvent]:
        return self.tracer.stop_profile()

    async def trace(self, request_id: str) -> list[TraceEvent]:
        return self.tracer.of_request(request_id)

    async def add_request(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        pooling: Pooling | None = None,
        adapter: str | None = None,
        tiles: Sequence[ImageTile] = (),
    ) -> AsyncIterator[RequestOutput]:
        assert not tiles, "this model reads no images"
        if self.health == "draining":
            raise ShuttingDownError("the server is shutting down")
        if self.refusal is not None:
            raise self.refusal
        requests = self._input_processor.process(
            prompt_token_ids,
            sampling,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            pooling=pooling,
        )
        if request_id in self.in_flight:
            raise InvalidParameterError("request_id", "must not be one that is being served", request_id)
        self.in_flight.add(request_id)
        self.seen.append((request_id, prompt_token_ids, sampling))
        self.used_adapters.append(adapter)
        self.tracer.emit("received", request_id, prompt=len(prompt_token_ids))
        max_tokens = requests[0].sampling.max_tokens
        assert max_tokens is not None
        if pooling is not None:
            return self._stream_vector(request_id, requests[0].prompt_token_ids, pooling)
        return self._stream(request_id, prompt, prompt_token_ids, sampling, max_tokens)

    async def _stream(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], sampling: SamplingParams, limit: int
    ) -> AsyncIterator[RequestOutput]:
        answers = [self._answer(index, sampling, limit) for index in range(sampling.n)]
        num_steps = max(map(len, answers))
        for step in range(num_steps):
            await asyncio.sleep(0)
            if request_id in self.cut:
                ends = [
                    CompletionOutput(index=index, finish_reason=FinishReason.ABORT)
                    for index, deltas in enumerate(answers)
                    if step < len(deltas)
                ]
                self.in_flight.discard(request_id)
                yield RequestOutput(
                    request_id=request_id, prompt=prompt, prompt_token_ids=prompt_token_ids, outputs=ends, finished=True
                )
                return
            if self.fail_after is not None and step >= self.fail_after:
                self.in_flight.discard(request_id)
                raise self.failure
            output = RequestOutput(
                request_id=request_id,
                prompt=prompt,
                prompt_token_ids=prompt_token_ids,
                outputs=[deltas[step] for deltas in answers if step < len(deltas)],
                num_cached_tokens=self.num_cached_tokens,
                finished=step == num_steps - 1,
            )
            num_prompt_tokens = 0 if step else len(prompt_token_ids)
            num_new_tokens = sum(len(answer.token_ids) for answer in output.outputs)
            self.on_step(EngineStats(num_step_tokens=num_prompt_tokens + num_new_tokens))
            if step == 0 and sampling.prompt_logprobs is not None:
                entries = [_logprobs(t, sampling.prompt_logprobs, sampling) for t in prompt_token_ids[1:]]
                output.prompt_logprobs = [None, *entries]
            if output.finished:
                output.timings = RequestTimings(
                    queue_s=0.1, prefill_s=0.2, decode_s=0.3, ttft_s=0.3, prefill_tokens_per_s=5, decode_tokens_per_s=90
                )
                self.in_flight.discard(request_id)
                self.tracer.emit("answered", request_id)
            yield output
            if self.hold is not None:
                await self.hold.wait()

    async def _stream_vector(
        self, request_id: str, prompt_token_ids: list[int], pooling: Pooling
    ) -> AsyncIterator[RequestOutput]:
        try:
            await asyncio.sleep(0)
            if self.hold is not None:
                await self.hold.wait()
            if self.fail_after is not None:
                raise self.failure
            reason = FinishReason.ABORT if request_id in self.cut else FinishReason.STOP
            yield RequestOutput(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=prompt_token_ids,
                outputs=[CompletionOutput(index=0, finish_reason=reason)],
                num_cached_tokens=self.num_cached_tokens,
                embedding=fake_vector(prompt_token_ids, pooling).tobytes(),
                finished=True,
            )
        finally:
            self.in_flight.discard(request_id)

    def _answer(self, index: int, sampling: SamplingParams, max_tokens: int) -> list[CompletionOutput]:
        """All deltas of one answer; knowing the future, it holds back just what a stop string will cut."""
        source = (str(index) if index else "") + self.reply
        tokens = [*source.encode(), *([EOS] if self.ends_by_token else [])][:max_tokens]
        text = bytes(t for t in tokens if t != EOS).decode("utf-8", "replace")
        matches = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in sampling.stop if stop in text]
        end, cut, stop = min(matches, default=(len(text) + 1, len(text), None))
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        deltas: list[CompletionOutput] = []
        num_decoded = num_shown = 0
        for start in range(0, max(len(tokens), 1), self.tokens_per_delta):
            new = tokens[start : start + self.tokens_per_delta]
            is_last = start + len(new) >= len(tokens)
            num_decoded += len(utf8.decode(bytes(t for t in new if t != EOS), final=is_last))
            upto = min(num_decoded, cut)
            delta = CompletionOutput(index=index, token_ids=list(new), text=text[num_shown:upto])
            num_shown = upto
            if num_decoded >= end:
                delta.finish_reason, delta.stop_reason = FinishReason.STOP, stop
            elif is_last:
                delta.end_token_id = EOS if new and new[-1] == EOS else None
                is_whole = len(tokens) < max_tokens or delta.end_token_id == EOS
                delta.finish_reason = FinishReason.STOP if is_whole else FinishReason.LENGTH
            if sampling.logprobs is not None:
                delta.logprobs = [_logprobs(t, sampling.logprobs, sampling) for t in new]
            deltas.append(delta)
            if delta.finish_reason is not None:
                break
        return deltas


def fake_vector(token_ids: list[int], pooling: Pooling) -> np.ndarray:
    """How often each of the remainders of 8 is there, or the last token's bits: similar prompts, similar vectors."""
    if pooling == "mean":
        return np.bincount(np.array(token_ids) % 8, minlength=8).astype("<f4")
    return np.array([token_ids[-1] >> bit & 1 for bit in range(8)], "<f4")


def _logprobs(token_id: int, num_top: int, sampling: SamplingParams) -> TokenLogprobs:
    others = [(token_id + k) % 256 for k in range(num_top)]
    named = [-10.0 - i for i in sampling.logprob_token_ids]
    return TokenLogprobs(token_id, -0.5 - token_id / 1000, 1, others, [-0.5 - k for k in range(num_top)], named)
