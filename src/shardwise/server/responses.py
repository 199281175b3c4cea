"""Bodies of answers, in the OpenAI shapes: typed dictionaries, so that a field which was not asked for is not there."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic wants this TypedDict before Python 3.12

Finish = Literal["stop", "length", "tool_calls"]


class Error(TypedDict):
    """request_id: as in the X-Request-Id header and the log."""

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: NotRequired[str]


class ErrorAnswer(TypedDict):
    error: Error


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    """completion_tokens has the stop token in it, if one ended the answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    """One entry a token; the first of an echoed prompt has no logprob. text_offset counts characters of `text`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """stop_reason: the stop string, or the id among stop_token_ids, that ended the answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    stop_reason: str | int | None
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """Whole, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]


class CalledFunction(TypedDict):
    """arguments: JSON as text; whole, unless the answer's finish_reason is length."""

    name: NotRequired[str]
    arguments: str


class ChatToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatToolCallDelta(TypedDict):
    """id, type and name come with the first delta of a call."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class ChatMessage(TypedDict):
    """reasoning_content: what the model thought before it answered. content: null if there are calls only."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCall]]


class ChatDelta(TypedDict):
    """What is new of a message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCallDelta]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


class Model(TypedDict):
    """max_model_len: tokens of prompt and answer; null while the engine starts."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Health(TypedDict):
    status: Literal["ok", "starting"]
