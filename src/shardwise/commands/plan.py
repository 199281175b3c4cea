"""`shardwise plan`: what every rank would hold, from headers or config.json alone, and the context that leaves."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from shardwise.cache.budget import GIB, affordable_pages, sequences
from shardwise.commands.prepare import resolve_model
from shardwise.config import ConfigError, ServeConfig
from shardwise.engine.build import Blueprint, blueprint, device_memory
from shardwise.shard import ParamSpec, Partitions, local_bytes, table

CLASSES = (
    ("vocabulary", r"embed|head"),
    ("attention", r"layers\.\d+\.attention\."),
    ("delta", r"layers\.\d+\.delta\."),
    ("experts", r"layers\.\d+\.mlp\.experts\."),
    ("mlp", r"layers\.\d+\.mlp\."),
    ("vision", r"visual\."),
    ("norms", r".*norm"),
)


@dataclass(frozen=True)
class RankPlan:
    """Bytes and capacities of one rank."""

    rank: int
    weights_bytes: Mapping[str, int]
    total_weights_bytes: int
    state_row_bytes: int
    kv_token_bytes: float
    memory_bytes: int
    kv_tokens: int


@dataclass(frozen=True)
class Plan:
    """A split of a model: `kv_tokens` is the least that any rank affords beside `max_num_seqs` rows of state."""

    model: str
    ranks: int
    units: Mapping[str, Sequence[int]]
    max_num_seqs: int
    kv_tokens: int
    each: Sequence[RankPlan]


def weight_class(name: str) -> str:
    """The class of a weight, by its local name."""
    return next(kind for kind, pattern in CLASSES if re.match(pattern, name))


def weights_by_class(specs: Mapping[str, ParamSpec], partitions: Partitions, rank: int) -> dict[str, int]:
    """Bytes of `rank` in each class, in the order of CLASSES."""
    totals = {kind: 0 for kind, _ in CLASSES}
    for name, spec in specs.items():
        totals[weight_class(name)] += local_bytes(spec, partitions, rank)
    return {kind: total for kind, total in totals.items() if total}


def make_plan(serve: ServeConfig, made: Blueprint, memory_bytes: Sequence[int]) -> Plan:
    """The plan of `made` on ranks that have `memory_bytes` each for weights and caches."""
    caches, partitions = made.caches, made.partitions
    weights = [weights_by_class(made.specs, partitions, rank) for rank in range(serve.ranks)]
    free = [memory - sum(held.values()) for memory, held in zip(memory_bytes, weights, strict=True)]
    rows = [caches.row_bytes(partitions, rank) for rank in range(serve.ranks)]
    seqs = min(sequences(serve, made.device_type, have, row) for have, row in zip(free, rows, strict=True))
    each = list[RankPlan]()
    for rank, (have, row) in enumerate(zip(free, rows, strict=True)):
        page = caches.page_bytes(partitions, rank)
        pages = affordable_pages(have, (seqs + 1) * row, page)
        each.append(
            RankPlan(
                rank=rank,
                weights_bytes=weights[rank],
                total_weights_bytes=sum(weights[rank].values()),
                state_row_bytes=row,
                kv_token_bytes=page / serve.page_tokens,
                memory_bytes=memory_bytes[rank],
                kv_tokens=max(pages - 1, 0) * serve.page_tokens,
            )
        )
    units = {
        group: [stop - start for start, stop in pairwise(partition.bounds)] for group, partition in partitions.items()
    }
    return Plan(serve.model, serve.ranks, units, seqs, min(rank.kv_tokens for rank in each), each)


def show(plan: Plan, made: Blueprint, console: Console) -> None:
    """Print the plan as tables."""
    columns = [f"rank {rank.rank}" for rank in plan.each]
    held = Table("GiB held", *columns, "one rank", title=f"{plan.model}: {plan.ranks} ranks", title_justify="left")
    alone = {kind: 0 for kind, _ in CLASSES}
    for row in table(made.specs, made.partitions):
        alone[weight_class(row.name)] += row.full_bytes
    for kind in plan.each[0].weights_bytes:
        held.add_row(kind, *(f"{rank.weights_bytes[kind] / GIB:.3f}" for rank in plan.each), f"{alone[kind] / GIB:.3f}")
    totals = [f"{rank.total_weights_bytes / GIB:.3f}" for rank in plan.each]
    held.add_row("all weights", *totals, f"{sum(alone.values()) / GIB:.3f}")
    caches = Table("caches", *columns)
    caches.add_row("state, MiB a request", *(f"{rank.state_row_bytes / (1 << 20):.3f}" for rank in plan.each))
    caches.add_row("KV, bytes a token", *(f"{rank.kv_token_bytes:.0f}" for rank in plan.each))
    caches.add_row("memory given, GiB", *(f"{rank.memory_bytes / GIB:.2f}" for rank in plan.each))
    caches.add_row("KV tokens that fit", *(f"{rank.kv_tokens:,}" for rank in plan.each))
    units = Table("units owned", *columns)
    for group, counts in plan.units.items():
        units.add_row(group, *map(str, counts))
    for one in (held, caches, units):
        console.print(one)
    context = min(plan.kv_tokens, made.model.max_position_embeddings)
    console.print(
        f"{plan.kv_tokens:,} tokens of KV cache beside {plan.max_num_seqs} requests; a request can have {context:,} tokens"
    )


def memory(text: str, ranks: int, device_memory: Sequence[int]) -> list[int]:
    """Bytes a rank: of `text` ("24GiB" for all, or "24GiB,16GiB"), else what the devices have."""
    if not text:
        return list(device_memory)
    sizes = list[int]()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)\s*", part)
        if not match:
            raise ConfigError(f"--memory {text}: {part!r} is no size; give one like 24GiB, or one for each rank")
        unit = {"GiB": GIB, "GB": 10**9, "MiB": 1 << 20, "MB": 10**6}[match[2]]
        sizes.append(int(float(match[1]) * unit))
    if len(sizes) not in (1, ranks):
        raise ConfigError(f"--memory {text}: {len(sizes)} sizes for {ranks} ranks; give one, or one for each")
    return sizes * (ranks // len(sizes))


def run(args: argparse.Namespace, serve: ServeConfig) -> int:
    """Print the plan of `serve`; `args` has `memory` and `json`."""
    serve = resolve_model(serve)
    made = blueprint(serve)
    plan = make_plan(
        serve,
        made,
        memory(args.memory, serve.ranks, device_memory(made.device_type, serve.ranks, serve.gpu_memory_utilization)),
    )
    if args.json:
        print(json.dumps(asdict(plan), indent=2))
    else:
        show(plan, made, Console(width=max(80, 24 + 14 * (serve.ranks + 1))))
    short = [rank for rank in plan.each if rank.total_weights_bytes > rank.memory_bytes]
    if short:
        raise ConfigError(
            f"rank {short[0].rank} would hold {short[0].total_weights_bytes / GIB:.2f} GiB of weights and has "
            f"{short[0].memory_bytes / GIB:.2f} GiB; use more ranks or give it a smaller share (--ratio)"
        )
    return 0
