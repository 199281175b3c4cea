"""Frames between the API process and the first rank: asyncio on one side of a Unix socket, plain threads on the other.

A frame is its length (four bytes, big-endian) and a msgpack array of messages, so all tokens of a step travel together.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shardwise.engine.messages import FromEngine, ToEngine

Decoded = TypeVar("Decoded")

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 << 20


class FrameError(ValueError):
    """A frame is too long, ends early or is not what was agreed on. The connection is of no more use."""


def pack(messages: Sequence[Any], limit_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """One frame of `messages`. Raises FrameError, before anything is sent, if it is longer than `limit_bytes`."""
    body = msgspec.msgpack.encode(messages)
    if len(body) > limit_bytes:
        raise FrameError(f"a message of {len(body)} bytes is longer than the limit of {limit_bytes} bytes")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def _body_bytes(header: bytes, limit_bytes: int) -> int:
    length = int.from_bytes(header, "big")
    if length > limit_bytes:
        raise FrameError(f"a frame says that it has {length} bytes; the limit is {limit_bytes} bytes")
    return length


def _unpack(decoder: msgspec.msgpack.Decoder[Decoded], body: bytes) -> Decoded:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise FrameError(f"a frame of {len(body)} bytes cannot be read: {error}") from None


class FromEngineReader:
    """What the first rank says, read by the API process with asyncio."""

    def __init__(self, reader: asyncio.StreamReader, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self._reader = reader
        self._limit_bytes = limit_bytes
        self._decoder = msgspec.msgpack.Decoder(list[FromEngine])

    async def read(self) -> list[FromEngine] | None:
        """The messages of the next frame, or None when the other side has gone between two frames.

        Raises FrameError when it has gone within one, or has sent something else.
        """
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            body = await self._reader.readexactly(_body_bytes(header, self._limit_bytes))
        except asyncio.IncompleteReadError as error:
            if not error.partial and error.expected == HEADER_BYTES:
                return None
            raise FrameError(f"the stream ended {len(error.partial)} bytes into a frame") from None
        return _unpack(self._decoder, body)


class EngineConnection:
    """The first rank's end: one thread may read while others write."""

    def __init__(self, connection: socket.socket, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self._socket = connection
        self._limit_bytes = limit_bytes
        self._decoder = msgspec.msgpack.Decoder(list[ToEngine])
        self._write_lock = threading.Lock()

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Write one frame. Raises OSError when the API process has gone."""
        frame = pack(messages, self._limit_bytes)
        with self._write_lock:
            self._socket.sendall(frame)

    def receive(self) -> list[ToEngine] | None:
        """Block for the next frame: its messages, or None at the end of the stream. Raises FrameError as the reader."""
        header = self._receive_exactly(HEADER_BYTES)
        if not header:
            return None
        length = _body_bytes(header, self._limit_bytes) if len(header) == HEADER_BYTES else -1
        body = self._receive_exactly(length) if length > 0 else b""
        if len(body) != length:
            raise FrameError(f"the stream ended {len(header) + len(body)} bytes into a frame")
        return _unpack(self._decoder, body)

    def close(self) -> None:
        self._socket.close()

    def _receive_exactly(self, count: int) -> bytes:
        """`count` bytes, or fewer where the stream ends."""
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._socket.recv(min(count - len(parts), 1 << 20))
            except ConnectionResetError:
                part = b""
            if not part:
                break
            parts += part
        return bytes(parts)


def connect(path: Path, timeout_s: float) -> EngineConnection:
    """Connect the first rank to the API process that listens on `path`, waiting up to `timeout_s` for it to appear.

    Raises OSError.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
            return EngineConnection(connection)
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
