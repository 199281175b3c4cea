"""The kernel of several linears for one token, and the parts of it that other kernels share.

The norm is folded in: sums are taken of weight * (1 + norm) * x, and of x * x, so that the norm's factor, which is
known last, goes onto the results. Programs of their own write what others do not need: nobody reads it in this launch.
Legend: T tokens, H hidden, O out, R rows of a program, C chunks of V elements, K taps of a convolution.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

import triton
import triton.language as tl

from shardwise.kernels.linear.tiles import COLUMNS, ROWS, chunk_sums, coarse_scale
from shardwise.kernels.overlap import after_previous


@triton.jit
def summed(x, added, at, mask, ADD: tl.constexpr):
    """x + added in fp32, rounded to x's type as it is stored; x alone without ADD."""
    value = tl.load(x + at, mask=mask, other=0).to(tl.float32)
    if ADD:
        value += tl.load(added + at, mask=mask, other=0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def normed_sums(
    x, added, norm, value, fine, coarse, o_R, tokens, eps, W: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, V: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """weight[o] @ norm(x + added) for all T tokens -> [T, R] in fp32, by the layout W; x as it is without NORM."""
    K: tl.constexpr = W[COLUMNS]
    t_T, v_V = tl.arange(0, T), tl.arange(0, V)
    ok_1R, e_1R = (o_R < W[ROWS])[None, :], tl.zeros((1, R), tl.int32)
    sums_CTR = tl.zeros((C, T, R), tl.float32)
    squares_CT = tl.zeros((C, T), tl.float32)
    for first in range(0, K // V, C):
        c_C = first + tl.arange(0, C)
        at_CV = (c_C * V)[:, None] + v_V[None, :]
        at = (t_T * K)[None, :, None] + at_CV[:, None, :]
        ok_C = c_C < K // V
        x_CTV = summed(x, added, at, ok_C[:, None, None] & (t_T < tokens)[None, :, None], ADD)
        if NORM:
            factor_CV = 1.0 + tl.load(norm + at_CV, mask=ok_C[:, None], other=0).to(tl.float32)
            squares_CT += tl.sum(x_CTV * x_CTV, 2)
            x_CTV *= factor_CV[:, None, :]
        sums_CTR += chunk_sums(x_CTV, value, fine, e_1R, o_R[None, :], ok_1R, c_C, V, W)
    y_TR = tl.sum(sums_CTR, 0) * coarse_scale(coarse, e_1R, o_R[None, :], ok_1R, W)
    if NORM:
        y_TR *= tl.rsqrt(tl.sum(squares_CT, 0) / K + eps)[:, None]
    return y_TR


@triton.jit
def convolved(
    y_TR, t_T, o_R, ok_TR, conv, state, context, rows, tokens, ROW: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr
):
    """silu of the convolution of the last inputs and y, one token of each of T sequences; the state moves on."""
    k_K = tl.arange(0, WINDOW)
    row_T = tl.load(rows + t_T, mask=t_T < tokens, other=0).to(tl.int64)
    carried_T = tl.load(context + t_T, mask=t_T < tokens, other=0) > 0
    at = ((row_T * ROW)[:, None] + o_R[None, :])[:, :, None] * (K - 1) + k_K[None, None, :]
    old_mask = (ok_TR & carried_T[:, None])[:, :, None] & (k_K < K - 1)[None, None, :]
    window = tl.load(state + at, mask=old_mask, other=0).to(tl.float32)
    window = tl.where((k_K == K - 1)[None, None, :], y_TR[:, :, None], window)
    factor_at = (o_R * K)[:, None] + k_K[None, :]
    factor_RK = tl.load(conv + factor_at, mask=(o_R < ROW)[:, None] & (k_K < K)[None, :], other=0).to(tl.float32)
    mixed_TR = tl.sum(window * factor_RK[None, :, :], 2)
    # The values move one place down, perhaps between threads: all are read before any is written.
    tl.debug_barrier()
    new_mask = ok_TR[:, :, None] & ((k_K > 0) & (k_K < K))[None, None, :]
    tl.store(state + at - 1, window.to(state.dtype.element_ty), mask=new_mask)
    return mixed_TR * tl.sigmoid(mixed_TR)


@triton.jit
def write_total(x, added, total, tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """total = x + added, for all tokens."""
    for token in range(tokens):
        for first in range(0, WIDTH, BLOCK):
            h_H = first + tl.arange(0, BLOCK)
            ok_H = h_H < WIDTH
            value_H = summed(x, added, token * WIDTH + h_H, ok_H, True)
            tl.store(total + token * WIDTH + h_H, value_H.to(total.dtype.element_ty), mask=ok_H)


@triton.jit
def _part(
    x, added, norm, value, fine, coarse, out, program, tokens, eps, conv, state, context, rows, W: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    TAPS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    o_R, t_T = program * R + tl.arange(0, R), tl.arange(0, T)
    ok_TR = (t_T < tokens)[:, None] & (o_R < W[ROWS])[None, :]
    y_TR = normed_sums(x, added, norm, value, fine, coarse, o_R, tokens, eps, W, T, R, C, V, NORM, ADD)
    if TAPS > 0:
        rounded_TR = y_TR.to(out.dtype.element_ty).to(tl.float32)
        y_TR = convolved(rounded_TR, t_T, o_R, ok_TR, conv, state, context, rows, tokens, W[ROWS], TAPS, WINDOW)
    tl.store(out + (t_T * W[ROWS])[:, None] + o_R[None, :], y_TR.to(out.dtype.element_ty), mask=ok_TR)


@triton.jit(do_not_specialize=["tokens"])
def norm_linears_kernel(
    x, added, norm, total, tokens, eps, conv, state, context, rows, value0, fine0, coarse0, out0, value1, fine1,
    coarse1, out1, value2, fine2, coarse2, out2, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,
    T: tl.constexpr, R0: tl.constexpr, C0: tl.constexpr, V0: tl.constexpr, R1: tl.constexpr, C1: tl.constexpr,
    V1: tl.constexpr, R2: tl.constexpr, C2: tl.constexpr, V2: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    TAPS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows of one of up to three weights (R1, R2: 0 without), read once, for all of T tokens."""
    after_previous(PDL)
    program = tl.program_id(0)
    N0: tl.constexpr = (W0[ROWS] + R0 - 1) // R0
    N1: tl.constexpr = (W1[ROWS] + R1 - 1) // R1 if R1 > 0 else 0  # pyright: ignore[reportAssignmentType]
    N2: tl.constexpr = (W2[ROWS] + R2 - 1) // R2 if R2 > 0 else 0  # pyright: ignore[reportAssignmentType]
    if program < N0:
        _part(x, added, norm, value0, fine0, coarse0, out0, program, tokens, eps, conv, state, context, rows, W0, T,
              R0, C0, V0, NORM, ADD, TAPS, WINDOW)  # fmt: skip
    if R1 > 0:  # noqa: SIM102 (known when compiled)
        if (program >= N0) & (program < N0 + N1):
            _part(x, added, norm, value1, fine1, coarse1, out1, program - N0, tokens, eps, conv, state, context, rows,
                  W1, T, R1, C1, V1, NORM, ADD, 0, WINDOW)  # fmt: skip
    if R2 > 0:  # noqa: SIM102
        if (program >= N0 + N1) & (program < N0 + N1 + N2):
            _part(x, added, norm, value2, fine2, coarse2, out2, program - N0 - N1, tokens, eps, conv, state, context,
                  rows, W2, T, R2, C2, V2, NORM, ADD, 0, WINDOW)  # fmt: skip
    if ADD:  # noqa: SIM102
        if program == N0 + N1 + N2:
            write_total(x, added, total, tokens, W0[COLUMNS], BLOCK)
