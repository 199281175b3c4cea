"""The shortlist: whatever is among the likeliest has its exact logit; nothing else is asked of it."""

import pytest
import torch

from shardwise.kernels.shortlist import reference
from shardwise.kernels.shortlist import triton as fast
from shardwise.kernels.shortlist.reference import make_shortlist

BOTH = pytest.mark.parametrize("impl", [reference, fast], ids=["reference", "triton"])


def head(rows: int, hidden: int, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(rows, hidden, generator=source) * (0.2 + torch.rand(rows, 1, generator=source))


def check(impl, x_LH, weight_VH, keep):
    """The `keep` largest are those of the head, the others exact or left out; how many are there."""
    want_LV = x_LH.float() @ weight_VH.float().T
    got_LV = impl.shortlist_logits(x_LH, weight_VH, make_shortlist(weight_VH), keep)
    assert got_LV.dtype == torch.float32
    there_LV = got_LV > float("-inf")
    torch.testing.assert_close(got_LV[there_LV], want_LV[there_LV], atol=1e-4, rtol=1e-4)
    best_LK = want_LV.topk(min(keep, weight_VH.shape[0]), -1).indices
    assert there_LV.gather(1, best_LK).all()
    return int(there_LV.sum())


@BOTH
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("count", "rows", "hidden", "keep"),
    [(1, 700, 256, 1), (3, 64, 200, 1), (9, 513, 256, 3), (2, 1, 48, 1), (1, 130, 300, 20), (0, 7, 64, 1)],
)
def test_the_likeliest_have_their_logits(impl, count, rows, hidden, keep, device):
    weight_VH = head(rows, hidden).half().to(device)
    x_LH = torch.randn(count, hidden, generator=torch.Generator().manual_seed(1)).half().to(device)
    found = check(impl, x_LH, weight_VH, keep)
    parts = -(-rows // fast.ROWS)
    if impl is reference or keep <= parts:  # the kernels take the largest lower bound of each part
        assert found <= count * max(8 * keep, 0.1 * rows)  # a list, not the head


@BOTH
@pytest.mark.usefixtures("poison")
def test_inputs_with_outliers_and_rows_alike(impl, device):
    """One large value takes the scale of a row; rows that differ by less than the copy can tell are all on the list."""
    weight_VH = head(300, 128).half()
    weight_VH[100:140] = weight_VH[100] + (torch.rand(40, 128) < 0.01) * weight_VH[100].abs() / 512
    x_LH = torch.randn(2, 128, generator=torch.Generator().manual_seed(2)).half()
    x_LH[0, 7] = 300.0
    x_LH[1] = weight_VH[100] * 3
    weight_VH[5, 3], weight_VH[6] = 40.0, 0.0
    assert check(impl, x_LH.to(device), weight_VH.to(device), 2) >= 40


@BOTH
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen(impl, value, device):
    weight_VH, x_LH = head(200, 64).half().to(device), torch.ones(3, 64, dtype=torch.float16, device=device)
    x_LH[1, 5] = value
    got_LV = impl.shortlist_logits(x_LH, weight_VH, make_shortlist(weight_VH), 1)
    assert got_LV.isnan().any(-1).tolist() == [False, True, False]
    weight_VH[9, 9] = value
    got_LV = impl.shortlist_logits(x_LH[:1], weight_VH, make_shortlist(weight_VH), 1)
    assert not got_LV.amax(-1).isfinite().any()


def test_a_copy_that_says_little_is_told(device):
    weight_VH = head(200, 2048).half().to(device)
    assert make_shortlist(weight_VH).sharp
    weight_VH[:, 3] *= 40
    assert not make_shortlist(weight_VH).sharp
    weight_VH[:] = 0
    assert make_shortlist(weight_VH).sharp


def test_rows_of_any_size_keep_their_bounds(device):
    """Squares of very small and of very large weights are no fp32."""
    plain_VH = head(300, 64).to(device)
    x_LH = torch.randn(2, 64, generator=torch.Generator().manual_seed(4)).to(device)
    for size in (1e-24, 1e25):
        sizes_V3 = make_shortlist(plain_VH * size).sizes_V3
        torch.testing.assert_close(sizes_V3 / size, make_shortlist(plain_VH).sizes_V3, rtol=1e-3, atol=1e-7)
        got_LV = fast.shortlist_logits(x_LH, plain_VH * size, make_shortlist(plain_VH * size), 1)
        assert got_LV.argmax(-1).tolist() == (x_LH @ plain_VH.T).argmax(-1).tolist()
