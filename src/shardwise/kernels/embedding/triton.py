"""Embedding look-up as a Triton kernel.

Legend: T tokens, V rows of the table on this rank, H hidden.
"""
# pyright: reportCallIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature

BLOCK = 1024  # columns of a program


@triton.jit(do_not_specialize_on_alignment=["ids"])
def embed_kernel(ids, last, weight, out, first_row, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr):
    """A part of a row: row ids - first_row of the table, or zeros outside it. LAST: an id below 0 is in `last`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    if LAST:
        row = tl.load(last - row, mask=row < 0, other=row).to(tl.int64)
    row -= first_row
    width = tl.where((row >= 0) & (row < rows), WIDTH, 0)
    found = tl.load(weight + row * WIDTH + column, mask=column < width, other=0.0)
    tl.store(out + token * WIDTH + column, found.to(out.dtype.element_ty), mask=column < WIDTH)


def embed(
    ids_T: torch.Tensor,
    weight_VH: torch.Tensor,
    first_row: int,
    last_R: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As the reference."""
    tokens, (rows, width) = ids_T.shape[0], weight_VH.shape
    x_TH = torch.empty(tokens, width, dtype=dtype or weight_VH.dtype, device=weight_VH.device)
    if x_TH.numel():
        grid = (tokens, triton.cdiv(width, BLOCK))
        embed_kernel[grid](
            ids_T, ids_T if last_R is None else last_R, weight_VH.contiguous(), x_TH, first_row, rows, WIDTH=width,
            BLOCK=BLOCK, LAST=last_R is not None, num_warps=4,
        )  # fmt: skip
    return x_TH


def compile_cases() -> Iterator[CompileCase]:
    """The one configuration."""
    constexprs = {"WIDTH": 2048, "BLOCK": BLOCK, "LAST": True}
    types = {"ids": "*i64", "last": "*i64", "weight": "*bf16", "out": "*fp32"}
    yield CompileCase(embed_kernel, signature(embed_kernel, constexprs, types), constexprs, 4, 1)
