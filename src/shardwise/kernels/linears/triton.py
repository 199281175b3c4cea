"""Several linears of one input, normed first or not: one launch for a few tokens; for more, one product after another.

One token streams the weights past its norm. From two on, the norm is a launch of its own, and matrix units do the sums.
Nothing is compiled for a number of tokens.

Legend: T tokens, H hidden (columns of the weights), O out.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton

from shardwise.checkpoint.weight import Weight
from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.conv.triton import causal_conv
from shardwise.kernels.linear.fragments import words
from shardwise.kernels.linear.geometry import HEADS, Case, case
from shardwise.kernels.linear.halves import halve_rows
from shardwise.kernels.linear.tiles import Operand, Target, operand, target_of
from shardwise.kernels.linear.triton import Stream, linear, power_of_two, step_of, stream_config
from shardwise.kernels.linears import fragments, held, hopper, resident, wide, wide_config
from shardwise.kernels.linears.neighbours import adjoin as adjoin
from shardwise.kernels.linears.neighbours import product
from shardwise.kernels.linears.reference import Conv
from shardwise.kernels.linears.stream import norm_linears_kernel
from shardwise.kernels.linears.tile import tile_linears_kernel
from shardwise.kernels.norm.reference import summed
from shardwise.kernels.norm.triton import add_rms_norm, rms_norm
from shardwise.kernels.overlap import launch

PARTS = 3  # weights of one launch at most
STREAMED, BY_TILES = 0, 1  # first numbers of a choice that was measured; any other: single products
FEW_ROWS_TILE = 16  # rows of a program for a weight of few rows beside larger ones
TILE_TOKENS = 16  # beyond, products are launched one by one unless measured, and a convolution by itself
NEIGHBOURS_TOKENS = 17, 512  # weights that lie one behind another are one product for these, as measured on an H200
FEW_ROWS, FEW_ROWS_TOKENS = 1024, 128  # one weight of so few rows is worth a launch of ours for 5 to so many tokens


class Tile(NamedTuple):
    """A configuration of the kernel for some tokens: BO rows, BT tokens, BK columns a step."""

    BO: int
    BT: int
    BK: int
    warps: int
    stages: int


MANY_TOKENS_TILE = Tile(64, 64, 64, 4, 3)  # 48 KiB of shared memory; the input is read once for 64 rows


def norm_linears(
    added_TH: torch.Tensor | None,
    residual_TH: torch.Tensor,
    norm_H: torch.Tensor,
    eps: float,
    weights: Sequence[Weight],
    out_dtypes: Sequence[torch.dtype | None],
    conv: Conv | None = None,
    target: Target | None = None,
    pdl: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """As the reference; for one token the norm is not rounded between.

    target: the device's, if None; pdl: see overlap.py.
    """
    target = target or target_of(residual_TH.device)
    dtypes = [dtype or norm_H.dtype for dtype in out_dtypes]
    if added_TH is None:
        return linears(rms_norm(residual_TH, norm_H, eps, pdl), weights, dtypes, conv, target, pdl), residual_TH
    if residual_TH.shape[0] == 1 and _joinable(weights, conv, 1):
        total_TH = torch.empty_like(residual_TH, memory_format=torch.contiguous_format)
        normed = summed(added_TH, residual_TH.dim()).contiguous(), norm_H, total_TH, eps
        return _stream(residual_TH.contiguous(), normed, weights, dtypes, conv, target, pdl), total_TH
    x_TH, residual_TH = add_rms_norm(added_TH, residual_TH, norm_H, eps, pdl)
    return linears(x_TH, weights, dtypes, conv, target, pdl), residual_TH


def linears(
    x_TH: torch.Tensor,
    weights: Sequence[Weight],
    out_dtypes: Sequence[torch.dtype | None],
    conv: Conv | None = None,
    target: Target | None = None,
    pdl: bool = False,
) -> list[torch.Tensor]:
    """As the reference. target: the device's, if None; pdl: see overlap.py."""
    target = target or target_of(x_TH.device)
    dtypes = [dtype or x_TH.dtype for dtype in out_dtypes]
    joined = _joined(x_TH, weights, dtypes, conv, target, pdl)
    if joined is not None:
        return joined
    outputs = None
    if conv is not None and x_TH.shape[0] > TILE_TOKENS:
        outputs = _joined(x_TH, weights, dtypes, None, target, pdl)
    if outputs is None:
        least, most = NEIGHBOURS_TOKENS
        outputs = product(x_TH, weights, dtypes) if least <= x_TH.shape[0] <= most else []
        rest = zip(weights[len(outputs) :], dtypes[len(outputs) :], strict=True)
        outputs += [_single(x_TH, weight, dtype, target, pdl) for weight, dtype in rest]
    if conv is not None:
        outputs[0] = causal_conv(outputs[0], conv.weight_CW, conv.state_RCW1, conv.seqs)
    return outputs


