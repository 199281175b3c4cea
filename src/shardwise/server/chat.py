"""POST /v1/chat/completions: messages in, the assistant's turn out, what it thought apart from what it answers."""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from shardwise.engine.messages import Picture, Ready
from shardwise.server.errors import invalid
from shardwise.server.generation import Piece, collect, merge
from shardwise.server.logprobs import chat_logprobs
from shardwise.server.media import Loaded
from shardwise.server.messages import media_parts, template_messages
from shardwise.server.middleware import read_body
from shardwise.server.requests import ChatBody
from shardwise.server.responses import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatToolCall,
    ChatToolCallDelta,
)
from shardwise.server.services import Header, Services, UsageCounter, start
from shardwise.server.stream import DONE, EventStream, event, json_bytes, unless_gone
from shardwise.server.structured import checked_grammar
from shardwise.server.text import THINK_END, THINK_START
from shardwise.server.tokenizer import ChatTemplateError
from shardwise.server.toolcalls import CallDelta
from shardwise.server.tools import ToolUse


def _whole_call(call: CallDelta) -> ChatToolCall:
    function: CalledFunction = {"name": call.name or "", "arguments": call.arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def _call_delta(call: CallDelta) -> ChatToolCallDelta:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole_call(call)}


class _Answer:
    """Makes the OpenAI shapes of one request's pieces."""

    def __init__(self, services: Services, request: ChatBody, header: Header, prompt: list[int]) -> None:
        self._tokenizer = services.tokenizer
        self._request = request
        self._header = header
        self._prompt = prompt
        self.usage = UsageCounter([len(prompt)], request.n or 1)

    def whole(self, pieces: Sequence[Piece]) -> ChatCompletion:
        answer: ChatCompletion = {
            "id": self._header.id,
            "object": "chat.completion",
            "created": self._header.created,
            "model": self._header.model,
            "choices": [self._choice(piece) for piece in pieces],
            "usage": self.usage.usage(),
        }
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = self._prompt
        return answer

    def _choice(self, piece: Piece) -> ChatChoice:
        self.usage.add(piece)
        message: ChatMessage = {"role": "assistant", "content": piece.text or (None if piece.calls else "")}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            message["tool_calls"] = [_whole_call(call) for call in piece.calls]
        choice: ChatChoice = {
            "index": piece.index,
            "message": message,
            "logprobs": chat_logprobs(self._tokenizer, piece.logprobs) if self._request.logprobs else None,
            "finish_reason": piece.finish_reason or "stop",
            "stop_reason": piece.stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return {
            "id": self._header.id,
            "object": "chat.completion.chunk",
            "created": self._header.created,
            "model": self._header.model,
            "choices": choices,
        }

    def _chunks(self, piece: Piece, first: bool) -> list[ChatChunkChoice]:
        """first: nothing of this answer was sent before, so it opens with the role."""
        deltas: list[ChatDelta] = [{"role": "assistant", "content": ""}] if first else []
        # Thought and answer never share a delta, so that a client may show one and then the other.
        if piece.reasoning:
            deltas.append({"reasoning_content": piece.reasoning})
        if piece.text:
            deltas.append({"content": piece.text})
        if piece.calls:
            deltas.append({"tool_calls": [_call_delta(call) for call in piece.calls]})
        if not piece.text and not piece.reasoning and not piece.calls:
            deltas.append({})
        choices: list[ChatChunkChoice] = [
            {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}
            for delta in deltas
        ]
        last = choices[-1]
        last["finish_reason"], last["stop_reason"] = piece.finish_reason, piece.stop_reason
        if self._request.logprobs:
            last["logprobs"] = chat_logprobs(self._tokenizer, piece.logprobs)
        if self._request.return_token_ids:
            last["token_ids"] = piece.tokens
        return choices

    async def events(self, streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[bytes, None]:
        options = self._request.stream_options
        include = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        begun: set[int] = set()
        async with contextlib.aclosing(merge(streams)) as pieces:
            async for piece in pieces:
                self.usage.add(piece)
                for choice in self._chunks(piece, piece.index not in begun):
                    chunk = self._chunk([choice])
                    if include or continuous:
                        chunk["usage"] = self.usage.usage() if continuous else None
                    if self._request.return_token_ids and not begun:
                        chunk["prompt_token_ids"] = self._prompt
                    begun.add(piece.index)
                    yield event(chunk)
        if include:
            yield event({**self._chunk([]), "usage": self.usage.usage()})
        yield DONE


def _prompt(
    services: Services, request: ChatBody, loaded: Sequence[Loaded], limits: Ready | None
) -> tuple[str, list[int], list[Picture]]:
    """The rendered prompt, its token ids and the pictures in them. Raises ApiError."""
    kwargs = request.chat_template_kwargs or {}
    messages = template_messages(request.messages)
    try:
        text = services.tokenizer.render_chat(messages, request.tool_definitions(), kwargs)
    except ChatTemplateError as error:
        param = "chat_template_kwargs" if services.tokenizer.reserved_kwargs.intersection(kwargs) else "messages"
        raise invalid(str(error)[:500], param) from None
    if limits is not None:
        services.check_length(text, limits, "messages")
    if not loaded or services.media is None:
        return text, services.tokenizer.encode(text), []
    return text, *services.media.prompt(services.tokenizer, text, loaded)


async def _load(services: Services, request: ChatBody) -> list[Loaded]:
    """The pictures and videos of the request. Raises ApiError."""
    parts = media_parts(request.messages)
    if parts and services.media is None:
        raise invalid(
            f"{parts[0].where}: this server takes text only (no vision tower, or --vision off)", parts[0].where
        )
    return await services.media.load(parts) if parts and services.media is not None else []


async def chat_prompt(
    services: Services, request: ChatBody, size: int, limits: Ready | None = None
) -> tuple[str, list[int], list[Picture]]:
    """The rendered prompt, its token ids and the pictures in it. Raises ApiError.

    size: characters of the request. limits: what cannot fit into them is refused early.
    """
    loaded = await _load(services, request)
    return await services.tokenizer.run(size, _prompt, services, request, loaded, limits)


@dataclass(frozen=True)
class Turn:
    """A conversation's next answers, ready to run: what all three chat APIs make their own shapes of."""

    header: Header
    prompt: list[int]
    streams: Sequence[AsyncGenerator[Piece, None]]


async def begin(
    services: Services, request: ChatBody, header: Header, size: int, arrival_s: float, clamp: bool = False
) -> Turn:
    """Render, tokenise and hand over. Raises ApiError.

    size: characters of the request. clamp: max_tokens over what the prompt leaves is no error, but cut down to it.
    """
    limits = services.limits()
    use = ToolUse.of(request, services.config.tool_call_parser)
    text, prompt, pictures = await chat_prompt(services, request, size, limits)
    room = min(limits.max_model_len, limits.kv_tokens) - len(prompt)
    if clamp and 0 < room < (request.max_tokens or 0):
        request = request.model_copy(update={"max_tokens": room})
    after = services.tokenizer.token_id(THINK_END) if text.rstrip().endswith(THINK_START) else None
    grammar = await checked_grammar(services, request, use, after)
    splitter_of = text if services.config.reasoning_parser != "none" else None
    streams = start(services, request, header, [prompt], arrival_s, splitter_of, pictures, use.parser, grammar)
    return Turn(header, prompt, streams)


async def create_chat_completion(services: Services, http: Request) -> Response:
    """Answers the request. Raises ApiError, RequestRefused and EngineFailed."""
    arrival_s = time.monotonic()
    body = await read_body(http, services.config.max_body_bytes)
    request = await services.parse(ChatBody, body)
    header = Header.make(http.state.request_id, "chatcmpl", services.model_name(request.model))
    turn = await begin(services, request, header, len(body), arrival_s)
    answer = _Answer(services, request, header, turn.prompt)
    if request.stream:
        return EventStream(answer.events(turn.streams), header.request_id)
    pieces = await unless_gone(http.receive, collect(turn.streams))
    return Response(json_bytes(answer.whole(pieces)), media_type="application/json")
