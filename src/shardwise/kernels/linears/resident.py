"""Several linears for 2 to 16 tokens on Hopper: each processor asks for its part of the weights before it waits.

A program a processor, of some tiles of rows one after another. Words go to shared memory, as many as fit there at once,
from when the kernel before still runs; from there each thread takes those that it multiplies (see linear/fragments.py),
and the next ones take their place. The input stays in registers, each warp having its part of `in`.

Legend: T tokens, M rows of a tile, K columns, S warps and parts of `in`, N words of a step.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy
from triton.runtime.jit import constexpr_function

from shardwise.kernels import tuning
from shardwise.kernels.linear.fragments import (
    _input,
    _places,
    _range,
    _step,
    fits,
    fragment_coarse,
    split_sum,
    steps_of,
    words,
)
from shardwise.kernels.linear.layouts import product_layout, sum_layout, tokens_layout, values_of, word_layout
from shardwise.kernels.linear.tiles import COLUMNS, FINE, FINE_COLUMNS, FINE_O, FP4_WORDS, KIND, ROWS, Operand, Target
from shardwise.kernels.linears.fragments import _carried, _convolved, _part
from shardwise.kernels.linears.reference import Conv
from shardwise.kernels.overlap import after_previous, launch, let_next_come

# Triton 3.6 and 3.9 know it by different names.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
CAPABILITY = 9, 0
FEW_ROWS, FEW_BM = 512, 16  # most rows of a weight beside others, and those of a program for it


class Resident(NamedTuple):
    """A configuration: rows of a tile, tokens, warps, tiles of a program, steps that are held at a time, and the most
    registers of a thread (0: as many as there are), so that the next kernel finds room beside it."""

    BM: int
    BT: int
    warps: int
    tiles: int
    slots: int
    registers: int = 0


@constexpr_function
def _copy_layout(WARPS):
    """Of words [S, M, N] on their way to shared memory: 16 bytes a thread, 128 of a row."""
    return gl.BlockedLayout([1, 1, 4], [1, 4, 8], [WARPS, 1, 1], [2, 1, 0])


@constexpr_function
def _shared_layout():
    """Two rows of 64 bytes each lie side by side for the threads that read at the same time."""
    return gl.SwizzledSharedLayout(16, 1, 2, [2, 1, 0])


@constexpr_function
def _behind(n, SLOTS, ALL):
    """How many steps behind step n have been asked for when it is waited for."""
    return min(ALL, n + SLOTS) - n - 1


@gluon.jit
def _ask(slot, value, o0, step: gl.constexpr, away, W: gl.constexpr, BM: gl.constexpr, N: gl.constexpr,
         WARPS: gl.constexpr):  # fmt: skip
    """Words of a step of a tile on their way to shared memory, as one group of copies."""
    LAYOUT: gl.constexpr = _copy_layout(WARPS)
    WIDTH: gl.constexpr = W[COLUMNS] // values_of(W)
    o_M, n_N = o0 + _range(BM, 1, LAYOUT), _range(WARPS, 0, LAYOUT) * (WIDTH // WARPS) + _range(N, 2, LAYOUT)
    first = gl.multiple_of(value + away, 16)
    copy_to_shared(slot, first + (o_M * WIDTH + (n_N + step * N)))
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["tokens"])
def resident_linears_kernel(
    x, tokens, conv, state, context, rows, value0, fine0, coarse0, out0, value1, fine1, coarse1, value2, fine2, coarse2,
    out2, W0: gl.constexpr, R1: gl.constexpr, W2: gl.constexpr, M2: gl.constexpr, K2: gl.constexpr, RUN2: gl.constexpr,
    BM: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, RUN: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
    TAPS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out0 [T, ROWS], behind it [T, R1] of a weight like the first (R1: 0 without), and out2 of a third (M2: so)."""
    let_next_come(PDL)
    program = gl.program_id(0)
    COUNT: gl.constexpr = (W0[ROWS] + R1) // BM
    PROGRAMS: gl.constexpr = (COUNT + TILES - 1) // TILES
    if program < PROGRAMS:
        _tiles(x, tokens, conv, state, context, rows, value0, fine0, coarse0, out0, value1, fine1, coarse1,
               program * TILES, COUNT, W0, R1, BM, BT, BK, RUN, TILES, SLOTS, TAPS, WARPS, PDL)  # fmt: skip
    if M2 > 0:  # noqa: SIM102 (known when compiled)
        if program >= PROGRAMS:
            _part(x, value2, fine2, coarse2, out2, program - PROGRAMS, tokens, conv, state, context, rows, W2, M2, BT,
                  K2, RUN2, 0, WARPS, WARPS, PDL)  # fmt: skip


