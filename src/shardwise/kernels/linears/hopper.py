"""FP8 weights of one input for 2 to 8 tokens on Hopper: see linear/warpgroups.py.

A program has some rows of a weight, perhaps of a part of its columns, and asks for what it can hold of them before it
waits for the kernel before it. A row goes in two halves, side by side: a program then has half as many rows as its
instructions do, and all of a weight's programs fit on the processors at once.

Legend: T tokens, M rows of a program, K columns, S parts of the sum.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.hopper import SHARED_KIB
from shardwise.kernels.linear.fragments import fits as fragment_fits
from shardwise.kernels.linear.fragments import fragment_coarse, steps_of
from shardwise.kernels.linear.fragments import words as fragment_words
from shardwise.kernels.linear.geometry import Case, case
from shardwise.kernels.linear.tiles import COLUMNS, FINE, FP8, PLAIN, ROWS, Operand
from shardwise.kernels.linear.warpgroups import (
    FLAT,
    STEP_BYTES,
    WARPS,
    ask_first,
    fits,
    held_steps,
    input_rows,
    load_inputs,
    load_scales,
    places,
    products,
    store_inputs,
    words,
)
from shardwise.kernels.linears.fragments import carried_inputs, convolved, fragment_part
from shardwise.kernels.linears.reference import Conv
from shardwise.kernels.overlap import after_previous, launch, let_next_come

TILE, HALF = gl.constexpr(64), gl.constexpr(32)  # rows of instructions, and of a program
FEW_ROWS, FEW_BM = 512, 16  # most rows of a plain weight beside the others, and those of a program for it


class Rows(NamedTuple):
    """A configuration: tokens, parts of the columns, and steps of 128 columns that are held at a time."""

    BT: int
    parts: int
    slots: int


@gluon.jit
def _part(
    x, value, fine, coarse, out, tile, part, tokens, conv, state, context, rows, W: gl.constexpr, BT: gl.constexpr,
    PARTS: gl.constexpr, SLOTS: gl.constexpr, TAPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """HALF rows of a weight over a part of its columns: out [S, T, O]."""
    SPAN: gl.constexpr = W[COLUMNS] // PARTS
    a_s, x_s = places(SLOTS, TILE, W), places(SPAN // 2 // 128, 2 * input_rows(W, BT), W)
    back_s = gl.allocate_shared_memory(gl.float32, [BT], FLAT)
    o0, k0 = tile * HALF, part * SPAN
    scales = load_scales(fine, o0, 0, W, TILE, BT, k0, SPAN, 2)
    at_M1 = ask_first(a_s, value, o0, 0, W, TILE, SLOTS, k0, SPAN, 2)
    after_previous(PDL)
    parts = load_inputs(x_s, None, 0, x, x, tokens, W, BT, False, k0, SPAN)
    store_inputs(x_s, back_s, parts, tokens, W, BT, False, SPAN, 2)
    y_MT = products(a_s, x_s, back_s, value, scales, at_M1, W, TILE, BT, SLOTS, SPAN, 2)
    LAYOUT: gl.constexpr = y_MT.type.layout
    o_M, t_T = (
        o0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT)),
        gl.arange(0, BT, layout=gl.SliceLayout(0, LAYOUT)),
    )
    y_MT *= gl.expand_dims(fragment_coarse(coarse, tile * 0, o_M, o_M < W[ROWS], W), 1)
    ok_MT = gl.expand_dims(t_T < tokens, 0) & gl.expand_dims(o_M < W[ROWS], 1)
    if TAPS:
        carried = carried_inputs(o_M, t_T, ok_MT, tokens, conv, state, context, rows, W[ROWS], TAPS)
        y_MT = convolved(y_MT.to(out.dtype.element_ty).to(gl.float32), ok_MT, state, carried, TAPS)
    at_MT = gl.expand_dims((part * tokens + t_T) * W[ROWS], 0) + gl.expand_dims(o_M, 1)
    gl.store(out + at_MT, y_MT.to(out.dtype.element_ty), mask=ok_MT)


@gluon.jit(do_not_specialize=["tokens"])
def hopper_linears_kernel(
    x, tokens, conv, state, context, rows, value0, fine0, coarse0, out0, value1, fine1, coarse1, out1, value2, fine2,
    coarse2, out2, W0: gl.constexpr, W1: gl.constexpr, W2: gl.constexpr, BT: gl.constexpr, PARTS: gl.constexpr,
    SLOTS: gl.constexpr, LARGE: gl.constexpr, M2: gl.constexpr, K2: gl.constexpr, RUN2: gl.constexpr,
    TAPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Of one or two weights (LARGE), and of a plain one of few rows (M2: rows of a program for it; 0: none)."""
    let_next_come(PDL)
    program = gl.program_id(0)
    N0: gl.constexpr = W0[ROWS] // HALF
    N1: gl.constexpr = W1[ROWS] // HALF if LARGE > 1 else 0
    if program < N0:
        _part(x, value0, fine0, coarse0, out0, program, gl.program_id(1), tokens, conv, state, context, rows, W0, BT,
              PARTS, SLOTS, TAPS, PDL)  # fmt: skip
    if LARGE > 1:  # noqa: SIM102 (known when compiled)
        if (program >= N0) & (program < N0 + N1):
            _part(x, value1, fine1, coarse1, out1, program - N0, gl.program_id(1), tokens, conv, state, context, rows,
                  W1, BT, PARTS, SLOTS, 0, PDL)  # fmt: skip
    if M2 > 0:  # noqa: SIM102
        if program >= N0 + N1:
            fragment_part(x, value2, fine2, coarse2, out2, program - N0 - N1, tokens, conv, state, context, rows, W2,
                          M2, max(BT, 8), K2, RUN2, 0, WARPS, WARPS, PDL)  # fmt: skip


