"""Experts for 2 to some 32 tokens by matrix units: each expert that was chosen reads its weights once, without a sort.

A token chooses an expert once at most, so the tile of an expert has a column for every token, of which most are empty:
the memory is what counts. The program of a pair of token and expert works if no pair before it has the same expert.
Legend: T tokens, H hidden, I intermediate, k experts a token (K in kernels), M = T * k pairs, O rows of a program.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear.geometry import Case, banks, per_card
from shardwise.kernels.linear.tiles import COLUMNS, ROWS, Operand, Target, ask_for_rows, coarse_scale, tile_product
from shardwise.kernels.linear.triton import power_of_two, step_of
from shardwise.kernels.moe_block import hopper
from shardwise.kernels.moe_block.banks import Banks
from shardwise.kernels.moe_block.combine import Outputs
from shardwise.kernels.overlap import after_previous, launch, let_next_come


@triton.jit
def _matches(ids, pair, tokens, TOP_K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr):
    """The expert of a pair, each token's pair with it (-1: none), and whether this pair is the first of them."""
    t_T, k_K = tl.arange(0, BT), tl.arange(0, KP)
    pair_TK = (t_T * TOP_K)[:, None] + k_K[None, :]
    ok_TK = (t_T < tokens)[:, None] & (k_K < TOP_K)[None, :]
    expert = tl.load(ids + pair, cache_modifier=".cg")  # see down_kernel in stream.py
    alike_TK = ok_TK & (tl.load(ids + pair_TK, mask=ok_TK, other=-1, cache_modifier=".cg") == expert)
    first = tl.min(tl.min(tl.where(alike_TK, pair_TK, tokens * TOP_K), 1), 0)
    return expert, tl.max(tl.where(alike_TK, pair_TK, -1), 1), first == pair


