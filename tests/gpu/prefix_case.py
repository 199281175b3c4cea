"""The prefix cache on a GPU: hits answer as misses, and what they save.

    python -m torch.distributed.run --nproc-per-node 1 -m tests.gpu.prefix_case answers --dtype float32 --out FILE
    python -m torch.distributed.run --nproc-per-node 1 -m tests.gpu.prefix_case speed --model GEOMETRY --out FILE

`answers`: the miniature's text cases, and longer prompts that begin with them, with the cache and without; how many
differ, and how many of those not at a near-tie. `speed`: time to the first token of long prompts of made-up weights,
missing and hitting. FILE has what was found so far after every part; after --seconds the process ends, come what may.
"""

import argparse
import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.config import ServeConfig, rank_environment
from shardwise.engine.build import Leader, build_rank
from tests.golden import eval as evaluation
from tests.parallel.prefix_ranks import NEAR_TIE, Asked, Reply, run_wave

Note = Callable[..., None]


def chats(count: int) -> list[list[Asked]]:
    """Waves: beginnings, and two continuations of each with the words of other cases."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(evaluation.miniature())
    words = [evaluation.prompt_ids(tokenizer, case) for case in evaluation.load_cases(limit=count)]
    waves = list[list[Asked]]()
    for turn in range(3):
        parts = [[words[(i + 7 * t) % count] for t in range(turn + 1)] for i in range(count)]
        prompts = [[token for part in each for token in part] for each in parts]
        waves.append([(prompt, {"max_tokens": 24, "logprobs": 2, "ignore_eos": True}) for prompt in prompts])
    return waves


def answers(leader: Leader, cases: int, note: Note) -> None:
    """Replies with the cache, then without it."""
    waves = chats(cases)
    found = [run_wave(leader, wave, arrive_every=1) for wave in waves]
    stats = leader.stats()
    hits = sum(reply.cached_tokens > 0 for wave in found for reply in wave)
    note(hits=hits, cached_tokens=stats.cached_tokens, host_cached_tokens=stats.host_cached_tokens)
    cache = leader.engine.scheduler.reuse.cache
    for snapshot in list(cache.snapshots):
        cache.remove(snapshot)
    cache.rows, cache._free_rows = 0, []  # nothing is kept from now on
    leader.engine.scheduler.reuse.host = None
    missing = [run_wave(leader, wave) for wave in waves]
    pairs: list[tuple[Reply, Reply]] = []
    # A logit of 16 and more has 0.125 between one bf16 and the next.
    near_tie = 0.3 if leader.rank.ctx.dtype == torch.bfloat16 else NEAR_TIE
    for hits, misses in zip(found, missing, strict=True):
        pairs += zip(hits, misses, strict=True)
    note(
        requests=len(pairs),
        misses_in_the_second_run=sum(miss.cached_tokens for _, miss in pairs),
        equal=sum(hit.tokens == miss.tokens for hit, miss in pairs),
        differ_without_near_tie=sum(not hit.agrees(miss, near_tie) for hit, miss in pairs),
    )


def first_token_s(leader: Leader, prompts: Sequence[list[int]]) -> tuple[float, int]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin_s = time.perf_counter()
    replies = run_wave(leader, [(prompt, {"max_tokens": 1, "ignore_eos": True}) for prompt in prompts])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin_s, sum(reply.cached_tokens for reply in replies)


def speed(leader: Leader, lengths: Sequence[int], note: Note) -> None:
    vocab, noise = leader.rank.made.model.vocab_size, random.Random(0)

    def words(count: int) -> list[int]:
        return [noise.randrange(1000, vocab // 2) for _ in range(count)]

    first_token_s(leader, [words(lengths[0])])
    for length in lengths:
        shared = words(length)
        miss_s, none = first_token_s(leader, [shared + words(8)])
        first_token_s(leader, [shared + words(8)])  # finds where the two part, and keeps that
        hit_s, cached = min(first_token_s(leader, [shared + words(8)]) for _ in range(3))
        many_s, cached_many = first_token_s(leader, [shared + words(8) for _ in range(16)])
        figures = {"miss_s": miss_s, "hit_s": hit_s, "hits_of_16_s": many_s, "cached": [none, cached, cached_many]}
        if leader.engine.scheduler.reuse.host is not None:
            cache = leader.engine.scheduler.reuse.cache
            for snapshot in list(cache.snapshots):
                cache._evict(snapshot)
            figures["to_host_s"], _ = first_token_s(leader, [words(8)])
            figures["host_hit_s"], found = first_token_s(leader, [shared + words(8)])
            figures["cached"].append(found)
        note(**{f"{length}": figures})


def notes(out: Path, seconds: float) -> Note:
    """What adds to the figures of `out`, and ends the process after `seconds`."""
    begin_s, figures = time.perf_counter(), dict[str, Any]()

    def note(**found: Any) -> None:
        figures.update(found, after_s=round(time.perf_counter() - begin_s, 1))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(figures, indent=2) + "\n")
        print(json.dumps(found), flush=True)

    def end() -> None:
        note(ended_after_seconds=seconds)
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return note


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("answers", "speed"))
    parser.add_argument("--model", default=str(evaluation.miniature()))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--host-cache-gib", type=float, default=0)
    parser.add_argument("--snapshot-rows", type=int, default=0)
    parser.add_argument("--cases", type=int, default=48, help="of `answers`")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 8000, 30000], help="of `speed`, in tokens")
    parser.add_argument("--seconds", type=float, default=55.0, help="the process ends after these")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    environment = rank_environment()
    assert environment is not None
    note = notes(options.out, options.seconds) if environment.rank == 0 else None
    made_up: Mapping[str, Any] = {"load_format": "dummy", "graphs": False}  # no step of `speed` is a graph's
    special = made_up if options.what == "speed" else {"max_model_len": 1024}
    config = ServeConfig(
        model=options.model,
        ranks=environment.world,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        host_cache_gib=options.host_cache_gib,
        snapshot_rows=options.snapshot_rows,
        **special,
    )
    rank = build_rank(config, environment)
    if note is None:
        rank.runner.follow()
        return
    leader = Leader(rank, config)
    note(ready=True, device=str(rank.ctx.device), dtype=rank.made.dtype, snapshot_rows=rank.budget.snapshot_rows)
    if options.what == "answers":
        answers(leader, options.cases, note)
    else:
        speed(leader, options.lengths, note)
    leader.stop()
    print(options.out.read_text())


if __name__ == "__main__":
    main()
