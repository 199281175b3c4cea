"""POST /v1/completions: text or token ids in, their continuation out."""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from shardwise.engine.messages import Logprob
from shardwise.server.generation import Piece, collect, merge
from shardwise.server.logprobs import completion_logprobs, prompt_offsets
from shardwise.server.middleware import read_body
from shardwise.server.requests import CompletionBody
from shardwise.server.responses import Completion, CompletionChoice
from shardwise.server.services import Header, Services, UsageCounter, start
from shardwise.server.stream import DONE, EventStream, event, json_bytes, unless_gone
from shardwise.server.structured import checked_grammar


class _Answer:
    """Makes the OpenAI shapes of one request's pieces."""

    def __init__(
        self,
        services: Services,
        request: CompletionBody,
        header: Header,
        texts: Sequence[str],
        prompts: Sequence[list[int]],
    ) -> None:
        self._tokenizer = services.tokenizer
        self._request = request
        self._header = header
        self._texts = texts
        self._prompts = prompts
        self.usage = UsageCounter([len(prompt) for prompt in prompts], request.n or 1)

    def choice(self, piece: Piece, first: bool) -> CompletionChoice:
        """first: nothing of this answer was sent before, so an echo of the prompt comes with it."""
        self.usage.add(piece)
        prompt_index = piece.index // (self._request.n or 1)
        echo = bool(self._request.echo)
        prompt = self._prompts[prompt_index]
        choice: CompletionChoice = {
            "index": piece.index,
            "text": (self._texts[prompt_index] if echo and first else "") + piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._request.logprobs is not None:
            start_characters = len(self._texts[prompt_index]) if echo else 0
            logprobs: list[Logprob | None] = list(piece.logprobs)
            tokens, offsets = piece.tokens, [offset + start_characters for offset in piece.offsets]
            if echo and first:
                logprobs = [None, *(piece.prompt_logprobs or []), *logprobs]
                tokens, offsets = prompt + tokens, prompt_offsets(self._tokenizer, prompt) + offsets
            choice["logprobs"] = completion_logprobs(self._tokenizer, logprobs, tokens, offsets)
        if self._request.return_token_ids:
            choice["token_ids"] = piece.tokens
            if first:
                choice["prompt_token_ids"] = prompt
        return choice

    def body(self, choices: list[CompletionChoice]) -> Completion:
        return {
            "id": self._header.id,
            "object": "text_completion",
            "created": self._header.created,
            "model": self._header.model,
            "choices": choices,
        }

    async def events(self, streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[bytes, None]:
        options = self._request.stream_options
        include = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        begun: set[int] = set()
        async with contextlib.aclosing(merge(streams)) as pieces:
            async for piece in pieces:
                chunk = self.body([self.choice(piece, piece.index not in begun)])
                begun.add(piece.index)
                if include or continuous:
                    chunk["usage"] = self.usage.usage() if continuous else None
                yield event(chunk)
        if include:
            yield event({**self.body([]), "usage": self.usage.usage()})
        yield DONE


async def create_completion(services: Services, http: Request) -> Response:
    """Answers the request. Raises ApiError, RequestRefused and EngineFailed."""
    arrival_s = time.monotonic()
    body = await read_body(http, services.config.max_body_bytes)
    request = await services.parse(CompletionBody, body)
    header = Header.make(http.state.request_id, "cmpl", services.model_name(request.model))
    limits = services.limits()
    given = await services.tokenizer.run(len(body), request.prompts, services.model_config.vocab_size)

    def tokenise() -> list[tuple[str, list[int]]]:
        tokenizer = services.tokenizer
        for prompt in given:
            if isinstance(prompt, str):
                services.check_length(prompt, limits, "prompt")
        return [
            (prompt, tokenizer.encode(prompt, add_special_tokens=True))
            if isinstance(prompt, str)
            else (tokenizer.decode(prompt) if request.echo else "", prompt)
            for prompt in given
        ]

    pairs = await services.tokenizer.run(len(body), tokenise)
    texts, prompts = [text for text, _ in pairs], [prompt for _, prompt in pairs]
    grammar = await checked_grammar(services, request)
    streams = start(services, request, header, prompts, arrival_s, grammar=grammar)
    answer = _Answer(services, request, header, texts, prompts)
    if request.stream:
        return EventStream(answer.events(streams), header.request_id)
    pieces = await unless_gone(http.receive, collect(streams))
    whole = answer.body([answer.choice(piece, first=True) for piece in pieces])
    whole["usage"] = answer.usage.usage()
    return Response(json_bytes(whole), media_type="application/json")
