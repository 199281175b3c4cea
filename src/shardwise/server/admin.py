"""POST /admin/cache: memory moves between KV cache and slots of experts while the server runs."""

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic wants this TypedDict before Python 3.12

from shardwise.server.errors import ApiError, invalid
from shardwise.server.middleware import read_body
from shardwise.server.requests import Body
from shardwise.server.services import Services
from shardwise.server.stream import json_bytes

Count = Annotated[int, Field(ge=1, le=1 << 40, strict=True)]


class CacheBody(Body):
    """One of the two; the other follows from it."""

    expert_slots: Count | None = None
    kv_tokens: Count | None = None

    def check(self) -> None:
        """Raises ApiError."""
        if (self.expert_slots is None) == (self.kv_tokens is None):
            raise invalid("expert_slots: give either expert_slots or kv_tokens", "expert_slots")


class CacheSizes(TypedDict):
    """What there is now: slots of each layer, and tokens of KV cache."""

    expert_slots: int
    kv_tokens: int


async def resize_cache(services: Services, http: Request) -> Response:
    """The sizes after the change. Raises ApiError, with 409 if it cannot be; then nothing has changed."""
    body = await services.parse(CacheBody, await read_body(http, services.config.max_body_bytes))
    asked = body.expert_slots or 0, body.kv_tokens or 0
    now = await services.engine.resize(http.state.request_id, *asked)
    if now.message:
        raise ApiError(409, now.message, code="does_not_fit")
    answer: CacheSizes = {"expert_slots": now.expert_slots, "kv_tokens": now.kv_tokens}
    return Response(json_bytes(answer), media_type="application/json")
