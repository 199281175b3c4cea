"""Bodies of /v1/responses, and the chat request that each comes to."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, StringConstraints, Tag, ValidationError

from shardwise.server.errors import from_validation, invalid
from shardwise.server.messages import with_one_system
from shardwise.server.requests import MAX_MESSAGES, Body, ChatBody, EchoBody, Ignored


class ContentItem(EchoBody):
    """A part of a message, of a tool's output or of a thought."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "input_image", "refusal"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: Ignored = None
    file_id: str | None = None
    annotations: Ignored = None
    logprobs: Ignored = None


Content = str | Annotated[list[ContentItem], Field(fail_fast=True)]


class MessageItem(EchoBody):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class CallItem(EchoBody):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Ignored = None
    status: Ignored = None
    namespace: Ignored = None


class OutputItem(EchoBody):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: Ignored = None
    status: Ignored = None


class ReasoningItem(EchoBody):
    """What the model thought, as its answer had it."""

    type: Literal["reasoning"]
    summary: list[ContentItem] | None = None
    content: list[ContentItem] | None = None
    id: Ignored = None
    status: Ignored = None
    encrypted_content: Ignored = None


def _kind(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else kind


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionToolItem(EchoBody):
    type: Literal["function"]
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Ignored = None
    defer_loading: Ignored = None


class HostedTool(Body):
    """A tool that runs at OpenAI, or is no function: the model is not told of it."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    type: Annotated[str, StringConstraints(min_length=1, max_length=256)]


ToolItem = Annotated[
    Annotated[FunctionToolItem, Tag("function")] | Annotated[HostedTool, Tag("hosted")],
    Discriminator(lambda tool: "function" if _kind(tool) == "function" else "hosted"),
]


class ToolChoiceItem(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Ignored = None


class Reasoning(Body):
    """effort `none` turns thinking off; other values, and the rest, change nothing."""

    effort: str | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None
    mode: Ignored = None


class ResponsesStreamOptions(Body):
    include_obfuscation: Ignored = None


class ResponsesBody(Body):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    tools: Annotated[list[ToolItem], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoiceItem | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: int | None = None
    include: Ignored = None
    max_tool_calls: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    user: Ignored = None
    client_metadata: Ignored = None
    context_management: Ignored = None
    prompt_cache_options: Ignored = None

    def check(self) -> None:
        """Raises ApiError."""
        for name in ("background", "conversation", "prompt", "top_logprobs"):
            if getattr(self, name):
                raise invalid(f"{name}: not served", name)
        if not self.input:
            raise invalid("input: nothing to answer", "input")

    def items(self) -> list[MessageItem | CallItem | OutputItem | ReasoningItem]:
        """The input as items."""
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def functions(self) -> list[FunctionToolItem]:
        """The tools that the model is told of."""
        return [tool for tool in self.tools or [] if isinstance(tool, FunctionToolItem)]

    def chat(self, messages: Sequence[dict[str, Any]]) -> ChatBody:
        """The chat request for `messages`, instructions before them. Raises ApiError."""
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("model", "stream", "temperature", "top_p", "top_k", "seed", "parallel_tool_calls")
        }
        system = {"role": "system", "content": self.instructions}
        fields["messages"] = with_one_system(([system] if self.instructions else []) + list(messages))
        fields["max_tokens"] = self.max_output_tokens
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning is not None and self.reasoning.effort == "none":
            kwargs.setdefault("enable_thinking", False)
        fields["chat_template_kwargs"] = kwargs
        if tools := self.functions():
            fields["tools"] = [_tool(tool) for tool in tools]
        choice = self.tool_choice
        if isinstance(choice, ToolChoiceItem):
            choice = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = choice
        fields["response_format"] = _format(self.text.format if self.text else None)
        try:
            request = ChatBody.model_validate(fields)
        except ValidationError as error:
            raise from_validation(error) from None
        request.check()
        return request


def _tool(tool: FunctionToolItem) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def _format(asked: TextFormat | None) -> dict[str, Any] | None:
    if asked is None or asked.type != "json_schema":
        return None if asked is None else {"type": asked.type}
    return {"type": "json_schema", "json_schema": {"name": asked.name or "answer", "schema": asked.schema_}}


def chat_messages(items: Sequence[MessageItem | CallItem | OutputItem | ReasoningItem]) -> list[dict[str, Any]]:
    """Items as chat messages: a thought, a text and calls that follow each other are one turn. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if isinstance(item, OutputItem):
            content = _content(item.output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _content(item.content, f"{where}.content")})
        elif isinstance(item, MessageItem):
            turn = _turn(messages, "content")
            content = _content(item.content, f"{where}.content")
            turn["content"] = content if not turn.get("content") else [*_parts(turn["content"]), *_parts(content)]
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _turn(messages, "tool_calls").setdefault("tool_calls", []).append(call)
        else:
            thought = "".join(part.text or "" for part in (item.content or item.summary or []))
            if thought:
                _turn(messages, "reasoning_content")["reasoning_content"] = thought
    return messages


def _turn(messages: list[dict[str, Any]], adding: str) -> dict[str, Any]:
    """The assistant's turn that the next item belongs to; a thought, or a text after calls, begins a new one."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    order = ("reasoning_content", "content", "tool_calls")
    later = order[order.index(adding) + (adding != "reasoning_content") :]
    if last is None or (adding != "tool_calls" and any(last.get(name) for name in later)):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _content(content: Content, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for i, item in enumerate(content):
        if item.type == "input_image":
            if item.image_url is None:
                raise invalid(
                    f"{where}[{i}].image_url: a picture needs it; files are not kept", f"{where}[{i}].image_url"
                )
            parts.append({"type": "image_url", "image_url": {"url": item.image_url}})
        else:
            parts.append({"type": "text", "text": item.text or item.refusal or ""})
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
