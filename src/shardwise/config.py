"""What is served and how: the model's geometry from config.json, and the options of one server.

Both are frozen and resolved once. Environment variables are read in this file and nowhere else.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

ARCHITECTURES = {
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5ForCausalLM": "qwen3_5",
}
STORE_PER_GROUP = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ROPE_TYPES = ("default", "linear", "yarn")


class ConfigError(ValueError):
    """Bad input of the user's: one line that names the thing, the numbers and the way out. The CLI exits with 2."""


@dataclass(frozen=True)
class ModelConfig:
    """Geometry of a text model of the family, in the field's terms. Sizes are of the whole model, never of a rank."""

    model_type: Literal["qwen3_5_moe", "qwen3_5"]
    vocab_size: int
    hidden_size: int
    layer_types: tuple[Literal["linear_attention", "full_attention"], ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    rope: Mapping[str, Any]
    rms_norm_eps: float
    delta_key_heads: int
    delta_value_heads: int
    delta_key_dim: int
    delta_value_dim: int
    conv_width: int
    intermediate_size: int  # of the dense MLP; 0 in a MoE
    experts: int  # 0 in a dense model
    experts_per_token: int
    expert_intermediate_size: int
    shared_expert_intermediate_size: int
    tied: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str  # the checkpoint's, by torch's name
    text_only: bool  # a ...ForCausalLM: no vision tower is expected
    mtp_layers: int
    raw: Mapping[str, Any]  # all of config.json, for quantisation and vision

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rope.get("partial_rotary_factor", 1.0))

    @property
    def mrope_section(self) -> tuple[int, ...]:
        """How many of the rotary_dim / 2 frequencies follow time, height and width."""
        return tuple(self.rope.get("mrope_section", (11, 11, 10)))


@dataclass(frozen=True)
class VisionConfig:
    """Geometry of the vision tower, and how the checkpoint's processor scales pixels. Sizes in pixels or elements."""

    depth: int
    hidden_size: int
    heads: int
    intermediate_size: int
    channels: int
    patch_size: int
    frames: int  # of a patch, along time
    merge: int  # merge x merge patches become one token
    out_hidden_size: int
    grid_side: int  # of the square of learned position embeddings
    rope_theta: float
    pixel_mean: tuple[float, ...]  # a channel's value is (byte / 255 - mean) / std
    pixel_std: tuple[float, ...]
    image_token: int
    video_token: int
    start_token: int  # before and behind each picture, and each pair of frames of a video
    end_token: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    def tokens(self, height: int, width: int) -> int:
        """Tokens of a picture of so many patches."""
        return height * width // self.merge**2


