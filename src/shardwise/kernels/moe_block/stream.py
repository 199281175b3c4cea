"""Kernels of a block of experts for a few tokens: three launches, each of which streams its weights once.

What is read before a kernel waits for the one before it (see overlap.py): weights that do not depend on a choice, and
by down_kernel the choice itself, which was made before gate_up_kernel, and with it all of its weights.

Legend: T tokens, H hidden, E experts, I intermediate, k experts a token (K in kernels), M = T * k pairs of token and
expert, R rows of a program, C chunks of V elements.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from shardwise.kernels.linear.chunks import chunk_codes, chunks, code_sums
from shardwise.kernels.linear.tiles import COLUMNS, ROWS, coarse_scale
from shardwise.kernels.linears.stream import normed_sums, summed
from shardwise.kernels.overlap import after_previous, let_next_come

LEAST = tl.constexpr(-(2**31))  # below every number


@triton.jit
def choose_experts(
    logits, weights, ids, experts, TOP_K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, G: tl.constexpr
):
    """The largest logit TOP_K times, the lower id first among equals; softmax over those.

    Logits are compared as whole numbers in their order, of which a warp finds the largest in one instruction. First the
    largest of G groups, one a warp, so that warps need not wait for each other; each of those then counts who is ahead.
    """
    E: tl.constexpr = BE // G
    slot_K = tl.arange(0, BK)
    e_GE = (tl.arange(0, G) * E)[:, None] + tl.arange(0, E)[None, :]
    # Other processors have just written them: what this one's first cache holds may be older.
    x_GE = tl.load(logits + e_GE, mask=e_GE < experts, other=0, cache_modifier=".cg")
    x_GE = tl.where(x_GE == x_GE, x_GE, float("-inf"))
    bits_GE = tl.where(x_GE == 0, 0.0, x_GE).to(tl.int32, bitcast=True)
    order_GE = tl.where(e_GE < experts, bits_GE ^ ((bits_GE >> 31) & 0x7FFFFFFF), LEAST)
    best_GK, id_GK = tl.full((G, BK), LEAST, tl.int32), tl.zeros((G, BK), tl.int32)
    for slot in tl.static_range(TOP_K):
        best_G = tl.max(order_GE, 1)
        first_G = tl.min(tl.where(order_GE == best_G[:, None], e_GE, BE), 1)
        now_1K = (slot_K == slot)[None, :]
        best_GK = tl.where(now_1K, best_G[:, None], best_GK)
        id_GK = tl.where(now_1K, first_G[:, None], id_GK)
        order_GE = tl.where(e_GE == first_G[:, None], LEAST, order_GE)
    order_M, id_M = tl.reshape(best_GK, (G * BK,)), tl.reshape(id_GK, (G * BK,))
    ahead_MM = (order_M[None, :] > order_M[:, None]) | (
        (order_M[None, :] == order_M[:, None]) & (id_M[None, :] < id_M[:, None])
    )
    rank_M = tl.sum(ahead_MM.to(tl.int32), 1)
    ok_M = (rank_M < TOP_K) & (order_M > LEAST)
    logit_M = (order_M ^ ((order_M >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    logit_M = tl.where(ok_M, logit_M, float("-inf"))
    share_M = tl.where(ok_M, tl.exp(logit_M - tl.max(logit_M, 0)), 0.0)
    tl.store(weights + rank_M, share_M / tl.sum(share_M, 0), mask=ok_M)
    tl.store(ids + rank_M, id_M, mask=ok_M)


@triton.jit
def norm_route_kernel(
    x, added, norm, total, normed, value, fine, coarse, logits, weights, ids, arrivals, eps, experts,
    W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, TOP_K: tl.constexpr, BE: tl.constexpr,
    BK: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: programs with R rows of the router; the one that is done last chooses. The last is for the norm."""
    let_next_come(PDL)
    program = tl.program_id(0)
    K: tl.constexpr = W[COLUMNS]
    N: tl.constexpr = (W[ROWS] + R - 1) // R
    if program < N:
        o_R = program * R + tl.arange(0, R)
        y_1R = normed_sums(x, added, norm, value, fine, coarse, o_R, eps, W, R, C, V, True, True, PDL)
        tl.store(logits + o_R[None, :], y_1R, mask=(o_R < W[ROWS])[None, :])
        tl.debug_barrier()
        if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == N - 1:
            tl.debug_barrier()
            choose_experts(logits, weights, ids, experts, TOP_K, BE, BK, G)
            tl.store(arrivals, 0)
    else:
        h_H = tl.arange(0, BLOCK)
        ok_H = h_H < K
        factor_H = 1.0 + tl.load(norm + h_H, mask=ok_H, other=0).to(tl.float32)
        after_previous(PDL)
        x_H = summed(x, added, h_H, ok_H, True)
        tl.store(total + h_H, x_H.to(total.dtype.element_ty), mask=ok_H)
        y_H = x_H * tl.rsqrt(tl.sum(x_H * x_H, 0) / K + eps) * factor_H
        tl.store(normed + h_H, y_H.to(normed.dtype.element_ty), mask=ok_H)


