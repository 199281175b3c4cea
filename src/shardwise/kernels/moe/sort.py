"""Pairs of token and expert in the order of their experts: a stable counting sort without the host.

Legend: M pairs, E experts, B blocks of pairs, N other pairs, P tiles of pairs.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature

RANKED_PAIRS = 2048  # up to so many, comparing all pairs with all is one launch
BLOCK_PAIRS = 256


@triton.jit(do_not_specialize=["pairs"])
def rank_kernel(ids, order, starts, pairs, first_expert, experts, BM: tl.constexpr, BN: tl.constexpr):
    """A stable counting sort: order[position] = pair, and starts[e] = pairs of experts below e.

    Items 0 .. pairs are the pairs themselves, the experts + 1 items after them the starts.
    """
    item_M = tl.program_id(0) * BM + tl.arange(0, BM)
    is_pair_M = item_M < pairs
    key_M = _keys(ids, item_M, is_pair_M, first_expert, experts)
    key_M = tl.where(is_pair_M, key_M, item_M - pairs)
    before_M = tl.zeros((BM,), tl.int32)
    for first in range(0, pairs, BN):
        other_N = first + tl.arange(0, BN)
        key_N = _keys(ids, other_N, other_N < pairs, first_expert, experts)
        less = (key_N[None, :] < key_M[:, None]) | (
            (key_N[None, :] == key_M[:, None]) & (other_N[None, :] < item_M[:, None]) & is_pair_M[:, None]
        )
        before_M += tl.sum((less & (other_N < pairs)[None, :]).to(tl.int32), 1)
    tl.store(order + before_M, item_M, mask=is_pair_M)
    tl.store(starts + item_M - pairs, before_M, mask=(item_M >= pairs) & (item_M <= pairs + experts))


@triton.jit
def _keys(ids, item_M, ok_M, first_expert, experts):
    """The local expert of each pair; `experts` for other ranks', and where it is masked."""
    key_M = tl.load(ids + item_M, mask=ok_M, other=-1).to(tl.int32) - first_expert
    return tl.where((key_M >= 0) & (key_M < experts) & ok_M, key_M, experts)


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(ids, counts, pairs, first_expert, experts, BM: tl.constexpr, BE: tl.constexpr):
    """counts[block, e]: pairs of expert e in a block; those of other ranks are counted at `experts`."""
    item_M = tl.program_id(0) * BM + tl.arange(0, BM)
    key_M = _keys(ids, item_M, item_M < pairs, first_expert, experts)
    tl.store(counts + tl.program_id(0) * BE + tl.arange(0, BE), tl.histogram(key_M, BE))


@triton.jit(do_not_specialize=["blocks"])
def prefix_kernel(counts, totals, blocks, BB: tl.constexpr, BE: tl.constexpr, SLICE: tl.constexpr):
    """counts[block, e] becomes that of all blocks before it, for SLICE experts; totals[e] that of all blocks."""
    e_E = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    total_E = tl.zeros((SLICE,), tl.int32)
    for first in range(0, blocks, BB):
        block_B = first + tl.arange(0, BB)
        at, ok = counts + block_B[:, None] * BE + e_E[None, :], (block_B < blocks)[:, None]
        count_BE = tl.load(at, mask=ok, other=0)
        tl.store(at, tl.cumsum(count_BE, 0) - count_BE + total_E[None, :], mask=ok)
        total_E += tl.sum(count_BE, 0)
    tl.store(totals + e_E, total_E)


