"""The weighted sum of a block's experts; with it, where one rank has all of it, the norm of the layer that follows.

Which experts a token has was said by a kernel at least three launches before, and one between waited for all before it
ere it let another one come (see down_kernel in stream.py), or lets none come before it is done. So the choice, and the
residual, which is as old, are read before the kernel waits.
Legend: T tokens, H hidden, k experts a token (K in kernels), M = T * k pairs.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear.triton import power_of_two
from shardwise.kernels.moe_block.reference import Then
from shardwise.kernels.overlap import after_previous, launch, let_next_come

BLOCK_BYTES, WARPS = 2048, 4  # of an expert's output, of the sum alone
NORM_WIDTH = 4096  # of the sum with its norm: a program has a whole token, and all of its experts, in registers


class Outputs(NamedTuple):
    """Of the experts: y_MH of each pair, shared_TH of the shared one; both contiguous."""

    y_MH: torch.Tensor
    shared_TH: torch.Tensor


@triton.jit
def shares(ids, weights, gate, gate_stride, row, TOP_K: tl.constexpr, KP: tl.constexpr):
    """Of a token: its pairs, their shares, and that of the shared expert."""
    k_K = tl.arange(0, KP)
    at_K, ok_K = row * TOP_K + k_K, k_K < TOP_K
    share_K = tl.load(weights + at_K, mask=ok_K, other=0, cache_modifier=".cg")
    id_K = tl.load(ids + at_K, mask=ok_K, other=-1, cache_modifier=".cg")
    # An expert that a token has twice (a router of NaN) was computed at its last place only.
    again_KK = tl.load(ids + at_K, mask=ok_K, other=-2, cache_modifier=".cg")[None, :] == id_K[:, None]
    pair_K = row * TOP_K + tl.max(tl.where(again_KK, k_K[None, :], 0), 1)
    return pair_K, ok_K, share_K, tl.sigmoid(tl.load(gate + row * gate_stride, cache_modifier=".cg").to(tl.float32))


@triton.jit
def weighted_sum(y, shared, row, h_H, ok_H, pair_K, ok_K, share_K, opened, WIDTH):
    y_KH = tl.load(y + (pair_K * WIDTH)[:, None] + h_H[None, :], mask=ok_K[:, None] & ok_H[None, :], other=0)
    shared_H = tl.load(shared + row * WIDTH + h_H, mask=ok_H, other=0).to(tl.float32) * opened
    return shared_H + tl.sum(y_KH.to(tl.float32) * share_K[:, None], 0)


@triton.jit(do_not_specialize=["gate_stride"])
def combine_kernel(
    y, shared, ids, weights, gate, gate_stride, out, hidden, TOP_K: tl.constexpr, KP: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = the weighted sum of its experts' outputs, and sigmoid(gate) times the shared expert's."""
    let_next_come(PDL)
    row, h_H = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok_H = h_H < hidden
    pair_K, ok_K, share_K, opened = shares(ids, weights, gate, gate_stride, row, TOP_K, KP)
    after_previous(PDL)
    out_H = weighted_sum(y, shared, row, h_H, ok_H, pair_K, ok_K, share_K, opened, hidden)
    tl.store(out + row * hidden + h_H, out_H, mask=ok_H)


@triton.jit(do_not_specialize=["gate_stride"])
def combine_norm_kernel(
    y, shared, ids, weights, gate, gate_stride, residual, norm, total, normed, eps, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """total = residual + that sum, and its norm, of one token."""
    let_next_come(PDL)
    row, h_H = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    ok_H = h_H < WIDTH
    pair_K, ok_K, share_K, opened = shares(ids, weights, gate, gate_stride, row, TOP_K, KP)
    before_H = tl.load(residual + row * WIDTH + h_H, mask=ok_H, other=0, cache_modifier=".cg").to(tl.float32)
    factor_H = 1.0 + tl.load(norm + h_H, mask=ok_H, other=0).to(tl.float32)
    after_previous(PDL)
    added_H = weighted_sum(y, shared, row, h_H, ok_H, pair_K, ok_K, share_K, opened, WIDTH)
    rounded_H = (added_H + before_H).to(total.dtype.element_ty)
    tl.store(total + row * WIDTH + h_H, rounded_H, mask=ok_H)
    x_H = rounded_H.to(tl.float32)
    x_H *= tl.rsqrt(tl.sum(x_H * x_H, 0) / WIDTH + eps) * factor_H
    tl.store(normed + row * WIDTH + h_H, x_H.to(normed.dtype.element_ty), mask=ok_H)


def combine(
    outputs: Outputs, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, gate_T1: torch.Tensor, pdl: bool
) -> torch.Tensor:
    """-> [T, H] fp32. ids and weights, here and below, are contiguous."""
    (tokens, top_k), hidden = ids_Tk.shape, outputs.y_MH.shape[1]
    out_TH = torch.empty((tokens, hidden), dtype=torch.float32, device=ids_Tk.device)
    block = BLOCK_BYTES // outputs.y_MH.element_size()
    combine_kernel[(tokens, triton.cdiv(hidden, block))](
        *outputs, ids_Tk, weights_Tk, gate_T1, gate_T1.stride(0), out_TH, hidden, top_k, power_of_two(top_k), block,
        num_warps=WARPS, **launch(pdl),
    )  # fmt: skip
    return out_TH


def combine_norm(
    outputs: Outputs, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, gate_T1: torch.Tensor, then: Then, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the norm of the residual with the sum, and the residual with the sum. Up to NORM_WIDTH columns."""
    (tokens, top_k), hidden = ids_Tk.shape, outputs.y_MH.shape[1]
    total_TH = torch.empty_like(then.residual_TH, memory_format=torch.contiguous_format)
    x_TH = torch.empty((tokens, hidden), dtype=then.norm_H.dtype, device=ids_Tk.device)
    constexprs, warps = _norm_constants(hidden, top_k, outputs.y_MH.element_size())
    combine_norm_kernel[(tokens,)](
        *outputs, ids_Tk, weights_Tk, gate_T1, gate_T1.stride(0), then.residual_TH.contiguous(), then.norm_H, total_TH,
        x_TH, then.eps, **constexprs, num_warps=warps, **launch(pdl),
    )  # fmt: skip
    return x_TH, total_TH


def _norm_constants(hidden: int, top_k: int, y_bytes: int) -> tuple[dict[str, int], int]:
    """What the kernel is compiled for, and its warps; each thread has 64 to 128 bytes of an expert's."""
    block = power_of_two(hidden)
    constexprs = {"WIDTH": hidden, "BLOCK": block, "TOP_K": top_k, "KP": power_of_two(top_k)}
    return constexprs, min(16, max(1, block * y_bytes // 1024))


def compile_cases() -> Iterator[CompileCase]:
    """The hidden size of 35B-A3B."""
    types = dict.fromkeys(("y", "shared", "weights", "gate", "out", "residual", "total"), "*fp32")
    types |= {"ids": "*i32", "norm": "*bf16", "normed": "*bf16", "eps": "fp32"}
    for y_bytes, kind in ((4, "*fp32"), (2, "*bf16")):
        of = types | {"y": kind}
        constexprs = {"TOP_K": 8, "KP": 8, "BLOCK": BLOCK_BYTES // y_bytes, "PDL": False}
        yield CompileCase(combine_kernel, signature(combine_kernel, constexprs, of), constexprs, WARPS, 1)
        found, warps = _norm_constants(2048, 8, y_bytes)
        constexprs = {**found, "PDL": False}
        yield CompileCase(combine_norm_kernel, signature(combine_norm_kernel, constexprs, of), constexprs, warps, 1)
