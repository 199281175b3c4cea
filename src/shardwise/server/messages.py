"""Chat messages as the template wants them: plain dictionaries, arguments of calls as objects."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from shardwise.server.errors import invalid
from shardwise.server.requests import ContentPart, Message, ToolCall


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages for the chat template. Raises ApiError that names the one at fault."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def with_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """System and developer messages as templates take them: one, at the beginning; later ones become the user's."""
    systems = ("system", "developer")
    count = next((i for i, message in enumerate(messages) if message["role"] not in systems), len(messages))
    texts = [text for message in messages[:count] for text in _texts(message["content"])]
    first = [{"role": "system", "content": "\n\n".join(texts)}] if count else []
    return first + [
        {"role": "user", "content": "<system>\n" + "\n\n".join(_texts(message["content"])) + "\n</system>"}
        if message["role"] in systems
        else message
        for message in messages[count:]
    ]


def _texts(content: str | list[dict[str, Any]]) -> list[str]:
    return [content] if isinstance(content, str) else [part.get("text", "") for part in content]


def _message(message: Message, where: str) -> dict[str, Any]:
    if message.content is None and message.role != "assistant":
        raise invalid(f"{where}.content: a {message.role} message needs content", f"{where}.content")
    result: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message.content, f"{where}.content"),
    }
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    if message.tool_calls:
        result["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}].function.arguments") for i, call in enumerate(message.tool_calls)
        ]
    return result


@dataclass(frozen=True)
class MediaPart:
    """A picture or a video in the messages; `where` names it in errors."""

    kind: Literal["image", "video"]
    url: str
    where: str


def media_parts(messages: Sequence[Message]) -> list[MediaPart]:
    """The pictures and videos of all messages, in order. Raises ApiError for one without a URL."""
    found: list[MediaPart] = []
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            for kind in ("image", "video"):
                if part.type != f"{kind}_url":
                    continue
                where = f"messages[{i}].content[{j}].{kind}_url"
                given = part.image_url if kind == "image" else part.video_url
                url = given if isinstance(given, str | None) else given.url
                if not url:
                    raise invalid(f"{where}: a part of type '{kind}_url' needs its url", where)
                found.append(MediaPart(kind, url, where))
    return found


def _content(content: str | list[ContentPart] | None, where: str) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for i, part in enumerate(content):
        if part.type in ("image_url", "video_url"):
            parts.append({"type": part.type.removesuffix("_url")})
            continue
        if part.type != "text":
            raise invalid(
                f"{where}[{i}].type: {part.type[:40]!r} is not served; 'text', 'image_url' and 'video_url' are",
                f"{where}[{i}].type",
            )
        if part.text is None:
            raise invalid(f"{where}[{i}].text: a text part needs its text", f"{where}[{i}].text")
        parts.append({"type": "text", "text": part.text})
    return parts


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, RecursionError):
            raise invalid(f"{where}: must be a JSON object", where) from None
    if not isinstance(arguments, dict):
        raise invalid(f"{where}: must be a JSON object", where)
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})
