"""Moving memory between KV cache and slots of experts while a server runs: what a wish comes to on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.cache.budget import GIB, Budget
from shardwise.engine.messages import ResizeCache


class ResizeRefused(ValueError):
    """It cannot be: what was asked for, the numbers and what could be."""


@dataclass(frozen=True)
class RankSizes:
    """Bytes of one page of KV cache, and of one slot in every layer, on a rank."""

    page_bytes: int
    slot_bytes: int


def resized(asked: ResizeCache, first: Budget, sizes: Sequence[RankSizes], top_k: int, experts: int) -> Budget:
    """The budget that `asked` makes of the `first` one: no rank holds more than then. Raises ResizeRefused.

    What no rank can use is left idle: slots and pages are the same on all, and bytes are not.
    """
    if not first.expert_slots:
        raise ResizeRefused("all experts are on the devices: start with --experts offload to move memory")
    if asked.expert_slots:
        if not top_k <= asked.expert_slots <= experts:
            raise ResizeRefused(f"expert_slots {asked.expert_slots}: {top_k} to {experts} are possible")
        slots = asked.expert_slots
        pages = min(_pages(first, size, slots) for size in sizes)
        least = -(-first.max_model_len // first.page_tokens) + 1
        if pages < least:
            raise ResizeRefused(
                f"expert_slots {slots}: {max(pages - 1, 0) * first.page_tokens} tokens of KV cache would be left, and "
                f"a request may have {first.max_model_len}; ask for at most {_most_slots(first, sizes, least, experts)}"
            )
    else:
        pages = -(-asked.kv_tokens // first.page_tokens) + 1
        if asked.kv_tokens < first.max_model_len:
            raise ResizeRefused(f"kv_tokens {asked.kv_tokens}: a request may have {first.max_model_len}; ask for more")
        slots = _most_slots(first, sizes, pages, experts)
        if slots < top_k:
            most = min(_pages(first, size, top_k) for size in sizes) - 1
            raise ResizeRefused(
                f"kv_tokens {asked.kv_tokens}: {sizes[0].page_bytes * pages / GIB:.3f} GiB would leave "
                f"{max(slots, 0)} slots of the {top_k} that a token wants; ask for at most {most * first.page_tokens}"
            )
    return replace(first, pages=pages, expert_slots=slots)


def _pages(first: Budget, size: RankSizes, slots: int) -> int:
    """Pages of a rank beside so many slots."""
    if not size.page_bytes:
        return 1 << 40
    return first.pages + (first.expert_slots - slots) * size.slot_bytes // size.page_bytes


def _most_slots(first: Budget, sizes: Sequence[RankSizes], pages: int, experts: int) -> int:
    """Slots that every rank has room for beside so many pages; 0 if a rank without slots lacks room for those."""
    if any(not size.slot_bytes and size.page_bytes and pages > first.pages for size in sizes):
        return 0
    each = [
        first.expert_slots + (first.pages - pages) * size.page_bytes // size.slot_bytes
        for size in sizes
        if size.slot_bytes
    ]
    return min([*each, experts])
