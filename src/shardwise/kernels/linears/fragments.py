"""Several linears for 2 to some 32 tokens, with codes straight from memory: see linear/fragments.py.

Legend: T tokens, M rows of a program, K columns.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from shardwise.kernels import tuning
from shardwise.kernels.linear.fragments import (
    fits,
    fragment_bank,
    fragment_coarse,
    fragment_first,
    fragment_products,
    steps_of,
)
from shardwise.kernels.linear.layouts import sum_layout, tokens_layout, values_of
from shardwise.kernels.linear.tiles import COLUMNS, FP4_WORDS, PLAIN, ROWS, Operand, Target
from shardwise.kernels.overlap import after_previous, let_next_come

PARTS = 3  # weights of one launch at most
EARLY_TOKENS = gl.constexpr(8)  # beyond, a convolution's states are read before the kernel waits
FEW_ROWS, FEW_ROWS_TOKENS = 512, (3, 128)  # a plain weight of so few rows is read so for these tokens, if not joined
MOST_TOKENS = {1: 16, 3: 32}  # by kind: beyond, tiles in shared memory are faster; plain weights only beside others


class Split(NamedTuple):
    """A configuration: rows of a program, tokens, warps, and into how many parts these part `in`."""

    BM: int
    BT: int
    warps: int
    splits: int


@gluon.jit
def carried_inputs(o_M, t_T, ok_MT, tokens, conv, state, context, rows, ROW: gl.constexpr, TAPS: gl.constexpr):
    """Of the convolution, for one token of each of T sequences: where states are, what they hold, and the factors.

    All was written steps ago, so it need not wait for the kernel before; this processor's own cache may be older.
    """
    row_T = gl.load(rows + t_T, mask=t_T < tokens, other=0).to(gl.int64)
    carried_T = gl.load(context + t_T, mask=t_T < tokens, other=0) > 0
    at_MT = (gl.expand_dims(row_T * ROW, 0) + gl.expand_dims(o_M, 1)) * (TAPS - 1)
    old_MT = ok_MT & gl.expand_dims(carried_T, 0)
    old, factors = (), ()
    for k in gl.static_range(TAPS):
        factors = factors + (gl.load(conv + (o_M * TAPS + k), mask=o_M < ROW, other=0),)  # noqa: RUF005
    for k in gl.static_range(TAPS - 1):
        old = old + (gl.load(state + (at_MT + k), mask=old_MT, other=0, cache_modifier=".cg"),)  # noqa: RUF005
    return at_MT, old, factors


@gluon.jit
def convolved(y_MT, ok_MT, state, carried, TAPS: gl.constexpr):
    """silu of the convolution of the last inputs and y; the state moves on, each value one place down."""
    at_MT, old, factors = carried
    mixed = y_MT * gl.expand_dims(factors[TAPS - 1].to(gl.float32), 1)
    for k in gl.static_range(TAPS - 1):
        mixed += old[k].to(gl.float32) * gl.expand_dims(factors[k].to(gl.float32), 1)
        if k > 0:
            gl.store(state + (at_MT + k - 1), old[k], mask=ok_MT)
    gl.store(state + (at_MT + TAPS - 2), y_MT.to(state.dtype.element_ty), mask=ok_MT)
    return mixed / (1.0 + gl.exp(-mixed))


@gluon.jit
def fragment_part(
    x, value, fine, coarse, out, program, tokens, conv, state, context, rows, W: gl.constexpr, BM: gl.constexpr,
    BT: gl.constexpr, BK: gl.constexpr, RUN: gl.constexpr, TAPS: gl.constexpr, WARPS: gl.constexpr,
    SPLITS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """BM rows of one weight, for BT tokens."""
    SUM: gl.constexpr = sum_layout(W, WARPS, SPLITS, BM)
    o0, t0 = program * BM, gl.program_id(1) * BT
    at_T = t0 + gl.arange(0, BT, layout=tokens_layout(WARPS, SPLITS, RUN * values_of(W)))
    o_M = o0 + gl.arange(0, BM, layout=gl.SliceLayout(1, SUM))
    t_T = t0 + gl.arange(0, BT, layout=gl.SliceLayout(0, SUM))
    ok_MT = gl.expand_dims(t_T < tokens, 0) & gl.expand_dims(o_M < W[ROWS], 1)
    value, fine = fragment_bank(value, fine, program * 0, W)
    held = fragment_first(value, fine, o0, W[ROWS], 0, W, BM, BK, RUN, WARPS, SPLITS)
    scale_M = fragment_coarse(coarse, program * 0, o_M, o_M < W[ROWS], W)
    if TAPS and BT > EARLY_TOKENS:
        carried = carried_inputs(o_M, t_T, ok_MT, tokens, conv, state, context, rows, W[ROWS], TAPS)
    after_previous(PDL)
    let_next_come(PDL)
    y_MT, _, _ = fragment_products(
        x, gl.minimum(at_T, tokens - 1) * W[COLUMNS], at_T < tokens, value, fine, held, o0, False, W[ROWS], 0, W, BM,
        BT, BK, RUN, WARPS, SPLITS, False, 1,
    )  # fmt: skip
    y_MT = y_MT * gl.expand_dims(scale_M, 1)
    if TAPS and BT <= EARLY_TOKENS:
        carried = carried_inputs(o_M, t_T, ok_MT, tokens, conv, state, context, rows, W[ROWS], TAPS)
    if TAPS:
        y_MT = convolved(y_MT.to(out.dtype.element_ty).to(gl.float32), ok_MT, state, carried, TAPS)
    at_MT = gl.expand_dims(t_T * W[ROWS], 0) + gl.expand_dims(o_M, 1)
    gl.store(out + at_MT, y_MT.to(out.dtype.element_ty), mask=ok_MT)


@gluon.jit(do_not_specialize=["tokens"])
def fragment_linears_kernel(
    x, tokens, conv, state, context, rows, value0, fine0, coarse0, out0, value1, fine1, coarse1, out1, value2, fine2,
    coarse2, out2, W0: gl.constexpr, W1: gl.constexpr, W2: gl.constexpr, BT: gl.constexpr, M0: gl.constexpr,
    K0: gl.constexpr, RUN0: gl.constexpr, M1: gl.constexpr, K1: gl.constexpr, RUN1: gl.constexpr, M2: gl.constexpr,
    K2: gl.constexpr, RUN2: gl.constexpr, TAPS: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """M rows of one of up to three weights (M1, M2: 0 without), for BT tokens."""
    let_next_come(PDL)
    program = gl.program_id(0)
    N0: gl.constexpr = (W0[ROWS] + M0 - 1) // M0
    N1: gl.constexpr = (W1[ROWS] + M1 - 1) // M1 if M1 > 0 else 0
    if program < N0:
        fragment_part(x, value0, fine0, coarse0, out0, program, tokens, conv, state, context, rows, W0, M0, BT, K0,
                      RUN0, TAPS, WARPS, SPLITS, PDL)  # fmt: skip
    if M1 > 0:  # noqa: SIM102 (known when compiled)
        if (program >= N0) & (program < N0 + N1):
            fragment_part(x, value1, fine1, coarse1, out1, program - N0, tokens, conv, state, context, rows, W1, M1, BT,
                          K1, RUN1, 0, WARPS, SPLITS, PDL)  # fmt: skip
    if M2 > 0:  # noqa: SIM102
        if program >= N0 + N1:
            fragment_part(x, value2, fine2, coarse2, out2, program - N0 - N1, tokens, conv, state, context, rows, W2,
                          M2, BT, K2, RUN2, 0, WARPS, SPLITS, PDL)  # fmt: skip


def split_config(operands: Sequence[Operand], x_TH: torch.Tensor, target: Target) -> Split | None:
    """How these weights are to be multiplied with x, if by this kernel; one token, if measured; plain ones alone: of
    few rows, or measured."""
    tokens, kinds = x_TH.shape[0], {of.kind for of in operands}
    if not tokens or not all(fits(of, x_TH.dtype) for of in operands):
        return None
    found = tuning.choice(target.name, "split", [of.layout for of in operands], tokens)
    if found:
        return Split(*found)
    if tokens == 1:
        return None
    if few_plain_rows(operands):
        few = FEW_ROWS_TOKENS[0] <= tokens <= FEW_ROWS_TOKENS[1]
        return few_rows_rule(operands[0].layout[2], tokens) if few else None
    most = min((MOST_TOKENS.get(kind, 0) for kind in kinds - {0}), default=0)
    return split_rule(sum(of.layout[2] for of in operands), tokens) if tokens <= most else None


def split_rule(rows: int, tokens: int) -> Split:
    """Sixteen rows a program, and warps so that each processor has some 16. As measured on an H200."""
    splits = 8 if rows < 4096 else 4
    return Split(16, 8 if tokens <= 8 else 16, splits, splits)


def few_plain_rows(operands: Sequence[Operand]) -> bool:
    """Whether this is one plain weight of few rows, such as a router."""
    return len(operands) == 1 and operands[0].kind == PLAIN.value and operands[0].layout[2] <= FEW_ROWS


def few_rows_rule(rows: int, tokens: int) -> Split:
    """As measured on an H200 for 257 and for 64 rows of 2,048."""
    return Split(16, 8, 8, 8) if tokens <= 64 or rows <= 128 else Split(32, 8, 8, 4)


def split_constants(operands: Sequence[Operand], taps: int, config: Split) -> dict[str, Any]:
    """What the kernel is compiled for."""
    found: dict[str, Any] = {"BT": config.BT, "TAPS": taps, "WARPS": config.warps, "SPLITS": config.splits}
    for n in range(PARTS):
        of = operands[min(n, len(operands) - 1)]
        step, run = steps_of(of, 2 if of.kind == FP4_WORDS.value else 4)
        if few_plain_rows(operands) and of.layout[3] % (4 * step * config.splits) == 0:
            step *= 4  # few programs: the more is under way at once, the better
        found |= {f"W{n}": of.layout, f"M{n}": config.BM if n < len(operands) else 0}
        found |= {f"K{n}": step, f"RUN{n}": run}
    return found
