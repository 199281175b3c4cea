"""Experts for some tokens by matrix instructions whose weights come straight from memory: see linear/fragments.py.

Pairs of token and expert are sorted by expert; a tile is up to BT pairs of one expert, which read its weights once. The
shared expert, of all tokens, goes through the same launches.
Legend: T tokens, H hidden, E experts, I intermediate, k experts a token, M = T * k pairs, P tiles at most.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false

from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear.ahead import fragment_ahead, fragment_near, fragment_pairs, rows_layout, steps_ahead
from shardwise.kernels.linear.fragments import (
    VALUES,
    Fragments,
    fragment_bank,
    fragment_coarse,
    fragment_products,
    steps_of,
    turned_place,
    words,
)
from shardwise.kernels.linear.geometry import banks
from shardwise.kernels.linear.layouts import sum_layout
from shardwise.kernels.linear.tiles import COLUMNS, FP8, ROWS, Operand
from shardwise.kernels.linear.triton import power_of_two
from shardwise.kernels.moe_block.combine import Outputs
from shardwise.kernels.moe_block.rank import RANKED_ROWS, RANKED_STEP, rank_tiles, rank_tiles_kernel
from shardwise.kernels.overlap import after_previous, launch, let_next_come

MATCHED_TOKENS = 8  # up to so many, a tile has a column for every token, and pairs need no sort
FEW_TOKENS = 16  # up to so many, too few programs run for one to hide what another waits for


@gluon.jit
def _first_of(
    ids, tiles, program, most, tokens, MATCHED: gl.constexpr, TOP_K: gl.constexpr, KP: gl.constexpr, BT: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A program's expert (-1: nothing to do), and what else has to be read to know its tokens, on its way.

    By way of .cg, here and below: `down` reads them before it waits, see down_kernel in stream.py.
    """
    if MATCHED:
        LAID: gl.constexpr = gl.BlockedLayout([1, KP], [32, 1], [WARPS, 1], [1, 0])
        t_T = gl.expand_dims(gl.arange(0, BT, layout=gl.SliceLayout(1, LAID)), 1)
        k_K = gl.expand_dims(gl.arange(0, KP, layout=gl.SliceLayout(0, LAID)), 0)
        expert = gl.load(ids + program, cache_modifier=".cg")
        ok_TK = (t_T < tokens) & (k_K < TOP_K)
        found = expert, gl.load(ids + (t_T * TOP_K + k_K), mask=ok_TK, other=-1, cache_modifier=".cg"), expert
    else:
        expert = gl.load(tiles + program, cache_modifier=".cg")
        first = gl.load(tiles + most + program, cache_modifier=".cg")
        found = expert, first, gl.load(tiles + 2 * most + program, cache_modifier=".cg")
    return found


