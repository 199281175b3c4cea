"""Unequal ranks on two equal GPUs: memory as planned, the gain of balancing, and the error of the cost model.

    OUT=results python -m benchmarks.unequal            # two GPUs; some five minutes, most of them compiling

It starts torch's elastic launcher for each configuration (`python -m benchmarks.unequal one ...` is a rank), writes
$OUT/unequal.json and prints one table last. A slower rank is made by running every operation that reads weights (see
`slowed`) several times over: reading k times the bytes is reading at a k-th of the speed. Both
ranks repeat `base` times, which takes the H200 to the speed of a common card, where bytes count for more than launches.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shardwise.config import ServeConfig, rank_environment
from shardwise.engine import build as building
from shardwise.engine.build import Leader, Rank, build_rank
from shardwise.engine.decide import problem_of
from shardwise.kernels.ops import Ops
from shardwise.parallel import probe
from shardwise.parallel.choice import choose
from shardwise.parallel.cost import Load, collective_seconds, stage_seconds
from shardwise.parallel.devices import Device, Link, Machine
from shardwise.shard import local_bytes
from tests.gpu.engine_case import answers, generate, timed

GEOMETRY = Path(__file__).parent / "geometry" / "qwen3.6-35b-a3b"
PROMPT_TOKENS, SHORT, LONG = 128, 16, 80
LAYERS = 12  # of 40: every stage is there, and loading is quick
BASE = 2  # repeats on every rank of an unequal pair
WEIGHT_KERNELS = 0.5  # of all kernels of a step, those that are repeated
CASE_SECONDS = 120  # of one start
BATCH = 64  # of an unequal pair: nearly all experts are read
EVEN = {"even": (1.0, 1.0), "5:3": (5.0, 3.0), "3:1": (3.0, 1.0)}


@dataclass
class Case:
    """One start of the engine. repeats: how often each rank reads its weights."""

    name: str
    ranks: int = 1
    ratio: tuple[float, ...] = ()
    group_ratios: dict[str, tuple[float, ...]] = field(default_factory=dict)
    batches: tuple[int, ...] = ()
    repeats: tuple[int, ...] = (1, 1)
    layers: int = LAYERS
    answers: bool = False


ALONE = Case("one rank", 1, batches=(1, 4, 16, 64, 128))


def repeated(op: Callable[..., torch.Tensor], times: int) -> Callable[..., torch.Tensor]:
    """`op` run `times` times over; the result is the last one's."""

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        for _ in range(times - 1):
            op(*args, **kwargs)
        return op(*args, **kwargs)

    return run


def slowed(ops: Ops, times: int) -> Ops:
    """A table whose weight-reading operations run `times` times; states move on too often, so only speed counts."""
    names = ("linear", "linears", "norm_linears", "norm_route", "moe", "moe_shared")
    return replace(ops, **{name: repeated(getattr(ops, name), times) for name in names}) if times > 1 else ops


def geometry(folder: Path, layers: int) -> Path:
    """A copy of the 35B-A3B geometry with the first `layers` layers."""
    raw = json.loads((GEOMETRY / "config.json").read_text())
    raw["text_config"]["num_hidden_layers"] = layers
    path = folder / f"layers{layers}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    return path


def serve_config(case: Case, folder: Path) -> ServeConfig:
    if case.answers:
        return ServeConfig(model=str(miniature()), ranks=case.ranks, ratio=case.ratio, dtype="float32", kv_tokens=65536)
    return ServeConfig(
        model=str(geometry(folder, case.layers)), load_format="dummy", ranks=case.ranks, ratio=case.ratio,
        group_ratios=case.group_ratios, max_model_len=1024, kv_tokens=128 * 256,
        max_num_seqs=max(case.batches, default=1),
    )  # fmt: skip


def miniature() -> Path:
    from tests.golden import eval as evaluation

    return evaluation.miniature()


