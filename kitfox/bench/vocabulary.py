"""Text whose length in tokens is known: words that are one token each for the server's own tokenizer.

A prompt is a row of such words, each after a space. So n words are n tokens, whatever their order, and a server that
takes no token ids can still be sent prompts of an exact length. Which words these are is asked of the server: by its
/tokenize if it has one, otherwise by counting: `usage.prompt_tokens` of completions of one token.
"""

from __future__ import annotations

import http.client
import importlib.resources
import json
import random
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kitfox.errors import ConfigError

MIN_WORDS = 100  # with fewer, prompts that should share nothing begin alike too often
_GROUP_WORDS = 256  # asked about at once: a server that only counts must have this much context
_MAX_CALLS = 400
_SHUFFLES, _MAX_SHUFFLES = 3, 10
_TIMEOUT_S = 120.0
_PROBE = " one two three"


@dataclass(frozen=True)
class Encoder:
    """Reads a text prompt as the server does.

    Attributes:
        encode: the prompt's token ids, those that the server adds included; or only how many they are.
        source: how it knows, for people.
        asks_server: it is of use only as long as that server runs.
    """

    encode: Callable[[str], Sequence[int] | int]
    source: str
    asks_server: bool = False

    def count(self, text: str) -> int:
        encoded = self.encode(text)
        return encoded if isinstance(encoded, int) else len(encoded)


@dataclass(frozen=True)
class Vocabulary:
    """Words that are one token each in any order.

    Attributes:
        ids: the words' token ids; None where the server only counts.
        overhead: tokens that the server puts before every text prompt, such as a beginning-of-sequence token. Prompts
            of token ids go without.
        encoder: what the words were found with.
    """

    words: tuple[str, ...]
    ids: tuple[int, ...] | None
    overhead: int
    encoder: Encoder = field(compare=False, repr=False)

    @property
    def source(self) -> str:
        """How the words were found, for people."""
        return f"{len(self.words)} words of one token each, by {self.encoder.source}"

    def sample(self, rng: random.Random, n: int) -> list[int]:
        """Indices of n words, drawn with replacement."""
        return rng.choices(range(len(self.words)), k=n)

    def text(self, indices: Iterable[int]) -> str:
        return _text(self.words[index] for index in indices)

    def token_ids(self, indices: Iterable[int]) -> tuple[int, ...] | None:
        ids = self.ids
        return None if ids is None else tuple(ids[index] for index in indices)

    def count_text(self, text: str) -> int:
        """Tokens of any text, without what the server adds."""
        return max(self.encoder.count(text) - self.overhead, 0)

    def encode_text(self, text: str) -> tuple[int, ...] | None:
        """Token ids of a text prompt as the server sees it, what it adds included; None where it only counts."""
        if self.ids is None:
            return None
        encoded = self.encoder.encode(text)
        assert not isinstance(encoded, int), "an encoder gives ids for every text or for none"
        return tuple(encoded)


def find_vocabulary(encoder: Encoder) -> Vocabulary:
    """Find out which of the shipped words are one token each.

    Raises:
        ConfigError: fewer than MIN_WORDS are, in any order.
    """
    candidates = (importlib.resources.files("kitfox.bench") / "samples" / "words.txt").read_text("utf-8").split()
    search = _Search(encoder, candidates)
    words = search.settle(search.single_in(candidates))
    ids = search.ids(words)
    if ids is not None:
        # Words that the tokenizer does not know have one id together. Other numbers: merged in this order after all.
        times = Counter(ids)
        known = [pair for pair in zip(words, ids, strict=False) if times[pair[1]] == 1 and len(ids) == len(words)]
        words, ids = [word for word, _ in known], tuple(token_id for _, token_id in known)
    if len(words) < MIN_WORDS:
        raise ConfigError(
            f"prompts of exact length need at least {MIN_WORDS} words that are one token each in any order. Found: "
            f"{len(words)} among {len(candidates)}, by {encoder.source}, {search.calls} texts tried"
        )
    return Vocabulary(tuple(words), ids, search.overhead, encoder)


