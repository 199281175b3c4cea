"""The gated delta rule in Triton for chunks of prompts: one kernel for blocks of tokens, and one along them.

Legend: P tokens of prompts, V value heads, M tokens of a block, and as in reference.py.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.delta.decode import NORM_EPS, log_decay
from shardwise.kernels.linear.tiles import target_of
from shardwise.kernels.sequences import Sequences

# With 64 tokens a block, or 32 columns, some target has too few registers.
BLOCK_TOKENS = 32
SCAN_COLUMNS = 16
WARPS = 4
STAGES = 1  # more would hold several blocks in shared memory


@triton.jit
def _norm(x):
    """What each row is to be multiplied by, to have length 1."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + NORM_EPS)


@triton.jit
def _parts(x, PARTS: tl.constexpr):
    """An fp32 tensor as the sum of three in bf16, to its last bit or two."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high.to(PARTS), middle.to(PARTS), low.to(PARTS)


@triton.jit
def _dot(x, y, PARTS: tl.constexpr, SHORT: tl.constexpr = False):
    """x @ y, exact to fp32, as products of bf16 parts: every target has fast units for those, not for fp32.

    An x in bf16 is exact as it is and needs three products; otherwise the six that count are summed, smallest first.
    SHORT: two parts of each, 16 bits, which is 8 more than inputs in bf16 have; two products or three.
    PARTS is bfloat16, or float32 in the interpreter, which cannot multiply bf16.
    """
    y_high, y_middle, y_low = _parts(y.to(tl.float32), PARTS)
    if x.dtype == tl.bfloat16:
        exact = x.to(PARTS)
        product = tl.dot(exact, y_middle) if SHORT else tl.dot(exact, y_middle, tl.dot(exact, y_low))
        product = tl.dot(exact, y_high, product)
    else:
        high, middle, low = _parts(x.to(tl.float32), PARTS)
        if SHORT:
            product = tl.dot(middle, y_high)
        else:
            product = tl.dot(high, y_low, tl.dot(middle, y_middle, tl.dot(low, y_high)))
            product = tl.dot(middle, y_high, product)
        product = tl.dot(high, y_high, tl.dot(high, y_middle, product))
    return product


@triton.jit
def _dot_rows(x, y, PARTS: tl.constexpr):
    """x @ y^T for x and y of the inputs' dtype; products of bf16 are exact."""
    if x.dtype == tl.bfloat16:
        return tl.dot(x.to(PARTS), tl.trans(y.to(PARTS)))
    return _dot(x, tl.trans(y), PARTS)


