"""Experts in host memory, on GPUs: speed with the memory of a smaller card, or the miniature's answers.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.experts_case speed --model GEOMETRY --out FILE
    python -m torch.distributed.run --nproc-per-node 1 -m tests.gpu.experts_case answers --out FILE

`speed` serves made-up weights with `--card-gib` of each GPU: ready time, decode of 1 and 4 requests from the difference
of two lengths, the share of experts that were found in slots, bytes copied for a token and rank, host memory, and what
copies reach by kernels and by the copy engine. Further sizes of cards follow in the same process, with the slots that
they would hold. Every rank writes what it holds and copied, FILE.rankN.json. Tokens are sampled at temperature 1, since
made-up models repeat themselves otherwise, and then want the same experts again. `answers` compares all text cases in
fp32 with a quarter of the experts in slots, and hybrid, to those with all of them there, and to transformers'. `modes`
compares copies alone, in graphs and without, with hybrid. The process ends itself after `--limit-s`.
"""

import argparse
import faulthandler
import gc
import json
import logging
import os
import resource
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

from shardwise.cache.budget import floor_bytes
from shardwise.checkpoint import synth
from shardwise.checkpoint.hub import resolve
from shardwise.checkpoint.index import Source
from shardwise.config import RankEnvironment, ServeConfig, rank_environment
from shardwise.engine.build import Leader, Rank, build_rank
from shardwise.engine.messages import Failed, Generate, ResizeCache, SamplingParams
from shardwise.engine.processes import die_with_parent
from shardwise.experts.bank import Banks, LayerBank, Pairs, banks_of, expert_bytes, layout
from shardwise.experts.memory import pin, take
from shardwise.experts.offload import Counts, Offload
from shardwise.shard import ParamSpec, Partitions
from tests.golden import eval as evaluation
from tests.gpu import engine_case

SHORT, MOST_NEW, PROMPT = 24, 256, 128
USED, GIB = 0.95, 1 << 30  # of a card's memory
RUN_S = 12.0  # that the longest decode run should take
CHUNK_ELEMENTS = 1 << 26


def values(bank: LayerBank, device: torch.device) -> list[torch.Tensor]:
    """Made-up contents for each tensor of `bank`, on the device."""
    found = list[torch.Tensor]()
    for weight in (bank.gate_up, bank.down):
        for held, tensor in zip(weight.held, weight.tensors, strict=True):
            fill = synth._fill(weight.spec, held.stored, 0.02)  # pyright: ignore[reportPrivateUsage]
            made = torch.empty(prod(tensor.shape), dtype=tensor.dtype, device=device)
            for part in made.split(CHUNK_ELEMENTS):
                part.copy_(fill(torch.randint(-(1 << 62), 1 << 62, part.shape, device=device)))
            found.append(made.view(tensor.shape))
    return found


def made_banks(
    specs: Mapping[str, ParamSpec], pairs: Pairs, partitions: Partitions, rank: int, source: Source,
    device: torch.device, *_: Any, **__: Any,
) -> tuple[Banks, bool]:  # fmt: skip
    """In place of loading: one layer is made on the device and copied into all banks, in seconds."""
    begin_s = time.monotonic()
    layouts, tensors = layout(specs, partitions, rank), dict[str, torch.Tensor]()
    for names in pairs.values():
        tensors |= take({**layouts[names[0]], **layouts[names[1]]})
    pinned = device.type == "cpu" or pin(tensors.values(), device)
    print(f"rank {rank}: {sum(t.nbytes for t in tensors.values())} bytes locked in {time.monotonic() - begin_s:.1f} s")
    banks = banks_of(specs, pairs, partitions, rank, tensors)
    contents = dict[tuple[Any, ...], list[torch.Tensor]]()
    for bank in banks.values():
        kind = tuple((tensor.shape, tensor.dtype) for tensor in bank.tensors)
        contents.setdefault(kind, [])
        contents[kind] = contents[kind] or values(bank, device)
        for tensor, content in zip(bank.tensors, contents[kind], strict=True):
            tensor.copy_(content)
    return banks, pinned


