"""Workloads are exact: lengths, shared prefixes, limits, and the same again from the same seed."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitfox.bench.records import Arrivals, BenchRequest, Workload
from kitfox.bench.vocabulary import Encoder, Vocabulary, find_vocabulary
from kitfox.bench.workloads import WORKLOADS, WorkloadSpec, default_arrivals, make_workload, shared_prefixes
from kitfox.errors import ConfigError
from kitfox.tokenizer import load_tokenizer
from kitfox.weights.hub import resolve_model

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
BOS = 7
GENERATED = ("chat", "prefix", "multiturn", "agent", "long", "batch", "random")


def encode(text: str) -> list[int]:
    """A token a word, and one before all."""
    return [BOS] + [100 + int.from_bytes(word.encode(), "big") for word in text.split()]


# So many words that prompts which should share nothing do not begin alike by accident.
WORDS = tuple(f"w{number}" for number in range(100_000))
VOCABULARY = Vocabulary(WORDS, tuple(encode(" ".join(WORDS))[1:]), 1, Encoder(encode, "toy"))
COUNTING = Vocabulary(WORDS, None, 1, Encoder(lambda text: len(encode(text)), "toy count"))


def make(name: str, seed: int = 0, vocabulary: Vocabulary = VOCABULARY, **options: Any) -> Workload:
    return make_workload(WorkloadSpec(name, **options), vocabulary, seed)


def requests(workload: Workload) -> list[BenchRequest]:
    return [request for session in workload.sessions for request in session.requests]


def token_ids(workload: Workload) -> list[tuple[int, ...]]:
    return [request.token_ids or () for request in requests(workload)]


# ---- generated ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATED)
def test_a_seed_fixes_everything(name: str) -> None:
    first = make(name, seed=3)
    assert make(name, seed=3) == first
    assert len(first.digest) == 64
    assert len({request.id for request in requests(first)}) == first.num_requests
    other = make(name, seed=4)
    assert other.digest != first.digest
    assert other.num_requests == first.num_requests


@pytest.mark.parametrize("name", [*GENERATED, "trace:sample"])
def test_seeds_share_no_prefix(name: str) -> None:
    def first_words(seed: int) -> set[str]:
        workload = make(name, seed=seed, vocabulary=COUNTING)
        texts = [r.text if r.messages is None else r.messages[0]["content"] for r in requests(workload)]
        return {str(text).removeprefix("system:").split()[0] for text in texts}

    assert not first_words(0) & first_words(1)


def test_digest_tells_prompts_lengths_and_pauses_apart() -> None:
    options: list[dict[str, Any]] = [{}, {"input_len": 63}, {"output_len": 47}, {"think_s": 1.0}, {"turns": 3}]
    digests = {make("multiturn", **given_options).digest for given_options in options}
    assert len(digests) == len(options)
    assert make("random").digest != make("random", prompts="text").digest


def test_chat_has_the_shape_of_chats() -> None:
    workload = make("chat", num_requests=4000)
    prompts = [request.prompt_tokens or 0 for request in requests(workload)]
    answers = [request.max_tokens for request in requests(workload)]
    assert [len(ids) for ids in token_ids(workload)] == prompts
    assert statistics.fmean(prompts) == pytest.approx(215, rel=0.05)
    assert statistics.median(prompts) == pytest.approx(134, rel=0.1)
    assert statistics.fmean(answers) == pytest.approx(175, rel=0.05)
    assert statistics.median(answers) == pytest.approx(116, rel=0.1)
    assert (min(prompts) >= 4, max(prompts) <= 1024, min(answers) >= 4, max(answers) <= 512) == (True,) * 4
    half = make("chat", num_requests=4000, input_len=108, output_len=350)
    assert statistics.fmean(r.prompt_tokens or 0 for r in requests(half)) == pytest.approx(108, rel=0.05)
    assert statistics.fmean(r.max_tokens for r in requests(half)) == pytest.approx(350, rel=0.05)


def test_prefix_shares_exactly_its_prefixes() -> None:
    workload = make("prefix", num_requests=10, num_prefixes=3, prefix_len=20, input_len=5, output_len=9)
    ids = token_ids(workload)
    assert [len(prompt) for prompt in ids] == [25] * 10
    by_prefix = {prefix: [p[:20] for p in ids].count(prefix) for prefix in {p[:20] for p in ids}}
    assert sorted(by_prefix.values()) == [3, 3, 4]
    assert len({prompt[20:] for prompt in ids}) == 10
    assert [prompt[:20] for prompt in ids] != [ids[n % 3][:20] for n in range(10)]  # in no fixed order
    assert workload.ideal_cached_tokens == 7 * 20
    assert {request.max_tokens for request in requests(workload)} == {9}


def test_text_prompts_count_what_the_server_adds() -> None:
    options: dict[str, Any] = {"num_requests": 10, "num_prefixes": 3, "prefix_len": 20, "input_len": 5}
    by_ids, by_text = make("prefix", **options), make("prefix", prompts="text", **options)
    for as_ids, as_text in zip(requests(by_ids), requests(by_text), strict=True):
        assert as_text.token_ids is None
        assert as_text.text is not None
        assert encode(as_text.text)[1:] == list(as_ids.token_ids or ())
        assert (as_ids.prompt_tokens, as_text.prompt_tokens) == (25, 26)
    # All prompts but the first share the token that comes before all.
    assert by_text.ideal_cached_tokens == 7 * 21 + 2
    assert make("prefix", vocabulary=COUNTING, **options).digest == by_text.digest


def test_lengths_are_uniform_within_the_ratio() -> None:
    workload = make("random", num_requests=2000, input_len=100, output_len=10, length_ratio=0.5)
    lengths = [request.prompt_tokens for request in requests(workload)]
    assert set(lengths) == set(range(50, 151))
    assert {request.max_tokens for request in requests(workload)} == set(range(5, 16))
    prompt_mean = statistics.fmean(request.prompt_tokens or 0 for request in requests(workload))
    answer_mean = statistics.fmean(request.max_tokens for request in requests(workload))
    assert workload.description == (
        f"random: 2000 requests, prompts of 50 to 150 (mean {prompt_mean:.0f}) tokens, "
        f"answers of 5 to 15 (mean {answer_mean:.0f}) tokens; nothing shared"
    )


def test_multiturn_leaves_room_for_the_servers_answers() -> None:
    workload = make("multiturn", num_requests=2, turns=3, input_len=10, output_len=6, length_ratio=0.0, think_s=1.5)
    assert workload.ideal_cached_tokens is None
    for session in workload.sessions:
        assert [request.think_s for request in session.requests] == [0, 1.5, 1.5]
        assert [request.max_tokens for request in session.requests] == [6, 6, 6]
        last = session.requests[-1].messages
        assert last is not None
        assert [m["role"] for m in last] == ["user", "assistant", "user", "assistant", "user"]
        assert [m["content"] for m in last if m["role"] == "assistant"] == [None, None]
        assert all(len(m["content"].split()) == 10 for m in last if m["role"] == "user")
        assert [request.messages for request in session.requests] == [last[:1], last[:3], last]
    with pytest.raises(ConfigError, match="multiturn needs the chat endpoint"):
        make("multiturn", endpoint="completions")


def test_batch_is_all_at_once() -> None:
    assert {session.at_s for session in make("batch").sessions} == {0.0}
    assert {session.at_s for session in make("random").sessions} == {None}
    assert default_arrivals("batch") == default_arrivals("trace:x") == Arrivals("trace")
    assert default_arrivals("chat") == Arrivals("closed", concurrency=8)


def test_words_as_a_chat() -> None:
    workload = make("random", num_requests=3, input_len=12, endpoint="chat")
    assert workload.ideal_cached_tokens is None
    for request in requests(workload):
        assert request.messages is not None
        assert [m["role"] for m in request.messages] == ["user"]
        assert len(request.messages[0]["content"].split()) == 12


@pytest.mark.model
@pytest.mark.parametrize("prompts", ["ids", "text"])
def test_lengths_are_exact_for_the_default_model(prompts: Any) -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2-135m").path)
    vocabulary = find_vocabulary(Encoder(tokenizer.encode, "smollm2-135m"))
    workload = make("chat", vocabulary=vocabulary, prompts=prompts)
    for request in requests(workload):
        ids = tokenizer.encode(request.text) if request.text is not None else request.token_ids
        assert ids is not None
        assert len(ids) == request.prompt_tokens
    agent = make("agent", vocabulary=vocabulary, prompts=prompts)
    total = sum(request.prompt_tokens or 0 for request in requests(agent))
    assert agent.ideal_cached_tokens is not None
    assert 0.8 * total < agent.ideal_cached_tokens < total


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "chats", "trace", "trace:", "jsonl:", "chat:x"])
def test_unknown_names_are_refused_with_the_known(name: str) -> None:
    with pytest.raises(ConfigError, match=f"must be one of {', '.join(WORKLOADS)}. Given: {name}$"):
        make(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "chat",
            {"length_ratio": 0.5},
            "length_ratio means nothing to workload chat, which takes num_requests, input_len",
        ),
        (
            "agent",
            {"input_len": 5},
            "input_len means nothing to workload agent, which takes num_requests, think_s. Given: 5",
        ),
        ("random", {"num_prefixes": 2}, "num_prefixes means nothing"),
        ("trace:sample", {"output_len": 2}, "output_len means nothing"),
        ("random", {"num_requests": 0}, "num_requests must be at least 1. Given: 0"),
        ("random", {"length_ratio": 1.0}, "length_ratio must be at least 0 and less than 1. Given: 1.0"),
        ("multiturn", {"think_s": -1.0}, "think_s must be at least 0 seconds. Given: -1.0"),
        ("random", {"endpoint": "chat", "prompts": "ids"}, "prompts ids cannot be sent to the chat endpoint"),
        ("multiturn", {"prompts": "ids"}, "prompts ids cannot be sent to the chat endpoint"),
        (
            "random",
            {"max_total_tokens": 319},
            "more than max_total_tokens 319: a prompt of 256 tokens and an answer of 64",
        ),
        ("random", {"max_total_tokens": 320, "prompts": "text"}, "a prompt of 257 tokens and an answer of 64"),
        (
            "multiturn",
            {"max_total_tokens": 300},
            "workload multiturn needs a context of more than max_total_tokens 300",
        ),
    ],
)
def test_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, **options)


def test_a_context_that_just_fits() -> None:
    assert make("random", max_total_tokens=320).num_requests == 48


def test_ids_need_ids() -> None:
    with pytest.raises(ConfigError, match="prompts ids need token ids, and there are none: 100000 words"):
        make("random", vocabulary=COUNTING, prompts="ids")
    assert requests(make("random", vocabulary=COUNTING))[0].text is not None


# ---- traces ---------------------------------------------------------------------------------------------------------


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def mooncake(timestamp: int, length: int, answer: int, *blocks: int) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": length, "output_length": answer, "hash_ids": blocks}


def test_equal_hashes_are_equal_blocks(tmp_path: Path) -> None:
    file = write(
        tmp_path / "trace.jsonl",
        mooncake(0, 40, 3, 1, 2, 3),
        mooncake(500, 35, 4, 1, 2, 4),  # shares two blocks
        mooncake(600, 20, 5, 1, 2),  # cut from the first: all but its last token, which is always computed
        mooncake(900, 16, 6, 5),  # shares nothing
        mooncake(950, 48, 7, 1, 2, 3),  # its last block is not cut: what the first had of it is shared
    )
    workload = make(f"trace:{file}")
    ids = token_ids(workload)
    assert [len(prompt) for prompt in ids] == [40, 35, 20, 16, 48]
    assert [request.prompt_tokens for request in requests(workload)] == [40, 35, 20, 16, 48]
    assert [request.max_tokens for request in requests(workload)] == [3, 4, 5, 6, 7]
    assert [session.at_s for session in workload.sessions] == [0, 0.5, 0.6, 0.9, 0.95]
    assert shared_prefixes(ids) == [0, 32, 19, 0, 40]
    assert workload.ideal_cached_tokens == 32 + 19 + 40
    assert ids[4][:40] == ids[0]
    assert "Mooncake trace, shared blocks of 16 tokens" in workload.description
    assert make(f"trace:{file}", num_requests=2).num_requests == 2
    assert make(f"trace:{file}", num_requests=2, block_size=16).digest == make(f"trace:{file}", num_requests=2).digest


def test_rows_left_out_are_counted_in_the_description(tmp_path: Path) -> None:
    file = write(
        tmp_path / "trace.jsonl",
        mooncake(0, 40, 3, 1, 2, 3),
        mooncake(1, 20, 4, 1, 2),
        mooncake(2, 20, 5, 1, 2),
        mooncake(3, 0, 5),
        mooncake(4, 5, 0, 1),
    )
    workload = make(f"trace:{file}", max_total_tokens=24)
    assert [request.max_tokens for request in requests(workload)] == [4]
    assert workload.description.endswith(
        "; 2 requests left out, beyond the server's context; 2 requests left out, without prompt or answer"
    )
    with pytest.raises(ConfigError, match=r"has nothing to send: .*3 requests left out, beyond the server's context"):
        make(f"trace:{file}", max_total_tokens=10)


def test_traces_of_lengths_share_nothing(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text("t_s,input_tokens,output_tokens\n2.0,30,4\n2.5,40,5\n")
    workload = make(f"trace:{file}")
    assert [(len(ids), r.max_tokens) for ids, r in zip(token_ids(workload), requests(workload), strict=True)] == [
        (30, 4),
        (40, 5),
    ]
    assert workload.ideal_cached_tokens == 0
    assert [session.at_s for session in workload.sessions] == [0, 0.5]


def test_agent_deltas_are_sessions_of_real_text(tmp_path: Path) -> None:
    def delta(session: str, n: int, t_s: float, base: int, keep: int, add: str, output: str) -> dict[str, Any]:
        return {"session": session, "n": n, "t_s": t_s, "base": base, "keep": keep, "add": add, "output": output}

    file = write(
        tmp_path / "deltas.jsonl",
        delta("a", 0, 1.0, -1, 0, "find the bug", "I look first"),
        delta("a", 1, 2.0, 0, 12, " in\u2028it", ""),
        delta("b", 0, 1.5, -1, 0, "find nothing", "done"),
    )
    workload = make(f"trace:{file}")
    assert [session.at_s for session in workload.sessions] == [0.0, 0.5]
    texts = [request.text or "" for request in requests(workload)]
    line = texts[0].removesuffix("find the bug")
    assert len(line.split()) == 6
    assert texts == [line + "find the bug", line + "find the bug in\u2028it", line + "find nothing"]
    assert [request.max_tokens for request in requests(workload)] == [3, 1, 1]
    assert [request.prompt_tokens for request in requests(workload)] == [10, 12, 9]
    assert workload.ideal_cached_tokens == 10 + 8
    assert "1 answers recorded as empty, asked for with 1 token" in workload.description
    assert make(f"trace:{file}", prompts="ids").ideal_cached_tokens == 18
    limited = make(f"trace:{file}", max_total_tokens=12)
    assert [request.prompt_tokens for request in requests(limited)] == [9]
    counted = make(f"trace:{file}", vocabulary=COUNTING, max_total_tokens=12)
    assert counted.num_requests == 3
    assert counted.description.endswith("prompts not counted, so not checked against 12 tokens")


def test_the_shipped_trace() -> None:
    workload = make("trace:sample")
    assert workload.num_requests == 40
    assert sum(len(ids) for ids in token_ids(workload)) == 6778
    last = workload.sessions[-1].at_s
    assert last is not None
    assert 20 < last < 30
    # Whole blocks of 16 that an earlier row has in the same place.
    assert workload.ideal_cached_tokens is not None
    assert workload.ideal_cached_tokens % 16 == 0
    assert workload.ideal_cached_tokens == _ideal_by_blocks(token_ids(workload), 16)


def _ideal_by_blocks(prompts: list[tuple[int, ...]], block_size: int) -> int:
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for prompt in prompts:
        blocks = [prompt[:end] for end in range(block_size, len(prompt) + 1, block_size)]
        hits += block_size * sum(block in seen for block in blocks)
        seen.update(blocks)
    return hits


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here")
def test_a_published_trace_has_its_known_hit_rate() -> None:
    workload = make(f"trace:{SHARED / 'traces' / 'mooncake_conversation_b16.jsonl'}")
    total = sum(len(ids) for ids in token_ids(workload))
    assert workload.ideal_cached_tokens is not None
    assert workload.ideal_cached_tokens / total == pytest.approx(0.29, abs=0.01)


# ---- messages -------------------------------------------------------------------------------------------------------


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def test_lines_of_openai_messages(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    file = write(
        tmp_path / "lines.jsonl",
        {"messages": [user("a\u2028b"), assistant("c"), user("d")], "max_tokens": 5, "tools": tools, "id": 3},
        {"prompt": "write a poem"},
        {"messages": [user([{"type": "text", "text": "look here"}])]},
    )
    workload = make(f"jsonl:{file}", output_len=33)
    first, second, third = requests(workload)
    assert first.messages is not None
    line = first.messages[0]["content"].removesuffix("a\u2028b")
    assert len(line.split()) == 6
    assert first.messages == (user(line + "a\u2028b"), assistant("c"), user("d"))
    assert (first.max_tokens, first.tools, first.prompt_tokens) == (5, tuple(tools), None)
    assert (second.text, second.max_tokens, second.prompt_tokens) == (line + "write a poem", 33, 10)
    assert third.messages == (user([{"type": "text", "text": line}, {"type": "text", "text": "look here"}]),)
    assert workload.ideal_cached_tokens is None
    assert workload.description.endswith("not used of its lines: id")
    with pytest.raises(ConfigError, match=r"num_requests must be at most the 3 lines of .*\. Given: 4"):
        make(f"jsonl:{file}", num_requests=4)
    with pytest.raises(ConfigError, match="Use completions"):
        make(f"jsonl:{file}", prompts="ids")
    as_chat = requests(make(f"jsonl:{file}", endpoint="chat"))[1]
    assert as_chat.messages == (user(line + "write a poem"),)


def test_a_conversation_is_replayed_turn_by_turn(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    file = write(
        tmp_path / "lines.jsonl",
        {"system": "be kind"},
        {
            "messages": [
                user("one"),
                assistant(None, tool_calls=[call]),
                {"role": "tool", "tool_call_id": "1", "content": "seen"},
                assistant("two words"),
            ],
            "task": 0,
        },
    )
    workload = make(f"jsonl:{file}", think_s=2.0)
    (session,) = workload.sessions
    first, second = session.requests
    assert second.messages is not None
    assert first.messages == second.messages[:2]
    assert second.messages[0]["content"].endswith("be kind")
    assert second.messages[1:] == (
        user("one"),
        assistant("", tool_calls=[call]),  # None would ask for the server's own answer
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
    )
    assert (first.max_tokens, second.max_tokens) == (4, 2)  # '{"name": "look", "arguments": "{}"}' has four words
    assert (first.think_s, second.think_s) == (0, 2.0)
    plain = make(f"jsonl:{file}", endpoint="completions")
    shorter, longer = requests(plain)
    assert shorter.text is not None
    assert longer.text is not None
    assert shorter.text.endswith("\n\nbe kind\n\nuser:\none\n\nassistant:\n")
    assert longer.text == shorter.text + '{"name": "look", "arguments": "{}"}\n\ntool:\nseen\n\nassistant:\n'
    assert shorter.prompt_tokens == len(encode(shorter.text))
    assert plain.ideal_cached_tokens == shorter.prompt_tokens


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[", "Expecting value"),
        ("[1]", "a line must be an object with either messages or prompt"),
        ('{"text": "x"}', "a line must be an object with either messages or prompt"),
        ('{"prompt": "x", "messages": []}', "a line must be an object with either messages or prompt"),
        ('{"prompt": 5}', "prompt must be text, and not empty"),
        ('{"prompt": "x", "tools": []}', "tools go with messages only"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens must be a whole number, at least 1: 0"),
        ('{"messages": []}', "messages must be a list, and not empty"),
        ('{"messages": [{"content": "x"}]}', "each message must be an object with a role"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "a conversation must not be a lone answer"),
        ('{"messages": [{"role": "user"}], "tools": 5}', "tools must be a list"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"prompt": "x"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=f"line 3: {reason}"):
        make(f"jsonl:{file}")


class TestAgent:
    def test_turns_resend_what_was_recorded(self) -> None:
        workload = make("agent")
        assert 4 <= len(workload.sessions) <= 6
        starts = set()
        for session in workload.sessions:
            assert 4 <= len(session.requests) <= 8
            texts = [request.text or "" for request in session.requests]
            for sooner, later in pairwise(texts):
                assert later.startswith(sooner)
            starts.add(texts[0].partition("user:")[0])
        assert len(starts) == 1  # system prompt and tools, for all

    def test_what_is_shared_is_the_start_and_each_history(self) -> None:
        workload = make("agent")
        turns = [[len(encode(request.text or "")) for request in session.requests] for session in workload.sessions]
        start = len(encode((requests(workload)[0].text or "").partition("user:")[0])) + 1  # with the word "user:"
        histories = sum(sum(session[:-1]) for session in turns)
        assert workload.ideal_cached_tokens == histories + start * (len(turns) - 1)

    def test_more_sessions_than_recorded_differ(self) -> None:
        workload = make("agent", num_requests=12)
        assert len(workload.sessions) == 12
        assert len({session.requests[0].text for session in workload.sessions}) == 12

    def test_as_a_chat_with_tools(self) -> None:
        workload = make("agent", endpoint="chat", think_s=0.5)
        for session in workload.sessions:
            assert [request.think_s for request in session.requests] == [0.0] + [0.5] * (len(session.requests) - 1)
            for request in session.requests:
                assert request.messages is not None
                assert request.tools
                assert request.messages[-1]["role"] in ("user", "tool")
                assert None not in [message["content"] for message in request.messages]

    def test_turns_beyond_the_context_are_left_out(self) -> None:
        longest = max(request.prompt_tokens or 0 for request in requests(make("agent")))
        workload = make("agent", max_total_tokens=longest)
        left_out = make("agent").num_requests - workload.num_requests
        assert left_out > 0
        assert workload.description.endswith(f"{left_out} requests left out, beyond the server's context")


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published conversations are not here")
def test_published_conversations() -> None:
    workload = make(f"jsonl:{SHARED / 'agents' / 'taubench_airline_messages.jsonl'}")
    assert workload.num_requests == 70
    assert workload.description.endswith("not used of its lines: task, trial")
    assert make(f"jsonl:{SHARED / 'agents' / 'sweagent_demos.jsonl'}").num_requests > 50


# ---- shared prefixes ------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), max_size=12))
def test_shared_prefixes_are_the_longest_with_any_before(prompts: list[tuple[int, ...]]) -> None:
    def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
        return next(
            (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
        )

    expected = [
        max(min(max((common(prompt, before) for before in prompts[:n]), default=0), len(prompt) - 1), 0)
        for n, prompt in enumerate(prompts)
    ]
    assert shared_prefixes(prompts) == expected
