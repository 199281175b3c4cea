"""Qwen3.5 / Qwen3.6 text models, dense and MoE: which weights there are, and how a step flows through them.

Legend: T tokens, F those of pictures, L rows with logits, H hidden, R rotated pairs.
"""

from collections.abc import Mapping, Sequence

import torch

from shardwise.checkpoint.names import Names
from shardwise.checkpoint.weight import Weight
from shardwise.config import ModelConfig
from shardwise.kernels.begin.reference import Handover
from shardwise.kernels.rope import rope_table
from shardwise.kernels.sequences import Sequences
from shardwise.layers import attention, delta, moe
from shardwise.layers.attention import GatedAttention, KVCache
from shardwise.layers.delta import DeltaState, GatedDeltaNet
from shardwise.layers.embedding import Embedding, Head, declare_vocabulary
from shardwise.layers.linear import FormatOf, Norm, Specs
from shardwise.layers.norm import declare_norm
from shardwise.parallel.comm import Partial
from shardwise.parallel.context import RankContext

LayerCache = KVCache | DeltaState


def layer_name(layer: int) -> str:
    return f"layers.{layer}"


def expert_banks(config: ModelConfig) -> dict[int, tuple[str, str]]:
    """By layer, the names of the routed experts' weights: gates with ups, and downs."""
    return {i: moe.expert_names(f"{layer_name(i)}.mlp") for i in range(config.layers) if config.experts}


def declare(config: ModelConfig, names: Names, format_of: FormatOf, dtype: str) -> Specs:
    """Every weight of the text model, by local name. `dtype` (safetensors' name) is what plain weights are held in."""
    head = None if config.tied else names.head
    specs = declare_vocabulary(config.vocab_size, config.hidden_size, names.text("embed_tokens"), head, format_of)
    for i, kind in enumerate(config.layer_types):
        name, source = layer_name(i), names.text(layer_name(i))
        if kind == "full_attention":
            specs |= attention.declare(config, f"{name}.attention", f"{source}.self_attn", format_of, dtype)
        else:
            specs |= delta.declare(config, f"{name}.delta", f"{source}.linear_attn", format_of, dtype)
        if config.experts:
            specs |= moe.declare_moe(config, f"{name}.mlp", f"{source}.mlp", names.stacked(i), format_of)
        else:
            sizes = config.hidden_size, config.intermediate_size
            specs |= moe.declare_mlp(*sizes, f"{name}.mlp", f"{source}.mlp", format_of)
        for norm in ("input", "post_attention"):
            specs |= declare_norm(f"{name}.{norm}_norm", config.hidden_size, f"{source}.{norm}_layernorm", dtype)
    return specs | declare_norm("norm", config.hidden_size, names.text("norm"), dtype)


def declare_pages(config: ModelConfig, page_tokens: int, dtype: str) -> Specs:
    """What one page of KV cache takes, over all layers."""
    specs: Specs = {}
    for i, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            specs |= attention.declare_cache(config, f"{layer_name(i)}.attention", page_tokens, dtype)
    return specs


def declare_rows(config: ModelConfig, dtype: str) -> Specs:
    """What one row of conv and delta state takes, over all layers."""
    specs: Specs = {}
    for i, kind in enumerate(config.layer_types):
        if kind == "linear_attention":
            specs |= delta.declare_cache(config, f"{layer_name(i)}.delta", dtype)
    return specs


class Layer:
    """Norm, mixer, norm, feed-forward. What each part adds to the residual is added by the next one's norm."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        i: int,
        ctx: RankContext,
        experts: moe.Experts | None = None,
    ) -> None:
        name = layer_name(i)
        self.mixer: GatedAttention | GatedDeltaNet = (
            GatedAttention(config, weights, f"{name}.attention", ctx)
            if config.layer_types[i] == "full_attention"
            else GatedDeltaNet(config, weights, f"{name}.delta", ctx)
        )
        mlp = f"{name}.mlp"
        self.mlp = moe.Moe(config, weights, mlp, ctx, experts) if config.experts else moe.Mlp(weights, mlp, ctx)
        self.input_norm = Norm(weights[f"{name}.input_norm"].plain, config.rms_norm_eps)
        self.post_norm = Norm(weights[f"{name}.post_attention_norm"].plain, config.rms_norm_eps)

    def mix(
        self,
        added_TH: torch.Tensor | Partial | None,
        residual_TH: torch.Tensor,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
        seqs: Sequences,
        cache: LayerCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(self.mixer, GatedAttention):
            assert isinstance(cache, KVCache)
            return self.mixer(added_TH, residual_TH, self.input_norm, cos_TR, sin_TR, seqs, cache)
        assert isinstance(cache, DeltaState)
        return self.mixer(added_TH, residual_TH, self.input_norm, seqs, cache)


class Model:
    """A rank's part of the text model. experts: by layer, those that are not among `weights`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        ctx: RankContext,
        experts: Mapping[int, moe.Experts] | None = None,
    ) -> None:
        self.config, self.ops, self.comm = config, ctx.ops, ctx.comm
        self.embedding = Embedding(weights, rope_table(config).to(ctx.device), ctx)
        self.head = Head(weights, ctx)
        self.layers = [Layer(config, weights, i, ctx, (experts or {}).get(i)) for i in range(config.layers)]
        self.norm = weights["norm"].plain

    def __call__(
        self,
        tokens_T: torch.Tensor,
        positions_3T: torch.Tensor,
        seqs: Sequences,
        caches: Sequence[LayerCache],
        logit_rows_L: torch.Tensor | None,
        features_FH: torch.Tensor | None = None,
        feature_rows_F: torch.Tensor | None = None,
        last_tokens_R: torch.Tensor | None = None,
        keep: int = 0,
        handover: Handover | None = None,
    ) -> torch.Tensor:
        """Logits [L, vocabulary] in fp32 of the tokens in `logit_rows_L`, None: of all; `caches` (one a layer) move on.

        tokens_T: int64 ids; positions_3T: int64, of time, height and width, or [T] if these are equal, as for text.
        features_FH: of pictures, whole on every rank; they take the place of the embeddings of tokens `feature_rows_F`.
        last_tokens_R: ids that ids below zero stand for, -r for that of row r.
        keep: how many of each row's likeliest matter, see Head; 0: all.
        handover: tokens, positions and sequences are views of its words, which the step takes over from the host.
        """
        added_TH, residual_TH, cos_TR, sin_TR = self.embedding(tokens_T, positions_3T, last_tokens_R, handover)
        added_TH = self.comm.all_reduce(added_TH)
        if features_FH is not None and feature_rows_F is not None:
            added_TH[feature_rows_F] = features_FH.float()
        for layer, cache in zip(self.layers, caches, strict=True):
            mixed_TH, residual_TH = layer.mix(added_TH, residual_TH, cos_TR, sin_TR, seqs, cache)
            mixed_TH = self.comm.for_norm(mixed_TH)
            added_TH, residual_TH = layer.mlp(mixed_TH, residual_TH, layer.post_norm)
            added_TH = added_TH if isinstance(added_TH, Partial) else self.comm.for_norm(added_TH)
        if isinstance(added_TH, Partial):
            x_TH, _ = added_TH.normed(residual_TH, self.norm, self.config.rms_norm_eps)
        else:
            x_TH, _ = self.ops.add_rms_norm(added_TH, residual_TH, self.norm, self.config.rms_norm_eps)
        return self.head(x_TH if logit_rows_L is None else x_TH[logit_rows_L], keep)
