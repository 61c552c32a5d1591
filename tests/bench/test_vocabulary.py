"""Words of one token each are found whatever the tokenizer does, and whatever a server tells of it."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from kitfox.bench.vocabulary import MIN_WORDS, Encoder, file_encoder, find_vocabulary, server_encoder
from kitfox.errors import ConfigError
from kitfox.tokenizer import load_tokenizer
from kitfox.weights.hub import list_models, resolve_model

BOS = 1


def toy_encode(text: str) -> list[int]:
    """A token a word; but words in "y" have a token more. One token comes before all."""
    ids = [BOS]
    for word in re.findall(r" ?[^ ]+", text):
        known = word.removesuffix("y")
        ids.append(10 + int.from_bytes(known.encode()[:6], "big") * 31 + len(known))
        ids += [2] * (word != known)
    return ids


def toy_count(text: str) -> int:
    return len(toy_encode(text))


@pytest.mark.parametrize("encode", [toy_encode, toy_count])
def test_finds_exactly_the_single_words(encode: Callable[[str], Any]) -> None:
    vocabulary = find_vocabulary(Encoder(encode, "toy"))
    assert len(vocabulary.words) > 500
    assert not any(word.endswith("y") for word in vocabulary.words)
    assert "the" in vocabulary.words
    assert vocabulary.overhead == 1
    assert vocabulary.source == f"{len(vocabulary.words)} words of one token each, by toy"
    rng = random.Random(0)
    for length in (1, 2, 100, 3000):
        indices = vocabulary.sample(rng, length)
        text = vocabulary.text(indices)
        assert toy_count(text) == length + 1
        assert vocabulary.count_text(text) == length
        if encode is toy_encode:
            assert vocabulary.token_ids(indices) == tuple(toy_encode(text)[1:])
            assert vocabulary.encode_text(text) == tuple(toy_encode(text))
        else:
            assert vocabulary.token_ids(indices) is None
            assert vocabulary.encode_text(text) is None


def test_a_perfect_tokenizer_is_asked_a_few_times_only() -> None:
    texts = []

    def count(text: str) -> int:
        texts.append(text)
        return len(text.split())

    vocabulary = find_vocabulary(Encoder(count, "counter"))
    assert len(vocabulary.words) >= 1500
    assert len(texts) < 30
    assert max(len(text.split()) for text in texts) <= 256  # a server that only counts need not have a long context


def test_a_bad_tokenizer_is_not_asked_for_ever() -> None:
    calls = 0

    def count(text: str) -> int:
        nonlocal calls
        calls += 1
        return sum(1 + (len(word) % 2) for word in text.split())

    vocabulary = find_vocabulary(Encoder(count, "counter"))
    assert len(vocabulary.words) >= MIN_WORDS
    assert all(len(word) % 2 == 0 for word in vocabulary.words)
    assert calls < 850


def test_words_that_merge_with_their_neighbours_are_dropped() -> None:
    # "of" and any word after it are one token, as in tokenizers that merge across spaces.
    def count(text: str) -> int:
        words = text.split()
        return len(words) - sum(word == "of" for word in words[:-1])

    vocabulary = find_vocabulary(Encoder(count, "merger"))
    assert "of" not in vocabulary.words
    assert len(vocabulary.words) > 1000


def test_words_unknown_to_the_tokenizer_are_dropped() -> None:
    def encode(text: str) -> list[int]:
        return [0 if len(word) > 4 else int.from_bytes(word.encode(), "big") for word in text.split()]

    vocabulary = find_vocabulary(Encoder(encode, "small"))
    assert max(len(word) for word in vocabulary.words) == 4
    assert vocabulary.ids is not None
    assert 0 not in vocabulary.ids


def test_a_tokenizer_of_characters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 100 words .* Found: 0 among 1536, by characters, \d+ texts tried"):
        find_vocabulary(Encoder(lambda text: len(text), "characters"))


def test_shipped_words_are_plain_and_different() -> None:
    words = find_vocabulary(Encoder(lambda text: len(text.split()), "words")).words
    assert len(words) == len(set(words)) == 1536
    assert all(re.fullmatch("[a-z]{2,12}", word) for word in words)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_tokenizer_file_or_its_directory(tmp_path: Path) -> None:
    vocab = {"▁one": 0, "▁two": 1, "▁three": 2, "?": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        encoder = file_encoder(path)
        assert encoder.encode(" two one nine") == [1, 0, 3]
        assert encoder.count(" two one nine") == 3
    with pytest.raises(ConfigError, match="must be a tokenizer"):
        file_encoder(tmp_path / "nothing")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        file_encoder(tmp_path)


@pytest.mark.model
@pytest.mark.parametrize(("model", "overhead"), [("smollm2-135m", 0), ("gemma-3-270m", 1)])
def test_real_tokenizers_know_nearly_all_words(model: str, overhead: int) -> None:
    if model != "smollm2-135m" and not any(known.name == model and known.is_cached for known in list_models()):
        pytest.skip(f"{model} is not in the cache: kitfox pull {model}")
    tokenizer = load_tokenizer(resolve_model(model).path)
    vocabulary = find_vocabulary(Encoder(tokenizer.encode, model))
    assert len(vocabulary.words) > 1400
    assert vocabulary.overhead == overhead
    indices = vocabulary.sample(random.Random(1), 5000)
    assert tuple(tokenizer.encode(vocabulary.text(indices))[overhead:]) == vocabulary.token_ids(indices)


# ---- servers --------------------------------------------------------------------------------------------------------

Answer = tuple[int, Any]


@contextmanager
def server(respond: Callable[[str, dict[str, Any]], Answer]) -> Iterator[tuple[str, list[Any]]]:
    """Answers POSTs by path and body; gives its address and the authorisations it saw."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(self.headers["Authorization"])
            status, answer = respond(self.path, body)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}", seen
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def vllm(path: str, body: dict[str, Any]) -> Answer:
    assert (path, body["model"]) == ("/tokenize", "m")
    tokens = toy_encode(body["prompt"])
    return 200, {"count": len(tokens), "tokens": tokens if body["add_special_tokens"] else tokens[1:]}


