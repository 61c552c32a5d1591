"""Every input of the fault table, each followed by a request that must still be answered as before."""

from __future__ import annotations

import asyncio

import httpx

from kitfox.server.app import make_app
from tests.server.fake_llm import MODEL, REPLY, FakeAsyncLLM
from tests.server.fault_table import CHAT, COMPLETIONS, FAULTS, check_fault


def test_faults_are_answered_and_hurt_nobody() -> None:
    llm = FakeAsyncLLM()
    failures: list[str] = []

    async def run() -> None:
        transport = httpx.ASGITransport(app=make_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for fault in FAULTS:
                headers = {"content-type": "application/json"}
                response = await client.post(fault.path, content=fault.content(MODEL), headers=headers)
                try:
                    check_fault(fault, response.status_code, response.text)
                except AssertionError as error:
                    failures.append(f"{fault.row} {fault.name}: {str(error)[:300]}")
                good = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": "Hello", "max_tokens": 100})
                assert good.json()["choices"][0]["text"] == REPLY, fault.name

    asyncio.run(run())
    assert not failures, "\n".join(failures)
    assert not llm.in_flight


def test_the_table_is_unambiguous() -> None:
    assert len({fault.content(MODEL) for fault in FAULTS}) > 200
    assert {fault.path for fault in FAULTS} == {COMPLETIONS, CHAT, "/tokenize"}
