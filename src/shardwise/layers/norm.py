"""RMSNorm weights: small, whole on every rank."""

from shardwise.layers.linear import Specs, plain
from shardwise.shard import Stored


def declare_norm(name: str, size: int, source: str, dtype: str) -> Specs:
    """Local names end in .norm; the checkpoint's tensor is `source`.weight."""
    return {name: plain((size,), source, (Stored(".weight", dtype),))}
