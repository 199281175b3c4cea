"""Whole decode steps of a few layers in one CUDA graph, by the configurations of the streaming kernels.

    python -m tests.gpu.steps FORMAT.. [--layers 8] [--seconds 80] [--part normed,stream,...]

FORMAT: the end of a geometry's name after qwen3.6-35b-a3b: "bf16", "fp8" or "nvfp4". Times kernels as they follow each
other, which overlapping launches (see kernels/overlap.py) make unlike their times alone. Prints the step of one token
with and without overlap and of four tokens, with what 40 layers would take; then, for each choice of kernels/tuning.py
that one token takes, the step with each candidate, and the table with the fastest of all. Errors are of logits, to
plain torch. Candidates are compiled by processes of their own first. Writes $OUT/steps-FORMAT.json.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from shardwise.cache.pool import allocate
from shardwise.checkpoint.index import DTYPES
from shardwise.config import ServeConfig
from shardwise.engine.build import blueprint, load_weights
from shardwise.engine.graphs import TURNS, DecodeGraphs, Inputs, Turns
from shardwise.engine.plan import Chunk
from shardwise.engine.tables import PageTables
from shardwise.kernels import tuning
from shardwise.kernels.ops import select
from shardwise.models.qwen3_5 import Model
from shardwise.parallel.comm import Alone
from shardwise.parallel.context import RankContext
from tests.gpu.alike import alike

GEOMETRY, LAYERS, CONTEXT, PAGES = Path("benchmarks/geometry"), 40, 130, 64
WORKERS = 5
Choice = tuple[int, ...]
PROJECTIONS = ((8192, 2048), (4096, 2048), (9216, 2048))  # by rows and columns: inputs of both kinds of layers


@dataclass(frozen=True)
class Part:
    """What is chosen together: keys of the table, and the candidates, for steps of so many tokens."""

    name: str
    keys: tuple[str, ...]
    candidates: tuple[Choice, ...]
    tokens: int = 1


def parts_of(form: str) -> list[Part]:
    """All parts of a format."""
    dense, expert = {"bf16": ("bf16", "bf16"), "fp8": ("fp8", "fp8"), "nvfp4": ("fp8", "fp4")}[form]
    inputs = tuple(f"normed {dense}:{rows}x{columns} 1" for rows, columns in PROJECTIONS)
    joint = f"linears {dense}:8192x2048 {dense}:4096x2048 bf16:64x2048 4"
    tiles = ((1, 32, 16, 256, 4, 3), (1, 32, 16, 128, 4, 4), (1, 64, 16, 128, 4, 3), (1, 16, 16, 256, 4, 3))
    several = (
        Part("delta in", (joint,), ((1, 32, 16, 256, 4, 4), *tiles), 4),
        Part("attention in", (f"linears {dense}:9216x2048 4",), (*tiles[:2], (0,), (2,)), 4),
        Part("out", (f"linears {dense}:2048x4096 4",), ((2,), (0,), (1, 16, 16, 256, 4, 4), (1, 16, 16, 512, 4, 3)), 4),
        Part("router", ("linears bf16:257x2048 4",), ((0,), (1, 16, 16, 256, 4, 4), (1, 16, 16, 128, 4, 4)), 4),
    )
    blocks = ((64, 128, 4, 3), (128, 128, 8, 3), (64, 256, 4, 3), (32, 256, 4, 3), (64, 128, 4, 4))
    matched = (
        Part("matched up", (f"matched {expert}:1024x2048 4",), blocks, 4),
        Part("matched down", (f"matched {expert}:2048x512 4",), blocks, 4),
    )
    one = {
        "bf16": (
            Part("normed", inputs, ((4, 256, 4), (8, 256, 4), (4, 256, 2), (8, 256, 8))),
            Part("out", ("stream bf16:2048x4096 1",), ((1, 128, 4), (2, 512, 4), (1, 512, 4), (2, 256, 2))),
            Part("gate_up", ("gate_up bf16:1024x2048 1",), ((2, 128, 4), (2, 256, 4), (4, 256, 8), (2, 256, 2))),
            Part("down", ("down bf16:2048x512 1",), ((1, 64, 4), (2, 64, 4), (2, 64, 8), (1, 64, 2))),
            Part("delta", ("delta_step 128x128 1",), ((8,), (16,))),
            Part("router", ("normed bf16:257x2048 1",), ((2, 256, 2), (1, 256, 2), (1, 256, 4))),
            Part("head", ("stream bf16:248320x2048 1",), ((2, 256, 4), (4, 256, 4), (8, 256, 4))),
        ),
        "fp8": (
            Part("normed", inputs, ((8, 128, 4), (4, 128, 4), (16, 128, 4), (8, 128, 2), (4, 128, 2))),
            Part("out", ("stream fp8:2048x4096 1",), ((8, 256, 4), (4, 256, 4), (2, 256, 4), (4, 256, 2))),
            Part("gate_up", ("gate_up fp8:1024x2048 1",), ((4, 64, 4), (4, 128, 4), (2, 128, 4), (4, 128, 2))),
            Part("down", ("down fp8:2048x512 1",), ((2, 32, 4), (4, 32, 4), (1, 32, 4), (2, 32, 2))),
        ),
        "nvfp4": (
            Part("gate_up", ("gate_up fp4:1024x2048 1",), ((4, 128, 4), (2, 128, 4), (8, 128, 4), (4, 128, 2))),
            Part("down", ("down fp4:2048x512 1",), ((4, 32, 4), (8, 32, 4), (2, 32, 4), (4, 32, 2))),
            Part("head", ("split fp4:248320x2048 1",), ((16, 8, 4, 4), (16, 8, 2, 2), (32, 8, 4, 2))),
        ),
    }[form]
    return [*one, *several, *(matched if form != "nvfp4" else ())]


@contextlib.contextmanager
def chosen(overrides: Mapping[str, Choice]) -> Iterator[None]:
    """A context in which kernels take `overrides` before what is in the file."""
    found = tuning.choice

    def choice(name: str, what: str, layouts: Any, tokens: int) -> Any:
        return overrides.get(tuning.key(what, layouts, tokens)) or found(name, what, layouts, tokens)

    with mock.patch.object(tuning, "choice", choice):
        yield


class Steps:
    """A model of some layers of a format with made-up weights, and its decode steps."""

    def __init__(self, form: str, layers: int) -> None:
        suffix = "" if form == "bf16" else f"-{form}"
        with tempfile.TemporaryDirectory() as folder:
            text = json.loads((GEOMETRY / f"qwen3.6-35b-a3b{suffix}" / "config.json").read_text())
            text["text_config"]["num_hidden_layers"] = layers
            text.pop("vision_config", None)
            (Path(folder) / "config.json").write_text(json.dumps(text))
            serve = ServeConfig(model=folder, ranks=1, load_format="dummy", device="cuda")
            made = blueprint(serve)
        self.device, self.config = torch.device("cuda", 0), made.model
        ops = select("triton", self.device, True)
        self.ctx = RankContext(0, 1, made.partitions, Alone(), ops, self.device, DTYPES[made.dtype])
        with alike():
            self.model = load_weights(serve, made, self.ctx, 1)[0]
        self.tables = PageTables(5, PAGES, serve.page_tokens)
        for row in range(1, 5):
            self.tables.update(Chunk(row, 0, 0, [], list(range(1 + (row - 1) * PAGES, 1 + row * PAGES)), False))
        self.caches = allocate(made.model, made.caches, 1 + 4 * PAGES, 5, self.ctx)
        self.last_tokens = torch.arange(5, device=self.device)

    def fresh(self) -> None:
        """Caches as if a prompt had gone through."""
        torch.manual_seed(0)
        for cache in self.caches:
            for value in vars(cache).values():
                if isinstance(value, torch.Tensor):
                    value.copy_(torch.randn(value.shape, device=self.device) * 0.1)

    def with_ops(self, kind: Any, overlap: bool) -> Model:
        """The same model with other operations."""
        ops = select(kind, self.device, overlap)
        for part in (self.model, self.model.embedding, self.model.head.linear, *self.model.layers):
            self._give(part, ops, 4)
        return self.model

    def _give(self, part: Any, ops: Any, depth: int) -> None:
        if hasattr(part, "ops"):
            part.ops = ops
        for value in vars(part).values() if depth and hasattr(part, "__dict__") else ():
            if type(value).__module__.startswith(("shardwise.layers", "shardwise.models")):
                self._give(value, ops, depth - 1)

    @torch.inference_mode()
    def graph(self, tokens: int, layers: int) -> tuple[Any, torch.Tensor]:
        """The graph of a step of so many tokens, captured anew, with the same step in all of its turns; and its
        logits."""
        kept, self.model.layers = self.model.layers, self.model.layers[:layers]
        graphs = DecodeGraphs(self.model, self.caches[:layers], self.tables, self.last_tokens, self.ctx)
        chunks = [Chunk(row, CONTEXT, 1, [17 * row], [], True) for row in range(1, tokens + 1)]
        try:
            self.fresh()
            graphs._get(graphs.sizes[tokens.bit_length() - 1], graphs.lengths[0])
            for _ in range(TURNS):
                self.fresh()
                logits = graphs.run(chunks).clone()
        finally:
            self.model.layers = kept
        (captured,) = graphs.captured.values()
        return captured, logits

    @torch.inference_mode()
    def microseconds(self, tokens: int = 1, layers: int = 0, replays: int = 40) -> tuple[float, torch.Tensor]:
        """The median time of a step, and its logits."""
        captured, logits = self.graph(tokens, layers or len(self.model.layers))
        times = []
        for _ in range(replays):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(torch.cuda.current_stream())
            captured.graph.replay()
            stop.record(torch.cuda.current_stream())
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1000)
        return sorted(times)[len(times) // 2], logits


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def wanted(form: str, names: str) -> list[Part]:
    """Parts of these names, by commas; all if there are none."""
    return [part for part in parts_of(form) if not names or part.name in names.split(",")]


def compile_some(form: str, names: str, worker: int) -> None:
    """Runs every WORKERS-th candidate once, in a model of four layers."""
    steps = Steps(form, 4)
    todo = [(part, choice) for part in wanted(form, names) for choice in part.candidates]
    for part, choice in todo[worker::WORKERS]:
        with chosen(dict.fromkeys(part.keys, choice)), contextlib.suppress(Exception):
            steps.graph(part.tokens, 4)


def whole(steps: Steps, form: str, sizes: Sequence[int], overlaps: Sequence[bool]) -> dict[str, Any]:
    """Steps of so many tokens by the table as it is."""
    layers, found = len(steps.model.layers), dict[str, Any]()
    for tokens in sizes:
        steps.with_ops("reference", False)
        chunks = [Chunk(row, CONTEXT, 1, [17 * row], [], True) for row in range(1, tokens + 1)]
        exact = eager(steps, chunks)
        for overlap in overlaps:
            steps.with_ops("triton", overlap)
            many_us, logits = steps.microseconds(tokens)
            few_us, _ = steps.microseconds(tokens, layers // 2)
            all_us = many_us + (LAYERS - layers) * (many_us - few_us) / (layers - layers // 2)
            error = relative(logits, exact)
            found[f"{tokens} {overlap}"] = {"us": many_us, "few_us": few_us, "all_us": all_us, "error": error}
            sys.stdout.write(
                f"{form} {tokens} tokens, overlap {overlap}: {many_us:.0f} us of {layers} layers, {few_us:.0f} of "
                f"half; {LAYERS}: {all_us:.0f} us, {tokens * 1e6 / all_us:.0f} tokens/s, error {error:.1e}\n"
            )
            sys.stdout.flush()
    return found


@torch.inference_mode()
def eager(steps: Steps, chunks: list[Chunk]) -> torch.Tensor:
    """Logits without a graph."""
    graphs = DecodeGraphs(steps.model, steps.caches, steps.tables, steps.last_tokens, steps.ctx)
    inputs = Inputs.empty(len(chunks), graphs.lengths[0], steps.tables.page_tokens, steps.device)
    steps.fresh()
    graphs._fill(Turns(inputs).fields[0], chunks)
    tokens_B, positions_B = inputs.fields.wide_3B[:2]
    return steps.model(tokens_B, positions_B, inputs.seqs, steps.caches, None, handover=inputs.handover)


def sweep(steps: Steps, form: str, names: str, stop_s: float) -> dict[str, Any]:
    """One choice after another, the best of each is kept."""
    steps.with_ops("triton", True)
    best, found = dict[str, Choice](), dict[str, Any]()
    for tokens in (1, 4):
        best_us, first = steps.microseconds(tokens)
        for part in wanted(form, names):
            if part.tokens != tokens or time.monotonic() > stop_s:
                continue
            times: dict[Choice, float] = {}
            for choice in part.candidates:
                with chosen(best | dict.fromkeys(part.keys, choice)):
                    try:
                        times[choice], logits = steps.microseconds(tokens)
                        if not relative(logits, first) < 5e-2:
                            sys.stdout.write(f"{form} {part.name} {choice}: error {relative(logits, first):.1e}\n")
                            times[choice] = float("inf")
                    except Exception as error:
                        sys.stdout.write(f"{form} {part.name} {choice}: {str(error)[:200]}\n")
            fastest = min(times, key=lambda each: times[each], default=())
            if fastest and times[fastest] < best_us - 1:
                best_us = times[fastest]
                best |= dict.fromkeys(part.keys, fastest)
            found[f"{part.name} {tokens}"] = {str(choice): us for choice, us in times.items()}
            line = ", ".join(f"{choice} {us:.1f}" for choice, us in times.items())
            sys.stdout.write(f"{form} {tokens} {part.name}: best now {best_us:.1f} | {line}\n")
            sys.stdout.flush()
    found["best"] = {key: list(choice) for key, choice in best.items()}
    with chosen(best):
        found["whole"] = whole(steps, form, (1, 4), (True,))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="+", choices=["bf16", "fp8", "nvfp4"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--part", default="", help="only these parts, by commas; none: no sweep")
    parser.add_argument("--compile", type=int, default=-1, help="be the worker of this number")
    args = parser.parse_args()
    begin_s = time.monotonic()
    if args.compile >= 0:
        compile_some(args.formats[0], args.part, args.compile)
        return
    command = [sys.executable, "-m", "tests.gpu.steps"]
    workers = [
        subprocess.Popen([*command, form, "--part", args.part, "--compile", str(n)], stderr=subprocess.DEVNULL)
        for form in args.formats
        for n in range(WORKERS)
        if args.part != "none"
    ]
    for form in args.formats:
        steps = Steps(form, args.layers)
        for process in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(1.0, begin_s + args.seconds * 0.5 - time.monotonic()))
                continue
            process.kill()
        sys.stdout.write(f"{form} ready after {time.monotonic() - begin_s:.0f} s\n")
        found: dict[str, Any] = {"whole": whole(steps, form, (1,), (True, False))}
        if args.part == "none":
            found["whole"] |= whole(steps, form, (4,), (True, False))
        else:
            found["sweep"] = sweep(steps, form, args.part, begin_s + args.seconds)
        Path(os.environ.get("OUT", "."), f"steps-{form}.json").write_text(json.dumps(found, indent=1))
        del steps
        torch.cuda.empty_cache()
    sys.stdout.write(f"took {time.monotonic() - begin_s:.0f} s\n")


if __name__ == "__main__":
    main()
