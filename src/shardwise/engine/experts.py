"""Where a rank's routed experts are: all on its device, or in host memory with slots on the device."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Literal

import msgspec
import torch

from shardwise.cache.budget import GIB, LEAST_SEQS, floor_bytes
from shardwise.cache.pool import CacheSpecs
from shardwise.checkpoint.index import CheckpointIndex, Source
from shardwise.config import ModelConfig, ServeConfig
from shardwise.engine.messages import Stats
from shardwise.experts.bank import Banks, load_banks
from shardwise.experts.choice import fetch_or_compute
from shardwise.experts.hybrid import Hybrid
from shardwise.experts.keys import bank_key
from shardwise.experts.offload import Offload
from shardwise.experts.sizes import ExpertSizes, expert_sizes
from shardwise.models.qwen3_5 import expert_banks
from shardwise.parallel.choice import RESERVE_BYTES
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Partitions, local_bytes

logger = logging.getLogger(__name__)

LAUNCHES = 100  # to time one
LAYER_LAUNCHES = 25  # of a layer without a graph, with what Python does around them: 1.58 ms at 63.7 us each, measured

Mode = Literal["resident", "offload", "hybrid", "either"]


def expert_specs(model: ModelConfig, specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Those of `specs` that are routed experts."""
    names = [name for pair in expert_banks(model).values() for name in pair]
    return {name: specs[name] for name in names}


def sizes_of(model: ModelConfig, specs: Mapping[str, ParamSpec], partitions: Partitions, rank: int) -> ExpertSizes:
    """What experts take on `rank` where they are not all on its device."""
    return expert_sizes(specs, expert_banks(model), partitions, rank)


def experts_bytes(
    model: ModelConfig, specs: Mapping[str, ParamSpec], partitions: Partitions, slots: int
) -> Callable[[int], int] | None:
    """What experts take on the device of a rank that has so many slots of each layer; None: all are there."""
    return (lambda rank: sizes_of(model, specs, partitions, rank).device_bytes(slots)) if slots else None


def with_experts(stats: Stats, offload: Offload | None) -> Stats:
    """`stats` with the figures of experts that are not on the device."""
    if offload is None:
        return stats
    counts = offload.counts()
    return msgspec.structs.replace(
        stats,
        expert_slots=offload.count,
        expert_hits=counts.hits,
        expert_misses=counts.misses,
        expert_copied_bytes=counts.copied_bytes,
    )


def choose_mode(
    serve: ServeConfig,
    model: ModelConfig,
    specs: Mapping[str, ParamSpec],
    caches: CacheSpecs,
    ctx: RankContext,
    free_bytes: int,
) -> Mode:
    """What --experts means here, the same on every rank. free_bytes: what this rank may take, with nothing loaded.

    auto: resident where all ranks have room for their experts beside the KV floor, and always on a CPU; if not,
    either of the others, which `divided` measures.
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
    if left < 0:
        logger.info("experts stay in host memory: %.2f GiB are lacking to hold them all on this device", -left / GIB)
    return "either"


def banks_ahead(
    serve: ServeConfig, model: ModelConfig, specs: Mapping[str, ParamSpec], source: Source, ctx: RankContext
) -> Callable[[], tuple[Banks, bool]]:
    """What loads this rank's banks, as `load_banks`, when it is called.

    With a folder for banks they are on their way already, in threads: kept ones come without Python's lock, so that the
    weights beside experts are read meanwhile.
    """
    those, index = expert_specs(model, specs), source if isinstance(source, CheckpointIndex) else None

    def loaded() -> tuple[Banks, bool]:
        begin_s, cache = time.monotonic(), None
        if serve.bank_cache:
            key = bank_key(Path(serve.model), those, ctx.partitions, ctx.rank, index, serve.seed)
            cache = Path(serve.bank_cache), key
        banks, pinned = load_banks(those, expert_banks(model), ctx.partitions, ctx.rank, source, ctx.device, cache)
        logger.info(
            "%d bytes of experts in host memory%s in %.1f s", sum(bank.nbytes for bank in banks.values()),
            "" if ctx.device.type == "cpu" else ", page-locked" if pinned else ", not page-locked",
            time.monotonic() - begin_s,
        )  # fmt: skip
        return banks, pinned

    if not serve.bank_cache:
        return loaded
    coming = Future[tuple[Banks, bool]]()

    def work() -> None:
        try:
            if ctx.device.type == "cuda":
                torch.cuda.set_device(ctx.device)
            coming.set_result(loaded())
        except BaseException as error:  # told to who asks for the banks
            coming.set_exception(error)

    Thread(target=work, name="banks", daemon=True).start()  # a start that fails beside it ends without it
    return coming.result


def make_offload(
    mode: Mode, model: ModelConfig, ctx: RankContext, threads: int, load: Callable[[], tuple[Banks, bool]],
    graphs: bool = True,
) -> Offload:  # fmt: skip
    """Load the banks of this rank. There are no slots yet, so whatever is computed first streams layers.

    mode: not resident. threads: of the CPU that may compute experts. load: see banks_ahead. graphs: whether decode
    steps are to be captured.
    """
    banks, pinned = load()
    pinned = bool(ctx.comm.minimum(int(pinned)))  # graphs are for all ranks or for none
    graphs = pinned and graphs and ctx.comm.capturable
    hybrid = divided(mode, banks, model, ctx, threads, graphs) if mode != "offload" else None
    return Offload(banks, model.experts_per_token, ctx.ops, ctx.device, pinned, hybrid)


def launch_seconds(ctx: RankContext) -> float:
    """What this process takes to start one small operation on its GPU."""
    x_TH, weight_H = torch.ones((1, 128), device=ctx.device), torch.ones(128, device=ctx.device)
    taken_s = 0.0
    for _ in range(2):  # the first time it may be compiled
        begin_s = time.perf_counter()
        for _ in range(LAUNCHES):
            ctx.ops.rms_norm(x_TH, weight_H, 1e-6)
        taken_s = time.perf_counter() - begin_s
        torch.cuda.synchronize(ctx.device)
    return taken_s / LAUNCHES


def divided(
    mode: Mode, banks: Banks, model: ModelConfig, ctx: RankContext, threads: int, graphs: bool = False
) -> Hybrid | None:
    """How misses are divided between copies and the CPU; None if, with the choice ours, copies alone are as fast.

    graphs: whether steps would be captured if the CPU computed nothing.
    """
    if ctx.device.type == "cpu":  # nothing is faster there: half of them each way
        return Hybrid(threads, lambda misses: misses // 2)
    bank = next(iter(banks.values()))
    measured = fetch_or_compute(bank.gate_up, bank.down, ctx.device, threads, misses=model.experts_per_token)
    measured = replace(measured, ungraphed_s=LAYER_LAUNCHES * launch_seconds(ctx) if graphs else 0.0)
    choice = measured.agreed(ctx.comm.minimum)
    logger.info(
        "experts that are not in slots: %.0f us to fetch one, %.0f us to compute it with %d threads, %.2f times as "
        "long side by side, %.0f us a layer without graphs; %s is chosen%s",
        1e6 * (choice.fetch_start_s + choice.fetch_s), 1e6 * (choice.compute_start_s + choice.compute_s), threads,
        choice.contention, 1e6 * choice.ungraphed_s, choice.name, "" if mode == "either" else f", {mode} was asked for",
    )  # fmt: skip
    if mode == "either" and choice.name == "offload":
        return None
    return Hybrid(threads, choice.table(model.experts).__getitem__)
