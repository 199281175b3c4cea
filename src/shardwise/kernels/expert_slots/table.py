"""What the operations on slots work on: the state of a layer's slots, and the rows that belong to an expert.

Legend: E experts, S slots, N tiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MOST_SLOTS = 65535  # of a layer: a slot's number shares a word with the time of its last use
TILE_BYTES = 16384  # that a program copies at a time, where rows allow 16 bytes at once
NARROW_BYTES = 1024  # likewise where they do not


@dataclass(frozen=True)
class SlotTable:
    """slot_of_E: the slot of each expert, -1 if none; expert_of_S: the expert in each slot, -1 if it is empty; int32.

    used_S: the clock when the slot was last wanted. counts_3: the clock, hits and misses so far. int64.
    """

    slot_of_E: torch.Tensor
    expert_of_S: torch.Tensor
    used_S: torch.Tensor
    counts_3: torch.Tensor

    @classmethod
    def empty(cls, experts: int, slots: int, device: torch.device | str) -> "SlotTable":
        if slots > MOST_SLOTS:
            raise ValueError(f"{slots} slots of a layer; at most {MOST_SLOTS} can be told apart")
        return cls(
            torch.full((experts,), -1, dtype=torch.int32, device=device),
            torch.full((slots,), -1, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            torch.zeros(3, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True)
class Rows:
    """A stored tensor of all experts: in the bank [E, ..] on the host, in slots [S, ..], and where copies go to."""

    bank: torch.Tensor
    slots: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True)
class Places:
    """All rows that an expert consists of. tiles_N6: for kernels, int64: addresses of a tile in the bank's, the slots'
    and the target's row 0, bytes of a row, bytes of the tile, and whether all these are multiples of 16."""

    rows: Sequence[Rows]
    tiles_N6: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Rows], device: torch.device | str) -> "Places":
        tiles = [tile for each in rows for tile in _tiles(each)]
        return cls(rows, torch.tensor(tiles, dtype=torch.int64).reshape(-1, 6).to(device))


def _tiles(each: Rows) -> list[tuple[int, ...]]:
    row_bytes = each.bank[0].nbytes if len(each.bank) else 0
    addresses = [tensor.data_ptr() for tensor in (each.bank, each.slots, each.target)]
    wide = all(number % 16 == 0 for number in (row_bytes, *addresses))
    step = TILE_BYTES if wide else NARROW_BYTES
    return [
        (*(address + at for address in addresses), row_bytes, min(step, row_bytes - at), int(wide))
        for at in range(0, row_bytes, step)
    ]
