"""Weights in shared memory as they lie in memory, multiplied there by Hopper's warp group instructions.

FP8 is not converted: a bf16 value times a power of two is the sum of two e4m3 values, the second of them divided by 16,
for eight bits are two times four. So each token becomes two rows of e4m3, the products of which are added. Sums of 128
products go to fp32 registers, since these units add products of e4m3 with some 13 bits. Plain weights have one row.

Loads under way need no room in the first-level cache, and the more of them there are, the less other kernels' use of
shared memory matters.

Legend: T tokens of a tile, N rows of its input, M rows of weights, K columns, c a step of 128 bytes of each row.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
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
from shardwise.kernels.linear.tiles import (
    COLUMNS,
    FINE,
    FINE_CODE,
    FINE_COLUMNS,
    FINE_O,
    FP8,
    INVERSE,
    KIND,
    PLAIN,
    ROWS,
    Layout,
    Operand,
)

CAPABILITY = (9, 0)
WARPS, STEP_BYTES = gl.constexpr(4), gl.constexpr(128)
HALVED, WHOLE = gl.constexpr(4), gl.constexpr(8)  # tokens of a group: of two rows, and of one
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Halved(NamedTuple):
    """Tokens x_TH, and room for what `halve` makes of them: rows [T, 2, H] of e4m3, and factors [T] of their
    products."""

    x_TH: torch.Tensor
    halves_T2H: torch.Tensor
    back_T: torch.Tensor


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
def _element(W):
    return gl.float8e4nv if W[KIND.value] == FP8.value else gl.bfloat16


@constexpr_function
def _place_layout(W):
    return gl.NVMMASharedLayout(swizzle_byte_width=STEP_BYTES.value, element_bitwidth=_bits(W), rank=2)


@constexpr_function
def _copy_layout(W):
    """16 bytes a thread, 128 of a row."""
    return gl.BlockedLayout([1, 128 // _bits(W)], [4, 8], [WARPS.value, 1], [1, 0])


@constexpr_function
def sums_layout(W, N):
    return gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, N, 256 // _bits(W)])


@constexpr_function
def _under_way(c, SLOTS, STEPS):
    """Steps behind step c that have been asked for when it is waited for."""
    return min(STEPS, SLOTS + max(c - 1, 0)) - c - 1


@triton.jit
def halve(x, row, out, back, COLUMNS_: tl.constexpr, BLOCK: tl.constexpr):
    """A row of x as two of e4m3, and what their products are to be multiplied by."""
    k_K = tl.arange(0, BLOCK)
    ok_K = k_K < COLUMNS_
    x_K = tl.load(x + row * COLUMNS_ + k_K, mask=ok_K, other=0).to(tl.float32)
    power = tl.maximum(tl.max(tl.abs(x_K), 0).to(tl.int32, bitcast=True) >> 23, 8)
    factor = ((power - 7) << 23).to(tl.float32, bitcast=True)
    tl.store(back + row, tl.where(power == 255, float("nan"), factor))
    x_K *= ((261 - power) << 23).to(tl.float32, bitcast=True)
    high_K = (x_K.to(tl.uint32, bitcast=True) & 0xFFF00000).to(tl.float32, bitcast=True)
    at = out + row * (2 * COLUMNS_) + k_K
    tl.store(at, high_K.to(tl.float8e4nv), mask=ok_K)
    tl.store(at + COLUMNS_, ((x_K - high_K) * 16.0).to(tl.float8e4nv), mask=ok_K)


@gluon.jit
def places(COUNT: gl.constexpr, SIZE: gl.constexpr, W: gl.constexpr):
    """Places for steps of SIZE rows, each by itself: of parts of one the compiler does not know that they are apart."""
    found = ()
    for _ in gl.static_range(COUNT):
        found = found + (gl.allocate_shared_memory(_element(W), [SIZE, step_of(W)], _place_layout(W)),)  # noqa: RUF005
    return found


@gluon.jit
def tile_rows(r_M, o0, SECOND: gl.constexpr, SPLIT: gl.constexpr):
    """Which row of the weight row r of a tile is, and which half of its columns it has. Gates and ups (SECOND: how far
    apart they are), or halves of a row (SPLIT: 2), by turns of eight rows, so that a thread has both."""
    row_M, half_M = o0 + r_M, r_M * 0
    if SECOND or SPLIT == 2:
        row_M, half_M = o0 + r_M // 16 * 8 + r_M % 8, r_M // 8 % 2
    if SECOND:
        row_M, half_M = row_M + SECOND * half_M, r_M * 0
    return row_M, half_M


@gluon.jit
def _ask(place, value, at_M1, c, W: gl.constexpr):
    """A step of a tile on its way, as one group of copies."""
    k_K = c * step_of(W) + gl.arange(0, step_of(W), layout=gl.SliceLayout(0, _copy_layout(W)))
    copy_to_shared(place, value + (at_M1 + gl.expand_dims(k_K, 0)))
    async_copy.commit_group()


@gluon.jit
def ask_first(
    a_s, value, o0, k0, SECOND: gl.constexpr, SPLIT: gl.constexpr, W: gl.constexpr, SPAN: gl.constexpr,
    BM: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """As many steps of a tile, of SPAN columns from k0 on, as are held, on their way -> where its rows begin."""
    r_M = gl.arange(0, BM, layout=gl.SliceLayout(1, _copy_layout(W)))
    row_M, half_M = tile_rows(r_M, o0, SECOND, SPLIT)
    at_M1 = gl.expand_dims(row_M * W[COLUMNS] + k0 + half_M * (SPAN // 2), 1)
    for c in gl.static_range(SLOTS):
        _ask(a_s[c], value, at_M1, c, W)
    return at_M1


@gluon.jit
def _whole(x_s, rows_s, x, count, G: gl.constexpr, W: gl.constexpr):
    """A group of tokens as it is; 0 where there is none."""
    K: gl.constexpr = W[COLUMNS]
    PART: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    row_T = rows_s.slice(G * WHOLE, WHOLE).load(gl.SliceLayout(1, PART))
    ok_T1 = gl.expand_dims(G * WHOLE + gl.arange(0, WHOLE, layout=gl.SliceLayout(1, PART)) < count, 1)
    k_K = gl.arange(0, step_of(W), layout=gl.SliceLayout(0, PART))
    at_TK = gl.expand_dims(row_T * K, 1) + gl.expand_dims(k_K, 0)
    for c in gl.static_range(K // step_of(W)):
        x_TK = gl.load(x + at_TK + c * step_of(W), mask=ok_T1, other=0)
        x_s[c].slice(G * WHOLE, WHOLE, 0).store(x_TK)


@gluon.jit
def _ready(x_s, back_s, rows_s, x, back, count, G: gl.constexpr, W: gl.constexpr):
    """A group of tokens that are rows of e4m3 already, two each, and their factors `back`."""
    K: gl.constexpr = W[COLUMNS]
    PART: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [WARPS, 1, 1], [2, 1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, PART))
    row_T = rows_s.slice(G * HALVED, HALVED).load(ROW)
    ok_T = G * HALVED + gl.arange(0, HALVED, layout=ROW) < count
    back_s.slice(G * HALVED, HALVED).store(gl.load(back + row_T, mask=ok_T, other=0))
    n_2 = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, PART)))
    k_K = gl.arange(0, STEP_BYTES, layout=gl.SliceLayout(0, gl.SliceLayout(0, PART)))
    at_T2K = gl.expand_dims(gl.expand_dims(row_T * (2 * K), 1), 2) + gl.expand_dims(gl.expand_dims(n_2 * K, 0), 2)
    at_T2K += gl.expand_dims(gl.expand_dims(k_K, 0), 0)
    ok_T11 = gl.expand_dims(gl.expand_dims(ok_T, 1), 2)
    for c in gl.static_range(K // STEP_BYTES):
        x_T2K = gl.load(x + at_T2K + c * STEP_BYTES, mask=ok_T11)
        x_s[c].slice(2 * G * HALVED, 2 * HALVED, 0).store(gl.reshape(x_T2K, (2 * HALVED, STEP_BYTES)))


@gluon.jit
def _halved(
    x_s, back_s, rows_s, x, k0, count, G: gl.constexpr, W: gl.constexpr, BT: gl.constexpr, SPAN: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """A group of tokens as rows of e4m3, two each, and what their products are to be multiplied by."""
    K: gl.constexpr = W[COLUMNS]
    STEPS: gl.constexpr = SPAN // SPLIT // STEP_BYTES
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])  # a token a warp
    PART: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    row_T = rows_s.slice(G * HALVED, HALVED).load(gl.SliceLayout(1, WIDE))
    ok_T1 = gl.expand_dims(G * HALVED + gl.arange(0, HALVED, layout=gl.SliceLayout(1, WIDE)) < count, 1)
    k_K = k0 + gl.arange(0, SPAN, layout=gl.SliceLayout(0, WIDE))
    at_TK = gl.expand_dims(row_T * K, 1) + gl.expand_dims(k_K, 0)
    x_TK = gl.load(x + at_TK, mask=ok_T1, other=0).to(gl.float32)
    power_T = gl.maximum(gl.max(gl.abs(x_TK), 1).to(gl.int32, bitcast=True) >> 23, 8)
    back_T = ((power_T - 7) << 23).to(gl.float32, bitcast=True)
    back_s.slice(G * HALVED, HALVED).store(gl.where(power_T == 255, float("nan"), back_T))
    power_T = gl.convert_layout(power_T, gl.SliceLayout(1, PART))
    forth_T1 = gl.expand_dims(((261 - power_T) << 23).to(gl.float32, bitcast=True), 1)
    row_T = rows_s.slice(G * HALVED, HALVED).load(gl.SliceLayout(1, PART))
    ok_T1 = gl.expand_dims(G * HALVED + gl.arange(0, HALVED, layout=gl.SliceLayout(1, PART)) < count, 1)
    k_K = k0 + gl.arange(0, STEP_BYTES, layout=gl.SliceLayout(0, PART))
    at_TK = gl.expand_dims(row_T * K, 1) + gl.expand_dims(k_K, 0)
    for c in gl.static_range(SPAN // STEP_BYTES):
        x_TK = gl.load(x + at_TK + c * STEP_BYTES, mask=ok_T1, other=0).to(gl.float32) * forth_T1
        # Cut off, not rounded, so that nothing comes back from e4m3, for which ptxas 12.8 reads a wrong register.
        high_TK = (x_TK.to(gl.uint32, bitcast=True) & 0xFFF00000).to(gl.float32, bitcast=True)
        both = gl.permute(gl.join(high_TK, (x_TK - high_TK) * 16.0), (0, 2, 1)).to(gl.float8e4nv)
        to_s = x_s[c % STEPS].slice(c // STEPS * 2 * BT + 2 * G * HALVED, 2 * HALVED, 0)
        to_s.store(gl.reshape(both, (2 * HALVED, STEP_BYTES)))


@gluon.jit
def inputs(
    x_s, back_s, rows_s, x, back, k0, count, W: gl.constexpr, BT: gl.constexpr, SPAN: gl.constexpr,
    SPLIT: gl.constexpr, READY: gl.constexpr,
):  # fmt: skip
    """SPAN columns from k0 on of the first `count` of BT tokens, whose rows of x are in rows_s, as rows that may be
    multiplied, by groups; and what their products are to be multiplied by. Others' products mean nothing. READY: x are
    rows of e4m3 and `back` their factors, see `halve`."""
    GROUP: gl.constexpr = HALVED if W[KIND] == FP8 else WHOLE
    gl.static_assert((W[COLUMNS] == SPAN and SPLIT == 1) or (W[KIND] == FP8 and not READY), "parts of rows")
    for g in gl.static_range(max(1, BT // GROUP)):
        if g * GROUP < count:
            if READY:
                _ready(x_s, back_s, rows_s, x, back, count, g, W)
            elif W[KIND] == FP8:
                _halved(x_s, back_s, rows_s, x, k0, count, g, W, BT, SPAN, SPLIT)
            else:
                _whole(x_s, rows_s, x, count, g, W)


@gluon.jit
def _fine(fine, row_M, k_M, W: gl.constexpr):
    scale = gl.load(fine + (row_M // W[FINE_O] * W[FINE_COLUMNS] + k_M // W[FINE])).to(gl.float32)
    if W[INVERSE] % 2 == 1:
        scale = gl.where(scale == 0, 0.0, 1.0 / gl.where(scale == 0, 1.0, scale))
    return scale


@gluon.jit
def products(
    a_s, x_s, back_s, value, fine, at_M1, o0, k0, SECOND: gl.constexpr, W: gl.constexpr, BM: gl.constexpr,
    BT: gl.constexpr, SLOTS: gl.constexpr, SPAN: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """weight[tile] @ x.T over SPAN columns -> [M / SPLIT, T] fp32, without coarse scales, in a layout of its own."""
    N: gl.constexpr = input_rows(W, BT) * SPLIT
    SUMS: gl.constexpr = sums_layout(W, N)
    STEPS: gl.constexpr = SPAN // SPLIT // step_of(W)
    row_M, half_M = tile_rows(gl.arange(0, BM, layout=gl.SliceLayout(1, SUMS)), o0, SECOND, SPLIT)
    acc = gl.zeros((BM, N), gl.float32, layout=SUMS)
    zeros = acc
    scales = ()
    for c in gl.static_range(STEPS if W[FINE] else 0):
        scales = scales + (_fine(fine, row_M, k0 + half_M * (SPAN // 2) + c * step_of(W), W),)  # noqa: RUF005
    for c in gl.static_range(STEPS):
        async_copy.wait_group(_under_way(c, SLOTS, STEPS))  # of all threads
        fence_async_shared()
        right = x_s[c].permute((1, 0))
        if W[KIND] == FP8:
            part = warpgroup_mma(a_s[c % SLOTS], right, zeros, use_acc=False, is_async=True)
        else:
            part = warpgroup_mma(a_s[c % SLOTS], right, acc, is_async=True)
        if c > 0 and c - 1 + SLOTS < STEPS:
            _ask(a_s[(c - 1) % SLOTS], value, at_M1, c - 1 + SLOTS, W)
        part = warpgroup_mma_wait(0, deps=[part])
        if W[KIND] != FP8:
            acc = part
        elif W[FINE]:
            acc += part * gl.expand_dims(scales[c], 1)
        else:
            acc += part
    if W[KIND] == FP8:
        if SPLIT == 2:  # of each half's rows, the columns of its inputs
            parts = gl.reshape(acc, (BM // 16, 2, 8, 2, 2 * BT))
            first, second = gl.split(gl.permute(parts, (0, 2, 3, 4, 1)))
            first, _ = gl.split(gl.permute(first, (0, 1, 3, 2)))
            _, second = gl.split(gl.permute(second, (0, 1, 3, 2)))
            acc = gl.reshape(first + second, (BM // 2, 2 * BT))
        high, low = gl.split(gl.reshape(acc, (BM // SPLIT, BT, 2)))
        y_MT = high + low * 0.0625
        y_MT *= gl.expand_dims(back_s.load(gl.SliceLayout(0, y_MT.type.layout)), 0)
    else:
        gl.static_assert(BT == N, "a row a token")
        y_MT = acc
    return y_MT


def fits(of: Operand, x_dtype: torch.dtype, BM: int = 64) -> bool:
    """Whether kernels of this module do `of`, in tiles of BM rows, with such an input, on this device."""
    kind, (rows, columns), fine = of.kind, of.layout[ROWS.value : COLUMNS.value + 1], of.layout[FINE.value]
    if x_dtype != torch.bfloat16 or of.value.device.type != "cuda" or torch.version.hip:
        return False
    if torch.cuda.get_device_capability(of.value.device) != CAPABILITY or of.value.data_ptr() % 16 or rows % BM:
        return False
    if kind == PLAIN.value:
        return of.value.dtype == torch.bfloat16 and not fine and columns % (STEP_BYTES.value // 2) == 0
    coarser = fine % STEP_BYTES.value == 0 and of.layout[FINE_O.value] > 0 if fine else True
    return kind == FP8.value and columns % STEP_BYTES.value == 0 and coarser and not of.layout[FINE_CODE.value]


def held_steps(steps: int, slots: int) -> int:
    """How many of so many steps are held at a time; one alone would have to be read and filled at once."""
    return min(max(2, slots), steps)


def shared_bytes(W: Layout, BM: int, BT: int, slots: int) -> int:
    """Shared memory of a program that holds `slots` steps of BM rows and an input of BT tokens."""
    steps = W[COLUMNS.value] // step_of(W)
    return STEP_BYTES.value * (BM * held_steps(steps, slots) + input_rows(W, BT) * steps) + 12 * BT + 1024


def words(of: Operand) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors of `of`, with codes as e4m3."""
    value, fine, coarse = of.tensors()
    return value.view(torch.float8_e4m3fn) if of.kind == FP8.value else value, fine, coarse
