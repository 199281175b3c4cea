"""The oracle: small random models of transformers in fp32, saved in every layout that checkpoints of the family have.

Legend: T tokens, V vocabulary.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig, Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5MoeVisionConfig,
)

INTO_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
KEPT_IN_FLOAT32 = ("linear_attn.A_log", "linear_attn.dt_bias")


@dataclass(frozen=True)
class Geometry:
    """Sizes that fit nothing: three delta key heads, five experts, an odd vocabulary."""

    moe: bool
    tied: bool = False
    full_attention: tuple[int, ...] = (3,)  # which of the layers
    layers: int = 5
    hidden_size: int = 72
    heads: tuple[int, int] = (6, 2)  # query, KV
    head_dim: int = 32
    delta_heads: tuple[int, int] = (3, 6)  # key, value
    delta_dims: tuple[int, int] = (16, 24)
    conv_width: int = 4
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, int, int] = (2, 1, 1)
    rope_theta: float = 10_000.0
    rope: tuple[tuple[str, Any], ...] = (("rope_type", "default"),)
    intermediate_size: int = 56  # of the dense MLP
    experts: tuple[int, int] = (5, 2)  # how many, and how many a token has
    expert_sizes: tuple[int, int] = (48, 40)  # routed, shared
    vocab_size: int = 131
    rms_norm_eps: float = 1e-4
    max_position_embeddings: int = 512


GEOMETRIES: Mapping[str, Geometry] = MappingProxyType(
    {
        "moe": Geometry(moe=True),
        "moe_tied": Geometry(
            moe=True,
            tied=True,
            full_attention=(1, 2, 4),
            heads=(4, 1),
            head_dim=48,
            delta_heads=(2, 2),
            delta_dims=(24, 16),
            partial_rotary_factor=0.5,
            mrope_section=(6, 3, 3),
            rope_theta=1e7,
            experts=(7, 3),
        ),
        "moe_linear": Geometry(
            moe=True,
            heads=(5, 5),
            delta_heads=(1, 5),
            partial_rotary_factor=0.5,
            mrope_section=(4, 2, 2),
            rope=(("rope_type", "linear"), ("factor", 3.0)),
        ),
        "dense": Geometry(moe=False, partial_rotary_factor=1.0, mrope_section=(6, 5, 5)),
        "dense_tied": Geometry(
            moe=False, tied=True, head_dim=48, mrope_section=(2, 2, 2), rope_theta=1e6, conv_width=3, hidden_size=60
        ),
        "dense_yarn": Geometry(
            moe=False,
            full_attention=(0, 2, 3),
            partial_rotary_factor=0.5,
            mrope_section=(3, 3, 2),
            rope=(("rope_type", "yarn"), ("factor", 4.0), ("original_max_position_embeddings", 64)),
            max_position_embeddings=256,
        ),
    }
)


@dataclass(frozen=True)
class Layout:
    """How a checkpoint names and divides its tensors; see save."""

    prefix: Literal["model.language_model.", "language_model.model.", "model."] = "model.language_model."
    text_only: bool = False  # ...ForCausalLM with a flat config.json; otherwise ...ForConditionalGeneration
    stacked_experts: bool = True
    files: int = 1
    vision: bool = True
    mtp: bool = True
    dtype: torch.dtype = torch.float32
    head: str = "lm_head.weight"


TEXT_ONLY = Layout(prefix="model.", text_only=True, vision=False, mtp=False)
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "published": Layout(files=3),
        "one_file": Layout(),
        "each_expert": Layout(stacked_experts=False, files=3),
        "nested": Layout(prefix="language_model.model."),
        "text_only": TEXT_ONLY,
        "text_only_each_expert": replace(TEXT_ONLY, stacked_experts=False, files=3),
        "text_only_published_prefix": replace(TEXT_ONLY, prefix="model.language_model.", mtp=True),
        "bfloat16": Layout(files=3, dtype=torch.bfloat16),
    }
)
RELOADED_BY_HF = tuple(name for name in LAYOUTS if name != "nested")  # transformers does not know that prefix


def text_config(geometry: Geometry) -> Any:
    """The configuration of transformers' text model."""
    g = geometry
    kinds = ["full_attention" if i in g.full_attention else "linear_attention" for i in range(g.layers)]
    common: dict[str, Any] = {
        "vocab_size": g.vocab_size,
        "hidden_size": g.hidden_size,
        "num_hidden_layers": g.layers,
        "layer_types": kinds,
        "num_attention_heads": g.heads[0],
        "num_key_value_heads": g.heads[1],
        "head_dim": g.head_dim,
        "linear_num_key_heads": g.delta_heads[0],
        "linear_num_value_heads": g.delta_heads[1],
        "linear_key_head_dim": g.delta_dims[0],
        "linear_value_head_dim": g.delta_dims[1],
        "linear_conv_kernel_dim": g.conv_width,
        "max_position_embeddings": g.max_position_embeddings,
        "tie_word_embeddings": g.tied,
        "rope_parameters": {
            **dict(g.rope),
            "rope_theta": g.rope_theta,
            "partial_rotary_factor": g.partial_rotary_factor,
            "mrope_interleaved": True,
            "mrope_section": list(g.mrope_section),
        },
        "rms_norm_eps": g.rms_norm_eps,
        "dtype": "float32",
    }
    if not g.moe:
        return Qwen3_5TextConfig(**common, intermediate_size=g.intermediate_size)
    return Qwen3_5MoeTextConfig(
        **common,
        num_experts=g.experts[0],
        num_experts_per_tok=g.experts[1],
        moe_intermediate_size=g.expert_sizes[0],
        shared_expert_intermediate_size=g.expert_sizes[1],
    )


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights so large that a wrong element of any of them shows in the logits, and none that starts as 0 or 1.

    And yet well conditioned: rounding in fp32 moves the logits by 5e-5 at most (test_hf.py). So what goes into the
    residual stream is smaller, states decay slowly, and rms_norm_eps is not tiny: a norm of nearly nothing would
    multiply the rounding of what it was computed from.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            draw = torch.randn(p.shape, generator=generator)
            if name.endswith("A_log"):
                p.copy_(draw * 0.7 - 2)
            elif name.endswith("linear_attn.norm.weight"):
                p.copy_(1 + draw * 0.3)
            elif name.endswith("conv1d.weight") or "embed_tokens" in name:
                p.copy_(draw * 0.5)
            elif name.endswith(INTO_RESIDUAL):
                p.copy_(draw * 0.03)
            else:
                p.copy_(draw * (0.3 if p.ndim == 1 else 0.2))


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A random ...ForCausalLM of GEOMETRIES[name], computing in fp32; its weights are values that `dtype` can hold."""
    geometry = GEOMETRIES[name]
    model = (Qwen3_5MoeForCausalLM if geometry.moe else Qwen3_5ForCausalLM)(text_config(geometry)).float().eval()
    randomise(model, seed)
    for key, p in model.named_parameters():
        if not key.endswith(KEPT_IN_FLOAT32):
            p.data = p.data.to(dtype).float()
    return model


def logits(model: Any, token_ids: Sequence[int], positions_3T: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 logits [T, V] of one prefill; positions [3, T] (time, height, width) default to 0 .. T."""
    more = {} if positions_3T is None else {"position_ids": positions_3T[:, None]}
    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False, **more).logits[0].float()


