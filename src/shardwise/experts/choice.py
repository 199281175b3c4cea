"""Whether an expert that is not on the GPU is fetched or computed where it lies: measured on one layer, in a second.

The model, for a layer of a decode step whose experts miss m times: copies of f experts and computing of the other
m - f on the CPU run at the same time, and beside both the GPU computes the hits, so that the layer takes

    max(copies(f), computing(m - f)) * contention        if there are both; the one that there is, otherwise

where copies(n) and computing(n) are start + n * each, and contention, measured too, is what they cost each other, for
both read host memory. f = m is offload; hybrid takes the best f, so that by this model it is never slower than either
alone. But no CUDA graph holds what the host divides: where offload has graphs, a layer of hybrid takes `ungraphed_s`
more, which over a fast link is more than the copies. Hybrid is chosen if it is faster by MARGIN over the numbers of
misses that a token can have. On a CPU nothing runs beside, and times add up. Of a prompt, experts have many tokens
each: those are fetched, whatever is chosen.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch

from shardwise.checkpoint.weight import Weight
from shardwise.experts import host

MARGIN = 1.05
MEASUREMENTS = 5  # among which the time is divided
MOST_REPEATS = 9
NANOS = 1_000_000_000


@dataclass(frozen=True)
class Choice:
    """What a rank measured, or what all ranks agreed on, and what follows from it.

    fetch_s, compute_s: of each further expert; the start is once a layer. misses: of a token, at most.
    """

    fetch_start_s: float
    fetch_s: float
    compute_start_s: float
    compute_s: float
    contention: float  # 1 or more: what copies and computing at the same time take of what the slower takes alone
    overlap: bool  # whether they can run at the same time
    misses: int
    ungraphed_s: float = 0.0  # that a layer takes longer if the host divides its misses

    @property
    def name(self) -> Literal["offload", "hybrid"]:
        counts = range(1, self.misses + 1)
        fetched_s = sum(self.seconds(count, count) for count in counts)
        hybrid_s = sum(self.seconds(n, self.split(n)) + self.ungraphed_s for n in counts)
        return "hybrid" if hybrid_s * MARGIN < fetched_s else "offload"

    def seconds(self, misses: int, fetched: int) -> float:
        """Of one layer with so many misses, of which `fetched` are fetched and the others computed."""
        copies_s = self.fetch_start_s + fetched * self.fetch_s if fetched else 0.0
        rest = misses - fetched
        computing_s = self.compute_start_s + rest * self.compute_s if rest else 0.0
        if not self.overlap or not fetched or not rest:
            return copies_s + computing_s
        return max(copies_s, computing_s) * self.contention

    def split(self, misses: int) -> int:
        """How many of so many misses to fetch: the fastest; among equals the most, for they may be hit next time."""
        return min(range(misses, -1, -1), key=lambda fetched: self.seconds(misses, fetched))

    def table(self, most: int) -> tuple[int, ...]:
        """`split` of 0 .. most misses, for use in every layer of every step."""
        return tuple(self.split(misses) for misses in range(most + 1))

    def agreed(self, minimum: Callable[[int], int]) -> "Choice":
        """The same on every rank, by `minimum` over all ranks (Communicator.minimum): each time the slowest rank's."""

        def slowest(value: float) -> float:
            return -minimum(-round(value * NANOS)) / NANOS

        return Choice(
            slowest(self.fetch_start_s),
            slowest(self.fetch_s),
            slowest(self.compute_start_s),
            slowest(self.compute_s),
            slowest(self.contention),
            bool(minimum(int(self.overlap))),
            minimum(self.misses),
            slowest(self.ungraphed_s),
        )


Fetch = Callable[[Sequence[int]], object]  # start to fetch these experts, and do not wait


