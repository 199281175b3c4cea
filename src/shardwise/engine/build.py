"""From options to a running rank: the blueprint (no tensor yet), then weights, caches, a first real step."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from shardwise.cache.budget import (
    CPU_SHARE,
    GIB,
    Budget,
    affordable_pages,
    affordable_slots,
    busy_tokens,
    floor_bytes,
    idle_bytes,
    sequences,
    settle,
    snapshots,
    step_tokens,
)
from shardwise.cache.pool import CacheSpecs, allocate
from shardwise.cache.store import HostStore
from shardwise.checkpoint.formats import Formats
from shardwise.checkpoint.index import DTYPES, CheckpointIndex
from shardwise.checkpoint.load import load
from shardwise.checkpoint.names import Names, account
from shardwise.checkpoint.synth import DummySource
from shardwise.config import (
    ConfigError,
    ModelConfig,
    RankEnvironment,
    ServeConfig,
    load_model_config,
    rank_threads,
    read_json,
)
from shardwise.engine.engine import Engine
from shardwise.engine.experts import (
    banks_ahead,
    choose_mode,
    expert_specs,
    experts_bytes,
    make_offload,
    sizes_of,
    with_experts,
)
from shardwise.engine.features import Features
from shardwise.engine.formats import DTYPE_NAMES, FP8, check_formats, kv_cache_dtype, kv_scales
from shardwise.engine.grammar import COMPILE_SECONDS, Grammars
from shardwise.engine.hosttier import with_host_tier
from shardwise.engine.memory import keep_shortlist, local_devices, rank_memory
from shardwise.engine.messages import CacheResized, Ready, ResizeCache, Stats
from shardwise.engine.place import device_kind, place, sharers, warn_of_others
from shardwise.engine.plan import Chunk, StepPlan
from shardwise.engine.prompt_graphs import graph_tokens
from shardwise.engine.request import Limits
from shardwise.engine.resize import RankSizes, resized
from shardwise.engine.reuse import ReuseOptions
from shardwise.engine.runner import Runner
from shardwise.engine.sampler import Sampler
from shardwise.engine.tables import PageTables
from shardwise.engine.vision import Vision, choose
from shardwise.engine.vision import trial as vision_trial
from shardwise.engine.vocabulary import vocabulary
from shardwise.experts.offload import Offload
from shardwise.kernels.ops import select
from shardwise.models.qwen3_5 import Model, declare, declare_pages, declare_rows
from shardwise.parallel.balance import partitions
from shardwise.parallel.comm import Alone, Communicator
from shardwise.parallel.connect import connect
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Partitions

logger = logging.getLogger(__name__)

IDLE_SHARE = 0.1  # of what caches may take, from which on it is worth a warning that it is not used


@dataclass(frozen=True)
class Blueprint:
    """All that is known of a server before memory is taken; the same on every rank and in `shardwise plan`."""

    model: ModelConfig
    source: CheckpointIndex | None  # None: weights are made up
    specs: Mapping[str, ParamSpec]
    caches: CacheSpecs
    partitions: Partitions
    dtype: str  # of activations and plain weights, by safetensors' name
    device_type: str
    left_out: Mapping[str, Sequence[str]]  # tensors of the checkpoint that are not served, by kind
    vision: Vision | None  # None: text only


def blueprint(serve: ServeConfig, planned_for: str = "") -> Blueprint:
    """Read headers and configs of `serve.model`. Raises ConfigError for whatever cannot be served, naming it.

    planned_for: a kind of device that need not be here, since nothing will run.
    """
    folder = Path(serve.model)
    model = load_model_config(folder)
    device_type = planned_for or device_kind(serve)
    chosen = ("float32" if device_type == "cpu" else model.dtype) if serve.dtype == "auto" else serve.dtype
    if chosen not in DTYPE_NAMES:
        raise ConfigError(f"config.json: dtype is {chosen!r}; give --dtype, one of {', '.join(DTYPE_NAMES)}")
    dtype = DTYPE_NAMES[chosen]
    index = None if serve.load_format == "dummy" else CheckpointIndex.open(folder)
    quantization = folder / "hf_quant_config.json"
    formats = Formats(model.raw, read_json(quantization) if quantization.exists() else None, index, dtype)
    names = Names.published(model.tied, not formats.expert_by_expert) if index is None else Names.of(index)
    specs = declare(model, names, lambda source: formats.of(source, experts=model.experts), dtype)
    left_out = names.left_out(index or (), model.tied)
    vision = choose(serve, model, names)
    if vision is not None:
        specs = {**specs, **vision.declare(dtype)}
        left_out.pop("visual", None)
    if index is not None:
        account(index, index, specs.values(), [name for those in left_out.values() for name in those])
    kv_dtype = kv_cache_dtype(serve, formats, dtype)
    scales = kv_scales(model, names, formats, index) if kv_dtype == FP8 else {}
    caches = CacheSpecs(declare_pages(model, serve.page_tokens, kv_dtype), declare_rows(model, dtype), scales)
    every = {**specs, **caches.page, **caches.row}
    cut = partitions(every, serve.ranks, serve.ratio, serve.group_ratios)
    check_formats(serve, device_type, specs, cut)
    return Blueprint(
        model=model,
        source=index,
        specs=specs,
        caches=caches,
        partitions=cut,
        dtype=dtype,
        device_type=device_type,
        left_out=left_out,
        vision=vision,
    )


def load_weights(
    serve: ServeConfig, made: Blueprint, ctx: RankContext, local_ranks: int
) -> tuple[Model, Features | None, Offload | None]:
    """The rank's part of the model and of its vision tower, on its device, and experts that are not there."""
    begin_s = time.monotonic()
    source = made.source or DummySource(made.specs.values(), seed=serve.seed, device=ctx.device)
    mode = choose_mode(serve, made.model, made.specs, made.caches, ctx, free_bytes(serve, ctx, local_ranks))
    elsewhere = {} if mode == "resident" else expert_specs(made.model, made.specs)
    specs = {name: spec for name, spec in made.specs.items() if name not in elsewhere}
    banks = banks_ahead(serve, made.model, made.specs, source, ctx) if elsewhere else None
    weights = load(specs, made.partitions, ctx.rank, source, ctx.device)
    offload = make_offload(mode, made.model, ctx, rank_threads(local_ranks), banks, serve.graphs) if banks else None
    held_bytes = sum(weight.nbytes for weight in weights.values())
    read_bytes = made.source.bytes_read if made.source else 0
    took_s = time.monotonic() - begin_s
    logger.info("%d bytes of weights in %.1f s, %d bytes read", held_bytes, took_s, read_bytes)
    model = Model(made.model, weights, ctx, offload.layers if offload else None)
    return model, made.vision and made.vision.features(weights, ctx), offload


