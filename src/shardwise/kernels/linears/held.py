"""A plain linear of many columns for 2 to 128 tokens on Hopper: parts of its sum, which the norm behind it adds.

Every program holds a part of the weight, of some rows and columns, in shared memory: all of it was asked for before the
program waits for the kernel before it. What is left then is reading the input, of which each program needs its columns,
and products by warp group instructions. Codes of FP8 and NVFP4, made plain in the same place, gained alone and hardly
in whole steps (benchmarks/README.md), and go by other kernels.

Legend: M rows of a program, T tokens, K columns, S parts of the sum.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from collections.abc import Iterator
from typing import Any, NamedTuple

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

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.gluon import all_wait, copy_to_shared
from shardwise.kernels.hopper import SHARED_KIB, is_hopper
from shardwise.kernels.linear.fragments import fits
from shardwise.kernels.linear.geometry import case
from shardwise.kernels.linear.tiles import COLUMNS, ROWS, Operand
from shardwise.kernels.overlap import after_previous, launch, let_next_come

STEP = gl.constexpr(128)  # columns of a product
MOST_TOKENS = 128  # beyond, libraries are faster
PROCESSORS, FEWEST_PROGRAMS = 132, 96  # of Hopper's cards, and how many of them are to have work
FEWEST_COLUMNS = 2048  # of fewer nothing was measured


class Held(NamedTuple):
    """A configuration: rows and columns of a program, tokens of a turn, and warps."""

    BO: int
    PART: int
    BT: int
    warps: int


@constexpr_function
def _copy_layout(WARPS):
    """Of steps in bf16: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])


@gluon.jit
def _fill(w_s, value, o0, k0, W: gl.constexpr, BO: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr):
    """A part of the weight on its way to shared memory, as one group of copies."""
    LAYOUT: gl.constexpr = _copy_layout(WARPS)
    o_M = o0 + gl.arange(0, BO, layout=gl.SliceLayout(1, LAYOUT))
    k_K = k0 + gl.arange(0, STEP, layout=gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(o_M * W[COLUMNS], 1) + gl.expand_dims(k_K, 0)
    for c in gl.static_range(N):
        copy_to_shared(w_s.index(c), value + (at + c * STEP))
    async_copy.commit_group()


@gluon.jit
def _refill(x_s, pointers, go):
    """The next turn's step to where all threads' products have read this one's."""
    all_wait()
    if go:
        copy_to_shared(x_s, pointers)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["tokens"])
