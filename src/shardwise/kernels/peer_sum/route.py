"""The sum over ranks of one token, its norm and its choice of experts, in one launch: programs have rows of the router.

Every program waits for the whole token, while its rows are on their way already; the one that is done last chooses.
Legend: W ranks (in kernels also the index of one), H hidden, R rows of a program, E experts, k experts a
token, GE groups of them that are searched at a time.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.moe_block.stream import choose_experts
from shardwise.kernels.overlap import after_previous, let_next_come
from shardwise.kernels.peer_sum.mail import MOST_RANKS, Mail, constants, padded
from shardwise.kernels.peer_sum.words import clear, done, push, sent, summed

WIDEST = 8192  # columns, of which a program holds R rows
WARPS = 8


@triton.jit(do_not_specialize=["patience"])
def peer_route_kernel(
    x, residual, norm, normed, total, router, logits, weights, ids, arrivals, inbox, p0, p1, p2, p3, p4, p5, p6, p7,
    state, trouble, patience, eps, RANK: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr,
    TOP_K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, GE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As peer_norm_kernel, of one token; logits of ROWS rows, of which all but the last are of experts."""
    let_next_come(PDL)
    program = tl.program_id(0)
    N: tl.constexpr = (ROWS + R - 1) // R
    h_H = tl.arange(0, BH)
    n_H = tl.max_contiguous(tl.arange(0, BH), 4)  # narrow types by as many columns a thread as fp32: no shuffling
    ok_H = h_H < WIDTH
    o_R = program * R + tl.arange(0, R)
    row_RH = tl.load(
        router + (o_R * WIDTH)[:, None] + n_H[None, :], mask=(o_R < ROWS)[:, None] & ok_H[None, :], other=0
    )
    factor_H = 1.0 + tl.load(norm + n_H, mask=ok_H, other=0).to(tl.float32)
    after_previous(PDL)
    slot, last = tl.load(state + 2 * program), tl.load(state + 2 * program + 1)
    own_H = tl.load(x + h_H, mask=ok_H, other=0)
    if program == 0:
        push(sent(own_H), h_H, ok_H, (p0, p1, p2, p3, p4, p5, p6, p7), slot, RANK, W, CAPACITY)
    clear(inbox, slot, last, RANK, W, CAPACITY, BLOCK, G)
    if program < N:
        carried_H = tl.load(residual + h_H, mask=ok_H, other=0).to(tl.float32)
        sum_H = summed(own_H, inbox, slot, h_H, ok_H, patience, trouble, RANK, W, WP, CAPACITY)
        rounded_H = (sum_H + carried_H).to(total.dtype.element_ty)
        value_H = tl.where(ok_H, rounded_H.to(tl.float32), 0)
        y_H = (value_H * tl.rsqrt(tl.sum(value_H * value_H, 0) / WIDTH + eps) * factor_H).to(normed.dtype.element_ty)
        if program == 0:
            tl.store(total + h_H, rounded_H, mask=ok_H)
            tl.store(normed + n_H, y_H, mask=ok_H)
        logit_R = tl.sum(row_RH.to(tl.float32) * y_H.to(tl.float32)[None, :], 1)
        tl.store(logits + o_R, logit_R, mask=o_R < ROWS)
        tl.debug_barrier()
        if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == N - 1:
            tl.debug_barrier()
            choose_experts(logits, weights, ids, ROWS - 1, TOP_K, BE, BK, GE)
            tl.store(arrivals, 0)
    done(state, slot, (WIDTH + BLOCK - 1) // BLOCK)


def peer_route(
    x_TH: torch.Tensor,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    router_EH: torch.Tensor,
    top_k: int,
    arrivals: torch.Tensor,
    mail: Mail,
) -> tuple[torch.Tensor, ...]:
    """As norm_route of one token, with the sum of all ranks' x. router: rows of the experts and, last, of the gate.

    x, residual and router are contiguous, the router plain and of at most WIDEST columns; arrivals: int32 [1], 0 before
    and after.
    """
    (tokens, width), rows, device = x_TH.shape, router_EH.shape[0], x_TH.device
    normed_TH = torch.empty(x_TH.shape, dtype=weight_H.dtype, device=device)
    total_TH = torch.empty_like(residual_TH)
    logits_TE1 = torch.empty((tokens, rows), dtype=torch.float32, device=device)
    weights_Tk = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    ids_Tk = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    programs = mail.state.shape[0]
    peer_route_kernel[(programs,)](
        x_TH, residual_TH, weight_H, normed_TH, total_TH, router_EH, logits_TE1, weights_Tk, ids_Tk, arrivals,
        *mail.arguments(), mail.patience, eps,
        **mail.constants(WP=padded(len(mail.inboxes)), **_config(width, rows, top_k, programs)), num_warps=WARPS,
    )  # fmt: skip
    return normed_TH, total_TH, weights_Tk, ids_Tk, logits_TE1[:, -1:]


def _config(width: int, rows: int, top_k: int, programs: int) -> dict[str, int]:
    """Constants; every program may have rows."""
    return {
        "WIDTH": width, "BH": triton.next_power_of_2(width), "ROWS": rows,
        "R": triton.next_power_of_2(triton.cdiv(rows, programs)), "TOP_K": top_k,
        "BE": triton.next_power_of_2(rows - 1), "BK": triton.next_power_of_2(top_k),
        "GE": min(WARPS, triton.next_power_of_2(rows - 1)),
    }  # fmt: skip


def compile_cases() -> Iterator[CompileCase]:
    """The router of 35B-A3B, at two ranks and eight."""
    types = dict.fromkeys(("x", "residual", "total", "logits", "weights"), "*fp32")
    types |= dict.fromkeys(("norm", "normed", "router"), "*bf16")
    types |= dict.fromkeys(("ids", "arrivals", "inbox", "state", "trouble"), "*i32") | {"eps": "fp32"}
    types |= {f"p{w}": "*i32" for w in range(MOST_RANKS)}
    for rank, world, capacity in ((0, 2, 1 << 20), (5, 8, 1 << 18)):
        found: dict[str, Any] = constants(rank, world, capacity) | {"WP": padded(world), "PDL": False}
        found |= _config(2048, 257, 8, found["G"])
        yield CompileCase(peer_route_kernel, signature(peer_route_kernel, found, types), found, WARPS, 1)
