"""Which GPUs, how many ranks, and how much of every group each gets: decided once, before any rank starts.

The result is a ServeConfig that says it outright (`gpu`, `ranks`, `group_ratios`), so that all ranks cut alike.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from shardwise.cache.budget import GIB, LEAST_SEQS
from shardwise.config import ConfigError, ServeConfig
from shardwise.engine.build import Blueprint, blueprint
from shardwise.engine.experts import sizes_of
from shardwise.engine.place import device_kind
from shardwise.models.stages import stages
from shardwise.parallel import probe
from shardwise.parallel.choice import Candidate, Choice, Needs, Problem, choose, judge
from shardwise.parallel.cost import Load, alone
from shardwise.parallel.devices import Device, Machine, load_profile, parse_gpu_spec, refuse_busy, select

logger = logging.getLogger(__name__)

LEAST_TOKENS = 8192  # of context that a split should hold, if the user names no length
MOST_GPUS = 16


@dataclass(frozen=True)
class Hardware:
    """How this machine's GPUs are asked: all of them, and some of them measured."""

    listed: Callable[[], Sequence[Device]] = lambda: probe.ask().devices
    measured: Callable[[Sequence[Device]], Machine] = probe.measured


@dataclass(frozen=True)
class Decision:
    """What was chosen of what, and the config that says so."""

    serve: ServeConfig
    made: Blueprint
    machine: Machine
    problem: Problem
    choice: Choice
    asked: ServeConfig  # what was to be decided

    @property
    def used(self) -> Machine:
        """The devices of the chosen ranks."""
        return self.machine.only(self.choice.best.places)


def machine_of(serve: ServeConfig, kind: str, hardware: Hardware) -> Machine | None:
    """The devices of the ranks, with their speeds; None if they are not known or make no difference.

    Raises ConfigError for `gpu` on a CPU, for a GPU that is not there or busy, and for numbers that do not agree.
    """
    given = load_profile(Path(serve.device_profile)) if serve.device_profile else None
    given = parse_gpu_spec(serve.gpu_spec) if serve.gpu_spec else given
    if given and len(given.devices) == 1:
        given = replace(given, devices=given.devices * max(serve.ranks, len(serve.gpu), 1))
    if serve.gpu and kind == "cpu" and not given:
        raise ConfigError(
            f"--gpu {','.join(serve.gpu)}: ranks run on the CPU here (--device {serve.device}, and torch finds no GPU "
            "or was told to leave it); leave --gpu out, or see what GPUs would do with shardwise plan --gpu-spec"
        )
    count = len(given.devices) if given else len(serve.gpu) or serve.ranks
    for flag, number in (("--tp", serve.ranks), ("--gpu", len(serve.gpu))):
        if number and number != count:
            raise ConfigError(f"{flag} names {number} and there are facts of {count} devices; give one for each rank")
    if kind == "cpu" or (not serve.gpu and count == 1):
        return given
    if given and not serve.gpu:
        return replace(given, devices=tuple(replace(one, index=n) for n, one in enumerate(given.devices)))
    there = hardware.listed()
    if not serve.gpu and len(there) < count:
        way_out = f"use --tp {len(there)} or less, or --device cpu" if there else "use --device cpu, or plan --gpu-spec"
        raise ConfigError(f"--device cuda: {count} ranks, and this machine has {len(there) or 'no'} GPUs; {way_out}")
    chosen = select(serve.gpu or [str(index) for index in range(count)], there)
    refuse_busy(chosen)
    if given:
        pairs = zip(given.devices, chosen, strict=True)
        return replace(
            given,
            devices=tuple(
                replace(one, index=there.index, uuid=there.uuid, held_bytes=there.held_bytes) for one, there in pairs
            ),
        )
    machine = Machine(chosen)
    if bool(serve.ratio) or (machine.uniform and serve.ranks > 0) or count == 1:
        return machine
    machine = hardware.measured(chosen)
    return machine.over_peers() if serve.comm in ("auto", "p2p") else machine


