"""Which modules of the family become what, and the config that says so, in the four layouts that people publish."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from shardwise.checkpoint.encode import BLOCK, GROUP, Kind
from shardwise.checkpoint.names import bare

Layout = Literal["fp8", "nvfp4", "nvfp4-ct", "mixed"]

CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "attention": r"self_attn\.[qkvo]_proj",
        "delta": r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)",
        "shared": r"mlp\.shared_expert\.(gate|up|down)_proj",
        "experts": r"mlp\.experts\.(\d+\.(gate|up|down)_proj|gate_up_proj|down_proj)",
        "mlp": r"mlp\.(gate|up|down)_proj",
    }
)
MODULE = re.compile(r"(?P<mtp>mtp\.)?layers\.\d+\.(?P<rest>.+)")


class Recipe(NamedTuple):
    """What each class of modules becomes; a class that is not named stays as it is.

    mtp: whether the layers of multi-token prediction are treated alike. kv_scales: whether scales of an FP8 KV cache
    are written.
    """

    kinds: Mapping[str, Kind]
    mtp: bool = False
    kv_scales: bool = False


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "fp8": Recipe(dict.fromkeys(CLASSES, "fp8_block"), mtp=True),
        "nvfp4": Recipe(
            dict.fromkeys(("attention", "delta"), "fp8_tensor")  # pyright: ignore[reportArgumentType]
            | dict.fromkeys(("shared", "experts", "mlp", "head"), "nvfp4")
        ),
        "nvfp4-ct": Recipe(dict.fromkeys(CLASSES, "nvfp4_ct")),
        "mixed": Recipe(
            dict.fromkeys(("attention", "experts"), "nvfp4_ct")  # pyright: ignore[reportArgumentType]
            | dict.fromkeys(("shared", "mlp", "head"), "fp8_channel"),
            kv_scales=True,
        ),
    }
)


def kind_of(module: str, recipe: Recipe) -> Kind | None:
    """What `module` becomes, by its name in the checkpoint; None if it stays as it is."""
    name = bare(module)
    if name == "lm_head":
        return recipe.kinds.get("head")
    match = MODULE.fullmatch(name)
    if not match or (match["mtp"] and not recipe.mtp):
        return None
    found = next((kind for kind, pattern in CLASSES.items() if re.fullmatch(pattern, match["rest"])), None)
    return recipe.kinds.get(found) if found else None


def quantization_config(
    layout: Layout, kinds: Mapping[str, Kind], plain: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """quantization_config for config.json, and hf_quant_config.json if the layout has one.

    kinds: of every module that is quantised. plain: the modules that are matrices and stay as they are.
    """
    plain = sorted(plain)
    if layout == "fp8":
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": plain,
        }, None  # fmt: skip
    if layout == "nvfp4":
        return _modelopt(kinds, plain)
    return _compressed_tensors(layout, kinds, plain), None


def _modelopt(kinds: Mapping[str, Kind], plain: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """One entry a module, one for all experts of a layer. The FP8 KV cache is asked for beside config.json only."""
    layers: dict[str, dict[str, Any]] = {}
    for module, kind in kinds.items():
        name = re.sub(r"(\.mlp\.experts)\..*", r"\1", module)
        fp8 = kind == "fp8_tensor"
        layers[name] = {"quant_algo": "FP8"} if fp8 else {"quant_algo": "W4A16_NVFP4", "group_size": GROUP}
    config = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    beside = {
        "producer": {"name": "shardwise"},
        "quantization": config | {"kv_cache_quant_algo": "FP8", "exclude_modules": plain},
    }
    return {"quant_method": "modelopt", **config, "ignore": plain}, beside


NVFP4_WEIGHTS: Mapping[str, Any] = MappingProxyType(
    {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": GROUP}
    | {"symmetric": True, "dynamic": False}
)
CHANNEL_WEIGHTS: Mapping[str, Any] = MappingProxyType(
    {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
)
TOKEN_INPUTS: Mapping[str, Any] = MappingProxyType(
    {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
)


def _compressed_tensors(layout: Layout, kinds: Mapping[str, Kind], plain: list[str]) -> dict[str, Any]:
    """One group for all of one kind; in "mixed" two, whose targets are patterns, and scales of the KV cache."""
    nvfp4 = {"weights": dict(NVFP4_WEIGHTS), "input_activations": None, "output_activations": None}
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
    if layout == "nvfp4-ct":
        groups = {"group_0": {"targets": ["Linear"], **nvfp4, "format": "nvfp4-pack-quantized"}}
        return config | {"format": "nvfp4-pack-quantized", "config_groups": groups, "ignore": plain}
    channel = {"weights": dict(CHANNEL_WEIGHTS), "input_activations": dict(TOKEN_INPUTS), "output_activations": None}
    targets = [
        [f"re:.*{CLASSES[name]}$" for name in CLASSES if RECIPES[layout].kinds.get(name) == kind]
        + ["re:.*lm_head$"] * (kind == RECIPES[layout].kinds.get("head"))
        for kind in ("nvfp4_ct", "fp8_channel")
    ]
    return config | {
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {"targets": targets[0], **nvfp4, "format": "nvfp4-pack-quantized"},
            "group_1": {"targets": targets[1], **channel, "format": "float-quantized"},
        },
        "ignore": plain,
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
    }