def free_bytes(serve: ServeConfig, ctx: RankContext, local_ranks: int) -> int:
    """What caches may take on this rank, now that the weights of all ranks are there."""
    if ctx.device.type == "cpu":
        return int(psutil.virtual_memory().available * CPU_SHARE / local_ranks)
    ctx.comm.minimum(0)  # no rank takes memory for caches before all have looked
    free, total = torch.cuda.mem_get_info(ctx.device)
    return (free - int(total * (1 - serve.gpu_memory_utilization))) // sharers(serve, ctx.device)


def trial(made: Blueprint, model: Model, ctx: RankContext, tokens: int, page_tokens: int) -> int:
    """Run one prompt of `tokens` tokens on all ranks, in caches of its own; the bytes that this took beside caches."""
    pages = -(-tokens // page_tokens)
    caches = allocate(made.model, made.caches, pages + 1, 2, ctx)
    runner = Runner(model, caches, PageTables(2, pages, page_tokens), ctx)
    if ctx.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ctx.device)
    before = torch.cuda.memory_allocated(ctx.device) if ctx.device.type == "cuda" else 0
    ids = [token % made.model.vocab_size for token in range(tokens)]
    chunk = Chunk(1, 0, tokens, ids, list(range(1, pages + 1)), True)
    logits = runner.forward([chunk])
    if not bool(torch.isfinite(logits).all()):
        raise RuntimeError(f"rank {ctx.rank}: a trial prompt of {tokens} tokens gave logits that are not finite")
    return torch.cuda.max_memory_allocated(ctx.device) - before if ctx.device.type == "cuda" else 0


