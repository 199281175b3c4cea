"""Kernels of a block of experts for a few tokens: three launches, each of which streams its weights once.

Legend: T tokens, H hidden, E experts, I intermediate, k experts a token (K in kernels), M = T * k pairs of token and
expert, R rows of a program, C chunks of V elements.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from shardwise.kernels.linear.tiles import COLUMNS, ROWS, chunk_sums, coarse_scale
from shardwise.kernels.linears.stream import normed_sums, summed
from shardwise.kernels.overlap import after_previous

LEAST = tl.constexpr(-(2**63))
LOW = tl.constexpr(2**32 - 1)


@triton.jit
def choose_experts(
    logits, weights, ids, tokens, experts, STRIDE: tl.constexpr, T: tl.constexpr, TOP_K: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The largest logit TOP_K times for each token, the lower id first among equals; softmax over those.

    A logit and its id are one whole number, so that one maximum finds both.
    """
    t_T, e_E, slot_K = tl.arange(0, T), tl.arange(0, BE), tl.arange(0, BK)
    ok_TE = (t_T < tokens)[:, None] & (e_E < experts)[None, :]
    # Other processors have just written them: what this one's first cache holds may be older.
    x_TE = tl.load(logits + (t_T * STRIDE)[:, None] + e_E[None, :], mask=ok_TE, other=0, cache_modifier=".cg")
    x_TE = tl.where(x_TE == x_TE, x_TE, float("-inf"))
    bits_TE = tl.where(x_TE == 0, 0.0, x_TE).to(tl.int32, bitcast=True)
    order_TE = (bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)).to(tl.int64)
    key_TE = tl.where(ok_TE, (order_TE << 32) | (BE - 1 - e_E)[None, :].to(tl.int64), LEAST)
    best_TK = tl.zeros((T, BK), tl.int64)
    for slot in tl.static_range(TOP_K):
        best_T = tl.max(key_TE, 1)
        best_TK = tl.where((slot_K == slot)[None, :], best_T[:, None], best_TK)
        key_TE = tl.where(key_TE == best_T[:, None], LEAST, key_TE)
    id_TK = (BE - 1 - (best_TK & LOW)).to(tl.int32)
    order_TK = (best_TK >> 32).to(tl.int32)
    logit_TK = (order_TK ^ ((order_TK >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    logit_TK = tl.where((slot_K < TOP_K)[None, :], logit_TK, float("-inf"))
    share_TK = tl.exp(logit_TK - tl.max(logit_TK, 1)[:, None])
    share_TK /= tl.sum(share_TK, 1)[:, None]
    at = (t_T * TOP_K)[:, None] + slot_K[None, :]
    ok_TK = (t_T < tokens)[:, None] & (slot_K < TOP_K)[None, :]
    tl.store(weights + at, share_TK, mask=ok_TK)
    tl.store(ids + at, id_TK, mask=ok_TK)


@triton.jit(do_not_specialize=["tokens"])
def norm_route_kernel(
    x, added, norm, total, normed, value, fine, coarse, logits, weights, ids, arrivals, tokens, eps, experts,
    W: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, ADD: tl.constexpr,
    TOP_K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs with R rows of the router; the one that is done last chooses. Then a program a token, for the norm."""
    after_previous(PDL)
    program = tl.program_id(0)
    K: tl.constexpr = W[COLUMNS]
    N: tl.constexpr = (W[ROWS] + R - 1) // R
    if program < N:
        o_R, t_T = program * R + tl.arange(0, R), tl.arange(0, T)
        y_TR = normed_sums(x, added, norm, value, fine, coarse, o_R, tokens, eps, W, T, R, C, V, True, ADD)
        ok_TR = (t_T < tokens)[:, None] & (o_R < W[ROWS])[None, :]
        tl.store(logits + (t_T * W[ROWS])[:, None] + o_R[None, :], y_TR, mask=ok_TR)
        tl.debug_barrier()
        if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == N - 1:
            tl.debug_barrier()
            choose_experts(logits, weights, ids, tokens, experts, W[ROWS], T, TOP_K, BE, BK)
            tl.store(arrivals, 0)
    else:
        row, h_H = (program - N).to(tl.int64) * K, tl.arange(0, BLOCK)
        ok_H = h_H < K
        x_H = summed(x, added, row + h_H, ok_H, ADD)
        if ADD:
            tl.store(total + row + h_H, x_H.to(total.dtype.element_ty), mask=ok_H)
        factor_H = 1.0 + tl.load(norm + h_H, mask=ok_H, other=0).to(tl.float32)
        y_H = x_H * tl.rsqrt(tl.sum(x_H * x_H, 0) / K + eps) * factor_H
        tl.store(normed + row + h_H, y_H.to(normed.dtype.element_ty), mask=ok_H)


@triton.jit
def _gated(
    x, act, value, fine, coarse, expert, tile, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr
):
    """act = silu(gate) * up of R gate rows and their R up rows of one expert, for the one token at x."""
    K: tl.constexpr = W[COLUMNS]
    I: tl.constexpr = W[ROWS] // 2  # noqa: E741
    r_2R = tl.arange(0, 2 * R)
    i_2R = tile * R + r_2R % R
    ok_12R, o_12R = (i_2R < I)[None, :], (i_2R + r_2R // R * I)[None, :]
    e_12R = tl.zeros((1, 2 * R), tl.int32) + expert
    sums = tl.zeros((C, 1, 2 * R), tl.float32)
    for first in range(0, K // V, C):
        c_C = first + tl.arange(0, C)
        at = (c_C * V)[:, None, None] + tl.arange(0, V)[None, None, :]
        x_C1V = tl.load(x + at, mask=(c_C < K // V)[:, None, None], other=0).to(tl.float32)
        sums += chunk_sums(x_C1V, value, fine, e_12R, o_12R, ok_12R, c_C, V, W)
    both = tl.sum(sums, 0) * coarse_scale(coarse, e_12R, o_12R, ok_12R, W)
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
    """Program (pair, tile): the rows of one expert for one token; after the pairs come the tokens' shared experts."""
    after_previous(PDL)
    pair, tile = tl.program_id(0), tl.program_id(1)
    pairs = tokens * TOP_K
    if pair < pairs:
        if tile * R < W[ROWS] // 2:
            row = (pair // TOP_K).to(tl.int64) * W[COLUMNS]
            act_row = pair.to(tl.int64) * (W[ROWS] // 2)
            _gated(x + row, act + act_row, value, fine, coarse, tl.load(ids + pair), tile, W, R, C, V)
    else:
        if tile * RS < WS[ROWS] // 2:
            token = (pair - pairs).to(tl.int64)
            x_row, act_row = x + token * WS[COLUMNS], shared_act + token * (WS[ROWS] // 2)
            _gated(x_row, act_row, shared_value, shared_fine, shared_coarse, tile * 0, tile, WS, RS, CS, VS)


@triton.jit(do_not_specialize=["gate_stride"])
def down_kernel(
    act, shared_act, ids, weights, gate, gate_stride, out, value, fine, coarse, shared_value, shared_fine,
    shared_coarse, TOP_K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    V: tl.constexpr, WS: tl.constexpr, CS: tl.constexpr, VS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows of the weighted sum over a token's experts, which are read side by side, and of its shared expert."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    I: tl.constexpr = W[COLUMNS]  # noqa: E741
    IS: tl.constexpr = WS[COLUMNS]
    k_K = tl.arange(0, BK)
    o_R = tl.program_id(1) * R + tl.arange(0, R)
    o_1R, ok_1R = o_R[None, :], (o_R < W[ROWS])[None, :]
    shared_CR = tl.zeros((CS, 1, R), tl.float32)
    e_1R = tl.zeros((1, R), tl.int32)
    for first in range(0, IS // VS, CS):
        c_C = first + tl.arange(0, CS)
        at = row * IS + (c_C * VS)[:, None, None] + tl.arange(0, VS)[None, None, :]
        x_C1V = tl.load(shared_act + at, mask=(c_C < IS // VS)[:, None, None], other=0).to(tl.float32)
        shared_CR += chunk_sums(x_C1V, shared_value, shared_fine, e_1R, o_1R, ok_1R, c_C, VS, WS)
    y_1R = tl.sum(shared_CR, 0) * coarse_scale(shared_coarse, e_1R, o_1R, ok_1R, WS)
    y_1R *= tl.sigmoid(tl.load(gate + row * gate_stride).to(tl.float32))
    expert_K = tl.load(ids + row * TOP_K + k_K, mask=k_K < TOP_K, other=0).to(tl.int32)
    share_K = tl.load(weights + row * TOP_K + k_K, mask=k_K < TOP_K, other=0)
    e_K1, ok_KR = expert_K[:, None], (k_K < TOP_K)[:, None] & ok_1R
    sums_CKR = tl.zeros((C, BK, R), tl.float32)
    for first in range(0, I // V, C):
        c_C = first + tl.arange(0, C)
        at = (c_C * V)[:, None, None] + ((row * TOP_K + k_K) * I)[None, :, None] + tl.arange(0, V)[None, None, :]
        ok = (c_C < I // V)[:, None, None] & (k_K < TOP_K)[None, :, None]
        x_CKV = tl.load(act + at, mask=ok, other=0).to(tl.float32)
        sums_CKR += chunk_sums(x_CKV, value, fine, e_K1, o_1R, ok_KR, c_C, V, W)
    y_KR = tl.sum(sums_CKR, 0) * coarse_scale(coarse, e_K1, o_1R, ok_KR, W) * share_K[:, None]
    tl.store(out + row * W[ROWS] + o_1R, y_1R + tl.sum(y_KR, 0)[None, :], mask=ok_1R)


@triton.jit(do_not_specialize=["gate_stride"])
def gated_add_kernel(routed, shared, gate, gate_stride, hidden, BLOCK: tl.constexpr):
    """routed += sigmoid(gate) * shared, in place."""
    row = tl.program_id(0).to(tl.int64)
    h_H = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, ok_H = row * hidden + h_H, h_H < hidden
    share = tl.sigmoid(tl.load(gate + row * gate_stride).to(tl.float32))
    total_H = tl.load(routed + at, mask=ok_H, other=0) + share * tl.load(shared + at, mask=ok_H, other=0)
    tl.store(routed + at, total_H, mask=ok_H)
