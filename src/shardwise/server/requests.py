"""Bodies of requests, as pydantic models: strict types, nothing unknown, null means "not given". See docs/api.md."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from shardwise.server.errors import from_validation, invalid

MAX_CHOICES = 1024  # answers of one request: prompts times n
MAX_LOGPROBS = 20
MAX_MESSAGES = 10_000  # of one request: checking more would hold everyone up, and no context has room for them
Ignored = Annotated[Any, Field(description="Accepted and ignored.")]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    """What all parts of a request have in common."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class EchoBody(Body):
    """A part of an answer that comes back. Clients' own types write all fields that they know: null is not given."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class StreamOptions(Body):
    """With `stream` only."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


Choices = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]], Field(min_length=1, max_length=4096)
]


class StructuredOutputs(Body):
    """One of these; `json_object` asks for any object."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class JsonSchema(Body):
    name: str | None = None
    description: Ignored = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Ignored = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerateBody(Body):
    """Parameters of both APIs: sampling, when to stop, what to report."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=64, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check(self) -> None:
        """What a field alone cannot tell. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options: only with stream", "stream_options")


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: Annotated[
        Any,
        WithJsonSchema(
            {
                "description": "A text, token ids, or a list of either.",
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}},
                    {"type": "array", "items": {"type": "integer"}},
                    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                ],
            }
        ),
    ]
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: str | None = None

    def prompts(self, vocab_size: int) -> list[str | list[int]]:
        """The prompts, one or many. Raises ApiError; token ids must be under vocab_size."""
        value = self.prompt
        if isinstance(value, list) and set(map(type, value)) == {int}:
            value = [value]
        many: list[Any] = value if isinstance(value, list) else [value]
        if not many:
            raise invalid("prompt: an empty list", "prompt")
        for i, item in enumerate(many):
            where = f"prompt[{i}]" if isinstance(self.prompt, list) else "prompt"
            if not isinstance(item, str | list):
                raise invalid("prompt: must be a text, token ids, or a list of texts or of token ids", "prompt")
            if isinstance(item, list):
                check_token_ids(item, vocab_size, where)
            if not item:
                raise invalid(f"{where}: an empty prompt; there is nothing to continue", "prompt")
        return many

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise invalid("suffix: filling in the middle is not served", "suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid(f"best_of: {self.best_of}; only the same as n ({self.n or 1}) is served", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens: 0 is only useful with echo; ask for 1 or more", "max_tokens")


class MediaUrl(Body):
    """Where a picture or a video is: a data URL, or http(s) and file where the server allows them."""

    url: str
    detail: Ignored = None


class ContentPart(Body):
    """A part of a message's content: text, a picture or a video."""

    type: str
    text: str | None = None
    image_url: str | MediaUrl | None = None
    video_url: str | MediaUrl | None = None


class FunctionCall(Body):
    """arguments: a JSON object as text, as OpenAI has it, or the object itself."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(Body):
    """A call that the assistant made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One turn. What an answer brings (refusal, annotations, audio ...) may be sent back as it was, and is ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: Ignored = None
    annotations: Ignored = None
    audio: Ignored = None
    function_call: Ignored = None


class FunctionTool(BaseModel):
    """The schema goes to the template as it is."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


def as_given(value: Any, check: Callable[[Any], Any]) -> Any:
    """Checked, but with its keys in the caller's order, which the template shows to the model."""
    check(value)
    return value


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Annotated[Tool, WrapValidator(as_given)]], Field(max_length=1024, fail_fast=True)] | None = (
        None
    )
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def named_tool(self) -> str | None:
        """The one function that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedToolChoice) else None

    def tool_definitions(self) -> list[Mapping[str, Any]]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else list(cast(list[Mapping[str, Any]], self.tools or []))

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs: only with logprobs: true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise invalid(
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; give one",
                "max_tokens",
            )
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise invalid(f"{name}: must be 1 or more", name)
        self._check_tools()

    def _check_tools(self) -> None:
        names = [tool["function"]["name"] for tool in cast(list[Any], self.tools or [])]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise invalid(f"tools: two functions are named {twice[:100]!r}", "tools")
        named = self.named_tool()
        if named is not None and named not in names:
            raise invalid(f"tool_choice: no function {named[:100]!r} among the tools", "tool_choice")
        if self.tool_choice == "required" and not names:
            raise invalid("tool_choice: a call is required, and there are no tools", "tool_choice")


def check_token_ids(tokens: list[Any], vocab_size: int, where: str) -> None:
    """Raises ApiError unless all are whole numbers under vocab_size."""
    if set(map(type, tokens)) <= {int} and min(tokens, default=0) >= 0 and max(tokens, default=0) < vocab_size:
        return
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            shown = repr(token)[:40]
            raise invalid(
                f"{where}: {shown} is no token id; the vocabulary has 0 to {vocab_size - 1}", where.split("[")[0]
            )


class Checked(Protocol):
    """A body of any endpoint."""

    @classmethod
    def model_validate_json(cls, json_data: bytes) -> Self: ...

    def check(self) -> None: ...


Parsed = TypeVar("Parsed", bound=Checked)


def parse(model: type[Parsed], body: bytes) -> Parsed:
    """A request from its JSON. Raises ApiError (400) that names the parameter."""
    try:
        request = model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None
    request.check()
    return request
