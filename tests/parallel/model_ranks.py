"""What the ranks of the pool run in model tests: build a rank as the server does, then follow given plans."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch

from shardwise.config import RankEnvironment, ServeConfig
from shardwise.engine.build import Rank, build_rank
from shardwise.engine.plan import Chunk
from shardwise.parallel.comm import Alone, TorchCommunicator


@lru_cache(maxsize=4)
def built(rank: int, world: int, group: Any, serve: bytes) -> Rank:
    """This rank of a server with `serve`, kept between calls: tests run many plans on one model."""
    comm = TorchCommunicator(group, group) if world > 1 else Alone()
    config = msgspec.json.decode(serve, type=ServeConfig)
    return build_rank(config, RankEnvironment(rank, world, rank, world, 0), comm)


def logits(
    rank: int, world: int, group: Any, *, serve: dict[str, Any], plans: Sequence[Sequence[Sequence[Any]]]
) -> list[torch.Tensor]:
    """The logits of each plan, whose chunks are given as the fields of Chunk."""
    config = ServeConfig(ranks=world, device="cpu", **serve)
    one = built(rank, world, group, msgspec.json.encode(config))
    return [one.runner.forward([Chunk(*fields) for fields in chunks]) for chunks in plans]
