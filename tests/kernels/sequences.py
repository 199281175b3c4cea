"""Made-up steps for tests of kernels: sequences over pages, with NaN wherever nothing may be read.

Legend: T tokens, S sequences, N query heads, K kv heads, D head dim.
"""

from dataclasses import dataclass

import torch

from shardwise.kernels.sequences import Sequences


@dataclass(frozen=True)
class Step:
    """A step whose pages hold keys and values of all positions, and the same keys and values densely."""

    seqs: Sequences
    q_TND: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    keys: list[torch.Tensor]  # [length, K, D] of each sequence
    values: list[torch.Tensor]


def make_sequences(contexts: list[int], queries: list[int], page_tokens: int, device: torch.device) -> Sequences:
    """Sequences of those sizes; pages are given out from the last to 1, and unused entries are not page numbers."""
    lengths = [a + b for a, b in zip(contexts, queries, strict=True)]
    needed = [-(-length // page_tokens) for length in lengths]
    free = list(range(sum(needed), 0, -1))
    pages = torch.full((len(lengths), max(needed, default=0) + 1), 1 << 30, dtype=torch.int32)
    slots: list[int] = []
    for s, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        own = [free.pop(0) for _ in range(needed[s])]
        pages[s, : len(own)] = torch.tensor(own, dtype=torch.int32)
        slots += [own[p // page_tokens] * page_tokens + p % page_tokens for p in range(context, length)]
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()] if queries else [0], dtype=torch.int32)
    decodes = next((i for i, many in enumerate(queries) if many != 1), len(queries))
    return Sequences(
        starts.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=device),
        pages.to(device),
        torch.tensor(slots, dtype=torch.int64, device=device),
        decodes,
        max(queries, default=0),
        max(lengths, default=0),
    )


def make_step(
    contexts: list[int],
    queries: list[int],
    heads: tuple[int, int, int],
    page_tokens: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Random queries, keys and values for `heads`: query heads, kv heads, head dim."""
    many, kv, dim = heads
    seqs = make_sequences(contexts, queries, page_tokens, device)
    make = torch.Generator().manual_seed(sum(contexts) + 31 * sum(queries) + dim)
    count = int(seqs.pages_SP[seqs.pages_SP < 1 << 30].max()) + 1 if contexts else 1
    k_pages, v_pages = (torch.full((count, kv, page_tokens, dim), float("nan")) for _ in range(2))
    keys, values = list[torch.Tensor](), list[torch.Tensor]()
    for s, (context, new) in enumerate(zip(contexts, queries, strict=True)):
        k, v = (torch.randn(context + new, kv, dim, generator=make).to(dtype).float() for _ in range(2))
        for p in range(context + new):
            page = int(seqs.pages_SP[s, p // page_tokens])
            k_pages[page, :, p % page_tokens], v_pages[page, :, p % page_tokens] = k[p], v[p]
        keys.append(k)
        values.append(v)
    q_TND = torch.randn(sum(queries), many, dim, generator=make).to(device, dtype)
    return Step(seqs, q_TND, k_pages.to(device, dtype), v_pages.to(device, dtype), keys, values)


def naive_attention(step: Step, head_map: list[int], scale: float) -> torch.Tensor:
    """Attention of each query and head on its own, in fp64 on the CPU."""
    q_TND = step.q_TND.cpu().double()
    out_TND = torch.zeros_like(q_TND)
    starts, contexts = step.seqs.starts_S1.tolist(), step.seqs.context_S.tolist()
    for s, context in enumerate(contexts):
        for t in range(starts[s], starts[s + 1]):
            seen = context + t - starts[s] + 1
            for n, kv in enumerate(head_map):
                k, v = step.keys[s][:seen, kv].double(), step.values[s][:seen, kv].double()
                out_TND[t, n] = torch.softmax(k @ q_TND[t, n] * scale, 0) @ v
    return out_TND
