"""Unequal ranks on two equal GPUs: memory as planned, the gain of balancing, and the error of the cost model.

    OUT=results python -m benchmarks.unequal            # two GPUs, some two minutes

A slower rank is made by running every operation that reads weights, states or keys several times over, each time with
those of another layer, so that k times the bytes come from memory and not from a cache: a card of a k-th of the speed.
Both ranks repeat `BASE` times, which takes the H200 to the speed of a common card, where bytes count for more than the
link. A repeated kernel takes its launch and its waits k times, too, which a slower card does not: least where kernels
are large, so that the pairs are made of the dense 27B, and of 35B-A3B beside it. The split is what the search chooses
for two such cards, from the probe's figures and nothing else.

First every rank of every case compiles its kernels, all at once, each in a process without peers; then one group of two
runs the cases in turn. It writes $OUT/unequal.json after each case, and prints one table last.
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from benchmarks.slower import Pretended, Slower
from shardwise.config import RankEnvironment, ServeConfig, launcher_environment, rank_environment
from shardwise.engine import build as building
from shardwise.engine import graphs
from shardwise.engine.build import Leader, Rank, build_rank
from shardwise.engine.decide import problem_of
from shardwise.engine.processes import die_with_parent
from shardwise.parallel import probe
from shardwise.parallel.choice import choose
from shardwise.parallel.comm import Communicator
from shardwise.parallel.connect import connect
from shardwise.parallel.cost import Forecast, Load
from shardwise.parallel.devices import Device, Link, Machine
from shardwise.shard import local_bytes
from tests.gpu.engine_case import timed

GEOMETRY = Path(__file__).parent / "geometry"
DENSE, EXPERTS = "qwen3.5-27b", "qwen3.6-35b-a3b"
PROMPT_TOKENS, SHORT, LONG = 128, 16, 64
LAYERS, COMPILE_LAYERS = 8, 4  # of 40: every stage is there, and loading is quick
BASE = 2  # repeats on every rank of an unequal pair
# What kernels of a step take beside their bytes, for each repeat, times the probe's smallest kernel: seven in ten are
# repeated, and these wait for more. Fitted to one pair, 27B and k = 4 (10.68 and 5.12 ms); the others tell what it is
# worth: with it the next build's pairs of 27B are 2.5 % off (k = 2) and 2.2 % (k = 4).
REPEATED_KERNELS = 1.35
COMPILE_SECONDS, GROUP_SECONDS = 75, 150
BATCHES = {DENSE: 8, EXPERTS: 64}  # of an unequal pair; 64 read nearly all experts
EVEN = {"even": (1.0, 1.0), "5:3": (5.0, 3.0), "3:1": (3.0, 1.0)}


@dataclass
class Case:
    """One start of the engine. repeats: how often each rank reads its weights."""

    name: str
    ratio: tuple[float, ...] = ()
    group_ratios: dict[str, tuple[float, ...]] = field(default_factory=dict)
    model: str = EXPERTS
    batches: tuple[int, ...] = (64,)
    repeats: tuple[int, ...] = (1, 1)


def geometry(folder: Path, layers: int, model: str = EXPERTS) -> Path:
    """A copy of the model's geometry with the first `layers` layers."""
    path = folder / f"{model}-layers{layers}"
    if not (path / "config.json").exists():  # ranks find it there
        raw = json.loads((GEOMETRY / model / "config.json").read_text())
        raw["text_config"]["num_hidden_layers"] = layers
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(raw))
    return path


def serve_config(case: Case, folder: Path, layers: int = LAYERS) -> ServeConfig:
    return ServeConfig(
        model=str(geometry(folder, layers, case.model)), load_format="dummy", ranks=2, ratio=case.ratio,
        group_ratios=case.group_ratios, max_model_len=1024, kv_tokens=128 * 256, max_num_seqs=max(case.batches),
    )  # fmt: skip


def prompts(batch: int) -> list[list[int]]:
    return [[(37 * n + 11 * i) % 1000 + 100 for i in range(PROMPT_TOKENS)] for n in range(batch)]


