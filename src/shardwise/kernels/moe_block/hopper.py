"""Experts for some tokens on Hopper, plain and in FP8: see linear/warpgroups.py.

Pairs of token and expert are sorted by expert, or a tile has a column for every token, as in fragments.py; the shared
expert, of all tokens, goes through the same launches.
Legend: T tokens of a tile, M rows of weights, H hidden, I intermediate, k experts a token.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.gluon import all_wait
from shardwise.kernels.hopper import SHARED_KIB
from shardwise.kernels.linear.fragments import fragment_coarse
from shardwise.kernels.linear.geometry import Case, case
from shardwise.kernels.linear.halves import empty_halved
from shardwise.kernels.linear.tiles import COLUMNS, FINE_COLUMNS, FINE_ROWS, FP8, KIND, PLAIN, ROWS, Operand
from shardwise.kernels.linear.triton import power_of_two
from shardwise.kernels.linear.warpgroups import (
    FLAT,
    HALVED,
    WARPS,
    WHOLE,
    ask_first,
    fits,
    held_steps,
    input_rows,
    load_inputs,
    load_scales,
    places,
    products,
    shared_bytes,
    step_of,
    store_inputs,
    words,
)
from shardwise.kernels.moe_block.banks import Banks
from shardwise.kernels.moe_block.combine import Outputs
from shardwise.kernels.moe_block.fragments import token_pairs
from shardwise.kernels.moe_block.rank import rank_tiles
from shardwise.kernels.overlap import after_previous, launch, let_next_come

MATCHED_TOKENS = 16  # up to so many, a tile may have a column for every token, and pairs need no sort
# Columns of `down`: of narrower experts nothing was measured, of half as many FP8 alone.
FEWEST_COLUMNS, HALF_COLUMNS = 512, 256


class Hopper(NamedTuple):
    """A configuration: tokens of a tile; of gates and ups, and of down, rows of a tile and steps that are held at a
    time. No rows: gates and ups go by another kernel."""

    BT: int
    up_BM: int
    up_slots: int
    down_BM: int
    down_slots: int


class Chosen(NamedTuple):
    """Which pairs tiles have: all there are, in order and as tiles (see rank.py), how many tiles there may be; or, if
    matched, a tile for every pair, which all tokens of its expert join."""

    ids_Tk: torch.Tensor
    order_M: torch.Tensor
    tiles_3P: torch.Tensor
    most: int
    matched: bool


@gluon.jit
def _memory(W: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, SLOTS: gl.constexpr):
    """Of a program: weights, inputs, what their products are to be multiplied by, where each token's input lies, and
    where its output goes."""
    a_s, x_s = places(SLOTS, BM, W), places(W[COLUMNS] // step_of(W), input_rows(W, BT), W)
    back_s = gl.allocate_shared_memory(gl.float32, [BT], FLAT)
    rows_s = gl.allocate_shared_memory(gl.int32, [BT], FLAT)
    return a_s, x_s, back_s, rows_s, gl.allocate_shared_memory(gl.int32, [BT], FLAT)


@gluon.jit
def _tile_pairs(order, tiles, place, most, BT: gl.constexpr):
    """Of a tile of sorted pairs: its expert (-1: there is none), the places from the first on, how many there are, and
    the pairs (-1: none)."""
    # By way of .cg: `down` reads them before it waits, see down_kernel in stream.py.
    expert = gl.load(tiles + place, cache_modifier=".cg")
    first = gl.load(tiles + most + place, cache_modifier=".cg")
    stop = gl.load(tiles + 2 * most + place, cache_modifier=".cg")
    first, stop = gl.where(expert < 0, 0, first), gl.where(expert < 0, 0, stop)
    t_T = gl.arange(0, BT, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    pair_T = gl.load(order + first + t_T, mask=t_T < stop - first, other=-1, cache_modifier=".cg")
    return expert, first + t_T, stop - first, pair_T


@gluon.jit
def _shared_rows(to_s, first, tokens, beyond, BT: gl.constexpr):
    """How many of the tokens from `first` on the shared expert has in a tile; where outputs go, to shared memory."""
    t_T = first + gl.arange(0, BT, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    to_s.store(gl.where(t_T < tokens, t_T + beyond, -1))
    all_wait()
    return gl.minimum(BT, tokens - first)


@gluon.jit
def _gated(
    a_s, x_s, back_s, to_s, parts, count, act, value, scales, coarse, expert, at_M1, i0, W: gl.constexpr,
    BM: gl.constexpr, BT: gl.constexpr, SLOTS: gl.constexpr, READY: gl.constexpr,
):  # fmt: skip
    """act = silu(gate) * up, BM / 2 columns of one expert."""
    I: gl.constexpr = W[ROWS] // 2  # noqa: E741
    store_inputs(x_s, back_s, parts, count, W, BT, READY)
    y_MT = products(a_s, x_s, back_s, value, scales, at_M1, W, BM, BT, SLOTS)
    both = gl.permute(gl.reshape(y_MT, (BM // 16, 2, 8, BT)), (0, 2, 3, 1))
    gate, up = gl.split(gl.reshape(both, (BM // 2, BT, 2)))
    LAYOUT: gl.constexpr = gate.type.layout
    i_M, to_T = i0 + gl.arange(0, BM // 2, layout=gl.SliceLayout(1, LAYOUT)), to_s.load(gl.SliceLayout(0, LAYOUT))
    gate *= gl.expand_dims(fragment_coarse(coarse, expert, i_M, i_M < I, W), 1)
    up *= gl.expand_dims(fragment_coarse(coarse, expert, i_M + I, i_M < I, W), 1)
    mixed = gate / (1.0 + gl.exp(-gate)) * up
    at = gl.expand_dims(to_T * I, 0) + gl.expand_dims(i_M, 1)
    gl.store(act + at, mixed.to(act.dtype.element_ty), mask=gl.expand_dims(to_T >= 0, 0) & gl.expand_dims(i_M < I, 1))


@gluon.jit
def _bank(value, fine, expert, W: gl.constexpr):
    """Where an expert's codes and scales begin."""
    value += expert.to(gl.int64) * (W[ROWS] * W[COLUMNS])
    return value, fine + expert.to(gl.int64) * (W[FINE_ROWS] * W[FINE_COLUMNS])


