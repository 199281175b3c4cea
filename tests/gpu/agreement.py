"""How near the fast kernels are to the reference path, in logits of a whole model on one GPU.

    python -m tests.gpu.agreement FORMAT [--layers 40] [--limit-s 100]

FORMAT: the end of a geometry's name after qwen3.6-35b-a3b ("bf16", "fp8", "nvfp4"), or a folder; weights are made up
unless it has some. Ids are random. A prompt in two chunks, 63 short prompts in one step, then decode steps of 1, 4, 16
and 64 of them go through the kernels as served (graphs, overlap); each step is told the next id. All positions are
compared with the same sequences as whole prompts in plain torch:

    exact          reference operations, activations and caches in fp32: the same weights, as little rounding as can be
    reference      reference operations, activations in bf16, as --kernels reference
    exact, routed  as exact, but with the experts that the fast kernels chose

With random weights many choices of experts are near-ties, and many of the two likeliest tokens: the line exact |
reference says what bf16 alone changes, and exact, routed | fast what the kernels' arithmetic does without other
experts. "margin" is what the likeliest logit is ahead of the second by, in the first of both. Layers share experts that
are tensors of their own, which saves the time of making them up. Writes
$OUT/agreement-FORMAT.json after each part.
"""

import argparse
import faulthandler
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.cache.pool import CacheSpecs, allocate
from shardwise.checkpoint.index import DTYPES
from shardwise.checkpoint.load import load
from shardwise.checkpoint.weight import Weight
from shardwise.config import ServeConfig
from shardwise.engine.build import Blueprint, blueprint
from shardwise.engine.formats import FP8
from shardwise.engine.graphs import DecodeGraphs, Inputs, Turns
from shardwise.engine.place import device_kind
from shardwise.engine.plan import Chunk
from shardwise.engine.runner import Runner
from shardwise.engine.tables import PageTables
from shardwise.kernels.linears.reference import norm_linears
from shardwise.kernels.norm.reference import rms_norm
from shardwise.kernels.ops import Ops, select
from shardwise.models.qwen3_5 import Model, declare_pages, declare_rows
from shardwise.parallel.comm import Alone
from shardwise.parallel.context import RankContext
from tests.gpu.alike import AlikeSource
from tests.gpu.divergence import Report

GEOMETRY = "benchmarks/geometry/qwen3.6-35b-a3b"
GRAPH_TOKENS = 4096  # the shortest length that graphs are made for when serving
PROMPT = "prompt in two chunks"


@dataclass(frozen=True)
class Step:
    """Of each of some sequences, its next tokens: (sequence, start, count)."""

    part: str
    pieces: list[tuple[int, int, int]]


@dataclass(frozen=True)
class Course:
    """Ids of all sequences, and the steps that they go through; logits [L, V] are those of one after the other."""

    ids: list[list[int]]
    steps: list[Step]

    @property
    def begins(self) -> list[int]:
        """Where the logits of each sequence begin."""
        return [sum(map(len, self.ids[:s])) for s in range(len(self.ids) + 1)]

    def rows(self, step: Step) -> list[int]:
        begins = self.begins
        return [begins[s] + start + t for s, start, count in step.pieces for t in range(count)]

    def parts(self) -> dict[str, list[int]]:
        """The rows of logits of each part."""
        found = dict[str, list[int]]()
        for step in self.steps:
            found.setdefault(step.part, []).extend(self.rows(step))
        return found


def course_of(vocab: int, prompt: int, batches: Sequence[int], counts: Sequence[int]) -> Course:
    """One prompt of `prompt` tokens and short ones, then as many decode steps of each batch as `counts` says."""
    reached = [prompt, *(9 + 29 * s % 47 for s in range(1, max(batches)))]
    first = prompt * 4 // 5
    steps = [Step(PROMPT, [(0, 0, first)]), Step(PROMPT, [(0, first, prompt - first)])]
    if len(reached) > 1:
        steps.append(Step(f"{len(reached) - 1} prompts", [(s, 0, reached[s]) for s in range(1, len(reached))]))
    for batch, count in zip(batches, counts, strict=True):
        for _ in range(count):
            steps.append(Step(f"decode {batch}", [(s, reached[s], 1) for s in range(batch)]))
            reached[:batch] = [length + 1 for length in reached[:batch]]
    noise = random.Random(0)
    return Course([[noise.randrange(vocab) for _ in range(length)] for length in reached], steps)


