"""Around every request: its id, the key, the log line, the size of its body, and an answer to what nobody caught."""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwise.server.errors import ApiError, from_exception
from shardwise.server.messages_api.errors import error_body
from shardwise.server.stream import ClientGone, json_bytes

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
DRAIN_S = 5.0
GUARDED = ("/v1", "/ui/state", "/tokenize", "/detokenize", "/admin/cache")  # by the key, beside all below /v1
WATCHED = ("/health", "/metrics", "/ui/state")  # asked for every few seconds, which is no news


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


class RequestMiddleware:
    """Pure ASGI, as the frameworks' own kind hides a client that leaves. Never logs a body, a query or a key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        """api_key: empty for none; it guards all below /v1, and the page's figures."""
        self._app = app
        self._key_digest = _digest(api_key.encode()) if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        start_s, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._authorise(scope["path"], headers)
            await self._app(scope, receive, send_with_id)
        except (ClientGone, ClientDisconnect):
            status = 499  # as proxies write it: nobody is there to read an answer
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("request %s failed", request_id)
            if not status:
                await error_response(from_exception(error), request_id, scope["path"])(scope, receive, send_with_id)
        finally:
            elapsed_ms = (time.monotonic() - start_s) * 1e3
            path = scope["path"].encode("unicode_escape").decode()[:200]
            level = logging.DEBUG if path in WATCHED and status in (200, 503) else logging.INFO
            logger.log(level, "request %s: %s %s %d in %.1f ms", request_id, scope["method"], path, status, elapsed_ms)

    def _authorise(self, path: str, headers: Headers) -> None:
        if self._key_digest is None or not (path in GUARDED or path.startswith("/v1/")):
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        if "x-api-key" in headers:  # Anthropic's clients send this one, or both
            kind, key = "bearer", headers["x-api-key"]
        # Digests have one length, so the comparison tells nothing of the key.
        right = hmac.compare_digest(_digest(key.strip().encode("latin-1", "replace")), self._key_digest)
        if kind.lower() != "bearer" or not right:
            raise ApiError(
                401,
                "wrong or missing API key; send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
                kind="authentication_error",
                code="invalid_api_key",
            )


def error_response(error: ApiError, request_id: str, path: str) -> Response:
    """`error` as an HTTP answer, in the shape of the API that `path` belongs to."""
    of_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    body = error_body(error, request_id) if of_anthropic else error.body(request_id)
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["retry-after"] = "1"
    return Response(json_bytes(body), error.status, headers, "application/json")


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The request's body. Raises ApiError (413) as soon as it is known to be over the limit."""
    declared = request.headers.get("content-length", "")
    over = declared.isdigit() and int(declared[:20]) > limit_bytes
    body = bytearray()
    if not over:
        async for chunk in request.stream():
            body += chunk
            if over := len(body) > limit_bytes:
                break
    if not over:
        return bytes(body)
    body.clear()
    # Clients read no answer before they have sent all, and a socket closed early loses it: take some more, and drop it.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            left = 4 * limit_bytes
            while left > 0 and (message := await request.receive())["type"] == "http.request":
                left -= len(message.get("body", b""))
                if not message.get("more_body"):
                    break
    raise ApiError(413, f"the body is larger than the limit of {limit_bytes} bytes", code="request_too_large")
