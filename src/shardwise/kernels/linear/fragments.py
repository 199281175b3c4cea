"""Weights of any format straight from memory into the registers of matrix instructions, on NVIDIA GPUs.

What bounds a few tokens is reading weights, and what costs beside it is to make bf16 of their codes. Here every thread
reads the words whose values it will multiply: nothing passes through shared memory, no thread waits for another, and
two codes are moved into place at a time. The order of `in` within a word is that of the moves; the input is read to
match. Triton's own language cannot say which thread holds what, its dialect Gluon can; other devices have tiles.py.

A word is 32 bits: 2 values in bf16, 4 codes of e4m3, 8 of e2m1. Instructions are m16n8k16: 16 rows, 8 tokens.
Legend: M rows, T tokens, K values of `in` of a step, N words of it, G groups of values under one scale.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAssignmentType=false

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from shardwise.kernels.linear.layouts import (
    parted,
    parted_layout,
    product_layout,
    scale_layout,
    split_columns,
    values_of,
    word_layout,
    words_scaled,
)
from shardwise.kernels.linear.moves import E2M1, E2M1_MOVED, E4M3, E4M3_SCALE, TIMES
from shardwise.kernels.linear.tiles import (
    COARSE,
    COARSE_ROWS,
    COLUMNS,
    FINE,
    FINE_CODE,
    FINE_COLUMNS,
    FINE_O,
    FINE_ROWS,
    FP4_MOVED,
    FP4_WORDS,
    FP8,
    INVERSE,
    KIND,
    PLAIN,
    ROWS,
    Operand,
)

VALUES = {0: 2, 1: 4, 3: 8, 4: 8}  # of a word, by kind


class Fragments(NamedTuple):
    """A configuration: rows (of each of two products, if there are two) and values of `in` of a step, consecutive words
    that a thread reads, warps, and into how many parts these part `in`; those of one part share the rows. tiles: of so
    many rows that a program makes, one after another."""

    BM: int
    BK: int
    RUN: int
    warps: int
    splits: int = 1
    tiles: int = 1


@gluon.jit
def _halves(word):
    low = (word & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, (word >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True))


@gluon.jit
def _moved(word, scale, KIND_: gl.constexpr, SCALED: gl.constexpr):
    """Words to the values of their halves, in the order of the moves: [.., N] -> [.., N, 2 or 4 or 8]."""
    if KIND_ >= FP4_WORDS:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            E2M1_MOVED if KIND_ == FP4_MOVED else E2M1, "=&r,=&r,=&r,=&r,r,r", [word, scale],
            dtype=(gl.uint32, gl.uint32, gl.uint32, gl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
        even, odd = gl.join(_halves(p0), _halves(p2)), gl.join(_halves(p1), _halves(p3))
        found = gl.join(even, odd)  # [.., half, p / 2, p % 2]
    elif KIND_ == FP8:
        p0, p1 = gl.inline_asm_elementwise(
            E4M3, "=&r,=&r,r", [word], dtype=(gl.uint32, gl.uint32), is_pure=True, pack=1
        )
        if SCALED:
            p0 = gl.inline_asm_elementwise(TIMES, "=r,r,r", [p0, scale], dtype=gl.uint32, is_pure=True, pack=1)
            p1 = gl.inline_asm_elementwise(TIMES, "=r,r,r", [p1, scale], dtype=gl.uint32, is_pure=True, pack=1)
        found = gl.join(_halves(p0), _halves(p1))  # [.., half, p]
    else:
        found = _halves(word)
    return found


@gluon.jit
def _scale_words(raw, W: gl.constexpr):
    """Scales as stored -> bf16 in both halves of a word."""
    if W[FINE_CODE]:
        word = gl.inline_asm_elementwise(E4M3_SCALE, "=r,r", [raw.to(gl.uint32)], dtype=gl.uint32, is_pure=True, pack=1)
    else:
        scale = raw.to(gl.float32)
        if W[INVERSE] % 2 == 1:
            scale = gl.where(scale == 0, 0.0, 1.0 / gl.where(scale == 0, 1.0, scale))
        half = scale.to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
        word = half | (half << 16)
    return word


@gluon.jit
def _weights(
    word_SMN, raw_SMG, W: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, RUN: gl.constexpr, WARPS: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """Words of a step, and their scales, as the left operand [S, M, K] in bf16."""
    VALUES: gl.constexpr = values_of(W)
    UNDER: gl.constexpr = words_scaled(W, BK)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, product_layout(WARPS, SPLITS), RUN * VALUES)
    if UNDER:
        WIDE: gl.constexpr = word_layout(BM, BK // VALUES, RUN, UNDER, WARPS, SPLITS)
        scale = gl.convert_layout(_scale_words(raw_SMG, W), gl.SliceLayout(3, WIDE), assert_trivial=True)
        word = gl.reshape(word_SMN, (SPLITS, BM, BK // VALUES // UNDER, UNDER))
        word = gl.convert_layout(word, WIDE, assert_trivial=True)
        scale, word = gl.broadcast(gl.expand_dims(scale, 3), word)
        v = _moved(word, scale, W[KIND], True)
        if VALUES == 8:
            v = gl.permute(v, (0, 1, 2, 3, 5, 6, 4))
        elif VALUES == 4:
            v = gl.permute(v, (0, 1, 2, 3, 5, 4))
    else:
        v = _moved(word_SMN, word_SMN, W[KIND], False)
        if VALUES == 4:
            v = gl.permute(v, (0, 1, 2, 4, 3))
    return gl.convert_layout(gl.reshape(v, (SPLITS, BM, BK)), LEFT, assert_trivial=True)


@gluon.jit
def turned_place(k, VALUES: gl.constexpr):
    """Where value k of an input lies if each word's values are in the order of the moves."""
    return k // VALUES * VALUES + k % (VALUES // 2) * 2 + k % VALUES // (VALUES // 2)


