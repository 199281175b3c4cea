"""Experts for some tokens by matrix instructions whose weights come straight from memory: see linear/fragments.py.

Pairs of token and expert are sorted by expert; a tile is up to BT pairs of one expert, which read its weights once. The
shared expert, of all tokens, goes through the same launches.
Legend: T tokens, H hidden, E experts, I intermediate, k experts a token, M = T * k pairs, P tiles at most.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear.fragments import (
    VALUES,
    Fragments,
    fragment_bank,
    fragment_coarse,
    fragment_first,
    fragment_products,
    steps_of,
    turned_place,
    words,
)
from shardwise.kernels.linear.geometry import Case, banks, case
from shardwise.kernels.linear.layouts import sum_layout, tokens_layout, values_of
from shardwise.kernels.linear.tiles import COLUMNS, FP8, ROWS, Operand
from shardwise.kernels.linear.triton import power_of_two
from shardwise.kernels.moe_block.banks import Banks
from shardwise.kernels.moe_block.combine import Outputs
from shardwise.kernels.moe_block.rank import rank_tiles
from shardwise.kernels.overlap import after_previous, launch, let_next_come

MATCHED_TOKENS = 8  # up to so many, a tile has a column for every token, and pairs need no sort


@gluon.jit
def token_pairs(
    ids, pair, expert, tokens, TOP_K: gl.constexpr, KP: gl.constexpr, BT: gl.constexpr, WARPS: gl.constexpr
):
    """Each token's pair with an expert (-1: none), and whether `pair` is the first of them."""
    LAID: gl.constexpr = gl.BlockedLayout([1, KP], [32, 1], [WARPS, 1], [1, 0])
    t_T = gl.expand_dims(gl.arange(0, BT, layout=gl.SliceLayout(1, LAID)), 1)
    k_K = gl.expand_dims(gl.arange(0, KP, layout=gl.SliceLayout(0, LAID)), 0)
    pair_TK, ok_TK = t_T * TOP_K + k_K, (t_T < tokens) & (k_K < TOP_K)
    alike_TK = ok_TK & (gl.load(ids + pair_TK, mask=ok_TK, other=-1, cache_modifier=".cg") == expert)
    first = gl.min(gl.min(gl.where(alike_TK, pair_TK, tokens * TOP_K), 1), 0)
    return gl.max(gl.where(alike_TK, pair_TK, -1), 1), first == pair


