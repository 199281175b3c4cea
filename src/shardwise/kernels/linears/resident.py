"""Plain weights of one input for 2 to 16 tokens on Hopper: each processor asks for its part before it waits.

A program a processor, of some tiles of rows one after another. Words go to shared memory, as many as fit there at once,
while the kernel before still runs; from there each thread takes those that it multiplies (see linear/fragments.py), and
the next ones take their place. The input stays in registers, each warp having its part of `in`.

Codes gain nothing: where kernels that read through the first-level cache come before and after, so much shared memory
takes more from them than it gives (benchmarks/README.md).

Legend: T tokens, M rows of a tile, K columns, S warps and parts of `in`, N words of a step.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy
from triton.runtime.jit import constexpr_function

from shardwise.checkpoint.weight import Weight
from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.gluon import copy_to_shared
from shardwise.kernels.hopper import SHARED_KIB, is_hopper
from shardwise.kernels.linear.fragments import fits, fragment_input, fragment_step, range_of, split_sum, steps_of, words
from shardwise.kernels.linear.geometry import case
from shardwise.kernels.linear.layouts import product_layout, sum_layout, tokens_layout, word_layout
from shardwise.kernels.linear.tiles import COLUMNS, ROWS, Operand, Target
from shardwise.kernels.linears.fragments import carried_inputs, convolved, fragment_part
from shardwise.kernels.linears.neighbours import together
from shardwise.kernels.linears.reference import Conv
from shardwise.kernels.overlap import after_previous, launch, let_next_come

FEW_ROWS, FEW_BM = 512, 16  # most rows of a weight beside the others, and those of a program for it


class Resident(NamedTuple):
    """A configuration: rows of a tile, tokens, warps, tiles of a program, steps that are held at a time, and the most
    registers of a thread (0: as many as there are), so that the next kernel finds room beside it."""

    BM: int
    BT: int
    warps: int
    tiles: int
    slots: int
    registers: int


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
def _ask(slot, value, o0, step: gl.constexpr, K: gl.constexpr, BM: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr):
    """Words of a step of a tile on their way to shared memory, as one group of copies."""
    LAYOUT: gl.constexpr = _copy_layout(WARPS)
    n_N = range_of(WARPS, 0, LAYOUT) * (K // 2 // WARPS) + range_of(N, 2, LAYOUT) + step * N
    copy_to_shared(slot, value + ((o0 + range_of(BM, 1, LAYOUT)) * (K // 2) + n_N))
    async_copy.commit_group()


@gluon.jit
def _tiles(
    x, tokens, conv, state, context, rows, value, out, tile, W: gl.constexpr, R1: gl.constexpr, BM: gl.constexpr,
    BT: gl.constexpr, BK: gl.constexpr, RUN: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
    TAPS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """TILES tiles of rows, from `tile` on; where there are no more, the last one again, and nothing of it is stored."""
    K: gl.constexpr = W[COLUMNS]
    STEPS: gl.constexpr = K // (BK * WARPS)
    N: gl.constexpr = BK // 2
    ALL: gl.constexpr = TILES * STEPS
    FIRST: gl.constexpr = W[ROWS] // BM  # tiles of the first weight
    LAST: gl.constexpr = (W[ROWS] + R1) // BM - 1
    PRODUCT: gl.constexpr = product_layout(WARPS, WARPS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, RUN * 2)
    SUM: gl.constexpr = sum_layout(W, WARPS, WARPS, BM)
    slots = ()
    for _ in gl.static_range(SLOTS):
        slots = slots + (gl.allocate_shared_memory(gl.int32, [WARPS, BM, N], _shared_layout()),)  # noqa: RUF005
    for n in gl.static_range(SLOTS):
        _ask(slots[n], value, gl.minimum(tile + n // STEPS, LAST) * BM, n % STEPS, K, BM, N, WARPS)
    o_M, t_T = gl.arange(0, BM, layout=gl.SliceLayout(1, SUM)), gl.arange(0, BT, layout=gl.SliceLayout(0, SUM))
    old = ()
    for n in gl.static_range(TILES if TAPS else 0):
        ok_MT = gl.expand_dims((t_T < tokens) & (tile + n < FIRST), 0) & gl.expand_dims(o_M >= 0, 1)
        here_M = gl.minimum(tile + n, FIRST - 1) * BM + o_M
        found = carried_inputs(here_M, t_T, ok_MT, tokens, conv, state, context, rows, W[ROWS], TAPS)
        old = old + (found,)  # noqa: RUF005
    after_previous(PDL)
    at_T = gl.arange(0, BT, layout=tokens_layout(WARPS, WARPS, RUN * 2))
    k_K = range_of(WARPS, 0, RIGHT) * (K // WARPS) + range_of(BK, 1, RIGHT)
    x_at = gl.expand_dims(gl.expand_dims(gl.minimum(at_T, tokens - 1) * K, 0), 0) + k_K
    inputs = ()
    for n in gl.static_range(STEPS):
        found = fragment_input(x, x_at, k_K, n * BK, True, 2, K, True, WARPS, BT, BK, RIGHT)
        inputs = inputs + (found,)  # noqa: RUF005
    acc = gl.zeros((WARPS, BM, BT), gl.float32, layout=PRODUCT)
    for n in gl.static_range(ALL):
        async_copy.wait_group(_behind(n, SLOTS, ALL))
        word_SMN = slots[n % SLOTS].load(word_layout(BM, N, RUN, 0, WARPS, WARPS))
        if n + SLOTS < ALL:
            later = gl.minimum(tile + (n + SLOTS) // STEPS, LAST)
            _ask(slots[n % SLOTS], value, later * BM, (n + SLOTS) % STEPS, K, BM, N, WARPS)
        acc = fragment_step(acc, word_SMN, 0, inputs[n % STEPS], W, BM, BT, BK, RUN, WARPS, WARPS)
        if n % STEPS == STEPS - 1:
            _finish(split_sum(acc, W, WARPS, WARPS, BM), tile + n // STEPS, tokens, out, state,
                    old[n // STEPS] if TAPS else 0, W[ROWS], R1, BM, BT, TAPS, SUM)  # fmt: skip
            acc = gl.zeros((WARPS, BM, BT), gl.float32, layout=PRODUCT)


@gluon.jit
def _finish(
    y_MT, tile, tokens, out, state, old, R0: gl.constexpr, R1: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr,
    TAPS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The sums of a tile to `out`, [T, R0] and behind it [T, R1]; the first through the convolution."""
    o_M, t_T = gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT)), gl.arange(0, BT, layout=gl.SliceLayout(0, LAYOUT))
    o_M, first = tile * BM + o_M, tile < R0 // BM
    ok_MT = gl.expand_dims((t_T < tokens) & (tile < (R0 + R1) // BM), 0) & gl.expand_dims(o_M >= 0, 1)
    if TAPS:
        rounded_MT = y_MT.to(out.dtype.element_ty).to(gl.float32)
        y_MT = gl.where(first, convolved(rounded_MT, ok_MT & first, state, old, TAPS), y_MT)
    width, beyond = gl.where(first, R0, R1), gl.where(first, 0, (tokens - 1) * R0)
    to_MT = beyond + gl.expand_dims(t_T * width, 0) + gl.expand_dims(o_M, 1)
    gl.store(out + to_MT, y_MT.to(out.dtype.element_ty), mask=ok_MT)


@gluon.jit(do_not_specialize=["tokens"])
def resident_linears_kernel(
    x, tokens, conv, state, context, rows, value, out, value2, fine2, coarse2, out2, W: gl.constexpr, R1: gl.constexpr,
    W2: gl.constexpr, M2: gl.constexpr, K2: gl.constexpr, RUN2: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr,
    BK: gl.constexpr, RUN: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, TAPS: gl.constexpr,
    WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Of W, and of R1 rows behind it in memory (0: none), and of a third weight (M2: rows of a program; 0: none)."""
    let_next_come(PDL)
    program = gl.program_id(0)
    PROGRAMS: gl.constexpr = ((W[ROWS] + R1) // BM + TILES - 1) // TILES
    if program < PROGRAMS:
        _tiles(x, tokens, conv, state, context, rows, value, out, program * TILES, W, R1, BM, BT, BK, RUN, TILES, SLOTS,
               TAPS, WARPS, PDL)  # fmt: skip
    if M2 > 0:  # noqa: SIM102 (known when compiled)
        if program >= PROGRAMS:
            fragment_part(x, value2, fine2, coarse2, out2, program - PROGRAMS, tokens, conv, state, context, rows, W2,
                          M2, BT, K2, RUN2, 0, WARPS, WARPS, PDL)  # fmt: skip


def resident_config(
    operands: Sequence[Operand],
    weights: Sequence[Weight],
    x_TH: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    target: Target,
) -> Resident | None:
    """How `weights`, which these are, are to be multiplied by this kernel, if that was measured to be best."""
    found = tuning.choice(target.name, "resident", [of.layout for of in operands], x_TH.shape[0])
    if not found:
        return None
    neighbours = len(together(weights, x_TH.dtype))
    return Resident(*found) if possible(operands, neighbours, x_TH, dtypes, Resident(*found)) else None


def possible(
    operands: Sequence[Operand], neighbours: int, x_TH: torch.Tensor, dtypes: Sequence[torch.dtype], config: Resident
) -> bool:
    """Whether this kernel can multiply such weights with such an input, on this device: one plain one, or two that lie
    one behind the other, and perhaps one of few rows. neighbours: how many of the first lie so."""
    large, few = _parted(operands)
    if not 2 <= x_TH.shape[0] <= config.BT or any(of.kind or not fits(of, x_TH.dtype) for of in operands):
        return False
    if not is_hopper(x_TH.device) or not len(large) <= min(2, max(1, neighbours)):
        return False
    step, _ = steps_of(large[0])
    alike = (
        len(few) <= 1 and all(of.layout[ROWS.value] <= FEW_ROWS for of in few) and len(set(dtypes[: len(large)])) == 1
    )
    whole = all(of.layout[ROWS.value] % config.BM == 0 for of in large)
    whole &= large[0].layout[COLUMNS.value] % (step * config.warps) == 0
    return alike and whole and large[0].value.data_ptr() % 16 == 0


def _parted(operands: Sequence[Operand]) -> tuple[Sequence[Operand], Sequence[Operand]]:
    """Weights of many rows, or the first one, and those of few behind them."""
    many = max(1, sum(of.layout[ROWS.value] > FEW_ROWS for of in operands))
    return operands[:many], operands[many:]


def _constants(operands: Sequence[Operand], taps: int, config: Resident) -> dict[str, Any]:
    """What the kernel is compiled for."""
    large, few = _parted(operands)
    step, run = steps_of(large[0])
    third = few[0] if few else large[0]
    few_step = 4 * step if third.layout[COLUMNS.value] % (4 * step * config.warps) == 0 else step
    found = {"W": large[0].layout, "R1": sum(of.layout[ROWS.value] for of in large[1:])}
    found |= {"W2": third.layout, "M2": FEW_BM if few else 0, "K2": few_step, "RUN2": run}
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
    tokens, (large, few) = x_TH.shape[0], _parted(operands)
    sizes = [tokens * of.layout[ROWS.value] for of in large]
    both = torch.empty(sum(sizes), dtype=dtypes[0], device=x_TH.device)
    outputs = [part.view(tokens, -1) for part in both.split(sizes)]
    outputs += [torch.empty((tokens, of.layout[ROWS.value]), dtype=dtypes[-1], device=x_TH.device) for of in few]
    taps, convolution = (conv.weight_CW.shape[1], conv.tensors()) if conv else (0, (x_TH,) * 4)
    programs = triton.cdiv(sum(of.layout[ROWS.value] for of in large) // config.BM, config.tiles)
    programs += sum(triton.cdiv(of.layout[ROWS.value], FEW_BM) for of in few)
    resident_linears_kernel[(programs,)](
        x_TH, tokens, *convolution, words(large[0])[0], both, *words((few or large)[-1]), outputs[-1],
        **_constants(operands, taps, config), **launch(pdl, config.registers), num_warps=config.warps,
    )  # fmt: skip
    return outputs


def compile_cases() -> Iterator[CompileCase]:
    """The inputs of GatedDeltaNet and of attention in 35B-A3B, as measured."""
    delta = case(8192, 2048, "bf16", True), case(4096, 2048, "bf16", True), case(64, 2048, "bf16", True)
    for cases, taps in ((delta, 4), ((case(9216, 2048, "bf16", True),), 0)):
        operands = [each.of for each in cases]
        for (name, _), tokens in product(tuning.measured(True), tuning.BUCKETS):
            found = tuning.choice(name, "resident", [of.layout for of in operands], tokens)
            if found:
                constexprs = _constants(operands, taps, Resident(*found)) | {"PDL": True}
                types = dict.fromkeys(("x", "conv", "state", "out", "fine2", "coarse2"), "*bf16")
                types |= dict.fromkeys(("context", "rows", "value", "value2"), "*i32")
                types |= {"out2": "*fp32" if taps else "*bf16"}
                signed = signature(resident_linears_kernel, constexprs, types)
                yield CompileCase(resident_linears_kernel, signed, constexprs, found[2], 1, SHARED_KIB * 1024)
