"""All-reduces of small messages by reading the peers' memory: every rank reads all and adds in the order of ranks.

One launch of some microseconds inside a graph, where a ring of many steps takes three times that. Multicast of the
switch is never used.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from shardwise.config import forbid_multicast
from shardwise.parallel.comm import TorchCommunicator

LIMIT_BYTES = 1 << 20  # of a message; what it costs grows with the number of ranks
MOST_RANKS = 8
TYPES = (torch.float32, torch.bfloat16)
ALIGNMENT_BYTES = 16


class PeerCommunicator(TorchCommunicator):
    """As TorchCommunicator, but for all-reduces of up to `limit_bytes`, which go through `buffer`."""

    def __init__(self, base: TorchCommunicator, device: torch.device, limit_bytes: int = LIMIT_BYTES) -> None:
        super().__init__(base.data, base.control)
        forbid_multicast()
        self.limit_bytes = limit_bytes
        self.buffer = symmetric.empty(LIMIT_BYTES // 4, dtype=torch.float32, device=device)
        self.group_name = base.data.group_name
        symmetric.rendezvous(self.buffer, self.group_name)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        small = 0 < x.nbytes <= self.limit_bytes and x.nbytes % ALIGNMENT_BYTES == 0
        if not small or x.dtype not in TYPES or not x.is_contiguous():
            return super().all_reduce(x)
        place = self.buffer.view(x.dtype)[: x.numel()].view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(place, x, "sum", self.group_name)


def hindrance(device: torch.device, world: int, local_world: int) -> str:
    """Why this rank cannot read its peers' memory, as far as it can be known without trying; empty if it can."""
    if device.type != "cuda":
        return "the device is not a GPU"
    if world > MOST_RANKS:
        return f"{world} ranks; at most {MOST_RANKS} read one another"
    if local_world != world:
        return "the ranks are on several hosts"
    if not dist.is_nccl_available():
        return "this torch has no NCCL"
    blind = [peer for peer in range(local_world) if peer != device.index and not _reaches(device.index, peer)]
    return f"GPU {device.index} cannot reach the memory of {blind}" if blind else ""


def _reaches(one: int, other: int) -> bool:
    return torch.cuda.can_device_access_peer(one, other)
