"""Slots that the host manages: where kernels cannot read the bank, and where the CPU computes what is not in slots.

Every layer waits for its choice of experts, so that no graph holds it. What is decided is the same on every rank.
Legend: T tokens, H hidden, k experts a token.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.experts import host
from shardwise.kernels.expert_slots import reference
from shardwise.kernels.expert_slots.table import Rows, SlotTable

if TYPE_CHECKING:
    from shardwise.experts.offload import Offload

TRY_EVERY = 16  # calls of a layer, after which an expert is fetched even if it would be faster not to


@dataclass(frozen=True)
class Hybrid:
    """How misses are divided. split: how many of so many misses of a layer are fetched. threads: that compute."""

    threads: int
    split: Callable[[int], int]


@dataclass(frozen=True)
class Division:
    """slot_ids_Tk: the slot of each pair, -1 if the CPU computes it; computed_Tk: its expert if so, else -1; int32.

    fetches: experts and the slots that they go to.
    """

    slot_ids_Tk: torch.Tensor
    computed_Tk: torch.Tensor
    fetches: list[tuple[int, int]]


def divide(ids_Tk: torch.Tensor, table: SlotTable, split: Callable[[int], int]) -> Division:
    """Who computes what, all on the host; as plan_slots if all misses are fetched. The table moves on.

    Those that most pairs want are fetched, the lower number among equals, as far as slots are not wanted themselves.
    """
    wanted, slot_of, clock = Counter(ids_Tk.flatten().tolist()), table.slot_of_E, int(table.counts_3[0]) + 1
    held = {expert: int(slot_of[expert]) for expert in wanted if slot_of[expert] >= 0}
    misses = sorted((expert for expert in wanted if expert not in held), key=lambda expert: (-wanted[expert], expert))
    table.counts_3.add_(torch.tensor([1, len(held), len(misses)]))
    for slot in held.values():
        table.used_S[slot] = clock
    slots = range(len(table.expert_of_S))
    taken = set(held.values())
    free = sorted((used, slot) for slot, used in zip(slots, table.used_S.tolist(), strict=True) if slot not in taken)
    count = split(len(misses))
    if misses and not count and free and (free[0][0] == 0 or clock % TRY_EVERY == 0):
        count = 1
    fetches = [(expert, slot) for expert, (_, slot) in zip(sorted(misses[:count]), free, strict=False)]
    for expert, slot in fetches:
        if (old := int(table.expert_of_S[slot])) >= 0:
            slot_of[old] = -1
        slot_of[expert], table.expert_of_S[slot], table.used_S[slot] = slot, expert, clock
    slot_ids_Tk = slot_of[ids_Tk.long()]
    return Division(slot_ids_Tk, torch.where(slot_ids_Tk < 0, ids_Tk, -1), fetches)


class HostLayer:
    """One layer, as a model calls it (layers.moe.Experts); `hybrid` None: all misses are fetched."""

    def __init__(self, offload: "Offload", layer: int, hybrid: Hybrid | None) -> None:
        self._of, self._layer, self._bank, self._hybrid = offload, layer, offload.banks[layer], hybrid

    def __call__(
        self, x_TH: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, *shared: Any
    ) -> torch.Tensor:
        """As ops.moe_shared, without its banks."""
        slots, pairs, of = self._of.slots[self._layer], ids_Tk.numel(), self._of
        if slots.count == self._bank.experts or not pairs:
            return of.compute(slots.experts, x_TH, ids_Tk, weights_Tk, *shared)
        if pairs >= self._bank.experts or not slots.count:
            return of.stream(self._layer, x_TH, ids_Tk, weights_Tk, *shared)
        ids_host_Tk = ids_Tk.cpu()
        if self._hybrid is None and pairs > slots.count and slots.collect is not None:
            fetches_2F, count_1 = reference.plan_wanted(ids_host_Tk, slots.table)
            self._copy(slots.collect.rows, fetches_2F[:, : int(count_1)].T.tolist())
            return of.compute(of.staging.room(self._layer), x_TH, ids_Tk, weights_Tk, *shared)
        split = self._hybrid.split if self._hybrid else int
        found = divide(ids_host_Tk, slots.table, split)
        if self._hybrid is None or not bool((found.computed_Tk >= 0).any()):
            self._copy(slots.fill.rows, found.fetches)
            return of.compute(slots.experts, x_TH, found.slot_ids_Tk.to(of.device), weights_Tk, *shared)
        x_host_TH, weights_host_Tk = x_TH.cpu(), weights_Tk.cpu()
        self._copy(slots.fill.rows, found.fetches)
        # A pair that is the CPU's weighs nothing here, whatever slot it reads; one that others read anyway is cheap.
        mine_Tk = found.slot_ids_Tk >= 0
        slot_ids_Tk = torch.where(mine_Tk, found.slot_ids_Tk, found.slot_ids_Tk.amax().clamp(min=0))
        shares_Tk = torch.where(mine_Tk, weights_host_Tk, 0.0)
        on_device = slot_ids_Tk.to(of.device, non_blocking=True), shares_Tk.to(of.device, non_blocking=True)
        out_TH = of.compute(slots.experts, x_TH, *on_device, *shared)
        bank = self._bank.gate_up, self._bank.down
        added_TH = host.compute(x_host_TH, *bank, found.computed_Tk, weights_host_Tk, self._hybrid.threads)
        return out_TH + added_TH.to(of.device)

    def _copy(self, rows: Sequence[Rows], fetches: Sequence[Sequence[int]]) -> None:
        for source, target in fetches:
            for each in rows:
                if source < 0:
                    each.target[target].copy_(each.slots[-1 - source])
                else:
                    self._of.to_device(each.target[target], each.bank[source])