class _Search:
    """Halves groups of words until they have as many tokens as words; what _MAX_CALLS do not reach is left out."""

    def __init__(self, encoder: Encoder, candidates: Sequence[str]):
        self._encoder = encoder
        self.calls = 2
        self._last_call = _MAX_CALLS
        once = _text(candidates[:8])
        self.overhead = 2 * encoder.count(once) - encoder.count(once + once)

    def single_in(self, words: Sequence[str]) -> list[str]:
        """The words that are single tokens in the order given."""
        groups = (words[start : start + _GROUP_WORDS] for start in range(0, len(words), _GROUP_WORDS))
        return [word for group in groups for word in self._single(list(group))]

    def settle(self, words: list[str]) -> list[str]:
        """Drop what is single in one order and not in another, until a few shuffles in a row lose nothing."""
        rng = random.Random("shuffles")
        self._last_call = self.calls + _MAX_CALLS
        unchanged = 0
        for _ in range(_MAX_SHUFFLES):
            kept = set(self.single_in(rng.sample(words, len(words))))
            unchanged = unchanged + 1 if len(kept) == len(words) else 0
            if unchanged == _SHUFFLES:
                return words
            words = [word for word in words if word in kept]
        return []

    def ids(self, words: Sequence[str]) -> tuple[int, ...] | None:
        encoded = self._encoder.encode(_text(words[:1]))
        if isinstance(encoded, int):
            return None
        encoded = self._encoder.encode(_text(words))
        assert not isinstance(encoded, int), "an encoder gives ids for every text or for none"
        return tuple(encoded[self.overhead :])

    def _single(self, words: list[str]) -> list[str]:
        if self.calls >= self._last_call:
            return []
        self.calls += 1
        if self._encoder.count(_text(words)) == len(words) + self.overhead:
            return words
        if len(words) == 1:
            return []
        middle = len(words) // 2
        first, second = self._single(words[:middle]), self._single(words[middle:])
        if len(first) + len(second) == len(words):  # it must be where they meet
            return first[:-1] + second[1:]
        return first + second


def _text(words: Iterable[str]) -> str:
    return "".join(f" {word}" for word in words)


# ---- where tokens come from -----------------------------------------------------------------------------------------


def file_encoder(path: Path) -> Encoder:
    """Of a `tokenizer.json`, or the directory that holds one.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"tokenizer must be a tokenizer.json or a directory that holds one. Given: {path}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"tokenizer {file} cannot be read: {error}") from error

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    return Encoder(encode, f"the tokenizer in {file}")


def server_encoder(base_url: str, model: str, *, api_key: str | None = None) -> Encoder:
    """Of a server: its POST /tokenize in the form it understands, otherwise counting with completions of one token.

    Counting leaves its texts in a server's prefix cache; they are rows of words in an order of their own.

    Raises:
        ConfigError: it answers neither, or not at all. The encoder raises it too, when the server stops answering.
    """
    root = base_url.rstrip("/").removesuffix("/v1")
    post = _Poster(api_key)
    tried = []
    for server, body_of in _TOKENIZE_FORMS.items():
        try:
            _tokens(post(f"{root}/tokenize", body_of(model, _PROBE)))
        except (_RefusedError, ValueError) as error:
            tried.append(f"/tokenize in {server}'s form: {error}")
            continue

        def encode(text: str, body_of: Callable[[str, str], dict[str, Any]] = body_of) -> list[int]:
            try:
                return _tokens(post(f"{root}/tokenize", body_of(model, text)))
            except (_RefusedError, ValueError) as error:
                raise ConfigError(f"{root}/tokenize failed on a text of {len(text)} characters: {error}") from error

        return Encoder(encode, f"/tokenize in {server}'s form", asks_server=True)

    def count(text: str) -> int:
        body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0}
        try:
            return _prompt_tokens(post(f"{root}/v1/completions", body))
        except (_RefusedError, ValueError) as error:
            raise ConfigError(
                f"{root} cannot tell how many tokens a text has. Tried: {'; '.join(tried)}; usage.prompt_tokens of "
                f"/v1/completions: {error}"
            ) from error

    count(_PROBE)
    return Encoder(count, "usage.prompt_tokens of completions of one token", asks_server=True)


# llama.cpp answers bodies without `content` with an empty list, so it is known by what it leaves out.
_TOKENIZE_FORMS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "vLLM": lambda model, text: {"model": model, "prompt": text, "add_special_tokens": True},
    "SGLang": lambda model, text: {"prompt": text},
    "llama.cpp": lambda model, text: {"content": text, "add_special": True},
}


class _RefusedError(Exception):
    """No answer, or not 200."""


class _Poster:
    """POSTs JSON; past any proxy, as the benchmark itself."""

    def __init__(self, api_key: str | None):
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __call__(self, url: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(url, json.dumps(body).encode(), self._headers)
        try:
            with self._open(request, timeout=_TIMEOUT_S) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise _RefusedError(f"HTTP {error.code} {error.read(200).decode(errors='replace')}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _RefusedError(f"{type(error).__name__}: {error}") from error


def _tokens(answer: Any) -> list[int]:
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise ValueError(f"no list of token ids in {json.dumps(answer)[:200]}")
    return tokens


def _prompt_tokens(answer: Any) -> int:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if type(count) is not int:
        raise ValueError(f"no usage.prompt_tokens in {json.dumps(answer)[:200]}")
    return count
