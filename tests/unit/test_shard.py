"""Cut, load and dequantise arrays: what a rank holds must be exactly its part of the whole, in every format and cut."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import gcd, lcm
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardwise.shard import (
    Copy,
    ParamSpec,
    Partition,
    Partitions,
    Segment,
    Stored,
    copies,
    finest_units,
    head_map,
    local,
    local_bytes,
    local_shape,
    table,
)

Array = NDArray[Any]
Format = tuple[Stored, ...]
Axis = tuple[Segment, ...] | int

CODES = Stored(".weight", "U8")
PAIRS = Stored(".weight", "U8", (1, 2), packed=True)
FORMATS: dict[str, Format] = {
    "bf16": (Stored(".weight", "BF16"),),
    "fp8 block": (CODES, Stored(".weight_scale_inv", "BF16", (128, 128))),
    "fp8 tensor": (CODES, Stored(".weight_scale", "F32", (None, None)), Stored(".input_scale", "F32", (None, None))),
    "fp8 channel": (CODES, Stored(".weight_scale", "BF16", (1, 0))),
    "fp8 vector": (CODES, Stored(".weight_scale", "BF16", (1, None))),
    "nvfp4": (PAIRS, Stored(".weight_scale", "U8", (1, 16)), Stored(".weight_scale_2", "F32", (None, None))),
    "nvfp4 reciprocal": (
        Stored(".weight_packed", "U8", (1, 2), packed=True),
        Stored(".weight_scale", "U8", (1, 16)),
        Stored(".weight_global_scale", "F32", (None, 0)),
    ),
}
BF16, PLAIN, FP32 = FORMATS["bf16"], (Stored("", "BF16"),), (Stored("", "F32"),)


# The same facts a second time, slowly: checkpoints, the weights in them, and the elements that a rank owns.


def parts(axis: Axis) -> tuple[Segment, ...]:
    return (Segment("", axis),) if isinstance(axis, int) else axis


def joined(spec: ParamSpec) -> list[int]:
    return [i for i, axis in enumerate(spec.axes) if not isinstance(axis, int) and len(axis) == len(spec.sources) > 1]


def shape_of(spec: ParamSpec, source: int | None = None) -> list[int]:
    """Logical shape of the weight, or of one of its sources (still with the experts' axis)."""
    shape = [axis if isinstance(axis, int) else sum(s.size for s in axis) for axis in spec.axes]
    for i in joined(spec) if source is not None else ():
        shape[i] = spec.axes[i][source].size
    return shape


def blocks_of(spec: ParamSpec, stored: Stored) -> tuple[int | None, ...]:
    return (1,) * (len(spec.axes) - len(stored.block)) + stored.block


def experts_of(spec: ParamSpec) -> Sequence[int | None]:
    return range(shape_of(spec)[0]) if "{e}" in spec.sources[0] else [None]


def file_name(source: str, stored: Stored, expert: int | None) -> str:
    return source.replace("{e}", str(expert)) + stored.suffix


def checkpoint(spec: ParamSpec, seed: int = 0) -> dict[str, Array]:
    """Random tensors, named and shaped as in a checkpoint, so small that products are exact in float32."""
    rng, files = np.random.default_rng(seed), dict[str, Array]()
    for (n, source), stored, e in itertools.product(enumerate(spec.sources), spec.format, experts_of(spec)):
        axes = list(zip(shape_of(spec, n), blocks_of(spec, stored), strict=True))[e is not None :]
        shape = [1 if block == 0 else -(-size // block) for size, block in axes if block is not None]
        files[file_name(source, stored, e)] = rng.integers(1, 256 if stored is spec.format[0] else 16, shape, np.uint8)
    return files


def expand(tensor: Array, stored: Stored, block: Iterable[int | None], shape: Sequence[int]) -> Array:
    """A stored tensor at the shape of its weight."""
    for i, (extent, size) in enumerate(zip(block, shape, strict=True)):
        if extent is None:
            tensor = np.expand_dims(tensor, i)
        assert tensor.shape[i] == (-(-size // extent) if extent else min(size, 1))
        if stored.packed and extent == 2:
            before, after = tensor.shape[:i], tensor.shape[i + 1 :]
            tensor = np.stack([tensor & 15, tensor >> 4], i + 1).reshape(*before, 2 * tensor.shape[i], *after)
        elif extent != 1:
            tensor = np.repeat(tensor, extent or size, i)
        tensor = tensor[(slice(None),) * i + (slice(size),)]
    return tensor.astype(np.float32)


def dequantised(tensors: Iterable[tuple[Stored, Array]]) -> Array:
    (_, weight), *scales = tensors
    for stored, scale in scales:
        weight = weight / scale if stored.suffix.endswith("global_scale") else weight * scale
    return weight


def logical(spec: ParamSpec, files: Mapping[str, Array]) -> Array:
    """The whole weight, source by source and expert by expert."""
    stack: list[Array] = []
    for e in experts_of(spec):
        lead, row = int(e is not None), list[Array]()
        for n, source in enumerate(spec.sources):
            shape = shape_of(spec, n)[lead:]
            tensors = [(stored, files[file_name(source, stored, e)]) for stored in spec.format]
            row.append(dequantised((s, expand(t, s, blocks_of(spec, s)[lead:], shape)) for s, t in tensors))
        stack.append(np.concatenate(row, joined(spec)[0] - lead) if joined(spec) else row[0])
    return np.stack(stack) if "{e}" in spec.sources[0] else stack[0]


@cache
def owned(segment: Segment, partition: Partition, rank: int) -> Sequence[int]:
    """Elements of the units of `rank`, or of the grains that these touch, found one by one."""
    units = range(*partition.span(rank))
    if not segment.shared:
        return [x for x in range(segment.size) if x * partition.units // segment.size in units]
    width, found = Fraction(segment.size, partition.units), list[int]()
    for low in range(0, segment.size, segment.grain):
        high = min(low + segment.grain, segment.size)
        if any(low < (unit + 1) * width and unit * width < high for unit in units):
            found += range(low, high)
    return found


def edges(spec: ParamSpec, i: int, partition: Partition, rank: int) -> tuple[list[int], list[int]]:
    """Where the pieces of axis `i` start locally, and where they start and stop inside their source."""
    base, at, ats, inner = 0, 0, list[int](), list[int]()
    for segment in parts(spec.axes[i]):
        own = owned(segment, partition, rank) if spec.group and i == spec.cut else range(segment.size)
        end = segment.size if i in joined(spec) else shape_of(spec)[i]
        if own:
            ats.append(at)
            inner += [edge for edge in (base + own[0], base + own[-1] + 1) if edge != end]
        at += len(own)
        base += 0 if i in joined(spec) else segment.size
    return ats, inner


def block_on(spec: ParamSpec, stored: Stored, i: int, partition: Partition, rank: int) -> int:
    """The block that `rank` is to hold: as in the checkpoint, unless an edge falls inside."""
    block, (ats, inner) = blocks_of(spec, stored)[i], edges(spec, i, partition, rank)
    return gcd(block, *ats, *inner) if block else gcd(*ats) if i in joined(spec) else 0


def parted(spec: ParamSpec, partition: Partition, rank: int) -> bool:
    """Whether `rank` would own one of two codes that are packed together."""
    axes = [(stored, i) for stored in spec.format if stored.packed for i in range(len(spec.axes))]
    return any(block_on(spec, stored, i, partition, rank) != blocks_of(spec, stored)[i] for stored, i in axes)


def load(spec: ParamSpec, partitions: Partitions, rank: int, files: Mapping[str, Array]) -> tuple[Any, Any]:
    """What a loader does: the parameters, and how often each element of each file was read."""
    held = {part.stored.suffix: part for part in local(spec, partitions, rank)}
    params = {suffix: np.zeros(part.shape, np.uint8) for suffix, part in held.items()}
    writes = {suffix: np.zeros(part.shape, int) for suffix, part in held.items()}
    reads = {name: np.zeros(tensor.shape, int) for name, tensor in files.items()}
    for name, src, stored, dst in copies(spec, partitions, rank):
        source, target = files[name][src], params[stored.suffix][dst]
        assert len(src) == files[name].ndim
        assert len(dst) == len(spec.axes)
        assert source.ndim == target.ndim
        assert source.size
        assert target.size
        assert all(a in (1, b) for a, b in zip(source.shape, target.shape, strict=True)), "only one element repeats"
        params[stored.suffix][dst] = source
        writes[stored.suffix][dst] += 1
        reads[name][src] += 1
    assert all((count == 1).all() for count in writes.values()), "every local element is written once"
    return [(held[suffix], params[suffix]) for suffix in held], reads


def check(spec: ParamSpec, partitions: Partitions, files: Mapping[str, Array], whole: Array) -> None:
    """Each rank holds its part of the whole; all of them hold all of it, and nothing twice unless it is shared."""
    own, reads = parts(spec.axes[spec.cut]), {name: np.zeros(tensor.shape, int) for name, tensor in files.items()}
    bases = list(itertools.accumulate((s.size for s in own), initial=0))
    for rank in range(max(partition.ranks for partition in partitions.values())):
        mine = whole
        if spec.group:
            kept = [
                base + x
                for s, base in zip(own, bases[:-1], strict=True)
                for x in owned(s, partitions[spec.group], rank)
            ]
            mine = np.take(whole, kept, spec.cut)
        held, counts = load(spec, partitions, rank, files)
        shape = local_shape(spec, partitions, rank)
        assert shape == mine.shape
        for part, _ in held:
            cut = partitions[spec.group] if spec.group else Partition((0, 1))
            assert part.block == tuple(block_on(spec, part.stored, i, cut, rank) for i in range(len(shape)))
        tensors = ((part.stored, expand(param, part.stored, part.block, shape)) for part, param in held)
        assert np.array_equal(dequantised(tensors), mine)
        assert local_bytes(spec, partitions, rank) == sum(param.size * part.stored.bits // 8 for part, param in held)
        for name, count in counts.items():
            assert mine.size or not count.any(), "who holds nothing reads nothing"
            reads[name] += count > 0
    assert all(count.all() for count in reads.values()), "all of the checkpoint is read"
    if spec.group and not any(segment.shared for segment in own):
        codes = [reads[file_name(s, spec.format[0], e)] for s in spec.sources for e in experts_of(spec)]
        assert all((count == 1).all() for count in codes), "no weight is held twice"


# Random geometries.


@st.composite
def partitionings(draw: st.DrawFn, units: int) -> Partition:
    ranks = draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["bounds", "weighted", "even"]))
    if kind == "weighted":
        return Partition.weighted(units, draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks).filter(any)))
    if kind == "even":
        return Partition.even(units, ranks)
    inner = draw(st.lists(st.integers(0, units), min_size=ranks - 1, max_size=ranks - 1))
    return Partition((0, *sorted(inner), units))


@st.composite
def segments(draw: st.DrawFn, units: int, name: str, shareable: bool) -> Segment:
    if shareable and draw(st.booleans()):  # any grain, the last one maybe partial
        return Segment(name, draw(st.integers(1, 24)), draw(st.integers(1, 6)), shared=True)
    width = draw(st.integers(1, 8))
    return Segment(name, units * width, draw(st.sampled_from([d for d in range(1, width + 1) if width % d == 0])))


@st.composite
def formats(draw: st.DrawFn, axes: int) -> Format:
    weights = [CODES] if axes == 1 else [CODES, PAIRS, Stored(".weight", "U8", (2, 1), packed=True)]
    blocks = st.lists(st.sampled_from([None, 0, 1, 2, 3, 4, 8, 16]), max_size=axes).map(tuple)
    names = draw(st.sampled_from([[], [".scale"], [".scale", ".global_scale"]]))
    return (draw(st.sampled_from(weights)), *(Stored(name, "BF16", draw(blocks)) for name in names))


@st.composite
def cases(draw: st.DrawFn) -> tuple[ParamSpec, Partition]:
    """A weight, maybe of experts, cut by column, by row, by expert or not at all, or a vector; and a partition."""
    units, kind = draw(st.integers(1, 6)), draw(st.sampled_from(["vector", "column", "row", "expert", "whole"]))
    own = tuple(
        draw(segments(units, f"s{n}", shareable=kind in ("vector", "column"))) for n in range(draw(st.integers(1, 3)))
    )
    axes: list[Axis] = [own] if kind == "vector" else [own, draw(st.integers(1, 20))]
    axes = axes[::-1] if kind == "row" else axes
    bank = kind == "expert" or (kind != "vector" and draw(st.booleans()))
    if bank:
        experts = (draw(segments(units, "expert", shareable=False)),) if kind == "expert" else draw(st.integers(1, 4))
        axes = [experts, *axes]
    prefix = "experts.{e}." if bank and draw(st.booleans()) else ""
    sources = tuple(prefix + s.name for s in own) if draw(st.booleans()) else (prefix + "fused",)
    format = draw(formats(len(axes) - bool(prefix)))
    group, cut = None if kind == "whole" else "group", 0 if kind == "expert" else axes.index(own)
    return ParamSpec(tuple(axes), format, sources, group, cut), draw(partitionings(units))


@settings(max_examples=800, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_every_rank_holds_its_part_of_the_whole(case: tuple[ParamSpec, Partition], seed: int) -> None:
    spec, partition = case
    refused = [rank for rank in range(partition.ranks) if parted(spec, partition, rank)]
    for rank in refused:
        with pytest.raises(
            ValueError, match=rf"^\S+\.weight: rank {rank} would own .* 2 elements are packed together; "
        ):
            local(spec, {"group": partition}, rank)
    if not refused:
        files = checkpoint(spec, seed)
        check(spec, {"group": partition}, files, logical(spec, files))


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 4), st.data())
def test_any_partition_of_the_finest_units_is_legal(
    case: tuple[ParamSpec, Partition], align: int, data: st.DataObject
) -> None:
    spec, _ = case
    own = parts(spec.axes[spec.cut])
    if not spec.group or any(s.shared for s in own) or parted(spec, Partition((0, 1)), 0):
        return
    packed = max([blocks_of(spec, stored)[spec.cut] for stored in spec.format if stored.packed], default=1)
    fits = [s.size % lcm(s.grain, packed, align) == 0 for s in own]
    if not all(fits):
        with pytest.raises(ValueError, match=r"has no units of \d+; lower align="):
            finest_units(spec, align)
        return
    partition, files = data.draw(partitionings(finest_units(spec, align))), checkpoint(spec)
    check(spec, {"group": partition}, files, logical(spec, files))
    assert all(edge % align == 0 for s in own for rank in range(partition.ranks) for edge in s.span(partition, rank))


# Partitions and heads.


@given(st.integers(1, 500), st.lists(st.floats(0, 1e9), min_size=1, max_size=9).filter(any))
def test_weighted_is_by_largest_remainder(units: int, weights: list[float]) -> None:
    partition = Partition.weighted(units, weights)
    counts = [b - a for a, b in itertools.pairwise(partition.bounds)]
    quotas = [units * Fraction(w) / sum(map(Fraction, weights)) for w in weights]
    assert sum(counts) == partition.units == units
    assert partition.ranks == len(weights)
    assert all(abs(count - quota) < 1 for count, quota in zip(counts, quotas, strict=True))
    for (i, a), (j, b) in itertools.permutations(enumerate(quotas), 2):
        assert a <= b or counts[i] >= counts[j], "a larger weight never owns less"
        assert a != b or i > j or counts[i] >= counts[j], "the lower rank first among equals"
        assert counts[i] < a or counts[j] >= b or a % 1 == 0 or a % 1 >= b % 1, "the largest fractions first"
    assert Partition.weighted(units, [w * 4 for w in weights]) == partition


@pytest.mark.parametrize(
    ("units", "weights", "counts"),
    [
        (16, (1, 1, 1), (6, 5, 5)),
        (16, (5, 3), (10, 6)),
        (32, (5, 3), (20, 12)),
        (16, (3, 3, 1, 1), (6, 6, 2, 2)),
        (10, (1, 1, 0, 1), (4, 3, 0, 3)),
        (3, (1, 1, 1, 1, 1), (1, 1, 1, 0, 0)),
        (7, (0.5, 0.25, 0.25), (3, 2, 2)),
        (1, (1, 2), (0, 1)),
    ],
)
def test_weighted(units: int, weights: tuple[float, ...], counts: tuple[int, ...]) -> None:
    assert Partition.weighted(units, weights).bounds == (0, *itertools.accumulate(counts))
    assert len(set(weights)) > 1 or Partition.even(units, len(weights)) == Partition.weighted(units, weights)


@st.composite
def attentions(draw: st.DrawFn) -> tuple[int, int, Partition]:
    kv, group = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    return kv * group, kv, draw(partitionings(kv * group))


@given(attentions(), st.integers(1, 4))
def test_head_map_and_kv_cache(case: tuple[int, int, Partition], dim: int) -> None:
    heads, kv, partition = case
    queries, keys = Segment("q", heads * dim, dim), Segment("k", kv * dim, dim, shared=True)
    cache = ParamSpec((2, (Segment("kv", kv, 1, shared=True),), dim), PLAIN, ("kv_cache",), "attention", 1)
    for rank in range(partition.ranks):
        read = [head // (heads // kv) for head in range(*partition.span(rank))]
        held = sorted(set(read))
        assert head_map(queries, keys, partition, rank) == tuple(held.index(head) for head in read)
        assert list(range(*keys.span(partition, rank))) == [head * dim + x for head in held for x in range(dim)]
        assert local_shape(cache, {"attention": partition}, rank) == (2, len(held), dim)
        assert local_bytes(cache, {"attention": partition}, rank) == 4 * len(held) * dim


def test_head_map_of_16_over_2() -> None:
    queries, keys = Segment("q+gate", 16 * 512, 512), Segment("k", 2 * 256, 256, shared=True)

    def maps(*weights: float) -> list[tuple[int, ...]]:
        partition = Partition.weighted(16, weights)
        return [head_map(queries, keys, partition, rank) for rank in range(partition.ranks)]

    assert maps(5, 3) == [(0,) * 8 + (1,) * 2, (0,) * 6], "rank 1 holds the second KV head only"
    assert maps(1, 1, 1) == [(0,) * 6, (0, 0, 1, 1, 1), (0,) * 5]
    assert maps(*[1] * 8) == [(0, 0)] * 8
    assert maps(1, 0) == [(0,) * 8 + (1,) * 8, ()]


# A cut inside a block, and packed codes.


def down(size: int, format: str, grain: int = 1) -> ParamSpec:
    return ParamSpec((256, (Segment("inter", size, grain),)), FORMATS[format], ("down_proj",), "mlp", 1)


def test_a_cut_inside_a_block_repeats_its_scale_on_both_sides() -> None:
    spec = down(512, "fp8 block")

    def scales(weights: Sequence[float]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        partition = {"mlp": Partition.weighted(32, weights)}
        return [local(spec, partition, rank)[1][1:] for rank in range(len(weights))]

    assert scales([1] * 4) == [((2, 1), (128, 128))] * 4
    assert scales([1] * 8) == [((2, 1), (128, 64))] * 8
    assert scales([5, 3]) == [((2, 5), (128, 64)), ((2, 3), (128, 64))], "320:192"
    assert scales([1] * 3) == [((2, 11), (128, 16)), ((2, 11), (128, 16)), ((2, 5), (128, 32))], "176:176:160"
    rows = slice(0, 2)
    steps = [c[1:] for c in copies(spec, {"mlp": Partition.weighted(32, (5, 3))}, 1) if c.stored is spec.format[1]]
    assert steps == [
        ((rows, slice(2, 3)), spec.format[1], (rows, slice(0, 1))),
        ((rows, slice(3, 4)), spec.format[1], (rows, slice(1, 3))),
    ]
    column = ParamSpec(((Segment("up", 512),), 256), FORMATS["fp8 block"], ("up_proj",), "mlp")
    assert local(column, {"mlp": Partition.even(8, 8)}, 1)[1][1:] == ((1, 2), (64, 128)), "rows 64 .. 128"


@pytest.mark.parametrize("size", [4304, 80])
@pytest.mark.parametrize("format", ["fp8 block", "nvfp4"])
def test_the_last_block_may_be_partial(size: int, format: str) -> None:
    column = ParamSpec(((Segment("fc1", size),), 144), FORMATS[format], ("fc1",), "mlp")
    for spec in (down(size, format), column, ParamSpec((80, 144), FORMATS[format], ("fc",))):
        files = checkpoint(spec)
        for ranks in (1, 2, 3, 9):
            check(spec, {"mlp": Partition.even(size // 16, ranks)}, files, logical(spec, files))
    part = local(down(4304, "fp8 block"), {"mlp": Partition.even(269, 1)}, 0)[1]
    assert (part.shape, part.block) == ((2, 34), (128, 128)), "no finer than it need be"


def test_finest_units() -> None:
    assert finest_units(down(512, "bf16")) == 512
    assert finest_units(down(512, "nvfp4")) == 256
    assert finest_units(down(512, "nvfp4"), align=16) == 32
    assert finest_units(down(480, "fp8 block", grain=10), align=16) == 6
    assert finest_units(down(4304, "bf16"), align=16) == 269
    specs = qwen("nvfp4")
    assert finest_units(specs["attention.qkv"], align=16) == 16, "KV heads are shared and set no limit"
    assert [finest_units(specs[f"delta.{name}"]) for name in ("qkv", "z", "ba", "conv", "A_log", "out")] == [16] * 6
    assert finest_units(specs["norm"]) == finest_units(ParamSpec((), FP32, ("k_scale",))) == 0


# Companions without an axis, and experts.


def test_scalars_follow_their_sources() -> None:
    one, tensor, nvfp4 = ParamSpec((), FP32, ("k_scale",)), qwen("fp8 tensor"), qwen("nvfp4", "each")
    assert list(copies(one, plan([1, 1]), 1)) == [Copy("k_scale", (), FP32[0], ())]
    assert local_shape(one, {}, 0) == ()
    assert local_bytes(one, {}, 0) == 4
    assert local(tensor["delta.qkv"], plan([1] * 3), 1)[1][1:] == ((1, 1), (0, 0)), "one source, whatever its segments"
    assert local(tensor["delta.out"], plan([1] * 3), 1)[1][1:] == ((1, 1), (0, 0))
    assert local(tensor["attention.qkv"], plan([1]), 0)[1][1:] == ((18, 1), (512, 0)), "as blocks that tell q, k and v"
    assert local(nvfp4["experts.gate_up"], plan([5, 3]), 1)[2][1:] == ((256, 2, 1), (1, 192, 0)), "gate's and up's"
    assert local(nvfp4["experts.down"], plan([5, 3]), 1)[2][1:] == ((256, 1, 1), (1, 0, 0))


def test_a_value_per_output_row_goes_with_its_row() -> None:
    for format in ("fp8 channel", "fp8 vector"):
        specs = qwen(format)
        assert local(specs["delta.z"], plan([5, 3]), 1)[1][1:] == ((6 * 256, 1), (1, 0))
        assert local(specs["delta.out"], plan([5, 3]), 1)[1][1:] == ((2048, 1), (1, 0))
        assert local(specs["experts.gate_up"], plan([5, 3]), 0)[1][1:] == ((256, 640, 1), (1, 1, 0))


def test_only_owned_experts_are_read() -> None:
    partitions = {"expert": Partition((0, 3, 3, 8)), "mlp": Partition.even(32, 3)}
    parallel, tensor = qwen("nvfp4", "each", experts=8, cut="expert"), qwen("nvfp4", "each", experts=8)
    for name in ("experts.gate_up", "experts.down"):
        read = [{int(c.name.split(".")[1]) for c in copies(parallel[name], partitions, rank)} for rank in range(3)]
        assert read == [{0, 1, 2}, set(), {3, 4, 5, 6, 7}]
        assert {int(c.name.split(".")[1]) for c in copies(tensor[name], partitions, 1)} == set(range(8))
    assert local_bytes(parallel["experts.down"], partitions, 1) == 0


# The geometry of 35B-A3B and of its vision tower.


def plan(weights: Sequence[float], experts: int = 256, vocab: int = 248320) -> dict[str, Partition]:
    units = {"attention": 16, "delta": 16, "mlp": 512 // 16, "expert": experts, "vocab": vocab // 16}
    return {group: Partition.weighted(count, weights) for group, count in units.items()}


def qwen(
    format: str, bank: str = "stacked", hidden: int = 2048, experts: int = 256, vocab: int = 248320, cut: str = "mlp"
) -> dict[str, ParamSpec]:
    """The weights of an attention layer and a GatedDeltaNet layer of 35B-A3B, of their experts and of both ends."""
    wide, key, value = FORMATS[format], Segment("k", 2048, 128), Segment("v", 4096, 256)
    q, k, v = Segment("q+gate", 8192, 512), Segment("k", 512, 256, shared=True), Segment("v", 512, 256, shared=True)
    gate_up, inter = (Segment("gate", 512), Segment("up", 512)), Segment("inter", 512)
    each = [f"experts.{{e}}.{name}_proj" for name in ("gate", "up", "down")]
    ups, downs = (each[:2], each[2:]) if bank == "each" else (["experts.gate_up_proj"], ["experts.down_proj"])
    bank_axis: Axis = (Segment("expert", experts),) if cut == "expert" else experts
    vocabulary = (Segment("vocab", vocab),)
    return {
        "attention.qkv": ParamSpec(((q, k, v), hidden), wide, ("q_proj", "k_proj", "v_proj"), "attention"),
        "attention.out": ParamSpec((hidden, (Segment("head", 4096, 256),)), wide, ("o_proj",), "attention", 1),
        "delta.qkv": ParamSpec(((Segment("q", 2048, 128), key, value), hidden), wide, ("in_proj_qkv",), "delta"),
        "delta.z": ParamSpec(((value,), hidden), wide, ("in_proj_z",), "delta"),
        "delta.ba": ParamSpec(((Segment("b", 32, 2), Segment("a", 32, 2)), hidden), BF16, ("b", "a"), "delta"),
        "delta.conv": ParamSpec(((Segment("q", 2048, 128), key, value), 1, 4), BF16, ("conv1d",), "delta"),
        "delta.A_log": ParamSpec(((Segment("v", 32, 2),),), FP32, ("A_log",), "delta"),
        "delta.norm": ParamSpec((128,), BF16, ("norm",)),
        "delta.out": ParamSpec((hidden, (value,)), wide, ("out_proj",), "delta", 1),
        "router": ParamSpec((experts, hidden), BF16, ("gate",)),
        "shared.gate_up": ParamSpec((gate_up, hidden), wide, ("gate_proj", "up_proj"), "mlp"),
        "shared.down": ParamSpec((hidden, (inter,)), wide, ("down_proj",), "mlp", 1),
        "experts.gate_up": ParamSpec((bank_axis, gate_up, hidden), wide, tuple(ups), cut, int(cut == "mlp")),
        "experts.down": ParamSpec((bank_axis, hidden, (inter,)), wide, tuple(downs), cut, 2 * (cut == "mlp")),
        "embed": ParamSpec((vocabulary, hidden), BF16, ("embed_tokens",), "vocab"),
        "head": ParamSpec((vocabulary, hidden), wide, ("lm_head",), "vocab"),
        "norm": ParamSpec((hidden,), BF16, ("norm",)),
    }


SPLITS = [*((1,) * ranks for ranks in range(1, 9)), (5, 3), (3, 3, 1, 1), (1, 0)]


@pytest.mark.parametrize("format", FORMATS)
def test_35b_a3b(format: str) -> None:
    for bank, cut in (("stacked", "mlp"), ("each", "mlp"), ("stacked", "expert"), ("each", "expert")):
        for name, spec in qwen(format, bank, hidden=32, experts=3, vocab=160, cut=cut).items():
            if name.startswith("experts") or (bank, cut) == ("stacked", "mlp"):
                files = checkpoint(spec)
                whole = logical(spec, files)
                for weights in SPLITS:
                    check(spec, plan(weights, experts=3, vocab=160), files, whole)


@pytest.mark.parametrize("format", ["bf16", "fp8 block", "nvfp4"])
def test_vision_tower(format: str) -> None:
    """16 heads of 72 (edges inside every block) and an intermediate of 4304 (33 blocks and 80 elements)."""
    wide, qkv, fc = FORMATS[format], tuple(Segment(name, 1152, 72) for name in "qkv"), (Segment("fc", 4304, 16),)
    specs = [
        ParamSpec((qkv, 144), wide, ("attn.qkv",), "vision.heads"),
        ParamSpec((qkv,), (Stored(".bias", "BF16"),), ("attn.qkv",), "vision.heads"),
        ParamSpec((144, (Segment("head", 1152, 72),)), wide, ("attn.proj",), "vision.heads", 1),
        ParamSpec((144,), (Stored(".bias", "BF16"),), ("attn.proj",)),
        ParamSpec((fc, 144), wide, ("mlp.fc1",), "vision.mlp"),
        ParamSpec((fc,), (Stored(".bias", "BF16"),), ("mlp.fc1",), "vision.mlp"),
        ParamSpec((144, fc), wide, ("mlp.fc2",), "vision.mlp", 1),
        ParamSpec((144,), (Stored(".bias", "BF16"),), ("mlp.fc2",)),
    ]
    for spec in specs:
        files = checkpoint(spec)
        whole = logical(spec, files)
        for ranks in (3, 8):
            partitions = {"vision.heads": Partition.even(16, ranks), "vision.mlp": Partition.even(269, ranks)}
            check(spec, partitions, files, whole)
    three = {"vision.heads": Partition.even(16, 3), "vision.mlp": Partition.even(269, 3)}
    assert [local_shape(specs[4], three, rank)[0] for rank in range(3)] == [1440, 1440, 1424]
    assert [local_shape(specs[0], three, rank)[0] for rank in range(3)] == [1296, 1080, 1080]


def test_table() -> None:
    def experts(format: str, weights: Sequence[float]) -> list[int]:
        """Bytes of all 40 layers' experts: of the whole, then of each rank."""
        rows = [row for row in table(qwen(format, "each"), plan(weights)) if row.name.startswith("experts")]
        ranks = zip(*(row.rank_bytes for row in rows), strict=True)
        return [40 * sum(row.full_bytes for row in rows), *(40 * sum(rank) for rank in ranks)]

    gib = 2**30
    assert experts("bf16", [1, 1]) == [60 * gib, 30 * gib, 30 * gib]
    assert experts("bf16", [5, 3]) == [60 * gib, 75 * gib // 2, 45 * gib // 2]
    assert experts("fp8 block", [1] * 4) == [10240 * 3_146_112] + [2560 * 3_146_112] * 4
    assert experts("nvfp4", [1])[0] == 10240 * (3 * 2048 * (256 + 32) + 3 * 4)
    specs = qwen("bf16")
    for name, full, ranks in table(specs, plan([5, 3])):
        assert full == np.prod(shape_of(specs[name])) * specs[name].format[0].bits // 8
        copied = {"attention.qkv": full + 2 * 256 * 2048 * 2}  # the second KV head, on both ranks
        assert sum(ranks) == (copied.get(name, full) if specs[name].group else 2 * full)


def test_cache_and_state_sizes() -> None:
    value, conv = (Segment("v", 32, 2),), (Segment("q", 2048, 128), Segment("k", 2048, 128), Segment("v", 4096, 256))
    specs = {
        "kv of a token": ParamSpec((2, (Segment("kv", 2, 1, shared=True),), 256), PLAIN, ("kv",), "attention", 1),
        "delta state": ParamSpec((value, 128, 128), FP32, ("state",), "delta"),
        "conv state": ParamSpec((conv, 3), PLAIN, ("conv",), "delta"),
    }
    assert table(specs, plan([1, 1])) == [
        ("kv of a token", 2048, (1024, 1024)),
        ("delta state", 2 << 20, (1 << 20, 1 << 20)),
        ("conv state", 48 << 10, (24 << 10, 24 << 10)),
    ]
    assert table(specs, plan([5, 3]))[0].rank_bytes == (2048, 1024)


# Errors: the tensor, the rank, the numbers and the way out.


def test_errors_say_what_and_what_to_do() -> None:
    heads, two = Segment("head", 4096, 256), {"g": Partition.even(2, 2)}
    cases = [
        (
            lambda: local(down(512, "nvfp4"), {"mlp": Partition((0, 101, 512))}, 1),
            (
                "down_proj.weight: rank 1 would own [101, 512) of axis 1 at 0, where 2 elements are packed together; "
                "count the group in finest_units or a divisor"
            ),
        ),
        (
            lambda: local_shape(ParamSpec((8, (heads,)), BF16, ("o_proj",), "g", 1), {"g": Partition.even(10, 3)}, 1),
            (
                "o_proj: rank 1 would own [8192/5, 14336/5) of 'head', 4096 in grains of 256; "
                "count the group in finest_units or a divisor"
            ),
        ),
        (
            lambda: ParamSpec((8, (Segment("k", 512, 256, shared=True),)), BF16, ("o_proj",), "g", 1),
            "o_proj: shared 'k' would be summed twice; do not share it",
        ),
        (
            lambda: finest_units(down(4304, "nvfp4"), align=32),
            "down_proj: 'inter' of 4304 has no units of 32; lower align=32",
        ),
        (
            lambda: ParamSpec((8, (heads,)), BF16, ("o_proj",), "g", -1),
            "o_proj: no axis -1 among 2 to cut; count from 0",
        ),
        (
            lambda: ParamSpec((4, 8, 8), (CODES, Stored(".scale", "F32", (None,) * 3)), ("{e}.up",)),
            "{e}.up.scale: block (None, None, None) is for more axes; shorten it",
        ),
        (lambda: local(down(8, "bf16"), two, 0), "down_proj: no partition for 'mlp' among ['g']; add one"),
        (
            lambda: ParamSpec(((heads,), 8), BF16, ("q", "k"), "g"),
            "('q', 'k'): not one axis has that many segments; name one source or one per segment",
        ),
        (
            lambda: head_map(Segment("q", 16), Segment("k", 3), Partition.even(16, 2), 0),
            "q: 16 heads over 3 of 'k' are uneven; correct the heads",
        ),
        (lambda: Partition.even(4, 2).span(-1), "rank -1: partition (0, 2, 4) has only 2 ranks; make one for yours"),
        (
            lambda: Partition((0, 3, 2)),
            "partition (0, 3, 2): give bounds that start at 0, never fall and end at 1 or more",
        ),
        (
            lambda: Partition.weighted(4, (1, -1)),
            "weights (1, -1): give one per rank, finite, none negative, not all zero",
        ),
        (
            lambda: table({}, {"a": Partition.even(2, 2), "b": Partition.even(3, 3)}),
            "plan: the ranks of groups are {'a': 2, 'b': 3}; give all groups the same number of ranks",
        ),
    ]
    for call, text in cases:
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            call()
    for weights in ([], [0, 0], [float("nan")], [float("inf"), 1]):
        with pytest.raises(ValueError, match="give one per rank"):
            Partition.weighted(4, weights)
    for bounds in ((), (0,), (1, 2), (0, 0)):
        with pytest.raises(ValueError, match="give bounds"):
            Partition(bounds)
