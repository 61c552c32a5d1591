"""Every parameter that vLLM or SGLang have is taken, refused by name or listed as ignored, never just dropped."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kitfox.server.openai import ChatRequest, CompletionRequest
from kitfox.server.sglang import GenerateRequest
from kitfox.server.validation import UNSUPPORTED_PARAMETERS
from tests.server.fake_llm import FakeAsyncLLM
from tests.server.fault_table import CHAT, COMPLETIONS
from tests.server.http_client import send

HELLO = [{"role": "user", "content": "Hi"}]
ENDPOINTS: list[tuple[str, type[msgspec.Struct], dict[str, Any]]] = [
    (CHAT, ChatRequest, {"messages": HELLO}),
    (COMPLETIONS, CompletionRequest, {"prompt": "Hi"}),
    ("/generate", GenerateRequest, {"text": "Hi"}),
]
# What asks for something, of those that no endpoint has; others are harmless, or a struct's.
WANTED: dict[str, Any] = {
    "beam_width": 2, "bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 1, "custom_logit_processor": "x",
    "custom_params": {"thinking_budget": 9}, "data_parallel_rank": 1, "disagg_prefill_dp_rank": 0,
    "documents": [{"text": "x"}], "early_stopping": True, "ec_transfer_params": {"a": 1}, "image_data": "x",
    "input_embeds": [[0.5]], "kv_transfer_params": {"a": 1}, "length_penalty": 2.0, "logits_processors": ["x"],
    "lora_path": "x", "lora_request": {"a": 1}, "mm_processor_kwargs": {"a": 1}, "modalities": ["image"],
    "multi_item_delimiter_indices": [1], "ngram_corpus_id": "x", "positional_embed_overrides": [1],
    "prompt_embeds": "x", "return_cached_tokens_details": True, "return_entropy": True,
    "return_flat_raw_top_logprobs": True, "return_hidden_states": True, "return_indexer_topk": True,
    "return_meta_info": True, "return_routed_experts": True, "return_sampling_mask": True, "routed_dp_rank": 1,
    "stream_reasoning": False, "suffix": "x", "use_beam_search": True, "video_data": "x", "vllm_xargs": {"a": 1},
    "watermark": {"a": 1}, "watermarking": True,
}  # fmt: skip
HARMLESS = (
    "background", "conversation_id", "custom_labels", "images_config", "log_metrics", "media_io_kwargs", "no_logs",
    "return_token_offsets", "routing_key", "session_id", "user",
)  # fmt: skip


@pytest.mark.parametrize(("path", "kind", "body"), ENDPOINTS)
@pytest.mark.parametrize("name", WANTED)
def test_what_cannot_be_honoured_is_refused_by_its_name(
    name: str, path: str, kind: type[msgspec.Struct], body: dict[str, Any]
) -> None:
    response = send(FakeAsyncLLM(), "POST", path, body | {name: WANTED[name]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    for harmless in UNSUPPORTED_PARAMETERS[name]:
        response = send(FakeAsyncLLM(), "POST", path, body | {name: harmless})
        assert (response.status_code, "ignored_parameters" in response.json()) == (200, False)


@pytest.mark.parametrize(("path", "kind", "body"), ENDPOINTS)
def test_what_changes_no_answer_is_listed(path: str, kind: type[msgspec.Struct], body: dict[str, Any]) -> None:
    names = [name for name in HARMLESS if name not in kind.__struct_fields__]
    response = send(FakeAsyncLLM(), "POST", path, body | dict.fromkeys(names, 1))
    assert response.json()["ignored_parameters"] == names


@pytest.mark.parametrize(("path", "kind", "body"), ENDPOINTS)
@pytest.mark.parametrize(
    ("name", "value"),
    [("input_ids", [1]), ("max_thinking_tokens", 9), ("require_reasoning", True), ("session_params", {"id": "x"}),
     ("thinking_token_budget", 9)],
)  # fmt: skip
def test_an_endpoint_refuses_what_only_another_one_has(
    name: str, value: Any, path: str, kind: type[msgspec.Struct], body: dict[str, Any]
) -> None:
    response = send(FakeAsyncLLM(), "POST", path, body | {name: value})
    assert response.status_code == 400
    if name not in kind.__struct_fields__:
        assert response.json()["error"]["param"] == name


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Hi"})])
def test_the_prompt_s_token_ids_alone(path: str, body: dict[str, Any], stream: bool) -> None:
    llm = FakeAsyncLLM()
    response = send(llm, "POST", path, body | {"return_prompt_token_ids": True, "stream": stream, "max_tokens": 2})
    [(_, prompt, _)] = llm.seen
    assert response.text.count(f'"prompt_token_ids":{prompt}'.replace(" ", "")) == 1
    assert '"token_ids":[' not in response.text


def test_a_message_that_is_a_prefix_is_gone_on_with() -> None:
    llm = FakeAsyncLLM()
    begun = {"role": "assistant", "content": "Well,", "prefix": True}
    assert send(llm, "POST", CHAT, {"messages": [*HELLO, begun]}).status_code == 200
    assert bytes(llm.seen[0][1]) == b"[user]Hi\n[assistant]Well,"
    for messages, param in (
        ([*HELLO, begun, *HELLO], "messages[1].prefix"),
        ([HELLO[0] | {"prefix": True}], "continue_final_message"),
    ):
        response = send(llm, "POST", CHAT, {"messages": messages})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
