"""Flash decoding over pages: one query of each sequence, its positions split over programs, then a reduction.

A program serves up to 16 query heads that read the same kv head, so that keys and values are read once for them all.
Exponents are taken against the running maximum rounded up to a whole power of two. A later maximum then moves weights
by powers of two alone, which leaves their rounding to 16 bits as it was: results hardly depend on the splits.

Legend: S sequences, N query heads, K kv heads, D head dim, C splits.
"""
# pyright: reportCallIssue=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from shardwise.kernels.attention.fp8 import fp8_decode
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.overlap import after_previous, ask_for, launch, let_next_come
from shardwise.kernels.sequences import Sequences

HEADS = 16  # rows of a dot, of which there cannot be fewer
MAX_SPLITS = 128
REDUCE_WARPS = 2
METADATA = ("context", "pages", "head_map")  # views of packed tensors, aligned by chance: not worth a variant


@triton.jit
def load_tile(pool, page, kv_head, offset, page_stride, head_stride, token_stride, inside, column, DIM: tl.constexpr,
              FP8: tl.constexpr, like):  # fmt: skip
    """Keys or values of positions of one page, [positions, columns], in the type of `like`; zeros outside."""
    at = page * page_stride + kv_head * head_stride + offset[:, None] * token_stride + column[None, :]
    found = tl.load(pool + at, mask=inside[:, None] & (column < DIM)[None, :], other=0)
    if FP8:
        found = fp8_decode(found)
    return found.to(like.dtype.element_ty)


@triton.jit
def ask_for_tile(pool, page, kv_head, offset, page_stride, head_stride, token_stride, DIM: tl.constexpr,
                 BLOCK_D: tl.constexpr):  # fmt: skip
    """Have what load_tile will load brought to the second-level cache, where writes of it are seen, too."""
    LINE: tl.constexpr = 128 // (pool.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = BLOCK_D // LINE if BLOCK_D > LINE else 1  # pyright: ignore[reportAssignmentType]
    column = tl.minimum(tl.arange(0, LINES) * LINE, DIM - 1)
    at = page * page_stride + kv_head * head_stride + offset[:, None] * token_stride + column[None, :]
    ask_for((pool + at).to(tl.int64))


@triton.jit
def _used(length, splits, BLOCK_T: tl.constexpr):
    """Splits that get positions: the first ones, even shares in whole blocks."""
    return tl.minimum(tl.cdiv(length, BLOCK_T), splits)


