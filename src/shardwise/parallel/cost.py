"""How long a decode step takes, from bytes: the model that docs/balance.md explains.

A step is a row of stages, each ended by a collective, so its time is a sum over stages of the slowest rank's, plus the
collectives'. A rank's stage costs its kernels' fixed time and the larger of bytes read and arithmetic. All bytes and
elements come from the shard specs of what the rank holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from operator import add
from typing import NamedTuple

from shardwise.parallel.devices import HOST_LINK, Device, Link, Machine
from shardwise.shard import ParamSpec, Partition, Partitions, local_bytes, local_shape

LATENCY_A_MEMBER = 1 / 6  # each rank beyond two adds so much of a small all-reduce
ACTIVATION_BYTES = 4  # sums over ranks and logits are fp32
# How much longer than a plain one a byte of codes takes, since codes have to become numbers: fitted to whole steps of
# 35B-A3B on one H200 (benchmarks/forecast.py). Cards with less bandwidth for their arithmetic should lose less.
ONE_TOKEN, TOKENS = (1.0, 1.2, 2.4), (1.0, 1.25, 1.7)


@dataclass(frozen=True)
class Load:
    """What is computed at once: requests, and the tokens that each has behind it. new_tokens: of each; one decodes."""

    requests: float = 1
    context_tokens: float = 4096
    new_tokens: float = 1

    @property
    def tokens(self) -> float:
        return self.requests * self.new_tokens


@dataclass(frozen=True)
class Stage:
    """What runs between two collectives, `count` times a step.

    held: its weights; read: those of them that a step reads whole, whoever holds them; sparse: experts, of which a
    token reads `chosen` of `experts`. page, row: of the caches, a page being `page_tokens` tokens. kernels: launched
    on a rank that has a share. summed, gathered: elements a token of the all-reduce, or of the gather, that ends it.
    """

    name: str
    count: int = 1
    held: tuple[ParamSpec, ...] = ()
    read: tuple[ParamSpec, ...] = ()
    sparse: tuple[ParamSpec, ...] = ()
    experts: int = 0
    chosen: int = 0
    page: tuple[ParamSpec, ...] = ()
    page_tokens: int = 1
    row: tuple[ParamSpec, ...] = ()
    kernels: int = 1
    summed: int = 0
    gathered: int = 0

    @property
    def groups(self) -> tuple[str, ...]:
        every = (*self.held, *self.read, *self.sparse, *self.page, *self.row)
        return tuple(sorted({spec.group for spec in every if spec.group}))


class ByCode(NamedTuple):
    """Bytes of weights by how they are held: plain, in e4m3, in e2m1."""

    plain: int = 0
    fp8: int = 0
    fp4: int = 0

    def slowed(self, tokens: float) -> float:
        """As many bytes of plain weights as take the time of these."""
        return sum(size * slower for size, slower in zip(self, ONE_TOKEN if tokens <= 1 else TOKENS, strict=True))


class Held(NamedTuple):
    """Of one stage on one rank: bytes of weights, of those read whole and of experts, of a page and of a row; elements
    of the weights that are read whole and of experts."""

    weights_bytes: int
    read: ByCode
    sparse: ByCode
    page_bytes: int
    row_bytes: int
    read_elements: int
    sparse_elements: int


class Total(NamedTuple):
    """What a rank holds in all."""

    weights_bytes: int
    page_bytes: int
    row_bytes: int


@dataclass(frozen=True)
class Forecast:
    """Seconds of a decode step. by_stage: of each stage's slowest rank; busy: of each rank without waiting."""

    step_s: float
    collectives_s: float
    by_stage: Mapping[str, float]
    slowest: Mapping[str, int]
    busy_s: tuple[float, ...]
    bytes_s: float  # the part of step_s that is reading, on the slowest ranks
    requests: float

    @property
    def tokens_per_s(self) -> float:
        return self.requests / self.step_s

    @property
    def limit(self) -> str:
        """What most of the step goes into."""
        kernels_s = self.step_s - self.collectives_s - self.bytes_s
        worst = max(range(len(self.busy_s)), key=lambda rank: self.busy_s[rank])
        named = {
            f"reading on rank {worst}": self.bytes_s,
            "collectives": self.collectives_s,
            "fixed cost of kernels": kernels_s,
        }
        return max(named, key=lambda what: named[what])


