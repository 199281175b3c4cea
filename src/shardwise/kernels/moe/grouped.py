"""Routed experts for many tokens: pairs of token and expert are sorted by expert, which reads its weights once.

The grid is that of the worst case, so that the host need not know how many tokens an expert has.
Legend: T tokens, E experts, k experts a token, H hidden, I intermediate, M = T * k pairs.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear import dequantise
from shardwise.kernels.linear.geometry import banks, per_card
from shardwise.kernels.linear.tiles import COLUMNS, ROWS, Operand, Target, coarse_scale, tile_product
from shardwise.kernels.linear.triton import power_of_two, step_of
from shardwise.kernels.moe import sort, warpgroups

# From so many pairs an expert on, making its weights plain is less than what tiles lose by doing so; on cards whose
# shared memory holds tiles of 256 rows, which have memory for a bank of a layer, too.
PLAIN_PAIRS, ROOMY_KIB = 256, 128


@triton.jit
def _tile(starts, tile, experts, BE: tl.constexpr, BT: tl.constexpr):
    """The expert of a tile, the sorted positions [start, stop) of its tokens; stop is 0 for a tile too many."""
    e_E = tl.arange(0, BE)
    ok_E = e_E < experts
    start_E = tl.load(starts + e_E, mask=ok_E, other=0)
    stop_E = tl.load(starts + e_E + 1, mask=ok_E, other=0)
    tiles_E = (stop_E - start_E + BT - 1) // BT
    end_E = tl.cumsum(tiles_E, 0)
    expert = tl.sum(((end_E <= tile) & ok_E).to(tl.int32), 0)
    mine_E = e_E == expert
    first = tl.sum(tl.where(mine_E & ok_E, start_E + (tile - end_E + tiles_E) * BT, 0), 0)
    stop = tl.sum(tl.where(mine_E & ok_E, stop_E, 0), 0)
    return expert, first, stop


@triton.jit
def grouped_gate_up_kernel(
    x, x_stride, value, fine, coarse, act, order, starts, experts, TOP_K: tl.constexpr, W: tl.constexpr,
    BE: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """act[position] = silu(gate) * up for BI columns and BT tokens of one expert."""
    I: tl.constexpr = W[ROWS] // 2  # noqa: E741
    tiles_I: tl.constexpr = (I + BI - 1) // BI
    expert, first, stop = _tile(starts, tl.program_id(0) // tiles_I, experts, BE, BT)
    if first < stop:
        at_T = first + tl.arange(0, BT)
        ok_T = at_T < stop
        token_T = tl.load(order + at_T, mask=ok_T, other=0) // TOP_K
        r_O = tl.arange(0, 2 * BI)  # gate and up rows take turns, so that the two halves of a pair can be split
        i_O = tl.program_id(0) % tiles_I * BI + r_O // 2
        ok_O, o_O = i_O < I, i_O + r_O % 2 * I
        acc = tile_product(
            x, token_T.to(tl.int64) * x_stride, ok_T, value, fine, expert, o_O, ok_O, 0, W[COLUMNS], BK, W
        )
        acc *= coarse_scale(coarse, expert, o_O, ok_O, W)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BI, 2, BT)), (0, 2, 1)))
        i_I = tl.program_id(0) % tiles_I * BI + tl.arange(0, BI)
        mixed = gate * tl.sigmoid(gate) * up
        at = at_T.to(tl.int64)[None, :] * I + i_I[:, None]
        tl.store(act + at, mixed.to(act.dtype.element_ty), mask=(i_I < I)[:, None] & ok_T[None, :])


@triton.jit
def grouped_down_kernel(
    act, value, fine, coarse, y, order, starts, experts, W: tl.constexpr, BE: tl.constexpr, BO: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[pair] = down(act[position]) for BO columns and BT tokens of one expert, back in the order of the pairs."""
    tiles_O: tl.constexpr = (W[ROWS] + BO - 1) // BO
    expert, first, stop = _tile(starts, tl.program_id(0) // tiles_O, experts, BE, BT)
    if first < stop:
        at_T = first + tl.arange(0, BT)
        ok_T = at_T < stop
        pair_T = tl.load(order + at_T, mask=ok_T, other=0).to(tl.int64)
        o_O = tl.program_id(0) % tiles_O * BO + tl.arange(0, BO)
        ok_O = o_O < W[ROWS]
        acc = tile_product(
            act, at_T.to(tl.int64) * W[COLUMNS], ok_T, value, fine, expert, o_O, ok_O, 0, W[COLUMNS], BK, W
        )
        acc *= coarse_scale(coarse, expert, o_O, ok_O, W)[:, None]
        at = pair_T[None, :] * W[ROWS] + o_O[:, None]
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=ok_O[:, None] & ok_T[None, :])


