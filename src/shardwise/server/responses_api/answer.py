"""Answers of /v1/responses, whole and as events, in OpenAI's shapes."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic wants this TypedDict before Python 3.12

from shardwise.server.blocks import Block, BlockEvent, Blocks
from shardwise.server.errors import ApiError
from shardwise.server.generation import Piece, merge
from shardwise.server.responses_api.body import ResponsesBody
from shardwise.server.services import Header
from shardwise.server.stream import json_bytes


class ResponseObject(TypedDict):
    """output: reasoning, message and function_call items, in the order the model wrote them."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: str
    usage: dict[str, Any] | None
    metadata: dict[str, str]


class Deleted(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


def item(block: Block, status: str) -> dict[str, Any]:
    """A block as an output item."""
    suffix = block.id.removeprefix("call_")
    if block.kind == "call":
        return {
            "type": "function_call",
            "id": f"fc_{suffix}",
            "call_id": block.id,
            "name": block.name,
            "arguments": block.text,
            "status": status,
        }
    part = content_part(block) if block.text else None
    if block.kind == "thinking":
        return {"type": "reasoning", "id": block.id, "summary": [], "content": [part] if part else [], "status": status}
    return {"type": "message", "id": block.id, "role": "assistant", "content": [part] if part else [], "status": status}


def content_part(block: Block) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


class ResponseMaker:
    """Makes OpenAI's shapes of one answer. finished: called with the whole response once it is there."""

    def __init__(
        self,
        header: Header,
        request: ResponsesBody,
        prompt_tokens: int,
        finished: Callable[[Blocks, ResponseObject], None],
    ) -> None:
        self._header, self._request = header, request
        self._prompt_tokens = prompt_tokens
        self._finished = finished
        self._blocks = Blocks()
        self._sequence = 0

    def _name(self, block: Block) -> None:
        if block.kind != "call" and not block.id:
            prefix = {"thinking": "rs", "text": "msg"}[block.kind]
            block.id = f"{prefix}_{self._header.id.removeprefix('resp_')}_{block.index}"

    def _response(self, status: Literal["in_progress", "completed", "incomplete", "failed"]) -> ResponseObject:
        request = self._request
        return {
            "id": self._header.id,
            "object": "response",
            "created_at": self._header.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._header.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": {"format": request.text.format.model_dump(by_alias=True, exclude_none=True)}
            if request.text and request.text.format
            else {"format": {"type": "text"}},
            "tool_choice": request.tool_choice.model_dump()
            if not isinstance(request.tool_choice, str | None)
            else request.tool_choice or "auto",
            "tools": [
                {"parameters": None, "strict": False, **tool.model_dump(exclude_none=True)}
                for tool in request.functions()
            ],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": request.metadata or {},
        }

    def end(self, blocks: Blocks) -> ResponseObject:
        """The whole response; it is kept now, if it is to be."""
        last = blocks.last
        cut = last.finish_reason == "length"
        response = self._response("incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        for block in blocks.blocks:
            self._name(block)
            unfinished = cut and (block is blocks.blocks[-1] or not block.complete)
            response["output"].append(item(block, "incomplete" if unfinished else "completed"))
        response["usage"] = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": last.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": last.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": last.reasoning_tokens},
            "total_tokens": self._prompt_tokens + last.generated_tokens,
        }
        self._finished(blocks, response)
        return response

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + json_bytes(data) + b"\n\n"

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        """What a stream ends with when something goes wrong."""
        response = self._response("failed")
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response["error"] = {"code": code, "message": error.message}
        told = self._event("error", code=error.code, message=error.message, param=error.param, request_id=request_id)
        return told + self._event("response.failed", response=response)

    async def events(self, streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[bytes, None]:
        """response.created, items, response.completed or response.incomplete."""
        begun = False
        async with contextlib.aclosing(merge(streams)) as pieces:
            async for piece in pieces:
                if not begun:
                    begun = True
                    yield self._event("response.created", response=self._response("in_progress"))
                    yield self._event("response.in_progress", response=self._response("in_progress"))
                cut = piece.finish_reason == "length"
                for each in self._blocks.add(piece):
                    for data in self._block_events(each, cut):
                        yield data
        response = self.end(self._blocks)
        yield self._event(f"response.{response['status']}", response=response)

    def _block_events(self, each: BlockEvent, cut: bool) -> Iterator[bytes]:
        block = each.block
        self._name(block)
        is_call, index = block.kind == "call", block.index
        item_id = item(block, "")["id"]
        at: dict[str, Any] = {"item_id": item_id, "output_index": index}
        if not is_call:
            at["content_index"] = 0
        stem = {"thinking": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}[block.kind]
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if each.what == "start":
            empty = Block(index, block.kind, id=block.id, name=block.name)
            yield self._event("response.output_item.added", output_index=index, item=item(empty, "in_progress"))
            if not is_call:
                yield self._event("response.content_part.added", **at, part=content_part(empty))
        elif each.what == "delta":
            yield self._event(f"response.{stem}.delta", **at, delta=each.text, **more)
        else:
            whole = {"arguments": block.text, "name": block.name} if is_call else {"text": block.text}
            yield self._event(f"response.{stem}.done", **at, **whole, **more)
            if not is_call:
                yield self._event("response.content_part.done", **at, part=content_part(block))
            status = "incomplete" if cut or not block.complete else "completed"
            yield self._event("response.output_item.done", output_index=index, item=item(block, status))
