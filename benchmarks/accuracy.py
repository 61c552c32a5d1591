"""How much of a model a precision keeps: perplexity, KL divergence and agreement on the best token, against float32.

    .venv/bin/python -m benchmarks.accuracy MODEL --sides int8,bfloat16,stored

The text is tests/data/accuracy.txt, technical English as this repository's documents once were, unless --text names
files. It is read in windows of 512 tokens that each begin anew. The models of all sides are in memory at once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kitfox.config import EngineConfig, ModelConfig, ModelOptions
from kitfox.executor.executor import Executor
from kitfox.executor.verify import PagedForward
from kitfox.tokenizer import load_tokenizer
from kitfox.weights.hub import resolve_model
from kitfox.weights.model_config import read_model_config

ROOT = Path(__file__).resolve().parents[1]
TEXTS = (ROOT / "tests" / "data" / "accuracy.txt",)
WINDOW = 512
# Log-probabilities of so many positions and of two sides are in memory at once.
ROWS = 64
SIDES = {
    "float32": {"dtype": "float32", "quantization": "none"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "float16": {"dtype": "float16", "quantization": "none"},
    "int8": {"quantization": "int8"},
    "stored": {},
}


@dataclass
class Accuracy:
    """Of one side, over all positions.

    Attributes:
        perplexity: of the text's own tokens.
        kl: mean KL(float32 || side), in nats.
        top_1: share of positions where both find the same token best.
    """

    perplexity: float
    kl: float
    top_1: float


def measure(model: str, sides: list[str], texts: Sequence[Path], num_tokens: int) -> dict[str, Accuracy]:
    """Compare sides, among SIDES, with float32 (which is in the result too) on the first num_tokens of some files."""
    path = resolve_model(model).path
    model_config = read_model_config(path)
    text = "\n".join(file.read_text(encoding="utf-8") for file in texts)
    ids = load_tokenizer(path).encode(text)[:num_tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    names = list(dict.fromkeys(["float32", *sides]))
    executors = {name: load_side(model, model_config, path, name) for name in names}
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in names}
    num_positions = 0
    for window in windows:
        num_positions += len(window) - 1
        parts = zip(*(log_probabilities(executor, window) for executor in executors.values()), strict=True)
        for start, (right, *others) in zip(range(0, len(window), ROWS), parts, strict=True):
            targets = torch.tensor(window[start + 1 : start + 1 + ROWS])
            for name, found in zip(names, (right, *others), strict=True):
                sums[name] += compare(right[: len(targets)], found[: len(targets)], targets)
    means = {name: (total / num_positions).tolist() for name, total in sums.items()}
    return {name: Accuracy(math.exp(-mean[0]), mean[1], mean[2]) for name, mean in means.items()}


def load_side(model: str, model_config: ModelConfig, path: Path, name: str) -> Executor:
    config = EngineConfig(model=ModelOptions(model=model, **SIDES[name]))  # type: ignore[arg-type]
    return Executor(config, model_config, path, num_blocks=-(-WINDOW // config.cache.block_size))


@torch.inference_mode()
def log_probabilities(executor: Executor, window: list[int]) -> Iterator[Tensor]:
    """[n, V] float32 of every position, ROWS at a time."""
    forward = PagedForward(executor, [window])
    _, hidden = forward.step({forward.request(0): len(window)})
    for part in hidden.split(ROWS):
        yield executor.model.compute_logits(part).log_softmax(-1).cpu()


def compare(right: Tensor, found: Tensor, targets: Tensor) -> Tensor:
    """Sums over rows [n, V]: log-probability of the targets [n], KL, and how often the best tokens are the same."""
    likelihood = found.gather(1, targets[:, None]).sum()
    divergence = (right.exp() * (right - found)).sum()
    agreement = (right.argmax(1) == found.argmax(1)).sum()
    return torch.stack((likelihood.double(), divergence.double(), agreement.double()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--sides", default="int8,bfloat16,stored", help=f"among {', '.join(SIDES)} (%(default)s)")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", default=TEXTS, help="UTF-8")
    parser.add_argument("--tokens", type=int, default=6000, help="of the text (%(default)s)")
    arguments = parser.parse_args()
    sides = arguments.sides.split(",")
    if unknown := [side for side in sides if side not in SIDES]:
        parser.error(f"--sides: {', '.join(unknown)} is none of {', '.join(SIDES)}")
    print(f"{'side':<10} {'ppl':>9} {'KL':>9} {'top-1':>8}")
    for name, found in measure(arguments.model, sides, arguments.text, arguments.tokens).items():
        print(f"{name:<10} {found.perplexity:9.4f} {found.kl:9.5f} {found.top_1:8.2%}")


if __name__ == "__main__":
    main()
