"""Answers of /v1/messages, whole and as events, in Anthropic's shapes."""

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Literal, NotRequired

import msgspec
from typing_extensions import TypedDict  # pydantic wants this TypedDict before Python 3.12

from shardwise.server.blocks import Block, BlockEvent, Blocks
from shardwise.server.errors import ApiError
from shardwise.server.generation import Piece, merge
from shardwise.server.messages_api.errors import error_body
from shardwise.server.services import Header
from shardwise.server.stream import json_bytes

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(TypedDict):
    """input_tokens are those that were computed; the rest of the prompt is in cache_read_input_tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class MessagesBlock(TypedDict):
    """thinking, text or tool_use."""

    type: Literal["thinking", "text", "tool_use"]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    text: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class MessagesAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessagesBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(TypedDict):
    input_tokens: int


def event(kind: str, **fields: Any) -> bytes:
    """One server-sent event with its name."""
    return b"event: " + kind.encode() + b"\ndata: " + json_bytes({"type": kind, **fields}) + b"\n\n"


def error_event(error: ApiError, request_id: str) -> bytes:
    """What a stream ends with when something goes wrong."""
    return event("error", **{key: value for key, value in error_body(error, request_id).items() if key != "type"})


def call_id(block: Block) -> str:
    return "toolu_" + block.id.removeprefix("call_")


def _whole_block(block: Block) -> MessagesBlock:
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {
        "type": "tool_use",
        "id": call_id(block),
        "name": block.name,
        "input": msgspec.json.decode(block.text, type=dict[str, Any]),
    }


class MessageMaker:
    """Makes Anthropic's shapes of one answer."""

    def __init__(self, header: Header, prompt_tokens: int) -> None:
        self._header = header
        self._prompt_tokens = prompt_tokens
        self._blocks = Blocks()

    def _usage(self, piece: Piece) -> MessagesUsage:
        cached = min(piece.cached_tokens, self._prompt_tokens)
        return {
            "input_tokens": self._prompt_tokens - cached,
            "output_tokens": piece.generated_tokens,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }

    @staticmethod
    def _stop(piece: Piece) -> tuple[StopReason, str | None]:
        if piece.finish_reason == "tool_calls":
            return "tool_use", None
        if piece.finish_reason == "length":
            return "max_tokens", None
        return ("stop_sequence", piece.stop_reason) if isinstance(piece.stop_reason, str) else ("end_turn", None)

    def _message(self, content: list[MessagesBlock], piece: Piece) -> MessagesAnswer:
        return {
            "id": self._header.id,
            "type": "message",
            "role": "assistant",
            "model": self._header.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(piece),
        }

    def whole(self, blocks: Blocks) -> MessagesAnswer:
        """A call that was cut is left out: half of its input would look like all of it."""
        content = [_whole_block(block) for block in blocks.blocks if block.complete]
        answer = self._message(content, blocks.last)
        answer["stop_reason"], answer["stop_sequence"] = self._stop(blocks.last)
        return answer

    async def events(self, streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[bytes, None]:
        """message_start, blocks, message_delta, message_stop."""
        begun = False
        async with contextlib.aclosing(merge(streams)) as pieces:
            async for piece in pieces:
                if not begun:
                    first = Piece(index=0, cached_tokens=piece.cached_tokens)
                    yield event("message_start", message=self._message([], first))
                    begun = True
                for each in self._blocks.add(piece):
                    for data in _block_events(each):
                        yield data
        reason, sequence = self._stop(self._blocks.last)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield event("message_delta", delta=delta, usage=self._usage(self._blocks.last))
        yield event("message_stop")


def _block_events(each: BlockEvent) -> Iterator[bytes]:
    block, index = each.block, each.block.index
    if each.what == "start":
        start: MessagesBlock = (
            {"type": "tool_use", "id": call_id(block), "name": block.name, "input": {}}
            if block.kind == "call"
            else _whole_block(Block(index, block.kind))
        )
        yield event("content_block_start", index=index, content_block=start)
    elif each.what == "delta":
        delta = {
            "thinking": {"type": "thinking_delta", "thinking": each.text},
            "text": {"type": "text_delta", "text": each.text},
            "call": {"type": "input_json_delta", "partial_json": each.text},
        }[block.kind]
        yield event("content_block_delta", index=index, delta=delta)
    else:
        if block.kind == "thinking":  # clients wait for one; there is nothing to sign
            yield event("content_block_delta", index=index, delta={"type": "signature_delta", "signature": ""})
        yield event("content_block_stop", index=index)
