"""Headers and configs of checkpoints that need no files."""

from collections.abc import Mapping
from math import prod
from typing import Any

from shardwise.checkpoint.formats import Formats
from shardwise.checkpoint.index import TensorInfo
from shardwise.shard import BITS, Stored

Headers = Mapping[str, tuple[str, tuple[int, ...]]]
LAYER = "model.language_model.layers.0."
Q, K, V = (f"{LAYER}self_attn.{name}_proj" for name in "qkv")
EXPERT = f"{LAYER}mlp.experts.{{e}}."
BANK = f"{LAYER}mlp.experts.gate_up_proj"
OUT, IN = 256, 384


class Fake:
    """Headers without files."""

    device = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, headers: Headers) -> None:
        self.headers = headers

    def __contains__(self, name: object) -> bool:
        return name in self.headers

    def info(self, name: str) -> TensorInfo:
        dtype, shape = self.headers[name]
        return TensorInfo("model.safetensors", dtype, shape, prod(shape) * BITS.get(dtype, 8) // 8)

    def read(self, name: str, src: tuple[slice, ...]) -> Any:
        raise AssertionError(f"{name} was read")


def module(name: str, **tensors: tuple[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {f"{name}.{suffix}": header for suffix, header in tensors.items()}


def formats(config: Mapping[str, Any] | None, headers: Headers, beside: Mapping[str, Any] | None = None) -> Formats:
    raw = {"quantization_config": config} if config else {}
    return Formats(raw, beside, Fake(headers), "BF16")  # pyright: ignore[reportArgumentType]


def ct(weights: Mapping[str, Any], *targets: str, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": list(targets) or ["Linear"], "weights": weights}},
        "ignore": list(ignore),
    }


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
E4M3 = {"num_bits": 8, "type": "float"}
CODES = Stored(".weight", "F8_E4M3")
PAIRS = Stored(".weight", "U8", (1, 2), packed=True)
PACKED = Stored(".weight_packed", "U8", (1, 2), packed=True)
GROUPS = Stored(".weight_scale", "F8_E4M3", (1, 16), role="scale")
WEIGHT = ("F8_E4M3", (OUT, IN))
NIBBLES, SCALES = ("U8", (OUT, IN // 2)), ("F8_E4M3", (OUT, IN // 16))


def scale(suffix: str, dtype: str, *block: int | None, role: Any = "scale") -> Stored:
    return Stored(suffix, dtype, block, role=role)


MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {Q: {"quant_algo": "FP8"}}}


def nvfp4(name: str) -> Headers:
    return module(name, weight=NIBBLES, weight_scale=SCALES, weight_scale_2=("F32", ()), input_scale=("F32", ()))
