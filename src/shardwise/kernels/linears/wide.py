"""FP8 weights of one input for 17 to 128 tokens on Hopper: see linear/warpgroups.py.

A program has a tile of rows, a warp group for each 64 of them, and all tokens, which are rows of e4m3 before it starts
(halves.py). Steps of 128 columns, of the weight and of the input, pass through places in shared memory. Tokens go in
groups of 64 at most: while a group's products are added to the sums, the next group's, or the next step's, are made.

Legend: T tokens, M rows of a program, K columns, N rows of the input of a group, S parts of the sum.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.runtime.jit import constexpr_function

from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.gluon import copy_to_shared
from shardwise.kernels.hopper import SHARED_KIB
from shardwise.kernels.linear.fragments import fragment_coarse, steps_of
from shardwise.kernels.linear.fragments import words as fragment_words
from shardwise.kernels.linear.geometry import Case, case
from shardwise.kernels.linear.halves import Halved, halve_kernel
from shardwise.kernels.linear.ring import ring_places
from shardwise.kernels.linear.tiles import COLUMNS, FINE, FINE_COLUMNS, FINE_O, ROWS, Operand, factors
from shardwise.kernels.linear.warpgroups import FLAT, STEP_BYTES, words
from shardwise.kernels.linears.fragments import fragment_part
from shardwise.kernels.linears.wide_config import Wide, count_large, held_steps, room, warps_of, wide_choice
from shardwise.kernels.overlap import after_previous, launch, let_next_come

GROUP_TOKENS = gl.constexpr(64)  # whose products and sums a thread has room for twice
FEW_BM, FEW_BT = 16, gl.constexpr(8)  # a tile of a plain weight of few rows
# A token's sum with what both its rows gave, times a scale; in its place, or the compiler puts off all sums to the end.
ADD = gl.constexpr("{ .reg .f32 both; fma.rn.f32 both, $3, 0f3D800000, $2; fma.rn.f32 $0, both, $4, $1; }")


@constexpr_function
def _power_of_two(n):
    return 1 << (n - 1).bit_length()


@constexpr_function
def _copy_layout(WARPS):
    """16 bytes a thread, 128 of a row."""
    return gl.BlockedLayout([1, 1, 16], [1, 4, 8], [1, WARPS, 1], [2, 1, 0])


@constexpr_function
def _sums_layout(N, WARPS):
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 32])


@constexpr_function
def _out_layout(BM, WARPS):
    """A token's outputs by neighbouring threads."""
    return gl.BlockedLayout([8, 1], [BM // 8, 256 // BM], [1, WARPS], [0, 1])


@constexpr_function
def _under_way(c, SLOTS, STEPS):
    """Steps behind step c that have been asked for when it is waited for."""
    return min(STEPS, SLOTS + max(c - 2, 0)) - c - 1


@gluon.jit
def _rows_at(base, row0, k0, W: gl.constexpr, WARPS: gl.constexpr):
    """Where the first step of some rows lies [1, R, K], as many as all threads copy at once."""
    LAYOUT: gl.constexpr = _copy_layout(WARPS)
    r_R = gl.arange(0, 4 * WARPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    k_K = gl.arange(0, STEP_BYTES, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    at_RK = gl.expand_dims(gl.expand_dims(r_R * W[COLUMNS], 0), 2) + gl.expand_dims(gl.expand_dims(k_K, 0), 0)
    return base + ((row0 * W[COLUMNS] + k0) + at_RK)


@gluon.jit
def _ask(place, at_1RK, row0: gl.constexpr, c: gl.constexpr, W: gl.constexpr):
    """A step of as many rows as `place` has, from row0 on, on its way. They are at constants from the first ones: a
    thread has no room for an address of each."""
    ROWS_: gl.constexpr = place.shape[0]
    R: gl.constexpr = at_1RK.shape[1]
    n_N = gl.arange(0, ROWS_ // R, layout=gl.SliceLayout(1, gl.SliceLayout(2, at_1RK.type.layout)))
    within = gl.expand_dims(gl.expand_dims(n_N * R, 1), 2) * W[COLUMNS] + (row0 * W[COLUMNS] + c * STEP_BYTES)
    at = gl.reshape(at_1RK + within, (ROWS_, STEP_BYTES))
    copy_to_shared(place, gl.max_contiguous(gl.multiple_of(at, (1, 16)), (1, 16)))


@gluon.jit
def _ask_input(x_s, at_1RK, c: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, W: gl.constexpr):
    """A step of all groups."""
    for g in gl.static_range(GROUPS):
        _ask(x_s[c % SLOTS * GROUPS + g].index(0), at_1RK, g * x_s[0].shape[1], c, W)


@gluon.jit
def _fine_scales(fine, o0, k0, STEPS: gl.constexpr, W: gl.constexpr, WARPS: gl.constexpr):
    """Of a tile, one a step (1 without any), in shared memory; there is room for a power of two of them."""
    COUNT: gl.constexpr = _power_of_two(STEPS)
    scale_s = gl.allocate_shared_memory(gl.float32, [COUNT], FLAT)
    scale_C = gl.full((COUNT,), 1.0, gl.float32, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    if W[FINE]:
        k_C = k0 + gl.arange(0, COUNT, layout=scale_C.type.layout) * STEP_BYTES
        at_C = o0 // W[FINE_O] * W[FINE_COLUMNS] + k_C // W[FINE]
        scale_C = factors(gl.load(fine + at_C, mask=k_C < W[COLUMNS], other=1), W)
    scale_s.store(scale_C)
    return scale_s


@gluon.jit
def _parted(part):
    """Products [M, 2 T] of both rows of each token, parted."""
    M: gl.constexpr = part.shape[0]
    T: gl.constexpr = part.shape[1] // 2
    return gl.split(gl.reshape(part, (M, T, 2)))


@gluon.jit
def _added(sums, part, scale_s, c: gl.constexpr, g: gl.constexpr):
    """Sums of all groups with the products of step c of group g."""
    high, low = _parted(part)
    scale = gl.expand_dims(scale_s.slice(c, 1).load(gl.SliceLayout(1, high.type.layout)), 1)
    _, scale = gl.broadcast(high, scale)
    y_MT = gl.inline_asm_elementwise(
        ADD, "=f,f,f,f,f", [sums[g], high, low, scale], dtype=gl.float32, is_pure=False, pack=1
    )
    found = ()
    for n in gl.static_range(len(sums)):
        found = found + (y_MT if n == g else sums[n],)  # noqa: RUF005
    return found


@gluon.jit
def _zero(zero_s):
    """0, but the compiler is not to know, or it works out where steps lie once for all, and spills that."""
    return gl.max(zero_s.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _products(
    a_s, x_s, scale_s, zero_s, weight_at, input_at, STEPS: gl.constexpr, GROUPS: gl.constexpr, W: gl.constexpr,
    SLOTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Sums [M, T] of each group, without what stands before a token's or a row's own factor.

    When a step's copies are there and all threads have met, the products of the step before the last are done. New ones
    go where those were that have just been added: else the compiler would keep three sets of them.
    """
    M: gl.constexpr = a_s[0].shape[1]
    N: gl.constexpr = x_s[0].shape[1]
    zeros = gl.zeros((M, N), gl.float32, layout=_sums_layout(N, WARPS))
    spare = zeros
    none, _ = _parted(zeros)
    sums = ()
    for _ in gl.static_range(GROUPS):
        sums = sums + (none,)  # noqa: RUF005
    for c in gl.static_range(STEPS):
        async_copy.wait_group(_under_way(c, SLOTS, STEPS))  # of all threads
        fence_async_shared()
        same = _zero(zero_s)
        for g in gl.static_range(GROUPS):
            right = x_s[c % SLOTS * GROUPS + g].index(same).permute((1, 0))
            coming = warpgroup_mma(a_s[c % SLOTS].index(same), right, spare, use_acc=same != 0, is_async=True)
            if g == 0 and c >= 2 and c - 2 + SLOTS < STEPS:
                _ask(a_s[(c - 2) % SLOTS].index(0), weight_at + same, 0, c - 2 + SLOTS, W)
                _ask_input(x_s, input_at + same, c - 2 + SLOTS, SLOTS, GROUPS, W)
                async_copy.commit_group()
            if c + g > 0:
                part = warpgroup_mma_wait(1, deps=[before])  # noqa: F821 (of the turn before)
                sums = _added(sums, part, scale_s, (c * GROUPS + g - 1) // GROUPS, (g - 1) % GROUPS)
                spare = part
            before = coming
    part = warpgroup_mma_wait(0, deps=[before])
    return _added(sums, part, scale_s, STEPS - 1, GROUPS - 1)


@gluon.jit
def _store(out, sums, back_s, scale_M, o0, t0, tokens, stride, WARPS: gl.constexpr):
    """Outputs of a group's tokens from t0 on."""
    T: gl.constexpr = sums.shape[1]
    OUT: gl.constexpr = _out_layout(sums.shape[0], WARPS)
    back_T = back_s.load(gl.SliceLayout(0, sums.type.layout))
    y_MT = sums * gl.expand_dims(scale_M, 1) * gl.expand_dims(back_T, 0)
    y_MT = gl.convert_layout(y_MT.to(out.dtype.element_ty), OUT)
    o_M = o0 + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, OUT))
    t_T = t0 + gl.arange(0, T, layout=gl.SliceLayout(0, OUT))
    at_MT = gl.expand_dims(t_T * stride, 0) + gl.expand_dims(o_M, 1)
    gl.store(out + at_MT, y_MT, mask=gl.expand_dims(t_T < tokens, 0))


@gluon.jit
def _part(
    halves, back, value, fine, coarse, out, tile, tokens, stride, W: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr,
    PARTS: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """BM rows of a weight over a part of its columns: out [S, T, O], a row of it being `stride` wide."""
    SPAN: gl.constexpr = W[COLUMNS] // PARTS
    STEPS: gl.constexpr = SPAN // STEP_BYTES
    TOKENS: gl.constexpr = min(BT, GROUP_TOKENS)
    GROUPS: gl.constexpr = BT // TOKENS
    a_s, x_s = ring_places(SLOTS, BM, W), ring_places(SLOTS * GROUPS, 2 * TOKENS, W)
    back_s = gl.allocate_shared_memory(gl.float32, [BT], FLAT)
    zero_s = gl.allocate_shared_memory(gl.int32, [1], FLAT)
    zero_s.store(gl.zeros((1,), gl.int32, layout=gl.BlockedLayout([1], [32], [WARPS], [0])))
    part = gl.program_id(1)
    o0, k0 = tile * BM, part * SPAN
    scale_s = _fine_scales(fine, o0, k0, STEPS, W, WARPS)
    weight_at = _rows_at(value, o0, k0, W, WARPS)
    for c in gl.static_range(SLOTS):
        _ask(a_s[c].index(0), weight_at, 0, c, W)
    after_previous(PDL)
    back_T = gl.load(back + gl.arange(0, BT, layout=gl.BlockedLayout([1], [32], [WARPS], [0])))
    input_at = _rows_at(halves, 0, k0, W, WARPS)
    for c in gl.static_range(SLOTS):
        _ask_input(x_s, input_at, c, SLOTS, GROUPS, W)
        async_copy.commit_group()
    back_s.store(back_T)
    sums = _products(a_s, x_s, scale_s, zero_s, weight_at, input_at, STEPS, GROUPS, W, SLOTS, WARPS)
    o_M = o0 + gl.arange(0, BM, layout=gl.SliceLayout(1, sums[0].type.layout))
    scale_M = fragment_coarse(coarse, tile * 0, o_M, o_M >= 0, W)
    out += part * tokens * stride
    for g in gl.static_range(GROUPS):
        _store(out, sums[g], back_s.slice(g * TOKENS, TOKENS), scale_M, o0, g * TOKENS, tokens, stride, WARPS)


@gluon.jit(do_not_specialize=["tokens"])
def wide_linears_kernel(
    x, halves, back, tokens, value0, fine0, coarse0, out0, value1, fine1, coarse1, out1, value2, fine2, coarse2, out2,
    W0: gl.constexpr, W1: gl.constexpr, W2: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, PARTS: gl.constexpr,
    SLOTS: gl.constexpr, LARGE: gl.constexpr, M2: gl.constexpr, K2: gl.constexpr, RUN2: gl.constexpr,
    WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Of one or two weights (LARGE) that differ in rows alone, and of a plain one of few rows (M2: rows of a program
    for it; 0: none), which is multiplied with x as it is, FEW_BT tokens a program."""
    let_next_come(PDL)
    program = gl.program_id(0)
    N0: gl.constexpr = W0[ROWS] // BM
    N1: gl.constexpr = W1[ROWS] // BM if LARGE > 1 else 0
    if program < N0 + N1:
        value, fine, coarse, out, stride, tile = value0, fine0, coarse0, out0, program * 0 + W0[ROWS], program
        if LARGE > 1:  # noqa: SIM102 (known when compiled)
            if program >= N0:
                value, fine, coarse, out, stride, tile = value1, fine1, coarse1, out1, stride * 0 + W1[ROWS], tile - N0
        _part(halves, back, value, fine, coarse, out, tile, tokens, stride, W0, BM, BT, PARTS, SLOTS, WARPS, PDL)
    if M2 > 0:  # noqa: SIM102
        if program >= N0 + N1:
            place, tiles = program - N0 - N1, (W2[ROWS] + M2 - 1) // M2
            t0 = place // tiles * FEW_BT
            fragment_part(
                x + t0 * W2[COLUMNS], value2, fine2, coarse2, out2 + t0 * W2[ROWS], place % tiles, tokens - t0, x, x, x,
                x, W2, M2, FEW_BT, K2, RUN2, 0, WARPS, WARPS, PDL,
            )  # fmt: skip


def _constants(operands: Sequence[Operand], tokens: int, config: Wide) -> dict[str, Any]:
    """What the kernel is compiled for."""
    large, last = count_large(operands), operands[-1]
    few = len(operands) > large
    step, run = steps_of(last) if few else (0, 0)
    if few and last.layout[COLUMNS.value] % (4 * step * warps_of(config)) == 0:
        step *= 4  # few programs: the more is under way at once, the better
    return {
        "W0": operands[0].layout, "W1": operands[large - 1].layout, "W2": last.layout, "BM": config.BM,
        "BT": room(tokens), "PARTS": config.parts, "SLOTS": held_steps(operands[0], config), "LARGE": large,
        "M2": FEW_BM if few else 0, "K2": step, "RUN2": run, "WARPS": warps_of(config),
    }  # fmt: skip


def wide_linears(
    halved: Halved, operands: Sequence[Operand], dtypes: Sequence[torch.dtype], config: Wide, pdl: bool
) -> list[torch.Tensor]:
    """All in one launch; x is contiguous, and its rows of e4m3 are there, with room for `room` tokens. Of several
    parts, one weight's: [S, T, O]."""
    tokens, large = halved.x_TH.shape[0], count_large(operands)
    outputs = [
        torch.empty((config.parts * tokens, of.layout[ROWS.value]), dtype=dtype, device=halved.x_TH.device)
        for of, dtype in zip(operands, dtypes, strict=True)
    ]
    tensors = [words(of) for of in operands[:large]] + [fragment_words(of) for of in operands[large:]]
    chosen = (0, large - 1, len(operands) - 1)
    programs = sum(of.layout[ROWS.value] // config.BM for of in operands[:large])
    few = sum(triton.cdiv(of.layout[ROWS.value], FEW_BM) for of in operands[large:])
    programs += few * triton.cdiv(tokens, FEW_BT.value)
    wide_linears_kernel[(programs, config.parts)](
        *halved, tokens, *(each for n in chosen for each in (*tensors[n], outputs[n])),
        **_constants(operands, tokens, config), **launch(pdl), num_warps=warps_of(config),
    )  # fmt: skip
    return [out.view(config.parts, tokens, -1) for out in outputs] if config.parts > 1 else outputs


def compile_cases() -> Iterator[CompileCase]:
    """The projections of 35B-A3B, by rule and as measured."""
    few = case(64, 2048, "bf16", True)
    for (kind, tokens), name in product(
        (("fp8_block", 128), ("fp8_block", 64), ("fp8_tensor", 32)), ("", *(name for name, _ in tuning.measured()))
    ):
        delta = case(8192, 2048, kind, True), case(4096, 2048, kind, True), few
        for cases in (delta, (case(9216, 2048, kind, True),), (case(2048, 4096, kind, True),)):
            config = wide_choice([each.of for each in cases], tokens, name, len(cases) == 1)
            if config is not None:
                yield _case(cases, tokens, config)
    constexprs = {"COLUMNS_": 4096, "BLOCK": 4096, "PDL": True}
    types = {"x": "*bf16", "out": "*fp8e4nv", "back": "*fp32"}
    yield CompileCase(halve_kernel, signature(halve_kernel, constexprs, types), constexprs, 8, 1, SHARED_KIB * 1024)


def _case(cases: Sequence[Case], tokens: int, config: Wide) -> CompileCase:
    operands = [each.of for each in cases]
    large = count_large(operands)
    types = {"x": "*bf16", "halves": "*fp8e4nv", "back": "*fp32"}
    for n, at in enumerate((0, large - 1, len(operands) - 1)):
        types |= {f"{name}{n}": kind for name, kind in cases[at].types.items()}
        types |= {f"value{n}": "*fp8e4nv" if operands[at].kind else "*i32"}
        types |= {f"out{n}": "*fp32" if config.parts > 1 or not operands[at].kind else "*bf16"}
    constexprs = _constants(operands, tokens, config) | {"PDL": True}
    signed = signature(wide_linears_kernel, constexprs, types)
    return CompileCase(wide_linears_kernel, signed, constexprs, warps_of(config), 1, SHARED_KIB * 1024)
