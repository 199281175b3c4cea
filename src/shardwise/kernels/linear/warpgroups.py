"""Weights in shared memory as they lie in memory, multiplied there by Hopper's warp group instructions.

FP8 is not converted: each token becomes two rows of e4m3 (halves.py), the products of which are added. Sums of 128
products go to fp32 registers, since these units add products of e4m3 with some 13 bits. Plain weights have one row.

Loads under way need no room in the first-level cache, and the more of them there are, the less other kernels' use of
shared memory matters.

Legend: T tokens of a tile, N rows of its input, M rows of weights, K columns, c a step of 128 bytes of each row.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.runtime.jit import constexpr_function

from shardwise.kernels.gluon import copy_to_shared
from shardwise.kernels.hopper import is_hopper
from shardwise.kernels.linear.halves import halves, powers
from shardwise.kernels.linear.tiles import (
    COLUMNS,
    FINE,
    FINE_CODE,
    FINE_COLUMNS,
    FINE_O,
    FP8,
    KIND,
    PLAIN,
    ROWS,
    Layout,
    Operand,
    factors,
)

WARPS, STEP_BYTES = gl.constexpr(4), gl.constexpr(128)
HALVED, WHOLE = gl.constexpr(4), gl.constexpr(8)  # tokens of a group: of two rows, and of one
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@constexpr_function
def _bits(W):
    return 8 if W[KIND.value] == FP8.value else 16


@constexpr_function
def step_of(W):
    """Columns of a step."""
    return STEP_BYTES.value * 8 // _bits(W)


@constexpr_function
def input_rows(W, BT):
    """Rows that BT tokens become."""
    return 2 * BT if W[KIND.value] == FP8.value else max(WHOLE.value, BT)


@constexpr_function
def element(W):
    return gl.float8e4nv if W[KIND.value] == FP8.value else gl.bfloat16


@constexpr_function
def place_layout(W):
    return gl.NVMMASharedLayout(swizzle_byte_width=STEP_BYTES.value, element_bitwidth=_bits(W), rank=2)


@constexpr_function
def copy_layout(W):
    """16 bytes a thread, 128 of a row."""
    return gl.BlockedLayout([1, 128 // _bits(W)], [4, 8], [WARPS.value, 1], [1, 0])


@constexpr_function
def sums_layout(W, N):
    """Of products with N rows of an input."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, N, 256 // _bits(W)])


@constexpr_function
def _under_way(c, SLOTS, STEPS):
    """Steps behind step c that have been asked for when it is waited for."""
    return min(STEPS, SLOTS + max(c - 1, 0)) - c - 1


@gluon.jit
def places(COUNT: gl.constexpr, SIZE: gl.constexpr, W: gl.constexpr):
    """Places for steps of SIZE rows, each by itself: of parts of one the compiler does not know that they are apart."""
    found = ()
    for _ in gl.static_range(COUNT):
        found = found + (gl.allocate_shared_memory(element(W), [SIZE, step_of(W)], place_layout(W)),)  # noqa: RUF005
    return found


@gluon.jit
def tile_rows(r_M, o0, SECOND: gl.constexpr, SPLIT: gl.constexpr):
    """Which row of the weight row r of a tile is, and which half of its columns it has. Gates and ups (SECOND: how far
    apart they are), or halves of a row (SPLIT: 2), go by turns of eight, so that a thread has both."""
    row_M, half_M = o0 + r_M, r_M * 0
    if SECOND or SPLIT == 2:
        row_M, half_M = o0 + r_M // 16 * 8 + r_M % 8, r_M // 8 % 2
    if SECOND:
        row_M, half_M = row_M + SECOND * half_M, r_M * 0
    return row_M, half_M


@gluon.jit
def ask(place, value, at_M1, c, W: gl.constexpr):
    """A step of a tile on its way; the rows of a weight start at 16 bytes, see `fits`."""
    k_K = c * step_of(W) + gl.arange(0, step_of(W), layout=gl.SliceLayout(0, copy_layout(W)))
    copy_to_shared(place, gl.multiple_of(value + (at_M1 + gl.expand_dims(k_K, 0)), (1, 16)))


