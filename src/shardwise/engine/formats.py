"""What the KV cache holds, and whether the device's kernels have the weights' formats: known before memory is taken."""

from collections.abc import Mapping

from shardwise.checkpoint.formats import Formats
from shardwise.checkpoint.index import CheckpointIndex
from shardwise.checkpoint.names import Names
from shardwise.checkpoint.scales import read_scalar
from shardwise.config import ConfigError, ModelConfig, ServeConfig
from shardwise.kernels.formats import problem
from shardwise.models.qwen3_5 import layer_name
from shardwise.shard import ParamSpec, Partitions, local

DTYPE_NAMES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
FP8 = "F8_E4M3"


def kv_cache_dtype(serve: ServeConfig, formats: Formats, dtype: str) -> str:
    """What pages hold, by safetensors' name: what the user says, else the checkpoint, else the activations' `dtype`."""
    asked = serve.kv_cache_dtype
    if asked == "auto":
        return FP8 if formats.kv_cache_dtype == "fp8" else dtype
    return FP8 if asked == "fp8" else DTYPE_NAMES[asked]


def kv_scales(
    model: ModelConfig, names: Names, formats: Formats, index: CheckpointIndex | None
) -> dict[int, tuple[float, float]]:
    """The scales of keys and values of each layer that the checkpoint has them for. Every rank holds them whole.

    Raises ConfigError for one that is no scale, or without its pair.
    """
    found: dict[int, tuple[float, float]] = {}
    for i, kind in enumerate(model.layer_types if index is not None else ()):
        pair = formats.kv_scales(names.text(f"{layer_name(i)}.self_attn")) if kind == "full_attention" else None
        if pair and index is not None:
            k_scale, v_scale = (read_scalar(index, name) for name in pair)
            found[i] = k_scale, v_scale
    return found


def check_formats(serve: ServeConfig, device_type: str, specs: Mapping[str, ParamSpec], cut: Partitions) -> None:
    """Raises ConfigError for the first weight in a format that the Triton kernels lack, if these are to run."""
    if serve.kernels != "triton" and (serve.kernels != "auto" or device_type != "cuda"):
        return
    for spec in specs.values():
        if len(spec.format) > 1 and (found := problem(local(spec, cut, 0))):
            raise ConfigError(f"{spec.sources[0]}: the kernels of GPUs do not serve {found}; use --kernels reference")
