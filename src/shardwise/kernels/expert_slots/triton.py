"""A cache of experts on GPUs: decisions in one program, copies by many, from pinned host memory as it lies there.

Nothing waits for the host, so that a CUDA graph holds steps with hits and with misses alike.
Legend: T tokens, k experts a token, M = T * k pairs, E experts, S slots, F copies at most, N tiles of an expert.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.expert_slots.table import NARROW_BYTES, TILE_BYTES, Places, SlotTable
from shardwise.kernels.linear.triton import power_of_two

NEVER = tl.constexpr(2**62)
SLOT_BITS = tl.constexpr(16)
SLOT_MASK = tl.constexpr(2**16 - 1)
PAIRS = 8  # looked at together
PROGRAMS = 256  # that copy: some MiB on their way, which is what a host link wants


@triton.jit
def _wanted(ids, pairs, e_E, BM: tl.constexpr, BE: tl.constexpr):
    """Which numbers of e_E are among the ids: 1 or 0."""
    wanted_E = tl.zeros((BE,), tl.int32)
    for first in range(0, pairs, BM):
        m_M = first + tl.arange(0, BM)
        id_M = tl.load(ids + m_M, mask=m_M < pairs, other=-2)
        wanted_E = tl.maximum(wanted_E, tl.max((id_M[:, None] == e_E[None, :]).to(tl.int32), 0))
    return wanted_E


@triton.jit(do_not_specialize=["pairs", "capacity"])
def plan_slots_kernel(
    ids, slot_ids, slot_of, expert_of, used, counts, fetches, count, pairs, experts, slots, capacity,
    BE: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Slots of all pairs; each missing expert gets the slot with the oldest use."""
    e_E, s_S = tl.arange(0, BE), tl.arange(0, BS)
    slot_E = tl.load(slot_of + e_E, mask=e_E < experts, other=-1)
    expert_S = tl.load(expert_of + s_S, mask=s_S < slots, other=-1)
    used_S = tl.load(used + s_S, mask=s_S < slots, other=0)
    clock = tl.load(counts) + 1
    wanted_E = _wanted(ids, pairs, e_E, BM, BE)
    wanted_S = _wanted(ids, pairs, expert_S, BM, BS)
    used_S = tl.where(wanted_S > 0, clock, used_S)
    key_S = tl.where((wanted_S > 0) | (s_S >= slots), NEVER, (used_S << SLOT_BITS) | s_S.to(tl.int64))
    missing_E = (wanted_E > 0) & (slot_E < 0)
    misses = tl.sum(missing_E.to(tl.int32), 0)
    left_E = tl.where(missing_E, e_E, BE)
    for n in range(misses):
        expert = tl.min(left_E, 0)
        slot = (tl.min(key_S, 0) & SLOT_MASK).to(tl.int32)
        old = tl.sum(tl.where(s_S == slot, expert_S, 0), 0)
        left_E = tl.where(e_E == expert, BE, left_E)
        key_S = tl.where(s_S == slot, NEVER, key_S)
        slot_E = tl.where(e_E == old, -1, tl.where(e_E == expert, slot, slot_E))
        expert_S = tl.where(s_S == slot, expert, expert_S)
        used_S = tl.where(s_S == slot, clock, used_S)
        tl.store(fetches + n, expert)
        tl.store(fetches + capacity + n, slot)
    for first in range(0, pairs, BM):
        m_M = first + tl.arange(0, BM)
        id_M = tl.load(ids + m_M, mask=m_M < pairs, other=-2)
        slot_M = tl.sum(tl.where(id_M[:, None] == e_E[None, :], slot_E[None, :], 0), 1)
        tl.store(slot_ids + m_M, slot_M, mask=m_M < pairs)
    tl.store(slot_of + e_E, slot_E, mask=e_E < experts)
    tl.store(expert_of + s_S, expert_S, mask=s_S < slots)
    tl.store(used + s_S, used_S, mask=s_S < slots)
    tl.store(counts, clock)
    tl.store(counts + 1, tl.load(counts + 1) + tl.sum(wanted_E, 0) - misses)
    tl.store(counts + 2, tl.load(counts + 2) + misses)
    tl.store(count, misses)


