"""What is measured: something that answers prompts token by token. Here the engine itself; `url.py` has servers."""

import random
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from shardwise.engine.client import EngineClient, EngineFailed
from shardwise.engine.messages import SamplingParams
from shardwise.engine.request import RequestRefused

PLAIN_SHARE = 0.9  # of a vocabulary: the ids behind these may be special tokens


@dataclass(frozen=True)
class Limits:
    """What the target takes, None where it does not say: tokens of a request, requests at once."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None


@dataclass
class Trace:
    """One request as its sender saw it. Times in seconds of time.perf_counter.

    pieces: when tokens came, and how many with it. fault: why it ended without its whole answer, "" if it did not.
    """

    sent_s: float
    pieces: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    ended_s: float = 0.0
    fault: str = ""

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.pieces)

    @property
    def first_s(self) -> float:
        """From sending to the first token."""
        return self.pieces[0][0] - self.sent_s

    @property
    def whole_s(self) -> float:
        return self.ended_s - self.sent_s

    def gaps_s(self) -> list[float]:
        """Between each token and the one before; tokens that came together share their gap evenly."""
        found = list[float]()
        for (before_s, _), (now_s, count) in pairwise(self.pieces):
            found += [(now_s - before_s) / count] * count
        return found


class Target(Protocol):
    """What answers. A prompt is of the target's own kind, and nothing to others."""

    limits: Limits

    def prompt(self, source: random.Random, tokens: int) -> Any:
        """A prompt of about `tokens` tokens that begins unlike any other."""
        ...

    async def answer(self, prompt: Any, tokens: int) -> Trace:
        """Have `prompt` answered greedily with `tokens` tokens, stop tokens ignored. Never raises for a failure."""
        ...


class EngineTarget:
    """The engine over its socket, without HTTP and text in between. Prompts are random token ids."""

    def __init__(self, client: EngineClient, vocab_size: int) -> None:
        ready = client.ready
        self.limits = Limits(ready.max_model_len, ready.max_num_seqs) if ready else Limits()
        self._client = client
        self._ids = max(1, int(vocab_size * PLAIN_SHARE))
        self._count = 0

    def prompt(self, source: random.Random, tokens: int) -> list[int]:
        return [source.randrange(self._ids) for _ in range(tokens)]

    async def answer(self, prompt: list[int], tokens: int) -> Trace:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._count += 1
        trace = Trace(time.perf_counter(), prompt_tokens=len(prompt))
        try:
            async with aclosing(self._client.generate(f"bench-{self._count}", prompt, sampling)) as stream:
                async for message in stream:
                    if message.tokens:
                        trace.pieces.append((time.perf_counter(), len(message.tokens)))
        except (EngineFailed, RequestRefused) as error:
            trace.fault = error.message
        trace.ended_s = time.perf_counter()
        return trace
