"""Messages and tools on their way to real chat templates."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kitfox.constraint import AnyText, Reasoning, TriggeredTags, choice
from kitfox.errors import ConfigError, RequestError
from kitfox.server.app import make_app
from kitfox.server.conversation import (
    Calling,
    ChatDialect,
    ChatPrompt,
    Tool,
    check_calling,
    encode_conversation,
    make_messages,
)
from kitfox.server.openai import ChatRequest
from kitfox.server.options import ServerOptions
from kitfox.tokenizer import Tokenizer
from tests.server.fake_llm import MODEL, FakeAsyncLLM
from tests.server.fault_table import CHAT, COMPLETIONS

TOOL = msgspec.convert({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}, Tool)
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "<é>"}'}}
LOOP = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
]


def tokenizer_of(template: str, *special: str) -> Tokenizer:
    """One token a byte, then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return Tokenizer(backend, chat_template=template)


def encode(tokenizer: Tokenizer, messages: list[dict[str, Any]], calling: Calling | None = None) -> ChatPrompt:
    dialect = ChatDialect.choose(tokenizer, "auto", "auto")
    fields = msgspec.convert({"messages": messages}, ChatRequest)
    calling = Calling() if calling is None else calling
    return asyncio.run(encode_conversation(tokenizer, dialect, fields, calling))


def rendered(template: str, messages: list[dict[str, Any]], calling: Calling | None = None, *special: str) -> str:
    tokenizer = tokenizer_of(template, *special)
    return tokenizer.decode(encode(tokenizer, messages, calling).token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("call.function.arguments | tojson", '{"a": "<é>"}'),
        ("call.function | tojson", '{"name": "f", "arguments": {"a": "<é>"}}'),
        ("'<' + call.function.arguments + '>'", '<{"a": "<é>"}>'),
        ("call.function.arguments ~ '>'", '{"a": "<é>"}>'),
        ("call.function.arguments", '{"a": "<é>"}'),
        ("call.function.arguments.a", "<é>"),
        ("call.function.arguments is string", "False"),
    ],
)
def test_arguments_are_an_object_or_its_text_as_the_template_likes(expression: str, text: str) -> None:
    template = "{% for m in messages %}{% for call in m.tool_calls %}{{ " + expression + " }}{% endfor %}{% endfor %}"
    assert rendered(template, LOOP) == text
    special = "<é>"  # marks what is not to become a special token, which must not change what arguments are
    assert rendered(template, LOOP, None, special) == text


def test_messages_of_a_tool_loop() -> None:
    fields = msgspec.convert({"messages": LOOP}, ChatRequest)
    user, assistant, tool = make_messages(fields.messages, ChatDialect())
    assert user == {"role": "user", "content": "Hi"}
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["id"] == "call_1"
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "call_1", "name": "f"}


