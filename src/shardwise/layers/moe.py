"""The feed-forward part: a dense SwiGLU, or routed experts beside one shared expert with a gate of its own.

Legend: T tokens, H hidden, E experts, I intermediate columns of this rank, k experts a token.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from shardwise.checkpoint.weight import Weight
from shardwise.config import ConfigError, ModelConfig
from shardwise.kernels.moe_block import Then
from shardwise.layers.linear import FormatOf, Linear, Norm, Specs, declare_columns, declare_rows
from shardwise.parallel.comm import Partial
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Segment


def declare_mlp(hidden: int, size: int, name: str, source: str, format_of: FormatOf) -> Specs:
    """A dense SwiGLU of `size` intermediate columns."""
    gate_up = [Segment("gate", size), Segment("up", size)]
    sources = [f"{source}.gate_proj", f"{source}.up_proj"]
    return {
        **declare_columns(f"{name}.gate_up", gate_up, hidden, sources, format_of, "mlp"),
        **declare_rows(f"{name}.down", hidden, Segment("intermediate", size), f"{source}.down_proj", format_of, "mlp"),
    }


def expert_names(name: str) -> tuple[str, str]:
    """The banks of gates with ups, and of downs, of the routed experts of `name`."""
    return f"{name}.experts.gate_up", f"{name}.experts.down"


def declare_moe(config: ModelConfig, name: str, source: str, stacked: bool, format_of: FormatOf) -> Specs:
    """Experts, router and shared expert of `source` (…mlp). stacked: the checkpoint has one tensor for all experts."""
    hidden, size, experts = config.hidden_size, config.expert_intermediate_size, config.experts
    halves = (Segment("gate", size), Segment("up", size))
    if stacked:
        ins, outs = (f"{source}.experts.gate_up_proj",), (f"{source}.experts.down_proj",)
    else:
        ins = tuple(f"{source}.experts.{{e}}.{part}_proj" for part in ("gate", "up"))
        outs = (f"{source}.experts.{{e}}.down_proj",)
    formats = {format_of(one) for one in ins}
    if len(formats) != 1:
        raise ConfigError(f"{source}.experts: gate_proj and up_proj are in different formats; convert them to one")
    router = (Segment("experts", experts), Segment("shared", 1))
    gates = [f"{source}.gate", f"{source}.shared_expert_gate"]
    shared = config.shared_expert_intermediate_size
    gate_up, down = expert_names(name)
    return {
        gate_up: ParamSpec((experts, halves, hidden), formats.pop(), ins, "expert", cut=1),
        down: ParamSpec((experts, hidden, (Segment("intermediate", size),)), format_of(outs[0]), outs, "expert", cut=2),
        **declare_columns(f"{name}.router", router, hidden, gates, format_of, None),
        **declare_mlp(hidden, shared, f"{name}.shared", f"{source}.shared_expert", format_of),
    }


class Mlp:
    def __init__(self, weights: Mapping[str, Weight], name: str, ctx: RankContext) -> None:
        self.gate_up, self.down = (
            Linear(weights, f"{name}.gate_up", ctx),
            Linear(weights, f"{name}.down", ctx, torch.float32),
        )
        self.ops = ctx.ops

    def __call__(
        self, added_TH: torch.Tensor | Partial | None, residual_TH: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the output, fp32, and the new residual."""
        (both_T2I,), residual_TH = norm.then(added_TH, residual_TH, [self.gate_up])
        return self.down(self.ops.silu_mul(both_T2I)), residual_TH


class Experts(Protocol):
    """Where the routed experts of a layer are, and how they are computed."""

    def __call__(
        self,
        x_TH: torch.Tensor,
        ids_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        shared_gate_up: Sequence[Weight],
        shared_down: Sequence[Weight],
        gate_T1: torch.Tensor,
        /,
    ) -> torch.Tensor:
        """As ops.moe_shared, without its banks."""
        ...


class Resident:
    """All experts, on the device."""

    def __init__(self, gate_up: Weight, down: Weight, ctx: RankContext) -> None:
        self.gate_up, self.down = (ctx.ops.arranged(weight) for weight in (gate_up, down))
        self.ops, self.arrivals = ctx.ops, torch.zeros(1, dtype=torch.int32, device=ctx.device)

    def __call__(self, x_TH: torch.Tensor, *rest: Any) -> torch.Tensor:
        return self.ops.moe_shared(x_TH, self.gate_up, self.down, *rest, None, self.arrivals)

    def then(self, then: Then, x_TH: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """With the norm that follows, see ops.moe_shared."""
        return self.ops.moe_shared(x_TH, self.gate_up, self.down, *rest, then, self.arrivals)


class Moe:
    """experts: of this layer, if they are not among `weights`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        name: str,
        ctx: RankContext,
        experts: Experts | None = None,
    ) -> None:
        gate_up, down = expert_names(name)
        self.experts = experts or Resident(weights[gate_up], weights[down], ctx)
        self.router = Linear(weights, f"{name}.router", ctx, torch.float32)
        self.shared = Mlp(weights, f"{name}.shared", ctx)
        self.top_k, self.ops, self.alone = config.experts_per_token, ctx.ops, ctx.world == 1
        self.comm = ctx.comm
        self.arrivals = torch.zeros(1, dtype=torch.int32, device=ctx.device)

    def __call__(
        self, added_TH: torch.Tensor | Partial | None, residual_TH: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor | Partial, torch.Tensor]:
        """This rank's part of the output, fp32, and the new residual.

        Every rank routes alike; each computes its columns of every expert. Several tokens go through with the norm that
        comes next, where one rank has all or peers' memory sums; a single one is normed by what is behind it.
        """
        x_TH, residual_TH, weights_Tk, ids_Tk, gate_T1 = self._route(added_TH, residual_TH, norm)
        chosen, experts = (ids_Tk, weights_Tk, self.shared.gate_up.parts, self.shared.down.parts, gate_T1), self.experts
        together = self.comm.for_block(x_TH)
        if (self.alone or together) and len(x_TH) > 1 and isinstance(experts, Resident):
            return Partial(
                x_TH, lambda x_TH, *then: experts.then(Then(*then, over_ranks=together), x_TH, *chosen)
            ), residual_TH
        return experts(x_TH, *chosen), residual_TH

    def _route(
        self, added_TH: torch.Tensor | Partial | None, residual_TH: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, ...]:
        """As ops.norm_route, in as few launches as can be."""
        how = self.router.parts, self.top_k, self.arrivals
        if not isinstance(added_TH, Partial):
            return self.ops.norm_route(added_TH, residual_TH, norm.weight_H, norm.eps, *how)
        if found := added_TH.routed(residual_TH, norm.weight_H, norm.eps, *how):
            return found
        x_TH, residual_TH = added_TH.normed(residual_TH, norm.weight_H, norm.eps)
        return x_TH, residual_TH, *self.ops.route_linears(x_TH, self.router.parts, self.top_k)
