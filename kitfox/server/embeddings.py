"""Vectors and what is made of them: embeddings, scores of pairs, rankings of documents; and SGLang's label scores.

A pair's score is the cosine of its two vectors: the served model has no head that reads both texts at once.
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response

from kitfox.config import Pooling
from kitfox.errors import AbortedError, InvalidParameterError, RequestError
from kitfox.outputs import RequestOutput
from kitfox.request import FinishReason, SamplingParams
from kitfox.server.generation import (
    MAX_PROMPTS,
    ChosenModel,
    Generator,
    Job,
    Prompt,
    Usage,
    check_model,
    encode_text,
    make_prompts,
)
from kitfox.server.validation import convert_body, read_json_object, with_ignored

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_DOCUMENTS = MAX_PROMPTS - 1  # beside the query
OTHER_NAMES = {"queries": "text_1", "data_1": "text_1", "documents": "text_2", "data_2": "text_2"}  # of a pair's sides
WRITE_IN_THREAD_NUMBERS = 2**16  # more numbers than this in an answer would hold up everybody's streams


# ---- what clients send ----------------------------------------------------------------------------------------------


class PoolingFields(msgspec.Struct, kw_only=True):
    """Parameters of everything that is made of vectors. Absent and null mean the same.

    Attributes:
        pooling: None is the server's --pooling.
        user: whom the client asks for; nothing is done with it.
    """

    model: str | None = None
    lora_path: str | None = None
    pooling: Pooling | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    """POST /v1/embeddings. `input` is a text, texts, token ids or lists of token ids."""

    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool = True


class ScoreRequest(PoolingFields, kw_only=True):
    """POST /score with two texts, one and several, or as many on both sides."""

    text_1: str | list[str]
    text_2: str | list[str]


class LabelScoreRequest(msgspec.Struct, kw_only=True):
    """POST /v1/score as SGLang has it: how likely each label comes after the query and an item."""

    query: str | list[int]
    items: str | list[str | list[int]]
    label_token_ids: list[int]
    apply_softmax: bool = False
    item_first: bool = False
    model: str | None = None
    lora_path: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None


class RerankRequest(PoolingFields, kw_only=True):
    """POST /rerank. A document is a text, or an object with one as `text`."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool = True


# ---- vectors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pooled:
    """What came back for the prompts of a job, in their order."""

    job: Job
    outputs: list[RequestOutput]
    usage: dict[str, Any]

    def vectors(self) -> list[npt.NDArray[np.float64]]:
        """One for each prompt, of any length."""
        return [output.vector(normalize=False).astype("f8") for output in self.outputs]

    def head(self, object_name: str) -> dict[str, Any]:
        job = self.job
        return {"id": job.answer_id, "object": object_name, "created": job.created, "model": job.model}


