"""Gates and ups of experts of a few tokens on Hopper, by programs that take one tile after another: see
linear/warpgroups.py.

Tiles have a column for every token, so that a program's input stays while weights pass. A program asks for the next
tile's first steps behind its tile's last ones, and takes the tile from a counter, so that all programs end at about the
same time: processors get unlike shares of the memory's rate.
Legend: T tokens, M rows of a tile, P pairs of token and expert, k experts a token.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.runtime.jit import constexpr_function

from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.gluon import all_wait, copy_to_shared
from shardwise.kernels.hopper import SHARED_KIB
from shardwise.kernels.linear.fragments import fragment_coarse
from shardwise.kernels.linear.geometry import case
from shardwise.kernels.linear.tiles import (
    COARSE_ROWS,
    COLUMNS,
    FINE,
    FINE_COLUMNS,
    FINE_O,
    FINE_ROWS,
    FP8,
    INVERSE,
    KIND,
    PLAIN,
    ROWS,
    Layout,
    Operand,
)
from shardwise.kernels.linear.triton import power_of_two
from shardwise.kernels.linear.warpgroups import (
    FLAT,
    WARPS,
    copy_layout,
    element,
    fits,
    input_rows,
    load_inputs,
    place_layout,
    shared_bytes,
    step_of,
    store_inputs,
    sums_layout,
    tile_rows,
    words,
)
from shardwise.kernels.moe_block import hopper
from shardwise.kernels.moe_block.banks import Banks
from shardwise.kernels.moe_block.combine import Outputs
from shardwise.kernels.overlap import after_previous, launch, let_next_come

MOST_TOKENS = 8
FEWEST_ROWS = {PLAIN.value: 1024, FP8.value: 512}  # of gates and ups: of narrower experts nothing was measured


@gluon.jit
def _places(COUNT: gl.constexpr, SIZE: gl.constexpr, W: gl.constexpr):
    """As warpgroups.places, each with an index that is 0."""
    found = ()
    for _ in gl.static_range(COUNT):
        found = found + (gl.allocate_shared_memory(element(W), [1, SIZE, step_of(W)], place_layout(W)),)  # noqa: RUF005
    return found


@gluon.jit
def _at(places_s, same):
    """Each of them, by its index."""
    found = ()
    for n in gl.static_range(len(places_s)):
        found = found + (places_s[n].index(same),)  # noqa: RUF005
    return found


@constexpr_function
def _whole(P):
    """Of pairs, all in every warp."""
    return gl.BlockedLayout([P // 32], [32], [WARPS.value], [0])


@constexpr_function
def _square(P):
    """Of pairs by pairs, a row's columns in one warp."""
    return gl.BlockedLayout([1, P // 4], [8, 4], [WARPS.value, 1], [1, 0])


@gluon.jit
def _load_choice(ids, tokens, TOP_K: gl.constexpr, BT: gl.constexpr, P: gl.constexpr):
    """Experts by choice and token (-2: none). Loaded once a program: all programs want the same line at once."""
    THREADS: gl.constexpr = 32 * WARPS
    n_P = gl.arange(0, max(P, THREADS), layout=gl.BlockedLayout([max(P // THREADS, 1)], [32], [WARPS], [0]))
    ok_P = (n_P // BT < TOP_K) & (n_P % BT < tokens)
    return gl.load(ids + (n_P % BT * TOP_K + n_P // BT), mask=ok_P, other=-2, cache_modifier=".cg")


@gluon.jit
def _chosen(ids_s, BT: gl.constexpr, P: gl.constexpr):
    """The experts that any token chose, each once, in the order of tokens and a layout that every warp has whole
    (-1: none); and how many."""
    ROW: gl.constexpr = gl.SliceLayout(1, _square(P))
    COLUMN: gl.constexpr = gl.SliceLayout(0, _square(P))
    i_P, j_P = gl.arange(0, P, layout=ROW), gl.arange(0, P, layout=COLUMN)
    row_P, column_1P = ids_s.slice(0, P).load(ROW), gl.expand_dims(ids_s.slice(0, P).load(COLUMN), 0)
    # Choices of a token are K = P / BT.
    before_PP = gl.expand_dims(j_P % BT * (P // BT) + j_P // BT, 0) < gl.expand_dims(
        i_P % BT * (P // BT) + i_P // BT, 1
    )
    seen_P = gl.max((before_PP & (gl.expand_dims(row_P, 1) == column_1P)).to(gl.int32), 1)
    new_P = gl.where((row_P >= 0) & (seen_P == 0), 1, 0)
    new_1P = gl.expand_dims(gl.convert_layout(new_P, COLUMN), 0)
    rank_P = gl.sum(gl.where(before_PP, new_1P, 0), 1)
    rank_1P = gl.expand_dims(gl.convert_layout(rank_P, COLUMN), 0)
    list_P = gl.max(gl.where((new_1P > 0) & (rank_1P == gl.expand_dims(i_P, 1)), column_1P, -1), 1)
    list_P = gl.convert_layout(list_P, _whole(P))
    return list_P, gl.sum((list_P >= 0).to(gl.int32), 0)


@gluon.jit
def _unit(list_P, unit, PARTS: gl.constexpr, P: gl.constexpr):
    """The expert of a tile (-1: the shared one), and which of its tiles it is."""
    l_P = gl.arange(0, P, layout=list_P.type.layout)
    expert = gl.max(gl.where(l_P == unit // PARTS - 1, list_P, -1), 0)
    return expert, unit % PARTS


@gluon.jit
def _beginning(base, shared_base, expert, SIZE: gl.constexpr):
    """Where the shared expert's, or an expert's, values of SIZE begin."""
    apart = (shared_base.to(gl.int64) - base.to(gl.int64)) // (base.dtype.element_ty.primitive_bitwidth // 8)
    return base + gl.where(expert < 0, apart, expert.to(gl.int64) * SIZE)


@gluon.jit
def _load_scales(fine, shared_fine, expert, part, W: gl.constexpr, BM: gl.constexpr):
    """Fine scales of a tile's rows [M, c], a column for each step."""
    STEPS: gl.constexpr = W[COLUMNS] // step_of(W)
    LAID: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
    fine = _beginning(fine, shared_fine, expert, W[FINE_ROWS] * W[FINE_COLUMNS])
    r_M = gl.arange(0, BM, layout=gl.SliceLayout(1, LAID))
    c_C = gl.arange(0, STEPS, layout=gl.SliceLayout(0, LAID))
    row_M, _ = tile_rows(r_M, part * (BM // 2), W[ROWS] // 2, 1)
    row_M = row_M // W[FINE_O] * W[FINE_COLUMNS]
    return gl.load(fine + (gl.expand_dims(row_M, 1) + gl.expand_dims(c_C * step_of(W) // W[FINE], 0)))


@gluon.jit
def _store_scales(scale_s, scale_MC, W: gl.constexpr):
    """As factors in fp32, to shared memory."""
    scale_MC = scale_MC.to(gl.float32)
    if W[INVERSE] % 2 == 1:
        scale_MC = gl.where(scale_MC == 0, 0.0, 1.0 / gl.where(scale_MC == 0, 1.0, scale_MC))
    scale_s.store(scale_MC)


@gluon.jit
def _ask(place, value, at_M1, c, W: gl.constexpr):
    """A step of a tile on its way."""
    k_K = c * step_of(W) + gl.arange(0, step_of(W), layout=gl.SliceLayout(0, copy_layout(W)))
    copy_to_shared(place, gl.multiple_of(value + (at_M1 + gl.expand_dims(k_K, 0)), (1, 16)))


@gluon.jit
def _rows(value, shared_value, expert, part, W: gl.constexpr, BM: gl.constexpr):
    """Where a tile's weights begin: of its expert, and each row."""
    r_M = gl.arange(0, BM, layout=gl.SliceLayout(1, copy_layout(W)))
    row_M, _ = tile_rows(r_M, part * (BM // 2), W[ROWS] // 2, 1)
    at_M1 = gl.expand_dims(row_M * W[COLUMNS], 1)
    return _beginning(value, shared_value, expert, W[ROWS] * W[COLUMNS]), at_M1


@gluon.jit
def _ask_first(a_s, value, at_M1, W: gl.constexpr, SLOTS: gl.constexpr):
    """All steps of a tile that may be on their way but one, as a group each."""
    for c in gl.static_range(SLOTS - 1):
        _ask(a_s[c].index(0), value, at_M1, c, W)
        async_copy.commit_group()


@gluon.jit
def _take(counter, more):
    """Thread 0's number from the counter, on its way; nothing unless there may be more."""
    t_T = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    return gl.atomic_add(counter + t_T * 0, t_T * 0 + 1, mask=(t_T == 0) & more, sem="relaxed")


@gluon.jit
def _taken(counter, got_T, running, total):
    """The tile behind a number of `_take`. Whoever takes the last number there is sets the counter back."""
    t_T = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.store(counter + t_T * 0, t_T * 0, mask=(t_T == 0) & (got_T == gl.maximum(total, running) - 1))
    return gl.max(gl.where(t_T == 0, got_T, 0), 0) + running


@gluon.jit
def _store(y_MT, act, ids_s, coarse, shared_coarse, expert, part, tokens, TOP_K: gl.constexpr, BT: gl.constexpr,
           W: gl.constexpr, BM: gl.constexpr):  # fmt: skip
    """act[pair] = silu(gate) * up, BM / 2 columns of an expert; behind the pairs the tokens of the shared one."""
    I: gl.constexpr = W[ROWS] // 2  # noqa: E741
    both = gl.permute(gl.reshape(y_MT, (BM // 16, 2, 8, BT)), (0, 2, 3, 1))
    gate, up = gl.split(gl.reshape(both, (BM // 2, BT, 2)))
    LAYOUT: gl.constexpr = gate.type.layout
    t_T = gl.arange(0, BT, layout=gl.SliceLayout(0, LAYOUT))
    row_T = gl.where((t_T < tokens) & (expert < 0), tokens * TOP_K + t_T, -1)
    for k in gl.static_range(TOP_K):
        row_T = gl.where(ids_s.slice(k * BT, BT).load(gl.SliceLayout(0, LAYOUT)) == expert, t_T * TOP_K + k, row_T)
    i_M = part * (BM // 2) + gl.arange(0, BM // 2, layout=gl.SliceLayout(1, LAYOUT))
    ok_M = i_M < I
    if expert < 0:
        gate_M = fragment_coarse(shared_coarse, part * 0, i_M, ok_M, W)
        up_M = fragment_coarse(shared_coarse, part * 0, i_M + I, ok_M, W)
    else:
        gate_M = fragment_coarse(coarse, expert, i_M, ok_M, W)
        up_M = fragment_coarse(coarse, expert, i_M + I, ok_M, W)
    gate, up = gate * gl.expand_dims(gate_M, 1), up * gl.expand_dims(up_M, 1)
    mixed = gate / (1.0 + gl.exp(-gate)) * up
    at = gl.expand_dims(row_T * I, 0) + gl.expand_dims(i_M, 1)
    gl.store(act + at, mixed.to(act.dtype.element_ty), mask=gl.expand_dims(row_T >= 0, 0) & gl.expand_dims(ok_M, 1))


@gluon.jit(do_not_specialize=["tokens"])
def persistent_gate_up_kernel(
    x, act, ids, counter, value, fine, coarse, shared_value, shared_fine, shared_coarse, tokens,
    TOP_K: gl.constexpr, K2: gl.constexpr, BT: gl.constexpr, W: gl.constexpr, BM: gl.constexpr, SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """act[pair], and behind the pairs of the shared expert's tokens. Tiles of the shared expert come first: programs
    ask for these before they wait. The next kernel may come when the choice is known."""
    PARTS: gl.constexpr = W[ROWS] // BM
    STEPS: gl.constexpr = W[COLUMNS] // step_of(W)
    N: gl.constexpr = input_rows(W, BT)
    P: gl.constexpr = BT * K2
    a_s, x_s = _places(SLOTS, BM, W), _places(STEPS, N, W)
    back_s = gl.allocate_shared_memory(gl.float32, [BT], FLAT)
    ids_s = gl.allocate_shared_memory(gl.int32, [max(P, 32 * WARPS)], FLAT)
    if W[FINE]:
        scale_s = gl.allocate_shared_memory(gl.float32, [BM, STEPS], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    unit = gl.program_id(0)
    first, part = unit * 0 - 1, unit % PARTS
    if unit < PARTS:
        own, at_M1 = _rows(value, shared_value, first, part, W, BM)
        _ask_first(a_s, own, at_M1, W, SLOTS)
    after_previous(PDL)
    let_next_come(PDL)
    found_P = _load_choice(ids, tokens, TOP_K, BT, P)
    parts = load_inputs(x_s, None, 0, x, x, tokens, W, BT, False)
    ids_s.store(found_P)
    # The first token's experts are all different, so that a program's first tile is known before the list is.
    n_P = gl.arange(0, P, layout=_whole(P))
    mine_P = n_P == (unit // PARTS - 1) * BT
    expert = gl.max(gl.where(mine_P, ids_s.slice(0, P).load(_whole(P)), -1), 0)
    if W[FINE]:
        scale_MC = _load_scales(fine, shared_fine, expert, part, W, BM)
    got_T = _take(counter, unit >= 0)
    all_wait()  # or the loads above are moved down, and wait behind weights
    own, at_M1 = _rows(value, shared_value, expert, part, W, BM)
    if unit >= PARTS:
        _ask_first(a_s, own, at_M1, W, SLOTS)
    list_P, count = _chosen(ids_s, BT, P)
    total, running = PARTS * (1 + count), gl.num_programs(0)
    wanted, _ = _unit(list_P, unit, PARTS, P)
    if (wanted != expert) & (unit < total):  # where logits are not finite, a token may have chosen an expert twice
        async_copy.wait_group(0)
        all_wait()
        expert = wanted
        own, at_M1 = _rows(value, shared_value, expert, part, W, BM)
        _ask_first(a_s, own, at_M1, W, SLOTS)
        if W[FINE]:
            scale_MC = _load_scales(fine, shared_fine, expert, part, W, BM)
    if unit >= total:
        _taken(counter, got_T, running, total)
        async_copy.wait_group(0)  # nothing is to arrive when the program is gone
    store_inputs(_at(x_s, 0), back_s, parts, tokens, W, BT, False)
    while unit < total:
        following = _taken(counter, got_T, running, total)
        more = following < total
        got_T = _take(counter, more)
        next_expert, next_part = _unit(list_P, following, PARTS, P)
        next_own, next_at_M1 = _rows(value, shared_value, next_expert, next_part, W, BM)
        if W[FINE]:
            _store_scales(scale_s, scale_MC, W)
            scale_MC = _load_scales(fine, shared_fine, next_expert, next_part, W, BM)
        acc = gl.zeros((BM, N), gl.float32, layout=sums_layout(W, N))
        zeros, same = acc, unit >> 30  # 0: or where steps lie is worked out before the loop, and kept in registers
        for c in gl.static_range(STEPS):
            async_copy.wait_group(SLOTS - 2)
            fence_async_shared()
            right = x_s[c].index(same).permute((1, 0))
            if W[KIND] == FP8:
                products = warpgroup_mma(a_s[c % SLOTS].index(same), right, zeros, use_acc=False, is_async=True)
            else:
                products = warpgroup_mma(a_s[c % SLOTS].index(same), right, acc, is_async=True)
            if c - 1 + SLOTS < STEPS:
                _ask(a_s[(c - 1) % SLOTS].index(same), own, at_M1, c - 1 + SLOTS, W)
            elif more:
                _ask(a_s[(c - 1) % SLOTS].index(same), next_own, next_at_M1, c - 1 + SLOTS - STEPS, W)
            async_copy.commit_group()
            products = warpgroup_mma_wait(0, deps=[products])
            if W[KIND] != FP8:
                acc = products
            elif W[FINE]:
                acc += products * scale_s.slice(c, 1, 1).load(sums_layout(W, N))
            else:
                acc += products
        if W[KIND] == FP8:
            high, low = gl.split(gl.reshape(acc, (BM, BT, 2)))
            y_MT = high + low * 0.0625
            y_MT *= gl.expand_dims(back_s.load(gl.SliceLayout(0, y_MT.type.layout)), 0)
        else:
            y_MT = acc
        _store(y_MT, act, ids_s, coarse, shared_coarse, expert, part, tokens, TOP_K, BT, W, BM)
        unit, expert, part, own, at_M1 = following, next_expert, next_part, next_own, next_at_M1


class Persistent(NamedTuple):
    """A configuration: tokens of a tile; of gates and ups rows of a tile, steps that are held at a time, and programs a
    processor; of `down`, by hopper.py, rows and steps."""

    BT: int
    BM: int
    slots: int
    programs: int
    down_BM: int
    down_slots: int


def persistent_config(banks_of: Banks, x_dtype: torch.dtype, tokens: int, gpu: str) -> Persistent | None:
    """How `tokens` go through banks by these kernels, as measured or by rule, if they are to."""
    found = tuning.choice(gpu, "persistent", [banks_of.up.layout], tokens)
    config = Persistent(*found) if found else persistent_rule(banks_of.up, tokens)
    return config if config and tokens <= config.BT and possible(banks_of, x_dtype, config) else None


def persistent_rule(up: Operand, tokens: int) -> Persistent | None:
    """As measured on an H200 for 256 experts, FP8 in blocks: other scales are loaded when a tile is done, behind the
    next one's weights. Fewer tokens of plain experts gain nothing."""
    if up.layout[ROWS.value] < FEWEST_ROWS.get(up.kind, 0):
        return None
    if up.kind == FP8.value and up.layout[FINE.value] and 2 <= tokens <= 8:
        return Persistent(4, 64, 16, 1, 128, 2) if tokens <= 4 else Persistent(8, 64, 8, 1, 128, 2)
    if up.kind == PLAIN.value and 5 <= tokens <= 8:
        return Persistent(8, 64, 16, 1, 128, 4)
    return None


def possible(banks_of: Banks, x_dtype: torch.dtype, config: Persistent) -> bool:
    """Whether these kernels can do it, on this device."""
    up, _, shared, _ = banks_of
    own = {FINE_ROWS.value, COARSE_ROWS.value}  # what parts experts
    alike = all(a == b for n, (a, b) in enumerate(zip(up.layout, shared.layout, strict=True)) if n not in own)
    steps = up.layout[COLUMNS.value] // step_of(up.layout)
    return (
        alike
        and up.fine.dtype == shared.fine.dtype
        and steps % config.slots == 0
        and config.slots > 2
        and config.BT <= MOST_TOKENS
        and all(fits(of, x_dtype, config.BM) for of in (up, shared))
        and shared_bytes_of(up.layout, config) <= SHARED_KIB * 1024
        and hopper.possible(banks_of, x_dtype, _down(config))
    )


def _down(config: Persistent) -> hopper.Hopper:
    return hopper.Hopper(config.BT, 0, 0, config.down_BM, config.down_slots)


def shared_bytes_of(W: Layout, config: Persistent) -> int:
    """Shared memory of a program: as of hopper.py, with scales of all steps and a choice for each token."""
    steps = W[COLUMNS.value] // step_of(W)
    return shared_bytes(W, config.BM, config.BT, config.slots) + 4 * steps * config.BM + 1024


@cache
def _counter(device: torch.device) -> torch.Tensor:
    """Of tiles that were taken; 0 between launches, which come one after the other."""
    return torch.zeros(1, dtype=torch.int32, device=device)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def moe(x_TH: torch.Tensor, banks_of: Banks, ids_Tk: torch.Tensor, config: Persistent, pdl: bool) -> Outputs:
    """As fragments.moe, for up to BT tokens: two launches."""
    up, down, shared_up, _ = banks_of
    (tokens, top_k), device = ids_Tk.shape, x_TH.device
    act_RI = torch.empty((tokens * (top_k + 1), down.layout[3]), dtype=x_TH.dtype, device=device)
    # No more than the shared expert and those of the first token have tiles: each program knows its first.
    programs = min(_processors(device) * config.programs, (top_k + 1) * (up.layout[2] // config.BM))
    persistent_gate_up_kernel[(programs,)](
        x_TH, act_RI, ids_Tk, _counter(device), *words(up), *words(shared_up), tokens,
        **_constants(up, top_k, config), num_warps=WARPS.value, **launch(pdl),
    )  # fmt: skip
    pairs = tokens * top_k
    chosen = hopper.Chosen(ids_Tk, ids_Tk, ids_Tk, pairs, True)
    return hopper.outputs(act_RI[:pairs], act_RI[pairs:], banks_of, chosen, _down(config), pdl)


def _constants(up: Operand, top_k: int, config: Persistent) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "TOP_K": top_k, "K2": max(power_of_two(top_k), 32 // config.BT), "BT": config.BT, "W": up.layout,
        "BM": config.BM, "SLOTS": config.slots,
    }  # fmt: skip


def compile_cases() -> Iterator[CompileCase]:
    """The banks of 35B-A3B, by the rule."""
    for kind, tokens in product(("bf16", "fp8_block", "fp8_tensor"), (4, 8)):
        bank = case(1024, 2048, kind, False, halves=2)
        config = persistent_rule(bank.of, tokens)
        if config is None:
            continue
        types = dict.fromkeys(("ids", "counter"), "*i32") | dict.fromkeys(("x", "act"), "*bf16") | bank.types
        types |= {"value": "*fp8e4nv"} if bank.of.kind else {}
        types |= {f"shared_{name}": types[name] for name in ("value", "fine", "coarse")}
        constexprs = _constants(bank.of, 8, config) | {"PDL": True}
        signed = signature(persistent_gate_up_kernel, constexprs, types)
        yield CompileCase(persistent_gate_up_kernel, signed, constexprs, WARPS.value, 1, SHARED_KIB * 1024)
