"""A quantised weight as a plain matrix, made anew for a product of so many tokens that a library does it best.

Legend: O out, K in.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear.geometry import banks, case
from shardwise.kernels.linear.tiles import (
    COARSE,
    COLUMNS,
    FINE,
    FP4,
    KIND,
    ROWS,
    Operand,
    coarse_scale,
    factors,
    fine_step,
    weight_tile,
)

BLOCK_ROWS, BLOCK_COLUMNS = 32, 128
ROOMY_BYTES = 227 * 1024  # of shared memory, on cards that make banks of experts plain


@triton.jit
def dequantise_kernel(value, fine, coarse, out, W: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, ALL: tl.constexpr):
    """A tile of the weight, times its scales in fp32, rounded once. ALL: times the coarse one, too."""
    PER_STEP: tl.constexpr = W[FINE] > 0 and W[FINE] % BK == 0
    o_O, k0 = tl.program_id(0) * BO + tl.arange(0, BO), tl.program_id(1) * BK
    k_K, ok_O, e = k0 + tl.arange(0, BK), o_O < W[ROWS], tl.program_id(2)
    scales = fine_step(fine, e, o_O, ok_O, k0, BK, W) if W[FINE] > 0 else 0
    w_OK = weight_tile(value, scales, e, o_O, ok_O, k0, BK, W[FINE] > 0 and not PER_STEP, tl.float32, W)
    if PER_STEP:
        w_OK *= factors(scales, W)[:, None]
    if W[KIND] >= FP4:
        w_OK *= 128.0
    if ALL:
        w_OK *= coarse_scale(coarse, e, o_O, ok_O, W)[:, None]
    at = (e.to(tl.int64) * W[ROWS] + o_O)[:, None] * W[COLUMNS] + k_K[None, :]
    tl.store(out + at, w_OK.to(out.dtype.element_ty), mask=ok_O[:, None] & (k_K < W[COLUMNS])[None, :])


def dequantised(of: Operand, dtype: torch.dtype, coarse: bool = True) -> torch.Tensor:
    """The weight [O, K], or [E, O, K], in `dtype`; coarse: with the coarse scale."""
    rows, columns = of.layout[2:4]
    out = torch.empty((*of.value.shape[:-1], columns), dtype=dtype, device=of.value.device)
    grid = (triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(columns, BLOCK_COLUMNS), out.numel() // (rows * columns))
    dequantise_kernel[grid](*of.tensors(), out, of.layout, BLOCK_ROWS, BLOCK_COLUMNS, coarse, num_warps=4)
    return out


def plain_view(of: Operand) -> Operand:
    """`of` with the layout that it has when it is plain but for the coarse scale: e2m1 and its fine scale are exact in
    bf16."""
    kind, native, rows, columns, *_, coarse, coarse_rows, inverse = of.layout
    layout = (0, native, rows, columns, 0, 0, 0, 0, 0, coarse, coarse_rows, inverse & 2)
    return replace(of, layout=layout) if kind else of


def plain_bank(of: Operand, dtype: torch.dtype) -> Operand:
    """`of` with values of `dtype`, as it is if it has no codes."""
    if of.kind == 0:
        return of
    value = dequantised(of, dtype, coarse=False)
    return Operand(value, value, value if of.layout[COARSE.value] < 0 else of.coarse, plain_view(of).layout)


def compile_cases(native_fp8: bool) -> Iterator[CompileCase]:
    """A weight of each quantised format, and banks of experts where these are made plain."""
    for kind in ("fp8_block", "fp8_tensor", "nvfp4"):
        of, types = case(2048, 512, kind, native_fp8)
        constexprs = {"W": of.layout, "BO": BLOCK_ROWS, "BK": BLOCK_COLUMNS, "ALL": True}
        signed = signature(dequantise_kernel, constexprs, types | {"out": "*bf16"})
        yield CompileCase(dequantise_kernel, signed, constexprs, 4, 1)
    for bank in (bank for pair in banks(native_fp8) for bank in pair if bank.of.kind and native_fp8):
        constexprs = {"W": bank.of.layout, "BO": BLOCK_ROWS, "BK": BLOCK_COLUMNS, "ALL": False}
        signed = signature(dequantise_kernel, constexprs, bank.types | {"out": "*bf16"})
        yield CompileCase(dequantise_kernel, signed, constexprs, 4, 1, ROOMY_BYTES)
