"""Weights of ranks -> a Partition for every group of the model."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import gcd

from shardwise.config import ConfigError
from shardwise.shard import ParamSpec, Partition, Partitions, finest_units

ALIGNMENTS = (128, 64, 32, 16, 8, 4, 2, 1)  # elements of a unit that kernels like, best first
TEXT_HEAD_GROUPS = ("attention", "delta")
HEAD_GROUPS = (*TEXT_HEAD_GROUPS, "vision")  # a head is the unit, whatever its width
EXACT = 1 + 1e-9
TOLERANCE = 1.15  # a coarser unit is taken while no rank gets more than this times its share


def group_units(specs: Mapping[str, ParamSpec], group: str, align: int) -> int:
    """The most units of `group` when a unit is a multiple of `align` elements; 0 if no such unit divides all specs."""
    try:
        return gcd(*(finest_units(spec, align) for spec in specs.values() if spec.group == group))
    except ValueError:
        return 0


def overload(partition: Partition, weights: Sequence[float]) -> float:
    """How many times its share the worst rank has."""
    counts = [stop - start for start, stop in pairwise(partition.bounds)]
    shares = [partition.units * weight / sum(weights) for weight in weights]
    return max(count / share for count, share in zip(counts, shares, strict=True) if share) if any(shares) else 1.0


def starved(partition: Partition, weights: Sequence[float]) -> bool:
    """Whether a rank gets nothing although it should get something."""
    return any(
        weight and start == stop for weight, (start, stop) in zip(weights, pairwise(partition.bounds), strict=True)
    )


def split(specs: Mapping[str, ParamSpec], group: str, weights: Sequence[float]) -> Partition:
    """Units of the coarsest alignment that follows `weights` exactly, or else closely, else the finest."""
    counts = [group_units(specs, group, align) for align in ((1,) if group in HEAD_GROUPS else ALIGNMENTS)]
    made = [Partition.weighted(units, weights) for units in counts if units]
    if not made:
        raise ConfigError(f"group {group!r}: no unit divides all of its tensors")
    for limit in (EXACT, TOLERANCE):
        for one in made:
            if overload(one, weights) <= limit and not starved(one, weights):
                return one
    return made[-1]


def partitions(
    specs: Mapping[str, ParamSpec],
    ranks: int,
    ratio: Sequence[float] = (),
    group_ratios: Mapping[str, Sequence[float]] | None = None,
) -> Partitions:
    """A Partition for every group of `specs`, by `ratio` (a weight per rank; even if empty) or the group's own.

    Raises ConfigError for a ratio of the wrong length, an unknown group, and ranks that would own no head of any kind.
    """
    groups = sorted({spec.group for spec in specs.values() if spec.group})
    chosen = dict.fromkeys(groups, tuple(ratio) or (1.0,) * ranks) | {
        group: tuple(weights) for group, weights in (group_ratios or {}).items()
    }
    made: dict[str, Partition] = {}
    for group, weights in chosen.items():
        if group not in groups:
            raise ConfigError(f"--ratio {group}=...: no such group; this model has {', '.join(groups)}")
        if len(weights) != ranks:
            raise ConfigError(
                f"--ratio {','.join(f'{w:g}' for w in weights)}: {len(weights)} weights for {ranks} ranks"
            )
        made[group] = split(specs, group, weights)
    most = max((made[group].units for group in TEXT_HEAD_GROUPS if group in made), default=ranks)
    if ranks > most:
        raise ConfigError(
            f"{ranks} ranks are too many: the model has at most {most} heads to share out; use --tp {most}"
        )
    return made