@triton.jit(do_not_specialize=["pairs"])
def place_kernel(
    ids, counts, totals, order, starts, pairs, first_expert, experts, BM: tl.constexpr, BN: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """order[position] = pair for a block of pairs; the first program also writes starts[e]."""
    item_M = tl.program_id(0) * BM + tl.arange(0, BM)
    ok_M, e_E = item_M < pairs, tl.arange(0, BE)
    total_E = tl.load(totals + e_E)
    start_E = tl.cumsum(total_E, 0) - total_E
    if tl.program_id(0) == 0:
        tl.store(starts + e_E, start_E, mask=e_E <= experts)
    key_M = _keys(ids, item_M, ok_M, first_expert, experts)
    at_M = tl.load(counts + tl.program_id(0) * BE + key_M) + tl.gather(start_E, key_M, 0)
    for first in range(0, BM, BN):
        other_N = tl.program_id(0) * BM + first + tl.arange(0, BN)
        key_N = _keys(ids, other_N, other_N < pairs, first_expert, experts)
        alike = (key_N[None, :] == key_M[:, None]) & (other_N[None, :] < item_M[:, None])
        at_M += tl.sum(alike.to(tl.int32), 1)
    tl.store(order + at_M, item_M, mask=ok_M)


@triton.jit
def tiles_kernel(starts, tiles, experts, BE: tl.constexpr, PAIRS: tl.constexpr):
    """Tiles of an expert's pairs, a row each: the expert, their first position, how many. Row 0: how many tiles there
    are, and how many of both products were taken from counters."""
    expert, e_E = tl.program_id(0), tl.arange(0, BE)
    ok_E = e_E < experts
    pairs_E = tl.load(starts + e_E + 1, mask=ok_E, other=0) - tl.load(starts + e_E, mask=ok_E, other=0)
    tiles_E = (pairs_E + PAIRS - 1) // PAIRS
    start, stop = tl.load(starts + expert), tl.load(starts + expert + 1)
    row = tiles + 4 * (1 + tl.sum(tl.where(e_E < expert, tiles_E, 0), 0))
    for first in range(start, stop, PAIRS):
        tl.store(row, expert)
        tl.store(row + 1, first)
        tl.store(row + 2, tl.minimum(stop - first, PAIRS))
        row += 4
    if expert == 0:
        tl.store(tiles, tl.sum(tiles_E, 0))
        tl.store(tiles + 1, 0)
        tl.store(tiles + 2, 0)


def sort_pairs(ids_Tk: torch.Tensor, first_expert: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs by expert, in their order otherwise -> order_M int32, starts_E1 int32; other ranks' pairs come last."""
    pairs, ints = ids_Tk.numel(), {"dtype": torch.int32, "device": ids_Tk.device}
    order_M, starts_E1 = torch.empty(pairs, **ints), torch.empty(experts + 1, **ints)
    choice = (pairs, first_expert, experts)
    if pairs <= RANKED_PAIRS:
        rank_kernel[(triton.cdiv(pairs + experts + 1, 32),)](ids_Tk, order_M, starts_E1, *choice, 32, 256, num_warps=4)
        return order_M, starts_E1
    BE, blocks = max(triton.next_power_of_2(experts + 1), 16), triton.cdiv(pairs, BLOCK_PAIRS)
    counts_BE, totals_E = torch.empty((blocks, BE), **ints), torch.empty(BE, **ints)
    count_kernel[(blocks,)](ids_Tk, counts_BE, *choice, BLOCK_PAIRS, BE, num_warps=4)
    prefix_kernel[(BE // 16,)](counts_BE, totals_E, blocks, 128, BE, 16, num_warps=4)
    place_kernel[(blocks,)](ids_Tk, counts_BE, totals_E, order_M, starts_E1, *choice, BLOCK_PAIRS, 32, BE, num_warps=4)
    return order_M, starts_E1


def tiles_of(starts_E1: torch.Tensor, pairs: int, tile_pairs: int) -> torch.Tensor:
    """Tiles of sorted pairs, as tiles_kernel has them, for one launch for each product."""
    experts = len(starts_E1) - 1
    tiles_P4 = torch.empty(
        (1 + min(pairs, experts + pairs // tile_pairs), 4), dtype=torch.int32, device=starts_E1.device
    )
    tiles_kernel[(experts,)](starts_E1, tiles_P4, experts, triton.next_power_of_2(experts), tile_pairs, num_warps=4)
    return tiles_P4


def compile_cases() -> Iterator[CompileCase]:
    """For 256 experts."""
    types = dict.fromkeys(("ids", "order", "starts", "counts", "totals", "tiles"), "*i32")
    for kernel, constexprs in (
        (rank_kernel, {"BM": 32, "BN": 256}),
        (count_kernel, {"BM": BLOCK_PAIRS, "BE": 512}),
        (prefix_kernel, {"BB": 128, "BE": 512, "SLICE": 16}),
        (place_kernel, {"BM": BLOCK_PAIRS, "BN": 32, "BE": 512}),
        (tiles_kernel, {"BE": 256, "PAIRS": 192}),
    ):
        yield CompileCase(kernel, signature(kernel, constexprs, types), constexprs, 4, 1)
