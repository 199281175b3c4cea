"""What experts take on the host and on the device, from their specs alone: for plans, before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shardwise.experts.bank import Pairs
from shardwise.experts.memory import aligned
from shardwise.experts.staging import ROOMS
from shardwise.shard import Local, ParamSpec, Partitions, local


@dataclass(frozen=True)
class ExpertSizes:
    """Of one rank: bank_bytes of all layers in host memory, slot_bytes of one slot in every layer, staging_bytes of the
    rooms for whole layers. experts: of a layer."""

    bank_bytes: int
    slot_bytes: int
    staging_bytes: int
    experts: int

    def device_bytes(self, slots: int) -> int:
        """On the device, with so many slots in every layer."""
        return slots * self.slot_bytes + self.staging_bytes


def expert_sizes(specs: Mapping[str, ParamSpec], pairs: Pairs, partitions: Partitions, rank: int) -> ExpertSizes:
    """The sizes of `rank`; `specs` has those that `pairs` names."""
    bank_bytes = slot_bytes = room_bytes = experts = 0
    for names in pairs.values():
        parts = [part for name in names for part in local(specs[name], partitions, rank)]
        bank_bytes += sum(map(_nbytes, parts))
        own = [part for part in parts if part.block[0]]
        slot_bytes += sum(_nbytes(part) // part.shape[0] for part in own if part.shape[0])
        room_bytes = max(room_bytes, sum(aligned(_nbytes(part)) for part in own))
        experts = max(experts, *(part.shape[0] for part in own))
    return ExpertSizes(bank_bytes, slot_bytes, ROOMS * room_bytes, experts)


def _nbytes(part: Local) -> int:
    return -(-prod(part.shape) * part.stored.bits // 8)
