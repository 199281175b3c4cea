"""The kernel of several linears for one token, and the parts of it that other kernels share.

The norm is folded in: sums are taken of weight * (1 + norm) * x, and of x * x, so that the norm's factor, which is
known last, goes onto the results. Programs of their own write what others do not need: nobody reads it in this launch.
Weights, the norm and the convolution's state are asked for before the kernel waits for the one before it: the state was
written steps ago, and each step begins with kernels that wait for all before them.
Legend: T tokens, H hidden, O out, R rows of a program, C chunks of V elements, K taps of a convolution.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

import triton
import triton.language as tl

from shardwise.kernels.linear.chunks import chunk_codes, chunks, code_sums
from shardwise.kernels.linear.tiles import COLUMNS, ROWS, coarse_scale
from shardwise.kernels.overlap import after_previous, let_next_come


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
    x, added, norm, value, fine, coarse, o_R, eps, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
    NORM: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """weight[o] @ norm(x + added) for one token -> [1, R] in fp32, by the layout W; x as it is without NORM.

    Waits for the kernel before it as soon as its first weights are on their way.
    """
    K: tl.constexpr = W[COLUMNS]
    N: tl.constexpr = K // V
    EVEN: tl.constexpr = N % C == 0
    c_C = tl.arange(0, C)
    o_1R, ok_1R, e_1R = o_R[None, :], (o_R < W[ROWS])[None, :], o_R[None, :] * 0
    raw, scales = chunk_codes(value, fine, e_1R, o_1R, ok_1R, c_C, V, EVEN and W[ROWS] % R == 0, W)
    scale_1R = coarse_scale(coarse, e_1R, o_1R, ok_1R, W)
    factor_CV = chunks(norm, c_C, V, K, EVEN) if NORM else 0
    after_previous(PDL)
    sums_C1R = tl.zeros((C, 1, R), tl.float32)
    squares_C = tl.zeros((C,), tl.float32)
    for first in range(0, N, C):
        c_C = first + tl.arange(0, C)
        x_CV = chunks(x, c_C, V, K, EVEN)
        if ADD:
            x_CV = (x_CV + chunks(added, c_C, V, K, EVEN)).to(x.dtype.element_ty).to(tl.float32)
        if NORM:
            squares_C += tl.sum(x_CV * x_CV, 1)
            x_CV *= 1.0 + factor_CV
        sums_C1R += code_sums(x_CV[:, None, :], raw, scales, V, W)
        if N > C:  # the next ones; nothing after the last
            raw, scales = chunk_codes(value, fine, e_1R, o_1R, ok_1R, c_C + C, V, False, W)
            factor_CV = chunks(norm, c_C + C, V, K, False) if NORM else 0
    y_1R = tl.sum(sums_C1R, 0) * scale_1R
    if NORM:
        y_1R *= tl.rsqrt(tl.sum(squares_C, 0) / K + eps)
    return y_1R


@triton.jit
def conv_window(
    t_T, o_R, ok_TR, conv, state, context, rows, tokens, ROW: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr
):
    """The last inputs [T, R, WINDOW] of one token of each of T sequences, their factors, and where the state is."""
    k_K = tl.arange(0, WINDOW)
    row_T = tl.load(rows + t_T, mask=t_T < tokens, other=0).to(tl.int64)
    carried_T = tl.load(context + t_T, mask=t_T < tokens, other=0) > 0
    at = ((row_T * ROW)[:, None] + o_R[None, :])[:, :, None] * (K - 1) + k_K[None, None, :]
    old_mask = (ok_TR & carried_T[:, None])[:, :, None] & (k_K < K - 1)[None, None, :]
    window = tl.load(state + at, mask=old_mask, other=0, cache_modifier=".cg").to(tl.float32)
    factor_at = (o_R * K)[:, None] + k_K[None, :]
    factor_RK = tl.load(conv + factor_at, mask=(o_R < ROW)[:, None] & (k_K < K)[None, :], other=0).to(tl.float32)
    return window, factor_RK, at


@triton.jit
def convolved(y_TR, ok_TR, window, factor_RK, at, state, K: tl.constexpr, WINDOW: tl.constexpr):
    """silu of the convolution of what conv_window found and y; the state moves on."""
    k_K = tl.arange(0, WINDOW)
    window = tl.where((k_K == K - 1)[None, None, :], y_TR[:, :, None], window)
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
    x, added, norm, value, fine, coarse, out, program, eps, conv, state, context, rows, W: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, TAPS: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    o_R, t_1 = program * R + tl.arange(0, R), tl.arange(0, 1)
    ok_1R = (o_R < W[ROWS])[None, :]
    if TAPS > 0:
        window, taps_RK, at = conv_window(t_1, o_R, ok_1R, conv, state, context, rows, 1, W[ROWS], TAPS, WINDOW)
    y_1R = normed_sums(x, added, norm, value, fine, coarse, o_R, eps, W, R, C, V, NORM, ADD, PDL)
    if TAPS > 0:
        rounded_1R = y_1R.to(out.dtype.element_ty).to(tl.float32)
        y_1R = convolved(rounded_1R, ok_1R, window, taps_RK, at, state, TAPS, WINDOW)
    tl.store(out + o_R[None, :], y_1R.to(out.dtype.element_ty), mask=ok_1R)


@triton.jit
def norm_linears_kernel(
    x, added, norm, total, eps, conv, state, context, rows, value0, fine0, coarse0, out0, value1, fine1, coarse1, out1,
    value2, fine2, coarse2, out2, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, R0: tl.constexpr,
    C0: tl.constexpr, V0: tl.constexpr, R1: tl.constexpr, C1: tl.constexpr, V1: tl.constexpr, R2: tl.constexpr,
    C2: tl.constexpr, V2: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, TAPS: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows of one of up to three weights (R1, R2: 0 without), read once, for one token."""
    let_next_come(PDL)
    program = tl.program_id(0)
    N0: tl.constexpr = (W0[ROWS] + R0 - 1) // R0
    N1: tl.constexpr = (W1[ROWS] + R1 - 1) // R1 if R1 > 0 else 0  # pyright: ignore[reportAssignmentType]
    N2: tl.constexpr = (W2[ROWS] + R2 - 1) // R2 if R2 > 0 else 0  # pyright: ignore[reportAssignmentType]
    if program < N0:
        _part(x, added, norm, value0, fine0, coarse0, out0, program, eps, conv, state, context, rows, W0, R0, C0, V0,
              NORM, ADD, TAPS, WINDOW, PDL)  # fmt: skip
    if R1 > 0:  # noqa: SIM102 (known when compiled)
        if (program >= N0) & (program < N0 + N1):
            _part(x, added, norm, value1, fine1, coarse1, out1, program - N0, eps, conv, state, context, rows, W1, R1,
                  C1, V1, NORM, ADD, 0, WINDOW, PDL)  # fmt: skip
    if R2 > 0:  # noqa: SIM102
        if (program >= N0 + N1) & (program < N0 + N1 + N2):
            _part(x, added, norm, value2, fine2, coarse2, out2, program - N0 - N1, eps, conv, state, context, rows, W2,
                  R2, C2, V2, NORM, ADD, 0, WINDOW, PDL)  # fmt: skip
    if ADD:  # noqa: SIM102
        if program == N0 + N1 + N2:
            after_previous(PDL)
            write_total(x, added, total, 1, W0[COLUMNS], BLOCK)
