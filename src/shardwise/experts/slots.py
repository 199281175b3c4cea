"""Room for a layer's experts on the device, and which experts are in it.

Legend: E experts, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.checkpoint.weight import Weight
from shardwise.experts.bank import LayerBank, per_expert, room
from shardwise.experts.memory import layout_bytes, views
from shardwise.kernels.expert_slots.table import Places, Rows, SlotTable


def on_device(bank: LayerBank, rows: int, arena: torch.Tensor, common: Sequence[torch.Tensor]) -> LayerBank:
    """Room for `rows` experts of `bank` in `arena`; `common`: on the device, what all experts share, in order."""
    own, shared = views(room(bank, rows), arena), iter(common)
    tensors = [own.get(str(n), None) for n in range(len(bank.tensors))]
    tensors = [next(shared) if tensor is None else tensor for tensor in tensors]

    def weight(of: Weight, first: int) -> Weight:
        held = tuple(part._replace(shape=(rows, *part.shape[1:])) if part.block[0] else part for part in of.held)
        return Weight(of.spec, (rows, *of.shape[1:]), held, tuple(tensors[first : first + len(held)]))

    return LayerBank(weight(bank.gate_up, 0), weight(bank.down, len(bank.gate_up.held)))


def common_of(bank: LayerBank, device: torch.device) -> list[torch.Tensor]:
    """What all experts of `bank` share, on the device."""
    return [tensor.to(device) for tensor, own in zip(bank.tensors, per_expert(bank), strict=True) if not own]


def rows_of(bank: LayerBank, slots: LayerBank, target: LayerBank) -> list[Rows]:
    """The tensors that have a row for each expert and that kernels read."""

    def of(one: Weight, two: Weight, three: Weight) -> list[Rows]:
        return [
            Rows(*tensors)
            for held, *tensors in zip(one.held, one.tensors, two.tensors, three.tensors, strict=True)
            if held.block[0] and held.stored.role != "input_scale" and tensors[0].nbytes
        ]

    return [
        *of(bank.gate_up, slots.gate_up, target.gate_up),
        *of(bank.down, slots.down, target.down),
    ]


@dataclass(frozen=True)
class Slots:
    """`experts`: the weights as kernels take them, with a slot in the place of an expert. fill: copies from the bank to
    slots; collect: copies from bank and slots to room for all experts (None without)."""

    experts: LayerBank
    table: SlotTable
    fill: Places
    collect: Places | None

    @property
    def count(self) -> int:
        return len(self.table.expert_of_S)

    @classmethod
    def make(
        cls, bank: LayerBank, count: int, common: Sequence[torch.Tensor], staging: LayerBank | None,
        device: torch.device, table_device: torch.device,
    ) -> "Slots":  # fmt: skip
        """Empty slots; all of them filled if they are as many as experts."""
        arena = torch.zeros(layout_bytes(room(bank, count)), dtype=torch.uint8, device=device)
        experts = on_device(bank, count, arena, common)
        fill = rows_of(bank, experts, experts)
        if count == bank.experts:
            for each in fill:
                each.target.copy_(each.bank)
        collect = Places.of(rows_of(bank, experts, staging), device) if staging else None
        return cls(experts, SlotTable.empty(bank.experts, count, table_device), Places.of(fill, device), collect)
