"""A quantised weight as a plain matrix, made anew for a product of so many tokens that a library does it best.

Legend: O out, K in.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear.geometry import case
from shardwise.kernels.linear.tiles import (
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


@triton.jit
def dequantise_kernel(value, fine, coarse, out, W: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr):
    """A tile of the weight, times all its scales in fp32, rounded once."""
    PER_STEP: tl.constexpr = W[FINE] > 0 and W[FINE] % BK == 0
    o_O, k0 = tl.program_id(0) * BO + tl.arange(0, BO), tl.program_id(1) * BK
    k_K, ok_O, e = k0 + tl.arange(0, BK), o_O < W[ROWS], tl.program_id(0) * 0
    scales = fine_step(fine, e, o_O, ok_O, k0, BK, W) if W[FINE] > 0 else 0
    w_OK = weight_tile(value, scales, e, o_O, ok_O, k0, BK, W[FINE] > 0 and not PER_STEP, tl.float32, W)
    if PER_STEP:
        w_OK *= factors(scales, W)[:, None]
    if W[KIND] >= FP4:
        w_OK *= 128.0
    w_OK *= coarse_scale(coarse, e, o_O, ok_O, W)[:, None]
    at = o_O.to(tl.int64)[:, None] * W[COLUMNS] + k_K[None, :]
    tl.store(out + at, w_OK.to(out.dtype.element_ty), mask=ok_O[:, None] & (k_K < W[COLUMNS])[None, :])


def dequantised(of: Operand, dtype: torch.dtype) -> torch.Tensor:
    """The weight [O, K] in `dtype`."""
    rows, columns = of.layout[2:4]
    out_OK = torch.empty((rows, columns), dtype=dtype, device=of.value.device)
    grid = (triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(columns, BLOCK_COLUMNS))
    dequantise_kernel[grid](*of.tensors(), out_OK, of.layout, BLOCK_ROWS, BLOCK_COLUMNS, num_warps=4)
    return out_OK


def compile_cases(native_fp8: bool) -> Iterator[CompileCase]:
    """A weight of each quantised format."""
    for kind in ("fp8_block", "fp8_tensor", "nvfp4"):
        of, types = case(2048, 512, kind, native_fp8)
        constexprs = {"W": of.layout, "BO": BLOCK_ROWS, "BK": BLOCK_COLUMNS}
        signed = signature(dequantise_kernel, constexprs, types | {"out": "*bf16"})
        yield CompileCase(dequantise_kernel, signed, constexprs, 4, 1)
