"""Errors in Anthropic's shape."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic wants this TypedDict before Python 3.12

from shardwise.server.errors import ApiError

ERROR_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class MessagesError(TypedDict):
    type: Literal["error"]
    error: dict[str, str]
    request_id: NotRequired[str]


def error_body(error: ApiError, request_id: str) -> MessagesError:
    """An error in Anthropic's shape; the parameter at fault stands in the message."""
    kind = ERROR_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
