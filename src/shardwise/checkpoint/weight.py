"""A rank's part of a logical weight: the stored tensors of its format, on the device."""

from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.shard import Local, ParamSpec


@dataclass(frozen=True)
class Weight:
    """tensors[i] is what the rank holds of spec.format[i]; held[i] tells its block per axis, which kernels go by.

    shape: the local part of the logical weight, in elements: [.., out, in]. moved: whether its codes are in the order
    of kernels/linear/arrange.py. views: what kernels made of it, kept.
    """

    spec: ParamSpec
    shape: tuple[int, ...]
    held: tuple[Local, ...]
    tensors: tuple[torch.Tensor, ...]
    moved: bool = False
    views: dict[bool, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def plain(self) -> torch.Tensor:
        """The tensor of an unquantised weight, of `shape`."""
        if len(self.tensors) != 1 or tuple(self.tensors[0].shape) != self.shape:
            raise TypeError(f"{self.spec.sources[0]}: a quantised weight was used where a plain one is needed")
        return self.tensors[0]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)
