"""Text to token ids and back, and chat templates. No torch.

A tokenizer comes from `tokenizer.json` or is built from GGUF metadata. Decoding is done here on bytes, not by the
`tokenizers` library: a token's bytes are looked up once, so that streaming costs the same for each token and the
streamed pieces joined are exactly the decoded whole.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from kitfox.errors import KitfoxError, ModelNotFoundError, RequestError, UnsupportedModelError
from kitfox.gguf_metadata import CONTROL_TOKEN, GgufMetadata

Render = Callable[[str, dict[str, Any]], str]  # a template's jinja2 text and its variables to the text it makes

_METASPACE = "\u2581"
_UNKNOWN_TOKEN, _USER_DEFINED_TOKEN = 2, 4
_PRIVATE_USE = range(0xE000, 0xF900)
_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Regexes by which each family cuts text before merging, as in the families' published tokenizer.json.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Templates that walk through a message's parts; those that know text as well ask whether it is a string.
_TEXTS = re.compile(r"\bis\s+(not\s+)?string\b")
_PARTS = re.compile(r"""\bfor\s+\w+\s+in\s+\w+(\[['"]content['"]\]|\.content\b)""")
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_BYTE_LEVEL_PRE = {
    "smollm": "smollm",
    "gpt-2": "gpt2",
    "gpt2": "gpt2",
    "default": "gpt2",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}


def load_tokenizer(path: Path, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer in a directory or inside a `.gguf` file.

    Args:
        chat_template: jinja2 text, or a path to it, that replaces the model's own.

    Raises:
        ModelNotFoundError: there is no tokenizer there.
        UnsupportedModelError: its kind is not one kitfox can build or decode.
    """
    template = None if chat_template is None else _template_text(chat_template)
    if path.is_file():
        return _from_gguf(GgufMetadata(path), template)
    return _from_directory(path, template)


class Tokenizer:
    """One model's vocabulary, special tokens and chat template. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        eos_token_ids: Iterable[int] = (),
        named_tokens: Mapping[str, str] | None = None,
    ):
        """`named_tokens` maps roles ("bos_token", ...) to texts, as chat templates ask for them."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._lock = threading.Lock()  # encode_special_tokens is a switch on the shared backend
        self._named_tokens = dict(named_tokens or {})
        added = backend.get_added_tokens_decoder()
        self._added_texts = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special_id_of = {self._added_texts[token_id]: token_id for token_id in sorted(self.special_ids)}
        self._specials_by_start: dict[str, list[str]] = {}
        for text in self._special_id_of:
            self._specials_by_start.setdefault(text[:2], []).append(text)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        bos = self._named_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else backend.token_to_id(bos)
        self.eos_token_ids = tuple(eos_token_ids)
        self._byte_level, self._strips_leading_space = _decoding(backend)
        self._bytes: dict[int, bytes] = {}
        self._chat_template = chat_template
        self._compiled: dict[str, Any] = {}

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def info(self) -> dict[str, Any]:
        """Size, special tokens by their role and chat template, for clients that make prompts themselves."""
        return {
            "vocab_size": self.vocab_size,
            **self._named_tokens,
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": list(self.eos_token_ids),
            "special_tokens": self._special_id_of,
            "chat_template": self._chat_template,
        }

    @property
    def chat_template(self) -> str | None:
        """The jinja2 source."""
        return self._chat_template

    @property
    def json(self) -> str:
        """The tokenizer as the `tokenizers` library writes it."""
        return self._backend.to_str()

    def special_token_id(self, text: str) -> int | None:
        """Id of the special token with this text."""
        return self._special_id_of.get(text)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: add what the model wants around every prompt (usually BOS or nothing).
            parse_special: whether "<|im_end|>" in the text becomes that token or stays text.

        Raises:
            RequestError: the text holds lone surrogates, which are no Unicode text.
        """
        _require_unicode(text)
        with self._lock:
            self._backend.encode_special_tokens = not parse_special
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary have no text."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(b"" if token_id in hidden else self.token_bytes(token_id) for token_id in ids)
        if self._strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; empty for an id outside the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._find_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, U+FFFD where it is a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: OpenAI's form; content that is a list of text parts is joined by newlines. Parts of type "image"
                are for templates that print something in their places.
            continue_final_message: end inside the last message, so that the model continues it; then no generation
                prompt is added.
            template: replaces the model's own for this call.
            kwargs: further variables of the template, such as `tools`.

        Raises:
            RequestError: there is no template, it refuses the messages, or content is not text.
        """
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return self._render(_join_texts(messages), template, kwargs, None, **options)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        render: Render | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of `apply_chat_template`, where only the template's own special tokens become their ids.

        The text of a special token inside a message (or a tool's description) stays text: nobody can end a turn by
        writing "<|im_end|>".

        Args:
            render: renders the template in place of this process.
        """
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        messages = _join_texts(messages)
        texts = "\0".join(_strings([messages, kwargs]))
        written = self._specials_in(texts)
        if not written:
            text = self._render(messages, template, kwargs, render, **options)
            return self.encode(text, add_special_tokens=False)
        mark = _unused_character(texts + (template or self._chat_template or ""))
        starts = re.compile("(?=" + _any_of(written) + ")(.)", re.DOTALL)
        text = self._render(_mark(messages, starts, mark), template, _mark(kwargs, starts, mark), render, **options)
        return self._encode_marked(text, mark)

    def _specials_in(self, text: str) -> list[str]:
        """The special tokens whose text occurs; two characters decide for most of the thousands a model may have."""
        groups = (texts for start, texts in self._specials_by_start.items() if start in text)
        return [special for texts in groups for special in texts if special in text]

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """Ids of a text whose unmarked special tokens are real, and whose marked ones are text once unmarked."""
        ids: list[int] = []
        start = 0
        real = self._specials_in(text)
        for match in re.finditer(_any_of(real), text) if real else ():
            ids += self._encode_plain(text[start : match.start()].replace(mark, ""))
            ids.append(self._special_id_of[match[0]])
            start = match.end()
        return ids + self._encode_plain(text[start:].replace(mark, ""))

    def _encode_plain(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False, parse_special=False) if text else []

    def _render(
        self,
        messages: list[dict[str, Any]],
        template: str | None,
        variables: Mapping[str, Any],
        render: Render | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        source = template if template is not None else self._chat_template
        if source is None:
            raise RequestError("this model has no chat template; pass one, or use completions", param="messages")
        end = ""
        if continue_final_message:
            add_generation_prompt = False
            messages, end = _with_end_mark(messages)
        values = {**self._named_tokens, **variables, "add_generation_prompt": add_generation_prompt}
        values["messages"] = _as_parts(messages) if _PARTS.search(source) and not _TEXTS.search(source) else messages
        try:
            text = self._compile(source).render(**values) if render is None else render(source, values)
        except KitfoxError:
            raise
        except (Exception, RecursionError) as error:  # a template may raise anything; its text is the caller's answer
            raise RequestError(f"chat template: {error}", param="messages") from None
        if not end:
            return text
        if end not in text:
            message = "continue_final_message needs a template that prints the last message"
            raise RequestError(message, param="continue_final_message")
        return text[: text.rindex(end)]

    def _compile(self, source: str) -> Any:
        compiled = self._compiled.get(source)
        if compiled is None:
            compiled = template_environment().from_string(source)
            if source == self._chat_template:  # others come from requests and must not pile up
                self._compiled[source] = compiled
        return compiled

    def _find_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < 2**32:
            return b""
        text = self._added_texts.get(token_id)
        is_added = text is not None
        if text is None:
            text = self._backend.id_to_token(token_id)
        if text is None:
            return b""
        if self._byte_level:
            if all(character in _BYTE_OF for character in text):
                return bytes(_BYTE_OF[character] for character in text)
            return text.encode()
        if not is_added and (match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)):
            return bytes([int(match[1], 16)])
        return text.replace(_METASPACE, " ").encode()


class IncrementalDetokenizer:
    """Turns generated tokens into text as they come: O(1) a token.

    Invariant: all that `add` returned, then `flush`, joined, is the text of the ids added. An incomplete character is
    held back until its last byte comes, so U+FFFD appears only when the bytes really are no UTF-8.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        skip_special_tokens: bool = True,
        kept_special_ids: Iterable[int] = (),
    ):
        """The prompt decides whether the first word's space is part of the text: it is when text comes before it.

        Args:
            kept_special_ids: special tokens that are text all the same.
        """
        self._tokenizer = tokenizer
        kept = frozenset(kept_special_ids)
        special_ids = tokenizer.special_ids - kept if kept else tokenizer.special_ids
        self._hidden = special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        follows_text = bool(prompt_token_ids) and prompt_token_ids[-1] not in tokenizer.special_ids
        self._strip_space = tokenizer._strips_leading_space and not follows_text

    def add(self, ids: list[int]) -> str:
        """Take the next ids; returns the text that became certain, often empty."""
        bytes_of, hidden = self._tokenizer.token_bytes, self._hidden
        data = b"".join([b"" if token_id in hidden else bytes_of(token_id) for token_id in ids])
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The rest, once, at the end: U+FFFD for a character that was never finished, else empty."""
        return self._decoder.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted. Source: https://github.com/openai/gpt-2, encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(shifted)}


_BYTE_OF = _byte_alphabet()


def _decoding(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether tokens are spelled in the byte alphabet, and whether decoding drops one leading space."""
    if backend.decoder is None:
        raise UnsupportedModelError("the tokenizer has no decoder")
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    unknown = set(kinds) - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if unknown or not {"Replace", "Metaspace"} & set(kinds):
        names = ", ".join(kinds)
        raise UnsupportedModelError(f"tokenizer decoder {names} is not supported. Supported: ByteLevel, Metaspace")
    strips = any(step["type"] == "Strip" and step["start"] > 0 for step in steps)
    return False, strips or any(step.get("prepend_scheme", "never") != "never" for step in steps)


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise RequestError(f"text holds a lone surrogate ({code} at character {error.start})", param="prompt") from None


def _join_texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, where content that is a list has an image among its parts."""
    joined = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and {"type": "image"} not in content:
            message = {**message, "content": "\n".join(_part_text(part) for part in content)}
        joined.append(message)
    return joined


def _as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, with content that is a text as a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RequestError(f"content parts must be of type 'text'. Given: {kind!r}", param="messages")
    return part["text"]


def _with_end_mark(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with a character no message uses at the end of the last one's content."""
    if not messages or not isinstance(messages[-1].get("content"), str):
        message = "continue_final_message needs a last message with text content"
        raise RequestError(message, param="continue_final_message")
    mark = _unused_character("".join(_strings(messages)), last=True)
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + mark}], mark


def _unused_character(text: str, *, last: bool = False) -> str:
    """A private-use character that the text does not hold, from the first or the last of them."""
    used = set(text)
    for code in reversed(_PRIVATE_USE) if last else _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise RequestError("the messages use every private-use character of Unicode", param="messages")


def _any_of(texts: list[str]) -> str:
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mark(value: Any, starts: re.Pattern[str], mark: str) -> Any:
    """The same value with `mark` after every character at which a special token's text starts."""
    if isinstance(value, str):
        return starts.sub(lambda match: match[1] + mark, value)
    if isinstance(value, list | tuple):
        return [_mark(item, starts, mark) for item in value]
    if isinstance(value, dict):
        marked = {_mark(key, starts, mark): _mark(item, starts, mark) for key, item in value.items()}
        return type(value)(marked)  # a kind of dict may print itself in its own way
    return value


def template_environment() -> Any:
    """Jinja as model templates expect it, sandboxed: no attribute access to Python's insides, no huge ranges."""
    from datetime import datetime

    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    extensions = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _template_text(chat_template: str) -> str:
    if "{" in chat_template:
        return chat_template
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise ModelNotFoundError(
            f"chat_template is neither jinja2 text nor a file: {chat_template}", param="chat_template"
        )
    return path.read_text(encoding="utf-8")


def _from_directory(path: Path, template: str | None) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelNotFoundError(f"{path} has no tokenizer.json", param="tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise UnsupportedModelError(f"{file} cannot be read: {error}") from None
    config = _read_json(path / "tokenizer_config.json")
    named = _named_tokens({**_read_json(path / "special_tokens_map.json"), **config})
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    if template is None:
        template = _stored_template(path, config)
    return Tokenizer(backend, chat_template=template, eos_token_ids=() if eos is None else (eos,), named_tokens=named)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for role in _SPECIAL_ROLES:
        value = config.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[role] = text
    return named


def _stored_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    stored = config.get("chat_template")
    if isinstance(stored, list):  # several, by name
        stored = {entry["name"]: entry["template"] for entry in stored}.get("default")
    return stored


def _from_gguf(metadata: GgufMetadata, template: str | None) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    if kind == "gpt2":
        backend = _byte_level_backend(metadata, tokens)
    elif kind == "llama":
        backend = _sentencepiece_backend(metadata, tokens)
    else:
        raise UnsupportedModelError(f"GGUF tokenizer {kind!r} is not supported. Supported: gpt2, llama")
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    _add_tokens(backend, tokens, types)
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    named = {role: tokens[token_id] for role, token_id in ids.items() if token_id is not None}
    adds_bos = kind == "llama" or _BYTE_LEVEL_PRE.get(metadata.get("tokenizer.ggml.pre")) == "llama3"
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and "bos_token" in named:
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, ids["bos_token"])]
        )
    return Tokenizer(
        backend,
        chat_template=template or metadata.get("tokenizer.chat_template"),
        eos_token_ids=metadata.eos_token_ids(),
        named_tokens=named,
    )


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    special, plain = [], []
    for text, kind in zip(tokens, types, strict=False):
        if kind in (CONTROL_TOKEN, _UNKNOWN_TOKEN):
            special.append(AddedToken(text, special=True, normalized=False))
        elif kind == _USER_DEFINED_TOKEN:
            plain.append(AddedToken(text, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _byte_level_backend(metadata: GgufMetadata, tokens: list[str]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    family = _BYTE_LEVEL_PRE.get(pre)
    if family is None:
        known = ", ".join(sorted(_BYTE_LEVEL_PRE))
        raise UnsupportedModelError(f"GGUF pre-tokenizer {pre!r} is not supported. Supported: {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {text: token_id for token_id, text in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=family == "llama3"))
    backend.pre_tokenizer = _byte_level_pre_tokenizer(family)
    backend.decoder = decoders.ByteLevel()
    if family == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _byte_level_pre_tokenizer(family: str) -> Any:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if family == "gpt2":
        return gpt2
    if family == "smollm":  # digits one by one before the regex sees them; converted files often lost this step
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT if family == "llama3" else _QWEN2_SPLIT), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece_backend(metadata: GgufMetadata, tokens: list[str]) -> tokenizers.Tokenizer:
    vocab = {text: token_id for token_id, text in enumerate(tokens)}
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id")
    merges = _merges_from_scores(vocab, metadata["tokenizer.ggml.scores"])
    unknown = None if unknown_id is None else tokens[unknown_id]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        prefix = normalizers.Prepend(_METASPACE)
        backend.normalizer = normalizers.Sequence([prefix, normalizers.Replace(" ", _METASPACE)])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", _METASPACE)
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Merge rules that do what sentencepiece does with scores: the pair whose union scores highest goes first."""
    merges: list[tuple[float, int, int, str, str]] = []
    find = vocab.get
    for text, token_id in vocab.items():
        for cut in range(1, len(text)):
            left_id = find(text[:cut])
            if left_id is not None and (right_id := find(text[cut:])) is not None:
                merges.append((-scores[token_id], left_id, right_id, text[:cut], text[cut:]))
    merges.sort()
    return [(left, right) for *_, left, right in merges]
