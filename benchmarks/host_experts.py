"""Experts on the CPU from a bank: gigabytes of bank a second by format, beside the reference operation.

    python benchmarks/host_experts.py [--threads 1] [--inner 512] [--experts 32] [--no-reference] [--device cuda]

One layer of Qwen3.6-35B-A3B (2048 columns, experts of 512; --inner 256 is a rank of two), eight experts of made-up
weights a call, others than the call before, so that they come from memory. Then what is chosen between fetching them to
the device and computing them, and what 1 to 8 of them take by either alone and by the split. Medians, with one thread
of the process's own time, which others disturb less; the tables come last, and go to $OUT/host_experts.json.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from shardwise.checkpoint.load import load
from shardwise.checkpoint.synth import DummySource
from shardwise.checkpoint.weight import Weight
from shardwise.experts.choice import Trial, fetch_or_compute
from shardwise.experts.host import compute
from shardwise.kernels.moe import reference
from shardwise.shard import ParamSpec, Stored

Row = dict[str, float | str]
HIDDEN, TOP_K = 2048, 8
CODES, PACKED = Stored("", "F8_E4M3"), Stored("", "U8", (1, 2), packed=True)
FORMATS = {
    "fp32": (Stored("", "F32"),),
    "bf16": (Stored("", "BF16"),),
    "fp8 block": (CODES, Stored("_scale_inv", "BF16", (128, 128), role="scale")),
    "fp8 channel": (CODES, Stored("_scale", "BF16", (1, 0), role="scale")),
    "nvfp4": (
        PACKED,
        Stored("_scale", "F8_E4M3", (1, 16), role="scale"),
        Stored("_scale_2", "F32", (None, None), role="scale"),
    ),
}


def layer(form: str, experts: int, inner: int) -> tuple[Weight, Weight]:
    """Made-up experts, one after another like those of a bank."""
    specs = {
        "gate_up": ParamSpec((experts, 2 * inner, HIDDEN), FORMATS[form], ("gate_up",)),
        "down": ParamSpec((experts, HIDDEN, inner), FORMATS[form], ("down",)),
    }
    weights = load(specs, {}, 0, DummySource(specs.values()), "cpu")
    return weights["gate_up"], weights["down"]


def median_s(
    work: Callable[[torch.Tensor], object], experts: int, tokens: int, seconds: float, clock: Callable[[], float]
) -> float:
    """Of one call of `work` with ids_Tk, each time of the next eight experts."""
    taken, begin_s, first = list[float](), time.perf_counter(), 0
    while len(taken) < 3 or (time.perf_counter() - begin_s < seconds and len(taken) < 50):
        ids_Tk = torch.arange(first, first + TOP_K).remainder(experts).repeat(tokens, 1).int()
        call_s = clock()
        work(ids_Tk)
        taken.append(clock() - call_s)
        first += TOP_K
    return sorted(taken)[len(taken) // 2]


def pinned(weight: Weight) -> Weight:
    return replace(weight, tensors=tuple(tensor.pin_memory() for tensor in weight.tensors))


def choices(form: str, gate_up: Weight, down: Weight, device: torch.device, threads: int, seconds: float) -> list[Row]:
    """A line for each number of misses: milliseconds of fetching all, of computing all, and of the split."""
    begin_s = time.perf_counter()
    made = fetch_or_compute(gate_up, down, device, threads, misses=TOP_K)
    chosen_s = time.perf_counter() - begin_s
    trial, rows = Trial(gate_up, down, device, threads, TOP_K), list[Row]()
    for misses in (1, 2, 4, TOP_K):
        split = made.split(misses)
        ways = {"fetch_ms": misses, "compute_ms": 0, "split_ms": split}
        taken = {way: trial.median_s(n, misses - n, seconds / 4) * 1e3 for way, n in ways.items()}
        rows.append({"format": f"{form}: {made.name}", "misses": misses, "fetched": split, **taken})
        rows[-1] |= {"split_model_ms": made.seconds(misses, split) * 1e3, "contention": made.contention}
        rows[-1]["chosen_in_s"] = chosen_s
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    device = torch.device(options.device)
    rows, chosen = list[Row](), list[Row]()
    for form in FORMATS:
        gate_up, down = layer(form, options.experts, options.inner)
        chosen_bytes = (gate_up.nbytes + down.nbytes) * TOP_K // options.experts
        for tokens in (1, 4, 64):
            x_TH, weights_Tk = torch.randn(tokens, HIDDEN), torch.full((tokens, TOP_K), 1 / TOP_K)

            def fast(ids_Tk: torch.Tensor, x=x_TH, weights=weights_Tk, a=gate_up, b=down) -> object:
                return compute(x, a, b, ids_Tk, weights, options.threads)

            def plain(ids_Tk: torch.Tensor, x=x_TH, weights=weights_Tk, a=gate_up, b=down) -> object:
                return reference.moe(x, a, b, ids_Tk, weights)

            row: Row = {"format": form, "tokens": tokens, "mib": chosen_bytes / 2**20}
            row["ms"] = median_s(fast, options.experts, tokens, options.seconds, clock) * 1e3
            row["gb_per_s"] = chosen_bytes / row["ms"] / 1e6
            row["gb_per_s_core"] = row["gb_per_s"] / options.threads
            if not options.no_reference:
                row["reference_ms"] = median_s(plain, options.experts, tokens, options.seconds, clock) * 1e3
            rows.append(row)
        if device.type == "cuda":
            gate_up, down = pinned(gate_up), pinned(down)
        chosen += choices(form, gate_up, down, device, options.threads, options.seconds)
    print(f"{options.threads} threads, {TOP_K} experts a call, {options.inner} columns each")
    for row in rows + chosen:
        print("  ".join(f"{name} {value:7.2f}" if name != "format" else f"{value:20}" for name, value in row.items()))
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "host_experts.json").write_text(
            json.dumps({"compute": rows, "choice": chosen}, indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
