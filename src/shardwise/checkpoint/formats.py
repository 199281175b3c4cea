"""Formats as data: which stored tensors make up a weight."""

from shardwise.shard import Stored


def plain(dtype: str, suffix: str = ".weight") -> tuple[Stored, ...]:
    """An unquantised weight held in `dtype` (by safetensors' name), whatever plain float the file has."""
    return (Stored(suffix, dtype),)


class Formats:
    """Interim: every module is plain."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    plain = classmethod(lambda cls, dtype: cls(dtype))
    read = classmethod(lambda cls, folder, raw, index, dtype: cls(dtype))

    def of(self, source: str) -> tuple[Stored, ...]:
        return plain(self.dtype, "" if source.endswith(("experts.gate_up_proj", "experts.down_proj")) else ".weight")