def sglang(path: str, body: dict[str, Any]) -> Answer:
    if path != "/tokenize" or body.keys() != {"prompt"}:
        return 400, {"error": "extra fields"}
    return 200, {"tokens": toy_encode(body["prompt"])}


def llama_cpp(path: str, body: dict[str, Any]) -> Answer:
    assert path == "/tokenize"
    tokens = toy_encode(body["content"])[0 if body.get("add_special") else 1 :] if "content" in body else []
    return 200, {"tokens": tokens}


def counter(path: str, body: dict[str, Any]) -> Answer:
    if path != "/v1/completions":
        return 404, {"detail": "Not Found"}
    assert (body["model"], body["max_tokens"]) == ("m", 1)
    return 200, {"choices": [{"text": " x"}], "usage": {"prompt_tokens": toy_count(body["prompt"])}}


@pytest.mark.parametrize(
    ("respond", "source", "has_ids"),
    [
        (vllm, "/tokenize in vLLM's form", True),
        (sglang, "/tokenize in SGLang's form", True),
        (llama_cpp, "/tokenize in llama.cpp's form", True),
        (counter, "usage.prompt_tokens of completions of one token", False),
    ],
)
@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_each_server_is_asked_in_its_own_form(
    respond: Callable[[str, dict[str, Any]], Answer], source: str, has_ids: bool, suffix: str
) -> None:
    with server(respond) as (url, authorisations):
        encoder = server_encoder(url + suffix, "m", api_key="secret")
        assert encoder.source == source
        assert encoder.count(" one day") == 4
        assert encoder.encode(" one day") == (toy_encode(" one day") if has_ids else 4)
        assert set(authorisations) == {"Bearer secret"}


def test_a_vocabulary_over_http() -> None:
    with server(vllm) as (url, authorisations):
        vocabulary = find_vocabulary(server_encoder(url, "m"))
        assert set(authorisations) == {None}
    assert vocabulary == find_vocabulary(Encoder(toy_encode, "toy"))


@pytest.mark.parametrize("answer", [(500, "broken"), (200, "<html>"), (200, [1]), (200, {"usage": None})])
def test_a_server_that_cannot_tell_is_refused_with_what_was_tried(answer: Answer) -> None:
    with (
        server(lambda path, body: answer) as (url, _),
        pytest.raises(ConfigError, match=r"vLLM's form: .*SGLang's form: .*llama.cpp's form: .*/v1/completions: "),
    ):
        server_encoder(url, "m")


def test_a_server_that_is_not_there() -> None:
    with server(vllm) as (url, _):
        pass
    with pytest.raises(ConfigError, match="refused"):
        server_encoder(url, "m")


def test_a_server_that_stops_answering() -> None:
    answers = iter([(200, {"tokens": [1, 2, 3]}), (413, "too large")])
    with server(lambda path, body: next(answers)) as (url, _):
        encoder = server_encoder(url, "m")
        with pytest.raises(ConfigError, match="failed on a text of 9 characters: HTTP 413 too large"):
            encoder.encode(" and more")