@triton.jit
def combine_kernel(
    y, ids, weights, out, hidden, first_expert, experts, TOP_K: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t] = the weighted sum over those of t's experts that are on this rank."""
    row = tl.program_id(0).to(tl.int64)
    h_H = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    k_K = tl.arange(0, BK)
    expert_K = tl.load(ids + row * TOP_K + k_K, mask=k_K < TOP_K, other=-1).to(tl.int32) - first_expert
    ok_K = (k_K < TOP_K) & (expert_K >= 0) & (expert_K < experts)
    share_K = tl.load(weights + row * TOP_K + k_K, mask=ok_K, other=0)
    at = (row * TOP_K + k_K)[:, None] * hidden + h_H
    y_KH = tl.load(y + at, mask=ok_K[:, None] & (h_H < hidden), other=0).to(tl.float32)
    tl.store(out + row * hidden + h_H, tl.sum(y_KH * share_K[:, None], 0)[None, :], mask=h_H < hidden)


@dataclass(frozen=True)
class Grouped:
    """A configuration of one grouped product: BO rows of the weight, BT tokens, BK columns a step."""

    BO: int
    BT: int
    BK: int
    warps: int
    stages: int


def grouped_config(bank: Operand, BT: int, target: Target, x_bytes: int, tokens: int = 0) -> Grouped:
    """Tall tiles where experts have many tokens, more and smaller ones where they have few.

    tokens: of the whole step, for a choice that was measured; 0: the rule.
    """
    roomy = target.shared_kib > 128
    if x_bytes > 2:
        return Grouped(32, BT, step_of(bank, 32), 4, 2)
    found = tuning.choice(target.name, "grouped", [bank.layout], tokens) if tokens and BT == 16 else None
    if found:
        return Grouped(found[0], BT, step_of(bank, found[1]), found[2], found[3])
    if BT >= 64:
        return Grouped(128, BT, step_of(bank, 64), 8 if BT > 64 else 4, 3 if roomy else 2)
    return Grouped(64, BT, step_of(bank, 128 if roomy else 64), 4, 3 if roomy else 2)


def tokens_tile(tokens_an_expert: float, x_bytes: int) -> int:
    """BT: what an expert has on average, and some more."""
    sizes = ((8, 16), (24, 32), (64, 64))
    return 16 if x_bytes > 2 else next((BT for most, BT in sizes if tokens_an_expert <= most), 128)


def grouped_configs(
    up: Operand, down: Operand, tokens: int, tokens_an_expert: float, target: Target, x_bytes: int
) -> tuple[int, Grouped, Grouped]:
    """BT and both configurations; where many tokens were measured, those are BT, then BO, BK, warps, stages of each."""
    BT = tokens_tile(tokens_an_expert, x_bytes)
    found = tuning.choice(target.name, "many", [up.layout], tokens) if BT == 128 else None
    if found is None:
        up_config, config = (grouped_config(bank, BT, target, x_bytes, tokens) for bank in (up, down))
        return BT, up_config, config
    BT, *rest = found
    up_config, config = (
        Grouped(BO, BT, step_of(bank, BK), warps, stages)
        for bank, (BO, BK, warps, stages) in ((up, rest[:4]), (down, rest[4:]))
    )
    return BT, up_config, config


