"""The gated delta rule in Triton for chunks of prompts: one kernel for blocks of tokens, and one along them.

The kernel along them holds the state transposed: products then have what was just computed as their left operand, which
matrix units take from registers, and what was loaded as their right one.
Legend: P tokens of prompts, V value heads, M tokens of a block, and as in reference.py.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.delta.decode import NORM_EPS, log_decay
from shardwise.kernels.linear.tiles import Target, target_of
from shardwise.kernels.sequences import Sequences


class Config(NamedTuple):
    """Tokens of a block; value columns of a program of the scan, its warps and stages; warps of a program of blocks."""

    tokens: int
    columns: int
    warps: int
    stages: int
    block_warps: int


METADATA = ("starts_ptr", "context_ptr", "rows_ptr")  # behind those of decodes, so aligned by chance
FACTORS = tl.constexpr(7)  # numbers of each token and head, see block_kernel
LEAST_LOG = tl.constexpr(-1e4)  # of a decay: e to it is 0, and sums of such logarithms are exact enough
EXACT = Config(16, 16, 4, 1, 4)  # for inputs in other types than bf16; more columns take too many registers somewhere


@triton.jit
def _norm(x):
    """What each row is to be multiplied by, to have length 1."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + NORM_EPS)


@triton.jit
def _top(x):
    """An fp32 tensor without the lower half of its bits, as bf16 can hold it; rounding would take longer."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _parts(x, PARTS: tl.constexpr):
    """An fp32 tensor as the sum of three in bf16, to its last bit or two."""
    high = _top(x)
    middle = _top(x - high)
    low = x - high - middle
    return high.to(tl.bfloat16).to(PARTS), middle.to(tl.bfloat16).to(PARTS), low.to(tl.bfloat16).to(PARTS)


@triton.jit
def _two_parts(x, PARTS: tl.constexpr):
    """An fp32 tensor as the sum of two in bf16: 16 bits."""
    high = _top(x)
    return high.to(tl.bfloat16).to(PARTS), (x - high).to(tl.bfloat16).to(PARTS)


@triton.jit
def _dot(x, y, PARTS: tl.constexpr, SHORT: tl.constexpr = False):
    """x @ y as products of bf16 parts: every target has fast units for those, not for fp32.

    SHORT: two parts of each, 16 bits, which is 8 more than inputs in bf16 have, in three products. Otherwise exact to
    fp32: of three parts each the six products that count, smallest first.
    PARTS is bfloat16, or float32 in the interpreter, which cannot multiply bf16.
    """
    if SHORT:
        high, middle = _two_parts(x, PARTS)
        y_high, y_middle = _two_parts(y, PARTS)
        product = tl.dot(middle, y_high)
    else:
        high, middle, low = _parts(x.to(tl.float32), PARTS)
        y_high, y_middle, y_low = _parts(y.to(tl.float32), PARTS)
        product = tl.dot(high, y_low, tl.dot(middle, y_middle, tl.dot(low, y_high)))
        product = tl.dot(middle, y_high, product)
    return tl.dot(high, y_high, tl.dot(high, y_middle, product))


@triton.jit
def _dot_rows(x, y, PARTS: tl.constexpr):
    """x @ y^T for x and y of the inputs' dtype; products of bf16 are exact."""
    if x.dtype == tl.bfloat16:
        return tl.dot(x.to(PARTS), tl.trans(y.to(PARTS)))
    return _dot(x, tl.trans(y), PARTS)


@triton.jit
def _inverse(lower, M: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr, SHORT: tl.constexpr):
    """The inverse of 1 + lower (strictly lower triangular, [M, M], M = 2 << LEVELS).

    Block substitution, from pairs of rows up: diagonal blocks A and B with C below A have -B^-1 C A^-1 there. No powers
    of `lower`, whose elements can be 1e17 where the inverse's are 1 (a prompt that repeats one token).
    """
    i = tl.arange(0, M)
    pair = (i[:, None] == i[None, :] + 1) & (i[:, None] % 2 == 1)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, tl.where(pair, -lower, 0.0))
    for level in tl.static_range(LEVELS):
        half = i // (2 << level)
        corner = (half[:, None] == half[None, :] + 1) & (half[:, None] % 2 == 1)
        inverse -= _dot(_dot(inverse, tl.where(corner, lower, 0.0), PARTS, SHORT), inverse, PARTS, SHORT)
    return inverse


