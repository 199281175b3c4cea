"""Measures configurations of kernels on this GPU, and writes the best to src/shardwise/kernels/tuned/NAME.json.

    python -m tests.gpu.tune [--formats bf16,fp8_block,nvfp4] [--tokens 1,4,16] [--ops "moe,delta in"] [--seconds 150]
        [--ranks 2]

First as many processes as there are cores run every candidate once, which compiles it; then one measures them, by
turns of the parts of an operation: the best of the first is kept while the second is tried. What is not 2 % faster
than the kernels' own rule is left to the rule. Shapes are of 35B-A3B, on one GPU or on one of so many even ranks.
Prints a line for each operation: microseconds by the rule and by the choice, share of 4.3 TB/s, relative error to the
reference. Also writes $OUT/tune.json. Ends after the given seconds with what it has.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from shardwise.checkpoint.weight import Weight
from shardwise.kernels import tuning
from shardwise.kernels.delta import triton as delta
from shardwise.kernels.linear.fragments import VALUES
from shardwise.kernels.linear.tiles import target_of
from shardwise.kernels.linears import reference as linears_reference
from shardwise.kernels.linears import triton as linears
from shardwise.kernels.moe_block import triton as block
from shardwise.kernels.sequences import Sequences
from shardwise.shard import local
from tests.gpu import bench_ops
from tests.gpu.bench_ops import BYTES_PER_SECOND, Bench, copies_of, microseconds, random, relative
from tests.kernels.weights import DTYPES, make_weight, spec_of

Choice = tuple[int, ...]
TOKENS = (1, 4, 16, 64, 128, 8192)
GAIN = 0.98
BLOCKS: list[Choice] = [  # BO, BK, warps, stages of experts
    (64, 128, 4, 4), (32, 128, 4, 4), (64, 256, 4, 3), (128, 128, 8, 3), (128, 64, 4, 4), (64, 128, 8, 3),
]  # fmt: skip
TILES: list[Choice] = [  # BO, BK, warps, stages of linears
    (16, 256, 4, 4), (32, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 3), (16, 512, 4, 3), (32, 128, 4, 6),
]  # fmt: skip
WIDE_TILES: list[Choice] = [(32, 128, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 8, 4)]  # 64 tokens and more
MANY: list[Choice] = [  # tokens of a tile; BO, BK, warps, stages of gates and ups, and of down
    (128, 128, 64, 8, 4, 128, 64, 8, 4), (128, 256, 64, 8, 3, 256, 64, 8, 3), (64, 128, 64, 4, 4, 128, 64, 4, 4),
    (128, 128, 64, 4, 3, 128, 64, 4, 3), (64, 128, 128, 4, 3, 128, 128, 4, 3), (128, 128, 128, 8, 2, 128, 128, 8, 2),
    (64, 256, 64, 8, 3, 256, 64, 8, 3),
]  # fmt: skip
SCANS: list[Choice] = [(16, 2), (32, 4), (32, 8), (64, 8)]  # value columns of a program, warps
SPLIT: list[Choice] = [  # BO, BK, warps, stages, splits of a product by itself
    (64, 128, 4, 4, 1), (128, 128, 8, 3, 1), (128, 128, 8, 3, 2), (128, 64, 4, 4, 1),    (32, 128, 4, 4, 1),
]  # fmt: skip
SPLITS = [(16, 2, 2), (16, 4, 4), (16, 8, 8), (32, 2, 1), (32, 4, 2), (32, 8, 4)]  # rows, warps, parts of `in`
UPS = [(16, 2, 2), (16, 4, 4), (16, 8, 8), (32, 2, 1), (32, 4, 2), (64, 4, 1)]  # of gates and ups, likewise
DOWNS = [(32, 2, 1), (64, 2, 1), (64, 4, 1), (128, 4, 1), (128, 8, 1), (32, 4, 2)]


@dataclass(frozen=True)
class Part:
    """What is chosen together: a name of tuning.choice for weights [rows, columns], and the candidates."""

    what: str
    weights: tuple[tuple[str, int, int], ...]
    candidates: list[Choice]
    joint: bool = False  # one key for all weights, not one for each

    def keys(self, tokens: int) -> list[str]:
        shapes = [f"{kind}:{rows}x{columns}" for kind, rows, columns in self.weights]
        names = [shapes] if self.joint else [[shape] for shape in shapes]
        at = tuning.bucket(1 if self.what.startswith("scan") else tokens)
        return [" ".join([self.what, *name, str(at)]) for name in names]


def kind_of(form: str) -> str:
    return {"bf16": "bf16", "nvfp4": "fp4"}.get(form, "fp8")


def streams(columns: int, form: str, rows: Sequence[int]) -> list[Choice]:
    """Rows, chunks and warps of streaming kernels: all chunks in one block, or half of them."""
    chunks = columns // (8 if form == "bf16" else 16)
    sizes = sorted({max(min(chunks, 256) // parts, 16) for parts in (1, 2)})
    found = [(R, C, warps) for R in rows for C in sizes for warps in (4, 8) if 64 <= R * C <= 4096]
    return [(R, C, warps) for R, C, warps in found if warps == 4 or R * C >= 2048]


def fragment_parts(up: tuple[str, int, int], down: tuple[str, int, int]) -> list[Part]:
    """What to choose for experts whose codes go straight to registers: 2 or 4 words in a row of each thread."""

    def candidates(columns: int, shapes: list[Choice]) -> list[Choice]:
        steps = [(8 * run * VALUES[{"fp8": 1, "fp4": 3}[up[0]]], run) for run in (4, 2)]
        return [(M, step, run, w, s) for step, run in steps for M, w, s in shapes if step * s <= columns]

    return [Part("fragments", (up,), candidates(up[2], UPS)), Part("fragments", (down,), candidates(down[2], DOWNS))]


def parts_of(op: str, form: str, tokens: int, ranks: int) -> list[Part]:
    """What there is to choose for an operation of bench_ops or of this file."""
    kind, both, inner = kind_of(form), 1024 // ranks, 512 // ranks
    shapes = {
        "delta in": ((kind, 8192 // ranks, 2048), (kind, 4096 // ranks, 2048)),
        "attn in": ((kind, 9216 // ranks, 2048),), "out": ((kind, 2048, 4096 // ranks),),
        "head": (("bf16", 248320 // ranks, 2048),), "shared up": ((kind, both, 2048),),
        "shared down": ((kind, 2048, inner),), "route": (("bf16", 257, 2048),),
        "moe": ((kind, both, 2048), (kind, 2048, inner)), "delta prefill": (),
    }[op]  # fmt: skip
    if op == "delta prefill":
        return [Part("scan 128x128", (), SCANS, joint=True)]
    if op == "moe" and tokens > max(tuning.BUCKETS):
        return [Part("many", shapes[:1], MANY)]
    if op == "moe" and tokens == 1:
        rows_up, rows_down = (1, 2, 4, 8), (1, 2, 4, 8)
        return [
            Part("gate_up", shapes[:1], streams(2048, form, rows_up)),
            Part(
                "down", shapes[1:], [(R, inner // (8 if form == "bf16" else 16), w) for R in rows_down for w in (4, 8)]
            ),
        ]
    if op == "moe":
        tiles = "matched" if tokens <= 32 else "grouped"
        found = [Part(tiles, (shape,), BLOCKS) for shape in shapes] if form == "bf16" else fragment_parts(*shapes)
        ways = [(way,) for way in (block.STREAMED, block.MATCHED, block.APART)]
        return [*found, Part("experts", shapes[:1], ways)] if tokens <= 16 else found
    if tokens == 1:
        what = "normed" if ranks == 1 and op in ("delta in", "attn in", "route") else "stream"
        rows = (1, 2, 4) if op == "route" else (1, 2, 4, 8) if op in ("out", "head") else (4, 8, 16)
        return [Part(what, shapes, streams(shapes[0][2], form, rows))]
    width = 16 if tokens <= 16 else 64
    tiles = [(linears.BY_TILES, BO, width, *rest) for BO, *rest in (TILES if tokens <= 16 else WIDE_TILES)]
    tiles += [(linears.BY_TILES, 128, 128, 128, 8, 3)] if tokens > 64 else []
    joint = shapes if op != "delta in" else (*shapes, ("bf16", 64 // ranks, 2048))
    columns = 8 if tokens <= 8 else 16
    splits = [Part("split", joint, [(M, columns, *rest) for M, *rest in SPLITS], joint=True)] if tokens <= 16 else []
    if splits and form != "bf16":
        return splits
    found = [Part("linears", joint, [*([(linears.STREAMED,)] if tokens <= 4 else []), (2,), *tiles], joint=True)]
    if form != "bf16" and op not in ("route", "head"):
        found.insert(0, Part("tiled", shapes, [(BO, width, *rest) for BO, *rest in SPLIT]))
    return [*found, *splits]


def plain_benches(form: str, tokens: int, ranks: int) -> Iterator[Bench]:
    """Linears that bench_ops lacks: the head, and the shared expert where it is not part of the experts' kernels."""
    shapes = ("head", 248320 // ranks, 2048), ("shared up", 1024 // ranks, 2048), ("shared down", 2048, 512 // ranks)
    for name, rows, columns in shapes:
        if (name == "head") != (form == "bf16" and name == "head") or (name != "head" and tokens < 64):
            continue
        first = make_weight((rows, columns), form, 1, "cuda")
        copies = copies_of(first.nbytes)
        sets = [first, *(make_weight((rows, columns), form, n, "cuda") for n in range(2, copies + 1))]
        x, dtype = random(tokens, columns), None if name == "shared up" else torch.float32

        def fused(i: int, module=linears, sets=sets, x=x, dtype=dtype):
            return module.linears(x, [sets[i]], [dtype], **bench_ops.extra(module, ranks > 1))

        yield Bench(name, fused, fused, lambda i, fused=fused: fused(i, linears_reference), first.nbytes, copies)


def bench_prefill(tokens: int, sequences: int = 4) -> Iterator[Bench]:
    """The delta rule along prompts."""
    ints = {"dtype": torch.int32, "device": bench_ops.DEVICE}
    starts = torch.arange(0, tokens + 1, tokens // sequences, **ints)
    rows = torch.arange(1, sequences + 1, **ints)
    slots = torch.arange(tokens, dtype=torch.int64, device=bench_ops.DEVICE)
    pages = torch.zeros(sequences, 1, **ints)
    seqs = Sequences(starts, torch.zeros_like(rows), rows, pages, slots, 0, tokens // sequences, tokens)
    q, k, v = random(tokens, 8192).split((2048, 2048, 4096), -1)
    ba, decays = random(tokens, 64, dtype=torch.float32), random(32, dtype=torch.float32)
    inputs = (q.unflatten(-1, (16, 128)), k.unflatten(-1, (16, 128)), v.unflatten(-1, (32, 128)), ba[:, :32],
              ba[:, 32:], decays, decays, torch.arange(32, **ints) // 2)  # fmt: skip
    state = random(sequences + 1, 32, 128, 128, dtype=torch.float32)

    def fused(i: int):
        return [delta.gated_delta(*inputs, state, seqs)]

    yield Bench("delta prefill", fused, fused, fused, tokens * (8192 + 4096) * 2, 1)


def benches(form: str, tokens: int, ranks: int) -> Iterator[Bench]:
    yield from bench_ops.bench_moe(form, tokens, ranks > 1, ranks)
    if tokens > max(tuning.BUCKETS):
        yield from bench_prefill(tokens) if form == "bf16" else ()
        return
    yield from bench_ops.bench_linears(form, tokens, ranks > 1, ranks)
    yield from plain_benches(form, tokens, ranks)
    if form == "bf16":
        yield from bench_ops.bench_route(form, tokens, ranks > 1, ranks)


def wanted(found: Iterator[Bench], ops: str) -> Iterator[Bench]:
    """Those named in `ops`, which are parted by commas; all if it is empty."""
    return (bench for bench in found if not ops or bench.name in ops.split(","))


def chosen(overrides: Mapping[str, Choice]):
    """A context in which kernels take `overrides` and nothing of a file."""

    def choice(_: str, what: str, layouts: Sequence[tuple[int, ...]], tokens: int) -> Choice | None:
        return overrides.get(tuning.key(what, layouts, tokens))

    return mock.patch.object(tuning, "choice", choice)


def empty_weight(shape: Sequence[int], form: str, *_: object) -> Weight:
    """A weight of any bytes."""
    spec = spec_of(tuple(shape), form)
    held = tuple(local(spec, {}, 0))
    tensors = tuple(torch.empty(part.shape, dtype=DTYPES[part.stored.dtype], device="cuda") for part in held)
    return Weight(spec, tuple(shape), held, tensors)


def compile_all(jobs: Sequence[tuple[str, int]], ops: str, ranks: int, worker: int, workers: int) -> None:
    """Runs every `workers`-th candidate once, on weights of any bytes. Errors wait for the measurement."""
    bench_ops.make_weight = globals()["make_weight"] = empty_weight
    bench_ops.copies_of = globals()["copies_of"] = lambda _: 1
    count = 0
    for form, tokens in jobs:
        for bench in wanted(benches(form, tokens, ranks), ops):
            for part in parts_of(bench.name, form, tokens, ranks):
                candidates: list[Choice] = [(), *part.candidates]
                for candidate in candidates:
                    count += 1
                    if count % workers != worker:
                        continue
                    overrides: dict[str, Choice] = dict.fromkeys(part.keys(tokens), candidate)
                    with chosen(overrides if candidate else {}):
                        try:
                            bench.fused(0)
                        except Exception as error:
                            sys.stderr.write(f"{bench.name} {form} {tokens} {candidate}: {str(error)[:99]}\n")
        torch.cuda.empty_cache()


def timed(bench: Bench, overrides: Mapping[str, Choice]) -> float:
    with chosen(overrides):
        try:
            return microseconds(bench.fused, bench.copies, 7)
        except Exception:  # too much shared memory, most likely
            torch.cuda.synchronize()
            return float("inf")


def tune(bench: Bench, form: str, tokens: int, ranks: int, best: dict[str, Choice]) -> dict[str, object]:
    """Adds choices for one operation to `best`; a line of the table."""
    # States of convolutions move on: outputs are compared before anything else runs, by the rule alone.
    with chosen({}):
        error = relative(bench.fused(0), bench.exact(0)) if tokens <= 16 else 0.0
    rule_us = best_us = timed(bench, {})
    found: dict[str, Choice] = {}
    for part in parts_of(bench.name, form, tokens, ranks):
        times = {each: timed(bench, found | dict.fromkeys(part.keys(tokens), each)) for each in part.candidates}
        fastest = min(times, key=lambda each: times[each])
        if times[fastest] < best_us * GAIN:
            best_us = times[fastest]
            found |= dict.fromkeys(part.keys(tokens), fastest)
    if tokens <= 16 and bench.name != "delta in":
        with chosen(found):
            error = max(error, relative(bench.fused(0), bench.exact(0)))
    if not error < 2e-2:
        found = {}
    best |= found
    share = bench.nbytes / BYTES_PER_SECOND / best_us * 1e6
    return {"op": bench.name, "format": form, "tokens": tokens, "rule_us": rule_us, "best_us": best_us, "share": share,
            "error": error, "found": {key: list(each) for key, each in found.items()}}  # fmt: skip


def write(best: Mapping[str, Choice], lines: Sequence[dict[str, object]]) -> None:
    """After every line: a kernel that fails for good takes the process with it."""
    name = torch.cuda.get_device_name().replace(" ", "_")
    shared_kib = target_of(torch.device("cuda", 0)).shared_kib
    lines_of = [f"{json.dumps(key)}: {json.dumps(best[key])}" for key in sorted(best)]
    text = ",\n".join([f'{{"{tuning.SHARED_KIB}": [{shared_kib}]', *lines_of]) + "}\n"
    folder = Path(tuning.__file__).with_name("tuned")
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(text)
    folder = Path(os.environ.get("OUT", "."))
    (folder / f"{name}.json").write_text(text)
    (folder / "tune.json").write_text(json.dumps(lines, indent=1))


def measure(jobs: Sequence[tuple[str, int]], ops: str, ranks: int, stop_s: float) -> dict[str, Choice]:
    """Adds to the choices of the present file."""
    kept = tuning.table(torch.cuda.get_device_name())
    best = {key: tuple(numbers) for key, numbers in kept.items() if key != tuning.SHARED_KIB}
    lines = []
    for form, tokens in jobs:
        for bench in wanted(benches(form, tokens, ranks), ops):
            if time.monotonic() > stop_s:
                sys.stdout.write("out of time\n")
                return best
            torch.manual_seed(0)
            line = tune(bench, form, tokens, ranks, best)
            lines.append(line)
            write(best, lines)
            wrong = "" if line["error"] < 2e-2 else "  WRONG"  # type: ignore[operator]
            sys.stdout.write(
                f"{bench.name:12}{form:10}{tokens:4} rule {line['rule_us']:8.2f} us, best {line['best_us']:8.2f} us "
                f"{line['share']:6.1%} error {line['error']:.1e}{wrong} {line['found']}\n"
            )
            sys.stdout.flush()
        torch.cuda.empty_cache()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default="bf16,fp8_block,nvfp4")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--ops", default="", help="only these, by their names in the table; the file keeps the others")
    parser.add_argument("--seconds", type=float, default=150, help="of all")
    parser.add_argument("--ranks", type=int, default=1, help="shapes are those of one of so many even ranks")
    parser.add_argument("--compile", default="", help="WORKER/WORKERS: compile that share of the candidates only")
    args = parser.parse_args()
    begin_s = time.monotonic()
    jobs = [(form, tokens) for tokens in map(int, args.tokens.split(",")) for form in args.formats.split(",")]
    if args.compile:
        worker, workers = map(int, args.compile.split("/"))
        compile_all(jobs, args.ops, args.ranks, worker, workers)
        return
    command = [sys.executable, "-m", "tests.gpu.tune", "--formats", args.formats, "--tokens", args.tokens]
    command += ["--ops", args.ops, "--ranks", str(args.ranks), "--compile"]
    workers = min(os.cpu_count() or 1, 16)
    started = [subprocess.Popen([*command, f"{n}/{workers}"]) for n in range(workers)]
    for process in started:
        try:
            process.wait(max(0.01, begin_s + args.seconds * 0.6 - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    sys.stdout.write(f"compiled in {time.monotonic() - begin_s:.0f} s\n")
    best = measure(jobs, args.ops, args.ranks, begin_s + args.seconds - 5)
    sys.stdout.write(f"{len(best)} choices in {time.monotonic() - begin_s:.0f} s\n")


if __name__ == "__main__":
    main()
