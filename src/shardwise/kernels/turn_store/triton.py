"""The norms and rotation of query and key heads, and keys and values to their slots, as one Triton kernel.

Legend: T tokens, N query heads, K kv heads, D head dim, R half of the rotary dims.
"""
# pyright: reportCallIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.kernels.attention.fp8 import fp8_encode
from shardwise.kernels.attention.triton import pools
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.overlap import after_previous, launch, let_next_come
from shardwise.kernels.rope.triton import turn, turned

MANY_TOKENS = 256  # from here on there are programs enough with more heads each, of which more is on its way at once


@triton.jit
def _store(pages, at, value, mask, FP8: tl.constexpr):
    value = fp8_encode(value) if FP8 else value.to(pages.dtype.element_ty)
    tl.store(pages + at, value, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def turn_store_kernel(
    q, k, v, q_weight, k_weight, cos, sin, q_out, k_pages, v_pages, slots, q_heads, k_heads, q_token_stride,
    q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, page_stride, head_stride, token_stride,
    k_inverse, v_inverse, eps, DIM: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, PAGE_TOKENS: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, i): the i-th tile of heads: first Q_HEADS of q each, then K_HEADS of k and of v."""
    let_next_come(PDL)
    row, tile, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    q_tiles, slot = tl.cdiv(q_heads, Q_HEADS), tl.load(slots + row)
    after_previous(PDL)
    if tile < q_tiles:
        q_head = tile * Q_HEADS + tl.arange(0, Q_HEADS)
        turn(q, q_weight, q_out, cos, sin, row, q_head, q_heads, q_token_stride, q_head_stride, eps, DIM, BLOCK, HALF)
    else:
        head = (tile - q_tiles) * K_HEADS + tl.arange(0, K_HEADS)
        mask = (head < k_heads)[:, None] & (column < DIM)[None, :]
        v_at = row * v_token_stride + (head * v_head_stride)[:, None] + column[None, :]
        value = tl.load(v + v_at, mask=mask, other=0.0)
        y = turned(k, k_weight, cos, sin, row, head, k_heads, k_token_stride, k_head_stride, eps, DIM, BLOCK, HALF)
        page_at = slot // PAGE_TOKENS * page_stride + slot % PAGE_TOKENS * token_stride
        at = page_at + (head * head_stride)[:, None] + column[None, :]
        _store(v_pages, at, value.to(tl.float32) * v_inverse, mask, FP8)
        _store(k_pages, at, y.to(k.dtype.element_ty).to(tl.float32) * k_inverse, mask, FP8)


def _config(dim: int, half: int, tokens: int, queries: int, keys: int) -> tuple[dict[str, int], int]:
    """Constants and warps."""
    most = 8 if tokens >= MANY_TOKENS else 2
    q_heads, k_heads = (max(1, min(most, triton.next_power_of_2(heads))) for heads in (queries, keys))
    constants = {"DIM": dim, "BLOCK": triton.next_power_of_2(dim), "HALF": half}
    return constants | {"Q_HEADS": q_heads, "K_HEADS": k_heads}, 2


def turn_store(
    q_TND: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    eps: float,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    kv_slots_T: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    pdl: bool = False,
) -> torch.Tensor:
    """As the reference; heads may be views of a wider tensor. pdl: see overlap.py."""
    q_out = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
    (tokens, queries, dim), keys = q_TND.shape, k_TKD.shape[1]
    if not tokens or not queries + keys:
        return q_out
    q_TND, k_TKD, v_TKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TND, k_TKD, v_TKD))
    k_pool, v_pool = pools(k_pages, v_pages)
    constants, warps = _config(dim, cos_TR.shape[1], tokens, queries, keys)
    grid = (tokens, triton.cdiv(queries, constants["Q_HEADS"]) + triton.cdiv(keys, constants["K_HEADS"]))
    turn_store_kernel[grid](
        q_TND, k_TKD, v_TKD, q_weight_D, k_weight_D, cos_TR.contiguous(), sin_TR.contiguous(), q_out, k_pool, v_pool,
        kv_slots_T, queries, keys, *q_TND.stride()[:2], *k_TKD.stride()[:2], *v_TKD.stride()[:2],
        *k_pool.stride()[:3], 1.0 / k_scale, 1.0 / v_scale, eps, **constants, PAGE_TOKENS=k_pool.shape[2],
        FP8=k_pool.dtype == torch.uint8, num_warps=warps, **launch(pdl),
    )  # fmt: skip
    return q_out


def compile_cases() -> Iterator[CompileCase]:
    """Head dims of the family, a quarter of them rotary, over pages in bf16 and FP8."""
    types = dict.fromkeys(("q", "k", "v", "q_weight", "k_weight", "q_out"), "*bf16")
    types |= {"cos": "*fp32", "sin": "*fp32", "eps": "fp32", "k_inverse": "fp32", "v_inverse": "fp32", "slots": "*i64"}
    for tokens, dim, pool in ((1, 128, "*bf16"), (1, 256, "*bf16"), (1, 256, "*u8"), (MANY_TOKENS, 256, "*bf16")):
        constants, warps = _config(dim, dim // 8, tokens, 16, 2)
        constexprs = constants | {"PAGE_TOKENS": 64, "FP8": pool == "*u8", "PDL": False}
        signed = signature(turn_store_kernel, constexprs, types | {"k_pages": pool, "v_pages": pool})
        yield CompileCase(turn_store_kernel, signed, constexprs, warps, 1)