def decode_s(leader: Leader, batch: int) -> float:
    """Seconds of one decode step of `batch` requests, from the difference of two lengths; the best of two."""
    prompts = [[(37 * n + 11 * i) % 1000 + 100 for i in range(PROMPT_TOKENS)] for n in range(batch)]
    # Sampled, since greedy tokens of made-up weights soon repeat, and experts would be chosen far from evenly.
    timed(leader, [(prompt, 4) for prompt in prompts], temperature=1.0)
    short, long = (
        min(timed(leader, [(prompt, new) for prompt in prompts], temperature=1.0) for _ in range(2))
        for new in (SHORT, LONG)
    )
    return (long - short) / (LONG - SHORT)


def planned_bytes(one: Rank) -> int:
    """Bytes of weights and caches that the plan gives this rank."""
    made, limits, rank = one.made, one.budget, one.ctx.rank
    weights = sum(local_bytes(spec, made.partitions, rank) for spec in made.specs.values())
    caches = limits.pages * made.caches.page_bytes(made.partitions, rank)
    caches += (limits.rows + limits.snapshot_rows) * made.caches.row_bytes(made.partitions, rank)
    return weights + caches


def rank_main(case: Case, folder: Path, out: Path) -> None:
    """One rank of a case; the first writes what was measured."""
    env = rank_environment()
    assert env is not None
    serve, select = serve_config(case, folder), building.select
    building.select = lambda *options: slowed(select(*options), case.repeats[env.rank])
    torch.cuda.set_device(env.local_rank)
    begin_s = time.monotonic()
    # Before graphs take their pool: what is allocated is weights and caches.
    capture, allocated = building.Runner.capture, list[int]()

    def noted(runner: Any) -> None:
        allocated.append(torch.cuda.memory_allocated())
        capture(runner)

    building.Runner.capture = noted
    one = build_rank(serve, env)
    facts = {"planned": planned_bytes(one), "allocated": (*allocated, torch.cuda.memory_allocated())[0]}
    (out.parent / f"{out.stem}.rank{env.rank}.json").write_text(json.dumps(facts))
    if env.rank:
        one.runner.follow()
        return
    leader = Leader(one, serve)
    result: dict[str, Any] = {"ready_s": time.monotonic() - begin_s, "steps_s": {}}
    if case.answers:
        result["tokens"] = answers(leader)
    elif not case.batches:
        result["tokens"] = generate(leader, [([5 + i for i in range(20)], 24)] * 2)
    for batch in case.batches:
        result["steps_s"][batch] = decode_s(leader, batch)
    leader.stop()
    out.write_text(json.dumps(result))


