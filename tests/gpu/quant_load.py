"""What the ranks of a launcher hold of a checkpoint on their GPUs, against the plan, and how long loading takes.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.quant_load FOLDER --out FILE [--cold] [--dummy]

--cold: what the system keeps of the files is dropped first. Each rank writes FILE with its number before the suffix,
and the first prints a line a rank. Fails if a rank holds one per cent more or less than planned.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from shardwise.config import ServeConfig, rank_environment
from shardwise.engine.build import blueprint, load_weights
from shardwise.engine.place import place
from shardwise.kernels.ops import select
from shardwise.parallel.comm import Alone
from shardwise.parallel.connect import connect
from shardwise.parallel.context import RankContext
from shardwise.shard import local_bytes

TOLERANCE = 0.01


def forget(folder: Path) -> None:
    """Drop the pages of `folder`'s files that the system keeps in memory."""
    os.sync()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ratio", default="")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--dummy", action="store_true")
    args = parser.parse_args()
    env = rank_environment()
    assert env is not None, "start it with torch.distributed.run"
    serve = ServeConfig(
        model=str(args.folder), ranks=env.world, dtype="bfloat16", load_format="dummy" if args.dummy else "auto",
        ratio=tuple(float(part) for part in args.ratio.split(",") if part), vision="off",
    )  # fmt: skip
    begin_s = time.monotonic()
    made = blueprint(serve)
    headers_s = time.monotonic() - begin_s
    device = place(serve, env, made.device_type)
    comm = connect(device) if env.world > 1 else Alone()
    if args.cold and env.local_rank == 0:
        forget(args.folder)
    comm.minimum(0)
    ctx = RankContext(
        rank=env.rank, world=env.world, partitions=made.partitions, comm=comm, ops=select("auto", device),
        device=device, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.cuda.synchronize(device)
    before_bytes, begin_s = torch.cuda.memory_allocated(device), time.monotonic()
    model, _ = load_weights(made, ctx, 0)
    torch.cuda.synchronize(device)
    load_s = time.monotonic() - begin_s
    held_bytes = torch.cuda.memory_allocated(device) - before_bytes
    planned_bytes = sum(local_bytes(spec, made.partitions, env.rank) for spec in made.specs.values())
    del model
    result: dict[str, Any] = {
        "folder": args.folder.name, "rank": env.rank, "ranks": env.world, "ratio": args.ratio, "cold": args.cold,
        "gpu": torch.cuda.get_device_name(device), "headers_s": headers_s, "load_s": load_s,
        "held_bytes": held_bytes, "planned_bytes": planned_bytes, "read_bytes": made.source and made.source.bytes_read,
    }  # fmt: skip
    args.out.with_suffix(f".{env.rank}.json").write_text(json.dumps(result))
    held, planned = (f"{size / 2**30:.3f} GiB" for size in (held_bytes, planned_bytes))
    how = f"rank {env.rank} of {env.world} {args.ratio:4} {'cold' if args.cold else 'warm'}"
    times = f"headers {headers_s:.1f} s, load {load_s:.1f} s"
    print(f"{args.folder.name:24} {how}: held {held}, planned {planned}, {times}", flush=True)
    assert abs(held_bytes - planned_bytes) <= TOLERANCE * planned_bytes, "not what was planned"


if __name__ == "__main__":
    main()
