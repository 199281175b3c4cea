"""What a block of routed experts and one shared expert means, in plain torch: a composition of single operations.

Legend: T tokens, H hidden, E experts, k experts a token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from shardwise.checkpoint.weight import Weight
from shardwise.kernels.linears.reference import linears, norm_linears
from shardwise.kernels.moe.reference import moe, route, silu_mul
from shardwise.kernels.norm.reference import add_rms_norm, rms_norm

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Then(NamedTuple):
    """What follows a block: the sum with residual_TH, and the norm of the next layer.

    over_ranks: does both, if the block's output is a part of a sum over ranks, of the weighted sum or of what is to be
    summed: (outputs, (ids, weights, gate), residual, norm, eps).
    """

    residual_TH: torch.Tensor
    norm_H: torch.Tensor
    eps: float
    over_ranks: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None


def norm_route(
    added_TH: torch.Tensor | None,
    residual_TH: torch.Tensor,
    norm_H: torch.Tensor,
    eps: float,
    routers: Sequence[Weight],
    top_k: int,
    arrivals: torch.Tensor | None = None,
) -> Routed:
    """Norm of residual + added, logits of experts and of the shared expert's gate, and the choice of experts.

    routers: rows of all experts and, last, of the gate. -> x_TH in the norm's type, the new residual, weights_Tk fp32,
    ids_Tk int32, and the gate's logits_T1 fp32. arrivals (int32 [1], 0 before and after) is for kernels that count.
    """
    _, residual_TH = norm_linears(added_TH, residual_TH, norm_H, eps, [], [])
    x_TH = rms_norm(residual_TH, norm_H, eps)
    return x_TH, residual_TH, *route_linears(x_TH, routers, top_k)


def route_linears(
    x_TH: torch.Tensor, routers: Sequence[Weight], top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The choice of experts of norm_route, for x that is normed already -> weights_Tk, ids_Tk, the gate's logits_T1."""
    logits_TE1 = torch.cat(linears(x_TH, routers, [torch.float32] * len(routers)), -1)
    return *route(logits_TE1[:, :-1], top_k), logits_TE1[:, -1:]


def moe_shared(
    x_TH: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    shared_gate_up: Sequence[Weight],
    shared_down: Sequence[Weight],
    gate_T1: torch.Tensor,
    then: Then | None = None,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of the chosen experts' outputs, and sigmoid(gate) times the shared expert's -> [T, H] fp32.

    gate_up and down as in moe; shared_gate_up [2I, H] in one or in two weights; shared_down [H, I].
    then: -> the norm of its residual with that sum, and the residual with it, instead. arrivals: as of norm_route.
    """
    both_T2I = torch.cat(linears(x_TH, shared_gate_up, [None] * len(shared_gate_up)), -1)
    (shared_TH,) = linears(silu_mul(both_T2I), shared_down, [torch.float32])
    out_TH = moe(x_TH, gate_up, down, ids_Tk, weights_Tk) + gate_T1.sigmoid() * shared_TH
    if then is not None and then.over_ranks is not None:
        return then.over_ranks(out_TH, (ids_Tk, weights_Tk, gate_T1), *then[:3])
    return out_TH if then is None else add_rms_norm(out_TH, *then[:3])
