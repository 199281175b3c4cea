"""FP8 linears with activations in FP8, too: for steps that arithmetic limits; costs some 2 % of accuracy.

Activations are rounded per token and group of `in`, the weight's own block, so that both scales of a step are constant.
Legend: T tokens, O out, K in, G groups of K.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.checkpoint.weight import Weight
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear.geometry import linears
from shardwise.kernels.linear.reference import E4M3_MAX, activation_group
from shardwise.kernels.linear.tiles import (
    COLUMNS,
    FINE,
    FINE_CODE,
    INVERSE,
    NATIVE,
    ROWS,
    Target,
    coarse_scale,
    e4m3,
    fine_row,
    operand,
    scale_at,
    target_of,
)


@triton.jit
def e4m3_code(value):
    """The codes of fp32 numbers within +-448, rounded to nearest, ties to even, on any device."""
    bits = value.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # the exponents' biases are 127 and 7
    small = (tl.abs(value) * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xFF  # multiples of 2 ** -9
    code = tl.where(tl.abs(value) < 0.015625, small, normal)
    return (code | (bits >> 24 & 128)).to(tl.uint8)


@triton.jit
def quantise_kernel(x, x_stride, codes, scales, columns, G: tl.constexpr, LARGEST: tl.constexpr):
    """One group of one token."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = group * G + tl.arange(0, G)
    value = tl.load(x + row * x_stride + i, mask=i < columns, other=0).to(tl.float32)
    most = tl.max(tl.abs(value), 0)
    scale = tl.where(most > 0, most / LARGEST, 1.0)
    tl.store(codes + row * columns + i, e4m3_code(value / scale), mask=i < columns)
    tl.store(scales + row * tl.num_programs(1) + group, scale)


@triton.jit(do_not_specialize=["tokens"])
def w8a8_kernel(
    x, x_scales, groups, value, fine, coarse, out, tokens, W: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """A tile of BO rows and BT tokens; each step is one group, whose product is scaled in fp32."""
    K: tl.constexpr = W[COLUMNS]
    tiles_O: tl.constexpr = (W[ROWS] + BO - 1) // BO
    o_O = tl.program_id(0) % tiles_O * BO + tl.arange(0, BO)
    t_T = tl.program_id(0) // tiles_O * BT + tl.arange(0, BT)
    ok_O, ok_T, e = o_O < W[ROWS], t_T < tokens, tl.program_id(0) * 0
    acc = tl.zeros((BO, BT), tl.float32)
    for group in range((K + G - 1) // G):
        k_K = group * G + tl.arange(0, G)
        x_at = (t_T.to(tl.int64) * K)[None, :] + k_K[:, None]
        w_at = (o_O.to(tl.int64) * K)[:, None] + k_K[None, :]
        x_KT = tl.load(x + x_at, mask=ok_T[None, :] & (k_K < K)[:, None], other=0)
        w_OK = tl.load(value + w_at, mask=ok_O[:, None] & (k_K < K)[None, :], other=0)
        if W[NATIVE]:
            part = tl.dot(w_OK.to(tl.float8e4nv, bitcast=True), x_KT.to(tl.float8e4nv, bitcast=True))
        else:
            part = tl.dot(e4m3(w_OK, False), e4m3(x_KT, False))
        part *= tl.load(x_scales + t_T * groups + group, mask=ok_T, other=0)[None, :]
        if W[FINE] > 0:
            at = fine_row(e, o_O, W) + group * G // W[FINE]
            part *= scale_at(fine + at, ok_O, W[FINE_CODE], W[INVERSE] % 2 == 1, W[NATIVE])[:, None]
        acc += part
    acc *= coarse_scale(coarse, e, o_O, ok_O, W)[:, None]
    at = t_T.to(tl.int64)[None, :] * W[ROWS] + o_O[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=ok_O[:, None] & ok_T[None, :])


def fits(weight: Weight) -> bool:
    """Whether `weight` is FP8, in blocks of `in` of 32 or more, a power of two, or without blocks."""
    group = activation_group(weight)
    return weight.held[0].stored.dtype == "F8_E4M3" and group >= 32 and group & (group - 1) == 0


def tile(tokens: int) -> tuple[int, int, int, int]:
    """BO, BT, warps, stages."""
    return (128, 128, 8, 3) if tokens > 64 else (64, 64, 4, 3)


def linear(
    x_TI: torch.Tensor, weight: Weight, out_dtype: torch.dtype | None = None, target: Target | None = None
) -> torch.Tensor:
    """As reference.linear_w8a8, for x of [T, I] and a weight that fits()."""
    out_dtype, target = out_dtype or x_TI.dtype, target or target_of(x_TI.device)
    (tokens, columns), rows, group = x_TI.shape, weight.shape[0], activation_group(weight)
    out_TO = torch.zeros((tokens, rows), dtype=out_dtype, device=x_TI.device)
    if not out_TO.numel() or not columns:
        return out_TO
    x_TK, of, groups = x_TI.contiguous(), operand(weight, target.native_fp8), triton.cdiv(columns, group)
    codes_TK = torch.empty((tokens, columns), dtype=torch.uint8, device=x_TI.device)
    scales_TG = torch.empty((tokens, groups), dtype=torch.float32, device=x_TI.device)
    quantise_kernel[(tokens, groups)](x_TK, columns, codes_TK, scales_TG, columns, group, E4M3_MAX, num_warps=1)
    BO, BT, warps, stages = tile(tokens)
    w8a8_kernel[(triton.cdiv(rows, BO) * triton.cdiv(tokens, BT),)](
        codes_TK, scales_TG, groups, *of.tensors(), out_TO, tokens, of.layout, BO, BT, group,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_TO


def compile_cases() -> Iterator[CompileCase]:
    """For cards with e4m3 in hardware."""
    types = {"x_scales": "*fp32", "out": "*bf16"}
    for of, kinds in linears(True):
        group = of.layout[4] or 128
        if of.kind != 1 or group < 32:
            continue
        for tokens in (64, 1024):
            BO, BT, warps, stages = tile(tokens)
            constexprs = {"W": of.layout, "BO": BO, "BT": BT, "G": group}
            signed = signature(w8a8_kernel, constexprs, types | kinds | {"x": "*u8"})
            yield CompileCase(w8a8_kernel, signed, constexprs, warps, stages)
    constexprs = {"G": 128, "LARGEST": E4M3_MAX}
    types = {"x": "*bf16", "codes": "*u8", "scales": "*fp32"}
    yield CompileCase(quantise_kernel, signature(quantise_kernel, constexprs, types), constexprs, 1, 1)
