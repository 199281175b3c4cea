"""Routed experts of many tokens on Hopper: plain weights in bf16, by programs that take one tile after another.

A tile is of 192 sorted pairs of one expert and 256 rows of its weights. One group of warps fills a ring of steps in
shared memory, by the tensor memory accelerator where rows lie one behind the other; three others multiply 64 of the
pairs each. A group without pairs multiplies nothing, so that fewer than 64 places of an expert are multiplied in vain.
Such tiles ask the second-level cache for some four fifths of what tiles of 128 pairs do. Groups of warps wait for steps
alone, so that one may write its results while others multiply.

Legend: E experts, H hidden, I intermediate, M pairs, P tiles of pairs, T pairs of a group, N rows of weights of a tile,
K columns of a step.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

from collections.abc import Iterator
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.gluon import all_wait, copy_to_shared, tma_load
from shardwise.kernels.hopper import SHARED_KIB, is_hopper
from shardwise.kernels.linear.geometry import case
from shardwise.kernels.linear.tiles import COARSE, COARSE_ROWS, COLUMNS, FINE, INVERSE, PLAIN, ROWS, Operand

WARPS, GROUPS, STAGES = gl.constexpr(4), gl.constexpr(3), gl.constexpr(4)
BT, BN, HALF, BK = gl.constexpr(64), gl.constexpr(256), gl.constexpr(128), gl.constexpr(64)
TILE_PAIRS = GROUPS.value * BT.value
FEWEST_PAIRS = 128  # an expert, as measured on an H200: a quarter faster than by grouped.py; 64 are 6 % slower
MULTIPLY_REGISTERS, LOAD_REGISTERS = gl.constexpr(160), gl.constexpr(32)  # of a thread: all there are for 512
PLACE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes a thread
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # more: refused for 512 threads
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Rows of weights that a copy takes, as [32 rows, i, q, b, K]: row 8 q + 2 i + b of 32 comes to place 8 i + 2 q + b, so
# that a thread's sums, of columns 8 i + 2 q + b for its q, are of eight rows one behind the other.
ROWS_BOX = gl.constexpr([4, 4, 4, 2, 64])
ROWS_PLACE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5))
WRITE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 128],
    )
)  # fmt: skip


@gluon.jit
def _memory(ARRIVALS: gl.constexpr):
    """The ring: inputs of each group, weights in two halves; whether a step is full (after so many ARRIVALS) or empty;
    the tile that comes, by turns of two, and whether it has been told."""
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, BT, BK], PLACE)
    w_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, 4, 4, 4, 2, BK], ROWS_PLACE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tile_s = gl.allocate_shared_memory(gl.int32, [2, 1], FLAT)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=GROUPS)
    for turn in gl.static_range(2):
        mbarrier.init(told.index(turn), count=1)
    fence_async_shared()
    return x_s, w_s, full, empty, told, tile_s


@gluon.jit
def _tell(told, tile_s, turn, tile):
    """The tile that comes. All have heard of the one before the last: the ring is no longer than a tile."""
    tile_s.index(turn % 2).store(gl.full([1], tile, gl.int32, layout=ONE))
    all_wait()
    mbarrier.arrive(told.index(turn % 2))


@gluon.jit
def _hear(told, tile_s, turn):
    """The tile that comes, -1: none."""
    mbarrier.wait(told.index(turn % 2), turn // 2 % 2)
    return gl.max(tile_s.index(turn % 2).load(ONE), 0)


@gluon.jit
def _tile(tiles, tile, PARTS: gl.constexpr):
    """Expert, first position, pairs, and which of the parts of the weights' rows."""
    row = tiles + 4 * (1 + tile // PARTS)
    return gl.load(row), gl.load(row + 1), gl.load(row + 2), tile % PARTS


@gluon.jit
def _ask_weights(weights, w_s, full, empty, turn, row, SECOND: gl.constexpr, column):
    """A step of both halves of a tile's rows on its way, as soon as its place is empty."""
    stage = turn % STAGES
    mbarrier.wait(empty.index(stage), turn // STAGES % 2 ^ 1)
    mbarrier.expect(full.index(stage), 2 * HALF * BK * 2)
    tma_load(weights, [row // 32, 0, 0, 0, column], full.index(stage), w_s.index(stage * 2))
    tma_load(weights, [(row + SECOND) // 32, 0, 0, 0, column], full.index(stage), w_s.index(stage * 2 + 1))
    return stage


@gluon.jit
def _copy_rows(place, x, at_T, column_1K):
    """A group's inputs of a step on their way; rows start at 16 bytes, see `possible`."""
    copy_to_shared(place, gl.multiple_of(x + (gl.expand_dims(at_T, 1) + column_1K), (1, 16)))


@gluon.jit
def _ask_gate_up(x, x_stride, weights, order, tiles, ring, TOP_K: gl.constexpr, W: gl.constexpr):
    """Rows of inputs are gathered by all threads of this group."""
    x_s, w_s, full, empty, told, tile_s = ring
    I: gl.constexpr = W[ROWS] // 2  # noqa: E741
    PARTS: gl.constexpr = I // HALF
    total = gl.load(tiles) * PARTS
    t_T = gl.arange(0, BT, layout=gl.SliceLayout(1, COPY))
    k_K = gl.arange(0, BK, layout=gl.SliceLayout(0, COPY))
    tile, taken, turn = gl.program_id(0), 0, 0
    while tile < total:
        _tell(told, tile_s, taken, tile)
        expert, first, count, part = _tile(tiles, tile, PARTS)
        at_0 = gl.load(order + first + t_T, mask=t_T < count, other=0) // TOP_K * x_stride
        at_1 = gl.load(order + first + BT + t_T, mask=t_T + BT < count, other=0) // TOP_K * x_stride
        at_2 = gl.load(order + first + 2 * BT + t_T, mask=t_T + 2 * BT < count, other=0) // TOP_K * x_stride
        for c in range(W[COLUMNS] // BK):
            stage = _ask_weights(weights, w_s, full, empty, turn, expert * W[ROWS] + part * HALF, I, c * BK)
            column_1K = gl.expand_dims(c * BK + k_K, 0)
            _copy_rows(x_s.index(stage * GROUPS), x, at_0, column_1K)
            if count > BT:
                _copy_rows(x_s.index(stage * GROUPS + 1), x, at_1, column_1K)
            if count > 2 * BT:
                _copy_rows(x_s.index(stage * GROUPS + 2), x, at_2, column_1K)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            turn += 1
        taken += 1
        tile = gl.atomic_add(tiles + 1, 1, sem="relaxed") + gl.num_programs(0)
    _tell(told, tile_s, taken, -1)


@gluon.jit
def _ask_down(inputs, weights, tiles, ring, W: gl.constexpr):
    """Inputs lie in the order of the pairs; those past a tile's are another's, or zeros."""
    x_s, w_s, full, empty, told, tile_s = ring
    PARTS: gl.constexpr = W[ROWS] // BN
    total = gl.load(tiles) * PARTS
    tile, taken, turn = gl.program_id(0), 0, 0
    while tile < total:
        _tell(told, tile_s, taken, tile)
        expert, first, count, part = _tile(tiles, tile, PARTS)
        for c in range(W[COLUMNS] // BK):
            stage = _ask_weights(weights, w_s, full, empty, turn, expert * W[ROWS] + part * BN, HALF, c * BK)
            for g in gl.static_range(GROUPS):
                if count > g * BT:
                    mbarrier.expect(full.index(stage), BT * BK * 2)
                    tma_load(inputs, [first + g * BT, c * BK], full.index(stage), x_s.index(stage * GROUPS + g))
                else:
                    mbarrier.arrive(full.index(stage))
            turn += 1
        taken += 1
        tile = gl.atomic_add(tiles + 2, 1, sem="relaxed") + gl.num_programs(0)
    _tell(told, tile_s, taken, -1)


@gluon.jit
def _in_order(sums_TN):
    """Sums by rows of weights as they lie in memory, for which see ROWS_BOX; a thread keeps what it has."""
    found = gl.reshape(gl.permute(gl.reshape(sums_TN, (BT, 4, 4, 4, 2)), (0, 1, 3, 2, 4)), (BT, HALF))
    return gl.convert_layout(found, WRITE)


@gluon.jit
def _products(x_s, w_s, full, empty, turn, STEPS: gl.constexpr, GROUP: gl.constexpr, GATHERED: gl.constexpr):
    """A group's inputs times both halves of a tile's weights [T, N]; a step's place is empty when the next one is on
    its way."""
    first_TN = gl.zeros((BT, HALF), gl.float32, layout=SUMS)
    second_TN = gl.zeros((BT, HALF), gl.float32, layout=SUMS)
    for c in range(STEPS):
        stage = (turn + c) % STAGES
        mbarrier.wait(full.index(stage), (turn + c) // STAGES % 2)
        if GATHERED:
            fence_async_shared()
        left = x_s.index(stage * GROUPS + GROUP)
        first, second = w_s.index(stage * 2).reshape((HALF, BK)), w_s.index(stage * 2 + 1).reshape((HALF, BK))
        first_TN = warpgroup_mma(left, first.permute((1, 0)), first_TN, is_async=True)
        second_TN = warpgroup_mma(left, second.permute((1, 0)), second_TN, is_async=True)
        first_TN, second_TN = warpgroup_mma_wait(2, deps=[first_TN, second_TN])
        mbarrier.arrive(empty.index((turn + c + STAGES - 1) % STAGES), pred=c > 0)
    first_TN, second_TN = warpgroup_mma_wait(0, deps=[first_TN, second_TN])
    mbarrier.arrive(empty.index((turn + STEPS - 1) % STAGES))
    return _in_order(first_TN), _in_order(second_TN)


@gluon.jit
def _pass_by(full, empty, turn, STEPS: gl.constexpr):
    """The steps of a tile that has no pairs for a group."""
    for c in range(STEPS):
        stage = (turn + c) % STAGES
        mbarrier.wait(full.index(stage), (turn + c) // STAGES % 2)
        mbarrier.arrive(empty.index(stage))


@gluon.jit
def _coarse(coarse, expert, row, W: gl.constexpr):
    """The coarse scale that all rows of a half of a tile have; 1 if there is none."""
    scale = 1.0
    if W[COARSE] >= 0:
        row = row // W[COARSE] if W[COARSE] else row * 0
        scale = gl.load(coarse + (expert * W[COARSE_ROWS] + row)).to(gl.float32)
        if W[INVERSE] >= 2:
            scale = 1.0 / scale
    return scale


@gluon.jit
def _gate_up(act, coarse, tiles, ring, GROUP: gl.constexpr, W: gl.constexpr):
    """act[position] = silu(gate) * up, of a group's pairs."""
    x_s, w_s, full, empty, told, tile_s = ring
    I: gl.constexpr = W[ROWS] // 2  # noqa: E741
    STEPS: gl.constexpr = W[COLUMNS] // BK
    taken = 0
    tile = _hear(told, tile_s, taken)
    while tile >= 0:
        expert, first, count, part = _tile(tiles, tile, I // HALF)
        if count > GROUP * BT:
            gate_scale = _coarse(coarse, expert, part * HALF, W)
            up_scale = _coarse(coarse, expert, part * HALF + I, W)
            gate, up = _products(x_s, w_s, full, empty, taken * STEPS, STEPS, GROUP, True)
            gate, up = gate * gate_scale, up * up_scale
            mixed = (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16)
            t_T = GROUP * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, WRITE))
            i_N = part * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, WRITE))
            at = gl.expand_dims((first + t_T).to(gl.int64) * I, 1) + gl.expand_dims(i_N, 0)
            gl.store(act + at, mixed, mask=gl.expand_dims(t_T < count, 1))
        else:
            _pass_by(full, empty, taken * STEPS, STEPS)
        taken += 1
        tile = _hear(told, tile_s, taken)


@gluon.jit
def _down(y, coarse, order, tiles, ring, GROUP: gl.constexpr, W: gl.constexpr):
    """y[pair], of a group's pairs."""
    x_s, w_s, full, empty, told, tile_s = ring
    STEPS: gl.constexpr = W[COLUMNS] // BK
    taken = 0
    tile = _hear(told, tile_s, taken)
    while tile >= 0:
        expert, first, count, part = _tile(tiles, tile, W[ROWS] // BN)
        if count > GROUP * BT:
            scale = _coarse(coarse, expert, part * BN, W)
            first_TN, second_TN = _products(x_s, w_s, full, empty, taken * STEPS, STEPS, GROUP, False)
            t_T = GROUP * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, WRITE))
            o_N = part * BN + gl.arange(0, HALF, layout=gl.SliceLayout(0, WRITE))
            pair_T = gl.load(order + first + t_T, mask=t_T < count, other=0).to(gl.int64)
            at, ok_T1 = gl.expand_dims(pair_T * W[ROWS], 1) + gl.expand_dims(o_N, 0), gl.expand_dims(t_T < count, 1)
            gl.store(y + at, (first_TN * scale).to(gl.bfloat16), mask=ok_T1)
            gl.store(y + at + HALF, (second_TN * scale).to(gl.bfloat16), mask=ok_T1)
        else:
            _pass_by(full, empty, taken * STEPS, STEPS)
        taken += 1
        tile = _hear(told, tile_s, taken)


@gluon.jit(do_not_specialize=["x_stride"])
def warpgroup_gate_up_kernel(x, x_stride, weights, coarse, act, order, tiles, TOP_K: gl.constexpr, W: gl.constexpr):
    """act of all tiles, in the order of the pairs."""
    ring = _memory(1 + 32 * WARPS)
    gl.warp_specialize(
        [
            (_gate_up, (act, coarse, tiles, ring, 0, W)),
            (_gate_up, (act, coarse, tiles, ring, 1, W)),
            (_gate_up, (act, coarse, tiles, ring, 2, W)),
            (_ask_gate_up, (x, x_stride, weights, order, tiles, ring, TOP_K, W)),
        ],
        [WARPS, WARPS, WARPS],
        [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


@gluon.jit
def warpgroup_down_kernel(inputs, weights, coarse, y, order, tiles, W: gl.constexpr):
    """y of all tiles, by pairs."""
    ring = _memory(1 + GROUPS)
    gl.warp_specialize(
        [
            (_down, (y, coarse, order, tiles, ring, 0, W)),
            (_down, (y, coarse, order, tiles, ring, 1, W)),
            (_down, (y, coarse, order, tiles, ring, 2, W)),
            (_ask_down, (inputs, weights, tiles, ring, W)),
        ],
        [WARPS, WARPS, WARPS],
        [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


def possible(x_TH: torch.Tensor, up: Operand, down: Operand, pairs: int) -> bool:
    """Whether to take these kernels: Hopper, 16 bits, enough pairs an expert, rows that come to tiles, coarse scales
    that whole halves of tiles share. up, down: as they will be, plain."""
    (rows, hidden), (outputs, width), experts = up.layout[2:4], down.layout[2:4], up.value.shape[0]
    if not is_hopper(x_TH.device) or x_TH.dtype != torch.bfloat16 or pairs < FEWEST_PAIRS * experts:
        return False
    plain = all(of.kind == PLAIN.value and not of.layout[FINE.value] for of in (up, down))
    whole = rows % (2 * HALF.value) == 0 and outputs % BN.value == 0
    whole &= all(columns % BK.value == 0 and columns >= BK.value * STAGES.value for columns in (hidden, width))
    shared = all(of.layout[COARSE.value] <= 0 or of.layout[COARSE.value] % BN.value == 0 for of in (up, down))
    starts = all(x.data_ptr() % 16 == 0 for x in (x_TH, up.value, down.value)) and x_TH.stride(0) % 8 == 0
    starts &= x_TH.shape[0] * x_TH.stride(0) < 1 << 31
    return plain and whole and shared and starts


def gate_up(
    x_TH: torch.Tensor, bank: Operand, order_M: torch.Tensor, tiles_P4: torch.Tensor, top_k: int
) -> torch.Tensor:
    """act [M, I] of a plain bank, in the order of the sorted pairs."""
    width = bank.layout[ROWS.value] // 2
    act_MI = torch.empty((len(order_M), width), dtype=x_TH.dtype, device=x_TH.device)
    warpgroup_gate_up_kernel[_grid(tiles_P4, width // HALF.value)](
        x_TH, x_TH.stride(0), _rows_of(bank), bank.coarse, act_MI, order_M, tiles_P4, top_k, bank.layout,
        num_warps=WARPS.value,
    )  # fmt: skip
    return act_MI


def down(act_MI: torch.Tensor, bank: Operand, order_M: torch.Tensor, tiles_P4: torch.Tensor) -> torch.Tensor:
    """y [M, H] of a plain bank, in the order of the pairs."""
    y_MH = torch.empty((len(order_M), bank.layout[ROWS.value]), dtype=act_MI.dtype, device=act_MI.device)
    inputs = TensorDescriptor(act_MI, list(act_MI.shape), list(act_MI.stride()), [BT.value, BK.value], PLACE.value)
    warpgroup_down_kernel[_grid(tiles_P4, bank.layout[ROWS.value] // BN.value)](
        inputs, _rows_of(bank), bank.coarse, y_MH, order_M, tiles_P4, bank.layout, num_warps=WARPS.value
    )
    return y_MH


def _grid(tiles_P4: torch.Tensor, parts: int) -> tuple[int]:
    """A program a processor; the first tile of each is that of its number."""
    processors = torch.cuda.get_device_properties(tiles_P4.device).multi_processor_count
    return (min(processors, (len(tiles_P4) - 1) * parts),)


def _rows_of(bank: Operand) -> TensorDescriptor:
    """Rows of all experts' weights, for which see ROWS_BOX."""
    rows, K = bank.value.shape[0] * bank.layout[ROWS.value], bank.layout[COLUMNS.value]
    return TensorDescriptor(
        bank.value, [rows // 32, 4, 4, 2, K], [32 * K, 2 * K, 8 * K, K, 1], ROWS_BOX.value, ROWS_PLACE.value
    )


def compile_cases() -> Iterator[CompileCase]:
    """Plain banks of 35B-A3B, and some that were made plain, which have coarse scales."""
    for kind in ("bf16", "fp8_tensor"):
        for bank, kernel, own in (
            (case(1024, 2048, kind, True, halves=2), warpgroup_gate_up_kernel, {"TOP_K": 8}),
            (case(2048, 512, kind, True), warpgroup_down_kernel, {}),
        ):
            types = dict.fromkeys(("order", "tiles"), "*i32") | dict.fromkeys(("x", "act", "y"), "*bf16")
            types |= {"coarse": bank.types["coarse"], "weights": _described(ROWS_BOX.value, ROWS_PLACE)}
            types["inputs"] = _described([BT.value, BK.value], PLACE)
            constexprs = {"W": bank.of.layout, **own}
            signed = signature(kernel, constexprs, types)
            yield CompileCase(kernel, signed, constexprs, WARPS.value, 1, SHARED_KIB * 1024)


def _described(box: list[int], place: Any) -> str:
    """The type of a descriptor, as signatures have it."""
    return f"tensordesc<bf16{box!r},{place.value!r}>"
