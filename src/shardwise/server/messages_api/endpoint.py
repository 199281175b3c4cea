"""The endpoints of Anthropic's API: each request becomes a chat request, its answer takes Anthropic's shape."""

import time

from starlette.requests import Request
from starlette.responses import Response

from shardwise.server.blocks import whole
from shardwise.server.chat import begin, chat_prompt
from shardwise.server.messages_api.answer import MessageMaker, TokenCount, error_event
from shardwise.server.messages_api.body import CountBody, MessagesBody, chat_request
from shardwise.server.middleware import read_body
from shardwise.server.services import Header, Services
from shardwise.server.stream import EventStream, json_bytes, unless_gone


async def create_message(services: Services, http: Request) -> Response:
    """Answers the request. Raises ApiError, RequestRefused and EngineFailed."""
    arrival_s = time.monotonic()
    body = await read_body(http, services.config.max_body_bytes)
    request = await services.parse(MessagesBody, body)
    header = Header.make(http.state.request_id, "msg", services.model_name(request.model))
    chat = await services.tokenizer.run(len(body), chat_request, request)
    turn = await begin(services, chat, header, len(body), arrival_s, clamp=True)
    maker = MessageMaker(header, len(turn.prompt))
    if request.stream:
        return EventStream(maker.events(turn.streams), header.request_id, error_event)
    blocks = await unless_gone(http.receive, whole(turn.streams))
    return Response(json_bytes(maker.whole(blocks)), media_type="application/json")


async def count_tokens(services: Services, http: Request) -> Response:
    """How long the prompt of a message would be. Raises ApiError."""
    body = await read_body(http, services.config.max_body_bytes)
    request = await services.parse(CountBody, body)
    services.model_name(request.model)
    chat = await services.tokenizer.run(len(body), chat_request, request)
    _, prompt, _ = await chat_prompt(services, chat, len(body))
    answer: TokenCount = {"input_tokens": len(prompt)}
    return Response(json_bytes(answer), media_type="application/json")
