"""How a logical weight is cut over ranks, and how each of its stored tensors follows.

Pure integers: no torch, no globals, no I/O. A layer declares its weights as `ParamSpec`s, which know no rank; a plan
has a `Partition` for each group of dimensions that is cut together, counted in units (heads, experts, 16 columns). What
a rank reads (`copies`), holds (`local`) and needs (`table`) follows from these two, here and nowhere else. Sizes are in
elements of the logical weight unless called stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, product
from math import gcd, isfinite, lcm, prod
from types import MappingProxyType
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Partition:
    """Rank r owns the contiguous units bounds[r] .. bounds[r + 1]; a rank may own none."""

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.bounds[:1] != (0,) or any(a > b for a, b in pairwise(self.bounds)) or self.units < 1:
            raise ValueError(f"partition {self.bounds}: give bounds that start at 0, never fall and end at 1 or more")

    @classmethod
    def weighted(cls, units: int, weights: Sequence[float]) -> "Partition":
        """Split `units` over the ranks in proportion to `weights`, by largest remainder.

        A rank owns the whole part of its quota, units * weight / sum; what is left goes, a unit each, to the largest
        fractions, the lower rank first among equals. Exact: all processes find the same bounds, no unit is lost, a
        larger weight never owns less, and a weight of 0 owns nothing.
        """
        if not all(isfinite(w) and w >= 0 for w in weights) or not any(weights):
            raise ValueError(f"weights {tuple(weights)}: give one per rank, finite, none negative, not all zero")
        total = sum(map(Fraction, weights))
        quotas = [divmod(units * Fraction(w), total) for w in weights]
        left = units - sum(whole for whole, _ in quotas)
        extra = sorted(range(len(quotas)), key=lambda rank: -quotas[rank][1])[:left]
        return cls((0, *accumulate(whole + (rank in extra) for rank, (whole, _) in enumerate(quotas))))

    @classmethod
    def even(cls, units: int, ranks: int) -> "Partition":
        """16 units over 3 ranks are 6:5:5."""
        return cls.weighted(units, (1,) * ranks)

    @property
    def units(self) -> int:
        return self.bounds[-1]

    @property
    def ranks(self) -> int:
        return len(self.bounds) - 1

    def span(self, rank: int) -> tuple[int, int]:
        """The units [start, stop) of `rank`."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank}: partition {self.bounds} has only {self.ranks} ranks; make one for yours")
        return self.bounds[rank], self.bounds[rank + 1]


Partitions = Mapping[str, Partition]  # by group


@dataclass(frozen=True)
class Segment:
    """`size` elements of an axis, spread evenly over the units of a group, in grains that are never parted.

    shared: a grain may serve several units (one KV head, many query heads), and a rank holds every grain that its
    units touch, so that neighbours may hold the same one. Only where the output is not summed over ranks.
    """

    name: str
    size: int
    grain: int = 1
    shared: bool = False

    def span(self, partition: Partition, rank: int, tensor: str = "") -> tuple[int, int]:
        """The elements [start, stop) that `rank` holds; an error names `tensor`."""
        first, last = (unit * self.size for unit in partition.span(rank))
        units, width = partition.units, partition.units * self.grain
        start, stop = first // width * self.grain, min(-(-last // width) * self.grain, self.size)
        if (start * units, stop * units) != (first, last) and not self.shared:
            raise ValueError(
                f"{tensor or self.name}: rank {rank} would own [{Fraction(first, units)}, {Fraction(last, units)}) of "
                f"{self.name!r}, {self.size} in grains of {self.grain}; count the group in finest_units or a divisor"
            )
        return start, stop if first < last else start


