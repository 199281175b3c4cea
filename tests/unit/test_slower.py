"""The rank of benchmarks/slower.py that pretends to be slow reads as often as it says, weights of its own kind."""

import torch

from benchmarks.slower import Slower
from shardwise.kernels.ops import select


def test_operations_are_repeated_with_weights_of_layers_alike() -> None:
    read = list[tuple[float, ...]]()

    def norm_linears(added: None, residual: torch.Tensor, norm: None, eps: float, weights: list[torch.Tensor]) -> float:
        read.append(tuple(float(weight[0, 0]) for weight in weights))
        return read[-1][0]

    ops = select("reference", torch.device("cpu"))
    object.__setattr__(ops, "norm_linears", norm_linears)
    table = Slower(3).table(ops)
    x = torch.zeros(1, 4)
    delta = [[torch.full((8, 4), float(n)), torch.full((2, 4), float(n))] for n in (1, 2)]
    attention = [[torch.full((8, 4), float(n))] for n in (10, 20)]  # as large as the first of the others
    results = [table.norm_linears(None, x, None, 0.0, weights) for weights in (*delta, *attention)]
    assert results == [1, 2, 10, 20], "the last time is with an operation's own"
    assert len(read) == 4 * 3
    assert read[3:6] == [(1, 1), (2, 2), (2, 2)]
    assert read[9:] == [(10,), (20,), (20,)], "one kind's weights are not taken for the other's"
