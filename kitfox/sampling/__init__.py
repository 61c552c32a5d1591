"""From logits to tokens."""

from kitfox.sampling.native_sampler import NativeSampler
from kitfox.sampling.sampler import PLAIN_GREEDY, Sampler, SamplingRow, is_plain_greedy, prompt_logprobs

__all__ = ["PLAIN_GREEDY", "NativeSampler", "Sampler", "SamplingRow", "is_plain_greedy", "prompt_logprobs"]
