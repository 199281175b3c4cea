"""`shardwise verify`: the same prompts, greedily, at one rank and at --tp ranks; any difference is shown and fails."""

import argparse
import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from shardwise.commands.prepare import check_split, resolve_model, set_up_logging, settle_split
from shardwise.config import ConfigError, ServeConfig
from shardwise.engine.client import EngineClient, EngineFailed
from shardwise.engine.group import running_engine
from shardwise.engine.messages import SamplingParams
from shardwise.engine.worker import DEFAULT_ENGINE

PROMPTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "def add(a, b):\n    return",
    "Q: What is 12 plus 30?\nA:",
    "Once upon a time there was a small boat that wanted to see the ocean. Every morning it",
    "a",
)

LIKELIEST = 20  # tokens of each step whose logits are compared


@dataclass(frozen=True)
class Completion:
    """Tokens of one greedy answer, and for each step the logits of the likeliest tokens after log-softmax, by token."""

    tokens: tuple[int, ...]
    logits: tuple[Mapping[int, float], ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(",".join(map(str, self.tokens)).encode()).hexdigest()


@dataclass(frozen=True)
class Comparison:
    """Two answers to one prompt.

    largest: difference of logits, over the likeliest tokens of the steps that both took from the same tokens, the
    first of which the answers differ among them.
    """

    same: bool
    agreed_tokens: int
    largest: float


def encode(folder: Path, prompts: Sequence[str], vocab_size: int) -> list[list[int]]:
    """Token ids of `prompts`; for a checkpoint without a tokenizer, ids that follow from their bytes."""
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return [tokenizer.encode(prompt).ids for prompt in prompts]
    return [[(byte * 131 + place) % vocab_size for place, byte in enumerate(prompt.encode())] for prompt in prompts]


async def complete(client: EngineClient, name: str, prompt: list[int], max_tokens: int) -> Completion:
    """One greedy answer. Raises EngineFailed or RequestRefused."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=LIKELIEST)
    tokens, logits = list[int](), list[Mapping[int, float]]()
    async with aclosing(client.generate(name, prompt, sampling)) as stream:
        async for message in stream:
            tokens += message.tokens
            logits += [dict(entry.top) for entry in message.logprobs]
    return Completion(tuple(tokens), tuple(logits))


async def completions(
    config: ServeConfig, prompts: Sequence[list[int]], max_tokens: int, engine: str = DEFAULT_ENGINE
) -> list[Completion]:
    """Answers of an engine of its own, all prompts at once."""
    async with running_engine(config, engine) as client:
        asked = (complete(client, f"verify-{i}", prompt, max_tokens) for i, prompt in enumerate(prompts))
        return await asyncio.gather(*asked)


def compare(one: Completion, many: Completion) -> Comparison:
    """How far two answers to one prompt agree."""
    pairs = zip(one.tokens, many.tokens, strict=False)
    agreed = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(many.tokens)))
    steps = zip(one.logits[: agreed + 1], many.logits[: agreed + 1], strict=False)
    return Comparison(one.tokens == many.tokens, agreed, max((largest_gap(a, b) for a, b in steps), default=0.0))


def largest_gap(one: Mapping[int, float], many: Mapping[int, float]) -> float:
    """The largest difference of one step, over the tokens that both name."""
    return max((abs(many[token] - one[token]) for token in one.keys() & many.keys()), default=0.0)


def report(ranks: int, prompts: Sequence[str], ones: Sequence[Completion], manys: Sequence[Completion]) -> int:
    """Print the comparison; 1 if any answer differs."""
    console = Console(width=max(110, Console().width))
    result = Table("prompt", "sha256, 1 rank", f"sha256, {ranks} ranks", "tokens", "largest logit difference", "")
    different = 0
    for prompt, one, many in zip(prompts, ones, manys, strict=True):
        found = compare(one, many)
        different += not found.same
        verdict = "same" if found.same else f"DIFFERENT from token {found.agreed_tokens}"
        count = f"{len(many.tokens)}"
        result.add_row(repr(prompt[-40:]), one.sha256[:16], many.sha256[:16], count, f"{found.largest:.2e}", verdict)
    console.print(result)
    console.print(f"{len(prompts) - different} of {len(prompts)} answers are the same at 1 rank and at {ranks}")
    console.print(f"logits are compared after log-softmax, over the {LIKELIEST} likeliest tokens of every step")
    return int(different > 0)


def run(options: argparse.Namespace, config: ServeConfig) -> int:
    """0 if all answers are the same, 1 if not or if an engine failed. Raises ConfigError."""
    if config.ranks == 1:
        raise ConfigError("verify compares one rank with several; give --tp 2 or more")
    set_up_logging(config)
    config = settle_split(resolve_model(config))
    if config.ranks == 1:
        raise ConfigError(
            "one GPU is faster than all that were named, and verify compares one rank with several; add --tp"
        )
    vocab_size = check_split(config).vocab_size
    alone = msgspec.structs.replace(config, ranks=1, ratio=(), group_ratios={}, gpu=config.gpu[:1])
    prompts = encode(Path(config.model), PROMPTS, vocab_size)
    try:
        ones = asyncio.run(completions(alone, prompts, options.max_tokens))
        manys = asyncio.run(completions(config, prompts, options.max_tokens))
    except EngineFailed as error:
        Console(stderr=True).print(f"shardwise: error: {error}", markup=False)
        return 1
    return report(config.ranks, PROMPTS, ones, manys)
