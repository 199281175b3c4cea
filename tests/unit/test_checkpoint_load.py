"""What a rank loads is its part of the whole, all of it written, within the promised bytes read and memory."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from math import prod
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


def test_a_bf16_rank_reads_no_more_than_it_holds(tmp_path: Path) -> None:
    specs = odd_specs(FORMATS["bf16"])
    write(tmp_path, random_tensors(specs))
    for weights in SPLITS:
        split = partitions(weights)
        for rank in range(len(weights)):
            index = CheckpointIndex.open(tmp_path)
            loaded = load(specs, split, rank, index, "cpu")
            held_bytes = sum(weight.nbytes for weight in loaded.values())
            assert held_bytes <= index.bytes_read - index.header_bytes <= 1.02 * held_bytes


def test_progress_ends_at_the_planned_bytes(tmp_path: Path) -> None:
    specs, split = odd_specs(FORMATS["fp8 block"]), partitions((5, 3))
    seen: list[tuple[int, int]] = []
    load(specs, split, 1, write(tmp_path, random_tensors(specs)), "cpu", progress=lambda *step: seen.append(step))
    planned = sum(local_bytes(spec, split, 1) for spec in specs.values())
    assert len(seen) == len(specs)
    assert seen == sorted(seen)
    assert seen[-1] == (planned, planned)


def test_a_rank_that_owns_nothing(tmp_path: Path) -> None:
    specs, split = odd_specs(FORMATS["nvfp4"]), partitions((1, 0))
    loaded = load(specs, split, 1, write(tmp_path, random_tensors(specs)), "cpu")
    assert loaded["each"].shape == (3, 0, 48)
    assert loaded["each"].nbytes == 0
    assert loaded["norm"].nbytes == 96


@pytest.mark.parametrize("file_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("held", ["F32", "BF16", "F16"])
def test_plain_floats_are_cast(tmp_path: Path, file_dtype: torch.dtype, held: str) -> None:
    values = torch.tensor([[1.0, -2.5, 3.25]], dtype=file_dtype)
    spec = ParamSpec((1, 3), (Stored(".weight", held),), ("w",))
    loaded = load({"w": spec}, {}, 0, write(tmp_path, {"w.weight": values}), "cpu")["w"].plain
    assert loaded.dtype == DTYPES[held]
    assert loaded.tolist() == [[1.0, -2.5, 3.25]]


SCALED = {
    "block": ((16, 48), CODES, Stored(".scale", "BF16", (8, 8), role="scale")),
    "scalar": ((16, 48), CODES, Stored(".scale", "F32", (None, None), role="scale")),
    "group": ((16, 48), CODES, Stored(".scale", "F8_E4M3", (1, 16), role="scale")),
    "global": ((16, 48), CODES, Stored(".scale", "F32", (None, 0), role="inverse_scale")),
}


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("kind", SCALED)
def test_a_bad_scale_is_named(tmp_path: Path, kind: str, bad: float) -> None:
    axes, *format = SCALED[kind]
    specs = {"w": ParamSpec(axes, tuple(format), ("a.w",))}
    tensors = random_tensors(specs)
    if tensors["a.w.scale"].dtype == torch.float8_e4m3fn and bad == float("inf"):
        return  # e4m3 has none
    load(specs, {}, 0, write(tmp_path / "good", tensors), "cpu")
    spoiled = tensors["a.w.scale"].float().flatten()
    spoiled[-1] = bad
    tensors["a.w.scale"] = spoiled.reshape(tensors["a.w.scale"].shape).to(tensors["a.w.scale"].dtype)
    with pytest.raises(ConfigError, match=rf"^checkpoint: scale 'a\.w\.scale' holds {bad}, expected finite[^\n]*$"):
        load(specs, {}, 0, write(tmp_path / "bad", tensors), "cpu")


def test_the_largest_and_smallest_e4m3_scales_are_good(tmp_path: Path) -> None:
    axes, *format = SCALED["group"]
    specs = {"w": ParamSpec(axes, tuple(format), ("a.w",))}
    tensors = random_tensors(specs)
    tensors["a.w.scale"] = (
        torch.arange(1, 1 + 48).mul(126 / 48).to(torch.uint8).reshape(16, 3).view(torch.float8_e4m3fn)
    )
    assert tensors["a.w.scale"].float().max() == 448
    load(specs, {}, 0, write(tmp_path, tensors), "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w.weight": None}, r"'w\.weight' \(1 tensor\) is missing"),
        (
            {"w.weight": torch.zeros(3, 4, dtype=torch.bfloat16)},
            r"'w\.weight' is BF16 \[3, 4\], expected BF16 \[4, 3\]",
        ),
        ({"w.weight": torch.zeros(4, 3, dtype=torch.int32)}, r"'w\.weight' is I32 \[4, 3\], expected BF16 \[4, 3\]"),
    ],
)
def test_what_is_missing_or_of_another_form_is_named_before_memory_is_taken(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"v.weight": torch.zeros(2, 2), "w.weight": torch.zeros(4, 3, dtype=torch.bfloat16)} | change
    index = write(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    monkeypatch.setattr(loading.torch, "empty", lambda *_, **__: pytest.fail("memory was taken"))
    plain = FORMATS["bf16"]
    with pytest.raises(ConfigError, match=message):
        load({"v": ParamSpec((2, 2), plain, ("v",)), "w": ParamSpec((4, 3), plain, ("w",))}, {}, 0, index, "cpu")


MEASURE = """
import re, sys, threading, time
from pathlib import Path
import torch
from shardwise.checkpoint.index import CheckpointIndex
from shardwise.checkpoint.load import load
from shardwise.shard import ParamSpec, Partition, Segment, Stored

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

bank = (Stored("", "BF16"),)
specs = {
    "up": ParamSpec((8, (Segment("gate", 1280), Segment("up", 1280)), 5120), bank, ("up",), "mlp", 1),
    "down": ParamSpec((8, 5120, (Segment("in", 4000),)), bank, ("down",), "mlp", 2),
}
index = CheckpointIndex.open(Path(sys.argv[1]))
torch.empty(8).copy_(torch.ones(8))
before, peak, done = resident(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.002)
watcher = threading.Thread(target=watch)
watcher.start()
loaded = load(specs, {"mlp": Partition.even(80, int(sys.argv[2]))}, 0, index, "cpu")
peak, done = max(peak, resident()), True
watcher.join()
print(sum(w.nbytes for w in loaded.values()), peak - before)
"""


def sparse(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A file of bf16 zeros that takes no time to write."""
    header, at = dict[str, object](), 0
    for name, shape in shapes.items():
        stop = at + 2 * prod(shape)
        header[name], at = {"dtype": "BF16", "shape": shape, "data_offsets": (at, stop)}, stop
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_host_memory_stays_within_the_parameters_and_256_mib(tmp_path: Path, ranks: int) -> None:
    """All resident memory counts, mapped files too: over 500 MiB of stacked experts, cut by rows and by columns."""
    shapes = {"up": (8, 2560, 5120), "down": (8, 5120, 4000)}
    sparse(tmp_path / "model.safetensors", shapes)
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(ranks)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    held_bytes, peak_bytes = map(int, result.stdout.split())
    assert held_bytes == sum(2 * a * b * c for a, b, c in shapes.values()) // ranks
    assert peak_bytes <= held_bytes + (256 << 20)
