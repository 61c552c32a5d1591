"""The engine process from the outside, before it has connected."""

from __future__ import annotations

import asyncio
import time

import zmq

from kitfox.config import EngineConfig
from kitfox.engine.client import (
    AbortRequests,
    ControlAnswer,
    EngineReady,
    ProcessClient,
    encoder,
    message_decoder,
)
from kitfox.outputs import EngineStats


def run_late(config: EngineConfig, num_blocks: int, requests_address: str, replies_address: str) -> None:
    """Connects late, says that it is ready, and answers with the numbers it was sent."""
    time.sleep(0.3)
    context = zmq.Context()
    replies, requests = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    replies.connect(replies_address)
    requests.connect(requests_address)
    replies.send(encoder.encode(EngineReady(num_blocks=1, block_size=1, phases=[])))
    while True:
        message = message_decoder.decode(requests.recv())
        if not isinstance(message, AbortRequests):
            return
        replies.send(encoder.encode(ControlAnswer(int(message.request_ids[0]), True, EngineStats())))


def test_what_is_sent_before_it_has_connected_arrives_in_order() -> None:
    async def numbers() -> list[int]:
        client = ProcessClient(EngineConfig(), 1, run_late)
        try:
            for number in range(3):
                client.abort([str(number)])
            assert isinstance(await client.receive(), EngineReady)
            client.abort(["3"])
            replies = [await client.receive() for _ in range(4)]
            return [reply.number for reply in replies if isinstance(reply, ControlAnswer)]
        finally:
            client.shutdown()

    assert asyncio.run(numbers()) == [0, 1, 2, 3]
