"""What the ranks of the pool run in model tests: build a rank as the server does, then follow given plans."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch

from shardwise.config import RankEnvironment, ServeConfig
from shardwise.engine.build import Rank, build_rank
from shardwise.engine.plan import Chunk
from shardwise.kernels.norm.reference import add_rms_norm
from shardwise.parallel.comm import Alone, Partial, TorchCommunicator


class Promising(TorchCommunicator):
    """Leaves sums to the norm behind them, as over peers' memory."""

    def for_norm(self, x_TH: torch.Tensor) -> Partial:
        return Partial(x_TH, lambda x, *rest: add_rms_norm(self.all_reduce(x.clone()), *rest))

    def for_block(self, x_TH: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        return lambda outputs_TH, _, *rest: add_rms_norm(self.all_reduce(outputs_TH.clone()), *rest)


@lru_cache(maxsize=4)
def built(rank: int, world: int, group: Any, serve: bytes) -> Rank:
    """This rank of a server with `serve`, kept between calls: tests run many plans on one model.

    Where a ratio is given, sums are promised, so that either way is tested.
    """
    config = msgspec.json.decode(serve, type=ServeConfig)
    kind = Promising if config.ratio else TorchCommunicator
    comm = kind(group, group) if world > 1 else Alone()
    return build_rank(config, RankEnvironment(rank, world, rank, world, 0), comm)


def logits(
    rank: int, world: int, group: Any, *, serve: dict[str, Any], plans: Sequence[Sequence[Sequence[Any]]]
) -> list[torch.Tensor]:
    """The logits of each plan, whose chunks are given as the fields of Chunk."""
    config = ServeConfig(ranks=world, device="cpu", **serve)
    one = built(rank, world, group, msgspec.json.encode(config))
    return [one.runner.forward([Chunk(*fields) for fields in chunks]) for chunks in plans]
