"""Runs the answers of one request: the engine's tokens become pieces of text, several answers become one stream."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from shardwise.engine.client import EngineFailed
from shardwise.engine.messages import Logprob, Picture, SamplingParams, Tokens
from shardwise.server.backend import Engine
from shardwise.server.metrics import Meter
from shardwise.server.responses import Finish
from shardwise.server.text import ReasoningSplitter, StopStrings
from shardwise.server.tokenizer import Tokenizer
from shardwise.server.toolcalls import CallDelta, ToolCallParser, merged

MERGE_PIECES = 64  # of several answers, that wait for a slow reader


@dataclass(frozen=True, kw_only=True)
class Job:
    """One answer to be made. splitter: for chat, parts thinking from answer; stop strings then hold for the answer.

    tools: parts calls from the answer's text.
    """

    index: int
    request_id: str  # the engine's, unique
    prompt: list[int]
    sampling: SamplingParams
    pictures: Sequence[Picture] = ()  # in the order of the prompt
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    splitter: ReasoningSplitter | None = None
    tools: ToolCallParser | None = None
    meter: Meter


@dataclass(kw_only=True)
class Piece:
    """What is new of one answer. tokens, logprobs and offsets (characters) may run ahead of the text by a few."""

    index: int
    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)  # one a call
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    prompt_logprobs: list[Logprob] | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    generated_tokens: int = 0  # so far, in all
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # so far, those of the thinking

    def extend(self, later: "Piece") -> None:
        """Add what came after this."""
        self.text += later.text
        self.reasoning += later.reasoning
        self.calls = merged(self.calls + later.calls) if later.calls else self.calls
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.offsets += later.offsets
        self.prompt_logprobs = later.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.generated_tokens = later.generated_tokens
        self.reasoning_tokens = later.reasoning_tokens
        self.cached_tokens = max(self.cached_tokens, later.cached_tokens)


class _Assembler:
    """Makes pieces of one answer from the engine's messages."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(job.skip_special_tokens)
        self._stops = StopStrings(job.stops, job.include_stop)
        self._piece = Piece(index=job.index)
        self._generated_tokens = 0
        self._reasoning_tokens = 0
        self._characters = 0
        self._cached_tokens = 0

    def add(self, message: Tokens) -> Piece | None:
        """The next piece, if there is anything to tell. With its finish_reason set it is the last."""
        piece = self._piece
        self._cached_tokens = max(self._cached_tokens, message.cached_tokens)
        if message.prompt_logprobs is not None:
            piece.prompt_logprobs = message.prompt_logprobs
        for i, token in enumerate(message.tokens):
            piece.offsets.append(self._characters)
            piece.tokens.append(token)
            piece.logprobs += message.logprobs[i : i + 1]
            self._generated_tokens += 1
            self._reasoning_tokens += self._job.splitter is not None and self._job.splitter.thinking
            self._text(self._detokenizer.add(token))
            if self._stops.matched is not None:
                self._close_tools(complete=False)
                piece.finish_reason, piece.stop_reason = "stop", self._stops.matched
                return self._take()
            if self._job.tools is not None and self._job.tools.finished:
                piece.finish_reason = "tool_calls"
                return self._take()
        if message.finish_reason is not None:
            self._finish(message)
            return self._take()
        return self._take() if piece.text or piece.reasoning or piece.calls else None

    def _text(self, text: str) -> None:
        self._characters += len(text)
        if self._job.splitter is not None:
            reasoning, text = self._job.splitter.add(text)
            self._piece.reasoning += reasoning
        self._answer(text)

    def _answer(self, text: str) -> None:
        if self._stops.matched is None:
            self._say(self._stops.add(text, self._generated_tokens >= self._job.sampling.min_tokens))

    def _say(self, text: str) -> None:
        if self._job.tools is None:
            self._piece.text += text
        elif text:
            content, calls = self._job.tools.add(text)
            self._piece.text += content
            self._piece.calls = merged(self._piece.calls + calls)

    def _close_tools(self, complete: bool) -> None:
        if self._job.tools is not None:
            content, calls = self._job.tools.finish(complete)
            self._piece.text += content
            self._piece.calls = merged(self._piece.calls + calls)

    def _finish(self, message: Tokens) -> None:
        piece = self._piece
        if message.finish_reason not in ("stop", "length"):
            raise EngineFailed(f"the answer was given up ({message.finish_reason})")
        piece.finish_reason = message.finish_reason
        if message.stop_token is not None:
            piece.tokens.append(message.stop_token)
            self._generated_tokens += 1
            if message.stop_token in self._job.sampling.stop_token_ids:
                piece.stop_reason = message.stop_token
                if self._job.include_stop:
                    self._text(self._detokenizer.add(message.stop_token))
        self._text(self._detokenizer.finish())
        if self._job.splitter is not None:
            reasoning, text = self._job.splitter.finish()
            piece.reasoning += reasoning
            self._answer(text)
        if self._stops.matched is not None:
            piece.finish_reason, piece.stop_reason = "stop", self._stops.matched
        else:
            self._say(self._stops.finish())
        self._close_tools(complete=piece.finish_reason == "stop" and self._stops.matched is None)
        if piece.finish_reason == "stop" and self._job.tools is not None and self._job.tools.called:
            piece.finish_reason = "tool_calls"

    def _take(self) -> Piece:
        piece, self._piece = self._piece, Piece(index=self._job.index)
        piece.generated_tokens, piece.cached_tokens = self._generated_tokens, self._cached_tokens
        piece.reasoning_tokens = self._reasoning_tokens
        return piece


async def run(engine: Engine, tokenizer: Tokenizer, job: Job) -> AsyncGenerator[Piece, None]:
    """The pieces of one answer; the last has a finish_reason. Raises as Engine.generate does.

    Closing it, as when the client has left, cancels the request in the engine.
    """
    assembler = _Assembler(job, tokenizer)
    reason = "abort"
    try:
        stream = engine.generate(job.request_id, job.prompt, job.sampling, pictures=job.pictures)
        async with contextlib.aclosing(stream) as messages:
            async for message in messages:
                new_tokens = len(message.tokens) + (message.stop_token is not None)
                job.meter.tokens(new_tokens, len(job.prompt), message.cached_tokens)
                piece = assembler.add(message)
                if piece is not None:
                    reason = piece.finish_reason or reason
                    yield piece
                    if piece.finish_reason is not None:
                        return
        raise EngineFailed("the answer ended without a reason")
    except Exception:
        reason = "error"
        raise
    finally:
        job.meter.end("stop" if reason == "tool_calls" else reason)


async def nothing(job: Job) -> AsyncGenerator[Piece, None]:
    """An answer of no tokens, which needs no engine: what max_tokens 0 comes to unless logprobs are wanted."""
    yield Piece(index=job.index, finish_reason="length")


async def merge(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """The pieces of all, as they come. The first exception ends it; ending it ends all."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for piece in stream:
                yield piece
        return
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(MERGE_PIECES)

    async def pump(stream: AsyncGenerator[Piece, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for piece in stream:
                    await queue.put(piece)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(streams: Sequence[AsyncGenerator[Piece, None]]) -> list[Piece]:
    """All answers whole, by index."""
    answers = [Piece(index=i) for i in range(len(streams))]
    async with contextlib.aclosing(merge(streams)) as pieces:
        async for piece in pieces:
            answers[piece.index].extend(piece)
    return answers
