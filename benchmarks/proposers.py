"""What the proposers that need no model would gain: known answers replayed, token by token as an engine would.

    .venv/bin/python -m benchmarks.proposers --data DIRECTORY

A proposer drafts, the draft is compared with what really came next, the tokens that agree and one more are taken, and
so on; then the answer is learnt. No model runs: a step is said to cost 1 and --row-cost for each drafted token, and of
each draft as much is taken as its own probabilities say will pay. "promised" is the number of accepted tokens that they
add up to, over the number there really was: 1.0 is a proposer that knows itself.

Workloads: benchmarks/copy_heavy.jsonl, and what --data has of agents/ and prompts/ (others are left out). Of answers
that are the same word for word, one is replayed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.paths import default_gguf
from kitfox.spec_decode.proposer import NOTHING, Proposal, Proposer
from kitfox.spec_decode.proposers import make_proposer
from kitfox.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
LONG_PROMPT = 128 * 1024
VOCAB_SIZE = 49152
SHOWN_POSITIONS = 8


class Answered(NamedTuple):
    prompt: list[int]
    answer: list[int]


class Replayed:
    """Sums over one workload.

    Attributes:
        reached, accepted: by position in the draft: how many were compared, and how many of them agreed.
        promised: accepted tokens expected by the proposer itself.
        cost: in steps that draft nothing.
        extend_seconds, propose_seconds: per token, per call.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_steps = self.num_drafted = 0
        self.promised = self.cost = 0.0
        self.reached: list[int] = []
        self.accepted: list[int] = []
        self.extend_seconds: list[float] = []
        self.propose_seconds: list[float] = []

    def row(self) -> str:
        accepted = max(1, sum(self.accepted))
        rates = [f"{a / max(1, n):.2f}" for a, n in zip(self.accepted, self.reached, strict=True)][:SHOWN_POSITIONS]
        extend, propose = (1e6 * statistics.mean(times) for times in (self.extend_seconds, self.propose_seconds))
        return (
            f"{self.num_tokens / self.num_steps:8.2f} {self.num_tokens / self.cost:6.2f} "
            f"{sum(self.accepted) / max(1, self.num_drafted):9.2f} {self.promised / accepted:9.2f} "
            f"{extend:7.1f} {propose:8.1f}  {' '.join(rates)}"
        )


def replay(proposer: Proposer, answers: list[Answered], num_draft_tokens: int, row_cost: float) -> Replayed:
    result = Replayed()
    for number, (prompt, answer) in enumerate(answers):
        request_id = str(number)
        proposer.start(request_id, prompt, num_prompt_tokens=len(prompt))
        proposer.extend(request_id, answer[:1])
        position = 1
        while position < len(answer):
            started = time.thread_time()
            proposal = proposer.propose({request_id: num_draft_tokens}).get(request_id, NOTHING)
            proposed = time.thread_time()
            draft = proposal.token_ids[: length_that_pays(proposal, row_cost)]
            accepted = agreement(draft, answer[position:])
            taken = answer[position : position + accepted + 1]
            extended = time.thread_time()
            proposer.extend(request_id, taken)
            result.extend_seconds.append((time.thread_time() - extended) / len(taken))
            result.propose_seconds.append(proposed - started)
            result.num_tokens += len(taken)
            result.num_steps += 1
            result.num_drafted += len(draft)
            result.cost += 1 + row_cost * len(draft)
            count(result, proposal, draft, accepted)
            position += len(taken)
        proposer.finish(request_id, keep=True)
    return result


def length_that_pays(proposal: Proposal, row_cost: float) -> int:
    """The draft length with the most expected tokens for what its step costs."""
    best_rate, best_length = 1.0, 0
    expected = likely = 1.0
    for length, probability in enumerate(proposal.probabilities, start=1):
        likely *= probability
        expected += likely
        rate = expected / (1 + row_cost * length)
        if rate > best_rate:
            best_rate, best_length = rate, length
    return best_length


def agreement(draft: list[int], true: list[int]) -> int:
    same = 0
    for drafted, token_id in zip(draft, true, strict=False):
        if drafted != token_id:
            break
        same += 1
    return same


def count(result: Replayed, proposal: Proposal, draft: list[int], accepted: int) -> None:
    likely = 1.0
    for position in range(len(draft)):
        likely *= proposal.probabilities[position]
        result.promised += likely
        if position == len(result.reached):
            result.reached.append(0)
            result.accepted.append(0)
        if position <= accepted:
            result.reached[position] += 1
        if position < accepted:
            result.accepted[position] += 1


def copy_heavy(tokenizer: Tokenizer) -> Iterator[Answered]:
    """Each prompt with the answer that a careful writer would give."""
    for row in rows(ROOT / "benchmarks" / "copy_heavy.jsonl"):
        yield Answered(tokenizer.encode_chat(row["messages"]), tokenizer.encode(row["answer"]))