@gluon.jit
def _away(first, second, rows: gl.constexpr, bytes_: gl.constexpr):
    """Elements from `first` to `second`, so that rows of both count on."""
    return (second.to(gl.int64) - first.to(gl.int64)) // bytes_ - rows


@gluon.jit
def _tiles(
    x, tokens, conv, state, context, rows, value0, fine0, coarse0, out0, value1, fine1, coarse1, tile,
    COUNT: gl.constexpr, W: gl.constexpr, R1: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr,
    RUN: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, TAPS: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """TILES tiles of rows of the two weights, from `tile` on."""
    VALUES: gl.constexpr = values_of(W)
    K: gl.constexpr = W[COLUMNS]
    STEPS: gl.constexpr = K // (BK * WARPS)
    N: gl.constexpr = BK // VALUES
    ALL: gl.constexpr = TILES * STEPS
    FIRST: gl.constexpr = W[ROWS] // BM  # tiles of the first weight
    GRAIN: gl.constexpr = W[FINE] if W[FINE] else K
    PRODUCT: gl.constexpr = product_layout(WARPS, WARPS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, RUN * VALUES)
    LAID: gl.constexpr = word_layout(BM, N, RUN, 0, WARPS, WARPS)
    SUM: gl.constexpr = sum_layout(WARPS, WARPS, BM)
    away, fine_away = tile * 0, tile * 0
    if R1:
        away = _away(value0, value1, W[ROWS] * (K // VALUES), 4)
        if W[FINE]:
            SIZE: gl.constexpr = fine0.dtype.element_ty.primitive_bitwidth // 8
            BLOCKS: gl.constexpr = W[ROWS] // W[FINE_O] if W[FINE_O] else 0
            fine_away = _away(fine0, fine1, BLOCKS * W[FINE_COLUMNS], SIZE)
    slots = ()
    for _ in gl.static_range(SLOTS):
        slots = slots + (gl.allocate_shared_memory(gl.int32, [WARPS, BM, N], _shared_layout()),)  # noqa: RUF005
    for n in gl.static_range(SLOTS):
        at = gl.minimum(tile + n // STEPS, COUNT - 1)
        _ask(slots[n], value0, at * BM, n % STEPS, gl.where(at < FIRST, 0, away) if R1 else 0, W, BM, N, WARPS)
    scales = ()
    for n in gl.static_range(ALL):
        at = gl.minimum(tile + n // STEPS, COUNT - 1)
        if W[FINE]:
            places = _places(at * BM, W[ROWS], 0, W, BM, BK, RUN, WARPS, WARPS)
            there = fine0 + (gl.where(at < FIRST, 0, fine_away) if R1 else 0)
            scales = scales + (gl.load(there + (places[3] + n % STEPS * BK // GRAIN)),)  # noqa: RUF005
        else:
            scales = scales + (0,)  # noqa: RUF005
    o_M, t_T = gl.arange(0, BM, layout=gl.SliceLayout(1, SUM)), gl.arange(0, BT, layout=gl.SliceLayout(0, SUM))
    carried = ()
    for n in gl.static_range(TILES if TAPS else 0):
        at = tile + n
        ok_MT = gl.expand_dims((t_T < tokens) & (at < FIRST), 0) & gl.expand_dims(o_M >= 0, 1)
        here = gl.minimum(at, FIRST - 1) * BM + o_M
        carried = carried + (  # noqa: RUF005
            _carried(here, t_T, ok_MT, tokens, conv, state, context, rows, W[ROWS], TAPS),
        )
    after_previous(PDL)
    at_T = gl.arange(0, BT, layout=tokens_layout(WARPS, WARPS, RUN * VALUES))
    k_K = _range(WARPS, 0, RIGHT) * (K // WARPS) + _range(BK, 1, RIGHT)
    x_at = gl.expand_dims(gl.expand_dims(gl.minimum(at_T, tokens - 1) * K, 0), 0) + k_K
    inputs = ()
    for n in gl.static_range(STEPS):
        found = _input(x, x_at, k_K, n * BK, True, VALUES, K, True, WARPS, BT, BK, RIGHT)
        inputs = inputs + (found,)  # noqa: RUF005
    acc = gl.zeros((WARPS, BM, BT), gl.float32, layout=PRODUCT)
    for n in gl.static_range(ALL):
        async_copy.wait_group(_behind(n, SLOTS, ALL))
        word = slots[n % SLOTS].load(LAID)
        if n + SLOTS < ALL:
            later = gl.minimum(tile + (n + SLOTS) // STEPS, COUNT - 1)
            there = gl.where(later < FIRST, 0, away) if R1 else 0
            _ask(slots[n % SLOTS], value0, later * BM, (n + SLOTS) % STEPS, there, W, BM, N, WARPS)
        acc = _step(acc, word, scales[n], inputs[n % STEPS], W, BM, BT, BK, RUN, WARPS, WARPS)
        if n % STEPS == STEPS - 1:
            y_MT = split_sum(acc, WARPS, WARPS, BM)
            _finish(y_MT, tile + n // STEPS, tokens, coarse0, coarse1, out0, state, carried[n // STEPS] if TAPS else 0,
                    COUNT, W, R1, BM, BT, TAPS, SUM)  # fmt: skip
            acc = gl.zeros((WARPS, BM, BT), gl.float32, layout=PRODUCT)


@gluon.jit
def _finish(
    y_MT, tile, tokens, coarse0, coarse1, out, state, carried, COUNT: gl.constexpr, W: gl.constexpr, R1: gl.constexpr,
    BM: gl.constexpr, BT: gl.constexpr, TAPS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The sums of a tile times coarse scales, through the convolution, if they are the first weight's, to `out`."""
    o_M, t_T = gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT)), gl.arange(0, BT, layout=gl.SliceLayout(0, LAYOUT))
    o_M, first = tile * BM + o_M, tile < W[ROWS] // BM
    ok_MT = gl.expand_dims((t_T < tokens) & (tile < COUNT), 0) & gl.expand_dims(o_M >= 0, 1)
    scale_M = fragment_coarse(coarse0, tile * 0, gl.where(first, o_M, 0), o_M >= 0, W)
    if R1:
        other_M = fragment_coarse(coarse1, tile * 0, gl.where(first, 0, o_M - W[ROWS]), o_M >= 0, W)
        scale_M = gl.where(first, scale_M, other_M)
    if W[KIND] >= FP4_WORDS:
        y_MT = y_MT * 128.0
    y_MT = y_MT * gl.expand_dims(scale_M, 1)
    if TAPS:
        rounded = y_MT.to(out.dtype.element_ty).to(gl.float32)
        y_MT = gl.where(first, _convolved(rounded, ok_MT & first, state, carried, TAPS), y_MT)
    width, beyond = W[ROWS], 0
    if R1:
        width, beyond = gl.where(first, W[ROWS], R1), gl.where(first, 0, (tokens - 1) * W[ROWS])
    to = beyond + gl.expand_dims(t_T * width, 0) + gl.expand_dims(o_M, 1)
    gl.store(out + to, y_MT.to(out.dtype.element_ty), mask=ok_MT)


def resident_config(
    operands: Sequence[Operand], tokens: int, dtype: torch.dtype, dtypes: Sequence[torch.dtype], target: Target
) -> Resident | None:
    """How these weights are to be multiplied by this kernel with an input of `dtype`, if that was measured best."""
    found = tuning.choice(target.name, "resident", [of.layout for of in operands], tokens)
    if not found or not possible(operands, tokens, dtype, dtypes, Resident(*found)):
        return None
    return Resident(*found)


def possible(
    operands: Sequence[Operand], tokens: int, dtype: torch.dtype, dtypes: Sequence[torch.dtype], config: Resident
) -> bool:
    """Whether this kernel can multiply such weights with such an input, on their device: one, or two of one kind, and
    perhaps a plain one of few rows."""
    if not 0 < tokens <= config.BT or not all(fits(of, dtype) for of in operands):
        return False
    if torch.cuda.get_device_capability(operands[0].value.device) != CAPABILITY:
        return False
    large, few = parted(operands)
    if not 0 < len(large) <= 2 or len(few) > 1 or len(large) + len(few) < len(operands):
        return False
    if few and (few[0].kind or few[0].layout[2] > FEW_ROWS):
        return False
    step, _ = steps_of(large[0])
    rows, columns, fine, fine_rows = large[0].layout[2:6]
    same = [(of.layout[:2], of.layout[3:6], of.layout[7:10], of.layout[11], of.fine.dtype) for of in large]
    alike = len(set(same)) == len(set(dtypes[: len(large)])) == 1
    whole = columns % (step * config.warps) == 0 and (not fine or columns // config.warps % fine == 0)
    tiled = all(of.layout[2] % config.BM == 0 and of.value.data_ptr() % 16 == 0 for of in large)
    return alike and whole and tiled and (len(large) == 1 or not fine_rows or rows % fine_rows == 0)


def parted(operands: Sequence[Operand]) -> tuple[Sequence[Operand], Sequence[Operand]]:
    """Weights of many rows, and those of few behind them."""
    many = max(1, sum(of.layout[2] > FEW_ROWS for of in operands))
    return operands[:many], operands[many:]


def resident_constants(operands: Sequence[Operand], taps: int, config: Resident) -> dict[str, Any]:
    """What the kernel is compiled for."""
    large, few = parted(operands)
    step, run = steps_of(large[0])
    found = {"W0": large[0].layout, "R1": large[1].layout[2] if len(large) > 1 else 0}
    third = few[0] if few else large[0]
    few_step, few_run = steps_of(third)
    if few and third.layout[3] % (4 * few_step * config.warps) == 0:
        few_step *= 4  # all of it is then under way before the kernel waits
    found |= {"W2": third.layout, "M2": FEW_BM if few else 0, "K2": few_step, "RUN2": few_run}
    found |= {"BM": config.BM, "BT": config.BT, "BK": step, "RUN": run, "TILES": config.tiles, "SLOTS": config.slots}
    return found | {"TAPS": taps, "WARPS": config.warps}


def resident_linears(
    x_TH: torch.Tensor,
    operands: Sequence[Operand],
    dtypes: Sequence[torch.dtype],
    conv: Conv | None,
    config: Resident,
    pdl: bool,
) -> list[torch.Tensor]:
    """All in one launch; x is contiguous."""
    tokens, (large, few) = x_TH.shape[0], parted(operands)
    sizes = [tokens * of.layout[2] for of in large]
    both = torch.empty(sum(sizes), dtype=dtypes[0], device=x_TH.device)
    outputs = [part.view(tokens, -1) for part in both.split(sizes)]
    outputs += [torch.empty((tokens, of.layout[2]), dtype=dtypes[-1], device=x_TH.device) for of in few]
    taps, convolution = 0, (x_TH,) * 4
    if conv is not None:
        taps = conv.weight_CW.shape[1]
        convolution = conv.weight_CW, conv.state_RCW1, conv.seqs.context_S, conv.seqs.state_rows_S
    programs = triton.cdiv(sum(of.layout[2] for of in large) // config.BM, config.tiles)
    programs += sum(triton.cdiv(of.layout[2], FEW_BM) for of in few)
    resident_linears_kernel[(programs,)](
        x_TH, tokens, *convolution, *words(large[0]), both, *words(large[-1]), *words((few or large)[-1]), outputs[-1],
        **resident_constants(operands, taps, config), **launch(pdl), num_warps=config.warps,
        maxnreg=config.registers or None,
    )  # fmt: skip
    return outputs
