"""`shardwise plan`: what every rank would hold, the context that leaves, and how fast each split is predicted to be.

Everything is known from headers, or config.json alone, and from facts of devices: measured here, or given by
`--gpu-spec` or `--device-profile` for machines that are not here.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from shardwise.cache.budget import (
    GIB,
    affordable_pages,
    affordable_slots,
    affords_list,
    floor_bytes,
    sequences,
    snapshots,
)
from shardwise.commands.plan_html import page
from shardwise.commands.prepare import resolve_model
from shardwise.config import ConfigError, ServeConfig
from shardwise.engine.build import Blueprint
from shardwise.engine.decide import Decision, Hardware, choose_for, machine_of, reasons, shortage, slotted_if_short
from shardwise.engine.experts import sizes_of
from shardwise.engine.memory import CLASSES, SHORTLIST, weight_class, weights_by_class
from shardwise.engine.place import device_kind
from shardwise.layers.embedding import listed_bytes
from shardwise.parallel.choice import Candidate, budget_bytes
from shardwise.parallel.devices import UNKNOWN, Device, Machine, size_bytes
from shardwise.shard import table

COLORS = {
    "vocabulary": "magenta", "attention": "blue", "delta": "cyan", "experts": "yellow", "mlp": "green",
    "vision": "red", "norms": "white", "other": "white", "shortlist": "bright_magenta", "state": "bright_blue",
    "KV cache": "bright_green",
}  # fmt: skip
BAR_CELLS = 60
SHOWN = 12  # candidates


@dataclass(frozen=True)
class RankPlan:
    """Bytes and capacities of one rank. idle_bytes: what it cannot use because another rank affords less KV."""

    rank: int
    device: str
    weights_bytes: Mapping[str, int]
    total_weights_bytes: int
    state_row_bytes: int
    kv_token_bytes: float
    memory_bytes: int
    kv_tokens: int
    idle_bytes: int
    host_bytes: int = 0  # of experts


@dataclass(frozen=True)
class CandidatePlan:
    """One way to split. tokens_per_s: predicted, None if the devices' speed is not known."""

    name: str
    devices: tuple[int, ...]
    shares: Mapping[str, Sequence[float]]
    tokens_per_s: float | None
    kv_tokens: int
    fits: bool
    limited_by: str
    chosen: bool


@dataclass(frozen=True)
class Plan:
    """A split of a model: `kv_tokens` is the least that any rank affords beside the rows of state, `max_num_seqs` for
    requests and `snapshot_rows` for the prefix cache."""

    model: str
    ranks: int
    units: Mapping[str, Sequence[int]]
    max_num_seqs: int
    snapshot_rows: int
    kv_tokens: int
    requests: int
    context_tokens: int  # that each of `requests` requests can have
    tokens_per_s: float | None
    limited_by: str
    kv_limited_by_rank: int
    each: Sequence[RankPlan]
    candidates: Sequence[CandidatePlan]
    reasons: Sequence[str]
    expert_slots: int = 0  # of each layer, if experts are in host memory; 0: all are on the devices


