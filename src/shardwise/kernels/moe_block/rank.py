"""Pairs of token and expert, sorted by expert, as tiles of pairs that read an expert's weights once.

Legend: T tokens, E experts, k experts a token, M = T * k pairs, P tiles at most, H hidden.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear.halves import Halved, halve
from shardwise.kernels.linear.triton import power_of_two
from shardwise.kernels.overlap import after_previous, launch, let_next_come

RANKED_ROWS, RANKED_STEP = 2, 1024  # pairs of a program, and what they are compared with at a time
NO_EXPERT = tl.constexpr(2**30)


@triton.jit(do_not_specialize=["tokens"])
def rank_tiles_kernel(
    ids, order, tiles, tokens, experts, most, x, halves, back, TOP_K: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, FEW: tl.constexpr, HALVED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A stable sort of pairs by expert: order[position] = pair; and tiles[0:3, p] = a tile's expert (-1: there is
    none), its first position, and the last one's successor. FEW: a tile is where its first pair is; otherwise experts
    have room of their own, in which a place is left over at most, and which items after the pairs fill.

    One warp, which neither waits for others nor counts all experts: only what is below its items, and like them.
    HALVED: columns of x (0: none), the tokens of which the first programs make rows of e4m3, see linear/warpgroups.py.
    """
    let_next_come(PDL)
    pairs = tokens * TOP_K
    program = tl.program_id(0)
    after_previous(PDL)
    if HALVED:
        if program < tokens:
            halve(x, program.to(tl.int64), halves, back, HALVED, BLOCK)
            return
        program -= tokens
    item_M, n_N = program * BM + tl.arange(0, BM), tl.arange(0, BN)
    pair_M = item_M < pairs
    key_M = tl.load(ids + item_M, mask=pair_M, other=0)
    key_M = tl.where(pair_M, key_M, item_M - pairs)
    ahead_M, own_M = tl.zeros((BM,), tl.int32), tl.zeros((BM,), tl.int32)
    for first in range(0, pairs, BN):
        other_N = first + n_N
        key_N = tl.load(ids + other_N, mask=other_N < pairs, other=NO_EXPERT)
        same_MN = key_N[None, :] == key_M[:, None]
        # Pairs of experts below, and earlier ones of the same, in the halves of a word.
        ahead_MN = tl.where(key_N[None, :] < key_M[:, None], 1, 0)
        ahead_MN += tl.where(same_MN & (other_N[None, :] < item_M[:, None]), 1 << 16, 0)
        ahead_M += tl.sum(ahead_MN, 1)
        own_M += tl.sum(same_MN.to(tl.int32), 1)
    below_M, rank_M = ahead_M & 0xFFFF, ahead_M >> 16
    start_M = below_M + rank_M
    tl.store(order + start_M, item_M, mask=pair_M)
    leads_M = pair_M & (rank_M % BT == 0)
    if FEW:
        tile_M = start_M
        tl.store(tiles + tile_M, tl.where(leads_M, key_M, -1), mask=pair_M)
    else:
        tile_M = below_M // BT + key_M + tl.where(pair_M, rank_M // BT, (own_M + BT - 1) // BT)
        free_M = (item_M < pairs + experts) & (tile_M <= (below_M + own_M) // BT + key_M)
        tl.store(tiles + tile_M, tl.where(pair_M, key_M, -1), mask=tl.where(pair_M, leads_M, free_M))
    tl.store(tiles + most + tile_M, start_M, mask=leads_M)
    tl.store(tiles + 2 * most + tile_M, start_M + tl.minimum(own_M - rank_M, BT), mask=leads_M)


def rank_tiles(
    ids_Tk: torch.Tensor, experts: int, BT: int, pdl: bool, halved: Halved | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs sorted by expert -> order_M, tiles_3P (see the kernel), both int32; every id is one of an expert. halved:
    what is to be filled in the same launch.

    Fewer than 65,536 pairs: positions are halves of words.
    """
    (tokens, top_k), pairs = ids_Tk.shape, ids_Tk.numel()
    apart = experts + pairs // BT  # tiles, where experts have room of their own
    most, items = min(pairs, apart), pairs if pairs <= apart else pairs + experts
    order_M = torch.empty(pairs, dtype=torch.int32, device=ids_Tk.device)
    tiles_3P = torch.empty((3, most), dtype=torch.int32, device=ids_Tk.device)
    columns = halved.x_TH.shape[1] if halved else 0
    rank_tiles_kernel[(triton.cdiv(items, RANKED_ROWS) + (tokens if halved else 0),)](
        ids_Tk, order_M, tiles_3P, tokens, experts, most, *(halved or (ids_Tk,) * 3), top_k, BT, RANKED_ROWS,
        min(RANKED_STEP, max(128, power_of_two(pairs))), pairs <= apart, columns, power_of_two(columns), num_warps=1,
        **launch(pdl),
    )  # fmt: skip
    return order_M, tiles_3P


def compile_cases(native_fp8: bool) -> Iterator[CompileCase]:
    """Few pairs and many; with tokens that are halved, where there is e4m3."""
    types = dict.fromkeys(("ids", "order", "tiles"), "*i32")
    for few, step in () if native_fp8 else ((True, 128), (False, RANKED_STEP)):
        yield _case(few, step, 0, types | dict.fromkeys(("x", "halves", "back"), "*i32"))
    if native_fp8:
        yield _case(False, RANKED_STEP, 2048, types | {"x": "*bf16", "halves": "*fp8e4nv", "back": "*fp32"})


def _case(few: bool, step: int, columns: int, types: dict[str, str]) -> CompileCase:
    constexprs = {"TOP_K": 8, "BT": 8, "BM": RANKED_ROWS, "BN": step, "FEW": few, "PDL": False}
    constexprs |= {"HALVED": columns, "BLOCK": power_of_two(columns)}
    return CompileCase(rank_tiles_kernel, signature(rank_tiles_kernel, constexprs, types), constexprs, 1, 1)
