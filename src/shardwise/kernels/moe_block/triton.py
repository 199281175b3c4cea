"""A block of experts on GPUs: two or three launches for a few tokens; for more, the single operations and one sum.

Legend: T tokens, H hidden, E experts, I intermediate, k experts a token, M = T * k pairs.
"""
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton

from shardwise.checkpoint.weight import Weight
from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.linear.fragments import fits
from shardwise.kernels.linear.geometry import banks, case
from shardwise.kernels.linear.tiles import Operand, Target, operand, target_of
from shardwise.kernels.linear.triton import Stream, power_of_two
from shardwise.kernels.linears.triton import linears, normed_config
from shardwise.kernels.moe.streamed import down_config, gate_up_config
from shardwise.kernels.moe.triton import STREAM_TOKENS, moe, outputs, route, silu_mul
from shardwise.kernels.moe_block import combine, fragments, hopper, matched, pairs, persistent, rank
from shardwise.kernels.moe_block.banks import Banks
from shardwise.kernels.moe_block.reference import Routed, Then
from shardwise.kernels.moe_block.stream import down_kernel, gate_up_kernel, gated_add_kernel, norm_route_kernel
from shardwise.kernels.norm.reference import summed
from shardwise.kernels.norm.triton import add_rms_norm, rms_norm
from shardwise.kernels.overlap import launch

MATCHED_TOKENS = 32  # up to so many, a tile has a column for every token; beyond, pairs are sorted
CODES_STREAM_TOKENS = 4  # e2m1 is faster in sums of fp32 than in tiles, up to so many in one launch with the shared one
# By kind of weight: from how many tokens on codes go straight to registers, up to how many.
FRAGMENT_TOKENS = {1: (2, 160), 3: (3, 512), 4: (3, 512)}
# By kind of weight: up to how many sorted pairs and the shared expert go through the same launches.
SORTED_TOKENS = {0: 512, 1: 512}
STREAMED, MATCHED, APART, FRAGMENTS, SORTED = 0, 1, 2, 3, 4  # ways of a block, as measured choices call them
NORM_WIDTH = 16384  # a program normalises a token at a time, in registers
GATED_ADD_BLOCK = 1024


def norm_route(
    added_TH: torch.Tensor | None,
    residual_TH: torch.Tensor,
    norm_H: torch.Tensor,
    eps: float,
    routers: Sequence[Weight],
    top_k: int,
    arrivals: torch.Tensor | None = None,
    target: Target | None = None,
    pdl: bool = False,
) -> Routed:
    """As the reference. target: the device's, if None; pdl: see overlap.py."""
    tokens, hidden = residual_TH.shape
    fused = tokens == 1 and hidden <= NORM_WIDTH and added_TH is not None
    if not fused or arrivals is None or len(routers) > 1 or top_k < 1:
        if added_TH is None:
            x_TH = rms_norm(residual_TH, norm_H, eps, pdl)
        else:
            x_TH, residual_TH = add_rms_norm(added_TH, residual_TH, norm_H, eps, pdl)
        return x_TH, residual_TH, *route_linears(x_TH, routers, top_k, target, pdl)
    target = target or target_of(residual_TH.device)
    of, device = operand(routers[0], target.native_fp8), residual_TH.device
    added_TH = summed(added_TH, residual_TH.dim()).contiguous()  # pyright: ignore[reportArgumentType]
    residual_TH = residual_TH.contiguous()
    total_TH = torch.empty_like(residual_TH)
    x_TH = torch.empty((tokens, hidden), dtype=norm_H.dtype, device=device)
    logits_TE1 = torch.empty((tokens, of.layout[2]), dtype=torch.float32, device=device)
    weights_Tk = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    ids_Tk = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    constexprs, warps = _route_constants(of, top_k, target.name)
    norm_route_kernel[(triton.cdiv(of.layout[2], constexprs["R"]) + tokens,)](
        residual_TH, added_TH, norm_H, total_TH, x_TH, *of.tensors(), logits_TE1,
        weights_Tk, ids_Tk, arrivals, eps, of.layout[2] - 1, **constexprs, num_warps=warps,
        **launch(pdl),
    )  # fmt: skip
    return x_TH, total_TH, weights_Tk, ids_Tk, logits_TE1[:, -1:]