def make_plan(decision: Decision, requests: int) -> Plan:
    """The plan of what was decided, with the state of `requests` requests or of as many as the engine would take."""
    serve, made, best, used = decision.serve, decision.made, decision.choice.best, decision.used
    slotted = serve.experts in ("offload", "hybrid") and made.model.experts > 0
    # How fast experts come from host memory is not forecast.
    caches, partitions, known = made.caches, made.partitions, decision.machine.known and not slotted
    sizes = [sizes_of(made.model, made.specs, partitions, rank) for rank in range(best.ranks)] if slotted else []
    weights = [
        weights_by_class(made.specs, partitions, rank, sizes[rank].staging_bytes if slotted else None)
        for rank in range(best.ranks)
    ]
    memory = [max(budget_bytes(used, rank, decision.problem.needs), 0) for rank in range(best.ranks)]
    free = [have - sum(held.values()) for have, held in zip(memory, weights, strict=True)]
    free, weights = with_lists(serve, made, free, weights, slotted)
    rows = [caches.row_bytes(partitions, rank) for rank in range(best.ranks)]
    asked = msgspec.structs.replace(serve, max_num_seqs=serve.max_num_seqs or requests)
    page_sizes = [caches.page_bytes(partitions, rank) for rank in range(best.ranks)]
    longest_pages = -(-(serve.max_model_len or made.model.max_position_embeddings) // serve.page_tokens)
    floors = [floor_bytes(serve, made.model, size) if slotted else longest_pages * size for size in page_sizes]
    seqs, kept = rows_afforded(serve, asked, made.device_type, free, rows, floors, slotted)
    slots = 0
    if slotted:
        chosen = made.model.experts_per_token, made.model.experts
        slots = min(
            affordable_slots(serve, have - (seqs + 1 + kept) * row - floor, size.slot_bytes, *chosen)
            for have, row, floor, size in zip(free, rows, floors, sizes, strict=True)
        )
        free = [have - slots * size.slot_bytes for have, size in zip(free, sizes, strict=True)]
        weights = [held | {"experts": s.device_bytes(slots)} for held, s in zip(weights, sizes, strict=True)]
    pages = [
        affordable_pages(have, (seqs + 1 + kept) * row, size)
        for have, row, size in zip(free, rows, page_sizes, strict=True)
    ]
    least = min(pages)
    each = [
        RankPlan(
            rank=rank,
            device=used.devices[rank].name,
            weights_bytes=weights[rank],
            total_weights_bytes=sum(weights[rank].values()),
            state_row_bytes=rows[rank],
            kv_token_bytes=page_sizes[rank] / serve.page_tokens,
            memory_bytes=memory[rank],
            kv_tokens=max(pages[rank] - 1, 0) * serve.page_tokens,
            idle_bytes=(pages[rank] - least) * page_sizes[rank],
            host_bytes=sizes[rank].bank_bytes if slotted else 0,
        )
        for rank in range(best.ranks)
    ]
    kv_tokens = max(least - 1, 0) * serve.page_tokens
    each_request = kv_tokens // (requests or 1)
    return Plan(
        model=serve.model,
        ranks=best.ranks,
        units={g: [stop - start for start, stop in pairwise(part.bounds)] for g, part in partitions.items()},
        max_num_seqs=seqs,
        snapshot_rows=kept,
        kv_tokens=kv_tokens,
        requests=requests or 1,
        context_tokens=min(each_request, made.model.max_position_embeddings),
        tokens_per_s=best.forecast.tokens_per_s if known else None,
        limited_by=best.forecast.limit if known else "unknown",
        kv_limited_by_rank=pages.index(least),
        each=each,
        candidates=[planned(one, best, known) for one in decision.choice.candidates],
        reasons=reasons(decision) if known else (),
        expert_slots=slots,
    )


def with_lists(
    serve: ServeConfig, made: Blueprint, free: Sequence[int], weights: Sequence[dict[str, int]], slotted: bool
) -> tuple[list[int], list[dict[str, int]]]:
    """What is left on each rank, and what it holds, with the shortlists of heads where all ranks afford theirs."""
    lists = [listed_bytes(made.specs, made.partitions, rank) for rank in range(len(free))]
    pairs = zip(free, lists, strict=True)
    if made.device_type != "cuda" or not all(affords_list(serve, have, size, slotted) for have, size in pairs):
        return [*free], [*weights]
    held = [each | {SHORTLIST: size} for each, size in zip(weights, lists, strict=True)]
    return [have - size for have, size in zip(free, lists, strict=True)], held


def rows_afforded(
    serve: ServeConfig,
    asked: ServeConfig,
    kind: str,
    free: Sequence[int],
    rows: Sequence[int],
    floors: Sequence[int],
    slotted: bool,
) -> tuple[int, int]:
    """Requests and snapshots that every rank has room for, by its free bytes, bytes of a row and of the least KV."""
    each = list(zip(free, rows, floors, strict=True))
    seqs = min(sequences(asked, kind, have, row, floor, slotted) for have, row, floor in each)
    return seqs, min(snapshots(serve, have, (seqs + 1) * row, row, floor) for have, row, floor in each)


def planned(one: Candidate, best: Candidate, known: bool) -> CandidatePlan:
    """A row of the table of candidates."""
    shares = {group: [units / sum(each) for units in each] for group, each in one.ratios().items()}
    return CandidatePlan(
        one.name, one.places, shares, one.forecast.tokens_per_s if known else None, one.kv_tokens,
        not one.short_bytes, one.forecast.limit if known else "unknown", one is best,
    )  # fmt: skip


def bars(plan: Plan) -> list[str]:
    """A picture: what fills each rank's memory, in rich's markup."""
    largest, lines = max(rank.memory_bytes for rank in plan.each) or 1, list[str]()
    for rank in plan.each:
        kv_bytes = int(min(rank.kv_tokens, plan.kv_tokens) * rank.kv_token_bytes)
        state_bytes = (plan.max_num_seqs + 1 + plan.snapshot_rows) * rank.state_row_bytes
        parts = {**rank.weights_bytes, "state": state_bytes, "KV cache": kv_bytes}
        cells, filled, text = round(BAR_CELLS * rank.memory_bytes / largest), 0.0, ""
        for kind, size in parts.items():
            before, filled = round(filled), filled + BAR_CELLS * size / largest
            text += f"[{COLORS[kind]}]{'█' * (round(filled) - before)}[/]"
        text += "░" * max(0, cells - round(filled))
        lines.append(f"rank {rank.rank} {text} {rank.memory_bytes / GIB:.1f} GiB, {rank.idle_bytes / GIB:.1f} idle")
    kinds = [*plan.each[0].weights_bytes, "state", "KV cache"]
    return [*lines, "  ".join(f"[{COLORS[kind]}]█[/] {kind}" for kind in kinds)]


def show(plan: Plan, made: Blueprint, console: Console) -> None:
    """Print the plan as tables and bars."""
    columns = [f"rank {rank.rank}" for rank in plan.each]
    held = Table("GiB held", *columns, "one rank", title=f"{plan.model}: {plan.ranks} ranks", title_justify="left")
    whole = {kind: 0 for kind, _ in CLASSES}
    for row in table(made.specs, made.partitions):
        whole[weight_class(row.name)] += row.full_bytes
    for kind in plan.each[0].weights_bytes | plan.each[-1].weights_bytes:  # pyright: ignore[reportOperatorIssue]
        sizes = (f"{rank.weights_bytes.get(kind, 0) / GIB:.3f}" for rank in plan.each)
        held.add_row(kind, *sizes, f"{whole[kind] / GIB:.3f}")
    totals = [f"{rank.total_weights_bytes / GIB:.3f}" for rank in plan.each]
    held.add_row("all weights", *totals, f"{sum(whole.values()) / GIB:.3f}")
    caches = Table("caches", *columns)
    caches.add_row("state, MiB a request", *(f"{rank.state_row_bytes / (1 << 20):.3f}" for rank in plan.each))
    sizes = (plan.snapshot_rows * rank.state_row_bytes / (1 << 20) for rank in plan.each)
    caches.add_row(f"{plan.snapshot_rows} snapshots, MiB", *(f"{size:.3f}" for size in sizes))
    caches.add_row("KV, bytes a token", *(f"{rank.kv_token_bytes:.0f}" for rank in plan.each))
    caches.add_row("memory to use, GiB", *(f"{rank.memory_bytes / GIB:.2f}" for rank in plan.each))
    caches.add_row("KV tokens that fit", *(f"{rank.kv_tokens:,}" for rank in plan.each))
    caches.add_row("idle, GiB", *(f"{rank.idle_bytes / GIB:.2f}" for rank in plan.each))
    units = Table("units owned", *columns)
    for group, counts in plan.units.items():
        units.add_row(group, *map(str, counts))
    if plan.expert_slots:
        sizes = (f"{rank.host_bytes / GIB:.3f}" for rank in plan.each)
        held.add_row(f"host memory ({plan.expert_slots} slots a layer)", *sizes, "")
    for one in (held, caches, units):
        console.print(one)
    if plan.tokens_per_s is not None:
        console.print(candidates_table(plan))
    for line in bars(plan):
        console.print(line, highlight=False)
    for line in plan.reasons:
        console.print(line, markup=False, highlight=False)
    console.print(
        f"{plan.kv_tokens:,} tokens of KV cache (limited by rank {plan.kv_limited_by_rank}) beside the state of "
        f"{plan.max_num_seqs} requests and {plan.snapshot_rows} snapshots; each of {plan.requests} can have "
        f"{plan.context_tokens:,} tokens"
    )


def candidates_table(plan: Plan) -> Table:
    """The splits that were looked at, best first."""
    found = Table("split", "devices", "per cent of experts or mlp", "attention", "tokens/s", "KV tokens", "limited by")
    for one in plan.candidates[:SHOWN]:
        wide = one.shares.get("expert") or one.shares.get("mlp", ())
        found.add_row(
            f"{one.name}{' *' * one.chosen}",
            ",".join(map(str, one.devices)),
            ":".join(f"{100 * share:.0f}" for share in wide),
            ":".join(f"{100 * share:.0f}" for share in one.shares.get("attention", ())),
            f"{one.tokens_per_s:.1f}",
            f"{one.kv_tokens:,}" if one.fits else "does not fit",
            one.limited_by,
        )
    return found


def memory(text: str, ranks: int) -> list[int]:
    """Bytes a rank of `--memory` "24GiB" (for all) or "24GiB,16GiB". Raises ConfigError."""
    sizes = [size_bytes(part) for part in text.split(",")]
    for part, size in zip(text.split(","), sizes, strict=True):
        if not size:
            raise ConfigError(f"--memory {text}: {part!r} is no size; give one like 24GiB, or one for each rank")
    if len(sizes) not in (1, ranks):
        raise ConfigError(f"--memory {text}: {len(sizes)} sizes for {ranks} ranks; give one, or one for each")
    return [size or 0 for size in (sizes * ranks if len(sizes) == 1 else sizes)]


def plain_machine(serve: ServeConfig, memory_text: str) -> Machine:
    """Devices whose speed is not known: of `--memory`, or parts of this host's memory."""
    ranks = serve.ranks or 1
    if memory_text:
        return Machine(
            tuple(Device(f"{size / GIB:.1f} GiB", size, UNKNOWN, UNKNOWN) for size in memory(memory_text, ranks))
        )
    here = Device("part of this host", psutil.virtual_memory().available, UNKNOWN, UNKNOWN, index=0)
    return Machine((here,) * ranks)


def decision_of(serve: ServeConfig, memory_text: str, requests: int, hardware: Hardware) -> Decision:
    """What the engine would choose. Raises ConfigError."""
    facts = bool(serve.gpu_spec or serve.device_profile)
    kind = "cuda" if facts else device_kind(serve)
    if not any(Path(serve.model).glob("*.safetensors")) and serve.load_format == "auto":
        serve = msgspec.structs.replace(serve, load_format="dummy")  # config.json says all that a plan needs
    if memory_text and not facts:
        return choose_for(serve, plain_machine(serve, memory_text), device_kind(serve), requests or 1, exact=True)
    machine = machine_of(serve, kind, hardware)
    if machine is None and kind == "cuda":
        machine = machine_of(msgspec.structs.replace(serve, gpu=("0",)), kind, hardware)
    if machine is None:
        return choose_for(serve, plain_machine(serve, ""), kind, requests or 1, exact=True)
    return choose_for(serve, machine if machine.known else hardware.measured(machine.devices), kind, requests or 1)


def run(args: argparse.Namespace, serve: ServeConfig, hardware: Hardware | None = None) -> int:
    """Print the plan of `serve`; `args` has memory, requests, json and html. Raises ConfigError if it is too big."""
    serve = resolve_model(serve)
    decision = decision_of(serve, args.memory, args.requests, hardware or Hardware())
    decision = slotted_if_short(decision)
    plan = make_plan(decision, args.requests)
    if args.html:
        args.html.write_text(page(asdict(plan)), encoding="utf-8")
    if args.json:
        print(json.dumps(asdict(plan), indent=2))
    else:
        show(plan, decision.made, Console(width=max(110, 24 + 14 * (plan.ranks + 1))))
    if fault := shortage(decision):
        raise ConfigError(fault)
    return 0