@triton.jit
def _gated(
    x, act, value, fine, coarse, ids, tile, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
    ROUTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """act = silu(gate) * up of R gate rows and their R up rows of one expert, for the one token at x.

    ROUTED: of the expert at `ids`, which the kernel before this one writes. Then the next kernel may read it, too.
    """
    K: tl.constexpr = W[COLUMNS]
    I: tl.constexpr = W[ROWS] // 2  # noqa: E741
    N: tl.constexpr = K // V
    EVEN: tl.constexpr = N % C == 0
    r_2R, c_C = tl.arange(0, 2 * R), tl.arange(0, C)
    i_2R = tile * R + r_2R % R
    ok_12R, o_12R = (i_2R < I)[None, :], (i_2R + r_2R // R * I)[None, :]
    e_12R = tl.zeros((1, 2 * R), tl.int32)
    if ROUTED:
        after_previous(PDL)
        e_12R += tl.load(ids)
    raw, scales = chunk_codes(value, fine, e_12R, o_12R, ok_12R, c_C, V, EVEN and I % R == 0, W)
    scale_12R = coarse_scale(coarse, e_12R, o_12R, ok_12R, W)  # now, or the result waits for it
    if not ROUTED:
        after_previous(PDL)
    let_next_come(PDL)
    sums = tl.zeros((C, 1, 2 * R), tl.float32)
    for first in range(0, N, C):
        c_C = first + tl.arange(0, C)
        sums += code_sums(chunks(x, c_C, V, K, EVEN)[:, None, :], raw, scales, V, W)
        if N > C:  # the next ones; nothing after the last
            raw, scales = chunk_codes(value, fine, e_12R, o_12R, ok_12R, c_C + C, V, False, W)
    both = tl.sum(sums, 0) * scale_12R
    gate, up = tl.split(tl.trans(tl.reshape(both, (2, R))))
    i_R = tile * R + tl.arange(0, R)
    mixed = gate * tl.sigmoid(gate) * up
    tl.store(act + i_R, mixed.to(act.dtype.element_ty), mask=i_R < I)


@triton.jit(do_not_specialize=["tokens"])
def gate_up_kernel(
    x, act, shared_act, ids, value, fine, coarse, shared_value, shared_fine, shared_coarse, tokens,
    TOP_K: tl.constexpr, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, WS: tl.constexpr,
    RS: tl.constexpr, CS: tl.constexpr, VS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs of the tokens' shared experts, then of pairs: some rows of one expert for one token."""
    SHARED: tl.constexpr = (WS[ROWS] // 2 + RS - 1) // RS
    TILES: tl.constexpr = (W[ROWS] // 2 + R - 1) // R
    program = tl.program_id(0)
    if program < tokens * SHARED:
        token = (program // SHARED).to(tl.int64)
        x_row, act_row = x + token * WS[COLUMNS], shared_act + token * (WS[ROWS] // 2)
        _gated(x_row, act_row, shared_value, shared_fine, shared_coarse, ids, program % SHARED, WS, RS, CS, VS, False,
               PDL)  # fmt: skip
    else:
        program -= tokens * SHARED
        pair = (program // TILES).to(tl.int64)
        x_row, act_row = x + pair // TOP_K * W[COLUMNS], act + pair * (W[ROWS] // 2)
        _gated(x_row, act_row, value, fine, coarse, ids + pair, program % TILES, W, R, C, V, True, PDL)


@triton.jit
def _acts(act, row_K, c_C, ok_K, V: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    """As chunks, of a row of `act` for each expert -> [C, K, V]; 0 where not `ok`."""
    BYTES: tl.constexpr = act.dtype.element_ty.primitive_bitwidth // 8
    P: tl.constexpr = V if V * BYTES <= 16 else 16 // BYTES
    at_CK = (c_C * V)[:, None] + row_K[None, :]
    part_VP = (tl.arange(0, V // P) * P)[:, None] + tl.arange(0, P)[None, :]
    at = at_CK[:, :, None, None] + part_VP[None, None, :, :]
    ok_CK = (c_C < K // V)[:, None] & ok_K[None, :]
    found = tl.load(act + at) if WHOLE else tl.load(act + at, mask=ok_CK[:, :, None, None], other=0)
    return tl.reshape(found, (c_C.shape[0], row_K.shape[0], V)).to(tl.float32)


@triton.jit(do_not_specialize=["gate_stride"])
def down_kernel(
    act, shared_act, ids, weights, gate, gate_stride, out, value, fine, coarse, shared_value, shared_fine,
    shared_coarse, TOP_K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    V: tl.constexpr, WS: tl.constexpr, CS: tl.constexpr, VS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows of the weighted sum over a token's experts, which are read side by side, and of its shared expert."""
    let_next_come(PDL)
    row = tl.program_id(0).to(tl.int64)
    I: tl.constexpr = W[COLUMNS]  # noqa: E741
    IS: tl.constexpr = WS[COLUMNS]
    EVEN: tl.constexpr = I // V % C == 0 and TOP_K == BK
    SHARED_EVEN: tl.constexpr = IS // VS % CS == 0
    k_K, c_C, c_S = tl.arange(0, BK), tl.arange(0, C), tl.arange(0, CS)
    o_R = tl.program_id(1) * R + tl.arange(0, R)
    o_1R, ok_1R, ok_K = o_R[None, :], (o_R < W[ROWS])[None, :], k_K < TOP_K
    # Chosen before gate_up_kernel, which lets this one come only then; this processor's own cache may be older.
    expert_K = tl.load(ids + row * TOP_K + k_K, mask=ok_K, other=0, cache_modifier=".cg").to(tl.int32)
    share_K = tl.load(weights + row * TOP_K + k_K, mask=ok_K, other=0, cache_modifier=".cg")
    opened = tl.load(gate + row * gate_stride, cache_modifier=".cg").to(tl.float32)
    e_1R, e_K1, ok_KR = o_1R * 0, expert_K[:, None], ok_K[:, None] & ok_1R
    shared_raw, shared_scales = chunk_codes(
        shared_value, shared_fine, e_1R, o_1R, ok_1R, c_S, VS, SHARED_EVEN and W[ROWS] % R == 0, WS
    )
    raw, scales = chunk_codes(value, fine, e_K1, o_1R, ok_KR, c_C, V, EVEN and W[ROWS] % R == 0, W)
    shared_scale_1R = coarse_scale(shared_coarse, e_1R, o_1R, ok_1R, WS) * tl.sigmoid(opened)
    scale_KR = coarse_scale(coarse, e_K1, o_1R, ok_KR, W) * share_K[:, None]
    after_previous(PDL)
    shared_C1R = tl.zeros((CS, 1, R), tl.float32)
    for first in range(0, IS // VS, CS):
        c_S = first + tl.arange(0, CS)
        x_CV = chunks(shared_act + row * IS, c_S, VS, IS, SHARED_EVEN)
        shared_C1R += code_sums(x_CV[:, None, :], shared_raw, shared_scales, VS, WS)
        if IS // VS > CS:
            shared_raw, shared_scales = chunk_codes(
                shared_value, shared_fine, e_1R, o_1R, ok_1R, c_S + CS, VS, False, WS
            )
    sums_CKR = tl.zeros((C, BK, R), tl.float32)
    for first in range(0, I // V, C):
        c_C = first + tl.arange(0, C)
        x_CKV = _acts(act, (row * TOP_K + k_K) * I, c_C, ok_K, V, I, EVEN)
        sums_CKR += code_sums(x_CKV, raw, scales, V, W)
        if I // V > C:
            raw, scales = chunk_codes(value, fine, e_K1, o_1R, ok_KR, c_C + C, V, False, W)
    y_R = tl.sum(tl.reshape(sums_CKR * scale_KR[None, :, :], (C * BK, R)), 0)
    y_1R = tl.sum(shared_C1R, 0) * shared_scale_1R + y_R[None, :]
    tl.store(out + row * W[ROWS] + o_1R, y_1R, mask=ok_1R)


@triton.jit(do_not_specialize=["gate_stride"])
def gated_add_kernel(routed, shared, gate, gate_stride, hidden, BLOCK: tl.constexpr):
    """routed += sigmoid(gate) * shared, in place."""
    row = tl.program_id(0).to(tl.int64)
    h_H = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, ok_H = row * hidden + h_H, h_H < hidden
    share = tl.sigmoid(tl.load(gate + row * gate_stride).to(tl.float32))
    total_H = tl.load(routed + at, mask=ok_H, other=0) + share * tl.load(shared + at, mask=ok_H, other=0)
    tl.store(routed + at, total_H, mask=ok_H)
