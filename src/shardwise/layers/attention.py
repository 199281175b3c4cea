"""Gated attention: per-head normed, partly rotated queries and keys; the output is gated by a sigmoid of its own input.

Legend: T tokens, H hidden, N query heads and K key-value heads of this rank, D head_dim, R rotated pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shardwise.checkpoint.weight import Weight
from shardwise.config import ModelConfig
from shardwise.kernels.sequences import Sequences
from shardwise.layers.linear import FormatOf, Linear, Norm, Specs, declare_columns, declare_rows
from shardwise.layers.norm import declare_norm
from shardwise.parallel.comm import Partial
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Segment, Stored, head_map, local_shape

GROUP = "attention"


@dataclass(frozen=True)
class KVCache:
    """Pages [pages, K, page_tokens, D] of one layer; an element stands for its value times the scale."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


def segments(config: ModelConfig) -> tuple[Segment, Segment, Segment]:
    """Rows of the fused projection: per query head its query and its gate; keys and values follow their queries."""
    width, kv_width = config.head_dim, config.kv_heads * config.head_dim
    return (
        Segment("queries", config.query_heads * 2 * width, 2 * width),
        Segment("keys", kv_width, width, shared=True),
        Segment("values", kv_width, width, shared=True),
    )


def declare(config: ModelConfig, name: str, source: str, format_of: FormatOf, dtype: str) -> Specs:
    """Weights of the layer `name`, found in the checkpoint under `source` (…self_attn)."""
    projections = [f"{source}.{part}_proj" for part in "qkv"]
    output = Segment("heads", config.query_heads * config.head_dim, config.head_dim)
    return {
        **declare_columns(f"{name}.qkv", segments(config), config.hidden_size, projections, format_of, GROUP),
        **declare_rows(f"{name}.out", config.hidden_size, output, f"{source}.o_proj", format_of, GROUP),
        **declare_norm(f"{name}.q_norm", config.head_dim, f"{source}.q_norm", dtype),
        **declare_norm(f"{name}.k_norm", config.head_dim, f"{source}.k_norm", dtype),
    }


def declare_cache(config: ModelConfig, name: str, page_tokens: int, dtype: str) -> Specs:
    """One page of this layer's cache, as specs: their local shapes and bytes are a rank's."""
    heads = Segment("key-value heads", config.kv_heads, 1, shared=True)
    return {
        f"{name}.{part}_pages": ParamSpec(
            ((heads,), page_tokens, config.head_dim), (Stored("", dtype),), (f"{name}.{part}_pages",), GROUP
        )
        for part in "kv"
    }


class GatedAttention:
    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], name: str, ctx: RankContext) -> None:
        queries, keys, _ = segments(config)
        heads = head_map(queries, keys, ctx.partitions[GROUP], ctx.rank)
        self.heads, self.head_dim = len(heads), config.head_dim
        page = declare_cache(config, name, 1, "F32")[f"{name}.k_pages"]
        self.kv_heads = local_shape(page, ctx.partitions, ctx.rank)[0]
        self.head_map_N = torch.tensor(heads, dtype=torch.int32, device=ctx.device)
        self.qkv = Linear(weights, f"{name}.qkv", ctx)
        self.out = Linear(weights, f"{name}.out", ctx)
        self.q_norm, self.k_norm = weights[f"{name}.q_norm"].plain, weights[f"{name}.k_norm"].plain
        self.eps, self.scale, self.ops = config.rms_norm_eps, config.head_dim**-0.5, ctx.ops

    def __call__(
        self,
        added_TH: torch.Tensor | Partial | None,
        residual_TH: torch.Tensor,
        norm: Norm,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
        seqs: Sequences,
        cache: KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the layer's output, fp32, as parts [S, T, H], and the new residual.

        `cache` gets the keys and values.
        """
        (qkv_TO,), residual_TH = norm.then(added_TH, residual_TH, [self.qkv])
        if not self.heads:
            return torch.zeros((1, *residual_TH.shape), dtype=torch.float32, device=residual_TH.device), residual_TH
        kv_width = self.kv_heads * self.head_dim
        queries_gates, keys, values = qkv_TO.split((self.heads * 2 * self.head_dim, kv_width, kv_width), -1)
        q_TND, gate_TND = queries_gates.unflatten(-1, (self.heads, 2 * self.head_dim)).chunk(2, -1)
        k_TKD, v_TKD = (part.unflatten(-1, (self.kv_heads, self.head_dim)) for part in (keys, values))
        q_TND = self.ops.turn_store(
            q_TND, k_TKD, v_TKD, self.q_norm, self.k_norm, cos_TR, sin_TR, self.eps, cache.k_pages, cache.v_pages,
            seqs.kv_slots_T, k_scale=cache.k_scale, v_scale=cache.v_scale,
        )  # fmt: skip
        y_TND = self.ops.paged_attention(
            q_TND, cache.k_pages, cache.v_pages, seqs, self.head_map_N, self.scale,
            k_scale=cache.k_scale, v_scale=cache.v_scale, gate_TND=gate_TND,
        )  # fmt: skip
        return self.out.summands(y_TND.flatten(1)), residual_TH
