"""Host memory for banks: page-locked where the device shall read it, plain where that cannot be had."""

import logging
import mmap
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of tensors, by name

ALIGN_BYTES = 256
PIN_THREADS = 8  # most of the time goes into finding pages, which threads do side by side
PORTABLE_MAPPED = 3  # for all devices of the process, and at an address that they know


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def layout_bytes(layout: Layout) -> int:
    """What `take` needs for `layout`."""
    return sum(aligned(prod(shape) * dtype.itemsize) for shape, dtype in layout.values())


def views(layout: Layout, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of `layout` one after the other in `arena`, bytes of any device."""
    found, at = dict[str, torch.Tensor](), 0
    for name, (shape, dtype) in layout.items():
        size = prod(shape) * dtype.itemsize
        found[name] = arena[at : at + size].view(dtype).view(shape)
        at += aligned(size)
    return found


def take(layout: Layout) -> dict[str, torch.Tensor]:
    """New tensors in pages of this process alone, large ones if the system has them; the first write takes them."""
    size = layout_bytes(layout)
    if not size:
        return views(layout, torch.empty(0, dtype=torch.uint8))
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return views(layout, torch.frombuffer(pages, dtype=torch.uint8))


def on_wsl(version: Path = Path("/proc/version")) -> bool:
    """Whether this is Windows' Linux, where little memory can be page-locked."""
    try:
        return "microsoft" in version.read_text(encoding="utf-8").lower()
    except OSError:
        return False


def pin(tensors: Iterable[torch.Tensor], device: torch.device) -> bool:
    """Page-lock the memory of `tensors`, so that `device` copies from it while it computes, and kernels read it.

    False, with one line in the log that says why, if that cannot be: then none of it is.
    """
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if each.nbytes}
    total = sum(storages.values())
    if on_wsl():
        logger.warning("experts: %d bytes are not page-locked, since WSL locks little; copies go through a ring", total)
        return False
    runtime: Any = torch.cuda.cudart()

    def lock(place: tuple[int, int]) -> int:
        torch.cuda.set_device(device)
        return int(runtime.cudaHostRegister(*place, PORTABLE_MAPPED))

    with ThreadPoolExecutor(PIN_THREADS, "pin") as pool:
        codes = list(pool.map(lock, storages.items()))
    if not any(codes):
        return True
    for (address, _), code in zip(storages.items(), codes, strict=True):
        if not code:
            runtime.cudaHostUnregister(address)
    with suppress(RuntimeError):  # the runtime tells its last error once more to whoever asks next
        torch.zeros(1, device=device)
    logger.warning(
        "experts: %d bytes of host memory cannot be page-locked (error %d; see ulimit -l and what else is locked); "
        "copies go through a ring",
        total, next(filter(None, codes)),
    )  # fmt: skip
    return False


def names_of(name: str, count: int) -> Sequence[str]:
    """Names in a layout of a weight's stored tensors."""
    return [f"{name}:{i}" for i in range(count)]
