"""A batch on the real server, killed in the middle: the next server goes on, and live traffic is answered meanwhile."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.test_server import MODEL, Server

pytestmark = pytest.mark.model
NUM_LINES = 60


def start_server(folder: Path) -> Server:
    server = Server("kitfox", "serve", "smollm2-135m", "--storage-dir", str(folder), "--max-model-len", "512")
    server.wait_until_ready()
    return server


def line(number: int) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": f"{number} and one are", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}


def test_a_batch_survives_the_end_of_its_server(tmp_path: Path) -> None:
    server = start_server(tmp_path)
    try:
        client = openai.OpenAI(api_key="none", base_url=f"{server.url}/v1")
        content = "".join(json.dumps(line(number)) + "\n" for number in range(NUM_LINES)).encode()
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"owner": "fox"}
        )
        while (counts := client.batches.retrieve(batch.id).request_counts) is None or counts.completed < 3:
            time.sleep(0.01)
        live = client.completions.create(model=MODEL, prompt="5 and one are", max_tokens=24, temperature=0)
        server.process.kill()
        server.process.wait()
    finally:
        server.stop()
    server = start_server(tmp_path)
    try:
        client = openai.OpenAI(api_key="none", base_url=f"{server.url}/v1")
        deadline = time.monotonic() + 60
        while (batch := client.batches.retrieve(batch.id)).status != "completed" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        assert batch.output_file_id is not None
        entries = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(int(entry["custom_id"]) for entry in entries) == list(range(NUM_LINES))
        texts = {entry["custom_id"]: entry["response"]["body"]["choices"][0]["text"] for entry in entries}
        assert texts["5"].startswith(live.choices[0].text)
        vectors = client.embeddings.create(model=MODEL, input=["a red fox", "a fox that is red", "taxes"]).data
        likeness = [sum(x * y for x, y in zip(vectors[0].embedding, v.embedding, strict=True)) for v in vectors]
        assert likeness[0] == pytest.approx(1)
        assert likeness[1] > likeness[2]
    finally:
        server.stop()
