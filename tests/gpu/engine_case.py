"""One engine over the ranks of a launcher, on GPUs: greedy answers of the miniature, or speed of any geometry.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.engine_case answers --dtype float32 --out FILE
    python -m torch.distributed.run --nproc-per-node 1 -m tests.gpu.engine_case speed --model GEOMETRY --out FILE

`answers` writes the tokens of each text case, `pictures` of each with pictures; `speed` decode and prefill figures of
made-up weights.
"""

import argparse
import faulthandler
import json
import logging
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.hub import resolve
from shardwise.config import ServeConfig, rank_environment
from shardwise.engine.build import Leader, build_rank
from shardwise.engine.messages import Failed, Generate, Picture, SamplingParams
from tests.golden import eval as evaluation
from tests.gpu.alike import alike

Requests = Sequence[tuple[list[int], int]]
PREFILLS = ((1, 1024), (1, 4096), (8, 2048))  # prompts, tokens of each
LENGTHS = (32, 256)  # tokens of the two answers whose difference is decoding


def generate(leader: Leader, requests: Requests, temperature: float = 0.0) -> list[list[int]]:
    """Tokens of each request (prompt, how many at most), stop tokens included."""
    out: list[list[int]] = [[] for _ in requests]
    for n, (prompt, count) in enumerate(requests):
        leader.add(
            Generate(
                str(n),
                prompt,
                SamplingParams(max_tokens=count, temperature=temperature, ignore_eos=leader.rank.made.source is None),
            )
        )
    while leader.has_work():
        for message in leader.step():
            if isinstance(message, Failed):
                raise RuntimeError(message.message)
            stop = [] if message.stop_token is None else [message.stop_token]
            out[int(message.id)] += message.tokens + stop
    leader.engine.check()
    return out


def timed(leader: Leader, requests: Requests, temperature: float = 0.0) -> float:
    """Seconds that `requests` take, all added at once."""
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    generate(leader, requests, temperature)
    torch.cuda.synchronize()
    return time.perf_counter() - begin_s


