"""From options to a running rank: the blueprint (no tensor yet), then weights, caches, a first real step."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from shardwise.cache.budget import CPU_SHARE, Budget, affordable_pages, sequences, settle
from shardwise.cache.pool import CacheSpecs, allocate
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
    read_json,
)
from shardwise.engine.engine import Engine
from shardwise.engine.messages import Ready
from shardwise.engine.plan import Chunk, StepPlan
from shardwise.engine.request import Limits
from shardwise.engine.runner import Runner
from shardwise.engine.tables import PageTables
from shardwise.kernels.ops import select
from shardwise.models.qwen3_5 import Model, declare, declare_pages, declare_rows
from shardwise.parallel.balance import partitions
from shardwise.parallel.comm import Alone, Communicator
from shardwise.parallel.connect import connect
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Partitions

logger = logging.getLogger(__name__)

DTYPE_NAMES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


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


def blueprint(serve: ServeConfig) -> Blueprint:
    """Read headers and configs of `serve.model`. Raises ConfigError for whatever cannot be served, naming it."""
    folder = Path(serve.model)
    model = load_model_config(folder)
    device_type = ("cuda" if torch.cuda.is_available() else "cpu") if serve.device == "auto" else serve.device
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; use --device cpu, or a GPU build of torch")
    chosen = ("float32" if device_type == "cpu" else model.dtype) if serve.dtype == "auto" else serve.dtype
    if chosen not in DTYPE_NAMES:
        raise ConfigError(f"config.json: dtype is {chosen!r}; give --dtype, one of {', '.join(DTYPE_NAMES)}")
    dtype = DTYPE_NAMES[chosen]
    index = None if serve.load_format == "dummy" else CheckpointIndex.open(folder)
    names = Names.published(model.tied) if index is None else Names.of(index)
    quantization = folder / "hf_quant_config.json"
    formats = Formats(model.raw, read_json(quantization) if quantization.exists() else None, index, dtype)
    specs = declare(model, names, lambda source: formats.of(source, experts=model.experts), dtype)
    left_out = names.left_out(index or (), model.tied)
    if index is not None:
        account(index, index, specs.values(), [name for those in left_out.values() for name in those])
    caches = CacheSpecs(declare_pages(model, serve.page_tokens, dtype), declare_rows(model, dtype))
    every = {**specs, **caches.page, **caches.row}
    return Blueprint(
        model=model,
        source=index,
        specs=specs,
        caches=caches,
        partitions=partitions(every, serve.ranks, serve.ratio, serve.group_ratios),
        dtype=dtype,
        device_type=device_type,
        left_out=left_out,
    )


def device_memory(device_type: str, ranks: int, utilization: float) -> list[int]:
    """Bytes that each of `ranks` ranks of this host may use in all."""
    if device_type == "cpu":
        return [psutil.virtual_memory().available // ranks] * ranks
    return [
        int(torch.cuda.get_device_properties(rank % torch.cuda.device_count()).total_memory * utilization)
        for rank in range(ranks)
    ]


def place(environment: RankEnvironment, device_type: str) -> torch.device:
    """This rank's device; on CPUs the ranks of a host share its cores evenly."""
    if device_type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // environment.local_world))
        return torch.device("cpu")
    if environment.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"{environment.local_world} ranks on this host and {torch.cuda.device_count()} GPUs; use --tp "
            f"{torch.cuda.device_count()} or less"
        )
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


def load_weights(made: Blueprint, ctx: RankContext, seed: int) -> Model:
    """The rank's part of the model, on its device."""
    begin_s = time.monotonic()
    source = made.source or DummySource(made.specs.values(), seed=seed, device=ctx.device)
    weights = load(made.specs, made.partitions, ctx.rank, source, ctx.device)
    held_bytes = sum(weight.nbytes for weight in weights.values())
    read_bytes = made.source.bytes_read if made.source else 0
    took_s = time.monotonic() - begin_s
    logger.info("%d bytes of weights in %.1f s, %d bytes read", held_bytes, took_s, read_bytes)
    return Model(made.model, weights, ctx)