def generate(leader: Leader, batch: int, new: int, seed: int) -> float:
    """Seconds for `new` sampled tokens of each of `batch` requests."""
    generator = torch.Generator().manual_seed(seed)
    vocab = leader.rank.made.model.vocab_size
    synchronize()
    begin_s = time.perf_counter()
    for n in range(batch):
        prompt = torch.randint(vocab, (PROMPT,), generator=generator).tolist()
        sampling = SamplingParams(max_tokens=new, temperature=1.0, seed=seed + n, ignore_eos=True)
        leader.add(Generate(f"{seed} {n}", prompt, sampling))
    while leader.has_work():
        for message in leader.step():
            if isinstance(message, Failed):
                raise RuntimeError(message.message)
    synchronize()
    return time.perf_counter() - begin_s


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def decode(leader: Leader, batch: int) -> dict[str, float]:
    """Tokens a second, hit rate and bytes copied a token, of what the longer of two runs has more."""
    offload = leader.rank.offload
    generate(leader, batch, 16, 1)
    few_s, before = generate(leader, batch, SHORT, 2), counts_of(offload)
    probe_s, middle = generate(leader, batch, 2 * SHORT, 3), counts_of(offload)
    rate = SHORT / max(probe_s - few_s, 1e-3)
    new = max(3 * SHORT, min(MOST_NEW, int(RUN_S * rate)))
    many_s, after = generate(leader, batch, new, 4), counts_of(offload)
    tokens = batch * new
    hits, misses = after.hits - middle.hits, after.misses - middle.misses
    return {
        "tokens_per_s": batch * (new - SHORT) / (many_s - few_s),
        "new_tokens": new,
        "hit_rate": hits / max(1, hits + misses),
        # A prompt copies layers whole where its tokens want more experts than there are: of both runs alike.
        "copied_mib_a_token": (after.copied_bytes - middle.copied_bytes - (middle.copied_bytes - before.copied_bytes))
        / (tokens - 2 * SHORT * batch) / (1 << 20),
        "prompt_s": probe_s - 2 * SHORT / rate,
    }  # fmt: skip


def counts_of(offload: Offload | None) -> Counts:
    return offload.counts() if offload else Counts()


@torch.inference_mode()  # slots made by a resize are such tensors
def copies(offload: Offload) -> dict[str, float]:
    """GB/s from the bank of the first layer: by kernels into slots, by the copy engine into a whole room."""
    layer, bank = next(iter(offload.banks.items()))
    count, found = min(offload.count, 32), dict[str, float]()
    fetches = torch.arange(count, dtype=torch.int32, device=offload.device).repeat(2, 1)

    def by_kernel(number_1: torch.Tensor) -> None:
        offload.ops.fetch_experts(offload.slots[layer].fill, fetches, number_1)

    def by_engine(_: torch.Tensor) -> None:
        for source, room in zip(bank.tensors, offload.staging.room(layer).tensors, strict=True):
            room.copy_(source, non_blocking=True)

    for name, work, many, size in (
        ("kernel_1_expert", by_kernel, 1, expert_bytes(bank)),
        ("kernel_8_experts", by_kernel, min(8, count), min(8, count) * expert_bytes(bank)),
        ("kernel_many", by_kernel, count, count * expert_bytes(bank)),
        ("engine_layer", by_engine, 0, bank.nbytes),
    ):
        number_1 = torch.tensor([many], dtype=torch.int32, device=offload.device)
        work(number_1)
        synchronize()
        begin_s = time.perf_counter()
        for _ in range(5):
            work(number_1)
        synchronize()
        found[f"{name}_gb_per_s"] = 5 * size / (time.perf_counter() - begin_s) / 1e9
    offload.resize(offload.count)  # what was fetched is not what the table says
    return found


