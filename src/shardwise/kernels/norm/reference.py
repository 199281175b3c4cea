"""RMS norms in plain torch, in fp32 inside: the definition.

Legend: T tokens, H hidden, V value heads, D head dim, S parts of a sum.
"""

import torch
from torch.nn import functional


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * (1 + weight) over the last axis of any shape, in the weight's dtype: that of activations."""
    return functional.rms_norm(x_TH.float(), weight_H.shape, weight_H.float() + 1, eps).to(weight_H.dtype)


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of residual + x, in the weight's dtype, and that sum, in the residual's, of which the norm is taken.

    x may be parts [S, T, H] that are added first, see summed.
    """
    sum_TH = (residual_TH.float() + summed(x_TH, residual_TH.dim()).float()).to(residual_TH.dtype)
    return rms_norm(sum_TH, weight_H, eps), sum_TH


def summed(x_TH: torch.Tensor, axes: int = 2) -> torch.Tensor:
    """x of so many axes as it is; of one more, such as parts [S, T, H], the sum of these in fp32, in their order."""
    if x_TH.dim() == axes:
        return x_TH
    return x_TH[0] if len(x_TH) == 1 else x_TH.float().sum(0)


def gated_rms_norm(x_TVD: torch.Tensor, gate_TVD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / rms(x) * silu(gate) over the last axis, in x's dtype; the weight is plain, not zero-centred."""
    normed_TVD = functional.rms_norm(x_TVD.float(), weight_D.shape, weight_D.float(), eps)
    return (normed_TVD * functional.silu(gate_TVD.float())).to(x_TVD.dtype)
