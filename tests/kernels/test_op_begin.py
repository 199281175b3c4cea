"""The beginning of a step on a rank that holds some rows of the embedding, and the table of operations."""

from typing import Any

import pytest
import torch

from shardwise.config import ConfigError
from shardwise.kernels.begin import reference
from shardwise.kernels.begin import triton as fast
from shardwise.kernels.begin.reference import Handover
from shardwise.kernels.ops import select
from shardwise.kernels.rope import RopeTable, cos_sin

BOTH = pytest.mark.parametrize("impl", [reference, fast], ids=["reference", "triton"])
pytestmark = pytest.mark.usefixtures("poison")


def rope_of(half: int, device: torch.device, scaling: float = 1.0) -> RopeTable:
    """As of a model with a base of 10 million, with all three axes."""
    inverse_R = 1e7 ** (-torch.arange(half, dtype=torch.float32) / half)
    return RopeTable(inverse_R, torch.arange(half) % 3, scaling).to(device)


def embedded(impl: Any, ids: torch.Tensor, table: torch.Tensor, *rest: Any) -> torch.Tensor:
    positions = torch.zeros_like(ids, dtype=torch.int64)
    return impl.begin(ids, positions, table, rest[0], rope_of(4, table.device), *rest[1:])[0]


@BOTH
@pytest.mark.parametrize("bounds", [(0, 10), (0, 4), (4, 4), (4, 9), (9, 10)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [5, 2100])
def test_rows_of_the_rank_and_zeros(impl, bounds, dtype, width, device):
    table = torch.randn(10, width, generator=torch.Generator().manual_seed(0)).to(device)
    ids = torch.tensor([0, 3, 4, 8, 9, 4], dtype=dtype, device=device)
    got = embedded(impl, ids, table[bounds[0] : bounds[1]], bounds[0])
    for row, token in zip(got, ids.tolist(), strict=True):
        inside = bounds[0] <= token < bounds[1]
        torch.testing.assert_close(row, table[token] if inside else torch.zeros_like(row), atol=0, rtol=0)


@BOTH
def test_ids_of_rows_and_types(impl, device):
    table, last = torch.arange(20.0, device=device).view(10, 2), torch.tensor([9, 7, 3, 5], device=device)
    ids = torch.tensor([-2, 4, 0, -3, -1], device=device)
    got = embedded(impl, ids, table[3:].half(), 3, last)
    assert got.dtype == torch.float32
    assert got[:, 0].tolist() == [6.0, 8.0, 0.0, 10.0, 14.0]


@BOTH
def test_ranks_add_up_to_the_whole_table(impl, device):
    table = torch.randn(10, 8, generator=torch.Generator().manual_seed(0)).to(device)
    ids = torch.arange(10, device=device)
    parts = [embedded(impl, ids, table[a:b], a) for a, b in ((0, 3), (3, 3), (3, 10))]
    assert torch.equal(torch.stack(parts).sum(0), table)
    none = impl.begin(ids[:0], ids[:0], table, 0, rope_of(3, device))
    assert [part.shape for part in none] == [(0, 8), (0, 8), (0, 3), (0, 3)]


@BOTH
@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize(("tokens", "half", "scaling"), [(1, 32, 1.0), (19, 5, 1.5), (8, 32, 1.0)])
def test_angles_of_any_size_are_exact(impl, axes, tokens, half, scaling, device):
    make = torch.Generator().manual_seed(tokens)
    positions = torch.randint(0, 1 << 20, (3, tokens), generator=make)
    positions[:, 0] = torch.tensor([262_143, 1_000_003, 105_616])
    positions = (positions if axes == 3 else positions[0]).to(device)
    ids, table, rope = positions.view(-1)[:tokens] % 7, torch.ones(7, 3, device=device), rope_of(half, device, scaling)
    _, zeros_TH, *found = impl.begin(ids, positions, table, 0, rope)
    assert zeros_TH.shape == (tokens, 3)
    assert not zeros_TH.any()
    axis_TR = (positions[rope.axis_R].T if axes == 3 else positions[:, None]).float()
    angles_TR = (axis_TR * rope.inverse_R).double()
    for got, want, ours in zip(found, (angles_TR.cos(), angles_TR.sin()), cos_sin(positions, rope), strict=True):
        torch.testing.assert_close(got.double(), want * scaling, atol=2e-7 * scaling, rtol=0)
        torch.testing.assert_close(got, ours, atol=1.2e-7 * scaling, rtol=0)


@BOTH
@pytest.mark.parametrize("axes", [1, 3])
def test_ids_and_positions_may_lie_apart(impl, axes, device):
    table, rope = torch.randn(7, 4, generator=torch.Generator().manual_seed(1)).to(device), rope_of(5, device)
    ids, positions = torch.arange(6, device=device), torch.arange(3 * 6, device=device).view(6, 3).T[:axes].squeeze(0)
    apart_T, apart_3T = torch.stack([ids, ids + 1], 1)[:, 0], positions.repeat_interleave(2, -1)[..., ::2]
    assert not apart_T.is_contiguous()
    got, want = (impl.begin(*pair, table, 0, rope) for pair in ((apart_T, apart_3T), (ids, positions.contiguous())))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def handed(handover: Handover, turn: int, ids: list[int], positions: list[int]) -> None:
    """Write a step of the host's, the rest of whose words tell the turn."""
    handover.host_KX[turn] = 100 + turn
    handover.host_KX[turn].view(torch.int64)[: 2 * len(ids)] = torch.tensor([*ids, *positions])


@BOTH
@pytest.mark.parametrize("turns", [2, 3])
@pytest.mark.parametrize(("tokens", "words"), [(1, 8), (3, 4500)])
def test_turns_are_taken_over_one_after_another(impl, turns, tokens, words, device):
    """Past the last one, too, and each as the host wrote it last; anew, from the first one."""
    handover = Handover.empty(turns, words, device)
    ids_T, positions_T = handover.words_X.view(torch.int64)[: 2 * tokens].view(2, tokens)
    table, last = torch.randn(50, 6).to(device), torch.arange(9, device=device)
    for turn in range(turns - 1):
        handed(handover, turn, [turn] * tokens, [turn] * tokens)
    for step in range(2 * turns + 1):
        handed(handover, (step - 1) % turns, [45] * tokens, [45] * tokens)  # is not to be read
        ids = [step + 10 * t if t % 2 else -step for t in range(tokens)]
        handed(handover, step % turns, ids, [1000 * step + t for t in range(tokens)])
        got = impl.begin(ids_T, positions_T, table, 10, rope_of(4, device), last, handover)
        assert ids_T.tolist() == ids
        assert torch.equal(handover.words_X, handover.host_KX[step % turns].to(device))
        want = reference.begin(ids_T.clone(), positions_T.clone(), table, 10, rope_of(4, device), last)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1.2e-7, rtol=0)
        assert handover.next_1.tolist() == [(step + 1) % turns * reference.ARRIVALS]
    handover.next_1.zero_()
    impl.begin(ids_T, positions_T, table, 0, rope_of(4, device), last, handover)
    assert torch.equal(handover.words_X, handover.host_KX[0].to(device))


def test_turns_share_no_line_of_memory():
    assert Handover.empty(2, 33, torch.device("cpu")).host_KX.shape == (2, 64)


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
