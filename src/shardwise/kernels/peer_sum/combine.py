"""The weighted sum of a rank's parts of experts, its sum over ranks, and the norm behind it, in one launch.

Legend: W ranks, T tokens, H hidden, k experts a token (K in kernels), G programs of every launch.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.moe_block.combine import Outputs, shares, weighted_sum
from shardwise.kernels.overlap import after_previous, let_next_come
from shardwise.kernels.peer_sum.mail import MOST_RANKS, Mail, constants, padded
from shardwise.kernels.peer_sum.words import clear, done, push, sent, summed_norm

WIDEST = 4096  # columns: a program has a whole token, and all of its experts, in registers


@triton.jit(do_not_specialize=["gate_stride", "rows", "patience"])
def peer_combine_kernel(
    y, shared, ids, weights, gate, gate_stride, part, residual, norm, normed, total, inbox, p0, p1, p2, p3, p4, p5, p6,
    p7, state, trouble, rows, patience, eps, TOP_K: tl.constexpr, KP: tl.constexpr, RANK: tl.constexpr,
    W: tl.constexpr, WP: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr,
    WIDTH: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As peer_norm_kernel, of what combine_kernel makes, which is kept in `part`.

    The choice of experts is known when this kernel starts, see moe_block/combine.py.
    """
    let_next_come(PDL)
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    h_H = tl.arange(0, BH)
    n_H = tl.max_contiguous(tl.arange(0, BH), 4)  # narrow types by as many columns a thread as fp32: no shuffling
    ok_H = h_H < WIDTH
    own = tl.minimum(tl.program_id(0), rows - 1)
    pair_K, ok_K, share_K, opened = shares(ids, weights, gate, gate_stride, own.to(tl.int64), TOP_K, KP)
    after_previous(PDL)
    slot, last = tl.load(state + 2 * tl.program_id(0)), tl.load(state + 2 * tl.program_id(0) + 1)
    for row in range(tl.program_id(0), rows, G):
        value_H = weighted_sum(y, shared, row, h_H, ok_H, pair_K, ok_K, share_K, opened, WIDTH)
        push(sent(value_H), row * WIDTH + h_H, ok_H, peers, slot, RANK, W, CAPACITY)
        tl.store(part + row * WIDTH + h_H, value_H, mask=ok_H)
        later = tl.minimum(row + G, rows - 1).to(tl.int64)
        pair_K, ok_K, share_K, opened = shares(ids, weights, gate, gate_stride, later, TOP_K, KP)
    clear(inbox, slot, last, RANK, W, CAPACITY, BLOCK, G)
    factor_H = 1.0 + tl.load(norm + n_H, mask=ok_H, other=0).to(tl.float32)
    tl.debug_barrier()  # parts are read by whichever threads
    for row in range(tl.program_id(0), rows, G):
        at_H = row * WIDTH + h_H
        own_H = tl.load(part + at_H, mask=ok_H, other=0)
        y_H = summed_norm(own_H, residual, total, inbox, slot, at_H, ok_H, factor_H, eps, patience, trouble, RANK, W,
                          WP, CAPACITY, WIDTH)  # fmt: skip
        tl.store(normed + row * WIDTH + n_H, y_H.to(normed.dtype.element_ty), mask=ok_H)
    done(state, slot, (rows * WIDTH + BLOCK - 1) // BLOCK)


def peer_combine(
    outputs: Outputs,
    choice: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    mail: Mail,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As peer_norm, of the weighted sums of this rank's outputs of experts.

    choice: ids_Tk, weights_Tk and gate_T1 as of combine; residual contiguous, of at least one row, at most WIDEST
    columns and `capacity` elements. What travels is what peer_norm sends: a rank that has its weighted sum already may
    call that.
    """
    ids_Tk, weights_Tk, gate_T1 = choice
    rows, width = residual_TH.shape
    part_TH = torch.empty((rows, width), dtype=torch.float32, device=residual_TH.device)
    normed_TH = torch.empty((rows, width), dtype=weight_H.dtype, device=residual_TH.device)
    total_TH = torch.empty_like(residual_TH)
    sizes, warps = _config(width, ids_Tk.shape[1], len(mail.inboxes))
    peer_combine_kernel[(mail.state.shape[0],)](
        *outputs, ids_Tk, weights_Tk, gate_T1, gate_T1.stride(0), part_TH, residual_TH, weight_H, normed_TH, total_TH,
        *mail.arguments(), rows, mail.patience, eps, **mail.constants(**sizes), num_warps=warps,
    )  # fmt: skip
    return normed_TH, total_TH


def _config(width: int, top_k: int, world: int) -> tuple[dict[str, int], int]:
    """Constants, and warps: some 8 columns a thread."""
    block = triton.next_power_of_2(width)
    sizes = {"WIDTH": width, "BH": block, "WP": padded(world), "TOP_K": top_k, "KP": triton.next_power_of_2(top_k)}
    return sizes, min(16, max(1, block // 256))


def compile_cases() -> Iterator[CompileCase]:
    """The hidden size of 35B-A3B, at two ranks and eight."""
    types = dict.fromkeys(("y", "shared", "weights", "gate", "part", "residual", "total"), "*fp32")
    types |= dict.fromkeys(("ids", "inbox", "state", "trouble"), "*i32") | {"norm": "*bf16", "normed": "*bf16"}
    types |= {f"p{w}": "*i32" for w in range(MOST_RANKS)} | {"eps": "fp32"}
    for rank, world, capacity in ((0, 2, 1 << 20), (5, 8, 1 << 18)):
        sizes, warps = _config(2048, 8, world)
        found = constants(rank, world, capacity) | sizes | {"PDL": False}
        for kind in ("*fp32", "*bf16"):  # as moe_block/combine.py is given them
            signed = signature(peer_combine_kernel, found, types | {"y": kind})
            yield CompileCase(peer_combine_kernel, signed, found, warps, 1)
