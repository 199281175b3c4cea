"""Two rooms on the device, each for a whole layer's experts: while one is computed with, the other is filled."""

from collections.abc import Callable, Mapping, Sequence

import torch

from shardwise.experts.bank import Banks, LayerBank, per_expert, room
from shardwise.experts.memory import layout_bytes
from shardwise.experts.slots import on_device

ROOMS = 2


def room_bytes(banks: Banks) -> int:
    """Of a room for any layer."""
    return max((layout_bytes(room(bank, bank.experts)) for bank in banks.values()), default=0)


class Staging:
    """Layers take turns in the rooms, in the order in which a step wants them, which is that of their numbers.

    Copies run on a stream of their own. A room is filled only when the last work that reads it is done, and read only
    when its copy is done; both are waited for on the device.
    """

    def __init__(
        self,
        banks: Banks,
        common: Mapping[int, Sequence[torch.Tensor]],
        device: torch.device,
        copy: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """common: what all experts of a layer share, on the device. copy: the second to the first, on this stream."""
        size = room_bytes(banks)
        self.arenas = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(ROOMS)]
        self._banks, self._order, self._copy_to = banks, sorted(banks), copy
        self._rooms: Mapping[int, list[LayerBank]] = {
            layer: [on_device(bank, bank.experts, arena, common[layer]) for arena in self.arenas]
            for layer, bank in banks.items()
        }
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._filled: dict[int, torch.cuda.Event | None] = {}  # layers whose copy was begun in this step

    def room(self, layer: int) -> LayerBank:
        """The first room as `layer` uses it, to be filled with some of its experts on the current stream."""
        return self._rooms[layer][0]

    def acquire(self, layer: int) -> LayerBank:
        """All experts of `layer`, for work of the current stream; to be released after it."""
        at = self._order.index(layer)
        if at == 0:
            self._filled.clear()  # what other steps left may have been written over
        for ahead in range(at, min(at + ROOMS, len(self._order))):
            if self._order[ahead] not in self._filled and (ahead == at or at == 0):
                self._fill(ahead)
        done = self._filled[layer]
        if done is not None:
            torch.cuda.current_stream().wait_event(done)
        return self._rooms[layer][at % ROOMS]

    def release(self, layer: int) -> None:
        """`layer` has been computed (or will have been, on the current stream): its room goes to the next but one."""
        ahead = self._order.index(layer) + ROOMS
        if ahead < len(self._order):
            self._fill(ahead)

    def _fill(self, at: int) -> None:
        layer = self._order[at]
        bank, target = self._banks[layer], self._rooms[layer][at % ROOMS]
        if self._stream is None:
            self._copy(bank, target)
            self._filled[layer] = None
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(bank, target)
            self._filled[layer] = event = torch.cuda.Event()
            event.record(self._stream)

    def _copy(self, bank: LayerBank, target: LayerBank) -> None:
        for source, place, own in zip(bank.tensors, target.tensors, per_expert(bank), strict=True):
            if own:
                self._copy_to(place, source)
