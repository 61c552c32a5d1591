"""Qwen2 and Qwen2.5: Llama's block with biases on q, k and v (`ModelConfig.attention_bias`)."""

from kitfox.models.llama import LlamaModel


class Qwen2Model(LlamaModel):
    """Only some sizes slide their upper layers; the config says which."""