@gluon.jit
def _rows(
    ids, order, tiles, program, most, tokens, MATCHED: gl.constexpr, TOP_K: gl.constexpr, KP: gl.constexpr,
    BT: gl.constexpr, LAYOUT: gl.constexpr, SUM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Of a program: the expert (-1: nothing to do), and for each token of its tile: the row of x, of act and of y, and
    whether there is one, the first two in LAYOUT, and all but the first in that of sums. With MATCHED the tile has a
    column for every token."""
    if MATCHED:
        expert = gl.load(ids + program, cache_modifier=".cg")
        pair_T, mine = token_pairs(ids, program, expert, tokens, TOP_K, KP, BT, WARPS)
        expert = gl.where(mine, expert, -1)
        t_T, act_T, s_T = (
            gl.arange(0, BT, layout=LAYOUT), gl.convert_layout(pair_T, LAYOUT), gl.convert_layout(pair_T, SUM)
        )  # fmt: skip
        ok_T = act_T >= 0
        t_T, act_T = gl.where(ok_T, t_T, program // TOP_K), gl.where(ok_T, act_T, program)
        found = expert, t_T, act_T, ok_T, s_T, s_T, s_T >= 0
    else:
        # By way of .cg, here and above: `down` reads them before it waits, see down_kernel in stream.py.
        expert = gl.load(tiles + program, cache_modifier=".cg")
        first = gl.load(tiles + most + program, cache_modifier=".cg")
        stop = gl.load(tiles + 2 * most + program, cache_modifier=".cg")
        first, stop = gl.where(expert < 0, 0, first), gl.where(expert < 0, 0, stop)
        at_T, s_T = first + gl.arange(0, BT, layout=LAYOUT), first + gl.arange(0, BT, layout=SUM)
        ok_T = at_T < stop
        at_T = gl.minimum(at_T, gl.maximum(stop - 1, 0))
        x_T = gl.load(order + at_T, cache_modifier=".cg") // TOP_K
        y_T = gl.load(order + s_T, mask=s_T < stop, other=0, cache_modifier=".cg")
        found = expert, x_T, at_T, ok_T, s_T, y_T, s_T < stop
    return found


@gluon.jit
def _gated_tile(
    x, act, value, fine, coarse, expert, tile, x_row_T, ok_T, act_row_T, act_ok_T, W: gl.constexpr, BI: gl.constexpr,
    BT: gl.constexpr, BK: gl.constexpr, RUN: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    TILES: gl.constexpr, TURN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """act = silu(gate) * up, BI columns of one expert."""
    I: gl.constexpr = W[ROWS] // 2  # noqa: E741
    first, stop = tile * (BI * TILES), (tile + 1) * (BI * TILES)
    value, fine = fragment_bank(value, fine, expert, W)
    held = fragment_first(value, fine, first, I, I, W, BI, BK, RUN, WARPS, SPLITS)
    after_previous(PDL)
    let_next_come(PDL)
    for i0 in range(first, stop, BI):
        gate, up, held = fragment_products(
            x, x_row_T * W[COLUMNS], ok_T, value, fine, held, i0, i0 + BI < stop, I, I, W, BI, BT, BK, RUN,
            WARPS, SPLITS, False, TILES,
        )  # fmt: skip
        i_M = i0 + gl.arange(0, BI, layout=gl.SliceLayout(1, sum_layout(W, WARPS, SPLITS, BI)))
        ok_M = i_M < I
        gate = gate * gl.expand_dims(fragment_coarse(coarse, expert, i_M, ok_M, W), 1)
        up = up * gl.expand_dims(fragment_coarse(coarse, expert, i_M + I, ok_M, W), 1)
        mixed = gate / (1.0 + gl.exp(-gate)) * up
        at = gl.expand_dims(act_row_T * I, 0) + gl.expand_dims(turned_place(i_M, TURN), 1)
        gl.store(act + at, mixed.to(act.dtype.element_ty), mask=gl.expand_dims(act_ok_T, 0) & gl.expand_dims(ok_M, 1))


@gluon.jit(do_not_specialize=["tokens", "most"])
def fragment_gate_up_kernel(
    x, act, shared_act, ids, order, tiles, value, fine, coarse, shared_value, shared_fine, shared_coarse, tokens, most,
    MATCHED: gl.constexpr, TOP_K: gl.constexpr, KP: gl.constexpr, BT: gl.constexpr, W: gl.constexpr, BI: gl.constexpr,
    BK: gl.constexpr, RUN: gl.constexpr, WS: gl.constexpr, BIS: gl.constexpr, BKS: gl.constexpr, RUNS: gl.constexpr,
    WARPS: gl.constexpr, SPLITS: gl.constexpr, TILES: gl.constexpr, TILESS: gl.constexpr,
    TURN: gl.constexpr, TURNS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Programs of the shared expert, then those of every tile. The next kernel may come when the choice is known."""
    SHARED: gl.constexpr = (WS[ROWS] // 2 + BIS * TILESS - 1) // (BIS * TILESS)
    PARTS: gl.constexpr = (W[ROWS] // 2 + BI * TILES - 1) // (BI * TILES)
    SUM: gl.constexpr = gl.SliceLayout(0, sum_layout(W, WARPS, SPLITS, BI))
    SUMS: gl.constexpr = gl.SliceLayout(0, sum_layout(WS, WARPS, SPLITS, BIS))
    shared = SHARED * ((tokens + BT - 1) // BT)
    program = gl.program_id(0)
    if program < shared:
        first = program // SHARED * BT
        t_T = first + gl.arange(0, BT, layout=tokens_layout(WARPS, SPLITS, RUNS * values_of(WS)))
        s_T = first + gl.arange(0, BT, layout=SUMS)
        _gated_tile(x, shared_act, shared_value, shared_fine, shared_coarse, program * 0, program % SHARED,
                    gl.minimum(t_T, tokens - 1), t_T < tokens, s_T, s_T < tokens, WS, BIS, BT, BKS, RUNS, WARPS,
                    SPLITS, TILESS, TURNS, PDL)  # fmt: skip
    else:
        after_previous(PDL)
        let_next_come(PDL)
        expert, x_T, _, ok_T, act_T, _, act_ok_T = _rows(
            ids, order, tiles, (program - shared) // PARTS, most, tokens, MATCHED, TOP_K, KP, BT,
            tokens_layout(WARPS, SPLITS, RUN * values_of(W)), SUM, WARPS,
        )  # fmt: skip
        if expert >= 0:
            _gated_tile(x, act, value, fine, coarse, expert, (program - shared) % PARTS, x_T, ok_T, act_T, act_ok_T, W,
                        BI, BT, BK, RUN, WARPS, SPLITS, TILES, TURN, False)  # fmt: skip


@gluon.jit
def _down_tile(
    act, y, value, fine, coarse, expert, tile, act_row_T, ok_T, y_row_T, y_ok_T, W: gl.constexpr, BO: gl.constexpr,
    BT: gl.constexpr, BK: gl.constexpr, RUN: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    TILES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y = down(act), BO columns of one expert."""
    first, stop = tile * (BO * TILES), (tile + 1) * (BO * TILES)
    value, fine = fragment_bank(value, fine, expert, W)
    held = fragment_first(value, fine, first, W[ROWS], 0, W, BO, BK, RUN, WARPS, SPLITS)
    after_previous(PDL)
    let_next_come(PDL)
    for o0 in range(first, stop, BO):
        sums, _, held = fragment_products(
            act, act_row_T * W[COLUMNS], ok_T, value, fine, held, o0, o0 + BO < stop, W[ROWS], 0, W, BO, BT,
            BK, RUN, WARPS, SPLITS, True, TILES,
        )  # fmt: skip
        o_M = o0 + gl.arange(0, BO, layout=gl.SliceLayout(1, sum_layout(W, WARPS, SPLITS, BO)))
        sums = sums * gl.expand_dims(fragment_coarse(coarse, expert, o_M, o_M < W[ROWS], W), 1)
        at = gl.expand_dims(y_row_T.to(gl.int64) * W[ROWS], 0) + gl.expand_dims(o_M, 1)
        gl.store(y + at, sums, mask=gl.expand_dims(y_ok_T, 0) & gl.expand_dims(o_M < W[ROWS], 1))


@gluon.jit(do_not_specialize=["tokens", "most"])
def fragment_down_kernel(
    act, shared_act, y, ids, order, tiles, value, fine, coarse, shared_value, shared_fine, shared_coarse, tokens, most,
    MATCHED: gl.constexpr, TOP_K: gl.constexpr, KP: gl.constexpr, BT: gl.constexpr, W: gl.constexpr, BO: gl.constexpr,
    BK: gl.constexpr, RUN: gl.constexpr, WS: gl.constexpr, BOS: gl.constexpr, BKS: gl.constexpr, RUNS: gl.constexpr,
    WARPS: gl.constexpr, SPLITS: gl.constexpr, TILES: gl.constexpr, TILESS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As above: y[pair] of routed experts, y[pairs + token] of the shared one. The choice is known when it starts."""
    let_next_come(PDL)
    SHARED: gl.constexpr = (WS[ROWS] + BOS * TILESS - 1) // (BOS * TILESS)
    PARTS: gl.constexpr = (W[ROWS] + BO * TILES - 1) // (BO * TILES)
    SUM: gl.constexpr = gl.SliceLayout(0, sum_layout(W, WARPS, SPLITS, BO))
    SUMS: gl.constexpr = gl.SliceLayout(0, sum_layout(WS, WARPS, SPLITS, BOS))
    shared = SHARED * ((tokens + BT - 1) // BT)
    program = gl.program_id(0)
    if program < shared:
        first = program // SHARED * BT
        t_T = first + gl.arange(0, BT, layout=tokens_layout(WARPS, SPLITS, RUNS * values_of(WS)))
        s_T = first + gl.arange(0, BT, layout=SUMS)
        _down_tile(shared_act, y, shared_value, shared_fine, shared_coarse, program * 0, program % SHARED,
                   gl.minimum(t_T, tokens - 1), t_T < tokens, tokens * TOP_K + s_T, s_T < tokens, WS, BOS, BT, BKS,
                   RUNS, WARPS, SPLITS, TILESS, PDL)  # fmt: skip
    else:
        expert, _, act_T, ok_T, _, y_T, y_ok_T = _rows(
            ids, order, tiles, (program - shared) // PARTS, most, tokens, MATCHED, TOP_K, KP, BT,
            tokens_layout(WARPS, SPLITS, RUN * values_of(W)), SUM, WARPS,
        )  # fmt: skip
        if expert >= 0:
            _down_tile(act, y, value, fine, coarse, expert, (program - shared) % PARTS, act_T, ok_T, y_T, y_ok_T, W, BO,
                       BT, BK, RUN, WARPS, SPLITS, TILES, PDL)  # fmt: skip
        else:
            after_previous(PDL)


def config_of(of: Operand, up: bool, tokens: int, gpu: str = "") -> Fragments:
    """Rows, steps and tiles as measured on an H200."""
    found = tuning.choice(gpu, "fragments", [of.layout], tokens)
    if found:
        return Fragments(*found)
    step, run = steps_of(of)
    if of.kind == FP8.value:
        return Fragments(16, step, run, 2, 2) if up else Fragments(128, step, run, 4)
    if up:
        return Fragments(32, step, run, 2)
    columns = of.layout[COLUMNS.value]
    if columns % step:
        return Fragments(64, *steps_of(of, 2), 4)
    if tokens <= MATCHED_TOKENS:
        return Fragments(64, step, run, 4, 1, 2)
    return Fragments(64, step * (1 if columns % (2 * step) else 2), run, 4, 1, 4)


def tokens_tile(tokens: int, top_k: int, experts: int) -> int:
    """BT: twice what an expert has on average, in eights."""
    return min(32, max(8, power_of_two(-(-2 * tokens * top_k // experts))))


def _tiles(of: Operand, rows: str, config: Fragments, step: int) -> int:
    """Tiles of a program; one, where `of` does not part into whole ones."""
    count = of.layout[ROWS.value] // (2 if rows == "BI" else 1)
    whole = count % (config.BM * config.tiles) == 0 and of.layout[COLUMNS.value] % (step * config.splits) == 0
    return config.tiles if whole else 1


def _constants(
    of: Operand, shared: Operand, top_k: int, BT: int, config: Fragments, rows: str, matched: bool
) -> dict[str, Any]:
    """What a kernel is compiled for. rows: "BI" or "BO"."""
    step, run = steps_of(shared)
    return {
        "MATCHED": matched, "TOP_K": top_k, "KP": power_of_two(top_k), "BT": BT, "W": of.layout, rows: config.BM,
        "BK": config.BK, "RUN": config.RUN, "WS": shared.layout, f"{rows}S": config.BM,
        "BKS": step, "RUNS": run, "WARPS": config.warps, "SPLITS": config.splits,
        "TILES": _tiles(of, rows, config, config.BK), "TILESS": _tiles(shared, rows, config, step),
    }  # fmt: skip


def _turns(down: Operand, shared_down: Operand) -> dict[str, int]:
    """Values of the words that will be multiplied with what gates and ups give."""
    return {"TURN": VALUES[down.kind], "TURNS": VALUES[shared_down.kind]}


def moe(
    x_TH: torch.Tensor,
    banks_of: Banks,
    ids_Tk: torch.Tensor,
    experts: int,
    gpu: str,
    pdl: bool,
    configs: tuple[int, Fragments, Fragments] | None = None,
) -> Outputs:
    """Three launches: the sort, gates and ups of all experts, and their outputs, fp32.

    x and ids are contiguous, x in bf16; configs: BT, of gates and ups, and of down, for tuning.
    """
    up, down, shared_up, shared_down = banks_of
    (tokens, top_k), hidden, device = ids_Tk.shape, down.layout[2], x_TH.device
    BT, up_config, down_config = configs or (
        tokens_tile(tokens, top_k, experts), config_of(up, True, tokens, gpu), config_of(down, False, tokens, gpu)
    )  # fmt: skip
    matched, most, columns = tokens <= min(BT, MATCHED_TOKENS), tokens * top_k, triton.cdiv(tokens, BT)
    order_M, tiles_3P = ids_Tk, ids_Tk
    if not matched:
        order_M, tiles_3P = rank_tiles(ids_Tk, experts, BT, pdl)
        most = tiles_3P.shape[1]
    act_MI = torch.empty((tokens * top_k, down.layout[3]), dtype=x_TH.dtype, device=device)
    shared_act_TI = torch.empty((tokens, shared_down.layout[3]), dtype=x_TH.dtype, device=device)
    y_MH = torch.empty((tokens * (top_k + 1), hidden), dtype=torch.float32, device=device)
    constexprs = _constants(up, shared_up, top_k, BT, up_config, "BI", matched) | _turns(down, shared_down)
    programs = columns * triton.cdiv(shared_up.layout[2] // 2, constexprs["BIS"] * constexprs["TILESS"])
    programs += most * triton.cdiv(up.layout[2] // 2, up_config.BM * constexprs["TILES"])
    fragment_gate_up_kernel[(programs,)](
        x_TH, act_MI, shared_act_TI, ids_Tk, order_M, tiles_3P, *words(up), *words(shared_up), tokens, most,
        **constexprs, num_warps=up_config.warps, **launch(pdl),
    )  # fmt: skip
    constexprs = _constants(down, shared_down, top_k, BT, down_config, "BO", matched)
    programs = columns * triton.cdiv(hidden, constexprs["BOS"] * constexprs["TILESS"])
    programs += most * triton.cdiv(hidden, down_config.BM * constexprs["TILES"])
    fragment_down_kernel[(programs,)](
        act_MI, shared_act_TI, y_MH, ids_Tk, order_M, tiles_3P, *words(down), *words(shared_down), tokens, most,
        **constexprs, num_warps=down_config.warps, **launch(pdl),
    )  # fmt: skip
    return Outputs(y_MH[: tokens * top_k], y_MH[tokens * top_k :])


def measured_banks() -> Iterator[tuple[Case, Case, int, str, int]]:
    """gate|up and down of 35B-A3B's experts, whole and halved, with tokens, the GPU that has choices, and its KiB."""
    for name, kib in tuning.measured():
        for kind, width, tokens in product(("fp8_block", "fp8_tensor", "nvfp4_moved"), (512, 256), (4, 16)):
            up, down = case(2 * width, 2048, kind, False, halves=2), case(2048, width, kind, False)
            if any(tuning.choice(name, "fragments", [bank.of.layout], tokens) for bank in (up, down)):
                yield up, down, tokens, name, kib


def compile_cases() -> Iterator[CompileCase]:
    """The banks of real models, whole and cut inside a block, with a shared expert in their format.

    Nothing here goes by whether a device has e4m3 in hardware.
    """
    types = dict.fromkeys(("ids", "order", "tiles"), "*i32")
    types |= dict.fromkeys(("x", "act", "shared_act"), "*bf16") | {"y": "*fp32"}
    ruled = [(up, down, tokens, "", 0) for up, down in banks(False) if up.of.layout[2] != 128 for tokens in (4, 512)]
    for up, down, tokens, gpu, kib in (*ruled, *measured_banks()):
        for kernel, bank, rows in ((fragment_gate_up_kernel, up, "BI"), (fragment_down_kernel, down, "BO")):
            config, BT = config_of(bank.of, rows == "BI", tokens, gpu), tokens_tile(tokens, 8, 256)
            if not bank.of.kind or (gpu and config == config_of(bank.of, rows == "BI", tokens)):
                continue
            own = types | bank.types | {"value": "*i32"}
            own |= {f"shared_{name}": own[name] for name in ("value", "fine", "coarse")}
            constexprs = _constants(bank.of, bank.of, 8, BT, config, rows, tokens <= BT) | {"PDL": False}
            constexprs |= _turns(down.of, down.of) if rows == "BI" else {}
            yield CompileCase(kernel, signature(kernel, constexprs, own), constexprs, config.warps, 1, kib * 1024)