@dataclass(frozen=True)
class Anatomy:
    """The stages of a model's step. It remembers what it has measured by share, since a search asks again and again."""

    stages: tuple[Stage, ...]
    _known: dict[tuple[object, ...], Held] = field(default_factory=dict, repr=False, compare=False)

    def held(self, n: int, partitions: Partitions, rank: int) -> Held:
        """What `rank` holds of one of stage `n`."""
        stage = self.stages[n]
        spans = tuple((group, partitions[group].units, *partitions[group].span(rank)) for group in stage.groups)
        if (n, spans) not in self._known:
            self._known[n, spans] = _held(stage, partitions, rank)
        return self._known[n, spans]

    def total(self, partitions: Partitions, rank: int) -> Total:
        """All that `rank` holds."""
        each = [(stage.count, self.held(n, partitions, rank)) for n, stage in enumerate(self.stages)]
        return Total(
            sum(count * held.weights_bytes for count, held in each),
            sum(count * held.page_bytes for count, held in each),
            sum(count * held.row_bytes for count, held in each),
        )

    def moved_bytes(self, partitions: Partitions, rank: int, load: "Load") -> float:
        """All that `rank` reads and writes in a step of `load`."""
        held = (self.held(n, partitions, rank) for n in range(len(self.stages)))
        return sum(stage.count * moved_bytes(stage, one, load) for stage, one in zip(self.stages, held, strict=True))

    def forecast(self, partitions: Partitions, machine: Machine, load: Load) -> Forecast:
        """Time of a step of `load` on the first devices of `machine`, one a rank."""
        members = next(iter(partitions.values())).ranks
        busy = [0.0] * members
        by_stage, slowest = dict[str, float](), dict[str, int]()
        collectives_s = bytes_s = 0.0
        link = HOST_LINK if machine.doubled else machine.link
        for n, stage in enumerate(self.stages):
            times = list[tuple[float, float]]()
            for rank in range(members):
                device = shared(machine, rank)
                times.append(stage_seconds(stage, self.held(n, partitions, rank), device, load))
                busy[rank] += stage.count * times[-1][0]
            worst = max(range(members), key=lambda rank: times[rank][0])
            by_stage[stage.name] = by_stage.get(stage.name, 0.0) + stage.count * times[worst][0]
            slowest[stage.name] = worst
            bytes_s += stage.count * times[worst][1]
            collectives_s += stage.count * collective_seconds(stage, members, link, load.tokens)
        return Forecast(
            sum(by_stage.values()) + collectives_s,
            collectives_s,
            by_stage,
            slowest,
            tuple(busy),
            bytes_s,
            load.requests,
        )


def shared(machine: Machine, rank: int) -> Device:
    """The device of `rank` as it finds it: if several ranks are on one, each has its part of the speed."""
    device = machine.devices[rank]
    sharers = sum(device.index is not None and other.index == device.index for other in machine.devices) or 1
    if sharers == 1:
        return device
    return Device(
        device.name,
        device.memory_bytes // sharers,
        device.read_bytes_per_s / sharers,
        device.flops_per_s / sharers,
        device.kernel_s * sharers,
        device.held_bytes // sharers,
        device.index,
        device.uuid,
    )


def _held(stage: Stage, partitions: Partitions, rank: int) -> Held:
    def size(specs: Sequence[ParamSpec]) -> int:
        return sum(local_bytes(spec, partitions, rank) for spec in specs)

    def elements(specs: Sequence[ParamSpec]) -> int:
        return reduce(add, (prod(local_shape(spec, partitions, rank)) for spec in specs), 0)

    def by_code(specs: Sequence[ParamSpec]) -> ByCode:
        return ByCode(*(size([spec for spec in specs if code(spec) == n]) for n in range(3)))

    return Held(
        size(stage.held), by_code(stage.read), by_code(stage.sparse), size(stage.page), size(stage.row),
        elements(stage.read), elements(stage.sparse),
    )  # fmt: skip


def code(spec: ParamSpec) -> int:
    """The place of a weight's bytes in ByCode."""
    if any(stored.packed for stored in spec.format):
        return 2
    return int(any(stored.role == "value" and stored.dtype == "F8_E4M3" for stored in spec.format))


def distinct_share(experts: int, chosen: int, tokens: float) -> float:
    """The share of experts that at least one of `tokens` tokens chooses, if all are equally likely."""
    return 1 - (1 - chosen / experts) ** tokens if experts else 0.0


def moved_bytes(stage: Stage, held: Held, load: Load) -> float:
    """What a rank reads and writes in one of `stage`: weights, experts that somebody chooses, keys, values, states."""
    moved = sum(held.read) + distinct_share(stage.experts, stage.chosen, load.tokens) * sum(held.sparse)
    return moved + cached_bytes(stage, held, load)


def cached_bytes(stage: Stage, held: Held, load: Load) -> float:
    """Of `moved_bytes` those of keys, values and states."""
    cached = held.page_bytes / stage.page_tokens * load.context_tokens * load.requests
    return cached + 2 * held.row_bytes * load.requests  # read and written


def stage_seconds(stage: Stage, held: Held, device: Device, load: Load) -> tuple[float, float]:
    """Seconds of one of `stage` on a rank, and the part of them that is not the kernels' fixed cost."""
    moved = held.read.slowed(load.tokens) + cached_bytes(stage, held, load)
    moved += distinct_share(stage.experts, stage.chosen, load.tokens) * held.sparse.slowed(load.tokens)
    work = held.read_elements + (held.sparse_elements * stage.chosen / stage.experts if stage.experts else 0)
    streaming = max(moved / device.read_bytes_per_s, 2 * work * load.tokens / device.flops_per_s)
    idle = not moved and bool(stage.read or stage.sparse)
    return streaming + (0 if idle else stage.kernels * device.kernel_s), streaming


def collective_seconds(stage: Stage, members: int, link: Link, tokens: float) -> float:
    """Seconds of what ends `stage` over `members` ranks: one of them says nothing."""
    if members < 2 or not (stage.summed or stage.gathered):
        return 0.0
    latency = link.latency_s * (1 + (members - 2) * LATENCY_A_MEMBER)
    sent = (2 * stage.summed + stage.gathered) * tokens * ACTIVATION_BYTES
    return latency + sent * (members - 1) / members / link.bytes_per_s


def alone(partitions: Partitions) -> Partitions:
    """The same groups, all on one rank."""
    return {group: Partition((0, partition.units)) for group, partition in partitions.items()}
