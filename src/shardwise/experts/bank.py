"""A rank's slices of all experts, in host memory, in the layout that the kernels read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.checkpoint.index import DTYPES, Source
from shardwise.checkpoint.load import load
from shardwise.checkpoint.weight import Weight
from shardwise.experts.memory import Layout, names_of, pin, take
from shardwise.experts.store import open_or_build
from shardwise.shard import ParamSpec, Partitions, local, local_shape


@dataclass(frozen=True)
class LayerBank:
    """The experts of one layer: gate_up [E, 2I, H] (gate rows first) and down [E, H, I], tensors on the host."""

    gate_up: Weight
    down: Weight

    @property
    def experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self.gate_up.tensors, *self.down.tensors)


Banks = Mapping[int, LayerBank]  # by number of the layer
Pairs = Mapping[int, tuple[str, str]]  # names of gate_up and down, by number of the layer


def layout(specs: Mapping[str, ParamSpec], partitions: Partitions, rank: int) -> dict[str, Layout]:
    """Shapes and types of what `rank` holds of each of `specs`, by its name."""
    found = dict[str, Layout]()
    for name, spec in specs.items():
        held = local(spec, partitions, rank)
        names = names_of(name, len(held))
        found[name] = {each: (part.shape, DTYPES[part.stored.dtype]) for each, part in zip(names, held, strict=True)}
    return found


def load_banks(
    specs: Mapping[str, ParamSpec], pairs: Pairs, partitions: Partitions, rank: int, source: Source,
    device: torch.device, cache: tuple[Path, str] | None = None,
) -> tuple[Banks, bool]:  # fmt: skip
    """The banks of `rank`, read from `source` straight into their place, and whether kernels of `device` can read them.

    Memory beyond the banks stays within 512 MiB. On a CPU nothing needs to be locked. cache: a folder and a key, by
    which banks are kept for the next start; where they need not be locked, or cannot be, they stay in its file.
    """
    layouts = layout(specs, partitions, rank)
    flat = {name: each for one in layouts.values() for name, each in one.items()}
    tensors, pinned = dict[str, torch.Tensor](), device.type == "cpu"
    if device.type != "cpu" or cache is None:
        for names in pairs.values():
            tensors |= take({**layouts[names[0]], **layouts[names[1]]})
        pinned = pinned or pin(tensors.values(), device)

    def fill(those: Mapping[str, torch.Tensor]) -> None:
        into = {name: [those[each] for each in layouts[name]] for name in specs}
        load(specs, partitions, rank, source, "cpu", into=into)

    if cache is None:
        fill(tensors)
    else:
        tensors = open_or_build(*cache, flat, fill, into=tensors if pinned and tensors else None)
    return banks_of(specs, pairs, partitions, rank, tensors), pinned


def banks_of(
    specs: Mapping[str, ParamSpec], pairs: Pairs, partitions: Partitions, rank: int,
    tensors: Mapping[str, torch.Tensor],
) -> Banks:  # fmt: skip
    """Banks whose tensors are filled already; by the names of `layout`."""

    def weight(name: str) -> Weight:
        spec = specs[name]
        held = tuple(local(spec, partitions, rank))
        those = tuple(tensors[each] for each in names_of(name, len(held)))
        return Weight(spec, local_shape(spec, partitions, rank), held, those)

    return {layer: LayerBank(weight(gate_up), weight(down)) for layer, (gate_up, down) in pairs.items()}


def per_expert(bank: LayerBank) -> tuple[bool, ...]:
    """Of each tensor of `bank`, whether it has a row for each expert; if not, all experts share it."""
    return tuple(bool(part.block[0]) for part in (*bank.gate_up.held, *bank.down.held))


def room(bank: LayerBank, rows: int) -> Layout:
    """What `rows` experts of `bank` take, without what all share, by the number of the tensor."""
    return {
        str(n): ((rows, *tensor.shape[1:]), tensor.dtype)
        for n, (tensor, own) in enumerate(zip(bank.tensors, per_expert(bank), strict=True))
        if own
    }


def expert_bytes(bank: LayerBank) -> int:
    """What a slot of this layer takes."""
    each = zip(bank.tensors, per_expert(bank), strict=True)
    return sum(tensor.nbytes // len(tensor) for tensor, own in each if own and len(tensor))
