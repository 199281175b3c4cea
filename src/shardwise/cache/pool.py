"""The memory that requests live in: pages of keys and values, rows of recurrent state, as the shard spec sizes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwise.checkpoint.index import DTYPES
from shardwise.config import ModelConfig
from shardwise.layers.attention import KVCache
from shardwise.layers.delta import DeltaState
from shardwise.models.qwen3_5 import LayerCache, layer_name
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Partitions, local, local_bytes


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


def allocate(config: ModelConfig, specs: CacheSpecs, pages: int, rows: int, ctx: RankContext) -> Sequence[LayerCache]:
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
