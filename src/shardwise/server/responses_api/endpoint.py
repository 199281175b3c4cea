"""The endpoints of /v1/responses: each request becomes a chat request, its answer takes the shape of items."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shardwise.server.blocks import Block, Blocks, whole
from shardwise.server.chat import begin
from shardwise.server.errors import ApiError
from shardwise.server.middleware import read_body
from shardwise.server.responses_api.answer import Deleted, ResponseMaker, ResponseObject
from shardwise.server.responses_api.body import ResponsesBody, chat_messages
from shardwise.server.responses_api.store import Kept, ResponseStore
from shardwise.server.services import Header, Services
from shardwise.server.stream import EventStream, json_bytes, unless_gone


def _answer_message(blocks: list[Block]) -> dict[str, Any]:
    """An answer as the turn that the next request goes on from; a call that was cut is no part of it."""
    text = "".join(block.text for block in blocks if block.kind == "text")
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts := [block.text for block in blocks if block.kind == "thinking"]:
        message["reasoning_content"] = "\n\n".join(thoughts)
    calls = [block for block in blocks if block.kind == "call" and block.complete]
    if calls:
        message["tool_calls"] = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.text}}
            for block in calls
        ]
    return message


def _found(store: ResponseStore, response_id: str, param: str | None) -> Kept:
    kept = store.get(response_id)
    if kept is None:
        raise ApiError(
            404,
            f"response {response_id[:100]!r} is not here (any more); send the whole conversation in input",
            param=param,
            code="previous_response_not_found" if param else "response_not_found",
        )
    return kept


async def create_response(services: Services, store: ResponseStore, http: Request) -> Response:
    """Answers the request. Raises ApiError, RequestRefused and EngineFailed."""
    arrival_s = time.monotonic()
    body = await read_body(http, services.config.max_body_bytes)
    request = await services.parse(ResponsesBody, body)
    header = Header.make(http.state.request_id, "resp", services.model_name(request.model))
    earlier: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        earlier = _found(store, request.previous_response_id, "previous_response_id").messages
    messages = [*earlier, *chat_messages(request.items())]
    chat = request.chat(messages)
    turn = await begin(services, chat, header, len(body) + 100 * len(earlier), arrival_s, clamp=True)

    def finished(blocks: Blocks, response: ResponseObject) -> None:
        if request.store is not False:
            store.put(header.id, Kept([*messages, _answer_message(blocks.blocks)], dict(response)))

    maker = ResponseMaker(header, request, len(turn.prompt), finished)
    if request.stream:
        return EventStream(maker.events(turn.streams), header.request_id, maker.error_event)
    blocks = await unless_gone(http.receive, whole(turn.streams))
    return Response(json_bytes(maker.end(blocks)), media_type="application/json")


async def get_response(store: ResponseStore, http: Request) -> Response:
    """An answer that was kept. Raises ApiError (404)."""
    return Response(json_bytes(_found(store, http.path_params["name"], None).response), media_type="application/json")


async def delete_response(store: ResponseStore, http: Request) -> Response:
    """Forget an answer. Raises ApiError (404)."""
    response_id = http.path_params["name"]
    _found(store, response_id, None)
    store.delete(response_id)
    answer: Deleted = {"id": response_id, "object": "response", "deleted": True}
    return Response(json_bytes(answer), media_type="application/json")