def problem_of(serve: ServeConfig, made: Blueprint, requests: int = 1, exact: bool = False) -> Problem:
    """What is to be split, for `requests` requests decoded at once.

    exact: the devices' memory is all for weights and caches.
    """
    caches, longest = made.caches, made.model.max_position_embeddings
    wanted = serve.kv_tokens or requests * (serve.max_model_len or longest)
    needs = Needs(
        rows=serve.max_num_seqs or max(requests, LEAST_SEQS),
        need_tokens=max(serve.max_model_len, serve.kv_tokens) or min(LEAST_TOKENS, longest),
        wanted_tokens=wanted,
        page_tokens=serve.page_tokens,
        utilization=serve.gpu_memory_utilization,
    )
    if exact:
        needs = replace(needs, utilization=1.0, reserve_bytes=0)
    slotted = serve.experts in ("offload", "hybrid") and made.model.experts > 0
    if slotted:  # counted whole, as one rank would need it
        sizes = sizes_of(made.model, made.specs, made.partitions, 0)
        least = sizes.device_bytes(made.model.experts_per_token)
        needs = replace(needs, reserve_bytes=needs.reserve_bytes + least)
    anatomy = stages(made.model, made.specs, caches.page, caches.row, serve.page_tokens, not slotted)
    return Problem({**made.specs, **caches.page, **caches.row}, anatomy, Load(requests), needs, serve.objective)


def decide(
    serve: ServeConfig, hardware: Hardware | None = None, planned_for: str = ""
) -> tuple[ServeConfig, Decision | None]:
    """`serve` with its GPUs, ranks and ratios, and how they came about; no decision where there is nothing to choose.

    planned_for: a kind of device that need not be here. Raises ConfigError for what cannot be, with the nearest split
    that would fit.
    """
    kind = planned_for or device_kind(serve)
    machine = machine_of(serve, kind, hardware or Hardware())
    if machine is None:
        return serve if serve.ranks else msgspec.structs.replace(serve, ranks=1), None
    gpus = tuple(str(device.index) for device in machine.devices if device.index is not None)
    count = len(machine.devices)
    if not machine.known:
        return msgspec.structs.replace(serve, ranks=count, gpu=gpus), None
    decision = slotted_if_short(choose_for(serve, machine, kind))
    if fault := shortage(decision):
        raise ConfigError(fault)
    return decision.serve, decision


def slotted_if_short(decision: Decision) -> Decision:
    """`decision`, or if that does not fit and where experts are is ours to choose, one with experts in host memory."""
    serve, kind = decision.serve, decision.made.device_type
    if serve.experts != "auto" or not decision.made.model.experts or kind == "cpu" or not shortage(decision):
        return decision
    load, exact = decision.problem.load, not decision.problem.needs.reserve_bytes
    asked = msgspec.structs.replace(decision.asked, experts="offload")
    other = choose_for(asked, decision.machine, kind, int(load.requests), exact)
    return decision if shortage(other) else other


def choose_for(serve: ServeConfig, machine: Machine, kind: str, requests: int = 1, exact: bool = False) -> Decision:
    """The split of `serve.model` over `machine`, even if it does not fit."""
    made = blueprint(msgspec.structs.replace(serve, ranks=1, ratio=(), group_ratios={}), kind)
    problem = problem_of(serve, made, requests, exact)
    choice = choose(problem, machine, ratio=serve.ratio, group_ratios=serve.group_ratios, all_of_them=serve.ranks > 0)
    return decided(serve, made, machine, problem, choice)


def decided(serve: ServeConfig, made: Blueprint, machine: Machine, problem: Problem, choice: Choice) -> Decision:
    """`choice` written into `serve`."""
    best = choice.best
    gpus = tuple(str(machine.devices[place].index) for place in best.places if machine.devices[place].index is not None)
    ratios = best.ratios() if best.ranks > 1 else {}
    made = replace(made, partitions=best.partitions)
    found = msgspec.structs.replace(
        serve, ranks=best.ranks, gpu=gpus, ratio=(), group_ratios=ratios, gpu_spec="", device_profile=""
    )
    return Decision(found, made, machine, problem, choice, serve)


