"""What the ranks of the pool run in tests of pictures."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch

from shardwise.config import ServeConfig
from shardwise.engine.messages import Picture
from shardwise.engine.pictures import PictureCache, Pictures
from shardwise.engine.plan import Chunk, StepPlan
from shardwise.models import vision
from tests.parallel.model_ranks import built

# Nothing is dropped: ranks that take part in other runs would drop others, and only some would build anew.
kept = lru_cache(maxsize=None)(built.__wrapped__)
Sent = tuple[int, int, int, bytes, bytes]  # at, height, width, digest, pixels


def rank_of(rank: int, world: int, group: Any, serve: Mapping[str, Any]) -> Any:
    one = kept(rank, world, group, msgspec.json.encode(ServeConfig(ranks=world, device="cpu", **serve)))
    torch.set_num_threads(1)
    return one


def features(
    rank: int, world: int, group: Any, *, serve: Mapping[str, Any], pictures: Sequence[tuple[int, int, torch.Tensor]]
) -> list[torch.Tensor]:
    """The features of each picture."""
    one = rank_of(rank, world, group, serve)
    with torch.inference_mode():
        return [each.clone() for each in one.runner.features.tower([vision.Picture(*each) for each in pictures])]


def logits(
    rank: int,
    world: int,
    group: Any,
    *,
    serve: Mapping[str, Any],
    ids: list[int],
    sent: Sequence[Sent],
    chunk_tokens: Sequence[int],
) -> list[torch.Tensor]:
    """Logits [T, V] of the prompt, once for each size of chunks; every run starts over in another row."""
    one = rank_of(rank, world, group, serve)
    config = one.made.vision.config
    placed = Pictures([Picture("", *each) for each in sent], len(ids), config)
    cache, found = PictureCache(config, capacity_tokens=8), []
    one.runner.features.held.clear()
    for row, size in enumerate(chunk_tokens, start=1):
        parts, pages = [], -(-len(ids) // one.budget.page_tokens)
        for start in range(0, len(ids), size):
            stop = min(len(ids), start + size)
            chunk = Chunk(
                row, start, stop - start, ids[start:stop], list(range(1, pages + 1)) if start == 0 else [], True, True,
                placed.shift(start), placed.axes(start, stop), placed.spans(start, stop),
            )  # fmt: skip
            encode, forget = cache.step([(placed, chunk)] if chunk.spans else [])
            parts.append(one.runner.carry_out(StepPlan(1, [chunk], encode=encode, forget=forget)).clone())
        found.append(torch.cat(parts))
    return found
