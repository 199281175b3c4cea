"""The norms of query and key heads and their rotation as one Triton kernel.

Legend: T tokens, N query heads, K kv heads, D head dim, R half of the rotary dims.
"""
# pyright: reportCallIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature


@triton.jit
def turned(
    x, weight, cos, sin, row, head, heads, token_stride, head_stride, eps, DIM: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of one token in fp32: normed, and dims i and HALF + i turned by angle i for i < HALF."""
    column = tl.arange(0, BLOCK)
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    turned = column < 2 * HALF
    live = (head < heads)[:, None]
    at = row * token_stride + (head.to(tl.int64) * head_stride)[:, None]
    value = tl.load(x + at + column[None, :], mask=live & (column < DIM)[None, :], other=0.0).to(tl.float32)
    other = tl.load(x + at + partner[None, :], mask=live & turned[None, :], other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)[:, None]
    factor = 1.0 + tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    other_factor = 1.0 + tl.load(weight + partner, mask=turned, other=0.0).to(tl.float32)
    angle = tl.where(column < HALF, column, column - HALF)
    c = tl.load(cos + row * HALF + angle, mask=turned, other=1.0)
    s = tl.load(sin + row * HALF + angle, mask=turned, other=0.0)
    s = tl.where(column < HALF, -s, s)
    return value * scale * (factor * c)[None, :] + other * scale * (other_factor * s)[None, :]


@triton.jit
def turn(
    x, weight, out, cos, sin, row, head, heads, token_stride, head_stride, eps, DIM: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """As `turned`, written to out [.., heads, DIM]."""
    column = tl.arange(0, BLOCK)
    live = (head < heads)[:, None]
    y = turned(x, weight, cos, sin, row, head, heads, token_stride, head_stride, eps, DIM, BLOCK, HALF)
    out_at = ((row * heads + head) * DIM)[:, None] + column[None, :]
    tl.store(out + out_at, y.to(out.dtype.element_ty), mask=live & (column < DIM)[None, :])


@triton.jit
def qk_norm_rope_kernel(
    q, k, q_weight, k_weight, q_out, k_out, cos, sin, q_heads, k_heads, q_token_stride, q_head_stride,
    k_token_stride, k_head_stride, eps, DIM: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Program (token, i): the i-th HEADS heads, first those of q, then those of k."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_tiles = tl.cdiv(q_heads, HEADS)
    lane = tl.arange(0, HEADS)
    if tile < q_tiles:
        head = tile * HEADS + lane
        turn(q, q_weight, q_out, cos, sin, row, head, q_heads, q_token_stride, q_head_stride, eps, DIM, BLOCK, HALF)
    else:
        head = (tile - q_tiles) * HEADS + lane
        turn(k, k_weight, k_out, cos, sin, row, head, k_heads, k_token_stride, k_head_stride, eps, DIM, BLOCK, HALF)


def _config(dim: int, half: int) -> tuple[dict[str, int], int]:
    return {"DIM": dim, "BLOCK": triton.next_power_of_2(dim), "HALF": half, "HEADS": 2}, 2


def qk_norm_rope(
    q_TND: torch.Tensor,
    k_TKD: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference; heads may be views of a wider tensor."""
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_TND, k_TKD))
    (tokens, queries, dim), keys = q_TND.shape, k_TKD.shape[1]
    if tokens and queries + keys:
        q_TND, k_TKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TND, k_TKD))
        constants, warps = _config(dim, cos_TR.shape[1])
        grid = (tokens, triton.cdiv(queries, constants["HEADS"]) + triton.cdiv(keys, constants["HEADS"]))
        qk_norm_rope_kernel[grid](
            q_TND,
            k_TKD,
            q_weight_D,
            k_weight_D,
            q_out,
            k_out,
            cos_TR.contiguous(),
            sin_TR.contiguous(),
            queries,
            keys,
            *q_TND.stride()[:2],
            *k_TKD.stride()[:2],
            eps,
            **constants,
            num_warps=warps,
        )
    return q_out, k_out


def compile_cases() -> Iterator[CompileCase]:
    """Head dims of the family, a quarter of them rotary."""
    pointers = ("q", "k", "q_weight", "k_weight", "q_out", "k_out")
    types = dict.fromkeys(pointers, "*bf16") | {"cos": "*fp32", "sin": "*fp32", "eps": "fp32"}
    for dim in (128, 256):
        constants, warps = _config(dim, dim // 8)
        yield CompileCase(qk_norm_rope_kernel, signature(qk_norm_rope_kernel, constants, types), constants, warps, 1)
