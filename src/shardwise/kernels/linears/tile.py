"""The kernel of several linears for 2 to some 16 tokens, by matrix units: few rows a program, many columns under way.

What limits these sizes is the weights' way from memory, so the tiles are flat: with 16 tokens the matrix units idle,
but each program has several steps of many columns in flight. A norm folded in as in stream.py is three times slower.
Legend: T tokens, K columns, O rows of a program.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from shardwise.kernels.linear.tiles import COLUMNS, ROWS, ask_for_rows, coarse_scale, tile_product
from shardwise.kernels.linears.stream import conv_window, convolved
from shardwise.kernels.overlap import after_previous, let_next_come


@triton.jit
def _tile_part(
    x, value, fine, coarse, out, program, tokens, conv, state, context, rows, W: tl.constexpr, BT: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, TAPS: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = W[COLUMNS]
    o_O, t_T = program * BO + tl.arange(0, BO), tl.program_id(1) * BT + tl.arange(0, BT)
    ok_O, ok_T, e = o_O < W[ROWS], t_T < tokens, program * 0
    ask_for_rows(value, e, o_O, ok_O, W, PDL)
    after_previous(PDL)
    acc_OT = tile_product(x, t_T * K, ok_T, value, fine, e, o_O, ok_O, 0, K, BK, W)
    y_OT = acc_OT * coarse_scale(coarse, e, o_O, ok_O, W)[:, None]
    if TAPS > 0:
        rounded_TO = tl.trans(y_OT.to(out.dtype.element_ty).to(tl.float32))
        ok_TO = ok_T[:, None] & ok_O[None, :]
        window, taps_OK, at = conv_window(t_T, o_O, ok_TO, conv, state, context, rows, tokens, W[ROWS], TAPS, WINDOW)
        y_OT = tl.trans(convolved(rounded_TO, ok_TO, window, taps_OK, at, state, TAPS, WINDOW))
    at = (t_T * W[ROWS])[None, :] + o_O[:, None]
    tl.store(out + at, y_OT.to(out.dtype.element_ty), mask=ok_O[:, None] & ok_T[None, :])


@triton.jit(do_not_specialize=["tokens"])
def tile_linears_kernel(
    x, tokens, conv, state, context, rows, value0, fine0, coarse0, out0, value1, fine1, coarse1, out1, value2, fine2,
    coarse2, out2, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, T: tl.constexpr, R0: tl.constexpr,
    C0: tl.constexpr, R1: tl.constexpr, C1: tl.constexpr, R2: tl.constexpr, C2: tl.constexpr, TAPS: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows of one of up to three weights (R1, R2: 0 without), C columns a step, for T tokens."""
    let_next_come(PDL)
    program = tl.program_id(0)
    N0: tl.constexpr = (W0[ROWS] + R0 - 1) // R0
    N1: tl.constexpr = (W1[ROWS] + R1 - 1) // R1 if R1 > 0 else 0  # pyright: ignore[reportAssignmentType]
    if program < N0:
        _tile_part(x, value0, fine0, coarse0, out0, program, tokens, conv, state, context, rows, W0, T, R0, C0, TAPS,
                   WINDOW, PDL)  # fmt: skip
    if R1 > 0:  # noqa: SIM102 (known when compiled)
        if (program >= N0) & (program < N0 + N1):
            _tile_part(x, value1, fine1, coarse1, out1, program - N0, tokens, conv, state, context, rows, W1, T, R1, C1,
                       0, WINDOW, PDL)  # fmt: skip
    if R2 > 0:  # noqa: SIM102
        if program >= N0 + N1:
            _tile_part(x, value2, fine2, coarse2, out2, program - N0 - N1, tokens, conv, state, context, rows, W2, T,
                       R2, C2, 0, WINDOW, PDL)  # fmt: skip
