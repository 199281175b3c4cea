"""The gated delta rule in Triton: one kernel for decodes; for prompts one for blocks of tokens and one along them.

Legend: T tokens of the step (P of prompts), S sequences, G key heads, V value heads, K key width (Dk), D value width
(Dv), M tokens of a block, R rows of state.
"""

import torch
import triton
import triton.language as tl

from shardwise.kernels.sequences import Sequences

FEW_HEADS = 64  # of all sequences: below it, narrower slices, so that a single stream has enough programs
NORM_EPS: tl.constexpr = tl.constexpr(1e-6)


def gated_delta(
    q_TGD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TVD: torch.Tensor,
    a_TV: torch.Tensor,
    b_TV: torch.Tensor,
    A_log_V: torch.Tensor,
    dt_bias_V: torch.Tensor,
    key_map_V: torch.Tensor,
    state_RVKD: torch.Tensor,
    seqs: Sequences,
) -> torch.Tensor:
    """As reference.gated_delta. A token's part of q, k, v, a and b may be a slice of a wider row; state is contiguous."""
    out_TVD = torch.empty(v_TVD.shape, dtype=v_TVD.dtype, device=v_TVD.device)
    if out_TVD.numel() == 0:
        return out_TVD
    inputs = [packed for x in (q_TGD, k_TGD, v_TVD, a_TV, b_TV) for packed in _packed(x)]
    gating = (A_log_V, dt_bias_V, key_map_V)
    if seqs.decodes:
        _decode(inputs, gating, state_RVKD, seqs, out_TVD)
    if seqs.decodes < seqs.count:
        _prefill(inputs, gating, state_RVKD, seqs, out_TVD)
    return out_TVD