def budget(
    serve: ServeConfig,
    made: Blueprint,
    model: Model,
    ctx: RankContext,
    local_ranks: int,
    features: Features | None = None,
    offload: Offload | None = None,
) -> Budget:
    """Rows, slots of experts and pages that every rank affords beside its weights and the largest step."""
    kind = ctx.device.type
    row_bytes = made.caches.row_bytes(made.partitions, ctx.rank)
    page_bytes = made.caches.page_bytes(made.partitions, ctx.rank)
    settle(serve, made.model, kind, 1, 1 << 40)  # what cannot be served is said before anything is tried
    left = ctx.comm.minimum(free_bytes(serve, ctx, local_ranks)) if kind == "cuda" and offload is None else 0
    most_tokens = step_tokens(serve, kind, left)
    tried_tokens = min(most_tokens if kind == "cuda" else 64, made.model.max_position_embeddings)
    step_bytes = trial(made, model, ctx, tried_tokens, serve.page_tokens)
    if kind == "cuda" and serve.graphs and ctx.world == 1:
        step_bytes += step_bytes * graph_tokens(tried_tokens) // tried_tokens
    if made.vision is not None and features is not None:
        step_bytes = max(step_bytes, vision_trial(serve, features, ctx)) + made.vision.cache_bytes(serve, ctx)
    if kind == "cuda":
        torch.cuda.empty_cache()
    free = free_bytes(serve, ctx, local_ranks) - step_bytes
    if sharers(serve, ctx.device) == 1:
        warn_of_others(ctx)
    longest_pages = -(-(serve.max_model_len or made.model.max_position_embeddings) // serve.page_tokens)
    request_bytes = longest_pages * page_bytes if offload is None else floor_bytes(serve, made.model, page_bytes)
    seqs = ctx.comm.minimum(sequences(serve, kind, free, row_bytes, request_bytes, offload is not None))
    kept = ctx.comm.minimum(snapshots(serve, free, (seqs + 1) * row_bytes, row_bytes, request_bytes))
    rows_bytes, slots = (seqs + 1 + kept) * row_bytes, 0
    if offload is not None:
        left = free - rows_bytes - request_bytes
        sizes = offload.slot_bytes, offload.top_k, offload.experts
        slots = ctx.comm.minimum(affordable_slots(serve, left, *sizes))
        offload.resize(slots)
        free -= slots * offload.slot_bytes
    own_pages = affordable_pages(free, rows_bytes, page_bytes)
    pages = ctx.comm.minimum(own_pages)
    limits = settle(serve, made.model, kind, seqs, pages, kept, slots, most_tokens)
    idle = idle_bytes(own_pages, pages, page_bytes)
    if limits.pages >= pages and idle > IDLE_SHARE * max(free, 1):
        logger.warning(
            "%.2f GiB of this rank's memory stay idle: another rank affords %d tokens of KV cache, this one %d; a "
            "split that gives this rank more would use them",
            idle / GIB, limits.kv_tokens, (own_pages - 1) * serve.page_tokens,
        )  # fmt: skip
    return limits


@dataclass(frozen=True)
class Rank:
    """One rank, ready to run plans: a real step has run on all of them."""

    made: Blueprint
    ctx: RankContext
    runner: Runner
    budget: Budget
    local_ranks: int  # on this host
    offload: Offload | None = None  # experts that are not on the device


def build_rank(serve: ServeConfig, environment: RankEnvironment, comm: Communicator | None = None) -> Rank:
    """Everything of this rank. Raises ConfigError before memory is taken if the options cannot work."""
    made = blueprint(serve)
    if environment.world != serve.ranks:
        raise ConfigError(f"{environment.world} processes were started for --tp {serve.ranks}; start one a rank")
    device = place(serve, environment, made.device_type)
    if comm is None:
        staged = len(set(serve.gpu)) < len(serve.gpu)
        one_host = environment.local_world
        ranks = environment.world
        comm = connect(device, serve.comm, one_host, staged=staged, overlap=serve.overlap) if ranks > 1 else Alone()
    ctx = RankContext(
        rank=environment.rank,
        world=environment.world,
        partitions=made.partitions,
        comm=comm,
        ops=select(serve.kernels, device, serve.overlap),
        device=device,
        dtype=DTYPES[made.dtype],
    )
    model, features, offload = load_weights(serve, made, ctx, environment.local_world)
    if device.type == "cuda" and ctx.ops.name == "triton":
        left_bytes = free_bytes(serve, ctx, environment.local_world)
        keep_shortlist(serve, made.specs, model.head, ctx, left_bytes, offload is not None)
    limits = budget(serve, made, model, ctx, environment.local_world, features, offload)
    limits = with_host_tier(serve, made.caches, ctx, environment.local_world, limits)
    caches = allocate(made.model, made.caches, limits.pages, limits.rows + limits.snapshot_rows, ctx)
    max_pages = -(-limits.max_model_len // limits.page_tokens)
    tables = PageTables(limits.rows, max_pages, limits.page_tokens)
    store = HostStore(caches, limits.host_pages, limits.host_rows) if limits.host_rows else None
    runner = Runner(model, caches, tables, ctx, features, store, offload)
    capturable = comm.capturable and (offload is None or offload.direct)
    if serve.graphs and device.type == "cuda" and ctx.ops.name == "triton" and capturable:
        runner.capture(limits.max_num_batched_tokens)
    return Rank(made, ctx, runner, limits, environment.local_world, offload)


class Leader:
    """The first rank as `engine.worker` drives it."""

    def __init__(self, rank: Rank, serve: ServeConfig) -> None:
        limits, model = rank.budget, rank.made.model
        self.rank, self._start = rank, limits  # memory only moves: all sizes follow from the first
        self._devices = [int(index) for index in serve.gpu] or list(range(rank.local_ranks))
        self.engine = Engine(
            Limits(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                pages=limits.pages - 1,
                page_tokens=limits.page_tokens,
                vocab_size=model.vocab_size,
                busy_tokens=busy_tokens(serve, rank.made.device_type),
            ),
            rank.runner,
            model.eos_token_ids,
            serve.seed,
            overlap=rank.ctx.device.type == "cuda",
            vision=rank.made.vision and rank.made.vision.config,
            picture_tokens=serve.vision_cache_tokens,
            grammars=Grammars(
                lambda: vocabulary(Path(serve.model)),
                model.vocab_size,
                model.eos_token_ids,
                serve.grammar_backend,
                COMPILE_SECONDS,
            ),
            sampler=Sampler(rank.ctx.ops),
            reuse=ReuseOptions(
                limits.snapshot_rows,
                serve.snapshot_every,
                frozenset(model.eos_token_ids),
                host_pages=limits.host_pages,
                host_rows=limits.host_rows,
            ),
        )
        self.add, self.add_picture = self.engine.add, self.engine.add_picture
        self.cancel, self.step = self.engine.cancel, self.engine.step

    def stats(self) -> Stats:
        """The engine's figures, and those of experts that are not on the device."""
        return with_experts(self.engine.stats(), self.rank.offload)

    def ready(self) -> Ready:
        limits, made, ranks = self.rank.budget, self.rank.made, self.rank.ctx.world
        devices = local_devices(made.device_type, self._devices)
        on_device = experts_bytes(made.model, made.specs, made.partitions, limits.expert_slots)
        listed = self.rank.runner.model.head.shortlist is not None
        return Ready(
            limits.max_model_len,
            limits.kv_tokens,
            limits.max_num_seqs,
            ranks,
            memory=rank_memory(made.specs, made.caches, made.partitions, limits, ranks, devices, on_device, listed),
        )

    def resize(self, asked: ResizeCache) -> CacheResized:
        """Move memory between KV cache and slots of experts, on all ranks, between two steps."""
        made, message = self.rank.made, ""
        cut, model = made.partitions, made.model
        sizes = [
            RankSizes(made.caches.page_bytes(cut, rank), sizes_of(model, made.specs, cut, rank).slot_bytes)
            for rank in range(self.rank.ctx.world if self._start.expert_slots else 0)
        ]
        try:
            after = resized(asked, self._start, sizes, model.experts_per_token, model.experts)
            self.engine.resize(after.pages - 1, after.expert_slots)
            self.rank = replace(self.rank, budget=after)
        except ValueError as error:
            message = str(error)
        now = self.rank.budget
        return CacheResized(asked.id, now.expert_slots, now.kv_tokens, message)

    def has_work(self) -> bool:
        return self.engine.busy

    def idle(self) -> None:
        """A sign of life for the ranks that wait."""
        self.rank.runner.run(StepPlan(0))

    def stop(self) -> None:
        """End the other ranks' loops."""
        self.rank.runner.run(StepPlan(0, stop=True))


class Follower:
    """Any other rank as `engine.worker` drives it."""

    def __init__(self, rank: Rank) -> None:
        self.run_forever = rank.runner.follow


def build(serve: ServeConfig, environment: RankEnvironment) -> Leader | Follower:
    """This process's part of the group."""
    rank = build_rank(serve, environment)
    return Leader(rank, serve) if environment.rank == 0 else Follower(rank)