@triton.jit
def gated_tile(
    x, act, value, fine, coarse, expert, x_row_T, act_row_T, ok_T, tile, W: tl.constexpr, BI: tl.constexpr,
    BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """act = silu(gate) * up of BI gate rows and their up rows of one expert, for the tokens that are ok."""
    I: tl.constexpr = W[ROWS] // 2  # noqa: E741
    r_O = tl.arange(0, 2 * BI)  # gate and up rows take turns, so that the two halves of a pair can be split
    i_O = tile * BI + r_O // 2
    ok_O, o_O = i_O < I, i_O + r_O % 2 * I
    acc = tile_product(x, x_row_T * W[COLUMNS], ok_T, value, fine, expert, o_O, ok_O, 0, W[COLUMNS], BK, W)
    acc *= coarse_scale(coarse, expert, o_O, ok_O, W)[:, None]
    gate, up = tl.split(tl.permute(tl.reshape(acc, (BI, 2, BT)), (0, 2, 1)))
    i_I = tile * BI + tl.arange(0, BI)
    at = (act_row_T * I)[None, :] + i_I[:, None]
    mixed = gate * tl.sigmoid(gate) * up
    tl.store(act + at, mixed.to(act.dtype.element_ty), mask=(i_I < I)[:, None] & ok_T[None, :])


@triton.jit(do_not_specialize=["tokens"])
def matched_gate_up_kernel(
    x, act, shared_act, ids, value, fine, coarse, shared_value, shared_fine, shared_coarse, tokens,
    TOP_K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, W: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr,
    WS: tl.constexpr, BIS: tl.constexpr, BKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs of the shared expert, then those of every pair: some rows of one expert for all of its tokens."""
    SHARED: tl.constexpr = (WS[ROWS] // 2 + BIS - 1) // BIS
    TILES: tl.constexpr = (W[ROWS] // 2 + BI - 1) // BI
    t_T = tl.arange(0, BT)
    if tl.program_id(0) < SHARED:
        tile, row_T = tl.program_id(0), t_T.to(tl.int64)
        r_O = tl.arange(0, 2 * BIS)
        o_O = tile * BIS + r_O // 2 + r_O % 2 * (WS[ROWS] // 2)
        ask_for_rows(shared_value, tile * 0, o_O, o_O < WS[ROWS], WS, PDL)
        after_previous(PDL)
        let_next_come(PDL)
        gated_tile(x, shared_act, shared_value, shared_fine, shared_coarse, tile * 0, row_T, row_T, t_T < tokens, tile,
                    WS, BIS, BKS, BT)  # fmt: skip
    else:
        program = tl.program_id(0) - SHARED
        after_previous(PDL)
        let_next_come(PDL)
        expert, pair_T, mine = _matches(ids, program // TILES, tokens, TOP_K, KP, BT)
        if mine:
            gated_tile(x, act, value, fine, coarse, expert, t_T.to(tl.int64), pair_T.to(tl.int64), pair_T >= 0,
                        program % TILES, W, BI, BK, BT)  # fmt: skip


@triton.jit
def down_tile(
    act, y, value, fine, coarse, expert, act_row_T, y_row_T, ok_T, tile, W: tl.constexpr, BO: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """y = down(act) of BO rows of one expert."""
    o_O = tile * BO + tl.arange(0, BO)
    ok_O = o_O < W[ROWS]
    acc = tile_product(act, act_row_T * W[COLUMNS], ok_T, value, fine, expert, o_O, ok_O, 0, W[COLUMNS], BK, W)
    acc *= coarse_scale(coarse, expert, o_O, ok_O, W)[:, None]
    at = (y_row_T * W[ROWS])[None, :] + o_O[:, None]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=ok_O[:, None] & ok_T[None, :])


@triton.jit(do_not_specialize=["tokens"])
def matched_down_kernel(
    act, shared_act, y, ids, value, fine, coarse, shared_value, shared_fine, shared_coarse, tokens,
    TOP_K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, W: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
    WS: tl.constexpr, BOS: tl.constexpr, BKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As above: y[pair] of routed experts, and y[pairs + token] of the shared one."""
    let_next_come(PDL)
    SHARED: tl.constexpr = (WS[ROWS] + BOS - 1) // BOS
    TILES: tl.constexpr = (W[ROWS] + BO - 1) // BO
    t_T = tl.arange(0, BT)
    if tl.program_id(0) < SHARED:
        tile, row_T = tl.program_id(0), t_T.to(tl.int64)
        o_O = tile * BOS + tl.arange(0, BOS)
        ask_for_rows(shared_value, tile * 0, o_O, o_O < WS[ROWS], WS, PDL)
        after_previous(PDL)
        down_tile(shared_act, y, shared_value, shared_fine, shared_coarse, tile * 0, row_T, tokens * TOP_K + row_T,
                   t_T < tokens, tile, WS, BOS, BKS)  # fmt: skip
    else:
        program = tl.program_id(0) - SHARED
        expert, pair_T, mine = _matches(ids, program // TILES, tokens, TOP_K, KP, BT)
        after_previous(PDL)
        if mine:
            row_T = pair_T.to(tl.int64)
            down_tile(act, y, value, fine, coarse, expert, row_T, row_T, pair_T >= 0, program % TILES, W, BO, BK)


class Matched(NamedTuple):
    """A configuration of one of the two products: O rows (gates and ups together), BK columns a step."""

    BO: int
    BK: int
    warps: int
    stages: int


def matched_config(bank: Operand, tokens: int, target: Target, x_bytes: int) -> Matched:
    """Tiles of some 16 KiB of codes in flight, so that several programs share a processor."""
    if x_bytes > 2:
        return Matched(32, step_of(bank, 32), 4, 2)
    found = tuning.choice(target.name, "matched", [bank.layout], min(tokens, 16))
    if found:
        return Matched(*found)
    roomy = target.shared_kib > 128
    return Matched(64, step_of(bank, 128 if roomy else 64), 4, 3 if roomy else 2)


def _up_constants(up: Operand, shared: Operand, tokens: int, top_k: int, config: Matched) -> dict[str, Any]:
    return {
        "TOP_K": top_k, "KP": power_of_two(top_k), "BT": max(16, power_of_two(tokens)), "W": up.layout,
        "BI": config.BO // 2, "BK": step_of(up, config.BK), "WS": shared.layout, "BIS": config.BO // 2,
        "BKS": step_of(shared, config.BK),
    }  # fmt: skip


def _down_constants(down: Operand, shared: Operand, tokens: int, top_k: int, config: Matched) -> dict[str, Any]:
    return {
        "TOP_K": top_k, "KP": power_of_two(top_k), "BT": max(16, power_of_two(tokens)), "W": down.layout,
        "BO": config.BO, "BK": step_of(down, config.BK), "WS": shared.layout, "BOS": config.BO,
        "BKS": step_of(shared, config.BK),
    }  # fmt: skip


def moe(
    x_TH: torch.Tensor,
    banks_of: Banks,
    ids_Tk: torch.Tensor,
    configs: tuple[Matched, Matched | hopper.Hopper],
    pdl: bool,
) -> Outputs:
    """Two launches: gates and ups of all experts, and their outputs, fp32.

    x and ids are contiguous; configs: of gates and ups, and of down.
    """
    up, down, shared_up, shared_down = banks_of
    (tokens, top_k), hidden, device = ids_Tk.shape, down.layout[2], x_TH.device
    act_MI = torch.empty((tokens * top_k, down.layout[3]), dtype=x_TH.dtype, device=device)
    shared_act_TI = torch.empty((tokens, shared_down.layout[3]), dtype=x_TH.dtype, device=device)
    config, down_config = configs
    constexprs = _up_constants(up, shared_up, tokens, top_k, config)
    programs = triton.cdiv(shared_up.layout[2] // 2, constexprs["BIS"])
    programs += tokens * top_k * triton.cdiv(up.layout[2] // 2, constexprs["BI"])
    matched_gate_up_kernel[(programs,)](
        x_TH, act_MI, shared_act_TI, ids_Tk, *up.tensors(), *shared_up.tensors(), tokens, **constexprs,
        num_warps=config.warps, num_stages=config.stages, **launch(pdl),
    )  # fmt: skip
    if isinstance(down_config, hopper.Hopper):
        chosen = hopper.Chosen(ids_Tk, ids_Tk, ids_Tk, ids_Tk.numel(), True)
        return hopper.outputs(act_MI, shared_act_TI, banks_of, chosen, down_config, pdl)
    y_MH = torch.empty((tokens * (top_k + 1), hidden), dtype=torch.float32, device=device)
    constexprs = _down_constants(down, shared_down, tokens, top_k, down_config)
    programs = triton.cdiv(hidden, constexprs["BOS"]) + tokens * top_k * triton.cdiv(hidden, constexprs["BO"])
    matched_down_kernel[(programs,)](
        act_MI, shared_act_TI, y_MH, ids_Tk, *down.tensors(), *shared_down.tensors(), tokens, **constexprs,
        num_warps=down_config.warps, num_stages=down_config.stages, **launch(pdl),
    )  # fmt: skip
    return Outputs(y_MH[: tokens * top_k], y_MH[tokens * top_k :])


def compile_cases(native_fp8: bool) -> Iterator[CompileCase]:
    """The banks of real models, with a shared expert in their format, for 16 and 32 tokens."""
    types = {"y": "*fp32", "ids": "*i32"} | dict.fromkeys(("x", "act", "shared_act"), "*bf16")
    for up, down in banks(native_fp8):
        if up.of.layout[2] != 1024:
            continue
        for kernel, constants, bank in (
            (matched_gate_up_kernel, _up_constants, up),
            (matched_down_kernel, _down_constants, down),
        ):
            yield from _cases(kernel, constants, bank, types, native_fp8)


def _cases(kernel: Any, constants: Any, bank: Case, types: dict[str, str], native_fp8: bool) -> Iterator[CompileCase]:
    own = types | bank.types | {f"shared_{name}": kind for name, kind in bank.types.items()}
    for config, shared_bytes in per_card(
        lambda card: [matched_config(bank.of, tokens, card, 2) for tokens in (4, 16)], native_fp8
    ):
        for tokens in (32,) if bank.of.kind == 1 else (16, 32):
            constexprs = constants(bank.of, bank.of, tokens, 8, config) | {"PDL": False}
            signed = signature(kernel, constexprs, own)
            yield CompileCase(kernel, signed, constexprs, config.warps, config.stages, shared_bytes)
