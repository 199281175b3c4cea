"""What the ranks of the pool run in tests of quantised checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from shardwise.config import RankEnvironment, ServeConfig
from shardwise.engine.build import Leader, Rank, build_rank
from shardwise.engine.messages import Failed, Generate, SamplingParams
from shardwise.layers.attention import KVCache
from shardwise.parallel.comm import Alone, TorchCommunicator


def _rank(rank: int, world: int, group: Any, serve: Mapping[str, Any]) -> tuple[Rank, ServeConfig]:
    config = ServeConfig(ranks=world, device="cpu", **serve)
    comm = TorchCommunicator(group, group) if world > 1 else Alone()
    one = build_rank(config, RankEnvironment(rank, world, rank, world, 0), comm)
    torch.set_num_threads(1)  # more of them wait for one another where other tests run
    return one, config


def generate(
    rank: int, world: int, group: Any, *, serve: Mapping[str, Any], requests: Sequence[tuple[list[int], dict[str, Any]]]
) -> list[tuple[list[int], list[float]]] | None:
    """On the first rank, of each request (prompt, sampling): its greedy tokens, the stop token at the end, and the lead
    of each over the next best, in logits."""
    one, config = _rank(rank, world, group, serve)
    if rank:
        one.runner.follow()
        return None
    leader = Leader(one, config)
    for n, (prompt, sampling) in enumerate(requests):
        params = msgspec.convert({"temperature": 0.0, "logprobs": 2, **sampling}, SamplingParams)
        leader.add(Generate(str(n), prompt, params))
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in requests]
    while leader.has_work():
        for message in leader.step():
            if isinstance(message, Failed):
                raise RuntimeError(message.message)
            tokens, leads = found[int(message.id)]
            tokens += [*message.tokens, *([] if message.stop_token is None else [message.stop_token])]
            leads += [entry.top[0][1] - entry.top[1][1] for entry in message.logprobs]
    leader.engine.check()
    leader.stop()
    return found


def caches(rank: int, world: int, group: Any, *, serve: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """The type of each attention layer's pages, and their scales."""
    one, _ = _rank(rank, world, group, serve)
    pages = [cache for cache in one.runner.caches if isinstance(cache, KVCache)]
    return [(str(cache.k_pages.dtype), cache.k_scale, cache.v_scale) for cache in pages]
