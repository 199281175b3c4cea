"""What a cache of experts means, in plain torch; the decisions are the same on every rank, as routing is.

Legend: T tokens, k experts a token, E experts, S slots, F copies at most.
"""

import torch

from shardwise.kernels.expert_slots.table import Places, SlotTable

Plan = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def plan_slots(ids_Tk: torch.Tensor, table: SlotTable) -> Plan:
    """Give every expert of `ids_Tk` (int32) a slot: its own, or the one that was last wanted the longest ago.

    -> the slot of each pair, int32 as ids_Tk; fetches_2F int32: the missing experts in order, and their slots; how many
    there are, int32 [1]. Slots that this step wants are not given away; among equals goes the lowest. There must be as
    many slots as pairs (or experts). The table moves on.
    """
    slots, clock, hits, misses = _look_up(ids_Tk, table)
    fetches_2F, count_1 = _room(min(ids_Tk.numel(), len(table.expert_of_S)), ids_Tk.device)
    wanted = {*hits, *misses}
    expert_of = table.expert_of_S.tolist()
    free = sorted((used, slot) for slot, used in enumerate(table.used_S.tolist()) if expert_of[slot] not in wanted)
    for n, (expert, (_, slot)) in enumerate(zip(misses, free, strict=False)):
        if expert_of[slot] >= 0:
            table.slot_of_E[expert_of[slot]] = -1
        table.slot_of_E[expert], table.expert_of_S[slot], table.used_S[slot] = slot, expert, clock
        fetches_2F[0, n], fetches_2F[1, n] = expert, slot
        slots[expert] = slot
    count_1[0] = len(misses)
    found = [slots[expert] for expert in ids_Tk.flatten().tolist()]
    slot_ids_Tk = torch.tensor(found, dtype=torch.int32, device=ids_Tk.device).view(ids_Tk.shape)
    return slot_ids_Tk, fetches_2F, count_1


def plan_wanted(ids_Tk: torch.Tensor, table: SlotTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Collect every expert of `ids_Tk` for a place of its own among E: where it comes from, where it goes to.

    -> fetches_2F int32: for each wanted expert in order its number, or -1 - slot if it is in one, and its number; how
    many there are, int32 [1]. The slots keep what they hold; the table moves on.
    """
    slots, _, hits, misses = _look_up(ids_Tk, table)
    fetches_2F, count_1 = _room(min(ids_Tk.numel(), len(table.slot_of_E)), ids_Tk.device)
    for n, expert in enumerate(sorted({*hits, *misses})):
        fetches_2F[0, n], fetches_2F[1, n] = (-1 - slots[expert] if expert in slots else expert), expert
    count_1[0] = len(hits) + len(misses)
    return fetches_2F, count_1


def fetch_experts(places: Places, fetches_2F: torch.Tensor, count_1: torch.Tensor) -> None:
    """Copy the first `count_1` of `fetches_2F`: from row f of the bank, or if below 0 row -1 - f of the slots."""
    for source, target in fetches_2F[:, : int(count_1)].T.tolist():
        for each in places.rows:
            each.target[target].copy_(each.bank[source] if source >= 0 else each.slots[-1 - source])


def _look_up(ids_Tk: torch.Tensor, table: SlotTable) -> tuple[dict[int, int], int, list[int], list[int]]:
    """Slots by expert of those that have one, the time, hits and misses in order; counted."""
    slot_of = table.slot_of_E.tolist()
    wanted = sorted(set(ids_Tk.flatten().tolist()))
    hits = [expert for expert in wanted if slot_of[expert] >= 0]
    misses = [expert for expert in wanted if slot_of[expert] < 0]
    clock = int(table.counts_3[0]) + 1
    table.counts_3.add_(torch.tensor([1, len(hits), len(misses)], device=ids_Tk.device))
    for expert in hits:
        table.used_S[slot_of[expert]] = clock
    return {expert: slot_of[expert] for expert in hits}, clock, hits, misses


def _room(most: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, most, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
