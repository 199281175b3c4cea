"""Ranks find one another, choose how they talk, and prove that it works before a model depends on it."""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from shardwise.config import ConfigError
from shardwise.parallel.comm import Communicator, Partial, StagedCommunicator, TorchCommunicator
from shardwise.parallel.nccl import NcclCommunicator, bindings
from shardwise.parallel.peers import PeerCommunicator, hindrance, open_mail, place_of

logger = logging.getLogger(__name__)

Choice = Literal["auto", "torch", "p2p", "nccl"]
IDLE_LIMIT = timedelta(minutes=30)  # the first rank sends a sign of life far more often
SIZES = tuple(1 << n for n in range(13, 24))  # bytes of the messages that are timed, as far as peers take them
CALLS = 20  # in one graph, to be timed
T = TypeVar("T")


class WrongAnswer(Exception):
    """A collective gave other values than the known ones."""


def connect(
    device: torch.device,
    choice: Choice = "auto",
    local_world: int = 0,
    timeout_s: float = 120.0,
    *,
    staged: bool = False,
    overlap: bool = False,
) -> TorchCommunicator:
    """Join the group that the elastic launcher made; the chosen communicator, which has proved that it computes.

    local_world: ranks on this host (0: all). staged: some ranks share a GPU, so data goes through the host; all ranks
    are told the same. overlap: kernels of ours may start before the previous one ends. Raises ConfigError if the peers
    do not meet within `timeout_s`, an answer is wrong, or `choice` cannot be had; whatever else goes wrong, as when a
    peer dies, is raised as it is.
    """
    backend = "nccl" if device.type == "cuda" and not staged else "gloo"
    try:
        base = _join(backend, StagedCommunicator if staged else TorchCommunicator, timeout_s)
        within(timeout_s, device, lambda: prove(base, device))
    except (dist.DistError, TimeoutError, WrongAnswer) as error:
        if not _blames_the_setup(error):
            raise
        raise ConfigError(
            f"the ranks could not talk over {backend} within {timeout_s:.0f} s: {_line(error)}; check that all are on "
            "one network and, for NCCL, that each has a GPU of its own (NCCL_DEBUG=INFO says more)"
        ) from error
    if staged:
        return base
    if choice == "nccl":
        return _nccl(base, device, timeout_s)
    if choice == "torch":
        return base
    return _peers(base, device, choice, local_world or base.world, timeout_s, overlap)


def _join(backend: str, kind: type[TorchCommunicator], timeout_s: float) -> TorchCommunicator:
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    ranks = list(range(dist.get_world_size()))
    control = dist.new_group(ranks, backend="gloo", timeout=IDLE_LIMIT)
    data = dist.new_group(ranks, backend=backend, timeout=IDLE_LIMIT)
    assert isinstance(control, dist.ProcessGroup)
    assert isinstance(data, dist.ProcessGroup)
    return kind(data, control)


def _nccl(base: TorchCommunicator, device: torch.device, timeout_s: float) -> TorchCommunicator:
    if device.type != "cuda":
        raise ConfigError(f"--comm nccl: the device is {device.type!r}; use --comm torch")
    bindings()
    return _proved(base, device, lambda: NcclCommunicator(base), "nccl", timeout_s)


def _peers(
    base: TorchCommunicator, device: torch.device, choice: Choice, local_world: int, timeout_s: float, overlap: bool
) -> TorchCommunicator:
    """Peers' memory for the sizes at which it wins ("p2p": for all that fit); `base` where it cannot be reached."""
    places = [(0, "")] * base.world
    dist.all_gather_object(places, place_of(device), group=base.control)
    reason = hindrance(device, base.world, local_world, places if device.type == "cuda" else ())
    if not base.minimum(int(not reason)):
        reason = reason or "another rank cannot"
        (logger.warning if choice == "p2p" else logger.info)("all-reduces go over torch, not p2p: %s", reason)
        return base
    peers = _proved(
        base,
        device,
        lambda: PeerCommunicator(base, open_mail(base, device, overlap, timeout_s / 4)),
        "p2p",
        timeout_s,
        base if choice == "auto" else None,
    )
    if not isinstance(peers, PeerCommunicator):
        return peers
    if choice == "auto":
        peers.limit_bytes = winning_bytes(peers, base, device, peers.most_bytes)
        logger.info("sums of up to %d bytes go through peers' memory, larger ones over torch", peers.limit_bytes)
    return peers.patient() if peers.limit_bytes else base


