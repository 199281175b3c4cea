"""Sums over peers' memory on GPUs: bit for bit against sums in the order of ranks, and their times in CUDA graphs.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.peer_case --out FILE

Each rank checks; the first prints what was wrong, then microseconds of a message beside NCCL and torch's one-shot sum.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from shardwise.engine.processes import die_with_parent
from shardwise.kernels.moe_block import combine
from shardwise.kernels.moe_block import reference as moe_block
from shardwise.kernels.moe_block import triton as moe_fast
from shardwise.kernels.moe_block.combine import Outputs
from shardwise.kernels.norm.triton import add_rms_norm
from shardwise.kernels.peer_sum import reference
from shardwise.kernels.peer_sum.mail import EMPTY_WORD
from shardwise.parallel.comm import Partial, TorchCommunicator
from shardwise.parallel.connect import CALLS, _join, graph_microseconds, prove  # pyright: ignore[reportPrivateUsage]
from shardwise.parallel.peers import PeerCommunicator, open_mail
from tests.kernels.weights import make_weight

EPS = 1e-6
SIZES = (8192, 32768, 131072, 524288, 1048576, 4194304)  # bytes, as far as inboxes take them


def parts_of(base: TorchCommunicator, x: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(base.world)]
    dist.all_gather(parts, x, group=base.data)
    return parts


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) and one.dtype == other.dtype


Check = tuple[str, Callable[[], bool]]


def value_checks(
    base: TorchCommunicator, peers: PeerCommunicator, device: torch.device, most: int = 1 << 30
) -> Iterator[Check]:
    """Sums, norms, choices and gathers of many sizes, to `most` elements, each with what it is called."""
    torch.manual_seed(base.rank)
    for dtype, counts in ((torch.float32, (256, 2048, 262144, 3, 17, 4097, 300_001)), (torch.bfloat16, (2048, 65536))):
        for count in counts if device.type == "cuda" or dtype == torch.float32 else ():  # interpreters round otherwise
            if count > most:
                continue
            x = torch.randn(count, device=device).to(dtype)
            x[::7] = -0.0
            yield f"sum of {count} {dtype}", partial(right_sum, base, peers, x)
    fitting = min(most, peers.mail.capacity)  # 300 rows: several of a program
    for tokens, width in ((1, 2048), (3, 2048), (64, 2048), (65, 2048), (128, 2048), (300, 2048)):
        if tokens * width <= fitting:
            yield f"norm of {tokens} x {width}", partial(right_norm, base, peers, tokens, width, device)
    for turn in range(3):
        yield f"choice {turn}", partial(right_choice, base, peers, device)
    for rows, given in ((1, (124_160, 124_160)), (3, (5, 7)), (4, (1000, 1)), (2, (64, 0)), (2, (0, 5))):
        widths = [given[rank % 2] for rank in range(base.world)]
        if rows * max(widths) > most:
            continue
        x = torch.randn(rows, widths[base.rank], device=device)
        yield f"gather of {rows} x {widths}", partial(right_gather, base, peers, x, widths)
    ids = torch.arange(5, device=device) + 1000 * base.rank
    yield "broadcast", lambda: peers.broadcast(ids).tolist() == [0, 1, 2, 3, 4]
    for tokens in (2, 4, 64, 128, 300):
        for mixed in (False, True):  # some ranks have their weighted sums already
            if tokens * 2048 <= fitting:
                name = f"experts of {tokens}{', or their sums' * mixed}"
                yield name, partial(right_combine, base, peers, tokens, device, mixed)
    yield "what is too much", partial(right_refusal, peers, device)


def right_sum(base: TorchCommunicator, peers: PeerCommunicator, x: torch.Tensor) -> bool:
    return same(peers.all_reduce(x), reference.peer_sum(parts_of(base, x)))


def right_gather(base: TorchCommunicator, peers: PeerCommunicator, x: torch.Tensor, widths: list[int]) -> bool:
    return same(peers.all_gather(x, widths), base.all_gather(x, widths))


def inputs(base: TorchCommunicator, tokens: int, width: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """A part of this rank's own; a residual and a weight that all have."""
    x, residual = (torch.randn(tokens, width, device=device) for _ in range(2))
    weight = torch.linspace(-1, 1, width, device=device).bfloat16()
    return x, parts_of(base, residual)[0], weight