class Trial:
    """Fetches and computes experts of one layer, others each time, so that no cache has them. One token of noise.

    fetch, wait: how copies are started and waited for; by default into memory of the trial's own, on a stream of its
    own if `device` is a GPU. most: experts at once.
    """

    def __init__(
        self,
        gate_up: Weight,
        down: Weight,
        device: torch.device,
        threads: int,
        most: int,
        fetch: Fetch | None = None,
        wait: Callable[[], object] | None = None,
    ) -> None:
        self._gate_up, self._down, self._device, self._threads = gate_up, down, device, threads
        self.most, self._at = max(1, min(most, gate_up.shape[0])), 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        stacked = [
            tensor
            for weight in (gate_up, down)
            for held, tensor in zip(weight.held, weight.tensors, strict=True)
            if held.block[0] == 1
        ]
        if fetch is None:
            self._slots = [
                (tensor, torch.empty((self.most, *tensor.shape[1:]), dtype=tensor.dtype, device=device))
                for tensor in stacked
            ]
        self._fetch, self._wait = fetch or self._copy, wait or self._synchronise
        self._x_TH = torch.ones((1, gate_up.shape[2]), dtype=torch.bfloat16, device=device)

    def _copy(self, experts: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):
            for tensor, slots in self._slots:
                for place, expert in enumerate(experts):
                    slots[place].copy_(tensor[expert], non_blocking=True)

    def _synchronise(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _compute(self, experts: Sequence[int]) -> None:
        """With the way of the token to the host, and of the sum to the device."""
        ids_Tk = torch.tensor([experts], dtype=torch.int32)
        weights_Tk = torch.full(ids_Tk.shape, 1 / ids_Tk.numel())
        x_TH = self._x_TH.cpu()
        host.compute(x_TH, self._gate_up, self._down, ids_Tk, weights_Tk, self._threads).to(self._device)

    def run(self, fetched: int, computed: int) -> float:
        """Seconds of fetching so many experts while so many others are computed."""
        experts = [(self._at + n) % self._gate_up.shape[0] for n in range(fetched + computed)]
        self._at += len(experts)
        begin_s = time.perf_counter()
        if fetched:
            self._fetch(experts[:fetched])
        if computed:
            self._compute(experts[fetched:])
        if fetched:
            self._wait()
        return time.perf_counter() - begin_s

    def median_s(self, fetched: int, computed: int, seconds: float) -> float:
        """The median of repeated runs, for some `seconds`; the first one does not count, unless it takes them all."""
        begin_s = time.perf_counter()
        taken = [self.run(fetched, computed)]
        while time.perf_counter() - begin_s < seconds and len(taken) <= MOST_REPEATS:
            taken.append(self.run(fetched, computed))
        counted = sorted(islice(taken, 1, None)) or taken
        return counted[len(counted) // 2]


def fetch_or_compute(
    gate_up: Weight,
    down: Weight,
    device: torch.device,
    threads: int,
    *,
    misses: int,
    seconds: float = 1.0,
    fetch: Fetch | None = None,
    wait: Callable[[], object] | None = None,
) -> Choice:
    """This rank's times of one layer's bank; `agreed` makes all ranks' choice of them.

    gate_up [E, 2I, H], down [E, H, I]: on the host. threads: that compute. misses: of a token, at most, such as the
    experts it has. fetch, wait: the server's own way to start copies to `device` and wait for them, if it has one.
    Takes about `seconds`, and memory for so many experts on `device`.
    """
    trial, each_s = Trial(gate_up, down, device, threads, misses, fetch, wait), seconds / MEASUREMENTS
    most, overlap = trial.most, device.type != "cpu"
    fetch_start_s, fetch_s = _line(trial.median_s(1, 0, each_s), trial.median_s(most, 0, each_s), most)
    compute_start_s, compute_s = _line(trial.median_s(0, 1, each_s), trial.median_s(0, most, each_s), most)
    found = Choice(fetch_start_s, fetch_s, compute_start_s, compute_s, 1.0, overlap, most)
    fetched = found.split(most)
    if not overlap or not 0 < fetched < most:
        return found
    both_s = trial.median_s(fetched, most - fetched, each_s)
    contention = max(1.0, both_s / found.seconds(most, fetched))
    return Choice(fetch_start_s, fetch_s, compute_start_s, compute_s, contention, overlap, most)


def _line(one_s: float, most_s: float, most: int) -> tuple[float, float]:
    """Start and each of a straight line through the times of 1 and of `most`; neither below zero."""
    if most == 1:
        return 0.0, one_s
    each_s = min(max(0.0, (most_s - one_s) / (most - 1)), most_s / most)
    return max(0.0, most_s - most * each_s), each_s