@triton.jit
def _first(length, used, split, BLOCK_T: tl.constexpr):
    """First position of a split, which is the last split's end."""
    return tl.minimum(split * tl.cdiv(length, BLOCK_T) // used * BLOCK_T, length)


@triton.jit(do_not_specialize=["pages_stride", "splits"], do_not_specialize_on_alignment=METADATA)
def decode_kernel(
    q, k_pages, v_pages, out, gate, partial, stats, context, pages, head_map, scale_log2, v_scale, heads, pages_stride,
    splits, q_token_stride, q_head_stride, gate_token_stride, gate_head_stride, page_stride, head_stride, token_stride,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, HEADS: tl.constexpr,
    FP8: tl.constexpr, PARTIAL: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence, kv head and tile of query heads, split): the heads of the tile that read this kv head.

    A page's number is loaded a turn before its keys and values are: Triton has loads that wait for no load of their
    own turn on their way for several turns, and others for none.
    """
    let_next_come(PDL)
    sequence, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    tiles = tl.cdiv(heads, HEADS)
    kv_head = (tl.program_id(1) // tiles).to(tl.int64)
    head = tl.program_id(1) % tiles * HEADS + tl.arange(0, HEADS)
    live = (head < heads) & (tl.load(head_map + head, mask=head < heads, other=-1) == kv_head)
    length = tl.load(context + sequence) + 1
    used = _used(length, splits, BLOCK_T)
    if (tl.sum(live.to(tl.int32), 0) == 0) | (split >= used):
        after_previous(PDL)
        return
    first, last = _first(length, used, split, BLOCK_T), _first(length, used, split + 1, BLOCK_T)
    table = pages + sequence * pages_stride
    page = tl.load(table + first // PAGE_TOKENS).to(tl.int64)
    step = tl.arange(0, BLOCK_T)
    if PDL:
        offset = first % PAGE_TOKENS + tl.minimum(step, last - 1 - first)
        ask_for_tile(k_pages, page, kv_head, offset, page_stride, head_stride, token_stride, DIM, BLOCK_D)
        ask_for_tile(v_pages, page, kv_head, offset, page_stride, head_stride, token_stride, DIM, BLOCK_D)
    after_previous(PDL)
    column = tl.arange(0, BLOCK_D)
    wanted = live[:, None] & (column < DIM)[None, :]
    q_at = sequence * q_token_stride + (head * q_head_stride)[:, None] + column[None, :]
    query = tl.load(q + q_at, mask=wanted, other=0.0)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((HEADS,), tl.float32)
    value_sum = tl.zeros((HEADS, BLOCK_D), tl.float32)
    for start in range(first, last, BLOCK_T):
        inside = start + step < last
        offset = start % PAGE_TOKENS + step
        key = load_tile(
            k_pages, page, kv_head, offset, page_stride, head_stride, token_stride, inside, column, DIM, FP8, q
        )
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        score = tl.where(inside[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.ceil(tl.max(score, 1)))
        weight = tl.exp2(score - new_top[:, None])
        fade = tl.exp2(top - new_top)
        value = load_tile(
            v_pages, page, kv_head, offset, page_stride, head_stride, token_stride, inside, column, DIM, FP8, q
        )
        value_sum = tl.dot(weight.to(value.dtype), value, value_sum * fade[:, None], input_precision="ieee")
        weight_sum = weight_sum * fade + tl.sum(weight, 1)
        top = new_top
        page = tl.load(table + tl.minimum(start + BLOCK_T, last - 1) // PAGE_TOKENS).to(tl.int64)
    if PARTIAL:
        at = (sequence * heads + head) * splits + split
        tl.store(partial + (at * DIM)[:, None] + column[None, :], value_sum, mask=wanted)
        tl.store(stats + at * 2, top, mask=live)
        tl.store(stats + at * 2 + 1, weight_sum, mask=live)
    else:
        y = value_sum / weight_sum[:, None] * v_scale
        if GATE:
            gate_at = sequence * gate_token_stride + (head * gate_head_stride)[:, None] + column[None, :]
            y *= tl.sigmoid(tl.load(gate + gate_at, mask=wanted, other=0.0).to(tl.float32))
        out_at = ((sequence * heads + head) * DIM)[:, None] + column[None, :]
        tl.store(out + out_at, y.to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["context"])
def reduce_kernel(
    partial, stats, out, gate, context, v_scale, splits, gate_token_stride, gate_head_stride, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Program (sequence, query head, BLOCK_D columns): up to BLOCK_C splits, summed at a common maximum, and gated.

    It starts without overlap: decode_kernel needs much shared memory, and where every kernel starts before the last has
    ended, processors keep it parted that way (see overlap.py), so that linears and experts, which read through the
    first-level cache, are slower for the rest of the layer and the next ones (measured: benchmarks/README.md).
    """
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, BLOCK_C)
    at = row * splits + split
    live = split < _used(tl.load(context + tl.program_id(0)) + 1, splits, BLOCK_T)
    column = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < DIM
    tops = tl.load(stats + at * 2, mask=live, other=float("-inf"))
    sums = tl.load(stats + at * 2 + 1, mask=live, other=0.0)
    values = tl.load(partial + (at * DIM)[:, None] + column[None, :], mask=live[:, None] & inside[None, :], other=0.0)
    share = tl.exp2(tops - tl.max(tops, 0))
    y = tl.sum(values * share[:, None], 0) / tl.sum(sums * share, 0) * v_scale
    if GATE:
        gate_at = tl.program_id(0).to(tl.int64) * gate_token_stride + tl.program_id(1) * gate_head_stride + column
        y *= tl.sigmoid(tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + row * DIM + column, y.to(out.dtype.element_ty), mask=inside)


