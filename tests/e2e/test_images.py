"""Images: the same tiles, prompts and tokens as `transformers`, whatever the chunks, the cache and the company."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from kitfox.engine.llm import LLM
from kitfox.errors import InvalidParameterError, RequestError, UnsupportedModelError, UnsupportedParameterError
from kitfox.images import MAX_PIXELS, CutImage, cut_image, place_images, read_data_url
from kitfox.kernels import library
from kitfox.models.idefics3 import Idefics3Model
from kitfox.outputs import RequestOutput
from kitfox.plan import count_parameters
from kitfox.request import SamplingParams
from kitfox.server.images import MAX_FETCHED_BYTES, ImageReader, ImageSource
from kitfox.tokenizer import load_tokenizer
from kitfox.weights.model_config import read_model_config
from tests.e2e.test_server import MODEL, Server
from tests.models.tiny_models import load_ours
from tests.models.tiny_vision import TILE, TOKENS_PER_TILE, data_url, picture, write_vision_model
from tests.native import native_kernels, needs_native

SIZES = [(32, 32), (1, 1), (96, 96), (70, 20), (20, 71), (300, 100), (33, 200), (96, 64)]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    write_vision_model(path)
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def their_inputs(folder: Path, images: list[PIL.Image.Image], text: str) -> dict[str, torch.Tensor]:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|im_start|>", eos_token="<end_of_utterance>"
    )
    images_of = Idefics3ImageProcessorPil.from_pretrained(folder)
    processor = transformers.Idefics3Processor(images_of, tokenizer, image_seq_len=TOKENS_PER_TILE)
    return dict(processor(images=[images], text=[text], return_tensors="pt", add_special_tokens=False))


def encoded(image: PIL.Image.Image) -> bytes:
    return read_data_url(data_url(image), "x")


def chat(*parts: str | PIL.Image.Image) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("splits", [True, False])
def test_tiles_and_prompts_equal_transformers(splits: bool, tmp_path: Path) -> None:
    write_vision_model(tmp_path, splits=splits)
    vision = read_model_config(tmp_path).vision
    assert vision is not None
    tokenizer = load_tokenizer(tmp_path)
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed=seed)
        theirs = their_inputs(tmp_path, [image], "look: <image>, fox")
        ours = cut_image(encoded(image), vision, "x")
        token_ids, tiles = place_images(tokenizer.encode("look: <image>, fox"), [ours], tokenizer, vision)
        assert token_ids == theirs["input_ids"][0].tolist(), size
        for tile, right in zip(tiles, theirs["pixel_values"][0], strict=True):
            pixels = np.frombuffer(tile.pixels, np.uint8).reshape(TILE, TILE, 3) / 255
            normalised = (pixels - vision.mean) / vision.std
            np.testing.assert_allclose(normalised.transpose(2, 0, 1), right.numpy(), atol=1e-5)
            span = token_ids[tile.start : tile.start + TOKENS_PER_TILE]
            assert span == [vision.image_token_id] * TOKENS_PER_TILE
            assert token_ids[tile.start - 1] != vision.image_token_id


def encode(model: Idefics3Model, image: PIL.Image.Image) -> torch.Tensor:
    vision = model.config.vision
    assert vision is not None
    tiles = [np.frombuffer(pixels, np.uint8).copy() for pixels in cut_image(encoded(image), vision, "x").tiles]
    with torch.inference_mode():
        return torch.cat([model.embed_tile(torch.from_numpy(tile).view(TILE, TILE, 3)) for tile in tiles])


def test_states_of_a_tile_equal_transformers(folder: Path, theirs: transformers.PreTrainedModel) -> None:
    image = picture(TILE, TILE, seed=3)
    inputs = their_inputs(folder, [image], "<image>")
    with torch.inference_mode():
        (right,) = theirs.model.get_image_features(inputs["pixel_values"]).pooler_output
    assert right.std() > 0.1
    torch.testing.assert_close(encode(load_ours(folder), image), right, atol=1e-4, rtol=0)
    if library.load() is not None:
        for num_threads in (1, 2):
            ours = load_ours(folder, native_kernels(num_threads=num_threads))
            torch.testing.assert_close(encode(ours, image), right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"])
def test_both_architectures_load(name: str, tmp_path: Path) -> None:
    theirs = write_vision_model(tmp_path, architecture=name)
    config = load_ours(tmp_path).config
    assert config.architecture == name
    assert count_parameters(config) == theirs.num_parameters()


@dataclass(frozen=True)
class Expected:
    """A conversation with two images, the tokens that follow it, and their log-probabilities."""

    messages: list[dict[str, Any]]
    token_ids: list[int]
    logprobs: list[float]


@pytest.fixture(scope="module")
def expected(folder: Path, theirs: transformers.PreTrainedModel) -> Expected:
    images = [picture(70, 20, seed=1), picture(32, 32, seed=2)]
    prompt = "<|im_start|>User: What is <image> beside <image>?<end_of_utterance>\nAssistant:"
    inputs = their_inputs(folder, images, prompt)
    with torch.inference_mode():
        found = theirs.generate(
            **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    token_ids = found.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    logprobs = [
        logits[0].log_softmax(-1)[token_id].item() for logits, token_id in zip(found.logits, token_ids, strict=True)
    ]
    return Expected(chat("What is ", images[0], " beside ", images[1], "?"), token_ids, logprobs)


def logprobs_of(output: RequestOutput) -> list[float]:
    entries = output.outputs[0].logprobs
    assert entries is not None
    return [entry.logprob for entry in entries]


@pytest.mark.parametrize("cache", ["paged", "radix"])
@pytest.mark.parametrize("budget", [7, 16, 256])
def test_answers_equal_transformers(folder: Path, expected: Expected, cache: str, budget: int) -> None:
    company = chat("What is ", picture(70, 20, seed=8), " beside ", picture(32, 32, seed=2), "?")
    llm = LLM(
        str(folder), dtype="float32", cache=cache, block_size=16, max_model_len=256, num_blocks=64,
        max_num_batched_tokens=budget, max_num_seqs=4,
    )  # fmt: skip
    cold, other, fox = llm.chat([expected.messages, company, chat("A fox")], GREEDY, use_tqdm=False)
    assert cold.outputs[0].token_ids == expected.token_ids
    assert logprobs_of(cold) == pytest.approx(expected.logprobs, abs=1e-3)
    assert logprobs_of(other) != pytest.approx(expected.logprobs, abs=1e-3)
    (warm,) = llm.chat(expected.messages, GREEDY, use_tqdm=False)
    assert logprobs_of(warm) == logprobs_of(cold)
    assert warm.num_cached_tokens > 32
    # The same text, and so the same tokens, over other images: nothing of it may come from the cache.
    same_text = chat("What is ", picture(70, 20, seed=9), " beside ", picture(32, 32, seed=2), "?")
    (third,) = llm.chat(same_text, GREEDY, use_tqdm=False)
    assert third.num_cached_tokens == 0
    assert logprobs_of(llm.chat(chat("A fox"), GREEDY, use_tqdm=False)[0]) == logprobs_of(fox)


def test_answers_survive_preemption(folder: Path, expected: Expected) -> None:
    llm = LLM(
        str(folder), dtype="float32", block_size=16, max_model_len=192, num_blocks=20, max_num_batched_tokens=32,
        max_num_seqs=4,
    )  # fmt: skip
    longer = msgspec.structs.replace(GREEDY, max_tokens=40)
    answers = llm.chat([expected.messages] * 2 + [chat(picture(70, 20, seed=5))], longer, use_tqdm=False)
    assert llm.stats.num_preemptions > 0
    for answer in answers[:2]:
        assert logprobs_of(answer)[:NUM_TOKENS] == pytest.approx(expected.logprobs, abs=1e-3)


@needs_native
def test_a_step_takes_on_one_tile(folder: Path) -> None:
    """Others wait for a step, and a tile's encoding is most of one."""
    llm = LLM(str(folder), block_size=16, max_model_len=256, max_num_batched_tokens=256)
    runner = llm._client.core.executor.runner  # type: ignore[attr-defined]
    tiles_of_steps: list[int] = []
    execute, encode_tile = runner.execute, runner._encode

    def step(*arguments: Any) -> Any:
        tiles_of_steps.append(0)
        return execute(*arguments)

    def encode_one(tile: Any) -> torch.Tensor:
        tiles_of_steps[-1] += 1
        return encode_tile(tile)

    runner.execute, runner._encode = step, encode_one
    llm.chat(chat(picture(96, 96), "?"), SamplingParams(max_tokens=1), use_tqdm=False)
    assert sum(tiles_of_steps) == 10
    assert max(tiles_of_steps) == 1