def right_norm(base: TorchCommunicator, peers: PeerCommunicator, tokens: int, width: int, device: torch.device) -> bool:
    x, residual, weight = inputs(base, tokens, width, device)
    promise = peers.for_norm(x)
    assert isinstance(promise, Partial)
    normed, total = promise.normed(residual, weight, EPS)
    expected, sums = reference.peer_norm(parts_of(base, x), residual, weight, EPS)
    close = (normed.float() - expected.float()).abs().max() < 2**-4
    return same(total, sums) and bool(close) and bool(normed.isfinite().all())


def experts_of(tokens: int, device: torch.device) -> tuple[Outputs, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Outputs of eight experts a token and of the shared one, and the choice and gate."""
    ids = torch.arange(tokens * 8, dtype=torch.int32, device=device).view(tokens, 8)
    choice = ids, torch.rand(tokens, 8, device=device), torch.randn(tokens, 257, device=device)[:, 256:]
    return Outputs(torch.randn(tokens * 8, 2048, device=device), torch.randn(tokens, 2048, device=device)), choice


def right_combine(
    base: TorchCommunicator, peers: PeerCommunicator, tokens: int, device: torch.device, mixed: bool
) -> bool:
    """The part of the sum is another launch's, and so may be its order of adding."""
    _, residual, weight = inputs(base, tokens, 2048, device)
    outputs, choice = experts_of(tokens, device)
    over_ranks = peers.for_block(residual)
    assert over_ranks is not None
    part = reference.weighted(*outputs, choice)
    normed, total = over_ranks(part if mixed and base.rank == 0 else outputs, choice, residual, weight, EPS)
    expected, sums = reference.peer_norm(parts_of(base, part), residual, weight, EPS)
    near = torch.allclose(total, sums, 1e-4, 1e-4) and bool((normed.float() - expected.float()).abs().max() < 2**-4)
    return near and all(same(total, other) for other in parts_of(base, total))


def right_refusal(peers: PeerCommunicator, device: torch.device) -> bool:
    """What is none, too wide, or too much for an inbox goes another way, the same on all ranks."""
    widest, capacity = peers.combining.WIDEST, peers.mail.capacity
    shapes = ((0, 2048), (2, widest + 1), (capacity // 2048 + 1, 2048)), ((1, widest), (capacity // 2048, 2048))
    refused, taken = ([peers.for_block(torch.empty(*shape, device=device)) for shape in each] for each in shapes)
    limit, peers.limit_bytes = peers.limit_bytes, 8192
    low = [peers.for_block(torch.empty(rows, 2048, dtype=torch.bfloat16, device=device)) for rows in (1, 2)]
    peers.limit_bytes = limit
    return refused == [None] * 3 and None not in taken and low[0] is not None and low[1] is None


def right_choice(base: TorchCommunicator, peers: PeerCommunicator, device: torch.device) -> bool:
    """Experts are told by their shares: two that are all but equal may come in either order."""
    router, arrivals = (
        make_weight((257, 2048), "bf16", 1, str(device)),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    x, residual, weight = inputs(base, 1, 2048, device)
    promise = peers.for_norm(x)
    assert isinstance(promise, Partial)
    routed = promise.routed(residual, weight, EPS, [router], 8, arrivals)
    assert routed is not None
    known = moe_block.norm_route(reference.peer_sum(parts_of(base, x)), residual, weight, EPS, [router], 8)
    alike = [(routed[n], known[n]) for n in (0, 1, 4)]
    shares = [torch.zeros(1, 256, device=device).scatter(1, ids.long(), of) for _, _, of, ids, _ in (routed, known)]
    return all(torch.allclose(a.float(), b.float(), 0.02, 0.02) for a, b in (*alike, (shares[0], shares[1])))


def checked(base: TorchCommunicator, checks: Iterable[Check]) -> list[str]:
    """The first check that fails on any rank: all ranks stop there, so that none waits for another."""
    for name, check in checks:
        if base.rank == 0:
            print(name, flush=True)
        if not base.minimum(int(check())):
            return [name]
    return []


def chain(comm: TorchCommunicator, x: torch.Tensor, skew: int) -> torch.Tensor:
    """Sums of small whole numbers, each from the one before; `skew` is of the rank that sleeps now and then."""
    for n in range(40):
        count = (x.numel(), 2048, 4096, 101, 7)[n % 5]
        if (n + skew) % 7 == 0:
            torch.cuda._sleep(30_000 * (n % 4))
        if n % 3 == 2 and count % 2048 == 0:
            total = torch.zeros(count // 2048, 2048, device=x.device)
            part = comm.for_norm((x[:count] + comm.rank).view(-1, 2048))
            weight = torch.zeros(2048, dtype=torch.bfloat16, device=x.device)
            summed = (part.normed(total, weight, EPS)[1] if isinstance(part, Partial) else part).view(-1)
        else:
            summed = comm.all_reduce(x[:count] + comm.rank)
        x = torch.cat([summed % 911, x[count:]])
    return x


def check_graphs(base: TorchCommunicator, peers: PeerCommunicator, device: torch.device) -> list[str]:
    """A captured chain, replayed with launches between, against the same over NCCL."""
    start = torch.arange(300_032, device=device, dtype=torch.float32) % 577
    stream = torch.cuda.Stream(device)
    held = start.clone()
    with torch.cuda.stream(stream):
        chain(peers, held, base.rank)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        held.copy_(chain(peers, held, base.rank))
    expected = start.clone()
    for turn in range(20):
        graph.replay()
        expected = chain(base, expected, base.rank)
        if turn % 3 == 0:  # between replays, an odd number of messages
            held.copy_(peers.all_reduce(held))
            expected = base.all_reduce(expected)
            held.remainder_(577)
            expected.remainder_(577)
    return [] if base.minimum(int(same(held, expected))) else [f"chains: {int((held != expected).sum())} differ"]


def microseconds(fn: Callable[[], Any], device: torch.device) -> float:
    """As connect.graph_microseconds, of anything."""

    class Call(TorchCommunicator):
        def __init__(self) -> None:
            pass

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return fn()

    return graph_microseconds(Call(), torch.ones(1, device=device))


def times(base: TorchCommunicator, peers: PeerCommunicator, device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds of one message, by bytes and way."""
    table = dict[str, dict[str, float]]()
    buffer = symmetric.empty(1 << 20, dtype=torch.float32, device=device)
    symmetric.rendezvous(buffer, base.data.group_name)
    kernels, one_shot = peers.kernels, torch.ops.symm_mem.one_shot_all_reduce_copy
    for size in sizes_of(peers):
        x, residual, weight = activations(size, device)
        ways: dict[str, Callable[[], Any]] = {
            "ours": partial(kernels.peer_sum, x, peers.mail),
            "ours+norm": partial(kernels.peer_norm, x, residual, weight, EPS, peers.mail),
            "nccl": partial(base.all_reduce, x),
            "torch": partial(one_shot, buffer[: x.numel()].view(x.shape), x, "sum", base.data.group_name),
            "norm": partial(add_rms_norm, x, residual, weight, EPS, True),
        }
        outputs, choice = experts_of(x.shape[0], device)
        ways["experts+ours+norm"] = partial(
            peers.combining.peer_combine, outputs, choice, residual, weight, EPS, peers.mail
        )
        ways["experts"] = partial(combine.combine, outputs, *choice, True)
        if x.shape[0] == 1:
            router, arrivals = make_weight((257, 2048), "bf16", 1, "cuda"), torch.zeros_like(peers.mail.state[0, :1])
            how = router.plain, 8, arrivals, peers.mail
            ways["ours+norm+choice"] = partial(peers.routing.peer_route, x, residual, weight, EPS, *how)
            ways["norm+choice"] = partial(
                moe_fast.norm_route, x, residual, weight, EPS, [router], 8, arrivals, pdl=True
            )
        table[str(size)] = {name: microseconds(fn, device) for name, fn in ways.items()}
        tell(base, f"{size:>10}", table[str(size)])
    for rows in (1, 4):
        x = torch.ones(rows, 124_160, device=device)
        ways = {"nccl": partial(base.all_gather, x, [124_160] * base.world)}
        ways["ours"] = partial(peers.all_gather, x, [124_160] * base.world)
        name = f"gather of {rows} x 124,160"
        table[name] = {way: microseconds(fn, device) for way, fn in ways.items()}
        tell(base, name, table[name])
    return table


def sizes_of(peers: PeerCommunicator) -> list[int]:
    return [size for size in SIZES if size <= peers.most_bytes]


def activations(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sum's part and a residual of `size` bytes, and a norm's weight."""
    x, residual = (torch.ones(max(1, size // 8192), 2048, device=device) for _ in range(2))
    return x, residual, torch.zeros(2048, dtype=torch.bfloat16, device=device)


def by_programs(base: TorchCommunicator, peers: PeerCommunicator, device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds of sums with their norm by launches of other numbers of programs.

    Those count messages by themselves, so each number starts where all slots are empty.
    """
    table = dict[str, dict[str, float]]()
    how = make_weight((257, 2048), "bf16", 1, "cuda").plain, 8, torch.zeros_like(peers.mail.state[0, :1])
    for programs in (32, 128, 132):
        mail = replace(peers.mail, state=torch.zeros((programs, 2), dtype=torch.int32, device=device))
        settle(peers, base, device)
        row = {
            str(size): microseconds(partial(peers.kernels.peer_norm, *activations(size, device), EPS, mail), device)
            for size in sizes_of(peers)
        }
        one = activations(SIZES[0], device)
        row["choice"] = microseconds(partial(peers.routing.peer_route, *one, EPS, *how, mail), device)
        table[f"{programs} programs"] = row
        tell(base, f"{programs} programs", table[f"{programs} programs"])
    settle(peers, base, device)
    return table


def tell(base: TorchCommunicator, name: str, row: Mapping[str, float]) -> None:
    if base.rank == 0:
        print(name, "  ".join(f"{way} {value:.1f}" for way, value in row.items()), flush=True)


def settle(peers: PeerCommunicator, base: TorchCommunicator, device: torch.device) -> None:
    """As after the start."""
    torch.cuda.synchronize(device)
    base.minimum(0)
    peers.mail.inboxes[base.rank].fill_(EMPTY_WORD)
    peers.mail.state.zero_()
    torch.cuda.synchronize(device)
    base.minimum(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    die_with_parent(os.getppid())
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    begin_s = time.monotonic()
    base = _join("nccl", TorchCommunicator, 30.0)
    prove(base, device)
    peers = PeerCommunicator(base, open_mail(base, device, overlap=True, patience_s=3.0))
    torch.cuda.synchronize(device)
    base.minimum(0)
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(device), "ranks": base.world, "calls": CALLS}
    steps: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("prove", lambda: prove(peers, device) or []),
        ("values", lambda: checked(base, value_checks(base, peers, device))),
        ("graphs", lambda: check_graphs(base, peers, device)),
        ("times", lambda: times(base, peers, device)),
        ("by programs", lambda: by_programs(base, peers, device)),
        ("gave up", lambda: ["a kernel"] if int(peers.mail.trouble) else []),
    )
    for name, step in steps:
        try:
            found = step()
            torch.cuda.synchronize(device)
        except Exception as error:  # the other steps may say more
            found = [f"{type(error).__name__}: {error}"[:300]]
        failed = isinstance(found, list) and bool(found)
        agreed = base.minimum(int(not failed))
        result[name] = found
        note = f"rank {base.rank} {name}: {found if isinstance(found, list) else ''} {time.monotonic() - begin_s:.1f} s"
        print(note, flush=True)
        if not agreed:
            settle(peers, base, device)
        if base.rank == 0:
            args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
