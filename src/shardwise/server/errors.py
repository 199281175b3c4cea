"""What goes wrong, as OpenAI clients read it: {"error": {message, type, param, code}} with an HTTP status."""

from typing import Any

from pydantic import ValidationError

from shardwise.engine.client import EngineFailed, RequestRefused

MAX_MESSAGE_CHARACTERS = 500
_UNION_BRANCHES = frozenset(
    {"str", "int", "float", "bool", "dict", "list", "MediaUrl", "NamedToolChoice", "ToolChoiceItem"}
)


class ApiError(Exception):
    """An answer other than 200. `param` names the request's field at fault, `code` is for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    def body(self, request_id: str = "") -> dict[str, Any]:
        """The JSON answer. `request_id` finds the request in the log."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error | ({"request_id": request_id} if request_id else {})}


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A value that is wrong or that is not served: 400."""
    return ApiError(400, message, param=param, code=code)


def from_exception(error: BaseException) -> ApiError:
    """The answer for whatever a request ran into. An exception that we did not foresee says nothing of its inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefused):
        return invalid(error.message, error.param)
    if isinstance(error, EngineFailed):
        return ApiError(500, f"the engine failed: {error.message}", code="engine_failed")
    return ApiError(500, "internal error; the server's log has more under this request id", code="internal_error")


def _param(location: tuple[int | str, ...]) -> str | None:
    """`messages[0].content` from pydantic's path, without the names it gives to branches of a union."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _UNION_BRANCHES and "[" not in part and "-" not in part:
            path += f".{part}" if path else part
    return path or None


def from_validation(error: ValidationError) -> ApiError:
    """One of the faults that pydantic found: the deepest, as in a union that is the branch which fits best; of equally
    deep ones rather what is wrong with a value than that it is of another type."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    fault = max(faults, key=lambda fault: (len(fault["loc"]), not fault["type"].endswith("_type")))
    if fault["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON in UTF-8: {fault['msg']}", code="invalid_json")
    # A key of the caller's may be megabytes long, or hold what a terminal would obey.
    param = (_param(fault["loc"]) or "")[:MAX_MESSAGE_CHARACTERS] or None
    if fault["type"] == "extra_forbidden":
        return invalid(f"unknown parameter: {param!r}", param, "unknown_parameter")
    if fault["type"] == "missing":
        return invalid(f"{param}: this parameter is required", param, "missing_required_parameter")
    message = fault["msg"].removeprefix("Value error, ")[:MAX_MESSAGE_CHARACTERS]
    return invalid(f"{param or 'body'}: {message}", param)
