"""Values of scales: a bad one is silent in the answers, so each is looked at before anything is made of it."""

from collections.abc import Iterable
from math import inf

import torch

from shardwise.checkpoint.index import CheckpointIndex
from shardwise.checkpoint.names import PLAIN_FLOATS, needed
from shardwise.config import ConfigError
from shardwise.shard import ParamSpec


def check_scale(name: str, values: torch.Tensor) -> None:
    """Raises ConfigError unless all of `values` are finite and above zero."""
    if not values.numel():
        return
    codes = values.dtype == torch.float8_e4m3fn
    # There are millions. Of e4m3, codes 1 to 0x7E are positive numbers, 0x7F is none, and as int8 the others are < 1.
    least, most = (float(edge) for edge in torch.aminmax(values.view(torch.int8) if codes else values))
    if least > 0 and most < (0x7F if codes else inf):  # NaN is neither
        return
    wide = values.float().reshape(-1)
    bad = wide[~((wide > 0) & (wide < inf))][0].item()
    raise ConfigError(
        f"checkpoint: scale {name!r} holds {bad}, expected finite values above zero; quantise or download it again"
    )


def check_scales(index: CheckpointIndex, specs: Iterable[ParamSpec]) -> None:
    """Look at all scales that `specs` need, in the order of the files. Raises ConfigError for the first bad one.

    The headers have been checked. Weights are not read; what is read here is read again, from memory, by the ranks.
    """
    scaled = (spec for spec in specs if len(spec.format) > 1)
    names = [need.name for spec in scaled for need in needed(spec) if need.stored.role != "value"]
    for name in sorted(names, key=lambda name: (index.info(name).file, index.info(name).offset_bytes)):
        check_scale(name, index.read(name, tuple(slice(0, size) for size in index.info(name).shape)))


def read_scalar(index: CheckpointIndex, name: str) -> float:
    """The one value of tensor `name`, a scale. Raises ConfigError unless it is one, a float, finite and above zero."""
    info = index.info(name)
    if info.dtype not in PLAIN_FLOATS or info.shape not in ((), (1,), (1, 1)):
        raise ConfigError(
            f"{info.file}: scale {name!r} is {info.dtype} {list(info.shape)}, expected one F32 or BF16 value; "
            "quantise or download it again"
        )
    values = index.read(name, tuple(slice(0, 1) for _ in info.shape))
    check_scale(name, values)
    return float(values)