def rows_config(operands: Sequence[Operand], x_TH: torch.Tensor, gpu: str) -> Rows | None:
    """How these weights are to be multiplied with x by this kernel, if they are to be."""
    if not operands[0].layout[FINE.value]:
        return None  # measured beside experts in FP8 with scales of blocks; others go through the first-level cache
    found = tuning.choice(gpu, "rows", [of.layout for of in operands], x_TH.shape[0])
    return Rows(*found) if found and possible(operands, x_TH, Rows(*found)) else None


def _large(operands: Sequence[Operand]) -> int:
    return sum(of.kind == FP8.value for of in operands)


def possible(operands: Sequence[Operand], x_TH: torch.Tensor, config: Rows) -> bool:
    """Whether this kernel can multiply such weights with such an input, on this device: one or two in FP8, and perhaps
    a plain one of few rows."""
    large = _large(operands)
    few, columns = operands[large:], operands[0].layout[COLUMNS.value]
    if not 0 < x_TH.shape[0] <= config.BT or not 0 < large <= 2 or len(few) > 1 or (few and config.parts > 1):
        return False
    span = columns // config.parts
    grains = all(not of.layout[4] or (span // 2) % of.layout[4] == 0 for of in operands[:large])
    whole = columns % config.parts == 0 and span % 256 == 0 and grains and operands[0].kind == FP8.value
    small = all(
        of.kind == PLAIN.value and fragment_fits(of, x_TH.dtype) and of.layout[ROWS.value] <= FEW_ROWS for of in few
    )
    if not whole or not small or not all(fits(of, x_TH.dtype, HALF.value) for of in operands[:large]):
        return False
    held = held_steps(operands[0].layout, config.slots, 2 * config.parts)
    rows = TILE.value * held + 2 * 2 * config.BT * (span // 256)  # of weights, and of both halves' inputs
    return STEP_BYTES.value * rows + 4 * config.BT + 1024 <= SHARED_KIB * 1024


def _constants(operands: Sequence[Operand], taps: int, config: Rows) -> dict[str, Any]:
    """What the kernel is compiled for."""
    large, last = _large(operands), operands[-1]
    few = len(operands) > large
    step, run = steps_of(last) if few else (0, 0)
    if few and last.layout[COLUMNS.value] % (4 * step * WARPS.value) == 0:
        step *= 4  # few programs: the more is under way at once, the better
    layouts = {"W0": operands[0].layout, "W1": operands[min(1, large - 1)].layout, "W2": last.layout}
    return layouts | {
        "BT": config.BT, "PARTS": config.parts, "LARGE": large,
        "SLOTS": held_steps(operands[0].layout, config.slots, 2 * config.parts),
        "M2": FEW_BM if few else 0, "K2": step, "RUN2": run, "TAPS": taps,
    }  # fmt: skip


def hopper_linears(
    x_TH: torch.Tensor,
    operands: Sequence[Operand],
    dtypes: Sequence[torch.dtype],
    conv: Conv | None,
    config: Rows,
    pdl: bool,
) -> list[torch.Tensor]:
    """All in one launch; x is contiguous. Of several parts, one weight's: [S, T, O]."""
    tokens, large = x_TH.shape[0], _large(operands)
    outputs = [
        torch.empty((config.parts * tokens, of.layout[ROWS.value]), dtype=dtype, device=x_TH.device)
        for of, dtype in zip(operands, dtypes, strict=True)
    ]
    tensors = [words(of) for of in operands[:large]] + [fragment_words(of) for of in operands[large:]]
    taps, convolution = (conv.weight_CW.shape[1], conv.tensors()) if conv else (0, (x_TH,) * 4)
    chosen = (0, min(1, large - 1), len(operands) - 1)
    programs = sum(of.layout[ROWS.value] // HALF.value for of in operands[:large])
    programs += sum(triton.cdiv(of.layout[ROWS.value], FEW_BM) for of in operands[large:])
    hopper_linears_kernel[(programs, config.parts)](
        x_TH, tokens, *convolution, *(each for n in chosen for each in (*tensors[n], outputs[n])),
        **_constants(operands, taps, config), **launch(pdl), num_warps=WARPS.value,
    )  # fmt: skip
    return [out.view(config.parts, tokens, -1) for out in outputs] if config.parts > 1 else outputs


def compile_cases() -> Iterator[CompileCase]:
    """The projections of 35B-A3B, where there are choices for them."""
    few = case(64, 2048, "bf16", True)
    delta = case(8192, 2048, "fp8_block", True), case(4096, 2048, "fp8_block", True), few
    others = ((case(9216, 2048, "fp8_block", True),), (case(2048, 4096, "fp8_block", True),))
    for name, _ in tuning.measured():
        for cases, taps in ((delta, 4), *((each, 0) for each in others)):
            found = tuning.choice(name, "rows", [each.of.layout for each in cases], 4)
            if found:
                yield _case(cases, taps, Rows(*found))


def _case(cases: Sequence[Case], taps: int, config: Rows) -> CompileCase:
    operands = [each.of for each in cases]
    large = _large(operands)
    types = dict.fromkeys(("x", "conv", "state"), "*bf16") | dict.fromkeys(("context", "rows"), "*i32")
    for n, at in enumerate((0, min(1, large - 1), len(operands) - 1)):
        types |= {f"{name}{n}": kind for name, kind in cases[at].types.items()}
        types |= {f"value{n}": "*fp8e4nv" if operands[at].kind else "*i32"}
        types |= {f"out{n}": "*fp32" if config.parts > 1 or not operands[at].kind else "*bf16"}
    constexprs = _constants(operands, taps, config) | {"PDL": True}
    signed = signature(hopper_linears_kernel, constexprs, types)
    return CompileCase(hopper_linears_kernel, signed, constexprs, WARPS.value, 1, SHARED_KIB * 1024)
