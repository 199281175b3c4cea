"""Which split of a model over which devices is best: a search over whole units of every group, by predicted time.

Exact enough to be checked against brute force on small cases (tests/unit/test_balance.py), and deterministic: it is
made once, and what it finds travels to all ranks as plain weights per group.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Literal

from shardwise.parallel.balance import ALIGNMENTS, HEAD_GROUPS, group_units, partitions, split
from shardwise.parallel.cost import Anatomy, Forecast, Load, shared
from shardwise.parallel.devices import Device, Machine
from shardwise.shard import ParamSpec, Partition, Partitions

Objective = Literal["speed", "context", "balanced"]
RESERVE_BYTES = 1 << 30  # of a GPU: its context, graphs, and the activations of the largest step
FEWER_GAIN = 1.1  # predicted speed-up from which on some devices are left out
UNITS_A_RANK = 8  # a group is counted in so many units a rank if it can, in steps of FINEST_ALIGN or more
FINEST_ALIGN = 16
MAX_SUBSETS = 5  # devices, of which all subsets are tried; of more, only the fastest and the largest
ROUNDS = 40
CLIMBERS = 2  # plain splits from which the search sets out


@dataclass(frozen=True)
class Needs:
    """What a split must hold: `rows` rows of state and `need_tokens` of KV; `wanted_tokens` are of use, no more.

    utilization: of each device's memory that may be used. reserve_bytes: of that, not for weights and caches.
    """

    rows: int
    need_tokens: int
    wanted_tokens: int
    page_tokens: int
    utilization: float = 0.9
    reserve_bytes: int = RESERVE_BYTES


@dataclass(frozen=True)
class Problem:
    """A model, its load and needs, and what is wished for. specs: of weights and caches, as `partitions` takes them."""

    specs: Mapping[str, ParamSpec]
    anatomy: Anatomy
    load: Load
    needs: Needs
    objective: Objective = "balanced"

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(sorted({spec.group for spec in self.specs.values() if spec.group}))


@dataclass(frozen=True)
class Candidate:
    """One split, judged. kv_tokens: that all ranks afford; short_bytes: that ranks lack for what is needed."""

    name: str
    places: tuple[int, ...]  # of its devices among the machine's
    partitions: Partitions
    forecast: Forecast
    kv_tokens: int
    kv_rank: int  # which affords the fewest
    short_bytes: int

    @property
    def ranks(self) -> int:
        return len(self.places)

    def ratios(self) -> dict[str, tuple[float, ...]]:
        """Units of each rank by group: what `partitions` makes this very split of."""
        return {
            group: tuple(float(stop - start) for start, stop in pairwise(partition.bounds))
            for group, partition in sorted(self.partitions.items())
        }

    def written(self) -> str:
        """As flags."""
        return " ".join(f"--ratio {group}={','.join(f'{w:g}' for w in each)}" for group, each in self.ratios().items())


def budget_bytes(machine: Machine, rank: int, needs: Needs) -> int:
    """What weights and caches of `rank` may take."""
    device = shared(machine, rank)
    return int(device.memory_bytes * needs.utilization) - needs.reserve_bytes - device.held_bytes


def judge(problem: Problem, machine: Machine, places: Sequence[int], cut: Partitions, name: str) -> Candidate:
    """`cut` on the devices at `places`."""
    needs, used = problem.needs, machine.only(places)
    least, least_rank, short = 1 << 60, 0, 0
    for rank in range(len(places)):
        total = problem.anatomy.total(cut, rank)
        left = budget_bytes(used, rank, needs) - total.weights_bytes - (needs.rows + 1) * total.row_bytes
        need_pages = -(-needs.need_tokens // needs.page_tokens) + 1
        short += max(0, need_pages * total.page_bytes - left)
        pages = max(left, 0) // total.page_bytes - 1 if total.page_bytes else 1 << 40
        if pages * needs.page_tokens < least:
            least, least_rank = max(pages, 0) * needs.page_tokens, rank
    forecast = problem.anatomy.forecast(cut, used, problem.load)
    return Candidate(name, tuple(places), cut, forecast, least, least_rank, short)


def score(problem: Problem, candidate: Candidate) -> tuple[float, ...]:
    """Larger is better: first that it fits, then the objective."""
    share = min(candidate.kv_tokens, problem.needs.wanted_tokens) / max(problem.needs.wanted_tokens, 1)
    speed = candidate.forecast.tokens_per_s
    fits = -float(candidate.short_bytes)
    if problem.objective == "speed":
        return fits, speed
    if problem.objective == "context":
        return fits, share, speed
    return fits, share * speed


def search_units(specs: Mapping[str, ParamSpec], group: str, members: int) -> int:
    """In how many units the search counts `group`: coarse ones if they are enough for all ranks."""
    if group in HEAD_GROUPS:
        return group_units(specs, group, 1)
    counts = [(align, group_units(specs, group, align)) for align in ALIGNMENTS]
    for align, units in counts:
        if units and (units >= UNITS_A_RANK * members or (align <= FINEST_ALIGN and units >= members)):
            return units
    return max(units for _, units in counts)


def starts(problem: Problem, machine: Machine, fixed: Partitions) -> Iterator[tuple[str, Partitions]]:
    """Splits that a person would think of, by name."""
    members = len(machine.devices)
    devices = [shared(machine, rank) for rank in range(members)]
    budgets = [max(budget_bytes(machine, rank, problem.needs), 1) for rank in range(members)]
    speeds = [device.read_bytes_per_s for device in devices]
    named = {
        "even": [1.0] * members,
        "by bandwidth": speeds,
        "by memory": [float(budget) for budget in budgets],
        "in between": [(speed * budget) ** 0.5 for speed, budget in zip(speeds, budgets, strict=True)],
    }
    if not machine.known:
        named = {name: named[name] for name in ("even", "by memory")}
    for name, weights in named.items():
        made = {
            group: Partition.weighted(search_units(problem.specs, group, members), weights) for group in problem.groups
        }
        yield name, {**made, **fixed}


def moved(partition: Partition, giver: int, taker: int, units: int) -> Partition:
    """`partition` with `units` units from one rank to another."""
    counts = [stop - start for start, stop in pairwise(partition.bounds)]
    counts[giver] -= units
    counts[taker] += units
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return Partition(tuple(bounds))


def neighbours(partition: Partition, givers: Sequence[int]) -> Iterator[Partition]:
    """`partition` after one of `givers` gave 1, 2, 4, ... of its units to another rank, and not its last."""
    for giver in givers:
        start, stop = partition.span(giver)
        for taker in range(partition.ranks):
            step = 1
            while taker != giver and step < stop - start:
                yield moved(partition, giver, taker, step)
                step *= 2


def critical(problem: Problem, candidate: Candidate, group: str) -> list[int]:
    """The ranks that can help by giving units of `group` away: all others wait for them, or have memory to spare."""
    slow = {candidate.forecast.slowest[stage.name] for stage in problem.anatomy.stages if group in stage.groups}
    return sorted(slow | {candidate.kv_rank}) if not candidate.short_bytes else list(range(candidate.ranks))


def climb(problem: Problem, machine: Machine, start: Candidate, fixed: Partitions) -> Candidate:
    """The best split that single moves lead to from `start`."""
    best = start
    for _ in range(ROUNDS):
        before = best
        for group in sorted(set(best.partitions) - set(fixed)):
            at = best
            for partition in neighbours(at.partitions[group], critical(problem, at, group)):
                cut = {**at.partitions, group: partition}
                found = judge(problem, machine, start.places, cut, start.name)
                if score(problem, found) > score(problem, best):
                    best = found
        if best is before:
            break
    return best


def subsets(machine: Machine, all_of_them: bool) -> Iterator[tuple[int, ...]]:
    """The sets of devices worth a look, all of them first; of those that are alike, the first."""
    places = tuple(range(len(machine.devices)))
    yield places
    if all_of_them or machine.doubled:
        return
    facts = [replace(device, index=None, uuid="") for device in machine.devices]
    if len(places) <= MAX_SUBSETS:
        sets = [each for count in range(len(places) - 1, 0, -1) for each in combinations(places, count)]
    else:
        fast = sorted(places, key=lambda place: -facts[place].read_bytes_per_s)
        large = sorted(places, key=lambda place: -facts[place].memory_bytes)
        sets = [tuple(sorted(order[:count])) for count in range(len(places) - 1, 0, -1) for order in (fast, large)]
    seen = list[list[Device]]()
    for each in sets:
        if (kind := [facts[place] for place in each]) not in seen:
            seen.append(kind)
            yield each


@dataclass(frozen=True)
class Choice:
    """The best split, the best one that uses every device, and all that were looked at, best first."""

    best: Candidate
    full: Candidate
    candidates: tuple[Candidate, ...]


def choose(
    problem: Problem,
    machine: Machine,
    *,
    ratio: Sequence[float] = (),
    group_ratios: Mapping[str, Sequence[float]] | None = None,
    all_of_them: bool = False,
) -> Choice:
    """The split of `problem` over `machine`: as `ratio` says, or else as is best for the groups without a ratio.

    all_of_them: no device may be left out. Raises ConfigError as `partitions` does.
    """
    members, given = len(machine.devices), dict(group_ratios or {})
    every = tuple(range(members))
    if ratio:
        cut = partitions(problem.specs, members, ratio, given)
        asked = judge(problem, machine, every, cut, "as asked")
        return Choice(asked, asked, (asked,))
    checked = partitions(problem.specs, members, (), given) if given else {}  # raises for a wrong one
    fixed = {group: checked[group] for group in given}
    best: dict[tuple[int, ...], Candidate] = {}
    seen = list[Candidate]()
    for places in subsets(machine, all_of_them or bool(given)):
        found = _best_on(problem, machine, places, fixed)
        seen += found
        best[places] = max(found, key=lambda one: score(problem, one))
    full = best[every]
    chosen = max(best.values(), key=lambda one: score(problem, one))
    if (
        chosen is not full
        and not full.short_bytes
        and score(problem, chosen)[-1] < FEWER_GAIN * score(problem, full)[-1]
    ):
        chosen = full
    return Choice(chosen, full, tuple(sorted(seen, key=lambda one: score(problem, one), reverse=True)))


def _best_on(problem: Problem, machine: Machine, places: tuple[int, ...], fixed: Partitions) -> list[Candidate]:
    """Candidates on the devices at `places`: the plain ones, and the best that the search finds."""
    used = machine.only(places)
    if len(places) == 1 or (used.uniform and not fixed):
        cut = partitions(problem.specs, len(places))
        return [judge(problem, machine, places, cut, "even" if len(places) > 1 else "one rank")]
    named = dict[str, Candidate]()
    for name, cut in starts(problem, used, fixed):
        named[name] = judge(problem, machine, places, cut, name)
    tops = sorted(named.values(), key=lambda one: score(problem, one), reverse=True)[:CLIMBERS]
    found = [climb(problem, machine, one, fixed) for one in tops]
    top = max(found, key=lambda one: score(problem, one))
    # What travels to the ranks is units by group; make sure that it is this split which they make of it.
    cut = {group: split(problem.specs, group, weights) for group, weights in top.ratios().items()}
    return [*named.values(), judge(problem, machine, places, cut, "searched")]