def held_linear_kernel(
    x, value, out, tokens, W: gl.constexpr, BO: gl.constexpr, PART: gl.constexpr, BT: gl.constexpr,
    TURNS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [S, T, O]: BO rows over PART columns, for all tokens, BT of them a turn. TURNS: whether there are several."""
    let_next_come(PDL)
    K: gl.constexpr = W[COLUMNS]
    N: gl.constexpr = PART // STEP
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BT, 16])
    COPY: gl.constexpr = _copy_layout(WARPS)
    o0, part = gl.program_id(0) * BO, gl.program_id(1)
    k0 = part * PART
    w_s = gl.allocate_shared_memory(gl.bfloat16, [N, BO, STEP], SHARED)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [N, BT, STEP], SHARED)
    o_M = o0 + gl.arange(0, BO, layout=gl.SliceLayout(1, PRODUCT))
    _fill(w_s, value, o0, k0, W, BO, N, WARPS)
    after_previous(PDL)
    at_T = gl.arange(0, BT, layout=gl.SliceLayout(1, COPY))
    at_K = k0 + gl.arange(0, STEP, layout=gl.SliceLayout(0, COPY))
    at = gl.expand_dims(gl.minimum(at_T, tokens - 1) * K, 1) + gl.expand_dims(at_K, 0)
    for c in gl.static_range(N):
        copy_to_shared(x_s.index(c), x + (at + c * STEP))
        if TURNS:
            async_copy.commit_group()
    if not TURNS:
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
    t_T = gl.arange(0, BT, layout=gl.SliceLayout(0, PRODUCT))
    for t0 in range(0, tokens if TURNS else 1, BT):
        acc = gl.zeros((BO, BT), gl.float32, layout=PRODUCT)
        if TURNS:
            at = gl.expand_dims(gl.minimum(t0 + BT + at_T, tokens - 1) * K, 1) + gl.expand_dims(at_K, 0)
        for c in gl.static_range(N):
            if TURNS:
                async_copy.wait_group(N - 1 if c == 0 else N - 2)
                fence_async_shared()
            right = x_s.index(c).permute((1, 0))
            acc = warpgroup_mma(w_s.index(c), right, acc, is_async=True)
            if TURNS and c > 0:
                acc = warpgroup_mma_wait(1, deps=[acc])
            if TURNS and c > 0:
                _refill(x_s.index(c - 1), x + (at + (c - 1) * STEP), t0 + BT < tokens)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if TURNS:
            _refill(x_s.index(N - 1), x + (at + (N - 1) * STEP), t0 + BT < tokens)
        to = gl.expand_dims((part * tokens + t0 + t_T) * W[ROWS], 0) + gl.expand_dims(o_M, 1)
        gl.store(out + to, acc, mask=gl.expand_dims(t0 + t_T < tokens, 0))


def held_rule(of: Operand, tokens: int) -> Held | None:
    """As measured on an H200, for weights whose programs all fit there at once; None for others."""
    BO, warps = (64, 4) if tokens <= 32 else (128, 8)
    BT = min(64, max(16, triton.next_power_of_2(tokens)))
    rows, columns = of.layout[2:4]
    if rows % BO or columns % STEP.value or columns < FEWEST_COLUMNS:
        return None
    steps, most = columns // STEP.value, 512 // BO  # 128 KiB of the weight at most
    for n in (8, 4, 2, 1):
        programs, room = rows // BO * (steps // n), SHARED_KIB * 1024 // (n * STEP.value * (BO + BT) * 2 + 1024)
        if n <= most and steps % n == 0 and FEWEST_PROGRAMS <= programs <= PROCESSORS * room:
            return Held(BO, n * STEP.value, BT, warps)
    return None


def held_config(of: Operand, x_TK: torch.Tensor) -> Held | None:
    """How this weight is to be multiplied with x by this kernel, if it is to be."""
    tokens = x_TK.shape[0]
    return held_rule(of, tokens) if 2 <= tokens <= MOST_TOKENS and possible(of, x_TK) else None


def possible(of: Operand, x_TK: torch.Tensor) -> bool:
    """Whether this kernel can multiply such a weight with such an input, on this device, in some configuration."""
    if of.kind or not fits(of, x_TK.dtype) or not is_hopper(x_TK.device):
        return False
    return of.layout[ROWS.value] % 64 == 0 and of.layout[COLUMNS.value] % STEP.value == 0


def held_constants(of: Operand, tokens: int, config: Held) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "W": of.layout, "BO": config.BO, "PART": config.PART, "BT": config.BT, "TURNS": tokens > config.BT,
        "WARPS": config.warps,
    }  # fmt: skip


def held_linear(x_TK: torch.Tensor, of: Operand, config: Held, pdl: bool) -> torch.Tensor:
    """-> [S, T, O] fp32; x is contiguous."""
    tokens, (rows, columns) = x_TK.shape[0], of.layout[2:4]
    splits = columns // config.PART
    out_STO = torch.empty((splits, tokens, rows), dtype=torch.float32, device=x_TK.device)
    held_linear_kernel[(rows // config.BO, splits)](
        x_TK, of.value, out_STO, tokens, **held_constants(of, tokens, config), **launch(pdl), num_warps=config.warps
    )
    return out_STO


def compile_cases() -> Iterator[CompileCase]:
    """The output projections of 35B-A3B."""
    for tokens in (4, 128):
        found = case(2048, 4096, "bf16", True)
        types = {"x": "*bf16", "value": "*bf16", "out": "*fp32"}
        config = held_rule(found.of, tokens)
        assert config is not None
        constexprs = held_constants(found.of, tokens, config) | {"PDL": True}
        signed = signature(held_linear_kernel, constexprs, types)
        yield CompileCase(held_linear_kernel, signed, constexprs, config.warps, 1, SHARED_KIB * 1024)
