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
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.gluon import all_wait
from shardwise.kernels.hopper import SHARED_KIB
from shardwise.kernels.linear.fragments import fragment_coarse
from shardwise.kernels.linear.geometry import case
from shardwise.kernels.linear.ring import (
    at_index,
    ring_first,
    ring_places,
    ring_products,
    ring_rows,
    ring_scales,
    store_scales,
)
from shardwise.kernels.linear.tiles import COARSE_ROWS, COLUMNS, FINE, FINE_ROWS, FP8, PLAIN, ROWS, Layout, Operand
from shardwise.kernels.linear.triton import power_of_two
from shardwise.kernels.linear.warpgroups import (
    FLAT,
    WARPS,
    fits,
    input_rows,
    load_inputs,
    shared_bytes,
    step_of,
    store_inputs,
    token_sums,
    words,
)
from shardwise.kernels.moe_block import hopper
from shardwise.kernels.moe_block.banks import Banks
from shardwise.kernels.moe_block.combine import Outputs
from shardwise.kernels.moe_block.queue import (
    MOST_PAIRS,
    chosen_experts,
    first_expert,
    load_choice,
    take,
    taken,
    tile_of,
)
from shardwise.kernels.overlap import after_previous, launch, let_next_come

MOST_TOKENS = 8
MOST_COLUMNS = 2048  # by rule: of wider inputs, which all threads together hold for a while, nothing was measured
FEWEST_ROWS = {PLAIN.value: 1024, FP8.value: 512}  # of gates and ups: of narrower experts nothing was measured


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
        id_T = ids_s.slice(k * BT, BT).load(gl.SliceLayout(0, LAYOUT))
        row_T = gl.where((id_T == expert) & (expert >= 0), t_T * TOP_K + k, row_T)
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
    """act[pair], and behind the pairs of the shared expert's tokens. Programs ask for the shared expert's tiles before
    they wait. The next kernel may come when the choice is known."""
    PARTS: gl.constexpr = W[ROWS] // BM
    STEPS: gl.constexpr = W[COLUMNS] // step_of(W)
    N: gl.constexpr = input_rows(W, BT)
    P: gl.constexpr = BT * K2
    a_s, x_s = ring_places(SLOTS, BM, W), ring_places(STEPS, N, W)
    back_s = gl.allocate_shared_memory(gl.float32, [BT], FLAT)
    ids_s = gl.allocate_shared_memory(gl.int32, [max(P, 32 * WARPS)], FLAT)
    scale_s = back_s
    if W[FINE]:
        scale_s = gl.allocate_shared_memory(gl.float32, [BM, STEPS], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    tile = gl.program_id(0)
    part = tile % PARTS
    if tile < PARTS:
        own, at_M1 = ring_rows(value, shared_value, tile * 0 - 1, part, W, BM)
        ring_first(a_s, own, at_M1, W, SLOTS)
    after_previous(PDL)
    let_next_come(PDL)
    found_P = load_choice(ids, tokens, TOP_K, BT, P)
    parts = load_inputs(x_s, None, 0, x, x, tokens, W, BT, False)
    ids_s.store(found_P)
    expert = first_expert(ids_s, tile, PARTS, BT, P)
    scale_MC = ring_scales(fine, shared_fine, expert, part, W, BM)
    got_T = take(counter, tile >= 0)
    all_wait()  # or the loads above are moved down, and wait behind weights
    own, at_M1 = ring_rows(value, shared_value, expert, part, W, BM)
    if tile >= PARTS:
        ring_first(a_s, own, at_M1, W, SLOTS)
    list_P, count = chosen_experts(ids_s, BT, P)
    total, running = PARTS * (1 + count), gl.num_programs(0)
    wanted, _ = tile_of(list_P, tile, PARTS, P)
    if (wanted != expert) & (tile < total):  # where logits are not finite, a token may have chosen an expert twice
        async_copy.wait_group(0)
        all_wait()
        expert = wanted
        own, at_M1 = ring_rows(value, shared_value, expert, part, W, BM)
        ring_first(a_s, own, at_M1, W, SLOTS)
        scale_MC = ring_scales(fine, shared_fine, expert, part, W, BM)
    if tile >= total:
        taken(counter, got_T, running, total)
        async_copy.wait_group(0)  # nothing is to arrive when the program is gone
    store_inputs(at_index(x_s, 0), back_s, parts, tokens, W, BT, False)
    while tile < total:
        following = taken(counter, got_T, running, total)
        more = following < total
        got_T = take(counter, more)
        next_expert, next_part = tile_of(list_P, following, PARTS, P)
        next_own, next_at_M1 = ring_rows(value, shared_value, next_expert, next_part, W, BM)
        store_scales(scale_s, scale_MC, W)
        scale_MC = ring_scales(fine, shared_fine, next_expert, next_part, W, BM)
        acc = ring_products(a_s, x_s, scale_s, own, at_M1, next_own, next_at_M1, more, tile >> 30, W, BM, N, SLOTS)
        y_MT = token_sums(acc, back_s, W, BM, BT)
        _store(y_MT, act, ids_s, coarse, shared_coarse, expert, part, tokens, TOP_K, BT, W, BM)
        tile, expert, part, own, at_M1 = following, next_expert, next_part, next_own, next_at_M1


class Persistent(NamedTuple):
    """A configuration: tokens of a tile; of gates and ups rows of a tile, steps that are held at a time, and programs a
    processor; of `down`, by hopper.py, rows and steps."""

    BT: int
    BM: int
    slots: int
    programs: int
    down_BM: int
    down_slots: int


def persistent_config(
    banks_of: Banks, x_dtype: torch.dtype, chosen: tuple[int, int] | torch.Size, gpu: str
) -> Persistent | None:
    """How tokens go through banks by these kernels, as measured or by rule, if they are to. chosen: how many tokens,
    and of how many experts each."""
    tokens, top_k = chosen
    if tokens > MOST_TOKENS:
        return None
    found = tuning.choice(gpu, "persistent", [banks_of.up.layout], tokens)
    config = Persistent(*found) if found else persistent_rule(banks_of.up, tokens)
    if config is None or tokens > config.BT or config.BT * _choices(top_k, config.BT) > MOST_PAIRS:
        return None
    return config if possible(banks_of, x_dtype, config) else None


def persistent_rule(up: Operand, tokens: int) -> Persistent | None:
    """As measured on an H200 for 256 experts, FP8 in blocks: other scales are loaded when a tile is done, behind the
    next one's weights. Fewer tokens of plain experts gain nothing."""
    rows, columns = up.layout[ROWS.value : COLUMNS.value + 1]
    if rows < FEWEST_ROWS.get(up.kind, 0) or columns > MOST_COLUMNS:
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
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def moe(
    x_TH: torch.Tensor,
    banks_of: Banks,
    ids_Tk: torch.Tensor,
    arrivals: torch.Tensor,
    config: Persistent,
    pdl: bool,
) -> Outputs:
    """As fragments.moe, for up to BT tokens: two launches. arrivals, 0 before and after, counts tiles."""
    up, down, shared_up, _ = banks_of
    (tokens, top_k), device = ids_Tk.shape, x_TH.device
    act_RI = torch.empty((tokens * (top_k + 1), down.layout[3]), dtype=x_TH.dtype, device=device)
    # No more than the shared expert and those of the first token have tiles: each program knows its first.
    programs = min(_processors(device) * config.programs, (top_k + 1) * (up.layout[2] // config.BM))
    persistent_gate_up_kernel[(programs,)](
        x_TH, act_RI, ids_Tk, arrivals, *words(up), *words(shared_up), tokens,
        **_constants(up, top_k, config), num_warps=WARPS.value, **launch(pdl),
    )  # fmt: skip
    pairs = tokens * top_k
    chosen = hopper.Chosen(ids_Tk, ids_Tk, ids_Tk, pairs, True)
    return hopper.outputs(act_RI[:pairs], act_RI[pairs:], banks_of, chosen, _down(config), pdl)


def _constants(up: Operand, top_k: int, config: Persistent) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "TOP_K": top_k, "K2": _choices(top_k, config.BT), "BT": config.BT, "W": up.layout, "BM": config.BM,
        "SLOTS": config.slots,
    }  # fmt: skip


def _choices(top_k: int, BT: int) -> int:
    """Of a token, as the kernel counts them: with the tokens, a warp's lanes at least."""
    return max(power_of_two(top_k), 32 // BT)


def compile_cases() -> Iterator[CompileCase]:
    """The banks of 35B-A3B, whole and halved, by the rule."""
    for kind, width, tokens in product(("bf16", "fp8_block"), (512, 256), (4, 8)):
        bank = case(2 * width, 2048, kind, False, halves=2)
        config = persistent_rule(bank.of, tokens)
        if config is None:
            continue
        types = dict.fromkeys(("ids", "counter"), "*i32") | dict.fromkeys(("x", "act"), "*bf16") | bank.types
        types |= {"value": "*fp8e4nv"} if bank.of.kind else {}
        types |= {f"shared_{name}": types[name] for name in ("value", "fine", "coarse")}
        constexprs = _constants(bank.of, 8, config) | {"PDL": True}
        signed = signature(persistent_gate_up_kernel, constexprs, types)
        yield CompileCase(persistent_gate_up_kernel, signed, constexprs, WARPS.value, 1, SHARED_KIB * 1024)
        yield hopper.down_case(case(2048, width, kind, False), True, _down(config))