def _require(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise ConfigError(f"config.json: {what} is {found!r}, and only {expected!r} is supported")


def _size(text: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = text.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {key} is {value!r}; a whole number of 1 or more is needed")
    return value


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of rotary embeddings, from `rope_parameters` or the older `rope_scaling` and `rope_theta`."""
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope.setdefault("rope_theta", text.get("rope_theta", 10_000.0))
    rope.setdefault("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    if rope["rope_type"] not in ROPE_TYPES:
        raise ConfigError(f"config.json: rope_type is {rope['rope_type']!r}; use one of {', '.join(ROPE_TYPES)}")
    return rope


def _layer_types(text: Mapping[str, Any]) -> tuple[Any, ...]:
    layers = _size(text, "num_hidden_layers")
    interval = text.get("full_attention_interval", 4)
    kinds = text.get("layer_types") or [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)
    ]
    unknown = sorted(set(kinds) - {"linear_attention", "full_attention"})
    if len(kinds) != layers or unknown:
        raise ConfigError(f"config.json: layer_types has {len(kinds)} entries for {layers} layers, unknown: {unknown}")
    return tuple(kinds)


def _token_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def parse_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read `raw`, the contents of config.json (and of generation_config.json, for its stop tokens).

    Raises ConfigError for an unknown architecture and for every setting whose mathematics we do not have.
    """
    names = raw.get("architectures") or ["none named"]
    model_type = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if model_type is None:
        raise ConfigError(f"config.json: architecture {names[0]!r} is not served; known: {', '.join(ARCHITECTURES)}")
    text = raw.get("text_config") or raw
    moe = model_type == "qwen3_5_moe"
    _require(text.get("hidden_act", "silu"), "silu", "hidden_act")
    _require(bool(text.get("attention_bias", False)), False, "attention_bias")
    _require(bool(text.get("attn_output_gate", True)), True, "attn_output_gate")
    _require(text.get("norm_topk_prob", True), True, "norm_topk_prob")
    _require(bool(text.get("mlp_only_layers")), False, "mlp_only_layers (any)")
    heads, kv_heads = _size(text, "num_attention_heads"), _size(text, "num_key_value_heads")
    values, keys = _size(text, "linear_num_value_heads", 32), _size(text, "linear_num_key_heads", 16)
    for what, many, few in (("attention", heads, kv_heads), ("linear attention", values, keys)):
        if many % few:
            raise ConfigError(f"config.json: {many} heads of {what} over {few} key heads are uneven")
    config = ModelConfig(
        model_type=model_type,  # pyright: ignore[reportArgumentType]
        vocab_size=_size(text, "vocab_size"),
        hidden_size=_size(text, "hidden_size"),
        layer_types=_layer_types(text),
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=_size(text, "head_dim", text.get("hidden_size", 0) // heads),
        rope=_rope(text),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        delta_key_heads=keys,
        delta_value_heads=values,
        delta_key_dim=_size(text, "linear_key_head_dim", 128),
        delta_value_dim=_size(text, "linear_value_head_dim", 128),
        conv_width=_size(text, "linear_conv_kernel_dim", 4),
        intermediate_size=0 if moe else _size(text, "intermediate_size"),
        experts=_size(text, "num_experts") if moe else 0,
        experts_per_token=_size(text, "num_experts_per_tok") if moe else 0,
        expert_intermediate_size=_size(text, "moe_intermediate_size") if moe else 0,
        shared_expert_intermediate_size=_size(text, "shared_expert_intermediate_size") if moe else 0,
        tied=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        max_position_embeddings=_size(text, "max_position_embeddings", 32768),
        eos_token_ids=tuple(
            dict.fromkeys(_token_ids((generation or {}).get("eos_token_id")) + _token_ids(text.get("eos_token_id")))
        ),
        dtype=str(
            text.get("dtype") or raw.get("dtype") or text.get("torch_dtype") or raw.get("torch_dtype") or "bfloat16"
        ),
        text_only=all(name.endswith("ForCausalLM") for name in names),
        mtp_layers=int(text.get("mtp_num_hidden_layers") or 0),
        raw=raw,
    )
    if moe and config.experts_per_token > config.experts:
        raise ConfigError(f"config.json: {config.experts_per_token} experts a token of {config.experts}")
    if sum(config.mrope_section) * 2 != config.rotary_dim:
        raise ConfigError(
            f"config.json: mrope_section {list(config.mrope_section)} must add up to half of the "
            f"{config.rotary_dim} rotary dimensions"
        )
    return config


def parse_vision_config(raw: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> VisionConfig | None:
    """The tower in `raw`, the contents of config.json; None if it has none. `processor`: preprocessor_config.json.

    Raises ConfigError for every setting whose mathematics we do not have.
    """
    vision, processor = raw.get("vision_config"), processor or {}
    if not vision:
        return None
    _require(vision.get("hidden_act", "gelu_pytorch_tanh"), "gelu_pytorch_tanh", "vision_config.hidden_act")
    _require(bool(vision.get("deepstack_visual_indexes")), False, "vision_config.deepstack_visual_indexes (any)")
    _require(processor.get("rescale_factor", 1 / 255), 1 / 255, "rescale_factor of preprocessor_config.json")
    text = raw.get("text_config") or raw
    hidden, heads = _size(vision, "hidden_size", 1152), _size(vision, "num_heads", 16)
    side = math.isqrt(_size(vision, "num_position_embeddings", 2304))
    if hidden % (4 * heads) or side**2 != vision.get("num_position_embeddings", 2304):
        raise ConfigError(
            f"config.json: a vision tower of {hidden} columns in {heads} heads and "
            f"{vision.get('num_position_embeddings')} positions; heads of 4n columns and a square are needed"
        )
    _require(vision.get("out_hidden_size"), text.get("hidden_size"), "vision_config.out_hidden_size")
    rope = vision.get("rope_parameters") or {}
    return VisionConfig(
        depth=_size(vision, "depth", 27),
        hidden_size=hidden,
        heads=heads,
        intermediate_size=_size(vision, "intermediate_size", 4304),
        channels=_size(vision, "in_channels", 3),
        patch_size=_size(vision, "patch_size", 16),
        frames=_size(vision, "temporal_patch_size", 2),
        merge=_size(vision, "spatial_merge_size", 2),
        out_hidden_size=_size(vision, "out_hidden_size"),
        grid_side=side,
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        pixel_mean=tuple(processor.get("image_mean", (0.5, 0.5, 0.5))),
        pixel_std=tuple(processor.get("image_std", (0.5, 0.5, 0.5))),
        image_token=_size(raw, "image_token_id"),
        video_token=_size(raw, "video_token_id"),
        start_token=_size(raw, "vision_start_token_id"),
        end_token=_size(raw, "vision_end_token_id"),
    )


def load_vision_config(folder: Path) -> VisionConfig | None:
    """The vision tower of `folder`, a local checkpoint; None if there is none. Raises ConfigError."""
    processor = folder / "preprocessor_config.json"
    return parse_vision_config(read_json(folder / "config.json"), read_json(processor) if processor.exists() else None)


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError if `path` is missing or is not a JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; is this the folder of a checkpoint?") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds {type(data).__name__}, not an object")
    return data


def load_model_config(folder: Path) -> ModelConfig:
    """The model's geometry from `folder`, a local checkpoint. Raises ConfigError."""
    generation = folder / "generation_config.json"
    return parse_model_config(read_json(folder / "config.json"), read_json(generation) if generation.exists() else None)


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one server, as all its processes get them (as JSON). 0 and "auto" mean: choose by what is there."""

    model: str  # a local folder, resolved
    ranks: int = 1
    gpu: tuple[str, ...] = ()  # a device per rank of a host, by index or UUID; indices once ranks start
    gpu_spec: str = ""  # facts of the devices, instead of measuring them
    device_profile: str = ""  # a file with those
    objective: Literal["speed", "context", "balanced"] = "balanced"  # of a split that is ours to choose
    ratio: tuple[float, ...] = ()  # a weight per rank; empty: even
    group_ratios: dict[str, tuple[float, ...]] = {}  # by partition group, over `ratio`
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: made-up weights, from config.json alone
    kernels: Literal["auto", "reference", "triton"] = "auto"
    graphs: bool = True  # decode steps as CUDA graphs, where the device has them
    overlap: bool = True  # kernels start before the previous one ends, where the device can (sm_90 and up)
    shortlist: bool = True  # a copy of the head in 8 bits says which logits can be the largest, where memory is ample
    comm: Literal["auto", "torch", "p2p", "nccl"] = "auto"
    max_model_len: int = 0  # tokens of one request, prompt and answer
    max_num_seqs: int = 0  # requests in one step
    max_num_batched_tokens: int = 0  # tokens in one step
    gpu_memory_utilization: float = 0.9
    kv_tokens: int = 0  # size of the KV cache; 0: what the memory leaves
    # auto: fp8 if the checkpoint asks for it, else as --dtype
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    page_tokens: int = 64
    # where routed experts are: on the device, in host memory with slots on the device, or there and computed on the CPU
    experts: Literal["auto", "resident", "offload", "hybrid"] = "auto"
    bank_cache: str = ""  # a folder where experts are kept as they lie in host memory
    expert_slots: int = 0  # of each layer, on the device
    kv_reserve_tokens: int = 0  # of KV cache, at least, before slots get memory
    vision: Literal["auto", "shard", "replicate", "off"] = "auto"  # the vision tower: cut, whole on each rank, left out
    vision_cache_tokens: int = 32768  # tokens' worth of encoded pictures that are kept for pictures that come again
    max_image_pixels: int = 4 << 20  # a larger picture, or frame of a video, is scaled down to this
    max_images: int = 64  # of one request; a video counts as one for each two of its frames
    allow_remote_images: Literal["no", "public", "any"] = "no"  # http(s); public: of public addresses only
    allowed_media_path: str = ""  # file:// below this folder
    prefix_cache: bool = True  # keep what was computed for prompts that begin alike
    snapshot_rows: int = 0  # recurrent states that the prefix cache keeps
    host_cache_gib: float = 0.0  # of host memory, on each rank, for what the prefix cache has no room for on the device
    snapshot_every: int = 8192  # tokens of a prompt between states to keep, besides the ends of turns
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: str = ""
    reasoning_parser: Literal["auto", "none"] = "auto"  # none: <think> stays in the content of a chat answer
    tool_call_parser: Literal["auto", "xml", "json", "none"] = "auto"  # none: calls stay in the content
    grammar_backend: Literal["xgrammar", "llguidance"] = "xgrammar"  # of structured output; llguidance is optional
    max_body_bytes: int = 32 * 2**20  # of one HTTP request
    ui: bool = True  # the page at /
    max_queued_requests: int = 1024  # that wait beside those that run, before new ones are turned away; 0: any number
    drain_seconds: float = 30.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True)
class RankEnvironment:
    """Who this process is in a group that torch's elastic launcher started."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    restarts: int
    shared_store: bool = False  # the launcher's own store is used: see launcher_environment


def rank_environment(environment: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """This process's place in an elastic group, or None outside one."""
    env = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    return RankEnvironment(
        rank=int(env["RANK"]),
        world=int(env["WORLD_SIZE"]),
        local_rank=int(env["LOCAL_RANK"]),
        local_world=int(env["LOCAL_WORLD_SIZE"]),
        restarts=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        shared_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def launcher_environment(ranks: int) -> dict[str, str]:
    """The environment of a group of `ranks` on this host: ours, with the CPU's threads of each rank if not set.

    The launcher's own store outlives a group, so a group that is started again could meet by the addresses of the dead
    one; with sharing off, every group has a store of its own.
    """
    environment = {**os.environ, STORE_PER_GROUP: "1"}
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # indices as the vendor's tools show them
    environment.setdefault("OMP_NUM_THREADS", str(rank_threads(ranks)))
    return environment


def rank_threads(ranks: int) -> int:
    """Threads of each of `ranks` ranks of this host: an even share of its cores, but one for the API process.

    Threads that wait for each other at every small operation are several times slower where even one lacks a core.
    """
    return max(1, ((os.cpu_count() or 1) - 1) // ranks)


def forbid_multicast() -> None:
    """Keep torch's symmetric memory off the switch's multicast, which is not to be relied on. To be said before use."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
