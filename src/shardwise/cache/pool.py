"""The memory that requests live in: pages of keys and values, rows of recurrent state, as the shard spec sizes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardwise.checkpoint.index import DTYPES
from shardwise.config import ModelConfig
from shardwise.layers.attention import KVCache
from shardwise.layers.delta import DeltaState
from shardwise.models.qwen3_5 import LayerCache, layer_name
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Partitions, local, local_bytes

ROWS_AT_ONCE = 16  # copied, so that what is read before it is written stays small


@dataclass(frozen=True)
class CacheSpecs:
    """One page and one row, by local name; and of FP8 pages the scales of keys and values, by layer, 1 if not given."""

    page: Mapping[str, ParamSpec]
    row: Mapping[str, ParamSpec]
    kv_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def page_bytes(self, partitions: Partitions, rank: int) -> int:
        return sum(local_bytes(spec, partitions, rank) for spec in self.page.values())

    def row_bytes(self, partitions: Partitions, rank: int) -> int:
        return sum(local_bytes(spec, partitions, rank) for spec in self.row.values())


def allocate(config: ModelConfig, specs: CacheSpecs, pages: int, rows: int, ctx: RankContext) -> list[LayerCache]:
    """Zeroed caches, one a layer: `pages` pages (page 0 is padding) and `rows` rows (row 0 is padding)."""

    def zeros(count: int, spec: ParamSpec) -> torch.Tensor:
        (part,) = local(spec, ctx.partitions, ctx.rank)
        return torch.zeros((count, *part.shape), dtype=DTYPES[part.stored.dtype], device=ctx.device)

    caches: list[LayerCache] = []
    for i, kind in enumerate(config.layer_types):
        name = layer_name(i)
        if kind == "full_attention":
            k_pages, v_pages = (specs.page[f"{name}.attention.{part}_pages"] for part in "kv")
            # local shape [K, page_tokens, D] behind the page number
            caches.append(KVCache(zeros(pages, k_pages), zeros(pages, v_pages), *specs.kv_scales.get(i, ())))
        else:
            conv, delta = (specs.row[f"{name}.delta.{part}_state"] for part in ("conv", "delta"))
            caches.append(DeltaState(zeros(rows, conv), zeros(rows, delta)))
    return caches


def resize_pages(caches: list[LayerCache], pages: int, moves: Mapping[int, int]) -> None:
    """Have `pages` pages in each layer, that of padding included, with what is in them; `moves`: those that get another
    number. A layer at a time, so that little memory is needed beside.
    """
    for i, cache in enumerate(caches):
        if isinstance(cache, KVCache):
            made = [_resized(old, pages, moves) for old in (cache.k_pages, cache.v_pages)]
            caches[i] = replace(cache, k_pages=made[0], v_pages=made[1])


def _resized(old: torch.Tensor, pages: int, moves: Mapping[int, int]) -> torch.Tensor:
    new, kept = torch.zeros((pages, *old.shape[1:]), dtype=old.dtype, device=old.device), min(pages, len(old))
    new[:kept].copy_(old[:kept])
    if moves:
        from_N, to_N = (torch.tensor(list(each), device=old.device) for each in (moves.keys(), moves.values()))
        target, source = (x if x.element_size() > 1 else x.view(torch.uint8) for x in (new, old))
        target.index_copy_(0, to_N, source.index_select(0, from_N))
    return new


def copy_rows(caches: Sequence[LayerCache], sources_N: torch.Tensor, targets_N: torch.Tensor) -> None:
    """Copy the recurrent state of rows to others, all different and none of them a source, in every layer. int64."""
    parts = list(zip(sources_N.split(ROWS_AT_ONCE), targets_N.split(ROWS_AT_ONCE), strict=True))
    for cache in caches:
        if isinstance(cache, DeltaState):
            for rows in (cache.conv, cache.delta):
                for sources, targets in parts:
                    rows.index_copy_(0, targets, rows.index_select(0, sources))


def copy_pages(caches: Sequence[LayerCache], sources_N: torch.Tensor, targets_N: torch.Tensor) -> None:
    """Copy pages of keys and values to others, all different, in every layer, reading all before writing any. int64."""
    for cache in caches:
        if isinstance(cache, KVCache):
            for pages in (cache.k_pages, cache.v_pages):
                plain = pages if pages.element_size() > 1 else pages.view(torch.uint8)  # FP8 cannot be indexed
                plain.index_copy_(0, targets_N, plain.index_select(0, sources_N))
