"""Tiles that pass one after another through a ring of steps in shared memory: see warpgroups.py.

They are of gates and ups, by turns of eight rows, of experts and of a shared one, whose weights lie elsewhere (expert
-1). A tile's last steps make room for the next one's first.
Legend: T tokens, N rows of their input, M rows of a tile, c a step.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from shardwise.kernels.linear.tiles import COLUMNS, FINE, FINE_COLUMNS, FINE_O, FINE_ROWS, FP8, KIND, ROWS, factors
from shardwise.kernels.linear.warpgroups import (
    WARPS,
    ask,
    copy_layout,
    element,
    place_layout,
    step_of,
    step_products,
    sums_layout,
    tile_rows,
)


@gluon.jit
def ring_places(COUNT: gl.constexpr, SIZE: gl.constexpr, W: gl.constexpr):
    """As warpgroups.places, each with an index, which is 0."""
    found = ()
    for _ in gl.static_range(COUNT):
        found = found + (gl.allocate_shared_memory(element(W), [1, SIZE, step_of(W)], place_layout(W)),)  # noqa: RUF005
    return found


@gluon.jit
def at_index(places_s, same):
    """Each of them, by its index."""
    found = ()
    for n in gl.static_range(len(places_s)):
        found = found + (places_s[n].index(same),)  # noqa: RUF005
    return found


@gluon.jit
def _beginning(base, shared_base, expert, SIZE: gl.constexpr):
    """Where the shared expert's, or an expert's, values of SIZE begin."""
    apart = (shared_base.to(gl.int64) - base.to(gl.int64)) // (base.dtype.element_ty.primitive_bitwidth // 8)
    return base + gl.where(expert < 0, apart, expert.to(gl.int64) * SIZE)


@gluon.jit
def ring_scales(fine, shared_fine, expert, part, W: gl.constexpr, BM: gl.constexpr):
    """Fine scales of a tile's rows [M, c], a column for each step; nothing of account if there are none."""
    found = part
    if W[FINE]:
        LAID: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
        fine = _beginning(fine, shared_fine, expert, W[FINE_ROWS] * W[FINE_COLUMNS])
        r_M = gl.arange(0, BM, layout=gl.SliceLayout(1, LAID))
        c_C = gl.arange(0, W[COLUMNS] // step_of(W), layout=gl.SliceLayout(0, LAID))
        row_M, _ = tile_rows(r_M, part * (BM // 2), W[ROWS] // 2, 1)
        at_M1 = gl.expand_dims(row_M // W[FINE_O] * W[FINE_COLUMNS], 1)
        found = gl.load(fine + (at_M1 + gl.expand_dims(c_C * step_of(W) // W[FINE], 0)))
    return found


@gluon.jit
def store_scales(scale_s, scale_MC, W: gl.constexpr):
    """As factors in fp32, to shared memory, if there are any."""
    if W[FINE]:
        scale_s.store(factors(scale_MC, W))


@gluon.jit
def ring_rows(value, shared_value, expert, part, W: gl.constexpr, BM: gl.constexpr):
    """Where a tile's weights begin: of its expert, and each row."""
    r_M = gl.arange(0, BM, layout=gl.SliceLayout(1, copy_layout(W)))
    row_M, _ = tile_rows(r_M, part * (BM // 2), W[ROWS] // 2, 1)
    at_M1 = gl.expand_dims(row_M * W[COLUMNS], 1)
    return _beginning(value, shared_value, expert, W[ROWS] * W[COLUMNS]), at_M1


@gluon.jit
def ring_first(a_s, value, at_M1, W: gl.constexpr, SLOTS: gl.constexpr):
    """All steps of a tile that may be on their way but one, as a group each."""
    for c in gl.static_range(SLOTS - 1):
        ask(a_s[c].index(0), value, at_M1, c, W)
        async_copy.commit_group()


@gluon.jit
def ring_products(
    a_s, x_s, scale_s, own, at_M1, next_own, next_at_M1, more, same, W: gl.constexpr, BM: gl.constexpr,
    N: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Of a tile, with its fine scales, [M, N]. Behind its last steps those of the next one are asked for, if there are
    more. same: 0, but the compiler is not to know, or it works out where steps lie once for all tiles, and spills that.
    """
    STEPS: gl.constexpr = W[COLUMNS] // step_of(W)
    acc = gl.zeros((BM, N), gl.float32, layout=sums_layout(W, N))
    zeros = acc
    for c in gl.static_range(STEPS):
        async_copy.wait_group(SLOTS - 2)
        fence_async_shared()
        part = step_products(x_s[c].index(same), a_s[c % SLOTS].index(same), acc, zeros, W)
        if c - 1 + SLOTS < STEPS:
            ask(a_s[(c - 1) % SLOTS].index(same), own, at_M1, c - 1 + SLOTS, W)
        elif more:
            ask(a_s[(c - 1) % SLOTS].index(same), next_own, next_at_M1, c - 1 + SLOTS - STEPS, W)
        async_copy.commit_group()
        part = warpgroup_mma_wait(0, deps=[part])
        if W[KIND] != FP8:
            acc = part
        elif W[FINE]:
            acc += part * scale_s.slice(c, 1, 1).load(sums_layout(W, N))
        else:
            acc += part
    return acc
