"""Where a rank's routed experts are: all on its device, or in host memory with slots on the device."""

import logging
import time
from collections.abc import Mapping
from typing import Literal

from shardwise.cache.budget import GIB, LEAST_SEQS, floor_bytes
from shardwise.cache.pool import CacheSpecs
from shardwise.checkpoint.index import Source
from shardwise.config import ModelConfig, ServeConfig
from shardwise.experts.bank import load_banks
from shardwise.experts.offload import Offload
from shardwise.models.qwen3_5 import expert_banks
from shardwise.parallel.choice import RESERVE_BYTES
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Partitions, local_bytes

logger = logging.getLogger(__name__)

Mode = Literal["resident", "offload", "hybrid"]


def expert_specs(model: ModelConfig, specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Those of `specs` that are routed experts."""
    names = [name for pair in expert_banks(model).values() for name in pair]
    return {name: specs[name] for name in names}


def choose_mode(
    serve: ServeConfig,
    model: ModelConfig,
    specs: Mapping[str, ParamSpec],
    caches: CacheSpecs,
    ctx: RankContext,
    free_bytes: int,
) -> Mode:
    """What --experts means here, the same on every rank. free_bytes: what this rank may take, with nothing loaded.

    auto: resident where all ranks have room for their experts beside the KV floor, and always on a CPU.
    """
    if not model.experts:
        return "resident"
    if serve.experts != "auto":
        return serve.experts
    if ctx.device.type == "cpu":
        return "resident"
    weights_bytes = sum(local_bytes(spec, ctx.partitions, ctx.rank) for spec in specs.values())
    row_bytes, page_bytes = (size(ctx.partitions, ctx.rank) for size in (caches.row_bytes, caches.page_bytes))
    rows_bytes = ((serve.max_num_seqs or LEAST_SEQS) + 1) * row_bytes
    left = free_bytes - weights_bytes - rows_bytes - floor_bytes(serve, model, page_bytes) - RESERVE_BYTES
    if ctx.comm.minimum(left) >= 0:
        return "resident"
    logger.info("experts stay in host memory: %.2f GiB are lacking to hold them all on this device", -left / GIB)
    return "offload"


def make_offload(
    model: ModelConfig, specs: Mapping[str, ParamSpec], partitions: Partitions, source: Source, ctx: RankContext
) -> Offload:
    """Load the banks of this rank. There are no slots yet, so whatever is computed first streams layers."""
    begin_s = time.monotonic()
    those = expert_specs(model, specs)
    banks, pinned = load_banks(those, expert_banks(model), partitions, ctx.rank, source, ctx.device)
    held_bytes = sum(bank.nbytes for bank in banks.values())
    logger.info(
        "%d bytes of experts in host memory (%s) in %.1f s",
        held_bytes, "page-locked" if pinned else "not page-locked", time.monotonic() - begin_s,
    )  # fmt: skip
    return Offload(banks, model.experts_per_token, ctx.ops, ctx.device)
