"""Made-up weights, and small checkpoints written from them.

A value is a pure function of its tensor's name, its place in the whole tensor and the seed, in integers up to the last
step: any rank, on any device, sees its part of the same whole. Nothing is read, so that a full-size model starts in
seconds from its config alone.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from itertools import pairwise
from math import log, prod, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from shardwise.checkpoint.index import DTYPES, INDEX_FILE, TensorInfo
from shardwise.checkpoint.names import PREFIXES, bare, needed
from shardwise.config import ConfigError
from shardwise.shard import BITS, ParamSpec, Stored

CPU_CHUNK_ELEMENTS, DEVICE_CHUNK_ELEMENTS = 1 << 18, 1 << 22  # temporaries take some 24 bytes an element
HOST_ELEMENTS = 256  # up to so many, a CPU is done before a GPU has been told
FP8_SPREAD = 64.0  # standard deviation of e4m3 codes, whose largest is 448
E2M1_SPREAD = 2.93  # standard deviation of e2m1 values if all codes are equally likely
STEP, MIX_1, MIX_2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # splitmix64
LANES = 4  # 16-bit numbers in 64 bits; their sum is roughly normal
LANES_SPREAD = sqrt(LANES * ((1 << 32) - 1) / 12)

Fill = Callable[[torch.Tensor], torch.Tensor]  # from 64 random bits an element, as int64, to values


class _Made(NamedTuple):
    info: TensorInfo
    fill: Fill


class DummySource:
    """Weights for `specs`, roughly normal with standard deviation `std`, made on `device`."""

    def __init__(
        self, specs: Iterable[ParamSpec], *, std: float = 0.02, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self._seed = seed
        self._made: dict[str, _Made] = {}
        for spec in specs:
            fills = {stored: _fill(spec, stored, std) for stored in spec.format}
            for name, stored, shape in needed(spec):
                info = TensorInfo("made-up weights", stored.dtype, shape, prod(shape) * BITS[stored.dtype] // 8)
                self._made[name] = _Made(info, fills[stored])

    @property
    def names(self) -> tuple[str, ...]:
        """Those that a checkpoint would have."""
        return tuple(self._made)

    def __contains__(self, name: object) -> bool:
        return name in self._made

    def info(self, name: str) -> TensorInfo:
        """Raises ConfigError if no spec has `name`."""
        if name not in self._made:
            raise ConfigError(f"made-up weights: there is no tensor {name!r}; add its spec")
        return self._made[name].info

    def read(self, name: str, src: tuple[slice, ...]) -> torch.Tensor:
        """The slice `src` of tensor `name`, one per axis (none for a scalar), in its dtype, on the source's device."""
        info, fill = self.info(name), self._made[name].fill
        key = int.from_bytes(blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest(), "little", signed=True)
        runs = [range(size)[axis] for axis, size in zip(src, info.shape, strict=True)] or [range(1)]
        device = torch.device("cpu") if prod(map(len, runs)) <= HOST_ELEMENTS else self.device
        places = torch.full((1,), key, dtype=torch.int64, device=device)  # may overflow: it only names an element
        for i, run in enumerate(runs[:-1]):
            steps = torch.arange(run.start, run.stop, device=device) * prod(info.shape[i + 1 :])
            places = (places[:, None] + steps).flatten()
        last = torch.arange(runs[-1].start, runs[-1].stop, device=device)
        values = torch.empty((len(places), len(last)), dtype=DTYPES[info.dtype], device=device)
        chunk = CPU_CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
        rows = max(1, chunk // max(1, len(last)))
        for start, stop in pairwise((*range(0, len(places), rows), len(places))):
            values[start:stop] = fill(_random_bits(places[start:stop, None] + last)).to(values.dtype)
        return values.view([len(run) for run in runs] if info.shape else []).to(self.device)

    def whole(self, name: str) -> torch.Tensor:
        """All of tensor `name`."""
        return self.read(name, tuple(slice(0, size) for size in self.info(name).shape))


def _random_bits(places: torch.Tensor) -> torch.Tensor:
    """64 bits for each int64, by the splitmix64 generator; multiplication wraps."""
    bits = places * STEP
    bits = (bits ^ _shifted(bits, 30)) * MIX_1
    bits = (bits ^ _shifted(bits, 27)) * MIX_2
    return bits ^ _shifted(bits, 31)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _normal(bits: torch.Tensor) -> torch.Tensor:
    """Standard normal, roughly: never beyond 3.5."""
    total = sum(((bits >> 16 * lane) & 0xFFFF for lane in range(1, LANES)), bits & 0xFFFF)
    return (total - LANES * 0xFFFF // 2).float() * (1 / LANES_SPREAD)


def _uniform(low: float, high: float) -> Fill:
    return lambda bits: (bits & 0xFFFFFF).float() * ((high - low) / (1 << 24)) + low


def _fill(spec: ParamSpec, stored: Stored, std: float) -> Fill:
    """How values of `stored` come from random bits, so that weights have spread `std` once dequantised."""
    packed = any(other.packed for other in spec.format)
    size = std / (E2M1_SPREAD if packed else FP8_SPREAD)
    name = bare(spec.sources[0]) + stored.suffix
    if stored.role == "input_scale":
        return _uniform(0.75, 1.25)
    if stored.role == "inverse_scale":
        return _uniform(0.75 / size, 1.25 / size)
    if stored.role == "scale":
        # Groups have a global scale beside their own.
        return _uniform(0.5, 1.5) if stored.dtype == "F8_E4M3" else _uniform(0.75 * size, 1.25 * size)
    if stored.packed:
        return lambda bits: bits & 0xFF
    if stored.dtype == "F8_E4M3":
        return lambda bits: _normal(bits) * FP8_SPREAD
    if name.endswith("linear_attn.A_log"):
        return _uniform(0.0, log(16))
    if name.endswith("linear_attn.dt_bias"):
        return _uniform(-6.9, -2.25)  # softplus of it is a time step of 0.001 to 0.1
    if name.endswith("linear_attn.norm.weight"):
        return lambda bits: _normal(bits) * std + 1
    return lambda bits: _normal(bits) * std


def renamed(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Text tensors under another of the three prefixes; with "language_model.model." the head moves, too."""
    if prefix not in PREFIXES:
        raise ValueError(f"prefix {prefix!r}: use one of {PREFIXES}")
    head = "language_model." if prefix == "language_model.model." else ""
    return {
        (head if bare(name).startswith("lm_head") else prefix) + bare(name): tensor for name, tensor in tensors.items()
    }


def one_by_one(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacked plain experts, gate rows first, as separate tensors of each expert."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for half, part in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True):
                found |= {f"{base}.experts.{e}.{half}.weight": expert for e, expert in enumerate(part)}
        elif kind == "down_proj":
            found |= {f"{base}.experts.{e}.down_proj.weight": part for e, part in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    files: int = 1,
    hf_quant_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write `tensors` to `files` safetensors files, dealt out in turn, with config.json and an index if several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if hf_quant_config is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant_config, indent=2), encoding="utf-8")
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for n in range(files):
        file = "model.safetensors" if files == 1 else f"model-{n + 1:05}-of-{files:05}.safetensors"
        part = {name: tensors[name].contiguous().clone() for name in names[n::files]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if files > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return folder
