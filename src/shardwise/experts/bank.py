"""A rank's slices of all experts, in host memory, in the layout that the kernels read."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.checkpoint.weight import Weight


@dataclass(frozen=True)
class LayerBank:
    """The experts of one layer: gate_up [E, 2I, H] (gate rows first) and down [E, H, I], tensors on the host."""

    gate_up: Weight
    down: Weight

    @property
    def experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


Banks = Mapping[int, LayerBank]  # by number of the layer
