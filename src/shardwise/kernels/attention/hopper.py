"""Flash attention of chunks of prompts over pages, for Hopper: a block of queries of one head a program.

As prefill.py, but a turn's scores are made while the turn before takes exponentials of its own, so that tensor cores
and other units work at once. Keys and values are on their way for a whole turn, with two buffers of each; Triton, left
to itself, would need three for that, and there is no room for them.

Legend: T tokens of the step, N query heads, K kv heads, D head dim.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from collections.abc import Iterator
from math import e, log2

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

from shardwise.kernels.attention.decode import METADATA
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.gluon import all_wait, copy_to_shared
from shardwise.kernels.hopper import SHARED_KIB, is_hopper
from shardwise.kernels.sequences import Sequences

QUERIES, KEYS, DIM, WARPS = gl.constexpr(128), gl.constexpr(64), gl.constexpr(256), gl.constexpr(8)
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))  # 16 bytes a thread
SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 256, 16]))
LOG2_E = gl.constexpr(log2(e))


@gluon.jit
def _within(row_stride, ROWS: gl.constexpr):
    """Rows of a tile, and where its elements are."""
    row, column = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY)), gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    return row, gl.expand_dims(row * row_stride, 1) + gl.expand_dims(column, 0)


@gluon.jit
def _ask(tile_s, tile, row_stride, rows, ROWS: gl.constexpr):
    """A tile on its way to shared memory: `rows` of its rows, and zeros."""
    row, at = _within(row_stride, ROWS)
    copy_to_shared(tile_s, tile + at, mask=gl.expand_dims(row < rows, 1))


@gluon.jit
def _page(table, turn, last, PAGE_TOKENS: gl.constexpr):
    """The number of the page that a turn's keys are in; the last one's, past it."""
    return gl.load(table + gl.minimum(turn * KEYS, last - 1) // PAGE_TOKENS).to(gl.int64)


@gluon.jit
def _ask_keys(tile_s, pool, page, turn, last, page_stride, token_stride, PAGE_TOKENS: gl.constexpr):
    """The keys (values) of a turn on their way."""
    tile = pool + page * page_stride + turn * KEYS % PAGE_TOKENS * token_stride
    _ask(tile_s, tile, token_stride, last - turn * KEYS, KEYS)


@gluon.jit
def _arrived(LEFT: gl.constexpr):
    """Wait for copies, all but the last LEFT groups, of all threads."""
    async_copy.wait_group(LEFT)
    fence_async_shared()
    all_wait()


@gluon.jit
def _weigh(score, top, weight_sum, value_sum, first, seen, scale_log2, CAUSAL: gl.constexpr):
    """A turn's weights, as a left operand, and what was summed before, at the new maximum; all but the product."""
    if CAUSAL:
        position = first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORE))
        score = gl.where(gl.expand_dims(position, 0) <= gl.expand_dims(seen, 1), score, float("-inf"))
    # Whole powers of two, as in decoding, so that both round alike. Position 0 is seen by all: this is finite.
    new_top = gl.maximum(top, gl.ceil(gl.max(score, 1) * scale_log2))
    weight = gl.exp2(score * scale_log2 - gl.expand_dims(new_top, 1))
    fade = gl.exp2(top - new_top)
    weight_sum = weight_sum * fade + gl.sum(weight, 1)
    value_sum *= gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, SUM)), 1)
    return weight, new_top, weight_sum, value_sum


