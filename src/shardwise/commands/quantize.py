"""`shardwise quantize`: write a checkpoint's FP8 or NVFP4 sibling, in the layout in which such checkpoints come."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from shardwise.checkpoint.hub import resolve
from shardwise.checkpoint.index import CheckpointIndex, Source
from shardwise.checkpoint.quantize import quantize
from shardwise.checkpoint.synth import DummySource
from shardwise.config import ServeConfig, load_model_config, read_json
from shardwise.engine.build import blueprint


def weights(folder: Path, load_format: str, seed: int, device: str) -> tuple[Source, Iterable[str]]:
    """The plain weights of `folder` and their names; with "dummy", made-up ones for its config.json."""
    if load_format != "dummy":
        index = CheckpointIndex.open(folder)
        return index, list(index)
    made = blueprint(ServeConfig(model=str(folder), load_format="dummy", dtype="bfloat16", device="cpu"))
    source = DummySource(made.specs.values(), seed=seed, device=device)
    return source, source.names


def run(args: argparse.Namespace) -> int:
    """Write `args.out`. Raises ConfigError for what cannot be quantised, and if `args.out` is not empty."""
    folder, out = resolve(args.model), Path(args.out).expanduser()
    load_model_config(folder)
    source, names = weights(folder, args.load_format, args.seed, args.device)
    console = Console()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"quantising to {args.to}")
        written = quantize(
            source,
            names,
            read_json(folder / "config.json"),
            args.to,
            out,
            files_from=folder,
            device=args.device,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(f"{out}: {written / (1 << 30):.3f} GiB of weights")
    return 0
