"""Chat templates that come with a request: rendered as the model's own would be, and harmless whatever they do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kitfox.errors import RequestError
from kitfox.server import templates
from kitfox.server.app import make_app
from kitfox.server.options import ServerOptions
from kitfox.server.templates import CallArguments, TemplateRenderer
from tests.server.fake_llm import MODEL, FakeAsyncLLM
from tests.server.fault_table import CHAT, stream_chunks
from tests.server.test_conversation import LOOP, TOOL, tokenizer_of

TRUSTING = ServerOptions(trust_request_chat_template=True)
ENDLESS = "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}"
OWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer()
    yield renderer
    renderer.stop()


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "RENDER_TIMEOUT_S", 0.5)


def test_renders_as_this_process_would(renderer: TemplateRenderer) -> None:
    source = "{% for m in messages %}{{ m | tojson }}{{ m.arguments + '!' }}{{ m.arguments.a }}\n{% endfor %}"
    variables = {"messages": [{"role": "user", "arguments": CallArguments({"a": "<é>"})}]}
    assert renderer.render(source, variables) == '{"role": "user", "arguments": {"a": "<é>"}}{"a": "<é>"}!<é>\n'


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for %}", "Expected"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10**6) | list }}", "too big"),
        ("{{ '\\ud800' }}", "surrogates"),
        ("{{ 'a' * (2**22 + 1) }}", "more than"),
        ("{{ 'a' * 2**36 }}", "MemoryError"),
        ("x" * (templates.MAX_TEMPLATE_CHARS + 1), "at most"),
    ],
)
def test_a_template_that_fails_is_the_caller_s_mistake(renderer: TemplateRenderer, source: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as raised:
        renderer.render(source, {"messages": []})
    assert raised.value.param == "chat_template"
    assert renderer.render("{{ a }}", {"a": "next"}) == "next"


@pytest.mark.parametrize("source", [ENDLESS, "{{ 2**(3**30) }}", "{{ ('%' ~ 10**11 ~ 'd') | format(1) }}"])
@pytest.mark.usefixtures("short_deadline")
def test_a_template_that_runs_on_is_ended(renderer: TemplateRenderer, source: str) -> None:
    with pytest.raises(RequestError, match="chat_template"):
        renderer.render(source, {})
    assert renderer.render("{{ a }}", {"a": "next"}) == "next"


def test_ends_with_the_server() -> None:
    renderer = TemplateRenderer()
    assert renderer.render("a", {}) == "a"
    process = renderer._process
    assert process is not None
    renderer.stop()
    assert process.poll() is not None


def answers(*requests: tuple[str, dict[str, Any]], options: ServerOptions = TRUSTING) -> list[httpx.Response]:
    """Of requests sent at once to one server, whose template shows nothing."""

    async def run() -> list[httpx.Response]:
        llm = FakeAsyncLLM()
        llm.tokenizer = tokenizer_of("own", "<end>")  # type: ignore[assignment]
        app = make_app(llm, options)  # type: ignore[arg-type]
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client,
        ):
            posts = (client.post(path, json={"model": MODEL, "max_tokens": 4} | body) for path, body in requests)
            return await asyncio.gather(*posts)

    return asyncio.run(run())


def prompt_of(fields: dict[str, Any]) -> str:
    """The prompt that a chat request makes."""
    (response,) = answers(
        (CHAT, {"messages": [{"role": "user", "content": "Hi <end>"}], "return_prompt_text": True} | fields)
    )
    assert response.status_code == 200, response.text
    return response.json()["prompt_text"]


def test_a_request_s_template_makes_its_prompt() -> None:
    assert prompt_of({}) == "own"
    assert prompt_of({"chat_template": OWN}) == "<user>Hi <end><bot>"
    assert prompt_of({"chat_template": OWN, "add_generation_prompt": False}) == "<user>Hi <end>"
    template = {"chat_template": "{{ greeting }}", "chat_template_kwargs": {"greeting": "Ho"}}
    assert prompt_of(template) == "Ho"
    shown, described = answers(
        ("/tokenize", {"messages": LOOP, "chat_template": OWN + "<end>"}), ("/tokenize", {"messages": LOOP})
    )
    assert shown.json()["tokens"][-1] == 256  # the template's own special token is one
    assert shown.json()["count"] > described.json()["count"]


def test_what_a_request_s_template_shows_of_tools_counts() -> None:
    tool = {"type": "function", "function": {"name": TOOL.function.name}}
    assert "You can call functions" in prompt_of({"tools": [tool], "chat_template": OWN})
    assert prompt_of({"tools": [tool], "chat_template": "{{ tools[0].function.name }}"}) == "f"


def test_is_refused_unless_the_server_trusts_its_clients() -> None:
    hello = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": OWN}
    requests = [(CHAT, hello), ("/tokenize", hello), ("/tokenize", {"prompt": "Hi", "chat_template": OWN})]
    for response in answers(*requests, options=ServerOptions()):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template"
        assert "--trust-request-chat-template" in response.json()["error"]["message"]


@pytest.mark.usefixtures("short_deadline")
def test_an_endless_template_holds_up_nobody() -> None:
    """Others' streams begin and end while it runs, and the next template gets its turn."""
    user = [{"role": "user", "content": "Hi"}]
    ended: list[str] = []

    async def run() -> list[httpx.Response]:
        llm = FakeAsyncLLM()
        llm.tokenizer = tokenizer_of("own")  # type: ignore[assignment]
        app = make_app(llm, TRUSTING)  # type: ignore[arg-type]
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client,
        ):

            async def post(name: str, **fields: Any) -> httpx.Response:
                response = await client.post(CHAT, json={"model": MODEL, "messages": user, "max_tokens": 4} | fields)
                ended.append(name)
                return response

            return await asyncio.gather(
                post("endless", chat_template=ENDLESS), post("next", chat_template=OWN), post("stream", stream=True)
            )

    endless, following, stream = asyncio.run(run())
    assert (endless.status_code, endless.json()["error"]["param"]) == (400, "chat_template")
    assert following.status_code == 200
    assert stream_chunks(stream.text)[-1]["choices"][0]["finish_reason"] == "length"
    assert ended == ["stream", "endless", "next"]