def speed(
    leader: Leader,
    batches: Sequence[int],
    contexts: Sequence[int] = (),
    prefills: Sequence[tuple[int, int]] = PREFILLS,
    note: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Decode tokens a second by batch, and of one request behind prompts of `contexts` tokens, from the difference of
    two lengths; and the wall time of `prefills`. note: is told what there is after each figure.
    """
    vocab, noise, short, long = leader.rank.made.model.vocab_size, random.Random(0), *LENGTHS

    def prompts(count: int, length: int, new: int) -> Requests:
        return [([noise.randrange(vocab) for _ in range(length)], new) for _ in range(count)]

    figures: dict[str, Any] = {"decode": {}, "prefill_s": {}}
    for batch in batches:
        timed(leader, prompts(batch, 128, 8))
        few, many = (timed(leader, prompts(batch, 128, new)) for new in (short, long))
        figures["decode"][batch] = batch * (long - short) / (many - few)
        note(figures)
    for length in contexts:
        timed(leader, prompts(1, length, 8))
        few, many = (min(timed(leader, prompts(1, length, new)) for _ in range(2)) for new in (short, long))
        figures.setdefault("decode_behind", {})[length] = (long - short) / (many - few)
        note(figures)
    for count, length in prefills:
        times = [timed(leader, prompts(count, length, 1)) for _ in range(3)]
        figures["prefill_s"][f"{count}x{length}"] = min(times)
        note(figures)
    return figures


@dataclass(frozen=True)
class Profile:
    """Decode steps on the GPU. added: by kernel, what it adds to a step in us, and how often it is launched in one.

    Kernels may begin before the one before them has ended, so what one adds is from the last end before it to its own.
    """

    idle: str
    step_us: float
    added: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        lines = [f"{self.idle}; a step takes {self.step_us:.0f} us"]
        for name, (us, times) in sorted(self.added.items(), key=lambda pair: -pair[1][0])[:28]:
            lines.append(f"{us:8.1f} us a step, {us / times:7.2f} of one x {times:6.1f}  {name}")
        return "\n".join(lines)


def profile(leader: Leader, batch: int, steps: int = 12) -> Profile:
    """Of `batch` requests, over their last `steps`."""
    vocab, noise = leader.rank.made.model.vocab_size, random.Random(1)
    requests = [([noise.randrange(vocab) for _ in range(128)], 24) for _ in range(batch)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        generate(leader, requests)
    spans = spans_of(traced)
    ends = [n for n, (_, _, name) in enumerate(spans) if "part_likeliest" in name]
    kept = spans[ends[-steps - 1] + 1 : ends[-1] + 1] if len(ends) > steps else spans
    reached, added, counts = kept[0][0], dict[str, float](), dict[str, int]()
    for _, end, name in kept:
        short = name[:60]
        added[short] = added.get(short, 0.0) + max(0.0, end - reached)
        counts[short] = counts.get(short, 0) + 1
        reached = max(reached, end)
    each = {name: (us / steps, counts[name] / steps) for name, us in added.items()}
    return Profile(idle(spans), (reached - kept[0][0]) / steps, each)


def spans_of(traced: torch.profiler.profile) -> list[tuple[float, float, str]]:
    """Beginning and end in microseconds, and name, of all that the GPU did, in order."""
    on_gpu = [each for each in traced.events() or [] if each.device_type == torch.autograd.DeviceType.CUDA]
    return sorted((each.time_range.start, each.time_range.end, each.name) for each in on_gpu)


def idle(spans: list[tuple[float, float, str]]) -> str:
    """How much of the time of decode steps the GPU does nothing: between steps, and in all.

    What comes after a copy from the host, or before one, is between steps; the first fifth (prefill) is left out.
    """
    spans = spans[len(spans) // 5 :]
    reached, between, within, last = spans[0][1], 0.0, 0.0, spans[0][2]
    for start, end, name in spans[1:]:
        gap = max(0.0, start - reached)
        if "Memcpy" in name or "Memcpy" in last:
            between += gap
        else:
            within += gap
        reached, last = max(reached, end), name
    whole = reached - spans[0][0]
    return f"idle of {whole / 1e3:.2f} ms: {between / whole:.2%} beside copies, {within / whole:.2%} between kernels"


def answers(leader: Leader) -> dict[str, list[int]]:
    """Tokens of each text case of the miniature."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(evaluation.miniature())
    cases = evaluation.load_cases()
    found = generate(leader, [(evaluation.prompt_ids(tokenizer, case), case.max_tokens) for case in cases])
    return {str(case.id): tokens for case, tokens in zip(cases, found, strict=True)}


def picture_answers(leader: Leader) -> dict[str, list[int]]:
    """Tokens of each case with pictures of the miniature."""
    from transformers import AutoTokenizer

    from tests.golden.asked import asked, picture_cases

    cases, found = picture_cases(), dict[str, list[int]]()
    for case, (prompt, sampling, pictures) in zip(
        cases, asked(cases, AutoTokenizer.from_pretrained(evaluation.miniature())), strict=True
    ):
        for fields in pictures:
            leader.add_picture(Picture(str(case.id), *fields))
        sampled = SamplingParams(temperature=0.0, **sampling)
        leader.add(Generate(str(case.id), prompt, sampled, pictures=len(pictures)))
        found[str(case.id)] = []
    while leader.has_work():
        for message in leader.step():
            if isinstance(message, Failed):
                raise RuntimeError(message.message)
            found[message.id] += message.tokens + ([] if message.stop_token is None else [message.stop_token])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["answers", "pictures", "speed"])
    parser.add_argument("--model", default="")
    parser.add_argument("--ratio", default="")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 64, 128])
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="batches whose kernels to time")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="*", default=[], help="prompts to decode one request behind")
    parser.add_argument("--gpu", default="", help="as of serve: 0,0 puts two ranks on one")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--shortlist", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--prefill", action=argparse.BooleanOptionalAction, default=True, help="measure prompts, too")
    parser.add_argument("--step-tokens", type=int, default=0, help="as --max-num-batched-tokens of serve")
    for name in ("dtype", "device", "kernels", "comm"):
        parser.add_argument(f"--{name}", default="auto")
    args = parser.parse_args()
    env = rank_environment()
    assert env is not None, "start it with torch.distributed.run"
    faulthandler.register(signal.SIGUSR1)  # where it is, if it does not end
    begin_s = time.monotonic()
    logging.basicConfig(
        level=logging.INFO if env.rank == 0 else logging.WARNING, format="%(relativeCreated)d %(message)s"
    )
    serve = ServeConfig(
        model=str(resolve(args.model)), ranks=env.world, dtype=args.dtype, device=args.device, kernels=args.kernels,
        overlap=args.overlap, shortlist=args.shortlist, comm=args.comm, max_num_batched_tokens=args.step_tokens,
        ratio=tuple(float(part) for part in args.ratio.split(",") if part),
        load_format="dummy" if args.what == "speed" else "auto", max_model_len=max([7680, *args.contexts]) + 512,
        kv_tokens=200_000, gpu=tuple(part for part in args.gpu.split(",") if part),
    )  # fmt: skip
    with alike() if args.what == "speed" else nullcontext():
        one = build_rank(serve, env)
    ready_s = time.monotonic() - begin_s
    if env.rank:
        one.runner.follow()
        return
    leader = Leader(one, serve)
    result: dict[str, Any] = {"ready_s": ready_s, "args": vars(args) | {"out": str(args.out)}, "ranks": env.world}
    if torch.cuda.is_available():
        result["gpu"] = torch.cuda.get_device_name()
        result["allocated_bytes"] = torch.cuda.memory_allocated()
    begin_s = time.monotonic()

    def note(found: dict[str, Any]) -> None:
        """What there is so far, should the rest not come to its end."""
        result.update(result=found, took_s=time.monotonic() - begin_s)
        args.out.write_text(json.dumps(result))
        logging.info("%s", str(found)[:300])

    note({})
    todo = {"answers": answers, "pictures": picture_answers}
    if args.what in todo:
        note(todo[args.what](leader))
    else:
        note(speed(leader, args.batches, args.contexts, PREFILLS if args.prefill else (), note))
    for batch in args.profile:
        with args.out.with_suffix(".profile.txt").open("a") as file:
            file.write(f"batch {batch}: {profile(leader, batch)}\n")
    leader.stop()


if __name__ == "__main__":
    main()