def moe(
    x_TH: torch.Tensor,
    up_bank: Operand,
    down_bank: Operand,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    first_expert: int,
    experts: int,
    target: Target,
) -> torch.Tensor:
    """The weighted sum of the experts' outputs -> [T, H] fp32."""
    (tokens, top_k), hidden = ids_Tk.shape, down_bank.layout[2]
    y_MH = outputs(x_TH, up_bank, down_bank, ids_Tk, first_expert, experts, target)
    out_TH = torch.empty((tokens, hidden), dtype=torch.float32, device=x_TH.device)
    block = min(power_of_two(hidden), 1024)
    combine_kernel[(tokens, triton.cdiv(hidden, block))](
        y_MH, ids_Tk, weights_Tk, out_TH, hidden, first_expert, experts, top_k, power_of_two(top_k), block, num_warps=4
    )
    return out_TH


def outputs(
    x_TH: torch.Tensor,
    up_bank: Operand,
    down_bank: Operand,
    ids_Tk: torch.Tensor,
    first_expert: int,
    experts: int,
    target: Target,
) -> torch.Tensor:
    """y [M, H] in x's type: the output of each pair of an expert on this rank."""
    order_M, starts_E1 = sort.sort_pairs(ids_Tk, first_expert, experts)
    return _outputs(x_TH, up_bank, down_bank, order_M, starts_E1, ids_Tk.shape, target)