def decode_s(leader: Leader, batch: int) -> float:
    """Seconds of one decode step of `batch` requests, from the difference of two lengths; the best of two."""
    # Sampled, since greedy tokens of made-up weights soon repeat, and experts would be chosen far from evenly.
    timed(leader, [(prompt, 4) for prompt in prompts(batch)], temperature=1.0)
    short, long = (
        min(timed(leader, [(prompt, new) for prompt in prompts(batch)], temperature=1.0) for _ in range(2))
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


def built(case: Case, serve: ServeConfig, env: RankEnvironment, comm: Communicator) -> tuple[Rank, dict[str, int]]:
    """The rank, slowed as the case says, and what it holds against the plan before graphs take their pool."""
    select, capture, allocated = building.select, building.Runner.capture, list[int]()
    before, slower = torch.cuda.memory_allocated(), Slower(case.repeats[env.rank])

    def noted(self: Any, step_tokens: int = 0) -> None:
        slower.forget()
        allocated.append(torch.cuda.memory_allocated() - before)
        capture(self, step_tokens)

    building.select = lambda *options: slower.table(select(*options))
    building.Runner.capture, graphs.SIZES = noted, case.batches
    try:
        one = build_rank(serve, env, comm)
    finally:
        building.select, building.Runner.capture = select, capture
    return one, {"planned": planned_bytes(one), "allocated": (*allocated, 0)[0]}


def compile_main(case: Case, rank: int, folder: Path) -> None:
    """Launch all that `rank` of `case` launches, once, without its peer."""
    torch.cuda.set_device(rank)
    serve, env = serve_config(case, folder, COMPILE_LAYERS), RankEnvironment(rank, 2, rank, 2, 0)
    one, _ = built(replace(case, repeats=(1, 1)), serve, env, Pretended(rank, 2))
    leader = Leader(one, serve)
    for batch in case.batches:
        timed(leader, [(prompt, 3) for prompt in prompts(batch)], temperature=1.0)


def group_main(cases: list[Case], folder: Path) -> None:
    """One rank of all cases in turn; each rank writes what it measured after each."""
    env = rank_environment()
    assert env is not None
    torch.cuda.set_device(env.local_rank)
    comm = connect(torch.device("cuda", env.local_rank), "auto", env.local_world)
    for number, case in enumerate(cases):
        begin_s, serve = time.monotonic(), serve_config(case, folder)
        one, facts = built(case, serve, env, comm)
        found: dict[str, Any] = {"held": facts, "ready_s": time.monotonic() - begin_s}
        leader = Leader(one, serve) if not env.rank else None
        if leader is None:
            one.runner.follow()
        else:
            found["steps_s"] = {batch: decode_s(leader, batch) for batch in case.batches}
            leader.stop()
        found["took_s"] = time.monotonic() - begin_s
        (folder / f"case{number}.rank{env.rank}.json").write_text(json.dumps(found))
        del one, leader
        gc.collect()
        torch.cuda.empty_cache()


def waited(name: str, processes: Sequence[subprocess.Popen[str]], seconds: float) -> None:
    """Until all have ended, or were killed after `seconds`; what those that failed said last is printed."""
    end_s = time.monotonic() + seconds
    for process in processes:
        try:
            said, _ = process.communicate(timeout=max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)  # its ranks die with it
            said = f"not done in {seconds:.0f} s"
            process.wait()
        if process.returncode:
            print(f"{name} failed: {said[said.find('Traceback') :][:2500]}", flush=True)


def spawn(*arguments: str, launcher: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, *launcher, "-m", "benchmarks.unequal", *arguments]
    own = {**launcher_environment(2), **environment}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=own,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


def run(chosen: list[Case], folder: Path) -> dict[str, dict[str, Any]]:
    """Compile, then measure; by the case's name what both ranks found."""
    begin_s, shapes = time.monotonic(), dict[str, Case]()
    for case in chosen:  # those of one split have the same shapes
        geometry(folder, COMPILE_LAYERS, case.model)
        key = repr((case.model, case.ratio, case.group_ratios))
        other = shapes.setdefault(key, case)
        shapes[key] = replace(case, batches=tuple(sorted({*case.batches, *other.batches})))
    jobs = [spawn("compile", "--cases", json.dumps([asdict(case)]), "--rank", str(rank), "--folder", str(folder),
                  OMP_NUM_THREADS="2") for case in shapes.values()
        for rank in range(2)]  # fmt: skip
    waited("compiling", jobs, COMPILE_SECONDS)
    print(f"compiled for {len(jobs)} ranks in {time.monotonic() - begin_s:.0f} s", flush=True)
    begin_s = time.monotonic()
    for old in folder.glob("case*.rank*.json"):
        old.unlink()
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", "localhost:0"]  # fmt: skip
    given = json.dumps([asdict(case) for case in chosen])
    waited("the group", [spawn("group", "--cases", given, "--folder", str(folder), launcher=launcher)], GROUP_SECONDS)
    print(f"measured in {time.monotonic() - begin_s:.0f} s", flush=True)
    results = dict[str, dict[str, Any]]()
    for number, case in enumerate(chosen):
        files = [folder / f"case{number}.rank{rank}.json" for rank in range(2)]
        ranks = [json.loads(file.read_text()) for file in files if file.exists()]
        results[case.name] = {"case": asdict(case), "ranks": ranks, "held": [each["held"] for each in ranks]}
        results[case.name] |= {"steps_s": ranks[0]["steps_s"]} if ranks and "steps_s" in ranks[0] else {}
    return results


def emulated(machine: Machine, repeats: Sequence[int]) -> Machine:
    """`machine` with ranks that run what they run so many times, as devices."""
    devices = [
        replace(
            device,
            read_bytes_per_s=device.read_bytes_per_s / times,
            flops_per_s=device.flops_per_s / times,
            kernel_s=device.kernel_s * (1 + REPEATED_KERNELS * (times - 1)),
        )
        for device, times in zip(machine.devices, repeats, strict=True)
    ]
    return replace(machine, devices=tuple(devices))


def predicted(case: Case, batch: int, machine: Machine, folder: Path) -> Forecast:
    """The cost model's step of `case`."""
    serve = serve_config(case, folder)
    made, load = building.blueprint(serve, "cuda"), Load(batch, PROMPT_TOKENS + (SHORT + LONG) // 2)
    return problem_of(serve, made).anatomy.forecast(made.partitions, emulated(machine, case.repeats), load)


def balanced(even: Case, machine: Machine, folder: Path) -> dict[str, tuple[float, ...]]:
    """The ratios that the search chooses for the emulated pair of `even`."""
    serve = msgspec.structs.replace(serve_config(even, folder), objective="speed", ratio=())
    problem = problem_of(serve, building.blueprint(serve, "cuda"), even.batches[0])
    problem = replace(problem, load=Load(even.batches[0], PROMPT_TOKENS + (SHORT + LONG) // 2))
    return choose(problem, emulated(machine, even.repeats), all_of_them=True).best.ratios()


def all_cases(machine: Machine, folder: Path) -> list[Case]:
    """All starts: the unequal pairs first, then memory and prediction by ratio."""
    found = list[Case]()
    for model, batch in BATCHES.items():
        for times in (2, 4):
            name, repeats = f"{model} slow x{times}", (BASE, BASE * times)
            even = Case(f"{name} even", (1.0, 1.0), model=model, batches=(batch,), repeats=repeats)
            ratios = balanced(even, machine, folder)
            found += [even, replace(even, name=f"{name} balanced", ratio=(), group_ratios=ratios)]
    return found + [Case(f"two {name}", ratio) for name, ratio in EVEN.items()]


def table(results: Mapping[str, dict[str, Any]], machine: Machine, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Lines to print, and the verdicts behind them."""
    lines, errors = [f"{'configuration':36} batch  step ms  predicted  error   of which ranks are busy"], list[float]()
    verdicts, guesses = dict[str, Any](), dict[str, float]()
    for name, found in results.items():
        for batch, step_s in found.get("steps_s", {}).items():
            guess = predicted(Case(**found["case"]), int(batch), machine, folder)
            guesses[name] = guess.step_s
            errors.append(abs(guess.step_s / step_s - 1))
            lines.append(
                f"{name:36} {batch:>5} {1e3 * step_s:8.3f} {1e3 * guess.step_s:10.3f} {guess.step_s / step_s - 1:+6.1%}"
                f"   {', '.join(f'{1e3 * s:.2f}' for s in guess.busy_s)}"
            )
    verdicts["configurations"], verdicts["median_error"] = len(errors), median(errors) if errors else None
    lines.append(f"cost model: {len(errors)} configurations, median error {median(errors or [9]):.1%} (<= 15 % asked)")
    for model, (times, asked) in product(BATCHES, ((2, 1.3), (4, 1.6))):
        pair = f"{model} slow x{times}"
        even, best = (results.get(f"{pair} {kind}", {}) for kind in ("even", "balanced"))
        if even.get("steps_s") and best.get("steps_s"):
            (a,), (b,) = even["steps_s"].values(), best["steps_s"].values()
            hoped = guesses[f"{pair} even"] / guesses[f"{pair} balanced"]
            verdicts[f"{pair} gain"], verdicts[f"{pair} predicted"] = a / b, hoped
            lines.append(
                f"{model}, one rank {times} x slower: balanced does {a / b:.2f} x the even split's speed (>= {asked} "
                f"asked), predicted {hoped:.2f}, {hoped / (a / b) - 1:+.1%} off; its step is predicted "
                f"{guesses[f'{pair} balanced'] / b - 1:+.1%} off (10 % asked)"
            )
            lines.append("   " + "; ".join(f"{k} {':'.join(f'{n:g}' for n in each)}"
                         for k, each in best["case"]["group_ratios"].items()))  # fmt: skip
    held = [one for found in results.values() for one in found["held"]]
    verdicts["memory_error"] = max((abs(one["allocated"] / one["planned"] - 1) for one in held), default=9.0)
    lines.append(f"memory of a rank against the plan: {verdicts['memory_error']:.2%} off at most (2 % asked)")
    return lines, verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=["all", "compile", "group"])
    parser.add_argument("--cases", default="")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--pretend", action="store_true", help="made-up devices and no starts: to try the script")
    args = parser.parse_args()
    if args.what != "all":
        die_with_parent(os.getppid())
        cases = [msgspec.convert(each, Case) for each in json.loads(args.cases)]
        if args.what == "compile":
            return compile_main(cases[0], args.rank, args.folder)
        return group_main(cases, args.folder)
    folder = Path(os.environ.get("OUT", "results"))
    folder.mkdir(parents=True, exist_ok=True)
    if args.pretend:
        machine = Machine((Device("H200", 140 << 30, 3.8e12, 8.4e14),) * 2, Link(17.8e-6, 2.84e11))
        machine = replace(machine, devices=tuple(replace(d, index=n) for n, d in enumerate(machine.devices)))
    else:
        machine = probe.measured(probe.ask().devices[:2]).over_peers()  # as `comm` below chooses
    print("probe", asdict(machine), flush=True)
    chosen = [case for case in all_cases(machine, folder) if args.only in case.name]
    if args.pretend:
        results = {
            case.name: {
                "case": asdict(case), "held": [], "ranks": [],
                "steps_s": {batch: predicted(case, batch, machine, folder).step_s for batch in case.batches},
            }
            for case in chosen
        }  # fmt: skip
    else:
        results = run(chosen, folder)
    lines, verdicts = table(results, machine, folder)
    text = json.dumps({"machine": asdict(machine), "verdicts": verdicts, "results": results}, indent=1)
    (folder / "unequal.json").write_text(text)
    print("\n".join(lines))
    return None


if __name__ == "__main__":
    main()
