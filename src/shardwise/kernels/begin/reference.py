"""The beginning of a step in plain torch: the definition.

Legend: T tokens, V rows of the table on this rank, H hidden, S rows of last tokens, R half of the rotary dims. Of a
handover: K turns, X words.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from shardwise.kernels.rope.reference import RopeTable, cos_sin

ARRIVALS = 1 << 20  # more than programs of a launch


@dataclass(frozen=True)
class Handover:
    """Inputs of steps that the host writes in turns, and each step takes over by itself: a graph knows no turn.

    next_1: the next step's turn, times ARRIVALS; moved on by each step.
    """

    host_KX: torch.Tensor  # int32, pinned where the device is a GPU
    words_X: torch.Tensor  # int32, of the device: a row of host_KX
    next_1: torch.Tensor  # int32, of the device

    @classmethod
    def empty(cls, turns: int, words: int, device: torch.device) -> "Handover":
        """Of zeros; with some more words, so that no line of 128 bytes has those of two turns."""
        words = -(-words // 32) * 32
        host_KX = torch.zeros((turns, words), dtype=torch.int32, pin_memory=device.type == "cuda")
        words_X, next_1 = (torch.zeros(count, dtype=torch.int32, device=device) for count in (words, 1))
        return cls(host_KX, words_X, next_1)

    def take(self) -> None:
        """Copy the words of the next step. Waits for the device."""
        turn = int(self.next_1) // ARRIVALS
        self.words_X.copy_(self.host_KX[turn])
        self.next_1.fill_((turn + 1) % len(self.host_KX) * ARRIVALS)


def embed(
    ids_T: torch.Tensor, weight_VH: torch.Tensor, first_row: int, last_S: torch.Tensor | None = None
) -> torch.Tensor:
    """x_TH in fp32: row ids - first_row of the weight, and zeros for an id whose row another rank has.

    last_S: ids that negative ids stand for, -s for that of row s.
    """
    rows = weight_VH.shape[0]
    if not rows:
        return weight_VH.new_zeros(ids_T.shape[0], weight_VH.shape[1], dtype=torch.float32)
    if last_S is not None:
        ids_T = torch.where(ids_T < 0, last_S[(-ids_T).clamp(min=0)], ids_T)
    local_T = ids_T - first_row
    inside_T = (local_T >= 0) & (local_T < rows)
    x_TH = functional.embedding(local_T.clamp(0, rows - 1), weight_VH).masked_fill(~inside_T[:, None], 0)
    return x_TH.float()


def begin(
    ids_T: torch.Tensor,
    positions_3T: torch.Tensor,
    weight_VH: torch.Tensor,
    first_row: int,
    rope: RopeTable,
    last_S: torch.Tensor | None = None,
    handover: Handover | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x_TH of `embed`, zeros of its shape for the residual, cos_TR and sin_TR of `cos_sin`, all in fp32.

    handover: is taken over first; ids and positions are views of its words_X.
    """
    if handover is not None:
        handover.take()
    x_TH = embed(ids_T, weight_VH, first_row, last_S)
    return x_TH, torch.zeros_like(x_TH), *cos_sin(positions_3T, rope)
