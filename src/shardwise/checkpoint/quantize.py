"""A quantised copy of a plain checkpoint, written tensor by tensor: memory stays within some hundred megabytes."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.encode import E4M3_MAX, Kind, Planned, encode, planned, row_steps, shared_scale
from shardwise.checkpoint.index import INDEX_FILE, Source
from shardwise.checkpoint.names import PLAIN_FLOATS
from shardwise.checkpoint.recipes import RECIPES, Layout, Recipe, kind_of, quantization_config
from shardwise.checkpoint.write import TensorWriter, nbytes
from shardwise.config import ConfigError

STEP_ELEMENTS = 1 << 23  # of a weight at a time; in fp32, with temporaries, some 200 MB
COPIED = (".json", ".jsonl", ".jinja", ".txt", ".model")
REPLACED = (INDEX_FILE, "config.json", "hf_quant_config.json")
BANKS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")

Progress = Callable[[int, int], None]  # bytes written, bytes in all


class Job(NamedTuple):
    """A module of the new checkpoint and where its weight comes from: a tensor, and what comes before its two axes.

    kind: None if the tensor is copied as it is. rows: those of the source's second last axis.
    """

    tensors: tuple[Planned, ...]
    source: str
    kind: Kind | None = None
    lead: tuple[slice, ...] = ()
    rows: slice = slice(0, 0)
    columns: int = 0


def jobs(source: Source, names: Iterable[str], recipe: Recipe) -> Iterator[Job]:
    """What becomes of each tensor in `names`. Stacked experts that are quantised are written one by one.

    Raises ConfigError for a tensor that is quantised already, or does not fit its new form.
    """
    for name in names:
        info = source.info(name)
        module = name.removesuffix(".weight")
        kind = kind_of(module, recipe) if name.endswith((".weight", *BANKS)) else None
        if kind is None:
            yield Job((Planned(name, info.dtype, info.shape),), name)
            continue
        bank = name.endswith(BANKS)
        if info.dtype not in PLAIN_FLOATS or len(info.shape) != 2 + bank:
            raise ConfigError(
                f"{info.file}: tensor {name!r} is {info.dtype} {list(info.shape)}, expected a plain float of "
                f"{2 + bank} axes; quantise from the unquantised checkpoint"
            )
        try:
            yield from _bank(name, info.shape, kind) if bank else (_matrix(module, name, info.shape, kind),)
        except ValueError as error:
            raise ConfigError(f"checkpoint: {error}; choose another --to") from None


def _matrix(module: str, name: str, shape: tuple[int, ...], kind: Kind) -> Job:
    return Job(planned(module, kind, *shape), name, kind, (), slice(0, shape[0]), shape[1])


def _bank(name: str, shape: tuple[int, ...], kind: Kind) -> Iterator[Job]:
    """Experts one by one; gate and up, which are stacked gate rows first, are parted."""
    prefix, _, last = name.rpartition(".")
    experts, rows, columns = shape
    parts = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    for e in range(experts):
        for part, span in (parts if last == "gate_up_proj" else {"down_proj": slice(0, rows)}).items():
            tensors = planned(f"{prefix}.{e}.{part}", kind, span.stop - span.start, columns)
            yield Job(tensors, name, kind, (slice(e, e + 1),), span, columns)


def kv_scale_tensors(names: Iterable[str], recipe: Recipe) -> list[Planned]:
    """The scales of keys and values of each attention layer, if `recipe` writes any."""
    stems = [
        name.removesuffix(".v_proj.weight")
        for name in names
        if recipe.kv_scales and name.endswith(".self_attn.v_proj.weight") and "mtp." not in name
    ]
    return [Planned(f"{stem}.{part}_scale", "F32", (1,)) for stem in stems for part in "kv"]


def kv_scale(source: Source, name: str) -> torch.Tensor:
    """A scale under which no key (value) can be clipped, from weights alone.

    Keys are normed: none exceeds sqrt(head dim) times the largest weight of their norm, also once rotated. A value is
    a row of v_proj times a normed input, of length sqrt(hidden) at most before the norm's weights.
    """
    stem, _, part = name.rpartition(".")
    if part == "k_scale":
        w_D = _whole(source, f"{stem}.k_norm.weight") + 1
        bound = w_D.abs().max() * sqrt(len(w_D))
    else:
        norm_H = _whole(source, f"{stem.removesuffix('.self_attn')}.input_layernorm.weight") + 1
        bound = (_whole(source, f"{stem}.v_proj.weight") * norm_H).norm(dim=1).max() * sqrt(len(norm_H))
    return (bound / E4M3_MAX).reshape(1).cpu()


def _whole(source: Source, name: str) -> torch.Tensor:
    return source.read(name, tuple(slice(0, size) for size in source.info(name).shape)).float()


def write_job(job: Job, source: Source, writer: TensorWriter, device: torch.device) -> None:
    """Read the weight in steps of rows (twice where the largest magnitude of all is needed), and write its tensors."""
    if job.kind is None:
        _copy(job, source, writer)
        return
    columns = slice(0, job.columns)
    spans = [
        (*job.lead, slice(job.rows.start + step.start, job.rows.start + step.stop), columns)
        for step in row_steps(job.rows.stop - job.rows.start, job.columns, STEP_ELEMENTS)
    ]

    def read(span: tuple[slice, ...]) -> torch.Tensor:
        part = source.read(job.source, span).to(device).float()
        return part.view(part.shape[-2:])

    shared = None
    if job.kind in ("fp8_tensor", "nvfp4", "nvfp4_ct"):
        largest = max((float(read(span).abs().max()) for span in spans), default=0.0)
        if not largest < float("inf"):
            raise ConfigError(f"checkpoint: tensor {job.source!r} holds {largest}, expected finite values")
        shared = shared_scale(job.kind, largest)
        writer.write(job.tensors[-1].name, shared)  # pyright: ignore[reportArgumentType]
    for span in spans:
        made = encode(read(span), job.kind, shared)
        writer.write(job.tensors[0].name, made.values)
        if made.scales is not None:
            writer.write(job.tensors[1].name, made.scales)


def _copy(job: Job, source: Source, writer: TensorWriter) -> None:
    """As it is, in steps along the first axis."""
    (tensor,) = job.tensors
    lead, rest = (tensor.shape[0], tensor.shape[1:]) if tensor.shape else (1, ())
    step = max(1, 4 * STEP_ELEMENTS * max(lead, 1) // max(nbytes(tensor), 1))
    for start in range(0, lead, step):
        first = (slice(start, min(start + step, lead)),) if tensor.shape else ()
        writer.write(tensor.name, source.read(job.source, (*first, *(slice(0, size) for size in rest))))


def quantize(
    source: Source,
    names: Iterable[str],
    raw: Mapping[str, Any],
    layout: Layout,
    out: Path,
    *,
    files_from: Path | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> int:
    """Write the tensors `names` of `source` to the folder `out` in `layout`; the bytes written.

    raw: config.json. files_from: a folder whose other files (tokenizer and such) are copied, too. device: computes.
    Raises ConfigError if `out` holds anything, or the source is quantised already.
    """
    if raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config"):
        raise ConfigError("config.json: has a quantization_config; quantise from the unquantised checkpoint")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not an empty folder; name another, or empty it")
    names, recipe, device = list(names), RECIPES[layout], torch.device(device)
    made = list(jobs(source, names, recipe))
    scales = kv_scale_tensors(names, recipe)
    out.mkdir(parents=True, exist_ok=True)
    writer = TensorWriter(out, [*(tensor for job in made for tensor in job.tensors), *scales])
    done_bytes = 0
    for job in made:
        write_job(job, source, writer, device)
        done_bytes += sum(map(nbytes, job.tensors))
        if progress:
            progress(done_bytes, writer.total_bytes)
    for scale in scales:
        writer.write(scale.name, kv_scale(source, scale.name))
    writer.close()
    write_configs(made, raw, layout, out, files_from)
    return writer.total_bytes


def write_configs(
    made: Iterable[Job], raw: Mapping[str, Any], layout: Layout, out: Path, files_from: Path | None = None
) -> None:
    """What stands beside the weights; config.json last, so that a folder that is not whole is no checkpoint."""
    kinds, plain = dict[str, Kind](), list[str]()
    for job in made:
        module = job.tensors[0].name.removesuffix("_packed").removesuffix(".weight")
        if job.kind:
            kinds[module] = job.kind
        elif job.tensors[0].name.endswith((".weight", *BANKS)) and len(job.tensors[0].shape) > 1:
            plain.append(module)
    config, beside = quantization_config(layout, kinds, plain)
    for path in sorted(files_from.iterdir()) if files_from else ():
        if path.suffix in COPIED and path.name not in REPLACED:
            shutil.copy(path, out / path.name)
    if beside:
        (out / "hf_quant_config.json").write_text(json.dumps(beside, indent=2), encoding="utf-8")
    text = json.dumps({**raw, "quantization_config": config}, indent=2)
    (out / "config.json").write_text(text, encoding="utf-8")
