"""Embedding look-up in plain torch: the definition.

Legend: T tokens, V rows of the table on this rank, H hidden.
"""

import torch
from torch.nn import functional


def embed(ids_T: torch.Tensor, weight_VH: torch.Tensor, first_row: int) -> torch.Tensor:
    """x_TH: row ids - first_row of the weight, and zeros for an id whose row another rank has."""
    rows = weight_VH.shape[0]
    if not rows:
        return weight_VH.new_zeros(ids_T.shape[0], weight_VH.shape[1])
    local_T = ids_T - first_row
    inside_T = (local_T >= 0) & (local_T < rows)
    return functional.embedding(local_T.clamp(0, rows - 1), weight_VH).masked_fill(~inside_T[:, None], 0)
