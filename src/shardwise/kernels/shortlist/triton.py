"""The shortlist as Triton kernels: the input in two bytes, bounds of all logits, then those logits that count.

Legend: L rows with logits (B of a program), H hidden, V rows of the head (P parts of them, R of a program), K of H at a
time.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear.tiles import target_of
from shardwise.kernels.linear.triton import power_of_two
from shardwise.kernels.shortlist.reference import CODE_MAX, MARGIN, Shortlist

ROWS, STEP = 128, 256  # of a program's part of the head
LISTED = 512  # ids of a program that computes what is on the list
LOW = tl.constexpr(2 * CODE_MAX)  # steps of the low byte in one of the high byte
MOST = tl.constexpr(CODE_MAX)


@triton.jit
def bytes_kernel(x, stride, planes, sizes, slack, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """A row as scale * (high + low / LOW), both int8; its scale, its norm, and how far off that may be in norm."""
    row = tl.program_id(0).to(tl.int64)
    h_H = tl.arange(0, BLOCK)
    x_H = tl.load(x + row * stride + h_H, mask=h_H < HIDDEN, other=0).to(tl.float32)
    largest = tl.max(tl.abs(x_H), 0)
    unit_H = x_H / tl.where(largest > 0, largest, 1.0)
    norm = largest * tl.sqrt(tl.sum(unit_H * unit_H, 0))
    at_H = unit_H * MOST
    high_H = tl.floor(at_H + 0.5)
    low_H = tl.floor((at_H - high_H) * LOW + 0.5)
    to = planes + row * 2 * HIDDEN + h_H
    tl.store(to, high_H.to(tl.int8), mask=h_H < HIDDEN)
    tl.store(to + HIDDEN, tl.minimum(tl.maximum(low_H, -MOST), MOST).to(tl.int8), mask=h_H < HIDDEN)
    finite = (norm == norm) & (norm < float("inf"))  # NaN or infinity in x makes the norm NaN
    scale = largest / MOST
    tl.store(sizes + row * 3, scale)
    tl.store(sizes + row * 3 + 1, tl.where(finite, norm, float("nan")))
    tl.store(sizes + row * 3 + 2, scale * slack)


@triton.jit(do_not_specialize=["count"])
def bounds_kernel(
    planes, sizes, codes, copies, upper, lowest, count, rows, parts, HIDDEN: tl.constexpr, R: tl.constexpr,
    B: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Upper bounds of the logits of R tokens, and the largest of their lower bounds."""
    part, first = tl.program_id(0), tl.program_id(1) * B
    v_R, k_K, n_N = part * R + tl.arange(0, R), tl.arange(0, K), first * 2 + tl.arange(0, 2 * B)
    code_RK = codes + tl.minimum(v_R, rows - 1).to(tl.int64)[:, None] * HIDDEN + k_K[None, :]
    plane_KN = planes + tl.minimum(n_N, 2 * count - 1)[None, :] * HIDDEN + k_K[:, None]
    sum_RN = tl.zeros((R, 2 * B), tl.int32)
    for k0 in range(0, HIDDEN, K):
        if HIDDEN % K:
            w_RK = tl.load(code_RK + k0, mask=k_K[None, :] + k0 < HIDDEN, other=0)
            x_KN = tl.load(plane_KN + k0, mask=k_K[:, None] + k0 < HIDDEN, other=0)
        else:
            w_RK, x_KN = tl.load(code_RK + k0), tl.load(plane_KN + k0)
        sum_RN = tl.dot(w_RK, x_KN, sum_RN, out_dtype=tl.int32)
    high_RB, low_RB = tl.split(tl.reshape(sum_RN, (R, B, 2)))
    l_B = first + tl.arange(0, B)
    size_R, size_B = copies + v_R * 3, sizes + l_B * 3
    ok_R, ok_B = v_R < rows, l_B < count
    scale_R, error_R, norm_R = (
        tl.load(size_R, mask=ok_R, other=0), tl.load(size_R + 1, mask=ok_R, other=0),
        tl.load(size_R + 2, mask=ok_R, other=0)
    )  # fmt: skip
    scale_B, norm_B, slack_B = (
        tl.load(size_B, mask=ok_B, other=0), tl.load(size_B + 1, mask=ok_B, other=0),
        tl.load(size_B + 2, mask=ok_B, other=0)
    )  # fmt: skip
    about_RB = (high_RB.to(tl.float32) + low_RB.to(tl.float32) / LOW) * scale_R[:, None] * scale_B[None, :]
    off_RB = error_R[:, None] * norm_B[None, :] + norm_R[:, None] * slack_B[None, :]
    ok_RB = ok_R[:, None] & ok_B[None, :]
    tl.store(upper + l_B.to(tl.int64)[None, :] * rows + v_R[:, None], about_RB + off_RB, mask=ok_RB)
    low_RB = about_RB - off_RB
    low_RB = tl.where(ok_RB & (low_RB == low_RB), low_RB, float("-inf"))
    tl.store(lowest + l_B * parts + part, tl.max(low_RB, 0), mask=ok_B)


@triton.jit(do_not_specialize=["keep"])
def least_kernel(lowest, least, keep, parts, BP: tl.constexpr):
    """The `keep`-th largest of the largest lower bounds of a row's parts: below it, no id is among the likeliest."""
    row, p_P = tl.program_id(0).to(tl.int64), tl.arange(0, BP)
    low_P = tl.load(lowest + row * parts + p_P, mask=p_P < parts, other=float("-inf"))
    found = tl.max(low_P, 0)
    for _ in range(1, keep):
        low_P = tl.where(p_P == tl.min(tl.where(low_P == found, p_P, BP), 0), float("-inf"), low_P)
        found = tl.max(low_P, 0)
    tl.store(least + row, found)