def _proved(
    base: TorchCommunicator,
    device: torch.device,
    make: Callable[[], TorchCommunicator],
    name: str,
    timeout_s: float,
    otherwise: TorchCommunicator | None = None,
) -> TorchCommunicator:
    """What `make` gives on all ranks, if its answers are right; else `otherwise`, or a ConfigError without that."""
    made, fault = None, ""
    try:
        made = within(timeout_s, device, make)
    except RuntimeError as error:  # of the driver, or of an allocator that cannot share its memory
        fault = _line(error)
    except TimeoutError as error:
        raise ConfigError(f"--comm {name}: {error}; the peers cannot reach one another; use --comm torch") from error
    if base.minimum(int(made is not None)) and made is not None:
        comm = made
        try:
            within(timeout_s, device, lambda: prove(comm, device))
            right = True
        except WrongAnswer as error:
            right, fault = False, _line(error)
        except TimeoutError as error:
            raise ConfigError(f"--comm {name}: {error}; an all-reduce hangs; use --comm torch") from error
        if base.minimum(int(right)):
            return comm
    fault = fault or "another rank failed"
    if otherwise is None:
        raise ConfigError(
            f"--comm {name}: {fault}; use --comm torch (PYTORCH_CUDA_ALLOC_CONF may forbid sharing memory)"
        )
    logger.warning("all-reduces go over torch, not %s: %s", name, fault)
    return otherwise


def within(timeout_s: float, device: torch.device, fn: Callable[[], T]) -> T:
    """fn(), run to the end on the device too. Raises TimeoutError after `timeout_s`: what hangs is left behind."""
    found: list[T] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            result = fn()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(result)
        except BaseException as fault:  # handed to the caller
            faults.append(fault)

    thread = threading.Thread(target=run, name="connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if faults:
        raise faults[0]
    if not found:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s")
    return found[0]


def _blames_the_setup(error: Exception) -> bool:
    """Whether it was a time-out or a wrong answer, and not a peer that died."""
    text = str(error).lower()
    return isinstance(error, TimeoutError | WrongAnswer) or "timed out" in text or "timeout" in text


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def prove(comm: Communicator, device: torch.device) -> None:
    """Sums, ragged gathers and a broadcast against known answers; raises WrongAnswer naming what was wrong."""
    for count in (4097, 4096, 4, 70_001):
        for turn in range(3):  # a buffer that is used again must have been read by all
            ramp = torch.arange(count, device=device, dtype=torch.float32) + turn
            total = comm.all_reduce(ramp * (comm.rank + 1))
            expected = ramp * (comm.world * (comm.world + 1) // 2)  # small integers: exact in fp32
            if not torch.equal(total, expected):
                wrong = int((total != expected).sum())
                raise WrongAnswer(
                    f"rank {comm.rank}: an all-reduce over {comm.world} ranks gave {wrong} of {count} wrong values"
                )
    for least in (1, 0):
        widths = [least + rank % 2 for rank in range(comm.world)]
        joined = comm.all_gather(torch.full((3, widths[comm.rank]), float(comm.rank), device=device), widths)
        known = torch.repeat_interleave(torch.arange(comm.world), torch.tensor(widths)).expand(3, -1)
        if not torch.equal(joined.cpu(), known.float()):
            raise WrongAnswer(f"rank {comm.rank}: an all-gather over {comm.world} ranks gave {joined.tolist()}")
    part = comm.for_norm(torch.full((3, 32), float(comm.rank + 1), device=device))
    if isinstance(part, Partial):
        _, part = part.normed(torch.zeros(3, 32, device=device), torch.zeros(32, device=device), 1e-6)
    if not bool((part == comm.world * (comm.world + 1) // 2).all()):
        raise WrongAnswer(f"rank {comm.rank}: a sum before a norm over {comm.world} ranks gave {part.tolist()}")
    ids = comm.broadcast(torch.arange(3, device=device) + 1000 * comm.rank)
    if ids.tolist() != [0, 1, 2]:
        raise WrongAnswer(f"rank {comm.rank}: a broadcast over {comm.world} ranks gave {ids.tolist()}")


def winning_bytes(one: Communicator, other: Communicator, device: torch.device, most_bytes: int) -> int:
    """The largest of SIZES, to `most_bytes`, up to which `one` reduces faster than `other` on all ranks; 0 if at none.

    After each size the ranks agree, so that none measures alone.
    """
    best = 0
    for size in SIZES:
        if size > most_bytes:
            break
        x = torch.ones(size // 4, device=device)
        if not other.minimum(int(graph_microseconds(one, x) < graph_microseconds(other, x))):
            break
        best = size
    return best


def graph_microseconds(comm: Communicator, x: torch.Tensor) -> float:
    """The median time of one all-reduce in a CUDA graph of many."""
    stream = torch.cuda.Stream(x.device)
    with torch.cuda.stream(stream):
        comm.all_reduce(x.clone())
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            comm.all_reduce(x)
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / CALLS)
    return sorted(times)[2]