def start(case: Case, folder: Path) -> dict[str, Any]:
    """Run `case` in processes of its own; what it measured, or why it failed."""
    out = folder / f"{case.name.replace(':', '-').replace(' ', '_')}.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(case.ranks)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "benchmarks.unequal", "one"]
    command = [*launcher, "--case", json.dumps(asdict(case)), "--folder", str(folder), "--out", str(out)]
    begin_s = time.monotonic()
    # Two starts at once on the same GPUs would wait for each other's peers: one after the other, and none left behind.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as launched:
        try:
            said, _ = launched.communicate(timeout=CASE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(launched.pid, signal.SIGKILL)
            said = f"not done in {CASE_SECONDS} s"
    result = json.loads(out.read_text()) if out.exists() else {"error": said[-2000:]}
    ranks = [out.parent / f"{out.stem}.rank{rank}.json" for rank in range(case.ranks)]
    result["held"] = [json.loads(file.read_text()) for file in ranks if file.exists()]
    print(f"{case.name}: {time.monotonic() - begin_s:.0f} s {result.get('error', '')}", flush=True)
    return result | {"case": asdict(case)}


def emulated(machine: Machine, repeats: Sequence[int]) -> Machine:
    """`machine` with ranks that run weight-reading kernels so many times, as devices."""
    devices = [
        replace(
            device,
            read_bytes_per_s=device.read_bytes_per_s / times,
            flops_per_s=device.flops_per_s / times,
            kernel_s=device.kernel_s * (1 + WEIGHT_KERNELS * (times - 1)),
        )
        for device, times in zip(machine.devices, repeats, strict=False)
    ]
    return replace(machine, devices=tuple(devices))


def predicted_s(case: Case, batch: int, machine: Machine, folder: Path) -> float:
    """The cost model's step of `case`. Only weights are read several times: caches go at the device's own speed."""
    serve = serve_config(case, folder)
    made, load = building.blueprint(serve, "cuda"), Load(batch, PROMPT_TOKENS + (SHORT + LONG) // 2)
    anatomy, used = problem_of(serve, made).anatomy, machine.only(range(case.ranks))
    slow, total_s = emulated(used, case.repeats), 0.0
    for n, stage in enumerate(anatomy.stages):
        times = list[float]()
        for rank in range(case.ranks):
            held = anatomy.held(n, made.partitions, rank)
            weights_s, _ = stage_seconds(stage, held._replace(page_bytes=0, row_bytes=0), slow.devices[rank], load)
            cached = held.page_bytes / stage.page_tokens * load.context_tokens + 2 * held.row_bytes
            times.append(weights_s + cached * batch / used.devices[rank].read_bytes_per_s)
        total_s += stage.count * (max(times) + collective_seconds(stage, case.ranks, used.link, batch))
    return total_s


def balanced(repeats: tuple[int, int], machine: Machine, folder: Path) -> dict[str, tuple[float, ...]]:
    """The ratios that the search chooses for an emulated pair."""
    serve = serve_config(Case("", 2), folder)
    made = building.blueprint(serve, "cuda")
    problem = problem_of(replace_objective(serve), made, BATCH)
    problem = replace(problem, load=Load(BATCH, PROMPT_TOKENS + (SHORT + LONG) // 2))
    return choose(problem, emulated(machine, repeats), all_of_them=True).best.ratios()


def replace_objective(serve: ServeConfig) -> ServeConfig:
    import msgspec

    return msgspec.structs.replace(serve, objective="speed")


def adjusted(machine: Machine, kernel_us: float, share: float) -> Machine:
    """`machine` with this fixed cost of a kernel, and so much of its bandwidth."""
    devices = (
        replace(d, kernel_s=kernel_us * 1e-6, read_bytes_per_s=d.read_bytes_per_s * share) for d in machine.devices
    )
    return replace(machine, devices=tuple(devices))


def calibrated(machine: Machine, found: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """The fixed cost of a kernel and the share of the bandwidth with which the model fits the first case best."""
    case, steps = Case(**found["case"]), found.get("steps_s", {})
    best = (float("inf"), 0.0, 0.0)
    for kernel_us in (x / 4 for x in range(4, 20)):
        for share in (x / 20 for x in range(8, 21)):
            tried = adjusted(machine, kernel_us, share)
            errors = [abs(predicted_s(case, int(b), tried, folder) / s - 1) for b, s in steps.items()]
            best = min(best, (median(errors), kernel_us, share)) if errors else best
    return {"median_error": best[0], "kernel_us": best[1], "share_of_bandwidth": best[2]}


def cases(machine: Machine, folder: Path) -> list[Case]:
    """All starts: calibration and prediction, memory and tokens by ratio, and the unequal pairs."""
    found = [ALONE]
    found += [Case(f"two {name}", 2, ratio, batches=(1, 16, 64)) for name, ratio in EVEN.items()]
    found += [Case(f"answers {name}", 2, ratio, answers=True) for name, ratio in EVEN.items()]
    for times in (2, 4):
        repeats = (BASE, BASE * times)
        found.append(Case(f"slow x{times} even", 2, (1.0, 1.0), batches=(BATCH,), repeats=repeats))
        ratios = balanced(repeats, machine, folder)
        found.append(Case(f"slow x{times} balanced", 2, group_ratios=ratios, batches=(BATCH,), repeats=repeats))
    return found


def table(results: Mapping[str, dict[str, Any]], machine: Machine, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Lines to print, and the verdicts behind them."""
    lines, errors, verdicts = (
        ["configuration          batch  step ms  predicted  error"],
        list[float](),
        dict[str, Any](),
    )
    for name, found in results.items():
        for batch, step_s in found.get("steps_s", {}).items():
            guess = predicted_s(Case(**found["case"]), int(batch), machine, folder)
            if name != ALONE.name:  # the model was fitted to that one
                errors.append(abs(guess / step_s - 1))
            lines.append(f"{name:22} {batch:>5} {1e3 * step_s:8.3f} {1e3 * guess:10.3f} {guess / step_s - 1:+6.1%}")
    verdicts["configurations"], verdicts["median_error"] = len(errors), median(errors) if errors else None
    lines.append(f"cost model: {len(errors)} configurations, median error {median(errors or [9]):.1%} (<= 15 % asked)")
    for times, asked in ((2, 1.3), (4, 1.6)):
        even, best = (results.get(f"slow x{times} {kind}", {}) for kind in ("even", "balanced"))
        if even.get("steps_s") and best.get("steps_s"):
            (a,), (b,) = even["steps_s"].values(), best["steps_s"].values()
            guess = predicted_s(Case(**best["case"]), BATCH, machine, folder)
            verdicts[f"gain_x{times}"] = a / b
            lines.append(
                f"one rank {times} x slower: balanced does {a / b:.2f} x the even split's speed (>= {asked} asked), "
                f"predicted {guess / b - 1:+.1%} off (10 % asked)"
            )
    worst = max(
        (
            abs(one["allocated"] / one["planned"] - 1)
            for found in results.values()
            for one in found["held"]
            if not found["case"]["answers"]  # the miniature is smaller than a library's workspace
        ),
        default=9.0,
    )
    tokens = [found.get("tokens") for name, found in results.items() if name.startswith("answers")]
    verdicts["memory_error"] = worst
    verdicts["tokens_equal"] = any(tokens) and all(each == tokens[0] for each in tokens)
    lines.append(f"memory of a rank against the plan: {worst:.2%} off at most (2 % asked)")
    if tokens:
        lines.append(f"tokens of even, 5:3 and 3:1 are {'equal' if verdicts['tokens_equal'] else 'DIFFERENT'}")
    return lines, verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="all", choices=["all", "one"])
    parser.add_argument("--case", default="")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-answers", action="store_true", help="leave out the starts that compare tokens")
    parser.add_argument("--pretend", action="store_true", help="made-up devices and no starts: to try the script")
    args = parser.parse_args()
    if args.what == "one":
        return rank_main(Case(**json.loads(args.case)), args.folder, args.out)
    folder = Path(os.environ.get("OUT", "results"))
    folder.mkdir(parents=True, exist_ok=True)
    if args.pretend:
        machine = Machine((Device("H200", 140 << 30, 4.3e12, 7e14),) * 2, Link(13e-6, 2e11))
        machine = replace(machine, devices=tuple(replace(d, index=n) for n, d in enumerate(machine.devices)))
    else:
        machine = probe.measured(probe.ask().devices[:2])
    print("probe", asdict(machine), flush=True)
    results = dict[str, dict[str, Any]]()
    fit: dict[str, float] = {}
    if not args.pretend:
        results[ALONE.name] = start(ALONE, folder)
        fit = calibrated(machine, results[ALONE.name], folder)
        machine = adjusted(machine, fit["kernel_us"], fit["share_of_bandwidth"])
        print("fitted to one rank", fit, flush=True)
    for case in cases(machine, folder):
        if (case.answers and args.no_answers) or case.name in results:
            continue
        if args.pretend:
            steps = {batch: predicted_s(case, batch, machine, folder) for batch in case.batches}
            results[case.name] = {"case": asdict(case), "steps_s": steps, "held": [], "tokens": {"0": [1]}}
        else:
            results[case.name] = start(case, folder)
    lines, verdicts = table(results, machine, folder)
    verdicts["fit"] = fit
    text = json.dumps({"machine": asdict(machine), "verdicts": verdicts, "results": results}, indent=1)
    (folder / "unequal.json").write_text(text)
    print("\n".join(lines))
    return None


if __name__ == "__main__":
    main()
