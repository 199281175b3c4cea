"""The beginning of a step as one Triton kernel, which reads what the host wrote where it lies.

Legend: T tokens, V rows of the table on this rank, H hidden, R half of the rotary dims. Of a program: C columns,
A tokens, X words.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from shardwise.kernels.begin.reference import ARRIVALS, Handover
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.overlap import let_next_come
from shardwise.kernels.rope.reference import RopeTable

COLUMNS = 2048  # of a row that a program looks up
TOKENS = 8  # whose angles a program computes
WORDS = 2048  # that a program copies
WARPS = 8


@triton.jit
def _row(
    ids, last, weight, x, zeros, token, part, first_row, rows, WIDTH: tl.constexpr, BC: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """A part of a row: row ids - first_row of the table, or zeros outside it. LAST: an id below 0 is in `last`."""
    c_C = part * BC + tl.arange(0, BC)
    row = tl.load(ids + token).to(tl.int64)
    tl.store(zeros + token * WIDTH + c_C, tl.zeros((BC,), tl.float32), mask=c_C < WIDTH)
    if LAST:
        row = tl.load(last - row, mask=row < 0, other=row).to(tl.int64)
    row -= first_row
    width = tl.where((row >= 0) & (row < rows), WIDTH, 0)
    found_C = tl.load(weight + row * WIDTH + c_C, mask=c_C < width, other=0.0)
    tl.store(x + token * WIDTH + c_C, found_C.to(tl.float32), mask=c_C < WIDTH)


@triton.jit
def _angles(
    positions, axis_stride, inverse, axis, cos, sin, first, tokens, scaling, HALF: tl.constexpr, BR: tl.constexpr,
    BA: tl.constexpr,
):  # fmt: skip
    """Cosines and sines of some tokens. tl.cos and tl.sin of fp32 are those of libdevice (by Triton 3.6 and 3.9; not
    cos.approx) and of ocml: they reduce angles of any size without loss, and so are torch's to the bit or nearly."""
    t_A, r_R = first + tl.arange(0, BA), tl.arange(0, BR)
    live_AR = (t_A < tokens)[:, None] & (r_R < HALF)[None, :]
    axis_R = tl.load(axis + r_R, mask=r_R < HALF, other=0)
    position_AR = tl.load(positions + (axis_R * axis_stride)[None, :] + t_A[:, None], mask=live_AR, other=0)
    angle_AR = position_AR.to(tl.float32) * tl.load(inverse + r_R, mask=r_R < HALF, other=0.0)[None, :]
    at_AR = (t_A * HALF)[:, None] + r_R[None, :]
    tl.store(cos + at_AR, tl.cos(angle_AR) * scaling, mask=live_AR)
    tl.store(sin + at_AR, tl.sin(angle_AR) * scaling, mask=live_AR)