def slots_of(one: Rank, serve: ServeConfig, smaller_bytes: int) -> int:
    """Slots of each layer that a card holds which has so many bytes less."""
    offload, made = one.offload, one.made
    assert offload is not None
    page_bytes = made.caches.page_bytes(made.partitions, one.ctx.rank)
    left = one.budget.expert_slots * offload.slot_bytes + one.budget.pages * page_bytes - smaller_bytes
    left -= floor_bytes(serve, made.model, page_bytes)
    return min(max(left // offload.slot_bytes, offload.top_k), offload.experts)


def held(one: Rank) -> dict[str, Any]:
    """What this rank has in host memory, and what it copied from there."""
    offload, counts = one.offload, counts_of(one.offload)
    found: dict[str, Any] = {"rank": one.ctx.rank, "hits": counts.hits, "misses": counts.misses}
    if offload is not None:
        found |= {"host_gib": sum(bank.nbytes for bank in offload.banks.values()) / GIB, "pinned": offload.direct}
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found | {"copied_gib": counts.copied_bytes / GIB, "peak_of_process_gib": peak_kib / (1 << 20)}


def speed(one: Rank, serve: ServeConfig, ready_s: float, batches: list[int], cards_gib: list[float]) -> dict[str, Any]:
    """All figures of one configuration."""
    leader, offload = Leader(one, serve), one.offload
    found: dict[str, Any] = {"ready_s": ready_s, "ranks": one.ctx.world, "kv_tokens": one.budget.kv_tokens}
    if offload is not None:
        found |= {
            "slots": offload.count,
            "experts": offload.experts,
            "host_gib_a_rank": held(one)["host_gib"],
            "page_locked": held(one)["pinned"],
        }
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "allocated_gib": torch.cuda.memory_allocated() / (1 << 30)}
    for card_gib in cards_gib:
        slots = one.budget.expert_slots
        if card_gib != cards_gib[0]:
            slots = slots_of(one, serve, int(USED * (cards_gib[0] - card_gib) * GIB))
            told = leader.resize(ResizeCache("", expert_slots=slots))
            assert not told.message, told.message
        for batch in batches:
            name = f"{card_gib:g} GiB, {slots} slots, b{batch}"
            found[name] = decode(leader, batch)
            print(f"{name}: {json.dumps(found[name])}", flush=True)
    leader.stop()
    if offload is not None:  # last: it moves what graphs know
        found |= copies(offload)
    return found


WAYS: dict[str, dict[str, Any]] = {"offload": {}, "ungraphed": {"graphs": False}, "hybrid": {"experts": "hybrid"}}


def modes(env: RankEnvironment, serve: ServeConfig, batches: list[int], names: Sequence[str]) -> dict[str, Any]:
    """Decode with copies alone, in graphs and without, and with misses divided between copies and the CPU."""
    found, banks = dict[str, Any](), list[tuple[Banks, bool]]()

    def once(*args: Any) -> tuple[Banks, bool]:
        banks.extend([] if banks else [made_banks(*args)])
        return banks[0]

    for name in names:
        chosen = msgspec.structs.replace(serve, **WAYS[name])
        with mock.patch("shardwise.engine.experts.load_banks", once):
            one = build_rank(chosen, env)
        leader = Leader(one, chosen)
        for batch in batches:
            found[f"{name} b{batch}"] = decode(leader, batch)
            print(f"{name} b{batch}: {json.dumps(found[f'{name} b{batch}'])}", flush=True)
        leader.stop()
        del one, leader
        gc.collect()
    return found


def geometry(folder: Path, layers: int) -> Path:
    """`folder`'s config with fewer layers, elsewhere; `folder` itself if `layers` is 0."""
    if not layers:
        return folder
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["num_hidden_layers"] = layers
    made = Path(tempfile.mkdtemp()) / folder.name
    made.mkdir()
    (made / "config.json").write_text(json.dumps(raw))
    return made


def answers(env: RankEnvironment, options: Mapping[str, Any], wanted: Sequence[str], every: int) -> dict[str, Any]:
    """How many of the miniature's answers differ from those of resident experts, and from transformers'.

    Three requests want 6 of 8 experts, which graphs hold. resized: the offloaded server again, with twice the slots.
    """
    golden = {str(number): list(each.ids) for number, each in evaluation.golden().items()}
    cases = evaluation.load_cases()[::every]
    runs = {"transformers": {str(case.id): golden[str(case.id)] for case in cases}}
    figures = dict[str, Any]()
    for mode in ("resident", "offload", "hybrid"):
        if mode not in wanted:
            continue
        chosen = {**options, "experts": mode, "expert_slots": 0 if mode == "resident" else 2}
        serve = ServeConfig(
            model=str(resolve("")), ranks=env.world, dtype="float32", max_num_seqs=16 if mode == "resident" else 3,
            max_model_len=4096, kv_tokens=65536, prefix_cache=False, **chosen,
        )  # fmt: skip
        begin_s = time.perf_counter()
        one = build_rank(serve, env)
        leader = Leader(one, serve)
        figures |= {f"{mode}_ready_s": time.perf_counter() - begin_s}
        answer(leader, mode, cases, runs, figures)
        if mode == "offload" and "resized" in wanted:
            told = leader.resize(ResizeCache("", expert_slots=4))
            figures["resized_to"] = f"{told.expert_slots} slots, {told.kv_tokens} tokens; {told.message or 'done'}"
            answer(leader, "resized", cases, runs, figures)
        leader.stop()
    return figures | {"answers": len(cases)}


def answer(
    leader: Leader, name: str, cases: Sequence[evaluation.Case], runs: dict[str, dict[str, list[int]]],
    figures: dict[str, Any],
) -> None:  # fmt: skip
    """One run of all cases, compared with all before."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(evaluation.miniature())
    requests = [(evaluation.prompt_ids(tokenizer, case), case.max_tokens) for case in cases]
    begin_s, before = time.perf_counter(), counts_of(leader.rank.offload)
    found = engine_case.generate(leader, requests)
    runs[name] = {str(case.id): tokens for case, tokens in zip(cases, found, strict=True)}
    after = counts_of(leader.rank.offload)
    hits, misses = after.hits - before.hits, after.misses - before.misses
    figures[f"{name}_s"] = time.perf_counter() - begin_s
    figures[f"{name}_graphs"] = leader.rank.runner.graphs is not None
    figures[f"{name}_hit_rate"] = hits / max(1, hits + misses)
    for other in [each for each in runs if each != name]:
        differing = [case for case, tokens in runs[name].items() if tokens != runs[other][case]]
        figures[f"{name}_differs_from_{other}"] = len(differing)
    print(f"{name} done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["answers", "speed", "modes"])
    parser.add_argument("--model", default="benchmarks/geometry/qwen3.6-35b-a3b-fp8")
    parser.add_argument("--card-gib", type=float, nargs="*", default=[24.0], help="the largest first")
    parser.add_argument("--layers", type=int, default=0, help="of the geometry; 0: all")
    parser.add_argument("--slots", type=int, default=0, help="of each layer; 0: what the card holds")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=int, default=110)
    parser.add_argument("--runs", nargs="*", default=["resident", "offload", "resized", "hybrid"], help="of answers")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="of modes")
    parser.add_argument("--every", type=int, default=1, help="of the cases")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false")
    for name, value in (("device", "auto"), ("kernels", "auto"), ("experts", "offload"), ("ratio", "")):
        parser.add_argument(f"--{name}", default=value)
    args = parser.parse_args()
    signal.alarm(args.limit_s)  # whose default action is the end
    faulthandler.dump_traceback_later(args.limit_s - 2)
    die_with_parent(os.getppid())  # or a rank whose peer is gone would keep its GPU busy
    env = rank_environment()
    assert env is not None, "start it with torch.distributed.run"
    options: dict[str, Any] = {"device": args.device, "kernels": args.kernels, "graphs": args.graphs}
    if args.what == "answers":
        assert env.world == 1, "one rank"
        finish(args, answers(env, options, args.runs, args.every))
        return
    begin_s = time.monotonic()
    place = env.local_rank if torch.cuda.is_available() else None
    total = 1 << 60 if place is None else torch.cuda.get_device_properties(place).total_memory
    serve = ServeConfig(
        model=str(geometry(resolve(args.model), args.layers)), ranks=env.world, load_format="dummy", max_model_len=8192,
        max_num_seqs=4,
        gpu_memory_utilization=min(USED, USED * args.card_gib[0] * GIB / total), experts=args.experts,
        expert_slots=args.slots, prefix_cache=False, max_num_batched_tokens=2048,
        ratio=tuple(float(part) for part in args.ratio.split(",") if part), **options,
    )  # fmt: skip
    if args.what == "modes":
        logging.basicConfig(level=logging.INFO)  # what was measured for the choice
        finish(args, modes(env, serve, args.batches, args.ways))
        return
    with mock.patch("shardwise.engine.experts.load_banks", made_banks):
        one = build_rank(serve, env)
    ready_s = time.monotonic() - begin_s
    if env.rank:
        one.runner.follow()
    else:
        finish(args, speed(one, serve, ready_s, args.batches, args.card_gib))
    args.out.with_suffix(f".rank{env.rank}.json").write_text(json.dumps(held(one)))


def finish(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write everything, and print it as a table."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"args": vars(args) | {"out": str(args.out)}, **found}))
    for name, value in found.items():
        print(f"{name:24} {value:.4g}" if isinstance(value, float) else f"{name:24} {value}", flush=True)


if __name__ == "__main__":
    main()