def delta_sessions(file: Path, tokenizer: Tokenizer) -> Iterator[Answered]:
    """Calls whose prompt is given by what it adds to an earlier one of its session."""
    prompts: dict[tuple[str, int], str] = {}
    for row in rows(file):
        base = prompts.get((row["session"], row["base"]), "")
        prompt = prompts[row["session"], row["n"]] = base[: row["keep"]] + row["add"]
        if row["output"]:
            yield Answered(tokenizer.encode(prompt), tokenizer.encode(row["output"]))


def conversations(
    conversations: Iterator[list[dict[str, Any]]], tokenizer: Tokenizer, limit: int
) -> Iterator[Answered]:
    """Every turn of the assistant, calls of tools as JSON."""
    for messages in conversations:
        so_far: list[int] = []
        for message in messages:
            ids = tokenizer.encode(f"{text(message)}<|im_end|>\n")
            so_far += tokenizer.encode(f"<|im_start|>{message['role']}\n")
            if message["role"] == "assistant":
                yield Answered(list(so_far), ids)
                limit -= 1
                if limit == 0:
                    return
            so_far += ids


def text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return content + "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def question(asked: str, answered: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def workloads(data: Path, limit: int) -> dict[str, tuple[Path, Callable[[Path, Tokenizer], Iterator[Answered]]]]:
    """Name to file and what makes answers of it."""

    def airline(file: Path, tokenizer: Tokenizer) -> Iterator[Answered]:
        first, *others = rows(file)
        system = {"role": "system", "content": first["system"]}
        return conversations(([system, *row["messages"]] for row in others), tokenizer, limit)

    def demonstrations(file: Path, tokenizer: Tokenizer) -> Iterator[Answered]:
        return conversations((row["messages"] for row in rows(file)), tokenizer, limit)

    def code(file: Path, tokenizer: Tokenizer) -> Iterator[Answered]:
        pairs = (question(row["prompt"], row["prompt"] + row["canonical_solution"]) for row in rows(file))
        return conversations(pairs, tokenizer, limit)

    def chat(file: Path, tokenizer: Tokenizer) -> Iterator[Answered]:
        return conversations((question(row["question"], row["answer"]) for row in rows(file)), tokenizer, limit)

    return {
        "copy-heavy": (ROOT / "benchmarks" / "copy_heavy.jsonl", lambda _, tokenizer: copy_heavy(tokenizer)),
        "code completion": (data / "prompts" / "humaneval.jsonl", code),
        "agent, edits code": (data / "agents" / "lmcache_miniswe_delta.jsonl", delta_sessions),
        "agent, shell": (data / "agents" / "sweagent_demos.jsonl", demonstrations),
        "agent, tools": (data / "agents" / "taubench_airline_messages.jsonl", airline),
        "agent, short": (data / "agents" / "lmcache_taubench_delta.jsonl", delta_sessions),
        "chat, arithmetic": (data / "prompts" / "gsm8k_test.jsonl", chat),
    }


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def long_prompt(name: str) -> str:
    """Time and memory of a prompt of 128k tokens that repeats itself now and then."""
    noise = random.Random(7)
    prompt: list[int] = []
    while len(prompt) < LONG_PROMPT:
        start = noise.randrange(max(1, len(prompt) - 100))
        again = noise.random() < 0.5 and len(prompt) > 200
        prompt += prompt[start : start + 100] if again else [noise.randrange(VOCAB_SIZE) for _ in range(100)]
    proposer = make_proposer(name)
    started = time.perf_counter()
    proposer.start("long", prompt, num_prompt_tokens=len(prompt))
    seconds = time.perf_counter() - started
    calls = []
    for token_id in prompt[:500]:
        proposer.extend("long", [token_id])
        started = time.thread_time()
        proposer.propose({"long": 16})
        calls.append(time.thread_time() - started)
    return (
        f"{1e3 * seconds:.0f} ms to start, {proposer.memory_bytes / 2**20:.1f} MiB, "
        f"a proposal {1e6 * statistics.mean(calls):.0f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="(%(default)s)")
    parser.add_argument("--proposers", default="ngram,suffix", help="(%(default)s)")
    parser.add_argument("--draft-tokens", type=int, default=16, help="at most, in one step (%(default)s)")
    parser.add_argument("--row-cost", type=float, default=0.1, help="of a drafted token, in steps (%(default)s)")
    parser.add_argument("--answers", type=int, default=150, help="of each workload (%(default)s)")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(default_gguf())
    names = arguments.proposers.split(",")
    print(f"a step costs 1 + {arguments.row_cost} for each drafted token; us per token of extend and per propose")
    columns = "tok/step   gain  accepted  promised  extend  propose"
    print(f"{'workload':<20} {'':<8} {columns}  acceptance by position, those before accepted")
    for workload, (file, answers_of) in workloads(arguments.data, arguments.answers).items():
        if not file.exists():
            continue
        distinct = {tuple(answered.answer): answered for answered in answers_of(file, tokenizer)}
        answers = list(distinct.values())[: arguments.answers]
        for name in names:
            result = replay(make_proposer(name), answers, arguments.draft_tokens, arguments.row_cost)
            print(f"{workload:<20} {name:<8} {result.row()}", flush=True)
    for name in names:
        print(f"prompt of 128k tokens {name}: {long_prompt(name)}")


if __name__ == "__main__":
    main()