@triton.jit
def _move_on(turn, came, TURNS: tl.constexpr, MOST: tl.constexpr):
    """Of the program that `came` last: all others have read whose turn it is."""
    if came % MOST == tl.num_programs(0) - 1:
        tl.store(turn, (came // MOST + 1) % TURNS * MOST)


@triton.jit(
    do_not_specialize=["axis_stride", "first_row", "tokens", "scaling"],
    do_not_specialize_on_alignment=["ids", "positions"],
)
def begin_kernel(
    ids, positions, axis_stride, last, weight, inverse, axis, x, zeros, cos, sin, host, words, turn, turn_stride,
    tokens, first_row, rows, scaling, WIDTH: tl.constexpr, BC: tl.constexpr, HALF: tl.constexpr, BR: tl.constexpr,
    BA: tl.constexpr, BX: tl.constexpr, LAST: tl.constexpr, TURNS: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs for parts of rows, then for angles, then, if there are TURNS, for words of the host's.

    With TURNS, ids and positions are the first one's. Every program counts itself in `turn` when it has read it, so
    that the last one can move it on behind all of them. PDL: the next kernel may start once the words are there, for it
    and those after it may read them before they wait.
    """
    PARTS: tl.constexpr = (WIDTH + BC - 1) // BC
    program = tl.program_id(0).to(tl.int64)
    copies = program - tokens * PARTS - (tokens + BA - 1) // BA
    came = 0
    if copies < 0:
        let_next_come(PDL)
        if TURNS:
            came = tl.atomic_add(turn, 1, sem="relaxed")
            at = (came // MOST).to(tl.int64) * (turn_stride // 2)
            ids += at
            positions += at
        if program < tokens * PARTS:
            token, part = program // PARTS, (program % PARTS).to(tl.int32)
            _row(ids, last, weight, x, zeros, token, part, first_row, rows, WIDTH, BC, LAST)
        else:
            first = (program - tokens * PARTS) * BA
            _angles(positions, axis_stride, inverse, axis, cos, sin, first, tokens, scaling, HALF, BR, BA)
    elif TURNS:
        at = (tl.load(turn) // MOST).to(tl.int64) * turn_stride
        x_X = copies * BX + tl.arange(0, BX)
        tl.store(words + x_X, tl.load(host + at + x_X, mask=x_X < turn_stride), mask=x_X < turn_stride)
        tl.debug_barrier()
        # What a program stored may be under way when it is done and the next kernel starts; not with a release behind.
        came = tl.atomic_add(turn, 1, sem="acq_rel", scope="gpu")
    if TURNS:
        _move_on(turn, came, TURNS, MOST)


def _config(width: int, half: int, turns: int) -> dict[str, Any]:
    """Constants."""
    sizes = {"WIDTH": width, "BC": min(COLUMNS, triton.next_power_of_2(width)), "HALF": half}
    sizes |= {"BR": triton.next_power_of_2(half), "BA": TOKENS, "BX": WORDS}
    return sizes | {"TURNS": turns, "MOST": ARRIVALS}


def _source(field: torch.Tensor, handover: Handover) -> torch.Tensor:
    """Where a field in words_X comes from, in the first turn."""
    at = (field.data_ptr() - handover.words_X.data_ptr()) // field.itemsize
    return handover.host_KX[0].view(field.dtype)[at:]


def begin(
    ids_T: torch.Tensor,
    positions_3T: torch.Tensor,
    weight_VH: torch.Tensor,
    first_row: int,
    rope: RopeTable,
    last_S: torch.Tensor | None = None,
    handover: Handover | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference; ids and positions of a handover are int64. pdl: see overlap.py; this kernel itself starts once
    all before it is done."""
    (tokens,), (rows, width), half = ids_T.shape, weight_VH.shape, len(rope.inverse_R)
    ids_T, positions_3T = ids_T.contiguous(), positions_3T.contiguous()  # those of a handover are
    make = {"dtype": torch.float32, "device": weight_VH.device}
    x_TH, zeros_TH = (torch.empty(tokens, width, **make) for _ in range(2))
    cos_TR, sin_TR = (torch.empty(tokens, half, **make) for _ in range(2))
    axis_stride = positions_3T.stride(0) if positions_3T.dim() == 2 else 0
    host = words = turn = ids_T  # nothing reads these
    turns = turn_stride = 0
    if handover is not None:
        host, words, turn = handover.host_KX, handover.words_X, handover.next_1
        turns, turn_stride = host.shape
        ids_T, positions_3T = (_source(field, handover) for field in (ids_T, positions_3T))
    constants = _config(width, half, turns)
    parts, last = triton.cdiv(width, constants["BC"]), ids_T if last_S is None else last_S
    if programs := tokens * parts + triton.cdiv(tokens, TOKENS) + triton.cdiv(turn_stride, WORDS):
        begin_kernel[(programs,)](
            ids_T, positions_3T, axis_stride, last, weight_VH.contiguous(), rope.inverse_R, rope.axis_R, x_TH, zeros_TH,
            cos_TR, sin_TR, host, words, turn, turn_stride, tokens, first_row, rows, rope.scaling, **constants,
            LAST=last_S is not None, PDL=pdl, num_warps=WARPS,
        )  # fmt: skip
    return x_TH, zeros_TH, cos_TR, sin_TR


def compile_cases() -> Iterator[CompileCase]:
    """Of a step whose inputs are on the device, and of a graph."""
    types = dict.fromkeys(("ids", "positions", "last", "axis"), "*i64") | {"weight": "*bf16", "scaling": "fp32"}
    types |= dict.fromkeys(("inverse", "x", "zeros", "cos", "sin"), "*fp32")
    types |= dict.fromkeys(("host", "words", "turn"), "*i32")
    for turns in (0, 2):
        constexprs = _config(2048, 32, turns) | {"LAST": True, "PDL": False}
        yield CompileCase(begin_kernel, signature(begin_kernel, constexprs, types), constexprs, WARPS, 1)
