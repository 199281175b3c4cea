"""RMS norms in plain torch, in fp32 inside: the definition.

Legend: T tokens, H hidden, V value heads, D head dim.
"""

import torch
from torch.nn import functional


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * (1 + weight) over the last axis of any shape, in the weight's dtype: that of activations."""
    return functional.rms_norm(x_TH.float(), weight_H.shape, weight_H.float() + 1, eps).to(weight_H.dtype)


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of residual + x, in the weight's dtype, and that sum, in the residual's, of which the norm is taken."""
    sum_TH = (residual_TH.float() + x_TH.float()).to(residual_TH.dtype)
    return rms_norm(sum_TH, weight_H, eps), sum_TH


def gated_rms_norm(x_TVD: torch.Tensor, gate_TVD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / rms(x) * silu(gate) over the last axis, in x's dtype; the weight is plain, not zero-centred."""
    normed_TVD = functional.rms_norm(x_TVD.float(), weight_D.shape, weight_D.float(), eps)
    return (normed_TVD * functional.silu(gate_TVD.float())).to(x_TVD.dtype)
