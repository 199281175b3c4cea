"""GatedDeltaNet: a short causal convolution, then a recurrence whose state is one matrix per value head.

Legend: T tokens, H hidden, G key heads and V value heads of this rank, K key width, D value width, C conv channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shardwise.checkpoint.weight import Weight
from shardwise.config import ModelConfig
from shardwise.kernels.linears import Conv
from shardwise.kernels.sequences import Sequences
from shardwise.layers.linear import FormatOf, Linear, Norm, Specs, declare_columns, declare_rows
from shardwise.layers.norm import declare_norm
from shardwise.parallel.comm import Partial
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Segment, Stored, head_map

GROUP = "delta"


@dataclass(frozen=True)
class DeltaState:
    """Of one layer, by row: the last conv_width - 1 inputs [rows, C, width - 1], the state [rows, V, K, D] in fp32."""

    conv: torch.Tensor
    delta: torch.Tensor


def segments(config: ModelConfig) -> tuple[Segment, Segment, Segment]:
    """The packed rows q, k, v: keys follow the value heads that read them."""
    keys = config.delta_key_heads * config.delta_key_dim
    return (
        Segment("queries", keys, config.delta_key_dim, shared=True),
        Segment("keys", keys, config.delta_key_dim, shared=True),
        Segment("values", config.delta_value_heads * config.delta_value_dim, config.delta_value_dim),
    )


def per_head(config: ModelConfig) -> Segment:
    """One number for each value head."""
    return Segment("value heads", config.delta_value_heads)


def declare(config: ModelConfig, name: str, source: str, format_of: FormatOf, dtype: str) -> Specs:
    """Weights of the layer `name`, found in the checkpoint under `source` (…linear_attn)."""
    hidden, values, heads = config.hidden_size, segments(config)[2], per_head(config)
    qkv, z, out = (f"{source}.{part}" for part in ("in_proj_qkv", "in_proj_z", "out_proj"))
    ba = [f"{source}.in_proj_b", f"{source}.in_proj_a"]
    conv = ParamSpec(
        (segments(config), 1, config.conv_width), (Stored(".weight", dtype),), (f"{source}.conv1d",), GROUP
    )
    return {
        **declare_columns(f"{name}.qkv", segments(config), hidden, [qkv], format_of, GROUP),
        **declare_columns(f"{name}.z", [values], hidden, [z], format_of, GROUP),
        **declare_columns(f"{name}.ba", [heads, heads], hidden, ba, format_of, GROUP),
        **declare_rows(f"{name}.out", hidden, values, out, format_of, GROUP),
        f"{name}.conv": conv,
        f"{name}.A_log": ParamSpec(((heads,),), (Stored("", "F32"),), (f"{source}.A_log",), GROUP),
        f"{name}.dt_bias": ParamSpec(((heads,),), (Stored("", "F32"),), (f"{source}.dt_bias",), GROUP),
        **declare_norm(f"{name}.norm", config.delta_value_dim, f"{source}.norm", dtype),
    }


def declare_cache(config: ModelConfig, name: str, dtype: str) -> Specs:
    """One row of this layer's state, as specs: their local shapes and bytes are a rank's."""
    return {
        f"{name}.conv_state": ParamSpec(
            (segments(config), config.conv_width - 1), (Stored("", dtype),), (f"{name}.conv_state",), GROUP
        ),
        f"{name}.delta_state": ParamSpec(
            ((per_head(config),), config.delta_key_dim, config.delta_value_dim),
            (Stored("", "F32"),), (f"{name}.delta_state",), GROUP,
        ),
    }  # fmt: skip


class GatedDeltaNet:
    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], name: str, ctx: RankContext) -> None:
        queries, _, values = segments(config)
        key_map = head_map(values, queries, ctx.partitions[GROUP], ctx.rank)
        self.value_heads, self.key_dim, self.value_dim = len(key_map), config.delta_key_dim, config.delta_value_dim
        self.key_heads = max(key_map, default=-1) + 1
        self.key_map_V = torch.tensor(key_map, dtype=torch.int32, device=ctx.device)
        self.qkv, self.z = Linear(weights, f"{name}.qkv", ctx), Linear(weights, f"{name}.z", ctx)
        ctx.ops.adjoin([*self.qkv.parts, *self.z.parts])
        self.ba = Linear(weights, f"{name}.ba", ctx, torch.float32)
        self.out = Linear(weights, f"{name}.out", ctx)
        self.conv_CW = weights[f"{name}.conv"].plain.squeeze(1)
        self.A_log_V, self.dt_bias_V = weights[f"{name}.A_log"].plain, weights[f"{name}.dt_bias"].plain
        self.norm, self.eps, self.ops = weights[f"{name}.norm"].plain, config.rms_norm_eps, ctx.ops

    def __call__(
        self,
        added_TH: torch.Tensor | Partial | None,
        residual_TH: torch.Tensor,
        norm: Norm,
        seqs: Sequences,
        state: DeltaState,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the layer's output, fp32, as parts [S, T, H], and the new residual.

        `state` moves on by the tokens.
        """
        conv = Conv(self.conv_CW, state.conv, seqs)
        inputs = [self.qkv, self.z, self.ba]
        (qkv_TC, z_TX, ba_TX), residual_TH = norm.then(added_TH, residual_TH, inputs, conv)
        if not self.value_heads:
            return torch.zeros((1, *residual_TH.shape), dtype=torch.float32, device=residual_TH.device), residual_TH
        keys = self.key_heads * self.key_dim
        q, k, v = qkv_TC.split((keys, keys, self.value_heads * self.value_dim), -1)
        b_TV, a_TV = ba_TX.chunk(2, -1)
        y_TVD = self.ops.gated_delta_norm(
            q.unflatten(-1, (self.key_heads, self.key_dim)),
            k.unflatten(-1, (self.key_heads, self.key_dim)),
            v.unflatten(-1, (self.value_heads, self.value_dim)),
            a_TV, b_TV, self.A_log_V, self.dt_bias_V, self.key_map_V, state.delta, seqs,
            z_TX.unflatten(-1, (self.value_heads, self.value_dim)), self.norm, self.eps,
        )  # fmt: skip
        return self.out.summands(y_TVD.flatten(1)), residual_TH