@triton.jit
def _inverse(lower, M: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr):
    """The inverse of 1 + lower (strictly lower triangular, [M, M], M = 16 << LEVELS).

    Substitution row by row in all diagonal blocks of 16 at once, then block substitution by products: no powers of
    `lower`, whose elements can be 1e17 where the inverse's are 1 (a prompt that repeats one token).
    """
    BLOCKS: tl.constexpr = M // 16
    i, r = tl.arange(0, M), tl.arange(0, 16)
    diagonal = (i // 16)[:, None] == (i // 16)[None, :]
    parts = tl.sum(tl.reshape(tl.where(diagonal, lower, 0.0), (M, BLOCKS, 16)), axis=1)
    parts = -tl.reshape(parts, (BLOCKS, 16, 16))
    for row in range(1, 16):
        here = (r == row)[None, :, None]
        solved = tl.sum(tl.where(here, parts, 0.0), axis=1)
        solved += tl.sum(solved[:, :, None] * parts, axis=1)
        parts = tl.where(here, solved[:, None, :], parts)
    parts = tl.broadcast_to(tl.reshape(parts, (M, 1, 16)), (M, BLOCKS, 16))
    inverse = tl.where(diagonal, tl.reshape(parts, (M, M)), 0.0) + tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        half = i // (16 << level)
        corner = (half[:, None] == half[None, :] + 1) & (half[:, None] % 2 == 1)
        inverse -= _dot(_dot(inverse, tl.where(corner, lower, 0.0), PARTS), inverse, PARTS)
    return inverse


@triton.jit(do_not_specialize=["first"])
def block_kernel(
    q_ptr,
    q_stride,
    k_ptr,
    k_stride,
    a_ptr,
    a_stride,
    b_ptr,
    b_stride,
    A_log_ptr,
    dt_bias_ptr,
    key_map_ptr,
    solve_ptr,
    scores_ptr,
    factors_ptr,
    first,
    starts_ptr,
    V: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What a block of M tokens needs and the state does not enter, for one head (see reference.chunked).

    solve: inverse of (1 + tril(beta k k^T decay, -1)), times beta; scores: q k^T decay; factors: of each token for
    k S, for q S, for k when added to the state, and the block's decay.
    """
    head = tl.program_id(1)
    start = tl.load(starts_ptr + tl.program_id(2)).to(tl.int64)
    length = (tl.load(starts_ptr + tl.program_id(2) + 1) - start).to(tl.int32)
    if tl.program_id(0) * M >= length:
        return
    key_head = tl.load(key_map_ptr + head)
    i, wide = tl.arange(0, M), tl.arange(0, KP)
    valid = tl.program_id(0) * M + i < length
    token = start + tl.program_id(0) * M  # of the block; what is added per element stays in 32 bits
    mask = valid[:, None] & (wide < K)[None, :]
    k_ptr += token * k_stride + key_head * K
    k = tl.load(k_ptr + (i[:, None] * k_stride + wide[None, :]), mask=mask, other=0.0)
    a = tl.load(a_ptr + token * a_stride + head + i * a_stride, mask=valid, other=0.0)
    b = tl.load(b_ptr + token * b_stride + head + i * b_stride, mask=valid, other=0.0).to(tl.float32)
    g = tl.where(valid, log_decay(a, tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head)), 0.0)
    beta = tl.where(valid, tl.sigmoid(b), 0.0)

    # Summed anew for every column: differences of one running sum lose their digits behind a strong decay.
    terms = tl.where(i[:, None] > i[None, :], tl.broadcast_to(g[:, None], (M, M)), 0.0)
    decay = tl.where(i[:, None] >= i[None, :], tl.exp(tl.cumsum(terms, axis=0)), 0.0)
    k_norm = _norm(k)
    decay *= k_norm[None, :]
    alike = _dot_rows(k, k, PARTS) * decay * (k_norm * beta)[:, None]
    solve = _inverse(tl.where(i[:, None] > i[None, :], alike, 0.0), M, M // 32, PARTS) * beta[None, :]

    q_ptr += token * q_stride + key_head * K
    q = tl.load(q_ptr + (i[:, None] * q_stride + wide[None, :]), mask=mask, other=0.0)
    q_norm = _norm(q) * (K**-0.5)
    scores = _dot_rows(q, k, PARTS) * decay * q_norm[:, None]

    at = (token - first) * V + head
    square = i[:, None] * (V * M) + i[None, :]
    tl.store(solve_ptr + at * M + square, solve, mask=valid[:, None])
    tl.store(scores_ptr + at * M + square, scores, mask=valid[:, None])
    factors_ptr += at * 4
    since = tl.exp(tl.cumsum(g, axis=0))
    tl.store(factors_ptr + i * (V * 4), since * k_norm, mask=valid)
    tl.store(factors_ptr + i * (V * 4) + 1, since * q_norm, mask=valid)
    tl.store(factors_ptr + i * (V * 4) + 2, tl.exp(tl.sum(terms, axis=0)) * k_norm, mask=valid)
    tl.store(factors_ptr + i * (V * 4) + 3, tl.zeros((M,), tl.float32) + tl.exp(tl.sum(g, axis=0)), mask=valid)


@triton.jit(do_not_specialize=["first"])
def scan_kernel(
    q_ptr,
    q_stride,
    k_ptr,
    k_stride,
    v_ptr,
    v_stride,
    key_map_ptr,
    solve_ptr,
    scores_ptr,
    factors_ptr,
    first,
    starts_ptr,
    context_ptr,
    rows_ptr,
    state_ptr,
    out_ptr,
    V: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PARTS: tl.constexpr,
):
    """All blocks of one chunk in order, BD value columns of one head: the state stays in registers between them."""
    SHORT: tl.constexpr = q_ptr.dtype.element_ty == tl.bfloat16
    head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    length = (tl.load(starts_ptr + sequence + 1) - start).to(tl.int32)
    carried = tl.where(tl.load(context_ptr + sequence) > 0, K, 0)  # rows of the state that are read, not zeros
    key_head = tl.load(key_map_ptr + head)
    i, wide, columns = tl.arange(0, M), tl.arange(0, KP), tl.program_id(0) * BD + tl.arange(0, BD)
    state_ptr += (tl.load(rows_ptr + sequence).to(tl.int64) * V + head) * (K * D)
    state_at = wide[:, None] * D + columns[None, :]
    state_mask = (wide < K)[:, None] & (columns < D)[None, :]
    state = tl.load(state_ptr + state_at, mask=state_mask & (wide < carried)[:, None], other=0.0)

    q_ptr += start * q_stride + key_head * K
    k_ptr += start * k_stride + key_head * K
    v_ptr += start * v_stride + head * D
    out_ptr += (start * V + head) * D
    at = (start - first) * V + head
    square = i[:, None] * (V * M) + i[None, :]
    for done in range(0, length, M):
        valid = i < length - done
        wide_mask = valid[:, None] & (wide < K)[None, :]
        narrow_mask = valid[:, None] & (columns < D)[None, :]
        k = tl.load(k_ptr + (i[:, None] * k_stride + wide[None, :]), mask=wide_mask, other=0.0)
        v = tl.load(v_ptr + (i[:, None] * v_stride + columns[None, :]), mask=narrow_mask, other=0.0)
        factor_ptr = factors_ptr + at * 4 + i * (V * 4)
        seen = _dot(k, state, PARTS, SHORT) * tl.load(factor_ptr, mask=valid, other=0.0)[:, None]
        solve = tl.load(solve_ptr + at * M + square, mask=valid[:, None], other=0.0)
        delta = _dot(solve, v.to(tl.float32) - seen, PARTS, SHORT)
        q = tl.load(q_ptr + (i[:, None] * q_stride + wide[None, :]), mask=wide_mask, other=0.0)
        out = _dot(q, state, PARTS, SHORT) * tl.load(factor_ptr + 1, mask=valid, other=0.0)[:, None]
        scores = tl.load(scores_ptr + at * M + square, mask=valid[:, None], other=0.0)
        out += _dot(scores, delta, PARTS, SHORT)
        out_at = out_ptr + (i[:, None] * (V * D) + columns[None, :])
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=narrow_mask)
        state *= tl.load(factors_ptr + at * 4 + 3)
        delta *= tl.load(factor_ptr + 2, mask=valid, other=0.0)[:, None]
        state += _dot(tl.trans(k), delta, PARTS, SHORT)
        q_ptr += M * q_stride
        k_ptr += M * k_stride
        v_ptr += M * v_stride
        out_ptr += M * V * D
        at += M * V
    tl.store(state_ptr + state_at, state, mask=state_mask)


def _config(
    heads: int, key_width: int, value_width: int, parts: tl.dtype, gpu: str = ""
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Constants of both kernels, those that only scan_kernel has, and its warps. gpu: for what was measured on it."""
    padded = max(triton.next_power_of_2(key_width), 16)
    both = {"V": heads, "K": key_width, "KP": padded, "M": BLOCK_TOKENS, "PARTS": parts}
    columns, warps = tuning.choice(gpu, f"scan {key_width}x{value_width}", [], 1) or (SCAN_COLUMNS, WARPS)
    return both, {"D": value_width, "BD": columns}, warps


def prefill(
    inputs: list[Any],
    gating: tuple[torch.Tensor, ...],
    state_RVKD: torch.Tensor,
    seqs: Sequences,
    out_TVD: torch.Tensor,
) -> None:
    """Fills the rows of out_TVD of the chunks of prompts, and updates their states; arguments as for `decode`.

    Takes 2 M + 4 floats of scratch a token and value head.
    """
    _, heads, key_width, value_width = state_RVKD.shape
    first, later = seqs.decodes, seqs.count - seqs.decodes
    parts, gpu = (tl.bfloat16, target_of(out_TVD.device).name) if out_TVD.is_cuda else (tl.float32, "")
    sizes, scan_sizes, scan_warps = _config(heads, key_width, value_width, parts, gpu)
    block_tokens = sizes["M"]
    prompt_tokens = out_TVD.shape[0] - first
    solve_PVM, scores_PVM = torch.empty(
        (2, prompt_tokens, heads, block_tokens), dtype=torch.float32, device=out_TVD.device
    )
    factors_PV4 = torch.empty((prompt_tokens, heads, 4), dtype=torch.float32, device=out_TVD.device)
    q, q_stride, k, k_stride, v, v_stride, a, a_stride, b, b_stride = inputs
    *_, key_map_V = gating
    starts, context, rows = seqs.starts_S1[first:], seqs.context_S[first:], seqs.state_rows_S[first:]

    grid = (triton.cdiv(seqs.max_query, block_tokens), heads, later)
    work = (solve_PVM, scores_PVM, factors_PV4, first, starts)
    block_kernel[grid](
        q,
        q_stride,
        k,
        k_stride,
        a,
        a_stride,
        b,
        b_stride,
        *gating,
        *work,
        **sizes,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    grid = (triton.cdiv(value_width, scan_sizes["BD"]), heads, later)
    scan_kernel[grid](
        q,
        q_stride,
        k,
        k_stride,
        v,
        v_stride,
        key_map_V,
        *work,
        context,
        rows,
        state_RVKD,
        out_TVD,
        **sizes,
        **scan_sizes,
        num_warps=scan_warps,
        num_stages=STAGES,
    )


def compile_cases() -> Iterator[CompileCase]:
    """The family's heads, in bf16 and, for exact comparisons, fp32."""
    ints = dict.fromkeys(("starts_ptr", "context_ptr", "rows_ptr", "key_map_ptr"), "*i32")
    names: tuple[str, ...] = ("A_log_ptr", "dt_bias_ptr", "state_ptr", "solve_ptr", "scores_ptr", "factors_ptr")
    floats = dict.fromkeys(names, "*fp32")
    for kind in ("*bf16", "*fp32"):
        types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "a_ptr", "b_ptr", "out_ptr"), kind) | ints | floats
        both, scan, _ = _config(32, 128, 128, tl.bfloat16)
        for name, kib in tuning.measured():
            _, chosen, warps = _config(32, 128, 128, tl.bfloat16, name)
            constants = both | chosen
            signed = signature(scan_kernel, constants, types)
            yield CompileCase(scan_kernel, signed, constants, warps, STAGES, kib * 1024)
        yield CompileCase(block_kernel, signature(block_kernel, both, types), both, WARPS, STAGES)
        constants = both | scan
        yield CompileCase(scan_kernel, signature(scan_kernel, constants, types), constants, WARPS, STAGES)
