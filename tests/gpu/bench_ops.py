"""Fused operations on a GPU: times in a CUDA graph beside the operations that they replace, and errors.

    python -m tests.gpu.bench_ops [--overlap] [--formats bf16,fp8_block,nvfp4] [--tokens 1,4,16] [--only linears,..]
    python -m tests.gpu.bench_ops --sweep

--sweep times configurations of the linears instead, the five best of each size, fastest first.

Shapes are of 35B-A3B. Calls of a graph take turns with weights that do not fit in the cache together. A share is of
4.3 TB/s, counting each byte that is needed once; an error is relative, of the whole output, to the reference's on the
same inputs. Writes $OUT/bench_ops.json.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from shardwise.kernels.conv import triton as conv
from shardwise.kernels.delta import triton as delta
from shardwise.kernels.delta_step import reference as step_reference
from shardwise.kernels.delta_step import triton as step
from shardwise.kernels.linear import triton as linear
from shardwise.kernels.linears import reference as linears_reference
from shardwise.kernels.linears import triton as linears
from shardwise.kernels.linears.reference import Conv
from shardwise.kernels.moe import triton as moe
from shardwise.kernels.moe_block import reference as block_reference
from shardwise.kernels.moe_block import triton as block
from shardwise.kernels.norm import triton as norm
from shardwise.kernels.sequences import Sequences
from tests.kernels.weights import make_weight

BYTES_PER_SECOND, CACHE_BYTES = 4.3e12, 200 * 1024**2
DEVICE, DTYPE, EPS, HIDDEN = torch.device("cuda"), torch.bfloat16, 1e-6, 2048


@dataclass(frozen=True)
class Bench:
    """`fused` and `parts` run the same function on a copy of the data; `nbytes` is what one call must move."""

    name: str
    fused: Callable[[int], Any]
    parts: Callable[[int], Any]
    exact: Callable[[int], Any]
    nbytes: int
    copies: int


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def microseconds(call: Callable[[int], Any], copies: int, replays: int = 9) -> float:
    """The median time of one call, over graphs of at least 8 calls that take turns with the copies."""
    count = max(8, copies)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for n in range(count):
            call(n % copies)
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / count)
    return sorted(times[1:])[len(times) // 2 - 1]


def extra(module: Any, pdl: bool) -> dict[str, bool]:
    """Arguments that only kernels have."""
    return {"pdl": pdl} if module.__name__.endswith("triton") else {}


def copies_of(nbytes: int) -> int:
    return max(2, min(12, -(-CACHE_BYTES // nbytes)))


def sequences(tokens: int) -> Sequences:
    ints = {"dtype": torch.int32, "device": DEVICE}
    slots = torch.arange(tokens, dtype=torch.int64, device=DEVICE)
    pages = torch.zeros(tokens, 1, **ints)
    rows = torch.arange(1, tokens + 1, **ints)
    return Sequences(
        torch.arange(tokens + 1, **ints), torch.full((tokens,), 9, **ints), rows, pages, slots, tokens, 1, 64
    )


def bench_linears(form: str, tokens: int, pdl: bool, ranks: int = 1) -> Iterator[Bench]:
    """The inputs of GatedDeltaNet, with their convolution; those of attention; an output projection.

    ranks: of one of so many, where the norm is part of the sum before.
    """
    channels, ba = 8192 // ranks, 64 // ranks
    for name, rows, columns in (
        ("delta in", (channels, 4096 // ranks, ba), 2048),
        ("attn in", (9216 // ranks,), 2048),
        ("out", (2048,), 4096 // ranks),
    ):
        forms = [form if n != ba else "bf16" for n in rows]
        sample = [make_weight((n, columns), kind, 1, "cuda") for n, kind in zip(rows, forms, strict=True)]
        nbytes = sum(weight.nbytes for weight in sample)
        copies = copies_of(nbytes)
        sets = [sample, *([make_weight((n, columns), kind, i, "cuda") for n, kind in zip(rows, forms, strict=True)]
                          for i in range(2, copies + 1))]  # fmt: skip
        for weights in sets if name == "delta in" else ():
            linears.adjoin(weights[:2])
        dtypes = [torch.float32 if n == ba or name == "out" else None for n in rows]
        added, residual = random(tokens, columns, dtype=torch.float32), random(tokens, columns, dtype=torch.float32)
        factor, seqs = random(columns, scale=0.1), sequences(tokens)
        taps = None
        if name == "delta in":
            taps = Conv(random(channels, 4), random(tokens + 1, channels, 3), seqs)
        x = random(tokens, columns)
        same = taps and Conv(taps.weight_CW, taps.state_RCW1.clone(), seqs)

        def fused(i: int, module: Any = linears, own: Any = taps, name=name, sets=sets, x=x, added=added,
                  residual=residual, factor=factor, dtypes=dtypes):  # fmt: skip
            if name == "out" or ranks > 1:
                return module.linears(x, sets[i], dtypes, own, **extra(module, pdl))
            return module.norm_linears(added, residual, factor, EPS, sets[i], dtypes, own, **extra(module, pdl))[0]

        def parts(i: int, name=name, sets=sets, x=x, added=added, residual=residual, factor=factor, dtypes=dtypes,
                  own=taps):  # fmt: skip
            inner = x if name == "out" or ranks > 1 else norm.add_rms_norm(added, residual, factor, EPS)[0]
            found = [linear.linear(inner, weight, dtype) for weight, dtype in zip(sets[i], dtypes, strict=True)]
            if own:
                found[0] = conv.causal_conv(found[0], own.weight_CW, own.state_RCW1, own.seqs)
            return found

        def exact(i: int, fused=fused, same=same):
            return fused(i, linears_reference, same)

        yield Bench(name, fused, parts, exact, nbytes, copies)


def bench_route(form: str, tokens: int, pdl: bool, ranks: int = 1) -> Iterator[Bench]:
    router = [make_weight((257, HIDDEN), "bf16", n, "cuda") for n in range(4)]
    added, residual = random(tokens, HIDDEN, dtype=torch.float32), random(tokens, HIDDEN, dtype=torch.float32)
    x, factor, arrivals = (
        random(tokens, HIDDEN),
        random(HIDDEN, scale=0.1),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )

    def fused(i: int, module: Any = block):
        if ranks > 1:
            weights, _, gate = module.route_linears(x, [router[i]], 8, **extra(module, pdl))
            return [weights, gate]
        normed, total, weights, _, gate = module.norm_route(
            added, residual, factor, EPS, [router[i]], 8, arrivals, **extra(module, pdl)
        )
        return [normed, total, weights, gate]

    def parts(i: int):
        x, _ = norm.add_rms_norm(added, residual, factor, EPS)
        return moe.route(linear.linear(x, router[i], torch.float32)[:, :-1], 8)

    yield Bench("route", fused, parts, lambda i: fused(i, block_reference), router[0].nbytes, 4)


def bench_moe(form: str, tokens: int, pdl: bool, ranks: int = 1) -> Iterator[Bench]:
    both, inner = 1024 // ranks, 512 // ranks
    up, down = make_weight((256, both, HIDDEN), form, 1, "cuda"), make_weight((256, HIDDEN, inner), form, 2, "cuda")
    shared = make_weight((both, HIDDEN), form, 3, "cuda"), make_weight((HIDDEN, inner), form, 4, "cuda")
    x, gate = random(tokens, HIDDEN), random(tokens, 257, dtype=torch.float32)[:, 256:]
    choices = [moe.route(random(tokens, 256, dtype=torch.float32), 8) for _ in range(8)]
    hit = sum(len(ids.unique()) for _, ids in choices) / len(choices)
    nbytes = int((up.nbytes + down.nbytes) / 256 * hit) + shared[0].nbytes + shared[1].nbytes

    def fused(i: int, module: Any = block):
        weights, ids = choices[i]
        return [module.moe_shared(x, up, down, ids, weights, [shared[0]], [shared[1]], gate, **extra(module, pdl))]

    def parts(i: int):
        weights, ids = choices[i]
        mixed = linear.linear(moe.silu_mul(linear.linear(x, shared[0])), shared[1], torch.float32)
        return moe.moe(x, up, down, ids, weights) + gate.sigmoid() * mixed

    yield Bench("moe", fused, parts, lambda i: fused(i, block_reference), nbytes, 8)


def bench_delta(form: str, tokens: int, pdl: bool) -> Iterator[Bench]:
    seqs, copies = sequences(tokens), 12 if tokens < 16 else 4
    qkv, z, ba = random(tokens, 8192), random(tokens, 32, 128), random(tokens, 64, dtype=torch.float32)
    q, k, v = qkv.split((2048, 2048, 4096), -1)
    decays, key_map = random(32, dtype=torch.float32), torch.arange(32, dtype=torch.int32, device=DEVICE) // 2
    inputs = (q.unflatten(-1, (16, 128)), k.unflatten(-1, (16, 128)), v.unflatten(-1, (32, 128)), ba[:, :32],
              ba[:, 32:], decays, decays, key_map)  # fmt: skip
    states = [random(tokens + 1, 32, 128, 128, dtype=torch.float32) for _ in range(copies)]
    same, factor = [state.clone() for state in states[:1]], random(128)

    def fused(i: int):
        return [step.gated_delta_norm(*inputs, states[i], seqs, z, factor, EPS, pdl=pdl)]

    def parts(i: int):
        return norm.gated_rms_norm(delta.gated_delta(*inputs, states[i], seqs), z, factor, EPS)

    def exact(i: int):
        return [step_reference.gated_delta_norm(*inputs, same[i], seqs, z, factor, EPS)]

    yield Bench("delta", fused, parts, exact, tokens * 32 * 128 * 128 * 8, copies)


BENCHES: dict[str, Callable[[str, int, bool], Iterator[Bench]]] = {
    "linears": bench_linears,
    "route": bench_route,
    "moe": bench_moe,
    "delta": bench_delta,
}


def relative(got: Any, exact: Any) -> float:
    """The worst relative error of the outputs; NaN if any is."""
    errors = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, exact, strict=True)]
    return max(errors) if errors == errors else float("nan")


def sweep(form: str) -> None:
    """Times of configurations: of the streaming kernel for one token, of the tiled one for 4 and 16."""
    streams = [linear.Stream(R, C, 4) for R in (1, 2, 4, 8) for C in (64, 128, 256)]
    tiles = [(BO, BK) for BO in (16, 32, 64) for BK in (64, 128, 256, 512)]
    for tokens, name, choices in ((1, "normed_config", streams), (4, "tile_config", tiles), (16, "tile_config", tiles)):
        for bench in bench_linears(form, tokens, False):
            if bench.name == "out" or (bench.name == "attn in" and tokens > 1):
                continue
            found = []
            for choice in choices:
                with mock.patch.object(linears, name, lambda *_, choice=choice: choice):
                    try:
                        found.append((microseconds(bench.fused, bench.copies, 5), choice))
                    except Exception as error:  # too much shared memory, most likely
                        found.append((float("inf"), (choice, type(error).__name__)))
            best = sorted(found, key=lambda pair: pair[0])[:5]
            share = bench.nbytes / BYTES_PER_SECOND / best[0][0] * 1e6
            text = "  ".join(f"{us:.2f} {choice}" for us, choice in best)
            sys.stdout.write(f"{bench.name:9}{form:10}{tokens:4} best {share:.1%}: {text}\n")
            sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default="bf16,fp8_block,nvfp4")
    parser.add_argument("--tokens", default="1,2,4,8,16,64,128")
    parser.add_argument("--overlap", action="store_true", help="with programmatic dependent launch")
    parser.add_argument("--only", default=",".join(BENCHES))
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.sweep:
        for form in args.formats.split(","):
            sweep(form)
        return
    found = []
    for name in args.only.split(","):
        for form in args.formats.split(","):
            if form != "bf16" and name in ("route", "delta"):
                continue
            for tokens in map(int, args.tokens.split(",")):
                for bench in BENCHES[name](form, tokens, args.overlap):
                    error = relative(bench.fused(0), bench.exact(0)) if tokens <= 16 else 0.0
                    fused_us, parts_us = (microseconds(call, bench.copies) for call in (bench.fused, bench.parts))
                    line = {"op": bench.name, "format": form, "tokens": tokens, "fused_us": fused_us}
                    line |= {"parts_us": parts_us, "share": bench.nbytes / BYTES_PER_SECOND / fused_us * 1e6}
                    found.append(line | {"error": error})
                    wrong = "" if error < 2e-2 else "  WRONG"
                    sys.stdout.write(
                        f"{bench.name:9}{form:10}{tokens:4} fused {fused_us:8.2f} us {line['share']:6.1%}  parts "
                        f"{parts_us:8.2f} us  error {error:.1e}{wrong}\n"
                    )
                    sys.stdout.flush()
                torch.cuda.empty_cache()
    folder = Path(os.environ.get("OUT", "."))
    (folder / "bench_ops.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
