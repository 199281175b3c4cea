"""Fill a rank's parameters from a source, reading exactly what the rank holds.

Every parameter is allocated once, in its final place; what is read goes there in steps of at most `STEP_BYTES` of the
source, so that host memory stays within the parameters and a small constant.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

import torch

from shardwise.checkpoint.index import DTYPES, Source, TensorInfo
from shardwise.checkpoint.names import check
from shardwise.checkpoint.scales import check_scale
from shardwise.checkpoint.weight import Weight
from shardwise.shard import Copy, Local, ParamSpec, Partitions, copies, local, local_shape

STEP_BYTES = 16 << 20
ASSEMBLED_BYTES = 16 << 20
THREADED_BYTES = 1 << 20  # below, handing a copy to a thread costs more than the copy
THREADS = 4
FILLING = 4  # weights that may be under way

Progress = Callable[[int, int], None]  # bytes of parameters done, bytes in all


def load(
    specs: Mapping[str, ParamSpec],
    partitions: Partitions,
    rank: int,
    source: Source,
    device: torch.device | str,
    *,
    progress: Progress | None = None,
    into: Mapping[str, Sequence[torch.Tensor]] | None = None,
) -> dict[str, Weight]:
    """What `rank` holds of `specs`, on `device`, or in the tensors of `into`, by name, which are there already.

    All tensors are checked before memory is taken. Raises ConfigError for one that is missing, of another shape or
    dtype, or a scale that is not finite and above zero. `progress` is called in this thread after each weight.
    """
    device = torch.device(device)
    check(source, specs.values())
    held = {name: tuple(local(spec, partitions, rank)) for name, spec in specs.items()}
    total_bytes = sum(_nbytes(part) for parts in held.values() for part in parts)
    weights: dict[str, Weight] = {}
    filling: deque[_Filling] = deque()
    done_bytes = 0
    # Threads begin on the first GPU, and must not open a context there.
    gpu = next((each for each in (device, source.device) if each is not None and each.type == "cuda"), None)
    place = partial(torch.cuda.set_device, gpu) if gpu else None
    with ThreadPoolExecutor(THREADS, "load", place) as pool:
        window = _Window(pool)
        try:
            for name, spec in specs.items():
                final = None if into is None else into[name]
                filling.append(_fill(name, spec, held[name], partitions, rank, source, device, window, final))
                while len(filling) > FILLING or (filling and len(weights) + len(filling) == len(specs)):
                    made = filling.popleft()
                    weights[made.name] = weight = _finish(made, specs[made.name], partitions, rank, device)
                    done_bytes += weight.nbytes
                    if progress:
                        progress(done_bytes, total_bytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return weights


class _Filling(NamedTuple):
    """A weight some of whose large copies may still be running."""

    name: str
    held: tuple[Local, ...]
    tensors: list[torch.Tensor]
    copying: list[Future[None]]
    final: Sequence[torch.Tensor] | None


def _finish(made: _Filling, spec: ParamSpec, partitions: Partitions, rank: int, device: torch.device) -> Weight:
    for copied in made.copying:
        copied.result()
    if made.final is None:
        tensors = tuple(tensor.to(device) for tensor in made.tensors)
    else:
        pairs = zip(made.final, made.tensors, strict=True)
        tensors = tuple(final if final is tensor else final.copy_(tensor) for final, tensor in pairs)
    return Weight(spec, local_shape(spec, partitions, rank), made.held, tensors)


def _nbytes(part: Local) -> int:
    return -(-prod(part.shape) * part.stored.bits // 8)


class _Window:
    """Copies in other threads, never more than THREADS at once: what waits would have to be in memory."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._running: deque[Future[None]] = deque()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        if len(self._running) >= THREADS:
            self._running.popleft().result()
        self._running.append(self._pool.submit(work))
        return self._running[-1]


def _fill(
    name: str,
    spec: ParamSpec,
    held: tuple[Local, ...],
    partitions: Partitions,
    rank: int,
    source: Source,
    device: torch.device,
    window: _Window,
    final: Sequence[torch.Tensor] | None,
) -> _Filling:
    """Tensors for `held`, filled by small copies at once, and by the large ones that are still running."""
    # What is small is put together where the source has it, and crosses to the device once.
    places = [source.device if _nbytes(part) <= ASSEMBLED_BYTES else device for part in held]
    tensors = [
        given if given is not None and (given.device == place or _nbytes(part) > ASSEMBLED_BYTES)
        else torch.empty(part.shape, dtype=DTYPES[part.stored.dtype], device=place)
        for part, place, given in zip(held, places, final or (None,) * len(held), strict=True)
    ]  # fmt: skip
    by_stored = {part.stored: tensor for part, tensor in zip(held, tensors, strict=True)}
    copying: list[Future[None]] = []
    for copy in copies(spec, partitions, rank):
        target = by_stored[copy.stored][copy.dst]
        for src, dst in _steps(copy, source.info(copy.name)):
            values = source.read(copy.name, src)
            step = partial(_copy, copy, target[dst] if dst else target, values)
            if values.nbytes < THREADED_BYTES:
                step()
            else:
                copying.append(window.submit(step))
    return _Filling(name, held, tensors, copying, final)


def _copy(copy: Copy, target: torch.Tensor, values: torch.Tensor) -> None:
    if copy.stored.role != "value":
        check_scale(copy.name, values)
    target.copy_(values)


def _steps(copy: Copy, info: TensorInfo) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Parts of `copy` that each touch at most STEP_BYTES of the source, from the first to the last element.

    The second slice is within what the copy fills. An axis that is repeated is not parted; it is short.
    """
    if info.nbytes <= STEP_BYTES:
        yield copy.src, ()
        return
    filled = [axis.stop - axis.start for axis in copy.dst if isinstance(axis, slice)]
    parts: list[list[tuple[slice, slice]]] = []
    for i, axis in enumerate(copy.src):
        length, row_bytes = axis.stop - axis.start, prod(info.shape[i + 1 :]) * DTYPES[info.dtype].itemsize
        rows = max(1, STEP_BYTES // row_bytes) if filled[i] == length else length
        edges = (*range(0, length, rows), length)
        part = [(slice(axis.start + at, axis.start + to), slice(at, to)) for at, to in pairwise(edges)]
        parts.append(part if filled[i] == length else [(axis, slice(None))])
    for each in product(*parts):
        yield tuple(src for src, _ in each), tuple(dst for _, dst in each)
