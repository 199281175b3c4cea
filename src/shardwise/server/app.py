"""The HTTP application: routes, and what holds for all of them. `create_app` makes one; it owns no state beyond."""

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shardwise.config import ModelConfig, ServeConfig
from shardwise.engine.client import EngineFailed, RequestRefused
from shardwise.server import responses
from shardwise.server.admin import CacheBody, CacheSizes, resize_cache
from shardwise.server.backend import Engine
from shardwise.server.chat import create_chat_completion
from shardwise.server.completions import create_completion
from shardwise.server.errors import ApiError, from_exception
from shardwise.server.media import Media
from shardwise.server.messages_api.answer import MessagesAnswer, TokenCount
from shardwise.server.messages_api.body import CountBody, MessagesBody
from shardwise.server.messages_api.endpoint import count_tokens, create_message
from shardwise.server.messages_api.errors import MessagesError
from shardwise.server.metrics import Metrics
from shardwise.server.middleware import RequestMiddleware, error_response
from shardwise.server.requests import ChatBody, CompletionBody
from shardwise.server.responses_api.answer import Deleted, ResponseObject
from shardwise.server.responses_api.body import ResponsesBody
from shardwise.server.responses_api.endpoint import create_response, delete_response, get_response
from shardwise.server.responses_api.store import ResponseStore
from shardwise.server.sampling import GenerationDefaults
from shardwise.server.services import Queue, Services
from shardwise.server.stream import json_bytes
from shardwise.server.tokenize import (
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokenized,
    detokenize,
    tokenize,
)
from shardwise.server.tokenizer import Tokenizer
from shardwise.server.ui import add_ui

_SCHEMA = "#/components/schemas/{model}"
_BODIES = (ChatBody, CompletionBody, ResponsesBody, MessagesBody, CountBody, TokenizeBody, DetokenizeBody, CacheBody)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": responses.ErrorAnswer, "description": text}
    for status, text in (
        (400, "A parameter is unknown or wrong; `param` names it."),
        (401, "Wrong or missing API key."),
        (404, "No such model."),
        (413, "The body is too large."),
        (429, "Too many requests wait already; try again."),
        (500, "The engine failed."),
        (503, "The engine is starting; try again."),
    )
}


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        code = "not_found" if error.status_code == 404 else "method_not_allowed" if error.status_code == 405 else None
        text = f"{request.method} {request.url.path[:200]}: {error.detail}"
        error = ApiError(error.status_code, text, code=code)
    return error_response(from_exception(error), request.state.request_id, request.url.path)


