"""What each rank reads of a checkpoint, and how much host memory that takes.

Bytes read are held against parameter bytes and headers, and the peak of resident memory, mapped files included, against
the parameters and 256 MiB.

    python -m benchmarks.load_bytes --json benchmarks/results/load-cpu.json --markdown benchmarks/results/load-cpu.md

Checkpoints: the miniature, and a made-up one with the shapes of Qwen3.6-35B-A3B but fewer layers, experts and tokens.
Every rank of every split loads in a process of its own, one after another. Linux only: peaks are the kernel's.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch

from shardwise.checkpoint.hub import miniature
from shardwise.checkpoint.index import CheckpointIndex
from shardwise.checkpoint.load import load
from shardwise.checkpoint.names import needed
from shardwise.checkpoint.synth import INDEX_FILE
from shardwise.config import ServeConfig, read_json
from shardwise.engine.build import blueprint

GEOMETRY = Path(__file__).parent / "geometry" / "qwen3.6-35b-a3b" / "config.json"
SMALLER = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "vocab_size": 32768,
    "layer_types": None,
    "mtp_num_hidden_layers": 0,
}
SPLITS: tuple[tuple[float, ...], ...] = ((1,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (5, 3))
READ_FACTOR, PEAK_MIB = 1.02, 256.0
MIB = 1 << 20
MARKDOWN_HEAD = """\
# Bytes and memory of loading, by rank

`PYTHONPATH=src:. python -m benchmarks.load_bytes --json FILE --markdown FILE`, on a CPU, in bf16. Ratio: bytes read
of the checkpoint, headers included, over parameter bytes and headers (limit 1.02). Peak: resident host memory above
that before loading, mapped files included, less the parameters (limit 256 MiB).
"""


@dataclass(frozen=True)
class Loaded:
    """One rank's load, in bytes. peak: of resident memory, above that before loading."""

    checkpoint: str
    split: str
    rank: int
    parameter_bytes: int
    header_bytes: int
    read_bytes: int
    peak_bytes: int

    @property
    def good(self) -> bool:
        reads = self.read_bytes <= READ_FACTOR * self.parameter_bytes + self.header_bytes
        return reads and self.peak_bytes <= self.parameter_bytes + PEAK_MIB * MIB


def options(folder: Path, weights: tuple[float, ...], *, made_up: bool = False) -> ServeConfig:
    source = "dummy" if made_up else "auto"
    return ServeConfig(
        model=str(folder), ranks=len(weights), ratio=weights, device="cpu", dtype="bfloat16", load_format=source
    )


def write_made_up(folder: Path) -> Path:
    """A checkpoint of random bytes in two files, in the layout of the published ones."""
    raw = read_json(GEOMETRY)
    text = raw["text_config"] | SMALLER
    text.pop("layer_types")
    (folder / "config.json").write_text(json.dumps(raw | {"text_config": text}), encoding="utf-8")
    specs = blueprint(options(folder, (1,), made_up=True)).specs
    tensors = [need for spec in specs.values() for need in needed(spec)]
    files = {f"model-{n + 1:05}-of-00002.safetensors": tensors[n::2] for n in range(2)}
    block = os.urandom(MIB)
    for name, part in files.items():
        header, at = dict[str, object](), 0
        for need in part:
            stop = at + prod(need.shape) * (4 if need.stored.dtype == "F32" else 2)
            header[need.name], at = {"dtype": need.stored.dtype, "shape": need.shape, "data_offsets": (at, stop)}, stop
        encoded = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for start in range(0, at, MIB):
                file.write(block[: min(MIB, at - start)])
    weight_map = {need.name: name for name, part in files.items() for need in part}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return folder


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def measure(name: str, folder: Path, weights: tuple[float, ...], rank: int) -> Loaded:
    """Load this rank here."""
    made = blueprint(options(folder, weights))
    assert isinstance(made.source, CheckpointIndex)
    torch.empty(8).copy_(torch.ones(8))  # what torch sets up at its first operation is not loading
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    weights_held = load(made.specs, made.partitions, rank, made.source, "cpu")
    peak = resident("VmHWM") - before
    held = sum(weight.nbytes for weight in weights_held.values())
    split = ":".join(f"{weight:g}" for weight in weights)
    return Loaded(name, split, rank, held, made.source.header_bytes, made.source.bytes_read, max(peak, 0))


def in_processes(name: str, folder: Path) -> Iterator[Loaded]:
    """All ranks of all splits, each in a new process."""
    for weights in SPLITS:
        for rank in range(len(weights)):
            child = [sys.executable, "-m", "benchmarks.load_bytes", "--child", name, str(folder), str(rank)]
            done = subprocess.run([*child, *map(str, weights)], stdout=subprocess.PIPE, check=True)
            yield Loaded(**json.loads(done.stdout))


def markdown(rows: list[Loaded]) -> str:
    """The table, with the command that makes it."""
    titles = ("checkpoint", "split", "rank", "parameters, MiB", "headers, MiB", "read, MiB", "ratio", "peak, MiB")
    lines = [MARKDOWN_HEAD, f"| {' | '.join(titles)} |", "| " + " | ".join(["---"] * len(titles)) + " |"]
    for row in rows:
        sizes = [f"{size / MIB:.2f}" for size in (row.parameter_bytes, row.header_bytes, row.read_bytes)]
        ratio = row.read_bytes / (row.parameter_bytes + row.header_bytes)
        over = (row.peak_bytes - row.parameter_bytes) / MIB
        cells = [row.checkpoint, row.split, str(row.rank), *sizes, f"{ratio:.4f}", f"{over:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, folder, rank, *weights = args.child
        print(json.dumps(asdict(measure(name, Path(folder), tuple(map(float, weights)), int(rank)))))
        return 0
    with tempfile.TemporaryDirectory() as path:
        made_up = write_made_up(Path(path))
        rows = [*in_processes("miniature", miniature()), *in_processes("made up", made_up)]
    print(markdown(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(markdown(rows), encoding="utf-8")
    bad = [row for row in rows if not row.good]
    print(f"{len(rows) - len(bad)} of {len(rows)} within the limits")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