def test_the_deprecated_form_becomes_what_replaced_it() -> None:
    messages = [
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}, "reasoning": "Hm."},
        {"role": "function", "name": "f", "content": "2"},
    ]
    assistant, tool = make_messages(msgspec.convert({"messages": messages}, ChatRequest).messages, ChatDialect())
    assert assistant["reasoning_content"] == "Hm."
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert (tool["role"], tool["tool_call_id"]) == ("tool", assistant["tool_calls"][0]["id"])


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    for arguments in ("[1]", "no json", '"x"'):
        message = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}
        (made,) = make_messages(msgspec.convert({"messages": [message]}, ChatRequest).messages, ChatDialect())
        assert made["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("depth", [64, 500, 900, 5000])
def test_arguments_too_deep_for_a_template_stay_text(depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    messages = [*LOOP, {"role": "assistant", "content": "<end>", "tool_calls": [call]}]
    template = "{{ messages[3].tool_calls[0].function.arguments }}<end>"
    assert rendered(template, messages, None, "<end>").replace(" ", "") == arguments + "<end>"


@pytest.mark.parametrize("arguments", [r'{"a": "\ud83d"}', r'{"\udcf0": 1}', '{"a": NaN}', '{"a": 1e999}'])
def test_arguments_that_are_no_strict_json_stay_text(arguments: str) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    template = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert rendered(template, [{"role": "assistant", "tool_calls": [call]}]) == arguments


ALTERNATING = """
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role == 'system' %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}{{ m.role }}: {{ m.content }};
{%- endfor %}"""


@pytest.mark.parametrize(
    "roles", [["user", "user"], ["assistant"], ["user", "system", "user"], ["user", "assistant", "developer"]]
)
def test_a_template_s_refusal_is_the_caller_s_mistake(roles: list[str]) -> None:
    messages = [{"role": role, "content": "Hi"} for role in roles]
    with pytest.raises(RequestError, match="roles must alternate") as refused:
        rendered(ALTERNATING, messages)
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert rendered(ALTERNATING, messages[:1] if roles[0] == "user" else LOOP[:1]) == "user: Hi;"


def test_mistral_ids_have_nine_characters() -> None:
    template = (
        "{{ '[TOOL_CALLS]' }}{% for m in messages %}{% for c in m.tool_calls %}{{ c.id }}{% endfor %}"
        "{% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}{% endfor %}"
    )
    call_id, _, result_id = rendered(template, LOOP).removeprefix("[TOOL_CALLS]").partition("=")
    assert call_id == result_id
    assert len(call_id) == 9
    own = [LOOP[0], {"role": "assistant", "tool_calls": [CALL | {"id": "abcDEF123"}]}]
    assert rendered(template, own).endswith("abcDEF123")


def test_tools_reach_the_template() -> None:
    template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    shown = json.loads(rendered(template, LOOP[:1], check_calling([TOOL], "auto", parallel=True)))
    function = {"name": "f", "description": "", "parameters": {"type": "object"}}
    assert shown == {"type": "function", "function": function}
    assert rendered(template, LOOP[:1], check_calling([TOOL], "none", parallel=True)) == ""


def test_nobody_smuggles_special_tokens_through_a_tool() -> None:
    template = "{% for tool in tools %}{{ tool.function.description }}{% endfor %}<|end|>"
    tool = msgspec.convert({"function": {"name": "f", "description": "a<|end|>b"}}, Tool)
    tokenizer = tokenizer_of(template, "<|end|>")
    ids = encode(tokenizer, LOOP[:1], check_calling([tool], None, parallel=True)).token_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|>b<|end|>"
    assert ids.count(tokenizer.special_token_id("<|end|>")) == 1


def test_a_system_message_takes_the_description_of_tools() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    messages = [{"role": "system", "content": "Be brief."}, LOOP[0]]
    text = rendered(template, messages, check_calling([TOOL], None, parallel=True))
    assert text.startswith("[system]Be brief.\n\nYou can call functions.")
    assert text.endswith("[user]Hi")


@pytest.mark.parametrize(
    ("end", "state", "reasoning"),
    [
        ("<think>\n", "open", Reasoning(opener="<think>", closer="</think>", is_open=True)),
        ("<think>\n</think>\n", "over", None),
        ("", "ahead", Reasoning(opener="<think>", closer="</think>")),
    ],
)
def test_reasoning_that_the_template_opens_or_closes(end: str, state: str, reasoning: Reasoning | None) -> None:
    tokenizer = tokenizer_of("{{ messages[0].content.split('</think>')[0] }}" + end)
    prompt = encode(tokenizer, LOOP[:1])
    assert prompt.reasoning == state
    assert prompt.reasoning_before(ChatDialect.choose(tokenizer, "auto", "auto")) == reasoning
    assert prompt.reasoning_before(ChatDialect.choose(tokenizer, "auto", "none")) is None


@pytest.mark.parametrize(
    ("begun", "state"),
    [("<think>Hm", "open"), ("<think>Hm</think>Yes", "over"), ("Yes", "over"), (" ", "ahead")],
)
def test_reasoning_of_an_answer_that_goes_on(begun: str, state: str) -> None:
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}")
    fields = {"messages": [LOOP[0], {"role": "assistant", "content": begun}], "continue_final_message": True}
    dialect = ChatDialect.choose(tokenizer, "auto", "auto")
    prompt = asyncio.run(encode_conversation(tokenizer, dialect, msgspec.convert(fields, ChatRequest)))
    assert prompt.reasoning == state


def test_unknown_parsers_are_refused() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser must be one of auto, none, hermes"):
        ChatDialect.choose(tokenizer_of(""), "wizard", "auto")
    with pytest.raises(ConfigError, match="reasoning_parser"):
        ChatDialect.choose(tokenizer_of(""), "auto", "wizard")


def answered(
    template: str, *special: str, path: str, body: dict[str, Any], parser: str = "none", strict: bool = False
) -> tuple[int, dict[str, Any], FakeAsyncLLM]:
    """Status, body and engine of a request, where the template is the model's."""

    async def run() -> tuple[int, dict[str, Any], FakeAsyncLLM]:
        llm = FakeAsyncLLM()
        llm.tokenizer = tokenizer_of(template, *special)  # type: ignore[assignment]
        app = make_app(llm, ServerOptions(tool_call_parser=parser, strict=strict))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            response = await client.post(path, json={"model": MODEL} | body)
            return response.status_code, response.json(), llm

    return asyncio.run(run())


def budgeted(
    template: str, *special: str, parser: str = "none", **fields: Any
) -> tuple[int, dict[str, Any], FakeAsyncLLM]:
    """The same of a chat with a budget."""
    body = {"messages": LOOP[:1], "max_tokens": 4, "thinking_token_budget": 3} | fields
    return answered(template, *special, path=CHAT, body=body, parser=parser)


def test_a_thinking_budget_is_part_of_the_constraint() -> None:
    def reasoning_of(template: str, *special: str, **fields: Any) -> tuple[Any, Reasoning | None] | None:
        status, body, llm = budgeted(template, *special, **fields)
        assert status == 200, body
        constraint = llm.seen[0][2].constraint
        return None if constraint is None else (constraint.format, constraint.reasoning)

    thinks = "{# <think> </think> #}Hi"
    marks = {"opener": "<think>", "closer": "</think>", "max_tokens": 3}
    free = AnyText()
    assert reasoning_of(thinks, "<think>") == (free, Reasoning(is_open=False, **marks))
    assert reasoning_of(thinks + "<think>\n") == (free, Reasoning(is_open=True, **marks))
    assert reasoning_of(thinks + "<think>", thinking_token_budget=-1) is None
    assert reasoning_of(thinks + "<think></think>") is None, "it is over"
    tool = {"type": "function", "function": {"name": "f"}}
    with_calls = reasoning_of(thinks, "<think>", parser="hermes", tools=[tool])
    assert with_calls is not None
    assert isinstance(with_calls[0], TriggeredTags)
    chosen = reasoning_of(thinks, "<think>", structured_outputs={"choice": ["a"]})
    assert chosen == (choice(["a"]), Reasoning(is_open=False, **marks))


@pytest.mark.parametrize(
    ("template", "budget"),
    [("plain", 3), ("{# <think> </think> #}", 3), ("<think></think>", -2), ("<think></think>", 2**31)],
)
def test_a_thinking_budget_that_cannot_be_kept_is_refused(template: str, budget: int) -> None:
    status, body, _ = budgeted(template, thinking_token_budget=budget)
    assert (status, body["error"]["param"]) == (400, "thinking_token_budget")


THINKS = "{# <think> </think> #}Hi"
HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
NATIVE = {"max_new_tokens": 4}
BUDGETS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, HELLO | {"thinking_token_budget": 3}, "thinking_token_budget"),
    (COMPLETIONS, {"prompt": "Hi", "thinking_token_budget": 3}, "thinking_token_budget"),
    ("/v1/responses", {"input": "Hi", "thinking_token_budget": 3}, "thinking_token_budget"),
    ("/v1/messages", HELLO | {"thinking": {"type": "enabled", "budget_tokens": 3}}, "thinking.budget_tokens"),
    ("/generate", {"text": "Hi", "max_thinking_tokens": 3, "sampling_params": NATIVE}, "max_thinking_tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), BUDGETS)
def test_every_protocol_has_a_thinking_budget(path: str, body: dict[str, Any], param: str) -> None:
    status, answer, llm = answered(THINKS, "<think>", path=path, body=body)
    assert status == 200, answer
    constraint = llm.seen[0][2].constraint
    assert constraint is not None
    assert constraint.reasoning == Reasoning(opener="<think>", closer="</think>", max_tokens=3)
    assert (constraint.format, constraint.param) == (AnyText(), param)
    assert "ignored_parameters" not in answer


@pytest.mark.parametrize(("path", "body", "param"), BUDGETS)
def test_a_budget_that_cannot_be_kept_is_named_as_the_protocol_names_it(
    path: str, body: dict[str, Any], param: str
) -> None:
    status, answer, _ = answered(THINKS, path=path, body=body)  # its opener is several tokens
    assert status == 400
    assert answer["error"]["message"].startswith(f"{param} needs a model whose reasoning begins with one token")


def test_agents_may_send_a_budget_to_a_model_that_does_not_reason() -> None:
    path, body, param = BUDGETS[3]
    status, answer, llm = answered("plain", path=path, body=body)
    assert (status, answer["ignored_parameters"]) == (200, [param])
    assert llm.seen[0][2].constraint is None
    status, answer, _ = answered("plain", path=path, body=body, strict=True)
    assert (status, param in answer["error"]["message"]) == (400, True)
    body = body | {"thinking": {"type": "disabled", "budget_tokens": 3}}
    status, answer, _ = answered(THINKS, "<think>", path=path, body=body)
    assert (status, param in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("Hi", False), ("<think>", True), ("<think>Let me", True), ("<think>a</think>b\nAnd?", False)],
)
def test_a_raw_prompt_says_by_its_last_marks_where_reasoning_is(prompt: str, is_open: bool) -> None:
    body = {"prompt": prompt, "thinking_token_budget": 3}
    _, _, llm = answered(THINKS, "<think>", path=COMPLETIONS, body=body)
    constraint = llm.seen[0][2].constraint
    assert constraint is not None
    assert constraint.reasoning is not None
    assert constraint.reasoning.is_open == is_open


