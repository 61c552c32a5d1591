"""Images on their way into a prompt: decoded, cut into tiles, and given places among the tokens. No torch.

The steps and their rounding are those of the image processor that Idefics3 was trained with
(https://huggingface.co/docs/transformers/model_doc/idefics3): sizes in whole pixels, Lanczos, 8 bits in between.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kitfox.config import VisionConfig
from kitfox.errors import ConfigError, InvalidParameterError, RequestError
from kitfox.request import ImageTile

if TYPE_CHECKING:
    from PIL.Image import Image

    from kitfox.tokenizer import Tokenizer

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 2**26
MAX_SIDE = 4096  # of what an image is resized to, whatever the model says
FAKE_TOKEN, GLOBAL_IMAGE = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True)
class CutImage:
    """An image as a model reads it.

    Attributes:
        tiles: pixels of each, [S, S, 3] bytes: row by row, and the whole image in small behind them.
        digests: of the tiles; made here, on a thread, and not where a step would have to wait for it.
        rows, columns: of the tiles; 0 where the whole in small is all there is.
    """

    tiles: list[bytes]
    digests: list[bytes]
    rows: int
    columns: int


def require_pillow() -> None:
    """Raises ConfigError where images cannot be decoded."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError(
            "a model that reads images needs Pillow: pip install 'kitfox[vision]'", param="model"
        ) from None


def read_data_url(url: str, param: str) -> bytes:
    """The bytes in a base64 data URL.

    Raises:
        InvalidParameterError: it is none.
    """
    head, comma, payload = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise InvalidParameterError(param, "must begin with data:image/TYPE;base64,", url[:64])
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidParameterError(param, "must be valid base64", url[:64]) from None


def cut_image(data: bytes, vision: VisionConfig, param: str) -> CutImage:
    """An encoded image, decoded and cut.

    Raises:
        InvalidParameterError: it is damaged, too large, or of another format than `FORMATS`.
    """
    image = _decode(data, param)
    image = _resize(image, *_bounded(*_with_longest_edge(*image.size, vision.longest_edge)))
    size = vision.image_size
    tiles: list[bytes] = []
    columns = rows = 0
    if vision.splits:
        image = _resize(image, *_whole_tiles(*image.size, size))
        if image.size != (size, size):
            columns, rows = image.width // size, image.height // size
            corners = [(column * size, row * size) for row in range(rows) for column in range(columns)]
            tiles = [image.crop((x, y, x + size, y + size)).tobytes() for x, y in corners]
    tiles.append(_resize(image, size, size).tobytes())
    return CutImage(tiles, [hashlib.sha256(tile).digest() for tile in tiles], rows, columns)


def place_images(
    token_ids: Sequence[int], images: Sequence[CutImage], tokenizer: Tokenizer, vision: VisionConfig
) -> tuple[list[int], list[ImageTile]]:
    """A prompt in which every image token has become the tokens of one of the images, and where their tiles begin.

    Raises:
        RequestError: there are more or fewer image tokens than images.
    """
    num_places = sum(token_id == vision.image_token_id for token_id in token_ids)
    if num_places != len(images):
        raise RequestError(f"the chat template has places for {num_places} of {len(images)} images", param="messages")
    placed: list[int] = []
    tiles: list[ImageTile] = []
    remaining = iter(images)
    for token_id in token_ids:
        if token_id != vision.image_token_id:
            placed.append(token_id)
            continue
        image = next(remaining)
        written = tokenizer.encode(_prompt_text(image, tokenizer, vision), add_special_tokens=False)
        starts = [
            start
            for start, (before, here) in enumerate(zip([-1, *written], written, strict=False))
            if here == vision.image_token_id and before != here
        ]
        assert written.count(vision.image_token_id) == len(image.tiles) * vision.tokens_per_tile
        tiles += [
            ImageTile(start=len(placed) + at, pixels=pixels, digest=digest)
            for at, pixels, digest in zip(starts, image.tiles, image.digests, strict=True)
        ]
        placed += written
    return placed, tiles


def _prompt_text(image: CutImage, tokenizer: Tokenizer, vision: VisionConfig) -> str:
    """What stands for an image in a prompt: each tile behind a mark of its place, a line for each row."""
    tokens = tokenizer.token_text(vision.image_token_id) * vision.tokens_per_tile
    lines = [
        "".join(f"{FAKE_TOKEN}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(image.columns)) + "\n"
        for row in range(image.rows)
    ]
    whole = f"{FAKE_TOKEN}{GLOBAL_IMAGE}{tokens}{FAKE_TOKEN}"
    return "".join(lines) + ("\n" if lines else "") + whole


def _decode(data: bytes, param: str) -> Image:
    import PIL.Image
    import PIL.ImageOps

    try:
        image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
        num_pixels = image.width * image.height
        if num_pixels <= MAX_PIXELS:
            return PIL.ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # decoders raise whatever the bytes lead them to
        limit = f"must be a whole image in one of the formats {', '.join(FORMATS)}"
        problem = "another format" if isinstance(error, PIL.UnidentifiedImageError) else str(error)[:100]
        raise InvalidParameterError(param, limit, problem) from None
    raise InvalidParameterError(param, f"must have at most {MAX_PIXELS} pixels", num_pixels)


def _resize(image: Image, width: int, height: int) -> Image:
    from PIL.Image import Resampling

    return image if image.size == (width, height) else image.resize((width, height), Resampling.LANCZOS)


def _with_longest_edge(width: int, height: int, longest_edge: int) -> tuple[int, int]:
    """The shorter side is even."""
    aspect = width / height
    if width >= height:
        short = int(longest_edge / aspect)
        return longest_edge, max(short + short % 2, 1)
    short = int(longest_edge * aspect)
    return max(short + short % 2, 1), longest_edge


def _bounded(width: int, height: int) -> tuple[int, int]:
    aspect = width / height
    if width >= height and width > MAX_SIDE:
        width, height = MAX_SIDE, int(MAX_SIDE / aspect)
    elif height > width and height > MAX_SIDE:
        width, height = int(MAX_SIDE * aspect), MAX_SIDE
    return max(width, 1), max(height, 1)


def _whole_tiles(width: int, height: int, size: int) -> tuple[int, int]:
    """The next larger size that is cut into squares without a rest."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / size) * size
        height = math.ceil(int(width / aspect) / size) * size
    else:
        height = math.ceil(height / size) * size
        width = math.ceil(int(height * aspect) / size) * size
    return width, height
