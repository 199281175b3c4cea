"""Sums of rows times one or a few inputs in fp32, by chunks: what the kernels that stream weights have in common.

Asking for weights and using them are two steps, so that a kernel can wait for its input in between (see overlap.py).
Legend: C chunks of V consecutive elements of `in`, B batch of rows, R rows, K in, W the layout of a weight.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from shardwise.kernels.linear.tiles import (
    COLUMNS,
    FINE,
    FP4,
    FP4_MOVED,
    FP4_WORDS,
    FP8,
    KIND,
    NATIVE,
    ROWS,
    e2m1_of_bytes,
    e2m1_of_words,
    e4m3,
    factors,
    fine_row,
)


@triton.jit
def chunks(x, c_C, V: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    """Elements of the chunks c_C of a row of K -> [C, V] in fp32. WHOLE: none is past the end; else these are 0.

    Read so that a thread gets whole chunks, as it does of weights: nothing is then exchanged between threads.
    """
    BYTES: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    P: tl.constexpr = V if V * BYTES <= 16 else 16 // BYTES
    part_V, p_P = tl.arange(0, V // P) * P, tl.arange(0, P)
    at = (c_C * V)[:, None, None] + part_V[None, :, None] + p_P[None, None, :]
    found = tl.load(x + at) if WHOLE else tl.load(x + at, mask=(c_C < K // V)[:, None, None], other=0)
    return tl.reshape(found, (c_C.shape[0], V)).to(tl.float32)


@triton.jit
def chunk_codes(value, fine, e_BR, o_BR, ok_BR, c_C, V: tl.constexpr, WHOLE: tl.constexpr, W: tl.constexpr):
    """Chunks of rows as stored [C, B, R, V or fewer], and their fine scales as stored [C, B, R], if there are any.

    Chunks come first, for Triton gives the threads of a warp to the first axis. WHOLE: no chunk is past the end, and
    all rows are `ok`; else these are 0.
    """
    K: tl.constexpr = W[COLUMNS]
    PER: tl.constexpr = 8 if W[KIND] >= FP4_WORDS else 2 if W[KIND] == FP4 else 1  # values of a stored element
    row_BR = e_BR.to(tl.int64) * W[ROWS] + o_BR
    at = (c_C * (V // PER))[:, None, None] + (row_BR * (K // PER))[None, :, :]
    code = value + (at[:, :, :, None] + tl.arange(0, V // PER))
    scale = fine + ((c_C * V // W[FINE])[:, None, None] + fine_row(e_BR, o_BR, W)[None, :, :]) if W[FINE] > 0 else 0
    if WHOLE:
        raw = tl.load(code)
        scales = tl.load(scale) if W[FINE] > 0 else 0
    else:
        ok_CBR = (c_C < K // V)[:, None, None] & ok_BR[None, :, :]
        raw = tl.load(code, mask=ok_CBR[:, :, :, None], other=0)
        scales = tl.load(scale, mask=ok_CBR, other=0) if W[FINE] > 0 else 0
    return raw, scales


@triton.jit
def code_sums(x_CBV, raw, scales, V: tl.constexpr, W: tl.constexpr):
    """Sums over each chunk of weight * x, fine scales included -> [C, B, R] fp32; x in fp32, the rest of chunk_codes.

    Every thread sums its own chunks, so that a scale is applied once to V products.
    """
    if W[KIND] >= FP4:
        code = e2m1_of_words(raw, W[KIND] == FP4_MOVED) if W[KIND] >= FP4_WORDS else e2m1_of_bytes(raw)
        w_CBRV = tl.reshape(code, (raw.shape[0], raw.shape[1], raw.shape[2], V)).to(tl.float32)
    else:
        w_CBRV = (e4m3(raw, W[NATIVE]) if W[KIND] == FP8 else raw).to(tl.float32)
    sums = tl.sum(w_CBRV * x_CBV[:, :, None, :], 3)
    if W[FINE] > 0:
        sums *= factors(scales, W)
    return sums * 16384.0 if W[KIND] >= FP4 else sums


@triton.jit
def chunk_sums(x_CBV, value, fine, e_BR, o_BR, ok_BR, c_C, V: tl.constexpr, W: tl.constexpr):
    """As code_sums, of weights that are read now."""
    raw, scales = chunk_codes(value, fine, e_BR, o_BR, ok_BR, c_C, V, False, W)
    return code_sums(x_CBV, raw, scales, V, W)
