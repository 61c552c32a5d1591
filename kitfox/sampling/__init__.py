"""From logits to tokens."""

from kitfox.sampling.sampler import Sampler, SamplingRow, prompt_logprobs

__all__ = ["Sampler", "SamplingRow", "prompt_logprobs"]