class Noted:
    """norm_route of some operations, with the experts that each layer chose kept."""

    def __init__(self, ops: Ops) -> None:
        self.route, self.ids = ops.norm_route, list[torch.Tensor]()

    def __call__(self, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        found = self.route(*args, **options)
        self.ids.append(found[3].clone())
        return found

    def take(self) -> torch.Tensor:
        """[layers, T, k] of the last step."""
        found, self.ids = torch.stack(self.ids), []
        return found


class Given:
    """The reference's norm_route, with experts [layers, T, k] that were chosen elsewhere, a layer a call.

    lacking: for each layer and token, how far the logit of the least expert is below the best that was left out.
    """

    def __init__(self, ids_NTk: torch.Tensor) -> None:
        self.left, self.lacking = list(ids_NTk), list[torch.Tensor]()

    def __call__(
        self, added_TH: Any, residual_TH: Any, norm_H: torch.Tensor, eps: float, routers: Sequence[Weight], *_: Any
    ) -> tuple[torch.Tensor, ...]:
        dtypes = [torch.float32] * len(routers)
        parts, residual_TH = norm_linears(added_TH, residual_TH, norm_H, eps, routers, dtypes)
        logits_TE1, ids_Tk = torch.cat(parts, -1), self.left.pop(0)
        chosen_Tk = logits_TE1.gather(1, ids_Tk.long())
        others_TE = logits_TE1[:, :-1].scatter(1, ids_Tk.long(), -torch.inf)
        self.lacking.append((others_TE.amax(-1) - chosen_Tk.amin(-1)).clamp(min=0))
        return rms_norm(residual_TH, norm_H, eps), residual_TH, chosen_Tk.softmax(-1), ids_Tk, logits_TE1[:, -1:]


class Launched(DecodeGraphs):
    """Decode steps of the shapes that graphs have, without one: so that operations can be noted."""

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        longest = max(chunk.start for chunk in chunks) + 1
        size = next(size for size in self.sizes if size >= len(chunks))
        length = next(length for length in self.lengths if length >= longest)
        inputs = Inputs.empty(size, length, self.tables.page_tokens, self.ctx.device)
        self._fill(Turns(inputs).fields[0], chunks)
        tokens_B, positions_B = inputs.fields.wide_3B[:2]
        last_R, seqs, handover = self.last_tokens, inputs.seqs, inputs.handover
        logits_BV = self.model(tokens_B, positions_B, seqs, self.caches, None, last_tokens_R=last_R, handover=handover)
        return logits_BV[: len(chunks)]


class LayersAlike(AlikeSource):
    """Made-up weights whose layers share experts that are tensors of their own; those of a layer all differ."""

    contents = 1 << 30


class Case:
    """A model's weights on the device, which every path reads, and the course that they take."""

    def __init__(self, serve: ServeConfig, args: argparse.Namespace) -> None:
        self.serve, self.made = serve, blueprint(serve)
        self.device = torch.device(self.made.device_type, *([0] if self.made.device_type == "cuda" else []))
        self.course = course_of(self.made.model.vocab_size, args.prompt, args.batches, args.steps)
        source = self.made.source or LayersAlike(self.made.specs.values(), device=self.device)
        self.weights = load(self.made.specs, self.made.partitions, 0, source, self.device)

    def pages(self, s: int) -> list[int]:
        """Of sequence `s`."""
        each = [-(-len(ids) // self.serve.page_tokens) for ids in self.course.ids]
        first = 1 + sum(each[:s])
        return list(range(first, first + each[s]))

    def runner(self, ops: Ops, exact: bool = False) -> Runner:
        """A path through the model with caches of its own. exact: activations, caches and sums in fp32."""
        made, page_tokens = self.made, self.serve.page_tokens
        dtype = torch.float32 if exact else DTYPES[made.dtype]
        ctx = RankContext(0, 1, made.partitions, Alone(), ops, self.device, dtype)
        weights, caches = (wide(self.weights), wide_caches(made, page_tokens)) if exact else (self.weights, made.caches)
        count, last = len(self.course.ids), len(self.course.ids) - 1
        longest = max(GRAPH_TOKENS, *map(len, self.course.ids))
        tables = PageTables(count + 1, -(-longest // page_tokens), page_tokens)
        allocated = allocate(made.model, caches, self.pages(last)[-1] + 1, count + 1, ctx)
        return Runner(Model(made.model, weights, ctx), allocated, tables, ctx)

    @torch.inference_mode()
    def served(self, ops: Ops, noted: Noted | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [L, V] of the course step by step; with `noted`, without graphs, the experts [layers, L, k], too."""
        runner = self.runner(ops)
        if self.device.type == "cuda":
            parts = runner.model, runner.caches, runner.tables, runner.last_tokens, runner.ctx
            runner.graphs = DecodeGraphs(*parts) if noted is None else Launched(*parts)
        vocab, total = self.made.model.vocab_size, sum(map(len, self.course.ids))
        logits_LV, ids_NLk = torch.full((total, vocab), torch.nan, device=self.device), None
        for step in self.course.steps:
            rows_T = torch.tensor(self.course.rows(step), device=self.device)
            if step.part.startswith("decode"):
                told = [self.course.ids[s][start] for s, start, _ in step.pieces]
                runner.commit([s + 1 for s, _, _ in step.pieces], torch.tensor(told, device=self.device))
                chunks = [Chunk(s + 1, start, 1, [], [], True) for s, start, _ in step.pieces]
            else:
                chunks = [self._prompt(s, start, count) for s, start, count in step.pieces]
            logits_LV[rows_T] = runner.forward(chunks)
            if noted is not None and noted.ids:
                found = noted.take()
                if ids_NLk is None:
                    ids_NLk = found.new_full((found.shape[0], total, found.shape[2]), -1)
                ids_NLk[:, rows_T] = found[:, : len(rows_T)]
        return logits_LV, ids_NLk

    def _prompt(self, s: int, start: int, count: int) -> Chunk:
        new_pages = self.pages(s) if start == 0 else []
        return Chunk(s + 1, start, count, self.course.ids[s][start : start + count], new_pages, True, True)

    @torch.inference_mode()
    def whole(self, ops: Ops, exact: bool) -> torch.Tensor:
        """Logits [L, V] of all sequences as prompts, in one step."""
        chunks = [self._prompt(s, 0, len(ids)) for s, ids in enumerate(self.course.ids)]
        with sdpa_kernel(SDPBackend.MATH):  # others may take fp32 for less than it is
            return self.runner(ops, exact).forward(chunks)


def wide(weights: dict[str, Weight]) -> dict[str, Weight]:
    """The same weights with norms in fp32, whose type is that of activations."""
    return {
        name: replace(weight, tensors=(weight.plain.float(),)) if len(weight.shape) == 1 else weight
        for name, weight in weights.items()
    }


def wide_caches(made: Blueprint, page_tokens: int) -> CacheSpecs:
    """Caches in fp32, but for pages that the checkpoint wants in FP8."""
    held = {stored.dtype for spec in made.caches.page.values() for stored in spec.format}
    pages = declare_pages(made.model, page_tokens, FP8 if held == {FP8} else "F32")
    return CacheSpecs(pages, declare_rows(made.model, "F32"), made.caches.kv_scales)


def other_experts(one_NLk: torch.Tensor, other_NLk: torch.Tensor) -> float:
    """The share of tokens and layers whose set of experts is another."""
    return float((one_NLk.sort(-1).values != other_NLk.sort(-1).values).any(-1).double().mean())


def run(case: Case, report: Report) -> None:
    """All parts, as far as the time allows."""
    serve, parts = case.serve, case.course.parts()
    fast, plain = select(serve.kernels, case.device, serve.overlap), select("reference", case.device)
    fast_LV, _ = case.served(fast)
    report.done("fast kernels as served, with compiling")
    noted = Noted(fast)
    launched_LV, chosen_NLk = case.served(replace(fast, norm_route=noted), noted)
    other = (fast_LV != launched_LV).any(-1)
    report.found["graphs_differ"] = {"positions": int(other.sum()), "most": float((fast_LV - launched_LV).abs().max())}
    del launched_LV
    report.done(f"the same launched one by one: {report.found['graphs_differ']}")
    before_s, routes = time.monotonic(), report.found.setdefault("experts", {})
    noted = Noted(plain)
    exact_LV = case.whole(replace(plain, norm_route=noted), True)
    exact_NLk = noted.take() if noted.ids else None
    report.compared("exact | fast", parts, exact_LV, fast_LV)
    if exact_NLk is not None and chosen_NLk is not None:
        routes["other than exact: fast"] = other_experts(exact_NLk, chosen_NLk)
    report.done("exact")
    pass_s = time.monotonic() - before_s
    if report.time_for(1.2 * pass_s):
        noted = Noted(plain)
        reference_LV = case.whole(replace(plain, norm_route=noted), False)
        report.compared("exact | reference", parts, exact_LV, reference_LV)
        report.compared("reference | fast", parts, reference_LV, fast_LV)
        if exact_NLk is not None:
            routes["other than exact: reference"] = other_experts(exact_NLk, noted.take())
        del reference_LV
        report.done("reference")
    del exact_LV
    if chosen_NLk is not None and report.time_for(1.2 * pass_s):
        given = Given(chosen_NLk)
        report.compared("exact, routed | fast", parts, case.whole(replace(plain, norm_route=given), True), fast_LV)
        lacking = torch.stack(given.lacking)
        routes["other than exact, routed: fast"] = float((lacking > 0).double().mean())
        routes["largest logit passed over"] = float(lacking.max())
        report.done("exact, routed")
    report.table()
    report.say(f"experts, share of tokens and layers: {json.dumps(routes)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--layers", type=int, default=0, help="the first so many; none: all")
    parser.add_argument("--vocab", type=int, default=0, help="tokens of a smaller vocabulary")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the long prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--steps", type=int, nargs="+", default=[256, 64, 32, 16], help="decode steps of each batch")
    parser.add_argument("--limit-s", type=float, default=100, help="ends after so many seconds, whatever is done")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    for name, value in (("device", "auto"), ("dtype", "bfloat16"), ("kernels", "triton")):
        parser.add_argument(f"--{name}", default=value)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit_s, exit=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    known = {"bf16": GEOMETRY, "fp8": f"{GEOMETRY}-fp8", "nvfp4": f"{GEOMETRY}-nvfp4"}
    given: str = args.model
    folder = Path(known.get(given, given))
    report = Report(args, given if given in known else folder.name)
    with tempfile.TemporaryDirectory() as made_up:
        if not any(folder.glob("*.safetensors")):
            raw = json.loads((folder / "config.json").read_text())
            text = raw.get("text_config", raw)
            text["num_hidden_layers"] = layers = args.layers or text["num_hidden_layers"]
            text["vocab_size"] = args.vocab or text["vocab_size"]
            if "layer_types" in text:
                text["layer_types"] = text["layer_types"][:layers]
            folder = Path(made_up)
            (folder / "config.json").write_text(json.dumps(raw))
        serve = ServeConfig(
            model=str(folder), load_format="dummy" if str(folder) == made_up else "auto", vision="off",
            device=args.device, dtype=args.dtype, kernels=args.kernels, overlap=args.overlap,
        )  # fmt: skip
        case = Case(serve, args)
    report.done(f"weights of {case.made.model.layers} layers on {device_kind(serve)}")
    run(case, report)


if __name__ == "__main__":
    main()