@triton.jit(do_not_specialize=["tokens", "first"], do_not_specialize_on_alignment=METADATA[:1])
def gate_kernel(
    a_ptr, a_stride, b_ptr, b_stride, A_log_ptr, dt_bias_ptr, factors_ptr, tokens, first, starts_ptr, V: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """Of each token of one head: the logarithm of the decay since its block's start, in two parts, and beta.

    The sum is one of fp64: differences of sums in fp32 lose their digits behind a strong decay.
    """
    head = tl.program_id(0)
    start = tl.load(starts_ptr + tl.program_id(2)).to(tl.int64)
    length = (tl.load(starts_ptr + tl.program_id(2) + 1) - start).to(tl.int32)
    if tl.program_id(1) * M >= length:
        return
    i = tl.arange(0, M)
    valid = tl.program_id(1) * M + i < length
    token = start + tl.program_id(1) * M
    a = tl.load(a_ptr + token * a_stride + head + i * a_stride, mask=valid, other=0.0)
    b = tl.load(b_ptr + token * b_stride + head + i * b_stride, mask=valid, other=0.0).to(tl.float32)
    g = log_decay(a, tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head))
    since = tl.cumsum(tl.where(valid, tl.maximum(g, LEAST_LOG), 0.0).to(tl.float64), 0)
    high = since.to(tl.float32)
    factors_ptr += (head * FACTORS).to(tl.int64) * tokens + (token - first) + i
    tl.store(factors_ptr + 4 * tokens, high, mask=valid)
    tl.store(factors_ptr + 5 * tokens, (since - high.to(tl.float64)).to(tl.float32), mask=valid)
    tl.store(factors_ptr + 6 * tokens, tl.sigmoid(b), mask=valid)


