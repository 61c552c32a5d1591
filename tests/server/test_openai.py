"""Shapes of answers, and that a stream joined is the whole answer."""

from __future__ import annotations

from typing import Any

import pytest

from kitfox.errors import QueueFullError
from kitfox.request import RepetitionDetection
from kitfox.server.openai import join_salts
from kitfox.server.options import ServerOptions
from tests.server.fake_llm import EOS, MODEL, REPLY, FakeAsyncLLM
from tests.server.fault_table import CHAT, COMPLETIONS, stream_chunks
from tests.server.http_client import send, send_all

USER = [{"role": "user", "content": "Hi"}]


def complete(llm: FakeAsyncLLM | None = None, **fields: Any) -> dict[str, Any]:
    response = send(llm or FakeAsyncLLM(), "POST", COMPLETIONS, {"prompt": "Hi", "max_tokens": 100} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def chat(llm: FakeAsyncLLM | None = None, **fields: Any) -> dict[str, Any]:
    response = send(llm or FakeAsyncLLM(), "POST", CHAT, {"messages": USER, "max_tokens": 100} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def chunks_of(path: str, llm: FakeAsyncLLM | None = None, **fields: Any) -> list[dict[str, Any]]:
    start = {"messages": USER} if path == CHAT else {"prompt": "Hi"}
    response = send(llm or FakeAsyncLLM(), "POST", path, start | {"max_tokens": 100, "stream": True} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return stream_chunks(response.text)


def joined(chunks: list[dict[str, Any]], index: int = 0) -> tuple[str, dict[str, list[Any]], list[str]]:
    """Text, logprobs and finish reasons of one answer over a stream."""
    text, logprobs, finishes = "", {}, []
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        text += choice.get("text", "") + choice.get("delta", {}).get("content", "")
        for name, values in (choice["logprobs"] or {}).items():
            logprobs[name] = logprobs.get(name, []) + (values or [])
        finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, logprobs, finishes


def test_completion() -> None:
    llm = FakeAsyncLLM()
    llm.num_cached_tokens = 1
    body = complete(llm, model="alias")
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "alias"
    end = {"finish_reason": "stop", "stop_reason": None, "matched_stop": EOS}
    unasked = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
    assert body["choices"] == [{"index": 0, "text": REPLY, "logprobs": None} | end | unasked]
    num_tokens = len(REPLY.encode()) + 1
    counts = {"prompt_tokens": 2, "completion_tokens": num_tokens, "total_tokens": 2 + num_tokens}
    assert body["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 1}}
    rates = {"prefill_tokens_per_s": 5.0, "decode_tokens_per_s": 90.0}
    guesses = {"draft_tokens": 0, "accepted_tokens": 0, "saved_s": 0.0}
    assert body["timings"] == {"queue_s": 0.1, "prefill_s": 0.2, "decode_s": 0.3, "ttft_s": 0.3} | rates | guesses
    assert "ignored_parameters" not in body


def test_chat() -> None:
    llm = FakeAsyncLLM()
    body = chat(llm)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": REPLY, "refusal": None, "annotations": []}
    assert body["choices"][0]["message"] == message
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert bytes(llm.seen[0][1]) == b"[user]Hi\n[assistant]"
    assert llm.seen[0][2].max_tokens == 100


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 50])
@pytest.mark.parametrize(
    "fields",
    [{}, {"max_tokens": 22}, {"stop": ["fox"]}, {"stop": ["umps.", "jumps"]}, {"n": 3}, {"max_tokens": 0}, {"seed": 5}],
    ids=str,
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stream_joined_is_the_whole(path: str, fields: dict[str, Any], tokens_per_delta: int) -> None:
    llm = FakeAsyncLLM(tokens_per_delta=tokens_per_delta)
    whole = chat(llm, **fields) if path == CHAT else complete(llm, **fields)
    chunks = chunks_of(path, llm, **fields)
    assert len(whole["choices"]) == fields.get("n", 1)
    for choice in whole["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert joined(chunks, choice["index"]) == (text, {}, [choice["finish_reason"]])


def test_text_cut_inside_a_character_ends_the_same_in_both_modes() -> None:
    cut = len(REPLY[: REPLY.index("🦊")].encode()) + 2
    whole = complete(max_tokens=cut)["choices"][0]
    assert whole["text"] == "The quick brown fox \ufffd"
    assert joined(chunks_of(COMPLETIONS, max_tokens=cut))[0] == whole["text"]
    assert "\ufffd" not in joined(chunks_of(COMPLETIONS))[0]


def test_the_tokens_of_a_cut_character_are_its_text_too() -> None:
    cut = len(REPLY[: REPLY.index("🦊")].encode()) + 2
    fields = {"prompt": [72, *"é".encode()[:1]], "logprobs": 0, "echo": True, "max_tokens": cut}
    choice = complete(**fields)["choices"][0]
    text, logprobs, _ = joined(chunks_of(COMPLETIONS, **fields))
    assert text == choice["text"] == "H\ufffdThe quick brown fox \ufffd"
    assert logprobs == choice["logprobs"]
    assert "".join(logprobs["tokens"]) == text


@pytest.mark.parametrize("echo", [False, True])
def test_completion_logprobs_continue_over_chunks(echo: bool) -> None:
    fields = {"logprobs": 2, "echo": echo}
    whole = complete(**fields)["choices"][0]
    text, logprobs, _ = joined(chunks_of(COMPLETIONS, **fields))
    assert text == whole["text"] == ("Hi" if echo else "") + REPLY
    assert logprobs == whole["logprobs"]
    ended = "</s>" if echo else ""  # behind an echoed prompt, an entry for each token there was
    assert "".join(logprobs["tokens"]) == text + ended
    lengths = [len(token) for token in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]
    assert logprobs["token_logprobs"][0] == (None if echo else pytest.approx(-0.584))
    assert logprobs["top_logprobs"][-2 if echo else -1] == {".": pytest.approx(-0.546), "/": -1.5}


def test_each_chunk_s_tokens_are_its_text() -> None:
    for chunk in chunks_of(COMPLETIONS, FakeAsyncLLM(tokens_per_delta=4), logprobs=0):
        choice = chunk["choices"][0]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_echo_without_generation_gives_one_entry_a_prompt_token() -> None:
    choice = complete(prompt="Hello", echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert choice["text"] == "Hello"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == list("Hello")
    assert choice["logprobs"]["token_logprobs"][1:] == [pytest.approx(-0.5 - ord(c) / 1000) for c in "ello"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("reply", ["", "Yes"])
def test_scoring_a_prompt_finds_one_entry_behind_it(reply: str) -> None:
    """lm-eval drops the last entry, of the token that it had generated: there is one even if that ended the answer."""
    llm = FakeAsyncLLM(reply=reply)
    body = complete(llm, prompt=[72, 101, 108, 108, 111], echo=True, logprobs=1, max_tokens=1)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [*"Hello", reply[:1] or "</s>"]
    assert {len(column) for column in logprobs.values()} == {body["usage"]["total_tokens"]}


def test_echo_of_token_ids_shows_their_text() -> None:
    assert complete(prompt=[72, 105], echo=True)["choices"][0]["text"] == "Hi" + REPLY


def test_chat_logprobs() -> None:
    whole = chat(logprobs=True, top_logprobs=2)["choices"][0]
    content = whole["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == REPLY
    tops = [("T", -0.5), ("U", -1.5)]
    assert content[0] == {
        "token": "T",
        "logprob": pytest.approx(-0.584),
        "bytes": [84],
        "top_logprobs": [{"token": t, "logprob": lp, "bytes": [ord(t)]} for t, lp in tops],
    }
    assert joined(chunks_of(CHAT, logprobs=True, top_logprobs=2))[1]["content"] == content
    assert chat(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_prompt_logprobs_have_a_field_of_their_own() -> None:
    expected = [None, {"105": {"logprob": pytest.approx(-0.605), "rank": 1, "decoded_token": "i"}}]
    assert complete(prompt_logprobs=1)["choices"][0]["prompt_logprobs"] == expected
    assert chunks_of(COMPLETIONS, prompt_logprobs=1)[0]["choices"][0]["prompt_logprobs"] == expected
    assert len(chat(prompt_logprobs=0)["prompt_logprobs"]) == len("[user]Hi\n[assistant]")


def test_several_prompts_with_n() -> None:
    llm = FakeAsyncLLM()
    fields = {"prompt": ["One", "Two!"], "n": 2, "echo": True}
    body = complete(llm, **fields)
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == [f"One{REPLY}", f"One1{REPLY}", f"Two!{REPLY}", f"Two!1{REPLY}"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 7
    chunks = chunks_of(COMPLETIONS, llm, **fields)
    assert [joined(chunks, i)[0] for i in range(4)] == texts
    assert not llm.in_flight


def test_chat_stream_protocol() -> None:
    chunks = chunks_of(CHAT, n=2)
    for index in (0, 1):
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert deltas[0]["role"] == "assistant"
        assert all("role" not in delta for delta in deltas[1:])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
    assert chunks[-1]["timings"]["ttft_s"] == 0.3


def test_usage_only_in_the_last_chunk_when_asked_for() -> None:
    for path in (COMPLETIONS, CHAT):
        chunks = chunks_of(path, stream_options={"include_usage": True})
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == len(REPLY.encode()) + 1
        assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(CHAT, max_tokens=3, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("num_cached_tokens", [0, 1])
def test_usage_says_the_same_in_both_modes(path: str, num_cached_tokens: int) -> None:
    llm = FakeAsyncLLM()
    llm.num_cached_tokens = num_cached_tokens
    usage = (chat(llm) if path == CHAT else complete(llm))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == num_cached_tokens < usage["prompt_tokens"]
    assert chunks_of(path, llm, stream_options={"include_usage": True})[-1]["usage"] == usage
    for options in ({}, None, {"include_usage": False}):
        assert all("usage" not in chunk for chunk in chunks_of(path, llm, stream_options=options))


def test_logprobs_of_text_that_is_held_back() -> None:
    """A step without text, as inside a character or a stop text, has its entries all the same."""
    llm = FakeAsyncLLM(reply="🦊 and on")
    for fields in ({"max_tokens": 3}, {"stop": ["🦊 an"]}, {"stop": ["🦊 and off"]}):
        content = chat(llm, logprobs=True, top_logprobs=1, **fields)["choices"][0]["logprobs"]["content"]
        assert joined(chunks_of(CHAT, llm, logprobs=True, top_logprobs=1, **fields))[1]["content"] == content
        assert bytes(byte for entry in content for byte in entry["bytes"])[:3] == "🦊".encode()[:3]


def test_token_ids_on_request() -> None:
    choice = complete(return_token_ids=True, max_tokens=2)["choices"][0]
    assert choice["prompt_token_ids"] == [72, 105]
    assert choice["token_ids"] == [84, 104]
    body = chat(return_token_ids=True)
    assert bytes(body["prompt_token_ids"]) == b"[user]Hi\n[assistant]"
    assert body["choices"][0]["token_ids"] == [*REPLY.encode(), EOS]
    chunks = chunks_of(COMPLETIONS, return_token_ids=True, max_tokens=2)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[84], [104]]


def test_ignored_parameters_are_named() -> None:
    assert complete(user="me", frobnicate=1)["ignored_parameters"] == ["user", "frobnicate"]
    messages = [{"role": "user", "content": "Hi", "tone": "kind", "refusal": None}]
    assert chat(messages=messages)["ignored_parameters"] == ["messages[].tone"]
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}, "annotations": None}
    messages = [{"role": "user", "content": [part, part | {"tone": "kind"}]}]
    names = ["messages[].content[].cache_control", "messages[].content[].tone"]
    assert chat(messages=messages)["ignored_parameters"] == names
    assert send(FakeAsyncLLM(), "POST", "/tokenize", {"messages": messages}).json()["ignored_parameters"] == names
    for path in (COMPLETIONS, CHAT):
        options = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": None}
        chunks = chunks_of(path, stream_options=options)
        assert chunks[0]["ignored_parameters"] == ["stream_options.include_obfuscation"]
    chunks = chunks_of(CHAT, user="me")
    assert chunks[0]["ignored_parameters"] == ["user"]
    assert all("ignored_parameters" not in chunk for chunk in chunks[1:])


def test_every_sampling_parameter_arrives() -> None:
    llm = FakeAsyncLLM()
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "min_tokens": 2, "seed": 7, "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "truncate_prompt_tokens": 5, "truncation_side": "right", "stream_interval": 3,
    }  # fmt: skip
    send(llm, "POST", COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 2}, "stop_token_ids": [9], "stop": "z"} | fields)
    sampling = llm.seen[0][2]
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.logit_bias, sampling.stop_token_ids, sampling.stop) == ({5: 2.0}, (9,), ("z",))
    assert sampling.max_tokens == 16


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_lists_of_tokens_and_texts_arrive(path: str) -> None:
    llm = FakeAsyncLLM()
    lists = {"allowed_token_ids": [5, 6], "bad_words": ["x y"], "stop_regex": ["a+", "b"], "logprob_token_ids": [7]}
    sizes = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 5}
    start = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    response = send(llm, "POST", path, start | lists | {"repetition_detection": sizes, "no_stop_trim": True})
    assert response.status_code == 200, response.text
    sampling = llm.seen[0][2]
    assert {name: list(getattr(sampling, name)) for name in lists} == lists
    assert sampling.repetition_detection == RepetitionDetection(**sizes)
    assert sampling.include_stop_str_in_output
    assert sampling.logprobs == 0  # so that there is something to report the named tokens with
    send(llm, "POST", path, start | {"stop_regex": "a+", "stop": ["z"]})
    assert llm.seen[1][2].stop_regex == ("a+",)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_a_request_leaves_out_is_the_model_s_default(path: str) -> None:
    llm = FakeAsyncLLM()
    llm.default_sampling_params = {"temperature": 0.6, "top_k": 20, "max_tokens": 300, "stream_interval": 2}
    start = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    send(llm, "POST", path, start)
    send(llm, "POST", path, start | {"temperature": 1, "top_k": 0, "max_tokens": 4, "stream_interval": 1, "top_p": 0.5})
    (_, _, left_out), (_, _, given) = llm.seen
    assert (left_out.temperature, left_out.top_k, left_out.top_p, left_out.stream_interval) == (0.6, 20, 1.0, 2)
    assert left_out.max_tokens is None  # the engine caps it by the default and by what the context leaves
    assert (given.temperature, given.top_k, given.top_p, given.stream_interval) == (1.0, 0, 0.5, 1)
    assert given.max_tokens == 4
    assert send(llm, "GET", "/server_info").json()["default_sampling_params"] == llm.default_sampling_params


def test_logprobs_of_an_echoed_prompt_are_in_a_field_of_their_own_where_that_is_asked_for() -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 2}
    (choice,) = complete(**fields)["choices"]
    assert choice["prompt_logprobs"] is None
    (both,) = complete(**fields, prompt_logprobs=1)["choices"]
    assert both["logprobs"] == choice["logprobs"]
    assert len(both["prompt_logprobs"]) == 2


def test_what_ended_an_answer_is_named_as_both_engines_name_it() -> None:
    def ends(**fields: Any) -> set[tuple[Any, ...]]:
        chunk = chunks_of(CHAT, **fields)[-1]["choices"][0]
        choices = [chat(**fields)["choices"][0], complete(**fields)["choices"][0], chunk]
        return {tuple(choice[name] for name in ("finish_reason", "stop_reason", "matched_stop")) for choice in choices}

    assert ends() == {("stop", None, EOS)}
    assert ends(stop=["brown"]) == {("stop", "brown", "brown")}
    assert ends(max_tokens=3) == {("length", None, None)}


@pytest.mark.parametrize("tokens_per_delta", [1, 50])
def test_an_answer_that_no_token_ended_has_logprobs_to_its_last_one(tokens_per_delta: int) -> None:
    """As where a grammar leaves nothing that could follow."""
    llm = FakeAsyncLLM(tokens_per_delta=tokens_per_delta)
    llm.ends_by_token = False
    choice = complete(llm, logprobs=0)["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == REPLY
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", None)


def test_named_tokens_are_reported_instead_of_the_likeliest() -> None:
    fields = {"logprobs": 3, "logprob_token_ids": [65, 84], "max_tokens": 1}
    logprobs = complete(**fields)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"T": pytest.approx(-0.584), "A": -75.0}]
    assert complete(**fields | {"logprobs": None})["choices"][0]["logprobs"] == logprobs
    (entry,) = chat(**fields | {"logprobs": None})["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == ["T", "A"]
    assert entry["top_logprobs"][1]["logprob"] == -75.0
    prompt = complete(prompt_logprobs=1, logprob_token_ids=[65])["choices"][0]["prompt_logprobs"][1]
    assert prompt["65"] == {"logprob": -75.0, "rank": None, "decoded_token": "A"}


def test_tokens_can_be_shown_as_ids() -> None:
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    logprobs = complete(logprobs=2, echo=True, **fields)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:72", "token_id:105", "token_id:84", "token_id:104"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert list(logprobs["top_logprobs"][2]) == ["token_id:84", "token_id:85"]
    (entry, _) = chat(logprobs=True, top_logprobs=2, **fields)["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "token_id:84"
    assert entry["bytes"] == [84]
    assert entry["top_logprobs"][1]["token"] == "token_id:85"


@pytest.mark.parametrize(("side", "kept"), [("left", "llo"), ("right", "Hel")])
def test_a_truncated_prompt_is_the_one_that_is_shown(side: str, kept: str) -> None:
    llm = FakeAsyncLLM()
    fields = {"prompt": "Hello", "truncate_prompt_tokens": 3, "truncation_side": side, "echo": True}
    body = complete(llm, return_prompt_text=True, **fields)
    assert body["choices"][0]["text"] == kept + REPLY
    assert body["choices"][0]["prompt_text"] == kept
    assert body["usage"]["prompt_tokens"] == 3
    assert bytes(llm.seen[0][1]).decode() == kept
    assert complete(prompt="x" * 2000, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 512 - 100


def test_the_prompt_text_on_request() -> None:
    assert chat(return_prompt_text=True)["prompt_text"] == "[user]Hi\n[assistant]"
    first, *others = chunks_of(COMPLETIONS, return_prompt_text=True, prompt=[72, 105])
    assert first["choices"][0]["prompt_text"] == "Hi"
    assert not any("prompt_text" in chunk["choices"][0] for chunk in others)


def test_salts_of_two_names_are_one() -> None:
    salts = [("a", None), ("a", "b"), ("b", "a"), (None, "a"), ("a", "c"), (None, "ab")]
    joined_salts = [join_salts(salt, key) for salt, key in salts]
    assert joined_salts[0] == "a"
    assert len(set(joined_salts)) == len(salts)
    assert join_salts("a", "b") == joined_salts[1]
    assert join_salts(None, None) is None


def test_a_request_id_has_two_names() -> None:
    assert complete(rid="mine")["id"] == "cmpl-mine"
    assert complete(rid="mine", request_id="mine")["id"] == "cmpl-mine"


def test_strict_refuses_what_nobody_reads() -> None:
    options = ServerOptions(strict=True)
    part = {"type": "text", "text": "Hi", "tone": "kind"}
    for path, body, param in (
        (COMPLETIONS, {"prompt": "Hi", "user": "me", "frobnicate": 1}, "user"),
        (CHAT, {"messages": [{"role": "user", "content": [part]}]}, "messages[].content[].tone"),
        ("/tokenize", {"prompt": "Hi", "user": "me"}, "user"),
    ):
        response = send(FakeAsyncLLM(), "POST", path, body, options=options)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (param, "unknown_parameter")
        assert "frobnicate" in error["message"] or path != COMPLETIONS
        assert send(FakeAsyncLLM(), "POST", path, body).status_code == 200
    asks_for_nothing = {"prompt": "Hi", "suffix": "", "use_beam_search": False, "spaces_between_special_tokens": False}
    assert send(FakeAsyncLLM(), "POST", COMPLETIONS, asks_for_nothing, options=options).status_code == 200


def test_chat_token_limit_has_two_names() -> None:
    llm = FakeAsyncLLM()
    send_all(
        llm,
        [
            ("POST", CHAT, {"messages": USER, "max_completion_tokens": 3}),
            ("POST", CHAT, {"messages": USER}),
        ],
    )
    assert [seen[2].max_tokens for seen in llm.seen] == [3, None]
    body = {"messages": USER, "max_completion_tokens": 3, "max_tokens": 4}
    assert send(llm, "POST", CHAT, body).json()["error"]["param"] == "max_tokens"


def test_messages_reach_the_template() -> None:
    llm = FakeAsyncLLM()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "So"},
    ]
    chat(llm, messages=messages, continue_final_message=True)
    assert bytes(llm.seen[0][1]).decode() == "[system]Be brief.\n[user]a\nb\n[assistant]So"


def test_template_refusal_is_a_400() -> None:
    response = send(FakeAsyncLLM(), "POST", CHAT, {"messages": USER * 2})
    assert response.status_code == 400
    assert "alternate" in response.json()["error"]["message"]


def test_context_overflow_and_exact_fit() -> None:
    response = send(FakeAsyncLLM(), "POST", COMPLETIONS, {"prompt": "x" * 500, "max_tokens": 13})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert complete(prompt="x" * 500, max_tokens=12)["choices"][0]["finish_reason"] == "length"


def test_full_queue_is_429_with_retry_after() -> None:
    llm = FakeAsyncLLM()
    llm.refusal = QueueFullError("the queue is full", retry_after_s=3)
    for stream in (False, True):
        response = send(llm, "POST", COMPLETIONS, {"prompt": "Hi", "stream": stream})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_failure_inside_a_stream_is_one_error_event(path: str) -> None:
    llm = FakeAsyncLLM()
    llm.fail_after = 2
    chunks = chunks_of(path, llm)
    assert len(chunks) == 3
    assert chunks[-1]["error"]["type"] == "unavailable_error"
    llm.failure = ValueError("secret detail")
    chunks = chunks_of(path, llm)
    assert chunks[-1]["error"]["type"] == "internal_error"
    assert "secret" not in str(chunks)


def test_failure_of_a_whole_answer() -> None:
    llm = FakeAsyncLLM()
    llm.fail_after = 2
    assert send(llm, "POST", COMPLETIONS, {"prompt": "Hi"}).status_code == 503
    llm.failure = ValueError("secret detail")
    response = send(llm, "POST", COMPLETIONS, {"prompt": ["Hi", "Ho"]})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "internal_error"
    assert "secret" not in response.text
    assert not llm.in_flight


def test_unknown_model() -> None:
    response = send(FakeAsyncLLM(), "POST", CHAT, {"messages": USER, "model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert chat()["model"] == MODEL
