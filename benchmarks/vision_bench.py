"""Pictures a second of the vision tower, cut over the ranks and whole on each: what `--vision auto` should mean.

    torchrun --nproc-per-node 2 benchmarks/vision_bench.py [--geometry FOLDER] [--device cuda] [--seconds 2]

Made-up weights in the geometry of Qwen3.6-35B-A3B: 27 blocks, 1152 columns, 16 heads. A line for each size of picture
and number of pictures at once; the table comes last, and goes to $OUT/vision_bench.json, if OUT is set.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.load import load
from shardwise.checkpoint.synth import DummySource
from shardwise.config import load_vision_config, rank_environment
from shardwise.kernels.ops import select
from shardwise.models.vision import Picture, Tower, declare
from shardwise.parallel.balance import partitions
from shardwise.parallel.comm import Alone
from shardwise.parallel.connect import connect
from shardwise.parallel.context import RankContext

GEOMETRY = Path(__file__).parent / "geometry" / "qwen3.6-35b-a3b"
SIDES = (224, 448, 1024, 2048)  # pixels
COUNTS = (1, 2, 8)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def measure(tower: Tower, side: int, count: int, seconds: float) -> dict[str, float]:
    """Milliseconds for `count` pictures at once, and pictures a second; the median of repeated calls."""
    config, ctx = tower.config, tower.ctx
    patches = side // config.patch_size
    pixels = torch.randint(0, 256, (patches**2, config.channels * config.patch_size**2), dtype=torch.uint8)
    pictures = [Picture(patches, patches, pixels.to(ctx.device))] * count
    tower(pictures)
    synchronise(ctx.device)
    begin_s = time.perf_counter()
    tower(pictures)
    synchronise(ctx.device)
    # Every rank has to make the same number of calls, so the slowest one's first call decides.
    times = max(1, ctx.comm.minimum(int(seconds / max(time.perf_counter() - begin_s, 1e-4))))
    taken: list[float] = []
    for _ in range(min(times, 200)):
        begin_s = time.perf_counter()
        tower(pictures)
        synchronise(ctx.device)
        taken.append(time.perf_counter() - begin_s)
    median_s = sorted(taken)[len(taken) // 2]
    return {"ms": median_s * 1000, "pictures_per_s": count / median_s}


@torch.inference_mode()
def sample(tower: Tower) -> torch.Tensor:
    """Features of a picture that is the same on every rank and in every mode."""
    config = tower.config
    shape = (20 * 32, config.channels * config.patch_size**2)
    pixels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return tower([Picture(20, 32, pixels.to(tower.ctx.device))])[0].float()


def build(geometry: Path, device: torch.device, dtype: str, whole: bool, depth: int | None) -> tuple[Tower, int]:
    """A tower with made-up weights, and the bytes of them on this rank."""
    config = load_vision_config(geometry)
    assert config is not None
    if depth:
        config = type(config)(**{**vars(config), "depth": depth})
    environment = rank_environment()
    world, rank = (environment.world, environment.rank) if environment else (1, 0)
    specs = declare(config, "model.visual", dtype, whole)
    cut = partitions(specs, world)
    comm = connect(device) if world > 1 else Alone()
    torch_dtype = torch.bfloat16 if dtype == "BF16" else torch.float32
    ctx = RankContext(rank, world, cut, comm, select("auto", device), device, torch_dtype)
    weights = load(specs, cut, rank, DummySource(specs.values(), device=device), device)
    return Tower(config, weights, ctx, whole), sum(weight.nbytes for weight in weights.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometry", type=Path, default=GEOMETRY)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--depth", type=int, help="blocks, instead of the geometry's")
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES, metavar="PIXELS")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, metavar="N")
    args = parser.parse_args()
    environment = rank_environment()
    rank, local_rank = (environment.rank, environment.local_rank) if environment else (0, 0)
    device = torch.device("cuda", local_rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rows: list[dict[str, Any]] = []
    outputs: list[torch.Tensor] = []
    for whole in (False, True):
        tower, held_bytes = build(args.geometry, device, "BF16" if device.type == "cuda" else "F32", whole, args.depth)
        outputs.append(sample(tower))
        for side in args.sides:
            for count in args.counts:
                row = {
                    "ranks": tower.ctx.world, "mode": "replicate" if whole else "shard", "side": side, "count": count,
                    "weights_mib": held_bytes / (1 << 20), **measure(tower, side, count, args.seconds),
                }  # fmt: skip
                rows.append(row)
    if rank:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"\n{rows[0]['ranks']} ranks of {name}, torch {torch.__version__}")
    print(f"{'mode':10} {'pixels':>11} {'at once':>8} {'ms':>9} {'pictures/s':>11} {'weights MiB a rank':>19}")
    for row in rows:
        print(
            f"{row['mode']:10} {row['side']:>5}x{row['side']:<5} {row['count']:>8} {row['ms']:>9.2f} "
            f"{row['pictures_per_s']:>11.1f} {row['weights_mib']:>19.0f}"
        )
    gap = (outputs[0] - outputs[1]).abs().max().item()
    print(f"features, cut and whole: at most {gap:.2e} apart, of a spread of {outputs[1].std().item():.2e}")
    if out := os.environ.get("OUT"):
        path = Path(out) / f"vision_bench_{rows[0]['ranks']}.json"
        path.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
