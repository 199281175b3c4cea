"""The API process's view of the engine: requests in, their tokens out, over the socket to the first rank.

The engine may die and come back. What ran then fails at once, and `ready` is None until the new group has run a step.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec

from shardwise.config import ConfigError
from shardwise.engine.messages import (
    CacheResized,
    Cancel,
    Drain,
    Drained,
    Failed,
    FromEngine,
    Generate,
    Picture,
    Ready,
    ResizeCache,
    SamplingParams,
    Stats,
    ToEngine,
    Tokens,
)
from shardwise.engine.request import RequestRefused
from shardwise.engine.wire import FrameError, FromEngineReader, pack

logger = logging.getLogger(__name__)

LOST = "the engine stopped while this request ran; it restarts by itself"
NOT_READY = "the engine is not ready: it is starting or restarting; try again in a moment"
DRAINING = "the server is shutting down and takes no new requests"
SOCKET_PATH_BYTES = 100  # the kernel's limit is 108 with the closing zero; on other systems 104


class EngineFailed(RuntimeError):
    """The engine could not answer; the request itself was not at fault (HTTP 503, or an error event in a stream)."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class EngineClient:
    """Listens on a Unix socket for the first rank, again after each restart. All methods belong to one event loop."""

    def __init__(self, socket_path: Path) -> None:
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.draining = False
        self._path = socket_path
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._handlers: set[asyncio.Task[None]] = set()
        self._requests: dict[str, asyncio.Queue[Tokens | Failed]] = {}
        self._resizes: dict[str, asyncio.Future[CacheResized]] = {}
        self._news = asyncio.Event()  # ready, or stopped for good
        self._drained = asyncio.Event()
        self._stopped: EngineFailed | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError if the socket cannot be made."""
        if len(os.fsencode(self._path)) > SOCKET_PATH_BYTES:
            raise ConfigError(
                f"socket path {self._path} is longer than {SOCKET_PATH_BYTES} bytes; set a shorter TMPDIR"
            )
        self._path.unlink(missing_ok=True)
        try:
            self._server = await asyncio.start_unix_server(self._accept, path=str(self._path))
            self._path.chmod(0o600)
        except OSError as error:
            raise ConfigError(f"socket {self._path} cannot be made: {error}") from None

    async def wait_ready(self, timeout_s: float | None = None) -> Ready:
        """The engine's limits, once it serves. Raises EngineFailed if it has stopped for good, or TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                await self._news.wait()
                if self._stopped is not None:
                    raise EngineFailed(self._stopped.message)
                if self.ready is not None:
                    return self.ready

    async def generate(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        priority: int = 0,
        pictures: Sequence[Picture] = (),
    ) -> AsyncGenerator[Tokens, None]:
        """Tokens of one request as they come; the last has a finish_reason. `pictures` in the order of the prompt.

        Raises RequestRefused or EngineFailed, with the first step of the iteration or in its midst. Closing the
        generator (`aclose`, `contextlib.aclosing`, cancelling its task) cancels the request in the engine.
        """
        if self._stopped is not None:
            raise EngineFailed(self._stopped.message)
        if self.draining:
            raise EngineFailed(DRAINING)
        if self.ready is None:
            raise EngineFailed(NOT_READY)
        if request_id in self._requests:
            raise RequestRefused(f"request id {request_id!r} is in use", "request_id")
        try:
            generate = Generate(request_id, prompt, sampling, priority, len(pictures))
            frames = [pack([msgspec.structs.replace(picture, id=request_id)]) for picture in pictures]
            frames.append(pack([generate]))
        except FrameError as error:
            raise RequestRefused(
                f"{len(prompt)} tokens and {len(pictures)} pictures are too much: {error}", "prompt"
            ) from None
        queue: asyncio.Queue[Tokens | Failed] = asyncio.Queue()
        self._requests[request_id] = queue
        ended = False
        try:
            for frame in frames:
                self._write(frame)
            while not ended:
                message = await queue.get()
                if isinstance(message, Failed):
                    ended = True
                    if message.refused:
                        raise RequestRefused(message.message, message.param)
                    raise EngineFailed(message.message)
                ended = message.finish_reason is not None
                yield message
        finally:
            del self._requests[request_id]
            if not ended:
                self._send(Cancel(id=request_id))

    async def resize(self, request_id: str, expert_slots: int = 0, kv_tokens: int = 0) -> CacheResized:
        """Move memory between KV cache and slots of experts; waits until that is done or refused.

        Raises EngineFailed.
        """
        if self.ready is None:
            raise EngineFailed(NOT_READY)
        self._resizes[request_id] = future = asyncio.get_running_loop().create_future()
        try:
            self._send(ResizeCache(request_id, expert_slots, kv_tokens))
            return await future
        finally:
            del self._resizes[request_id]

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take nothing new and let the engine finish what runs, then leave. False if it has not within `timeout_s`."""
        self.draining = True
        if self._writer is None or self.ready is None:
            return True
        self._send(Drain())
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError:
            return False
        return True

    def stop(self, message: str) -> None:
        """The engine will not come back: what runs or waits fails with `message`, and so does all that comes later."""
        self._stopped = EngineFailed(message)
        self._lose(message)
        self._news.set()

    async def close(self) -> None:
        """Stop listening and hang up; the first rank leaves when it sees that."""
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            self._writer.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        self._lose(DRAINING)
        self._path.unlink(missing_ok=True)

    def _send(self, message: ToEngine) -> None:
        self._write(pack([message]))

    def _write(self, frame: bytes) -> None:
        # Nobody there is no error: what ran has already been told by _lose.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        if self._writer is not None:  # a new group is here before the end of the old connection was read
            self._writer.close()
            self._lose(LOST)
        self._writer = writer
        try:
            await self._listen(FromEngineReader(reader), writer)
        except (FrameError, OSError) as error:
            logger.warning("connection to the engine: %s", error)
        finally:
            if self._writer is writer:
                self._writer = None
                self._lose(LOST)
            self._handlers.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _listen(self, frames: FromEngineReader, writer: asyncio.StreamWriter) -> None:
        while (messages := await frames.read()) is not None:
            if self._writer is not writer:
                return
            for message in messages:
                self._take(message)

    def _take(self, message: FromEngine) -> None:
        match message:
            case Tokens() | Failed():
                if queue := self._requests.get(message.id):
                    queue.put_nowait(message)
            case Ready():
                self.ready = message
                self._news.set()
            case Stats():
                self.stats = message
            case CacheResized():
                if (future := self._resizes.get(message.id)) and not future.done():
                    future.set_result(message)
            case Drained():
                self._drained.set()

    def _lose(self, message: str) -> None:
        self.ready = None
        self.stats = None
        if self._stopped is None:
            self._news.clear()
        if self.draining:
            self._drained.set()  # nobody is left to wait for
        for future in self._resizes.values():
            if not future.done():
                future.set_exception(EngineFailed(message))
        for request_id, queue in self._requests.items():
            queue.put_nowait(Failed(id=request_id, message=message))