def test_what_is_no_image_is_refused(folder: Path) -> None:
    vision = read_model_config(folder).vision
    assert vision is not None
    for url, limit in (
        ("https://fox.example/a.png", "must begin with data:image/"),
        ("data:text/plain;base64,AAAA", "must begin with data:image/"),
        ("data:image/png;base64,A", "must be valid base64"),
    ):
        with pytest.raises(InvalidParameterError, match=limit):
            read_data_url(url, "x")
    huge = io.BytesIO()
    PIL.Image.new("1", (2**14, 2**12 + 1)).save(huge, "PNG")
    damaged = encoded(picture(64, 64))[:-200]
    for data, limit in (
        (b"", "must be a whole image"),
        (b"<svg/>", "must be a whole image"),
        (damaged, "must be a whole image"),
        (huge.getvalue(), f"at most {MAX_PIXELS} pixels"),
    ):
        with pytest.raises(InvalidParameterError, match=limit):
            cut_image(data, vision, "x")
    tokenizer = load_tokenizer(folder)
    with pytest.raises(RequestError, match="places for 0 of 1 images"):
        place_images([1, 2], [cut_image(encoded(picture(8, 8)), vision, "x")], tokenizer, vision)


def test_unusual_images_are_read(folder: Path) -> None:
    vision = read_model_config(folder).vision
    assert vision is not None
    upright = picture(20, 64)
    turned = io.BytesIO()
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turn right by a quarter to see it upright
    upright.rotate(90, expand=True).save(turned, "PNG", exif=exif)
    assert cut_image(turned.getvalue(), vision, "x") == cut_image(encoded(upright), vision, "x")
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK"):
        kind = "JPEG" if mode == "CMYK" else "PNG"
        data = read_data_url(
            data_url(upright.convert("L").convert(mode) if mode == "LA" else upright.convert(mode), kind), "x"
        )
        assert len(cut_image(data, vision, "x").tiles[0]) == TILE * TILE * 3


