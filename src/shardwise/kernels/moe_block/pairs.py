"""Experts for some tens to some hundreds of tokens by matrix units: pairs are sorted by expert, which reads its weights
once; the shared expert, of all tokens, goes through the same launches.

Weights are not asked for before the kernel waits: where all programs of `down` did so, it took a tenth more time.
Legend: T tokens, H hidden, I intermediate, E experts, k experts a token, M = T * k pairs, P tiles, O rows of a program.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear.geometry import Case, banks, per_card
from shardwise.kernels.linear.tiles import COARSE, ROWS, Operand, Target
from shardwise.kernels.linear.triton import step_of
from shardwise.kernels.moe.grouped import Grouped, grouped_config, grouped_configs
from shardwise.kernels.moe_block.banks import Banks
from shardwise.kernels.moe_block.combine import Outputs
from shardwise.kernels.moe_block.matched import down_tile, gated_tile
from shardwise.kernels.moe_block.rank import rank_tiles
from shardwise.kernels.overlap import after_previous, launch, let_next_come

SHARED_TOKENS = 64  # of a tile of the shared expert, whose weights all tokens want


@triton.jit
def _rows(order, tiles, place, most, BT: tl.constexpr):
    """Of a tile: its expert (-1: there is none), the places of its pairs, the pairs, and which of them there are."""
    # By way of .cg: `down` reads them before it waits, see down_kernel in stream.py.
    expert = tl.load(tiles + place, cache_modifier=".cg")
    first = tl.load(tiles + most + place, cache_modifier=".cg")
    stop = tl.load(tiles + 2 * most + place, cache_modifier=".cg")
    first, stop = tl.where(expert < 0, 0, first), tl.where(expert < 0, 0, stop)
    at_T = first + tl.arange(0, BT)
    ok_T = at_T < stop
    pair_T = tl.load(order + at_T, mask=ok_T, other=0, cache_modifier=".cg")
    return expert, at_T.to(tl.int64), pair_T.to(tl.int64), ok_T


@triton.jit(do_not_specialize=["tokens", "most"])
def sorted_gate_up_kernel(
    x, act, shared_act, order, tiles, value, fine, coarse, shared_value, shared_fine, shared_coarse, tokens, most,
    TOP_K: tl.constexpr, BT: tl.constexpr, W: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr, WS: tl.constexpr,
    BTS: tl.constexpr, BKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """act[place] = silu(gate) * up: programs of the shared expert, then those of every tile."""
    SHARED: tl.constexpr = (WS[ROWS] // 2 + BI - 1) // BI
    TILES: tl.constexpr = (W[ROWS] // 2 + BI - 1) // BI
    shared = SHARED * ((tokens + BTS - 1) // BTS)
    if tl.program_id(0) < shared:
        tile, row_T = tl.program_id(0) % SHARED, tl.program_id(0) // SHARED * BTS + tl.arange(0, BTS)
        after_previous(PDL)
        let_next_come(PDL)
        gated_tile(x, shared_act, shared_value, shared_fine, shared_coarse, tile * 0, row_T.to(tl.int64),
                   row_T.to(tl.int64), row_T < tokens, tile, WS, BI, BKS, BTS)  # fmt: skip
    else:
        program = tl.program_id(0) - shared
        after_previous(PDL)
        let_next_come(PDL)
        expert, act_T, pair_T, ok_T = _rows(order, tiles, program // TILES, most, BT)
        if expert >= 0:
            gated_tile(x, act, value, fine, coarse, expert, pair_T // TOP_K, act_T, ok_T, program % TILES, W, BI, BK,
                       BT)  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "most"])
def sorted_down_kernel(
    act, shared_act, y, shared_y, order, tiles, value, fine, coarse, shared_value, shared_fine, shared_coarse, tokens,
    most, BT: tl.constexpr, W: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, WS: tl.constexpr, BTS: tl.constexpr,
    BKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[pair] = down(act[place]), and of the shared expert y[token]. The choice is known when it starts."""
    let_next_come(PDL)
    SHARED: tl.constexpr = (WS[ROWS] + BO - 1) // BO
    TILES: tl.constexpr = (W[ROWS] + BO - 1) // BO
    shared = SHARED * ((tokens + BTS - 1) // BTS)
    if tl.program_id(0) < shared:
        tile, row_T = tl.program_id(0) % SHARED, tl.program_id(0) // SHARED * BTS + tl.arange(0, BTS)
        after_previous(PDL)
        down_tile(shared_act, shared_y, shared_value, shared_fine, shared_coarse, tile * 0, row_T.to(tl.int64),
                  row_T.to(tl.int64), row_T < tokens, tile, WS, BO, BKS)  # fmt: skip
    else:
        program = tl.program_id(0) - shared
        expert, act_T, pair_T, ok_T = _rows(order, tiles, program // TILES, most, BT)
        after_previous(PDL)
        if expert >= 0:
            down_tile(act, y, value, fine, coarse, expert, act_T, pair_T, ok_T, program % TILES, W, BO, BK)


def _up_constants(up: Operand, shared: Operand, top_k: int, config: Grouped) -> dict[str, Any]:
    return {
        "TOP_K": top_k, "BT": config.BT, "W": up.layout, "BI": config.BO // 2, "BK": config.BK, "WS": shared.layout,
        **_shared_tile(shared, config),
    }  # fmt: skip


def _shared_tile(shared: Operand, config: Grouped) -> dict[str, int]:
    """Tokens and columns of a step for the shared expert, all of whose tokens are there: no more shared memory."""
    BT = max(config.BT, SHARED_TOKENS)
    wider = BT > config.BT
    return {"BTS": BT, "BKS": step_of(shared, config.BK // (2 if wider else 1))}


def _down_constants(down: Operand, shared: Operand, config: Grouped) -> dict[str, Any]:
    return {
        "BT": config.BT, "W": down.layout, "BO": config.BO, "BK": config.BK, "WS": shared.layout,
        **_shared_tile(shared, config),
    }  # fmt: skip


def moe(
    x_TH: torch.Tensor,
    banks_of: Banks,
    ids_Tk: torch.Tensor,
    experts: int,
    target: Target,
    pdl: bool,
) -> Outputs:
    """Three launches: the sort, gates and ups of all experts, and their outputs, in x's type; the shared one's in fp32.

    x and ids are contiguous.
    """
    up, down, shared_up, shared_down = banks_of
    (tokens, top_k), hidden, device, count = ids_Tk.shape, down.layout[2], x_TH.device, ids_Tk.numel()
    BT, up_config, config = grouped_configs(up, down, tokens, count / experts, target, x_TH.element_size())
    order_M, tiles_3P = rank_tiles(ids_Tk, experts, BT, pdl)
    most, columns = tiles_3P.shape[1], triton.cdiv(tokens, max(BT, SHARED_TOKENS))
    act_MI = torch.empty((count, down.layout[3]), dtype=x_TH.dtype, device=device)
    shared_act_TI = torch.empty((tokens, shared_down.layout[3]), dtype=x_TH.dtype, device=device)
    BI = up_config.BO // 2
    programs = columns * triton.cdiv(shared_up.layout[2] // 2, BI) + most * triton.cdiv(up.layout[2] // 2, BI)
    sorted_gate_up_kernel[(programs,)](
        x_TH, act_MI, shared_act_TI, order_M, tiles_3P, *up.tensors(), *shared_up.tensors(), tokens, most,
        **_up_constants(up, shared_up, top_k, up_config), num_warps=up_config.warps,
        num_stages=up_config.stages, **launch(pdl),
    )  # fmt: skip
    y_MH = torch.empty((count, hidden), dtype=x_TH.dtype, device=device)
    shared_TH = torch.empty((tokens, hidden), dtype=torch.float32, device=device)
    programs = (columns + most) * triton.cdiv(hidden, config.BO)
    sorted_down_kernel[(programs,)](
        act_MI, shared_act_TI, y_MH, shared_TH, order_M, tiles_3P, *down.tensors(), *shared_down.tensors(), tokens,
        most, **_down_constants(down, shared_down, config), num_warps=config.warps, num_stages=config.stages,
        **launch(pdl),
    )  # fmt: skip
    return Outputs(y_MH, shared_TH)


def compile_cases(native_fp8: bool = False) -> Iterator[CompileCase]:
    """The banks of real models, with a shared expert in their format; a scale of all rows goes onto the result, as in
    grouped.py, where it is compiled."""
    types = dict.fromkeys(("order", "tiles"), "*i32") | dict.fromkeys(("x", "act", "shared_act", "y"), "*bf16")
    types |= {"shared_y": "*fp32"}
    for up, down in banks(native_fp8):
        if up.of.layout[2] != 1024 or up.of.kind > 1 or up.of.layout[COARSE.value] >= 0:
            continue
        yield from _cases(sorted_gate_up_kernel, up, types, native_fp8)
        yield from _cases(sorted_down_kernel, down, types, native_fp8)


def _cases(kernel: Any, bank: Case, types: dict[str, str], native_fp8: bool) -> Iterator[CompileCase]:
    own = types | bank.types | {f"shared_{name}": kind for name, kind in bank.types.items()}
    for config, shared_bytes in per_card(lambda card: _configs(bank.of, card), native_fp8):
        constexprs = _down_constants(bank.of, bank.of, config) | {"PDL": False}
        if kernel is sorted_gate_up_kernel:
            constexprs = _up_constants(bank.of, bank.of, 8, config) | {"PDL": False}
        yield CompileCase(
            kernel, signature(kernel, constexprs, own), constexprs, config.warps, config.stages, shared_bytes
        )


def _configs(bank: Operand, card: Target) -> list[Grouped]:
    """What some tens and some hundreds of tokens take; larger tiles are as those of many tokens."""
    found = [grouped_config(bank, BT, card, 2) for BT in (16, 32)]
    return found + [grouped_config(bank, 16, card, 2, tokens) for tokens in (64, 128) if card.name]