def _single(x_TH: torch.Tensor, weight: Weight, dtype: torch.dtype, target: Target, pdl: bool) -> torch.Tensor:
    """One of several weights that are not joined; a plain one of few rows as if it were alone."""
    if all(weight.shape):
        operands = [operand(weight, target.native_fp8)]
        split = fragments.split_config(operands, x_TH, target) if fragments.few_plain_rows(operands) else None
        if split is not None:
            return _split(x_TH.contiguous(), operands, [dtype], None, split, pdl)[0]
    return linear(x_TH, weight, dtype, target, _streamed(x_TH, weight, target), pdl)


def linear_parts(x_TI: torch.Tensor, weight: Weight, target: Target | None = None, pdl: bool = False) -> torch.Tensor:
    """As the reference. target: the device's, if None; pdl: see overlap.py."""
    target = target or target_of(x_TI.device)
    if all(weight.shape):
        of = operand(weight, target.native_fp8)
        config = held.held_config(of, x_TI)
        if config is not None:
            return held.held_linear(x_TI.contiguous(), of, config, pdl)
    joined = _joined(x_TI, [weight], [torch.float32], None, target, pdl, parts=True)
    if joined is not None:
        return joined[0] if joined[0].dim() == 3 else joined[0][None]
    return linear(x_TI, weight, torch.float32, target, _streamed(x_TI, weight, target), pdl, whole=False)


def _joined(
    x_TH: torch.Tensor,
    weights: Sequence[Weight],
    dtypes: Sequence[torch.dtype],
    conv: Conv | None,
    target: Target,
    pdl: bool,
    parts: bool = False,
) -> list[torch.Tensor] | None:
    """All in one launch, where one of our kernels is to do it; that of many tokens without a convolution only. parts:
    whether it may be parts of the sum, [S, T, O]."""
    tokens = x_TH.shape[0]
    if not _joinable(weights, conv, tokens):
        return None
    operands = [operand(weight, target.native_fp8) for weight in weights]
    split = fragments.split_config(operands, x_TH, target)
    if tokens == 1 and split is None and (pdl or len(weights) > 1):
        return _stream(x_TH.contiguous(), None, weights, dtypes, conv, target, pdl)
    by_rows = hopper.rows_config(operands, x_TH, target.name)
    if by_rows is not None and (by_rows.parts == 1 or parts):
        return hopper.hopper_linears(x_TH.contiguous(), operands, dtypes, conv, by_rows, pdl)
    early = resident.resident_config(operands, weights, x_TH, dtypes, target)
    if early is not None:
        return resident.resident_linears(x_TH.contiguous(), operands, dtypes, conv, early, pdl)
    halved = wide_config.wide_config(operands, x_TH, target.name, parts) if conv is None else None
    if halved is not None:
        rows = halve_rows(x_TH.contiguous(), wide_config.room(tokens), pdl)
        return wide.wide_linears(rows, operands, dtypes, halved, pdl)
    if split is not None:
        return _split(x_TH.contiguous(), operands, dtypes, conv, split, pdl)
    found = _choice(x_TH, weights, target) if conv is None or tokens <= TILE_TOKENS else None
    return None if found is None else _tile(x_TH.contiguous(), weights, dtypes, conv, target, found, pdl)


def _joinable(weights: Sequence[Weight], conv: Conv | None, tokens: int) -> bool:
    """Whether one launch can do it: every weight has rows, and the convolution is of one token a sequence."""
    steps = conv is None or conv.seqs.decodes == conv.seqs.count == tokens
    return steps and 0 < len(weights) <= PARTS and all(weight.shape[0] and weight.shape[1] for weight in weights)


