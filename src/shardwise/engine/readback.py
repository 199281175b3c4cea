"""Results of a step on their way to the host, while the device goes on with the next one."""

from functools import cache
from typing import Any

import numpy as np
import torch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Of copies to the host, beside which the next step begins."""
    return torch.cuda.Stream(device)


class Readback:
    """A copy of `tensors` to the host, asked for at once: reading it waits for that and for nothing asked for later.

    `tensor.tolist()` would not do: its copy queues behind the step that was launched meanwhile, and so waits for it.
    Tensors are kept until they are read, for their memory must not be another's before.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        self._tensors = self._kept = tensors
        if tensors and tensors[0].device.type == "cuda":
            stream = _stream(tensors[0].device)
            stream.wait_stream(torch.cuda.current_stream(tensors[0].device))
            with torch.cuda.stream(stream):
                self._tensors = tuple(
                    torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                    for tensor in tensors
                )
            self._ready = torch.cuda.Event()
            self._ready.record(stream)

    def lists(self) -> list[Any]:
        """Wait for the copy; each tensor as nested lists."""
        if self._ready is not None:
            self._ready.synchronize()
        self._kept = ()
        return [tensor.tolist() for tensor in self._tensors]


class Written:
    """Tokens that the device writes into host memory by itself, there once `done`; without, they are there."""

    def __init__(self, tokens_L: np.ndarray, done: torch.cuda.Event | None) -> None:
        self._tokens_L, self._done = tokens_L, done

    def lists(self) -> list[Any]:
        """Wait for them; as of a Readback of one tensor. Not after the same memory has been written again."""
        if self._done is not None:
            self._done.synchronize()
        return [self._tokens_L.tolist()]
