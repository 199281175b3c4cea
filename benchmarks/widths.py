"""What a width of experts costs: a layer's routed experts of 35B-A3B with so many of their 512 columns, on one GPU.

    python -m benchmarks.widths [--formats fp8 nvfp4] [--widths 160 192 320 352 384 512] [--tokens 1 4 64]

An uneven split gives ranks widths that are no multiple of what tiles and scales are made for, and cuts inside a block
of scales. Every width is compiled in a process of its own, all at once; then they are timed one after the other, in
CUDA graphs over several layers' weights, which no cache holds. The table: microseconds a layer, and how many times the
bytes' share of the full width's time that is (1: time goes with bytes). $OUT/widths.json has it, too.
"""

import argparse
import json
import multiprocessing
import os
import time
from contextlib import suppress
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import msgspec
import torch

from shardwise.checkpoint.load import load
from shardwise.checkpoint.synth import DummySource
from shardwise.checkpoint.weight import Weight
from shardwise.config import ServeConfig
from shardwise.engine.build import blueprint
from shardwise.kernels.ops import select
from shardwise.models.qwen3_5 import expert_banks

GEOMETRY = Path(__file__).parent / "geometry"
FOLDERS = {"bf16": "qwen3.6-35b-a3b", "fp8": "qwen3.6-35b-a3b-fp8", "nvfp4": "qwen3.6-35b-a3b-nvfp4"}
FULL, TOP_K = 512, 8
COPIES_BYTES = 1 << 30  # of weights that a graph goes through
REPLAYS = 5
WAIT_SECONDS = 60


def copied(weight: Weight) -> Weight:
    return Weight(weight.spec, weight.shape, weight.held, tuple(tensor.clone() for tensor in weight.tensors))


def layers(form: str, width: int, device: torch.device) -> tuple[list[tuple[Weight, ...]], int, int]:
    """Experts' weights (gate_up, down) of as many layers as COPIES_BYTES hold, alike in content; hidden and experts."""
    serve = ServeConfig(model=str(GEOMETRY / FOLDERS[form]), load_format="dummy", vision="off")
    if width < FULL:
        serve = msgspec.structs.replace(serve, ranks=2, group_ratios={"expert": (float(width), float(FULL - width))})
    made = blueprint(serve, "cuda")
    names = expert_banks(made.model)[0]
    specs = {name: made.specs[name] for name in names}
    weights = load(specs, made.partitions, 0, DummySource(specs.values(), device=device), device)
    first = weights[names[0]], weights[names[1]]
    assert first[1].shape[2] == width, f"asked for {width} columns, got {first[1].shape[2]}"
    count = max(1, COPIES_BYTES // sum(weight.nbytes for weight in first))
    found = [first, *(tuple(copied(weight) for weight in first) for _ in range(count - 1))]
    return found, made.model.hidden_size, made.model.experts


def measure(form: str, width: int, tokens: list[int], compiled: Any, turn: Any, out: Any) -> None:
    """A process: microseconds a layer by number of tokens."""
    device = torch.device("cuda", 0)
    ops = select("triton", device)
    weights, hidden, experts = layers(form, width, device)
    graphs = dict[int, torch.cuda.CUDAGraph]()
    for count in tokens:
        generator = torch.Generator(device).manual_seed(count)
        x_TH = torch.randn((count, hidden), device=device, dtype=torch.bfloat16, generator=generator)
        ids = [
            torch.rand((count, experts), device=device, generator=generator).topk(TOP_K).indices.int() for _ in weights
        ]
        shares_Tk = torch.full((count, TOP_K), 1 / TOP_K, device=device)
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            ops.moe(x_TH, *weights[0], ids[0], shares_Tk)
        stream.synchronize()
        graphs[count] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[count], stream=stream):
            for pair, ids_Tk in zip(weights, ids, strict=True):
                ops.moe(x_TH, *pair, ids_Tk, shares_Tk)
    torch.cuda.synchronize()
    with suppress(BrokenBarrierError):  # another has failed: the others' figures are good all the same
        compiled.wait(WAIT_SECONDS)
    with turn:
        for count, graph in graphs.items():
            times = list[float]()
            for _ in range(REPLAYS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e3 / len(weights))
            out.put((form, width, count, sorted(times)[REPLAYS // 2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=["bf16", "fp8", "nvfp4"], choices=list(FOLDERS))
    parser.add_argument("--widths", nargs="*", type=int, default=[160, 192, 256, 320, 352, 384, FULL])
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 4, 64])
    args = parser.parse_args()
    begin_s, context = time.monotonic(), multiprocessing.get_context("spawn")
    each = [(form, width) for form in args.formats for width in sorted({*args.widths, FULL})]
    compiled, turn, out = context.Barrier(len(each)), context.Lock(), context.Queue()
    jobs = [context.Process(target=measure, args=(*one, args.tokens, compiled, turn, out), daemon=True) for one in each]
    for job in jobs:
        job.start()
    found = dict[tuple[str, int, int], float]()
    while len(found) < len(each) * len(args.tokens) and (any(job.is_alive() for job in jobs) or not out.empty()):
        if not out.empty():
            form, width, tokens, taken_us = out.get()
            found[form, width, tokens] = taken_us
        else:
            time.sleep(0.05)
    print(f"{len(found)} of {len(each) * len(args.tokens)} in {time.monotonic() - begin_s:.0f} s")
    print("us a layer (times the bytes' share)" + "".join(f"{f'{tokens} tokens':>18}" for tokens in args.tokens))
    for form, width in each:
        cells = list[str]()
        for tokens in args.tokens:
            mine, full = found.get((form, width, tokens)), found.get((form, FULL, tokens))
            cells.append(f"{mine:9.1f} ({mine / full * FULL / width:5.2f})" if mine and full else "-")
        print(f"{form:8} {width:4} columns" + " " * 16 + "".join(f"{cell:>18}" for cell in cells))
    if "OUT" in os.environ:
        rows = [{"format": f, "width": w, "tokens": t, "us": us} for (f, w, t), us in sorted(found.items())]
        (Path(os.environ["OUT"]) / "widths.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
