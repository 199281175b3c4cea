"""One table of the operations that models call, chosen once per process: no global decides later which one runs.

Shapes and meanings stand at each reference; both implementations have the same signature.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from shardwise.config import ConfigError


@dataclass(frozen=True)
class Ops:
    """Every operation of a rank; `name` says which implementation these are."""

    name: Literal["reference", "triton"]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gated_rms_norm: Callable[..., torch.Tensor]
    qk_norm_rope: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    store_kv: Callable[..., None]
    paged_attention: Callable[..., torch.Tensor]
    turn_store: Callable[..., torch.Tensor]
    causal_conv: Callable[..., torch.Tensor]
    gated_delta: Callable[..., torch.Tensor]
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    moe: Callable[..., torch.Tensor]
    silu_mul: Callable[..., torch.Tensor]
    linear: Callable[..., torch.Tensor]
    arranged: Callable[..., Any]
    adjoin: Callable[..., None]
    linears: Callable[..., list[torch.Tensor]]
    linear_parts: Callable[..., torch.Tensor]
    norm_linears: Callable[..., tuple[list[torch.Tensor], torch.Tensor]]
    norm_route: Callable[..., tuple[torch.Tensor, ...]]
    route_linears: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    moe_shared: Callable[..., Any]
    gated_delta_norm: Callable[..., torch.Tensor]
    begin: Callable[..., tuple[torch.Tensor, ...]]
    likeliest: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    draw: Callable[..., torch.Tensor]
    draw_among: Callable[..., torch.Tensor]
    keep_tokens: Callable[..., None]
    plan_slots: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    plan_wanted: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    fetch_experts: Callable[..., None]
    shortlist_logits: Callable[..., torch.Tensor]


def select(choice: Literal["auto", "reference", "triton"], device: torch.device, overlap: bool = False) -> Ops:
    """The operations for `device`; "auto" is Triton on a GPU and plain torch on a CPU.

    overlap: let kernels start before the previous one ends, where the device can (see overlap.py).
    Raises ConfigError for Triton on a CPU (unless it interprets) and where Triton is not installed.
    """
    if choice == "auto":
        choice = "triton" if device.type == "cuda" else "reference"
    return _reference() if choice == "reference" else _triton(device, overlap)


def _table(name: Literal["reference", "triton"], modules: tuple[Any, ...]) -> Ops:
    norm, rope, attention, conv, delta, moe, linear, begin, linears, moe_block, *others = modules
    delta_step, slots, draw, turn_store, shortlist = others
    return Ops(
        name=name,
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        gated_rms_norm=norm.gated_rms_norm,
        qk_norm_rope=rope.qk_norm_rope,
        store_kv=attention.store_kv,
        paged_attention=attention.paged_attention,
        turn_store=turn_store.turn_store,
        causal_conv=conv.causal_conv,
        gated_delta=delta.gated_delta,
        route=moe.route,
        moe=moe.moe,
        silu_mul=moe.silu_mul,
        linear=linear.linear,
        arranged=linear.arranged,
        adjoin=linears.adjoin,
        linears=linears.linears,
        linear_parts=linears.linear_parts,
        norm_linears=linears.norm_linears,
        norm_route=moe_block.norm_route,
        route_linears=moe_block.route_linears,
        moe_shared=moe_block.moe_shared,
        gated_delta_norm=delta_step.gated_delta_norm,
        begin=begin.begin,
        likeliest=draw.likeliest,
        draw=draw.draw,
        draw_among=draw.draw_among,
        keep_tokens=draw.keep_tokens,
        plan_slots=slots.plan_slots,
        plan_wanted=slots.plan_wanted,
        fetch_experts=slots.fetch_experts,
        shortlist_logits=shortlist.shortlist_logits,
    )


def _reference() -> Ops:
    import shardwise.kernels.attention.reference as attention
    import shardwise.kernels.begin.reference as begin
    import shardwise.kernels.conv.reference as conv
    import shardwise.kernels.delta.reference as delta
    import shardwise.kernels.delta_step.reference as delta_step
    import shardwise.kernels.draw.reference as draw
    import shardwise.kernels.expert_slots.reference as slots
    import shardwise.kernels.linear.reference as linear
    import shardwise.kernels.linears.reference as linears
    import shardwise.kernels.moe.reference as moe
    import shardwise.kernels.moe_block.reference as moe_block
    import shardwise.kernels.norm.reference as norm
    import shardwise.kernels.rope.reference as rope
    import shardwise.kernels.shortlist.reference as shortlist
    import shardwise.kernels.turn_store.reference as turn_store

    modules = (norm, rope, attention, conv, delta, moe, linear, begin, linears, moe_block, delta_step, slots, draw,
               turn_store, shortlist)  # fmt: skip
    return _table("reference", modules)


def _triton(device: torch.device, overlap: bool) -> Ops:
    try:
        from triton import knobs
    except ImportError:
        raise ConfigError("kernels 'triton': Triton is not installed; install it, or use --kernels reference") from None
    if device.type == "cpu" and not knobs.runtime.interpret:
        raise ConfigError("kernels 'triton': they need a GPU and the device is 'cpu'; use --kernels reference")
    import shardwise.kernels.attention.triton as attention
    import shardwise.kernels.begin.triton as begin
    import shardwise.kernels.conv.triton as conv
    import shardwise.kernels.delta.triton as delta
    import shardwise.kernels.delta_step.triton as delta_step
    import shardwise.kernels.draw.triton as draw
    import shardwise.kernels.expert_slots.triton as slots
    import shardwise.kernels.linear.triton as linear
    import shardwise.kernels.linears.triton as linears
    import shardwise.kernels.moe.triton as moe
    import shardwise.kernels.moe_block.triton as moe_block
    import shardwise.kernels.norm.triton as norm
    import shardwise.kernels.rope.triton as rope
    import shardwise.kernels.shortlist.triton as shortlist
    import shardwise.kernels.turn_store.triton as turn_store
    from shardwise.kernels.overlap import can_overlap

    modules = (norm, rope, attention, conv, delta, moe, linear, begin, linears, moe_block, delta_step, slots, draw,
               turn_store, shortlist)  # fmt: skip
    table = _table("triton", modules)
    if not (overlap and can_overlap(device)):
        return table
    names = ("linears", "linear_parts", "norm_linears", "norm_route", "route_linears", "moe_shared",
             "gated_delta_norm", "turn_store", "paged_attention", "rms_norm", "add_rms_norm", "route",
             "begin")  # fmt: skip
    return replace(table, **{name: partial(getattr(table, name), pdl=True) for name in names})
