"""Several linears of one input, normed first or not: one launch for a few tokens; for more, one product after another.

Legend: T tokens, H hidden (columns of the weights), O out.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from shardwise.checkpoint.weight import Weight
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.conv.triton import causal_conv
from shardwise.kernels.linear.geometry import Case, case
from shardwise.kernels.linear.tiles import Operand, Target, operand, target_of
from shardwise.kernels.linear.triton import Stream, linear, power_of_two, step_of, stream_config
from shardwise.kernels.linears.reference import Conv
from shardwise.kernels.linears.stream import norm_linears_kernel
from shardwise.kernels.linears.tile import tile_linears_kernel
from shardwise.kernels.norm.triton import add_rms_norm, rms_norm
from shardwise.kernels.overlap import launch

PARTS = 3  # weights of one launch at most
STREAM_TOKENS = 1  # up to so many, sums by ordinary arithmetic; beyond, by matrix units
NORM_TOKENS = 4  # up to so many, each program norms its input itself: what it reads for that is little yet
TILE_TOKENS = 16  # beyond, the products are large enough to be launched one by one


@dataclass(frozen=True)
class Plan:
    """How one launch goes: which kernel, what it is compiled for, how many programs it has."""

    kernel: Any
    constexprs: dict[str, Any]
    programs: int
    warps: int
    stages: int


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
    """As the reference; with few tokens the norm is not rounded between.

    target: the device's, if None; pdl: see overlap.py.
    """
    target = target or target_of(residual_TH.device)
    tokens = residual_TH.shape[0]
    dtypes = [dtype or norm_H.dtype for dtype in out_dtypes]
    if 0 < tokens <= NORM_TOKENS and _joinable(weights, conv, tokens):
        added_TH = None if added_TH is None else added_TH.contiguous()
        total_TH = residual_TH if added_TH is None else torch.empty_like(residual_TH.contiguous())
        outputs = _joint(residual_TH.contiguous(), added_TH, norm_H, total_TH, eps, weights, dtypes, conv, target, pdl)
        return outputs, total_TH
    if added_TH is None:
        x_TH = rms_norm(residual_TH, norm_H, eps)
    else:
        x_TH, residual_TH = add_rms_norm(added_TH, residual_TH, norm_H, eps)
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
    tokens = x_TH.shape[0]
    dtypes = [dtype or x_TH.dtype for dtype in out_dtypes]
    alike = all(weight.tensors[0].dtype in (x_TH.dtype, torch.uint8, torch.float8_e4m3fn) for weight in weights)
    if 0 < tokens <= TILE_TOKENS and (alike or tokens <= STREAM_TOKENS) and _joinable(weights, conv, tokens):
        return _joint(x_TH.contiguous(), None, None, None, 0.0, weights, dtypes, conv, target, pdl)
    outputs = [linear(x_TH, weight, dtype, target) for weight, dtype in zip(weights, dtypes, strict=True)]
    if conv is not None:
        outputs[0] = causal_conv(outputs[0], conv.weight_CW, conv.state_RCW1, conv.seqs)
    return outputs


def _joinable(weights: Sequence[Weight], conv: Conv | None, tokens: int) -> bool:
    """Whether one launch can do it: every weight has rows, and the convolution is of one token a sequence."""
    steps = conv is None or conv.seqs.decodes == conv.seqs.count == tokens
    return steps and len(weights) <= PARTS and all(weight.shape[0] and weight.shape[1] for weight in weights)


def _joint(
    x_TH: torch.Tensor,
    added_TH: torch.Tensor | None,
    norm_H: torch.Tensor | None,
    total_TH: torch.Tensor | None,
    eps: float,
    weights: Sequence[Weight],
    dtypes: Sequence[torch.dtype],
    conv: Conv | None,
    target: Target,
    pdl: bool,
) -> list[torch.Tensor]:
    """All in one launch; without norm_H, of x itself."""
    operands = [operand(weight, target.native_fp8) for weight in weights]
    tokens = x_TH.shape[0]
    outputs = [
        torch.empty((tokens, weight.shape[0]), dtype=dtype, device=x_TH.device)
        for weight, dtype in zip(weights, dtypes, strict=True)
    ]
    taps = conv.weight_CW.shape[1] if conv else 0
    # An unlike plain weight meets a folded norm in fp32, which the streaming kernel does.
    unlike = norm_H is not None and any(of.kind == 0 and of.value.dtype != norm_H.dtype for of in operands)
    wide = (x_TH if norm_H is None else norm_H).element_size() > 2
    plan = choose(operands, tokens, norm_H is not None, added_TH is not None, taps, target, wide, unlike)
    parts = list(zip(operands, outputs, strict=True))
    tensors = [tensor for of, out in parts + parts[:1] * (PARTS - len(parts)) for tensor in (*of.tensors(), out)]
    convolution = (x_TH,) * 4
    if conv is not None:
        convolution = (conv.weight_CW, conv.state_RCW1, conv.seqs.context_S, conv.seqs.state_rows_S)
    plan.kernel[(plan.programs,)](
        x_TH, x_TH if added_TH is None else added_TH, x_TH if norm_H is None else norm_H,
        x_TH if total_TH is None else total_TH, tokens, eps, *convolution, *tensors, **plan.constexprs,
        num_warps=plan.warps, num_stages=plan.stages, **launch(pdl),
    )  # fmt: skip
    return outputs


def choose(
    operands: Sequence[Operand],
    tokens: int,
    normed: bool,
    added: bool,
    taps: int,
    target: Target,
    wide: bool = False,
    stream: bool = False,
) -> Plan:
    """The launch for these weights. wide: activations have 4 bytes; stream: not by matrix units, whatever `tokens`."""
    stream = stream or tokens <= STREAM_TOKENS
    columns = operands[0].layout[3]
    found: dict[str, Any] = {"NORM": normed, "ADD": added, "TAPS": taps, "WINDOW": power_of_two(taps)}
    found |= {"BLOCK": min(power_of_two(columns), 2048), "T": power_of_two(tokens) if stream else 16}
    rows = 0
    for n in range(PARTS):
        of = operands[min(n, len(operands) - 1)]
        if stream:
            chosen = normed_config(of, tokens) if normed else stream_config(of, tokens)
            found |= {f"W{n}": of.layout, f"R{n}": chosen.R, f"C{n}": chosen.C, f"V{n}": of.chunk}
        else:
            R, C = _tile(of, target, wide)
            found |= {f"W{n}": of.layout, f"R{n}": R, f"C{n}": C}
        if n < len(operands):
            rows += triton.cdiv(of.layout[2], found[f"R{n}"])
        else:
            found[f"R{n}"] = 0
    if stream:
        return Plan(norm_linears_kernel, found, rows + int(added), 4, 1)
    stages = 2 if wide else 4 if target.shared_kib > 128 else 3
    return Plan(tile_linears_kernel, found, rows + int(added), 4, stages)


def normed_config(of: Operand, tokens: int) -> Stream:
    """As stream_config, but never of few rows: the input and the norm are five times a row, though in the cache."""
    chosen = stream_config(of, tokens)
    return Stream(4, min(chosen.C, 128), 4) if of.layout[2] >= 1024 else Stream(2, min(chosen.C, 128), 4)


def _tile(of: Operand, target: Target, wide: bool) -> tuple[int, int]:
    """Rows, and columns a step: four steps of some 16 KiB of codes where the shared memory is large."""
    roomy = target.shared_kib > 128
    rows = 32 if of.layout[2] >= 8192 else 16
    most = min(power_of_two(of.layout[3]), 32 if wide else 256 if roomy else 128)
    return rows, max(16, step_of(of, most))


def compile_cases(native_fp8: bool = False) -> Iterator[CompileCase]:
    """The projections of GatedDeltaNet and of attention in 35B-A3B, in the formats of checkpoints."""
    plain = case(64, 2048, "bf16", native_fp8)
    for kind in ("bf16", "fp8_block", "nvfp4"):
        delta = (case(8192, 2048, kind, native_fp8), case(4096, 2048, kind, native_fp8), plain)
        queries, out = (case(9216, 2048, kind, native_fp8),), (case(2048, 4096, kind, native_fp8),)
        for tokens, normed in ((1, True), (4, True), (16, False)):
            for kib in (64, 99, 227):
                target = Target(native_fp8, kib)
                yield _case(delta, tokens, normed, 4, target)
                yield _case(queries if normed else out, tokens, normed, 0, target)


def _case(cases: Sequence[Case], tokens: int, normed: bool, taps: int, target: Target) -> CompileCase:
    plan = choose([each.of for each in cases], tokens, normed, normed, taps, target)
    types = dict.fromkeys(("x", "added", "total"), "*fp32" if normed else "*bf16") | {"norm": "*bf16"}
    types |= {"conv": "*bf16", "state": "*bf16", "context": "*i32", "rows": "*i32", "eps": "fp32"}
    for n in range(PARTS):
        found = cases[n] if n < len(cases) else cases[0]
        types |= {f"{name}{n}": kind for name, kind in found.types.items()}
        types |= {f"out{n}": "*fp32" if n == 2 else "*bf16"}
    constexprs = plan.constexprs | {"PDL": target.shared_kib > 128}
    signed = signature(plan.kernel, constexprs, types)
    return CompileCase(plan.kernel, signed, constexprs, plan.warps, plan.stages, target.shared_kib * 1024)