@gluon.jit
def _scores(q_s, k_s):
    """A product on its way."""
    zeros = gl.zeros((QUERIES, KEYS), gl.float32, layout=SCORE)
    return warpgroup_mma(q_s, k_s.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_values(weight, v_s, value_sum):
    """A product on its way."""
    left = gl.convert_layout(weight.to(v_s.dtype), gl.DotOperandLayout(0, SUM, 2))
    return warpgroup_mma(left, v_s, value_sum, is_async=True)


@gluon.jit
def _write(out, y, tile_s, row_stride, rows, GATE: gl.constexpr):
    """Some rows of y times the sigmoid of what is in shared memory, which then serves to write them as wholes."""
    if GATE:
        _arrived(0)
        y = y / (1.0 + gl.exp2(tile_s.load(SUM).to(gl.float32) * -LOG2_E))
    tile_s.store(y.to(out.dtype.element_ty))
    row, at = _within(row_stride, QUERIES)
    gl.store(out + at, tile_s.load(COPY), mask=gl.expand_dims(row < rows, 1))


@gluon.jit(do_not_specialize=["pages_stride", "first_sequence"], do_not_specialize_on_alignment=(*METADATA, "starts"))
def hopper_prefill_kernel(
    q, k_pages, v_pages, out, gate, starts, context, pages, head_map, scale_log2, v_scale, first_sequence, pages_stride,
    q_token_stride, q_head_stride, gate_token_stride, gate_head_stride, out_token_stride, page_stride, head_stride,
    token_stride, PAGE_TOKENS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Program (query head, block of queries, chunk). Late blocks, which see most, are started first."""
    head = gl.program_id(0)
    sequence = (gl.program_id(2) + first_sequence).to(gl.int64)
    begin = gl.load(starts + sequence)
    queries = gl.load(starts + sequence + 1) - begin
    block = (gl.num_programs(1) - 1 - gl.program_id(1)) * QUERIES
    if block >= queries:
        return
    kv_head = gl.load(head_map + head).to(gl.int64)
    past = gl.load(context + sequence)
    live = gl.minimum(QUERIES, queries - block)
    last = past + block + live
    table = pages + sequence * pages_stride
    token = (begin + block).to(gl.int64)
    k_pages += kv_head * head_stride
    v_pages += kv_head * head_stride
    q_s = gl.allocate_shared_memory(q.dtype.element_ty, [QUERIES, DIM], SHARED)
    k_s = gl.allocate_shared_memory(q.dtype.element_ty, [2, KEYS, DIM], SHARED)
    v_s = gl.allocate_shared_memory(q.dtype.element_ty, [2, KEYS, DIM], SHARED)
    page = _page(table, 0, last, PAGE_TOKENS)
    _ask(q_s, q + token * q_token_stride + head * q_head_stride, q_token_stride, live, QUERIES)
    _ask_keys(k_s.index(0), k_pages, page, 0, last, page_stride, token_stride, PAGE_TOKENS)
    async_copy.commit_group()
    _ask_keys(v_s.index(0), v_pages, page, 0, last, page_stride, token_stride, PAGE_TOKENS)
    page = _page(table, 1, last, PAGE_TOKENS)
    _ask_keys(k_s.index(1), k_pages, page, 1, last, page_stride, token_stride, PAGE_TOKENS)
    async_copy.commit_group()
    next_page = _page(table, 2, last, PAGE_TOKENS)
    seen = past + block + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, SCORE))
    top = gl.full((QUERIES,), float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORE))
    weight_sum = gl.zeros((QUERIES,), gl.float32, layout=gl.SliceLayout(1, SCORE))
    value_sum = gl.zeros((QUERIES, DIM), gl.float32, layout=SUM)
    _arrived(1)
    score = warpgroup_mma_wait(0, deps=[_scores(q_s, k_s.index(0))])
    turns = gl.cdiv(last, KEYS)
    whole = gl.minimum((past + block + 1) // KEYS, turns - 1)
    for causal in gl.static_range(2):  # turns that all queries see all of, and others
        for turn in range(whole if causal else 0, turns - 1 if causal else whole):
            this, other = turn % 2, (turn + 1) % 2
            _arrived(0)
            coming = _scores(q_s, k_s.index(other))
            _ask_keys(v_s.index(other), v_pages, page, turn + 1, last, page_stride, token_stride, PAGE_TOKENS)
            _ask_keys(k_s.index(this), k_pages, next_page, turn + 2, last, page_stride, token_stride, PAGE_TOKENS)
            async_copy.commit_group()
            page, next_page = next_page, _page(table, turn + 3, last, PAGE_TOKENS)
            weight, top, weight_sum, value_sum = _weigh(
                score, top, weight_sum, value_sum, turn * KEYS, seen, scale_log2, causal
            )
            score = warpgroup_mma_wait(0, deps=[coming])
            value_sum = warpgroup_mma_wait(0, deps=[_add_values(weight, v_s.index(this), value_sum)])
    _arrived(0)
    if GATE:  # where the queries were
        _ask(q_s, gate + token * gate_token_stride + head * gate_head_stride, gate_token_stride, live, QUERIES)
        async_copy.commit_group()
    weight, top, weight_sum, value_sum = _weigh(
        score, top, weight_sum, value_sum, (turns - 1) * KEYS, seen, scale_log2, True
    )
    value_sum = warpgroup_mma_wait(0, deps=[_add_values(weight, v_s.index((turns - 1) % 2), value_sum)])
    y = value_sum * gl.expand_dims(gl.convert_layout(v_scale / weight_sum, gl.SliceLayout(1, SUM)), 1)
    _write(out + token * out_token_stride + head * DIM, y, q_s, out_token_stride, live, GATE)


def fits(
    q_TND: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, gate_TND: torch.Tensor | None = None
) -> bool:
    """Whether this kernel serves these: Hopper, this head dim, 16 bits throughout, and rows that start at 16 bytes."""
    if not is_hopper(q_TND.device):
        return False
    there = [x for x in (q_TND, k_pages, v_pages, gate_TND) if x is not None]
    alike = q_TND.shape[2] == DIM.value and q_TND.itemsize == 2 and all(x.dtype == q_TND.dtype for x in there)
    strides = (stride for x in there for stride in x.stride()[:-1])
    aligned = all(x.data_ptr() % 16 == 0 for x in there) and all(stride % 16 == 0 for stride in strides)
    return alike and aligned and k_pages.shape[2] % KEYS.value == 0


def prefill(
    q_TND: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out_TND: torch.Tensor,
    seqs: Sequences,
    head_map_N: torch.Tensor,
    scale_log2: float,
    v_scale: float,
    gate_TND: torch.Tensor | None = None,
) -> None:
    """As prefill.prefill, for what fits. scale_log2: more than 0."""
    gate, gated = (q_TND, False) if gate_TND is None else (gate_TND, True)
    grid = (q_TND.shape[1], triton.cdiv(seqs.max_query, QUERIES.value), seqs.count - seqs.decodes)
    hopper_prefill_kernel[grid](
        q_TND, k_pages, v_pages, out_TND, gate, seqs.starts_S1, seqs.context_S, seqs.pages_SP, head_map_N, scale_log2,
        v_scale, seqs.decodes, seqs.pages_SP.stride(0), *q_TND.stride()[:2], *gate.stride()[:2], out_TND.stride(0),
        *k_pages.stride()[:3], PAGE_TOKENS=k_pages.shape[2], GATE=gated, num_warps=WARPS.value,
    )  # fmt: skip


def compile_cases() -> Iterator[CompileCase]:
    """For bf16, with and without a gate."""
    types = dict.fromkeys((*METADATA, "starts"), "*i32") | {"scale_log2": "fp32", "v_scale": "fp32"}
    types |= dict.fromkeys(("q", "k_pages", "v_pages", "out", "gate"), "*bf16")
    for gate in (True, False):
        constexprs = {"PAGE_TOKENS": 64, "GATE": gate}
        signed = signature(hopper_prefill_kernel, constexprs, types)
        yield CompileCase(hopper_prefill_kernel, signed, constexprs, WARPS.value, 1, SHARED_KIB * 1024)