def _packed(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x, or a copy where a token's part of it is not contiguous, and its stride from token to token, in elements."""
    dense, stride = True, 1
    for axis in range(x.dim() - 1, 0, -1):
        dense &= x.shape[axis] == 1 or x.stride(axis) == stride
        stride *= x.shape[axis]
    x = x if dense else x.contiguous()
    return x, x.stride(0)


def decode_options(heads: int, value_width: int) -> dict[str, int]:
    """Columns of one program of the decode kernel, and its warps, for `heads` value heads over all sequences."""
    columns = min(16 if heads < FEW_HEADS else 32, max(triton.next_power_of_2(value_width), 8))
    return {"BD": columns, "num_warps": 4}


def prefill_options(wave_tokens: int, value_width: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tile sizes of the two prompt kernels."""
    columns = min(32, max(triton.next_power_of_2(value_width), 16))
    return {"M": wave_tokens, "num_warps": 4}, {"M": wave_tokens, "BD": columns, "num_warps": 4, "num_stages": 1}


def _decode(inputs: list, gating: tuple, state_RVKD: torch.Tensor, seqs: Sequences, out_TVD: torch.Tensor) -> None:
    _, heads, key_width, value_width = state_RVKD.shape
    options = decode_options(seqs.decodes * heads, value_width)
    grid = (seqs.decodes, heads, triton.cdiv(value_width, options["BD"]))
    tables = (seqs.starts_S1, seqs.context_S, seqs.state_rows_S)
    sizes = {"V": heads, "K": key_width, "D": value_width, "KP": triton.next_power_of_2(key_width)}
    _decode_kernel[grid](*inputs, *gating, state_RVKD, *tables, out_TVD, **sizes, **options)


def _prefill(inputs: list, gating: tuple, state_RVKD: torch.Tensor, seqs: Sequences, out_TVD: torch.Tensor) -> None:
    _, heads, key_width, value_width = state_RVKD.shape
    first, later = seqs.decodes, seqs.count - seqs.decodes
    block_options, scan_options = prefill_options(64, value_width)
    block_tokens = block_options["M"]
    prompt_tokens = out_TVD.shape[0] - first
    solve_PVM, scores_PVM = torch.empty(
        (2, prompt_tokens, heads, block_tokens), dtype=torch.float32, device=out_TVD.device
    )
    factors_PV4 = torch.empty((prompt_tokens, heads, 4), dtype=torch.float32, device=out_TVD.device)
    q, q_stride, k, k_stride, v, v_stride, a, a_stride, b, b_stride = inputs
    A_log_V, dt_bias_V, key_map_V = gating
    starts, context, rows = seqs.starts_S1[first:], seqs.context_S[first:], seqs.state_rows_S[first:]
    sizes = {"V": heads, "K": key_width, "KP": max(triton.next_power_of_2(key_width), 16)}
    sizes["PARTS"] = tl.bfloat16 if out_TVD.is_cuda else tl.float32

    grid = (triton.cdiv(seqs.max_query, block_tokens), heads, later)
    work = (solve_PVM, scores_PVM, factors_PV4, first, starts)
    _block_kernel[grid](q, q_stride, k, k_stride, a, a_stride, b, b_stride, *gating, *work, **sizes, **block_options)
    grid = (triton.cdiv(value_width, scan_options["BD"]), heads, later)
    _scan_kernel[grid](
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
        D=value_width,
        **scan_options,
    )


@triton.jit
def _log_decay(a, A_log, dt_bias):
    """-exp(A_log) softplus(a + dt_bias); log(1 + e) as the series of 2 atanh(e / (2 + e)), exact for small e too."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    zz = z * z
    series = 1.0 + zz * (1 / 3 + zz * (1 / 5 + zz * (1 / 7 + zz * (1 / 9 + zz * (1 / 11 + zz * (1 / 13 + zz / 15))))))
    return -tl.exp(A_log.to(tl.float32)) * (tl.maximum(x, 0.0) + 2.0 * z * series)


@triton.jit
def _decode_kernel(
    q_ptr,
    q_stride,
    k_ptr,
    k_stride,
    v_ptr,
    v_stride,
    a_ptr,
    a_stride,
    b_ptr,
    b_stride,
    A_log_ptr,
    dt_bias_ptr,
    key_map_ptr,
    state_ptr,
    starts_ptr,
    context_ptr,
    rows_ptr,
    out_ptr,
    V: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    KP: tl.constexpr,
    BD: tl.constexpr,
):
    """One token of one sequence, BD value columns of one head: its part of the state is read and written once."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(starts_ptr + sequence).to(tl.int64)
    row = tl.load(rows_ptr + sequence).to(tl.int64)
    carried = tl.where(tl.load(context_ptr + sequence) > 0, K, 0)  # rows of the state that are read, not zeros
    key_head = tl.load(key_map_ptr + head)
    wide, columns = tl.arange(0, KP), tl.program_id(2) * BD + tl.arange(0, BD)
    state_ptr += (row * V + head) * (K * D)
    at = wide[:, None] * D + columns[None, :]
    mask = (wide < K)[:, None] & (columns < D)[None, :]
    state = tl.load(state_ptr + at, mask=mask & (wide < carried)[:, None], other=0.0)

    q = tl.load(q_ptr + token * q_stride + key_head * K + wide, mask=wide < K, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + token * k_stride + key_head * K + wide, mask=wide < K, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + token * v_stride + head * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    a, b = tl.load(a_ptr + token * a_stride + head), tl.load(b_ptr + token * b_stride + head).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + NORM_EPS) * (K**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + NORM_EPS)

    state *= tl.exp(_log_decay(a, tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head)))
    delta = (v - tl.sum(state * k[:, None], axis=0)) * tl.sigmoid(b)
    state += k[:, None] * delta[None, :]
    out = tl.sum(state * q[:, None], axis=0)
    tl.store(out_ptr + (token * V + head) * D + columns, out.to(out_ptr.dtype.element_ty), mask=columns < D)
    tl.store(state_ptr + at, state, mask=mask)


@triton.jit
def _parts(x, PARTS: tl.constexpr):
    """An fp32 tensor as the sum of three in bf16, to its last bit or two."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high.to(PARTS), middle.to(PARTS), low.to(PARTS)


@triton.jit
def _dot(x, y, PARTS: tl.constexpr):
    """x @ y, exact to fp32, as products of bf16 parts: every target has fast units for those, not for fp32.

    An x in bf16 is exact as it is and needs three products; otherwise the six that count are summed, smallest first.
    PARTS is bfloat16, or float32 in the interpreter, which cannot multiply bf16.
    """
    y_high, y_middle, y_low = _parts(y.to(tl.float32), PARTS)
    if x.dtype == tl.bfloat16:
        exact = x.to(PARTS)
        product = tl.dot(exact, y_high, tl.dot(exact, y_middle, tl.dot(exact, y_low)))
    else:
        high, middle, low = _parts(x.to(tl.float32), PARTS)
        product = tl.dot(high, y_low, tl.dot(middle, y_middle, tl.dot(low, y_high)))
        product = tl.dot(high, y_high, tl.dot(high, y_middle, tl.dot(middle, y_high, product)))
    return product


@triton.jit
def _dot_rows(x, y, PARTS: tl.constexpr):
    """x @ y^T for x and y of the inputs' dtype; products of bf16 are exact."""
    if x.dtype == tl.bfloat16:
        product = tl.dot(x.to(PARTS), tl.trans(y.to(PARTS)))
    else:
        product = _dot(x, tl.trans(y), PARTS)
    return product


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
def _block_kernel(
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
    g = tl.where(valid, _log_decay(a, tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head)), 0.0)
    beta = tl.where(valid, tl.sigmoid(b), 0.0)

    # Summed anew for every column: differences of one running sum lose their digits behind a strong decay.
    terms = tl.where(i[:, None] > i[None, :], tl.broadcast_to(g[:, None], (M, M)), 0.0)
    decay = tl.where(i[:, None] >= i[None, :], tl.exp(tl.cumsum(terms, axis=0)), 0.0)
    k32 = k.to(tl.float32)
    k_norm = tl.rsqrt(tl.sum(k32 * k32, axis=1) + NORM_EPS)
    decay *= k_norm[None, :]
    alike = _dot_rows(k, k, PARTS) * decay * (k_norm * beta)[:, None]
    solve = _inverse(tl.where(i[:, None] > i[None, :], alike, 0.0), M, M // 32, PARTS) * beta[None, :]

    q_ptr += token * q_stride + key_head * K
    q = tl.load(q_ptr + (i[:, None] * q_stride + wide[None, :]), mask=mask, other=0.0)
    q32 = q.to(tl.float32)
    q_norm = tl.rsqrt(tl.sum(q32 * q32, axis=1) + NORM_EPS) * (K**-0.5)
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
def _scan_kernel(
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
    solve_ptr += ((start - first) * V + head) * M
    scores_ptr += ((start - first) * V + head) * M
    factors_ptr += ((start - first) * V + head) * 4
    square = i[:, None] * (V * M) + i[None, :]
    for done in range(0, length, M):
        valid = i < length - done
        wide_mask = valid[:, None] & (wide < K)[None, :]
        narrow_mask = valid[:, None] & (columns < D)[None, :]
        k = tl.load(k_ptr + (i[:, None] * k_stride + wide[None, :]), mask=wide_mask, other=0.0)
        v = tl.load(v_ptr + (i[:, None] * v_stride + columns[None, :]), mask=narrow_mask, other=0.0)
        seen = _dot(k, state, PARTS) * tl.load(factors_ptr + i * (V * 4), mask=valid, other=0.0)[:, None]
        solve = tl.load(solve_ptr + square, mask=valid[:, None], other=0.0)
        delta = _dot(solve, v.to(tl.float32) - seen, PARTS)

        q = tl.load(q_ptr + (i[:, None] * q_stride + wide[None, :]), mask=wide_mask, other=0.0)
        out = _dot(q, state, PARTS) * tl.load(factors_ptr + i * (V * 4) + 1, mask=valid, other=0.0)[:, None]
        scores = tl.load(scores_ptr + square, mask=valid[:, None], other=0.0)
        out += _dot(scores, delta, PARTS)
        out_at = i[:, None] * (V * D) + columns[None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=narrow_mask)

        state *= tl.load(factors_ptr + 3)
        left = tl.load(factors_ptr + i * (V * 4) + 2, mask=valid, other=0.0)
        state += _dot(tl.trans(k), delta * left[:, None], PARTS)
        q_ptr += M * q_stride
        k_ptr += M * k_stride
        v_ptr += M * v_stride
        out_ptr += M * V * D
        solve_ptr += M * V * M
        scores_ptr += M * V * M
        factors_ptr += M * V * 4
    tl.store(state_ptr + state_at, state, mask=state_mask)
