"""Tokens as rows of e4m3, two each, for products that take nothing else: see warpgroups.py.

A bf16 value times a power of two is the sum of two e4m3 values, the second of them divided by 16, for eight bits are
two times four.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shardwise.kernels.overlap import after_previous, launch, let_next_come


class Halved(NamedTuple):
    """Tokens x_TH, and room for what `halve` makes of them: rows [T, 2, H] of e4m3, and factors [T] of their
    products."""

    x_TH: torch.Tensor
    halves_T2H: torch.Tensor
    back_T: torch.Tensor


@triton.jit
def powers(top):
    """By the largest value of a token: what its products are to be multiplied by, and it itself before, so that it is
    below 256, which e4m3 has."""
    power = tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 8)
    back = ((power - 7) << 23).to(tl.float32, bitcast=True)
    return tl.where(power == 255, float("nan"), back), ((261 - power) << 23).to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """The two values in e4m3, as fp32, that stand for one. The first is cut off, not rounded, so that nothing comes
    back from e4m3, for which ptxas 12.8 reads a wrong register."""
    high = (x.to(tl.uint32, bitcast=True) & 0xFFF00000).to(tl.float32, bitcast=True)
    return high, (x - high) * 16.0


@triton.jit
def halve(x, row, out, back, COLUMNS_: tl.constexpr, BLOCK: tl.constexpr):
    """A row of x as two of e4m3, and what their products are to be multiplied by."""
    k_K = tl.arange(0, BLOCK)
    ok_K = k_K < COLUMNS_
    x_K = tl.load(x + row * COLUMNS_ + k_K, mask=ok_K, other=0).to(tl.float32)
    factor, forth = powers(tl.max(tl.abs(x_K), 0))
    tl.store(back + row, factor)
    high_K, low_K = halves(x_K * forth)
    at = out + row * (2 * COLUMNS_) + k_K
    tl.store(at, high_K.to(tl.float8e4nv), mask=ok_K)
    tl.store(at + COLUMNS_, low_K.to(tl.float8e4nv), mask=ok_K)


@triton.jit
def halve_kernel(x, out, back, COLUMNS_: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A row a program."""
    let_next_come(PDL)
    after_previous(PDL)
    halve(x, tl.program_id(0).to(tl.int64), out, back, COLUMNS_, BLOCK)


def empty_halved(x_TH: torch.Tensor, tokens: int) -> Halved:
    """x, and room for so many tokens' rows."""
    halves_T2H = torch.empty((tokens, 2, x_TH.shape[1]), dtype=torch.float8_e4m3fn, device=x_TH.device)
    return Halved(x_TH, halves_T2H, torch.empty(tokens, dtype=torch.float32, device=x_TH.device))


def halve_rows(x_TH: torch.Tensor, tokens: int, pdl: bool = False) -> Halved:
    """x, which is contiguous, with its rows, and room for those of so many tokens. pdl: see overlap.py."""
    halved, columns = empty_halved(x_TH, tokens), x_TH.shape[1]
    block = triton.next_power_of_2(columns)
    halve_kernel[(x_TH.shape[0],)](*halved, columns, block, num_warps=min(8, max(1, block // 512)), **launch(pdl))
    return halved