def _choice(x_TH: torch.Tensor, weights: Sequence[Weight], target: Target) -> Tile | None:
    """How the kernel for some tokens is to do it, or None where single products are faster."""
    tokens, wide = x_TH.shape[0], x_TH.element_size() > 2
    if tokens == 1 or not all(
        weight.tensors[0].dtype in (x_TH.dtype, torch.uint8, torch.float8_e4m3fn) for weight in weights
    ):
        return None
    operands = [operand(weight, target.native_fp8) for weight in weights]
    found = None if wide else tuning.choice(target.name, "linears", [of.layout for of in operands], tokens)
    if found:
        return Tile(*found[1:]) if found[0] == BY_TILES else None
    several = len(weights) > 1 and tokens <= TILE_TOKENS
    few_rows = len(weights) == 1 and weights[0].shape[0] <= FEW_ROWS and tokens > 4
    if few_rows and tokens > FEW_ROWS_TOKENS:  # libraries are slow at outputs that are not aligned
        return MANY_TOKENS_TILE if weights[0].shape[0] % 8 and not wide else None
    return tile_config(operands, target, wide) if several or few_rows else None


def _streamed(x_TH: torch.Tensor, weight: Weight, target: Target) -> bool | None:
    """Whether the weight is to be streamed, if that was measured."""
    if not target.name or x_TH.element_size() > 2 or not all(weight.shape):
        return None
    layout = operand(weight, target.native_fp8).layout
    found = tuning.choice(target.name, "linears", [layout], x_TH.shape[0]) if x_TH.shape[0] > 1 else None
    return None if found is None else found[0] == STREAMED


def _stream(
    x_TH: torch.Tensor,
    normed: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float] | None,
    weights: Sequence[Weight],
    dtypes: Sequence[torch.dtype],
    conv: Conv | None,
    target: Target,
    pdl: bool,
) -> list[torch.Tensor]:
    """One token, all in one launch. normed: what is added to x, the norm, where the sum goes, and eps."""
    operands = [operand(weight, target.native_fp8) for weight in weights]
    outputs, tensors, convolution = _arguments(x_TH, operands, dtypes, conv)
    added_TH, norm_H, total_TH, eps = normed or (x_TH, x_TH, x_TH, 0.0)
    constexprs, first = stream_constants(
        operands, normed is not None, conv.weight_CW.shape[1] if conv else 0, target.name
    )
    programs = sum(triton.cdiv(of.layout[2], constexprs[f"R{n}"]) for n, of in enumerate(operands))
    norm_linears_kernel[(programs + int(normed is not None),)](
        x_TH, added_TH, norm_H, total_TH, eps, *convolution, *tensors, **constexprs,
        **launch(pdl, first.registers), num_warps=first.warps,
    )  # fmt: skip
    return outputs


