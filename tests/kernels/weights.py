"""Weights of every format for tests: made-up checkpoint tensors, cut for a rank as the loader would cut them.

Legend: E experts, O out, I in.
"""

from collections.abc import Sequence

import torch

from shardwise.checkpoint.weight import Weight
from shardwise.shard import ParamSpec, Partition, Segment, Stored, copies, local, local_shape

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
FORMATS: dict[str, tuple[Stored, ...]] = {
    "fp32": (Stored("", "F32"),),
    "fp16": (Stored("", "F16"),),
    "bf16": (Stored("", "BF16"),),
    "fp8_block": (Stored("", "F8_E4M3"), Stored("_scale", "BF16", (128, 128), role="scale")),
    "fp8_block_f32": (Stored("", "F8_E4M3"), Stored("_scale", "F32", (64, 64), role="scale")),
    "fp8_channel": (Stored("", "F8_E4M3"), Stored("_scale", "BF16", (1, 0), role="scale")),
    "fp8_channel_1d": (Stored("", "F8_E4M3"), Stored("_scale", "F32", (1, None), role="scale")),
    "fp8_tensor": (
        Stored("", "F8_E4M3"),
        Stored("_scale", "F32", (None, None), role="scale"),
        Stored("_input", "F32", (None, None), role="input_scale"),
    ),
    "nvfp4": (
        Stored("", "U8", (1, 2), packed=True),
        Stored("_scale", "F8_E4M3", (1, 16), role="scale"),
        Stored("_scale_2", "F32", (None, None), role="scale"),
        Stored("_input", "F32", (None, None), role="input_scale"),
    ),
    "nvfp4_ct": (
        Stored("_packed", "U8", (1, 2), packed=True),
        Stored("_scale", "F8_E4M3", (1, 16), role="scale"),
        Stored("_global", "F32", (0, 0), role="inverse_scale"),
    ),
    "nvfp4_row": (
        Stored("", "U8", (1, 2), packed=True),
        Stored("_scale", "F8_E4M3", (1, 16), role="scale"),
        Stored("_scale_2", "F32", (1, 0), role="scale"),
    ),
}


def _values(stored: Stored, shape: Sequence[int], generator: torch.Generator, device: str) -> torch.Tensor:
    """Random stored elements whose product over a format has a spread of some 0.05."""
    if stored.dtype == "U8":
        return torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=generator, device=device)
    noise = torch.rand(tuple(shape), generator=generator, device=device)
    if stored.role == "value":
        span = 0.1 if stored.dtype in ("F32", "BF16", "F16") else 400.0
        return ((noise * 2 - 1) * span).to(DTYPES[stored.dtype])
    if stored.dtype == "F8_E4M3":
        return (noise * 200 + 20).to(DTYPES[stored.dtype])
    span = 0.0003 if "_scale_2" not in stored.suffix else 0.0002
    return ((noise + 0.5) * span if stored.role != "inverse_scale" else (noise + 0.5) * 5000).to(DTYPES[stored.dtype])


def spec_of(
    axes: tuple[tuple[Segment, ...] | int, ...], form: str, fused: bool = True, group: str | None = None, cut: int = 0
) -> ParamSpec:
    """A spec in one of FORMATS; fused: one source, otherwise one for each segment (of the axis that has several)."""
    segments = next((axis for axis in axes if not isinstance(axis, int) and len(axis) > 1), ())
    sources = ("w",) if fused or not segments else tuple(f"w.{s.name}" for s in segments)
    return ParamSpec(axes, FORMATS[form], sources, group, cut)


def sources_of(spec: ParamSpec, seed: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    """All tensors that the checkpoint would have behind `spec` (one without "{e}")."""
    generator = torch.Generator(device).manual_seed(seed)
    found = {}
    for n, source in enumerate(spec.sources):
        sizes = [
            spec.segments(i)[n].size if spec.joins(i) else sum(s.size for s in spec.segments(i))
            for i in range(len(spec.axes))
        ]
        for stored in spec.format:
            blocks = [spec.block(stored, i) for i in range(len(sizes))]
            shape = [-(-size // b) if b else 1 for size, b in zip(sizes, blocks, strict=True) if b is not None]
            found[source + stored.suffix] = _values(stored, shape, generator, device)
    return found


def cut_weight(
    spec: ParamSpec, sources: dict[str, torch.Tensor], partitions: dict[str, Partition], rank: int, device: str = "cpu"
) -> Weight:
    """What `rank` holds of `spec`, filled by the steps that shard.copies gives."""
    held = local(spec, partitions, rank)
    tensors = [torch.zeros(part.shape, dtype=DTYPES[part.stored.dtype], device=device) for part in held]
    for step in copies(spec, partitions, rank):
        at = [part.stored for part in held].index(step.stored)
        # Copying as bytes: indexing of e4m3 tensors is not implemented everywhere.
        as_bytes = torch.uint8 if tensors[at].element_size() == 1 else tensors[at].dtype
        source = sources[step.name].view(as_bytes)
        tensors[at].view(as_bytes)[step.dst] = source[step.src].to(device) if step.src else source.to(device)
    return Weight(spec, local_shape(spec, partitions, rank), tuple(held), tuple(tensors))


def make_weight(shape: Sequence[int], form: str, seed: int = 0, device: str = "cpu") -> Weight:
    """An uncut weight of `shape` in one of FORMATS."""
    spec = spec_of(tuple(shape), form)
    return cut_weight(spec, sources_of(spec, seed, device), {}, 0, device)
