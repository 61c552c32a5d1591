"""LLM: the offline API. The engine runs in this process; a call returns when every prompt is answered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kitfox.config import (
    POOLINGS,
    AdapterOptions,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelOptions,
    Pooling,
    SchedulerConfig,
    SpeculationConfig,
    StructuredOutputConfig,
    VisionConfig,
)
from kitfox.engine.client import InProcessClient
from kitfox.engine.input_processor import EngineLimits, InputProcessor
from kitfox.engine.output_processor import OutputProcessor, error_of
from kitfox.errors import ConfigError, InvalidParameterError
from kitfox.images import CutImage, cut_image, place_images, read_data_url, require_pillow
from kitfox.outputs import CompletionOutput, EngineStats, RequestOutput
from kitfox.request import EngineRequest, ImageTile, SamplingParams
from kitfox.structured_output.vocabulary import Vocabulary
from kitfox.tokenizer import load_tokenizer

Prompt = str | list[int] | dict[str, Any]
NO_TILES: list[ImageTile] = []


class LLM:
    """A model for batches of prompts: `LLM("smollm2-135m").generate(["A quick brown fox"], SamplingParams())`."""

    def __init__(self, model: str = "smollm2-135m", *, config: EngineConfig | None = None, **options: Any):
        """Load a model.

        Args:
            config: the whole configuration; `model` and options are then not given.
            options: fields of the sections of EngineConfig by name, such as max_model_len=2048, cache="radix",
                block_size=16, max_num_seqs=8, num_threads=2, speculation="suffix".

        Raises:
            ConfigError: an option nobody knows, or a value out of range.
        """
        from kitfox.engine.launch import load_core
        from kitfox.plan import make_plan, settle
        from kitfox.spec_decode.proposers import guesser_of
        from kitfox.weights.hub import resolve_model
        from kitfox.weights.model_config import read_generation_defaults, read_model_config

        self.config = config or config_from_options(model, options)
        path = resolve_model(self.config.model.model, revision=self.config.model.revision).path
        self.model_config = read_model_config(path)
        plan = make_plan(self.config, self.model_config, guesser=guesser_of(self.config))
        self.config = settle(self.config, plan)
        self.max_model_len = plan.max_model_len
        self.default_sampling_params = read_generation_defaults(path, self.config.model)
        tokenizer_path = Path(self.config.model.tokenizer) if self.config.model.tokenizer else path
        self.tokenizer = load_tokenizer(tokenizer_path, self.config.model.chat_template)
        core = load_core(self.config, self.model_config, path, plan.num_blocks, lambda name, seconds: None)
        self._client = InProcessClient(core)
        self._input_processor = InputProcessor(
            EngineLimits.of(
                self.config,
                self.model_config,
                max_model_len=self.max_model_len,
                num_blocks=plan.num_blocks,
                eos_token_ids=self.tokenizer.eos_token_ids,
                default_max_tokens=self.default_sampling_params.get("max_tokens"),
            ),
            self.tokenizer,
        )
        self._output_processor = OutputProcessor(self.tokenizer)
        self._num_requests = 0
        self._adapters: dict[str, int] = {}
        self._num_adapters = 0

    @property
    def stats(self) -> EngineStats:
        return self._client.core.scheduler.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; the answers come in the order of the prompts.

        Args:
            prompts: texts, lists of token ids, or `{"prompt": ...}` / `{"prompt_token_ids": ...}`; one or several.
            sampling_params: one for all, or one for each; None means `default_sampling_params`.
            use_tqdm: show a progress bar.
            adapter: a LoRA adapter by the name that `load_adapter` gave it.

        Raises:
            RequestError: one of the prompts or its parameters is wrong; none is then started.
        """
        encoded = [(*self._encode(prompt), NO_TILES) for prompt in _several(prompts)]
        return self._generate(
            encoded, sampling_params, use_tqdm=use_tqdm, priority=priority, cache_salt=cache_salt, adapter=adapter
        )

    def _generate(
        self,
        encoded: Sequence[tuple[str | None, list[int], list[ImageTile]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        wanted = sampling_params or SamplingParams(**self.default_sampling_params)
        params = _one_for_each(wanted, len(encoded), "sampling_params")
        priorities = _one_for_each(priority or 0, len(encoded), "priority")
        if adapter is not None and adapter not in self._adapters:
            raise InvalidParameterError("adapter", "must be one that is loaded", adapter)
        adapter_id = 0 if adapter is None else self._adapters[adapter]
        checked = []
        for (text, token_ids, tiles), sampling, rank in zip(encoded, params, priorities, strict=True):
            self._num_requests += 1
            requests = self._input_processor.process(
                token_ids,
                sampling,
                request_id=str(self._num_requests),
                priority=rank,
                cache_salt=cache_salt,
                adapter_id=adapter_id,
                tiles=tiles,
            )
            checked.append((requests, sampling, text))
        return self._answer(checked, use_tqdm)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter from a directory, as PEFT writes them.

        Raises:
            InvalidParameterError: another one has this name.
            WeightsError: it is none, or does not fit the model.
        """
        if name in self._adapters:
            raise InvalidParameterError("name", "must not be that of another adapter", name)
        self._num_adapters += 1
        self._client.core.executor.load_adapter(self._num_adapters, Path(path))
        self._adapters[name] = self._num_adapters

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        if name not in self._adapters:
            raise InvalidParameterError("name", "must be an adapter that is loaded", name)
        self._client.core.unload_adapter(self._adapters.pop(name))

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; the model's chat template makes the prompts.

        Args:
            messages: OpenAI's form. Images are parts of type "image_url" with a data: URL.

        Raises:
            RequestError: one of them is wrong; none is then started.
        """
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        encoded = [self._encode_chat(list(c), template_options) for c in conversations]  # type: ignore[arg-type]
        return self._generate(encoded, sampling_params, use_tqdm=use_tqdm)

    def _encode_chat(
        self, messages: list[dict[str, Any]], template_options: dict[str, Any]
    ) -> tuple[None, list[int], list[ImageTile]]:
        vision = self.model_config.vision
        if vision is None:
            return None, self.tokenizer.encode_chat(messages, **template_options), NO_TILES
        require_pillow()
        images: list[CutImage] = []
        shown = []
        for position, message in enumerate(messages):
            content = message.get("content")
            if isinstance(content, list):
                place = f"messages[{position}].content"
                message = {**message, "content": [_read_part(part, vision, images, place) for part in content]}
            shown.append(message)
        token_ids = self.tokenizer.encode_chat(shown, **template_options)
        return None, *place_images(token_ids, images, self.tokenizer, vision)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[list[float]]:
        """One vector for each prompt, of the model's last hidden states.

        Args:
            prompts: as in `generate`.
            pooling: "mean" of all tokens or the "last" one; None means what the configuration says.
            normalize: make every vector of length 1.

        Raises:
            RequestError: one of the prompts is wrong; none is then computed.
        """
        how = self.config.model.pooling if pooling is None else pooling
        if how not in POOLINGS:
            raise InvalidParameterError("pooling", f"must be one of {', '.join(POOLINGS)}", how)
        sampling = SamplingParams(max_tokens=0)
        checked = []
        for text, token_ids in map(self._encode, _several(prompts)):
            self._num_requests += 1
            requests = self._input_processor.process(
                token_ids, sampling, request_id=str(self._num_requests), pooling=how
            )
            checked.append((requests, sampling, text))
        return [output.vector(normalize=normalize).tolist() for output in self._answer(checked, use_tqdm)]

    def _answer(
        self, checked: list[tuple[list[EngineRequest], SamplingParams, str | None]], use_tqdm: bool
    ) -> list[RequestOutput]:
        if self._client.core.scheduler.grammars is None and any(sampling.constraint for _, sampling, _ in checked):
            from kitfox.engine.launch import use_vocabulary

            use_vocabulary(self._client.core, self.config, Vocabulary.of(self.tokenizer, self.model_config.vocab_size))
        for requests, sampling, text in checked:
            self._output_processor.add_request(requests, sampling, text)
            self._client.add_requests(requests)
        return self._run([requests[0].request_id for requests, _, _ in checked], use_tqdm)

    def _encode(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or len(prompt) != 1:
                raise InvalidParameterError("prompt", "must have one key, prompt or prompt_token_ids", sorted(prompt))
            prompt = next(iter(prompt.values()))
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if _is_token_ids(prompt):
            return None, list(prompt)
        raise InvalidParameterError("prompt", "must be a text or a list of token ids", prompt)

    def _run(self, request_ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        wholes: dict[str, RequestOutput] = {}
        with _Progress(len(request_ids), use_tqdm) as progress:
            try:
                while self._client.has_work:
                    outputs = self._client.step()
                    news, to_abort = self._output_processor.process(outputs.outputs)
                    self._client.abort(to_abort)
                    for delta in news:
                        error = error_of(delta)
                        if error is not None:
                            raise error
                        _merge(wholes, delta)
                        progress.advance(delta)
            except BaseException:  # Ctrl-C too: the next call must find an empty engine
                for request_id in request_ids:
                    self._client.abort(self._output_processor.abort(request_id))
                raise
        return [wholes[request_id] for request_id in request_ids]


def config_from_options(model: str, options: dict[str, Any]) -> EngineConfig:
    """Sort keyword options into the sections of EngineConfig; `cache` and `speculation` are short for the organisation
    of the one and the method of the other.
    """
    values: dict[str, Any] = dict(options)
    if "cache" in values:
        values["organisation"] = values.pop("cache")
    if "speculation" in values:
        values["method"] = values.pop("speculation")
    sections: dict[str, Any] = {}
    for name, section in (
        ("model", ModelOptions),
        ("cache", CacheConfig),
        ("scheduler", SchedulerConfig),
        ("device", DeviceConfig),
        ("structured_output", StructuredOutputConfig),
        ("speculation", SpeculationConfig),
        ("adapters", AdapterOptions),
    ):
        known = {key: values.pop(key) for key in list(values) if key in section.__dataclass_fields__ and key != "model"}
        if name == "model":
            known["model"] = model
        sections[name] = section(**known)
    for key in ("max_logprobs", "trace_capacity"):
        if key in values:
            sections[key] = values.pop(key)
    if values:
        raise ConfigError(f"unknown option {sorted(values)[0]!r}", param=sorted(values)[0])
    return EngineConfig(**sections)


def _read_part(part: Any, vision: VisionConfig, images: list[CutImage], place: str) -> Any:
    """A part of a message as templates know it; an image is added to `images`."""
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return part
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    images.append(cut_image(read_data_url(str(url), place), vision, place))
    return {"type": "image"}


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """One prompt is a list of one; token ids are one prompt."""
    return prompts if isinstance(prompts, list | tuple) and not _is_token_ids(prompts) else [prompts]


def _is_token_ids(prompt: object) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(type(token) is int for token in prompt)


def _one_for_each(values: Any, count: int, name: str) -> list[Any]:
    if not isinstance(values, list | tuple):
        return [values] * count
    if len(values) != count:
        raise InvalidParameterError(name, f"must be one, or one for each of the {count} prompts", len(values))
    return list(values)


def _merge(wholes: dict[str, RequestOutput], delta: RequestOutput) -> None:
    """Add a delta to the whole answer it belongs to."""
    whole = wholes.setdefault(
        delta.request_id,
        RequestOutput(
            request_id=delta.request_id,
            prompt=delta.prompt,
            prompt_token_ids=delta.prompt_token_ids,
            outputs=[],
            num_cached_tokens=delta.num_cached_tokens,
        ),
    )
    for piece in delta.outputs:
        while len(whole.outputs) <= piece.index:
            whole.outputs.append(CompletionOutput(index=len(whole.outputs)))
        answer = whole.outputs[piece.index]
        answer.text += piece.text
        answer.token_ids.extend(piece.token_ids)
        if piece.logprobs is not None:
            answer.logprobs = (answer.logprobs or []) + piece.logprobs
        answer.finish_reason = piece.finish_reason
        answer.stop_reason, answer.end_token_id = piece.stop_reason, piece.end_token_id
    whole.prompt_logprobs = delta.prompt_logprobs or whole.prompt_logprobs
    whole.embedding = delta.embedding
    whole.finished = delta.finished
    whole.timings = delta.timings


class _Progress:
    """A progress bar over finished requests, with the tokens generated so far; nothing when it is not wanted."""

    def __init__(self, total: int, wanted: bool):
        self._bar = None
        self._num_tokens = 0
        if wanted:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("requests"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[tokens]} tokens"),
                TimeElapsedColumn(),
            )
            self._task = self._bar.add_task("requests", total=total, tokens=0)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, delta: RequestOutput) -> None:
        if self._bar is not None:
            self._num_tokens += sum(len(output.token_ids) for output in delta.outputs)
            self._bar.update(self._task, advance=int(delta.finished), tokens=self._num_tokens)
