"""What every endpoint works with, and the steps that both APIs share."""

import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shardwise.config import ModelConfig, ServeConfig
from shardwise.engine.messages import Grammar, Picture, Ready
from shardwise.server.backend import Engine
from shardwise.server.errors import ApiError, invalid
from shardwise.server.generation import Job, Piece, nothing, run
from shardwise.server.media import Media
from shardwise.server.metrics import Meter, Metrics
from shardwise.server.requests import MAX_CHOICES, CompletionBody, GenerateBody, Parsed, parse
from shardwise.server.responses import Usage
from shardwise.server.sampling import GenerationDefaults, resolve
from shardwise.server.text import ReasoningSplitter
from shardwise.server.tokenizer import Tokenizer
from shardwise.server.toolcalls import ToolCallParser

logger = logging.getLogger(__name__)

INLINE_BODY_BYTES = 1 << 16  # of a body that is parsed in the event loop: less than a millisecond


class Queue:
    """Counts the answers that are being made, and turns requests away when too many wait."""

    def __init__(self, limit: int) -> None:
        """limit: of answers that wait, beyond those that run together; 0: none."""
        self._limit = limit
        self.answers = 0

    def check(self, running: int) -> None:
        """running: how many the engine makes at once. Raises ApiError (429)."""
        waiting = self.answers - running
        if self._limit and waiting >= self._limit:
            raise ApiError(
                429,
                f"{waiting} requests wait already, the limit is {self._limit} (--max-queued-requests); try again soon",
                kind="rate_limit_error",
                code="queue_full",
            )

    async def count(self, stream: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
        """The same stream, counted while it is read."""
        self.answers += 1
        try:
            async with contextlib.aclosing(stream):
                async for piece in stream:
                    yield piece
        finally:
            self.answers -= 1


@dataclass(frozen=True)
class Services:
    """Parts of one app; nothing here changes but the metrics and the queue."""

    config: ServeConfig
    engine: Engine
    tokenizer: Tokenizer
    model_config: ModelConfig
    defaults: GenerationDefaults
    metrics: Metrics
    queue: "Queue"
    created: int  # seconds since 1970
    media: Media | None = None  # None: no vision tower

    @property
    def names(self) -> tuple[str, ...]:
        """By which the model may be asked for; the first is its own."""
        return self.config.served_model_name or (Path(self.config.model).name,)

    def model_name(self, asked: str | None) -> str:
        """The name to answer with; no name means the only model. Raises ApiError (404)."""
        if asked is None or asked in self.names:
            return asked or self.names[0]
        raise ApiError(
            404,
            f"model {asked[:200]!r} is not served here; there is {', '.join(self.names)}",
            param="model",
            code="model_not_found",
        )

    async def parse(self, model: type[Parsed], body: bytes) -> Parsed:
        """A request from its JSON, in a thread if it is long. Raises ApiError (400) that names the parameter."""
        if len(body) <= INLINE_BODY_BYTES:
            return parse(model, body)
        return await self.tokenizer.run(len(body), parse, model, body)

    def check_length(self, text: str, limits: Ready, param: str) -> None:
        """Raises ApiError for a text that cannot fit whatever its tokens are: that need not be tokenised to be told."""
        least = len(text.encode("utf-8", "replace")) // self.tokenizer.longest_token_bytes
        most = min(limits.max_model_len, limits.kv_tokens)
        if least > most:
            raise invalid(
                f"the prompt has {least} tokens or more, over the limit of {most} tokens a request; shorten it, or "
                "start the server with a larger --max-model-len",
                param,
                "context_length_exceeded",
            )

    def limits(self) -> Ready:
        """The engine's limits. Raises ApiError: 503 while it starts, and when the server is about to end; 429."""
        ready = self.engine.ready
        if ready is not None and not self.engine.draining:
            self.queue.check(ready.max_num_seqs)
            return ready
        message = "the server is shutting down" if self.engine.draining else "the engine is starting or restarting"
        raise ApiError(503, f"{message}; try again in a moment", kind="service_unavailable", code="engine_not_ready")


@dataclass(frozen=True)
class Header:
    """What one answer says of itself, and the HTTP request that it belongs to."""

    request_id: str
    id: str
    created: int
    model: str

    @classmethod
    def make(cls, request_id: str, prefix: str, model: str) -> "Header":
        """Its id is new, as clients may send one request_id twice."""
        return cls(request_id, f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)


class UsageCounter:
    """Tokens of one request with n answers to each of its prompts."""

    def __init__(self, prompt_tokens: Sequence[int], n: int) -> None:
        self._prompt_tokens = sum(prompt_tokens)
        self._n = n
        self._generated = [0] * (len(prompt_tokens) * n)
        self._cached: list[dict[int, int]] = [{} for _ in prompt_tokens]  # of each prompt, by answer

    def add(self, piece: Piece) -> None:
        self._generated[piece.index] = piece.generated_tokens
        self._cached[piece.index // self._n][piece.index] = piece.cached_tokens

    def usage(self) -> Usage:
        generated = sum(self._generated)
        # Tokens of a prompt that one of its answers computed were computed.
        cached = sum(min(answers.values(), default=0) for answers in self._cached)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def start(
    services: Services,
    request: GenerateBody,
    header: Header,
    prompts: Sequence[list[int]],
    arrival_s: float,
    splitter_of: str | None = None,
    pictures: Sequence[Picture] = (),
    tools: Callable[[], ToolCallParser | None] | None = None,
    grammar: Grammar | None = None,
) -> list[AsyncGenerator[Piece, None]]:
    """n streams of pieces for each of the prompts, numbered in that order. Nothing runs before it is iterated.

    splitter_of: the rendered chat prompt, if thinking is to be parted from the answer. pictures: of the only prompt.
    tools: makes a parser of calls for each answer. grammar: what each must match. Raises ApiError.
    """
    n, limits = request.n or 1, services.limits()
    if len(prompts) * n > MAX_CHOICES:
        raise invalid(f"n: {n} answers to {len(prompts)} prompts are over the limit of {MAX_CHOICES} a request", "n")
    echo_alone = isinstance(request, CompletionBody) and request.max_tokens == 0 and request.logprobs is None
    streams = []
    for i, prompt in enumerate(prompts):
        for choice in range(n):
            index = i * n + choice
            job = Job(
                index=index,
                request_id=f"{header.id}-{index}",
                prompt=prompt,
                pictures=pictures,
                sampling=msgspec.structs.replace(
                    resolve(request, choice, len(prompt), limits, services.defaults, services.model_config.vocab_size),
                    grammar=grammar,
                ),
                stops=request.stops(),
                include_stop=bool(request.include_stop_str_in_output),
                skip_special_tokens=request.skip_special_tokens is not False,
                splitter=None if splitter_of is None else ReasoningSplitter(splitter_of),
                tools=None if tools is None else tools(),
                meter=Meter(services.metrics, arrival_s),
            )
            stream = nothing(job) if echo_alone else run(services.engine, services.tokenizer, job)
            streams.append(services.queue.count(stream))
    logger.info(
        "request %s: %s, %d prompts of %d tokens, n=%d",
        header.request_id, header.id, len(prompts), sum(map(len, prompts)), n,
    )  # fmt: skip
    return streams
