"""What several linears of one normed input mean, in plain torch: a composition of the single operations.

Legend: T tokens, H hidden, I columns, C conv channels, W taps, R rows of state, S parts of a sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.checkpoint.weight import Weight
from shardwise.kernels.conv.reference import causal_conv
from shardwise.kernels.linear.reference import linear
from shardwise.kernels.norm.reference import add_rms_norm, rms_norm
from shardwise.kernels.sequences import Sequences


@dataclass(frozen=True)
class Conv:
    """The causal convolution that the first of the linears goes through; `state_RCW1` is updated in place."""

    weight_CW: torch.Tensor
    state_RCW1: torch.Tensor
    seqs: Sequences

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """As kernels of single tokens take it: factors, states, contexts and rows."""
        return self.weight_CW, self.state_RCW1, self.seqs.context_S, self.seqs.state_rows_S


def norm_linears(
    added_TH: torch.Tensor | None,
    residual_TH: torch.Tensor,
    norm_H: torch.Tensor,
    eps: float,
    weights: Sequence[Weight],
    out_dtypes: Sequence[torch.dtype | None],
    conv: Conv | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """norm(residual + added) @ weight.T for each weight -> outputs [T, O], and the sum, which is the new residual.

    added_TH: None adds nothing. out_dtypes: None is the norm's type, that of activations. `conv` is of the first
    output. A weight may be of any format, and may have no rows.
    """
    if added_TH is None:
        x_TH = rms_norm(residual_TH, norm_H, eps)
    else:
        x_TH, residual_TH = add_rms_norm(added_TH, residual_TH, norm_H, eps)
    return linears(x_TH, weights, out_dtypes, conv), residual_TH


def linears(
    x_TH: torch.Tensor,
    weights: Sequence[Weight],
    out_dtypes: Sequence[torch.dtype | None],
    conv: Conv | None = None,
) -> list[torch.Tensor]:
    """x @ weight.T for each weight, in its type or x's (None); the first output goes through `conv`."""
    outputs = [linear(x_TH, weight, dtype) for weight, dtype in zip(weights, out_dtypes, strict=True)]
    if conv is not None:
        outputs[0] = causal_conv(outputs[0], conv.weight_CW, conv.state_RCW1, conv.seqs)
    return outputs


def linear_parts(x_TI: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Parts [S, T, H] in fp32 whose sum over S, in their order, is x @ weight.T: for the norm that comes next."""
    return linear(x_TI, weight, torch.float32)[None]


def adjoin(weights: Sequence[Weight]) -> None:
    """Where they lie makes no difference here; kernels move weights of one input to one place."""