def head_map(queries: Segment, keys: Segment, partition: Partition, rank: int) -> tuple[int, ...]:
    """For each query head (grain of `queries`) of `rank`, the local index of the KV head (grain of `keys`) it reads.

    Consecutive query heads share a KV head. The value heads of GatedDeltaNet find their key heads in the same way.
    """
    heads, served = queries.size // queries.grain, keys.size // keys.grain
    if heads % served:
        raise ValueError(f"{queries.name}: {heads} heads over {served} of {keys.name!r} are uneven; correct the heads")
    start, stop = (edge // queries.grain for edge in queries.span(partition, rank))
    base = keys.span(partition, rank)[0] // keys.grain
    return tuple(head * served // heads - base for head in range(start, stop))


Role = Literal["value", "scale", "inverse_scale", "input_scale"]
BITS: Mapping[str, int] = MappingProxyType(
    {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "BF16": 16, "F16": 16, "F8_E4M3": 8, "U8": 8}
)


@dataclass(frozen=True)
class Stored:
    """A checkpoint tensor behind a logical weight; each of its elements stands for a block of the weight's.

    dtype: what a rank holds it in, by the name safetensors gives it; loading casts between plain floats only.
    block: extent on the last axes (on those before: 1). 0 is all of an axis, of size 1 in the checkpoint; None is all
    of an axis that the checkpoint lacks: [out, 1] is (1, 0), [out] is (1, None), a scalar is (None, None).
    role: an element of the weight is its value times all scales, divided by all inverse scales, that stand for it;
    an input scale is for a kernel that quantises activations. Packed U8 values: pairs of e2m1 codes, low nibble first.
    packed: a stored element holds the codes of its block, which no cut may part. Otherwise it is one value for its
    block, and a cut inside repeats it on both sides, in smaller blocks.
    """

    suffix: str
    dtype: str
    block: tuple[int | None, ...] = ()
    packed: bool = False
    role: Role = "value"

    def __post_init__(self) -> None:
        if self.dtype not in BITS:
            raise ValueError(f"{self.suffix or 'tensor'}: dtype {self.dtype!r} is not held; use one of {sorted(BITS)}")

    @property
    def bits(self) -> int:
        return BITS[self.dtype]


@dataclass(frozen=True)
class ParamSpec:
    """A logical weight [.., out, in]: its axes, its format, its names in the checkpoint, and how it is cut.

    axes: a size, or the segments that make up the axis.
    sources: one name if it is fused in the checkpoint, or one for each segment of the axis that joins them. "{e}" in a
    name runs over axis 0, the experts, which these tensors lack. A cache or state is a spec, too, under its own name.
    group: whose partition cuts the segments of axis number `cut`; without one all of it is on every rank.

    A cut of `in` leaves partial sums: nothing there is shared, and the bias, a spec without group, is added to the sum.
    """

    axes: tuple[tuple[Segment, ...] | int, ...]
    format: tuple[Stored, ...]
    sources: tuple[str, ...]
    group: str | None = None
    cut: int = 0

    def __post_init__(self) -> None:
        if len(self.sources) != 1 and sum(self.joins(i) for i in range(len(self.axes))) != 1:
            raise ValueError(f"{self.sources}: not one axis has that many segments; name one source or one per segment")
        if self.group and not 0 <= self.cut < len(self.axes):
            raise ValueError(f"{self.sources[0]}: no axis {self.cut} among {len(self.axes)} to cut; count from 0")
        for stored in self.format:
            if len(stored.block) > len(self.axes) - self.per_expert:
                raise ValueError(f"{self.sources[0]}{stored.suffix}: block {stored.block} is for more axes; shorten it")
        for segment in self.segments(self.cut) if self.group and self.cut == len(self.axes) - 1 > 0 else ():
            if segment.shared:
                raise ValueError(f"{self.sources[0]}: shared {segment.name!r} would be summed twice; do not share it")

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.sources[0]

    def segments(self, i: int) -> tuple[Segment, ...]:
        axis = self.axes[i]
        return (Segment(f"axis {i}", axis),) if isinstance(axis, int) else axis

    def joins(self, i: int) -> bool:
        """Whether the sources follow one another on axis `i`."""
        return len(self.segments(i)) == len(self.sources)

    def block(self, stored: Stored, i: int) -> int | None:
        return ((1,) * (len(self.axes) - len(stored.block)) + stored.block)[i]


class Piece(NamedTuple):
    """Elements start .. stop of the `length` on an axis of a source, which a rank holds from its element `at` on."""

    source: int
    start: int
    stop: int
    at: int
    length: int


class Local(NamedTuple):
    """A stored tensor as a rank holds it, with all axes of the weight.

    block: what the kernel goes by, on each axis. 0 is all of it; the last block of an axis may be partial.
    """

    stored: Stored
    shape: tuple[int, ...]
    block: tuple[int, ...]


class Copy(NamedTuple):
    """A step of loading: param[stored][dst] = source[name][src], in stored elements.

    Where a slice is longer in `dst`, the one element of `src` is repeated; an int in `dst` is an axis the source lacks.
    """

    name: str
    src: tuple[slice, ...]
    stored: Stored
    dst: tuple[slice | int, ...]


def cover(start: int, stop: int, block: int) -> slice:
    """The stored elements behind elements start .. stop."""
    return slice(start // block, -(-stop // block)) if block else slice(0, min(stop, 1))


def pieces(spec: ParamSpec, i: int, partitions: Partitions, rank: int) -> list[Piece]:
    """What `rank` holds of the segments of axis `i`."""
    found, at, offset, segments = list[Piece](), 0, 0, spec.segments(i)
    if spec.group and spec.group not in partitions:
        raise ValueError(f"{spec.sources[0]}: no partition for {spec.group!r} among {sorted(partitions)}; add one")
    for n, segment in enumerate(segments):
        start, stop = 0, segment.size
        if spec.group and i == spec.cut:
            start, stop = segment.span(partitions[spec.group], rank, spec.sources[0])
        source, base, length = (n, 0, segment.size) if spec.joins(i) else (0, offset, sum(s.size for s in segments))
        if start < stop:
            found.append(Piece(source, base + start, base + stop, at, length))
        at, offset = at + stop - start, offset + segment.size
    return found


def fit(spec: ParamSpec, stored: Stored, i: int, partitions: Partitions, rank: int) -> tuple[int, list[Piece]]:
    """Axis `i` of `stored` on `rank`: its block, made to divide all edges that fall inside one, and the pieces."""
    block, parts = spec.block(stored, i) or 0, pieces(spec, i, partitions, rank)
    if not block and not spec.joins(i):  # the source has one element here, whichever pieces are held
        parts = parts[:1]
    fine = block
    for p in parts:
        fine = gcd(fine, p.at, *((p.start, p.stop % p.length) if block else ()))
        if stored.packed and fine != block:
            raise ValueError(
                f"{spec.sources[p.source]}{stored.suffix}: rank {rank} would own [{p.start}, {p.stop}) of axis {i} "
                f"at {p.at}, where {block} elements are packed together; count the group in finest_units or a divisor"
            )
    return fine, parts


def local_shape(spec: ParamSpec, partitions: Partitions, rank: int) -> tuple[int, ...]:
    """Shape of the part of the weight that `rank` holds, in elements."""
    return tuple(sum(p.stop - p.start for p in pieces(spec, i, partitions, rank)) for i in range(len(spec.axes)))


def local(spec: ParamSpec, partitions: Partitions, rank: int) -> list[Local]:
    """What `rank` holds of each tensor of the format."""
    shape, held = local_shape(spec, partitions, rank), list[Local]()
    for stored in spec.format:
        block = tuple(fit(spec, stored, i, partitions, rank)[0] for i in range(len(shape)))
        held.append(Local(stored, tuple(cover(0, *axis).stop for axis in zip(shape, block, strict=True)), block))
    return held


def local_bytes(spec: ParamSpec, partitions: Partitions, rank: int) -> int:
    """Bytes of all that `rank` holds of `spec`."""
    return sum(-(-prod(part.shape) * part.stored.bits // 8) for part in local(spec, partitions, rank))


def copies(spec: ParamSpec, partitions: Partitions, rank: int) -> Iterator[Copy]:
    """Every step that fills what `rank` holds of `spec`, each stored element once."""
    for stored in spec.format:
        for runs in product(*(fill(spec, stored, i, partitions, rank) for i in range(len(spec.axes)))):
            name = spec.sources[sum(source for source, _, _ in runs)] + stored.suffix
            src = [read for _, read, _ in runs if read is not None]
            if spec.per_expert:
                name = name.replace("{e}", str(src.pop(0).start))
            yield Copy(name, tuple(src), stored, tuple(dst for _, _, dst in runs))


Run = tuple[int, slice | None, slice | int]  # source, src, dst on one axis


def fill(spec: ParamSpec, stored: Stored, i: int, partitions: Partitions, rank: int) -> Iterator[Run]:
    """The runs of axis `i`: whole pieces, or single stored elements if these are experts or repeated."""
    block, expert = spec.block(stored, i), i == 0 and spec.per_expert
    fine, parts = fit(spec, stored, i, partitions, rank)
    step = 1 if expert else block if block != fine else None
    for p in parts:
        marks = range(p.start // step * step + step, p.stop, step) if step else ()
        for start, stop in pairwise((p.start, *marks, p.stop)):
            src = None if block is None else cover(start, stop, block)
            dst = cover(start - p.start + p.at, stop - p.start + p.at, fine)
            for index in range(dst.start, dst.stop) if expert or src is None else (dst,):
                yield p.source, src, index


class Row(NamedTuple):
    """What a spec takes if one rank holds all of it, and what it takes on each rank."""

    name: str
    full_bytes: int
    rank_bytes: tuple[int, ...]


def table(specs: Mapping[str, ParamSpec], partitions: Partitions) -> list[Row]:
    """A plan, one row per spec."""
    ranks = {group: partition.ranks for group, partition in partitions.items()}
    if len(set(ranks.values())) != 1:
        raise ValueError(f"plan: the ranks of groups are {ranks}; give all groups the same number of ranks")
    alone = {group: Partition((0, partition.units)) for group, partition in partitions.items()}
    rows: list[Row] = []
    for name, spec in specs.items():
        each = tuple(local_bytes(spec, partitions, rank) for rank in range(max(ranks.values())))
        rows.append(Row(name, local_bytes(spec, alone, 0), each))
    return rows


def finest_units(spec: ParamSpec, align: int = 1) -> int:
    """The most units that `spec` lets its group be counted in, 0 if any number; a group takes the gcd of its specs.

    Such a unit is, in every unshared segment, a multiple of the grain, of what is packed together and of `align`, the
    elements that the kernel asks for.
    """
    if not spec.group:
        return 0
    packed = lcm(*(spec.block(stored, spec.cut) or 1 for stored in spec.format if stored.packed))
    units = {s: lcm(s.grain, packed, align) for s in spec.segments(spec.cut) if not s.shared}
    for s, unit in units.items():
        if s.size % unit:
            raise ValueError(f"{spec.sources[0]}: {s.name!r} of {s.size} has no units of {unit}; lower align={align}")
    return gcd(*(s.size // unit for s, unit in units.items()))
