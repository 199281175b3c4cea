"""Layers of the vision tower: full attention within a frame, a GELU MLP, and the merger of patches into tokens.

Whole heads and intermediate columns are cut (groups "vision" and "vision_mlp"); biases of row-parallel layers are whole
and are added once, after the sum over ranks.

Legend: T patches, H hidden, N heads of this rank, D head dim, R half of D, F frames, L patches of a frame, I columns.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from shardwise.checkpoint.weight import Weight
from shardwise.config import VisionConfig
from shardwise.layers.linear import Linear, Specs, plain
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Segment, Stored

GROUP, MLP_GROUP = "vision", "vision_mlp"
EPS = 1e-6


class Run(NamedTuple):
    """`frames` frames of `patches` patches each, one after the other in a batch."""

    frames: int
    patches: int


def declare_columns(
    name: str, segments: Sequence[Segment], inputs: int, source: str, dtype: str, group: str | None
) -> Specs:
    """A linear layer with a bias, cut by its outputs."""
    return {
        name: ParamSpec((tuple(segments), inputs), (Stored(".weight", dtype),), (source,), group),
        f"{name}_bias": ParamSpec((tuple(segments),), (Stored(".bias", dtype),), (source,), group),
    }


def declare_rows(name: str, outputs: int, segment: Segment, source: str, dtype: str, group: str | None) -> Specs:
    """A linear layer cut by its inputs, with a bias that every rank has whole."""
    return {
        name: ParamSpec((outputs, (segment,)), (Stored(".weight", dtype),), (source,), group, cut=1),
        f"{name}_bias": plain((outputs,), source, (Stored(".bias", dtype),)),
    }


def declare_norm(name: str, size: int, source: str, dtype: str) -> Specs:
    """A LayerNorm with a bias, whole on every rank."""
    return {
        name: plain((size,), source, (Stored(".weight", dtype),)),
        f"{name}_bias": plain((size,), source, (Stored(".bias", dtype),)),
    }


def declare_attention(config: VisionConfig, name: str, source: str, dtype: str, group: str | None) -> Specs:
    """Weights of the layer `name`, found in the checkpoint under `source` (…attn)."""
    heads = [Segment(part, config.hidden_size, config.head_dim) for part in ("queries", "keys", "values")]
    return {
        **declare_columns(f"{name}.qkv", heads, config.hidden_size, f"{source}.qkv", dtype, group),
        **declare_rows(f"{name}.out", config.hidden_size, heads[0], f"{source}.proj", dtype, group),
    }


def declare_mlp(config: VisionConfig, name: str, source: str, dtype: str, group: str | None) -> Specs:
    """Weights of the layer `name`, found in the checkpoint under `source` (…mlp)."""
    columns = Segment("intermediate", config.intermediate_size)
    return {
        **declare_columns(f"{name}.up", [columns], config.hidden_size, f"{source}.linear_fc1", dtype, group),
        **declare_rows(f"{name}.down", config.hidden_size, columns, f"{source}.linear_fc2", dtype, group),
    }


def declare_merger(config: VisionConfig, name: str, source: str, dtype: str, group: str | None) -> Specs:
    """Weights of the merger. Its columns follow the heads: merge^2 * D for each, so no group of their own is needed."""
    per_head = config.merge**2 * config.head_dim
    columns = Segment("merged", config.heads * per_head, per_head)
    return {
        **declare_norm(f"{name}.norm", config.hidden_size, f"{source}.norm", dtype),
        **declare_columns(f"{name}.up", [columns], columns.size, f"{source}.linear_fc1", dtype, group),
        **declare_rows(f"{name}.down", config.out_hidden_size, columns, f"{source}.linear_fc2", dtype, group),
    }


class Biased:
    """A linear layer whose bias this rank adds to its own columns."""

    def __init__(self, weights: Mapping[str, Weight], name: str, ctx: RankContext) -> None:
        self.linear, self.bias = Linear(weights, name, ctx), weights[f"{name}_bias"].plain

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return self.linear(x_TI) + self.bias


class Summed:
    """A linear layer cut by its inputs: the sum of all ranks' parts, and then the bias, in fp32.

    whole: every rank holds all of it, and there is nothing to sum.
    """

    def __init__(self, weights: Mapping[str, Weight], name: str, ctx: RankContext, whole: bool) -> None:
        self.linear = Linear(weights, name, ctx, torch.float32)
        self.bias, self.comm, self.whole = weights[f"{name}_bias"].plain.float(), ctx.comm, whole

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        part_TH = self.linear(x_TI)
        return (part_TH if self.whole else self.comm.all_reduce(part_TH)) + self.bias


class LayerNorm:
    """Computed in fp32."""

    def __init__(self, weights: Mapping[str, Weight], name: str, dtype: torch.dtype) -> None:
        self.weight, self.bias = weights[name].plain.float(), weights[f"{name}_bias"].plain.float()
        self.dtype = dtype

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x_TH, self.weight.shape, self.weight, self.bias, EPS).to(self.dtype)


class Attention:
    def __init__(
        self, config: VisionConfig, weights: Mapping[str, Weight], name: str, ctx: RankContext, whole: bool
    ) -> None:
        self.qkv, self.out = Biased(weights, f"{name}.qkv", ctx), Summed(weights, f"{name}.out", ctx, whole)
        self.head_dim = config.head_dim

    def __call__(
        self, x_TH: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, runs: Sequence[Run]
    ) -> torch.Tensor:
        """The layer's output, fp32, the same on every rank."""
        q_TND, k_TND, v_TND = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x_TH).chunk(3, -1))
        q_TND, k_TND = rotate(q_TND, cos_TR, sin_TR), rotate(k_TND, cos_TR, sin_TR)
        sizes = [run.frames * run.patches for run in runs]
        parts = zip(runs, *(each.split(sizes) for each in (q_TND, k_TND, v_TND)), strict=True)
        y_TND = torch.cat([attend(q, k, v, run) for run, q, k, v in parts])
        return self.out(y_TND.flatten(1))