def test_a_variant_that_is_not_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    write_vision_model(tmp_path)
    config = tmp_path / "preprocessor_config.json"
    stored = config.read_text()
    config.write_text(stored.replace(f'"longest_edge": {TILE}}}', '"longest_edge": 24}'))
    with pytest.raises(UnsupportedModelError, match="max_image_size"):
        read_model_config(tmp_path)
    config.write_text(stored.replace('"do_image_splitting"', '"do_rescale": false, "do_image_splitting"'))
    with pytest.raises(UnsupportedModelError, match="do_rescale"):
        read_model_config(tmp_path)


# ---- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server("kitfox", "serve", str(folder), "--max-model-len", "256")
    server.wait_until_ready()
    yield server
    assert server.stop() == 0


def ask(server: Server, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json={"model": MODEL} | body)
    assert response.status_code == 200, response.text
    return response.json()


def test_every_protocol_takes_images(server: Server) -> None:
    image = data_url(picture(32, 32))
    media_type, _, payload = image.removeprefix("data:").partition(";base64,")
    part = {"type": "image_url", "image_url": {"url": image, "detail": "low"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is "}, part]}]
    chat = ask(server, "/v1/chat/completions", messages=messages, max_tokens=4, return_token_ids=True)
    vllm_form = [{"role": "user", "content": [{"type": "text", "text": "What is "}, part | {"image_url": image}]}]
    tokens = ask(server, "/tokenize", messages=vllm_form)["tokens"]
    assert chat["prompt_token_ids"] == tokens
    item = {"type": "input_image", "image_url": image, "detail": "auto"}
    content = [{"type": "input_text", "text": "What is "}, item]
    response = ask(server, "/v1/responses", input=[{"role": "user", "content": content}], max_output_tokens=4)
    assert response["usage"]["input_tokens"] == len(tokens)
    later = ask(server, "/v1/responses", input="And?", previous_response_id=response["id"], max_output_tokens=4)
    assert later["usage"]["input_tokens"] > len(tokens)
    source = {"type": "base64", "media_type": media_type, "data": payload}
    blocks = [{"type": "text", "text": "What is "}, {"type": "image", "source": source}]
    message = ask(server, "/v1/messages", messages=[{"role": "user", "content": blocks}], max_tokens=4)
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == len(tokens)
    counted = ask(server, "/v1/messages/count_tokens", messages=[{"role": "user", "content": blocks}])
    assert counted["input_tokens"] == len(tokens)
    assert server.http.get("/model_info").json()["has_image_understanding"] is True


def test_images_among_calls_and_their_results(server: Server) -> None:
    """The template shows neither: calls and results are put into texts, beside which an image stays where it was."""
    part = {"type": "image_url", "image_url": {"url": data_url(picture(32, 32))}}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [part, {"type": "text", "text": "Look."}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a fox"},
        {"role": "user", "content": [{"type": "text", "text": "And here?"}, part]},
        {"role": "user", "content": "Well?"},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    bare = ask(server, "/tokenize", messages=messages)["tokens"]
    assert len(ask(server, "/tokenize", messages=messages, tools=tools)["tokens"]) > len(bare)
    text = ask(server, "/detokenize", tokens=bare)["prompt"]
    tile = f"<fake_token_around_image>{'<image>' * TOKENS_PER_TILE}"
    in_order = ["User:", "Look.", '{"name": "look"', "Result of look:\na fox\nAnd here?", tile, "\nWell?", "Assistant:"]
    rest = text.replace("<global-img>", "")
    for piece in in_order:
        assert piece in rest, piece
        rest = rest[rest.index(piece) + len(piece) :]


@pytest.mark.parametrize(
    ("url", "fields", "param", "needle"),
    [
        ("http://127.0.0.1:1/a.png", {}, "messages[0].content[0]", "--allowed-media-domains"),
        ("file:///etc/passwd", {}, "messages[0].content[0]", "data: or an http(s): URL"),
        ("data:image/png;base64,AAAA", {}, "messages[0].content[0]", "whole image"),
        ("", {}, "messages[0].content[0].image_url", "must have a url"),
        (None, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "images"),
        (None, {"role": "assistant"}, "messages[0].content[0].type", "images of the assistant are not read"),
        (None, {"chat_template": "hi"}, "chat_template", "--trust-request-chat-template"),
    ],
)
def test_wrong_images_are_named(
    server: Server, url: str | None, fields: dict[str, Any], param: str, needle: str
) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(picture(8, 8)) if url is None else url}}
    message = {"role": fields.pop("role", "user"), "content": [part]}
    response = server.http.post("/v1/chat/completions", json={"model": MODEL, "messages": [message]} | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert needle in error["message"]


def test_a_prompt_of_too_many_tiles_is_refused(server: Server) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(picture(96, 96))}}
    messages = [{"role": "user", "content": [part] * 5}]
    response = server.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


