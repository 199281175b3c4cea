"""What every rank's memory is for, as the shard spec sizes it: known on the first rank without asking the others."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.cache.budget import Budget, affords_list
from shardwise.cache.pool import CacheSpecs
from shardwise.config import ServeConfig
from shardwise.engine.messages import RankMemory
from shardwise.layers.embedding import Head, listed_bytes
from shardwise.parallel.choice import RESERVE_BYTES
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Partitions, local_bytes

logger = logging.getLogger(__name__)

CLASSES = (
    ("vocabulary", r"embed|head"),
    ("attention", r"layers\.\d+\.attention\."),
    ("delta", r"layers\.\d+\.delta\."),
    ("experts", r"layers\.\d+\.mlp\.experts\."),
    ("mlp", r"layers\.\d+\.mlp\."),
    ("vision", r"vision\.|visual\."),
    ("norms", r".*norm"),
    ("other", r""),
)
SHORTLIST = "shortlist"  # beside these, of the head


@dataclass(frozen=True)
class Device:
    """A rank's device: its name, its id for the vendor's tools, its memory. Empty and 0: not known on this host."""

    name: str = ""
    id: str = ""
    memory_bytes: int = 0


def weight_class(name: str) -> str:
    """The class of a weight, by its local name."""
    return next(kind for kind, pattern in CLASSES if re.match(pattern, name))


def weights_by_class(
    specs: Mapping[str, ParamSpec], partitions: Partitions, rank: int, experts_bytes: int | None = None
) -> dict[str, int]:
    """Bytes on the device of `rank` in each class, in the order of CLASSES. experts_bytes: if not all are there."""
    totals = {kind: 0 for kind, _ in CLASSES}
    for name, spec in specs.items():
        totals[weight_class(name)] += local_bytes(spec, partitions, rank)
    if experts_bytes is not None:
        totals["experts"] = experts_bytes
    return {kind: total for kind, total in totals.items() if total}


def local_devices(device_type: str, indices: Sequence[int]) -> list[Device]:
    """The devices of the ranks on the first rank's host, which are the first ones; by torch's numbers of them."""
    if device_type == "cpu":
        return [Device("CPU")] * len(indices)
    every = [torch.cuda.get_device_properties(index) for index in indices]
    return [Device(each.name, str(getattr(each, "uuid", "")), each.total_memory) for each in every]


def rank_memory(
    specs: Mapping[str, ParamSpec],
    caches: CacheSpecs,
    partitions: Partitions,
    limits: Budget,
    ranks: int,
    devices: Sequence[Device],
    experts_bytes: Callable[[int], int] | None = None,
    listed: bool = False,
) -> tuple[RankMemory, ...]:
    """What each of `ranks` ranks holds. devices: of the first of them, as many as are known. experts_bytes: on the
    device of a rank, if not all are there. listed: whether heads keep shortlists.
    """
    rows = limits.rows + limits.snapshot_rows
    each = list[RankMemory]()
    for rank in range(ranks):
        device = devices[rank] if rank < len(devices) else Device()
        row_bytes, page_bytes = caches.row_bytes(partitions, rank), caches.page_bytes(partitions, rank)
        weights = weights_by_class(specs, partitions, rank, experts_bytes and experts_bytes(rank))
        if listed:
            weights[SHORTLIST] = listed_bytes(specs, partitions, rank)
        each.append(
            RankMemory(
                device=device.name,
                device_id=device.id,
                memory_bytes=device.memory_bytes,
                weights_bytes=weights,
                state_bytes=row_bytes * rows,
                state_row_bytes=row_bytes,
                kv_bytes=page_bytes * limits.pages,
                kv_token_bytes=page_bytes / limits.page_tokens,
            )
        )
    return tuple(each)


def keep_shortlist(
    serve: ServeConfig, specs: Mapping[str, ParamSpec], head: Head, ctx: RankContext, left_bytes: int, slotted: bool
) -> None:
    """Have the head keep its shortlist if every rank has memory to spare, and none of their lists would be long.

    left_bytes: beside this rank's weights; slotted: experts are in slots.
    """
    wanted = listed_bytes(specs, ctx.partitions, ctx.rank)
    if not ctx.comm.minimum(int(affords_list(serve, left_bytes - RESERVE_BYTES, wanted, slotted))):
        return
    if ctx.comm.minimum(int(head.make_shortlist())):
        logger.info("%d bytes of the head's copy in 8 bits, for steps of few tokens", wanted)
    else:
        head.shortlist = None
        logger.info("the head has weights so unlike that its copy in 8 bits would say little; all logits are computed")
    if ctx.device.type == "cuda":
        torch.cuda.empty_cache()
