"""Proof on the spot that a token's logits do not depend on company: `kitfox verify`.

Every prompt is computed alone, in one chunk. Then the same tokens are computed in the other ways that a server may come
to compute them: in company, in chunks, over another request's blocks, on other threads. The hidden states and the
logits of all positions must have the same bits each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kitfox.attention.backend import ForwardBatch
from kitfox.config import EngineConfig, ModelConfig
from kitfox.executor.executor import Executor
from kitfox.kernels.native import NativeKernels
from kitfox.plan import NATIVE_TILE_ROWS, resolve_max_model_len, resolve_precision
from kitfox.tokenizer import Tokenizer

LONGEST_PROMPT = 320
# Logits are computed for this many rows at a time. Only those of the prompts alone are kept: all of them, because on
# other threads they come from another model object.
_LOGITS_ROWS = 64
# One token at a time costs a pass over the weights each, so that the beginning of a prompt has to do.
_TOKENS_ONE_BY_ONE = 24
_TEXTS = (
    "Hello, fox!",
    "3.14159265358979, 2.71828182845905; 1,234,567 + 89 = 1,234,656; 0x7fff; 2024-02-29T23:59:60Z",
    "🦊 jumps over 🐶. 👩‍🚀🚀🌕 🇫🇷🇩🇪🇯🇵 naïve café, “quoted”… ☀️→🌧️ 🙂🙃😉",
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"
    "学而时习之,不亦说乎?有朋自远方来,不亦乐乎?서울은 대한민국의 수도이다.",
    '''\
def merge(left: list[int], right: list[int]) -> list[int]:
    """Merge two sorted lists."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]