class _Pictures(BaseHTTPRequestHandler):
    """/a.png is an image, /away sends to it, /big never ends."""

    def do_GET(self) -> None:
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/a.png")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(encoded(picture(40, 40)) if self.path == "/a.png" else bytes(MAX_FETCHED_BYTES + 2))

    def log_message(self, *_: object) -> None:
        pass


def test_images_are_fetched_only_from_where_the_operator_allows(folder: Path) -> None:
    vision = read_model_config(folder).vision
    assert vision is not None
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pictures) as pictures:
        Thread(target=pictures.serve_forever, daemon=True).start()
        port = pictures.server_address[1]
        reader = ImageReader(load_tokenizer(folder), vision, ("localhost",))

        def read(url: str) -> CutImage:
            return asyncio.run(reader.read([ImageSource(url, "x")]))[0]

        assert read(f"http://localhost:{port}/a.png") == cut_image(encoded(picture(40, 40)), vision, "x")
        for path, limit in (("away", "could not be fetched"), ("big", "bytes")):
            with pytest.raises(InvalidParameterError, match=limit):
                read(f"http://localhost:{port}/{path}")
        for url in (f"http://127.0.0.1:{port}/a.png", f"http://localhost@127.0.0.1:{port}/a.png"):
            with pytest.raises(UnsupportedParameterError, match="allowed-media-domains"):
                read(url)
        with pytest.raises(InvalidParameterError, match="at most 64 images"):
            asyncio.run(reader.read([ImageSource("data:", "x")] * 65))
        pictures.shutdown()
