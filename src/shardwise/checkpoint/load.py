"""Fill a rank's parameters from a source, reading exactly what the rank holds.

Every parameter is allocated once, in its final place; what is read goes there in steps of at most `STEP_BYTES` of the
source, so that host memory stays within the parameters and a small constant.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from math import isfinite, prod

import torch

from shardwise.checkpoint.index import DTYPES, Source, TensorInfo
from shardwise.checkpoint.names import check
from shardwise.checkpoint.weight import Weight
from shardwise.config import ConfigError
from shardwise.shard import Copy, Local, ParamSpec, Partitions, copies, local, local_shape

STEP_BYTES = 16 << 20
ASSEMBLED_BYTES = 16 << 20
THREADS = 4

Progress = Callable[[int, int], None]  # bytes of parameters done, bytes in all


def load(
    specs: Mapping[str, ParamSpec],
    partitions: Partitions,
    rank: int,
    source: Source,
    device: torch.device | str,
    *,
    progress: Progress | None = None,
) -> dict[str, Weight]:
    """What `rank` holds of `specs`, on `device`.

    All tensors are checked before memory is taken. Raises ConfigError for one that is missing, of another shape or
    dtype, or a scale that is not finite and above zero. `progress` is called in this thread after each weight.
    """
    device = torch.device(device)
    check(source, specs.values())
    held = {name: tuple(local(spec, partitions, rank)) for name, spec in specs.items()}
    total_bytes = sum(-(-prod(part.shape) * part.stored.bits // 8) for parts in held.values() for part in parts)
    weights: dict[str, Weight] = {}
    done_bytes = 0
    with ThreadPoolExecutor(THREADS, thread_name_prefix="load") as pool:
        jobs = {
            name: pool.submit(_weight, spec, held[name], partitions, rank, source, device)
            for name, spec in specs.items()
        }
        try:
            for name, job in jobs.items():
                weights[name] = job.result()
                done_bytes += weights[name].nbytes
                if progress:
                    progress(done_bytes, total_bytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return weights


def _weight(
    spec: ParamSpec, held: tuple[Local, ...], partitions: Partitions, rank: int, source: Source, device: torch.device
) -> Weight:
    places: dict[str, torch.Tensor] = {}
    for part in held:
        # Many small reads are put together where the source has them, and cross to the device once.
        small = prod(part.shape) * part.stored.bits // 8 <= ASSEMBLED_BYTES
        place = source.device if small else device
        places[part.stored.suffix] = torch.empty(part.shape, dtype=DTYPES[part.stored.dtype], device=place)
    for copy in copies(spec, partitions, rank):
        target = places[copy.stored.suffix][copy.dst]
        for src, dst in _steps(copy, source.info(copy.name)):
            values = source.read(copy.name, src)
            if copy.stored.role != "value":
                _check_scale(copy.name, values)
            target[dst].copy_(values)
    tensors = tuple(places[part.stored.suffix].to(device) for part in held)
    return Weight(spec, local_shape(spec, partitions, rank), held, tensors)


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


def _check_scale(name: str, values: torch.Tensor) -> None:
    """Raises ConfigError unless all of `values` are finite and above zero: a bad scale is silent in the answers."""
    if values.dtype == torch.float8_e4m3fn:
        codes = values.view(torch.uint8)
        good = codes - 1 < 0x7E  # one byte an element: 0 wraps round, 0x7F is not a number, 0x80 and above are negative
    elif values.numel() == 1:
        value = values.item()
        good = torch.tensor(isfinite(value) and value > 0)
    else:
        good = (values > 0) & (values < torch.inf)
    if not bool(good.all()):
        bad = values[~good] if values.dim() else values
        raise ConfigError(
            f"checkpoint: scale {name!r} holds {bad.float().flatten()[0].item()}, expected finite values above zero; "
            "quantise or download it again"
        )
