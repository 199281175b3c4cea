"""An engine for tests of the server: deterministic, with delays, refusals and failures on demand."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from shardwise.engine.client import EngineFailed, RequestRefused
from shardwise.engine.messages import FinishReason, Logprob, Picture, Ready, SamplingParams, Stats, Tokens

READY = Ready(max_model_len=512, kv_tokens=4096, max_num_seqs=8, ranks=1)


class FakeEngine:
    """Answers each prompt with `reply(prompt, sampling)`, a token a message, then stops.

    fail_after: raises EngineFailed after so many tokens. hang_after: says nothing more after so many.
    refuse: (message, param) of a RequestRefused at the first step. tokens_per_message: as with speculation.
    """

    def __init__(self, reply: Callable[[list[int], SamplingParams], list[int]], stop_token: int = 2036) -> None:
        self.ready: Ready | None = READY
        self.stats: Stats | None = None
        self.draining = False
        self.reply = reply
        self.stop_token = stop_token
        self.delay_s = 0.0
        self.fail_after: int | None = None
        self.hang_after: int | None = None
        self.refuse: tuple[str, str | None] | None = None
        self.tokens_per_message = 1
        self.finish_reason: FinishReason | None = None
        self.requests: list[tuple[str, list[int], SamplingParams]] = []
        self.pictures: list[Picture] = []
        self.running: set[str] = set()
        self.cancelled: set[str] = set()

    def _logprob(self, token: int, count: int | None) -> Logprob | None:
        # The chosen is the likeliest, the next ids follow.
        return None if count is None else Logprob(token, -0.5, [(token + i, -0.5 - i) for i in range(count)])

    async def generate(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        priority: int = 0,
        pictures: Sequence[Picture] = (),
    ) -> AsyncGenerator[Tokens, None]:
        assert request_id not in self.running
        self.pictures += pictures
        self.requests.append((request_id, prompt, sampling))
        self.running.add(request_id)
        ended = False
        try:
            if self.refuse is not None:
                ended = True
                raise RequestRefused(*self.refuse)
            async for message in self._messages(request_id, prompt, sampling):
                ended = message.finish_reason is not None
                yield message
        except EngineFailed:
            ended = True
            raise
        finally:
            self.running.discard(request_id)
            if not ended:
                self.cancelled.add(request_id)

    async def _messages(
        self, request_id: str, prompt: list[int], sampling: SamplingParams
    ) -> AsyncGenerator[Tokens, None]:
        full = self.reply(prompt, sampling)
        answer = full[: sampling.max_tokens]
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None:
            prompt_logprobs = [each for token in prompt[1:] if (each := self._logprob(token, sampling.prompt_logprobs))]
        if sampling.max_tokens == 0:
            yield Tokens(request_id, [], prompt_logprobs=prompt_logprobs, finish_reason="length")
            return
        step = self.tokens_per_message
        for start in range(0, len(answer), step):
            await asyncio.sleep(self.delay_s)
            if self.fail_after is not None and start >= self.fail_after:
                raise EngineFailed("a rank died")
            if self.hang_after is not None and start >= self.hang_after:
                await asyncio.Event().wait()
            tokens = answer[start : start + step]
            logprobs = [each for token in tokens if (each := self._logprob(token, sampling.logprobs))]
            yield Tokens(request_id, tokens, logprobs, prompt_logprobs if not start else None, cached_tokens=2)
        if self.finish_reason is not None:
            yield Tokens(request_id, [], finish_reason=self.finish_reason)
        elif len(full) >= sampling.max_tokens:
            yield Tokens(request_id, [], finish_reason="length")
        else:
            yield Tokens(request_id, [], finish_reason="stop", stop_token=self.stop_token)