@gluon.jit
def _along(v, AXIS: gl.constexpr):
    """[N] as one axis of three."""
    if AXIS == 0:
        v = gl.expand_dims(gl.expand_dims(v, 1), 2)
    elif AXIS == 1:
        v = gl.expand_dims(gl.expand_dims(v, 0), 2)
    else:
        v = gl.expand_dims(gl.expand_dims(v, 0), 0)
    return v


@gluon.jit
def range_of(SIZE: gl.constexpr, AXIS: gl.constexpr, LAYOUT: gl.constexpr):
    """0, 1 .. SIZE along one axis of three of LAYOUT."""
    if AXIS == 0:
        v = gl.arange(0, SIZE, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    elif AXIS == 1:
        v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    else:
        v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    return _along(v, AXIS)


@gluon.jit
def _loaded(pointer, at, columns, k0, ok, LIMIT: gl.constexpr, WHOLE: gl.constexpr, ok_k0):
    """What lies at `at` + k0, 0 where columns + k0 is past LIMIT or not ok. WHOLE: all are in place if ok_k0, and else
    nobody asks what they are."""
    if WHOLE:
        found = gl.load(pointer + (at + k0), mask=columns * 0 + at * 0 < ok_k0.to(gl.int32))
    else:
        found = gl.load(pointer + (at + k0), mask=(columns + k0 < LIMIT) & ok & ok_k0, other=0)
    return found


@gluon.jit
def _turned(x_SKT, VALUES: gl.constexpr, SPLITS: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, RIGHT: gl.constexpr):
    """Values of the input in the order of the weights."""
    if VALUES > 2:
        x_SKT = gl.reshape(x_SKT, (SPLITS, BK // VALUES, 2, VALUES // 2, BT))
        x_SKT = gl.reshape(gl.permute(x_SKT, (0, 1, 3, 2, 4)), (SPLITS, BK, BT))
    return gl.convert_layout(x_SKT, RIGHT, assert_trivial=True)


@gluon.jit
def fragment_input(
    x, at, k_K, k0, ok, VALUES: gl.constexpr, K: gl.constexpr, EVEN: gl.constexpr, SPLITS: gl.constexpr,
    BT: gl.constexpr, BK: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Values k0 and on of the tokens as the right operand [S, K, T], in the order of the weights."""
    if EVEN:  # noqa: SIM108 (what is read for no token stays in its column)
        x_SKT = gl.load(x + (at + k0))
    else:
        x_SKT = gl.load(x + (at + k0), mask=ok & (k_K + k0 < K), other=0)
    return _turned(x_SKT, VALUES, SPLITS, BT, BK, RIGHT)


@gluon.jit
def _places(
    o0, LIMIT: gl.constexpr, SECOND: gl.constexpr, W: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr,
    RUN: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Of words and of scales: offsets, columns, and which rows there are; of scales also of the second rows."""
    VALUES: gl.constexpr = values_of(W)
    UNDER: gl.constexpr = words_scaled(W, BK)
    PART: gl.constexpr = split_columns(W, BK, SPLITS)
    GRAIN: gl.constexpr = W[FINE] if W[FINE] else W[COLUMNS]
    gl.static_assert(SPLITS == 1 or W[FINE] == 0 or PART % GRAIN == 0, "a split begins under a scale of its own")
    LAID: gl.constexpr = word_layout(BM, BK // VALUES, RUN, 0, WARPS, SPLITS)
    o_M = o0 + range_of(BM, 1, LAID)
    n_N = range_of(SPLITS, 0, LAID) * (PART // VALUES) + range_of(BK // VALUES, 2, LAID)
    at, ok = o_M * (W[COLUMNS] // VALUES) + n_N, o_M < LIMIT if LIMIT % BM else o_M * 0 == 0
    SCALED: gl.constexpr = (
        scale_layout(word_layout(BM, BK // VALUES, RUN, UNDER, WARPS, SPLITS))
        if UNDER
        else product_layout(WARPS, SPLITS)
    )
    so_M, g_G = o0 + range_of(BM, 1, SCALED), range_of(SPLITS, 0, SCALED) * (PART // GRAIN)
    if UNDER:
        g_G += range_of(BK // GRAIN, 2, SCALED)
    s_ok = so_M < LIMIT if LIMIT % BM else so_M * 0 == 0
    s_at = g_G + (so_M // W[FINE_O] * W[FINE_COLUMNS] if W[FINE_O] else so_M * 0)
    s2_at = g_G + ((so_M + SECOND) // W[FINE_O] * W[FINE_COLUMNS] if W[FINE_O] else so_M * 0)
    return at, n_N, ok, s_at, s2_at, g_G, s_ok


@gluon.jit
def _held(value, fine, places, n0, g0, go, SECOND: gl.constexpr, W: gl.constexpr, WHOLE: gl.constexpr):
    """Words and scales of a step, of both products, if go."""
    WORDS: gl.constexpr = W[COLUMNS] // values_of(W)
    at, n_N, ok, s_at, s2_at, g_G, s_ok = places
    w = _loaded(value, at, n_N, n0, ok, WORDS, WHOLE, go)
    w2 = _loaded(value, at + SECOND * WORDS, n_N, n0, ok, WORDS, WHOLE, go) if SECOND else w
    s = _loaded(fine, s_at, g_G, g0, s_ok, W[FINE_COLUMNS], WHOLE, go) if W[FINE] else w
    s2 = _loaded(fine, s2_at, g_G, g0, s_ok, W[FINE_COLUMNS], WHOLE, go) if W[FINE] and SECOND else s
    return w, w2, s, s2


@gluon.jit
def fragment_bank(value, fine, expert, W: gl.constexpr):
    """Where an expert's words and scales begin."""
    value += expert.to(gl.int64) * (W[ROWS] * (W[COLUMNS] // values_of(W)))
    return value, fine + expert.to(gl.int64) * (W[FINE_ROWS] * W[FINE_COLUMNS])


@gluon.jit
def fragment_first(
    value, fine, o0, LIMIT: gl.constexpr, SECOND: gl.constexpr, W: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr,
    RUN: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """What fragment_products multiplies first, on its way."""
    WHOLE: gl.constexpr = W[COLUMNS] % (BK * SPLITS) == 0 and LIMIT % BM == 0
    places = _places(o0, LIMIT, SECOND, W, BM, BK, RUN, WARPS, SPLITS)
    return _held(value, fine, places, 0, 0, o0 >= 0, SECOND, W, WHOLE)


@gluon.jit
def fragment_products(
    x, x_at_T, ok_T, value, fine, held, o0, then, LIMIT: gl.constexpr, SECOND: gl.constexpr, W: gl.constexpr,
    BM: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, RUN: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    TURNED: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """weight[o0 : o0 + BM] @ x.T -> [M, T] fp32, without coarse scales; and the same of rows SECOND further on; and
    what is multiplied first of the next BM rows, if `then` and TILES > 1 say that they come next.

    x_at_T, ok_T: of each token (in tokens_layout), the offset of its row (one that may be read, where there is no
    token), and whether there is one. value, fine: see fragment_bank; held: see fragment_first. Rows from LIMIT on
    give 0. SECOND: 0 for one product; the second is then nothing. value: as words of int32. SPLITS: parts of `in` that
    go side by side. TURNED: x lies in the order of the weights, see turned_place.
    """
    VALUES: gl.constexpr = values_of(W)
    K: gl.constexpr = W[COLUMNS]
    PART: gl.constexpr = split_columns(W, BK, SPLITS)
    EVEN: gl.constexpr = K % (BK * SPLITS) == 0
    WHOLE: gl.constexpr = EVEN and LIMIT % BM == 0
    GRAIN: gl.constexpr = W[FINE] if W[FINE] else K
    gl.static_assert(TILES == 1 or WHOLE, "tiles that follow each other are whole")
    PRODUCT: gl.constexpr = product_layout(WARPS, SPLITS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, RUN * VALUES)
    places = _places(o0, LIMIT, SECOND, W, BM, BK, RUN, WARPS, SPLITS)
    k_K, x_ok = range_of(SPLITS, 0, RIGHT) * PART + range_of(BK, 1, RIGHT), _along(ok_T, 2)
    x_at = _along(x_at_T, 2) + k_K
    acc = gl.zeros((SPLITS, BM, BT), gl.float32, layout=PRODUCT)
    acc2 = acc
    next_w, next2_w, next_s, next2_s = held
    for k0 in range(0, PART, BK):
        x_SKT = fragment_input(x, x_at, k_K, k0, x_ok, 2 if TURNED else VALUES, K, EVEN, SPLITS, BT, BK, RIGHT)
        w, w2, s, s2 = next_w, next2_w, next_s, next2_s
        n1, g1, more = (k0 + BK) // VALUES, (k0 + BK) // GRAIN, k0 + BK < PART
        if TILES > 1:
            beyond = o0 * 0
            if W[FINE_O]:
                beyond = ((o0 + BM) // W[FINE_O] - o0 // W[FINE_O]) * W[FINE_COLUMNS]
            n1, g1, more = gl.where(more, n1, BM * (K // VALUES)), gl.where(more, g1, beyond), more | then
        next_w, next2_w, next_s, next2_s = _held(value, fine, places, n1, g1, more, SECOND, W, WHOLE)
        acc = fragment_step(acc, w, s, x_SKT, W, BM, BT, BK, RUN, WARPS, SPLITS)
        if SECOND:
            acc2 = fragment_step(acc2, w2, s2, x_SKT, W, BM, BT, BK, RUN, WARPS, SPLITS)
    products = split_sum(acc, W, WARPS, SPLITS, BM)
    others = split_sum(acc2, W, WARPS, SPLITS, BM) if SECOND else 0
    if W[KIND] >= FP4_WORDS:
        products, others = products * 128.0, others * 128.0
    return products, others, (next_w, next2_w, next_s, next2_s)


@gluon.jit
def split_sum(acc_SMT, W: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr, BM: gl.constexpr):
    """The sum over splits in sum_layout. A sum between warps, as Triton makes it, goes by turns of loads, exchanges
    and stores, 2,500 cycles for [8, 32, 8] on an H200; here each thread reads the parts of its sums and adds them."""
    if parted(W, SPLITS):
        acc_SMT = gl.convert_layout(acc_SMT, parted_layout(WARPS, SPLITS, BM))
    return gl.sum(acc_SMT, 0)


@gluon.jit
def fragment_step(
    acc, word_SMN, raw, x_SKT, W: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, RUN: gl.constexpr,
    WARPS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """acc and the product of a step. Where a step of a row has one scale, it goes to the product."""
    w_SMK = _weights(word_SMN, raw, W, BM, BK, RUN, WARPS, SPLITS)
    if W[FINE] > 0 and words_scaled(W, BK) == 0:
        scale = raw.to(gl.float32)
        if W[INVERSE] % 2 == 1:
            scale = gl.where(scale == 0, 0.0, 1.0 / gl.where(scale == 0, 1.0, scale))
        zeros = gl.zeros((SPLITS, BM, BT), gl.float32, layout=product_layout(WARPS, SPLITS))
        acc += mma_v2(w_SMK, x_SKT, zeros) * scale
    else:
        acc = mma_v2(w_SMK, x_SKT, acc)
    return acc


@gluon.jit
def fragment_coarse(coarse, expert, o_M, ok_M, W: gl.constexpr):
    """The coarse scale of rows o of an expert, in fp32; 1 for formats without one."""
    if W[COARSE] < 0:
        scale = gl.where(ok_M, 1.0, 0.0)
    else:
        row_M = expert.to(gl.int64) * W[COARSE_ROWS] + (o_M // W[COARSE] if W[COARSE] else o_M * 0)
        scale = gl.load(coarse + row_M, mask=ok_M, other=1).to(gl.float32)
        if W[INVERSE] >= 2:
            scale = 1.0 / scale
    return scale


def fits(of: Operand, x_dtype: torch.dtype) -> bool:
    """Whether kernels of this module do `of` with such an input, on this device."""
    kind, columns, fine = of.kind, of.layout[COLUMNS.value], of.layout[FINE.value]
    values = VALUES.get(kind, 0)
    if x_dtype != torch.bfloat16 or not values or columns % (4 * values) or not available(of.value.device):
        return False
    if of.value.storage_offset() * of.value.element_size() % 4:
        return False
    if kind == PLAIN.value:
        return of.value.dtype == torch.bfloat16 and not fine
    if kind >= FP4_WORDS.value:
        return fine in (8, 16, 32, 64) and of.layout[FINE_CODE.value] == 1 and of.layout[INVERSE.value] % 2 == 0
    # Scales within a step are rounded to bf16, so they have to be bf16.
    exact = of.fine.dtype == torch.bfloat16 and of.layout[INVERSE.value] % 2 == 0
    return not of.layout[FINE_CODE.value] and (fine in (0, 32, 64, 128) or (fine in (4, 8, 16) and exact))


def steps_of(of: Operand, run: int = 4) -> tuple[int, int]:
    """BK and RUN: `run`, or as many words that a row of a step has one scale of e4m3, where one covers 32 columns."""
    fine = of.layout[FINE.value]
    if of.kind == FP8.value and 32 <= fine < 128:
        run = fine // 32
    return 8 * run * VALUES[of.kind], run


def available(device: torch.device) -> bool:
    """Whether the device has these instructions: NVIDIA's from Ampere on."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def words(of: Operand) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors of `of`, with values as words."""
    value, fine, coarse = of.tensors()
    return value.view(torch.int32), fine, coarse