def _body_of(model: type) -> dict[str, Any]:
    # The endpoints read their bodies themselves, strictly and within a limit, so FastAPI has to be told.
    schema = {"$ref": _SCHEMA.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_openapi(app: FastAPI) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, bodies = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_SCHEMA)
            document.setdefault("components", {}).setdefault("schemas", {}).update(bodies["$defs"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi


def _add_api(app: FastAPI, services: Services) -> None:
    def model(name: str) -> responses.Model:
        ready = services.engine.ready
        return {
            "id": name,
            "object": "model",
            "created": services.created,
            "owned_by": "shardwise",
            "root": services.names[0],
            "max_model_len": None if ready is None else ready.max_model_len,
        }

    @app.get("/v1/models", response_model=responses.ModelList)
    async def models() -> Response:
        """Names by which the model can be asked for."""
        answer: responses.ModelList = {"object": "list", "data": [model(name) for name in services.names]}
        return Response(json_bytes(answer), media_type="application/json")

    @app.get("/v1/models/{name:path}", response_model=responses.Model, responses={404: _ERRORS[404]})
    async def one_model(request: Request) -> Response:
        """One of them."""
        name = services.model_name(request.path_params["name"])
        return Response(json_bytes(model(name)), media_type="application/json")

    @app.post(
        "/v1/completions",
        response_model=responses.Completion,
        responses=_ERRORS,
        openapi_extra=_body_of(CompletionBody),
    )
    async def completions(request: Request) -> Response:
        """Continue a prompt. With `stream`, server-sent events that end with `data: [DONE]`."""
        return await create_completion(services, request)

    @app.post(
        "/v1/chat/completions",
        response_model=responses.ChatCompletion,
        responses=_ERRORS,
        openapi_extra=_body_of(ChatBody),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation. With `stream`, server-sent events that end with `data: [DONE]`."""
        return await create_chat_completion(services, request)


def _add_agents(app: FastAPI, services: Services) -> None:
    """The newer APIs that agents speak."""
    store = ResponseStore()

    @app.post("/v1/responses", response_model=ResponseObject, responses=_ERRORS, openapi_extra=_body_of(ResponsesBody))
    async def responses_create(request: Request) -> Response:
        """Answer items. With `stream`, named server-sent events that end with response.completed or .incomplete."""
        return await create_response(services, store, request)

    @app.get("/v1/responses/{name}", response_model=ResponseObject, responses={404: _ERRORS[404]})
    async def responses_get(request: Request) -> Response:
        """An answer that was kept."""
        return await get_response(store, request)

    @app.delete("/v1/responses/{name}", response_model=Deleted, responses={404: _ERRORS[404]})
    async def responses_delete(request: Request) -> Response:
        """Forget an answer."""
        return await delete_response(store, request)

    errors = {status: {**entry, "model": MessagesError} for status, entry in _ERRORS.items()}

    @app.post("/v1/messages", response_model=MessagesAnswer, responses=errors, openapi_extra=_body_of(MessagesBody))
    async def messages_create(request: Request) -> Response:
        """Answer messages in Anthropic's API. With `stream`, its events."""
        return await create_message(services, request)

    @app.post(
        "/v1/messages/count_tokens", response_model=TokenCount, responses=errors, openapi_extra=_body_of(CountBody)
    )
    async def messages_count(request: Request) -> Response:
        """How many tokens the prompt of a message has."""
        return await count_tokens(services, request)

    @app.post("/tokenize", response_model=Tokenized, responses=_ERRORS, openapi_extra=_body_of(TokenizeBody))
    async def tokens_of_text(request: Request) -> Response:
        """Token ids of a prompt or a conversation."""
        return await tokenize(services, request)

    @app.post("/detokenize", response_model=Detokenized, responses=_ERRORS, openapi_extra=_body_of(DetokenizeBody))
    async def text_of_tokens(request: Request) -> Response:
        """The text of token ids."""
        return await detokenize(services, request)


def _add_operations(app: FastAPI, services: Services) -> None:
    @app.get("/health", response_model=responses.Health, responses={503: {"model": responses.Health}})
    async def health() -> Response:
        """200 once a step has run on every rank, else 503."""
        ready = services.engine.ready is not None
        answer: responses.Health = {"status": "ok" if ready else "starting"}
        return Response(json_bytes(answer), 200 if ready else 503, media_type="application/json")

    @app.get("/metrics")
    async def metrics() -> Response:
        """In Prometheus' text form."""
        return Response(generate_latest(services.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_admin(app: FastAPI, services: Services) -> None:
    """What only the server's owner may do, by its key."""

    @app.post(
        "/admin/cache",
        response_model=CacheSizes,
        responses={**_ERRORS, 409: {"model": responses.ErrorAnswer, "description": "It does not fit; nothing moved."}},
        openapi_extra=_body_of(CacheBody),
    )
    async def cache(request: Request) -> Response:
        """Move memory between KV cache and slots of experts. What runs goes on."""
        return await resize_cache(services, request)


def create_app(
    config: ServeConfig,
    client: Engine,
    tokenizer: Tokenizer,
    model_config: ModelConfig,
    generation_defaults: GenerationDefaults,
    media: Media | None = None,
) -> FastAPI:
    """The application over a running (or starting) engine. The caller starts, drains and closes `client`.

    media: reads pictures and videos; None: text only. When the application ends, the threads of tokenizer and media
    are let go.
    """
    services = Services(
        config,
        client,
        tokenizer,
        model_config,
        generation_defaults,
        Metrics(client),
        Queue(config.max_queued_requests),
        int(time.time()),
        media,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        tokenizer.close()
        if media is not None:
            media.close()

    # The interactive pages would load scripts from the network, so there are none; /openapi.json is there.
    app = FastAPI(title="shardwise", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    _add_openapi(app)
    _add_api(app, services)
    _add_agents(app, services)
    _add_operations(app, services)
    if config.api_key:
        _add_admin(app, services)
    if config.ui:
        add_ui(app, services)
    for error in (ApiError, RequestRefused, EngineFailed, HTTPException):
        app.add_exception_handler(error, _answer_error)
    app.add_middleware(RequestMiddleware, api_key=config.api_key)
    return app
