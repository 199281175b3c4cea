"""Which GPUs there are and how fast they read and multiply, found by a child process that leaves no context behind.

`python -m shardwise.parallel.probe [INDEX ...]` prints a Report as JSON: all GPUs, and measurements of the given ones,
in about two seconds on the devices. The caller's process never touches a GPU.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import torch

from shardwise.config import ConfigError, launcher_environment
from shardwise.parallel.devices import FLOPS_A_BYTE, KERNEL_S, UNKNOWN, Device, Link, Machine

READ_BYTES = 1 << 30  # far more than any cache holds
MATMUL_SIDE = 4096
KERNELS = 200  # small ones in a row, as a graph
REDUCED_BYTES = (8192, 1 << 26)
SECONDS = 0.3  # of a measurement, at most
STREAMED = 0.9  # of what a sum reads, by kernels that stream plain weights (benchmarks/forecast.py)
CHILD_SECONDS = 120.0


class ProbeError(ConfigError):
    """The GPUs could not be asked. What a split depends on can be given instead."""


class Report(msgspec.Struct):
    """What a child found: every GPU, by index; the link is that between the measured ones."""

    devices: list[Device]
    link: Link | None = None


def encoded(report: Report) -> str:
    """`report` as one line of text. msgpack, since JSON has no infinity: an unknown speed would come back as null."""
    return msgspec.msgpack.encode(report).hex()


def decoded(line: str) -> Report:
    """Raises ValueError for what is no report."""
    return msgspec.msgpack.decode(bytes.fromhex(line), type=Report)


def ask(indices: Sequence[int] = ()) -> Report:
    """The GPUs of this machine, those of `indices` measured. Raises ProbeError if they cannot be asked."""
    command = [sys.executable, "-m", "shardwise.parallel.probe", *map(str, indices)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CHILD_SECONDS, env=launcher_environment(1), check=False
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"the GPUs did not answer a probe in {CHILD_SECONDS:.0f} s; give --gpu-spec") from None
    try:
        return decoded(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):  # msgspec's errors are of these
        cause = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}, not a report on stdout"])[-1]
        raise ProbeError(f"the GPUs could not be probed: {cause}; give --gpu-spec or --device-profile") from None


def measured(devices: Sequence[Device]) -> Machine:
    """`devices`, of this machine, with what a probe measures of them."""
    report = ask(sorted({device.index for device in devices if device.index is not None}))
    by_index = {device.index: device for device in report.devices}
    # What others hold was found before, when this machine's own child held nothing yet.
    found = tuple(replace(by_index[device.index], held_bytes=device.held_bytes) for device in devices)
    return Machine(found, report.link or Link(), measured=True)


def listed() -> list[Device]:
    """Every GPU that torch sees here, their speeds unknown."""
    found = list[Device]()
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        own_bytes = 600 << 20  # this process's context, at most
        held = max(0, total - free - own_bytes)
        found.append(
            Device(facts.name, total, UNKNOWN, UNKNOWN, KERNEL_S, held, index, f"GPU-{getattr(facts, 'uuid', '')}")
        )
    return found


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call of `work`, the best of several rounds."""
    work()
    best, begin_s = float("inf"), time.monotonic()
    while time.monotonic() - begin_s < SECONDS:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            work()
        stop.record()
        torch.cuda.synchronize(device)
        best = min(best, start.elapsed_time(stop) / 4e3)
    return best


def measure(device: Device) -> Device:
    """`device` with its read bandwidth, matmul rate and the time of a small kernel in a graph."""
    where = torch.device("cuda", device.index)  # pyright: ignore[reportArgumentType]
    with torch.cuda.device(where):
        size = min(READ_BYTES, (device.memory_bytes - device.held_bytes) // 8)
        read_s = timed(torch.zeros(size // 4, dtype=torch.float32, device=where).sum, where)
        square = torch.zeros(MATMUL_SIDE, MATMUL_SIDE, dtype=torch.bfloat16, device=where)
        matmul_s = timed(partial(torch.matmul, square, square), where)
        kernel_s = timed(small_kernels(where).replay, where) / KERNELS
        torch.cuda.empty_cache()
    read = size / read_s
    flops = 2 * MATMUL_SIDE**3 / matmul_s
    # Kernels of a model are not as small as these: the measured time shows how a device compares with the one whose
    # kernels were measured in a whole step.
    return replace(
        device,
        read_bytes_per_s=read * STREAMED,
        flops_per_s=max(flops, read * FLOPS_A_BYTE / 10),
        kernel_s=max(KERNEL_S / 2, kernel_s + KERNEL_S / 2),
    )


def small_kernels(device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of kernels that each depend on the one before."""
    x = torch.zeros(1024, device=device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        x.add_(1)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(KERNELS):
            x.add_(1)
    return graph


def link(indices: Sequence[int]) -> Link:
    """What an all-reduce over the GPUs `indices` takes, by the library that ranks use, all in this one process."""
    import torch.cuda.nccl as nccl

    seconds = list[float]()
    for size in REDUCED_BYTES:
        parts = [torch.zeros(size // 4, device=torch.device("cuda", index)) for index in indices]
        if not nccl.is_available(parts):
            return Link()
        for repeats in (3, 50 if size < 1 << 20 else 5):
            for index in indices:
                torch.cuda.synchronize(index)
            begin_s = time.perf_counter()
            for _ in range(repeats):
                nccl.all_reduce(parts)
            for index in indices:
                torch.cuda.synchronize(index)
            took_s = (time.perf_counter() - begin_s) / repeats
        seconds.append(took_s)
    short_s, long_s = seconds
    sent = 2 * (len(parts) - 1) / len(parts) * REDUCED_BYTES[1]  # pyright: ignore[reportPossiblyUnboundVariable]
    return Link(short_s, sent / max(long_s - short_s, 1e-6), reached(indices))


def reached(indices: Sequence[int]) -> bool:
    """Whether ranks on these GPUs can sum over each other's memory, as far as it can be known without trying."""
    from shardwise.parallel.peers import hindrance, place_of

    devices, count = [torch.device("cuda", index) for index in indices], len(indices)
    places = [place_of(device) for device in devices]
    return not any(hindrance(device, count, count, places) for device in devices)


def main(arguments: Sequence[str]) -> int:
    wanted = sorted({int(text) for text in arguments})
    if not torch.cuda.is_available():
        report = Report([])
    else:
        devices = listed()
        devices = [measure(device) if device.index in wanted else device for device in devices]
        try:
            between = link(wanted) if len(wanted) > 1 else None
        except RuntimeError:
            between = None  # a guess will do
        report = Report(devices, between)
    sys.stdout.write(encoded(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
