"""Results of a step on their way to the host, while the device goes on with the next one."""

from typing import Any

import torch


class Readback:
    """A copy of `tensors` to the host, asked for at once: reading it waits for that and for nothing asked for later.

    `tensor.tolist()` would not do: its copy queues behind the step that was launched meanwhile, and so waits for it.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        self._tensors = tensors
        if tensors and tensors[0].device.type == "cuda":
            self._tensors = tuple(
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            )
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(tensors[0].device))

    def lists(self) -> list[Any]:
        """Wait for the copy; each tensor as nested lists."""
        if self._ready is not None:
            self._ready.synchronize()
        return [tensor.tolist() for tensor in self._tensors]
