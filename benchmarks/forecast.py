"""The cost model of parallel/cost.py against whole decode steps that were measured on H200s.

    python -m benchmarks.forecast [RESULT.json ...]    # of tests.gpu.engine_case speed; default: all in results/h200

A line for each batch of each file: measured and predicted milliseconds of a step, and the error; the median comes last.
The constants of the model (KERNEL_S, STREAMED, TOKENS, ONE_TOKEN) were fitted to the runs on one GPU; those on two were
not used. Needs no GPU.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from shardwise.config import ServeConfig
from shardwise.engine.build import blueprint
from shardwise.engine.decide import problem_of
from shardwise.parallel.cost import Load
from shardwise.parallel.devices import Device, Link, Machine
from shardwise.parallel.probe import STREAMED

HERE = Path(__file__).parent
RESULTS = (
    "speed-bf16",
    "speed-bf16-2gpu",
    "speed-bf16-2gpu-p2p",
    "speed-fp8",
    "speed-fp8-2gpu",
    "speed-nvfp4",
    "speed-nvfp4-2gpu",
    "speed-bf16-warp-groups",
    "speed-fp8-warp-groups",
    "speed-nvfp4-warp-groups",
    "speed-bf16-begin",
    "speed-fp8-persistent",
    "speed-nvfp4-begin",
    "speed-fp8-2gpu-persistent",
    "speed-nvfp4-registers",
    "speed-fp8-registers",
    "speed-fp8-wide-first",
    "speed-nvfp4-wide-first",
    "speed-bf16-grouped",
    "speed-nvfp4-wide",
    "speed-fp8-wide",
)  # in the order of time
OVER_LIBRARY = ("speed-bf16-2gpu",)  # whose sums went by NCCL; those of the others over peers' memory
H200 = Device("NVIDIA H200", 150_109_880_320, 4.21e12 * STREAMED, 8.4e14)  # what the probe found there
LINK = Link(17.8e-6, 2.84e11, peers=True)  # likewise, between two
CONTEXT_TOKENS = 128 + (32 + 256) // 2  # of a request, on average


def predicted_s(folder: Path, ranks: int, batch: int, peers: bool = True) -> float:
    """A step of `batch` requests of the geometry in `folder`. peers: with sums over peers' memory."""
    serve = ServeConfig(model=str(folder), load_format="dummy", ranks=ranks, device="cpu", vision="off")
    made = blueprint(serve, "cuda")
    machine = Machine((H200,) * ranks, LINK)
    machine = machine.over_peers() if peers else machine
    return problem_of(serve, made).anatomy.forecast(made.partitions, machine, Load(batch, CONTEXT_TOKENS)).step_s


def main(arguments: Sequence[str] | None = None) -> float:
    """Print the table, of each step the last measurement; the median error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path)
    given = parser.parse_args(arguments).results
    last = dict[tuple[str, int, int, bool], tuple[str, float]]()
    for path in given or [HERE / "results" / "h200" / f"{name}.json" for name in RESULTS]:
        found = json.loads(path.read_text())
        for batch, rate in found["result"]["decode"].items():
            key = Path(found["args"]["model"]).name, found["ranks"], int(batch), path.stem not in OVER_LIBRARY
            last[key] = path.stem, int(batch) / rate
    errors = list[float]()
    print(f"{'run':24} {'GPUs':>4} {'batch':>5} {'step ms':>8} {'predicted':>9} {'error':>6}")
    for (model, ranks, batch, peers), (run, step_s) in last.items():
        guess_s = predicted_s(HERE / "geometry" / model, ranks, batch, peers)
        errors.append(abs(guess_s / step_s - 1))
        print(f"{run:24} {ranks:>4} {batch:>5} {1e3 * step_s:8.2f} {1e3 * guess_s:9.2f} {guess_s / step_s - 1:+6.0%}")
    print(f"{len(errors)} steps, median error {median(errors):.1%}, largest {max(errors):.0%}")
    return median(errors)


if __name__ == "__main__":
    main()
