"""Routed experts whose weights are on the host: slots for few tokens, whole layers in turn for many.

Legend: T tokens, H hidden, k experts a token, E experts of a layer, S slots of a layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.experts.bank import Banks, LayerBank, expert_bytes
from shardwise.experts.hybrid import HostLayer, Hybrid
from shardwise.experts.ring import Ring
from shardwise.experts.slots import Slots, common_of
from shardwise.experts.staging import Staging
from shardwise.kernels.ops import Ops
from shardwise.layers.moe import Experts


@dataclass(frozen=True)
class Counts:
    """Experts that steps wanted and found in slots, those that they did not, and bytes copied to the device."""

    hits: int = 0
    misses: int = 0
    copied_bytes: int = 0


class Offload:
    """The experts of all layers of a rank. All ranks decide alike, since routing is the same on each."""

    def __init__(
        self,
        banks: Banks,
        top_k: int,
        ops: Ops,
        device: torch.device,
        pinned: bool = True,
        hybrid: Hybrid | None = None,
    ) -> None:
        """pinned: whether kernels of `device` can read the banks. hybrid: what is not in slots may be computed here."""
        self.banks, self.top_k, self.ops, self.device = banks, top_k, ops, device
        self.direct = pinned and hybrid is None  # whether the device decides and copies by itself
        self._ring = None if pinned else Ring(device)
        self._common = {layer: common_of(bank, device) for layer, bank in banks.items()}
        self.staging = Staging(banks, self._common, device, self.to_device)
        self.slots: dict[int, Slots] = {}
        self.layers: Mapping[int, Experts] = {
            layer: DeviceLayer(self, layer) if self.direct else HostLayer(self, layer, hybrid) for layer in banks
        }
        self._before = Counts()  # of slots that are gone
        self._host_bytes = 0  # that the host had copied
        self.resize(0)

    @property
    def experts(self) -> int:
        """Of a layer."""
        return max((bank.experts for bank in self.banks.values()), default=0)

    @property
    def count(self) -> int:
        """Slots of each layer."""
        return next((slots.count for slots in self.slots.values()), 0)

    @property
    def slot_bytes(self) -> int:
        """What one more slot in every layer takes."""
        return sum(map(expert_bytes, self.banks.values()))

    @property
    def graph_tokens(self) -> int:
        """The most tokens of a step that launches the same kernels whatever they choose, and copies no whole layer."""
        return 1 << 30 if self.count == self.experts else (self.experts - 1) // self.top_k

    def resize(self, count: int) -> None:
        """Make the slots of every layer `count`; what was in them is forgotten, and graphs that know them are void."""
        before = self.counts()
        self._before = replace(before, copied_bytes=before.copied_bytes - self._host_bytes)
        self.slots.clear()
        for layer, bank in self.banks.items():
            room = self.staging.room(layer)
            table_device = self.device if self.direct else torch.device("cpu")
            self.slots[layer] = Slots.make(bank, count, self._common[layer], room, self.device, table_device)

    def counts(self) -> Counts:
        """Since the start; waits for the device."""
        tables = [slots.table.counts_3 for slots in self.slots.values()]
        each = torch.stack(tables).tolist() if tables else []
        hits, misses = (sum(counts[n] for counts in each) for n in (1, 2))
        sizes = [expert_bytes(self.banks[layer]) for layer in self.slots]
        copied_bytes = self._host_bytes
        if self.direct:
            copied_bytes += sum(counts[2] * size for counts, size in zip(each, sizes, strict=True))
        before = self._before
        return Counts(before.hits + hits, before.misses + misses, before.copied_bytes + copied_bytes)

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from a bank on the current stream."""
        self._host_bytes += source.nbytes
        if self._ring is None:
            target.copy_(source, non_blocking=True)
        else:
            self._ring.copy(target, source)

    def compute(self, experts: LayerBank, x_TH: torch.Tensor, *rest: Any) -> torch.Tensor:
        """As ops.moe_shared, with experts on the device."""
        return self.ops.moe_shared(x_TH, experts.gate_up, experts.down, *rest)

    def stream(self, layer: int, *args: Any) -> torch.Tensor:
        """The same with all experts of `layer`, which are copied for it."""
        out_TH = self.compute(self.staging.acquire(layer), *args)
        self.staging.release(layer)
        return out_TH


class DeviceLayer:
    """One layer, as a model calls it (layers.moe.Experts); all decisions are the device's."""

    def __init__(self, offload: Offload, layer: int) -> None:
        self._of, self._layer, self._experts = offload, layer, offload.banks[layer].experts

    def __call__(
        self, x_TH: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, *shared: Any
    ) -> torch.Tensor:
        """As ops.moe_shared, without its banks."""
        slots, pairs, of = self._of.slots[self._layer], ids_Tk.numel(), self._of
        if slots.count == self._experts or not pairs:
            return of.compute(slots.experts, x_TH, ids_Tk, weights_Tk, *shared)
        if pairs <= slots.count:
            slot_ids_Tk, fetches_2F, count_1 = of.ops.plan_slots(ids_Tk, slots.table)
            of.ops.fetch_experts(slots.fill, fetches_2F, count_1)
            return of.compute(slots.experts, x_TH, slot_ids_Tk, weights_Tk, *shared)
        if pairs < self._experts and slots.collect is not None:
            of.ops.fetch_experts(slots.collect, *of.ops.plan_wanted(ids_Tk, slots.table))
            return of.compute(of.staging.room(self._layer), x_TH, ids_Tk, weights_Tk, *shared)
        return of.stream(self._layer, x_TH, ids_Tk, weights_Tk, *shared)