@triton.jit(do_not_specialize=["pairs", "capacity"])
def plan_wanted_kernel(
    ids, slot_of, expert_of, used, counts, fetches, count, pairs, experts, slots, capacity,
    BE: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """All experts that are wanted, from their slots or from the bank."""
    e_E, s_S = tl.arange(0, BE), tl.arange(0, BS)
    slot_E = tl.load(slot_of + e_E, mask=e_E < experts, other=-1)
    expert_S = tl.load(expert_of + s_S, mask=s_S < slots, other=-1)
    used_S = tl.load(used + s_S, mask=s_S < slots, other=0)
    clock = tl.load(counts) + 1
    wanted_E = _wanted(ids, pairs, e_E, BM, BE)
    wanted_S = _wanted(ids, pairs, expert_S, BM, BS)
    at_E = tl.cumsum(wanted_E, 0) - 1
    total = tl.sum(wanted_E, 0)
    misses = tl.sum(((wanted_E > 0) & (slot_E < 0)).to(tl.int32), 0)
    tl.store(fetches + at_E, tl.where(slot_E < 0, e_E, -1 - slot_E), mask=wanted_E > 0)
    tl.store(fetches + capacity + at_E, e_E, mask=wanted_E > 0)
    tl.store(used + s_S, tl.where(wanted_S > 0, clock, used_S), mask=s_S < slots)
    tl.store(counts, clock)
    tl.store(counts + 1, tl.load(counts + 1) + total - misses)
    tl.store(counts + 2, tl.load(counts + 2) + misses)
    tl.store(count, total)


@triton.jit(do_not_specialize=["capacity", "parts"])
def fetch_kernel(tiles, fetches, count, capacity, parts, WORDS: tl.constexpr, BYTES: tl.constexpr):
    """Programs take turns at the tiles of all copies. Addresses come as numbers: of memory on either side."""
    w_W, b_B = tl.arange(0, WORDS), tl.arange(0, BYTES)
    for work in range(tl.program_id(0), tl.load(count) * parts, tl.num_programs(0)):
        tile = tiles + work % parts * 6
        source = tl.load(fetches + work // parts).to(tl.int64)
        target = tl.load(fetches + capacity + work // parts).to(tl.int64)
        row_bytes, size = tl.load(tile + 3), tl.load(tile + 4)
        held = source < 0
        read = tl.load(tile + tl.where(held, 1, 0)) + tl.where(held, -1 - source, source) * row_bytes
        write = tl.load(tile + 2) + target * row_bytes
        if tl.load(tile + 5) > 0:
            from_W = tl.multiple_of(read.to(tl.pointer_type(tl.int64)), 16) + w_W
            to_W = tl.multiple_of(write.to(tl.pointer_type(tl.int64)), 16) + w_W
            ok_W = w_W < (size // 16).to(tl.int32) * 2
            tl.store(to_W, tl.load(from_W, mask=ok_W, other=0), mask=ok_W)
        else:
            ok_B = b_B < size
            values_B = tl.load(read.to(tl.pointer_type(tl.int8)) + b_B, mask=ok_B, other=0)
            tl.store(write.to(tl.pointer_type(tl.int8)) + b_B, values_B, mask=ok_B)


def plan_slots(ids_Tk: torch.Tensor, table: SlotTable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference."""
    ids_Tk = ids_Tk.contiguous()
    experts, slots, pairs, device = len(table.slot_of_E), len(table.expert_of_S), ids_Tk.numel(), ids_Tk.device
    capacity = min(pairs, slots)
    slot_ids_Tk = torch.empty_like(ids_Tk)
    fetches_2F = torch.empty((2, capacity), dtype=torch.int32, device=device)
    count_1 = torch.empty(1, dtype=torch.int32, device=device)
    plan_slots_kernel[(1,)](
        ids_Tk, slot_ids_Tk, table.slot_of_E, table.expert_of_S, table.used_S, table.counts_3, fetches_2F, count_1,
        pairs, experts, slots, capacity, power_of_two(experts), power_of_two(slots), PAIRS, num_warps=1,
    )  # fmt: skip
    return slot_ids_Tk, fetches_2F, count_1


def plan_wanted(ids_Tk: torch.Tensor, table: SlotTable) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    ids_Tk = ids_Tk.contiguous()
    experts, slots, pairs, device = len(table.slot_of_E), len(table.expert_of_S), ids_Tk.numel(), ids_Tk.device
    capacity = min(pairs, experts)
    fetches_2F = torch.empty((2, capacity), dtype=torch.int32, device=device)
    count_1 = torch.empty(1, dtype=torch.int32, device=device)
    plan_wanted_kernel[(1,)](
        ids_Tk, table.slot_of_E, table.expert_of_S, table.used_S, table.counts_3, fetches_2F, count_1,
        pairs, experts, slots, capacity, power_of_two(experts), power_of_two(max(slots, 1)), PAIRS, num_warps=1,
    )  # fmt: skip
    return fetches_2F, count_1


def fetch_experts(places: Places, fetches_2F: torch.Tensor, count_1: torch.Tensor) -> None:
    """As the reference."""
    parts, capacity = len(places.tiles_N6), fetches_2F.shape[1]
    if parts and capacity:
        programs = min(PROGRAMS, parts * capacity)
        fetch_kernel[(programs,)](
            places.tiles_N6, fetches_2F, count_1, capacity, parts, TILE_BYTES // 8, NARROW_BYTES, num_warps=4
        )


def compile_cases(native_fp8: bool = False) -> Iterator[CompileCase]:
    """256 experts and all numbers of slots alike."""
    types = dict.fromkeys(("ids", "slot_ids", "slot_of", "expert_of", "fetches", "count"), "*i32")
    types |= dict.fromkeys(("used", "counts", "tiles"), "*i64")
    for slots in (16, 64, 256):
        constexprs = {"BE": 256, "BS": slots, "BM": PAIRS}
        for kernel in (plan_slots_kernel, plan_wanted_kernel):
            yield CompileCase(kernel, signature(kernel, constexprs, types), constexprs, 1, 1)
    constexprs = {"WORDS": TILE_BYTES // 8, "BYTES": NARROW_BYTES}
    yield CompileCase(fetch_kernel, signature(fetch_kernel, constexprs, types), constexprs, 4, 1)
