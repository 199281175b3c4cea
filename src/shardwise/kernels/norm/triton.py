"""RMS norms as one Triton kernel: one read and one write of each tensor, some rows a program.

Legend: T tokens, H hidden, V value heads, D head dim.
"""
# pyright: reportCallIssue=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.overlap import after_previous, launch, let_next_come


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x,
    other,
    weight,
    out,
    total,
    rows,
    inner,
    x_outer_stride,
    x_inner_stride,
    other_outer_stride,
    other_inner_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    GATE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = norm(x) of rows (outer, inner); ADD: other is a residual and total gets the sum; GATE: other is a gate.

    PARTS: of x, which are added first, and lie one behind another.
    """
    let_next_come(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    outer_index, inner_index = row // inner, row % inner
    x_at = (outer_index * x_outer_stride + inner_index * x_inner_stride)[:, None] + column[None, :]
    out_at = (row * WIDTH)[:, None] + column[None, :]
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    after_previous(PDL)
    value = tl.load(x + x_at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        value += tl.load(x + rows * WIDTH * part + x_at, mask=inside, other=0.0).to(tl.float32)
    if ADD or GATE:
        other_at = (outer_index * other_outer_stride + inner_index * other_inner_stride)[:, None] + column[None, :]
        second = tl.load(other + other_at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        rounded = (value + second).to(total.dtype.element_ty)
        tl.store(total + out_at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
    normed = normed * factor * (second / (1.0 + tl.exp(-second))) if GATE else normed * (1.0 + factor)
    tl.store(out + out_at, normed.to(out.dtype.element_ty), mask=inside)


def _config(width: int) -> tuple[dict[str, int], int]:
    """Constants of a width, and the number of warps: narrow rows share a program, wide ones get more warps."""
    block = triton.next_power_of_2(width)
    rows = max(1, 1024 // block)
    return {"WIDTH": width, "BLOCK": block, "ROWS": rows}, min(16, max(1, block * rows // 256))


def _rows(x: torch.Tensor | None, shape: tuple[int, ...]) -> tuple[torch.Tensor | None, int, int]:
    """x and the strides of its rows, seen as [outer, inner, width] where it has three axes; else as [rows, width]."""
    if x is None:
        return None, 0, 0
    x = x if x.stride(-1) == 1 else x.contiguous()
    x = x if len(shape) == 3 else x.reshape(-1, shape[-1])
    return (x, x.stride(0), x.stride(1)) if x.dim() == 3 else (x, x.stride(0), 0)


def _norm(
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
    pdl: bool = False,
) -> None:
    """Fills `out` (and `total`, where there is one: then `other` is a residual, else a gate), which are contiguous.

    x: as out, or contiguous parts of it, one axis more.
    """
    if not out.numel():
        return
    shape, parts = tuple(out.shape), 1
    if x.dim() > out.dim():
        parts, x = len(x), x.contiguous()
    constants, warps = _config(shape[-1])
    rows = out.numel() // shape[-1]
    x_rows, x_outer, x_inner = _rows(x[0] if x.dim() > out.dim() else x, shape)
    other_rows, other_outer, other_inner = _rows(other, shape)
    norm_kernel[(triton.cdiv(rows, constants["ROWS"]),)](
        x_rows,
        other_rows,
        weight,
        out,
        total,
        rows,
        shape[1] if len(shape) == 3 else 1,
        x_outer,
        x_inner,
        other_outer,
        other_inner,
        eps,
        **constants,
        ADD=total is not None,
        GATE=other is not None and total is None,
        PARTS=parts,
        num_warps=warps,
        **launch(pdl),
    )


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, pdl: bool = False) -> torch.Tensor:
    """As the reference. pdl, here and below: see overlap.py."""
    out_TH = torch.empty(x_TH.shape, dtype=weight_H.dtype, device=x_TH.device)
    _norm(x_TH, None, weight_H, out_TH, None, eps, pdl)
    return out_TH


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    out_TH = torch.empty(residual_TH.shape, dtype=weight_H.dtype, device=x_TH.device)
    sum_TH = torch.empty_like(residual_TH, memory_format=torch.contiguous_format)
    _norm(x_TH, residual_TH, weight_H, out_TH, sum_TH, eps, pdl)
    return out_TH, sum_TH


def gated_rms_norm(
    x_TVD: torch.Tensor, gate_TVD: torch.Tensor, weight_D: torch.Tensor, eps: float, pdl: bool = False
) -> torch.Tensor:
    """As the reference."""
    out_TVD = torch.empty_like(x_TVD, memory_format=torch.contiguous_format)
    _norm(x_TVD, gate_TVD, weight_D, out_TVD, None, eps, pdl)
    return out_TVD


def compile_cases() -> Iterator[CompileCase]:
    """Hidden sizes, plain and with what is added to a residual in fp32; heads of GatedDeltaNet with their gate."""
    for width, add, gate, parts in (
        (2048, False, False, 1), (2048, True, False, 1), (2048, True, False, 8), (5120, True, False, 1),
        (128, False, True, 1),
    ):  # fmt: skip
        constants, warps = _config(width)
        constexprs: dict[str, Any] = {**constants, "ADD": add, "GATE": gate, "PARTS": parts, "PDL": False}
        constexprs |= {} if add or gate else {"other": None}
        constexprs |= {} if add else {"total": None}
        wide = dict.fromkeys(("x", "other", "total"), "*bf16" if gate else "*fp32")
        types = wide | {"weight": "*bf16", "out": "*bf16", "eps": "fp32"}
        yield CompileCase(norm_kernel, signature(norm_kernel, constexprs, types), constexprs, warps, 1)
