"""Embeddings, scores and rankings: their numbers against the fake's vectors, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import math
from typing import Any

import httpx
import numpy as np
import pytest

from kitfox.server.app import make_app
from tests.server.fake_llm import MAX_MODEL_LEN, MODEL, FakeAsyncLLM, fake_vector
from tests.server.http_client import send

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["A quick brown fox", "lazy dogs", "A quick brown cat"]


def post(path: str, llm: FakeAsyncLLM | None = None, **body: Any) -> dict[str, Any]:
    response = send(llm or FakeAsyncLLM(), "POST", path, body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(path: str, llm: FakeAsyncLLM | None = None, **body: Any) -> tuple[int, str | None, str]:
    response = send(llm or FakeAsyncLLM(), "POST", path, body)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


def mean_of(text: str) -> np.ndarray:
    return fake_vector(list(text.encode()), "mean")


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def cosine(left: str, right: str) -> float:
    return float(unit(mean_of(left)) @ unit(mean_of(right)))


# ---- embeddings -----------------------------------------------------------------------------------------------------


def test_an_embedding() -> None:
    llm = FakeAsyncLLM()
    llm.num_cached_tokens = 3
    body = post(EMBEDDINGS, llm, input=TEXTS[0], model=MODEL, user="me")
    assert body["id"].startswith("embd-")
    assert (body["object"], body["model"]) == ("list", MODEL)
    entry = body["data"][0]
    assert (entry["object"], entry["index"], len(body["data"])) == ("embedding", 0, 1)
    np.testing.assert_allclose(entry["embedding"], unit(mean_of(TEXTS[0])), rtol=1e-6)
    num_tokens = len(TEXTS[0])
    counts = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    assert body["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 3}}
    assert "ignored_parameters" not in body
    assert llm.in_flight == set()


@pytest.mark.parametrize("given", [TEXTS, [list(text.encode()) for text in TEXTS]], ids=["texts", "token ids"])
def test_several_inputs_come_back_in_order(given: list[Any]) -> None:
    data = post(EMBEDDINGS, input=given)["data"]
    assert [entry["index"] for entry in data] == [0, 1, 2]
    for entry, text in zip(data, TEXTS, strict=True):
        np.testing.assert_allclose(entry["embedding"], unit(mean_of(text)), rtol=1e-6)


def test_base64_is_the_same_numbers_as_little_endian_float32() -> None:
    encoded = post(EMBEDDINGS, input=TEXTS, encoding_format="base64")["data"]
    plain = post(EMBEDDINGS, input=TEXTS)["data"]
    for one, other in zip(encoded, plain, strict=True):
        assert np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() == other["embedding"]


def test_dimensions_are_a_prefix_of_length_one() -> None:
    shortened = post(EMBEDDINGS, input=TEXTS[0], dimensions=3)["data"][0]["embedding"]
    np.testing.assert_allclose(shortened, unit(mean_of(TEXTS[0])[:3]), rtol=1e-6)
    raw = post(EMBEDDINGS, input=TEXTS[0], dimensions=3, normalize=False)["data"][0]["embedding"]
    assert raw == mean_of(TEXTS[0])[:3].tolist()


def test_pooling_is_the_requests_or_the_servers() -> None:
    last = unit(fake_vector(list(TEXTS[0].encode()), "last"))
    asked = post(EMBEDDINGS, input=TEXTS[0], pooling="last")["data"][0]["embedding"]
    np.testing.assert_allclose(asked, last, rtol=1e-6)
    llm = FakeAsyncLLM()
    llm.config = llm.config.replace(model={"pooling": "last"})
    assert post(EMBEDDINGS, llm, input=TEXTS[0])["data"][0]["embedding"] == asked
    mean = post(EMBEDDINGS, llm, input=TEXTS[0], pooling="mean")["data"][0]["embedding"]
    np.testing.assert_allclose(mean, unit(mean_of(TEXTS[0])), rtol=1e-6)


def test_truncation_counts_what_is_left() -> None:
    body = post(EMBEDDINGS, input=TEXTS[0], truncate_prompt_tokens=5, normalize=False)
    assert body["data"][0]["embedding"] == mean_of(TEXTS[0][-5:]).tolist()
    assert body["usage"]["prompt_tokens"] == 5
    body = post(EMBEDDINGS, input="x" * (MAX_MODEL_LEN + 9), truncate_prompt_tokens=-1)
    assert body["usage"]["prompt_tokens"] == MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "non-empty"),
        ({"input": ""}, "input", "at least one token"),
        ({"input": ["a", [1]]}, "input", "mix"),
        ({"input": [1, 300]}, "input", "259"),
        ({"input": "x" * (MAX_MODEL_LEN + 1)}, "input", str(MAX_MODEL_LEN)),
        ({"input": ["x"] * 2049}, "input", "2048"),
        ({"input": "x", "dimensions": 0}, "dimensions", "[1, 8]"),
        ({"input": "x", "dimensions": 9}, "dimensions", "[1, 8]"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "x", "pooling": "cls"}, "pooling", "cls"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "positive"),
        ({"input": "x", "priority": 2**40}, "priority", "32 bits"),
    ],
    ids=str,
)
def test_what_cannot_be_embedded_is_named(fields: dict[str, Any], param: str, part: str) -> None:
    llm = FakeAsyncLLM()
    status, named, message = refusal(EMBEDDINGS, llm, **fields)
    assert (status, named) == (400, param)
    assert part in message
    assert llm.in_flight == set()


def test_another_model_is_a_404_and_unknown_members_are_listed() -> None:
    assert refusal(EMBEDDINGS, input="x", model="other")[:2] == (404, "model")
    assert post(EMBEDDINGS, input="x", task="query")["ignored_parameters"] == ["task"]


def test_an_engine_that_fails_is_a_503() -> None:
    llm = FakeAsyncLLM()
    llm.fail_after = 0
    assert refusal(EMBEDDINGS, llm, input=TEXTS)[0] == 503


def test_leaving_aborts() -> None:
    async def leave() -> FakeAsyncLLM:
        llm = FakeAsyncLLM()
        llm.hold = asyncio.Event()
        transport = httpx.ASGITransport(app=make_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asking = asyncio.create_task(client.post(EMBEDDINGS, json={"input": TEXTS}))
            while len(llm.in_flight) < len(TEXTS):
                await asyncio.sleep(0.001)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        return llm

    assert len(asyncio.run(leave()).aborted) == len(TEXTS)


# ---- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        (TEXTS[0], TEXTS[1], [(0, 1)]),
        (TEXTS[0], TEXTS, [(0, 0), (0, 1), (0, 2)]),
        (TEXTS, TEXTS[2], [(0, 2), (1, 2), (2, 2)]),
        (TEXTS, TEXTS[::-1], [(0, 2), (1, 1), (2, 0)]),
    ],
    ids=["one-one", "one-many", "many-one", "many-many"],
)
def test_scores_are_cosines(path: str, first: Any, second: Any, pairs: list[tuple[int, int]]) -> None:
    body = post(path, text_1=first, text_2=second)
    assert body["object"] == "list"
    assert [(entry["index"], entry["object"]) for entry in body["data"]] == [(i, "score") for i in range(len(pairs))]
    expected = [cosine(TEXTS[left], TEXTS[right]) for left, right in pairs]
    np.testing.assert_allclose([entry["score"] for entry in body["data"]], expected, rtol=1e-6)


@pytest.mark.parametrize("names", [("queries", "documents"), ("data_1", "data_2")])
def test_the_sides_of_a_pair_have_other_names(names: tuple[str, str]) -> None:
    scores = post("/score", **dict(zip(names, (TEXTS[0], TEXTS), strict=True)))["data"]
    assert scores == post("/score", text_1=TEXTS[0], text_2=TEXTS)["data"]
    assert refusal("/score", text_2="b", text_1="a", **{names[0]: "c"})[:2] == (400, "text_1")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text_1": "a"}, "text_2"),
        ({"text_1": [], "text_2": "a"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ({"text_1": ["a"] * 1024, "text_2": ["a"] * 1025}, "text_2"),
        ({"text_1": "a", "text_2": ["a", ""]}, "text_1"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal("/score", **fields)[:2] == (400, param)


def test_label_scores() -> None:
    llm = FakeAsyncLLM()
    labels = [7, 3]
    body = post("/v1/score", llm, query="Is it? ", items=["yes", "no"], label_token_ids=labels)
    assert (body["object"], body["model"]) == ("scoring", MODEL)
    row = [math.exp(-10.0 - label) for label in labels]
    np.testing.assert_allclose(body["scores"], [row, row])
    assert [bytes(prompt) for _, prompt, _ in llm.seen] == [b"Is it? yes", b"Is it? no"]
    assert body["usage"]["prompt_tokens"] == len(b"Is it? yesIs it? no")
    softmax = post("/v1/score", query="q", items="a", label_token_ids=labels, apply_softmax=True)["scores"][0]
    np.testing.assert_allclose(softmax, np.exp([-17.0, -13.0]) / np.exp([-17.0, -13.0]).sum())


def test_label_scores_of_token_ids_with_the_item_first() -> None:
    llm = FakeAsyncLLM()
    post("/v1/score", llm, query=[1, 2], items=[[3], [4, 5]], label_token_ids=[0], item_first=True)
    assert [prompt for _, prompt, _ in llm.seen] == [[3, 1, 2], [4, 5, 1, 2]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": ["a"], "label_token_ids": []}, "label_token_ids"),
        ({"items": ["a"], "label_token_ids": [260]}, "label_token_ids"),
        ({"items": [], "label_token_ids": [1]}, "items"),
        ({"items": [[1]], "label_token_ids": [1]}, "items"),
        ({"items": ["a"]}, "label_token_ids"),
    ],
    ids=str,
)
def test_labels_that_cannot_be_scored_are_named(fields: dict[str, Any], param: str) -> None:
    assert refusal("/v1/score", query="q", **fields)[:2] == (400, param)


# ---- rankings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_by_falling_score(path: str) -> None:
    query = "A quick brown fix"
    body = post(path, query=query, documents=[TEXTS[1], {"text": TEXTS[0]}, TEXTS[2]])
    assert body["id"].startswith("rerank-")
    expected = sorted(range(3), key=lambda index: -cosine(query, [TEXTS[1], TEXTS[0], TEXTS[2]][index]))
    assert [result["index"] for result in body["results"]] == expected
    best = body["results"][0]
    assert best["document"] == {"text": TEXTS[0]}
    assert best["relevance_score"] == pytest.approx(cosine(query, TEXTS[0]), rel=1e-6)
    assert body["usage"]["prompt_tokens"] == len(query) + sum(map(len, TEXTS))


def test_top_n_and_no_documents() -> None:
    results = post("/rerank", query="fox", documents=TEXTS, top_n=2, return_documents=False)["results"]
    assert [set(result) for result in results] == [{"index", "relevance_score"}] * 2
    assert len(post("/rerank", query="fox", documents=TEXTS, top_n=0)["results"]) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": ["a"] * 2048}, "documents"),
        ({"documents": ["a", {"text": 5}]}, "documents[1]"),
        ({"documents": [{"text": "a", "image": "b"}]}, "documents[0]"),
        ({"documents": ["a"], "top_n": -1}, "top_n"),
        ({"documents": "a"}, "documents"),
    ],
    ids=str,
)
def test_what_cannot_be_ranked_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal("/rerank", query="q", **fields)[:2] == (400, param)
