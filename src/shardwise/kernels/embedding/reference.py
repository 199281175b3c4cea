"""Embedding look-up in plain torch: the definition.

Legend: T tokens, V rows of the table on this rank, H hidden, R rows of last tokens.
"""

import torch
from torch.nn import functional


def embed(
    ids_T: torch.Tensor,
    weight_VH: torch.Tensor,
    first_row: int,
    last_R: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x_TH: row ids - first_row of the weight, and zeros for an id whose row another rank has.

    last_R: ids that negative ids stand for, -r for that of row r. dtype: of x, if not the weight's.
    """
    rows = weight_VH.shape[0]
    if not rows:
        return weight_VH.new_zeros(ids_T.shape[0], weight_VH.shape[1], dtype=dtype)
    if last_R is not None:
        ids_T = torch.where(ids_T < 0, last_R[(-ids_T).clamp(min=0)], ids_T)
    local_T = ids_T - first_row
    inside_T = (local_T >= 0) & (local_T < rows)
    x_TH = functional.embedding(local_T.clamp(0, rows - 1), weight_VH).masked_fill(~inside_T[:, None], 0)
    return x_TH if dtype is None else x_TH.to(dtype)
