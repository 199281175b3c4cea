"""Who a rank is and what it works with: passed to whatever needs it, so that nothing asks a global."""

from dataclasses import dataclass

import torch

from shardwise.kernels.ops import Ops
from shardwise.parallel.comm import Communicator
from shardwise.shard import Partitions


@dataclass(frozen=True)
class RankContext:
    """`dtype` is what activations and plain weights are computed in; sums over ranks and residuals are fp32."""

    rank: int
    world: int
    partitions: Partitions
    comm: Communicator
    ops: Ops
    device: torch.device
    dtype: torch.dtype
