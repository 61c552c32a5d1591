"""Images that requests bring: read from data URLs, or fetched from where the operator allows."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kitfox.config import VisionConfig
from kitfox.errors import InvalidParameterError, UnsupportedParameterError
from kitfox.images import CutImage, cut_image, place_images, read_data_url, require_pillow
from kitfox.request import ImageTile

if TYPE_CHECKING:
    from kitfox.tokenizer import Tokenizer

MAX_IMAGES = 64
MAX_FETCHED_BYTES = 16 * 2**20
FETCH_TIMEOUT_S = 10.0
MAX_DECODED_AT_ONCE = 2  # each may take some hundred megabytes meanwhile


@dataclass(frozen=True)
class ImageSource:
    """Where an image is, and what the request calls the place that says so."""

    url: str
    param: str


class ImageReader:
    """Makes a model's tiles of requests' images."""

    def __init__(self, tokenizer: Tokenizer, vision: VisionConfig, allowed_domains: Sequence[str] = ()):
        """`allowed_domains` are the hosts that images may be fetched from.

        Raises:
            ConfigError: images cannot be decoded here.
        """
        require_pillow()
        self._tokenizer = tokenizer
        self._vision = vision
        self._allowed_domains = frozenset(allowed_domains)
        self._turns = asyncio.Semaphore(MAX_DECODED_AT_ONCE)

    async def read(self, sources: Sequence[ImageSource]) -> list[CutImage]:
        """The images, cut, in the same order.

        Raises:
            RequestError: there are too many, or one of them cannot be had.
        """
        if len(sources) > MAX_IMAGES:
            raise InvalidParameterError("messages", f"must have at most {MAX_IMAGES} images", len(sources))
        return [await self._read(source) for source in sources]

    def place(self, token_ids: list[int], images: Sequence[CutImage]) -> tuple[list[int], list[ImageTile]]:
        """See `kitfox.images.place_images`."""
        return place_images(token_ids, images, self._tokenizer, self._vision)

    async def _read(self, source: ImageSource) -> CutImage:
        if source.url.startswith("data:"):
            data = read_data_url(source.url, source.param)
        else:
            data = await asyncio.to_thread(self._fetch, source)
        async with self._turns:
            return await asyncio.to_thread(cut_image, data, self._vision, source.param)

    def _fetch(self, source: ImageSource) -> bytes:
        address = urllib.parse.urlsplit(source.url)
        if address.scheme not in ("http", "https") or address.hostname is None:
            raise InvalidParameterError(source.param, "must be a data: or an http(s): URL", source.url[:64])
        if address.hostname not in self._allowed_domains:
            reason = f"is not fetched: {address.hostname[:100]} is not one of --allowed-media-domains. Send a data: URL"
            raise UnsupportedParameterError(source.param, reason)
        try:
            with _WITHOUT_REDIRECTS.open(source.url, timeout=FETCH_TIMEOUT_S) as response:
                data: bytes = response.read(MAX_FETCHED_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InvalidParameterError(source.param, f"could not be fetched ({error})", source.url[:100]) from None
        if len(data) > MAX_FETCHED_BYTES:
            raise InvalidParameterError(source.param, f"must have at most {MAX_FETCHED_BYTES} bytes", source.url[:100])
        return data


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A host that is allowed must not be able to send the server to one that is not."""

    def redirect_request(self, *_: Any) -> None:
        return None


# Without proxies of the environment: an address is fetched from the host that it names.
_WITHOUT_REDIRECTS = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