class PoolingService:
    """Makes jobs of requests and waits for all of their prompts."""

    def __init__(self, generator: Generator):
        self._generator = generator
        self._llm = generator.llm

    async def embed(self, fields: EmbeddingRequest, client_id: str | None) -> dict[str, Any]:
        """The answer of /v1/embeddings.

        Raises:
            KitfoxError: nothing was started, or the engine failed on it.
        """
        size = self._llm.model_config.hidden_size
        dimensions = fields.dimensions
        if dimensions is not None and not 1 <= dimensions <= size:
            raise InvalidParameterError("dimensions", f"must be in [1, {size}], the model's hidden size", dimensions)
        model = check_model(self._llm, fields.model, fields.lora_path)
        prompts = await make_prompts(
            self._llm.tokenizer, fields.input, add_special_tokens=fields.add_special_tokens, param="input"
        )
        pooled = await self._pool("embd-", fields, model, prompts, client_id, param="input")

        def render() -> list[dict[str, Any]]:
            vectors = [o.vector(normalize=fields.normalize, dimensions=dimensions) for o in pooled.outputs]
            shown = _base64 if fields.encoding_format == "base64" else _floats
            return [
                {"object": "embedding", "index": index, "embedding": shown(vector)}
                for index, vector in enumerate(vectors)
            ]

        is_large = len(prompts) * (dimensions or size) > WRITE_IN_THREAD_NUMBERS
        data = await asyncio.to_thread(render) if is_large else render()
        return pooled.head("list") | {"data": data, "usage": pooled.usage}

    async def score(self, fields: ScoreRequest, client_id: str | None) -> dict[str, Any]:
        """The answer of /score for texts."""
        firsts, seconds = _as_list(fields.text_1), _as_list(fields.text_2)
        for name, texts in (("text_1", firsts), ("text_2", seconds)):
            if not texts:
                raise InvalidParameterError(name, "must have at least one text", [])
        if len(firsts) + len(seconds) > MAX_PROMPTS:
            limit = f"and text_1 must have at most {MAX_PROMPTS} texts together"
            raise InvalidParameterError("text_2", limit, len(firsts) + len(seconds))
        if len(firsts) not in (1, len(seconds)) and len(seconds) != 1:
            limit = f"must be one text, or as many as text_1 has ({len(firsts)})"
            raise InvalidParameterError("text_2", limit, len(seconds))
        model = check_model(self._llm, fields.model, fields.lora_path)
        prompts = await self._encode([*firsts, *seconds], fields)
        pooled = await self._pool("score-", fields, model, prompts, client_id, param="text_1")
        vectors = pooled.vectors()
        lefts, rights = vectors[: len(firsts)], vectors[len(firsts) :]
        num_pairs = max(len(lefts), len(rights))
        pairs = [(lefts[index % len(lefts)], rights[index % len(rights)]) for index in range(num_pairs)]
        data = [{"index": index, "object": "score", "score": _cosine(*pair)} for index, pair in enumerate(pairs)]
        return pooled.head("list") | {"data": data, "usage": pooled.usage}

    async def rerank(self, fields: RerankRequest, client_id: str | None) -> dict[str, Any]:
        """The answer of /rerank: documents by falling similarity to the query."""
        texts = [_document_text(document, f"documents[{i}]") for i, document in enumerate(fields.documents)]
        if not 1 <= len(texts) <= MAX_DOCUMENTS:
            raise InvalidParameterError("documents", f"must have 1 to {MAX_DOCUMENTS} entries", len(texts))
        if fields.top_n is not None and fields.top_n < 0:
            raise InvalidParameterError("top_n", "must be positive, or 0 for all documents", fields.top_n)
        model = check_model(self._llm, fields.model, fields.lora_path)
        prompts = await self._encode([fields.query, *texts], fields)
        pooled = await self._pool("rerank-", fields, model, prompts, client_id, param="documents")
        query, *documents = pooled.vectors()
        scores = [_cosine(query, document) for document in documents]
        best = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: fields.top_n or None]
        results = []
        for index in best:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if fields.return_documents:
                result["document"] = {"text": texts[index]}
            results.append(result)
        return pooled.head("rerank") | {"results": results, "usage": pooled.usage}

    async def score_labels(self, fields: LabelScoreRequest, client_id: str | None) -> dict[str, Any]:
        """The answer of /v1/score for labels: a row for each item, a number for each label."""
        labels = fields.label_token_ids
        if not labels:
            raise InvalidParameterError("label_token_ids", "must have at least one token id", [])
        vocab_size = self._llm.model_config.vocab_size
        for token_id in labels:
            if not 0 <= token_id < vocab_size:
                raise InvalidParameterError("label_token_ids", f"must be in [0, {vocab_size - 1}]", token_id)
        model = check_model(self._llm, fields.model, fields.lora_path)
        job = Job(
            answer_id=self._generator.claim_id("score-", fields.request_id or client_id),
            created=int(time.time()),
            model=model.name,
            adapter=model.adapter,
            prompts=await self._label_prompts(fields),
            sampling=SamplingParams(max_tokens=1, temperature=0, logprobs=0, logprob_token_ids=tuple(labels)),
            priority=fields.priority,
            cache_salt=fields.cache_salt,
        )
        pooled = await self._run(job)
        rows = []
        for output in pooled.outputs:
            logprobs = output.outputs[0].logprobs
            assert logprobs, "an answer of one token has no logprobs although they were asked for"
            rows.append(_label_scores(logprobs[0].named_logprobs, apply_softmax=fields.apply_softmax))
        return {"scores": rows, "object": "scoring", "id": job.answer_id, "model": job.model, "usage": pooled.usage}

    async def _label_prompts(self, fields: LabelScoreRequest) -> list[Prompt]:
        query, items = fields.query, fields.items
        several: Sequence[Any] = [items] if isinstance(items, str) else items
        if not 1 <= len(several) <= MAX_PROMPTS:
            raise InvalidParameterError("items", f"must have 1 to {MAX_PROMPTS} entries", len(several))
        if any(isinstance(item, str) != isinstance(query, str) for item in several):
            raise InvalidParameterError("items", "must be texts if the query is one, else lists of token ids", items)
        joined = [item + query if fields.item_first else query + item for item in several]
        if isinstance(query, str):
            return [
                Prompt(await encode_text(self._llm.tokenizer, text, add_special_tokens=True), text) for text in joined
            ]
        return [Prompt(token_ids, None) for token_ids in joined]

    async def _encode(self, texts: list[str], fields: PoolingFields) -> list[Prompt]:
        tokenizer, special = self._llm.tokenizer, fields.add_special_tokens
        return [Prompt(await encode_text(tokenizer, text, add_special_tokens=special), text) for text in texts]

    async def _pool(
        self,
        prefix: str,
        fields: PoolingFields,
        model: ChosenModel,
        prompts: list[Prompt],
        client_id: str | None,
        *,
        param: str,
    ) -> Pooled:
        """The vectors of prompts that came in the parameter `param`."""
        job = Job(
            answer_id=self._generator.claim_id(prefix, fields.request_id or client_id),
            created=int(time.time()),
            model=model.name,
            adapter=model.adapter,
            prompts=prompts,
            sampling=SamplingParams(
                max_tokens=0,
                truncate_prompt_tokens=fields.truncate_prompt_tokens,
                truncation_side=fields.truncation_side,
            ),
            priority=fields.priority,
            cache_salt=fields.cache_salt,
            pooling=fields.pooling or self._llm.config.model.pooling,
        )
        try:
            return await self._run(job)
        except RequestError as error:
            if error.param == "prompt":  # what the door calls it
                error.param, error.message = param, f"{param}: {error.message}"
            raise

    async def _run(self, job: Job) -> Pooled:
        streams = await self._generator.open(job)
        usage = Usage(prompt_tokens=0)
        outputs: dict[int, RequestOutput] = {}
        try:
            async for index, output in streams.outputs():
                assert index not in outputs, "a vector, or one token, is one delta"
                if output.outputs[0].finish_reason is FinishReason.ABORT:
                    raise AbortedError("the request was ended by the server's operator")
                outputs[index] = output
                usage.add(index, output)
                usage.prompt_tokens += len(output.prompt_token_ids)  # after truncation
        except Exception:
            streams.close(FinishReason.ERROR)
            raise
        finally:
            streams.close()
        return Pooled(job, [outputs[index] for index in range(len(job.prompts))], usage.as_dict())


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _document_text(document: str | dict[str, Any], place: str) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str) or (isinstance(document, dict) and len(document) != 1):
        raise InvalidParameterError(place, 'must be a text, or an object with nothing but a "text"', document)
    return text


