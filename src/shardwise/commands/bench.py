"""`shardwise bench`: prefill and decode speed of an engine, without HTTP in between.

Decode speed comes from two runs that differ only in how many tokens they generate, b and a of them, so that prefill and
start-up drop out: batch * (b - a) / (t_b - t_a).
"""

import argparse
import asyncio
import json
import random
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from shardwise.commands.prepare import check_split, resolve_model, set_up_logging, settle_split
from shardwise.config import ConfigError, ServeConfig
from shardwise.engine.client import EngineClient, EngineFailed
from shardwise.engine.group import running_engine
from shardwise.engine.messages import SamplingParams


@dataclass(frozen=True)
class Figures:
    """Speeds of one batch size, tokens a second over all its requests."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


async def timed(client: EngineClient, batch: int, prompt_tokens: int, new_tokens: int, seed: int) -> float:
    """Seconds until `batch` requests with prompts of their own have `new_tokens` tokens each."""
    source = random.Random(seed)
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)

    async def one(name: str, prompt: list[int]) -> None:
        async with aclosing(client.generate(name, prompt, sampling)) as stream:
            async for _ in stream:
                pass

    prompts = [[source.randrange(100, 1000) for _ in range(prompt_tokens)] for _ in range(batch)]
    begin_s = time.perf_counter()
    await asyncio.gather(*(one(f"bench-{seed}-{i}", prompt) for i, prompt in enumerate(prompts)))
    return time.perf_counter() - begin_s


async def measure(client: EngineClient, batch: int, prompt_tokens: int, new_tokens: int) -> Figures:
    """Warm up, then time one token and `new_tokens` tokens: their difference is decoding, the rest prefill."""
    await timed(client, batch, prompt_tokens, 2, seed=batch * 10)
    short_s = await timed(client, batch, prompt_tokens, 1, seed=batch * 10 + 1)
    long_s = await timed(client, batch, prompt_tokens, new_tokens, seed=batch * 10 + 2)
    return Figures(
        batch=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        prefill_tokens_per_s=batch * prompt_tokens / short_s,
        decode_tokens_per_s=batch * (new_tokens - 1) / max(long_s - short_s, 1e-9),
    )


async def bench(options: argparse.Namespace, config: ServeConfig) -> list[Figures]:
    """Figures of every batch size asked for. Raises ConfigError if they do not fit the engine's limits."""
    async with running_engine(config) as client:
        ready = await client.wait_ready()
        length, most = options.prompt_tokens + options.new_tokens, max(options.batch)
        if length > ready.max_model_len or most > ready.max_num_seqs:
            raise ConfigError(
                f"{most} requests of {length} tokens: the engine takes {ready.max_num_seqs} of {ready.max_model_len} "
                "at once; lower --batch, --prompt-tokens or --new-tokens"
            )
        return [await measure(client, batch, options.prompt_tokens, options.new_tokens) for batch in options.batch]


def run(options: argparse.Namespace, config: ServeConfig) -> int:
    """Print a table, and write JSON if asked; 1 if the engine failed. Raises ConfigError."""
    set_up_logging(config)
    config = settle_split(resolve_model(config))
    check_split(config)
    try:
        figures = asyncio.run(bench(options, config))
    except EngineFailed as error:
        Console(stderr=True).print(f"shardwise: error: {error}", markup=False)
        return 1
    title = f"{config.served_model_name[0]}: {config.ranks} rank(s), prompts of {options.prompt_tokens} tokens"
    result = Table("batch", "prefill, tokens/s", "decode, tokens/s", "decode, tokens/s a request", title=title)
    for one in figures:
        each = one.decode_tokens_per_s / one.batch
        result.add_row(
            str(one.batch), f"{one.prefill_tokens_per_s:,.1f}", f"{one.decode_tokens_per_s:,.1f}", f"{each:,.1f}"
        )
    Console(width=max(100, Console().width)).print(result)
    if options.json:
        written = {
            "model": config.served_model_name[0],
            "ranks": config.ranks,
            "figures": [asdict(one) for one in figures],
        }
        options.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0
