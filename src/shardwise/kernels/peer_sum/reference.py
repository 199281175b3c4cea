"""What the kernels over peers' memory compute, in plain torch, from the parts of all ranks.

Legend: W ranks, T tokens, H hidden.
"""

from collections.abc import Sequence

import torch

from shardwise.kernels.norm.reference import rms_norm


def peer_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts of one shape added in the order of ranks, in fp32, in their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def peer_norm(
    parts_TH: Sequence[torch.Tensor], residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As add_rms_norm of the sum (in fp32) and the residual: the norm in the weight's dtype, the new residual."""
    sum_TH = peer_sum([part.float() for part in parts_TH])
    total_TH = (residual_TH.float() + sum_TH).to(residual_TH.dtype)
    return rms_norm(total_TH, weight_H, eps), total_TH


def peer_gather(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts [.., width], whose widths may differ, side by side."""
    return torch.cat(list(parts), -1)
