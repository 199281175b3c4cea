"""Flash attention of chunks of prompts over pages: a block of queries of one head a program.

Legend: T tokens of the step, S sequences, N query heads, K kv heads, D head dim.
"""
# pyright: reportCallIssue=false

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from shardwise.kernels.attention.decode import METADATA, load_tile
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.products import settled
from shardwise.kernels.sequences import Sequences

KIB = 1024


@triton.jit(do_not_specialize=["pages_stride", "first_sequence"], do_not_specialize_on_alignment=(*METADATA, "starts"))
def prefill_kernel(
    q, k_pages, v_pages, out, gate, starts, context, pages, head_map, scale_log2, v_scale, first_sequence, pages_stride,
    q_token_stride, q_head_stride, gate_token_stride, gate_head_stride, out_token_stride, page_stride, head_stride,
    token_stride, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_Q: tl.constexpr, FP8: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Program (query head, block of queries, chunk). Late blocks, which see most, are started first.

    A page's number is loaded a turn before its keys and values are, for which see decode_kernel.
    """
    head = tl.program_id(0)
    sequence = (tl.program_id(2) + first_sequence).to(tl.int64)
    begin = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - begin
    block = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q
    if block >= queries:
        return
    kv_head = tl.load(head_map + head).to(tl.int64)
    past = tl.load(context + sequence)
    row = block + tl.arange(0, BLOCK_Q)
    column = tl.arange(0, BLOCK_D)
    wanted = (row < queries)[:, None] & (column < DIM)[None, :]
    token = (begin + row).to(tl.int64)
    query = tl.load(
        q + (token * q_token_stride)[:, None] + head * q_head_stride + column[None, :], mask=wanted, other=0.0
    )
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((BLOCK_Q,), tl.float32)
    value_sum = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    last = past + tl.minimum(block + BLOCK_Q, queries)
    table = pages + sequence * pages_stride
    page = tl.load(table).to(tl.int64)
    for start in range(0, last, BLOCK_T):
        position = start + tl.arange(0, BLOCK_T)
        offset, inside = position % PAGE_TOKENS, position < last
        key = load_tile(
            k_pages, page, kv_head, offset, page_stride, head_stride, token_stride, inside, column, DIM, FP8, q
        )
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        score = tl.where(position[None, :] <= (past + row)[:, None], score, float("-inf"))
        # Whole powers of two, as in decoding, so that both round alike. Position 0 is seen by all: this is finite.
        new_top = tl.maximum(top, tl.ceil(tl.max(score, 1) * scale_log2))
        weight = tl.exp2(score * scale_log2 - new_top[:, None])
        fade = tl.exp2(top - new_top)
        value = load_tile(
            v_pages, page, kv_head, offset, page_stride, head_stride, token_stride, inside, column, DIM, FP8, q
        )
        value_sum = tl.dot(weight.to(value.dtype), value, value_sum * fade[:, None], input_precision="ieee")
        value_sum = settled(value_sum, start < last)
        weight_sum = weight_sum * fade + tl.sum(weight, 1)
        top = new_top
        page = tl.load(table + tl.minimum(start + BLOCK_T, last - 1) // PAGE_TOKENS).to(tl.int64)
    y = value_sum / weight_sum[:, None] * v_scale
    if GATE:
        gate_at = (token * gate_token_stride)[:, None] + head * gate_head_stride + column[None, :]
        y *= tl.sigmoid(tl.load(gate + gate_at, mask=wanted, other=0.0).to(tl.float32))
    out_at = (token * out_token_stride)[:, None] + head * DIM + column[None, :]
    tl.store(out + out_at, y.to(out.dtype.element_ty), mask=wanted)


def _config(
    dim: int, page_tokens: int, item_bytes: int, fp8: bool, shared_bytes: int
) -> tuple[dict[str, Any], int, int]:
    """Constants, warps and stages for a card with `shared_bytes` per block.

    What a block takes is at most the queries and two tiles of keys and of values each. In fp32 there are no tensor
    cores to fill, and a wide product unrolls into very long code.
    """
    block_d = max(16, triton.next_power_of_2(dim))
    row_bytes = block_d * item_bytes
    narrow = item_bytes == 4 or row_bytes > 512
    block_q = 16 if narrow else 128 if shared_bytes >= 160 * KIB else 64
    fit = next(n for n in (64, 32, 16) if n == 16 or (not narrow and (block_q + 4 * n) * row_bytes <= shared_bytes))
    constants = {"DIM": dim, "BLOCK_D": block_d, "PAGE_TOKENS": page_tokens, "BLOCK_Q": block_q, "FP8": fp8}
    constants["BLOCK_T"] = min(fit, page_tokens & -page_tokens)
    return constants, 8 if block_q * block_d >= 64 * 256 else 4, 2


def prefill(
    q_TND: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out_TND: torch.Tensor,
    seqs: Sequences,
    head_map_N: torch.Tensor,
    scale_log2: float,
    v_scale: float,
    shared_bytes: int,
    gate_TND: torch.Tensor | None = None,
) -> None:
    """Fills the rows of out_TND, contiguous, of the chunks of `seqs`, times the sigmoid of the gate, if there is one.

    FP8 pages come as their bytes (uint8). scale_log2: more than 0. shared_bytes (per block): of the card.
    """
    (_, heads, dim), page_tokens = q_TND.shape, k_pages.shape[2]
    fp8 = k_pages.dtype == torch.uint8
    constants, warps, stages = _config(dim, page_tokens, q_TND.element_size(), fp8, shared_bytes)
    gate, gated = (q_TND, False) if gate_TND is None else (gate_TND, True)
    grid = (heads, triton.cdiv(seqs.max_query, constants["BLOCK_Q"]), seqs.count - seqs.decodes)
    prefill_kernel[grid](
        q_TND,
        k_pages,
        v_pages,
        out_TND,
        gate,
        seqs.starts_S1,
        seqs.context_S,
        seqs.pages_SP,
        head_map_N,
        scale_log2,
        v_scale,
        seqs.decodes,
        seqs.pages_SP.stride(0),
        *q_TND.stride()[:2],
        *gate.stride()[:2],
        out_TND.stride(0),
        *k_pages.stride()[:3],
        **constants,
        GATE=gated,
        num_warps=warps,
        num_stages=stages,
    )


def compile_cases() -> Iterator[CompileCase]:
    """The family's head dim in bf16, over bf16 and FP8 pages, for each shared memory; fp32 at a small one."""
    types = dict.fromkeys((*METADATA, "starts"), "*i32") | {"scale_log2": "fp32", "v_scale": "fp32"}
    for dim, kind, pool in ((256, "*bf16", "*bf16"), (256, "*bf16", "*u8"), (64, "*fp32", "*fp32")):
        for shared_bytes in (64 * KIB, 99 * KIB, 227 * KIB):
            item_bytes = 4 if kind == "*fp32" else 2
            constants, warps, stages = _config(dim, 64, item_bytes, pool == "*u8", shared_bytes)
            kinds = types | {"q": kind, "out": kind, "gate": kind, "k_pages": pool, "v_pages": pool}
            constexprs = constants | {"GATE": True}
            signed = signature(prefill_kernel, constexprs, kinds)
            yield CompileCase(prefill_kernel, signed, constexprs, warps, stages, shared_bytes)
