"""Endpoints of vLLM and SGLang that kitfox does not have, and why: who calls one is told."""

from __future__ import annotations

_FIXED_WEIGHTS = "weights stay as they were loaded"
_NO_AUDIO = "models here neither hear nor speak"
_EMBEDDINGS = "use /v1/embeddings"
_NO_CLASSIFIERS = "classifiers are not served; /v1/score with label_token_ids gives probabilities of labels"
_OPENAI_CHATS = "use /v1/chat/completions"
_ONE_ENGINE = "there is one engine process, on one device"
_OWN_GUESSES = "guesses are made of prompts and answers, not of other texts"
_ONE_TIER = "the KV cache has one tier, in memory"

REASONS: dict[str, str] = {
    "/load_lora_adapter_from_tensors": "adapters are read from directories; use /load_lora_adapter",
    "/update_weights": _FIXED_WEIGHTS,
    "/init_weight_transfer_engine": _FIXED_WEIGHTS,
    "/update_weights_from_disk": _FIXED_WEIGHTS,
    "/update_weights_from_tensor": _FIXED_WEIGHTS,
    "/update_weights_from_distributed": _FIXED_WEIGHTS,
    "/update_weights_from_ipc": _FIXED_WEIGHTS,
    "/init_weights_update_group": _FIXED_WEIGHTS,
    "/destroy_weights_update_group": _FIXED_WEIGHTS,
    "/get_weights_by_name": _FIXED_WEIGHTS,
    "/v1/audio/transcriptions": _NO_AUDIO,
    "/v1/audio/translations": _NO_AUDIO,
    "/v1/realtime": _NO_AUDIO,
    "/classify": _NO_CLASSIFIERS,
    "/v1/classify": _NO_CLASSIFIERS,
    "/pooling": _EMBEDDINGS,
    "/v2/embed": _EMBEDDINGS,
    "/encode": _EMBEDDINGS,
    "/generative_scoring": "use /v1/score with label_token_ids",
    "/v1/decisions": _OPENAI_CHATS,
    "/v1/systemone": _OPENAI_CHATS,
    "/inference/v1/generate": "use /generate with input_ids and return_prompt_token_ids",
    "/v1/completions/render": "use /tokenize",
    "/v1/chat/completions/render": "use /tokenize with messages",
    "/ping": "use /health",
    "/invocations": _OPENAI_CHATS,
    "/api/chat": _OPENAI_CHATS,
    "/api/generate": "use /v1/completions",
    "/api/tags": "use /v1/models",
    "/api/show": "use /model_info",
    "/cohere/v2/chat": _OPENAI_CHATS,
    "/hicache/storage-backend": _ONE_TIER,
    "/clear_hicache_storage_backend": _ONE_TIER,
    "/add_external_corpus": _OWN_GUESSES,
    "/remove_external_corpus": _OWN_GUESSES,
    "/list_external_corpora": _OWN_GUESSES,
    "/collective_rpc": _ONE_ENGINE,
    "/scale_elastic_ep": _ONE_ENGINE,
    "/kv_event_sources": _ONE_ENGINE,
}


def why_missing(path: str) -> str | None:
    """What to do without an endpoint, or why there is none; None for one that neither peer has."""
    return REASONS.get(path.rstrip("/"))