def shortage(decision: Decision) -> str | None:
    """Why the chosen split cannot be run at all, with the nearest that can; None if it can."""
    problem, machine, best = decision.problem, decision.machine, decision.choice.best
    least = max(decision.serve.max_model_len, decision.serve.page_tokens)
    bare = replace(problem, needs=replace(problem.needs, rows=1, need_tokens=least, utilization=1.0, reserve_bytes=0))
    if not judge(bare, machine, best.places, best.partitions, "").short_bytes:
        return None
    whole = problem.anatomy.total(alone(best.partitions), 0).weights_bytes
    there = " + ".join(f"{device.memory_bytes / GIB:.0f}" for device in machine.devices)
    what = f"{decision.serve.model}: {whole / GIB:.1f} GiB of weights"
    what += f" and {least} tokens of KV cache do not fit into {there} GiB as split {best.written() or 'on one rank'}"
    return f"{what}; {nearest(decision, bare, least)}"


def nearest(decision: Decision, bare: Problem, least: int) -> str:
    """What would fit, nearest to what was asked."""
    machine = decision.machine
    other = choose(replace(bare, objective="context"), machine, all_of_them=True).best
    if not other.short_bytes:
        return f"the nearest split that fits is {other.written()}"
    shorter = replace(bare, needs=replace(bare.needs, need_tokens=bare.needs.page_tokens))
    tokens = choose(replace(shorter, objective="context"), machine, all_of_them=True).best
    if not tokens.short_bytes and tokens.kv_tokens < least:
        return f"the nearest that fits is --max-model-len {tokens.kv_tokens}"
    largest = max(machine.devices, key=lambda device: device.memory_bytes)
    for count in range(len(machine.devices) + 1, MOST_GPUS + 1):
        more = Machine((replace(largest, index=None, held_bytes=0),) * count)
        try:
            found = choose(bare, more, all_of_them=True).best
        except ConfigError:
            break
        if not found.short_bytes:
            return (
                f"the nearest that fits is an even split over {count} devices of {largest.memory_bytes / GIB:.0f} GiB"
            )
    return "use a checkpoint of fewer bits a weight, or larger devices"


def split_text(candidate: Candidate) -> str:
    """Shares in per cent by group, a rank each."""
    shares = (
        f"{group} {':'.join(f'{100 * units / sum(each):.0f}' for units in each)}"
        for group, each in candidate.ratios().items()
    )
    return ", ".join(shares)


def reasons(decision: Decision) -> list[str]:
    """The decision in lines for a log: the devices, the split, what it is predicted to do, what was left out."""
    machine, choice, load = decision.machine, decision.choice, decision.problem.load
    best, lines = choice.best, list[str]()
    for place, device in enumerate(machine.devices):
        rank = f"rank {best.places.index(place)}" if place in best.places else "not used"
        lines.append(
            f"{rank}: {device.name}, {device.memory_bytes / GIB:.1f} GiB, reads "
            f"{device.read_bytes_per_s / 1e9:.3g} GB/s{' (measured)' if machine.measured else ''}"
        )
    even = next((one for one in choice.candidates if one.name == "even" and one.ranks == len(machine.devices)), None)
    split = f"split in per cent: {split_text(best)}" if best.ranks > 1 else "all on one rank"
    lines.append(
        f"{split}; predicted {best.forecast.tokens_per_s:.0f} tokens/s for {load.requests} request(s), limited by "
        f"{best.forecast.limit}, and {best.kv_tokens} tokens of KV cache, limited by rank {best.kv_rank}"
    )
    if even is not None and even is not best:
        short = f", but lacks {even.short_bytes / GIB:.1f} GiB" if even.short_bytes else ""
        lines.append(f"an even split: {even.forecast.tokens_per_s:.0f} tokens/s, {even.kv_tokens} tokens{short}")
    if best is not choice.full:
        lines.append(
            f"{best.ranks} of {len(machine.devices)} devices are used, since all of them would do "
            f"{choice.full.forecast.tokens_per_s:.0f} tokens/s; --tp {len(machine.devices)} uses them nevertheless"
        )
    if machine.doubled:
        lines.append("ranks share a device: each gets a part of its memory and speed; data goes through host memory")
    return lines
