"""How much of what the prefix cache's host tier holds: the same on every rank."""

from dataclasses import replace

import psutil

from shardwise.cache.budget import GIB, HOST_SHARE, Budget, host_places
from shardwise.cache.pool import CacheSpecs
from shardwise.config import ConfigError, ServeConfig
from shardwise.parallel.context import RankContext


def with_host_tier(serve: ServeConfig, specs: CacheSpecs, ctx: RankContext, local_ranks: int, limits: Budget) -> Budget:
    """`limits` with as many places in host memory as every rank affords. Raises ConfigError for too much or too little.

    local_ranks: those of this host, each of which takes as much.
    """
    if not serve.host_cache_gib or not limits.snapshot_rows:
        return limits
    asked_bytes, option = int(serve.host_cache_gib * GIB), f"--host-cache-gib {serve.host_cache_gib:g}"
    available_bytes = ctx.comm.minimum(psutil.virtual_memory().available)
    if asked_bytes * local_ranks > available_bytes * HOST_SHARE:
        raise ConfigError(
            f"{option}: on each of {local_ranks} ranks of a host this is {asked_bytes * local_ranks / GIB:.2f} GiB, "
            f"and of {available_bytes / GIB:.2f} GiB available at most {HOST_SHARE:.0%} may be asked for; give less"
        )
    row_bytes = specs.row_bytes(ctx.partitions, ctx.rank)
    page_bytes = specs.page_bytes(ctx.partitions, ctx.rank)
    pages, rows = (ctx.comm.minimum(count) for count in host_places(asked_bytes, row_bytes, page_bytes))
    if pages < 1 or rows < 1:
        raise ConfigError(
            f"{option}: too little for one page and one recurrent state, {(row_bytes + page_bytes) / GIB:.3f} GiB on "
            f"rank {ctx.rank}; give more, or 0 for no host tier"
        )
    return replace(limits, host_pages=pages, host_rows=rows)
