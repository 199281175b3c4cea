"""The weights of a block of experts, as kernels see them."""

from typing import NamedTuple

from shardwise.kernels.linear.tiles import Operand


class Banks(NamedTuple):
    """Gates and ups of all experts, what they go down by, and both of the shared expert."""

    up: Operand
    down: Operand
    shared_up: Operand
    shared_down: Operand
