"""What routed experts mean: softmax and top-k, then the weighted sum of down(silu(gate) * up), in fp32.

Legend: T tokens, E experts (of the rank, for banks), k experts a token, H hidden, I intermediate, M pairs of token and
expert, grouped by expert.
"""

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from shardwise.checkpoint.weight import Weight
from shardwise.kernels.linear.reference import dequantise


def route(logits_TE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` likeliest experts of each token, likeliest first, the lower id first among equals.

    -> weights_Tk fp32, the softmax over all experts renormalised over the chosen; ids_Tk int32.
    """
    values_TE, ids_TE = logits_TE.float().sort(dim=-1, descending=True, stable=True)
    return values_TE[:, :top_k].softmax(-1), ids_TE[:, :top_k].int()


def silu_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in fp32, in x's dtype; the gates are the first half of the last axis."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
    return (silu(gate_TI.float()) * up_TI.float()).to(gate_up_T2I.dtype)


def moe(
    x_TH: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    first_expert: int = 0,
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs -> [T, H] fp32.

    gate_up [E, 2I, H] holds gate rows first, down [E, H, I]. Experts outside first_expert .. first_expert + E are
    other ranks', and add nothing. Only the experts that are hit are dequantised.
    """
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    experts, top_k = gate_up.shape[0], ids_Tk.shape[1]
    hit: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids_Tk.flatten().tolist()):
        if first_expert <= expert < first_expert + experts:
            hit.setdefault(expert - first_expert, []).append(pair)
    if not down.shape[-1]:
        return out_TH
    wide_TH, wide_Tk = x_TH.float(), weights_Tk.float()
    for expert in sorted(hit):
        w_2IH, w_HI = dequantise(gate_up, expert=expert), dequantise(down, expert=expert)
        if len(x_TH) == len(hit[expert]) == 1:
            gate_M, up_M = torch_linear(wide_TH, w_2IH).chunk(2, -1)
            out_TH.addmm_(silu(gate_M) * up_M * wide_Tk[:, hit[expert][0], None], w_HI.T)
            continue
        pairs_M = torch.tensor(hit[expert], device=x_TH.device)
        tokens_M = pairs_M // top_k
        gate_MI, up_MI = torch_linear(wide_TH[tokens_M], w_2IH).chunk(2, -1)
        mixed_MI = silu(gate_MI) * up_MI * wide_Tk.flatten()[pairs_M, None]
        out_TH.index_add_(0, tokens_M, torch_linear(mixed_MI, w_HI))
    return out_TH