@triton.jit
def listed_kernel(
    x, stride, weight, logits, least, rows, HIDDEN: tl.constexpr, BH: tl.constexpr, LISTED: tl.constexpr
):  # fmt: skip
    """The logits of those of LISTED ids whose upper bound reaches `least`, in its place, and minus infinity in that of
    others; NaN stays."""
    row = tl.program_id(1).to(tl.int64)
    n_N, h_H = tl.arange(0, LISTED), tl.arange(0, BH)
    first = tl.program_id(0) * LISTED
    at, ok_N = logits + row * rows + first, first + n_N < rows
    upper_N = tl.load(at + n_N, mask=ok_N, other=float("-inf"))
    on_N = ok_N & (upper_N >= tl.load(least + row))
    tl.store(at + n_N, tl.where(upper_N == upper_N, float("-inf"), upper_N), mask=ok_N & (on_N == 0))
    x_H = tl.load(x + row * stride + h_H, mask=h_H < HIDDEN, other=0).to(tl.float32)
    left = tl.sum(on_N.to(tl.int32), 0)
    after = -1
    while left > 0:
        after = tl.min(tl.where(on_N & (n_N > after), n_N, LISTED), 0)
        w_H = tl.load(weight + (first + after).to(tl.int64) * HIDDEN + h_H, mask=h_H < HIDDEN, other=0)
        tl.store(at + after, tl.sum(x_H * w_H.to(tl.float32), 0))
        left -= 1


def shortlist_logits(x_LH: torch.Tensor, weight_VH: torch.Tensor, shortlist: Shortlist, keep: int) -> torch.Tensor:
    """As the reference, with somewhat wider bounds; the weights are contiguous."""
    (count, hidden), rows, device = x_LH.shape, weight_VH.shape[0], x_LH.device
    logits_LV = torch.empty((count, rows), dtype=torch.float32, device=device)
    if not logits_LV.numel():
        return logits_LV
    x_LH = x_LH if x_LH.stride(1) == 1 else x_LH.contiguous()
    parts, B = triton.cdiv(rows, ROWS), rows_of(count)
    planes_L2H = torch.empty((count, 2, hidden), dtype=torch.int8, device=device)
    sizes_L3 = torch.empty((count, 3), dtype=torch.float32, device=device)
    lowest_LP = torch.empty((count, parts), dtype=torch.float32, device=device)
    least_L = torch.empty(count, dtype=torch.float32, device=device)
    BH, slack = power_of_two(hidden), hidden**0.5 / (2 * LOW.value) * MARGIN
    bytes_kernel[(count,)](x_LH, x_LH.stride(0), planes_L2H, sizes_L3, slack, hidden, BH, num_warps=4)
    bounds_kernel[(parts, triton.cdiv(count, B))](
        planes_L2H, sizes_L3, shortlist.codes_VH, shortlist.sizes_V3, logits_LV, lowest_LP, count, rows, parts,
        hidden, ROWS, B, STEP, num_warps=8, num_stages=stages_of(B, target_of(device).shared_kib),
    )  # fmt: skip
    least_kernel[(count,)](lowest_LP, least_L, keep, parts, power_of_two(parts), num_warps=8)
    listed_kernel[(triton.cdiv(rows, LISTED), count)](
        x_LH, x_LH.stride(0), weight_VH, logits_LV, least_L, rows, hidden, BH, LISTED, num_warps=4
    )
    return logits_LV


def rows_of(count: int) -> int:
    """Of logits that a program makes: two columns of a product each."""
    return 8 if count <= 8 else 16


def stages_of(B: int, shared_kib: int) -> int:
    """Steps under way: three, or as many as the shared memory holds."""
    return max(1, min(3, (shared_kib - 3) * 1024 // (STEP * (ROWS + 2 * B))))


def compile_cases() -> Iterator[CompileCase]:
    """A vocabulary of 248,320, by the numbers of rows that make a difference, and heads of every plain type."""
    types = {"planes": "*i8", "codes": "*i8", "x": "*bf16", "weight": "*bf16", "slack": "fp32"}
    types |= dict.fromkeys(("sizes", "copies", "upper", "lowest", "least", "logits"), "*fp32")
    for kind in ("*bf16", "*fp16", "*fp32"):
        own = types | {"x": kind, "weight": kind}
        constexprs = {"HIDDEN": 2048, "BLOCK": 2048}
        yield CompileCase(bytes_kernel, signature(bytes_kernel, constexprs, own), constexprs, 4, 1)
        constexprs = {"HIDDEN": 2048, "BH": 2048, "LISTED": LISTED}
        yield CompileCase(listed_kernel, signature(listed_kernel, constexprs, own), constexprs, 4, 1)
    for B in (8, 16):
        constexprs = {"HIDDEN": 2048, "R": ROWS, "B": B, "K": STEP}
        signed = signature(bounds_kernel, constexprs, types)
        for kib in (64, 99, 227):
            yield CompileCase(bounds_kernel, signed, constexprs, 8, stages_of(B, kib), kib * 1024)
    constexprs = {"BP": 2048}
    yield CompileCase(least_kernel, signature(least_kernel, constexprs, types), constexprs, 8, 1)
