"""A rank that is slower than its GPU, and one that has no peers: what benchmarks.unequal makes of two equal GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch

from shardwise.kernels.ops import Ops
from shardwise.parallel.comm import Alone

READS = {  # operations that are repeated, and the arguments that another layer's take the place of
    "linear": (1,), "linears": (1,), "norm_linears": (4,), "moe": (1, 2), "moe_shared": (1, 2),
    "gated_delta_norm": (8,), "paged_attention": (1, 2),
}  # fmt: skip
"""Not norm_route: a router's megabyte is 2 us of a card with an eighth of an H200's rate, and what the operation takes
is launches and waits, which are no longer there than here."""


class Pretended(Alone):
    """A rank without peers, to compile what it launches: what others would add is nothing."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return torch.cat([x.new_zeros(*x.shape[:-1], sum(widths) - x.shape[-1]), x], -1)


class Slower:
    """Operations that run `times` times over; the last time with their own arguments, for their result."""

    def __init__(self, times: int) -> None:
        self._times = times
        self._layers = dict[tuple[Any, ...], dict[int, tuple[Any, ...]]]()

    def forget(self) -> None:
        """The layers, and with them the caches that a trial had."""
        self._layers.clear()

    def table(self, ops: Ops) -> Ops:
        if self._times == 1:
            return ops
        return replace(ops, **{name: self._repeated(name, getattr(ops, name), at) for name, at in READS.items()})

    def _repeated(self, name: str, op: Callable[..., Any], places: tuple[int, ...]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            own = tuple(args[place] for place in places)
            every = [part for each in own for part in (each if isinstance(each, list | tuple) else (each,))]
            key = every[0].data_ptr() if isinstance(every[0], torch.Tensor) else id(every[0])
            # Of all weights: attention's one may be as large as the first of GatedDeltaNet's three.
            alike = self._layers.setdefault((name, *(tuple(each.shape) for each in every)), {})
            alike[key] = own
            at = list(alike).index(key)
            for others in islice(cycle(alike.values()), at + 1, at + self._times):
                swapped = dict(zip(places, others, strict=True))
                op(*(swapped.get(place, arg) for place, arg in enumerate(args)), **kwargs)
            return op(*args, **kwargs)

        return run
