"""SGLang's native protocol: /generate and what its clients ask about the model."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from kitfox.errors import EngineDeadError, QueueFullError
from kitfox.server import sglang
from tests.server.fake_llm import EOS, MODEL, REPLY, FakeAsyncLLM
from tests.server.http_client import send, send_all

ENOUGH = {"max_new_tokens": 100}


def generate(llm: FakeAsyncLLM, **body: Any) -> Any:
    response = send(llm, "POST", "/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(**body: Any) -> str:
    """The name of the parameter that a request is refused for."""
    llm = FakeAsyncLLM()
    response = send(llm, "POST", "/generate", {"text": "Hi"} | body)
    assert response.status_code == 400, response.text
    assert not llm.in_flight
    return response.json()["error"]["param"]


def chunks(text: str) -> list[dict[str, Any]]:
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


# ---- whole -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_an_answer(method: str) -> None:
    llm = FakeAsyncLLM()
    llm.num_cached_tokens = 1
    body = send(llm, method, "/generate", {"text": "Hi", "rid": "abc", "sampling_params": ENOUGH}).json()
    assert body["text"] == REPLY
    assert body["output_ids"] == [*REPLY.encode(), EOS]
    meta = body["meta_info"]
    assert (meta["id"], meta["finish_reason"]) == ("abc", {"type": "stop", "matched": EOS})
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, len(REPLY.encode()) + 1, 1)
    assert meta["e2e_latency"] > 0
    assert (meta["weight_version"], meta["num_retractions"]) == ("default", 0)
    assert "input_token_logprobs" not in meta
    assert "index" not in body


def test_finish_reasons() -> None:
    body = generate(FakeAsyncLLM(), text="Hi", sampling_params={"max_new_tokens": 3})
    assert (body["text"], body["meta_info"]["finish_reason"]) == (REPLY[:3], {"type": "length", "length": 3})
    body = generate(FakeAsyncLLM(), text="Hi", sampling_params={"stop": "brown"})
    assert (body["text"], body["meta_info"]["finish_reason"]) == ("The quick ", {"type": "stop", "matched": "brown"})
    body = generate(FakeAsyncLLM(), text="Hi", sampling_params={"max_new_tokens": 0})
    assert (body["text"], body["output_ids"], body["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_a_list_is_answered_with_a_list() -> None:
    bodies = generate(FakeAsyncLLM(), text=["Hi", "Ho", "He"], rid="batch", sampling_params=ENOUGH)
    assert [body["text"] for body in bodies] == [REPLY] * 3
    assert [body["meta_info"]["id"] for body in bodies] == ["batch_0", "batch_1", "batch_2"]
    assert isinstance(generate(FakeAsyncLLM(), text=["Hi"]), list)
    assert isinstance(generate(FakeAsyncLLM(), input_ids=[[72, 105]]), list)
    assert generate(FakeAsyncLLM(), input_ids=[72, 105])["meta_info"]["prompt_tokens"] == 2


def test_every_prompt_of_a_list_may_have_its_own_parameters() -> None:
    llm = FakeAsyncLLM()
    bodies = generate(
        llm,
        input_ids=[[72], [105, 106]],
        rid=["a", "b"],
        sampling_params=[{"max_new_tokens": 1, "temperature": 0.5}, {"max_new_tokens": 2, "sampling_seed": 7}],
        return_logprob=[False, True],
        cache_salt=["x", "y"],
    )
    assert [body["text"] for body in bodies] == ["T", "Th"]
    assert ["output_token_logprobs" in body["meta_info"] for body in bodies] == [False, True]
    (first, _, one), (second, _, two) = llm.seen
    assert (first, second) == ("a", "b")
    assert (one.temperature, one.seed, two.seed, two.logprobs) == (0.5, None, 7, 0)


def test_several_answers_to_one_prompt() -> None:
    bodies = generate(FakeAsyncLLM(), text="Hi", rid="r", sampling_params={"n": 2, **ENOUGH})
    assert [body["text"] for body in bodies] == [REPLY, "1" + REPLY]
    assert [body["meta_info"]["id"] for body in bodies] == ["r", "r#1"]
    bodies = generate(FakeAsyncLLM(), text=["Hi", "Ho"], sampling_params={"n": 2, "max_new_tokens": 1})
    assert [body["text"] for body in bodies] == ["T", "1", "T", "1"]


def test_parameters_reach_the_engine() -> None:
    llm = FakeAsyncLLM()
    sampling = {
        "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.3, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"65": 3},
        "stop": ["a", "b"], "stop_token_ids": [66], "stop_regex": "[0-9]{3}", "no_stop_trim": True, "ignore_eos": True,
        "skip_special_tokens": False, "spaces_between_special_tokens": True, "sampling_seed": 11, "regex": None,
        "json_schema": None, "allowed_token_ids": [1, 2], "bad_words": ["no"], "stream_interval": 2,
    }  # fmt: skip
    generate(llm, text="Hi", sampling_params=sampling)
    [(_, _, made)] = llm.seen
    assert (made.max_tokens, made.min_tokens, made.temperature, made.top_p, made.top_k) == (9, 2, 0.3, 0.9, 5)
    assert (made.min_p, made.frequency_penalty, made.presence_penalty) == (0.1, 0.5, -0.5)
    assert (made.repetition_penalty, made.logit_bias, made.stop, made.stop_token_ids) == (
        1.1,
        {65: 3},
        ("a", "b"),
        (66,),
    )
    assert (made.stop_regex, made.include_stop_str_in_output, made.ignore_eos) == (("[0-9]{3}",), True, True)
    assert (made.skip_special_tokens, made.seed, made.stream_interval) == (False, 11, 2)
    assert (made.allowed_token_ids, made.bad_words) == ((1, 2), ("no",))


def test_defaults_are_sglangs_and_the_models() -> None:
    llm = FakeAsyncLLM()
    llm.default_sampling_params = {"temperature": 0.6}
    generate(llm, text="Hi")
    generate(llm, text="Hi", sampling_params={"temperature": 0})
    assert [(made.max_tokens, made.temperature) for _, _, made in llm.seen] == [(128, 0.6), (128, 0)]


def test_salts_and_keys_separate() -> None:
    llm = FakeAsyncLLM()
    salts: list[str | None] = []
    add_request = llm.add_request

    async def spy(*args: Any, cache_salt: str | None = None, **kwargs: Any) -> Any:
        salts.append(cache_salt)
        return await add_request(*args, cache_salt=cache_salt, **kwargs)

    llm.add_request = spy  # type: ignore[method-assign]
    for fields in ({}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "a"}):
        generate(llm, text="Hi", **fields)
    assert salts[:2] == [None, "a"]
    assert len(set(salts)) == 4


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_of_prompt_and_answer() -> None:
    body = generate(
        FakeAsyncLLM(),
        text="Hey",
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[65, 66],
        return_text_in_logprobs=True,
    )
    meta = body["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, 72, "H"]
    assert meta["input_token_logprobs"][1:] == [[-0.601, 101, "e"], [-0.621, 121, "y"]]
    assert meta["output_token_logprobs"] == [[-0.584, 84, "T"], [-0.604, 104, "h"]]
    assert meta["input_top_logprobs"][:2] == [None, [[-0.5, 101, "e"], [-1.5, 102, "f"]]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 84, "T"], [-1.5, 85, "U"]]
    assert meta["input_token_ids_logprobs"][:2] == [None, [[-75.0, 65, "A"], [-76.0, 66, "B"]]]
    assert meta["output_token_ids_logprobs"] == [[[-75.0, 65, "A"], [-76.0, 66, "B"]]] * 2


@pytest.mark.parametrize(("start", "num"), [(None, 0), (-1, 0), (1, 2), (2, 1), (3, 0)])
def test_where_the_prompts_logprobs_begin(start: int | None, num: int) -> None:
    llm = FakeAsyncLLM()
    fields = {} if start is None else {"logprob_start_len": start}
    meta = generate(llm, text="Hey", return_logprob=True, sampling_params={"max_new_tokens": 1}, **fields)["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == list(b"Hey")[3 - num :]
    assert all(entry[0] is not None for entry in meta["input_token_logprobs"])
    assert [entry[2] for entry in meta["output_token_logprobs"]] == [None]
    assert (llm.seen[0][2].prompt_logprobs is None) == (num == 0)
    assert "output_top_logprobs" not in meta


def test_without_an_answer_the_prompts_logprobs_are_meant() -> None:
    bodies = generate(
        FakeAsyncLLM(), input_ids=[[72, 105], [72]], return_logprob=True, sampling_params={"max_new_tokens": 0}
    )
    assert [len(body["meta_info"]["input_token_logprobs"]) for body in bodies] == [2, 1]


def test_start_beyond_the_prompt() -> None:
    assert refused(return_logprob=True, logprob_start_len=3) == "logprob_start_len"
    assert refused(return_logprob=True, logprob_start_len=-2) == "logprob_start_len"
    assert refused(return_logprob=True, top_logprobs_num=-1) == "top_logprobs_num"
    assert refused(return_logprob=True, top_logprobs_num=10**6) == "logprobs"
    assert refused(return_logprob=True, token_ids_logprob=["a"]) == "token_ids_logprob"
    assert refused(return_logprob=True, token_ids_logprob=[9999]) == "logprob_token_ids"


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_a_chunk_is_the_whole_so_far() -> None:
    llm = FakeAsyncLLM()
    body = {"text": "Hi", "stream": True, "return_logprob": True, "sampling_params": ENOUGH, "rid": "r"}
    streamed = chunks(send(llm, "POST", "/generate", body).text)
    whole = generate(FakeAsyncLLM(), **(body | {"stream": False}))
    for earlier, later in itertools.pairwise(streamed):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
    whole["meta_info"].pop("e2e_latency")
    streamed[-1]["meta_info"].pop("e2e_latency")
    assert streamed[-1] == whole
    assert len(streamed) > 5


def test_the_answers_of_a_list_are_told_apart_by_index() -> None:
    body = {"text": ["Hi", "Ho"], "stream": True, "sampling_params": {"n": 2, **ENOUGH}}
    last = {chunk["index"]: chunk["text"] for chunk in chunks(send(FakeAsyncLLM(), "POST", "/generate", body).text)}
    assert last == {0: REPLY, 1: "1" + REPLY, 2: REPLY, 3: "1" + REPLY}


def test_a_failure_in_a_stream_is_an_event() -> None:
    llm = FakeAsyncLLM()
    llm.fail_after = 2
    *_, last = chunks(send(llm, "POST", "/generate", {"text": "Hi", "stream": True}).text)
    assert last["error"]["code"] == "engine_unavailable"
    whole = send(llm, "POST", "/generate", {"text": ["Hi", "Ho"]})
    assert whole.status_code == 503
    assert not llm.in_flight


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": None}, "text"),
        ({"input_ids": [1]}, "text"),
        ({"text": 3}, "text"),
        ({"text": []}, "text"),
        ({"text": ""}, "prompt"),
        ({"text": None, "input_ids": ["a"]}, "input_ids"),
        ({"text": None, "input_ids": [[1], 2]}, "input_ids"),
        ({"text": None, "input_ids": [9999]}, "prompt"),
        ({"sampling_params": [{}, {}]}, "sampling_params"),
        ({"sampling_params": {"top_p": 2}}, "top_p"),
        ({"sampling_params": {"max_new_tokens": "1"}}, "max_new_tokens"),
        ({"sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"sampling_params": {"json_schema": "{}", "ebnf": 'root ::= "a"'}}, "ebnf"),
        ({"sampling_params": {"structural_tag": "x"}}, "structural_tag"),
        ({"sampling_params": {"stop_regex": "("}}, "stop_regex"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n"),
        ({"rid": ""}, "rid"),
        ({"rid": "a#1"}, "rid"),
        ({"rid": "x" * 200}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"lora_path": "x"}, "lora_path"),
        ({"image_data": "x"}, "image_data"),
        ({"input_embeds": [[0.1]]}, "input_embeds"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"session_params": {"id": "x"}}, "session_params.id"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_is_refused(body: dict[str, Any], param: str) -> None:
    assert refused(**body) == param


def test_unknown_names_are_listed() -> None:
    body = generate(FakeAsyncLLM(), text="Hi", session_id="s", sampling_params={"colour": 1})
    assert body["ignored_parameters"] == ["session_id", "sampling_params.colour"]


def test_a_model_may_be_named() -> None:
    assert generate(FakeAsyncLLM(), text="Hi", model=MODEL)
    assert send(FakeAsyncLLM(), "POST", "/generate", {"text": "Hi", "model": "other"}).status_code == 404


# ---- about the model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(path: str) -> None:
    body = send(FakeAsyncLLM(), "GET", path).json()
    assert (body["model_path"], body["tokenizer_path"]) == ("/models/fox.gguf", "/models/fox.gguf")
    assert (body["served_model_name"], body["is_generation"], body["weight_version"]) == (MODEL, True, "default")


def test_tokenizer_paths() -> None:
    llm = FakeAsyncLLM()
    ids, text, info = send_all(
        llm,
        [
            ("POST", "/v1/tokenize", {"prompt": "Hi"}),
            ("POST", "/v1/detokenize", {"tokens": [72, 105]}),
            ("GET", "/tokenizer_info", None),
        ],
    )
    assert ids.json()["tokens"] == [72, 105]
    assert text.json() == {"prompt": "Hi"}
    assert info.json()["bos_token"] == "<s>"


def test_joined_forks_need_nothing() -> None:
    body = {"src_rids": ["a", "b"], "dst_rid": "c"}
    assert send(FakeAsyncLLM(), "POST", "/concate_and_append_request", body).json() == {"success": True}
    assert send(FakeAsyncLLM(), "POST", "/concate_and_append_request", {}).status_code == 400


class TestHealth:
    """/health_generate says yes only when tokens come."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sglang, "HEALTH_TIMEOUT_S", 0.3)

    def test_a_token_came(self) -> None:
        llm = FakeAsyncLLM()
        assert send(llm, "GET", "/health_generate").status_code == 200
        [(_, prompt, sampling)] = llm.seen
        assert (prompt, sampling.max_tokens) == ([0], 1)
        assert not llm.in_flight

    def test_no_token_came(self) -> None:
        llm = FakeAsyncLLM()
        add_request = llm.add_request

        async def never(*args: Any, **kwargs: Any) -> Any:
            import asyncio

            stream = await add_request(*args, **kwargs)

            async def hang() -> Any:
                await asyncio.sleep(100)
                async for output in stream:
                    yield output

            return hang()

        llm.add_request = never  # type: ignore[method-assign]
        assert send(llm, "GET", "/health_generate").status_code == 503

    def test_a_full_queue_is_healthy_while_others_get_tokens(self) -> None:
        llm = FakeAsyncLLM()
        llm.refusal = QueueFullError("full")
        assert send(llm, "GET", "/health_generate").status_code == 503

        class Advancing:
            step = 0

        class Busy(FakeAsyncLLM):
            reads = 0

            @property  # type: ignore[override]
            def stats(self) -> Any:
                Busy.reads += 1
                made = Advancing()
                made.step = Busy.reads
                return made

            @stats.setter
            def stats(self, _: Any) -> None:
                pass

        busy = Busy()
        busy.refusal = QueueFullError("full")
        assert send(busy, "GET", "/health_generate").status_code == 200

    def test_paused_and_dead(self) -> None:
        llm = FakeAsyncLLM()
        llm.is_paused = True
        assert send(llm, "GET", "/health_generate").status_code == 503
        llm = FakeAsyncLLM()
        llm.refusal = EngineDeadError("gone")
        assert send(llm, "GET", "/health_generate").status_code == 503
