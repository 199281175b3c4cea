"""Routed experts on GPUs: routing; a few tokens by streaming the weights of each pair; many tokens grouped by expert.

Nothing waits for the host, and sums have a fixed order (no atomics), so that results are the same every time.
Legend: T tokens, E experts of this rank, k experts a token, H hidden, I intermediate, M = T * k pairs of token and
expert, C chunks of V elements, R rows of a program.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.checkpoint.weight import Weight
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear.tiles import Operand, Target, operand, target_of
from shardwise.kernels.linear.triton import power_of_two
from shardwise.kernels.moe import grouped, streamed
from shardwise.kernels.overlap import after_previous, launch, let_next_come

STREAM_TOKENS = 16  # beyond so many, experts are shared by enough tokens for grouping to pay
OVERLAPPED_TOKENS = 16  # up to so many, the choice overlaps with what is before it


@triton.jit
def route_kernel(
    logits, logits_stride, weights, ids, experts, TOP_K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The largest logit TOP_K times, the lower id first among equals; softmax over those."""
    let_next_come(PDL)
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    e_E = tl.arange(0, BE)
    slot_K = tl.arange(0, BK)
    left_E = tl.load(logits + row * logits_stride + e_E, mask=e_E < experts, other=float("-inf")).to(tl.float32)
    left_E = tl.where(left_E == left_E, left_E, float("-inf"))
    best_K = tl.full((BK,), float("-inf"), tl.float32)
    id_K = tl.zeros((BK,), tl.int32)
    for slot in tl.static_range(TOP_K):
        best = tl.max(left_E, 0)
        choice = tl.min(tl.where(left_E == best, e_E, BE), 0)
        best_K = tl.where(slot_K == slot, best, best_K)
        id_K = tl.where(slot_K == slot, tl.minimum(choice, experts - 1), id_K)
        left_E = tl.where(e_E == choice, float("-inf"), left_E)
    share_K = tl.exp(best_K - tl.max(best_K, 0))
    share_K /= tl.sum(share_K, 0)
    tl.store(weights + row * TOP_K + slot_K, share_K, mask=slot_K < TOP_K)
    tl.store(ids + row * TOP_K + slot_K, id_K, mask=slot_K < TOP_K)


@triton.jit
def silu_mul_kernel(gate_up, stride, out, width, BLOCK: tl.constexpr):
    """One block of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * stride + i, mask=i < width, other=0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + i, mask=i < width, other=0).to(tl.float32)
    tl.store(out + row * width + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=i < width)


def route(logits_TE: torch.Tensor, top_k: int, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` likeliest experts of each token, likeliest first -> weights_Tk fp32, renormalised; ids_Tk int32.

    pdl: see overlap.py. Of more than OVERLAPPED_TOKENS, the choice starts on processors that have nothing else to do:
    only then can they take memory that the kernels before had shared back for their first-level cache, through which
    the experts behind it read. On an H200 these were up to 38 % slower where every kernel overlapped.
    """
    tokens, experts = logits_TE.shape
    weights_Tk = torch.empty((tokens, top_k), dtype=torch.float32, device=logits_TE.device)
    ids_Tk = torch.empty((tokens, top_k), dtype=torch.int32, device=logits_TE.device)
    if tokens and top_k:
        logits_TE = logits_TE if logits_TE.stride(-1) == 1 else logits_TE.contiguous()
        route_kernel[(tokens,)](
            logits_TE, logits_TE.stride(0), weights_Tk, ids_Tk, experts, top_k, power_of_two(experts),
            power_of_two(top_k), num_warps=1, **launch(pdl and tokens <= OVERLAPPED_TOKENS),
        )  # fmt: skip
    return weights_Tk, ids_Tk


def silu_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, computed in fp32, in x's dtype; the gates are the first half of the last axis."""
    shape, width = gate_up_T2I.shape[:-1], gate_up_T2I.shape[-1] // 2
    out_TI = torch.empty((*shape, width), dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    if out_TI.numel():
        flat_T2I = gate_up_T2I.reshape(-1, 2 * width)
        flat_T2I = flat_T2I if flat_T2I.stride(-1) == 1 else flat_T2I.contiguous()
        block = min(power_of_two(width), 1024)
        silu_mul_kernel[(flat_T2I.shape[0], triton.cdiv(width, block))](
            flat_T2I, flat_T2I.stride(0), out_TI, width, block, num_warps=4
        )
    return out_TI


def moe(
    x_TH: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    first_expert: int = 0,
    target: Target | None = None,
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs -> [T, H] fp32.

    gate_up [E, 2I, H] holds gate rows first, down [E, H, I]; ids_Tk int32, weights_Tk fp32, both contiguous. Experts
    outside first_expert .. first_expert + E are other ranks', and add nothing. target: the device's, if None.
    """
    tokens, top_k = ids_Tk.shape
    if not tokens or not top_k or not gate_up.shape[0] or not down.shape[1] or not down.shape[2]:
        return torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    target = target or target_of(x_TH.device)
    x_TH = x_TH if x_TH.stride(-1) == 1 else x_TH.contiguous()
    up_bank, down_bank = operand(gate_up, target.native_fp8), operand(down, target.native_fp8)
    x_TH = _meeting(x_TH, up_bank, down_bank)
    choice = (ids_Tk.contiguous(), weights_Tk.contiguous(), first_expert, gate_up.shape[0])
    if tokens <= STREAM_TOKENS:
        return streamed.moe(x_TH, up_bank, down_bank, *choice)
    return grouped.moe(x_TH, up_bank, down_bank, *choice, target)


def outputs(x_TH: torch.Tensor, gate_up: Weight, down: Weight, ids_Tk: torch.Tensor, target: Target) -> torch.Tensor:
    """Of many tokens, the output [M, H] of each pair, all of whose experts are on this rank; see moe."""
    x_TH = x_TH if x_TH.stride(-1) == 1 else x_TH.contiguous()
    banks = operand(gate_up, target.native_fp8), operand(down, target.native_fp8)
    return grouped.outputs(_meeting(x_TH, *banks), *banks, ids_Tk.contiguous(), 0, gate_up.shape[0], target)


def _meeting(x_TH: torch.Tensor, *banks: Operand) -> torch.Tensor:
    """x in fp32 if a plain bank has another type than x, and x itself otherwise."""
    unlike = any(bank.kind == 0 and bank.value.dtype != x_TH.dtype for bank in banks)
    return x_TH.float() if unlike else x_TH


def compile_cases(native_fp8: bool = False) -> Iterator[CompileCase]:
    """Every configuration for 35B-A3B's experts; native_fp8: for devices with e4m3 in hardware only."""
    constexprs = {"TOP_K": 8, "BE": 256, "BK": 8, "PDL": False}
    types = {"logits": "*fp32", "weights": "*fp32", "ids": "*i32"}
    yield CompileCase(route_kernel, signature(route_kernel, constexprs, types), constexprs, 1, 1)
    constexprs = {"BLOCK": 512}
    types = {"gate_up": "*bf16", "out": "*bf16"}
    yield CompileCase(silu_mul_kernel, signature(silu_mul_kernel, constexprs, types), constexprs, 4, 1)
    yield from streamed.compile_cases(native_fp8)
    yield from grouped.compile_cases(native_fp8)
