"""Drawing tokens: Triton against the reference, and both against the distribution they draw from."""

import pytest
import torch

from shardwise.kernels.draw import reference
from shardwise.kernels.draw import triton as fast

BOTH = pytest.mark.parametrize("impl", [reference, fast], ids=["reference", "triton"])


def seeds(count: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """[N, 3], as a view of wider rows, as the sampler has them."""
    source = torch.Generator().manual_seed(seed)
    ints_N4 = torch.randint(0, 1 << 32, (count, 4), generator=source)
    ints_N4[:, 3] = torch.randint(0, 5000, (count,), generator=source)
    return ints_N4.to(device)[:, 1:]


def temperatures(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor([[value, 0.0] for value in values], device=device)[:, 0]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("vocabulary", [1, 7, 2048, 2049, 5000])
def test_triton_draws_what_the_reference_draws(vocabulary, device):
    logits_LV = (
        4 * torch.randn(9, vocabulary + 3, generator=torch.Generator().manual_seed(1)).to(device)[:, :vocabulary]
    )
    rows_N = torch.tensor([0, 2, 3, 8], device=device)
    heat_N, seeds_N3 = temperatures([0.3, 1.0, 1.7, 50.0], device), seeds(4, device)
    largest_L = logits_LV.amax(-1)
    want, got = (impl.draw(logits_LV, rows_N, largest_L, heat_N, seeds_N3) for impl in (reference, fast))
    assert got.dtype == torch.int64
    assert got.tolist() == want.tolist()


def test_the_shares_are_those_of_the_softmax(device):
    """Of the reference; the kernel draws the same tokens."""
    logits_1V = torch.tensor([[2.0, 0.0, 1.0, float("-inf"), 3.0]], device=device)
    count = 4000
    seeds_N3 = seeds(count, device, 2)
    logits_LV = logits_1V.expand(count, -1).contiguous()
    rows_N, heat_N = torch.arange(count, device=device), temperatures([2.0] * count, device)
    drawn_N = reference.draw(logits_LV, rows_N, logits_LV.amax(-1), heat_N, seeds_N3)
    shares_V = torch.bincount(drawn_N.cpu(), minlength=5) / count
    torch.testing.assert_close(shares_V, (logits_1V / 2).softmax(-1)[0].cpu(), atol=0.03, rtol=0)
    assert shares_V[3] == 0


@BOTH
def test_a_row_does_not_depend_on_the_others_and_none_is_fine(impl, device):
    logits_LV = torch.randn(6, 3000, generator=torch.Generator().manual_seed(3)).to(device)
    seeds_N3, heat_N, largest_L = seeds(6, device), temperatures([1.0] * 6, device), logits_LV.amax(-1)
    every = impl.draw(logits_LV, torch.arange(6, device=device), largest_L, heat_N, seeds_N3)
    for n in range(6):
        alone = impl.draw(
            logits_LV, torch.tensor([n], device=device), largest_L, heat_N[n : n + 1], seeds_N3[n : n + 1]
        )
        assert alone.tolist() == every[n : n + 1].tolist()
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert impl.draw(logits_LV, none, largest_L, heat_N[:0], seeds_N3[:0]).shape == (0,)


@BOTH
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("vocabulary", [1, 2048, 5001])
def test_the_likeliest_is_the_lowest_of_the_largest_and_minus_one_if_not_finite(impl, vocabulary, device):
    logits_LV = torch.randn(7, vocabulary + 1, generator=torch.Generator().manual_seed(4))[:, :vocabulary]
    want_L = logits_LV.argmax(-1)
    logits_LV[1] = 2.0
    logits_LV[2, -1] = float("nan")
    logits_LV[3, 0] = float("inf")
    logits_LV[4] = float("-inf")
    logits_LV[5, -1] = logits_LV[5, vocabulary // 2] = 9.0
    want_L[1:6] = torch.tensor([0, -1, -1, -1, vocabulary // 2])
    values_L, ids_L = impl.likeliest(logits_LV.to(device))
    assert ids_L.tolist() == want_L.tolist()
    torch.testing.assert_close(values_L.cpu(), logits_LV.amax(-1), equal_nan=True)
    assert impl.likeliest(logits_LV[:0].to(device))[1].shape == (0,)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("vocabulary", "candidates"), [(5, 1), (5, 5), (2048, 20), (5000, 3), (5000, 20), (70, 40)])
def test_triton_draws_among_the_likeliest_as_the_reference_does(vocabulary, candidates, device):
    source = torch.Generator().manual_seed(5)
    logits_LV = 3 * torch.randn(12, vocabulary + 1, generator=source)[:, :vocabulary]
    logits_LV[2] = logits_LV[2].round()  # equals
    logits_LV[3, 1:] = float("-inf")  # one that a grammar allows
    rows_N = torch.tensor([0, 1, 2, 3, 5, 7, 8, 11])
    floats_N3 = torch.tensor(
        [[1.0, 1.0, float("-inf")], [0.6, 0.95, float("-inf")], [1.5, 0.5, -1.0], [0.7, 0.8, -3.0]]
    )
    floats_N3 = floats_N3.repeat(2, 1).contiguous()
    ints_N4 = torch.randint(0, 1 << 32, (8, 4), generator=source)
    ints_N4[:, 0] = torch.tensor([candidates, 0, 2, candidates, 1, 0, candidates, 3])
    given = [each.to(device) for each in (floats_N3, ints_N4)]
    for _ in range(5):
        given[1][:, 3] += 1
        want, got = (
            impl.draw_among(logits_LV.to(device), rows_N.to(device), candidates, *given) for impl in (reference, fast)
        )
        assert got.tolist() == want.tolist()
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert fast.draw_among(logits_LV.to(device), none, candidates, given[0][:0], given[1][:0]).shape == (0,)


@BOTH
@pytest.mark.parametrize("count", [1, 3, 40])
def test_tokens_are_kept_by_row_and_by_turn(impl, count, device):
    """Rows of padding are all row 0."""
    tokens_B = torch.arange(100, 100 + count, device=device)
    rows_B = torch.arange(count, 0, -1, dtype=torch.int32, device=device)
    rows_B[count // 2 + 1 :] = 0
    last_R, told_KB = torch.full((count + 2,), -5, device=device), torch.full((3, count), -6, device=device)
    impl.keep_tokens(tokens_B, rows_B, last_R, told_KB, torch.tensor([1], dtype=torch.int32, device=device))
    assert told_KB.tolist() == [[-6] * count, tokens_B.tolist(), [-6] * count]
    kept = {row: token for row, token in zip(rows_B.tolist(), tokens_B.tolist(), strict=True) if row}
    assert {row: int(last_R[row]) for row in range(1, count + 2)} == {
        row: kept.get(row, -5) for row in range(1, count + 2)
    }
