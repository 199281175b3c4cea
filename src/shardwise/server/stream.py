"""Server-sent events, and clients that leave: both end the work in the engine as soon as nobody reads."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardwise.server.errors import ApiError, from_exception

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

# Until then an error still gets its own HTTP status; refusals come at once, and later the headers must not wait.
HEADER_DELAY_S = 2.0
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client hung up; nobody waits for an answer."""


def json_bytes(value: Any) -> bytes:
    return msgspec.json.encode(value)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


def openai_error(error: ApiError, request_id: str) -> bytes:
    return event(error.body(request_id))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves: ClientGone."""
    watcher = asyncio.create_task(_disconnected(receive))
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({watcher, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (watcher, task):
            each.cancel()
        await asyncio.gather(watcher, task, return_exceptions=True)


class EventStream(Response):
    """Sends events as they come. An error before the first is raised, a later one becomes the last event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        request_id: str,
        error_event: Callable[[ApiError, str], bytes] = openai_error,
    ) -> None:
        """events: closed in any case. error_event: what an error after the first looks like, with the request's id."""
        self._error_event = error_event
        self.background = None
        self.body = b""
        self.status_code = 200
        self._events = events
        self._request_id = request_id
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            first = asyncio.ensure_future(anext(self._events, DONE))
            try:
                await asyncio.wait({first}, timeout=HEADER_DELAY_S)
                if first.done():
                    first.result()
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._send_events(first, send)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, first: asyncio.Future[bytes], send: Send) -> None:
        try:
            await send({"type": "http.response.body", "body": await first, "more_body": True})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            answer = from_exception(error)
            if not isinstance(error, ApiError):
                known = answer.code != "internal_error"
                logger.error("request %s: %s", self._request_id, answer.message, exc_info=None if known else error)
            await send(
                {"type": "http.response.body", "body": self._error_event(answer, self._request_id), "more_body": True}
            )
