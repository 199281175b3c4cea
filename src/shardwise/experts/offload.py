"""Routed experts whose weights are on the host: slots for few tokens, whole layers in turn for many.

Legend: T tokens, H hidden, k experts a token, E experts of a layer, S slots of a layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.experts.bank import Banks, LayerBank, expert_bytes
from shardwise.experts.slots import Slots, common_of
from shardwise.experts.staging import Staging
from shardwise.kernels.ops import Ops


@dataclass(frozen=True)
class Counts:
    """Experts that steps wanted and found in slots, those that they did not, and bytes copied to the device."""

    hits: int = 0
    misses: int = 0
    copied_bytes: int = 0


class Offload:
    """The experts of all layers of a rank. All ranks decide alike, since routing is the same on each."""

    def __init__(self, banks: Banks, top_k: int, ops: Ops, device: torch.device) -> None:
        self.banks, self.top_k, self.ops, self.device = banks, top_k, ops, device
        self._common = {layer: common_of(bank, device) for layer, bank in banks.items()}
        self.staging = Staging(banks, self._common, device)
        self.slots: dict[int, Slots] = {}
        self.layers: Mapping[int, OffloadedLayer] = {layer: OffloadedLayer(self, layer) for layer in banks}
        self._before = Counts()  # of slots that are gone
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
        self._before = replace(before, copied_bytes=before.copied_bytes - self.staging.copied_bytes)
        self.slots.clear()
        for layer, bank in self.banks.items():
            room = self.staging.room(layer)
            self.slots[layer] = Slots.make(bank, count, self._common[layer], room, self.device)

    def counts(self) -> Counts:
        """Since the start; waits for the device."""
        tables = [slots.table.counts_3 for slots in self.slots.values()]
        each = torch.stack(tables).tolist() if tables else []
        hits, misses = (sum(counts[n] for counts in each) for n in (1, 2))
        sizes = [expert_bytes(self.banks[layer]) for layer in self.slots]
        copied_bytes = sum(counts[2] * size for counts, size in zip(each, sizes, strict=True))
        before, streamed = self._before, self.staging.copied_bytes
        return Counts(before.hits + hits, before.misses + misses, before.copied_bytes + copied_bytes + streamed)


class OffloadedLayer:
    """One layer, as a model calls it (layers.moe.Experts)."""

    def __init__(self, offload: Offload, layer: int) -> None:
        self._of, self._layer, self._bank = offload, layer, offload.banks[layer]

    def __call__(
        self, x_TH: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, *shared: Any
    ) -> torch.Tensor:
        """As ops.moe_shared, without its banks."""
        slots, pairs, ops = self._of.slots[self._layer], ids_Tk.numel(), self._of.ops
        if slots.count == self._bank.experts or not pairs:
            return self._compute(slots.experts, x_TH, ids_Tk, weights_Tk, *shared)
        if pairs <= slots.count:
            ids_Tk, fetches_2F, count_1 = ops.plan_slots(ids_Tk, slots.table)
            ops.fetch_experts(slots.fill, fetches_2F, count_1)
            return self._compute(slots.experts, x_TH, ids_Tk, weights_Tk, *shared)
        if pairs < self._bank.experts and slots.collect is not None:
            ops.fetch_experts(slots.collect, *ops.plan_wanted(ids_Tk, slots.table))
            return self._compute(self._of.staging.room(self._layer), x_TH, ids_Tk, weights_Tk, *shared)
        whole = self._of.staging.acquire(self._layer)
        out_TH = self._compute(whole, x_TH, ids_Tk, weights_Tk, *shared)
        self._of.staging.release(self._layer)
        return out_TH

    def _compute(self, experts: LayerBank, *args: Any) -> torch.Tensor:
        x_TH, *rest = args
        return self._of.ops.moe_shared(x_TH, experts.gate_up, experts.down, *rest)