def _outputs(
    x_TH: torch.Tensor,
    up_bank: Operand,
    down_bank: Operand,
    order_M: torch.Tensor,
    starts_E1: torch.Tensor,
    chosen: tuple[int, ...],
    target: Target,
) -> torch.Tensor:
    """y [M, H]: the output of each pair, in the order of the pairs; chosen: tokens, and experts a token."""
    (tokens, top_k), (hidden, width), experts = chosen, down_bank.layout[2:4], len(starts_E1) - 1
    device, pairs, BE = x_TH.device, len(order_M), power_of_two(experts)
    made = PLAIN_PAIRS * experts <= pairs and target.shared_kib > ROOMY_KIB and x_TH.element_size() == 2
    views = [dequantise.plain_view(bank) if made else bank for bank in (up_bank, down_bank)]
    if warpgroups.possible(x_TH, *views, pairs):
        tiles_P4 = sort.tiles_of(starts_E1, pairs, warpgroups.TILE_PAIRS)
        act_MI = warpgroups.gate_up(x_TH, dequantise.plain_bank(up_bank, x_TH.dtype), order_M, tiles_P4, top_k)
        return warpgroups.down(act_MI, dequantise.plain_bank(down_bank, x_TH.dtype), order_M, tiles_P4)
    BT, up_config, config = grouped_configs(*views, tokens, pairs / experts, target, x_TH.element_size())
    tiles = min(pairs, experts + pairs // BT)
    act_MI = torch.empty((pairs, width), dtype=x_TH.dtype, device=device)
    BI = up_config.BO // 2
    bank = dequantise.plain_bank(up_bank, x_TH.dtype) if made else up_bank
    grouped_gate_up_kernel[(tiles * triton.cdiv(width, BI),)](
        x_TH, x_TH.stride(0), *bank.tensors(), act_MI, order_M, starts_E1, experts, top_k, bank.layout, BE, BI, BT,
        up_config.BK, num_warps=up_config.warps, num_stages=up_config.stages,
    )  # fmt: skip
    del bank  # its memory serves for the other one
    bank = dequantise.plain_bank(down_bank, x_TH.dtype) if made else down_bank
    y_MH = torch.empty((pairs, hidden), dtype=x_TH.dtype, device=device)
    grouped_down_kernel[(tiles * triton.cdiv(hidden, config.BO),)](
        act_MI, *bank.tensors(), y_MH, order_M, starts_E1, experts, bank.layout, BE, config.BO, BT,
        config.BK, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return y_MH


def compile_cases(native_fp8: bool) -> Iterator[CompileCase]:
    """All kernels for the banks of real models, with what each size of shared memory allows."""
    types = dict.fromkeys(("ids", "order", "starts"), "*i32") | {"weights": "*fp32", "out": "*fp32"}
    types |= dict.fromkeys(("x", "act", "y"), "*bf16")
    constexprs = {"TOP_K": 8, "BK": 8, "BLOCK": 1024}
    yield CompileCase(combine_kernel, signature(combine_kernel, constexprs, types), constexprs, 4, 1)
    yield from sort.compile_cases()
    if native_fp8:
        yield from warpgroups.compile_cases()
    yield from _plain_cases(native_fp8, types)
    for up, down in banks(native_fp8):
        if down.of.layout[3] == 64:  # a width as any other for these kernels
            continue
        for config, shared_bytes in per_card(
            lambda card, up=up.of, down=down.of: _configs(up, card, up, down), native_fp8
        ):
            tile = {"W": up.of.layout, "BE": 256, "BT": config.BT, "BK": config.BK}
            constexprs = tile | {"TOP_K": 8, "BI": config.BO // 2}
            signed = signature(grouped_gate_up_kernel, constexprs, types | up.types)
            yield CompileCase(grouped_gate_up_kernel, signed, constexprs, config.warps, config.stages, shared_bytes)
        for config, shared_bytes in per_card(
            lambda card, up=up.of, down=down.of: _configs(down, card, up, down), native_fp8
        ):
            constexprs = {"W": down.of.layout, "BE": 256, "BT": config.BT, "BK": config.BK, "BO": config.BO}
            signed = signature(grouped_down_kernel, constexprs, types | down.types)
            yield CompileCase(grouped_down_kernel, signed, constexprs, config.warps, config.stages, shared_bytes)


def _plain_cases(native_fp8: bool, types: dict[str, str]) -> Iterator[CompileCase]:
    """Banks that were made plain, with their coarse scales, where that is done."""
    for up, down in banks(native_fp8):
        if down.of.layout[3] == 64 or up.of.kind == 0 or up.of.layout[9] < 0 or not native_fp8:
            continue
        views = dequantise.plain_view(up.of), dequantise.plain_view(down.of)
        for name, kib in (("", 227), *tuning.measured(native_fp8)):
            BT, *both = grouped_configs(*views, 1 << 30, PLAIN_PAIRS, Target(native_fp8, kib, name), 2)
            for kernel, view, bank, config in (
                (grouped_gate_up_kernel, views[0], up, both[0]),
                (grouped_down_kernel, views[1], down, both[1]),
            ):
                own = {"TOP_K": 8, "BI": config.BO // 2} if kernel is grouped_gate_up_kernel else {"BO": config.BO}
                constexprs = {"W": view.layout, "BE": 256, "BT": BT, "BK": config.BK, **own}
                signed = signature(kernel, constexprs, types | bank.types | {"value": "*bf16", "fine": "*bf16"})
                yield CompileCase(kernel, signed, constexprs, config.warps, config.stages, kib * 1024)


def _configs(bank: Operand, card: Target, up: Operand, down: Operand) -> list[Grouped]:
    """Of one of the banks up and down; with what was measured, if `card` has a name."""
    found = [grouped_config(bank, BT, card, 2) for BT in (16, 32, 64, 128)]
    if card.name:
        _, *many = grouped_configs(up, down, 2 * max(tuning.BUCKETS), 256, card, 2)
        found += [grouped_config(bank, 16, card, 2, tokens) for tokens in (64, 128)]
        found.append(many[0] if bank is up else many[1])
    return found