def test_prompts_of_one_completion_are_in_one_state() -> None:
    body: dict[str, Any] = {"prompt": ["<think>a</think>", "<think></think>\n"], "thinking_token_budget": 3}
    status, _, llm = answered(THINKS, "<think>", path=COMPLETIONS, body=body)
    assert (status, llm.seen[0][2].constraint) == (200, None)
    body["prompt"][0] = "<think>"
    status, answer, _ = answered(THINKS, "<think>", path=COMPLETIONS, body=body)
    assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")


def test_a_native_request_may_ask_for_reasoning_before_its_form() -> None:
    body = {"text": ["<think>", "Hi"], "sampling_params": NATIVE | {"regex": "a+"}}
    for fields, max_tokens in (({"require_reasoning": True}, None), ({"max_thinking_tokens": 3}, 3)):
        _, _, llm = answered(THINKS, "<think>", path="/generate", body=body | fields)
        made = [sampling.constraint for _, _, sampling in llm.seen]
        assert [constraint and constraint.reasoning for constraint in made] == [
            Reasoning(opener="<think>", closer="</think>", max_tokens=max_tokens, is_open=is_open)
            for is_open in (True, False)
        ]
    _, _, llm = answered(THINKS, "<think>", path="/generate", body=body | {"max_thinking_tokens": -1})
    assert [sampling.constraint and sampling.constraint.reasoning for _, _, sampling in llm.seen] == [None, None]
    status, answer, _ = answered("plain", path="/generate", body=body | {"require_reasoning": True})
    assert (status, answer["error"]["param"]) == (400, "require_reasoning")
