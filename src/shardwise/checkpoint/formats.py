"""Formats as data: which stored tensors make up a weight."""

from shardwise.shard import Stored


def plain(dtype: str, suffix: str = ".weight") -> tuple[Stored, ...]:
    """An unquantised weight held in `dtype` (by safetensors' name), whatever plain float the file has."""
    return (Stored(suffix, dtype),)