def free_bytes(serve: ServeConfig, ctx: RankContext, local_ranks: int) -> int:
    """What caches may take on this rank, now that the weights are there."""
    if ctx.device.type == "cpu":
        return int(psutil.virtual_memory().available * CPU_SHARE / local_ranks)
    free, total = torch.cuda.mem_get_info(ctx.device)
    return free - int(total * (1 - serve.gpu_memory_utilization))


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


def budget(serve: ServeConfig, made: Blueprint, model: Model, ctx: RankContext, local_ranks: int) -> Budget:
    """Rows and pages that every rank affords beside its weights and the largest step."""
    kind = ctx.device.type
    row_bytes = made.caches.row_bytes(made.partitions, ctx.rank)
    page_bytes = made.caches.page_bytes(made.partitions, ctx.rank)
    step_tokens = settle(serve, made.model, kind, 1, 1 << 40).max_num_batched_tokens if kind == "cuda" else 64
    step_tokens = min(step_tokens, made.model.max_position_embeddings)
    step_bytes = trial(made, model, ctx, step_tokens, serve.page_tokens)
    if kind == "cuda":
        torch.cuda.empty_cache()
    free = free_bytes(serve, ctx, local_ranks) - step_bytes
    seqs = ctx.comm.minimum(sequences(serve, kind, free, row_bytes))
    pages = ctx.comm.minimum(affordable_pages(free, (seqs + 1) * row_bytes, page_bytes))
    return settle(serve, made.model, kind, seqs, pages)


@dataclass(frozen=True)
class Rank:
    """One rank, ready to run plans: a real step has run on all of them."""

    made: Blueprint
    ctx: RankContext
    runner: Runner
    budget: Budget


def build_rank(serve: ServeConfig, environment: RankEnvironment, comm: Communicator | None = None) -> Rank:
    """Everything of this rank. Raises ConfigError before memory is taken if the options cannot work."""
    made = blueprint(serve)
    if environment.world != serve.ranks:
        raise ConfigError(f"{environment.world} processes were started for --tp {serve.ranks}; start one a rank")
    device = place(environment, made.device_type)
    if comm is None:
        comm = connect(device, serve.comm, environment.local_world) if environment.world > 1 else Alone()
    ctx = RankContext(
        rank=environment.rank,
        world=environment.world,
        partitions=made.partitions,
        comm=comm,
        ops=select(serve.kernels, device),
        device=device,
        dtype=DTYPES[made.dtype],
    )
    model = load_weights(made, ctx, serve.seed)
    limits = budget(serve, made, model, ctx, environment.local_world)
    caches = allocate(made.model, made.caches, limits.pages, limits.rows, ctx)
    max_pages = -(-limits.max_model_len // limits.page_tokens)
    tables = PageTables(limits.rows, max_pages, limits.page_tokens)
    runner = Runner(model, caches, tables, ctx)
    if serve.graphs and device.type == "cuda" and ctx.ops.name == "triton":
        runner.capture()
    return Rank(made, ctx, runner, limits)


class Leader:
    """The first rank as `engine.worker` drives it."""

    def __init__(self, rank: Rank, serve: ServeConfig) -> None:
        limits, model = rank.budget, rank.made.model
        self.rank = rank
        self.engine = Engine(
            Limits(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                pages=limits.pages - 1,
                page_tokens=limits.page_tokens,
                vocab_size=model.vocab_size,
            ),
            rank.runner,
            model.eos_token_ids,
            serve.seed,
            overlap=rank.ctx.device.type == "cuda",
        )
        self.add, self.cancel, self.step, self.stats = (
            self.engine.add, self.engine.cancel, self.engine.step, self.engine.stats,
        )  # fmt: skip

    def ready(self) -> Ready:
        limits = self.rank.budget
        return Ready(limits.max_model_len, limits.kv_tokens, limits.max_num_seqs, self.rank.ctx.world)

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