def _floats(vector: npt.NDArray[np.float32]) -> list[float]:
    return vector.tolist()


def _base64(vector: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")


def _cosine(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> float:
    """In [-1, 1]; 0 where one of the two is zero."""
    lengths = math.sqrt(left @ left) * math.sqrt(right @ right)
    return min(max(float(left @ right) / lengths, -1.0), 1.0) if lengths > 0 else 0.0


def _label_scores(logprobs: Sequence[float], *, apply_softmax: bool) -> list[float]:
    """Probabilities of the labels among all tokens, or among each other."""
    if not apply_softmax:
        return [math.exp(logprob) for logprob in logprobs]
    largest = max(logprobs)
    weights = [math.exp(logprob - largest) for logprob in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


# ---- routes ---------------------------------------------------------------------------------------------------------


def add_embedding_routes(app: FastAPI, generator: Generator, max_body_bytes: int) -> None:
    from kitfox.server.app import CLIENT_CLOSED_REQUEST, json_response, until_disconnect

    service = PoolingService(generator)

    async def respond(request: Request, work: Awaitable[dict[str, Any]], ignored: list[str]) -> Response:
        body = await until_disconnect(request.receive, work)
        if body is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return json_response(with_ignored(body, ignored))

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), EmbeddingRequest)
        return await respond(request, service.embed(fields, request.scope["client_request_id"]), ignored)

    @app.post("/score")
    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        body = await read_json_object(request, max_body_bytes)
        client_id = request.scope["client_request_id"]
        if "items" in body or "label_token_ids" in body:
            of_labels, ignored = convert_body(body, LabelScoreRequest)
            return await respond(request, service.score_labels(of_labels, client_id), ignored)
        for name, usual in OTHER_NAMES.items():
            if name in body:
                if usual in body:
                    raise InvalidParameterError(usual, f"must not be given with {name}, which is the same", body[usual])
                body[usual] = body.pop(name)
        of_texts, ignored = convert_body(body, ScoreRequest)
        return await respond(request, service.score(of_texts, client_id), ignored)

    @app.post("/rerank")
    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    async def rerank(request: Request) -> Response:
        fields, ignored = convert_body(await read_json_object(request, max_body_bytes), RerankRequest)
        return await respond(request, service.rerank(fields, request.scope["client_request_id"]), ignored)