def _tile(
    x_TH: torch.Tensor,
    weights: Sequence[Weight],
    dtypes: Sequence[torch.dtype],
    conv: Conv | None,
    target: Target,
    config: Tile,
    pdl: bool,
) -> list[torch.Tensor]:
    """Some tokens, all in one launch."""
    operands = [operand(weight, target.native_fp8) for weight in weights]
    outputs, tensors, convolution = _arguments(x_TH, operands, dtypes, conv)
    constexprs = tile_constants(operands, conv.weight_CW.shape[1] if conv else 0, config)
    programs = sum(triton.cdiv(of.layout[2], constexprs[f"R{n}"]) for n, of in enumerate(operands))
    tile_linears_kernel[(programs, triton.cdiv(x_TH.shape[0], constexprs["T"]))](
        x_TH, x_TH.shape[0], *convolution, *tensors, **constexprs, **launch(pdl), num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip
    return outputs


def _split(
    x_TH: torch.Tensor,
    operands: Sequence[Operand],
    dtypes: Sequence[torch.dtype],
    conv: Conv | None,
    config: fragments.Split,
    pdl: bool,
) -> list[torch.Tensor]:
    """Some tokens, all in one launch, with codes straight from memory."""
    views = [Operand(*words(of), of.layout) for of in operands]
    outputs, tensors, convolution = _arguments(x_TH, views, dtypes, conv)
    constexprs = fragments.split_constants(operands, conv.weight_CW.shape[1] if conv else 0, config)
    programs = sum(triton.cdiv(of.layout[2], config.BM) for of in operands)
    fragments.fragment_linears_kernel[(programs, triton.cdiv(x_TH.shape[0], config.BT))](
        x_TH, x_TH.shape[0], *convolution, *tensors, **constexprs, **launch(pdl), num_warps=config.warps
    )
    return outputs


def _arguments(
    x_TH: torch.Tensor, operands: Sequence[Operand], dtypes: Sequence[torch.dtype], conv: Conv | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Outputs; the tensors of PARTS weights, each with its output (the first stands for those that are not there)."""
    shapes = [(x_TH.shape[0], of.layout[2]) for of in operands]
    outputs = [torch.empty(shape, dtype=dtype, device=x_TH.device) for shape, dtype in zip(shapes, dtypes, strict=True)]
    parts = list(zip(operands, outputs, strict=True))
    tensors = [tensor for of, out in parts + parts[:1] * (PARTS - len(parts)) for tensor in (*of.tensors(), out)]
    return outputs, tensors, conv.tensors() if conv else (x_TH,) * 4


def stream_constants(
    operands: Sequence[Operand], normed: bool, taps: int, gpu: str = ""
) -> tuple[dict[str, Any], Stream]:
    """What the streaming kernel is compiled for, and the first weight's configuration: warps and registers of all."""
    found: dict[str, Any] = {"NORM": normed, "ADD": normed, "TAPS": taps, "WINDOW": power_of_two(taps)}
    configs = [normed_config(of, 1, gpu) if normed else stream_config(of, 1, gpu) for of in operands]
    for n in range(PARTS):
        of, chosen = operands[min(n, len(operands) - 1)], configs[min(n, len(operands) - 1)]
        rows = chosen.R if n < len(operands) else 0
        found |= {f"W{n}": of.layout, f"R{n}": rows, f"C{n}": chosen.C, f"V{n}": of.chunk}
    return found | {"BLOCK": min(power_of_two(operands[0].layout[3]), 2048)}, configs[0]


def tile_constants(operands: Sequence[Operand], taps: int, config: Tile) -> dict[str, Any]:
    """What the kernel for some tokens is compiled for."""
    found: dict[str, Any] = {"TAPS": taps, "WINDOW": power_of_two(taps), "T": config.BT}
    for n in range(PARTS):
        of = operands[min(n, len(operands) - 1)]
        rows = min(config.BO, FEW_ROWS_TILE) if len(operands) > 1 and of.layout[2] < FEW_ROWS else config.BO
        step = max(16, step_of(of, min(power_of_two(of.layout[3]), config.BK)))
        found |= {f"W{n}": of.layout, f"R{n}": rows if n < len(operands) else 0, f"C{n}": step}
    return found


def normed_config(of: Operand, tokens: int, gpu: str = "") -> Stream:
    """As stream_config, but never of few rows: the input and the norm are five times a row, though in the cache."""
    found = tuning.choice(gpu, "normed", [of.layout], tokens)
    if found:
        return Stream(*found)
    chosen = stream_config(of, tokens)
    rows = 2 if of.layout[2] < FEW_ROWS else 8 if of.kind else 4  # codes: the input is several times as many bytes
    return Stream(rows, min(chosen.C, 256), 4)


def tile_config(operands: Sequence[Operand], target: Target, wide: bool) -> Tile:
    """Rows, and columns a step: four steps of some 16 KiB of codes where the shared memory is large."""
    roomy = target.shared_kib > 128
    rows = 32 if operands[0].layout[2] >= 8192 else 16
    return Tile(rows, 16, 32 if wide else 256 if roomy else 128, 4, 2 if wide else 4 if roomy else 3)


def _measured_cases(cases: Sequence[Case], taps: int, gpu: str, kib: int) -> Iterator[CompileCase]:
    """Kernels for some tokens as measured best on `gpu`, which has `kib` of shared memory."""
    operands = [each.of for each in cases]
    for tokens in tuning.BUCKETS:
        split = tuning.choice(gpu, "split", [of.layout for of in operands], tokens)
        if split:
            constexprs = fragments.split_constants(operands, taps, fragments.Split(*split)) | {"PDL": False}
            yield _case(fragments.fragment_linears_kernel, cases, constexprs, (split[2], 1), kib * 1024)
        found = tuning.choice(gpu, "linears", [of.layout for of in operands], tokens)
        if found and found[0] == BY_TILES:
            config = Tile(*found[1:])
            constexprs = tile_constants(operands, taps if tokens <= TILE_TOKENS else 0, config) | {"PDL": False}
            yield _case(tile_linears_kernel, cases, constexprs, config[-2:], kib * 1024)


def compile_cases(native_fp8: bool = False) -> Iterator[CompileCase]:
    """The projections of GatedDeltaNet and of attention in 35B-A3B, in the formats of checkpoints."""
    plain, router = case(64, 2048, "bf16", native_fp8), case(257, 2048, "bf16", native_fp8)
    for kind in ("bf16", "fp8_block", "nvfp4"):
        delta = (case(8192, 2048, kind, native_fp8), case(4096, 2048, kind, native_fp8), plain)
        for cases, taps in ((delta, 4), ((case(9216, 2048, kind, native_fp8),), 0)):
            operands = [each.of for each in cases]
            for name, kib in (("", 0), *tuning.measured(native_fp8)):
                constexprs, first = stream_constants(operands, True, taps, name)
                yield _case(norm_linears_kernel, cases, constexprs | {"PDL": False}, (first.warps, 1), kib * 1024)
                yield from _measured_cases(cases, taps, name, kib)
        half = *(case(rows, 2048, kind, native_fp8) for rows in (4096, 2048)), case(32, 2048, "bf16", native_fp8)
        for name, kib in tuning.measured(native_fp8):
            single = case(2048, 4096, kind, native_fp8), *(case(head, 2048, kind, native_fp8) for head in HEADS)
            for each in (*single, router):
                yield from _measured_cases((each,), 0, name, kib)
            yield from _measured_cases(half, 4, name, kib)  # of one of two ranks
    if not native_fp8:
        yield from held.compile_cases()
        yield from resident.compile_cases()
        yield from hopper.compile_cases()
        yield from wide.compile_cases()
    constexprs = tile_constants([router.of], 0, MANY_TOKENS_TILE) | {"PDL": False}
    yield _case(tile_linears_kernel, (router,), constexprs, MANY_TOKENS_TILE[-2:], 0)
    for kind in ("fp8_block", "nvfp4"):
        for cases, taps in (
            ((case(8192, 2048, kind, native_fp8), plain), 4),
            ((case(2048, 4096, kind, native_fp8),), 0),
        ):
            operands = [each.of for each in cases]
            for tokens in (4, 16):
                config = fragments.split_rule(sum(of.layout[2] for of in operands), tokens)
                constexprs = fragments.split_constants(operands, taps, config) | {"PDL": False}
                yield _case(fragments.fragment_linears_kernel, cases, constexprs, (config.warps, 1), 0)
    for few, tokens in () if native_fp8 else ((router, 16), (router, 128), (plain, 128)):
        config = fragments.few_rows_rule(few.of.layout[2], tokens)
        constexprs = fragments.split_constants([few.of], 0, config) | {"PDL": False}
        yield _case(fragments.fragment_linears_kernel, (few,), constexprs, (config.warps, 1), 0)
    for kind in ("bf16", "fp8_block", "nvfp4"):
        delta = (case(8192, 2048, kind, native_fp8), case(4096, 2048, kind, native_fp8), plain)
        for kib in (64, 99, 227):
            for cases, taps in ((delta, 4), ((router,), 0)):
                config = tile_config([each.of for each in cases], Target(native_fp8, kib), False)
                constexprs = tile_constants([each.of for each in cases], taps, config) | {"PDL": kib > 128}
                yield _case(tile_linears_kernel, cases, constexprs, config[-2:], kib * 1024)


def _case(
    kernel: Any, cases: Sequence[Case], constexprs: dict[str, Any], options: tuple[int, int], shared_bytes: int
) -> CompileCase:
    wide = "*fp32" if kernel is norm_linears_kernel else "*bf16"
    types = dict.fromkeys(("x", "added", "total"), wide) | {"norm": "*bf16"}
    types |= {"conv": "*bf16", "state": "*bf16", "context": "*i32", "rows": "*i32", "eps": "fp32"}
    for n in range(PARTS):
        found = cases[n] if n < len(cases) else cases[0]
        types |= {f"{name}{n}": kind for name, kind in found.types.items()}
        types |= {f"out{n}": "*fp32" if n == 2 else "*bf16"}
        if kernel is fragments.fragment_linears_kernel:
            types |= {f"value{n}": "*i32"}
    return CompileCase(kernel, signature(kernel, constexprs, types), constexprs, *options, shared_bytes)