def rotate(x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Dims i and R + i of each head turned by angle i, in fp32."""
    first_TNR, second_TNR = x_TND.float().chunk(2, -1)
    cos_T1R, sin_T1R = cos_TR[:, None], sin_TR[:, None]
    turned = first_TNR * cos_T1R - second_TNR * sin_T1R, second_TNR * cos_T1R + first_TNR * sin_T1R
    return torch.cat(turned, -1).to(x_TND.dtype)


def attend(q_TND: torch.Tensor, k_TND: torch.Tensor, v_TND: torch.Tensor, run: Run) -> torch.Tensor:
    """Every patch of a frame sees all patches of it."""
    if not q_TND.shape[1]:
        return q_TND
    q, k, v = (each.unflatten(0, run).transpose(1, 2) for each in (q_TND, k_TND, v_TND))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


class Mlp:
    def __init__(self, weights: Mapping[str, Weight], name: str, ctx: RankContext, whole: bool) -> None:
        self.up, self.down = Biased(weights, f"{name}.up", ctx), Summed(weights, f"{name}.down", ctx, whole)

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        """The layer's output, fp32, the same on every rank."""
        return self.down(functional.gelu(self.up(x_TH), approximate="tanh"))


class Merger:
    """merge x merge patches, which lie one after the other, become one token of the text model."""

    def __init__(
        self, config: VisionConfig, weights: Mapping[str, Weight], name: str, ctx: RankContext, whole: bool
    ) -> None:
        self.norm = LayerNorm(weights, f"{name}.norm", ctx.dtype)
        self.up, self.down = Biased(weights, f"{name}.up", ctx), Summed(weights, f"{name}.down", ctx, whole)
        self.patches = config.merge**2

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T / merge^2, out_hidden_size], fp32, the same on every rank."""
        return self.down(functional.gelu(self.up(self.norm(x_TH).unflatten(0, (-1, self.patches)).flatten(1))))
