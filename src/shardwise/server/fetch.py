"""The bytes behind an image_url or video_url: data URLs, http(s) and local files where the server allows them."""

import asyncio
import base64
import binascii
import ipaddress
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from shardwise.config import ServeConfig
from shardwise.server.decode import MediaError

Result = TypeVar("Result")
DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<options>(?:;[\w.+=-]+)*),", re.IGNORECASE)
BASE64_CHARACTERS = 1 << 20  # decoded at once; in between, other threads run
REMOTE_SECONDS, REDIRECTS = 15.0, 3

InThread = Callable[..., Any]  # awaits function(*args) in a thread


class Fetcher:
    """Reads URLs within the limits of `config`. Belongs to one event loop."""

    def __init__(self, config: ServeConfig) -> None:
        self._limit_bytes = config.max_body_bytes
        self._remote = config.allow_remote_images
        self._folder = Path(config.allowed_media_path).resolve() if config.allowed_media_path else None

    async def read(self, url: str, kind: str, in_thread: InThread) -> bytes:
        """What `url` holds; kind: image or video, for the type of a data URL. Raises MediaError."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return await in_thread(decode_data_url, url, kind)
        if scheme in ("http", "https"):
            return await self._fetch(url)
        if scheme == "file":
            return await in_thread(self._read_file, url)
        raise MediaError("the url must begin with data:, http:, https: or file:")

    def _read_file(self, url: str) -> bytes:
        if self._folder is None:
            raise MediaError("local files are not read; start the server with --allowed-media-path FOLDER")
        parts = urlsplit(url)
        path = Path(unquote(parts.path))
        try:
            path = path.resolve()
            inside = parts.netloc in ("", "localhost") and path.is_relative_to(self._folder)
            if not inside or not path.is_file():  # one message: the client must not learn which files there are
                raise MediaError("no such file below --allowed-media-path")
            with path.open("rb") as file:
                data = file.read(self._limit_bytes + 1)
        except (OSError, ValueError):
            raise MediaError("no such file below --allowed-media-path") from None
        if len(data) > self._limit_bytes:
            raise MediaError(f"the file has more than {self._limit_bytes:,} bytes (--max-body-bytes)")
        return data

    async def _fetch(self, url: str) -> bytes:
        if self._remote == "no":
            raise MediaError("http URLs are not fetched; send the picture as a data URL, or start the server with "
                             "--allow-remote-images")  # fmt: skip
        import httpx

        try:
            async with asyncio.timeout(REMOTE_SECONDS), httpx.AsyncClient(trust_env=False) as client:
                for _ in range(REDIRECTS + 1):
                    await self._check_host(url)
                    async with client.stream("GET", url, follow_redirects=False) as response:
                        if response.is_redirect:
                            url = urljoin(url, response.headers["location"])
                            continue
                        return await self._body(response)
        except TimeoutError:
            raise MediaError(f"the url did not answer within {REMOTE_SECONDS:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError) as error:
            if isinstance(error, MediaError):
                raise
            raise MediaError(f"the url cannot be fetched: {str(error)[:150] or type(error).__name__}") from None
        raise MediaError(f"the url redirects more than {REDIRECTS} times")

    async def _body(self, response: Any) -> bytes:
        stream = response.extensions.get("network_stream")
        peer = stream.get_extra_info("server_addr") if stream else None
        if peer:  # a name may have got another address since it was checked
            self._check_address(peer[0])
        if response.status_code != 200:
            raise MediaError(f"the url answered with HTTP {response.status_code}")
        data = bytearray()
        async for part in response.aiter_bytes():
            data += part
            if len(data) > self._limit_bytes:
                raise MediaError(f"the url has more than {self._limit_bytes:,} bytes (--max-body-bytes)")
        return bytes(data)

    async def _check_host(self, url: str) -> None:
        """Raises MediaError unless all addresses of the host may be asked."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise MediaError("the url is no http(s) URL with a host")
        found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM)
        for *_, address in found:
            self._check_address(str(address[0]))

    def _check_address(self, address: str) -> None:
        if self._remote == "public" and not ipaddress.ip_address(address.partition("%")[0]).is_global:
            raise MediaError("the url is of an address that is not public; --allow-remote-images any allows such")


def decode_data_url(url: str, kind: str) -> bytes:
    """The bytes of a data URL in base64. Raises MediaError; its type must be of `kind`, or any file's."""
    match = DATA_URL.match(url[:256])
    if match is None or not match["options"].lower().endswith(";base64"):
        raise MediaError(f"the data URL must begin with data:{kind}/...;base64,")
    declared = (match["type"] or "").lower()
    # An animation is a picture to one and a video to the other; what the file is, it says itself.
    if declared and declared != "application/octet-stream" and declared.split("/")[0] not in ("image", kind):
        raise MediaError(f"the data URL says {declared[:60]!r}, and {kind}/... is needed")
    start, data = match.end(), bytearray()
    try:
        for at in range(start, len(url), BASE64_CHARACTERS):
            data += base64.b64decode(url[at : at + BASE64_CHARACTERS], validate=True)
    except (binascii.Error, ValueError):
        raise MediaError("the data URL is not valid base64") from None
    return bytes(data)
