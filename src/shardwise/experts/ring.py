"""Copies to a GPU from host memory that is not page-locked: through a few small buffers that are."""

import logging

import torch

logger = logging.getLogger(__name__)

BUFFERS, BUFFER_BYTES = 4, 4 << 20


class Ring:
    """Buffers take turns; one is written again only when the copy from it is done, which the host waits for."""

    def __init__(self, device: torch.device, buffers: int = BUFFERS, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._buffers = list[torch.Tensor]()
        self._done: list[torch.cuda.Event | None] = [None] * buffers
        self._at = 0
        if device.type == "cuda":
            try:
                for _ in range(buffers):
                    self._buffers.append(torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True))
            except RuntimeError as error:
                self._buffers.clear()
                logger.warning("experts: not even %d bytes can be page-locked: %s", buffer_bytes, error)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Fill `target` on the current stream from the contiguous `source`, which may be written when this returns."""
        if not self._buffers:
            target.copy_(source)
            return
        step = len(self._buffers[0])
        pairs = zip(_bytes(target).split(step), _bytes(source).split(step), strict=True)
        for to, values in pairs:
            at, self._at = self._at, (self._at + 1) % len(self._buffers)
            if (done := self._done[at]) is not None:
                done.synchronize()
            buffer = self._buffers[at][: len(values)]
            buffer.copy_(values)
            to.copy_(buffer, non_blocking=True)
            self._done[at] = event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(target.device))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