def route_linears(
    x_TH: torch.Tensor, routers: Sequence[Weight], top_k: int, target: Target | None = None, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference. target: the device's, if None; pdl: see overlap.py."""
    parts = linears(x_TH, routers, [torch.float32] * len(routers), target=target, pdl=pdl)
    logits_TE1 = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return *route(logits_TE1[:, :-1], top_k, pdl), logits_TE1[:, -1:]


def _route_constants(of: Operand, top_k: int, gpu: str = "") -> tuple[dict[str, Any], int]:
    """What the kernel is compiled for, and its warps."""
    chosen, experts = normed_config(of, 1, gpu), power_of_two(of.layout[2] - 1)
    return {
        "W": of.layout, "R": chosen.R, "C": chosen.C, "V": of.chunk,
        "TOP_K": top_k, "BE": experts, "BK": power_of_two(top_k), "G": min(chosen.warps, experts),
        "BLOCK": power_of_two(of.layout[3]),
    }, chosen.warps  # fmt: skip


def moe_shared(
    x_TH: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    shared_gate_up: Sequence[Weight],
    shared_down: Sequence[Weight],
    gate_T1: torch.Tensor,
    then: Then | None = None,
    arrivals: torch.Tensor | None = None,
    target: Target | None = None,
    pdl: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As the reference. target: the device's, if None; pdl: see overlap.py."""
    ids_Tk, weights_Tk = ids_Tk.contiguous(), weights_Tk.contiguous()
    choice = ids_Tk, weights_Tk, gate_T1
    shared = shared_gate_up, shared_down
    found = _block(x_TH, gate_up, down, *choice, *shared, arrivals, target or target_of(x_TH.device), pdl)
    if then is not None and then.over_ranks is not None:
        return then.over_ranks(found, choice, *then[:3])
    if isinstance(found, combine.Outputs):
        if then is not None and x_TH.shape[1] <= combine.NORM_WIDTH:
            return combine.combine_norm(found, *choice, then, pdl)
        found = combine.combine(found, *choice, pdl)
    return found if then is None else add_rms_norm(found, *then[:3], pdl)


def _block(
    x_TH: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_T1: torch.Tensor,
    shared_gate_up: Sequence[Weight],
    shared_down: Sequence[Weight],
    arrivals: torch.Tensor | None,
    target: Target,
    pdl: bool,
) -> torch.Tensor | combine.Outputs:
    """The weighted sum, or what is to be summed."""
    whole = all(size for weight in (gate_up, down, *shared_gate_up, *shared_down) for size in weight.shape)
    tokens = x_TH.shape[0]
    if tokens and whole and len(shared_gate_up) == 1 and ids_Tk.shape[1]:
        weights = gate_up, down, *shared_gate_up, *shared_down
        banks_of = Banks(*(operand(weight, target.native_fp8) for weight in weights))
        found = _together(x_TH, banks_of, ids_Tk, weights_Tk, gate_T1, gate_up.shape[0], arrivals, target, pdl)
        if found is not None:
            return found
    parts = linears(x_TH, shared_gate_up, [None] * len(shared_gate_up), target=target, pdl=pdl)
    both_T2I = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    (shared_TH,) = linears(silu_mul(both_T2I), shared_down, [torch.float32], target=target, pdl=pdl)
    if whole and tokens > STREAM_TOKENS and ids_Tk.shape[1]:
        return combine.Outputs(outputs(x_TH, gate_up, down, ids_Tk, target), shared_TH)
    routed_TH = moe(x_TH, gate_up, down, ids_Tk, weights_Tk, target=target)
    if routed_TH.numel():
        tokens, hidden = routed_TH.shape
        gated_add_kernel[(tokens, triton.cdiv(hidden, GATED_ADD_BLOCK))](
            routed_TH, shared_TH, gate_T1, gate_T1.stride(0), hidden, GATED_ADD_BLOCK, num_warps=4
        )
    return routed_TH


def _together(
    x_TH: torch.Tensor,
    banks_of: Banks,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_T1: torch.Tensor,
    experts: int,
    arrivals: torch.Tensor | None,
    target: Target,
    pdl: bool,
) -> torch.Tensor | combine.Outputs | None:
    """The same by launches that the shared expert has part in, if there are to be such."""
    tokens = x_TH.shape[0]
    way = way_of(banks_of, x_TH.dtype, tokens, target.name)
    if way == APART:
        return None
    unlike = any(of.kind == 0 and of.value.dtype != x_TH.dtype for of in banks_of)
    x_TH = x_TH.contiguous().float() if unlike else x_TH.contiguous()
    if arrivals is not None:
        held = persistent.persistent_config(banks_of, x_TH.dtype, ids_Tk.shape, target.name)
        if held is not None:
            return persistent.moe(x_TH, banks_of, ids_Tk, arrivals, held, pdl)
    config = hopper.hopper_config(banks_of, x_TH.dtype, tokens, target.name)
    if config is not None and config.up_BM:
        return hopper.moe(x_TH, banks_of, ids_Tk, experts, config, pdl)
    if way == FRAGMENTS:
        return fragments.moe(x_TH, banks_of, ids_Tk, experts, target.name, pdl)
    if way == STREAMED:
        return _stream(x_TH, banks_of, ids_Tk, weights_Tk, gate_T1, target.name, pdl)
    if way == SORTED:
        return pairs.moe(x_TH, banks_of, ids_Tk, experts, target, pdl)
    up, down = (matched.matched_config(of, tokens, target, x_TH.element_size()) for of in banks_of[:2])
    return matched.moe(x_TH, banks_of, ids_Tk, (up, config or down), pdl)


def way_of(banks_of: Banks, x_dtype: torch.dtype, tokens: int, gpu: str = "") -> int:
    """How `tokens` go through banks: as measured, or by rule."""
    kind = banks_of.up.kind
    found = tuning.choice(gpu, "experts", [banks_of.up.layout], tokens) if tokens > 1 else None
    few, most = FRAGMENT_TOKENS.get(kind, (1, 0))
    if found and (found[0] != FRAGMENTS or all(fits(of, x_dtype) for of in banks_of)):
        return found[0]
    if few <= tokens <= most and all(fits(of, x_dtype) for of in banks_of):
        return FRAGMENTS
    if tokens > MATCHED_TOKENS:
        return SORTED if tokens <= SORTED_TOKENS.get(kind, 0) else APART
    if kind >= 2:
        return STREAMED if tokens <= CODES_STREAM_TOKENS else APART
    return STREAMED if tokens == 1 else MATCHED


def _stream(
    x_TH: torch.Tensor,
    banks_of: Banks,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_T1: torch.Tensor,
    gpu: str,
    pdl: bool,
) -> torch.Tensor:
    """Two launches: gates and ups of all experts, then their weighted sum."""
    up, down, shared_up, shared_down = banks_of
    (tokens, top_k), hidden, device = ids_Tk.shape, down.layout[2], x_TH.device
    act_MI = torch.empty((tokens * top_k, down.layout[3]), dtype=x_TH.dtype, device=device)
    shared_act_TI = torch.empty((tokens, shared_down.layout[3]), dtype=x_TH.dtype, device=device)
    out_TH = torch.empty((tokens, hidden), dtype=torch.float32, device=device)
    constexprs, config = _up_constants(up, shared_up, top_k, gpu)
    programs = triton.cdiv(shared_up.layout[2] // 2, constexprs["RS"])
    programs += top_k * triton.cdiv(up.layout[2] // 2, constexprs["R"])
    gate_up_kernel[(tokens * programs,)](
        x_TH, act_MI, shared_act_TI, ids_Tk, *up.tensors(), *shared_up.tensors(), tokens, **constexprs,
        num_warps=config.warps, **launch(pdl, config.registers),
    )  # fmt: skip
    constexprs, config = _down_constants(down, shared_down, top_k, gpu)
    down_kernel[(tokens, triton.cdiv(hidden, constexprs["R"]))](
        act_MI, shared_act_TI, ids_Tk, weights_Tk, gate_T1, gate_T1.stride(0), out_TH,
        *down.tensors(), *shared_down.tensors(), **constexprs, num_warps=config.warps,
        **launch(pdl, config.registers),
    )  # fmt: skip
    return out_TH


def _up_constants(up: Operand, shared: Operand, top_k: int, gpu: str = "") -> tuple[dict[str, Any], Stream]:
    """What the kernel is compiled for, and its configuration, of which warps and registers are all programs'."""
    chosen, other = gate_up_config(up, gpu), gate_up_config(shared)
    return {
        "TOP_K": top_k, "W": up.layout, "R": chosen.R, "C": chosen.C, "V": up.chunk, "WS": shared.layout,
        "RS": other.R, "CS": other.C, "VS": shared.chunk,
    }, chosen  # fmt: skip


def _down_constants(down: Operand, shared: Operand, top_k: int, gpu: str = "") -> tuple[dict[str, Any], Stream]:
    chosen = down_config(down, top_k, gpu)
    chunks = min(power_of_two(shared.layout[3] // shared.chunk), 128)
    return {
        "TOP_K": top_k, "BK": power_of_two(top_k), "W": down.layout, "R": chosen.R, "C": chosen.C, "V": down.chunk,
        "WS": shared.layout, "CS": chunks, "VS": shared.chunk,
    }, chosen  # fmt: skip


def compile_cases(native_fp8: bool = False) -> Iterator[CompileCase]:
    """Router and experts of 35B-A3B; a shared expert in the experts' format, and a plain one."""
    types = dict.fromkeys(("x", "added", "total", "logits", "weights", "gate", "out", "routed", "shared"), "*fp32")
    types |= {"ids": "*i32", "arrivals": "*i32", "norm": "*bf16", "normed": "*bf16", "eps": "fp32"}
    router = case(257, 2048, "bf16", native_fp8)
    for name, kib in (("", 0), *tuning.measured(native_fp8)):
        constexprs, warps = _route_constants(router.of, 8, name)
        constexprs |= {"PDL": False}
        signed = signature(norm_route_kernel, constexprs, types | router.types)
        yield CompileCase(norm_route_kernel, signed, constexprs, warps, 1, kib * 1024)
    types |= {"x": "*bf16", "act": "*bf16", "shared_act": "*bf16"}
    plain = case(1024, 2048, "bf16", native_fp8), case(2048, 512, "bf16", native_fp8)
    for up, down in banks(native_fp8):
        for shared_up, shared_down in ((up, down), plain) if down.of.layout[3] == 512 else ((up, down),):
            own = {f"shared_{name}": kind for name, kind in shared_up.types.items()}
            for name, kib in (("", 0), *tuning.measured(native_fp8)):
                constexprs, config = _up_constants(up.of, shared_up.of, 8, name)
                constexprs |= {"PDL": False}
                signed = signature(gate_up_kernel, constexprs, types | up.types | own)
                yield CompileCase(gate_up_kernel, signed, constexprs, config.warps, 1, kib * 1024)
            own = {f"shared_{name}": kind for name, kind in shared_down.types.items()}
            for name, kib in (("", 0), *tuning.measured(native_fp8)):
                constexprs, config = _down_constants(down.of, shared_down.of, 8, name)
                constexprs |= {"PDL": False}
                signed = signature(down_kernel, constexprs, types | down.types | own)
                yield CompileCase(down_kernel, signed, constexprs, config.warps, 1, kib * 1024)
    yield from matched.compile_cases(native_fp8)
    yield from pairs.compile_cases(native_fp8)
    yield from combine.compile_cases()
    yield from rank.compile_cases(native_fp8)
    if not native_fp8:
        yield from fragments.compile_cases()
        yield from hopper.compile_cases()
        yield from persistent.compile_cases()
    constexprs = {"BLOCK": GATED_ADD_BLOCK}
    yield CompileCase(gated_add_kernel, signature(gated_add_kernel, constexprs, types), constexprs, 4, 1)
