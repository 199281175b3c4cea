"""Linears and routed experts of every format on a GPU: errors against float64 of the same weights, and times.

    python -m tests.gpu.check_quant [--only linear|moe] [--formats bf16,fp8_block,nvfp4] [--sweep]

An error must be 1e-2 at most, and twice that of torch's bf16 product on the dequantised weights at most. Times are of
calls in one CUDA graph over weights that do not fit in the cache together; the share is of 4.3 TB/s, counting each
weight that is needed once. --sweep times configurations of the streaming kernels instead. Writes $OUT/check_quant.json.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from shardwise.checkpoint.weight import Weight
from shardwise.kernels.linear import triton as linears
from shardwise.kernels.linear import w8a8
from shardwise.kernels.linear.reference import dequantise, linear_w8a8
from shardwise.kernels.linear.tiles import operand
from shardwise.kernels.moe import streamed
from shardwise.kernels.moe import triton as experts
from tests.kernels.weights import make_weight

BYTES_PER_SECOND = 4.3e12
TOKENS = (1, 4, 16, 64, 128, 1024)
LINEARS = ((12288, 2048), (2048, 4096), (2048, 512))
WIDTHS = (512, 64)
HIDDEN, EXPERTS, TOP_K = 2048, 256, 8
DEVICE = "cuda"
CACHE_BYTES = 256 * 1024**2


def microseconds(calls: list[Callable[[], Any]], replays: int = 15) -> float:
    """The median time of one of `calls`, which are captured in one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(calls))
    return sorted(times[2:])[len(times[2:]) // 2]


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def row(op: str, form: str, shape: tuple[int, ...], tokens: int, errors: tuple[float, float], us: float, nbytes: int):
    """A line of the table; it passes if the error is in bounds (NaN is not)."""
    error, torch_error = errors
    share = nbytes / BYTES_PER_SECOND / us * 1e6
    passed = error <= 1e-2 and error <= 2 * torch_error
    found = {"op": op, "format": form, "shape": shape, "tokens": tokens, "error": error, "torch_error": torch_error}
    found |= {"us": us, "share": share, "passed": passed}
    sys.stdout.write(
        f"{op:7}{form:12}{'x'.join(map(str, shape)):14}{tokens:6} {error:9.2e} {torch_error:9.2e} {us:9.1f} us "
        f"{share:6.1%} {'' if passed else 'TOO FAR OFF'}\n"
    )
    sys.stdout.flush()
    return found


def check_linear(form: str, shape: tuple[int, int]) -> list[dict[str, Any]]:
    weights = [make_weight(shape, form, 0, DEVICE)]
    weights += [make_weight(shape, form, n, DEVICE) for n in range(1, min(64, CACHE_BYTES // weights[0].nbytes + 2))]
    exact_OI, rounded_OI = dequantise(weights[0], torch.float64), dequantise(weights[0], torch.bfloat16)
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1], device=DEVICE).bfloat16()
        exact = x.double() @ exact_OI.T
        errors = relative(linears.linear(x, weights[0]), exact), relative(torch_linear(x, rounded_OI), exact)
        us = microseconds([lambda w=w, x=x: linears.linear(x, w) for w in weights])
        rows.append(row("linear", form, shape, tokens, errors, us, weights[0].nbytes))
        if tokens >= 64 and w8a8.fits(weights[0]):
            exact = linear_w8a8(x.float(), weights[0]).double()
            errors = relative(w8a8.linear(x, weights[0]), exact), relative(exact.bfloat16(), exact)
            us = microseconds([lambda w=w, x=x: w8a8.linear(x, w) for w in weights])
            rows.append(row("w8a8", form, shape, tokens, errors, us, weights[0].nbytes))
    return rows


def moe_errors(x, up: Weight, down: Weight, ids, shares) -> tuple[float, float]:
    """Of our op, and of torch's bf16 products, expert by expert."""
    exact = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    plain = torch.zeros(x.shape, dtype=torch.float32, device=DEVICE)
    for e in ids.unique().tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        share = shares[token, slot, None]
        for out, dtype in ((exact, torch.float64), (plain, torch.bfloat16)):
            gate, up_part = torch_linear(x[token].to(dtype), dequantise(up, dtype, e)).chunk(2, -1)
            y = torch_linear(silu(gate) * up_part, dequantise(down, dtype, e))
            out.index_add_(0, token, (y.to(out.dtype) * share.to(out.dtype)))
    return relative(experts.moe(x, up, down, ids, shares), exact), relative(plain, exact)


def choices(tokens: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`count` different choices of experts, as a router makes them."""
    pairs = [experts.route(torch.randn(tokens, EXPERTS, device=DEVICE), TOP_K) for _ in range(count)]
    return [(ids, shares) for shares, ids in pairs]


def banks(form: str, width: int) -> tuple[Weight, Weight]:
    up = make_weight((EXPERTS, 2 * width, HIDDEN), form, 0, DEVICE)
    return up, make_weight((EXPERTS, HIDDEN, width), form, 1, DEVICE)


def check_moe(form: str, width: int) -> list[dict[str, Any]]:
    up, down = banks(form, width)
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
        picked = choices(tokens, 24 if tokens < 64 else 4)
        errors = moe_errors(x, up, down, *picked[0])
        us = microseconds([lambda c=c, x=x: experts.moe(x, up, down, *c) for c in picked])
        hit = sum(ids.unique().numel() for ids, _ in picked) / len(picked)
        nbytes = int((up.nbytes + down.nbytes) * hit / EXPERTS)
        rows.append(row("moe", form, (width,), tokens, errors, us, nbytes))
    return rows


def check_route() -> list[dict[str, Any]]:
    rows = []
    for tokens in (1, 128):
        logits = torch.randn(tokens, EXPERTS, device=DEVICE)
        shares, ids = experts.route(logits, TOP_K)
        best, chosen = logits.double().softmax(-1).topk(TOP_K)
        error = relative(shares, best / best.sum(-1, keepdim=True)) if torch.equal(ids.long(), chosen) else float("nan")
        us = microseconds([lambda x=logits: experts.route(x, TOP_K)] * 20)
        rows.append(row("route", "fp32", (EXPERTS,), tokens, (error, 1e-5), us, logits.nbytes))
    return rows


STREAMS = [
    linears.Stream(R, C, warps)
    for R, (C, warps) in product(
        (1, 2, 4, 8), ((32, 1), (64, 1), (64, 2), (128, 1), (128, 2), (128, 4), (256, 4), (256, 8))
    )
]


def best_of(label: str, nbytes: float, timed: Callable[[linears.Stream], float]) -> dict[str, Any]:
    """The quickest configurations of a kernel, with the share of the memory's speed."""
    found = sorted((timed(config), (config.R, config.C, config.warps)) for config in STREAMS)
    top = [(config, round(us, 2), f"{nbytes / BYTES_PER_SECOND / us * 1e6:.0%}") for us, config in found[:4]]
    sys.stdout.write(f"{label:34} {top}\n")
    sys.stdout.flush()
    return {"label": label, "all": found}


def sweep_linear(form: str, shape: tuple[int, int]) -> list[dict[str, Any]]:
    first = make_weight(shape, form, 0, DEVICE)
    weights = [
        first,
        *(make_weight(shape, form, n, DEVICE) for n in range(1, min(32, CACHE_BYTES // first.nbytes + 2))),
    ]
    of = [operand(weight, True) for weight in weights]
    rows = []
    for tokens in (1, 2, 4):
        x, out = torch.randn(tokens, shape[1], device=DEVICE).bfloat16(), torch.empty(tokens, shape[0], device=DEVICE)

        def timed(config: linears.Stream, x=x, out=out) -> float:
            if config.R * len(x) * config.C > 4096 * config.warps:
                return 1e9
            return microseconds([lambda w=w: linears.stream(x, w, out, config) for w in of], 7)

        rows.append(best_of(f"linear {form} {shape} T={tokens}", first.nbytes, timed))
    return rows


def sweep_moe(form: str, width: int) -> list[dict[str, Any]]:
    """gate|up with down as it is, then the other way round: the differences are what counts."""
    up, down = banks(form, width)
    of = operand(up, True), operand(down, True)
    picked = choices(1, 24)
    x = torch.randn(1, HIDDEN, device=DEVICE).bfloat16()
    nbytes = (up.nbytes + down.nbytes) * TOP_K / EXPERTS

    def run(**configs: linears.Stream) -> float:
        calls = [lambda c=c: streamed.moe(x, of[0], of[1], c[0], c[1], 0, EXPERTS, **configs) for c in picked]
        return microseconds(calls, 7)

    return [
        best_of(f"gate_up {form} {width}", nbytes, lambda config: run(up_config=config)),
        best_of(f"down {form} {width}", nbytes, lambda c: run(config=c) if c.R * c.C // c.warps < 513 else 1e9),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("linear", "moe"))
    parser.add_argument("--formats", default="bf16,fp8_block,fp8_tensor,nvfp4")
    parser.add_argument("--sweep", action="store_true")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    results: list[dict[str, Any]] = [] if chosen.sweep else check_route()
    for form in chosen.formats.split(","):
        for shape in LINEARS if chosen.only != "moe" else ():
            results += (sweep_linear if chosen.sweep else check_linear)(form, shape)
            torch.cuda.empty_cache()
        for width in WIDTHS if chosen.only != "linear" else ():
            results += (sweep_moe if chosen.sweep else check_moe)(form, width)
            torch.cuda.empty_cache()
    folder = Path(os.environ.get("OUT", "."))
    (folder / "check_quant.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    failed = sum(not found.get("passed", True) for found in results)
    sys.stdout.write(f"{len(results)} results, {failed} too far off\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
