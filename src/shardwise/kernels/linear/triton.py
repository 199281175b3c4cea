"""Linear layers on GPUs: weight-streaming sums for a few tokens, tiled products with dequantisation for more.

Legend: T tokens, O out, K in, R rows of a program, C chunks of V elements, S splits of K.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear as torch_linear

from shardwise.checkpoint.weight import Weight
from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear import arrange, dequantise, w8a8
from shardwise.kernels.linear.chunks import chunk_codes, code_sums
from shardwise.kernels.linear.fragments import available
from shardwise.kernels.linear.geometry import linears, per_card
from shardwise.kernels.linear.tiles import (
    COLUMNS,
    FP4_WORDS,
    ROWS,
    Operand,
    Target,
    ask_for_rows,
    coarse_scale,
    operand,
    target_of,
    tile_product,
)
from shardwise.kernels.overlap import after_previous, launch, let_next_come

LIBRARY_TOKENS = 512  # from so many on, a quantised weight is made plain (once, not by every tile) for the library
STREAM_TOKENS = 2  # up to so many, sums in fp32 keep pace with the memory; beyond, tensor cores are needed


@triton.jit(do_not_specialize=["tokens"])
def _stream_kernel(
    x, x_stride, value, fine, coarse, out, tokens, W: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows of the weight, read once, for all of T tokens; asked for before the kernel before this one is done."""
    let_next_come(PDL)
    K: tl.constexpr = W[COLUMNS]
    N: tl.constexpr = K // V
    t_T = tl.arange(0, T)
    o_R = tl.program_id(0) * R + tl.arange(0, R)
    ok_R = o_R < W[ROWS]
    e_1R = tl.zeros((1, R), tl.int32)
    raw, scales = chunk_codes(value, fine, e_1R, o_R[None, :], ok_R[None, :], tl.arange(0, C), V, False, W)
    after_previous(PDL)
    sums_CTR = tl.zeros((C, T, R), tl.float32)
    for first in range(0, N, C):
        c_C = first + tl.arange(0, C)
        at = (c_C * V)[:, None, None] + (t_T.to(tl.int64) * x_stride)[None, :, None] + tl.arange(0, V)[None, None, :]
        ok = (c_C < K // V)[:, None, None] & (t_T < tokens)[None, :, None]
        x_CTV = tl.load(x + at, mask=ok, other=0).to(tl.float32)
        sums_CTR += code_sums(x_CTV, raw, scales, V, W)
        if N > C:  # the next ones; nothing after the last
            raw, scales = chunk_codes(value, fine, e_1R, o_R[None, :], ok_R[None, :], c_C + C, V, False, W)
    y_TR = tl.sum(sums_CTR, 0) * coarse_scale(coarse, e_1R, o_R[None, :], ok_R[None, :], W)
    at = t_T.to(tl.int64)[:, None] * W[ROWS] + o_R[None, :]
    tl.store(out + at, y_TR.to(out.dtype.element_ty), mask=(t_T < tokens)[:, None] & ok_R[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _tiled_kernel(
    x, x_stride, value, fine, coarse, out, tokens, W: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, SPLIT_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of BO rows and BT tokens over one of the splits of K; out is [S, T, O]."""
    let_next_come(PDL)
    K: tl.constexpr = W[COLUMNS]
    tiles_O: tl.constexpr = (W[ROWS] + BO - 1) // BO
    o_O = tl.program_id(0) % tiles_O * BO + tl.arange(0, BO)
    t_T = tl.program_id(0) // tiles_O * BT + tl.arange(0, BT)
    part = tl.program_id(1)
    ok_O, ok_T = o_O < W[ROWS], t_T < tokens
    start = part * SPLIT_K
    e = part * 0
    ask_for_rows(value, e, o_O, ok_O, W, PDL and SPLIT_K >= K)
    after_previous(PDL)
    acc_OT = tile_product(
        x, t_T.to(tl.int64) * x_stride, ok_T, value, fine, e, o_O, ok_O, start, min(start + SPLIT_K, K), BK, W
    )
    acc_OT *= coarse_scale(coarse, e, o_O, ok_O, W)[:, None]
    at = (part.to(tl.int64) * tokens + t_T)[None, :] * W[ROWS] + o_O[:, None]
    tl.store(out + at, acc_OT.to(out.dtype.element_ty), mask=ok_O[:, None] & ok_T[None, :])


@dataclass(frozen=True)
class Stream:
    """A configuration of the streaming kernel. registers: the most of a thread, 0: no limit."""

    R: int
    C: int
    warps: int
    registers: int = 0


@dataclass(frozen=True)
class Tiled:
    """A configuration of the tiled kernel; splits: parts of K that are summed by programs of their own."""

    BO: int
    BT: int
    BK: int
    warps: int
    stages: int
    splits: int = 1


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`."""
    return triton.next_power_of_2(max(n, 1))


def stream_config(of: Operand, tokens: int, gpu: str = "") -> Stream:
    """Rows so that each of 128 threads has some 8 loads of 16 bytes under way, and the card is full of programs.

    gpu: its name, for a choice that was measured.
    """
    found = tuning.choice(gpu, "stream", [of.layout], tokens)
    if found:
        return Stream(*found)
    chunks = max(of.layout[3] // of.chunk, 1)
    C = min(power_of_two(chunks), 256)
    R = max(1, 1024 // C // power_of_two(tokens))
    while R > 1 and of.layout[2] < R * 256:
        R //= 2
    return Stream(min(R, 8), C, 4)


def step_of(of: Operand, most: int) -> int:
    """Columns of one step of a tiled product: `most`, or one fine scale where that is 32 or more and less."""
    fine = of.layout[4]
    return fine if of.kind == 1 and 32 <= fine < most and fine & (fine - 1) == 0 else most


def tiled_config(of: Operand, tokens: int, target: Target, x_bytes: int = 2) -> Tiled:
    """Few tokens: small tiles, many programs, K split. Many: tiles as large as the shared memory allows."""
    roomy = target.shared_kib > 128
    found = tuning.choice(target.name, "tiled", [of.layout], tokens) if x_bytes == 2 else None
    if found:
        return Tiled(found[0], found[1], step_of(of, found[2]), *found[3:])
    if x_bytes > 2:
        BO, BT, BK, warps = 32, 16 if tokens <= 16 else 32, step_of(of, 32), 4
    elif tokens <= 16:
        BO, BT, BK, warps = 32, 16, step_of(of, 128), 4
    elif tokens <= 64:
        BO, BT, BK, warps = 64, power_of_two(tokens), step_of(of, 128 if roomy else 64), 4
    else:
        BO, BT, BK, warps = 128, 128, step_of(of, 64), 8
    programs = -(-of.layout[2] // BO) * -(-tokens // BT)
    splits = 1
    while splits < 8 and programs * splits < 200 and of.layout[3] >= 4 * BK * splits:
        splits *= 2
    stages = 3 if roomy else 2
    return Tiled(BO, BT, BK, warps, stages, splits)


def stream(x_TK: torch.Tensor, of: Operand, out_TO: torch.Tensor, config: Stream, pdl: bool = False) -> None:
    """Writes x @ weight.T for a few tokens."""
    tokens = x_TK.shape[0]
    _stream_kernel[(triton.cdiv(of.layout[2], config.R),)](
        x_TK, x_TK.stride(0), *of.tensors(), out_TO, tokens, of.layout, power_of_two(tokens), config.R, config.C,
        of.chunk, num_warps=config.warps, **launch(pdl),
    )  # fmt: skip


def tiled(x_TK: torch.Tensor, of: Operand, out_dtype: torch.dtype, config: Tiled, pdl: bool = False) -> torch.Tensor:
    """x @ weight.T -> [S, T, O] of splits of K, in fp32 if they are several."""
    tokens, (rows, columns) = x_TK.shape[0], of.layout[2:4]
    steps = triton.cdiv(triton.cdiv(columns, config.BK), config.splits)
    splits = triton.cdiv(columns, steps * config.BK)
    dtype = out_dtype if splits == 1 else torch.float32
    out_STO = torch.empty((splits, tokens, rows), dtype=dtype, device=x_TK.device)
    _tiled_kernel[(triton.cdiv(rows, config.BO) * triton.cdiv(tokens, config.BT), splits)](
        x_TK, x_TK.stride(0), *of.tensors(), out_STO, tokens, of.layout, config.BO, config.BT, config.BK,
        steps * config.BK, num_warps=config.warps, num_stages=config.stages, **launch(pdl),
    )  # fmt: skip
    return out_STO


def linear(
    x_TI: torch.Tensor,
    weight: Weight,
    out_dtype: torch.dtype | None = None,
    target: Target | None = None,
    streamed: bool | None = None,
    pdl: bool = False,
    whole: bool = True,
) -> torch.Tensor:
    """x_TI @ weight_OI.T -> y_TO in `out_dtype` (x's, if None), accumulated in fp32; x may have more leading axes.

    target: the device's, if None; streamed: by which kind of kernel, if it is known which is faster; pdl: see
    overlap.py; whole: if not, the result is [S, ..], parts of the sum that are still to be added.
    Raises TypeError for formats that only the reference has.
    """
    out_dtype = out_dtype or x_TI.dtype
    out_STO = _parts(x_TI, weight, out_dtype, target or target_of(x_TI.device), streamed, pdl)
    if whole:  # in a fixed order
        out_TO = out_STO[0] if len(out_STO) == 1 else out_STO.sum(0).to(out_dtype)
        return out_TO.view(*x_TI.shape[:-1], weight.shape[0])
    return out_STO.view(len(out_STO), *x_TI.shape[:-1], weight.shape[0])


def _parts(
    x_TI: torch.Tensor, weight: Weight, out_dtype: torch.dtype, target: Target, streamed: bool | None, pdl: bool
) -> torch.Tensor:
    """Parts of the product [S, T, O]: one in `out_dtype`, or several in fp32."""
    rows, columns = weight.shape
    x_TK = x_TI.reshape(-1, columns) if columns else x_TI.new_empty((x_TI[..., 0:1].numel(), 0))
    tokens = x_TI.shape[:-1].numel()
    if not tokens or not rows or not columns:
        return torch.zeros((1, tokens, rows), dtype=out_dtype, device=x_TI.device)
    if x_TK.stride(-1) != 1:
        x_TK = x_TK.contiguous()
    of = operand(weight, target.native_fp8)
    if tokens <= STREAM_TOKENS if streamed is None else streamed:
        out_TO = torch.empty((tokens, rows), dtype=out_dtype, device=x_TI.device)
        stream(x_TK, of, out_TO, stream_config(of, tokens, target.name), pdl)
        return out_TO[None]
    if of.kind == 0:
        return _library(x_TK, weight.plain, out_dtype)[None]
    if tokens >= LIBRARY_TOKENS and x_TK.is_cuda and x_TK.element_size() == 2:
        return _library(x_TK, dequantise.dequantised(of, x_TK.dtype), out_dtype)[None]
    return tiled(x_TK, of, out_dtype, tiled_config(of, tokens, target, x_TK.element_size()), pdl)


def arranged(weight: Weight) -> Weight:
    """A bank in NVFP4 with its codes in the order of arrange.py, which takes the place of `weight`; others as they are.

    Only where a device has the kernels that gain most (fragments.py).
    """
    packed = len(weight.shape) == 3 and any(held.stored.packed for held in weight.held)
    if not packed or not available(weight.tensors[0].device) or operand(weight, True).kind != FP4_WORDS.value:
        return weight
    return arrange.arranged(weight)


def _library(x_TK: torch.Tensor, weight_OK: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The vendor's product of plain matrices; other types than x's only meet in fp32."""
    if x_TK.dtype == weight_OK.dtype == out_dtype:
        return torch_linear(x_TK, weight_OK)
    if x_TK.dtype == weight_OK.dtype and out_dtype == torch.float32 and x_TK.is_cuda:
        return torch.mm(x_TK, weight_OK.T, out_dtype=out_dtype)
    return torch_linear(x_TK.float(), weight_OK.float()).to(out_dtype)


def _streams(of: Operand, native_fp8: bool) -> Iterator[tuple[int, Stream, int]]:
    """Tokens, configurations and the shared memory of the cards that are given them; 4 tokens where measured only."""
    for tokens in (1, STREAM_TOKENS):
        yield tokens, stream_config(of, tokens), 0
    for name, kib in tuning.measured(native_fp8):
        for tokens in (1, 4):
            yield tokens, stream_config(of, tokens, name), kib * 1024


def compile_cases(native_fp8: bool = False) -> Iterator[CompileCase]:
    """Every configuration for linears of real models; native_fp8: for devices with e4m3 in hardware only."""
    if native_fp8:
        yield from w8a8.compile_cases()
    yield from dequantise.compile_cases(native_fp8)
    for of, types in linears(native_fp8):
        kinds = types | {"x": "*bf16", "out": "*bf16"}
        for tokens, chosen, shared_bytes in _streams(of, native_fp8):
            constexprs = {"W": of.layout, "T": tokens, "R": chosen.R, "C": chosen.C, "V": of.chunk, "PDL": False}
            signed = signature(_stream_kernel, constexprs, kinds)
            yield CompileCase(_stream_kernel, signed, constexprs, chosen.warps, 1, shared_bytes)
        sizes = (16, 64, 1024) if of.kind else ()
        choices = per_card(
            lambda card, of=of, sizes=sizes: [
                tiled_config(of, n, card) for n in (*sizes, *((128,) if card.name and sizes else ()))
            ],
            native_fp8,
        )
        for config, shared_bytes in choices:
            step = -(-of.layout[3] // config.BK // config.splits) * config.BK
            constexprs = {"W": of.layout, "BO": config.BO, "BT": config.BT, "BK": config.BK, "SPLIT_K": step}
            constexprs |= {"PDL": False}
            signed = signature(_tiled_kernel, constexprs, kinds | {"out": "*fp32" if config.splits > 1 else "*bf16"})
            yield CompileCase(_tiled_kernel, signed, constexprs, config.warps, config.stages, shared_bytes)
