"""Products by fragments (fragments.py) whose weights are all asked for at once, where few steps make a row's part.

Legend: M rows, T tokens, K values of `in` of a step, S splits.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from shardwise.kernels.linear.fragments import _along, _held, _input, _places, _range, _step
from shardwise.kernels.linear.layouts import product_layout, split_columns, values_of
from shardwise.kernels.linear.tiles import COLUMNS, FINE, FP4_WORDS, KIND


@gluon.jit
def fragment_all(
    value, fine, o0, LIMIT: gl.constexpr, W: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, RUN: gl.constexpr,
    WARPS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """All that fragment_sum multiplies, on its way: where few steps make a row's part, nothing is left to ask for."""
    WHOLE: gl.constexpr = W[COLUMNS] % (BK * SPLITS) == 0 and LIMIT % BM == 0
    VALUES: gl.constexpr = values_of(W)
    GRAIN: gl.constexpr = W[FINE] if W[FINE] else W[COLUMNS]
    places = _places(o0, LIMIT, 0, W, BM, BK, RUN, WARPS, SPLITS)
    held = ()
    for n in gl.static_range(split_columns(W, BK, SPLITS) // BK):
        held = held + (_held(value, fine, places, n * BK // VALUES, n * BK // GRAIN, o0 >= 0, 0, W, WHOLE),)  # noqa: RUF005
    return held


@gluon.jit
def fragment_sum(
    x, x_at_T, ok_T, held, W: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, RUN: gl.constexpr,
    WARPS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """As fragment_products, of what fragment_all has on its way."""
    PART: gl.constexpr = split_columns(W, BK, SPLITS)
    PRODUCT: gl.constexpr = product_layout(WARPS, SPLITS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, RUN * values_of(W))
    k_K, x_ok = _range(SPLITS, 0, RIGHT) * PART + _range(BK, 1, RIGHT), _along(ok_T, 2)
    x_at = _along(x_at_T, 2) + k_K
    EVEN: gl.constexpr = W[COLUMNS] % (BK * SPLITS) == 0
    acc = gl.zeros((SPLITS, BM, BT), gl.float32, layout=PRODUCT)
    for n in gl.static_range(PART // BK):
        x_SKT = _input(x, x_at, k_K, n * BK, x_ok, values_of(W), W[COLUMNS], EVEN, SPLITS, BT, BK, RIGHT)
        w, _, s, _ = held[n]
        acc = _step(acc, w, s, x_SKT, W, BM, BT, BK, RUN, WARPS, SPLITS)
    products = gl.sum(acc, 0)
    if W[KIND] >= FP4_WORDS:
        products = products * 128.0
    return products