assert merge([1, 3, 5], [2, 4]) == [1, 2, 3, 4, 5]
''',
    """\
A fox who lived at the edge of a wood kept a ledger of everything that happened there. When the owl moved to the old
oak, the fox wrote it down; when the stream froze, the fox wrote down the hour. One spring a hare came by and asked what
the ledger was for. "So that I know what is true," said the fox. "But you were there," said the hare. "You saw it." The
fox thought about this for a while. "I was there once," it said, "and I have thought of it many times since. Each time
I remember it a little differently: in a hurry I leave out the weather, in company I make the ending better, and when I
start in the middle I get the beginning wrong. The ledger says the same thing whoever is listening." The hare read a
page, and then the page before it, and then the first one again. "It is rather dull," the hare said. "Yes," said the
fox, and was pleased. "That is how you can tell." From then on the two of them read it together in the evenings, a page
each, sometimes from the front and sometimes from the back, and they never once disagreed about what had happened, which
left them a great deal of time to disagree about what it meant.
""",
)


def built_in_prompts(tokenizer: Tokenizer, config: EngineConfig, model_config: ModelConfig) -> list[list[int]]:
    """Digits, emoji, CJK, code and English: from a few tokens to LONGEST_PROMPT, or to the context's length."""
    longest = min(LONGEST_PROMPT, resolve_max_model_len(config, model_config))
    return [tokenizer.encode(text)[:longest] for text in _TEXTS]


# ---- forward passes -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """A prompt on its way through the model.

    Attributes:
        prompt: index of it.
        blocks: [n] int32, its block table; the first num_shared are another request's.
        num_computed: tokens whose KV is in the blocks.
    """

    prompt: int
    blocks: Tensor
    num_shared: int
    num_computed: int = 0


@dataclass
class PagedForward:
    """Forward passes of requests in any company, over a cache whose unwritten slots are not numbers.

    Attributes:
        prompts: token ids.
        captured: replay the recorded forward pass where there is one.
        seed: decides which blocks are handed out first.
    """

    executor: Executor
    prompts: list[list[int]]
    captured: bool = True
    seed: int = 0
    _free_blocks: Tensor = field(init=False)

    def __post_init__(self) -> None:
        caches = self.executor.runner.kv_caches
        for cache in caches:
            cache.view(torch.uint8).fill_(0xFF)  # not a number in any floating type, scales of codes included
        self._free_blocks = torch.randperm(len(caches[0]), generator=torch.Generator().manual_seed(self.seed)).int()

    @property
    def block_size(self) -> int:
        return self.executor.runner.input_batch.block_size

    def request(self, prompt: int, shared: Tensor | None = None) -> Request:
        """Its table begins with the blocks `shared` [n] int32 and goes on with free ones, enough for the prompt."""
        shared = self._free_blocks[:0] if shared is None else shared
        count = -(-len(self.prompts[prompt]) // self.block_size) - len(shared)
        assert count <= len(self._free_blocks), "the executor was made with too few blocks"
        own, self._free_blocks = self._free_blocks[:count], self._free_blocks[count:]
        return Request(prompt, torch.cat((shared, own)), len(shared))

    def requests(self) -> list[Request]:
        """One for each prompt."""
        return [self.request(prompt) for prompt in range(len(self.prompts))]

    def release(self, request: Request) -> None:
        """Hand its own blocks, with whatever is in them, to the request that comes next."""
        self._free_blocks = torch.cat((request.blocks[request.num_shared :], self._free_blocks))

    def rest(self, request: Request) -> int:
        """How many of its tokens are not computed yet."""
        return len(self.prompts[request.prompt]) - request.num_computed

    @torch.inference_mode()
    def step(self, work: dict[Request, int]) -> tuple[Tensor, Tensor]:
        """Compute the next work[request] tokens of each request, in one forward pass.

        Returns:
            Which of all prompts' tokens, back to back, each row is, [T] int64; and their hidden states [T, hidden].
        """
        runner, size = self.executor.runner, self.block_size
        starts = torch.tensor([0, *map(len, self.prompts)]).cumsum(0)
        ids, positions, slots, rows = [], [], [], []
        for request, count in work.items():
            position = torch.arange(request.num_computed, request.num_computed + count)
            ids.append(torch.tensor(self.prompts[request.prompt])[position])
            positions.append(position)
            slots.append(request.blocks.long()[position // size] * size + position % size)
            rows.append(starts[request.prompt] + position)
            request.num_computed += count
        tables = torch.nn.utils.rnn.pad_sequence([request.blocks for request in work], batch_first=True)
        lengths = torch.tensor([request.num_computed for request in work], dtype=torch.int32)
        batch = ForwardBatch(
            token_ids=torch.cat(ids).to(runner.device),
            positions=torch.cat(positions).to(runner.device),
            slot_mapping=torch.cat(slots).to(runner.device),
            block_table=tables.to(runner.device),
            seq_lens=lengths.to(runner.device),
            query_start_loc=torch.tensor([0, *work.values()]).cumsum(0).int().to(runner.device),
            kv_caches=runner.kv_caches,
            attention=runner.attention,
        )
        return torch.cat(rows), runner.forward(batch, captured=self.captured)

    @torch.inference_mode()
    def copy_block(self, source: Tensor, target: Tensor, num_tokens: int) -> None:
        """Copy a block's first slots, as the radix cache does where two prompts part inside a block; ids are [1]."""
        device = self.executor.device
        operands = [block.long().to(device) for block in (source, target, torch.tensor([num_tokens]))]
        for cache in self.executor.runner.kv_caches:
            self.executor.kernels.copy_blocks(cache, *operands)


# ---- ways to compute all prompts ------------------------------------------------------------------------------------

# What `PagedForward.step` returns, step by step.
Steps = Iterator[tuple[Tensor, Tensor]]


def _alone(forward: PagedForward) -> Steps:
    for request in forward.requests():
        yield forward.step({request: forward.rest(request)})


def _together(forward: PagedForward) -> Steps:
    yield forward.step({request: forward.rest(request) for request in forward.requests()})


def _in_chunks(size: int, forward: PagedForward) -> Steps:
    for request in forward.requests():
        while rest := forward.rest(request):
            yield forward.step({request: min(size, rest)})


def _one_by_one(forward: PagedForward) -> Steps:
    for request in forward.requests():
        for _ in range(min(_TOKENS_ONE_BY_ONE, forward.rest(request))):
            yield forward.step({request: 1})


def _beside_decodes(forward: PagedForward) -> Steps:
    """A request every three steps; its prompt comes in chunks, the last tokens one by one as those of an answer do."""
    waiting, num_steps = forward.requests(), 0
    running: list[Request] = []
    while waiting or running:
        if waiting and (not running or num_steps % 3 == 0):
            running.append(waiting.pop(0))
        num_steps += 1
        rest = {request: forward.rest(request) - _TOKENS_ONE_BY_ONE for request in running}
        yield forward.step({request: min(33, max(1, count)) for request, count in rest.items()})
        running = [request for request in running if forward.rest(request)]


def _across_tiles(forward: PagedForward) -> Steps:
    """Each prompt begins inside a tile of rows and goes on in the next; beginnings of the longest are before it."""
    longest = max(range(len(forward.prompts)), key=lambda prompt: len(forward.prompts[prompt]))
    for request in forward.requests():
        work: dict[Request, int] = {}
        room = NATIVE_TILE_ROWS - max(1, min(forward.rest(request), NATIVE_TILE_ROWS) // 2)
        while room > 0:
            filler = forward.request(longest)
            work[filler] = min(room, forward.rest(filler))
            room -= work[filler]
        fillers = list(work)
        yield forward.step({**work, request: forward.rest(request)})
        for filler in fillers:
            forward.release(filler)


def _after_a_prefix(copied: bool, forward: PagedForward) -> Steps:
    """Two thirds are found in the cache, in shared blocks; the part of a block that remains is `copied` or left."""
    writers = {request: 2 * forward.rest(request) // 3 for request in forward.requests()}
    if not copied:
        writers = {request: count - count % forward.block_size for request, count in writers.items()}
    writers = {request: count for request, count in writers.items() if count}
    if not writers:
        return
    yield forward.step(writers)
    readers = []
    for writer, num_found in writers.items():
        whole, part = divmod(num_found, forward.block_size)
        reader = forward.request(writer.prompt, writer.blocks[:whole])
        if part:
            forward.copy_block(writer.blocks[whole : whole + 1], reader.blocks[whole : whole + 1], part)
        reader.num_computed = num_found
        readers.append(reader)
    yield forward.step({reader: forward.rest(reader) for reader in readers})


def _after_preemption(forward: PagedForward) -> Steps:
    """All are stopped halfway and begin again, in blocks that others have left their numbers in."""
    stopped = {request: forward.rest(request) // 2 for request in forward.requests()}
    if any(stopped.values()):
        yield forward.step({request: count for request, count in stopped.items() if count})
    for request in stopped:
        forward.release(request)
    running = forward.requests()
    while running:
        yield forward.step({request: min(100, forward.rest(request)) for request in running})
        running = [request for request in running if forward.rest(request)]


WAYS: dict[str, Callable[[PagedForward], Steps]] = {
    "alone, once more": _alone,
    "all in one batch": _together,
    "in chunks of 256": partial(_in_chunks, 256),
    "in chunks of 16": partial(_in_chunks, 16),
    f"one by one, the first {_TOKENS_ONE_BY_ONE}": _one_by_one,
    "in chunks beside decodes": _beside_decodes,
    "across tiles of rows": _across_tiles,
    "after a prefix in shared blocks": partial(_after_a_prefix, False),
    "after a prefix partly copied": partial(_after_a_prefix, True),
    "after preemption": _after_preemption,
}

# ---- comparing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Where a check did not find the bits of the prompt alone.

    Attributes:
        num_rows: rows that differ.
        prompt, position: the first of them.
        hidden, logits: the largest difference of a number; None where one is not finite.
    """

    num_rows: int
    prompt: int
    position: int
    hidden: float | None
    logits: float | None


@dataclass(frozen=True)
class CheckResult:
    """What one check found; num_rows were compared."""

    name: str
    num_rows: int
    difference: Difference | None


class Verification:
    """A loaded model, and the bits of its prompts alone. Memory: 4 bytes * vocabulary for each of their tokens.

    Attributes:
        description: of the kernels, and whether steps are captured.
        device_type: "cpu" or "cuda".
        precision: of weights and KV.
        is_promised: whether kitfox promises that all checks pass.
        num_rows: tokens of all prompts.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, path: Path, prompts: list[list[int]]):
        """Load the model as a server would, and compute each prompt alone.

        Args:
            path: of the checkpoint.
            prompts: token ids, none of them empty or longer than the context.
        """
        self._config, self._model_config, self._path, self._prompts = config, model_config, path, prompts
        self._places = [(prompt, position) for prompt, ids in enumerate(prompts) for position in range(len(ids))]
        self.num_rows = len(self._places)
        self._executor = self._load(config)
        self.description = f"{self._executor.kernels.description}, {self._executor.runner.description}"
        self.device_type = self._executor.device.type
        self.is_promised = self.device_type == "cpu"
        self.precision = resolve_precision(config, model_config, self.device_type)
        passes = list(_alone(PagedForward(self._executor, prompts)))
        self._hidden = torch.cat([hidden.cpu() for _, hidden in passes])
        self._logits = torch.empty(self.num_rows, model_config.vocab_size)
        for rows, hidden in passes:
            for start in range(0, len(rows), _LOGITS_ROWS):
                part = slice(start, start + _LOGITS_ROWS)
                self._logits[rows[part]] = self._compute_logits(hidden[part])

    def checks(self) -> Iterator[CheckResult]:
        """Run them one after another. The model is let go on the way: this can be done once."""
        for seed, (name, way) in enumerate(WAYS.items(), start=1):
            yield self._check(name, way(PagedForward(self._executor, self._prompts, seed=seed)))
        if self._executor.runner.program is not None:
            yield self._check("eager", _alone(PagedForward(self._executor, self._prompts, captured=False)))
        if not isinstance(self._executor.kernels, NativeKernels):
            return
        for num_threads in sorted({1, 2, self._executor.kernels.num_threads}):
            self._unload()  # two models may not fit
            self._executor = self._load(self._config.replace(device={"num_threads": num_threads}))
            name = f"loaded again, {num_threads} thread" + "s" * (num_threads > 1)
            yield self._check(name, _alone(PagedForward(self._executor, self._prompts)))
        self._unload()

    def _load(self, config: EngineConfig) -> Executor:
        size = config.cache.block_size
        num_blocks = [-(-len(ids) // size) for ids in self._prompts]
        fillers = -(-NATIVE_TILE_ROWS // max(map(len, self._prompts)))  # of `_across_tiles`
        return Executor(config, self._model_config, self._path, 2 * sum(num_blocks) + fillers * max(num_blocks))

    def _unload(self) -> None:
        if isinstance(self._executor.kernels, NativeKernels):
            self._executor.kernels.close()
        del self._executor

    @torch.inference_mode()
    def _compute_logits(self, hidden: Tensor) -> Tensor:
        return self._executor.model.compute_logits(hidden).cpu()

    def _check(self, name: str, steps: Steps) -> CheckResult:
        num_rows, differing = 0, torch.zeros(self.num_rows, dtype=torch.bool)
        largest = torch.zeros(2)
        for rows, hidden in steps:
            num_rows += len(rows)
            for start in range(0, len(rows), _LOGITS_ROWS):
                part = slice(start, start + _LOGITS_ROWS)
                found = hidden[part].cpu(), self._compute_logits(hidden[part])
                expected = self._hidden[rows[part]], self._logits[rows[part]]
                differing[rows[part]] |= _rows_that_differ(found[0], expected[0])
                differing[rows[part]] |= _rows_that_differ(found[1], expected[1])
                distances = [(x.float() - y.float()).abs().max() for x, y in zip(found, expected, strict=True)]
                largest = torch.maximum(largest, torch.stack(distances))
        if not differing.any():
            return CheckResult(name, num_rows, None)
        prompt, position = self._places[int(differing.int().argmax())]
        by_hidden, by_logits = (number if math.isfinite(number) else None for number in largest.tolist())
        return CheckResult(name, num_rows, Difference(int(differing.sum()), prompt, position, by_hidden, by_logits))


def _rows_that_differ(found: Tensor, expected: Tensor) -> Tensor:
    """[n] bool. A row with a number that is not finite differs from every other: it proves nothing."""
    bits = [x.contiguous().view(torch.uint8) for x in (found, expected)]
    return (bits[0] != bits[1]).any(1) | ~found.isfinite().all(1)