@gluon.jit
def ask_first(
    a_s, value, o0, SECOND: gl.constexpr, W: gl.constexpr, BM: gl.constexpr, SLOTS: gl.constexpr, k0=0,
    SPAN: gl.constexpr = 0, SPLIT: gl.constexpr = 1,
):  # fmt: skip
    """As many steps of a tile as are held, on their way -> where its rows begin. Here and below: SPAN columns from k0
    on (0: all), each row in SPLIT parts, as tile_rows has them."""
    r_M = gl.arange(0, BM, layout=gl.SliceLayout(1, copy_layout(W)))
    row_M, half_M = tile_rows(r_M, o0, SECOND, SPLIT)
    at_M1 = gl.expand_dims(row_M * W[COLUMNS] + k0 + half_M * (SPAN // 2), 1)
    for c in gl.static_range(SLOTS):
        ask(a_s[c], value, at_M1, c, W)
        async_copy.commit_group()
    return at_M1


@constexpr_function
def _steps(W, SPAN, SPLIT=1):
    """Of a tile."""
    return (SPAN or W[COLUMNS.value]) // SPLIT // step_of(W)


@constexpr_function
def _groups(W, BT):
    """Tokens of a group, and groups."""
    tokens = HALVED.value if W[KIND.value] == FP8.value else WHOLE.value
    return tokens, max(1, BT // tokens)


@gluon.jit
def _token_rows(rows_s, first, count, G: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Where a group's tokens lie, and whether there is one."""
    t_T = G * GROUP + gl.arange(0, GROUP, layout=LAYOUT)
    row_T = first + t_T if rows_s is None else rows_s.slice(G * GROUP, GROUP).load(LAYOUT)
    return row_T, (t_T < count) & (row_T >= 0)


@gluon.jit
def _copy_halves(x_s, rows_s, first, halves, back, count, W: gl.constexpr, BT: gl.constexpr):
    """Rows of e4m3 on their way to shared memory, as one group of copies, and their factors."""
    K: gl.constexpr = W[COLUMNS]
    GROUPS: gl.constexpr = _groups(W, BT)[1]
    STEPS: gl.constexpr = K // STEP_BYTES
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 16], [2, 2, 8], [WARPS, 1, 1], [2, 1, 0])
    n_2 = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    k_K = gl.arange(0, STEP_BYTES, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    within = gl.expand_dims(gl.expand_dims(n_2 * K, 0), 2) + gl.expand_dims(gl.expand_dims(k_K, 0), 0)
    found = ()
    for g in gl.static_range(GROUPS):
        row_T, ok_T = _token_rows(rows_s, first, count, g, HALVED, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        found = found + (gl.load(back + row_T, mask=ok_T, other=0),)  # noqa: RUF005
        at_T2K = gl.expand_dims(gl.expand_dims(row_T * (2 * K), 1), 2) + within
        ok_T2K = gl.expand_dims(gl.expand_dims(ok_T, 1), 2) & (within >= 0)
        at_NK = gl.multiple_of(gl.reshape(at_T2K, (WHOLE, STEP_BYTES)), (1, 16))
        ok_NK = gl.max_constancy(gl.reshape(ok_T2K, (WHOLE, STEP_BYTES)), (1, 16))
        at_NK = gl.max_contiguous(at_NK, (1, 16))
        for c in gl.static_range(STEPS):
            copy_to_shared(x_s[c].slice(g * WHOLE, WHOLE, 0), halves + (at_NK + c * STEP_BYTES), mask=ok_NK)
    async_copy.commit_group()
    return found


@gluon.jit
def load_inputs(
    x_s, rows_s, first, x, back, count, W: gl.constexpr, BT: gl.constexpr, READY: gl.constexpr, k0=0,
    SPAN: gl.constexpr = 0,
):  # fmt: skip
    """`count` of BT tokens, whose rows of x are in rows_s (-1: none; None: those from `first` on), for store_inputs.
    READY: x are rows of e4m3 and `back` their factors, see `halve`; they go to shared memory at once.

    Before weights are asked for, if it can be: it is not to wait behind them.
    """
    GROUP: gl.constexpr = _groups(W, BT)[0]
    GROUPS: gl.constexpr = _groups(W, BT)[1]
    STEPS: gl.constexpr = _steps(W, SPAN)
    found = ()
    if READY:
        found = _copy_halves(x_s, rows_s, first, x, back, count, W, BT)
    else:
        THREADS: gl.constexpr = [1, 32] if W[KIND] == FP8 else [2, 16]  # FP8: a token a warp
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], THREADS, [WARPS, 1], [1, 0])
        k_K = k0 + gl.arange(0, step_of(W), layout=gl.SliceLayout(0, LAYOUT))
        for g in gl.static_range(GROUPS):
            row_T, ok_T = _token_rows(rows_s, first, count, g, GROUP, gl.SliceLayout(1, LAYOUT))
            at_TK = gl.expand_dims(row_T * W[COLUMNS], 1) + gl.expand_dims(k_K, 0)
            for c in gl.static_range(STEPS):
                part = gl.load(x + at_TK + c * step_of(W), mask=gl.expand_dims(ok_T, 1), other=0)
                found = found + (part,)  # noqa: RUF005
    return found


@gluon.jit
def _factors(parts, FROM: gl.constexpr, STEPS: gl.constexpr):
    """Of a group: what its products are to be multiplied by, and it itself before."""
    top = gl.abs(parts[FROM].to(gl.float32))
    for c in gl.static_range(STEPS - 1):
        top = gl.maximum(top, gl.abs(parts[FROM + 1 + c].to(gl.float32)))
    return powers(gl.max(top, 1))


@gluon.jit
def _halved(x_TK, forth_T):
    """A step of a group as rows of e4m3, two each."""
    high_TK, low_TK = halves(x_TK.to(gl.float32) * gl.expand_dims(forth_T, 1))
    both = gl.permute(gl.join(high_TK, low_TK), (0, 2, 1)).to(gl.float8e4nv)
    return gl.reshape(both, (WHOLE, STEP_BYTES))


@gluon.jit
def store_inputs(
    x_s, back_s, parts, count, W: gl.constexpr, BT: gl.constexpr, READY: gl.constexpr, SPAN: gl.constexpr = 0,
    SPLIT: gl.constexpr = 1,
):  # fmt: skip
    """What load_inputs found as rows that may be multiplied, and what their products are to be multiplied by; products
    of tokens that are not there mean nothing. Inputs of the second halves of rows lie behind those of the first."""
    GROUP: gl.constexpr = _groups(W, BT)[0]
    GROUPS: gl.constexpr = _groups(W, BT)[1]
    STEPS: gl.constexpr = _steps(W, SPAN)
    for g in gl.static_range(GROUPS):
        if READY:
            back_s.slice(g * GROUP, GROUP).store(parts[g])
        elif g * GROUP < count:
            if W[KIND] == FP8:
                back_T, forth_T = _factors(parts, g * STEPS, STEPS)
                back_s.slice(g * GROUP, GROUP).store(back_T)
            for c in gl.static_range(STEPS):
                part = parts[g * STEPS + c]
                if W[KIND] == FP8:
                    part = _halved(part, forth_T)
                half_s = x_s[c % _steps(W, SPAN, SPLIT)]
                half_s.slice(c // _steps(W, SPAN, SPLIT) * input_rows(W, BT) + g * WHOLE, WHOLE, 0).store(part)


@gluon.jit
def load_scales(
    fine, o0, SECOND: gl.constexpr, W: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, k0=0, SPAN: gl.constexpr = 0,
    SPLIT: gl.constexpr = 1,
):  # fmt: skip
    """Fine scales of a tile, a step each, for `products`; before its weights are asked for, behind which they would
    wait."""
    STEPS: gl.constexpr = _steps(W, SPAN, SPLIT) if W[FINE] else 0
    r_M = gl.arange(0, BM, layout=gl.SliceLayout(1, sums_layout(W, input_rows(W, BT) * SPLIT)))
    row_M, half_M = tile_rows(r_M, o0, SECOND, SPLIT)
    scales = ()
    for c in gl.static_range(STEPS):
        k_M = k0 + half_M * (SPAN // 2) + c * step_of(W)
        scales = scales + (gl.load(fine + (row_M // W[FINE_O] * W[FINE_COLUMNS] + k_M // W[FINE])),)  # noqa: RUF005
    return scales


@gluon.jit
def products(
    a_s, x_s, back_s, value, scales, at_M1, W: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, SLOTS: gl.constexpr,
    SPAN: gl.constexpr = 0, SPLIT: gl.constexpr = 1,
):  # fmt: skip
    """weight[tile] @ x.T -> [M / SPLIT, T] fp32, without coarse scales, in a layout of its own."""
    N: gl.constexpr = input_rows(W, BT) * SPLIT
    STEPS: gl.constexpr = _steps(W, SPAN, SPLIT)
    acc = gl.zeros((BM, N), gl.float32, layout=sums_layout(W, N))
    zeros = acc
    for c in gl.static_range(STEPS):
        async_copy.wait_group(_under_way(c, SLOTS, STEPS))  # of all threads
        fence_async_shared()
        part = step_products(x_s[c], a_s[c % SLOTS], acc, zeros, W)
        if c > 0 and c - 1 + SLOTS < STEPS:
            ask(a_s[(c - 1) % SLOTS], value, at_M1, c - 1 + SLOTS, W)
            async_copy.commit_group()
        part = warpgroup_mma_wait(0, deps=[part])
        if W[KIND] != FP8:
            acc = part
        elif W[FINE]:
            acc += part * gl.expand_dims(factors(scales[c], W), 1)
        else:
            acc += part
    if SPLIT == 2:
        acc = _halves(acc, BM, 2 * BT)
    return token_sums(acc, back_s, W, BM // SPLIT, BT)


@gluon.jit
def step_products(x, a, acc, zeros, W: gl.constexpr):
    """Of a step, on their way: in FP8 alone, and of plain weights with those before."""
    right = x.permute((1, 0))
    if W[KIND] == FP8:
        part = warpgroup_mma(a, right, zeros, use_acc=False, is_async=True)
    else:
        part = warpgroup_mma(a, right, acc, is_async=True)
    return part


@gluon.jit
def token_sums(acc, back_s, W: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr):
    """Sums [M, N] of rows of an input as those of tokens [M, T]."""
    if W[KIND] == FP8:
        high, low = gl.split(gl.reshape(acc, (BM, BT, 2)))
        y_MT = high + low * 0.0625
        y_MT *= gl.expand_dims(back_s.load(gl.SliceLayout(0, y_MT.type.layout)), 0)
    else:
        gl.static_assert(input_rows(W, BT) == BT, "a row a token")
        y_MT = acc
    return y_MT


@gluon.jit
def _halves(acc, BM: gl.constexpr, N: gl.constexpr):
    """The sums [M / 2, N] of rows in two halves: of each half's products [M, 2 N], those with its own inputs."""
    parts = gl.permute(gl.reshape(acc, (BM // 16, 2, 8, 2, N)), (0, 2, 3, 4, 1))
    first, second = gl.split(parts)
    first, _ = gl.split(gl.permute(first, (0, 1, 3, 2)))
    _, second = gl.split(gl.permute(second, (0, 1, 3, 2)))
    return gl.reshape(first + second, (BM // 2, N))


def fits(of: Operand, x_dtype: torch.dtype, BM: int) -> bool:
    """Whether kernels of this module do `of`, in tiles of BM rows, with such an input, on this device."""
    kind, (rows, columns), fine = of.kind, of.layout[ROWS.value : COLUMNS.value + 1], of.layout[FINE.value]
    if x_dtype != torch.bfloat16 or not is_hopper(of.value.device) or of.value.data_ptr() % 16 or rows % BM:
        return False
    if kind == PLAIN.value:
        return of.value.dtype == torch.bfloat16 and not fine and columns % (STEP_BYTES.value // 2) == 0
    coarser = fine % STEP_BYTES.value == 0 and of.layout[FINE_O.value] > 0 if fine else True
    return kind == FP8.value and columns % STEP_BYTES.value == 0 and coarser and not of.layout[FINE_CODE.value]


def held_steps(W: Layout, slots: int, parts: int = 1) -> int:
    """How many steps of a tile are held at a time, of `slots`; one alone would have to be read and filled at once.
    parts: into which a row's columns are cut."""
    return min(max(2, slots), W[COLUMNS.value] // parts // step_of(W))


def shared_bytes(W: Layout, BM: int, BT: int, slots: int) -> int:
    """Shared memory of a program that holds `slots` steps of BM rows and an input of BT tokens."""
    steps = W[COLUMNS.value] // step_of(W)
    return STEP_BYTES.value * (BM * held_steps(W, slots) + input_rows(W, BT) * steps) + 12 * BT + 1024


def words(of: Operand) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors of `of`, with codes as e4m3."""
    value, fine, coarse = of.tensors()
    return value.view(torch.float8_e4m3fn) if of.kind == FP8.value else value, fine, coarse
