"""Choosing tokens as Triton kernels: one pass over the logits, then the best of its parts.

Legend: N rows of L rows of logits, V vocabulary, B ids of a program, P programs of a row.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.draw import reference
from shardwise.kernels.linear.triton import power_of_two

BLOCK = 2048
KEPT = 32  # tokens that a program stores
MOST_CANDIDATES = 32  # that are taken from each part one after the other
LEAST = tl.constexpr(-(1 << 63))  # below the key of any logit


@triton.jit
def _mix(x):
    """As the reference's, of uint32, whose products wrap."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def _gumbel(low, high, index, id_B):
    index = _mix(index)
    first = _mix(high ^ _mix(low ^ index))
    second = _mix(low ^ _mix(high ^ (index + 0x9E3779B9)))
    bits_B = _mix(_mix(id_B.to(tl.uint32) ^ first) + second)
    u_B = tl.minimum((bits_B.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # -log(1 - u), by its series where 1 - u would round away what tells small ones apart
    series_B = u_B * (1 + u_B * (0.5 + u_B * (0.33333334 + u_B * 0.25)))
    return -tl.log(tl.where(u_B < 0.01, series_B, -tl.log(1 - u_B)))


@triton.jit
def part_kernel(
    logits, stride, rows, largest, temperature, temperature_stride, seeds, seeds_stride, best, best_id, vocabulary,
    parts, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best score of a part of a row, and its id."""
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + n)
    id_B = part * BLOCK + tl.arange(0, BLOCK)
    x_B = tl.load(logits + row * stride + id_B, mask=id_B < vocabulary, other=float("-inf"))
    scaled_B = (x_B - tl.load(largest + row)) / tl.load(temperature + n * temperature_stride)
    low = tl.load(seeds + n * seeds_stride).to(tl.uint32)
    high = tl.load(seeds + n * seeds_stride + 1).to(tl.uint32)
    index = tl.load(seeds + n * seeds_stride + 2).to(tl.uint32)
    score_B = scaled_B + _gumbel(low, high, index, id_B)
    score_B = tl.where(score_B == score_B, score_B, float("-inf"))
    top = tl.max(score_B, 0)
    tl.store(best + n * parts + part, top)
    tl.store(best_id + n * parts + part, tl.min(tl.where(score_B == top, id_B, vocabulary - 1), 0))


@triton.jit
def best_kernel(best, best_id, out, parts, BP: tl.constexpr):
    """The best of a row's parts, the first of equals."""
    n = tl.program_id(0).to(tl.int64)
    p_P = tl.arange(0, BP)
    score_P = tl.load(best + n * parts + p_P, mask=p_P < parts, other=float("-inf"))
    first = tl.min(tl.where((score_P == tl.max(score_P, 0)) & (p_P < parts), p_P, parts - 1), 0)
    tl.store(out + n, tl.load(best_id + n * parts + first).to(tl.int64))


@triton.jit
def part_likeliest_kernel(logits, stride, best, best_id, vocabulary, parts, BLOCK: tl.constexpr):
    """The largest logit of a part of a row, NaN if there is one, and its id."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id_B = part * BLOCK + tl.arange(0, BLOCK)
    x_B = tl.load(logits + row * stride + id_B, mask=id_B < vocabulary, other=float("-inf"))
    unsound = tl.max((x_B != x_B).to(tl.int32), 0) > 0
    top = tl.max(tl.where(x_B == x_B, x_B, float("-inf")), 0)
    tl.store(best + row * parts + part, tl.where(unsound, float("nan"), top))
    tl.store(best_id + row * parts + part, tl.min(tl.where(x_B == top, id_B, vocabulary - 1), 0))


@triton.jit
def likeliest_kernel(best, best_id, values, out, parts, BP: tl.constexpr):
    """The largest of a row's parts and its id, the first of equals; -1 if it is not finite."""
    row = tl.program_id(0).to(tl.int64)
    p_P = tl.arange(0, BP)
    x_P = tl.load(best + row * parts + p_P, mask=p_P < parts, other=float("-inf"))
    unsound = tl.max((x_P != x_P).to(tl.int32), 0) > 0
    top = tl.max(tl.where(x_P == x_P, x_P, float("-inf")), 0)
    first = tl.min(tl.where((x_P == top) & (p_P < parts), p_P, parts - 1), 0)
    finite = (not unsound) & (tl.abs(top) < float("inf"))
    tl.store(values + row, tl.where(unsound, float("nan"), top))
    tl.store(out + row, tl.where(finite, tl.load(best_id + row * parts + first), -1).to(tl.int64))


def likeliest(logits_LV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    rows, vocabulary = logits_LV.shape
    values_L = torch.empty(rows, dtype=torch.float32, device=logits_LV.device)
    out_L = torch.empty(rows, dtype=torch.int64, device=logits_LV.device)
    if not rows:
        return values_L, out_L
    parts = triton.cdiv(vocabulary, BLOCK)
    best_LP = torch.empty((rows, parts), dtype=torch.float32, device=logits_LV.device)
    ids_LP = torch.empty((rows, parts), dtype=torch.int32, device=logits_LV.device)
    logits_LV = logits_LV if logits_LV.stride(-1) == 1 else logits_LV.contiguous()
    part_likeliest_kernel[(rows, parts)](
        logits_LV, logits_LV.stride(0), best_LP, ids_LP, vocabulary, parts, BLOCK, num_warps=4
    )
    likeliest_kernel[(rows,)](best_LP, ids_LP, values_L, out_L, parts, power_of_two(parts), num_warps=4)
    return values_L, out_L


def draw(
    logits_LV: torch.Tensor,
    rows_N: torch.Tensor,
    largest_L: torch.Tensor,
    temperature_N: torch.Tensor,
    seeds_N3: torch.Tensor,
) -> torch.Tensor:
    """As the reference; noise may differ in the last bit, as logarithms do."""
    (count,), vocabulary = rows_N.shape, logits_LV.shape[-1]
    out_N = torch.empty(count, dtype=torch.int64, device=logits_LV.device)
    if not count:
        return out_N
    parts = triton.cdiv(vocabulary, BLOCK)
    best_NP = torch.empty((count, parts), dtype=torch.float32, device=logits_LV.device)
    ids_NP = torch.empty((count, parts), dtype=torch.int32, device=logits_LV.device)
    logits_LV = logits_LV if logits_LV.stride(-1) == 1 else logits_LV.contiguous()
    part_kernel[(count, parts)](
        logits_LV, logits_LV.stride(0), rows_N, largest_L, temperature_N, temperature_N.stride(0), seeds_N3,
        seeds_N3.stride(0), best_NP, ids_NP, vocabulary, parts, BLOCK, num_warps=4,
    )  # fmt: skip
    best_kernel[(count,)](best_NP, ids_NP, out_N, parts, power_of_two(parts), num_warps=4)
    return out_N


@triton.jit(do_not_specialize=["count"])
def part_keys_kernel(logits, stride, rows, keys, vocabulary, parts, count, K: tl.constexpr, BLOCK: tl.constexpr):
    """The `count` largest keys of a part of a row, in falling order: of the larger logit, or else of the lower id."""
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id_B = part * BLOCK + tl.arange(0, BLOCK)
    x_B = tl.load(logits + tl.load(rows + n) * stride + id_B, mask=id_B < vocabulary, other=float("-inf"))
    bits_B = (x_B + 0.0).to(tl.int32, bitcast=True)  # + 0.0: no negative zero
    ordered_B = bits_B ^ ((bits_B >> 31) & 0x7FFFFFFF)
    key_B = (ordered_B.to(tl.int64) << 32) + (vocabulary - 1 - id_B).to(tl.int64)
    key_B = tl.where(id_B < vocabulary, key_B, LEAST)
    for k in range(count):
        top = tl.max(key_B, 0)
        tl.store(keys + (n * parts + part) * K + k, top)
        key_B = tl.where(key_B == top, LEAST, key_B)


@triton.jit(do_not_specialize=["count"])
def among_kernel(
    keys, floats, ints, out, vocabulary, parts, count, K: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """The token of a row, drawn from its `count` largest keys as far as top_k, top_p and min_p keep them."""
    n = tl.program_id(0).to(tl.int64)
    at_X = tl.arange(0, BP * K)
    key_X = tl.load(keys + n * parts * K + at_X, mask=(at_X < parts * K) & (at_X % K < count), other=LEAST)
    rank_K = tl.arange(0, K)
    best_K = tl.full((K,), LEAST, tl.int64)
    for k in range(count):
        top = tl.max(key_X, 0)
        best_K = tl.where(rank_K == k, top, best_K)
        key_X = tl.where(key_X == top, LEAST, key_X)
    id_K = (vocabulary - 1 - (best_K & 0xFFFFFFFF)).to(tl.int32)
    ordered_K = (best_K >> 32).to(tl.int32)
    x_K = (ordered_K ^ ((ordered_K >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    first = tl.max(tl.where(rank_K == 0, x_K, float("-inf")), 0)
    temperature, top_p = tl.load(floats + n * 3), tl.load(floats + n * 3 + 1)
    top_k = tl.load(ints + n * 4)
    x_K = (x_K - first) / temperature
    kept = tl.where(top_k == 0, count, tl.minimum(top_k, count))
    keep_K = (rank_K < kept) & (x_K >= tl.load(floats + n * 3 + 2))
    p_K = tl.where(keep_K, tl.exp(tl.where(keep_K, x_K, 0.0).to(tl.float64)), 0.0)
    before_K = tl.cumsum(p_K, 0) - p_K
    mass = tl.where(top_p >= 1, float("inf"), top_p.to(tl.float64) * tl.sum(p_K, 0))
    keep_K = keep_K & (before_K < mass)
    low, high = tl.load(ints + n * 4 + 1).to(tl.uint32), tl.load(ints + n * 4 + 2).to(tl.uint32)
    noise_K = _gumbel(low, high, tl.load(ints + n * 4 + 3).to(tl.uint32), id_K)
    score_K = tl.where(keep_K, x_K + noise_K, float("-inf"))
    chosen = tl.min(tl.where(score_K == tl.max(score_K, 0), rank_K, count - 1), 0)
    tl.store(out + n, tl.max(tl.where(rank_K == chosen, id_K, 0), 0).to(tl.int64))


def draw_among(
    logits_LV: torch.Tensor, rows_N: torch.Tensor, candidates: int, floats_N3: torch.Tensor, ints_N4: torch.Tensor
) -> torch.Tensor:
    """As the reference, by which more than MOST_CANDIDATES are served; noise may differ in the last bit."""
    (count,), vocabulary = rows_N.shape, logits_LV.shape[-1]
    if candidates > MOST_CANDIDATES or not count:
        return reference.draw_among(logits_LV, rows_N, candidates, floats_N3, ints_N4)
    out_N = torch.empty(count, dtype=torch.int64, device=logits_LV.device)
    parts, K = triton.cdiv(vocabulary, BLOCK), power_of_two(candidates)
    keys_NPK = torch.empty((count, parts, K), dtype=torch.int64, device=logits_LV.device)
    logits_LV = logits_LV if logits_LV.stride(-1) == 1 else logits_LV.contiguous()
    part_keys_kernel[(count, parts)](
        logits_LV, logits_LV.stride(0), rows_N, keys_NPK, vocabulary, parts, candidates, K, BLOCK, num_warps=4
    )
    among_kernel[(count,)](
        keys_NPK, floats_N3, ints_N4, out_N, vocabulary, parts, candidates, K, power_of_two(parts), num_warps=8
    )
    return out_N


@triton.jit(do_not_specialize=["count"])
def keep_tokens_kernel(tokens, rows, last_tokens, told, turn, count, BLOCK: tl.constexpr):
    """tokens: of `count` rows."""
    n_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token_B = tl.load(tokens + n_B, mask=n_B < count)
    tl.store(last_tokens + tl.load(rows + n_B, mask=n_B < count, other=0), token_B, mask=n_B < count)
    tl.store(told + tl.load(turn) * count + n_B, token_B, mask=n_B < count)


def keep_tokens(
    tokens_B: torch.Tensor,
    rows_B: torch.Tensor,
    last_tokens_R: torch.Tensor,
    told_KB: torch.Tensor,
    turn_1: torch.Tensor,
) -> None:
    """As the reference; all are contiguous."""
    count = len(tokens_B)
    keep_tokens_kernel[(triton.cdiv(count, KEPT),)](
        tokens_B, rows_B, last_tokens_R, told_KB, turn_1, count, KEPT, num_warps=1
    )


def compile_cases() -> Iterator[CompileCase]:
    """The one configuration, for a vocabulary of 248,320."""
    types = dict.fromkeys(("logits", "largest", "temperature", "best", "values"), "*fp32")
    types |= {"rows": "*i64", "seeds": "*i64", "best_id": "*i32", "out": "*i64"}
    constexprs = {"BLOCK": BLOCK}
    for kernel in (part_kernel, part_likeliest_kernel):
        yield CompileCase(kernel, signature(kernel, constexprs, types), constexprs, 4, 1)
    constexprs = {"BP": 128}
    for kernel in (best_kernel, likeliest_kernel):
        yield CompileCase(kernel, signature(kernel, constexprs, types), constexprs, 4, 1)
    types |= {"keys": "*i64", "floats": "*fp32", "ints": "*i64"}
    constexprs = {"K": MOST_CANDIDATES, "BLOCK": BLOCK}
    yield CompileCase(part_keys_kernel, signature(part_keys_kernel, constexprs, types), constexprs, 4, 1)
    constexprs = {"K": MOST_CANDIDATES, "BP": 128}
    yield CompileCase(among_kernel, signature(among_kernel, constexprs, types), constexprs, 8, 1)
    types |= dict.fromkeys(("tokens", "last_tokens", "told"), "*i64") | {"rows": "*i32", "turn": "*i32"}
    constexprs = {"BLOCK": KEPT}
    yield CompileCase(keep_tokens_kernel, signature(keep_tokens_kernel, constexprs, types), constexprs, 1, 1)
