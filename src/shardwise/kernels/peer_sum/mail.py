"""What a rank holds to send to its peers and to receive from them."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.kernels.overlap import launch

SLOTS = 3
MOST_RANKS = 8
PROGRAMS = 132  # of a launch at most, and no more than processors; all, busy or not: each counts messages by itself
BLOCK = 1024  # words; what is cleared, and what a program sends at a time
PATIENCE = 1 << 28  # looks, of half a microsecond and more, after which a word that has not come is NaN: minutes
EMPTY_WORD = -(1 << 31)


@dataclass(frozen=True)
class Mail:
    """What one rank needs to send and receive: its inbox [SLOTS, W, capacity] int32, those of all (its own at `rank`).

    state: int32 [G, 2], local, of G programs: the next slot, and the blocks of the last message. trouble: int32 [1],
    perhaps of the host: not 0 once a kernel has given up waiting, after which this rank is out of step. Inboxes are
    EMPTY_WORD throughout, and states zero, before any rank launches the first kernel.
    """

    rank: int
    inboxes: tuple[torch.Tensor, ...]
    state: torch.Tensor
    trouble: torch.Tensor
    capacity: int  # words of a message, a multiple of BLOCK
    pdl: bool = False
    patience: int = PATIENCE

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """inbox, p0 .. p7, state, trouble of a kernel."""
        own = self.inboxes[self.rank]
        return own, *self.inboxes, *[own] * (MOST_RANKS - len(self.inboxes)), self.state, self.trouble

    def patient(self) -> "Mail":
        """The same, for kernels that may have to wait for long."""
        return replace(self, patience=PATIENCE)

    def constants(self, **more: Any) -> dict[str, Any]:
        """What a kernel is compiled for, and how it is launched."""
        world = len(self.inboxes)
        return constants(self.rank, world, self.capacity, self.state.shape[0]) | more | launch(self.pdl)


def constants(rank: int, world: int, capacity: int, programs: int = PROGRAMS) -> dict[str, Any]:
    """What every kernel is compiled for."""
    return {"RANK": rank, "W": world, "CAPACITY": capacity, "BLOCK": BLOCK, "G": programs}


def padded(world: int) -> int:
    """WP of kernels that add."""
    return 1 << (world - 1).bit_length()


def inbox_words(world: int, capacity: int) -> int:
    """Words of the inbox of a rank among `world`."""
    return SLOTS * world * capacity
