"""What the kernels over peers' memory compute, in plain torch, from the parts of all ranks.

Legend: W ranks, T tokens, H hidden, k experts a token, M = T * k pairs.
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


def weighted(
    y_MH: torch.Tensor, shared_TH: torch.Tensor, choice: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """A rank's part of a block of experts [T, H] in fp32: what peer_combine sums over ranks and norms, as peer_norm.

    y_MH: the output of each pair of token and expert, of the first token first; choice: ids_Tk, weights_Tk, gate_T1.
    """
    _, weights_Tk, gate_T1 = choice
    routed_TH = (y_MH.float().view(*weights_Tk.shape, -1) * weights_Tk[..., None]).sum(1)
    return routed_TH + gate_T1.sigmoid() * shared_TH.float()


def peer_gather(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts [.., width], whose widths may differ, side by side."""
    return torch.cat(list(parts), -1)