@triton.jit(do_not_specialize=["tokens", "first"], do_not_specialize_on_alignment=METADATA[:1])
def block_kernel(
    q_ptr, q_stride, k_ptr, k_stride, key_map_ptr, solve_ptr, rest_ptr, scores_ptr, factors_ptr, tokens, first,
    starts_ptr, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, M: tl.constexpr, LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """What a block of M tokens needs and the state does not enter, for one head (see reference.chunked).

    solve: inverse of (1 + tril(beta k k^T decay, -1)), times beta; its first part if inputs are in bf16, then `rest` is
    its second. scores: q k^T decay. factors [V, FACTORS, P]: of each token for k S, for q S, for k when added to the
    state, and the block's decay; then what gate_kernel has written.
    """
    SHORT: tl.constexpr = q_ptr.dtype.element_ty == tl.bfloat16
    head = tl.program_id(0)
    start = tl.load(starts_ptr + tl.program_id(2)).to(tl.int64)
    length = (tl.load(starts_ptr + tl.program_id(2) + 1) - start).to(tl.int32) - tl.program_id(1) * M
    if length <= 0:
        return
    key_head = tl.load(key_map_ptr + head)
    i, wide = tl.arange(0, M), tl.arange(0, KP)
    valid = i < length
    token = start + tl.program_id(1) * M  # of the block; what is added per element stays in 32 bits
    mask = valid[:, None] & (wide < K)[None, :]
    k_ptr += token * k_stride + key_head * K
    k = tl.load(k_ptr + (i[:, None] * k_stride + wide[None, :]), mask=mask, other=0.0)
    q_ptr += token * q_stride + key_head * K
    q = tl.load(q_ptr + (i[:, None] * q_stride + wide[None, :]), mask=mask, other=0.0)
    factors_ptr += (head * FACTORS).to(tl.int64) * tokens + (token - first)
    since_ptr, rest_of_ptr = factors_ptr + 4 * tokens, factors_ptr + 5 * tokens
    last = tl.minimum(length, M) - 1
    since = tl.load(since_ptr + tl.minimum(i, last))
    since_rest = tl.load(rest_of_ptr + tl.minimum(i, last))
    until = (tl.load(since_ptr + last) - since) + (tl.load(rest_of_ptr + last) - since_rest)
    beta = tl.load(factors_ptr + 6 * tokens + i, mask=valid, other=0.0)

    k_norm, q_norm = _norm(k), _norm(q) * (K**-0.5)
    log = (since[:, None] - since[None, :]) + (since_rest[:, None] - since_rest[None, :])
    decay = tl.where(i[:, None] >= i[None, :], tl.exp(log), 0.0) * k_norm[None, :]
    at = (token - first) * V + head
    square = i[:, None] * (V * M) + i[None, :]
    scores = _dot_rows(q, k, PARTS) * decay * q_norm[:, None]
    tl.store(scores_ptr + at * M + square, scores.to(scores_ptr.dtype.element_ty), mask=valid[:, None])
    alike = _dot_rows(k, k, PARTS) * decay * (k_norm * beta)[:, None]
    solve = _inverse(tl.where(i[:, None] > i[None, :], alike, 0.0), M, LEVELS, PARTS, SHORT) * beta[None, :]
    if SHORT:
        tl.store(rest_ptr + at * M + square, (solve - _top(solve)).to(tl.bfloat16), mask=valid[:, None])
        solve = _top(solve)
    tl.store(solve_ptr + at * M + square, solve.to(solve_ptr.dtype.element_ty), mask=valid[:, None])
    tl.store(factors_ptr + i, tl.exp(since) * k_norm, mask=valid)
    tl.store(factors_ptr + tokens + i, tl.exp(since) * q_norm, mask=valid)
    tl.store(factors_ptr + 2 * tokens + i, tl.exp(until) * k_norm, mask=valid)
    tl.store(factors_ptr + 3 * tokens + i, tl.exp(tl.load(since_ptr + last + 0 * i)), mask=valid)


@triton.jit
def _advance(
    state, q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride, solve_ptr, rest_ptr, scores_ptr, factors_ptr, tokens,
    out_ptr, columns, length, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, PARTS: tl.constexpr, SHORT: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """The state [BD, K] behind a block; writes its outputs. Pointers are to its first token.

    length: tokens of the block, M if it is FULL.
    """
    i, wide = tl.arange(0, M), tl.arange(0, KP)
    valid = i < length
    square = i[:, None] * (V * M) + i[None, :]
    k_at, q_at = i[:, None] * k_stride + wide[None, :], i[:, None] * q_stride + wide[None, :]
    v_at, out_at = i[None, :] * v_stride + columns[:, None], i[None, :] * (V * D) + columns[:, None]
    if FULL and K == KP and D % BD == 0:
        k, q, v = tl.load(k_ptr + k_at), tl.load(q_ptr + q_at), tl.load(v_ptr + v_at)
        solve, scores = tl.load(solve_ptr + square), tl.load(scores_ptr + square)
        for_k, for_q = tl.load(factors_ptr + i), tl.load(factors_ptr + tokens + i)
        added = tl.load(factors_ptr + 2 * tokens + i)
    else:
        wide_mask = valid[:, None] & (wide < K)[None, :]
        k = tl.load(k_ptr + k_at, mask=wide_mask, other=0.0)
        q = tl.load(q_ptr + q_at, mask=wide_mask, other=0.0)
        v = tl.load(v_ptr + v_at, mask=valid[None, :] & (columns < D)[:, None], other=0.0)
        solve = tl.load(solve_ptr + square, mask=valid[:, None], other=0.0)
        scores = tl.load(scores_ptr + square, mask=valid[:, None], other=0.0)
        for_k = tl.load(factors_ptr + i, mask=valid, other=0.0)
        for_q = tl.load(factors_ptr + tokens + i, mask=valid, other=0.0)
        added = tl.load(factors_ptr + 2 * tokens + i, mask=valid, other=0.0)
    for_k, for_q, added = for_k[None, :], for_q[None, :], added[None, :]
    decay = tl.load(factors_ptr + 3 * tokens)
    if SHORT:
        rest = tl.load(rest_ptr + square) if FULL else tl.load(rest_ptr + square, mask=valid[:, None], other=0.0)
        k, q = k.to(PARTS), q.to(PARTS)
        solve, rest, scores = tl.trans(solve.to(PARTS)), tl.trans(rest.to(PARTS)), tl.trans(scores.to(PARTS))
        high, low = _two_parts(state, PARTS)
        seen = tl.dot(high, tl.trans(k), tl.dot(low, tl.trans(k)))
        right, right_low = _two_parts(v.to(tl.float32) - seen * for_k, PARTS)
        delta = tl.dot(right, solve, tl.dot(right, rest, tl.dot(right_low, solve)))
        added_high, added_low = _two_parts(delta * added, PARTS)
        out = tl.dot(high, tl.trans(q)) * for_q
        out = tl.dot(delta.to(tl.bfloat16).to(PARTS), scores, out)
        state = tl.dot(added_high, k, tl.dot(added_low, k, state * decay))
    else:
        k, q = k.to(tl.float32), q.to(tl.float32)
        right = v.to(tl.float32) - _dot(state, tl.trans(k), PARTS) * for_k
        delta = _dot(right, tl.trans(solve), PARTS)
        out = _dot(state, tl.trans(q), PARTS) * for_q + _dot(delta, tl.trans(scores), PARTS)
        state = state * decay + _dot(delta * added, k, PARTS)
    out = out.to(out_ptr.dtype.element_ty)
    if FULL and D % BD == 0:
        tl.store(out_ptr + out_at, out)
    else:
        tl.store(out_ptr + out_at, out, mask=valid[None, :] & (columns < D)[:, None])
    return state


@triton.jit(do_not_specialize=["tokens", "first"], do_not_specialize_on_alignment=METADATA)
def scan_kernel(
    q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride, key_map_ptr, solve_ptr, rest_ptr, scores_ptr, factors_ptr,
    tokens, first, starts_ptr, context_ptr, rows_ptr, state_ptr, out_ptr, V: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr, PEEL: tl.constexpr,
):  # fmt: skip
    """All blocks of one chunk in order, BD value columns of one head: the state stays in registers between them.

    For inputs in bf16, what enters the state is in two parts of bf16, and the output, which is rounded to bf16, in one.
    """
    SHORT: tl.constexpr = q_ptr.dtype.element_ty == tl.bfloat16
    head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    length = (tl.load(starts_ptr + sequence + 1) - start).to(tl.int32)
    carried = tl.where(tl.load(context_ptr + sequence) > 0, K, 0)  # rows of the state that are read, not zeros
    key_head = tl.load(key_map_ptr + head)
    wide, columns = tl.arange(0, KP), tl.program_id(0) * BD + tl.arange(0, BD)
    state_ptr += (tl.load(rows_ptr + sequence).to(tl.int64) * V + head) * (K * D)
    state_at = wide[None, :] * D + columns[:, None]
    state_mask = (wide < K)[None, :] & (columns < D)[:, None]
    state = tl.load(state_ptr + state_at, mask=state_mask & (wide < carried)[None, :], other=0.0)

    q_ptr += start * q_stride + key_head * K
    k_ptr += start * k_stride + key_head * K
    v_ptr += start * v_stride + head * D
    out_ptr += (start * V + head) * D
    at = ((start - first) * V + head) * M
    factors_ptr += (head * FACTORS).to(tl.int64) * tokens + (start - first)
    last = length // M * M if PEEL else length  # behind it is a block that is not full, or masks are for all blocks
    for done in range(0, last, M):
        state = _advance(
            state, q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride, solve_ptr + at, rest_ptr + at, scores_ptr + at,
            factors_ptr + done, tokens, out_ptr, columns, length - done, V, K, KP, M, D, BD, PARTS, SHORT, PEEL,
        )  # fmt: skip
        q_ptr += M * q_stride
        k_ptr += M * k_stride
        v_ptr += M * v_stride
        out_ptr += M * V * D
        at += M * (V * M)
    if last < length:
        state = _advance(
            state, q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride, solve_ptr + at, rest_ptr + at, scores_ptr + at,
            factors_ptr + last, tokens, out_ptr, columns, length - last, V, K, KP, M, D, BD, PARTS, SHORT, False,
        )  # fmt: skip
    tl.store(state_ptr + state_at, state, mask=state_mask)


def config_of(short: bool, target: Target) -> Config:
    """short: for inputs in bf16, whose products take half as many registers."""
    found = tuning.choice(target.name, "delta", [], 1) if short else None
    if found:
        return Config(*found)
    return (Config(32, 64, 4, 2, 2) if target.shared_kib > 128 else Config(32, 32, 4, 1, 4)) if short else EXACT


def _sizes(heads: int, key_width: int, tokens: int, parts: tl.dtype) -> dict[str, Any]:
    """Constants of both kernels."""
    padded = max(triton.next_power_of_2(key_width), 16)
    return {"V": heads, "K": key_width, "KP": padded, "M": tokens, "PARTS": parts}


def prefill(
    inputs: list[Any],
    gating: tuple[torch.Tensor, ...],
    state_RVKD: torch.Tensor,
    seqs: Sequences,
    out_TVD: torch.Tensor,
) -> None:
    """Fills the rows of out_TVD of the chunks of prompts, and updates their states; arguments as for `decode`.

    Takes 2 M + 7 floats of scratch a token and value head, or 1.5 M + 7 for inputs in bf16.
    """
    _, heads, key_width, value_width = state_RVKD.shape
    first, later = seqs.decodes, seqs.count - seqs.decodes
    q, q_stride, k, k_stride, v, v_stride, a, a_stride, b, b_stride = inputs
    short = q.dtype == torch.bfloat16
    config = config_of(short, target_of(out_TVD.device))
    parts = tl.bfloat16 if out_TVD.is_cuda else tl.float32
    sizes = _sizes(heads, key_width, config.tokens, parts)
    prompt_tokens = out_TVD.shape[0] - first
    dtype = torch.bfloat16 if short else torch.float32
    squares_3PVM = torch.empty(
        (3 if short else 2, prompt_tokens, heads, config.tokens), dtype=dtype, device=out_TVD.device
    )
    factors_VFP = torch.empty((heads, FACTORS.value, prompt_tokens), dtype=torch.float32, device=out_TVD.device)
    A_log_V, dt_bias_V, key_map_V = gating
    starts, context, rows = seqs.starts_S1[first:], seqs.context_S[first:], seqs.state_rows_S[first:]
    work = (squares_3PVM[0], squares_3PVM[-1], squares_3PVM[1], factors_VFP, prompt_tokens, first, starts)
    grid = (heads, triton.cdiv(seqs.max_query, config.tokens), later)
    gate_kernel[grid](a, a_stride, b, b_stride, A_log_V, dt_bias_V, *work[3:], V=heads, M=config.tokens, num_warps=1)
    block_kernel[grid](
        q, q_stride, k, k_stride, key_map_V, *work, **sizes, LEVELS=config.tokens.bit_length() - 2,
        num_warps=config.block_warps, num_stages=1,
    )  # fmt: skip
    columns = min(config.columns, max(triton.next_power_of_2(value_width), 16))
    scan_kernel[(triton.cdiv(value_width, columns), heads, later)](
        q, q_stride, k, k_stride, v, v_stride, key_map_V, *work, context, rows, state_RVKD, out_TVD, **sizes,
        D=value_width, BD=columns, PEEL=config.stages > 1, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def compile_cases() -> Iterator[CompileCase]:
    """The family's heads, in bf16 and, for exact comparisons, fp32."""
    ints = dict.fromkeys(("starts_ptr", "context_ptr", "rows_ptr", "key_map_ptr"), "*i32")
    floats = dict.fromkeys(("A_log_ptr", "dt_bias_ptr", "state_ptr", "factors_ptr"), "*fp32")
    cards = [(Target(True, kib), kib * 1024) for kib in (64, 227)]
    cards += [(Target(True, kib, name), kib * 1024) for name, kib in tuning.measured()]
    for kind, gates in (("*bf16", "*fp32"), ("*fp32", "*fp32")):
        types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "solve_ptr", "rest_ptr", "scores_ptr"), kind)
        types |= ints | floats | dict.fromkeys(("a_ptr", "b_ptr"), gates)
        for target, shared_bytes in cards if kind == "*bf16" else cards[:1]:
            config = config_of(kind == "*bf16", target)
            shared_bytes = shared_bytes if shared_bytes > 128 * 1024 else 0
            sizes = _sizes(32, 128, config.tokens, tl.bfloat16)
            constants = {"V": 32, "M": config.tokens}
            yield CompileCase(gate_kernel, signature(gate_kernel, constants, types), constants, 1, 1, shared_bytes)
            constants = sizes | {"LEVELS": config.tokens.bit_length() - 2}
            signed = signature(block_kernel, constants, types)
            yield CompileCase(block_kernel, signed, constants, config.block_warps, 1, shared_bytes)
            constants = sizes | {"D": 128, "BD": config.columns, "PEEL": config.stages > 1}
            signed = signature(scan_kernel, constants, types)
            yield CompileCase(scan_kernel, signed, constants, config.warps, config.stages, shared_bytes)