def greedy(model: Any, prompt: Sequence[int], n: int) -> list[int]:
    """The `n` token ids that the model goes on with, always taking the most likely one, and never stopping."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=n,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def save(model: Any, folder: Path, layout: Layout | str = "published") -> dict[str, torch.Tensor]:
    """Write `model` (from build) as a checkpoint, weights and config.json, into `folder`; returns what was stored.

    Vision and MTP tensors are random: they are there to be left out.
    """
    if isinstance(layout, str):
        layout = LAYOUTS[layout]
    folder.mkdir(parents=True, exist_ok=True)
    stored = _text_tensors(model, layout)
    if layout.mtp:
        stored |= _mtp_tensors(model, layout)
    if layout.vision:
        stored |= _vision_tensors(model)
    stored = {
        name: tensor.to(torch.float32 if name.endswith(KEPT_IN_FLOAT32) else layout.dtype).contiguous().clone()
        for name, tensor in stored.items()
    }
    _write_files(stored, folder, layout.files)
    (folder / "config.json").write_text(json.dumps(config_json(model, layout), indent=2) + "\n")
    return stored


def config_json(model: Any, layout: Layout) -> dict[str, Any]:
    """What stands in config.json, as published for this layout."""
    moe = model.config.model_type == "qwen3_5_moe_text"
    family = "Qwen3_5Moe" if moe else "Qwen3_5"
    dtype = str(layout.dtype).removeprefix("torch.")
    text = {**model.config.to_dict(), "dtype": dtype, "mtp_num_hidden_layers": int(layout.mtp)}
    for key in ("transformers_version", "architectures"):
        text.pop(key, None)
    if layout.text_only:
        return {**text, "architectures": [f"{family}ForCausalLM"]}
    config = (Qwen3_5MoeConfig if moe else Qwen3_5Config)(
        vision_config=_vision_config(model).to_dict(), tie_word_embeddings=model.config.tie_word_embeddings
    ).to_dict()
    config.pop("transformers_version", None)
    return {**config, "text_config": text, "dtype": dtype, "architectures": [f"{family}ForConditionalGeneration"]}


def _text_tensors(model: Any, layout: Layout) -> dict[str, torch.Tensor]:
    tensors = dict(model.state_dict())
    head = tensors.pop("lm_head.weight")
    named = _experts({layout.prefix + name.removeprefix("model."): t for name, t in tensors.items()}, layout)
    return named if model.config.tie_word_embeddings else {**named, layout.head: head}


def _experts(tensors: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors, with the stacked experts among them taken apart where the layout wants it."""
    if layout.stacked_experts:
        return dict(tensors)
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            apart[name] = tensor
            continue
        for e, expert in enumerate(tensor):
            parts = zip(("gate", "up"), expert.chunk(2), strict=True) if last == "gate_up_proj" else [("down", expert)]
            apart |= {f"{stem}.{e}.{part}_proj.weight": piece for part, piece in parts}
    return apart


