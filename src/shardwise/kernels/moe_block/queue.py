"""Tiles of the experts that some tokens chose, for programs that take one after another (see persistent.py).

Those of the shared expert come first, then those of each chosen expert, in the order of tokens. Every program begins
with the tile of its own number, and takes those behind from a counter.
Legend: P pairs of token and choice, choices first; T threads.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from shardwise.kernels.linear.warpgroups import WARPS

MOST_PAIRS = 64  # with twice as many, programs were half as fast on an H200 as tiles of sorted pairs


@constexpr_function
def _whole(P):
    """Of pairs, all in every warp."""
    return gl.BlockedLayout([P // 32], [32], [WARPS.value], [0])


@constexpr_function
def _square(P):
    """Of pairs by pairs, a row's columns in one warp."""
    return gl.BlockedLayout([1, P // 4], [8, 4], [WARPS.value, 1], [1, 0])


@gluon.jit
def load_choice(ids, tokens, TOP_K: gl.constexpr, BT: gl.constexpr, P: gl.constexpr):
    """Experts by choice and token (-2: none). Loaded once a program: all programs want the same line at once."""
    THREADS: gl.constexpr = 32 * WARPS
    n_P = gl.arange(0, max(P, THREADS), layout=gl.BlockedLayout([max(P // THREADS, 1)], [32], [WARPS], [0]))
    ok_P = (n_P // BT < TOP_K) & (n_P % BT < tokens)
    return gl.load(ids + (n_P % BT * TOP_K + n_P // BT), mask=ok_P, other=-2, cache_modifier=".cg")


@gluon.jit
def chosen_experts(ids_s, BT: gl.constexpr, P: gl.constexpr):
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
def tile_of(list_P, tile, PARTS: gl.constexpr, P: gl.constexpr):
    """The expert of a tile (-1: the shared one), and which of its tiles it is."""
    l_P = gl.arange(0, P, layout=list_P.type.layout)
    expert = gl.max(gl.where(l_P == tile // PARTS - 1, list_P, -1), 0)
    return expert, tile % PARTS


@gluon.jit
def first_expert(ids_s, tile, PARTS: gl.constexpr, BT: gl.constexpr, P: gl.constexpr):
    """Of one of the first tiles, before there is a list: the first token's experts are all different, as a rule."""
    mine_P = gl.arange(0, P, layout=_whole(P)) == (tile // PARTS - 1) * BT
    return gl.max(gl.where(mine_P, ids_s.slice(0, P).load(_whole(P)), -1), 0)


@gluon.jit
def take(counter, more):
    """Thread 0's number from the counter, on its way; nothing unless there may be more."""
    t_T = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    return gl.atomic_add(counter + t_T * 0, t_T * 0 + 1, mask=(t_T == 0) & more, sem="relaxed")


@gluon.jit
def taken(counter, got_T, running, total):
    """The tile behind a number of `take`. Whoever takes the last number there is sets the counter back."""
    t_T = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.store(counter + t_T * 0, t_T * 0, mask=(t_T == 0) & (got_T == gl.maximum(total, running) - 1))
    return gl.max(gl.where(t_T == 0, got_T, 0), 0) + running
