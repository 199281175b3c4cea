"""Embedding look-up on a rank that holds some of the rows, and the table of operations."""

import pytest
import torch

from shardwise.config import ConfigError
from shardwise.kernels.embedding import reference
from shardwise.kernels.embedding import triton as fast
from shardwise.kernels.ops import select

BOTH = pytest.mark.parametrize("impl", [reference, fast], ids=["reference", "triton"])


@BOTH
@pytest.mark.parametrize("bounds", [(0, 10), (0, 4), (4, 4), (4, 9), (9, 10)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.usefixtures("poison")
def test_rows_of_the_rank_and_zeros(impl, bounds, dtype, device):
    table = torch.randn(10, 1100, generator=torch.Generator().manual_seed(0)).to(device)
    ids = torch.tensor([0, 3, 4, 8, 9, 4], dtype=dtype, device=device)
    got = impl.embed(ids, table[bounds[0] : bounds[1]], bounds[0])
    for row, token in zip(got, ids.tolist(), strict=True):
        inside = bounds[0] <= token < bounds[1]
        torch.testing.assert_close(row, table[token] if inside else torch.zeros_like(row), atol=0, rtol=0)


@BOTH
def test_ids_of_rows_and_types(impl, device):
    table, last = torch.arange(20.0, device=device).view(10, 2), torch.tensor([9, 7, 3, 5], device=device)
    ids = torch.tensor([-2, 4, 0, -3, -1], device=device)
    got = impl.embed(ids, table[3:].half(), 3, last, torch.float32)
    assert got.dtype == torch.float32
    assert got[:, 0].tolist() == [6.0, 8.0, 0.0, 10.0, 14.0]


@BOTH
def test_ranks_add_up_to_the_whole_table(impl, device):
    table = torch.randn(10, 8, generator=torch.Generator().manual_seed(0)).to(device)
    ids = torch.arange(10, device=device)
    parts = [impl.embed(ids, table[a:b], a) for a, b in ((0, 3), (3, 3), (3, 10))]
    assert torch.equal(torch.stack(parts).sum(0), table)
    assert impl.embed(ids[:0], table, 0).shape == (0, 8)


def test_a_cpu_gets_the_reference_and_triton_only_to_interpret(monkeypatch):
    from triton import knobs

    cpu = torch.device("cpu")
    assert select("auto", cpu).name == "reference"
    assert select("reference", torch.device("cuda")).name == "reference"
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert select("triton", cpu).name == "triton"
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(ConfigError, match="need a GPU"):
        select("triton", cpu)
