"""Bodies of /v1/messages, and the chat request that each comes to."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field, StringConstraints, ValidationError

from shardwise.server.errors import from_validation, invalid
from shardwise.server.messages import with_one_system
from shardwise.server.requests import MAX_MESSAGES, Body, ChatBody, EchoBody, Ignored, StopString


class TextBlock(EchoBody):
    type: Literal["text"]
    text: str
    citations: Ignored = None
    cache_control: Ignored = None


class Source(EchoBody):
    """Of a picture or a document."""

    type: Literal["base64", "url", "text"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(EchoBody):
    type: Literal["image"]
    source: Source
    cache_control: Ignored = None


class DocumentBlock(EchoBody):
    """Plain text only."""

    type: Literal["document"]
    source: Source
    title: str | None = None
    context: str | None = None
    citations: Ignored = None
    cache_control: Ignored = None


class ThinkingBlock(EchoBody):
    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class RedactedThinkingBlock(EchoBody):
    """Nobody here can read it: it is left out."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


class ToolUseBlock(EchoBody):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Ignored = None
    cache_control: Ignored = None


class ToolResultBlock(EchoBody):
    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        str
        | Annotated[
            list[Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]], Field(fail_fast=True)
        ]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: Ignored = None


Block = Annotated[
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class InputMessage(EchoBody):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


def _custom(value: Any) -> Any:
    if value not in (None, "custom"):
        raise ValueError(f"{str(value)[:60]!r} is a tool that runs at Anthropic or is known to its models only")
    return value


class MessagesTool(Body):
    """A function. Tools that run at Anthropic are refused."""

    type: Annotated[Literal["custom"] | None, BeforeValidator(_custom)] = None
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: Ignored = None
    strict: Ignored = None
    eager_input_streaming: Ignored = None
    defer_loading: Ignored = None
    input_examples: Ignored = None
    allowed_callers: Ignored = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: Ignored = None
    task_budget: Ignored = None


class CountBody(Body):
    """What makes up a prompt."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: Ignored = None
    context_management: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None

    def check(self) -> None:
        """Raises ApiError."""
        if self.messages[-1].role == "assistant":
            raise invalid(
                "messages: the last one must be the user's; an answer cannot be begun for the model", "messages"
            )
        if self.tool_choice is not None and self.tool_choice.type == "tool" and self.tool_choice.name is None:
            raise invalid("tool_choice.name: type 'tool' needs it", "tool_choice.name")

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    def chat(self) -> dict[str, Any]:
        """The fields of a chat request with the same prompt."""
        messages: list[dict[str, Any]] = []
        if self.system:
            parts = [self.system] if isinstance(self.system, str) else [block.text for block in self.system]
            messages.append({"role": "system", "content": "\n\n".join(parts)})
        for i, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{i}]")
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": with_one_system(messages),
            "chat_template_kwargs": {"enable_thinking": self.thinks},
        }
        asked = self.output_config.format if self.output_config is not None else None
        if (asked := asked or self.output_format) is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": asked.schema_}}
        if self.tools:
            fields["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            fields["tool_choice"] = {
                "auto": "auto",
                "any": "required",
                "none": "none",
                "tool": {"type": "function", "function": {"name": self.tool_choice.name or ""}},
            }[self.tool_choice.type]
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        return fields


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=64, fail_fast=True)] | None = None
    metadata: Ignored = None
    service_tier: Ignored = None
    container: Ignored = None
    inference_geo: Ignored = None
    diagnostics: Ignored = None

    def chat(self) -> dict[str, Any]:
        fields = super().chat()
        for name in ("max_tokens", "stream", "temperature", "top_p", "top_k"):
            fields[name] = getattr(self, name)
        fields["stop"] = self.stop_sequences
        return fields


def chat_request(body: CountBody) -> ChatBody:
    """The chat request. Raises ApiError."""
    try:
        request = ChatBody.model_validate(body.chat())
    except ValidationError as error:
        raise from_validation(error) from None
    request.check()
    return request


def _tool(tool: MessagesTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _part(block: TextBlock | ImageBlock | DocumentBlock, where: str) -> dict[str, Any]:
    """A block as a part of a chat message's content."""
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    if isinstance(block, DocumentBlock):
        if source.type != "text" or source.data is None:
            raise invalid(f"{where}.source.type: of documents only plain text is served", f"{where}.source.type")
        return {"type": "text", "text": "\n\n".join(filter(None, (block.title, block.context, source.data)))}
    if source.type == "url" and source.url is not None:
        return {"type": "image_url", "image_url": {"url": source.url}}
    if source.type == "base64" and source.data is not None and source.media_type is not None:
        return {"type": "image_url", "image_url": {"url": f"data:{source.media_type};base64,{source.data}"}}
    raise invalid(f"{where}.source: a picture needs a url, or media_type and data in base64", f"{where}.source")


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _messages(message: InputMessage, where: str) -> list[dict[str, Any]]:
    """One turn: results of tools come before what the user says beside them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for i, block in enumerate(message.content):
        here = f"{where}.content[{i}]"
        if isinstance(block, TextBlock | ImageBlock | DocumentBlock):
            parts.append(_part(block, here))
        elif isinstance(block, ToolResultBlock):
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, here)})
        elif isinstance(block, ToolUseBlock):
            arguments = msgspec.json.encode(block.input).decode()
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        wrong_role = message.role == "system" or isinstance(block, ToolResultBlock) != (message.role == "user")
        if wrong_role and not isinstance(block, TextBlock | ImageBlock | DocumentBlock):
            raise invalid(f"{here}.type: no block of a {message.role} message", f"{here}.type")
    if message.role == "assistant":
        turn: dict[str, Any] = {"role": "assistant", "content": _content(parts)}
        if calls:
            turn["tool_calls"] = calls
        if thoughts:
            turn["reasoning_content"] = "\n\n".join(thoughts)
        return [turn]
    return results + ([{"role": message.role, "content": _content(parts)}] if parts or not results else [])


def _result(block: ToolResultBlock, where: str) -> str | list[dict[str, Any]]:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    return _content([_part(part, f"{where}.content[{i}]") for i, part in enumerate(block.content)])
