"""What a rank loads is its part of the whole, written in full, with no more bytes read or memory taken than promised."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shardwise.checkpoint import load as loading
from shardwise.checkpoint.index import DTYPES, CheckpointIndex
from shardwise.checkpoint.load import load
from shardwise.checkpoint.names import needed
from shardwise.config import ConfigError
from shardwise.shard import Local, ParamSpec, Partition, Partitions, Segment, Stored, copies, local_bytes

CODES = Stored(".weight", "F8_E4M3")
FORMATS: dict[str, tuple[Stored, ...]] = {
    "bf16": (Stored(".weight", "BF16"),),
    "fp8 block": (CODES, Stored(".weight_scale_inv", "BF16", (8, 8), role="scale")),
    "fp8 tensor": (CODES, Stored(".weight_scale", "F32", (None, None), role="scale")),
    "fp8 channel": (CODES, Stored(".weight_scale", "BF16", (1, 0), role="scale")),
    "nvfp4": (
        Stored(".weight_packed", "U8", (1, 2), packed=True),
        Stored(".weight_scale", "F8_E4M3", (1, 16), role="scale"),
        Stored(".weight_global_scale", "F32", (None, 0), role="inverse_scale"),
    ),
}
SPLITS = [(1,), (1, 1), (1, 1, 1), (5, 3)]


def odd_specs(format: tuple[Stored, ...], inner: int = 48) -> dict[str, ParamSpec]:
    """Fused and separate sources, experts stacked and one by one, row and column cuts, a shared segment."""
    bf16, stacked = FORMATS["bf16"], (Stored("", "BF16"),)
    q, k = Segment("q", 96, 16), Segment("k", 32, 16, shared=True)
    gate_up, mlp = (Segment("gate", 48), Segment("up", 48)), (Segment("mlp", 48),)
    return {
        "qkv": ParamSpec(((q, k, k), inner), format, ("a.q", "a.k", "a.v"), "heads"),
        "out": ParamSpec((37, (Segment("head", 96, 16),)), format, ("a.o",), "heads", 1),
        "up": ParamSpec((gate_up, inner), format, ("s.gate", "s.up"), "mlp"),
        "bank": ParamSpec((3, gate_up, 13), stacked, ("x.gate_up",), "mlp", 1),
        "bank.down": ParamSpec((3, 13, mlp), stacked, ("x.down",), "mlp", 2),
        "each": ParamSpec((3, gate_up, inner), format, ("e.{e}.gate", "e.{e}.up"), "mlp", 1),
        "each.down": ParamSpec((3, inner, mlp), format, ("e.{e}.down",), "mlp", 2),
        "norm": ParamSpec((inner,), bf16, ("norm",)),
        "log": ParamSpec(((Segment("v", 6),),), (Stored("", "F32"),), ("log",), "heads"),
    }


def partitions(weights: Sequence[float]) -> dict[str, Partition]:
    return {"heads": Partition.weighted(6, weights), "mlp": Partition.weighted(24, weights)}


def random_tensors(specs: Mapping[str, ParamSpec], seed: int = 0) -> dict[str, torch.Tensor]:
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for spec in specs.values():
        for need in needed(spec):
            dtype = DTYPES[need.stored.dtype]
            if dtype == torch.uint8:
                values = torch.randint(1, 256, need.shape, generator=generator)
            else:
                values = torch.rand(need.shape, generator=generator) + 0.5
            tensors[need.name] = values.to(dtype)
    return tensors


def write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> CheckpointIndex:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    return CheckpointIndex.open(folder)


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The bits of `tensor` as unsigned integers, which compare without regard to NaN."""
    view = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()]
    return tensor.contiguous().view(view).numpy() if tensor.dim() else tensor.reshape(1).view(view).numpy()[0]


def expected(
    spec: ParamSpec, split: Partitions, rank: int, held: Local, tensors: Mapping[str, torch.Tensor]
) -> np.ndarray:
    dtype = raw(torch.zeros(1, dtype=DTYPES[held.stored.dtype])).dtype
    filled = np.zeros(held.shape, dtype)
    for copy in copies(spec, split, rank):
        if copy.stored is held.stored:
            filled[copy.dst] = raw(tensors[copy.name])[copy.src]
    return filled


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN, so that an element that loading leaves out shows."""
    empty = torch.empty

    def poison(*args, **kwargs) -> torch.Tensor:
        made = empty(*args, **kwargs)
        made.view(torch.uint8).fill_(0xFF) if made.dim() else made.fill_(255)
        return made

    monkeypatch.setattr(loading.torch, "empty", poison)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("step_bytes", [64, 1 << 20])
@pytest.mark.parametrize("format", FORMATS)
def test_every_element_is_its_own(
    tmp_path: Path, format: str, step_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "STEP_BYTES", step_bytes)
    specs = odd_specs(FORMATS[format])
    tensors = random_tensors(specs)
    index = write(tmp_path, tensors)
    for weights in SPLITS:
        split = partitions(weights)
        for rank in range(len(weights)):
            loaded = load(specs, split, rank, index, "cpu")
            assert list(loaded) == list(specs)
            for name, weight in loaded.items():
                assert weight.nbytes == local_bytes(specs[name], split, rank)
                for held, tensor in zip(weight.held, weight.tensors, strict=True):
                    assert tensor.shape == held.shape
                    np.testing.assert_array_equal(raw(tensor), expected(specs[name], split, rank, held, tensors))
