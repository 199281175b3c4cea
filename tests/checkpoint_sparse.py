"""Checkpoints of full size that take no room: real headers and configs, and holes where the weights would be."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shardwise.checkpoint.encode import Planned
from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.quantize import jobs, kv_scale_tensors, write_configs
from shardwise.checkpoint.recipes import RECIPES, Layout
from shardwise.checkpoint.synth import DummySource
from shardwise.checkpoint.write import TensorWriter
from shardwise.config import ServeConfig
from shardwise.engine.build import blueprint


class Headers:
    """What a source says of its tensors, without values."""

    device = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, folder: Path) -> None:
        made = blueprint(ServeConfig(model=str(folder), load_format="dummy", dtype="bfloat16", device="cpu"))
        self._source = DummySource(made.specs.values())
        self.names = self._source.names

    def info(self, name: str) -> TensorInfo:
        return self._source.info(name)

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def read(self, name: str, src: tuple[slice, ...]) -> Any:
        raise AssertionError(f"{name} was read")


def write(geometry: Path, layout: Layout | None, out: Path) -> Path:
    """The checkpoint that `shardwise quantize` would write for config.json of `geometry`; None: the plain one."""
    source, raw = Headers(geometry), json.loads((geometry / "config.json").read_text())
    out.mkdir(parents=True)
    if layout is None:
        tensors = [Planned(name, source.info(name).dtype, source.info(name).shape) for name in source.names]
        TensorWriter(out, tensors, 1 << 40)
        (out / "config.json").write_text(json.dumps(raw))
        return out
    made = list(jobs(source, source.names, RECIPES[layout]))
    scales = kv_scale_tensors(source.names, RECIPES[layout])
    writer = TensorWriter(out, [*(tensor for job in made for tensor in job.tensors), *scales], 1 << 40)
    for scale in scales:  # these are read before anything is planned
        writer.write(scale.name, torch.ones(scale.shape))
    write_configs(made, raw, layout, out)
    return out


def patched(folder: Path, out: Path, changes: Mapping[str, Any]) -> Path:
    """A copy of the checkpoint in `folder` with tensors of `changes` put in place; None takes a tensor out."""
    shutil.copytree(folder, out)
    (file,) = out.glob("*.safetensors")
    tensors = load_file(file)
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, file, {"format": "pt"})
    return out
