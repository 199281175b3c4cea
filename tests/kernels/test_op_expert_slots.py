"""Slots of experts: the reference against a plain LRU, Triton against the reference."""

import pytest
import torch

from shardwise.kernels.expert_slots import reference
from shardwise.kernels.expert_slots import triton as fast
from shardwise.kernels.expert_slots.table import Places, Rows, SlotTable

BOTH = pytest.mark.parametrize("impl", [reference, fast], ids=["reference", "triton"])


def steps(experts: int, top_k: int, device: torch.device, count: int = 12, tokens: int = 1) -> list[torch.Tensor]:
    """Ids of some steps, a few experts more often than others."""
    generator = torch.Generator().manual_seed(experts)
    shares = torch.rand(experts, generator=generator) ** 3 + 0.01
    each = [
        torch.stack([torch.multinomial(shares, top_k, generator=generator) for _ in range(tokens)])
        for _ in range(count)
    ]
    return [ids.int().to(device) for ids in each]


@BOTH
@pytest.mark.parametrize(("experts", "slots", "top_k"), [(16, 4, 4), (16, 7, 3), (77, 9, 2), (5, 5, 5), (8, 1, 1)])
@pytest.mark.usefixtures("poison")
def test_the_longest_unused_slot_is_given_away(impl, experts, slots, top_k, device):
    table = SlotTable.empty(experts, slots, device)
    held, used = dict[int, int](), dict.fromkeys(range(slots), 0)  # slots of experts; when slots were wanted
    hits = misses = 0
    for step, ids in enumerate(steps(experts, top_k, device), 1):
        slot_ids, fetches, count = impl.plan_slots(ids, table)
        wanted = sorted(set(ids.flatten().tolist()))
        missing = [expert for expert in wanted if expert not in held]
        hits, misses = hits + len(wanted) - len(missing), misses + len(missing)
        kept = [held[expert] for expert in wanted if expert in held]
        order = sorted((slot for slot in range(slots) if slot not in kept), key=lambda slot: (used[slot], slot))
        assert fetches[:, : int(count)].tolist() == [missing, order[: len(missing)]]
        for expert, slot in zip(missing, order, strict=False):
            held = {other: at for other, at in held.items() if at != slot} | {expert: slot}
        used |= {held[expert]: step for expert in wanted}
        assert slot_ids.flatten().tolist() == [held[expert] for expert in ids.flatten().tolist()]
        assert {e: s for e, s in enumerate(table.slot_of_E.tolist()) if s >= 0} == held
        assert {e: s for s, e in enumerate(table.expert_of_S.tolist()) if e >= 0} == held
    assert table.counts_3.tolist() == [12, hits, misses]
    assert misses >= slots


@pytest.mark.parametrize(("experts", "slots", "top_k", "tokens"), [(16, 9, 3, 3), (40, 40, 4, 9), (33, 12, 2, 5)])
@pytest.mark.usefixtures("poison")
def test_triton_decides_as_the_reference(experts, slots, top_k, tokens, device):
    ours, theirs = SlotTable.empty(experts, slots, device), SlotTable.empty(experts, slots, device)
    for n, ids in enumerate(steps(experts, top_k, device, tokens=tokens)):
        plan = "plan_wanted" if n % 4 == 3 else "plan_slots"
        got, expected = getattr(fast, plan)(ids, ours), getattr(reference, plan)(ids, theirs)
        count = int(expected[-1])
        assert torch.equal(got[-1], expected[-1])
        assert torch.equal(got[-2][:, :count], expected[-2][:, :count])
        assert plan == "plan_wanted" or torch.equal(got[0], expected[0])
        for mine, other in zip(vars(ours).values(), vars(theirs).values(), strict=True):
            assert torch.equal(mine, other)


@BOTH
@pytest.mark.usefixtures("poison")
def test_wanted_experts_come_from_their_slots_or_the_bank(impl, device):
    table = SlotTable.empty(9, 3, device)
    impl.plan_slots(torch.tensor([[4, 7, 2]], dtype=torch.int32, device=device), table)
    fetches, count = impl.plan_wanted(torch.tensor([[7, 8], [0, 7]], dtype=torch.int32, device=device), table)
    assert int(count) == 3
    slot = int(table.slot_of_E[7])
    assert fetches[:, :3].tolist() == [[0, -1 - slot, 8], [0, 7, 8]]
    assert table.counts_3.tolist() == [2, 1, 5]


@BOTH
@pytest.mark.parametrize("size", [1, 3, 16, 48, 1040, 40000, 33000 + 8])
def test_rows_are_copied_whole_and_no_others(impl, size, device):
    """Sizes with and without 16 in them, of one tile and of several; from the bank and from slots."""
    noise = torch.Generator().manual_seed(size)
    bank, slots, other = (
        torch.randint(0, 256, (count, size), dtype=torch.uint8, generator=noise).to(device) for count in (6, 3, 6)
    )
    target = torch.zeros(4, size, dtype=torch.uint8, device=device)
    small, held, second = other[:, :1].clone(), slots[:, :1].clone(), torch.zeros(4, 1, dtype=torch.uint8)
    places = Places.of([Rows(bank, slots, target), Rows(small, held, second.to(device))], device)
    fetches = torch.tensor([[5, -2, 0, 1], [3, 0, 1, 2]], dtype=torch.int32, device=device)
    impl.fetch_experts(places, fetches, torch.tensor([3], dtype=torch.int32, device=device))
    assert torch.equal(target[[3, 0, 1]], torch.stack([bank[5], slots[1], bank[0]]))
    assert torch.equal(places.rows[1].target[[3, 0, 1]], torch.stack([small[5], held[1], small[0]]))
    assert not target[2].any()


@BOTH
def test_nothing_to_fetch_is_nothing(impl, device):
    target = torch.zeros(2, 32, dtype=torch.uint8, device=device)
    places = Places.of([Rows(torch.ones(3, 32, dtype=torch.uint8, device=device), target, target)], device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    impl.fetch_experts(places, torch.zeros(2, 2, dtype=torch.int32, device=device), zero)
    impl.fetch_experts(Places.of([], device), torch.zeros(2, 2, dtype=torch.int32, device=device), zero + 2)
    assert not target.any()