@gluon.jit
def _rows(
    first, stop, expert, order, program, tokens, MATCHED: gl.constexpr, TOP_K: gl.constexpr, KP: gl.constexpr,
    BT: gl.constexpr, LAYOUT: gl.constexpr, SUM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Whether a program has anything to do, and for each token of its tile: the row of x, of act and of y, and whether
    there is one, the first two in LAYOUT, and all but the first in that of sums. first, stop: see _first_of. With
    MATCHED the tile has a column for every token, and only the program of an expert's first pair has to do it."""
    if MATCHED:
        LAID: gl.constexpr = gl.BlockedLayout([1, KP], [32, 1], [WARPS, 1], [1, 0])
        t_T = gl.expand_dims(gl.arange(0, BT, layout=gl.SliceLayout(1, LAID)), 1)
        pair_TK = t_T * TOP_K + gl.expand_dims(gl.arange(0, KP, layout=gl.SliceLayout(0, LAID)), 0)
        alike_TK = first == expert
        mine = gl.min(gl.min(gl.where(alike_TK, pair_TK, tokens * TOP_K), 1), 0) == program
        pair_T = gl.max(gl.where(alike_TK, pair_TK, -1), 1)
        t_T, act_T, s_T = (
            gl.arange(0, BT, layout=LAYOUT), gl.convert_layout(pair_T, LAYOUT), gl.convert_layout(pair_T, SUM)
        )  # fmt: skip
        ok_T = act_T >= 0
        t_T, act_T = gl.where(ok_T, t_T, program // TOP_K), gl.where(ok_T, act_T, program)
        found = mine, t_T, act_T, ok_T, s_T, s_T, s_T >= 0
    else:
        at_T, s_T = first + gl.arange(0, BT, layout=LAYOUT), first + gl.arange(0, BT, layout=SUM)
        ok_T = at_T < stop
        at_T = gl.minimum(at_T, gl.maximum(stop - 1, 0))
        x_T = gl.load(order + at_T, cache_modifier=".cg") // TOP_K
        y_T = gl.load(order + s_T, mask=s_T < stop, other=0, cache_modifier=".cg")
        found = expert >= 0, x_T, at_T, ok_T, s_T, y_T, s_T < stop
    return found


@gluon.jit
def _gated_tile(
    x, act, value, fine, coarse, held, expert, tile, x_row_T, ok_T, act_row_T, act_ok_T, W: gl.constexpr,
    BI: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, RUN: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    TILES: gl.constexpr, AHEAD: gl.constexpr, TURN: gl.constexpr,
):  # fmt: skip
    """act = silu(gate) * up, BI columns of one expert. value, fine: the expert's; held: see fragment_ahead."""
    I: gl.constexpr = W[ROWS] // 2  # noqa: E741
    first, stop = tile * (BI * TILES), (tile + 1) * (BI * TILES)
    for i0 in range(first, stop, BI):
        i_M = i0 + gl.arange(0, BI, layout=gl.SliceLayout(1, sum_layout(WARPS, SPLITS)))
        ok_M = i_M < I
        if AHEAD > 1:
            scale_M = fragment_coarse(coarse, expert, i_M, ok_M, W)
            other_M = fragment_coarse(coarse, expert, i_M + I, ok_M, W)
            near = fragment_near(x, x_row_T * W[COLUMNS], ok_T, W, BT, BK, WARPS, SPLITS)
            gate, up = fragment_pairs(
                near, value, fine, held, i0, I, I, W, BI, BT, BK, RUN, WARPS, SPLITS, False
            )  # fmt: skip
        else:
            gate, up, held = fragment_products(
                x, x_row_T * W[COLUMNS], ok_T, value, fine, held, i0, i0 + BI < stop, I, I, W, BI, BT, BK, RUN,
                WARPS, SPLITS, False, TILES,
            )  # fmt: skip
            scale_M = fragment_coarse(coarse, expert, i_M, ok_M, W)
            other_M = fragment_coarse(coarse, expert, i_M + I, ok_M, W)
        gate, up = gate * gl.expand_dims(scale_M, 1), up * gl.expand_dims(other_M, 1)
        mixed = gate / (1.0 + gl.exp(-gate)) * up
        at = gl.expand_dims(act_row_T * I, 0) + gl.expand_dims(turned_place(i_M, TURN), 1)
        gl.store(act + at, mixed.to(act.dtype.element_ty), mask=gl.expand_dims(act_ok_T, 0) & gl.expand_dims(ok_M, 1))


@gluon.jit(do_not_specialize=["tokens", "most"])
def fragment_gate_up_kernel(
    x, act, shared_act, ids, order, tiles, value, fine, coarse, shared_value, shared_fine, shared_coarse, tokens, most,
    MATCHED: gl.constexpr, TOP_K: gl.constexpr, KP: gl.constexpr, BT: gl.constexpr, W: gl.constexpr, BI: gl.constexpr,
    BK: gl.constexpr, RUN: gl.constexpr, WS: gl.constexpr, BIS: gl.constexpr, BKS: gl.constexpr, RUNS: gl.constexpr,
    WARPS: gl.constexpr, SPLITS: gl.constexpr, TILES: gl.constexpr, TILESS: gl.constexpr, AHEAD: gl.constexpr,
    AHEADS: gl.constexpr, TURN: gl.constexpr, TURNS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Programs of the shared expert, then those of every tile. The next kernel may come when the choice is known.

    With AHEAD, weights are asked for as soon as the expert is known, before it is known who else chose it."""
    SHARED: gl.constexpr = (WS[ROWS] // 2 + BIS * TILESS - 1) // (BIS * TILESS)
    PARTS: gl.constexpr = (W[ROWS] // 2 + BI * TILES - 1) // (BI * TILES)
    SUM: gl.constexpr = gl.SliceLayout(0, sum_layout(WARPS, SPLITS))
    shared = SHARED * ((tokens + BT - 1) // BT)
    program = gl.program_id(0)
    if program < shared:
        first = program // SHARED * BT
        t_T = first + gl.arange(0, BT, layout=rows_layout(WS, BKS, RUNS, WARPS, SPLITS, AHEADS))
        s_T = first + gl.arange(0, BT, layout=SUM)
        held = fragment_ahead(shared_value, shared_fine, program % SHARED * (BIS * TILESS), WS[ROWS] // 2,
                              WS[ROWS] // 2, WS, BIS, BKS, RUNS, WARPS, SPLITS, AHEADS)  # fmt: skip
        after_previous(PDL)
        let_next_come(PDL)
        _gated_tile(x, shared_act, shared_value, shared_fine, shared_coarse, held, program * 0, program % SHARED,
                    gl.minimum(t_T, tokens - 1), t_T < tokens, s_T, s_T < tokens, WS, BIS, BT, BKS, RUNS, WARPS,
                    SPLITS, TILESS, AHEADS, TURNS)  # fmt: skip
    else:
        after_previous(PDL)
        let_next_come(PDL)
        place, tile = (program - shared) // PARTS, (program - shared) % PARTS
        expert, begin, stop = _first_of(ids, tiles, place, most, tokens, MATCHED, TOP_K, KP, BT, WARPS)
        if expert >= 0:
            value, fine = fragment_bank(value, fine, expert, W)
            if AHEAD > 1:
                asked = fragment_ahead(value, fine, tile * (BI * TILES), W[ROWS] // 2, W[ROWS] // 2, W, BI, BK, RUN,
                                       WARPS, SPLITS, AHEAD)  # fmt: skip
            mine, x_T, _, ok_T, act_T, _, act_ok_T = _rows(
                begin, stop, expert, order, place, tokens, MATCHED, TOP_K, KP, BT,
                rows_layout(W, BK, RUN, WARPS, SPLITS, AHEAD), SUM, WARPS,
            )  # fmt: skip
            if mine:
                if AHEAD == 1:
                    asked = fragment_ahead(value, fine, tile * (BI * TILES), W[ROWS] // 2, W[ROWS] // 2, W, BI, BK,
                                           RUN, WARPS, SPLITS, AHEAD)  # fmt: skip
                _gated_tile(x, act, value, fine, coarse, asked, expert, tile, x_T, ok_T, act_T, act_ok_T, W, BI, BT, BK,
                            RUN, WARPS, SPLITS, TILES, AHEAD, TURN)  # fmt: skip


@gluon.jit
def _down_tile(
    act, y, value, fine, coarse, held, expert, tile, act_row_T, ok_T, y_row_T, y_ok_T, W: gl.constexpr,
    BO: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, RUN: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    TILES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """y = down(act), BO columns of one expert."""
    first, stop = tile * (BO * TILES), (tile + 1) * (BO * TILES)
    for o0 in range(first, stop, BO):
        o_M = o0 + gl.arange(0, BO, layout=gl.SliceLayout(1, sum_layout(WARPS, SPLITS)))
        if AHEAD > 1:
            scale_M = fragment_coarse(coarse, expert, o_M, o_M < W[ROWS], W)
            near = fragment_near(act, act_row_T * W[COLUMNS], ok_T, W, BT, BK, WARPS, SPLITS)
            sums, _ = fragment_pairs(
                near, value, fine, held, o0, W[ROWS], 0, W, BO, BT, BK, RUN, WARPS, SPLITS, True
            )  # fmt: skip
        else:
            sums, _, held = fragment_products(
                act, act_row_T * W[COLUMNS], ok_T, value, fine, held, o0, o0 + BO < stop, W[ROWS], 0, W, BO, BT,
                BK, RUN, WARPS, SPLITS, True, TILES,
            )  # fmt: skip
            scale_M = fragment_coarse(coarse, expert, o_M, o_M < W[ROWS], W)
        sums = sums * gl.expand_dims(scale_M, 1)
        at = gl.expand_dims(y_row_T.to(gl.int64) * W[ROWS], 0) + gl.expand_dims(o_M, 1)
        gl.store(y + at, sums, mask=gl.expand_dims(y_ok_T, 0) & gl.expand_dims(o_M < W[ROWS], 1))


@gluon.jit(do_not_specialize=["tokens", "most"])
def fragment_down_kernel(
    act, shared_act, y, ids, order, tiles, value, fine, coarse, shared_value, shared_fine, shared_coarse, tokens, most,
    MATCHED: gl.constexpr, TOP_K: gl.constexpr, KP: gl.constexpr, BT: gl.constexpr, W: gl.constexpr, BO: gl.constexpr,
    BK: gl.constexpr, RUN: gl.constexpr, WS: gl.constexpr, BOS: gl.constexpr, BKS: gl.constexpr, RUNS: gl.constexpr,
    WARPS: gl.constexpr, SPLITS: gl.constexpr, TILES: gl.constexpr, TILESS: gl.constexpr, AHEAD: gl.constexpr,
    AHEADS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As above: y[pair] of routed experts, y[pairs + token] of the shared one. The choice is known when it starts."""
    let_next_come(PDL)
    SHARED: gl.constexpr = (WS[ROWS] + BOS * TILESS - 1) // (BOS * TILESS)
    PARTS: gl.constexpr = (W[ROWS] + BO * TILES - 1) // (BO * TILES)
    SUM: gl.constexpr = gl.SliceLayout(0, sum_layout(WARPS, SPLITS))
    shared = SHARED * ((tokens + BT - 1) // BT)
    program = gl.program_id(0)
    if program < shared:
        first = program // SHARED * BT
        t_T = first + gl.arange(0, BT, layout=rows_layout(WS, BKS, RUNS, WARPS, SPLITS, AHEADS))
        s_T = first + gl.arange(0, BT, layout=SUM)
        held = fragment_ahead(shared_value, shared_fine, program % SHARED * (BOS * TILESS), WS[ROWS], 0, WS, BOS, BKS,
                              RUNS, WARPS, SPLITS, AHEADS)  # fmt: skip
        after_previous(PDL)
        _down_tile(shared_act, y, shared_value, shared_fine, shared_coarse, held, program * 0, program % SHARED,
                   gl.minimum(t_T, tokens - 1), t_T < tokens, tokens * TOP_K + s_T, s_T < tokens, WS, BOS, BT, BKS,
                   RUNS, WARPS, SPLITS, TILESS, AHEADS)  # fmt: skip
    else:
        place, tile = (program - shared) // PARTS, (program - shared) % PARTS
        expert, begin, stop = _first_of(ids, tiles, place, most, tokens, MATCHED, TOP_K, KP, BT, WARPS)
        if expert >= 0:
            value, fine = fragment_bank(value, fine, expert, W)
            if AHEAD > 1:
                asked = fragment_ahead(value, fine, tile * (BO * TILES), W[ROWS], 0, W, BO, BK, RUN, WARPS, SPLITS,
                                       AHEAD)  # fmt: skip
            mine, _, act_T, ok_T, _, y_T, y_ok_T = _rows(
                begin, stop, expert, order, place, tokens, MATCHED, TOP_K, KP, BT,
                rows_layout(W, BK, RUN, WARPS, SPLITS, AHEAD), SUM, WARPS,
            )  # fmt: skip
            if AHEAD == 1:
                asked = fragment_ahead(value, fine, tile * (BO * TILES), W[ROWS], 0, W, BO, BK, RUN, WARPS, SPLITS,
                                       AHEAD)  # fmt: skip
            after_previous(PDL)
            if mine:
                _down_tile(act, y, value, fine, coarse, asked, expert, tile, act_T, ok_T, y_T, y_ok_T, W, BO, BT, BK,
                           RUN, WARPS, SPLITS, TILES, AHEAD)  # fmt: skip
        else:
            after_previous(PDL)


def config_of(of: Operand, up: bool, tokens: int, gpu: str = "") -> Fragments:
    """Rows, steps and tiles as measured on an H200."""
    found = tuning.choice(gpu, "fragments", [of.layout], tokens)
    if found:
        return Fragments(*found)
    step, run = steps_of(of)
    few = MATCHED_TOKENS < tokens <= FEW_TOKENS
    if of.kind == FP8.value:
        down = Fragments(64, step, run, 4, 1, 1, 2) if few else Fragments(128, step, run, 4)
        return Fragments(16, step, run, 2, 2) if up else down
    if up:
        return Fragments(32, step, run, 2)
    columns = of.layout[COLUMNS.value]
    if columns % step:
        return Fragments(64, *steps_of(of, 2), 4)
    if tokens <= MATCHED_TOKENS:
        return Fragments(64, step, run, 4, 1, 2)
    if few:
        return Fragments(32, step, run, 2, 1, 1, 2)
    return Fragments(64, step * (1 if columns % (2 * step) else 2), run, 4, 1, 4)


def tokens_tile(tokens: int, top_k: int, experts: int) -> int:
    """BT: twice what an expert has on average, in eights."""
    return min(32, max(8, power_of_two(-(-2 * tokens * top_k // experts))))


def _tiles(of: Operand, count: int, BT: int, config: Fragments, step: int) -> tuple[int, int]:
    """Tiles of a program and steps ahead; one each, where `count` rows of `of` do not part into whole ones."""
    whole = count % (config.BM * config.tiles) == 0 and of.layout[COLUMNS.value] % (step * config.splits) == 0
    ahead = config.ahead if config.tiles == 1 else 1
    return config.tiles if whole else 1, steps_ahead(of, count, BT, config, step) if ahead > 1 else 1


def _constants(
    of: Operand, shared: Operand, top_k: int, BT: int, config: Fragments, rows: str, matched: bool
) -> dict[str, Any]:
    """What a kernel is compiled for. rows: "BI" or "BO"."""
    (step, run), halves = steps_of(shared), 2 if rows == "BI" else 1
    tiles, ahead = _tiles(of, of.layout[ROWS.value] // halves, BT, config, config.BK)
    shared_tiles, shared_ahead = _tiles(shared, shared.layout[ROWS.value] // halves, BT, config, step)
    return {
        "MATCHED": matched, "TOP_K": top_k, "KP": power_of_two(top_k), "BT": BT, "W": of.layout, rows: config.BM,
        "BK": config.BK, "RUN": config.RUN, "WS": shared.layout, f"{rows}S": config.BM,
        "BKS": step, "RUNS": run, "WARPS": config.warps, "SPLITS": config.splits,
        "TILES": tiles, "TILESS": shared_tiles, "AHEAD": ahead, "AHEADS": shared_ahead,
    }  # fmt: skip


def _turns(down: Operand, shared_down: Operand) -> dict[str, int]:
    """Values of the words that will be multiplied with what gates and ups give."""
    return {"TURN": VALUES[down.kind], "TURNS": VALUES[shared_down.kind]}


def moe(
    x_TH: torch.Tensor,
    up: Operand,
    down: Operand,
    shared_up: Operand,
    shared_down: Operand,
    ids_Tk: torch.Tensor,
    experts: int,
    gpu: str,
    pdl: bool,
    configs: tuple[int, Fragments, Fragments] | None = None,
) -> Outputs:
    """Three launches: the sort, gates and ups of all experts, and their outputs, fp32.

    x and ids are contiguous, x in bf16; configs: BT, of gates and ups, and of down, for tuning.
    """
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


def _configs(of: Operand, rows: str, names: list[tuple[str, int]]) -> Iterator[tuple[Fragments, int]]:
    """What GPUs of these names do with so many tokens, each once."""
    found = {(config_of(of, rows == "BI", tokens, name), tokens <= MATCHED_TOKENS): tokens for name, tokens in names}
    yield from ((config, tokens) for (config, _), tokens in found.items())


def compile_cases() -> Iterator[CompileCase]:
    """The banks of real models, whole and cut inside a block, with a shared expert in their format.

    Nothing here goes by whether a device has e4m3 in hardware.
    """
    types = dict.fromkeys(("ids", "order", "tiles"), "*i32")
    for few, step in ((True, 128), (False, RANKED_STEP)):
        constexprs = {"TOP_K": 8, "BT": 8, "BM": RANKED_ROWS, "BN": step, "FEW": few, "PDL": False}
        yield CompileCase(rank_tiles_kernel, signature(rank_tiles_kernel, constexprs, types), constexprs, 1, 1)
    types |= dict.fromkeys(("x", "act", "shared_act"), "*bf16") | {"y": "*fp32"}
    for up, down in banks(False):
        known = up.of.kind and up.of.layout[2] != 128
        for kernel, bank, rows in (
            ((fragment_gate_up_kernel, up, "BI"), (fragment_down_kernel, down, "BO")) if known else ()
        ):
            own = types | bank.types | {"value": "*i32"}
            own |= {f"shared_{name}": own[name] for name in ("value", "fine", "coarse")}
            names = [("", 4), ("", 16), ("", 512), *((name, few) for name, _ in tuning.measured() for few in (4, 16))]
            for config, tokens in _configs(bank.of, rows, names):
                BT = tokens_tile(tokens, 8, 256)
                constexprs = _constants(bank.of, bank.of, 8, BT, config, rows, tokens <= BT) | {"PDL": False}
                constexprs |= _turns(down.of, down.of) if rows == "BI" else {}
                yield CompileCase(kernel, signature(kernel, constexprs, own), constexprs, config.warps, 1)
