"""Products of fragments.py for few tokens, two steps of which are on their way or in hand at a time.

With few programs nothing hides how long a word takes to come. A step's words are replaced only after they were
multiplied, in the registers they had, so that no thread waits at a step's end to move what has just been asked for. The
input lies in shared memory.
Legend: see fragments.py.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.runtime.jit import constexpr_function

from shardwise.kernels.linear.fragments import Fragments, _along, _held, _places, _range, _step, _turned
from shardwise.kernels.linear.layouts import product_layout, split_columns, tokens_layout, values_of
from shardwise.kernels.linear.tiles import COLUMNS, FINE, FP4_WORDS, KIND, Operand

NEAR_BYTES = 32768
copy_near = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def fragment_ahead(
    value, fine, o0, LIMIT: gl.constexpr, SECOND: gl.constexpr, W: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr,
    RUN: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """What is multiplied first, on its way: as fragment_first, or with AHEAD = 2 the first two steps."""
    WHOLE: gl.constexpr = W[COLUMNS] % (BK * SPLITS) == 0 and LIMIT % BM == 0
    places = _places(o0, LIMIT, SECOND, W, BM, BK, RUN, WARPS, SPLITS)
    held = _held(value, fine, places, 0, 0, o0 >= 0, SECOND, W, WHOLE)
    if AHEAD == 2:
        GRAIN: gl.constexpr = W[FINE] if W[FINE] else W[COLUMNS]
        if split_columns(W, BK, SPLITS) > BK:
            then = _held(value, fine, places, BK // values_of(W), BK // GRAIN, o0 >= 0, SECOND, W, WHOLE)
            found = held, then
        else:
            found = held, held
    else:
        found = held
    return found


@constexpr_function
def near_layout(BK, WARPS, SPLITS):
    """Of an input [S, K, T] as it is copied: eight values a thread."""
    along = min(32, BK // 8)
    return gl.BlockedLayout([1, 8, 1], [1, along, 32 // along], [SPLITS, 1, WARPS // SPLITS], [1, 2, 0])


@constexpr_function
def rows_layout(W, BK, RUN, WARPS, SPLITS, AHEAD):
    """Of the tokens whose input is read: see fragment_near and fragment_products."""
    if AHEAD == 2:
        return gl.SliceLayout(0, gl.SliceLayout(0, near_layout(BK, WARPS, SPLITS)))
    return tokens_layout(WARPS, SPLITS, RUN * values_of(W))


@gluon.jit
def fragment_near(
    x, x_at_T, ok_T, W: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr
):  # fmt: skip
    """The input of a program on its way to shared memory: [steps, S, K, T]; nothing where there is no token."""
    PART: gl.constexpr = split_columns(W, BK, SPLITS)
    NEAR: gl.constexpr = near_layout(BK, WARPS, SPLITS)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 2, 0])
    near = gl.allocate_shared_memory(x.dtype.element_ty, [PART // BK, SPLITS, BK, BT], SHARED)
    at = _along(x_at_T, 2) + (_range(SPLITS, 0, NEAR) * PART + _range(BK, 1, NEAR))
    for n in gl.static_range(PART // BK):
        copy_near(near.index(n), x + (at + n * BK), mask=(at >= 0) & _along(ok_T, 2))
    async_copy.commit_group()
    return near


@gluon.jit
def _of_near(
    near, n, SPLITS: gl.constexpr, BK: gl.constexpr, BT: gl.constexpr, TURNED_BY: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
    """Step n of the input as the right operand [S, K, T], in the order of the weights."""
    return _turned(near.index(n).load(RIGHT), TURNED_BY, SPLITS, BT, BK, RIGHT)


@gluon.jit
def fragment_pairs(
    near, value, fine, held, o0, LIMIT: gl.constexpr, SECOND: gl.constexpr, W: gl.constexpr, BM: gl.constexpr,
    BT: gl.constexpr, BK: gl.constexpr, RUN: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    TURNED: gl.constexpr,
):  # fmt: skip
    """As fragment_products, of one tile of which all is in place, in pairs of steps. near: see fragment_near; held: see
    fragment_ahead."""
    VALUES: gl.constexpr = values_of(W)
    K: gl.constexpr = W[COLUMNS]
    PART: gl.constexpr = split_columns(W, BK, SPLITS)
    GRAIN: gl.constexpr = W[FINE] if W[FINE] else K
    IN: gl.constexpr = 2 if TURNED else VALUES
    gl.static_assert(K % (BK * SPLITS) == 0 and LIMIT % BM == 0, "all is in place")
    gl.static_assert(PART == BK or PART % (2 * BK) == 0, "one step, or pairs of steps")
    PRODUCT: gl.constexpr = product_layout(WARPS, SPLITS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, RUN * VALUES)
    places = _places(o0, LIMIT, SECOND, W, BM, BK, RUN, WARPS, SPLITS)
    acc = gl.zeros((SPLITS, BM, BT), gl.float32, layout=PRODUCT)
    acc2 = acc
    async_copy.wait_group(0)
    one, two = held
    for k0 in range(0, PART, 2 * BK):
        x_SKT = _of_near(near, k0 // BK, SPLITS, BK, BT, IN, RIGHT)
        acc, acc2 = _both(acc, acc2, one, x_SKT, SECOND, W, BM, BT, BK, RUN, WARPS, SPLITS)
        if PART > BK:
            k1 = k0 + 2 * BK
            if PART > 2 * BK:
                one = _held(value, fine, places, k1 // VALUES, k1 // GRAIN, k1 < PART, SECOND, W, True)
            y_SKT = _of_near(near, k0 // BK + 1, SPLITS, BK, BT, IN, RIGHT)
            acc, acc2 = _both(acc, acc2, two, y_SKT, SECOND, W, BM, BT, BK, RUN, WARPS, SPLITS)
            if PART > 2 * BK:
                k1 += BK
                two = _held(value, fine, places, k1 // VALUES, k1 // GRAIN, k1 < PART, SECOND, W, True)
    if SECOND:
        both = gl.sum(gl.join(acc, acc2), 0)
        products, others = gl.split(both)
        products = gl.convert_layout(products, gl.SliceLayout(0, PRODUCT))
        others = gl.convert_layout(others, gl.SliceLayout(0, PRODUCT))
    else:
        products, others = gl.sum(acc, 0), 0.0
    if W[KIND] >= FP4_WORDS:
        products, others = products * 128.0, others * 128.0
    return products, others


@gluon.jit
def _both(
    acc, acc2, held, x_SKT, SECOND: gl.constexpr, W: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr,
    BK: gl.constexpr, RUN: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """The sums of one product or both, and a step."""
    w, w2, s, s2 = held
    acc = _step(acc, w, s, x_SKT, W, BM, BT, BK, RUN, WARPS, SPLITS)
    if SECOND:
        acc2 = _step(acc2, w2, s2, x_SKT, W, BM, BT, BK, RUN, WARPS, SPLITS)
    return acc, acc2


def steps_ahead(of: Operand, rows: int, BT: int, config: Fragments, step: int) -> int:
    """2, or 1 where fragment_pairs does not part `rows` and `in` into whole tiles and pairs of steps, or where the
    input takes more shared memory than all cards have."""
    columns = of.layout[COLUMNS.value]
    part = columns // config.splits
    whole = columns % (step * config.splits) == 0 and rows % config.BM == 0 and (part == step or part % (2 * step) == 0)
    return 2 if whole and columns * BT * 2 <= NEAR_BYTES else 1
