"""What a decode step costs beside the compiled kernels: Python of the engine, in microseconds for a step and a request.

    .venv/bin/python -m benchmarks.step_cost smollm2-135m --requests 1,32,256

Greedy answers to random prompts, offline and in one process. A step's time less what its calls of the kernels took, of
steps in which all requests decode; medians. Under `py-spy record` it draws the flame graphs of docs/performance.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from kitfox.engine.llm import LLM
from kitfox.garbage import keep_what_is_loaded
from kitfox.request import SamplingParams

PROMPT, ANSWER = 16, 96
WARM_UP = 8  # steps that are not counted


class KernelTime:
    """How long calls into the compiled kernels have taken so far."""

    def __init__(self, library: Any):
        self.seconds = 0.0
        for name in ("kf_run", "kf_sample", "kf_logprobs"):
            setattr(library, name, self._timed(getattr(library, name)))

    def _timed(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            start = time.perf_counter()
            function(*arguments)
            self.seconds += time.perf_counter() - start

        return call


def measure(llm: LLM, kernel_time: KernelTime, num_requests: int) -> float:
    """Median microseconds of a step beside the kernels, of those in which all requests decode."""
    core = llm._client.core
    beside: list[float] = []
    take_step = core.step

    def step() -> Any:
        kernels_before, start = kernel_time.seconds, time.perf_counter()
        outputs = take_step()
        elapsed = time.perf_counter() - start
        if outputs.stats.num_step_tokens == num_requests == len(core.scheduler.requests):
            beside.append(elapsed - (kernel_time.seconds - kernels_before))
        return outputs

    core.step = step  # type: ignore[method-assign]
    pick = random.Random(0)
    prompts = [[pick.randrange(1000, 40000) for _ in range(PROMPT)] for _ in range(num_requests)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True), use_tqdm=False)
    core.step = take_step  # type: ignore[method-assign]
    return statistics.median(beside[WARM_UP:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m", metavar="MODEL")
    parser.add_argument("--requests", default="1,32,256", help="how many decode at once (%(default)s)")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.requests.split(",")]
    llm = LLM(
        arguments.model, max_num_seqs=max(counts), max_num_batched_tokens=max(counts) * (PROMPT + 1), max_model_len=512
    )
    keep_what_is_loaded()  # as the engine's process does
    kernel_time = KernelTime(llm._client.core.executor.kernels.library)  # type: ignore[attr-defined]
    print(f"{'requests':>8} {'us a step':>10} {'us a step and request':>22}")
    for count in counts:
        microseconds = measure(llm, kernel_time, count)
        print(f"{count:8} {microseconds:10.0f} {microseconds / count:22.1f}")


if __name__ == "__main__":
    main()
