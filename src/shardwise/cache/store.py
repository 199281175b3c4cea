"""The bytes of the host tier: pages and rows of state as they are on the device, each a row of bytes of all layers.

Legend: N pages or rows, B bytes of one over all layers.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.cache.budget import GIB
from shardwise.cache.host import Copies
from shardwise.layers.attention import KVCache
from shardwise.layers.delta import DeltaState
from shardwise.models.qwen3_5 import LayerCache

logger = logging.getLogger(__name__)

STAGING_BYTES = 32 << 20  # of the device's memory, at once


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """[N, ...] as bytes [N, B]."""
    return tensor.view(len(tensor), -1).view(torch.uint8)


def _on(device: torch.device, numbers: Sequence[int]) -> torch.Tensor:
    """Without waiting for what the device is at."""
    host = torch.tensor(numbers)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _pin(tensor: torch.Tensor) -> None:
    """Lock `tensor` in memory as it is: torch's own pinned memory would take up to twice the bytes."""
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if code:
        logger.warning(
            "%.2f GiB of host memory cannot be pinned (error %d); copies are slower", tensor.nbytes / GIB, code
        )


class _Place:
    """A number of equal places in host memory for what is at one index of `tensors`."""

    def __init__(self, tensors: Sequence[torch.Tensor], count: int) -> None:
        self._parts = [_bytes_of(tensor) for tensor in tensors if tensor.numel()]
        self._width = sum(part.shape[1] for part in self._parts)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._held_NB = torch.empty((count + 1, self._width), dtype=torch.uint8)
        if self._device.type == "cuda" and self._held_NB.numel():
            _pin(self._held_NB)
        self._at_once = max(1, STAGING_BYTES // max(1, self._width))

    @property
    def nbytes(self) -> int:
        return self._held_NB.nbytes

    def rebind(self, tensors: Sequence[torch.Tensor]) -> None:
        """What is on the device is in other tensors now, of the same kind."""
        self._parts = [_bytes_of(tensor) for tensor in tensors if tensor.numel()]

    def _pieces(self, pairs: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
        """Few enough at once. None for a rank that holds nothing of these."""
        return [pairs[i : i + self._at_once] for i in range(0, len(pairs) if self._width else 0, self._at_once)]

    def out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy from the device's numbers to places. In the device's order of work; the host does not wait."""
        for piece in self._pieces(pairs):
            index_N = _on(self._device, [number for number, _ in piece])
            staged_NB = torch.cat([part.index_select(0, index_N) for part in self._parts], 1)
            for staged_B, (_, place) in zip(staged_NB, piece, strict=True):
                self._held_NB[place].copy_(staged_B, non_blocking=True)

    def back(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy from places to the device's numbers, all different."""
        for piece in self._pieces(pairs):
            index_N = _on(self._device, [number for _, number in piece])
            staged_NB = torch.empty((len(piece), self._width), dtype=torch.uint8, device=self._device)
            for staged_B, (place, _) in zip(staged_NB, piece, strict=True):
                staged_B.copy_(self._held_NB[place], non_blocking=True)
            at = 0
            for part in self._parts:
                part.index_copy_(0, index_N, staged_NB[:, at : at + part.shape[1]])
                at += part.shape[1]


class HostStore:
    """This rank's host memory for `pages` pages and `rows` states of `caches`; pinned beside a GPU."""

    def __init__(self, caches: Sequence[LayerCache], pages: int, rows: int) -> None:
        attention = [cache for cache in caches if isinstance(cache, KVCache)]
        delta = [cache for cache in caches if isinstance(cache, DeltaState)]
        self._pages = _Place([part for cache in attention for part in (cache.k_pages, cache.v_pages)], pages)
        self._rows = _Place([part for cache in delta for part in (cache.conv, cache.delta)], rows)

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes + self._rows.nbytes

    def rebind(self, caches: Sequence[LayerCache]) -> None:
        """The pages of `caches` are other tensors now."""
        attention = [cache for cache in caches if isinstance(cache, KVCache)]
        self._pages.rebind([part for cache in attention for part in (cache.k_pages, cache.v_pages)])

    def out(self, copies: Copies) -> None:
        """The device's pages and rows to the host."""
        self._pages.out(copies.pages_out)
        self._rows.out(copies.rows_out)

    def back(self, copies: Copies) -> None:
        """And back, once nothing else that the plan copies is still to be read."""
        self._pages.back(copies.pages_in)
        self._rows.back(copies.rows_in)
