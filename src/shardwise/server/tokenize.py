"""POST /tokenize and /detokenize: what the tokenizer and the chat template make of a text, and back."""

from typing import Annotated, Any, NotRequired

from pydantic import Field, WrapValidator
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic wants this TypedDict before Python 3.12

from shardwise.server.chat import chat_prompt
from shardwise.server.errors import invalid
from shardwise.server.logprobs import token_text
from shardwise.server.middleware import read_body
from shardwise.server.requests import Body, ChatBody, Message, TokenId, Tool, as_given, check_token_ids
from shardwise.server.services import Services
from shardwise.server.stream import json_bytes


class TokenizeBody(Body):
    """A prompt, or a conversation as /v1/chat/completions would render it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Annotated[Tool, WrapValidator(as_given)]], Field(max_length=1024, fail_fast=True)] | None = (
        None
    )
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises ApiError."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt: give either prompt or messages", "prompt")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            raise invalid("tools: only with messages", "tools")


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

    def check(self) -> None:
        pass


class Tokenized(TypedDict):
    """max_model_len: null while the engine starts."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    prompt: str


async def tokenize(services: Services, http: Request) -> Response:
    """Token ids of a prompt or a conversation. Raises ApiError."""
    body = await read_body(http, services.config.max_body_bytes)
    request = await services.parse(TokenizeBody, body)
    services.model_name(request.model)

    if request.prompt is None:
        chat = ChatBody.model_construct(
            messages=request.messages, tools=request.tools, chat_template_kwargs=request.chat_template_kwargs
        )
        _, tokens, _ = await chat_prompt(services, chat, len(body))
    else:
        special = request.add_special_tokens is not False
        tokens = await services.tokenizer.run(len(body), services.tokenizer.encode, request.prompt, special)
    ready = services.engine.ready
    answer: Tokenized = {
        "count": len(tokens),
        "max_model_len": None if ready is None else ready.max_model_len,
        "tokens": tokens,
    }
    if request.return_token_strs:
        answer["token_strs"] = [token_text(services.tokenizer, token) for token in tokens]
    return Response(json_bytes(answer), media_type="application/json")


async def detokenize(services: Services, http: Request) -> Response:
    """The text of token ids. Raises ApiError."""
    body = await read_body(http, services.config.max_body_bytes)
    request = await services.parse(DetokenizeBody, body)
    services.model_name(request.model)
    check_token_ids(list(request.tokens), services.model_config.vocab_size, "tokens")

    def decode() -> bytes:
        answer: Detokenized = {"prompt": services.tokenizer.decode(request.tokens)}
        return json_bytes(answer)

    return Response(await services.tokenizer.run(len(body), decode), media_type="application/json")
