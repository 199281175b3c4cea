"""Routed experts for a few tokens: every pair of token and expert streams its own weights, in sums of fp32.

Legend: T tokens, k experts a token, H hidden, I intermediate, M = T * k pairs, R rows of a program, C chunks of V.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear.chunks import chunk_sums
from shardwise.kernels.linear.geometry import banks
from shardwise.kernels.linear.tiles import COLUMNS, ROWS, Operand, coarse_scale
from shardwise.kernels.linear.triton import Stream, power_of_two


@triton.jit
def gate_up_kernel(
    x, x_stride, value, fine, coarse, act, ids, first_expert, experts, TOP_K: tl.constexpr, W: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """act[pair] = silu(gate) * up of R gate rows and their R up rows; pairs of other ranks' experts are left alone."""
    K: tl.constexpr = W[COLUMNS]
    I: tl.constexpr = W[ROWS] // 2  # noqa: E741
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int32) - first_expert
    if expert >= 0 and expert < experts:
        row = (pair // TOP_K).to(tl.int64)
        r_2R = tl.arange(0, 2 * R)
        i_2R = tl.program_id(1) * R + r_2R % R
        ok_12R, o_12R = (i_2R < I)[None, :], (i_2R + r_2R // R * I)[None, :]
        e_12R = tl.zeros((1, 2 * R), tl.int32) + expert
        sums = tl.zeros((C, 1, 2 * R), tl.float32)
        for first in range(0, K // V, C):
            c_C = first + tl.arange(0, C)
            at = row * x_stride + (c_C * V)[:, None, None] + tl.arange(0, V)[None, None, :]
            x_C1V = tl.load(x + at, mask=(c_C < K // V)[:, None, None], other=0).to(tl.float32)
            sums += chunk_sums(x_C1V, value, fine, e_12R, o_12R, ok_12R, c_C, V, W)
        both = tl.sum(sums, 0) * coarse_scale(coarse, e_12R, o_12R, ok_12R, W)
        gate, up = tl.split(tl.trans(tl.reshape(both, (2, R))))
        i_R = tl.program_id(1) * R + tl.arange(0, R)
        mixed = gate * tl.sigmoid(gate) * up
        tl.store(act + pair.to(tl.int64) * I + i_R, mixed.to(act.dtype.element_ty), mask=i_R < I)


@triton.jit
def down_kernel(
    act, value, fine, coarse, out, ids, weights, first_expert, experts, TOP_K: tl.constexpr, BK: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """R rows of the weighted sum over all of a token's experts, which are read side by side."""
    K: tl.constexpr = W[COLUMNS]
    row = tl.program_id(0).to(tl.int64)
    k_K = tl.arange(0, BK)
    o_1R = (tl.program_id(1) * R + tl.arange(0, R))[None, :]
    expert_K = tl.load(ids + row * TOP_K + k_K, mask=k_K < TOP_K, other=-1).to(tl.int32) - first_expert
    ok_K = (k_K < TOP_K) & (expert_K >= 0) & (expert_K < experts)
    share_K = tl.load(weights + row * TOP_K + k_K, mask=ok_K, other=0)
    e_K1 = tl.where(ok_K, expert_K, 0)[:, None]
    ok_KR = ok_K[:, None] & (o_1R < W[ROWS])
    sums_CKR = tl.zeros((C, BK, R), tl.float32)
    for first in range(0, K // V, C):
        c_C = first + tl.arange(0, C)
        at = (c_C * V)[:, None, None] + ((row * TOP_K + k_K) * K)[None, :, None] + tl.arange(0, V)[None, None, :]
        x_CKV = tl.load(act + at, mask=(c_C < K // V)[:, None, None] & ok_K[None, :, None], other=0).to(tl.float32)
        sums_CKR += chunk_sums(x_CKV, value, fine, e_K1, o_1R, ok_KR, c_C, V, W)
    y_KR = tl.sum(sums_CKR, 0) * coarse_scale(coarse, e_K1, o_1R, ok_KR, W) * share_K[:, None]
    y_1R = tl.sum(y_KR, 0)[None, :]
    tl.store(out + row * W[ROWS] + o_1R, y_1R, mask=o_1R < W[ROWS])


def gate_up_config(bank: Operand, gpu: str = "") -> Stream:
    """Pairs of rows so that each thread has some 8 loads of 16 bytes under way."""
    found = tuning.choice(gpu, "gate_up", [bank.layout], 1)
    if found:
        return Stream(*found)
    C = min(power_of_two(bank.layout[3] // bank.chunk), 256)
    return Stream(max(1, min(512 // C, 4)), C, 4)


def down_config(bank: Operand, top_k: int, gpu: str = "") -> Stream:
    """The experts of a token count as rows."""
    found = tuning.choice(gpu, "down", [bank.layout], 1)
    if found:
        return Stream(*found)
    C = min(power_of_two(bank.layout[3] // bank.chunk), 128)
    return Stream(max(1, min(2048 // C // power_of_two(top_k), 8)), C, 4)


def moe(
    x_TH: torch.Tensor,
    up_bank: Operand,
    down_bank: Operand,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    first_expert: int,
    experts: int,
    up_config: Stream | None = None,
    config: Stream | None = None,
) -> torch.Tensor:
    """The weighted sum of the experts' outputs -> [T, H] fp32. up_config and config (of down) are for tuning."""
    (tokens, top_k), (hidden, width) = ids_Tk.shape, down_bank.layout[2:4]
    act_MI = torch.empty((tokens * top_k, width), dtype=x_TH.dtype, device=x_TH.device)
    out_TH = torch.empty((tokens, hidden), dtype=torch.float32, device=x_TH.device)
    up = up_config or gate_up_config(up_bank)
    gate_up_kernel[(tokens * top_k, triton.cdiv(width, up.R))](
        x_TH, x_TH.stride(0), *up_bank.tensors(), act_MI, ids_Tk, first_expert, experts, top_k, up_bank.layout, up.R,
        up.C, up_bank.chunk, num_warps=up.warps,
    )  # fmt: skip
    down = config or down_config(down_bank, top_k)
    down_kernel[(tokens, triton.cdiv(hidden, down.R))](
        act_MI, *down_bank.tensors(), out_TH, ids_Tk, weights_Tk, first_expert, experts, top_k, power_of_two(top_k),
        down_bank.layout, down.R, down.C, down_bank.chunk, num_warps=down.warps,
    )  # fmt: skip
    return out_TH


def compile_cases(native_fp8: bool) -> Iterator[CompileCase]:
    """Both kernels for the banks of real models."""
    types = {"x": "*bf16", "act": "*bf16", "out": "*fp32", "ids": "*i32", "weights": "*fp32"}
    for up, down in banks(native_fp8):
        if down.of.layout[3] != 512:  # cut banks are compiled as parts of a block, in moe_block
            continue
        chosen = gate_up_config(up.of)
        constexprs = {"TOP_K": 8, "W": up.of.layout, "R": chosen.R, "C": chosen.C, "V": up.of.chunk}
        signed = signature(gate_up_kernel, constexprs, types | up.types)
        yield CompileCase(gate_up_kernel, signed, constexprs, chosen.warps, 1)
        chosen = down_config(down.of, 8)
        constexprs = {"TOP_K": 8, "BK": 8, "W": down.of.layout, "R": chosen.R, "C": chosen.C, "V": down.of.chunk}
        signed = signature(down_kernel, constexprs, types | down.types)
        yield CompileCase(down_kernel, signed, constexprs, chosen.warps, 1)
