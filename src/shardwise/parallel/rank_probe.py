"""How long a small sum takes between ranks, by the very communicator that they will choose.

A process forks the ranks before it touches a GPU, since its use of one would not survive a fork; they wait to be asked.
"""

import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Literal

import torch
import torch.distributed as dist

from shardwise.parallel.connect import connect, graph_microseconds

Choice = Literal["auto", "torch", "p2p", "nccl"]
Play = Callable[[int, Choice, int], float]  # index of the GPU, --comm, number of ranks -> seconds
SUM_BYTES = 8192
CONNECT_SECONDS = 30.0
LIFE_SECONDS = 110  # of a rank, whatever becomes of it


def play(index: int, comm: Choice, world: int) -> float:
    """Join the others and time sums in a graph."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    found = connect(device, comm, world, CONNECT_SECONDS)
    return graph_microseconds(found, torch.ones(SUM_BYTES // 4, device=device)) / 1e6


class WaitingRanks:
    """`world` processes, each of which plays a rank once it is asked."""

    def __init__(self, world: int, part: Play = play) -> None:
        context = get_context("fork")
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._pipes, self._processes = list[Connection](), []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_wait, args=(rank, world, port, there, part), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def latency_s(self, indices: Sequence[int], comm: Choice, timeout_s: float = 2 * CONNECT_SECONDS) -> float | None:
        """Seconds of a sum between the GPUs `indices`, one a rank: the slowest rank's; None if any has no answer."""
        try:
            for index, pipe in zip(indices, self._pipes, strict=True):
                pipe.send((index, comm))
            return max(pipe.recv() for pipe in self._pipes if pipe.poll(timeout_s) or _missing())
        except (OSError, EOFError):
            return None

    def close(self) -> None:
        """End them, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()


def _missing() -> bool:
    raise EOFError


def _wait(rank: int, world: int, port: int, pipe: Connection, part: Play) -> None:
    signal.alarm(LIFE_SECONDS)
    index, comm = pipe.recv()
    limit = timedelta(seconds=CONNECT_SECONDS)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=limit)
    pipe.send(part(index, comm, world))
    os._exit(0)  # what a communicator holds need not be given back in order
