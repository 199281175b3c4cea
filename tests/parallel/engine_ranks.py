"""What the ranks of the pool run in engine tests: the first leads as in a server, the others follow."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch

from shardwise.config import RankEnvironment, ServeConfig
from shardwise.engine import build as building
from shardwise.engine import graphs as decoding
from shardwise.engine.build import Leader, Rank, build_rank
from shardwise.engine.graphs import DecodeGraphs
from shardwise.engine.messages import CacheResized, Failed, Generate, Picture, ResizeCache, SamplingParams, Tokens
from shardwise.layers.embedding import Head
from shardwise.parallel.comm import Alone, TorchCommunicator
from shardwise.shard import ParamSpec, Segment

RESIZE_EVERY = 7


@contextmanager
def packed_as_one_block(wanted: bool) -> Iterator[None]:
    """The classic mistake: q|k|v, which lie one after the other, are cut as if they were one block of rows."""

    def wrong(spec: ParamSpec, heads: int) -> ParamSpec:
        rows = sum(segment.size for segment in spec.segments(0))
        return replace(spec, axes=((Segment("packed", rows, rows // heads),), *spec.axes[1:]))

    def declare(config: Any, *args: Any) -> dict[str, ParamSpec]:
        specs = right(config, *args)
        packed = [name for name in specs if name.endswith((".delta.qkv", ".delta.conv"))]
        return specs | {name: wrong(specs[name], config.delta_value_heads) for name in packed}

    right = building.declare
    try:
        building.declare = declare if wanted else right
        yield
    finally:
        building.declare = right


def generate(
    rank: int,
    world: int,
    group: Any,
    *,
    serve: Mapping[str, Any],
    requests: Sequence[tuple[Any, ...]],
    arrive_every: int = 0,
    wrong_cut: bool = False,
    resizes: Sequence[tuple[int, int]] = (),
    resized: bool = False,
    shortlist: bool = False,
    graphs: bool = False,
) -> tuple[Any, ...] | None:
    """On the first rank the tokens of each request (prompt, sampling, and its pictures if it has any: the fields of
    Picture after the id), its stop token at the end, and the preemptions.

    arrive_every: steps between two arrivals; 0: all at once. resizes: slots of experts, or tokens of KV cache, to
    change to, every RESIZE_EVERY steps in turn; with `resized`, what they were answered is returned, too, and how many
    pages of requests got another number. shortlist: heads keep one, and the rows of logits that were made by way of it
    are returned, too, with the logits that they had. graphs: decode steps go the way of graphs, which are steps run
    anew here, and one step is launched ahead; the number of graphs that choose tokens is returned, too.
    """
    comm = TorchCommunicator(group, group) if world > 1 else Alone()
    config = ServeConfig(ranks=world, device="cpu", **serve)
    with packed_as_one_block(wrong_cut):
        one = build_rank(config, RankEnvironment(rank, world, rank, world, 0), comm)
    listed = with_shortlist(one.runner.model.head) if shortlist else []
    if graphs:
        one.runner.graphs = graphs_anew(one)
    if rank:
        one.runner.follow()
        return None
    leader = Leader(one, config)
    leader.engine._steps_ahead = int(graphs)
    waiting = [message_of(n, *request) for n, request in enumerate(requests)]
    out: list[list[int]] = [[] for _ in requests]
    steps, told = 0, list[tuple[CacheResized, int]]()
    while waiting or leader.has_work():
        while waiting and (not arrive_every or steps % arrive_every == 0 or not leader.has_work()):
            generate, pictures = waiting.pop(0)
            for picture in pictures:
                leader.add_picture(picture)
            leader.add(generate)
            if arrive_every:
                break
        if resizes and steps % RESIZE_EVERY == RESIZE_EVERY - 1:
            wish = resizes[len(told) % len(resizes)]
            pages = [page for request in leader.engine.scheduler.running for page in request.pages]
            answer = leader.resize(ResizeCache(str(steps), *wish))
            leader.engine.check()
            after = [page for request in leader.engine.scheduler.running for page in request.pages]
            told.append((answer, len({*pages} - {*after}) if len(pages) == len(after) else 0))
        for message in leader.step():
            take(message, out)
        steps += 1
    leader.engine.check()
    leader.stop()
    choosing = [sum(keep > 0 for *_, keep in one.runner.graphs.captured)] if one.runner.graphs else []
    told_too = [*([told] if resized else []), *([sum(listed)] if shortlist else []), *choosing]
    return (out, leader.stats().preemptions, *told_too)


def graphs_anew(one: Rank) -> DecodeGraphs:
    """Graphs of a rank on a CPU."""

    def captured(step: Callable[[], torch.Tensor], pool: Any, device: torch.device) -> tuple[Any, torch.Tensor]:
        out = step()
        return SimpleNamespace(replay=lambda: out.copy_(step())), out

    runner = one.runner
    decoding.captured = captured
    with mock.patch("torch.cuda.graph_pool_handle"):
        return DecodeGraphs(runner.model, runner.caches, runner.tables, runner.last_tokens, runner.ctx)


def with_shortlist(head: Head) -> list[torch.Tensor]:
    """Have `head` keep a shortlist -> of each use so far, how many logits were made, and how many left out."""
    found = list[torch.Tensor]()

    def counted(*args: Any) -> torch.Tensor:
        logits_LV = made(*args)
        there = (logits_LV > -torch.inf).sum()
        found.append(torch.stack([there, logits_LV.numel() - there]))
        return logits_LV

    made = head.ops.shortlist_logits
    head.ops = replace(head.ops, shortlist_logits=counted)
    head.make_shortlist()
    return found


def message_of(
    n: int, prompt: list[int], sampling: dict[str, Any], pictures: Sequence[tuple[Any, ...]] = ()
) -> tuple[Generate, list[Picture]]:
    """What the API process would send for one request."""
    chosen = msgspec.convert({"temperature": 0.0, **sampling}, SamplingParams)
    return Generate(str(n), prompt, chosen, pictures=len(pictures)), [Picture(str(n), *each) for each in pictures]


def take(message: Tokens | Failed, out: list[list[int]]) -> None:
    if isinstance(message, Failed):
        raise RuntimeError(message.message)
    out[int(message.id)] += message.tokens + ([message.stop_token] if message.stop_token is not None else [])