def _config(
    dim: int, page_tokens: int, item_bytes: int, fp8: bool, shared_bytes: int
) -> tuple[dict[str, Any], int, int]:
    """Constants, warps and stages for a card with `shared_bytes` per block.

    The blocks of keys and values that a program has at a time take at most 32 KiB, so that several programs fit; with
    three stages there is one such pair in use while the next is on its way. In fp32 there are no tensor cores to fill,
    and a wide product unrolls into very long code.
    """
    block_d = max(16, triton.next_power_of_2(dim))
    fit = 16 if item_bytes == 4 else max(16, 64 * 1024 // (4 * block_d * item_bytes))
    block_t = min(64, page_tokens & -page_tokens, fit)
    constants = {"DIM": dim, "BLOCK_D": block_d, "PAGE_TOKENS": page_tokens, "BLOCK_T": block_t}
    stages = 3 if shared_bytes >= 160 * 1024 else 2
    return constants | {"HEADS": HEADS, "FP8": fp8}, 4 if block_d >= 128 else 2, stages


def _reduction(dim: int, splits: int) -> dict[str, int]:
    """Constants of the reduction: all splits by as many columns as make a tile that a program loads at once."""
    block_c = max(16, triton.next_power_of_2(splits))
    return {"DIM": dim, "BLOCK_C": block_c, "BLOCK_D": min(triton.next_power_of_2(dim), max(16, 4096 // block_c))}


def split_count(max_length: int, programs: int, processors: int, block_tokens: int) -> int:
    """Most splits with which no processor has more than two programs, and each a block; from host numbers alone."""
    return max(1, min(2 * processors // programs, -(-max_length // block_tokens), MAX_SPLITS))


def decode(
    q_SND: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out_SND: torch.Tensor,
    seqs: Sequences,
    head_map_N: torch.Tensor,
    scale_log2: float,
    v_scale: float,
    processors: int,
    shared_bytes: int,
    gate_SND: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Fills out_SND, contiguous, for the decodes of `seqs`, times the sigmoid of the gate, if there is one.

    FP8 pages come as their bytes (uint8). processors, shared_bytes (per block): of the card. pdl: see overlap.py.
    """
    (count, heads, dim), (_, kv_heads, page_tokens, _) = q_SND.shape, k_pages.shape
    fp8 = k_pages.dtype == torch.uint8
    constants, warps, stages = _config(dim, page_tokens, q_SND.element_size(), fp8, shared_bytes)
    groups = kv_heads * triton.cdiv(heads, HEADS)
    splits = split_count(seqs.max_length, count * groups, processors, constants["BLOCK_T"])
    partial, stats = out_SND, out_SND  # of no use with one split
    gate_SND, gated = (q_SND, False) if gate_SND is None else (gate_SND, True)
    if splits > 1:
        partial = torch.empty(count, heads, splits, dim, dtype=torch.float32, device=q_SND.device)
        stats = torch.empty(count, heads, splits, 2, dtype=torch.float32, device=q_SND.device)
    decode_kernel[(count, groups, splits)](
        q_SND,
        k_pages,
        v_pages,
        out_SND,
        gate_SND,
        partial,
        stats,
        seqs.context_S,
        seqs.pages_SP,
        head_map_N,
        scale_log2,
        v_scale,
        heads,
        seqs.pages_SP.stride(0),
        splits,
        *q_SND.stride()[:2],
        *gate_SND.stride()[:2],
        *k_pages.stride()[:3],
        **constants,
        PARTIAL=splits > 1,
        GATE=gated and splits == 1,
        num_warps=warps,
        num_stages=stages,
        **launch(pdl),
    )
    if splits > 1:
        sizes = _reduction(dim, splits)
        reduce_kernel[(count, heads, triton.cdiv(dim, sizes["BLOCK_D"]))](
            partial, stats, out_SND, gate_SND, seqs.context_S, v_scale, splits, *gate_SND.stride()[:2], **sizes,
            BLOCK_T=constants["BLOCK_T"], GATE=gated, num_warps=REDUCE_WARPS,
        )  # fmt: skip


def compile_cases() -> Iterator[CompileCase]:
    """The family's head dim in bf16, over bf16 and FP8 pages, for each shared memory; fp32 at a small one."""
    ints = dict.fromkeys(METADATA, "*i32") | {"scale_log2": "fp32", "v_scale": "fp32"}
    for dim, kind, pool, partials in (
        (256, "*bf16", "*bf16", (False, True)),
        (256, "*bf16", "*u8", (True,)),
        (64, "*fp32", "*fp32", (True,)),
    ):
        kinds = dict.fromkeys(("q", "out", "gate"), kind) | dict.fromkeys(("k_pages", "v_pages"), pool)
        kinds |= dict.fromkeys(("partial", "stats"), "*fp32")
        for shared_bytes in (64 * 1024, 99 * 1024, 227 * 1024):
            constants, warps, stages = _config(dim, 64, 4 if kind == "*fp32" else 2, pool == "*u8", shared_bytes)
            for partial in partials:
                constexprs = constants | {"PARTIAL": partial, "GATE": not partial, "PDL": False}
                signed = signature(decode_kernel, constexprs, ints | kinds)
                yield CompileCase(decode_kernel, signed, constexprs, warps, stages, shared_bytes)
    types = {"out": "*bf16", "gate": "*bf16", "context": "*i32", "v_scale": "fp32"}
    types |= dict.fromkeys(("partial", "stats"), "*fp32")
    for splits in (2, 32, 64, MAX_SPLITS):
        constexprs = _reduction(256, splits) | {"BLOCK_T": 32, "GATE": True}
        yield CompileCase(reduce_kernel, signature(reduce_kernel, constexprs, types), constexprs, REDUCE_WARPS, 1)