@gluon.jit(do_not_specialize=["tokens", "most"])
def hopper_gate_up_kernel(
    x, back, act, shared_act, order, tiles, value, fine, coarse, shared_value, shared_fine, shared_coarse, tokens, most,
    TOP_K: gl.constexpr, BT: gl.constexpr, W: gl.constexpr, WS: gl.constexpr, BM: gl.constexpr, SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """act[place] = silu(gate) * up: programs of the shared expert, then those of every tile. In FP8 x are rows of e4m3
    and `back` their factors. The next kernel may come when the choice is known."""
    READY: gl.constexpr = W[KIND] == FP8
    SHARED: gl.constexpr = WS[ROWS] // BM
    PARTS: gl.constexpr = W[ROWS] // BM
    shared = SHARED * ((tokens + BT - 1) // BT)
    program = gl.program_id(0)
    a_s, x_s, back_s, rows_s, to_s = _memory(W, BM, BT, SLOTS)
    if program < shared:
        i0, first = program % SHARED * (BM // 2), program // SHARED * BT
        scales = load_scales(shared_fine, i0, WS[ROWS] // 2, WS, BM, BT)
        at_M1 = ask_first(a_s, shared_value, i0, WS[ROWS] // 2, WS, BM, SLOTS)
        count = _shared_rows(to_s, first, tokens, 0, BT)
        after_previous(PDL)
        let_next_come(PDL)
        parts = load_inputs(x_s, None, first, x, back, count, WS, BT, READY)
        if READY:
            async_copy.wait_group(0)  # what was asked for after the weights
        _gated(a_s, x_s, back_s, to_s, parts, count, shared_act, shared_value, scales, shared_coarse, program * 0,
               at_M1, i0, WS, BM, BT, SLOTS, READY)  # fmt: skip
    else:
        after_previous(PDL)
        let_next_come(PDL)
        expert, at_T, count, pair_T = _tile_pairs(order, tiles, (program - shared) // PARTS, most, BT)
        rows_s.store(pair_T // TOP_K)
        to_s.store(gl.where(pair_T < 0, -1, at_T))
        all_wait()
        if expert >= 0:
            parts = load_inputs(x_s, rows_s, 0, x, back, count, W, BT, READY)
            i0 = (program - shared) % PARTS * (BM // 2)
            value, fine = _bank(value, fine, expert, W)
            scales = load_scales(fine, i0, W[ROWS] // 2, W, BM, BT)
            all_wait()  # or the loads above are moved down, and wait behind weights
            at_M1 = ask_first(a_s, value, i0, W[ROWS] // 2, W, BM, SLOTS)
            _gated(a_s, x_s, back_s, to_s, parts, count, act, value, scales, coarse, expert, at_M1, i0, W, BM, BT,
                   SLOTS, READY)  # fmt: skip


@gluon.jit
def _down(
    a_s, x_s, back_s, to_s, parts, count, y, value, scales, coarse, expert, at_M1, o0, W: gl.constexpr,
    BM: gl.constexpr, BT: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """y = down(act), BM columns of one expert."""
    store_inputs(x_s, back_s, parts, count, W, BT, False)
    y_MT = products(a_s, x_s, back_s, value, scales, at_M1, W, BM, BT, SLOTS)
    LAYOUT: gl.constexpr = y_MT.type.layout
    o_M, to_T = o0 + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT)), to_s.load(gl.SliceLayout(0, LAYOUT))
    y_MT *= gl.expand_dims(fragment_coarse(coarse, expert, o_M, o_M < W[ROWS], W), 1)
    at = gl.expand_dims(to_T.to(gl.int64) * W[ROWS], 0) + gl.expand_dims(o_M, 1)
    gl.store(y + at, y_MT, mask=gl.expand_dims(to_T >= 0, 0) & gl.expand_dims(o_M < W[ROWS], 1))


@gluon.jit(do_not_specialize=["tokens", "most"])
def hopper_down_kernel(
    act, shared_act, y, ids, order, tiles, value, fine, coarse, shared_value, shared_fine, shared_coarse, tokens, most,
    MATCHED: gl.constexpr, TOP_K: gl.constexpr, KP: gl.constexpr, BT: gl.constexpr, W: gl.constexpr, WS: gl.constexpr,
    BM: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As above: y[pair] of routed experts, y[pairs + token] of the shared one. With MATCHED a tile has a column for
    every token, and act lies by pairs. The choice is known when it starts."""
    let_next_come(PDL)
    SHARED: gl.constexpr = WS[ROWS] // BM
    PARTS: gl.constexpr = W[ROWS] // BM
    shared = SHARED * ((tokens + BT - 1) // BT)
    program = gl.program_id(0)
    a_s, x_s, back_s, rows_s, to_s = _memory(W, BM, BT, SLOTS)
    if program < shared:
        o0 = program % SHARED * BM
        scales = load_scales(shared_fine, o0, 0, WS, BM, BT)
        at_M1 = ask_first(a_s, shared_value, o0, 0, WS, BM, SLOTS)
        first = program // SHARED * BT
        count = _shared_rows(to_s, first, tokens, tokens * TOP_K, BT)
        after_previous(PDL)
        parts = load_inputs(x_s, None, first, shared_act, shared_act, count, WS, BT, False)
        _down(a_s, x_s, back_s, to_s, parts, count, y, shared_value, scales, shared_coarse, program * 0, at_M1, o0,
              WS, BM, BT, SLOTS)  # fmt: skip
    else:
        place = (program - shared) // PARTS
        if MATCHED:
            expert, count = gl.load(ids + place, cache_modifier=".cg"), tokens
            pair_T, mine = token_pairs(ids, place, expert, tokens, TOP_K, KP, BT, WARPS)
            expert = gl.where(mine, expert, -1)
            rows_s.store(pair_T)
        else:
            expert, at_T, count, pair_T = _tile_pairs(order, tiles, place, most, BT)
            rows_s.store(at_T)
        to_s.store(pair_T)
        all_wait()
        if expert >= 0:
            o0 = (program - shared) % PARTS * BM
            value, fine = _bank(value, fine, expert, W)
            scales = load_scales(fine, o0, 0, W, BM, BT)
            at_M1 = ask_first(a_s, value, o0, 0, W, BM, SLOTS)
            after_previous(PDL)
            parts = load_inputs(x_s, rows_s, 0, act, act, count, W, BT, False)
            _down(a_s, x_s, back_s, to_s, parts, count, y, value, scales, coarse, expert, at_M1, o0, W, BM, BT, SLOTS)
        else:
            after_previous(PDL)


def hopper_config(banks_of: Banks, x_dtype: torch.dtype, tokens: int, gpu: str) -> Hopper | None:
    """How `tokens` go through banks by these kernels, as measured or by rule, if they are to."""
    found = tuning.choice(gpu, "hopper", [banks_of.up.layout], tokens)
    config = Hopper(*found) if found else hopper_rule(banks_of.down, tokens)
    if config is None or not (config.up_BM or tokens <= min(config.BT, MATCHED_TOKENS)):
        return None  # what another kernel leaves is not sorted
    return config if possible(banks_of, x_dtype, config) else None


def hopper_rule(down: Operand, tokens: int) -> Hopper | None:
    """As measured on an H200 for 256 experts, FP8 where pairs are sorted anyway."""
    columns = down.layout[COLUMNS.value]
    if down.kind == FP8.value and 9 <= tokens <= 16 and columns >= HALF_COLUMNS:
        return Hopper(4, 128, 6, 64, 4) if columns >= FEWEST_COLUMNS else Hopper(4, 128, 6, 128, 2)
    if columns < FEWEST_COLUMNS:
        return None
    if down.kind == FP8.value and 17 <= tokens <= 160:
        return Hopper(8, 128, 4, 128, 4)
    if down.kind == PLAIN.value and 2 <= tokens <= 16:
        return Hopper(8, 0, 0, 128, 4) if tokens <= 8 else Hopper(8, 64, 8, 128, 4)
    return None


def possible(banks_of: Banks, x_dtype: torch.dtype, config: Hopper) -> bool:
    """Whether these kernels can do it, on this device."""
    up, down, shared_up, shared_down = banks_of
    alike = up.kind == shared_up.kind == down.kind == shared_down.kind and up.layout[3] == shared_up.layout[3]
    if config.BT % (HALVED if up.kind == FP8.value else WHOLE).value:
        return False
    pairs = ((up, shared_up, config.up_BM, config.up_slots), (down, shared_down, config.down_BM, config.down_slots))
    for bank, shared, BM, slots in pairs:
        if BM and not all(fits(of, x_dtype, BM) for of in (bank, shared)):
            return False
        if BM and shared_bytes(bank.layout, BM, config.BT, slots) > SHARED_KIB * 1024:
            return False
    return alike and down.layout[3] == shared_down.layout[3]


def moe(
    x_TH: torch.Tensor,
    banks_of: Banks,
    ids_Tk: torch.Tensor,
    experts: int,
    config: Hopper,
    pdl: bool,
) -> Outputs:
    """As fragments.moe: three launches, for pairs are always sorted."""
    up, down, shared_up, shared_down = banks_of
    (tokens, top_k), device, halved = ids_Tk.shape, x_TH.device, None
    if up.kind == FP8.value:
        halved = empty_halved(x_TH, tokens)
    order_M, tiles_3P = rank_tiles(ids_Tk, experts, config.BT, pdl, halved)
    most = tiles_3P.shape[1]
    act_MI = torch.empty((tokens * top_k, down.layout[3]), dtype=x_TH.dtype, device=device)
    shared_act_TI = torch.empty((tokens, shared_down.layout[3]), dtype=x_TH.dtype, device=device)
    programs = triton.cdiv(tokens, config.BT) * (shared_up.layout[2] // config.up_BM)
    programs += most * (up.layout[2] // config.up_BM)
    hopper_gate_up_kernel[(programs,)](
        *(halved[1:] if halved else (x_TH, x_TH)), act_MI, shared_act_TI, order_M, tiles_3P, *words(up),
        *words(shared_up), tokens, most, **_up_constants(up, shared_up, top_k, config), num_warps=WARPS.value,
        **launch(pdl),
    )  # fmt: skip
    chosen = Chosen(ids_Tk, order_M, tiles_3P, most, False)
    return outputs(act_MI, shared_act_TI, banks_of, chosen, config, pdl)


def outputs(
    act_MI: torch.Tensor,
    shared_act_TI: torch.Tensor,
    banks_of: Banks,
    chosen: Chosen,
    config: Hopper,
    pdl: bool,
) -> Outputs:
    """What experts' gates and ups become, fp32. act: of pairs, or where pairs are sorted, of places."""
    down, shared_down = banks_of.down, banks_of.shared_down
    (tokens, top_k), hidden = chosen.ids_Tk.shape, down.layout[2]
    y_MH = torch.empty((tokens * (top_k + 1), hidden), dtype=torch.float32, device=act_MI.device)
    programs = (triton.cdiv(tokens, config.BT) + chosen.most) * (hidden // config.down_BM)
    hopper_down_kernel[(programs,)](
        act_MI, shared_act_TI, y_MH, *chosen[:3], *words(down), *words(shared_down), tokens, chosen.most,
        **_down_constants(down, shared_down, chosen.matched, top_k, config), num_warps=WARPS.value, **launch(pdl),
    )  # fmt: skip
    return Outputs(y_MH[: tokens * top_k], y_MH[tokens * top_k :])


def _up_constants(up: Operand, shared: Operand, top_k: int, config: Hopper) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "TOP_K": top_k, "BT": config.BT, "W": up.layout, "WS": shared.layout, "BM": config.up_BM,
        "SLOTS": held_steps(up.layout, config.up_slots),
    }  # fmt: skip


def _down_constants(down: Operand, shared: Operand, matched: bool, top_k: int, config: Hopper) -> dict[str, Any]:
    return {
        "MATCHED": matched, "TOP_K": top_k, "KP": power_of_two(top_k), "BT": config.BT, "W": down.layout,
        "WS": shared.layout, "BM": config.down_BM, "SLOTS": held_steps(down.layout, config.down_slots),
    }  # fmt: skip


def compile_cases() -> Iterator[CompileCase]:
    """The banks of 35B-A3B, whole and halved, by the rule."""
    for kind, width, tokens in product(("bf16", "fp8_block", "fp8_tensor"), (512, 256), (4, 16, 128)):
        up, down = case(2 * width, 2048, kind, False, halves=2), case(2048, width, kind, False)
        config = hopper_rule(down.of, tokens)
        if config and config.up_BM:
            yield _case(hopper_gate_up_kernel, up, _up_constants(up.of, up.of, 8, config))
        if config:
            yield down_case(down, not config.up_BM, config)


def down_case(down: Case, matched: bool, config: Hopper) -> CompileCase:
    """What experts go down by, eight a token."""
    return _case(hopper_down_kernel, down, _down_constants(down.of, down.of, matched, 8, config))


def _case(kernel: Any, bank: Case, constexprs: dict[str, Any]) -> CompileCase:
    types = dict.fromkeys(("ids", "order", "tiles"), "*i32") | dict.fromkeys(("act", "shared_act"), "*bf16")
    types |= {"x": "*fp8e4nv", "back": "*fp32"} if bank.of.kind else {"x": "*bf16", "back": "*bf16"}
    types |= bank.types | {"y": "*fp32"} | ({"value": "*fp8e4nv"} if bank.of.kind else {})
    types |= {f"shared_{name}": types[name] for name in ("value", "fine", "coarse")}
    constexprs = constexprs | {"PDL": True}
    return CompileCase(kernel, signature(kernel, constexprs, types), constexprs, WARPS.value, 1, SHARED_KIB * 1024)
