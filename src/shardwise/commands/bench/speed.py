"""Decode and prefill speed, each by a definition that start-up and warm-up drop out of.

Decode: two runs that differ only in how many tokens they generate, `long` and `short` of them, so that prefill drops
out: batch * (long - short) / (t(long) - t(short)). Prefill: the wall time until all prompts have their first token.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.commands.bench.limits import ByteLimit
from shardwise.commands.bench.target import Limits, Target, Trace
from shardwise.config import ConfigError
from shardwise.engine.client import EngineFailed
from shardwise.parallel.cost import Load


@dataclass(frozen=True)
class Decode:
    """Of `batch` requests at once: tokens a second over all of them, None if the runs differ too little to tell.

    limit_tokens_per_s, step_bytes: what reading allows, and what a step reads at the least on the rank with most; None
    if the device or the model is not known, as behind a URL.
    """

    batch: int
    prompt_tokens: float
    short_tokens: int
    long_tokens: int
    short_s: float
    long_s: float
    tokens_per_s: float | None
    limit_tokens_per_s: float | None = None
    step_bytes: float | None = None

    @property
    def share(self) -> float | None:
        """Of the limit."""
        known = self.tokens_per_s is not None and self.limit_tokens_per_s
        return self.tokens_per_s / self.limit_tokens_per_s if known else None  # pyright: ignore


@dataclass(frozen=True)
class Prefill:
    """Of `batch` prompts of about `asked_tokens` tokens at once; prompt_tokens: their mean, as counted."""

    batch: int
    asked_tokens: int
    prompt_tokens: float
    wall_s: float
    tokens_per_s: float
    limit_s: float | None = None

    @property
    def share(self) -> float | None:
        """Of the speed that reading alone allows."""
        return self.limit_s / self.wall_s if self.limit_s is not None else None


class Stopwatch:
    """Times batches on a target, each of prompts that were not there before, and keeps the best of `repeats` runs."""

    def __init__(self, target: Target, seed: int, repeats: int) -> None:
        self.target = target
        self._source = random.Random(seed)
        self._repeats = repeats

    async def once(self, batch: int, prompt_tokens: int, new_tokens: int) -> tuple[float, list[Trace]]:
        """Seconds until `batch` requests have their answers. Raises EngineFailed if one has none."""
        prompts: list[Any] = [self.target.prompt(self._source, prompt_tokens) for _ in range(batch)]
        traces = await asyncio.gather(*(self.target.answer(prompt, new_tokens) for prompt in prompts))
        if fault := next((trace.fault for trace in traces if trace.fault), ""):
            raise EngineFailed(f"{batch} requests of {prompt_tokens} + {new_tokens} tokens: {fault}")
        begin_s = min(trace.sent_s for trace in traces)
        return max(trace.ended_s for trace in traces) - begin_s, traces

    async def best(self, batch: int, prompt_tokens: int, new_tokens: int) -> tuple[float, list[Trace]]:
        runs = [await self.once(batch, prompt_tokens, new_tokens) for _ in range(self._repeats)]
        return min(runs, key=lambda run: run[0])

    async def decode(self, batch: int, prompt_tokens: int, short: int, long: int, limit: ByteLimit | None) -> Decode:
        await self.once(batch, prompt_tokens, 2)
        short_s, short_traces = await self.best(batch, prompt_tokens, short)
        long_s, long_traces = await self.best(batch, prompt_tokens, long)
        more = sum(trace.tokens for trace in long_traces) - sum(trace.tokens for trace in short_traces)
        told = mean([trace.prompt_tokens for trace in long_traces]) or prompt_tokens
        context = told + (short + long) / 2
        return Decode(
            batch, told, short, long, short_s, long_s,
            more / (long_s - short_s) if more > 0 and long_s > short_s else None,
            limit.decode_tokens_per_s(batch, context) if limit else None,
            limit.step_bytes(Load(batch, context)) if limit else None,
        )  # fmt: skip

    async def prefill(self, batch: int, prompt_tokens: int, limit: ByteLimit | None) -> Prefill:
        await self.once(batch, prompt_tokens, 1)
        wall_s, traces = await self.best(batch, prompt_tokens, 1)
        told = mean([trace.prompt_tokens for trace in traces]) or prompt_tokens
        limit_s = limit.prefill_seconds(batch, told) if limit else None
        return Prefill(batch, prompt_tokens, told, wall_s, batch * told / wall_s, limit_s)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def check_fits(batches: Sequence[int], length: int, limits: Limits, flags: str) -> None:
    """Raises ConfigError for requests longer, or more of them at once, than the target takes."""
    if limits.max_model_len is not None and length > limits.max_model_len:
        raise ConfigError(f"requests of {length} tokens, and {limits.max_model_len} are taken: lower {flags}")
    most = max(batches, default=0)
    if limits.max_num_seqs is not None and most > limits.max_num_seqs:
        raise ConfigError(
            f"{most} requests at once, and the engine takes {limits.max_num_seqs}: lower --batch, or raise "
            "--max-num-seqs"
        )