def _mtp_tensors(model: Any, layout: Layout) -> dict[str, torch.Tensor]:
    """Random tensors under the names and in the shapes of one MTP layer: full attention, then the family's MLP."""
    hidden = model.config.hidden_size
    layer = model.model.layers[model.config.layer_types.index("full_attention")].state_dict()
    shapes = {f"mtp.layers.0.{name}": tensor.shape for name, tensor in layer.items()}
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    generator = torch.Generator().manual_seed(1)
    return _experts({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, layout)


def _vision_config(model: Any) -> Any:
    kind = Qwen3_5MoeVisionConfig if model.config.model_type == "qwen3_5_moe_text" else Qwen3_5VisionConfig
    return kind(
        depth=1,
        hidden_size=32,
        num_heads=2,
        intermediate_size=48,
        patch_size=4,
        out_hidden_size=model.config.hidden_size,
        num_position_embeddings=16,
    )


def _vision_tensors(model: Any) -> dict[str, torch.Tensor]:
    """A tiny vision tower; the towers of the dense and the MoE models are alike."""
    tower = Qwen3_5VisionModel(Qwen3_5VisionConfig(**_vision_config(model).to_dict()))
    randomise(tower, 2)
    return {f"model.visual.{name}": tensor for name, tensor in tower.state_dict().items()}


def _write_files(tensors: Mapping[str, torch.Tensor], folder: Path, files: int) -> None:
    """One model.safetensors, or several files and their index; the tensors are dealt out so that layers are parted."""
    if files == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(tensors), {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        part = names[i::files]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
