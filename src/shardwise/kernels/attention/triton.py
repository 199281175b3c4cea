"""Paged attention in Triton: what stores keys and values, and the choice between decoding and prefill kernels.

Legend: T tokens of the step, N query heads, K kv heads, D head dim.
"""
# pyright: reportCallIssue=false

from collections.abc import Iterator
from math import e, log2

import torch
import triton
import triton.language as tl

from shardwise.kernels.attention import decode as decoding
from shardwise.kernels.attention import hopper
from shardwise.kernels.attention import prefill as filling
from shardwise.kernels.attention.fp8 import fp8_encode
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.sequences import Sequences


@triton.jit(do_not_specialize_on_alignment=["slots"])
def store_kv_kernel(
    k, v, k_pages, v_pages, slots, k_inverse, v_inverse, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    page_stride, head_stride, token_stride, DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Program (token, kv head): one key and one value to their slot, times the inverse scales."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    slot = tl.load(slots + token)
    at = slot // PAGE_TOKENS * page_stride + head * head_stride + slot % PAGE_TOKENS * token_stride + column
    key = tl.load(k + token * k_token_stride + head * k_head_stride + column, mask=inside, other=0.0)
    value = tl.load(v + token * v_token_stride + head * v_head_stride + column, mask=inside, other=0.0)
    key, value = key.to(tl.float32) * k_inverse, value.to(tl.float32) * v_inverse
    if FP8:
        tl.store(k_pages + at, fp8_encode(key), mask=inside)
        tl.store(v_pages + at, fp8_encode(value), mask=inside)
    else:
        tl.store(k_pages + at, key.to(k_pages.dtype.element_ty), mask=inside)
        tl.store(v_pages + at, value.to(v_pages.dtype.element_ty), mask=inside)


def pools(k_pages: torch.Tensor, v_pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages as kernels take them: FP8 as bytes."""
    if k_pages.stride() != v_pages.stride() or k_pages.dtype != v_pages.dtype or k_pages.stride(3) != 1:
        raise ValueError(
            f"pages of keys and values differ: strides {k_pages.stride()} and {v_pages.stride()}, "
            f"{k_pages.dtype} and {v_pages.dtype}; allocate them alike, head dims next to one another"
        )
    if k_pages.dtype == torch.float8_e4m3fn:
        return k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    return k_pages, v_pages


def store_kv(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    kv_slots_T: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """As the reference; keys and values may be views of a wider tensor."""
    tokens, kv_heads, dim = k_TKD.shape
    if not k_TKD.numel():
        return
    k_TKD, v_TKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (k_TKD, v_TKD))
    k_pool, v_pool = pools(k_pages, v_pages)
    store_kv_kernel[(tokens, kv_heads)](
        k_TKD,
        v_TKD,
        k_pool,
        v_pool,
        kv_slots_T,
        1.0 / k_scale,
        1.0 / v_scale,
        *k_TKD.stride()[:2],
        *v_TKD.stride()[:2],
        *k_pool.stride()[:3],
        DIM=dim,
        BLOCK=triton.next_power_of_2(dim),
        PAGE_TOKENS=k_pool.shape[2],
        FP8=k_pool.dtype == torch.uint8,
        num_warps=1,
    )


def paged_attention(
    q_TND: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    seqs: Sequences,
    head_map_N: torch.Tensor,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    gate_TND: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """As the reference; queries and gates may be views of a wider tensor. pdl: see overlap.py."""
    out_TND = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
    if not q_TND.numel():
        return out_TND
    q_TND = q_TND if q_TND.stride(-1) == 1 else q_TND.contiguous()
    gate_TND = gate_TND if gate_TND is None or gate_TND.stride(-1) == 1 else gate_TND.contiguous()
    k_pool, v_pool = pools(k_pages, v_pages)
    processors, shared_bytes = _card(q_TND.device)
    scale_log2, decodes = scale * k_scale * log2(e), seqs.decodes
    if decodes:
        first = q_TND[:decodes], k_pool, v_pool, out_TND[:decodes]
        decoding.decode(*first, seqs, head_map_N, scale_log2, v_scale, processors, shared_bytes, gate_TND, pdl)
    if decodes < seqs.count:
        arguments = q_TND, k_pool, v_pool, out_TND, seqs, head_map_N, scale_log2, v_scale
        if hopper.fits(q_TND, k_pool, v_pool, gate_TND):
            hopper.prefill(*arguments, gate_TND)
        else:
            filling.prefill(*arguments, shared_bytes, gate_TND)
    return out_TND


def _card(device: torch.device) -> tuple[int, int]:
    """Processors of `device`, and bytes of shared memory that a block may have; small numbers for the interpreter."""
    if device.type == "cpu":
        return 8, 64 * 1024
    card = torch.cuda.get_device_properties(device)
    return card.multi_processor_count, getattr(card, "shared_memory_per_block_optin", 64 * 1024)


def compile_cases() -> Iterator[CompileCase]:
    """All kernels of this op, for head dims of the family."""
    yield from decoding.compile_cases()
    yield from filling.compile_cases()
    yield from hopper.compile_cases()
    for dim, pool in ((256, "*bf16"), (256, "*u8")):
        constexprs = {"DIM": dim, "BLOCK": dim, "PAGE_TOKENS": 64, "FP8": pool == "*u8"}
        types = {"k": "*bf16", "v": "*bf16", "k_pages": pool, "v_pages": pool, "slots": "*i64"}
        types |= {"k_inverse": "fp32", "v_inverse": "fp32"}
        yield CompileCase(store_kv_kernel, signature(store_kv_kernel, constexprs, types), constexprs, 1, 1)
